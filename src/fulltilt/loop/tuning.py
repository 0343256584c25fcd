"""Tuning: measuring the search's proposed settings on the devices here, and the overlay for a run.

Enters: a run file. Leaves: an `Overlay` with its evidence. Guaranteed: `run.dir` is neither read nor written; candidates make the same
steps of the run, from the same weights, prompts and seeds, by the code of a run, and take turns, so that a temporary slowdown of the
machine affects all of them; a candidate that does not fit or is refused is recorded and the others continue; a setting is written only if
it was measurably faster than fulltilt's own choice.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import fulltilt
from fulltilt import config as configuration
from fulltilt.algo.build import build
from fulltilt.cluster.assembly import RunParts, assemble, torch_as_it_was
from fulltilt.cluster.checks import wrong_settings
from fulltilt.cluster.here import cluster_here, device_name, devices_of, free_memory, shape_for, wait_for_device
from fulltilt.cluster.hosts import WorkerError
from fulltilt.cluster.worker import enough_memory
from fulltilt.hardware import Cluster
from fulltilt.loop.opening import foreseen, freeze_existing_objects, prober_for
from fulltilt.loop.run import Progress, Run
from fulltilt.observe.console import Console
from fulltilt.observe.loggers import Loggers
from fulltilt.observe.metrics import write_whole
from fulltilt.records import UserError
from fulltilt.schema import Config, with_settings
from fulltilt.shape import Shape
from fulltilt.training.checkpoint import CheckpointStore
from fulltilt.tune import overlay as overlays
from fulltilt.tune.command import refuse_mistakes
from fulltilt.tune.description import AS_MODELLED, Calibration
from fulltilt.tune.overlay import Applied, Overlay, Trial, TunedFor, tuned_for
from fulltilt.tune.runners_up import PlannedRun
from fulltilt.tune.search import SearchResult, SettingsPredictor, search, space_of
from fulltilt.words import first_line, many

Say = Callable[[str], None]
WARM_UP = 1  # steps of each turn that are not measured: they include captures, compilation, first allocations
TURNS = 2  # measurements of each candidate
FASTER = 1.02  # at least this factor over the tokens per second of `auto`: less may be chance
GIB = 2**30


@dataclass(frozen=True)
class Tuning:
    """The result of tuning: the overlay, and the search that proposed its candidates."""

    overlay: Overlay
    searched: SearchResult


def here_for(config: Config) -> TunedFor:
    device, count = devices_of(config)
    return tuned_for(config, shape_for(config), device_name(device), count, fulltilt.__version__)


# ---- the overlay of a run ----------------------------------------------------------------------------------------------------------------


def with_overlay(run: Path, overrides: Sequence[str], path: Path) -> Applied:
    """Return the overrides of a run that uses an overlay, and a note on it."""
    found = overlays.read(path)
    config = configuration.load(run, overrides)
    applied = overlays.apply(found, path, run, overrides, here_for(config), config)
    try:
        configuration.load(run, applied.overrides)
    except UserError as error:
        raise UserError(f"{path}: does not go with {run} and the command line. Change them, or tune again. {error}") from None
    return applied


# ---- measuring ---------------------------------------------------------------------------------------------------------------------------


@dataclass
class Candidate:
    """A setting, and its measurements so far."""

    knobs: Mapping[str, Any]
    predicted_s: float | None = None
    turns: int = 0  # number of turns so far
    seconds: list[float] = field(default_factory=list)  # one number per measured step
    tokens: list[float] = field(default_factory=list)
    response: list[float] = field(default_factory=list)  # mean tokens of responses
    peak: int | None = None  # bytes of the device
    calibration: Calibration = AS_MODELLED  # from its probe of the devices
    failed: str = ""

    @property
    def tokens_per_s(self) -> float | None:
        return sum(self.tokens) / sum(self.seconds) if self.seconds and not self.failed else None

    @property
    def words(self) -> str:
        return ", ".join(f"{key} = {value}" for key, value in self.knobs.items()) or "auto"

    def trial(self) -> Trial:
        measured = median(self.seconds) if self.seconds and not self.failed else None
        peak = self.peak / GIB if self.peak is not None else None
        return Trial(self.knobs, self.predicted_s, measured, self.tokens_per_s, peak, self.failed)


def tune(config: Config, *, steps: int, finalists: int, response: float | None, say: Say) -> Tuning:
    """Search and measure. `steps`: measured steps of each candidate."""
    here, cluster, shape = here_for(config), cluster_here(config), shape_for(config)
    auto = Candidate({})
    with torch_as_it_was():
        say("measuring auto")
        take_turn(config, auto, steps)  # its responses are the basis of predictions for others
        seen = response if response is not None or not auto.response else sum(auto.response) / len(auto.response)
        rules = partial(refused_here, cluster)
        found = proposals(SettingsPredictor(config, shape, cluster, seen, rules, auto.calibration), finalists)
        say(in_words(found))
        auto.predicted_s = found.auto.seconds.total
        others = [Candidate(own.knobs, own.prediction.seconds.total) for own in found.finalists if own.knobs][:finalists]
        take_turns(config, [auto, *others], steps, say)
    candidates = [auto, *others]
    return Tuning(Overlay(winner(candidates).knobs, here, tuple(own.trial() for own in candidates)), found)


def take_turns(config: Config, candidates: Sequence[Candidate], steps: int, say: Say) -> None:
    """Give each candidate `TURNS` turns, one after another, except for candidates that have failed."""
    for turn in range(TURNS):
        for candidate in candidates:
            if candidate.turns <= turn and not candidate.failed:
                say(f"measuring {candidate.words}, turn {turn + 1} of {TURNS}")
                take_turn(config, candidate, steps)


def predicted(config: Config, shape: Shape, cluster: Cluster, *, finalists: int, response: float | None) -> Tuning:
    """Search without measuring, for devices that are not here."""
    refuse_mistakes(PlannedRun(config, shape, cluster, response))

    def rules(checked: Config) -> list[str]:
        return PlannedRun(checked, shape, cluster, response).mistakes()

    found = proposals(SettingsPredictor(config, shape, cluster, response, rules), finalists)
    best = found.finalists[0].knobs if found.finalists and found.finalists[0].prediction.beats(found.auto) else {}
    others = [own for own in found.finalists if own.knobs][:finalists]
    trials = [Trial({}, found.auto.seconds.total, failed="" if found.auto.fits else "does not fit")]
    trials += [Trial(own.knobs, own.prediction.seconds.total, peak_gib=own.prediction.most_bytes / GIB) for own in others]
    made = tuned_for(config, shape, cluster.gpu.name, cluster.gpus, fulltilt.__version__)
    if not found.finalists:
        raise UserError(
            "tune: no setting was found with which the run fits on these devices. `fulltilt plan RUN.toml` says what takes the memory, and "
            "what would make it fit"
        )
    return Tuning(Overlay(best, made, tuple(trials)), found)


def refused_here(cluster: Cluster, config: Config) -> list[str]:
    """Return what a run on the devices here refuses. Its models are here too."""
    return wrong_settings(config, build(config), cluster.gpu.device)


def proposals(predict: SettingsPredictor, finalists: int) -> SearchResult:
    """Return the fastest settings by prediction, perhaps including `auto`."""
    return search(predict, space_of(predict.config, predict.shape, predict.cluster, predict.response), finalists + 1)


def in_words(found: SearchResult) -> str:
    how = "the whole space" if found.whole else f"{many(found.predicted, 'setting')} on the way to the fastest"
    alike = f"; the models see no effect of {', '.join(found.alike)} here" if found.alike else ""
    return f"search: {how} predicted, {many(len(found.finalists), 'finalist')}{alike}"


def winner(candidates: Sequence[Candidate]) -> Candidate:
    """Return the fastest candidate; `auto`, the first, unless another is faster by more than chance explains."""
    auto = candidates[0]
    measured = [own for own in candidates if own.tokens_per_s is not None]
    if not measured:
        raise UserError(
            f"tune: no candidate could be measured. The first failed with: {auto.failed}. Use a smaller model, LoRA (lora.rank), or "
            "devices with more memory"
        )
    best = max(measured, key=lambda own: own.tokens_per_s or 0.0)
    return best if auto.tokens_per_s is None or (best.tokens_per_s or 0.0) > FASTER * auto.tokens_per_s else auto


def take_turn(config: Config, candidate: Candidate, steps: int) -> None:
    """Measure some steps of a candidate. Errors are recorded; a refusal of `auto` is raised, since it concerns every candidate."""
    count = WARM_UP + -(-steps // TURNS)
    candidate.turns += 1
    try:
        with tempfile.TemporaryDirectory(prefix="fulltilt-tune-") as scratch, enough_memory():
            make_steps(with_settings(config, {**candidate.knobs, "run.dir": scratch}), candidate, count)
    except (UserError, WorkerError) as error:
        if not candidate.knobs and not str(error).startswith("out of memory"):
            raise
        candidate.failed = first_line(error)
    finally:
        free_memory()


def make_steps(config: Config, candidate: Candidate, count: int) -> None:
    parts = assemble(config, probe=prober_for(config))  # as in a run
    try:
        candidate.calibration = foreseen(config, parts).calibration
        console = Console(quiet=True, stdout=sys.stderr, terminal=False)
        store = CheckpointStore(Path(config.run.dir) / "checkpoints", config.run.keep)
        run = Run(config, parts, store, Progress(), console, Loggers(console.warn))
        try:
            with freeze_existing_objects():
                for step in range(1, count + 1):
                    seconds, metrics = timed_step(run, step)
                    if step > WARM_UP:
                        candidate.seconds.append(seconds)
                        candidate.tokens.append(float(metrics["perf/total_num_tokens"]))
                        candidate.response += [float(metrics[name]) for name in ("response_length/mean",) if name in metrics]
        finally:
            run.metrics.close()
        candidate.peak = most(candidate.peak, peak_of(parts))
    finally:
        parts.close()


def timed_step(run: Run, step: int) -> tuple[float, Mapping[str, float]]:
    run.console.begin_step(step)
    begin = time.perf_counter()
    metrics = run.rl_step(step) if run.parts.samples else run.sft_step(step)
    wait_for_device()
    return time.perf_counter() - begin, metrics


def peak_of(parts: RunParts) -> int | None:
    """Return the most memory of the device, if this process knows it."""
    return parts.worker.account.peak_reserved_bytes if parts.crew.hosts.worker else None


def most(one: int | None, other: int | None) -> int | None:
    return max((each for each in (one, other) if each is not None), default=None)


def write(path: Path, found: Tuning, command: str) -> None:
    """Write the overlay. It may replace an earlier overlay, but no other file."""
    refuse_other_file(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, overlays.write(found.overlay, command))


def refuse_other_file(path: Path) -> None:
    """Refuse, before anything is measured, to replace a file that is not an overlay."""
    if path.is_dir():
        raise UserError(f"--out {path}: is a folder. Name a file, for example {path / 'tuned.toml'}")
    if path.exists():
        try:
            overlays.read(path)
        except UserError as error:
            raise UserError(f"--out {path}: exists, and is not an overlay that could be replaced. Choose another name. {error}") from None


# ---- for people --------------------------------------------------------------------------------------------------------------------------


def document(found: Tuning) -> dict[str, Any]:
    """Return all results for machines."""
    searched, overlay = found.searched, found.overlay
    return {
        "knobs": dict(overlay.knobs),
        "tuned": asdict(overlay.made_for),
        "candidates": [asdict(trial) for trial in overlay.trials],
        "reasons": [{"knobs": own.knobs, "reasons": list(own.reasons)} for own in searched.finalists],
        "search": {"predicted": searched.predicted, "whole": searched.whole, "no_effect": list(searched.alike)},
    }


def table(found: Tuning) -> list[str]:
    """Return lines that compare prediction and measurement of each candidate, the fastest first."""
    chosen, trials = dict(found.overlay.knobs), list(found.overlay.trials)

    def order(trial: Trial) -> tuple[bool, float, float]:
        return bool(trial.failed), -(trial.tokens_per_s or 0.0), trial.predicted_s or 0.0

    def number(value: float | None, digits: str) -> str:
        return "-" if value is None else format(value, digits)

    rows = [("setting", "predicted s", "measured s", "tokens/s", "peak GiB", "")]
    for trial in sorted(trials, key=order):
        words = ", ".join(f"{key} = {value}" for key, value in trial.knobs.items()) or "auto"
        numbers = number(trial.predicted_s, ".3g"), number(trial.measured_s, ".3g"), number(trial.tokens_per_s, ".0f")
        said = f"failed: {trial.failed}" if trial.failed else "chosen" if dict(trial.knobs) == chosen else ""
        rows.append((words, *numbers, number(trial.peak_gib, ".1f"), said))
    widths = [max(len(row[place]) for row in rows) for place in range(5)]
    cells = ([row[0].ljust(widths[0]), *(row[place].rjust(widths[place]) for place in range(1, 5)), row[5]] for row in rows)
    return ["  ".join(row).rstrip() for row in cells]
