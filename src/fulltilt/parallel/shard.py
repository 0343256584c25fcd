"""Which numbers of a model's parameters belong to which worker, and the memory in which they lie.

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
        """What every worker has in the same `width` numbers of its stretch, `begin` numbers after its start: worker, parameter, range of
        its numbers, and where they are in the `width` numbers."""
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
        places, end = dict[str, int](), 0
        for run in neighbours(own):
            end = padded(end, ALIGN)
            for name in run:
                places[name] = end
                end += own[name].numel()
        found[dtype] = Layout(places, {name: own[name].numel() for name in places}, padded(end, ALIGN * workers), workers)
    return found


def neighbours(parameters: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Parameters that follow one another in one storage without a gap, in runs, in the order of the first of each storage. All workers
    find the same runs: addresses of different storages are never compared."""
    storages: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        storages.setdefault(parameter.untyped_storage().data_ptr(), []).append(name)
    runs: list[list[str]] = []
    for names in storages.values():
        end = -1
        for name in sorted(names, key=lambda name: parameters[name].storage_offset()):
            begin = int(parameters[name].storage_offset())
            if begin == end:
                runs[-1].append(name)
            else:
                runs.append([name])
            end = begin + parameters[name].numel()
    return runs


@torch.no_grad()
def move_into(layout: Layout, parameters: Mapping[str, torch.nn.Parameter]) -> torch.Tensor:
    """Move parameters into one memory as the layout says, each the same parameter as before. Call it before anything keeps an address."""
    sample = parameters[next(iter(layout.places))]
    memory = torch.zeros(layout.total, dtype=sample.dtype, device=sample.device)
    for name, place in layout.places.items():
        parameter = parameters[name]
        assert parameter.is_contiguous(), f"{name} does not lie in the order of its shape, in which workers share it out"
        part = memory[place : place + layout.counts[name]].view(parameter.shape)
        parameter.data = part.copy_(parameter)
    return memory


def padded(count: int, unit: int) -> int:
    return -(-count // unit) * unit
