"""Computations that may run out of memory and are then repeated.

Enters: a computation. Leaves: the report of an out-of-memory error, if there was one. Guaranteed: the error keeps none of the computation's
results alive.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fulltilt.blame import is_out_of_memory
from fulltilt.words import first_line


class MemoryTrial:
    """Encloses a computation that may run out of memory and can be repeated: it ends at the error, and `failure` is the report. The error
    itself is dropped, since its frames would keep alive everything that filled the memory."""

    def __init__(self, may_fail: Callable[[], bool]) -> None:
        self.may_fail = may_fail  # returns whether the computation can be repeated
        self.failure: str | None = None

    def __enter__(self) -> MemoryTrial:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, MemoryError | RuntimeError) or not is_out_of_memory(error) or not self.may_fail():
            return False
        self.failure = first_line(error)
        return True


@dataclass(frozen=True, eq=False)
class RandomState:
    """The states of torch's random generators."""

    host: torch.Tensor
    device: torch.Tensor | None

    @staticmethod
    def of(device: torch.device) -> RandomState:
        return RandomState(torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)


def free_unused(device: torch.device) -> None:
    """Return the memory of unused objects to the device."""
    gc.collect()  # some are in reference cycles
    if device.type == "cuda":
        # Copies of an abandoned pass may still run in other streams, from and to memory that already counts as free.
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
