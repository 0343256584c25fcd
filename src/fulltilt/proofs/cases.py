"""Every proof of every knob.

Enters: the setup that the proofs run in. Leaves: the cases, in the order of the ledger. The proof of a knob is one entry here: the knob,
the role, the measurement (`measure.py`), the two settings, and how the measurement must change.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from fulltilt import knobs
from fulltilt.proofs import measure
from fulltilt.proofs.record import REFUSED, ProofCase, Settings, from_zero, more, to_less_than_half, to_zero, within
from fulltilt.proofs.setup import ProofSetup

# Passes of each role through its model, and whether they are part of an update.
PASSES = (
    ("actor", True), ("actor", False), ("sft", True), ("ref", False), ("critic", True), ("critic", False), ("reward_model", False),
)  # fmt: skip
LEARNERS = {"actor": "train", "sft": "train", "critic": "critic"}  # role -> section of its training keys
ROLES = {**LEARNERS, "ref": "ref", "reward_model": "reward_model"}
SCARCE, AMPLE = 12, 160  # blocks of the KV cache
# Where activations of the layers are compared: with "auto" one of the two steps might keep its logits.
HEAD_AGAIN: Settings = {"train.head_recompute": True}
# transformers computes norms in float32 whatever the model's dtype, and a compiler sums them in another order. With norms in float64,
# the difference is 1e-15.
COMPILED = 4e-6
NO_KERNELS = "a CPU launches no kernels: fused layers run torch's own operations there, with merged matrix products"


def all_cases(setup: ProofSetup) -> list[ProofCase]:
    places = {knob.name: place for place, knob in enumerate(knobs.LEDGER)}
    found = chain(rollout(setup), batches(setup), packing_and_recompute(), offload(setup), head(setup), layers(setup))
    return sorted(found, key=lambda case: places[case.knob])


def rollout(setup: ProofSetup) -> Iterator[ProofCase]:
    scarce, ample = (blocks * setup.block_bytes() for blocks in (SCARCE, AMPLE))
    for knob, low, high in (
        ("rollout.kv_bytes", scarce, ample),
        ("rollout.memory_fraction", setup.share_of_free(scarce), setup.share_of_free(ample)),
    ):
        yield ProofCase(knob, "rollout", measure.KV_CACHE, low, high, changes=more)
        yield ProofCase(knob, "rollout", measure.MOST_RUNNING, low, high, changes=more)
    # Equal gradients show that preempted samples end as they would have. Small blocks, so that samples ask for one often.
    much, little = {"rollout.kv_bytes": ample}, {"rollout.kv_bytes": scarce}
    yield ProofCase("rollout.preemption", "rollout", measure.PREEMPTIONS, much, little, {"rollout.block_tokens": 4}, from_zero)
    yield ProofCase("rollout.release_memory", "rollout", measure.held("kv", "update-actor"), changes=to_zero)
    yield ProofCase("rollout.block_tokens", "rollout", measure.MOST_RUNNING, 32, 4, {"rollout.kv_bytes": scarce}, more)
    yield ProofCase("rollout.max_seqs", "rollout", measure.MOST_RUNNING, 4, 16, changes=within(4, 16))
    yield ProofCase("rollout.max_batched_tokens", "rollout", measure.LARGEST_PREFILL, 32, 128, changes=within(32, 128))
    # Without prefix sharing, samples start one by one, whenever another one ends.
    few_seats: Settings = {"rollout.max_seqs": 6, "rollout.max_batched_tokens": 16, "rollout.prefix_sharing": False}
    yield ProofCase("rollout.chunked_prefill", "rollout", measure.LONGEST_STALL, both=few_seats)
    yield ProofCase("rollout.prefix_sharing", "rollout", measure.PREFILLED)
    yield ProofCase("rollout.prefix_sharing", "rollout", measure.HIT_RATE, changes=more)
    yield ProofCase("rollout.cuda_graphs", "rollout", measure.LAUNCHES, changes=to_less_than_half, needs_cuda=REFUSED)
    yield ProofCase("rollout.log_stats", "rollout", measure.LOG_LINES, changes=more)
    yield ProofCase("rollout.log_stats", "rollout", measure.ROLLOUT_METRICS, changes=more)
    yield ProofCase("rollout.engine", "rollout", measure.NATIVE_SAMPLES, "vllm", "native", changes=more, off_is_refused=True)


def batches(setup: ProofSetup) -> Iterator[ProofCase]:
    small, large = setup.longest, 3 * setup.longest
    for role, learns in PASSES:
        section = "actor" if role == "sft" else role
        micro, dynamic = f"{section}.micro_batch", f"{section}.dynamic_batch"
        yield ProofCase(micro, role, measure.MICRO_BATCHES[learns], 1, 3, {dynamic: False})
        yield ProofCase(micro, role, measure.MOST_SAMPLES[learns], 1, 3, {dynamic: False}, within(1, 3))

        budget = f"{section}.token_budget" if learns else f"{section}.forward_token_budget"
        fixed, by_tokens = {dynamic: False, micro: 3}, {dynamic: True, budget: small}
        yield ProofCase(dynamic, role, measure.SAMPLE_COUNTS[learns], fixed, by_tokens, changes=more)
        yield ProofCase(budget, role, measure.MICRO_BATCHES[learns], large, small, changes=more)
        yield ProofCase(budget, role, measure.MOST_TOKENS[learns], large, small, changes=within(large, small))
        if learns:
            yield ProofCase(budget, role, measure.ACTIVATIONS, large, small)


def packing_and_recompute() -> Iterator[ProofCase]:
    for role, learns in PASSES:
        knob = f"{role}.packing" if role in ("critic", "reward_model") else "train.packing"
        yield ProofCase(knob, role, measure.PAD_TOKENS[learns], changes=to_zero)
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
        yield ProofCase("train.offload_grads", role, measure.GRADIENTS, changes=to_zero, needs_cuda=REFUSED)  # also for the critic
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
    few = 16 if setup.device.type == "cpu" else 128  # tokens of a chunk
    temporary = measure.HEAD_TEMPORARY.where(f"chunks of {few} tokens")
    for role in ("actor", "sft"):
        yield ProofCase(fused, role, temporary, both={chunk: few})
        yield ProofCase(chunk, role, measure.HEAD_TEMPORARY.where("fused"), "auto", few, {fused: True})
        yield ProofCase(chunk, role, measure.ENTROPY_TEMPORARY.where("not fused"), "auto", few, {fused: False})
    # Without the fused head the reference has no use for a chunk, and the key is refused.
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
