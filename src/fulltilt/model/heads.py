"""From hidden states to log-probs and entropy, without keeping logits.

Enters: hidden states [R, width], the output embedding, target ids [R]. Leaves: log-prob and entropy of each row in float32 (float64 when
the model is). Guaranteed: at most `CHUNK_NUMBERS` logits exist at a time, forward and backward; they are computed with float32
accumulation and results; the gradient of the weight goes straight into its float32 accumulator (`main_grad`) when it has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fulltilt.records import UserError

CHUNK_NUMBERS = 1 << 26


@dataclass(frozen=True, eq=False)
class Head:
    """The model's output embedding, which may be its input embedding too."""

    weight: torch.Tensor  # [vocabulary, width]
    bias: torch.Tensor | None

    @staticmethod
    def of(model: torch.nn.Module) -> Head:
        layer = model.get_output_embeddings()  # type: ignore[operator]
        if not isinstance(layer, torch.nn.Linear):
            raise UserError(f"{type(model).__name__} has no linear output layer: it is not a causal language model that fulltilt can train")
        return Head(layer.weight, layer.bias)


def project(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Logits [R, vocabulary], in float32 or better."""
    if hidden.dtype in (torch.float32, torch.float64):
        logits = hidden @ weight.t()
    elif hidden.is_cuda:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = hidden.float() @ weight.float().t()
    return logits if bias is None else logits + bias


def token_logprobs(hidden: torch.Tensor, head: Head, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target and entropy of each row, at the sampling temperature; both differentiable."""
    return _TokenLogprobs.apply(hidden, head.weight, head.bias, targets, 1.0 / temperature)  # type: ignore[no-untyped-call]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, sharpness: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        entropy, normaliser = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for part in chunks(len(hidden), len(weight)):
            logits = project(hidden[part], weight, bias) * sharpness
            normaliser[part] = torch.logsumexp(logits, dim=-1)
            logprobs[part] = logits.gather(1, targets[part, None])[:, 0] - normaliser[part]
            entropy[part] = normaliser[part] - (torch.exp(logits - normaliser[part, None]) * logits).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy)
        ctx.sharpness = sharpness
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        of_logprobs, of_entropy = grads
        if of_logprobs is None and of_entropy is None:
            return None, None, None, None, None
        accumulator = getattr(weight, "main_grad", None)
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = torch.zeros_like(weight, dtype=normaliser.dtype) if accumulator is None else accumulator
        of_hidden = torch.empty_like(hidden)
        of_bias = torch.zeros_like(bias, dtype=normaliser.dtype) if bias is not None and ctx.needs_input_grad[2] else None
        for part in chunks(len(hidden), len(weight)):
            logits = project(hidden[part], weight, bias) * ctx.sharpness
            of_logits = logits_gradient(
                logits - normaliser[part, None], targets[part], entropy[part],
                None if of_logprobs is None else of_logprobs[part], None if of_entropy is None else of_entropy[part],
            ) * ctx.sharpness  # fmt: skip
            rounded = of_logits.to(hidden.dtype)
            of_hidden[part] = rounded @ weight
            if of_weight is not None:
                add_product(of_weight, rounded.t(), hidden[part])
            if of_bias is not None:
                of_bias += of_logits.sum(0)
        return (
            of_hidden,
            of_weight.to(weight.dtype) if of_weight is not None and accumulator is None else None,
            None if of_bias is None else of_bias.to(bias.dtype),
            None,
            None,
        )


def logits_gradient(
    log_p: torch.Tensor, targets: torch.Tensor, entropy: torch.Tensor, of_logprobs: torch.Tensor | None, of_entropy: torch.Tensor | None
) -> torch.Tensor:
    """d log p[target] / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy)."""
    p = log_p.exp()
    gradient = torch.zeros_like(p)
    if of_entropy is not None:
        gradient -= of_entropy[:, None] * p * (log_p + entropy[:, None])
    if of_logprobs is not None:
        gradient -= of_logprobs[:, None] * p
        gradient[torch.arange(len(targets), device=targets.device), targets] += of_logprobs
    return gradient


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right, accumulated in total's type."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        total += torch.mm(left, right, out_dtype=total.dtype)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def chunks(rows: int, vocabulary: int) -> list[slice]:
    size = max(1, CHUNK_NUMBERS // vocabulary)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
