"""A matrix product whose rows do not depend on how many rows there are.

Enters: x [..., inner], a weight [outer, inner] and perhaps a bias [outer]. Leaves: x @ weight.T + bias.

Guaranteed on CUDA in bfloat16 and float16: a row's result has the same bits among few rows as among thousands, so that decoding a handful
of samples computes what training computes for the same tokens. cuBLAS keeps that promise for many rows (compared at 448 to 16,384: it adds
up the inner axis in order); for few rows and a long inner axis it splits the axis to fill the processors, which rounds differently. There
the kernel below runs, which does not split, or the rows are padded until cuBLAS does not. Elsewhere it is torch's own product; so it is for
q, k, v and for gate and up, whose many outputs fill the processors: none of their shapes was seen to be split.

Figures of one H200, inner sizes 4,864 to 18,944 (docs/performance.md): at 32 rows 1.2 to 1.3 times cuBLAS's time.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from fulltilt.kernels.dispatch import jit, runs_triton, tl, triton

FEW = 128  # rows up to which the kernel is faster than padding
MANY = 448  # rows from which cuBLAS adds in order
LONG = 3072  # inner sizes below are never split
STEP = 128  # of the inner axis at a time


@jit
def _product(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, out: tl.tensor, rows: tl.tensor, outer: tl.tensor, inner: tl.tensor,
    x_row: tl.tensor, weight_row: tl.tensor, out_row: tl.tensor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, BIASED: tl.constexpr,
) -> None:  # fmt: skip
    """One program: some rows and columns of the result, the inner axis from its beginning to its end."""
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


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    rows, inner = x.numel() // x.shape[-1], x.shape[-1]
    plain = rows >= MANY or inner < LONG or x.dtype not in (torch.bfloat16, torch.float16)
    if rows == 0 or plain or torch.is_grad_enabled() or not runs_triton(x):
        return linear_reference(x, weight, bias)
    flat = x.reshape(rows, inner)
    if rows > FEW:
        padded = flat.new_empty(MANY, inner)  # whatever is in the other rows: no row depends on another
        padded[:rows].copy_(flat)
        return F.linear(padded, weight, bias)[:rows].view(*x.shape[:-1], -1)
    return few_rows(flat, weight, bias).view(*x.shape[:-1], -1)


def few_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The kernel, for x [rows, inner] with dense rows."""
    rows, inner = x.shape
    outer = len(weight)
    assert weight.stride(1) == x.stride(1) == 1 and weight.dtype == x.dtype
    out = torch.empty(rows, outer, dtype=x.dtype, device=x.device)
    # Narrow, so that enough programs read the weight at once, and tall, which Hopper multiplies faster. A wide result has programs enough.
    tall, wide, stages = (64, 16, 8) if outer <= 2048 else (16 if rows <= 16 else 64, 32, 6)
    stages = max(1, min(stages, shared_bytes(x.device) // ((tall + wide) * STEP * x.element_size())))
    _product[(triton.cdiv(outer, wide), triton.cdiv(rows, tall))](
        x, weight, bias, out, rows, outer, inner, x.stride(0), weight.stride(0), out.stride(0),
        ROWS=tall, COLUMNS=wide, STEP=STEP, BIASED=bias is not None, num_warps=4, num_stages=stages,
    )  # fmt: skip
    return out


@cache
def shared_bytes(device: torch.device) -> int:
    """Of a processor, for one program."""
    if device.type != "cuda":
        return 227 << 10  # an H100's
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)
