"""A tiny run that resume, command-line and loop tests share: model, data, rewards and RUN.toml in a folder of its own.

Paths in the file are relative and commands run inside the folder, so two runs in two folders have equal configurations.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fulltilt import cli, loop
from fulltilt import config as configuration
from fulltilt.loop.run import Run
from fulltilt.observe.console import Console
from fulltilt.schema import Config, toml_value

SOURCE = Path(__file__).parents[1] / "src"
PROMPTS = 18  # an epoch is 4 steps of 4 and leaves 2 out, so that a run of a few steps crosses from one epoch to the next

REWARDS = '''
import os
import time


def score(data_source, solution_str, ground_truth, extra_info):
    """More small letters are better. The parts show which row it was asked about."""
    letters = sum(character.islower() for character in solution_str)
    return {"score": letters / 24, "letters": letters, "truth": float(ground_truth)}


def sometimes_fails(data_source, solution_str, ground_truth, extra_info):
    if int(ground_truth) % 8 == 0:
        raise RuntimeError("no opinion")
    return sum(character.islower() for character in solution_str) / 24


def always_fails(data_source, solution_str, ground_truth, extra_info):
    raise RuntimeError("no opinion at all")


def not_a_number(data_source, solution_str, ground_truth, extra_info):
    return float("nan")


def undecided(data_source, solution_str, ground_truth, extra_info):
    """Finds all samples of every second row equally good."""
    return 1.0 if int(ground_truth) % 8 else sum(character.islower() for character in solution_str) / 24


def slow_once(data_source, solution_str, ground_truth, extra_info, there, seconds):
    """Takes its time as soon as there is such a file."""
    if os.path.exists(there):
        time.sleep(seconds)
    return sum(character.islower() for character in solution_str) / 24


def slow_from(data_source, solution_str, ground_truth, extra_info, first_slow, seconds):
    """Takes its time over rows whose answer is `first_slow` or more."""
    if float(ground_truth) >= first_slow:
        time.sleep(seconds)
    return sum(character.islower() for character in solution_str) / 24
'''

GRPO = {
    "model": {"path": "model"},
    "data": {"train": "train.jsonl", "val": "val.jsonl", "max_prompt_tokens": 16},
    "algorithm": {"name": "grpo", "prompts_per_step": 4, "samples_per_prompt": 4, "minibatches_per_step": 2, "kl_coef": 0.05},
    "rollout": {"max_new_tokens": 16},
    "reward": {"function": "reward.py:score", "workers": 1},
    "train": {"lr": 2e-3, "schedule": "cosine", "warmup_steps": 3, "weight_decay": 0.01},
    "health": {"ignore": ["all-clipped"]},  # a random model seldom draws its end token: by chance no response of a step does
    "run": {"dir": "run", "steps": 16, "save_every": 2, "keep": 2, "seed": 7, "eval_every": 5, "eval_before": True, "device": "cpu"},
}
SFT = {
    "model": {"path": "model"},
    "data": {"train": "sft.jsonl", "val": "sft.jsonl", "max_prompt_tokens": 16},
    "algorithm": {"name": "sft", "prompts_per_step": 4, "minibatches_per_step": 2},
    "train": {"lr": 2e-3, "warmup_steps": 3},
    "run": {"dir": "run", "steps": 6, "save_every": 3, "keep": 1, "seed": 7, "eval_every": 4, "device": "cpu"},
}

# What a clock decides, and memory, of which a process has its own: all else in the metrics is the same for the same run.
CLOCK = (
    "timing_s/", "timing_per_token_ms/", "perf/time_per_step", "perf/throughput", "rollout/time_", "rollout/prefill_tokens_per_s",
    "rollout/decode_tokens_per_s", "memory_gib/", "memory_spread_gib/", "sync/", "driver/",
    "perf/gpu_utilization",
)  # fmt: skip


TIMED = {"metrics_offset": 0, "seconds": {}}  # in a checkpoint's state


def make(folder: Path, model: Path, tables: Mapping[str, Mapping[str, Any]] = GRPO) -> Path:
    """All that a run needs, in `folder`, which is returned. The model is linked, for no run may change it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model").symlink_to(model)
    sums = [{"prompt": f"{n}+{3 * n}=", "ground_truth": str(4 * n), "data_source": "sums"} for n in range(PROMPTS)]
    write_rows(folder / "train.jsonl", sums)
    write_rows(folder / "val.jsonl", [{"prompt": f"{n}-1=", "ground_truth": str(n - 1), "data_source": "less"} for n in range(100, 103)])
    write_rows(folder / "sft.jsonl", [{"prompt": f"{n}+{3 * n}=", "response": f"is {4 * n}."} for n in range(PROMPTS)])
    (folder / "reward.py").write_text(REWARDS)
    lines = []
    for section, keys in tables.items():
        lines += [f"[{section}]", *(f"{key} = {toml_value(value)}" for key, value in keys.items())]
    (folder / "run.toml").write_text("\n".join(lines) + "\n")
    return folder


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def copy(source: Path, folder: Path) -> Path:
    """The run and all it has written, in another folder."""
    shutil.copytree(source, folder, symlinks=True)
    return folder


# -- as a user runs it ------------------------------------------------------------------------------------------------------------------


def search_path(*folders: Path) -> str:
    """PYTHONPATH of a child that imports this package, and what this process finds by its own PYTHONPATH."""
    return os.pathsep.join([*map(str, (SOURCE, *folders)), *filter(None, [os.environ.get("PYTHONPATH")])])


def environment() -> dict[str, str]:
    # As many threads as the tests' own process has: their number changes the last bits of a matrix product.
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    return {**os.environ, "PYTHONPATH": search_path(), "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "NO_COLOR": "1"}


def nothing() -> None:
    """Called first in a command's process."""


def hold_after(steps: int, first: Callable[[], object] = nothing) -> None:
    """Called first in a command's process, after `first`: once it has made so many steps, it waits in the next one until there is a file
    `released`. A signal finds it at work, however late the signal comes."""
    first()
    make_step, left = Run.rl_step, iter(range(steps))

    def held(run: Run, step: int) -> dict[str, Any]:
        while next(left, None) is None and not Path("released").exists():
            time.sleep(0.01)
        return make_step(run, step)

    Run.rl_step = held  # type: ignore[method-assign]


def tell_of_validation() -> None:
    """Called first in a command's process: there is a file `validating` once it validates."""
    validate = Run._validate

    def told(run: Run, step: int) -> dict[str, float]:
        Path("validating").touch()
        return validate(run, step)

    Run._validate = told  # type: ignore[method-assign]


@functools.cache
def _loaded() -> ForkServerContext:
    """A process that has imported torch and the package once and forks for each command: a new interpreter takes seconds for that."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "transformers.models.qwen2.modeling_qwen2"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", search_path(Path(__file__).parent))
        forkserver.ensure_running()
    return context


def _run_command(
    folder: Path, arguments: Sequence[str], stdout: Connection, variables: Mapping[str, str], first: Callable[[], object]
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background may ignore it, and so what it starts
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    with open("said.txt", "a") as said:
        os.dup2(said.fileno(), 2)
    os.dup2(stdout.fileno(), 1)
    stdout.close()
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    sys.argv = ["fulltilt", *last_of_each(arguments)]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup this suite begins with it ignored
    first()
    cli.main()


class Started:
    """A running command, with the part of subprocess.Popen that tests use."""

    def __init__(self, folder: Path, arguments: Sequence[str], first: Callable[[], object] = nothing) -> None:
        reader, writer = os.pipe()
        self.stdout = open(reader)  # noqa: SIM115
        with Connection(writer, readable=False) as stdout:
            self._process = _loaded().Process(target=_run_command, args=(folder, arguments, stdout, environment(), first))
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        while os.getpgid(self.pid) != self.pid and self.poll() is None:  # from then on a signal to its group reaches it
            time.sleep(0.001)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def communicate(self, timeout: float) -> str:
        """The rest of what it prints, once it has ended."""
        with self.stdout:
            out = self.stdout.read()
        self._process.join(timeout)
        assert self.returncode is not None, f"still running after {timeout} s"
        return out


def start(folder: Path, *arguments: str, first: Callable[[], object] = nothing) -> Started:
    """The command, running in a session of its own so that a signal to its group reaches nobody else; words for people in `said.txt`."""
    return Started(folder, arguments, first)


@dataclass(frozen=True)
class Ended:
    code: int | None
    out: str
    error: str


def command(folder: Path, *arguments: str, seconds: float = 240) -> Ended:
    """The command in a new interpreter, run to its end."""
    ended = subprocess.run(
        [sys.executable, "-m", "fulltilt.cli", *last_of_each(arguments)],
        cwd=folder, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds,
    )  # fmt: skip
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def command_forked(folder: Path, *arguments: str, first: Callable[[], object] = nothing) -> Ended:
    """The command in a process of its own that need not import torch, run to its end; `first` is called in that process before."""
    process = Started(folder, arguments, first)
    out = process.communicate(timeout=240)
    return Ended(process.returncode, out, (folder / "said.txt").read_text())


def _execute(code: str) -> None:
    exec(code, {"__name__": "__main__"})
    sys.stdout.flush()
    sys.exit()


def code_forked(folder: Path, code: str, *arguments: str) -> Ended:
    """A program in a process of its own that need not import torch, run to its end."""
    return command_forked(folder, *arguments, first=functools.partial(_execute, code))


# -- in this process --------------------------------------------------------------------------------------------------------------------


def command_here(folder: Path, *arguments: str) -> Ended:
    """The command line without the cost of a new process."""
    out, error, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["fulltilt", *last_of_each(arguments)]
    try:
        with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            cli.main()
    except SystemExit as ended:
        assert ended.code is None or isinstance(ended.code, int), ended.code
        return Ended(ended.code or 0, out.getvalue(), error.getvalue())
    finally:
        sys.argv = before
    raise AssertionError("a command ends with an exit code")


@dataclass(frozen=True)
class Trained:
    summary: loop.Summary
    said: str  # notes and warnings


def last_of_each(arguments: Sequence[str]) -> list[str]:
    """The arguments, of overrides of one key the last: tests share lists of overrides and change some of them."""
    keys = [argument.lstrip("~").partition("=")[0] if argument.startswith("~") or "=" in argument else None for argument in arguments]
    return [argument for place, argument in enumerate(arguments) if keys[place] is None or keys[place] not in keys[place + 1 :]]


def read_config(folder: Path, *overrides: str) -> Config:
    with contextlib.chdir(folder):
        return configuration.load("run.toml", last_of_each(overrides))


def train(folder: Path, *overrides: str) -> Trained:
    """`fulltilt train run.toml ...` without the cost of a new process."""
    config = read_config(folder, *overrides)
    said = io.StringIO()
    with contextlib.chdir(folder):
        summary = loop.train(config, Console(stdout=said, stderr=said, terminal=False))
    return Trained(summary, said.getvalue())


# -- what a run leaves ------------------------------------------------------------------------------------------------------------------


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def without_clock(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if not name.startswith(CLOCK)} for line in lines]


def comparable(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every name of each line, with the values that do not depend on a clock or on the process."""
    own = (*(name for name in CLOCK if name != "memory_gib/"), "memory_gib/process")
    return [{name: None if name.startswith(own) else value for name, value in line.items()} for line in lines]


def rollouts(folder: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "rollouts" / f"step-{step:06d}.jsonl").read_text().splitlines()]


def checkpoints(folder: Path) -> dict[int, Path]:
    """Every folder with the final name of a checkpoint, by step, the last one last."""
    return {int(path.name[5:]): path for path in sorted((folder / "run" / "checkpoints").glob("step-*")) if path.name[5:].isdigit()}


def parameters(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model" / "model.safetensors")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, byte for byte; empty if there is no such folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_equal_runs(one: Path, other: Path) -> None:
    """Two run folders hold the same checkpoints, metrics and rollouts, bit for bit, all that a clock decides aside."""
    assert comparable(metrics(one)) == comparable(metrics(other))
    assert contents(one / "run" / "rollouts") == contents(other / "run" / "rollouts")
    found, expected = checkpoints(one), checkpoints(other)
    assert list(found) == list(expected)
    leftovers = {path.name for path in (one / "run" / "checkpoints").iterdir()} - {path.name for path in found.values()}
    assert not leftovers, leftovers
    for step in expected:
        assert_equal_checkpoints(found[step], expected[step])
        assert state(found[step])["metrics_offset"] == bytes_of_metrics(one, step)


def assert_equal_checkpoints(one: Path, other: Path) -> None:
    assert_equal_tensors(one, other)
    # Where the metrics file ended hangs on how many digits its seconds have, and the seconds of a save are a clock's.
    assert {**state(one), **TIMED} == {**state(other), **TIMED}


def assert_equal_tensors(one: Path, other: Path) -> None:
    assert contents(one / "model") == contents(other / "model")
    assert [file.name for file in trainer_files(one)] == [file.name for file in trainer_files(other)]
    for found, wanted in zip(trainer_files(one), trainer_files(other), strict=True):
        tensors, expected = load_file(found), load_file(wanted)
        assert tensors.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(tensors[name], expected[name])] == []


def trainer_files(checkpoint: Path) -> list[Path]:
    """One file, or one for each worker."""
    return sorted(checkpoint.glob("trainer*.safetensors"))


def state(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
    return found


def bytes_of_metrics(folder: Path, step: int) -> int:
    lines = (folder / "run" / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    return sum(len(line) for line in lines if json.loads(line)["step"] <= step)
