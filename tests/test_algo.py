"""Advantages, losses and presets against plain float64 loops written here, which share no code with the package."""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
from typing import Any, get_args

import numpy as np
import pytest
import torch

from fulltilt.algo import advantage, loss, presets
from fulltilt.config import AlgorithmConfig, Config
from fulltilt.records import Row, TokenTerms, UserError

# ---------------------------------------------------------------------------------------------------------------- the plain computation


def plain_advantages(rewards: list[float], groups: list[int], by_std: bool) -> list[float]:
    out = []
    for reward, group in zip(rewards, groups, strict=True):
        own = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if len(own) == 1:
            out.append(0.0)
            continue
        mean = math.fsum(own) / len(own)
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in own) / (len(own) - 1))
        out.append((reward - mean) / (std + 1e-6) if by_std else reward - mean)
    return out


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


# ---------------------------------------------------------------------------------------------------------------------------- the tokens


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
        rollout_logprobs=column("rollout"),
        old_logprobs=column("old") if old else None,
        ref_logprobs=column("ref"),
        advantages=column("adv"),
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


def settings(s: dict[str, Any]) -> loss.PolicyLossSettings:
    return loss.PolicyLossSettings(**{**s, "kl": loss.KL_ESTIMATORS[s["kl"]]})


# ---------------------------------------------------------------------------------------------------------------------------- advantages


@pytest.mark.parametrize("by_std", [True, False])
def test_advantage_of_ragged_interleaved_groups_is_the_plain_one(by_std: bool) -> None:
    rng = np.random.default_rng(1)
    groups = [7, 2, 7, 0, 2, 7, 9, 2, 2, 0]  # 9 is a group of one
    rewards = [float(r) for r in rng.normal(size=len(groups))]
    got = advantage.grpo(np.array(rewards), np.array(groups), by_std)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, plain_advantages(rewards, groups, by_std), rtol=0, atol=1e-12)
    assert got[6] == 0.0


def test_advantage_of_equal_rewards_is_exactly_zero() -> None:
    # The mean of three times 0.1 is not 0.1 in floating point.
    assert (advantage.grpo(np.array([0.1, 0.1, 0.1]), np.zeros(3, dtype=int), True) == 0).all()
    assert advantage.grpo(np.array([]), np.array([], dtype=int), True).shape == (0,)


def test_advantages_are_spread_over_trained_tokens_only() -> None:
    masks = [[0, 0, 1, 1], [0, 1], [0, 0, 0], [0, 1, 0, 1, 1]]
    rewards, groups = [2.0, 0.0, 1.0, 0.5], [0, 0, 1, 0]
    rows = [
        Row(ids=np.arange(len(mask)), mask=np.array(mask, dtype=bool), group=g, reward=r)
        for mask, g, r in zip(masks, groups, rewards, strict=True)
    ]
    expected = plain_advantages(rewards, groups, True)
    for row, mask, value in zip(advantage.group_relative(rows, normalize_by_std=True), masks, expected, strict=True):
        assert row.advantages is not None and row.advantages.dtype == np.float32
        np.testing.assert_array_equal(row.advantages, np.array([value if m else 0.0 for m in mask], dtype=np.float32))
    assert advantage.no_advantage(rows) == rows


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


# ---------------------------------------------------------------------------------------------------------------------------- the policy


@pytest.mark.parametrize("variant", VARIANTS)
def test_policy_loss_and_gradients_are_the_plain_ones(variant: str) -> None:
    s, data = {**BASE, **VARIANTS[variant]}, tokens()
    batch = terms(data, grad=True)
    parts = loss.policy_loss(batch, settings(s))
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
    surrogate = loss.clipped_surrogate(terms(data), 0.2, 0.28, 3.0)
    above = [t["adv"] > 0 and t["logprob"] - t["old"] > math.log(1.28) for t in data]
    below = [t["adv"] < 0 and t["logprob"] - t["old"] < math.log(0.8) for t in data]
    dual = [t["adv"] < 0 and t["logprob"] - t["old"] > math.log(3.0) for t in data]
    assert any(above) and any(below) and any(dual)
    assert surrogate.clipped.tolist() == [a or b for a, b in zip(above, below, strict=True)]
    assert surrogate.dual_clipped.tolist() == dual
    assert not loss.clipped_surrogate(terms(data), 0.2, 0.28, 0.0).dual_clipped.any()


def test_metrics_are_the_plain_sums() -> None:
    s = {**BASE, "kl_coef": 0.3, "entropy_coef": 0.1, "importance_cap": 2.0}
    data = tokens()
    parts = loss.policy_loss(terms(data, grad=True), settings(s))
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
        "rollout_corr/logprob_abs_gap": math.fsum(abs(t["old"] - t["rollout"]) for t in data),
        "rollout_corr/rollout_is_mean": math.fsum(importance),
        "rollout_corr/rollout_is_ratio_fraction_high": float(sum(i > 2 for i in importance)),
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


def test_switched_off_parts_need_and_report_nothing() -> None:
    data = tokens()
    full = terms(data)
    bare = TokenTerms(full.logprobs, full.entropy, full.weights, None, full.old_logprobs, None, full.advantages)
    parts = loss.policy_loss(bare, settings(BASE))
    assert torch.equal(parts.loss, loss.policy_loss(full, settings(BASE)).loss)
    assert set(parts.weighted) == {"actor/pg_loss"}
    assert not any(name.startswith("rollout_corr") for name in parts.sums)
    for s in ({**BASE, "importance_cap": 2.0}, {**BASE, "kl_coef": 0.1}):
        with pytest.raises(AssertionError, match="log-probs"):
            loss.policy_loss(bare, settings(s))


def test_on_policy_without_old_logprobs_equals_old_given_equal() -> None:
    s = settings({**BASE, **VARIANTS["all"]})
    data = [{**t, "old": t["logprob"]} for t in tokens()]
    without, given = terms(data, old=False, grad=True), terms(data, grad=True)
    results = []
    for batch in (without, given):
        parts = loss.policy_loss(batch, s)
        results.append((parts.loss.detach(), *torch.autograd.grad(parts.loss, [batch.logprobs, batch.entropy])))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)

    # By hand, on policy: the ratio is 1 and its gradient that of the log-prob, so the gradient is -A times the weights.
    batch = terms(data, old=False, grad=True)
    parts = loss.policy_loss(batch, settings({**BASE, "importance_cap": 2.0}))
    (gradient,) = torch.autograd.grad(parts.loss, batch.logprobs)
    by_hand = [-t["adv"] * t["weight"] * min(math.exp(t["logprob"] - t["rollout"]), 2.0) for t in data]
    np.testing.assert_allclose(gradient.numpy(), by_hand, rtol=1e-12)


def test_on_policy_gradient_survives_clips_of_zero() -> None:
    """A ratio of exactly 1 is not outside a clip of 0: the first update must still learn."""
    data = [{**t, "old": t["logprob"]} for t in tokens()]
    batch = terms(data, old=False, grad=True)
    (gradient,) = torch.autograd.grad(loss.policy_loss(batch, settings({**BASE, **VARIANTS["no room to clip"]})).loss, batch.logprobs)
    np.testing.assert_allclose(gradient.numpy(), [-t["adv"] * t["weight"] for t in data], rtol=1e-12)


def test_importance_weight_is_capped_and_carries_no_gradient() -> None:
    # Old over rollout: e^-1, 1, e^1, e^50; the cap is 2.
    old = torch.tensor([-2.0, -1.0, -0.5, -0.1], dtype=torch.float64, requires_grad=True)
    rollout = torch.tensor([-1.0, -1.0, -1.5, -50.1], dtype=torch.float64)
    ones = torch.ones(4, dtype=torch.float64)
    logprobs = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    batch = TokenTerms(logprobs, ones, ones, rollout, old, None, ones)
    assert not loss.importance_ratio(batch).requires_grad
    np.testing.assert_allclose(loss.importance_ratio(batch).numpy(), [math.exp(-1), 1.0, math.e, math.exp(20)], rtol=1e-12)
    corrected = loss.policy_loss(batch, settings({**BASE, "importance_cap": 2.0, "clip_high": 100.0, "clip_low": 0.99}))
    ratios = [math.exp(1), 1.0, math.exp(-0.5), math.exp(-0.9)]
    expected = -sum(r * w for r, w in zip(ratios, [math.exp(-1), 1.0, 2.0, 2.0], strict=True))
    assert float(corrected.loss.detach()) == pytest.approx(expected, rel=1e-12)


def test_hopeless_ratios_stay_finite_in_float32() -> None:
    """exp of a gap of 200 is infinite in float32; without the clamp its gradient is NaN, also where another branch was chosen."""
    logprobs = torch.tensor([-0.1, -0.1, -200.0, -200.0, -0.1], requires_grad=True)
    far = torch.tensor([-200.0, -200.0, -0.1, -0.1, -200.0])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0])
    batch = TokenTerms(logprobs, torch.ones(5), torch.ones(5), far, far, far, advantages)
    parts = loss.policy_loss(batch, settings({**BASE, "kl_coef": 0.1, "importance_cap": 2.0}))
    (gradient,) = torch.autograd.grad(parts.loss, logprobs)
    assert parts.loss.isfinite() and gradient.isfinite().all()


def test_micro_batch_without_trained_tokens_has_loss_zero() -> None:
    batch = terms([], grad=True)
    for parts in (loss.policy_loss(batch, settings({**BASE, **VARIANTS["all"]})), loss.sft_loss(batch)):
        assert float(parts.loss.detach()) == 0.0
        assert torch.autograd.grad(parts.loss, batch.logprobs)[0].shape == (0,)
        assert all(float(value) == 0.0 for value in (*parts.sums.values(), *parts.weighted.values()))


def test_sft_loss_is_the_weighted_negative_log_likelihood() -> None:
    data = tokens()
    full = terms(data, grad=True)
    batch = TokenTerms(full.logprobs, full.entropy, full.weights, None, None, None, None)
    parts = loss.sft_loss(batch)
    expected = -math.fsum(t["weight"] * t["logprob"] for t in data)
    assert float(parts.loss.detach()) == pytest.approx(expected, rel=1e-12)
    assert float(parts.weighted["train/loss"]) == pytest.approx(expected, rel=1e-12)
    assert float(parts.sums["actor/entropy"]) == pytest.approx(math.fsum(t["entropy"] for t in data), rel=1e-12)
    (gradient,) = torch.autograd.grad(parts.loss, full.logprobs)
    np.testing.assert_allclose(gradient.numpy(), [-t["weight"] for t in data], rtol=1e-15)


# --------------------------------------------------------------------------------------------------------------------------- the presets


SECTIONS = ("rollout", "ref", "reward", "eval", "data")


def config(**settings: Any) -> Config:
    """Keys of [algorithm], or whole other sections by name."""
    sections = {name: settings.pop(name) for name in SECTIONS if name in settings}
    return Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}, "algorithm": settings, **sections})


def test_every_name_of_the_configuration_has_a_preset() -> None:
    assert set(get_args(AlgorithmConfig.model_fields["name"].annotation)) == set(presets.PRESETS)
    for preset in presets.PRESETS.values():
        assert preset.keys <= set(AlgorithmConfig.model_fields)


def test_grpo_defaults() -> None:
    algorithm = presets.build(config(rollout={"max_new_tokens": 77}))
    assert (algorithm.name, algorithm.aggregation, algorithm.length_norm) == ("grpo", "token-mean", 77)
    assert algorithm.needs == {"rollout"} and algorithm.entropy_gradient is False
    assert algorithm.settings == {
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": 3.0,
        "kl_coef": 0.0,
        "kl_estimator": "k3",
        "entropy_coef": 0.0,
        "aggregation": "token-mean",
        "normalize_by_std": True,
        "importance_cap": 2.0,
    }


def test_set_keys_reach_the_loss_and_the_advantage() -> None:
    built = presets.build(
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


@pytest.mark.parametrize(("minibatches", "epochs", "needed"), [(1, 1, False), (2, 1, True), (1, 2, True)])
def test_old_logprobs_are_needed_only_off_policy(minibatches: int, epochs: int, needed: bool) -> None:
    assert ("old_logprobs" in presets.build(config(minibatches_per_step=minibatches, epochs=epochs)).needs) is needed
    assert presets.build(config(name="sft", minibatches_per_step=minibatches, epochs=epochs)).needs == frozenset()


def test_sft_preset() -> None:
    algorithm = presets.build(config(name="sft"))
    assert (algorithm.aggregation, algorithm.settings, algorithm.entropy_gradient) == ("token-mean", {"aggregation": "token-mean"}, False)
    rows = [Row(ids=np.arange(2), mask=np.array([False, True]))]
    assert algorithm.advantage(rows) == rows
    assert "train/loss" in algorithm.loss(terms(tokens())).weighted


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "sft", "clip_low": 0.1}, ["algorithm.clip_low", "does not use"]),
        ({"name": "sft", "samples_per_prompt": 8}, ["algorithm.samples_per_prompt", "does not use"]),
        ({"name": "sft", "rollout": {"temperature": 0.5}}, ["rollout.temperature", "samples nothing"]),
        ({"name": "sft", "reward": {"function": "gsm8k"}}, ["reward.function", "scores nothing"]),
        ({"name": "sft", "eval": {"max_prompts": 3}}, ["eval.max_prompts", "samples nothing"]),
        ({"data": {"train": "t", "response_key": "answer"}}, ["data.response_key", "reads prompts only"]),
        ({"name": "sft", "aggregation": "seq-mean-token-sum-norm"}, ["algorithm.length_norm", "Set it"]),
        ({"samples_per_prompt": 1}, ["a group of one has no baseline", "at least 2"]),
        ({"dual_clip": 1.0}, ["algorithm.dual_clip = 1.0", "exceed 1"]),
        ({"dual_clip": 0.5}, ["algorithm.dual_clip = 0.5", "exceed 1"]),
        ({"length_norm": 5}, ["algorithm.length_norm", "token-mean"]),
        ({"kl_estimator": "k2"}, ["algorithm.kl_estimator", "kl_coef"]),
        ({"rollout": {"temperature": 0}}, ["rollout.temperature", "greedy"]),
        ({"ref": {"path": "other"}}, ["ref.path", "kl_coef"]),
    ],
)
def test_mistakes_say_what_and_how_to_mend_it(settings: dict[str, Any], words: list[str]) -> None:
    (message,) = presets.mistakes(config(**settings))
    assert all(word in message for word in words), message
    with pytest.raises(UserError, match=r"Remove|Use|Set"):
        presets.build(config(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"name": "sft"},
        {"name": "sft", "aggregation": "seq-mean-token-sum-norm", "length_norm": 8},
        {"dual_clip": 0},
        {"kl_coef": 0.1, "kl_estimator": "k2", "ref": {"path": "other"}},
        {"samples_per_prompt": 2},
    ],
)
def test_what_is_right_is_not_called_a_mistake(settings: dict[str, Any]) -> None:
    assert presets.mistakes(config(**settings)) == []


def test_all_mistakes_come_at_once() -> None:
    found = presets.mistakes(config(name="sft", clip_low=0.1, clip_high=0.1, kl_coef=0.1, kl_estimator="k1", samples_per_prompt=2))
    assert len(found) == 5


def test_checking_a_configuration_does_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from fulltilt.algo import presets\n"
        "from fulltilt.config import Config\n"
        "config = Config.model_validate({'model': {'path': 'm'}, 'data': {'train': 't'}, 'algorithm': {'dual_clip': 0.5}})\n"
        "assert len(presets.mistakes(config)) == 1\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=environment)
