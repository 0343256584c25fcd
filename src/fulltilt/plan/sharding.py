"""Remedies for a device that is too small: offloads to the host between phases, and sharding among workers with the same part of the
models.

Enters: facts and decisions. Leaves: decisions about offloads, and a `Sharding` with its reason. Guaranteed: `auto` shards and offloads no
more than necessary: the optimizer before parameters, within a machine before among all, and offloads only after both.
"""

from __future__ import annotations

from dataclasses import replace

from fulltilt.parallel.layout import Sharding
from fulltilt.plan.cache import useful_rollout
from fulltilt.plan.decisions import Decisions, given_decisions
from fulltilt.plan.facts import Facts
from fulltilt.plan.resident import SLACK, most_resident, most_while_loading
from fulltilt.schema import Config, value_of
from fulltilt.words import in_bytes

RESERVE = 1 / 5  # share of the device that parameters, gradients and optimizer leave to activations and KV cache, or else are offloaded
# Keys that do not work with sharded parameters.
UNSHARED = {
    "train.compile": "compiled layers have not been tried with it",
    "train.offload_grads": "gradients of shards exist only from a pass to the optimizer step, so there are none to free between updates",
}


def why_crowded(config: Config, made: Decisions, facts: Facts) -> str | None:
    """Return why something has to leave the device, in words: an update does not fit, or a rollout with a KV cache whose size the user set;
    None: everything fits."""
    what, needed = "parameters, gradients and optimizer", most_resident(made, facts)
    if needed > (1 - RESERVE) * facts.device_bytes:
        return f"{what} would take {in_bytes(needed)} of the device's {in_bytes(facts.device_bytes)}"
    if not facts.rollout or "actor" not in facts.roles or config.rollout.kv_bytes == "auto":
        return None
    needed, what = useful_rollout(config, made, facts)
    if needed <= (1 - SLACK) * facts.device_bytes:
        return None
    return f"{what} would take {in_bytes(needed)} of the device's {in_bytes(facts.device_bytes)}"


def decide_offloads(config: Config, made: Decisions, facts: Facts) -> Decisions:
    """Decide what is offloaded. Optimizer states leave first: they are the largest, and needed for the shortest time. Then the parameters
    of waiting roles, but never the actor's: CUDA graphs would have to be dropped."""
    why = why_crowded(config, made, facts)
    for role, model in facts.roles.items():
        if model.trained and why:
            made = made.decide(role, "offload_optimizer", True, why)
        if made.keys[role].get("offload_optimizer") is True:
            made = made.decide(role, "offload_grads", True, "with the optimizer")
    for role in ("reward_model", "ref", "critic"):
        if role in facts.roles and len(facts.roles) > 1 and (why := why_crowded(config, made, facts)):
            made = made.decide(role, "offload_params", True, why)
    return made.decide("actor", "offload_params", False)


def choose_sharding(config: Config, facts: Facts, beside: int, *, only: str | None = None) -> Sharding:
    """Return how the workers of a run shard their states. `auto`: the optimizer if that fits, else parameters too, within the `beside`
    workers of a machine or among all; first without offloads, then with those that `auto` may choose. `only`: why it must be the
    optimizer."""
    train, workers, experts = config.train, facts.sharding.workers, facts.sharding.experts
    possible = [Sharding("optimizer", workers, workers)]
    by_machines = train.shard == "auto" and experts == 1 and 1 < beside < workers and workers % beside == 0
    if train.shard == "hybrid" or by_machines:
        possible.append(Sharding("hybrid", workers, train.shard_size or beside, train.reshard_after_forward))
    possible.append(Sharding("full", workers, workers, train.reshard_after_forward))
    possible = [replace(each, experts=experts) for each in possible]
    if train.shard != "auto" and workers > 1:
        return next(each for each in possible if each.shard == train.shard)
    if workers == 1 or facts.device != "cuda" or only:
        return replace(possible[0], why=only or "")
    places = [(each, given_decisions(config, each)) for each in (replace(facts, sharding=sharding) for sharding in possible)]
    offloading = [(each, decide_offloads(config, made, each)) for each, made in places]
    can_load = [most_while_loading(each)[1] <= (1 - SLACK) * facts.device_bytes for each, _ in places]
    fitting = [
        each.sharding for made_ways in (places, offloading)
        for (each, made), loads in zip(made_ways, can_load, strict=True) if loads and not why_crowded(config, made, each)
    ]  # fmt: skip
    needs = [(most_while_loading(each)[1], most_resident(made, each)) for each, made in offloading]
    least = min(range(len(needs)), key=lambda place: (max(needs[place]), needs[place][1]))
    chosen = fitting[0] if fitting else possible[least]
    of_whole, made = places[0]
    otherwise = "" if chosen is possible[0] else ' with "optimizer"'
    what, needed = "parameters, gradients and optimizer", most_resident(made, of_whole)
    if otherwise and not can_load[0] and needed <= (loaded := most_while_loading(of_whole)[1]):
        what, needed = "all roles as they are loaded", loaded
    return replace(chosen, why=f"{what} would take {in_bytes(needed)} of each device's {in_bytes(facts.device_bytes)}{otherwise}")


def unshared(config: Config) -> dict[str, str]:
    """Return the keys that do not work with sharded parameters, and why."""
    found, together = {key: why for key, why in UNSHARED.items() if value_of(config, key) is True}, config.train.recompute_layers
    if config.train.recompute_method == "uniform" and together not in ("auto", 1):
        found["train.recompute_method"] = f"{together} layers would be recomputed together, and one at a time has whole parameters"
    return found


def why_unshared(config: Config) -> str | None:
    """Return why `auto` shards no parameters; None: it may."""
    return next((f"{key} is set" for key in unshared(config)), None)
