"""What a case changes: configuration, command line, data, templates, model folders, run folder, reward file, surroundings.

A mutation is a function of a `Tree` and a generator of chance, registered with its group. It changes the tree and returns what it did, in
words. It only copies and edits files: the process that calls it is forked afterwards.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import values
from child import MEANWHILE
from tree import DIALOGUES, PAIRS, PROMPTS, Tree

from fulltilt import schema

Mutation = Callable[[Tree, random.Random], str]
GROUPS: dict[str, list[tuple[int, Mutation]]] = {}


def mutation(group: str, weight: int = 2) -> Callable[[Mutation], Mutation]:
    def register(function: Mutation) -> Mutation:
        GROUPS.setdefault(group, []).append((weight, function))
        return function

    return register


def choose(group: str, chance: random.Random) -> Mutation:
    weights, functions = zip(*GROUPS[group], strict=True)
    return chance.choices(functions, weights)[0]


# ---- configuration and command line ------------------------------------------------------------------------------------------------------

# Values of these keys are the business of other groups: what they name must exist, or the run is not of the scenario any more.
PLACED = {"model.path", "data.train", "data.val", "run.dir", "ref.path", "critic.path", "reward_model.path", "lora.path", "reward.function"}
# Each starts a service or imports for seconds.
SLOW = {"log.to"}
KEYS = [key for key in schema.keys() if key not in PLACED | SLOW]
# Keys whose large values make a run long, not wrong.
LENGTHENING = (
    "run.steps", "run.epochs", "algorithm.epochs", "algorithm.max_rounds", "algorithm.prompts_per_round", "prompts_per_step",
    "samples_per_prompt", "max_new_tokens", "minibatches_per_step", "timeout_s", "retries",
)  # fmt: skip


def kinds_of(annotation: Any) -> set[Any]:
    """The plain types that a key accepts."""
    if annotation in (int, float, str, bool):
        return {annotation}
    if get_origin(annotation) is Literal:
        return {str}
    return {kind for inner in get_args(annotation) for kind in kinds_of(inner)}


def plausible(key: str, chance: random.Random) -> Any:
    """A value that has the type of the key, so that checks of types let it pass."""
    annotation = schema.keys()[key].annotation
    choices = [value for inner in (annotation, *get_args(annotation)) if get_origin(inner) is Literal for value in get_args(inner)]
    kinds = kinds_of(annotation)
    if choices and chance.random() < 0.4:
        return chance.choice(choices)
    if bool in kinds:
        return chance.random() < 0.5
    if int in kinds or float in kinds:
        whole = float not in kinds
        allowed = [number for number in values.NUMBERS if isinstance(number, int) or not whole]
        return chance.choice([number for number in allowed if number > 0] if chance.random() < 0.8 else allowed)
    return values.odd_value(chance)


def set_key(tree: Tree, key: str, value: Any) -> str:
    section, _, name = key.partition(".")
    tree.tables.setdefault(section, {})[name] = value
    tree.long |= key.endswith(LENGTHENING)
    return f"{key} = {str(value)[:80]!r}"


def given_keys(tree: Tree) -> list[str]:
    return [f"{section}.{key}" for section, keys in tree.tables.items() for key in keys]


@mutation("config", 10)
def another_number(tree: Tree, chance: random.Random) -> str:
    """Of a key that the configuration uses, or of one in its sections."""
    used = [key for key in KEYS if key.partition(".")[0] in tree.tables and {int, float} & kinds_of(schema.keys()[key].annotation)]
    key = chance.choice(used)
    return set_key(tree, key, plausible(key, chance))


@mutation("config", 4)
def another_value(tree: Tree, chance: random.Random) -> str:
    key = chance.choice(KEYS)
    return set_key(tree, key, plausible(key, chance))


@mutation("config", 2)
def odd_type(tree: Tree, chance: random.Random) -> str:
    key = chance.choice(KEYS if chance.random() < 0.5 else [each for each in given_keys(tree) if each != "run.dir"])
    return set_key(tree, key, values.odd_value(chance))


@mutation("config", 1)
def unknown_key(tree: Tree, chance: random.Random) -> str:
    section = chance.choice((*tree.tables, "other", "é"))
    return set_key(tree, f"{section}.{chance.choice(('learning_rate', 'lrr', 'x-y', 'use_liger', 'Path'))}", values.odd_value(chance))


@mutation("config", 1)
def key_removed(tree: Tree, chance: random.Random) -> str:
    key = chance.choice([each for each in given_keys(tree) if each != "run.dir"])
    section, _, name = key.partition(".")
    del tree.tables[section][name]
    return f"{key} removed"


@mutation("config", 2)
def damaged_run_file(tree: Tree, chance: random.Random) -> str:
    tree.write()
    tree.toml, how = values.damaged((tree.root / "run.toml").read_bytes(), chance)
    tree.long = True  # a digit may have been repeated
    return f"run.toml {how}"


@mutation("config", 2)
def text_in_run_file(tree: Tree, chance: random.Random) -> str:
    tree.write()
    lines = (tree.root / "run.toml").read_bytes().splitlines()
    extra = chance.choice(
        (b"[run]", b"[[run]]", b"x", b"= 3", b"a.b.c = 1", b'"" = 1', b"run.steps = 3", b"[model.path]", b"x = 1979-05-27", b"x = 0x" + b"f" * 400)
        + (b"x = " + b"[" * 3000, b"x = " + b"9" * 5000, b"# \xff", b"\x1b[2J = 1", b"x = '''", b'x = "\\ud800"', b"run = 3", b"x = {a = 1}")
    )
    lines.insert(chance.randrange(len(lines) + 1), extra)
    tree.toml = b"\n".join(lines) + b"\n"
    return f"run.toml with the line {extra[:60]!r}"


@mutation("config", 3)
def override(tree: Tree, chance: random.Random) -> str:
    key = chance.choice(KEYS)
    value = plausible(key, chance) if chance.random() < 0.6 else values.odd_value(chance)
    text = schema.toml_value(value) if chance.random() < 0.7 else str(value)
    tree.long |= key.endswith(LENGTHENING)
    given = f"{key}={text}".replace("\0", "").encode("utf-8", "replace").decode()
    tree.arguments.append(given[:5000])
    return f"the argument {given[:80]!r}"


@mutation("config", 2)
def odd_argument(tree: Tree, chance: random.Random) -> str:
    text = chance.choice(
        ("--train.lr", "--train.lr=1e-4", "train.lr", "train.lr 1e-4", "=", "run.steps=", "=3", "~train.lr", "~lora.rank", "~x", "-x", "--json", "--")
        + ("--quiet", "--help", "--latest", "--check", "run.steps=[", "run.steps=1,2", "a.b.c.d=1", "run=3", "run={steps=1}", "run.toml", "other.toml")
        + (".", "model", "\udcff", "é=1", "lr=1e-4", "--lr", "-q", "+run.steps=3", "run/steps=3", "run.steps==3", "run.steps= 3", "'run.steps=3'")
        + ("train_batch_size=4", "actor_rollout_ref.actor.optim.lr=1e-6", "trainer.total_epochs=1", "learning_rate=1", "\x1b[2J=1", "x" * 5000)
    )
    tree.arguments.append(text)
    return f"the argument {text[:80]!r}"


@mutation("config", 1)
def another_run_file(tree: Tree, chance: random.Random) -> str:
    place = chance.choice([index for index, text in enumerate(tree.arguments) if text == "run.toml"] or [len(tree.arguments)])
    name = chance.choice(("none.toml", "", ".", "model", "reward.py", "train.jsonl", "/dev/null", "x\nby", "a" * 300, "run.toml/", "pipe", "loop", "home"))
    if name == "pipe":
        os.mkfifo(tree.root / "pipe")
    if name == "loop":
        (tree.root / "loop").symlink_to("loop")
    tree.arguments[place : place + 1] = [name]
    return f"{name[:40]!r} as the run file"


@mutation("config", 1)
def path_elsewhere(tree: Tree, chance: random.Random) -> str:
    """A key that names a file or a folder names something else."""
    key = chance.choice([key for key in given_keys(tree) if key in PLACED and key != "run.dir"] + ["model.chat_template", "data.val"])
    value = chance.choice(("none", "", ".", "/", "~", "~/x", "~nobody/x", "run.toml", "reward.py", "notes.txt", "model/config.json", "home", "a" * 300))
    return set_key(tree, key, chance.choice((value, f"{value}:score", "model", "train.jsonl", "reward.py:other", "reward.py:", ":", "x\0y", "org/name")))


# ---- data --------------------------------------------------------------------------------------------------------------------------------

CONTENTS: tuple[Any, ...] = (
    *values.TEXTS[:10], "\ud800", "\0", values.ESCAPES, 3, None, True, 1.5, [], {}, [{}], [{"role": "user"}], [{"content": "x"}], ["text"],
    [{"role": "user", "content": ""}], [{"role": "user", "content": None}], [{"role": 3, "content": "x"}], [{"role": "x\x1b", "content": "x"}],
    [{"role": "assistant", "content": "x"}], [{"role": "user", "content": [{"type": "image"}]}], [{"role": "user", "content": "x", "tool_calls": 3}],
    [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}], [{"role": "system", "content": "x"}], [[{"role": "user", "content": "x"}]],
    "a" * 3_000_000, "0" * 40, {"role": "user", "content": "x"},
)  # fmt: skip
COLUMNS = ("prompt", "prompt", "prompt", "response", "ground_truth", "answer", "data_source", "extra_info", "reward_model", "messages", "ability", "weight")


def rows_of(tree: Tree, chance: random.Random) -> tuple[str, list[dict[str, Any]]]:
    supervised = tree.tables.get("algorithm", {}).get("name") == "sft"
    name = "sft.jsonl" if supervised else chance.choice(("train.jsonl", "train.jsonl", "train.jsonl", "val.jsonl"))
    return name, [dict(row) for row in (PAIRS if supervised else PROMPTS if chance.random() < 0.6 else DIALOGUES)]


@mutation("data", 6)
def odd_cells(tree: Tree, chance: random.Random) -> str:
    name, rows = rows_of(tree, chance)
    column, value = chance.choice(COLUMNS), chance.choice(CONTENTS) if chance.random() < 0.7 else values.odd_value(chance)
    for row in rows if chance.random() < 0.3 else chance.sample(rows, 1):
        row[column] = value
    (tree.root / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{name} with {column} = {str(value)[:60]!r}"


@mutation("data", 3)
def odd_lines(tree: Tree, chance: random.Random) -> str:
    name, rows = rows_of(tree, chance)
    lines = [json.dumps(row).encode() for row in rows]
    extra = chance.choice(
        (b"", b" ", b"null", b"[]", b"3", b'"x"', b"{", b"{}", b'{"prompt": "1", "prompt": "2"}', b'{"prompt": NaN}', b'{"prompt": "\\ud800"}')
        + (b'{"prompt": "\xff"}', b'{"prompt": ' + b"[" * 5000, b'{"prompt": ' + b"9" * 5000 + b"}", b"\x1b[2J", b"[1, 2]", b'{"a": {"a": 1, "a": 2}}')
        + (b'{"prompt": "1", "ground_truth": {"a": 1, "a": 2}}', b"{'prompt': '1'}", b'{"prompt": "1",}', b"// comment", b"\0", b"\xef\xbb\xbf{}")
    )
    lines.insert(chance.randrange(len(lines) + 1), extra)
    (tree.root / name).write_bytes(b"\n".join(lines) + b"\n")
    return f"{name} with the line {extra[:60]!r}"


@mutation("data", 3)
def damaged_data(tree: Tree, chance: random.Random) -> str:
    name, _ = rows_of(tree, chance)
    data, how = values.damaged((tree.root / name).read_bytes(), chance)
    (tree.root / name).write_bytes(data)
    return f"{name} {how}"


@mutation("data", 6)
def another_format(tree: Tree, chance: random.Random) -> str:
    """One of the templates' files in place of the data, as it is or damaged."""
    source = chance.choice(sorted(tree.templates.data().iterdir()))
    data, how = source.read_bytes(), "whole"
    if chance.random() < 0.5:
        data, how = values.damaged(data, chance)
    (tree.root / source.name).write_bytes(data)
    key = chance.choice(("train", "train", "val"))
    tree.tables.setdefault("data", {})[key] = source.name
    return f"data.{key} = {source.name!r}, {how}"


@mutation("data", 1)
def compressed(tree: Tree, chance: random.Random) -> str:
    name, _ = rows_of(tree, chance)
    data = gzip.compress((tree.root / name).read_bytes(), mtime=0)
    if chance.random() < 0.6:
        data, how = values.damaged(data, chance)
    else:
        how = "whole"
    (tree.root / f"{name}.gz").write_bytes(data)
    tree.tables.setdefault("data", {})["train"] = f"{name}.gz"
    return f"{name}.gz {how}"


@mutation("data", 2)
def not_a_file(tree: Tree, chance: random.Random) -> str:
    name, _ = rows_of(tree, chance)
    path = tree.root / name
    path.unlink()
    how = chance.choice(("a pipe", "a folder", "an empty folder", "a loop", "a dangling link", "missing", "unreadable", "endless", "a folder of odd files"))
    if how == "a pipe":
        os.mkfifo(path)
    elif how in ("a folder", "an empty folder", "a folder of odd files"):
        path.mkdir()
        if how == "a folder":
            (path / "train.jsonl").write_text(json.dumps(PROMPTS[0]) + "\n")
        if how == "a folder of odd files":
            for inner in chance.sample(("state.json", "dataset_info.json", "dataset_dict.json", "train-00000-of-00003.parquet", "x.arrow", "a.csv"), 3):
                (path / inner).write_bytes(values.damaged(b'{"splits": ["train"], "_data_files": [{"filename": "x.arrow"}]}', chance)[0])
    elif how in ("a loop", "a dangling link", "endless"):
        path.symlink_to({"a loop": name, "a dangling link": "none", "endless": "/dev/zero"}[how])
    elif how == "unreadable":
        path.write_text("{}")
        path.chmod(0)
    return f"{name} is {how}"


TEMPLATES = (
    "{{ 1 / 0 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ raise_exception('no') }}", "{{ messages[99].content }}", "{{ x.y.z }}", "{% include 'x' %}", "{{ 'a' * 10000000 }}", "{% if %}", "{{",
    "{{ messages | nothing }}", "{{ ''.__class__.__mro__ }}", "", "constant", "{{ 10 ** 10 ** 9 }}", "{{ messages | tojson }}", "{{ strftime_now('%Y') }}",
    "{% for m in messages %}{{ m.content.x() }}{% endfor %}", "\x1b[2J{{ messages[0].content }}", "{{ messages[0]['content'] }}" * 1000, "{{ range(10**12) | list }}",
    "{% generation %}x{% endgeneration %}", "{{ namespace().x }}", "{{ cycler() }}", "{{ lipsum(n=1000) }}", "{{ bos_token + none }}", "{{ 'é' }}",
)  # fmt: skip


@mutation("data", 3)
def odd_template(tree: Tree, chance: random.Random) -> str:
    template = chance.choice(TEMPLATES)
    data = template.encode() if chance.random() < 0.85 else values.damaged(template.encode(), chance)[0] + b"\xff"
    if chance.random() < 0.7:
        (tree.root / "template.jinja").write_bytes(data)
        tree.tables.setdefault("model", {})["chat_template"] = "template.jinja"
    else:
        (tree.root / "model" / "chat_template.jinja").write_bytes(data)
    tree.tables.setdefault("data", {})["apply_template"] = "always"
    return f"the chat template {data[:60]!r}"


# ---- model folders -----------------------------------------------------------------------------------------------------------------------


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


def said(tree: Tree, path: Path, how: str) -> str:
    return f"{path.relative_to(tree.root)} {how}"


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
    key = chance.choice(("eos_token_id", "pad_token_id", "bos_token_id", "max_length", "do_sample", "temperature", "top_k", "stop_strings", "x", "bad_words_ids"))
    odd = chance.choice((*MODEL_VALUES["eos_token_id"], values.odd_value(chance)))
    document: Any = {key: odd, "transformers_version": "5.17.0"}
    path.write_bytes(values.dumped(document) if chance.random() < 0.8 else values.dumped(odd))
    return said(tree, path, f"with {key} = {str(odd)[:60]!r}")


@mutation("model", 2)
def odd_tokenizer(tree: Tree, chance: random.Random) -> str:
    path = model_folder(tree, chance) / "tokenizer_config.json"
    try:
        document = json.loads(path.read_bytes())
        key = chance.choice(
            ("model_max_length", "eos_token", "bos_token", "unk_token", "pad_token", "tokenizer_class", "added_tokens_decoder", "chat_template", "backend")
        )
        document[key] = chance.choice((None, "", "x", 3, -1, [], {}, {"1": 3}, "LlamaTokenizer", "BertTokenizer", values.ESCAPES, {"content": "<x>"}, 10**30))
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
    if how == "a folder":
        path.mkdir()
    elif how in ("a loop", "a dangling link"):
        path.symlink_to(path.name if how == "a loop" else "none")
    elif how == "a pipe":
        os.mkfifo(path)
    elif how == "unreadable":
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
    header = json.loads(whole.read_bytes()[8 : 8 + int.from_bytes(whole.read_bytes()[:8], "little")])
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


# ---- run folder --------------------------------------------------------------------------------------------------------------------------

PLACES = (
    ".", "./", "model", "home", "~/x", "~nobody/x", "~", "a" * 300, "x\0y", "x/" * 300 + "y", "/dev/null/x", "/proc/x", "/sys/x", "deep/er/run", "run.toml",
    "reward.py/x", "with space", "\u202erun", "é", "\x1b[2J", "notes.txt", "tmp", "-x", "%s", "$HOME/x", "new/../run", "con:", "x\ny", "link", "loop",
)  # fmt: skip


@mutation("place", 3)
def another_run_folder(tree: Tree, chance: random.Random) -> str:
    place = chance.choice(PLACES)
    if place == "link":
        (tree.root / "elsewhere").mkdir()
        (tree.root / "link").symlink_to("elsewhere")
    if place == "loop":
        (tree.root / "loop").symlink_to("loop")
    tree.tables.setdefault("run", {})["dir"] = place
    expanded = place.replace("~", str(tree.root / "home"), 1) if place.startswith("~/") or place == "~" else place
    tree.run_dir = writable_place(tree.root / expanded, tree.root)
    return f"run.dir = {place[:60]!r}"


def writable_place(path: Path, root: Path) -> Path | None:
    """The folder that may be written: one that is not there, or empty."""
    try:
        found = path.resolve()
        there = found.exists()
        if root not in found.parents or (there and (not found.is_dir() or any(found.iterdir()))):
            return None
    except (OSError, ValueError, RuntimeError):
        return None
    return found


@mutation("place", 4)
def foreign_folder(tree: Tree, chance: random.Random) -> str:
    """The run folder holds what another tool wrote."""
    folder = tree.root / "run"
    if folder.exists():
        return "the run folder is there already"
    folder.mkdir()
    tree.run_dir = None
    contents = chance.sample(
        ("metrics.jsonl", "rollouts/step-000001.jsonl", "run.toml", "plan.json", "validation/x", "checkpoints/step-5/x", ".lock", "thesis.tex", "checkpoints/mine"),
        chance.choice((1, 1, 2, 3)),
    )
    if contents == [".lock"]:
        contents.append("thesis.tex")
    for name in contents:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(chance.choice(("the user's\n", "{}\n", '{"step": 1}\n', "")))
    return f"the run folder holds another tool's {', '.join(contents)}"


@mutation("place", 2)
def folder_in_the_way(tree: Tree, chance: random.Random) -> str:
    folder = tree.root / "run"
    if folder.exists():
        return "the run folder is there already"
    how = chance.choice(("a file", "a loop", "a dangling link", "a pipe", "read-only", "unreadable", "in a read-only folder", "empty"))
    if how == "a file":
        folder.write_text("the user's\n")
    elif how in ("a loop", "a dangling link"):
        folder.symlink_to("run" if how == "a loop" else "none")
    elif how == "a pipe":
        os.mkfifo(folder)
    elif how in ("read-only", "unreadable", "empty"):
        folder.mkdir()
        folder.chmod({"read-only": 0o500, "unreadable": 0o000, "empty": 0o755}[how])
    else:
        (tree.root / "locked").mkdir()
        (tree.root / "locked").chmod(0o500)
        tree.tables.setdefault("run", {})["dir"] = "locked/run"
    if how == "a dangling link":
        tree.run_dir = tree.root / "none"
    return f"the run folder is {how}"


def run_files(tree: Tree) -> list[Path]:
    return sorted(path for path in tree.ours if path.is_file() and not path.is_symlink())


@mutation("run", 6)
def damaged_run(tree: Tree, chance: random.Random) -> str:
    path = chance.choice(run_files(tree))
    top = [file for file in run_files(tree) if file.parent == tree.root / "run"]
    path = chance.choice(top) if chance.random() < 0.5 else path
    data, how = values.damaged(path.read_bytes(), chance)
    path.write_bytes(data)
    return said(tree, path, how)


@mutation("run", 4)
def changed_run(tree: Tree, chance: random.Random) -> str:
    """One value of a JSON file, whose digest in the manifest then follows, as if an older version had written it."""
    files = [path for path in run_files(tree) if path.suffix in (".json", ".jsonl")]
    path = chance.choice([file for file in files if file.name in ("state.json", "plan.json", "manifest.json", "metrics.jsonl")] if chance.random() < 0.8 else files)
    try:
        if path.suffix == ".jsonl":
            lines = path.read_bytes().splitlines()
            at = chance.randrange(len(lines))
            document, how = values.changed_json(json.loads(lines[at]), chance)
            lines[at] = values.dumped(document)
            path.write_bytes(b"\n".join(lines) + b"\n")
        else:
            document, how = values.changed_json(json.loads(path.read_bytes()), chance)
            path.write_bytes(values.dumped(document))
    except (ValueError, IndexError, RecursionError):
        return said(tree, path, "is no JSON any more")
    return said(tree, path, how + (follow(path) if chance.random() < 0.7 else ""))


def follow(path: Path) -> str:
    """Bring the manifest of the file's checkpoint up to date."""
    import hashlib

    manifest = path.parent / "manifest.json"
    if path.name not in ("state.json",) or not manifest.exists():
        return ""
    try:
        document = json.loads(manifest.read_bytes())
        data = path.read_bytes()
        document["files"][path.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    except (ValueError, KeyError, TypeError):
        return ""
    manifest.write_bytes(values.dumped(document))
    return ", and its digest with it"


@mutation("run", 3)
def run_file_gone(tree: Tree, chance: random.Random) -> str:
    path = chance.choice(sorted(path for path in tree.ours if path.exists() and not path.is_symlink()))
    how = chance.choice(("deleted", "deleted", "renamed", "a folder", "a loop", "a dangling link", "unreadable", "read-only", "a pipe"))
    if how in ("unreadable", "read-only"):
        path.chmod(0 if how == "unreadable" else 0o444 if path.is_file() else 0o555)
        return said(tree, path, how)
    if how == "renamed":
        path.rename(path.with_name(f"{path.name}.bak"))
        return said(tree, path, how)
    if path.name == "checkpoints":
        keep_history(tree)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if how == "a folder":
        path.mkdir()
    elif how in ("a loop", "a dangling link"):
        path.symlink_to(path.name if how == "a loop" else "none")
    elif how == "a pipe":
        os.mkfifo(path)
    return said(tree, path, how)


def keep_history(tree: Tree) -> None:
    """From now on the earlier run's metrics and rollouts must stay somewhere."""
    import hashlib

    for path in run_files(tree):
        if path.name == "metrics.jsonl" or path.parent.name == "rollouts":
            tree.kept[str(path.relative_to(tree.root))] = hashlib.sha256(path.read_bytes()).hexdigest()


@mutation("run", 2)
def checkpoints_gone(tree: Tree, chance: random.Random) -> str:
    folder = tree.root / "run" / "checkpoints"
    if not folder.is_dir():
        return "no checkpoints to remove"
    keep_history(tree)
    shutil.rmtree(folder)
    if chance.random() < 0.3:
        folder.mkdir()
    return "the checkpoints are deleted"


@mutation("run", 2)
def stranger_in_run(tree: Tree, chance: random.Random) -> str:
    """A folder or a file of another name among those of the run."""
    folder = tree.root / "run"
    name = chance.choice(
        ("checkpoints/step-00000009", "checkpoints/step-99999999999999999999", "checkpoints/step-x", "checkpoints/mine", "checkpoints/step-00000002.partial-1")
        + ("rollouts/step-x.jsonl", "rollouts/mine.jsonl", "x" * 200, "\x1b[2J", "checkpoints/.trash-step-00000001-1", "checkpoints/step-00000001.replaced")
    )
    path = folder / name
    if path.exists() or not path.parent.is_dir():
        return f"{name} cannot be added"
    kind = chance.choice(("file", "folder", "copy", "loop"))
    if kind == "file":
        path.write_text("the user's\n")
    elif kind == "loop":
        path.symlink_to(path.name)
    else:
        source = folder / "checkpoints" / "step-00000001"
        shutil.copytree(source, path) if kind == "copy" and source.is_dir() else path.mkdir()
    if "partial" in name or "trash" in name or "replaced" in name or name.startswith("checkpoints/step-0"):
        tree.ours |= {path, *path.rglob("*")}
    return f"run/{name[:60]} added, {kind}"


@mutation("run", 1)
def locked_run(tree: Tree, chance: random.Random) -> str:
    tree.held = tree.root / "run" / ".lock"
    return "another process holds the lock of the run"


@mutation("run", 2)
def resumed_otherwise(tree: Tree, chance: random.Random) -> str:
    key, value = chance.choice(
        (("run.resume", "force"), ("run.resume", "never"), ("run.steps", 1), ("run.steps", 2), ("run.keep", 1), ("train.lr", 1.0), ("run.seed", 8))
        + (("algorithm.samples_per_prompt", 3), ("algorithm.name", "rloo"), ("rollout.max_new_tokens", 5), ("lora.rank", 4), ("model.dtype", "bfloat16"))
    )
    return set_key(tree, key, value)


@mutation("run", 2)
def forced_on(tree: Tree, chance: random.Random) -> str:
    tree.tables.setdefault("run", {})["resume"] = "force"
    rows = chance.choice((PROMPTS[:3], PROMPTS[::-1], [{"prompt": "z"}] * 4, DIALOGUES))
    (tree.root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "resumed by force with other rows"


@mutation("meanwhile", 1)
def meanwhile(tree: Tree, chance: random.Random) -> str:
    tree.meanwhile = chance.choice(sorted(MEANWHILE))
    tree.tables.setdefault("run", {})["steps"] = 8
    return f"during the run {tree.meanwhile}"


# ---- reward ------------------------------------------------------------------------------------------------------------------------------

FRAME = "import os, sys, time, signal, threading, subprocess\n\n\ndef score(data_source, solution_str, ground_truth, extra_info):\n    {body}\n"
BODIES = (
    "raise RuntimeError('no')", "raise SystemExit(3)", "raise KeyboardInterrupt", "raise BaseException('no')", "1 / 0", "assert False", "return score(1, 2, 3, 4)",
    "raise RuntimeError('\\x1b]0;owned\\x07')", "raise RuntimeError('x' * 10**6)", "raise RuntimeError('\\ud800')", "raise type('\\x1bX', (Exception,), {})()",
    "raise type('E', (Exception,), {'__str__': lambda self: 1 / 0})()", "raise ExceptionGroup('g', [ValueError(1)])", "yield 1",
    "while True: pass", "time.sleep(1000)", "input()", "sys.exit()", "os._exit(0)", "os._exit(3)", "os.abort()", "os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 11)",
    "os.kill(os.getppid(), signal.SIGTERM); return 0.0", "os.kill(os.getppid(), 9); return 0.0", "os.killpg(os.getpgid(os.getppid()), 15); return 0.0",
    "os.fork(); return 0.0", "os.fork() or time.sleep(1000); return 0.0", "subprocess.Popen(['sleep', '1000']); return 0.0",
    "subprocess.Popen(['sleep', '1000'], start_new_session=True); return 0.0", "os.closerange(0, 1000); return 0.0", "os.chdir('/'); return 0.0",
    "threading.Thread(target=time.sleep, args=(1000,)).start(); return 0.0", "print('\\x1b]0;owned\\x07' * 1000); return 0.0", "sys.stdout.close(); return 0.0",
    "open('run/metrics.jsonl', 'w').write('owned'); return 0.0", "import shutil; shutil.rmtree('run'); return 0.0", "bytearray(10**11)", "'a' * 10**10",
    "sys.setrecursionlimit(10**9); return score(1, 2, 3, 4)", "import ctypes; ctypes.string_at(0)", "del os.environ['PATH']; return 0.0", "return os.environ['SECRET_TOKEN']",
    "sys.modules.clear(); return 0.0", "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)", "import no_such_module", "gc = __import__('gc'); gc.disable(); return 0.0",
)  # fmt: skip
ANSWERS = (
    "None", "float('nan')", "float('inf')", "'x'", "'1.0'", "True", "1e308", "-1e308", "10**400", "1j", "[]", "[1.0]", "{}", "{'score': None}", "{'score': 1e308}", "{'reward': 1.0}",
    "{'score': 1.0, 'x': 'y'}", "{'score': 1.0, 'x': float('nan')}", "{'score': 1.0, 3: 4}", "{'score': 1.0, '\\x1b[2J': 1.0}", "{'score': 1.0, '\\ud800': 1.0}", "{'score': 1.0, '': 1.0}",
    "{'score': 1.0, **{str(n): n for n in range(5000)}}", "{'score': 1.0, 'answer': 'x' * 10**6}", "{'score': 1.0, 'pred': '\\x1b[2J'}", "(1.0, 'x')", "object()", "lambda: 1", "b'1'",
    "type('F', (float,), {})(1.0)", "type('F', (), {'__float__': lambda self: 1 / 0})()", "{'score': 1.0, 'x': {'y': 1}}", "{'score': {'score': 1.0}}", "1e-320", "__import__('decimal').Decimal('1')",
    "__import__('numpy').float32(1)", "__import__('numpy').array([1.0])", "__import__('numpy').float64('nan')", "{'score': 1, 'x': 2**63}", "len(solution_str) * 1e300",
)  # fmt: skip
FILES = (
    b"", b"def score(:\n", b"score = 3\n", b"\xff\xfe", b"def score():\n    return 1.0\n", b"def score(x, y, z):\n    return 1.0\n", b"raise RuntimeError('at import')\n",
    b"import sys; sys.exit(3)\n", b"import os; os._exit(0)\n", b"while True: pass\n", b"import no_such_module\n", b"print('\\x1b[2J')\ndef score(solution_str):\n    return 1.0\n",
    b"class score:\n    pass\n", b"async def score(solution_str, ground_truth):\n    return 1.0\n", b"def score(*args):\n    return 1.0\n", b"def score(**kwargs):\n    return 1.0\n",
    b"async def score(solution_str, ground_truth):\n    import asyncio\n    await asyncio.sleep(1000)\n", b"async def score(solution_str):\n    raise ValueError('no')\n",
    b"def score(solution_strs, ground_truths):\n    return [1.0]\n", b"def score(solution_strs):\n    return None\n", b"def score(solution_strs, **_):\n    return [1.0] * 1000\n",
    b"import time\ntime.sleep(1000)\n", b"def score(solution_str, ground_truth, missing):\n    return 1.0\n", b"score = len\n", b"from run import x\n", b"\0", b"import score\n",
)  # fmt: skip


def impatient(tree: Tree) -> None:
    if "reward" in tree.tables:
        tree.tables["reward"]["timeout_s"] = 0.5


@mutation("reward", 5)
def odd_body(tree: Tree, chance: random.Random) -> str:
    body = chance.choice(BODIES)
    impatient(tree)
    tree.environment["SECRET_TOKEN"] = "secret"
    # Either always, or for some rows only.
    if chance.random() < 0.4 and "yield" not in body:
        body = f"if ground_truth == '4':\n        {body}\n    return float(len(solution_str))"
    (tree.root / "reward.py").write_text(FRAME.format(body=body))
    return f"the reward {body[:90]!r}"


@mutation("reward", 5)
def odd_answer(tree: Tree, chance: random.Random) -> str:
    answer = chance.choice(ANSWERS)
    body = f"return {answer}" if chance.random() < 0.6 else f"return {answer} if ground_truth == '4' else float(len(solution_str))"
    (tree.root / "reward.py").write_text(FRAME.format(body=body))
    return f"the reward {body[:90]!r}"


@mutation("reward", 3)
def odd_reward_file(tree: Tree, chance: random.Random) -> str:
    data = chance.choice(FILES) if chance.random() < 0.8 else values.damaged((tree.root / "reward.py").read_bytes(), chance)[0]
    impatient(tree)
    (tree.root / "reward.py").write_bytes(data)
    return f"the reward file {data[:60]!r}"


@mutation("reward", 1)
def odd_reward_name(tree: Tree, chance: random.Random) -> str:
    names: tuple[Any, ...] = ("gsm8k", "math", "reward.py:none", "none.py:score", "reward.py", ":score", "os:system", {"gsm8k": 1e308, "reward.py:score": -1e308}, {}, {"gsm8k": 0.0})
    name = chance.choice((*names, "reward.py:score:x", "~/reward.py:score", "model:score", "reward.py:__import__"))
    if "reward" in tree.tables:
        tree.tables["reward"]["function"] = name
    return f"reward.function = {name!r}"


# ---- surroundings ------------------------------------------------------------------------------------------------------------------------


@mutation("surroundings", 4)
def odd_stream(tree: Tree, chance: random.Random) -> str:
    stream = chance.choice(("stdout", "stdout", "stderr"))
    kind = chance.choice(("full", "closed", "gone", "terminal", "terminal"))
    tree.surroundings[stream] = kind
    if kind == "terminal":
        tree.surroundings["stderr"] = tree.surroundings["stdout"] = "terminal"
        tree.surroundings["columns"] = chance.choice((0, 1, 2, 10, 40, 80, 120, 5000))
    return f"{stream} is {kind}"


@mutation("surroundings", 2)
def odd_encoding(tree: Tree, chance: random.Random) -> str:
    encoding = chance.choice(("ascii", "latin-1", "cp1252", "utf-16"))
    tree.surroundings["encoding"] = encoding
    tree.environment |= {"LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": encoding, "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    return f"the streams are in {encoding}"


VARIABLES: dict[str, tuple[str | None, ...]] = {
    "HOME": (None, "", "/nonexistent", "/dev/null", "relative"),
    "TMPDIR": ("/nonexistent", "/dev/null", "", "/proc"),
    "COLUMNS": ("0", "-3", "1", "x", "", "99999999", "10"),
    "LINES": ("0", "-3", "x"),
    "TERM": ("", "dumb", "xterm-256color", "unknown", "\x1b", None),
    "LANG": ("", "xx_YY.ISO-8859-1", "tr_TR.UTF-8", "\udcff"),
    "LC_ALL": ("POSIX", "x"),
    "NO_COLOR": ("1",),
    "OMP_NUM_THREADS": ("0", "-1", "x", "", "1,2"),
    "HF_HOME": ("/nonexistent", "", "/dev/null"),
    "HF_HUB_OFFLINE": ("0x", "", "yes"),
    "PATH": ("", None, "/nonexistent"),
    "PYTHONPATH": (None, "", "/nonexistent", "."),
    "PYTHONHASHSEED": ("x", "0", "99999999999"),
    "PYTHONOPTIMIZE": ("2",),
    "CUDA_VISIBLE_DEVICES": ("", "x", "-1", "99"),
    "TZ": ("x", ""),
    "USER": (None, ""),
    "RANK": ("0", "x", "3"),
    "WORLD_SIZE": ("0", "x", "3"),
    "LOCAL_RANK": ("x", "7"),
    "MPLBACKEND": ("x", "TkAgg"),
    "FULLTILT_DEBUG": ("1",),
}


@mutation("surroundings", 4)
def odd_variable(tree: Tree, chance: random.Random) -> str:
    name = chance.choice(sorted(VARIABLES))
    tree.environment[name] = chance.choice(VARIABLES[name])
    return f"{name} = {tree.environment[name]!r}"


@mutation("surroundings", 3)
def short_of(tree: Tree, chance: random.Random) -> str:
    limit = chance.choice(("open_files", "open_files", "file_bytes"))
    tree.surroundings[limit] = chance.choice((8, 16, 24, 32, 64) if limit == "open_files" else (0, 512, 4096, 65_536, 10**6))
    return f"at most {tree.surroundings[limit]} {limit}"


@mutation("surroundings", 1)
def odd_mask(tree: Tree, chance: random.Random) -> str:
    tree.surroundings["umask"] = chance.choice((0, 0o077, 0o777, 0o222))
    return f"umask {tree.surroundings['umask']:o}"


@mutation("surroundings", 1)
def loud_warnings(tree: Tree, chance: random.Random) -> str:
    tree.surroundings["warnings"] = chance.choice(("default", "always"))
    return f"PYTHONWARNINGS={tree.surroundings['warnings']}"


@mutation("surroundings", 1)
def folder_gone(tree: Tree, chance: random.Random) -> str:
    tree.surroundings["gone_folder"] = True
    return "the current folder has been deleted"


@mutation("surroundings", 1)
def odd_rights(tree: Tree, chance: random.Random) -> str:
    name = chance.choice(("run.toml", "reward.py", "model", "model/config.json", "model/model.safetensors", "train.jsonl", "tmp", "home", "."))
    tree.modes[name] = chance.choice((0o000, 0o400, 0o444, 0o555))
    return f"{name} without some rights"
