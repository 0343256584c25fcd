"""Checks on a loaded model before a run starts.

Enters: a loaded model, with a language head or without one (critic, reward model). Leaves: the shapes of its attention layers.
Guaranteed, or the run is refused with the architecture's name: every layer went through our attention function; changing one packed
document does not change the others' log-probs (hidden states); a document packed among others equals the document alone, within twice the
rounding that reordering the pack causes; our head equals the model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from fulltilt.model.attention import LayerShape, Packed, UnsupportedModel
from fulltilt.model.forward import hidden_states
from fulltilt.model.heads import Head, token_logprobs

LENGTHS = (9, 33, 17, 24)

# Mean absolute difference of log-probs, or of hidden states relative to their mean size, that always counts as rounding, even where
# reordering the pack happens to change nothing. In bfloat16 a document alone, whose few rows are added in another order, is off by 0.008 at
# 0.5B, 0.016 at 1.5B and 0.04 at 7B with random weights; documents that mix are off by the spread of the logits, about 1.
ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 8e-2, torch.float16: 2e-2}

USUAL_SIZE = 16.0  # a generous size of log-probs of random tokens

KINDS = ("full_attention", "sliding_attention")
# Rotary frequencies that are fixed when the model is built.
FIXED_ROPES = frozenset({"default", "linear", "llama3", "yarn", "proportional"})

Measure = Callable[[list[np.ndarray]], tuple[list[torch.Tensor], dict[int, LayerShape]]]  # numbers of each document, layers passed


@torch.no_grad()
def verify(model: PreTrainedModel) -> dict[int, LayerShape]:
    documents = random_documents(model)
    if model.base_model is model:  # a body without a language head
        return verify_packing(model, documents, partial(packed_hidden, model), "hidden states")[2]
    alone, allowed, seen = verify_packing(model, documents, partial(packed_logprobs, model), "log-probs")
    own, rounded = own_logprobs(model, documents[1])
    gap = mean_gap(alone[1:2], [own])
    if not gap <= max(allowed, rounded):
        raise UnsupportedModel(
            f"{name_of(model)}: its own logits differ by {gap:.2g} in log-prob from the ones computed here ({Head.of(model).shape}): "
            "its output layer does something to them that is not supported"
        )
    return seen


def verify_packing(
    model: PreTrainedModel, documents: list[np.ndarray], measure: Measure, what: str
) -> tuple[list[torch.Tensor], float, dict[int, LayerShape]]:
    """The numbers of each document alone, the difference that rounding explains, and the layers."""
    name = name_of(model)
    try:
        together, seen = measure(documents)
    except (AttributeError, KeyError, TypeError) as error:  # from code that expects a mask, or arguments of its own
        raise UnsupportedModel(f"{name} does not run on packed documents: {type(error).__name__}: {error}") from error
    layers = model.config.get_text_config().num_hidden_layers
    if set(seen) != set(range(layers)):
        raise UnsupportedModel(
            f"{name}: {layers - len(seen)} of {layers} layers did not go through fulltilt's attention function, "
            "so packed documents would mix there. This architecture cannot be trained here"
        )

    # This check comes first: where documents mix, reordering them changes much, which the second check would take for rounding.
    changed = [documents[0], (documents[1] + 1) % vocabulary(model), *documents[2:]]
    others, _ = measure(changed)
    gap_others = mean_gap([together[index] for index in (0, 2, 3)], [others[index] for index in (0, 2, 3)])
    if not gap_others <= rounding_of_equal_shapes(model):
        raise UnsupportedModel(f"{name}: changing one packed document moved the others' {what} by {gap_others:.2g}: documents mix")

    refuse_what_short_documents_hide(model, seen)
    # Rounding grows with the numbers: bad training can leave a model with log-probs in the hundreds. It is not refused for that.
    size = max(1.0, float(torch.cat([numbers.flatten() for numbers in together]).abs().mean()) / USUAL_SIZE)
    order = [2, 0, 3, 1]
    permuted, _ = measure([documents[index] for index in order])
    allowed = max(2 * mean_gap([together[index] for index in order], permuted), size * ROUNDING[model.dtype])
    alone = [measure([document])[0][0] for document in documents]
    gap_alone = mean_gap(together, alone)
    if not gap_alone <= allowed:
        raise UnsupportedModel(f"{name}: packed and alone differ by {gap_alone:.2g} in their {what} where {allowed:.2g} is rounding")
    return alone, allowed, seen


def rounding_of_equal_shapes(model: PreTrainedModel) -> float:
    """Equal shapes round equally, except where experts get other numbers of tokens and their products other sizes."""
    experts = any(hasattr(module, "num_experts") for module in model.modules())
    return ROUNDING[model.dtype] if experts else ROUNDING[model.dtype] / 80


def refuse_what_short_documents_hide(model: PreTrainedModel, seen: dict[int, LayerShape]) -> None:
    """Refuse by configuration what would go wrong only beyond the length of the documents tried here."""
    name, text = name_of(model), model.config.get_text_config()
    for rope in rope_types(getattr(text, "rope_parameters", None)) - FIXED_ROPES:
        raise UnsupportedModel(
            f"{name}: its rotary frequencies ({rope}) are not known to be fixed: where they depend on the longest position of a pass, a "
            "document's log-probs would change with what is packed beside it"
        )
    kinds = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None)
    for layer, shape in seen.items():
        kind = kinds[layer] if kinds else "sliding_attention" if window else "full_attention"
        if kind not in KINDS:
            raise UnsupportedModel(f"{name}: layer {layer} is of type {kind}, which is not supported")
        configured = window if kind == "sliding_attention" else None
        if shape.window != configured:
            raise UnsupportedModel(
                f"{name}: layer {layer} has a window of {configured} tokens by its configuration, but its attention asks for "
                f"{shape.window}: the window would be lost"
            )


def rope_types(parameters: Any) -> set[str]:
    """Types of rotary embedding in a configuration's parameters, which may be given for each kind of layer."""
    if not isinstance(parameters, dict):
        return set()
    nested = [kind for value in parameters.values() if isinstance(value, dict) for kind in rope_types(value)]
    return {*nested, *([str(parameters["rope_type"])] if "rope_type" in parameters else [])}


def packed_logprobs(model: PreTrainedModel, documents: list[np.ndarray]) -> tuple[list[torch.Tensor], dict[int, LayerShape]]:
    hidden, seen = run_packed(model, documents)
    results = []
    for states, document in zip(hidden, documents, strict=True):
        targets = torch.from_numpy(document[1:]).to(model.device)
        results.append(token_logprobs(states[:-1], Head.of(model), targets, 1.0)[0])
    return results, seen


def packed_hidden(body: PreTrainedModel, documents: list[np.ndarray]) -> tuple[list[torch.Tensor], dict[int, LayerShape]]:
    """Hidden states divided by their mean size, so that one limit of rounding serves every model."""
    hidden, seen = run_packed(body, documents)
    wide = [states.to(torch.promote_types(states.dtype, torch.float32)) for states in hidden]
    return [states / states.abs().mean() for states in wide], seen


def run_packed(model: PreTrainedModel, documents: list[np.ndarray]) -> tuple[list[torch.Tensor], dict[int, LayerShape]]:
    ids = torch.from_numpy(np.concatenate(documents)).to(model.device)
    positions = torch.from_numpy(np.concatenate([np.arange(len(document)) for document in documents])).to(model.device)
    bounds = np.cumsum([0, *(len(document) for document in documents)])
    context = Packed.of(bounds, model.device)
    hidden = hidden_states(model, ids, positions, context)
    return [hidden[start:stop] for start, stop in pairwise(bounds)], context.seen


def own_logprobs(model: PreTrainedModel, document: np.ndarray) -> tuple[torch.Tensor, float]:
    """The log-probs of the model's own forward, head included, and how far off they may be because it rounds logits to its type: in
    bfloat16 a logit of 40 is off by 0.1."""
    ids = torch.from_numpy(document).to(model.device)
    positions = torch.arange(len(ids), device=model.device)
    context = Packed.of([0, len(ids)], model.device)
    logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, fulltilt=context).logits[0]
    wide = logits[:-1].to(torch.promote_types(logits.dtype, torch.float32))
    rounded = torch.finfo(logits.dtype).eps * float(wide.abs().amax(-1).mean())
    return torch.log_softmax(wide, -1).gather(1, ids[1:, None])[:, 0], rounded


def mean_gap(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    return float((torch.cat(left) - torch.cat(right)).abs().mean())


def random_documents(model: PreTrainedModel) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, vocabulary(model), length) for length in LENGTHS]


def vocabulary(model: PreTrainedModel) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def name_of(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} ({model.config.model_type})"
