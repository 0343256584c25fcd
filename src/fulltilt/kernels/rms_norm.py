"""Root-mean-square norm, with the addition of a residual before it, in one kernel each way.

Enters: rows [..., H] (views of a wider tensor must be [T, heads, H] with a dense last axis), a weight [H] of the same type, and perhaps a
residual of the rows' shape. Leaves: the normed rows, contiguous; with a residual also the sum, whose norm it is.
Guaranteed: float32 inside and rounding where transformers' Llama rounds (the sum and the normed rows to the type of the rows, before the
weight); a row's result depends on that row and on H alone, not on how many rows there are; the weight's gradient is summed in float32 over
partial sums whose order follows from the shape, so it is the same every time.
"""

from __future__ import annotations

from typing import Any

import torch

from fulltilt.kernels.dispatch import FLOATS, jit, runs_triton, tl, triton

WIDEST = 32768  # a row is held in registers
PROGRAMS = (
    528  # about four programs of the backward pass for each multiprocessor of an H200; constant, so that sums are those of any device
)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> Any:
    """Return the normed rows; with a residual: (normed rows of x + residual, x + residual)."""
    if x.dtype not in FLOATS or not runs_triton(x):
        return rms_norm_reference(x, weight, eps, residual)
    assert weight.dtype == x.dtype and weight.shape == x.shape[-1:] and weight.is_contiguous()
    assert residual is None or (residual.shape == x.shape and residual.dtype == x.dtype)
    assert x.shape[-1] <= WIDEST, f"rows of {x.shape[-1]} numbers do not fit into registers"
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, residual)):
        return _RmsNorm.apply(x, weight, residual, eps)
    normed, total, _ = forward(x, weight, residual, eps, keep_scale=False)
    return normed if residual is None else (normed, total)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> Any:
    """Run the operations of transformers' module, one by one."""
    total = x if residual is None else residual + x
    wide = total.to(torch.float32)
    normed = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return normed if residual is None else (normed, total)


# Not specialised on `rows`: another batch size must not compile another kernel, possibly inside the capture of a graph.
@jit(do_not_specialize=["rows"])
def _forward_kernel(
    x: tl.tensor, residual: tl.tensor, weight: tl.tensor, normed: tl.tensor, total: tl.tensor, scale: tl.tensor, rows: tl.tensor,
    heads: tl.tensor, width: tl.tensor, eps: tl.tensor, x_stride: tl.tensor, x_head_stride: tl.tensor, residual_stride: tl.tensor,
    residual_head_stride: tl.tensor, HAS_RESIDUAL: tl.constexpr, KEEP_SCALE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    token, head = (row // heads)[:, None], (row % heads)[:, None]
    inside = (row[:, None] < rows) & (column < width)
    dense = row[:, None] * width + column
    value = tl.load(x + token * x_stride + head * x_head_stride + column, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        other = tl.load(residual + token * residual_stride + head * residual_head_stride + column, mask=inside, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + dense, value, mask=inside)
    wide = value.to(tl.float32)
    root = tl.rsqrt(tl.sum(wide * wide, axis=1) / width + eps)
    if KEEP_SCALE:
        tl.store(scale + row, root, mask=row < rows)
    wide = (wide * root[:, None]).to(normed.dtype.element_ty).to(tl.float32)
    gain = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(normed + dense, (wide * gain).to(normed.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["rows", "loops"])
def _backward_kernel(
    of_normed: tl.tensor, of_total: tl.tensor, total: tl.tensor, weight: tl.tensor, scale: tl.tensor, of_x: tl.tensor,
    partial: tl.tensor, rows: tl.tensor, heads: tl.tensor, width: tl.tensor, loops: tl.tensor, total_stride: tl.tensor,
    total_head_stride: tl.tensor, HAS_TOTAL: tl.constexpr, OF_WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    gain = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    of_weight = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for step in range(loops):
        row = (program * loops + step) * ROWS + tl.arange(0, ROWS)
        token, head = (row // heads)[:, None], (row % heads)[:, None]
        inside = (row[:, None] < rows) & (column < width)
        dense = row[:, None] * width + column
        value = tl.load(total + token * total_stride + head * total_head_stride + column, mask=inside, other=0.0).to(tl.float32)
        root = tl.load(scale + row, mask=row < rows, other=0.0)[:, None]
        gradient = tl.load(of_normed + dense, mask=inside, other=0.0).to(tl.float32)
        wide = value * root
        of_weight += gradient * wide.to(of_x.dtype.element_ty).to(tl.float32)
        gradient = (gradient * gain).to(of_x.dtype.element_ty).to(tl.float32)
        # d(x r)/dx with r = (mean x^2 + eps)^-1/2:  r (g - x r^2 mean(g x))
        result = root * (gradient - wide * root * (tl.sum(gradient * value, axis=1) / width)[:, None])
        result = result.to(of_x.dtype.element_ty)
        if HAS_TOTAL:
            beside = tl.load(of_total + dense, mask=inside, other=0.0)
            result = (result.to(tl.float32) + beside.to(tl.float32)).to(of_x.dtype.element_ty)
        tl.store(of_x + dense, result, mask=inside)
    if OF_WEIGHT:
        columns = tl.arange(0, BLOCK)
        tl.store(partial + program * width + columns, tl.sum(of_weight, axis=0), mask=columns < width)


def block_shape(width: int) -> tuple[int, int, int]:
    """Return rows and columns of a program's block, and its warps, by the width alone: the order of a row's sum must not depend on the
    batch."""
    block = max(16, triton.next_power_of_2(width))
    return max(1, 1024 // block), block, 4 if block <= 1024 else 8 if block <= 8192 else 16


def strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Return the heads of a token, and the strides of tokens and heads in each of these tensors of one shape."""
    assert all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in tensors), "the last axis must be dense"
    if all(x.is_contiguous() for x in tensors):
        return 1, *(tensors[0].shape[-1], 0) * len(tensors)
    assert tensors[0].ndim == 3, "views must be of tokens and heads"
    return tensors[0].shape[1], *(number for x in tensors for number in x.stride()[:2])


def forward(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float, keep_scale: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the normed rows, the rows before the norm, and the factor of each row if the backward pass needs it."""
    width = x.shape[-1]
    rows = x.numel() // width
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = x if residual is None else torch.empty_like(normed)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device) if keep_scale else None
    if rows:
        other = x if residual is None else residual
        heads, *apart = strides(x, other)
        per_program, block, warps = block_shape(width)
        _forward_kernel[(triton.cdiv(rows, per_program),)](
            x, other, weight, normed, total, normed if scale is None else scale, rows, heads, width, eps, *apart,
            HAS_RESIDUAL=residual is not None, KEEP_SCALE=keep_scale, ROWS=per_program, BLOCK=block, num_warps=warps,
            enable_fp_fusion=False,
        )  # fmt: skip
    return normed, total, scale


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float) -> Any:
        normed, total, scale = forward(x, weight, residual, eps, keep_scale=True)
        ctx.save_for_backward(total, weight, scale)
        ctx.set_materialize_grads(False)
        return normed if residual is None else (normed, total)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_normed: torch.Tensor | None, of_total: torch.Tensor | None = None) -> tuple[torch.Tensor | None, ...]:
        total, weight, scale = ctx.saved_tensors
        if of_normed is None:
            return of_total, None, of_total, None
        of_x = torch.empty_like(total, memory_format=torch.contiguous_format)
        of_normed = of_normed.contiguous()
        of_total = None if of_total is None else of_total.contiguous()
        width, rows = total.shape[-1], len(scale)
        per_program, block, warps = block_shape(width)
        blocks = triton.cdiv(rows, per_program)
        loops = min(64, max(1, blocks // PROGRAMS))
        programs = triton.cdiv(blocks, loops)
        partial = torch.empty(programs, width, dtype=torch.float32, device=total.device) if ctx.needs_input_grad[1] else None
        if rows:
            heads, *apart = strides(total)
            _backward_kernel[(programs,)](
                of_normed, of_normed if of_total is None else of_total, total, weight, scale, of_x, scale if partial is None else partial,
                rows, heads, width, loops, *apart, HAS_TOTAL=of_total is not None, OF_WEIGHT=partial is not None, ROWS=per_program,
                BLOCK=block, num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip
        of_weight = None if partial is None else partial.sum(0).to(weight.dtype)
        of_residual = of_x if ctx.needs_input_grad[2] else None
        return of_x, of_weight, of_residual, None
