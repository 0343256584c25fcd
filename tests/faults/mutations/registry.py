"""The mutations by group, each with its weight."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

from tree import Tree

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


def said(tree: Tree, path: Path, how: str) -> str:
    return f"{path.relative_to(tree.root)} {how}"


def put_in_place(path: Path, how: str) -> None:
    """Make something that is not a file where one was deleted, if `how` names such a thing."""
    if how == "a folder":
        path.mkdir()
    elif how in ("a loop", "a dangling link"):
        path.symlink_to(path.name if how == "a loop" else "none")
    elif how == "a pipe":
        os.mkfifo(path)
