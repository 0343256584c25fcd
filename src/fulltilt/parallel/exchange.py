"""Exchange of parameters: workers with parts of them send these, through a buffer of bounded size, to workers that need whole parameters or
other parts.

Enters: a layout, which says which worker has which numbers, and the memory that parts come from and go to. Leaves: the memory, filled.
Guaranteed: nothing is allocated after the exchange was made; a collective has numbers of as many parameters as fit into the buffer, and a
parameter that does not fit comes in pieces; numbers are rounded to the type of the buffer, once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fulltilt.parallel.cuts import Cut
from fulltilt.parallel.layout import RowLayout
from fulltilt.parallel.ranks import ALONE, Ranks

Copies = list[tuple[torch.Tensor, torch.Tensor]]  # (target, source)


@dataclass(frozen=True, eq=False)
class PartTransfer:
    """How the members of a group hold a model in parts, and which part a worker needs. By default, all have the whole model and need it."""

    ranks: Ranks = ALONE  # the members that hold all parts
    cuts: Mapping[str, Cut] | None = None  # how the members hold their parts; None: whole
    wanted: Mapping[str, Cut] | None = None  # how the members of another group need the parts; None: whole
    place: int = 0  # this worker's place among the members of that other group

    def overlaps(self, name: str, whole: Sequence[int], rank: int) -> list[list[CommonRange]]:
        """Return, for each dimension of a parameter, the ranges of a member's part that this worker needs."""
        held = ranges_of(self.cuts[name] if self.cuts else None, whole, rank)
        wanted = ranges_of(self.wanted[name] if self.wanted else None, whole, self.place)
        return [list(overlaps(*each)) for each in zip(held, wanted, strict=True)]


WHOLE = PartTransfer()


class Exchange:
    """A gather that can be repeated. `own`: this worker's numbers of each parameter, flat. `targets`: memory for the gathered parameters;
    None: not needed here. `whole`: the shapes of whole parameters, if those of the layout are parts. `memory`: a buffer of bytes, which
    other exchanges may use in turn."""

    def __init__(
        self, layout: RowLayout, ranks: Ranks, dtype: torch.dtype, device: torch.device,
        own: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor] | None,
        division: PartTransfer = WHOLE, whole: Mapping[str, tuple[int, ...]] | None = None, memory: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.shards, self.parts, width = ranks, division.ranks, layout.in_a_round(dtype.itemsize)
        assert (layout.workers, layout.parts) == (ranks.size, self.parts.size)
        needed = layout.bucket_bytes(dtype.itemsize)
        memory = torch.zeros(needed, dtype=torch.uint8, device=device) if memory is None else memory
        self.buffer = memory[:needed].view(dtype)
        rows, begin = self.buffer.view(layout.parts, layout.workers, width), 0
        self.rounds: list[tuple[Copies, Copies]] = [([], []) for _ in range(layout.rounds(dtype.itemsize))]  # in, out
        for name, shape in layout.shapes.items():
            done, each = 0, layout.width(name)
            of_whole = (shape if whole is None else whole[name]) or (1,)
            found = [division.overlaps(name, of_whole, rank) for rank in range(layout.parts)]
            while done < each:
                number, place = divmod(begin + done, width)
                given = rows[..., place : min(width, place + each - done)]
                numbers = own[name][done : done + given.shape[2]]
                into, out = self.rounds[number]
                into.append((given[self.parts.rank, ranks.rank, : len(numbers)], numbers))
                if targets is not None:
                    for rank, common in enumerate(found):
                        part = division.cuts[name].shape(of_whole, rank) if division.cuts else of_whole
                        out += spread(given[rank], done, part, common, targets[name])
                done += given.shape[2]
            begin += each

    @torch.no_grad()
    def gather(self) -> None:
        for into, out in self.rounds:
            copy_all(into)
            self.shards.gather(self.parts.own(self.buffer))
            self.parts.gather(self.buffer)
            copy_all(out)


@dataclass(frozen=True)
class CommonRange:
    """Neighbouring rows, or columns, that two tensors have in common."""

    here: int  # the first of them, counted in one tensor
    there: int  # the first of them, counted in the other tensor
    length: int

    def clip(self, own: range) -> CommonRange | None:
        """Return the part within these rows of the one tensor; None if there is none."""
        start, stop = max(self.here, own.start), min(self.here + self.length, own.stop)
        return CommonRange(start, self.there + start - self.here, stop - start) if start < stop else None


def ranges_of(cut: Cut | None, whole: Sequence[int], rank: int) -> list[list[range]]:
    """Return, for each dimension of a tensor, the ranges that a member holds."""
    return [cut.parts(rank) if cut and cut.dim == dim else [range(length)] for dim, length in enumerate(whole)]


def overlaps(held: Sequence[range], wanted: Sequence[range]) -> Iterator[CommonRange]:
    """Yield the ranges that two tensors have in common, which consist of ranges of a third tensor."""
    here = 0
    for own in held:
        there = 0
        for other in wanted:
            start, stop = max(own.start, other.start), min(own.stop, other.stop)
            if start < stop:
                yield CommonRange(here + start - own.start, there + start - other.start, stop - start)
            there += len(other)
        here += len(own)


def spread(
    numbers: torch.Tensor, first: int, shape: Sequence[int], common: Sequence[Sequence[CommonRange]], target: torch.Tensor
) -> Copies:
    """List copies to a tensor from several workers' numbers. Each worker has a range of a part's rows, all equally many, except that the
    last workers have fewer or none. `numbers`: one row per worker, beginning with the worker's `first`-th number. `shape`: of the part.
    `common`: for each dimension, what the tensor has of the part."""
    target, each, found = target.detach().view(target.shape or (1,)), -(-shape[0] // len(numbers)), Copies()
    own_shape = (each, *shape[1:])
    last, offset = min(first + numbers.shape[1], math.prod(own_shape)), 0
    for box in boxes(own_shape, first, last):
        sizes = list(map(len, box))
        count = math.prod(sizes)
        values = numbers[:, offset : offset + count].unflatten(1, sizes)  # [workers, rows, ...]
        offset += count
        columns = [
            [cut for each_common in of_dim if (cut := each_common.clip(own))] for own, of_dim in zip(box[1:], common[1:], strict=True)
        ]
        for chosen in itertools.product(*columns):
            source, place = values, target
            for dim, (cut, own) in enumerate(zip(chosen, box[1:], strict=True), start=1):
                source = source.narrow(dim + 1, cut.here - own.start, cut.length)
                place = place.narrow(dim, cut.there, cut.length)
            for of_rows in common[0]:
                found += spread_rows(source, box[0], each, of_rows, place)
    return found


def spread_rows(source: torch.Tensor, own: range, each: int, common: CommonRange, target: torch.Tensor) -> Copies:
    """List copies of the rows that the tensor has. `source` [workers, rows, ...]: the same range `own` of each worker's `each` rows.
    Workers whose rows are all needed are one copy."""
    begin, end, found = common.here, common.here + common.length, Copies()
    reached = range(max(0, (begin - own.stop) // each + 1), min(len(source), -(-(end - own.start) // each)))
    full = range(max(reached.start, -(-(begin - own.start) // each)), min(reached.stop, (end - own.stop) // each + 1))
    if len(full):
        start = common.there + full.start * each + own.start - begin
        rows = target.narrow(0, start, (len(full) - 1) * each + len(own))
        strides = rows.stride()
        view = rows.as_strided((len(full), len(own), *rows.shape[1:]), (each * strides[0], *strides), rows.storage_offset())
        found.append((view, source[full.start : full.stop]))
    for worker in (worker for worker in reached if worker not in full):
        shifted = range(worker * each + own.start, worker * each + own.stop)
        if cut := common.clip(shifted):
            found.append((target.narrow(0, cut.there, cut.length), source[worker].narrow(0, cut.here - shifted.start, cut.length)))
    return found


def boxes(shape: Sequence[int], first: int, last: int) -> Iterator[tuple[range, ...]]:
    """Yield the numbers of a tensor from the `first` up to the `last`, in order, as boxes within it.

    Example: boxes((3, 4), 2, 8) -> row 0, columns 2 to 3; row 1, all columns
    """
    if len(shape) == 1:
        yield from [(range(first, last),)] if first < last else []
        return
    row = math.prod(shape[1:])
    full = range(-(-first // row), last // row)
    if full.start > full.stop:  # within one row of the tensor
        yield from ((range(full.stop, full.start), *box) for box in boxes(shape[1:], first - full.stop * row, last - full.stop * row))
        return
    if before := full.start * row - first:
        yield from ((range(full.start - 1, full.start), *box) for box in boxes(shape[1:], row - before, row))
    if len(full):
        yield (full, *map(range, shape[1:]))
    if behind := last - full.stop * row:
        yield from ((range(full.stop, full.stop + 1), *box) for box in boxes(shape[1:], 0, behind))


def length_of(numbers: slice) -> int:
    return int(numbers.stop - numbers.start)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers in the order of memory, so that parameter, gradient and states correspond, whatever their strides."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def copy_all(pairs: Copies) -> None:
    """Copy each (target, source), rounded to the target's type."""
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
