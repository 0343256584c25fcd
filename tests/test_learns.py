"""The demo learns, and so does every algorithm: the demo's task, from the demo's warm-up, a short run each."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fulltilt import config as configuration
from fulltilt import loop
from fulltilt.observe.console import Console
from fulltilt.observe.metrics import read_values
from fulltilt.presets import PRESETS

# The first test runs the demo, which takes minutes on a busy machine, and the others may wait for it.
pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

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


def test_the_demo_learns_and_says_so(demo_folder: Path) -> None:
    summary = json.loads((demo_folder / "demo" / "summary.json").read_text())
    assert summary.keys() == {"reward_first", "reward_last", "seconds", "tokens_per_s"}
    assert summary["reward_first"] <= 0.5 and summary["reward_last"] >= 0.9
    assert summary["seconds"] > 0 and summary["tokens_per_s"] > 0
    last = (demo_folder / "said.txt").read_text().rstrip().splitlines()[-1]
    assert re.fullmatch(r"reward \d\.\d\d -> \d\.\d\d in \d+ s", last), last
    assert last == f"reward {summary['reward_first']:.2f} -> {summary['reward_last']:.2f} in {summary['seconds']:.0f} s"


@pytest.fixture
def warm(demo_folder: Path) -> Iterator[Path]:
    """The demo's folder as the working directory: its data, its reward and its warmed-up model are in `demo`."""
    with contextlib.chdir(demo_folder):
        yield demo_folder


def test_every_algorithm_has_a_run() -> None:
    assert set(OPTIONS) == set(PRESETS) - {"sft"}


def learn(folder: Path, name: str, *options: str) -> list[float]:
    """The rewards of a run's steps. The demo is the run of GRPO."""
    if name == "grpo":
        return read_values(folder / "demo" / "grpo" / "metrics.jsonl", "critic/score/mean")[:STEPS]
    own_steps = any(option.startswith("run.steps=") for option in options)
    overrides = [f"algorithm.name={name}", f"run.dir={name}", *([] if own_steps else [f"run.steps={STEPS}"]), *options]
    config = configuration.load("demo/grpo.toml", overrides)
    loop.train(config, Console(quiet=True))
    return read_values(folder / name / "metrics.jsonl", "critic/score/mean")


# GRPO is the demo's; groups that are left out, a critic, and baselines that are sampled. The other algorithms differ in formulas, which
# test_algo.py compares with those of their papers.
LEARNED = ("grpo", "dapo", "ppo", "remax")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in LEARNED else pytest.mark.matrix) for name in OPTIONS])
def test_it_lifts_the_reward(warm: Path, name: str) -> None:
    rewards = learn(warm, name, *OPTIONS[name])
    first, last = np.mean(rewards[:3]), np.mean(rewards[-3:])
    assert last > first + LIFT, f"{first:.3f} -> {last:.3f}"
    if name == "ppo":
        explained = read_values(warm / name / "metrics.jsonl", "critic/vf_explained_var")
        assert np.mean(explained[-3:]) > 0.3, explained
