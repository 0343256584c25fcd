"""Another configuration, run file or command line."""

from __future__ import annotations

import os
import random
from typing import Any, Literal, get_args, get_origin

import lists
import values
from tree import Tree

from fulltilt import schema
from mutations.registry import mutation

# Values of these keys are the business of other groups: what they name must exist, or the run is not of the scenario any more.
PLACED = {"model.path", "data.train", "data.val", "run.dir", "ref.path", "critic.path", "reward_model.path", "lora.path", "reward.function"}
# Each starts a service or imports for seconds.
SLOW = {"log.to"}
KEYS = [key for key in dict(schema.keys()) if key not in PLACED | SLOW]
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
        if chance.random() < 0.4:
            return chance.choice(values.SMALL_NUMBERS) if whole else chance.choice(values.SMALL_NUMBERS) / 8
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
    extra = chance.choice(lists.LINES_OF_RUN_FILES)
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
    text = chance.choice(lists.ARGUMENTS)
    tree.arguments.append(text)
    return f"the argument {text[:80]!r}"


@mutation("config", 1)
def another_run_file(tree: Tree, chance: random.Random) -> str:
    place = chance.choice([index for index, text in enumerate(tree.arguments) if text == "run.toml"] or [len(tree.arguments)])
    name = chance.choice(lists.RUN_FILES)
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
    return set_key(tree, key, chance.choice(lists.PATHS))
