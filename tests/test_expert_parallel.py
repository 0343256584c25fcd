"""Expert parallelism: which sizes are legal, how parameters are cut, and that workers with tokens of their own and a part of the experts
compute what one process with all of both does.

The four processes of the pool of workers serve all (tests/devices.py): two workers run twice in it, in both halves.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import devices
import models
import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_experts import adapted_experts, inputs, make_experts
from test_tensor_parallel import MICRO_BATCHES, STACKED, TOLERANCE, Case, Found, build, finish, learn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from fulltilt.model import experts
from fulltilt.model.experts import why_not_captured
from fulltilt.parallel.cuts import Cut, even, legal_expert_sizes, require_legal_experts, why_not_experts
from fulltilt.parallel.experts import ExpertSplit, expert_table, split_experts
from fulltilt.parallel.ranks import Ranks
from fulltilt.records import MicroBatch, UserError
from fulltilt.shape import SHAPES, Shape
from fulltilt.training.roles import FILLER, Policy


@dataclass(frozen=True)
class ExpertCase(Case):
    workers: int = 0  # in groups of `size`; 0: one group
    deal: str = "in turn"  # which worker gets which micro-batches
    copied: bool = False  # run a copy of the divided model

    @property
    def ranks(self) -> int:
        return self.workers or self.size

    def dealt(self, rank: int) -> list[int]:
        """The micro-batches of a worker; the first workers have more, and some none."""
        return [*range(len(MICRO_BATCHES))][rank :: self.ranks] if self.deal == "in turn" else [0, 1, 2, 3] if rank == 0 else []

    def stream(self, rank: int) -> list[MicroBatch]:
        """As many micro-batches as every worker runs."""
        own = [MICRO_BATCHES[index] for index in self.dealt(rank)]
        return [*own, *[FILLER] * (max(len(self.dealt(each)) for each in range(self.ranks)) - len(own))]


@dataclass(frozen=True)
class LayerCase:
    """One layer's experts, six of them, on two workers, with given choices of experts."""

    kind: str
    route: str
    dtype: str = "float64"
    adapters: bool = False
    gradient: bool = True

    def __str__(self) -> str:
        return ", ".join([self.kind, self.route, self.dtype, *(name for name in ("adapters", "gradient") if getattr(self, name))])


def routes(name: str) -> list[torch.Tensor]:
    """Each worker's choices; never expert 2."""
    random = torch.Generator().manual_seed(4)
    known = torch.tensor([0, 1, 3, 4, 5])
    mixed = torch.stack([known[torch.randperm(5, generator=random)[:2]] for _ in range(40)])
    return {
        "unequal": [mixed[:33], mixed[33:]],
        "one expert": [torch.full((13, 1), 4), torch.full((7, 1), 4)],
        "all alike": [torch.tensor([[5, 0]]).repeat(20, 1)] * 2,
        "no token on a worker": [mixed, mixed[:0]],
    }[name]


@dataclass(eq=False)
class Learned(Found):
    norm: float  # that of the gradient


class ExpertWorker:
    """A worker of an expert-parallel group, in a process of the pool."""

    def __init__(self, rank: int, size: int) -> None:
        pairs = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
        self.all = {size: Ranks(rank, size, dist.group.WORLD), 2: Ranks(rank % 2, 2, pairs[rank // 2], before=rank // 2 * 2)}
        self.made: dict[tuple[int, int], tuple[Ranks, Ranks]] = {}

    def groups(self, workers: int, size: int) -> tuple[Ranks, Ranks]:
        if (workers, size) not in self.made:
            own = self.all[workers]
            self.made[workers, size] = own.line(size), own.line(workers // size, size)
        return self.made[workers, size]

    def split(self, case: ExpertCase) -> ExpertSplit:
        members = self.groups(case.ranks, case.size)[0]
        members.moved.clear()
        made = split_experts(build(case), members)
        finish(made.model, case)
        return replace(made, model=copy.deepcopy(made.model)) if case.copied else made

    def learn(self, case: ExpertCase) -> Learned:
        """With gradients summed over the workers that each of them is to be summed over."""
        made = self.split(case)
        every, (_, replicas) = self.all[case.ranks], self.groups(case.ranks, case.size)
        found = learn(made.model, case, case.stream(every.rank))
        for name, gradient in found.gradients.items():
            (replicas if name in made.names else every).sum(torch.from_numpy(gradient))
        counted = [torch.from_numpy(own) for name, own in found.gradients.items() if name in made.names or made.ranks.rank == 0]
        norms = torch.stack([torch.zeros((), dtype=torch.float64), *(part.double().norm() for part in counted)])
        return Learned(found.numbers, found.gradients, made.ranks.norm(norms.norm()))

    def infer(self, case: ExpertCase) -> np.ndarray:
        """Log-probs of one of the micro-batches, without gradients."""
        policy = Policy("actor", self.split(case).model, 0.8)  # type: ignore[arg-type]
        with torch.no_grad():
            return policy.run(MICRO_BATCHES[self.all[case.ranks].rank])[0].numpy()

    def parts(self, case: ExpertCase) -> dict[str, Any]:
        """This worker's parameters, and what passes show of it."""
        members, whole = self.groups(case.ranks, case.size)[0], build(case)
        before = dict(whole.named_parameters(remove_duplicate=False))
        members.moved.clear()
        made = split_experts(whole, members)
        finish(made.model, case)
        after = dict(made.model.named_parameters(remove_duplicate=False))
        learn(made.model, case, case.stream(self.all[case.ranks].rank))
        return {
            "parts": {name: own.detach().numpy() for name, own in after.items()},
            "same": {name for name, own in after.items() if own is before[name]},
            "plain": all(type(own) is torch.nn.Parameter and own.is_contiguous() for own in after.values()),
            "names": made.names,
            "moved": dict(+made.ranks.moved),
        }

    def layer(self, case: LayerCase) -> list[torch.Tensor]:
        members, holder = self.groups(2, 2)[0], hold(case)
        split_experts(holder, members)
        tokens, chosen, shares, of_out = layer_inputs(holder, case)
        counts = [len(own) for own in routes(case.route)]
        own = members.rank
        return run_layer(
            holder, tokens.split(counts)[own], chosen.split(counts)[own], shares.split(counts)[own],
            of_out.split(counts)[own] if case.gradient else None,
        )  # fmt: skip


def make(member: devices.Member) -> ExpertWorker:
    return ExpertWorker(member.rank, dist.get_world_size())


@pytest.fixture
def pool(pool_of_devices: devices.Pool) -> devices.Guests:
    return devices.Guests(pool_of_devices, "test_expert_parallel:make")


def call(pool: devices.Guests, method: str, workers: int, *args: Any) -> list[Any]:
    """What the workers answer; two say the same in both halves of the pool."""
    return pool.start(method, [args] * pool.size, what=method).results()[:workers]


# ---- which sizes are legal ------------------------------------------------------------------------------------------------------------


def test_sizes_are_legal_by_the_number_of_experts() -> None:
    legal = {name: legal_expert_sizes(Shape.named(name)) for name in SHAPES}
    assert legal["Qwen3-30B-A3B"] == [1, 2, 4, 8, 16, 32, 64, 128] and legal["Mixtral-8x7B"] == [1, 2, 4, 8] and legal["7B"] == [1]


WRONG = {
    (3, "the model has 4 experts in a layer", "1, 2, 4"): {"num_experts": 4},
    (2, "the model has no experts", "1"): {},
    (8, "the model has 4 experts in a layer", "1, 2, 4"): {"num_experts": 8, "per_layer_config": {"1": {"num_experts": 4}}},
}


@pytest.mark.parametrize(("wrong", "changes"), WRONG.items(), ids=lambda value: str(value[:2]) if isinstance(value, tuple) else None)
def test_another_size_is_refused_with_the_legal_ones(wrong: tuple[int, str, str], changes: dict[str, Any]) -> None:
    shape = Shape.from_config({**models.SMALL, "model_type": "qwen3_moe", **changes})
    size, reason, legal = wrong
    assert why_not_experts(shape, size) == reason and why_not_experts(shape, 1) is None
    with pytest.raises(UserError, match=f"^train.expert_parallel = {size}: {reason}. Legal sizes for this model: {legal}$"):
        require_legal_experts(shape, size, "train.expert_parallel")


def test_layers_without_experts_do_not_count() -> None:
    mixed = Shape.from_config({**models.SMALL, "model_type": "qwen3_moe", "num_experts": 6, "mlp_only_layers": [0]})
    assert legal_expert_sizes(mixed) == [1, 2, 3, 6]


# ---- the table of slices -----------------------------------------------------------------------------------------------------------------

TABLES = [ExpertCase("qwen3-moe", 4, adapters=STACKED), ExpertCase("mixtral", 2, role="critic"), ExpertCase("qwen2-moe", 2)]


@pytest.mark.parametrize("case", TABLES, ids=str)
def test_slices_of_a_tensor_are_assembled_to_it(case: ExpertCase) -> None:
    model = build(case)
    table = expert_table(model, case.size)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert table.cuts.keys() == parameters.keys() == model.state_dict().keys()
    for name, whole in parameters.items():
        whole, cut = whole.detach(), table.cuts[name]
        parts = [table.local_slice(name, whole, rank) for rank in range(case.size)]
        assert torch.equal(table.assemble(name, parts), whole), name
        of_experts = ".experts." in name and len(cut.sections) * cut.sections[0].length == whole.shape[cut.dim]
        assert cut.shared != of_experts and sum(part.numel() for part in parts) == whole.numel() * (1 if of_experts else case.size), name


def test_what_is_cut_how() -> None:
    cuts = expert_table(build(ExpertCase("qwen3-moe", 2, adapters=STACKED)), 2).cuts  # 4 experts, adapters of rank 2
    layer = "model.layers.0.mlp.experts"
    assert cuts[f"{layer}.base_layer.base_layer.gate_up_proj"] == cuts[f"{layer}.base_layer.base_layer.down_proj"] == Cut.rows(4, 2)
    for adapter in (layer, f"{layer}.base_layer"):
        assert cuts[f"{adapter}.lora_A.default.weight"] == Cut.rows(8, 2)
        assert cuts[f"{adapter}.lora_B.default.weight"] == Cut(1, (even(4, 2), even(4, 2)))
    for name in ("model.layers.0.mlp.gate.weight", "model.layers.0.self_attn.q_proj.lora_A.default.weight", "lm_head.weight"):
        assert cuts[name].shared


def test_a_model_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(UserError, match=r"^train.expert_parallel = 2: the model has no experts. Legal sizes for this model: 1$"):
        expert_table(build(ExpertCase("qwen3", 2)), 2)
    with pytest.raises(UserError, match=r"^train.expert_parallel = 3: the model has 4 experts in a layer. Legal sizes .*: 1, 2, 4$"):
        expert_table(build(ExpertCase("mixtral", 3)), 3)
    model = build(ExpertCase("mixtral", 2))
    model.model.layers[1].mlp.experts.extra = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(UserError, match=r"^model.layers.1.mlp.experts.extra \(MixtralExperts\) of the shape \[3\] cannot be divided by"):
        expert_table(model, 2)


# ---- one layer ---------------------------------------------------------------------------------------------------------------------------

LAYER_TOLERANCE = {"float64": 1e-12, "float32": 4e-6, "bfloat16": 2e-2}  # of the largest number: rounding
SHORT_LAYERS = [
    LayerCase("qwen3-moe", "unequal"), LayerCase("gpt-oss", "unequal", "float32", adapters=True),
    LayerCase("mixtral", "one expert", "float32"), LayerCase("nemotron-h", "no token on a worker", "float32"),
    LayerCase("gpt-oss", "unequal", "float32", adapters=True, gradient=False),
]  # fmt: skip
LAYERS = [
    *[LayerCase(kind, route, dtype, adapters) for kind in ("qwen3-moe", "gpt-oss", "nemotron-h", "odd widths")
      for route in ("unequal", "one expert", "all alike", "no token on a worker")
      for dtype in ("float64", "float32") for adapters in (False, True)],
    *[LayerCase("mixtral", route, "bfloat16", adapters) for route in ("unequal", "one expert") for adapters in (False, True)],
    *[LayerCase(kind, "unequal", "float32", gradient=False) for kind in ("qwen3-moe", "gpt-oss")],
]  # fmt: skip


def hold(case: LayerCase) -> Any:
    """A model of nothing but experts, with the same numbers in every process."""
    dtype = getattr(torch, case.dtype)
    holder: Any = torch.nn.ModuleDict({"experts": (adapted_experts if case.adapters else make_experts)(case.kind, dtype)})
    base_of(holder).config._experts_implementation = experts.NAME
    holder.config = Qwen3MoeConfig(**models.SMALL, num_experts=6)
    return holder


def base_of(holder: Any) -> Any:
    return holder.experts.get_base_layer() if hasattr(holder.experts, "get_base_layer") else holder.experts


def layer_inputs(holder: Any, case: LayerCase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of all workers, one after another: tokens, choices, shares, and the gradient of the output."""
    chosen = torch.cat(routes(case.route))
    tokens, shares = inputs(holder.experts, chosen, getattr(torch, case.dtype))
    return tokens, chosen, shares, torch.linspace(-1, 1, tokens.numel()).to(tokens.dtype).view_as(tokens)


def run_layer(
    holder: Any, tokens: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, of_out: torch.Tensor | None
) -> list[torch.Tensor]:
    """Output, and gradients of tokens, shares and trained parameters."""
    tokens, shares = (given.clone().requires_grad_() for given in (tokens, shares))
    with torch.set_grad_enabled(of_out is not None):
        out = holder.experts(tokens, chosen, shares)
    if of_out is None:
        return [out]
    out.backward(of_out)
    return [out.detach(), tokens.grad, shares.grad, *(own.grad for own in holder.parameters() if own.requires_grad)]  # type: ignore[list-item]


@pytest.mark.parametrize(
    "case", [*SHORT_LAYERS, *(pytest.param(case, marks=pytest.mark.matrix) for case in LAYERS if case not in SHORT_LAYERS)], ids=str
)
def test_a_layer_on_two_workers_is_that_of_one_process(pool: devices.Guests, case: LayerCase) -> None:
    holder, found = hold(case), call(pool, "layer", 2, case)
    table = expert_table(holder, 2)
    tokens, chosen, shares, of_out = layer_inputs(holder, case)
    expected = run_layer(holder, tokens, chosen, shares, of_out if case.gradient else None)
    names = [name for name, own in holder.named_parameters() if own.requires_grad] if case.gradient else []
    joined = [torch.cat(parts) for parts in zip(*(own[: 3 if case.gradient else 1] for own in found), strict=True)]
    joined += [table.assemble(name, parts) for name, *parts in zip(names, *(own[3:] for own in found), strict=True)]
    assert len(joined) == len(expected) >= (5 if case.gradient else 1)
    for ours, theirs in zip(joined, expected, strict=True):
        assert ours.dtype == theirs.dtype and ours.isfinite().all() and theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=0, atol=LAYER_TOLERANCE[case.dtype] * float(theirs.abs().max()))


# ---- whole models ------------------------------------------------------------------------------------------------------------------------

ONLY_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
SHORT = [
    ExpertCase("qwen3-moe", 2, workers=4, recompute="full"),
    ExpertCase("mixtral", 4, dtype="float32"),
    ExpertCase("qwen2-moe", 2, deal="first"),
    ExpertCase("qwen3-moe", 2, adapters=STACKED, recompute="selective"),
]
MATRIX = [
    *[ExpertCase(family, size, workers=workers, dtype=dtype) for family in ("qwen3-moe", "mixtral", "qwen2-moe")
      for size, workers in ((2, 2), (4, 4), (2, 4)) for dtype in ("float64", "float32")],
    *[ExpertCase(family, 4, {count: 8}) for family, count in (("qwen3-moe", "num_experts"), ("mixtral", "num_local_experts"))],
    *[ExpertCase(family, size, deal="first") for family in ("qwen3-moe", "mixtral") for size in (2, 4)],
    *[ExpertCase(family, size, recompute=recompute, workers=4, deal=deal) for family in ("qwen3-moe", "mixtral") for size in (2, 4)
      for recompute in ("full", "selective") for deal in ("in turn", "first")],
    *[ExpertCase(family, size, adapters=adapters, recompute=recompute) for family in ("qwen3-moe", "mixtral") for size in (2, 4)
      for adapters in (STACKED, ONLY_EXPERTS) for recompute in ("none", "full")],
    ExpertCase("qwen2-moe", 2, workers=4, adapters=("q_proj", *ONLY_EXPERTS)),
    ExpertCase("qwen3-moe", 2, {"mlp_only_layers": [0]}),
    ExpertCase("qwen3-moe", 4, {"tie_word_embeddings": True, "num_experts_per_tok": 1}),
    *[ExpertCase("qwen3-moe", 2, role="critic", workers=workers) for workers in (2, 4)],
    ExpertCase("mixtral", 2, copied=True, adapters=STACKED),
    *[ExpertCase("qwen3-moe", size, together=True) for size in (2, 4)],
]  # fmt: skip


@pytest.mark.parametrize("case", [*SHORT, *(pytest.param(case, marks=pytest.mark.matrix) for case in MATRIX if case not in SHORT)], ids=str)
def test_workers_compute_what_one_process_does(pool: devices.Guests, case: ExpertCase) -> None:
    model = build(case)
    table = expert_table(model, case.size)
    finish(model, case)
    expected, found = learn(model, case), call(pool, "learn", case.ranks, case)
    tolerance, gap = TOLERANCE[case.dtype], 0.0
    for rank, own in enumerate(found):
        for index, numbers in zip(case.dealt(rank), own.numbers, strict=False):
            assert len(numbers) == len(expected.numbers[index])
            for one, other in zip(numbers, expected.numbers[index], strict=True):
                assert np.allclose(one, other, rtol=tolerance, atol=tolerance)
                gap = max(gap, float(np.abs(one - other).max()))
    largest = assert_near([own.gradients for own in found], expected.gradients, table, tolerance)
    norm = np.sqrt(sum(np.square(numbers.astype(np.float64)).sum() for numbers in expected.gradients.values()))
    assert [own.norm for own in found] == pytest.approx([norm] * case.ranks, rel=tolerance)
    print(f"{case}: largest difference of log-probs {gap:.1e}, of gradients {largest:.1e} of the largest number")


def assert_near(found: Sequence[dict[str, np.ndarray]], expected: dict[str, np.ndarray], table: Any, tolerance: float) -> float:
    """Summed gradients of all workers against one process's."""
    size = max(float(np.abs(numbers).max()) for numbers in expected.values())
    largest = 0.0
    assert expected and all(own.keys() == expected.keys() for own in found)
    for name, numbers in expected.items():
        for rank, own in enumerate(found):
            right = table.local_slice(name, torch.from_numpy(numbers), rank % table.size).numpy()
            assert own[name].shape == right.shape, name
            largest = max(largest, float(np.abs(own[name] - right).max()) / size)
            assert largest <= tolerance, name
    return largest


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("adapters", [(), STACKED], ids=["plain", "adapters"])
def test_workers_hold_their_experts_and_count_what_they_send(
    pool: devices.Guests, recompute: str, adapters: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    case = ExpertCase("qwen3-moe", 2, recompute=recompute, adapters=adapters)
    model = build(case)
    table, found = expert_table(model, 2), call(pool, "parts", 2, case)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    cut = {name for name in parameters if ".mlp.experts." in name}
    for rank, own in enumerate(found):
        assert own["plain"] and own["parts"].keys() == parameters.keys() and own["names"] == cut
        assert own["same"] == parameters.keys() - cut, "everything else is the whole model's own"
        for name, whole in parameters.items():
            assert np.array_equal(own["parts"][name], table.local_slice(name, whole.detach(), rank).numpy()), name
            assert own["parts"][name].nbytes * (2 if name in cut else 1) == whole.nbytes
    # In each of two layers, of 4 experts: counts as int32, rows and results of each token's two choices, and their gradients. A recomputed
    # layer sends rows again, and its results, which are saved only where the router's weights are multiplied, too.
    tokens = sum(len(micro.ids) for rank in range(2) for micro in case.stream(rank))
    passes, again = len(case.stream(0)), 2 if recompute == "full" else 1
    rows = 2 * tokens * 32 * 8
    assert sum(own["moved"]["all-to-all"] for own in found) == 2 * (again * 2 * passes * 4 * 4 + (2 * again + 2) * rows)
    assert all(own["moved"].keys() == {"all-to-all"} for own in found)


# ---- without gradients -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        ExpertCase("mixtral", 2, workers=4, dtype="float32"),
        *[
            pytest.param(ExpertCase(family, size, workers=4, dtype=dtype, adapters=adapters), marks=pytest.mark.matrix)
            for family in ("qwen3-moe", "mixtral", "qwen2-moe") for size in (2, 4) for dtype in ("float32", "float64")
            for adapters in ((), ONLY_EXPERTS)
        ],
    ],
    ids=str,
)  # fmt: skip
def test_logprobs_without_gradients(pool: devices.Guests, case: ExpertCase) -> None:
    policy = Policy("actor", build(case), 0.8)
    with torch.no_grad():
        expected = [policy.run(micro)[0].numpy() for micro in MICRO_BATCHES]
    for rank, found in enumerate(call(pool, "infer", case.ranks, case)):
        assert np.allclose(found, expected[rank], rtol=0, atol=TOLERANCE[case.dtype])


# ---- graphs ------------------------------------------------------------------------------------------------------------------------------


class Divided:
    def __init__(self, waits: bool) -> None:
        self.waits = waits


def test_counts_on_the_host_keep_a_layer_out_of_a_graph() -> None:
    config = Qwen3MoeConfig(**models.SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation=experts.register())
    for module in model.modules():
        if experts.has_interface(module):
            setattr(module, experts.SPLIT, Divided(waits=True))
    assert "divided among workers" in str(why_not_captured(model))
    for module in model.modules():
        if experts.has_interface(module):
            setattr(module, experts.SPLIT, Divided(waits=False))
    assert why_not_captured(model) is None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_without_an_expert_have_no_results_and_no_gradients(device: str, dtype: str) -> None:
    """Alone, and behind those of experts. Memory that torch leaves as it is in products has no numbers here."""
    holder = hold(LayerCase("gpt-oss", "unequal", dtype)).to(device)
    chosen = torch.tensor([6, 4, 6, 0, 6]).to(device)
    for number in (chosen, chosen[:1]):
        holder.zero_grad()
        rows = torch.randn(len(number), 32, device=device).to(getattr(torch, dtype)).requires_grad_()
        torch.full((1 << 20,), torch.nan, device=device)
        route = experts.Route.of(number, 6, all_live=False)
        results = route.unsort(experts.run_sorted(holder.experts, route.sort(rows), route))
        results.sum().backward()
        dead = number == 6
        assert not results[dead].any() and not rows.grad[dead].any()  # type: ignore[index]
        assert results.isfinite().all() and results[~dead].abs().gt(0).any() == (~dead).any()
        for own in holder.parameters():
            assert own.grad.isfinite().all() and not own.grad[5].any() and own.grad[4].any() == (~dead).any()  # type: ignore[union-attr]
