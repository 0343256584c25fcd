"""The arithmetic that an update must do, and the share of a device's arithmetic that it gets.

Enters: a model's weights and attention layers, the lengths of samples, how many of their tokens are trained. Leaves: FLOPs of one forward
and backward pass. Guaranteed: the formula of docs/bench.md and nothing else, so that no way of computing changes the number:

    3 x (2 x weights of the layers x tokens + 2 x weights of the head x trained tokens + 4 x query width x pairs, over all layers)

Forward once, backward twice: a product has a gradient for each of its two factors. Each weight counts once, a tied one for its use as the
head; the input embedding is looked up and not multiplied. A pair is a token and one that it may look at, itself included: about half the
square of a sample's length. Pads, recomputed parts, biases, norms and activation functions count nothing. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fulltilt.model.experts import used_by_a_token

PASSES = 3  # forward, gradient of what enters, gradient of the weights

# Families that verl counts with its formula for dense models.
VERL_DENSE = frozenset({"llama", "mistral", "qwen2", "qwen3", "seed_oss"})


@dataclass(frozen=True)
class ModelSize:
    """What tokens are multiplied with."""

    layer_weights: int  # by every token; of experts those that a token is sent to
    head_weights: int  # by every trained token
    attention: tuple[tuple[int, int | None], ...]  # for each layer, query heads times their width, and the window or None


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one forward and backward pass, by part."""

    layers: int  # the linear layers, all tokens
    attention: int  # scores and weighted sums
    head: int  # trained tokens only

    @property
    def total(self) -> int:
        return self.layers + self.attention + self.head


def pairs(length: int, window: int | None = None) -> int:
    """Pairs of tokens that attend: each with itself and those before it in its window. Example: 4 tokens -> 1 + 2 + 3 + 4 = 10"""
    looks = length if window is None else min(length, window)
    return looks * (looks + 1) // 2 + (length - looks) * looks


def update_flops(size: ModelSize, lengths: Sequence[int], trained: int) -> Flops:
    """`lengths`: tokens of each sample, prompt and response, pads left out. `trained`: tokens of all of them that the head is run for."""
    seen = {window: sum(pairs(length, window) for length in lengths) for window in {window for _, window in size.attention}}
    return Flops(
        layers=PASSES * 2 * size.layer_weights * sum(lengths),
        attention=PASSES * sum(4 * width * seen[window] for width, window in size.attention),
        head=PASSES * 2 * size.head_weights * trained,
    )


def verl_flops(config: Any, lengths: Sequence[int]) -> int | None:
    """What the counter of verl 0.7.1 and 0.8.0 says of the same pass, given transformers' configuration of a language model; None for
    families that it counts otherwise or not at all. Up to 0.7.0 verl counted attention twice as high, the whole square of a length.

    It differs in two ways: input embedding and head are two matrices even where they are tied, both multiplied by every token; the head is
    run for every token.
    """
    if config.model_type not in VERL_DENSE:
        return None
    hidden, width = config.hidden_size, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries, keys = config.num_attention_heads * width, config.num_key_value_heads * width
    a_layer = hidden * (2 * queries + 2 * keys) + 3 * hidden * config.intermediate_size
    weights = config.num_hidden_layers * a_layer + 2 * config.vocab_size * hidden
    squares = sum(length * length for length in lengths)
    return 6 * weights * sum(lengths) + 6 * squares * queries * config.num_hidden_layers  # type: ignore[no-any-return]


def model_size(model: Any, layers: Mapping[int, Any]) -> ModelSize:
    """The size of a language model of transformers, on any device. Matrices count whole, stacked experts by the share that a token is sent
    to, vectors not at all. `layers`: the attention of each, as `model.verify` finds it."""
    lookup, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    matrices = (weight for weight in model.parameters() if weight.ndim > 1 and weight is not lookup and weight is not head)
    heads = model.config.get_text_config().num_attention_heads
    return ModelSize(
        layer_weights=sum(used_by_a_token(weight, model.config) for weight in matrices),
        head_weights=head.numel(),
        attention=tuple((heads * shape.head_width, shape.window) for shape in layers.values()),
    )


def utilisation(flops: float | None, seconds: float, peak: float | None) -> float | None:
    """MFU: the share of a device's nominal arithmetic; None where either is unknown."""
    return flops / seconds / peak if flops and peak else None
