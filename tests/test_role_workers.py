"""Roles on workers of their own (`cluster.roles`) compute what one process computes, and their workers are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import devices
import pytest
import runs
from test_devices import ONE_STEP, assert_same_gradients, assert_same_metrics

ModelFolders = Callable[[str], Path]
Pool = devices.Pool

PPO = ("algorithm.name=ppo", "algorithm.reward_kl_coef=0.05", "algorithm.kl_coef=0.05")
APART = "cluster.roles={critic = 1, reward_model = 1}"


@pytest.fixture(scope="module")
def judged(model_folders: ModelFolders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of PPO with a reference and a reward model."""
    base = tmp_path_factory.mktemp("judged")
    folder = runs.make(base / "folder", model_folders("qwen2"))
    return folder


def test_one(pool_of_devices: Pool, judged: Path, tmp_path: Path) -> None:
    one = runs.copy(judged, tmp_path / "one")
    _, expected = pool_of_devices.train(one, 1, *ONE_STEP, *PPO)
    several = runs.copy(judged, tmp_path / "several")
    trained, noted = pool_of_devices.train(several, 4, *ONE_STEP, *PPO, "cluster.roles={critic = 1, ref = 1}")
    print(trained)
    assert_same_gradients(noted, expected)
    assert_same_metrics(several, one)
