"""The runner-up of each knob that `auto` decides: its next value and the seconds of a step with it; and the changes with which a run fits.

Enters: a configuration, a shape, a cluster, the mean response, and their plan. Leaves: a `RunnerUp` for each knob, and `Remedy`s.
Guaranteed: each is a plan of its own, in which one knob has another value and everything left to `auto` is decided again; only legal values
are tried; arithmetic alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fulltilt.config import checked
from fulltilt.hardware import Cluster
from fulltilt.parallel.cuts import expert_counts, legal_expert_sizes, legal_sequence_sizes, legal_sizes
from fulltilt.plan.cache import MOST_SEQS
from fulltilt.plan.legal import illegal_on
from fulltilt.plan.micro_batches import TOKEN_BUDGET
from fulltilt.records import UserError
from fulltilt.schema import Config, keys, samples_from_copy, shown, value_of, with_settings
from fulltilt.settings import is_set
from fulltilt.shape import Shape
from fulltilt.tune.memory_model import MemoryModel, memory_of
from fulltilt.tune.own import OwnPlan, own_plan
from fulltilt.tune.shapes import named_shape
from fulltilt.tune.time_model import seconds_of
from fulltilt.words import in_bytes, joined

ALIKE = 0.01  # share of a step's seconds: a smaller difference decides nothing
Changes = Mapping[str, Any]  # new values of keys of the configuration
# Knobs whose changes are reported when they follow from another knob's.
TOLD = (
    "train.shard", "train.tensor_parallel", "train.expert_parallel", "train.sequence_parallel", "rollout.tensor_parallel",
    "train.recompute", "train.offload_optimizer", "train.offload_activations", "critic.recompute", "critic.offload_optimizer",
    "critic.offload_params", "ref.offload_params", "reward_model.offload_params",
)  # fmt: skip


@dataclass(frozen=True)
class PlannedRun:
    """A configuration, and the hardware that it is planned for."""

    config: Config
    shape: Shape
    cluster: Cluster
    response: float | None

    def but(self, changes: Changes) -> PlannedRun:
        return replace(self, config=with_settings(self.config, changes))

    def mistakes(self) -> list[str]:
        """Return what the run would refuse on these devices."""
        return illegal_on(self.config, self.cluster.gpu.device, self.cluster.gpus, self.shape_of)

    def shape_of(self, role: str) -> Shape:
        """Return the shape of a role's model; a UserError if it is not known."""
        path = None if role == "actor" else getattr(self.config, role).path
        return self.shape if path in (None, self.config.model.path) else named_shape(path)

    def outcome(self) -> PredictedPlan | None:
        """Return the prediction for this run; None: it is not legal."""
        try:
            checked(self.config)
            if self.mistakes():
                return None
            own = own_plan(self.config, self.shape, self.cluster, self.response)
        except UserError:
            return None
        return PredictedPlan(own, memory_of(own.run), seconds_of(own.run).total)


@dataclass(frozen=True)
class PredictedPlan:
    own: OwnPlan
    memory: MemoryModel
    seconds: float  # seconds of a step

    @property
    def fits(self) -> bool:
        return self.memory.fits and not self.own.refused


@dataclass(frozen=True)
class RunnerUp:
    """The next value of a knob, and its predicted step."""

    value: Any
    seconds: float | None  # seconds of a step; None: it does not fit
    missing: int = 0  # bytes that are missing for it to fit
    refused: str = ""  # why fulltilt.plan refuses it
    others: Changes = field(default_factory=dict)  # values of other knobs that `auto` then changes

    @property
    def order(self) -> tuple[bool, float, int]:
        """Sort key: values that fit first, by their seconds; then by the missing bytes."""
        return self.seconds is None, self.seconds or 0.0, self.missing or (1 << 60)

    def in_words(self, knob: str, seconds: float) -> str:
        """Compare this value with the chosen one. `seconds`: those of the chosen value."""
        others = f" (with {joined([f'{name} {told(name, own)}' for name, own in self.others.items()], 'and')})" if self.others else ""
        value = told(knob, self.value) + others
        if self.seconds is None and self.missing:
            return f"it beats {value}, which needs {in_bytes(self.missing)} more than there is"
        if self.seconds is None:
            return f"it beats {value}, which does not fit: {self.refused.partition('. ')[0]}"
        if abs(self.seconds - seconds) <= ALIKE * seconds:
            return f"{value} would take as long"
        if self.seconds > seconds:
            return f"it beats {value}: {in_seconds(seconds)} a step against {in_seconds(self.seconds)}"
        return f"{value} is predicted to be faster: {in_seconds(self.seconds)} a step"

    def faster(self, seconds: float) -> bool:
        """Return whether this value is predicted to be faster than one with which a step takes `seconds`."""
        return self.seconds is not None and self.seconds < (1 - ALIKE) * seconds

    def as_json(self) -> dict[str, Any]:
        seconds = None if self.seconds is None else round(self.seconds, 3)
        found = {"value": self.value, "step_seconds": seconds, "missing_bytes": self.missing, "refused": self.refused}
        return found | {"with": dict(self.others)}


def in_seconds(seconds: float | None) -> str:
    return f"{seconds or 0.0:.{1 if (seconds or 0.0) >= 10 else 2}f} s"


def told(knob: str, value: Any) -> str:
    """Write a value for people."""
    return in_bytes(value) if knob.endswith("_bytes") else shown(value)


# ---- runners-up --------------------------------------------------------------------------------------------------------------------------


def runners_up(planned: PlannedRun, own: OwnPlan) -> dict[str, RunnerUp]:
    """Return the runner-up of each knob that is left to `auto` and has another legal value."""
    found = {}
    for knob, value in own.knobs.items():
        derived = knob == "rollout.kv_bytes" and is_set(planned.config, "rollout.memory_fraction")
        if is_set(planned.config, knob) or derived:
            continue
        tried = [runner_up(own, knob, other[knob], planned.but(other).outcome()) for other in alternatives(planned, own, knob, value)]
        if known := [each for each in tried if each is not None]:
            found[knob] = min(known, key=lambda each: each.order)
    return found


def runner_up(own: OwnPlan, knob: str, value: Any, outcome: PredictedPlan | None) -> RunnerUp | None:
    """Return the runner-up that another value of a knob than that of `own` gives; None: the value is not legal."""
    if outcome is None:
        return None
    if outcome.fits:
        knobs = outcome.own.knobs
        others = {name: knobs[name] for name in TOLD if name != knob and name in knobs and knobs[name] != own.knobs.get(name)}
        return RunnerUp(value, outcome.seconds, others=others)
    return RunnerUp(value, None, 0 if outcome.own.refused else missing_bytes(outcome.memory), outcome.own.refused)


def missing_bytes(memory: MemoryModel) -> int:
    """Return the missing bytes of the phase that lacks most."""
    return max(memory.sample_kv_bytes - memory.kv_bytes, *(phase.total - phase.limit for phase in memory.phases.values()))


def alternatives(planned: PlannedRun, own: OwnPlan, knob: str, value: Any) -> Iterator[dict[str, Any]]:
    """Yield other values of a knob, each with the keys that go with it."""
    name = knob.partition(".")[2]
    if knob in SIZES:
        yield from ({knob: size} for size in neighbours(value, SIZES[knob](planned, own.knobs)))
    elif name in ("token_budget", "forward_token_budget", "max_batched_tokens", "kv_bytes"):
        yield from ({knob: size} for size in (value // 2, 2 * value))
    elif knob == "rollout.max_seqs":
        samples = own.run.batch.rollout_rows
        yield from ({knob: size} for size in (value // 2, 2 * value) if 0 < size <= samples)
    elif name == "recompute":
        yield from ({knob: level} for level in ("none", "selective", "full") if level != value)
    elif knob == "train.shard":
        yield from ({knob: way} for way in ("optimizer", "full") if way != value)
        machine = planned.cluster.per_machine
        if value != "hybrid" and machine < own.run.cluster.gpus and own.run.cluster.gpus % machine == 0:
            yield {knob: "hybrid", "train.shard_size": machine}
    elif pointless(planned.config, own, knob):
        return
    elif name.startswith("offload_") or knob in ("train.head_recompute", "rollout.release_memory", "rollout.cuda_graphs"):
        yield {knob: not value}
    elif knob == "train.fused_layers" and value:
        yield {knob: False}


def pointless(config: Config, own: OwnPlan, knob: str) -> bool:
    """Return whether the run refuses the knob: nothing else works on the same GPUs, or gradients exist only during a pass."""
    section, _, name = knob.partition(".")
    if name == "offload_grads":
        return own.run.backend == "fsdp"
    if name != "offload_params":
        return False
    others = {other.role for other in own.run.others if not other.apart}
    if section != "train":
        return section not in others
    # The same rule as `refused_offloads` of plan/legal.py: the run looks at the given keys, before `auto` has sharded anything.
    return not (others or (own.run.rollout and samples_from_copy(config)))


def neighbours(value: int, legal: Sequence[int]) -> list[int]:
    """Return the next smaller and the next larger size."""
    below, above = [size for size in legal if size < value], [size for size in legal if size > value]
    return [*below[-1:], *above[:1]]


def within_machine(planned: PlannedRun, gpus: int) -> int:
    return gpus if gpus <= planned.cluster.per_machine else math.gcd(gpus, planned.cluster.per_machine)


def sizes_of_layers(planned: PlannedRun, knobs: Mapping[str, Any]) -> list[int]:
    return legal_sizes(planned.shape, within_machine(planned, actor_gpus(planned)))


def sizes_of_experts(planned: PlannedRun, knobs: Mapping[str, Any]) -> list[int]:
    if knobs["train.tensor_parallel"] > 1 or not expert_counts(planned.shape):
        return [1]
    return legal_expert_sizes(planned.shape, actor_gpus(planned))


def sizes_of_sequences(planned: PlannedRun, knobs: Mapping[str, Any]) -> list[int]:
    parts = knobs["train.tensor_parallel"]
    return legal_sequence_sizes(planned.shape, actor_gpus(planned) // parts, parts)


def actor_gpus(planned: PlannedRun) -> int:
    return planned.cluster.gpus - sum(planned.config.cluster.roles.values())


SIZES: Mapping[str, Callable[[PlannedRun, Mapping[str, Any]], list[int]]] = {
    "train.tensor_parallel": sizes_of_layers,
    "rollout.tensor_parallel": sizes_of_layers,
    "train.expert_parallel": sizes_of_experts,
    "train.sequence_parallel": sizes_of_sequences,
}


# ---- ways to fit -------------------------------------------------------------------------------------------------------------------------

LEAST_TOKENS = 1024  # least token budget that is offered
# Keys that may be why a run does not fit, if they are set by hand.
BY_HAND = (
    "train.shard", "train.shard_size", "train.tensor_parallel", "train.expert_parallel", "train.sequence_parallel",
    "rollout.tensor_parallel", "train.recompute", "train.recompute_layers", "train.offload_optimizer", "train.offload_grads",
    "train.offload_params", "train.offload_activations", "train.head_recompute", "actor.token_budget", "actor.forward_token_budget",
    "critic.token_budget", "critic.forward_token_budget", "critic.recompute", "critic.offload_optimizer", "critic.offload_params",
    "ref.offload_params", "ref.forward_token_budget", "reward_model.offload_params", "reward_model.forward_token_budget",
    "rollout.kv_bytes", "rollout.memory_fraction", "rollout.max_seqs", "rollout.max_batched_tokens", "rollout.release_memory",
    "actor.dynamic_batch", "critic.dynamic_batch",
)  # fmt: skip
# Keys that are legal only with certain values of another key, and these values.
COMPANIONS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "train.shard": {"train.shard_size": ("hybrid",)},
    "train.recompute": {"train.recompute_layers": ("selective", "full"), "train.recompute_method": ("full",)},
    "actor.dynamic_batch": {"actor.micro_batch": (False,)},
    "critic.dynamic_batch": {"critic.micro_batch": (False,)},
}


@dataclass(frozen=True)
class Remedy:
    """A change with which a run fits, and the seconds of its step."""

    words: str
    seconds: float


def remedies(planned: PlannedRun) -> list[Remedy]:
    """Return changes with which a run fits: those on the fewest GPUs first, then the fastest. If no single change is enough, everything
    that was set by hand is left to `auto`, on more GPUs if necessary."""
    for tried in (dict(single_changes(planned)), dict(all_changes(planned))):
        found = [(run.cluster.gpus, outcome.seconds, words) for words, run in tried.items() if (outcome := run.outcome()) and outcome.fits]
        if found:
            return [Remedy(words, seconds) for _, seconds, words in sorted(found)]
    return []


def single_changes(planned: PlannedRun) -> Iterator[tuple[str, PlannedRun]]:
    config, gpus, set_by_hand = planned.config, planned.cluster.gpus, by_hand(planned.config)
    device = planned.cluster.gpu.device
    changes = [{key: left_alone(key)} for key in set_by_hand if key != "train.shard_size"]  # "hybrid" needs it
    budget = value_of(config, "actor.token_budget")
    tokens = budget if isinstance(budget, int) else TOKEN_BUDGET[device]
    changes += [{"actor.token_budget": tokens // part} for part in (2, 4, 8) if tokens // part >= LEAST_TOKENS]
    changes += [{"train.recompute": "full"}, {"train.offload_optimizer": True}, {"train.offload_activations": True}]
    seqs = value_of(config, "rollout.max_seqs")
    most = seqs if isinstance(seqs, int) else MOST_SEQS[device]
    changes += [{"rollout.max_seqs": most // part} for part in (4, 16) if most >= part]
    if gpus > 1:
        changes += [{"train.shard": "full"}]
        sizes = [size for size in sizes_of_layers(planned, {}) if size > 1]
        changes += [{key: size} for key in ("train.tensor_parallel", "rollout.tensor_parallel") for size in sizes]
        changes += [{"train.expert_parallel": size} for size in legal_expert_sizes(planned.shape, actor_gpus(planned)) if size > 1]
    for role in ("actor", "critic"):  # a micro-batch of so many samples is not bounded by a token budget
        samples = value_of(config, f"{role}.micro_batch")
        changes += [{f"{role}.micro_batch": samples // part} for part in (2, 4, 8) if isinstance(samples, int) and samples >= part]
    for change in changes:
        if all(value_of(config, key) != value for key, value in change.items()):
            legal = {**change, **without_effect(config, change)}
            yield joined([in_words(key, value) for key, value in legal.items()], "and"), planned.but(legal)
    yield from more_gpus(planned, "")


def without_effect(config: Config, change: Changes) -> Changes:
    """Return the keys that a change leaves without effect, with which a run would be refused, and their defaults."""
    return {
        other: left_alone(other)
        for key, value in change.items()
        for other, needed in COMPANIONS.get(key, {}).items()
        if value not in needed and is_set(config, other)
    }


def in_words(key: str, value: Any) -> str:
    return f"{key} left out" if value is None else f"{key} = {shown(value)}"


def all_changes(planned: PlannedRun) -> Iterator[tuple[str, PlannedRun]]:
    if set_by_hand := by_hand(planned.config):
        change = {key: left_alone(key) for key in set_by_hand}
        change |= without_effect(planned.config, change)
        free, words = planned.but(change), f"{joined(list(change), 'and')} left out"
        yield words, free
        yield from more_gpus(free, f" and {words}")


def more_gpus(planned: PlannedRun, words: str) -> Iterator[tuple[str, PlannedRun]]:
    if planned.cluster.gpu.is_cpu:  # more workers of a machine would share the same memory
        return
    for factor in (2, 4, 8, 16, 32, 64):
        cluster = replace(planned.cluster, gpus=factor * planned.cluster.gpus)
        fixed = [key for key in ("cluster.workers", "cluster.nodes") if is_set(planned.config, key)]
        asked = f" ({joined(fixed, 'and')} changed to ask for them)" if fixed else ""
        yield f"{cluster.gpus} GPUs{asked}{words}", replace(planned, cluster=cluster)


def by_hand(config: Config) -> list[str]:
    return [key for key in BY_HAND if is_set(config, key)]


def left_alone(key: str) -> Any:
    return keys()[key].get_default(call_default_factory=True)
