"""What a proof is, and what comes out of it.

Enters: nothing. Leaves: `ProofCase`, one knob set two ways and the measurement that must change; `ProofResult`, the outcome, as `--json`
prints it. Guaranteed: a result says `holds` true or false, or null with the reason why this machine cannot tell.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fulltilt.proofs.setup import Settings, StepKey, StepKind, step_key
from fulltilt.proofs.step import WatchedStep

Number = float | int
Change = Callable[[Number, Number], bool]  # (off, on) -> whether the measurement changed as it must
GRADIENT_TOLERANCE = 1e-9  # in float64, relative to the norm of the gradient
REFUSED = "a run on the CPU refuses the setting"


# ---- how a measurement must change, from `off` to `on` -----------------------------------------------------------------------------------

fewer: Change = operator.gt  # off > on
more: Change = operator.lt  # off < on


def to_zero(off: Number, on: Number) -> bool:
    return on == 0 < off


def from_zero(off: Number, on: Number) -> bool:
    return off == 0 < on


def to_less_than_half(off: Number, on: Number) -> bool:
    return 2 * on < off


def within(first: Number, second: Number) -> Change:
    """The knob is a limit on the measurement: both steps keep theirs, and the step with the higher limit exceeds the lower one."""
    low, high = sorted((first, second))
    return lambda off, on: min(off, on) <= low < max(off, on) <= high and (off < on) == (first < second)


# ---- records ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """A number, and how to read it from a step that has just run, for one of its roles."""

    metric: str
    unit: str  # "bytes" and "share" are formatted as such, all others as plain numbers
    read: Callable[[WatchedStep, str], Number]

    def where(self, words: str) -> Measurement:
        """The same measurement with its circumstances named: "micro-batches" -> "micro-batches, fused"."""
        return replace(self, metric=f"{self.metric}, {words}")


@dataclass(frozen=True, eq=False)
class ProofCase:
    """Two steps that differ in one knob: the measurement must change between them, and all that the role computes must stay equal.

    Example: ProofCase("rollout.max_seqs", "rollout", measure.MOST_RUNNING, off=4, on=16, changes=within(4, 16))
    """

    knob: str
    role: str  # actor, critic, ref or reward_model of a PPO step; "sft", the actor of an SFT step; "rollout", the engine
    measurement: Measurement
    off: Any = False  # the knob's value in the first step, or a mapping of several settings
    on: Any = True
    both: Settings = field(default_factory=dict)  # further settings of both steps
    changes: Change = fewer
    needs_cuda: str | None = None  # why a CPU cannot show it; REFUSED: a run there must refuse the setting, and its message says why
    tolerance: float = GRADIENT_TOLERANCE
    off_is_refused: bool = False  # every run refuses the first setting: its measurement counts as 0

    @property
    def kind(self) -> StepKind:
        return "sft" if self.role == "sft" else "rollout" if self.role == "rollout" else "ppo"

    @property
    def model_role(self) -> str:
        """The role of the run whose model is measured and whose gradients or outputs are compared."""
        return "actor" if self.role in ("sft", "rollout") else self.role

    @property
    def steps(self) -> tuple[StepKey, StepKey]:
        off, on = (value if isinstance(value, Mapping) else {self.knob: value} for value in (self.off, self.on))
        return step_key(self.kind, self.both, off), step_key(self.kind, self.both, on)

    def result(
        self, holds: bool | None, reason: str, off: Number | None = None, on: Number | None = None, equal: bool | None = None
    ) -> ProofResult:
        return ProofResult(self.knob, self.role, self.measurement.metric, self.measurement.unit, off, on, equal, holds, reason)


@dataclass(frozen=True)
class ProofResult:
    knob: str
    role: str
    metric: str
    unit: str
    off: Number | None
    on: Number | None
    gradients_equal: bool | None  # null: the role has no gradient and its outputs were compared, or nothing could run here
    holds: bool | None
    reason: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
