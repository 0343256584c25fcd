"""Attribution of errors, for code that calls a library on the user's files and blames those files for whatever the library raises.

Enters: a caught exception. Leaves: whether the files can be its cause, and whether the user wants to see the exceptions behind it.
Guaranteed: neither torch nor a library of models is imported.
"""

from __future__ import annotations

import itertools
import os
import sys
import traceback

# Libraries that act for their caller: an error inside one is the caller's.
SERVING = frozenset({"torch", "triton", "numpy", *sys.stdlib_module_names})
# First words of out-of-memory errors outside torch's allocator: by the driver, when kernels load or graphs are captured, and by cuBLAS.
BESIDE_ALLOCATOR = ("CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED", "Triton Error [CUDA]: out of memory")
COMPILERS = ("triton.", "torch._dynamo.", "torch._inductor.")


def shows_traceback() -> bool:
    """Return whether the user asks for the exceptions behind errors that are otherwise reported in their own words only."""
    return os.environ.get("FULLTILT_TRACEBACK") == "1"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out. On the host, torch raises a plain RuntimeError for this; on a GPU, a type of its own, unless the
    driver or a library ran out of memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return "DefaultCPUAllocator" in str(error) or str(error).startswith(BESIDE_ALLOCATOR)


def is_ours(error: BaseException) -> bool:
    """Return whether code of this package failed, and not code that it called with the user's files, or a model that it ran."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if frames and frames[-1].f_code.co_name == "_call_impl":  # a model's module, whose `forward` does not take these arguments
        return False
    packages = [str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame in frames]
    return [package for package in packages if package not in SERVING][-1:] == [__name__.partition(".")[0]]


def is_of_compiler(error: BaseException) -> bool:
    """Return whether a compiler failed on correct code: it may lack a tool on this machine, or not know its device."""
    modules = [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    after_ours = itertools.takewhile(lambda module: not module.startswith("fulltilt."), reversed(modules))
    return any(module.startswith(COMPILERS) for module in after_ours)


def says_nothing(error: BaseException) -> bool:
    """Return whether an error says nothing about the user's files, and must be passed on unchanged."""
    return is_out_of_memory(error) or is_ours(error)
