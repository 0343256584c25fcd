"""Statistics of some numbers for metrics: count, mean, spread and extremes, which `+` joins over workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Spread:
    """Statistics of some numbers, for metrics. Those of several workers are joined by `+`."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0  # sum of the squared distances to the mean
    most: float = -math.inf
    least: float = math.inf

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> Spread:
        array = np.asarray(values, dtype=np.float64)
        if not len(array):
            return cls()
        squares = np.square(array - array.mean()).sum()
        return cls(len(array), float(array.sum()), float(squares), float(array.max()), float(array.min()))

    def __add__(self, other: Spread) -> Spread:
        if not self.count or not other.count:
            return self if self.count else other
        between = (self.mean - other.mean) ** 2 * (self.count * other.count / (self.count + other.count))
        return Spread(
            self.count + other.count,
            self.total + other.total,
            self.squares + other.squares + between,
            max(self.most, other.most),
            min(self.least, other.least),
        )

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def variance(self) -> float:
        return self.squares / self.count

    def metrics(self, name: str) -> dict[str, float]:
        # Without numbers there is no mean: the name is left out instead of having a meaningless number.
        return {f"{name}/mean": self.mean, f"{name}/max": self.most, f"{name}/min": self.least} if self.count else {}
