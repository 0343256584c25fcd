"""Keys that a run would refuse at its start, because they have no effect in it or do not go together: a translation reports them earlier.

Enters: a configuration. Leaves: our keys, each with an `Outcome`. Guaranteed: no device, file or model is needed; checks that depend on
them are left to the start of the run (plan/legal.py). A test compares both.
"""

from __future__ import annotations

from collections.abc import Iterator

from fulltilt.compat.outcome import Outcome
from fulltilt.schema import Config, samples_from_copy, shares_model, shares_parameters, uses_reward_model
from fulltilt.settings import algorithm_settings, preset_of

OFFLOADS = ("offload_activations", "offload_params", "offload_optimizer", "offload_grads")
SECTIONS = {"train": "actor", "critic": "critic", "ref": "ref", "reward_model": "reward_model"}
OF_SHARDS = "gradients of shards exist only from a pass to the optimizer step: there are none to free between updates"


def nothing(why: str) -> Outcome:
    return Outcome("means nothing", why)


def without_effect(config: Config) -> Iterator[tuple[str, Outcome]]:
    settings = algorithm_settings(config)
    yield from offloads(config, compares=bool(settings.get("kl_coef") or settings.get("reward_kl_coef")))
    yield from shards(config)
    if not config.train.entropy_recompute and not settings.get("entropy_coef"):
        yield "train.entropy_recompute", nothing("the loss has no entropy bonus: nothing is kept for its gradient")
    tensor = 1 if config.rollout.tensor_parallel == "auto" else config.rollout.tensor_parallel
    if config.rollout.expert_parallel not in ("auto", 1, tensor) and config.rollout.tensor_parallel != "auto":
        told = f"the engine's experts are divided among the {tensor} GPUs of rollout.tensor_parallel, or among none"
        yield "rollout.expert_parallel", Outcome("refused", f"{told}. Use 1 or {tensor}, or --retune", performance=True)


def offloads(config: Config, *, compares: bool) -> Iterator[tuple[str, Outcome]]:
    """Yield offloads to the host that have no device or no phase."""
    sampled, apart = preset_of(config).rollout, config.cluster.roles
    shared = compares and shares_model(config)
    used = {"ref": compares and not shared, "critic": bool(preset_of(config).critic), "reward_model": sampled and uses_reward_model(config)}
    beside = any(used[role] and role not in apart for role in used) or (samples_from_copy(config) and sampled)
    for section, role in SECTIONS.items():
        alone = role in apart if role != "actor" else not beside
        for key in OFFLOADS:
            if getattr(getattr(config, section), key, None) is not True:
                continue
            if config.run.device == "cpu":
                yield f"{section}.{key}", nothing("the run is on the CPU: its memory is the host's already")
            elif key == "offload_params" and role == "ref" and shared:
                yield f"{section}.{key}", nothing("the reference is the actor without its adapters: it has no parameters that could leave")
            elif key == "offload_params" and alone:
                others = "no other role has a model of its own" if role == "actor" else "it has GPUs of its own"
                yield f"{section}.{key}", nothing(f"{others}: there is no phase in which the {role}'s parameters could be away")


def shards(config: Config) -> Iterator[tuple[str, Outcome]]:
    """Yield settings that do not work with sharded parameters, or with divided layers."""
    train, several = (
        config.train,
        [name for name in ("tensor_parallel", "expert_parallel") if getattr(config.train, name) not in ("auto", 1)],
    )
    if shares_parameters(config) and train.offload_grads is True:
        yield "train.offload_grads", nothing(OF_SHARDS)
    dividing = [f"train.shard {train.shard}"] if shares_parameters(config) else [f"train.{name}" for name in several]
    if train.compile is True and dividing:
        told = f"compiled layers have not been tried with {dividing[0]}, and verl compiles only the entropy"
        yield "train.compile", Outcome("refused", f"{told}. Remove it, or use --retune", performance=True)
    if shares_parameters(config) and train.recompute_method == "uniform" and train.recompute_layers not in ("auto", 1):
        told = f"{train.recompute_layers} layers would be recomputed together, and one at a time has whole parameters"
        yield "train.recompute_layers", Outcome("refused", f"{told}. Use recompute_num_layers=1, or --retune", performance=True)
