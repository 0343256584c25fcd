"""Marks: the tokens that a loss treats differently, chosen by the statistics of a whole mini-batch.

Enters: the micro-batches of a mini-batch, or of a worker's part of it, and the policy's log-probs of their tokens. Leaves: for each
micro-batch, which tokens are marked. Guaranteed: the same tokens for any number of micro-batches and of workers, since sums are exact, ties
are decided by row and position, and chance is a function of the seed, the update, the row and the position.

The covariance of a token is (A - mean A) (log p - mean log p), means over the trained tokens of the mini-batch: tokens where it is large
are those that make the entropy fall ("The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", Cui et al., 2025).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fulltilt.algo.advantage import HERE, Everyone
from fulltilt.records import MicroBatch


class TrainedTokens:
    """All trained tokens of some micro-batches, concatenated."""

    def __init__(self, batches: Sequence[MicroBatch], logprobs: Sequence[np.ndarray], *, bypass: bool) -> None:
        """Collect the tokens. `bypass`: the engine's log-probs are the old ones. Without old ones, the policy's own are used."""
        nothing = np.zeros(0)
        pairs = list(zip(batches, logprobs, strict=True))
        olds = [(micro.rollout_logprobs if bypass else micro.old_logprobs, own) for micro, own in pairs]
        self.sizes = [len(own) for own in logprobs]
        self.logprobs = np.concatenate([nothing, *logprobs])
        self.old = np.concatenate([nothing, *(own if old is None else old for old, own in olds)])
        self.advantages = np.concatenate([nothing, *(micro.advantages for micro in batches if micro.advantages is not None)])
        assert len(self.advantages) == len(self.logprobs), "tokens without an advantage"
        self.rows = np.concatenate([nothing, *(np.array(micro.rows)[micro.trained_row] for micro in batches)])
        self.positions = np.concatenate([nothing, *(micro.positions[micro.trained] for micro in batches)])

    def covariances(self, everyone: Everyone) -> np.ndarray:
        count = max(1.0, everyone.sum([len(self.logprobs)]))
        advantages, logprobs = (each - everyone.sum(each.tolist()) / count for each in (self.advantages, self.logprobs))
        return advantages * logprobs

    def split(self, marked: np.ndarray) -> list[np.ndarray]:
        """Split marks into one array for each micro-batch."""
        return np.split(marked, np.cumsum(self.sizes)[:-1]) if self.sizes else []


def largest(
    batches: Sequence[MicroBatch], logprobs: Sequence[np.ndarray], cov_share: float, *,
    bypass: bool = False, seed: int = 0, update: int = 0, everyone: Everyone = HERE,
) -> list[np.ndarray]:  # fmt: skip
    """Mark the share of tokens whose covariance is largest; at least one token (KL-Cov)."""
    tokens = TrainedTokens(batches, logprobs, bypass=bypass)
    count = max(1, int(cov_share * everyone.sum([len(tokens.logprobs)])))
    return tokens.split(smallest(-tokens.covariances(everyone), tokens, count, everyone))


def some_between(
    batches: Sequence[MicroBatch], logprobs: Sequence[np.ndarray], cov_share: float, cov_low: float, cov_high: float, clip_low: float,
    clip_high: float, *, bypass: bool = False, seed: int = 0, update: int = 0, everyone: Everyone = HERE,
) -> list[np.ndarray]:  # fmt: skip
    """Mark a share of all tokens, at least one, drawn among those whose covariance is between two bounds and whose ratio is not clipped
    (Clip-Cov)."""
    tokens = TrainedTokens(batches, logprobs, bypass=bypass)
    count = max(1, int(cov_share * everyone.sum([len(tokens.logprobs)])))
    covariances, gap = tokens.covariances(everyone), tokens.logprobs - tokens.old
    clipped = ((tokens.advantages > 0) & (gap > np.log1p(clip_high))) | ((tokens.advantages < 0) & (np.expm1(gap) < -clip_low))
    candidates = (covariances > cov_low) & (covariances < cov_high) & ~clipped
    drawn = np.where(candidates, noise(seed, update, tokens.rows, tokens.positions), np.inf)
    return tokens.split(smallest(drawn, tokens, count, everyone))


def smallest(numbers: np.ndarray, tokens: TrainedTokens, count: int, everyone: Everyone) -> np.ndarray:
    """Return which tokens have the `count` smallest numbers among those of all processes; infinite numbers do not count."""
    keys = np.stack([numbers, tokens.rows, tokens.positions], axis=1)
    offered = ordered(keys[np.isfinite(numbers)])[:count]
    found = ordered(np.array(everyone.gather(offered.ravel().tolist())).reshape(-1, 3))[:count]
    if not len(found):
        return np.zeros(len(numbers), bool)
    last, row, position = found[-1]
    tied = (tokens.rows < row) | ((tokens.rows == row) & (tokens.positions <= position))
    return (numbers < last) | ((numbers == last) & tied)


def ordered(keys: np.ndarray) -> np.ndarray:
    return keys[np.lexsort(keys.T[::-1])]


def noise(seed: int, update: int, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return a number in [0, 1) for each token, from a hash (splitmix64)."""
    state = np.full(len(rows), seed, np.uint64)
    for part in (np.full(len(rows), update), rows, positions):
        state = (state ^ part.astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)) / 2.0**53
