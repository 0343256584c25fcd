"""Tokens of an update's micro-batches: the budgets that `auto` chooses before anything is measured, and after updates are measured.

Enters: facts, decisions, and the measured costs of updates. Leaves: a token budget for each role that is trained. Guaranteed: a budget that
the user set is kept; one by `auto` fits the free memory, by formula or by measurement, as far as a smaller one would help.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fulltilt.plan.decisions import KEPT_AS, Decisions, RolePlan, longest_row, unless_auto
from fulltilt.plan.facts import Facts, RoleFacts
from fulltilt.plan.resident import exported_on_host, left_for_update, states_on_host
from fulltilt.records import UpdateCosts
from fulltilt.schema import Config
from fulltilt.words import in_bytes, many

# Values of `auto` before anything is measured: large on a GPU, where small passes waste the chip; small on a CPU, where they cost nothing.
TOKEN_BUDGET = {"cuda": 16384, "cpu": 8192}
ENLARGED = 4  # largest factor by which `auto` enlarges the token budget of a small model
# Parameters times tokens below which the host probably takes longer to launch a micro-batch's kernels than the device to run them: an H200
# took 0.13 s for 16384 tokens of 135 million parameters, 10% of the FLOPs that it reaches in that time (docs/bench/gsm8k_tuning.json).
BUSY = 1 << 43
BUDGET_SHARE = 0.5  # share of the memory left on the device that an enlarged micro-batch may take
LEAST_BUDGET = 1024  # least tokens that `auto` chooses
HEADROOM = 0.15  # free share of an update's memory, for a micro-batch that takes more than was foreseen, or is larger than planned
AS_FORESEEN = 1.03  # factor of the foreseen bytes up to which a measurement agrees with them
# Share of the device's seconds for a micro-batch's tokens that the host's launches may take before `auto` enlarges the budget: the host
# launches ahead, and the device waits only when the host falls behind.
WAITING = 3 / 4
WHY_MORE = "with fewer tokens of so small a model the device would wait"
WHY_KEPT = "as in the checkpoint that the run resumes from"
WHY_FEWER = "more would not fit into the device's memory"


def update_budget(config: Config, device: str, role: str, budgets: Mapping[str, int]) -> int:
    """Return the tokens of a role's micro-batch in an update. The critic has no vocabulary head: twice the actor's, if that is given."""
    given, usual = config.actor.token_budget, TOKEN_BUDGET[device]
    if role == "actor":
        return unless_auto(given, budgets.get("actor", usual))
    return unless_auto(config.critic.token_budget, budgets.get("critic", 2 * usual) if given == "auto" else 2 * given)


def micro_batch_tokens(config: Config, facts: Facts, role: str, budgets: Mapping[str, int], sharing: int) -> int:
    """Return the tokens that a worker has of the largest micro-batch of an update. Of a micro-batch, `sharing` workers compute a part each,
    or as many groups of workers that share layers: the members of such a group have a part of its tokens each between the layers."""
    section = config.critic if role == "critic" else config.actor
    longest, members = -(-longest_row(config, facts) // sharing), facts.parts_of(role)
    if not section.dynamic_batch and section.micro_batch:
        return section.micro_batch * -(-longest // members)
    return -(-max(update_budget(config, facts.device, role, budgets), longest) // members)


def decide_budget(config: Config, made: Decisions, facts: Facts, role: str) -> int:
    """Return the tokens of a role's micro-batch if the user gave no number: more for a small model, as long as they take only a part of the
    free memory with everything kept for the backward pass that may be kept; fewer if they do not fit with as little kept as possible."""
    tokens, model, given = update_budget(config, facts.device, role, {}), facts.roles[role], made.keys[role]
    if given["offload_activations"] is True:  # offloaded by hand: activations have to fit the host
        return tokens
    all_kept = given["recompute"] in ("auto", "none")
    autos = {"recompute": "none", "offload_activations": False, "head_recompute": not all_kept}
    keys = {key: autos.get(key, value) if value == "auto" else value for key, value in given.items()}
    most, bonus = ENLARGED * tokens, bool(config.algorithm.entropy_coef)
    left = left_for_update(config, made, facts, role)
    available, longest = BUDGET_SHARE * left, longest_row(config, facts)  # a longer row has a micro-batch alone, whatever the budget
    of_host = facts.host_bytes - sum({**states_on_host(made, facts), **exported_on_host(facts)}.values())
    of_host //= sum(bool(other.trained) for other in facts.roles.values())  # each may move activations to the host
    while tokens > max(LEAST_BUDGET, longest) and not update_can_fit(config, model, tokens, given, left, of_host):
        tokens //= 2
    if tokens < update_budget(config, facts.device, role, {}):
        return tokens
    while (
        tokens < most
        and tokens * model.parameter_bytes // model.itemsize < BUSY
        and model.update_bytes(-(-2 * tokens // model.division.members), keys, entropy_gradient=bonus) <= available
    ):
        tokens *= 2
    return tokens


def budget_reasons(
    config: Config, device: str, budgets: Mapping[str, int], kept: Mapping[str, Any] | None = None
) -> dict[tuple[str, str], str]:
    """Return why `auto` chose another number of tokens than the usual one for a role's updates, by role and key; an empty string if it did
    not. `kept`: the budgets of the checkpoint that the run resumes from."""
    found = {}
    for role, tokens in budgets.items():
        section, usual = getattr(config, role), update_budget(config, device, role, {})
        by_auto = config.actor.token_budget == section.token_budget == "auto" and section.dynamic_batch
        why = WHY_KEPT if kept and KEPT_AS[role] in kept else WHY_MORE if tokens > usual else WHY_FEWER
        found[role, "token_budget"] = why if by_auto and tokens != usual else ""
    return found


def update_can_fit(config: Config, model: RoleFacts, tokens: int, given: Mapping[str, Any], left: int, of_host: int) -> bool:
    """Return whether a micro-batch fits with all recompute and offload of activations that `auto` may choose. `left`: bytes of the device;
    `of_host`: bytes of main memory. One layer's activations are still on the device while they move to the host."""
    keys, own = {**given, "recompute": "full" if given["recompute"] == "auto" else given["recompute"]}, -(-tokens // model.division.members)
    taken, kept = model.update_bytes(own, keys, entropy_gradient=bool(config.algorithm.entropy_coef)), own * model.kept_bytes(keys)
    layers = len(model.shape.layers)
    return taken <= left or (
        given["offload_activations"] is not False and kept <= of_host and taken - kept * (layers - 1) // layers <= left
    )


def budgets_by_costs(config: Config, facts: Facts, roles: RolePlan, costs: Mapping[str, UpdateCosts]) -> RolePlan:
    """Return the roles with token budgets that fit the measured costs of their updates: if an update takes more than was foreseen, no more
    than leaves `HEADROOM` of the memory free in the largest possible micro-batch; and if seconds were measured, enough that the device
    seldom waits for the host. If memory ran out, a micro-batch with as many tokens does not fit."""
    made = Decisions({role: vars(own) for role, own in roles.settings.items()})
    budgets, words = dict(roles.budgets), list(roles.words)
    for role, own in costs.items():
        if own.ran_out_at is not None or not made.keys[role]["offload_activations"]:  # offloaded activations have to fit the host
            budgets[role] = budget_by_costs(config, facts, made, role, own, update_budget(config, facts.device, role, budgets))
        if own.token_bytes is not None or own.token_s is not None:
            words.append(costs_in_words(config, facts, made, role, own, budgets))
    return replace(roles, budgets=budgets, words=tuple(words))


def budget_by_costs(config: Config, facts: Facts, made: Decisions, role: str, costs: UpdateCosts, planned: int) -> int:
    bonus, left = bool(config.algorithm.entropy_coef), left_by_device(config, facts, made, role)

    def fits(budget: int) -> bool:
        tokens, taken = largest_bytes(config, facts, made, role, costs, budget)
        if costs.ran_out_at is not None and tokens >= costs.ran_out_at:
            return False
        foreseen = facts.roles[role].update_bytes(tokens, made.keys[role], entropy_gradient=bonus)
        # A micro-batch that takes no more than was foreseen needs only the room that the plan has left for it.
        return taken <= (1 - HEADROOM) * left or (budget <= planned and taken <= AS_FORESEEN * foreseen <= AS_FORESEEN * left)

    def waits(budget: int) -> bool:
        seconds = costs.seconds(budget, budget * min(budget, longest_row(config, facts)))
        host, fixed = costs.host_s or 0.0, costs.fixed_s or 0.0
        return bool(seconds) and max(host, fixed) > WAITING * ((seconds or 0.0) - fixed)

    def largest(budget: int) -> int:
        return largest_bytes(config, facts, made, role, costs, budget)[0]

    tokens, most = planned, max(planned, ENLARGED * update_budget(config, facts.device, role, {}))
    while costs.ran_out_at is None and 2 * tokens <= most and waits(tokens) and fits(2 * tokens):
        tokens *= 2
    # The longest sample is as long with a smaller budget: if it does not fit alone, the others would only be split into more micro-batches.
    while tokens > LEAST_BUDGET and not fits(tokens) and largest(tokens // 2) < largest(tokens):
        tokens //= 2
    return tokens


def largest_bytes(config: Config, facts: Facts, made: Decisions, role: str, costs: UpdateCosts, budget: int) -> tuple[int, int]:
    """Return the tokens of the largest possible micro-batch with a budget, and its bytes."""
    tokens = micro_batch_tokens(config, facts, role, {role: budget}, made.sequence(role))
    bonus = bool(config.algorithm.entropy_coef)
    measured = costs.bytes(tokens)
    return tokens, facts.roles[role].update_bytes(tokens, made.keys[role], entropy_gradient=bonus) if measured is None else measured


def left_by_device(config: Config, facts: Facts, made: Decisions, role: str) -> int:
    return left_for_update(config, made, facts, role) if facts.device == "cuda" else int(BUDGET_SHARE * facts.host_bytes)


def costs_in_words(config: Config, facts: Facts, made: Decisions, role: str, costs: UpdateCosts, budgets: Mapping[str, int]) -> str:
    tokens, taken = largest_bytes(config, facts, made, role, costs, update_budget(config, facts.device, role, budgets))
    found = [f"{in_bytes(costs.token_bytes)} a token"] if costs.token_bytes is not None else []
    if costs.token_s is not None and costs.fixed_s is not None and costs.host_s is not None:
        least = f"at least {1e3 * costs.host_s:.3g} ms" if costs.host_s else f"{1e3 * costs.fixed_s:.3g} ms"
        found.append(f"{1e6 * costs.token_s:.3g} us a token and {least} a micro-batch")
    left = in_bytes(max(0, left_by_device(config, facts, made, role)))
    return (
        f"probe: an update of the {role} takes {' and '.join(found)} (micro-batches of up to {many(costs.largest, 'token')} were "
        f"measured); the largest there may be, {many(tokens, 'token')}, takes {in_bytes(taken)} of {left}"
    )
