"""The plan of a run of fulltilt on hardware that need not be here: what fulltilt.plan decides, and the inputs of the models of memory and
time.

Enters: a configuration, a shape, a cluster and the mean response. Leaves: a `RunDescription`, the knobs with their reasons, or why nothing
fits. Guaranteed: no weights, no data, no GPU; `auto` is decided by fulltilt.plan, as in the run itself, for each team of GPUs that have the
same roles.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from fulltilt.hardware import Cluster
from fulltilt.knobs import LEDGER
from fulltilt.parallel.cuts import expert_counts, require_legal, require_legal_experts, whole_experts_in_rollouts
from fulltilt.parallel.layout import Sharding
from fulltilt.plan.cache import (
    BATCHED_TOKENS,
    MOST_SEQS,
    blocks_per_sample,
    cache_bytes,
    graphs_without_device,
    uses_graphs,
    why_decoding_has_no_graphs,
)
from fulltilt.plan.decisions import (
    KEPT_AS,
    OFFLOADS,
    RolePlan,
    RoleSettings,
    longest_response,
    releases_memory,
    size_key,
    sizes_given,
    unless_auto,
    updates_per_step,
)
from fulltilt.plan.division import Division, choose_division, divided, why_undivided
from fulltilt.plan.facts import Facts, RoleFacts
from fulltilt.plan.make import Plan, check_context, make_plan
from fulltilt.plan.micro_batches import TOKEN_BUDGET, update_budget
from fulltilt.plan.resident import check_loading
from fulltilt.plan.roles import plan_roles
from fulltilt.plan.sharding import choose_sharding, why_unshared
from fulltilt.records import DoesNotFit, UserError
from fulltilt.schema import Config, shares_model, uses_reward_model, value_of
from fulltilt.settings import algorithm_settings, bounds_of, is_set, needs_of, preset_of
from fulltilt.shape import Recompute, Shape
from fulltilt.tune.constants import ENGINE_WORKSPACE, FULLTILT
from fulltilt.tune.description import BatchDescription, EngineDescription, Role, RoleDescription, RunDescription, TrainLayout
from fulltilt.tune.lengths import Lengths
from fulltilt.tune.memory_model import parameters
from fulltilt.tune.shapes import named_shape
from fulltilt.words import joined, many

HOST_SHARE = 2  # host memory of a machine for each of its GPUs, as a multiple of the GPU's memory (DGX H100: 2 TB for 640 GB)
PROMPT_TOKENS = 256  # mean tokens of a prompt, at most half of the longest
ROW_TOKENS = 4096  # tokens of the longest row of SFT, if data.max_tokens does not set them
READERS = ("actor", "ref", "critic")  # roles that read whole samples as tokens of the actor
BUDGETS_OF = {
    "actor": ("token_budget", "forward_token_budget"),
    "critic": ("critic_token_budget", "critic_forward_token_budget"),
    "ref": ("", "ref_token_budget"),
    "reward_model": ("", "reward_model_token_budget"),
}


@dataclass(frozen=True)
class OwnPlan:
    run: RunDescription
    knobs: Mapping[str, Any] = field(default_factory=dict)  # only the known ones, if fulltilt.plan refuses the run
    reasons: tuple[str, ...] = ()  # what the run does, and what the models leave out
    refused: str = ""  # why fulltilt.plan finds that it does not fit
    why: Mapping[str, str] = field(default_factory=dict)  # why each knob has its value


def own_plan(config: Config, shape: Shape, cluster: Cluster, response: float | None) -> OwnPlan:
    """Plan a run. `response`: mean tokens; None: a quarter of the longest."""
    check_device(config, cluster)
    settings, (shapes, unknown) = algorithm_settings(config), shapes_of(config, shape)
    lengths = lengths_of(config, shapes, response)
    check_readers(config, shapes, lengths)
    teams = teams_of(config, shapes, cluster, lengths)
    first = teams["actor"]
    run = actor_run(config, shape, first, settings, lengths)
    others = [other_role(config, run, cast(Role, role), shapes[role], teams[role]) for role in shapes if role != "actor"]
    run = replace(run, others=tuple(replace(own, apart=teams[own.role] is not first) for own in others))
    every = list(dict.fromkeys(teams.values()))
    refused = "; ".join(team.refused for team in every if team.refused)
    words = (steps_in_words(config), *unknown, *notes(config, settings, lengths))
    knobs = knobs_of(config, teams)
    return OwnPlan(run, knobs, words, refused, reasons_of(config, teams, knobs))


def lengths_of(config: Config, shapes: Mapping[str, Shape], response: float | None) -> Lengths:
    """Return the lengths of prompts and responses; if rows are given (SFT), the whole row counts as response."""
    sampled = preset_of(config).rollout
    most = config.rollout.max_new_tokens if sampled else longest_row(config, shapes["actor"])
    mean = min(most, most / 4 if response is None else response)
    if not sampled:
        return Lengths(0, most, 0.0, mean)
    prompt = longest_prompt(config, shapes)
    return Lengths(prompt, most, min(PROMPT_TOKENS, prompt / 2), mean, longest_response(config))


def longest_prompt(config: Config, shapes: Mapping[str, Shape]) -> int:
    """Return the tokens of the longest prompt that there may be: every model that reads samples must have positions for it, beside the
    longest response."""
    limits = [shapes[role].positions for role in READERS if role in shapes]
    least = min((limit for limit in limits if limit is not None), default=None)
    most = config.data.max_prompt_tokens
    return most if least is None else min(most, max(1, least - longest_response(config)))


def check_readers(config: Config, shapes: Mapping[str, Shape], lengths: Lengths) -> None:
    """Refuse responses that are longer than the context of a model beside the actor, as the run does."""
    for role in (role for role in READERS if shapes.get(role, shapes["actor"]) is not shapes["actor"]):
        check_context(config, lengths.most_prompt, shapes[role].positions, rollout=True, whose=f"the model of {role}.path")


def longest_row(config: Config, shape: Shape | None) -> int:
    """Return the tokens of the longest row of SFT, for which the model must have positions. `shape`: None if it is not known yet."""
    most = config.data.max_tokens or ROW_TOKENS
    return most if shape is None or shape.positions is None else min(most, shape.positions)


def shapes_of(config: Config, shape: Shape) -> tuple[dict[str, Shape], list[str]]:
    """Return the roles that have a model of their own, with its shape, and notes about paths whose size is not known."""
    found, unknown = {"actor": shape}, list[str]()
    used = {
        "ref": compares(config) and not shares_model(config),
        "critic": bool(preset_of(config).critic),
        "reward_model": preset_of(config).rollout and uses_reward_model(config),
    }
    for role in (role for role, wanted in used.items() if wanted):
        path = getattr(config, role).path
        try:
            found[role] = named_shape(path) if path and path != config.model.path else shape
        except UserError:
            found[role] = shape
            unknown.append(f"{role}.path: the size of {path!r} is not known. It is counted with that of the actor")
    return found, unknown


def compares(config: Config) -> bool:
    """Return whether the run has a reference role."""
    return "ref_logprobs" in needs_of(config)


# ---- teams -------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TeamPlan:
    """GPUs that have the same models, and fulltilt.plan's decisions for them."""

    cluster: Cluster
    way: Division
    facts: Facts  # facts of one of its workers
    made: Plan | None  # None: nothing fits
    refused: str = ""  # why it does not fit
    settled: RolePlan | None = None  # how roles would run, if that is known of a run that does not fit

    @property
    def settings(self) -> Mapping[str, RoleSettings]:
        """Settings of the roles, as far as they are known."""
        return self.made.roles if self.made else self.settled.settings if self.settled else {}

    @property
    def reasons(self) -> Mapping[tuple[str, str], str]:
        """Why `auto` became what it did, by role and key."""
        return self.made.reasons if self.made else self.settled.reasons if self.settled else {}

    @property
    def budgets_of_auto(self) -> Mapping[str, int]:
        """Tokens of the updates' micro-batches, by role."""
        if self.made:
            return {role: getattr(self.made.budgets, BUDGETS_OF[role][0]) for role in self.facts.roles if BUDGETS_OF[role][0]}
        return self.settled.budgets if self.settled else {}

    def layout(self, config: Config, role: str) -> TrainLayout:
        sharding, own = self.facts.sharding_of(role), self.way.of(config, role)
        return TrainLayout(
            tensor=self.facts.parts_of(role),
            sequence=self.settings[role].sequence_parallel if role in self.settings else 1,
            expert=own.apart,
            whole_experts=own.experts > 1,
            shard=sharding.group if sharding.parameters else 1,
        )

    def execution(self, config: Config, role: str) -> dict[str, Any]:
        """Return the fields of a `RunDescription` that say how a role runs."""
        own, model = self.settings.get(role), self.facts.roles[role]
        found: dict[str, Any] = {
            "cluster": self.cluster,
            "layout": self.layout(config, role),
            "backend": "fsdp" if self.facts.sharding_of(role).parameters else "megatron",
            "fused_kernels": model.fused,
        }
        if own is None:
            return found
        offloads = {f"offload_{kind}": getattr(own, f"offload_{kind}") for kind in ("params", "grads", "optimizer", "activations")}
        recompute = Recompute(own.recompute, own.recompute_layers, own.recompute_method)
        return found | offloads | {"recompute": recompute, "fused_head": own.fused_head, "kept_logits": not own.head_recompute}

    def budgets(self, config: Config, role: str) -> dict[str, int | None]:
        """Return the limits of a role's micro-batches: a number of tokens, or of samples."""
        section = getattr(config, role)
        if not section.dynamic_batch and section.micro_batch:
            of_samples = dict.fromkeys(("micro_batch", "forward_micro_batch"), section.micro_batch)
            return {**of_samples, "token_budget": None, "forward_token_budget": None}
        update, forward = BUDGETS_OF[role]
        usual = TOKEN_BUDGET[self.cluster.gpu.device]
        each = [getattr(self.made.budgets, name) if self.made and name else usual for name in (update, forward)]
        return {"token_budget": each[0], "forward_token_budget": each[1]}


def teams_of(config: Config, shapes: Mapping[str, Shape], cluster: Cluster, lengths: Lengths) -> dict[str, TeamPlan]:
    """Return the team of each role, the actor's first (cluster/teams.py)."""
    apart = {str(role): count for role, count in sorted(config.cluster.roles.items()) if role in shapes}
    if (taken := sum(apart.values())) >= cluster.gpus and apart:
        raise UserError(
            f"cluster.roles: they take {taken} of the run's {cluster.gpus} GPUs, and the actor needs at least one. Give roles at most "
            f"{cluster.gpus - 1}, or plan for more GPUs"
        )
    end = cluster.gpus - taken
    together = [role for role in shapes if role not in apart]
    first = planned(config, {role: shapes[role] for role in together}, cluster, range(end), lengths)
    found = dict.fromkeys(together, first)
    for role, count in apart.items():
        found[role] = planned(config, {role: shapes[role]}, cluster, range(end, end + count), lengths)
        end += count
    return found


def planned(config: Config, shapes: Mapping[str, Shape], cluster: Cluster, ranks: range, lengths: Lengths) -> TeamPlan:
    """Return fulltilt.plan's decisions for the devices `ranks` of a run, which have these roles; or why nothing fits."""
    device = cluster.gpu.device
    sampled = preset_of(config).rollout and "actor" in shapes
    roles = {role: RoleFacts.of_shape(shape, config, device, learns=role in KEPT_AS, role=role) for role, shape in shapes.items()}
    longest = lengths.most_prompt if sampled else lengths.longest_row
    memory, size, machine = cluster.gpu.memory, len(ranks), max(1, min(cluster.per_machine, cluster.gpus))
    # The same rule as in parallel/ranks.py and cluster/sizes.py: groups of neighbours are on one machine.
    within = size if ranks[0] // machine == ranks[-1] // machine else math.gcd(size, machine, ranks[0])
    beside = machine if ranks[0] % machine == 0 else 1
    check_sizes(config, shapes, size)
    on_device, on_host = (0, memory) if device == "cpu" else (memory, HOST_SHARE * memory)
    sharding, neighbours = Sharding(workers=size), min(machine, size)
    whole = Facts(
        device, on_device, on_host, roles, longest, 1, rollout=sampled, sharding=sharding, beside=neighbours, within=within
    )  # fmt: skip
    only, unshared = why_undivided(config, sampled=sampled), why_unshared(config)
    way = choose_division(config, whole, within=within, beside=beside, only=only, unshared=unshared)
    facts = divided(config, whole, way)
    sharding = choose_sharding(config, facts, beside // way.tensor if beside % way.tensor == 0 else 1, only=unshared)
    if sharding.parameters and facts.sharding.workers < sharding.group:
        sharding = replace(sharding, shard="full", group=facts.sharding.workers)
    facts, team = replace(facts, sharding=sharding, division=way.words), replace(cluster, gpus=size)
    try:
        check_loading(facts)
        return TeamPlan(team, way, facts, make_plan(config, facts))
    except DoesNotFit as error:
        return TeamPlan(team, way, facts, None, str(error), settled_roles(config, facts))


def settled_roles(config: Config, facts: Facts) -> RolePlan | None:
    """Return how roles would run in a run that fulltilt.plan refuses; None: the roles' own plan is what it refuses."""
    try:
        return plan_roles(config, facts)
    except UserError:
        return None


def check_device(config: Config, cluster: Cluster) -> None:
    """Refuse keys that have no effect on a CPU, as the run does."""
    if not cluster.gpu.is_cpu:
        return
    keys = [f"{section}.{name}" for section in ("train", *BUDGETS_OF) for name in OFFLOADS if hasattr(getattr(config, section), name)]
    without_effect = [key for key in keys if value_of(config, key) is True]
    wrong = [f"{key}: true, but the run is on the CPU: its memory is the host's already. Remove the key" for key in without_effect]
    if wrong := [*wrong, *graphs_without_device(config, cluster.gpu.device)]:
        raise UserError("; ".join(wrong))


def check_sizes(config: Config, shapes: Mapping[str, Shape], workers: int) -> None:
    """Refuse sizes that the models or the number of GPUs cannot have."""
    given = {key: unless_auto(size, 1) for key, size in sizes_given(config).items()}
    division, rollout = Division(given["train.tensor_parallel"], given["train.expert_parallel"]), "rollout.tensor_parallel"
    sizes = {role: division.of(config, role) for role in shapes}
    keys = {name: {role: size_key(config, role, name) for role in shapes} for name in ("tensor_parallel", "expert_parallel")}
    counts = {keys["tensor_parallel"][role]: own.tensor for role, own in sizes.items()}
    counts |= {keys["expert_parallel"][role]: own.experts for role, own in sizes.items()}
    counts |= {rollout: given[rollout]} if "actor" in shapes else {}
    for key, size in counts.items():
        if workers % size:
            raise UserError(f"{key}: {size} does not divide the {workers} GPUs of the {joined(list(shapes), 'and')}. Change one of them")
    for role, own in sizes.items():
        require_legal(shapes[role], own.tensor, keys["tensor_parallel"][role], whole_experts=own.experts > 1)
        if own.experts > 1 and expert_counts(shapes[role]):  # members that divide layers have whole experts, each the same number
            require_legal_experts(shapes[role], max(own.tensor, own.experts), keys["expert_parallel"][role])
    if "actor" in shapes:
        size, experts = given[rollout], config.rollout.expert_parallel
        whole = whole_experts_in_rollouts(experts, size, division.tensor, division.experts, shapes["actor"])
        require_legal(shapes["actor"], size, rollout, whole_experts=whole)
        if whole:
            require_legal_experts(shapes["actor"], size, "rollout.expert_parallel")


# ---- the description ---------------------------------------------------------------------------------------------------------------------


def actor_run(config: Config, shape: Shape, team: TeamPlan, settings: Mapping[str, Any], lengths: Lengths) -> RunDescription:
    algorithm, sampled = config.algorithm, preset_of(config).rollout
    copies = sampled and bool(team.facts.copy_bytes or team.facts.sharding.parameters)
    return RunDescription(
        shape=shape,
        lengths=lengths,
        engine=EngineDescription(
            tensor=team.way.rollout,
            memory_share=engine_share(config, shape, team, copies=copies) if sampled else 0.0,
            graphs=uses_graphs(config, team.facts.device, copied=copies),
            max_seqs=team.made.budgets.max_seqs if team.made else MOST_SEQS[team.facts.device],
            max_batched_tokens=team.made.budgets.max_batched_tokens if team.made else BATCHED_TOKENS[team.facts.device],
            shares_prompts=config.rollout.prefix_sharing,
            sleeps=releases_memory(config),
            own_copy=copies,
            keeps_copy=copies,
        ),
        batch=BatchDescription(
            algorithm.prompts_per_step,
            algorithm.samples_per_prompt if sampled else 1,
            max(1, algorithm.prompts_per_step // (algorithm.minibatches_per_step or 1)),
            **team.budgets(config, "actor"),  # type: ignore[arg-type]
            epochs=algorithm.epochs,
            sampled=settings["prompts_per_round"] if settings.get("dynamic_sampling") else None,
        ),
        old_logprobs=sampled and reads_old(config, settings),
        trained=RoleFacts.of_shape(shape, config, "cuda", learns=True).trained if config.lora.rank else None,
        shared_reference=compares(config) and shares_model(config),
        fused_rope=True,
        entropy=bool(settings.get("entropy_coef")),
        rollout=sampled,
        itemsize=team.facts.actor.itemsize,
        system=FULLTILT if config.train.forward_prefetch else replace(FULLTILT, exposed=1.0),
        name="the run",
        **{"fused_head": True} | team.execution(config, "actor"),
    )  # fmt: skip


def other_role(config: Config, run: RunDescription, role: Role, shape: Shape, team: TeamPlan) -> RoleDescription:
    batch = replace(run.batch, sampled=None, **team.budgets(config, role))  # type: ignore[arg-type]
    if role == "reward_model":  # the reward model scores everything that is sampled, kept or not
        batch = replace(batch, prompts=run.batch.rollout_prompts)
    adapted = config.lora.rank and config.lora.critic
    trained = RoleFacts.of_shape(shape, config, "cuda", learns=True, role=role).trained if adapted and role == "critic" else None
    return run.beside(role, **team.execution(config, role) | {"shape": shape, "batch": batch, "trained": trained})


def engine_share(config: Config, shape: Shape, team: TeamPlan, *, copies: bool) -> float:
    """Return the share of a GPU that the engine takes: its KV cache and workspaces, and a copy of the parameters if it has one."""
    cache = cache_bytes(config, team.facts, team.made.budgets.kv_blocks) if team.made else 0
    copy = team.facts.actor.itemsize * parameters(shape).total // team.way.rollout if copies else 0
    return (cache + copy + ENGINE_WORKSPACE) / team.cluster.gpu.memory


def reads_old(config: Config, settings: Mapping[str, Any]) -> bool:
    """Return whether the trainer computes log-probs before the first update, as algo/build.py decides it: for the loss, or for a
    correction before it."""
    corrected = bool(bounds_of(settings)) or str(settings.get("importance_level")).endswith("normalized")
    return corrected or "old_logprobs" in needs_of(config)


# ---- words -------------------------------------------------------------------------------------------------------------------------------


def steps_in_words(config: Config) -> str:
    """Return fulltilt.plan's first words, without the number of steps in an epoch, since the data was not read here."""
    algorithm, run = config.algorithm, config.run
    each = f"{many(run.steps, 'step')}, each of" if run.steps else f"{many(run.epochs or 1, 'epoch')}, each step of"
    updates = many(updates_per_step(config), "optimizer step")
    if not preset_of(config).rollout:
        return f"{each} {many(algorithm.prompts_per_step, 'row')}, {updates}"
    prompts, samples = many(algorithm.prompts_per_step, "prompt"), many(algorithm.samples_per_prompt, "sample")
    count = algorithm.prompts_per_step * algorithm.samples_per_prompt
    return f"{each} {prompts} x {samples} = {many(count, 'sample')}, {updates}"


def notes(config: Config, settings: Mapping[str, Any], lengths: Lengths) -> Iterator[str]:
    """Yield the assumptions, and what the seconds leave out."""
    preset = preset_of(config)
    key, most, taken = (
        ("data.max_prompt_tokens", config.data.max_prompt_tokens, lengths.most_prompt) if preset.rollout
        else ("data.max_tokens", config.data.max_tokens or 0, lengths.longest_row)
    )  # fmt: skip
    if taken < most:
        whose = f"prompts have at most {many(taken, 'token')}" if preset.rollout else f"rows have at most {many(taken, 'token')}"
        yield f"{whose} here: the model has no positions for {key} = {most}"
    if not preset.rollout and config.data.max_tokens is None:
        yield "rows count with the longest that the model may have, at most 4096 tokens (data.max_tokens says another number)"
    if settings.get("dynamic_sampling"):
        yield (
            f"dynamic sampling: one round of {many(settings['prompts_per_round'], 'prompt')} is counted in each step. How many a step "
            f"needs depends on the rewards (at most {settings['max_rounds']}); each further one takes as long as the rollout again"
        )
    if preset.baseline:
        yield "not counted: the greedy sample of each prompt"
    if "sharp_logprobs" in preset.needs:
        yield "not counted: the second pass for log-probs at half the temperature"


# ---- knobs -------------------------------------------------------------------------------------------------------------------------------

OF_ACTOR = ("recompute", "offload_optimizer", "offload_grads", "offload_params", "offload_activations", "head_recompute")
OF_OTHERS = {"critic": ("recompute", "offload_optimizer", "offload_params", "offload_activations"), "ref": ("offload_params",)}
OF_OTHERS["reward_model"] = OF_OTHERS["ref"]
# Knobs that keep their default unless they are set: in every run, with several GPUs, with sharded parameters, and in rollouts.
FIXED = ("train.packing", "train.fused_head", "train.entropy_recompute", "actor.dynamic_batch")
OF_SEVERAL, OF_SHARED = ("train.balance",), ("train.reshard_after_forward", "train.forward_prefetch")
OF_ROLLOUT = ("rollout.engine", "rollout.block_tokens", "rollout.chunked_prefill", "rollout.prefix_sharing", "rollout.log_stats")
SET_BY_HAND = "set in the run"


def knobs_of(config: Config, teams: Mapping[str, TeamPlan]) -> dict[str, Any]:
    """Return the value of every performance knob that has an effect in this run or is set in it; only the known ones, if fulltilt.plan
    refuses the run."""
    team = teams["actor"]
    facts, own = team.facts, team.settings.get("actor")
    found: dict[str, Any] = dict(layout_knobs(config, team)) if team.cluster.gpus > 1 else {}
    found |= {f"train.{name}": getattr(own, name) for name in OF_ACTOR} if own else {}
    found |= {"train.fused_layers": facts.actor.fused, "train.compile": config.train.compile is True}
    found |= dict(budget_knobs(config, "actor", team))
    found |= dict(rollout_knobs(config, team)) if facts.rollout else {}
    for role in (role for role in OF_OTHERS if role in teams):
        found |= dict(role_knobs(config, role, teams[role]))
    fixed = (*FIXED, *(OF_SEVERAL if team.cluster.gpus > 1 else ()), *(OF_SHARED if facts.sharding.parameters else ()))
    found |= {key: value_of(config, key) for key in (*fixed, *(OF_ROLLOUT if facts.rollout else ()))}
    by_hand = (knob.name for knob in LEDGER if knob.built and is_set(config, knob.name))
    return found | {knob: value_of(config, knob) for knob in by_hand if knob not in found}


def layout_knobs(config: Config, team: TeamPlan) -> Iterator[tuple[str, Any]]:
    """Yield the knobs by which several GPUs share the actor."""
    facts, way, own = team.facts, team.way, team.settings.get("actor")
    divides_experts = bool(expert_counts(facts.actor.shape))
    yield "train.shard", facts.sharding.shard
    if facts.sharding.shard == "hybrid":
        yield "train.shard_size", facts.sharding.group
    yield "train.tensor_parallel", way.tensor
    if own:
        yield "train.sequence_parallel", own.sequence_parallel
    if divides_experts:
        yield "train.expert_parallel", way.experts
    if not facts.rollout:
        return
    yield "rollout.tensor_parallel", way.rollout
    if divides_experts and way.rollout > 1:
        given = config.rollout.expert_parallel
        whole = whole_experts_in_rollouts(given, way.rollout, way.tensor, way.experts, facts.actor.shape)
        yield "rollout.expert_parallel", way.rollout if whole else 1


def rollout_knobs(config: Config, team: TeamPlan) -> Iterator[tuple[str, Any]]:
    if team.made:
        budgets = team.made.budgets
        yield "rollout.kv_bytes", cache_bytes(config, team.facts, budgets.kv_blocks)
        yield "rollout.max_seqs", budgets.max_seqs
        yield "rollout.max_batched_tokens", budgets.max_batched_tokens
    yield "rollout.release_memory", releases_memory(config)
    yield "rollout.cuda_graphs", why_decoding_has_no_graphs(config, team.facts) is None


def budget_knobs(config: Config, role: str, team: TeamPlan) -> Iterator[tuple[str, int]]:
    """Yield the token budgets of a role's micro-batches, unless these are sized by samples."""
    section = getattr(config, role)
    if not section.dynamic_batch and section.micro_batch:
        return
    update, forward = BUDGETS_OF[role]
    if update and team.settings:
        yield f"{role}.token_budget", update_budget(config, team.facts.device, role, team.budgets_of_auto)
    if forward and team.made and (team.facts.rollout or role != "actor"):
        yield f"{role}.forward_token_budget", getattr(team.made.budgets, forward)


def role_knobs(config: Config, role: str, team: TeamPlan) -> Iterator[tuple[str, Any]]:
    """Yield the knobs of a role other than the actor."""
    own = team.settings.get(role)
    for key in OF_OTHERS[role] if own else ():
        yield f"{role}.{key}", getattr(own, key)
    if team.cluster.gpus > 1:
        yield f"{role}.tensor_parallel", team.facts.parts_of(role)
        if own:
            yield f"{role}.sequence_parallel", own.sequence_parallel
        if expert_counts(team.facts.roles[role].shape):
            yield f"{role}.expert_parallel", team.way.of(config, role).experts
    yield f"{role}.dynamic_batch", getattr(config, role).dynamic_batch
    yield from budget_knobs(config, role, team)


# ---- reasons -----------------------------------------------------------------------------------------------------------------------------

# Why a knob has its value if no decision has changed it.
USUAL = {
    "train.shard_size": "the GPUs of a machine, between which links are fastest",
    "train.sequence_parallel": "the longest sample fits on one GPU",
    "train.recompute": "a micro-batch fits with everything kept",
    "train.offload_optimizer": "it fits on the GPU",
    "train.offload_grads": "they fit on the GPU",
    "train.offload_params": "the actor's stay, so that the engine and its CUDA graphs can read them",
    "train.offload_activations": "they fit on the GPU",
    "train.head_recompute": "logits of a whole micro-batch would not fit beside the rest",
    "train.compile": "its gain has not been shown for every model",
    "train.packing": "samples lie side by side, and no padding is computed",
    "train.fused_head": "the logits of a whole micro-batch are never held at once",
    "train.entropy_recompute": "nothing is kept for the entropy's gradient",
    "train.balance": "micro-batches are dealt out by their cost, so that no worker waits for another",
    "train.reshard_after_forward": "a layer's parameters are given back between its forward and its backward pass",
    "train.forward_prefetch": "a layer is gathered while the one before it computes",
    "actor.dynamic_batch": "micro-batches are filled by tokens, so that short samples share one",
    "actor.token_budget": "it keeps the GPU busy, and more would only take memory",
    "actor.forward_token_budget": "twice the update's: nothing is kept for a backward pass",
    "rollout.engine": "it computes as the trainer does, so that log-probs agree",
    "rollout.expert_parallel": "whole experts where their number allows it, since products of parts are narrow",
    "rollout.block_tokens": "small blocks leave little of the cache unused at the end of a sample",
    "rollout.chunked_prefill": "long prompts are split, so that decoding does not wait for them",
    "rollout.prefix_sharing": "a group's prompt is computed and kept once",
    "rollout.log_stats": "the log and the metrics show what the engine waits for",
    "rollout.max_seqs": f"all samples of a step, at most {MOST_SEQS['cuda']}",
    "rollout.max_batched_tokens": "prompts fill the GPU, and decoding does not wait long",
    "rollout.release_memory": "the update gets the cache's memory",
    "critic.forward_token_budget": "twice the critic's own: nothing is kept for a backward pass",
    "ref.forward_token_budget": "nothing is kept for a backward pass",
    "reward_model.forward_token_budget": "nothing is kept for a backward pass, and there is no vocabulary head",
}


TWICE = "twice the actor's: there is no vocabulary head"
UNDIVIDED_ON_CPU = "auto divides no model on a CPU"
# Reasons on a CPU, where `auto` follows other rules.
ON_CPU = {
    "train.shard": "auto shares out no parameters on a CPU",
    "train.tensor_parallel": UNDIVIDED_ON_CPU,
    "train.expert_parallel": UNDIVIDED_ON_CPU,
    "train.sequence_parallel": UNDIVIDED_ON_CPU,
    "rollout.tensor_parallel": UNDIVIDED_ON_CPU,
    "train.recompute": "on a CPU time is shorter than memory",
    "train.head_recompute": "it saves memory, and costs one product of the head",
    "train.fused_layers": "auto fuses layers on a GPU only",
    "actor.token_budget": "small passes waste nothing on a CPU",
    "rollout.max_seqs": f"all samples of a step, at most {MOST_SEQS['cpu']}",
    "rollout.max_batched_tokens": "small passes waste nothing on a CPU",
    "rollout.cuda_graphs": "a CPU has none",
}


def reasons_of(config: Config, teams: Mapping[str, TeamPlan], knobs: Mapping[str, Any]) -> dict[str, str]:
    """Return one line for each knob."""
    found = dict[str, str]()
    for own in dict.fromkeys(teams.values()):
        found |= dict(decided_reasons(config, own))
    found |= dict(rollout_reasons(config, teams["actor"], knobs)) if teams["actor"].facts.rollout else {}
    # The decisions of a team come first; values are reasons only where no team has decided.
    found = dict(value_reasons(config, knobs)) | found
    for role in (role for role in OF_OTHERS if role in teams):
        found |= dict(inherited_reasons(config, role, apart=teams[role] is not teams["actor"]))
    if teams["actor"].facts.device == "cpu":
        found |= ON_CPU
        found |= {knob: "the run is on the CPU: its memory is the host's already" for knob in knobs if knob.partition(".")[2] in OFFLOADS}
    lines = {knob: found.get(knob) or usual_reason(knob) for knob in knobs}
    return lines | {knob: SET_BY_HAND for knob in knobs if is_set(config, knob)}


def decided_reasons(config: Config, team: TeamPlan) -> Iterator[tuple[str, str]]:
    """Yield fulltilt.plan's reasons for its own decisions for some GPUs."""
    has_actor = "actor" in team.facts.roles
    alone = "no other role works on these GPUs, so they are never in the way"
    if team.facts.sharding.why and has_actor:
        yield "train.shard", team.facts.sharding.why
    for text in team.way.words:
        if told := re.fullmatch(r"(\S+) = \S+ \(auto: (.*)\)", text):
            # A decision about [train] applies to the one role that has these GPUs, if that is not the actor.
            yield told[1] if has_actor else told[1].replace("train", next(iter(team.facts.roles))), told[2]
    if len(team.facts.roles) == 1:
        role = next(iter(team.facts.roles))
        copied = role == "actor" and team.facts.samples_from_copy
        yield f"{'train' if has_actor else role}.offload_params", "auto never moves the actor's" if copied else alone
    for (role, key), text in team.reasons.items():
        if text:
            yield f"{'train' if role == 'actor' and hasattr(config.train, key) else role}.{key}", text


def rollout_reasons(config: Config, team: TeamPlan, knobs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    why_no_graphs = why_decoding_has_no_graphs(config, team.facts)
    yield "rollout.cuda_graphs", why_no_graphs or "the host launches no kernels in a decode step"
    if not team.made:
        return
    budgets, tokens = team.made.budgets, f"for {team.made.budgets.kv_blocks * config.rollout.block_tokens} tokens"
    share = config.rollout.memory_fraction
    if share != "auto":
        yield "rollout.kv_bytes", f"{share:g} of what is free in rollouts (rollout.memory_fraction), {tokens}"
    elif budgets.kv_blocks == (blocks_per_sample(config, team.facts) + 1) * budgets.max_seqs:
        yield "rollout.kv_bytes", f"as much as all samples at once can need, {tokens}"
    else:
        yield "rollout.kv_bytes", f"what is free in rollouts less a reserve, {tokens}"
    if budgets.max_batched_tokens < BATCHED_TOKENS[team.facts.device]:
        yield "rollout.max_batched_tokens", "a larger pass over prompts would leave too little for the KV cache"


def value_reasons(config: Config, knobs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield reasons that follow from the values, where no team has decided otherwise."""
    fused = "few kernels a layer, which read and write less" if knobs["train.fused_layers"] else "there are no fused layers for this family"
    yield "train.fused_layers", "compiled layers are not fused" if config.train.compile is True else fused
    if knobs.get("train.recompute", "none") != "none" or knobs.get("train.offload_activations"):
        yield "train.head_recompute", "memory is short, and kept logits would save less time for their bytes than kept activations"
    if not algorithm_settings(config).get("entropy_coef"):
        yield "train.entropy_recompute", "the loss has no entropy bonus, so that nothing is kept for its gradient"
    of_actor = knobs.get("actor.token_budget")
    if of_actor is not None and knobs.get("critic.token_budget") == 2 * of_actor:
        yield "critic.token_budget", TWICE
    # Budgets of the other roles follow from the default, which another budget of the actor does not change.
    forward = knobs.get("actor.forward_token_budget")
    if forward is not None and knobs.get("ref.forward_token_budget") == forward:
        yield "ref.forward_token_budget", "as the actor's"
    if forward is not None and knobs.get("reward_model.forward_token_budget") == 2 * forward:
        yield "reward_model.forward_token_budget", TWICE


def inherited_reasons(config: Config, role: str, *, apart: bool) -> Iterator[tuple[str, str]]:
    """Yield reasons for keys that a role inherits from [train]. `apart`: the role has GPUs of its own, for which sizes are decided
    separately."""
    for key in (*OF_OTHERS[role], "tensor_parallel", "sequence_parallel", "expert_parallel"):
        follows = getattr(getattr(config, role), key, None) is None
        if follows and (is_set(config, f"train.{key}") or (key in ("tensor_parallel", "expert_parallel") and not apart)):
            yield f"{role}.{key}", f"as train.{key}"


def usual_reason(knob: str) -> str:
    section, _, key = knob.partition(".")
    if knob.endswith("offload_params") and section != "train":
        return "it fits on the GPU beside the other roles"
    of_section = (USUAL.get(name) for name in (knob, *(() if section == "rollout" else (f"train.{key}", f"actor.{key}"))))
    return next((text for text in of_section if text), None) or next(own.auto for own in LEDGER if own.name == knob) or "its default"
