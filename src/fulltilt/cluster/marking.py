"""Marks of a mini-batch's tokens by statistics over all the workers that compute it.

Enters: an algorithm whose loss treats some tokens apart, and the workers that train together. Leaves: the function that a trainer calls
with its micro-batches before their first backward. Guaranteed: all workers mark by the same statistics; a worker that computes the same
tokens as a neighbour, each a part of every layer or stream, does not count them again. All workers must call the function at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import fsum

import numpy as np
import torch

from fulltilt.algo.advantage import Everyone, exact_parts
from fulltilt.algo.base import MarkFunction
from fulltilt.parallel.ranks import Ranks
from fulltilt.records import MicroBatch
from fulltilt.training.roles import Role
from fulltilt.training.trainer import Marking


class TrainingWorkers(Everyone):
    def __init__(self, role: Role, ranks: Ranks) -> None:
        self.role, self.ranks = role, ranks

    def gather(self, numbers: Sequence[float]) -> list[float]:
        own = torch.tensor(numbers if self.role.tells else [], dtype=torch.float64, device=self.role.device)
        if self.ranks.alone:
            return own.tolist()
        most = self.ranks.most(len(own), self.role.device)
        # Each worker's stretch begins with the count of its numbers.
        flat = own.new_zeros(self.ranks.size * (1 + most))
        stretch = self.ranks.own(flat)
        stretch[0], stretch[1 : 1 + len(own)] = len(own), own
        self.ranks.gather(flat)
        return [number for count, *found in flat.view(self.ranks.size, -1).tolist() for number in found[: int(count)]]

    def sum(self, numbers: Sequence[float]) -> float:
        return fsum(self.gather(exact_parts(numbers)))


def marking(marks: MarkFunction | None, role: Role, ranks: Ranks) -> Marking | None:
    return partial(mark, marks=marks, everyone=TrainingWorkers(role, ranks)) if marks else None


def mark(
    batches: Sequence[MicroBatch], logprobs: Sequence[np.ndarray], update: int, marks: MarkFunction, everyone: Everyone
) -> list[MicroBatch]:
    found = marks(batches, logprobs, update=update, everyone=everyone)
    return [replace(micro, marked=marked) for micro, marked in zip(batches, found, strict=True)]
