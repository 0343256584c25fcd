"""From hidden states to log-probs and entropy, without keeping logits.

Enters: hidden states [R, width], the output embedding, what the model does to its logits, target ids [R]. Leaves: log-prob and entropy of
each row in float32 (float64 when the model is). Guaranteed: at most `CHUNK_NUMBERS` logits exist at a time, forward and backward; they are
computed with float32 accumulation and results; the gradient of the weight goes straight into its float32 accumulator (`main_grad`) when it
has one. A head that does more than scale and cap is not read wrongly in silence: `model/verify.py` compares with the model's own logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fulltilt.records import UserError

CHUNK_NUMBERS = 1 << 26


# Configuration key -> factor on the logits.
SCALES: dict[str, Callable[[float], float]] = {"logits_scaling": lambda given: 1.0 / given, "logit_scale": lambda given: given}
CAP = "final_logit_softcapping"


@dataclass(frozen=True)
class LogitShape:
    """What a model does to the product of hidden states and output embedding: logits = cap * tanh(product * scale / cap)."""

    scale: float = 1.0
    cap: float | None = None

    @staticmethod
    def of(config: Any) -> LogitShape:
        given = {key: float(getattr(config, key)) for key in SCALES if getattr(config, key, None)}
        scale = math.prod((SCALES[key](number) for key, number in given.items()), start=1.0)
        cap = getattr(config, CAP, None)
        return LogitShape(scale, float(cap) if cap else None)

    def logits(self, product: torch.Tensor) -> torch.Tensor:
        scaled = product if self.scale == 1.0 else product * self.scale
        return scaled if self.cap is None else torch.tanh(scaled / self.cap) * self.cap

    def gradient(self, of_logits: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Of the product, given the gradient of the logits; tanh' = 1 - tanh^2."""
        of_scaled = of_logits if self.cap is None else of_logits * (1.0 - (logits / self.cap).square())
        return of_scaled if self.scale == 1.0 else of_scaled * self.scale


@dataclass(frozen=True, eq=False)
class Head:
    """The model's output embedding, which may be its input embedding too, and the shape of its logits."""

    weight: torch.Tensor  # [vocabulary, width]
    bias: torch.Tensor | None
    shape: LogitShape = LogitShape()

    @staticmethod
    def of(model: torch.nn.Module) -> Head:
        layer = model.get_output_embeddings()  # type: ignore[operator]
        if not isinstance(layer, torch.nn.Linear):
            raise UserError(f"{type(model).__name__} has no linear output layer: it is not a causal language model that fulltilt can train")
        return Head(layer.weight, layer.bias, LogitShape.of(model.config.get_text_config()))  # type: ignore[union-attr, operator]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocabulary], in float32 or better."""
        return project(hidden, self.weight, self.bias, self.shape)

    def product(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same before scale and cap."""
        return project(hidden, self.weight, self.bias, LogitShape())


def project(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, shape: LogitShape) -> torch.Tensor:
    if hidden.dtype in (torch.float32, torch.float64):
        product = hidden @ weight.t()
    elif hidden.is_cuda:
        product = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        product = hidden.float() @ weight.float().t()
    return shape.logits(product if bias is None else product + bias)


def token_logprobs(hidden: torch.Tensor, head: Head, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target and entropy of each row, at the sampling temperature; both differentiable."""
    return _TokenLogprobs.apply(hidden, head.weight, head.bias, targets, 1.0 / temperature, head.shape)  # type: ignore[no-untyped-call]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, sharpness: float,
        shape: LogitShape,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        entropy, normaliser = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for part in chunks(len(hidden), len(weight)):
            logits = project(hidden[part], weight, bias, shape) * sharpness
            normaliser[part] = torch.logsumexp(logits, dim=-1)
            logprobs[part] = logits.gather(1, targets[part, None])[:, 0] - normaliser[part]
            entropy[part] = normaliser[part] - (torch.exp(logits - normaliser[part, None]) * logits).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy)
        ctx.sharpness, ctx.shape = sharpness, shape
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        of_logprobs, of_entropy = grads
        if of_logprobs is None and of_entropy is None:
            return (None,) * 6
        accumulator = getattr(weight, "main_grad", None)
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = torch.zeros_like(weight, dtype=normaliser.dtype) if accumulator is None else accumulator
        of_hidden = torch.empty_like(hidden)
        of_bias = torch.zeros_like(bias, dtype=normaliser.dtype) if bias is not None and ctx.needs_input_grad[2] else None
        for part in chunks(len(hidden), len(weight)):
            logits = project(hidden[part], weight, bias, ctx.shape)
            of_logits = logits_gradient(
                logits * ctx.sharpness - normaliser[part, None], targets[part], entropy[part],
                None if of_logprobs is None else of_logprobs[part], None if of_entropy is None else of_entropy[part],
            ) * ctx.sharpness  # fmt: skip
            of_product = ctx.shape.gradient(of_logits, logits)
            rounded = of_product.to(hidden.dtype)
            of_hidden[part] = rounded @ weight
            if of_weight is not None:
                add_product(of_weight, rounded.t(), hidden[part])
            if of_bias is not None:
                of_bias += of_product.sum(0)
        return (
            of_hidden,
            of_weight.to(weight.dtype) if of_weight is not None and accumulator is None else None,
            None if of_bias is None else of_bias.to(bias.dtype),
            None,
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
