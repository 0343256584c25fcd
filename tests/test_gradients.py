"""Every algorithm, from the rewards of a mini-batch to the gradient of a real model in float64: it does not depend on how the mini-batch is
cut or in which order its samples stand.

Equal means: the largest difference of any parameter's gradient is below 1e-9 times the largest gradient. Rows are shuffled before
advantages are computed, so that these too are tried. The critic of an algorithm that has one is taken through the same.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from tensors import accumulated
from variants import sample_cases

from fulltilt.algo.base import Algorithm
from fulltilt.algo.build import build as build_algorithm
from fulltilt.batching.pack import MicroSizing, minibatch, with_advantage
from fulltilt.cluster.marking import marking
from fulltilt.model.load import load_model
from fulltilt.model.scalar import load_scalar
from fulltilt.parallel.ranks import ALONE
from fulltilt.presets import PRESETS
from fulltilt.records import MiniBatch, Row
from fulltilt.schema import Config, ModelConfig, TrainConfig
from fulltilt.training.optim import Optimizer
from fulltilt.training.roles import Critic, Policy, annotate_all
from fulltilt.training.trainer import Trainer

CPU = torch.device("cpu")

# Everything that a loss can add is on, and the rows are off policy, so that clips, ratios and importance weights take part.
EVERYTHING: dict[str, Any] = {"kl_coef": 0.1, "entropy_coef": 0.05, "reward_kl_coef": 0.2, "minibatches_per_step": 2}
# Clips wide enough for some rows to be within, narrow enough for some to be outside.
OWN: dict[str, dict[str, Any]] = {"gspo": {"clip_low": 0.2, "clip_high": 0.3}, "cispo": {"clip_low": 0.3, "clip_high": 0.5}}

# What else can be chosen: each loss with some advantage, and every way to correct the rollout. Two mini-batches a step, so that old
# log-probs are read.
CHOSEN: dict[str, dict[str, Any]] = {
    "gpg": {"advantage": "gpg", "loss": "gpg"},
    "clip_cov": {"advantage": "opo", "loss": "clip_cov", "cov_share": 0.05, "cov_low": 0.01},
    "kl_cov": {"advantage": "grpo_passk", "loss": "kl_cov", "cov_share": 0.1},
    "geo_mean": {"loss": "geo_mean", "clip_low": 0.2, "clip_high": 0.2, "aggregation": "token-sum"},
    "sapo": {"advantage": "gdpo", "reward_parts": {"a": 1.0, "b": 0.5}, "loss": "sapo", "reward_kl_coef": 0.0, "kl_estimator": "k3+"},
    "dppo_tv": {"advantage": "optimal_token_baseline", "loss": "dppo_tv", "clip_low": 0.001, "clip_high": 0.001, "kl_estimator": "k1+"},
    "dppo_kl": {"loss": "dppo_kl", "clip_low": 1e-4, "clip_high": 1e-4, "importance_level": "bypass", "kl_estimator": "abs"},
    "sequence": {"importance_level": "sequence-normalized", "importance_cap": [0.5, 2.0], "rejection": "token_k1", "rejection_bounds": 1.4},
    "samples": {"importance_level": "sequence", "rejection": ["seq_mean_k3", "seq_max_k2"], "rejection_bounds": [0.1, 0.5]},
}
STATISTICS = {"clip_cov", "kl_cov", "sequence"}  # whose loss depends on the whole mini-batch or step: in the plain set
LONG = pytest.mark.long
CUT_ONLY = {"clip_cov"}  # it draws by the places of rows, so that another order is another draw

# A loss that looks at whole samples, as a user may write it.
USERS_LOSS = """
import torch

def mine(terms, clip_high):
    gap = terms.logprobs - terms.old_logprobs
    _, place, counts = torch.unique_consecutive(terms.row, return_inverse=True, return_counts=True)
    of_row = torch.zeros(len(counts), dtype=gap.dtype).index_add(0, place, gap) / counts
    return -(of_row[place].exp().clamp(max=1 + clip_high) + gap.tanh()) * terms.advantages
"""


def build(name: str, folder: Path) -> Algorithm:
    keys: dict[str, Any] = {"name": name, **OWN.get(name, {})} if name in PRESETS else {"name": "grpo"}
    if name != "sft":
        keys |= EVERYTHING
    if name in CHOSEN:
        keys |= CHOSEN[name]
    elif name not in PRESETS:
        (folder / "mine.py").write_text(USERS_LOSS, encoding="utf-8")
        keys["loss"] = f"{folder / 'mine.py'}:mine"
    return build_algorithm(Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}, "algorithm": keys}))


def bare_rows() -> list[Row]:
    """Ragged rows with holes in their masks, in interleaved groups of 1 to 4, those of two groups carried over."""
    random = np.random.default_rng(1)
    rows = []
    for group in (0, 1, 0, 2, 1, 3, 0, 2, 1, 2, 0):
        tokens = int(random.integers(5, 40))
        mask = np.arange(tokens) >= random.integers(1, 4)
        mask &= (random.random(tokens) < 0.8) | (np.arange(tokens) == tokens - 1)
        rows.append(Row(random.integers(0, models.VOCABULARY, tokens), mask, group, reward=float(random.normal()), lag=group % 2))
    return rows


def filled(rows: list[Row], policy: Policy) -> list[Row]:
    """With log-probs around those of the policy, so that ratios lie around 1, and with all else that an algorithm may read."""
    random = np.random.default_rng(2)
    found = []
    for row in rows:
        (micro,) = minibatch([row], "token-mean", 1, MicroSizing(1)).micro_batches
        (own,) = annotate_all(policy, [micro])
        fields: dict[str, Any] = {name: np.zeros(row.tokens, np.float32) for name in ("rollout", "old", "ref")}
        for array, spread in zip(fields.values(), (0.3, 0.3, 0.5), strict=True):
            array[row.mask] = own + random.normal(0.1, spread, len(own))
        values = (random.normal(0, 0.5, row.tokens) * row.mask).astype(np.float32)
        logprobs = {f"{name}_logprobs": array for name, array in fields.items()}
        parts = (float(row.ids.mean()), float(row.ids[0] % 7))
        sharp = fields["old"] + (fields["old"] / 2 - 0.1) * row.mask
        given = {"values": values, "parts": parts, "sharp_logprobs": sharp.astype(np.float32), **logprobs}
        found.append(replace(row, baseline=float(random.normal()), **given))
    return found


def make_policy(folder: Path, *, entropy_gradient: bool) -> Policy:
    model = load_model(ModelConfig(path=str(folder), dtype="float64"), CPU)
    return Policy("actor", model, 0.8, Optimizer(model, TrainConfig(), 10), entropy_gradient=entropy_gradient)


def gradient(trainer: Trainer, batch: MiniBatch) -> tuple[torch.Tensor, dict[str, float]]:
    trainer.optimizer.zero_grad()
    metrics = accumulated(trainer, batch)
    parameters = trainer.role.model.parameters()  # type: ignore[attr-defined]
    return torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None]), metrics


def assert_one_gradient(trainer: Trainer, algorithm: Algorithm, rows: list[Row], *, shuffled: bool = True) -> dict[str, float]:
    """The metrics of the mini-batch, which agree as the gradients do."""

    def make(rows: list[Row], micro: MicroSizing) -> MiniBatch:
        rows = algorithm.correct(rows) if algorithm.correct else rows
        shaped = algorithm.reward_kl.penalise(rows, 0.2)[0] if algorithm.reward_kl else rows
        return minibatch(algorithm.advantage(shaped), algorithm.aggregation, algorithm.length_norm, micro)

    everything = sum(row.tokens for row in rows)
    whole, metrics = gradient(trainer, make(rows, MicroSizing(everything)))
    size = float(whole.abs().max())
    assert size > 1e-4
    sizings = [MicroSizing(budget) for budget in (1, 40, 60, everything // 2)] + [MicroSizing(0, 4)]
    cuts = [make(rows, sizing) for sizing in sizings]
    assert len(cuts[0].micro_batches) == len(rows) and len({len(cut.micro_batches) for cut in cuts}) >= 4
    for seed in range(2 if shuffled else 0):
        order = np.random.default_rng(seed).permutation(len(rows))
        cuts.append(make([rows[index] for index in order], MicroSizing(70 + 40 * seed)))
    for cut in cuts:
        other, its_metrics = gradient(trainer, cut)
        assert float((other - whole).abs().max()) < 1e-9 * size
        assert its_metrics.keys() == metrics.keys()
        for name, value in metrics.items():
            # The trainer adds metrics up from a float32 zero, which float64 numbers lift to float64.
            assert its_metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    return metrics


# These have the loss of another preset: their advantages are tested by themselves.
SAME_LOSS = ("ppo", "rloo", "remax", "reinforce++", "reinforce++_baseline")


@pytest.mark.parametrize(
    "name",
    [
        *sample_cases(PRESETS, *(name for name in PRESETS if name not in SAME_LOSS)),
        *(pytest.param(name, marks=() if name in STATISTICS else LONG) for name in CHOSEN),
        "your own",
    ],
)
def test_the_gradient_of_an_algorithm_is_one(name: str, model_folders, tmp_path: Path) -> None:
    algorithm = build(name, tmp_path)
    policy = make_policy(model_folders("llama-tied"), entropy_gradient=algorithm.entropy_gradient)
    trainer = Trainer(policy, algorithm.loss, marking(algorithm.marks, policy, ALONE))
    metrics = assert_one_gradient(trainer, algorithm, filled(bare_rows(), policy), shuffled=name not in CUT_ONLY)
    if name == "sft":
        return
    assert {"actor/pg_loss", "actor/kl_loss", "actor/entropy", "rollout_corr/logprob_abs_gap"} <= metrics.keys()
    if name in CHOSEN:
        share = {"kl_cov": "actor/kl_cov_fraction", "gpg": "", "sapo": ""}.get(name, "actor/pg_clipfrac")
        assert not share or 0 < metrics[share] < 0.9
    if name in PRESETS:  # some tokens are clipped, and not all: both branches took part
        assert 0 < metrics["actor/pg_clipfrac"] < 0.9


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.critic])
def test_the_gradient_of_a_critic_is_one(name: str, model_folders, tmp_path: Path) -> None:
    algorithm = build(name, tmp_path)
    model = load_scalar(ModelConfig(path=str(model_folders("llama")), dtype="float64"), CPU, key="critic.path", head="new")
    with torch.no_grad():  # a new head is 0, and nothing behind it would have a gradient
        torch.nn.init.normal_(model.score.weight, std=0.3, generator=torch.Generator().manual_seed(0))
    assert algorithm.value_loss is not None
    trainer = Trainer(Critic("critic", model, Optimizer(model, TrainConfig(), 10)), algorithm.value_loss)
    rows = filled(bare_rows(), make_policy(model_folders("llama"), entropy_gradient=False))
    metrics = assert_one_gradient(trainer, algorithm, rows)
    assert 0 < metrics["critic/vf_clipfrac"] < 1


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize(
    "name", sample_cases([name for name, preset in PRESETS.items() if preset.rollout and not preset.critic], "grpo", "gspo", "cispo")
)
def test_samples_without_an_advantage_can_be_left_out(name: str, aggregation: str, model_folders) -> None:
    """Off policy, so that ratios and clips are in it. A carried-over row and one with holes are among those left out."""
    keys = {"name": name, **OWN.get(name, {}), "minibatches_per_step": 2, "aggregation": aggregation}
    algorithm = build_algorithm(Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}, "algorithm": keys}))
    assert algorithm.advantage_alone
    policy = make_policy(model_folders("llama-tied"), entropy_gradient=False)
    rows = algorithm.advantage(filled(bare_rows(), policy))
    silent = [replace(row, advantages=np.zeros(row.tokens, np.float32)) if row.group in (0, 3) else row for row in rows]
    needed = with_advantage(silent)
    assert 0 < len(needed) < len(rows) and {silent[place].group for place in needed} == {1, 2}

    trainer = Trainer(policy, algorithm.loss)
    sizing = MicroSizing(60)
    whole, all_metrics = gradient(trainer, minibatch(silent, algorithm.aggregation, algorithm.length_norm, sizing))
    part = minibatch(silent, algorithm.aggregation, algorithm.length_norm, sizing, advantage_alone=True)
    less, metrics = gradient(trainer, part)
    size = float(whole.abs().max())
    assert size > 1e-4 and float((less - whole).abs().max()) < 1e-9 * size
    assert sorted(row for micro in part.micro_batches for row in micro.rows) == needed
    assert not part.silent and part.trained_tokens == sum(int(silent[place].mask.sum()) for place in needed)
    assert metrics["actor/pg_loss"] == pytest.approx(all_metrics["actor/pg_loss"], rel=1e-9)


def test_a_mini_batch_without_any_advantage_has_a_gradient_of_zero(model_folders) -> None:
    policy = make_policy(model_folders("llama-tied"), entropy_gradient=False)
    algorithm = build_algorithm(Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}, "algorithm": {"name": "grpo"}}))
    rows = [replace(row, reward=1.0, lag=0) for row in filled(bare_rows(), policy)]
    rows = algorithm.advantage(rows)
    assert with_advantage(rows) == []
    batch = minibatch(rows, "token-mean", 1, MicroSizing(60), advantage_alone=True)
    (micro,) = batch.micro_batches
    assert batch.silent and micro.rows == (min(range(len(rows)), key=lambda place: rows[place].tokens),)
    found, metrics = gradient(Trainer(policy, algorithm.loss), batch)
    assert float(found.abs().max()) == 0 and metrics["actor/pg_loss"] == 0
    # One row's tokens say nothing of the others', but for whether trainer and engine agree.
    assert all(name.startswith("rollout_corr/") for name in metrics.keys() - {"actor/pg_loss"}) and len(metrics) == 7


@pytest.mark.parametrize("keys", [{"kl_coef": 0.1}, {"entropy_coef": 0.1}, {"name": "sft"}, {"loss": "mine.py:mine"}])
def test_where_more_than_the_advantage_teaches_nothing_is_left_out(keys: dict[str, Any], tmp_path: Path) -> None:
    if "loss" in keys:
        (tmp_path / "mine.py").write_text(USERS_LOSS, encoding="utf-8")
        keys = {"loss": f"{tmp_path / 'mine.py'}:mine", "minibatches_per_step": 2}
    tables = {"model": {"path": "m"}, "data": {"train": "t"}, "algorithm": {"name": "grpo", **keys}}
    assert not build_algorithm(Config.model_validate(tables)).advantage_alone
