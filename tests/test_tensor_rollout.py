"""The native engine on a model that is divided among the members of a tensor-parallel group: all draw the tokens of one process.

The four processes of the pool of workers serve all, as in test_tensor_parallel.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import devices
import models
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from test_rollout import ROOMY, random_prompts
from test_tensor_parallel import ALL, BIASED, STACKED, UNEVEN, Case, TensorWorker, build, call, finish
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from variants import sample_cases

from fulltilt.batching.pack import pack
from fulltilt.cluster.faults import Due, before
from fulltilt.cluster.sizes import parameter_sizes
from fulltilt.kernels.sampling import RUNNING
from fulltilt.model.arrays import local
from fulltilt.model.attention import LayerShape
from fulltilt.model.heads import Head
from fulltilt.model.verify import run_packed
from fulltilt.parallel import layout, ranks
from fulltilt.parallel.apply import shard, share, with_experts
from fulltilt.parallel.cuts import Cut, CutSection, vocabulary_rows
from fulltilt.parallel.exchange import PartTransfer, spread
from fulltilt.parallel.experts import split_experts
from fulltilt.parallel.grid import Grid
from fulltilt.parallel.holdings import bucket_bytes, gathered_layouts
from fulltilt.parallel.layout import Sharding
from fulltilt.parallel.parts import RolloutCopy
from fulltilt.parallel.ranks import Ranks
from fulltilt.parallel.slices import slice_table, take_part
from fulltilt.parallel.tensor import member_layers, split
from fulltilt.parallel.traffic import RoleWork, predict
from fulltilt.parallel.twin import over_same_memory, part_memory
from fulltilt.records import Group, Prompt, Row
from fulltilt.rollout.collect import collect
from fulltilt.rollout.decode import WORK, CapturedStep, Decoder, count_nothing
from fulltilt.rollout.engine import EngineContext, EngineLimits
from fulltilt.rollout.engines.native import NativeEngine
from fulltilt.rollout.members import Members
from fulltilt.rollout.sampler import Sampling
from fulltilt.rollout.stats import EngineStats
from fulltilt.training.roles import Policy

SAMPLED = Sampling(samples=3, max_new_tokens=8, temperature=0.8)
GREEDY = Sampling(samples=1, max_new_tokens=8, temperature=0.0)
STOPS = replace(SAMPLED, stop=("a", "b", "cd", "7"))
RESTRICTED = replace(SAMPLED, top_k=20, top_p=0.9)
TIGHT = EngineLimits(blocks=11, block_tokens=4, max_seqs=7, max_batched_tokens=23)
UNSHARED = EngineLimits(blocks=60, block_tokens=4, max_seqs=7, max_batched_tokens=31, prefix_sharing=False)
WHOLE_PROMPTS = EngineLimits(blocks=60, block_tokens=4, max_seqs=7, max_batched_tokens=8, chunked_prefill=False)
SAMPLINGS = {SAMPLED: "sampled", GREEDY: "greedy", STOPS: "stop strings", RESTRICTED: "top-k and top-p"}
LIMITS = {ROOMY: "roomy", TIGHT: "tight", UNSHARED: "unshared", WHOLE_PROMPTS: "whole prompts"}
WIDTH: Any = models.SMALL["hidden_size"]
END = models.tokenizer().eos_token_id
BURST_ROWS = int(1e8)  # so many that small models decode few steps in a row
TOLERANCE = 1e-5  # of log-probs, which the engine gives in float32


@dataclass(frozen=True)
class Rollout(Case):
    """A model, and what is generated on it."""

    dtype: str = "float32"
    sampling: Sampling = SAMPLED
    limits: EngineLimits = ROOMY
    lengths: Mapping[tuple[int, int], int] = field(default_factory=dict)  # forced ones, by prompt and sample

    def __str__(self) -> str:
        odd = [f"{name}={value}" for name in ("changes", "adapters", "fused", "lengths", "whole_experts") if (value := getattr(self, name))]
        return " ".join([self.family, str(self.size), self.dtype, SAMPLINGS[self.sampling], LIMITS[self.limits], *odd])


@dataclass(frozen=True)
class Disturbed(Rollout):
    fault: int = 0  # the last member runs out of memory before this collective, counted from 1


@dataclass(frozen=True, eq=False)
class Generated:
    """What a process generates, and what it then computes of it."""

    groups: tuple[Group, ...]  # in the order of the prompts
    finished: list[int]  # the places of the prompts, in the order in which their groups were finished
    logprobs: np.ndarray  # of all tokens of all samples
    of_trainer: np.ndarray  # the same, computed by the trainer
    stats: EngineStats
    passes: list[int]  # tokens of each pass
    cache_bytes: int
    eager_reason: str | None  # why no graphs are captured although they were asked for


def engine_on(model: Any, case: Rollout, layers: Mapping[int, LayerShape]) -> NativeEngine:
    return NativeEngine(EngineContext(model, models.tokenizer(), frozenset({END}), layers, case.limits))


def generate(engine: NativeEngine, case: Rollout) -> Generated:
    model: Any = engine.runner.model
    passes: list[int] = []
    finished: list[int] = []
    with model.base_model.register_forward_pre_hook(lambda body, args, given: passes.append(given["input_ids"].numel()), with_kwargs=True):
        run = partial(engine.generate, lengths=case.lengths)
        groups: tuple[Group, ...] = collect(run, prompts(), case.sampling, 5, lambda group: finished.append(group.place))
    rows = rows_of(groups)
    of_trainer = Policy("actor", model, case.sampling.temperature or 1.0).annotate(pack(rows, range(len(rows))))
    logprobs = np.concatenate([sample.logprobs for group in groups for sample in group.samples])
    return Generated(
        groups, finished, logprobs, of_trainer.numpy(), engine.stats(), passes, engine.runner.held_bytes, engine.decoder.eager_reason
    )


def prompts() -> list[Prompt]:
    """The last one begins as the longest of the others."""
    others = random_prompts(3)
    longest = max(others, key=lambda prompt: len(prompt.ids))
    return [*others, Prompt(uid=len(others), ids=np.append(longest.ids, [7, 8]), text="")]


def rows_of(groups: tuple[Group, ...]) -> list[Row]:
    """The samples as the trainer sees them."""
    both = [(group.prompt.ids, sample.ids) for group in groups for sample in group.samples]
    return [Row(ids=np.concatenate([prompt, ids]), mask=np.arange(len(prompt) + len(ids)) >= len(prompt)) for prompt, ids in both]


def layers_of(model: Any) -> dict[int, LayerShape]:
    with torch.no_grad():
        return dict(run_packed(model, [np.arange(8)])[1])


def hidden_rows(case: Case) -> torch.Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1), dtype=getattr(torch, case.dtype))


class RolloutWorker(TensorWorker):
    """A member of a tensor-parallel group that generates."""

    def engine(self, case: Rollout) -> NativeEngine:
        return engine_on(self.split(case).model, case, member_layers(layers_of(build(case)), case.size))

    def generate(self, case: Rollout) -> Generated:
        return generate(self.engine(case), case)

    def generate_without_graphs(self, case: Rollout) -> Generated:
        """The last member cannot capture a step, as none can on a CPU; to the others it seems that they could. Nor does gloo keep them from
        trying."""
        engine = self.engine(case)
        assert not engine.decoder.graphs and "gloo" in str(engine.decoder.eager_reason)
        engine.decoder.graphs = True
        if self.rank % case.size < case.size - 1:
            engine.decoder._pool = "memory"
            engine.decoder._capture_with_room = lambda size, restricted: CapturedStep(None, count_nothing)  # type: ignore
        return generate(engine, case)

    def burst(self, case: Rollout) -> tuple[int, int]:
        """Parameters of this member, and steps in a row as where they overlap with the host."""
        decoder = self.engine(case).decoder
        decoder.overlaps = True
        return sum(parameter.numel() for parameter in decoder.model.parameters()), decoder.burst(BURST_ROWS)

    @torch.no_grad()
    def sampled_from(self, case: Case) -> dict[str, Any]:
        """Logits of some hidden states, their cost, and the shapes of this member's layers."""
        made = self.split(case)
        hidden, moved, head = hidden_rows(case), made.ranks.moved, Head.of(made.model)
        before = moved["all-gather"]
        logits = [head.logits(hidden[:rows]).numpy() for rows in (5, 1, 0)]
        after = moved["all-gather"]
        with head.part.counted_apart() as count:  # type: ignore[union-attr]
            head.product(hidden)
        apart = [moved["all-gather"] - after]
        for _ in range(2):
            count()
            apart.append(moved["all-gather"] - after)
        head.product(hidden[:1])
        apart.append(moved["all-gather"] - after)
        return {"logits": logits, "gathered": after - before, "apart": apart, "layers": layers_of(made.model)}

    def generate_ahead(self, case: Disturbed) -> tuple[list[list[int]], int, int]:
        """As on a GPU without graphs, where a launch makes all its steps at once, and the next one begins before their tokens are known.
        Returns the samples, failures, and launches ahead."""
        made = self.split(case)
        layers, members = member_layers(layers_of(build(case)), case.size), Members(made.ranks)
        engine = NativeEngine(EngineContext(made.model, models.tokenizer(), frozenset(), layers, case.limits, members))
        decoder: Any = engine.decoder
        ahead: list[int] = []

        def launch(steps: int) -> Any:
            rows = torch.arange(decoder._count)
            for _ in range(steps):
                assert (decoder._progress.states[rows] == RUNNING).all(), "a CPU has no empty rows"
                with torch.no_grad():
                    decoder._advance(rows, rows, temperature=case.sampling.temperature)
            arrived = [arrive().copy() for arrive in decoder._results()]
            return lambda: decoder._take([partial(np.asarray, each) for each in arrived])

        def give(blocks: Any) -> None:
            ahead.append(len(blocks))
            Decoder.give(decoder, blocks)

        decoder.launch, decoder.give, decoder.overlaps, decoder.sizes = launch, give, True, lambda rows, steps: [rows] * steps
        with patch.object(made.ranks.progress, "collective", made.ranks.progress.collective):
            if self.rank % case.size == case.size - 1:
                before(made.ranks.progress, "collective", Due(case.fault, case.fault))
            groups = collect(engine.generate, random_prompts(1), case.sampling, 5, lambda group: None)
        limits = engine.take_limits()
        return [sample.ids.tolist() for group in groups for sample in group.samples], len(limits.failures), len(ahead)


def make(member: devices.Member) -> RolloutWorker:
    return RolloutWorker(member.rank, dist.get_world_size())


@pytest.fixture
def pool(pool_of_devices: devices.Pool) -> devices.Guests:
    return devices.Guests(pool_of_devices, "test_tensor_rollout:make")


# ---- what is sampled from ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case("gemma2", 4, UNEVEN), Case("qwen2", 2, UNEVEN, bias=True), Case("llama", 1, UNEVEN),
        Case("qwen3", 4, {"num_key_value_heads": 1, "vocab_size": 160}),
    ],
    ids=str,
)  # fmt: skip
def test_every_member_has_the_logits_of_all_tokens(pool: devices.Guests, case: Case) -> None:
    model, hidden = build(case), hidden_rows(case)
    expected, layers = Head.of(model).logits(hidden).detach().numpy(), layers_of(model)
    row_bytes = case.size * vocabulary_rows(model.config.vocab_size, case.size) * hidden.itemsize
    found = call(pool, "sampled_from", case)
    for own in found:
        assert [logits.shape for logits in own["logits"]] == [(rows, model.config.vocab_size) for rows in (5, 1, 0)]
        assert np.allclose(own["logits"][0], expected, rtol=1e-12, atol=1e-12) and np.array_equal(own["logits"][0], found[0]["logits"][0])
        assert own["gathered"] == (5 + 1) * row_bytes
        # A graph's collectives count when it runs, not when it is captured.
        assert own["apart"] == [0, 5 * row_bytes, 10 * row_bytes, 11 * row_bytes]
        assert own["layers"] == member_layers(layers, case.size)
        assert {shape.key_heads for shape in own["layers"].values()} == {max(1, model.config.num_key_value_heads // case.size)}


# ---- the same tokens ---------------------------------------------------------------------------------------------------------------------

ONE_KEY = {"num_key_value_heads": 1}
TIED = {"tie_word_embeddings": True, **UNEVEN}
FORCED = {(0, 0): 1, (1, 2): 7, (3, 1): 8}

SHORT = [
    Rollout("qwen2", 2, TIED, fused=True, limits=TIGHT),
    Rollout("qwen3", 4, ONE_KEY, limits=TIGHT, sampling=STOPS),
    Rollout("llama", 2, BIASED, adapters=ALL),
]
FAMILIES = {"qwen2": TIED, "qwen3": {}, "llama": UNEVEN, "gemma2": {}, "qwen3-moe": {}}
MATRIX = [
    Rollout("gemma2", 2, UNEVEN, sampling=GREEDY),
    Rollout("qwen3-moe", 4, sampling=RESTRICTED, limits=UNSHARED),
    *[
        Rollout(family, size, changes, sampling=sampling, limits=limits)
        for family, changes in FAMILIES.items()
        for size in (2, 4)
        for sampling, limits in ((GREEDY, TIGHT), (SAMPLED, TIGHT), (SAMPLED, UNSHARED))
    ],
    *[Rollout(family, size, ONE_KEY, limits=TIGHT) for family in ("qwen2", "gemma2", "qwen3-moe") for size in (2, 4)],
    *[Rollout(family, size, ONE_KEY, fused=True, sampling=RESTRICTED) for family in ("qwen3", "llama") for size in (2, 4)],
    *[Rollout("qwen3", size, dtype="float64", sampling=sampling, limits=TIGHT) for size in (2, 4) for sampling in (GREEDY, STOPS)],
    *[Rollout("gemma2", size, UNEVEN, sampling=sampling) for size in (2, 4) for sampling in (STOPS, RESTRICTED)],
    *[Rollout("llama", size, BIASED, adapters=ALL, limits=TIGHT, sampling=STOPS) for size in (2, 4)],
    *[Rollout("qwen3-moe", size, adapters=STACKED, limits=TIGHT) for size in (2, 4)],
    *[Rollout(family, 2, limits=TIGHT) for family in ("mistral", "phi3", "smollm3", "gemma3", "granite", "cohere", "mixtral", "qwen2-moe")],
    Rollout("qwen2", 2, limits=WHOLE_PROMPTS, sampling=GREEDY),
    Rollout("qwen2", 4, limits=TIGHT, lengths=FORCED),
    Rollout("llama", 2, BIASED, adapters=ALL, fused=True, sampling=GREEDY),
    Rollout("llama", 1, UNEVEN, fused=True),
    Rollout("qwen3-moe", 1, limits=TIGHT),
    *[
        Rollout(family, size, sampling=sampling, limits=limits, whole_experts=True)
        for family in ("qwen3-moe", "mixtral")
        for size in (2, 4)
        for sampling, limits in ((GREEDY, TIGHT), (SAMPLED, TIGHT), (RESTRICTED, UNSHARED))
    ],
    *[Rollout("qwen3-moe", size, adapters=STACKED, limits=TIGHT, whole_experts=True) for size in (2, 4)],
    Rollout("qwen2-moe", 2, limits=TIGHT, whole_experts=True),
    *[Rollout(family, 1, limits=TIGHT, whole_experts=True) for family in ("qwen3-moe", "mixtral")],
]


@pytest.mark.parametrize("case", sample_cases([*SHORT, *MATRIX], SHORT[1], long=SHORT), ids=str)
def test_members_draw_the_tokens_of_one_process(pool: devices.Guests, case: Rollout) -> None:
    whole = build(case)
    layers = layers_of(whole)
    finish(whole, case)
    expected = generate(engine_on(whole, case, layers), case)
    for own in call(pool, "generate", case):
        assert_same(own, expected)
        assert np.allclose(own.logprobs, own.of_trainer, rtol=0, atol=TOLERANCE)
        assert own.cache_bytes == expected.cache_bytes * own_share(layers, case.size)
    # What the limits and stop strings are there for does happen.
    assert (expected.stats.shared_tokens > 0) == (case.limits != UNSHARED)
    assert expected.stats.preemptions > 0 or case.limits != TIGHT or case.sampling == GREEDY
    assert case.limits != TIGHT or (1 in expected.passes and any(tokens > 4 and tokens % 4 for tokens in expected.passes))
    samples = [sample for group in expected.groups for sample in group.samples]
    assert case.sampling != STOPS or any(sample.finish == "stop" and sample.ids[-1] != END for sample in samples)


def test_members_have_graphs_all_or_none(pool: devices.Guests) -> None:
    case = Rollout("qwen2", 2, limits=replace(ROOMY, cuda_graphs=True))
    whole = build(case)
    expected = generate(engine_on(whole, replace(case, limits=ROOMY), layers_of(whole)), case)
    found = call(pool, "generate_without_graphs", case)
    for own in found:
        assert_same(own, expected)
    reasons = [str(own.eager_reason) for own in found]
    assert "by another member of the tensor-parallel group" in reasons[0] and "a step of the model cannot be captured:" in reasons[1]


def test_members_decode_equally_long(pool: devices.Guests) -> None:
    """Although the last one has fewer parameters."""
    found = call(pool, "burst", Rollout("qwen2", 4, {"tie_word_embeddings": True, "vocab_size": 100}))
    parameters, steps = zip(*found, strict=True)
    assert parameters[-1] < parameters[0] and len({int(WORK / (own * BURST_ROWS)) for own in parameters}) > 1
    assert set(steps) == {int(WORK / (max(parameters) * BURST_ROWS))}


def own_share(layers: Mapping[int, LayerShape], size: int) -> float:
    """The share of the whole cache that a member has."""
    return 1 / min(size, layers[0].key_heads)


def assert_same(own: Generated, expected: Generated) -> None:
    """The same tokens in the same passes."""
    assert own.passes == expected.passes and own.finished == expected.finished
    for group, other in zip(own.groups, expected.groups, strict=True):
        for sample, same in zip(group.samples, other.samples, strict=True):
            assert sample.ids.tolist() == same.ids.tolist() and (sample.finish, sample.text) == (same.finish, same.text)
    assert np.allclose(own.logprobs, expected.logprobs, rtol=0, atol=TOLERANCE)
    counted = ("preemptions", "shared_tokens", "prefill_tokens", "decode_tokens", "passes")
    assert all(getattr(own.stats, name) == getattr(expected.stats, name) for name in counted)


# ---- weights for an engine whose model is divided in another way -------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair(Case):
    """A model that learns, divided among `size` members, and one for an engine, divided among `sampled`. On four workers."""

    sampled: int = 1
    experts: int = 1
    full: bool = False
    group: int | None = None  # workers that share the parameters out among themselves, as with `train.shard = "hybrid"`; None: all
    bucket: int = 3000  # bytes

    def __str__(self) -> str:
        return f"{super().__str__()} sampled by {self.sampled}{f' in groups of {self.group}' if self.group else ''}"


class CountedAllocations(TorchDispatchMode):
    """The bytes of all storages that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in given:
                self.bytes += each.untyped_storage().nbytes()
        return found


class CopyingWorker:
    """A worker that learns, and has a copy of the model for an engine."""

    def __init__(self, rank: int, size: int) -> None:
        self.everyone = Ranks(rank, size, dist.group.WORLD)

    def copy(self, case: Pair) -> dict[str, Any]:
        """What the copy has after two changes of the model that learns, and what they took."""
        grid, model = Grid.of(self.everyone, case.size, case.experts, case.sampled), build(case)
        copied = over_same_memory(model)
        target = split(copied, grid.rollout) if case.sampled > 1 else None
        part = split(model, grid.tensor) if case.size > 1 else split_experts(model, grid.experts) if case.experts > 1 else None
        sizes = parameter_sizes(model, part=part)
        part_memory(copied, model)
        shards = None
        if case.full:
            sharing = share(grid.data, "cpu", case.group)
            shards = shard(model, with_experts(sharing, grid.replicas, "cpu") if grid.replicas else sharing)
        made, version, calls = RolloutCopy(copied, target), 0, list[int]()
        with patch.object(layout, "EXCHANGE_BYTES", case.bucket), torch.no_grad():
            made.follow(model, part, shards, lambda: version)
            kind, size = "hybrid" if case.group else "full" if case.full else "optimizer", grid.data.size
            sharding = Sharding(kind, size, case.group or size, experts=case.experts)
            parts = max(case.size, case.experts)
            expected = {"bucket": bucket_bytes(sizes, sharding, parts)}
            expected["rounds"] = sum(
                own.rounds(itemsize) * ((own.workers > 1) + (own.parts > 1)) for own, itemsize in gathered_layouts(sizes, sharding, parts)
            )
            expected["moved"] = predict([RoleWork(sizes, 8, synced=1, parts=parts)], sharding)["all-gather"]
        addresses = [own.data_ptr() for own in copied.parameters()]
        made.sync()
        assert made.current
        with torch.no_grad():
            for own in model.parameters():
                local(own).mul_(1.5)
        version, gather = version + 1, ranks.gather_into
        assert not made.current
        moved = self.everyone.moved["all-gather"]

        def counted(flat: torch.Tensor, own: torch.Tensor, group: Any) -> None:
            calls.append(flat.nbytes)
            gather(flat, own, group=group)

        with CountedAllocations() as allocated, patch.object(ranks, "gather_into", counted):
            made.sync()
        assert made.current and addresses == [own.data_ptr() for own in copied.parameters()]
        found = {"bucket": made.bucket.nbytes, "rounds": len(calls), "moved": self.everyone.moved["all-gather"] - moved}
        values = {name: devices.as_array(own) for name, own in copied.named_parameters()}
        return {"values": values, "expected": expected, "found": found, "allocated": allocated.bytes, "place": grid.rollout.rank}


def make_copying(member: devices.Member) -> CopyingWorker:
    return CopyingWorker(member.rank, dist.get_world_size())


PAIRS = [
    Pair("qwen2", 2, UNEVEN, sampled=4),
    Pair("qwen3-moe", 1, experts=2, full=True, sampled=2),
    Pair("phi3", 2, full=True, sampled=1, dtype="bfloat16"),
    Pair("llama", 1, BIASED, adapters=ALL, sampled=2),
    Pair("qwen2", 1, UNEVEN, full=True, group=2, sampled=4),
]
PAIRS_MATRIX = [
    Pair(family, size, full=full, experts=parts, sampled=sampled, bucket=bucket)
    for family in ("qwen2", "gemma2", "phi3", "qwen3-moe", "mixtral")
    for size, full, parts, sampled in [
        *[(size, full, 1, sampled) for size, full in ((1, False), (1, True), (2, False), (2, True), (4, False)) for sampled in (1, 2, 4)],
        *[(1, full, parts, sampled) for full in (False, True) for parts in (2, 4) for sampled in (1, 2, 4)],
    ]
    if (size, full, parts) != (1, False, 1) or sampled > 1
    if size == 1 or size != sampled
    if parts == 1 or "mo" in family or "mix" in family
    for bucket in (700, 1 << 26)
] + [Pair(family, 1, full=True, group=2, sampled=sampled) for family in ("qwen2", "gemma2", "mixtral") for sampled in (2, 4)]


@pytest.mark.parametrize("case", [*PAIRS, *(pytest.param(case, marks=pytest.mark.matrix) for case in PAIRS_MATRIX)], ids=str)
def test_a_copy_that_is_divided_in_another_way_gets_the_same_bits(pool_of_devices: devices.Pool, case: Pair) -> None:
    """Through a buffer of bounded size, with as many collectives as fill it."""
    pool = devices.Guests(pool_of_devices, "test_tensor_rollout:make_copying")
    whole = build(case)
    wanted, learning = dict[str, torch.Tensor](), {name for name, own in whole.named_parameters() if own.requires_grad}
    for name, own in whole.named_parameters():
        wide = own.detach().to(torch.promote_types(own.dtype, torch.float32)) if case.full else own.detach()
        wanted[name] = (wide * 1.5).to(own.dtype) if name in learning else own.detach()
    cuts = slice_table(whole, case.sampled).cuts if case.sampled > 1 else None
    found = pool.start("copy", [(case,)] * pool.size, what="copy").results()
    for own in found:
        assert own["found"] == found[0]["expected"] and own["allocated"] == 0  # the first worker has the largest parts
        assert (own["found"]["bucket"] <= case.bucket and own["found"]["rounds"] < len(learning)) or case.bucket < 1 << 26
        for name, numbers in own["values"].items():
            part = take_part(cuts[name], wanted[name], own["place"]) if cuts else wanted[name]
            assert np.array_equal(numbers, devices.as_array(part)), name


@given(st.data())
def test_numbers_of_any_parts_reach_their_places(data: st.DataObject) -> None:
    """Parts that members have, each shared out by rows among workers, to parts of another size, in pieces."""
    size, other, workers = (data.draw(st.sampled_from([1, 2, 4])) for _ in range(3))
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))

    def cut_of(members: int, dim: int) -> Cut | None:
        if members == 1:
            return None
        lengths = data.draw(st.sampled_from([(shape[dim],), (shape[dim] // 2, shape[dim] - shape[dim] // 2)]))
        return Cut(dim, tuple(CutSection(length, -(-length // members)) for length in lengths if length))

    held, wanted = (cut_of(members, data.draw(st.integers(0, len(shape) - 1))) for members in (size, other))
    whole = torch.arange(1, int(np.prod(shape)) + 1, dtype=torch.float64).view(shape)
    for place in range(other):
        target = torch.zeros(wanted.shape(shape, place) if wanted else shape, dtype=whole.dtype)
        division = PartTransfer(cuts={"x": held} if held else None, wanted={"x": wanted} if wanted else None, place=place)
        for rank in range(size):
            part = take_part(held, whole, rank) if held else whole
            each = -(-part.shape[0] // workers) * part[0:1].numel()
            numbers = torch.nn.functional.pad(part.reshape(-1), (0, workers * each - part.numel()), value=-1.0).view(workers, each)
            step = data.draw(st.integers(1, each + 1))
            for first in range(0, each, step):
                for into, given_numbers in spread(
                    numbers[:, first : first + step], first, part.shape, division.overlaps("x", shape, rank), target
                ):
                    into.copy_(given_numbers)
        assert torch.equal(target, take_part(wanted, whole, place) if wanted else whole)


# Of 11 collectives of a prefill pass and 6 of a step: the first and last of each pass, and those inside of it, of steps that were begun
# ahead, too.
AHEAD = Disturbed("qwen2", 2, sampling=Sampling(samples=4, max_new_tokens=40, temperature=0.8), limits=replace(ROOMY, max_seqs=4))


@pytest.mark.parametrize(
    "fault",
    [
        *(pytest.param(fault, marks=pytest.mark.long) for fault in (11, 40, 120)),
        *(pytest.param(fault, marks=pytest.mark.matrix) for fault in (1, 5, 12, 13, 107, 108, 160, 203, 240)),
    ],
)
def test_a_member_that_runs_out_of_memory_ends_its_steps_over_a_filler(pool: devices.Guests, fault: int) -> None:
    """Those of a whole launch, of which the others make the rest. All go on with the same samples."""
    (expected, failures, ahead), *_ = call(pool, "generate_ahead", AHEAD)
    assert failures == 0 and ahead == 2
    for samples, failures, _ in call(pool, "generate_ahead", replace(AHEAD, fault=fault)):
        assert samples == expected and failures == 1
