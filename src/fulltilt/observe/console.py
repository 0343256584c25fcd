"""The console output of a run, for people and for machines.

Enters: phases as they begin and end, progress inside them, the metrics of finished steps, notes and warnings. Leaves: on a terminal one
progress bar with the current phase, elapsed time, remaining time and the last reward; elsewhere one plain line per step; with `json`, one
JSON object per step on standard output and everything for people on standard error. Guaranteed: no thread, and no stream is redirected, so
`breakpoint()`, `print` and child processes work as usual; `quiet` silences everything but warnings and JSON; a closed pipe (`| head`) does
not end a run.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from statistics import mean
from typing import IO, Any, TextIO

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from fulltilt.observe.metrics import TIMING_NAMES, Number, encode_line

_REDRAW_S = 0.1


class Console:
    """Example:

    with console.run(total=100, done=0):
        console.begin_step(1)
        with console.phase("rollout"):
            console.phase_progress(3, 64)
        console.end_step({"critic/score/mean": 0.5, "response_length/mean": 40.0})
    """

    def __init__(
        self,
        json: bool = False,
        quiet: bool = False,
        *,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        terminal: bool | None = None,
    ) -> None:
        """`stdout` and `stderr` default to those of the process; `terminal`: whether people read on a terminal, detected by default."""
        self._json = json
        self._quiet = quiet
        self._out = stdout or sys.stdout
        error = stderr or sys.stderr
        people = error if json else self._out
        self._people = _Output(file=people, force_terminal=terminal)
        self._live = self._people.is_terminal and not self._people.is_dumb_terminal
        # While there is a bar, everything must go through the bar's own console, or it would break the bar.
        self._warnings = self._people if self._live else _Output(file=error)
        self._bar: _Bar | None = None
        self._total = 0
        self._running: list[str] = []
        self.begin_step(0)

    @contextlib.contextmanager
    def run(self, total: int, done: int = 0) -> Iterator[None]:
        """Show progress over steps; `done` of them were made before a resume."""
        self._total = total
        if self._live and not self._quiet:
            self._bar = _Bar(self._people, total, done)
        try:
            yield
        finally:
            bar, self._bar = self._bar, None
            if bar:
                bar.stop()

    def begin_step(self, step: int) -> None:
        self._step, self._begin = step, time.perf_counter()
        self.seconds: dict[str, float] = {}  # in each phase of the step, in the order in which they began

    @property
    def step_seconds(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._begin

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show and measure a phase. Phases may nest: the innermost is shown. A phase may occur twice in a step: its seconds add up."""
        assert name in TIMING_NAMES, f"{name!r} is not the name of a phase"
        self._running.append(name)
        self._show_phase()
        seconds, begin = self.seconds, time.perf_counter()
        seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            seconds[name] += time.perf_counter() - begin
            self._running.pop()
            self._show_phase()

    def phase_progress(self, done: int, total: int) -> None:
        """Show how far the current phase is; cheap enough to be called often."""
        if self._bar and self._running:
            self._bar.show(done >= total, description=f"{self._running[-1]} {done}/{total}")

    def end_step(self, metrics: Mapping[str, Number]) -> None:
        if self._json:
            with self._read_by_someone(self._out):
                print(encode_line(self._step, metrics), file=self._out, flush=True)
        if self._bar:
            self._bar.finish_step(self._step, self.step_seconds, metrics.get("critic/score/mean"))
        elif not self._quiet:
            self._say(self._people, self._step_line(metrics))

    def note(self, text: str) -> None:
        if not self._quiet:
            self._say(self._people, text)

    def warn(self, text: str) -> None:
        self._say(self._warnings, f"warning: {text}", style="yellow")

    def _say(self, where: rich.console.Console, text: str, style: str = "") -> None:
        # As Text, because brackets in paths and errors are not markup. A reward's message may hold a lone surrogate, which is not UTF-8.
        with self._read_by_someone(where.file):
            where.print(Text(text.encode("utf-8", "backslashreplace").decode(), style), soft_wrap=True)
            where.file.flush()

    @contextlib.contextmanager
    def _read_by_someone(self, file: IO[str]) -> Iterator[None]:
        """Wraps all writing. If the reader of a pipe has gone, this output and all that follows is discarded."""
        try:
            yield
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, file.fileno())
            os.close(nowhere)
            self.warn("the reader of this output has gone. The run continues, and its folder has every step's metrics; Ctrl-C stops it")

    def _show_phase(self) -> None:
        if self._bar:
            self._bar.show(description=self._running[-1] if self._running else "")

    def _step_line(self, metrics: Mapping[str, Number]) -> str:
        shown = (("reward", "critic/score/mean", "{:.3f}"), ("length", "response_length/mean", "{:.1f}"), ("loss", "train/loss", "{:.4f}"))
        numbers = [f"{word} {form.format(metrics[name])}" for word, name, form in shown if name in metrics]
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return "  ".join([f"step {self._step}/{self._total}", *numbers, f"{self.step_seconds:.1f} s", *([f"({phases})"] if phases else [])])


class _Output(rich.console.Console):
    def on_broken_pipe(self) -> None:
        raise  # rich would end the process; here the caller decides


class _Bar:
    """The progress bar. It is drawn when something changes, never by a thread of its own: a debugger's prompt stays readable, and a forked
    child cannot inherit a lock that such a thread held."""

    def __init__(self, console: rich.console.Console, total: int, done: int) -> None:
        description, times, reward = (TextColumn(f"{{task.{name}}}") for name in ("description", "fields[times]", "fields[reward]"))
        columns = (description, BarColumn(), MofNCompleteColumn(), times, reward)
        self._progress = Progress(*columns, console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._task = self._progress.add_task("", total=total, completed=done, times="", reward="")
        self._step_seconds: list[float] = []  # one for each step since the start
        self._drawn = 0.0
        self._progress.start()
        self.show()

    def show(self, at_once: bool = True, **changed: Any) -> None:
        """Change fields of the bar and draw it, unless `at_once` is false and it was drawn only just now."""
        self._progress.update(self._task, **changed)
        now = time.perf_counter()
        if at_once or now - self._drawn >= _REDRAW_S:
            self._drawn = now
            self._progress.update(self._task, times=self._times(), refresh=True)

    def finish_step(self, step: int, seconds: float, reward: Number | None) -> None:
        self._step_seconds.append(seconds)
        self.show(completed=step, reward="" if reward is None else f"reward {reward:.3f}")

    def stop(self) -> None:
        self.show()
        self._progress.stop()

    def _times(self) -> str:
        (task,) = self._progress.tasks
        elapsed = f"{clock(task.elapsed or 0.0)} elapsed"
        if not self._step_seconds or not task.remaining:
            return elapsed
        return f"{elapsed}, {clock(task.remaining * mean(self._step_seconds))} left"


def clock(seconds: float) -> str:
    """Seconds as people read them: 0:07, 12:40, 3:02:05."""
    return str(timedelta(seconds=round(seconds))).removeprefix("0:").removeprefix("0")
