"""A worker, made from an order.

Enters: a `WorkerOrder`, a device, and the other workers, if any. Leaves: the `Worker`, its models loaded, verified, restored to the
checkpoint, and planned. Guaranteed: all workers of a run make the same plan, by the least that any of them has measured.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedModel

from fulltilt.algo.base import Algorithm
from fulltilt.batching.cost import ModelSize
from fulltilt.cluster import faults
from fulltilt.cluster.checks import TextFacts
from fulltilt.cluster.loading import Models, load_models
from fulltilt.cluster.marking import marking
from fulltilt.cluster.probing import (
    MOST_SECONDS,
    Probe,
    TimeLimit,
    environment,
    measured_if_possible,
    probe_rollouts,
    probe_updates,
)
from fulltilt.cluster.sharing import ExpertDivider, ModelDivider, ModelSharer, Placer, SharedModels
from fulltilt.cluster.shelf import Shelf, share_of_rewards
from fulltilt.cluster.sizes import (
    THREADS,
    find_division,
    find_facts,
    find_sharding,
    free_bytes,
    limits,
    order_of_loading,
    parameter_sizes,
    role_facts,
)
from fulltilt.cluster.worker import CRITIC_TENSORS, ROLLOUT_ROLES, SURPLUS_TENSORS, Replica, Residents, Worker
from fulltilt.footprint import HeadOptions
from fulltilt.memory.account import Account, gradients_of, weights_of
from fulltilt.memory.activations import ActivationOffload, offload_activations
from fulltilt.memory.offload import OffloadSetting
from fulltilt.memory.recompute import apply_recompute
from fulltilt.model import lora
from fulltilt.model.arrays import local
from fulltilt.model.attention import LayerShape
from fulltilt.model.load import read_config, shape_of
from fulltilt.model.scalar import ScalarModel
from fulltilt.observe.utilization import GpuUtilization
from fulltilt.parallel.checksum import checksum
from fulltilt.parallel.cuts import whole_experts_in_rollouts
from fulltilt.parallel.experts import ExpertSplit
from fulltilt.parallel.grid import ONE_WORKER, Grid
from fulltilt.parallel.layout import UNSHARDED, Sharding
from fulltilt.parallel.parcels import Parcels
from fulltilt.parallel.parts import ModelPart, RolloutCopy
from fulltilt.parallel.ranks import ALONE, Ranks
from fulltilt.parallel.sequence import ONE, make_groups
from fulltilt.parallel.tensor import member_layers
from fulltilt.parallel.twin import Twin
from fulltilt.plan.decisions import (
    ROLE_KEYS,
    RolePlan,
    RoleSettings,
    count_steps,
    longest_response,
    longest_row,
    size_key,
    unless_auto,
    updates_per_step,
)
from fulltilt.plan.division import Division
from fulltilt.plan.facts import Facts, RoleFacts, RoleSizes
from fulltilt.plan.legal import WAITS
from fulltilt.plan.make import make_plan
from fulltilt.plan.micro_batches import budgets_by_costs, micro_batch_tokens, update_budget
from fulltilt.plan.roles import plan_roles
from fulltilt.records import NOTHING_PROBED, Probed, UpdateCosts, UserError
from fulltilt.reward.base import RewardPool
from fulltilt.reward.model import RewardEncoder
from fulltilt.rollout.engine import Engine, EngineContext, EngineLimits, make_engine
from fulltilt.rollout.members import Members
from fulltilt.rollout.sampler import Sampling
from fulltilt.schema import Config, TrainConfig, shares_model, shares_parameters
from fulltilt.shape import Recompute
from fulltilt.training.checkpoint import Checkpoint
from fulltilt.training.optim import Optimizer, restore_parameters
from fulltilt.training.parameters import Divided
from fulltilt.training.roles import Critic, Policy, Role, Scorer
from fulltilt.training.trainer import Trainer
from fulltilt.words import in_bytes, joined, many

NO_GRIDS: Mapping[str, Grid] = MappingProxyType({})  # for a worker that is alone


def be_deterministic() -> None:
    """Use only kernels whose result does not depend on timing. cuBLAS reads its setting from the environment, before its first use."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


@dataclass(frozen=True, eq=False)
class WorkerOrder:
    """Everything that a worker of a run is made from, in any process."""

    config: Config
    roles: tuple[str, ...]  # the roles of a training run; empty if nothing learns
    texts: TextFacts
    encoder: RewardEncoder | None
    sampled: bool = False  # whether the run samples from the actor
    resume: Checkpoint | None = None
    kept: dict[str, Any] | None = None  # the budgets of an earlier plan
    writer: RewardEncoder | None = None  # writes samples for the reward model, on whichever worker that is
    probe: Probe | None = None  # measures updates on this device; None: nothing is measured
    commits: Mapping[str, str] = field(default_factory=dict)  # by hub name of a model, the commit that every worker reads
    before: int | None = None  # number of workers of the run until it lost some; 0: none had loaded; None: this is no restart
    only: str | None = None  # the only role of these workers; None: the actor, and all roles without workers of their own

    def of_team(self, role: str | None, apart: Collection[str]) -> WorkerOrder:
        """Return the order of workers that have only this role, or of the actor's workers if it is None. `apart`: the roles that have
        workers of their own."""
        if role is None:
            own = tuple(each for each in self.roles if each not in apart)
            return replace(self, roles=own, encoder=None if "reward_model" in apart else self.encoder)
        # A checkpoint keeps these two numbers only for the actor's workers.
        kept = self.kept and {name: count for name, count in self.kept.items() if name not in ("threads", "workers")}
        response = longest_response(self.config) if self.sampled else 0
        texts = replace(self.texts, longest=self.texts.longest + response)
        encoder = self.encoder if role == "reward_model" else None
        return replace(self, only=role, roles=(role,) if self.roles else (), encoder=encoder, texts=texts, sampled=False, kept=kept)


def load_worker(
    order: WorkerOrder, algorithm: Algorithm, device: torch.device, ranks: Ranks = ALONE, parcels: Parcels | None = None
) -> Worker:
    """Make a worker from its order. `parcels`: given where workers hold the samples that they draw."""
    began, judged = time.perf_counter(), ["reward_model"] if order.encoder and order.roles else []
    # Also before they are planned: until a number is set, MKL may choose another one for each product, and models are checked by last bits.
    torch.set_num_threads(max(1, THREADS // ranks.beside))
    roles = list(dict.fromkeys([*order.roles, *judged]))
    own = order if order.roles else replace(order, config=of_evaluation(order.config, ranks.size))
    division = division_of(own, roles, device, ranks)
    grids = make_grids(own, division, ranks)
    grid = grids.get("actor") or next(iter(grids.values()))
    sharding = find_sharding(order.config, roles, device, grid, division, sampled=order.sampled)
    config = decided(order.config, sharding) if order.roles else order.config
    adapters_alone = config.lora.rank > 0 and config.lora.export != "merged"
    shared = SharedModels(adapters_alone=adapters_alone, tells=(grid.replicas or grid.data).rank == 0)
    placing, by_role = place(order, config, device, grids, shared, division), list[str]()
    if placing.sharer:
        by_role = order_of_loading(config, roles, device.type, sharding, sampled=order.sampled)
    models = load_models(
        config, order.roles, order.texts.tokenizer, device, order.encoder, order.resume, sampled=order.sampled, actor=order.only is None,
        order=by_role, placing=placing,
    )  # fmt: skip
    # With another number of workers, last bits differ anyway, and each has another share of the machine.
    layout = {"workers": ranks.size, "parts": grid.tensor.size, "rollout_parts": grid.rollout.size}
    kept = order.kept if order.kept and {**layout, "parts": 1, "rollout_parts": 1, **order.kept}.items() >= layout.items() else None
    worker = make_worker(
        config,
        algorithm,
        device,
        models,
        order.texts,
        order.roles,
        order.resume,
        kept,
        grids,
        sharding,
        shared,
        division.words,
        order.probe,
    )
    if order.roles and device.type == "cuda":
        worker.utilization = GpuUtilization.of(str(torch.cuda.get_device_properties(device).uuid))
    if parcels:
        settings = share_of_rewards(config.reward, ranks.size, ranks.beside)
        pool = RewardPool(settings, Path(config.run.dir), write_errors=False, keep_errors=bool(order.roles)) if worker.engine else None
        worker.shelf = Shelf(config, algorithm, parcels, pool, order.writer)
    if ranks.of_run > 1:
        described = describe_workers(ranks, device, worker.plan.budgets.threads, time.perf_counter() - began, worker.roles)
        worker.notes = (described, *worker.notes)
    trained, asked = order.config.train.tensor_parallel, order.config.rollout.tensor_parallel
    if not order.roles and order.only is None and division.rollout == 1 < unless_auto(asked, unless_auto(trained, 1)):
        why = f"{many(ranks.size, 'worker')} cannot be divided into groups of that size"
        worker.notes = (*worker.notes, f"layers are not divided as in the run that learned: {why}")
    faults.install(worker)
    return worker


def division_of(order: WorkerOrder, roles: Sequence[str], device: torch.device, ranks: Ranks) -> Division:
    """Return among how many workers models are divided. `roles`: the roles of a training run that have a model here."""
    here = roles or [*(["actor"] if order.only is None else []), *(["reward_model"] if order.encoder else [])]
    longest, learns = order.texts.longest, bool(order.roles)
    return find_division(order.config, here, device, ranks, longest, sampled=order.sampled, learns=learns)


def of_evaluation(config: Config, workers: int) -> Config:
    """Return the configuration of workers where nothing learns. Layers are divided as for an engine, if the number of workers allows it,
    which may differ from that of the run that learned."""
    rollout, train = config.rollout.tensor_parallel, config.train.tensor_parallel
    size = (train if train != 1 else "auto") if rollout == "auto" else rollout
    size = 1 if size != "auto" and workers % size else size
    own = config.reward_model.tensor_parallel or unless_auto(train, 1)
    sections: dict[str, dict[str, Any]] = {
        "train": {"tensor_parallel": size, "expert_parallel": 1},
        "rollout": {"tensor_parallel": size},
        "reward_model": {"tensor_parallel": own if workers % own == 0 else 1, "expert_parallel": None},
    }
    return config.model_copy(update={name: getattr(config, name).model_copy(update=update) for name, update in sections.items()})


def make_grids(order: WorkerOrder, division: Division, ranks: Ranks) -> dict[str, Grid]:
    """Make this worker's groups, for each role that has a model here. Roles with the same sizes have the same groups. All workers must call
    this at the same time, and make their groups in the same order."""
    wanted = {*order.roles, *(["actor"] if order.only is None else []), *(["reward_model"] if order.encoder else [])}
    if "actor" in wanted and shares_model(order.config):
        wanted.discard("ref")
    sizes = {role: division.of(order.config, role) for role in ("actor", "critic", "ref", "reward_model") if role in wanted}
    made: dict[RoleSizes, Grid] = {}
    for role, own in sizes.items():
        if own not in made:
            made[own] = Grid.of(ranks, own.tensor, own.apart, division.rollout if role == "actor" else own.tensor)
    return {role: made[own] for role, own in sizes.items()}


def place(
    order: WorkerOrder, config: Config, device: torch.device, grids: Mapping[str, Grid], shared: SharedModels, division: Division
) -> Placer:
    """Make the object that divides models and shards their parameters. All workers must call this at the same time."""
    grid, sharer = grids.get("actor") or next(iter(grids.values())), None
    if of_shards := {role: own for role, own in grids.items() if shares_out(config, order.roles, own.data)}:
        sharer = ModelSharer.of(shared, config, of_shards, device, learners_of(order.roles), sampled=order.sampled)
    whole, rollout_whole = experts_of_members(order, division, grids)
    sampling = grid.rollout if grid.tensor.size != grid.rollout.size or ("actor" in whole) != rollout_whole else None
    members, holders = {role: own.tensor for role, own in grids.items()}, {role: own.experts for role, own in grids.items() if own.replicas}
    cut = max(grid.rollout.size, *(own.size for own in members.values())) > 1
    keys, of_experts = ({role: size_key(config, role, name) for role in grids} for name in ("tensor_parallel", "expert_parallel"))
    keys |= {} if config.rollout.tensor_parallel == "auto" else {"rollout": "rollout.tensor_parallel"}
    divider = ModelDivider(shared, members, sampling, whole, rollout_whole, keys) if cut else None
    experts = ExpertDivider(shared, holders, order.sampled, "actor" in of_shards, of_experts) if holders else None
    learned_whole = grid.tensor.size == 1 and "actor" not in holders and "actor" not in of_shards
    return Placer(shared, learned_whole or (order.sampled and grid.rollout.size == 1), order.sampled, divider, experts, sharer)


def experts_of_members(order: WorkerOrder, division: Division, grids: Mapping[str, Grid]) -> tuple[set[str], bool]:
    """Return the roles of which a member of a tensor-parallel group has some whole experts, rather than a part of every expert, and whether
    the same holds for the model that an engine reads."""
    divided = {role for role, grid in grids.items() if grid.tensor.size > 1}
    whole = {role for role in divided if order.roles and division.of(order.config, role).experts > 1}
    actor = grids.get("actor")
    if not order.sampled or actor is None or actor.rollout.size == 1:
        return whole, "actor" in whole and actor is not None and actor.rollout.size > 1
    train, shape = order.config.train, shape_of(read_config(order.config.model))
    of_run = division if order.roles else Division(unless_auto(train.tensor_parallel, 1), unless_auto(train.expert_parallel, 1))
    given = order.config.rollout.expert_parallel
    of_engine = whole_experts_in_rollouts(given, actor.rollout.size, of_run.tensor, of_run.experts, shape)
    return whole if order.roles else ({"actor"} & divided if of_engine else set()), of_engine


def decided(config: Config, sharding: Sharding) -> Config:
    """Return the configuration with `auto` replaced by what was decided."""
    size = sharding.group if sharding.shard == "hybrid" else None
    return config.model_copy(update={"train": config.train.model_copy(update={"shard": sharding.shard, "shard_size": size})})


def describe_workers(ranks: Ranks, device: torch.device, threads: int, seconds: float, roles: Collection[str]) -> str:
    """Describe all workers, or those with the same roles, in one line: they are all alike."""
    where = f" on {ranks.of_run // ranks.beside} machines" if ranks.beside < ranks.of_run else ""
    who = f"{ranks.size} workers{where}"
    if ranks.size < ranks.of_run:
        numbers = f"worker {ranks.before}" if ranks.size == 1 else f"workers {ranks.before} to {ranks.before + ranks.size - 1}"
        who = f"{numbers} of {ranks.of_run}{where} ({', '.join(sorted(roles))})"
    on_gpu = "a GPU of its own" if ranks.sharing == 1 else f"a GPU that {ranks.sharing} workers share"
    has = on_gpu if device.type == "cuda" else many(threads, "thread")
    memory, backend = in_bytes(free_bytes(device) / ranks.sharing), torch.distributed.get_backend()
    each = "each" if ranks.size > 1 else "it"
    return f"{who}: models loaded in {seconds:.1f} s; {each} has {has} and {memory} of free memory ({backend})"


def describe_adapters(model: PreTrainedModel, part: ModelPart | None) -> str:
    """Count the trained parameters of adapters, in words. `part`: given where this worker has a part of the model."""
    counts = {name: math.prod(part.whole[name]) if part else own.numel() for name, own in model.named_parameters()}
    trained = sum(counts[name] for name, own in model.named_parameters() if own.requires_grad)
    return f"LoRA: {trained:,} of {sum(counts.values()):,} parameters are trained"


def make_worker(
    config: Config, algorithm: Algorithm, device: torch.device, models: Models, texts: TextFacts, roles: Collection[str],
    resume: Checkpoint | None = None, kept: dict[str, Any] | None = None, grids: Mapping[str, Grid] = NO_GRIDS,
    sharding: Sharding = UNSHARDED, shared: SharedModels | None = None, division: tuple[str, ...] = (), probe: Probe | None = None,
) -> Worker:  # fmt: skip
    """Make the worker over loaded models. `roles`: the roles of a training run; empty if nothing learns. `grids`: by role, this worker's
    groups; all their members must call this at the same time. `sharding`: the actor's. `shared`: how the models are divided and sharded
    across these workers. `division`: the reasons for that, in words. `probe`: used where passes need no other worker, by the first worker
    for all of them."""
    grid = grids.get("actor") or next(iter(grids.values()), ONE_WORKER)
    grids = {role: grids.get(role, grid) for role in ROLE_KEYS}
    ranks, layers, shared = grid.everyone, member_layers(models.layers, grid.rollout.size), shared or SharedModels()
    sampled = "rollout" in algorithm.needs and "actor" in models.own
    facts = facts_of_models(device, models, texts, layers, grids, sharding, shared, learners_of(roles), sampled=sampled)
    facts = replace(facts, division=division)
    planned = plan_roles(config, facts, kept)
    settings = planned.settings
    # All memory must be allocated before memory is measured.
    learners, several = set(learners_of(roles)), ranks.size > 1
    loaded = replicas(models, models.own.keys() - learners, grids, shared) if several else {}  # before some leave the device to make room
    made = make_roles(config, algorithm, models, settings, texts.steps_per_epoch, roles, grids, shared)
    join_groups(made.roles, settings, ranks, grids, shared)
    notes = restore(resume, made.trainers, models, shared.parts.get("actor"), adapters=config.lora.rank > 0) if resume else ()
    follow_and_sync(shared, models, made.trainers)
    loaded |= replicas(models, models.own.keys() & learners, grids, shared) if several else {}  # after a checkpoint has restored them
    if device.type == "cuda" and made.trainers:
        take_workspaces(next(iter(made.trainers.values())))
    for role in reversed(learners_of(roles)):  # from here on, parameters may move: they are restored, and known to their optimizers
        if settings[role].offload_params:
            made.residents.add(role, models.own[role], learns=True)
    waits = why_passes_wait(made.roles, shared)
    probing = WorkerProbe(probe if made.trainers else None, config, facts, device, ranks, waits)
    planned = probing.sized(planned, made.trainers, made.residents, keeps=bool(kept))
    made.residents.need(*ROLLOUT_ROLES[shared.twin is not None])
    plan = make_plan(config, replace(facts, free_bytes=ranks.least(free_bytes(device), device) // ranks.sharing), kept, planned)
    torch.set_num_threads(plan.budgets.threads)
    export, export_bytes = shared.exporter(config, models, texts.tokenizer)
    engine, host_group = None, grid.rollout.on_host()
    if sampled:
        bounds = limits(config, plan.budgets, device, texts.longest, copied=shared.twin is not None or not roles)
        members = Members(host_group, device)
        context = EngineContext(shared.rollout or models.actor, texts.tokenizer, texts.ends, layers, bounds, members)
        engine = make_engine(config.rollout.engine, context)
        if grid.rollout.size == 1:
            probing.measure_rollouts(engine, bounds, texts.longest)
    adapters = [describe_adapters(models.actor, shared.parts.get("actor"))] if config.lora.rank and "actor" in models.own else []
    return Worker(
        config=config,
        algorithm=algorithm,
        plan=plan,
        roles=made.roles,
        trainers=made.trainers,
        engine=engine,
        residents=made.residents,
        account=make_account(device, models, made, engine, shared.twin),
        export=export,
        export_bytes=export_bytes if ranks.rank == 0 else 0,
        sizes={role: size_of(facts.roles[role if role in facts.roles else "actor"]) for role in made.roles},
        notes=(*adapters, *notes, *shared.notes(config), *probing.notes),
        ranks=ranks,
        shards=tuple(shared.shards.values()),
        twin=shared.twin,
        sampling=grid.rollout,
        host_group=host_group,
        collect=shared.collect,
        probed=probing.found,
        loaded=loaded,
    )


def replicas(models: Models, roles: Collection[str], grids: Mapping[str, Grid], shared: SharedModels) -> dict[str, Replica]:
    """Return checksums of these roles' models, which must be on the device, to compare workers. Where all workers share one model's
    parameters, no two hold the same, and nothing is compared."""
    found: dict[str, Replica] = {}
    for role in sorted(roles):
        model, grid, shards = models.own[role], grids[role], shared.shards.get(role)
        part = (grid.tensor.rank, grid.experts.rank, shards.sharing.group.rank if shards else 0)
        found[role] = Replica(part, checksum((local(own) for own in model.parameters() if local(own).numel()), 0))
    return found


class WorkerProbe:
    """Measures this worker's device while the worker is made; the first worker measures for all of them."""

    def __init__(
        self, probe: Probe | None, config: Config, facts: Facts, device: torch.device, ranks: Ranks, waits: str | None = None
    ) -> None:
        """`probe`: None if nothing is to be measured. `waits`: the reason why nothing can be measured, if any."""
        self.probe, self.config, self.facts, self.device, self.ranks = probe, config, facts, device, ranks
        self.found, self.notes = NOTHING_PROBED, list[str]()
        if probe and waits:
            if config.run.probe is True and "actor" in facts.roles:
                raise UserError(f"run.probe: true, but nothing can be measured: {waits}, and {WAITS}. Remove the key")
            self.probe = None
            self.notes += [f"probe: nothing of the {joined(learning(facts), 'and')} is measured: {waits}, and {WAITS}"]
        self._where = environment(device, {"compile": config.train.compile, "deterministic": config.run.deterministic})
        self._limits = {role: TimeLimit(MOST_SECONDS, clock=bool(probe and probe.clock)) for role in facts.roles}

    def sized(self, planned: RolePlan, trainers: Mapping[str, Trainer], residents: Residents, *, keeps: bool) -> RolePlan:
        """Return the plan with token budgets from measured updates, except for budgets that are given or kept from an earlier plan.
        `residents`: moves the parameters of roles that wait, as in the run."""
        if self.probe is None:
            return planned
        sizes = not keeps and self.config.actor.token_budget == "auto"
        if self.ranks.rank == 0:
            measure = partial(self._costs, self.probe, planned, trainers, residents.need)
            costs, before = measured_if_possible(measure, dict[str, UpdateCosts](), self.notes), planned
            self.found = Probed(updates=costs["actor"].passes if "actor" in costs else ())
            planned = budgets_by_costs(self.config, self.facts, planned, costs) if sizes else planned
            self.notes += self._where_memory_ran_out(costs, before, planned)
        if sizes:  # all workers use the sizes of the first, whose device was measured
            first = planned.budgets if self.ranks.rank == 0 else {}
            agreed = {role: self.ranks.most(first.get(role, 0), self.device) for role in trainers}
            planned = replace(planned, budgets={**planned.budgets, **{role: count for role, count in agreed.items() if count}})
        return planned

    def _costs(
        self, probe: Probe, planned: RolePlan, trainers: Mapping[str, Trainer], bring: Callable[[str], None]
    ) -> dict[str, UpdateCosts]:
        config, facts = self.config, self.facts
        largest, longest = largest_micro_batches(config, facts, planned, trainers), longest_row(config, facts)
        return probe_updates(probe, trainers, facts.roles, planned.settings, largest, longest, self._where, self._limits, bring, self.notes)

    def _where_memory_ran_out(self, costs: Mapping[str, UpdateCosts], before: RolePlan, after: RolePlan) -> Iterator[str]:
        for role, own in costs.items():
            if own.ran_out_at is None:
                continue
            planned, now = (update_budget(self.config, self.facts.device, role, each.budgets) for each in (before, after))
            then = f"token budget is {now} instead of {planned}"
            if now == planned:
                then = "micro-batches stay as they were planned, and the run makes them smaller where memory runs out in it too"
            yield f"probe: memory ran out in an update of the {role} with {many(own.ran_out_at, 'token')}: its {then}"

    def measure_rollouts(self, engine: Engine, bounds: EngineLimits, longest: int) -> None:
        """Measure rollouts if updates were measured too, on a GPU only: the time models, which are compared with the results, cover no
        CPU."""
        if self.probe is None or not self.found.updates or self.device.type != "cuda" or "actor" not in self.facts.roles:
            return
        own, algorithm = self.config.rollout, self.config.algorithm
        drawn = Sampling(algorithm.samples_per_prompt, own.max_new_tokens, own.temperature, own.top_p, own.top_k)
        prompts = -(-algorithm.prompts_per_step // self.ranks.size)
        limit, where = self._limits["actor"], (*self._where, own.engine)
        measure = partial(
            probe_rollouts, self.probe, engine, bounds, self.facts.actor, drawn, prompts, longest, where, self.device, limit,
            self.notes,
        )  # fmt: skip
        self.found = replace(self.found, rollouts=tuple(measured_if_possible(measure, (), self.notes)))


def largest_micro_batches(config: Config, facts: Facts, planned: RolePlan, roles: Collection[str]) -> dict[str, int]:
    """Return the tokens of the largest micro-batch that an update of each role may have."""
    algorithm, longest = config.algorithm, longest_row(config, facts)
    rows = -(-algorithm.prompts_per_step * (algorithm.samples_per_prompt if facts.rollout else 1) // algorithm.minibatches_per_step)
    return {role: min(rows * longest, micro_batch_tokens(config, facts, role, planned.budgets, 1)) for role in roles}


def why_passes_wait(roles: Mapping[str, Role], shared: SharedModels) -> str | None:
    """Return why some role's pass waits for other workers, which must make it at the same time. None: no pass does."""
    if shared.shards:
        return "workers share out parameters (train.shard)"
    for role, own in roles.items():
        if own.tensor.size > 1:
            return f"workers divide the layers of the {role} (tensor_parallel)"
        if own.meets:
            return f"workers divide the experts of the {role} (expert_parallel)"
        if own.sequence.size > 1:
            return f"workers share micro-batches of the {role} (sequence_parallel)"
    return None


def learning(facts: Facts) -> list[str]:
    return [role for role, own in facts.roles.items() if own.trained]


def facts_of_models(
    device: torch.device, models: Models, texts: TextFacts, layers: Mapping[int, LayerShape], grids: Mapping[str, Grid], sharding: Sharding,
    shared: SharedModels, learners: Collection[str], *, sampled: bool,
) -> Facts:  # fmt: skip
    """Collect the facts that the plan is made from, about loaded models as they are divided and sharded. `grids`: for every role."""
    grid = grids["actor"]
    sharding = replace(sharding, experts=grid.experts.size)
    of_roles = {
        role: shared.facts.get(role) or role_facts(model, learns=role in learners, part=shared.parts.get(role))
        for role, model in models.own.items()
    }
    sizes = {role: RoleSizes(grids[role].tensor.size, grids[role].experts.size) for role in models.own}
    others = {role: own for role, own in sizes.items() if own != RoleSizes(grid.tensor.size, grid.experts.size)}
    read = (shared.rollout or models.actor) if sampled else None
    facts = find_facts(device, of_roles, read, layers, models.fused, texts, grid=grid, sharding=sharding)
    copied = 0
    if shared.copied and shared.rollout is not None:
        target = shared.twin.target if isinstance(shared.twin, RolloutCopy) else None
        copied = sum(each.bytes for each in parameter_sizes(shared.rollout, part=target))
    return replace(facts, divisions=others, copy_bytes=copied)


def join_groups(
    roles: Mapping[str, Role], settings: Mapping[str, RoleSettings], ranks: Ranks, grids: Mapping[str, Grid], shared: SharedModels
) -> None:
    """Give each role the workers that it computes with. All workers must call this at the same time."""
    together: dict[int, set[int]] = {}  # by members per model: sizes of groups that share micro-batches
    for name in roles:
        together.setdefault(grids[name].tensor.size, set()).add(settings[name].sequence_parallel)
    groups = {members: make_groups(ranks, together[members], members) for members in sorted(together)}
    for name, own in roles.items():
        own.tensor, own.progress = grids[name].tensor, ranks.progress
        own.sequence = groups[own.tensor.size].get(settings[name].sequence_parallel, ONE)
        own.meets = any(own.model is part.model for part in shared.parts.values() if isinstance(part, ExpertSplit))


def follow_and_sync(shared: SharedModels, models: Models, trainers: Mapping[str, Trainer]) -> None:
    """Tell the engine's model which model it follows, and copy the restored weights to it."""
    if isinstance(shared.twin, RolloutCopy) and "actor" in trainers:
        optimizer = trainers["actor"].optimizer
        shared.twin.follow(models.actor, shared.parts.get("actor"), shared.shards.get("actor"), lambda: optimizer.version)
    if shared.twin:
        shared.twin.sync()


def learners_of(roles: Collection[str]) -> list[str]:
    return [role for role in ("actor", "critic") if role in roles]


def shares_out(config: Config, roles: Collection[str], ranks: Ranks) -> bool:
    return bool(roles) and shares_parameters(config) and not ranks.alone


def size_of(role: RoleFacts) -> ModelSize:
    return ModelSize.of_shape(role.shape, vocabulary_head=role.vocabulary_head)


@dataclass(frozen=True, eq=False)
class RolesMade:
    """Every role of a worker, with the objects that train and move them."""

    roles: Mapping[str, Role]
    trainers: Mapping[str, Trainer]  # one for each role that learns
    residents: Residents
    offloads: tuple[ActivationOffload, ...]  # one for each role that sends activations to the host


def make_roles(
    config: Config, algorithm: Algorithm, models: Models, settings: Mapping[str, RoleSettings], steps_per_epoch: int,
    wanted: Collection[str], grids: Mapping[str, Grid], shared: SharedModels | None = None,
) -> RolesMade:  # fmt: skip
    """Make the roles and their optimizers. `wanted`: the roles of a training run; empty if nothing learns."""
    roles: dict[str, Role] = {}
    shared = shared or SharedModels()
    residents, options = Residents(), head_options(settings["actor"])
    if isinstance(judge := models.own.get("reward_model"), ScalarModel):
        roles["reward_model"] = Scorer("reward_model", judge)
    if not wanted:
        roles |= {"actor": Policy("actor", models.actor, 1.0, options=options)} if "actor" in models.own else {}
        return RolesMade(roles, {}, residents, ())
    for role in ("reward_model", "ref"):  # these leave the device before the optimizers take memory
        if role in models.own and settings[role].offload_params:
            residents.add(role, models.own[role], learns=False)
    residents.need("actor", "critic")
    offloads = [keep_less(models.own[role], settings[role]) for role in ("actor", "critic") if role in wanted]
    temperature = config.rollout.temperature if "rollout" in algorithm.needs else 1.0
    total = count_steps(config, steps_per_epoch) * updates_per_step(config)
    of_actor = total - algorithm.critic_warmup * updates_per_step(config)  # the actor's schedule must also end with the run
    optimizer_of = partial(make_optimizer, grids=grids, shared=shared)
    trainers: dict[str, Trainer] = {}
    if "actor" in wanted:
        adapters = config.lora.rank > 0
        optimizer = optimizer_of("actor", models.actor, config.train, of_actor, settings["actor"], keeps_parameters=adapters)
        roles["actor"] = actor = Policy("actor", models.actor, temperature, optimizer, algorithm.entropy_gradient, options=options)
        rest = shared.shards["actor"].rest if "actor" in shared.shards else None
        trainers["actor"] = Trainer(actor, algorithm.loss, marking(algorithm.marks, actor, grids["actor"].everyone), rest)
    if algorithm.value_loss and isinstance(model := models.own.get("critic"), ScalarModel):
        own = {
            name: getattr(config.critic, name) for name in ("lr", "schedule", "warmup_steps", "min_lr_ratio", "weight_decay", "clip_grad")
        }
        of_critic = config.train.model_copy(update={name: value for name, value in own.items() if value is not None})
        optimizer = optimizer_of("critic", model, of_critic, total, settings["critic"], keeps_parameters=True)
        roles["critic"] = critic = Critic("critic", model, optimizer)
        trainers["critic"] = Trainer(critic, algorithm.value_loss)
    if "ref" in wanted:
        roles["ref"] = make_ref(models, settings, temperature)
    return RolesMade(roles, trainers, residents, tuple(offload for offload in offloads if offload))


def make_ref(models: Models, settings: Mapping[str, RoleSettings], temperature: float) -> Policy:
    options, own = head_options(settings["ref"]), models.own.get("ref")
    if own is None:
        return Policy("ref", models.actor, temperature, as_role=partial(lora.without_adapters, models.actor), options=options)
    assert isinstance(own, PreTrainedModel)
    return Policy("ref", own, temperature, options=options)


def make_optimizer(
    role: str, model: torch.nn.Module, config: TrainConfig, updates: int, settings: RoleSettings, *, keeps_parameters: bool,
    grids: Mapping[str, Grid], shared: SharedModels,
) -> Optimizer:  # fmt: skip
    grid = grids[role]
    offload, part = OffloadSetting(optimizer=settings.offload_optimizer, grads=settings.offload_grads), shared.parts.get(role)
    return Optimizer(
        model, config, updates, keeps_parameters=keeps_parameters, offload=offload, ranks=grid.data, shards=shared.shards.get(role),
        divided=Divided(part, grid.everyone, grid.replicas) if part else None,
    )  # fmt: skip


def keep_less(model: torch.nn.Module, settings: RoleSettings) -> ActivationOffload | None:
    """Apply the recompute and offload settings of a role that learns to its layers. Call it after layers are fused or compiled: what is put
    onto a layer first stays innermost."""
    if settings.recompute != "none":
        apply_recompute(model, Recompute(settings.recompute, settings.recompute_layers, settings.recompute_method))
    return offload_activations(model) if settings.offload_activations else None


def head_options(settings: RoleSettings) -> HeadOptions:
    return HeadOptions(settings.fused_head, settings.entropy_chunk, settings.entropy_recompute, settings.head_recompute)


def make_account(device: torch.device, models: Models, made: RolesMade, engine: Engine | None, twin: Twin | RolloutCopy | None) -> Account:
    own, optimizers = models.own.values(), [trainer.optimizer for trainer in made.trainers.values()]
    accumulators = [optimizer.accumulators for optimizer in optimizers]
    return Account(
        device,
        {
            "parameters": [*(partial(weights_of, model) for model in own), made.residents.memory, *([twin.memory] if twin else [])],
            **({"gradients": [*(partial(gradients_of, model) for model in own), *accumulators]} if optimizers else {}),
            **({"optimizer": [optimizer.memory for optimizer in optimizers]} if optimizers else {}),
            **({"kv": [engine.memory]} if engine else {}),
            **({"activations": [offload.pages.memory for offload in made.offloads]} if made.offloads else {}),
        },
    )


def take_workspaces(trainer: Trainer) -> None:
    """Make one pass with its gradient over a few tokens. cuBLAS keeps memory for each thread that multiplies, and the backward pass has its
    own thread: if taken at the first update, that memory would lie inside memory freed by the KV cache, which then would never fit in one
    piece again."""
    trainer.optimizer.prepare()
    trainer.role.nothing().backward()  # type: ignore[no-untyped-call]
    trainer.optimizer.zero_grad()


def restore(
    resume: Checkpoint, trainers: Mapping[str, Trainer], models: Models, part: ModelPart | None = None, *, adapters: bool
) -> tuple[str, ...]:
    """Restore optimizers, and parameters that no exported model contains. Returns notes on what the checkpoint lacks. `part`: this worker's
    part of the actor, if it is divided."""
    if not trainers and not adapters:
        return ()
    state = resume.state()
    with resume.open() as saved:
        of_actor = saved.select(without=(CRITIC_TENSORS, SURPLUS_TENSORS))
        if "actor" in trainers:
            trainers["actor"].optimizer.restore(of_actor, updates=state["updates"], skipped=state["skipped"])
        elif "actor" in models.own:
            restore_parameters(models.actor, of_actor, part)
        if "critic" not in trainers:
            return ()
        if state.get("critic") is None:
            return ("the checkpoint holds no critic: a new one is started",)
        trainers["critic"].optimizer.restore(saved.select(CRITIC_TENSORS), **state["critic"])
    return ()
