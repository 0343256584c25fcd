"""A run on one GPU whose memory shrinks while it runs, and one whose responses grow: what it changes, and what that costs.

    python tests/gpu_control.py OUT.json                      # about 4 minutes on an H200
    python tests/gpu_control.py OUT.json memory               # one of the parts
    python tests/gpu_control.py OUT.json --device cpu         # tiny, to try the script

Enters: a device. Leaves: for each part what it has measured:

    memory   0.5B with deterministic kernels, three steps. After the first, torch's allocator may take less than the update needs, so that a
             mini-batch runs out of memory and is made again with a smaller budget. A second run has the same budgets from the same step on,
             and all memory: its parameters must have the same bits. (A CPU has no such limit: there both runs are undisturbed.)
    drift    0.5B, responses of 200 tokens on average that grow to 4,000, beside a run that begins with 4,000: tokens per second of the last
             steps of both, budgets, and how often memory ran out.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_workers import Results, assembled, attempt, make, measure, steps_of

from fulltilt.cluster.assembly import RunParts
from fulltilt.rollout.engines.native import NativeEngine
from fulltilt.tune.lengths import Lengths

SHOWN = (
    "actor/grad_norm", "actor/micro_batches", "memory_gib/update_actor/", "perf/", "response_length/", "rollout/preemptions", "timing_s/",
)  # fmt: skip
GIB = 2**30
SPARE = 0.4  # share of an update's activations that the allocator may no longer take
DRIFT = {"cuda": (200, 800, 2000, 4000, 4000), "cpu": (4, 8, 12, 12)}
MOST = {"cuda": 8192, "cpu": 24}
LAST = 1  # steps that are compared: those after the first with the longest responses


def digest(parts: RunParts) -> str:
    """The bits of the actor's parameters."""
    found = hashlib.sha256()
    for name, weight in parts.worker.weights():
        found.update(name.encode() + weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def memory(scratch: Path, device: str, found: Results) -> None:
    shape, prompts, samples, tokens = ("0.5B", 16, 8, 64) if device == "cuda" else ("small", 4, 2, 12)
    folder = make(scratch / "memory", shape, device=device, prompts=prompts, samples=samples, new_tokens=tokens, repeats=2)
    limited = attempt(lambda: three_steps(folder, limited=device == "cuda"))
    found("limited", limited)
    if "error" in limited:
        return
    undisturbed = attempt(lambda: three_steps(folder, [step["budgets"] for step in limited["steps"]]))
    found("undisturbed", undisturbed)
    same = {"same_parameters": limited["parameters"] == undisturbed["parameters"]} if "error" not in undisturbed else {}
    found("compared", {"out_of_memory": sum(step.get("perf/out_of_memory", 0) for step in limited["steps"]), **same})


def three_steps(folder: Path, budgets: Sequence[Mapping[str, int]] = (), *, limited: bool = False) -> dict[str, Any]:
    """`budgets`: those of each step, if not planned: what is free when a run starts is not the same in each. `limited`: after the first
    step torch's allocator may take less."""
    steps, about = list[dict[str, Any]](), dict[str, Any]()
    with assembled(folder, "run.deterministic=true", "train.lr=1e-5", f"rollout.kv_bytes={GIB}") as parts, contextlib.ExitStack() as after:
        if budgets:
            parts.crew.use_budgets(budgets[0])
        for line in steps_of(parts, SHOWN, 3):
            steps.append(line | {"budgets": asdict(parts.crew.budgets.now)})
            print(json.dumps(steps[-1]), flush=True)
            if budgets[len(steps) :]:
                parts.crew.use_budgets(budgets[len(steps)])
            if limited and len(steps) == 1:
                peak, activations = (line[f"memory_gib/update_actor/{kind}"] for kind in ("peak", "activations"))
                torch.cuda.empty_cache()
                about["limit_gib"] = peak - SPARE * activations
                after.callback(torch.cuda.set_per_process_memory_fraction, 1.0)
                torch.cuda.set_per_process_memory_fraction(about["limit_gib"] * GIB / torch.cuda.get_device_properties(0).total_memory)
        return {**about, "steps": steps, "parameters": digest(parts)}


def drift(scratch: Path, device: str, found: Results) -> None:
    prompts, samples = (16, 8) if device == "cuda" else (4, 2)
    folder = make(
        scratch / "drift", "0.5B" if device == "cuda" else "small", device=device, prompts=prompts, samples=samples,
        new_tokens=MOST[device], repeats=len(DRIFT[device]) - 1,
    )  # fmt: skip

    def measured(means: Sequence[int]) -> dict[str, Any]:
        with assembled(folder) as parts:
            grow(parts, means, prompts, samples, MOST[device])
            steps = list[dict[str, Any]]()
            for line in steps_of(parts, SHOWN, len(means), follows=True):
                steps.append(line | {"budgets": asdict(parts.crew.budgets.now)})
                print(json.dumps(steps[-1]), flush=True)
        tokens, seconds = (sum(line[key] for line in steps[-LAST:]) for key in ("perf/total_num_tokens", "seconds"))
        return {"means": means, "steps": steps, "tokens_per_s": tokens / seconds}

    runs = dict[str, dict[str, Any]]()
    for name, means in {"growing": DRIFT[device], "long from the start": DRIFT[device][-LAST - 1 :]}.items():
        runs[name] = attempt(partial(measured, means))
        found(name, runs[name])
    growing, long = runs.values()
    steps = [step for run in runs.values() for step in run.get("steps", ())]
    compared = {"out_of_memory": sum(step.get("perf/out_of_memory", 0) for step in steps)}
    if "error" not in growing and "error" not in long:
        compared["growing_of_long"] = growing["tokens_per_s"] / long["tokens_per_s"]
    found("compared", compared)


def grow(parts: RunParts, means: Sequence[int], prompts: int, samples: int, most: int) -> None:
    """Responses of each step have lengths around its mean, spread as those of real models are."""
    lengths = dict[tuple[int, int], int]()
    for step, mean in enumerate(means):
        usual = Lengths(1, most, 1.0, float(mean)).responses
        for place, (prompt, sample) in enumerate(itertools.product(range(prompts), range(samples))):
            length = usual[place * 37 % len(usual)]  # 37 has no common divisor with their number
            lengths[step * prompts + prompt, sample] = max(1, min(most, round(length)))
    engine = parts.worker.engine
    assert isinstance(engine, NativeEngine)
    engine.generate = partial(engine.generate, lengths=lengths)  # type: ignore[method-assign]


if __name__ == "__main__":
    measure(__doc__, {"memory": memory, "drift": drift})
