"""Workers on the machines of a real Ray cluster: two nodes of it, both on this machine. They answer, fail, hang and die as processes do."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import runs

pytest.importorskip("ray")

# What holds for processes of one machine holds for these: the same tests, with the fixtures below.
from test_processes import (  # noqa: F401
    alive,
    call,
    eventually,
    raising_in_a_moment,
    running,
    test_a_call_aside_runs_beside_another,
    test_a_running_method_reads_what_it_is_told,
    test_a_wait_interrupted_among_items_cancels_the_call,
    test_an_array_is_writable_where_it_was,
    test_an_exception_among_the_items_closes_the_generator,
    test_an_interrupted_wait_loses_nothing,
    test_arguments_that_cannot_be_pickled_start_nothing,
    test_arrays_arrive_equal_and_are_counted,
    test_arrays_of_any_size_and_order,
    test_closing_the_items_closes_the_generator,
    test_items_arrive_in_order_and_results_follow,
    test_items_sent_within_a_method_keep_their_order,
    test_results_are_in_order_of_rank,
    test_signals_to_stop_are_left_to_the_driver,
)
from test_ray import assert_equal_on_ray
from test_restarts import assert_same_results

from fulltilt import doctor
from fulltilt.cluster import keeper, processes
from fulltilt.cluster.hosts import WorkerDied, WorkerError, WorkerStuck
from fulltilt.cluster.ray import Machines, RayWorkers, Shared
from fulltilt.demo import GRPO_STEPS
from fulltilt.loop.opening import find_mistakes
from fulltilt.observe.metrics import read_values
from fulltilt.records import UserError

pytestmark = [pytest.mark.long, pytest.mark.matrix, pytest.mark.timeout(600)]

SIZE = 2
HERE = Path(__file__).parent
ModelFolders = Callable[[str], Path]


@pytest.fixture(scope="module", autouse=True)
def toy_worker_known() -> Iterator[None]:
    """Workers on the cluster get the paths of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(runs.SOURCE), str(HERE)]))
        yield


@contextlib.contextmanager
def workers(cluster: str, **options: Any) -> Iterator[RayWorkers]:
    host = RayWorkers(Machines(cluster, 2, 1, Shared(Path("runs"), {}), gpus=False), range(SIZE), "toy_worker:make")
    vars(host).update(options)  # once it has started, which takes as long as it takes
    pids = host.pids + [facts.pid for facts in host.machines.facts]
    try:
        yield host
    finally:
        host.close()
        eventually(lambda: not any(map(running, pids)))


@pytest.fixture(scope="module")
def pool(cluster: str) -> Iterator[RayWorkers]:
    """Workers for all tests after which they still live."""
    with workers(cluster) as host:
        yield host


@pytest.fixture
def host(pool: RayWorkers) -> RayWorkers:
    return pool


def test_a_call_takes_little_longer_than_on_one_machine(pool: RayWorkers) -> None:
    began = time.monotonic()
    for _ in range(200):
        call(pool, "add", 1)
    seconds = (time.monotonic() - began) / 200
    print(f"a call of {SIZE} workers takes {seconds * 1e3:.2f} ms")
    assert seconds < 0.2  # less than between two looks at the workers


# -- failures ------------------------------------------------------------------------------------------------------------------------------


def test_errors_name_worker_and_machine(cluster: str) -> None:
    with workers(cluster) as host:
        with pytest.raises(WorkerError, match=r"^worker 1 \(process \d+ on \S+\) failed in passes \(fail\): KeyError: 'no such toy' \(.*"):
            host.start("fail", [(1,)] * SIZE, what="passes").results()
        assert not any(map(alive, host.pids))
    with workers(cluster) as host, pytest.raises(UserError, match=r"^the toy refuses: give it another number$"):
        call(host, "refuse", 1)


def test_a_silent_worker_is_reported_with_its_stack_then_given_up(cluster: str) -> None:
    told: list[str] = []
    pattern = r"worker 1 \(process \d+ on \S+\) has sent nothing for \d+ s during sleep_forever"
    with workers(cluster, on_stall=told.append) as host:
        sleeping = host.start("sleep_forever", [(1,)] * SIZE, what="sleep_forever")
        items = sleeping.items()
        assert next(items) == (1, "begun")
        eventually(lambda: sleeping.answered[0])
        host.stall_s, host.deadline_s = 0.5, 3.0
        with pytest.raises(WorkerStuck, match=pattern):
            next(items)
    silent, idle, busy, *frames = told[0].splitlines()
    assert re.fullmatch(pattern, silent)
    assert idle.startswith("worker 0") and idle.endswith("has finished its part") and busy.endswith("sleep_forever, at work")
    assert re.search(r"toy_worker.py:\d+ in sleep_forever", frames[-1])


def test_a_worker_that_never_leaves_c_shows_its_stack(cluster: str) -> None:
    told: list[str] = []
    with workers(cluster, on_stall=told.append) as host:
        computing = host.start("compute_forever", [()] * SIZE, what="computing").items()
        assert {next(computing)[0], next(computing)[0]} == {0, 1}
        host.stall_s, host.deadline_s = 1.0, 3.0
        with pytest.raises(WorkerStuck):
            next(computing)
    assert re.search(r"toy_worker.py:\d+ in compute_forever", told[0])


def test_after_ctrl_c_a_worker_that_does_nothing_is_given_up_soon(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that computes is not, however long it is silent."""
    monkeypatch.setattr(processes, "HURRY_S", 3.0)
    with workers(cluster) as host:
        host.hurry()
        assert call(host, "compute", 6.0) == [0, 1]
        os.kill(host.pids[1], signal.SIGSTOP)
        with pytest.raises(WorkerStuck, match=r"^worker 1 .* has sent nothing for \d+ s during"):
            call(host, "add", 1)


def test_a_worker_that_is_killed_is_named_at_once(cluster: str) -> None:
    with workers(cluster) as host:
        waiting = host.start("wait_for_gate", [()] * SIZE, what="waiting")
        os.kill(host.pids[0], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(WorkerDied, match=r"worker 0 \(process \d+ on \S+\) was killed by signal 9 \(SIGKILL\) during waiting"):
            waiting.results()
        assert time.monotonic() - began < 60


def test_a_machine_whose_actor_is_killed_is_named_and_leaves_no_worker(cluster: str) -> None:
    with workers(cluster) as host:
        waiting = host.start("wait_for_gate", [()] * SIZE, what="waiting")
        os.kill(host.machines.facts[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"worker 1 \(process \d+ on \S+\) is gone, with the Ray actor that kept"):
            waiting.results()


def test_a_machine_that_is_stuck_is_named_in_time(cluster: str) -> None:
    """A keeper that is stopped answers nothing, and its workers take no message."""
    told: list[str] = []
    with workers(cluster, on_stall=told.append) as host:
        keeper_of_1 = host.machines.facts[1].pid
        waiting = host.start("wait_for_gate", [()] * SIZE, what="waiting")
        began = time.monotonic()
        try:
            for pid in (keeper_of_1, host.pids[1]):
                os.kill(pid, signal.SIGSTOP)
            host.stall_s, host.deadline_s = 1.0, 6.0
            with pytest.raises(WorkerStuck, match=r"worker 1 \(process \d+ on \S+\) .* during waiting"):
                waiting.results()
        finally:
            with contextlib.suppress(ProcessLookupError):  # Ray has killed it
                os.kill(keeper_of_1, signal.SIGCONT)
        seconds = time.monotonic() - began
        print(f"{seconds:.1f} s until the workers were ended")
        assert seconds < 60
    assert re.search(r"worker 0 \(.*\): waiting \(wait_for_gate\), at work\n", told[0]), told[0]
    assert re.search(r"worker 1 \(.*\): waiting \(wait_for_gate\), is on a machine that does not answer", told[0]), told[0]


def test_too_few_machines_or_cores_are_refused(cluster: str) -> None:
    for nodes, count in ((3, 1), (2, 64)):
        asked = rf"ask for {nodes} machines with {count} cores? each, and Ray has \S+ \(4 cores, 0 GPUs\) and \S+ \(4 cores, 0 GPUs\)"
        with pytest.raises(UserError, match=asked):
            Machines(cluster, nodes, count, Shared(Path("runs"), {}), gpus=False)
    with pytest.raises(UserError, match="ask for 1 machine with 1 core and 1 GPU, and Ray has"):
        Machines(cluster, 1, None, Shared(Path("runs"), {}), gpus=True)


def test_machines_in_use_are_refused(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import fulltilt.cluster.ray as module

    first = Machines(cluster, 2, 2, Shared(Path("runs"), {}), gpus=False)
    with contextlib.closing(first):
        monkeypatch.setattr(module, "ANSWER_S", 1.0)
        with pytest.raises(UserError, match=r"but others use them: of the whole Ray cluster \d CPUs are free"):
            Machines(cluster, 2, 3, Shared(Path("runs"), {}), gpus=False)


# -- programs ------------------------------------------------------------------------------------------------------------------------------

DRIVER = """
import signal, sys, time
from pathlib import Path
from fulltilt.cluster.ray import Machines, RayWorkers, Shared
if __name__ == "__main__":
    before, began = signal.getsignal(signal.SIGTERM), time.monotonic()
    machines = Machines({address!r}, {nodes}, 1, Shared(Path("runs"), {{}}), gpus=False)
    host = RayWorkers(machines, range({nodes}), "toy_worker:make")
    assert signal.getsignal(signal.SIGTERM) is before
    seconds = time.monotonic() - began
    call = host.start("read_log", [()] * {nodes}, what="log").results()
    print(*host.pids, *(facts.pid for facts in machines.facts), flush=True)
    {then}
"""


def driver(folder: Path, address: str, nodes: int, then: str) -> subprocess.Popen[str]:
    script = folder / "driver.py"
    script.write_text(DRIVER.format(address=address, nodes=nodes, then=then))
    path = os.pathsep.join([str(runs.SOURCE), str(HERE)])
    variables = {**os.environ, "PYTHONPATH": path, "RAY_TMPDIR": str(folder)}
    return subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables, cwd=folder)


def processes_with(text: str) -> list[int]:
    """Those whose command or working folder has this text."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text.encode() in (path / "cmdline").read_bytes() or text in os.readlink(path / "cwd"):
                found.append(int(path.name))
    return found


def test_no_worker_outlives_a_driver_that_is_killed(cluster: str, tmp_path: Path) -> None:
    process = driver(tmp_path, cluster, 2, 'host.start("wait_for_gate", [()] * 2, what="endless").results()')
    assert process.stdout
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 4 and all(map(running, pids))
    process.kill()
    process.communicate()
    eventually(lambda: not any(map(running, pids)))


def test_a_ray_of_its_own_is_quiet_and_leaves_nothing(tmp_path: Path) -> None:
    process = driver(tmp_path, "auto", 1, 'print(machines._joined.files, f"{seconds:.1f} s to start"); host.close()')
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0 and err == "", err
    pids, started = out.splitlines()
    print(started)
    files = started.split()[0]
    assert not any(running(int(pid)) for pid in pids.split())
    assert "fulltilt-ray-" in files and not Path(files).exists() and processes_with(files) == []


@pytest.mark.parametrize(("nodes", "roles"), [(2, "{}"), (2, "{ref = 1}"), pytest.param(1, "{}", id="a Ray of its own")])
def test_a_run_of_two_workers_on_each_machine_equals_that_of_one_process(
    request: pytest.FixtureRequest, tmp_path: Path, run_of_one_process: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, roles: str
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # where `auto` looks for a cluster, and finds none
    address = request.getfixturevalue("cluster") if nodes > 1 else "auto"
    settings = [f"cluster.nodes={nodes}", "cluster.workers=2", f"cluster.address={address}", f"cluster.roles={roles}"]
    assert_equal_on_ray(tmp_path / "folder", run_of_one_process, *settings, samples_stay=nodes > 1)


def test_the_doctor_says_what_a_cluster_has(cluster: str, pool: RayWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of its cores are those of the pool, which lives as long as the tests of this file, whichever of them came first."""
    monkeypatch.setenv("PYTHONPATH", str(runs.SOURCE))
    expected, deadline = f"at {cluster}: 2 machines with 8 cores and 0 GPUs, of which 6 cores and 0 GPUs are free", time.monotonic() + 240
    of_cluster, *machines = doctor.examine_cluster(cluster)
    while of_cluster.detail != expected and time.monotonic() < deadline:  # Ray counts the cores of workers that have ended a moment later
        time.sleep(1)
        of_cluster, *machines = doctor.examine_cluster(cluster)
    assert (of_cluster.status, of_cluster.detail) == ("ok", expected)
    versions = ", ".join(f"{name} {version}" for name, version in keeper.versions().items())
    for machine in machines:
        assert machine.status == "ok" and re.fullmatch(r"machine \S+ \(\S+\)", machine.name), machine
        assert machine.detail.startswith("4 cores, 0 GPUs, ") and machine.detail.endswith(f" free in /dev/shm; {versions}")
    # Machines that find another copy of the package.
    shutil.copytree(runs.SOURCE, tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "src" / "fulltilt" / "more.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "src"))
    _, *machines = doctor.examine_cluster(cluster)
    assert len(machines) == 2
    for machine in machines:
        assert machine.status == "broken" and machine.core, machine
        assert re.search(r"\. the machine \S+ \(\S+\) has fulltilt \S+ \(\w+\), and this one .* Install the same", machine.detail), machine


def test_a_check_compares_the_machines_of_a_cluster(
    cluster: str, tmp_path: Path, model_folders: ModelFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(runs.SOURCE))
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    settings = ["cluster.nodes=2", "cluster.workers=1", f"cluster.address={cluster}", "reward.workers=2"]
    with contextlib.chdir(folder):
        assert find_mistakes(runs.read_config(folder, *settings)) == []
        (text,) = find_mistakes(runs.read_config(folder, *settings, "cluster.workers=64", "reward.workers=128"))
        assert "ask for 2 machines with 64 cores each, and Ray has" in text
        # Machines that find another copy of the package.
        shutil.copytree(runs.SOURCE, tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
        (tmp_path / "src" / "fulltilt" / "more.py").touch()
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "src"))
        (text,) = find_mistakes(runs.read_config(folder, *settings))  # one text for both nodes, which have the same name
    assert re.match(r"the machine \S+ \(\S+\) has fulltilt .* Install the same on all machines", text), text


# -- the demo ------------------------------------------------------------------------------------------------------------------------------

# Workers add their gradients in another order than one process. In float32 the norms of gradients then differ by 1e-8 of their size in the
# first step, and by 1e-3 after ninety; sooner or later a token is drawn that was as good as tied with another one. (In float64, with
# model.dtype=float64 for both, the rewards and responses of all ninety steps are equal, and norms of gradients to 1e-15.)
EQUAL_STEPS, UNLIKE_SAMPLES = 40, 4


@pytest.mark.timeout(2400)  # the demo itself takes minutes on a busy machine
def test_the_demo_learns_on_two_machines_as_in_one_process(cluster: str, demo_folder: Path) -> None:
    settings = ["run.dir=ray", "cluster.nodes=2", "cluster.workers=1", f"cluster.address={cluster}"]
    ended = runs.command(demo_folder, "train", "demo/grpo.toml", *settings, seconds=1500)
    assert ended.code == 0, ended.error
    here, there = (demo_folder / place for place in ("demo/grpo", "ray"))
    rewards = [read_values(folder / "metrics.jsonl", "critic/score/mean") for folder in (here, there)]
    print("steps with other rewards:", [step for step, pair in enumerate(zip(*rewards, strict=True), 1) if pair[0] != pair[1]])
    assert len(rewards[1]) == GRPO_STEPS and rewards[1][:EQUAL_STEPS] == rewards[0][:EQUAL_STEPS]
    assert rewards[1] == pytest.approx(rewards[0], abs=UNLIKE_SAMPLES / 512)  # samples of a step
    for step in range(1, EQUAL_STEPS + 1):
        texts = [
            [json.loads(line)["response"] for line in (folder / "rollouts" / f"step-{step:06d}.jsonl").read_text().splitlines()]
            for folder in (here, there)
        ]
        assert texts[0] == texts[1] and len(texts[0]) == 64


# -- bytes through the driver --------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(1800)
def test_bytes_through_the_driver_do_not_grow_with_responses(cluster: str, tmp_path: Path, model_folders: ModelFolders) -> None:
    """On a cluster samples stay with their workers; on one machine they pass through the driver. Run with -s, it prints the table of
    docs/devices.md."""
    lengths, samples, found = (16, 64, 256), 64, {}
    model = make_endless(tmp_path / "model", model_folders("qwen2"))
    short = (
        "run.steps=2", "run.save_every=0", "run.eval_every=0", "run.eval_before=false", "algorithm.prompts_per_step=16",
        "rollout.log_stats=false",  # a clock decides how often workers tell how far a rollout is
    )  # fmt: skip
    for nodes in (1, 2):
        for tokens in lengths:
            folder = runs.make(tmp_path / f"{nodes}-{tokens}", model)
            where = (
                ["cluster.nodes=2", "cluster.workers=1", "reward.workers=2", f"cluster.address={cluster}"]
                if nodes == 2
                else ["cluster.workers=2"]
            )
            ended = runs.command(folder, "train", "run.toml", *short, f"rollout.max_new_tokens={tokens}", *where, seconds=600)
            assert ended.code == 0, ended.error
            line = runs.metrics(folder)[-1]
            assert line["response_length/mean"] == tokens
            found[nodes, tokens] = line
            moved = line.get("communication/all_to_all_bytes", 0)
            print(f"| {nodes} | {tokens} | {line['driver/bytes_out']:,.0f} | {line['driver/bytes_in']:,.0f} | {moved:,.0f} |")
    for name in ("driver/bytes_out", "driver/bytes_in"):
        here, there = ([found[nodes, tokens][name] for tokens in lengths] for nodes in (1, 2))
        assert max(there) - min(there) < samples * 16, f"{name}: {there}"  # numbers of lengths have more digits
        assert here[2] - here[0] > samples * (lengths[2] - lengths[0]), f"{name}: {here}"


def make_endless(folder: Path, model: Path) -> Path:
    """A copy of the model in which no token ends a response: all have as many tokens as they may."""
    shutil.copytree(model, folder)
    for name, key in (("config", "eos_token_id"), ("generation_config", "eos_token_id"), ("tokenizer_config", "eos_token")):
        values = json.loads((folder / f"{name}.json").read_text())
        (folder / f"{name}.json").write_text(json.dumps({**values, key: None}))
    return folder


def test_a_worker_killed_in_a_run_ends_it_with_its_name(cluster: str, tmp_path: Path, run_of_one_process: Path) -> None:
    folder = runs.make(tmp_path / "folder", (run_of_one_process / "model").resolve())
    settings = ["run.steps=1000", "cluster.nodes=2", "cluster.workers=1", "reward.workers=2", f"cluster.address={cluster}"]
    process = runs.start(folder, "train", "run.toml", "--json", *settings)
    killer = threading.Thread(target=kill_a_worker, args=(folder,))
    killer.start()
    process.communicate(timeout=200)
    killer.join()
    said = (folder / "said.txt").read_text()
    assert process.returncode and re.search(r"worker \d \(process \d+ on \S+\) was killed by signal 9 \(SIGKILL\) during", said), said
    assert "Traceback" not in said
    assert processes_with(str(folder)) == []


@pytest.mark.timeout(1200)
def test_a_run_that_loses_a_worker_resumes_by_itself(cluster: str, tmp_path: Path, run_of_one_process: Path) -> None:
    """It leaves Ray, joins it again, reserves the same machines and ends with the files of an undisturbed run."""
    settings = ["run.steps=8", "cluster.nodes=2", "cluster.workers=1", "reward.workers=2", f"cluster.address={cluster}"]
    undisturbed, folder = (runs.make(tmp_path / name, (run_of_one_process / "model").resolve()) for name in ("undisturbed", "folder"))
    ended = runs.command(undisturbed, "train", "run.toml", *settings, seconds=500)
    assert ended.code == 0, ended.error
    process = runs.start(folder, "train", "run.toml", "cluster.restarts=1", *settings)
    killer = threading.Thread(target=kill_a_worker, args=(folder,))
    killer.start()
    process.communicate(timeout=500)
    killer.join()
    said = (folder / "said.txt").read_text()
    assert process.returncode == 0, said
    assert "was killed by signal 9" in said and re.search(r"Restart 1 of 1: the run resumes from its checkpoint of step \d", said), said
    assert_same_results(folder, undisturbed)
    assert processes_with(str(folder)) == []


def kill_a_worker(folder: Path) -> None:
    """Once the run has made steps."""
    metrics = folder / "run" / "metrics.jsonl"
    eventually(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3, 180)
    workers = set(processes_with("fulltilt.cluster.serve")) & set(processes_with(str(folder)))
    os.kill(min(workers), signal.SIGKILL)
