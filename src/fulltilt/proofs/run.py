"""Running proofs: from names of knobs to records, and to a table for people.

Enters: the knobs that were asked for, and a device. Leaves: one record for each proof, in the order of the ledger. Guaranteed: a step that
several proofs share is run once; a proof that fails fails alone; what a CPU cannot show is null with the reason, and a setting that cannot
take effect there must be refused by the run itself, or it does not hold.
"""

from __future__ import annotations

import difflib
import gc
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.console import Group as Stacked
from rich.table import Table
from rich.text import Text

from fulltilt import knobs
from fulltilt.bench.rollout import choose_device
from fulltilt.cluster.assembly import assemble
from fulltilt.model.fuse import ROUNDING
from fulltilt.proofs import batches, rollout, training
from fulltilt.proofs.case import Base, Case
from fulltilt.proofs.record import REFUSED, Number, Proof, Record
from fulltilt.proofs.step import Step, watched_step
from fulltilt.proofs.world import ORIGIN, World
from fulltilt.records import UserError
from fulltilt.words import in_bytes, many

Say = Callable[[str], None]
OF_OUTPUTS = 1e-6  # difference of what roles say, which are float32, relative to its size
TIMES_SPREAD = 4  # a difference on CUDA may be so many times what re-runs differ by
LEARNERS = {"actor": "actor", "sft": "actor", "rollout": "actor", "critic": "critic"}  # the role whose gradient is compared


def all_proofs(world: World) -> list[Proof]:
    """In the order of the ledger."""
    places = {knob.name: place for place, knob in enumerate(knobs.LEDGER)}
    found = chain(rollout.proofs(world), batches.proofs(world), training.proofs(world))
    return sorted(found, key=lambda proof: places[proof.knob])


def provable(knob: knobs.Knob) -> bool:
    """Knobs under `algorithm` are part of the algorithm, which they are meant to change."""
    return (knob.built or not knob.legal) and not knob.name.startswith("algorithm.")


def choose(names: Sequence[str]) -> set[str]:
    """The knobs that names in any of the three spellings mean; without names, all. UserError for all that cannot be proved."""
    mistakes, chosen = [], set()
    for name in names:
        found = [knob for knob, _ in knobs.find_all(name) or knobs.find_by_end(name)]
        chosen |= {knob.name for knob in found if provable(knob)}
        mistakes += [f"{name}: {why_not(knob)}" for knob in found if not provable(knob)] if not any(map(provable, found)) else []
        if not found:
            mistakes.append(f"{name}: no such knob{near(name)}. `fulltilt knobs` lists all")
    if mistakes:
        raise UserError("\n".join(mistakes))
    return chosen or {knob.name for knob in knobs.LEDGER if provable(knob)}


def why_not(knob: knobs.Knob) -> str:
    if knob.name.startswith("algorithm."):
        return f"{knob.name} is part of the algorithm: it is meant to change what is learned, and there is nothing to prove"
    return f"{knob.name} is not built in this version, and setting it is an error"


def near(name: str) -> str:
    known = [knob.name for knob in knobs.LEDGER if provable(knob)]
    by_last = {known_name.rpartition(".")[2]: known_name for known_name in known}
    close = difflib.get_close_matches(name, known, 3, 0.6)
    close += [by_last[last] for last in difflib.get_close_matches(name.rpartition(".")[2], by_last, 3, 0.7)]
    return f"; near it are {', '.join(dict.fromkeys(close))}" if close else ""


def prove(names: Sequence[str] = (), device: str | None = None, say: Say = lambda text: None) -> Iterator[Record]:
    """The records of all proofs of these knobs, each as it is found; without names, of all."""
    chosen = choose(names)
    where = choose_device(device)
    with tempfile.TemporaryDirectory(prefix="fulltilt-prove-", ignore_cleanup_errors=True) as folder:
        world = World(where, Path(folder))
        yield from run([proof for proof in all_proofs(world) if proof.knob in chosen], world, say)


def run(proofs: Sequence[Proof], world: World, say: Say = lambda text: None) -> Iterator[Record]:
    steps = Steps(world, proofs, say)
    return (steps.record(proof) for proof in proofs)


# ---- steps, each run once --------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Evidence:
    """What is kept of a step."""

    failure: str | None = None  # why there is none
    refused: bool = False  # by the configuration or the parts of a run, with a remedy
    numbers: dict[int, Number] = field(default_factory=dict)  # by the place of its proof
    gradients: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    samples: tuple[tuple[int, ...], ...] = ()


class Steps:
    def __init__(self, world: World, proofs: Sequence[Proof], say: Say) -> None:
        self.world, self.say = world, say
        self._on_cuda = world.device.type == "cuda"
        self._found: dict[Case, Evidence] = {}
        self._places = {id(proof): place for place, proof in enumerate(proofs)}
        self._readers: dict[Case, list[Proof]] = {}
        for proof in proofs:
            for case in proof.cases if self._on_cuda or proof.needs_cuda is None else ():
                self._readers.setdefault(case, []).append(proof)
        self._spreads: dict[tuple[Base, str], float] = {}  # of re-runs, by what is compared
        self._to_come = {case: len(readers) for case, readers in self._readers.items()}

    def record(self, proof: Proof) -> Record:
        off, on, equal, holds, reason = self._judge(proof)
        for case in proof.cases:  # gradients of a large model are not kept for longer than they are needed
            self._to_come[case] = self._to_come.get(case, 1) - 1
            if self._to_come[case] == 0 and case.settings:
                self._found.pop(case, None)
        return Record(proof.knob, proof.role, proof.what.metric, proof.what.unit, off, on, equal, holds, reason)

    def evidence(self, case: Case) -> Evidence:
        if case not in self._found:
            self._found[case] = self._run(case)
        return self._found[case]

    def _judge(self, proof: Proof) -> tuple[Number | None, Number | None, bool | None, bool | None, str]:
        if not self._on_cuda and proof.needs_cuda is not None:
            holds, reason = self._without_cuda(proof)
            return None, None, None, holds, reason
        off, on = (self.evidence(case) for case in proof.cases)
        if proof.refuses_off:
            return self._only_value(proof, off, on)
        for side in (off, on):
            if side.failure is not None:
                return None, None, None, False, side.failure
        before, after = (side.numbers[self._places[id(proof)]] for side in (off, on))
        equal, same, about = self._compare(proof, off, on)
        changed = proof.changes(before, after)
        must = next(knob.must_change for knob in knobs.LEDGER if knob.name == proof.knob)
        reason = about if changed else f"it must change: {must}; {about}"
        return before, after, equal, changed and same, reason

    def _without_cuda(self, proof: Proof) -> tuple[bool | None, str]:
        """What a CPU cannot show, it must not accept either."""
        if proof.needs_cuda != REFUSED:
            return None, proof.needs_cuda or ""
        try:
            assemble(self.world.config(proof.cases[1])).close()
        except UserError as refusal:
            return None, in_words(refusal)
        return False, "a run on a CPU accepts it, although it can have no effect there"

    def _only_value(self, proof: Proof, off: Evidence, on: Evidence) -> tuple[Number | None, Number | None, None, bool, str]:
        if on.failure is not None or not off.refused:
            return None, None, None, False, on.failure or "the other value is accepted"
        after = on.numbers[self._places[id(proof)]]
        return 0, after, None, proof.changes(0, after), f"there is nothing to compare with: {off.failure}"

    # -- running ------------------------------------------------------------------------------------------------------------------------

    def _run(self, case: Case) -> Evidence:
        settings = ", ".join(f"{key} = {value}" for key, value in case.settings)
        self.say(f"a step of {case.base}: {settings or 'as it is'}")
        try:
            config = self.world.config(case)
            with watched_step(config, None if case.base == "rollout" else self.world.shape) as step:
                return self._read(case, step)
        except UserError as refusal:
            return Evidence(failure=in_words(refusal), refused=True)
        except Exception as error:  # a knob that breaks its step has failed, and the others are still to be looked at
            return Evidence(failure=f"the step failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        finally:
            gc.collect()
            if self._on_cuda:
                torch.cuda.empty_cache()

    def _read(self, case: Case, step: Step) -> Evidence:
        # First of all, for some reads run the models again.
        kept = Evidence(
            gradients={role: dict(found) for role, found in step.gradients.items()},
            outputs={role: step.said(role) for role in step.outputs},
            samples=tuple(step.samples),
        )
        kept.numbers = {self._places[id(proof)]: proof.what.read(step) for proof in self._readers.get(case, ())}
        return kept

    # -- comparing ----------------------------------------------------------------------------------------------------------------------

    def _compare(self, proof: Proof, off: Evidence, on: Evidence) -> tuple[bool | None, bool, str]:
        """Whether gradients are equal, whether all that must be equal is, and in words how far apart they are."""
        learner = LEARNERS.get(proof.role)
        if learner is None:
            found = gap_of_outputs(off, on, proof.role)
            allowed = self._allowed(proof, lambda one, other: gap_of_outputs(one, other, proof.role), OF_OUTPUTS)
            return None, found <= allowed, f"no gradient of its own; its outputs differ by {found:.1g} of their size, {allowed:.1g} may be"
        if off.samples != on.samples:
            unlike = sum(one != other for one, other in zip(off.samples, on.samples, strict=False))
            return False, False, f"{unlike} of {len(on.samples)} samples have other tokens"
        found = gap_of_gradients(off, on, learner)
        allowed = self._allowed(proof, lambda one, other: gap_of_gradients(one, other, learner), proof.exact)
        return found <= allowed, found <= allowed, f"gradients differ by {found:.1g} of their size, {allowed:.1g} may be"

    def _allowed(self, proof: Proof, gap: Callable[[Evidence, Evidence], float], exact: float) -> float:
        """On CUDA, some times what the same step differs by when it is run again, and when each sample runs alone."""
        if not self._on_cuda:
            return exact
        if (proof.base, proof.role) not in self._spreads:
            # A large model's gradients differ no more than a small one's.
            plain = Case.of(proof.base)
            spread = [gap(self.evidence(plain), self.evidence(other)) for other in self._re_runs(proof.base)]
            self._spreads[proof.base, proof.role] = max((one for one in spread if math.isfinite(one)), default=0.0)  # a re-run may fail
        dtype = torch.float32 if proof.base == "rollout" else torch.bfloat16
        return max(TIMES_SPREAD * self._spreads[proof.base, proof.role], ROUNDING[dtype])

    def _re_runs(self, base: Base) -> Iterator[Case]:
        yield Case(base, again=1)
        roles = {"ppo": ("actor", "critic", "ref", "reward_model"), "sft": ("actor",), "rollout": ("actor", "reward_model")}[base]
        yield Case.of(base, *({f"{role}.dynamic_batch": False, f"{role}.micro_batch": 1} for role in roles))


def in_words(refusal: UserError) -> str:
    """In one line, without the number that a configuration gives to its only mistake."""
    return " ".join(str(refusal).removeprefix(f"{ORIGIN}: 1 mistake").split()).removeprefix("1. ")


def gap_of_gradients(one: Evidence, other: Evidence, role: str) -> float:
    """The norm of the difference relative to the norm; endless where other parameters have a gradient, or none has any."""
    if one.failure or other.failure or one.gradients[role].keys() != other.gradients[role].keys():
        return float("inf")
    # ScoredGroup on the host, so that they are in nobody's bytes, and compared where that is fast: of a large model it takes seconds there.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = apart = 0.0
    for name, gradient in one.gradients[role].items():
        own, found = (kept.to(device).double() for kept in (gradient, other.gradients[role][name]))
        size += float(own.square().sum())
        apart += float((own - found).square().sum())
    return math.sqrt(apart / size) if size else float("inf")


def gap_of_outputs(one: Evidence, other: Evidence, role: str) -> float:
    if one.failure or other.failure:
        return float("inf")
    own, found = one.outputs[role].astype(np.float64), other.outputs[role].astype(np.float64)
    if own.shape != found.shape:
        return float("inf")
    return float(np.linalg.norm(own - found)) / max(float(np.linalg.norm(own)), 1e-300)


# ---- for people ------------------------------------------------------------------------------------------------------------------------

WORDS = {True: ("holds", "green"), False: ("DOES NOT HOLD", "bold red"), None: ("not here", "yellow")}
EQUAL = {True: "equal", False: "DIFFER", None: "-"}


WIDTH = 150  # where nobody's terminal says


def show(records: Sequence[Record]) -> None:
    console = Console()
    Console(width=None if console.is_terminal else WIDTH).print(table(records))


def table(records: Sequence[Record]) -> Stacked:
    """Grouped by section of the ledger; below each knob what it must change."""
    sections = dict.fromkeys(knob.section for knob in knobs.LEDGER)
    parts: list[Any] = []
    for section in sections:
        own = {knob.name: knob for knob in knobs.LEDGER if knob.section == section}
        if shown := [record for record in records if record.knob in own]:
            parts += [section_table(section, own, shown), ""]
    counts = {value: sum(record.holds is value for record in records) for value in (True, False, None)}
    parts.append(
        f"{many(len(records), 'proof')}: {counts[True]} hold, {counts[False]} do not, {counts[None]} cannot be shown on this machine"
    )
    return Stacked(*parts)


def section_table(section: str, own: dict[str, knobs.Knob], records: Iterable[Record]) -> Table:
    found = Table(title=section, title_justify="left", show_edge=False, pad_edge=False)
    for name in ("knob", "role", "what changes", "off", "on", "gradients", ""):
        found.add_column(name, justify="right" if name in ("off", "on") else "left", overflow="fold")
    before = ""
    for record in records:
        word, style = WORDS[record.holds]
        if record.knob != before:
            found.add_row(Text(record.knob, "bold"), "", Text(f"must change: {own[record.knob].must_change}", "dim"))
        before = record.knob
        numbers = (shown(record.off, record.unit), shown(record.on, record.unit))
        found.add_row("", record.role, record.metric, *numbers, EQUAL[record.gradients_equal], Text(word, style))
        if record.holds is not True:
            found.add_row("", "", Text(record.reason, style))
    return found


def shown(number: Number | None, unit: str) -> str:
    if number is None:
        return "-"
    if unit == "bytes":
        return in_bytes(number)
    return f"{number:.0%}" if unit == "share" else f"{number:,.4g}" if isinstance(number, float) else f"{number:,}"
