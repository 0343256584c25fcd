"""The arithmetic of an update, from the sizes of a model and of samples.

Enters: a model's weights and attention layers, the lengths of samples, how many of their tokens are trained. Leaves: FLOPs of one forward
and backward pass. Guaranteed: the formula of docs/bench.md and nothing else, so that no way of computing changes the number:

    3 x (2 x weights of the layers x tokens + 2 x weights of the head x trained tokens + 4 x query width x pairs, over all layers)

Forward once, backward twice: a product has a gradient for each of its two factors. Each weight counts once, a tied one for its use as the
head; the input embedding is looked up and not multiplied. A pair is a token and a token that it may attend to, itself included: about half
the square of a sample's length. Recomputed parts, biases, norms and activation functions count nothing. A pass without gradient does a
third, so micro-batches compare in the same way. Plain arithmetic, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fulltilt.shape import ModelFamily, Shape

PASSES = 3  # forward, gradient of what enters, gradient of the weights


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a model that determine its arithmetic."""

    layer_weights: int  # that every token is multiplied with; for experts, only those that a token is sent to
    head_weights: int  # that every trained token is multiplied with
    attention: tuple[tuple[int, int | None], ...]  # for each layer, query heads times their width, and the window or None

    @staticmethod
    def of_shape(shape: Shape, *, vocabulary_head: bool = True) -> ModelSize:
        """Return the size of a model that need not be loaded. Without `vocabulary_head` the head computes one number, as a critic's does.
        Windows are not part of a shape: every layer counts as attending to everything before a token."""
        return ModelSize(
            layer_weights=sum(layer_weights(shape)),
            head_weights=shape.width * (shape.vocabulary if vocabulary_head else 1),
            attention=tuple((layer.queries, None) for layer in shape.layers),
        )


def layer_weights(shape: Shape) -> list[int]:
    """Return, for each layer, the number of weights that one token is multiplied with. An unknown family counts as Llama's."""
    known = replace(shape, family=shape.family or ModelFamily())
    found = []
    for layer in shape.layers:
        used = layer.experts.active if layer.experts else 1
        router = layer.experts.count * shape.width if layer.experts else 0
        found.append(router + sum(inner * outer * min(copies, used) for inner, outer, copies in known.products(layer).values()))
    return found


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
    """Count pairs of tokens in attention: each token with itself and those before it in its window. Example: 4 tokens -> 1 + 2 + 3 + 4 =
    10"""
    looks = length if window is None else min(length, window)
    return looks * (looks + 1) // 2 + (length - looks) * looks


def update_flops(size: ModelSize, lengths: Sequence[int], trained: int) -> Flops:
    """Count the operations of an update. `lengths`: tokens of each sample, prompt and response. `trained`: number of all their tokens that
    the head is run for."""
    seen = {window: sum(pairs(length, window) for length in lengths) for window in {window for _, window in size.attention}}
    return Flops(
        layers=PASSES * 2 * size.layer_weights * sum(lengths),
        attention=PASSES * sum(4 * width * seen[window] for width, window in size.attention),
        head=PASSES * 2 * size.head_weights * trained,
    )
