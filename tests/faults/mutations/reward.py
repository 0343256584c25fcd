"""Another reward file."""

from __future__ import annotations

import random
from typing import Any

import lists
import values
from tree import Tree

from mutations.registry import mutation

FRAME = """import os, sys, time, signal, threading, subprocess


def score(data_source, solution_str, ground_truth, extra_info):
    {body}
"""


def impatient(tree: Tree) -> None:
    if "reward" in tree.tables:
        tree.tables["reward"]["timeout_s"] = 0.5


@mutation("reward", 5)
def odd_body(tree: Tree, chance: random.Random) -> str:
    body = chance.choice(lists.BODIES)
    impatient(tree)
    tree.environment["SECRET_TOKEN"] = "secret"
    # Either always, or for some rows only.
    if chance.random() < 0.4 and "yield" not in body:
        body = f"if ground_truth == '4':\n        {body}\n    return float(len(solution_str))"
    (tree.root / "reward.py").write_text(FRAME.format(body=body))
    return f"the reward {body[:90]!r}"


@mutation("reward", 5)
def odd_answer(tree: Tree, chance: random.Random) -> str:
    answer = chance.choice(lists.ANSWERS)
    body = f"return {answer}" if chance.random() < 0.6 else f"return {answer} if ground_truth == '4' else float(len(solution_str))"
    (tree.root / "reward.py").write_text(FRAME.format(body=body))
    return f"the reward {body[:90]!r}"


@mutation("reward", 3)
def odd_reward_file(tree: Tree, chance: random.Random) -> str:
    data = chance.choice(lists.REWARD_FILES) if chance.random() < 0.8 else values.damaged((tree.root / "reward.py").read_bytes(), chance)[0]
    impatient(tree)
    tree.long = True  # loading a file that hangs has a deadline of minutes
    (tree.root / "reward.py").write_bytes(data)
    return f"the reward file {data[:60]!r}"


NAMES: tuple[Any, ...] = (
    "gsm8k", "math", "reward.py:none", "none.py:score", "reward.py", ":score", "os:system", "reward.py:score:x", "~/reward.py:score",
    "model:score", "reward.py:__import__", {"gsm8k": 1e308, "reward.py:score": -1e308}, {}, {"gsm8k": 0.0},
)  # fmt: skip


@mutation("reward", 1)
def odd_reward_name(tree: Tree, chance: random.Random) -> str:
    name = chance.choice(NAMES)
    if "reward" in tree.tables:
        tree.tables["reward"]["function"] = name
    return f"reward.function = {name!r}"
