"""Several workers compute what one process computes: samples, losses, gradients, checkpoints; and what happens where one of them fails.

Workers are real, in the processes of a pool that all tests share (tests/devices.py); where a test kills, they are those of a real command.
Comparisons are in float64, where only the order of sums tells runs apart: a wrong weight or a forgotten worker shows at once. One worker's
numbers are the reference.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import devices
import forked
import models
import numpy as np
import pytest
import runs
from safetensors.torch import load_file
from test_processes import running
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from fulltilt.cluster.hosts import WorkerDied, WorkerError, WorkerStuck
from fulltilt.memory.account import HeldBytes, Reading
from fulltilt.plan import legal
from fulltilt.plan.legal import why_not_offloaded
from fulltilt.records import Row, UserError
from fulltilt.training.checkpoint import CheckpointStore

ModelFolders = Callable[[str], Path]
Pool = devices.Pool

TOLERANCE = 1e-9  # largest difference of gradients, relative to the largest gradient
LOSSES = ("actor/pg_loss", "actor/kl_loss", "critic/vf_loss", "train/loss", "val/loss")
DOUBLE = "model.dtype=float64"
QUIET = ("run.eval_before=false", "run.eval_every=0")
ONE_STEP = (DOUBLE, *QUIET, "run.steps=1", "run.save_every=0")
# What depends on how samples are dealt out among engines and rows among workers. All other metrics must agree.
DEALT = (
    *runs.CLOCK, "rollout/passes", "rollout/most_running", "rollout/most_waiting", "rollout/mean_running", "rollout/kv_use",
    "rollout/mean_kv_use", "rollout/prefix_hit_rate", "rollout/prefill_tokens", "actor/micro_batches", "critic/micro_batches",
    "actor/load_spread", "critic/load_spread", "actor/pad_tokens", "actor/forward_pad_tokens", "ref/forward_pad_tokens", "perf/max_memory",
    "communication/",
)  # fmt: skip

PPO, LORA = ("algorithm.name=ppo", "algorithm.kl_coef=0.05"), "lora.rank=4"
# What depends on all tokens of a mini-batch or of a step, or needs numbers of its own: marks, weights that are normalised, a second pass.
CHOSEN = (
    "algorithm.loss=kl_cov", "algorithm.cov_share=0.1", "algorithm.advantage=optimal_token_baseline", "algorithm.epochs=2",
    "algorithm.importance_level=sequence-normalized",
    'algorithm.rejection=["token_k1", "seq_mean_k3"]', "algorithm.rejection_bounds=[2,0.1]",
)  # fmt: skip
# name: (model, tables, settings)
CASES: dict[str, tuple[str, Mapping[str, Any], tuple[str, ...]]] = {
    "dense": ("qwen2", runs.GRPO, ()),
    "tied": ("llama-tied", runs.GRPO, ("algorithm.kl_coef=0",)),
    "experts": ("qwen3-moe", runs.GRPO, ()),
    "lora": ("qwen2", runs.GRPO, (LORA,)),
    "ppo": ("qwen2", runs.GRPO, PPO),
    "qwen3": ("qwen3", runs.GRPO, ("algorithm.kl_coef=0", "algorithm.aggregation=seq-mean-token-mean")),
    "recompute": ("qwen2", runs.GRPO, ("train.recompute=full",)),
    "padded": ("qwen2", runs.GRPO, ("train.packing=false", "train.balance=false")),
    "micro-batches": ("qwen2", runs.GRPO, ("actor.dynamic_batch=false", "actor.micro_batch=3", "algorithm.epochs=2")),
    "sft": ("qwen2", runs.SFT, ()),
    "chosen": ("qwen2", runs.GRPO, CHOSEN),
    "drawn": (
        "qwen2",
        runs.GRPO,
        ("algorithm.loss=clip_cov", "algorithm.cov_share=0.05", "algorithm.cov_low=0", "algorithm.advantage=opo"),
    ),
    "ppo-experts": ("qwen3-moe", runs.GRPO, PPO),
    "ppo-lora": ("qwen2", runs.GRPO, (*PPO, LORA, "lora.critic=true")),
}
SHARDS: dict[str, tuple[str, ...]] = {
    "optimizer": (),  # the default
    "full": ("train.shard=full",),
    "hybrid": ("train.shard=hybrid", "train.shard_size=2"),
}
WAYS = [("optimizer", 2), ("optimizer", 4), ("full", 2), ("full", 4), ("hybrid", 4)]
# Which of them run always, and which in make check; the others run in make check-all. PPO with roles apart: test_role_workers.py.
SHORT = {("dense", "optimizer", 2), ("experts", "optimizer", 4), ("ppo", "full", 2)}
LONG = {
    ("experts", "full", 4),
    ("lora", "full", 2),
    ("tied", "hybrid", 4),
    ("ppo", "hybrid", 4),
    ("sft", "full", 4),
    ("chosen", "full", 2),
    *((case, "optimizer", 2) for case in ("micro-batches", "drawn")),
    *((case, "optimizer", 4) for case in ("lora", "padded")),
}


def differ(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """The largest difference, relative to the largest number."""
    assert found.keys() == expected.keys()
    largest = max(float(np.abs(numbers).max()) for numbers in expected.values())
    return max(float(np.abs(found[name].reshape(-1) - expected[name].reshape(-1)).max()) for name in expected) / (largest or 1.0)


def assert_same_gradients(found: devices.Noted, expected: devices.Noted, tolerance: float = TOLERANCE) -> float:
    assert found.gradients.keys() == expected.gradients.keys()
    largest = 0.0
    for role, steps in expected.gradients.items():
        assert len(steps) == len(found.gradients[role]) > 0
        largest = max(largest, *(differ(*pair) for pair in zip(found.gradients[role], steps, strict=True)))
    assert largest < tolerance
    return largest


def assert_same_metrics(found: Path, expected: Path, tolerance: float = 1e-6, absolute: float = 1e-9, *, rounds: bool = False) -> None:
    """Losses must agree to 1e-9, unless the model `rounds`: its routers or norms of heads compute in float32 whatever its type, and
    workers that divide them sum in another order. Other metrics, some of which are float32 too, must agree to within `tolerance`, or
    `absolute` near zero."""
    mine, theirs = (
        [{name: value for name, value in line.items() if not name.startswith(DEALT)} for line in runs.metrics(each)]
        for each in (found, expected)
    )
    assert [line.keys() for line in mine] == [line.keys() for line in theirs]
    for one, other in zip(mine, theirs, strict=True):
        assert one == pytest.approx(other, rel=tolerance, abs=absolute)
        losses = [{name: value for name, value in line.items() if name in LOSSES} for line in (one, other)]
        assert rounds or losses[0] == pytest.approx(losses[1], rel=TOLERANCE, abs=1e-12)


def assert_same_run(
    pool: Pool, folder: Path, workers: int, expected: Path, *overrides: str, absolute: float = 1e-9, rounds: bool = False
) -> devices.Noted:
    """`absolute` and `rounds`: as `assert_same_metrics` takes them."""
    _, noted = pool.train(folder, workers, *overrides)
    assert runs.contents(folder / "run" / "rollouts") == runs.contents(expected / "run" / "rollouts")  # tokens, texts and scores
    assert_same_metrics(folder, expected, absolute=absolute, rounds=rounds)
    assert len(set(noted.digests)) == 1, "the workers' parameters differ"
    for weights, whole in zip(noted.sampled_from, noted.parameters, strict=True):
        assert weights is None or same_bits(weights, whole), "the engine has other weights than the trainer"
    return noted


# -- one step ------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, devices.Noted]]:
    """One step of each case in one process."""
    return devices.run_once(pool_of_devices, CASES, ONE_STEP, model_folders, tmp_path_factory)


def marks_of(case: str, shard: str, workers: int) -> list[pytest.MarkDecorator]:
    if (case, shard, workers) in SHORT:
        return []
    return [pytest.mark.long if (case, shard, workers) in LONG else pytest.mark.matrix]


@pytest.mark.parametrize(
    ("case", "shard", "workers"),
    [pytest.param(case, *way, marks=marks_of(case, *way), id=f"{case}-{way[0]}-{way[1]}") for case in CASES for way in WAYS],
)
def test_one_step_has_the_samples_losses_and_gradients_of_one_process(
    pool_of_devices: Pool, alone: Callable[[str], tuple[Path, devices.Noted]], model_folders: ModelFolders, tmp_path: Path,
    case: str, shard: str, workers: int,
) -> None:  # fmt: skip
    family, tables, overrides = CASES[case]
    expected_folder, expected = alone(case)
    folder = runs.make(tmp_path / "folder", model_folders(family), tables)
    noted = assert_same_run(pool_of_devices, folder, workers, expected_folder, *ONE_STEP, *overrides, *SHARDS[shard])
    assert {len(group) for group in noted.groups} == {{"optimizer": 1, "full": workers, "hybrid": 2}[shard]}
    assert noted.gradients.keys() == ({"actor", "critic"} if "ppo" in case else {"actor"})
    largest = assert_same_gradients(noted, expected)
    print(f"{case}, {shard}, {workers} workers: largest difference of gradients {largest:.1e}")
    assert differ(noted.parameters[0], expected.parameters[0]) < 1e-6
    assert_times_of_workers(runs.metrics(folder)[-1])
    assert not any(name.startswith("timing_s/workers/") for name in runs.metrics(expected_folder)[-1])


def assert_times_of_workers(line: dict[str, float]) -> None:
    """For every phase that the step had in which several workers compute, of the slowest one and on average."""
    phases = [name for name in ("gen", "old_log_prob", "ref", "values", "update_actor", "update_critic") if f"timing_s/{name}" in line]
    for name in phases:
        assert 0 < line[f"timing_s/workers/{name}/mean"] <= line[f"timing_s/workers/{name}/max"] <= line[f"timing_s/{name}"]
    assert ("gen" in phases) == ("rollout/time_spread" in line) and line.get("rollout/time_spread", 1) >= 1


# -- shards that are not on the device all the time ---------------------------------------------------------------------------------------

AWAY = ("train.offload_params=true", "ref.offload_params=true")  # the critic's as in [train]


@pytest.fixture
def offload_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a CPU had a second memory."""
    monkeypatch.setattr(legal, "why_not_offloaded", lambda key, role, device, **other: why_not_offloaded(key, role, "cuda", **other))


@pytest.mark.parametrize(
    ("shard", "workers"), [pytest.param("full", 2, marks=pytest.mark.matrix), pytest.param("hybrid", 4, marks=pytest.mark.long)]
)
def test_shards_that_leave_come_back_bit_for_bit(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, offload_anyway: None, shard: str, workers: int
) -> None:
    """In updates, rollouts and checkpoints, together with an optimizer that is streamed; and after a resume."""
    settings = (*QUIET, *PPO, "run.steps=2", "run.save_every=1", "run.keep=2", *SHARDS[shard])
    here, away = (runs.make(tmp_path / name, model_folders("qwen2")) for name in ("here", "away"))
    pool_of_devices.train(here, workers, *settings)
    _, noted = pool_of_devices.train(away, workers, *settings, *AWAY, "train.offload_optimizer=true")
    assert len(set(noted.digests)) == 1 and noted.gradients.keys() == {"actor", "critic"}
    for step in (1, 2):
        assert same_bits(saved_tensors(away, step), saved_tensors(here, step))
        assert same_bits(exported_tensors(away, step), exported_tensors(here, step))
    shutil.rmtree(runs.checkpoints(away)[2])
    pool_of_devices.train(away, workers, *settings, *AWAY)
    assert same_bits(saved_tensors(away, 2), saved_tensors(here, 2))


def test_shards_of_roles_that_do_not_work_are_away(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, offload_anyway: None
) -> None:
    folder, rows = runs.make(tmp_path / "folder", model_folders("qwen2")), forced([9, 14, 11, 8])
    roles = {"actor", "critic", "ref"}
    with pool_of_devices.assembled(folder, 2, DOUBLE, *PPO, *SHARDS["full"], *AWAY) as parts:
        worker = pool_of_devices.ask

        def here() -> set[str]:
            (found, other) = worker("note", "away", ())[:2]
            assert found == other
            return roles - found

        here()  # what tests note of a new worker brings its parameters
        for role, field in (("ref", "ref_logprobs"), ("critic", "values"), ("actor", "old_logprobs")):
            with parts.crew.phase("old-logprob"):
                parts.crew.annotate(role, field, rows, lambda done, total: None)
            assert here() == {role}
        with parts.crew.phase("update-actor"):
            parts.crew.update("actor", rows, 0, lambda done, total: None)
        assert here() == {"actor"}
        with parts.crew.phase("sync"):
            parts.crew.sync(1)
        assert here() == set(), "an engine reads the whole copy"


def test_an_actor_alone_may_be_away_in_rollouts_where_it_is_shared_out(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, offload_anyway: None
) -> None:
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    settings = (DOUBLE, "algorithm.kl_coef=0", "train.offload_params=true")
    with pool_of_devices.assembled(folder, 2, *settings, *SHARDS["full"]):
        pass
    with pytest.raises(UserError, match=r"train.offload_params: true, but no other role has a model"):  # noqa: SIM117
        with pool_of_devices.assembled(folder, 2, *settings):
            pass


# -- rows that cannot be shared out evenly -------------------------------------------------------------------------------------------------


def forced(lengths: Sequence[int], *, silent: Sequence[int] = (), masked: Sequence[int] = (), seed: int = 0) -> list[Row]:
    """Rows of these lengths, all tokens but the first trained on. `silent`: those without an advantage; `masked`: those without a trained
    token."""
    chance = np.random.default_rng(seed)
    rows = []
    for number, tokens in enumerate(lengths):
        mask = (np.arange(tokens) > 0) & (number not in masked)
        noise = [(chance.normal(-2, 0.3, tokens) * mask).astype(np.float32) for _ in range(3)]
        advantage = 0.0 if number in silent else float(chance.normal())
        rows.append(
            Row(
                ids=chance.integers(3, models.VOCABULARY, tokens),
                mask=mask,
                group=number // 4,
                rollout_logprobs=noise[0],
                old_logprobs=noise[1],
                ref_logprobs=noise[2],
                advantages=(advantage * mask).astype(np.float32),
            )
        )
    return rows


ADVERSARIAL = {
    "one long, many short, and none": forced([3] * 12 + [300]),
    "one sample": forced([9]),
    "no advantage at all": forced([5, 9, 30], silent=range(3)),
    "few advantages": forced([9] * 12, silent=[n for n in range(12) if n != 7]),
    "one row of twelve is trained on": forced([20] * 12, masked=[n for n in range(12) if n != 4]),
    "nothing is trained on": forced([20] * 5, masked=range(5)),
    "rows of two tokens": forced([2] * 3),
}
FORCED = (DOUBLE, "algorithm.minibatches_per_step=1", "run.steps=50")
DEALS = {
    "micro-batches of 12": ("actor.dynamic_batch=false", "actor.micro_batch=12", "algorithm.kl_coef=0"),
    "by tokens": ("actor.token_budget=320", "algorithm.kl_coef=0.1"),
    "in turn": ("actor.token_budget=40", "algorithm.kl_coef=0", "train.balance=false"),
}


def update_all(
    pool: Pool, folder: Path, workers: int, batches: Sequence[Sequence[Row]], *overrides: str
) -> tuple[devices.Noted, list[dict[str, float]]]:
    """One update of the actor from each batch, and new weights for the engine."""
    with pool.assembled(folder, workers, *overrides) as parts:
        with parts.crew.phase("update-actor"):
            metrics = [parts.crew.update("actor", rows, number, lambda done, total: None) for number, rows in enumerate(batches)]
        with parts.crew.phase("sync"):
            parts.crew.sync(len(batches))
        return pool.noted(workers), metrics


@pytest.fixture(scope="module")
def template(model_folders: ModelFolders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make(tmp_path_factory.mktemp("template") / "folder", model_folders("qwen2"))


@pytest.fixture(scope="module")
def forced_alone(pool_of_devices: Pool, template: Path) -> Callable[[tuple[str, ...]], tuple[devices.Noted, list[dict[str, float]]]]:
    made: dict[tuple[str, ...], tuple[devices.Noted, list[dict[str, float]]]] = {}

    def run(overrides: tuple[str, ...]) -> tuple[devices.Noted, list[dict[str, float]]]:
        if overrides not in made:
            made[overrides] = update_all(pool_of_devices, template, 1, list(ADVERSARIAL.values()), *FORCED, *overrides)
        return made[overrides]

    return run


ALWAYS = {("by tokens", "optimizer", 3), ("micro-batches of 12", "full", 3)}


@pytest.mark.parametrize(
    ("deal", "shard", "workers"),
    [
        pytest.param(deal, *way, marks=[] if (deal, *way) in ALWAYS else [mark])
        for deal in DEALS
        for way in [*WAYS, ("optimizer", 3), ("full", 3)]
        for mark in [pytest.mark.long if way == ("optimizer", 4) else pytest.mark.matrix]
    ],
)
def test_rows_that_cannot_be_shared_out_evenly(
    pool_of_devices: Pool, template: Path, forced_alone: Callable[..., Any], deal: str, shard: str, workers: int
) -> None:
    """Where parameters are shared out, workers that have nothing to do, or less than others, make the same number of passes."""
    expected, metrics = forced_alone(DEALS[deal])
    noted, found = update_all(pool_of_devices, template, workers, list(ADVERSARIAL.values()), *FORCED, *DEALS[deal], *SHARDS[shard])
    largest = assert_same_gradients(noted, expected)
    print(f"{deal}, {shard}, {workers} workers: largest difference of gradients {largest:.1e}")
    for name, mine, theirs in zip(ADVERSARIAL, found, metrics, strict=True):
        same = [{key: value for key, value in each.items() if not key.startswith(DEALT)} for each in (mine, theirs)]
        assert same[0] == pytest.approx(same[1], rel=1e-9, abs=1e-12), name
    assert [each["actor/updates"] for each in found] == [float(name != "nothing is trained on") for name in ADVERSARIAL]
    assert len(set(noted.digests)) == 1


# -- gradients that are not finite, and many steps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shard", "workers"),
    [("optimizer", 3), pytest.param("full", 3, marks=pytest.mark.long), pytest.param("hybrid", 4, marks=pytest.mark.matrix)],
)
def test_a_gradient_that_is_not_finite_on_one_worker_skips_the_step_on_all(
    pool_of_devices: Pool, template: Path, shard: str, workers: int
) -> None:
    good = forced([12, 9, 30, 7, 5, 11])
    bad = [replace(row, advantages=np.where(row.mask, np.float32("inf"), 0)) if number == 3 else row for number, row in enumerate(good)]
    settings = (*FORCED, "actor.dynamic_batch=false", "actor.micro_batch=1", "algorithm.kl_coef=0")
    expected, _ = update_all(pool_of_devices, template, 1, [good, bad, good], *settings)
    noted, metrics = update_all(pool_of_devices, template, workers, [good, bad, good], *settings, *SHARDS[shard])
    assert [each["actor/skipped_updates"] for each in metrics] == [0, 1, 0]
    assert noted.skipped == [{"actor": 1}] * workers and expected.skipped == [{"actor": 1}]
    assert len(set(noted.digests)) == 1
    for place in (0, 2):  # the second is taken from parameters and moments that the bad step has left as they were
        assert differ(noted.gradients["actor"][place], expected.gradients["actor"][place]) < TOLERANCE
    assert differ(noted.parameters[0], expected.parameters[0]) < 1e-9


FIFTY_ALWAYS = ("", "bfloat16", "optimizer", 4)
FIFTY_LONG = {
    ("", "bfloat16", "hybrid", 4),
    (LORA, "bfloat16", "optimizer", 4),
}


def marks_of_fifty(*case: object) -> list[pytest.MarkDecorator]:
    return [] if case == FIFTY_ALWAYS else [pytest.mark.long if case in FIFTY_LONG else pytest.mark.matrix]


@pytest.mark.long
@pytest.mark.parametrize(
    ("lora", "dtype", "shard", "workers"),
    [
        pytest.param(lora, dtype, *way, marks=marks_of_fifty(lora, dtype, *way))
        for lora in ("", LORA)
        for dtype in ("float32", "bfloat16")
        for way in (("optimizer", 2), ("optimizer", 4), ("hybrid", 4))
    ],
)
def test_replicas_are_equal_bit_for_bit_after_fifty_steps(
    pool_of_devices: Pool, template: Path, workers: int, dtype: str, lora: str, shard: str
) -> None:
    """The groups of a hybrid run are replicas, their moments included."""
    settings = (
        f"model.dtype={dtype}",
        "algorithm.epochs=25",
        "algorithm.minibatches_per_step=2",
        "run.steps=1",
        "actor.dynamic_batch=false",
        "actor.micro_batch=2",
    )
    rows = forced([12, 9, 15, 7, 5, 11, 2, 20])
    noted, (metrics,) = update_all(pool_of_devices, template, workers, [rows], *settings, *filter(None, [lora]), *SHARDS[shard])
    assert (metrics["actor/updates"], metrics["actor/skipped_updates"]) == (50, 0)
    assert len({frozenset(group) for group in noted.groups}) > 1 and len(set(noted.digests)) == 1
    states = devices.joined_states(noted.states)
    masters = {name.removeprefix("master/"): numbers for name, numbers in states.items() if name.startswith("master/")}
    assert bool(masters) == (dtype == "bfloat16")
    for own, weights in zip(noted.parameters, noted.sampled_from, strict=True):
        assert (weights is None) == (shard == "optimizer")
        computed_with = own if weights is None else weights
        for name, numbers in masters.items():
            assert np.array_equal(devices.rounded(numbers), computed_with[name]), name
    assert {float(numbers[0]) for name, numbers in states.items() if name.startswith("step/")} == {50.0}


# -- checkpoints ---------------------------------------------------------------------------------------------------------------------------


def saved_tensors(folder: Path, step: int) -> devices.Whole:
    """All tensors of a checkpoint, flat, in whatever files they are."""
    with CheckpointStore(folder / "run" / "checkpoints", keep=9).at(step).open() as saved:
        return {name: devices.as_array(saved.numbers(name, 0, saved.size(name))) for name in saved.names()}


SAVED = ("run.steps=2", "run.save_every=1", "run.keep=9", "rollout.max_new_tokens=6", "algorithm.samples_per_prompt=2", *QUIET)
SAVED_CASES = {
    "ppo": (DOUBLE, *PPO),
    "lora": (DOUBLE, LORA),
    "bfloat16": ("model.dtype=bfloat16",),
    "dapo": (DOUBLE, "algorithm.name=dapo", "algorithm.kl_coef=0", "reward.function=reward.py:undecided"),
}


SAVED_LONG = {("ppo", "hybrid"), ("bfloat16", "optimizer"), ("dapo", "optimizer")}

# Where a run is resumed that was saved with each sharding: the workers, and how they share.
RESUMED = {
    "optimizer": [(2, "optimizer"), (1, "optimizer"), (3, "full")],
    "full": [(3, "full"), (2, "optimizer"), (1, "optimizer"), (4, "hybrid")],
    "hybrid": [(3, "optimizer"), (2, "full"), (1, "optimizer"), (4, "full")],
}


@pytest.mark.parametrize(
    ("case", "shard"),
    [
        pytest.param(case, shard, marks=[] if (case, shard) == ("ppo", "optimizer") else [mark], id=f"{case}-{shard}")
        for case in SAVED_CASES
        for shard in RESUMED
        for mark in [pytest.mark.long if (case, shard) in SAVED_LONG else pytest.mark.matrix]
    ],
)
def test_saved_on_four_workers_and_resumed_on_others(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, case: str, shard: str
) -> None:
    settings, adapters, exact = (*SAVED, *SAVED_CASES[case]), case == "lora", DOUBLE in SAVED_CASES[case]
    expected, one = (runs.make(tmp_path / name, model_folders("qwen2")) for name in ("expected", "one"))
    _, undisturbed = pool_of_devices.train(expected, 4, *settings, *SHARDS[shard])
    assert devices.joined_states(undisturbed.states).keys() <= saved_tensors(expected, 2).keys()
    if not adapters:
        exported, kept = exported_model(expected, 2), undisturbed.parameters[0]
        assert same_bits(exported, kept if exact else {name: devices.rounded(numbers) for name, numbers in kept.items()})
    if exact and shard != "optimizer":
        pool_of_devices.train(one, 1, *settings)
        for step in (1, 2):
            assert differ(exported_tensors(expected, step), exported_tensors(one, step)) < 1e-7
    before = {name: numbers for name, numbers in saved_tensors(expected, 1).items() if not name.startswith("surplus/")}
    for workers, other in RESUMED[shard]:
        folder = runs.copy(expected, tmp_path / f"{workers}-{other}")
        shutil.rmtree(folder / "run" / "checkpoints" / "step-00000002")
        _, noted = pool_of_devices.train(folder, workers, *settings, *(SHARDS[other] if workers > 1 else ()))
        assert same_bits(devices.joined_states(noted.restored), before)
        if not adapters:  # the parameters of adapters are among what was restored
            exported = exported_model(expected, 1)
            for whole in noted.loaded:
                assert same_bits(whole if exact else {name: devices.rounded(numbers) for name, numbers in whole.items()}, exported)
        assert len(set(noted.digests)) == 1
        if exact:
            assert_same_metrics(folder, expected)
            assert differ(noted.parameters[0], undisturbed.parameters[0]) < 1e-7
            found, whole = saved_tensors(folder, 2), saved_tensors(expected, 2)
            for kind in ("exp_avg/", "exp_avg_sq/"):
                assert differ(chosen(found, kind), chosen(whole, kind)) < 1e-7
        assert [line["step"] for line in runs.metrics(folder)] == [1, 2]


def exported_model(folder: Path, step: int) -> devices.Whole:
    """The parameters of a checkpoint's model, as transformers loads it."""
    model = AutoModelForCausalLM.from_pretrained(runs.checkpoints(folder)[step] / "model", dtype="auto")
    return {name: devices.as_array(each) for name, each in model.named_parameters()}


def exported_tensors(folder: Path, step: int) -> devices.Whole:
    """Those of the files of a checkpoint's model, or of its adapters."""
    files = sorted((runs.checkpoints(folder)[step] / "model").glob("*.safetensors"))
    return {name: devices.as_array(tensor) for file in files for name, tensor in load_file(file).items()}


def chosen(tensors: devices.Whole, prefix: str) -> devices.Whole:
    return {name: numbers for name, numbers in tensors.items() if name.startswith(prefix)}


def same_bits(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> bool:
    assert found.keys() == expected.keys()
    return all(np.array_equal(found[name].reshape(-1), expected[name].reshape(-1)) for name in expected)


# -- whole runs ----------------------------------------------------------------------------------------------------------------------------


WHOLE: dict[str, tuple[Mapping[str, Any], tuple[str, ...]]] = {
    "grpo": (runs.GRPO, ()),
    # `undecided` finds all samples of half of the rows equally good, so that groups are left out and others carried over.
    "dapo": (runs.GRPO, ("algorithm.name=dapo", "algorithm.kl_coef=0", "reward.function=reward.py:undecided")),
    "ppo": (runs.GRPO, (*PPO, "algorithm.reward_kl_coef=0.05", "algorithm.reward_kl_target=0.01", "algorithm.reward_kl_horizon=100")),
    "remax": (runs.GRPO, ("algorithm.name=remax",)),
    "lora": (runs.GRPO, (LORA,)),
    "sft": (runs.SFT, ()),
}


# The others bring nothing to a step that these do not, beside gradients, which are compared above.
WHOLE_LONG = ("dapo", "ppo", "remax", "sft")


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case in WHOLE_LONG else pytest.mark.matrix) for case in WHOLE])
def test_a_whole_run_has_the_metrics_of_one_process(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, case: str, workers: int
) -> None:
    """Steps that cross from one epoch to the next, validation before and among them, checkpoints, and an evaluation of the last one."""
    tables, overrides = WHOLE[case]
    settings = (DOUBLE, "run.steps=5", "run.eval_every=2", "run.save_every=2", *overrides)
    expected, folder = (runs.make(tmp_path / name, model_folders("qwen2"), tables) for name in ("expected", "folder"))
    _, alone = pool_of_devices.train(expected, 1, *settings)
    noted = assert_same_run(pool_of_devices, folder, workers, expected, *settings)
    print(f"{case}, {workers} workers: largest difference of gradients {assert_same_gradients(noted, alone):.1e}")
    assert runs.contents(folder / "run" / "validation") == runs.contents(expected / "run" / "validation")
    with pool_of_devices.used():
        one, other = (
            runs.command_here(each, "eval", "run.toml", "--latest", "--json", *settings, f"cluster.workers={count}")
            for each, count in ((folder, workers), (expected, 1))
        )
    assert (one.code, other.code) == (0, 0), one.error
    found, wanted = ({name: value for name, value in json.loads(each.out).items() if name != "model"} for each in (one, other))
    assert found == pytest.approx(wanted, rel=1e-6) and len(found) > 1


@pytest.mark.long
def test_one_worker_in_a_process_of_its_own_computes_the_same_bits(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path
) -> None:
    expected, folder = (runs.make(tmp_path / name, model_folders("qwen2")) for name in ("expected", "folder"))
    settings = (*PPO, "run.steps=3", "run.save_every=1")
    pool_of_devices.train(expected, 1, *settings)
    pool_of_devices.train(folder, 1, *settings, "cluster.processes=true")
    assert runs.contents(folder / "run" / "rollouts") == runs.contents(expected / "run" / "rollouts")
    assert_same_metrics(folder, expected, tolerance=0.0)
    for step, checkpoint in runs.checkpoints(expected).items():
        runs.assert_equal_tensors(runs.checkpoints(folder)[step], checkpoint)


@pytest.mark.long
def test_a_reward_model_and_validation_of_many_samples(pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path) -> None:
    judge = tmp_path / "judge"
    config = models.FAMILIES["qwen2"]()
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(judge)
    models.tokenizer().save_pretrained(judge)
    rewards = ('reward.function={ "reward.py:score" = 1.0, reward_model = 0.5 }', f"reward_model.path={judge}")
    sampled = ("eval.temperature=1.0", "eval.samples_per_prompt=3", "run.eval_every=1")
    settings = (DOUBLE, "run.steps=2", *rewards, *sampled)
    expected, folder = (runs.make(tmp_path / name, model_folders("qwen2")) for name in ("expected", "folder"))
    _, alone = pool_of_devices.train(expected, 1, *settings)
    assert_same_gradients(assert_same_run(pool_of_devices, folder, 3, expected, *settings), alone)


def test_a_resumed_run_has_the_memory_of_every_worker(pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path) -> None:
    """Or where there were more workers or fewer, the most of all."""
    few, many = ({"save": Reading(HeldBytes({"parameters": count}, {"parameters": 0}), peak=count, head=None)} for count in (1, 2))
    with pool_of_devices.assembled(runs.make(tmp_path / "folder", model_folders("qwen2")), 2, *ONE_STEP) as parts:
        parts.crew.restore_memory([few, many])
        assert parts.crew.pending_memory() == [few, many]
        for earlier in ([few, many, few], [many]):
            parts.crew.restore_memory(earlier)
            assert parts.crew.pending_memory() == [many, many]


@pytest.mark.long
def test_stopped_by_ctrl_c_and_resumed_on_as_many_workers(pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path) -> None:
    settings = (*PPO, "run.steps=6", "run.save_every=2")
    expected, folder = (runs.make(tmp_path / name, model_folders("qwen2")) for name in ("expected", "folder"))
    pool_of_devices.train(expected, 2, *settings)
    sender = when((folder / "run" / "rollouts" / "step-000002.jsonl").exists, interrupt_soon)
    trained, _ = pool_of_devices.train(folder, 2, *settings)
    sender.join()
    assert trained.summary.interrupted and 2 <= trained.summary.steps < 6
    pool_of_devices.train(folder, 2, *settings)
    runs.assert_equal_runs(folder, expected)


def when(holds: Callable[[], bool], act: Callable[[], object]) -> threading.Thread:
    """Act in another thread as soon as it holds."""

    def wait_and_act() -> None:
        while not holds():
            time.sleep(0.005)
        act()

    thread = threading.Thread(target=wait_and_act, daemon=True)
    thread.start()
    return thread


def interrupt_soon() -> None:
    """Ctrl-C to this very process."""
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)


PLAIN = """
import os
from pathlib import Path

import forked
import fulltilt
import torch.distributed

def look(step, metrics):
    seen.append([Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in forked.children_of(os.getpid())])
    groups.append(torch.distributed.is_initialized())

seen, groups = [], []
fulltilt.train("run.toml", on_step=look, quiet=True, steps=2, eval_every=0, eval_before=False)
print(len(seen), groups, [each for each in sum(seen, []) if "fulltilt.cluster" in each or "forked-worker" in each])
print(any("fulltilt" in each for each in sum(seen, [])))
"""


def test_one_device_is_one_plain_process(model_folders: ModelFolders, tmp_path: Path) -> None:
    """Without processes of workers and without torch.distributed; the reward's process, which it has, shows that it would see them."""
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    assert runs.code_forked(folder, PLAIN).out == "2 [False, False] []\nTrue\n"


def test_threads_of_torch_are_divided_among_workers(pool_of_devices: Pool, template: Path) -> None:
    before = pool_of_devices.ask("set_threads", 9)
    try:
        for workers, share in ((2, 4), (4, 2)):
            with pool_of_devices.assembled(template, workers) as parts:
                assert parts.plan.budgets.threads == share
                assert any(f"each has {share} threads" in note for note in parts.notes)
                assert pool_of_devices.ask("note", "threads", ())[:workers] == [share] * workers
    finally:
        pool_of_devices.ask("set_threads", before[0])


# -- failures ------------------------------------------------------------------------------------------------------------------------------


NAMED_S = 60.0  # within which a worker that fails must be named
ENDED_S = 15.0  # within which its processes must be gone: several seconds where the machine is busy


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("raise", WorkerError, r"worker 1 \(process \d+\) failed in update-actor .*KeyError: 'the test breaks this worker'"),
        ("memory", UserError, r"out of memory in update-actor on worker 1: CUDA out of memory.* Lower actor\.token_budget"),
        ("kill", WorkerDied, r"worker 1 \(process \d+\) was killed by signal 9 \(SIGKILL\) during update-actor"),
        ("sleep", WorkerStuck, r"worker 1 \(process \d+\).*\n(.*\n)*.*sleep_forever"),
    ],
    ids=["raises", "out of memory", "killed", "sleeps"],
)
def test_a_worker_that_fails_is_named(
    model_folders: ModelFolders, tmp_path: Path, mark: str, how: str, kind: type[UserError], said: str
) -> None:
    """In the third optimizer step, while the other worker waits for it in a collective. The first checkpoint is kept and can be resumed; no
    process is left, and no shared memory."""
    folder, before = runs.make(tmp_path / "folder", model_folders("qwen2")), forked.children_of(os.getpid())
    settings = ("run.steps=3", "run.save_every=1", *QUIET)
    pool, broken = Pool(2), tmp_path / "broken"
    try:
        pids = pool.processes.pids
        pool.breaks = (1, 2, how, str(folder / "run" / "checkpoints" / "step-00000001"), str(broken))
        if how == "sleep":
            when(broken.exists, lambda: vars(pool.processes).update(stall_s=2.0, deadline_s=5.0))
        with pytest.raises(kind, match=said), warnings.catch_warnings(record=True):
            pool.train(folder, 2, *settings)
        assert time.time() - broken.stat().st_mtime < NAMED_S
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    finally:
        pool.close()
    assert forked.children_of(os.getpid()) <= before
    assert list(runs.checkpoints(folder)) == [1]
    runs.train(folder, *settings, "cluster.workers=1")
    assert list(runs.checkpoints(folder)) == [2, 3]


REAL = ("cluster.workers=2", "run.save_every=2", *QUIET)


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def left_of(mark: str) -> list[str]:
    """Processes that have inherited this from the environment."""
    return [path.parent.name for path in Path("/proc").glob("[0-9]*/environ") if mark.encode() in read(path)]


@pytest.fixture
def mark(pool_of_devices: Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """In the environment of every process that a test's commands start. None of them, and no shared memory, may be left."""
    assert runs._loaded() and pool_of_devices.processes  # these stay
    shared = set(os.listdir("/dev/shm"))
    found = f"FULLTILT_TEST={tmp_path}"
    monkeypatch.setenv(*found.split("="))
    yield found
    assert gone(found, 30.0, ())
    assert not {name for name in set(os.listdir("/dev/shm")) - shared if "fulltilt" in name or name.startswith(("torch_", "psm_"))}


def gone(mark: str, seconds: float, workers: Sequence[int]) -> bool:
    """Whether no process with the mark is left, and none of these, soon."""
    deadline = time.monotonic() + seconds
    while left_of(mark) or any(map(running, workers)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def eventually(found: Callable[[], Any], process: runs.Started) -> Any:
    """What is found at last; None if the process ends before."""
    while not (value := found()):
        if process.poll() is not None:
            return None
        time.sleep(0.005)
    return value


def finish(folder: Path, *settings: str, first: Callable[[], object] = forked.use_always) -> None:
    ended = runs.command_forked(folder, "train", "run.toml", "--json", *settings, first=first)
    assert ended.code == 0, ended.error


@pytest.mark.long
def test_a_real_command_with_two_workers(pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, mark: str) -> None:
    """The same files as those of workers in the pool, bit for bit."""
    expected, folder = (runs.make(tmp_path / name, model_folders("qwen2")) for name in ("expected", "folder"))
    settings = (*REAL, "run.steps=2")
    pool_of_devices.train(expected, 2, *settings)
    finish(folder, *settings, first=runs.nothing)
    runs.assert_equal_runs(folder, expected)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_real_command_is_told_to_stop(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, mark: str, number: signal.Signals
) -> None:
    expected, folder = (runs.make(tmp_path / name, model_folders("qwen2")) for name in ("expected", "folder"))
    settings = (*REAL, "run.steps=12")
    pool_of_devices.train(expected, 2, *settings)
    process = runs.Started(folder, ["train", "run.toml", "--json", *settings], forked.use_always)
    for _ in range(2):
        assert process.stdout.readline()
    pids = forked.workers_of(process.pid)
    os.killpg(process.pid, number)
    process.communicate(timeout=60)
    said = (folder / "said.txt").read_text()
    assert process.returncode == 130 and "stopped after step" in said, said
    assert len(pids) == 2 and gone(mark, ENDED_S, pids)
    finish(folder, *settings)
    runs.assert_equal_runs(folder, expected)


def random_moments() -> random.Random:
    seed = int(os.environ.get("FULLTILT_TEST_SEED", time.time_ns() % 1_000_000))
    print(f"FULLTILT_TEST_SEED={seed}")
    return random.Random(seed)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kills", "first"),
    [
        pytest.param(4, forked.use_always, id="4 of forked workers", marks=pytest.mark.long),
        pytest.param(20, runs.nothing, id="20, also while workers import", marks=pytest.mark.matrix),
    ],
)
def test_kills_at_random_moments(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, mark: str, kills: int, first: Callable[[], object]
) -> None:
    """Of workers, and of the driver, at any moment from the start of the workers' processes: the run says which worker it was and ends, no
    process is left, and the last one ends with the files of a run that was left alone."""
    chance = random_moments()
    settings = (*REAL, f"run.steps={8 * kills}")
    expected, folder = (runs.make(tmp_path / name, model_folders("qwen2")) for name in ("expected", "folder"))
    pool_of_devices.train(expected, 2, *settings)
    for number in range(kills):
        kill_once(folder, settings, chance, mark, first, of_driver=number % 4 == 3, starting=number % 3 == 1)
    assert runs.checkpoints(folder), "every kill came before the first checkpoint, so they proved little"
    finish(folder, *settings, first=first)
    runs.assert_equal_runs(folder, expected)


def kill_once(
    folder: Path, settings: Sequence[str], chance: random.Random, mark: str, first: Callable[[], object], *, of_driver: bool, starting: bool
) -> None:
    (folder / "said.txt").unlink(missing_ok=True)
    process = runs.Started(folder, ["train", "run.toml", "--json", *settings], first)
    pids = eventually(lambda: found if len(found := forked.workers_of(process.pid)) == 2 else None, process)
    assert pids, (folder / "said.txt").read_text()
    for _ in range(0 if starting else chance.randint(2, 4)):
        assert process.stdout.readline()
    time.sleep(chance.uniform(0, 0.5 if not starting else 5.0 if first is runs.nothing else 1.5))
    rank = chance.randrange(2)
    os.kill(process.pid if of_driver else pids[rank], signal.SIGKILL)
    if of_driver:
        assert gone(mark, ENDED_S, pids)
    begin = time.monotonic()
    process.communicate(timeout=NAMED_S)
    said = (folder / "said.txt").read_text()
    assert time.monotonic() - begin < NAMED_S and gone(mark, ENDED_S, pids)
    if not of_driver:
        assert process.returncode == 1, said
        assert f"worker {rank} (process {pids[rank]}) was killed by signal 9 (SIGKILL)" in said and "Traceback" not in said, said


@pytest.mark.matrix
@pytest.mark.timeout(1800)
def test_kills_of_workers_of_a_run_that_restarts_by_itself(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, mark: str
) -> None:
    """PPO on four workers that share out all parameters. A worker that is killed is named, and the run resumes by itself; after a kill of
    the driver, and where a step fails twice in a row, the same command does."""
    chance, kills = random_moments(), 20
    settings = (
        *PPO, *SHARDS["full"], *QUIET, "cluster.workers=4", f"cluster.restarts={kills}", f"run.steps={4 * kills}", "run.save_every=2",
        "rollout.max_new_tokens=6", "algorithm.samples_per_prompt=2",
    )  # fmt: skip
    expected, folder = (runs.make(tmp_path / name, model_folders("qwen2")) for name in ("expected", "folder"))
    pool_of_devices.train(expected, 4, *settings)
    disturbed, given_up = Restarting(folder, settings), 0
    for number in range(kills):
        steps = 0 if number % 3 == 1 else chance.randint(1, 3)
        pids = disturbed.new_workers(steps)
        if pids is None:
            disturbed.end(mark, 1)
            assert "has failed twice in a row" in disturbed.said()
            disturbed, given_up = Restarting(folder, settings), given_up + 1
            pids = disturbed.new_workers(steps)
        assert pids, disturbed.said()
        time.sleep(chance.uniform(0, 1.0))
        if number % 4 == 3:
            os.kill(disturbed.process.pid, signal.SIGKILL)
            disturbed.end(mark, -signal.SIGKILL)
            disturbed = Restarting(folder, settings)
        else:
            disturbed.kill(chance.choice(pids))
    if disturbed.process.communicate(timeout=240) is not None and disturbed.process.returncode != 0:
        assert "has failed twice in a row" in disturbed.said()
        finish(folder, *settings, first=forked.use_always)
    print(f"{kills} kills, {kills // 4} of them of the driver; {given_up} times a step failed twice in a row")
    runs.assert_equal_runs(folder, expected)


class Restarting:
    """A command that starts its workers anew when one is killed."""

    def __init__(self, folder: Path, settings: Sequence[str]) -> None:
        self._said = folder / "said.txt"
        self.process = runs.Started(folder, ["train", "run.toml", "--json", *settings], forked.use_always)
        self.seen: set[int] = set()  # workers before the last restart

    def said(self) -> str:
        return self._said.read_text()

    def new_workers(self, steps: int) -> list[int] | None:
        """The four workers that were started last, after so many steps; None where the run has ended instead."""

        def found() -> list[int] | None:
            own = [pid for pid in forked.workers_of(self.process.pid) if pid not in self.seen]
            return own if len(own) == 4 else None

        pids: list[int] | None = eventually(found, self.process)
        return pids if pids and all(self.process.stdout.readline() for _ in range(steps)) else None

    def kill(self, worker: int) -> None:
        self.seen |= set(forked.workers_of(self.process.pid))
        os.kill(worker, signal.SIGKILL)
        deadline = time.monotonic() + NAMED_S
        while f"(process {worker}) was killed by signal 9 (SIGKILL)" not in self.said():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def end(self, mark: str, code: int) -> None:
        """Wait for the end of the command, and of everything that it has started."""
        pids = forked.workers_of(self.process.pid)
        self.process.communicate(timeout=NAMED_S)
        assert self.process.returncode == code, self.said()
        assert gone(mark, ENDED_S, pids)
