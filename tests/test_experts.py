"""Experts through one grouped product, and adapters on them through thin ones: equal to transformers' loop over them and to peft's
adapters, in values and gradients, without the host; and decoding where a model cannot be captured.

On a CUDA device (`-m gpu`) also: training without a wait of the host; captured decoding of mixture-of-experts models against eager
decoding and the trainer; and captures that fail."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import peft
import pytest
import torch
from test_lora import settings, stir
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig, NemotronHConfig, PreTrainedModel, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralSparseMoeBlock
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeSparseMoeBlock
from variants import sample_cases

from fulltilt.model import experts
from fulltilt.model.load import end_tokens, load_model
from fulltilt.model.lora import add_adapters, run_with_experts
from fulltilt.model.verify import packed_logprobs, verify
from fulltilt.records import Group, Prompt, UserError
from fulltilt.rollout.collect import collect
from fulltilt.rollout.decode import BURST, refuse_waits
from fulltilt.rollout.engine import EngineContext, EngineLimits
from fulltilt.rollout.engines.native import NativeEngine
from fulltilt.rollout.sampler import Sampling
from fulltilt.schema import ModelConfig, TrainConfig
from fulltilt.training.optim import Optimizer

CPU, GPU = torch.device("cpu"), torch.device("cuda")
FAMILIES = ("qwen3-moe", "mixtral")
WIDE = {"hidden_size": 32, "intermediate_size": 48, "num_experts_per_tok": 2}
# Gated, with router weights in the model's type or in float32; biases, transposed weights and a gate of its own; no gate at all; rows that
# torch's grouped product does not take (34 numbers).
KINDS: dict[str, Any] = {
    "qwen3-moe": lambda: Qwen3MoeExperts(Qwen3MoeConfig(**WIDE, num_experts=6, moe_intermediate_size=24)),
    "mixtral": lambda: MixtralExperts(MixtralConfig(**WIDE, num_local_experts=6)),
    "gpt-oss": lambda: GptOssExperts(GptOssConfig(**WIDE, num_local_experts=6)),
    "nemotron-h": lambda: NemotronHExperts(NemotronHConfig(**WIDE, n_routed_experts=6, moe_intermediate_size=24)),
    "odd widths": lambda: Qwen3MoeExperts(Qwen3MoeConfig(**{**WIDE, "hidden_size": 34}, num_experts=6, moe_intermediate_size=22)),
}
BLOCKS: dict[str, Any] = {  # the router and its experts
    "qwen3-moe": lambda: Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**WIDE, num_experts=6, moe_intermediate_size=24)),
    "mixtral": lambda: MixtralSparseMoeBlock(MixtralConfig(**WIDE, num_local_experts=6)),
}
EXACT = {torch.float64: 1e-12, torch.float32: 2e-6}  # of the largest number: rounding
# Products of a layer, forward and backward: a stack of weights has one, and two gradients. With adapters on both stacks, which are frozen
# then: one and the rows' gradient of each stack; two and four gradients of each adapter.
PRODUCTS = {"plain": 2 * 3, "adapters": 2 * 2 + 2 * 6}


def make_experts(kind: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    experts.register()
    module = KINDS[kind]().to(dtype)
    random = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=random)
    return module


def make_block(family: str, dtype: torch.dtype, adapters: bool = False, *, rank: int = 3) -> torch.nn.Module:
    block = BLOCKS[family]().to(dtype)
    random = torch.Generator().manual_seed(3)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=random)
    block.experts.config._experts_implementation = experts.register()
    return adapt(block, rank) if adapters else block


def adapt(holder: torch.nn.Module, rank: int = 3) -> torch.nn.Module:
    """Adapters that add something, on both stacks of `holder.experts`. A rank of 3 is one that torch's grouped product does not take."""
    stacks = [f"experts.{name}" for name, parameter in holder.experts.named_parameters() if parameter.ndim == 3]
    random = torch.Generator().manual_seed(6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, of an empty list of layers
        peft.inject_adapter_in_model(peft.LoraConfig(r=rank, lora_alpha=6, target_modules=[], target_parameters=stacks), holder, "default")
    for parameter in holder.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3, generator=random)
    run_with_experts(holder)
    return holder


def adapted_experts(kind: str, dtype: torch.dtype = torch.float32, rank: int = 3) -> torch.nn.Module:
    """The experts inside two adapters of peft."""
    return adapt(torch.nn.ModuleDict({"experts": make_experts(kind, dtype)}), rank).experts


class Watch(TorchDispatchMode):
    """What torch is asked for, and the most numbers of a tensor that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls[func.overloadpacket.__name__] += 1
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in given]
        self.largest = max([self.largest, *(leaf.numel() for leaf in made)])
        return out


def routes() -> dict[str, torch.Tensor]:
    """Experts of 40 tokens; never expert 2, so that one has nothing to do."""
    random = torch.Generator().manual_seed(4)
    known = torch.tensor([0, 1, 3, 4, 5])
    mixed = torch.stack([known[torch.randperm(5, generator=random)[:2]] for _ in range(40)])
    one = torch.tensor([[5]]).repeat(40, 1)
    return {"mixed": mixed, "all alike": torch.tensor([[5, 0]]).repeat(40, 1), "one expert": one, "one token": mixed[:1]}


def run(
    module: Any, implementation: str, tokens: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, *, gradient: bool = True
) -> list[torch.Tensor]:
    """The output, and the gradients of tokens, shares and every parameter that is trained."""
    base = module
    while hasattr(base, "base_layer"):
        base = base.base_layer
    base.config._experts_implementation = implementation
    module.zero_grad()
    tokens, shares = (states.clone().requires_grad_(gradient) for states in (tokens, shares))
    with torch.set_grad_enabled(gradient):
        out = module(tokens, chosen, shares)
    if not gradient:
        return [out]
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)).sum().backward()
    return [out.detach(), tokens.grad, shares.grad, *(parameter.grad for parameter in module.parameters() if parameter.requires_grad)]


def inputs(module: Any, chosen: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(5)
    base = module.get_base_layer() if hasattr(module, "get_base_layer") else module
    width = next(width for name in ("hidden_dim", "hidden_size") if (width := getattr(base, name, None)))
    return torch.randn(len(chosen), width, generator=random, dtype=dtype), torch.rand(chosen.shape, generator=random, dtype=dtype)


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("route", sample_cases(routes(), "mixed", "one token"))
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_transformers_loop(kind: str, route: str, dtype: torch.dtype) -> None:
    module, chosen = make_experts(kind, dtype), routes()[route]
    tokens, shares = inputs(module, chosen, dtype)
    found, expected = (run(module, name, tokens, chosen, shares) for name in (experts.NAME, "eager"))
    assert len(found) == len(expected) >= 5
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.abs().max() > 0 and ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=EXACT[dtype] * float(theirs.abs().max()))
    for gradient in found[3:]:
        assert not gradient[2].any()  # of the expert without tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_does_not_notice_the_others(kind: str) -> None:
    module, chosen = make_experts(kind), routes()["mixed"]
    tokens, shares = inputs(module, chosen, torch.float32)
    (whole,) = run(module, experts.NAME, tokens, chosen, shares, gradient=False)
    for place in (0, 17, 39):  # alone: the products have other shapes, so they may round otherwise
        here = slice(place, place + 1)
        (alone,) = run(module, experts.NAME, tokens[here], chosen[here], shares[here], gradient=False)
        torch.testing.assert_close(alone, whole[here], rtol=0, atol=2e-6 * float(whole.abs().max()))
    broken = tokens.clone()
    broken[10:20] = torch.nan
    broken[20:30] = torch.inf
    (beside,) = run(module, experts.NAME, broken, chosen, shares, gradient=False)
    kept = torch.arange(40).lt(10) | torch.arange(40).ge(30)
    assert torch.equal(beside[kept], whole[kept]) and beside[10:20].isnan().all()


# ---- training ----------------------------------------------------------------------------------------------------------------------


def gradients(model: PreTrainedModel, packs: list[list[np.ndarray]]) -> dict[str, torch.Tensor]:
    """Of the sum of all log-probs."""
    model.zero_grad()
    for documents in packs:
        torch.cat(packed_logprobs(model, documents)[0]).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_model_learns_what_the_loop_learns_from_documents_alone(family: str, model_folders) -> None:
    """Every parameter, routers included. Asking transformers for its load-balancing loss changes nothing: it belongs to its own head."""
    model = load_model(ModelConfig(path=str(model_folders(family)), dtype="float64"), CPU)
    random = np.random.default_rng(0)
    documents = [random.integers(3, 90, length) for length in (19, 1, 30, 2)]
    found = gradients(model, [documents])
    model.config.output_router_logits = True
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients(model, [documents]).items())
    model.set_experts_implementation("eager")
    expected = gradients(model, [[document] for document in documents])
    assert any(name.endswith("mlp.gate.weight") for name in expected)
    for name, gradient in expected.items():
        assert gradient.abs().max() > 1e-3, name
        assert (found[name] - gradient).abs().max() < 1e-9 * gradient.abs().max(), name


@pytest.mark.parametrize("adapters", [False, True], ids=["plain", "adapters"])
@pytest.mark.parametrize("family", FAMILIES)
def test_recomputing_routes_every_token_as_before(family: str, adapters: bool) -> None:
    """To the bit, in the type where two experts are most often nearly tied."""
    results = []
    for recompute in (False, True):
        block = make_block(family, torch.bfloat16, adapters)
        hidden = torch.randn(1, 50, 32, generator=torch.Generator().manual_seed(5)).bfloat16().requires_grad_()
        with Watch() as watch:
            out = checkpoint(block, hidden, use_reentrant=False) if recompute else block(hidden)
            out.backward(torch.linspace(-1, 1, out.numel()).view_as(out).bfloat16())
        assert watch.calls["sort"] == 1 + recompute
        results.append([out.detach(), hidden.grad, *(parameter.grad for parameter in block.parameters() if parameter.requires_grad)])
    assert all(torch.equal(kept, again) and kept.any() for kept, again in zip(*results, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_all_micro_batches_meet_in_float32(family: str) -> None:
    block, twin = (make_block(family, torch.bfloat16) for _ in range(2))
    optimizer = Optimizer(block, TrainConfig(), total_updates=1)
    hidden = torch.randn(3, 50, 32, generator=torch.Generator().manual_seed(5)).bfloat16()
    totals = {name: torch.zeros(parameter.shape) for name, parameter in twin.named_parameters()}
    for part in hidden.unbind():
        block(part[None]).square().sum().backward()
        twin.zero_grad()
        twin(part[None]).square().sum().backward()
        for name, parameter in twin.named_parameters():
            totals[name] += parameter.grad
    for name, parameter in block.named_parameters():
        assert parameter.grad is None and parameter.main_grad.any()
        assert torch.equal(parameter.main_grad, totals[name]), name
    assert optimizer.step().grad_norm > 0


@pytest.mark.parametrize("adapters", [False, True], ids=["plain", "adapters"])
def test_products_of_a_layer_do_not_grow_with_its_experts(adapters: bool) -> None:
    calls = []
    for count in (6, 24):
        module = Qwen3MoeExperts(Qwen3MoeConfig(**WIDE, num_experts=count, moe_intermediate_size=24))
        module = adapt(torch.nn.ModuleDict({"experts": module})).experts if adapters else module
        chosen = routes()["mixed"]
        with Watch() as watch:
            run(module, experts.NAME, *reorder(inputs(module, chosen, torch.float32), chosen))
        calls.append(watch.calls)
    assert calls[0] == calls[1]
    assert calls[0]["_grouped_mm"] == PRODUCTS["adapters" if adapters else "plain"] and calls[0]["sort"] == 1


def reorder(pair: tuple[torch.Tensor, torch.Tensor], chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return pair[0], chosen, pair[1]


# ---- adapters ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("route", sample_cases(routes(), "mixed", "one token"))
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_those_of_peft(kind: str, route: str, dtype: torch.dtype) -> None:
    """Values and gradients, against peft's own forward around transformers' loop."""
    module, chosen = adapted_experts(kind, dtype), routes()[route]
    tokens, shares = inputs(module, chosen, dtype)
    found, expected = (run(module, name, tokens, chosen, shares) for name in (experts.NAME, "eager"))
    assert len(found) == len(expected) == 3 + 4
    (base,) = run(make_experts(kind, dtype), experts.NAME, tokens, chosen, shares, gradient=False)
    assert (found[0] - base).abs().max() > 0.1 * base.abs().max()  # the adapters add something
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.abs().max() > 0 and ours.dtype == dtype
        # x W + (x A) B rounds otherwise than x (W + A B), forward and backward: 2.4e-6 of the largest number was seen in float32.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=4 * EXACT[dtype] * float(theirs.abs().max()))


@pytest.mark.parametrize("kind", ["qwen3-moe", "gpt-oss"])
def test_adapters_make_nothing_of_the_size_of_a_stack(kind: str) -> None:
    """Forward and backward. peft's own way does."""
    module, chosen = adapted_experts(kind), routes()["mixed"][:4]
    tokens, shares = inputs(module, chosen, torch.float32)
    stack = min(parameter.numel() for parameter in module.get_base_layer().parameters() if parameter.ndim == 3)
    for implementation in (experts.NAME, "eager"):
        with Watch() as watch:
            run(module, implementation, tokens, chosen, shares)
        assert (watch.largest >= stack) == (implementation == "eager")


def test_a_copy_of_a_model_has_adapters_of_its_own() -> None:
    module, chosen = adapted_experts("qwen3-moe"), routes()["mixed"]
    tokens, shares = inputs(module, chosen, torch.float32)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.lora_B["default"].weight.zero_()
    results = [run(each, experts.NAME, tokens, chosen, shares, gradient=False)[0] for each in (module, twin)]
    assert not torch.allclose(*results, rtol=0, atol=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_on_experts_add_what_they_add_to_the_loop(family: str, model_folders) -> None:
    model = load_model(ModelConfig(path=str(model_folders(family)), dtype="float64"), CPU)
    document = [np.random.default_rng(0).integers(3, 90, 50)]
    plain = packed_logprobs(model, document)[0][0].detach()
    add_adapters(model, settings(family), seed=3)
    stir(model)
    results = []
    for implementation in (experts.NAME, "eager"):
        model.set_experts_implementation(implementation)
        model.zero_grad()
        with Watch() as watch:
            (logprobs,), _ = packed_logprobs(model, document)
            logprobs.sum().backward()
        assert (watch.calls["baddbmm"] > 0) == (implementation == "eager")  # peft adds adapters to the weights
        results.append([logprobs.detach(), *(parameter.grad for parameter in model.parameters() if parameter.requires_grad)])
    assert (results[0][0] - plain).abs().max() > 1e-2
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


@pytest.mark.parametrize("adapters", [False, True], ids=["plain", "adapters"])
@pytest.mark.parametrize("family", FAMILIES)
def test_router_and_experts_never_ask_for_a_number(family: str, adapters: bool) -> None:
    """Tensors without contents: whatever would have to be known on the host raises, forward and backward."""
    block = make_block(family, torch.bfloat16, adapters)
    with FakeTensorMode(allow_non_fake_inputs=True):
        hidden = torch.empty(1, 7, 32, dtype=torch.bfloat16, requires_grad=True)
        block(hidden).sum().backward()
        assert hidden.grad is not None and all(p.grad is not None for p in block.parameters() if p.requires_grad)
        if not adapters:
            block.experts.config._experts_implementation = "eager"
            with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
                block(hidden)


# ---- what can be captured ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_what_keeps_a_model_out_of_a_graph_is_known_beforehand(family: str, model_folders) -> None:
    folder = model_folders(family)

    def load(dtype: str) -> PreTrainedModel:
        return load_model(ModelConfig(path=str(folder), dtype=dtype), CPU)

    assert experts.why_not_captured(load("bfloat16")) is None
    for dtype in ("float32", "float64"):
        reason = experts.why_not_captured(load(dtype))
        assert reason and dtype in reason and "model.layers.0.mlp.experts" in reason
    loop = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, experts_implementation="eager")
    assert "experts_implementation = eager" in str(experts.why_not_captured(loop))
    assert experts.why_not_captured(load_model(ModelConfig(path=str(model_folders("llama"))), CPU)) is None


def test_rows_of_a_width_that_torch_does_not_group(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(**models.SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation=experts.register())
    assert "multiple of 16 bytes" in str(experts.why_not_captured(model))


def engine_of(model: PreTrainedModel, folder: Path, limits: EngineLimits) -> NativeEngine:
    return NativeEngine(
        EngineContext(model, models.tokenizer(), end_tokens(ModelConfig(path=str(folder)), models.tokenizer()), verify(model), limits)
    )


def limits(*, graphs: bool) -> EngineLimits:
    return EngineLimits(blocks=120, block_tokens=16, max_seqs=8, max_batched_tokens=512, cuda_graphs=graphs)


def prompts(count: int) -> list[Prompt]:
    random = np.random.default_rng(1)
    return [Prompt(uid=uid, ids=random.integers(3, 90, int(random.integers(1, 30))), text="") for uid in range(count)]


def draw(engine: NativeEngine, sampling: Sampling, count: int = 8) -> tuple[Group, ...]:
    return collect(engine.generate, prompts(count), sampling, 5, lambda group: None)


def same(left: tuple[Group, ...], right: tuple[Group, ...]) -> None:
    for a, b in zip(left, right, strict=True):
        for one, other in zip(a.samples, b.samples, strict=True):
            assert one.ids.tolist() == other.ids.tolist()
            np.testing.assert_array_equal(one.logprobs, other.logprobs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a CUDA device, the tests for it capture, and fail to")
@pytest.mark.parametrize(("family", "reason"), [("llama", "cannot be captured"), ("mixtral", "float32")])
def test_decoding_goes_on_eagerly_and_says_why(family: str, reason: str, model_folders) -> None:
    """Without a CUDA device every capture fails: of a dense model when it is tried, of float32 experts before."""
    folder = model_folders(family)
    model, sampling = load_model(ModelConfig(path=str(folder)), CPU), Sampling(samples=2, max_new_tokens=BURST + 4)
    plain = engine_of(model, folder, limits(graphs=False))
    expected = draw(plain, sampling, 3)
    assert plain.decoder.eager_reason is None
    with pytest.warns(UserWarning, match=rf"rollout.cuda_graphs: decoding runs without graphs.*{reason}"):
        engine = engine_of(model, folder, limits(graphs=True))
        found = draw(engine, sampling, 3)
    same(found, expected)
    assert reason in str(engine.decoder.eager_reason) and engine.decoder.captures == 0
    assert engine.stats().passes == plain.stats().passes  # the steps after a failed capture draw tokens too
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        same(draw(engine, sampling, 3), expected)


# ---- on a CUDA device --------------------------------------------------------------------------------------------------------------


def trainer_gap(model: PreTrainedModel, groups: tuple[Group, ...]) -> float:
    gaps = []
    for group in groups:
        for sample in group.samples:
            with torch.no_grad():
                (trainer,), _ = packed_logprobs(model, [np.concatenate([group.prompt.ids, sample.ids])])
            gaps.append(np.abs(sample.logprobs - trainer[len(group.prompt.ids) - 1 :].cpu().numpy()))
    return float(np.concatenate(gaps).mean())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu:
    @pytest.mark.parametrize("adapters", [False, True], ids=["plain", "adapters"])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_captured_decoding_is_eager_decoding(self, family: str, adapters: bool, model_folders) -> None:
        """Eight rows in every pass, for no end token ends one, and in every graph: equal shapes round alike, so that tokens and log-probs
        are equal to the bit."""
        model = load_model(ModelConfig(path=str(model_folders(family)), dtype="bfloat16"), GPU)
        layers, sampling = verify(model), Sampling(max_new_tokens=4 * BURST + 1)
        if adapters:
            add_adapters(model, settings(family), seed=3)
            stir(model)
        assert experts.why_not_captured(model) is None
        engines = [
            NativeEngine(EngineContext(model, models.tokenizer(), frozenset(), layers, limits(graphs=graphs))) for graphs in (True, False)
        ]
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="rollout.cuda_graphs")
            captured, eager = (draw(engine, sampling) for engine in engines)
        decoder = engines[0].decoder
        captures = decoder.captures
        assert captures > 0 and decoder.eager_reason is None and engines[1].decoder.captures == 0
        same(captured, eager)
        same(draw(engines[0], sampling), eager)
        assert decoder.captures == captures
        assert trainer_gap(model, captured) < 0.02  # as in test_gpu.py: bf16, and experts that flip where two are nearly tied

    @pytest.mark.parametrize("family", FAMILIES)
    def test_empty_rows_of_a_graph_disturb_nobody(self, family: str, model_folders) -> None:
        """Five samples in a graph of eight rows."""
        model = load_model(ModelConfig(path=str(model_folders(family)), dtype="bfloat16"), GPU)
        engine = NativeEngine(EngineContext(model, models.tokenizer(), frozenset(), verify(model), limits(graphs=True)))
        groups = draw(engine, Sampling(max_new_tokens=4 * BURST + 1), 5)
        assert engine.decoder.captures > 0
        assert trainer_gap(model, groups) < 0.02

    @pytest.mark.parametrize("adapters", [False, True], ids=["plain", "adapters"])
    @pytest.mark.parametrize("route", routes())
    def test_the_grouped_kernel_is_the_loop(self, route: str, adapters: bool) -> None:
        """bf16 keeps 8 bits; float32 on the CPU is exact beside it. The loop's own roundings on this device are no smaller."""
        make = adapted_experts if adapters else make_experts
        module, exact, chosen = make("qwen3-moe", torch.bfloat16), make("qwen3-moe", torch.float32), routes()[route]
        tokens, shares = (numbers.bfloat16() for numbers in inputs(module, chosen, torch.float32))
        with torch.no_grad():
            for parameter, source in zip(exact.parameters(), module.parameters(), strict=True):
                parameter.copy_(source)
        expected = run(exact, "eager", tokens.float(), chosen, shares.float())
        module, here = module.to(GPU), (tokens.to(GPU), chosen.to(GPU), shares.to(GPU))
        found, loop = (run(module, name, *here) for name in (experts.NAME, "eager"))
        for ours, theirs, right in zip(found, loop, expected, strict=True):
            off, of_loop = (float((numbers.float().cpu() - right).norm()) for numbers in (ours, theirs))
            assert off < 0.02 * right.norm()
            assert off < 2 * of_loop + 4e-3 * right.norm()  # 4e-3 is one rounding, and a gradient may have few numbers
        if not adapters:
            assert all(not gradient[2].any() for gradient in found[3:])  # of the expert without tokens

    @pytest.mark.parametrize("adapters", [False, True], ids=["plain", "adapters"])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_training_step_waits_for_nothing(self, family: str, adapters: bool) -> None:
        """Router and experts, forward and backward: any wait of the host raises. Run twice, gradients are equal to the bit."""
        block = make_block(family, torch.bfloat16, adapters).to(GPU)
        random = torch.Generator().manual_seed(5)
        start, weights = (torch.randn(1, 300, 32, generator=random).bfloat16().to(GPU) for _ in range(2))

        def step() -> list[torch.Tensor]:
            block.zero_grad()
            hidden = start.clone().requires_grad_()
            block(hidden).backward(weights)
            return [hidden.grad, *(parameter.grad for parameter in block.parameters() if parameter.requires_grad)]

        first = step()  # compiles kernels
        torch.cuda.synchronize()
        with refuse_waits():
            again = step()
        assert all(torch.equal(one, other) and one.any() for one, other in zip(first, again, strict=True))
        with Watch() as watch:
            step()
        assert watch.calls["_grouped_mm"] == PRODUCTS["adapters" if adapters else "plain"] and watch.calls["sort"] == 1

    @pytest.mark.parametrize("adapters", [False, True], ids=["plain", "adapters"])
    def test_a_row_of_a_long_pack_has_the_bits_of_decoding(self, adapters: bool) -> None:
        """torch multiplies few rows of an expert in other tiles than many, but adds up in one order."""
        config = Qwen3MoeConfig(hidden_size=256, num_experts=8, moe_intermediate_size=512)
        holder = torch.nn.ModuleDict({"experts": Qwen3MoeExperts(config).bfloat16()})
        random = torch.Generator().manual_seed(3)
        for parameter in holder.parameters():
            torch.nn.init.normal_(parameter, std=0.05, generator=random)
        module = (adapt(holder, rank=16) if adapters else holder).to(GPU).experts
        chosen = torch.rand(8192, 8, generator=random).topk(4).indices
        tokens, shares = inputs(module, chosen, torch.float32)
        tokens, shares, chosen = tokens.bfloat16().to(GPU), shares.bfloat16().to(GPU), chosen.to(GPU)
        whole = run(module, experts.NAME, tokens, chosen, shares)[0]
        for count in (1, 8, 100):
            (few,) = run(module, experts.NAME, tokens[:count], chosen[:count], shares[:count], gradient=False)
            assert torch.equal(few, whole[:count]), f"{count} rows: {(few != whole[:count]).float().mean():.2%} of the numbers differ"

    @pytest.mark.parametrize("when", ["always", "in a capture"])
    def test_a_failed_capture_leaves_all_as_it_was(self, when: str, model_folders) -> None:
        """A wait of the host in every pass is found before a capture begins; one that comes only in a capture breaks it."""
        folder = model_folders("qwen3-moe")
        model = load_model(ModelConfig(path=str(folder), dtype="bfloat16"), GPU)
        layers, sampling = verify(model), Sampling(max_new_tokens=4 * BURST + 1)
        plain, broken, after = (
            NativeEngine(EngineContext(model, models.tokenizer(), frozenset(), layers, limits(graphs=graphs)))
            for graphs in (False, True, True)
        )
        expected = draw(plain, sampling)
        plain.release()

        def wait(*_: Any) -> None:
            if when == "always" or torch.cuda.is_current_stream_capturing():
                model.get_input_embeddings().weight[0, 0].item()

        hook = model.base_model.layers[1].register_forward_hook(wait)
        stream = torch.cuda.current_stream()
        with pytest.warns(UserWarning, match="cannot be captured"):
            same(draw(broken, sampling), expected)
        assert broken.decoder.eager_reason and broken.decoder.captures == 0 and torch.cuda.current_stream() == stream
        same(draw(broken, sampling), expected)
        broken.release()
        hook.remove()
        assert torch.rand(3, device=GPU).isfinite().all()  # random numbers of the device are not left in a capture either
        same(draw(after, sampling), expected)
        assert after.decoder.captures > 0 and after.decoder.eager_reason is None
        after.release()
        del broken, after
        strict = NativeEngine(
            EngineContext(model, models.tokenizer(), frozenset(), layers, replace(limits(graphs=True), graphs_required=True))
        )
        hook = model.base_model.layers[1].register_forward_hook(wait)
        with pytest.raises(UserError, match="no graph can hold the model"):
            draw(strict, sampling)
        hook.remove()
        strict.release()
        del strict
        torch.cuda.empty_cache()
        held = torch.cuda.memory_reserved()
        for _ in range(3):  # what a failed capture holds must not add up
            hook = model.base_model.layers[1].register_forward_hook(wait)
            again = NativeEngine(EngineContext(model, models.tokenizer(), frozenset(), layers, limits(graphs=True)))
            with pytest.warns(UserWarning, match="cannot be captured"):
                draw(again, sampling)
            hook.remove()
            again.release()
            del again
            torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= held + (2 << 20)
