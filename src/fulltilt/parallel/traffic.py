"""What the collectives of a step move, predicted.

Enters: the trained parameters of each role that learns, as numbers of each by type, how many optimizer steps it makes, and the number of
workers. Leaves: bytes by kind of collective, as `Ranks.moved` counts them on every worker. Guaranteed: arithmetic alone, equal to the count
for steps whose gradients are finite (one that is skipped gathers nothing).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fulltilt.parallel.shard import ALIGN, padded

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
GRADIENT = 4  # bytes of a gradient, at least
NORM, FLAG = 8, 4  # bytes of the squared norm, and of what says for each parameter whether it has a gradient


@dataclass(frozen=True)
class Learner:
    """A role that learns. Example: Learner({"bfloat16": [(4096,), (64, 64)], "float32": [(64,)]}, updates=2)"""

    parameters: Mapping[
        str, Sequence[Sequence[int]]
    ]  # by type: how many numbers each parameter has, those that lie next to one another together
    updates: int  # optimizer steps: mini-batches times epochs


def predict(learners: Sequence[Learner], workers: int) -> Counter[str]:
    """Bytes on each of several workers in a step: every worker has all parameters and shares out optimizer states. In each optimizer step
    gradients are summed into a stretch for each worker, and new parameters gathered from all. No collective runs in rollouts or passes."""
    found: Counter[str] = Counter()
    for learner in learners:
        runs = [run for each in learner.parameters.values() for run in each]
        found["all-reduce"] += learner.updates * (NORM + FLAG * sum(map(len, runs)))
        for dtype, own in learner.parameters.items():
            total = padded(sum(padded(sum(run), ALIGN) for run in own), ALIGN * workers)
            found["reduce-scatter"] += learner.updates * total * max(ITEMSIZE[dtype], GRADIENT)
            found["all-gather"] += learner.updates * total * ITEMSIZE[dtype]
    return found


def sent_bytes(moved: Mapping[str, int], workers: int) -> float:
    """The fewest bytes that each worker can send, and receive, in such collectives: of what it has for the others, or needs from them,
    everything once; for an all-reduce twice."""
    return (workers - 1) / workers * sum((2 if kind == "all-reduce" else 1) * count for kind, count in moved.items())
