"""Threads that hand calls to worker processes, one thread for each process.

Calls enter by `put`, from any thread; each leaves exactly once through `done`, on one of the threads, with its `Outcome`. Guaranteed:
- a process that ends, or is killed at a deadline, loses only the call that was running; its other calls are handed out again;
- a call that crashes or runs out of memory in a process in which others had run before is tried once more in a fresh process, so that
  its outcome does not depend on those others;
- if processes fail to start three times in a row and none is alive, the error says why.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fulltilt.callables import travelling
from fulltilt.memory.host import usable_cores
from fulltilt.records import Group, UserError
from fulltilt.reward import functions
from fulltilt.reward.process import Guard, Outcome, StartFailed, WorkerProcess
from fulltilt.reward.worker import Request, Setup
from fulltilt.schema import RewardConfig
from fulltilt.user_code import UserCodeError

START_TRIES = 3
MOST_CALLS_AT_ONCE = 32
# How much work a worker gets at once, estimated by the mean time of a call so far. With less, the threads are busy; with more, cores idle
# at the end.
HANDOUT_S = 0.02


@dataclass(frozen=True, eq=False)
class RewardCall:
    """A request, and where its scores belong: a component of a group's sum, samples `first` and following."""

    request: Request
    group: Group
    component: int
    first: int


class Dispatcher:
    def __init__(
        self,
        config: RewardConfig,
        names: Sequence[str],
        done: Callable[[RewardCall, Outcome, bool], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Returns once a process has loaded every named function, or `failed` was told what kept it from doing so; without names there are
        no processes. UserError if a function's file cannot be read, or if it cannot be sent to a process.

        Called on the threads: `done` with a call, its outcome and whether it was tried again; `failed` if no call can end any more."""
        try:
            located = tuple(travelling(functions.locate(name)) for name in names)
        except UserCodeError as error:
            raise UserError(str(error)) from None
        self._setup = pickle.dumps(Setup(located, dict(config.args), int(config.memory_gb * 2**30)))
        self._files = ", ".join(sorted({place.path for place in located if place.path})) or "fulltilt"
        self._size = usable_cores() if config.workers == "auto" else config.workers
        self._timeout_s = config.timeout_s
        self._done = done
        self._failed = failed
        self._changed = threading.Condition()
        self._queue: deque[RewardCall] = deque()
        self._processes: set[WorkerProcess] = set()
        self._threads: list[threading.Thread] = []
        self._failed_starts = 0
        self._mean_s = math.inf
        self._loaded = threading.Event()
        self._closing = threading.Event()
        self.batch: tuple[bool, ...] = ()  # for each function, once loaded
        self.memory_limited = True
        if names:
            self._guard = Guard()
            self._launch(1)
            self._loaded.wait()
            self._launch(self._size - 1)

    def put(self, calls: Sequence[RewardCall]) -> None:
        with self._changed:
            self._queue.extend(calls)
            self._changed.notify(len(calls))

    def close(self) -> None:
        """Kills every process."""
        self._stop()
        for thread in self._threads:
            thread.join()
        if self._threads:
            self._guard.close()

    def _launch(self, count: int) -> None:
        for _ in range(count):
            self._threads.append(threading.Thread(target=self._run, name="fulltilt-reward", daemon=True))
            self._threads[-1].start()

    def _stop(self) -> None:
        self._closing.set()
        with self._changed:
            for process in self._processes:
                process.interrupt()
            self._changed.notify_all()

    # Everything below runs on each worker's own thread: Linux ends a process with the thread that started it.

    def _run(self) -> None:
        again: list[RewardCall] = []
        try:
            while not self._closing.is_set():
                try:
                    with self._process() as process:
                        again = self._use(process, again)
                except StartFailed as failure:
                    self._wait_after(failure)
        except BaseException as error:
            self._stop()
            self._failed(error)
            self._loaded.set()

    @contextlib.contextmanager
    def _process(self) -> Iterator[WorkerProcess]:
        """A process that has loaded every function."""
        process = WorkerProcess(self._guard)
        with self._changed:
            self._processes.add(process)
            if self._closing.is_set():
                process.interrupt()
        try:
            self.memory_limited, self.batch = process.load(self._setup, self._files)
            self._failed_starts = 0
            self._loaded.set()
            yield process
        finally:
            with self._changed:
                self._processes.remove(process)
            process.kill()

    def _wait_after(self, failure: StartFailed) -> None:
        if self._closing.is_set():
            return
        with self._changed:
            self._failed_starts += 1
            if self._failed_starts >= START_TRIES and not any(process.loaded for process in self._processes):
                raise failure
        self._closing.wait(min(5.0, 0.1 * 2 ** min(self._failed_starts, 6)))

    def _use(self, process: WorkerProcess, again: list[RewardCall]) -> list[RewardCall]:
        """Gives a process calls, `again` first, until it must be replaced. Returns the call that the next process must try again."""
        while calls := again or self._take():
            outcomes = process.outcomes([call.request for call in calls], self._timeout_s)
            for number, (call, outcome) in enumerate(zip(calls, outcomes, strict=True), start=1):
                if self._closing.is_set():
                    return []
                retry = outcome.try_again and not again
                if not retry:
                    self._done(call, outcome, bool(again))
                if outcome.ends_process:
                    self._put_back(calls[number:])
                    return [call] if retry else []
                self._mean_s = outcome.seconds if self._mean_s == math.inf else 0.9 * self._mean_s + 0.1 * outcome.seconds
            again = []
        return []

    def _take(self) -> list[RewardCall]:
        """The next calls for a worker, waited for; none once the dispatcher is closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing.is_set())
            if self._closing.is_set():
                return []
            fair = len(self._queue) // (2 * self._size)
            quick = HANDOUT_S / self._mean_s if self._mean_s else MOST_CALLS_AT_ONCE
            count = max(1, int(min(fair, quick, MOST_CALLS_AT_ONCE)))
            return [self._queue.popleft() for _ in range(min(count, len(self._queue)))]

    def _put_back(self, calls: Sequence[RewardCall]) -> None:
        with self._changed:
            self._queue.extendleft(reversed(calls))
            self._changed.notify(len(calls))
