"""Signs of life: a worker that saves, or samples a long group, is not taken for stuck, however long it has nothing to tell; one that hangs
is."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import runs
from test_processes import Greeted

from fulltilt.cluster import worker as worker_file
from fulltilt.cluster.alive import LoadedBytes, Signs, Written, no_signs, signs_for, signs_of_progress
from fulltilt.cluster.assembly import assemble
from fulltilt.cluster.local import LocalInbox
from fulltilt.cluster.processes import Processes
from fulltilt.cluster.service import ServedWorker
from fulltilt.cluster.wire import Item, pack
from fulltilt.cluster.worker import Worker
from fulltilt.records import Group, Prompt
from fulltilt.rollout.sampler import Sampling
from fulltilt.rollout.stats import RolloutProgress

ModelFolders = Callable[[str], Path]
DEADLINE_S = 120.0


class Driver:
    """An inbox of a worker whose driver is elsewhere."""

    sign_s = 0.01

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.told = threading.Event()

    def send(self, item: Any) -> None:
        self.sent.append(item)
        self.told.set()

    def poll(self) -> list[Any]:
        return []

    def wait(self, timeout: float | None = None) -> list[Any]:
        raise AssertionError("it is told nothing")


def test_what_is_read_from_large_pages_counts(tmp_path: Path) -> None:
    """A kernel whose file cache has pages of two megabytes brings in each with one fault."""
    path = tmp_path / "weights"
    with path.open("wb", buffering=0) as file:
        for _ in range(8):
            file.write(bytes(2**21))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as weights:
        loaded = LoadedBytes()
        before = loaded()
        assert loaded() - before < 1  # nothing has been read
        assert sum(weights[place] for place in range(0, len(weights), 4096)) == 0
        assert loaded() - before >= 6


def write_until(told: threading.Event, path: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    with path.open("wb", buffering=0) as file:
        while not told.is_set():
            assert time.monotonic() < deadline, "no sign has come"
            file.write(bytes(2**18))
            if file.tell() > 2**26:
                file.seek(0)


def test_writing_sends_signs_and_hanging_sends_none(tmp_path: Path) -> None:
    driver, written, enough = Driver(), Written(), threading.Event()
    with signs_of_progress(driver, written):
        write_until(driver.told, tmp_path / "file")
    assert set(driver.sent) == {None}
    driver.sent.clear()
    looks: list[float] = []

    def look() -> float:
        looks.append(written())
        if len(looks) == 10:
            enough.set()
        return looks[-1]

    with signs_of_progress(driver, look):
        assert enough.wait(DEADLINE_S)
    assert driver.sent == []


def test_signs_are_not_sent_more_often_than_they_are_needed() -> None:
    sent: list[None] = []
    often, seldom = Signs(sent.append, 0.0), Signs(sent.append, 1e9)
    for _ in range(3):
        often()
        seldom()
    assert sent == [None] * 3


def test_where_the_driver_is_in_the_same_process_nothing_is_sent_and_no_thread_is_started() -> None:
    before = threading.active_count()
    for inbox in (None, LocalInbox()):
        assert signs_for(inbox) is no_signs
        with signs_of_progress(inbox, lambda: 0.0):
            assert threading.active_count() == before


# -- calls of a worker ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def worker(model_folders: ModelFolders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = runs.make(tmp_path_factory.mktemp("alive") / "run", model_folders("qwen2"))
    with contextlib.chdir(folder), contextlib.closing(assemble(runs.read_config(folder), None)) as parts:
        yield parts.crew.worker


@pytest.mark.parametrize("part", ["save", "finish_save"])
def test_a_save_sends_signs_while_it_writes(worker: Worker, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()

    def write(*args: Any, **options: Any) -> Callable[..., Any]:
        def rest(go_on: Callable[[], None]) -> dict[str, Any]:
            if part == "finish_save":
                write_until(driver.told, tmp_path / "file")
            return {}

        if part == "save":
            write_until(driver.told, tmp_path / "file")
        return rest

    monkeypatch.setattr(worker_file, "write_trainer", write)
    assert worker.save({}, tmp_path, True, inbox=driver) is None
    assert bool(driver.sent) == (part == "save")
    assert worker.finish_save(inbox=driver) == {}
    assert set(driver.sent) == {None}


def test_the_rest_of_a_save_sends_a_sign_after_each_piece(worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the piece was only waited for, as that which a disk takes."""
    driver = Driver()
    driver.sign_s = 0.0
    monkeypatch.setattr(Written, "__call__", lambda self: 0.0)
    monkeypatch.setattr(worker_file, "write_trainer", lambda *args, **options: lambda go_on: [go_on() for _ in range(5)] and {})
    worker.save({}, tmp_path, True, inbox=driver)
    worker.finish_save(inbox=driver)
    assert driver.sent == [None] * 5


@pytest.mark.parametrize("log_stats", [True, False])
def test_a_rollout_sends_signs_before_a_group_is_finished_whatever_is_logged(
    worker: Worker, log_stats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, config = Driver(), worker.config
    driver.sign_s = 0.0
    rollout = config.rollout.model_copy(update={"log_stats": log_stats})
    monkeypatch.setattr(worker, "config", config.model_copy(update={"rollout": rollout}))
    worker.send_progress(0.0)
    prompts = {0: Prompt(0, np.arange(3, 9), "")}
    with worker.account.phase("rollout"):
        groups = worker.generate(prompts, Sampling(samples=2, max_new_tokens=40), 3, 0, inbox=driver)
        assert isinstance(next(groups), Group)
        sent = list(driver.sent)
        assert list(groups) == []
    assert sent.count(None) > 2 and sum(isinstance(item, RolloutProgress) for item in sent) == (sent.count(None) if log_stats else 0)
    assert len(sent) == sent.count(None) * (1 + log_stats)
    if not log_stats:
        assert sum(part.nbytes for item in sent for part in pack(Item(1, item))) < 100 * len(sent)
    assert worker.engine and worker.engine.recorder.on_pass is no_signs, "the inbox is that of this call alone"


def test_a_served_worker_gives_its_calls_the_inbox(worker: Worker) -> None:
    """By which the host of a worker's process decides, from the names of parameters."""
    served = ServedWorker(worker)
    for method in ("save", "finish_save", "sync", "generate", "held"):
        assert "inbox" in inspect.signature(getattr(served, method)).parameters, method


def test_samples_on_their_way_between_workers_are_signs(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, carried = Driver(), itertools.count()

    def exchange(purpose: str) -> str:
        assert driver.told.wait(DEADLINE_S)
        return purpose

    monkeypatch.setattr(worker, "shelf", SimpleNamespace(carried=lambda: float(next(carried)), exchange=exchange))
    calling = worker.held("exchange", "update-actor", inbox=driver)
    with pytest.raises(StopIteration, match="update-actor"):
        next(calling)
    assert set(driver.sent) == {None}


@pytest.mark.long
def test_parcels_that_take_long_send_signs_and_arrive_whole(tmp_path: Path) -> None:
    """Each pair of workers has another number of pieces."""
    parcels = [[bytes(range(sender, sender + 1 + 7 * sender + 3 * receiver)) for receiver in range(3)] for sender in range(3)]
    settings: dict[str, Any] = {"launcher": Greeted(), "on_stall": print, "stall_s": 0.4, "deadline_s": DEADLINE_S}
    with contextlib.closing(Processes(range(3), "toy_worker:make", **settings)) as host:
        host.start("join", [(os.fspath(tmp_path / "store"), 3)] * 3, what="set-up").results()
        call = host.start("swap", [(own, 2, 0.05) for own in parcels], what="update-actor", aside=True)
        assert {item for item in call.items()} == {(rank, None) for rank in range(3)}
        assert call.results() == [[parcels[sender][receiver] for sender in range(3)] for receiver in range(3)]


@pytest.mark.matrix
def test_a_worker_that_writes_for_longer_than_the_deadline_is_neither_reported_nor_given_up(tmp_path: Path) -> None:
    told: list[str] = []
    settings: dict[str, Any] = {"launcher": Greeted(), "on_stall": told.append, "stall_s": 4.0, "deadline_s": 8.0}
    with contextlib.closing(Processes(range(2), "toy_worker:make", **settings)) as host:
        paths = [(os.fspath(tmp_path / str(rank)), 12.0) for rank in range(2)]
        for aside in (False, True):
            assert host.start("write_slowly", paths, what="save", aside=aside).results() == [0, 1]
    assert not told
