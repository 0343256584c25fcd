"""Several workers on one GPU, and one worker in a process of its own, beside the run in one process.

    python tests/gpu_workers.py OUT.json                      # about 4 minutes on an H200
    python tests/gpu_workers.py OUT.json large                # one of the parts
    python tests/gpu_workers.py OUT.json --device cpu         # tiny, to try the script

Enters: a device. Leaves: for each run its metrics, and how it differs from one process:

    small    a small model with deterministic kernels, one worker apart (NCCL, a group of one), two and four that share the card (gloo):
             how samples and parameters differ.
    large    0.5B, one process and one worker apart, step by step in turn: seconds of both, and the first divided by the second.

What was measured is written after every run, and a run that fails, or takes longer than `DEADLINE_S`, is kept with its error. Every
response has the same number of tokens, since random weights almost never draw an end token.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from statistics import median
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
from fulltilt.loop.opening import freeze_existing_objects
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
# Neither of two runs on one card takes what the other needs.
LARGE = (f"rollout.kv_bytes={12 * 2**30}", "actor.token_budget=16384", "actor.forward_token_budget=16384")
STEPS = 9  # of each run, of which the first warms up
TIMED = ("timing_s/gen", "timing_s/update_actor", "timing_s/step")
EQUAL = ("actor/pg_loss", "critic/score/mean")
Results = Callable[[str, dict[str, Any]], None]  # keeps what a run has measured, by its name, and writes it
Part = Callable[[Path, str, Results], None]
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
            with freeze_existing_objects():  # as a run does: collecting garbage among them may delay a step
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


def small(scratch: Path, device: str, found: Results) -> None:
    folder = make(scratch / "small", "small", device=device, prompts=16, samples=4)
    runs = {"one": (), "apart": (APART,), "two": (TWO,), "four": (FOUR,)}
    ended = train_at_once({name: (folder, (*SMALL, *own)) for name, own in runs.items()}, found)
    for name in ended if "one" in ended else ():
        found(name, attempt(partial(compare, folder, "one", name)))


def large(scratch: Path, device: str, found: Results) -> None:
    """Steps without the starts and checkpoints of runs. Both runs are there at the same time and take turns step by step, so that a machine
    which is slower for a while is slower for both."""
    tiny: dict[str, Any] = {"device": device, "prompts": 4, "samples": 2, "new_tokens": 16}
    folder = make(scratch / "large", "0.5B") if device == "cuda" else make(scratch / "large", "small", **tiny)
    with assembled(folder, *LARGE, APART) as apart, assembled(folder, *LARGE) as one:
        steps = {name: steps_of(parts, SHOWN, STEPS) for name, parts in {"one": one, "apart": apart}.items()}
        lines: dict[str, list[dict[str, Any]]] = {name: [] for name in steps}
        for number in range(STEPS):
            for name in sorted(steps, reverse=number % 2 == 0):  # neither is always the first
                lines[name].append(next(steps[name]))
                found(name, {key: [round(line[key], 5) for line in lines[name]] for key in SHOWN if key in lines[name][0]})
    seconds = {name: {key: median(line[key] for line in own[1:]) for key in TIMED} for name, own in lines.items()}
    found("compared", {key: seconds["one"][key] / seconds["apart"][key] for key in TIMED})
    found("compared", {f"equal {key}": [line[key] for line in lines["one"]] == [line[key] for line in lines["apart"]] for key in EQUAL})


PARTS: dict[str, Part] = {"small": small, "large": large}


def run_part(part: Callable[..., None], *given: Any) -> dict[str, Any]:
    begin = time.perf_counter()
    part(*given)
    return {"seconds": time.perf_counter() - begin}


def measure(description: str | None, parts: Mapping[str, Part]) -> None:
    """Measure the parts that the command line names, or all of them, and write what was measured after every run. One that fails does not
    keep the others from being measured."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("parts", nargs="*", choices=[*parts, []], default=[])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    given = parser.parse_args()
    os.environ["FULLTILT_SHARE_DEVICES"] = "1"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    name = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    document: dict[str, Any] = {"device": name, "versions": versions, "commit": commit(), "command": " ".join(sys.argv)}
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        for part in given.parts or parts:
            own = document.setdefault(part, {})

            def keep(run: str, result: dict[str, Any], own: dict[str, Any] = own) -> None:
                own[run] = own.get(run, {}) | result
                given.out.write_text(json.dumps(document, indent=1) + "\n")

            keep("all", attempt(partial(run_part, parts[part], Path(scratch), given.device, keep)))
            failed |= any("error" in each for each in own.values())
            print(part, json.dumps(own)[:1500], flush=True)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    measure(__doc__, PARTS)
