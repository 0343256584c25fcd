"""Workers that compute a micro-batch together, each a part of its tokens (`sequence_parallel`), compute what one process computes."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import devices
import models
import pytest
import runs
from test_devices import (
    ADVERSARIAL,
    CASES,
    DEALT,
    FORCED,
    ONE_STEP,
    TOLERANCE,
    assert_same_gradients,
    assert_same_metrics,
    assert_same_run,
    differ,
    forced,
    update_all,
)  # fmt: skip
from transformers import AutoModelForCausalLM, Qwen2Config
from variants import sample_cases

import fulltilt
from fulltilt.algo.build import build
from fulltilt.cluster.checks import wrong_settings
from fulltilt.interrupts import Interrupted
from fulltilt.parallel.cuts import sequence_sizes
from fulltilt.parallel.layout import Sharding
from fulltilt.plan.facts import Facts, RoleFacts
from fulltilt.plan.roles import plan_roles
from fulltilt.schema import Config
from fulltilt.shape import Shape

ModelFolders = Callable[[str], Path]
Pool = devices.Pool

TWO, FOUR = "train.sequence_parallel=2", "train.sequence_parallel=4"
OWN = ("train.sequence_parallel=2", "ref.sequence_parallel=1", "critic.sequence_parallel=4")
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any], tuple[str, ...]]] = {
    **CASES,
    "gemma2": ("gemma2", runs.GRPO, ()),
    "mixtral": ("mixtral", runs.GRPO, ()),
    "llama": ("llama", runs.GRPO, ()),
}
WAYS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "two of two": (2, (TWO,)),
    "two of four": (4, (TWO,)),
    "four of four": (4, (FOUR,)),
    "two of four, full": (4, (TWO, "train.shard=full")),
    "two of four, hybrid": (4, (TWO, "train.shard=hybrid", "train.shard_size=2")),
}
SHORT = {("dense", "two of two")}
LONG = {
    *((case, "two of four") for case in ("padded", "sft", "gemma2")),
    *((case, "two of four, full") for case in ("ppo", "lora")),
    ("experts", "four of four"),
}


@pytest.fixture(scope="module")
def alone(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, devices.Noted]]:
    """One step of each case in one process."""
    return devices.run_once(pool_of_devices, FAMILIES, ONE_STEP, model_folders, tmp_path_factory)


def marks_of(case: str, way: str) -> list[pytest.MarkDecorator]:
    if (case, way) in SHORT:
        return []
    return [pytest.mark.long if (case, way) in LONG else pytest.mark.matrix]


@pytest.mark.parametrize(
    ("case", "way"), [pytest.param(case, way, marks=marks_of(case, way), id=f"{case}, {way}") for case in FAMILIES for way in WAYS]
)
def test_one_step_has_the_samples_losses_and_gradients_of_one_process(
    pool_of_devices: Pool, alone: Callable[..., Any], model_folders: ModelFolders, tmp_path: Path, case: str, way: str
) -> None:
    family, tables, overrides = FAMILIES[case]
    workers, settings = WAYS[way]
    expected_folder, expected = alone(case)
    folder = runs.make(tmp_path / "folder", model_folders(family), tables)
    noted = assert_same_run(pool_of_devices, folder, workers, expected_folder, *ONE_STEP, *overrides, *settings)
    # Gemma's norms compute in float32 whatever the type of the model, and their gradients are sums over tokens.
    largest = assert_same_gradients(noted, expected, 1e-6 if case == "gemma2" else TOLERANCE)
    print(f"{case}, {way}: largest difference of gradients {largest:.1e}")
    assert differ(noted.parameters[0], expected.parameters[0]) < 1e-6


def test_sizes_that_heads_and_workers_allow() -> None:
    assert sequence_sizes([(12, 2)], 8) == [1, 2, 4]
    assert sequence_sizes([(14, 2)], 8) == [1, 2]
    assert sequence_sizes([(32, 8), (32, 4)], 16) == [1, 2, 4, 8, 16]
    assert sequence_sizes([(12, 3)], 12) == [1, 3, 6, 12]
    assert sequence_sizes([(4, 4)], 3) == [1]


@pytest.mark.parametrize(("size", "each"), sample_cases([(2, 15), (4, 8)], (4, 8)))
def test_each_worker_computes_its_share_of_the_tokens(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, size: int, each: int
) -> None:
    """What enters the layers of a worker is T / size of a micro-batch with T = 30 tokens, rounded up: the last one has padding."""
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    with pool_of_devices.assembled(folder, size, *ONE_STEP, f"train.sequence_parallel={size}") as parts:
        with parts.crew.phase("old-logprob"):
            parts.crew.annotate("actor", "old_logprobs", forced([30]), lambda done, total: None)
        assert parts.crew.most_tokens("actor") == each


@pytest.mark.matrix
def test_every_role_has_a_size_of_its_own(
    pool_of_devices: Pool, alone: Callable[..., Any], model_folders: ModelFolders, tmp_path: Path
) -> None:
    """A micro-batch has 30 tokens: 15 enter the actor on each worker, 8 the critic, and all the reference."""
    family, tables, overrides = FAMILIES["ppo"]
    folder = runs.make(tmp_path / "folder", model_folders(family), tables)
    expected_folder, expected = alone("ppo")
    noted = assert_same_run(pool_of_devices, folder, 4, expected_folder, *ONE_STEP, *overrides, *OWN)
    assert_same_gradients(noted, expected)
    assert len(fulltilt.generate(folder / "run", ["1+1="], max_new_tokens=2)) == 1, "one worker samples from what they have trained"
    with pool_of_devices.assembled(folder, 4, *ONE_STEP, *overrides, *OWN, "run.dir=again") as parts:
        for role, field in {"ref": "ref_logprobs", "actor": "old_logprobs", "critic": "values"}.items():
            with parts.crew.phase({"actor": "old-logprob", "critic": "values", "ref": "ref-logprob"}[role]):
                parts.crew.annotate(role, field, forced([30]), lambda done, total: None)
        assert {role: parts.crew.most_tokens(role) for role in ("actor", "critic", "ref")} == {"actor": 15, "critic": 8, "ref": 30}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param((TWO, "cluster.roles={critic = 2}"), id="a critic with workers of its own"),
        pytest.param((TWO, "cluster.roles={critic = 2}", "train.shard=full"), id="shared out", marks=pytest.mark.matrix),
        pytest.param(("critic.sequence_parallel=2", "cluster.roles={critic = 2, ref = 1}"), id="alone", marks=pytest.mark.matrix),
    ],
)
@pytest.mark.long
def test_roles_on_workers_of_their_own(
    pool_of_devices: Pool, alone: Callable[..., Any], model_folders: ModelFolders, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    family, tables, overrides = FAMILIES["ppo"]
    folder = runs.make(tmp_path / "folder", model_folders(family), tables)
    expected_folder, expected = alone("ppo")
    _, noted = pool_of_devices.train(folder, 4, *ONE_STEP, *overrides, *settings)
    assert_same_gradients(noted, expected)
    assert_same_metrics(folder, expected_folder)


@pytest.mark.long
@pytest.mark.parametrize(
    ("workers", "settings"),
    sample_cases([(2, (TWO,)), (4, (TWO,)), (4, (FOUR,)), (4, (TWO, "train.shard=full"))], (4, (FOUR,)), (4, (TWO, "train.shard=full"))),
)
def test_rows_that_cannot_be_shared_out_evenly(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, workers: int, settings: tuple[str, ...]
) -> None:
    """Micro-batches of a few tokens, of which some workers have none that is trained on, or padding alone."""
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    batches, common = list(ADVERSARIAL.values()), (*FORCED, "actor.token_budget=40", "algorithm.kl_coef=0.1")
    expected, metrics = update_all(pool_of_devices, folder, 1, batches, *common)
    noted, found = update_all(pool_of_devices, folder, workers, batches, *common, *settings)
    assert_same_gradients(noted, expected)
    for name, mine, theirs in zip(ADVERSARIAL, found, metrics, strict=True):
        same = [{key: value for key, value in each.items() if not key.startswith(DEALT)} for each in (mine, theirs)]
        assert same[0] == pytest.approx(same[1], rel=1e-9, abs=1e-12), name


@pytest.mark.matrix
@pytest.mark.parametrize("key_heads", [1, 4])
@pytest.mark.parametrize(("workers", "settings"), [(2, (TWO,)), (4, (FOUR,))])
def test_fewer_key_heads_than_workers_and_as_many(
    pool_of_devices: Pool, tmp_path: Path, key_heads: int, workers: int, settings: tuple[str, ...]
) -> None:
    model = tmp_path / "model"
    AutoModelForCausalLM.from_config(Qwen2Config(**{**models.SMALL, "num_key_value_heads": key_heads})).save_pretrained(model)
    models.tokenizer().save_pretrained(model)
    one, several = (runs.make(tmp_path / name, model) for name in ("one", "several"))
    _, expected = pool_of_devices.train(one, 1, *ONE_STEP)
    noted = assert_same_run(pool_of_devices, several, workers, one, *ONE_STEP, *settings)
    assert_same_gradients(noted, expected)


@pytest.mark.long
def test_rows_that_other_machines_hold(
    pool_of_devices: Pool, alone: Callable[..., Any], model_folders: ModelFolders, tmp_path: Path
) -> None:
    """Each worker as if it had a machine of its own: a row goes to all workers that compute it, and its numbers come back once."""
    family, tables, overrides = FAMILIES["ppo"]
    folder = runs.make(tmp_path / "folder", model_folders(family), tables)
    expected_folder, expected = alone("ppo")
    pool_of_devices.apart = True
    try:
        noted = assert_same_run(pool_of_devices, folder, 4, expected_folder, *ONE_STEP, *overrides, *OWN)
    finally:
        pool_of_devices.apart = False
    assert_same_gradients(noted, expected)


REFUSED = {
    "three": (("cluster.workers=3", "train.sequence_parallel=3"), r"train.sequence_parallel: 3 workers cannot share .* Remove the key"),
    "four of six": (("cluster.workers=6", "train.sequence_parallel=4"), r"must divide the 6 that have this role, .*\. Use 1 or 2$"),
    "a role's own": (
        ("cluster.workers=4", "algorithm.name=ppo", "cluster.roles={critic = 1}", "critic.sequence_parallel=2"),
        r"critic.sequence_parallel: 2 workers cannot share micro-batches: only one has this role. Remove the key",
    ),
    "a role's, from [train]": (
        ("cluster.workers=3", "algorithm.name=ppo", "cluster.roles={critic = 1}", "train.sequence_parallel=2"),
        r"train.sequence_parallel: 2 .* of the critic: only one has this role. Set critic.sequence_parallel = 1$",
    ),
    "of all roles": (("cluster.workers=3", "algorithm.name=ppo", "train.sequence_parallel=2"), r"must divide the 3 .* Remove the key$"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_sizes_that_are_refused_before_anything_loads(
    model_folders: ModelFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    settings, message = REFUSED[case]
    monkeypatch.setenv("FULLTILT_SHARE_DEVICES", "1")
    config = runs.read_config(runs.make(tmp_path / "folder", model_folders("qwen2")), *settings)
    with contextlib.chdir(tmp_path / "folder"):
        (found,) = wrong_settings(config, build(config), "cpu")
    assert re.search(message, found)


LONG_SAMPLES: list[tuple[str, int, int, tuple[str, ...], int, str]] = [  # model, longest, workers, settings, expected size and reason
    ("7B", 40000, 8, (), 1, ""),  # with full recompute it fits on one
    ("7B", 65536, 8, (), 2, "65536 tokens, which would take 34.3 GiB, and 21.8 GiB are left"),
    ("7B", 131072, 8, (), 4, "131072 tokens, which would take 68.7 GiB, and 21.8 GiB are left"),
    ("7B", 10**6, 8, (), 4, "1000000 tokens, which would take"),  # 28 heads: no more may share it
    ("7B", 65536, 1, (), 1, ""),
    ("1.5B", 65536, 8, (), 1, ""),
    ("7B", 40000, 8, ("actor.token_budget=16384",), 4, "40000 tokens, and a worker gets 16384"),  # a cap that the user has set
    ("7B", 8192, 8, ("actor.token_budget=4096",), 1, ""),  # not below the guides' 8k tokens
    ("7B", 9000, 8, ("algorithm.prompts_per_step=4",), 2, "9000 tokens, and 4 samples are computed at a time on 8 workers"),
    ("7B", 9000, 8, ("algorithm.prompts_per_step=8", "algorithm.minibatches_per_step=4"), 4, "and 2 samples are computed at a time"),
    ("7B", 8192, 8, ("algorithm.prompts_per_step=4",), 1, ""),
]


@pytest.mark.parametrize(("name", "longest", "workers", "settings", "size", "why"), LONG_SAMPLES)
def test_auto_shares_long_samples_that_do_not_fit_or_are_few(
    model_folders: ModelFolders, tmp_path: Path, name: str, longest: int, workers: int, settings: tuple[str, ...], size: int, why: str
) -> None:
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"), runs.SFT)
    config = runs.read_config(folder, "algorithm.prompts_per_step=64", "algorithm.minibatches_per_step=1", *settings)
    actor = RoleFacts.of_shape(Shape.named(name), config, "cuda", learns=True)
    sharding = Sharding("optimizer", workers, workers)
    found = plan_roles(config, Facts("cuda", 80 << 30, 200 << 30, {"actor": actor}, longest, 1, rollout=False, sharding=sharding))
    assert found.settings["actor"].sequence_parallel == size
    told = [text for text in found.words if "workers compute a micro-batch together" in text]
    assert len(told) == (size > 1) and why in "".join(told)


@pytest.mark.parametrize(
    ("longest", "samples", "within", "size", "beyond"),
    [
        (131072, 4, None, 16, False),  # all on one machine
        (131072, 4, 8, 8, False),  # sixteen would leave no worker without work, and their exchanges would leave the machine
        (16384, 2, 8, 8, False),
        (131072, 64, 8, 4, False),  # the least that fits
        (131072, 64, 2, 4, True),  # two do not suffice
        (131072, 2, 2, 4, True),  # what does not fit reaches over machines, what has no work does not
    ],
)
def test_auto_keeps_groups_within_a_machine_unless_none_there_suffices(
    longest: int, samples: int, within: int | None, size: int, beyond: bool
) -> None:
    sections = {"model": {"path": "m"}, "data": {"train": "t"}, "algorithm": {"name": "sft", "prompts_per_step": samples}}
    config = Config.model_validate(sections)
    actor = RoleFacts.of_shape(Shape.named("70B"), config, "cuda", learns=True)
    facts = Facts("cuda", 141 << 30, 2000 << 30, {"actor": actor}, longest, 1, rollout=False, sharding=Sharding("full", 64, 64))
    found = plan_roles(config, replace(facts, within=within))
    assert found.settings["actor"].sequence_parallel == size
    assert ("reaches over machines" in found.reasons["actor", "sequence_parallel"]) == beyond


def test_auto_counts_the_members_that_divide_layers_with_those_that_share_samples() -> None:
    """Eight workers on a machine, of which four have the parts of each layer: two of these groups have room there."""
    sections = {"model": {"path": "m"}, "data": {"train": "t"}, "algorithm": {"name": "sft", "prompts_per_step": 2}}
    config = Config.model_validate(sections)
    actor = RoleFacts.of_shape(Shape.named("70B"), config, "cuda", learns=True).part(4)
    facts = Facts("cuda", 141 << 30, 2000 << 30, {"actor": actor}, 16384, 1, rollout=False, sharding=Sharding("full", 16, 16), parts=4)
    sizes = [plan_roles(config, replace(facts, within=within)).settings["actor"].sequence_parallel for within in (None, 8, 4)]
    assert sizes == [8, 2, 1]


def test_auto_shares_the_passes_of_other_roles_only_where_they_do_not_fit() -> None:
    """A pass without gradient holds a layer's activations, of which an update holds all."""
    given = {"model": {"path": "m"}, "data": {"train": "t"}, "algorithm": {"name": "ppo", "kl_coef": 0.1}}
    config = Config.model_validate(given | {"rollout": {"max_new_tokens": 131072 - 1024}})
    roles = {role: RoleFacts.of_shape(Shape.named("7B"), config, "cuda", learns=role == "actor", role=role) for role in ("actor", "ref")}
    found = plan_roles(config, Facts("cuda", 80 << 30, 999 << 30, roles, 1024, 1, sharding=Sharding("full", 8, 8)))
    assert {role: found.settings[role].sequence_parallel for role in roles} == {"actor": 2, "ref": 1}


def test_a_reference_with_workers_of_its_own_is_not_measured_by_the_actors(model_folders: ModelFolders, tmp_path: Path) -> None:
    settings = ("cluster.workers=6", "cluster.roles={ref = 4}", "ref.sequence_parallel=4")
    config = runs.read_config(runs.make(tmp_path / "folder", model_folders("qwen2")), *settings)
    actor = RoleFacts.of_shape(Shape.named("7B"), config, "cpu", learns=True)
    facts = Facts("cpu", 0, 200 << 30, {"actor": actor}, 100, 1, sharding=Sharding(workers=2))
    assert plan_roles(config, facts).settings["actor"].sequence_parallel == 1


@pytest.mark.parametrize(("workers", "size"), [(1, 1), (2, 2), (6, 2)])
def test_an_evaluation_on_other_workers_shares_as_far_as_they_allow(
    model_folders: ModelFolders, tmp_path: Path, workers: int, size: int
) -> None:
    """A critic's workers are the actor's in an evaluation, and a chat has one worker."""
    config = runs.read_config(runs.make(tmp_path / "folder", model_folders("qwen2")), FOUR)
    facts = Facts("cpu", 0, 200 << 30, {"actor": RoleFacts.of_shape(Shape.named("7B"), config, "cpu", learns=False)}, 100, 1)
    assert plan_roles(config, replace(facts, sharding=Sharding(workers=workers))).settings["actor"].sequence_parallel == size


def test_workers_that_share_micro_batches_stop_at_the_same_one(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a pass: what asks a worker to stop reaches the second one later. One that stopped early would leave the other waiting."""
    folder, processes = runs.make(tmp_path / "folder", model_folders("qwen2")), pool_of_devices.processes

    def one_by_one(message: Any) -> None:
        processes.send(0, message)
        time.sleep(0.5)
        for rank in range(1, processes.size):
            processes.send(rank, message)

    monkeypatch.setattr(processes, "send_all", one_by_one)
    rows = forced([30] * 60)
    with pool_of_devices.assembled(folder, 2, *FORCED, TWO, "actor.forward_token_budget=15") as parts:

        def interrupt(done: int, total: int) -> None:
            raise Interrupted

        with pytest.raises(Interrupted), parts.crew.phase("old-logprob"):
            parts.crew.annotate("actor", "old_logprobs", rows, interrupt)
        with parts.crew.phase("old-logprob"):
            annotated = parts.crew.annotate("actor", "old_logprobs", rows, lambda done, total: None)
        assert all(row.old_logprobs is not None for row in annotated.rows)
