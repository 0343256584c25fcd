"""The plan of a run of fulltilt on hardware that is not here: what plan.py decides, and what the models of memory and time say of it.

Enters: a configuration, a shape, a cluster and the mean response. Leaves: a `RunDescription`, the knobs with their reasons, or why nothing
fits. Guaranteed: no weights, no data, no GPU; `auto` is decided by plan.py, as in the run itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fulltilt.hardware import Cluster
from fulltilt.parallel.layout import Sharding
from fulltilt.plan import Facts, Plan, RoleFacts, choose_sharding, longest_response, make_plan, releases_memory, uses_graphs
from fulltilt.records import UserError
from fulltilt.schema import Config, shares_model
from fulltilt.shape import Recompute, Shape
from fulltilt.tune.constants import ENGINE_WORKSPACE, FULLTILT
from fulltilt.tune.description import BatchDescription, EngineDescription, RunDescription, TrainLayout
from fulltilt.tune.lengths import Lengths
from fulltilt.tune.memory_model import BF16, parameters

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
    algorithm, longest = config.algorithm, longest_response(config)
    prompt = config.data.max_prompt_tokens or 1024
    lengths = Lengths(prompt, longest, min(PROMPT_TOKENS, prompt / 2), min(longest, longest / 4 if response is None else response))
    reference = bool(algorithm.kl_coef or algorithm.reward_kl_coef) and not shares_model(config)
    sharding, made, refused = planned(config, shape, cluster, reference, prompt)
    layout = TrainLayout(
        tensor=config.train.tensor_parallel,
        sequence=made.roles["actor"].sequence_parallel if made else 1,
        expert=config.train.expert_parallel,
        shard=sharding.group if sharding.parameters else 1,
    )
    own = made.roles["actor"] if made else None
    budgets = made.budgets if made else None
    mini = max(1, algorithm.prompts_per_step // (algorithm.minibatches_per_step or 1))
    run = RunDescription(
        shape=shape,
        cluster=cluster,
        lengths=lengths,
        backend="fsdp" if sharding.parameters else "megatron",
        layout=layout,
        engine=EngineDescription(
            tensor=rollout_parts(config),
            memory_share=engine_share(shape, cluster, made, config, sharding.parameters),
            graphs=uses_graphs(config, "cuda"),
            max_seqs=budgets.max_seqs if budgets else 1024,
            sleeps=releases_memory(config),
            own_copy=sharding.parameters,
        ),
        batch=BatchDescription(
            algorithm.prompts_per_step, algorithm.samples_per_prompt, mini,
            token_budget=budgets.token_budget if budgets else 16384,
            forward_token_budget=budgets.forward_token_budget if budgets else 16384,
        ),
        recompute=Recompute(own.recompute, own.recompute_layers, own.recompute_method) if own else Recompute(),
        offload_params=bool(own and own.offload_params),
        offload_grads=bool(own and own.offload_grads),
        offload_optimizer=bool(own and own.offload_optimizer),
        reference=reference,
        offload_reference=bool(made and "ref" in made.roles and made.roles["ref"].offload_params),
        fused_head=own.fused_head if own else True,
        fused_rope=True,
        entropy=bool(algorithm.entropy_coef),
        system=FULLTILT,
        name="the run",
    )  # fmt: skip
    knobs = knobs_of(made, sharding, layout) if made else {}
    reasons = (*(made.words if made else ()), *([f"train.shard: {sharding.shard}, because {sharding.why}"] if sharding.why else []))
    return OwnPlan(run, knobs, reasons, refused)


def planned(config: Config, shape: Shape, cluster: Cluster, reference: bool, prompt: int) -> tuple[Sharding, Plan | None, str]:
    """What plan.py decides; or why it finds that nothing fits."""
    parts = config.train.tensor_parallel
    workers = max(1, cluster.gpus // parts)
    roles = {"actor": RoleFacts.of_shape(shape, config, "cuda", learns=True).part(parts)}
    if reference:
        roles["ref"] = RoleFacts.of_shape(shape, config, "cuda", learns=False, role="ref").part(parts)
    memory = cluster.gpu.memory
    facts = Facts(
        "cuda", memory, HOST_SHARE * memory, roles, prompt, 1, sharding=Sharding(workers=workers), parts=parts, rollout_parts=parts
    )
    sharding = choose_sharding(config, facts, max(1, min(cluster.per_machine, cluster.gpus) // parts))
    try:
        return sharding, make_plan(config, Facts(**{**vars(facts), "sharding": sharding})), ""
    except UserError as error:
        return sharding, None, str(error)


def rollout_parts(config: Config) -> int:
    """GPUs that share a model in rollouts."""
    given = config.rollout.tensor_parallel
    return config.train.tensor_parallel if given == "auto" else given


def engine_share(shape: Shape, cluster: Cluster, made: Plan | None, config: Config, copies: bool) -> float:
    """The share of a GPU that the engine takes: its KV cache and workspaces, and a copy of the parameters where it has one."""
    parts = rollout_parts(config)
    cache = made.budgets.kv_blocks * config.rollout.block_tokens * shape.kv_bytes_per_token(BF16) if made else 0
    copy = BF16 * parameters(shape).total if copies else 0
    return min(1.0, ((cache + copy) // parts + ENGINE_WORKSPACE) / cluster.gpu.memory)


def knobs_of(made: Plan, sharding: Sharding, layout: TrainLayout) -> dict[str, Any]:
    found: dict[str, Any] = {"train.shard": sharding.shard, "train.tensor_parallel": layout.tensor, "train.expert_parallel": layout.expert}
    found |= {f"budgets.{name}": value for name, value in vars(made.budgets).items()}
    return found | {f"{role}.{name}": value for role, own in made.roles.items() for name, value in vars(own).items()}
