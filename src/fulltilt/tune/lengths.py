"""Lengths of responses, of which only the mean and the limit are known: their spread, the longest, and what a micro-batch holds.

Enters: mean tokens of prompts and responses, and the limits. Leaves: a frozen `Lengths`, whose responses are log-normal with `SPREAD`, cut
at the limit, so that their mean is the given one. Guaranteed: arithmetic alone, the same numbers each time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from statistics import NormalDist

from fulltilt.tune.constants import SPREAD

PARTS = 128  # lengths that stand for all, each for an equal share of the responses
NORMAL = NormalDist()


@dataclass(frozen=True)
class Lengths:
    most_prompt: int = 2048
    most_response: int = 8192
    prompt: float = 128.0  # mean
    response: float = 1024.0  # mean

    @property
    def mean(self) -> float:
        """Prompt and response."""
        return self.prompt + self.response

    @property
    def longest_row(self) -> int:
        """Tokens that a row may have."""
        return self.most_prompt + self.most_response

    @cached_property
    def median(self) -> float:
        """That of the log-normal distribution; infinite where all responses are as long as they may be."""
        return median_response(self.response, self.most_response)

    @cached_property
    def responses(self) -> tuple[float, ...]:
        """Lengths that stand for all responses, ascending."""
        return tuple(self._cut(factor) for factor in factors())

    def longest_of(self, count: int) -> float:
        """The longest response to expect among `count`."""
        if count < 2:
            return self.response
        return max(self.response, self._cut(math.exp(SPREAD * NORMAL.inv_cdf((count - 0.44) / (count + 0.12)))))

    def _cut(self, factor: float) -> float:
        """A response of so many medians, which ends at the limit."""
        return self.response if math.isinf(self.median) else min(float(self.most_response), self.median * factor)

    @cached_property
    def rows(self) -> list[int]:
        """Prompt and response tokens of rows that stand for all."""
        return [max(1, round(self.prompt + response)) for response in self.responses]

    @cached_property
    def variation(self) -> float:
        """Standard deviation of a row's tokens, as a share of their mean."""
        mean = sum(self.rows) / PARTS
        return math.sqrt(sum((row - mean) ** 2 for row in self.rows) / PARTS) / mean

    @property
    def prompt_width(self) -> float:
        """How far the longest prompt is from the shortest, if they are spread evenly about their mean; 0 where the mean rules that out."""
        low = 2 * self.prompt - self.most_prompt
        return self.most_prompt - low if low > 0 else 0.0

    def micro_batch_tokens(self, samples: int, batches: int, of_prompt: int = 1) -> float:
        """Tokens to expect in the largest of so many micro-batches of `samples` rows: one is the longest of all, the others are usual.
        `of_prompt`: rows of the same prompt, which are neighbours."""
        alike = min(samples, of_prompt)
        longer = above_all(batches) * alike * math.sqrt(samples / alike) * self.prompt_width / math.sqrt(12)  # prompts vary too
        usual = self.prompt + self.longest_of(samples * batches) + (samples - 1) * self.mean
        return min(samples * self.longest_row, usual + longer)

    def imbalance(self, workers: int, rows: int) -> float:
        """How many times the mean the worker with most tokens has, where each of `workers` has `rows` rows at random."""
        if workers < 2:
            return 1.0
        return 1 + above_all(workers) * self.variation / math.sqrt(max(1, rows))


@cache
def above_all(count: int) -> float:
    """The largest of so many normal numbers to expect (Blom 1958), in standard deviations."""
    return NORMAL.inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


@cache
def factors() -> tuple[float, ...]:
    """Lengths that stand for all, in medians, ascending."""
    return tuple(math.exp(SPREAD * NORMAL.inv_cdf((part + 0.5) / PARTS)) for part in range(PARTS))


@cache
def median_response(mean: float, most: int) -> float:
    """The median of the log-normal distribution that has this mean once it is cut at the limit."""
    if mean >= 0.98 * most:
        return math.inf
    low, high = mean / 100, 100.0 * most
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if sum(min(most, middle * factor) for factor in factors()) / PARTS < mean else (low, middle)
    return low
