"""Tensor parallelism: which sizes are legal, the table of slices, and that members compute what one process does.

The four processes of the pool of workers serve all (tests/devices.py): groups of two run twice in it, in both halves.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import devices
import models
import numpy as np
import peft  # noqa: F401 (before processes of the pool are forked, so that none of them has to import it)
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModel, AutoModelForCausalLM, Qwen2MoeConfig
from variants import sample_cases

from fulltilt.footprint import Entropy, HeadOptions
from fulltilt.kernels import dispatch
from fulltilt.kernels import token_logprobs as token_logprobs_kernels
from fulltilt.kernels.token_logprobs import VocabularyPart
from fulltilt.memory.recompute import apply_recompute
from fulltilt.model import attention, experts, lora
from fulltilt.model.fuse import fuse_and_compare
from fulltilt.model.heads import Head, LogitShape, token_logprobs
from fulltilt.model.scalar import ScalarModel
from fulltilt.parallel.cuts import Cut, CutSection, even, legal_sizes, require_legal, vocabulary_rows, why_not
from fulltilt.parallel.ranks import Ranks
from fulltilt.parallel.slices import SliceTable, slice_table
from fulltilt.parallel.tensor import TensorSplit, split
from fulltilt.records import MicroBatch, UserError
from fulltilt.schema import LoraConfig
from fulltilt.shape import SHAPES, Recompute, Shape
from fulltilt.training.roles import Critic, Policy

KERNELS = "cuda" if torch.cuda.is_available() and not dispatch.INTERPRETED else "cpu"
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}


FAMILIES = {
    **models.FAMILIES,
    "qwen2-moe": lambda: Qwen2MoeConfig(
        **models.SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=16
    ),
}


@dataclass(frozen=True)
class Case:
    family: str
    size: int
    changes: dict[str, Any] = field(default_factory=dict)  # keys of the model's configuration that are changed
    dtype: str = "float64"
    role: str = "actor"
    adapters: tuple[str, ...] = ()  # targets of adapters; names of stacked experts among them
    recompute: str = "none"
    fused: bool = False
    options: HeadOptions = HeadOptions()  # noqa: RUF009 (frozen)
    entropy: Entropy = "gradient"
    bias: bool = False  # of the output embedding
    together: bool = False  # one backward pass for all micro-batches
    whole_experts: bool = False  # each member has some of the experts

    def __str__(self) -> str:
        plain = type(self)(self.family, self.size)
        odd = [f"{name}={getattr(self, name)}" for name in self.__dataclass_fields__ if getattr(self, name) != getattr(plain, name)]
        return " ".join([self.family, str(self.size), *odd])


def table_of(model: torch.nn.Module, case: Case) -> SliceTable:
    return slice_table(model, case.size, whole_experts=case.whole_experts)


# ---- a model, whole or divided -----------------------------------------------------------------------------------------------------------


def build(case: Case) -> Any:
    """The whole model, with the same numbers in every process."""
    config = FAMILIES[case.family]()
    for name, value in case.changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    kind: Any = AutoModel if case.role == "critic" else AutoModelForCausalLM
    dtype = getattr(torch, case.dtype)
    model = kind.from_config(
        config, attn_implementation=attention.register(), experts_implementation=experts.register(), dtype=dtype
    ).eval()
    if case.bias:
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(config.vocab_size, dtype=dtype))
    if case.adapters:
        stacked = [name for name in case.adapters if name.startswith("experts.")]
        targets = [name for name in case.adapters if name not in stacked]
        lora.add_adapters(model, LoraConfig(rank=2, targets=targets, parameters=stacked), 0)
    if case.role == "critic":
        model = ScalarModel(model, torch.nn.Linear(config.hidden_size, 1, dtype=dtype))
    for name, parameter in model.named_parameters():  # what begins at zero or one would hide half of the gradient
        if parameter.ndim == 1 or "lora_B" in name:
            parameter.data += 0.2 * torch.randn(parameter.shape, dtype=dtype)
    if case.dtype == "float64" and not case.fused:
        compute_in_double(model)
    return model


def compute_in_double(model: torch.nn.Module) -> None:
    """transformers' norms and routers round to float32, and so do the gradients of parts before these are summed: by more than 1e-9."""

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True) if type(self).__name__.endswith("LayerNorm") else x
        variance = x.square().mean(-1, keepdim=True)
        normed = x * torch.rsqrt(variance + (self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps))
        return normed * (1.0 + self.weight if "Gemma" in type(self).__name__ else self.weight)

    def choose(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = hidden_states @ self.weight.t()
        chances, chosen = logits.softmax(-1).topk(self.top_k)
        return logits, chances / chances.sum(-1, keepdim=True) if getattr(self, "norm_topk_prob", True) else chances, chosen

    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith(("Norm", "TopKRouter")):
            module.forward = MethodType(norm if kind.endswith("Norm") else choose, module)


def finish(model: Any, case: Case) -> None:
    """What comes after a model is divided."""
    if case.fused:
        report = fuse_and_compare(model.body if case.role == "critic" else model)
        assert report.left_alone is None and report.joined == (0 if case.adapters else 2 * report.layers)
    if case.recompute != "none":
        apply_recompute(model, Recompute(case.recompute))  # type: ignore[arg-type]


def micro_batch(lengths: Sequence[int], seed: int) -> MicroBatch:
    random, bounds = np.random.default_rng(seed), np.cumsum([0, *lengths])
    trained = np.concatenate([np.arange(start + length // 3 + 1, start + length) for start, length in zip(bounds, lengths, strict=False)])
    return MicroBatch(
        ids=random.integers(0, 90, bounds[-1]),
        positions=np.concatenate([np.arange(length) for length in lengths]),
        cu_seqlens=bounds.astype(np.int32),
        rows=(),
        trained=trained,
        trained_row=np.zeros(len(trained), np.int64),
        weights=random.normal(size=len(trained)),
        fresh=np.ones(len(trained), bool),
    )


MICRO_BATCHES = [micro_batch(lengths, seed) for seed, lengths in enumerate([(7, 20), (14, 3, 9), (5,), (2,)])]


@dataclass(eq=False)
class Found:
    """What a process computes: numbers of each micro-batch, and its gradients, in all micro-batches together."""

    numbers: list[list[np.ndarray]]
    gradients: dict[str, np.ndarray]


def learn(model: Any, case: Case, micro_batches: Sequence[MicroBatch] = MICRO_BATCHES) -> Found:
    numbers, losses = [], []
    for micro in micro_batches:
        if case.role == "critic":
            results = [Critic("critic", model).run(micro)]
        else:
            results = [each for each in Policy("actor", model, 0.8, options=case.options).run(micro, case.entropy) if each is not None]
        weights = torch.from_numpy(micro.weights).to(results[0].dtype)
        learning = [result for result in results if result.requires_grad]
        assert len(learning) == (2 if case.role == "actor" and case.entropy == "gradient" else 1)
        losses.append(torch.stack([((place + 1) * weights * result).sum() for place, result in enumerate(learning)]).sum())
        if not case.together:
            losses.pop().backward()
        numbers.append([result.detach().numpy() for result in results])
    if losses:
        torch.stack(losses).sum().backward()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return Found(numbers, {name: p.grad.numpy() for name, p in named.items()})


class TensorWorker:
    """A member of a tensor-parallel group, in a process of the pool."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        pairs = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
        alone = [dist.new_group([each]) for each in range(size)]
        self.groups = {size: dist.group.WORLD, 2: pairs[rank // 2], 1: alone[rank]}

    def split(self, case: Case) -> TensorSplit:
        ranks = Ranks(self.rank % case.size, case.size, self.groups[case.size])
        found = split(build(case), ranks, whole_experts=case.whole_experts)
        finish(found.model, case)
        return found

    def learn(self, case: Case) -> Found:
        return learn(self.split(case).model, case)

    def sum_shared(self, case: Case) -> dict[str, np.ndarray]:
        """The gradients after those of shared numbers were summed."""
        made = self.split(case)
        found = {name: torch.from_numpy(gradient) for name, gradient in learn(made.model, case).gradients.items()}
        gradients = {name: gradient.reshape(-1) for name, gradient in found.items()}
        # In two parts, as where workers share out the numbers of a part.
        halves = [slice(0, 7), slice(7, None)]
        for half in halves:
            made.sum_shared({name: own[half] for name, own in gradients.items()}, dict.fromkeys(gradients, half))
        square = sum(
            float(made.norm({name: own[half] for name, own in gradients.items()}, dict.fromkeys(gradients, half))) ** 2 for half in halves
        )
        return {**{name: own.view(found[name].shape).numpy() for name, own in gradients.items()}, "square": np.array(square)}

    def parts(self, case: Case) -> dict[str, Any]:
        """This member's parameters, and what passes show of it."""
        made = self.split(case)
        model: Any = made.model
        seen: list[int] = []
        layer = (model.body if case.role == "critic" else model.base_model).layers[0]
        layer.input_layernorm.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
        learn(model, case)
        same = {name: p for name, p in model.named_parameters(remove_duplicate=False)}
        plain = all(type(parameter) is torch.nn.Parameter and parameter.is_contiguous() for parameter in model.parameters())
        return {
            "parts": {name: p.detach().numpy() for name, p in same.items()},
            "plain": plain,
            "tokens": seen,
            "tied": len(same) > len(list(model.parameters())),
            "moved": dict(made.ranks.moved),
        }


def make(member: devices.Member) -> TensorWorker:
    return TensorWorker(member.rank, dist.get_world_size())


@pytest.fixture
def pool(pool_of_devices: devices.Pool) -> devices.Guests:
    return devices.Guests(pool_of_devices, "test_tensor_parallel:make")


def call(pool: devices.Guests, method: str, case: Case) -> list[Any]:
    """What all members answer; groups of fewer than all say the same."""
    return pool.start(method, [(case,)] * pool.size, what=method).results()[: case.size]


# ---- which sizes are legal ------------------------------------------------------------------------------------------------------------


def test_sizes_are_legal_by_heads_widths_and_vocabulary() -> None:
    legal = {name: legal_sizes(Shape.named(name)) for name in SHAPES}
    assert legal["0.5B"] == [1, 2] and legal["1.5B"] == [1, 2, 4] and legal["7B"] == [1, 2, 4] and legal["32B"] == [1, 2, 4, 8]
    assert legal["70B"] == [1, 2, 4, 8, 16, 32, 64] and legal["135M"] == [1, 3] and legal["Qwen3-30B-A3B"] == [1, 2, 4, 8, 16, 32]
    assert legal["Mixtral-8x7B"] == [1, 2, 4, 8, 16, 32] and legal["Gemma-2-2B"] == [1, 2, 4, 8]


WRONG = {
    (3, "the model has 4 query heads"): {},
    (6, "the model has 4 key-value heads, which can be divided among the members or duplicated, but not both"): {
        "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 8,
    },
    (4, "its gated layers are 50 numbers wide"): {"intermediate_size": 50},
    (4, "its experts are 6 numbers wide"): {"num_experts": 4, "moe_intermediate_size": 6},
    (4, "its shared experts are 10 numbers wide"): {
        "num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 10,
    },
    (4, "the model has a vocabulary of 24 only"): {"vocab_size": 24},
}  # fmt: skip


@pytest.mark.parametrize(("wrong", "changes"), WRONG.items(), ids=lambda value: str(value[0]) if isinstance(value, tuple) else None)
def test_another_size_is_refused_with_the_legal_ones(wrong: tuple[int, str], changes: dict[str, Any]) -> None:
    shape = Shape.from_config({**models.SMALL, "model_type": "qwen3", **changes})
    size, reason = wrong
    assert why_not(shape, size) == reason
    legal = ", ".join(map(str, legal_sizes(shape)))
    with pytest.raises(UserError, match=f"^train.tensor_parallel = {size}: {reason}. Legal sizes for this model: {legal}$"):
        require_legal(shape, size, "train.tensor_parallel")


# ---- the table of slices -----------------------------------------------------------------------------------------------------------------

TABLES = [
    Case("qwen2", 4, {"tie_word_embeddings": True, "vocab_size": 157}), Case("qwen3", 4, {"num_key_value_heads": 1}), Case("phi3", 4),
    Case("gemma2", 2), Case("qwen3-moe", 4, adapters=("q_proj", "o_proj", "experts.gate_up_proj", "experts.down_proj")),
    Case("mixtral", 2, role="critic"), Case("qwen3-moe", 4, adapters=("q_proj", "experts.down_proj"), whole_experts=True),
    Case("llama", 2, {"attention_bias": True, "mlp_bias": True}, adapters=("k_proj", "down_proj")),
]  # fmt: skip


@pytest.mark.parametrize("case", TABLES, ids=str)
def test_slices_of_a_tensor_are_assembled_to_it(case: Case) -> None:
    model = build(case)
    table = table_of(model, case)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert table.cuts.keys() == parameters.keys() == model.state_dict().keys()
    for name, whole in parameters.items():
        whole, cut = whole.detach(), table.cuts[name]
        parts = [table.local_slice(name, whole, rank) for rank in range(case.size)]
        assert cut.length == whole.shape[cut.dim] and torch.equal(table.assemble(name, parts), whole), name
        copies = table.join_gradients(name, [torch.ones_like(part) for part in parts])  # how many members hold each number
        assert int(copies.min()) >= 1 and (copies.max() > 1) == cut.shared, name
        assert sum(part.numel() for part in parts) == int(copies.sum()), name


@pytest.mark.parametrize("seed", range(20))
def test_any_cut_is_its_own_inverse(seed: int) -> None:
    random = np.random.default_rng(seed)
    size, dim = int(random.choice([1, 2, 3, 4, 8])), int(random.integers(0, 3))
    sections = []
    for _ in range(random.integers(1, 4)):
        unit, units = int(random.integers(1, 5)), int(random.choice([size, 2 * size, *(n for n in range(1, size) if size % n == 0)]))
        sections.append(even(unit * units, size, unit))
    if random.integers(2):
        rows = int(random.integers(8 * size * size, 8 * size * size + 50))
        sections = [CutSection(rows, vocabulary_rows(rows, size))]
    cut = Cut(dim, tuple(sections))
    shape = [2, 3, 4]
    shape[dim] = cut.length
    whole = torch.from_numpy(random.normal(size=shape))
    table = SliceTable(size, {"x": cut})
    parts = [table.local_slice("x", whole, rank) for rank in range(size)]
    assert torch.equal(table.assemble("x", parts), whole)
    for rank, part in enumerate(parts):
        assert torch.equal(table.local_slice("x", table.assemble("x", parts), rank), part) and part.shape[dim] > 0


def test_what_is_cut_how() -> None:
    phi = slice_table(build(Case("phi3", 4)), 4).cuts  # 4 heads and 2 key-value heads of 8, 48 wide
    assert phi["model.layers.0.self_attn.qkv_proj.weight"] == Cut(0, (CutSection(32, 8), CutSection(16, 8, 2), CutSection(16, 8, 2)))
    assert phi["model.layers.0.mlp.gate_up_proj.weight"] == Cut(0, (CutSection(48, 12), CutSection(48, 12)))
    assert phi["model.layers.0.self_attn.o_proj.weight"] == Cut(1, (CutSection(32, 8),))
    assert phi["model.norm.weight"] == Cut.whole(32, 4) and phi["lm_head.weight"] == Cut.rows(160, 4)
    adapted = slice_table(build(Case("qwen3-moe", 2, adapters=("q_proj", "o_proj", "experts.gate_up_proj", "experts.down_proj"))), 2).cuts
    layer = "model.layers.0.self_attn"
    assert adapted[f"{layer}.q_proj.lora_A.default.weight"].shared and adapted[f"{layer}.q_proj.lora_B.default.weight"] == Cut.rows(64, 2)
    assert (
        adapted[f"{layer}.o_proj.lora_A.default.weight"] == Cut.rows(64, 2, 1) and adapted[f"{layer}.o_proj.lora_B.default.weight"].shared
    )
    assert adapted[f"{layer}.q_norm.weight"].shared and adapted["model.layers.0.mlp.gate.weight"].shared
    stacked = Case("qwen3-moe", 2, adapters=("experts.gate_up_proj", "experts.down_proj"), whole_experts=True)
    whole = table_of(build(stacked), stacked).cuts
    of_experts = {name: cut for name, cut in whole.items() if ".experts." in name}
    assert {cut for name, cut in of_experts.items() if ".lora_" not in name} == {Cut.rows(4, 2)}  # of four experts
    assert {cut for name, cut in of_experts.items() if ".lora_A." in name} == {Cut.rows(8, 2)}  # of rank 2
    assert {cut for name, cut in of_experts.items() if ".lora_B." in name} == {Cut(1, (CutSection(4, 2), CutSection(4, 2)))}
    assert whole["model.layers.0.mlp.gate.weight"].shared


def test_a_module_that_cannot_be_divided_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"^train.tensor_parallel = 2: its norms of queries and keys are over all heads .* model: 1$"):
        slice_table(build(Case("olmo2", 2)), 2)
    model = build(Case("llama", 2))
    model.model.layers[1].mlp.extra = torch.nn.Linear(32, 32)
    with pytest.raises(UserError, match=r"^model.layers.1.mlp.extra.weight \(Linear\) cannot be divided"):
        slice_table(model, 2)
    with pytest.raises(UserError, match=r"^train.tensor_parallel = 3: the model has 4 query heads. Legal sizes for this model: 1, 2, 4$"):
        slice_table(build(Case("llama", 3)), 3)
    with pytest.raises(UserError, match=r"^train.expert_parallel = 2: the model has 3 experts in a layer. Legal sizes .*: 1, 3$"):
        slice_table(build(Case("qwen3-moe", 2, {"num_experts": 3})), 2, whole_experts=True)


# ---- the head over parts of a vocabulary -------------------------------------------------------------------------------------------------

ROWS, VOCABULARY, WIDTH, BOUNDS = 23, 50, 6, (0, 16, 32, 48, 50)
HEADS = [HeadOptions(*given) for given in itertools.product((True, False), (None, 5), (True, False))] + [HeadOptions(recompute=False)]
LOGITS = [LogitShape(), LogitShape(scale=0.4), LogitShape(scale=2.0, cap=1.5)]


class Threads:
    """Members of a group in threads of this process, with sums, maxima and tensors of all of them."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.given = size, threading.Barrier(size, timeout=60), [torch.empty(0)] * size

    def part(self, rank: int, start: int) -> VocabularyPart:
        def stack(tensor: torch.Tensor) -> torch.Tensor:
            self.given[rank] = tensor.detach().clone()
            self.barrier.wait()
            found = torch.stack(self.given)
            self.barrier.wait()
            return found

        def over_all(reduce: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> None:
            tensor.copy_(reduce(stack(tensor)))

        most, total = partial(over_all, lambda all_: all_.amax(0)), partial(over_all, lambda all_: all_.sum(0))
        each, apart = BOUNDS[1], partial(contextlib.nullcontext, lambda: None)
        return VocabularyPart(start, VOCABULARY, each, sum=total, most=most, gather=stack, counted_apart=apart)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(self.size) as pool:
            contexts = [contextvars.copy_context() for _ in range(self.size)]
            return [each.result() for each in [pool.submit(contexts[rank].run, work, rank) for rank in range(self.size)]]


def head_of_parts(
    shape: LogitShape, options: HeadOptions, entropy: Entropy, dtype: torch.dtype, tolerance: float, device: str = "cpu"
) -> None:
    """Members with 16, 16, 16 and 2 tokens of a vocabulary against one process."""
    random = torch.Generator().manual_seed(0)
    sizes = ((ROWS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    tensors = [torch.randn(*size, generator=random, dtype=dtype).to(device).requires_grad_() for size in sizes]
    targets, weights = torch.randint(0, VOCABULARY, (ROWS,), generator=random).to(device), torch.randn(2, ROWS, generator=random).to(device)

    def learn(head: Head, hidden: torch.Tensor) -> list[torch.Tensor | None]:
        found = token_logprobs(hidden, head, targets, 0.7, options, entropy)
        assert (found[1] is None) == (entropy == "none") and (found[1] is None or found[1].requires_grad == (entropy == "gradient"))
        loss = (weights[0] * found[0]).sum() + ((weights[1] * found[1]).sum() if entropy == "gradient" else 0.0)
        return [*found, *torch.autograd.grad(loss, (hidden, head.weight, head.bias))]  # type: ignore[arg-type]

    expected, members = learn(Head(tensors[1], tensors[2], shape), tensors[0]), Threads(len(BOUNDS) - 1)

    def member(rank: int) -> list[torch.Tensor | None]:
        own = slice(BOUNDS[rank], BOUNDS[rank + 1])
        hidden, weight, bias = (tensor.detach().clone().requires_grad_() for tensor in (tensors[0], tensors[1][own], tensors[2][own]))
        return learn(Head(weight, bias, shape, members.part(rank, own.start)), hidden)

    values, entropies, of_hidden, of_weight, of_bias = zip(*members.run(member), strict=True)
    joined = [values[0], entropies[0], sum(of_hidden), torch.cat(of_weight), torch.cat(of_bias)]
    for each, same in zip(joined, expected, strict=True):
        assert (each is None) == (same is None)
        if each is not None and same is not None:
            assert each.shape == same.shape and each.dtype == same.dtype
            assert float((each - same).detach().norm()) <= tolerance * float(same.detach().norm())
    for own in (*values[1:], *(each for each in entropies[1:] if each is not None)):
        assert torch.equal(own, values[0]) or torch.equal(own, entropies[0])


@pytest.mark.parametrize("entropy", ["gradient", "value", "none"])
@pytest.mark.parametrize("shape", LOGITS, ids=str)
def test_a_vocabulary_in_parts_gives_the_same_logprobs(shape: LogitShape, entropy: Entropy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fulltilt.footprint.CHUNK_NUMBERS", 4 * 16)  # several chunks, of different numbers of rows
    for options in HEADS:
        head_of_parts(shape, options, entropy, torch.float64, 1e-12)


@pytest.mark.long
@pytest.mark.kernels
@pytest.mark.parametrize(("shape", "entropy"), [(LOGITS[1], "none"), (LOGITS[2], "gradient")], ids=str)
def test_kernels_read_a_vocabulary_in_parts(shape: LogitShape, entropy: Entropy, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = threading.Lock()  # Triton's interpreter runs one kernel at a time

    def alone(run: Callable[..., None], *args: Any) -> None:
        with lock:
            run(*args)

    for name in ("read", "turn"):
        monkeypatch.setattr(token_logprobs_kernels, name, partial(alone, getattr(token_logprobs_kernels, name)))
    head_of_parts(shape, HeadOptions(), entropy, torch.float32, 1e-5, KERNELS)


def test_a_target_outside_the_vocabulary_has_no_logprob() -> None:
    head, members = torch.randn(VOCABULARY, WIDTH), Threads(2)

    def member(rank: int) -> torch.Tensor:
        own = Head(head[rank * 25 : rank * 25 + 25], None, part=members.part(rank, rank * 25))
        return token_logprobs(torch.ones(3, WIDTH), own, torch.tensor([VOCABULARY, -100, 3]), 1.0, entropy="none")[0]

    for found in members.run(member):
        assert found.isnan().tolist() == [True, True, False]


# ---- the same numbers --------------------------------------------------------------------------------------------------------------------

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STACKED = ("q_proj", "o_proj", "experts.gate_up_proj", "experts.down_proj")
BIASED = {"attention_bias": True, "mlp_bias": True}
UNEVEN = {"vocab_size": 157}

SHORT = [
    Case("qwen2", 2, {"tie_word_embeddings": True, **UNEVEN}, fused=True),
    Case("qwen3-moe", 2, recompute="selective"),
    Case("llama", 2, BIASED, adapters=ALL, fused=True),
    Case("qwen2", 2, role="critic", fused=True),
    Case("qwen3-moe", 2, dtype="float32", adapters=STACKED, whole_experts=True),
]
PLAIN = HeadOptions(fused=False)
MATRIX = [
    Case("qwen3", 4, recompute="full", options=HeadOptions(fused=False), together=True),
    Case("gemma2", 2, UNEVEN, dtype="float32"),
    *[Case(family, size) for family in ("qwen2", "qwen3", "llama", "gemma2", "phi3", "qwen3-moe", "mixtral") for size in (2, 4)],
    *[Case(family, 4, dtype="float32") for family in ("qwen2", "qwen3", "llama", "phi3", "qwen3-moe", "mixtral")],
    *[Case(family, 4, {"num_key_value_heads": heads}) for family in ("qwen3", "phi3") for heads in (1, 4)],
    *[Case(family, 2) for family in ("mistral", "smollm3", "gemma3", "granite", "cohere", "qwen2-moe")],
    Case("llama", 2, {"num_key_value_heads": 1, **BIASED}, fused=True),
    Case("llama", 4, {"num_key_value_heads": 1, **BIASED}),
    Case("llama-tied", 4, UNEVEN),
    Case("qwen2", 4, {"pad_token_id": 50}),
    Case("qwen2", 4, UNEVEN, options=PLAIN, bias=True),
    Case("qwen2", 2, UNEVEN, bias=True),
    Case("gemma2", 4, options=PLAIN),
    Case("cohere", 4, {"num_key_value_heads": 4}, options=PLAIN, entropy="value"),  # it rotates keys in float32
    Case("qwen2", 2, options=PLAIN, entropy="none"),
    *[Case("qwen2", 2, entropy=entropy) for entropy in ("value", "none")],
    *[Case("gemma2", 2, UNEVEN, options=options) for options in (HeadOptions(entropy_chunk=5), HeadOptions(recompute=False))],
    *[Case("qwen3", 4, role="critic", recompute=recompute) for recompute in ("none", "full")],
    Case("qwen3-moe", 2, role="critic"),
    Case("llama", 4, BIASED, adapters=ALL),
    Case("qwen3", 4, {"num_key_value_heads": 1}, adapters=ALL, fused=True, recompute="full", dtype="float32"),
    Case("phi3", 2, adapters=("qkv_proj", "gate_up_proj", "o_proj", "down_proj")),
    Case("qwen3-moe", 4, adapters=STACKED),
    Case("mixtral", 2, adapters=STACKED),
    *[Case("qwen2", 4, recompute=recompute, fused=True) for recompute in ("full", "selective")],
    *[Case("qwen3", 2, recompute=recompute, fused=True, dtype="float32") for recompute in ("full", "selective")],
    Case("gemma2", 2, recompute="selective"),
    Case("mixtral", 4, recompute="full"),
    *[Case(family, size, whole_experts=True) for family in ("qwen3-moe", "mixtral", "qwen2-moe") for size in (2, 4)],
    *[Case(family, 4, dtype="float32", whole_experts=True, recompute="selective") for family in ("qwen3-moe", "mixtral")],
    *[Case(family, 4, adapters=STACKED, whole_experts=True, recompute="full") for family in ("qwen3-moe", "mixtral")],
    Case("qwen3-moe", 4, {"moe_intermediate_size": 6}, whole_experts=True),  # its width need not be divisible
    Case("qwen3-moe", 2, role="critic", whole_experts=True),
    Case("mixtral", 1, whole_experts=True),
]


@pytest.mark.parametrize("case", sample_cases([*SHORT, *MATRIX], *SHORT[1:3], long=SHORT), ids=str)
def test_members_compute_what_one_process_does(pool: devices.Guests, case: Case) -> None:
    model = build(case)
    table = table_of(model, case)
    expected, found = learn(model, case), call(pool, "learn", case)
    tolerance = TOLERANCE[case.dtype]
    for own in found:
        for numbers, same in zip(own.numbers, expected.numbers, strict=True):
            assert len(numbers) == len(same)
            for one, other in zip(numbers, same, strict=True):
                assert np.allclose(one, other, rtol=tolerance, atol=tolerance)
    for own in found[1:]:
        assert all(
            np.array_equal(a, b) for one, other in zip(own.numbers, found[0].numbers, strict=True) for a, b in zip(one, other, strict=True)
        )
    assert_near(table, [own.gradients for own in found], expected.gradients, tolerance)


def assert_near(table: SliceTable, found: Sequence[dict[str, np.ndarray]], expected: dict[str, np.ndarray], tolerance: float) -> None:
    """Gradients that members have found, joined, against whole ones."""
    size = max(float(np.abs(numbers).max()) for numbers in expected.values())
    assert expected and all(own.keys() == expected.keys() for own in found)
    for name, numbers in expected.items():
        whole = table.join_gradients(name, [torch.from_numpy(own[name]) for own in found]).numpy()
        assert whole.shape == numbers.shape, name
        assert float(np.abs(whole - numbers).max()) <= tolerance * size, name


@pytest.mark.parametrize(
    "case", [Case("phi3", 4), pytest.param(Case("llama", 4, {"num_key_value_heads": 1, **BIASED}), marks=pytest.mark.matrix)], ids=str
)
def test_shared_gradients_are_summed_once(pool: devices.Guests, case: Case) -> None:
    model = build(case)
    table, expected, found = table_of(model, case), learn(model, case).gradients, call(pool, "sum_shared", case)
    square = sum(float(np.square(numbers).sum()) for numbers in expected.values())
    assert sum(float(own["square"]) for own in found) == pytest.approx(square, rel=1e-9)
    for name, numbers in expected.items():
        parts = [torch.from_numpy(own[name]) for own in found]
        assert np.abs(table.assemble(name, parts).numpy() - numbers).max() <= 1e-9 * max(np.abs(n).max() for n in expected.values())
        for rank, part in enumerate(parts):  # those that hold the same numbers have the same gradient
            assert torch.equal(table.local_slice(name, table.assemble(name, parts), rank), part), name


@pytest.mark.parametrize(
    "case", [Case("qwen2", 4, {"tie_word_embeddings": True, **UNEVEN}), Case("qwen3-moe", 2, role="critic", whole_experts=True)], ids=str
)
def test_members_hold_their_parts_and_few_tokens(pool: devices.Guests, case: Case) -> None:
    model = build(case)
    table, found = table_of(model, case), call(pool, "parts", case)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for rank, own in enumerate(found):
        assert own["plain"] and own["parts"].keys() == parameters.keys()
        for name, whole in parameters.items():
            assert np.array_equal(own["parts"][name], table.local_slice(name, whole.detach(), rank).numpy()), name
        assert own["tokens"] == [-(-len(micro.ids) // case.size) for micro in MICRO_BATCHES]
        assert own["tied"] == (case.family == "qwen2")
        padded = sum(-(-len(micro.ids) // case.size) * case.size for micro in MICRO_BATCHES)
        moved = {kind: count for kind, count in own["moved"].items() if count}
        # Two blocks in each of two layers, and once more behind the embedding or the last norm; forward and backward.
        whole, rows = 2 * (2 * 2 + 1) * 8 * 32 * padded, sum(len(micro.trained) for micro in MICRO_BATCHES)
        beside = {"all-reduce": 8 * (1 + 3) * rows} if case.role == "actor" else {}
        assert moved == {"all-gather": whole + (8 * padded if case.role == "critic" else 0), "reduce-scatter": whole, **beside}
