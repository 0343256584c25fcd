"""The words in which a run prints its plan, once.

Enters: all decisions. Leaves: lines of text. Guaranteed: nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Iterator

from fulltilt import footprint
from fulltilt.plan.budgets import Budgets
from fulltilt.plan.cache import RolloutMemory, cache_bytes, most_seqs, why_decoding_has_no_graphs
from fulltilt.plan.decisions import OWN_BUDGETS, RolePlan, releases_memory, updates_per_step
from fulltilt.plan.facts import Facts
from fulltilt.plan.resident import most_while_loading, resident
from fulltilt.schema import Config
from fulltilt.words import in_bytes, many


def in_words(config: Config, facts: Facts, roles: RolePlan, memory: RolloutMemory, budgets: Budgets, steps: int, samples: int) -> list[str]:
    algorithm, actor = config.algorithm, config.actor
    per_epoch = f"{many(facts.steps_per_epoch, 'round' if algorithm.prompts_per_round else 'step')} an epoch"
    each, updates = f"{many(steps, 'step')} ({per_epoch}), each of", many(updates_per_step(config), "optimizer step")
    layers = [*facts.division, *sharding_in_words(facts, roles), *roles.words, *([f"layers: {facts.layers}"] if facts.layers else [])]
    why = roles.reasons.get(("actor", "token_budget"))
    why_budget = f" (auto: {why})" if why else ""
    if not facts.rollout:
        of_update = f"micro-batches of at most {budgets.token_budget} tokens{why_budget}"
        return [f"{each} {algorithm.prompts_per_step} rows, {updates}; {of_update}", *layers]
    longest = facts.longest + config.rollout.max_new_tokens
    alone = f"; a longer sample (up to {longest} tokens) runs alone" if actor.dynamic_batch and budgets.token_budget < longest else ""
    cache = "the cache stays during the update (rollout.release_memory)"
    if releases_memory(config):
        cache = "the update gets the cache's memory"
    prompts, of_each = many(algorithm.prompts_per_step, "prompt"), many(algorithm.samples_per_prompt, "sample")
    return [
        f"{each} {prompts} x {of_each} = {samples} samples, {updates}",
        f"rollout: KV cache of {in_bytes(cache_bytes(config, facts, budgets.kv_blocks))} for "
        f"{budgets.kv_blocks * config.rollout.block_tokens} tokens, at most "
        f"{many(budgets.max_seqs, 'sample')} at once, {budgets.max_batched_tokens} tokens a pass; {cache}; "
        f"{graphs_in_words(config, facts, memory.decode, samples)}",
        f"update: micro-batches of at most {micro(actor.micro_batch, budgets.token_budget)}{why_budget}; "
        f"passes without gradient {micro(actor.micro_batch, budgets.forward_token_budget)}{alone}",
        *layers,
    ]


def sharding_in_words(facts: Facts, roles: RolePlan) -> Iterator[str]:
    sharding, trained = facts.sharding, [role for role, model in facts.roles.items() if model.trained]
    if sharding.workers == 1 or not trained:
        return
    what = "parameters, gradients, master weights and moments" if sharding.parameters else "master weights and moments"
    groups = f", in groups of {sharding.group}" if sharding.shard == "hybrid" else ""
    why = f" (auto: {sharding.why})" if sharding.why else ""
    most = max(resident({role: vars(own) for role, own in roles.settings.items()}, facts, role) for role in trained)
    held = f"each holds {in_bytes(most)} in an update"
    if sharding.parameters:
        role, loading = most_while_loading(facts)
        held += f", and {in_bytes(loading)} while the {role} is loaded"
    yield f"{sharding.shard} sharding: {sharding.workers} workers share out {what}{groups}{why}; {held}"


def words_of_own_workers(config: Config, facts: Facts, roles: RolePlan, budgets: Budgets) -> Iterator[str]:
    """Yield the plan of workers that have one role, which is not the actor."""
    (role,) = facts.roles
    *of_update, forward = (micro(getattr(config, role).micro_batch, getattr(budgets, name)) for name in OWN_BUDGETS[role])
    updates = f"updates in micro-batches of at most {of_update[0]}, " if of_update else ""
    yield f"{role} on workers of its own: {updates}passes without gradient of at most {forward}"
    yield from facts.division
    yield from roles.words
    if facts.layers:
        yield f"layers of the {role}: {facts.layers}"


def graphs_in_words(config: Config, facts: Facts, decode: int, samples: int) -> str:
    if missing := why_decoding_has_no_graphs(config, facts):
        return f"no CUDA graphs: {missing}"
    sizes = footprint.sizes_up_to(most_seqs(config, facts.device, samples))
    return f"CUDA graphs of {many(len(sizes), 'batch size')}, {in_bytes(decode)} for decoding"


def micro(samples: int | None, tokens: int) -> str:
    return many(samples, "sample") if samples else f"{tokens} tokens"
