"""The trainer: a gradient that no execution choice can change, float32 masters, the schedule, and gradients that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import models
import numpy as np
import pytest
import torch
from tensors import restored

from fulltilt.algo.correction import Correction
from fulltilt.algo.loss import clipped_surrogate, policy_loss, sft_loss
from fulltilt.batching.pack import AGGREGATIONS, MicroSizing, minibatch
from fulltilt.model.load import load_model
from fulltilt.records import LossParts, MiniBatch, Row, TokenTerms
from fulltilt.schema import ModelConfig, TrainConfig
from fulltilt.training.optim import Optimizer, learning_rate
from fulltilt.training.roles import Policy
from fulltilt.training.trainer import Trainer

CPU = torch.device("cpu")
CLIPPED = partial(clipped_surrogate, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
EVERYTHING = {"kl_coef": 0.1, "kl_estimator": "k3", "entropy_coef": 0.05, "correction": Correction(cap=2.0)}
Loss = Callable[[TokenTerms], LossParts]
POLICY: Loss = partial(policy_loss, surrogate=CLIPPED, **EVERYTHING)


def make_trainer(folder, dtype: str = "float64", loss: Loss = POLICY, **train) -> Trainer:
    model = load_model(ModelConfig(path=str(folder), dtype=dtype), CPU)
    optimizer = Optimizer(model, TrainConfig(**train), total_updates=10)
    return Trainer(Policy("actor", model, temperature=0.8, optimizer=optimizer, entropy_gradient=True), loss)


def random_rows(count: int = 11, seed: int = 0) -> list[Row]:
    """Ragged rows with holes in their masks, and every per-token number that a loss may read."""
    random = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        tokens = int(random.integers(3, 40))
        mask = np.arange(tokens) >= random.integers(1, tokens)
        mask &= (random.random(tokens) < 0.8) | (np.arange(tokens) == tokens - 1)
        near = lambda: (random.normal(-3, 0.5, tokens) * mask).astype(np.float32)  # noqa: B023, E731
        rows.append(
            Row(
                ids=random.integers(0, models.VOCABULARY, tokens), mask=mask, group=number // 3,
                rollout_logprobs=near(), old_logprobs=near(), ref_logprobs=near(),
                advantages=(np.full(tokens, random.normal()) * mask).astype(np.float32),
            )
        )  # fmt: skip
    return rows


def gradient(trainer: Trainer, batches: Sequence[MiniBatch]) -> torch.Tensor:
    trainer.optimizer.zero_grad()
    for batch in batches:
        trainer.accumulate(batch)
    return torch.cat([parameter.grad.flatten() for parameter in trainer.role.model.parameters()])  # type: ignore[union-attr]


@pytest.mark.parametrize("family", ["llama-tied", pytest.param("mistral", marks=pytest.mark.long)])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_gradient_does_not_depend_on_execution(family: str, aggregation: str, model_folders) -> None:
    """fp64, to 1e-9: token budgets from one sample to all, fixed micro-batches, any sample order, packed against one by one."""
    trainer, rows = make_trainer(model_folders(family)), random_rows()
    make = partial(minibatch, aggregation=aggregation, length_norm=64)
    everything = sum(row.tokens for row in rows)
    whole = gradient(trainer, [make(rows, micro=MicroSizing(everything))])
    assert whole.abs().max() > 1e-4
    cuts = {}
    for budget in (1, 30, 50, 90, everything // 2):
        batch = make(rows, micro=MicroSizing(budget))
        cuts[budget] = len(batch.micro_batches)
        assert (gradient(trainer, [batch]) - whole).abs().max() < 1e-9
    assert cuts[1] == len(rows) and len(set(cuts.values())) >= 4
    for samples in (1, 4):
        assert (gradient(trainer, [make(rows, micro=MicroSizing(0, samples))]) - whole).abs().max() < 1e-9
    for seed in range(2):
        shuffled = [rows[index] for index in np.random.default_rng(seed).permutation(len(rows))]
        assert (gradient(trainer, [make(shuffled, micro=MicroSizing(70))]) - whole).abs().max() < 1e-9


def test_one_by_one_equals_packed_through_plain_transformers(model_folders) -> None:
    """The same loss written over transformers' own logits, one sample at a time, no packing and no chunked head."""
    trainer, rows = make_trainer(model_folders("qwen2"), loss=sft_loss), random_rows(5)
    packed = gradient(trainer, [minibatch(rows, "token-mean", 1, MicroSizing(10_000))])
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(
        model_folders("qwen2"), dtype=torch.float64, attn_implementation="sdpa"
    ).eval()  # eager rounds to fp32
    trained = sum(int(row.mask.sum()) for row in rows)
    for row in rows:
        ids = torch.from_numpy(row.ids)
        logprobs = (plain(ids[None]).logits[0] / 0.8).log_softmax(-1)
        picked = logprobs[:-1].gather(1, ids[1:, None])[:, 0]
        (-(picked * torch.from_numpy(row.mask[1:])).sum() / trained).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in plain.parameters()])
    assert (packed - expected).abs().max() < 1e-9


def test_forward_only_log_probs_equal_the_updates(model_folders) -> None:
    trainer, rows = make_trainer(model_folders("llama")), random_rows(4)
    batch = minibatch(rows, "token-mean", 1, MicroSizing(60))
    ref = Policy("ref", load_model(ModelConfig(path=str(model_folders("llama")), dtype="float64"), CPU), temperature=0.8)
    for micro in batch.micro_batches:
        with_gradient, _ = trainer.role.run(micro)
        np.testing.assert_allclose(ref.annotate(micro), with_gradient.detach().numpy(), rtol=0, atol=1e-6)


# -- optimizer --------------------------------------------------------------------------------------------------------------------------


def low_gradient(trainer: Trainer, batch: MiniBatch) -> torch.Tensor:
    """What the accumulators of bf16 parameters hold after one mini-batch."""
    trainer.optimizer.zero_grad()
    trainer.accumulate(batch)
    return torch.cat([p.main_grad.flatten() for p in trainer.role.model.parameters()])  # type: ignore[union-attr]


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_low_precision_parameters_have_float32_masters_and_gradients(family: str, model_folders) -> None:
    """bf16 parameters: many micro-batches sum in float32. Summed in bf16, small gradients would vanish beside large ones."""
    low, exact = make_trainer(model_folders(family), "bfloat16", sft_loss), make_trainer(model_folders(family), "float32", sft_loss)
    with torch.no_grad():  # the same numbers in both, so that only the arithmetic differs
        for a, b in zip(low.role.model.parameters(), exact.role.model.parameters(), strict=True):
            b.copy_(a)
    rows = random_rows(32)
    one_by_one = minibatch(rows, "token-mean", 1, MicroSizing(1))
    assert len(one_by_one.micro_batches) == len(rows)
    accumulated = low_gradient(low, one_by_one)
    assert accumulated.dtype == torch.float32 and all(p.grad is None for p in low.role.model.parameters())
    # The same gradients, each alone in its accumulator, summed where nothing is lost. Rounding the sum to bf16 after each would be 1e-2.
    single = [low_gradient(low, MiniBatch((micro,), one_by_one.trained_tokens)) for micro in one_by_one.micro_batches]
    summed = torch.stack(single).double().sum(0)
    assert (accumulated - summed).norm() / summed.norm() < 1e-5
    expected = gradient(exact, [one_by_one])
    # Each micro-batch's own arithmetic is bf16: a few percent in all, but no systematic loss.
    assert (accumulated - expected).norm() / expected.norm() < 0.05
    assert abs(accumulated.norm() / expected.norm() - 1) < 0.02
    tensors = low.optimizer.tensors()
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert sum(name.startswith("master/") for name in tensors) == len(list(low.role.model.parameters()))


def test_updates_too_small_for_bf16_add_up_in_the_master(model_folders) -> None:
    """A learning rate below bf16's resolution moves nothing in one step and something in many; without masters it never would."""
    trainer = make_trainer(model_folders("llama"), "bfloat16", sft_loss, lr=3e-5, clip_grad=0.0)
    batch = minibatch(random_rows(6), "token-mean", 1, MicroSizing(1000))
    weight = trainer.role.model.model.layers[0].mlp.up_proj.weight
    start = weight.detach().clone()
    moved = []
    for _ in range(30):
        trainer.accumulate(batch)
        trainer.apply()
        moved.append(float((weight != start).float().mean()))
    assert moved[0] < 0.2 and moved[-1] > 3 * moved[0] + 0.1


def test_a_gradient_that_is_not_finite_changes_nothing_and_shows(model_folders) -> None:
    trainer = make_trainer(model_folders("llama"), "float32", lr=0.1)
    before = [parameter.detach().clone() for parameter in trainer.role.model.parameters()]
    rows = random_rows(4)
    assert rows[0].advantages is not None
    rows[0].advantages[rows[0].mask] = np.nan
    batch = minibatch(rows, "token-mean", 1, MicroSizing(1000))
    trainer.accumulate(batch)
    report = trainer.apply()
    assert report["actor/skipped_updates"] == 1 and trainer.optimizer.skipped == 1 and trainer.optimizer.updates == 1
    for parameter, old in zip(trainer.role.model.parameters(), before, strict=True):
        assert torch.equal(parameter, old) and parameter.grad is None
    good = minibatch(random_rows(4, seed=9), "token-mean", 1, MicroSizing(1000))
    trainer.accumulate(good)
    assert trainer.apply()["actor/skipped_updates"] == 0
    assert not torch.equal(next(trainer.role.model.parameters()), before[0])


def test_clipping_bounds_the_step(model_folders) -> None:
    """With SGD-like reasoning: clipped by a factor, Adam's first step is unchanged in size, so look at the gradient that Adam sees."""
    batch = minibatch(random_rows(6), "seq-mean-token-sum", 1, MicroSizing(1000))
    moments = {}
    for clip in (0.0, 0.01):
        trainer = make_trainer(model_folders("llama"), "float64", sft_loss, clip_grad=clip)
        trainer.accumulate(batch)
        norm = trainer.apply()["actor/grad_norm"]
        tensors = trainer.optimizer.tensors()
        first = torch.cat([tensor.flatten() for name, tensor in tensors.items() if name.startswith("exp_avg/")])
        moments[clip] = float(first.norm()) / 0.1  # 1 - beta1
    assert abs(moments[0.0] - norm) < 1e-6 * norm and norm > 0.02
    assert abs(moments[0.01] - 0.01) < 1e-5


def test_weight_decay_spares_vectors(model_folders) -> None:
    trainer = make_trainer(model_folders("qwen2"), "float32", sft_loss, lr=0.1, weight_decay=0.5)
    names = {name: parameter.detach().clone() for name, parameter in trainer.role.model.named_parameters()}
    for parameter in trainer.role.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    trainer.apply()
    for name, parameter in trainer.role.model.named_parameters():
        expected = names[name] * (0.95 if parameter.ndim >= 2 else 1.0)
        torch.testing.assert_close(parameter.detach(), expected)


def test_schedules() -> None:
    rates = lambda **config: [round(learning_rate(TrainConfig(lr=1.0, **config), update, 10), 6) for update in range(10)]  # noqa: E731
    assert rates() == [1.0] * 10
    assert rates(warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    linear = rates(schedule="linear", warmup_steps=2, min_lr_ratio=0.1)
    assert linear[2] == 1.0 and linear[6] == pytest.approx(0.55) and linear[9] == pytest.approx(0.1 + 0.9 / 8)
    cosine = rates(schedule="cosine")
    assert cosine[0] == 1.0 and cosine[5] == pytest.approx(0.5) and cosine == sorted(cosine, reverse=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_restored_optimizer_goes_on_bit_for_bit(dtype: str, model_folders) -> None:
    folder = model_folders("llama-tied")
    batches = [minibatch(random_rows(5, seed), "token-mean", 1, MicroSizing(60)) for seed in range(4)]
    whole, first, second = (make_trainer(folder, dtype, lr=1e-2, warmup_steps=3) for _ in range(3))
    for trainer, part in ((whole, batches), (first, batches[:2])):
        for batch in part:
            trainer.accumulate(batch)
            trainer.apply()
    second.role.model.load_state_dict(first.role.model.state_dict())
    restored(second.optimizer, first.optimizer.tensors(), first.optimizer.updates, first.optimizer.skipped)
    for batch in batches[2:]:
        second.accumulate(batch)
        second.apply()
    for name, tensor in whole.optimizer.tensors().items():
        assert torch.equal(tensor, second.optimizer.tensors()[name]), name
    for a, b in zip(whole.role.model.parameters(), second.role.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_checkpoint_of_another_model_is_refused(model_folders) -> None:
    tensors = make_trainer(model_folders("llama")).optimizer.tensors()
    with pytest.raises(ValueError, match="does not fit this model"):
        restored(make_trainer(model_folders("qwen2")).optimizer, tensors, 0, 0)
