"""Every algorithm learns: the demo's task, from the demo's warm-up, a short run each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fulltilt import config as configuration
from fulltilt import demo, loop
from fulltilt.observe.console import Console
from fulltilt.observe.metrics import read_values
from fulltilt.presets import PRESETS

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]  # the first test of each process makes the demo's model, minutes if busy

STEPS = 30
LIFT = 0.15  # the least that a run must add to the warm-up's reward of about 0.43

# A critic must learn to tell right sums from wrong ones, which the warm-up taught nobody: it gets many gentle updates, and a head start.
PPO = (
    "critic.lr=3e-4", "train.lr=4e-5", "algorithm.critic_warmup=12", "algorithm.epochs=4", "algorithm.minibatches_per_step=4",
    "algorithm.prompts_per_step=100", "run.steps=24",
)  # fmt: skip
# What each is given beside its name.
OPTIONS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "dr_grpo": (),
    "dapo": ("algorithm.prompts_per_step=48", "algorithm.prompts_per_round=64"),
    "ppo": PPO,
    "rloo": (),
    "reinforce++": (),
    "reinforce++_baseline": (),
    "remax": (),
    "gspo": ("algorithm.minibatches_per_step=2",),
    "cispo": ("algorithm.minibatches_per_step=2",),
}


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the demo's data, reward and warmed-up model."""
    folder = tmp_path_factory.mktemp("learns")
    with contextlib.chdir(folder):
        demo.warm_up(Path("demo"), Console(quiet=True))
        yield folder


def test_every_algorithm_has_a_run() -> None:
    assert set(OPTIONS) == set(PRESETS) - {"sft"}


def learn(folder: Path, name: str, *options: str) -> list[float]:
    """The rewards of a run's steps."""
    overrides = [f"algorithm.name={name}", f"run.dir={name}", f"run.steps={STEPS}", *options]
    config = configuration.load("demo/grpo.toml", overrides)
    loop.train(config, Console(quiet=True))
    return read_values(folder / name / "metrics.jsonl", "critic/score/mean")


@pytest.mark.parametrize("name", OPTIONS)
def test_it_lifts_the_reward(warm: Path, name: str) -> None:
    rewards = learn(warm, name, *OPTIONS[name])
    first, last = np.mean(rewards[:3]), np.mean(rewards[-3:])
    assert last > first + LIFT, f"{first:.3f} -> {last:.3f}"
    if name == "ppo":
        explained = read_values(warm / name / "metrics.jsonl", "critic/vf_explained_var")
        assert np.mean(explained[-3:]) > 0.3, explained
