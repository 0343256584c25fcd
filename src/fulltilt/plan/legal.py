"""Rules for settings that a number of workers, a device or the shapes of the models do not allow, or that have no effect there.

Enters: a configuration, facts about its algorithm, a device, and the shapes of its models. Leaves: a message for every such setting, with
its key and remedy. Guaranteed: no model, data or device is needed, and torch is imported only to count the devices of this machine; so a
run and a plan of it refuse the same settings in the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fulltilt.parallel.cuts import (
    expert_counts,
    legal_expert_sizes,
    legal_sequence_sizes,
    legal_sizes,
    whole_experts_in_rollouts,
    why_not,
    why_not_experts,
)
from fulltilt.plan.cache import graphs_without_device
from fulltilt.plan.decisions import OFFLOADS, OWN_BUDGETS, own_sizes, size_key, unless_auto
from fulltilt.plan.division import UNDIVIDED, Division
from fulltilt.plan.sequence import wrong_sequence_size
from fulltilt.plan.sharding import unshared
from fulltilt.records import UserError
from fulltilt.schema import (
    Config,
    RewardConfig,
    conditions,
    keys,
    row_of,
    samples_from_copy,
    shares_model,
    shares_parameters,
    shown,
    uses_reward_model,
    value_of,
)
from fulltilt.settings import algorithm_settings, holds, is_set, needs_of
from fulltilt.shape import FAMILIES, Shape, UnknownParameters
from fulltilt.words import either, many

ShapeOf = Callable[[str], Shape]  # by role; raises UserError or UnknownParameters if the shape is not known
RoleShapes = Sequence[tuple[str, Shape, int]]  # roles, the shapes of their models, and how many workers have the role
WAITS = "a micro-batch of one worker alone would wait for the others"
# Reasons for messages.
NO_COPIES = (
    "its groups must be copies of one another, or norms of gradients would be wrong and checkpoints incomplete, and the shards of divided "
    "experts are spread over all groups"
)
EXPERTS_OF_GROUP = "workers that divide layers have a part of every expert each (1), or all of them divide the experts"


class AlgorithmFacts(Protocol):
    """Facts about an algorithm that these rules read. An `Algorithm` has them."""

    @property
    def needs(self) -> frozenset[str]: ...

    @property
    def value_loss(self) -> object: ...

    @property
    def entropy_gradient(self) -> bool: ...


@dataclass(frozen=True)
class ConfiguredAlgorithm:
    """The same facts from the configuration alone, where no function of the algorithm is called."""

    needs: frozenset[str]
    value_loss: object
    entropy_gradient: bool

    @classmethod
    def of(cls, config: Config) -> ConfiguredAlgorithm:
        needs = needs_of(config)
        return cls(needs, "values" in needs or None, algorithm_settings(config).get("entropy_coef", 0) > 0)


def illegal_settings(config: Config, algorithm: AlgorithmFacts, device: str, shape_of: ShapeOf) -> list[str]:
    """Return a message for every setting that the run's roles, sizes and device do not allow, besides `wrong_counts`."""
    shapes = list(shapes_of_roles(config, algorithm, device, shape_of))
    return [
        *settings_without_effect(config, algorithm, device),
        *wrong_sharing(config, device),
        *wrong_roles(config, algorithm),
        *wrong_tensor(config, algorithm, shapes),
        *wrong_experts(config, algorithm, shapes),
        *wrong_sequence(config, shapes),
        *wrong_probe(config, algorithm, device),
        *never_fused(config, shape_of),
        *among_own_checkpoints(config),
    ]


def illegal_on(config: Config, device: str, devices: int, shape_of: ShapeOf) -> list[str]:
    """Return the same messages for a run on `devices` devices, which need not be here."""
    workers = max(1, devices // config.cluster.nodes)
    known = config.model_copy(update={"cluster": config.cluster.model_copy(update={"workers": workers})})
    algorithm = ConfiguredAlgorithm.of(config)
    return [
        *graphs_without_device(config, device),
        *unused_by(config, workers),
        *wrong_counts(known, algorithm, device),
        *illegal_settings(known, algorithm, device, shape_of),
    ]


def wrong_counts(config: Config, algorithm: AlgorithmFacts, device: str) -> Iterator[str]:
    """List keys that only several workers obey, and numbers that cannot be shared by the run's workers."""
    workers = count_workers(config, device)
    yield from unused_by(config, workers)
    if knows_workers(config):
        yield from too_few(config, workers * config.cluster.nodes)
    if config.cluster.nodes > 1 and config.cluster.workers != "auto" and "rollout" in algorithm.needs:
        yield from wrong_shares(config.reward, workers * config.cluster.nodes, workers)


def among_own_checkpoints(config: Config) -> Iterator[str]:
    """List settings that name one of the run's own checkpoints: a run deletes its older checkpoints, and must not delete what it started
    from."""
    checkpoints = Path(config.run.dir, "checkpoints").resolve()
    for key, field in keys().items():
        path = value_of(config, key) if row_of(field).names in ("model", "adapter", "file") else None
        if path is not None and Path(path).resolve().is_relative_to(checkpoints):
            remedy = "Use another run.dir, or copy what you need of the checkpoint to another place and name the copy"
            yield f"{key}: {shown(path)} is in {config.run.dir}/checkpoints, from which this run deletes all but the newest. {remedy}"


def count_workers(config: Config, device: str) -> int:
    """Return the number of workers of a machine; if it is `auto`, one for each device here."""
    given = config.cluster.workers
    if given != "auto":
        return given
    if device != "cuda":
        return 1
    import torch

    return torch.cuda.device_count()


def wrong_sharing(config: Config, device: str) -> Iterator[str]:
    """List settings that do not go with sharded parameters."""
    train, apart = config.train, config.cluster.roles.values()
    workers = count_workers(config, device) * config.cluster.nodes - sum(apart)
    known = knows_workers(config)
    if not shares_parameters(config):
        return
    alone = " has no other to share parameters with"
    if train.shard_size == 1:
        yield f'train.shard_size: a group of one worker{alone}. Use train.shard = "optimizer", or a larger number'
    if known and max(workers, *apart, 1) <= unless_auto(train.tensor_parallel, 1) > 1:
        same = f"train.tensor_parallel = {train.tensor_parallel} leaves no two workers with the same part of the model to share"
        yield f'train.shard: "{train.shard}", but {same}. Remove the key, or set cluster.workers'
    elif known and max(workers, *apart, 1) == 1:
        one = "the worker of each role" if apart else "the one worker of the run"
        yield f'train.shard: "{train.shard}", but {one}{alone}. Remove the key, or set cluster.workers'
    elif known:
        yield from wrong_groups(config, workers + sum(apart))
    for key, why in unshared(config).items():
        value = shown(value_of(config, key))
        yield f'{key}: {value} is not available with train.shard = "{train.shard}": {why}. Remove one of the keys'


def wrong_groups(config: Config, workers: int) -> Iterator[str]:
    """List roles whose workers cannot be divided into groups of `train.shard_size`; fewer workers than that form one group. `workers`:
    number of workers of the run."""
    given, roles = config.train.shard_size, {str(role): count for role, count in config.cluster.roles.items()}
    parts = {role: given_division(config).of(config, role).tensor for role in ("actor", *roles)}
    counts = {role: count // parts[role] for role, count in {"actor": workers - sum(roles.values()), **roles}.items()}
    if not given or counts["actor"] < 1:
        return

    def undivided(size: int) -> Iterator[str]:
        yield from (role for role, count in counts.items() if count % size and (role == "actor" or count > size))

    legal = [str(size) for size in range(2, counts["actor"] + 1) if not any(undivided(size))]
    for role in undivided(given):
        alike = " with the same part of the model" if parts[role] > 1 else ""
        whose = f"the {many(counts[role], 'worker')} of the {role if roles else 'run'}{alike}"
        remedy = f"Use {either(legal)}" if legal else 'Set train.shard = "full", and remove train.shard_size'
        yield f"train.shard_size: {given} does not divide {whose} into groups. {remedy}"


def given_division(config: Config) -> Division:
    """Return among how many workers models are divided, as far as the user has set it."""
    tensor, experts = unless_auto(config.train.tensor_parallel, 1), unless_auto(config.train.expert_parallel, 1)
    return Division(tensor, experts, unless_auto(config.rollout.tensor_parallel, tensor))


def wrong_tensor(config: Config, algorithm: AlgorithmFacts, shapes: RoleShapes) -> Iterator[str]:
    """List settings that do not go with layers that are divided among workers."""
    division = given_division(config)
    sizes = {size_key(config, role, "tensor_parallel"): division.of(config, role).tensor for role in ("actor", *OWN_BUDGETS)}
    sizes["train.tensor_parallel"] = division.tensor
    if "rollout" in algorithm.needs:
        sizes["rollout.tensor_parallel"] = unless_auto(config.rollout.tensor_parallel, 1)
    for key, size in sizes.items():
        if size == 1:
            continue
        for other, why in UNDIVIDED.items():
            if value_of(config, other) is True:
                yield f"{key}: {size}, but {other} is true: {why}. Remove one of the keys"
        section = key.partition(".")[0]
        if "rollout" in algorithm.needs and config.rollout.engine != "native" and section in ("train", "rollout"):
            yield f'{key}: {size}, but rollout.engine = "{config.rollout.engine}" samples from a whole model. Use the native engine'
        of_key = [each for each in shapes if size_key(config, each[0], "tensor_parallel") == key]
        yield from wrong_parts(config, key, size, shapes[:1] if section == "rollout" else of_key)


def wrong_roles(config: Config, algorithm: AlgorithmFacts) -> Iterator[str]:
    """List sizes that are set for a role that cannot have its own."""
    for role in OWN_BUDGETS:
        tensor, experts = own_sizes(config, role)
        given = [(f"{role}.{key}", size) for key, size in (("tensor_parallel", tensor), ("expert_parallel", experts)) if size is not None]
        for key, size in given if role == "ref" and "ref_logprobs" in algorithm.needs and shares_model(config) else ():
            why = "the reference is the actor without its adapters (lora.rank), and has no model of its own"
            yield f"{key}: {size}, but {why}. Remove the key"


def has_whole_experts(config: Config, key: str, size: int, shape: Shape) -> bool:
    """Return whether each of `size` workers has some whole experts, rather than a part of every expert, where the key divides layers among
    them."""
    division, section = given_division(config), key.partition(".")[0]
    if section != "rollout":
        return min(size, division.experts if section == "train" else division.of(config, section).experts) > 1
    return whole_experts_in_rollouts(config.rollout.expert_parallel, size, division.tensor, division.experts, shape)


def wrong_parts(config: Config, key: str, size: int, shapes: Iterable[tuple[str, Shape, int]]) -> Iterator[str]:
    """List roles whose layers cannot be divided among this many workers. `shapes`: for each role that the key applies to."""
    said = set[tuple[int, str | None]]()  # so that roles with the same mistake get one message
    for role, shape, own in shapes:
        whole = has_whole_experts(config, key, size, shape)
        reason = None if own % size else why_not(shape, size, whole_experts=whole)
        if (reason is None and own % size == 0) or (own, reason) in said:
            continue
        said.add((own, reason))
        legal = either([str(each) for each in legal_sizes(shape, own, whole_experts=whole)])
        if reason is None:
            has = "has" if own == 1 else "have"
            of_role = f"the {many(own, 'worker')} that {has} the {role}'s role"
            yield f"{key}: {size} does not divide {of_role if config.cluster.roles else f'the {own} workers of the run'}. Use {legal}"
        else:
            of_role = "" if role == "actor" else f" of the {role}"
            yield f"{key}: {size} workers cannot hold a part of every layer{of_role}: {reason}. Use {legal}"


def wrong_experts(config: Config, algorithm: AlgorithmFacts, shapes: RoleShapes) -> Iterator[str]:
    """List settings that do not go with experts that are divided among workers."""
    yield from wrong_rollout_experts(config, algorithm, shapes)
    division = given_division(config)
    sizes = {size_key(config, role, "expert_parallel"): division.of(config, role) for role in ("actor", *OWN_BUDGETS)}
    for key, own in {**sizes, "train.expert_parallel": division.of(config, "actor")}.items():
        size, tensor = own.experts, own.tensor
        if size == 1:
            continue
        if tensor not in (1, size):
            by = size_key(config, key.partition(".")[0], "tensor_parallel")
            yield f"{key}: {size}, but {by} = {tensor}: {EXPERTS_OF_GROUP}. Use {either(['1', str(tensor)])}"
            continue
        if config.train.shard == "hybrid" and tensor == 1:
            remedy = f'Remove {key}, or set train.shard = "full" and remove train.shard_size'
            yield f'{key}: {size}, but train.shard = "hybrid": {NO_COPIES}. {remedy}'
        for other, why in UNDIVIDED.items():
            if value_of(config, other) is True:
                yield f"{key}: {size}, but {other} is true: {why}. Remove one of the keys"
        of_key = [each for each in shapes if size_key(config, each[0], "expert_parallel") == key]
        yield from wrong_expert_size(config, key, size, tensor, of_key)


def wrong_expert_size(config: Config, key: str, size: int, tensor: int, shapes: Iterable[tuple[str, Shape, int]]) -> Iterator[str]:
    """Name the first role whose experts cannot be divided among this many workers; other roles have their sizes from the same key.
    `tensor`: among how many of these workers each layer is divided."""
    for role, shape, own in shapes:
        legal = [str(each) for each in legal_expert_sizes(shape, own) if tensor == 1 or each in (1, tensor)]
        obeys = role == "actor" or not key.startswith("train") or bool(expert_counts(shape))
        if (reason := why_not_experts(shape, size)) is not None and obeys:
            of_role = "" if role == "actor" else f" of the {role}"
            yield f"{key}: {size} workers cannot divide the experts{of_role} among themselves: {reason}. Use {either(legal)}"
        elif own % size and tensor == 1:  # otherwise the message about train.tensor_parallel says it
            whose = f"the {many(own, 'worker')} of the {role if config.cluster.roles else 'run'}"
            yield f"{key}: {size} does not divide {whose}. Use {either(legal)}"
        else:
            continue
        return


def wrong_rollout_experts(config: Config, algorithm: AlgorithmFacts, shapes: RoleShapes) -> Iterator[str]:
    key, size, tensor = "rollout.expert_parallel", config.rollout.expert_parallel, given_division(config).rollout
    if size in ("auto", 1) or "rollout" not in algorithm.needs:
        return
    if size != tensor:
        legal = either(["1", str(tensor)][: 1 + (tensor > 1)])
        yield f"{key}: {size}, but rollout.tensor_parallel is {tensor}: {EXPERTS_OF_GROUP}. Use {legal}"
        return
    for role, shape, _ in shapes:
        if role == "actor" and (reason := why_not_experts(shape, size)) is not None:
            yield f"{key}: {size} workers cannot divide the experts among themselves: {reason}. Use 1"


def knows_workers(config: Config) -> bool:
    """Return whether the number of workers is known here. Otherwise only the cluster knows it, and it is checked when workers are made."""
    return not (config.cluster.address and config.cluster.workers == "auto")


def roles_with_models(config: Config, algorithm: AlgorithmFacts) -> list[str]:
    """Return the roles of a run that have their own model."""
    return [role for role in used_roles(config, algorithm) if role != "ref" or not shares_model(config)]


def shapes_of_roles(config: Config, algorithm: AlgorithmFacts, device: str, shape_of: ShapeOf) -> Iterator[tuple[str, Shape, int]]:
    """Yield each role of a run, the shape of its model as far as it is known before loading, and how many workers have the role."""
    if not knows_workers(config):
        return
    roles = {str(role): count for role, count in config.cluster.roles.items()}
    workers = count_workers(config, device) * config.cluster.nodes
    for role in used_roles(config, algorithm) if workers > 1 else ():  # with one worker such keys have no effect
        own = roles.get(role) or workers - sum(roles.values())
        with suppress(UserError, UnknownParameters):  # reported for the model itself, or not known before loading
            if own >= 1:
                yield role, shape_of(role), own


def used_roles(config: Config, algorithm: AlgorithmFacts) -> list[str]:
    used = {
        "actor": True,
        "ref": "ref_logprobs" in algorithm.needs,
        "critic": bool(algorithm.value_loss),
        "reward_model": uses_reward_model(config),
    }
    return [role for role, wanted in used.items() if wanted]


def wrong_sequence(config: Config, shapes: RoleShapes) -> Iterator[str]:
    """List numbers of workers that cannot share micro-batches."""
    said = set[tuple[str, int, tuple[int, ...]]]()  # one message for all roles without a key of their own
    for role, shape, own in shapes:
        parts = given_division(config).of(config, role).tensor  # `auto` respects a given number
        same = size_key(config, role, "sequence_parallel"), own, tuple(legal_sequence_sizes(shape, own // parts, parts))
        wrong = wrong_sequence_size(config, role, shape, own // parts, parts)
        if wrong and own % parts == 0 and same not in said:
            said.add(same)
            yield wrong


def wrong_probe(config: Config, algorithm: AlgorithmFacts, device: str) -> Iterator[str]:
    """Refuse a requested probe where passes of the actor's workers wait for other workers. What `auto` divides is known only later."""
    workers, apart = count_workers(config, device) * config.cluster.nodes, config.cluster.roles
    alone = knows_workers(config) and workers - sum(apart.values()) < 2  # with one worker such keys have no effect
    if config.run.probe is not True or alone:
        return
    used = {"actor": True} | {role: role not in apart for role in used_roles(config, algorithm)}
    given = {"train.shard": shown(config.train.shard)} if shares_parameters(config) else {}
    for role in (role for role, here in used.items() if here):
        for key in ("tensor_parallel", "expert_parallel", "sequence_parallel"):
            by = size_key(config, role, key)
            size = value_of(config, by)
            given |= {by: str(size)} if size not in (None, "auto", 1) else {}
    if given:
        key, value = next(iter(given.items()))
        yield f"run.probe: true, but nothing can be measured with {key} = {value}: {WAITS}. Remove one of the keys"


def never_fused(config: Config, shape_of: ShapeOf) -> Iterator[str]:
    """Refuse fused layers that are asked for where those of the actor's family are never fused."""
    if config.train.fused_layers is not True or config.train.compile is True:
        return
    with suppress(UserError):  # reported for the model itself, or not known before loading
        shape = shape_of("actor")
        if not shape.known_family().fused:
            known = ", ".join(name for name, family in FAMILIES.items() if family.fused)
            why = f"{shape.model_type} is not of a known family ({known})"
            yield f"train.fused_layers: true, but the layers of the actor cannot run fused: {why}. Remove the key, or set auto"


def too_few(config: Config, workers: int) -> Iterator[str]:
    """Refuse roles with workers of their own that leave none to the actor. `workers`: number of workers of the run."""
    roles = config.cluster.roles
    if roles and workers > 1 and (taken := sum(roles.values())) >= workers:
        remedy = f"Give roles at most {workers - 1}, or raise cluster.workers"
        yield f"cluster.roles: {shown(roles)} takes {taken} of the run's {workers} workers, and the actor needs at least one. {remedy}"


def unused_roles(config: Config, algorithm: AlgorithmFacts) -> Iterator[str]:
    """List roles of `cluster.roles` that have no model in this run."""
    why = {
        "critic": None if algorithm.value_loss else f"algorithm.name = {shown(config.algorithm.name)} has no critic",
        "ref": None
        if "ref_logprobs" in algorithm.needs
        else "nothing compares with a reference (algorithm.kl_coef, algorithm.reward_kl_coef)",
        "reward_model": None if uses_reward_model(config) else 'the reward has no reward model (reward.function = "reward_model")',
    }
    if why["ref"] is None and shares_model(config):
        why["ref"] = "the reference is the actor without its adapters (lora.rank), and has no model of its own"
    for role in config.cluster.roles:
        if why[role] is not None:
            yield f"cluster.roles: {role} would get workers of its own, but {why[role]}. Remove it from the table"


def unused_by(config: Config, workers: int) -> Iterator[str]:
    """List keys that have no effect with this number of workers. If the user has set the number, the configuration refuses them itself."""
    if config.cluster.workers != "auto":
        return
    found = config.model_copy(update={"cluster": config.cluster.model_copy(update={"workers": workers})})
    for key in (key for key in keys() if is_set(config, key)):
        for each in conditions(key):
            if "cluster.workers" in each.reads and not holds(found, each):
                why = f"cluster.workers is auto, which is {workers} here"
                yield f"{key}: {shown(value_of(config, key))} has no effect while {why}. Remove it, or {each.remedy}"


def settings_without_effect(config: Config, algorithm: AlgorithmFacts, device: str) -> Iterator[str]:
    """List settings that have no effect on this device, or with these roles."""
    yield from unused_roles(config, algorithm)
    yield from refused_offloads(config, algorithm, device)
    if not config.train.entropy_recompute and not algorithm.entropy_gradient:
        remedy = "Remove the key" + (", or set algorithm.entropy_coef above 0" if "rollout" in algorithm.needs else "")
        yield f"train.entropy_recompute: false, but the loss has no entropy bonus: nothing is kept for its gradient. {remedy}"
    if config.train.head_recompute != "auto" and not config.train.fused_head:
        yield (
            "train.head_recompute: the head is not fused (train.fused_head), and keeps the logits of a micro-batch in any case. Remove one "
            "of the keys"
        )


def refused_offloads(config: Config, algorithm: AlgorithmFacts, device: str) -> Iterator[str]:
    shared = "ref_logprobs" in algorithm.needs and shares_model(config)
    apart = config.cluster.roles
    used = {
        "critic": algorithm.value_loss,
        "ref": "ref_logprobs" in algorithm.needs and not shared,
        "reward_model": uses_reward_model(config),
    }
    # Rollouts do not use the actor's shards, nor divided experts.
    of_copy = samples_from_copy(config) and "rollout" in algorithm.needs
    others = any(used[role] and role not in apart for role in used)
    sections = {"train": "actor", "critic": "critic", "ref": "ref", "reward_model": "reward_model"}
    for section, role in sections.items():
        for key in OFFLOADS:
            alone = role in apart if role != "actor" else not (others or of_copy)
            reason = why_not_offloaded(key, role, device, alone=alone, shared=role == "ref" and shared)
            if reason and getattr(getattr(config, section), key, None) is True:
                yield f"{section}.{key}: true, but {reason}. Remove the key"


def why_not_offloaded(key: str, role: str, device: str, *, alone: bool = False, shared: bool = False) -> str | None:
    """Return why an offload setting of a role has no effect, or None if it may have one. `alone`: whether no other role has a model on the
    same device. `shared`: whether the role's model is the actor's."""
    if device != "cuda":
        return "the run is on the CPU: its memory is the host's already"
    if key == "offload_params" and shared:
        return f"the {role} runs the actor's own model without its adapters: it has no parameters that could leave"
    if key == "offload_params" and alone:
        others = "no other role has a model of its own" if role == "actor" else "it has workers of its own (cluster.roles)"
        return f"{others}, so there is no phase in which the {role}'s parameters could be away"
    return None


def wrong_shares(config: RewardConfig, size: int, beside: int) -> Iterator[str]:
    """Describe numbers that cannot be divided among all workers: of processes, on a machine with `beside` workers, and of concurrent calls,
    over all `size` workers."""
    for key, given, needed, whose in (
        ("workers", config.workers, beside, f"{many(beside, 'worker')} of a machine"),
        ("concurrency", config.concurrency, size, f"{many(size, 'worker')} of the run"),
    ):
        if given != "auto" and given < needed:
            yield f"reward.{key}: {given} cannot be shared by the {whose}, each of which scores its samples. Use at least {needed}, or auto"
