"""What workers hold, and what their collectives move, is what one function predicts, to the byte."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import devices
import numpy as np
import pytest
import runs
import test_expert_parallel as experts
import test_tensor_parallel as tensor
import test_tensor_rollout as rollouts
import torch
import torch.distributed as dist
from variants import sample_cases

from fulltilt.batching.schedule import distribute, fixed, split_minibatches
from fulltilt.bench import scaling
from fulltilt.cluster import sizes
from fulltilt.cluster.assembly import RunParts
from fulltilt.cluster.making import decided
from fulltilt.cluster.sizes import parameter_sizes
from fulltilt.footprint import HeadOptions
from fulltilt.memory.recompute import apply_recompute
from fulltilt.model.load import shape_of
from fulltilt.parallel import tensor as tensor_parallel
from fulltilt.parallel.experts import ExpertExchange, expert_table
from fulltilt.parallel.grid import Grid
from fulltilt.parallel.holdings import held_bytes, twin_bytes
from fulltilt.parallel.layout import UNSHARDED, ParameterSize, Sharding
from fulltilt.parallel.ranks import Ranks
from fulltilt.parallel.sequence import SequenceGroup
from fulltilt.parallel.shard import neighbours
from fulltilt.parallel.slices import slice_table
from fulltilt.parallel.tensor import member_layers
from fulltilt.parallel.traffic import (
    FILLER,
    DecodePass,
    ExpertPass,
    ExpertWork,
    PrefillPass,
    Reads,
    RoleWork,
    RolloutWork,
    SequenceWork,
    Stream,
    TensorWork,
    agreed_bytes,
    expert_pass,
    most_received,
    predict,
    sent_bytes,
    shared_adapter_numbers,
    shared_numbers,
    tensor_pass,
)
from fulltilt.plan.division import Division
from fulltilt.plan.facts import Facts
from fulltilt.plan.resident import loading_order
from fulltilt.records import MicroBatch, Prompt, Row
from fulltilt.rollout.collect import collect
from fulltilt.rollout.decode import Decoder
from fulltilt.rollout.engine import EngineContext
from fulltilt.rollout.engines.native import NativeEngine
from fulltilt.rollout.members import Members
from fulltilt.rollout.runner import Runner
from fulltilt.rollout.sampler import Sampling
from fulltilt.rollout.scheduler import Pass
from fulltilt.rollout.stats import EngineStats
from fulltilt.schema import Config
from fulltilt.shape import SHAPES, Recompute, Shape
from fulltilt.training import roles
from fulltilt.words import in_bytes

ModelFolders = Callable[[str], Path]
UPDATES = 4  # two mini-batches, twice
ROWS = 8
KINDS = ("all-reduce", "all-gather", "reduce-scatter")
EACH_ROW = ("algorithm.kl_coef=0", "algorithm.epochs=2", "train.balance=false", "actor.dynamic_batch=false", "actor.micro_batch=1")
PPO = ("algorithm.name=ppo", "critic.dynamic_batch=false", "critic.micro_batch=1")
MODELS = {
    "tied": ("llama-tied", ()),
    "experts": ("qwen3-moe", ()),
    "lora": ("qwen2", ("lora.rank=4", "model.dtype=bfloat16")),
    "ppo": ("qwen2", PPO),
    "recompute": ("qwen2", ("train.recompute=full", "model.dtype=bfloat16")),
    "selective": ("qwen2", ("train.recompute=selective",)),
    "fused": ("qwen2", ("train.fused_layers=true",)),
    "whole": ("qwen2", (*PPO, "train.reshard_after_forward=false", "model.dtype=bfloat16")),
}
SHARDED = {
    "optimizer": (),
    "full": ("train.shard=full",),
    "hybrid": ("train.shard=hybrid", "train.shard_size=2"),
}
QUICK = {("tied", "optimizer", 2), ("tied", "full", 2)}
CASES = [
    (model, shard, workers)
    for model in MODELS
    for shard in SHARDED
    for workers in (2, 3, 4)
    if (shard == "hybrid") <= (workers == 4) and (model == "whole") <= (shard != "optimizer")
]


def made_up_rows() -> list[Row]:
    random = np.random.default_rng(0)

    def numbers(length: int) -> np.ndarray:
        return random.normal(size=length).astype(np.float32)

    return [
        Row(
            random.integers(3, 90, length), np.arange(length) >= 4, group=place, rollout_logprobs=numbers(length) - 4,
            old_logprobs=numbers(length) - 4, advantages=numbers(length), values=numbers(length), returns=numbers(length),
        )
        for place, length in enumerate((9, 17, 30, 12, 25, 8, 14, 21))
    ]  # fmt: skip


def metrics_of_a_step(parts: RunParts) -> dict[str, float]:
    for role in ("actor", *(["critic"] if parts.algorithm.value_loss else [])):
        with parts.crew.phase(f"update-{role}"):
            updated = parts.crew.update(role, made_up_rows(), 0, lambda done, total: None)
        assert updated[f"{role}/updates"] == UPDATES and not updated[f"{role}/skipped_updates"]
        if parts.crew._count_parts(role) > 1:
            assert 0 < updated[f"timing_s/workers/update_{role}/mean"] <= updated[f"timing_s/workers/update_{role}/max"]
    with parts.crew.phase("old-logprob"):
        annotated = parts.crew.annotate("actor", "old_logprobs", made_up_rows(), lambda done, total: None)
        assert len(annotated.seconds) == parts.crew._count_parts("actor") and min(annotated.seconds) > 0
    with parts.crew.phase("sync"):
        parts.crew.sync(1)
    found = parts.crew.metrics()
    spread = {name: found[name] for name in found if name.startswith("memory_spread_gib/")}
    if parts.crew.hosts.size > 1:
        assert spread.keys() == {"memory_spread_gib/process"} and 0 <= spread["memory_spread_gib/process"] < found["memory_gib/process"]
    else:
        assert not spread
    assert not [name for name in parts.crew.metrics() if name.startswith("communication/")], "they are of one step"
    return found


def communication(metrics: dict[str, float]) -> dict[str, float]:
    return {name: count for name, count in metrics.items() if name.startswith("communication/")}


@pytest.mark.parametrize(
    ("model", "shard", "workers"), [pytest.param(*case, marks=() if case in QUICK else pytest.mark.matrix) for case in CASES]
)
def test_a_worker_holds_and_moves_what_is_predicted(
    pool_of_devices: devices.Pool, model_folders: ModelFolders, tmp_path: Path, model: str, shard: str, workers: int
) -> None:
    family, overrides = MODELS[model]
    folder = runs.make(tmp_path / "run", model_folders(family))
    alone = [each for each in overrides if "reshard" not in each]
    with pool_of_devices.assembled(folder, 1, *EACH_ROW, *alone) as parts:
        learners = {role: trainer.role.model for role, trainer in parts.worker.trainers.items()}
        parameters = {role: parameter_sizes(learner) for role, learner in learners.items()}
        itemsize = learners["actor"].dtype.itemsize
        assert communication(metrics_of_a_step(parts)) == {}
    assert len(parameters) == (2 if PPO[0] in overrides else 1)
    sharding = Sharding(shard, workers, 2 if shard == "hybrid" else workers, reshard=model != "whole")  # type: ignore[arg-type]
    passes, scored = UPDATES * -(-ROWS // 2 // workers), [-(-ROWS // workers)]
    work = {role: RoleWork(own, itemsize, UPDATES, passes, scored if role == "actor" else ()) for role, own in parameters.items()}
    work["actor"] = replace(work["actor"], synced=1)
    with pool_of_devices.assembled(folder, workers, *EACH_ROW, *SHARDED[shard], *overrides) as parts:
        (words,) = [text for text in parts.plan.words if "sharding" in text]
        assert words.startswith(f"{shard} sharding: {workers} workers share out ")
        metrics = metrics_of_a_step(parts)
        held = pool_of_devices.held(workers)
    expected = predict(list(work.values()), sharding)
    assert expected.keys() == set(KINDS)
    assert communication(metrics) == {f"communication/{kind.replace('-', '_')}_bytes": count for kind, count in expected.items()}
    for rank, found in enumerate(held):
        own = [held_bytes(each, sharding, rank) for each in parameters.values()]
        twin = twin_bytes(parameters["actor"], sharding) if shard != "optimizer" else 0
        assert found["parameters"] == sum(each.parameters for each in own) + twin
        assert found["optimizer"] == sum(each.optimizer for each in own)
        if len(own) == 1:  # else another role's accumulators are there too
            assert round(metrics["memory_gib/update_actor/gradients"] * 2**30) == own[0].gradients


@pytest.mark.long
@pytest.mark.parametrize(("shard", "workers"), sample_cases([("full", 3), ("hybrid", 4)], ("full", 3)))
def test_roles_are_shared_out_one_by_one_as_they_are_loaded(
    pool_of_devices: devices.Pool, model_folders: ModelFolders, tmp_path: Path, shard: str, workers: int
) -> None:
    """Each worker reads its rows of a model, and all of the actor, whose whole copy stays for rollouts. The plan knows what is there at
    each moment."""
    folder = runs.make(tmp_path / "run", model_folders("qwen2"))
    overrides = ("algorithm.name=ppo", "algorithm.kl_coef=0.1", "model.dtype=bfloat16", f"ref.path={model_folders('qwen3')}")
    with pool_of_devices.assembled(folder, 1, *overrides) as parts:
        learners = parts.worker.trainers
        facts = {role: sizes.role_facts(own.model, learns=role in learners) for role, own in parts.worker.roles.items()}  # type: ignore[attr-defined]
    pool_of_devices.ask("count_loading")
    with pool_of_devices.assembled(folder, workers, *overrides, *SHARDED[shard]) as parts:
        (words,) = [text for text in parts.plan.words if "sharding" in text]
    found = pool_of_devices.ask("counts_of_loading")[0]
    sharding = Sharding(shard, workers, 2 if shard == "hybrid" else workers)  # type: ignore[arg-type]
    predicted = loading_order(Facts("cpu", 0, 0, facts, 0, 1, sharding=sharding))
    assert list(found) == list(predicted) and len(found) == 3
    before = 0
    for role, counted in found.items():
        held, whole = facts[role].held(sharding).parameters, facts[role].parameter_bytes
        if role == "actor":
            assert counted["whole"] == before + whole
            assert counted["most"] <= predicted[role] <= counted["most"] + held  # the shards of a unit beside its whole parameters
        else:  # only a critic's score, which is in no file
            assert counted["whole"] == counted["most"] == before + sum(own.bytes for own in facts[role].sizes if own.scores)
        assert counted["shared"] == before + held + (whole if role == "actor" else 0) <= predicted[role]
        before = counted["shared"]
    largest = max(predicted, key=lambda role: predicted[role])
    assert words.endswith(f", and {in_bytes(predicted[largest])} while the {largest} is loaded")


@pytest.mark.parametrize(("gb", "shard"), [(400, "optimizer"), (200, "hybrid"), (160, "full")])
def test_auto_is_decided_from_the_files_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gb: int, shard: str) -> None:
    """By every worker alike, before a model is loaded. An actor and a reference of 32 billion parameters on two machines."""
    monkeypatch.setattr(sizes, "device_bytes", lambda device, ranks: gb * 10**9)
    ranks, cuda = Ranks(5, 16, beside=8), torch.device("cuda")

    def config(model: dict[str, Any], **train: Any) -> Config:
        (tmp_path / "config.json").write_text(json.dumps(model))
        return Config.model_validate({"model": {"path": str(tmp_path)}, "data": {"train": "t"}, "train": train})

    given = config(SHAPES["32B"])
    found = sizes.find_sharding(given, ["actor", "ref"], cuda, Grid.of(ranks), Division(), sampled=True)
    assert (found.shard, found.workers, found.group) == (shard, 16, 8 if shard == "hybrid" else 16)
    assert "of each device's" in found.why
    made = decided(given, found).train
    assert (made.shard, made.shard_size) == (shard, 8 if shard == "hybrid" else None)
    explicit = config(SHAPES["32B"], shard="hybrid", shard_size=2)
    of_critic = sizes.find_sharding(explicit, ["critic"], cuda, Grid.of(Ranks(0, 4, beside=4, after=4)), Division(), sampled=False)
    assert of_critic == Sharding("hybrid", 4, 2)
    few = config(SHAPES["32B"], shard="hybrid", shard_size=8)
    of_critic = sizes.find_sharding(few, ["critic"], cuda, Grid.of(Ranks(0, 4, beside=4, after=4)), Division(), sampled=False)
    assert of_critic == Sharding("full", 4, 4)  # fewer than a group of the actor's has: they are one
    for before, expected in ((8, shard), (4, "full" if shard == "hybrid" else shard)):  # from the first worker of a machine, or not
        found = sizes.find_sharding(given, ["actor", "ref"], cuda, Grid.of(Ranks(5, 16, beside=8, before=before)), Division(), sampled=True)
        assert (found.shard, found.workers, found.group) == (expected, 16, 8 if expected == "hybrid" else 16)
    compiled = config(SHAPES["32B"], compile=True)
    assert sizes.find_sharding(compiled, ["actor"], cuda, Grid.of(ranks), Division(), sampled=True).why == "train.compile is set"
    strange = config({**SHAPES["32B"], "model_type": "cohere"})
    assert "not known before it is loaded" in sizes.find_sharding(strange, ["actor"], cuda, Grid.of(ranks), Division(), sampled=True).why
    assert sizes.find_sharding(given, [], cuda, Grid.of(ranks), Division(), sampled=True) == Sharding("optimizer", 16, 16)  # nothing learns


def test_sizes_are_decided_from_the_files_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 70 billion parameters on two machines of eight, whose groups of neighbours may not span them."""
    monkeypatch.setattr(sizes, "device_bytes", lambda device, ranks: 141 * 10**9)
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["70B"]))
    given = {"model": {"path": str(tmp_path)}, "data": {"train": "t"}}

    def found(ranks: Ranks, roles: tuple[str, ...] = ("actor", "ref"), *, learns: bool = True, **sections: Any) -> Division:
        config = Config.model_validate({**given, **sections})
        return sizes.find_division(config, roles, torch.device("cuda"), ranks, 1024, sampled="actor" in roles, learns=learns)

    machines = Ranks(5, 16, beside=8)
    assert (machines.within, Ranks(1, 4, beside=8, before=3, after=1).within, Ranks(0, 16, beside=8, before=4).within) == (8, 4, 4)
    assert found(machines, train={"shard": "optimizer"}).tensor == 4
    assert found(machines) == Division(1, 1, 4)
    assert found(machines, learns=False, roles=("actor",)) == Division(2, 1, 2)
    assert found(Ranks(0, 2, beside=8, before=6), ("ref",), ref={"tensor_parallel": 1}).words == ()  # nothing is left to auto
    compiled = found(machines, train={"compile": True})
    assert compiled == Division() and "train.compile is set" in compiled.words[0]
    (tmp_path / "config.json").write_text(json.dumps({**SHAPES["70B"], "model_type": "cohere"}))
    assert "not known before it is loaded" in found(machines).words[0]


def test_large_models() -> None:
    large = (ParameterSize((7 * 10**9,), 2),)
    one = predict([RoleWork(large, 2, batches=3)], Sharding(workers=8, group=8))
    assert one == {"all-gather": 3 * 14e9, "reduce-scatter": 3 * 28e9, "all-reduce": 3 * 20}
    assert predict([RoleWork(large, 2, batches=3)], UNSHARDED) == {}
    assert sent_bytes(Counter({"all-gather": 800, "reduce-scatter": 80, "all-reduce": 8}), 8) == 700 + 70 + 14


@pytest.mark.long
def test_the_page_shows_the_tables_that_the_command_prints() -> None:
    page = (Path(__file__).parents[1] / "docs" / "scaling.md").read_text()
    for table in (scaling.table, scaling.layouts_table, scaling.rollouts_table, scaling.long_table, scaling.rows_table):
        assert "\n".join(table()) in page


# ---- Ulysses -----------------------------------------------------------------------------------------------------------------------------

TWO, FOUR = "train.sequence_parallel=2", "train.sequence_parallel=4"
SEQUENCE_MODELS = {
    **{name: MODELS[name] for name in ("tied", "experts", "lora", "ppo", "recompute", "selective", "fused", "whole")},
    "first layer again": ("qwen2", ("train.recompute=full", "train.recompute_layers=1")),
    "own sizes": ("qwen2", (*PPO, "critic.sequence_parallel=4")),
    "four": ("qwen2", (FOUR,)),
    "several rows": ("qwen2", ("actor.micro_batch=3",)),  # three passes without gradient for two groups, one of which runs a filler
    "few": ("qwen2", ("actor.micro_batch=4",)),  # one micro-batch in a mini-batch
}
SEQUENCE_QUICK = {("recompute", "optimizer", 2)}
SEQUENCE_CASES = [
    (model, shard, workers)
    for model in SEQUENCE_MODELS
    for shard in SHARDED
    for workers in (2, 4)
    if (shard == "hybrid" or model in ("own sizes", "four")) <= (workers == 4) and (model == "whole") <= (shard != "optimizer")
]


@dataclass(frozen=True)
class DealtStreams:
    """The streams that groups of workers share, without balance: micro-batches of so many neighbouring rows go to them in turn."""

    samples: int
    groups: int

    def dealt(self, rows: Sequence[int], lengths: Sequence[int]) -> list[list[Stream]]:
        """The streams of each group. The first 4 tokens of a row are its prompt."""
        made = fixed([lengths[row] for row in rows], self.samples)
        streams = [Stream.of([(4, lengths[rows[index]] - 4) for index in indices]) for indices in made]
        return [[streams[place] for place in places] for places in distribute([1.0] * len(streams), self.groups, balance=False)]

    def update(self, lengths: Sequence[int]) -> list[list[list[Stream]]]:
        """Those of all optimizer steps: two mini-batches, twice."""
        return [self.dealt(rows, lengths) for rows in split_minibatches(range(len(lengths)), 2)] * (UPDATES // 2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "shard", "workers"),
    [pytest.param(*case, marks=() if case in SEQUENCE_QUICK else pytest.mark.matrix) for case in SEQUENCE_CASES],
)
def test_workers_that_share_micro_batches_move_what_is_predicted(
    pool_of_devices: devices.Pool, model_folders: ModelFolders, tmp_path: Path, model: str, shard: str, workers: int
) -> None:
    family, overrides = SEQUENCE_MODELS[model]
    folder = runs.make(tmp_path / "run", model_folders(family))
    alone = [each for each in overrides if "reshard" not in each and "parallel" not in each]
    with pool_of_devices.assembled(folder, 1, *EACH_ROW, *alone) as parts:
        learners = {role: trainer.role.model for role, trainer in parts.worker.trainers.items()}
        parameters = {role: parameter_sizes(learner) for role, learner in learners.items()}
        itemsize = learners["actor"].dtype.itemsize
    sharding = Sharding(shard, workers, 2 if shard == "hybrid" else workers, reshard=model != "whole")  # type: ignore[arg-type]
    with pool_of_devices.assembled(folder, workers, *EACH_ROW, TWO, *SHARDED[shard], *overrides) as parts:
        lengths, settings = [row.tokens for row in made_up_rows()], parts.plan.roles
        metrics = metrics_of_a_step(parts)
    work = []
    for role, own in parameters.items():
        size = settings[role].sequence_parallel
        recompute = Recompute(settings[role].recompute, settings[role].recompute_layers, settings[role].recompute_method)
        dealing = DealtStreams({"several rows": 3, "few": 4}.get(model, 1), workers // size)
        steps, scored = dealing.update(lengths), dealing.dealt(range(ROWS), lengths) if role == "actor" else []
        passes = sum(max(map(len, groups)) for groups in steps)
        updates = [[stream for groups in steps for stream in groups[place]] for place in range(workers // size)]
        reads: Reads = "entropy" if role == "actor" else "value"
        sequence = SequenceWork(Shape.read(model_folders(family)), size, updates, scored, reads, recompute)
        phases = [max(map(len, scored))] if scored else []
        work.append(RoleWork(own, itemsize, UPDATES, passes, phases, synced=int(role == "actor"), sequence=sequence))
    expected = predict(work, sharding)
    assert expected.keys() == {*KINDS, "all-to-all"}
    assert communication(metrics) == {f"communication/{kind.replace('-', '_')}_bytes": count for kind, count in expected.items()}


def test_streams_in_parts() -> None:
    two_rows = Stream.of([(4, 5), (3, 8)])  # 20 tokens; results are read at 3 to 7 and at 11 to 18
    assert two_rows == Stream(20, [range(3, 8), range(11, 19)]) and two_rows.results == 13
    assert [two_rows.most_results(size) for size in (1, 2, 3, 4, 8, 32)] == [13, 8, 5, 4, 3, 1]
    assert FILLER.most_results(4) == 1 and Stream(5, []).most_results(2) == 0
    assert Stream(len(roles.FILLER.ids), (range(0, 1),)) == FILLER and roles.FILLER.trained.tolist() == [1]
    for micro, size in itertools.product(tensor.MICRO_BATCHES, (2, 3, 4)):
        counts = roles.counts_of(micro, micro.trained - 1, SequenceGroup(Ranks(0, size)))
        assert stream_of(micro).most_results(size) == max(counts)


# ---- tensor parallelism ------------------------------------------------------------------------------------------------------------------


class CountingMember(tensor.TensorWorker):
    """A member of a tensor-parallel group that tells what its collectives move."""

    def count(self, case: tensor.Case, recompute: Recompute) -> list[dict[str, int]]:
        """In passes with gradient over all micro-batches, in one sum of shared gradients, and in passes without gradient."""
        made, found = self.split(case), list[dict[str, int]]()
        apply_recompute(made.model, recompute)
        moved = made.ranks.moved
        moved.clear()  # layers are compared when they are fused

        def note() -> None:
            found.append({kind: count for kind, count in moved.items() if count})
            moved.clear()

        gradients = tensor.learn(made.model, case).gradients
        note()
        made.sum_shared({name: torch.from_numpy(gradient).reshape(-1) for name, gradient in gradients.items()})
        note()
        model: Any = made.model
        role = roles.Critic("critic", model) if case.role == "critic" else roles.Policy("actor", model, 0.8, options=case.options)
        for micro in tensor.MICRO_BATCHES:
            role.annotate(micro)
        note()
        return found


def make_counting(member: devices.Member) -> CountingMember:
    return CountingMember(member.rank, devices.SIZE)


FULL, SELECTIVE = Recompute("full"), Recompute("selective")
ONE_HEAD = {"num_key_value_heads": 1}
TENSOR_CASES = [
    (tensor.Case("qwen2", 2, tensor.UNEVEN, fused=True), Recompute("full", layers=2, method="uniform")),
]
TENSOR_MATRIX = [
    (tensor.Case("qwen3", 4, ONE_HEAD, adapters=tensor.ALL, fused=True), SELECTIVE),
    (tensor.Case("gemma2", 4, dtype="float32"), FULL),
    (tensor.Case("qwen2", 2, role="critic"), Recompute()),
    *[(tensor.Case(family, 2), FULL) for family in ("llama", "phi3", "qwen3-moe", "mixtral", "qwen2-moe", "gemma3", "granite", "smollm3")],
    *[(tensor.Case(family, 4), SELECTIVE) for family in ("qwen2", "qwen3", "llama-tied", "mixtral", "gemma2")],
    *[(tensor.Case(family, 4, ONE_HEAD, fused=fused), FULL) for family, fused in (("qwen2", True), ("qwen3", False), ("phi3", False))],
    (tensor.Case("llama", 2, tensor.BIASED, adapters=tensor.ALL, fused=True), Recompute("full", layers=1)),
    (tensor.Case("llama", 4, {**ONE_HEAD, **tensor.BIASED}), SELECTIVE),
    (tensor.Case("phi3", 4, adapters=("qkv_proj", "gate_up_proj", "o_proj", "down_proj")), FULL),
    (tensor.Case("qwen3-moe", 2, adapters=tensor.STACKED), FULL),
    (tensor.Case("qwen3-moe", 2, adapters=tensor.STACKED, whole_experts=True), FULL),
    (tensor.Case("mixtral", 4, whole_experts=True), SELECTIVE),
    (tensor.Case("cohere", 4, {"num_key_value_heads": 4}, options=tensor.PLAIN, entropy="value"), Recompute()),
    (tensor.Case("qwen2", 2, options=tensor.PLAIN, entropy="none"), Recompute()),
    (tensor.Case("qwen2", 4, options=HeadOptions(recompute=False)), Recompute()),
    (tensor.Case("qwen3-moe", 4, role="critic"), FULL),
]


def stream_of(micro: MicroBatch) -> Stream:
    return Stream(len(micro.ids), [range(place - 1, place) for place in micro.trained.tolist()])


@pytest.mark.parametrize(
    ("case", "recompute"),
    [*TENSOR_CASES, *(pytest.param(*each, marks=pytest.mark.matrix) for each in TENSOR_MATRIX)],
    ids=lambda given: str(given) if isinstance(given, tensor.Case) else f"{given.kind} {given.layers}",
)
def test_members_of_a_tensor_parallel_group_move_what_is_predicted(
    pool_of_devices: devices.Pool, case: tensor.Case, recompute: Recompute
) -> None:
    pool = devices.Guests(pool_of_devices, "test_traffic:make_counting")
    found = pool.start("count", [(case, recompute)] * pool.size, what="count").results()
    shape, itemsize = shape_of(tensor.build(case).config), getattr(torch, case.dtype).itemsize
    scores = case.role == "critic"
    learning: Reads = "value" if scores else "logprob" if case.entropy == "none" else "entropy"
    learned, scored = Counter[str](), Counter[str]()
    for stream in map(stream_of, tensor.MICRO_BATCHES):
        learns: Any = "adapters" if case.adapters else "all"
        learned += tensor_pass(shape, case.size, itemsize, stream, learning, learns=learns, recompute=recompute)
        scored += tensor_pass(shape, case.size, itemsize, stream, "value" if scores else "logprob", learns="none")
    assert [passes for passes, _, _ in found] == [learned] * pool.size
    assert [passes for _, _, passes in found] == [scored] * pool.size
    stacked = [name for name in case.adapters if name.startswith("experts.")]
    if case.adapters:
        linear = [name for name in case.adapters if name not in stacked]
        shared = shared_adapter_numbers(shape, case.size, 2, linear, stacked, whole_experts=case.whole_experts)
    elif shape.family:
        shared = shared_numbers(shape, case.size, score=shape.width + 1 if scores else 0)
    else:
        return  # a family whose parameters are not known without its weights
    assert [summed for _, summed, _ in found] == [{"all-reduce": shared * itemsize}] * pool.size


# ---- rollouts of members that sample together --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CountedRollout:
    """A rollout as one member sees it."""

    passes: list[PrefillPass | DecodePass]
    moved: dict[str, int]  # bytes that `Ranks.moved` counts
    sent: Counter[str]  # bytes of all tensors that went through torch.distributed
    lengths: list[int]  # tokens of each response
    stats: EngineStats


class CountingSampler(rollouts.RolloutWorker):
    """A member that tells what a rollout moves, in which passes."""

    def count(self, case: rollouts.Rollout) -> CountedRollout:
        made = self.split(case)
        layers, members = member_layers(rollouts.layers_of(tensor.build(case)), case.size), Members(made.ranks)
        context = EngineContext(made.model, rollouts.models.tokenizer(), frozenset({rollouts.END}), layers, case.limits, members)
        engine, passes, sent = NativeEngine(context), list[PrefillPass | DecodePass](), Counter[str]()
        moved = made.ranks.moved
        moved.clear()  # layers are compared when they are fused
        run, launch, advance = Runner.run, Decoder.launch, Decoder._advance

        def prefill(runner: Runner, step: Pass) -> torch.Tensor:
            passes.append(PrefillPass(sum(work.count for work in step.work), sum(bool(work.samples) for work in step.work)))
            return run(runner, step)

        def decode(decoder: Decoder, steps: int) -> Any:
            passes.append(DecodePass([]))
            return launch(decoder, steps)

        def step(decoder: Decoder, rows: Any, numbers: torch.Tensor, **sampling: Any) -> None:
            passes[-1].steps.append(len(numbers))  # type: ignore[union-attr]
            advance(decoder, rows, numbers, **sampling)

        def counted(kind: str, place: int, collective: Callable[..., Any]) -> Callable[..., Any]:
            def call(*tensors: Any, **group: Any) -> Any:
                sent[kind] += tensors[place].nbytes
                return collective(*tensors, **group)

            return call

        changes = [(Runner, "run", prefill), (Decoder, "launch", decode), (Decoder, "_advance", step)]
        changes += [(dist, "all_reduce", counted("all-reduce", 0, dist.all_reduce))]
        changes += [(tensor_parallel, "gather_into", counted("all-gather", 0, tensor_parallel.gather_into))]
        changes += [(tensor_parallel, "reduce_into", counted("reduce-scatter", 1, tensor_parallel.reduce_into))]
        with contextlib.ExitStack() as stack:
            for owner, name, own in changes:
                stack.enter_context(patch.object(owner, name, own))
            groups = collect(engine.generate, rollouts.prompts(), case.sampling, 5, lambda group: None)
        lengths = [len(sample.ids) for group in groups for sample in group.samples]
        return CountedRollout(passes, {kind: count for kind, count in moved.items() if count}, sent, lengths, engine.stats())


def make_sampler(member: devices.Member) -> CountingSampler:
    return CountingSampler(member.rank, devices.SIZE)


UNTIED = {"tie_word_embeddings": False}
ROLLOUTS = [
    rollouts.Rollout("qwen2", 2, rollouts.TIED, fused=True),
    rollouts.Rollout("gemma2", 2, limits=rollouts.TIGHT),
    rollouts.Rollout("qwen3-moe", 2, whole_experts=True),
]
ROLLOUT_MATRIX = [
    *[
        rollouts.Rollout(family, size, changes, limits=limits)
        for family, changes in (("qwen2", tensor.UNEVEN), ("qwen2", rollouts.TIED), ("gemma2", UNTIED), ("gemma2", {}), ("qwen3-moe", {}))
        for size in (2, 4)
        for limits in (rollouts.ROOMY, rollouts.TIGHT, rollouts.UNSHARED)
        if (family, size, changes, limits) != ("gemma2", 2, {}, rollouts.TIGHT)
    ],
    *[rollouts.Rollout(family, size, whole_experts=True) for family, size in (("qwen3-moe", 4), ("mixtral", 2), ("mixtral", 4))],
    *[rollouts.Rollout(family, 2) for family in ("llama", "phi3", "smollm3", "gemma3", "granite", "qwen2-moe", "cohere")],
    rollouts.Rollout("qwen3", 4, rollouts.ONE_KEY, sampling=rollouts.STOPS, limits=rollouts.TIGHT),
    rollouts.Rollout("qwen2", 2, limits=rollouts.WHOLE_PROMPTS, sampling=rollouts.GREEDY),
    rollouts.Rollout("qwen3", 2, dtype="float64", sampling=rollouts.RESTRICTED),
    rollouts.Rollout("llama", 2, rollouts.BIASED, adapters=rollouts.ALL),
]


@pytest.mark.parametrize("case", [*ROLLOUTS, *(pytest.param(each, marks=pytest.mark.matrix) for each in ROLLOUT_MATRIX)], ids=str)
def test_members_that_sample_together_move_what_is_predicted(pool_of_devices: devices.Pool, case: rollouts.Rollout) -> None:
    pool = devices.Guests(pool_of_devices, "test_traffic:make_sampler")
    shape, itemsize = shape_of(tensor.build(case).config), getattr(torch, case.dtype).itemsize
    for own in pool.start("count", [(case,)] * pool.size, what="count").results():
        expected = predict([], UNSHARDED, rollout=RolloutWork(shape, case.size, itemsize, [own.passes]))
        assert own.moved == expected
        assert own.sent == expected + Counter({"all-reduce": agreed_bytes(own.passes)})
        prefilled = sum(each.tokens for each in own.passes if isinstance(each, PrefillPass))
        decoded = sum(sum(each.steps) for each in own.passes if isinstance(each, DecodePass))
        assert prefilled == own.stats.prefill_tokens > 0
        if case.sampling != rollouts.STOPS:  # rows go on behind a stop string until the host looks
            assert decoded == own.stats.decode_tokens > 0
            assert own.stats.preemptions or decoded == sum(length - 1 for length in own.lengths)
        assert own.stats.preemptions or case.limits != rollouts.TIGHT or case.sampling == rollouts.GREEDY


def test_decoding_is_filled_up_to_the_batches_of_graphs() -> None:
    shape = Shape.named("7B")
    work = RolloutWork(shape, 4, 2, [[DecodePass([60, 60]), PrefillPass(30, 2)]], graphs=(32, 64, 96))
    row = shape.width * 2
    logits = 152064 * 4
    assert predict([], UNSHARDED, rollout=work) == {
        "all-reduce": 2 * 64 * 57 * row, "reduce-scatter": 32 * 57 * row, "all-gather": 32 * 57 * row + (2 * 64 + 2) * logits,
    }  # fmt: skip
    # Each step runs twice before it is captured, on empty rows, and members agree on whether it could be.
    captured = predict([], UNSHARDED, rollout=replace(work, captures=(64,)))
    assert captured["all-reduce"] - predict([], UNSHARDED, rollout=work)["all-reduce"] == 2 * 64 * 57 * row + 8
    # Of two groups, the one that moves most of a kind.
    two = replace(work, passes=[*work.passes, [PrefillPass(64, 1)]])
    assert predict([], UNSHARDED, rollout=two)["reduce-scatter"] == 64 * 57 * row
    assert agreed_bytes(work.passes[0]) == 8 + 8 + 8 * 3 and agreed_bytes(work.passes[0], graphs=True, looks=3) == 8 + 8 + 3 * 16


# ---- whole steps of models that are divided ----------------------------------------------------------------------------------------------

TENSOR = "train.tensor_parallel=2"
DIVIDED = {
    "tensor": ("llama-tied", 2, (TENSOR,)),
    "tensor, lora": ("qwen2", 2, (TENSOR, "lora.rank=4")),
    "tensor, ppo": ("qwen2", 2, (TENSOR, *PPO, "train.recompute=full")),
    "tensor, sequence": ("qwen2", 2, (TENSOR, TWO, "train.recompute=selective")),
    "tensor, sequence, ppo": ("qwen2", 2, (TENSOR, TWO, *PPO, "train.recompute=full")),
    "tensor, norms behind blocks": ("gemma2", 2, (TENSOR, "model.dtype=bfloat16")),
    "tensor, experts in parts": ("qwen3-moe", 2, (TENSOR,)),
    "tensor, whole experts": ("qwen3-moe", 2, (TENSOR, "train.expert_parallel=2")),
    "tensor, each samples": ("qwen2", 2, (TENSOR, "rollout.tensor_parallel=1")),
    "tensor, four sample": ("qwen2", 2, (TENSOR, "rollout.tensor_parallel=4")),
    "whole, two sample": ("qwen2", 2, ("rollout.tensor_parallel=2",)),
    "experts": ("qwen3-moe", 2, ("train.expert_parallel=2", "train.recompute=full")),
    "four experts": ("mixtral", 4, ("train.expert_parallel=4",)),
    "experts, bfloat16": ("qwen3-moe", 2, ("train.expert_parallel=2", "model.dtype=bfloat16", "train.recompute=selective")),
}
DIVIDED_QUICK = {("tensor", "optimizer", 2), ("experts", "optimizer", 4)}
DIVIDED_CASES = [
    (model, shard, workers)
    for model, (_, size, _) in DIVIDED.items()
    for shard in ("optimizer", "full")
    for workers in (2, 4)
    if (size * 2 if "sequence" in model or "four sample" in model else size) <= workers
    if (shard == "full") <= (workers > size or "tensor" not in model)
]
PROMPTS = [Prompt(uid, np.arange(3 + 10 * uid, 8 + 12 * uid), "") for uid in range(4)]  # of which none begins as another


def rollout_of_a_step(parts: RunParts, size: int) -> list[list[PrefillPass | DecodePass]]:
    """Make one, and tell the passes of each group of `size` workers from the responses: on a CPU its prompts go through one pass, and of
    each sample every token but the first takes a row of a decoding step."""
    with parts.crew.phase("rollout"):
        groups = sorted(parts.crew.generate(PROMPTS, Sampling(samples=2, max_new_tokens=6), 0), key=lambda group: group.prompt.uid)
    found, count = [], parts.crew.hosts.size // size
    for dealt in (groups[place::count] for place in range(count)):
        lengths = [len(sample.ids) for group in dealt for sample in group.samples]
        assert max(lengths) > 1
        found.append([PrefillPass(sum(len(group.prompt.ids) for group in dealt), len(dealt)), DecodePass([sum(lengths) - len(lengths)])])
    return found


@pytest.mark.parametrize(
    ("model", "shard", "workers"),
    [pytest.param(*case, marks=() if case in DIVIDED_QUICK else pytest.mark.matrix) for case in DIVIDED_CASES],
)
def test_workers_with_parts_of_models_move_what_is_predicted(
    pool_of_devices: devices.Pool, model_folders: ModelFolders, tmp_path: Path, model: str, shard: str, workers: int
) -> None:
    """A whole step, of its rollout too. Where routers decide what a worker sends, all workers together."""
    family, size, overrides = DIVIDED[model]
    folder = runs.make(tmp_path / "run", model_folders(family))
    in_layers, apart = TENSOR in overrides, model in ("experts", "four experts", "experts, bfloat16")
    members = size if in_layers else 1  # with a part of every layer, where it learns
    sampling = next((int(each[-1]) for each in overrides if each.startswith("rollout.")), members)
    with pool_of_devices.assembled(folder, 1, *EACH_ROW, *(each for each in overrides if "parallel" not in each)) as parts:
        learners: dict[str, Any] = {role: trainer.role.model for role, trainer in parts.worker.trainers.items()}
        parameters = {role: sizes_of_part(learner, overrides, size) for role, learner in learners.items()}
        itemsize = learners["actor"].dtype.itemsize
    with pool_of_devices.assembled(folder, workers, *EACH_ROW, *SHARDED[shard], *overrides) as parts:
        settings, before = parts.plan.roles, [Counter(own) for own in pool_of_devices.ask("note", "moved", ())[:workers]]
        shape = Shape.read(model_folders(family))
        rollout = RolloutWork(shape, sampling, itemsize, rollout_of_a_step(parts, sampling)) if sampling > 1 else None
        metrics = metrics_of_a_step(parts)
        after = [Counter(own) for own in pool_of_devices.ask("note", "moved", ())[:workers]]
    groups = workers // members
    sharding = Sharding(shard, groups, groups, experts=size if apart else 1)  # type: ignore[arg-type]
    sharing = settings["actor"].sequence_parallel
    work, dealing = [], DealtStreams(1, groups // sharing)
    lengths = [row.tokens for row in made_up_rows()]
    parts_of_engine = size if apart or (in_layers and sampling != members) else 1
    for role, own in parameters.items():
        recompute = Recompute(settings[role].recompute, settings[role].recompute_layers, settings[role].recompute_method)
        steps, scored = dealing.update(lengths), dealing.dealt(range(ROWS), lengths) if role == "actor" else []
        passes = sum(max(map(len, each)) for each in steps)
        updates = [[stream for each in steps for stream in each[place]] for place in range(groups // sharing)]
        phases = [max(map(len, scored))] if scored else []
        made = RoleWork(own, itemsize, UPDATES, passes, phases, synced=int(role == "actor"), parts=parts_of_engine)
        if in_layers:
            reads: Reads = "entropy" if role == "actor" else "value"
            learns: Any = "adapters" if "lora.rank=4" in overrides else "all"
            made = replace(made, tensor=TensorWork(shape, size, updates, scored, reads, recompute, learns))
            made = replace(made, sequence=SequenceWork(shape, sharing, updates, scored, reads, recompute)) if sharing > 1 else made
        elif apart:
            tokens = [[[ExpertPass(stream.tokens) for stream in each] for each in streams] for streams in (updates, scored)]
            made = replace(made, experts=ExpertWork(shape, *tokens, recompute))
        work.append(made)
    expected = predict(work, sharding, rollout=rollout)
    found = {kind: max(own[kind] - earlier[kind] for own, earlier in zip(after, before, strict=True)) for kind in expected}
    if not apart:
        assert found == expected
        assert communication(metrics) == {f"communication/{kind.replace('-', '_')}_bytes": count for kind, count in expected.items()}
        return
    kind = "all-to-all"
    assert {**found, kind: 0} == {**expected, kind: 0}
    sent = sum(own[kind] - earlier[kind] for own, earlier in zip(after, before, strict=True))
    each = [predict([replace(work[0], experts=alone(work[0].experts, rank))], sharding)[kind] for rank in range(workers)]
    assert sent == sum(each)


def alone(work: ExpertWork | None, rank: int) -> ExpertWork:
    """The work of one worker, as if all had the same."""
    assert work
    updates, scored = ([given[rank]] * len(given) for given in (work.updates, work.scored))
    return replace(work, updates=updates, scored=scored)


def sizes_of_part(model: Any, overrides: Sequence[str], size: int) -> tuple[ParameterSize, ...]:
    """The sizes of the first worker's part of a whole model, which learns."""
    in_layers, apart = TENSOR in overrides, any(each.startswith("train.expert_parallel") for each in overrides)
    if not (in_layers or apart):
        return parameter_sizes(model)
    table = slice_table(model, size, whole_experts=apart) if in_layers else expert_table(model, size)
    found = []
    for own, name in zip(parameter_sizes(model), ordered_names(model), strict=True):
        shape = table.cuts[name].shape(own.shape, 0)
        cut = shape != own.shape
        found.append(replace(own, shape=shape, cut=cut, apart=cut and not in_layers))
    return tuple(found)


def ordered_names(model: Any) -> list[str]:
    """The names of parameters in the order of `parameter_sizes`."""
    parameters = dict(model.named_parameters())
    trained = {name: own for name, own in parameters.items() if own.requires_grad and own.numel()}
    return [*(name for run in neighbours(trained) for name in run), *(name for name in parameters if name not in trained)]


class CountingExperts(experts.ExpertWorker):
    """A worker that tells what it sends, and how many rows it gets, in each pass."""

    def count(self, case: experts.ExpertCase, recompute: Recompute) -> tuple[list[int], list[list[int]]]:
        made, received, sent = self.split(case), list[list[int]](), list[int]()
        apply_recompute(made.model, recompute)
        run = ExpertExchange._run_own

        def counted(own: ExpertExchange, module: Any, rows: torch.Tensor, of_each: torch.Tensor) -> torch.Tensor:
            received[-1].append(len(rows))
            return run(own, module, rows, of_each)

        with patch.object(ExpertExchange, "_run_own", counted):
            for micro in case.stream(self.all[case.ranks].rank):
                received.append([])
                before = made.ranks.moved["all-to-all"]
                tensor.learn(made.model, case, [micro])
                sent.append(made.ranks.moved["all-to-all"] - before)
        return sent, received


def make_experts(member: devices.Member) -> CountingExperts:
    return CountingExperts(member.rank, devices.SIZE)


EXPERT_CASES = [
    (experts.ExpertCase("qwen3-moe", 2, workers=4), FULL),
    *[
        pytest.param(experts.ExpertCase(family, size, workers=4), recompute, marks=pytest.mark.matrix)
        for family in ("qwen3-moe", "mixtral", "qwen2-moe")
        for size in (2, 4)
        for recompute in (Recompute(), SELECTIVE, Recompute("full", layers=1))
    ],
]


@pytest.mark.parametrize(
    ("case", "recompute"), EXPERT_CASES, ids=lambda given: f"{given.kind} {given.layers}" if isinstance(given, Recompute) else str(given)
)
def test_what_a_worker_sends_follows_from_the_rows_that_come_to_it(
    pool_of_devices: devices.Pool, case: experts.ExpertCase, recompute: Recompute
) -> None:
    pool = devices.Guests(pool_of_devices, "test_traffic:make_experts")
    found = pool.start("count", [(case, recompute)] * pool.size, what="count").results()
    shape = shape_of(tensor.build(case).config)
    layers = [layer.experts for layer in shape.layers if layer.experts]
    for rank, (sent, received) in enumerate(found):
        for place, (micro, count, rows) in enumerate(zip(case.stream(rank), sent, received, strict=True)):
            of_layers = rows[: len(layers)]  # then those that are computed again, in another order
            expected = expert_pass(shape, 8, ExpertPass(len(micro.ids), of_layers), learns=True, recompute=recompute)
            assert expected == {"all-to-all": count}
            members = range(rank - rank % case.size, rank - rank % case.size + case.size)
            tokens = sum(len(case.stream(member)[place].ids) for member in members)
            assert all(own <= most_received(layer, case.size, tokens) for own, layer in zip(of_layers, layers, strict=True))
