"""Calls that wait for a reward process.

Calls enter by `put`, from any thread, and leave by `take` in the order in which they were put, except that a call which is retried waits
first. Guaranteed: the time of this wait depends only on the call.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fulltilt.records import Group
from fulltilt.reward.worker import Request

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0


@dataclass(frozen=True, eq=False)
class RewardCall:
    """A request, and the place of its scores: a component of a group's sum, samples `first` and following."""

    request: Request
    group: Group
    component: int
    first: int
    failures: int = 0  # earlier tries that count towards reward.retries
    repeats: int = 0  # all earlier tries
    alone: bool = False  # whether no other call may run beside it, because one of several calls ended the process the last time

    def seconds_to_wait(self) -> float:
        """Return how long to wait before a retry. The time doubles with each failure; a share of it, from half to all, is used, so that
        calls which failed together do not come back together."""
        share = zlib.crc32(f"{self.request.seed}/{self.failures}".encode()) / 2**32
        return float(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0**self.failures)) * (0.5 + share / 2)


class CallQueue:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ready: deque[RewardCall] = deque()
        self._later: list[tuple[float, int, RewardCall]] = []  # a heap
        self._numbers = itertools.count()
        self._closed = False

    def put(self, calls: Sequence[RewardCall]) -> None:
        with self._changed:
            self._ready.extend(calls)
            self._changed.notify(len(calls))

    def put_back(self, calls: Sequence[RewardCall]) -> None:
        with self._changed:
            self._ready.extendleft(reversed(calls))
            self._changed.notify(len(calls))

    def put_later(self, call: RewardCall, seconds: float) -> None:
        with self._changed:
            heapq.heappush(self._later, (time.monotonic() + seconds, next(self._numbers), call))
            self._changed.notify()

    def take(self, count: Callable[[Sequence[RewardCall]], int], *, wait: bool = True) -> list[RewardCall]:
        """Return the first calls, `count` of those that are ready. Waits until there are any; returns an empty list once the queue is
        closed."""
        with self._changed:
            while not self._closed:
                while self._later and self._later[0][0] <= time.monotonic():
                    self._ready.append(heapq.heappop(self._later)[2])
                    self._changed.notify()  # this thread may leave some for others
                if self._ready or not wait:
                    break
                self._changed.wait(max(0.0, self._later[0][0] - time.monotonic()) if self._later else None)
            if self._closed or not self._ready:
                return []
            return [self._ready.popleft() for _ in range(min(count(self._ready), len(self._ready)))]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._ready)
