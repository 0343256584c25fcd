"""Facts for the plan, and the sizes that follow from it.

Enters: a device, the loaded models, the plan's budgets. Leaves: the records that plans are made from, the engine's limits, and the sizes of
micro-batches.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedModel

from fulltilt.batching.pack import MicroSizing
from fulltilt.cluster.checks import TextFacts
from fulltilt.kernels.paged_attention import processors_of
from fulltilt.memory.host import free_host_bytes
from fulltilt.model.attention import LayerShape
from fulltilt.model.experts import why_not_captured
from fulltilt.model.fuse import check_fused
from fulltilt.model.heads import Head
from fulltilt.model.load import read_config, shape_of
from fulltilt.model.scalar import ScalarModel
from fulltilt.parallel.experts import ExpertSplit
from fulltilt.parallel.grid import ONE_WORKER, Grid
from fulltilt.parallel.layout import UNSHARDED, ParameterSize, Sharding, Sizes
from fulltilt.parallel.parts import ModelPart
from fulltilt.parallel.ranks import Ranks
from fulltilt.parallel.shard import neighbours
from fulltilt.parallel.tensor import TensorSplit
from fulltilt.plan.budgets import Budgets
from fulltilt.plan.cache import uses_graphs
from fulltilt.plan.decisions import KEPT_AS, given_settings, longest_response
from fulltilt.plan.division import Division, choose_division, divided, why_undivided
from fulltilt.plan.facts import Facts, RoleFacts
from fulltilt.plan.resident import check_loading, loading_order
from fulltilt.plan.sharding import choose_sharding, why_unshared
from fulltilt.rollout.engine import EngineLimits
from fulltilt.rollout.runner import bytes_per_token
from fulltilt.schema import ActorConfig, Config, CriticConfig, RefConfig, RewardModelConfig, shares_model
from fulltilt.shape import LayerDivision, UnknownParameters

UNKNOWN = "how many parameters the model has is not known before it is loaded"
ALL_APART: Mapping[str, int] = MappingProxyType({})  # each worker computes its own micro-batches
THREADS = torch.get_num_threads()  # torch's own choice, read on import: a run may change the number later


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_host_bytes()


def device_bytes(device: torch.device, ranks: Ranks) -> int:
    """Return this worker's share of the device's memory, the least of all workers; 0 on a CPU."""
    return ranks.least(torch.cuda.mem_get_info(device)[1], device) // ranks.sharing if device.type == "cuda" else 0


def find_division(
    config: Config, roles: Collection[str], device: torch.device, ranks: Ranks, longest: int, *, sampled: bool, learns: bool = True
) -> Division:
    """Return among how many workers models are divided. It is found before models are loaded, with the same result on all workers. `roles`:
    the roles that have a model here. `learns`: False in an evaluation. `longest`: tokens of the longest prompt."""
    facts = Facts(device.type, device_bytes(device, ranks), 0, {}, longest, 1, rollout=sampled, sharding=Sharding(workers=ranks.size))
    only = why_undivided(config, sampled=sampled)
    if device.type == "cuda" and ranks.size > 1:
        try:
            facts = replace(facts, roles=dict(known_roles(config, roles, device.type, learns=learns)))
        except UnknownParameters:
            only = UNKNOWN
    beside = beside_of(ranks)
    return choose_division(config, facts, within=ranks.within, beside=beside, only=only, unshared=why_unshared(config))


def beside_of(ranks: Ranks) -> int:
    """Return the number of workers on a machine; 1 if groups of that many neighbours would not be those of a machine."""
    return ranks.beside if ranks.before % ranks.beside == 0 else 1


def find_sharding(
    config: Config, roles: Collection[str], device: torch.device, grid: Grid, division: Division, *, sampled: bool
) -> Sharding:
    """Return how workers with the same part of a model shard it. It is found before models are loaded, with the same result on all workers.
    `roles`: the roles of a training run; empty if nothing learns."""
    ranks, size, parts = grid.everyone, grid.data.size, grid.tensor.size
    if not roles:
        return Sharding("optimizer", size, size)
    facts = Facts(device.type, device_bytes(device, ranks), 0, {}, 0, 1, rollout=sampled, sharding=Sharding(workers=ranks.size))
    only = why_unshared(config)
    if device.type == "cuda" and ranks.size > 1:
        try:
            facts = replace(facts, roles=dict(known_roles(config, roles, device.type)))
        except UnknownParameters:
            only = UNKNOWN
    facts = divided(config, facts, division)
    beside = beside_of(ranks)
    found = choose_sharding(config, facts, beside // parts if beside % parts == 0 else 1, only=only)
    if found.parameters and size < found.group:  # a role with its own, fewer workers than a group has
        found = replace(found, shard="full", group=size)
    check_loading(replace(facts, sharding=found))
    return found


def known_roles(config: Config, roles: Collection[str], device: str, *, learns: bool = True) -> Iterator[tuple[str, RoleFacts]]:
    """Yield the facts of roles that have their own model, which is not loaded."""
    for role in roles:
        if role != "ref" or not shares_model(config):
            path = config.model.path if role == "actor" else getattr(config, role).path
            shape = shape_of(read_config(config.model, path))
            yield role, RoleFacts.of_shape(shape, config, device, learns=learns and role in KEPT_AS, role=role)


def order_of_loading(config: Config, roles: Collection[str], device: str, sharding: Sharding, *, sampled: bool) -> list[str]:
    """Return the roles in the order in which loading them one by one takes least memory, where parameters are sharded."""
    try:
        found = dict(known_roles(config, roles, device))
    except UnknownParameters:
        return sorted(roles, key=lambda role: role == "actor")  # the actor last, because a whole copy of it may stay
    return [*loading_order(Facts(device, 0, 0, found, 0, 1, rollout=sampled, sharding=sharding))]


def find_facts(
    device: torch.device, roles: Mapping[str, RoleFacts], sampled: PreTrainedModel | None, layers: Mapping[int, LayerShape], fused: str,
    texts: TextFacts, *, grid: Grid = ONE_WORKER, sharding: Sharding = UNSHARDED,
) -> Facts:  # fmt: skip
    """Measure all facts that the plan is made from, except for free memory, since optimizers do not exist yet. All workers find the same
    facts, so that all make the same plan. `sampled`: the model that an engine reads, if there is one. `layers`: the shapes that it
    caches."""
    ranks = grid.everyone
    return Facts(
        device=device.type,
        device_bytes=device_bytes(device, ranks),
        host_bytes=ranks.least(free_bytes(torch.device("cpu")), device) // ranks.beside,
        beside=ranks.beside,
        roles=roles,
        longest=texts.longest,
        steps_per_epoch=texts.steps_per_epoch,
        rollout=sampled is not None,
        cores=max(1, ranks.least(THREADS, device) // ranks.beside),
        threads_given="OMP_NUM_THREADS" in os.environ,
        processors=processors_of(device),
        kv_bytes_per_token=bytes_per_token(layers, sampled.dtype) if sampled is not None else None,
        not_captured=why_no_graphs(sampled) if sampled is not None else None,
        layers=fused,
        sharding=sharding,
        parts=grid.tensor.size,
        rollout_parts=grid.rollout.size,
        within=ranks.within,
    )


def why_no_graphs(model: PreTrainedModel) -> str | None:
    """Return why no CUDA graph can hold a decoding step of the model, as far as is known; None if one can."""
    part = Head.of(model).part
    return why_not_captured(model) or (part.not_captured if part else None)


def role_facts(model: torch.nn.Module, *, learns: bool, part: ModelPart | None = None) -> RoleFacts:
    """Return a loaded model's facts for the plan. `part`: given where this worker has a part of the model."""
    body: Any = model.body if isinstance(model, ScalarModel) else model
    assert isinstance(body, PreTrainedModel)
    shape, parts, sizes = shape_of(body.config), part.ranks.size if part else 1, parameter_sizes(model, learns=learns, part=part)
    if body is model:
        head = Head.of(body).weight
        named = next(name for name, each in body.named_parameters() if each is head)
        shape = replace(shape, vocabulary=shape_of_first(part, named, head)[0])
    experts_whole = isinstance(part, TensorSplit) and part.whole_experts
    return RoleFacts(
        shape=shape,
        parameter_bytes=sum(each.bytes for each in sizes),
        trained=sum(each.count for each in sizes if each.learns),
        itemsize=body.dtype.itemsize,
        fused=check_fused(body).left_alone is None,
        vocabulary_head=body is model,
        sizes=sizes,
        division=LayerDivision(experts=parts) if isinstance(part, ExpertSplit) else LayerDivision(parts, whole_experts=experts_whole),
    )


def shape_of_first(part: ModelPart | None, name: str, own: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the first member's part of a parameter: the last member may have fewer rows of a vocabulary, and all make the
    same plan."""
    return part.table.cuts[name].shape(part.whole[name], 0) if part and not part.is_whole(name) else tuple(own.shape)


def parameter_sizes(model: torch.nn.Module, *, learns: bool = True, part: ModelPart | None = None) -> Sizes:
    """Return the sizes of a loaded model's parameters as they lie in memory, learning ones first."""
    body = model.body if isinstance(model, ScalarModel) else model
    layers = getattr(body.base_model, "layers", None)  # type: ignore[union-attr]
    inside = {id(own): place for place, layer in enumerate(layers or ()) for own in layer.parameters()}
    parameters = dict(model.named_parameters())
    trained = {name: own for name, own in parameters.items() if learns and own.requires_grad and own.numel()}
    cut = {name for name in parameters if part and not part.is_whole(name)}
    apart = cut if isinstance(part, ExpertSplit) else ()
    runs = [*neighbours(trained), *([name] for name in parameters if name not in trained)]
    return tuple(
        ParameterSize(
            shape_of_first(part, name, own),
            own.itemsize,
            learns=name in trained,
            layer=inside.get(id(own)),
            follows=name != run[0],
            scores=body is not model and name.startswith("score."),
            apart=name in apart,
            cut=name in cut,
        )
        for run in runs
        for name in run
        for own in [parameters[name]]
    )


def update_sizes(config: Config, budgets: Budgets, sharing: Mapping[str, int] = ALL_APART) -> dict[str, MicroSizing]:
    """Return the sizes of micro-batches in updates. `sharing`: how many workers compute a role's micro-batch together, so that their
    budgets add up."""
    of_role = {"actor": budgets.token_budget, "critic": budgets.critic_token_budget}
    return {name: sizing(config, name, budget * sharing.get(name, 1)) for name, budget in of_role.items()}


def forward_sizes(config: Config, budgets: Budgets, sharing: Mapping[str, int] = ALL_APART) -> dict[str, MicroSizing]:
    of_role = {
        "actor": budgets.forward_token_budget,
        "ref": budgets.ref_token_budget,
        "critic": budgets.critic_forward_token_budget,
        "reward_model": budgets.reward_model_token_budget,
    }
    return {name: sizing(config, name, budget * sharing.get(name, 1)) for name, budget in of_role.items()}


def sizing(config: Config, role: str, budget: int) -> MicroSizing:
    section: ActorConfig | RefConfig | CriticConfig | RewardModelConfig = getattr(config, role)
    return MicroSizing(budget, section.micro_batch, packing=given_settings(config, role)["packing"])


def limits(config: Config, budgets: Budgets, device: torch.device, longest_prompt: int, *, copied: bool = False) -> EngineLimits:
    """Return the engine's limits. `copied`: whether the engine reads a copy of the actor, or nothing learns."""
    return EngineLimits(
        blocks=budgets.kv_blocks,
        block_tokens=config.rollout.block_tokens,
        max_seqs=budgets.max_seqs,
        max_batched_tokens=budgets.max_batched_tokens,
        chunked_prefill=config.rollout.chunked_prefill,
        prefix_sharing=config.rollout.prefix_sharing,
        cuda_graphs=uses_graphs(config, device.type, copied=copied),
        graphs_required=config.rollout.cuda_graphs is True,
        longest=longest_prompt + longest_response(config),
    )
