"""Division of models among workers: of layers, of experts, and of the model that an engine reads.

Enters: facts of whole models. Leaves: a `Division` with its reasons, and the facts of a worker that has its part. Guaranteed: sizes that
the user set are kept; `auto` takes the first of `ways_to_divide` with which the run fits, or if none does, the one that takes least
memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fulltilt.parallel.cuts import expert_counts, legal_expert_sizes, legal_sizes, whole_experts_in_rollouts
from fulltilt.parallel.layout import Sharding
from fulltilt.plan.cache import useful_rollout
from fulltilt.plan.decisions import given_decisions, given_settings, own_sizes, sizes_given, unless_auto
from fulltilt.plan.facts import Facts, RoleFacts, RoleSizes, evaluates
from fulltilt.plan.resident import SLACK, most_resident
from fulltilt.plan.sequence import BEYOND, wrong_sequence_size
from fulltilt.plan.sharding import choose_sharding, decide_offloads, why_crowded
from fulltilt.schema import Config, value_of
from fulltilt.words import in_bytes

# Keys that do not work with divided models.
UNDIVIDED = {"train.compile": "compiled layers have not been tried with layers or experts that workers divide"}


@dataclass(frozen=True)
class Division:
    """Numbers of workers among which models are divided. Example: Division(tensor=2, rollout=2)"""

    tensor: int = 1  # workers that share each layer
    experts: int = 1  # workers that share the experts
    rollout: int = 1  # workers that share each layer of the model that an engine reads
    words: tuple[str, ...] = field(default=(), compare=False)  # the sizes that `auto` chose, and why

    def of(self, config: Config, role: str) -> RoleSizes:
        """Return the sizes of a role. If the role sets one size itself, the other is 1 unless it sets that, too."""
        tensor, experts = own_sizes(config, role)
        return RoleSizes(self.tensor, self.experts) if tensor is experts is None else RoleSizes(tensor or 1, experts or 1)


@dataclass(frozen=True)
class Fit:
    """Result of planning a run with its models divided in one way."""

    needed: int  # the most bytes on a device, with everything on the host that `auto` may offload
    sharding: Sharding
    why_not: str | None  # None: it fits


def choose_division(
    config: Config, facts: Facts, *, within: int, beside: int = 1, only: str | None = None, unshared: str | None = None
) -> Division:
    """Return the sizes of tensor and expert parallelism that `auto` chooses: the first of `ways_to_divide` with which the run fits, or if
    there is none, the one that takes least memory. `facts`: of whole models. `within`: a number that sizes must divide so that groups of
    neighbours are on one machine. `beside`: the workers of a machine, for `choose_sharding`. `only`: why `auto` divides nothing.
    `unshared`: why parameters cannot be sharded."""
    ways = list(ways_to_divide(config, facts, within))
    usual, _ = ways[0]
    autos = [key for key, value in sizes_given(config).items() if value == "auto"]
    own = bool(facts.roles) and not followers(config, facts)
    if facts.device != "cuda" or facts.sharding.workers == 1 or not autos or own:
        return usual
    if only or len({way for way, _ in ways}) == 1:
        return replace(usual, words=tuple(division_in_words(config, facts, usual, autos, {}, only or "no other size is legal")))
    tried = dict[Division, Fit]()
    for way, shares in ways:
        fit = tried[way] = tried.get(way) or how_it_fits(config, facts, way, beside, unshared)
        if fit.why_not is None and not (shares and fit.sharding.parameters):
            return replace(way, words=tuple(division_in_words(config, facts, way, autos, tried, within=within)))
    least = min(tried, key=lambda way: tried[way].needed)
    none = f"nothing fits, and this takes least: {tried[least].why_not}"
    return replace(least, words=tuple(division_in_words(config, facts, least, autos, tried, none, within=within)))


def ways_to_divide(config: Config, facts: Facts, within: int) -> Iterator[tuple[Division, bool]]:
    """Yield all legal divisions, the preferred ones first: nothing is divided, then experts are, then layers are; for each the smallest
    rollout groups first, because data parallelism beats tensor parallelism there, but before them an engine that reads the trained
    parameters. The flag says that a division is meant only for an engine that does so, without a copy."""
    rollout = config.rollout.tensor_parallel
    for of_layers, of_experts in dict.fromkeys(pairs_of_sizes(config, facts, within)):
        usual = unless_auto(rollout, of_layers) if facts.rollout else of_layers
        samplers, together = [usual], config.rollout.expert_parallel
        if rollout == "auto" and facts.rollout and "actor" in facts.roles:
            samplers = legal_sizes(facts.actor.shape, within) if together == "auto" or together == 1 else [together]
            usual = usual if usual in samplers else samplers[0]
        if evaluates(facts) and facts.rollout:  # one model, which the engine reads
            yield from ((Division(size, 1, size), False) for size in dict.fromkeys([usual, *samplers]))
            return
        if (of_experts == 1 or of_layers > 1) and usual == of_layers:
            yield Division(of_layers, of_experts, usual), facts.rollout and of_layers > 1 and len(samplers) > 1
        yield from ((Division(of_layers, of_experts, size), False) for size in samplers)


def pairs_of_sizes(config: Config, facts: Facts, within: int) -> Iterator[tuple[int, int]]:
    """Yield pairs of the numbers of workers that may share layers and experts, the preferred pairs first: last those whose groups span
    machines. If the number of experts allows it, members that share layers have some of the experts whole, as in rollouts, because products
    of parts are narrow; else each has a part of all experts."""
    tensor, experts = config.train.tensor_parallel, config.train.expert_parallel
    yield unless_auto(tensor, 1), unless_auto(experts, 1)
    found = list[tuple[int, int]]()
    if experts == "auto" and unless_auto(tensor, 1) == 1:
        found += [(1, size) for size in expert_sizes(config, facts)]
    if tensor == "auto":
        whole, parts = (tensor_sizes(config, facts, within, whole_experts=each) for each in (True, False))
        for size in sorted({*whole, *parts}):
            found += [(size, size)] * (size in whole and experts in ("auto", size))
            found += [(size, 1)] * (size in parts and experts in ("auto", 1))
    yield from sorted(found, key=lambda pair: reaches_beyond(config, facts, pair, within))


def tensor_sizes(config: Config, facts: Facts, within: int, *, whole_experts: bool = False) -> list[int]:
    """Return the sizes into which the layers of all roles without sizes of their own may be divided, and that leave as many workers with
    the same part as other keys need. `whole_experts`: sizes with which each member has some experts whole, if the actor has experts and
    rollouts may have them whole, too."""
    workers, shard, roles = facts.sharding.workers, config.train.shard, followers(config, facts)
    group = {"full": 2, "hybrid": config.train.shard_size or 2}.get(shard, 1)

    def legal(size: int) -> bool:
        rest = workers // size
        alike = [wrong_sequence_size(config, role, model.shape, rest, size) for role, model in roles.items()]
        return rest >= group and (shard != "hybrid" or rest % group == 0) and not any(alike)

    with_experts = [role for role, model in roles.items() if expert_counts(model.shape)]
    if whole_experts and (not with_experts or ("actor" in roles and "actor" not in with_experts) or config.rollout.expert_parallel == 1):
        return []
    of_roles = [set(legal_sizes(model.shape, within, whole_experts=whole_experts)) for model in roles.values()]
    return [size for size in sorted(set.intersection(*of_roles)) if legal(size)] if of_roles else []


def expert_sizes(config: Config, facts: Facts) -> list[int]:
    """Return the sizes into which the experts may be divided of all roles that have some and have no sizes of their own."""
    roles, workers = followers(config, facts), facts.sharding.workers
    counts = [set(legal_expert_sizes(model.shape, workers)) for model in roles.values() if expert_counts(model.shape)]
    actor = facts.roles.get("actor")
    if config.train.shard == "hybrid" or not counts or (actor and not expert_counts(actor.shape)):
        return []
    return sorted(set.intersection(*counts))


def reaches_beyond(config: Config, facts: Facts, pair: tuple[int, int], within: int) -> bool:
    """Return whether `auto` would make groups that span machines: of workers that share layers or experts, or, if [train] or roles set the
    number of workers that share micro-batches, of these with all parts of the layers."""
    tensor, experts = pair
    given = {given_settings(config, role)["sequence_parallel"] for role in followers(config, facts)} - {"auto"}
    groups = [experts, *(tensor * size for size in given if within % size == 0)]  # other groups span machines anyway
    return any(within % size for size in groups)


def followers(config: Config, facts: Facts) -> dict[str, RoleFacts]:
    """Return the roles that are divided as [train] says: those without a size of their own, of layers or of experts (`Division.of`)."""
    return {role: model for role, model in facts.roles.items() if own_sizes(config, role) == (None, None)}


def why_undivided(config: Config, *, sampled: bool) -> str | None:
    """Return why `auto` divides no model; None: it may."""
    if sampled and config.rollout.engine != "native":
        return f'rollout.engine = "{config.rollout.engine}" samples from a whole model'
    return next((f"{key} is set" for key in UNDIVIDED if value_of(config, key) is True), None)


def divided(config: Config, facts: Facts, way: Division) -> Facts:
    """Return the facts of a worker if whole models are divided in this way; roles with sizes of their own keep these."""
    sizes = {role: way.of(config, role) for role in facts.roles}
    of_all = sizes.get("actor") or next(iter(sizes.values()), RoleSizes(way.tensor, way.experts))
    sharding = replace(facts.sharding, workers=facts.sharding.workers // of_all.tensor, experts=of_all.apart)
    roles = {
        role: model.part(sizes[role].tensor, sizes[role].apart, whole_experts=sizes[role].experts > 1)
        for role, model in facts.roles.items()
    }
    copied = "actor" in roles and facts.rollout and (way.rollout != way.tensor or of_all.apart > 1 or other_experts(config, facts, way))
    found = replace(facts, roles=roles, sharding=sharding, parts=of_all.tensor, rollout_parts=way.rollout)
    found = replace(found, divisions={role: own for role, own in sizes.items() if own != of_all})
    if not copied:
        return found
    given = config.rollout.expert_parallel
    whole_experts = whole_experts_in_rollouts(given, way.rollout, way.tensor, way.experts, facts.actor.shape)
    return replace(found, copy_bytes=facts.actor.part(way.rollout, whole_experts=whole_experts).parameter_bytes)


def other_experts(config: Config, facts: Facts, way: Division) -> bool:
    """Return whether workers that sample together divide experts in another way than those that train, although as many workers share a
    layer."""
    learning = way.tensor > 1 and way.experts > 1 and bool(expert_counts(facts.actor.shape))
    return whole_experts_in_rollouts(config.rollout.expert_parallel, way.rollout, way.tensor, way.experts, facts.actor.shape) != learning


def how_it_fits(config: Config, whole: Facts, way: Division, beside: int, unshared: str | None = None) -> Fit:
    facts = divided(config, whole, way)
    facts = replace(facts, sharding=choose_sharding(config, facts, max(1, beside // way.tensor), only=unshared))
    made = decide_offloads(config, given_decisions(config, facts), facts)
    needed, why = most_resident(made, facts), why_crowded(config, made, facts)
    if facts.rollout and "actor" in facts.roles:
        why = why and why.replace(" and optimizer", ", optimizer and the engine's copy") if facts.engine_bytes else why
        sampling, words = useful_rollout(config, made, facts)
        if why is None and sampling > (1 - SLACK) * facts.device_bytes:
            why = f"{words} would take {in_bytes(sampling)} of the device's {in_bytes(facts.device_bytes)}"
        needed = max(needed, sampling)
    return Fit(needed, facts.sharding, why)


def division_in_words(
    config: Config, facts: Facts, chosen: Division, autos: Collection[str], tried: Mapping[Division, Fit], instead: str = "",
    *, within: int = 1,
) -> Iterator[str]:  # fmt: skip
    """Yield a line for each size that `auto` has chosen. `instead`: the reason, if it is not the first that fits."""
    beyond = f"; {BEYOND}" if chosen in tried and reaches_beyond(config, facts, (chosen.tensor, chosen.experts), within) else ""
    before = [(way, fit.why_not) for way, fit in tried.items() if way != chosen and fit.why_not]
    learns = not evaluates(facts)
    fits = f"the run fits, with {in_bytes(tried[chosen].needed)} of the device's {in_bytes(facts.device_bytes)}" if chosen in tried else ""
    if "train.expert_parallel" in autos and learns and any(expert_counts(model.shape) for model in facts.roles.values()):
        of_less = [why for way, why in before if way.experts < chosen.experts]
        yield f"train.expert_parallel = {chosen.experts} (auto: {instead or reason(of_less, chosen.experts, fits, beyond)})"
    if "train.tensor_parallel" in autos and learns:
        of_less = [why for way, why in before if way.tensor < chosen.tensor]
        yield f"train.tensor_parallel = {chosen.tensor} (auto: {instead or reason(of_less, chosen.tensor, fits, beyond)})"
    if "rollout.tensor_parallel" in autos and facts.rollout and "actor" in facts.roles:
        alike = [(way, why) for way, why in before if (way.tensor, way.experts) == (chosen.tensor, chosen.experts) or not learns]
        of_less = [why for way, why in alike if way.rollout < chosen.rollout]
        shared = "the engine reads the parameters that learn" if chosen.rollout == chosen.tensor > 1 and learns else fits
        yield f"rollout.tensor_parallel = {chosen.rollout} (auto: {instead or reason(of_less, chosen.rollout, shared)})"


def reason(shortages: Sequence[str], size: int, otherwise: str, beyond: str = "") -> str:
    """Return why a size was chosen: the shortage with a smaller one, if one was tried. `beyond`: words to add about a group that spans
    machines."""
    return (f"with fewer, {shortages[-1]}" if size > 1 and shortages else otherwise) + (beyond if size > 1 else "")
