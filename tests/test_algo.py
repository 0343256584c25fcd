"""Advantages, losses, reward shaping, presets and users' own functions against plain float64 loops written here, which share no code
with the package."""

from __future__ import annotations

import inspect
import math
import os
import pickle
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from fulltilt.algo import advantage, loss
from fulltilt.algo.base import Overlong, RewardKL
from fulltilt.algo.build import build
from fulltilt.algo.correction import Correction
from fulltilt.config import parse
from fulltilt.presets import FUNCTION_KEYS, PRESETS
from fulltilt.records import Row, TokenTerms, UserError, ValueTerms
from fulltilt.schema import AlgorithmConfig, Config

pytestmark = pytest.mark.usefixtures("named_files")

# ---------------------------------------------------------------------------------------------------------------- the plain computation


def plain_total(row: Row) -> float:
    if row.token_rewards is None:
        return row.reward
    return math.fsum(float(r) for r, trained in zip(row.token_rewards, row.mask, strict=True) if trained)


def plain_rewards(row: Row) -> list[float]:
    """Of each trained token."""
    places = [t for t, trained in enumerate(row.mask) if trained]
    if row.token_rewards is not None:
        return [float(row.token_rewards[t]) for t in places]
    return [row.reward if t == places[-1] else 0.0 for t in places]


def plain_group(rows: list[Row], row: Row) -> list[float]:
    return [plain_total(other) for other in rows if other.group == row.group]


def plain_mean(numbers: list[float]) -> float:
    return math.fsum(numbers) / len(numbers)


def plain_std(numbers: list[float]) -> float:
    mean = plain_mean(numbers)
    return math.sqrt(math.fsum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1))


def plain_grpo(rows: list[Row], by_std: bool) -> list[list[float]]:
    out = []
    for row in rows:
        own = plain_group(rows, row)
        value = 0.0
        if len(own) > 1:
            value = (plain_total(row) - plain_mean(own)) / (plain_std(own) + 1e-6 if by_std else 1.0)
        out.append([value for trained in row.mask if trained])
    return out


def plain_rloo(rows: list[Row]) -> list[list[float]]:
    out = []
    for row in rows:
        others = [plain_total(other) for other in rows if other.group == row.group and other is not row]
        value = plain_total(row) - plain_mean(others) if others else 0.0
        out.append([value for trained in row.mask if trained])
    return out


def plain_remax(rows: list[Row]) -> list[list[float]]:
    return [[plain_total(row) - float(row.baseline or 0.0) for trained in row.mask if trained] for row in rows]


def plain_whiten(numbers: list[list[float]]) -> list[list[float]]:
    everything = [number for own in numbers for number in own]
    mean, variance = plain_mean(everything), plain_std(everything) ** 2
    return [[(number - mean) / math.sqrt(variance + 1e-8) for number in own] for own in numbers]


def plain_returns(rows: list[Row], gamma: float) -> list[list[float]]:
    """The double sum of the definition."""
    out = []
    for row in rows:
        rewards = plain_rewards(row)
        out.append([math.fsum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))])
    return out


def plain_gae(rows: list[Row], gamma: float, lam: float) -> tuple[list[list[float]], list[list[float]]]:
    """The sum of discounted surprises of the definition, and returns."""
    advantages, returns = [], []
    for row in rows:
        rewards = plain_rewards(row)
        assert row.values is not None
        values = [float(v) for v, trained in zip(row.values, row.mask, strict=True) if trained] + [0.0]
        surprise = [r + gamma * values[t + 1] - values[t] for t, r in enumerate(rewards)]
        own = [math.fsum((gamma * lam) ** (k - t) * surprise[k] for k in range(t, len(rewards))) for t in range(len(rewards))]
        advantages.append(own)
        returns.append([a + v for a, v in zip(own, values, strict=False)])
    return advantages, returns


def plain_kl(name: str, logprob: float, ref: float) -> float:
    if name == "k1":
        return logprob - ref
    if name == "k2":
        return 0.5 * (logprob - ref) * (logprob - ref)
    log_ratio = min(20.0, max(-20.0, ref - logprob))
    return math.exp(log_ratio) - 1.0 - log_ratio


def plain_surrogate(logprob: float, old: float, adv: float, s: dict[str, Any]) -> float:
    ratio = math.exp(min(20.0, max(-20.0, logprob - old)))
    inside = min(max(ratio, 1 - s["clip_low"]), 1 + s["clip_high"])
    value: float = -min(ratio * adv, inside * adv)
    if s["dual_clip"] > 0 and adv < 0:
        value = min(value, -adv * s["dual_clip"])
    return value


def plain_token(t: dict[str, float], s: dict[str, Any], logprob: float, entropy: float) -> float:
    """Loss of one token; `t` holds what is constant, `logprob` and `entropy` are what gradients are taken of."""
    value = plain_surrogate(logprob, t["old"], t["adv"], s)
    if s["importance_cap"] > 0:
        value *= min(math.exp(t["old"] - t["rollout"]), float(s["importance_cap"]))
    if s["kl_coef"] > 0:
        value += float(s["kl_coef"]) * plain_kl(s["kl"], logprob, t["ref"])
    value -= float(s["entropy_coef"]) * entropy
    return t["weight"] * value


# ------------------------------------------------------------------------------------------------------------------- the rows and tokens


def rows_of_a_step(*, token_rewards: bool) -> list[Row]:
    """Interleaved ragged groups, masks with holes, a group of one (9), a group of equal rewards (4), a row without trained tokens."""
    rng = np.random.default_rng(5)
    rows = []
    for index, group in enumerate([7, 2, 4, 7, 0, 2, 7, 9, 2, 4, 2, 0, 4]):
        tokens = int(rng.integers(4, 12))
        mask = (np.arange(tokens) >= rng.integers(1, 4)) & (rng.random(tokens) < 0.7)
        mask[-1] = mask[-1] or not mask.any()
        if index == 5:
            mask[:] = False
        near = (rng.normal(-1, 0.6, tokens) * mask).astype(np.float32)
        rows.append(
            Row(
                ids=np.arange(tokens), mask=mask, group=group, reward=0.1 if group == 4 else float(rng.normal()),
                baseline=float(rng.normal()), values=(rng.normal(size=tokens) * mask).astype(np.float32),
                old_logprobs=near, ref_logprobs=(near + rng.normal(0, 0.3, tokens) * mask).astype(np.float32),
                token_rewards=(rng.normal(size=tokens) * mask).astype(np.float32) if token_rewards and index != 5 else None,
            )
        )  # fmt: skip
    return rows


def tokens() -> list[dict[str, float]]:
    """Every sign of the advantage with ratios far below, just within, at, just above and far above 1, and beyond every bound."""
    rng = np.random.default_rng(0)
    out = []
    for gap in (-25.0, -1.0, -0.3, -0.1, 0.0, 0.1, 0.3, 0.9, 1.5, 25.0):
        for adv in (1.3, -0.7, 0.0):
            logprob = -float(rng.uniform(0.1, 3.0))
            old = logprob - gap
            out.append(
                {
                    "logprob": logprob,
                    "old": old,
                    "ref": logprob + float(rng.normal(0, 0.7)),
                    "rollout": old + float(rng.normal(0, 0.8)),
                    "adv": adv,
                    "entropy": float(rng.uniform(0, 3)),
                    "weight": float(rng.uniform(0, 0.1)),
                    "row": float(len(out) // 4),
                    "fresh": float(len(out) % 5 > 0),
                }
            )
    return out


def terms(data: list[dict[str, float]], *, old: bool = True, grad: bool = False) -> TokenTerms:
    def column(name: str) -> torch.Tensor:
        return torch.tensor([t[name] for t in data], dtype=torch.float64)

    return TokenTerms(
        logprobs=column("logprob").requires_grad_(grad),
        entropy=column("entropy").requires_grad_(grad),
        weights=column("weight"),
        row=column("row").long(),
        rollout_logprobs=column("rollout"),
        old_logprobs=column("old") if old else None,
        ref_logprobs=column("ref"),
        advantages=column("adv"),
        fresh=column("fresh").bool(),
    )


BASE: dict[str, Any] = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": 3.0,
    "kl_coef": 0.0,
    "kl": "k3",
    "entropy_coef": 0.0,
    "importance_cap": 0.0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no dual clip": {"dual_clip": 0.0},
    "no room to clip": {"clip_low": 0.0, "clip_high": 0.0},
    "importance": {"importance_cap": 2.0},
    "entropy": {"entropy_coef": 0.01},
    "k1": {"kl_coef": 0.1, "kl": "k1"},
    "k2": {"kl_coef": 0.1, "kl": "k2"},
    "k3": {"kl_coef": 0.1, "kl": "k3"},
    "all": {"kl_coef": 0.05, "entropy_coef": 0.02, "importance_cap": 1.5},
}


def policy(batch: TokenTerms, s: dict[str, Any], surrogate: Callable[[TokenTerms], loss.Surrogate] | None = None) -> loss.LossParts:
    clips = {key: s[key] for key in ("clip_low", "clip_high", "dual_clip")}
    surrogate = surrogate or partial(loss.clipped_surrogate, **clips)
    return loss.policy_loss(batch, surrogate, s["kl_coef"], s["kl"], s["entropy_coef"], Correction(cap=s["importance_cap"]))


# ---------------------------------------------------------------------------------------------------------------------------- advantages

ADVANTAGES: dict[str, tuple[dict[str, Any], Callable[[list[Row]], list[list[float]]]]] = {
    "grpo": ({}, lambda rows: plain_grpo(rows, True)),
    "dr_grpo": ({}, lambda rows: plain_grpo(rows, False)),
    "dapo": ({}, lambda rows: plain_grpo(rows, True)),
    "gspo": ({}, lambda rows: plain_grpo(rows, True)),
    "cispo": ({"normalize_by_std": False}, lambda rows: plain_grpo(rows, False)),
    "rloo": ({}, plain_rloo),
    "remax": ({}, plain_remax),
    "reinforce++": ({"gamma": 0.9}, lambda rows: plain_whiten(plain_returns(rows, 0.9))),
    "reinforce++_baseline": ({}, lambda rows: plain_whiten(plain_grpo(rows, False))),
    "ppo": ({"gamma": 0.95, "gae_lambda": 0.9}, lambda rows: plain_whiten(plain_gae(rows, 0.95, 0.9)[0])),
}
UNWHITENED: dict[str, tuple[dict[str, Any], Callable[[list[Row]], list[list[float]]]]] = {
    "reinforce++": ({"whiten": False}, lambda rows: plain_returns(rows, 1.0)),
    "reinforce++_baseline": ({"whiten": False}, lambda rows: plain_grpo(rows, False)),
    "ppo": ({"whiten": False, "gae_lambda": 0.0}, lambda rows: plain_gae(rows, 1.0, 0.0)[0]),
}


def assert_per_token(arrays: list[np.ndarray | None], rows: list[Row], expected: list[list[float]]) -> None:
    """The expected numbers rounded to float32, up to a float64 rounding that falls on the other side; 0 outside the mask. 1e-10: for equal
    rewards the plain mean leaves a rounding of 1e-17, divided by 1e-6."""
    for array, row, numbers in zip(arrays, rows, expected, strict=True):
        assert array is not None and array.dtype == np.float32 and array.shape == row.mask.shape
        assert (array[~row.mask] == 0).all()
        np.testing.assert_allclose(array[row.mask], np.array(numbers, dtype=np.float32), rtol=2e-7, atol=1e-10)


@pytest.mark.parametrize("token_rewards", [False, True])
@pytest.mark.parametrize(
    ("name", "keys", "plain"),
    [(name, *entry) for table in (ADVANTAGES, UNWHITENED) for name, entry in table.items()],
)
def test_advantages_are_the_plain_ones(name: str, keys: dict[str, Any], plain: Any, token_rewards: bool) -> None:
    rows = rows_of_a_step(token_rewards=token_rewards)
    found = build(config(name=name, **keys)).advantage(rows)
    assert [row.ids is other.ids for row, other in zip(found, rows, strict=True)] == [True] * len(rows)
    assert_per_token([row.advantages for row in found], rows, plain(rows))


def test_every_rollout_preset_is_in_the_table() -> None:
    assert ADVANTAGES.keys() == {name for name, preset in PRESETS.items() if preset.rollout}


@pytest.mark.parametrize("token_rewards", [False, True])
def test_returns_are_advantages_before_whitening_plus_values(token_rewards: bool) -> None:
    rows = rows_of_a_step(token_rewards=token_rewards)
    for whiten in (True, False):
        found = build(config(name="ppo", gamma=0.95, gae_lambda=0.9, whiten=whiten)).advantage(rows)
        assert_per_token([row.returns for row in found], rows, plain_gae(rows, 0.95, 0.9)[1])
    # With lambda 1 and gamma 1 they are what is still to come, whatever the critic thinks.
    found = build(config(name="ppo")).advantage(rows)
    assert_per_token([row.returns for row in found], rows, plain_returns(rows, 1.0))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_order_of_rows_does_not_show_in_a_single_bit(name: str) -> None:
    # Many rows whose rewards nearly cancel, so that a sum that depends on the order would show after rounding to float32 too.
    few, rng = rows_of_a_step(token_rewards=False), np.random.default_rng(8)
    rows = [replace(row, reward=float(rng.normal(1e6, 1))) for row in few * 8]
    advantages = build(config(name=name)).advantage
    straight = advantages(rows)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(rows))
        for place, row in zip(order, advantages([rows[index] for index in order]), strict=True):
            np.testing.assert_array_equal(row.advantages, straight[place].advantages)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_equal_rewards_and_groups_of_one(name: str) -> None:
    """Where the group is the baseline, both give exactly 0; the mean of three times 0.1 is not 0.1 in floating point."""
    preset = PRESETS[name]
    mask = np.array([False, True, True])
    row = Row(ids=np.arange(3), mask=mask, reward=0.1, baseline=0.1, values=np.zeros(3, np.float32))
    equal = build(config(name=name)).advantage([row, row, row])
    if name != "ppo":
        assert all((found.advantages == 0).all() for found in equal)
    alone = [replace(row, group=group, reward=float(group)) for group in range(3)]
    found = build(config(name=name)).advantage(alone)
    assert all((one.advantages == 0).all() for one in found) is (preset.smallest_group == 2)
    assert build(config(name=name)).advantage([]) == []


def test_no_advantage_and_what_a_missing_number_says() -> None:
    rows = rows_of_a_step(token_rewards=False)
    assert advantage.no_advantage(rows) == rows
    with pytest.raises(AssertionError, match="greedy"):
        advantage.greedy_baseline([replace(rows[0], baseline=None)])
    with pytest.raises(AssertionError, match="critic"):
        advantage.generalised([replace(rows[0], values=None)], 1.0, 1.0, True)
    with pytest.raises(AssertionError, match="finite"):
        advantage.leave_one_out([replace(rows[0], reward=math.nan)])


@pytest.mark.parametrize(("rewards", "useful"), [([], False), ([1.0], False), ([0.1] * 3, False), ([0.0, 0.0, 1.0], True)])
def test_which_groups_are_worth_training_on(rewards: list[float], useful: bool) -> None:
    assert advantage.worth_training(np.array(rewards)) is useful


# ------------------------------------------------------------------------------------------------------------------------------------ KL


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl_estimators_are_the_plain_ones(name: str) -> None:
    pairs = [(-0.5, -0.5), (-0.1, -2.0), (-2.0, -0.1), (-0.3, -0.30001), (-40.0, -1.0), (-1.0, -40.0)]
    logprobs = torch.tensor([p for p, _ in pairs], dtype=torch.float64, requires_grad=True)
    values = loss.KL_ESTIMATORS[name](logprobs, torch.tensor([q for _, q in pairs], dtype=torch.float64))
    assert values.dtype == torch.float64
    (gradient,) = torch.autograd.grad(values.sum(), logprobs)
    for (p, q), value, slope in zip(pairs, values.tolist(), gradient.tolist(), strict=True):
        assert value == pytest.approx(plain_kl(name, p, q), rel=1e-12, abs=1e-12)
        # By hand: 1, p - q, 1 - q/p; k3 is flat beyond its clamp.
        by_hand = {"k1": 1.0, "k2": p - q, "k3": 1 - math.exp(q - p) if abs(q - p) < 20 else 0.0}[name]
        assert slope == pytest.approx(by_hand, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_the_kl_penalty_of_each_token(name: str) -> None:
    rows = rows_of_a_step(token_rewards=False)
    penalty = RewardKL(coef=9.0, target=None, horizon=1, estimator=loss.KL_ESTIMATORS[name])
    found, of_rows = penalty.penalise(rows, coef=0.3)
    means = []
    for before, after in zip(rows, found, strict=True):
        places = [t for t, trained in enumerate(before.mask) if trained]
        assert before.old_logprobs is not None and before.ref_logprobs is not None and after.token_rewards is not None
        kls = [plain_kl(name, float(before.old_logprobs[t]), float(before.ref_logprobs[t])) for t in places]
        expected = [0.0] * len(before.mask)
        for t, kl in zip(places, kls, strict=True):
            expected[t] = -0.3 * kl + (before.reward if t == places[-1] else 0.0)
        np.testing.assert_allclose(after.token_rewards, np.array(expected, dtype=np.float32), rtol=2e-7, atol=1e-12)
        if kls:
            means.append(plain_mean(kls))
    assert len(means) == len(rows) - 1  # one row has no trained token
    assert penalty.mean_kl(of_rows) == pytest.approx(plain_mean(means), rel=1e-12)
    assert penalty.penalise([], 0.3) == ([], []) and penalty.mean_kl([]) == 0.0


def test_the_adaptive_weight() -> None:
    adaptive = RewardKL(coef=0.1, target=0.05, horizon=1000, estimator=loss.KL_ESTIMATORS["k1"])
    # By hand: on target; 10% above; far above and far below, held at a fifth; negative KL, which k1 can be.
    for mean_kl, factor in ((0.05, 1.0), (0.055, 1 + 0.1 * 0.256), (5.0, 1 + 0.2 * 0.256), (0.0, 1 - 0.2 * 0.256), (-1.0, 1 - 0.2 * 0.256)):
        assert adaptive.next_coef(0.4, mean_kl, samples=256) == pytest.approx(0.4 * factor, rel=1e-12)
    assert replace(adaptive, target=None).next_coef(0.4, 5.0, samples=256) == 0.4


def test_long_responses_lose_linearly() -> None:
    punish = Overlong(longest=100, buffer=20, penalty=0.5)
    assert [punish(tokens) for tokens in (1, 79, 80, 81, 90, 100)] == pytest.approx([0, 0, 0, -0.025, -0.25, -0.5], rel=1e-12)
    assert punish(101) == -0.5  # a stop string's last tokens may go past the limit
    assert Overlong(100, 100, 1.0)(1) == pytest.approx(-0.01)


# ---------------------------------------------------------------------------------------------------------------------------- the policy


@pytest.mark.parametrize("variant", VARIANTS)
def test_policy_loss_and_gradients_are_the_plain_ones(variant: str) -> None:
    s, data = {**BASE, **VARIANTS[variant]}, tokens()
    batch = terms(data, grad=True)
    parts = policy(batch, s)
    assert parts.loss.dtype == torch.float64
    assert float(parts.loss.detach()) == pytest.approx(math.fsum(plain_token(t, s, t["logprob"], t["entropy"]) for t in data), rel=1e-12)

    gradient, entropy_gradient = torch.autograd.grad(parts.loss, [batch.logprobs, batch.entropy], materialize_grads=True)
    h = 1e-6
    for i, t in enumerate(data):
        # A token that sits on a kink has no derivative: without room to clip, that is a ratio of 1.
        if variant == "no room to clip" and t["logprob"] == t["old"]:
            continue
        up, down = (plain_token(t, s, t["logprob"] + d, t["entropy"]) for d in (h, -h))
        scale = max(1.0, abs(up))
        assert float(gradient[i]) == pytest.approx((up - down) / (2 * h), abs=1e-8 * scale, rel=1e-6), t
        assert float(entropy_gradient[i]) == pytest.approx(-s["entropy_coef"] * t["weight"], abs=1e-15)


def test_the_tokens_hit_every_clip() -> None:
    """Guards the test above: both clips and the dual clip are met by some token, and not by all."""
    data = tokens()
    sums = loss.clipped_surrogate(terms(data), 0.2, 0.28, 3.0).sums
    above = [t["adv"] > 0 and t["logprob"] - t["old"] > math.log(1.28) for t in data]
    below = [t["adv"] < 0 and t["logprob"] - t["old"] < math.log(0.8) for t in data]
    dual = [t["adv"] < 0 and t["logprob"] - t["old"] > math.log(3.0) for t in data]
    assert any(above) and any(below) and any(dual)
    assert float(sums["actor/pg_clipfrac"]) == sum(above) + sum(below) < len(data) // 2
    assert float(sums["actor/pg_clipfrac_lower"]) == sum(dual) < len(data) // 4
    assert loss.clipped_surrogate(terms(data), 0.2, 0.28, 0.0).sums.keys() == {"actor/pg_clipfrac"}


def test_metrics_are_the_plain_sums() -> None:
    s = {**BASE, "kl_coef": 0.3, "entropy_coef": 0.1, "importance_cap": 2.0}
    data = tokens()
    parts = policy(terms(data, grad=True), s)
    log_ratios = [min(20.0, max(-20.0, t["logprob"] - t["old"])) for t in data]
    importance = [math.exp(t["old"] - t["rollout"]) for t in data]
    assert any(i > 2 for i in importance) and any(i < 2 for i in importance)
    expected_sums = {
        "actor/pg_clipfrac": float(
            sum(
                (t["adv"] > 0 and r > math.log(1.28)) or (t["adv"] < 0 and r < math.log(0.8)) for t, r in zip(data, log_ratios, strict=True)
            )
        ),
        "actor/pg_clipfrac_lower": float(sum(t["adv"] < 0 and r > math.log(3.0) for t, r in zip(data, log_ratios, strict=True))),
        "actor/ppo_kl": -math.fsum(log_ratios),
        "actor/entropy": math.fsum(t["entropy"] for t in data),
    }
    expected_weighted = {
        "actor/pg_loss": math.fsum(
            t["weight"] * plain_surrogate(t["logprob"], t["old"], t["adv"], s) * min(i, 2.0) for t, i in zip(data, importance, strict=True)
        ),
        "actor/kl_loss": math.fsum(t["weight"] * plain_kl("k3", t["logprob"], t["ref"]) for t in data),
    }
    for got, expected in ((parts.sums, expected_sums), (parts.weighted, expected_weighted)):
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert not got[name].requires_grad
            assert float(got[name]) == pytest.approx(value, rel=1e-12, abs=1e-12), name
    # The gap is that of fresh tokens; the others, as in verl, are over all tokens, and the mean is that of the truncated weights.
    expected_ratios = {
        "rollout_corr/logprob_abs_gap": math.fsum(abs(t["old"] - t["rollout"]) for t in data if t["fresh"]),
        "rollout_corr/kl": math.fsum(t["rollout"] - t["old"] for t in data),
        "rollout_corr/k3_kl": math.fsum(i - 1 - math.log(i) for i in importance),
        "rollout_corr/rollout_is_mean": math.fsum(min(i, 2.0) for i in importance),
        "rollout_corr/rollout_is_ratio_fraction_high": sum(i > 2 for i in importance),
        "rollout_corr/rollout_is_ratio_fraction_low": sum(i < 0.5 for i in importance),
    }
    assert parts.ratios.keys() == expected_ratios.keys()
    for name, value in expected_ratios.items():
        assert float(parts.ratios[name][0]) == pytest.approx(value, rel=1e-12)
        assert float(parts.ratios[name][1]) == (24 if name.endswith("gap") else len(data))


def test_the_gap_is_that_of_fresh_tokens() -> None:
    """Groups carried over were sampled by older weights: they are corrected like the others, and no part of the gap."""
    data = tokens()
    s = {**BASE, "importance_cap": 2.0}
    stale = [{**t, "rollout": t["old"] - 7.0 * (1 - t["fresh"])} for t in data]
    parts = policy(terms(stale), s)
    assert [float(number) for number in parts.ratios["rollout_corr/logprob_abs_gap"]] == [0.0, 24.0]
    assert float(parts.ratios["rollout_corr/rollout_is_mean"][0]) == 24.0 + 6 * 2.0
    assert float(parts.ratios["rollout_corr/rollout_is_ratio_fraction_high"][0]) == 6.0
    assert float(parts.loss) == pytest.approx(math.fsum(plain_token(t, s, t["logprob"], t["entropy"]) for t in stale), rel=1e-12)
    nothing = policy(terms([{**t, "fresh": 0.0} for t in data]), s)
    assert float(nothing.ratios["rollout_corr/logprob_abs_gap"][1]) == 0
    everything = policy(replace(terms(data), fresh=None), s)
    assert float(everything.ratios["rollout_corr/logprob_abs_gap"][1]) == len(data)


def test_switched_off_parts_need_and_report_nothing() -> None:
    data = tokens()
    full = terms(data)
    bare = replace(full, rollout_logprobs=None, ref_logprobs=None, fresh=None)
    parts = policy(bare, BASE)
    assert torch.equal(parts.loss, policy(full, BASE).loss)
    assert set(parts.weighted) == {"actor/pg_loss"}
    assert not any(name.startswith("rollout_corr") for name in parts.sums) and not parts.ratios
    for s in ({**BASE, "importance_cap": 2.0}, {**BASE, "kl_coef": 0.1}):
        with pytest.raises(AssertionError, match="log-probs"):
            policy(bare, s)


def test_on_policy_without_old_logprobs_equals_old_given_equal() -> None:
    s = {**BASE, **VARIANTS["all"]}
    data = [{**t, "old": t["logprob"]} for t in tokens()]
    without, given = terms(data, old=False, grad=True), terms(data, grad=True)
    results = []
    for batch in (without, given):
        parts = policy(batch, s)
        results.append((parts.loss.detach(), *torch.autograd.grad(parts.loss, [batch.logprobs, batch.entropy])))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)

    # By hand, on policy: the ratio is 1 and its gradient that of the log-prob, so the gradient is -A times the weights.
    batch = terms(data, old=False, grad=True)
    parts = policy(batch, {**BASE, "importance_cap": 2.0})
    (gradient,) = torch.autograd.grad(parts.loss, batch.logprobs)
    by_hand = [-t["adv"] * t["weight"] * min(math.exp(t["logprob"] - t["rollout"]), 2.0) for t in data]
    np.testing.assert_allclose(gradient.numpy(), by_hand, rtol=1e-12)


def test_on_policy_gradient_survives_clips_of_zero() -> None:
    """A ratio of exactly 1 is not outside a clip of 0: the first update must still learn."""
    data = [{**t, "old": t["logprob"]} for t in tokens()]
    batch = terms(data, old=False, grad=True)
    (gradient,) = torch.autograd.grad(policy(batch, {**BASE, **VARIANTS["no room to clip"]}).loss, batch.logprobs)
    np.testing.assert_allclose(gradient.numpy(), [-t["adv"] * t["weight"] for t in data], rtol=1e-12)


def test_importance_weight_is_capped_and_carries_no_gradient() -> None:
    # Old over rollout: e^-1, 1, e^1, e^50; the cap is 2.
    old = torch.tensor([-2.0, -1.0, -0.5, -0.1], dtype=torch.float64, requires_grad=True)
    rollout = torch.tensor([-1.0, -1.0, -1.5, -50.1], dtype=torch.float64)
    ones = torch.ones(4, dtype=torch.float64)
    logprobs = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    batch = TokenTerms(logprobs, ones, ones, torch.zeros(4).long(), rollout, old, None, ones)
    assert not loss.importance_ratio(batch).requires_grad
    np.testing.assert_allclose(loss.importance_ratio(batch).numpy(), [math.exp(-1), 1.0, math.e, math.exp(20)], rtol=1e-12)
    corrected = policy(batch, {**BASE, "importance_cap": 2.0, "clip_high": 100.0, "clip_low": 0.99})
    ratios = [math.exp(1), 1.0, math.exp(-0.5), math.exp(-0.9)]
    expected = -sum(r * w for r, w in zip(ratios, [math.exp(-1), 1.0, 2.0, 2.0], strict=True))
    assert float(corrected.loss.detach()) == pytest.approx(expected, rel=1e-12)


def test_hopeless_ratios_stay_finite_in_float32() -> None:
    """exp of a gap of 200 is infinite in float32; without the clamp its gradient is NaN, also where another branch was chosen."""
    logprobs = torch.tensor([-0.1, -0.1, -200.0, -200.0, -0.1], requires_grad=True)
    far = torch.tensor([-200.0, -200.0, -0.1, -0.1, -200.0])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0])
    batch = TokenTerms(logprobs, torch.ones(5), torch.ones(5), torch.arange(5), far, far, far, advantages)
    for surrogate in SURROGATES.values():
        parts = policy(batch, {**BASE, "kl_coef": 0.1, "importance_cap": 2.0}, surrogate)
        (gradient,) = torch.autograd.grad(parts.loss, logprobs)
        assert parts.loss.isfinite() and gradient.isfinite().all()


def test_micro_batch_without_trained_tokens_has_loss_zero() -> None:
    batch = terms([], grad=True)
    everything = {**BASE, **VARIANTS["all"]}
    for parts in (*(policy(batch, everything, surrogate) for surrogate in SURROGATES.values()), loss.sft_loss(batch)):
        assert float(parts.loss.detach()) == 0.0
        assert torch.autograd.grad(parts.loss, batch.logprobs)[0].shape == (0,)
        assert all(float(value) == 0.0 for value in (*parts.sums.values(), *parts.weighted.values()))


def test_sft_loss_is_the_weighted_negative_log_likelihood() -> None:
    data = tokens()
    full = terms(data, grad=True)
    batch = TokenTerms(full.logprobs, full.entropy, full.weights, full.row)
    parts = loss.sft_loss(batch)
    expected = -math.fsum(t["weight"] * t["logprob"] for t in data)
    assert float(parts.loss.detach()) == pytest.approx(expected, rel=1e-12)
    assert float(parts.weighted["train/loss"]) == pytest.approx(expected, rel=1e-12)
    assert float(parts.sums["actor/entropy"]) == pytest.approx(math.fsum(t["entropy"] for t in data), rel=1e-12)
    (gradient,) = torch.autograd.grad(parts.loss, full.logprobs)
    np.testing.assert_allclose(gradient.numpy(), [-t["weight"] for t in data], rtol=1e-15)


# ------------------------------------------------------------------------------------------------------------- other surrogates, critic

SURROGATES: dict[str, Callable[[TokenTerms], loss.Surrogate]] = {
    "clipped": partial(loss.clipped_surrogate, clip_low=0.2, clip_high=0.28, dual_clip=3.0),
    "sequence": partial(loss.sequence_surrogate, clip_low=0.2, clip_high=0.28),
    "clipped importance": partial(loss.clipped_importance, clip_low=0.2, clip_high=0.28),
}


def sequences() -> list[dict[str, float]]:
    """Rows of 1 to 4 tokens with one advantage each, whose mean log-ratios lie below, within and above the clips."""
    rng = np.random.default_rng(3)
    out = []
    for row, (mean, adv) in enumerate([(m, a) for m in (-0.8, -0.1, 0.05, 0.7) for a in (1.3, -0.7)]):
        for _ in range(1 + row % 4):
            logprob = -float(rng.uniform(0.1, 3.0))
            old = logprob - mean - float(rng.normal(0, 0.05))
            # Numbers of rows may have gaps: a row without trained tokens is in the micro-batch too.
            out.append(
                {
                    "logprob": logprob, "old": old, "ref": logprob, "rollout": old + float(rng.normal(0, 0.3)), "adv": adv,
                    "entropy": 1.0, "weight": 1 / (8 * (1 + row % 4)), "row": 2.0 * row + 1, "fresh": 1.0,
                }
            )  # fmt: skip
    return out


def explicit_gspo(logprobs: torch.Tensor, data: list[dict[str, float]], low: float, high: float) -> torch.Tensor:
    """The objective of the paper: for each sequence, its own ratio with its own gradient, clipped, averaged over sequences."""
    losses = []
    for row in sorted({t["row"] for t in data}):
        members = [i for i, t in enumerate(data) if t["row"] == row]
        old = torch.tensor([data[i]["old"] for i in members], dtype=torch.float64)
        ratio = torch.exp((logprobs[members] - old).mean())
        adv = data[members[0]]["adv"]
        losses.append(-torch.minimum(ratio * adv, torch.clamp(ratio, 1 - low, 1 + high) * adv))
    return torch.stack(losses).mean()


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.28), (3e-4, 4e-4), (0.9, 9.0)])
def test_gspo_has_the_loss_and_gradient_of_the_sequence_objective(low: float, high: float) -> None:
    data = sequences()
    batch = terms(data, grad=True)
    s = {**BASE, "importance_cap": 0.0}
    parts = policy(batch, s, partial(loss.sequence_surrogate, clip_low=low, clip_high=high))
    logprobs = batch.logprobs.detach().clone().requires_grad_()
    expected = explicit_gspo(logprobs, data, low, high)
    assert float(parts.loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    (gradient,), (wanted,) = torch.autograd.grad(parts.loss, batch.logprobs), torch.autograd.grad(expected, logprobs)
    np.testing.assert_allclose(gradient.numpy(), wanted.numpy(), rtol=1e-12, atol=1e-15)
    # The explicit one against finite differences, so that not only autograd speaks for it.
    for i in range(len(data)):
        h = torch.zeros(len(data), dtype=torch.float64)
        h[i] = 1e-6
        up, down = (float(explicit_gspo(logprobs.detach() + d, data, low, high)) for d in (h, -h))
        assert float(gradient[i]) == pytest.approx((up - down) / 2e-6, rel=1e-6, abs=1e-9)


def test_gspo_counts_the_tokens_of_clipped_rows() -> None:
    data = sequences()
    clipped = 0
    for t in data:
        own = [u for u in data if u["row"] == t["row"]]
        ratio = math.exp(plain_mean([u["logprob"] - u["old"] for u in own]))
        clipped += (t["adv"] > 0 and ratio > 1.28) or (t["adv"] < 0 and ratio < 0.8)
    assert 0 < clipped < len(data)
    assert float(SURROGATES["sequence"](terms(data)).sums["actor/pg_clipfrac"]) == clipped


def test_gspo_corrects_each_token_by_its_importance() -> None:
    data = sequences()
    parts = policy(terms(data), {**BASE, "importance_cap": 1.1}, SURROGATES["sequence"])
    expected = []
    for t in data:
        own = [u for u in data if u["row"] == t["row"]]
        ratio = math.exp(plain_mean([u["logprob"] - u["old"] for u in own]))
        value = -min(ratio * t["adv"], min(max(ratio, 0.8), 1.28) * t["adv"])
        expected.append(t["weight"] * value * min(math.exp(t["old"] - t["rollout"]), 1.1))
    assert float(parts.loss) == pytest.approx(math.fsum(expected), rel=1e-12)


def test_gspo_on_policy_is_the_policy_gradient() -> None:
    data = sequences()
    batch = terms(data, old=False, grad=True)
    (gradient,) = torch.autograd.grad(policy(batch, BASE, SURROGATES["sequence"]).loss, batch.logprobs)
    np.testing.assert_allclose(gradient.numpy(), [-t["adv"] * t["weight"] for t in data], rtol=1e-12)


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.28), (1.0, 4.0)])
def test_cispo_weighs_the_log_prob_by_a_clipped_constant(low: float, high: float) -> None:
    data = tokens()
    batch = terms(data, grad=True)
    s = {**BASE, "importance_cap": 2.0}
    parts = policy(batch, s, partial(loss.clipped_importance, clip_low=low, clip_high=high))
    ratios = [math.exp(min(20.0, max(-20.0, t["logprob"] - t["old"]))) for t in data]
    constants = [
        -min(max(r, 1 - low), 1 + high) * t["adv"] * t["weight"] * min(math.exp(t["old"] - t["rollout"]), 2.0)
        for r, t in zip(ratios, data, strict=True)
    ]
    expected = math.fsum(c * t["logprob"] for c, t in zip(constants, data, strict=True))
    assert float(parts.loss.detach()) == pytest.approx(expected, rel=1e-12)
    assert float(parts.sums["actor/pg_clipfrac"]) == sum(r < 1 - low or r > 1 + high for r in ratios)
    (gradient,) = torch.autograd.grad(parts.loss, batch.logprobs)
    np.testing.assert_allclose(gradient.numpy(), constants, rtol=1e-12)
    assert all(bool(g) for g, t in zip(gradient, data, strict=True) if t["adv"])


def value_terms() -> tuple[list[dict[str, float]], ValueTerms]:
    """Values that moved not at all, a little and too far, up and down, with returns on either side."""
    rng = np.random.default_rng(2)
    data = [
        {"old": old, "value": old + moved, "return": old + target, "weight": float(rng.uniform(0, 0.1))}
        for moved in (-2.0, -0.3, 0.0, 0.2, 1.5)
        for target in (-3.0, -0.1, 0.05, 2.0)
        for old in (float(rng.normal()),)
    ]
    column = lambda name: torch.tensor([t[name] for t in data], dtype=torch.float64)  # noqa: E731
    return data, ValueTerms(column("value").requires_grad_(), column("weight"), column("old"), column("return"))


def plain_value_loss(t: dict[str, float], value: float, clip: float) -> float:
    error = (value - t["return"]) ** 2
    if clip > 0:
        error = max(error, (min(max(value, t["old"] - clip), t["old"] + clip) - t["return"]) ** 2)
    return t["weight"] * 0.5 * error


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_value_loss_and_gradient_are_the_plain_ones(clip: float) -> None:
    data, batch = value_terms()
    parts = loss.value_loss(batch, value_clip=clip)
    expected = math.fsum(plain_value_loss(t, t["value"], clip) for t in data)
    assert float(parts.loss.detach()) == pytest.approx(expected, rel=1e-12)
    assert float(parts.weighted["critic/vf_loss"]) == pytest.approx(expected, rel=1e-12)
    assert float(parts.sums["critic/vpred_mean"]) == pytest.approx(math.fsum(t["value"] for t in data), rel=1e-12)
    held = sum(plain_value_loss(t, t["value"], clip) > plain_value_loss(t, t["value"], 0.0) for t in data)
    assert float(parts.sums["critic/vf_clipfrac"]) == held and (held > 0) is (clip > 0)
    assert not any(value.requires_grad for value in (*parts.sums.values(), *parts.weighted.values()))
    (gradient,) = torch.autograd.grad(parts.loss, batch.values)
    for slope, t in zip(gradient.tolist(), data, strict=True):
        up, down = (plain_value_loss(t, t["value"] + h, clip) for h in (1e-6, -1e-6))
        assert slope == pytest.approx((up - down) / 2e-6, rel=1e-6, abs=1e-9)


# --------------------------------------------------------------------------------------------------------------------------- the presets


SECTIONS = ("rollout", "ref", "reward", "eval", "data", "critic", "lora", "reward_model", "health", "log", "run")


def tables(settings: dict[str, Any]) -> dict[str, Any]:
    """Keys of [algorithm], or whole other sections by name."""
    sections = {name: settings.pop(name) for name in SECTIONS if name in settings}
    return {"model": {"path": "m"}, "data": {"train": "t"}, "algorithm": settings, **sections}


def config(**settings: Any) -> Config:
    return Config.model_validate(tables(settings))


def checked(**settings: Any) -> Config:
    """As `config`, as a user's file is read, with all its checks."""
    return parse({"run": {"steps": 1000}, **tables(settings)})


def mistakes(**settings: Any) -> list[str]:
    try:
        checked(**settings)
    except UserError as error:
        return [line.partition(". ")[2] for line in str(error).splitlines()[1:]]
    return []


def test_presets_name_functions_and_what_they_are_called_with() -> None:
    assert set(get_args(AlgorithmConfig.model_fields["name"].annotation)) == set(PRESETS)
    for preset in PRESETS.values():
        assert preset.defaults.keys() <= set(AlgorithmConfig.model_fields)
        functions = {"advantage": getattr(advantage, preset.advantage), "loss": getattr(loss, preset.loss)}
        takes = {key: set(inspect.signature(function).parameters) - {"rows", "terms", "everyone"} for key, function in functions.items()}
        assert all(names == FUNCTION_KEYS[key] & preset.defaults.keys() for key, names in takes.items())


OFF = {
    "kl_coef": 0.0, "reward_kl_coef": 0.0, "entropy_coef": 0.0, "importance_cap": 2.0, "importance_level": "token", "overlong_buffer": 0,
}  # fmt: skip
ONCE = {"dynamic_sampling": False}
CLIPS = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
TOKENS = {"aggregation": "token-mean"}
DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": {**OFF, **ONCE, **CLIPS, **TOKENS, "normalize_by_std": True},
    "dr_grpo": {**OFF, **ONCE, **CLIPS, "aggregation": "seq-mean-token-sum-norm", "length_norm": 77, "normalize_by_std": False},
    "dapo": {
        **OFF, **CLIPS, **TOKENS, "clip_high": 0.28, "normalize_by_std": True, "dynamic_sampling": True, "max_rounds": 10,
        "prompts_per_round": 64, "overlong_buffer": 15, "overlong_penalty": 1.0,
    },
    "ppo": {**OFF, **CLIPS, **TOKENS, "gamma": 1.0, "gae_lambda": 1.0, "whiten": True, "value_clip": 0.5, "critic_warmup": 0},
    "rloo": {**OFF, **ONCE, **CLIPS, **TOKENS},
    "reinforce++": {**OFF, **CLIPS, **TOKENS, "gamma": 1.0, "whiten": True},
    "reinforce++_baseline": {**OFF, **ONCE, **CLIPS, **TOKENS, "whiten": True},
    "remax": {**OFF, **CLIPS, **TOKENS},
    "gspo": {**OFF, **ONCE, "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq-mean-token-mean", "normalize_by_std": True},
    "cispo": {**OFF, **ONCE, **TOKENS, "clip_low": 1.0, "clip_high": 4.0, "normalize_by_std": True},
    "sft": TOKENS,
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_defaults(name: str) -> None:
    algorithm = build(config(name=name, **({} if name == "sft" else {"rollout": {"max_new_tokens": 77}})))
    assert algorithm.settings == DEFAULTS[name]
    assert (algorithm.name, algorithm.aggregation) == (name, DEFAULTS[name]["aggregation"])
    assert name == "sft" or algorithm.length_norm == 77
    own = {"ppo": {"values"}, "remax": {"baseline"}}
    assert algorithm.needs == (set() if name == "sft" else {"rollout", *own.get(name, ())})
    assert algorithm.entropy_gradient is False and algorithm.reward_kl is None and algorithm.critic_warmup == 0
    assert (algorithm.value_loss is not None) is (name == "ppo")
    assert algorithm.overlong == (Overlong(77, 15, 1.0) if name == "dapo" else None)
    assert (algorithm.dynamic is not None) is (name == "dapo")


@pytest.mark.parametrize("name", PRESETS)
def test_an_algorithm_survives_the_trip_to_another_process(name: str) -> None:
    assert pickle.loads(pickle.dumps(build(config(name=name)))).name == name


def test_set_keys_reach_the_loss_and_the_advantage() -> None:
    built = build(
        config(
            clip_low=0.1,
            clip_high=0.4,
            dual_clip=0,
            kl_coef=0.2,
            kl_estimator="k2",
            entropy_coef=0.03,
            importance_cap=1.5,
            aggregation="seq-mean-token-sum-norm",
            length_norm=99,
            normalize_by_std=False,
        )
    )
    assert (built.aggregation, built.length_norm, built.settings["length_norm"]) == ("seq-mean-token-sum-norm", 99, 99)
    assert built.needs == {"rollout", "ref_logprobs"} and built.entropy_gradient is True
    s = {"clip_low": 0.1, "clip_high": 0.4, "dual_clip": 0.0, "kl_coef": 0.2, "kl": "k2", "entropy_coef": 0.03, "importance_cap": 1.5}
    data = tokens()
    # As another process would have it: an algorithm must survive the trip.
    algorithm = pickle.loads(pickle.dumps(built))
    expected = math.fsum(plain_token(t, s, t["logprob"], t["entropy"]) for t in data)
    assert float(algorithm.loss(terms(data)).loss) == pytest.approx(expected, rel=1e-12)
    rows = [Row(ids=np.arange(2), mask=np.array([False, True]), reward=r) for r in (4.0, 1.0)]
    assert [float(row.advantages[1]) for row in algorithm.advantage(rows)] == [1.5, -1.5]


def test_keys_of_shaping_and_sampling_reach_their_parts() -> None:
    built = build(
        config(
            name="rloo",
            reward_kl_coef=0.02,
            reward_kl_estimator="k3",
            reward_kl_target=0.1,
            reward_kl_horizon=500,
            overlong_buffer=10,
            overlong_penalty=0.25,
            dynamic_sampling=True,
            prompts_per_round=7,
            max_rounds=3,
            rollout={"max_new_tokens": 40},
        )
    )
    assert built.needs == {"rollout", "ref_logprobs", "old_logprobs"}
    assert built.reward_kl == RewardKL(0.02, 0.1, 500, loss.KL_ESTIMATORS["k3"])
    assert built.overlong == Overlong(40, 10, 0.25)
    assert built.dynamic is not None and (built.dynamic.prompts_per_round, built.dynamic.max_rounds) == (7, 3)
    assert built.dynamic.useful(np.array([0.0, 1.0])) and not built.dynamic.useful(np.array([1.0, 1.0]))
    assert built.settings["reward_kl_horizon"] == 500
    critic = build(config(name="ppo", value_clip=0.1, critic_warmup=4, samples_per_prompt=1))
    data, batch = value_terms()
    assert critic.value_loss is not None and critic.critic_warmup == 4
    expected = math.fsum(plain_value_loss(t, t["value"], 0.1) for t in data)
    assert float(critic.value_loss(batch).loss.detach()) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("name", "surrogate"), [("gspo", loss.sequence_surrogate), ("cispo", loss.clipped_importance)])
def test_set_clips_reach_the_other_surrogates(name: str, surrogate: Any) -> None:
    data = sequences()
    algorithm = build(config(name=name, clip_low=0.1, clip_high=0.15, importance_cap=1.5, minibatches_per_step=2))
    expected = policy(terms(data), {**BASE, "importance_cap": 1.5}, partial(surrogate, clip_low=0.1, clip_high=0.15))
    assert float(algorithm.loss(terms(data)).loss) == pytest.approx(float(expected.loss), rel=1e-15)


@pytest.mark.parametrize(("minibatches", "epochs", "needed"), [(1, 1, False), (2, 1, True), (1, 2, True)])
def test_old_logprobs_are_needed_only_off_policy(minibatches: int, epochs: int, needed: bool) -> None:
    assert ("old_logprobs" in build(config(minibatches_per_step=minibatches, epochs=epochs)).needs) is needed
    assert build(config(name="sft", minibatches_per_step=minibatches, epochs=epochs)).needs == frozenset()


def test_sft_preset() -> None:
    algorithm = build(config(name="sft"))
    assert (algorithm.aggregation, algorithm.settings, algorithm.entropy_gradient) == ("token-mean", {"aggregation": "token-mean"}, False)
    rows = [Row(ids=np.arange(2), mask=np.array([False, True]))]
    assert algorithm.advantage(rows) == rows
    assert "train/loss" in algorithm.loss(terms(tokens())).weighted


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "sft", "clip_low": 0.1}, ["algorithm.clip_low", "does not use"]),
        ({"name": "sft", "samples_per_prompt": 8}, ["algorithm.samples_per_prompt", "does not use"]),
        (
            {"name": "sft", "rollout": {"temperature": 0.5}},
            ["rollout.temperature: 0.5", 'algorithm.name is "sft"', "samples responses"],
        ),
        ({"name": "sft", "reward": {"function": "gsm8k"}}, ["reward.function", 'algorithm.name is "sft"', "scores them"]),
        ({"name": "sft", "eval": {"max_prompts": 3}}, ["eval.max_prompts", 'algorithm.name is "sft"']),
        ({"data": {"train": "t", "response_key": "answer"}}, ["data.response_key", "read prompts only"]),
        ({"name": "sft", "aggregation": "seq-mean-token-sum-norm"}, ["algorithm.length_norm", "Set it"]),
        ({"samples_per_prompt": 1}, ["a group of one has no baseline", "at least 2"]),
        ({"dual_clip": 1.0}, ["algorithm.dual_clip = 1.0", "exceed 1"]),
        ({"dual_clip": 0.5}, ["algorithm.dual_clip = 0.5", "exceed 1"]),
        ({"length_norm": 5}, ["algorithm.length_norm", "token-mean"]),
        ({"kl_estimator": "k2"}, ["algorithm.kl_estimator", "kl_coef"]),
        ({"rollout": {"temperature": 0}}, ["rollout.temperature", "greedy"]),
        ({"ref": {"path": "m"}}, ["ref.path", "algorithm.kl_coef is 0.0", "set algorithm.kl_coef or", "no reference role"]),
        ({"name": "sft", "ref": {"path": "m"}}, ["ref.path", 'algorithm.name is "sft"']),
        ({"prompts_per_round": 8}, ["algorithm.prompts_per_round", "dynamic_sampling"]),
        ({"max_rounds": 8}, ["algorithm.max_rounds", "dynamic_sampling"]),
        ({"name": "ppo", "dynamic_sampling": True}, ["algorithm.dynamic_sampling", "does not use"]),
        ({"name": "remax", "max_rounds": 2}, ["algorithm.max_rounds", "does not use"]),
        ({"reward_kl_target": 0.1}, ["algorithm.reward_kl_target", "reward_kl_coef"]),
        ({"reward_kl_estimator": "k1"}, ["algorithm.reward_kl_estimator", "reward_kl_coef"]),
        ({"reward_kl_coef": 0.1, "reward_kl_horizon": 10}, ["algorithm.reward_kl_horizon", "reward_kl_target"]),
        ({"reward_kl_coef": 0.1, "reward_kl_target": 1.0, "reward_kl_horizon": 100}, ["reward_kl_horizon = 100", "more than 102"]),
        ({"overlong_penalty": 0.5}, ["algorithm.overlong_penalty", "overlong_buffer"]),
        ({"name": "dapo", "overlong_buffer": 0, "overlong_penalty": 0.5}, ["algorithm.overlong_penalty", "overlong_buffer"]),
        ({"overlong_buffer": 300}, ["algorithm.overlong_buffer = 300", "at most 256"]),
        ({"name": "dapo", "run": {"epochs": 1}}, ["run.epochs", "Set run.steps"]),
        ({"name": "dapo", "importance_cap": 0}, ["algorithm.importance_cap = 0", "older weights", "Set it above 0"]),
        ({"name": "rloo", "dynamic_sampling": True, "importance_cap": 0}, ["algorithm.importance_cap = 0", "Set it above 0"]),
        ({"name": "ppo", "critic_warmup": 5, "run": {"steps": 5}}, ["algorithm.critic_warmup = 5", "never be updated"]),
        ({"critic": {"lr": 1e-5}}, ["critic.lr", 'algorithm.name is "grpo"', "which has a critic"]),
        ({"lora": {"rank": 4, "critic": False}}, ["lora.critic: false", "which has a critic"]),
        ({"value_clip": 0.2}, ["algorithm.value_clip", "does not use"]),
        ({"gamma": 0.9}, ["algorithm.gamma", "does not use"]),
        ({"name": "gspo", "dual_clip": 3.0}, ["algorithm.dual_clip", "does not use"]),
        ({"name": "rloo", "normalize_by_std": True}, ["algorithm.normalize_by_std", "does not use"]),
        ({"name": "ppo", "data": {"train": "t", "train_turns": "last"}}, ["data.train_turns", "read prompts only"]),
        ({"data": {"train": "t", "messages_key": "chat"}}, ["data.messages_key", "read prompts only"]),
        ({"name": "sft", "health": {"max_logprob_gap": 0.1}}, ["health.max_logprob_gap", 'algorithm.name is "sft"']),
        ({"name": "sft", "log": {"val_samples": 3}}, ["log.val_samples", 'algorithm.name is "sft"']),
        ({"name": "sft", "run": {"steps": 9, "save_rollouts": 3}}, ["run.save_rollouts", 'algorithm.name is "sft"']),
        ({"name": "sft", "loss": "mine.py:loss"}, ["algorithm.loss", "does not use"]),
    ],
)
def test_mistakes_say_what_and_how_to_mend_it(settings: dict[str, Any], words: list[str]) -> None:
    (message,) = mistakes(**settings)
    assert all(word in message for word in words) and re.search("Remove|Use|Set", message), message


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"name": "sft"},
        {"name": "sft", "aggregation": "seq-mean-token-sum-norm", "length_norm": 8},
        {"dual_clip": 0},
        {"kl_coef": 0.1, "kl_estimator": "k2", "ref": {"path": "m"}},
        {"samples_per_prompt": 2},
        {"name": "ppo", "samples_per_prompt": 1, "critic": {"lr": 1e-5}, "lora": {"rank": 4, "critic": False}},
        {"name": "remax", "samples_per_prompt": 1},
        {"name": "reinforce++", "samples_per_prompt": 1, "gamma": 0.99},
        {"reward_kl_coef": 0.1, "reward_kl_target": 0.1, "ref": {"path": "m"}},
        {"name": "dapo", "run": {"steps": 5}, "max_rounds": 3, "prompts_per_round": 8},
        {"name": "dapo", "dynamic_sampling": False, "run": {"epochs": 1}},
        {"name": "dapo", "dynamic_sampling": False, "importance_cap": 0},
        {"name": "dapo", "rollout": {"max_new_tokens": 1}},
        {"name": "cispo", "clip_low": 1.0},  # its own default
        {"name": "sft", "health": {"patience": 3, "ignore": ["not-finite"]}, "data": {"train": "t", "train_turns": "last"}},
    ],
)
def test_what_is_right_is_not_called_a_mistake(settings: dict[str, Any]) -> None:
    assert mistakes(**settings) == []


def test_a_ratio_is_not_clipped_below_nothing() -> None:
    with pytest.raises(ValueError, match=r"clip_low\n.*less than or equal to 1"):
        config(name="cispo", clip_low=1.01)


@pytest.mark.parametrize(("longest", "buffer"), [(1, 1), (4, 1), (9, 1), (10, 2)])
def test_dapo_punishes_long_responses_however_short_the_longest_is(longest: int, buffer: int) -> None:
    overlong = build(config(name="dapo", rollout={"max_new_tokens": longest})).overlong
    assert overlong == Overlong(longest, buffer, 1.0)
    assert [overlong(tokens) for tokens in (longest - buffer, longest)] == [0, -1]


def test_a_reward_model_has_no_place_in_sft() -> None:
    found = mistakes(name="sft", reward={"function": "reward_model"}, reward_model={"path": "m"})
    assert [message.partition(":")[0] for message in found] == ["reward.function", "reward_model.path"]


def test_all_mistakes_come_at_once() -> None:
    found = mistakes(name="sft", clip_low=0.1, clip_high=0.1, kl_coef=0.1, kl_estimator="k1", samples_per_prompt=2)
    assert len(found) == 5


def test_checking_a_configuration_does_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from fulltilt.algo.build import build\n"
        "from fulltilt.config import parse\n"
        "tables = {'model': {'path': 'm'}, 'data': {'train': 't'}, 'algorithm': {'dual_clip': 0.5}, 'run': {'steps': 1}}\n"
        "try:\n"
        "    parse(tables)\n"
        "except ValueError as error:\n"
        "    assert str(error).startswith('configuration: 1 mistake\\n  1. algorithm.dual_clip = 0.5')\n"
        "assert build(parse(tables, ['algorithm.dual_clip=2.0'])).settings['dual_clip'] == 2\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=environment)


# ------------------------------------------------------------------------------------------------------------------ functions of your own


def own(folder: Path, text: str, name: str = "mine") -> str:
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    return f"{path}:{name}"


def test_an_advantage_of_your_own_gets_what_it_names(tmp_path: Path) -> None:
    text = """
        def mine(rewards, groups, lengths, rows, gamma, normalize_by_std, extra=3):
            assert str(rewards.dtype) == "float64" and str(groups.dtype) == str(lengths.dtype) == "int64" and extra == 3
            assert normalize_by_std is True  # the preset's
            return [reward * gamma + group + length + len(row.ids) for reward, group, length, row in zip(rewards, groups, lengths, rows)]
    """
    algorithm = build(config(advantage=own(tmp_path, re.sub("^        ", "", text, flags=re.M)), gamma=0.5))
    assert algorithm.settings["gamma"] == 0.5 and "normalize_by_std" in algorithm.settings
    for token_rewards in (False, True):
        rows = rows_of_a_step(token_rewards=token_rewards)
        lengths = [sum(bool(trained) for trained in row.mask) for row in rows]
        numbers = [plain_total(row) * 0.5 + row.group + n + len(row.ids) for row, n in zip(rows, lengths, strict=True)]
        expected = [[number] * n for number, n in zip(numbers, lengths, strict=True)]
        # As another process would have it, with the file gone and changed.
        travelled = pickle.loads(pickle.dumps(algorithm))
        assert_per_token([row.advantages for row in travelled.advantage(rows)], rows, expected)
        (tmp_path / "mine.py").write_text("raise SystemExit", encoding="utf-8")


def test_an_advantage_of_your_own_may_speak_of_each_token(tmp_path: Path) -> None:
    text = "import numpy as np\ndef mine(rows):\n    return [np.arange(len(row.ids)) + row.group for row in rows]\n"
    rows = rows_of_a_step(token_rewards=False)
    found = build(config(name="rloo", advantage=own(tmp_path, text))).advantage(rows)
    expected = [[float(t + row.group) for t, trained in enumerate(row.mask) if trained] for row in rows]
    assert_per_token([row.advantages for row in found], rows, expected)


def test_an_advantage_of_your_own_beside_a_critic(tmp_path: Path) -> None:
    """The critic still gets its returns; the function sees GAE's numbers and replaces them."""
    text = (
        "def mine(rows, **rest):\n    assert set(rest) == {'rewards', 'groups', 'lengths'}\n    return [-row.advantages for row in rows]\n"
    )
    rows = rows_of_a_step(token_rewards=False)
    found = build(config(name="ppo", advantage=own(tmp_path, text), gamma=0.9, gae_lambda=0.8)).advantage(rows)
    advantages, returns = plain_gae(rows, 0.9, 0.8)
    assert_per_token([row.returns for row in found], rows, returns)
    assert_per_token([row.advantages for row in found], rows, [[-a for a in numbers] for numbers in plain_whiten(advantages)])


@pytest.mark.parametrize("name", PRESETS)
def test_of_no_rows_there_are_no_advantages(name: str) -> None:
    """Every reward of the step failed."""
    assert build(config(name=name)).advantage([]) == []


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_an_advantage_of_your_own_need_not_know_of_steps_without_rows(name: str, tmp_path: Path) -> None:
    algorithm = build(config(name=name, advantage=own(tmp_path, "def mine(rewards): return rewards - rewards.max()\n")))
    assert algorithm.advantage([]) == []
    rows = rows_of_a_step(token_rewards=False)
    assert max(row.advantages.max() for row in algorithm.advantage(rows) if row.advantages is not None) == 0


SQUARED = "def mine(terms, clip_low, gamma=2.0):\n    return (terms.logprobs - terms.old_logprobs - clip_low) ** gamma * terms.advantages\n"


@pytest.mark.parametrize("old", [True, False])
def test_a_loss_of_your_own_is_weighted_corrected_and_joined_by_the_rest(old: bool, tmp_path: Path) -> None:
    s = {"importance_cap": 1.5, "kl_coef": 0.2, "kl_estimator": "k2", "entropy_coef": 0.03}
    algorithm = build(config(loss=own(tmp_path, SQUARED), clip_low=0.125, minibatches_per_step=1 + old, **s))
    assert algorithm.settings["clip_low"] == 0.125 and "clip_high" not in algorithm.settings
    data = tokens() if old else [{**t, "old": t["logprob"]} for t in tokens()]
    parts = algorithm.loss(terms(data, old=old, grad=True))
    expected = math.fsum(
        t["weight"]
        * (
            (t["logprob"] - t["old"] - 0.125) ** 2 * t["adv"] * min(math.exp(t["old"] - t["rollout"]), 1.5)
            + 0.2 * plain_kl("k2", t["logprob"], t["ref"])
            - 0.03 * t["entropy"]
        )
        for t in data
    )
    assert float(parts.loss.detach()) == pytest.approx(expected, rel=1e-12)
    assert {"actor/ppo_kl", "actor/entropy"} <= parts.sums.keys() and "rollout_corr/logprob_abs_gap" in parts.ratios
    assert parts.weighted.keys() == {"actor/pg_loss", "actor/kl_loss"}


def test_a_scalar_loss_is_taken_as_it_is(tmp_path: Path) -> None:
    name = own(tmp_path, "def mine(terms):\n    return (terms.logprobs * terms.weights).sum()\n")
    with pytest.raises(UserError, match=r"importance_cap = 0"):
        build(config(loss=name))
    algorithm = build(config(loss=name, importance_cap=0, entropy_coef=0.5))
    data = tokens()
    expected = math.fsum(t["weight"] * (t["logprob"] - 0.5 * t["entropy"]) for t in data)
    assert float(algorithm.loss(terms(data, grad=True)).loss.detach()) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("advantage", "def mine(rewards:\n    pass\n", ["syntax error at", "mine.py:1", "Fix"]),
        ("advantage", "x = 1\nimport nothing_of_that_name\n", ["ModuleNotFoundError", "mine.py:2", "Fix"]),
        ("advantage", "def other(rewards): return rewards\n", ["defines no 'mine'", "other"]),
        ("advantage", "mine = 3\n", ["'mine' in", "is of type int, not a function"]),
        ("advantage", "def mine(reward): return reward\n", ["'reward' has no value", "rewards"]),
        ("advantage", "def mine(gamma=1): return 0\n", ["takes none of rewards, groups, lengths, rows"]),
        ("advantage", "def mine(rewards, /): return rewards\n", ["positional only"]),
        ("advantage", "def mine(rewards, gamma): return rewards\n", ["'gamma' has no value", "Set algorithm.gamma"]),
        ("advantage", "def mine(rewards): return rewards[1:]\n", ["15 results for 16 rows"]),
        ("advantage", "def mine(rewards): return 1.0\n", ["returned a float for 16 rows"]),
        ("advantage", "def mine(rewards): return [[1.0, 2.0]] * len(rewards)\n", ["shape (2,)", "as many as the row has tokens"]),
        ("advantage", "def mine(rewards): return rewards / 0\n", ["not finite"]),
        ("advantage", "def mine(rewards): return ['a'] * len(rewards)\n", ["neither a number nor an array"]),
        ("advantage", "def mine(rewards):\n    return rewards[99]\n", ["trial", "IndexError", "mine.py:2"]),
        ("loss", "def mine(logprobs): return logprobs\n", ["takes none of terms", "'logprobs' has no value"]),
        ("loss", "def mine(terms): return terms.logprobs[1:]\n", ["shape (4,) for 5 trained tokens"]),
        ("loss", "def mine(terms): return 1.0\n", ["returned a float"]),
        ("loss", "def mine(terms): return terms.logprobs.detach()\n", ["no gradient"]),
        ("loss", "def mine(terms):\n    return terms.nothing\n", ["trial", "AttributeError", "mine.py:2"]),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_is_wrong_with_your_function_is_said_before_a_model_loads(key: str, text: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        build(checked(**{key: own(tmp_path, text)}))
    assert all(word in str(caught.value) for word in [f"algorithm.{key}", *words]), caught.value


@pytest.mark.parametrize("name", ["nothing.py:mine", "mine", "mine.txt:mine", "nothing.py:1"])
def test_a_function_that_is_not_there(name: str) -> None:
    (message,) = mistakes(loss=name)
    assert message.startswith(f"algorithm.loss = {name!r}") and (
        "FILE.py:NAME" in message or "relative to the current directory" in message
    )


def test_keys_that_your_function_does_not_take_are_reported(tmp_path: Path) -> None:
    (message,) = mistakes(loss=own(tmp_path, "def mine(terms): return terms.logprobs\n"), clip_high=0.3)
    assert "algorithm.clip_high" in message and "does not take it" in message and "parameter clip_high" in message
    (message,) = mistakes(advantage=own(tmp_path, "def mine(rewards): return rewards\n"), normalize_by_std=False)
    assert "algorithm.normalize_by_std" in message and "does not take it" in message


def test_an_error_in_your_function_names_it(tmp_path: Path) -> None:
    algorithm = build(config(advantage=own(tmp_path, "def mine(rows): return [1 / (len(rows) - 13)] * len(rows)\n")))
    with pytest.raises(ZeroDivisionError) as caught:
        algorithm.advantage(rows_of_a_step(token_rewards=False))
    assert any("algorithm.advantage" in note for note in caught.value.__notes__)


# ------------------------------------------------------------------------------------------------------------------------------ the page

PAGE = (Path(__file__).parents[1] / "docs" / "algorithms.md").read_text(encoding="utf-8")


def test_the_pages_own_functions_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    programs = re.findall(r"```python\n# (mine/\w+\.py)\n(.*?)```", PAGE, flags=re.S)
    tables = [tomllib.loads(text)["algorithm"] for text in re.findall(r"```toml\n(.*?)```", PAGE, flags=re.S)]
    assert len(programs) == 2 and len(tables) >= 4
    for path, text in programs:
        (tmp_path / path).write_text(text, encoding="utf-8")
    for table in tables:
        build(config(**table))
    assert {key for table in tables for key in table} >= {"advantage", "loss"}


def test_the_page_has_every_algorithm_and_every_key() -> None:
    for name in PRESETS:
        assert f"| `{name}` |" in PAGE, name
    for key in AlgorithmConfig.model_fields:
        assert f"`{key}`" in PAGE, key
