"""What the collectives of a step cost at sizes that nobody can try here: the tables of docs/scaling.md.

Enters: nothing; devices and the work of a step are in this file. Leaves: two tables on standard output, in Markdown. Guaranteed: bytes are
those of parallel/traffic.py and parallel/holdings.py, which equal what is counted; what `auto` chooses is that of the plan; arithmetic is
that of batching/cost.py; nothing is loaded or measured.

    python -m fulltilt.bench.scaling
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from fulltilt.batching.cost import ModelSize, update_flops
from fulltilt.bench.roofline import DEVICES
from fulltilt.parallel.holdings import held_bytes, passing_bytes, twin_bytes
from fulltilt.parallel.layout import UNSHARDED, Sharding, Sizes
from fulltilt.parallel.traffic import WHITENING, Exchange, RoleWork, RowTraffic, Trip, predict, sent_bytes
from fulltilt.plan import TOKEN_BUDGET, Facts, RoleFacts, choose_sharding
from fulltilt.schema import Config
from fulltilt.shape import Shape

MODELS = ("0.5B", "7B", "32B", "70B")
GPUS = (8, 64, 1024)
OF_MACHINE = 8  # GPUs that NVLink joins
NVLINK = 900e9 / 2  # bytes per second that a GPU sends while it receives as many
NETWORK = 400e9 / 8  # bytes per second of one adapter, in each direction
MEMORY = int(141e9)  # bytes of an H200
FLOPS, SHARE = DEVICES[r"\bH200\b"].flops, 0.5  # FLOP/s of the device, and the share of them that passes reach
SAMPLES, PROMPT, RESPONSE, UPDATES = 512 * 16, 512, 1536, 4  # samples of a step, tokens of each, optimizer steps
ITEMSIZE = 2  # bfloat16


@dataclass(frozen=True)
class Scale:
    """One model on some GPUs that share out what `sharding` says."""

    model: str
    sharding: Sharding

    @property
    def gpus(self) -> int:
        return self.sharding.workers

    @cached_property
    def shape(self) -> Shape:
        return Shape.named(self.model)

    @cached_property
    def sizes(self) -> Sizes:
        return role_of(self.shape).known_sizes

    @cached_property
    def held_bytes(self) -> int:
        """Bytes on each GPU in an update, activations aside."""
        twin = twin_bytes(self.sizes, self.sharding) if self.sharding.parameters else 0
        return held_bytes(self.sizes, self.sharding).total + passing_bytes(self.sizes, self.sharding, ITEMSIZE) + twin

    @cached_property
    def compute_s(self) -> float:
        """Forward and backward passes over all samples of a step."""
        lengths = [PROMPT + RESPONSE] * SAMPLES
        flops = update_flops(ModelSize.of_shape(self.shape), lengths, SAMPLES * RESPONSE).total
        return flops / (self.gpus * FLOPS * SHARE)

    @cached_property
    def moved(self) -> Mapping[str, int]:
        tokens = SAMPLES // UPDATES * (PROMPT + RESPONSE)
        passes = -(-tokens // (self.gpus * TOKEN_BUDGET["cuda"]))  # micro-batches in an optimizer step
        return predict([RoleWork(self.sizes, ITEMSIZE, UPDATES, UPDATES * passes, synced=1)], self.sharding)

    def collectives_s(self, adapters: int) -> float:
        """`adapters`: to the network, of each machine. A ring passes through every machine once for each of its adapters, and through all
        GPUs of the machine: the slower of the two links decides. Groups of a machine's GPUs use NVLink; what goes between groups goes
        through a GPU's own part of the adapters."""
        if self.sharding.shard == "hybrid":
            between = {"all-reduce": self.moved["all-reduce"]}
            inside = {kind: count for kind, count in self.moved.items() if kind not in between}
            outside = sent_bytes(between, self.gpus // self.sharding.group) / (adapters * NETWORK / OF_MACHINE)
            return sent_bytes(inside, self.sharding.group) / NVLINK + outside
        speed = NVLINK if self.gpus <= OF_MACHINE else min(NVLINK, adapters * NETWORK)
        return sent_bytes(self.moved, self.gpus) / speed


def role_of(shape: Shape) -> RoleFacts:
    count = sum(shape.parameters_by_kind().values())
    return RoleFacts(shape, ITEMSIZE * count, count, ITEMSIZE)


def scales(model: str, gpus: int) -> Iterator[tuple[Scale, bool]]:
    """The ways to share a model out, and whether `auto` chooses each."""
    config = Config.model_validate({"model": {"path": model}, "data": {"train": "none"}})
    facts = Facts("cuda", MEMORY, 0, {"actor": role_of(Shape.named(model))}, 0, 1, sharding=Sharding(workers=gpus))
    chosen = choose_sharding(config, facts, OF_MACHINE)
    for shard, group in (("optimizer", gpus), ("hybrid", OF_MACHINE), ("full", gpus)):
        if shard != "hybrid" or gpus > OF_MACHINE:
            yield Scale(model, Sharding(shard, gpus, group)), shard == chosen.shard  # type: ignore[arg-type]


def table() -> Iterator[str]:
    heads = ("model", "GPUs", "`train.shard`", "held by each", "moved by each in a step", "passes")
    yield f"| {' | '.join([*heads, 'collectives, 8 adapters', 'collectives, 1 adapter', 'what binds'])} |"
    yield f"|{'---|' * (len(heads) + 3)}"
    for model in MODELS:
        for gpus in GPUS:
            for scale, chosen in scales(model, gpus):
                times = [scale.compute_s, scale.collectives_s(OF_MACHINE), scale.collectives_s(1)]
                cells = [f"{scale.held_bytes / 1e9:.0f} GB", f"{sum(scale.moved.values()) / 1e9:.0f} GB", *map(in_seconds, times)]
                shard = f"**{scale.sharding.shard}**" if chosen else scale.sharding.shard
                yield f"| {' | '.join([model, f'{gpus:,}', shard, *cells, binding(scale)])} |"


def binding(scale: Scale) -> str:
    if scale.held_bytes > MEMORY:
        return "memory: it does not fit"
    compute, fast, slow = scale.compute_s, scale.collectives_s(OF_MACHINE), scale.collectives_s(1)
    if fast > compute:
        return "the network"
    return (
        "arithmetic"
        if slow < compute / 4 or scale.gpus <= OF_MACHINE
        else f"arithmetic; with 1 adapter {'the network' if slow > compute else 'both'}"
    )


def in_seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds < 1 else f"{seconds:.1f} s"


def rows_table() -> Iterator[str]:
    """Bytes of rows, each of which another worker than its holder computes with: old and reference log-probs, PPO's values, updates."""
    yield "| GPUs | samples on each | GRPO | PPO | PPO, 8 adapters | PPO, 1 adapter |"
    yield f"|{'---|' * 6}"
    for gpus in GPUS:
        own = SAMPLES // gpus
        if gpus <= OF_MACHINE:
            yield f"| {gpus} | {own:,} | none | none | | |"
            continue
        trips = [Trip(PROMPT + RESPONSE, rank, (rank + 1) % gpus) for rank in range(gpus) for _ in range(own)]
        passes = [Exchange(trips, returns=True)] * 2
        grpo = RowTraffic(gpus, [*passes, Exchange(trips, fields=4)])
        ppo = RowTraffic(gpus, [*passes, passes[0], Exchange(trips, fields=6), Exchange(trips, fields=6)], WHITENING)
        moved = [predict([], UNSHARDED, each)["all-to-all"] for each in (grpo, ppo)]
        times = [f"{max(moved) / speed * 1e3:.1f} ms" for speed in (NETWORK, NETWORK / OF_MACHINE)]
        yield f"| {' | '.join([f'{gpus:,}', f'{own:,}', *(f'{count / 1e6:.1f} MB' for count in moved), *times])} |"


def main() -> None:
    for line in (*table(), "", *rows_table()):
        print(line)


if __name__ == "__main__":
    main()
