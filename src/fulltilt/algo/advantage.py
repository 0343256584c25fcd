"""Advantages: how much better than expected each sample was.

Enters: the rows of a whole step, with their rewards and groups. Leaves: the same rows in the same order with `advantages`, one number per
token, 0 outside the mask. Guaranteed: float64 until the last rounding; groups may be of any size and in any order; rows of one group see
nothing of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fulltilt.records import Row

STD_FLOOR = 1e-6


def grpo(rewards: np.ndarray, groups: np.ndarray, normalize_by_std: bool) -> np.ndarray:
    """Reward minus the mean of its group, one number per row; divided by the group's standard deviation + 1e-6 if asked.

    The standard deviation is the unbiased one (n - 1), as in verl and TRL. A group of one gets 0, because a single sample has no baseline;
    verl gives it its raw reward there. A group whose rewards are all equal gets exactly 0, rounding of the mean included.

    Example: rewards [1, 0, 5], groups [3, 3, 8], not normalised -> [0.5, -0.5, 0]
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    groups = np.asarray(groups)
    assert rewards.shape == groups.shape and rewards.ndim == 1, f"{rewards.shape} rewards for {groups.shape} groups"
    assert np.isfinite(rewards).all(), "a reward that is not a finite number got past the reward room"
    advantages = np.zeros(len(rewards), dtype=np.float64)
    order = np.argsort(groups, kind="stable")
    borders = np.flatnonzero(np.diff(groups[order])) + 1
    for members in np.split(order, borders):
        own = rewards[members]
        if len(own) < 2 or (own == own[0]).all():
            continue
        centred = own - own.mean()
        advantages[members] = centred / (own.std(ddof=1) + STD_FLOOR) if normalize_by_std else centred
    return advantages


def spread(row_advantages: np.ndarray, rows: Sequence[Row]) -> list[Row]:
    """Give every trained token of a row the row's number, and 0 to the rest."""
    assert len(row_advantages) == len(rows), f"{len(row_advantages)} advantages for {len(rows)} rows"
    return [
        replace(row, advantages=np.where(row.mask, value, 0.0).astype(np.float32)) for value, row in zip(row_advantages, rows, strict=True)
    ]


def group_relative(rows: Sequence[Row], normalize_by_std: bool) -> list[Row]:
    """GRPO's advantages, from rows to rows."""
    rewards = np.array([row.reward for row in rows], dtype=np.float64)
    groups = np.array([row.group for row in rows], dtype=np.int64)
    return spread(grpo(rewards, groups, normalize_by_std), rows)


def no_advantage(rows: Sequence[Row]) -> list[Row]:
    """For losses that read none."""
    return list(rows)
