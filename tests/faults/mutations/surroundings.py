"""Other streams, variables and limits of the process."""

from __future__ import annotations

import random

from tree import Tree

from mutations.registry import mutation


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
    "PYTHONHASHSEED": ("0", "7"),
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
    tree.surroundings[limit] = chance.choice((8, 12, 16, 24, 32, 64) if limit == "open_files" else (0, 512, 4096, 65_536, 10**6))
    return f"at most {tree.surroundings[limit]} {limit}"


@mutation("surroundings", 1)
def odd_mask(tree: Tree, chance: random.Random) -> str:
    tree.surroundings["umask"] = chance.choice((0, 0o027, 0o077, 0o222))
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
    name = chance.choice(
        ["run.toml", "reward.py", "model", "model/config.json", "model/model.safetensors", "train.jsonl", "tmp", "home", "."]
    )
    tree.modes[name] = chance.choice((0o000, 0o400, 0o444, 0o555))
    return f"{name} without some rights"
