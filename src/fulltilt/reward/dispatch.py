"""One thread that hands calls to worker processes and holds them to their deadlines.

Calls enter by `put`, from any thread; each leaves exactly once through `done`, called on the dispatcher's thread, with an `Outcome`.
Guaranteed:
- nothing waits without a deadline: a call has `timeout_s` from the moment its worker begins it, a worker has `LOAD_S` to load;
- past its deadline a call is killed with everything it started; a crash loses only the call that was running, the worker's other calls
  are handed out again;
- a call that crashes or runs out of memory in a process in which others had run before is tried once more in a fresh process, so that
  its outcome does not depend on those others;
- if processes fail to start three times in a row and none is alive, the error says why.
"""

from __future__ import annotations

import math
import pickle
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from fulltilt.records import UserError
from fulltilt.reward.functions import Scored
from fulltilt.reward.process import BadMessage, Guard, RewardCall, WorkerProcess
from fulltilt.reward.worker import Setup

LOAD_S = 120.0
START_TRIES = 3
REAP_S = 0.2  # between looks at killed processes that have not ended yet
MOST_CALLS_AT_ONCE = 32
# How much work a worker gets at once, estimated by the mean time of a call so far. With less, this thread is busy; with more, cores idle
# at the end.
HANDOUT_S = 0.02

Failure = Literal["error", "timeout", "crash", "mistake"]


@dataclass(frozen=True)
class Outcome:
    """How a call ended: with scores in the order of its samples, or with a failure, whose message continues the function's name."""

    scores: tuple[Scored, ...] = ()
    failure: Failure | None = None
    message: str = ""
    detail: str = ""
    sample: int = 0  # which of the call's samples, for a mistake
    seconds: float = 0.0
    retried: bool = False


class Dispatcher:
    def __init__(
        self, setup: Setup, workers: int, timeout_s: float, done: Callable[[RewardCall, Outcome], None], ended: Callable[[], None]
    ) -> None:
        """`done` and `ended` are called on the dispatcher's thread: a call has ended; the thread itself has, perhaps with `error`."""
        self._setup = pickle.dumps(setup)
        self._files = ", ".join(sorted({place.path for place in setup.functions if place.path})) or "fulltilt"
        self._size = workers
        self._timeout_s = timeout_s
        self._done = done
        self._ended = ended
        self._lock = threading.Lock()
        self._queue: deque[RewardCall] = deque()
        self._again: deque[RewardCall] = deque()
        self._workers: list[WorkerProcess] = []
        self._dying: list[WorkerProcess] = []
        self._failed_starts = 0
        self._next_start = 0.0
        self._mean_s = math.inf
        self._closing = False
        self._loaded = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self.error: BaseException | None = None
        self.batch: tuple[bool, ...] = ()  # for each function of the setup, once loaded
        self.memory_limited = True
        self._thread = threading.Thread(target=self._run, name="fulltilt-reward", daemon=True)

    def start(self) -> None:
        """Returns once a process has loaded every function; raises what kept it from doing so."""
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread.start()
        self._loaded.wait()
        if self.error is not None:
            self.close()
            raise self.error

    def put(self, calls: Iterable[RewardCall]) -> None:
        with self._lock:
            self._queue.extend(calls)
        self._nudge()

    def close(self) -> None:
        """Kills every process. Safe to call twice."""
        self._closing = True
        self._nudge()
        self._thread.join()
        self._wake.close()

    def _nudge(self) -> None:
        try:
            self._wake.send(b"!")
        except OSError:
            # Full: the thread is about to wake anyway. Closed: it has ended.
            return

    # Everything below runs on the dispatcher's thread.

    def _run(self) -> None:
        # Linux ends a process with the thread that started it, so this one thread starts all of them.
        try:
            self._guard = Guard()
            try:
                while not self._closing and self.error is None:
                    self._turn()
            finally:
                self._kill_all()
        except BaseException as error:
            self.error = self.error or error
        self._selector.close()
        self._woken.close()
        self._loaded.set()
        self._ended()

    def _turn(self) -> None:
        if time.monotonic() >= self._next_start:
            self._start(self._missing())
        self._hand_out()
        for key, _ in self._selector.select(self._patience()):
            if key.data is None:
                self._woken.recv(4096)
            else:
                self._attend(key.data)
        for worker in list(self._workers):
            if worker in self._workers and time.monotonic() > self._deadline(worker):
                self._expire(worker)
        self._dying = [process for process in self._dying if not process.reaped()]

    def _patience(self) -> float | None:
        """Seconds until something must be done although no worker has said anything; None: nothing must."""
        now = time.monotonic()
        times = [math.inf, *map(self._deadline, self._workers)]
        times += [self._next_start] if self._missing() > 0 else []
        times += [now + REAP_S] if self._dying else []
        return None if min(times) == math.inf else max(0.0, min(times) - now)

    def _deadline(self, worker: WorkerProcess) -> float:
        if not worker.ready:
            return worker.began + LOAD_S
        return worker.began + self._timeout_s if worker.calls else math.inf

    def _missing(self) -> int:
        """How many more processes there should be. A dead one is replaced only when there is work for it."""
        if not self._loaded.is_set():
            return 1 - len(self._workers)
        free = [worker for worker in self._workers if not worker.calls]
        fresh = sum(worker.finished == 0 for worker in free)
        used = len(free) - fresh
        with self._lock:
            waiting = len(self._queue)
        for_again = max(0, len(self._again) - fresh)
        for_queue = max(0, waiting - used - max(0, fresh - len(self._again)))
        return min(self._size - len(self._workers), for_again + for_queue)

    def _start(self, count: int) -> None:
        for _ in range(count):
            try:
                worker = WorkerProcess(self._setup)
            except OSError as error:
                self._start_failed(RuntimeError(f"a reward process could not be started: {error}"))
                continue
            self._workers.append(worker)
            self._guard.tell("+", worker.pid)
            self._selector.register(worker, selectors.EVENT_READ, worker)

    def _start_failed(self, error: Exception) -> None:
        self._failed_starts += 1
        self._next_start = time.monotonic() + min(5.0, 0.1 * 2**self._failed_starts)
        if self._failed_starts >= START_TRIES and not any(worker.ready for worker in self._workers):
            self.error = error

    def _hand_out(self) -> None:
        for worker in self._workers:
            if worker.ready and not worker.calls and (calls := self._take(worker)):
                worker.calls.extend(calls)
                worker.send(pickle.dumps([call.request for call in calls]))
                worker.began = time.monotonic()
                self._watch(worker)

    def _take(self, worker: WorkerProcess) -> list[RewardCall]:
        # One fresh process is started for every call that needs one, so none of them waits in vain.
        if self._again and worker.finished == 0:
            return [self._again.popleft()]
        with self._lock:
            fair = len(self._queue) // (2 * self._size)
            quick = HANDOUT_S / self._mean_s if self._mean_s else MOST_CALLS_AT_ONCE
            count = max(1, int(min(fair, quick, MOST_CALLS_AT_ONCE)))
            return [self._queue.popleft() for _ in range(min(count, len(self._queue)))]

    def _watch(self, worker: WorkerProcess) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.unsent else 0)
        self._selector.modify(worker, events, worker)

    def _attend(self, worker: WorkerProcess) -> None:
        """Reads all that the worker has sent."""
        if worker.unsent:
            worker.flush()
            self._watch(worker)
        try:
            messages, connected = worker.receive()
            for message in messages:
                if worker in self._workers:
                    self._understand(worker, message)
        except BadMessage:
            # Only the user's function can have written this: it found the descriptor of its process.
            self._lose(worker, Outcome(failure="crash", message="wrote into the connection of its process"))
            return
        if not connected and worker in self._workers:
            cause, said = worker.cause_of_death()
            self._lose(worker, Outcome(failure="crash", message=cause, detail=said))

    def _understand(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        worker.began = time.monotonic()
        if "id" in message:
            self._answered(worker, message)
        elif "hello" in message:
            worker.greeted = True
            self.memory_limited = bool(message["memory_limited"])
        elif "ready" in message:
            worker.ready = True
            self.batch = tuple(message["ready"])
            self._failed_starts = 0
            if not self._loaded.is_set():
                self._loaded.set()
                self._start(self._size - len(self._workers))
        elif "load_error" in message:
            self.error = UserError(str(message["load_error"]))
        elif "begin" not in message:
            raise BadMessage("unknown")

    def _answered(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        if not worker.calls or message["id"] != worker.calls[0].request.id:
            raise BadMessage("an answer to another call")
        outcome = _outcome(worker.calls[0], message)
        call = worker.calls.popleft()
        worker.finished += 1
        self._mean_s = outcome.seconds if self._mean_s == math.inf else 0.9 * self._mean_s + 0.1 * outcome.seconds
        if message.get("memory") and worker.finished > 1 and not call.fresh:
            self._try_again(call)
        else:
            self._done(call, outcome)
        if message.get("retire"):
            self._remove(worker)

    def _try_again(self, call: RewardCall) -> None:
        call.fresh = True
        self._again.append(call)

    def _expire(self, worker: WorkerProcess) -> None:
        # An answer that came while this thread was kept from running is an answer in time.
        self._attend(worker)
        if worker not in self._workers or time.monotonic() <= self._deadline(worker):
            return
        if worker.ready:
            message = f"ran past its deadline of {self._timeout_s:g} s (reward.timeout_s)"
            self._lose(worker, Outcome(failure="timeout", message=message, seconds=self._timeout_s))
        else:
            self.error = UserError(f"the reward process did not load {self._files} within {LOAD_S:g} s")
            self._remove(worker)

    def _lose(self, worker: WorkerProcess, outcome: Outcome) -> None:
        """The worker is gone, or must be killed: its current call has failed, those that it had not begun are handed out again."""
        running = worker.calls.popleft() if worker.calls else None
        self._remove(worker)
        if running is not None:
            if outcome.failure == "crash" and worker.finished and not running.fresh:
                self._try_again(running)
            else:
                self._done(running, replace(outcome, retried=running.fresh))
        elif not worker.ready:
            said = f": {outcome.detail.strip()[-2000:]}" if outcome.detail else ""
            if worker.greeted:
                self._start_failed(UserError(f"loading {self._files} {outcome.message}{said}"))
            else:
                self._start_failed(RuntimeError(f"a reward process {outcome.message} before it could load anything{said}"))

    def _remove(self, worker: WorkerProcess) -> None:
        with self._lock:
            self._queue.extendleft(reversed(worker.calls))
        worker.calls.clear()
        self._workers.remove(worker)
        self._selector.unregister(worker)
        worker.kill()
        self._guard.tell("-", worker.pid)
        self._dying.append(worker)

    def _kill_all(self) -> None:
        for worker in list(self._workers):
            self._remove(worker)
        for process in self._dying:
            process.wait(5.0)
        self._guard.close()


def _outcome(call: RewardCall, message: dict[str, Any]) -> Outcome:
    """Reads a worker's answer without trusting its form: a user's function may have written it."""
    try:
        seconds = float(message["seconds"])
        if "error" in message:
            detail = str(message.get("detail", ""))
            return Outcome(failure="error", message=str(message["error"]), detail=detail, seconds=seconds, retried=call.fresh)
        if "mistake" in message:
            return Outcome(failure="mistake", message=str(message["mistake"]), sample=int(message["sample"]), seconds=seconds)
        scores = tuple(
            (float(value), {str(name): float(part) for name, part in parts.items()}, None if answer is None else str(answer))
            for value, parts, answer in message["scores"]
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BadMessage("not an answer") from error
    if len(scores) != len(call.request.texts) or not all(math.isfinite(value) for value, *_ in scores):
        raise BadMessage("not one finite score for each sample")
    return Outcome(scores, seconds=seconds, retried=call.fresh)
