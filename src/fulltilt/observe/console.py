"""The console output of a run, for people and for machines.

Enters: phases as they begin and end, progress inside them, the metrics of finished steps, notes and warnings. Leaves: one line per step, or
with `seconds_between_lines` fewer; on a terminal as many of its fields as fit the width, and below the lines a progress bar with the
current phase, elapsed and remaining time; with `json`, one JSON object per step on standard output and everything for people on standard
error. Guaranteed: no thread, and no stream is redirected, so `breakpoint()`, `print` and child processes work as usual; `quiet` silences
everything but warnings and JSON; a stream that is lost (`| head`, a closed terminal, a full disk) does not end a run; text from files and
models cannot control the terminal.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from statistics import mean
from typing import Any, TextIO, cast

import rich.console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from fulltilt.observe.metrics import TIMING_NAMES, Number, encode_line
from fulltilt.observe.streams import outlet
from fulltilt.words import printable

# The fields of a step's line from left to right: the form, the metrics that may fill it (the first that the step has is used), and its
# rank. On a terminal that is too narrow for all fields, those of the highest rank are left out.
_STEP_FIELDS = (
    ("reward {:.3f}", ("critic/score/mean",), 1),
    ("length {:.1f}", ("response_length/mean",), 2),
    ("KL {:.4f}", ("actor/kl_loss", "actor/reward_kl_penalty"), 4),
    ("entropy {:.2f}", ("rollout/entropy", "actor/entropy"), 5),
    ("loss {:.4f}", ("train/loss", "actor/pg_loss"), 3),
    ("lr {:.2g}", ("actor/lr",), 7),
    ("{:.0f} tok/s", ("perf/throughput",), 6),
    ("load spread {:.2f}", ("actor/load_spread",), 8),
    ("rollout spread {:.2f}", ("rollout/time_spread",), 9),
)
_LARGE_PHASE, _MOST_PHASES = 0.1, 3  # share of the step's time from which on a phase is shown, and the most phases that are shown
_REDRAW_S = 0.1
_PHASE_WIDTH, _TIMES_WIDTH = 21, 33  # columns of the bar's line, so that the bar keeps its width


class Console:
    """The console output of a run. Example:

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
        seconds_between_lines: float = 0.0,
    ) -> None:
        """`stdout` and `stderr` default to those of the process; `terminal`: whether people read on a terminal, detected by default.
        `seconds_between_lines`: least time between two lines of steps for people, except for a run's last step and one with a warning."""
        self._json = json
        self._seconds_between_lines = seconds_between_lines
        self._printed = -math.inf  # time of the last line of a step for people
        self._quiet = quiet
        self._out = outlet(stdout or sys.stdout)
        error = outlet(stderr or sys.stderr)
        # Plain lines in a notebook too, where rich would show each one as a document of its own.
        make = partial(rich.console.Console, force_jupyter=False)
        self._error = make(file=cast(TextIO, error), force_terminal=terminal if json else None)
        self._people = self._error if json else make(file=cast(TextIO, self._out), force_terminal=terminal)
        self._live = self._people.is_terminal and not self._people.is_dumb_terminal
        # While there is a bar, everything must go through the bar's own console, or it would break the bar.
        self._warnings = self._people if self._live else self._error
        self._bar: _Bar | None = None
        self._total = 0
        self._running: list[str] = []
        self.begin_step(0)
        self._out.tell_loss(self._tell_loss)

    @contextlib.contextmanager
    def run(self, total: int, done: int = 0) -> Iterator[None]:
        """Show progress over steps; `done` of them were made before a resume."""
        self._total, self._printed = total, -math.inf
        if self._live and not self._quiet:
            self._bar = _Bar(self._people, total, done)
        try:
            yield
        finally:
            self._print_waiting_line()
            bar, self._bar = self._bar, None
            if bar:
                bar.stop()

    def begin_step(self, step: int) -> None:
        self._step, self._begin = step, time.perf_counter()
        self._warned = False  # whether this step had a warning
        self._waiting_line = ""  # the step's line, until it is printed for people
        self.seconds: dict[str, float] = {}  # seconds of each phase of the step, in the order in which phases began

    @property
    def step_seconds(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._begin

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show and time a phase. Phases may nest: the innermost is shown. A phase may occur twice in a step: its seconds add up."""
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
        """Show the progress of the current phase; cheap enough to be called often."""
        if self._bar and self._running:
            self._bar.show(done >= total, description=f"{self._running[-1]} {done}/{total}")

    def end_step(self, metrics: Mapping[str, Number]) -> None:
        if self._json:
            self._out.write(encode_line(self._step, metrics) + "\n")
            self._out.flush()
        if not self._quiet:
            self._waiting_line = self._step_line(metrics)
            if self._warned or time.perf_counter() >= self._printed + self._seconds_between_lines:
                self._print_waiting_line()
        if self._bar:
            self._bar.finish_step(self._step, self.step_seconds)

    def end_evaluation(self) -> None:
        """Show the bar of a run without steps as complete."""
        if self._bar:
            self._bar.show(completed=self._total)

    def note(self, text: str) -> None:
        if not self._quiet:
            self._say(self._people, text)

    def _print_waiting_line(self) -> None:
        if self._waiting_line:
            self._say(self._people, self._waiting_line)
            self._printed, self._waiting_line = time.perf_counter(), ""

    def warn(self, text: str) -> None:
        self._print_waiting_line()
        self._warned = True
        self._say(self._warnings, f"warning: {text}", style="yellow")

    def _say(self, where: rich.console.Console, text: str, style: str = "") -> None:
        # As Text, because brackets in paths and errors are not markup. Lines are wrapped between words on a terminal, and whole in a file.
        where.print(Text(printable(text), style), soft_wrap=not where.is_terminal)
        where.file.flush()

    def _tell_loss(self, reason: str) -> None:
        words = "The run continues, and its folder has every step's metrics; Ctrl-C stops it"
        self._say(self._error, f"warning: standard output is lost: {reason}. {words}", style="yellow")

    def _show_phase(self) -> None:
        if self._bar:
            self._bar.show(description=self._running[-1] if self._running else "")

    def _step_line(self, metrics: Mapping[str, Number]) -> str:
        """Return the fields and phases that fit the width of a terminal; otherwise all of them."""
        values = {form: [metrics[name] for name in names if name in metrics] for form, names, _ in _STEP_FIELDS}
        fields = [(rank, form.format(values[form][0])) for form, _, rank in _STEP_FIELDS if values[form]]
        large = [name for name, seconds in self.seconds.items() if seconds > _LARGE_PHASE * self.step_seconds]
        longest = sorted(large, key=lambda name: -self.seconds[name])[:_MOST_PHASES]
        fewer_phases = [(len(fields), longest[:count]) for count in range(len(longest), 0, -1)]
        fewer_fields = [(count, list[str]()) for count in range(len(fields), -1, -1)]
        for count, phases in fewer_phases + fewer_fields:
            shown = sorted(fields)[:count]
            times = ", ".join(f"{name} {self.seconds[name]:.1f}" for name in large if name in phases)
            taken = f"{self.step_seconds:.1f} s" + (f" ({times})" if times else "")
            line = "  ".join([f"step {self._step}/{self._total}", *(text for rank, text in fields if (rank, text) in shown), taken])
            if not self._live or len(line) <= self._people.width:
                break
        return line


class _Bar:
    """The progress bar. It is drawn when something changes, never by a thread of its own: a debugger's prompt stays readable, and a forked
    child cannot inherit a lock that such a thread held."""

    def __init__(self, console: rich.console.Console, total: int, done: int) -> None:
        columns = (
            TextColumn("{task.description}", table_column=Column(width=_PHASE_WIDTH, no_wrap=True)),
            BarColumn(None, table_column=Column(ratio=1)),
            TextColumn("{task.completed}/{task.total}", table_column=Column(width=2 * len(str(total)) + 1, no_wrap=True, justify="right")),
            TextColumn("{task.fields[times]}", table_column=Column(width=_TIMES_WIDTH, no_wrap=True)),
        )
        self._progress = Progress(*columns, console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False, expand=True)
        self._task = self._progress.add_task("", total=total, completed=done, times="")
        self._step_seconds: list[float] = []  # one number for each step since the start
        self._drawn = 0.0
        self._progress.start()
        self.show()

    def show(self, at_once: bool = True, **changed: Any) -> None:
        """Change fields of the bar and draw it, unless `at_once` is false and it was drawn a moment ago."""
        self._progress.update(self._task, **changed)
        now = time.perf_counter()
        if at_once or now - self._drawn >= _REDRAW_S:
            self._drawn = now
            self._progress.update(self._task, times=self._times(), refresh=True)

    def finish_step(self, step: int, seconds: float) -> None:
        self._step_seconds.append(seconds)
        self.show(completed=step)

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
    """Write seconds as people read them: 0:07, 12:40, 3:02:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
