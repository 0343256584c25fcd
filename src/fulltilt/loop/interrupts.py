"""Ctrl-C, made safe.

Enters: signals, at any moment. Leaves: `Interrupted`, raised only where the step in progress can be dropped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupted(Exception):
    """Ctrl-C (or a polite termination) at a moment when the step in progress can be dropped."""


class Interrupts:
    """Turns the first Ctrl-C into `Interrupted` at the next moment where it does no harm; the second ends the process as usual.

    From the first optimizer step of a step to the step's last line of bookkeeping, parameters belong to no step that could be saved:
    there the interrupt is held back.
    """

    def __init__(self) -> None:
        self._wanted = False
        self.held = False

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():  # Python delivers signals to the main thread, and only it may ask
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def hold(self) -> None:
        self.held = True

    def release(self) -> None:
        self.held = False
        if self._wanted:
            raise Interrupted

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._wanted:
            raise KeyboardInterrupt
        self._wanted = True
        if self.held:
            # Written past every buffer: the signal may have come in the middle of another message.
            os.write(2, b"stopping at the end of this step; Ctrl-C again stops at once, without saving\n")
        else:
            raise Interrupted
