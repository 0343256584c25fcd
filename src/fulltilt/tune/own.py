"""The plan of a run of fulltilt on hardware that is not here: what plan.py decides, and what the models of memory and time say of it.

Enters: a configuration, a shape, a cluster and the mean response. Leaves: a `RunDescription`, the knobs with their reasons, or why nothing
fits. Guaranteed: no weights, no data, no GPU; `auto` is decided by plan.py, as in the run itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fulltilt.hardware import Cluster
from fulltilt.parallel.layout import Sharding
from fulltilt.plan import (
    Division,
    Facts,
    Plan,
    RoleFacts,
    choose_division,
    choose_sharding,
    divided,
    longest_response,
    make_plan,
    releases_memory,
    updates_per_step,
    uses_graphs,
)
from fulltilt.records import UserError
from fulltilt.schema import Config, shares_model
from fulltilt.settings import algorithm_settings, bounds_of, preset_of
from fulltilt.shape import Recompute, Shape
from fulltilt.tune.constants import ENGINE_WORKSPACE, FULLTILT
from fulltilt.tune.description import BatchDescription, EngineDescription, RunDescription, TrainLayout
from fulltilt.tune.lengths import Lengths
from fulltilt.tune.memory_model import BF16, parameters
from fulltilt.words import many

HOST_SHARE = 2  # times a GPU's memory, that its machine has as host memory for it (DGX H100: 2 TB for 640 GB)
PROMPT_TOKENS = 256  # mean of a prompt, at most half of the longest


@dataclass(frozen=True)
class OwnPlan:
    run: RunDescription
    knobs: Mapping[str, Any] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    refused: str = ""  # why plan.py finds that it does not fit


def own_plan(config: Config, shape: Shape, cluster: Cluster, response: float | None) -> OwnPlan:
    """`response`: mean tokens; None: a quarter of the longest."""
    algorithm, longest, settings = config.algorithm, longest_response(config), algorithm_settings(config)
    prompt = config.data.max_prompt_tokens or 1024
    lengths = Lengths(prompt, longest, min(PROMPT_TOKENS, prompt / 2), min(longest, longest / 4 if response is None else response))
    compared = bool(settings.get("kl_coef") or settings.get("reward_kl_coef"))  # with the reference role
    reference = compared and not shares_model(config)
    way, sharding, made, refused = planned(config, shape, cluster, reference, prompt)
    layout = TrainLayout(
        tensor=way.tensor,
        sequence=made.roles["actor"].sequence_parallel if made else 1,
        expert=way.experts,
        shard=sharding.group if sharding.parameters else 1,
    )
    own = made.roles["actor"] if made else None
    copies = sharding.parameters or way.rollout != way.tensor or sharding.experts > 1
    budgets = made.budgets if made else None
    mini = max(1, algorithm.prompts_per_step // (algorithm.minibatches_per_step or 1))
    run = RunDescription(
        shape=shape,
        cluster=cluster,
        lengths=lengths,
        backend="fsdp" if sharding.parameters else "megatron",
        layout=layout,
        engine=EngineDescription(
            tensor=way.rollout,
            memory_share=engine_share(shape, cluster, made, config, way.rollout, copies),
            graphs=uses_graphs(config, "cuda", copied=copies),
            max_seqs=budgets.max_seqs if budgets else 1024,
            sleeps=releases_memory(config),
            own_copy=copies,
        ),
        batch=BatchDescription(
            algorithm.prompts_per_step, algorithm.samples_per_prompt, mini,
            **micro_batches(config, made), epochs=algorithm.epochs,
            sampled=settings["prompts_per_round"] if settings.get("dynamic_sampling") else None,
        ),
        recompute=Recompute(own.recompute, own.recompute_layers, own.recompute_method) if own else Recompute(),
        offload_params=bool(own and own.offload_params),
        offload_grads=bool(own and own.offload_grads),
        offload_optimizer=bool(own and own.offload_optimizer),
        offload_activations=bool(own and own.offload_activations),
        old_logprobs=reads_old(config, settings),
        trained=RoleFacts.of_shape(shape, config, "cuda", learns=True).trained if config.lora.rank else None,
        reference=reference,
        shared_reference=compared and not reference,
        offload_reference=bool(made and "ref" in made.roles and made.roles["ref"].offload_params),
        fused_head=own.fused_head if own else True,
        fused_rope=True,
        entropy=bool(settings.get("entropy_coef")),
        system=FULLTILT,
        name="the run",
    )  # fmt: skip
    knobs = knobs_of(made, sharding, way) if made else {}
    reasons = (
        *((steps_in_words(config), *made.words[1:]) if made else ()),
        *([f"train.shard: {sharding.shard}, because {sharding.why}"] if sharding.why else []),
    )
    return OwnPlan(run, knobs, (*reasons, *notes(config, settings)), refused)


def steps_in_words(config: Config) -> str:
    """The first words of plan.py, which speak of the steps of an epoch too: here the data was not read."""
    algorithm, run = config.algorithm, config.run
    each = f"{many(run.steps, 'step')}, each of" if run.steps else f"{many(run.epochs or 1, 'epoch')}, each step of"
    prompts, samples = many(algorithm.prompts_per_step, "prompt"), many(algorithm.samples_per_prompt, "sample")
    count, updates = algorithm.prompts_per_step * algorithm.samples_per_prompt, many(updates_per_step(config), "optimizer step")
    return f"{each} {prompts} x {samples} = {many(count, 'sample')}, {updates}"


def micro_batches(config: Config, made: Plan | None) -> dict[str, int]:
    """How micro-batches are filled: up to a number of tokens, or of samples."""
    if not config.actor.dynamic_batch and config.actor.micro_batch:
        return {"micro_batch": config.actor.micro_batch, "forward_micro_batch": config.actor.micro_batch}
    if made is None:
        return {"token_budget": 16384, "forward_token_budget": 16384}
    return {"token_budget": made.budgets.token_budget, "forward_token_budget": made.budgets.forward_token_budget}


def reads_old(config: Config, settings: Mapping[str, Any]) -> bool:
    """Whether the trainer computes log-probs before the first update, as algo/build.py decides it: with one optimizer step they are
    those of the update itself."""
    preset, level = preset_of(config), str(settings.get("importance_level", "token"))
    moved = updates_per_step(config) > 1 and preset.reads_old and level != "bypass"
    corrected = bool(bounds_of(settings)) or level.endswith("normalized")
    return bool(settings.get("reward_kl_coef")) or moved or corrected or "old_logprobs" in preset.needs


def notes(config: Config, settings: Mapping[str, Any]) -> Iterator[str]:
    """What the seconds leave out."""
    preset = preset_of(config)
    if settings.get("dynamic_sampling"):
        yield (
            f"dynamic sampling: one round of {many(settings['prompts_per_round'], 'prompt')} is counted in each step. How many a step "
            f"needs depends on the rewards (at most {settings['max_rounds']}); each further one takes as long as the rollout again"
        )
    if preset.baseline:
        yield "not counted: the greedy sample of each prompt"
    if "sharp_logprobs" in preset.needs:
        yield "not counted: the second pass for log-probs at half the temperature"


def planned(config: Config, shape: Shape, cluster: Cluster, reference: bool, prompt: int) -> tuple[Division, Sharding, Plan | None, str]:
    """What plan.py decides; or why it finds that nothing fits."""
    roles = {"actor": RoleFacts.of_shape(shape, config, "cuda", learns=True)}
    if reference:
        roles["ref"] = RoleFacts.of_shape(shape, config, "cuda", learns=False, role="ref")
    memory, beside = cluster.gpu.memory, max(1, min(cluster.per_machine, cluster.gpus))
    whole = Facts("cuda", memory, HOST_SHARE * memory, roles, prompt, steps_per_epoch=1, sharding=Sharding(workers=cluster.gpus))
    way = choose_division(config, whole, within=math.gcd(beside, cluster.gpus), beside=beside)
    facts = replace(divided(config, whole, way), division=way.words)
    sharding = choose_sharding(config, facts, max(1, beside // way.tensor))
    try:
        return way, sharding, make_plan(config, replace(facts, sharding=sharding)), ""
    except UserError as error:
        return way, sharding, None, str(error)


def engine_share(shape: Shape, cluster: Cluster, made: Plan | None, config: Config, parts: int, copies: bool) -> float:
    """The share of a GPU that the engine takes: its KV cache and workspaces, and a copy of the parameters where it has one. `parts`: GPUs
    that share a model in rollouts."""
    cache = made.budgets.kv_blocks * config.rollout.block_tokens * shape.kv_bytes_per_token(BF16) if made else 0
    copy = BF16 * parameters(shape).total if copies else 0
    return min(1.0, ((cache + copy) // parts + ENGINE_WORKSPACE) / cluster.gpu.memory)


def knobs_of(made: Plan, sharding: Sharding, way: Division) -> dict[str, Any]:
    sizes = {"train.tensor_parallel": way.tensor, "train.expert_parallel": way.experts, "rollout.tensor_parallel": way.rollout}
    found: dict[str, Any] = {"train.shard": sharding.shard, **sizes}
    found |= {f"budgets.{name}": value for name, value in vars(made.budgets).items()}
    return found | {f"{role}.{name}": value for role, own in made.roles.items() for name, value in vars(own).items()}
