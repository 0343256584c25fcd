"""What a proof is, and what it leaves.

Enters: nothing. Leaves: `Proof`, one knob with two settings and the number that must change between them, and `Record`, what was found.
Guaranteed: a record says `holds` is true or false, or null with the reason why this machine cannot tell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from fulltilt.proofs.case import Base, Case, Settings
from fulltilt.proofs.step import Step

Unit = Literal["bytes", "tokens", "samples", "micro-batches", "share", "lines", "metrics", "launches", "kernels", "operations"]
Number = float | int
EXACT = 1e-9
REFUSED = ""


@dataclass(frozen=True)
class Record:
    """One finding, as `--json` prints it."""

    knob: str
    role: str
    metric: str
    unit: str
    off: Number | None
    on: Number | None
    gradients_equal: bool | None  # null: the role has no gradient, and its outputs were compared; or nothing could run here
    holds: bool | None
    reason: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def fewer(off: Number, on: Number) -> bool:
    return on < off


def more(off: Number, on: Number) -> bool:
    return on > off


def none_left(off: Number, on: Number) -> bool:
    return on == 0 < off


def within(first: Number, second: Number) -> Callable[[Number, Number], bool]:
    """Two caps: the lower one is kept by its side, and the other side, under its own, goes beyond it."""
    low, high = sorted((first, second))
    return lambda off, on: min(off, on) <= low < max(off, on) <= high and (off < on) == (first < second)


@dataclass(frozen=True)
class What:
    """A number, and how to read it from a step that has just run."""

    metric: str
    unit: Unit
    read: Callable[[Step], Number]

    def where(self, words: str) -> What:
        """The same number under a longer name: "micro-batches" -> "micro-batches, fused"."""
        return replace(self, metric=f"{self.metric}, {words}")


@dataclass(frozen=True)
class Sides:
    """Two settings that differ in a knob: off and on of a switch, two values of a number."""

    off: Settings
    on: Settings
    shared: Settings = field(default_factory=dict)  # on both sides

    @staticmethod
    def switch(knob: str, shared: Settings | None = None) -> Sides:
        return Sides({knob: False}, {knob: True}, shared or {})


@dataclass(frozen=True)
class Proof:
    """A knob both ways, and the number that must change."""

    knob: str
    role: str
    what: What
    sides: Sides
    changes: Callable[[Number, Number], bool] = fewer
    base: Base = "ppo"
    needs_cuda: str | None = None  # why a CPU cannot show it; REFUSED: the run itself refuses the setting there, and says why
    exact: float = EXACT  # difference of gradients in float64, relative to their size, that is none
    refuses_off: bool = False  # the other value is refused everywhere: it counts as 0

    @property
    def cases(self) -> tuple[Case, Case]:
        """The steps to run."""
        sides = self.sides
        return Case.of(self.base, sides.shared, sides.off), Case.of(self.base, sides.shared, sides.on)
