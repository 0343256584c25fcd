"""What must hold of this very model before a run starts, measured on it.

Enters: a loaded model. Leaves: the shapes of its attention layers. Guaranteed, or the run is refused with the architecture's name: every
layer went through our attention function; changing one packed document leaves the others' log-probs alone; a document packed among
others equals the document alone, within twice what reordering the pack changes (rounding); our head equals the model's own.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from fulltilt.model.attention import LayerShape, Packed, UnsupportedModel
from fulltilt.model.forward import hidden_states
from fulltilt.model.heads import Head, token_logprobs

LENGTHS = (9, 33, 17, 24)

# Mean absolute log-prob difference that rounding alone explains when a pack is merely reordered and by chance nothing changes.
ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


@torch.no_grad()
def verify(model: PreTrainedModel) -> dict[int, LayerShape]:
    name = f"{type(model).__name__} ({model.config.model_type})"
    random = np.random.default_rng(0)
    rows = model.get_input_embeddings().weight.shape[0]
    documents = [random.integers(0, rows, length) for length in LENGTHS]

    together, seen = packed_logprobs(model, documents)
    layers = model.config.get_text_config().num_hidden_layers
    if set(seen) != set(range(layers)):
        raise UnsupportedModel(
            f"{name}: {layers - len(seen)} of {layers} layers did not go through fulltilt's attention function, "
            "so packed documents would mix there. This architecture cannot be trained here"
        )

    # Before anything else: where documents mix, reordering them changes much, and the second check would forgive it.
    changed = [documents[0], (documents[1] + 1) % rows, *documents[2:]]
    others, _ = packed_logprobs(model, changed)
    gap_others = mean_gap([together[index] for index in (0, 2, 3)], [others[index] for index in (0, 2, 3)])
    if not gap_others <= ROUNDING[model.dtype] / 20:  # the shapes are the same, so the roundings should be
        raise UnsupportedModel(f"{name}: changing one packed document moved the others' log-probs by {gap_others:.2g}: documents mix")

    refuse_what_short_documents_hide(model, seen, name)
    order = [2, 0, 3, 1]
    permuted, _ = packed_logprobs(model, [documents[index] for index in order])
    allowed = max(2 * mean_gap([together[index] for index in order], permuted), ROUNDING[model.dtype])
    alone = [packed_logprobs(model, [document])[0][0] for document in documents]
    gap_alone = mean_gap(together, alone)
    if not gap_alone <= allowed:
        raise UnsupportedModel(f"{name}: packed and alone differ by {gap_alone:.2g} in log-prob where {allowed:.2g} is rounding")

    gap_head = mean_gap(alone[1:2], [own_logprobs(model, documents[1])])
    if not gap_head <= allowed:
        raise UnsupportedModel(
            f"{name}: its own logits differ from the plain output layer's by {gap_head:.2g} in log-prob (scaled or capped logits)"
        )
    return seen


def refuse_what_short_documents_hide(model: PreTrainedModel, seen: dict[int, LayerShape], name: str) -> None:
    """What goes wrong only beyond the length of the documents tried here must be read from the configuration."""
    text = model.config.get_text_config()
    for rope in rope_types(getattr(text, "rope_parameters", None)):
        if rope in ("dynamic", "longrope"):
            raise UnsupportedModel(
                f"{name}: its rotary frequencies ({rope}) depend on the longest position of a pass, so a document's log-probs would change "
                "with what is packed beside it"
            )
    kinds = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None)
    for layer, shape in seen.items():
        kind = kinds[layer] if kinds else "sliding_attention" if window else "full_attention"
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModel(f"{name}: layer {layer} is of the kind {kind}, which is not built")
        if shape.window != (window if kind == "sliding_attention" else None):
            raise UnsupportedModel(
                f"{name}: layer {layer} has a window of {window if kind == 'sliding_attention' else None} tokens by its configuration, but "
                f"its attention asks for {shape.window}: the window would be lost"
            )


def rope_types(parameters: Any) -> set[str]:
    """Of a configuration's rotary parameters, which may be given for each kind of layer."""
    if not isinstance(parameters, dict):
        return set()
    nested = [kind for value in parameters.values() if isinstance(value, dict) for kind in rope_types(value)]
    return {*nested, *([str(parameters["rope_type"])] if "rope_type" in parameters else [])}


def packed_logprobs(model: PreTrainedModel, documents: list[np.ndarray]) -> tuple[list[torch.Tensor], dict[int, LayerShape]]:
    ids = torch.from_numpy(np.concatenate(documents)).to(model.device)
    positions = torch.from_numpy(np.concatenate([np.arange(len(document)) for document in documents])).to(model.device)
    bounds = np.cumsum([0, *(len(document) for document in documents)])
    context = Packed.of(bounds, model.device)
    hidden = hidden_states(model, ids, positions, context)
    results = []
    for start, stop in pairwise(bounds):
        logprobs, _ = token_logprobs(hidden[start : stop - 1], Head.of(model), ids[start + 1 : stop], 1.0)
        results.append(logprobs)
    return results, context.seen


def own_logprobs(model: PreTrainedModel, document: np.ndarray) -> torch.Tensor:
    """The log-probs that the model's own forward, head included, gives."""
    ids = torch.from_numpy(document).to(model.device)
    positions = torch.arange(len(ids), device=model.device)
    context = Packed.of([0, len(ids)], model.device)
    logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, fulltilt=context).logits[0]
    return torch.log_softmax(logits[:-1].to(torch.promote_types(logits.dtype, torch.float32)), -1).gather(1, ids[1:, None])[:, 0]


def mean_gap(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    return float((torch.cat(left) - torch.cat(right)).abs().mean())
