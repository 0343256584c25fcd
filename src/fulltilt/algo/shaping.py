"""What an algorithm does to rewards before advantages: the penalty for long responses, and the KL penalty per token.

Enters: response lengths; rows with `old_logprobs` and `ref_logprobs`. Leaves: penalties, and rows with `token_rewards`. Guaranteed: pure
functions in float64 until the last rounding. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fulltilt.algo.advantage import per_token
from fulltilt.presets import LARGEST_ERROR
from fulltilt.records import Row


@dataclass(frozen=True)
class Overlong:
    """DAPO's soft penalty: none up to `longest - buffer` tokens, then growing linearly to `penalty` at `longest`."""

    longest: int  # rollout.max_new_tokens
    buffer: int  # above 0
    penalty: float

    def __call__(self, tokens: int) -> float:
        """What is added to the reward of a response of that length: 0 or less."""
        beyond = tokens - (self.longest - self.buffer)
        return -self.penalty * min(1.0, beyond / self.buffer) if beyond > 0 else 0.0


@dataclass(frozen=True)
class RewardKL:
    """A penalty on each token for moving away from the reference, with a weight that is fixed or follows a target."""

    coef: float  # at the start of the run
    target: float | None  # mean KL per token to aim for; None: the weight is fixed
    horizon: int  # samples over which the weight adapts
    estimator: Callable[[np.ndarray, np.ndarray], np.ndarray]  # KL from log-probs and reference log-probs

    def penalise(self, rows: Sequence[Row], coef: float) -> tuple[list[Row], float]:
        """The rows with `token_rewards`, and the mean over samples of the mean KL per token."""
        token_rewards, means = [], []
        for row in rows:
            assert row.old_logprobs is not None and row.ref_logprobs is not None, "the KL penalty needs old and reference log-probs"
            divergence = self.estimator(row.old_logprobs[row.mask].astype(np.float64), row.ref_logprobs[row.mask].astype(np.float64))
            rewards = -coef * divergence
            rewards[-1:] += row.reward
            token_rewards.append(rewards)
            if len(divergence):
                means.append(float(divergence.mean()))
        return per_token(rows, token_rewards=token_rewards), float(np.mean(means)) if means else 0.0

    def next_coef(self, coef: float, mean_kl: float, samples: int) -> float:
        """The weight of the next step: a fifth up or down at most for every `horizon` samples (Ziegler et al., 2019)."""
        if self.target is None:
            return coef
        error = min(LARGEST_ERROR, max(-LARGEST_ERROR, mean_kl / self.target - 1))
        return coef * (1 + error * samples / self.horizon)
