"""A run that was killed, stopped or damaged ends with the very files of one that was left alone."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import runs
from variants import sample_cases

from fulltilt import loop
from fulltilt.loop.folder import open_run_folder
from fulltilt.loop.run import Run
from fulltilt.observe.console import Console
from fulltilt.records import UserError
from fulltilt.training import checkpoint as store

ModelFolders = Callable[[str], Path]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory, model_folders: ModelFolders) -> Path:
    """The run that nobody disturbed. Tests copy it or compare with it."""
    folder = runs.make(tmp_path_factory.mktemp("untouched") / "folder", model_folders("qwen2"))
    finish(folder)
    assert [line["step"] for line in runs.metrics(folder)] == list(range(17))
    assert list(runs.checkpoints(folder)) == [14, 16]
    return folder


@pytest.fixture
def chance() -> random.Random:
    """Moments differ from one run of the tests to the next; FULLTILT_TEST_SEED brings those of a failure back, as far as a clock can."""
    seed = int(os.environ.get("FULLTILT_TEST_SEED", time.time_ns() % 1_000_000))
    print(f"FULLTILT_TEST_SEED={seed}")
    return random.Random(seed)


def step_seconds(folder: Path) -> float:
    spent = [line["timing_s/step"] for line in runs.metrics(folder)[1:]]
    return sum(spent) / len(spent)


def finish(folder: Path, *overrides: str) -> None:
    process = runs.start(folder, "train", "run.toml", "--json", *overrides)
    process.communicate(timeout=240)
    assert process.returncode == 0, (folder / "said.txt").read_text()


def start_and_wait(folder: Path, lines: int, *overrides: str) -> runs.Started:
    """The command, once it has told of so many steps. It waits soon after, so that it cannot be done before it is killed."""
    process = runs.start(folder, "train", "run.toml", "--json", *overrides, first=functools.partial(runs.hold_after, lines + 1))
    for _ in range(lines):
        assert process.stdout.readline(), f"it ended too early: {(folder / 'said.txt').read_text()}"
    return process


def end_with(process: runs.Started, number: signal.Signals) -> int | None:
    """Send the signal to the whole group, as a terminal does. One that closes sends SIGHUP twice."""
    for _ in range(2 if number == signal.SIGHUP else 1):
        os.killpg(process.pid, number)
    process.communicate(timeout=120)
    return process.returncode


# -- kill -9 ----------------------------------------------------------------------------------------------------------------------------


def kill_while_training(folder: Path, chance: random.Random, unit: float, *overrides: str, least: int = 1) -> None:
    """After `least` to `least` + 2 lines of progress and up to one and a half steps more."""
    process = start_and_wait(folder, chance.randint(least, least + 2), *overrides)
    time.sleep(chance.uniform(0, 1.5) * unit)
    assert end_with(process, signal.SIGKILL) == -signal.SIGKILL, "it was done before the kill: make the run longer"


def kill_at_any_time(folder: Path, chance: random.Random, seconds: float, *overrides: str) -> None:
    process = runs.start(folder, "train", "run.toml", "--json", *overrides, first=functools.partial(runs.hold_after, 3))
    time.sleep(chance.uniform(0, seconds))
    assert end_with(process, signal.SIGKILL) == -signal.SIGKILL, "it was done before the kill: make the run longer"


def test_kill_at_random_moments(tmp_path: Path, untouched: Path, model_folders: ModelFolders, chance: random.Random) -> None:
    folder = runs.make(tmp_path / "killed", model_folders("qwen2"))
    for least in (1, 4):  # the last one after a checkpoint for certain
        kill_while_training(folder, chance, step_seconds(untouched), least=least)
    assert runs.checkpoints(folder), "every kill came before the first checkpoint, so they proved little"
    finish(folder)
    runs.assert_equal_runs(folder, untouched)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.matrix
def test_ten_kills_at_random_moments(tmp_path: Path, model_folders: ModelFolders, chance: random.Random) -> None:
    """Two of them while the process starts; and a checkpoint after every step, so that many fall into its writing."""
    # The tiny model soon ends no response by itself, which would rightly stop the run.
    longer = ("run.steps=50", "run.save_every=1", 'health.ignore=["all-clipped"]')
    expected = runs.make(tmp_path / "expected", model_folders("llama-tied"))
    begin = time.perf_counter()
    finish(expected, *longer)
    unit = step_seconds(expected)
    start_seconds = time.perf_counter() - begin - 50 * unit

    folder = runs.make(tmp_path / "killed", model_folders("llama-tied"))
    for number in range(10):
        if number in (3, 6):
            kill_at_any_time(folder, chance, start_seconds, *longer)
        else:
            kill_while_training(folder, chance, unit, *longer)
    assert len(runs.metrics(folder)) > 5
    finish(folder, *longer)
    runs.assert_equal_runs(folder, expected)


# -- Ctrl-C and termination -------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_stopped_twice_then_gone_on(tmp_path: Path, untouched: Path, model_folders: ModelFolders, chance: random.Random) -> None:
    folder = runs.make(tmp_path / "stopped", model_folders("qwen2"))
    reached = 0
    for number in (signal.SIGHUP, signal.SIGTERM):
        (folder / "said.txt").unlink(missing_ok=True)
        process = start_and_wait(folder, 3)
        time.sleep(chance.uniform(0, 1) * step_seconds(untouched))
        assert end_with(process, number) == 130
        said = (folder / "said.txt").read_text()
        last = runs.metrics(folder)[-1]["step"]
        assert last > reached
        reached = last
        assert list(runs.checkpoints(folder))[-1] == last
        assert f"stopped after step {last} and saved" in said
        assert "resume with: fulltilt train run.toml --json" in said
        assert "Traceback" not in said
    finish(folder)
    runs.assert_equal_runs(folder, untouched)


def interrupt_when(holds: Callable[[], bool], delay: float = 0.5) -> threading.Thread:
    """Ctrl-C to this very process so many seconds after `holds`."""

    def wait_and_send() -> None:
        while not holds():
            time.sleep(0.01)
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=wait_and_send, daemon=True)
    thread.start()
    return thread


def test_the_step_in_progress_is_discarded_at_once(tmp_path: Path, model_folders: ModelFolders) -> None:
    """Its rewards would take two minutes in all; the checkpoint is that of the step before, and nothing of the dropped one is left."""
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    slow = ("reward.function=reward.py:slow_from", "reward.args={ first_slow = 16, seconds = 8 }", "reward.timeout_s=100")
    options = ("data.shuffle=false", "run.steps=3", "run.save_every=0", "run.eval_every=0", "run.eval_before=false", *slow)
    handler = signal.getsignal(signal.SIGINT)
    metrics = folder / "run" / "metrics.jsonl"
    sender = interrupt_when(lambda: metrics.exists() and metrics.read_bytes().endswith(b"\n"))
    begin = time.perf_counter()
    trained = runs.train(folder, *options)
    sender.join()
    assert time.perf_counter() - begin < 100
    assert (trained.summary.interrupted, trained.summary.steps) == (True, 1)
    assert list(runs.checkpoints(folder)) == [1]
    assert [line["step"] for line in runs.metrics(folder)] == [1]
    assert list(runs.contents(folder / "run" / "rollouts")) == ["step-000001.jsonl"]
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.long
def test_a_stop_between_two_updates_saves_no_half_of_a_step(tmp_path: Path, model_folders: ModelFolders) -> None:
    """Most of each step is its eighteen updates. Whichever step is the last whole one, its checkpoint is that of a run left alone."""
    options = ("algorithm.epochs=9", "run.steps=3", "run.keep=3", "run.eval_every=0", "run.eval_before=false")
    expected = runs.make(tmp_path / "expected", model_folders("qwen2"))
    runs.train(expected, *options, "run.save_every=1")
    folder = runs.make(tmp_path / "stopped", model_folders("qwen2"))
    sender = interrupt_when((folder / "run" / "rollouts" / "step-000001.jsonl").exists, delay=0.6 * step_seconds(expected))
    trained = runs.train(folder, *options, "run.save_every=0")
    sender.join()
    last = trained.summary.steps
    assert trained.summary.interrupted and last in (1, 2)
    runs.assert_equal_tensors(runs.checkpoints(folder)[last], runs.checkpoints(expected)[last])
    assert runs.without_clock(runs.metrics(folder)) == runs.without_clock(runs.metrics(expected)[:last])


@pytest.mark.long
def test_once_parameters_have_moved_a_stop_waits_for_the_end_of_the_step(
    tmp_path: Path, model_folders: ModelFolders, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Validation of step 1 is slow and its update is done: the step is kept, its line and checkpoint are whole."""
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    slow = ("reward.function=reward.py:slow_from", "reward.args={ first_slow = 99, seconds = 3 }")
    begun, validate = threading.Event(), Run._validate
    monkeypatch.setattr(Run, "_validate", lambda run, step: begun.set() or validate(run, step))
    sender = interrupt_when(begun.is_set)
    trained = runs.train(folder, "run.eval_before=false", "run.eval_every=1", "run.save_every=0", "eval.max_prompts=2", *slow)
    sender.join()
    assert (trained.summary.interrupted, trained.summary.steps) == (True, 1)
    assert "stopping at the end of this step" in capfd.readouterr().err
    (line,) = runs.metrics(folder)
    assert line["step"] == 1 and "val/reward/mean" in line
    assert list(runs.checkpoints(folder)) == [1]


def test_a_closed_terminal_leaves_no_signal_handler(tmp_path: Path, model_folders: ModelFolders) -> None:
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    config = runs.read_config(folder, "run.eval_before=false", "run.steps=2")

    def hang_up(step: int, metrics: dict[str, Any]) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)

    def mine(number: int, frame: object) -> None:
        raise AssertionError("it came while the run ended")

    before = signal.signal(signal.SIGHUP, mine)
    try:
        with contextlib.chdir(folder):
            assert loop.train(config, Console(quiet=True), hang_up).interrupted
        assert signal.getsignal(signal.SIGHUP) is mine
    finally:
        signal.signal(signal.SIGHUP, before)


# -- while a checkpoint is being written beside training ---------------------------------------------------------------------------------

BESIDE = ("run.save_every=2", "run.keep=1", "run.eval_every=0", "run.eval_before=false")


def hold_back(monkeypatch: pytest.MonkeyPatch, step: int, until: Callable[[], bool], error: OSError | None = None) -> None:
    """The thread that writes the checkpoint of this step waits; then it goes on, or fails."""
    write = store.write_manifest

    def later(folder: Path, number: int, go_on: Callable[[], None], known: store.Digests) -> None:
        if number == step and threading.current_thread().name.startswith("checkpoint"):
            while not until():
                go_on()
                time.sleep(0.01)
            if error:
                raise error
        write(folder, number, go_on, known)

    monkeypatch.setattr(store, "write_manifest", later)


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def seen_in(folder: Path, step: int) -> Callable[[], bool]:
    return lambda: (folder / "run" / "rollouts" / f"step-{step:06d}.jsonl").exists()


def seconds_after(true: Callable[[], bool], seconds: float) -> Callable[[], bool]:
    since: list[float] = []

    def later() -> bool:
        if not since and true():
            since.append(time.perf_counter())
        return bool(since) and time.perf_counter() > since[0] + seconds

    return later


@pytest.mark.long
def test_ctrl_c_waits_for_what_is_being_written(tmp_path: Path, model_folders: ModelFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    hold_back(monkeypatch, 2, seconds_after(seen_in(folder, 3), 2.0))
    sender = interrupt_when(seen_in(folder, 3))
    trained = runs.train(folder, *BESIDE, "run.steps=300")
    sender.join()
    assert trained.summary.interrupted and list(runs.checkpoints(folder)) == [trained.summary.steps]


@pytest.mark.usefixtures("heard")
def test_a_second_ctrl_c_leaves_nothing_that_writes(tmp_path: Path, model_folders: ModelFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has the lock next has the folder alone."""
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    hold_back(monkeypatch, 4, lambda: False)
    senders = [interrupt_when(seen_in(folder, 5)), interrupt_when(seen_in(folder, 5), delay=1.0)]
    there = folder / "run" / "rollouts" / "step-000005.jsonl"
    slow = ("reward.function=reward.py:slow_once", f"reward.args={{ there = '{there}', seconds = 5 }}", "reward.timeout_s=100")
    with pytest.raises(KeyboardInterrupt):
        runs.train(folder, *BESIDE, "run.steps=8", *slow)
    for sender in senders:
        sender.join()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint") and thread.is_alive()]
    assert [path.name for path in (folder / "run" / "checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.long
def test_a_disk_that_was_full_for_a_while_is_a_warning(
    tmp_path: Path, model_folders: ModelFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next checkpoint is made at once, not when it would be due."""
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    hold_back(monkeypatch, 4, seen_in(folder, 5), full())
    trained = runs.train(folder, "run.save_every=4", "run.keep=9", "run.eval_every=0", "run.eval_before=false", "run.steps=9")
    assert "step 4 could not be written" in trained.said
    first, *others = runs.checkpoints(folder)
    assert first in (5, 6) and others == [8, 9]


def test_a_disk_that_stays_full_stops_the_run(tmp_path: Path, model_folders: ModelFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    write = store.write_manifest

    def fills_up(folder: Path, number: int, go_on: Callable[[], None], known: store.Digests) -> None:
        if number > 2:
            raise full()
        write(folder, number, go_on, known)

    monkeypatch.setattr(store, "write_manifest", fills_up)
    with pytest.raises(UserError, match=r"could not be written.*No space left"):
        runs.train(folder, *BESIDE, "run.steps=16")
    assert [path.name for path in (folder / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    assert len(runs.metrics(folder)) < 16


@pytest.mark.long
def test_ctrl_c_after_a_disk_was_full_saves_all_the_same(
    tmp_path: Path, model_folders: ModelFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    hold_back(monkeypatch, 2, seconds_after(seen_in(folder, 3), 2.0), full())
    sender = interrupt_when(seen_in(folder, 3))
    trained = runs.train(folder, *BESIDE, "run.steps=300")
    sender.join()
    assert trained.summary.interrupted and list(runs.checkpoints(folder)) == [trained.summary.steps]
    assert "step 2 could not be written" in trained.said


# -- in one process, new objects --------------------------------------------------------------------------------------------------------


def cut_back(folder: Path, step: int) -> None:
    """What a kill after this step's checkpoint, and before the next one's, leaves at worst: metrics and rollouts of steps that are lost."""
    for saved, path in runs.checkpoints(folder).items():
        if saved > step:
            shutil.rmtree(path)


EXPERTS = 'lora.parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]'
ADAPTERS = {family: ("lora.rank=4", *([EXPERTS] if family in ("qwen3-moe", "mixtral") else [])) for family in models.FAMILIES}


# Tensors are saved and restored by their names: what differs is whether they are tied, joined or stacked, and whether they have adapters.
RESUMED_LONG = {
    *((family, False) for family in ("llama-tied", "mixtral")),
    *((family, True) for family in ("phi3", "qwen3-moe")),
}


@pytest.mark.parametrize(
    ("family", "adapters"),
    [
        pytest.param(*case, id=f"{family}-{name}", marks=pytest.mark.long if case in RESUMED_LONG else pytest.mark.matrix)
        for family in models.FAMILIES
        for name, adapters in (("whole", False), ("adapters", True))
        for case in [(family, adapters)]
    ],
)
def test_every_family_resumes_exactly(tmp_path: Path, model_folders: ModelFolders, family: str, adapters: bool) -> None:
    # Some of these models never end a response: a sick step would have no checkpoint.
    options = ("run.steps=4", "run.save_every=2", "run.eval_every=3", 'health.ignore=["all-clipped"]')
    options += ADAPTERS[family] if adapters else ()
    expected = runs.make(tmp_path / "expected", model_folders(family))
    assert runs.train(expected, *options).summary.steps == 4
    folder = runs.copy(expected, tmp_path / "resumed")
    cut_back(folder, 2)
    assert "resuming from step 2" in runs.train(folder, *options).said
    runs.assert_equal_runs(folder, expected)


@pytest.mark.parametrize("dtype", sample_cases(["float32", "bfloat16"], "bfloat16"))
def test_an_sft_run_resumes_exactly_when_its_steps_are_raised(tmp_path: Path, model_folders: ModelFolders, dtype: str) -> None:
    """In bfloat16 the float32 masters are not the model's own weights: they must come back too."""
    expected = runs.make(tmp_path / "expected", model_folders("qwen2"), runs.SFT)
    runs.train(expected, f"model.dtype={dtype}")
    folder = runs.make(tmp_path / "resumed", model_folders("qwen2"), runs.SFT)
    assert runs.train(folder, f"model.dtype={dtype}", "run.steps=3").summary.steps == 3
    assert runs.train(folder, f"model.dtype={dtype}").summary.steps == 6
    runs.assert_equal_runs(folder, expected)
    assert "val/loss" in runs.metrics(folder)[3]


@pytest.mark.parametrize(
    "name",
    sample_cases(["trainer.safetensors", "model/model.safetensors", "state.json", "manifest.json"], "trainer.safetensors", "manifest.json"),
)
def test_a_torn_checkpoint_is_passed_over(tmp_path: Path, untouched: Path, name: str) -> None:
    folder = runs.copy(untouched, tmp_path / "torn")
    torn = runs.checkpoints(folder)[16] / name
    os.truncate(torn, torn.stat().st_size // 2)
    said = runs.train(folder).said
    assert "warning: skipped a damaged checkpoint:" in said and "step-00000016" in said and name in said
    assert "resuming from step 14" in said
    runs.assert_equal_runs(folder, untouched)


def test_what_a_kill_left_half_written_is_mended(tmp_path: Path, untouched: Path) -> None:
    folder = runs.copy(untouched, tmp_path / "cut")
    cut_back(folder, 14)
    metrics = folder / "run" / "metrics.jsonl"
    os.truncate(metrics, metrics.stat().st_size - 20)
    for name in ("step-000017.jsonl", "step-000018.jsonl.partial"):  # of a longer run that was killed, as this one is not
        (folder / "run" / "rollouts" / name).write_text('{"half')
    assert "shorter" not in runs.train(folder).said
    runs.assert_equal_runs(folder, untouched)


# -- what may not go on -----------------------------------------------------------------------------------------------------------------


def test_a_changed_algorithm_is_refused_by_name(tmp_path: Path, untouched: Path) -> None:
    folder = runs.copy(untouched, tmp_path / "changed")
    before = runs.contents(folder / "run")
    refused = runs.command_here(folder, "train", "run.toml", "algorithm.kl_coef=0.1", "run.steps=17")
    assert refused.code == 2
    assert "error: run holds a run at step 16 that was started with other values of algorithm.kl_coef (0.05, now 0.1). " in refused.error
    assert "run.resume = force" in refused.error
    assert runs.contents(folder / "run") == before

    forced = runs.train(folder, "algorithm.kl_coef=0.1", "run.steps=17", "run.resume=force")
    assert "warning: resuming although these keys changed: algorithm.kl_coef" in forced.said
    assert runs.metrics(folder)[-1]["step"] == 17


def test_never_resuming_is_honoured(tmp_path: Path, untouched: Path) -> None:
    folder = runs.copy(untouched, tmp_path / "never")
    before = runs.contents(folder / "run")
    refused = runs.command_here(folder, "train", "run.toml", "run.resume=never")
    assert refused.code == 2
    assert "run.resume = never: run holds a run at step 16" in refused.error
    assert runs.contents(folder / "run") == before


def test_a_finished_run_is_done_and_more_steps_go_on(tmp_path: Path, untouched: Path) -> None:
    folder = runs.copy(untouched, tmp_path / "again")
    again = runs.command_here(folder, "train", "run.toml")
    assert again.code == 0, again.error
    assert "done: 16 steps" in again.out
    runs.assert_equal_runs(folder, untouched)

    assert "the cosine schedule now ends at another step" in runs.train(folder, "run.steps=18").said
    assert list(runs.checkpoints(folder)) == [16, 18]
    assert runs.without_clock(runs.metrics(folder)[:17]) == runs.without_clock(runs.metrics(untouched))
    assert [line["step"] for line in runs.metrics(folder)[17:]] == [17, 18]


def test_a_second_process_is_kept_out(tmp_path: Path, model_folders: ModelFolders) -> None:
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    first = start_and_wait(folder, 4)
    os.killpg(first.pid, signal.SIGSTOP)
    try:
        before = runs.contents(folder / "run")
        second = runs.command_here(folder, "train", "run.toml")
        assert second.code == 2
        assert "error: run.dir: another process is running in run." in second.error
        assert "Traceback" not in second.error
        assert runs.contents(folder / "run") == before
    finally:
        assert end_with(first, signal.SIGKILL) == -signal.SIGKILL
    # A killed process leaves no lock behind.
    assert "resuming from step" in runs.train(folder, "run.steps=5").said


def test_a_second_process_is_kept_out_before_it_loads(tmp_path: Path, model_folders: ModelFolders) -> None:
    """Also while the first one has no checkpoint yet."""
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    with open_run_folder(folder / "run"):
        second = runs.command_here(folder, "train", "run.toml")
    assert (second.code, second.out) == (2, "") and "another process is running in run." in second.error


# -- what must not be lost or mixed up ---------------------------------------------------------------------------------------------------


def test_checkpoints_that_cannot_be_used_are_not_written_over(tmp_path: Path, untouched: Path) -> None:
    folder = runs.copy(untouched, tmp_path / "folder")
    for checkpoint in runs.checkpoints(folder).values():
        (checkpoint / "trainer.safetensors").write_bytes(b"torn")
    before = runs.contents(folder / "run")
    refused = runs.command_here(folder, "train", "run.toml")
    assert refused.code == 2 and "none that can be used" in refused.error
    assert refused.error.count("trainer.safetensors has") == len(runs.checkpoints(folder))  # each is told once
    assert runs.contents(folder / "run") == before


def test_other_rows_under_the_same_path_are_noticed(tmp_path: Path, model_folders: ModelFolders) -> None:
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    quick = ("run.eval_every=0", "run.eval_before=false")
    runs.train(folder, *quick, "run.steps=1")
    rows = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(rows[:9]))
    with pytest.raises(UserError, match=r"data\.train: its rows"):
        runs.train(folder, *quick, "run.steps=2")
    assert "rows of data.train changed" in runs.train(folder, *quick, "run.steps=2", "run.resume=force").said


@pytest.mark.long
def test_a_run_killed_before_its_first_checkpoint_starts_with_the_same_sizes(
    tmp_path: Path, model_folders: ModelFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free memory is never the same twice; what was planned from it is."""
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    quick = ("run.eval_every=0", "run.eval_before=false", "run.steps=1")
    monkeypatch.setattr("fulltilt.cluster.making.free_bytes", lambda device: 2**18)
    runs.train(folder, *quick)
    planned = runs.state(runs.checkpoints(folder)[1])["budgets"]
    shutil.rmtree(folder / "run" / "checkpoints")
    monkeypatch.setattr("fulltilt.cluster.making.free_bytes", lambda device: 2**17)
    runs.train(folder, *quick)
    assert runs.state(runs.checkpoints(folder)[1])["budgets"] == planned
    shutil.rmtree(folder / "run")
    runs.train(folder, *quick)
    assert runs.state(runs.checkpoints(folder)[1])["budgets"] != planned


def test_a_mistake_in_validation_loses_no_step(tmp_path: Path, model_folders: ModelFolders) -> None:
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    nan_for_validation = "reward.sources={ less = 'reward.py:not_a_number' }"
    with pytest.raises(UserError, match="not_a_number"):
        runs.train(folder, "run.eval_before=false", "run.eval_every=2", "run.save_every=0", "run.steps=4", nan_for_validation)
    assert list(runs.checkpoints(folder)) == [2] and [line["step"] for line in runs.metrics(folder)] == [1, 2]
