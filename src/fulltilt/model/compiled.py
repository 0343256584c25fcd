"""Decoder layers compiled by torch.compile, for passes over packed samples: updates, log-probs and values.

Enters: a loaded model on its device. Leaves: the same model object, each of whose decoder layers has two forwards: the compiled one for
packed documents, and its own for sampling, with or without CUDA graphs. Guaranteed: parameters stay the same objects at the same addresses;
attention and experts are called uncompiled, between compiled parts; layers of one kind share compiled code, and another number of tokens
causes no recompilation.

    compile_and_compare(model)  # raises WrongLayers and restores the model if values or gradients differ
    restore(model)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fulltilt.model import attention, experts
from fulltilt.model.attention import Packed
from fulltilt.model.fuse import STATES, WrongLayers, change_and_compare, numbers_of
from fulltilt.model.lora import without_adapters
from fulltilt.model.verify import run_packed

BACKEND = "inductor"
MARK = "_compiled"  # attribute of a layer that has two forwards
MOST_KINDS = 64  # most compiled versions of layers in a process: of four roles, with and without gradients, and of a model's unequal layers


def compile_and_compare(model: PreTrainedModel) -> str:
    """Compile the layers, and compare them with the model's own as for fused layers, also with the adapters off if a model has some.
    Returns a report in words."""
    layers, measures = decoder_layers(model), {"": numbers_of}
    if hasattr(model, "peft_config"):
        measures[" with the adapters off"] = bare_states
    # Beyond its limit, 8 by default, torch would run layers uncompiled and only log it.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_KINDS)
    change_and_compare(model, install, restore, "compiled", measures)
    return f"compiled: {len(layers)} layers"


@torch.no_grad()
def bare_states(model: PreTrainedModel, packs: Sequence[Sequence[np.ndarray]]) -> dict[str, torch.Tensor]:
    """Return hidden states of the base model, as the reference role runs it."""
    with without_adapters(model):
        return {STATES[0]: torch.cat([states for documents in packs for states in run_packed(model, list(documents))[0]])}


def restore(model: PreTrainedModel) -> None:
    for layer in decoder_layers(model):
        if MARK in vars(layer):
            del layer.forward
            delattr(layer, MARK)


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    body: Any = model.base_model
    layers = getattr(body, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList) or not hasattr(body, "norm"):
        raise WrongLayers(f"{type(body).__name__} does not keep its decoder layers as `layers`, with a `norm` behind them")
    return list(layers)


def install(model: PreTrainedModel) -> None:
    for layer in decoder_layers(model):
        if "forward" in vars(layer):
            raise WrongLayers(f"a {type(layer).__name__} already runs a forward that is not its class's: a forward has one owner")
        layer.forward = two_forwards(layer.forward)
        setattr(layer, MARK, True)  # set last: `restore` undoes marked layers


def two_forwards(own: Callable[..., Any]) -> Callable[..., Any]:
    # Dynamic from the start: micro-batches differ in their number of tokens, and each number would be compiled separately.
    compiled = torch.compile(own, backend=BACKEND, dynamic=True)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(kwargs.get("fulltilt"), Packed):
            return own(*args, **kwargs)
        leave_whole()
        return compiled(*args, **kwargs)

    return forward


# If compiled, these would be specialised to the number of documents, or to the number of tokens of each expert.
WHOLE_ATTENTION, WHOLE_EXPERTS = torch.compiler.disable(attention.attention), torch.compiler.disable(experts.run_experts)


def leave_whole() -> None:
    """Register the uncompiled functions. Called at every pass: loading another model registers the bare functions again, and a layer would
    then be compiled again."""
    AttentionInterface.register(attention.NAME, WHOLE_ATTENTION)
    ALL_EXPERTS_FUNCTIONS.register(experts.NAME, WHOLE_EXPERTS)
