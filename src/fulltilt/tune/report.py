"""Reports of the models' predictions for one run, for people and as JSON, and the cheapest ways to make it fit.

Enters: a `RunDescription`, and for fulltilt's own runs the knobs and reasons of fulltilt.plan. Leaves: lines, or a mapping with `fits`,
`model`, `memory`, `step_seconds`, `causes`, `binds`, `knobs`, `reasons`, `runners_up` and `remedies`. Guaranteed: arithmetic alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fulltilt.shape import Recompute
from fulltilt.tune.description import RunDescription, wrong_layout
from fulltilt.tune.memory_model import MemoryModel, memory_of, parameters
from fulltilt.tune.own import own_plan
from fulltilt.tune.runners_up import PlannedRun, Remedy, RunnerUp, in_seconds, remedies, runners_up, told
from fulltilt.tune.shapes import name_of
from fulltilt.tune.time_model import PhaseSeconds, StepSeconds, seconds_of
from fulltilt.words import in_bytes, joined, many

MOST_REMEDIES, MOST_CHANGES = 3, 5  # remedies that are reported, and changes in one of them
CLOSEST = 12  # changed runs that are changed further
# The resource that binds a phase, by the cause that takes most of its time.
BINDS = {
    "products": "compute", "attention": "compute", "head": "compute", "prefill": "compute", "memory traffic": "HBM", "weights": "HBM",
    "keys and values": "HBM", "gradient sums": "HBM", "sampling": "HBM", "optimizer": "HBM", "offload": "PCIe", "collectives": "network",
    "collectives in layers": "network", "gathering parameters": "network", "launches": "host", "unfused positions": "host",
    "scheduling": "host", "scoring": "host", "records": "host", "handing out rows": "host", "gathering rows": "host",
    "parameters to the engine": "host", "launches of prompts": "host", "pipeline bubble": "waiting",
    "uneven stages": "waiting", "short kernels": "latency",
}  # fmt: skip


@dataclass(frozen=True)
class PlanReport:
    run: RunDescription
    memory: MemoryModel
    seconds: StepSeconds
    knobs: Mapping[str, Any] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    refused: str = ""
    why: Mapping[str, str] = field(default_factory=dict)  # reason of each knob, if fulltilt.plan decides
    runners_up: Mapping[str, RunnerUp] = field(default_factory=dict)
    planned: PlannedRun | None = None  # the planned run, if fulltilt.plan decides

    @property
    def fits(self) -> bool:
        return self.memory.fits and not self.refused

    @property
    def model(self) -> str | None:
        """The well-known name of the planned shape, so that the user notices if a name was understood as another."""
        return name_of(self.run.shape)

    @property
    def why_not(self) -> list[str]:
        """Why the run does not fit. Where fulltilt.plan refuses it, no KV cache was planned."""
        return [*self.memory.full_phases, self.refused] if self.refused else self.memory.reasons

    def as_json(self) -> dict[str, Any]:
        phases = self.seconds.phases
        return {
            "fits": self.fits,
            "model": {"name": self.model, "parameters": parameters(self.run.shape).total},
            "memory": self.memory.as_json(),
            "step_seconds": {name: round(phase.total, 3) for name, phase in phases.items()} | {"step": round(self.seconds.total, 3)},
            "causes": {name: {cause: round(seconds, 3) for cause, seconds in phase.causes.items()} for name, phase in phases.items()},
            "binds": {name: self.binds(phase) for name, phase in phases.items()},
            "knobs": dict(self.knobs),
            "reasons": [*self.reasons, *self.knob_reasons.values(), *self.why_not],
            "runners_up": {knob: own.as_json() for knob, own in self.runners_up.items()},
            "remedies": [{"change": remedy.words, "step_seconds": round(remedy.seconds, 3)} for remedy in self.remedies()],
        }

    def binds(self, phase: PhaseSeconds) -> str:
        """Return the resource that binds a phase; a CPU reads and writes main memory."""
        found = BINDS[phase.binds]
        return "memory" if found == "HBM" and self.run.gpu.is_cpu else found

    def remedies(self) -> list[Remedy]:
        if self.fits:
            return []
        return (remedies(self.planned) if self.planned else ways_to_fit(self.run))[:MOST_REMEDIES]

    @property
    def knob_reasons(self) -> dict[str, str]:
        return {knob: f"{knob} = {told(knob, self.knobs[knob])}: {why}" for knob, why in self.why.items()}

    def knob_lines(self) -> Iterator[str]:
        """Yield each knob that `auto` or the user decides, with the reason and the runner-up."""
        seconds = self.seconds.total
        for knob, line in self.knob_reasons.items():
            yield line + (f"; {self.runners_up[knob].in_words(knob, seconds)}" if knob in self.runners_up else "")
        faster = {knob: own for knob, own in self.runners_up.items() if own.faster(seconds)}
        if faster:
            knob, own = min(faster.items(), key=lambda item: item[1].order)
            change = f"{knob} = {told(knob, own.value)}: {in_seconds(own.seconds)} a step"
            yield f"most would be gained, by these models, with {change}. auto goes by rules that do not measure; set the key to try it"

    def lines(self) -> Iterator[str]:
        run = self.run
        mean = f"{run.lengths.response:.0f} {'response tokens' if run.rollout else 'tokens a row'} on average"
        yield f"{run.all_gpus} x {run.gpu.name} with {in_bytes(run.gpu.memory)}, {mean}"
        yield f"model: {self.model or 'sizes of its config.json'}, {parameters(run.shape).total / 1e9:.3g} billion parameters"
        for own in run.others:
            if own.apart:
                yield f"{many(own.run.cluster.gpus, 'GPU')} of them for the {own.called} alone"
        for place, phase in self.memory.phases.items():
            kinds = ", ".join(
                f"{kind} {in_bytes(count)}" for kind, count in sorted(phase.kinds.items(), key=lambda item: -item[1]) if count
            )
            yield f"memory in {place}: {in_bytes(phase.total)} {'fits' if phase.fits else 'DOES NOT FIT'} ({kinds})"
        for name, seconds in self.seconds.phases.items():
            causes = ", ".join(f"{cause} {each:.1f}" for cause, each in sorted(seconds.causes.items(), key=lambda item: -item[1])[:4])
            apart = ", on GPUs of its own" if name in self.seconds.apart else ""
            yield f"{name}: {seconds.total:.1f} s, bound by {self.binds(seconds)} ({causes}){apart}"
        hidden = f" ({self.seconds.hidden:.1f} s of phases run beside longer ones)" if self.seconds.hidden > 0.05 else ""
        rate, each = run.tokens / self.seconds.total / run.all_gpus, "CPU" if run.gpu.is_cpu else "GPU"
        yield f"step: {self.seconds.total:.1f} s{hidden}, {rate:.0f} tokens/s for each {each}"
        yield from self.reasons
        yield from self.knob_lines()
        if not self.fits:
            yield "it does not fit: " + "; ".join(self.why_not)
            found = self.remedies()
            yield from (f"it would fit with {remedy.words}: {remedy.seconds:.1f} s a step" for remedy in found)
            if not found:
                more = "a machine with more memory" if run.gpu.is_cpu else "many more GPUs, or GPUs with more memory"
                yield f"no few changes make it fit: use {more}"


def report_of(run: RunDescription, knobs: Mapping[str, Any] | None = None, reasons: tuple[str, ...] = (), refused: str = "") -> PlanReport:
    return PlanReport(run, memory_of(run), seconds_of(run), knobs or stated(run), reasons, refused)


def report_of_own(planned: PlannedRun) -> PlanReport:
    """Return the report of a run of fulltilt, with the runners-up of `auto`'s decisions if it fits."""
    own = own_plan(planned.config, planned.shape, planned.cluster, planned.response)
    found = replace(report_of(own.run, own.knobs, own.reasons, own.refused), knobs=own.knobs, why=own.why, planned=planned)
    return replace(found, runners_up=runners_up(planned, own)) if found.fits else found


def stated(run: RunDescription) -> dict[str, Any]:
    """Return the knobs of a run that is described by hand."""
    found = {f"train.{name}": value for name, value in vars(run.layout).items() if value > 1}
    found |= {"train.recompute": run.recompute.kind, "rollout.tensor_parallel": run.engine.tensor}
    found |= {"rollout.memory_fraction": run.engine.memory_share, "rollout.cuda_graphs": run.engine.graphs}
    offloads = {name: getattr(run, f"offload_{name}") for name in ("params", "grads", "optimizer")}
    return found | {f"train.offload_{name}": value for name, value in offloads.items()}


# ---- ways to fit -------------------------------------------------------------------------------------------------------------------


def changes(run: RunDescription) -> Iterator[tuple[str, RunDescription]]:
    """Yield single changes that take less memory and leave the results as they are."""
    layout, engine = run.layout, run.engine
    if not run.offload_optimizer:
        yield "the optimizer offloaded", replace(run, offload_optimizer=True)
    if not (run.offload_params and run.offload_grads and run.offload_optimizer):
        everything = replace(run, offload_optimizer=True, offload_params=True, offload_grads=True)
        yield "parameters, gradients and optimizer offloaded", everything
    if run.recompute.kind != "full":
        yield "full recompute", replace(run, recompute=Recompute("full"))
    if run.batch.token_budget and run.batch.token_budget >= 2 * run.lengths.longest_row:
        half = replace(run.batch, token_budget=run.batch.token_budget // 2)
        yield f"a token budget of {half.token_budget}", replace(run, batch=half)
    if not run.fused_head:
        yield "a fused head", replace(run, fused_head=True)
    for share in (0.5, 0.4, 0.3):
        if share < engine.memory_share:
            yield f"{share} of the memory for the engine", replace(run, engine=replace(engine, memory_share=share))
    for factor in (2, 4, 8):
        if engine.own_copy and engine.tensor * factor <= run.cluster.per_machine:
            wider = replace(engine, tensor=factor * engine.tensor)
            yield f"rollout tensor parallelism of {wider.tensor}", replace(run, engine=wider)
        more = replace(run.cluster, gpus=run.cluster.gpus * factor)
        yield f"{more.gpus} GPUs", replace(run, cluster=more)
        if run.backend != "megatron" or run.data % factor:
            continue
        if layout.tensor * factor <= run.cluster.per_machine:
            cut = replace(layout, tensor=factor * layout.tensor)
            yield f"tensor parallelism of {cut.tensor}", replace(run, layout=cut)
        if run.system.pipelines and layout.pipeline * factor * layout.virtual <= len(run.shape.layers):
            staged = replace(layout, pipeline=factor * layout.pipeline)
            yield f"{staged.pipeline} pipeline stages", replace(run, layout=staged)


def ways_to_fit(run: RunDescription) -> list[Remedy]:
    """Return nearly the fewest changes with which the run fits: those on the fewest GPUs first, then the fastest. If one change is not
    enough, the changed runs that come closest are changed further."""
    last: dict[RunDescription, list[str]] = {run: []}
    for _ in range(MOST_CHANGES):
        new: dict[RunDescription, list[str]] = {}
        for before, words in last.items():
            for change, changed in possible_changes(before):
                new.setdefault(changed, [*words, change])
        found = {changed: memory_of(changed) for changed in new}
        if fitting := [changed for changed in new if found[changed].fits]:
            order = sorted((changed.cluster.gpus, seconds_of(changed).total, joined(new[changed], "and")) for changed in fitting)
            return [Remedy(words, seconds) for _, seconds, words in order]
        closest = sorted(new, key=lambda changed: found[changed].overshoot)[:CLOSEST]
        last = {changed: new[changed] for changed in closest}
    return []


def possible_changes(run: RunDescription) -> Iterator[tuple[str, RunDescription]]:
    """Yield the changes whose runs a description may have."""
    for change, changed in changes(run):
        if not any(wrong_layout(changed.layout, changed.cluster, changed.shape, changed.engine.tensor)):
            yield change, changed
