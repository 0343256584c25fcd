"""One thread that hands calls to worker processes and holds them to their deadlines.

Calls enter by `put`, from any thread; each leaves exactly once through `done`, called on the dispatcher's thread, with an `Outcome`.
Guaranteed:
- nothing waits without a deadline: a call has `timeout_s` from the moment its worker begins it, a worker has `LOAD_S` to load;
- past its deadline a call is killed with everything it started; a crash loses only the call that was running, the worker's other calls
  are handed out again;
- a call that kills a process in which others had run before, or runs out of memory there, is tried once more in a fresh one: its
  outcome is its own, not its predecessors';
- a process that cannot be started, three times in a row with none alive, is an error that says why.
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
from fulltilt.reward import wire
from fulltilt.reward.functions import Scored
from fulltilt.reward.process import Guard, WorkerProcess
from fulltilt.reward.worker import Request, Setup

LOAD_S = 120.0
START_TRIES = 3
MOST_CALLS_AT_ONCE = 32
HANDOUT_S = 0.02  # work handed out at once, by the mean time of a call so far: less and the thread is busy, more and cores idle at the end

Failure = Literal["error", "timeout", "crash", "mistake"]


@dataclass(frozen=True)
class Outcome:
    """How a call ended: scores in the order of its samples, or a failure and what happened, in words that follow the function's name."""

    scores: tuple[Scored, ...] = ()
    failure: Failure | None = None
    message: str = ""
    detail: str = ""
    sample: int = 0  # which of the call's samples, for a mistake
    seconds: float = 0.0
    retried: bool = False


@dataclass(eq=False)
class Call:
    """A request with what only the trainer knows of it."""

    request: Request
    label: Any  # the caller's own, handed back with the outcome
    fresh: bool = False  # must run in a process that has run nothing before


class _Slot:
    """A worker process and what it is doing."""

    def __init__(self, process: WorkerProcess) -> None:
        self.process = process
        self.greeted = False
        self.ready = False
        self.calls: deque[Call] = deque()
        self.finished = 0
        self.began = time.monotonic()

    @property
    def idle(self) -> bool:
        return self.ready and not self.calls


class Dispatcher:
    def __init__(
        self, setup: Setup, workers: int, timeout_s: float, done: Callable[[Call, Outcome], None], ended: Callable[[], None]
    ) -> None:
        """`done` and `ended` are called on the dispatcher's thread: a call has ended; the thread itself has, perhaps with `error`."""
        self._setup = pickle.dumps(setup)
        self._files = ", ".join(sorted({place.path for place in setup.functions if place.path})) or "fulltilt"
        self._size = workers
        self._timeout_s = timeout_s
        self._done = done
        self._ended = ended
        self._lock = threading.Lock()
        self._queue: deque[Call] = deque()
        self._again: deque[Call] = deque()
        self._slots: dict[int, _Slot] = {}
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

    def put(self, calls: Iterable[Call]) -> None:
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
        self._start_missing()
        self._hand_out()
        for key, _ in self._selector.select(self._patience()):
            if key.data is None:
                self._woken.recv(4096)
            else:
                self._attend(key.data)
        for slot in list(self._slots.values()):
            if slot.process.pid in self._slots and time.monotonic() > self._deadline(slot):
                self._expire(slot)
        self._dying = [process for process in self._dying if not process.reaped()]

    def _patience(self) -> float | None:
        times = [self._deadline(slot) for slot in self._slots.values()]
        if self._missing() > 0:
            times.append(self._next_start)
        soonest = min(times, default=math.inf)
        if self._dying:
            soonest = min(soonest, time.monotonic() + 0.2)
        return None if soonest == math.inf else max(0.0, soonest - time.monotonic())

    def _deadline(self, slot: _Slot) -> float:
        if not slot.ready:
            return slot.began + LOAD_S
        return slot.began + self._timeout_s if slot.calls else math.inf

    def _missing(self) -> int:
        """How many more processes there should be. A dead one is replaced only when there is work for it."""
        if not self._loaded.is_set():
            return 1 - len(self._slots)
        free = [slot for slot in self._slots.values() if not slot.calls]
        fresh = sum(slot.finished == 0 for slot in free)
        used = len(free) - fresh
        with self._lock:
            waiting = len(self._queue)
        for_again = max(0, len(self._again) - fresh)
        for_queue = max(0, waiting - used - max(0, fresh - len(self._again)))
        return min(self._size - len(self._slots), for_again + for_queue)

    def _start_missing(self) -> None:
        if time.monotonic() >= self._next_start:
            for _ in range(self._missing()):
                self._start_one()

    def _start_one(self) -> None:
        try:
            slot = _Slot(WorkerProcess(self._setup))
        except OSError as error:
            self._start_failed(RuntimeError(f"a reward process could not be started: {error}"))
            return
        self._slots[slot.process.pid] = slot
        self._guard.add(slot.process.pid)
        self._selector.register(slot.process, selectors.EVENT_READ, slot)

    def _start_failed(self, error: Exception) -> None:
        self._failed_starts += 1
        self._next_start = time.monotonic() + min(5.0, 0.1 * 2**self._failed_starts)
        if self._failed_starts >= START_TRIES and not any(slot.ready for slot in self._slots.values()):
            self.error = error

    def _hand_out(self) -> None:
        for slot in self._slots.values():
            if not slot.idle:
                continue
            slot.calls.extend(self._take(slot))
            if not slot.calls:
                continue
            slot.process.send(pickle.dumps([call.request for call in slot.calls]))
            slot.began = time.monotonic()
            self._watch(slot)

    def _take(self, slot: _Slot) -> list[Call]:
        # One fresh process is started for every call that needs one, so none of them waits in vain.
        if self._again and slot.finished == 0:
            return [self._again.popleft()]
        with self._lock:
            fair = len(self._queue) // (2 * self._size)
            quick = HANDOUT_S / self._mean_s if self._mean_s else MOST_CALLS_AT_ONCE
            count = max(1, int(min(fair, quick, MOST_CALLS_AT_ONCE)))
            return [self._queue.popleft() for _ in range(min(count, len(self._queue)))]

    def _watch(self, slot: _Slot) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if slot.process.unsent else 0)
        self._selector.modify(slot.process, events, slot)

    def _attend(self, slot: _Slot) -> None:
        """Takes in whatever the worker has said."""
        if slot.process.unsent:
            slot.process.flush()
            self._watch(slot)
        try:
            messages, connected = slot.process.receive()
            for message in messages:
                if slot.process.pid in self._slots:
                    self._understand(slot, message)
        except wire.BadMessage:
            # Only the user's function can have written this: it found the descriptor of its process.
            self._lose(slot, Outcome(failure="crash", message="wrote into the connection of its process"))
            return
        if not connected and slot.process.pid in self._slots:
            cause, said = slot.process.cause_of_death()
            self._lose(slot, Outcome(failure="crash", message=cause, detail=said))

    def _understand(self, slot: _Slot, message: dict[str, Any]) -> None:
        slot.began = time.monotonic()
        if "id" in message:
            self._answered(slot, message)
        elif "hello" in message:
            slot.greeted = True
            self.memory_limited = bool(message["memory_limited"])
        elif "ready" in message:
            slot.ready = True
            self.batch = tuple(message["ready"])
            self._failed_starts = 0
            if not self._loaded.is_set():
                self._loaded.set()
                for _ in range(self._size - len(self._slots)):
                    self._start_one()
        elif "load_error" in message:
            self.error = UserError(str(message["load_error"]))
        elif "begin" not in message:
            raise wire.BadMessage("unknown")

    def _answered(self, slot: _Slot, message: dict[str, Any]) -> None:
        if not slot.calls or message["id"] != slot.calls[0].request.id:
            raise wire.BadMessage("an answer to another call")
        outcome = _outcome(slot.calls[0], message)
        call = slot.calls.popleft()
        slot.finished += 1
        self._mean_s = outcome.seconds if self._mean_s == math.inf else 0.9 * self._mean_s + 0.1 * outcome.seconds
        if message.get("memory") and slot.finished > 1 and not call.fresh:
            self._try_again(call)
        else:
            self._done(call, outcome)
        if message.get("retire"):
            self._remove(slot)

    def _try_again(self, call: Call) -> None:
        call.fresh = True
        self._again.append(call)

    def _expire(self, slot: _Slot) -> None:
        # An answer that came while this thread was kept from running is an answer in time.
        self._attend(slot)
        if slot.process.pid not in self._slots or time.monotonic() <= self._deadline(slot):
            return
        if slot.ready:
            message = f"ran past its deadline of {self._timeout_s:g} s (reward.timeout_s)"
            self._lose(slot, Outcome(failure="timeout", message=message, seconds=self._timeout_s))
        else:
            self.error = UserError(f"the reward process did not load {self._files} within {LOAD_S:g} s")
            self._remove(slot)

    def _lose(self, slot: _Slot, outcome: Outcome) -> None:
        """The worker is gone, or must go: what it was doing has failed, what it had not begun is handed out again."""
        running = slot.calls.popleft() if slot.calls else None
        self._remove(slot)
        if running is not None:
            if outcome.failure == "crash" and slot.finished and not running.fresh:
                self._try_again(running)
            else:
                self._done(running, replace(outcome, retried=running.fresh))
        elif not slot.ready:
            said = f": {outcome.detail.strip()[-2000:]}" if outcome.detail else ""
            if slot.greeted:
                self._start_failed(UserError(f"loading {self._files} {outcome.message}{said}"))
            else:
                self._start_failed(RuntimeError(f"a reward process {outcome.message} before it could load anything{said}"))

    def _remove(self, slot: _Slot) -> None:
        with self._lock:
            self._queue.extendleft(reversed(slot.calls))
        slot.calls.clear()
        del self._slots[slot.process.pid]
        self._selector.unregister(slot.process)
        slot.process.kill()
        self._guard.remove(slot.process.pid)
        self._dying.append(slot.process)

    def _kill_all(self) -> None:
        for slot in list(self._slots.values()):
            self._remove(slot)
        for process in self._dying:
            process.wait(5.0)
        self._guard.close()


def _outcome(call: Call, message: dict[str, Any]) -> Outcome:
    """What a worker's answer says, distrusted."""
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
        raise wire.BadMessage("no answer") from error
    if len(scores) != len(call.request.texts) or not all(math.isfinite(value) for value, *_ in scores):
        raise wire.BadMessage("not one finite score for each sample")
    return Outcome(scores, seconds=seconds, retried=call.fresh)
