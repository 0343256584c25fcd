"""Other systems, each in a process of its own, so that its memory is gone afterwards.

Enters: a request, as JSON, and the module of this package that answers it. Leaves: the answer, or why there is none under "error".
Guaranteed: no process that was started outlives the call; a request that fails, dies or takes too long is an answer with its error and
never an exception; nobody reads half an answer.

    python -m MODULE REQUEST.json ANSWER.json        (what `ask` starts; the module's `main` hands its arguments to `serve`)
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

LOG_LINES = 12

Answer = dict[str, Any]


def ask(module: str, request: Mapping[str, Any], scratch: Path, environment: Mapping[str, str], limit_s: float) -> Answer:
    """What the module's process prints goes to a log in `scratch`, whose end becomes the error where it dies without a word."""
    scratch.mkdir(parents=True)
    asked, answered, log = (scratch / name for name in ("request.json", "result.json", "log.txt"))
    asked.write_text(json.dumps(request), encoding="utf-8")
    with log.open("w", encoding="utf-8") as written:
        child = subprocess.Popen(
            [sys.executable, "-m", module, str(asked), str(answered)],
            stdin=subprocess.DEVNULL, stdout=written, stderr=subprocess.STDOUT, env=own_environment() | dict(environment),
            start_new_session=True,
        )  # fmt: skip
        try:
            child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return {"error": f"took longer than {limit_s:.0f} s: {end_of(log)}"}
        finally:
            end_session(child)
    if not answered.exists():
        return {"error": f"ended with code {child.returncode}: {end_of(log)}"}
    answer: Answer = json.loads(answered.read_text(encoding="utf-8"))
    return answer


def own_environment() -> dict[str, str]:
    """In which this package is found, though it need not be installed."""
    source = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))}


def end_session(child: subprocess.Popen[Any]) -> None:
    """Processes that it started may hold the device's memory: none may outlive it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def end_of(log: Path) -> str:
    return " | ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])


def serve(asked: Path, answered: Path, run: Callable[[Mapping[str, Any], Answer], None], result: Answer) -> None:
    """In the other process: `run` fills `result` as it goes, so that what it had before it failed is in the answer too."""
    request = json.loads(asked.read_text(encoding="utf-8"))
    try:
        run(request, result)
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    # Under another name first: the parent must not read half a file if this process is killed.
    partial = answered.with_suffix(".partial")
    partial.write_text(json.dumps(result), encoding="utf-8")
    partial.rename(answered)
