"""Proofs of the rollout's knobs: the engine of a run draws the samples, and its passes are counted as they end.

Enters: the world they are proved in. Leaves: proofs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fulltilt.proofs import measure
from fulltilt.proofs.case import Settings
from fulltilt.proofs.record import REFUSED, Number, Proof, Sides, What, fewer, more, none_left, within
from fulltilt.proofs.world import World

SCARCE, AMPLE = 12, 160  # blocks of the KV cache


def proofs(world: World) -> Iterator[Proof]:
    yield from of_memory(world)
    yield from of_passes()
    graphs = "rollout.cuda_graphs"
    yield of(graphs, measure.launches_per_decode_step, Sides.switch(graphs), less_than_half, needs_cuda=REFUSED)
    for what in (measure.lines, measure.rollout_metrics):
        yield of("rollout.log_stats", what, Sides.switch("rollout.log_stats"), more)
    engines = Sides({"rollout.engine": "vllm"}, {"rollout.engine": "native"})
    yield of("rollout.engine", measure.native_samples, engines, more, refuses_off=True)


def of_memory(world: World) -> Iterator[Proof]:
    scarce, ample = (blocks * world.block_bytes() for blocks in (SCARCE, AMPLE))
    in_bytes = Sides({"rollout.kv_bytes": scarce}, {"rollout.kv_bytes": ample})
    fraction = "rollout.memory_fraction"
    for knob, sides in (
        ("rollout.kv_bytes", in_bytes),
        (fraction, Sides({fraction: world.share(scarce)}, {fraction: world.share(ample)})),
    ):
        yield of(knob, measure.kv_cache_bytes, sides, more)
        yield of(knob, measure.most_running, sides, more)
    # That samples end as they would have without is what equal gradients say. Small blocks, so that there is one to ask for often.
    yield of("rollout.preemption", measure.preemptions, Sides(in_bytes.on, in_bytes.off, {"rollout.block_tokens": 4}), only_on)
    release = "rollout.release_memory"
    yield of(release, measure.held("kv", "update-actor"), Sides.switch(release), none_left)


def of_passes() -> Iterator[Proof]:
    seqs, tokens, chunked, sharing = (f"rollout.{key}" for key in ("max_seqs", "max_batched_tokens", "chunked_prefill", "prefix_sharing"))
    yield of(seqs, measure.most_running, Sides({seqs: 4}, {seqs: 16}), within(4, 16))
    yield of(tokens, measure.largest_prefill, Sides({tokens: 32}, {tokens: 128}), within(32, 128))
    # Without sharing, samples enter one by one, whenever another one ends.
    few_seats: Settings = {seqs: 6, tokens: 16, sharing: False}
    yield of(chunked, measure.longest_stall, Sides.switch(chunked, few_seats), fewer)
    yield of(sharing, measure.prefilled, Sides.switch(sharing), fewer)
    yield of(sharing, measure.hit_rate, Sides.switch(sharing), more)


def of(
    knob: str, what: What, sides: Sides, changes: Callable[[Number, Number], bool], *, needs_cuda: str | None = None,
    refuses_off: bool = False,
) -> Proof:  # fmt: skip
    return Proof(knob, "rollout", what, sides, changes, "rollout", needs_cuda=needs_cuda, refuses_off=refuses_off)


def less_than_half(off: Number, on: Number) -> bool:
    return 2 * on < off


def only_on(off: Number, on: Number) -> bool:
    return off == 0 < on
