"""How the numbers of a model's parameters are divided among workers: arithmetic alone, without torch.

Enters: the sizes of parameters, and how workers shard them (`Sharding`). Leaves: `Layout` and `RowLayout`, which say which numbers belong
to which worker. Guaranteed: every number belongs to exactly one worker of a group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

ALIGN = 64  # numbers: alignment of parameters, 256 bytes of float32
EXCHANGE_BYTES = 64 << 20  # size of the buffer through which whole parameters are gathered


@dataclass(frozen=True)
class ParameterSize:
    """Properties of a parameter that memory and collectives depend on. Example: ParameterSize((4096, 1024), 2, layer=3)"""

    shape: tuple[int, ...]
    itemsize: int  # bytes of a number; below 4, a master is kept beside it
    learns: bool = True
    layer: int | None = None  # its decoder layer; None: it is outside the layers
    follows: bool = False  # follows the previous parameter in memory without a gap
    scores: bool = False  # belongs to the head of a critic or reward model, which computes in float32 or better
    apart: bool = False  # belongs to experts that workers divide among themselves; workers with the same experts shard it
    cut: bool = False  # one of several parts, which the members of a tensor-parallel group hold

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.count * self.itemsize

    @property
    def divided(self) -> bool:
        """Whether members of a group hold parts of it."""
        return self.cut or self.apart

    @property
    def wide(self) -> int:
        """Bytes of one number of its gradient, master and moments."""
        return max(4, self.itemsize)


Sizes = tuple[ParameterSize, ...]
Shard = Literal["optimizer", "full", "hybrid"]


@dataclass(frozen=True)
class Sharding:
    """How the workers of a run shard parameters or optimizer states. Example: Sharding("hybrid", workers=16, group=8)"""

    shard: Shard = "optimizer"
    workers: int = 1
    group: int = 1  # workers that together have every number once
    reshard: bool = True  # whether whole parameters of a layer are freed between its forward and its backward pass
    why: str = ""  # the reason why `auto` chose it, in words
    experts: int = 1  # workers that have every expert once

    @property
    def parameters(self) -> bool:
        """Whether parameters are sharded, and not only the states of the optimizer."""
        return self.shard != "optimizer"

    def among(self, workers: int, experts: int) -> Sharding:
        """Return the sharding for a role with other numbers of workers. One worker shards nothing, and fewer workers than a group are one
        group."""
        if workers == 1:
            return Sharding(experts=experts)
        divides = self.shard == "hybrid" and workers > self.group and workers % self.group == 0
        shard: Shard = "full" if self.shard == "hybrid" and not divides else self.shard
        return replace(self, shard=shard, workers=workers, group=self.group if divides else workers, experts=experts)


UNSHARDED = Sharding()


@dataclass(frozen=True)
class Layout:
    """Parameters of one type in one memory. Example, 2 workers: places {"a": 0, "b": 64}, counts {"a": 10, "b": 100}, total 256."""

    places: Mapping[str, int]  # where each parameter begins
    counts: Mapping[str, int]  # how many numbers each parameter has
    total: int
    workers: int

    @property
    def stretch(self) -> int:
        """How many numbers each worker has, padding included."""
        return self.total // self.workers

    def own(self, name: str, rank: int) -> slice:
        """Return the range of a parameter's numbers that belongs to a worker; it may be empty."""
        return self.inside(name, rank * self.stretch, (rank + 1) * self.stretch)

    def inside(self, name: str, begin: int, end: int) -> slice:
        """Return the range of a parameter's numbers between two places of the memory."""
        place, count = self.places[name], self.counts[name]
        start = min(count, max(0, begin - place))
        return slice(start, max(start, min(count, end - place)))


@dataclass(frozen=True)
class RowLayout:
    """Parameters of which each worker has a range of rows, the last workers fewer or none, as FSDP2 shards them. Worker by worker, the
    ranges of all parameters follow one another, each as long as the first worker's.

    Example, 2 workers: shapes {"a": (3, 4), "b": (5,)}: rows of a worker at most 2 and 3, stretch 8 + 3 = 11.
    """

    shapes: Mapping[str, tuple[int, ...]]
    workers: int
    parts: int = 1  # number of parts of each parameter, each as large as `shapes` or smaller; `workers` shard each part

    def width(self, name: str) -> int:
        """Return how many numbers of the parameter the first worker has."""
        rows, *others = self.shapes[name] or (1,)
        return -(-rows // self.workers) * math.prod(others)

    @property
    def stretch(self) -> int:
        return sum(map(self.width, self.shapes))

    def in_a_round(self, itemsize: int) -> int:
        """Return how many numbers of each worker are exchanged at a time."""
        return max(1, min(self.stretch, EXCHANGE_BYTES // itemsize // (self.workers * self.parts)))

    def rounds(self, itemsize: int) -> int:
        return -(-self.stretch // self.in_a_round(itemsize))

    def bucket_bytes(self, itemsize: int) -> int:
        """Return the bytes of the buffer for one round."""
        return self.workers * self.parts * self.in_a_round(itemsize) * itemsize

    def gathered_bytes(self, itemsize: int) -> int:
        """Return the bytes of the collectives of all rounds: over the workers that shard a part, and then over the parts."""
        own, parts = self.workers if self.workers > 1 else 0, self.workers * self.parts if self.parts > 1 else 0
        return self.rounds(itemsize) * self.in_a_round(itemsize) * itemsize * (own + parts)

    def own(self, name: str, rank: int) -> slice:
        """Return the range of a parameter's numbers that belongs to a worker; it may be empty."""
        width, count = self.width(name), math.prod(self.shapes[name])
        return slice(min(count, rank * width), min(count, (rank + 1) * width))


def places(counts: Iterable[tuple[str, int, bool]], workers: int) -> Layout:
    """Place parameters in one memory. `counts`: name, count of numbers, and whether the parameter follows the previous one without a
    gap."""
    found, sizes, end = dict[str, int](), dict[str, int](), 0
    for name, count, follows in counts:
        found[name] = end if follows else padded(end, ALIGN)
        sizes[name], end = count, found[name] + count
    return Layout(found, sizes, padded(end, ALIGN * workers), workers)


def lay_out_sizes(sizes: Sequence[ParameterSize], workers: int) -> dict[int, Layout]:
    """Return the memories of parameters that learn, by the bytes of a number. Names are places in `sizes`."""
    return {
        itemsize: places([(str(place), own.count, own.follows) for place, own in learning(sizes) if own.itemsize == itemsize], workers)
        for itemsize in dict.fromkeys(own.itemsize for _, own in learning(sizes))
    }


def lay_out_rows(sizes: Sequence[ParameterSize], workers: int) -> RowLayout:
    return RowLayout({str(place): own.shape for place, own in enumerate(sizes)}, workers)


def learning(sizes: Sequence[ParameterSize]) -> list[tuple[int, ParameterSize]]:
    """Return the parameters that learn, each with its place."""
    return [(place, own) for place, own in enumerate(sizes) if own.learns]


def padded(count: int, unit: int) -> int:
    return -(-count // unit) * unit
