"""Other rows, files and chat templates."""

from __future__ import annotations

import gzip
import json
import os
import random
from typing import Any

import lists
import values
from tree import DIALOGUES, PAIRS, PROMPTS, Tree

from mutations.registry import mutation

MESSAGES: tuple[Any, ...] = (
    {"role": "user"}, {"content": "x"}, {"role": "user", "content": ""}, {"role": "user", "content": None}, {"role": 3, "content": "x"},
    {"role": "x\x1b", "content": "x"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": [{"type": "image"}]},
    {"role": "user", "content": "x", "tool_calls": 3}, {"role": "user", "content": [{"type": "text", "text": "\ud800"}]},
    {"role": "system", "content": "x"}, {}, "text", [{"role": "user", "content": "x"}],
)  # fmt: skip
CONTENTS: tuple[Any, ...] = (
    *values.TEXTS[:10], "\ud800", "\0", values.ESCAPES, 3, None, True, 1.5, [], {}, *([message] for message in MESSAGES),
    "a" * 3_000_000, "0" * 40, {"role": "user", "content": "x"},
)  # fmt: skip
COLUMNS = (
    *["prompt"] * 3,
    *["response", "ground_truth", "answer", "data_source", "extra_info", "reward_model", "messages", "ability", "weight"],
)


FILES_OF_DATASETS = ("state.json", "dataset_info.json", "dataset_dict.json", "train-00000-of-00003.parquet", "x.arrow", "a.csv")


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
    extra = chance.choice(lists.LINES_OF_DATA)
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
    folders = ("a folder", "an empty folder", "a folder of odd files")
    how = chance.choice((*folders, "a pipe", "a loop", "a dangling link", "missing", "unreadable", "endless"))
    if how == "a pipe":
        os.mkfifo(path)
    elif how in folders:
        path.mkdir()
        if how == "a folder":
            (path / "train.jsonl").write_text(json.dumps(PROMPTS[0]) + "\n")
        if how == "a folder of odd files":
            for inner in chance.sample(FILES_OF_DATASETS, 3):
                (path / inner).write_bytes(values.damaged(b'{"splits": ["train"], "_data_files": [{"filename": "x.arrow"}]}', chance)[0])
    elif how in ("a loop", "a dangling link", "endless"):
        path.symlink_to({"a loop": name, "a dangling link": "none", "endless": "/dev/zero"}[how])
    elif how == "unreadable":
        path.write_text("{}")
        path.chmod(0)
    return f"{name} is {how}"


@mutation("data", 3)
def odd_template(tree: Tree, chance: random.Random) -> str:
    template = chance.choice(lists.TEMPLATES)
    data = template.encode() if chance.random() < 0.85 else values.damaged(template.encode(), chance)[0] + b"\xff"
    if chance.random() < 0.7:
        (tree.root / "template.jinja").write_bytes(data)
        tree.tables.setdefault("model", {})["chat_template"] = "template.jinja"
    else:
        (tree.root / "model" / "chat_template.jinja").write_bytes(data)
    tree.tables.setdefault("data", {})["apply_template"] = "always"
    return f"the chat template {data[:60]!r}"
