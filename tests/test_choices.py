"""The advantages, losses, KL estimators and rollout corrections that a run can choose by name, each against float64 numbers that are
computed here from the formula of its paper, in plain numpy and without the package's code; gradients against finite differences of
those."""

from __future__ import annotations

import inspect
import itertools
import math
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fulltilt.algo import advantage, correction, loss, marks
from fulltilt.algo.advantage import Everyone
from fulltilt.algo.base import Algorithm
from fulltilt.algo.build import build
from fulltilt.batching.pack import AGGREGATIONS, MicroSizing, minibatch
from fulltilt.cluster.shelf import reward_part
from fulltilt.config import parse
from fulltilt.observe.metrics import RowSums
from fulltilt.presets import ESTIMATORS, FUNCTION_KEYS, LOSSES, PRESETS, preset_for
from fulltilt.records import MicroBatch, Row, Score, TokenTerms, UserError
from fulltilt.schema import AlgorithmConfig, Config

pytestmark = pytest.mark.usefixtures("named_files")
H = 1e-6  # the step of finite differences


def config(**keys: Any) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}, "algorithm": keys})


def algorithm(**keys: Any) -> Algorithm:
    """As another process has it."""
    found: Algorithm = pickle.loads(pickle.dumps(build(config(**keys))))
    return found


# ---------------------------------------------------------------------------------------------------------------------------- advantages


def step_rows() -> list[Row]:
    """Groups of 4, 3, 1 and 2, interleaved; one of equal rewards, one row with a hole, one without trained tokens."""
    rng = np.random.default_rng(11)
    rows = []
    for index, group in enumerate((5, 2, 5, 8, 2, 5, 2, 9, 5, 9)):
        tokens = int(rng.integers(5, 12))
        mask = np.arange(tokens) >= 2
        if index == 4:
            mask[4] = False
        if index == 6:
            mask[:] = False
        logits = rng.normal(0, 2, (tokens, 7))
        chosen = rng.integers(0, 7, tokens)
        probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        sharp = np.exp(2 * logits) / np.exp(2 * logits).sum(1, keepdims=True)
        old, half = (np.where(mask, np.log(each[np.arange(tokens), chosen]), 0).astype(np.float32) for each in (probs, sharp))
        rows.append(
            Row(
                np.arange(tokens), mask, group, reward=0.5 if group == 9 else float(rng.choice([0.0, 1.0, 2.5])), old_logprobs=old,
                sharp_logprobs=half, rollout_logprobs=(old + rng.normal(0, 0.4, tokens) * mask).astype(np.float32),
                parts=(float(rng.normal()), float(rng.integers(0, 2)) * 100),
            )
        )  # fmt: skip
        SQUARES[id(rows[-1].ids)] = (probs**2).sum(1)
    return rows


SQUARES: dict[int, np.ndarray] = {}  # the sum of all squared probabilities, by the row's ids


def groups_of(rows: list[Row]) -> list[list[int]]:
    return [[place for place, row in enumerate(rows) if row.group == group] for group in sorted({row.group for row in rows})]


def relative(numbers: np.ndarray, rows: list[Row], by_std: bool) -> np.ndarray:
    found = np.zeros(len(rows))
    for places in groups_of(rows):
        own = numbers[places]
        if len(places) > 1 and len(set(own)) > 1:
            found[places] = (own - own.mean()) / (own.std(ddof=1) + 1e-6 if by_std else 1.0)
    return found


def expected_passk(rows: list[Row], by_std: bool) -> list[float]:
    found = np.zeros(len(rows))
    for places in groups_of(rows):
        ranked = sorted(places, key=lambda place: rows[place].reward)
        if len(places) > 1:
            lead = rows[ranked[-1]].reward - rows[ranked[-2]].reward
            found[ranked[-1]] = lead / (np.std([rows[place].reward for place in places], ddof=1) + 1e-6 if by_std else 1.0)
    return list(found)


def expected_opo(rows: list[Row]) -> list[float]:
    found = np.zeros(len(rows))
    for places in groups_of(rows):
        lengths, rewards = (
            np.array([get(rows[place]) for place in places]) for get in (lambda row: row.mask.sum(), lambda row: row.reward)
        )
        if len(places) > 1:
            found[places] = rewards - (lengths * rewards).sum() / lengths.sum()
    return list(found)


def expected_gpg(rows: list[Row]) -> list[float]:
    rewards = np.array([row.reward for row in rows])
    return list(relative(rewards, rows, False) * len(rows) / np.count_nonzero(rewards))


def expected_gdpo(rows: list[Row], by_std: bool) -> list[float]:
    parts = np.array([row.parts for row in rows])
    mixed = 2.0 * relative(parts[:, 0], rows, by_std) - 0.5 * relative(parts[:, 1], rows, by_std)
    tokens = np.concatenate([np.full(row.mask.sum(), own) for own, row in zip(mixed, rows, strict=True)])
    return list((mixed - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8))


PER_ROW: dict[str, tuple[dict[str, Any], Any]] = {
    "passk": ({"advantage": "grpo_passk"}, lambda rows: expected_passk(rows, True)),
    "passk plain": ({"advantage": "grpo_passk", "normalize_by_std": False}, lambda rows: expected_passk(rows, False)),
    "opo": ({"advantage": "opo"}, expected_opo),
    "gpg": ({"advantage": "gpg"}, expected_gpg),
    "gdpo": ({"advantage": "gdpo", "reward_parts": {"a": 2.0, "b": -0.5}}, lambda rows: expected_gdpo(rows, True)),
    "gdpo plain": (
        {"advantage": "gdpo", "reward_parts": {"a": 2.0, "b": -0.5}, "normalize_by_std": False},
        lambda rows: expected_gdpo(rows, False),
    ),
}


@pytest.mark.parametrize("case", PER_ROW)
def test_an_advantage_for_each_sample(case: str) -> None:
    keys, expected = PER_ROW[case]
    rows = step_rows()
    for row, wanted in zip(algorithm(**keys).advantage(rows), expected(rows), strict=True):
        assert row.advantages is not None and (row.advantages[~row.mask] == 0).all()
        np.testing.assert_allclose(row.advantages[row.mask], np.float32(wanted), rtol=3e-7, atol=1e-9)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_baseline_of_each_token_minimises_the_variance(weighted: bool) -> None:
    """OTB: the baseline at t is the mean of what is still to come, weighted by the energy of each sample up to t."""
    rows, chosen = step_rows(), algorithm(advantage="optimal_token_baseline", importance_cap=1.25 if weighted else 0.0)
    assert {"old_logprobs", "sharp_logprobs"} <= chosen.needs and (chosen.correct is not None) is weighted
    found = chosen.advantage(chosen.correct(rows) if chosen.correct else rows)
    for places in groups_of(rows):
        energies = []
        for place in places:
            row = rows[place]
            assert row.old_logprobs is not None and row.rollout_logprobs is not None
            own = (1 - 2 * np.exp(row.old_logprobs.astype(float)) + SQUARES[id(row.ids)])[row.mask]
            ratio = np.exp(row.old_logprobs.astype(float) - row.rollout_logprobs)[row.mask]
            energies.append(np.cumsum(own * (np.minimum(ratio, 1.25) ** 2 if weighted else 1.0)))
        lengths = sorted(len(energy) for energy in energies)
        for place, energy in zip(places, energies, strict=True):
            wanted = []
            for t in range(len(energy)):
                there = [(e[t], rows[other].reward) for e, other in zip(energies, places, strict=True) if len(e) > t]
                baseline = sum(e * reward for e, reward in there) / (sum(e for e, _ in there) + 1e-8)
                wanted.append(rows[place].reward - (baseline if t < lengths[-2:][0] or lengths[-1:] == lengths[-2:-1] else 0.0))
            advantages = found[place].advantages
            assert advantages is not None
            np.testing.assert_allclose(
                advantages[rows[place].mask], [0.0] * len(energy) if len(places) == 1 else wanted, rtol=2e-5, atol=2e-6
            )


@pytest.mark.parametrize("case", [*PER_ROW, "otb"])
def test_the_order_of_rows_does_not_show(case: str) -> None:
    keys = PER_ROW[case][0] if case in PER_ROW else {"advantage": "optimal_token_baseline"}
    rows, function = (
        [replace(row, reward=row.reward + 1e6 * (place % 3)) for place, row in enumerate(step_rows())],
        algorithm(**keys).advantage,
    )
    straight = function(rows)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(rows))
        for place, row in zip(order, function([rows[index] for index in order]), strict=True):
            np.testing.assert_array_equal(row.advantages, straight[place].advantages)
    assert function([]) == []


def test_parts_of_a_reward_are_found_by_name() -> None:
    score = Score(0.75, {"format": 1.0, "answer": 0.5})
    assert [reward_part(score, name) for name in ("answer", "format", "score")] == [0.5, 1.0, 0.75]
    assert reward_part(Score(-1.0, error="late"), "format") == -1.0
    with pytest.raises(UserError, match=r"no part 'formt'\. Its parts: score, format, answer"):
        reward_part(score, "formt")


# -------------------------------------------------------------------------------------------------------------------------------- losses


def token_table() -> dict[str, np.ndarray]:
    """Rows of 1 to 6 tokens with an advantage each, among them 0; ratios far below to far above 1; probabilities from rare to certain."""
    rng = np.random.default_rng(4)
    lengths = [1, 3, 6, 2, 5, 4, 6, 3, 1, 5, 6, 4]
    rows = np.repeat(np.arange(len(lengths)), lengths)
    logprobs = -rng.exponential(1.2, len(rows)) - 1e-3
    return {
        "row": rows,
        "adv": np.repeat(rng.choice([-1.6, -0.4, 0.0, 0.7, 2.1], len(lengths)), lengths),
        "new": logprobs,
        "old": np.minimum(logprobs - rng.normal(0, 0.4, len(rows)), -1e-3),
        "rollout": logprobs + rng.normal(0, 0.5, len(rows)),
        "ref": logprobs + rng.normal(0, 1.5, len(rows)),
        "weight": rng.uniform(0.01, 0.1, len(rows)),
        "marked": rng.random(len(rows)) < 0.3,
    }


def as_terms(table: dict[str, np.ndarray], **fields: Any) -> TokenTerms:
    column = {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in table.items()}
    given: dict[str, Any] = {
        "logprobs": column["new"].requires_grad_(), "entropy": torch.ones(len(table["new"]), dtype=torch.float64),
        "weights": column["weight"], "row": torch.tensor(table["row"]), "rollout_logprobs": column["rollout"],
        "old_logprobs": column["old"], "ref_logprobs": column["ref"], "advantages": column["adv"], "marked": torch.tensor(table["marked"]),
    }  # fmt: skip
    return TokenTerms(**given | fields)


def row_mean(numbers: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return np.array([numbers[rows == row].mean() for row in rows])


def gmpo(t: dict[str, np.ndarray], new: np.ndarray) -> np.ndarray:
    """Eq. 4 of the GMPO paper: the geometric mean of ratios that are clipped token by token, to the power of the sign of A."""
    sign, gap = np.sign(t["adv"]), new - t["old"]
    clipped = sign * np.minimum(sign * gap, sign * np.clip(gap, -0.3, 0.4))
    return -row_mean(t["adv"], t["row"]) * np.exp(row_mean(clipped, t["row"]))


def sapo(t: dict[str, np.ndarray], new: np.ndarray) -> np.ndarray:
    tau = np.where(t["adv"] > 0, 1.5, 2.5)
    return -t["adv"] * 4 / tau / (1 + np.exp(-tau * (np.exp(new - t["old"]) - 1)))


def clip_cov(t: dict[str, np.ndarray], new: np.ndarray) -> np.ndarray:
    ratio = np.exp(new - t["old"])
    return np.where(t["marked"], 0.0, -np.minimum(ratio * t["adv"], np.clip(ratio, 0.9, 1.3) * t["adv"]))


def kl_cov(t: dict[str, np.ndarray], new: np.ndarray) -> np.ndarray:
    return -np.exp(new - t["old"]) * t["adv"] + 0.7 * np.abs(new - t["old"]) * t["marked"]


def dppo(kind: str, cap: float, t: dict[str, np.ndarray], new: np.ndarray) -> np.ndarray:
    """Eq. 9 and 10 of the DPPO paper: the mask and the ratio are constants of the gradient."""
    p, q = np.exp(t["new"]), np.exp(t["old"])
    divergence = np.abs(p - q) if kind == "tv" else q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
    away = np.where(t["adv"] > 0, (p > q) & (divergence > 0.1), (p < q) & (divergence > 0.05))
    return -np.where(away, 0.0, np.minimum(p / q, cap)) * t["adv"] * new


SURROGATES: dict[str, tuple[dict[str, Any], Any]] = {
    "gpg": ({}, lambda t, new: -t["adv"] * new),
    "clip_cov": ({"clip_low": 0.1, "clip_high": 0.3}, clip_cov),
    "kl_cov": ({"cov_kl_coef": 0.7}, kl_cov),
    "geo_mean": ({"clip_low": 0.3, "clip_high": 0.4}, gmpo),
    "sapo": ({"tau_pos": 1.5, "tau_neg": 2.5}, sapo),
    "dppo_tv": ({"clip_low": 0.05, "clip_high": 0.1, "dual_clip": 1.2}, lambda t, new: dppo("tv", 1.2, t, new)),
    "dppo_kl": ({"clip_low": 0.05, "clip_high": 0.1, "dual_clip": 0.0}, lambda t, new: dppo("kl", np.inf, t, new)),
}


@pytest.mark.parametrize("name", SURROGATES)
def test_a_loss_and_its_gradient(name: str) -> None:
    keys, expected = SURROGATES[name]
    t, chosen = token_table(), algorithm(loss=name, importance_cap=0.0, minibatches_per_step=2, **keys)
    batch = as_terms(t)
    parts = chosen.loss(batch)
    assert float(parts.loss.detach()) == pytest.approx(math.fsum(expected(t, t["new"]) * t["weight"]), rel=1e-9)
    (gradient,) = torch.autograd.grad(parts.loss, batch.logprobs)
    for place in range(len(t["new"])):
        step = np.zeros(len(t["new"]))
        step[place] = H
        up, down = (math.fsum(expected(t, t["new"] + sign * step) * t["weight"]) for sign in (1, -1))
        assert float(gradient[place]) == pytest.approx((up - down) / (2 * H), rel=1e-5, abs=1e-8)
    for metric in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower"):
        if metric in parts.sums and name != "dppo_kl":
            assert 0 < float(parts.sums[metric]) < len(t["new"]) / 2, metric


def test_every_loss_and_every_advantage_is_tried() -> None:
    assert LOSSES.keys() == SURROGATES.keys() | {"ppo", "gspo", "cispo"}
    assert ESTIMATORS.keys() == {keys["advantage"] for keys, _ in PER_ROW.values()} | {
        "gae", "grpo", "rloo", "remax", "reinforce++", "reinforce++_baseline", "optimal_token_baseline",
    }  # fmt: skip
    for name, estimator in ESTIMATORS.items():
        for choice, surrogate in LOSSES.items():
            preset = preset_for("grpo", name, choice)
            functions = {"advantage": getattr(advantage, estimator.function), "loss": getattr(loss, surrogate.function)}
            takes = {key: set(inspect.signature(each).parameters) - {"rows", "terms", "everyone"} for key, each in functions.items()}
            if surrogate.marks:
                own = inspect.signature(getattr(marks, surrogate.marks)).parameters.values()
                takes["loss"] |= {each.name for each in own if each.kind is not each.KEYWORD_ONLY} - {"batches", "logprobs"}
            assert all(names == FUNCTION_KEYS[key] & preset.defaults.keys() for key, names in takes.items()), (name, choice)
            assert preset.defaults.keys() <= AlgorithmConfig.model_fields.keys()


def test_on_policy_every_loss_is_the_policy_gradient() -> None:
    """At a ratio of 1 the gradient of a token is -A times its weight, whatever the loss; of GMPO, with the weights of
    seq-mean-token-mean."""
    t = token_table()
    lengths = row_mean(np.ones(len(t["row"])), t["row"]) * [np.count_nonzero(t["row"] == row) for row in t["row"]]
    t |= {"marked": np.zeros(len(t["row"]), bool), "weight": 1 / (len(set(t["row"])) * lengths)}
    for name in LOSSES:
        batch = as_terms(t, old_logprobs=None)
        (gradient,) = torch.autograd.grad(algorithm(loss=name, importance_cap=0.0).loss(batch).loss, batch.logprobs)
        np.testing.assert_allclose(gradient.numpy(), -t["adv"] * t["weight"], rtol=1e-12, err_msg=name)


def test_hopeless_ratios_stay_finite_in_float32() -> None:
    logprobs = torch.tensor([-0.1, -0.1, -200.0, -200.0, -0.1, 0.0], requires_grad=True)
    far = torch.tensor([-200.0, -200.0, -0.1, -0.1, -200.0, 0.0])
    advantages, ones = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, 1.0]), torch.ones(6)
    batch = TokenTerms(logprobs, ones, ones, torch.arange(6), far, far, far, advantages, marked=ones.bool())
    for name, level in itertools.product(LOSSES, ("token", "sequence", "bypass")):
        keys = {} if level == "bypass" else {"importance_cap": 2.0}
        for estimator in ("k1", "k2", "k3", "abs", "k1+", "k3+"):
            chosen = algorithm(loss=name, importance_level=level, kl_coef=0.1, kl_estimator=estimator, minibatches_per_step=2, **keys)
            parts = chosen.loss(batch)
            (gradient,) = torch.autograd.grad(parts.loss, logprobs)
            assert parts.loss.isfinite() and gradient.isfinite().all(), (name, level, estimator)


# ----------------------------------------------------------------------------------------------------------------------------------- KL


def test_kl_estimators_and_their_gradients() -> None:
    t = token_table()
    gap = t["new"] - t["ref"]
    third = np.exp(-gap) - 1 + gap
    values = {"k1": gap, "k2": gap**2 / 2, "k3": third, "abs": np.abs(gap), "k1+": gap, "k3+": third}
    slopes = {"k1": np.ones_like(gap), "k2": gap, "k3": 1 - np.exp(-gap), "abs": np.sign(gap), "k1+": gap, "k3+": gap}
    assert values.keys() == loss.KL_ESTIMATORS.keys()
    assert np.abs(gap).max() > 2.6  # where verl's k3 parts from this one
    for name, expected in values.items():
        chosen = algorithm(kl_coef=0.25, kl_estimator=name, importance_cap=0.0)
        batch = as_terms(t, old_logprobs=None, advantages=torch.zeros(len(gap), dtype=torch.float64))
        parts = chosen.loss(batch)
        assert float(parts.weighted["actor/kl_loss"]) == pytest.approx(math.fsum(expected * t["weight"]), rel=1e-12)
        (gradient,) = torch.autograd.grad(parts.loss, batch.logprobs)
        np.testing.assert_allclose(gradient.numpy(), 0.25 * slopes[name] * t["weight"], rtol=1e-12, err_msg=name)


@pytest.mark.parametrize(("theirs", "ours"), [("low_var_kl+", "k3+"), ("kl+", "k1+"), ("mse+", "k2"), ("abs", "abs"), ("k3+", "k3+")])
def test_verls_names_of_kl_estimators(theirs: str, ours: str) -> None:
    keys = config(kl_coef=0.1, kl_estimator=theirs, reward_kl_coef=0.1, reward_kl_estimator=theirs).algorithm
    assert (keys.kl_estimator, keys.reward_kl_estimator) == (ours, ours.rstrip("+"))


# ------------------------------------------------------------------------------------------------------------------------- mini-batches


def batch_rows(count: int = 9) -> list[Row]:
    rng = np.random.default_rng(6)
    rows = []
    for place in range(count):
        tokens = int(rng.integers(6, 20))
        mask = np.arange(tokens) >= 3
        old = (-rng.exponential(1.5, tokens) * mask).astype(np.float32)
        rows.append(
            Row(
                np.arange(tokens), mask, place // 3, old_logprobs=old, advantages=(rng.normal(0, 1.5) * mask).astype(np.float32),
                rollout_logprobs=(old + rng.normal(0, 0.3, tokens) * mask).astype(np.float32),
            )
        )  # fmt: skip
    return rows


def logprobs_now(row: int, positions: np.ndarray) -> np.ndarray:
    """The policy's log-probs, a function of row and position."""
    return np.float32(-0.05 - 2.5 * (np.sin(row * 7.3 + positions * 1.7) + 1))


class Waits(Exception):
    """A worker has asked, and waits for what the others have."""


class Others(Everyone):
    def __init__(self, answers: list[list[list[float]]], asked: list[list[float]]) -> None:
        self.answers, self.asked, self.question = answers, asked, 0

    def gather(self, numbers: Any) -> list[float]:
        self.question += 1
        if self.question <= len(self.answers):
            return [number for each in self.answers[self.question - 1] for number in each]
        self.asked.append(list(numbers))
        raise Waits

    def sum(self, numbers: Any) -> float:
        return math.fsum(self.gather(advantage.exact_parts(numbers)))


def marked_by(function: Any, parts: list[tuple[MicroBatch, ...]]) -> set[tuple[int, int]]:
    """What several workers mark, each with its own micro-batches: (row, position). They take turns as if all were asked at the same
    time."""
    numbers = [
        [
            np.concatenate(
                [logprobs_now(row, micro.positions[micro.trained][micro.trained_row == place]) for place, row in enumerate(micro.rows)]
            )
            for micro in part
        ]
        for part in parts
    ]
    answers: list[list[list[float]]] = []  # of every question so far, what each worker has
    while True:
        asked: list[list[float]] = []
        found = []
        for part, logprobs in zip(parts, numbers, strict=True):
            try:
                found.append(function(part, logprobs, update=3, everyone=Others(answers, asked)))
            except Waits:
                continue
        if not asked:
            break
        answers.append(asked)
    return {
        (micro.rows[row], int(position))
        for part, marked in zip(parts, found, strict=True)
        for micro, own in zip(part, marked, strict=True)
        for row, position in zip(micro.trained_row[own], micro.positions[micro.trained][own], strict=True)
    }


def plain_covariances(rows: list[Row]) -> dict[tuple[int, int], tuple[float, float]]:
    """Of each trained token, its covariance and its log ratio."""
    places = [(index, t) for index, row in enumerate(rows) for t in np.flatnonzero(row.mask)]
    new = np.array([float(logprobs_now(index, np.array(t))) for index, t in places])
    adv, old = (np.array([float(getattr(rows[index], name)[t]) for index, t in places]) for name in ("advantages", "old_logprobs"))
    return dict(zip(places, zip((adv - adv.mean()) * (new - new.mean()), new - old, strict=True), strict=True))


def splits(rows: list[Row]) -> list[list[tuple[MicroBatch, ...]]]:
    """The same rows in one micro-batch, in many, and dealt to two and three workers, of which one may have none."""
    found = []
    for budget in (10_000, 1, 30):
        micro = minibatch(rows, "token-mean", 1, MicroSizing(budget)).micro_batches
        found += [[micro], [micro[::2], micro[1::2]], [micro[2:], (), micro[:2]]]
    return found


@pytest.mark.parametrize("share", [0.002, 0.1, 1.0])
def test_kl_cov_marks_the_largest_covariances_of_the_mini_batch(share: float) -> None:
    rows = batch_rows()
    covariances = plain_covariances(rows)
    count = max(1, int(share * len(covariances)))
    expected = set(sorted(covariances, key=lambda place: -covariances[place][0])[:count])
    function = algorithm(loss="kl_cov", cov_share=share).marks
    for parts in splits(rows):
        assert marked_by(function, parts) == expected


def test_clip_cov_draws_among_large_covariances_that_are_not_clipped() -> None:
    rows = batch_rows(20)
    adv = {(index, t): float(row.advantages[t]) for index, row in enumerate(rows) for t in np.flatnonzero(row.mask)}  # type: ignore[index]
    candidates = {
        place
        for place, (covariance, gap) in plain_covariances(rows).items()
        if 0.5 < covariance < 4.0 and not (adv[place] > 0 and math.exp(gap) > 1.3) and not (adv[place] < 0 and math.exp(gap) < 0.8)
    }
    assert 8 < len(candidates) < len(adv) / 2
    keys = {"loss": "clip_cov", "cov_low": 0.5, "cov_high": 4.0, "clip_low": 0.2, "clip_high": 0.3}
    for share in (0.04, 1.0):
        function = algorithm(**keys, cov_share=share).marks
        found = [marked_by(function, parts) for parts in splits(rows)]
        assert all(each == found[0] for each in found) and found[0] <= candidates
        assert len(found[0]) == min(len(candidates), max(1, int(share * len(adv))))
    # Another seed, another update: other tokens.
    drawn = {frozenset(marked_by(marks_of(keys, seed), splits(rows)[0])) for seed in range(6)}
    assert len(drawn) > 3


def marks_of(keys: dict[str, Any], seed: int) -> Any:
    tables = {"model": {"path": "m"}, "data": {"train": "t"}, "algorithm": {**keys, "cov_share": 0.04}, "run": {"seed": seed}}
    return build(Config.model_validate(tables)).marks


def test_ties_are_decided_by_row_and_position() -> None:
    """Where all advantages are equal, so are all covariances."""
    rows = [replace(row, advantages=(1.0 * row.mask).astype(np.float32)) for row in batch_rows(4)]
    places = sorted((index, int(t)) for index, row in enumerate(rows) for t in np.flatnonzero(row.mask))
    function = algorithm(loss="kl_cov", cov_share=0.2).marks
    for parts in splits(rows):
        assert marked_by(function, parts) == set(places[: int(0.2 * len(places))])


def test_token_sum_weighs_every_token_with_one() -> None:
    rows = batch_rows()
    batch = minibatch(rows, "token-sum", 1, MicroSizing(40))
    assert {weight for micro in batch.micro_batches for weight in micro.weights.tolist()} == {1.0}
    assert "token-sum" in AGGREGATIONS and algorithm(aggregation="token-sum").aggregation == "token-sum"


# --------------------------------------------------------------------------------------------------------------------- rollout correction


def ratios_of(row: Row) -> np.ndarray:
    """The trainer's probability over the engine's, of each trained token."""
    assert row.old_logprobs is not None and row.rollout_logprobs is not None
    return np.exp(row.old_logprobs[row.mask].astype(np.float64) - row.rollout_logprobs[row.mask].astype(np.float64))


def expected_weights(rows: list[Row], level: str, low: float | None, cap: float) -> list[np.ndarray]:
    found = []
    for row in rows:
        ratio = ratios_of(row)
        if level.startswith("sequence"):
            ratio = np.full_like(ratio, ratio.prod())
        found.append(np.minimum(ratio, cap) if low is None else np.where((ratio >= low) & (ratio <= cap), ratio, 0.0))
    if level.endswith("normalized"):
        each = [own[:1] if level.startswith("sequence") else own for own in found]
        found = [own / np.concatenate(each).mean() for own in found]
    return found


@pytest.mark.parametrize("cap", [1.2, [0.5, 1.7], [0.0, 1.3]])
@pytest.mark.parametrize("level", ["token", "sequence", "token-normalized", "sequence-normalized"])
def test_the_importance_weight(level: str, cap: Any) -> None:
    """In the loss, or before it where it depends on the whole step; cut in micro-batches in any way."""
    rows, chosen = batch_rows(), algorithm(loss="ppo", importance_level=level, importance_cap=cap, minibatches_per_step=2)
    assert (chosen.correct is not None) is level.endswith("normalized") and "old_logprobs" in chosen.needs
    low, high = cap if isinstance(cap, list) else (None, cap)
    expected = expected_weights(rows, level, low, high)
    tokens = np.concatenate(expected)
    advantages = np.concatenate([row.advantages[row.mask] for row in rows if row.advantages is not None]).astype(float)
    corrected = chosen.correct(rows) if chosen.correct else rows
    plain = expected_weights(rows, level.removesuffix("-normalized"), low, high)
    for budget in (10_000, 40):
        total, counted = 0.0, {"rollout_is_mean": [0.0, 0.0], "rollout_is_ratio_fraction_high": [0.0, 0.0]}
        for micro in minibatch(corrected, "token-mean", 1, MicroSizing(budget)).micro_batches:
            parts = chosen.loss(micro_terms(micro))
            total += float(parts.loss)
            for name, sums in counted.items():
                for place, number in enumerate(parts.ratios[f"rollout_corr/{name}"]):
                    sums[place] += float(number)
        assert total == pytest.approx(-(tokens * advantages).mean(), rel=1e-6)
        assert counted["rollout_is_mean"][0] / len(tokens) == pytest.approx(np.concatenate(plain).mean(), rel=1e-6)
        above = (
            [own.prod() > high for own in map(ratios_of, rows)] if level.startswith("s") else np.concatenate([*map(ratios_of, rows)]) > high
        )
        high_sum, of_all = counted["rollout_is_ratio_fraction_high"]
        assert high_sum / of_all == pytest.approx(np.mean(above))


def micro_terms(micro: MicroBatch) -> TokenTerms:
    """On policy: the log-probs are the old ones."""

    def tensor(array: np.ndarray | None) -> Any:
        return None if array is None else torch.tensor(array, dtype=torch.float64)

    old = tensor(micro.old_logprobs)
    return TokenTerms(
        old, torch.zeros_like(old), tensor(micro.weights), torch.tensor(micro.trained_row), rollout_logprobs=tensor(micro.rollout_logprobs),
        old_logprobs=old, advantages=tensor(micro.advantages), importance=tensor(micro.importance),
    )  # fmt: skip


def test_gpg_is_weighed_by_the_policy_as_it_is_now() -> None:
    """So that with a weight it is verl's bypass of type reinforce: w log p A with w = now / engine, truncated, of tokens or of samples."""
    t = token_table()
    for level in ("token", "sequence"):
        chosen = algorithm(loss="gpg", importance_level=level, importance_cap=1.5, minibatches_per_step=2)
        assert "old_logprobs" not in chosen.needs
        ratio = np.exp(t["new"] - t["rollout"])
        if level == "sequence":
            ratio = np.array([ratio[t["row"] == row].prod() for row in t["row"]])
        batch = as_terms(t)
        parts = chosen.loss(batch)
        constants = -np.minimum(ratio, 1.5) * t["adv"] * t["weight"]
        assert float(parts.loss.detach()) == pytest.approx(math.fsum(constants * t["new"]), rel=1e-12)
        (gradient,) = torch.autograd.grad(parts.loss, batch.logprobs)
        np.testing.assert_allclose(gradient.numpy(), constants, rtol=1e-12)


def test_bypass_compares_with_the_engine_in_place_of_the_old_policy() -> None:
    t = token_table()
    chosen = algorithm(importance_level="bypass", minibatches_per_step=2, clip_low=0.2, clip_high=0.3, dual_clip=0.0)
    assert "old_logprobs" not in chosen.needs and chosen.correct is None
    parts = chosen.loss(as_terms(t, old_logprobs=None))
    ratio = np.exp(t["new"] - t["rollout"])
    expected = -np.minimum(ratio * t["adv"], np.clip(ratio, 0.8, 1.3) * t["adv"]) * t["weight"]
    assert float(parts.loss.detach()) == pytest.approx(math.fsum(expected), rel=1e-12)
    assert float(parts.ratios["rollout_corr/kl"][0]) == pytest.approx(math.fsum(t["rollout"] - t["new"]), rel=1e-12)
    # What the policy has moved since the first update is no gap of the engine's.
    assert "rollout_corr/logprob_abs_gap" not in parts.ratios and "rollout_corr/logprob_abs_gap" in chosen.loss(as_terms(t)).ratios
    # Old log-probs that something else asks for change nothing.
    assert float(chosen.loss(as_terms(t)).loss.detach()) == float(parts.loss.detach())


def expected_distance(row: Row, name: str) -> np.ndarray:
    ratio = ratios_of(row)
    if name == "binary_kl":
        assert row.old_logprobs is not None and row.rollout_logprobs is not None
        p, q = (np.clip(np.exp(each[row.mask].astype(float)), 1e-6, 1 - 1e-6) for each in (row.old_logprobs, row.rollout_logprobs))
        both = [a * np.log(a / b) + (1 - a) * np.log((1 - a) / (1 - b)) for a, b in ((p, q), (q, p))]
        return np.maximum(*both)
    level, kind = name.rsplit("_", 1)
    distance = {"k1": -np.log(ratio), "k2": np.log(ratio) ** 2 / 2, "k3": ratio - 1 - np.log(ratio)}[kind]
    number = {"token": distance, "seq_sum": distance.sum(), "seq_mean": distance.mean(), "seq_max": distance.max()}[level]
    return np.broadcast_to(number, ratio.shape)


def expected_kept(row: Row, name: str, low: float | None, high: float) -> np.ndarray:
    number = expected_distance(row, name)
    return (math.log(low or 0.5) <= number) & (number <= math.log(high)) if name.endswith("k1") else number <= high


def expected_metrics(rows: Sequence[Row], name: str, low: float | None, high: float) -> dict[str, float]:
    """verl's metrics of one criterion: those of samples count each sample once, the others each token."""
    distances = [expected_distance(row, name) for row in rows]
    tokens, samples = np.concatenate(distances), np.array([each.mean() for each in distances])
    lower, upper = (math.log(low or 0.5), math.log(high)) if name.endswith("k1") else (0.0, high)
    counted = samples if name.startswith("seq") else tokens
    kept = [expected_kept(row, name, low, high) for row in rows]
    return {
        "mean": tokens.mean(), "max": tokens.max(), "min": tokens.min(), "std": tokens.clip(lower, upper).std(),
        "fraction_high": (counted > upper).mean(), "fraction_low": (counted < lower).mean(),
        "seq_mean": samples.mean(), "seq_std": samples.std(ddof=1), "seq_max": samples.max(), "seq_min": samples.min(),
        "seq_max_deviation": abs(samples).max(), "seq_fraction_high": (samples > upper).mean(),
        "seq_fraction_low": (samples < lower).mean(), "masked_fraction": 1 - np.concatenate(kept).mean(),
        "seq_masked_fraction": np.mean([not own.all() for own in kept]),
    }  # fmt: skip


CRITERIA: dict[str, tuple[float | None, float]] = {
    "token_k1": (0.8, 1.3), "token_k2": (None, 0.05), "token_k3": (None, 0.04), "seq_sum_k1": (0.6, 1.7), "seq_sum_k2": (None, 0.35),
    "seq_sum_k3": (None, 0.35), "seq_mean_k1": (0.96, 1.03), "seq_mean_k2": (None, 0.04), "seq_mean_k3": (None, 0.045),
    "seq_max_k2": (None, 0.15), "seq_max_k3": (None, 0.15), "binary_kl": (None, 0.005),
}  # fmt: skip


@pytest.mark.parametrize("name", CRITERIA)
def test_what_is_rejected(name: str) -> None:
    rows, (low, high) = batch_rows(), CRITERIA[name]
    chosen = algorithm(
        rejection=name, rejection_bounds=high if low is None else [low, high], importance_level="sequence", importance_cap=1.5
    )
    assert chosen.correct is not None and "old_logprobs" in chosen.needs
    found = chosen.correct(rows)
    expected = [expected_kept(row, name, low, high) for row in rows]
    kept = np.concatenate(expected)
    assert 0 < np.count_nonzero(kept) < len(kept)
    for row, after, own in zip(rows, found, expected, strict=True):
        np.testing.assert_array_equal(after.mask[row.mask], own)
        assert not after.mask[~row.mask].any() and after.rejected == np.count_nonzero(~own)
        # The weight is that of the whole sample, what is rejected included.
        assert after.importance is not None
        np.testing.assert_allclose(after.importance[row.mask], min(ratios_of(row).prod(), 1.5), rtol=1e-6)
    metrics = RowSums.of(found).metrics()
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 - kept.mean())
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(np.mean([not own.all() for own in expected]))
    own = {f"rollout_corr/rollout_rs_{name}_{part}": value for part, value in expected_metrics(rows, name, low, high).items()}
    of_two_workers = (RowSums.of(found[:2]) + RowSums.of(found[2:])).metrics()
    for measured in (metrics, of_two_workers):
        assert {key: measured[key] for key in own} == pytest.approx(own, rel=1e-9, abs=1e-12)
    # What is rejected counts in no denominator.
    batch = minibatch(found, "token-mean", 1, MicroSizing(40))
    assert batch.trained_tokens == np.count_nonzero(kept)
    assert sum(micro.weights.sum() for micro in batch.micro_batches) == pytest.approx(1.0)


def test_several_criteria_must_all_be_met() -> None:
    rows = batch_rows()
    found = algorithm(rejection=["token_k1", "seq_mean_k3"], rejection_bounds=[1.25, 0.045]).correct(rows)  # type: ignore[misc]
    for row, after in zip(rows, found, strict=True):
        both = expected_kept(row, "token_k1", 0.8, 1.25) & expected_kept(row, "seq_mean_k3", None, 0.045)
        np.testing.assert_array_equal(after.mask[row.mask], both)
    metrics = RowSums.of(found).metrics()
    alone = [metrics[f"rollout_corr/rollout_rs_{name}_masked_fraction"] for name in ("token_k1", "seq_mean_k3")]
    assert max(alone) < metrics["rollout_corr/rollout_rs_masked_fraction"] <= sum(alone)  # together they reject more than each alone
    assert all(name in correction.DISTANCES or name.rpartition("_")[0] in correction.LEVELS for name in CRITERIA)


def test_the_reward_of_a_rejected_sample_still_counts_in_its_group() -> None:
    rows = [replace(row, reward=float(place)) for place, row in enumerate(batch_rows(3))]
    far = replace(rows[0], rollout_logprobs=rows[0].rollout_logprobs - 3 * rows[0].mask)  # type: ignore[operator]
    chosen = algorithm(rejection="seq_mean_k1", rejection_bounds=2.0, normalize_by_std=False)
    assert chosen.correct is not None
    found = chosen.advantage(chosen.correct([far, *rows[1:]]))
    assert not found[0].mask.any() and not found[0].teaches
    assert [float(row.advantages[-1]) for row in found[1:]] == [0.0, 1.0]  # type: ignore[index]


# -------------------------------------------------------------------------------------------------------------------- names and mistakes


def mistakes(**keys: Any) -> str:
    beside = {"reward": keys.pop("reward")} if "reward" in keys else {}
    try:
        parse({"model": {"path": "m"}, "data": {"train": "t"}, "run": {"steps": 3}, "algorithm": keys, **beside})
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("chosen", ["gae", *ESTIMATORS])
def test_any_advantage_goes_with_any_loss_and_any_name(chosen: str) -> None:
    keys = {"reward_parts": {"score": 1.0}} if chosen == "gdpo" else {}
    for name, surrogate in itertools.product(("grpo", "ppo", "dapo", "gspo"), LOSSES):
        beside = {"overlong_buffer": 0} if name == "dapo" and chosen == "gdpo" else {}
        assert mistakes(name=name, advantage=chosen, loss=surrogate, **keys, **beside) == ""
    built = build(config(advantage=chosen, **keys))
    assert ("values" in built.needs, "baseline" in built.needs) == (chosen == "gae", chosen == "remax")
    assert (built.value_loss is not None) is (chosen == "gae")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("grpo_vectorized", "grpo"), ("rloo_vectorized", "rloo"), ("reinforce_plus_plus", "reinforce++"), ("gae", "gae"),
     ("reinforce_plus_plus_baseline", "reinforce++_baseline"), ("tir_optimal_token_baseline", "optimal_token_baseline")],
)  # fmt: skip
def test_verls_names_are_understood(theirs: str, ours: str) -> None:
    assert config(advantage=theirs).algorithm.advantage == ours
    assert config(loss="vanilla").algorithm.loss == "ppo" and config(rejection="geometric").algorithm.rejection == "seq_mean_k1"


def test_a_choice_that_is_the_presets_own_changes_nothing() -> None:
    assert preset_for("dapo", "grpo", "ppo") == PRESETS["dapo"] and preset_for("gspo", None, "gspo") == PRESETS["gspo"]
    assert preset_for("grpo", "rloo") == PRESETS["rloo"] and preset_for("rloo", "gae") == PRESETS["ppo"]
    assert preset_for("grpo", None, "cispo") == PRESETS["cispo"] and preset_for("sft", "opo", "gpg") == PRESETS["sft"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"advantage": "opoo"}, ["algorithm.advantage = 'opoo'", "Similar: opo", "grpo_passk", "mine/advantage.py:advantage"]),
        ({"loss": "clipcov"}, ["Similar: clip_cov", "dppo_tv", "mine/loss.py:loss"]),
        ({"loss": "mine.py"}, ["not of the form FILE.py:NAME"]),
        ({"name": "sft", "advantage": "opo"}, ["algorithm.advantage", "does not use it"]),
        ({"name": "opo"}, ["algorithm.name"]),
        ({"loss": "gpg", "clip_low": 0.1}, ["algorithm.clip_low", "'grpo' with loss 'gpg' does not use it"]),
        ({"advantage": "opo", "normalize_by_std": False}, ["normalize_by_std", "with advantage 'opo' does not use it"]),
        ({"cov_share": 0.1}, ["algorithm.cov_share", "does not use it"]),
        ({"advantage": "gdpo"}, ["algorithm.reward_parts: missing", 'advantage is "gdpo"']),
        ({"advantage": "gdpo", "reward_parts": {"a": 1.0}, "reward_kl_coef": 0.1}, ["reward_kl_coef = 0.1", "gdpo reads the parts"]),
        ({"advantage": "opo", "samples_per_prompt": 1}, ["a group of one has no baseline"]),
        ({"loss": "clip_cov", "cov_low": 6.0}, ["cov_low = 6.0", "cov_high = 5.0"]),
        ({"importance_cap": [2.0, 0.5]}, ["importance_cap = [2.0, 0.5]", "a lower and an upper bound"]),
        ({"importance_cap": 2.0, "importance_level": "bypass"}, ["importance_cap: 2.0 has no effect", 'importance_level is "bypass"']),
        ({"importance_cap": 0, "importance_level": "sequence"}, ['importance_level: "sequence" has no effect']),
        ({"rejection": "token_k1"}, ["rejection_bounds: missing"]),
        ({"rejection_bounds": 2.0}, ["rejection_bounds: 2.0 has no effect"]),
        ({"rejection": "seq_max_k1", "rejection_bounds": 2.0}, ["algorithm.rejection"]),
        ({"rejection": "token_k1", "rejection_bounds": 0.5}, ["1/u to u"]),
        ({"rejection": "token_k1", "rejection_bounds": [2.0, 0.5]}, ["the smaller first"]),
        ({"rejection": "token_k2", "rejection_bounds": [0.1, 0.5]}, ["token_k2 has an upper bound only"]),
        ({"rejection": ["token_k1", "token_k2"], "rejection_bounds": [2.0]}, ["an entry for each of the 2"]),
        ({"rejection": ["token_k1", "token_k1"], "rejection_bounds": 2.0}, ["name each criterion once"]),
        ({"name": "dapo", "importance_cap": 0}, ["dynamic sampling trains on samples of older weights"]),
        ({"aggregation": "token_sum"}, ["algorithm.aggregation"]),
    ],
)  # fmt: skip
def test_mistakes_are_told_with_the_remedy(keys: dict[str, Any], words: list[str]) -> None:
    said = mistakes(**keys)
    for word in words:
        assert word in said, said


def test_bypass_and_two_bounds_go_with_dynamic_sampling() -> None:
    assert mistakes(name="dapo", importance_level="bypass") == "" == mistakes(name="dapo", importance_cap=[0.5, 2.0])


def test_a_function_of_your_own_beside_a_built_in_one(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def mine(rewards, gamma):\n    return rewards * gamma\n")
    chosen = build(config(name="reinforce++", advantage=f"{tmp_path / 'mine.py'}:mine", loss="sapo", gamma=0.5, tau_pos=2.0))
    assert chosen.own_advantage and chosen.settings["tau_pos"] == 2.0 and chosen.aggregation == "seq-mean-token-mean"
    assert [float(row.advantages[-1]) for row in chosen.advantage(batch_rows(1))] == [0.0]  # type: ignore[index]
