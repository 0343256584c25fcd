"""Fused models against the same models unfused: results, gradients, files, optimizer steps, adapters, and what breaks or refuses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import models
import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel
from variants import sample_cases

from fulltilt.model import fuse as fuse_file
from fulltilt.model.attention import Packed
from fulltilt.model.forward import hidden_states
from fulltilt.model.fuse import BrokenFusion, check_fused, fuse, saved_tensors, unfuse
from fulltilt.model.heads import Head, token_logprobs
from fulltilt.model.load import end_tokens, export, load_model
from fulltilt.model.lora import adapted, add_adapters, merged_tensors, without_adapters
from fulltilt.model.verify import packed_logprobs, run_packed, verify
from fulltilt.records import Prompt
from fulltilt.rollout.collect import collect
from fulltilt.rollout.engine import EngineContext, EngineLimits
from fulltilt.rollout.engines.native import NativeEngine
from fulltilt.rollout.sampler import Sampling
from fulltilt.schema import LoraConfig, ModelConfig, TrainConfig
from fulltilt.training.optim import Optimizer

CPU = torch.device("cpu")
KNOWN = ("llama", "llama-tied", "qwen2", "qwen3", "mistral")
RANDOM = np.random.default_rng(0)
DOCUMENTS = [RANDOM.integers(3, 90, length) for length in (19, 3, 25, 1)]  # beyond the window of mistral
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
PROJECTIONS = (*fuse_file.QKV, *fuse_file.GATE_UP)


def make(folder: Path, dtype: str = "float32", device: torch.device = CPU) -> PreTrainedModel:
    """Fresh models have biases of zero and norms of one; here a swapped or forgotten one shows."""
    model = load_model(ModelConfig(path=str(folder), dtype=dtype), device)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=random, dtype=torch.float64).to(parameter)
    return model


def pair(folder: Path, dtype: str = "float32", device: torch.device = CPU) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model fused and the model as it is."""
    fused = make(folder, dtype, device)
    report = fuse(fused)
    assert report.left_alone is None and not report.aside and report.joined == 2 * report.layers == 4
    return fused, make(folder, dtype, device)


@torch.no_grad()
def hidden(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat(run_packed(model, DOCUMENTS)[0])


@torch.no_grad()
def logprobs(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat(packed_logprobs(model, DOCUMENTS)[0])


def loss(model: PreTrainedModel) -> torch.Tensor:
    states, _ = run_packed(model, DOCUMENTS[:3])
    targets = [torch.from_numpy(document[1:]).to(model.device) for document in DOCUMENTS[:3]]
    return sum(token_logprobs(s[:-1], Head.of(model), t, 0.7)[0].sum() for s, t in zip(states, targets, strict=True)) / 40


def equal(found: torch.Tensor, expected: torch.Tensor, allowed: float) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=allowed)


@pytest.mark.parametrize("family", sample_cases(KNOWN, "llama-tied", "qwen3"))
class TestEveryKnownFamily:
    @pytest.mark.parametrize("dtype", TOLERANCE)
    def test_results_are_the_unfused_models(self, family: str, dtype: str, model_folders) -> None:
        fused, plain = pair(model_folders(family), dtype)
        equal(hidden(fused), hidden(plain), TOLERANCE[dtype])
        equal(logprobs(fused), logprobs(plain), TOLERANCE[dtype])

    def test_nothing_but_the_product_rounds_differently(self, family: str, model_folders, monkeypatch: pytest.MonkeyPatch) -> None:
        """Projections one by one and no kernels: norms, additions, rotary, gates and attention are transformers' to the bit."""
        fused, plain = pair(model_folders(family))
        monkeypatch.setattr(fuse_file, "joined_product", lambda owner, x: None)
        assert torch.equal(hidden(fused), hidden(plain))

    def test_gradients_are_the_unfused_models(self, family: str, model_folders) -> None:
        fused, plain = pair(model_folders(family), "float64")
        loss(fused).backward()
        loss(plain).backward()
        expected = dict(plain.named_parameters())
        for name, parameter in fused.named_parameters():
            assert parameter.grad.abs().max() > 1e-5
            # Norms are in float32 whatever the type, as transformers has them.
            torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-6, atol=1e-8, msg=lambda text, n=name: f"{n}: {text}")

    def test_parameters_are_the_same_objects_in_one_storage(self, family: str, model_folders) -> None:
        model = make(model_folders(family))
        names, values = dict(model.named_parameters()), {n: p.detach().clone() for n, p in model.named_parameters()}
        modules, keys = [n for n, _ in model.named_modules()], list(model.state_dict())
        before = total_bytes(model)
        fuse(model)
        assert dict(model.named_parameters()).keys() == names.keys() and [n for n, _ in model.named_modules()] == modules
        assert all(parameter is names[name] for name, parameter in model.named_parameters()) and list(model.state_dict()) == keys
        assert all(torch.equal(parameter, values[name]) and parameter.is_leaf for name, parameter in model.named_parameters())
        assert total_bytes(model) == before
        layer = model.base_model.layers[1]
        for owner, group in ((layer.self_attn, fuse_file.QKV), (layer.mlp, fuse_file.GATE_UP)):
            assert len({getattr(owner, name).weight.untyped_storage().data_ptr() for name in group}) == 1
        for whole in (whole for _, owner in fuse_file.owners(model.base_model) for whole in fuse_file.state_of(owner).joined):
            whole.fill_(7.0)
        moved = [p for n, p in model.named_parameters() if any(part in n for part in PROJECTIONS)]
        assert len(moved) == (16 if family == "qwen2" else 10)  # of two layers, with biases of q, k and v or without
        assert all((parameter == 7.0).all() for parameter in moved)

    def test_export_is_the_unfused_models(self, family: str, model_folders, tmp_path: Path) -> None:
        fused, plain = pair(model_folders(family))
        export(plain, models.tokenizer(), tmp_path / "plain")
        export(fused, models.tokenizer(), tmp_path / "fused")
        export(fused, models.tokenizer(), tmp_path / "tensors", saved_tensors(fused))
        expected = load_file(tmp_path / "plain" / "model.safetensors")
        for folder in ("fused", "tensors"):
            found = load_file(tmp_path / folder / "model.safetensors")
            assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
            size = lambda name: (tmp_path / name / "model.safetensors").stat().st_size  # noqa: E731
            assert size(folder) == size("plain")
        check_fused(fused)
        again = load_model(ModelConfig(path=str(tmp_path / "fused")), CPU)
        assert torch.equal(hidden(again), hidden(plain))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_an_optimizer_step_shows_in_the_next_pass(self, family: str, dtype: str, model_folders) -> None:
        """float32: Adam updates parameters in place; bfloat16: they are copied from their masters."""
        fused, plain = pair(model_folders(family), dtype)
        start = logprobs(fused)
        for model in (fused, plain):
            optimizer = Optimizer(model, TrainConfig(lr=1e-2), 10)
            for _ in range(2):
                loss(model).backward()
                assert all(parameter.grad is None for parameter in model.parameters()) == (dtype == "bfloat16")
                assert not optimizer.step().skipped
        check_fused(fused)
        assert (logprobs(fused) - start).abs().max() > 0.05
        # Adam turns a gradient that is zero but for rounding into a step of either sign, so the models may differ by a few such steps.
        assert (logprobs(fused) - logprobs(plain)).abs().mean() < (2e-3 if dtype == "float32" else 0.15)
        unfuse(fused)
        after = logprobs(fused)
        fuse(fused)
        equal(logprobs(fused), after, 1e-5 if dtype == "float32" else 0.2)

    def test_decoding_is_training(self, family: str, model_folders) -> None:
        """The engine's paged cache on a fused model, judged by the unfused one; greedy tokens are the unfused engine's."""
        fused, plain = pair(model_folders(family))
        ends = end_tokens(ModelConfig(path=str(model_folders(family))), models.tokenizer())
        limits = EngineLimits(blocks=60, block_tokens=4, max_seqs=4, max_batched_tokens=16)
        prompts = [Prompt(uid=number, ids=document[:5], text="") for number, document in enumerate((DOCUMENTS[0], DOCUMENTS[2]))]
        drawn = []
        for model in (fused, plain):
            engine = NativeEngine(EngineContext(model, models.tokenizer(), ends, verify(model), limits))
            groups = collect(engine.generate, prompts, Sampling(samples=1, max_new_tokens=10, temperature=0.0), 5, lambda group: None)
            drawn.append([sample.ids.tolist() for group in groups for sample in group.samples])
            for group in groups:
                for sample in group.samples:
                    with torch.no_grad():
                        (judged,), _ = packed_logprobs(plain, [np.concatenate([group.prompt.ids, sample.ids])])
                    equal(torch.from_numpy(sample.logprobs), judged[len(group.prompt.ids) - 1 :], 2e-5)
        assert drawn[0] == drawn[1]

    def test_unfuse_restores(self, family: str, model_folders) -> None:
        fused, plain = pair(model_folders(family))
        unfuse(fused)
        assert torch.equal(hidden(fused), hidden(plain))
        assert all("forward" not in vars(module) and fuse_file.STATE not in vars(module) for module in fused.modules())
        assert all(parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in fused.parameters())
        assert check_fused(fused).left_alone == "fuse was not called"
        unfuse(fused)
        assert fuse(fused).joined == 4

    def test_transformers_own_generation(self, family: str, model_folders) -> None:
        """With its cache, its masks and its batches, which our stream never has."""
        fused, plain = pair(model_folders(family))
        ids = torch.from_numpy(np.stack([DOCUMENTS[0][:9], DOCUMENTS[2][:9]]))
        for model in (fused, plain):
            model.set_attn_implementation("sdpa")
        options = {
            "attention_mask": torch.tensor([[0] * 3 + [1] * 6, [1] * 9]),
            "max_new_tokens": 12,
            "do_sample": False,
            "pad_token_id": 1,
        }
        assert torch.equal(fused.generate(input_ids=ids, **options), plain.generate(input_ids=ids, **options))
        for model in (fused, plain):
            model.set_attn_implementation("eager")
        equal(fused(ids).logits, plain(ids).logits, 1e-5)


@pytest.mark.kernels
@pytest.mark.skipif(torch.cuda.is_available(), reason="of interpreted kernels; compiled ones run below")
@pytest.mark.parametrize("family", sample_cases(["llama", "qwen2", "qwen3"], "qwen3"))
def test_kernels_give_the_same(family: str, model_folders) -> None:
    fused, plain = pair(model_folders(family))
    document = DOCUMENTS[2][:4]
    targets = torch.from_numpy(document[1:])
    found, expected = [], []
    for model, results in ((fused, found), (plain, expected)):
        with torch.no_grad():
            results.append(run_packed(model, [document])[0][0])
        states = run_packed(model, [document])[0][0]
        token_logprobs(states[:-1], Head.of(model), targets, 1.0)[0].mean().backward()
        results += [states.detach(), *(parameter.grad for parameter in model.parameters())]
    for one, other in zip(found, expected, strict=True):
        equal(one, other, 1e-5 * max(1.0, float(other.abs().max())))


@pytest.mark.gpu
@pytest.mark.parametrize("family", KNOWN)
def test_on_a_gpu(family: str, model_folders) -> None:
    fused, plain = pair(model_folders(family), "bfloat16", torch.device("cuda"))
    assert (logprobs(fused) - logprobs(plain)).abs().mean() < 2e-2
    for model in (fused, plain):
        loss(model).backward()
    found, expected = (torch.cat([p.grad.flatten().float() for p in model.parameters()]) for model in (fused, plain))
    assert torch.nn.functional.cosine_similarity(found, expected, dim=0) > 0.99


def total_bytes(model: PreTrainedModel) -> int:
    return sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}.values())


# ---- others are left alone ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(models.FAMILIES.keys() - set(KNOWN)))
def test_unknown_families_are_left_alone(family: str, model_folders) -> None:
    model, plain = make(model_folders(family)), make(model_folders(family))
    report = fuse(model)
    assert report.family is None and "not of a known family" in report.left_alone and "not fused" in str(report)
    assert all("forward" not in vars(module) and fuse_file.STATE not in vars(module) for module in model.modules())
    assert torch.equal(hidden(model), hidden(plain))
    assert check_fused(model) == report


@pytest.mark.parametrize("change", ["activation", "norm type", "other class", "own forward", "another part"])
def test_a_known_family_with_something_unknown_is_left_alone_whole(change: str, model_folders) -> None:
    model = make(model_folders("llama"))
    layer = model.base_model.layers[1]
    if change == "activation":
        model.config.hidden_act = "relu"
    elif change == "norm type":
        layer.input_layernorm.double()
    elif change == "other class":
        layer.mlp.__class__ = type("MyMLP", (type(layer.mlp),), {})
    elif change == "own forward":
        layer.self_attn.forward = lambda *args, **kwargs: None
    else:
        layer.self_attn.extra = torch.nn.Linear(2, 2)
    assert fuse(model).left_alone
    assert all(fuse_file.STATE not in vars(module) for module in model.modules())


def test_a_group_that_cannot_be_joined_runs_one_by_one(model_folders) -> None:
    model, plain = make(model_folders("llama")), make(model_folders("llama"))
    first, second = model.base_model.layers
    first.self_attn.k_proj.bias = torch.nn.Parameter(torch.zeros(16))
    arena = torch.empty(2, *second.mlp.up_proj.weight.shape)  # of somebody who counts on the weight staying there
    arena[1] = second.mlp.up_proj.weight.data
    second.mlp.up_proj.weight.data = arena[1]
    report = fuse(model)
    assert report.joined == 2 and "bias" in report.aside["layers.0.self_attn.q_proj/k_proj/v_proj"]
    assert "larger storage" in report.aside["layers.1.mlp.gate_proj/up_proj"] and "one by one" in str(report)
    assert second.mlp.up_proj.weight.data_ptr() == arena[1].data_ptr()
    equal(hidden(model), hidden(plain), 1e-5)


def test_weights_that_lie_side_by_side_stay_where_they_are(model_folders) -> None:
    model = make(model_folders("llama"))
    mlp = model.base_model.layers[0].mlp
    arena = torch.cat([torch.zeros(3, 32), mlp.gate_proj.weight.data, mlp.up_proj.weight.data])
    mlp.gate_proj.weight.data, mlp.up_proj.weight.data = arena[3:51], arena[51:]
    plain = make(model_folders("llama"))
    assert fuse(model).joined == 4
    assert mlp.up_proj.weight.data_ptr() == arena[51:].data_ptr()
    equal(hidden(model), hidden(plain), 1e-5)
    unfuse(model)
    assert mlp.up_proj.weight.data_ptr() == arena[51:].data_ptr()


# ---- what breaks views, and what does not ------------------------------------------------------------------------------------------


def test_moving_parameters_is_found_out(model_folders) -> None:
    fused, plain = pair(model_folders("qwen2"))
    fused.to("cpu")  # is there already
    fused.load_state_dict(plain.state_dict())  # in place
    check_fused(fused)
    bias = fused.base_model.layers[1].self_attn.k_proj.bias
    bias.data = bias.data + 1
    for run in (check_fused, hidden):
        with pytest.raises(BrokenFusion, match=r"q_proj/k_proj/v_proj of a Qwen2Attention .* Call fuse\(model\) again"):
            run(fused)
    assert fuse(fused).joined == 4
    plain.base_model.layers[1].self_attn.k_proj.bias.data += 1
    equal(hidden(fused), hidden(plain), 1e-5)
    fused.double()
    with pytest.raises(BrokenFusion):
        hidden(fused)
    fuse(fused)
    equal(hidden(fused), hidden(plain.double()), 1e-10)


def test_a_copy_is_found_out_and_can_be_fused_anew(model_folders) -> None:
    fused, plain = pair(model_folders("llama"))
    twin = copy.deepcopy(fused)
    with pytest.raises(BrokenFusion):
        check_fused(twin)
    assert fuse(twin).joined == 4
    with torch.no_grad():
        twin.base_model.layers[0].self_attn.v_proj.weight.zero_()
    assert (hidden(twin) - hidden(plain)).abs().max() > 1e-2
    equal(hidden(fused), hidden(plain), 1e-5)


def test_a_change_between_forward_and_backward_raises(model_folders) -> None:
    fused, _ = pair(model_folders("llama"))
    total = loss(fused)
    with torch.no_grad():
        fused.base_model.layers[0].self_attn.k_proj.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


# ---- gradients -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputing_layers_changes_no_gradient(reentrant: bool, model_folders) -> None:
    fused, plain = pair(model_folders("qwen3"), "float64")
    fused.train()  # dropout is zero; transformers recomputes in training mode only
    fused.gradient_checkpointing_enable({"use_reentrant": reentrant})
    fused.enable_input_require_grads()
    loss(fused).backward()
    loss(plain).backward()
    expected = dict(plain.named_parameters())
    for name, parameter in fused.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-6, atol=1e-8)


def test_frozen_parameters_get_none(model_folders) -> None:
    fused, plain = pair(model_folders("qwen2"), "float64")
    for model in (fused, plain):
        model.requires_grad_(False)
        attention = model.base_model.layers[0].self_attn
        attention.k_proj.weight.requires_grad_()
        attention.q_proj.bias.requires_grad_()
        loss(model).backward()
    expected = dict(plain.named_parameters())
    for name, parameter in fused.named_parameters():
        assert (parameter.grad is None) == (expected[name].grad is None)
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-6, atol=1e-10)


def accumulators(
    folder: Path, *, fused: bool = True, frozen: str = "", recompute: bool = False, rounds: int = 1, device: torch.device = CPU
) -> dict[str, torch.Tensor]:
    """Float32 gradients of a bfloat16 model, and nothing beside them."""
    model = make(folder, "bfloat16", device)
    if fused:
        fuse(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    optimizer = Optimizer(model, TrainConfig(), 1)
    for _ in range(rounds):
        loss(model).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert optimizer.step().grad_norm > 0
    optimizer.prepare()
    for _ in range(rounds):
        loss(model).backward()
    return {name: parameter.main_grad.clone() for name, parameter in model.named_parameters() if hasattr(parameter, "main_grad")}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama-tied"])
def test_gradients_of_products_are_added_up_in_float32(family: str, model_folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside the product: not one of the projections' gradients is rounded to bfloat16 in between, as the plain model's are."""
    folder, added = model_folders(family), list[torch.Tensor]()
    add = fuse_file.add_product
    monkeypatch.setattr(fuse_file, "add_product", lambda total, left, right: (added.append(total), add(total, left, right)))
    found = accumulators(folder)
    layers = 2
    # Twice (the first step and the one that is kept): qkv and gate-up as one product each where their accumulators lie side by side.
    assert [len(total) for total in added[: 4 * layers]].count(len(found["model.layers.0.mlp.gate_proj.weight"]) * 2) == layers
    assert len(added) == 2 * 4 * layers, "q, k and v, o, gate and up, down: one product each"
    plain = accumulators(folder, fused=False)
    assert found.keys() == plain.keys()
    for name, gradient in plain.items():
        size = float(gradient.norm())
        # bfloat16's rounding, through two layers. Where a CPU has no bfloat16 arithmetic, torch multiplies by another route, with which
        # the gradient of a bias, a sum over all tokens, is off by 0.0252.
        assert float((found[name] - gradient).norm()) < 0.03 * size, name
    weight = found["model.layers.1.mlp.down_proj.weight"]
    assert not weight.equal(weight.bfloat16().float()) and plain["model.layers.1.mlp.down_proj.weight"].ne(0).any()
    twice = accumulators(folder, rounds=2)
    recomputed = accumulators(folder, recompute=True)
    for name, gradient in found.items():
        assert recomputed[name].equal(gradient), name
        assert float((twice[name] - 2 * gradient).norm()) < 0.1 * float(gradient.norm()), name  # its first step was another


@pytest.mark.gpu
@pytest.mark.parametrize("frozen", ["", "k_proj"])
def test_gradients_of_products_are_added_up_on_a_gpu(frozen: str, model_folders) -> None:
    """cuBLAS adds bfloat16 products to float32 accumulators, joined and one by one."""
    folder = model_folders("qwen2")
    found = accumulators(folder, frozen=frozen, device=torch.device("cuda"))
    expected = accumulators(folder, frozen=frozen)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float((found[name].cpu() - gradient).norm()) < 0.03 * float(gradient.norm()), name  # bfloat16's rounding, in another order


def test_a_hook_on_a_weight_sees_its_gradient(model_folders) -> None:
    model, seen = make(model_folders("qwen2"), "bfloat16"), list[torch.Tensor]()
    fuse(model)
    Optimizer(model, TrainConfig(), 1)
    weight = model.base_model.layers[0].mlp.down_proj.weight
    weight.register_hook(seen.append)
    loss(model).backward()
    assert len(seen) == 1 and seen[0].shape == weight.shape and weight.main_grad.equal(seen[0].float())


def test_frozen_weights_keep_no_inputs(model_folders) -> None:
    """Where only adapters or norms learn, what a product reads is not kept for it."""

    def kept(frozen: bool) -> int:
        model, sizes = make(model_folders("qwen2"), "bfloat16"), list[int]()
        fuse(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (frozen and "proj" in name))
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (sizes.append(x.numel()), x)[1], lambda x: x):
            loss(model)
        return sum(sizes)

    tokens, widths = sum(map(len, DOCUMENTS[:3])), models.SMALL
    assert kept(False) - kept(True) >= 2 * tokens * (2 * widths["hidden_size"] + widths["intermediate_size"])


def test_gradients_of_products_go_only_to_those_that_want_one(model_folders) -> None:
    folder = model_folders("qwen2")
    found, all_of_them = accumulators(folder, frozen="k_proj"), accumulators(folder)
    assert found.keys() == {name for name in all_of_them if "k_proj" not in name}
    name = "model.layers.1.self_attn.v_proj.weight"
    torch.testing.assert_close(found[name], all_of_them[name], rtol=0.1, atol=0.02 * float(all_of_them[name].abs().max()))


# ---- adapters and hooks --------------------------------------------------------------------------------------------------------------


def adapt(model: PreTrainedModel, targets: list[str]) -> PreTrainedModel:
    add_adapters(model, LoraConfig(rank=2, targets=targets), seed=3)
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for _, layer in adapted(model):
            layer.lora_B["default"].weight.copy_(0.2 * torch.randn(layer.lora_B["default"].weight.shape, generator=random))
    return model


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters(family: str, when: str, model_folders, tmp_path: Path) -> None:
    targets = ["k_proj", "down_proj"]  # one inside a group, one outside
    fused, plain = make(model_folders(family)), adapt(make(model_folders(family)), targets)
    if when == "after":
        fuse(fused)
        adapt(fused, targets)
        report = check_fused(fused)
    else:
        report = fuse(adapt(fused, targets))
    assert report.joined == 2 and list(report.aside) == [f"layers.{index}.self_attn.q_proj/k_proj/v_proj" for index in range(2)]
    assert "k_proj is a peft Linear" in str(report)
    equal(hidden(fused), hidden(plain), 1e-5)
    loss(fused).backward()
    loss(plain).backward()
    expected = dict(plain.named_parameters())
    for name, parameter in fused.named_parameters():
        assert (parameter.grad is not None) == ("lora_" in name)
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-6)
    with without_adapters(fused), without_adapters(plain):
        equal(hidden(fused), hidden(plain), 1e-5)
    export(fused, models.tokenizer(), tmp_path / "fused", merged_tensors(fused))
    export(plain, models.tokenizer(), tmp_path / "plain", merged_tensors(plain))
    found, other = (load_file(tmp_path / name / "model.safetensors") for name in ("fused", "plain"))
    assert found.keys() == other.keys() and all(torch.equal(found[name], other[name]) for name in found)
    unfuse(fused)
    assert torch.equal(hidden(fused), hidden(plain))
    assert all(parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in fused.parameters())


def test_adapters_taken_out_again(model_folders) -> None:
    fused, plain = pair(model_folders("llama"))
    adapt(fused, ["q_proj"])
    assert len(check_fused(fused).aside) == 2
    for layer in fused.base_model.layers:
        assert isinstance(layer.self_attn.q_proj, peft.tuners.lora.LoraLayer)
        layer.self_attn.q_proj = layer.self_attn.q_proj.base_layer
    assert not check_fused(fused).aside
    equal(hidden(fused), hidden(plain), 1e-5)


@pytest.mark.parametrize("place", ["self_attn.v_proj", "mlp.up_proj", "post_attention_layernorm", "input_layernorm", "self_attn.q_norm"])
def test_hooks_are_called(place: str, model_folders) -> None:
    """Whoever watches or changes a module's result is not passed over."""
    fused, plain = pair(model_folders("qwen3"))
    for model in (fused, plain):
        model.base_model.layers[1].get_submodule(place).register_forward_hook(lambda module, args, out: 2 * out)
    equal(hidden(fused), hidden(plain), 1e-5)
    assert len(check_fused(fused).aside) == (1 if "proj" in place else 0)


def test_hidden_states_of_all_layers(model_folders) -> None:
    """What a layer computes for the next one stays beside its result, and a result that was changed is normed anew."""
    fused, plain = pair(model_folders("llama"))
    ids = torch.from_numpy(DOCUMENTS[0])
    context = lambda: {"fulltilt": Packed.of([0, len(ids)], CPU), "position_ids": torch.arange(len(ids))[None]}  # noqa: E731
    with torch.no_grad():
        found, expected = (model.base_model(ids[None], output_hidden_states=True, **context()) for model in (fused, plain))
        for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
            equal(one, other, 1e-5)
            assert fuse_file.READY not in vars(one)
    for model in (fused, plain):
        model.base_model.layers[0].register_forward_hook(lambda module, args, out: out.add_(0.5))
    with torch.no_grad():
        equal(hidden_states(fused, ids, torch.arange(len(ids)), Packed.of([0, len(ids)], CPU)),
              hidden_states(plain, ids, torch.arange(len(ids)), Packed.of([0, len(ids)], CPU)), 1e-5)  # fmt: skip


def test_a_model_cut_short(model_folders) -> None:
    """transformers runs as many layers as the configuration says: the last one's result is not for the layer that would have come next."""
    fused, plain = pair(model_folders("llama"))
    for model in (fused, plain):
        model.config.num_hidden_layers = 1
    equal(hidden(fused), hidden(plain), 1e-5)


def test_a_layer_adds_and_norms_in_one_call(model_folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradient: one plain norm at the start, then every norm with its addition; one product for each group."""
    fused, _ = pair(model_folders("llama"))
    calls: list[str] = []
    norm, linear = fuse_file.rms_norm, torch.nn.functional.linear

    def counted_norm(*args: Any) -> Any:
        calls.append("norm" if len(args) == 3 else "add")
        return norm(*args)

    def counted_linear(*args: Any) -> torch.Tensor:
        calls.append("linear")
        return linear(*args)

    monkeypatch.setattr(fuse_file, "rms_norm", counted_norm)
    monkeypatch.setattr(torch.nn.functional, "linear", counted_linear)
    hidden(fused)
    assert calls.count("norm") == 1 and calls.count("add") == 4 and calls.count("linear") == 2 * 4
