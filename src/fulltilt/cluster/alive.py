"""Signs of life of a worker whose call has nothing to tell for long, such as one that loads models or writes a checkpoint.

Enters: the inbox of the call, and what the call has done so far, as a number that only grows. Leaves: None as an item for the driver every
so often, as long as that number has grown since the last look. Guaranteed: a call that hangs sends none, so that it is reported and given
up; where the driver runs in the same process, no thread is started and nothing is sent.
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fulltilt.cluster.hosts import Inbox

PAGES = 16  # brought into memory between two looks: one that only waits touches a new one now and then
LARGE_PAGE = 2**21  # bytes
MOVED_BYTES = 2**16  # read and written between two looks
SYSTEM_S = 0.02  # processor time that the system has used between two looks: a single call may write for minutes
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Signs:
    """Sends a sign of life, but not more often than the driver needs them."""

    def __init__(self, send: Callable[[None], None], interval_s: float) -> None:
        self._send, self._interval_s, self._sent = send, interval_s, time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._sent >= self._interval_s:
            self._sent = time.monotonic()
            self._send(None)


def no_signs() -> None:
    """Where nobody waits for them."""


def signs_for(inbox: Inbox | None) -> Callable[[], None]:
    """A function to call after each piece of work, however small."""
    return no_signs if inbox is None or inbox.sign_s is None else Signs(inbox.send, inbox.sign_s)


@contextlib.contextmanager
def signs_of_progress(inbox: Inbox | None, work: Callable[[], float]) -> Iterator[None]:
    """Have a thread send a sign every so often. `work`: what has been done so far; 1 more is enough for a sign."""
    if inbox is None or inbox.sign_s is None:
        yield
        return
    over, send, interval_s = threading.Event(), inbox.send, inbox.sign_s

    def look() -> None:
        before = work()
        while not over.wait(interval_s):
            now = work()
            if now - before >= 1:
                send(None)
            before = now

    thread = threading.Thread(target=look, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()  # nothing may follow the result


class LoadedBytes:
    """What this process has brought into its memory: read from files, as modules and weights are, or filled anew.

    The kernel brings in 64 KiB of a cached file with one fault, or 2 MiB where its cache has pages of that size. So faults alone would take
    a worker for dead that reads a few megabytes a second; what is resident grows with every one of them.
    """

    def __init__(self) -> None:
        self._resident, self._grown = resident_bytes(), 0

    def __call__(self) -> float:
        now = resident_bytes()
        self._grown += max(0, now - self._resident)
        self._resident = now
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return (usage.ru_minflt + usage.ru_majflt) / PAGES + self._grown / LARGE_PAGE


def resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:  # not on Linux: faults alone count
        return 0


class Written:
    """What the thread that makes it has read, written and brought into memory. Computing does not count: waiting may look the same."""

    def __init__(self) -> None:
        self._thread, self._loaded = Path(f"/proc/self/task/{threading.get_native_id()}"), LoadedBytes()

    def __call__(self) -> float:
        try:
            fields = (self._thread / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # not on Linux: the whole process counts
            return self._loaded() + resource.getrusage(resource.RUSAGE_SELF).ru_stime / SYSTEM_S
        faults, system_s = int(fields[7]) + int(fields[9]), int(fields[12]) / TICKS_PER_S
        return faults / PAGES + system_s / SYSTEM_S + self._moved_bytes() / MOVED_BYTES

    def _moved_bytes(self) -> int:
        """By calls of the system, whatever became of them. Not every system counts them."""
        try:
            counts = dict(line.split(": ") for line in (self._thread / "io").read_text().splitlines())
        except OSError:
            return 0
        return int(counts["rchar"]) + int(counts["wchar"])
