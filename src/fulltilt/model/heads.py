"""Log-probs and entropy from hidden states.

Enters: hidden states [R, width], the output embedding, what the model does to its logits, target ids [R], and the options of the head.
Leaves: log-prob and entropy of each row in float32 (float64 when the model is). Guaranteed: the same numbers and gradients with all options
except for the order of sums; logits are accumulated in float32; the gradient of the weight is added to its float32 accumulator
(`main_grad`) where it has one; fused, the largest temporary has the size that `head_bytes` computes, for any number of rows. A head that
does more than scale and cap is refused: `model/verify.py` compares with the model's own logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from fulltilt.kernels.token_logprobs import Call, Entropy, Rows, linear_product, product
from fulltilt.kernels.token_logprobs import token_logprobs as fused_logprobs
from fulltilt.records import UserError

CHUNK_NUMBERS = 1 << 26  # logits at a time where torch reads them, in several passes with temporaries of their size
CUDA_BYTES = 960 << 20  # bytes of logits, and of their gradient in the backward pass, at a time where the kernels read them
TILE = 128  # chunks are whole tiles of a matrix product, where they are that large

# Configuration key -> factor on the logits.
SCALES: dict[str, Callable[[float], float]] = {"logits_scaling": lambda given: 1.0 / given, "logit_scale": lambda given: given}
CAP = "final_logit_softcapping"


@dataclass(frozen=True)
class LogitShape:
    """Logits from the product of hidden states and output embedding: logits = cap * tanh(product * scale / cap)."""

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
        return self.shape.logits(self.product(hidden))

    def product(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits before scale and cap."""
        return product(hidden, self.weight, self.bias)


@dataclass(frozen=True)
class HeadOptions:
    """How log-probs and entropy are computed. No option changes their values."""

    fused: bool = True
    """Compute in chunks of rows, forward and backward. False: logits of all rows in float32, with autograd."""
    entropy_chunk: int | None = None
    """Most rows at a time, of the entropy only if not fused. None: by memory."""
    entropy_recompute: bool = True
    """False: keep what the entropy's backward pass needs from the forward pass: the softmax of all rows; fused, as with `recompute`."""
    recompute: bool = True
    """Fused, the backward pass computes the products of a chunk again. False: those of all rows are kept from the forward pass, in float32,
    which saves one matrix product of four."""

    def __post_init__(self) -> None:
        assert self.entropy_chunk is None or self.entropy_chunk > 0

    def keeps(self, entropy: Entropy) -> bool:
        """Whether the fused head keeps the products of all rows."""
        return not self.recompute or (entropy == "gradient" and not self.entropy_recompute)


def token_logprobs(
    hidden: torch.Tensor,  # [R, width]
    head: Head,
    targets: torch.Tensor,  # int64 [R]
    temperature: float,  # of the sampling
    options: HeadOptions = HeadOptions(),  # noqa: B008 (frozen)
    entropy: Entropy = "gradient",
) -> tuple[torch.Tensor, Any]:
    """Log-prob of each target, differentiable, and the entropy of each row, with or without a gradient; None for entropy "none"."""
    if not options.fused:
        return plain_logprobs(hidden, head, targets, temperature, options, entropy)
    kept = options.keeps(entropy)
    rows = rows_at_once(len(hidden), len(head.weight), options, hidden.dtype, hidden.device.type, kept)
    call = Call(1.0 / temperature, head.shape.scale, head.shape.cap, rows, entropy, kept)
    return fused_logprobs(hidden, head.weight, head.bias, targets, call)


def plain_logprobs(
    hidden: torch.Tensor, head: Head, targets: torch.Tensor, temperature: float, options: HeadOptions, entropy: Entropy
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`token_logprobs` from the logits of all rows."""
    logits = head.shape.logits(linear_product(hidden, head.weight, head.bias)) * (1.0 / temperature)
    logprobs = logits.gather(1, targets[:, None])[:, 0] - torch.logsumexp(logits, dim=-1)
    if entropy == "none":
        return logprobs, None
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy == "gradient"):
        return logprobs, plain_entropy(logits, options)


def plain_entropy(logits: torch.Tensor, options: HeadOptions) -> torch.Tensor:
    again = options.entropy_recompute and torch.is_grad_enabled() and logits.requires_grad
    found = [
        checkpoint(entropy_of, part, use_reentrant=False, preserve_rng_state=False) if again else entropy_of(part)
        for part in logits.split(options.entropy_chunk or max(1, len(logits)))
    ]
    return torch.cat(found)


def entropy_of(logits: torch.Tensor) -> torch.Tensor:
    """The entropy of each row. Beside the logits, autograd keeps only the softmax."""
    return torch.logsumexp(logits, dim=-1) - (logits.softmax(-1) * logits).sum(-1)


# ---- sizes -------------------------------------------------------------------------------------------------------------------------


def rows_at_once(rows: int, vocabulary: int, options: HeadOptions, dtype: torch.dtype, device: str, kept: bool) -> Rows:
    """How many of `rows` rows the fused head handles at a time. `kept`: logits of all rows are kept."""
    most = options.entropy_chunk or max(1, rows)
    if device != "cuda":
        size = even(rows, min(most, CHUNK_NUMBERS // vocabulary))
        return Rows(size, size, size)
    wide = wide_bytes(dtype) * vocabulary
    logits = even(rows, min(most, CUDA_BYTES // (3 * wide)))
    gradient = even(rows, min(most, (CUDA_BYTES - logits * wide) // (dtype.itemsize * vocabulary)))
    if kept:  # two parts, a quarter of the logits' bytes each in bfloat16: with each the weight's float32 gradient is read and written
        gradient = max(gradient, even(rows, min(most, -(-rows // (2 * TILE)) * TILE)))
    return Rows(even(rows, min(most, CUDA_BYTES // wide)), min(logits, gradient), gradient)


def even(rows: int, most: int) -> int:
    """Rows of a chunk, for as few chunks as possible, as equal as tiles allow."""
    tile = TILE if most >= TILE else 1
    most = max(1, most // tile * tile)
    chunks = max(1, -(-rows // most))
    return max(1, min(most, -(-rows // (chunks * tile)) * tile))


def wide_bytes(dtype: torch.dtype) -> int:
    return 8 if dtype == torch.float64 else 4


@dataclass(frozen=True)
class HeadBytes:
    """Bytes of the head's temporaries, without its inputs and their gradients."""

    largest: int  # the largest tensor, forward or backward
    entropy: int  # the largest tensor of the entropy
    saved: int  # kept for the backward pass, beyond what log-probs with `recompute` keep
    peak: int  # most at one time; where torch reads capped logits, one more tensor of the same size


def head_bytes(
    rows: int, vocabulary: int, width: int, options: HeadOptions = HeadOptions(), *,  # noqa: B008 (frozen)
    dtype: torch.dtype = torch.bfloat16, device: str = "cuda", entropy: Entropy = "gradient",
) -> HeadBytes:  # fmt: skip
    """Bytes by formula, for a forward and a backward pass over `rows` trained rows."""
    found = (fused_bytes if options.fused else plain_bytes)(rows, vocabulary, options, dtype, device, entropy)
    if device == "cuda" or dtype.itemsize >= 4:
        return found
    widened = 4 * vocabulary * width  # CPUs have no product with a float32 result: the weight is converted before it
    return replace(found, largest=max(found.largest, widened), peak=found.peak + widened)


def fused_bytes(rows: int, vocabulary: int, options: HeadOptions, dtype: torch.dtype, device: str, entropy: Entropy) -> HeadBytes:
    kept = options.keeps(entropy)
    size = rows_at_once(rows, vocabulary, options, dtype, device, kept)
    wide = wide_bytes(dtype) * vocabulary
    forward, logits, gradient = (min(rows, given) for given in (size.forward, size.logits, size.gradient))
    of_gradient = dtype.itemsize * vocabulary * gradient
    beside = 0 if device == "cuda" else 2 * wide * logits  # the reference holds values and probabilities beside the logits
    largest = max(wide * (gradient if kept else forward), of_gradient)
    return HeadBytes(
        largest,
        entropy=0 if entropy == "none" else largest,
        saved=rows * ((wide if kept else 0) + (wide_bytes(dtype) if entropy == "gradient" else 0)),
        peak=rows * wide + of_gradient + beside if kept else max(wide * forward, wide * logits + of_gradient + beside),
    )


def plain_bytes(rows: int, vocabulary: int, options: HeadOptions, dtype: torch.dtype, device: str, entropy: Entropy) -> HeadBytes:
    wide, differentiable = wide_bytes(dtype) * vocabulary, entropy == "gradient"
    return HeadBytes(
        largest=wide * rows,
        entropy=0 if entropy == "none" else wide * min(rows, options.entropy_chunk or rows),
        saved=rows * (wide + wide_bytes(dtype)) if differentiable and not options.entropy_recompute else 0,
        # In the backward pass of the log-probs: the logits, three tensors on the way to their gradient, and that of the entropy.
        peak=wide * rows * (5 if differentiable else 4),
    )
