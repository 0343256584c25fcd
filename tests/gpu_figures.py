"""A part of what docs/performance.md and docs/planning.md say of one GPU and of workers that share it, measured by one command.

    python tests/gpu_figures.py OUT                           # all parts, about 30 minutes on an H200
    python tests/gpu_figures.py OUT graphs equal              # some of them
    python tests/gpu_figures.py OUT --minutes 9               # as many as end within 9 minutes
    python tests/gpu_figures.py OUT equal predictions-0.5B --device cpu       # tiny, to try the script

Enters: a folder and a device. Leaves: OUT/figures.json, written anew after every part: for each its command, exit code, seconds, what it
has measured, and the end of its output. Guaranteed: parts run in the order of the table below, one after another, but for neighbours that
compare results and measure no time, which run together; a part that fails does not end the others; none runs longer than its limit, and
when the time is up what runs is ended with its children. The exit code is 1 if a part failed or did not run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import torch

from fulltilt.bench.report import commit

ROOT = Path(__file__).resolve().parents[1]
SHOWN_LINES = 60  # of a part's output, its end
ENDED_S = 20  # that a part has to end its children when it is told to


@dataclass(frozen=True)
class Part:
    """A command that writes what it has measured to a file."""

    command: Sequence[str]  # OUT stands for that file
    limit_s: int
    together: bool = False  # with its neighbours, as it measures no time
    tiny: Sequence[str] = ()  # the command without a GPU


@dataclass
class Running:
    name: str
    command: Sequence[str]
    limit_s: int
    process: subprocess.Popen[bytes]
    out: Path
    log: IO[bytes]
    begin: float


def predictions(model: str, prompts: int, samples: int, tokens: int, *tried: str, steps: int = 2) -> Part:
    """Settings whose sizes no constant of the models of memory and time was fitted to (docs/bench/predictions_fit.json, jobs.json)."""
    tries = [word for setting in tried for word in ("--try", setting)]
    sizes = ["--prompts", str(prompts), "--samples", str(samples), "--new-tokens", str(tokens)]
    command = ["-m", "fulltilt", "bench", "settings", "--turns", "1", "--quiet", "--out", "OUT"]
    sizes_on_cpu = ["--device", "cpu", "--prompts", "2", "--samples", "2", "--new-tokens", "8"]
    tiny = [*command, "--steps", "1", *sizes_on_cpu, "--try", "train.recompute=full"]
    return Part([*command, "--steps", str(steps), "--model", model, *sizes, *tries], 300, tiny=tiny)


def script(name: str, *parts: str, limit_s: int, together: bool = False) -> Part:
    command = [f"tests/{name}.py", "OUT", *parts]
    return Part(command, limit_s, together, tiny=[*command, "--device", "cpu"])


def tests(chosen: str, limit_s: int, together: bool = False) -> Part:
    command = ["-m", "pytest", "-q", "-rfEs", "-p", "no:cacheprovider", "-m", "gpu", "-k", chosen, "--junitxml", "OUT", "tests/test_gpu.py"]
    return Part(command, limit_s, together)


PARTS: Mapping[str, Part] = {
    "graphs": tests("graph or whole or leave_the_device", 240, together=True),
    "equal": script("gpu_parts", "equal", limit_s=240, together=True),
    "workers": script("gpu_workers", "large", limit_s=240),
    "predictions-0.5B": predictions(
        "0.5B", 24, 8, 768,
        "train.recompute=full", "actor.token_budget=16384 train.fused_head=false", "rollout.max_seqs=96 train.offload_optimizer=true",
        "train.recompute=selective actor.token_budget=16384", "train.head_recompute=true rollout.max_seqs=160",
    ),
    "predictions-1.5B": predictions(
        "1.5B", 12, 8, 768,
        "train.recompute=selective actor.token_budget=8192", "rollout.max_seqs=48", "train.recompute=full train.offload_optimizer=true",
        "train.head_recompute=true actor.token_budget=16384",
    ),
    "predictions-7B": predictions(
        "7B", 12, 4, 640, "train.recompute=full", "actor.token_budget=8192 train.fused_head=false", "rollout.max_seqs=24", steps=1,
    ),
    "predictions-2.7B-A0.5B": predictions(
        "2.7B-A0.5B", 20, 8, 448, "train.recompute=full", "actor.token_budget=8192", "train.offload_optimizer=true",
    ),
    "predictions-0.5B-short": predictions(
        "0.5B", 28, 8, 576,
        "rollout.max_seqs=128", "train.recompute=full actor.token_budget=8192", "train.head_recompute=true",
        "train.recompute=selective train.offload_optimizer=true",
    ),
    "predictions-1.5B-short": predictions(
        "1.5B", 20, 4, 640,
        "train.fused_head=false actor.token_budget=8192", "rollout.max_seqs=56 train.recompute=full", "train.recompute=selective",
        "actor.token_budget=32768", steps=1,
    ),
    "predictions-7B-short": predictions(
        "7B", 8, 6, 448, "train.recompute=full actor.token_budget=8192", "rollout.max_seqs=32", "train.recompute=selective", steps=1,
    ),
    "predictions-2.7B-A0.5B-short": predictions(
        "2.7B-A0.5B", 24, 8, 320, "train.recompute=full", "rollout.max_seqs=96", "train.head_recompute=true",
    ),
    "control": script("gpu_control", limit_s=300),
    "long": script("gpu_parts", "long", limit_s=600),
}  # fmt: skip


def main() -> int:
    asked = arguments()
    device, out = asked.device, Path(asked.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * asked.minutes
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    found: dict[str, Any] = {"device": name, "versions": versions, "commit": commit(), "parts": dict.fromkeys(asked.parts or PARTS)}
    write(out, found)
    for _, group in groupby(found["parts"], key=lambda part: PARTS[part].together or part):
        for result in results(list(group), device, out, ends):
            found["parts"] |= result
            write(out, found)
    missing = [part for part, result in found["parts"].items() if result is None or result["exit_code"] != 0]
    print(f"failed or left out: {', '.join(missing) or 'none'}", flush=True)
    return 1 if missing else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--minutes", type=float, default=60.0, help="when this time is up, what runs is ended")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    asked = parser.parse_intermixed_args()
    if unknown := [part for part in asked.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; the parts are {', '.join(PARTS)}")
    return asked


def results(names: Sequence[str], device: str, out: Path, ends: float) -> Iterator[dict[str, Any]]:
    """What parts that run together have measured, each when it has ended."""
    running = list[Running]()
    for name in names:
        part = PARTS[name]
        if device == "cpu" and not part.tiny:
            print(f"{name}: needs a GPU", flush=True)
        elif time.monotonic() < ends:
            running.append(start(name, part, device, out))
    while running:
        time.sleep(0.2)
        for one in list(running):
            limit = min(one.begin + one.limit_s, ends)
            if one.process.poll() is None and time.monotonic() < limit:
                continue
            stop(one.process)
            running.remove(one)
            yield {one.name: result(one)}


def start(name: str, part: Part, device: str, out: Path) -> Running:
    print(f"{name}: started", flush=True)
    found = out / f"{name}.found"
    command = [str(found) if word == "OUT" else word for word in (part.command if device == "cuda" else part.tiny)]
    log = (out / f"{name}.log").open("w+b")
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    return Running(name, command, part.limit_s, process, found, log, time.monotonic())


def stop(process: subprocess.Popen[bytes]) -> None:
    """The process and its children. One that has ended by itself may have left some."""
    for wanted in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, wanted)
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDED_S)


def result(one: Running) -> dict[str, Any]:
    """What a part has measured, also where it was ended before its end. Its files are in it, so they are deleted."""
    seconds = time.monotonic() - one.begin
    one.log.seek(0)
    lines = one.log.read().decode(errors="replace").splitlines()[-SHOWN_LINES:]
    one.log.close()
    text = one.out.read_text() if one.out.exists() else ""
    try:
        measured = json.loads(text) if text else None
    except json.JSONDecodeError:
        measured = text
    for path in (one.out, Path(one.log.name)):
        path.unlink(missing_ok=True)
    code = one.process.returncode
    print("\n".join([f"{one.name}: exit code {code} after {seconds:.0f} s", *lines[-3:]]), flush=True)
    command = " ".join(["python", *one.command]).replace(str(one.out), "OUT")
    return {"command": command, "exit_code": code, "seconds": round(seconds, 1), "measured": measured, "output": lines}


def write(out: Path, found: Mapping[str, Any]) -> None:
    unfinished = out / "figures.json.new"
    unfinished.write_text(json.dumps(found, indent=1) + "\n")
    unfinished.replace(out / "figures.json")


if __name__ == "__main__":
    sys.exit(main())
