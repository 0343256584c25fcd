"""Copies between host and device that do not wait.

Enters: arrays of the host, or tensors. Leaves: tensors on the device, or a function that waits for an array. Guaranteed: starting a copy
does not wait for the device's queued work: a plain copy would, and the device would be idle before the host continues.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from fulltilt.blame import is_out_of_memory
from fulltilt.records import UserError
from fulltilt.words import first_line, in_bytes


def to_device(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """Start copying an array to the device, behind its queued work. On a CPU the tensor shares the array's memory, if that is
    contiguous."""
    here = torch.from_numpy(np.ascontiguousarray(numbers))
    return pinned(here.pin_memory, here.nbytes).to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


def to_host(tensor: torch.Tensor) -> Callable[[], np.ndarray]:
    """Start copying a tensor to the host, behind the device's queued work. The returned function waits for the copy, not for later work."""
    if not tensor.is_cuda:
        return tensor.numpy
    here = pinned(partial(torch.empty, tensor.shape, dtype=tensor.dtype, pin_memory=True), tensor.nbytes)
    here.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def wait() -> np.ndarray:
        arrived.synchronize()
        return here.numpy()

    return wait


def pinned(make: Callable[[], torch.Tensor], count: int) -> torch.Tensor:
    """Return the result of `make`, which has `count` bytes of pinned memory. A driver that cannot pin them reports that the GPU's memory is
    used up, although less work on the GPU would not help: that error is replaced."""
    try:
        return make()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"{in_bytes(count)} of main memory could not be pinned for a copy between host and GPU: {first_line(error)}. Free main memory, "
            "or raise the limit on locked memory (ulimit -l; `fulltilt doctor` shows it)"
        ) from error


def is_shard(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is sharded among workers (a DTensor), each of which has a part."""
    return hasattr(tensor, "to_local")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this worker's part of a sharded tensor; any other tensor unchanged."""
    found: torch.Tensor = tensor.to_local() if is_shard(tensor) else tensor  # type: ignore[attr-defined]
    return found
