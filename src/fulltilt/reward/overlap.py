"""Calls of asynchronous functions: many in flight at once, in one process with one event loop.

Enters: a process that has loaded the functions, and the queue of their calls. Each call leaves through `end` with its `Outcome`, in the
order in which they end. Guaranteed: at most `limit` calls are in flight. A call past its deadline is cancelled in the process, which
continues; if it ignores that for `GRACE_S`, the process is killed, and the others' calls are handed out again. Where several calls may be
the cause of a process's end, or of its not answering, each of them is tried again alone: what one call does is not held against another.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile

from fulltilt.reward.calls import CallQueue, RewardCall
from fulltilt.reward.process import FORGED, Outcome, ProcessLost, WorkerProcess, late

GRACE_S = 5.0  # from the deadline until a call that was cancelled must have ended
LOOK_S = 0.05  # how often new calls are looked for while others are in flight


@dataclass(frozen=True)
class CallInFlight:
    call: RewardCall
    deadline: float


class Overlap:
    def __init__(
        self, process: WorkerProcess, queue: CallQueue, limit: int, timeout_s: float, end: Callable[[RewardCall, Outcome], None]
    ) -> None:
        self._process = process
        self._queue = queue
        self._limit = limit
        self._timeout_s = timeout_s
        self._end = end
        self._flying: dict[int, CallInFlight] = {}  # by the request's id
        self._draining = False  # no more calls for this process

    def run(self) -> None:
        """Returns when the process must be replaced, or the queue is closed."""
        try:
            while self._send() or self._flying:
                if not self._receive():
                    return
        except ProcessLost as lost:
            self._lost(*lost.args)
        except TimeoutError:  # it takes no more calls
            self._blame(list(self._flying.values()))

    def _send(self) -> bool:
        calls = [] if self._draining else self._queue.take(self._count, wait=not self._flying)
        deadline = time.monotonic() + self._timeout_s + GRACE_S
        self._flying |= {call.request.id: CallInFlight(call, deadline) for call in calls}
        if calls:
            self._process.give([call.request for call in calls], self._timeout_s + GRACE_S)
        return bool(calls)

    def _count(self, ready: Sequence[RewardCall]) -> int:
        """How many of the calls that are ready may begin now."""
        if any(flight.call.alone for flight in self._flying.values()):
            return 0
        if ready[0].alone:
            return 0 if self._flying else 1
        return sum(1 for _ in takewhile(lambda call: not call.alone, islice(ready, self._limit - len(self._flying))))

    def _receive(self) -> bool:
        """Waits for an answer, a while if more calls could be given. False: the process does not answer and must be killed."""
        due = min(flight.deadline for flight in self._flying.values()) - time.monotonic()
        try:
            outcome = self._process.outcome(max(0.001, min(due, LOOK_S if len(self._flying) < self._limit else math.inf)))
        except TimeoutError:
            return not self._give_up()
        flight = self._flying.pop(outcome.id, None)
        if flight is None or not outcome.answers(flight.call.request):
            raise ProcessLost(*FORGED)
        self._process.used = True
        self._draining |= outcome.ends_process
        if outcome.try_again:
            self._again_alone([flight])
        else:
            self._end(flight.call, outcome)
        return True

    def _give_up(self) -> bool:
        """Whether calls have ignored that they were cancelled, or the event loop is blocked."""
        now = time.monotonic()
        overdue = [flight for flight in self._flying.values() if flight.deadline <= now]
        if not overdue:
            return False
        self._queue.put_back([flight.call for flight in self._flying.values() if flight.deadline > now])
        self._blame(overdue)
        return True

    def _blame(self, overdue: Sequence[CallInFlight]) -> None:
        if len(overdue) == 1:
            self._end(overdue[0].call, late(self._timeout_s))
        else:
            self._again_alone(overdue)

    def _lost(self, did: str, wrote: str) -> None:
        flights = list(self._flying.values())
        if len(flights) == 1 and not self._process.used:
            self._end(flights[0].call, Outcome(failure="crash", message=did, detail=wrote))
        else:
            self._again_alone(flights)

    def _again_alone(self, flights: Sequence[CallInFlight]) -> None:
        self._queue.put_back([replace(flight.call, alone=True, repeats=flight.call.repeats + 1) for flight in flights])
