"""Inspection of a model's or an adapter's folder before anything in it is loaded, and digests of its files.

Enters: a folder, and the setting that names it. Leaves: nothing, or a UserError with the setting, the file, what is wrong and the remedy.
Guaranteed: no weights are read except a digest's samples, so that `--check` is quick; mistakes that transformers finds in the values of a
readable file are reported when the file is used (`reading` in model/load.py). Only folders are inspected: files of a hub's cache were
checked at their download.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fulltilt.folders import substitute_in
from fulltilt.records import UserError
from fulltilt.words import first_line, shortened

INDEX = "model.safetensors.index.json"
SMALL_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
AGAIN = "Download or copy it again"


def inspect_model(source: str, key: str) -> None:
    """Refuse a folder whose files cannot be a model's."""
    folder = Path(source)
    if not folder.is_dir():
        return
    config = read_object(folder / "config.json", key)
    generation = read_object(folder / "generation_config.json", key, needed=False)
    for name in SMALL_FILES:
        read_object(folder / name, key, needed=False)
    if (folder / "tokenizer.json").exists():  # too large to be read twice
        refuse_substitute(folder / "tokenizer.json", key)
    for name, given in {"config.json": config, "generation_config.json": generation}.items():
        check_end_tokens(folder / name, given.get("eos_token_id"), key)
    tensors = stored_tensors(folder, ("model.safetensors", INDEX), key)
    layers = config.get("num_hidden_layers")
    if tensors and isinstance(layers, int) and layers > len(tensors):
        found = f"num_hidden_layers is {layers}, but the weights of this folder are {len(tensors)} tensors"
        raise broken(key, folder / "config.json", found, "Use the config.json that came with the weights")


def inspect_adapter(source: str, key: str) -> None:
    """Refuse a folder whose files cannot be an adapter's that peft saved."""
    folder = Path(source)
    if folder.is_dir():
        read_object(folder / "adapter_config.json", key)
        stored_tensors(folder, ("adapter_model.safetensors",), key)


def stored_tensors(folder: Path, names: tuple[str, ...], key: str) -> set[str]:
    """Return the names of the tensors in a folder's safetensors files; an empty set if it has other files of weights. `names`: the names of
    a single file with all of them, or else of the index of several files."""
    found = next((folder / name for name in names if (folder / name).exists()), None)
    if found is not None:
        return sharded_tensors(found, key) if found.name == INDEX else set(read_names(found, key))
    if any(folder.glob("*.bin")):
        return set()
    raise broken(key, folder, f"there is no {' or '.join(names)}", "Give a folder with the weights, as save_pretrained writes them")


def sharded_tensors(index: Path, key: str) -> set[str]:
    shards: dict[str, set[str]] = {}
    for tensor, shard in shards_of(index, key).items():
        shards.setdefault(shard, set()).add(tensor)
    for shard, promised in shards.items():
        if missing := promised.difference(read_names(index.parent / shard, key)):
            raise broken(key, index.parent / shard, f"{min(missing)!r} is not in it, though {INDEX} says so", AGAIN)
    return set().union(*shards.values())


def shards_of(index: Path, key: str) -> Mapping[str, str]:
    """Return the file of each tensor."""
    found = read_object(index, key).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise broken(key, index, "it has no weight_map with the file of each tensor", AGAIN)
    for tensor, shard in found.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            given = shortened(repr(shard), 80)
            raise broken(key, index, f"the weight_map of {tensor!r} is {given}, which is not the name of a file of this folder", AGAIN)
    return found


def read_names(file: Path, key: str) -> list[str]:
    """Return the names of the tensors of a safetensors file, whose header must fit its size."""
    refuse_substitute(file, key)
    try:
        with safe_open(file, framework="np") as tensors:
            return list(tensors.keys())
    except (SafetensorError, OSError) as error:
        raise broken(key, file, f"it is damaged or incomplete ({first_line(error)})", AGAIN) from error


def read_object(file: Path, key: str, *, needed: bool = True) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if the file does not exist and is not needed."""
    if not file.exists() and not needed:
        return {}
    refuse_substitute(file, key)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise broken(key, file, f"it is not readable as JSON ({first_line(error)})", AGAIN) from error
    if not isinstance(found, dict):
        raise broken(key, file, f"it holds a JSON {type(found).__name__}, not an object", AGAIN)
    return found


def refuse_substitute(file: Path, key: str) -> None:
    """Refuse what is often found in place of a file: nothing, a pointer to it, a web page about it."""
    if not file.exists():
        raise broken(key, file, "it is missing", "Give the folder of a complete model")
    if not file.is_file():
        raise broken(key, file, "it is not a file", AGAIN)
    try:
        with file.open("rb") as opened:
            start = opened.read(64)
    except OSError as error:
        raise broken(key, file, f"it cannot be read ({first_line(error)})", "Correct its permissions") from error
    if not start.strip():
        raise broken(key, file, "it is empty", AGAIN)
    if found := substitute_in(start):
        raise broken(key, file, *found)


def check_end_tokens(file: Path, given: Any, key: str) -> None:
    for token in given if isinstance(given, list) else [] if given is None else [given]:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            found = f"eos_token_id is {shortened(repr(given), 80)}, not a token id or a list of them"
            raise broken(key, file, found, "Correct it, or remove it: the tokenizer names its end token too")


def broken(key: str, file: Path, what: str, remedy: str) -> UserError:
    return UserError(f"{key}: {file}: {what}. {remedy}")
