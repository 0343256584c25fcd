"""The benchmark of settings: whole GRPO steps under `auto` and under settings by hand, in turns, with predictions beside measurements.

Enters: `BenchOptions` with one `--try` for each setting by hand. Leaves: one JSON-ready document: for each setting seconds of a step, of
its phases and peak memory, tokens/s against those of `auto`, and predictions of the run itself beside them; `table` makes it readable.
Guaranteed: every setting makes the same steps from the same weights; settings take turns, so that a device that slows down slows all, and
settings over a tenth slower than the best have only the first turn; one that fails is kept with its error and does not end the others;
mistakes in settings are reported before weights are made.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from fulltilt.bench import report, step
from fulltilt.bench.device import let_go
from fulltilt.bench.figures import StepTiming
from fulltilt.bench.job import BenchJob
from fulltilt.bench.options import BenchOptions
from fulltilt.bench.report import OURS, Say
from fulltilt.blame import is_out_of_memory
from fulltilt.records import UserError
from fulltilt.words import first_line, many

AUTO = "auto"
TURNS = {"cuda": 2, "cpu": 1}
NEAR = 0.9  # least share of the best setting's tokens/s in the first turn for which a setting has another turn
PREDICTED = "predicted/"


@dataclass(frozen=True, eq=False)
class SettingsJob:
    """The same steps under several settings. The first is `auto`, with only what was set for all."""

    jobs: Mapping[str, BenchJob]
    turns: int

    @property
    def first(self) -> BenchJob:
        return self.jobs[AUTO]


def prepare(options: BenchOptions, scratch: Path) -> SettingsJob:
    if repeated := sorted({text for text in options.tried if options.tried.count(text) > 1}):
        raise UserError(f"--try {repeated[0]!r}: it is there twice. Every setting is measured as often as the others (--turns)")
    settings: dict[str, list[str]] = {AUTO: [], **{" ".join(text.split()): text.split() for text in options.tried}}
    if empty := [text for text in options.tried if not text.strip()]:
        raise UserError(f"--try {empty[0]!r}: write settings with spaces between them, for example --try 'train.recompute=full'")
    jobs = {name: step.prepare(replace(options, overrides=[*options.overrides, *own], tried=[]), scratch) for name, own in settings.items()}
    return SettingsJob(jobs, options.turns or TURNS[jobs[AUTO].device.type])


def run(asked: SettingsJob, say: Say) -> dict[str, Any]:
    begin, first = time.perf_counter(), asked.first
    parameters = step.write_model(first, say)
    found: dict[str, list[StepTiming]] = {name: [] for name in asked.jobs}
    tokens = step.step_tokens(first)[-1]
    for turn in range(asked.turns):
        for name in list(asked.jobs) if turn == 0 else worth_another_turn(found):
            job = asked.jobs[name]
            say(f"turn {turn + 1} of {asked.turns}: {name}")
            found[name].append(measured(job, say))
            say(in_words(name, found[name][-1]))  # an interrupted run would lose these results
    settings = {name: described(timings, tokens) for name, timings in found.items()}
    best = max((one["tokens_per_s"] or 0.0 for one in settings.values()), default=0.0)
    return {
        "benchmark": "settings",
        "auto_of_best": (settings[AUTO]["tokens_per_s"] or 0.0) / best if best else None,
        "errors": errors([one["predictions"] for one in settings.values()]),
        "settings": settings,
        "workload": first.requests[0].describe() | {"tokens_of_a_step": tokens},
        "model": report.describe_model(first.source, first.dtype, parameters),
        "steps": {"turns": asked.turns, "measured": first.repeats, "warm_up": step.WARM_UP},
        "seconds": time.perf_counter() - begin,
        **report.origin(first.device),
    }


def worth_another_turn(found: Mapping[str, Sequence[StepTiming]]) -> list[str]:
    """Return the settings that have another turn: `auto`, and those that are about as fast as the best. One that failed would fail
    again."""
    good = {name: own for name, own in found.items() if not any(one.error for one in own)}
    seconds = {name: median(each for timing in own for each in timing.seconds) for name, own in good.items()}
    best = min(seconds.values(), default=0.0)
    return [name for name, own in seconds.items() if name == AUTO or best >= NEAR * own]


def measured(job: BenchJob, say: Say) -> StepTiming:
    """Measure the steps of one setting. Not fitting is a result, and other failures must not lose the results of the other settings."""
    try:
        let_go(job.device)  # frees what the setting before has left
        return step.measure_ours(job, say)
    except Exception as error:
        if isinstance(error, UserError) or is_out_of_memory(error):
            return StepTiming({}, error=first_line(error))
        say(traceback.format_exc().rstrip())
        return StepTiming({}, error=f"{type(error).__name__}: {first_line(error)}")


def in_words(name: str, timing: StepTiming) -> str:
    if timing.error:
        return f"{name} failed: {timing.error}"
    return f"{name}: {median(timing.seconds):.3f} s a step, started in {timing.start_seconds or 0.0:.1f} s"


def described(timings: Sequence[StepTiming], tokens: int) -> dict[str, Any]:
    """Return the results of all turns of a setting together."""
    seconds = [each for timing in timings for each in timing.seconds]
    last = timings[-1]
    peaks = [timing.peak_memory_bytes for timing in timings if timing.peak_memory_bytes is not None]
    phases = [timing.details["phases"] for timing in timings if timing.details]
    lines = [line for timing in timings if timing.details for line in timing.details["metrics_of_steps"]]
    everywhere = [name for name in (lines[0] if lines else {}) if all(name in line for line in lines)]
    return {
        "step_seconds": median(seconds) if seconds else None,
        "step_seconds_all": seconds,
        "tokens_per_s": tokens / median(seconds) if seconds else None,
        "peak_memory_bytes": max(peaks, default=None),
        "start_seconds": last.start_seconds,
        "phases": {phase: median([one[phase] for one in phases]) for phase in (phases[0] if phases else {})},
        "predictions": predictions(lines),
        "metrics": {name: median(line[name] for line in lines) for name in everywhere},
        "description": last.details.get("description"),
        "probed": last.details.get("probed"),
        "plan": list(last.details.get("plan", ())),
        "eager_reason": last.details.get("eager_reason"),
        "error": last.error,
    }


def predictions(metrics: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return what the run predicted for its steps, by the name of the metric that measures it."""
    found: dict[str, dict[str, float]] = {}
    for key in metrics[0] if metrics else ():
        name = key.removeprefix(PREDICTED)
        if key.startswith(PREDICTED) and all(name in line for line in metrics):
            taken, said = median([line[name] for line in metrics]), median([line[key] for line in metrics])
            found[name] = {"predicted": said, "measured": taken} | ({"error": said / taken - 1} if taken else {})
    return found


def errors(found: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the relative differences between predictions and measurements, by metric, over all settings: the mean and the worst."""
    by_name: dict[str, list[float]] = {}
    for one in found:
        for name, pair in one.items():
            if "error" in pair:
                by_name.setdefault(name, []).append(abs(pair["error"]))
    return {name: {"mean": sum(own) / len(own), "worst": max(own), "runs": len(own)} for name, own in by_name.items()}


# -- for people ---------------------------------------------------------------------------------------------------------------------------


def table(found: Mapping[str, Any]) -> str:
    """Write the document for people."""
    asked, steps, settings = found["workload"], found["steps"], found["settings"]
    lines = [
        report.headline(found),
        f"a GRPO step of {asked['prompts']} prompts x {asked['samples_per_prompt']} samples, every response "
        f"{many(asked['response_tokens']['largest'], 'token')}; medians of {many(steps['turns'] * steps['measured'], 'step')} in "
        f"{many(steps['turns'], 'turn')}",
        "",
        *report.table_of("", {name: cells(one, settings[AUTO]) for name, one in settings.items()}),
    ]
    lines += [f"{name} failed: {one['error']}" for name, one in settings.items() if one["error"]]
    lines += [
        f"{OURS} gave up CUDA graphs with {name} and decoded without them, slower: {one['eager_reason']}"
        for name, one in settings.items() if one["eager_reason"]
    ]  # fmt: skip
    if found["auto_of_best"]:
        lines += ["", f"auto reaches {found['auto_of_best']:.1%} of the best setting"]
    return "\n".join([*lines, *prediction_lines(found)])


def prediction_lines(found: Mapping[str, Any]) -> Iterator[str]:
    if not found["errors"]:
        yield "no predictions: the run says at its start why"
    for name, own in found["errors"].items():
        yield f"predicted {name}: {own['mean']:.1%} off on average, {own['worst']:.1%} at worst, over {many(own['runs'], 'setting')}"


def cells(one: Mapping[str, Any], auto: Mapping[str, Any]) -> dict[str, str]:
    peak, speed = one["peak_memory_bytes"], one["tokens_per_s"]
    return {
        "s a step": report.number(one["step_seconds"], ".2f"),
        "tokens/s": report.number(speed),
        "of auto": report.number(speed / auto["tokens_per_s"] if speed and auto["tokens_per_s"] else None, ".1%"),
        "peak GiB": report.number(peak and peak / step.GIB, ".2f"),
        "phases": ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in one["phases"].items()),
    }
