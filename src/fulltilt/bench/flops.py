"""FLOPs: the size of a loaded model for batching/cost.py, verl's count, and the utilised share of a device's arithmetic.

Enters: a language model of transformers, or its configuration. Leaves: its `ModelSize`, verl's count of FLOPs, and MFU. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fulltilt.batching.cost import ModelSize
from fulltilt.model.experts import used_by_a_token

# Families that verl counts with its formula for dense models.
VERL_DENSE = frozenset({"llama", "mistral", "qwen2", "qwen3", "seed_oss"})


def verl_flops(config: Any, lengths: Sequence[int]) -> int | None:
    """Return the count of verl 0.7.1 and 0.8.0 for the same pass, given transformers' configuration of a language model; None for families
    that verl counts in another way or not at all. Up to 0.7.0 verl's count of attention was twice as high, the whole square of a length.

    It differs from ours in two ways: input embedding and head are two matrices even if they are tied, both multiplied by every token; the
    head is run for every token.
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
    """Return the size of a language model of transformers, on any device. Matrices count whole, stacked experts by the share that a token
    is sent to, vectors not at all. `layers`: the attention of each layer, from `model.verify`."""
    lookup, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    matrices = (weight for weight in model.parameters() if weight.ndim > 1 and weight is not lookup and weight is not head)
    heads = model.config.get_text_config().num_attention_heads
    return ModelSize(
        layer_weights=sum(used_by_a_token(weight, model.config) for weight in matrices),
        head_weights=head.numel(),
        attention=tuple((heads * shape.head_width, shape.window) for shape in layers.values()),
    )


def utilisation(flops: float | None, seconds: float, peak: float | None) -> float | None:
    """Return the MFU: the share of a device's nominal arithmetic; None if either is unknown."""
    return flops / seconds / peak if flops and peak else None
