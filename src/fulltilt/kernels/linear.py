"""A matrix product whose rows do not depend on the number of rows.

Enters: x [..., inner], a weight [outer, inner] and perhaps a bias [outer]. Leaves: x @ weight.T + bias.

Guaranteed on CUDA in bfloat16 and float16, without gradients: a row's result has the same bits among few rows as among thousands, so
decoding a handful of samples computes what training computes for the same tokens. cuBLAS does so for many rows, where it adds up the inner
axis in order; for few rows it may split the axis to fill the processors, which rounds differently. So for up to `MANY` rows there are
several ways to multiply (`ways`): cuBLAS as it is, cuBLAS without splitting, cuBLAS with more rows than needed, and fulltilt's kernel in
several sizes. They are tried once for each number of rows and shape of weight: ways that give other bits than many rows are dropped, and
the fastest of the rest is used. The choice changes no number.

In all other cases `linear` is torch's own product. The backward pass uses `add_product`, which adds a product to an existing tensor.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from fulltilt.blame import is_out_of_memory
from fulltilt.footprint import FLUSHED, JUDGES
from fulltilt.kernels.dispatch import jit, runs_triton, tl, triton
from fulltilt.records import RunWarning
from fulltilt.words import first_line

MANY = 1024  # rows above which cuBLAS adds in order (compared up to 16,384)
COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, *range(128, MANY + 1, 64))  # row counts that are tried; others are padded to the next one
PADDED = (448, 512, 768, MANY, JUDGES)  # row counts that fewer rows may be padded to
FEW = 384  # rows up to which fulltilt's kernel can be the fastest
LOW = (torch.bfloat16, torch.float16)
TRIALS = 4  # timed runs of each way
FLUSHES = 6  # repeated writes before a timed run, so that the device is busy for longer than the host needs to start the product


@dataclass(frozen=True)
class Tile:
    """Size of the block that one program of the kernel computes, and its launch options."""

    rows: int
    columns: int
    step: int = 128  # along the inner axis
    stages: int = 6
    warps: int = 4


# Narrow tiles, so that enough programs read the weight at once, and tall ones, which Hopper multiplies faster; wider if there are enough
# programs.
TILES = (Tile(64, 16, stages=8), Tile(16, 32), Tile(64, 32), Tile(128, 64, step=64, stages=5))

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@jit
def _product(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, out: tl.tensor, rows: tl.tensor, outer: tl.tensor, inner: tl.tensor,
    x_row: tl.tensor, weight_row: tl.tensor, out_row: tl.tensor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, BIASED: tl.constexpr,
) -> None:  # fmt: skip
    """Compute some rows and columns of the result in one program, the inner axis from its beginning to its end."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, STEP)
    of_x = x + row[:, None].to(tl.int64) * x_row + place[None, :]
    of_weight = weight + column[:, None].to(tl.int64) * weight_row + place[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, inner, STEP):
        inside = (start + place < inner)[None, :]
        left = tl.load(of_x, mask=(row < rows)[:, None] & inside, other=0.0)
        right = tl.load(of_weight, mask=(column < outer)[:, None] & inside, other=0.0)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
        of_x += STEP
        of_weight += STEP
    if BIASED:
        total += tl.load(bias + column, mask=column < outer, other=0.0).to(tl.float32)[None, :]
    target = out + row[:, None].to(tl.int64) * out_row + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < outer)[None, :])


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    rows = x.numel() // x.shape[-1]
    if not 0 < rows <= MANY or x.dtype not in LOW or torch.is_grad_enabled() or not runs_triton(x):
        return F.linear(x, weight, bias)
    flat = x.reshape(rows, x.shape[-1])
    whole = next(count for count in COUNTS if count >= rows)
    found = way_for(whole, weight, bias)(flat if whole == rows else with_rows(flat, whole), weight, bias)
    return found[:rows].view(*x.shape[:-1], -1)


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left @ right to `total`, in its type and without a temporary of its size."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


# ---- ways --------------------------------------------------------------------------------------------------------------------------

_found: dict[tuple[Any, ...], Product] = {}


def way_for(rows: int, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """Return the fastest way that gives the bits of many rows. Inside a graph capture, or with a weight that is not finite, nothing can be
    tried: then the product is padded to many rows, which is always right."""
    key = (rows, weight.shape, weight.stride(), weight.dtype, weight.device, bias is not None)
    if key not in _found:
        found = None if torch.cuda.is_current_stream_capturing() else fastest(ways(rows), rows, weight, bias)
        if found is None:
            return partial(among, rows=JUDGES)
        _found[key] = found
    return _found[key]


def ways(rows: int) -> dict[str, Product]:
    """Return all ways to multiply, by name. The others are compared with the last one."""
    kernels = {f"kernel {tile}": partial(few_rows, tile=tile) for tile in TILES if rows <= FEW and tile.rows < 2 * max(rows, 64)}
    padded = {f"cuBLAS, {count} rows": partial(among, rows=count) for count in PADDED if count > rows}
    return {"cuBLAS": F.linear, "cuBLAS, not split": unsplit_product, **kernels, **padded}


@torch.no_grad()
def fastest(given: dict[str, Product], rows: int, weight: torch.Tensor, bias: torch.Tensor | None) -> Product | None:
    random = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(JUDGES, weight.shape[1], generator=random, device=weight.device, dtype=weight.dtype)
    expected = F.linear(x, weight, bias)[:rows].clone()
    x = x[:rows].clone()
    if not expected.isfinite().all():
        return None
    times = {}
    for name, way in given.items():
        try:
            if torch.equal(way(x, weight, bias), expected):
                times[name] = milliseconds(lambda way=way: way(x, weight, bias), weight.device)  # type: ignore[misc]
        except Exception as error:  # the compiler failed, or the kernel needs more than this device has: use another way
            if is_out_of_memory(error):
                raise
            words = f"products of few rows cannot run by {name} on this device, and take another way: {first_line(error)}"
            warnings.warn(words, RunWarning, stacklevel=2)
    assert times, "no product gives the same bits twice"
    return given[min(times, key=lambda name: times[name])]


def milliseconds(run: Callable[[], Any], device: torch.device) -> float:
    """Return the device time of a run whose weight was evicted from the cache, without the host's time."""
    flushed, found = torch.empty(FLUSHED, dtype=torch.uint8, device=device), []
    for _ in range(TRIALS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(FLUSHES):
            flushed.zero_()
        begin.record()
        run()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return min(found)


def with_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Pad x to `rows` rows. The added rows stay uninitialised: no row of a product depends on another."""
    wide = x.new_empty(rows, x.shape[1])
    wide[: len(x)].copy_(x)
    return wide


def among(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: int) -> torch.Tensor:
    """Compute the product with `rows` rows."""
    return F.linear(with_rows(x, rows), weight, bias)[: len(x)]


@cache
def take_warning() -> None:
    """Let torch write its warning that choosing a BLAS library is an experimental feature, once and to nowhere. torch writes the line to
    standard error itself, bypassing Python's warnings and the console."""
    library, error = torch.backends.cuda.preferred_blas_library(), os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        torch.backends.cuda.preferred_blas_library("cublaslt")
    finally:
        os.dup2(error, 2)
        os.close(error)
        os.close(nowhere)
        torch.backends.cuda.preferred_blas_library(library)


def unsplit_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute cuBLAS's product without splitting the inner axis. Only cuBLAS's newer interface has this setting."""
    matmul: Any = torch.backends.cuda.matmul
    name = f"allow_{'bf16' if x.dtype == torch.bfloat16 else 'fp16'}_reduced_precision_reduction"
    take_warning()
    library = torch.backends.cuda.preferred_blas_library()
    reduced, split = getattr(matmul, name), getattr(matmul, f"{name}_split_k")
    torch.backends.cuda.preferred_blas_library("cublaslt")
    setattr(matmul, name, (False, False))
    try:
        return F.linear(x, weight, bias)
    finally:
        setattr(matmul, name, (reduced, split))
        torch.backends.cuda.preferred_blas_library(library)


def few_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, tile: Tile = TILES[0]) -> torch.Tensor:
    """Run the kernel, for x [rows, inner] with dense rows."""
    rows, inner = x.shape
    outer = len(weight)
    assert weight.stride(1) == x.stride(1) == 1 and weight.dtype == x.dtype
    out = torch.empty(rows, outer, dtype=x.dtype, device=x.device)
    stages = max(1, min(tile.stages, shared_bytes(x.device) // ((tile.rows + tile.columns) * tile.step * x.element_size())))
    _product[(triton.cdiv(outer, tile.columns), triton.cdiv(rows, tile.rows))](
        x, weight, bias, out, rows, outer, inner, x.stride(0), weight.stride(0), out.stride(0),
        ROWS=tile.rows, COLUMNS=tile.columns, STEP=tile.step, BIASED=bias is not None, num_warps=tile.warps, num_stages=stages,
    )  # fmt: skip
    return out


@cache
def shared_bytes(device: torch.device) -> int:
    """Return the shared memory that one program can use on a multiprocessor."""
    if device.type != "cuda":
        return 227 << 10  # an H100's
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)
