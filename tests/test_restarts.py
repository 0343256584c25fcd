"""A run on several workers that loses one, or is interrupted: it resumes by itself where it may, and says what to do where it may not."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import runs

import fulltilt
from fulltilt import loop
from fulltilt.algo.build import build
from fulltilt.cluster import assembly, checks, processes
from fulltilt.cluster.hosts import WorkerDied, WorkerError
from fulltilt.loop import opening
from fulltilt.loop.run import Summary
from fulltilt.observe.console import Console
from fulltilt.plan import legal
from fulltilt.records import UserError
from fulltilt.words import many

ModelFolders = Callable[[str], Path]
TWO = ("cluster.workers=2", "run.steps=5", "run.eval_every=0", "run.eval_before=false")
BROKEN = """
import os

def broken(terms):
    if os.path.exists("run/plan.json"):  # not where it is tried before anything loads
        return {}["no such term"]
    return -terms.logprobs * terms.advantages
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model_folders: ModelFolders) -> Path:
    folder = runs.make(tmp_path_factory.mktemp("undisturbed") / "folder", model_folders("qwen2"))
    with pytest.MonkeyPatch.context() as patch:
        forked.use(patch)
        runs.train(folder, *TWO)
    return folder


@pytest.fixture
def folder(tmp_path: Path, model_folders: ModelFolders) -> Path:
    return runs.make(tmp_path / "folder", model_folders("qwen2"))


OTHERS: set[int] = set()  # workers that other tests keep in this process


@pytest.fixture(autouse=True)
def _workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked, so that they begin at once."""
    forked.use(monkeypatch)
    OTHERS.clear()
    OTHERS.update(workers_of(os.getpid()))


def workers_of(process: int) -> list[int]:
    """The processes of a run's workers, in order of rank."""
    return [pid for pid in forked.workers_of(process) if pid not in OTHERS]


def train(folder: Path, on_step: Callable[[int, dict[str, Any]], object], *overrides: str) -> str:
    """Train in this process. Returns what the run said."""
    said = io.StringIO()
    try:
        with contextlib.chdir(folder):
            loop.train(runs.read_config(folder, *TWO, *overrides), Console(stdout=said, stderr=said, terminal=False), on_step)
    finally:
        print(said.getvalue())  # shown where the test fails
    return said.getvalue()


def assert_same_results(one: Path, other: Path) -> None:
    """Runs with other values of keys that change no result: their checkpoints hold those values."""
    assert runs.comparable(runs.metrics(one)) == runs.comparable(runs.metrics(other))
    assert runs.contents(one / "run" / "rollouts") == runs.contents(other / "run" / "rollouts")
    found, expected = runs.checkpoints(one), runs.checkpoints(other)
    assert max(found) == max(expected)
    for step in found.keys() & expected.keys():
        runs.assert_equal_tensors(found[step], expected[step])


def wait_for_checkpoint(folder: Path, step: int) -> None:
    """Until it is in place: the workers and a thread of the driver write it beside the steps that follow."""
    deadline = time.monotonic() + 100
    while step not in runs.checkpoints(folder):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_restart_that_is_refused_fails_as_the_cluster_does_and_says_how_to_resume(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[Exception] = [WorkerDied("worker 1 was killed"), UserError("others use them"), UserError("no such file")]

    def fail(attempts: opening.Attempts) -> Summary:
        raise failures.pop(0)

    monkeypatch.setattr(opening.Attempts, "_attempt", fail)
    refused = r"^Restart 1 of 1: others use them\nThere is no checkpoint to resume from yet$"
    with pytest.raises(WorkerError, match=refused):
        train(folder, lambda step, metrics: None, "cluster.restarts=1")
    with pytest.raises(UserError, match=r"^no such file$"):  # the error that the first attempt raised
        train(folder, lambda step, metrics: None, "cluster.restarts=1")


def kill_after(step: int, folder: Path) -> None:
    if step == 3:
        wait_for_checkpoint(folder, 2)
        os.kill(workers_of(os.getpid())[1], signal.SIGKILL)


def test_a_run_that_loses_a_worker_resumes_by_itself(folder: Path, undisturbed: Path) -> None:
    """Never resuming is for runs of earlier commands."""
    seen: list[int] = []

    def on_step(step: int, metrics: dict[str, Any]) -> None:
        if step not in seen:
            kill_after(step, folder)
        seen.append(step)

    said = train(folder, on_step, "cluster.restarts=1", "run.resume=never")
    assert seen == [1, 2, 3, 3, 4, 5]
    assert "was killed by signal 9" in said and "Restart 1 of 1: the run resumes from its checkpoint of step 2" in said
    assert said.count("samples at once") == 1  # the plan, which is the same again
    assert_same_results(folder, undisturbed)
    assert workers_of(os.getpid()) == []


@pytest.mark.long
@pytest.mark.parametrize(("left", "taken"), [(2, 2), (4, 3), (1, 1)])
def test_a_restart_goes_on_with_the_workers_that_it_had_or_says_that_they_are_fewer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, left: int, taken: int
) -> None:
    """As many as there are devices for (`auto`), which were three."""
    devices, seen = [3], list[int]()
    for file in (assembly, checks, legal):
        monkeypatch.setattr(file, "count_workers", lambda config, device: devices[0])

    def on_step(step: int, metrics: dict[str, Any]) -> None:
        if not seen:
            devices[0] = left
            os.kill(workers_of(os.getpid())[1], signal.SIGKILL)
        seen.append(len(workers_of(os.getpid())))

    train(folder, on_step, "cluster.workers=auto", "cluster.restarts=1", "run.steps=2")
    assert seen[1:] and set(seen[1:]) == {taken}
    told = [str(warning.message) for warning in recwarn if "resumes with" in str(warning.message)]
    assert [text.partition(":")[0] for text in told] == [f"the run resumes with {many(taken, 'worker')}, of 3 before"] * (taken < 3)


@pytest.mark.long
def test_a_step_that_fails_twice_in_a_row_ends_the_run(folder: Path) -> None:
    with pytest.raises(WorkerDied, match=r"Step 4 has failed twice in a row.*\nThe same command .* from its checkpoint of step 2"):
        train(folder, lambda step, metrics: kill_after(step, folder), "cluster.restarts=3")
    with pytest.raises(WorkerDied, match=r"^worker 1 .*\nThe same command resumes the run from its checkpoint of step 2$"):
        train(folder, lambda step, metrics: kill_after(step, folder))


def begin(folder: Path, *overrides: str, step: int = 0) -> runs.Started:
    """Start the command, and wait until it has made a step, or with 0 until its workers load. It makes four of its five steps."""
    command = runs.Started(folder, ["train", "run.toml", *TWO, *overrides], functools.partial(runs.hold_after, 4, forked.use_always))
    metrics = folder / "run" / "metrics.jsonl"
    while not (len(runs.metrics(folder)) >= step if step and metrics.exists() else not step and len(workers_of(command.pid)) == 2):
        assert command.poll() is None, (folder / "said.txt").read_text()
        time.sleep(0.02)
    return command


def ended(command: runs.Started, folder: Path) -> runs.Ended:
    began = workers_of(command.pid)
    out = command.communicate(timeout=200)
    assert [pid for pid in began if Path(f"/proc/{pid}").exists()] == []
    return runs.Ended(command.returncode, out, (folder / "said.txt").read_text())


@pytest.mark.long
def test_a_lost_worker_is_told_with_the_step_to_resume_from(folder: Path, undisturbed: Path) -> None:
    command = begin(folder, step=3)
    wait_for_checkpoint(folder, 2)
    os.kill(workers_of(command.pid)[0], signal.SIGKILL)
    (folder / "released").touch()
    end = ended(command, folder)
    assert end.code == 1 and "Traceback" not in end.error
    assert "error: worker 0 (process " in end.error and "The same command resumes the run from its checkpoint of step " in end.error
    assert runs.command_forked(folder, "train", "run.toml", *TWO, first=forked.use_always).code == 0
    assert_same_results(folder, undisturbed)


@pytest.mark.long
def test_a_mistake_in_a_worker_shows_its_traceback(folder: Path) -> None:
    (folder / "loss.py").write_text(BROKEN)
    end = runs.command_forked(folder, "train", "run.toml", *TWO, "algorithm.kl_coef=0", "algorithm.loss=loss.py:broken")
    assert end.code == 1
    assert 'loss.py", line 6, in broken' in end.error and "in your function algorithm.loss = 'loss.py:broken'" in end.error
    assert "failed in update-actor (update): KeyError: 'no such term'" in end.error
    assert end.error.endswith("There is no checkpoint to resume from yet\n")


@pytest.mark.long
@pytest.mark.usefixtures("heard")
def test_ctrl_c_while_workers_load_leaves_nothing(folder: Path) -> None:
    command = begin(folder)
    os.kill(command.pid, signal.SIGINT)
    assert ended(command, folder).code == 130
    assert not (folder / "run").exists()


@pytest.mark.long
@pytest.mark.parametrize("wait_s", [0.0, 0.1, 0.2, 0.3, 0.4])
def test_ctrl_c_at_any_moment_of_a_step_saves_the_last_whole_one(folder: Path, undisturbed: Path, wait_s: float) -> None:
    command = begin(folder, step=2)
    time.sleep(wait_s)
    os.killpg(command.pid, signal.SIGINT)
    end = ended(command, folder)
    assert end.code == 130, end.error
    step = max(runs.checkpoints(folder))
    assert f"stopped after step {step} and saved" in end.error and step >= 2
    assert runs.command_forked(folder, "train", "run.toml", *TWO, first=forked.use_always).code == 0
    assert_same_results(folder, undisturbed)


@pytest.mark.long
@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("signals", [1, 2])
def test_ctrl_c_does_not_wait_long_for_a_worker_that_is_stuck(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], signals: int
) -> None:
    """The first signal says what it waits for, and gives the worker up; the second ends at once."""
    monkeypatch.setattr(processes, "HURRY_S", 2.0 if signals == 1 else 600.0)
    began: list[float] = []

    def interrupt() -> None:
        for _ in range(signals):
            time.sleep(1.0)
            began.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    def on_step(step: int, metrics: dict[str, Any]) -> None:
        if step == 3:
            wait_for_checkpoint(folder, 2)
            os.kill(workers_of(os.getpid())[1], signal.SIGSTOP)
            threading.Thread(target=interrupt, daemon=True).start()

    with contextlib.nullcontext() if signals == 1 else pytest.raises(KeyboardInterrupt):
        said = train(folder, on_step, "cluster.restarts=1")
        assert "has sent nothing for" in said and said.endswith("The run stops without what came after its checkpoint of step 2\n")
    assert time.monotonic() - began[-1] < 60 and workers_of(os.getpid()) == []
    assert capfd.readouterr().err.startswith("stopping when the workers have finished what they do; Ctrl-C again stops at once")
    assert max(runs.checkpoints(folder)) == 2


PROGRAM = """
import threading
import fulltilt

scale = 1.0

def loss(terms):
    return -terms.logprobs * terms.advantages * scale

def advantage(rewards):
    return rewards - rewards.mean()

def score(solution_str):
    return sum(character.islower() for character in solution_str) / 24

def work():
    functions = {"name": "grpo", "loss": loss, "advantage": advantage, "kl_coef": 0.0}
    cluster = {"workers": 2}
    keys = {"steps": 1, "eval_every": 0, "eval_before": False, "quiet": True}
    done.append(fulltilt.train("run.toml", reward=score, algorithm=functions, cluster=cluster, **keys))

done = []
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(done[0].steps, done[0].metrics[0]["actor/load_spread"] >= 1)
"""


@pytest.mark.long
def test_a_program_trains_on_workers_from_a_thread_with_its_own_functions(folder: Path) -> None:
    """Its functions are in no file, as in a notebook."""
    assert runs.code_forked(folder, PROGRAM).out == "1 True\n"


def test_a_function_that_cannot_travel_is_refused_before_anything_loads(folder: Path) -> None:
    lock = threading.Lock()

    def loss(terms: Any) -> Any:
        with lock:
            return -terms.logprobs * terms.advantages

    with contextlib.chdir(folder), pytest.raises(UserError, match=r"loss = 'python:loss': the function 'loss' cannot be sent .*'lock'"):
        fulltilt.check("run.toml", algorithm={"name": "grpo", "loss": loss, "kl_coef": 0.0}, cluster={"workers": 2})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["cluster.workers=1000"], r"cluster.workers: 1000 workers need a core each, and this machine has \d+ usable. Use at most"),
        (["cluster.workers=2", "rollout.engine=hf"], 'rollout.engine: "hf" runs on one worker only'),
        (["train.balance=true"], "train.balance: true has no effect while cluster.workers is auto, which is 1 here"),
        (["cluster.workers=1", "cluster.restarts=2"], "cluster.restarts: 2 has no effect while cluster.workers is 1"),
        (["cluster.workers=2", "cluster.processes=true"], "cluster.processes: true has no effect while cluster.workers is 2"),
    ],
)
def test_what_workers_do_not_obey_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], words: str) -> None:
    monkeypatch.delenv("FULLTILT_SHARE_DEVICES")
    monkeypatch.setattr(checks, "usable_cores", lambda: 2)
    with contextlib.chdir(folder), pytest.raises(UserError, match=words):
        fulltilt.check("run.toml", overrides=options)


def test_one_worker_for_each_gpu_unless_another_number_is_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FULLTILT_SHARE_DEVICES")
    monkeypatch.setattr(checks.torch.cuda, "device_count", lambda: 8)
    found = {given: runs.read_config(folder, *given) for given in ((), ("cluster.workers=3",), ("cluster.workers=9",))}
    assert [checks.count_workers(config, "cuda") for config in found.values()] == [8, 3, 9]
    assert checks.count_workers(found[()], "cpu") == 1
    wrong = [list(checks.wrong_workers(config, build(config), "cuda")) for config in found.values()]
    assert wrong == [
        [],
        [],
        [
            "cluster.workers: 9 workers need a GPU each, and torch sees 8. Use at most 8, or leave the key out. For tests, "
            "FULLTILT_SHARE_DEVICES=1 lets workers share devices, which is slow"
        ],
    ]
