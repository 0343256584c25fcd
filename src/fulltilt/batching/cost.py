"""What a row costs to compute, before computing it.

The unit is one token through the model's weights. A row of t tokens passes them t times; causal attention adds a term in t * t. Planning,
balancing and tuning compare rows by this number; the token budget of a micro-batch counts tokens alone, because memory does.
"""

from __future__ import annotations


def quadratic_share(layers: int, attention_width: int, parameters: int) -> float:
    """The factor of t * t: per layer, scores and values over half the square (causal) against two operations per weight and token.

    `attention_width` is query heads times head size. Example: 28 layers, width 3584, 7.6e9 parameters -> 1.3e-5, so that attention costs
    as much as the weights at 76,000 tokens.
    """
    return layers * attention_width / parameters


def row_cost(tokens: int, quadratic: float = 0.0) -> float:
    """Cost of one row of `tokens` tokens; `quadratic` comes from `quadratic_share`."""
    return tokens + quadratic * tokens * tokens
