"""Proofs of the knobs of training memory and speed, for every role that has them; `sft` is the actor of a run that learns from rows.

Enters: the world they are proved in. Leaves: proofs.
"""

from __future__ import annotations

from collections.abc import Iterator

from fulltilt.proofs import measure
from fulltilt.proofs.batches import PASSES
from fulltilt.proofs.case import Base, Settings
from fulltilt.proofs.record import REFUSED, Proof, Sides, none_left
from fulltilt.proofs.world import World

# The role as records name it, the role that works, the section of its own keys, and the run.
ROLES: tuple[tuple[str, str, str, Base], ...] = (
    ("actor", "actor", "train", "ppo"),
    ("sft", "actor", "train", "sft"),
    ("critic", "critic", "critic", "ppo"),
    ("ref", "ref", "ref", "ppo"),
    ("reward_model", "reward_model", "reward_model", "ppo"),
)
LEARNERS = ROLES[:3]
AGAIN: Settings = {"train.head_recompute": True}  # where other activations are counted, or `auto` would keep logits on one side
# transformers' norms compute in float32 whatever the model does, and a compiler orders their sums anew; with wider ones 1e-15 is left.
COMPILED = 4e-6
NO_KERNELS = "a CPU runs no kernels: there fused layers run torch's own operations, with joined products"


def proofs(world: World) -> Iterator[Proof]:
    yield from of_packing()
    yield from of_recompute()
    yield from of_activations()
    yield from of_parameters()
    yield from of_optimizer(world)
    yield from of_gradients()
    yield from of_head(world)
    yield from of_layers(on_cuda=world.device.type == "cuda")


def of_packing() -> Iterator[Proof]:
    for shown, role, learns, base in PASSES:
        knob = f"{role}.packing" if role in ("critic", "reward_model") else "train.packing"
        yield Proof(knob, shown, measure.pad_tokens(role, learns=learns), Sides.switch(knob), none_left, base)


def of_recompute() -> Iterator[Proof]:
    layers, method = "train.recompute_layers", "train.recompute_method"  # the critic's too
    for shown, role, section, base in LEARNERS:
        knob, kept = f"{section}.recompute", measure.activations(role)
        for kind in ("selective", "full"):
            yield Proof(knob, shown, kept.where(kind), Sides({knob: "none"}, {knob: kind}, AGAIN), base=base)
        some = Sides({layers: 1}, {layers: 3}, {knob: "full"})
        yield Proof(layers, shown, kept.where("of the first layer or the first three"), some, base=base)
        blocks = Sides({method: "block"}, {method: "uniform"}, {knob: "full", layers: 2})
        yield Proof(method, shown, kept.where("of the first two layers or all, two at a time"), blocks, base=base)


def of_activations() -> Iterator[Proof]:
    for shown, role, section, base in LEARNERS:
        knob, left = f"{section}.offload_activations", measure.between_passes(role)
        yield Proof(knob, shown, left, Sides.switch(knob, AGAIN), base=base, needs_cuda=REFUSED)
        both = Sides.switch(knob, {f"{section}.recompute": "full"})
        yield Proof(knob, shown, left.where("with full recompute"), both, base=base, needs_cuda=REFUSED)


def of_parameters() -> Iterator[Proof]:
    """Of all roles together, in a phase in which this one does not work: the others stay."""
    for shown, _, section, base in ROLES:
        if shown != "sft":  # no other role has a model, while which its parameters could be away
            knob, phase = f"{section}.offload_params", "values" if shown == "actor" else "update-actor"
            shared = {"critic.offload_params": False} if shown == "actor" else {}  # or it would do as [train] does
            yield Proof(knob, shown, measure.held("parameters", phase), Sides.switch(knob, shared), base=base, needs_cuda=REFUSED)


def of_optimizer(world: World) -> Iterator[Proof]:
    # A small model's whole optimizer fits into the buckets that pass through the device.
    large: dict[str, Settings] = {
        "actor": {"model.path": world.large_model, "critic.offload_optimizer": False},
        "sft": {"model.path": world.large_model},
        "critic": {"critic.path": world.large_judge},
    }
    for shown, _, section, base in LEARNERS:
        knob, phase = f"{section}.offload_optimizer", "update-actor" if base == "sft" else "advantage"
        what = measure.held("optimizer", phase)  # at the end of the phase
        yield Proof(knob, shown, what, Sides.switch(knob, large[shown]), base=base, needs_cuda=REFUSED)


def of_gradients() -> Iterator[Proof]:
    knob = "train.offload_grads"  # the critic's too
    for shown, role, _, base in LEARNERS:
        yield Proof(knob, shown, measure.gradient_bytes(role), Sides.switch(knob), none_left, base, needs_cuda=REFUSED)


def of_head(world: World) -> Iterator[Proof]:
    few = 16 if world.device.type == "cpu" else 128  # tokens at a time
    chunk, whole = {"train.entropy_chunk": few}, {"train.entropy_chunk": "auto"}
    fused, plain = {"train.fused_head": True}, {"train.fused_head": False}
    for shown, role, _, base in LEARNERS[:2]:
        head, entropy = measure.head_temporary(role), measure.entropy_temporary(role)
        yield Proof("train.fused_head", shown, head.where(f"{few} tokens at a time"), Sides(plain, fused, chunk), base=base)
        yield Proof("train.entropy_chunk", shown, head.where("fused"), Sides(whole, chunk, fused), base=base)
        yield Proof("train.entropy_chunk", shown, entropy.where("not fused"), Sides(whole, chunk, plain), base=base)
    head, of_ref = measure.head_temporary("ref"), {"ref.entropy_chunk": few}
    # Without the fused head the reference role has no use for a chunk, and the key is refused.
    yield Proof("train.fused_head", "ref", head.where(f"{few} tokens at a time"), Sides(plain, {**fused, **of_ref}))
    yield Proof("ref.entropy_chunk", "ref", head, Sides({"ref.entropy_chunk": "auto"}, of_ref))
    for path, shared in (("fused", {**fused, **AGAIN}), ("not fused", plain)):
        kept = measure.activations("actor").where(f"the head's included, {path}")
        yield Proof("train.entropy_recompute", "actor", kept, Sides.switch("train.entropy_recompute", shared))
    for shown, role, _, base in LEARNERS[:2]:
        kept = measure.activations(role).where("the head's included")
        yield Proof("train.head_recompute", shown, kept, Sides.switch("train.head_recompute"), base=base)


def of_layers(*, on_cuda: bool) -> Iterator[Proof]:
    fused, compiled = Sides.switch("train.fused_layers"), Sides.switch("train.compile", {"train.fused_layers": False})
    for shown, role, _, base in ROLES:
        kernels = measure.kernels(role)
        yield Proof("train.fused_layers", shown, kernels if on_cuda else measure.products(role), fused, base=base)
        yield Proof("train.compile", shown, kernels if on_cuda else measure.operations(role), compiled, base=base, exact=COMPILED)
    for shown, role, _, base in LEARNERS if on_cuda else ():
        yield Proof("train.fused_layers", shown, measure.activations(role), fused, base=base)
    if not on_cuda:
        yield Proof("train.fused_layers", "actor", measure.kernels("actor"), fused, needs_cuda=NO_KERNELS)
