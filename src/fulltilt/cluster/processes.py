"""Workers as processes, one for each order, on this machine or wherever `launch` starts them.

Enters: orders, from each of which a process makes its worker, and calls. Leaves: items and results, or the first failure. Guaranteed:

- Every wait is watched. A worker that dies is named with the signal or exit code and its last output; one that sends nothing for `stall_s`
  seconds is reported once per call with the stacks of all workers; after `deadline_s` seconds it counts as stuck, which is a failure. After
  `hurry`, so does a worker that for `HURRY_S` seconds has neither sent nor computed anything, nor waited for a disk. A call that is long
  without a result, such as one that loads or saves, sends signs of progress (`alive`). A worker that waits in a collective operation for
  another that makes progress is not silent. The driver waits for the stacks of all workers at once, and for the ends of all processes at
  once.
- The first failure ends all workers, for the others may wait for the one that failed. Errors of torch.distributed are often only a
  consequence: another cause that arrives within a moment is raised in their place.
- An exception that interrupts the driver at any moment, such as that of Ctrl-C, neither loses nor mixes up messages: threads that no signal
  reaches send and receive whole messages.
- `close` leaves no process, thread, descriptor or file. No worker outlives the driver, or the driver's thread that made the workers.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import socket
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeAlias

from fulltilt.cluster.child import REAP_S, Child, ChildProcess, stacks_of, start_child, wait_for_ends
from fulltilt.cluster.hosts import WorkerDied, WorkerError, WorkerStuck, WorkerTraceback, no_results
from fulltilt.cluster.serve import STALL_S
from fulltilt.cluster.stacks import Whereabouts, frames_of_calls, report
from fulltilt.cluster.wire import (
    Cancel,
    Connection,
    Failure,
    Hello,
    Item,
    KeepOutput,
    Leave,
    Result,
    Start,
    Tell,
    Warned,
    pack,
    pickled_once,
)
from fulltilt.records import RunWarning, UserError
from fulltilt.words import joined

LOOK_S = 0.25  # how often a wait checks for silence, and for deaths that the socket does not show
CAUSE_S = 1.0  # how long the cause of an error of torch.distributed may take to arrive
LEAVE_S = 1.0  # how long workers may take to end on request
HURRY_S = 15.0  # after Ctrl-C, seconds in which a worker may be idle before it counts as stuck
STACK_S = 1.0  # how long workers may take to write their stacks
MOST_NAMED = 4  # the most workers that a warning lists by number

Envelope: TypeAlias = "tuple[list[memoryview], ProcessCall | None]"  # a packed message, and the call that waits until it is sent


def print_stall(text: str) -> None:
    print(text, file=sys.stderr)


def warn_user(text: str) -> None:
    warnings.warn(text, RunWarning, stacklevel=2)


@dataclass(eq=False)
class WorkerPeer:
    """The driver's view of one worker."""

    rank: int
    process: ChildProcess
    connection: Connection
    outbox: SimpleQueue[Envelope | None] = field(default_factory=SimpleQueue)  # None: nothing more will be sent
    greeted: bool = False  # whether the process has said hello; a signal for its stacks would end it before
    label: str = ""  # the worker's only role, if it has just one
    warned: SimpleQueue[str] = field(default_factory=SimpleQueue)  # warnings that the user has not been shown

    @property
    def name(self) -> str:
        return f"worker {self.rank} ({', '.join(filter(None, [self.label, self.process.place]))})"


@dataclass(frozen=True)
class ShownStacks:
    texts: Mapping[int, str]  # by rank, for workers that have written their stacks
    unreachable: Collection[int] = ()  # ranks of workers whose machine does not answer


class Launcher(Protocol):
    """Starts the processes of workers, and keeps track of them."""

    def launch(self, ranks: Sequence[int], environment: Mapping[str, str]) -> Iterable[WorkerPeer]:
        """Start the workers of these ranks, with these variables in addition to those of their machines."""

    def wait(self, seconds: float) -> None:
        """Wait until all processes have ended, or for about this many seconds."""

    def stacks(self, ranks: Sequence[int], seconds: float) -> ShownStacks:
        """Return the stacks that these workers, which have greeted, write within this time."""


class LauncherHere:
    """Starts processes on this machine."""

    def __init__(self) -> None:
        self._children: dict[int, Child] = {}

    def launch(self, ranks: Sequence[int], environment: Mapping[str, str]) -> Iterator[WorkerPeer]:
        for rank in ranks:
            with contextlib.ExitStack() as on_failure:
                ours, theirs = map(on_failure.enter_context, socket.socketpair())
                child = self._children[rank] = start_child(rank, environment, theirs)
                on_failure.pop_all()
                yield WorkerPeer(rank, child, Connection(ours))

    def wait(self, seconds: float) -> None:
        wait_for_ends(self._children.values(), seconds)

    def stacks(self, ranks: Sequence[int], seconds: float) -> ShownStacks:
        return ShownStacks(stacks_of({rank: self._children[rank] for rank in ranks}, seconds))


class ProcessCall:
    """A call of some or all workers. The threads that receive messages fill it; the driver's threads wait for it."""

    def __init__(self, host: Processes, number: int, method: str, what: str, called: Sequence[bool], *, together: bool = False) -> None:
        self._host = host
        self.number = number
        self.makes = number == 0  # whether this call makes the workers
        self.name = what if what == method else f"{what} ({method})"
        self.what = what
        self.called = called
        self.together = together
        self.answered = [not each for each in called]
        self.sent = list(self.answered)
        self.silent_s = [0.0] * host.size  # seconds that the driver has waited for each worker without hearing from it
        self.waited_s = 0.0  # seconds waited since the driver last looked at all workers, not yet in `silent_s`
        self.idle_s = [0.0] * host.size  # seconds of silence in which the worker was idle; counted after `hurry`
        self.reported = [False] * host.size  # whether the worker's silence was reported
        self.news: SimpleQueue[None] = SimpleQueue()  # wakes the thread that waits; the other fields say what is new
        self.cancelled = False
        self._began, self.seconds = time.monotonic(), 0.0
        self._items: deque[tuple[int, Any]] = deque()
        self._results: list[Any] = [None] * host.size

    def items(self) -> Iterator[tuple[int, Any]]:
        try:
            while self._wait_for_item():
                yield self._items.popleft()
        except BaseException:
            self.cancel()
            raise

    def results(self) -> list[Any]:
        while self._wait_for_item():
            self._items.popleft()
        return self._results

    def tell(self, rank: int, message: Any) -> None:
        if not self.answered[rank]:
            self._host.send(rank, Tell(self.number, message))

    def cancel(self) -> None:
        if not self.cancelled and not all(self.answered):
            if not self.together:  # a worker that stops early would leave the others waiting for it
                self._host.send_all(Cancel(self.number))
            self.cancelled = True
            self._items.clear()

    def _wait_for_item(self) -> bool:
        """Wait for an item, or until all workers have returned. Returns whether there is an item."""
        if self.cancelled:
            raise no_results(self.what)
        self._host.wait(self, lambda: bool(self._items) or all(self.answered))
        return bool(self._items)

    # -- called by the threads that send and receive ----------------------------------------------------------------------------------

    def add_item(self, rank: int, item: Any) -> None:
        self.silent_s[rank] = self.idle_s[rank] = 0.0
        if not self.cancelled:
            self._items.append((rank, item))
        self.news.put(None)

    def add_result(self, rank: int, result: Any) -> None:
        self._results[rank] = result
        self.seconds = time.monotonic() - self._began
        self.answered[rank] = True
        self.news.put(None)

    def mark_sent(self, rank: int) -> None:
        self.sent[rank] = True
        self.news.put(None)


@dataclass(frozen=True)
class Breakdown:
    error: UserError | WorkerError
    of_collective: bool = False  # whether a collective raised it, perhaps only because another worker failed


class Processes:
    worker = None  # no worker is in this process
    on_warning: Callable[[str], None] = staticmethod(warn_user)  # called once with each warning of workers
    _shown: frozenset[str] = frozenset()  # warnings that were already shown

    def __init__(
        self, orders: Sequence[Any], make: str, *, common: Sequence[Any] = (), what: str = "loading",
        environment: Mapping[str, str] | None = None, launcher: Launcher | None = None, on_stall: Callable[[str], None] = print_stall,
        stall_s: float = 45.0, deadline_s: float = 1800.0, kept: Any = None, labels: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Start one process per order and have each make its worker. `make`: a "package.module:function" that takes the order; if `common`
        is given, its object for this worker comes first, and an object for many workers is pickled once. Items that `make` yields show that
        it makes progress. `environment`: variables in addition to those of this process. `launcher`: starts the processes, by default on
        this machine. `on_stall`: called with each report of silence. `kept`: must exist as long as this object. `labels`: what messages
        call each worker, beside its number."""
        self.size = len(orders)
        self.on_stall, self.stall_s, self.deadline_s = on_stall, stall_s, deadline_s
        self.hurried = False
        self._kept = kept
        self._numbers = itertools.count()
        self._calls: dict[int, ProcessCall] = {}  # calls that some worker has not answered yet, in the order in which they were started
        self._breakdowns: list[Breakdown] = []
        self._closing = False
        self._launcher = launcher or LauncherHere()
        self._peers: list[WorkerPeer] = []
        self._threads: list[threading.Thread] = []
        atexit.register(self.close)
        try:
            for peer in self._launcher.launch(range(self.size), {STALL_S: str(stall_s), **(environment or {})}):
                self._peers.append(peer)
                peer.label = labels[peer.rank] if labels else ""
            for peer in self._peers:
                for target in (self._receive, self._send):
                    thread = threading.Thread(target=target, args=(peer,), name=f"worker-{peer.rank}", daemon=True)
                    thread.start()
                    self._threads.append(thread)
            # An order is unpickled where the worker is made: that imports what the order names, which may take long.
            once = pickled_once()
            made_from = [tuple(map(once, each)) for each in zip(*filter(len, (common, orders)), strict=True)]
            self.start(make, made_from, what=what).results()
        except BaseException:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        """Whether the workers have been ended, perhaps because one has failed."""
        return self._closing or bool(self._breakdowns)

    @property
    def pids(self) -> list[int]:
        return [peer.process.pid for peer in self._peers]

    @property
    def sent_bytes(self) -> int:
        return sum(peer.connection.sent_bytes for peer in self._peers)

    @property
    def received_bytes(self) -> int:
        return sum(peer.connection.received_bytes for peer in self._peers)

    def start(
        self, method: str, args: Sequence[tuple[Any, ...] | None], *, what: str, aside: bool = False, together: bool = False
    ) -> ProcessCall:
        assert len(args) == self.size
        call = ProcessCall(self, next(self._numbers), method, what, [own is not None for own in args], together=together)
        messages: list[Envelope | None] = [
            (pack(Start(call.number, method, own, aside)), call) if own is not None else None for own in args
        ]
        try:
            self._post(messages)
            self.wait(call, lambda: all(call.sent))  # until then the caller must not change its arrays
        except BaseException:
            call.cancel()
            raise
        return call

    def send(self, rank: int, message: Any) -> None:
        self._peers[rank].outbox.put((pack(message, copy=True), None))

    def send_all(self, message: Any) -> None:
        self._post([(pack(message, copy=True), None)] * len(self._peers))  # fewer than wanted, where starting them failed

    def _post(self, messages: Sequence[Envelope | None]) -> None:
        """Put each worker's message, if any, into its outbox. One call of C does it, which neither a signal nor another thread divides, so
        that every worker gets all calls in the same order."""
        boxes = [peer.outbox for peer, message in zip(self._peers, messages, strict=True) if message]
        deque(map(SimpleQueue.put, boxes, filter(None, messages)), maxlen=0)

    def wait(self, call: ProcessCall, ready: Callable[[], bool]) -> None:
        """Wait until the call is ready, or raise the first failure of any worker."""
        while not ready():
            self._raise_breakdown()
            if self._closing:
                raise RuntimeError(f"{call.what}: the workers were closed")
            began, interval_s = time.monotonic(), min(LOOK_S, self.stall_s / 2)
            with contextlib.suppress(Empty):
                call.news.get(timeout=interval_s)
            call.waited_s += time.monotonic() - began
            if call.waited_s >= interval_s:  # not at every message: with a thousand workers, each message would cost a look at all
                self._look_at_all(call)
        if all(all(each.answered) for each in [call, *list(self._calls.values())]):  # by then every worker has sent its warnings
            self._show_warnings()

    def _look_at_all(self, call: ProcessCall) -> None:
        waited_s, call.waited_s = call.waited_s, 0.0
        for rank, answered in enumerate(call.answered):
            if not answered:
                call.silent_s[rank] += waited_s
                if self.hurried:
                    call.idle_s[rank] = 0.0 if self._peers[rank].process.is_active() else call.idle_s[rank] + waited_s
        self._look_for_deaths()
        self._look_for_silence(call)

    def keep_output(self, folder: Path) -> None:
        for peer in self._peers:
            self.send(peer.rank, KeepOutput(str(folder.absolute() / f"{peer.rank}.log")))

    def hurry(self) -> None:
        self.hurried = True

    def close(self) -> None:
        """End all workers, and kill those that do not leave within a second. May be called again, also after an interruption."""
        try:
            if not self._closing and not self._breakdowns:
                self._closing = True
                self._ask_to_leave()
        finally:
            self._closing = True
            self._clear_away()

    # -- the end ----------------------------------------------------------------------------------------------------------------------

    def _ask_to_leave(self) -> None:
        self.send_all(Leave())
        self._launcher.wait(LEAVE_S)

    def _clear_away(self) -> None:
        for peer in self._peers:
            peer.process.kill()
            peer.connection.shut()
            peer.outbox.put(None)
        self._launcher.wait(REAP_S)
        deadline = time.monotonic() + REAP_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        for peer in self._peers:
            peer.connection.close()
            peer.process.close()
        for call in list(self._calls.values()):
            call.news.put(None)
        self._kept = None
        atexit.unregister(self.close)

    # -- messages, each in a thread of its own per worker -----------------------------------------------------------------------------

    def _send(self, peer: WorkerPeer) -> None:
        while packed := peer.outbox.get():
            parts, call = packed
            if call:  # not in `start`, which may be interrupted before the call is on its way
                self._calls[call.number] = call
            try:
                peer.connection.send(parts)
            except OSError:  # the thread that receives notices the death
                return
            if call:
                call.mark_sent(peer.rank)

    def _receive(self, peer: WorkerPeer) -> None:
        while True:
            try:
                self._take(peer, peer.connection.receive())
            except (EOFError, OSError):
                break
            except Exception as error:
                text = f"{peer.name} has sent a message that cannot be read: {type(error).__name__}: {error}"
                self._break_down(Breakdown(WorkerError(text)))
        if not self._closing:
            self._break_down(Breakdown(self._death_of(peer)))

    def _take(self, peer: WorkerPeer, message: Any) -> None:
        match message:
            case Item(number, item):
                self._calls[number].add_item(peer.rank, item)
            case Result(number, result):
                call = self._calls[number]
                call.add_result(peer.rank, result)
                if all(call.answered):
                    self._calls.pop(number, None)
            case Failure():
                self._break_down(self._breakdown_of(peer, message))
            case Warned(text):
                peer.warned.put(text)
            case Hello():
                peer.greeted = True

    # -- failures -----------------------------------------------------------------------------------------------------------------------

    def _break_down(self, breakdown: Breakdown) -> None:
        self._breakdowns.append(breakdown)
        for call in list(self._calls.values()):
            call.news.put(None)

    def _breakdown_of(self, peer: WorkerPeer, failure: Failure) -> Breakdown:
        if failure.is_user_error:
            error = UserError(failure.text)
            error.__cause__ = WorkerTraceback(failure.traceback)
            return Breakdown(error)
        during = self._calls[failure.call].name if failure.call is not None else "reading a message"
        text = f"{peer.name} failed in {during}: {failure.text}"
        return Breakdown(WorkerError(text, failure.traceback), failure.of_collective)

    def _death_of(self, peer: WorkerPeer) -> WorkerDied:
        """Describe how a worker died. Called in any thread when its socket has ended."""
        during = self._current(peer.rank)
        found = peer.process.obituary()
        hint = f". {found.hint}" if found.hint else ""
        last = f". Its last output:\n{found.output}" if found.output else ""
        return WorkerDied(f"{peer.name} {found.how}{f' during {during}' if during else ''}{hint}{last}")

    def _raise_breakdown(self) -> None:
        if not self._breakdowns:
            return
        deadline = time.monotonic() + (0.0 if self._closing else CAUSE_S)
        while all(each.of_collective for each in self._breakdowns) and time.monotonic() < deadline:
            time.sleep(0.01)
        found = next((each for each in self._breakdowns if not each.of_collective), self._breakdowns[0])
        self._show_warnings()
        self.close()
        raise found.error.with_traceback(None)

    def _look_for_deaths(self) -> None:
        """Shut the connections of workers that have ended. Their sockets stay open if processes that they started hold them."""
        for peer in self._peers:
            if peer.process.ended():
                peer.connection.shut()

    # -- warnings -----------------------------------------------------------------------------------------------------------------------

    def _show_warnings(self) -> None:
        """Show the warnings that workers have sent since the last time, naming the workers unless all have sent the same."""
        said: dict[str, list[int]] = {}
        for peer in self._peers:
            with contextlib.suppress(Empty):
                while True:
                    said.setdefault(peer.warned.get_nowait(), []).append(peer.rank)
        for text, ranks in said.items():
            if text not in self._shown:
                self._shown |= {text}
                self.on_warning(f"{self._whose(sorted({*ranks}))}{text}")

    def _whose(self, ranks: Sequence[int]) -> str:
        if len(ranks) == self.size:
            return ""
        if len(ranks) > MOST_NAMED:
            return f"{len(ranks)} of {self.size} workers: "
        return f"{'worker' if len(ranks) == 1 else 'workers'} {joined([str(rank) for rank in ranks], 'and')}: "

    # -- silence ------------------------------------------------------------------------------------------------------------------------

    def _look_for_silence(self, call: ProcessCall) -> None:
        pending = [rank for rank, answered in enumerate(call.answered) if not answered]
        late = [rank for rank in pending if call.silent_s[rank] > self.stall_s and not call.reported[rank]]
        if not late and not self._stuck(call):
            return
        everyone = self._whereabouts(call)
        in_collective = [rank for rank in pending if everyone[rank].collective]
        if len(in_collective) < len(pending):
            for rank in in_collective:  # a worker outside of the collective is the cause
                call.idle_s[rank] = 0.0
                if not any(call.silent_s[other] > self.stall_s for other in pending if other not in in_collective):
                    call.silent_s[rank] = 0.0
        waiting = [rank for rank in pending if everyone[rank].waits_for_driver]
        if len(waiting) < len(pending):  # the driver will have messages for these when another worker has made progress
            for rank in waiting:
                call.silent_s[rank] = call.idle_s[rank] = 0.0
        if stuck := self._stuck(call):
            self._break_down(Breakdown(WorkerStuck(f"{self._report(call, stuck, everyone)}\nThe workers were ended")))
        elif late := [rank for rank in late if call.silent_s[rank]]:
            for rank in late:
                call.reported[rank] = True
            self.on_stall(self._report(call, late, everyone))

    def _stuck(self, call: ProcessCall) -> list[int]:
        """Return the workers to give up on."""
        pending = (rank for rank, answered in enumerate(call.answered) if not answered)
        return [rank for rank in pending if call.silent_s[rank] > self.deadline_s or call.idle_s[rank] > HURRY_S]

    def _report(self, call: ProcessCall, silent: Sequence[int], everyone: Sequence[Whereabouts]) -> str:
        seconds = min(call.silent_s[rank] for rank in silent)
        return report([self._peers[rank].name for rank in silent], seconds, call.what, everyone, loading=call.makes)

    def _current(self, rank: int) -> str | None:
        """Return the call that the worker has to answer next."""
        return next((call.name for call in list(self._calls.values()) if not call.answered[rank]), None)

    def _whereabouts(self, call: ProcessCall) -> list[Whereabouts]:
        shown = self._launcher.stacks([peer.rank for peer in self._peers if peer.greeted], STACK_S)
        found = []
        for peer in self._peers:
            frames = frames_of_calls(shown.texts.get(peer.rank, ""))
            why = "is on a machine that does not answer" if peer.rank in shown.unreachable else "has shown no stack"
            problem = "" if frames else why if peer.greeted else "still starts"
            found.append(Whereabouts(peer.name, self._current(peer.rank), frames, problem, call.called[peer.rank]))
        return found
