"""Memory of a device beside micro-batches and KV cache: parameters, gradients and optimizers, in each phase and while roles are loaded.

Enters: facts, and the decisions about offloads so far. Leaves: bytes on one worker's device, and the bytes that are left for an update.
Guaranteed: the bytes of a worker are those of parallel/holdings.py; undecided `auto` counts as staying on the device; roles that do not fit
while they are loaded are refused with the settings that would help.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fulltilt.parallel.holdings import loading_bytes, passing_bytes, twin_bytes
from fulltilt.plan.decisions import OFFLOADS, Decisions, RoleSettings, releases_memory
from fulltilt.plan.facts import Facts
from fulltilt.records import DoesNotFit
from fulltilt.schema import Config
from fulltilt.words import either, in_bytes

SLACK = 1 / 16  # share of the device for the driver, workspaces, captured graphs, inputs and pieces of memory that fit nothing
KEPT_SHARE = {"cuda": 0.5, "cpu": 0.25}  # share of the free memory that the cache gets if it stays during the update
STREAMED = 3 * (256 << 20)  # most bytes on the device of an optimizer that is offloaded to the host: the slots of memory/offload.py


def resident(keys: Mapping[str, Mapping[str, Any]], facts: Facts, updated: str | None) -> int:
    """Return the bytes of parameters, gradients and optimizers on the device while a role is updated; None: in a rollout."""
    return sum(role_resident(keys, facts, role, updated) for role in facts.roles)


def role_resident(keys: Mapping[str, Mapping[str, Any]], facts: Facts, role: str, updated: str | None) -> int:
    model, away = facts.roles[role], {key for key in OFFLOADS if keys[role].get(key) is True}
    sharding = facts.sharding_of(role)
    held, shared = model.held(sharding), sharding.parameters
    # In a rollout, an engine that reads a copy of the actor needs no role's parameters.
    at_work = updated or ("" if facts.samples_from_copy else "actor")
    parameters = held.parameters if role == at_work or "offload_params" not in away else 0
    gradients = held.gradients if role == updated or not ("offload_grads" in away or shared) else 0  # shards have theirs only in a pass
    optimizer = min(STREAMED, held.optimizer) if "offload_optimizer" in away else held.optimizer
    gathered = passing_bytes(model.known_sizes, sharding, model.itemsize) if role == updated else 0
    twin = facts.engine_bytes if facts.rollout and role == "actor" else 0
    return parameters + gradients + optimizer + gathered + twin


def most_resident(made: Decisions, facts: Facts) -> int:
    """Return the most bytes of parameters, gradients and optimizers on the device in any update; of parameters, if no role is trained."""
    trained: list[str | None] = [role for role, model in facts.roles.items() if model.trained]
    return max(resident(made.keys, facts, role) for role in trained or [None])


def returning(facts: Facts, settings: Mapping[str, RoleSettings]) -> int:
    """Return the most bytes that a role brings to the device when its phase starts: offloaded parameters, and gradients."""
    if facts.device != "cuda" or not any(model.trained for model in facts.roles.values()):
        return 0
    keys = {role: vars(settings[role]) for role in facts.roles}
    return max(role_resident(keys, facts, role, role) - role_resident(keys, facts, role, None) for role in facts.roles)


def states_on_host(made: Decisions, facts: Facts) -> dict[str, int]:
    """Return the bytes of parameters and optimizers that a worker keeps in main memory, as far as that is decided."""
    found: dict[str, int] = {}
    for role, model in facts.roles.items():
        keys, sharding = made.keys[role], facts.sharding_of(role)
        held = model.held(sharding)
        kinds = {"optimizer": held.optimizer, "params": held.parameters if sharding.parameters else model.parameter_bytes}
        moved = {kind: count for kind, count in kinds.items() if keys.get(f"offload_{kind}") is True and count}
        found |= {f"the {role}'s {'parameters' if kind == 'params' else kind}": count for kind, count in moved.items()}
    return found


def exported_on_host(facts: Facts) -> dict[str, int]:
    """Return a worker's share of the main memory that weights take on their way into a checkpoint: one worker of the machine has the whole
    actor there."""
    if "actor" not in facts.roles or not facts.actor.trained:
        return {}
    parts = max(facts.actor.division.members, facts.actor.division.experts)
    return {"weights on their way into a checkpoint": -(-facts.actor.parameter_bytes * parts // facts.beside)}


def left_for_update(config: Config, made: Decisions, facts: Facts, role: str) -> int:
    """Return the bytes of the device beside the resident ones in a role's update."""
    left = int((1 - SLACK) * facts.device_bytes) - resident(made.keys, facts, role)
    return left if releases_memory(config) else int(left * (1 - KEPT_SHARE[facts.device]))


def loading_order(facts: Facts) -> dict[str, int]:
    """Estimate the bytes on the device while each role is loaded, in the order of loading: if parameters are sharded, first the roles
    whose loading takes most in addition to what stays of them."""
    found, before = dict[str, int](), 0
    taken = {role: loading_of(facts, role) for role in facts.roles}
    for role in sorted(taken, key=lambda role: taken[role][1] - taken[role][0]):
        most, staying = taken[role]
        found[role] = before + most
        before += staying
    return found


def loading_of(facts: Facts, role: str) -> tuple[int, int]:
    """Estimate the most bytes that loading a role takes, and the bytes that stay. A worker reads only its part of a model, unless it
    needs the whole anyway, like an engine that samples alone."""
    model, sampled = facts.roles[role], role == "actor" and facts.rollout
    copied = facts.copy_bytes if sampled else 0
    sharding = facts.sharding_of(role)
    if not sharding.parameters:
        return (model.parameter_bytes + copied,) * 2
    stays = sampled and not copied
    cut_from_whole = sampled and facts.rollout_parts == 1  # the engine has the whole, and a part of it is there until it is sharded
    most = loading_bytes(model.known_sizes, sharding, model.itemsize, fused=model.fused, stays=stays or cut_from_whole)
    twin = twin_bytes(model.known_sizes, sharding) if stays else copied
    return most + copied, model.held(sharding).parameters + twin


def most_while_loading(facts: Facts) -> tuple[str, int]:
    """Return the role whose loading takes most of the device's memory, and the bytes."""
    return max(loading_order(facts).items(), key=lambda item: item[1])


def check_loading(facts: Facts) -> None:
    """Refuse roles of several workers that do not fit on a device while they are loaded."""
    if facts.device != "cuda" or facts.sharding.workers * facts.parts == 1 or not facts.roles:
        return
    role, most = most_while_loading(facts)
    if most <= facts.device_bytes:
        return
    order = list(loading_order(facts))
    before = order[: order.index(role)]
    ways = ["a smaller model"]
    if facts.sharding.workers > 1 and not facts.sharding.parameters:
        ways.append('train.shard = "full" (each worker then loads its rows alone)')
    if role == "actor" and facts.rollout and facts.rollout_parts == 1 and (facts.sharding.parameters or facts.copy_bytes):
        ways.append("rollout.tensor_parallel (an engine that samples alone has the whole actor)")
    plain = {name: replace(model, fused=False) for name, model in facts.roles.items()}
    if most_while_loading(replace(facts, roles=plain))[1] <= facts.device_bytes:
        ways.append("train.fused_layers = false (no layers are compared then)")
    if before:
        ways.append(f"workers of its own for {either([other for other in order if other != 'actor'])} (cluster.roles)")
    divided = facts.parts > 1 and not facts.sharding.parameters
    how = f"train.tensor_parallel: with layers in {facts.parts} parts" if divided else f'train.shard: with "{facts.sharding.shard}"'
    rest = f", beside what is there of {' and '.join(before)}" if before else ""
    raise DoesNotFit(
        f"{how}, loading the {role} would take {in_bytes(most)} of each device's {in_bytes(facts.device_bytes)}: "
        f"{in_bytes(loading_of(facts, role)[0])} for its part of the {role}, and for verifying it{rest}. Use {either(ways)}"
    )
