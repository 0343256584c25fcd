"""Other systems: their drivers, and the separate processes in which measured programs run, so that their memory is freed afterwards.

Enters: a peer's name, or a program and, for a peer, a request. Leaves: the peer's driver, a started process, or the peer's answer.
Guaranteed: if drivers are missing, the error says how to get them; no process outlives the call, nor the caller, however that ends; an
answer is complete or missing; a failure is in the answer under "error", with the end of the log if the process died silently.

A script calls `serve(run)`, where `run(request, answer)` fills the answer, and calls `wait_for_turn()` if peers start together. `python -m
fulltilt.bench.peers PROGRAM ...` runs a script or a module and ends it with its parent; this is the command of `start`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from fulltilt.observe.metrics import write_whole
from fulltilt.records import UserError

VARIABLE = "FULLTILT_BENCHMARKS"
LIMIT_S = 3600.0  # most seconds for one start with all its measurements
LOG_LINES = 12
LOOK_S = 0.05  # seconds between checks of a flag
LOOK_AT_PARENT_S = 1.0
READY, TURN = "ready", "turn"  # files beside the answer whose presence is a signal between the two processes
# Offline, and sampling without a compiler: if vLLM's preferred sampler, which only top-k and top-p use, is missing, it is built with nvcc.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}


# -- comparisons and drivers, which are in the repository's folder `benchmarks/` and not part of the installed package ---------------------


def benchmark(name: str) -> ModuleType:
    """Return the module of `fulltilt bench NAME`: in this package, or in `benchmarks/` if it compares whole runs with other systems'."""
    inside = f"fulltilt.bench.{name}"
    return importlib.import_module(inside) if importlib.util.find_spec(inside) else load(name)


def load(name: str) -> ModuleType:
    """Load benchmarks/NAME.py from the folder that the variable names, or from this checkout."""
    file = Path(os.environ.get(VARIABLE) or Path(__file__).parents[3] / "benchmarks") / f"{name}.py"
    if not file.is_file():
        raise UserError(
            f"{name}.py, which this benchmark needs, is not in {file.parent}. It is in the folder benchmarks of fulltilt's repository, not "
            f"in the installed package: install fulltilt from a clone with pip install -e, or set {VARIABLE} to that folder"
        )
    module_name = f"fulltilt_benchmarks_{name}"
    if (known := sys.modules.get(module_name)) and known.__file__ == str(file):
        return known
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec and spec.loader
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def installed(module: str) -> bool:
    """Return whether a package is installed. A folder of that name in the current directory does not count."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


# -- processes ----------------------------------------------------------------------------------------------------------------------------


def start(
    program: str | Path, arguments: list[str], log: Path, variables: Mapping[str, str] | None = None, *, piped: bool = False
) -> subprocess.Popen[str]:
    """Start a script by its path, or a module by its name, in a session of its own, with this package importable even if it is not
    installed. `piped`: standard output can be read line by line instead of going into the log."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    with log.open("w", encoding="utf-8") as written:
        return subprocess.Popen(
            [sys.executable, "-m", "fulltilt.bench.peers", str(program), *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE if piped else written, stderr=written if piped else subprocess.STDOUT,
            start_new_session=True, env={**(os.environ if variables is None else variables), "PYTHONPATH": path}, text=True,
        )  # fmt: skip


class Peer(contextlib.AbstractContextManager["Peer"]):
    """A started process. After its use as a context, none of its own processes is left. `folder`: a new one, for files and the log;
    `defaults`: variables used if the environment has none."""

    def __init__(self, script: Path, request: Mapping[str, Any], folder: Path, defaults: Mapping[str, str] | None = None) -> None:
        folder.mkdir(parents=True)
        self.folder, self.answered, self.log = folder, folder / "result.json", folder / "log.txt"
        self.begin = time.monotonic()
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        variables = {**(defaults or {}), **os.environ, **ENVIRONMENT}
        self.child = start(script, [str(folder / "request.json"), str(self.answered)], self.log, variables)

    def __exit__(self, *_: object) -> None:
        end_session(self.child)

    def wait_until_ready(self) -> None:
        """Wait until the process is ready. Returns also when it has ended or its time is up: `measure` reports which."""
        while self.child.poll() is None and not (self.folder / READY).exists() and time.monotonic() - self.begin < LIMIT_S:
            time.sleep(LOOK_S)

    def measure(self, limit_s: float | None = None) -> dict[str, Any]:
        """Let the process work, and return its answer."""
        (self.folder / TURN).touch()
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


def end_session(child: subprocess.Popen[str]) -> None:
    """Kill the child and its own processes: these hold the device's memory and must not outlive it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def end_of(log: Path) -> str:
    return " | ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])


# -- in the other process -----------------------------------------------------------------------------------------------------------------


def wait_for_turn() -> None:
    """Report that this process is ready, and wait until it is its turn to be measured."""
    folder = Path(sys.argv[2]).parent
    (folder / READY).touch()
    while not (folder / TURN).exists():
        time.sleep(LOOK_S)


def serve(run: Callable[[Mapping[str, Any], dict[str, Any]], None]) -> None:
    """Answer the request. Entries that `run` had put into the answer before it failed are kept."""
    asked, answered = map(Path, sys.argv[1:])
    answer: dict[str, Any] = {}
    try:
        run(json.loads(asked.read_text(encoding="utf-8")), answer)
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    write_whole(answered, json.dumps(answer))


def end_with_parent() -> None:
    """End this session with its parent: a parent that was killed could not end it, and it would hold the device for nothing."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_AT_PARENT_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    end_with_parent()
    del sys.argv[0]
    if sys.argv[0].endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
