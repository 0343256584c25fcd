"""Log-probs and entropy from hidden states.

Enters: hidden states [R, width], the output embedding, the model's transformation of its logits, target ids [R], and the options of the
head.
Leaves: log-prob and entropy of each row in float32 (float64 when the model is). Guaranteed: the same numbers and gradients with all options
except for the order of sums; logits are accumulated in float32; the gradient of the weight is added to its float32 accumulator
(`main_grad`) if it has one; fused, the largest temporary has the size that `head_bytes` computes, for any number of rows. A head that does
more than scale and cap is refused: `model/verify.py` compares with the model's own logits. If each of several processes holds some rows of
the output embedding (parallel/tensor.py), all of them call this together, with the same rows, and get the same results; only `Head.logits`
and `Head.product`, which tokens are sampled from, gather the logits of all parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fulltilt.footprint import Entropy, HeadOptions, rows_at_once
from fulltilt.kernels.token_logprobs import Call, LinearProduct, TokenLogprobs, VocabularyPart, join_parts, product, within
from fulltilt.records import UserError

VOCABULARY_PART = "vocabulary_part"  # attribute of a model whose output embedding is divided


@dataclass(frozen=True)
class LogitShape:
    """Computes logits from the product of hidden states and output embedding: logits = cap * tanh(product * scale / cap)."""

    scale: float = 1.0
    cap: float | None = None

    @staticmethod
    def of(config: Any) -> LogitShape:
        scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
        cap = getattr(config, "final_logit_softcapping", None)
        return LogitShape(scale, float(cap) if cap else None)

    def logits(self, product: torch.Tensor) -> torch.Tensor:
        scaled = product if self.scale == 1.0 else product * self.scale
        return scaled if self.cap is None else torch.tanh(scaled / self.cap) * self.cap


@dataclass(frozen=True, eq=False)
class Head:
    """The model's output embedding, which may be its input embedding too, and the shape of its logits."""

    weight: torch.Tensor  # [vocabulary, width], or this process's rows of it
    bias: torch.Tensor | None
    shape: LogitShape = LogitShape()
    part: VocabularyPart | None = None  # which rows this process has; None: all

    @staticmethod
    def of(model: torch.nn.Module) -> Head:
        layer = model.get_output_embeddings()  # type: ignore[operator]
        if not isinstance(layer, torch.nn.Linear):
            raise UserError(f"{type(model).__name__} has no linear output layer: it is not a causal language model that fulltilt can train")
        shape = LogitShape.of(model.config.get_text_config())  # type: ignore[union-attr, operator]
        return Head(layer.weight, layer.bias, shape, getattr(model, VOCABULARY_PART, None))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [R, vocabulary], in float32 or better; without gradient if the vocabulary is divided."""
        return self.shape.logits(self.product(hidden))

    def product(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits before scale and cap."""
        own = product(hidden, self.weight, self.bias)
        return own if self.part is None else gather_vocabulary(own, self.part)


def gather_vocabulary(own: torch.Tensor, part: VocabularyPart) -> torch.Tensor:
    """Gather numbers [R, vocabulary] in the order of the vocabulary, from this process's part of them [R, its rows]. Sizes do not depend on
    the process, and nothing waits, so that a CUDA graph can hold the operation."""
    if not len(own):
        return own.new_empty(0, part.vocabulary)
    missing = part.each - own.shape[1]
    found = part.gather(F.pad(own, (0, missing)) if missing else own)  # [parts, R, each]
    return found.transpose(0, 1).flatten(1)[:, : part.vocabulary]


def token_logprobs(
    hidden: torch.Tensor,  # [R, width]
    head: Head,
    targets: torch.Tensor,  # int64 [R]
    temperature: float,  # temperature with which samples were drawn
    options: HeadOptions = HeadOptions(),  # noqa: B008 (frozen)
    entropy: Entropy = "gradient",
) -> tuple[torch.Tensor, Any]:
    """Return the log-prob of each target, differentiable, and the entropy of each row, with or without a gradient; None for entropy
    "none"."""
    if not options.fused:
        return plain_logprobs(hidden, head, targets, temperature, options, entropy)
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, head.weight, head.bias))
    kept = learns and options.keeps(entropy)
    rows = rows_at_once(len(hidden), len(head.weight), options, hidden.dtype.itemsize, hidden.device.type, kept)
    call = Call(1.0 / temperature, head.shape.scale, head.shape.cap, rows, entropy, kept, head.part)
    return TokenLogprobs.apply(hidden, head.weight, head.bias, targets, call)


def plain_logprobs(
    hidden: torch.Tensor, head: Head, targets: torch.Tensor, temperature: float, options: HeadOptions, entropy: Entropy
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute `token_logprobs` from the logits of all rows."""
    logits = head.shape.logits(LinearProduct.apply(hidden, head.weight, head.bias)) * (1.0 / temperature)
    chosen = targets if head.part is None else within(targets - head.part.start, len(head.weight))[0]
    # In this order, so that the backward pass holds one tensor of the logits' size less.
    of_chosen, normaliser = logits.gather(1, chosen[:, None])[:, 0], torch.logsumexp(logits, dim=-1)
    logprobs, found = of_chosen - normaliser, None
    if entropy != "none":
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy == "gradient"):
            found = plain_entropy(logits, options)
    if head.part is not None:
        logprobs, _, found = join_parts(head.part, targets, len(head.weight), logprobs, normaliser, found)
    return logprobs, found


def plain_entropy(logits: torch.Tensor, options: HeadOptions) -> torch.Tensor:
    again = options.entropy_recompute and torch.is_grad_enabled() and logits.requires_grad
    found = [
        checkpoint(entropy_of, part, use_reentrant=False, preserve_rng_state=False) if again else entropy_of(part)
        for part in logits.split(options.entropy_chunk or max(1, len(logits)))
    ]
    return torch.cat(found)


def entropy_of(logits: torch.Tensor) -> torch.Tensor:
    """Return the entropy of each row. Beside the logits, autograd keeps only the softmax."""
    return torch.logsumexp(logits, dim=-1) - (logits.softmax(-1) * logits).sum(-1)
