"""Copies between host and device that do not wait.

Enters: arrays of the host, or tensors. Leaves: tensors on the device, or a function that waits for an array. Guaranteed: starting a copy
does not wait for queued work of the device: a plain copy would, and the device would be idle by the time the host continues.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch


def to_device(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """Start copying an array to the device, behind its queued work. On a CPU it is the array itself, if that is contiguous."""
    here = torch.from_numpy(np.ascontiguousarray(numbers))
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


def to_host(tensor: torch.Tensor) -> Callable[[], np.ndarray]:
    """Start copying a tensor to the host, behind the device's queued work. The returned function waits for that, not for later work."""
    if not tensor.is_cuda:
        return tensor.numpy
    here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def wait() -> np.ndarray:
        arrived.synchronize()
        return here.numpy()

    return wait


def is_shard(tensor: torch.Tensor) -> bool:
    """Whether the tensor is shared out among workers (a DTensor), of which each has a part."""
    return hasattr(tensor, "to_local")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This worker's part of a tensor that is shared out; another tensor itself."""
    found: torch.Tensor = tensor.to_local() if is_shard(tensor) else tensor  # type: ignore[attr-defined]
    return found
