"""In float32, workers that divide sequences, layers or experts compute the gradients and greedy samples of one process to within 1e-5.

Gradients differ by the roundings of float32 alone, which the comparisons in float64 of test_sequence.py, test_tensor_runs.py and
test_expert_runs.py do not have. There is one reference per case, from one process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import devices
import pytest
import runs
import test_expert_runs
import test_tensor_runs
from test_devices import assert_same_gradients, assert_same_metrics
from test_sequence import FAMILIES
from test_sequence import WAYS as SEQUENCES
from variants import sample_cases

ModelFolders = Callable[[str], Path]
Pool = devices.Pool

TOLERANCE = 1e-5  # largest difference of gradients, relative to the largest gradient
# Validation samples are greedy, and drawn after the update: equal ones show that the engine has the new weights.
ONE_STEP = ("model.dtype=float32", "run.steps=1", "run.save_every=0", "run.eval_before=false", "run.eval_every=1")
LAYERS, EXPERTS = test_tensor_runs.WAYS, test_expert_runs.WAYS
WAYS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "sequence 2": SEQUENCES["two of two"],
    "sequence 4": SEQUENCES["four of four"],
    "sequence 2, data 2, full": SEQUENCES["two of four, full"],
    "tensor 2": LAYERS["two of two"],
    "tensor 4": LAYERS["four of four"],
    "tensor 2, data 2": LAYERS["two of four"],
    "tensor 2, data 2, full": LAYERS["two of four, full"],
    "tensor 2, sequence 2": LAYERS["two of four, sequences of two"],
    "experts 2": EXPERTS["two of two"],
    "experts 4": EXPERTS["four of four"],
    "experts 2, data 2": EXPERTS["two of four"],
    "experts 2, data 2, full": EXPERTS["two of four, full"],
    "experts 2, sequence 2": EXPERTS["two of four, sequences of two"],
    "tensor 2, experts 2": test_expert_runs.LAYERS_TOO["layers and experts, two of two"],
}
CASES = [
    ("dense", "sequence 2"), ("gemma2", "sequence 2"), ("dense", "sequence 4"), ("experts", "sequence 4"),
    ("ppo", "sequence 2, data 2, full"),
    ("dense", "tensor 2"), ("lora", "tensor 2"), ("mixtral", "tensor 2"), ("dense", "tensor 4"), ("gemma2", "tensor 4"),
    ("qwen3", "tensor 4"), ("ppo", "tensor 2, data 2"), ("llama", "tensor 2, data 2"), ("ppo", "tensor 2, data 2, full"),
    ("dense", "tensor 2, sequence 2"), ("qwen3", "tensor 2, sequence 2"), ("ppo", "tensor 2, sequence 2"),
    ("experts", "experts 2"), ("mixtral", "experts 2"), ("experts", "experts 4"), ("mixtral", "experts 4"),
    ("experts", "experts 2, data 2"), ("ppo-experts", "experts 2, data 2"), ("experts", "experts 2, data 2, full"),
    ("ppo-experts", "experts 2, data 2, full"), ("experts", "experts 2, sequence 2"), ("experts", "tensor 2, experts 2"),
]  # fmt: skip
SHORT, LONG = [("experts", "experts 2, data 2, full")], [("ppo", "tensor 2, sequence 2")]


@pytest.fixture(scope="module")
def alone(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, devices.Noted]]:
    """One step of each case in one process."""
    return devices.run_once(pool_of_devices, FAMILIES, ONE_STEP, model_folders, tmp_path_factory)


@pytest.mark.parametrize(("case", "way"), sample_cases(CASES, *SHORT, long=LONG))
def test_one_step_in_float32_is_that_of_one_process(
    pool_of_devices: Pool, alone: Callable[..., Any], model_folders: ModelFolders, tmp_path: Path, case: str, way: str
) -> None:
    family, tables, overrides = FAMILIES[case]
    workers, settings = WAYS[way]
    expected_folder, expected = alone(case)
    folder = runs.make(tmp_path / "folder", model_folders(family), tables)
    _, noted = pool_of_devices.train(folder, workers, *ONE_STEP, *overrides, *settings)
    assert noted.gradients.keys() == ({"actor", "critic"} if "ppo" in case else {"actor"})
    largest = assert_same_gradients(noted, expected, TOLERANCE)
    print(f"{case}, {way}: largest difference of gradients {largest:.1e}")
    for kind in ("rollouts", "validation"):
        assert_same_samples(folder / "run" / kind, expected_folder / "run" / kind)
    assert_same_metrics(folder, expected_folder, tolerance=TOLERANCE, absolute=TOLERANCE, rounds=True)
    assert len(set(noted.digests)) == 1


def assert_same_samples(found: Path, expected: Path) -> None:
    """The same texts and scores; means of log-probs, which are rounded, to within 1e-5."""
    mine, theirs = ([json.loads(line) for file in runs.contents(each).values() for line in file.splitlines()] for each in (found, expected))
    rounded = [[each.pop("logprob_mean") for each in lines if "logprob_mean" in each] for lines in (mine, theirs)]
    assert theirs and mine == theirs
    assert rounded[0] == pytest.approx(rounded[1], abs=1e-5)
