"""Workloads: the requests of a benchmark to an engine or a run.

Enters: a workload, a seed, a vocabulary. Leaves: `Requests`, prompts as token ids and the number of tokens that each sample gets.
Guaranteed: the lengths are quantiles of a stated distribution in an order drawn from the seed, so their mean is the same for every seed;
the same seed gives the same requests on every computer and for every engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from fulltilt.records import Prompt

GIB = 2**30
WARM_UP_TOKENS = 16  # tokens of each sample, if warming up with a whole pass would take too long


@dataclass(frozen=True)
class Even:
    """A distribution in which every length from `low` to `high` is equally frequent."""

    low: int
    high: int

    def quantile(self, share: float) -> float:
        return self.low + share * (self.high - self.low)


@dataclass(frozen=True)
class Lognormal:
    """A lognormal distribution, cut to `low` and `high`: many short lengths, few long ones, some at the limit, as responses have."""

    median: float
    sigma: float
    low: int
    high: int

    def quantile(self, share: float) -> float:
        return min(max(self.median * math.exp(self.sigma * NormalDist().inv_cdf(share)), self.low), self.high)


Spread = Even | Lognormal  # a distribution of lengths, by its quantiles


@dataclass(frozen=True)
class Workload:
    name: str
    prompts: int
    samples: int  # drawn for each prompt
    prompt_tokens: Spread
    response_tokens: Spread
    kv_bytes: int | None = None  # size of every engine's KV cache; None: each engine's default
    slow: bool = False  # passes take minutes: engines are warmed up with a few tokens a sample, vLLM is measured with log-probs only
    per_token: bool = False  # compared by the time of one token with all samples decoding, without prefill


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("design", 128, 8, Even(96, 512), Lognormal(319, 0.8, 16, 1024)),
        Workload("long", 192, 8, Even(256, 256), Lognormal(1490, 0.8, 1, 8192), kv_bytes=12 * GIB, slow=True),
        Workload("tail", 16, 1, Even(4096, 4096), Even(256, 256), per_token=True),
        Workload("whole", 4, 1, Even(256, 256), Even(32512, 32512), slow=True),
        # An eighth of `design` in every length, for two cores: takes seconds.
        Workload("small", 32, 4, Even(12, 64), Lognormal(40, 0.8, 2, 128)),
    )
}
STEP_WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("step", 64, 8, Even(128, 256), Even(512, 512)),
        # An eighth of every number but the group's, for two cores: takes seconds.
        Workload("small", 8, 8, Even(16, 32), Even(64, 64)),
    )
}


@dataclass(frozen=True, eq=False)
class Requests:
    """Requests that every engine gets, prompt after prompt. An engine learns a sample's length when it has drawn that many tokens."""

    workload: Workload
    seed: int
    prompts: tuple[Prompt, ...]
    lengths: Mapping[tuple[int, int], int]  # (uid of the prompt, index of the sample) -> tokens of the response

    @property
    def tokens(self) -> int:
        return sum(self.lengths.values())

    @property
    def longest_prompt(self) -> int:
        return max(len(prompt.ids) for prompt in self.prompts)

    @property
    def longest_response(self) -> int:
        """The limit that an engine must be ready for, not the longest of these responses."""
        return self.workload.response_tokens.high

    @property
    def positions(self) -> int:
        return self.longest_prompt + self.longest_response

    def cut(self, tokens: int) -> Requests:
        """Return the same requests with at most that many tokens for each sample. With 1, the prompts are prefilled and nothing is
        decoded."""
        return replace(self, lengths={sample: min(length, tokens) for sample, length in self.lengths.items()})

    def warm_up(self) -> Requests:
        return self.cut(WARM_UP_TOKENS) if self.workload.slow else self

    def describe(self) -> dict[str, Any]:
        workload = self.workload
        return {
            "name": workload.name,
            "seed": self.seed,
            "prompts": workload.prompts,
            "samples_per_prompt": workload.samples,
            "kv_bytes": workload.kv_bytes,
            "prompt_tokens": describe_lengths(workload.prompt_tokens, [len(prompt.ids) for prompt in self.prompts]),
            "response_tokens": describe_lengths(workload.response_tokens, list(self.lengths.values())),
        }


def describe_lengths(spread: Spread, lengths: list[int]) -> dict[str, Any]:
    total = sum(lengths)
    found = {"smallest": min(lengths), "mean": total / len(lengths), "largest": max(lengths), "total": total}
    return {"distribution": type(spread).__name__.lower(), **asdict(spread), **found}


def make_requests(workload: Workload, vocabulary: int, seed: int) -> Requests:
    random = np.random.default_rng(seed)
    sizes = drawn(workload.prompt_tokens, workload.prompts, random)
    responses = drawn(workload.response_tokens, workload.prompts * workload.samples, random)
    prompts = tuple(
        Prompt(uid=uid, ids=random.integers(0, vocabulary, size, dtype=np.int64), text="") for uid, size in enumerate(sizes.tolist())
    )
    samples = ((uid, index) for uid in range(workload.prompts) for index in range(workload.samples))
    return Requests(workload, seed, prompts, dict(zip(samples, responses.tolist(), strict=True)))


def drawn(spread: Spread, count: int, random: np.random.Generator) -> np.ndarray:
    """Return `count` lengths: the middles of as many equal shares of the distribution, shuffled."""
    lengths = np.array([round(spread.quantile((place + 0.5) / count)) for place in range(count)], dtype=np.int64)
    return random.permutation(lengths)
