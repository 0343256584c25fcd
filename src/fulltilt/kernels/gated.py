"""The gated product of feed-forward layers in one kernel, with SiLU (Llama) or tanh-approximated GELU (Gemma) as the activation.

Enters: gate and up projections, side by side in one tensor [T, 2 I] or as two tensors [T, I] with a dense last axis. Leaves:
activation(gate) * up [T, I], contiguous. Guaranteed: transformers' rounding, forward and backward: the activation is computed in float32
and rounded to the type of the inputs, then the product.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fulltilt.kernels.dispatch import FLOATS, jit, runs_triton, tl, triton

ACTIVATIONS = ("silu", "gelu_tanh")
BLOCK = 1024  # numbers per program: 16 bytes of bfloat16 for each thread of 4 warps


def gated(gate: torch.Tensor, activation: str = "silu", up: torch.Tensor | None = None) -> torch.Tensor:
    """Return activation(gate) * up [..., I]. If `up` is None, `gate` holds both [..., 2 I], the gate first."""
    assert activation in ACTIVATIONS and (gate.shape[-1] % 2 == 0 if up is None else gate.shape == up.shape and gate.dtype == up.dtype)
    if gate.dtype not in FLOATS or not runs_triton(gate):
        return gated_reference(gate, activation, up)
    if torch.is_grad_enabled() and (gate.requires_grad or (up is not None and up.requires_grad)):
        return _Gated.apply(gate, up, activation)
    first, second = gate.chunk(2, dim=-1) if up is None else (gate, up)
    return forward(first, second, activation)


def gated_reference(gate: torch.Tensor, activation: str = "silu", up: torch.Tensor | None = None) -> torch.Tensor:
    first, second = gate.chunk(2, dim=-1) if up is None else (gate, up)
    return (F.silu(first) if activation == "silu" else F.gelu(first, approximate="tanh")) * second


@jit
def _sigmoid(x: tl.tensor) -> tl.tensor:
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@jit
def _silu(x: tl.tensor) -> tl.tensor:
    return tl.div_rn(x, 1.0 + tl.exp(-x))  # in torch's order; if the exponential overflows, zero is the right result


@jit
def _gelu_angle(x: tl.tensor) -> tl.tensor:
    return 1.5957691216057308 * (x + 0.044715 * x * x * x)  # (1 + tanh z) / 2 = sigmoid(2 z); this is 2 z


@jit
def _forward_kernel(
    gate: tl.tensor, up: tl.tensor, out: tl.tensor, width: tl.tensor, gate_stride: tl.tensor, up_stride: tl.tensor,
    GELU: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    if GELU:  # noqa: SIM108
        active = x * _sigmoid(_gelu_angle(x))
    else:
        active = _silu(x)
    active = active.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + column, (active * y).to(out.dtype.element_ty), mask=inside)


@jit
def _backward_kernel(
    of_out: tl.tensor, gate: tl.tensor, up: tl.tensor, of_gate: tl.tensor, of_up: tl.tensor, width: tl.tensor,
    gate_stride: tl.tensor, up_stride: tl.tensor, of_gate_stride: tl.tensor, of_up_stride: tl.tensor,
    GELU: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    kind = of_gate.dtype.element_ty
    g = tl.load(of_out + row * width + column, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    of_active = (g * y).to(kind).to(tl.float32)
    if GELU:
        share = _sigmoid(_gelu_angle(x))
        active = x * share
        result = of_active * (share + active * (1.0 - share) * 1.5957691216057308 * (1.0 + 3 * 0.044715 * x * x))
    else:
        share = _sigmoid(x)
        active = _silu(x)
        result = of_active * share * (1.0 + x * (1.0 - share))
    active = active.to(kind).to(tl.float32)
    tl.store(of_gate + row * of_gate_stride + column, result.to(kind), mask=inside)
    tl.store(of_up + row * of_up_stride + column, (g * active).to(kind), mask=inside)


def row_stride(x: torch.Tensor) -> int:
    """Return the stride between rows. Leading axes must be as dense as those of a slice of the last one."""
    assert x.stride(-1) == 1 or x.shape[-1] == 1, "the last axis must be dense"
    rows = x.flatten(0, -2)
    assert not x.numel() or rows.data_ptr() == x.data_ptr(), "leading axes do not form rows of one stride"
    return rows.stride(0)


def grid(x: torch.Tensor) -> tuple[int, int]:
    """Return a launch grid with rows on the first axis, the only one that may be longer than 65,535."""
    return x.numel() // x.shape[-1], triton.cdiv(x.shape[-1], BLOCK)


def forward(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        _forward_kernel[grid(out)](
            gate, up, out, out.shape[-1], row_stride(gate), row_stride(up), GELU=activation == "gelu_tanh", BLOCK=BLOCK, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


class _Gated(torch.autograd.Function):
    """The gated product of one tensor that holds both projections, or of two tensors. Gradients have the same form, so that nothing is
    concatenated."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor | None, activation: str) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        first, second = gate.chunk(2, dim=-1) if up is None else (gate, up)
        return forward(first, second, activation)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs = [states for states in ctx.saved_tensors if states is not None]
        gradients = [torch.empty(states.shape, dtype=states.dtype, device=states.device) for states in inputs]
        gate, up = inputs[0].chunk(2, dim=-1) if len(inputs) == 1 else inputs
        of_gate, of_up = gradients[0].chunk(2, dim=-1) if len(inputs) == 1 else gradients
        if of_out.numel():
            _backward_kernel[grid(of_out)](
                of_out.contiguous(), gate, up, of_gate, of_up, of_out.shape[-1], row_stride(gate), row_stride(up), row_stride(of_gate),
                row_stride(of_up), GELU=ctx.activation == "gelu_tanh", BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
        return gradients[0], gradients[1] if len(gradients) == 2 else None, None
