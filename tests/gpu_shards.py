"""Parameters that workers share out (`train.shard`) and the queue of prompts, on one GPU that several workers share over gloo.

    python tests/gpu_shards.py OUT.json                       # about 4 minutes on an H200
    python tests/gpu_shards.py OUT.json equal memory          # some of the parts
    python tests/gpu_shards.py OUT.json --device cpu          # tiny, to try the script

Enters: a device. Leaves: for each part what it has measured:

    equal    a small model in float32 with deterministic kernels: one process, two workers with "full", four with "hybrid" in groups of two,
             two that compute each micro-batch together (sequence_parallel). Samples, losses and gradient norms beside those of one process.
    memory   0.5B in bfloat16 on two workers, "optimizer" and "full": peaks of each phase, bytes moved, seconds, gradient norms.
    queue    0.5B on two workers with few seats, samples of very different lengths: with the queue and without it in turn. Every prompt must
             be answered once.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from gpu_workers import Part, Results, assembled, attempt, compare, make, measure, steps_of, train_at_once

from fulltilt.cluster.assembly import RunParts
from fulltilt.data.order import Cursor
from fulltilt.loop.experience import sampling_of

TWO, FOUR = "cluster.workers=2", "cluster.workers=4"
FULL, HYBRID = "train.shard=full", ("train.shard=hybrid", "train.shard_size=2")
SEQUENCE = "train.sequence_parallel=2"
FUSED = "train.fused_layers=true"
EXACT = (
    "run.deterministic=true", "model.dtype=float32", "run.steps=2", "train.lr=1e-5", "run.save_rollouts=64", FUSED,
    f"rollout.kv_bytes={2**30}", "actor.token_budget=1024",
)  # fmt: skip
# Fixed, so that what is compared has the same micro-batches and caches. Gloo takes seconds for each micro-batch of 0.5B with "full".
SIZES = (f"rollout.kv_bytes={2**31}", "actor.token_budget=8192", "actor.forward_token_budget=8192")
STEPS, TURNS = 2, 2
SHOWN = (
    "actor/grad_norm", "actor/pg_loss", "critic/score/mean", "timing_s/", "perf/max_memory", "memory_gib/", "communication/", "sync/",
)  # fmt: skip


def equal(scratch: Path, device: str, found: Results) -> None:
    folder, runs = make(scratch / "equal", "small", device=device, prompts=8, samples=4), {"one": (), "full": (TWO, FULL)}
    runs |= {"hybrid": (FOUR, *HYBRID), "sequence": (TWO, SEQUENCE), "sequence, full": (TWO, SEQUENCE, FULL)}
    ended = train_at_once({name: (folder, (*EXACT, *own)) for name, own in runs.items()}, found)
    for name in ended if "one" in ended else ():
        found(name, differences(ended[name], ended["one"]) | attempt(partial(compare, folder, "one", name)))


def differences(own: Mapping[str, Any], one: Mapping[str, Any]) -> dict[str, Any]:
    """How far losses and gradient norms of each step are from those of one process, as a share of these."""
    return {
        f"difference of {key}": [abs(a - b) / max(abs(b), 1e-3) for a, b in zip(own[key], one[key], strict=True)]
        for key in ("actor/grad_norm", "actor/pg_loss")
    }


def memory(scratch: Path, device: str, found: Results) -> None:
    folder = make_large(scratch / "memory", device, prompts=16, samples=4)

    def measured(*settings: str) -> dict[str, Any]:
        with assembled(folder, *SIZES, TWO, FUSED, *settings) as parts:
            return {"notes": [*parts.notes, *parts.plan.words], "steps": list(steps_of(parts, SHOWN, STEPS))}

    for name, settings in {"optimizer": (), "full": (FULL,)}.items():
        found(name, attempt(partial(measured, *settings)))


def queue(scratch: Path, device: str, found: Results) -> None:
    folder = make_large(scratch / "queue", device, prompts=64 if device == "cuda" else 16, samples=8 if device == "cuda" else 4)
    model = json.loads((folder / "model" / "config.json").read_text())
    # With random weights all tokens are about as likely: samples have a geometric length, of 128 tokens on average.
    ends = list(range(model["vocab_size"] // (128 if device == "cuda" else 16)))
    (folder / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with assembled(folder, *SIZES, TWO, FUSED, f"rollout.max_seqs={64 if device == 'cuda' else 8}") as parts:
        assert parts.crew._queue == (device == "cuda"), "a run on CUDA that need not repeat to the bit has a queue"
        sample(parts, queued=True)  # warms up
        turns = [(queued, *sample(parts, queued=queued)) for _ in range(TURNS) for queued in (True, False)]
    _, _, first = turns[0]
    compared = {
        "seconds": {name: [seconds for queued, seconds, _ in turns if queued is own] for name, own in (("queue", True), ("dealt", False))},
        "samples": sum(map(len, first.values())),
        "tokens": sum(len(ids) for group in first.values() for ids in group),
        "equal_samples": [sum(a == b for place in first for a, b in zip(first[place], own[place], strict=True)) for _, _, own in turns],
    }
    found("queue", compared)


def sample(parts: RunParts, *, queued: bool) -> tuple[float, dict[int, list[list[int]]]]:
    """Seconds of a rollout, and the tokens of every sample by the prompt's place."""
    crew, config = parts.crew, parts.crew.config
    prompts, _ = parts.train_data.take(Cursor(), config.algorithm.prompts_per_step, config.run.seed, config.data.shuffle)
    sampling = sampling_of(config, config.rollout, config.algorithm.samples_per_prompt)
    crew._queue, begin = queued, time.perf_counter()
    with crew.phase("rollout"):
        groups = list(crew.generate(prompts, sampling, 0))  # type: ignore[arg-type]
    seconds = time.perf_counter() - begin
    assert Counter(group.place for group in groups) == Counter(range(len(prompts))), "a prompt was not answered once"
    assert all(len(group.samples) == sampling.samples for group in groups)
    return seconds, {group.place: [each.ids.tolist() for each in group.samples] for group in groups}


def make_large(folder: Path, device: str, **counts: int) -> Path:
    return make(folder, "0.5B", **counts) if device == "cuda" else make(folder, "small", device=device, new_tokens=24, **counts)


PARTS: dict[str, Part] = {"equal": equal, "memory": memory, "queue": queue}


if __name__ == "__main__":
    measure(__doc__, PARTS)
