"""Whose mistake an error is, for code that calls a library on the user's files and blames those files for whatever the library raises.

Enters: an exception that was caught. Leaves: whether it says anything about the files, and whether a user wants to see what is behind it.
Guaranteed: neither torch nor a library of models is imported.
"""

from __future__ import annotations

import itertools
import os
import sys
import traceback

# Libraries that do what their caller asks: an error inside one is the caller's.
SERVING = frozenset({"torch", "triton", "numpy", *sys.stdlib_module_names})
# How errors begin of what takes a GPU's memory beside torch's allocator: the driver, when kernels load or graphs are made, and cuBLAS.
BESIDE_ALLOCATOR = ("CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED", "Triton Error [CUDA]: out of memory")
COMPILERS = ("triton.", "torch._dynamo.", "torch._inductor.")


def shows_traceback() -> bool:
    """Whether the user asks for the exceptions behind errors that are otherwise reported in their own words only."""
    return os.environ.get("FULLTILT_TRACEBACK") == "1"


def is_out_of_memory(error: BaseException) -> bool:
    """Where the memory of the host is used up, torch raises a plain RuntimeError; on a GPU, a type of its own, unless the driver or a
    library ran out of it."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return "DefaultCPUAllocator" in str(error) or str(error).startswith(BESIDE_ALLOCATOR)


def is_ours(error: BaseException) -> bool:
    """Whether code of this package failed, and not code that it called with the user's files, or a model that it ran."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if frames and frames[-1].f_code.co_name == "_call_impl":  # a module of a model, whose `forward` does not take these arguments
        return False
    packages = [str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame in frames]
    return [package for package in packages if package not in SERVING][-1:] == [__name__.partition(".")[0]]


def is_of_compiler(error: BaseException) -> bool:
    """Whether a compiler failed, which may lack a tool of this machine or not know its device, on code that is right elsewhere."""
    modules = [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    after_ours = itertools.takewhile(lambda module: not module.startswith("fulltilt."), reversed(modules))
    return any(module.startswith(COMPILERS) for module in after_ours)


def says_nothing(error: BaseException) -> bool:
    """Whether an error says nothing about the user's files, and must be passed on as it is."""
    return is_out_of_memory(error) or is_ours(error)
