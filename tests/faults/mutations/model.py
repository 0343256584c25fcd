"""Another content of a model folder, of the actor or of another role."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import values
from tree import Tree

from mutations.registry import mutation, put_in_place, said


class Payload:
    """Unpickled, it writes a file beside the user's."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("owned.txt", "w"))


def model_folder(tree: Tree, chance: random.Random) -> Path:
    """A role's folder, most often one other than the actor's where there is one."""
    named = [tree.tables.get(role, {}).get("path") for role in ("model", "ref", "critic", "reward_model", "lora")]
    there = [tree.root / path for path in named if isinstance(path, str) and (tree.root / path).is_dir()]
    return chance.choice(there) if there else tree.root / "model"


def model_file(tree: Tree, chance: random.Random) -> Path:
    return chance.choice(sorted(path for path in model_folder(tree, chance).iterdir() if path.is_file()))


@mutation("model", 4)
def damaged_model_file(tree: Tree, chance: random.Random) -> str:
    path = model_file(tree, chance)
    data, how = values.damaged(path.read_bytes(), chance)
    path.write_bytes(data)
    return said(tree, path, how)


@mutation("model", 6)
def another_model_value(tree: Tree, chance: random.Random) -> str:
    """One value of a JSON file."""
    files = sorted(path for path in model_folder(tree, chance).glob("*.json"))
    path = chance.choice([*files, *(file for file in files if file.name in ("config.json", "adapter_config.json"))])
    try:
        document, how = values.changed_json(json.loads(path.read_bytes()), chance)
    except (ValueError, RecursionError):
        return said(tree, path, "is no JSON any more")
    path.write_bytes(values.dumped(document))
    return said(tree, path, how)


MODEL_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_size": (0, -32, 31, 33, 64, 2**31, "32", None, 32.5),
    "num_attention_heads": (0, 3, -4, 5, 2**20),
    "num_key_value_heads": (0, 3, 8, -1, None),
    "num_hidden_layers": (0, 1, 3, -1, 10**6),
    "vocab_size": (0, 1, 50, 161, 10**9, -1),
    "intermediate_size": (0, 47, -1),
    "max_position_embeddings": (0, 1, 8, -1, 2**40, None, "512"),
    "rms_norm_eps": (0, -1, 1e308, "x", None),
    "eos_token_id": (None, -1, 500, [1, 2], [], ["1"], [[1]], "1", 1.0, True, {"a": 1}, 10**12),
    "bos_token_id": (None, -1, 500, [0], "0"),
    "pad_token_id": (-1, 500, "x", [1]),
    "model_type": ("gpt2", "bert", "t5", "mamba", "falcon", "unknown", "", 3, None, "qwen2_vl", "llama", "gpt_oss", "clip", "whisper"),
    "architectures": (["Other"], [], None, "x", [3], ["Qwen2ForSequenceClassification"], ["BertModel"]),
    "dtype": ("float16", "int8", "x", 3, None, "float64"),
    "rope_theta": (0, -1, "x", None, 1e308),
    "rope_parameters": (None, {}, {"rope_type": "x"}, {"rope_type": "yarn"}, {"rope_type": "linear", "factor": 0}, 3, {"rope_theta": "x"}),
    "rope_scaling": ({"type": "x"}, {"rope_type": "dynamic"}, 3, {"rope_type": "linear", "factor": "x"}),
    "quantization_config": ({"quant_method": "gptq"}, {"quant_method": "x"}, {}, 3, {"load_in_8bit": True}),
    "auto_map": ({"AutoModelForCausalLM": "x.Y"}, 3, {"AutoConfig": "x--y.Z"}),
    "tie_word_embeddings": (True, "x", None),
    "use_sliding_window": (True,),
    "sliding_window": (0, -1, 4, "x"),
    "layer_types": ([], ["x", "y"], ["full_attention"], None, ["sliding_attention", "full_attention"]),
    "head_dim": (0, 7, -8, 16, {"0": 8}, [8, 8]),
    "hidden_act": ("x", None, 3, "relu"),
    "attention_dropout": (2, -1, "x", 0.5),
    "num_labels": (0, 2, 3),
    "id2label": ({}, {"0": "a", "1": "b"}, None),
    "torch_dtype": ("float16", "x"),
    "initializer_range": ("x", -1),
    "attn_implementation": ("x", "flash_attention_2"),
    "transformers_version": (3, "99.0"),
    "r": (0, -1, 3, "x", None, 10**6),
    "lora_alpha": (0, "x", None),
    "target_modules": ([], ["x"], None, "all-linear", 3),
    "peft_type": ("IA3", "x", None),
    "base_model_name_or_path": (None, 3, "other/model"),
}  # fmt: skip


@mutation("model", 6)
def impossible_model(tree: Tree, chance: random.Random) -> str:
    folder = model_folder(tree, chance)
    path = next((folder / name for name in ("adapter_config.json", "config.json") if (folder / name).exists()), folder / "config.json")
    try:
        document = json.loads(path.read_bytes())
        assert isinstance(document, dict)
    except (OSError, ValueError, AssertionError, RecursionError):
        document = {}
    key = chance.choice([*MODEL_VALUES, *(name for name in MODEL_VALUES if name in document)])
    document[key] = chance.choice(MODEL_VALUES[key])
    path.write_bytes(values.dumped(document))
    return said(tree, path, f"with {key} = {document[key]!r}")


@mutation("model", 3)
def odd_generation_settings(tree: Tree, chance: random.Random) -> str:
    path = model_folder(tree, chance) / "generation_config.json"
    key = chance.choice(
        [
            "eos_token_id",
            "pad_token_id",
            "bos_token_id",
            "max_length",
            "do_sample",
            "temperature",
            "top_k",
            "stop_strings",
            "x",
            "bad_words_ids",
        ]
    )
    odd = chance.choice((*MODEL_VALUES["eos_token_id"], values.odd_value(chance)))
    document: Any = {key: odd, "transformers_version": "5.17.0"}
    path.write_bytes(values.dumped(document) if chance.random() < 0.8 else values.dumped(odd))
    return said(tree, path, f"with {key} = {str(odd)[:60]!r}")


TOKENIZER_KEYS = (
    "model_max_length", "eos_token", "bos_token", "unk_token", "pad_token", "tokenizer_class", "added_tokens_decoder", "chat_template",
    "backend",
)  # fmt: skip
TOKENIZER_VALUES: tuple[Any, ...] = (
    None, "", "x", 3, -1, [], {}, {"1": 3}, "LlamaTokenizer", "BertTokenizer", values.ESCAPES, {"content": "<x>"}, 10**30,
)  # fmt: skip


@mutation("model", 2)
def odd_tokenizer(tree: Tree, chance: random.Random) -> str:
    path = model_folder(tree, chance) / "tokenizer_config.json"
    try:
        document = json.loads(path.read_bytes())
        key = chance.choice(TOKENIZER_KEYS)
        document[key] = chance.choice(TOKENIZER_VALUES)
    except (OSError, ValueError, TypeError, RecursionError):
        return said(tree, path, "is no JSON any more")
    path.write_bytes(values.dumped(document))
    return said(tree, path, f"with {key} = {document[key]!r}")


@mutation("model", 5)
def odd_tensors(tree: Tree, chance: random.Random) -> str:
    files = sorted(model_folder(tree, chance).glob("*.safetensors"))
    if not files:
        return "no tensors to change"
    try:
        data, how = values.changed_tensors(files[0].read_bytes(), chance)
    except Exception:
        return said(tree, files[0], "is no safetensors any more")
    files[0].write_bytes(data)
    return said(tree, files[0], how)


@mutation("model", 2)
def file_gone(tree: Tree, chance: random.Random) -> str:
    path = model_file(tree, chance)
    path.unlink()
    how = chance.choice(("deleted", "deleted", "a folder", "a loop", "a dangling link", "a pipe", "unreadable"))
    put_in_place(path, how)
    if how == "unreadable":
        path.write_text("{}")
        path.chmod(0)
    return said(tree, path, how)


@mutation("model", 1)
def files_swapped(tree: Tree, chance: random.Random) -> str:
    folder = model_folder(tree, chance)
    one, other = chance.sample(sorted(path for path in folder.iterdir() if path.is_file()), 2)
    first = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(first)
    return said(tree, one, f"and {other.name} swapped")


@mutation("model", 3)
def in_shards(tree: Tree, chance: random.Random) -> str:
    """The parameters in shards, whose index is right or not."""
    folder = model_folder(tree, chance)
    whole = folder / "model.safetensors"
    if not whole.is_file():
        return "no tensors to shard"
    try:
        header = json.loads(whole.read_bytes()[8 : 8 + int.from_bytes(whole.read_bytes()[:8], "little")])
    except (ValueError, RecursionError):
        return said(tree, whole, "is no safetensors any more")
    shard = "model-00001-of-00001.safetensors"
    whole.rename(folder / shard)
    index: Any = {"metadata": {"total_size": 1}, "weight_map": {name: shard for name in header if name != "__metadata__"}}
    how = chance.choice(("right", "empty", "missing shard", "odd name", "not a map", "damaged", "outside", "changed"))
    if how == "empty":
        index["weight_map"] = {}
    elif how == "missing shard":
        index["weight_map"][next(iter(index["weight_map"]))] = "model-00002-of-00002.safetensors"
    elif how == "odd name":
        index["weight_map"][chance.choice(("x", "lm_head.other"))] = chance.choice((shard, 3, None, "", "../x", "a" * 300))
    elif how == "not a map":
        index = chance.choice(([], 3, None, "x", {"weight_map": []}, {"weight_map": None}, {"weight_map": "x"}))
    elif how == "outside":
        index["weight_map"] = dict.fromkeys(index["weight_map"], "../notes.txt")
    elif how == "changed":
        index, _ = values.changed_json(index, chance)
    data = values.dumped(index)
    (folder / "model.safetensors.index.json").write_bytes(values.damaged(data, chance)[0] if how == "damaged" else data)
    return said(tree, folder, f"in shards, index {how}")


@mutation("model", 1)
def pickled(tree: Tree, chance: random.Random) -> str:
    """Parameters as a pickle, whose loading would run its code."""
    folder = model_folder(tree, chance)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    name = "adapter_model.bin" if (folder / "adapter_config.json").exists() else "pytorch_model.bin"
    data = chance.choice((pickle.dumps(Payload()), pickle.dumps({"x": 1}), b"", b"PK\x03\x04", values.PAGE))
    (folder / name).write_bytes(data)
    return said(tree, folder / name, f"in place of safetensors: {data[:20]!r}")
