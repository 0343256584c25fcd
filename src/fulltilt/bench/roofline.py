"""The roofline: the least time in which a device can decode some requests.

Enters: the lengths of all samples, the cost of a step of the model, the bandwidth and the arithmetic of a device. Leaves: seconds, or why
there are none. Guaranteed: the formula of docs/bench.md and nothing else; no torch.

    seconds = sum over decode steps of max((weights + KV read) / bandwidth, FLOPs / peak)

The steps are those of an engine that wastes nothing: in each, all samples that fit, in order, get a token each; admission, preemption and
prefill are free.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fulltilt.hardware import ACCELERATORS


@dataclass(frozen=True)
class Device:
    bandwidth: float  # bytes/s to and from memory, nominal
    flops: float  # dense bfloat16 FLOP/s, nominal


# By the driver's name; the first pattern that matches counts.
DEVICES = {own.driver: Device(own.hbm, own.flops) for own in ACCELERATORS if own.driver}


@dataclass(frozen=True)
class StepCost:
    """The cost of one decode step with B samples whose contexts (prompt and response so far) have T tokens together."""

    weight_bytes: int  # read once a step, whatever the number of samples
    kv_bytes_per_token: int  # read for each of the T tokens
    flops_per_sample: float  # two for every weight by which a token is multiplied
    flops_per_context_token: float  # scores and weighted sums of attention


def device_named(name: str) -> Device | None:
    return next((device for pattern, device in DEVICES.items() if re.search(pattern, name)), None)


def decode_steps(prompts: Sequence[int], responses: Sequence[int], most_tokens: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield batch and context tokens of each step. A sample's first token comes from its prefill. `most_tokens`: capacity of the KV
    cache."""
    prompt, response = np.array(prompts, dtype=np.int64), np.array(responses, dtype=np.int64)
    drawn = np.ones(len(prompt), dtype=np.int64)
    while True:
        running = np.flatnonzero(drawn < response)
        if not len(running):
            return
        held = np.cumsum(prompt[running] + drawn[running])
        count = len(running) if most_tokens is None else max(1, int(np.searchsorted(held, most_tokens, side="right")))
        yield count, int(held[count - 1])
        drawn[running[:count]] += 1


def bound(steps: Iterator[tuple[int, int]], cost: StepCost, device: Device) -> dict[str, float]:
    batch, context = np.array([*steps], dtype=np.float64).reshape(-1, 2).T
    moved = cost.weight_bytes + cost.kv_bytes_per_token * context
    worked = cost.flops_per_sample * batch + cost.flops_per_context_token * context
    in_memory, in_arithmetic = moved / device.bandwidth, worked / device.flops
    return {
        "seconds": float(np.maximum(in_memory, in_arithmetic).sum()),
        "steps": len(batch),
        "memory_bound_steps": int((in_memory >= in_arithmetic).sum()),
        "bytes": float(moved.sum()),
        "flops": float(worked.sum()),
    }
