"""Running a model on a stream of tokens.

Enters: token ids and positions [T] and an attention context. Leaves: the last hidden states [T, width], before the head.
"""

from __future__ import annotations

import torch

from fulltilt.model.attention import Context, UnsupportedModel


def hidden_states(model: torch.nn.Module, ids: torch.Tensor, positions: torch.Tensor, context: Context) -> torch.Tensor:
    body = model.base_model  # the model itself where it has no head
    # No attention_mask: with one, transformers would treat the stream as a single document.
    output = body(input_ids=ids[None], position_ids=positions[None], use_cache=False, fulltilt=context)  # type: ignore[operator]
    states = getattr(output, "last_hidden_state", None)
    if states is None:
        raise UnsupportedModel(f"{type(model).__name__} has no body apart from its head (base_model): its hidden states cannot be read")
    return states.squeeze(0)
