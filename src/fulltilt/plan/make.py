"""The plan: every derived number of a run, computed before its first step and printed once, in words.

Enters: the configuration and one record of facts about hardware, models and data. Leaves: a frozen `Plan`. Guaranteed: neither torch nor a
model is needed; a number that the user set is kept or refused with the reason; `auto` becomes a number in this package and nowhere else;
the numbers that execution depends on (`budgets`) go into every checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fulltilt.plan.budgets import Budgets, keep_budgets, make_budgets
from fulltilt.plan.cache import check_cache, check_decoding, rollout_memory, why_decoding_has_no_graphs
from fulltilt.plan.decisions import KEPT_AS, OWN_BUDGETS, RolePlan, RoleSettings, count_steps, longest_response, updates_per_step
from fulltilt.plan.facts import Facts, RoleFacts
from fulltilt.plan.micro_batches import budget_reasons
from fulltilt.plan.resident import check_loading
from fulltilt.plan.roles import plan_roles
from fulltilt.plan.words import in_words, words_of_own_workers
from fulltilt.records import DoesNotFit, UserError
from fulltilt.schema import Config
from fulltilt.shape import Shape
from fulltilt.words import in_bytes

SAMPLE_BYTES = 1024  # least host memory that a sample takes, whatever its length


@dataclass(frozen=True)
class Plan:
    steps: int
    updates_per_step: int
    budgets: Budgets
    roles: Mapping[str, RoleSettings]
    words: tuple[str, ...]
    reasons: Mapping[tuple[str, str], str] = field(default_factory=dict)  # the reasons of `RolePlan`

    def beside(self, other: Plan) -> Plan:
        """Return the plan of a run in which other workers, with the other plan, have roles that these do not."""
        budgets = {name: getattr(other.budgets, name) for role in other.roles for name in OWN_BUDGETS[role]}
        together = replace(self, budgets=replace(self.budgets, **budgets), roles={**self.roles, **other.roles})
        return replace(together, words=(*self.words, *other.words), reasons={**self.reasons, **other.reasons})


def plan_of(
    model: Shape | Mapping[str, Any] | str | Path, config: Config, *, device: str, device_bytes: int, host_bytes: int, longest: int,
    roles: Collection[str] = ("actor",), steps_per_epoch: int = 1, **more: Any,
) -> Plan:  # fmt: skip
    """Return the plan of a run whose model is not loaded: a shape, the contents of a config.json, or a folder that has one. `roles`: the
    run's roles that have a model of their own, all of this shape; `more`: other fields of `Facts`."""
    shape = model if isinstance(model, Shape) else Shape.from_config(model) if isinstance(model, Mapping) else Shape.read(model)
    found = {role: RoleFacts.of_shape(shape, config, device, learns=role in KEPT_AS, role=role) for role in roles}
    facts = Facts(device, device_bytes, host_bytes, found, longest, steps_per_epoch, **more)
    check_loading(facts)
    return make_plan(config, facts)


def make_plan(config: Config, facts: Facts, kept: Mapping[str, Any] | None = None, roles: RolePlan | None = None) -> Plan:
    """Return the plan of a run. `kept`: the budgets of the checkpoint that it resumes from. `roles`: the plan of roles that run already."""
    algorithm = config.algorithm
    samples = algorithm.prompts_per_step * (algorithm.samples_per_prompt if facts.rollout else 1)
    if "actor" in facts.roles:
        check_context(config, facts.longest, facts.actor.shape.positions, rollout=facts.rollout)
    missing = why_decoding_has_no_graphs(config, facts)
    if facts.rollout and config.rollout.cuda_graphs is True and missing:
        reason = f"no graph can hold the model: {facts.not_captured}" if facts.not_captured else missing
        raise UserError(f"rollout.cuda_graphs: true, but {reason}. Remove the key: decoding then runs without graphs")
    check_samples(facts, samples)
    roles = roles or plan_roles(config, facts, kept)
    memory = rollout_memory(config, facts, roles, samples)
    check_decoding(config, facts, memory, samples)
    budgets = make_budgets(config, facts, roles, memory, samples)
    changed: list[str] = []
    if kept:
        budgets, changed = keep_budgets(config, facts, memory, budgets, kept)
    if facts.rollout:
        check_cache(config, facts, memory, budgets.kv_blocks)
    # Budgets may have changed since roles were planned: by the measured costs of updates, or to those of the checkpoint.
    of_updates = {role: getattr(budgets, KEPT_AS[role]) for role in facts.roles if role in KEPT_AS}
    roles = replace(roles, reasons={**roles.reasons, **budget_reasons(config, facts.device, of_updates, kept)})
    steps = count_steps(config, facts.steps_per_epoch)
    if "actor" not in facts.roles:
        own = {role: roles.settings[role] for role in facts.roles}
        words = tuple(words_of_own_workers(config, facts, roles, budgets))
        return Plan(steps, updates_per_step(config), budgets, own, words, roles.reasons)
    words = (*in_words(config, facts, roles, memory, budgets, steps, samples), *changed)
    return Plan(steps, updates_per_step(config), budgets, roles.settings, words, roles.reasons)


def check_context(config: Config, longest_read: int, limit: int | None, *, rollout: bool, whose: str = "the model") -> None:
    """Refuse samples that are longer than the model's context. `longest_read`: tokens of the longest prompt, or of the longest row for SFT.
    `limit`: positions that the model, or another that reads whole samples, was made for."""
    response = longest_response(config) if rollout else 0
    longest = longest_read + response
    if limit is None or longest <= limit:
        return
    made_for = f"{whose} was made for {limit} positions"
    if not rollout:
        remedy = f"Set data.max_tokens = {limit} to leave such rows out, or shorten them"
        raise UserError(f"data.train: the longest row has {longest} tokens, {made_for}. {remedy}")
    key = "rollout.max_new_tokens" if response == config.rollout.max_new_tokens else "eval.max_new_tokens"
    ways = [f"lower {key} to at most {limit - longest_read}"] if limit > longest_read else []
    ways += [f"set data.max_prompt_tokens = {limit - response} to leave longer prompts out"] if limit > response else []
    remedy = ", or ".join(ways) or f"lower {key} below {limit} and leave long prompts out (data.max_prompt_tokens)"
    needs = f"the longest prompt ({longest_read} tokens) with a response of {response} needs {longest}"
    raise UserError(f"{key}: {needs}, {made_for}. {remedy[0].upper()}{remedy[1:]}")


def check_samples(facts: Facts, samples: int) -> None:
    if samples * SAMPLE_BYTES > facts.host_bytes:
        raise DoesNotFit(
            f"algorithm.samples_per_prompt: a step of {samples} samples takes {in_bytes(samples * SAMPLE_BYTES)} or more of the host's "
            f"memory, of which {in_bytes(facts.host_bytes)} are free. Lower it, or algorithm.prompts_per_step"
        )
