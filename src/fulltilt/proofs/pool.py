"""Processes of workers that are kept from step to step, so that steps with several workers import their packages only once.

Enters: the orders for each step's workers. Leaves: the hosts of these workers.
Guaranteed: workers are made by the code of a run, one in each process, and join torch.distributed again for each step; nothing of an
earlier step's workers is left when the next ones are made. If one has failed, the next step gets new processes.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fulltilt.cluster.assembly import torch_as_it_was
from fulltilt.cluster.hosts import WorkerCall, WorkerError
from fulltilt.cluster.making import WorkerOrder
from fulltilt.cluster.processes import Processes
from fulltilt.cluster.service import Seat, ServedWorker, Service, own_interface, seats_here, serve, tell

MEMBER = "fulltilt.proofs.pool:Member"


class Member:
    """The content of one of the processes: the worker of the current step, which answers all other calls."""

    def __init__(self, number: int) -> None:
        self._worker: ServedWorker | None = None
        self._until_dropped = contextlib.ExitStack()

    def make(self, service: Service, seat: Seat) -> Generator[str, None, None]:
        self._until_dropped.enter_context(torch_as_it_was())
        self._until_dropped.callback(leave_group)
        self._worker = yield from serve(service, seat)

    def drop(self) -> None:
        """Close the worker, and free everything that it has allocated."""
        if self._worker:
            self._worker.close()
        self._worker = None
        gc.collect()
        self._until_dropped.close()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)


def leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class Pool:
    def __init__(self) -> None:
        self.size = 1  # number of processes to start when the first are needed; more, if a step needs more
        self._processes: Processes | None = None

    def start(self, order: WorkerOrder, device: torch.device, size: int) -> PoolWorkers:
        """Do the same as `start_processes` for a run, in the first processes of the pool."""
        if self._processes and (self._processes.closed or self._processes.size < size):
            self.close()
        if self._processes is None:
            numbers = range(max(size, self.size))
            self._processes = Processes(numbers, MEMBER, environment=own_interface(), on_stall=tell)
        seats, options = seats_here(order, device, size)
        return PoolWorkers(self._processes, list(zip(options["common"], seats, strict=True)), kept=options["kept"])

    def close(self) -> None:
        if self._processes:
            self._processes.close()
            self._processes = None


class PoolWorkers:
    """The workers of a step, as its hosts."""

    worker = None

    def __init__(self, processes: Processes, made_from: Sequence[tuple[Service, Seat]], kept: Any) -> None:
        self.size, self._processes, self._kept = len(made_from), processes, kept
        self.start("make", made_from, what="loading").results()

    @property
    def sent_bytes(self) -> int:
        return self._processes.sent_bytes

    @property
    def received_bytes(self) -> int:
        return self._processes.received_bytes

    def start(
        self, method: str, args: Sequence[tuple[Any, ...] | None], *, what: str, aside: bool = False, together: bool = False
    ) -> TeamCall:
        others = [None] * (self._processes.size - self.size)
        call = self._processes.start(method, [*args, *others], what=what, aside=aside, together=together)
        return TeamCall(call, self.size)

    def keep_output(self, folder: Path) -> None:
        """Do nothing: the processes do not belong to one run."""

    def hurry(self) -> None:
        self._processes.hurry()

    def close(self) -> None:
        """Drop the workers; the processes stay."""
        if not self._processes.closed:
            with contextlib.suppress(WorkerError):  # the next step gets new processes
                self.start("drop", [()] * self.size, what="the end").results()


class TeamCall:
    """A call to the first `size` workers of a host."""

    def __init__(self, call: WorkerCall, size: int) -> None:
        self._call, self._size = call, size

    def items(self) -> Iterator[tuple[int, Any]]:
        return self._call.items()

    def tell(self, rank: int, message: Any) -> None:
        self._call.tell(rank, message)

    def results(self) -> list[Any]:
        return self._call.results()[: self._size]

    def cancel(self) -> None:
        self._call.cancel()

    @property
    def seconds(self) -> float:
        return self._call.seconds
