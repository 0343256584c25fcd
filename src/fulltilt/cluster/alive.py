"""Signs of life of a worker whose call is long without a result, such as one that loads models or writes a checkpoint.

Enters: the inbox of the call, and a number that grows with its work. Leaves: None as an item for the driver, at intervals, as long as that
number has grown since the last look. Guaranteed: a call that hangs sends none, so that it is reported and ended; where the driver runs in
the same process, no thread is started and nothing is sent.
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

PAGES = 16  # brought into memory between two looks: a process that only waits touches a new page now and then
LARGE_PAGE = 2**21  # bytes
MOVED_BYTES = 2**16  # read and written between two looks
SYSTEM_S = 0.02  # processor time of the system between two looks: a single call may write for minutes
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Signs:
    """Sends signs of life, but no more often than the driver needs them."""

    def __init__(self, send: Callable[[None], None], interval_s: float) -> None:
        self._send, self._interval_s, self._sent = send, interval_s, time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._sent >= self._interval_s:
            self._sent = time.monotonic()
            self._send(None)


def no_signs() -> None:
    """Send nothing, where nobody waits for signs."""


def signs_for(inbox: Inbox | None) -> Callable[[], None]:
    """Return a function that may send a sign. Call it after each piece of work, however small."""
    return no_signs if inbox is None or inbox.sign_s is None else Signs(inbox.send, inbox.sign_s)


@contextlib.contextmanager
def signs_of_progress(inbox: Inbox | None, work: Callable[[], float]) -> Iterator[None]:
    """Send signs from a thread while work progresses. `work`: returns a number that grows; growth by 1 is enough for a sign."""
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
    """Counts what this process has brought into its memory: read from files, as modules and weights are, or newly filled.

    The kernel brings in 64 KiB of a cached file with one fault, or 2 MiB where its cache has pages of that size. So a worker that reads a
    few megabytes a second would seem dead by faults alone; its resident memory grows with every fault.
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
    except OSError:  # not on Linux: only faults count
        return 0


class Written:
    """Counts what the thread that makes this object has read, written and brought into memory. Computing does not count: waiting may look
    the same."""

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
        """Return the bytes of read and write calls, whatever became of them. Not every system counts them."""
        try:
            counts = dict(line.split(": ") for line in (self._thread / "io").read_text().splitlines())
        except OSError:
            return 0
        return int(counts["rchar"]) + int(counts["wchar"])
