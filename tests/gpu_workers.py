"""Several workers on one GPU, and one worker in a process of its own, beside the run in one process.

    python tests/gpu_workers.py OUT.json                      # about 4 minutes on an H200
    python tests/gpu_workers.py OUT.json large                # one of the parts

Enters: a GPU. Leaves: for each run its metrics, and how its samples and its parameters differ from those of one process: `small`, a small
model with deterministic kernels, one worker apart (NCCL, a group of one), two and four sharing the card (gloo); `large`, 0.5B, one worker
apart twice, in turn with one process. What was measured is written after every run, and a run that fails, or takes longer than
`DEADLINE_S`, is kept with its error. Every response has the same number of tokens, since random weights almost never draw an end token.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from fulltilt import config as configuration
from fulltilt.bench import shapes, step
from fulltilt.bench.device import let_go
from fulltilt.bench.options import BenchOptions
from fulltilt.bench.report import commit
from fulltilt.cluster.assembly import RunParts, assemble, torch_as_it_was
from fulltilt.loop.run import Progress, Run
from fulltilt.observe.console import Console
from fulltilt.observe.loggers import Loggers
from fulltilt.schema import to_toml
from fulltilt.training.checkpoint import CheckpointStore

SHOWN = (
    "timing_s/gen", "timing_s/update_actor", "timing_s/step", "actor/grad_norm", "actor/pg_loss", "critic/score/mean", "actor/load_spread",
    "actor/micro_batches",
)  # fmt: skip
# The runs of the small model are on the card at the same time: what follows from free memory is fixed.
SIZES = (f"rollout.kv_bytes={2**30}", "actor.token_budget=8192", "actor.forward_token_budget=8192")
SMALL = ("run.deterministic=true", "run.steps=3", "train.lr=1e-5", "run.save_rollouts=64", *SIZES)
Results = Callable[[str, dict[str, Any]], None]  # keeps what a run has measured, by its name, and writes it
DEADLINE_S = 300.0  # of a run in processes of its own
APART, TWO, FOUR = "cluster.processes=true", "cluster.workers=2", "cluster.workers=4"


def make(folder: Path, shape: str, **options: Any) -> Path:
    """A folder with a model of random weights, prompts, a reward and a run file."""
    folder.mkdir()
    job = step.prepare(BenchOptions(model=shape, **options), folder)
    shapes.random_model(job.source, job.device, "sdpa").save_pretrained(job.config.model.path)
    torch.cuda.empty_cache()
    (folder / "run.toml").write_text(to_toml(job.config))
    return folder


def train(folder: Path, name: str, *settings: str) -> dict[str, Any]:
    begin = time.perf_counter()
    command = [sys.executable, "-m", "fulltilt", "train", "run.toml", f"run.dir={name}", "run.save_every=0", *settings]
    environment = {**os.environ, "NO_COLOR": "1", "FULLTILT_SHARE_DEVICES": "1"}  # two workers on one GPU
    said = folder / f"{name}.log"
    try:
        with said.open("w") as log:
            subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=log, timeout=DEADLINE_S, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        how = f"took more than {DEADLINE_S:.0f} s" if isinstance(error, subprocess.TimeoutExpired) else f"exit code {error.returncode}"
        raise RuntimeError(f"{how}: {said.read_text()[-4000:]}") from None  # what a run says last, with the stacks of workers that stall
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    found = {key: [line[key] for line in lines if key in line] for key in SHOWN}
    print(folder.name, name, json.dumps({key: [round(value, 5) for value in values] for key, values in found.items()}), flush=True)
    return {"settings": settings, "seconds": time.perf_counter() - begin, **found}


def compare(folder: Path, one: str, other: str) -> dict[str, Any]:
    models = [load_file(max((folder / name / "checkpoints").glob("step-*")) / "model" / "model.safetensors") for name in (one, other)]
    samples = [[path.read_text() for path in sorted((folder / name / "rollouts").glob("*.jsonl"))] for name in (one, other)]
    texts = [[[json.loads(line)["response"] for line in file.splitlines()] for file in files] for files in samples]
    return {
        "largest_difference": max(float((models[0][name].float() - models[1][name].float()).abs().max()) for name in models[0]),
        "equal_samples": [sum(a == b for a, b in zip(*pair, strict=True)) / len(pair[0]) for pair in zip(*texts, strict=True)],
    }


def attempt(measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What is measured, or why it is not: other runs go on. Nothing that the run has left on the device stays there."""
    try:
        return measured()
    except Exception as error:
        print(repr(error), flush=True)
        return {"error": repr(error)}
    finally:
        let_go(torch.device("cuda" if torch.cuda.is_initialized() else "cpu"))


def train_at_once(runs: Mapping[str, tuple[Path, Sequence[str]]], found: Results) -> dict[str, dict[str, Any]]:
    """Runs by their names, each with its folder and settings, at the same time: most of it is spent in starting. Returns those that have
    not failed."""

    def one(name: str) -> tuple[str, dict[str, Any]]:
        folder, settings = runs[name]
        return name, attempt(lambda: train(folder, name, *settings))

    ended = dict[str, dict[str, Any]]()
    with ThreadPoolExecutor(len(runs)) as at_once:
        for own in as_completed([at_once.submit(one, name) for name in runs]):
            name, result = own.result()
            found(name, result)
            ended |= {name: result} if "error" not in result else {}
    return ended


@contextlib.contextmanager
def assembled(folder: Path, *settings: str) -> Iterator[RunParts]:
    with contextlib.chdir(folder), torch_as_it_was():
        parts = assemble(configuration.load("run.toml", list(settings)))
        try:
            yield parts
        finally:
            parts.close()


def steps_of(parts: RunParts, shown: Sequence[str], steps: int, *, follows: bool = False) -> Iterator[dict[str, Any]]:
    """Metrics of each step: what it computed, its memory, and what its collectives moved. Nothing is saved. `follows`: token budgets follow
    the memory that is measured, as in a run."""
    config, console = parts.crew.config, Console(quiet=True, stdout=sys.stderr, terminal=False)
    run = Run(config, parts, CheckpointStore(Path(config.run.dir), 1), Progress(), console, Loggers(console.warn))
    for number in range(1, steps + 1):
        console.begin_step(number)
        begin = time.perf_counter()
        found = run.rl_step(number) if parts.samples else run.sft_step(number)
        if follows:
            run._follow_memory(found)
        yield {"seconds": time.perf_counter() - begin, **{name: value for name, value in found.items() if name.startswith(tuple(shown))}}


def small(scratch: Path, found: Results) -> None:
    folder = make(scratch / "small", "small", prompts=16, samples=4)
    runs = {"one": (), "apart": (APART,), "two": (TWO,), "four": (FOUR,)}
    ended = train_at_once({name: (folder, (*SMALL, *own)) for name, own in runs.items()}, lambda name, own: found(f"small/{name}", own))
    for name in ended if "one" in ended else ():
        found(f"small/{name}", attempt(partial(compare, folder, "one", name)))


def large(scratch: Path, found: Results) -> None:
    """Steps without the starts and checkpoints of runs. The first step of each run captures and compiles."""
    folder = make(scratch / "0.5B", "0.5B")
    for turn in ("first", "second"):
        for name, settings in {"one": (), "apart": (APART,)}.items():
            found(f"0.5B/{name}, {turn}", attempt(partial(five_steps, folder, *settings)))


def five_steps(folder: Path, *settings: str) -> dict[str, Any]:
    begin = time.perf_counter()
    with assembled(folder, *settings) as parts:
        started, lines = time.perf_counter() - begin, list(steps_of(parts, SHOWN, 5))
    print(settings, json.dumps(lines), flush=True)
    return {"start seconds": started, **{key: [round(line[key], 5) for line in lines] for key in SHOWN if key in lines[0]}}


PARTS: dict[str, Callable[[Path, Results], None]] = {"small": small, "large": large}


def main() -> None:
    out, runs = Path(sys.argv[1]), dict[str, Any]()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()}
    command = " ".join(["python tests/gpu_workers.py", *sys.argv[1:]])
    about = {"device": torch.cuda.get_device_name(), "versions": versions, "commit": commit(), "command": command}

    def found(name: str, result: dict[str, Any]) -> None:
        runs[name] = runs.get(name, {}) | result
        out.write_text(json.dumps({**about, "runs": runs}, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as scratch:
        for part in sys.argv[2:] or PARTS:
            found(part, attempt(partial(run_part, PARTS[part], Path(scratch), found)))
    if any("error" in run for run in runs.values()):
        sys.exit(1)


def run_part(part: Callable[..., None], *given: Any) -> dict[str, Any]:
    begin = time.perf_counter()
    part(*given)
    return {"seconds": time.perf_counter() - begin}


if __name__ == "__main__":
    main()
