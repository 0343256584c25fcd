"""Loading unmodified Hugging Face models and tokenizers.

Enters: a folder or hub name. Leaves: the model in evaluation mode with our functions for attention and experts, its tokenizer, its end
tokens. Guaranteed: every weight comes from the files (a missing one is refused, never initialised) and is a finite number; remote code runs
only if asked for; a hub name stands for the commit that `commits` has for it; end tokens are all that the generation config, the model
config or the tokenizer name. Any error of transformers about the content of a folder or a hub's files becomes a UserError of one line, with
the original error as its cause. A failure of fulltilt's own code, or of memory, is raised unchanged.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import EntryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from fulltilt.blame import says_nothing
from fulltilt.commits import commit_of
from fulltilt.model import attention, experts
from fulltilt.model.chat_template import read_template
from fulltilt.model.folder import inspect_model
from fulltilt.model.stored import READ_WHOLE, NotSliceable, StoredTensor, left_in_files, take_out
from fulltilt.records import UserError
from fulltilt.schema import ModelConfig
from fulltilt.shape import Shape, UnknownParameters
from fulltilt.words import first_line, listed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A line of transformers' report on tensors with another shape than the architecture's.
MISMATCH = re.compile(r"^(\S.*?)\s*\|\s*MISMATCH.*?ckpt: torch\.Size\((.*?)\) vs model:\s*torch\.Size\((.*?)\)", re.MULTILINE)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[name]


def load_model(
    config: ModelConfig, device: torch.device, path: str | Path | None = None, key: str = "model.path", *, stored: bool = False
) -> PreTrainedModel:
    """Return the model of `config`, or of another path with the same settings (a checkpoint, the reference role). `stored`: as in
    `read_model`."""
    what = "a causal language model"
    model, _ = read_model(AutoModelForCausalLM, what, config, device, str(path or config.path), key, stored=stored)
    return model


def read_model(
    kind: Any, what: str, config: ModelConfig, device: torch.device, source: str, key: str, *, stored: bool = False
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return a model through one of transformers' Auto classes, and transformers' report on the files. `key` is the setting that names
    `source`, for messages. `stored`: leave parameters in the files, if these can be read in parts (model/stored.py)."""
    found = check_model(config, source, key, kind)
    transformers_logging.disable_progress_bar()
    failure = f"{source} could not be loaded as {what}"
    with reading(failure, key, source, "config.json and the files of its weights"), loading_report() as said:
        refuse_larger_than_files(found, partial(kind.from_config, found, trust_remote_code=config.trust_remote_code), source, key)
        load = partial(
            kind.from_pretrained,
            source,
            dtype=choose_dtype(config.dtype, device),
            attn_implementation=attention.register(),
            experts_implementation=experts.register(),
            output_loading_info=True,
            **origin(config, source),
        )
        try:
            model, report = load_from(load, in_parts=stored)
        except RuntimeError:
            refuse_incomplete([], MISMATCH.findall("\n".join(said)), source, key)
            raise
        except KeyError as error:
            if attention.NAME not in str(error):
                raise
            names = ", ".join(read_config(config, source, key).architectures or ["unnamed"])
            raise attention.UnsupportedModel(
                f"{key}: the architecture of {source} ({names}) does not use transformers' attention interface, so packed documents would "
                "mix. Use a model of another architecture: docs/models.md lists those that run"
            ) from error
    refuse_incomplete(sorted(report["missing_keys"]), [], source, key)
    if any(isinstance(parameter, StoredTensor) for parameter in model.parameters()):
        take_out(model, device, source, key)
        return model.eval(), report
    # Evaluation mode throughout: dropout would make training disagree with rollout, which runs the same weights.
    model.to(device).eval()
    refuse_not_finite(model.named_parameters(), source, key)
    return model, report


def load_from(load: Callable[[], tuple[PreTrainedModel, dict[str, Any]]], *, in_parts: bool) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the result of `load`. `in_parts`: with its parameters left in the files; if that fails, the model records why it was read
    whole."""
    why = None
    if in_parts:
        try:
            with left_in_files():
                return load()
        except (OSError, MemoryError):  # perhaps of this worker alone: the others must not wait for one that continues in another way
            raise
        except Exception as error:  # a mistake in the files is found again, and reported, when they are read whole
            why = str(error) if isinstance(error, NotSliceable) else f"{type(error).__name__}: {first_line(error)}"
    model, report = load()
    setattr(model, READ_WHOLE, why)
    return model, report


@contextlib.contextmanager
def loading_report() -> Iterator[list[str]]:
    """Collect transformers' log messages while it loads, instead of letting it print: errors here quote the relevant ones."""

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    said: list[str] = []
    logger, level = logging.getLogger("transformers"), transformers_logging.get_verbosity()
    handlers, logger.handlers = logger.handlers, [Collector()]
    transformers_logging.set_verbosity_warning()
    try:
        yield said
    finally:
        logger.handlers = handlers
        transformers_logging.set_verbosity(level)


def check_model(config: ModelConfig, source: str, key: str, kind: Any = AutoModelForCausalLM) -> PretrainedConfig:
    """Refuse mistakes in a model that can be known before its weights are loaded. `kind`: the Auto class that will load it."""
    inspect_model(source, key)
    found = read_config(config, source, key)
    if getattr(found, "quantization_config", None):
        raise attention.UnsupportedModel(
            f"{key}: {source} has a quantization_config in its config.json: quantized models are not supported. Give the model that it was "
            "made from, in float32 or bfloat16"
        )
    if type(found) not in kind._model_mapping and kind.__name__ not in (getattr(found, "auto_map", None) or {}):
        other = ", which reads more than text," if found.get_text_config() is not found else ""
        raise attention.UnsupportedModel(
            f"{key}: {source} is a model of the type {found.model_type}{other} and transformers has no causal language model of that type. "
            "Give a language model: docs/models.md lists those that run"
        )
    try:
        shape_of(found)
    except UserError as error:
        raise UserError(f"{key}: {source}: {error}") from error
    return found


def refuse_larger_than_files(config: PretrainedConfig, build: Callable[[], PreTrainedModel], source: str, key: str) -> None:
    """Refuse a config.json that describes more parameters than the files can hold: transformers would allocate and initialise all missing
    ones before it reports them."""
    stored = sum(file.stat().st_size for end in ("safetensors", "bin") for file in Path(source).glob(f"*.{end}"))
    if stored and (parameters := count_parameters(config, build)) > 2 * stored:  # the smallest number types in use have half a byte
        raise UserError(
            f"{key}: config.json in {source} describes at least {parameters:,} parameters, but the files of weights have {stored:,} bytes. "
            "Use a complete checkpoint, and the config.json that came with it"
        )


def count_parameters(config: PretrainedConfig, build: Callable[[], PreTrainedModel]) -> int:
    """Count parameters by arithmetic if the family is known, since building a model of 7B takes a second; without the head, which a critic
    does not have. Returns 0 for a model that cannot be built: loading it reports why."""
    with contextlib.suppress(UnknownParameters):
        return sum(count for kind, count in shape_of(config).parameters_by_kind().items() if kind != "head")
    with contextlib.suppress(Exception), torch.device("meta"):
        return sum(parameter.numel() for parameter in build().parameters())
    return 0


def shape_of(config: PretrainedConfig) -> Shape:
    """Return the sizes of a model. A few families have their own names for common sizes."""
    text = config.get_text_config()
    given = text.to_dict()
    return Shape.from_config(given | {name: given.get(own, getattr(text, own, None)) for name, own in text.attribute_map.items()})


def refuse_incomplete(missing: Sequence[str], mismatched: Sequence[tuple[str, str, str]], source: str, key: str) -> None:
    """Refuse missing weights and weights of another shape: transformers would initialise them at random. `mismatched`: names, stored
    shapes, and those of the architecture."""
    wrong = [*missing, *(f"{name} ({stored}, not {wanted})" for name, stored, wanted in mismatched)]
    if wrong:
        raise UserError(
            f"{key}: {source} lacks weights that its architecture needs, or has them in another shape: {listed(wrong, 4)}. Use a complete "
            "checkpoint, and the config.json that came with it"
        )


@torch.no_grad()
def refuse_not_finite(tensors: Iterable[tuple[str, torch.Tensor]], source: str, key: str) -> None:
    """Refuse weights that are not finite: every log-prob would be NaN. The largest number of each tensor shows it in one pass, without a
    copy."""
    wrong = [name for name, tensor in tensors if tensor.numel() and not torch.linalg.vector_norm(tensor, torch.inf).isfinite()]
    if wrong:
        raise UserError(
            f"{key}: {source} holds weights that are NaN or infinite: {listed(wrong, 4)}. Use an intact checkpoint, from before a training "
            "diverged; if its numbers are too large for half precision, set model.dtype to float32"
        )


def origin(config: ModelConfig, source: str) -> dict[str, Any]:
    """Return the options for loading `source` with transformers."""
    return {"trust_remote_code": config.trust_remote_code, **revision_of(config, source)}


def revision_of(config: ModelConfig, source: str) -> dict[str, str]:
    """Return the option that names a hub's revision: the commit of `at_commits`; otherwise `model.revision`, which applies to `model.path`
    only."""
    revision = commit_of(source) or (config.revision if source == config.path else None)
    return {"revision": revision} if revision else {}


def commits_of(config: ModelConfig, paths: Mapping[str, str]) -> dict[str, str]:
    """Return the current commit of each of these values that is a hub name, at its revision. `paths`: values by the settings that have
    them."""
    found: dict[str, str] = {}
    for key, source in paths.items():
        if source not in found and not Path(source).is_dir():
            commit = getattr(read_config(config, source, key), "_commit_hash", None)
            found |= {source: commit} if commit else {}  # some hubs do not report it
    return found


def load_tokenizer(
    config: ModelConfig, path: str | Path | None = None, key: str = "model.path", chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of `config`, or of another model, whose chat template is its own or `chat_template`, never the one of
    `config`."""
    source = str(path or config.path)
    no_tokenizer = UserError(f"{key}: {source} has no tokenizer, or one without a vocabulary. Put the files of its tokenizer there")
    with reading(
        f"the tokenizer of {source} could not be loaded", key, source, "tokenizer.json, tokenizer_config.json and chat_template.jinja"
    ):
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, **origin(config, source))
        except ValueError as error:
            if "instantiate the backend tokenizer" in str(error) and not any(Path(source).glob("*.model")):
                raise no_tokenizer from error
            raise
        # Without files, transformers creates tokenizers of some families with special tokens only.
        if tokenizer.get_vocab().keys() <= tokenizer.get_added_vocab().keys():
            raise no_tokenizer
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
    """Return the configuration of the model, or of another one."""
    source = path or config.path
    with reading(f"the configuration of {source} could not be loaded", key, source, "config.json"):
        return AutoConfig.from_pretrained(source, **origin(config, source))


def end_tokens(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return every token that ends a response, from the model's configuration files."""
    named: list[Any] = [tokenizer.eos_token_id]
    options: dict[str, Any] = revision_of(config, config.path)
    if not Path(config.path).is_dir() or (Path(config.path) / "generation_config.json").exists():
        reads = reading(f"the generation config of {config.path} could not be loaded", "model.path", config.path, "generation_config.json")
        with reads, contextlib.suppress(EntryNotFoundError):  # many models have none
            named.append(GenerationConfig.from_pretrained(config.path, **options).eos_token_id)
    text = read_config(config).get_text_config()
    named.append(getattr(text, "eos_token_id", None))
    ids = {token for entry in named if entry is not None for token in (entry if isinstance(entry, list | tuple) else [entry])}
    drawn = frozenset(token for token in ids if token < text.vocab_size)  # other tokens are in many small models' files, by default
    if ids and not drawn:
        raise UserError(
            f"model.path: {config.path} names the end token {min(ids)}, but has {text.vocab_size} tokens: no response would end. Correct "
            "eos_token_id in config.json and generation_config.json"
        )
    return drawn


def export(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, tensors: dict[str, torch.Tensor] | None = None
) -> None:
    """Write model and tokenizer in transformers' own format. `tensors`: instead of the model's own."""
    folder.mkdir(parents=True, exist_ok=True)
    transformers_logging.disable_progress_bar()
    # transformers loads generation configs that it refuses to save (a temperature without do_sample), so this one is written unchanged.
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
    """Return the most positions that the model's configuration allows, if it says so."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit else None


@contextlib.contextmanager
def reading(failure: str, key: str, source: str, files: str) -> Iterator[None]:
    """Turn errors of transformers into a UserError with the remedy. `files`: the files of the model's folder that are read."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # any error that transformers, and the readers below it, raise for unexpected values
        if says_nothing(error):
            raise
        if "trust_remote_code" in str(error):
            remedy = "Read that code, then set model.trust_remote_code = true"
        elif commit := commit_of(source):
            download, here = f"`hf download {source} --revision {commit}`", "give the folder of a model"
            remedy = f"The run reads commit {commit}, which the hub's cache must have: {download} where the hub can be reached, or {here}"
            if not isinstance(error, OSError):  # its files are there
                remedy = f"Repair or replace {files} of commit {commit} in the hub's cache, or {here}"
        elif not Path(source).is_dir():
            remedy = "It is not a folder here, and a hub name needs a network: offline, give the folder of a downloaded model"
        else:
            remedy = f"Repair or replace {files} in that folder, or give the folder of another model"
        text = first_line(error).rstrip(".")
        reason = text if isinstance(error, OSError | ValueError | ImportError) else f"{type(error).__name__}: {text}"
        raise UserError(f"{key}: {failure}: {reason}. {remedy}") from error
