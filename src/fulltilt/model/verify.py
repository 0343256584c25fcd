"""Checks on a loaded model before a run starts.

Enters: a loaded model, with a language head or without one (critic, reward model). Leaves: the shapes of its attention layers. Guaranteed,
or the run is refused with the setting, the architecture's name and the reason: every layer went through our attention function; changing
one packed document does not change the others' log-probs (hidden states); the numbers of a packed document equal those of the document
alone, within twice the rounding that reordering the pack causes; fulltilt's head equals the model's own; if the model decodes, each layer
has a cache of its own, and tokens decoded over the paged cache have the log-probs of the packed documents. A failure of fulltilt's own
functions is raised unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from fulltilt.blame import says_nothing
from fulltilt.model.arrays import to_device
from fulltilt.model.attention import Context, Decode, LayerShape, Packed, Paged, UnsupportedModel
from fulltilt.model.forward import computing_type, hidden_states, in_one_pass
from fulltilt.model.heads import VOCABULARY_PART, Head, gather_vocabulary, token_logprobs
from fulltilt.records import UserError
from fulltilt.words import first_line, listed, many

LENGTHS = (9, 33, 17, 24)
DECODED = 4  # tokens of each document that are decoded one by one
BLOCK = 16  # tokens of a block of that cache: the longer documents have several blocks

# Mean absolute difference of log-probs, or of hidden states relative to their mean size, that always counts as rounding, even where
# reordering the pack happens to change nothing. In bfloat16 a document alone, whose few rows are added in another order, is off by 0.008 at
# 0.5B, 0.016 at 1.5B and 0.04 at 7B with random weights; documents that mix are off by the spread of the logits, about 1.
ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 8e-2, torch.float16: 2e-2}

USUAL_SIZE = 16.0  # a generous size of log-probs of random tokens

KINDS = ("full_attention", "sliding_attention")
# Rotary frequencies that do not change after the model is built.
FIXED_ROPES = frozenset({"default", "linear", "llama3", "yarn", "proportional"})

REMEDY = "Use a model of another architecture: docs/models.md lists those that run"


class PassedLayers(dict[int, LayerShape]):
    """The shapes of the layers that a pass went through, by index, and the indices that occurred more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.repeated: set[int] = set()

    def __setitem__(self, layer: int, shape: LayerShape) -> None:
        if layer in self:
            self.repeated.add(layer)
        super().__setitem__(layer, shape)


Measure = Callable[[list[np.ndarray]], tuple[list[torch.Tensor], PassedLayers]]  # numbers of each document, layers of the pass


def verify(model: PreTrainedModel, key: str = "model.path", *, decodes: bool = True) -> dict[int, LayerShape]:
    """Return the shapes of the model's attention layers, or refuse the model. `key` is the setting that names it, for messages; `decodes`:
    whether a rollout engine keeps its keys and values in a paged cache."""
    where = f"{key}: {model.name_or_path or 'this model'} cannot be run here"
    try:
        return verify_model(model, decodes=decodes)
    except UserError as error:
        raise UnsupportedModel(f"{where}: {str(error).rstrip('.')}. {REMEDY}") from error
    except Exception as error:  # an error of the model's code, which expects a mask, a cache, or arguments of its own
        if says_nothing(error):
            raise
        reason = f"its code does not run without an attention mask and a cache ({type(error).__name__}: {first_line(error).rstrip('.')})"
        raise UnsupportedModel(f"{where}: {name_of(model)}: {reason}. {REMEDY}") from error


@torch.no_grad()
def verify_model(model: PreTrainedModel, *, decodes: bool) -> dict[int, LayerShape]:
    refuse_by_configuration(model)
    documents = random_documents(model)
    if model.base_model is model:  # a body without a language head
        if model.get_output_embeddings() is not None:
            raise UnsupportedModel(
                f"{name_of(model)}: transformers does not name its body apart from its head, whose input would be needed"
            )
        return verify_packing(model, documents, partial(packed_hidden, model), "hidden states")[2]
    alone, allowed, seen = verify_packing(model, documents, partial(packed_logprobs, model), "log-probs")
    own, rounded = own_logprobs(model, documents[1])
    gap = mean_gap(alone[1:2], [own])
    if not gap <= max(allowed, rounded):
        raise UnsupportedModel(
            f"{name_of(model)}: its own logits differ by {gap:.2g} in log-prob from the ones computed here ({Head.of(model).shape}): "
            "its output layer does something to them that is not supported"
        )
    if decodes:
        verify_decoding(model, documents, alone, allowed, seen)
    return seen


def verify_packing(
    model: PreTrainedModel, documents: list[np.ndarray], measure: Measure, what: str
) -> tuple[list[torch.Tensor], float, PassedLayers]:
    """Return the numbers of each document alone, the difference that rounding explains, and the layers."""
    name = name_of(model)
    together, seen = measure(documents)
    layers = model.config.get_text_config().num_hidden_layers
    if missing := sorted(set(range(layers)) - set(seen)):
        repeated = ", while others did several times" if seen.repeated else ""
        raise UnsupportedModel(
            f"{name}: {len(missing)} of {layers} layers did not go through fulltilt's attention function{repeated}: packed documents would "
            "mix there"
        )
    if extra := sorted(set(seen) - set(range(layers))):
        raise UnsupportedModel(
            f"{name}: it has {many(layers, 'layer')} by its configuration, but attention was called for layer {listed(extra)} too"
        )

    if not all(bool(numbers.isfinite().all()) for numbers in together):
        raise UnsupportedModel(
            f"{name}: its {what} are not finite, although its weights are: a number in its config.json may be wrong (rope_theta, an eps, "
            "a scale)"
        )
    # This check comes first: if documents mix, reordering them changes much, which the second check would take for rounding.
    changed = [documents[0], (documents[1] + 1) % vocabulary(model), *documents[2:]]
    others, _ = measure(changed)
    gap_others = mean_gap([together[index] for index in (0, 2, 3)], [others[index] for index in (0, 2, 3)])
    if not gap_others <= rounding_of_equal_shapes(model):
        raise UnsupportedModel(f"{name}: changing one packed document moved the others' {what} by {gap_others:.2g}: documents mix")

    refuse_lost_windows(model, seen)
    # Rounding grows with the numbers: bad training can leave a model with log-probs in the hundreds, which is no reason to refuse it.
    size = max(1.0, float(torch.cat([numbers.flatten() for numbers in together]).abs().mean()) / USUAL_SIZE)
    order = [2, 0, 3, 1]
    permuted, _ = measure([documents[index] for index in order])
    allowed = max(2 * mean_gap([together[index] for index in order], permuted), size * ROUNDING[computing_type(model)])
    alone = [measure([document])[0][0] for document in documents]
    gap_alone = mean_gap(together, alone)
    if not gap_alone <= allowed:
        raise UnsupportedModel(f"{name}: packed and alone differ by {gap_alone:.2g} in their {what} where {allowed:.2g} is rounding")
    return alone, allowed, seen


def verify_decoding(
    model: PreTrainedModel, documents: list[np.ndarray], alone: list[torch.Tensor], allowed: float, seen: PassedLayers
) -> None:
    """Compare with a small rollout over a paged cache: all but the last tokens of each document at once, and those one by one."""
    if seen.repeated:
        raise UnsupportedModel(
            f"{name_of(model)}: one pass calls attention several times under the same layer index ({listed(sorted(seen.repeated), 3)}), "
            'which would overwrite keys and values in the KV cache of the native engine (rollout.engine = "hf" has another cache)'
        )
    decoded = decoded_logprobs(model, documents, seen)
    gap = mean_gap(decoded, [numbers[-DECODED:] for numbers in alone])
    allowed *= 2  # products of four rows are summed in another order than those of whole documents: 0.05 at 7B with random weights
    if not gap <= allowed:
        raise UnsupportedModel(
            f"{name_of(model)}: decoding one token at a time over a cache gives log-probs that differ by {gap:.2g} from those of whole "
            f"documents, where {allowed:.2g} is rounding"
        )


def decoded_logprobs(model: PreTrainedModel, documents: list[np.ndarray], layers: dict[int, LayerShape]) -> list[torch.Tensor]:
    """Return log-probs of the last tokens of each document, with keys and values in scattered blocks of a cache, as in the native
    engine."""
    device, count, blocks = model.device, len(documents), -(-max(LENGTHS) // BLOCK)
    table = np.random.default_rng(0).permutation(count * blocks).reshape(count, blocks)
    slots = (table[:, :, None] * BLOCK + np.arange(BLOCK)).reshape(count, -1)  # slots of the tokens of each document
    shapes = [(slots.size, layers[index].key_heads, layers[index].head_width) for index in sorted(layers)]
    caches = [[torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(2)] for shape in shapes]
    known = [document[: -1 - DECODED] for document in documents]
    used, new = np.concatenate([row[: len(ids)] for row, ids in zip(slots, known, strict=True)]), packed_context(known, device)
    read = to_device(used, device)
    run_stream(model, known, Paged([keys for keys, _ in caches], [values for _, values in caches], read, new, new, read))
    addressed = [(keys, values, address_of(keys), address_of(values)) for keys, values in caches]
    rows = to_device(table.astype(np.int32), device)
    columns = []
    for step in range(DECODED):
        positions = np.array([len(ids) + step for ids in known])
        ids, targets = (np.array([ids[at] for ids, at in zip(documents, positions + after, strict=True)]) for after in (0, 1))
        here, lengths = slots[np.arange(count), positions], (positions + 1).astype(np.int32)
        context = Decode(addressed, to_device(here, device), rows, to_device(lengths, device), BLOCK)
        hidden = hidden_states(model, to_device(ids, device), to_device(positions, device), context)
        columns.append(token_logprobs(hidden, Head.of(model), to_device(targets, device), 1.0)[0])
    return list(torch.stack(columns, 1))


def address_of(cache: torch.Tensor) -> torch.Tensor:
    return torch.tensor([cache.data_ptr()], device=cache.device)


def rounding_of_equal_shapes(model: PreTrainedModel) -> float:
    """Return the rounding of passes with equal shapes. These round equally, except that experts get other numbers of tokens, and so
    products of other sizes."""
    experts = any(hasattr(module, "num_experts") for module in model.modules())
    return ROUNDING[computing_type(model)] if experts else ROUNDING[computing_type(model)] / 80


def refuse_by_configuration(model: PreTrainedModel) -> None:
    """Refuse unknown kinds of layers, and features that would fail only beyond the length of the documents tried here."""
    name, text = name_of(model), model.config.get_text_config()
    for layer, kind in enumerate(getattr(text, "layer_types", None) or ()):
        if kind not in KINDS:
            raise UnsupportedModel(f"{name}: layer {layer} is of type {kind}, which is not supported")
    for rope in rope_types(getattr(text, "rope_parameters", None)) - FIXED_ROPES:
        raise UnsupportedModel(
            f"{name}: its rotary frequencies ({rope}) are not known to be fixed: where they depend on the longest position of a pass, a "
            "document's log-probs would change with what is packed beside it"
        )


def refuse_lost_windows(model: PreTrainedModel, seen: dict[int, LayerShape]) -> None:
    text = model.config.get_text_config()
    kinds, window = getattr(text, "layer_types", None), getattr(text, "sliding_window", None)
    for layer, shape in seen.items():
        windowed = kinds[layer] == "sliding_attention" if kinds else bool(window)
        configured = window if windowed else None
        if shape.window != configured:
            raise UnsupportedModel(
                f"{name_of(model)}: layer {layer} has a window of {configured} tokens by its configuration, but its attention asks for "
                f"{shape.window}: the window would be lost"
            )


def rope_types(parameters: Any) -> set[str]:
    """Return the types of rotary embedding in a configuration's parameters, which may be given for each kind of layer."""
    if not isinstance(parameters, dict):
        return set()
    nested = [kind for value in parameters.values() if isinstance(value, dict) for kind in rope_types(value)]
    return {*nested, *([str(parameters["rope_type"])] if "rope_type" in parameters else [])}


def packed_logprobs(model: PreTrainedModel, documents: list[np.ndarray]) -> tuple[list[torch.Tensor], PassedLayers]:
    def compute() -> tuple[list[torch.Tensor], PassedLayers]:
        hidden, seen = run_packed(model, documents)
        results = []
        for states, document in zip(hidden, documents, strict=True):
            targets = torch.from_numpy(document[1:]).to(model.device)
            results.append(token_logprobs(states[:-1], Head.of(model), targets, 1.0)[0])
        return results, seen

    return in_one_pass(model, compute)


def packed_hidden(body: PreTrainedModel, documents: list[np.ndarray]) -> tuple[list[torch.Tensor], PassedLayers]:
    """Return hidden states divided by their mean size, so that one limit of rounding works for every model."""
    hidden, seen = run_packed(body, documents)
    wide = [states.to(torch.promote_types(states.dtype, torch.float32)) for states in hidden]
    return [states / states.abs().mean() for states in wide], seen


def run_packed(model: PreTrainedModel, documents: list[np.ndarray]) -> tuple[list[torch.Tensor], PassedLayers]:
    seen = PassedLayers()
    context = replace(packed_context(documents, model.device), seen=seen)
    hidden = run_stream(model, documents, context)
    return list(hidden.split([len(document) for document in documents])), seen


def packed_context(documents: list[np.ndarray], device: torch.device) -> Packed:
    return Packed.of(np.cumsum([0, *(len(document) for document in documents)]), device)


def run_stream(model: PreTrainedModel, documents: list[np.ndarray], context: Context) -> torch.Tensor:
    """Return hidden states of documents side by side, each from its first token."""
    ids = torch.from_numpy(np.concatenate(documents)).to(model.device)
    positions = torch.from_numpy(np.concatenate([np.arange(len(document)) for document in documents])).to(model.device)
    return hidden_states(model, ids, positions, context)


def own_logprobs(model: PreTrainedModel, document: np.ndarray) -> tuple[torch.Tensor, float]:
    """Return the log-probs of the model's own forward, head included, and their possible error, since the model rounds logits to its type:
    in bfloat16 a logit of 40 is off by 0.1."""
    ids = torch.from_numpy(document).to(model.device)
    positions = torch.arange(len(ids), device=model.device)
    context = Packed.of([0, len(ids)], model.device)
    logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, fulltilt=context).logits[0]
    if (part := getattr(model, VOCABULARY_PART, None)) is not None:
        logits = gather_vocabulary(logits, part)
    wide = logits[:-1].to(torch.promote_types(logits.dtype, torch.float32))
    rounded = torch.finfo(logits.dtype).eps * float(wide.abs().amax(-1).mean())
    return torch.log_softmax(wide, -1).gather(1, ids[1:, None])[:, 0], rounded


def mean_gap(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    return float((torch.cat(left) - torch.cat(right)).abs().mean())


def random_documents(model: PreTrainedModel) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, vocabulary(model), length) for length in LENGTHS]


def vocabulary(model: PreTrainedModel) -> int:
    part = getattr(model, VOCABULARY_PART, None)  # a member of a tensor-parallel group has some rows only, and the same documents as others
    return int(model.get_input_embeddings().weight.shape[0]) if part is None else part.vocabulary


def name_of(model: PreTrainedModel) -> str:
    several = "" if model.config.get_text_config() is model.config else ", a model of text and other inputs"
    return f"{type(model).__name__} ({model.config.model_type}{several})"
