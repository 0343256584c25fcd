"""The model of memory: bytes by kind on the fullest GPU, in each phase of a step.

Enters: a `RunDescription`. Leaves: `PhaseMemory` for each phase, and whether all fit. Guaranteed: arithmetic alone. Parameters are those of
the shape, divided as the layout says; what layers keep is `Shape.kept_bytes`; what the head takes is footprint.py's where it is fused. A
micro-batch by samples counts as the largest one to expect in a step, one by tokens as its budget.

Phases: `rollout` (the engine is awake beside what the trainer did not offload), `sync` (new parameters enter the engine, whose cache is not
there yet), `logprob` (passes without gradient) and `update`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from fulltilt.footprint import Entropy, HeadOptions, head_bytes
from fulltilt.plan import ACTIVATION_MARGIN, STREAMED
from fulltilt.shape import Shape
from fulltilt.tune import constants as c
from fulltilt.tune.description import RunDescription
from fulltilt.words import in_bytes

Phase = Literal["rollout", "sync", "logprob", "update"]
BF16, FP32 = 2, 4
STATES = 3  # fp32 master and two moments


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes of one phase, by kind."""

    kinds: Mapping[str, int]
    limit: int  # bytes of the GPU

    @property
    def total(self) -> int:
        return sum(self.kinds.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.limit

    @property
    def largest(self) -> str:
        return max(self.kinds, key=lambda kind: self.kinds[kind])


@dataclass(frozen=True)
class MemoryModel:
    phases: Mapping[Phase, PhaseMemory]
    kv_bytes: int  # that the engine's cache gets; below one sample's need: it cannot start
    sample_kv_bytes: int  # of the longest row

    @property
    def engine_starts(self) -> bool:
        return self.kv_bytes >= self.sample_kv_bytes

    @property
    def fits(self) -> bool:
        return self.engine_starts and all(phase.fits for phase in self.phases.values())

    @property
    def overshoot(self) -> float:
        """How far it is from fitting: memory wanted beyond the limits, as a share of them, over all phases."""
        missing = max(0, self.sample_kv_bytes - self.kv_bytes) + sum(max(0, phase.total - phase.limit) for phase in self.phases.values())
        return missing / max(1, next(iter(self.phases.values())).limit)

    def as_json(self) -> dict[str, dict[str, int]]:
        return {phase: {**found.kinds, "total": found.total, "limit": found.limit} for phase, found in self.phases.items()}

    @property
    def reasons(self) -> list[str]:
        """Why it does not fit, one line for each phase that does not."""
        found = []
        if not self.engine_starts:
            found.append(
                f"rollout: the engine's share leaves {in_bytes(max(0, self.kv_bytes))} for its KV cache, and the longest row needs "
                f"{in_bytes(self.sample_kv_bytes)}"
            )
        for name, phase in self.phases.items():
            if not phase.fits:
                found.append(f"{name}: {in_bytes(phase.total)} of {in_bytes(phase.limit)}, most of it {phase.largest}")
        return found


def memory_of(run: RunDescription) -> MemoryModel:
    held, ref = held_bytes(run), reference_bytes(run)
    stays = {
        kind: 0 if offloaded else held[kind]
        for kind, offloaded in zip(held, (run.offload_params, run.offload_grads, run.offload_optimizer), strict=True)
    }
    if run.system.streams_optimizer and run.offload_optimizer:
        held["optimizer"] = min(held["optimizer"], STREAMED)
    base = {"context": c.CONTEXT + c.COMMUNICATOR * groups(run)}
    resident_ref = 0 if run.offload_reference else ref
    share, weights = engine_bytes(run), engine_weights(run)
    asleep = {"engine": c.ASLEEP if run.engine.sleeps else share}
    own = weights if run.engine.own_copy else 0
    found: dict[Phase, dict[str, int]] = {
        "rollout": base | stays | {"reference": resident_ref, "engine": share},
        "sync": base | stays | {"parameters": held["parameters"], "reference": resident_ref, "engine": own + c.ASLEEP},
        "logprob": base | stays | asleep | {"parameters": held["parameters"], "reference": ref} | forward_bytes(run),
        "update": base | held | asleep | {"reference": resident_ref} | update_bytes(run),
    }
    if not (run.old_logprobs or run.reference or run.shared_reference):
        del found["logprob"]
    trainer = ("parameters", "gradients", "optimizer", "activations", "head", "reference")
    for kinds in found.values():
        kinds["workspace"] = c.WORKSPACE
        kinds["fragmentation"] = int(c.FRAGMENTED * sum(kinds.get(kind, 0) for kind in trainer))
    limit = run.gpu.memory
    return MemoryModel(
        {phase: PhaseMemory(kinds, limit) for phase, kinds in found.items()},
        kv_bytes=share - (weights if run.engine.own_copy else 0) - c.ENGINE_WORKSPACE,
        sample_kv_bytes=run.lengths.longest_row * run.shape.kv_bytes_per_token(BF16) // kv_parts(run),
    )


# ---- parameters, gradients, optimizer ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers on the fullest GPU, before data-parallel GPUs share anything out."""

    shared: int  # all but experts
    experts: int

    @property
    def total(self) -> int:
        return self.shared + self.experts


@cache
def parameters(shape: Shape) -> ParameterCounts:
    """Of a whole model."""
    total = sum(shape.parameters_by_kind().values())
    experts = sum(map(shape.expert_parameters, shape.layers))
    return ParameterCounts(total - experts, experts)


def own_parameters(run: RunDescription) -> ParameterCounts:
    """Of the fullest stage: its layers, and the embedding or the head, cut by tensor and expert parallelism."""
    layout, shape = run.layout, run.shape
    if run.backend == "fsdp":
        return parameters(shape)
    stage = parameters(run.fullest_stage)
    tables = shape.vocabulary * shape.width * (1 if shape.tied or layout.pipeline > 1 else 2)
    outside = shape.vocabulary * shape.width * (1 if shape.tied else 2)
    expert_parts = layout.expert * (layout.expert_tensor if layout.expert_tensor > 1 or layout.expert > 1 else layout.tensor)
    return ParameterCounts((stage.shared - outside + tables) // layout.tensor, stage.experts // expert_parts)


def held_bytes(run: RunDescription) -> dict[str, int]:
    """Parameters, gradients and optimizer states of the actor in an update."""
    own, layout = own_parameters(run), run.layout
    if run.trained is not None:  # frozen parameters have no master
        learned = run.trained // layout.tensor
        states = STATES * FP32 * learned // run.shard
        if run.backend == "fsdp":
            shards = BF16 * (own.total + learned) // run.shard
            return {"parameters": shards + gathered_bytes(run), "gradients": FP32 * learned // run.shard, "optimizer": states}
        return {"parameters": BF16 * (own.total + learned), "gradients": FP32 * learned, "optimizer": states}
    if run.backend == "fsdp":  # fp32 shards are their own masters
        each = FP32 * own.total // run.shard
        return {"parameters": each + gathered_bytes(run), "gradients": each, "optimizer": 2 * each}
    # Experts are shared out among the GPUs that have the same ones.
    expert_copies = max(1, run.cluster.gpus // (layout.pipeline * layout.expert * max(1, layout.expert_tensor)))
    if layout.expert == 1 and layout.expert_tensor == 1:
        expert_copies = run.shard
    states = STATES * FP32 * (own.shared // run.shard + own.experts // expert_copies)
    return {"parameters": BF16 * own.total, "gradients": FP32 * own.total, "optimizer": states}


def gathered_bytes(run: RunDescription) -> int:
    """What FSDP has whole at once: two layers in bf16, and the tables."""
    layer = own_parameters(run).total // len(run.shape.layers)
    return BF16 * (2 * layer + 2 * run.shape.vocabulary * run.shape.width)


def learned_parameters(run: RunDescription) -> int:
    """Numbers of the fullest GPU that learn, before data-parallel GPUs share anything out."""
    return own_parameters(run).total if run.trained is None else run.trained // run.layout.tensor


def reference_bytes(run: RunDescription) -> int:
    if not run.reference:
        return 0
    own = own_parameters(run)
    return BF16 * own.total // run.shard if run.backend == "fsdp" else BF16 * own.total


def groups(run: RunDescription) -> int:
    """Kinds of groups that have a communicator."""
    layout = run.layout
    sizes = (layout.tensor, layout.pipeline, layout.context, layout.sequence, layout.expert, run.data, run.engine.tensor)
    return sum(size > 1 for size in sizes)


# ---- micro-batches -----------------------------------------------------------------------------------------------------------------------


def update_tokens(run: RunDescription) -> float:
    """Tokens on each GPU of the largest micro-batch of the update."""
    batch, lengths, together = run.batch, run.lengths, run.layout.context * run.layout.sequence
    if batch.token_budget is not None:
        return most_tokens(run, batch.token_budget, batch.updates)
    return lengths.micro_batch_tokens(batch.micro_batch, max(1, batch.rows // batch.micro_batch)) / together


def forward_tokens(run: RunDescription) -> float:
    """The same, of passes without gradient."""
    batch, lengths, together = run.batch, run.lengths, run.layout.context * run.layout.sequence
    if batch.forward_token_budget is not None:
        return most_tokens(run, batch.forward_token_budget, 1)
    return lengths.micro_batch_tokens(batch.forward_micro_batch, max(1, batch.rows // batch.forward_micro_batch)) / together


def most_tokens(run: RunDescription, budget: int, updates: int) -> float:
    """Tokens on each GPU of a micro-batch with this budget: all that there are, or the budget, or a sample that is longer alone."""
    together = run.layout.context * run.layout.sequence
    there = run.tokens / (run.data * updates) * run.lengths.imbalance(run.data, run.batch.rows // (run.data * updates))
    return min((there + run.lengths.mean) / together, max(float(budget), (run.lengths.prompt + run.lengths.most_response) / together))


def in_flight(run: RunDescription) -> float:
    """Micro-batches whose activations the first stage holds at once; with virtual stages a part of one more."""
    stages, virtual = run.layout.pipeline, run.layout.virtual
    return stages if virtual == 1 else stages + (stages - 1) / virtual


def update_bytes(run: RunDescription) -> dict[str, int]:
    """Activations and the head, on the pipeline's first stage, which holds most micro-batches, or on its last, which has the head. The head
    is done before the layers' backward pass begins."""
    tokens, stage = update_tokens(run), run.fullest_stage
    kept = ACTIVATION_MARGIN * tokens * stage.kept_bytes(BF16, fused=run.fused_layers, recompute=run.recompute) / run.layout.tensor
    if run.offload_activations:  # but for what is on its way there, about a layer
        kept /= len(stage.layers)
    again = 1 if run.recompute.units(len(stage.layers)) else 0
    working = ACTIVATION_MARGIN * tokens * largest_layer(run) * (1 + again)
    head = head_of(run, tokens, learns=True)
    first, last = in_flight(run) * kept + working, kept + max(head, working)
    if last < first or head < working:
        return {"activations": int(max(first, last)), "head": 0}
    return {"activations": int(kept), "head": head}


def forward_bytes(run: RunDescription) -> dict[str, int]:
    tokens = forward_tokens(run)
    layer, head = int(tokens * largest_layer(run)), head_of(run, tokens, learns=False)
    return {"activations": layer, "head": 0} if head < layer else {"activations": 0, "head": head}


def largest_layer(run: RunDescription) -> float:
    """Bytes of a token in the layer that keeps most."""
    return max(run.shape.layer_bytes(layer, BF16, fused=run.fused_layers) for layer in set(run.shape.layers)) / run.layout.tensor


def head_of(run: RunDescription, tokens: float, *, learns: bool) -> int:
    vocabulary = run.shape.vocabulary // run.layout.tensor
    if run.fused_head:
        entropy: Entropy = "gradient" if learns and run.entropy else "value"
        return head_bytes(int(tokens), vocabulary, run.shape.width, HeadOptions(), entropy=entropy).peak
    each = c.LOGIT_BYTES + (c.LOGIT_GRADIENT_BYTES if learns else 0)
    return int(tokens * vocabulary * each)


# ---- the engine --------------------------------------------------------------------------------------------------------------------------


def engine_weights(run: RunDescription) -> int:
    return BF16 * parameters(run.shape).total // run.engine.tensor


def engine_bytes(run: RunDescription) -> int:
    """What an engine takes of a GPU while it is awake: a share of the whole memory, its weights included."""
    return int(run.engine.memory_share * run.gpu.memory)


def kv_parts(run: RunDescription) -> int:
    """Among how many GPUs keys and values of a sample are divided: heads beyond their number are copies."""
    return min(run.engine.tensor, max(layer.key_heads for layer in run.shape.layers))


def with_share_of_memory(run: RunDescription, share: float) -> RunDescription:
    """The same run on GPUs with less memory."""
    gpu = replace(run.gpu, memory=int(run.gpu.memory * share))
    return replace(run, cluster=replace(run.cluster, gpu=gpu))
