"""Advantages: how much better each sample, or each token, was than expected.

Enters: the rows of a whole step, with their rewards and groups; for PPO also values, for ReMax baselines. Leaves: the same rows in the same
order with `advantages` (for PPO also `returns`), one number per token, 0 outside the mask. Guaranteed: float64 until the last rounding;
sums over samples or tokens are exact, so the order of rows does not change the result, not even in the last bit; groups may be of any size
and in any order; tokens outside the mask are skipped.

If a row has `token_rewards` (a KL penalty per token), its reward is their sum.

Other workers may hold other groups of the step, whole ones. Numbers that depend on all rows come from `everyone`, which gives the same
exact sums wherever the rows are, so that the result does not depend on that either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import fsum, isfinite, sqrt
from typing import Any

import numpy as np

from fulltilt.records import Row

STD_FLOOR = 1e-6
VARIANCE_FLOOR = 1e-8


class Everyone:
    """All processes that hold rows of a step: here, there is only this one."""

    def gather(self, numbers: Sequence[float]) -> list[float]:
        """Return the numbers of all processes."""
        return list(numbers)

    def sum(self, numbers: Sequence[float]) -> float:
        """Return the sum of all processes' numbers, rounded once."""
        return fsum(numbers)


HERE = Everyone()


def exact_parts(numbers: Sequence[float]) -> list[float]:
    """Return a few numbers with exactly the same sum, unrounded."""
    parts: list[float] = []
    while rest := fsum([*numbers, *(-part for part in parts)]):
        if not isfinite(rest):
            return [rest]
        parts.append(rest)
    return parts


# ---- one number per sample ---------------------------------------------------------------------------------------------------------


def group_relative(rows: Sequence[Row], normalize_by_std: bool) -> list[Row]:
    """Compute reward minus the mean of its group; with `normalize_by_std` divided by the group's standard deviation + 1e-6 (GRPO; not Dr.
    GRPO).

    The standard deviation is the unbiased one (n - 1), as in verl and TRL. A group of one gets 0, because a single sample has no baseline;
    verl gives it its raw reward there. A group whose rewards are all equal gets exactly 0.

    Example: rewards [1, 0, 5], groups [3, 3, 8], not normalised -> [0.5, -0.5, 0]
    """

    return per_token(rows, advantages=_in_groups(rows, _scaled if normalize_by_std else _as_they_are))


def leave_one_out(rows: Sequence[Row]) -> list[Row]:
    """Compute reward minus the mean reward of the other samples of its group (RLOO).

    Example: rewards [1, 0, 0], one group -> [1, -0.5, -0.5]
    """
    return per_token(rows, advantages=_in_groups(rows, lambda centred: centred * (len(centred) / max(1, len(centred) - 1))))


def best_of_group(rows: Sequence[Row], normalize_by_std: bool) -> list[Row]:
    """Compute the lead of a group's best sample over the second best, with `normalize_by_std` divided by the group's standard deviation +
    1e-6; 0 for all others (Pass@k training, Walder and Karkhanis, 2025).

    Example: rewards [1, 0, 4], one group, not normalised -> [0, 0, 3]
    """

    def lead(centred: np.ndarray) -> np.ndarray:
        found = np.zeros(len(centred))
        if len(centred) > 1:
            second, best = np.sort(centred)[-2:]
            found[np.argmax(centred)] = (best - second) / (_deviation(centred) + STD_FLOOR if normalize_by_std else 1.0)
        return found

    return per_token(rows, advantages=_in_groups(rows, lead))


def length_weighted(rows: Sequence[Row]) -> list[Row]:
    """Compute reward minus the mean of its group, in which each sample counts with its trained tokens (OPO): the baseline of least
    variance, if the squared gradient of a sample grows with its length. A group of one gets 0.

    Example: rewards [1, 0], lengths [3, 1], one group -> [0.25, -0.75]
    """
    rewards, lengths = totals(rows), np.array([row.trained for row in rows], dtype=np.float64)
    found = np.zeros(len(rows))
    for members in _groups(rows):
        own, weights = rewards[members], lengths[members]
        if len(members) > 1 and weights.any() and own.min() < own.max():
            found[members] = own - fsum((own * weights).tolist()) / fsum(weights.tolist())
    return per_token(rows, advantages=found)


def rescaled_by_nonzero(rows: Sequence[Row], everyone: Everyone = HERE) -> list[Row]:
    """Compute reward minus the mean of its group, times the step's number of samples over the number whose reward is not 0 (GPG as in verl;
    the paper counts the samples of groups whose rewards differ)."""
    rewards = totals(rows)
    samples, nonzero = everyone.sum([len(rewards)]), everyone.sum([float(np.count_nonzero(rewards))])
    return per_token(rows, advantages=_in_groups(rows, lambda centred: centred * (samples / max(1.0, nonzero))))


def decoupled(rows: Sequence[Row], normalize_by_std: bool, reward_parts: Mapping[str, float], everyone: Everyone = HERE) -> list[Row]:
    """Compute each part of the reward relative to its group, as in `group_relative`, and their weighted sum, whitened over the trained
    tokens of the step (GDPO): no part dominates another only because its numbers are larger."""
    found = np.zeros(len(rows))
    for place, weight in enumerate(reward_parts.values()):
        parts = np.array([row.parts[place] for row in rows], dtype=np.float64)
        found += weight * _in_groups(rows, _scaled if normalize_by_std else _as_they_are, parts)
    return per_token(rows, advantages=whitened(_spread(found, rows), everyone))


def group_mean_whitened(rows: Sequence[Row], whiten: bool, everyone: Everyone = HERE) -> list[Row]:
    """Compute reward minus the mean of its group, then whiten over the trained tokens of the step (REINFORCE++ with baseline)."""
    tokens = _spread(_in_groups(rows, _as_they_are), rows)
    return per_token(rows, advantages=whitened(tokens, everyone) if whiten else tokens)


def greedy_baseline(rows: Sequence[Row]) -> list[Row]:
    """Compute reward minus the reward of the prompt's greedy sample (ReMax)."""
    assert all(row.baseline is not None for row in rows), "a row without the reward of its prompt's greedy sample"
    return per_token(rows, advantages=totals(rows) - np.array([row.baseline for row in rows], dtype=np.float64))


def no_advantage(rows: Sequence[Row]) -> list[Row]:
    """Leave the rows as they are: the loss reads no advantages."""
    return list(rows)


def worth_training(rewards: np.ndarray) -> bool:
    """Return whether a group has different rewards: with equal rewards, or a single one, every group-relative advantage is 0."""
    return bool((rewards != rewards[:1]).any())


# ---- one number per token ----------------------------------------------------------------------------------------------------------


def discounted_returns(rows: Sequence[Row], gamma: float, whiten: bool, everyone: Everyone = HERE) -> list[Row]:
    """Compute the discounted sum of rewards from each token on, whitened over the trained tokens of the step (REINFORCE++)."""
    returns = _accumulated([token_rewards(row) for row in rows], gamma)
    return per_token(rows, advantages=whitened(returns, everyone) if whiten else returns)


def generalised(rows: Sequence[Row], gamma: float, gae_lambda: float, whiten: bool, everyone: Everyone = HERE) -> list[Row]:
    """Compute generalised advantage estimation (PPO): with d_t = r_t + gamma V_{t+1} - V_t and a value of 0 after the last trained token,
    A_t = d_t + gamma lambda A_{t+1}. `returns`, the critic's targets, are A + V before whitening.
    """
    values, surprises = [], []
    for row in rows:
        assert row.values is not None, "a row without the critic's values"
        own = row.values[row.mask].astype(np.float64)
        values.append(own)
        surprises.append(token_rewards(row) + gamma * np.append(own[1:], np.zeros(min(1, len(own)))) - own)
    advantages = _accumulated(surprises, gamma * gae_lambda)
    returns = [advantage + value for advantage, value in zip(advantages, values, strict=True)]
    return per_token(rows, advantages=whitened(advantages, everyone) if whiten else advantages, returns=returns)


def token_baseline(rows: Sequence[Row]) -> list[Row]:
    """Compute the reward still to come minus a baseline for each position in the response: the mean over the group's samples that reach it,
    each weighted with the squared gradient of its log-probs so far (OTB). For one token that gradient is about 1 - 2p + the sum of all
    squared probabilities, times the squared importance weight if there is one.

    The sum over the vocabulary follows from two log-probs, at the sampling temperature and at half of it: it is the exponential of twice
    the first minus the second. As in verl, tokens of the longest sample beyond the second longest have no baseline. A group of one gets
    0.
    """
    returns = _accumulated([token_rewards(row) for row in rows], 1.0)
    energies = [np.cumsum(_gradient_squares(row)) for row in rows]
    found = [np.zeros(len(own)) for own in returns]
    for members in _groups(rows):
        lengths = sorted(len(returns[index]) for index in members)
        if len(members) == 1:
            continue
        shape = (len(members), lengths[-1])
        weighted, weights = np.zeros(shape), np.zeros(shape)
        for place, index in enumerate(members):
            weights[place, : len(returns[index])] = energies[index]
            weighted[place, : len(returns[index])] = energies[index] * returns[index]
        # Sorted, so that the result does not depend on the order of rows.
        baseline = np.sort(weighted, axis=0).sum(axis=0) / (np.sort(weights, axis=0).sum(axis=0) + VARIANCE_FLOOR)
        baseline[lengths[-2] :] = 0.0
        for index in members:
            found[index] = returns[index] - baseline[: len(returns[index])]
    return per_token(rows, advantages=found)


def _gradient_squares(row: Row) -> np.ndarray:
    """Return for each trained token about the squared norm of the gradient of its log-prob with respect to the logits."""
    assert row.old_logprobs is not None and row.sharp_logprobs is not None, "a row without log-probs at half the temperature"
    old, sharp = row.old_logprobs[row.mask].astype(np.float64), row.sharp_logprobs[row.mask].astype(np.float64)
    weight = 1.0 if row.importance is None else row.importance[row.mask].astype(np.float64) ** 2
    return (1 - 2 * np.exp(old) + np.exp(2 * old - sharp)) * weight


def whitened(numbers: Sequence[np.ndarray], everyone: Everyone = HERE) -> list[np.ndarray]:
    """Scale all numbers together to mean 0 and standard deviation 1 (n - 1, variance + 1e-8, as in verl); equal ones become exactly 0."""
    everything = np.concatenate([np.zeros(0), *numbers])
    count = everyone.sum([len(everything)])
    centred = _centred(everything, everyone)
    scale = sqrt(everyone.sum((centred**2).tolist()) / max(1, count - 1) + VARIANCE_FLOOR)
    borders = np.cumsum([len(own) for own in numbers])[:-1]
    return np.split(centred / scale, borders) if len(numbers) else []


# ---- between rows and numbers ------------------------------------------------------------------------------------------------------


def totals(rows: Sequence[Row]) -> np.ndarray:
    """Return the reward of each row as a whole, float64."""
    found = np.array(
        [row.reward if row.token_rewards is None or not row.mask.any() else fsum(row.token_rewards[row.mask].tolist()) for row in rows],
        dtype=np.float64,
    )
    assert np.isfinite(found).all(), "rewards are finite numbers"
    return found


def token_rewards(row: Row) -> np.ndarray:
    """Return the reward of each trained token, float64: the last one has the sample's reward, unless the row has a reward for each
    token."""
    if row.token_rewards is not None:
        return row.token_rewards[row.mask].astype(np.float64)
    rewards = np.zeros(np.count_nonzero(row.mask))
    rewards[-1:] = row.reward
    return rewards


def per_token(rows: Sequence[Row], **fields: Sequence[np.ndarray] | np.ndarray) -> list[Row]:
    """Return the rows with new fields, each filled from one number for each trained token, or one number for the whole row; other tokens
    get 0."""
    filled = []
    for index, row in enumerate(rows):
        found: dict[str, Any] = {}
        for name, numbers in fields.items():
            found[name] = np.zeros(row.tokens, dtype=np.float32)
            found[name][row.mask] = numbers[index]
        filled.append(replace(row, **found))
    return filled


def _in_groups(rows: Sequence[Row], advantages: Callable[[np.ndarray], np.ndarray], numbers: np.ndarray | None = None) -> np.ndarray:
    """Return one number for each row: the result of `advantages` for the rewards of its group, or for other numbers, less their mean."""
    rewards, found = totals(rows) if numbers is None else numbers, np.zeros(len(rows))
    for members in _groups(rows):
        found[members] = advantages(_centred(rewards[members]))
    return found


def _groups(rows: Sequence[Row]) -> list[np.ndarray]:
    """Return the indices of each group's rows."""
    groups = np.array([row.group for row in rows], dtype=np.int64)
    order = np.argsort(groups, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(groups[order])) + 1) if len(rows) else []


def _as_they_are(centred: np.ndarray) -> np.ndarray:
    return centred


def _scaled(centred: np.ndarray) -> np.ndarray:
    return centred / (_deviation(centred) + STD_FLOOR) if len(centred) > 1 else centred


def _deviation(centred: np.ndarray) -> float:
    """Return the unbiased standard deviation of numbers whose mean was subtracted."""
    return sqrt(fsum((centred**2).tolist()) / (len(centred) - 1))


def _spread(numbers: np.ndarray, rows: Sequence[Row]) -> list[np.ndarray]:
    """Repeat a row's number for each of its trained tokens."""
    return [np.full(np.count_nonzero(row.mask), value) for value, row in zip(numbers, rows, strict=True)]


def _centred(numbers: np.ndarray, everyone: Everyone = HERE) -> np.ndarray:
    """Subtract the mean of all processes' numbers; exactly 0 if they are all equal, which rounding of the mean would prevent."""
    ends = everyone.gather([float(numbers.min()), float(numbers.max())] if len(numbers) else [])
    if not ends or min(ends) == max(ends):
        return np.zeros(len(numbers))
    return numbers - everyone.sum(numbers.tolist()) / everyone.sum([len(numbers)])


def _accumulated(sequences: Sequence[np.ndarray], factor: float) -> list[np.ndarray]:
    """Return each number plus `factor` times the accumulated number after it; computed for all sequences at once, aligned at their ends."""
    longest = max(map(len, sequences), default=0)
    table = np.zeros((longest, len(sequences)))
    for column, own in enumerate(sequences):
        table[longest - len(own) :, column] = own
    for place in range(longest - 2, -1, -1):
        table[place] += factor * table[place + 1]
    return [table[longest - len(own) :, column] for column, own in enumerate(sequences)]
