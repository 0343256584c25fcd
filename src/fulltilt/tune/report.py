"""What the models say of one run, for people and as JSON, and the cheapest ways to make it fit.

Enters: a `RunDescription`, and for fulltilt's own runs the knobs and reasons of plan.py. Leaves: lines, or a mapping with `fits`, `memory`,
`step_seconds`, `binds`, `knobs`, `reasons` and `remedies`. Guaranteed: arithmetic alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fulltilt.records import UserError
from fulltilt.shape import Recompute
from fulltilt.tune.description import RunDescription
from fulltilt.tune.memory_model import MemoryModel, memory_of
from fulltilt.tune.time_model import StepSeconds, seconds_of
from fulltilt.words import in_bytes

MOST_REMEDIES = 3
# What binds a phase, by the cause that takes most of its time.
BINDS = {
    "products": "compute", "attention": "compute", "head": "compute", "prefill": "compute", "memory traffic": "HBM", "weights": "HBM",
    "keys and values": "HBM", "sampling": "HBM", "optimizer": "HBM", "offload": "PCIe", "collectives": "network",
    "collectives in layers": "network", "gathering parameters": "network", "launches": "host", "unfused positions": "host",
    "scheduling": "host", "scoring": "host", "handing out rows": "host", "gathering rows": "host", "parameters to the engine": "host",
    "pipeline bubble": "waiting",
}  # fmt: skip


@dataclass(frozen=True)
class Remedy:
    """A change with which a run fits, and how long its step then takes."""

    words: str
    seconds: float


@dataclass(frozen=True)
class PlanReport:
    run: RunDescription
    memory: MemoryModel
    seconds: StepSeconds
    knobs: Mapping[str, Any] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    refused: str = ""

    @property
    def fits(self) -> bool:
        return self.memory.fits and not self.refused

    @property
    def why_not(self) -> list[str]:
        return [*self.memory.reasons, *([self.refused] if self.refused else [])]

    def as_json(self) -> dict[str, Any]:
        phases = self.seconds.phases
        return {
            "fits": self.fits,
            "memory": self.memory.as_json(),
            "step_seconds": {name: round(phase.total, 3) for name, phase in phases.items()} | {"step": round(self.seconds.total, 3)},
            "causes": {name: {cause: round(seconds, 3) for cause, seconds in phase.causes.items()} for name, phase in phases.items()},
            "binds": {name: BINDS[phase.binds] for name, phase in phases.items()},
            "knobs": dict(self.knobs),
            "reasons": [*self.reasons, *self.why_not],
            "remedies": [{"change": remedy.words, "step_seconds": round(remedy.seconds, 3)} for remedy in self.remedies()],
        }

    def remedies(self) -> list[Remedy]:
        return [] if self.fits else ways_to_fit(self.run)[:MOST_REMEDIES]

    def lines(self) -> Iterator[str]:
        run = self.run
        yield f"{run.cluster.gpus} x {run.gpu.name} with {in_bytes(run.gpu.memory)}, {run.lengths.response:.0f} response tokens on average"
        for name, phase in self.memory.phases.items():
            kinds = ", ".join(
                f"{kind} {in_bytes(count)}" for kind, count in sorted(phase.kinds.items(), key=lambda item: -item[1]) if count
            )
            yield f"memory in {name}: {in_bytes(phase.total)} {'fits' if phase.fits else 'DOES NOT FIT'} ({kinds})"
        for name, seconds in self.seconds.phases.items():
            causes = ", ".join(f"{cause} {each:.1f}" for cause, each in sorted(seconds.causes.items(), key=lambda item: -item[1])[:4])
            yield f"{name}: {seconds.total:.1f} s, bound by {BINDS[seconds.binds]} ({causes})"
        yield f"step: {self.seconds.total:.1f} s, {run.tokens / self.seconds.total / run.cluster.gpus:.0f} tokens/s for each GPU"
        yield from self.reasons
        if not self.fits:
            yield "it does not fit: " + "; ".join(self.why_not)
            found = self.remedies()
            yield from (f"it would fit with {remedy.words}: {remedy.seconds:.1f} s a step" for remedy in found)
            if not found:
                yield "no single change or pair of changes makes it fit: use more GPUs, or GPUs with more memory"


def report_of(run: RunDescription, knobs: Mapping[str, Any] | None = None, reasons: tuple[str, ...] = (), refused: str = "") -> PlanReport:
    return PlanReport(run, memory_of(run), seconds_of(run), knobs or stated(run), reasons, refused)


def stated(run: RunDescription) -> dict[str, Any]:
    """The knobs of a run that is described by hand."""
    found = {f"train.{name}": value for name, value in vars(run.layout).items() if value > 1}
    found |= {"train.recompute": run.recompute.kind, "rollout.tensor_parallel": run.engine.tensor}
    found |= {"rollout.memory_fraction": run.engine.memory_share, "rollout.cuda_graphs": run.engine.graphs}
    offloads = {name: getattr(run, f"offload_{name}") for name in ("params", "grads", "optimizer")}
    return found | {f"train.offload_{name}": value for name, value in offloads.items()}


# ---- ways to fit -------------------------------------------------------------------------------------------------------------------


def changes(run: RunDescription) -> Iterator[tuple[str, RunDescription]]:
    """Single changes that take less memory and leave the results as they are."""
    if not run.offload_optimizer:
        yield "the optimizer offloaded", replace(run, offload_optimizer=True)
    if not (run.offload_params and run.offload_grads and run.offload_optimizer):
        everything = replace(run, offload_optimizer=True, offload_params=True, offload_grads=True)
        yield "parameters, gradients and optimizer offloaded", everything
    if run.recompute.kind != "full":
        yield "full recompute", replace(run, recompute=Recompute("full"))
    if run.batch.token_budget and run.batch.token_budget > 2 * run.lengths.longest_row // 2:
        half = replace(run.batch, token_budget=run.batch.token_budget // 2)
        yield f"a token budget of {half.token_budget}", replace(run, batch=half)
    if not run.fused_head:
        yield "a fused head", replace(run, fused_head=True)
    for share in (0.5, 0.4, 0.3):
        if share < run.engine.memory_share:
            yield f"{share} of the memory for the engine", replace(run, engine=replace(run.engine, memory_share=share))
    if run.engine.own_copy and run.engine.tensor * 2 <= min(run.cluster.gpus, run.cluster.per_machine):
        yield (
            f"rollout tensor parallelism of {2 * run.engine.tensor}",
            replace(run, engine=replace(run.engine, tensor=2 * run.engine.tensor)),
        )
    if run.backend == "megatron" and run.data % 2 == 0 and run.layout.tensor * 2 <= run.cluster.per_machine:
        wider = replace(run.layout, tensor=2 * run.layout.tensor)
        yield f"tensor parallelism of {wider.tensor}", replace(run, layout=wider)
    for factor in (2, 4, 8):
        more = run.cluster.gpus * factor
        yield f"{more} GPUs", replace(run, cluster=replace(run.cluster, gpus=more))


def ways_to_fit(run: RunDescription) -> list[Remedy]:
    """Changes, or pairs of them, with which it fits: those on the same GPUs first, then the fastest."""
    found: list[tuple[bool, float, str]] = []
    for words, changed in safe_changes(run):
        if memory_of(changed).fits:
            found.append((changed.cluster.gpus > run.cluster.gpus, seconds_of(changed).total, words))
    if not any(not more for more, _, _ in found):
        for words, changed in safe_changes(run):
            for other, twice in safe_changes(changed):
                if twice.cluster.gpus == run.cluster.gpus and memory_of(twice).fits:
                    found.append((False, seconds_of(twice).total, f"{words} and {other}"))
    return [Remedy(words, seconds) for _, seconds, words in sorted(found)]


def safe_changes(run: RunDescription) -> Iterator[tuple[str, RunDescription]]:
    try:
        yield from changes(run)
    except UserError:  # a layout that the model cannot have
        return
