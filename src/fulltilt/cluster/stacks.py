"""The whereabouts of workers, from the stacks that the interpreter writes on a signal: which workers wait for others, and which one does
not.

Enters: one dump of `faulthandler` per worker. Leaves: a report for people. Guaranteed: pure text, free of torch; only the frames inside
calls of the driver are looked at.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from fulltilt.words import joined

MOST_FRAMES = 6  # frames of a stack that are shown
COLLECTIVES = os.path.join("torch", "distributed") + os.sep
PACKAGE = f"{os.sep}fulltilt{os.sep}"
# Files of this package that call collectives. With NCCL the call itself returns at once, and the code that reads its result waits.
OUR_COLLECTIVES = tuple(os.path.join("fulltilt", "parallel", name) for name in ("ranks.py", "parcels.py", "sequence.py", "exchange.py"))
# A call runs inside the first of these functions, and waits for the driver inside the second.
CALLING = (os.path.join("cluster", "hosts.py"), "produced")
WAITING = (os.path.join("cluster", "serve.py"), "wait")
_FRAME = re.compile(r'^\s+File "(.+)", line (\d+) in (.+)$')


@dataclass(frozen=True)
class StackFrame:
    path: str
    line: int
    function: str

    def is_in(self, place: tuple[str, str]) -> bool:
        return self.path.endswith(place[0]) and self.function == place[1]

    @property
    def is_of_collective(self) -> bool:
        return COLLECTIVES in self.path

    def __str__(self) -> str:
        """Example: `fulltilt/training/optim.py:155 in step`."""
        folders = [folder for folder in sys.path if folder and self.path.startswith(os.path.join(folder, ""))]
        return f"{self.path[len(max(folders, key=len, default='')) :].lstrip(os.sep)}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Whereabouts:
    """One worker at one moment."""

    worker: str  # Example: worker 1 (process 4711)
    method: str | None  # the call in progress; None: there is none
    frames: tuple[StackFrame, ...]  # the innermost comes first
    problem: str = ""  # why there are no frames
    called: bool = True  # whether it takes part in the call that is waited for

    @property
    def collective(self) -> str | None:
        """The torch.distributed operation in which the worker waits. Frames further out prove nothing: FSDP's surround a whole pass."""
        inside = next((frame for frame in self.frames if PACKAGE in frame.path), None)
        waits = [frame for frame in self.frames[:1] if frame.is_of_collective] or [
            frame for frame in (inside,) if frame and frame.path.endswith(OUR_COLLECTIVES)
        ]
        return waits[0].function if waits else None

    @property
    def waits_for_driver(self) -> bool:
        return any(frame.is_in(WAITING) for frame in self.frames)

    def __str__(self) -> str:
        if self.method is None:
            return f"{self.worker}: {'has finished its part' if self.called else 'has nothing to do'}"
        state = self.problem or (f"waits in the collective operation {self.collective}" if self.collective else "")
        state = state or ("waits for messages of the driver" if self.waits_for_driver else "at work")
        return "\n".join([f"{self.worker}: {self.method}, {state}", *(f"    {frame}" for frame in self._shown())])

    def _shown(self) -> list[StackFrame]:
        """The innermost frames, and the innermost frame of this package: many frames of a model and of torch may be below it."""
        inside = [place for place, frame in enumerate(self.frames) if PACKAGE in frame.path]
        return [frame for place, frame in enumerate(self.frames) if place < MOST_FRAMES or place in inside[:1]]


def frames_of_calls(dump: str) -> tuple[StackFrame, ...]:
    """Return the frames of the calls in progress, innermost first: those of the main thread before those of threads."""
    stacks: list[list[StackFrame]] = [[]]
    for line in dump.splitlines():
        if found := _FRAME.match(line):
            stacks[-1].append(StackFrame(found[1], int(found[2]), found[3]))
        else:
            stacks.append([])
    calls = []
    for stack in reversed(stacks):  # the main thread is written last
        inside = next((place for place, frame in enumerate(stack) if frame.is_in(CALLING)), 0)
        calls += [frame for frame in stack[:inside] if not frame.path.startswith("<frozen ")]
    return tuple(calls)


def report(silent: Sequence[str], seconds: float, what: str, everyone: Sequence[Whereabouts], *, loading: bool = False) -> str:
    """Describe what all workers do, after some have been silent for long. `loading`: whether they are being made, which may take long."""
    is_, has = ("is", "has") if len(silent) == 1 else ("are", "have")
    state = (
        f"{is_} still loading, without progress for {seconds:.0f} s" if loading else f"{has} sent nothing for {seconds:.0f} s during {what}"
    )
    first = f"{joined(silent, 'and')} {state}"
    return "\n".join([first, *map(str, everyone), *_culprits(everyone)])


def _culprits(everyone: Sequence[Whereabouts]) -> list[str]:
    """Return the workers for which others wait in a collective operation."""
    called = [each for each in everyone if each.called]
    missing = [each for each in called if not each.collective]
    if not missing or len(missing) == len(called):
        return []
    names = joined([each.worker for each in missing], "and")
    return [f"The others wait for {names}, which {'is' if len(missing) == 1 else 'are'} not in a collective operation"]
