"""The plan of a run of fulltilt on hardware that is not here: what plan.py decides, and what the models of memory and time say of it.

Enters: a configuration, a shape, a cluster and the mean response. Leaves: a `RunDescription`, the knobs with their reasons, or why nothing
fits. Guaranteed: no weights, no data, no GPU; `auto` is decided by plan.py, as in the run itself, for each team of GPUs that have the same
roles.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from fulltilt.hardware import Cluster
from fulltilt.parallel.cuts import expert_counts, require_legal
from fulltilt.parallel.layout import Sharding
from fulltilt.plan import (
    KEPT_AS,
    TOKEN_BUDGET,
    Division,
    Facts,
    Plan,
    RoleFacts,
    cache_bytes,
    check_loading,
    choose_division,
    choose_sharding,
    divided,
    longest_response,
    make_plan,
    releases_memory,
    sizes_given,
    updates_per_step,
    uses_graphs,
    why_undivided,
    why_unshared,
)
from fulltilt.records import UserError
from fulltilt.schema import Config, shares_model, uses_reward_model, value_of
from fulltilt.settings import algorithm_settings, bounds_of, is_set, preset_of
from fulltilt.shape import Recompute, Shape
from fulltilt.tune.constants import ENGINE_WORKSPACE, FULLTILT
from fulltilt.tune.description import BatchDescription, EngineDescription, Role, RoleDescription, RunDescription, TrainLayout
from fulltilt.tune.lengths import Lengths
from fulltilt.tune.memory_model import BF16, parameters
from fulltilt.tune.shapes import named_shape
from fulltilt.words import joined, many

HOST_SHARE = 2  # times a GPU's memory, that its machine has as host memory for it (DGX H100: 2 TB for 640 GB)
PROMPT_TOKENS = 256  # mean of a prompt, at most half of the longest
ROW_TOKENS = 4096  # of the longest row of SFT, where data.max_tokens does not say
BUDGETS_OF = {
    "actor": ("token_budget", "forward_token_budget"),
    "critic": ("critic_token_budget", "critic_forward_token_budget"),
    "ref": ("", "ref_token_budget"),
    "reward_model": ("", "reward_model_token_budget"),
}


@dataclass(frozen=True)
class OwnPlan:
    run: RunDescription
    knobs: Mapping[str, Any] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()  # what the run does, and what the models leave out
    refused: str = ""  # why plan.py finds that it does not fit
    why: Mapping[str, str] = field(default_factory=dict)  # why each knob has its value


def own_plan(config: Config, shape: Shape, cluster: Cluster, response: float | None) -> OwnPlan:
    """`response`: mean tokens; None: a quarter of the longest."""
    settings, lengths = algorithm_settings(config), lengths_of(config, shape, response)
    shapes, unknown = shapes_of(config, shape, settings)
    teams = teams_of(config, shapes, cluster, lengths)
    first = teams["actor"]
    run = actor_run(config, shape, first, settings, lengths)
    others = [other_role(config, run, cast(Role, role), shapes[role], teams[role]) for role in shapes if role != "actor"]
    run = replace(run, others=tuple(replace(own, apart=teams[own.role] is not first) for own in others))
    every = list(dict.fromkeys(teams.values()))
    refused = "; ".join(team.refused for team in every if team.refused)
    words = (steps_in_words(config), *unknown, *notes(config, settings))
    if any(team.made is None for team in every):
        return OwnPlan(run, {}, words, refused)
    knobs = knobs_of(config, teams)
    return OwnPlan(run, knobs, words, refused, reasons_of(config, teams, knobs))


def lengths_of(config: Config, shape: Shape, response: float | None) -> Lengths:
    """Prompts and responses; where rows are given (SFT), both count as response."""
    longest = longest_row(config, shape)
    if not preset_of(config).rollout:
        return Lengths(0, longest, 0.0, min(longest, longest / 4 if response is None else response))
    longest, prompt = longest_response(config), config.data.max_prompt_tokens
    return Lengths(prompt, longest, min(PROMPT_TOKENS, prompt / 2), min(longest, longest / 4 if response is None else response))


def longest_row(config: Config, shape: Shape) -> int:
    """Tokens of the longest row of SFT."""
    return config.data.max_tokens or min(ROW_TOKENS, shape.positions or ROW_TOKENS)


def shapes_of(config: Config, shape: Shape, settings: Mapping[str, Any]) -> tuple[dict[str, Shape], list[str]]:
    """The roles that have a model of their own with its shape, and what is not known of them."""
    found, unknown = {"actor": shape}, list[str]()
    used = {
        "ref": compares(settings) and not shares_model(config),
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


def compares(settings: Mapping[str, Any]) -> bool:
    """Whether there is a reference role."""
    return bool(settings.get("kl_coef") or settings.get("reward_kl_coef"))


# ---- teams -------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TeamPlan:
    """GPUs that have the same models, and what plan.py decides for them."""

    cluster: Cluster
    way: Division
    facts: Facts  # of one of its workers
    made: Plan | None  # None: nothing fits
    refused: str = ""  # why it does not fit

    def layout(self, config: Config, role: str) -> TrainLayout:
        sharding = self.facts.sharding_of(role)
        return TrainLayout(
            tensor=self.facts.parts_of(role),
            sequence=self.made.roles[role].sequence_parallel if self.made else 1,
            expert=self.way.of(config, role).apart,
            shard=sharding.group if sharding.parameters else 1,
        )

    def execution(self, config: Config, role: str) -> dict[str, Any]:
        """The fields of a `RunDescription` that say how a role runs."""
        own, model = self.made.roles[role] if self.made else None, self.facts.roles[role]
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
        """How a role's micro-batches are filled: up to a number of tokens, or of samples."""
        section = getattr(config, role)
        if not section.dynamic_batch and section.micro_batch:
            of_samples = dict.fromkeys(("micro_batch", "forward_micro_batch"), section.micro_batch)
            return {**of_samples, "token_budget": None, "forward_token_budget": None}
        update, forward = BUDGETS_OF[role]
        usual = TOKEN_BUDGET["cuda"]
        each = [getattr(self.made.budgets, name) if self.made and name else usual for name in (update, forward)]
        return {"token_budget": each[0], "forward_token_budget": each[1]}


def teams_of(config: Config, shapes: Mapping[str, Shape], cluster: Cluster, lengths: Lengths) -> dict[str, TeamPlan]:
    """The team of each role, the actor's first (cluster/teams.py)."""
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
    """What plan.py decides for the GPUs `ranks` of a run, which have these roles; or why it finds that nothing fits."""
    sampled = preset_of(config).rollout and "actor" in shapes
    roles = {role: RoleFacts.of_shape(shape, config, "cuda", learns=role in KEPT_AS, role=role) for role, shape in shapes.items()}
    longest = lengths.most_prompt if sampled else lengths.longest_row
    memory, size, machine = cluster.gpu.memory, len(ranks), max(1, min(cluster.per_machine, cluster.gpus))
    # As parallel/ranks.py and cluster/sizes.py have it: groups of neighbours are on one machine.
    within = size if ranks[0] // machine == ranks[-1] // machine else math.gcd(size, machine, ranks[0])
    beside = machine if ranks[0] % machine == 0 else 1
    check_sizes(config, shapes, size)
    whole = Facts("cuda", memory, HOST_SHARE * memory, roles, longest, 1, rollout=sampled, sharding=Sharding(workers=size))
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
    except UserError as error:
        return TeamPlan(team, way, facts, None, str(error))


def check_sizes(config: Config, shapes: Mapping[str, Shape], workers: int) -> None:
    """Refuse sizes that the models or the number of GPUs cannot have."""
    for key, size in sizes_given(config).items():
        if not isinstance(size, int) or (key.startswith("rollout") and "actor" not in shapes):
            continue
        if workers % size:
            raise UserError(f"{key}: {size} does not divide the {workers} GPUs that have {joined(list(shapes), 'and')}. Change one of them")
        if key.endswith("tensor_parallel"):
            for shape in shapes.values():
                require_legal(shape, size, key)


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
            graphs=uses_graphs(config, "cuda", copied=copies),
            max_seqs=team.made.budgets.max_seqs if team.made else 1024,
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
        trained=team.facts.roles["actor"].trained * team.facts.parts if config.lora.rank else None,
        shared_reference=compares(settings) and shares_model(config),
        fused_rope=True,
        entropy=bool(settings.get("entropy_coef")),
        rollout=sampled,
        system=FULLTILT,
        name="the run",
        **{"fused_head": True} | team.execution(config, "actor"),
    )  # fmt: skip


def other_role(config: Config, run: RunDescription, role: Role, shape: Shape, team: TeamPlan) -> RoleDescription:
    batch = replace(run.batch, sampled=None, **team.budgets(config, role))  # type: ignore[arg-type]
    if role == "reward_model":  # it scores what is sampled, kept or not
        batch = replace(batch, prompts=run.batch.rollout_prompts)
    adapted = config.lora.rank and config.lora.critic
    trained = team.facts.roles[role].trained * team.facts.parts_of(role) if adapted and role == "critic" else None
    return run.beside(role, **team.execution(config, role) | {"shape": shape, "batch": batch, "trained": trained})


def engine_share(config: Config, shape: Shape, team: TeamPlan, *, copies: bool) -> float:
    """The share of a GPU that the engine takes: its KV cache and workspaces, and a copy of the parameters where it has one."""
    cache = cache_bytes(config, team.facts, team.made.budgets.kv_blocks) if team.made else 0
    copy = BF16 * parameters(shape).total // team.way.rollout if copies else 0
    return min(1.0, (cache + copy + ENGINE_WORKSPACE) / team.cluster.gpu.memory)


def reads_old(config: Config, settings: Mapping[str, Any]) -> bool:
    """Whether the trainer computes log-probs before the first update, as algo/build.py decides it: with one optimizer step they are
    those of the update itself."""
    preset, level = preset_of(config), str(settings.get("importance_level", "token"))
    moved = updates_per_step(config) > 1 and preset.reads_old and level != "bypass"
    corrected = bool(bounds_of(settings)) or level.endswith("normalized")
    return bool(settings.get("reward_kl_coef")) or moved or corrected or "old_logprobs" in preset.needs


# ---- words -------------------------------------------------------------------------------------------------------------------------------


def steps_in_words(config: Config) -> str:
    """The first words of plan.py, which speak of the steps of an epoch too: here the data was not read."""
    algorithm, run = config.algorithm, config.run
    each = f"{many(run.steps, 'step')}, each of" if run.steps else f"{many(run.epochs or 1, 'epoch')}, each step of"
    updates = many(updates_per_step(config), "optimizer step")
    if not preset_of(config).rollout:
        return f"{each} {many(algorithm.prompts_per_step, 'row')}, {updates}"
    prompts, samples = many(algorithm.prompts_per_step, "prompt"), many(algorithm.samples_per_prompt, "sample")
    count = algorithm.prompts_per_step * algorithm.samples_per_prompt
    return f"{each} {prompts} x {samples} = {many(count, 'sample')}, {updates}"


def notes(config: Config, settings: Mapping[str, Any]) -> Iterator[str]:
    """What is assumed, and what the seconds leave out."""
    preset = preset_of(config)
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
# Knobs that have a value unless it is set, in every run, with several GPUs, and where something is sampled.
FIXED = ("train.packing", "train.fused_head", "train.entropy_recompute", "actor.dynamic_batch")
OF_SEVERAL, OF_SHARED = ("train.balance",), ("train.reshard_after_forward", "train.forward_prefetch")
OF_ROLLOUT = ("rollout.engine", "rollout.block_tokens", "rollout.chunked_prefill", "rollout.prefix_sharing", "rollout.log_stats")


def knobs_of(config: Config, teams: Mapping[str, TeamPlan]) -> dict[str, Any]:
    """The value of every performance knob that has an effect in this run."""
    team = teams["actor"]
    facts, made, way, sampled = team.facts, team.made, team.way, team.facts.rollout
    assert made
    found: dict[str, Any] = {}
    if team.cluster.gpus > 1:
        sharding, own = facts.sharding, made.roles["actor"]
        found |= {"train.shard": sharding.shard, "train.tensor_parallel": way.tensor, "train.sequence_parallel": own.sequence_parallel}
        found |= {"train.shard_size": sharding.group} if sharding.shard == "hybrid" else {}
        found |= {"train.expert_parallel": way.experts} if expert_counts(facts.actor.shape) else {}
        found |= {"rollout.tensor_parallel": way.rollout} if sampled else {}
    found |= {f"train.{name}": getattr(made.roles["actor"], name) for name in OF_ACTOR}
    found |= {"train.fused_layers": facts.actor.fused, "train.compile": config.train.compile is True}
    budgets = made.budgets
    found |= {"actor.token_budget": budgets.token_budget}
    if sampled:
        found |= {"actor.forward_token_budget": budgets.forward_token_budget}
        found |= {"rollout.kv_bytes": cache_bytes(config, facts, budgets.kv_blocks), "rollout.max_seqs": budgets.max_seqs}
        found |= {"rollout.max_batched_tokens": budgets.max_batched_tokens, "rollout.release_memory": releases_memory(config)}
        found |= {"rollout.cuda_graphs": uses_graphs(config, "cuda", copied=facts.samples_from_copy)}
    for role, keys in OF_OTHERS.items():
        if role in teams:
            found |= dict(role_knobs(role, keys, teams[role]))
    fixed = (*FIXED, *(OF_SEVERAL if team.cluster.gpus > 1 else ()), *(OF_SHARED if facts.sharding.parameters else ()))
    return found | {key: value_of(config, key) for key in (*fixed, *(OF_ROLLOUT if sampled else ()))}


def role_knobs(role: str, keys: Collection[str], team: TeamPlan) -> Iterator[tuple[str, Any]]:
    assert team.made
    for key in keys:
        yield f"{role}.{key}", getattr(team.made.roles[role], key)
    for key, name in zip(("token_budget", "forward_token_budget"), BUDGETS_OF[role], strict=True):
        if name:
            yield f"{role}.{key}", getattr(team.made.budgets, name)


UNDECIDED = "the value that it has unless it is set"
# Why `auto` has a value that nothing has made it change.
USUAL = {
    "train.sequence_parallel": "the longest sample fits on one GPU",
    "train.recompute": "a micro-batch fits with everything kept",
    "train.offload_optimizer": "it fits on the GPU",
    "train.offload_grads": "they fit on the GPU",
    "train.offload_params": "the actor's stay, so that the engine and its CUDA graphs can read them",
    "train.offload_activations": "they fit on the GPU",
    "train.head_recompute": "logits of a whole micro-batch would not fit beside the rest, or recompute is on anyway",
    "train.compile": "its gain has not been shown for every model",
    "actor.token_budget": "it keeps the GPU busy, and more would only take memory",
    "actor.forward_token_budget": "twice the update's: nothing is kept for a backward pass",
    "rollout.max_seqs": "all samples of a step, at most 1024",
    "rollout.max_batched_tokens": "prompts fill the GPU, and decoding does not wait long",
    "rollout.release_memory": "the update gets the cache's memory",
    "critic.token_budget": "twice the actor's: there is no vocabulary head",
    "critic.forward_token_budget": "twice the critic's own: nothing is kept for a backward pass",
    "ref.forward_token_budget": "as the actor's",
    "reward_model.forward_token_budget": "twice the actor's: there is no vocabulary head",
}


def reasons_of(config: Config, teams: Mapping[str, TeamPlan], knobs: Mapping[str, Any]) -> dict[str, str]:
    """One line for each knob."""
    team, found = teams["actor"], dict[str, str]()
    for text in team.way.words:
        if told := re.fullmatch(r"(\S+) = \S+ \(auto: (.*)\)", text):
            found[told[1]] = told[2]
    if why := team.facts.sharding.why:
        found["train.shard"] = why
    alone = "nothing else works on these GPUs"
    for own in dict.fromkeys(teams.values()):
        assert own.made
        if len(own.facts.roles) == 1 and "actor" not in own.facts.roles:
            found[f"{next(iter(own.facts.roles))}.offload_params"] = alone
        of_roles = {("train" if role == "actor" else role, key): text for (role, key), text in own.made.reasons.items() if text}
        found |= {f"{section}.{key}": text for (section, key), text in of_roles.items()}
    if "rollout.kv_bytes" in knobs:
        tokens = knobs["rollout.kv_bytes"] // max(1, team.facts.token_bytes)
        found["rollout.kv_bytes"] = f"what is free in rollouts less a reserve, for {tokens} tokens"
    if "rollout.cuda_graphs" in knobs:
        found["rollout.cuda_graphs"] = "the host launches no kernels in a decode step" if knobs["rollout.cuda_graphs"] else "they cannot be"
    fused = "few kernels a layer, which read and write less" if knobs["train.fused_layers"] else "there are no fused layers for this family"
    found["train.fused_layers"] = fused
    if len(team.facts.roles) == 1 and not team.facts.copy_bytes and not team.facts.sharding.parameters:
        found["train.offload_params"] = alone
    lines = {knob: found.get(knob) or usual_reason(knob) for knob in knobs}
    return lines | {knob: "set in the run" for knob in knobs if is_set(config, knob)}


def usual_reason(knob: str) -> str:
    section, _, key = knob.partition(".")
    own = USUAL.get(knob) or USUAL.get(f"train.{key}") if section != "rollout" else USUAL.get(knob)
    if knob.endswith("offload_params") and section != "train":
        own = "it fits on the GPU beside the other roles"
    return own or UNDECIDED
