"""Sequence parallelism: the number of workers that compute a micro-batch together, each a part of its tokens.

Enters: facts, decisions and token budgets. Leaves: decisions in which `sequence_parallel` of every role is a legal number, or still `auto`,
which means 1. Guaranteed: `auto` chooses as few workers as long samples need, and groups within one machine if these suffice; an illegal
number is refused with the legal ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from fulltilt.parallel.cuts import legal_sequence_sizes
from fulltilt.plan.decisions import KEPT_AS, Decisions, given_settings, longest_row, size_key
from fulltilt.plan.facts import Facts, RoleFacts, evaluates
from fulltilt.plan.micro_batches import update_budget
from fulltilt.plan.resident import left_for_update
from fulltilt.records import UserError
from fulltilt.schema import Config, shares_model
from fulltilt.shape import Shape
from fulltilt.words import either, in_bytes, many

BEYOND = "the group reaches over machines, because none within one suffices"
LONG_SAMPLE = 8192  # tokens up to which `auto` lets no workers share a sample, as in the guides


def decide_sequence(config: Config, made: Decisions, facts: Facts, budgets: Mapping[str, int]) -> Decisions:
    """Decide how many workers compute a micro-batch together. `auto`: as few as a long sample needs."""
    models = dict(facts.roles)
    if "actor" in models and shares_model(config):
        models.setdefault("ref", facts.actor)
    for role, model in models.items():
        workers, parts = facts.sharding_of(role).workers, facts.parts_of(role)
        legal = legal_sequence_sizes(model.shape, workers, parts)
        given = made.keys[role]["sequence_parallel"]
        if given != "auto" and given not in legal and evaluates(facts):  # the run that trained may have had other workers
            made = made.replace(role, "sequence_parallel", max(size for size in legal if size < given))
        elif wrong := wrong_sequence_size(config, role, model.shape, workers, parts):
            raise UserError(wrong)
        if facts.device == "cuda" and longest_row(config, facts) > LONG_SAMPLE and len(legal) > 1:
            near = on_one_machine(legal, facts.within, parts)
            size, why = max(sizes_of_long_samples(config, made, facts, role, legal, near, budgets), default=(1, ""))
            made = made.decide(role, "sequence_parallel", size, why if size in near else f"{why}; {BEYOND}")
    return made


def on_one_machine(sizes: Sequence[int], within: int | None, parts: int = 1) -> list[int]:
    """Return the sizes with which groups stay within a machine, if `parts` workers have the parts of each member's layers; all sizes, if
    none does. `within`: a number that the sizes of groups on one machine divide; None: any."""
    return [size for size in sizes if within is None or within % (parts * size) == 0] or list(sizes)


def sizes_of_long_samples(
    config: Config, made: Decisions, facts: Facts, role: str, legal: Sequence[int], near: Sequence[int], budgets: Mapping[str, int]
) -> Iterator[tuple[int, str]]:
    """Yield the numbers of workers that the longest samples need, and why: because a sample exceeds the token budget or a worker's memory,
    or because there are fewer samples than workers. `near`: the sizes whose groups are on one machine; only samples that fit with none of
    them take a larger one."""
    longest, workers = longest_row(config, facts), facts.sharding_of(role).workers
    told = f"the longest sample may have {longest} tokens"

    def least(fits: Callable[[int], bool]) -> int:
        return next((size for size in (*near, *legal) if fits(-(-longest // size))), legal[-1])

    most = update_budget(config, facts.device, role, budgets)
    by_hand = config.critic.token_budget if role == "critic" and config.critic.token_budget != "auto" else config.actor.token_budget
    if by_hand != "auto" and longest > most:
        yield least(lambda tokens: tokens <= most), f"{told}, and a worker gets {most}"
    left, model = left_for_update(config, made, facts, role if role in facts.roles else "actor"), facts.roles.get(role, facts.largest_work)
    if (needed := long_sample_bytes(config, made, model, role, longest)) > left:
        fitting = least(lambda tokens: long_sample_bytes(config, made, model, role, tokens) <= left)
        yield fitting, f"{told}, which would take {in_bytes(needed)}, and {in_bytes(max(0, left))} are left"
    algorithm = config.algorithm
    samples = algorithm.prompts_per_step * (algorithm.samples_per_prompt if facts.rollout else 1)
    samples = -(-samples // algorithm.minibatches_per_step) if role in KEPT_AS else samples
    if samples < workers:
        size = next((size for size in near if workers // size <= samples), near[-1])
        yield size, f"{told}, and {many(samples, 'sample')} are computed at a time on {workers} workers"


def long_sample_bytes(config: Config, made: Decisions, model: RoleFacts, role: str, tokens: int) -> int:
    """Estimate the least bytes that `tokens` tokens of a sample take: with all recompute that `auto` may choose, and only the user's
    offloads."""
    keys = made.keys[role]
    if not model.trained or role not in KEPT_AS:
        return model.forward_bytes(tokens, keys)
    at, tokens = {**keys, "recompute": "full" if keys["recompute"] == "auto" else keys["recompute"]}, -(-tokens // model.division.members)
    away = tokens * model.kept_bytes(at) if keys["offload_activations"] is True else 0
    return model.update_bytes(tokens, at, entropy_gradient=bool(config.algorithm.entropy_coef)) - away


def wrong_sequence_size(config: Config, role: str, shape: Shape, workers: int, parts: int) -> str | None:
    """Return what is wrong with the number of workers that share a role's micro-batches; None: it is legal. `workers`: those that have the
    role, and the same part of its model; `parts`: the number of workers that share each layer."""
    legal, size = legal_sequence_sizes(shape, workers, parts), given_settings(config, role)["sequence_parallel"]
    if size == "auto" or size in legal:
        return None
    must = f"the number must divide the {workers} that have this role, and fit the model's attention heads"
    if workers == 1:
        must = "only one has this role"
    sizes = either([str(each) for each in legal])
    remedy = f"Use {sizes}" if len(legal) > 1 else "Remove the key"
    key = size_key(config, role, "sequence_parallel")
    inherits = role != "actor" and not key.startswith(role)
    of_role, remedy = (f" of the {role}", f"Set {role}.sequence_parallel = {sizes}") if inherits else ("", remedy)
    return f"{key}: {size} workers cannot share micro-batches{of_role}: {must}. {remedy}"
