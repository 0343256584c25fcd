"""Rollout correction: treatment of tokens to which trainer and engine give different probabilities.

Enters: log-probs of the trainer before the step's first update and of the engine that sampled. Leaves: an importance weight for each token,
and rows without the tokens that are rejected. Guaranteed: float64 until the last rounding; a row's result depends on its own tokens alone,
except for the normalisation, which is exact over all rows of the step, wherever they are; the rows keep their order.

An importance weight is the trainer's probability over the engine's, of a token or of a whole sample, truncated at a cap, or set to 0
outside of two bounds. It multiplies the policy's loss. A rejected token is not trained on and counts in no denominator, whitening included;
its sample's reward still counts in the group's baseline. Bypass uses the engine's log-probs as the old ones, so that the ratio of the loss
itself is the correction. docs/algorithms.md has verl's names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, log
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fulltilt.algo.advantage import HERE, Everyone
from fulltilt.records import Distances, Row

if TYPE_CHECKING:
    from torch import Tensor

Numbers = TypeVar("Numbers", "np.ndarray", "Tensor")

# exp(20) is about 5e8: larger than any meaningful ratio, and far below where float32 overflows and the infinity of an unused branch
# turns the gradient into NaN.
LOG_RATIO_BOUND = 20.0
SMALLEST_PROBABILITY = 1e-6  # smallest probability, and distance of the largest from 1, of the two outcomes that the binary KL compares
SMALLEST_MEAN = 1e-8  # smallest mean by which weights are still divided


def bernoulli_kl(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """Return the KL between the choices "this token" and "another one" under two policies."""
    p, q = (np.exp(each).clip(SMALLEST_PROBABILITY, 1 - SMALLEST_PROBABILITY) for each in (log_p, log_q))
    return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))


# Distances between trainer and engine at each token, from the log-probs of both.
DISTANCES: Mapping[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "k1": lambda trainer, engine: engine_over_trainer(trainer, engine),
    "k2": lambda trainer, engine: engine_over_trainer(trainer, engine) ** 2 / 2,
    "k3": lambda trainer, engine: np.expm1(-engine_over_trainer(trainer, engine)) + engine_over_trainer(trainer, engine),
    "binary_kl": lambda trainer, engine: np.maximum(bernoulli_kl(trainer, engine), bernoulli_kl(engine, trainer)),
}
# Functions that combine the tokens' distances into one for the whole sample.
LEVELS: Mapping[str, Callable[[np.ndarray], Any]] = {
    "token": lambda distances: distances,
    "seq_sum": np.sum,
    "seq_mean": np.mean,
    "seq_max": np.max,
}


def engine_over_trainer(trainer: np.ndarray, engine: np.ndarray) -> np.ndarray:
    """Return the log of the engine's probability over the trainer's, within +-20."""
    return (engine - trainer).clip(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


@dataclass(frozen=True)
class Criterion:
    """A test that every trained token must pass, alone or with its whole sample."""

    level: str  # one of LEVELS
    distance: str  # one of DISTANCES
    low: float  # bounds of the distance
    high: float

    @staticmethod
    def of(name: str, bounds: float | Sequence[float]) -> Criterion:
        """Make a criterion. `name`: verl's name, for example seq_mean_k3. The bounds of k1 are ratios, a single u stands for 1/u and u;
        others have an upper bound only."""
        level, _, distance = ("token", "", name) if name == "binary_kl" else name.rpartition("_")
        low, high = (None, bounds) if isinstance(bounds, float | int) else bounds
        assert high is not None
        if distance == "k1":
            return Criterion(level, distance, -log(high) if low is None else log(low), log(high))
        assert low is None, f"{name} has an upper bound only"
        return Criterion(level, distance, -inf, high)

    @property
    def name(self) -> str:
        return self.distance if self.distance == "binary_kl" else f"{self.level}_{self.distance}"

    def distances(self, trainer: np.ndarray, engine: np.ndarray) -> Distances:
        """Return the distances between trainer and engine at each token of a sample."""
        found = LEVELS[self.level](DISTANCES[self.distance](trainer, engine)) if len(trainer) else 0.0
        return Distances(np.broadcast_to(found, trainer.shape), self.low, self.high, whole=self.level != "token")


@dataclass(frozen=True)
class Correction:
    cap: float = 0.0  # the largest importance weight; 0: there is no bound
    floor: float | None = None  # weights below the floor or above the cap are 0; None: weights above the cap become the cap
    whole_samples: bool = False  # the weight is the sample's, the product over its tokens
    normalised: bool = False  # weights are divided by their mean over the step
    bypass: bool = False  # the engine's log-probs are used as the old ones, without a weight
    criteria: tuple[Criterion, ...] = ()  # tokens that fail one of them are rejected

    def truncated(self, ratio: Numbers) -> Numbers:
        if self.floor is None:
            return ratio.clip(max=self.cap)
        return ratio * ((ratio >= self.floor) & (ratio <= self.cap))

    def apply(self, rows: Sequence[Row], *, everyone: Everyone = HERE) -> list[Row]:
        """Return the rows with their `importance`, and with rejected tokens removed from their masks."""
        weights: list[np.ndarray | None] = [None] * len(rows)
        if self.cap > 0:
            found = [self._weights(*logprobs_of(row)) for row in rows]
            scale = self._mean(found, everyone) if self.normalised else 1.0
            weights = [own / scale for own in found]
        return [self._corrected(row, own) for row, own in zip(rows, weights, strict=True)]

    def _weights(self, trainer: np.ndarray, engine: np.ndarray) -> np.ndarray:
        gap = trainer - engine
        gap = np.full_like(gap, gap.sum()) if self.whole_samples else gap
        return self.truncated(np.exp(gap.clip(max=LOG_RATIO_BOUND)))

    def _mean(self, weights: Sequence[np.ndarray], everyone: Everyone) -> float:
        """Return the mean over tokens; for weights of whole samples, over samples."""
        counted = [own[:1] if self.whole_samples else own for own in weights]
        numbers = np.concatenate([np.zeros(0), *counted])
        total, count = everyone.sum(numbers.tolist()), everyone.sum([len(numbers)])
        return total / count if count and total / count > SMALLEST_MEAN else 1.0

    def _corrected(self, row: Row, weights: np.ndarray | None) -> Row:
        fields: dict[str, Any] = {}
        if weights is not None:
            fields["importance"] = np.zeros(row.tokens, np.float32)
            fields["importance"][row.mask] = weights
        if self.criteria:
            fields["distances"] = {each.name: each.distances(*logprobs_of(row)) for each in self.criteria}
            kept = np.logical_and.reduce([each.kept for each in fields["distances"].values()])
            fields["mask"] = row.mask.copy()
            fields["mask"][row.mask] = kept
            fields["rejected"] = int(np.count_nonzero(~kept))
        return replace(row, **fields)


def logprobs_of(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """Return the trainer's and the engine's log-probs of the trained tokens, float64."""
    assert row.old_logprobs is not None and row.rollout_logprobs is not None, "the correction compares old and rollout log-probs"
    return row.old_logprobs[row.mask].astype(np.float64), row.rollout_logprobs[row.mask].astype(np.float64)
