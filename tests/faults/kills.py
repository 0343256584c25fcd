"""Training runs that are killed at random moments, again and again, and must end with the very files of a run that was left alone.

Each algorithm runs once undisturbed. Then further runs of it are killed, most often with kill -9: half of the kills come at a moment
spread over the run's whole life, the other half within milliseconds after a checkpoint begins to be written, is renamed or is deleted. A
run that comes to its end is compared, and the next one begins.
"""

from __future__ import annotations

import json
import os
import random
import signal
import stat
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import child
import runs

Tables = dict[str, dict[str, Any]]

STEPS = 10
RUN = {"dir": "run", "steps": STEPS, "save_every": 2, "keep": 2, "seed": 7, "eval_every": 5, "eval_before": True, "device": "cpu"}
SAMPLED: Tables = {
    "model": {"path": "model"},
    "data": {"train": "train.jsonl", "val": "val.jsonl", "max_prompt_tokens": 16},
    "algorithm": {"name": "grpo", "prompts_per_step": 4, "samples_per_prompt": 3, "minibatches_per_step": 2, "kl_coef": 0.05},
    "rollout": {"max_new_tokens": 8},
    "reward": {"function": "reward.py:score", "workers": 1},
    "train": {"lr": 2e-3, "schedule": "cosine", "warmup_steps": 3, "weight_decay": 0.01},
    "health": {"ignore": ["all-clipped"]},
    "run": RUN,
}
PPO = {
    "name": "ppo",
    "prompts_per_step": 4,
    "samples_per_prompt": 2,
    "reward_kl_coef": 0.05,
    "reward_kl_target": 0.01,
    "reward_kl_horizon": 100,
}
KILLED: dict[str, Tables] = {
    "grpo": SAMPLED,
    # `undecided` finds all samples of half of the rows equally good, so that groups are left out and others carried over.
    "dapo": SAMPLED | {"algorithm": {"name": "dapo", "prompts_per_step": 4, "samples_per_prompt": 3}}
    | {"reward": {"function": "reward.py:undecided", "workers": 1}},
    "ppo": SAMPLED | {"algorithm": PPO},
    "lora": SAMPLED | {"lora": {"rank": 2}},
    "sft": {name: section for name, section in runs.SFT.items() if name != "run"} | {"run": RUN | {"eval_before": False}},
}  # fmt: skip
GRACEFUL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LIFE_S = 240.0
# What a clock decides, and the memory of the process. The memory of its parts is the same for the same run.
VARIES = (*(name for name in runs.CLOCK if name != "memory_gib/"), "memory_gib/process")
APPENDED = "reward_errors.jsonl"  # to which every process appends


@dataclass
class Killed:
    """One task: so many kills of runs of one algorithm."""

    name: str
    kills: int
    chance: random.Random
    folder: Path
    expected: Path
    seconds: float  # of a run left alone
    runs: int = 0
    lives: int = 0
    done: int = 0
    graceful: int = 0
    saved: set[int] = field(default_factory=set)  # steps that the present run saved because it was told to end
    faults: list[str] = field(default_factory=list)

    def work(self) -> None:
        while self.done < self.kills:
            self.runs += 1
            self.saved.clear()
            folder = make(self.folder / f"run-{self.runs}", self.name, self.expected.parent / "model")
            while (code := self.live(folder, self.done < self.kills)) not in (0, None):
                pass
            if code == 0:
                self.faults += [f"{folder.name}: {text}" for text in differences(folder / "run", self.expected / "run", self.saved)]

    def live(self, folder: Path, kill: bool) -> int | None:
        """One process, killed or not. Its exit code; None when something is wrong."""
        self.lives += 1
        number = signal.SIGKILL if self.chance.random() < 0.85 else self.chance.choice(GRACEFUL)
        pid = start(folder)
        if kill and self.wait_for_moment(pid, folder / "run" / "checkpoints"):
            os.kill(pid, number)
            self.done += 1
            self.graceful += number != signal.SIGKILL
        code = wait(pid)
        left = list(child.left_behind())
        said = (folder.parent / f"{folder.name}.said" / "error").read_text(errors="replace")
        self.saved |= {int(step) for step in [said.partition("stopped after step ")[2].split(" ")[0]] if step.isdigit()}
        wrong = [f"process left behind: {text}" for text in left]
        if "Traceback" in said or code not in (0, 130, -number):
            wrong.append(f"{signal.Signals(number).name}: exit code {code}: {said[-1500:]}")
        self.faults += [f"{folder.name}, life {self.lives}: {text}" for text in wrong]
        return None if wrong else code

    def wait_for_moment(self, pid: int, checkpoints: Path) -> bool:
        """Sleep until the process is to be killed. False: it ended before."""
        if self.chance.random() < 0.5:
            return asleep(pid, self.chance.uniform(0, 1.1 * self.seconds))
        word = self.chance.choice((".partial-", ".trash-", ".replaced", "step-"))
        skipped, before, changes = self.chance.randrange(4), listing(checkpoints), 0
        while changes <= skipped:
            if not asleep(pid, 0.0005):
                return False
            now = listing(checkpoints)
            changes += any(word in name for name in now ^ before)
            before = now
        return asleep(pid, self.chance.choice((0.0, 0.001, 0.003, 0.01, 0.03)))


def listing(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()


def asleep(pid: int, seconds: float) -> bool:
    """Sleep so long; False once the process has ended."""
    end = time.monotonic() + seconds
    while True:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return False
        if (left := end - time.monotonic()) <= 0:
            return True
        time.sleep(min(left, 0.02))


def make(folder: Path, name: str, model: Path) -> Path:
    runs.make(folder, model, deepcopy(KILLED[name]))
    for inner in ("home", "tmp"):
        (folder / inner).mkdir()
    return folder


def start(folder: Path) -> int:
    record = folder.parent / f"{folder.name}.said"
    record.mkdir(exist_ok=True)
    pid = os.fork()
    if pid == 0:
        child.be_the_command(
            folder, record, ["train", "run.toml"], {}, child.Surroundings(), None, os.open(os.devnull, os.O_WRONLY), LIFE_S
        )
    return pid


def wait(pid: int) -> int:
    if asleep(pid, LIFE_S):
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# ---- what must be equal ------------------------------------------------------------------------------------------------------------------


def differences(one: Path, other: Path, saved: set[int]) -> Iterator[str]:
    """What the files of two run folders tell apart, all that a clock decides aside. `saved`: steps that the first one saved on top."""
    lines, expected = ([json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (one, other))
    for mine, theirs in zip(lines, expected, strict=False):
        if other_values := [name for name in theirs if name in mine and mine[name] != theirs[name] and not name.startswith(VARIES)]:
            yield f"metrics of step {theirs['step']} have other values: {other_values}"
        if mine.keys() != theirs.keys():
            yield f"metrics of step {theirs['step']} have other names: {sorted(mine.keys() ^ theirs.keys())}"
    if len(lines) != len(expected):
        yield f"{len(lines)} lines of metrics instead of {len(expected)}"
    yield from different_files(one, other)
    yield from different_checkpoints(one / "checkpoints", other / "checkpoints", saved)


def different_files(one: Path, other: Path) -> Iterator[str]:
    """Everything outside checkpoints/, and every mode."""
    mine, theirs = (
        {str(path.relative_to(run)): path for path in run.rglob("*") if path.name != APPENDED and run / "checkpoints" not in path.parents}
        for run in (one, other)
    )
    if mine.keys() != theirs.keys():
        yield f"other files: {sorted(mine.keys() ^ theirs.keys())}"
    for name in sorted(mine.keys() & theirs.keys()):
        if stat.S_IMODE(mine[name].stat().st_mode) != stat.S_IMODE(theirs[name].stat().st_mode):
            yield f"{name} has another mode"
        if mine[name].is_file() and name not in ("metrics.jsonl",) and mine[name].read_bytes() != theirs[name].read_bytes():
            yield f"{name} differs"


def different_checkpoints(one: Path, other: Path, saved: set[int]) -> Iterator[str]:
    regular = sorted(path.name for path in other.iterdir())
    every = sorted({*regular, *(f"step-{step:08d}" for step in saved)})
    expected, found = every[len(every) - len(regular) :], sorted(path.name for path in one.iterdir())
    if found != expected:
        yield f"checkpoints/ holds {found} instead of {expected}"
    for name in sorted({*found} & {*regular}):
        try:
            runs.assert_equal_checkpoints(one / name, other / name)
        except AssertionError as error:
            yield f"checkpoint {name} differs: {str(error)[:300]}"


# ---- all of them -------------------------------------------------------------------------------------------------------------------------


def undisturbed(folder: Path, name: str, model: Path) -> float:
    make(folder, name, model)
    begin = time.monotonic()
    code = wait(start(folder))
    if code:
        sys.exit(f"{name}: the run left alone ended with {code}: {(folder.parent / f'{folder.name}.said' / 'error').read_text()[-2000:]}")
    return time.monotonic() - begin


def work(name: str, kills: int, seed: int, scratch: Path) -> Killed:
    """In a process of its own."""
    child.become_reaper()
    folder = scratch / name
    folder.mkdir()
    (folder / "model").symlink_to(scratch / "model")
    seconds = undisturbed(folder / "expected", name, folder / "model")
    task = Killed(name, kills, random.Random(f"{seed}/{name}"), folder, folder / "expected", seconds)
    task.work()
    return task


def kill_all(kills: int, seed: int, scratch: Path, processes: int, forked: Callable[[Callable[[], None]], int]) -> int:
    """So many kills, dealt out among the algorithms. The number of faults."""
    scratch.mkdir()
    begin = time.monotonic()

    def make_model() -> None:
        import models
        from transformers.utils import logging

        logging.disable_progress_bar()
        models.save("qwen2", scratch / "model")

    os.waitpid(forked(make_model), 0)
    waiting = [(name, kills // len(KILLED) + (place < kills % len(KILLED))) for place, name in enumerate(KILLED)]
    running: set[int] = set()
    while waiting or running:
        while waiting and len(running) < processes:
            name, count = waiting.pop(0)
            running.add(forked(lambda name=name, count=count: report_to(scratch / f"{name}.json", name, count, seed, scratch)))  # type: ignore[misc]
        running.discard(os.wait()[0])
    return summary([scratch / f"{name}.json" for name in KILLED], time.monotonic() - begin, seed)


def report_to(path: Path, name: str, kills: int, seed: int, scratch: Path) -> None:
    try:
        task = work(name, kills, seed, scratch)
        found: dict[str, Any] = {
            "kills": task.done,
            "graceful": task.graceful,
            "runs": task.runs,
            "lives": task.lives,
            "faults": task.faults,
        }
    except BaseException:
        found = {"kills": 0, "graceful": 0, "runs": 0, "lives": 0, "faults": [traceback.format_exc()]}
    path.write_text(json.dumps(found))


def summary(paths: Sequence[Path], seconds: float, seed: int) -> int:
    faults = total = 0
    for path in paths:
        found = (
            json.loads(path.read_text()) if path.exists() else {"kills": 0, "graceful": 0, "runs": 0, "lives": 0, "faults": ["no report"]}
        )
        kills = f"{found['kills']} kills ({found['graceful']} of them signals that save)"
        print(f"{path.stem}: {kills} in {found['lives']} lives of {found['runs']} runs")
        for text in found["faults"]:
            print(f"    {text}")
        faults += len(found["faults"])
        total += found["kills"]
    print(f"kills: {total} over {', '.join(KILLED)} (seed {seed}) in {seconds:.0f} s: {faults} differences from runs left alone")
    return faults
