"""The workers that train one model together, seen from one of them.

Enters: tensors of this worker. Leaves: sums over all workers and parts gathered from all, in the same memory. Guaranteed: a worker that is
alone calls nothing and changes nothing; every collective call adds its bytes to `moved`, by kind. All workers must make the same calls in
the same order, with tensors of the same size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fulltilt.parallel.progress import PassProgress

# torch 2.13 has new names for these two functions and warns about the old ones, which are the only ones in 2.11.
reduce_into: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def no_bytes() -> Counter[str]:
    """Return a counter that has every kind from the start: a thread that exchanges rows adds to it while another reads it."""
    return Counter(dict.fromkeys(("reduce-scatter", "all-gather", "all-reduce", "all-to-all"), 0))


@dataclass(frozen=True, eq=False)
class Ranks:
    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None  # None: this worker is alone
    beside: int = 1  # number of workers on this machine, this one included
    sharing: int = 1  # number of workers that use this worker's device
    moved: Counter[str] = field(default_factory=no_bytes)  # bytes of this worker's tensors in collectives, by kind
    progress: PassProgress = field(default_factory=PassProgress)  # progress in passes that other workers make at the same time
    before: int = 0  # number of the run's workers that come before these, with other roles
    after: int = 0  # number of the run's workers that come after these
    deadline: timedelta | None = None  # the longest that collectives of their groups may take; None: torch's default
    step: int = 1  # distance between the numbers of neighbours: above 1 in a line of workers
    made: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = field(default_factory=dict)  # groups by purpose and the workers' numbers

    @property
    def number(self) -> int:
        """This worker's number in the run."""
        return self.before + self.rank * self.step

    @property
    def numbers(self) -> list[int]:
        """The numbers of all these workers in the run."""
        return [self.before + place * self.step for place in range(self.size)]

    def line(self, size: int, step: int = 1) -> Ranks:
        """Return this worker's group of `size` workers, each `step` places after the one before it. Only a group's own workers make it,
        because workers with other roles do not come here.

        Example, 8 workers: line(2) is 0 1, 2 3, 4 5 and 6 7; line(2, 2) is 0 2, 1 3, 4 6 and 5 7; line(4, 2) is 0 2 4 6 and 1 3 5 7
        """
        assert self.step == 1 and self.size % (size * step) == 0, f"{self.size} workers in lines of {size}, {step} places apart"
        if size == self.size:
            return self
        first = self.rank - self.rank % (size * step) + self.rank % step
        found = replace(self, rank=(self.rank - first) // step, size=size, group=None, before=self.before + first, step=step)
        if size == 1:
            return found
        return replace(found, group=self.group_of("line", found.numbers))

    def group_of(self, purpose: str, numbers: Sequence[int]) -> dist.ProcessGroup:
        """Return the group of these workers, this one among them, for one purpose. Roles share the group, because each takes memory of the
        device under NCCL, and threads under gloo. Only its own workers make it, all at the same time."""
        if (purpose, tuple(numbers)) not in self.made:
            self.made[purpose, tuple(numbers)] = dist.new_group(list(numbers), timeout=self.deadline, use_local_synchronization=True)
        return self.made[purpose, tuple(numbers)]

    @property
    def of_run(self) -> int:
        """The number of all workers of the run."""
        return self.before + self.size + self.after

    @property
    def within(self) -> int:
        """A number that the size of groups of neighbours must divide, so that each group is on one machine."""
        one_machine = self.before // self.beside == (self.before + self.size - 1) // self.beside
        return self.size if one_machine else math.gcd(self.size, self.beside, self.before)

    @property
    def alone(self) -> bool:
        return self.group is None

    def own(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this worker's stretch of a memory that is cut into one stretch per worker."""
        assert len(flat) % self.size == 0, f"{len(flat)} numbers for {self.size} workers"
        return flat.view(self.size, -1)[self.rank]

    def reduce(self, flat: torch.Tensor) -> None:
        """Sum over all workers. Each gets the sum of its own stretch; the rest of `flat` is meaningless afterwards."""
        if not self.alone:
            self._count("reduce-scatter", flat)
            reduce_into(self.own(flat), flat, group=self.group)

    def gather(self, flat: torch.Tensor) -> None:
        """Fill `flat` with every worker's own stretch."""
        if not self.alone:
            self._count("all-gather", flat)
            gather_into(flat, self.own(flat), group=self.group)

    def sum(self, tensor: torch.Tensor) -> None:
        """Sum over all workers, in place."""
        if not self.alone:
            self._count("all-reduce", tensor)
            dist.all_reduce(tensor, group=self.group)

    def norm(self, own: torch.Tensor) -> float:
        """Return the norm of numbers of which each worker has a part, from the norms of the parts. If it is not finite on one worker, it is
        not finite on any."""
        if self.alone:
            return float(own)
        square = own.double().square()
        self.sum(square)
        return float(square.sqrt())

    def least(self, number: int, device: torch.device) -> int:
        """Return the smallest of all workers' numbers."""
        if self.alone:
            return number
        found = torch.tensor(number, dtype=torch.int64, device=device)
        self._count("all-reduce", found)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self.group)
        return int(found)

    def most(self, number: int, device: torch.device) -> int:
        """Return the largest of all workers' numbers."""
        return -self.least(-number, device)

    def on_host(self) -> Ranks:
        """Return the same workers, for `most_of_each`. They must call this at the same time."""
        if self.group is None or dist.get_backend(self.group) == "gloo":
            return self
        group = dist.new_group(self.numbers, backend="gloo", timeout=self.deadline, use_local_synchronization=True)
        return replace(self, group=group)

    def most_of_each(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest of all workers' numbers at each place. The numbers go through main memory, so no device waits, and their bytes
        are not counted."""
        found = torch.tensor(numbers, dtype=torch.int64)
        if not self.alone:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return [int(each) for each in found]

    def _count(self, kind: str, tensor: torch.Tensor) -> None:
        self.moved[kind] += tensor.nbytes


ALONE = Ranks()
