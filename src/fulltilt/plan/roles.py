"""Settings of each role: offloads, workers that share its micro-batches, recompute and activations, decided in this order.

Enters: the configuration, facts, and the budgets of a checkpoint. Leaves: a `RolePlan`, in which no `auto` is left. Guaranteed: decisions
depend on the whole memory of the device and not on what happens to be free there; offloads that do not fit the host are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fulltilt.plan.decisions import KEPT_AS, Decisions, RolePlan, RoleSettings, given_decisions
from fulltilt.plan.facts import Facts
from fulltilt.plan.micro_batches import budget_reasons, decide_budget, micro_batch_tokens
from fulltilt.plan.resident import exported_on_host, left_for_update, states_on_host
from fulltilt.plan.sequence import decide_sequence
from fulltilt.plan.sharding import decide_offloads
from fulltilt.records import DoesNotFit, UserError
from fulltilt.schema import Config
from fulltilt.words import in_bytes, many


def plan_roles(config: Config, facts: Facts, kept: Mapping[str, Any] | None = None) -> RolePlan:
    """Return the settings of every role. `auto` depends on the whole memory of the device and not on what happens to be free there, so that
    a resumed run decides the same. `kept`: the budgets of its checkpoint, which the rest must fit."""
    made = given_decisions(config, facts)
    check_layers(facts, made)
    trained = [role for role, model in facts.roles.items() if model.trained]
    budgets: dict[str, int] = {}
    on_cuda = facts.device == "cuda"  # on a CPU there is no second memory, and time is shorter than memory
    if on_cuda:
        made = decide_offloads(config, made, facts)
        of_kept = {role: kept[key] for role, key in KEPT_AS.items() if kept and key in kept}
        by_auto = config.actor.token_budget == "auto"
        budgets = {role: of_kept.get(role) or decide_budget(config, made, facts, role) for role in trained if by_auto}
    made = decide_sequence(config, made, facts, budgets)
    if on_cuda:
        for role in trained:
            made = decide_activations(config, made, facts, role, budgets)
        check_host(config, facts, made, budgets)
    settings = made.settings()
    words = (role_in_words(role, settings[role], made.reasons) for role in facts.roles)
    reasons = {**made.reasons, **budget_reasons(config, facts.device, budgets)}
    return RolePlan(settings, budgets, tuple(text for text in words if text), reasons)


def decide_activations(config: Config, made: Decisions, facts: Facts, role: str, budgets: Mapping[str, int]) -> Decisions:
    """Choose the least recompute that fits; if none fits, activations are offloaded to the host. Activations that the user offloads must
    fit the host."""
    keys, model = made.keys[role], facts.roles[role]
    tokens = micro_batch_tokens(config, facts, role, budgets, made.sequence(role))
    left, bonus = left_for_update(config, made, facts, role), bool(config.algorithm.entropy_coef)
    of_host = facts.host_bytes - sum(on_host(config, facts, made, budgets).values())

    def shortage(level: str, **other: Any) -> str | None:
        at = {**keys, "recompute": level, **other}
        if keys["offload_activations"] is True:
            found, where, there = tokens * model.kept_bytes(at), "hold", of_host
        else:
            found, where, there = model.update_bytes(tokens, at, entropy_gradient=bonus), "take", left
        words = f"{many(tokens, 'token')} would {where} about {in_bytes(found)} in an update, and {in_bytes(max(0, there))} are left"
        return words + (" on the host" if where == "hold" else "") if found > there else None

    level = keys["recompute"]
    if level == "auto":
        levels = ("none", "full") if config.train.compile is True else ("none", "selective", "full")  # the rule of knobs.TOGETHER
        level = next((level for level in levels if not shortage(level)), "full")
        made = made.decide(role, "recompute", level, None if level == "none" else shortage("none") or "")
    if why := shortage(level):
        made = made.decide(role, "offload_activations", True, why)
    # Decided last, with the memory that is left: kept logits save less time for their bytes than all the others cost.
    all_kept = level == "none" and made.keys[role]["offload_activations"] is not True
    if not (model.vocabulary_head and keys.get("fused_head") and all_kept):
        return made
    again = shortage("none", head_recompute=False) is not None
    return made.decide(role, "head_recompute", again, None if again else "they fit")


def on_host(config: Config, facts: Facts, made: Decisions, budgets: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes that are moved to the host, as far as that is decided, with those that pass through it into a checkpoint."""
    found = states_on_host(made, facts)
    for role, model in facts.roles.items():
        keys = made.keys[role]
        if model.trained and keys["recompute"] != "auto" and keys["offload_activations"] is True:
            tokens = micro_batch_tokens(config, facts, role, budgets, made.sequence(role))
            found[f"the {role}'s activations"] = tokens * model.kept_bytes(keys)
    activations_move = any(keys.get("offload_activations") is True for keys in made.keys.values())
    return found | (exported_on_host(facts) if found or activations_move else {})


def check_host(config: Config, facts: Facts, made: Decisions, budgets: Mapping[str, int]) -> None:
    moved = on_host(config, facts, made, budgets)
    if sum(moved.values()) <= facts.host_bytes:
        return
    what = " and ".join(f"{kind} ({in_bytes(count)})" for kind, count in moved.items())
    less = (
        'Lower actor.token_budget, recompute more (train.recompute = "full", of all layers) or leave offload_activations out, or use'
        if any(kind.endswith("activations") for kind in moved)
        else "Use"
    )
    raise DoesNotFit(
        f"offload: {what} do not fit into the host's memory, of which {in_bytes(facts.host_bytes)} are free. {less} "
        "a smaller model or LoRA (lora.rank), or a computer with more memory"
    )


def check_layers(facts: Facts, made: Decisions) -> None:
    for role, model in facts.roles.items():
        keys, count = made.keys[role], len(model.shape.layers)
        if model.trained and keys["recompute"] in ("selective", "full") and (keys["recompute_layers"] or 0) > count:
            raise UserError(
                f"train.recompute_layers is {keys['recompute_layers']}, and the model has {count} layers ({role}). Give at most {count}"
            )


def role_in_words(role: str, own: RoleSettings, reasons: Mapping[tuple[str, str], str]) -> str:
    """Describe the settings of a role that differ from the defaults, and why `auto` chose them; an empty string if none does."""
    of_layers = {"block": " of the first {}", "uniform": ", {} at a time"}[own.recompute_method]
    layers = of_layers.format(many(own.recompute_layers, "layer")) if own.recompute_layers else ""
    in_pieces = "log-probs" if role == "ref" else "log-probs and entropy" if own.fused_head else "entropy"
    texts = {
        "packing": "samples padded to the longest of their micro-batch",
        "sequence_parallel": f"{own.sequence_parallel} workers compute a micro-batch together, each a part of its tokens",
        "recompute": f"{own.recompute} recompute{layers}",
        "offload_activations": "activations on the host until the backward pass",
        "offload_params": "parameters on the host while another role works",
        "offload_optimizer": "optimizer on the host",
        "offload_grads": "gradients only while an optimizer step is made",
        "fused_head": "whole logits",
        "entropy_chunk": f"{in_pieces} of at most {many(own.entropy_chunk or 0, 'token')} at a time",
        "entropy_recompute": f"{'logits of all tokens' if own.fused_head else 'softmax'} kept for the entropy's gradient",
        "head_recompute": "logits kept until the backward pass",
    }
    differing = {key: text for key, text in texts.items() if getattr(own, key) != getattr(RoleSettings(), key)}
    why = {key: f" (auto: {reasons[role, key]})" for key in differing if (role, key) in reasons}
    return f"{role}: {'; '.join(text + why.get(key, '') for key, text in differing.items())}" if differing else ""
