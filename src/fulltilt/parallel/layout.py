"""How the numbers of a model's parameters are divided among workers: arithmetic alone, without torch.

Enters: the sizes of parameters, and what workers share out (`Sharding`). Leaves: `Layout` and `RowLayout`, which say what belongs to which
worker. Guaranteed: every number belongs to exactly one worker of a group.
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
    """A parameter, as far as memory and collectives go. Example: ParameterSize((4096, 1024), 2, layer=3)"""

    shape: tuple[int, ...]
    itemsize: int  # bytes of a number; below 4, a master is kept beside it
    learns: bool = True
    layer: int | None = None  # the decoder layer that it belongs to; None: it is outside the layers
    follows: bool = False  # lies directly behind the parameter before it in memory
    scores: bool = False  # belongs to the head of a critic or reward model, which computes in float32 or better
    apart: bool = False  # belongs to experts that workers divide among themselves: those with the same ones share out the rest
    cut: bool = False  # one part of several, which the members of a tensor-parallel group hold

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
        """Bytes of a number of its gradient, master and moments."""
        return max(4, self.itemsize)


Sizes = tuple[ParameterSize, ...]
Shard = Literal["optimizer", "full", "hybrid"]


@dataclass(frozen=True)
class Sharding:
    """What the workers of a run share out among themselves. Example: Sharding("hybrid", workers=16, group=8)"""

    shard: Shard = "optimizer"
    workers: int = 1
    group: int = 1  # workers that together have every number once
    reshard: bool = True  # whether whole parameters of a layer are given back between its forward and its backward pass
    why: str = ""  # the reason for which `auto` chose it, in words
    experts: int = 1  # workers that have every expert once

    @property
    def parameters(self) -> bool:
        """Whether parameters are shared out, and not only the states of the optimizer."""
        return self.shard != "optimizer"

    def among(self, workers: int, experts: int) -> Sharding:
        """The same for a role whose parts other numbers of workers have. One worker shares with nobody, and fewer than a group has are one
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
    counts: Mapping[str, int]  # how many numbers each has
    total: int
    workers: int

    @property
    def stretch(self) -> int:
        """Numbers of each worker, padding included."""
        return self.total // self.workers

    def own(self, name: str, rank: int) -> slice:
        """The range of a parameter's numbers that belongs to a worker; it may be empty."""
        return self.inside(name, rank * self.stretch, (rank + 1) * self.stretch)

    def inside(self, name: str, begin: int, end: int) -> slice:
        """The range of a parameter's numbers between two places of the memory."""
        place, count = self.places[name], self.counts[name]
        start = min(count, max(0, begin - place))
        return slice(start, max(start, min(count, end - place)))


@dataclass(frozen=True)
class RowLayout:
    """Parameters of which each worker has a range of rows, the last workers fewer or none, as FSDP2 shares them out. Worker by worker, the
    ranges of all parameters follow one another, each as long as the first worker's.

    Example, 2 workers: shapes {"a": (3, 4), "b": (5,)}: rows of a worker at most 2 and 3, stretch 8 + 3 = 11.
    """

    shapes: Mapping[str, tuple[int, ...]]
    workers: int
    parts: int = 1  # into which each parameter is cut, all as large as `shapes` or smaller; `workers` share out each of them

    def width(self, name: str) -> int:
        """Numbers of the parameter that the first worker has."""
        rows, *others = self.shapes[name] or (1,)
        return -(-rows // self.workers) * math.prod(others)

    @property
    def stretch(self) -> int:
        return sum(map(self.width, self.shapes))

    def in_a_round(self, itemsize: int) -> int:
        """Numbers of each worker that are exchanged at a time."""
        return max(1, min(self.stretch, EXCHANGE_BYTES // itemsize // (self.workers * self.parts)))

    def rounds(self, itemsize: int) -> int:
        return -(-self.stretch // self.in_a_round(itemsize))

    def bucket_bytes(self, itemsize: int) -> int:
        """Bytes of the buffer for one round."""
        return self.workers * self.parts * self.in_a_round(itemsize) * itemsize

    def gathered_bytes(self, itemsize: int) -> int:
        """Bytes of the collectives of all rounds: over the workers that share out a part, and then over the parts."""
        own, parts = self.workers if self.workers > 1 else 0, self.workers * self.parts if self.parts > 1 else 0
        return self.rounds(itemsize) * self.in_a_round(itemsize) * itemsize * (own + parts)

    def own(self, name: str, rank: int) -> slice:
        """The range of a parameter's numbers that belongs to a worker; it may be empty."""
        width, count = self.width(name), math.prod(self.shapes[name])
        return slice(min(count, rank * width), min(count, (rank + 1) * width))


def places(counts: Iterable[tuple[str, int, bool]], workers: int) -> Layout:
    """One memory for parameters, given by name, count of numbers, and whether each follows the one before it without a gap."""
    found, sizes, end = dict[str, int](), dict[str, int](), 0
    for name, count, follows in counts:
        found[name] = end if follows else padded(end, ALIGN)
        sizes[name], end = count, found[name] + count
    return Layout(found, sizes, padded(end, ALIGN * workers), workers)


def lay_out_sizes(sizes: Sequence[ParameterSize], workers: int) -> dict[int, Layout]:
    """The memories of parameters that learn, by the bytes of a number. Names are places in `sizes`."""
    return {
        itemsize: places([(str(place), own.count, own.follows) for place, own in learning(sizes) if own.itemsize == itemsize], workers)
        for itemsize in dict.fromkeys(own.itemsize for _, own in learning(sizes))
    }


def lay_out_rows(sizes: Sequence[ParameterSize], workers: int) -> RowLayout:
    return RowLayout({str(place): own.shape for place, own in enumerate(sizes)}, workers)


def learning(sizes: Sequence[ParameterSize]) -> list[tuple[int, ParameterSize]]:
    """The parameters that learn, each with its place."""
    return [(place, own) for place, own in enumerate(sizes) if own.learns]


def padded(count: int, unit: int) -> int:
    return -(-count // unit) * unit
