"""Numbers between host and device, without a wait.

Enters: arrays of the host, or tensors. Leaves: tensors on the device, or what waits for an array. Guaranteed: nothing here waits for what
the device has been given to do: a plain copy would, and the device would have nothing to do by the time the host goes on.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch


def to_device(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """On its way there, behind what runs. On a CPU it is the array itself, if that is in one piece."""
    here = torch.from_numpy(np.ascontiguousarray(numbers))
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


def to_host(tensor: torch.Tensor) -> Callable[[], np.ndarray]:
    """On its way here, behind what the device was given so far. What comes back waits for that, and for nothing given later."""
    if not tensor.is_cuda:
        return tensor.numpy
    here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def wait() -> np.ndarray:
        arrived.synchronize()
        return here.numpy()

    return wait
