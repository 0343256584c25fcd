"""Predictions of the models of memory and time for the steps of a run, with its actual devices, plan and lengths.

Enters: a configuration, the shape of its model, its devices, its plan and what a probe has measured of the devices; then the metrics of
each step. Leaves: for each phase that was measured, the predicted seconds and peak memory, named `predicted/` and the name of the
measurement. Guaranteed: arithmetic alone, no step is fitted; the same metrics give the same predictions. `UserError`: the models do not
know the device, or do not cover the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby
from typing import Any, get_args

from fulltilt.hardware import Cluster, accelerator
from fulltilt.observe.metrics import TIMING_NAMES
from fulltilt.plan.budgets import Budgets
from fulltilt.plan.decisions import RoleSettings
from fulltilt.plan.make import Plan
from fulltilt.records import UserError
from fulltilt.schema import Config
from fulltilt.shape import DecoderLayer, Experts, ModelFamily, Recompute, Shape
from fulltilt.tune.constants import ENGINE_WORKSPACE
from fulltilt.tune.description import AS_MODELLED, Calibration, RunDescription
from fulltilt.tune.lengths import Lengths
from fulltilt.tune.memory_model import MemoryModel, Phase, PhaseMemory, memory_of, parameters
from fulltilt.tune.own import own_plan
from fulltilt.tune.time_model import StepSeconds, seconds_of, update_seconds

PREDICTED = "predicted/"
CPU = "CPU"
# The phases of the model of memory, by the names of their measurements.
MEMORY_PHASES: Mapping[str, Phase] = {TIMING_NAMES[phase]: phase for phase in get_args(Phase)}
NOT_DESCRIBED = ("shape", "cluster", "lengths", "system", "others", "name")  # fields of a run that `Predictor.description` leaves out
NOT_ALLOCATED = ("context", "fragmentation", "graphs")  # kinds that torch's allocator does not count as allocated


@dataclass(frozen=True)
class UsedDevices:
    """The devices that a run uses."""

    name: str  # the driver's name of the device, or CPU
    memory: int  # bytes of one device; 0: a CPU
    workers: int = 1  # workers that have the actor
    machines: int = 1

    @property
    def cluster(self) -> Cluster:
        """The same devices with the figures of the hardware table."""
        return self.with_others(0)

    def with_others(self, workers: int) -> Cluster:
        """The same with the devices of so many workers of other roles, which share the machines with the actor's."""
        known, every = accelerator(self.name), self.workers + workers
        return Cluster(replace(known, memory=self.memory or known.memory), every, max(1, every // self.machines))


def planned_cluster(config: Config, devices: UsedDevices) -> Cluster:
    """Return all GPUs of a run: the actor's, and those of roles with workers of their own."""
    return devices.with_others(sum(config.cluster.roles.values()))


def describe_run(config: Config, shape: Shape, devices: UsedDevices, plan: Plan, calibration: Calibration = AS_MODELLED) -> RunDescription:
    """Return the run with the decisions of its own plan. Lengths are limits and guesses until a step has measured them."""
    if devices.name == CPU:
        raise UserError("the models of memory and time are made for GPUs")
    cluster, budgets, own = devices.cluster, plan.budgets, plan.roles["actor"]
    run = own_plan(config, shape, planned_cluster(config, devices), None).run
    copies, parts = run.backend == "fsdp" or budgets.rollout_parts != budgets.parts, budgets.rollout_parts
    cache = budgets.kv_blocks * config.rollout.block_tokens * shape.kv_bytes_per_token(run.itemsize)
    copy = run.itemsize * parameters(shape).total if copies else 0
    share = ((cache + copy) // parts + ENGINE_WORKSPACE) / cluster.gpu.memory
    engine = replace(run.engine, tensor=parts, memory_share=share, own_copy=copies, keeps_copy=copies)
    engine = replace(engine, max_seqs=budgets.max_seqs, max_batched_tokens=budgets.max_batched_tokens)
    by_samples = not config.actor.dynamic_batch and config.actor.micro_batch
    filled = {} if by_samples else {"token_budget": budgets.token_budget, "forward_token_budget": budgets.forward_token_budget}
    described = replace(
        run,
        layout=replace(run.layout, tensor=budgets.parts, sequence=own.sequence_parallel),
        engine=engine,
        batch=replace(run.batch, **filled),
        recompute=Recompute(own.recompute, own.recompute_layers, own.recompute_method),
        offload_params=own.offload_params,
        offload_grads=own.offload_grads,
        offload_optimizer=own.offload_optimizer,
        offload_activations=own.offload_activations,
        fused_head=own.fused_head,
        kept_logits=not own.head_recompute,
        others=tuple(replace(other, run=as_planned(other.run, plan.roles.get(other.role))) for other in run.others),
    )
    return calibrated(described, calibration)


def as_planned(run: RunDescription, own: RoleSettings | None) -> RunDescription:
    """Return the run of another role with the decisions of the run's own plan for it."""
    if own is None:
        return run
    return replace(
        run,
        recompute=Recompute(own.recompute, own.recompute_layers, own.recompute_method),
        offload_params=own.offload_params,
        offload_grads=own.offload_grads,
        offload_optimizer=own.offload_optimizer,
        offload_activations=own.offload_activations,
    )


# ---- a step ------------------------------------------------------------------------------------------------------------------------------


def with_lengths(run: RunDescription, line: Mapping[str, float]) -> RunDescription | None:
    """Return the run with the lengths that a step has measured; None: the step has none."""
    if not run.rollout:  # rows are given: prompt and response count as one
        tokens = line.get("perf/total_num_tokens", 0) / run.batch.rows
        return replace(run, lengths=replace(run.lengths, response=min(tokens, run.lengths.most_response))) if tokens else None
    names = ("prompt_length/mean", "prompt_length/max", "response_length/mean", "response_length/max")
    if any(line.get(name) is None for name in names):
        return None
    prompt, most_prompt, response, most_response = (line[name] for name in names)
    lengths = Lengths(math.ceil(most_prompt), max(1, math.ceil(most_response)), prompt, max(1.0, response))
    return for_every_role(run, lambda own: replace(own, lengths=lengths))


def for_every_role(run: RunDescription, change: Callable[[RunDescription], RunDescription]) -> RunDescription:
    """Return the run with the change made to it and to the models beside its actor."""
    return replace(change(run), others=tuple(replace(own, run=change(own.run)) for own in run.others))


def calibrated(run: RunDescription, calibration: Calibration) -> RunDescription:
    """Return the run with the calibration that a probe on its actor's workers has found, which its other models get too."""
    of_others = replace(calibration, decoding=1.0, rollout_s=0.0)
    others = tuple(replace(own, run=replace(own.run, calibration=of_others)) for own in run.others)
    return replace(run, calibration=calibration, others=others)


def with_rows(run: RunDescription, rows: float) -> RunDescription:
    """Return the run with another number of samples in as many mini-batches. A reward model scores as many as before."""
    prompts, updates = max(1, round(rows / run.batch.samples)), run.batch.updates
    fewer = {"prompts": prompts, "minibatch_prompts": max(1, math.ceil(prompts / updates))}

    def with_fewer(own: RunDescription) -> RunDescription:
        return replace(own, batch=replace(own.batch, **fewer))

    others = tuple(own if own.role == "reward_model" else replace(own, run=with_fewer(own.run)) for own in run.others)
    return replace(with_fewer(run), others=others)


def kept_rows(run: RunDescription, line: Mapping[str, float]) -> float:
    """Return how many samples the step could train on."""
    kept = line.get("rollout/groups_kept")
    return (run.batch.rows if kept is None else kept * run.batch.samples) - line.get("reward/excluded", 0)


def computed_rows(run: RunDescription, line: Mapping[str, float]) -> float:
    """Return how many samples the update has computed: those that have an advantage."""
    return max(1.0, kept_rows(run, line) - line.get("actor/samples_left_out", 0))


def step_seconds(run: RunDescription, line: Mapping[str, float]) -> StepSeconds:
    """Return the seconds of a step of a run `with_lengths`, with one round of sampling."""
    sampled = run.batch.rollout_prompts
    kept = with_rows(run, kept_rows(run, line))
    kept = replace(kept, batch=replace(kept.batch, sampled=sampled)) if run.rollout else kept
    return replace(seconds_of(kept), update=update_seconds(with_rows(run, computed_rows(run, line))))


def allocated(phase: PhaseMemory) -> int:
    """Return the bytes of a phase that torch's allocator counts."""
    return phase.total - sum(phase.kinds.get(kind, 0) for kind in NOT_ALLOCATED)


def peak_of(memory: MemoryModel, name: str) -> int | None:
    """Return the predicted peak of a phase, by the name of its measurement; None: the phase is not modelled."""
    phase = memory.phases.get(MEMORY_PHASES[name]) if name in MEMORY_PHASES else None
    return None if phase is None else allocated(phase)


class Predictor:
    """Predicts the steps of a run, each from the lengths that it has measured."""

    def __init__(self, run: RunDescription) -> None:
        self.run = run

    @property
    def description(self) -> dict[str, Any]:
        """Everything that the models read of the run but its model, devices and lengths: for models of later versions."""
        return {name: value for name, value in asdict(replace(self.run, others=())).items() if name not in NOT_DESCRIBED}

    def metrics(self, line: Mapping[str, float]) -> dict[str, float]:
        """Return the predictions for the measurements in a step's line."""
        run = with_lengths(self.run, line)
        return dict(self._found(run, line)) if run else {}

    def _found(self, run: RunDescription, line: Mapping[str, float]) -> Iterator[tuple[str, float]]:
        seconds, rounds = step_seconds(run, line), line.get("train/num_gen_batches", 1)
        phases = {TIMING_NAMES.get(phase, ""): own.total * (rounds if phase == "rollout" else 1) for phase, own in seconds.phases.items()}
        measured = {name: total for name, total in phases.items() if f"timing_s/{name}" in line}
        yield from ((f"{PREDICTED}timing_s/{name}", total) for name, total in measured.items())
        yield f"{PREDICTED}timing_s/step", sum(measured.values()) - seconds.hidden + seconds.other.total
        memory = memory_of(run)
        for name in MEMORY_PHASES:
            peak = peak_of(memory, name)
            if peak is not None and f"memory_gib/{name}/peak" in line:
                yield f"{PREDICTED}memory_gib/{name}/peak", peak / 2**30


# ---- the folder of a run -----------------------------------------------------------------------------------------------------------------


def saved_facts(shape: Shape, devices: UsedDevices, plan: Plan, calibration: Calibration = AS_MODELLED) -> dict[str, Any]:
    """Return what a run's folder keeps for `describe_run`, beside the configuration, in a form that JSON can hold."""
    layers = [[len(list(same)), asdict(layer)] for layer, same in groupby(shape.layers)]
    return {
        "shape": asdict(replace(shape, layers=())) | {"layers": layers},
        "devices": asdict(devices),
        "roles": {role: asdict(own) for role, own in plan.roles.items()},
        "calibration": asdict(calibration),
    }


def read_shape(given: Mapping[str, Any]) -> Shape:
    layers: list[DecoderLayer] = []
    for count, layer in given["layers"]:
        experts = layer["experts"] and Experts(**layer["experts"])
        layers += [DecoderLayer(**{**layer, "experts": experts})] * count
    family = given["family"] and ModelFamily(**given["family"])
    return Shape(**{**given, "layers": tuple(layers), "family": family})


def read_plan(given: Mapping[str, Any]) -> Plan:
    """Read the plan of a run's folder, without its words and numbers of steps."""
    known = {field.name for field in fields(RoleSettings)}
    roles = {role: RoleSettings(**{name: value for name, value in own.items() if name in known}) for role, own in given["roles"].items()}
    sizes = {field.name for field in fields(Budgets)}
    budgets = Budgets(**{name: size for name, size in given["budgets"].items() if name in sizes})
    return Plan(steps=0, updates_per_step=0, budgets=budgets, roles=roles, words=())
