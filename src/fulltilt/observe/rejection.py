"""Metrics of rejection: distances between trainer and engine by each criterion, and what each criterion alone would reject, under verl's
names.

Enters: rows with their `distances`. Leaves: `CriteriaSums`, which `+` joins over workers, and its metrics. Guaranteed: tokens and samples
are counted before any rejection, for every criterion in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from fulltilt.observe.spread import Spread
from fulltilt.records import Distances, Row

PREFIX = "rollout_corr/rollout_rs_"


@dataclass(frozen=True)
class CriterionSums:
    """Sums for the metrics of one criterion; `+` joins those of several workers."""

    distances: Spread = field(default_factory=Spread)  # distances over all tokens
    bounded: Spread = field(default_factory=Spread)  # the same, with those beyond a bound set to the bound
    samples: Spread = field(default_factory=Spread)  # the mean distance of each sample
    above: Spread = field(default_factory=Spread)  # 1 where the distance is above the upper bound; tokens, or samples by such a criterion
    below: Spread = field(default_factory=Spread)  # 1 where the distance is below the lower bound
    samples_above: Spread = field(default_factory=Spread)  # 1 where the mean distance of a sample is above the upper bound
    samples_below: Spread = field(default_factory=Spread)
    rejected: Spread = field(default_factory=Spread)  # 1 for each token that this criterion rejects
    touched: Spread = field(default_factory=Spread)  # 1 for each sample with such a token

    @classmethod
    def of(cls, rows: Sequence[Distances]) -> CriterionSums:
        rows = [row for row in rows if len(row.tokens)]
        if not rows:
            return cls()
        first, tokens = rows[0], np.concatenate([row.tokens for row in rows])
        means = np.array([row.tokens.mean() for row in rows])
        numbers = means if first.whole else tokens
        lowest = first.low if math.isfinite(first.low) else 0.0
        kept = np.concatenate([row.kept for row in rows])
        touched = np.array([not row.kept.all() for row in rows])
        of_tokens = (tokens, tokens.clip(lowest, first.high), means, numbers > first.high, numbers < first.low)
        return cls(*[Spread.of(each) for each in (*of_tokens, means > first.high, means < first.low, ~kept, touched)])

    def __add__(self, other: CriterionSums) -> CriterionSums:
        return CriterionSums(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def metrics(self, name: str) -> dict[str, float]:
        if not self.distances.count:
            return {}
        unbiased = self.samples.squares / (self.samples.count - 1) if self.samples.count > 1 else 0.0
        found = {
            "mean": self.distances.mean,
            "max": self.distances.most,
            "min": self.distances.least,
            "std": math.sqrt(self.bounded.variance),
            "fraction_high": self.above.mean,
            "fraction_low": self.below.mean,
            "seq_mean": self.samples.mean,
            "seq_std": math.sqrt(unbiased),
            "seq_max": self.samples.most,
            "seq_min": self.samples.least,
            "seq_max_deviation": max(abs(self.samples.most), abs(self.samples.least)),
            "seq_fraction_high": self.samples_above.mean,
            "seq_fraction_low": self.samples_below.mean,
            "masked_fraction": self.rejected.mean,
            "seq_masked_fraction": self.touched.mean,
        }
        return {f"{PREFIX}{name}_{part}": value for part, value in found.items()}


@dataclass(frozen=True)
class CriteriaSums:
    """The sums of every criterion, by its name."""

    of: Mapping[str, CriterionSums] = field(default_factory=dict)

    @classmethod
    def of_rows(cls, rows: Sequence[Row]) -> CriteriaSums:
        found = [row.distances for row in rows if row.distances is not None]
        names = dict.fromkeys(name for each in found for name in each)
        return cls({name: CriterionSums.of([each[name] for each in found]) for name in names})

    def __add__(self, other: CriteriaSums) -> CriteriaSums:
        names = dict.fromkeys((*self.of, *other.of))
        return CriteriaSums({name: self.of.get(name, CriterionSums()) + other.of.get(name, CriterionSums()) for name in names})

    def metrics(self) -> dict[str, float]:
        return {key: value for name, own in self.of.items() for key, value in own.metrics(name).items()}
