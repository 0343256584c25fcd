"""The measured models: named shapes with random weights, or a folder.

Enters: a name or a path, a device. Leaves: a model with random weights or as transformers alone runs it, and a folder that other engines
read its configuration from. Guaranteed: nothing is downloaded; weights of a named shape are made on the device from a seed and are the same
for every engine that uses them; bfloat16 on CUDA, float32 on CPU.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from fulltilt.model.load import choose_dtype, read_config
from fulltilt.records import UserError
from fulltilt.schema import ModelConfig
from fulltilt.shape import SHAPES as NAMED

SHAPES = {name: NAMED[name] for name in ("0.5B", "1.5B", "7B", "2.7B-A0.5B", "small")}
CLASSES = {"qwen2": "Qwen2ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}  # by model type
DEFAULT = {"cuda": "0.5B", "cpu": "small"}
WEIGHTS_SEED = 0


@dataclass(frozen=True)
class Source:
    """The source of a model."""

    name: str
    config: PreTrainedConfig = field(compare=False)
    folder: Path | None = None  # None: a named shape

    @property
    def vocabulary(self) -> int:
        return int(self.config.get_text_config().vocab_size)


def find(name: str) -> Source:
    """Return a named shape, or the folder at that path."""
    if name in SHAPES:
        # The class by name: engines that read only the configuration choose their model by it.
        own = SHAPES[name]
        return Source(name, AutoConfig.for_model(**own, architectures=[CLASSES[own["model_type"]]]))
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise UserError(
            f"--model {name}: neither a named shape ({', '.join(SHAPES)}) nor a folder with a config.json. Named shapes have random "
            "weights; for a model of the hub give the folder it was downloaded to"
        )
    return Source(name, read_config(ModelConfig(path=name), key="--model"), folder)


def theirs(source: Source, device: torch.device, dtype: str = "auto") -> PreTrainedModel:
    """Load the model as transformers alone runs it, with its own fused attention."""
    if not source.folder:
        return random_model(source, device, "sdpa", dtype)
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(source.folder, dtype=choose_dtype(dtype, device), attn_implementation="sdpa")
    return model.to(device).eval()  # type: ignore[no-any-return]


def random_model(source: Source, device: torch.device, attention_name: str, dtype: str = "auto") -> PreTrainedModel:
    torch.manual_seed(WEIGHTS_SEED)
    # A copy, because a model keeps its configuration and reads from it which attention to run.
    config = copy.deepcopy(source.config)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=choose_dtype(dtype, device), attn_implementation=attention_name)
    return model.to(device).eval()  # type: ignore[no-any-return]


def write_config(source: Source, device: torch.device, folder: Path) -> None:
    """Write the configuration of a named shape into a folder, for engines in other processes. The folder has no weights."""
    if source.folder is None:
        source.config.dtype = choose_dtype("auto", device)
        source.config.save_pretrained(folder)
