"""The model of memory: bytes by kind on the fullest GPU, in each phase of a step.

Enters: a `RunDescription`. Leaves: `PhaseMemory` for each phase, and whether all fit. Guaranteed: arithmetic alone. Parameters are those of
the shape, divided as the layout says; `Shape.kept_bytes` gives the activations that layers keep, and footprint.py the memory of a fused
head. A micro-batch sized by samples counts as the largest expected in a step, one sized by tokens as its budget.

Phases: `rollout` (the engine is awake beside what the trainer did not offload), `sync` (new parameters enter the engine, whose cache is not
allocated yet), `old-logprob` and `ref-logprob` (passes without gradient, if the algorithm has them) and `update-actor`; with other roles
also `reward`, `ref-logprob`, `values` and `update-critic`, beside the actor or on the fullest of the role's own GPUs. The model of time has
the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from fulltilt.footprint import Entropy, HeadOptions, head_bytes
from fulltilt.plan.cache import most_in_a_pass
from fulltilt.plan.cache import prefill_bytes as pass_bytes
from fulltilt.plan.facts import ACTIVATION_MARGIN
from fulltilt.plan.resident import STREAMED
from fulltilt.shape import DecoderLayer, Shape
from fulltilt.tune import constants as c
from fulltilt.tune.description import Role, RoleDescription, RunDescription
from fulltilt.tune.packing import packing
from fulltilt.words import in_bytes

Phase = Literal["rollout", "sync", "reward", "old-logprob", "ref-logprob", "values", "update-critic", "update-actor"]
PASSES_OF: Mapping[Role, Phase] = {"reward_model": "reward", "ref": "ref-logprob", "critic": "values"}  # phases of passes without gradient
FP32 = 4
MOMENTS = 2  # numbers that Adam keeps for each parameter


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes of one phase, by kind."""

    kinds: Mapping[str, int]
    limit: int  # bytes of the GPU's memory

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
    kv_bytes: int  # bytes of the engine's cache; with fewer than one sample needs, the engine cannot start
    sample_kv_bytes: int  # bytes that the longest row needs

    @property
    def engine_starts(self) -> bool:
        return self.kv_bytes >= self.sample_kv_bytes

    @property
    def fits(self) -> bool:
        return self.engine_starts and all(phase.fits for phase in self.phases.values())

    @property
    def overshoot(self) -> float:
        """Memory that is missing in all phases together, as a share of the GPU's."""
        missing = max(0, self.sample_kv_bytes - self.kv_bytes) + sum(max(0, phase.total - phase.limit) for phase in self.phases.values())
        return missing / max(1, next(iter(self.phases.values())).limit)

    def as_json(self) -> dict[str, dict[str, int]]:
        return {phase: {**found.kinds, "total": found.total, "limit": found.limit} for phase, found in self.phases.items()}

    @property
    def reasons(self) -> list[str]:
        """Why the run does not fit: its engine, and one line for each phase."""
        if self.engine_starts:
            return self.full_phases
        left, needed = in_bytes(max(0, self.kv_bytes)), in_bytes(self.sample_kv_bytes)
        return [f"rollout: the engine's share leaves {left} for its KV cache, and the longest row needs {needed}", *self.full_phases]

    @property
    def full_phases(self) -> list[str]:
        return [
            f"{name}: {in_bytes(phase.total)} of {in_bytes(phase.limit)}, most of it {phase.largest}"
            for name, phase in self.phases.items()
            if not phase.fits
        ]


def memory_of(run: RunDescription) -> MemoryModel:
    base = {"context": context_bytes(run)}
    resident = {"reference": 0 if run.offload_reference else reference_bytes(run)}
    beside = [own for own in run.others if not own.apart]
    for own in beside:
        resident |= named(own, staying_bytes(own.run))
    stays, held = staying_bytes(run), working_bytes(run)
    share, weights = (engine_bytes(run), engine_weights(run)) if run.rollout else (0, 0)
    idle_engine = share - c.ENGINE_WORKSPACE if run.system.packs else share  # between passes over prompts
    own_copy, keeps = weights if run.engine.own_copy else 0, 0 if run.system.packs else c.ASLEEP
    asleep = {"engine": 0}
    if run.rollout:
        base |= {"graphs": c.GRAPHS if run.system.packs and run.engine.graphs else 0}
        asleep = {"engine": keeps + (own_copy if run.engine.keeps_copy else 0) if run.engine.sleeps else idle_engine}
    idle = base | stays | asleep | resident
    found: dict[Phase, dict[str, int]] = {}
    if run.rollout:
        awake = idle_engine + prefill_bytes(run) if run.system.packs else share
        found["rollout"] = base | stays | resident | {"engine": awake}
        entered = asleep["engine"] if run.system.packs and not run.engine.sleeps else own_copy + keeps
        found["sync"] = base | stays | resident | {"parameters": held["parameters"], "engine": entered}
    passing_actor = {"parameters": held["parameters"]} | forward_bytes(run)
    if run.old_logprobs:
        found["old-logprob"] = idle | passing_actor
    if run.reference or run.shared_reference:
        found["ref-logprob"] = idle | passing_actor | {"reference": resident["reference"] or reference_bytes(run)}
    for own in run.others:
        around = {"context": context_bytes(own.run)} if own.apart else idle
        held_by_own = working_bytes(own.run)
        passing = {"parameters": held_by_own["parameters"]}
        found[PASSES_OF[own.role]] = around | named(own, staying_bytes(own.run) | passing) | forward_bytes(own.run)
        if own.role == "critic":
            found["update-critic"] = around | named(own, held_by_own) | update_bytes(own.run)
    found["update-actor"] = idle | held | update_bytes(run)
    for kinds in found.values():
        kinds["workspace"] = c.OWN_WORKSPACE if run.system.packs else c.WORKSPACE
        trainer = (count for kind, count in kinds.items() if kind not in ("context", "engine", "graphs", "workspace"))
        kinds["fragmentation"] = int(c.FRAGMENTED * sum(trainer))
    return MemoryModel(
        {phase: PhaseMemory(kinds, run.gpu.memory) for phase, kinds in found.items()},
        kv_bytes=share - own_copy - c.ENGINE_WORKSPACE if run.rollout else 0,
        sample_kv_bytes=run.lengths.longest_sampled * run.shape.kv_bytes_per_token(run.itemsize) // kv_parts(run) if run.rollout else 0,
    )


def staying_bytes(run: RunDescription) -> dict[str, int]:
    """Return the bytes that a role keeps on the GPU while others work. Gathered parameters are freed, and so are gradients of shards."""
    held = held_bytes(run)
    if run.backend == "fsdp":
        held |= {"parameters": held["parameters"] - gathered_bytes(run), "gradients": 0}
    away = zip(held, (run.offload_params, run.offload_grads, run.offload_optimizer), strict=True)
    left = {kind: 0 for kind, offloaded in away if offloaded}
    if run.system.streams_optimizer and run.offload_optimizer:  # buckets of the optimizer's states pass through this memory
        left["optimizer"] = min(held["optimizer"], STREAMED)
    return held | left


def working_bytes(run: RunDescription) -> dict[str, int]:
    """Return the bytes that a role holds in its update."""
    held = held_bytes(run)
    if run.system.streams_optimizer and run.offload_optimizer:
        held["optimizer"] = min(held["optimizer"], STREAMED)
    return held


def named(own: RoleDescription, held: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of another role under kinds of its own; a role that is not trained has parameters alone."""
    if not own.run.trained and own.run.trained is not None:
        return {own.called: held["parameters"]}
    return {f"{own.called} {kind}": count for kind, count in held.items()}


# ---- parameters, gradients, optimizer ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers on the fullest GPU, before they are sharded among data-parallel GPUs."""

    shared: int  # everything but experts
    experts: int

    @property
    def total(self) -> int:
        return self.shared + self.experts


@cache
def parameters(shape: Shape) -> ParameterCounts:
    """Count the parameters of a whole model."""
    total = sum(shape.parameters_by_kind().values())
    experts = sum(map(shape.expert_parameters, shape.layers))
    return ParameterCounts(total - experts, experts)


def model_parameters(run: RunDescription) -> ParameterCounts:
    """Count the parameters of a whole model with the head that the role has."""
    whole = parameters(run.shape)
    return whole if run.vocabulary_head else replace(whole, shared=whole.shared + headless(run.shape))


def headless(shape: Shape) -> int:
    """Return how many more parameters (fewer, if negative) a model has that gives one number a token instead of logits."""
    return shape.width + 1 - (0 if shape.tied else shape.vocabulary * shape.width)


def own_parameters(run: RunDescription) -> ParameterCounts:
    """Count the parameters of the fullest stage: its layers, and the embedding or the head, divided by tensor and expert parallelism."""
    layout, shape = run.layout, run.shape
    if run.backend == "fsdp":
        whole = model_parameters(run)
        return ParameterCounts(whole.shared // layout.tensor, whole.experts // layout.tensor)
    stage = parameters(run.fullest_stage)
    tables = shape.vocabulary * shape.width * (1 if shape.tied or layout.pipeline > 1 or not run.vocabulary_head else 2)
    outside = shape.vocabulary * shape.width * (1 if shape.tied else 2)
    expert_parts = layout.expert_places * layout.expert_parts
    scoring = 0 if run.vocabulary_head else shape.width + 1
    return ParameterCounts((stage.shared - outside + tables) // layout.tensor + scoring, stage.experts // expert_parts)


def held_bytes(run: RunDescription) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer states of a role in an update."""
    own, layout, itemsize = own_parameters(run), run.layout, run.itemsize
    wide, low = max(FP32, itemsize), itemsize < FP32
    masters = MOMENTS + low  # numbers that the optimizer keeps for each parameter; float32 parameters are their own masters
    if run.trained is not None:  # frozen parameters have no master
        learned = run.trained // layout.tensor
        states = masters * wide * learned // run.shard
        if run.backend == "fsdp":
            shards = itemsize * (own.total + learned) // run.shard
            return {"parameters": shards + gathered_bytes(run), "gradients": wide * learned // run.shard, "optimizer": states}
        return {"parameters": itemsize * (own.total + learned), "gradients": wide * learned, "optimizer": states}
    if run.backend == "fsdp":  # shards in fp32 or wider are their own masters
        each = wide * own.total // run.shard
        return {"parameters": each + gathered_bytes(run), "gradients": each, "optimizer": MOMENTS * each}
    states = masters * wide * (own.shared // run.shard + own.experts // expert_copies(run))
    sums = 1 if low or run.cluster.gpus == 1 else 2  # several workers sum gradients in fp32 or wider in memory of their own
    return {"parameters": itemsize * own.total, "gradients": sums * wide * own.total, "optimizer": states}


def expert_copies(run: RunDescription) -> int:
    """Return the number of GPUs that have the same experts and share their optimizer states."""
    layout = run.layout
    if not layout.divides_experts:
        return run.shard
    return max(1, run.cluster.gpus // (layout.pipeline * layout.expert * layout.expert_tensor))


def gathered_bytes(run: RunDescription) -> int:
    """Return the bytes that FSDP has gathered at once: two layers in bf16, and the embedding and the head."""
    layer = gathered_parameters(run) // len(run.shape.layers)
    tables = (2 if run.vocabulary_head else 1) * run.shape.vocabulary * run.shape.width // run.layout.tensor
    return run.itemsize * (2 * layer + tables)


def gathered_parameters(run: RunDescription) -> int:
    """Return how many numbers of a model a GPU gathers with FSDP, layer by layer: if experts are divided, only the GPU's own."""
    own = own_parameters(run)
    return own.shared + own.experts // run.layout.expert


def learned_parameters(run: RunDescription) -> int:
    """Return how many numbers are trained on the fullest GPU, before they are sharded among data-parallel GPUs."""
    return own_parameters(run).total if run.trained is None else run.trained // run.layout.tensor


def reference_bytes(run: RunDescription) -> int:
    if not run.reference:
        return 0
    own = own_parameters(run)
    return run.itemsize * own.total // run.shard if run.backend == "fsdp" else run.itemsize * own.total


def context_bytes(run: RunDescription) -> int:
    """Return the bytes of a GPU that the driver and NCCL take; 0 on a CPU."""
    return 0 if run.gpu.is_cpu else c.CONTEXT + c.COMMUNICATOR * groups(run)


def groups(run: RunDescription) -> int:
    """Return how many kinds of groups have a communicator."""
    layout = run.layout
    sampling = run.engine.tensor if run.rollout else 1
    sizes = (layout.tensor, layout.pipeline, layout.context, layout.sequence, layout.expert, run.data, sampling)
    return sum(size > 1 for size in sizes)


# ---- micro-batches -----------------------------------------------------------------------------------------------------------------------


def update_tokens(run: RunDescription) -> float:
    """Return the tokens on each GPU of the largest micro-batch of the update."""
    batch, lengths, together = run.batch, run.lengths, run.layout.context * run.layout.sequence
    if batch.token_budget is not None and run.system.packs:
        return packing(run, batch.token_budget, batch.updates).largest
    if batch.token_budget is not None:
        return most_tokens(run, batch.token_budget, batch.updates)
    return lengths.micro_batch_tokens(batch.micro_batch, max(1, batch.rows // batch.micro_batch), batch.samples) / together


def forward_tokens(run: RunDescription) -> float:
    """Return the tokens on each GPU of the largest micro-batch in passes without gradient."""
    batch, lengths, together = run.batch, run.lengths, run.layout.context * run.layout.sequence
    if batch.forward_token_budget is not None and run.system.packs:
        return packing(run, batch.forward_token_budget, 1).largest
    if batch.forward_token_budget is not None:
        return most_tokens(run, batch.forward_token_budget, 1)
    count = max(1, batch.rows // batch.forward_micro_batch)
    return lengths.micro_batch_tokens(batch.forward_micro_batch, count, batch.samples) / together


def most_tokens(run: RunDescription, budget: int, updates: int) -> float:
    """Return the most tokens on each GPU of a micro-batch with this budget: all tokens of the mini-batch if they are fewer, else the
    budget, or one longer sample alone."""
    together = run.layout.context * run.layout.sequence
    there = run.tokens / (run.data * updates) * run.lengths.imbalance(run.data, run.batch.rows // (run.data * updates))
    return min((there + run.lengths.mean) / together, max(float(budget), (run.lengths.prompt + run.lengths.most_response) / together))


def in_flight(run: RunDescription) -> float:
    """Return the number of micro-batches whose activations the first stage holds at once; with virtual stages a part of one more."""
    stages, virtual = run.layout.pipeline, run.layout.virtual
    return stages if virtual == 1 else stages + (stages - 1) / virtual


def update_bytes(run: RunDescription) -> dict[str, int]:
    """Return the bytes of activations and of the head, on the pipeline's first stage, which holds most micro-batches, or on its last, which
    has the head. The head is done before the layers' backward pass begins."""
    tokens, stage = update_tokens(run), run.fullest_stage
    margin = 1.0 if run.system.packs else ACTIVATION_MARGIN  # fulltilt's micro-batches are known by their tokens
    kept = margin * tokens * stage.kept_bytes(run.itemsize, fused=run.fused_layers, recompute=run.recompute) / run.layout.tensor
    if run.offload_activations:  # all but about one layer's activations, which are on their way to the host
        kept /= len(stage.layers)
    again = 1 if run.recompute.units(len(stage.layers)) else 0
    working = margin * tokens * (gradient_of_layer(run, again) if run.system.packs else largest_layer(run) * (1 + again))
    head = head_of(run, read_tokens(run, learns=True), learns=True)
    first, last = in_flight(run) * kept + working, kept + max(head, working)
    if last < first or head < working:
        return {"activations": int(max(first, last)), "head": 0}
    return {"activations": int(kept), "head": head}


def forward_bytes(run: RunDescription) -> dict[str, int]:
    tokens = forward_tokens(run)
    layer, head = int(tokens * largest_layer(run)), head_of(run, read_tokens(run, learns=False), learns=False)
    return {"activations": layer, "head": 0} if head < layer else {"activations": 0, "head": head}


def gradient_of_layer(run: RunDescription, again: int) -> float:
    """Return the bytes of a token while a layer's gradients are computed: the wide result between the layer's products, and three hidden
    states; with recompute also what the layer kept."""

    def wide(layer: DecoderLayer) -> int:
        return layer.experts.active * 2 * layer.experts.inner if layer.experts else layer.inner

    wanted = run.itemsize * (max(map(wide, set(run.shape.layers))) + 3 * run.shape.width) / run.layout.tensor
    return wanted + (largest_layer(run) if again else 0)


def read_share(run: RunDescription) -> float:
    """Return the share of tokens that the head reads: all, or only those that are trained on."""
    return run.lengths.response / run.lengths.mean if run.system.packs else 1.0


def largest_layer(run: RunDescription) -> float:
    """Return the bytes of a token in the layer that keeps most."""
    return max(run.shape.layer_bytes(layer, run.itemsize, fused=run.fused_layers) for layer in set(run.shape.layers)) / run.layout.tensor


def read_tokens(run: RunDescription, *, learns: bool) -> float:
    """Return the tokens on each GPU that the head reads of a micro-batch: all of the largest one, or the most that are trained on."""
    batch, lengths, together = run.batch, run.lengths, run.layout.context * run.layout.sequence
    if not run.system.packs:
        return update_tokens(run) if learns else forward_tokens(run)
    budget, samples = (batch.token_budget, batch.micro_batch) if learns else (batch.forward_token_budget, batch.forward_micro_batch)
    if budget is not None:
        return packing(run, budget, batch.updates if learns else 1).read
    return min(samples * lengths.most_response, lengths.longest_of(batch.rows) + (samples - 1) * lengths.response) / together


def head_of(run: RunDescription, rows: float, *, learns: bool) -> int:
    """Return the bytes of the head over `rows` tokens."""
    if not run.vocabulary_head:
        return 0
    vocabulary = run.shape.vocabulary // run.layout.tensor
    if run.fused_head or run.system.packs:
        entropy: Entropy = "gradient" if learns and run.entropy else "value"
        options = HeadOptions(run.fused_head, recompute=not (learns and run.kept_logits))
        kind = {"itemsize": run.itemsize, "device": run.gpu.device}
        return head_bytes(int(rows), vocabulary, run.shape.width, options, entropy=entropy, **kind).peak  # type: ignore[arg-type]
    return int(rows * vocabulary * (c.LOGIT_BYTES + (c.LOGIT_GRADIENT_BYTES if learns else 0)))


# ---- the engine --------------------------------------------------------------------------------------------------------------------------


def prefill_bytes(run: RunDescription) -> int:
    """Return the bytes of activations in a pass over prompts, each of which is read once for all its samples if these share it."""
    at_once, reads = -(-run.engine.max_seqs // run.batch.samples), 1 if run.engine.shares_prompts else run.batch.samples
    tokens = most_in_a_pass(run.engine.max_batched_tokens, run.batch.rollout_prompts, run.engines, reads * run.lengths.prompt, at_once)
    return pass_bytes(run.shape, tokens, run.itemsize, fused=run.fused_layers, parts=run.engine.tensor)


def engine_weights(run: RunDescription) -> int:
    return run.itemsize * parameters(run.shape).total // run.engine.tensor


def engine_bytes(run: RunDescription) -> int:
    """Return the bytes of a GPU that an engine takes while it is awake: a share of the whole memory, its weights included."""
    return round(run.engine.memory_share * run.gpu.memory)


def kv_parts(run: RunDescription) -> int:
    """Return the number of GPUs among which keys and values of a sample are divided: beyond the number of key heads they are copies."""
    return min(run.engine.tensor, max(layer.key_heads for layer in run.shape.layers))


def with_share_of_memory(run: RunDescription, share: float) -> RunDescription:
    """Return the same run on GPUs with this share of their memory."""
    gpu = replace(run.gpu, memory=int(run.gpu.memory * share))
    return replace(run, cluster=replace(run.cluster, gpu=gpu))
