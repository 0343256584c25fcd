"""Parcels between all workers of a run, through main memory, and their contents: rows, numbers for tokens, or a few plain numbers.

Enters: one parcel of bytes for each worker. Leaves: one parcel from each worker. Guaranteed: nothing passes through the driver; the bytes
that this worker sends are counted in `moved`; however large the parcels are, `carried` grows while they are on their way, with every piece.
All workers must call at the same time. The size of a parcel depends on the number of rows and their tokens alone (`traffic` predicts it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fulltilt.parallel.entries import COUNT, KIND, NUMBERS_ENTRY, ROW_ENTRY
from fulltilt.records import PER_TOKEN_FIELDS, Row

ROUND_BYTES = 2**28  # bytes that a worker sends to all others before it waits for theirs; a slow network takes seconds for them


@dataclass(eq=False)
class Parcels:
    rank: int  # this worker's rank in the run
    size: int
    group: dist.ProcessGroup  # a gloo group
    moved: Counter[str] = field(default_factory=Counter)
    carried: int = 0  # number of pieces of parcels exchanged with other workers

    def swap(self, parcels: Sequence[bytes]) -> list[memoryview]:
        """Send a parcel to each worker, in order of rank, and return those received. None may be empty."""
        sent = torch.tensor([len(parcel) for parcel in parcels])
        received = torch.empty_like(sent)
        outgoing = torch.frombuffer(bytearray(b"".join(parcels)), dtype=torch.uint8)
        self.moved[KIND] += sent.nbytes + outgoing.nbytes
        dist.all_to_all_single(received, sent, group=self.group)
        sizes = received.tolist()
        incoming = torch.empty(sum(sizes), dtype=torch.uint8)
        self._exchange_pieces(outgoing.split(sent.tolist()), incoming.split(sizes))
        return [incoming.numpy().data[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]

    def _exchange_pieces(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> None:
        """Send pieces from worker to worker, not in a collective: only the two workers that exchange a parcel know how many pieces it
        has."""
        incoming[self.rank].copy_(outgoing[self.rank])
        piece, others = max(1, ROUND_BYTES // self.size), [other for other in range(self.size) if other != self.rank]
        sent, received = ({other: parcels[other].split(piece) for other in others} for parcels in (outgoing, incoming))
        for number in range(max((len(pieces) for of_all in (sent, received) for pieces in of_all.values()), default=0)):
            coming = [dist.irecv(own[number], group=self.group, group_src=other) for other, own in received.items() if number < len(own)]
            going = [dist.isend(own[number], group=self.group, group_dst=other) for other, own in sent.items() if number < len(own)]
            for work in (*coming, *going):
                assert work
                work.wait()
                self.carried += 1


def pack_rows(rows: Sequence[tuple[int, Row]]) -> bytes:
    """Pack rows, each with a number of the caller's, without their token rewards."""
    table, parts = np.zeros(len(rows), ROW_ENTRY), list[np.ndarray]()
    for place, (index, row) in enumerate(rows):
        fields = [getattr(row, name) for name in PER_TOKEN_FIELDS]
        bits = sum(1 << bit for bit, numbers in enumerate([*fields, row.baseline]) if numbers is not None)
        table[place] = (index, row.tokens, row.group, row.lag, bits, row.reward, row.baseline or 0.0)
        parts += [row.ids.astype("i4"), row.mask.astype("?"), *(numbers.astype("f4") for numbers in fields if numbers is not None)]
    return joined(table, parts)


def unpack_rows(parcel: memoryview) -> list[tuple[int, Row]]:
    table, take = opened(parcel, ROW_ENTRY)
    found = []
    for index, tokens, group, lag, bits, reward, baseline in table.tolist():
        ids, mask = take("i4", tokens).astype(np.int64), take("?", tokens)
        fields: dict[str, Any] = {name: take("f4", tokens) for bit, name in enumerate(PER_TOKEN_FIELDS) if bits >> bit & 1}
        has_baseline = bits >> len(PER_TOKEN_FIELDS) & 1
        found.append((index, Row(ids, mask, group, reward, baseline if has_baseline else None, lag, **fields)))
    return found


def pack_numbers(numbers: Sequence[tuple[int, np.ndarray]]) -> bytes:
    """Pack one number for each token of some rows, each row with a number of the caller's."""
    table = np.array([(index, len(own)) for index, own in numbers], NUMBERS_ENTRY)
    return joined(table, [own.astype("f4") for _, own in numbers])


def unpack_numbers(parcel: memoryview) -> list[tuple[int, np.ndarray]]:
    table, take = opened(parcel, NUMBERS_ENTRY)
    return [(index, take("f4", tokens)) for index, tokens in table.tolist()]


def joined(table: np.ndarray, parts: Sequence[np.ndarray]) -> bytes:
    return b"".join([np.int64(len(table)).tobytes(), table.tobytes(), *(part.tobytes() for part in parts)])


def opened(parcel: memoryview, entry: np.dtype[Any]) -> tuple[np.ndarray, Callable[[str, int], np.ndarray]]:
    """Return the table at the beginning of a parcel, and a function that reads the next numbers of a given type and count after it."""
    (count,) = np.frombuffer(parcel, np.int64, 1)
    table, place = np.frombuffer(parcel, entry, count, COUNT), COUNT + count * entry.itemsize

    def take(kind: str, numbers: int) -> np.ndarray:
        nonlocal place
        found = np.frombuffer(parcel, kind, numbers, place).copy()
        place += found.nbytes
        return found

    return table, take
