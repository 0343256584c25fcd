"""Models that give one number for each token: critics and reward models.

Enters: a folder or hub name. Leaves: a `ScalarModel`: a transformer without its vocabulary head, and a linear head to one number.
Guaranteed: every weight of the body comes from the files, and so does the head unless the caller allows a new one; a head with several
outputs is refused. Numbers are float32 (float64 when the model is) whatever type the body computes in.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from fulltilt.model.attention import Context, Packed, UnsupportedModel
from fulltilt.model.forward import hidden_states
from fulltilt.model.load import read_model, refuse_not_finite, revision_of
from fulltilt.model.stored import stored_weights
from fulltilt.model.verify import verify
from fulltilt.records import UserError
from fulltilt.schema import ModelConfig

# Names of the head in transformers' sequence and token classification models.
WEIGHT, BIAS = "score.weight", "score.bias"
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


class ScalarModel(torch.nn.Module):
    def __init__(self, body: PreTrainedModel, score: torch.nn.Linear) -> None:
        super().__init__()
        self.body = body
        self.score = score  # float32 or better: one row of weights costs nothing, and its results are compared with rewards

    @property
    def config(self) -> PreTrainedConfig:
        return self.body.config

    @property
    def device(self) -> torch.device:
        return self.body.device

    @property
    def dtype(self) -> torch.dtype:
        return self.body.dtype

    def values(self, ids: torch.Tensor, positions: torch.Tensor, context: Context) -> torch.Tensor:
        """Return one number for each token of the stream [T], from the tokens of its document up to that token."""
        hidden = hidden_states(self.body, ids, positions, context)
        numbers: torch.Tensor = self.score(hidden.to(self.score.weight.dtype))
        return numbers[:, 0]


def decoder_layers(model: torch.nn.Module, otherwise: str) -> list[torch.nn.Module]:
    """Return the decoder layers of a model with any head, or none. `otherwise`: what cannot be done without knowing them, and the
    remedy."""
    body: Any = (model.body if isinstance(model, ScalarModel) else model).base_model
    layers = getattr(body, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise UnsupportedModel(f"{type(body).__name__} does not keep its decoder layers as `layers`: {otherwise}")
    return list(layers)


def load_scalar(
    config: ModelConfig, device: torch.device, path: str | Path | None = None, *, key: str, head: Literal["new", "required"],
    stored: bool = False,
) -> ScalarModel:  # fmt: skip
    """Load the model of `path`, or of `config`, with one number for each token. `key` is the setting that names it, for messages.

    `head`: "required" refuses files without a head, since a reward model would score at random; "new" starts a missing head from zeros.
    Then every value is 0 and the first advantages are the rewards, without noise of the same size. Training can start from zeros: the first
    update changes only the head, later ones the body too. `stored`: leave the body's parameters in the files (model/stored.py), and the
    body to be verified by the caller.
    """
    source = str(path or config.path)
    body, report = read_model(AutoModel, "a transformer", config, device, source, key, stored=stored)
    of_head = stored_head(source, config, key) if WEIGHT in report["unexpected_keys"] else {}
    if not of_head and head == "required":
        raise UserError(
            f"{key}: {source} has no score head ({WEIGHT}): it is not a reward model. Give a model that was trained for sequence "
            "classification with one label"
        )
    if not stored:
        verify(body, key)
    width = width_of(body)
    score = torch.nn.Linear(width, 1, bias=BIAS in of_head, dtype=torch.promote_types(body.dtype, torch.float32))
    for name, parameter in score.named_parameters():
        tensor = of_head.get(f"score.{name}", torch.zeros_like(parameter))
        if tensor.shape != parameter.shape:
            raise UserError(
                f"{key}: the score head of {source} (score.{name}) has the shape {list(tensor.shape)}, not {list(parameter.shape)}: one "
                "number is needed for each token. Give a model with one label"
            )
        parameter.data.copy_(tensor)
    refuse_not_finite(((f"score.{name}", parameter) for name, parameter in score.named_parameters()), source, key)
    return ScalarModel(body, score.to(device)).eval()


@torch.no_grad()
def width_of(body: PreTrainedModel) -> int:
    """Return the width of the body's results, which some families project to another width than that of their layers. Those families cannot
    be divided or sharded, so a body whose parameters are in files has the usual width; verifying it would show another."""
    if stored_weights(body) is not None:
        return int(body.config.get_text_config().hidden_size)
    first = torch.zeros(1, dtype=torch.int64, device=body.device)
    return hidden_states(body, first, first, Packed.of([0, 1], body.device)).shape[-1]


def stored_head(source: str, config: ModelConfig, key: str) -> dict[str, torch.Tensor]:
    """Return the head's tensors, from whichever of the model's files hold them."""
    index = stored_file(source, INDEX, config)
    names = json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index else {WEIGHT: FILE, BIAS: FILE}
    found: dict[str, torch.Tensor] = {}
    for name in (WEIGHT, BIAS):
        file = stored_file(source, names[name], config) if name in names else None
        if file:
            with safe_open(file, framework="pt") as tensors:
                found |= {name: tensors.get_tensor(name)} if name in tensors.keys() else {}  # noqa: SIM118
    if WEIGHT not in found:
        raise UserError(f"{key}: the score head of {source} is not stored as safetensors. Save the model as safetensors")
    return found


def stored_file(source: str, name: str, config: ModelConfig) -> Path | None:
    """Return the path of a file of the model's folder or, for a hub name, of the hub's cache, which loading the body has filled; None:
    there is no such file."""
    try:
        found = cached_file(source, name, **revision_of(config, source))
    except OSError:
        return None
    return Path(found) if found else None
