"""Loading unmodified Hugging Face models and tokenizers.

Enters: a folder or hub name. Leaves: the model in evaluation mode with our functions for attention and experts, its tokenizer, its end
tokens. Guaranteed: every weight comes from the files (a missing one is refused, never initialised); remote code runs only if asked for; end
tokens are all that the generation config, the model config or the tokenizer name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import EntryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from fulltilt.model import attention, experts
from fulltilt.model.chat import read_template
from fulltilt.records import UserError
from fulltilt.schema import ModelConfig
from fulltilt.words import first_line, listed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
READ_ERRORS = (OSError, ValueError, KeyError, ImportError, TypeError, RuntimeError)  # raised by transformers for unreadable files


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[name]


def load_model(config: ModelConfig, device: torch.device, path: str | Path | None = None, key: str = "model.path") -> PreTrainedModel:
    """The model of `config`, or of another path with the same settings (a checkpoint, the reference role)."""
    model, _ = read_model(AutoModelForCausalLM, "a causal language model", config, device, str(path or config.path), key)
    return model


def read_model(
    kind: Any, what: str, config: ModelConfig, device: torch.device, source: str, key: str
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model through one of transformers' Auto classes, and transformers' report on the files. `key` is the setting that names `source`,
    for messages."""
    transformers_logging.disable_progress_bar()
    options = origin(config, source)
    with reading(f"{source} could not be loaded as {what}", key, source, "config.json and the files of its weights"):
        try:
            model, report = kind.from_pretrained(
                source,
                dtype=choose_dtype(config.dtype, device),
                attn_implementation=attention.register(),
                experts_implementation=experts.register(),
                output_loading_info=True,
                **options,
            )
        except KeyError as error:
            if attention.NAME not in str(error):
                raise
            names = ", ".join(AutoConfig.from_pretrained(source, **options).architectures or ["unnamed"])
            raise attention.UnsupportedModel(
                f"{key}: the architecture of {source} ({names}) does not use transformers' attention interface, so packed documents would "
                "mix. It cannot be run here"
            ) from error
    missing = sorted(report["missing_keys"]) + sorted(str(key) for key in report.get("mismatched_keys", ()))
    if missing:
        raise UserError(
            f"{key}: {source} lacks weights that its architecture ({type(model).__name__}) needs, or has them in another shape: "
            f"{listed(missing, 4)}. Use a complete checkpoint"
        )
    # Evaluation mode throughout: dropout would make training disagree with rollout, which runs the same weights.
    return model.to(device).eval(), report


def origin(config: ModelConfig, source: str) -> dict[str, Any]:
    """Options for loading `source` with transformers. The revision belongs to `model.path` and to nothing else."""
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if source == config.path and config.revision:
        options["revision"] = config.revision
    return options


def load_tokenizer(
    config: ModelConfig, path: str | Path | None = None, key: str = "model.path", chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of `config`, or that of another model, whose chat template is its own or `chat_template`, never the one of `config`."""
    source = str(path or config.path)
    with reading(
        f"the tokenizer of {source} could not be loaded", key, source, "tokenizer.json, tokenizer_config.json and chat_template.jinja"
    ):
        tokenizer = AutoTokenizer.from_pretrained(source, **origin(config, source))
    if tokenizer.get_vocab().keys() <= tokenizer.get_added_vocab().keys():
        # Without files, transformers creates tokenizers of some families that have special tokens only.
        raise UserError(f"{key}: {source} has no tokenizer, or one without a vocabulary. Put the files of its tokenizer there")
    template = chat_template if path else config.chat_template
    if template:
        tokenizer.chat_template = read_template(template, f"{key.partition('.')[0]}.chat_template")
    return tokenizer


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer with more tokens than the embedding has rows. Fewer tokens are usual: embeddings are padded."""
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens but the model's embedding only {rows} rows: "
            "they do not belong together; use the tokenizer that came with the model"
        )


def read_config(config: ModelConfig, path: str | None = None, key: str = "model.path") -> PretrainedConfig:
    """The configuration of the model, or of another one."""
    source = path or config.path
    with reading(f"the configuration of {source} could not be loaded", key, source, "config.json"):
        return AutoConfig.from_pretrained(source, **origin(config, source))


def end_tokens(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token that ends a response, from the model's configuration files."""
    named: list[Any] = [tokenizer.eos_token_id]
    options: dict[str, Any] = {"revision": config.revision} if config.revision else {}
    if not Path(config.path).is_dir() or (Path(config.path) / "generation_config.json").exists():
        reads = reading(f"the generation config of {config.path} could not be loaded", "model.path", config.path, "generation_config.json")
        with reads, contextlib.suppress(EntryNotFoundError):  # many models have none
            named.append(GenerationConfig.from_pretrained(config.path, **options).eos_token_id)
    named.append(getattr(read_config(config).get_text_config(), "eos_token_id", None))
    ids: set[int] = set()
    for entry in named:
        ids.update(entry if isinstance(entry, list | tuple) else [] if entry is None else [entry])
    return frozenset(int(token) for token in ids)


def export(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, tensors: dict[str, torch.Tensor] | None = None
) -> None:
    """Write model and tokenizer in transformers' own format. `tensors`: in place of the model's own."""
    folder.mkdir(parents=True, exist_ok=True)
    transformers_logging.disable_progress_bar()
    # transformers loads generation configs that it refuses to save (a temperature without do_sample): it is written unchanged.
    generation = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(folder, state_dict=tensors)
    finally:
        model.generation_config = generation
    if generation is not None:
        generation.to_json_file(folder / "generation_config.json")
    tokenizer.save_pretrained(folder)


def context_limit(config: PretrainedConfig) -> int | None:
    """The most positions that the model's configuration allows, if it says so."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit else None


@contextlib.contextmanager
def reading(failure: str, key: str, source: str, files: str) -> Iterator[None]:
    """Turn what transformers raises into a UserError that says what to do. `files`: those of the model's folder that are read."""
    try:
        yield
    except attention.UnsupportedModel:
        raise
    except READ_ERRORS as error:
        if "trust_remote_code" in str(error):
            remedy = "Read that code, then set model.trust_remote_code = true"
        elif not Path(source).is_dir():
            remedy = "It is not a folder here, and a hub name needs a network: offline, give the folder of a downloaded model"
        else:
            remedy = f"Repair or replace {files} in that folder, or give the folder of another model"
        raise UserError(f"{key}: {failure}: {first_line(error).rstrip('.')}. {remedy}") from error
