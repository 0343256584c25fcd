"""A run that was killed, stopped or damaged ends with the very files of one that was left alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import runs

ModelFolders = Callable[[str], Path]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory, model_folders: ModelFolders) -> Path:
    """The run that nobody disturbed. Tests copy it or compare with it."""
    folder = runs.make(tmp_path_factory.mktemp("untouched") / "run", model_folders("qwen2"))
    finished = runs.command(folder, "train", "run.toml", "--json")
    assert finished.returncode == 0, finished.stderr
    assert [line["step"] for line in runs.metrics(folder)] == list(range(13))
    assert list(runs.checkpoints(folder)) == [10, 12]
    return folder


def step_seconds(folder: Path) -> float:
    spent = [line["timing_s/step"] for line in runs.metrics(folder)[1:]]
    return sum(spent) / len(spent)


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> Iterator[random.Random]:
    """Moments differ from one run of the tests to the next; FULLTILT_TEST_SEED brings those of a failure back, as far as a clock can."""
    seed = int(os.environ.get("FULLTILT_TEST_SEED", time.time_ns() % 1_000_000))
    print(f"FULLTILT_TEST_SEED={seed}")
    yield random.Random(seed)


def kill_while_training(folder: Path, chance: random.Random, unit: float, arguments: tuple[str, ...] = ()) -> int:
    """Start the command, wait for one to three lines of progress, then up to one and a half steps more, and kill -9. Returns the last step
    seen."""
    process = runs.start(folder, "train", "run.toml", "--json", *arguments)
    assert process.stdout is not None
    seen = [process.stdout.readline() for _ in range(chance.randint(1, 3))]
    assert all(seen), f"it ended before it could be killed: {(folder / 'said.txt').read_text()}"
    time.sleep(chance.uniform(0, 1.5) * unit)
    return kill(process)


def kill_at_start(folder: Path, chance: random.Random, seconds: float) -> int:
    process = runs.start(folder, "train", "run.toml", "--json")
    time.sleep(chance.uniform(0, seconds))
    return kill(process)


def kill(process: subprocess.Popen[str]) -> int:
    process.kill()
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, "it was done before the kill: make the run longer"
    return len(rest.splitlines())


def finish(folder: Path) -> None:
    ended = runs.command(folder, "train", "run.toml", "--json")
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
