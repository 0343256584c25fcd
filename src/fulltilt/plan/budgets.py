"""The numbers that execution depends on, as a checkpoint keeps them.

Enters: facts, how roles run, and the memory of a rollout. Leaves: `Budgets`. Guaranteed: they go into every checkpoint, so that a resumed
run computes in the same shapes, unless its KV cache does not fit any more: then a smaller one is used, and the plan's words say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fulltilt.plan.cache import RolloutMemory, blocks_per_sample, cache_bytes, kv_blocks, most_seqs, pass_tokens
from fulltilt.plan.decisions import RolePlan, unless_auto
from fulltilt.plan.facts import Facts
from fulltilt.plan.micro_batches import update_budget
from fulltilt.schema import Config
from fulltilt.words import in_bytes

ONE_THREAD_PARAMETERS = 30_000_000  # a rule of thumb: below it one thread was faster where others ran beside it


@dataclass(frozen=True)
class Budgets:
    """Numbers that execution depends on and results do not. A checkpoint keeps them."""

    threads: int  # CPU threads that torch uses
    kv_blocks: int
    max_seqs: int
    max_batched_tokens: int
    token_budget: int
    forward_token_budget: int
    ref_token_budget: int
    critic_token_budget: int
    critic_forward_token_budget: int
    reward_model_token_budget: int
    workers: int = 1  # workers that have the actor; with another number all these budgets are planned again
    parts: int = 1  # number of workers that share each layer; with another number, too, all are planned again
    rollout_parts: int = 1  # number of workers that share each layer of the model that an engine reads


def make_budgets(config: Config, facts: Facts, roles: RolePlan, memory: RolloutMemory, samples: int) -> Budgets:
    token_budget, critic = (update_budget(config, facts.device, role, roles.budgets) for role in ("actor", "critic"))
    forward = unless_auto(config.actor.forward_token_budget, 2 * token_budget)
    # The models of other roles may be larger than the actor.
    of_others = unless_auto(config.actor.forward_token_budget, 2 * update_budget(config, facts.device, "actor", {}))
    max_seqs = most_seqs(config, facts.device, samples if facts.rollout else 0)
    batched = unless_auto(config.rollout.max_batched_tokens, pass_tokens(config, facts, memory, max_seqs))
    small = facts.device == "cpu" and facts.largest_work.parameter_bytes < ONE_THREAD_PARAMETERS * facts.largest_work.itemsize
    return Budgets(
        threads=unless_auto(config.run.threads, 1 if small and not facts.threads_given else facts.cores),
        kv_blocks=kv_blocks(config, facts, memory, max_seqs, batched) if facts.rollout else 0,
        max_seqs=max_seqs,
        max_batched_tokens=batched,
        token_budget=token_budget,
        forward_token_budget=forward,
        ref_token_budget=unless_auto(config.ref.forward_token_budget, of_others if config.ref.path else forward),
        critic_token_budget=critic,
        critic_forward_token_budget=unless_auto(config.critic.forward_token_budget, 2 * critic),
        reward_model_token_budget=unless_auto(config.reward_model.forward_token_budget, 2 * of_others),
        workers=facts.sharding.workers * facts.parts,
        parts=facts.parts,
        rollout_parts=facts.rollout_parts,
    )


def keep_budgets(
    config: Config, facts: Facts, memory: RolloutMemory, planned: Budgets, kept: Mapping[str, Any]
) -> tuple[Budgets, list[str]]:
    """Return the budgets of the checkpoint, and in words those that cannot be kept: a cache that was sized by `auto` when more memory was
    free, because the device was another one or more was offloaded."""
    budgets = replace(planned, **kept)  # an older version's checkpoint may lack some
    if not facts.rollout:
        return budgets, []
    # Validation may ask for longer responses than before.
    budgets = replace(budgets, kv_blocks=max(budgets.kv_blocks, blocks_per_sample(config, facts)))
    given = {config.rollout.kv_bytes, config.rollout.memory_fraction} - {"auto"}
    cache = cache_bytes(config, facts, budgets.kv_blocks)
    if given or facts.device != "cuda" or cache + memory.decode + memory.returning <= memory.free:
        return budgets, []
    words = (
        f"the KV cache of {in_bytes(cache)} that the run began with does not fit into the {in_bytes(memory.free)} that are free now: "
        "a smaller one is taken, and samples may differ in their last bits from those of a run that was not interrupted"
    )
    passes = min(budgets.max_batched_tokens, planned.max_batched_tokens)  # the smaller cache was planned with passes of this size
    return replace(budgets, kv_blocks=planned.kv_blocks, max_batched_tokens=passes), [words]
