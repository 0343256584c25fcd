"""Decoder layers compiled by torch.compile, for passes over packed samples: updates, log-probs and values.

Enters: a loaded model on its device. Leaves: the same model object, each of whose decoder layers chooses between two forwards: the compiled
one where documents are packed, its own where an engine samples, with or without CUDA graphs. Guaranteed: parameters stay the objects they
were, where they were; attention and experts stay the functions they are, called from between compiled parts; layers of one kind share
what was compiled, and other numbers of tokens do not compile anew.

    compile_and_compare(model)  # WrongCompile, and the model as it was, where values or gradients are not its own
    restore(model)              # the model as it was
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fulltilt.model import attention, experts
from fulltilt.model.attention import Packed
from fulltilt.model.fuse import OF_GRADIENTS, ROUNDING, STATES, gaps, numbers_of
from fulltilt.model.lora import without_adapters
from fulltilt.model.verify import random_documents, run_packed

BACKEND = "inductor"
MARK = "_compiled"  # attribute of a layer that has two forwards
MOST_KINDS = 64  # of layers, in one process: of four roles, with and without gradients, and of layers that differ in a model


class WrongCompile(RuntimeError):
    """The layers cannot be compiled, or do not compute compiled what they do by themselves."""


def compile_and_compare(model: PreTrainedModel) -> str:
    """Compile, and look once on random documents whether hidden states, with and without a gradient, and gradients are what they were, by
    the measure that fused layers have; and hidden states with the adapters off, as a reference runs them, where a model has some. Returns
    what was done, in words."""
    layers = decoder_layers(model)
    documents = random_documents(model)
    ways: dict[str, Callable[..., dict[str, torch.Tensor]]] = {"": partial(numbers_of, model)}
    if hasattr(model, "peft_config"):
        ways[" with the adapters off"] = partial(bare_states, model)
    own = {words: way([documents]) for words, way in ways.items()}
    alone = {words: gaps(own[words], way([[document] for document in documents])) for words, way in ways.items()}
    # Beyond the limit, which is 8, torch would run layers uncompiled and only log it.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_KINDS)
    try:
        for layer in layers:
            install(layer)
        found = {words: gaps(own[words], way([documents])) for words, way in ways.items()}
    except Exception as error:  # of a compiler that is not there, or of code that it does not understand
        restore(model)
        raise WrongCompile(f"a compiled pass failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    for words, name, gap in ((words, name, gap) for words, of_way in found.items() for name, gap in of_way.items()):
        rounding = max(4 * alone[words][name], ROUNDING[model.dtype] * (1.0 if name in STATES else OF_GRADIENTS))
        if not gap <= rounding:
            restore(model)
            raise WrongCompile(f"{name}{words} differ by {gap:.2g} of their size from the model's own, where {rounding:.2g} is rounding")
    return f"compiled: {len(layers)} layers"


@torch.no_grad()
def bare_states(model: PreTrainedModel, packs: Sequence[Sequence[np.ndarray]]) -> dict[str, torch.Tensor]:
    """Of the base model, whose layers have no gradient."""
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
        raise WrongCompile(f"{type(body).__name__} does not keep its decoder layers as `layers`, with a `norm` behind them")
    return list(layers)


def install(layer: torch.nn.Module) -> None:
    if "forward" in vars(layer):
        raise WrongCompile(f"a {type(layer).__name__} already runs a forward that is not its class's: a forward has one owner")
    setattr(layer, MARK, True)
    layer.forward = two_forwards(layer.forward)


def two_forwards(own: Callable[..., Any]) -> Callable[..., Any]:
    # Dynamic from the start: micro-batches differ in their tokens, and each number of them would be compiled by itself.
    compiled = torch.compile(own, backend=BACKEND, dynamic=True)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(kwargs.get("fulltilt"), Packed):
            return own(*args, **kwargs)
        leave_whole()
        return compiled(*args, **kwargs)

    return forward


# A compiler that looked into these would bind itself to the number of documents, or to how many tokens each expert has.
WHOLE_ATTENTION, WHOLE_EXPERTS = torch.compiler.disable(attention.attention), torch.compiler.disable(experts.run_experts)


def leave_whole() -> None:
    """At every call, for whoever loads another model registers the bare functions again, and a layer would then be compiled anew."""
    AttentionInterface.register(attention.NAME, WHOLE_ATTENTION)
    ALL_EXPERTS_FUNCTIONS.register(experts.NAME, WHOLE_EXPERTS)
