"""Safe handling of Ctrl-C, of a termination and of a closed terminal.

Enters: SIGINT, SIGTERM and SIGHUP, at any moment. Leaves: in a run's steps `Interrupted`, raised only where the step in progress can be
dropped; in any other part of a command `KeyboardInterrupt`, wherever Python was when Ctrl-C came. Guaranteed: torch is not imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

REPEAT_S = 0.02


class Interrupted(Exception):
    """A signal to stop, at a moment when the step in progress can be dropped."""


@contextlib.contextmanager
def interrupts_repeated() -> Iterator[None]:
    """Send Ctrl-C again if it came inside a destructor or a callback, where Python only prints an exception and continues without it."""
    before = sys.unraisablehook

    def hook(dropped: Any) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            # Sent later, because an exception raised here would be dropped as well.
            repeat = threading.Timer(REPEAT_S, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
            repeat.daemon = True
            repeat.start()
        elif not issubclass(dropped.exc_type, Interrupted):  # the end of the step raises it again
            before(dropped)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextlib.contextmanager
def hangup_restored() -> Iterator[None]:
    """Give SIGHUP its handler back at the end, also if `Interrupts` had to ignore it."""
    before = signal.getsignal(signal.SIGHUP)
    try:
        yield
    finally:
        if before is not signal.getsignal(signal.SIGHUP):  # only the main thread can change handlers
            signal.signal(signal.SIGHUP, before)


class Interrupts:
    """Turns the first signal into `Interrupted` at the next safe moment. The second ends the process as usual, but SIGHUP, which a closing
    terminal sends more than once, never counts as the second.

    From the first optimizer step of a step to the step's last line of bookkeeping, parameters belong to no step that could be saved: there
    the interrupt is delayed.
    """

    def __init__(self, on_first: Callable[[], str] = lambda: "") -> None:
        """Make a handler. `on_first` is called in the handler of the first signal, and returns what the stop has to wait for, if
        anything."""
        self._on_first = on_first
        self._wanted: int | None = None  # the first signal
        self.held = False

    @property
    def wanted(self) -> bool:
        return self._wanted is not None

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals and may set handlers
            yield
            return
        watched = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup it is ignored
            watched.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._on_signal) for number in watched}
        try:
            yield
        finally:
            for number, handler in before.items():
                # A terminal that closes sends SIGHUP more than once: while the run saves and ends, it stays ignored (`hangup_restored`).
                signal.signal(number, signal.SIG_IGN if number == self._wanted == signal.SIGHUP else handler)

    def hold(self) -> None:
        self.held = True

    def release(self) -> None:
        self.held = False
        if self._wanted:
            raise Interrupted

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._wanted and number == signal.SIGHUP:
            return
        if self._wanted:
            raise KeyboardInterrupt
        self._wanted = number
        others = self._on_first()
        when = "at the end of this step" if self.held else f"when {others}" if others else ""
        if when:
            with contextlib.suppress(OSError):  # the terminal may be gone
                # Written past every buffer: the signal may have come in the middle of another message.
                os.write(2, f"stopping {when}; Ctrl-C again stops at once, without saving\n".encode())
        if not self.held:
            raise Interrupted
