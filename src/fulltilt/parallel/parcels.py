"""Parcels between all workers of a run, through main memory.

Enters: one parcel of bytes for each worker. Leaves: one from each. Guaranteed: nothing passes through the driver; the bytes that this
worker sends are counted in `moved`. All workers must call at the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.distributed as dist

KIND = "all-to-all"


@dataclass(frozen=True, eq=False)
class Parcels:
    rank: int  # this worker's among all of the run
    size: int
    group: dist.ProcessGroup  # a gloo group
    moved: Counter[str] = field(default_factory=Counter)

    def swap(self, parcels: Sequence[bytes]) -> list[memoryview]:
        """Send a parcel to each worker, in order of rank. None may be empty."""
        sent = torch.tensor([len(parcel) for parcel in parcels])
        received = torch.empty_like(sent)
        outgoing = torch.frombuffer(bytearray(b"".join(parcels)), dtype=torch.uint8)
        self.moved[KIND] += sent.nbytes + outgoing.nbytes
        dist.all_to_all_single(received, sent, group=self.group)
        sizes = received.tolist()
        incoming = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.all_to_all_single(incoming, outgoing, sizes, sent.tolist(), group=self.group)
        return [incoming.numpy().data[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
