"""Every proof of every knob, as data.

Enters: the setup that the proofs run in. Leaves: `ProofCase`s, in the order of the ledger. The proof of a knob is one entry here: the knob,
the role, the measurement (`measure.py`), the two settings, and how the measurement must change.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from fulltilt import knobs
from fulltilt.observe.metrics import Number
from fulltilt.proofs import measure
from fulltilt.proofs.measure import Measurement
from fulltilt.proofs.setup import TWO_NODES, ProofSetup, Settings, StepKey, StepKind, TableSetting, step_key

# Passes of each role through its model, with whether they are part of an update.
PASSES = (
    ("actor", True), ("actor", False), ("sft", True), ("ref", False), ("critic", True), ("critic", False), ("reward_model", False),
)  # fmt: skip
LEARNERS = {"actor": "train", "sft": "train", "critic": "critic"}  # role -> section of its training keys
ROLES = {**LEARNERS, "ref": "ref", "reward_model": "reward_model"}
SCARCE, AMPLE = 12, 160  # blocks of the KV cache
# Setting for comparisons of the layers' activations: with "auto" one of the two steps might keep its logits.
HEAD_AGAIN: Settings = {"train.head_recompute": True}
# Tolerance for compiled layers: transformers computes norms in float32 whatever the model's dtype, and a compiler sums them in another
# order. With norms in float64, the difference is 1e-15.
COMPILED = 4e-6
GRADIENT_TOLERANCE = 1e-9  # in float64, relative to the norm of the gradient
REFUSED = "a run on the CPU refuses the setting"
NO_KERNELS = "a CPU launches no kernels: fused layers run torch's own operations there, with merged matrix products"


# How the measurement must change from the first step to the second.
CHANGES: Mapping[str, Callable[[Number, Number], bool]] = {
    "less": operator.gt,
    "more": operator.lt,
    "to zero": lambda off, on: on == 0 < off,
    "from zero": lambda off, on: off == 0 < on,
    "to less than half": lambda off, on: 2 * on < off,
}


@dataclass(frozen=True, eq=False)
class ProofCase:
    """Two steps that differ in one knob: the measurement must change between them, and all results of the role must stay equal.

    Example: ProofCase("rollout.max_seqs", "rollout", measure.MOST_RUNNING, off=4, on=16, change="limit")
    """

    knob: str
    role: str  # actor, critic, ref or reward_model of a PPO step; "sft", the actor of an SFT step; "rollout", the engine
    measurement: Measurement
    off: Any = False  # the knob's value in the first step, or a mapping of several settings
    on: Any = True
    both: Settings = field(default_factory=dict)  # further settings of both steps
    change: str = "less"  # one of CHANGES; "limit": the knob's value is a limit on the measurement
    needs_cuda: str | None = None  # why a CPU cannot show it; REFUSED: a run there must refuse the setting, and its message says why
    tolerance: float = GRADIENT_TOLERANCE
    off_is_refused: bool = False  # every run refuses the first setting: its measurement counts as 0

    @property
    def kind(self) -> StepKind:
        return "sft" if self.role == "sft" else "rollout" if self.role == "rollout" else "ppo"

    @property
    def model_role(self) -> str:
        """The role of the run whose model is measured and whose gradients or outputs are compared."""
        return "actor" if self.role in ("sft", "rollout") else self.role

    @property
    def learns(self) -> bool:
        return self.role not in ("ref", "reward_model")

    @property
    def steps(self) -> tuple[StepKey, StepKey]:
        off, on = (value if isinstance(value, Mapping) else {self.knob: value} for value in (self.off, self.on))
        return step_key(self.kind, self.both, off), step_key(self.kind, self.both, on)

    def changed(self, off: Number, on: Number) -> bool:
        """Return whether these measurements of the two steps differ as they must. For a limit, both steps must keep theirs, and the step
        with the higher one must exceed the lower one."""
        if self.change != "limit":
            return CHANGES[self.change](off, on)
        low, high = sorted((self.off, self.on))
        return bool(min(off, on) <= low < max(off, on) <= high and (off < on) == (self.off < self.on))


def all_cases(setup: ProofSetup) -> list[ProofCase]:
    places = {knob.name: place for place, knob in enumerate(knobs.LEDGER)}
    found = chain(rollout(setup), batches(setup), workers(setup), packing_and_recompute(), offload(setup), head(setup), layers(setup))
    return sorted(found, key=lambda case: places[case.knob])


def rollout(setup: ProofSetup) -> Iterator[ProofCase]:
    scarce, ample = (blocks * setup.block_bytes() for blocks in (SCARCE, AMPLE))
    for knob, low, high in (
        ("rollout.kv_bytes", scarce, ample),
        ("rollout.memory_fraction", setup.share_of_free(scarce), setup.share_of_free(ample)),
    ):
        yield ProofCase(knob, "rollout", measure.KV_CACHE, low, high, change="more")
        yield ProofCase(knob, "rollout", measure.MOST_RUNNING, low, high, change="more")
    # Equal gradients show that preempted samples end in the same way. Small blocks, so that samples ask for one often.
    much, little = {"rollout.kv_bytes": ample}, {"rollout.kv_bytes": scarce}
    yield ProofCase("rollout.preemption", "rollout", measure.PREEMPTIONS, much, little, {"rollout.block_tokens": 4}, "from zero")
    yield ProofCase("rollout.release_memory", "rollout", measure.held("kv", "update-actor"), change="to zero")
    yield ProofCase("rollout.block_tokens", "rollout", measure.MOST_RUNNING, 32, 4, {"rollout.kv_bytes": scarce}, "more")
    yield ProofCase("rollout.max_seqs", "rollout", measure.MOST_RUNNING, 4, 16, change="limit")
    yield ProofCase("rollout.max_batched_tokens", "rollout", measure.LARGEST_PREFILL, 32, 128, change="limit")
    # Without prefix sharing, samples start one by one, whenever another one ends.
    few_seats: Settings = {"rollout.max_seqs": 6, "rollout.max_batched_tokens": 16, "rollout.prefix_sharing": False}
    yield ProofCase("rollout.chunked_prefill", "rollout", measure.LONGEST_STALL, both=few_seats)
    yield ProofCase("rollout.prefix_sharing", "rollout", measure.PREFILLED)
    yield ProofCase("rollout.prefix_sharing", "rollout", measure.HIT_RATE, change="more")
    yield ProofCase("rollout.cuda_graphs", "rollout", measure.LAUNCHES, change="to less than half", needs_cuda=REFUSED)
    divided: Settings = {"cluster.workers": 2, "train.tensor_parallel": 2}
    for measured in (measure.held("parameters", "rollout"), measure.KEY_HEADS, measure.SAMPLING_GROUPS):
        yield ProofCase("rollout.tensor_parallel", "rollout", measured, 1, 2, divided)
    experts: Settings = {"cluster.workers": 2, "rollout.tensor_parallel": 2, "model.path": setup.model_of_experts}
    yield ProofCase("rollout.expert_parallel", "rollout", measure.EXPERTS, 1, 2, experts)
    yield ProofCase("rollout.log_stats", "rollout", measure.LOG_LINES, change="more")
    yield ProofCase("rollout.log_stats", "rollout", measure.ROLLOUT_METRICS, change="more")
    yield ProofCase("rollout.engine", "rollout", measure.NATIVE_SAMPLES, "vllm", "native", change="more", off_is_refused=True)


def batches(setup: ProofSetup) -> Iterator[ProofCase]:
    small, large = setup.longest, 3 * setup.longest
    for role, learns in PASSES:
        section = "actor" if role == "sft" else role
        micro, dynamic = f"{section}.micro_batch", f"{section}.dynamic_batch"
        yield ProofCase(micro, role, measure.MICRO_BATCHES[learns], 1, 3, {dynamic: False})
        yield ProofCase(micro, role, measure.MOST_SAMPLES[learns], 1, 3, {dynamic: False}, "limit")

        budget = f"{section}.token_budget" if learns else f"{section}.forward_token_budget"
        fixed, by_tokens = {dynamic: False, micro: 3}, {dynamic: True, budget: small}
        yield ProofCase(dynamic, role, measure.SAMPLE_COUNTS[learns], fixed, by_tokens, change="more")
        yield ProofCase(budget, role, measure.MICRO_BATCHES[learns], large, small, change="more")
        yield ProofCase(budget, role, measure.MOST_TOKENS[learns], large, small, change="limit")
        if learns:
            yield ProofCase(budget, role, measure.ACTIVATIONS, large, small)


def workers(setup: ProofSetup) -> Iterator[ProofCase]:
    """Yield the proofs of knobs about workers. With one row in a micro-batch, each worker gets several of different cost."""
    each: Settings = {"actor.dynamic_batch": False, "actor.micro_batch": 1}
    alone: Settings = {**each, "cluster.workers": 1}
    yield ProofCase("cluster.workers", "sft", measure.WORKERS, 1, 2, each, "more")
    # Nodes on one machine would share its GPUs, which NCCL refuses: on CUDA, too, they compute on the CPU.
    on_cpu: Settings = {} if setup.device.type == "cpu" else {"run.device": "cpu", "model.dtype": "float64"}
    nodes: Settings = {"cluster.nodes": 2, "cluster.address": TWO_NODES}
    yield ProofCase("cluster.nodes", "sft", measure.WORKERS, {}, nodes, {**alone, **on_cpu}, "more")
    apart: Settings = {"cluster.workers": 2, "cluster.roles": TableSetting(critic=1)}
    yield ProofCase("cluster.roles", "critic", measure.OWN_WORKERS, {"cluster.workers": 1}, apart, change="from zero")
    two: Settings = {**each, "cluster.workers": 2}
    yield ProofCase("train.balance", "sft", measure.LOAD_SPREAD, both=two)
    yield ProofCase("train.sequence_parallel", "sft", measure.largest_pass("actor"), 1, 2, two)
    for role in ("ref", "critic", "reward_model"):  # the actor learns from the results of the other two
        own: Settings = {"cluster.workers": 2, f"{role}.dynamic_batch": False, f"{role}.micro_batch": 1}
        learner = role if role in LEARNERS else "actor"
        yield ProofCase(f"{role}.sequence_parallel", learner, measure.largest_pass(role), 1, 2, own)
        phase = "update-critic" if role == "critic" else "update-actor"
        yield ProofCase(f"{role}.tensor_parallel", learner, measure.held("parameters", phase), 1, 2, {"cluster.workers": 2})
        path: Settings = {f"{role}.path": setup.model_of_experts if role == "ref" else setup.scalar_model_of_experts}
        if role != "reward_model":  # other roles read the actor's tokens, and the class of a tokenizer follows the kind of model
            path = {"model.path": setup.model_of_experts, "critic.path": setup.scalar_model_of_experts, **path}
        yield ProofCase(f"{role}.expert_parallel", learner, measure.held("parameters", phase), 1, 2, {"cluster.workers": 2, **path})
    yield ProofCase("train.tensor_parallel", "sft", measure.held("parameters", "update-actor"), 1, 2, two)
    experts: Settings = {**two, "model.path": setup.model_of_experts}
    yield ProofCase("train.expert_parallel", "sft", measure.held("parameters", "update-actor"), 1, 2, experts)
    # In bfloat16 two shards in float32 take as much as the whole: on CUDA four workers shard it.
    sharing: Settings = two if setup.device.type == "cpu" else {**each, "cluster.workers": 4}
    for kind in ("parameters", "gradients"):
        yield ProofCase("train.shard", "sft", measure.held(kind, "update-actor"), "optimizer", "full", sharing)
    yield ProofCase("train.shard", "sft", measure.held("optimizer", "update-actor").where("alone or shared out"), alone, two)
    groups: Settings = {**each, "cluster.workers": 4, "train.shard": "hybrid"}
    yield ProofCase("train.shard_size", "sft", measure.held("parameters", "update-actor"), 4, 2, groups, "more")
    yield ProofCase("train.shard_size", "sft", measure.moved("all-reduce"), 4, 2, groups, "more")
    shared: Settings = {**two, "train.shard": "full"}
    yield ProofCase("train.reshard_after_forward", "sft", measure.WHOLE, both=shared)
    yield ProofCase("train.reshard_after_forward", "sft", measure.moved("all-gather"), both=shared, change="more")
    yield ProofCase("train.forward_prefetch", "sft", measure.AHEAD, both=shared, change="from zero")


def packing_and_recompute() -> Iterator[ProofCase]:
    for role, learns in PASSES:
        knob = f"{role}.packing" if role in ("critic", "reward_model") else "train.packing"
        yield ProofCase(knob, role, measure.PAD_TOKENS[learns], change="to zero")
    layers, method = "train.recompute_layers", "train.recompute_method"  # the critic has no such keys of its own
    for role, section in LEARNERS.items():
        knob = f"{section}.recompute"
        for kind in ("selective", "full"):
            yield ProofCase(knob, role, measure.ACTIVATIONS.where(kind), "none", kind, HEAD_AGAIN)
        yield ProofCase(layers, role, measure.ACTIVATIONS.where("first layer only or first three"), 1, 3, {knob: "full"})
        two_layers = measure.ACTIVATIONS.where("first two layers only or all layers in pairs")
        yield ProofCase(method, role, two_layers, "block", "uniform", {knob: "full", layers: 2})


def offload(setup: ProofSetup) -> Iterator[ProofCase]:
    for role, section in LEARNERS.items():
        knob, left = f"{section}.offload_activations", measure.BETWEEN_PASSES
        yield ProofCase(knob, role, left, both=HEAD_AGAIN, needs_cuda=REFUSED)
        yield ProofCase(knob, role, left.where("with full recompute"), both={f"{section}.recompute": "full"}, needs_cuda=REFUSED)
        yield ProofCase("train.offload_grads", role, measure.GRADIENTS, change="to zero", needs_cuda=REFUSED)  # also for the critic
    for role, section in ROLES.items():
        if role != "sft":  # there is no phase in which another model works
            # Parameters of all roles together, in a phase in which this role does not work.
            parameters = measure.held("parameters", "values" if role == "actor" else "update-actor")
            both: Settings = {"critic.offload_params": False} if role == "actor" else {}  # the critic follows [train] unless its key is set
            yield ProofCase(f"{section}.offload_params", role, parameters, both=both, needs_cuda=REFUSED)
    # The whole optimizer of a small model fits into the buckets that pass through the device.
    large: dict[str, Settings] = {
        "actor": {"model.path": setup.large_model, "critic.offload_optimizer": False},
        "sft": {"model.path": setup.large_model},
        "critic": {"critic.path": setup.large_scalar_model},
    }
    for role, section in LEARNERS.items():
        states = measure.held("optimizer", "update-actor" if role == "sft" else "advantage")  # at the end of the phase
        yield ProofCase(f"{section}.offload_optimizer", role, states, both=large[role], needs_cuda=REFUSED)


def head(setup: ProofSetup) -> Iterator[ProofCase]:
    fused, chunk, ref_chunk = "train.fused_head", "train.entropy_chunk", "ref.entropy_chunk"
    few = 16 if setup.device.type == "cpu" else 128  # tokens in a chunk
    temporary = measure.HEAD_TEMPORARY.where(f"chunks of {few} tokens")
    for role in ("actor", "sft"):
        yield ProofCase(fused, role, temporary, both={chunk: few})
        yield ProofCase(chunk, role, measure.HEAD_TEMPORARY.where("fused"), "auto", few, {fused: True})
        yield ProofCase(chunk, role, measure.ENTROPY_TEMPORARY.where("not fused"), "auto", few, {fused: False})
    # Without the fused head the reference does not use chunks, and the key is refused.
    yield ProofCase(fused, "ref", temporary, False, {fused: True, ref_chunk: few})
    yield ProofCase(ref_chunk, "ref", measure.HEAD_TEMPORARY, "auto", few)
    with_head = measure.ACTIVATIONS.where("with the head's")
    yield ProofCase("train.entropy_recompute", "actor", with_head.where("fused"), both={fused: True, **HEAD_AGAIN})
    yield ProofCase("train.entropy_recompute", "actor", with_head.where("not fused"), both={fused: False})
    for role in ("actor", "sft"):
        yield ProofCase("train.head_recompute", role, with_head)


def layers(setup: ProofSetup) -> Iterator[ProofCase]:
    on_cuda = setup.device.type == "cuda"
    for role in ROLES:
        in_fused, in_compiled = (measure.KERNELS, measure.KERNELS) if on_cuda else (measure.PRODUCTS, measure.OPERATIONS)
        yield ProofCase("train.fused_layers", role, in_fused)
        yield ProofCase("train.compile", role, in_compiled, both={"train.fused_layers": False}, tolerance=COMPILED)
    for role in LEARNERS if on_cuda else ():
        yield ProofCase("train.fused_layers", role, measure.ACTIVATIONS)
    if not on_cuda:
        yield ProofCase("train.fused_layers", "actor", measure.KERNELS, needs_cuda=NO_KERNELS)
