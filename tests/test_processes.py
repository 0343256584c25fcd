"""Hosts of workers: one in this process, and real processes, which answer, fail, hang and die."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
import toy_worker

from fulltilt.cluster import processes, service, stacks, wire
from fulltilt.cluster.hosts import Hosts, WorkerDied, WorkerError, WorkerStuck
from fulltilt.cluster.local import Local
from fulltilt.cluster.processes import LauncherHere, Processes, WorkerPeer
from fulltilt.records import RunWarning, UserError

SIZE = 2


@contextlib.contextmanager
def workers(**options: Any) -> Iterator[Processes]:
    host = Processes(range(SIZE), "toy_worker:make")
    vars(host).update(options)  # once it has started, which takes as long as it takes
    try:
        yield host
    finally:
        host.close()
        assert not any(map(alive, host.pids))


@pytest.fixture(scope="module")
def pool() -> Iterator[Processes]:
    """Workers for all tests after which they still live."""
    with workers() as host:
        yield host


@pytest.fixture(params=["local", "processes"])
def host(request: pytest.FixtureRequest) -> Hosts:
    return Local(toy_worker.make(0)) if request.param == "local" else request.getfixturevalue("pool")


def alive(pid: int) -> bool:
    """Zombies are dead, but not gone: they count."""
    return Path(f"/proc/{pid}").exists()


def call(host: Hosts, method: str, *args: Any) -> list[Any]:
    return host.start(method, [args] * host.size, what=method).results()


def eventually(true: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- any host ------------------------------------------------------------------------------------------------------------------------------


def test_results_are_in_order_of_rank(host: Hosts) -> None:
    assert call(host, "add", 10) == [10, 11][: host.size]
    assert host.start("add", [(rank * 100,) for rank in range(host.size)], what="add").results() == [0, 101][: host.size]


def test_items_arrive_in_order_and_results_follow(host: Hosts) -> None:
    counting = host.start("count", [(3,)] * host.size, what="count")
    items = list(counting.items())
    assert all([item for rank, item in items if rank == each] == [0, 1, 2] for each in range(host.size))
    assert counting.results() == counting.results() == list(range(host.size))
    assert call(host, "count", 3) == list(range(host.size))  # without reading items


def test_a_running_method_reads_what_it_is_told(host: Hosts) -> None:
    echo = host.start("echo", [()] * host.size, what="echo")
    heard: list[tuple[int, Any]] = []
    for rank, item in echo.items():
        heard.append((rank, item))
        echo.tell(rank, {"ready": ["a", rank], "a": None}.get(item if isinstance(item, str) else item[0]))
    assert sorted(heard, key=str) == sorted([(rank, item) for rank in range(host.size) for item in ("ready", ["a", rank])], key=str)
    assert echo.results() == list(range(host.size))
    assert call(host, "idle", 0.0) == [[]] * host.size


def test_items_sent_within_a_method_keep_their_order(host: Hosts) -> None:
    sending = host.start("send_within", [()] * host.size, what="sending")
    items = list(sending.items())
    assert all([item for rank, item in items if rank == each] == ["first", "second", "third"] for each in range(host.size))
    assert sending.results() == list(range(host.size))


@pytest.mark.parametrize("method", ["count", "echo"])
def test_closing_the_items_closes_the_generator(host: Hosts, method: str) -> None:
    endless = host.start(method, [(10**9,) if method == "count" else ()] * host.size, what="endless")
    items = endless.items()
    begun: set[int] = set()
    while len(begun) < host.size:
        begun.add(next(items)[0])
    items.close()
    assert all(f"{method} ended" in log[-1] for log in call(host, "read_log"))
    with pytest.raises(RuntimeError, match="endless has no results"):
        endless.results()


def test_an_exception_among_the_items_closes_the_generator(host: Hosts) -> None:
    def read() -> None:
        for _ in host.start("echo", [()] * host.size, what="echo").items():
            raise KeyboardInterrupt

    call(host, "read_log")
    with pytest.raises(KeyboardInterrupt):
        read()
    assert call(host, "add", 0) == list(range(host.size))


def test_local_errors_are_raised_as_they_are() -> None:
    local = Local(toy_worker.make(0))
    failing = local.start("fail", [(0,)], what="fail")
    with pytest.raises(KeyError):
        failing.results()
    with pytest.raises(RuntimeError, match="fail has no results"):
        failing.results()
    same = np.zeros(3)
    assert call(local, "give_back", same)[0] is same
    local.close()


# -- processes -----------------------------------------------------------------------------------------------------------------------------


def test_a_call_aside_runs_beside_another(pool: Processes) -> None:
    before = pool.start("add", [(0,)] * SIZE, what="before")
    aside = pool.start("open_gate", [()] * SIZE, what="aside", aside=True)
    waiting = pool.start("wait_for_gate", [()] * SIZE, what="waiting")
    assert waiting.results() == [True] * SIZE and aside.results() == [None] * SIZE and before.results() == [0, 1]


def test_arrays_arrive_equal_and_are_counted(pool: Processes) -> None:
    arrays = [np.random.default_rng(rank).integers(0, 256, 50_000_000, np.uint8) for rank in range(SIZE)]
    sent, received = pool.sent_bytes, pool.received_bytes
    returned = pool.start("give_back", [(array,) for array in arrays], what="arrays").results()
    assert all(map(np.array_equal, arrays, returned))
    assert all(100e6 < count < 100.01e6 for count in (pool.sent_bytes - sent, pool.received_bytes - received))


@pytest.mark.parametrize("size", [0, 1, 16383, 16384, 3_000_000])
def test_arrays_of_any_size_and_order(pool: Processes, size: int) -> None:
    arrays = [np.arange(size, dtype=np.int32), np.arange(2 * size)[::2], *[np.ones(size // 1000)] * 1500]
    for returned in call(pool, "give_back", arrays):
        assert all(map(np.array_equal, arrays, returned))


@pytest.mark.parametrize("size", [10, 100_000])
def test_an_array_is_writable_where_it_was(pool: Processes, size: int) -> None:
    writable, frozen = np.zeros(size), np.zeros(size)
    frozen.flags.writeable = False
    assert pool.start("is_writable", [(writable,), (frozen,)], what="arrays").results() == [True, False]


def test_processes_inherit_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_INHERITED", "yes")
    host = Processes(range(SIZE), "toy_worker:make_in_steps", environment={"OMP_NUM_THREADS": "3"})
    with contextlib.closing(host):
        assert call(host, "environment", "TOY_INHERITED") == ["yes", "yes"]
        assert call(host, "environment", "OMP_NUM_THREADS") == ["3", "3"]
        assert call(host, "environment", "FULLTILT_WORKER") == ["0", "1"]


def test_only_the_end_of_the_output_is_kept(pool: Processes) -> None:
    call(pool, "print_much", 17 * 2**20)
    assert call(pool, "output_bytes") == [0, 0]


def test_the_whole_output_is_kept_where_it_is_asked_for(tmp_path: Path) -> None:
    """That of another run stays in front of it, and what was printed before there was a folder is not lost."""
    folder = tmp_path / "workers"
    folder.mkdir()
    (folder / "1.log").write_text("earlier\n")
    with workers() as host:
        call(host, "print_much", 17 * 2**20)
        host.keep_output(folder)
        assert host.start("print_much", [None, (3,)], what="printing").results() == [None, None]
        assert not (folder / "0.log").exists() and (folder / "1.log").stat().st_size == 8 + 17 * 2**20 + 1 + 4
        assert call(host, "output_bytes") == [0, 4]  # the end was of use to the call in which it was written
        host.start("print_much", [(5,), None], what="printing").results()
    assert (folder / "0.log").read_text() == "x" * 17 * 2**20 + "\nxxxxx\n"
    text = (folder / "1.log").read_text()
    assert text.startswith("earlier\nxxx") and text.endswith("x\nxxx\n")


def test_a_worker_that_fails_leaves_its_output_and_a_folder_that_is_gone_is_no_error(tmp_path: Path) -> None:
    with workers() as host:
        host.keep_output(tmp_path / "gone" / "workers")
        call(host, "print_much", 3)
        host.keep_output(tmp_path / "workers")
        with pytest.raises(WorkerError, match="no such toy"):
            host.start("fail", [(1,)] * SIZE, what="failing").results()
    assert not (tmp_path / "gone").exists() and (tmp_path / "workers" / "1.log").read_text() == "xxx\n"


def test_an_interrupted_wait_loses_nothing(pool: Processes) -> None:
    waiting = pool.start("wait_for_gate", [()] * SIZE, what="waiting")
    before = pool.start("add", [(5,)] * SIZE, what="before")
    with raising_in_a_moment(), pytest.raises(KeyboardInterrupt):
        call(pool, "add", 7)
    assert pool.start("open_gate", [()] * SIZE, what="aside", aside=True).results() == [None] * SIZE
    assert call(pool, "add", 1) == [1, 2]
    assert waiting.results() == [True] * SIZE and before.results() == [5, 6]


def test_a_wait_interrupted_among_items_cancels_the_call(pool: Processes) -> None:
    echo = pool.start("echo", [()] * SIZE, what="echo")
    with raising_in_a_moment(), pytest.raises(KeyboardInterrupt):
        list(echo.items())
    assert call(pool, "read_log")[0][-1] == "echo ended"


def test_workers_that_wait_for_one_another_are_not_stopped_one_by_one(pool: Processes) -> None:
    counting = pool.start("count", [(100, True)] * SIZE, what="counting", together=True)
    counting.items().__next__()
    counting.cancel()  # before it can have ended, for the gate is shut
    pool.start("open_gate", [()] * SIZE, what="aside", aside=True).results()
    assert [log[-1] for log in call(pool, "read_log")] == ["count ended at 99"] * SIZE
    with pytest.raises(RuntimeError, match="counting has no results"):
        counting.results()


@contextlib.contextmanager
def raising_in_a_moment() -> Iterator[None]:
    """Ctrl-C while the driver waits, also where a shell has the tests ignore it because they run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)


# -- failures ------------------------------------------------------------------------------------------------------------------------------


def test_an_error_of_the_user_keeps_its_text() -> None:
    with workers() as host:
        with pytest.raises(UserError, match=r"^the toy refuses: give it another number$") as caught:
            call(host, "refuse", 1)
        assert not isinstance(caught.value, WorkerError) and "in refuse" in str(caught.value.__cause__)
        assert not any(map(alive, host.pids))
        with pytest.raises(UserError, match=r"^the toy refuses"):  # nothing can be started any more
            call(host, "add", 1)
    with pytest.raises(UserError, match=r"^bad order$"):
        Processes([0, "bad order"], "toy_worker:make")


def test_another_error_names_worker_and_call() -> None:
    with workers() as host:
        with pytest.raises(
            WorkerError, match=r"^worker 1 \(process \d+\) failed in passes \(fail\): KeyError: 'no such toy' \(.*"
        ) as caught:
            host.start("fail", [(1,)] * SIZE, what="passes").results()
        assert re.search(r"\(toy_worker.py:\d+ in fail\)$", str(caught.value))
        assert 'raise KeyError("no such toy")' in caught.value.worker_traceback
        assert caught.value.worker_traceback in str(caught.value.__cause__)


def test_a_result_that_cannot_be_pickled_is_an_error() -> None:
    with workers() as host, pytest.raises(WorkerError, match=r"failed in unpicklable: .*pickle"):
        call(host, "unpicklable")


def test_arguments_that_cannot_be_pickled_start_nothing(pool: Processes) -> None:
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        call(pool, "add", lambda: None)
    assert call(pool, "add", 1) == [1, 2]


@pytest.mark.parametrize(
    ("after", "cause_s", "named"), [(0.3, 60.0, r"worker 1 .*the cause"), (60.0, 1.0, r"worker 0 .*Connection closed by peer")]
)
def test_the_cause_is_named_before_its_consequences(after: float, cause_s: float, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "CAUSE_S", cause_s)
    with workers() as host, pytest.raises(WorkerError, match=named):
        call(host, "fail_as_collective", 1, after)


def test_a_worker_that_ends_is_named_with_its_last_output() -> None:
    with workers() as host, pytest.raises(WorkerDied) as caught:
        call(host, "exit", 1, 3)
    output = "Its last output:\non standard output\non standard error"
    assert str(caught.value) == f"worker 1 (process {host.pids[1]}) ended with exit code 3 during exit. {output}"


def test_a_worker_that_is_killed_is_named_at_once() -> None:
    with workers() as host:
        waiting = host.start("wait_for_gate", [()] * SIZE, what="waiting")
        os.kill(host.pids[0], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(WorkerDied, match=r"worker 0 .* was killed by signal 9 \(SIGKILL\) during waiting .*memory is used up"):
            waiting.results()
        assert time.monotonic() - began < 60  # the other worker waits for longer


def test_a_worker_is_killed_between_calls_or_while_it_answers() -> None:
    with workers() as host:
        threading.Timer(0.2, os.kill, (host.pids[1], signal.SIGKILL)).start()
        with pytest.raises(WorkerDied, match="worker 1"):
            while True:
                list(host.start("count", [(100,)] * SIZE, what="count").items())


def test_a_death_is_seen_though_a_process_holds_the_socket() -> None:
    with workers() as host:
        children = call(host, "leave_child")
        os.kill(host.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerDied, match="worker 0"):
            call(host, "wait_for_gate")
    eventually(lambda: not any(map(running, children)))


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_module_that_does_not_exist_is_named() -> None:
    with pytest.raises(WorkerError, match=r"failed in loading \(no_such_toy:make\): ModuleNotFoundError"):
        Processes([0], "no_such_toy:make")


# -- warnings ------------------------------------------------------------------------------------------------------------------------------


def test_a_warning_of_workers_is_shown_once_with_the_names_of_those_who_say_it(pool: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(pool, "on_warning", shown.append)
    for ranks, text in (([1], "slower"), ([0, 1], "no graphs"), ([0], "slower"), ([0, 1], "no graphs"), ([], "nothing")):
        call(pool, "warn", ranks, text)
    assert shown == ["worker 1: slower", "no graphs"]
    call(pool, "warn", [0, 1], "divide by zero", toy_worker.__file__)
    call(pool, "warn", [0, 1], "of a library", np.__file__)
    assert shown[2:] == [f"{toy_worker.__file__}:7: divide by zero"]


def test_a_warning_waits_for_the_others_while_a_call_is_in_progress(pool: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(pool, "on_warning", shown.append)
    waiting = pool.start("wait_for_gate", [()] * SIZE, what="waiting")
    assert pool.start("warn", [([0], "beside"), None], what="aside", aside=True).results() == [None, None]
    assert shown == []
    pool.start("open_gate", [()] * SIZE, what="aside", aside=True).results()
    waiting.results()
    call(pool, "warn", [1], "beside")
    assert shown == ["worker 0: beside"]


def test_warnings_before_a_failure_are_shown() -> None:
    with pytest.warns(RunWarning, match="^worker 1: about to fail$"), workers() as host:
        host.start("warn", [None, ([1], "about to fail")], what="warning")
        with pytest.raises(WorkerError, match="no such toy"):
            host.start("fail", [(1,)] * SIZE, what="failing").results()


def test_warnings_of_many_workers_are_told_by_their_number() -> None:
    host = Processes.__new__(Processes)
    host.size = 8
    assert [host._whose(list(range(count))) for count in (1, 2, 5, 8)] == ["worker 0: ", "workers 0 and 1: ", "5 of 8 workers: ", ""]


class Counted:
    """Counts how often it is pickled; arrives as a list."""

    def __init__(self, name: str) -> None:
        self.name, self.pickled = name, 0

    def __reduce__(self) -> tuple[Any, ...]:
        self.pickled += 1
        return list, ([self.name, "x" * 10**6],)


def test_what_workers_have_in_common_is_pickled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    forked.use(monkeypatch)
    common = [Counted("a"), Counted("b")]
    with contextlib.closing(Processes(range(3), "toy_worker:make_with", common=[common[0], common[0], common[1]])) as host:
        assert [log[0] for log in call(host, "read_log")] == ["a", "a", "b"] and call(host, "add", 1) == [1, 2, 3]
    assert [each.pickled for each in common] == [1, 1]


def test_messages_to_many_do_not_copy_what_they_have_in_common() -> None:
    once, given = wire.pickled_once(), ["x" * 10**6]
    messages = [wire.pack(wire.Start(0, "toy_worker:make", (once(given), once(rank)), False)) for rank in range(2)]
    assert messages[0][2].obj is messages[1][2].obj and sum(part.nbytes for part in messages[0][:2]) < 1000


# -- the store through which workers find one another --------------------------------------------------------------------------------------


def listening_at(port: int) -> list[str]:
    """The addresses at which this system accepts connections at the port, as /proc has them."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    places = [fields[1].split(":") for fields in lines if fields[3] == "0A"]
    return [host for host, own in places if int(own, 16) == port]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says where a process listens")
def test_the_store_listens_at_one_address() -> None:
    store = service.open_store("127.0.0.1", 2)
    port = store.port
    assert listening_at(port) == ["0100007F"]
    other = torch.distributed.TCPStore("127.0.0.1", port, 2, is_master=False)
    other.set("key", "value")
    assert store.get("key") == b"value"
    del other, store
    assert listening_at(port) == []


def test_the_store_of_a_torch_that_takes_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[dict[str, Any]] = []

    def old(host: str, port: int, *, is_master: bool, wait_for_workers: bool) -> str:
        taken.append({"host": host, "port": port, "is_master": is_master, "wait_for_workers": wait_for_workers})
        return "store"

    monkeypatch.setattr(service.dist, "TCPStore", old)
    assert service.open_store("127.0.0.1", 2) == "store"
    assert taken == [{"host": "127.0.0.1", "port": 0, "is_master": True, "wait_for_workers": False}]


# -- silence -------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def slow_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may keep a worker from writing its stack for a while."""
    monkeypatch.setattr(processes, "STACK_S", 60.0)


@pytest.mark.usefixtures("slow_stacks")
def test_a_silent_worker_is_reported_with_its_stack_then_given_up() -> None:
    told: list[str] = []
    with workers(on_stall=told.append) as host:
        sleeping = host.start("sleep_forever", [(1,)] * SIZE, what="sleep_forever")
        items = sleeping.items()
        assert next(items) == (1, "begun")
        eventually(lambda: sleeping.answered[0])
        host.stall_s, host.deadline_s = 0.5, 1.5
        with pytest.raises(WorkerStuck, match=r"worker 1 .* has sent nothing for \d+ s during sleep_forever"):
            next(items)
        assert not any(map(alive, host.pids))
    (text,) = told
    silent, idle, busy, *frames = text.splitlines()
    assert re.fullmatch(r"worker 1 \(process \d+\) has sent nothing for \d+ s during sleep_forever", silent)
    assert re.fullmatch(r"worker 0 \(process \d+\): has finished its part", idle)
    assert re.fullmatch(r"worker 1 \(process \d+\): sleep_forever, at work", busy)
    assert len(frames) == 1 and re.fullmatch(r" +toy_worker.py:\d+ in sleep_forever", frames[0])


class Greeted(LauncherHere):
    """Processes that have sent their first message: how long an interpreter takes to start is not what is tested."""

    def launch(self, ranks: Sequence[int], environment: Mapping[str, str]) -> Iterator[WorkerPeer]:
        for peer in super().launch(ranks, environment):
            assert select.select([peer.connection._socket], [], [], 120)[0]
            yield peer


@pytest.mark.parametrize(
    "error", [UserError("the machine foo cannot reach this one"), KeyboardInterrupt(), OSError(24, "Too many open files")]
)
@pytest.mark.parametrize("before", [0, 1])
def test_what_keeps_workers_from_starting_is_raised(error: BaseException, before: int) -> None:
    """Those that were started are ended."""
    started: list[WorkerPeer] = []

    class Failing(LauncherHere):
        def launch(self, ranks: Sequence[int], environment: Mapping[str, str]) -> Iterator[WorkerPeer]:
            for peer in super().launch(ranks[:before], environment):
                started.append(peer)
                yield peer
            raise error

    with pytest.raises(type(error)) as caught:
        Processes([0, 1], "toy_worker:make", launcher=Failing())
    assert caught.value is error and len(started) == before
    assert all(peer.process.ended() for peer in started)


@pytest.mark.usefixtures("slow_stacks")
def test_a_worker_that_hangs_while_it_loads_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the stack of what it does, which may be an import."""
    told = tmp_path / "told"
    source = f"import os\nwhile not os.path.exists({str(told)!r}): __import__('time').sleep(0.01)\ndef make(order): return object()\n"
    (tmp_path / "slow_toy.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    seconds: list[float] = []

    def on_stall(text: str) -> None:
        seconds.append(time.monotonic() - began)
        told.write_text(text)

    began = time.monotonic()
    Processes([0], "slow_toy:make", launcher=Greeted(), on_stall=on_stall, stall_s=1.5).close()
    assert len(seconds) == 1 and seconds[0] > 1.5
    text = told.read_text()
    assert re.match(r"worker 0 \(process \d+\) is still loading, without progress for \d+ s\n", text)
    assert re.search(r"worker 0 \(process \d+\): loading \(slow_toy:make\), at work\n +slow_toy.py:2 in <module>", text)


LOADER = """
import mmap, time
import torch
def make(order):
    rank, path, store = order
    if rank:
        read(path)
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    return object()

def read(path):
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as weights:
        for place in range(0, len(weights), 2**18):
            weights[place : place + 2**18]
            time.sleep(0.05)
"""


@pytest.mark.long
def test_neither_a_worker_that_loads_slowly_nor_one_that_waits_for_it_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads five megabytes in a second, for longer than it may be silent."""
    forked.use(monkeypatch)
    (tmp_path / "slow_loader.py").write_text(LOADER)
    weights = tmp_path / "weights"
    weights.write_bytes(bytes(40 * 2**20))
    monkeypatch.syspath_prepend(tmp_path)
    told: list[str] = []
    began = time.monotonic()
    orders = [(rank, str(weights), str(tmp_path / "store")) for rank in range(2)]
    Processes(orders, "slow_loader:make", launcher=Greeted(), on_stall=told.append, stall_s=4.0).close()
    assert not told and time.monotonic() - began > 8.0


ORDER = """
import time

class Order:
    def __reduce__(self):
        return read, ()

def read():
    pages = []
    for _ in range(60):
        pages.append(bytearray(2**20))
        time.sleep(0.1)
"""


@pytest.mark.matrix
def test_reading_an_order_and_importing_what_it_names_is_not_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the order of a run's worker, which names torch and transformers: a busy machine may take long to import them."""
    forked.use(monkeypatch)
    (tmp_path / "slow_order.py").write_text(ORDER)
    monkeypatch.syspath_prepend(tmp_path)
    told: list[str] = []
    orders = [importlib.import_module("slow_order").Order()]
    Processes(orders, "toy_worker:make", launcher=Greeted(), on_stall=told.append, stall_s=3.0).close()
    assert not told


@pytest.mark.long
@pytest.mark.parametrize("how", ["stopped", "asleep"])
def test_after_an_interrupt_a_worker_that_does_nothing_is_soon_given_up(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(processes, "HURRY_S", 1.0)
    with workers() as host:
        host.hurry()
        if how == "stopped":
            os.kill(host.pids[1], signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(WorkerStuck, match=r"^worker 1 .* has sent nothing for \d+ s during"):
            call(host, *(("add", 1) if how == "stopped" else ("sleep_forever", 1)))
        assert time.monotonic() - began < 60


def test_after_an_interrupt_a_worker_that_computes_is_not_given_up(pool: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it is silent, and though a busy machine may give it a tenth of a core."""
    monkeypatch.setattr(processes, "HURRY_S", 1.5)
    monkeypatch.setattr(pool, "hurried", True)
    assert call(pool, "compute", 2.0) == [0, 1]


def computed_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.usefixtures("slow_stacks")
def test_a_worker_that_takes_no_message_is_given_up() -> None:
    told: list[str] = []
    with workers(on_stall=told.append) as host:
        begun = host.start("compute_forever", [()] * SIZE, what="computing").items()
        assert {next(begun)[0], next(begun)[0]} == {0, 1}
        before = [computed_s(pid) for pid in host.pids]
        eventually(lambda: all(computed_s(pid) > then + 0.2 for pid, then in zip(host.pids, before, strict=True)))
        host.stall_s, host.deadline_s = 0.3, 0.9
        with pytest.raises(WorkerStuck, match="during sending"):
            host.start("give_back", [(np.zeros(10_000_000),)] * SIZE, what="sending")
    assert "computing (compute_forever), at work" in told[0] and re.search(r"toy_worker.py:\d+ in compute_forever", told[0])


@pytest.mark.long
@pytest.mark.usefixtures("slow_stacks")
def test_neither_progress_nor_waiting_for_another_is_silence() -> None:
    told: list[str] = []
    with workers(on_stall=told.append, stall_s=2.0) as host:
        host.start("rest", [(rank, 2.5) for rank in range(SIZE)], what="rest").results()
        assert not told
        host.stall_s = 0.8
        idle = host.start("idle", [(200.0,)] * SIZE, what="idle")  # nobody works: the driver forgets to tell

        def remember(text: str) -> None:
            told.append(text)
            for rank in range(SIZE):
                idle.tell(rank, "at last")

        host.on_stall = remember
        assert idle.results() == [["at last"]] * SIZE
        assert "waits for messages of the driver" in told[0]


COLLECTIVE = """
Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/x/fulltilt/cluster/serve.py", line 88 in _read

Current thread 0x00007f02 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 2806 in all_reduce
  File "/x/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/x/fulltilt/training/optim.py", line 155 in step
  File "/x/fulltilt/cluster/hosts.py", line 84 in produced
  File "/x/fulltilt/cluster/serve.py", line 121 in _outcome
"""


def test_the_worker_for_which_the_others_wait_is_named() -> None:
    frames = stacks.frames_of_calls(COLLECTIVE)
    assert [frame.function for frame in frames] == ["all_reduce", "wrapper", "step"]
    others = [stacks.Whereabouts(f"worker {rank}", "update", frames) for rank in (0, 2)]
    late = stacks.Whereabouts("worker 1", "update", (stacks.StackFrame("toy.py", 3, "sleep"),))
    text = stacks.report(["worker 0", "worker 2"], 46, "update-actor", [others[0], late, others[1]])
    assert text.startswith(
        "worker 0 and worker 2 have sent nothing for 46 s during update-actor\nworker 0: update, waits in the collective"
    )
    assert "operation all_reduce\n" in text
    assert text.endswith("The others wait for worker 1, which is not in a collective operation")
    assert "not in a collective" not in stacks.report(["worker 0"], 46, "update-actor", others)


def test_a_deep_stack_shows_its_end_and_the_line_of_this_package() -> None:
    deep = [stacks.StackFrame("/x/torch/nn/modules/module.py", line, "_call_impl") for line in range(20)]
    ours = [stacks.StackFrame(f"/x/fulltilt/training/{name}.py", 3, name) for name in ("roles", "trainer")]
    lines = str(stacks.Whereabouts("worker 0", "update", (*deep, *ours))).splitlines()
    assert len(lines) == 2 + stacks.MOST_FRAMES and "roles.py:3" in lines[-1] and "module.py:5 in" in lines[-2]


def test_only_what_a_worker_waits_in_is_its_collective_operation() -> None:
    def collective(*places: tuple[str, str]) -> str | None:
        return stacks.Whereabouts(
            "worker 0", "annotate", tuple(stacks.StackFrame(f"/x/{path}", 3, name) for path, name in places)
        ).collective

    passing = (("torch/distributed/fsdp/_fully_shard/_fully_shard.py", "wrapped_method"), ("fulltilt/training/roles.py", "annotate"))
    assert collective(("transformers/models/qwen2/modeling_qwen2.py", "forward"), *passing) is None
    assert collective(("fulltilt/model/attention.py", "attend"), *passing) is None
    assert collective(("torch/distributed/distributed_c10d.py", "all_gather_single"), *passing) == "all_gather_single"
    # NCCL returns at once: what waits is the line that reads the result.
    assert collective(("fulltilt/parallel/ranks.py", "norm"), ("fulltilt/training/optim.py", "step")) == "norm"
    assert collective(("fulltilt/training/optim.py", "step"), ("fulltilt/parallel/ranks.py", "norm")) is None


def test_waiting_in_a_collective_for_a_worker_that_makes_progress_is_not_silence(pool: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a worker which has no samples of a mini-batch, while the others compute theirs."""
    told: list[str] = []
    frames = stacks.frames_of_calls(COLLECTIVE)
    everyone = [stacks.Whereabouts("worker 0", "update", frames), stacks.Whereabouts("worker 1", "update", frames[2:])]
    monkeypatch.setattr(pool, "_whereabouts", lambda call: everyone)
    monkeypatch.setattr(pool, "on_stall", told.append)
    waiting = pool.start("wait_for_gate", [()] * SIZE, what="update")
    waiting.silent_s[:] = [46.0, 1.0]
    pool._look_for_silence(waiting)
    assert waiting.silent_s == [0.0, 1.0] and not told
    waiting.silent_s[:] = [46.0, 46.0]
    pool._look_for_silence(waiting)
    assert len(told) == 1 and "The others wait for worker 1" in told[0]
    pool.start("open_gate", [()] * SIZE, what="aside", aside=True).results()
    assert waiting.results() == [True] * SIZE


@pytest.mark.long
def test_collectives_name_the_worker_that_is_absent_and_the_one_that_is_dead(tmp_path: Path) -> None:
    told: list[str] = []
    with workers() as host:
        call(host, "join", str(tmp_path / "store"), SIZE)
        assert call(host, "reduce", -1) == [1.0, 1.0]
        host.stall_s = 1.0

        def kill(text: str) -> None:
            told.append(text)
            os.kill(host.pids[1], signal.SIGKILL)

        host.on_stall = kill
        reducing = host.start("reduce", [(1,)] * SIZE, what="reducing")
        with pytest.raises(WorkerDied, match="worker 1"):
            reducing.results()
    assert "worker 0 (process" in told[0] and "waits in the collective operation all_reduce" in told[0]
    assert re.search(r"The others wait for worker 1 \(process \d+\), which is not in a collective operation$", told[0])


# -- the end -------------------------------------------------------------------------------------------------------------------------------

DRIVER = """
import sys
from fulltilt.cluster.processes import Processes
host = Processes(range(2), "toy_worker:make")
call = host.start({method!r}, [{args}] * 2, what="endless")
print(*host.pids, flush=True)
{then}
"""


def driver(tmp_path: Path, method: str, args: str, then: str = "call.results()") -> tuple[subprocess.Popen[str], list[int]]:
    """A script without a main guard, and the workers that it has."""
    script = tmp_path / "driver.py"
    script.write_text(DRIVER.format(method=method, args=args, then=then))
    path = os.pathsep.join([str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)])
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert process.stdout
    return process, [int(pid) for pid in process.stdout.readline().split()]


@pytest.mark.parametrize(("method", "args"), [("count", "(10**9,)"), ("wait_for_gate", "()")])
def test_no_worker_outlives_a_driver_that_is_killed(tmp_path: Path, method: str, args: str) -> None:
    process, pids = driver(tmp_path, method, args)
    assert len(pids) == 2 and all(map(running, pids))
    with process:
        process.kill()
    eventually(lambda: not any(map(running, pids)))


def test_a_driver_that_forgets_to_close_ends_quietly(tmp_path: Path) -> None:
    process, pids = driver(tmp_path, "read_log", "()", then="")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "", "") and not any(map(running, pids))


def test_closing_leaves_nothing() -> None:
    def held() -> tuple[list[str], int]:
        return sorted(os.listdir("/proc/self/fd")), threading.active_count()

    call_one = Processes([0], "toy_worker:make")
    call_one.close()
    before = held()
    for end in ("idle", "busy", "died"):
        with workers() as host:
            if end == "busy":
                host.start("wait_for_gate", [()] * SIZE, what="waiting")
            if end == "died":
                os.kill(host.pids[0], signal.SIGKILL)
            began = time.monotonic()
            host.close()
            assert time.monotonic() - began < 60  # workers that are busy would be so for longer
            host.close()
        assert held() == before
    with pytest.raises(RuntimeError, match="the workers were closed"):
        call(call_one, "add", 1)


def test_signals_to_stop_are_left_to_the_driver(pool: Processes) -> None:
    for pid in pool.pids:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
    assert call(pool, "add", 1) == [1, 2]
