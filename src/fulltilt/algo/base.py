"""The Algorithm record: everything that the loop and the trainer know about an algorithm, with its changes to rewards before advantages.

It is data. No code outside this package branches on an algorithm's name: the loop reads `needs`, shapes rewards, calls `advantage` on the
rows of a step, passes `aggregation` and `length_norm` to batching, and the trainer calls `loss` on every micro-batch. Penalties are
computed in float64 until the last rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fulltilt.algo.advantage import HERE, Everyone, per_token
from fulltilt.presets import LARGEST_ERROR, Setting
from fulltilt.records import LossParts, MicroBatch, Row, TokenTerms, ValueTerms


class AdvantageFunction(Protocol):
    """Maps all rows of a step, or the groups that one of several workers holds, to the same rows, in the same order, with `advantages`."""

    def __call__(self, rows: Sequence[Row], *, everyone: Everyone = HERE) -> list[Row]: ...


class MarkFunction(Protocol):
    """Maps the micro-batches of a mini-batch, or a worker's part of it, and the policy's log-probs to the marked tokens of each
    micro-batch."""

    def __call__(
        self, batches: Sequence[MicroBatch], logprobs: Sequence[np.ndarray], *, update: int = 0, everyone: Everyone = HERE
    ) -> list[np.ndarray]: ...


LossFunction = Callable[[TokenTerms], LossParts]
ValueLossFunction = Callable[[ValueTerms], LossParts]

NEEDS = frozenset({"rollout", "ref_logprobs", "old_logprobs", "sharp_logprobs", "values", "baseline"})


@dataclass(frozen=True)
class DynamicSampling:
    """Settings of sampling until a step has enough useful groups."""

    useful: Callable[[np.ndarray], bool]  # whether to train on a group, given its rewards before shaping, without failed ones
    prompts_per_round: int
    max_rounds: int


@dataclass(frozen=True)
class Overlong:
    """DAPO's soft penalty: none up to `longest - buffer` tokens, then growing linearly to `penalty` at `longest`."""

    longest: int  # rollout.max_new_tokens
    buffer: int  # above 0
    penalty: float

    def __call__(self, tokens: int) -> float:
        """Return the number that is added to the reward of a response of that length: 0 or less."""
        beyond = tokens - (self.longest - self.buffer)
        return -self.penalty * min(1.0, beyond / self.buffer) if beyond > 0 else 0.0


@dataclass(frozen=True)
class RewardKL:
    """A penalty on each token for moving away from the reference, with a weight that is fixed or follows a target."""

    coef: float  # weight of the penalty at the start of the run
    target: float | None  # mean KL per token to aim for; None: the weight is fixed
    horizon: int  # samples over which the weight adapts
    estimator: Callable[[np.ndarray, np.ndarray], np.ndarray]  # KL from log-probs and reference log-probs

    def penalise(self, rows: Sequence[Row], coef: float) -> tuple[list[Row], list[float]]:
        """Return the rows with `token_rewards`, and the mean KL per token of each row; NaN if no token is trained."""
        token_rewards, means = [], []
        for row in rows:
            assert row.old_logprobs is not None and row.ref_logprobs is not None, "the KL penalty needs old and reference log-probs"
            divergence = self.estimator(row.old_logprobs[row.mask].astype(np.float64), row.ref_logprobs[row.mask].astype(np.float64))
            rewards = -coef * divergence
            rewards[-1:] += row.reward
            token_rewards.append(rewards)
            means.append(float(divergence.mean()) if len(divergence) else math.nan)
        return per_token(rows, token_rewards=token_rewards), means

    def mean_kl(self, means: Sequence[float]) -> float:
        """Return the mean over the rows that have any trained token."""
        known = [mean for mean in means if not math.isnan(mean)]
        return float(np.mean(known)) if known else 0.0

    def next_coef(self, coef: float, mean_kl: float, samples: int) -> float:
        """Return the weight of the next step: at most a fifth more or less for every `horizon` samples (Ziegler et al., 2019)."""
        if self.target is None:
            return coef
        error = min(LARGEST_ERROR, max(-LARGEST_ERROR, mean_kl / self.target - 1))
        return coef * (1 + error * samples / self.horizon)


@dataclass(frozen=True)
class Algorithm:
    name: str
    advantage: AdvantageFunction  # computes `advantages`, if the loss reads them
    loss: LossFunction
    aggregation: str  # how batching weights the tokens of a mini-batch
    length_norm: int  # divisor, for the aggregation that needs one
    needs: frozenset[str]  # subset of NEEDS: "rollout" (samples and rewards), "baseline" (a greedy sample of each prompt, scored), and the
    # per-token numbers to annotate rows with
    entropy_gradient: bool  # whether the entropy of `TokenTerms` must carry a gradient
    settings: Mapping[str, Setting]  # every number of the preset that is used, for people to read
    value_loss: ValueLossFunction | None = None  # the critic's loss, if the algorithm needs values; `advantage` then also sets `returns`
    critic_warmup: int = 0  # number of first steps in which only the critic is updated
    dynamic: DynamicSampling | None = None
    overlong: Overlong | None = None
    advantage_alone: bool = False  # whether a sample whose advantages are all 0 adds nothing to the gradient of `loss`
    reward_kl: RewardKL | None = None
    correct: AdvantageFunction | None = None  # compares rows with the engine that sampled them, before anything else is computed from them
    marks: MarkFunction | None = None  # chooses tokens that `loss` treats differently, before the first backward of a mini-batch
    reward_parts: tuple[str, ...] = ()  # parts of the reward that `advantage` reads
    own_advantage: bool = False  # whether `advantage` is a user's function, which may read all rows of a step

    def __post_init__(self) -> None:
        assert self.needs <= NEEDS, f"unknown needs {sorted(self.needs - NEEDS)}"
        assert (self.value_loss is not None) == ("values" in self.needs), "a critic is trained if and only if its values are read"
