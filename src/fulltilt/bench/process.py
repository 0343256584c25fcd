"""A peer in a process of its own, so that its memory is gone afterwards.

Enters: the module that runs there, and a request. Leaves: its answer. Guaranteed: none of its processes outlives the call; an answer is
whole or not there; what fails is told in the answer, under "error", with the end of what was printed where it died without a word.

    answer = ask("fulltilt.bench.vllm", request, folder)        # starts: python -m fulltilt.bench.vllm REQUEST.json RESULT.json
    serve(run)                                                  # what that module does: run(request, answer) fills the answer
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LIMIT_S = 3600.0  # of one start with all that is measured
LOG_LINES = 12
# Offline, and sampling without a compiler: vLLM's sampler of choice is built with nvcc where it is missing, for top-k and top-p only.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}


def ask(
    module: str, request: Mapping[str, Any], folder: Path, defaults: Mapping[str, str] | None = None, limit_s: float | None = None
) -> dict[str, Any]:
    """What `module` answers. `folder`: a new one, for files and the log; `defaults`: variables for where the environment has none."""
    folder.mkdir(parents=True)
    asked, answered, log = (folder / name for name in ("request.json", "result.json", "log.txt"))
    asked.write_text(json.dumps(request), encoding="utf-8")
    with log.open("w", encoding="utf-8") as written:
        child = subprocess.Popen(
            [sys.executable, "-m", module, str(asked), str(answered)],
            stdin=subprocess.DEVNULL, stdout=written, stderr=subprocess.STDOUT, start_new_session=True,
            env={**(defaults or {}), **own_environment(), **ENVIRONMENT},
        )  # fmt: skip
        try:
            child.wait(limit_s or LIMIT_S)
        except subprocess.TimeoutExpired:
            return {"error": f"took longer than {limit_s or LIMIT_S:.0f} s: {end_of(log)}"}
        finally:
            end_session(child)
    if not answered.exists():
        return {"error": f"ended with code {child.returncode}: {end_of(log)}"}
    answer: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8"))
    return answer


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


def serve(run: Callable[[Mapping[str, Any], dict[str, Any]], None]) -> None:
    """In the other process. What `run` had put into the answer before it failed is in it too."""
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
