"""Another run folder, or another content of it."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import lists
import values
from child import MEANWHILE
from tree import DIALOGUES, PROMPTS, Tree

from mutations.configuration import set_key
from mutations.registry import mutation, put_in_place, said


@mutation("place", 3)
def another_run_folder(tree: Tree, chance: random.Random) -> str:
    place = chance.choice(lists.RUN_FOLDERS)
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
    contents = chance.sample(lists.FOREIGN_FILES, chance.choice((1, 1, 2, 3)))
    for name in contents:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
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
    read_first = [file for file in files if file.name in ("state.json", "plan.json", "manifest.json", "metrics.jsonl")]
    path = chance.choice(read_first if chance.random() < 0.8 and read_first else files)
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
        tree.history = True
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    put_in_place(path, how)
    return said(tree, path, how)


@mutation("run", 2)
def checkpoints_gone(tree: Tree, chance: random.Random) -> str:
    folder = tree.root / "run" / "checkpoints"
    if not folder.is_dir():
        return "no checkpoints to remove"
    tree.history = True
    shutil.rmtree(folder)
    if chance.random() < 0.3:
        folder.mkdir()
    return "the checkpoints are deleted"


@mutation("run", 2)
def stranger_in_run(tree: Tree, chance: random.Random) -> str:
    """A folder or a file of another name among those of the run."""
    folder = tree.root / "run"
    name = chance.choice(lists.STRANGERS)
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
    if "partial" in name or "trash" in name or "replaced" in name or re.fullmatch(r"checkpoints/step-\d+", name):
        tree.ours |= {path, *path.rglob("*")}
    return f"run/{name[:60]} added, {kind}"


@mutation("run", 1)
def locked_run(tree: Tree, chance: random.Random) -> str:
    tree.held = tree.root / "run" / ".fulltilt"
    return "another process holds the lock of the run"


OTHER_VALUES: tuple[tuple[str, Any], ...] = (
    ("run.resume", "force"), ("run.resume", "never"), ("run.steps", 1), ("run.steps", 2), ("run.keep", 1), ("train.lr", 1.0),
    ("run.seed", 8),    ("algorithm.samples_per_prompt", 3), ("algorithm.name", "rloo"), ("rollout.max_new_tokens", 5), ("lora.rank", 4),
    ("model.dtype", "bfloat16"),
)  # fmt: skip


@mutation("run", 2)
def resumed_otherwise(tree: Tree, chance: random.Random) -> str:
    key, value = chance.choice(OTHER_VALUES)
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
