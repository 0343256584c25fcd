"""Whether the modules of a model can be divided among workers, found before any worker starts.

Enters: a configuration, and how to divide which role's model. Leaves: why it cannot be, in words. Guaranteed: no weights are read: the
model is built on the meta device, with its adapters, and the tables by which workers cut it are asked (parallel/slices.py and
parallel/experts.py), so that what passes here is divided there. A model that cannot be built is left to the code that loads it, which
reports why.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch
from transformers import AutoModel, AutoModelForCausalLM, PretrainedConfig

from fulltilt.cluster.loading import of_body
from fulltilt.model import attention, experts, load, lora
from fulltilt.model.scalar import ScalarModel
from fulltilt.parallel.experts import expert_modules, expert_table
from fulltilt.parallel.slices import slice_table
from fulltilt.records import UserError
from fulltilt.schema import Config, LoraConfig


@dataclass(frozen=True)
class WantedDivision:
    """How the model of a role is to be divided. Example: WantedDivision("rollout.tensor_parallel", "actor", 2)"""

    key: str  # the setting that the size comes from
    role: str
    size: int
    how: Literal["layers", "layers, whole experts", "experts"] = "layers"

    @property
    def remedy(self) -> str:
        """The setting that leaves only this model whole."""
        return self.key if self.role == "actor" else f"{self.role}.{self.key.partition('.')[2]}"


@dataclass(frozen=True)
class Structure:
    """What a model is built from. Models are alike if all but the last two fields are equal."""

    described: str  # its config.json
    scalar: bool  # whether the model is a critic or a reward model
    adapters: str  # the settings of its adapters, empty for none
    trusted: bool  # whether code from the model's folder may run
    config: PretrainedConfig = field(compare=False)
    lora: LoraConfig = field(compare=False)


def why_not_divisible(config: Config, wanted: WantedDivision) -> str | None:
    """Return why the modules of a role's model cannot be divided this way; None if they can, or if nothing is known of them."""
    role, settings, path = wanted.role, config.lora, None if wanted.role == "actor" else getattr(config, wanted.role).path
    try:
        found = load.read_config(config.model, path)
    except UserError:
        return None  # reported for the model itself
    if getattr(found, "auto_map", None) and not os.path.isdir(found.name_or_path):
        return None  # code from the hub runs only when the model is loaded, at the commit that the run has resolved
    learns = role == "actor" or (role == "critic" and settings.critic)
    # A loaded adapter names its layers in its own files.
    adapted = settings.rank > 0 and learns and settings.path is None and importlib.util.find_spec("peft") is not None
    adapters = settings.model_dump_json() if adapted else ""
    scalar, trusted = role in ("critic", "reward_model"), config.model.trust_remote_code
    return ask_table(Structure(found.to_json_string(), scalar, adapters, trusted, found, settings), wanted)


@lru_cache(maxsize=64)
def ask_table(structure: Structure, wanted: WantedDivision) -> str | None:
    model: Any = None
    with contextlib.suppress(Exception):  # whatever loads the model reports why it cannot be built
        model = build(structure)
    if model is None:
        return None
    try:
        if structure.adapters:
            body, settings = (model.body, of_body(structure.lora, model.body)) if structure.scalar else (model, structure.lora)
            lora.add_adapters(body, settings, 0)
    except UserError as error:
        return str(error)
    try:
        if wanted.how == "experts":
            expert_table(model, wanted.size, key=wanted.key, remedy=wanted.remedy)
        else:
            whole_experts = wanted.how != "layers" and any(True for _ in expert_modules(model))
            slice_table(model, wanted.size, whole_experts=whole_experts, key=wanted.key, remedy=wanted.remedy)
    except UserError as error:
        return f"{wanted.key}: {wanted.size} workers cannot divide the model of the {wanted.role}: {error}"
    return None


def build(structure: Structure) -> Any:
    """Build the model as a run does, without numbers."""
    kind: Any = AutoModel if structure.scalar else AutoModelForCausalLM
    options = {"attn_implementation": attention.register(), "experts_implementation": experts.register()}
    with torch.device("meta"):
        model = kind.from_config(structure.config, trust_remote_code=structure.trusted, **options)
        if not structure.scalar:
            return model
        return ScalarModel(model, torch.nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False))
