"""Proofs of the knobs of batches: how micro-batches are cut, for every role.

Enters: the world they are proved in. Leaves: proofs. Passes are counted where they go through a role's model.
"""

from __future__ import annotations

from collections.abc import Iterator

from fulltilt.proofs import measure
from fulltilt.proofs.case import Base
from fulltilt.proofs.record import Proof, Sides, more, within
from fulltilt.proofs.world import World

# The role as records name it, the role that works, whether it learns from these passes, and the run.
PASSES: tuple[tuple[str, str, bool, Base], ...] = (
    ("actor", "actor", True, "ppo"),
    ("actor", "actor", False, "ppo"),
    ("sft", "actor", True, "sft"),
    ("ref", "ref", False, "ppo"),
    ("critic", "critic", True, "ppo"),
    ("critic", "critic", False, "ppo"),
    ("reward_model", "reward_model", False, "ppo"),
)


def proofs(world: World) -> Iterator[Proof]:
    for shown, role, learns, base in PASSES:
        micro, dynamic, budget = (f"{role}.{key}" for key in ("micro_batch", "dynamic_batch", budget_key(learns=learns)))
        by_samples = Sides({micro: 1}, {micro: 3}, {dynamic: False})
        yield Proof(micro, shown, measure.micro_batches(role, learns=learns), by_samples, base=base)
        yield Proof(micro, shown, measure.most_samples(role, learns=learns), by_samples, within(1, 3), base)

        by_tokens = Sides({dynamic: False, micro: 3}, {dynamic: True, budget: world.longest})
        yield Proof(dynamic, shown, measure.sizes(role, learns=learns), by_tokens, more, base)

        small, large = world.longest, 3 * world.longest
        caps = Sides({budget: large}, {budget: small})
        yield Proof(budget, shown, measure.micro_batches(role, learns=learns), caps, more, base)
        yield Proof(budget, shown, measure.most_tokens(role, learns=learns), caps, within(large, small), base)
        if learns:
            yield Proof(budget, shown, measure.activations(role), caps, base=base)


def budget_key(*, learns: bool) -> str:
    return "token_budget" if learns else "forward_token_budget"
