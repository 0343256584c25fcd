"""Workers that hold one part each of every layer (`train.tensor_parallel`) compute, sample and save what one process does."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import devices
import models
import numpy as np
import pytest
import runs
from test_devices import (
    DOUBLE,
    ONE_STEP,
    SAVED,
    SAVED_CASES,
    TOLERANCE,
    assert_same_gradients,
    assert_same_metrics,
    assert_same_run,
    chosen,
    differ,
    exported_model,
    same_bits,
    saved_tensors,
)  # fmt: skip
from test_sequence import FAMILIES, alone  # noqa: F401 (a fixture)
from transformers import AutoModelForSequenceClassification

from fulltilt.algo.build import build
from fulltilt.cluster.checks import wrong_settings
from fulltilt.cluster.processes import ProcessCall
from fulltilt.parallel.experts import expert_table
from fulltilt.parallel.holdings import held_bytes
from fulltilt.parallel.layout import ParameterSize, Sharding
from fulltilt.parallel.slices import slice_table
from fulltilt.records import Prompt
from fulltilt.rollout.sampler import Sampling

ModelFolders = Callable[[str], Path]
Pool = devices.Pool

TWO, FOUR = "train.tensor_parallel=2", "train.tensor_parallel=4"
WAYS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "two of two": (2, (TWO,)),
    "four of four": (4, (FOUR,)),
    "two of four": (4, (TWO,)),
    "two of four, full": (4, (TWO, "train.shard=full")),
    "two of four, sequences of two": (4, (TWO, "train.sequence_parallel=2")),
}
COPIED: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "whole, sampled by two": (2, ("rollout.tensor_parallel=2",)),
    "two of two, each samples": (2, (TWO, "rollout.tensor_parallel=1")),
    "two of four, sampled by four": (4, (TWO, "rollout.tensor_parallel=4")),
    "full, sampled by two": (4, ("train.shard=full", "rollout.tensor_parallel=2")),
    "hybrid, sampled by two": (4, ("train.shard=hybrid", "train.shard_size=2", "rollout.tensor_parallel=2")),
    "hybrid, sampled by four": (4, ("train.shard=hybrid", "train.shard_size=2", "rollout.tensor_parallel=4")),
    "two of four, full, each samples": (4, (TWO, "train.shard=full", "rollout.tensor_parallel=1")),
    "experts of two, full, each samples": (4, ("train.expert_parallel=2", "train.shard=full")),
    "experts of two, sampled by two": (4, ("train.expert_parallel=2", "rollout.tensor_parallel=2")),
}
SHORT = {("ppo", "two of four")}
LONG = {
    ("dense", "two of two"),
    ("dense", "two of two, each samples"),
    ("ppo", "two of four, full"),
    ("dense", "two of four, sequences of two"),
    ("experts", "four of four"),
    ("dense", "full, sampled by two"),
}


def marks_of(case: str, way: str) -> list[pytest.MarkDecorator]:
    if (case, way) in SHORT:
        return []
    return [pytest.mark.long if (case, way) in LONG else pytest.mark.matrix]


@pytest.mark.parametrize(
    ("case", "way"), [pytest.param(case, way, marks=marks_of(case, way), id=f"{case}, {way}") for case in FAMILIES for way in WAYS]
)
def test_one_step_has_the_samples_losses_and_gradients_of_one_process(
    pool_of_devices: Pool,
    alone: Callable[..., Any],  # noqa: F811
    model_folders: ModelFolders,
    tmp_path: Path,
    case: str,
    way: str,
) -> None:
    family, tables, overrides = FAMILIES[case]
    workers, settings = WAYS[way]
    expected_folder, expected = alone(case)
    folder = runs.make(tmp_path / "folder", model_folders(family), tables)
    # Routers and norms of heads compute in float32 whatever the type of the model, and parts of their gradients are rounded before they
    # are summed. (In double, as tests/test_tensor_parallel.py has them compute, these models agree to 1e-9 as well.)
    rounds = family in ("gemma2", "mixtral", "qwen3", "qwen3-moe")
    own = (*ONE_STEP, *overrides, *settings)
    noted = assert_same_run(pool_of_devices, folder, workers, expected_folder, *own, absolute=1e-7 if rounds else 1e-9, rounds=rounds)
    largest = assert_same_gradients(noted, expected, 1e-6 if rounds else TOLERANCE)
    print(f"{case}, {way}: largest difference of gradients {largest:.1e}")
    # A first step of Adam is as long for a small gradient as for a large one, and so is what it makes of a rounding.
    assert differ(noted.parameters[0], expected.parameters[0]) < (1e-5 if rounds else 1e-6)


@pytest.mark.parametrize(
    ("case", "way"),
    [
        pytest.param(case, way, marks=marks_of(case, way), id=f"{case}, {way}")
        for case in ("dense", "lora", "experts")
        for way in COPIED
        if ("experts" in way) <= (case == "experts")
    ],
)
def test_rollouts_divided_in_another_way_have_the_samples_of_one_process(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, case: str, way: str
) -> None:
    """Two steps: in the second one engines have the weights of the first update."""
    family, tables, overrides = FAMILIES[case]
    workers, settings = COPIED[way]
    one, folder = (runs.make(tmp_path / name, model_folders(family), tables) for name in ("one", "folder"))
    own = (*ONE_STEP, "run.steps=2", "run.save_every=2", *overrides)
    _, expected = pool_of_devices.train(one, 1, *own)
    _, noted = pool_of_devices.train(folder, workers, *own, *settings)
    assert responses(folder) == responses(one)
    # Routers round, so the first update differs a little.
    assert_same_metrics(folder, one, tolerance=1e-5, absolute=1e-6, rounds=case == "experts")
    assert len(set(noted.digests)) == 1
    if case == "dense":
        assert runs.contents(folder / "run" / "rollouts") == runs.contents(one / "run" / "rollouts")
        assert_same_gradients(noted, expected, 1e-8)
        assert differ(exported_model(folder, 2), exported_model(one, 2)) < 1e-6


def responses(folder: Path) -> list[str]:
    """The texts of all samples of a run."""
    files = sorted((folder / "run" / "rollouts").glob("*.jsonl"))
    return [json.loads(line)["response"] for file in files for line in file.read_text().splitlines()]


LAYOUTS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "two of four": (4, (TWO,)),
    "two of four, full": (4, (TWO, "train.shard=full")),
    "four of four": (4, (FOUR,)),
    "optimizer": (3, ()),
    "full": (2, ("train.shard=full",)),
    "alone": (1, ()),
}
RESUMED = {
    "two of four": ["four of four", "two of four, full", "optimizer", "alone"],
    "two of four, full": ["two of four", "full", "four of four"],
    "full": ["two of four", "two of four, full", "four of four"],
}

SAVED_LONG = {("ppo", "two of four"), ("lora", "two of four, full")}


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(case, layout, id=f"{case}, {layout}", marks=pytest.mark.long if (case, layout) in SAVED_LONG else pytest.mark.matrix)
        for case in ("ppo", "lora", "bfloat16")
        for layout in RESUMED
    ],
)
def test_saved_under_one_layout_and_resumed_under_others(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, case: str, layout: str
) -> None:
    settings, exact = (*SAVED, *SAVED_CASES[case]), DOUBLE in SAVED_CASES[case]
    expected = runs.make(tmp_path / "expected", model_folders("qwen2"))
    workers, own = LAYOUTS[layout]
    _, undisturbed = pool_of_devices.train(expected, workers, *settings, *own)
    before = saved_tensors(expected, 1)
    if case != "lora":
        kept = undisturbed.parameters[0]
        assert same_bits(exported_model(expected, 2), kept if exact else {name: devices.rounded(numbers) for name, numbers in kept.items()})
    for name in RESUMED[layout]:
        workers, own = LAYOUTS[name]
        folder = runs.copy(expected, tmp_path / name)
        shutil.rmtree(folder / "run" / "checkpoints" / "step-00000002")
        _, noted = pool_of_devices.train(folder, workers, *settings, *own)
        assert_parts_of(before, noted.restored)
        assert len(set(noted.digests)) == 1
        if exact:
            assert_same_metrics(folder, expected)
            assert differ(noted.parameters[0], undisturbed.parameters[0]) < 1e-7
            found, whole = saved_tensors(folder, 2), saved_tensors(expected, 2)
            assert found.keys() == whole.keys()
            for kind in ("exp_avg/", "exp_avg_sq/"):
                assert differ(chosen(found, kind), chosen(whole, kind)) < 1e-7
        assert [line["step"] for line in runs.metrics(folder)] == [1, 2]


def assert_parts_of(whole: devices.Whole, restored: Sequence[Mapping[str, np.ndarray]]) -> None:
    """All that workers have restored are numbers of the whole, and all numbers of the whole are there, whatever parts they are in."""
    for name, numbers in whole.items():
        if name.startswith("surplus/"):
            continue
        pattern = re.compile(re.escape(name) + r"(#\d+)?(@\d+)?")
        found = [own.reshape(-1) for each in restored for key, own in each.items() if pattern.fullmatch(key)]
        assert np.array_equal(np.unique(np.concatenate(found)), np.unique(numbers)), name


REFUSED = {
    "three": (
        ("cluster.workers=3", "train.tensor_parallel=3"),
        r"3 workers cannot hold .*: the model has 4 query heads. Use 1$",
    ),
    "four of six": (("cluster.workers=6", FOUR), r"train.tensor_parallel: 4 does not divide the 6 workers of the run. Use 1 or 2$"),
    "a role with one worker": (
        ("cluster.workers=3", "algorithm.name=ppo", "cluster.roles={critic = 1}", TWO),
        r"train.tensor_parallel: 2 does not divide the 1 worker that has the critic's role. Use 1$",
    ),
    "compiled": (("cluster.workers=2", TWO, "train.compile=true"), r"train.tensor_parallel: 2, but train.compile is true: .* Remove one"),
    "another engine": (("cluster.workers=2", TWO, "rollout.engine=hf"), r"samples from a whole model. Use the native engine"),
    "nobody to share with": (
        ("cluster.workers=2", TWO, "train.shard=full"),
        r'train.shard: "full", but train.tensor_parallel = 2 leaves no two',
    ),
    "samplers": (
        ("cluster.workers=3", "rollout.tensor_parallel=2"),
        r"^rollout.tensor_parallel: 2 does not divide the 3 workers of the run",
    ),
    "groups": (
        ("cluster.workers=8", TWO, "train.shard=hybrid", "train.shard_size=8"),
        r"train.shard_size: 8 does not divide the 4 workers of the run with the same part of the model into groups. Use 2 or 4",
    ),
    "heads of a part": (
        ("cluster.workers=8", TWO, "train.sequence_parallel=4"),
        r"train.sequence_parallel: 4 workers cannot share .* fit the model's attention heads. Use 1 or 2$",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_sizes_that_are_refused_before_anything_loads(
    model_folders: ModelFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    settings, message = REFUSED[case]
    monkeypatch.setenv("FULLTILT_SHARE_DEVICES", "1")
    config = runs.read_config(runs.make(tmp_path / "folder", model_folders("qwen2")), *settings)
    with contextlib.chdir(tmp_path / "folder"):
        found = list(wrong_settings(config, build(config), "cpu"))
    assert any(re.search(message, each) for each in found), found


@pytest.mark.parametrize(
    ("family", "keys", "workers"),
    [
        pytest.param("qwen2", (TWO,), 2, marks=pytest.mark.matrix),
        ("qwen2", (TWO,), 4),
        ("qwen3-moe", ("train.expert_parallel=2",), 4),
        pytest.param("qwen3-moe", (TWO, "train.expert_parallel=2"), 4, marks=pytest.mark.matrix),
    ],
)
def test_a_worker_holds_what_is_predicted(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, family: str, keys: tuple[str, ...], workers: int
) -> None:
    """Sizes of parts follow from the whole model's and how it is cut; experts are shared out among the workers that have the same."""
    folder, experts = runs.make(tmp_path / "folder", model_folders(family), runs.SFT), TWO not in keys
    with pool_of_devices.assembled(folder, 1) as parts:
        model = parts.worker.actor.model
        table = expert_table(model, 2) if experts else slice_table(model, 2, whole_experts=len(keys) > 1)
        whole = {name: (tuple(own.shape), own.itemsize) for name, own in model.named_parameters()}
        alone = pool_of_devices._alone.held()["parameters"]  # type: ignore[union-attr]
    sharding = Sharding(workers=workers if experts else workers // 2, experts=2 if experts else 1)
    with pool_of_devices.assembled(folder, workers, *keys):
        held = pool_of_devices.held(workers)
    for rank, own in enumerate(held):
        cut = {name: table.cuts[name].shape(shape, rank % 2) for name, (shape, _) in whole.items()}
        sizes = tuple(ParameterSize(cut[name], itemsize, apart=cut[name] != shape) for name, (shape, itemsize) in whole.items())
        expected = held_bytes(sizes, sharding, rank if experts else rank // 2)
        assert (own["parameters"], own["optimizer"]) == (expected.parameters, expected.optimizer)
        assert own["parameters"] < (0.8 if experts else 0.6) * alone


PROMPTS = [Prompt(uid=uid, ids=np.arange(3, 8 + uid), text="") for uid in range(3)]


def test_members_that_tell_no_samples_are_not_silent(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples come from the first member of a group; the driver hears of the others as often."""
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    with pool_of_devices.assembled(folder, 2, *ONE_STEP, TWO) as parts:
        heard: list[int] = []
        add = ProcessCall.add_item
        monkeypatch.setattr(ProcessCall, "add_item", lambda call, rank, item: (heard.append(rank), add(call, rank, item)))
        with parts.crew.phase("rollout"):
            groups = list(parts.crew.generate(PROMPTS, Sampling(samples=2, max_new_tokens=4), 0))
    assert len(groups) == len(PROMPTS) and heard.count(1) == heard.count(0) == len(PROMPTS)


def test_an_evaluation_whose_roles_have_unlike_numbers_of_workers(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path
) -> None:
    """Two workers of a reward model divide it; the one that samples has a whole actor."""
    judge, config = tmp_path / "judge", models.FAMILIES["qwen2"]()
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(judge)
    models.tokenizer().save_pretrained(judge)
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    own = ("eval", "run.toml", DOUBLE, 'reward.function={ "reward.py:score" = 1.0, reward_model = 0.5 }', f"reward_model.path={judge}")
    with pool_of_devices.used():
        expected = runs.command_here(folder, *own)
        found = runs.command_here(folder, *own, "cluster.workers=3", "cluster.roles={reward_model = 2}", TWO)
    assert (expected.code, found.code) == (0, 0), found.error
    assert "layers are not divided as in the run that learned: 1 worker cannot" in found.error + found.out
    assert values(found.out) == pytest.approx(values(expected.out), rel=1e-4)  # printed with four digits


def values(printed: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"^(val\S+)  (\S+)$", printed, re.MULTILINE)}
