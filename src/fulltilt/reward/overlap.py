"""Calls of asynchronous functions: many in flight at once, in one process with one event loop.

Enters: a process that has loaded the functions, and the queue of their calls. Each call leaves through `end` with its `CallOutcome`, in the
order in which they end. Guaranteed: at most `limit` calls are in flight. A call's deadline counts from the moment the process begins it. At
the deadline, the process cancels the call and continues. If the call ignores that for `grace_s`, the process is replaced once the other
calls have ended; if the call blocks the event loop, the process is replaced at once, and the other calls are handed out again. If several
calls may be the reason why a process ended, or does not answer, each of them is tried again alone: no call pays for another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile

from fulltilt.reward.calls import CallQueue, RewardCall
from fulltilt.reward.process import FORGED, CallOutcome, ProcessLost, WorkerProcess, late

LOOK_S = 0.05  # how often new calls are looked for while others are in flight


@dataclass(frozen=True)
class CallInFlight:
    call: RewardCall
    begun: float | None = None  # when the process began it

    def again(self, *, alone: bool) -> RewardCall:
        return replace(self.call, alone=alone, repeats=self.call.repeats + 1) if self.begun or alone else self.call


class Overlap:
    def __init__(
        self,
        process: WorkerProcess,
        queue: CallQueue,
        limit: int,
        timeout_s: float,
        grace_s: float,
        end: Callable[[RewardCall, CallOutcome], None],
    ) -> None:
        self._process = process
        self._queue = queue
        self._limit = limit
        self._timeout_s = timeout_s
        self._patience_s = timeout_s + 2 * grace_s  # how long to wait for a call: by then the process should have reported its timeout
        self._end = end
        self._flying: dict[int, CallInFlight] = {}  # by the request's id
        self._heard = 0.0  # when the process last got calls or began one: it should begin waiting calls soon after
        self._draining = False  # whether the process gets no more calls

    def run(self) -> None:
        """Serve calls until the process must be replaced, or the queue is closed."""
        try:
            while self._send() or self._flying:
                if not self._receive():
                    return
        except ProcessLost as lost:
            did, wrote = lost.args
            self._blame(CallOutcome(failure="crash", message=did, detail=wrote))
        except TimeoutError:
            self._blame(late(self._timeout_s))

    def _send(self) -> bool:
        calls = [] if self._draining else self._queue.take(self._count, wait=not self._flying)
        self._flying |= {call.request.id: CallInFlight(call) for call in calls}
        if calls:
            self._heard = time.monotonic()
            self._process.give([call.request for call in calls], self._patience_s)
        return bool(calls)

    def _count(self, ready: Sequence[RewardCall]) -> int:
        """Return how many of the ready calls may begin now."""
        if any(flight.call.alone for flight in self._flying.values()):
            return 0
        if ready[0].alone:
            return 0 if self._flying else 1
        return sum(1 for _ in takewhile(lambda call: not call.alone, islice(ready, self._limit - len(self._flying))))

    def _receive(self) -> bool:
        """Wait for a call to begin or end; only briefly if more calls could be given. Returns False if the process must be killed. Raises
        TimeoutError if it does not answer."""
        due = min(flight.begun or self._heard for flight in self._flying.values()) + self._patience_s - time.monotonic()
        look = due > LOOK_S and len(self._flying) < self._limit
        try:
            event = self._process.event(LOOK_S if look else max(0.001, due))
        except TimeoutError:
            if look:
                return True
            raise
        if isinstance(event, int):
            self._begin(event)
            return True
        return self._finish(event)

    def _begin(self, request: int) -> None:
        flight = self._flying.get(request)
        if flight is None or flight.begun:
            raise ProcessLost(*FORGED)
        self._heard = time.monotonic()
        self._flying[request] = replace(flight, begun=self._heard)

    def _finish(self, outcome: CallOutcome) -> bool:
        """Handle the end of a call. Returns whether the process continues."""
        flight = self._flying.pop(outcome.id, None)
        if flight is None or not outcome.answers(flight.call.request):
            raise ProcessLost(*FORGED)
        self._process.used = True
        self._draining |= outcome.ends_process
        if outcome.try_again:
            self._queue.put_back([flight.again(alone=True)])
        else:
            self._end(flight.call, outcome)
        if not (outcome.blocks and outcome.ends_process):
            return True
        # The other calls are not to blame: they are tried together once more, and alone only if that happens to them again.
        self._queue.put_back([other.again(alone=other.call.repeats > 0) for other in self._flying.values()])
        return False

    def _blame(self, outcome: CallOutcome) -> None:
        """Handle a process that has ended or hangs. The calls that it has begun may be the cause or, if there are none, all calls."""
        begun = [flight for flight in self._flying.values() if flight.begun]
        suspects = begun or list(self._flying.values())
        self._queue.put_back([flight.call for flight in self._flying.values() if flight not in suspects])
        certain = len(suspects) == 1 and (suspects[0].call.alone or begun)
        if certain and (outcome.failure == "timeout" or not self._process.used):
            self._end(suspects[0].call, outcome)
        else:
            self._queue.put_back([flight.again(alone=True) for flight in suspects])
