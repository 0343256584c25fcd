"""Workers that hold one part each of every layer (`train.tensor_parallel`) compute, sample and save what one process does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import devices
import pytest
import runs
from test_devices import ONE_STEP, TOLERANCE, assert_same_gradients, assert_same_run, differ
from test_sequence import FAMILIES, alone  # noqa: F401 (a fixture)

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
SHORT = {("dense", "two of two"), ("ppo", "two of four"), ("experts", "four of four")}
LONG = {(case, "two of four, full") for case in ("dense", "lora", "ppo")} | {("dense", "two of four, sequences of two")}


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
    noted = assert_same_run(pool_of_devices, folder, workers, expected_folder, *ONE_STEP, *overrides, *settings)
    largest = assert_same_gradients(noted, expected, 1e-6 if case == "gemma2" else TOLERANCE)
    print(f"{case}, {way}: largest difference of gradients {largest:.1e}")
    assert differ(noted.parameters[0], expected.parameters[0]) < 1e-6
