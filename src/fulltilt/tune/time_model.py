"""The model of time: seconds of each phase of a step, by cause.

Enters: a `RunDescription`. Leaves: `PhaseSeconds` for each phase. Guaranteed: arithmetic alone, from FLOPs (batching/cost.py), bytes
(`Shape`, parallel/traffic.py) and the figures of the hardware table; all constants are in tune/constants.py.

The seconds of a pass are the sum of parts that cannot overlap: products and attention at the rate that the GPU reaches, memory traffic of
the operations between them, collectives inside layers, and the host's launches, which do not depend on tokens and so count for each
micro-batch. Ranks wait for each other after every mini-batch, so the one with most tokens counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean

from fulltilt.batching.cost import ModelSize, update_flops
from fulltilt.footprint import launch_for
from fulltilt.parallel.traffic import Stream, sent_bytes, tensor_pass, ulysses_pass
from fulltilt.plan.cache import CACHED_SAMPLES
from fulltilt.shape import DecoderLayer, Recompute, Shape
from fulltilt.tune import constants as c
from fulltilt.tune.description import Role, RunDescription
from fulltilt.tune.memory_model import (
    FP32,
    expert_copies,
    gathered_parameters,
    held_bytes,
    kv_parts,
    learned_parameters,
    memory_of,
    own_parameters,
    parameters,
    read_share,
)
from fulltilt.tune.packing import packing

FORWARD, BACKWARD = 1, 2  # a backward pass does twice the arithmetic of a forward pass
OF_HOST = ("launches", "unfused positions")  # causes that are the host's: a device waits for them
SAMPLE = 1024  # tokens of a stream that represents others, where bytes are proportional to tokens


@dataclass(frozen=True)
class PhaseSeconds:
    """Seconds of a phase, by cause."""

    causes: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.causes.values())

    @property
    def binds(self) -> str:
        """The largest cause."""
        return max(self.causes, key=lambda cause: self.causes[cause], default="nothing")


NOTHING = PhaseSeconds()
# Groups of phases that run beside one another, if their roles have GPUs of their own.
TOGETHER = (("old-logprob", "ref-logprob", "values"), ("update-critic", "update-actor"))


@dataclass(frozen=True)
class StepSeconds:
    generation: PhaseSeconds
    sync: PhaseSeconds
    old_logprob: PhaseSeconds
    ref_logprob: PhaseSeconds
    update: PhaseSeconds
    other: PhaseSeconds
    reward: PhaseSeconds = NOTHING  # passes of a reward model
    values: PhaseSeconds = NOTHING
    update_critic: PhaseSeconds = NOTHING
    apart: frozenset[str] = frozenset()  # phases of roles that have GPUs of their own

    @property
    def rollout(self) -> float:
        """Seconds of generation with the engine's waking and the samples' way back to the driver."""
        return self.generation.total + self.sync.total

    @property
    def phases(self) -> dict[str, PhaseSeconds]:
        found = {"rollout": self.generation, "sync": self.sync, "reward": self.reward, "old-logprob": self.old_logprob}
        found |= {"ref-logprob": self.ref_logprob, "values": self.values, "update-critic": self.update_critic}
        return {name: phase for name, phase in (found | {"update-actor": self.update, "other": self.other}).items() if phase.causes}

    @property
    def total(self) -> float:
        """Seconds of the longest chain: a phase that runs beside others counts only if it takes longer than they do."""
        phases, beside = self.phases, {name for names in TOGETHER for name in names}
        found = sum(phase.total for name, phase in phases.items() if name not in beside)
        for names in TOGETHER:
            there = {name: phases[name].total for name in names if name in phases}
            in_turn = sum(seconds for name, seconds in there.items() if name not in self.apart)
            found += max([in_turn, *(seconds for name, seconds in there.items() if name in self.apart)])
        return found

    @property
    def hidden(self) -> float:
        """Seconds of phases that run beside longer ones."""
        return sum(phase.total for phase in self.phases.values()) - self.total


PHASES_OF: Mapping[Role, tuple[str, ...]] = {"reward_model": ("reward",), "ref": ("ref-logprob",), "critic": ("values", "update-critic")}


def seconds_of(run: RunDescription) -> StepSeconds:
    roles = {own.role: own.run for own in run.others}
    logprob = logprob_seconds(run) if run.old_logprobs or run.reference or run.shared_reference else NOTHING
    reference = logprob_seconds(roles["ref"]) if "ref" in roles else logprob if run.reference or run.shared_reference else NOTHING
    return StepSeconds(
        generation=generation_seconds(run) if run.rollout else NOTHING,
        sync=sync_seconds(run) if run.rollout else NOTHING,
        old_logprob=logprob if run.old_logprobs else NOTHING,
        ref_logprob=reference,
        update=update_seconds(run),
        other=PhaseSeconds({"scoring": run.system.scoring * run.batch.rollout_rows}) if run.rollout else NOTHING,
        reward=logprob_seconds(roles["reward_model"]) if "reward_model" in roles else NOTHING,
        values=logprob_seconds(roles["critic"]) if "critic" in roles else NOTHING,
        update_critic=update_seconds(roles["critic"]) if "critic" in roles else NOTHING,
        apart=frozenset(name for own in run.others if own.apart for name in PHASES_OF[own.role]),
    )


@cache
def model_size(shape: Shape) -> ModelSize:
    return ModelSize.of_shape(shape)


# ---- passes over micro-batches -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passes:
    """Work of the GPUs of one data-parallel group in a phase."""

    tokens: float  # tokens of the whole phase, in the group with the most
    rows: float  # samples
    batches: int  # micro-batches of the whole phase
    at_once: int  # micro-batches in sequence without waiting for other groups
    learns: bool

    @property
    def in_micro_batch(self) -> float:
        return self.tokens / self.batches


def update_passes(run: RunDescription) -> Passes:
    batch, lengths, layout = run.batch, run.lengths, run.layout
    rows = batch.rows / batch.updates / run.data  # samples of a mini-batch, in one group
    tokens = rows * lengths.mean * lengths.imbalance(run.data, int(rows))
    if batch.token_budget is None:
        count = math.ceil(rows / batch.micro_batch)
    elif run.system.packs:
        count = packing(run, batch.token_budget, batch.updates).count
    else:
        count = math.ceil(tokens / (batch.token_budget * layout.context * layout.sequence))
    count, times = max(1, count), batch.updates * batch.epochs
    return Passes(tokens * times, rows * times, count * times, count, learns=True)


def forward_passes(run: RunDescription) -> Passes:
    """Return the passes for log-probs of all samples; the driver has distributed them evenly."""
    batch, layout = run.batch, run.layout
    rows, tokens = batch.rows / run.data, run.tokens / run.data
    if batch.forward_token_budget is None:
        count = math.ceil(rows / batch.forward_micro_batch)
    elif run.system.packs:
        count = packing(run, batch.forward_token_budget, 1).count
    else:
        count = math.ceil(tokens / (batch.forward_token_budget * layout.context * layout.sequence))
    return Passes(tokens, rows, max(1, count), max(1, count), learns=False)


def pass_seconds(run: RunDescription, passes: Passes) -> dict[str, float]:
    """Return the seconds of all micro-batches on the GPUs of one group, by cause."""
    found = {
        "products": product_seconds(run, passes),
        "attention": attention_seconds(run, passes),
        "memory traffic": traffic_seconds(run, passes),
        "head": head_seconds(run, passes),
        "collectives in layers": layer_collectives(run, passes),
        "launches": launch_seconds(run, passes),
        "unfused positions": rope_seconds(run, passes),
        "gradient sums": gradient_seconds(run, passes),
    }
    gathered = gather_seconds(run, passes)
    hidden = found["products"] + found["attention"] + found["memory traffic"]
    # FSDP gathers a layer while another computes, which hides only a part of the time.
    found["gathering parameters"] = max(run.system.exposed * gathered, gathered - hidden)
    found = {cause: seconds * (run.calibration.host if cause in OF_HOST else run.calibration.passes) for cause, seconds in found.items()}
    on_device = sum(seconds for cause, seconds in found.items() if cause not in OF_HOST)
    found["launches"] -= run.system.hidden * min(on_device, found["launches"])
    stages, virtual = run.layout.pipeline, run.layout.virtual
    found |= late_stage(run, found["head"], sum(found.values()) - found["head"])
    found["pipeline bubble"] = (stages - 1) / (virtual * passes.at_once) * sum(found.values())
    return {cause: seconds for cause, seconds in found.items() if seconds > 0}


def late_stage(run: RunDescription, head: float, layers: float) -> dict[str, float]:
    """Return how much longer the slowest stage of a pipeline takes than an equal share of the layers. The slowest is either the last one
    with the head, which has one layer fewer if their number is not divisible, or one that has a layer more."""
    share = len(run.shape.layers) / run.layout.pipeline
    last, uneven = head - (share - math.floor(share)) * layers / share, (math.ceil(share) - share) * layers / share
    return {"head": last} if last > uneven else {"head": 0.0, "uneven stages": uneven}


def again_share(run: RunDescription, passes: Passes) -> float:
    """Return the share of a forward pass over the layers that the backward pass repeats. Repeats of selective recompute count as memory
    traffic."""
    return recomputed_share(run) if passes.learns and run.recompute.kind == "full" else 0.0


def recomputed_share(run: RunDescription) -> float:
    layers = len(run.shape.layers)
    return sum(map(len, run.recompute.units(layers))) / layers


def times_forward(run: RunDescription, passes: Passes) -> float:
    """Return the arithmetic of a pass in the layers, in forward passes."""
    return (FORWARD + BACKWARD + again_share(run, passes)) if passes.learns else FORWARD


def product_seconds(run: RunDescription, passes: Passes) -> float:
    """Return the seconds of the layers' matrix products, each at the rate that its sides allow."""
    rate = run.gpu.flops * run.gpu.matmul_share
    each = sum(
        count * layer_product_flops(run.shape, layer, run, passes.in_micro_batch) for layer, count in Counter(run.shape.layers).items()
    )
    group = run.layout.model_parallel
    frozen = 1 if passes.learns and run.trained is not None else 0  # frozen weights have no gradient, which saves half of a backward pass
    found = passes.tokens * each * (times_forward(run, passes) - frozen)
    if run.system.stops_early and again_share(run, passes):
        found -= passes.tokens * last_products(run, passes.in_micro_batch)
    return found / group / rate


def last_products(run: RunDescription, tokens: float) -> float:
    """Return the FLOPs of a token in the last product of each unit that is recomputed."""
    last = [run.shape.layers[unit[-1]] for unit in run.recompute.units(len(run.shape.layers))]
    return sum(layer_product_flops(run.shape, layer, run, tokens, ends=("down_proj",)) for layer in last)


def layer_product_flops(shape: Shape, layer: DecoderLayer, run: RunDescription, tokens: float, ends: tuple[str, ...] = ("",)) -> float:
    """Return the FLOPs of a token in the forward pass of a layer, each product enlarged by the waste of its short sides. `ends`: only
    products whose names end so count."""
    found = 0.0
    layout, own_tokens = run.layout, tokens / (run.layout.context * run.layout.sequence)
    for name, (inner, outer, copies) in shape.products(layer).items():
        if not name.endswith(ends):
            continue
        active = min(copies, layer.experts.active) if layer.experts else 1
        rows = own_tokens
        if copies > 1:  # an expert gets its share of the tokens of all GPUs that divide the experts
            rows = own_tokens * active / copies
            rows *= layout.expert * layout.expert_tensor / layout.tensor if layout.divides_experts else 1
        parts = layout.tensor if copies == 1 else layout.expert_parts
        cut_inner = name.endswith(("o_proj", "down_proj"))
        sides = (rows, inner / parts if cut_inner else inner, outer if cut_inner else outer / parts)
        uneven = expert_imbalance(run, copies) if copies > 1 else 1.0
        found += uneven * 2.0 * inner * outer * active * (1 + run.system.tile * sum(1 / max(1.0, side) for side in sides))
    return found


def expert_imbalance(run: RunDescription, experts: int) -> float:
    """Return the tokens that the GPU with the most popular experts computes and receives, as a multiple of the mean: the fewer experts each
    GPU has, the more, since those of a GPU even one another out."""
    places = run.layout.expert_places
    return min(float(places), 1 + run.system.expert_spread * math.sqrt((places - 1) / experts))


def attention_seconds(run: RunDescription, passes: Passes) -> float:
    flops = update_flops(model_size(run.shape), run.lengths.rows, 0).attention / 3 / sum(run.lengths.rows)  # FLOPs of a token, forward
    rate = run.gpu.flops * run.gpu.matmul_share * c.ATTENTION_SHARE
    return passes.tokens * flops * times_forward(run, passes) / run.layout.model_parallel / rate


def traffic_seconds(run: RunDescription, passes: Passes) -> float:
    """Return the seconds in which operations between products read and write memory."""
    fused, sorting = run.fused_layers, run.system.expert_traffic
    kept = sum(
        count * run.shape.layer_bytes(layer, run.itemsize, fused=fused) * (sorting if layer.experts else 1.0)
        for layer, count in Counter(run.shape.layers).items()
    )
    again = 1.0 if run.recompute.kind != "none" and passes.learns else 0.0
    times = c.FORWARD_TRAFFIC * (1 + again) + (c.BACKWARD_TRAFFIC if passes.learns else 0)
    times *= run.system.traffic if fused else run.system.unfused_traffic
    return passes.tokens * kept * times / run.layout.model_parallel / (run.gpu.hbm * c.HBM_SHARE)


def head_seconds(run: RunDescription, passes: Passes) -> float:
    """Return the seconds of the vocabulary's product and of the operations that read its result. A fused head computes logits again in the
    backward pass. In a pipeline the last stage does this while the others wait (`late_stage`)."""
    if not run.vocabulary_head:
        return 0.0
    shape, group = run.shape, run.layout.tensor * run.layout.context * run.layout.sequence
    numbers = passes.tokens * read_share(run) * shape.vocabulary / group
    frozen, again = 0 if run.trained is None else 1, run.fused_head and not run.kept_logits
    flops = 2 * shape.width * numbers * (FORWARD + (BACKWARD - frozen + again if passes.learns else 0))
    moved = 0.0
    if not run.fused_head:
        if run.system.logits:
            moved = numbers * run.system.logits.bytes(learns=passes.learns, entropy=run.entropy)
        else:
            moved = numbers * c.LOGIT_TRAFFIC * (1 + passes.learns) * (1 + (run.entropy or not passes.learns))
    return flops / (run.gpu.flops * run.gpu.matmul_share) + moved / (run.gpu.hbm * c.HBM_SHARE)


def launch_seconds(run: RunDescription, passes: Passes) -> float:
    """Return the seconds of the host's launches in all micro-batches, layer by layer; stages of a pipeline launch at the same time."""
    layers, layout = run.shape.layers, run.layout
    system = run.system
    ring = system.host_ring * (layout.context - 1)
    host = system.host_layer if run.fused_layers else system.host_unfused
    loop = c.EXPERT_LAUNCHES * c.LAUNCH / layout.expert_places if system.expert_by_expert and not run.fused_layers else 0.0
    each = (
        sum(host + ring + (loop * layer.experts.count or system.host_experts if layer.experts else 0) for layer in layers) / layout.pipeline
    )
    times = times_forward(run, passes) + (system.host_again - 1) * again_share(run, passes)
    if passes.learns and run.recompute.kind == "selective":
        times += system.host_selective * recomputed_share(run)
    return passes.batches * each * times


def gradient_seconds(run: RunDescription, passes: Passes) -> float:
    """Return the seconds in which gradients of micro-batches are added to earlier ones, in float32."""
    if not passes.learns:
        return 0.0
    learned = gathered_parameters(run) if run.backend == "fsdp" and run.trained is None else learned_parameters(run)
    return passes.batches * run.system.gradient_traffic * learned / (run.gpu.hbm * c.HBM_SHARE)


def rope_seconds(run: RunDescription, passes: Passes) -> float:
    """Return the seconds of rotary positions of packed sequences without a fused kernel."""
    if run.fused_rope or run.backend == "fsdp":  # Hugging Face's positions run over the whole stream, which memory traffic counts
        return 0.0
    forward, backward = c.ROPE_LAUNCHES
    launches = forward * (1 + again_share(run, passes)) + (backward if passes.learns else 0)
    return passes.rows * len(run.shape.layers) / run.layout.pipeline * launches * c.LAUNCH


def layer_collectives(run: RunDescription, passes: Passes) -> float:
    """Return the seconds in which GPUs of a group exchange data inside layers."""
    layout, shape, stream = run.layout, run.shape, Stream(SAMPLE, (range(SAMPLE),))
    tokens = passes.tokens / SAMPLE
    recompute = run.recompute if run.recompute.kind == "full" else Recompute()
    found = 0.0
    if layout.tensor > 1:
        # The collectives of the backward pass run beside the products of the weights' gradients, as in Megatron. Tokens that are sent to
        # divided experts are not gathered first.
        moved = tensor_pass(shape, layout.tensor, run.itemsize, stream, "logprob", learns="none")
        sent_apart = sum(layer.experts is not None and not layer.experts.shared_inner for layer in shape.layers) * layout.divides_experts
        share = tokens / (layout.pipeline * layout.context) * (1 + again_share(run, passes)) * (1 - sent_apart / (2 * len(shape.layers)))
        found += share * sent_bytes(moved, layout.tensor) / run.cluster.link(layout.tensor)
    if layout.sequence > 1:
        moved = ulysses_pass(shape, layout.sequence, run.itemsize, stream, "logprob", learns=passes.learns, recompute=recompute)
        found += tokens * sent_bytes(moved, layout.sequence) / run.cluster.link(layout.sequence)
    if layout.context > 1:
        found += ring_seconds(run, passes)
    if layout.divides_experts:
        found += dispatch_seconds(run, passes.tokens) * (1 + passes.learns + again_share(run, passes))
    return found / c.LINK_SHARE


def ring_seconds(run: RunDescription, passes: Passes) -> float:
    """Return the seconds of keys and values that go round a ring, in the backward pass with their gradients, beyond those of attention
    meanwhile."""
    layout = run.layout
    keys = sum(2 * layer.keys for layer in run.shape.layers) * run.itemsize / layout.tensor
    share = passes.tokens / layout.context * (layout.context - 1) / layout.pipeline
    sent = share * keys * times_forward(run, passes) / run.cluster.link(layout.tensor * layout.context)
    return max(0.0, sent - attention_seconds(run, passes) * c.LINK_SHARE)


def dispatch_seconds(run: RunDescription, tokens: float) -> float:
    """Return the seconds in which a GPU's tokens go to their experts and back, in a forward pass: within a machine over the GPUs' link, and
    at the same time to other machines over the network. GPUs that share experts gather one another's tokens and sum their results."""
    layout, cluster = run.layout, run.cluster
    near = max(1, min(layout.expert, cluster.per_machine // layout.expert_tensor))
    machines = max(1.0, layout.expert / near)
    found = 0.0
    for experts, count in Counter(layer.experts for layer in run.shape.layers if layer.experts).items():
        far = (machines - 1) * copies_sent(run, experts.active, machines) / machines
        close = (layout.expert - 1) * copies_sent(run, experts.active, layout.expert) / layout.expert
        if not run.system.deduplicates:  # then tokens from another machine are not passed on within one
            close -= far
        cut = experts.active * (layout.expert_tensor - 1) / cluster.link(layout.expert_tensor)
        sent = max(close / cluster.gpu.gpu_link, far / cluster.gpu.network) + cut
        found += count * sent * expert_imbalance(run, experts.count)
    own = tokens / (layout.tensor * layout.context * layout.sequence * layout.pipeline)
    return 2 * own * run.shape.width * run.itemsize * found


def copies_sent(run: RunDescription, active: int, places: float) -> float:
    """Return how often a token is sent if its experts are spread evenly over `places`: once for each expert, or once to each place that has
    any of them."""
    return places * (1 - (1 - 1 / places) ** active) if run.system.deduplicates else active


def gather_seconds(run: RunDescription, passes: Passes) -> float:
    """Return the seconds in which FSDP gathers parameters for each pass, and sums gradients after each."""
    if run.backend != "fsdp" or run.shard == 1:
        return 0.0
    whole = gathered_parameters(run)
    summed = FP32 * (whole if run.trained is None else run.trained // run.layout.tensor) if passes.learns else 0
    each = whole * run.itemsize * (2 if passes.learns else 1) + summed
    moved = passes.batches * each * (run.shard - 1) / run.shard
    return moved / (run.cluster.ring(run.shard) * c.LINK_SHARE)


# ---- phases ------------------------------------------------------------------------------------------------------------------------------


def update_seconds(run: RunDescription) -> PhaseSeconds:
    passes = update_passes(run)
    found = pass_seconds(run, passes) | {"optimizer": optimizer_seconds(run)}
    hidden = sum(seconds for cause, seconds in found.items() if cause in ("products", "attention", "memory traffic"))
    late = max(0.0, activation_copies(run, passes) - hidden)  # activations are copied while layers compute
    found |= {"offload": offload_seconds(run) + late, "handing out rows": driver_seconds(run, trains=True)}
    return PhaseSeconds({cause: seconds for cause, seconds in found.items() if seconds > 0})


def logprob_seconds(run: RunDescription) -> PhaseSeconds:
    found = pass_seconds(run, forward_passes(run)) | {"handing out rows": driver_seconds(run, trains=False)}
    if run.offload_params:  # parameters of a role that is not trained need not be copied back
        found["offload"] = (1 if run.trained == 0 else 2) * held_bytes(run)["parameters"] / host_copy(run)
    return PhaseSeconds({cause: seconds for cause, seconds in found.items() if seconds > 0})


def optimizer_seconds(run: RunDescription) -> float:
    """Return the seconds of each mini-batch's optimizer step, in which the GPUs with the same parameters sum gradients and gather
    parameters."""
    layout, own = run.layout, own_parameters(run)
    apart = layout.expert * layout.expert_tensor if layout.divides_experts else layout.tensor
    parts = [(own.shared, run.shard, layout.tensor), (own.experts, expert_copies(run), apart)]
    if run.trained is not None or run.backend == "fsdp":
        parts = [(learned_parameters(run), run.shard, layout.tensor)]
    found = 0.0
    for learned, copies, step in parts:
        found += c.STATE_TRAFFIC * learned / copies / (run.gpu.hbm * c.HBM_SHARE)
        if run.backend == "megatron" and copies > 1:
            speed = run.cluster.ring(copies, apart=step) * c.LINK_SHARE
            found += (FP32 + run.itemsize) * learned * (copies - 1) / copies / speed
    return run.batch.updates * run.batch.epochs * found


def offload_seconds(run: RunDescription) -> float:
    """Return the seconds in which offloaded states move to the GPU before an update and back afterwards. Gradients are not moved: each
    update computes new ones."""
    held, times = held_bytes(run), run.batch.updates * run.batch.epochs if run.system.streams_optimizer else 1
    there_and_back = 2 * held["parameters"] if run.offload_params else 0
    streamed = times * held["optimizer"] / run.system.duplex if run.offload_optimizer else 0
    return (there_and_back + streamed) / host_copy(run)


def activation_copies(run: RunDescription, passes: Passes) -> float:
    """Return the seconds in which activations go to the host and come back."""
    if not run.offload_activations:
        return 0.0
    kept = run.shape.kept_bytes(run.itemsize, fused=run.fused_layers, recompute=run.recompute) / run.layout.model_parallel
    return 2 * passes.tokens * kept / host_copy(run)


def host_copy(run: RunDescription) -> float:
    """Return the bytes per second to and from the host."""
    return min(run.gpu.host_link, run.system.host_copy)


def driver_seconds(run: RunDescription, *, trains: bool) -> float:
    """Return the seconds in which the driver hands out padded rows: ids, mask and positions in 8 bytes, and in an update responses,
    log-probs and advantages too."""
    row = 3 * 8 * run.lengths.longest_row + (8 + 4 * (4 if trains else 1)) * run.lengths.most_response
    copies = run.system.megatron_copies if run.backend == "megatron" else 1
    return run.batch.rows * row * copies / run.system.driver_rate


def sync_seconds(run: RunDescription) -> PhaseSeconds:
    if not run.engine.own_copy:
        return PhaseSeconds()
    whole, system = run.itemsize * parameters(run.shape).total, run.system
    one_by_one = system.sync_start + system.sync_matrix * sum(map(run.shape.matrices, run.shape.layers))
    found = {"parameters to the engine": one_by_one + copy_seconds(run, whole)}
    row = 3 * 8 * run.lengths.longest_row + 8 * run.lengths.most_response
    found["gathering rows"] = run.batch.rollout_rows * row / run.system.driver_rate
    return PhaseSeconds({cause: seconds for cause, seconds in found.items() if seconds > 0})


def copy_seconds(run: RunDescription, whole: int) -> float:
    """Return the seconds in which parameters move to the engine. If a system gathers them straight into the engine's copy, the links
    between the GPUs that have parts of them are the limit; if it gathers them matrix by matrix, each GPU receives all of them."""
    if run.system.syncs_whole:
        return whole / (run.cluster.link(run.cluster.gpus) * c.LINK_SHARE)
    parts = max(run.layout.tensor, run.layout.expert) * (run.shard if run.backend == "fsdp" else 1)
    written = whole / run.engine.tensor / (run.gpu.hbm * c.HBM_SHARE)
    return written + whole / run.engine.tensor * (parts - 1) / parts / (run.cluster.ring(parts) * c.LINK_SHARE)


# ---- rollout -----------------------------------------------------------------------------------------------------------------------------


def generation_seconds(run: RunDescription) -> PhaseSeconds:
    """Return the seconds in which one engine decodes its samples; all engines have the same number."""
    samples, costs = run.batch.rollout_rows / run.engines, DecodeCosts.of(run)
    running, alike = min(samples, concurrency(run)), run.lengths.alike
    found = prefill_seconds(run, math.ceil(samples / running))
    if run.calibration.rollout_s:
        found["start"] = run.calibration.rollout_s
    if run.system.host_token and alike:  # samples of different lengths are recorded during decoding
        found["records"] = alike * run.system.host_token * running * run.lengths.response
    for share, decoding in ((alike, in_waves), (1 - alike, one_by_one)):
        for steps, size, context in decoding(run, samples, running) if share else ():
            add(found, share * steps, costs.step(size, context))
    return PhaseSeconds(found)


def in_waves(run: RunDescription, samples: float, running: float) -> Iterator[tuple[float, float, float]]:
    """Yield the decode steps of samples of one length: how many steps, with how many samples and tokens of context each. Samples that run
    at once end together, and the waiting ones begin together, the last of them in a smaller number."""
    mean = fmean(run.lengths.responses)
    full, rest = divmod(samples, running)
    for times, size in ((full, running), (1, rest)):
        if size:
            yield times * mean, size, run.lengths.prompt + mean / 2


def one_by_one(run: RunDescription, samples: float, running: float) -> Iterator[tuple[float, float, float]]:
    """Yield the same of samples of different lengths. A waiting sample begins when another ends; then the longest ones end alone."""
    mean = fmean(run.lengths.responses)
    if samples > running:
        yield (samples - running) * mean / running, running, run.lengths.prompt + mean / 2
    before, lengths = 0.0, [*run.lengths.responses, run.lengths.longest_of(run.batch.rollout_rows)]
    for place, length in enumerate(lengths):
        alive = max(1.0, running * (1 - place / (len(lengths) - 1)))
        yield length - before, alive, run.lengths.prompt + (before + length) / 2
        before = length


def add(found: dict[str, float], steps: float, causes: Mapping[str, float]) -> None:
    for cause, seconds in causes.items():
        found[cause] = found.get(cause, 0.0) + steps * seconds


def concurrency(run: RunDescription) -> float:
    """Return how many samples an engine decodes at once: as many as it may, and as its cache holds at their mean length. An engine that
    does not fit is timed as if it had a small cache."""
    memory = memory_of(run)
    cache = (memory.kv_bytes if memory.engine_starts else CACHED_SAMPLES * memory.sample_kv_bytes) * kv_parts(run)
    held = cache / (run.shape.kv_bytes_per_token(run.itemsize) * run.lengths.mean)
    return max(1.0, min(float(run.engine.max_seqs), held))


@dataclass(frozen=True)
class DecodeCosts:
    """Costs of an engine's decode step on its GPU, as far as they do not depend on the samples."""

    run: RunDescription
    shared: float  # numbers that a step always reads, on each GPU
    experts: float  # numbers of all experts, on each GPU
    routed: float  # the share of experts that a sample is sent to
    multiplied: float  # numbers that a token is multiplied by, on each GPU
    token_bytes: float  # bytes of keys and values, on each GPU

    @staticmethod
    def of(run: RunDescription) -> DecodeCosts:
        shape, parts, counts, size = run.shape, run.engine.tensor, parameters(run.shape), model_size(run.shape)
        experts = next((layer.experts for layer in shape.layers if layer.experts), None)
        shared = counts.shared - (0 if shape.tied else shape.vocabulary * shape.width)
        return DecodeCosts(
            run,
            shared=shared / parts,
            experts=counts.experts / parts,
            routed=experts.active / experts.count if experts else 0.0,
            multiplied=(size.layer_weights + size.head_weights) / parts,
            token_bytes=shape.kv_bytes_per_token(run.itemsize) / kv_parts(run),
        )

    def step(self, running: float, context: float) -> dict[str, float]:
        """Return the seconds of one step with `running` samples, by cause. It reads only the experts that any of the samples is sent to."""
        run, shape, gpu, parts, system = self.run, self.run.shape, self.run.gpu, self.run.engine.tensor, self.run.system
        bandwidth = gpu.hbm * c.HBM_SHARE
        reading = run.itemsize * (self.shared + self.experts * (1 - (1 - self.routed) ** running)) / bandwidth
        computing = 2 * self.multiplied * running / (gpu.flops * gpu.matmul_share)
        keys = system.attention_traffic * running * context * self.token_bytes / bandwidth
        keys += len(shape.layers) * system.attention_token * self.in_turn(running, context)
        sampling = running * shape.vocabulary * c.LOGIT_TRAFFIC / bandwidth
        found = {"weights" if reading >= computing else "products": max(reading, computing), "keys and values": keys, "sampling": sampling}
        if parts > 1:
            moved = 2 * running * shape.width * run.itemsize * 2 * (parts - 1) / parts / (run.cluster.link(parts) * c.LINK_SHARE)
            found["collectives"] = len(shape.layers) * (2 * c.COLLECTIVE_LATENCY + moved)
        if gaps := sum(self.gap(layer) for layer in shape.layers):
            found["short kernels"] = gaps
        on_device = sum(found.values())
        if not run.engine.graphs:
            found["launches"] = max(0.0, len(shape.layers) * system.eager_layer - on_device)
        waits = system.engine_step + running * (system.engine_sequence + (system.engine_broadcast if parts > 1 else 0))
        found = {cause: seconds * run.calibration.decoding for cause, seconds in found.items()}
        return found | ({"scheduling": waits} if waits else {})

    def gap(self, layer: DecoderLayer) -> float:
        """Return the seconds of a layer's kernels that are too short for their bytes or FLOPs to explain."""
        system = self.run.system
        return system.graph_layer + (0 if self.run.fused_layers else system.graph_unfused) + (system.graph_experts if layer.experts else 0)

    def in_turn(self, running: float, context: float) -> float:
        """Return the tokens of a sample that one program of decoding's attention reads in sequence."""
        layer = max(self.run.shape.layers, key=lambda own: own.head_width)
        keys = max(1, layer.key_heads // self.run.engine.tensor)
        launch = launch_for(max(1, int(running)), keys, layer.head_width, self.run.itemsize, self.run.lengths.longest_sampled)
        return context if context <= launch.whole else max(launch.fewest, context / launch.splits)


def read_weights(shape: Shape, running: float) -> float:
    """Return the number of weights that a step with `running` samples reads."""
    counts = parameters(shape)
    experts = next((layer.experts for layer in shape.layers if layer.experts), None)
    routed = experts.active / experts.count if experts else 0.0
    tables = 0 if shape.tied else shape.vocabulary * shape.width
    return counts.shared - tables + counts.experts * (1 - (1 - routed) ** running)


def prefill_seconds(run: RunDescription, waves: int) -> dict[str, float]:
    """Return the seconds of prompts, each read once for all its samples if these share it. The host launches one pass, and two more for
    each further wave of samples that run at once: not all places become free together."""
    size, system = model_size(run.shape), run.system
    times = 1 if run.engine.shares_prompts else run.batch.samples
    tokens = run.batch.rollout_prompts * times * run.lengths.prompt / run.cluster.gpus
    computing = run.calibration.passes * 2 * size.layer_weights * tokens / (run.gpu.flops * run.gpu.matmul_share)
    host = run.calibration.host * (system.host_layer if run.fused_layers else system.host_unfused)
    launching = len(run.shape.layers) * host * (2 * waves - 1) if system.packs else 0.0
    return {"launches of prompts": launching} if launching > computing else {"prefill": computing}
