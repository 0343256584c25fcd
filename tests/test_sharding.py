"""Parameters that workers share out: the gradient, the checkpoints and the memory, with real processes over gloo.

The four processes of the pool of workers serve all (tests/devices.py): cases with two workers run twice in it, in both halves.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import devices
import numpy as np
import pytest
import runs
import torch
from shard_worker import Case, Trained, restore
from variants import sample_cases

from fulltilt.batching.pack import MicroSizing, minibatch
from fulltilt.observe.console import Console
from fulltilt.parallel.exchange import CommonRange, copy_all, spread
from fulltilt.parallel.layout import RowLayout
from fulltilt.plan.legal import wrong_sharing
from fulltilt.records import MiniBatch, Row
from fulltilt.schema import Config

LAYERS = 2
Folders = Callable[[str], Path]


@pytest.fixture
def pool(pool_of_devices: devices.Pool) -> devices.Guests:
    return devices.Guests(pool_of_devices, "shard_worker:make")


def call(pool: devices.Guests, method: str, *args: Any) -> list[Any]:
    return pool.start(method, [args] * pool.size, what=method).results()


def one_batch() -> MiniBatch:
    """Six micro-batches."""
    random = np.random.default_rng(0)
    rows = []
    for length in (9, 17, 30, 12, 25, 8):
        numbers = {name: random.normal(size=length).astype(np.float32) for name in ("advantages", "values", "returns")}
        logprobs = {f"{name}_logprobs": (random.normal(size=length) - 4).astype(np.float32) for name in ("rollout", "old", "ref")}
        rows.append(Row(random.integers(3, 90, length), np.arange(length) >= 4, **numbers, **logprobs))
    found = minibatch(rows, "token-mean", 1, MicroSizing(token_budget=1))
    assert len(found.micro_batches) == 6
    return found


def dealt(counts: tuple[int, ...]) -> list[MiniBatch]:
    """One worker has many micro-batches, another few or none."""
    batch, borders = one_batch(), [0, *itertools.accumulate(counts)]
    return [replace(batch, micro_batches=batch.micro_batches[start:stop]) for start, stop in itertools.pairwise(borders)]


COUNTS = {2: (5, 1), 4: (3, 1, 0, 2)}


def put_together(found: list[dict[str, tuple[int, np.ndarray]]]) -> dict[str, np.ndarray]:
    """Whole tensors from the parts of workers; workers that have the same part agree bit for bit."""
    parts: dict[str, dict[int, np.ndarray]] = {}
    for name, (start, numbers) in (pair for own in found for pair in own.items()):
        other = parts.setdefault(name, {}).setdefault(start, numbers)
        assert np.array_equal(other, numbers), name
    return {name: np.concatenate([own[start] for start in sorted(own)]) for name, own in parts.items()}


def assert_near(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> None:
    assert found.keys() == expected.keys() and found
    size = max(float(np.abs(numbers).max()) for numbers in expected.values())
    assert size > 1e-4
    for name, numbers in expected.items():
        assert numbers.shape == found[name].shape and float(np.abs(found[name] - numbers).max()) <= tolerance * size, name


WAYS = [("full", 2), ("full", 4), ("hybrid", 4)]
CASES = [
    *[("qwen2", {}, *way) for way in WAYS],
    *[("llama-tied", {}, *way) for way in WAYS[:1]],
    *[("qwen3-moe", {}, *way) for way in WAYS[1:]],
    *[("qwen2", {"role": "critic"}, *way) for way in WAYS[1:]],
    *[("qwen2", {"adapters": True}, *way) for way in WAYS[1:]],
    ("qwen2", {"fused": True, "offloads": True}, "full", 4),
    ("qwen2", {"fused": True}, "hybrid", 4),
    ("qwen3", {"fused": True, "adapters": True, "recompute": "full"}, "full", 4),
    ("qwen2", {"fused": True, "role": "critic", "recompute": "selective", "offloads": True}, "hybrid", 4),
]


SHORT = (CASES[0], CASES[3], CASES[5], CASES[9], *CASES[-2:])  # tied weights, experts, adapters, and most settings at once


@pytest.mark.parametrize(
    ("family", "kind", "shard", "workers"),
    sample_cases(CASES, *SHORT[1:-1:2], SHORT[-1], long=SHORT),
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_the_gradient_is_that_of_one_process(
    pool: devices.Guests, model_folders: Folders, family: str, kind: dict[str, Any], shard: str, workers: int
) -> None:
    case = Case(model_folders(family), workers, shard, **kind)
    alone = Trained.of(replace(case, workers=1, shard="optimizer"))
    sums = alone.trainer.accumulate(one_batch())
    expected = {name: numbers for name, (_, numbers) in alone.gradients().items()}
    found = call(pool, "gradient", case, dealt(COUNTS[workers]))
    assert_near(put_together([each["gradients"] for each in found]), expected, 1e-9)
    first = alone.trainer.role.annotate(one_batch().micro_batches[0]).numpy()
    for each in found:
        assert np.allclose(each["annotated"], first, rtol=1e-6)  # in float32
    together = found[0]["sums"]
    for each in found[1:workers]:
        together += each["sums"]
    metrics, same = (each.metrics(one_batch().trained_tokens, silent=False) for each in (together, sums))
    assert metrics == pytest.approx(same, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(("shard", "workers"), sample_cases(WAYS, ("full", 2), ("hybrid", 4)))
def test_a_worker_holds_its_part_and_moves_what_is_predicted(
    pool: devices.Guests, model_folders: Folders, shard: str, workers: int, reshard: bool
) -> None:
    case = Case(model_folders("qwen2"), workers, shard, knobs={"reshard_after_forward": reshard})
    found, group = call(pool, "gradient", case, dealt(COUNTS[workers])), 2 if shard == "hybrid" else workers
    model: Any = Trained.of(replace(case, workers=1, shard="optimizer")).trainer.role.model  # type: ignore[attr-defined]
    layout = RowLayout({name: tuple(parameter.shape) for name, parameter in model.named_parameters()}, group)
    for rank, each in enumerate(found):
        own = sum(layout.own(name, rank % group).stop - layout.own(name, rank % group).start for name in layout.shapes)
        assert each["parameters"] == each["accumulated"] == own < 0.6 * sum(p.numel() for p in model.parameters())
        passes, number = max(COUNTS[workers]), torch.float64.itemsize
        assert 0 <= each["states"] - 2 * own * number < 2 * 256 * len(layout.shapes)  # each is aligned
        of_layers = sum(layout.width(name) for name in layout.shapes if ".layers." in name)
        gathered = (2 if reshard else 1) * of_layers + layout.stretch - of_layers
        assert each["moved"]["all-gather"] == passes * group * gathered * number
        assert each["moved"]["reduce-scatter"] == passes * group * layout.stretch * number
        over_groups, count = passes * layout.stretch * number if shard == "hybrid" else 0, torch.int64.itemsize
        assert each["moved"]["all-reduce"] == over_groups + count  # the workers agree on the number of passes first


@pytest.mark.parametrize(("role", "shard"), [("actor", "full"), ("critic", "hybrid")])
def test_shards_leave_the_device_and_a_role_without_them_is_refused(
    pool: devices.Guests, model_folders: Folders, role: str, shard: str
) -> None:
    case = Case(model_folders("qwen2"), 4, shard, role=role)
    for found in call(pool, "away", case, one_batch().micro_batches[0]):
        here, away, back = found["bytes"]
        assert here == back <= found["host"] and away == 0 < here
        assert len(found["said"]) == 2 and all("on the host" in said for said in found["said"])  # a pass, and a checkpoint
        assert np.array_equal(*found["numbers"])


PREFETCHED = ("gather outside", "gather 0", "gather 1", "run 0", "run 1")
IN_TURN = ("gather outside", "gather 0", "run 0", "gather 1", "run 1")


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_layer_is_gathered_before_the_one_ahead_of_it_computes(pool: devices.Guests, model_folders: Folders, prefetch: bool) -> None:
    case = Case(model_folders("qwen2"), 4, "full", knobs={"forward_prefetch": prefetch})
    for trace in call(pool, "trace", case, dealt((1, 1, 1, 1))):
        assert trace.events[:5] == (PREFETCHED if prefetch else IN_TURN) and trace.ahead == int(prefetch)
        assert sorted(trace.events[5:]) == ["gather 0", "gather 1"]  # for the backward pass
        assert trace.whole_bytes == 0


@pytest.mark.parametrize(
    ("shard", "adapters"), sample_cases([("full", False), ("hybrid", False), ("full", True)], ("full", True), long=[("hybrid", False)])
)
def test_what_four_workers_saved_others_go_on_from(
    pool: devices.Guests, model_folders: Folders, tmp_path: Path, shard: str, adapters: bool
) -> None:
    """In bfloat16: shards are the masters, rounded for the twin."""
    case = Case(model_folders("qwen2"), 4, shard, dtype="bfloat16", adapters=adapters)
    found = call(pool, "train", case, dealt(COUNTS[4]), tmp_path)
    saved = put_together([each["numbers"] for each in found])
    assert len({tuple(each["norms"]) for each in found}) == 1  # to the bit, or groups would clip differently
    files = [f"trainer-0000{rank}-of-00004.safetensors" for rank in range(4)]
    for each in found:
        assert each["stale"] and each["current"] and each["copy is the same"]
        for name, values in each["twin"].items():
            master = saved.get(f"master/{name}")
            rounded = None if master is None else torch.from_numpy(master).float().bfloat16().double().numpy()
            assert rounded is None or np.array_equal(values.flatten(), rounded)
    for other in (Case(case.folder, 2, "optimizer"), Case(case.folder, 2, "full"), Case(case.folder, 4, "hybrid")):
        other = replace(other, dtype="bfloat16", adapters=adapters)
        assert_near(put_together([each["numbers"] for each in call(pool, "resume", other, tmp_path, files)]), saved, 0)
    alone = Trained.of(replace(case, workers=1, shard="optimizer"))
    restore(alone, tmp_path, files)
    assert_near({name: numbers for name, (_, numbers) in alone.numbers().items()}, saved, 0)


def test_groups_have_the_deadline_of_the_run(pool: devices.Guests) -> None:
    """Not torch's own: 10 minutes with NCCL, 30 with gloo."""
    assert call(pool, "deadlines", 77.0) == [{77.0}] * pool.size


@pytest.mark.parametrize(("count", "workers"), [(12, 4), (10, 4), (5, 4), (3, 4), (1, 2)])
def test_rows_of_workers_make_a_whole_parameter(count: int, workers: int) -> None:
    """Windows of any length, of a parameter whose last workers have fewer numbers or none."""
    each, expected = -(-count // workers), torch.arange(count)
    rows = torch.full((workers, each), -1)
    rows.view(-1)[:count] = expected
    for width in range(1, each + 1):
        found = torch.full((count,), -2)
        for first in range(0, each, width):
            copy_all(spread(rows[:, first : first + width], first, (count,), [[CommonRange(0, 0, count)]], found))
        assert torch.equal(found, expected)


# -- what is refused --------------------------------------------------------------------------------------------------------------------


def config(workers: int, **train: Any) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}, "train": train, "cluster": {"workers": workers}})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"workers": 1, "shard": "full"}, 'train.shard: "full", but the one worker of the run has no other'),
        ({"workers": 4, "shard": "hybrid", "shard_size": 3}, "train.shard_size: 3 does not divide the 4 workers .* Use 2 or 4"),
        (
            {"workers": 4, "shard": "hybrid", "shard_size": 1},
            "train.shard_size: a group of one worker has no other to share parameters with",
        ),
        ({"workers": 2, "shard": "full", "offload_grads": True}, "train.offload_grads: true is not available with"),
        ({"workers": 2, "shard": "full", "compile": True}, "train.compile: true is not available"),
        (
            {"workers": 2, "shard": "full", "recompute": "full", "recompute_method": "uniform", "recompute_layers": 2},
            'train.recompute_method: "uniform" is not available with train.shard = "full": 2 layers would be recomputed together',
        ),
    ],
)
def test_what_does_not_go_with_shared_parameters_is_refused(settings: dict[str, Any], said: str) -> None:
    (found,) = wrong_sharing(config(**settings), "cpu")
    assert re.search(said, found)


def test_what_goes_together_is_not_refused() -> None:
    for settings in (
        {"shard": "optimizer"},
        {"shard": "full", "recompute": "full", "fused_layers": True, "offload_activations": True},
        {"shard": "hybrid", "shard_size": 2, "offload_params": True, "offload_optimizer": True},
    ):
        assert not list(wrong_sharing(config(4, **settings), "cpu"))


def test_workers_of_all_machines_count() -> None:
    for workers, settings in ((4, {"shard": "hybrid", "shard_size": 8}), (1, {"shard": "full"})):
        found = config(workers, **settings)
        on_two = found.model_copy(update={"cluster": found.cluster.model_copy(update={"nodes": 2})})
        assert list(wrong_sharing(found, "cpu")) and not list(wrong_sharing(on_two, "cpu"))


# -- whole runs -------------------------------------------------------------------------------------------------------------------------

COMPARED = ("train/", "actor/", "critic/", "reward/", "response_length/", "val")
OF_WORKERS = ("micro_batches", "pad_tokens", "load_spread")


def assert_near_runs(one: Path, other: Path) -> None:
    """The metrics that do not depend on workers."""
    for line, same in zip(runs.metrics(one), runs.metrics(other), strict=True):
        chosen = [name for name in same if name.startswith(COMPARED) and not name.endswith(OF_WORKERS)]
        assert chosen and line["step"] == same["step"]
        assert {name: line[name] for name in chosen} == pytest.approx({name: same[name] for name in chosen}, rel=1e-3, abs=1e-5)


@pytest.mark.long
def test_a_run_is_that_of_one_process_and_goes_on_with_other_workers(
    model_folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PPO: the actor with its twin, a critic and a reference, on four workers, then on two that share out the optimizer alone."""
    monkeypatch.setenv("FULLTILT_SHARE_DEVICES", "1")
    alone, shared = (runs.make(tmp_path / name, model_folders("qwen2")) for name in ("alone", "shared"))
    ppo = ("algorithm.name=ppo", "run.save_every=3", "run.eval_every=3", "train.fused_layers=true")
    runs.train(alone, *ppo, "run.steps=3")  # the schedule ends with the run
    said = runs.train(shared, *ppo, "run.steps=3", "cluster.workers=4", "train.shard=hybrid", "train.shard_size=2", "cluster.stall_s=300")
    assert_near_runs(shared, alone)
    assert (
        said.said.count("joined products; outside rollouts one by one, because train.shard is hybrid (actor)") == 1
    )  # others are never whole, nor joined
    runs.train(shared, *ppo, "run.steps=4", "cluster.workers=2", "train.shard=optimizer", "cluster.stall_s=300")
    assert runs.metrics(shared)[-1]["step"] == 4


@pytest.mark.long
def test_ctrl_c_among_passes_that_gather_saves_the_last_whole_step(
    pool_of_devices: devices.Pool, model_folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that stopped by itself would leave the others waiting for its part of the parameters."""
    expected, folder = (runs.make(tmp_path / name, model_folders("qwen2")) for name in ("expected", "folder"))
    # Many micro-batches, and not equally many on both workers.
    settings = ("run.steps=2", "run.save_every=0", "run.keep=1", "run.eval_every=0", "run.eval_before=false", "train.shard=full")
    settings += ("train.balance=false", "algorithm.minibatches_per_step=2", "ref.forward_token_budget=16")
    pool_of_devices.train(expected, 2, *settings)
    progress = Console.phase_progress

    def interrupting(console: Console, done: int, total: int) -> None:
        progress(console, done, total)
        if console._step == 2 and console._running[-1] == "ref-logprob" and done == 1:
            assert total > 3
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Console, "phase_progress", interrupting)
        trained, _ = pool_of_devices.train(folder, 2, *settings)
    assert trained.summary.interrupted and trained.summary.steps == 1
    pool_of_devices.train(folder, 2, *settings)
    runs.assert_equal_runs(folder, expected)
