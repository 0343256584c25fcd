"""Workers that divide experts among themselves (`train.expert_parallel`) compute, sample and save what one process does."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import devices
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
from test_sequence import FAMILIES
from test_tensor_runs import assert_parts_of

from fulltilt.algo.build import build
from fulltilt.cluster.checks import wrong_settings

ModelFolders = Callable[[str], Path]
Pool = devices.Pool

TWO, FOUR = "train.expert_parallel=2", "train.expert_parallel=4"
WAYS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "two of two": (2, (TWO,)),
    "four of four": (4, (FOUR,)),
    "two of four": (4, (TWO,)),
    "two of four, sequences of two": (4, (TWO, "train.sequence_parallel=2")),
    "two of four, full": (4, (TWO, "train.shard=full")),
    "four of four, full": (4, (FOUR, "train.shard=full")),
    "two of four, no balance": (4, (TWO, "train.balance=false")),
}
CASES = {
    **{name: FAMILIES[name] for name in ("experts", "ppo-experts", "mixtral")},
    "lora-experts": ("qwen3-moe", runs.GRPO, ("lora.rank=2", 'lora.parameters=["experts.gate_up_proj", "experts.down_proj"]')),
    "frozen-experts": ("qwen3-moe", runs.GRPO, ("lora.rank=2",)),
    "recompute-experts": ("qwen3-moe", runs.GRPO, ("train.recompute=full",)),
    "sft-experts": ("qwen3-moe", runs.SFT, ()),
}
SHORT = {("experts", "two of two"), ("ppo-experts", "two of four")}
LONG = {("experts", "four of four"), ("sft-experts", "two of four"), ("lora-experts", "two of four"), ("mixtral", "two of two")}


def marks_of(case: str, way: str) -> list[pytest.MarkDecorator]:
    if (case, way) in SHORT:
        return []
    return [pytest.mark.long if (case, way) in LONG else pytest.mark.matrix]


@pytest.mark.parametrize(
    ("case", "way"), [pytest.param(case, way, marks=marks_of(case, way), id=f"{case}, {way}") for case in CASES for way in WAYS]
)
def test_one_step_has_the_samples_losses_and_gradients_of_one_process(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, case: str, way: str
) -> None:
    family, tables, overrides = CASES[case]
    workers, settings = WAYS[way]
    one, folder = (runs.make(tmp_path / name, model_folders(family), tables) for name in ("one", "folder"))
    _, expected = pool_of_devices.train(one, 1, *ONE_STEP, *overrides)
    noted = assert_same_run(pool_of_devices, folder, workers, one, *ONE_STEP, *overrides, *settings)
    largest = assert_same_gradients(noted, expected, TOLERANCE)
    print(f"{case}, {way}: largest difference of gradients {largest:.1e}")
    assert differ(noted.parameters[0], expected.parameters[0]) < 1e-6


LAYOUTS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    **WAYS,
    "divided layers": (2, ("train.tensor_parallel=2",)),
    "full": (3, ("train.shard=full",)),
    "alone": (1, ()),
}


@pytest.mark.parametrize(
    ("case", "layout", "others"),
    [
        pytest.param("ppo", "two of four", ["four of four", "divided layers", "full", "alone"], marks=pytest.mark.long),
        pytest.param("lora", "two of two", ["four of four", "alone"], marks=pytest.mark.matrix),
        pytest.param("bfloat16", "two of four", ["two of two", "full", "alone"], marks=pytest.mark.matrix),
        pytest.param("ppo", "full", ["two of four", "two of two"], marks=pytest.mark.matrix),
    ],
)
def test_saved_under_one_layout_and_resumed_under_others(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, case: str, layout: str, others: list[str]
) -> None:
    adapters = ('lora.parameters=["experts.gate_up_proj", "experts.down_proj"]',) if case == "lora" else ()
    settings, exact = (*SAVED, *SAVED_CASES[case], *adapters), DOUBLE in SAVED_CASES[case]
    expected = runs.make(tmp_path / "expected", model_folders("qwen3-moe"))
    workers, own = LAYOUTS[layout]
    _, undisturbed = pool_of_devices.train(expected, workers, *settings, *own)
    before = saved_tensors(expected, 1)
    if case != "lora":
        kept = undisturbed.parameters[0]
        assert same_bits(exported_model(expected, 2), kept if exact else {name: devices.rounded(numbers) for name, numbers in kept.items()})
    for name in others:
        workers, own = LAYOUTS[name]
        folder = runs.copy(expected, tmp_path / name)
        shutil.rmtree(folder / "run" / "checkpoints" / "step-00000002")
        _, noted = pool_of_devices.train(folder, workers, *settings, *own)
        assert_parts_of(before, noted.restored)
        assert len(set(noted.digests)) == 1
        if exact:
            assert_same_metrics(folder, expected, absolute=1e-7)
            found, whole = saved_tensors(folder, 2), saved_tensors(expected, 2)
            assert found.keys() == whole.keys()
            for kind in ("exp_avg/", "exp_avg_sq/"):
                assert differ(chosen(found, kind), chosen(whole, kind)) < 1e-6  # routers round
        assert [line["step"] for line in runs.metrics(folder)] == [1, 2]


REFUSED = {
    "three": (
        "qwen3-moe",
        ("cluster.workers=3", "train.expert_parallel=3"),
        r"3 workers cannot .* has 4 experts in a layer. Use 1$",
    ),
    "four of six": ("qwen3-moe", ("cluster.workers=6", FOUR), r"4 does not divide the 6 workers of the run. Use 1 or 2$"),
    "no experts": ("qwen2", ("cluster.workers=2", TWO), r"train.expert_parallel: 2 .*: the model has no experts. Use 1$"),
    "shared out": ("qwen3-moe", ("cluster.workers=4", TWO, "train.shard=hybrid", "train.shard_size=2"), r'and it is "hybrid"'),
    "divided layers": (
        "qwen3-moe",
        ("cluster.workers=4", TWO, "train.tensor_parallel=2"),
        r"tensor_parallel = 2 divides experts, too",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_sizes_that_are_refused_before_anything_loads(
    model_folders: ModelFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    family, settings, message = REFUSED[case]
    monkeypatch.setenv("FULLTILT_SHARE_DEVICES", "1")
    config = runs.read_config(runs.make(tmp_path / "folder", model_folders(family)), *settings)
    with contextlib.chdir(tmp_path / "folder"):
        found = list(wrong_settings(config, build(config), "cpu"))
    assert any(re.search(message, each) for each in found), found
