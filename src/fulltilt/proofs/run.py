"""The runner of proofs: from names of knobs to results.

Enters: the requested knobs, and a device. Leaves: one result for each proof, in the order of the ledger, and a table of results.
Guaranteed: a step that several proofs share is run once; the failure of a proof does not affect others; a proof that this machine cannot
show is null with the reason, and a setting without effect on it must be refused by the run itself, or its proof does not hold.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from fulltilt import knobs
from fulltilt.bench.device import choose_device
from fulltilt.bench.report import Say
from fulltilt.config import nearest
from fulltilt.model.fuse import ROUNDING
from fulltilt.observe.metrics import Number
from fulltilt.proofs.cases import REFUSED, ProofCase, all_cases
from fulltilt.proofs.setup import ORIGIN, CannotBeShown, ProofSetup, StepKey, StepKind, step_key
from fulltilt.proofs.step import watched_step
from fulltilt.records import UserError
from fulltilt.words import in_bytes, many, printable

OUTPUT_TOLERANCE = 1e-6  # outputs are float32; relative to their norm
TIMES_SPREAD = 4  # on CUDA, allowed difference as a multiple of that between re-runs of a step
ROLES = {"ppo": ("actor", "critic", "ref", "reward_model"), "sft": ("actor",), "rollout": ("actor", "reward_model")}


@dataclass(frozen=True)
class ProofResult:
    """The outcome of a proof, as `--json` prints it."""

    knob: str
    role: str
    metric: str
    unit: str
    off: Number | None
    on: Number | None
    gradients_equal: bool | None  # null: the role has no gradient and its outputs were compared, or no step could run here
    holds: bool | None  # null: this machine cannot tell
    reason: str


def prove(names: Sequence[str] = (), device: str | None = None, say: Say = lambda text: None) -> Iterator[ProofResult]:
    """Yield the results of all proofs of these knobs, each as soon as it is known; without names, of all knobs."""
    chosen = choose(names)
    where = choose_device(device)
    with contextlib.ExitStack() as until_the_end:
        folder = until_the_end.enter_context(tempfile.TemporaryDirectory(prefix="fulltilt-prove-", ignore_cleanup_errors=True))
        setup = until_the_end.enter_context(contextlib.closing(ProofSetup(where, Path(folder))))
        yield from ProofRunner(setup, [case for case in all_cases(setup) if case.knob in chosen], say).results()


# ---- names -----------------------------------------------------------------------------------------------------------------------------


def provable(knob: knobs.Knob) -> bool:
    """Return whether a knob can be proved. Knobs under `algorithm` are part of the algorithm, which they are meant to change."""
    return (knob.built or not knob.legal) and not knob.name.startswith("algorithm.")


def choose(names: Sequence[str]) -> set[str]:
    """Return the knobs that names in any of the three spellings mean; without names, all. Raises UserError for those that cannot be
    proved."""
    known = [knob.name for knob in knobs.LEDGER if provable(knob)]
    mistakes, chosen = [], set()
    for name in names:
        found = [knob for knob, _ in knobs.find(name)]
        if can_be := {knob.name for knob in found if provable(knob)}:
            chosen |= can_be
        else:
            near = f"; the nearest is {best}" if (best := nearest(name, known)) else ""
            unknown = f"{name}: unknown knob{near}. `fulltilt knobs` lists all of them"
            mistakes += [f"{name}: {'' if knob.name == name else f'{knob.name} '}{why_not(knob)}" for knob in found] or [unknown]
    if mistakes:
        raise UserError("\n".join(mistakes))
    return chosen or set(known)


def why_not(knob: knobs.Knob) -> str:
    if knob.name.startswith("algorithm."):
        return "is part of the algorithm: it is meant to change what is learned, so there is nothing to prove"
    return "is not built in this version, and setting it is an error"


# ---- steps, each run once --------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class StepEvidence:
    """The part of a step that is kept after its parts are closed."""

    failure: str | None = None  # why the step has no other results
    refused: bool = False  # the failure is a UserError, which names a remedy
    lacking: bool = False  # the cause is something that this machine lacks
    numbers: dict[ProofCase, Number] = field(default_factory=dict)
    results: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)  # role -> gradients, or outputs if it does not learn
    samples: list[tuple[int, ...]] = field(default_factory=list)


class ProofRunner:
    def __init__(self, setup: ProofSetup, cases: Sequence[ProofCase], say: Say = lambda text: None) -> None:
        self.setup, self.cases, self.say = setup, cases, say
        self._on_cuda = setup.device.type == "cuda"
        self._evidence: dict[StepKey, StepEvidence] = {}
        self._readers: dict[StepKey, list[ProofCase]] = {}  # the proofs that still need each step
        for case in cases:
            for step in case.steps if self._can_run(case) else ():
                self._readers.setdefault(step, []).append(case)
        setup.pool.size = max((dict(settings).get("cluster.workers", 1) for _, settings in self._readers), default=1)
        self._spreads: dict[StepKind, dict[str, float]] = {}  # differences between re-runs, for each role

    def results(self) -> Iterator[ProofResult]:
        for case in self.cases:
            yield self._judge(case) if self._can_run(case) else self._without_cuda(case)
            for step in case.steps if self._can_run(case) else ():
                self._readers[step].remove(case)
                # Gradients of a large model are kept only as long as they are needed; the default step is used again.
                if not self._readers[step] and step[1]:
                    self._evidence.pop(step, None)

    def evidence(self, step: StepKey) -> StepEvidence:
        if step not in self._evidence:
            self._evidence[step] = self._run(step, self._readers.get(step, ()))
        return self._evidence[step]

    def _can_run(self, case: ProofCase) -> bool:
        return self._on_cuda or case.needs_cuda is None

    def _without_cuda(self, case: ProofCase) -> ProofResult:
        """Judge a setting without effect on a CPU: a run there must refuse it."""
        if case.needs_cuda != REFUSED:
            return result(case, None, case.needs_cuda or "")
        on = self.evidence(case.steps[1])
        if not on.refused:
            return result(case, False, on.failure or "a run on a CPU accepts the setting, although it has no effect there")
        return result(case, None, on.failure or "")

    def _judge(self, case: ProofCase) -> ProofResult:
        off, on = (self.evidence(step) for step in case.steps)
        if case.off_is_refused:
            if on.failure is not None or not off.refused:
                return result(case, False, on.failure or "the other value is accepted, although it must be refused")
            number = on.numbers[case]
            return result(case, case.changed(0, number), f"there is no second step to compare with: {off.failure}", 0, number)
        if (failure := off.failure or on.failure) is not None:
            return result(case, None if off.lacking or on.lacking else False, failure)
        before, after = off.numbers[case], on.numbers[case]
        equal, words = self._compare(case, off, on)
        changed = case.changed(before, after)
        if not changed:
            must = next(knob.must_change for knob in knobs.LEDGER if knob.name == case.knob)
            words = f"the knob must change this: {must}; {words}"
        return result(case, changed and equal, words, before, after, equal if case.learns else None)

    def _run(self, step: StepKey, readers: Sequence[ProofCase] = ()) -> StepEvidence:
        kind, settings = step
        self.say(f"running one {kind} step with {', '.join(f'{key} = {value}' for key, value in settings) or 'default settings'}")
        try:
            given = None if kind == "rollout" else self.setup.response
            with watched_step(self.setup.config(step), given, self.setup.pool.start) as seen:
                numbers = {case: case.measurement.read(seen, case.model_role) for case in readers}
                return StepEvidence(numbers=numbers, results=seen.results, samples=seen.samples)
        except CannotBeShown as lack:
            return StepEvidence(failure=str(lack), lacking=True)
        except UserError as refusal:
            return StepEvidence(failure=one_line(refusal), refused=True)
        except Exception as error:  # a knob that breaks its step has failed; the other proofs continue
            return StepEvidence(failure=f"the step failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        finally:
            gc.collect()
            if self._on_cuda:
                torch.cuda.empty_cache()

    def _compare(self, case: ProofCase, off: StepEvidence, on: StepEvidence) -> tuple[bool, str]:
        """Return whether all results that must be equal are equal, and in words how large the difference is."""
        role = case.model_role
        if case.learns and off.samples != on.samples:
            unlike = sum(one != other for one, other in zip(off.samples, on.samples, strict=False))
            return False, f"{unlike} of {len(on.samples)} samples have different tokens"
        found = difference(off, on, role)
        allowed = self._allowed(case.kind, role) if self._on_cuda else case.tolerance if case.learns else OUTPUT_TOLERANCE
        what = "gradients" if case.learns else "the role has no gradient; its outputs"
        return found <= allowed, f"{what} differ by {found:.1g} relative to their norm; {allowed:.1g} is allowed"

    def _allowed(self, kind: StepKind, role: str) -> float:
        """Return the difference allowed on CUDA: a multiple of that between runs of the same step, and with each sample in its own
        micro-batch."""
        if kind not in self._spreads:
            # A large model's gradients differ no more than a small one's.
            plain = self.evidence(step_key(kind))
            alone = step_key(kind, *({f"{role}.dynamic_batch": False, f"{role}.micro_batch": 1} for role in ROLES[kind]))
            others = (self._run(step_key(kind)), self.evidence(alone))
            self._spreads[kind] = {
                role: max(filter(math.isfinite, (difference(plain, other, role) for other in others)), default=0.0)  # a re-run may fail
                for role in plain.results
            }
        dtype = torch.float32 if kind == "rollout" else torch.bfloat16
        return max(TIMES_SPREAD * self._spreads[kind].get(role, 0.0), ROUNDING[dtype])


def result(
    case: ProofCase, holds: bool | None, reason: str, off: Number | None = None, on: Number | None = None, equal: bool | None = None
) -> ProofResult:
    return ProofResult(case.knob, case.role, case.measurement.metric, case.measurement.unit, off, on, equal, holds, reason)


def one_line(refusal: UserError) -> str:
    """Write the message in one line, without the number that a configuration gives to its only mistake."""
    return " ".join(str(refusal).removeprefix(f"{ORIGIN}: 1 mistake").split()).removeprefix("1. ")


def difference(one: StepEvidence, other: StepEvidence, role: str) -> float:
    """Return the norm of the difference of a role's results relative to their norm; infinite if names or sizes differ, or all are 0."""
    own, found = one.results.get(role, {}), other.results.get(role, {})
    if {name: tensor.shape for name, tensor in own.items()} != {name: tensor.shape for name, tensor in found.items()}:
        return math.inf
    # Results are kept on the host, so that they do not count as device memory, and compared where that is fast.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = apart = 0.0
    for name, tensor in own.items():
        expected, seen = (kept.to(device).double() for kept in (tensor, found[name]))
        size += float(expected.square().sum())
        apart += float((expected - seen).square().sum())
    return math.sqrt(apart / size) if size else math.inf


# ---- the table for people ----------------------------------------------------------------------------------------------------------------

VERDICTS = {True: ("holds", "green"), False: ("DOES NOT HOLD", "bold red"), None: ("not shown here", "yellow")}
EQUAL = {True: "equal", False: "DIFFER", None: "-"}
WIDTH = 150  # columns if standard output is not a terminal and COLUMNS is not set


def show(results: Sequence[ProofResult]) -> None:
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    console.print(table(results))


def table(results: Sequence[ProofResult]) -> Group:
    """Return a table of all results, by section. The measurement that a knob must change is printed below it."""
    found = Table(show_edge=False, pad_edge=False)
    for name in ("knob", "role", "measurement", "off", "on", "gradients", ""):
        found.add_column(name, justify="right" if name in ("off", "on") else "left", overflow="fold")
    section = ""
    for knob in knobs.LEDGER:
        chosen = [result for result in results if result.knob == knob.name]
        if chosen and knob.section != section:
            section = knob.section
            found.add_section()
            found.add_row(Text(section, "italic"))
        if chosen:
            found.add_row(Text(knob.name, "bold"), "", Text(f"must change: {knob.must_change}", "dim"))
        for result in chosen:
            verdict, style = VERDICTS[result.holds]
            numbers = (shown(result.off, result.unit), shown(result.on, result.unit))
            found.add_row("", result.role, result.metric, *numbers, EQUAL[result.gradients_equal], Text(verdict, style))
            if result.holds is not True:
                found.add_row("", "", Text(printable(result.reason), style))
    counts = {value: sum(result.holds is value for result in results) for value in VERDICTS}
    words = f"{many(len(results), 'proof')}: {counts[True]} hold, {counts[False]} do not hold, {counts[None]} cannot be shown here"
    return Group(found, "", words)


def shown(number: Number | None, unit: str) -> str:
    if number is None:
        return "-"
    if unit == "bytes":
        return in_bytes(number)
    return f"{number:.0%}" if unit == "share" else f"{number:,.4g}" if isinstance(number, float) else f"{number:,}"
