"""Running a model on a stream of tokens.

Enters: token ids and positions [T] and an attention context. Leaves: the last hidden states [T, width], before the head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fulltilt.model.attention import Context, UnsupportedModel

Computed = TypeVar("Computed")
ONE_PASS = "one_pass"  # the method of a model that must know where a pass begins and ends


def in_one_pass(model: torch.nn.Module, compute: Callable[[], Computed]) -> Computed:
    """Return the result of `compute`, which uses the model's body and head. A model whose parameters are sharded among workers
    (parallel/apply.py) has them whole only during this call."""
    whole: Callable[[Callable[[], Computed]], Computed] | None = getattr(model, ONE_PASS, None)
    return compute() if whole is None else whole(compute)


def computing_type(model: Any) -> torch.dtype:
    """Return the type that the model computes in; a sharded model keeps wider parameters."""
    return getattr(model, "computing_type", None) or model.dtype


def hidden_states(model: torch.nn.Module, ids: torch.Tensor, positions: torch.Tensor, context: Context) -> torch.Tensor:
    body = model.base_model  # the model itself if it has no head
    # No attention_mask: with one, transformers would treat the stream as a single document.
    output = body(input_ids=ids[None], position_ids=positions[None], use_cache=False, fulltilt=context)  # type: ignore[operator]
    states = getattr(output, "last_hidden_state", None)
    if states is None:
        raise UnsupportedModel(f"{type(model).__name__} has no body apart from its head (base_model): its hidden states cannot be read")
    return states.squeeze(0)
