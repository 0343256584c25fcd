"""The user's settings for each role, and the record of the values that `auto` becomes.

Enters: the configuration. Leaves: `Decisions`, which the other files of the plan complete one key at a time, and `RolePlan`. Guaranteed: a
number that the user set is kept: `decide` changes nothing but `auto`, and records the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fulltilt.plan.facts import Facts
from fulltilt.schema import Config

# The keys of each role. A value in a role's own section takes precedence over [train].
OF_SCORING = ("packing", "offload_params", "sequence_parallel")
OF_LEARNING = (
    *OF_SCORING, "recompute", "recompute_layers", "recompute_method", "offload_activations", "offload_optimizer", "offload_grads",
)  # fmt: skip
ROLE_KEYS = {
    "actor": (*OF_LEARNING, "fused_head", "entropy_chunk", "entropy_recompute", "head_recompute"),
    "critic": OF_LEARNING,
    "ref": (*OF_SCORING, "fused_head", "entropy_chunk"),
    "reward_model": OF_SCORING,
}
OWN_BUDGETS = {  # the budgets of roles that may have workers of their own
    "critic": ("critic_token_budget", "critic_forward_token_budget"),
    "ref": ("ref_token_budget",),
    "reward_model": ("reward_model_token_budget",),
}
KEPT_AS = {"actor": "token_budget", "critic": "critic_token_budget"}  # roles that are trained, and their budgets' names in a checkpoint
OFFLOADS = ("offload_activations", "offload_params", "offload_optimizer", "offload_grads")


@dataclass(frozen=True)
class RoleSettings:
    """Settings of one role, with every `auto` and every key inherited from `[train]` resolved. Keys that a role does not have keep their
    default."""

    packing: bool = True
    sequence_parallel: int = 1  # workers that compute a micro-batch together
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_layers: int | None = None  # None: all layers, each by itself
    recompute_method: Literal["block", "uniform"] = "block"
    offload_activations: bool = False
    offload_params: bool = False
    offload_optimizer: bool = False
    offload_grads: bool = False
    fused_head: bool = True
    entropy_chunk: int | None = None  # None: sized by memory
    entropy_recompute: bool = True
    head_recompute: bool = True


@dataclass(frozen=True)
class RolePlan:
    """Settings of all roles, with every `auto` decided."""

    settings: Mapping[str, RoleSettings]
    budgets: Mapping[str, int] = field(default_factory=dict)  # tokens that `auto` gives to micro-batches of roles that are trained, on CUDA
    words: tuple[str, ...] = ()  # differences from the defaults, and why
    reasons: Mapping[tuple[str, str], str] = field(default_factory=dict)  # why `auto` became what it did, by role and key


@dataclass(frozen=True)
class Decisions:
    """The keys of each role, `auto` where nothing has been decided yet, and why `auto` became what it did."""

    keys: Mapping[str, Mapping[str, Any]]
    reasons: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def decide(self, role: str, key: str, value: Any, why: str | None = None) -> Decisions:
        """Return the decisions with that value, if the key was left to `auto`."""
        if self.keys[role].get(key) != "auto":
            return self
        decided = self.replace(role, key, value)
        return decided if why is None else replace(decided, reasons={**self.reasons, (role, key): why})

    def replace(self, role: str, key: str, value: Any) -> Decisions:
        """Return the decisions with that value in place of any other."""
        return replace(self, keys={**self.keys, role: {**self.keys[role], key: value}})

    def sequence(self, role: str) -> int:
        given = self.keys[role]["sequence_parallel"]
        return 1 if given == "auto" else int(given)

    def settings(self) -> dict[str, RoleSettings]:
        """Return the settings of each role. An `auto` that is still undecided is off, except for settings that save memory at the cost of
        time alone."""
        off: dict[str, Any] = {"recompute": "none", "head_recompute": True, "sequence_parallel": 1}
        return {
            role: RoleSettings(**{key: off.get(key, False) if value == "auto" else value for key, value in keys.items()})
            for role, keys in self.keys.items()
        }


def given_decisions(config: Config, facts: Facts) -> Decisions:
    """Return the user's decisions. With `auto`, parameters stay on the device if no other role works there."""
    made = Decisions({role: given_settings(config, role) for role in {**facts.roles, "ref": None, "actor": None}})
    for role in facts.roles if len(facts.roles) == 1 else ():
        made = made.decide(role, "offload_params", False)
    return made


def given_settings(config: Config, role: str) -> dict[str, Any]:
    """Return the user's values for the keys of a role, `auto` included."""
    found: dict[str, Any] = {}
    for key in ROLE_KEYS[role]:
        own = getattr(getattr(config, role), key, None)
        found[key] = getattr(config.train, key) if own is None else own
        if key in ("recompute_layers", "entropy_chunk") and found[key] == "auto":
            found[key] = None
    if found.get("recompute") == "auto":  # the number of layers belongs to an explicit recompute, perhaps of another role
        found |= {"recompute_layers": None, "recompute_method": "block"}
    return found


def own_sizes(config: Config, role: str) -> tuple[int | None, int | None]:
    """Return the sizes of tensor and expert parallelism in a role's own section; None: the role follows [train]."""
    section = getattr(config, role)
    return getattr(section, "tensor_parallel", None), getattr(section, "expert_parallel", None)


def size_key(config: Config, role: str, name: str) -> str:
    """Return the key that sets a role's size."""
    own = getattr(getattr(config, role), name, None) is not None
    return f"{role}.{name}" if own else f"train.{name}"


def sizes_given(config: Config) -> dict[str, int | str]:
    return {
        "train.tensor_parallel": config.train.tensor_parallel,
        "train.expert_parallel": config.train.expert_parallel,
        "rollout.tensor_parallel": config.rollout.tensor_parallel,
    }


def unless_auto(given: int | str, planned: int) -> int:
    return planned if isinstance(given, str) else given


def longest_response(config: Config) -> int:
    return max(config.rollout.max_new_tokens, config.eval.max_new_tokens or 0)


def longest_row(config: Config, facts: Facts) -> int:
    """Return the tokens of the longest possible sample."""
    return facts.longest + (longest_response(config) if facts.rollout else 0)


def releases_memory(config: Config) -> bool:
    return config.rollout.release_memory is not False


def count_steps(config: Config, steps_per_epoch: int) -> int:
    return config.run.steps or (config.run.epochs or 1) * steps_per_epoch


def updates_per_step(config: Config) -> int:
    """Return the number of optimizer steps made from one rollout."""
    return config.algorithm.minibatches_per_step * config.algorithm.epochs
