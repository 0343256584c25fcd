"""What workers hold, and what their collectives move, is what one function predicts, to the byte."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import devices
import numpy as np
import pytest
import runs
import test_tensor_parallel as tensor
import torch

from fulltilt.bench import scaling
from fulltilt.cluster import sizes
from fulltilt.cluster.assembly import RunParts
from fulltilt.cluster.making import decided
from fulltilt.cluster.sizes import parameter_sizes
from fulltilt.parallel.holdings import held_bytes, twin_bytes
from fulltilt.parallel.layout import UNSHARDED, ParameterSize, Sharding
from fulltilt.parallel.ranks import Ranks
from fulltilt.model.load import shape_of
from fulltilt.parallel.traffic import (
    Reads,
    RoleWork,
    SequenceWork,
    Stream,
    predict,
    sent_bytes,
    shared_adapter_numbers,
    shared_numbers,
    tensor_pass,
)
from fulltilt.plan import Facts, loading_order
from fulltilt.records import MicroBatch, Row
from fulltilt.schema import Config
from fulltilt.shape import SHAPES, Recompute, Shape
from fulltilt.training.roles import Critic, Policy
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
QUICK = {("tied", "optimizer", 2), ("lora", "full", 3), ("ppo", "hybrid", 4)}
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
        if parts.crew.hosts.size > 1:
            assert 0 < updated[f"timing_s/workers/update_{role}/mean"] <= updated[f"timing_s/workers/update_{role}/max"]
    with parts.crew.phase("old-logprob"):
        parts.crew.annotate("actor", "old_logprobs", made_up_rows(), lambda done, total: None)
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


@pytest.mark.parametrize(("shard", "workers"), [("full", 3), ("hybrid", 4)])
def test_roles_are_shared_out_one_by_one_as_they_are_loaded(
    pool_of_devices: devices.Pool, model_folders: ModelFolders, tmp_path: Path, shard: str, workers: int
) -> None:
    """And the plan knows what is there at each moment. The reference is the largest, and comes first; the actor, which stays, last."""
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
    assert list(found) == list(predicted) and list(found)[-1] == "actor" and len(found) == 3
    before = 0
    for role, counted in found.items():
        held, whole = facts[role].held(sharding).parameters, facts[role].parameter_bytes
        assert counted["whole"] == before + whole  # of no other role are whole parameters left
        assert counted["most"] <= predicted[role] <= counted["most"] + held  # the shards of a unit beside its whole parameters
        assert counted["shared"] == before + held + (whole if role == "actor" else 0)
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
    found = sizes.find_sharding(given, ["actor", "ref"], cuda, ranks, sampled=True)
    assert (found.shard, found.workers, found.group) == (shard, 16, 8 if shard == "hybrid" else 16)
    assert "of each device's" in found.why
    made = decided(given, found).train
    assert (made.shard, made.shard_size) == (shard, 8 if shard == "hybrid" else None)
    explicit = config(SHAPES["32B"], shard="hybrid", shard_size=2)
    of_critic = sizes.find_sharding(explicit, ["critic"], cuda, Ranks(0, 4, beside=4, after=4), sampled=False)
    assert of_critic == Sharding("hybrid", 4, 2)
    few = config(SHAPES["32B"], shard="hybrid", shard_size=8)
    of_critic = sizes.find_sharding(few, ["critic"], cuda, Ranks(0, 4, beside=4, after=4), sampled=False)
    assert of_critic == Sharding("full", 4, 4)  # fewer than a group of the actor's has: they are one
    for before, expected in ((8, shard), (4, "full" if shard == "hybrid" else shard)):  # from the first worker of a machine, or not
        found = sizes.find_sharding(given, ["actor", "ref"], cuda, Ranks(5, 16, beside=8, before=before), sampled=True)
        assert (found.shard, found.workers, found.group) == (expected, 16, 8 if expected == "hybrid" else 16)
    compiled = config(SHAPES["32B"], compile=True)
    assert sizes.find_sharding(compiled, ["actor"], cuda, ranks, sampled=True).why == "train.compile is set"
    strange = config({**SHAPES["32B"], "model_type": "cohere"})
    assert "not known before it is loaded" in sizes.find_sharding(strange, ["actor"], cuda, ranks, sampled=True).why
    assert sizes.find_sharding(given, [], cuda, ranks, sampled=True) == Sharding("optimizer", 16, 16)  # nothing learns


def test_large_models() -> None:
    large = (ParameterSize((7 * 10**9,), 2),)
    one = predict([RoleWork(large, 2, batches=3)], Sharding(workers=8, group=8))
    assert one == {"all-gather": 3 * 14e9, "reduce-scatter": 3 * 28e9, "all-reduce": 3 * 12}
    assert predict([RoleWork(large, 2, batches=3)], UNSHARDED) == {}
    assert sent_bytes(Counter({"all-gather": 800, "reduce-scatter": 80, "all-reduce": 8}), 8) == 700 + 70 + 14


def test_the_page_shows_the_tables_that_the_command_prints() -> None:
    page = (Path(__file__).parents[1] / "docs" / "scaling.md").read_text()
    assert "\n".join(scaling.table()) in page
    assert "\n".join(scaling.rows_table()) in page


# ---- tensor parallelism ------------------------------------------------------------------------------------------------------------------


class CountingMember(tensor.TensorWorker):
    """A member of a tensor-parallel group that tells what its collectives move."""

    def count(self, case: tensor.Case) -> list[dict[str, int]]:
        """In passes with gradient over all micro-batches, in one sum of shared gradients, and in passes without gradient."""
        made = self.split(case)
        moved, found = made.ranks.moved, []

        def note() -> None:
            found.append({kind: count for kind, count in moved.items() if count})
            moved.clear()

        gradients = tensor.learn(made.model, case).gradients
        note()
        made.sum_shared({name: torch.from_numpy(gradient) for name, gradient in gradients.items()})
        note()
        role = Critic("critic", made.model) if case.role == "critic" else Policy("actor", made.model, 0.8, options=case.options)  # type: ignore[arg-type]
        for micro in tensor.MICRO_BATCHES:
            role.annotate(micro)
        note()
        return found


def make_counting(member: devices.Member) -> CountingMember:
    return CountingMember(member.rank, devices.SIZE)


def stream_of(micro: MicroBatch) -> Stream:
    return Stream(len(micro.ids), [range(place - 1, place) for place in micro.trained.tolist()])


def named(case: tensor.Case) -> tuple[tensor.Case, str]:
    return case, str(case)


COUNTED = [
    tensor.Case("qwen2", 2, tensor.UNEVEN, fused=True),
    tensor.Case("gemma2", 4, recompute="full", dtype="float32"),
    tensor.Case("qwen3", 4, {"num_key_value_heads": 1}, adapters=tensor.ALL, recompute="full"),
]


@pytest.mark.parametrize("case", [*COUNTED, *(pytest.param(case, marks=pytest.mark.matrix) for case in [*tensor.SHORT, *tensor.MATRIX])], ids=str)
def test_members_of_a_tensor_parallel_group_move_what_is_predicted(pool_of_devices: devices.Pool, case: tensor.Case) -> None:
    pool = devices.Guests(pool_of_devices, "test_traffic:make_counting")
    shape, itemsize, streams = shape_of(tensor.build(case).config), getattr(torch, case.dtype).itemsize, [*map(stream_of, tensor.MICRO_BATCHES)]
    reads: Reads = "value" if case.role == "critic" else "logprob" if case.entropy == "none" else "entropy"
    recompute = Recompute(case.recompute)  # type: ignore[arg-type]
    learned, scored = Counter[str](), Counter[str]()
    for stream in streams:
        learned += tensor_pass(shape, case.size, itemsize, stream, reads, learns="adapters" if case.adapters else "all", recompute=recompute)
        scored += tensor_pass(shape, case.size, itemsize, stream, "value" if case.role == "critic" else "logprob", learns="none")
    stacked = [name for name in case.adapters if name.startswith("experts.")]
    if case.adapters:
        shared = shared_adapter_numbers(shape, case.size, 2, [name for name in case.adapters if name not in stacked], stacked)
    else:
        shared = shared_numbers(shape, case.size, score=shape.width + 1 if case.role == "critic" else 0) if shape.family else None
    for found in tensor.call(pool, "count", case):
        assert found[0] == learned
        assert shared is None or found[1] == {"all-reduce": shared * itemsize}
        assert found[2] == scored
