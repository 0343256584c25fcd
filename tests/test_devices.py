"""Several workers compute what one process computes: samples, losses, gradients, checkpoints; and what happens where one of them fails.

Workers are real, in the processes of a pool that all tests share (tests/devices.py); where a test kills, they are those of a real command.
Comparisons are in float64, where only the order of sums tells runs apart: a wrong weight or a forgotten worker shows at once. One worker's
numbers are the reference.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import devices
import models
import numpy as np
import pytest
import runs
from transformers import AutoModelForCausalLM

from fulltilt.cluster.hosts import WorkerError, WorkerStuck
from fulltilt.records import Row, UserError

ModelFolders = Callable[[str], Path]
Pool = devices.Pool

TOLERANCE = 1e-9  # largest difference of gradients, relative to the largest gradient
DOUBLE = "model.dtype=float64"
QUIET = ("run.eval_before=false", "run.eval_every=0")
ONE_STEP = (DOUBLE, *QUIET, "run.steps=1", "run.save_every=0")
# What depends on how samples are dealt out among engines and rows among workers. All other metrics must agree.
DEALT = (
    *runs.CLOCK, "rollout/passes", "rollout/most_running", "rollout/most_waiting", "rollout/mean_running", "rollout/kv_use",
    "rollout/mean_kv_use", "rollout/prefix_hit_rate", "rollout/prefill_tokens", "actor/micro_batches", "critic/micro_batches",
    "actor/load_spread", "critic/load_spread", "perf/max_memory",
)  # fmt: skip

PPO = ("algorithm.name=ppo", "algorithm.kl_coef=0.05")
# name: (model, tables, settings)
CASES: dict[str, tuple[str, Mapping[str, Any], tuple[str, ...]]] = {
    "dense": ("qwen2", runs.GRPO, ()),
    "tied": ("llama-tied", runs.GRPO, ("algorithm.kl_coef=0",)),
    "experts": ("qwen3-moe", runs.GRPO, ()),
    "lora": ("qwen2", runs.GRPO, ("lora.rank=4",)),
    "ppo": ("qwen2", runs.GRPO, PPO),
    "qwen3": ("qwen3", runs.GRPO, ("algorithm.kl_coef=0", "algorithm.aggregation=seq-mean-token-mean")),
    "recompute": ("qwen2", runs.GRPO, ("train.recompute=full",)),
    "padded": ("qwen2", runs.GRPO, ("train.packing=false", "train.balance=false")),
    "micro-batches": ("qwen2", runs.GRPO, ("actor.micro_batch=3", "algorithm.epochs=2")),
    "sft": ("qwen2", runs.SFT, ()),
}
SHORT = {("dense", 2), ("experts", 4), ("ppo", 4), ("lora", 2)}


def differ(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """The largest difference, relative to the largest number."""
    assert found.keys() == expected.keys()
    largest = max(float(np.abs(numbers).max()) for numbers in expected.values())
    return max(float(np.abs(found[name].reshape(-1) - expected[name].reshape(-1)).max()) for name in expected) / largest


def assert_same_gradients(found: devices.Noted, expected: devices.Noted) -> float:
    assert found.gradients.keys() == expected.gradients.keys()
    largest = 0.0
    for role, steps in expected.gradients.items():
        assert len(steps) == len(found.gradients[role]) > 0
        largest = max(largest, *(differ(*pair) for pair in zip(found.gradients[role], steps, strict=True)))
    assert largest < TOLERANCE
    return largest


def assert_same_metrics(found: Path, expected: Path, tolerance: float = 1e-6) -> None:
    mine, theirs = (
        [{name: value for name, value in line.items() if not name.startswith(DEALT)} for line in runs.metrics(each)]
        for each in (found, expected)
    )
    assert [line.keys() for line in mine] == [line.keys() for line in theirs]
    for one, other in zip(mine, theirs, strict=True):
        assert one == pytest.approx(other, rel=tolerance, abs=1e-9)


def assert_same_run(pool: Pool, folder: Path, workers: int, expected: Path, *overrides: str) -> devices.Noted:
    _, noted = pool.train(folder, workers, *overrides)
    assert runs.contents(folder / "run" / "rollouts") == runs.contents(expected / "run" / "rollouts")  # tokens, texts and scores
    assert_same_metrics(folder, expected)
    assert len(set(noted.digests)) == 1, "the workers' parameters differ"
    return noted


# -- one step ------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, devices.Noted]]:
    """One step of each case in one process."""
    made: dict[str, tuple[Path, devices.Noted]] = {}

    def run(case: str) -> tuple[Path, devices.Noted]:
        if case not in made:
            family, tables, overrides = CASES[case]
            folder = runs.make(tmp_path_factory.mktemp("alone") / case, model_folders(family), tables)
            made[case] = folder, pool_of_devices.train(folder, 1, *ONE_STEP, *overrides)[1]
        return made[case]

    return run


@pytest.mark.parametrize(
    ("case", "workers"),
    [
        pytest.param(case, workers, marks=[] if (case, workers) in SHORT else [pytest.mark.long], id=f"{case}-{workers}")
        for case in CASES
        for workers in (2, 4)
    ],
)
def test_one_step_has_the_samples_losses_and_gradients_of_one_process(
    pool_of_devices: Pool, alone: Callable[[str], tuple[Path, devices.Noted]], model_folders: ModelFolders, tmp_path: Path,
    case: str, workers: int,
) -> None:  # fmt: skip
    family, tables, overrides = CASES[case]
    expected_folder, expected = alone(case)
    folder = runs.make(tmp_path / "folder", model_folders(family), tables)
    noted = assert_same_run(pool_of_devices, folder, workers, expected_folder, *ONE_STEP, *overrides)
    largest = assert_same_gradients(noted, expected)
    print(f"{case}, {workers} workers: largest difference of gradients {largest:.1e}")
    assert differ(noted.parameters[0], expected.parameters[0]) < 1e-6
