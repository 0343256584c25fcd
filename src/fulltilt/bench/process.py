"""A peer in a process of its own, so that its memory is gone afterwards.

Enters: the module that runs there, and a request. Leaves: its answer. Guaranteed: none of its processes outlives the call, nor the caller,
however that ends; an answer is whole or not there; what fails is told in the answer, under "error", with the end of what was printed where
it died without a word.

    answer = ask("fulltilt.bench.trl", request, folder)         # starts: python -m fulltilt.bench.trl REQUEST.json RESULT.json
    serve(run)                                                  # what that module does: run(request, answer) fills the answer

Peers that take minutes to start can start together and be measured one after another:

    with Peer(module, request, folder) as peer:
        peer.wait_until_ready()                                 # in its `run`, the peer calls wait_for_turn()
        answer = peer.measure()
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LIMIT_S = 3600.0  # of one start with all that is measured
LOG_LINES = 12
LOOK_S = 0.05  # between looks at a flag
LOOK_AT_PARENT_S = 1.0
READY, TURN = "ready", "turn"
# Offline, and sampling without a compiler: vLLM's sampler of choice is built with nvcc where it is missing, for top-k and top-p only.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}


class Peer:
    """A process that was started. Inside `with`: none of its own processes is left afterwards. `folder`: a new one, for files and the log;
    `defaults`: variables for where the environment has none."""

    def __init__(self, module: str, request: Mapping[str, Any], folder: Path, defaults: Mapping[str, str] | None = None) -> None:
        folder.mkdir(parents=True)
        asked, self.answered, self.log = (folder / name for name in ("request.json", "result.json", "log.txt"))
        self.begin = time.monotonic()
        asked.write_text(json.dumps(request), encoding="utf-8")
        with self.log.open("w", encoding="utf-8") as written:
            self.child = subprocess.Popen(
                [sys.executable, "-m", module, str(asked), str(self.answered)],
                stdin=subprocess.DEVNULL, stdout=written, stderr=subprocess.STDOUT, start_new_session=True,
                env={**(defaults or {}), **own_environment(), **ENVIRONMENT},
            )  # fmt: skip

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        end_session(self.child)

    def wait_until_ready(self) -> None:
        """Or until it has ended, or until its time is up: `measure` tells which."""
        while self.child.poll() is None and not flag(self.answered, READY).exists() and time.monotonic() - self.begin < LIMIT_S:
            time.sleep(LOOK_S)

    def measure(self, limit_s: float | None = None) -> dict[str, Any]:
        """Its answer, once it had its turn."""
        flag(self.answered, TURN).touch()
        limit_s = limit_s or LIMIT_S
        try:
            self.child.wait(max(0.0, limit_s - (time.monotonic() - self.begin)))
        except subprocess.TimeoutExpired:
            return {"error": f"took longer than {limit_s:.0f} s: {end_of(self.log)}"}
        finally:
            end_session(self.child)
        if not self.answered.exists():
            return {"error": f"ended with code {self.child.returncode}: {end_of(self.log)}"}
        answer: dict[str, Any] = json.loads(self.answered.read_text(encoding="utf-8"))
        return answer


def ask(
    module: str, request: Mapping[str, Any], folder: Path, defaults: Mapping[str, str] | None = None, limit_s: float | None = None
) -> dict[str, Any]:
    """What `module` answers."""
    with Peer(module, request, folder, defaults) as peer:
        return peer.measure(limit_s)


def own_environment() -> dict[str, str]:
    """In which this package is found, though it need not be installed."""
    source = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))}


def end_session(child: subprocess.Popen[Any]) -> None:
    """The peer's own processes hold the device's memory: none may outlive the one that started them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def end_of(log: Path) -> str:
    return " | ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])


def flag(answered: Path, name: str) -> Path:
    """A file whose presence one process tells the other something with."""
    return answered.with_name(name)


# -- in the other process -----------------------------------------------------------------------------------------------------------------


def wait_for_turn() -> None:
    """Said to be ready, until it is this process's turn to be measured."""
    answered = Path(sys.argv[2])
    flag(answered, READY).touch()
    while not flag(answered, TURN).exists():
        time.sleep(LOOK_S)


def end_with_parent() -> None:
    """A parent that was killed could not end this session, which would hold the device for nobody."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_AT_PARENT_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def serve(run: Callable[[Mapping[str, Any], dict[str, Any]], None]) -> None:
    """In the other process. What `run` had put into the answer before it failed is in it too."""
    end_with_parent()
    asked, answered = map(Path, sys.argv[1:])
    answer: dict[str, Any] = {}
    try:
        run(json.loads(asked.read_text(encoding="utf-8")), answer)
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    # Under another name first: the parent must not read half a file if this process is killed.
    partial = answered.with_suffix(".partial")
    partial.write_text(json.dumps(answer), encoding="utf-8")
    partial.rename(answered)
