"""Threads that hand calls to worker processes, one thread for each process.

Calls enter by `put`, from any thread; each leaves exactly once through `done`, on one of the threads, with its `CallOutcome`. Guaranteed:
- a process that ends, or is killed at a deadline, loses only the call that was running; its other calls are handed out again;
- a call that crashes or runs out of memory in a process in which others had run before is tried once more in a fresh process, so that
  its outcome does not depend on those others;
- a failed call is tried again `reward.retries` times, each time after a wait;
- there are never more processes than calls have been waiting, beyond one per core; asynchronous functions have one process (`overlap`);
- if processes fail to start three times in a row and none is alive, or twenty times while a call waits for a new one, the error says why.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fulltilt.callables import travelling
from fulltilt.memory.host import usable_cores
from fulltilt.records import UserError
from fulltilt.reward import confine, functions
from fulltilt.reward.calls import CallQueue, RewardCall
from fulltilt.reward.environment import make_environment
from fulltilt.reward.overlap import Overlap
from fulltilt.reward.process import CallOutcome, Guard, Loaded, StartFailed, WorkerProcess
from fulltilt.reward.worker import Setup
from fulltilt.schema import RewardConfig
from fulltilt.user_code import UserCode, UserCodeError

START_TRIES = 3
NEEDED_START_TRIES = 20  # while other processes live, but cannot take the waiting call
MOST_CALLS_AT_ONCE = 32
ASYNC_CALLS_AT_ONCE = 32  # the value that `reward.concurrency = "auto"` stands for
GRACE_S = 5.0  # seconds from its deadline within which a cancelled asynchronous call must end
# Seconds of work that a worker gets at once, estimated from the mean time of a call. With less, the threads would be too busy; with more,
# cores would idle at the end.
HANDOUT_S = 0.02


class Dispatcher:
    def __init__(
        self,
        config: RewardConfig,
        names: Sequence[str],
        done: Callable[[RewardCall, CallOutcome], None],
        failed: Callable[[BaseException], None],
        run_dir: Path | None = None,
    ) -> None:
        """Return once a process has loaded every named function, or `failed` was called with the reason why none could; without names there
        are no processes. Raises UserError if a function's file cannot be read, or cannot be sent to a process. `run_dir`: a folder that the
        functions must not write into.

        Called on the threads: `done` with a call and its outcome; `failed` if no call can end any more."""
        self._located = locate_all(names)
        self._files = ", ".join(sorted({place.path for place in self._located if place.path})) or "fulltilt"
        self._environment = make_environment(config.env)
        self._config = config
        self._size = usable_cores() if config.workers == "auto" else config.workers
        self._done = done
        self._failed = failed
        self._changed = threading.Lock()
        self._calls, self._async_calls = CallQueue(), CallQueue()
        self._processes: set[WorkerProcess] = set()
        self._threads: list[threading.Thread] = []
        self._failed_starts = 0
        self._mean_s = math.inf
        self._loaded = threading.Event()
        self._closing = threading.Event()
        self._held = contextlib.ExitStack()  # resources that `close` frees
        self.batch: tuple[bool, ...] = ()  # for each function, once loaded
        self.asynchronous: tuple[bool, ...] = ()
        self.needs_truth: tuple[bool, ...] = ()
        self.memory_limited = True
        self.confinement: confine.Confinement | None = None
        if names:
            self._prepare(run_dir)
            self._launch(1)
            self._loaded.wait()
            self._launch_for(usable_cores())

    def _prepare(self, run_dir: Path | None) -> None:
        """Prepare what every process gets: the functions, a folder for temporary files, and restrictions."""
        try:
            self._folder = tempfile.mkdtemp(prefix="fulltilt-reward-")
        except OSError as error:
            raise UserError(f"no folder for the temporary files of reward functions: {error}. Make room, or set TMPDIR") from error
        with contextlib.ExitStack() as held:
            held.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self._guard = Guard(self._folder)
            held.callback(self._guard.close)
            self._environment.variables["TMPDIR"] = self._folder
            if self._config.sandbox:
                self.confinement = confine.confinement(run_dir, (os.getpid(), self._guard.pid))
                if self.confinement.ruleset is not None:
                    held.callback(os.close, self.confinement.ruleset)
            memory = int(self._config.memory_gb * 2**30)
            limits = (memory, self._config.timeout_s, GRACE_S)
            self._setup = pickle.dumps(Setup(self._located, dict(self._config.args), *limits, self.confinement))
            self._held = held.pop_all()

    @property
    def stopped(self) -> bool:
        """Whether calls that are put from now on never end."""
        return self._closing.is_set()

    def put(self, calls: Sequence[RewardCall]) -> None:
        if not calls:
            return
        self._async_calls.put([call for call in calls if self.asynchronous[call.request.function]])
        self._calls.put([call for call in calls if not self.asynchronous[call.request.function]])
        self._launch_for(len(self._calls))

    def note_on(self, message: str, *functions: int) -> str:
        """Return a sentence to add to the message of functions that failed; empty if there is none."""
        note = self._environment.note(" ".join([message, *(self._located[each].source.decode(errors="replace") for each in functions)]))
        return f". {note}" if note else ""

    @property
    def hidden(self) -> str:
        """Return a sentence about environment variables that the functions' files mention but reward processes do not get; empty if there
        are none."""
        return self._environment.note(" ".join(place.source.decode(errors="replace") for place in self._located))

    def close(self) -> None:
        """Kill every process."""
        self._stop()
        for thread in self._threads:
            thread.join()
        self._threads = []
        self._held.close()

    def _launch_for(self, calls: int) -> None:
        """Start as many threads as this many calls of plain functions can use, in addition to the thread that may serve asynchronous
        functions."""
        with self._changed:
            if not self._closing.is_set() and not all(self.asynchronous):
                self._launch(min(self._size, calls) + any(self.asynchronous) - len(self._threads))

    def _launch(self, count: int) -> None:
        for _ in range(count):
            self._threads.append(threading.Thread(target=self._run, args=(not self._threads,), name="fulltilt-reward", daemon=True))
            self._threads[-1].start()

    def _stop(self) -> None:
        self._closing.set()
        self._calls.close()
        self._async_calls.close()
        with self._changed:
            for process in self._processes:
                process.interrupt()

    # Everything below runs on each worker's own thread: Linux ends a process with the thread that started it.

    def _run(self, first: bool) -> None:
        again: list[RewardCall] = []
        try:
            while not self._closing.is_set():
                try:
                    with self._process() as process:
                        if first and any(self.asynchronous):
                            self._use_at_once(process)
                        else:
                            again = self._use(process, again)
                except StartFailed as failure:
                    self._wait_after(failure, needed=bool(again) or (first and any(self.asynchronous)))
        except BaseException as error:
            self._stop()
            self._failed(error)
            self._loaded.set()

    @contextlib.contextmanager
    def _process(self) -> Iterator[WorkerProcess]:
        """Start a process, and yield it once it has loaded every function."""
        ruleset = self.confinement.ruleset if self.confinement else None
        process = WorkerProcess(self._guard, self._environment.variables, *([] if ruleset is None else [ruleset]))
        with self._changed:
            self._processes.add(process)
            if self._closing.is_set():
                process.interrupt()
        try:
            self.memory_limited, self.batch, self.asynchronous, self.needs_truth = self._load(process)
            self._failed_starts = 0
            self._loaded.set()
            yield process
        finally:
            with self._changed:
                self._processes.remove(process)
            process.kill()

    def _load(self, process: WorkerProcess) -> Loaded:
        try:
            return process.load(self._setup, self._files)
        except StartFailed:
            raise
        except UserError as error:
            raise UserError(f"{error}{self.note_on(str(error), *range(len(self._located)))}") from None

    def _wait_after(self, failure: StartFailed, *, needed: bool) -> None:
        if self._closing.is_set():
            return
        with self._changed:
            self._failed_starts += 1
            others = any(process.loaded for process in self._processes)
            if self._failed_starts >= (START_TRIES if not others else NEEDED_START_TRIES if needed else math.inf):
                raise failure
        self._closing.wait(min(5.0, 0.1 * 2 ** min(self._failed_starts, 6)))

    def _use(self, process: WorkerProcess, again: list[RewardCall]) -> list[RewardCall]:
        """Give a process calls, `again` first, until it must be replaced. Returns the call that the next process must try again, if any."""
        while calls := again or self._calls.take(self._handful):
            outcomes = process.outcomes([call.request for call in calls], self._config.timeout_s)
            for number, (call, outcome) in enumerate(zip(calls, outcomes, strict=True), start=1):
                if self._closing.is_set():
                    return []
                in_fresh_process = outcome.try_again and not again
                if not in_fresh_process:
                    self._end(call, outcome)
                if outcome.ends_process:
                    self._calls.put_back(calls[number:])
                    return [replace(call, repeats=call.repeats + 1)] if in_fresh_process else []
                self._mean_s = outcome.seconds if self._mean_s == math.inf else 0.9 * self._mean_s + 0.1 * outcome.seconds
            again = []
        return []

    def _use_at_once(self, process: WorkerProcess) -> None:
        limit = ASYNC_CALLS_AT_ONCE if self._config.concurrency == "auto" else self._config.concurrency
        Overlap(process, self._async_calls, limit, self._config.timeout_s, GRACE_S, self._end).run()

    def _end(self, call: RewardCall, outcome: CallOutcome) -> None:
        """Handle the end of one try of a call."""
        if self._closing.is_set():
            return
        if outcome.failure in (None, "mistake") or outcome.final or call.failures >= self._config.retries:
            self._done(call, outcome)
            return
        queue = self._async_calls if self.asynchronous[call.request.function] else self._calls
        queue.put_later(replace(call, failures=call.failures + 1, repeats=call.repeats + 1), call.seconds_to_wait())

    def _handful(self, ready: Sequence[RewardCall]) -> int:
        """Return how many of the ready calls a worker gets at once."""
        fair = len(ready) // (2 * self._size)
        quick = HANDOUT_S / self._mean_s if self._mean_s else MOST_CALLS_AT_ONCE
        return max(1, int(min(fair, quick, MOST_CALLS_AT_ONCE)))


def locate_all(names: Sequence[str]) -> tuple[UserCode, ...]:
    """Read the files of the functions. Raises UserError with everything that is wrong."""
    found, wrong = [], []
    for name in names:
        try:
            found.append(travelling(functions.locate(name)))
        except UserCodeError as error:
            wrong.append(str(error))
    if wrong:
        raise UserError("\n".join(wrong))
    return tuple(found)
