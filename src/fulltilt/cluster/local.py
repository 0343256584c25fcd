"""One worker in this process: a call runs inline, in the thread that reads it.

Enters: the worker's object. Leaves: the very objects that its methods yield and return. Guaranteed: nothing is copied and no thread is
started; a method begins when its items or its results are asked for, and its exceptions are raised there unchanged; `breakpoint()` works.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fulltilt.cluster.hosts import no_results, produced


class Local:
    size = 1
    sent_bytes = received_bytes = 0

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def start(
        self, method: str, args: Sequence[tuple[Any, ...] | None], *, what: str, aside: bool = False, together: bool = False
    ) -> LocalCall:
        (own,) = args
        assert own is not None
        return LocalCall(self.worker, method, own, what)

    def keep_output(self, folder: Path) -> None:
        """Do nothing: the worker's output is that of this process."""

    def hurry(self) -> None:
        """Do nothing: the signal has already interrupted the worker."""

    def close(self) -> None:
        pass


class LocalInbox:
    """Messages of the driver. It cannot send any while the method runs in its thread, so `wait` does not wait."""

    sign_s = None

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.sent: list[Any] = []

    def poll(self) -> list[Any]:
        found, self.messages = self.messages, []
        return found

    def wait(self, timeout: float | None = None) -> list[Any]:
        return self.poll()

    def send(self, item: Any) -> None:
        self.sent.append(item)


class LocalCall:
    def __init__(self, worker: Any, method: str, args: tuple[Any, ...], what: str) -> None:
        self._inbox = LocalInbox()
        self._running = produced(getattr(worker, method), args, self._inbox)
        self._what = what
        self._began, self.seconds = time.monotonic(), 0.0
        self._results: list[Any] | None = None
        self._over = False

    def items(self) -> Iterator[tuple[int, Any]]:
        if self._results is not None:
            return
        if self._over:
            raise no_results(self._what)
        try:
            while True:
                item = next(self._running)
                sent, self._inbox.sent = self._inbox.sent, []
                yield from ((0, each) for each in (*sent, item))
        except StopIteration as end:
            self._results = [end.value]
            self.seconds = time.monotonic() - self._began
        finally:
            self.cancel()

    def tell(self, rank: int, message: Any) -> None:
        assert rank == 0
        self._inbox.messages.append(message)

    def results(self) -> list[Any]:
        for _ in self.items():
            pass
        assert self._results is not None
        return self._results

    def cancel(self) -> None:
        self._over = True
        self._running.close()
