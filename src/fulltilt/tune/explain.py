"""Explanation of a run: where its time went, how close each phase came to the device's limits, and the one change that would help most.

Enters: the folder of a run, finished, running or killed. Leaves: an `Explanation`, as lines for people or as JSON. Guaranteed: nothing but
the folder is read (metrics.jsonl, snapshot.toml, plan.json), nothing is written, no torch; an incomplete last line of the metrics is
ignored. Seconds are means over the newest steps without the run's first one, which includes warm-up.

The changes are those that `fulltilt plan` compares, and knobs left to `auto` that were set by hand (tune/changes.py). A change is judged by
what was measured: each phase's seconds are multiplied by the ratio of the model of time's predictions with the change and without it, and
the peak grows by the difference that the model of memory predicts. If the models do not cover a run or its device, only changes whose
effect follows from the measurements alone are considered.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fulltilt import config as configuration
from fulltilt.batching.cost import update_flops
from fulltilt.folders import RUN_MARKER, read_file
from fulltilt.hardware import Accelerator
from fulltilt.observe.metrics import TIMING_NAMES, read_lines
from fulltilt.records import UserError
from fulltilt.schema import Config, uses_reward_model
from fulltilt.shape import Shape
from fulltilt.tune.changes import OF_SEATS, ChangeableRun, KnobChange
from fulltilt.tune.description import Calibration, RunDescription
from fulltilt.tune.lengths import Lengths
from fulltilt.tune.memory_model import MemoryModel, memory_of
from fulltilt.tune.predict import (
    CPU,
    MEMORY_PHASES,
    NOT_ALLOCATED,
    PREDICTED,
    UsedDevices,
    describe_run,
    peak_of,
    planned_cluster,
    read_plan,
    read_shape,
    step_seconds,
    with_lengths,
)
from fulltilt.tune.runners_up import PlannedRun
from fulltilt.tune.time_model import StepSeconds, model_size, read_weights
from fulltilt.words import first_line, in_bytes, many

NEWEST = 50  # steps that are averaged
LEAST_GAIN = 0.03  # share of a step's time below which a change is not worth mentioning
MEMORY_SHARE = 0.95  # share of the device's memory that a change may fill
UNEXPECTED = 1.5  # factor of the prediction above which a phase is reported
MANY_CUT = 0.5  # share of responses cut at the limit, from which on a lower limit is considered
PHASES = {name: phase for phase, name in TIMING_NAMES.items()}
OUTSIDE = ("save_checkpoint", "testing")  # phases that are not in `timing_s/step`
GIB = 2**30
BUDGET = "budget/"  # metrics of budgets that have changed
OUT_OF_MEMORY = re.compile(r"(^|[/_])(oom|out_of_memory)")  # metrics that count out-of-memory errors
REMEDIES = "docs/troubleshooting.md"


@dataclass(frozen=True)
class PhaseTime:
    """A phase of the mean step. Rates are per device; None: not known."""

    name: str
    seconds: float
    share: float  # share of the whole time, validation and saving included
    predicted: float | None = None
    flops: float | None = None  # FLOP/s, recomputed parts not counted
    flops_share: float | None = None  # share of the device's peak
    bytes: float | None = None  # bytes per second that are read from memory: weights, keys and values
    bytes_share: float | None = None
    peak: int | None = None  # most bytes of any of the steps
    predicted_peak: int | None = None
    waiting: float | None = None  # seconds that workers wait for the slowest one, on average


@dataclass(frozen=True)
class Improvement:
    """A change of a run, and the seconds that it would save in each step."""

    setting: str  # as the user types it; empty: the change is no setting
    why: str
    seconds: float
    share: float  # share of the whole time
    changes_results: bool = False

    @property
    def words(self) -> str:
        return f"{self.setting} ({self.why})" if self.setting else self.why


@dataclass(frozen=True)
class Explanation:
    folder: str
    steps: tuple[int, int] | None  # first and last step of the average; None: no step has finished
    devices: UsedDevices | None
    seconds: float = 0.0  # seconds of the mean step, validation and saving included
    tokens_per_s: float = 0.0  # tokens per second of each device
    phases: tuple[PhaseTime, ...] = ()
    between: float = 0.0  # seconds in no phase
    utilization: float | None = None
    memory: int | None = None  # bytes of a device's memory
    out_of_memory: Mapping[str, float] = field(default_factory=dict)  # counts of out-of-memory errors, by metric
    budgets: Mapping[str, float] = field(default_factory=dict)  # budgets that have changed since the plan
    kv_use: float | None = None  # highest share of the KV cache's blocks in use
    preemptions: float = 0.0  # samples that were preempted in all these steps
    changes: tuple[Improvement, ...] = ()  # the best first
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Improvement | None:
        """The change that would help most and leaves results as they are."""
        return next((own for own in self.changes if own.share > LEAST_GAIN and not own.changes_results), None)

    @property
    def advice(self) -> Iterator[str]:
        best = self.best
        if best:
            less = f"about {best.seconds:.2g} s less of each step's {self.seconds:.3g} s ({best.share:.0%})"
            yield f"what would help most: {best.words}: {less}"
        else:
            yield f"nothing that is known would help by more than {LEAST_GAIN:.0%}"
        least = best.share if best else LEAST_GAIN
        others = [own for own in self.changes if own.changes_results and own.share > least]
        yield from (f"more, with other results: {own.words}: about {own.seconds:.2g} s less ({own.share:.0%})" for own in others[:1])

    def as_json(self) -> dict[str, Any]:
        best = self.best
        shown = {name: value for name, value in vars(self).items() if name not in ("phases", "changes", "devices")}
        return {
            **shown,
            "devices": asdict(self.devices) if self.devices else None,
            "phases": [asdict(own) for own in self.phases],
            "changes": [asdict(own) for own in self.changes],
            "best_change": asdict(best) if best else None,
            "advice": list(self.advice) if self.steps else [],
        }

    def lines(self) -> Iterator[str]:
        """Yield the whole explanation, for people."""
        if not self.steps:
            yield f"{self.folder}: no step has finished yet"
            return
        first, last = self.steps
        which = f"step {last}" if first == last else f"steps {first} to {last}"
        where = f" on {self.devices.workers} x {self.devices.name}" if self.devices else ""
        yield f"{self.folder}: {which}, {self.seconds:.3g} s each, {self.tokens_per_s:.0f} tokens/s for each device{where}"
        for own in sorted(self.phases, key=lambda phase: -phase.seconds):
            yield f"{own.name}: {'; '.join(self._about(own))}"
        if self.between > 0.01 * self.seconds:
            yield f"between phases: {self.between:.3g} s ({self.between / self.seconds:.0%})"
        if self.utilization is not None:
            yield f"GPUs were busy {self.utilization:.0%} of the time"
        if self.out_of_memory:
            yield "out of memory: " + ", ".join(f"{name} {count:.0f}" for name, count in self.out_of_memory.items())
        if self.budgets:
            yield "no longer as planned: " + ", ".join(f"{name} {size:.0f}" for name, size in self.budgets.items())
        if self.kv_use is not None:
            later = " and finished later" if self.preemptions else ""
            yield f"KV cache: at most {self.kv_use:.0%} in use, {many(round(self.preemptions), 'sample')} preempted{later}"
        yield from self.notes
        yield from self.advice

    def _about(self, own: PhaseTime) -> Iterator[str]:
        yield f"{own.seconds:.3g} s ({own.share:.0%})" + (f", predicted {own.predicted:.3g} s" if own.predicted is not None else "")
        if rate := roofline(own):
            yield rate
        if own.waiting is not None and own.waiting > 0.01 * own.seconds:
            yield f"workers wait {own.waiting:.2g} s for the slowest"
        if own.peak is not None:
            of_device = f" of {in_bytes(self.memory)}" if self.memory else ""
            predicted = f", predicted {in_bytes(own.predicted_peak)}" if own.predicted_peak is not None else ""
            yield f"peak {in_bytes(own.peak)}{of_device}{predicted}"

    def summary(self) -> Iterator[str]:
        """Yield the summary that ends a run, in two lines."""
        if not self.steps:
            return
        large = [own for own in sorted(self.phases, key=lambda phase: -phase.seconds) if own.share >= 0.05]
        told = []
        for own in large[:4]:
            rate = roofline(own, short=True)
            told.append(f"{own.name} {own.share:.0%}" + (f" ({rate})" if rate else ""))
        command = shlex.join(["fulltilt", "doctor", self.folder])
        yield f"where the time went: {', '.join(told) or 'between phases'}; `{command}` says more"
        yield from self.advice


def roofline(own: PhaseTime, *, short: bool = False) -> str:
    """Say how close a phase came to the device's peak in FLOP/s or in memory bandwidth, whichever is closer."""
    if own.flops is None or own.flops_share is None:
        return ""
    by_memory = own.bytes is not None and (own.bytes_share or 0) > own.flops_share
    share = own.bytes_share if by_memory else own.flops_share
    if short:
        return f"{share:.0%} of the device's {'memory bandwidth' if by_memory else 'FLOP/s'}" if share and share >= 0.005 else ""
    rate = f"{with_unit(own.bytes or 0)}B/s from memory" if by_memory else f"{with_unit(own.flops)}FLOP/s"
    return f"{rate}, {'less than 1%' if (share or 0) < 0.01 else f'{share:.0%}'} of the device's figure"


def with_unit(count: float) -> str:
    """Write a number with its unit prefix. Example: `412 T`, `3.1 G`."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g} "


# ---- reading -----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedRun:
    """The contents of a run's folder, as far as they can be read."""

    folder: Path
    config: Config | None = None
    shape: Shape | None = None
    devices: UsedDevices | None = None
    run: RunDescription | None = None
    why_not: str = ""  # why the models predict nothing

    @cached_property
    def gpu(self) -> Accelerator | None:
        """The figures of the device; None: the hardware table does not have it."""
        try:
            return self.devices.cluster.gpu if self.devices else None
        except UserError:
            return None


def read_run(folder: Path) -> SavedRun:
    found = SavedRun(folder)
    try:
        found = replace(found, config=configuration.load(folder / "snapshot.toml", here=False))
        given = json.loads(read_file(folder / "plan.json"))
        found = replace(found, shape=read_shape(given["shape"]), devices=UsedDevices(**given["devices"]))
        assert found.config and found.shape and found.devices
        calibration = Calibration(**given.get("calibration", {}))  # an earlier version wrote none
        return replace(found, run=describe_run(found.config, found.shape, found.devices, read_plan(given), calibration))
    except KeyError as error:
        return replace(found, why_not=f"plan.json has no {error}: another version of fulltilt wrote it")
    except Exception as error:  # the folder's files may contain anything
        return replace(found, why_not=first_line(error))


def explain(folder: Path) -> Explanation:
    """Explain the run of a folder. Raises UserError if it is not the folder of a run."""
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file() and not (folder / RUN_MARKER).is_file():
        raise UserError(f"{folder}: is not the folder of a run: it has no metrics.jsonl. Give the run.dir of a run")
    saved = read_run(folder)
    read = read_lines(metrics) if metrics.is_file() else None
    lines = [line for line in read.steps if line.get("timing_s/step")] if read else []
    if not lines:
        return Explanation(str(folder), None, saved.devices)
    newest = lines[-NEWEST:] if len(lines) > NEWEST else lines[1:] or lines
    found = explained(saved, newest)
    return replace(found, notes=(*found.notes, f"metrics.jsonl: {read.damaged}")) if read and read.damaged else found


def mean_line(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean of each metric. Phases count as 0 in steps that do not have them, since not every step validates or saves; memory and
    the longest lengths are maxima."""
    names = dict.fromkeys(name for line in lines for name in line if name not in ("step", "nonfinite"))
    found = {}
    for name in names:
        values = [line[name] for line in lines if line.get(name) is not None]
        if not values:
            continue
        if name.startswith("memory_gib/") or name.endswith("_length/max"):
            found[name] = max(values)
        else:
            found[name] = sum(values) / (len(lines) if name.startswith("timing_s/") else len(values))
    return found


# ---- the report --------------------------------------------------------------------------------------------------------------------------


def explained(saved: SavedRun, lines: Sequence[Mapping[str, Any]]) -> Explanation:
    line = mean_line(lines)
    workers = saved.devices.workers if saved.devices else 1
    seconds = line["timing_s/step"] + sum(line.get(f"timing_s/{name}", 0.0) for name in OUTSIDE)
    measured = {name: line[f"timing_s/{name}"] for name in PHASES if line.get(f"timing_s/{name}")}
    step = MeanStep(saved, line, seconds, measured)
    counted = {name: sum(each[name] for each in lines if each.get(name)) for name in line if OUT_OF_MEMORY.search(name)}
    memory = saved.devices.memory if saved.devices else 0
    return Explanation(
        folder=str(saved.folder),
        steps=(lines[0]["step"], lines[-1]["step"]),
        devices=saved.devices,
        seconds=seconds,
        tokens_per_s=line.get("perf/total_num_tokens", 0.0) / seconds / workers,
        phases=tuple(step.phase(name) for name in measured),
        between=max(0.0, seconds - sum(measured.values())),
        utilization=line.get("perf/gpu_utilization"),
        memory=memory or None,
        out_of_memory={name: count for name, count in counted.items() if count},
        budgets={name.removeprefix(BUDGET): size for name, size in lines[-1].items() if name.startswith(BUDGET) and size is not None},
        kv_use=max((each["rollout/kv_use"] for each in lines if each.get("rollout/kv_use") is not None), default=None),
        preemptions=sum(each.get("rollout/preemptions") or 0.0 for each in lines),
        changes=tuple(sorted(step.changes(), key=lambda own: -own.seconds)),
        notes=tuple(step.notes()),
    )


@dataclass(frozen=True)
class MeanStep:
    """The mean step of a run: what it computed, and which changes would make it faster."""

    saved: SavedRun
    line: Mapping[str, float]
    seconds: float
    measured: Mapping[str, float]  # seconds of phases, by their names under `timing_s/`

    @cached_property
    def run(self) -> RunDescription | None:
        return with_lengths(self.saved.run, self.line) if self.saved.run else None

    @property
    def workers(self) -> int:
        return self.saved.devices.workers if self.saved.devices else 1

    def phase(self, name: str) -> PhaseTime:
        seconds, gpu, line = self.measured[name], self.saved.gpu, self.line
        flops, moved = self._rate(self._flops(name), seconds), self._rate(self._bytes(name), seconds)
        slowest, mean = (line.get(f"timing_s/workers/{name}/{which}") for which in ("max", "mean"))
        peak, predicted_peak = (line.get(f"{prefix}memory_gib/{name}/peak") for prefix in ("", PREDICTED))
        return PhaseTime(
            name=PHASES[name],
            seconds=seconds,
            share=seconds / self.seconds,
            predicted=line.get(f"{PREDICTED}timing_s/{name}"),
            flops=flops,
            flops_share=flops / gpu.flops if flops is not None and gpu else None,
            bytes=moved,
            bytes_share=moved / gpu.hbm if moved is not None and gpu else None,
            peak=None if peak is None else int(peak * GIB),
            predicted_peak=None if predicted_peak is None else int(predicted_peak * GIB),
            waiting=None if slowest is None or mean is None else slowest - mean,
        )

    def _rate(self, amount: float | None, seconds: float) -> float | None:
        return None if amount is None else amount / seconds / self.workers

    # -- what was computed ----------------------------------------------------------------------------------------------------------

    @cached_property
    def _row_flops(self) -> float:
        """FLOPs of the forward and backward pass of a mean row."""
        shape, line = self.saved.shape, self.line
        assert shape
        if "response_length/mean" in line:
            most_prompt, most_response = (max(1, round(line[f"{what}_length/max"])) for what in ("prompt", "response"))
            lengths = Lengths(most_prompt, most_response, line["prompt_length/mean"], max(1.0, line["response_length/mean"]))
            return update_flops(model_size(shape), lengths.rows, round(lengths.response * len(lengths.rows))).total / len(lengths.rows)
        tokens = max(1, round(line["perf/total_num_tokens"] / self._rows))
        return float(update_flops(model_size(shape), [tokens], tokens).total)

    @property
    def _rows(self) -> float:
        """Samples of the step that could be trained on, or rows of SFT."""
        config = self.saved.config
        assert config
        if "response_length/mean" not in self.line:
            return config.algorithm.prompts_per_step
        groups = self.line.get("rollout/groups_kept", config.algorithm.prompts_per_step)
        return max(1.0, groups * config.algorithm.samples_per_prompt - self.line.get("reward/excluded", 0))

    def _flops(self, name: str) -> float | None:
        config, shape, line = self.saved.config, self.saved.shape, self.line
        if config is None or shape is None or "perf/total_num_tokens" not in line:
            return None
        if name == "update_actor":
            return self._row_flops * max(0.0, self._rows - line.get("actor/samples_left_out", 0)) * config.algorithm.epochs
        if name == "old_log_prob" or (name == "ref" and config.ref.path is None):
            return self._row_flops / 3 * self._rows
        if name == "gen" and "rollout/decode_tokens" in line:
            size = model_size(shape)
            tokens = line["rollout/decode_tokens"] + line.get("rollout/prefill_tokens", 0)
            return 2.0 * (size.layer_weights * tokens + size.head_weights * line["rollout/decode_tokens"])
        return None

    def _bytes(self, name: str) -> float | None:
        """Return the bytes that decoding has read: the weights in every pass, keys and values of every sample."""
        shape, line = self.saved.shape, self.line
        if name != "gen" or shape is None or not line.get("rollout/passes"):
            return None
        itemsize = 4 if self.saved.devices and self.saved.devices.name == CPU else 2
        drawn = line["rollout/decode_tokens"]
        try:
            weights = line["rollout/passes"] * read_weights(shape, max(1.0, drawn / line["rollout/passes"]))
        except UserError:  # a family whose parameters are not known
            return None
        context = line["prompt_length/mean"] + line["response_length/mean"] / 2
        return itemsize * weights + drawn * context * shape.kv_bytes_per_token(itemsize)

    # -- what would change it -------------------------------------------------------------------------------------------------------

    def notes(self) -> Iterator[str]:
        if self.saved.why_not:
            yield f"no predictions: {self.saved.why_not}"
        if self.changeable and self.changeable.refused:
            yield f"no change of a knob is weighed, since none fits by the plan: {self.changeable.refused}"
        if self.saved.devices and self.saved.devices.name == CPU and self.saved.gpu:
            figures = f"{with_unit(self.saved.gpu.flops)}FLOP/s and {with_unit(self.saved.gpu.hbm)}B/s"
            yield f"figures of the CPU: those of a server with two sockets, {figures} (hardware.py)"
        for name, seconds in self.measured.items():
            predicted = self.line.get(f"{PREDICTED}timing_s/{name}")
            if predicted and seconds > UNEXPECTED * predicted and seconds > LEAST_GAIN * self.seconds:
                yield f"{PHASES[name]} takes {seconds / predicted:.1f} times as long as predicted: see {REMEDIES}"

    def changes(self) -> Iterator[Improvement]:
        if self.saved.config:
            yield from self._by_measurement(self.saved.config)
        if self.changeable:
            yield from self._by_models(self.changeable)

    def _improvement(self, setting: str, why: str, seconds: float, *, changes_results: bool = False) -> Improvement:
        return Improvement(setting, why, seconds, seconds / self.seconds, changes_results)

    def _by_measurement(self, config: Config) -> Iterator[Improvement]:
        """Yield changes whose effect follows without a model."""
        line, reward = self.line, self.measured.get("reward", 0.0)
        if reward and not uses_reward_model(config):
            processes = config.reward.workers
            if processes == "auto":
                yield self._improvement(
                    "", "a reward function that takes half as long; every core has a reward process already", reward / 2
                )
            else:
                yield self._improvement(f"reward.workers={2 * processes}", "if the machine has as many free cores", reward / 2)
        for name, key, every in (
            ("testing", "run.eval_every", config.run.eval_every),
            ("save_checkpoint", "run.save_every", config.run.save_every),
        ):
            if every and self.measured.get(name):
                what = "validations" if name == "testing" else "checkpoints"
                yield self._improvement(f"{key}={2 * every}", f"half as many {what}", self.measured[name] / 2)
        apart = [(role, self.phase(f"update_{role}").waiting) for role in ("actor", "critic") if f"update_{role}" in self.measured]
        if waiting := sum(seconds for _, seconds in apart if seconds is not None and not config.train.balance):
            yield self._improvement("train.balance=true", "workers get micro-batches of equal cost", waiting)
        cut = line.get("response_length/clip_ratio", 0.0)
        if cut >= MANY_CUT and config.algorithm.name != "sft":
            half = max(1, config.rollout.max_new_tokens // 2)
            uncut = (line["response_length/mean"] - cut * config.rollout.max_new_tokens) / (1 - cut) if cut < 1 else 0.0
            shorter = cut * half + (1 - cut) * min(half, max(0.0, uncut))
            before = line["prompt_length/mean"] + line["response_length/mean"]
            left = (line["prompt_length/mean"] + shorter) / before
            of_tokens = sum(
                self.measured.get(name, 0.0) for name in ("gen", "old_log_prob", "ref", "values", "update_actor", "update_critic")
            )
            why = f"{cut:.0%} of the responses are cut at {config.rollout.max_new_tokens} tokens"
            saves = of_tokens * max(0.0, 1 - left)
            yield self._improvement(f"rollout.max_new_tokens={half}", why, saves, changes_results=True)

    @cached_property
    def changeable(self) -> ChangeableRun | None:
        """The run with its knobs to change; None: the models do not cover the run."""
        saved, run = self.saved, self.run
        if not (run and saved.config and saved.shape and saved.devices):
            return None
        planned = PlannedRun(saved.config, saved.shape, planned_cluster(saved.config, saved.devices), run.lengths.response)
        return ChangeableRun(planned, run)

    def _by_models(self, own: ChangeableRun) -> Iterator[Improvement]:
        """Yield changes of execution that leave results as they are, judged by the models of time and memory."""
        seen, most = {own.run}, 0.0
        all_decoded = not self.line.get("rollout/most_waiting", 1) and not self.line.get("rollout/preemptions")
        useless = OF_SEATS if all_decoded else frozenset()  # no sample has waited to be decoded
        for change in own.single():
            if change.keys <= useless or change.run in seen:
                continue
            seen.add(change.run)
            if found := self._weighed(change):
                most = max(most, found.share)
                yield found
        together = own.everything(without=useless)
        if together and (found := self._weighed(together)) and found.share > most + LEAST_GAIN:
            yield found

    @cached_property
    def _predicted(self) -> tuple[StepSeconds, MemoryModel]:
        assert self.run
        return step_seconds(self.run, self.line), memory_of(self.run)

    def _weighed(self, change: KnobChange) -> Improvement | None:
        """Return the improvement by a change; None: it saves nothing, or does not fit."""
        (seconds, held), needed = self._predicted, memory_of(change.run)
        if not needed.engine_starts or not self._fits(change.run, held, needed):
            return None
        before, after, saved = seconds.phases, step_seconds(change.run, self.line).phases, 0.0
        for phase in {*before, *after}:
            then, now = (found[phase].total if phase in found else 0.0 for found in (after, before))
            saved += self.measured.get(TIMING_NAMES.get(phase, ""), 0.0) * (1 - then / now) if now > 0 else -then
        if saved <= 0:
            return None
        grown = {name: (peak_of(needed, name) or 0) - (peak_of(held, name) or 0) for name in self.measured}
        most = max(grown, key=lambda name: grown[name], default="")
        taken = f"; {in_bytes(grown[most])} more memory in {PHASES[most]}" if most and grown[most] > 2**20 else ""
        return self._improvement(change.setting, change.why + taken, saved)

    def _fits(self, changed: RunDescription, before: MemoryModel, after: MemoryModel) -> bool:
        """Return whether the measured peaks fit the device together with the memory that the change adds."""
        for name in MEMORY_PHASES:
            then, now = peak_of(after, name), peak_of(before, name)
            if then is None:
                continue
            measured = self.line.get(f"memory_gib/{name}/peak")
            outside = sum(before.phases["update-actor"].kinds.get(kind, 0) for kind in NOT_ALLOCATED)
            expected = then if measured is None or now is None else measured * GIB + then - now
            if expected + outside > MEMORY_SHARE * changed.gpu.memory:
                return False
        return True
