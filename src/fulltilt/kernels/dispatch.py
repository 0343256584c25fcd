"""The choice between an op's Triton kernel and its torch reference. This is the only file that imports triton.

Enters: a tensor of the call. Leaves: whether the kernel runs. Guaranteed: CUDA tensors run the compiled kernel, or raise with the remedy;
tensors elsewhere run the reference, except CPU tensors while `interpreting` is set, which run the kernel in Triton's interpreter.

Triton reads TRITON_INTERPRET when a kernel is defined, so a process has either compiled or interpreted kernels. If neither can run, triton
is not imported and `jit` leaves functions unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")  # as triton reads it
try:
    if not (INTERPRETED or torch.backends.cuda.is_built()):
        raise ImportError("nothing here could run a kernel")
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # types that kernels of layers take; float64 runs the reference
interpreting: ContextVar[bool] = ContextVar("interpreting", default=False)  # set by tests; a thousand times slower than the references


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Apply triton.jit, with or without options. Without triton it returns the function unchanged: it is never called then."""
    if triton is None:
        return function or (lambda undecorated: undecorated)
    return triton.jit(function, **options)


def runs_triton(x: torch.Tensor) -> bool:
    """Return whether an op on this tensor launches its kernel."""
    if not x.is_cuda:
        return x.is_cpu and interpreting.get()
    if triton is None:
        raise RuntimeError('kernels on CUDA need triton, which is not installed: pip install "fulltilt[gpu]"')
    if INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET is set, so kernels are interpreted and cannot read CUDA memory: unset it, or run on CPU")
    return True
