"""Which numbers of a model's parameters belong to which worker.

Enters: parameters, and how many workers share them out. Leaves: for each type of number, a `Layout`: one memory with all parameters of that
type one after another, cut into as many equal stretches as there are workers. Guaranteed: every number belongs to exactly one worker;
parameters that are neighbours in their own memory, such as layers that run as one product, are neighbours here too; the layout depends on
the parameters alone and, except for padding at its end, not on the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

ALIGN = 64  # numbers: alignment of parameters, 256 bytes of float32


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

    def pieces(self, begin: int, width: int) -> Iterator[tuple[int, str, slice, int]]:
        """What every worker has in the same `width` numbers of its stretch, `begin` numbers after its start: worker, parameter, range of
        its numbers, and where they are in the `width` numbers."""
        for rank in range(self.workers):
            first = rank * self.stretch + begin
            for name, place in self.places.items():
                found = self.inside(name, first, min(first + width, (rank + 1) * self.stretch))
                if found.start < found.stop:
                    yield rank, name, found, place + found.start - first


@dataclass(frozen=True)
class RowLayout:
    """Parameters of which each worker has a range of rows, the last workers fewer or none, as FSDP2 shares them out. Worker by worker, the
    ranges of all parameters follow one another, each as long as the first worker's.

    Example, 2 workers: shapes {"a": (3, 4), "b": (5,)}: rows of a worker at most 2 and 3, stretch 8 + 3 = 11.
    """

    shapes: Mapping[str, tuple[int, ...]]
    workers: int

    def width(self, name: str) -> int:
        """Numbers of the parameter that the first worker has."""
        rows, *others = self.shapes[name] or (1,)
        return -(-rows // self.workers) * math.prod(others)

    @property
    def stretch(self) -> int:
        return sum(map(self.width, self.shapes))

    def own(self, name: str, rank: int) -> slice:
        """The range of a parameter's numbers that belongs to a worker; it may be empty."""
        width, count = self.width(name), math.prod(self.shapes[name])
        return slice(min(count, rank * width), min(count, (rank + 1) * width))

    def pieces(self, begin: int, width: int) -> Iterator[tuple[int, str, slice, int]]:
        """As `Layout.pieces`."""
        for rank in range(self.workers):
            place = -begin
            for name in self.shapes:
                own, first = self.own(name, rank), max(0, -place)
                found = slice(own.start + first, min(own.stop, own.start + width - place))
                if found.start < found.stop:
                    yield rank, name, found, place + first
                place += self.width(name)


def lay_out(parameters: Mapping[str, torch.Tensor], workers: int) -> dict[torch.dtype, Layout]:
    found: dict[torch.dtype, Layout] = {}
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters.values()):
        own = {name: parameter for name, parameter in parameters.items() if parameter.dtype == dtype}
        first: dict[int, int] = {}
        for place, parameter in enumerate(own.values()):
            first.setdefault(parameter.untyped_storage().data_ptr(), place)
        order = sorted(own, key=lambda name: (first[own[name].untyped_storage().data_ptr()], own[name].storage_offset()))
        places, end = {}, 0
        for name in order:
            places[name] = end
            end += padded(own[name].numel(), ALIGN)
        found[dtype] = Layout(places, {name: own[name].numel() for name in order}, padded(end, ALIGN * workers), workers)
    return found


def padded(count: int, unit: int) -> int:
    return -(-count // unit) * unit
