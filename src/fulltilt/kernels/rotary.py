"""Rotary position embedding of queries and keys, both in one kernel.

Enters: queries [T, heads, width] and keys [T, key heads, width] (views of a fused projection are allowed if the last axis is dense), and
the cosines and sines [T, width] of the tokens' positions, all of one type. Leaves: rotated queries and keys, contiguous.
Guaranteed: transformers' half-split form (`apply_rotary_pos_emb` of Llama and similar ones) with its rounding: each product, then the sum.
"""

from __future__ import annotations

from typing import Any

import torch

from fulltilt.kernels.dispatch import FLOATS, jit, runs_triton, tl, triton

HEADS = 8  # heads per program


def rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rotated queries and keys. Cosines and sines get no gradient."""
    if q.dtype not in FLOATS or not runs_triton(q):
        return rotary_reference(q, k, cos, sin)
    assert q.ndim == k.ndim == 3 and cos.ndim == sin.ndim == 2 and q.shape[2] == k.shape[2] == cos.shape[1] == sin.shape[1]
    assert len(q) == len(k) == len(cos) == len(sin) and q.shape[2] % 2 == 0
    assert q.dtype == k.dtype == cos.dtype == sin.dtype
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        return _Rotary.apply(q, k, cos, sin)
    return rotate(q, k, cos, sin, backward=False)


def rotary_reference(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos[:, None, :], sin[:, None, :]

    def turn(x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return (x * cos) + (torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin)

    return turn(q), turn(k)


@jit
def turned(
    x: tl.tensor, inside: tl.tensor, cos: tl.tensor, sin: tl.tensor, columns: tl.tensor, half: tl.tensor, BACKWARD: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the rotated halves of some heads; `x` points to their first halves. Rounds at the same points as transformers: products to the
    type of the cosines before they are added."""
    low, high = tl.load(x, mask=inside, other=0.0).to(tl.float32), tl.load(x + half, mask=inside, other=0.0).to(tl.float32)
    there = columns < half
    low_cos = tl.load(cos + columns, mask=there, other=0.0).to(tl.float32)
    high_cos = tl.load(cos + half + columns, mask=there, other=0.0).to(tl.float32)
    low_sin = tl.load(sin + columns, mask=there, other=0.0).to(tl.float32)
    high_sin = tl.load(sin + half + columns, mask=there, other=0.0).to(tl.float32)
    kind = cos.dtype.element_ty
    # Forward: low' = low cos - high sin, high' = high cos + low sin. The gradient is multiplied by the transpose of that.
    if BACKWARD:
        low_beside = (high * high_sin).to(kind).to(tl.float32)
        high_beside = (-low * low_sin).to(kind).to(tl.float32)
    else:
        low_beside = (-high * low_sin).to(kind).to(tl.float32)
        high_beside = (low * high_sin).to(kind).to(tl.float32)
    low_turned = (low * low_cos).to(kind).to(tl.float32) + low_beside
    high_turned = (high * high_cos).to(kind).to(tl.float32) + high_beside
    return low_turned.to(x.dtype.element_ty), high_turned.to(x.dtype.element_ty)


@jit
def _rotate_heads(
    x: tl.tensor, out: tl.tensor, cos: tl.tensor, sin: tl.tensor, token: tl.tensor, first: tl.tensor, heads: tl.tensor,
    half: tl.tensor, x_stride: tl.tensor, x_head_stride: tl.tensor, cos_stride: tl.tensor, sin_stride: tl.tensor,
    BACKWARD: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
) -> None:  # fmt: skip
    head, column = first + tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (column < half)
    source = x + token * x_stride + head * x_head_stride + column
    low, high = turned(source, inside, cos + token * cos_stride, sin + token * sin_stride, column, half, BACKWARD)
    place = out + (token * heads + head) * (2 * half) + column
    tl.store(place, low, mask=inside)
    tl.store(place + half, high, mask=inside)


@jit
def _rotary_kernel(
    q: tl.tensor, k: tl.tensor, q_out: tl.tensor, k_out: tl.tensor, cos: tl.tensor, sin: tl.tensor, q_heads: tl.tensor,
    k_heads: tl.tensor, half: tl.tensor, q_stride: tl.tensor, q_head_stride: tl.tensor, k_stride: tl.tensor,
    k_head_stride: tl.tensor, cos_stride: tl.tensor, sin_stride: tl.tensor,
    BACKWARD: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks = tl.cdiv(q_heads, HEADS)
    if block < q_blocks:
        _rotate_heads(
            q, q_out, cos, sin, token, block * HEADS, q_heads, half, q_stride, q_head_stride, cos_stride, sin_stride,
            BACKWARD, HEADS, HALF,
        )  # fmt: skip
    else:
        _rotate_heads(
            k, k_out, cos, sin, token, (block - q_blocks) * HEADS, k_heads, half, k_stride, k_head_stride, cos_stride, sin_stride,
            BACKWARD, HEADS, HALF,
        )  # fmt: skip


def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backward: bool) -> tuple[torch.Tensor, torch.Tensor]:
    assert all(states.stride(-1) == 1 for states in (q, k, cos, sin)), "the last axis must be dense"
    q_out, k_out = (torch.empty_like(states, memory_format=torch.contiguous_format) for states in (q, k))
    tokens, q_heads, width = q.shape
    k_heads, half = k.shape[1], width // 2
    if tokens:
        block = max(16, triton.next_power_of_2(half))
        _rotary_kernel[(tokens, triton.cdiv(q_heads, HEADS) + triton.cdiv(k_heads, HEADS))](
            q, k, q_out, k_out, cos, sin, q_heads, k_heads, half, *q.stride()[:2], *k.stride()[:2], cos.stride(0), sin.stride(0),
            BACKWARD=backward, HEADS=HEADS, HALF=block, num_warps=max(1, HEADS * block // 256), enable_fp_fusion=False,
        )  # fmt: skip
    return q_out, k_out


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        return rotate(q, k, cos, sin, backward=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_q: torch.Tensor, of_k: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        of_q, of_k = (states if states.stride(-1) == 1 else states.contiguous() for states in (of_q, of_k))
        return *rotate(of_q, of_k, cos, sin, backward=True), None, None
