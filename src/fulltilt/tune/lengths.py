"""Distribution of response lengths, if only their mean and limit are known: the spread, the longest, and the tokens of a micro-batch.

Enters: mean tokens of prompts and responses, and the limits. Leaves: a frozen `Lengths`, whose responses are log-normal with `SPREAD`, cut
at the limit, so that their mean is the given one. Guaranteed: arithmetic alone, the same numbers each time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from statistics import NormalDist

from fulltilt.tune.constants import SPREAD

# From this share of the limit on, a mean says that responses end at the limit: some at first, and with the second share all of them.
SOME_ALIKE, ALL_ALIKE = 0.9, 0.98
PARTS = 128  # lengths that represent all, each for an equal share of the responses
NORMAL = NormalDist()


@dataclass(frozen=True)
class Lengths:
    most_prompt: int = 2048
    most_response: int = 8192
    prompt: float = 128.0  # mean
    response: float = 1024.0  # mean
    validated: int = 0  # most tokens of a response in validations, which have the same KV cache

    @property
    def mean(self) -> float:
        """Mean tokens of prompt and response together."""
        return self.prompt + self.response

    @property
    def longest_row(self) -> int:
        """Most tokens that a row may have."""
        return self.most_prompt + self.most_response

    @property
    def longest_sampled(self) -> int:
        """Most tokens of a sample in the KV cache."""
        return self.most_prompt + max(self.most_response, self.validated)

    @cached_property
    def median(self) -> float:
        """Median of the log-normal distribution; infinite if all responses are as long as the limit."""
        return median_response(self.response, self.most_response)

    @property
    def alike(self) -> float:
        """The share of responses that are taken to be equally long: none of them below `SOME_ALIKE`."""
        return min(1.0, max(0.0, (self.response / self.most_response - SOME_ALIKE) / (ALL_ALIKE - SOME_ALIKE)))

    @cached_property
    def responses(self) -> tuple[float, ...]:
        """Lengths that represent all responses, ascending."""
        return tuple(self._cut(factor) for factor in factors())

    def longest_of(self, count: int) -> float:
        """Return the expected length of the longest of `count` responses."""
        if count < 2:
            return self.response
        return max(self.response, self._cut(math.exp(SPREAD * NORMAL.inv_cdf((count - 0.44) / (count + 0.12)))))

    def _cut(self, factor: float) -> float:
        """Return `factor` times the median response, at most the limit."""
        return self.response if math.isinf(self.median) else min(float(self.most_response), self.median * factor)

    @cached_property
    def rows(self) -> list[int]:
        """Prompt and response tokens of rows that represent all rows."""
        return [max(1, round(self.prompt + response)) for response in self.responses]

    @cached_property
    def variation(self) -> float:
        """Standard deviation of the tokens of a row, as a share of their mean."""
        mean = sum(self.rows) / PARTS
        return math.sqrt(sum((row - mean) ** 2 for row in self.rows) / PARTS) / mean

    @property
    def prompt_width(self) -> float:
        """Difference between the longest and the shortest prompt, if prompts are spread evenly about their mean; 0 if the mean rules that
        out."""
        low = 2 * self.prompt - self.most_prompt
        return self.most_prompt - low if low > 0 else 0.0

    def micro_batch_tokens(self, samples: int, batches: int, of_prompt: int = 1) -> float:
        """Return the expected tokens of the largest of `batches` micro-batches of `samples` rows: one row is the longest of all, the others
        are of mean length. `of_prompt`: rows of the same prompt, which are neighbours."""
        alike = min(samples, of_prompt)
        longer = above_all(batches) * alike * math.sqrt(samples / alike) * self.prompt_width / math.sqrt(12)  # prompts vary too
        usual = self.prompt + self.longest_of(samples * batches) + (samples - 1) * self.mean
        return min(samples * self.longest_row, usual + longer)

    def imbalance(self, workers: int, rows: int) -> float:
        """Return the expected tokens of the worker with the most, as a multiple of the mean, if each of `workers` has `rows` random
        rows."""
        if workers < 2:
            return 1.0
        return 1 + above_all(workers) * self.variation / math.sqrt(max(1, rows))


@cache
def above_all(count: int) -> float:
    """Return the expected largest of `count` normal numbers (Blom 1958), in standard deviations."""
    return NORMAL.inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


@cache
def factors() -> tuple[float, ...]:
    """Return the lengths that represent all, in medians, ascending."""
    return tuple(math.exp(SPREAD * NORMAL.inv_cdf((part + 0.5) / PARTS)) for part in range(PARTS))


@cache
def median_response(mean: float, most: int) -> float:
    """Return the median of the log-normal distribution that has this mean when it is cut at the limit."""
    if mean >= ALL_ALIKE * most:
        return math.inf
    low, high = mean / 100, 100.0 * most
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if sum(min(most, middle * factor) for factor in factors()) / PARTS < mean else (low, middle)
    return low
