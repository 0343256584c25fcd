"""The run file that `fulltilt init` writes: a task and the paths of a model and data enter, files for a first run leave.

Guaranteed: only new files are written; each key in them is explained by its meaning in `schema`, so the two cannot disagree; with a model
and data that exist, the file passes `fulltilt train FILE --check`.
"""

from __future__ import annotations

import os
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fulltilt.records import UserError
from fulltilt.schema import keys, toml_value, words
from fulltilt.words import either, printable

MODEL, DATA = "path/to/model", "path/to/train.jsonl"  # used if none is given; `--check` says that they do not exist

LINE = 120
ANOTHER = "Choose another file name or folder"

REWARD = '''\
"""The reward of a sample. docs/rewards.md describes all arguments that a function may name, and what it may return."""


def score(solution_str, ground_truth):
    """`solution_str` is the response; `ground_truth` is that column of the row of data. Higher is better."""
    return float(solution_str.strip() == str(ground_truth).strip())
'''


@dataclass(frozen=True)
class Task:
    """Subject of a run file, and the keys in it."""

    title: str
    keys: Mapping[str, Any]  # keys with their values
    examples: Mapping[str, Any]  # keys that are written as comments


_SAMPLED: Mapping[str, Any] = {
    "data.max_prompt_tokens": 512,
    "algorithm.name": "grpo",
    "algorithm.prompts_per_step": 16,
    "algorithm.samples_per_prompt": 8,
    "rollout.max_new_tokens": 256,
    "reward.function": "gsm8k",
    "train.lr": 1e-6,
    "run.steps": 100,
    "run.save_every": 10,
}
_EXAMPLES: Mapping[str, Any] = {"data.val": "path/to/val.jsonl", "run.eval_every": 10, "cluster.workers": "auto"}
_SUPERVISED: Mapping[str, Any] = {
    "algorithm.name": "sft",
    "algorithm.prompts_per_step": 16,
    "train.lr": 1e-5,
    "run.epochs": 1,
    "run.save_every": 100,
}

TASKS: Mapping[str, Task] = {
    "grpo": Task("GRPO with a built-in reward", _SAMPLED, _EXAMPLES),
    "ppo": Task("PPO with a built-in reward", {**_SAMPLED, "algorithm.name": "ppo", "critic.lr": 1e-5}, _EXAMPLES),
    "dapo": Task("DAPO with a built-in reward", {**_SAMPLED, "algorithm.name": "dapo", "algorithm.max_rounds": 10}, _EXAMPLES),
    "sft": Task("supervised fine-tuning", _SUPERVISED, {**_EXAMPLES, "data.max_tokens": 2048}),
    "reward": Task("GRPO with a reward function of your own", _SAMPLED, {**_EXAMPLES, "reward.timeout_s": 10.0}),
}


def write(task: str, file: Path | None, model: str | None, data: str | None) -> Iterator[str]:
    """Write the files of a task. Yields lines to tell the user."""
    if task not in TASKS:
        raise UserError(f"{task}: no such task. Choose {either(list(TASKS))}")
    file = file or Path(f"{task}.toml")
    if (shown := printable(str(file)).replace("\n", "\\n")) != str(file):
        raise UserError(f"{shown}: the name has a line break or another character that cannot be printed. {ANOTHER}")
    if str(file) == "-":
        raise UserError(f"-: init writes files, and nothing to standard output. Give the name of a file, such as {task}.toml")
    if os.path.isdir(file):
        raise UserError(f"{file} is a folder. Give the name of a file, such as {file / f'{task}.toml'}")
    reward = file.parent / "reward.py"
    given = {"model.path": model or MODEL, "data.train": data or DATA, "run.dir": f"runs/{file.stem}"}
    values = {**TASKS[task].keys, **given, **({"reward.function": f"{reward}:score"} if task == "reward" else {})}
    texts = {**({reward: REWARD} if task == "reward" else {}), file: _text(task, file, values)}
    if there := [str(path) for path in texts if os.path.lexists(path)]:
        exists = "exist" if len(there) > 1 else "exists"
        raise UserError(f"{' and '.join(there)} {exists} already, and init overwrites nothing. {ANOTHER}")
    for path, text in texts.items():
        try:
            with open(path, "x", encoding="utf-8") as written:
                written.write(text)
        except (OSError, ValueError) as error:  # ValueError: a value that is not Unicode
            raise UserError(f"{path}: cannot be written: {getattr(error, 'strerror', error)}. {ANOTHER}") from None
        yield f"wrote {path}"
    missing = " and ".join(key for key, path in (("model.path", model), ("data.train", data)) if not path)
    yield (f"set {missing} in it, then check it: " if missing else "check it: ") + _command(file, "--check")


def _text(task: str, file: Path, values: Mapping[str, Any]) -> str:
    lines = [
        f"# {TASKS[task].title[0].upper()}{TASKS[task].title[1:]}. Check this file, then train:",
        f"#   {_command(file, '--check')}",
        f"#   {_command(file)}",
        "# All other keys have defaults: `fulltilt knobs --all` lists every key,",
        "# and `fulltilt knobs --all WORD` explains the keys that match WORD.",
    ]
    section = ""
    for key in keys():  # in the order of the schema
        examples = TASKS[task].examples
        if key not in values and key not in examples:
            continue
        table, _, name = key.partition(".")
        lines += ["", f"[{table}]"] if table != section else []
        section = table
        line = f"{name} = {toml_value(values.get(key, examples.get(key)))}"
        meaning = words(keys()[key]).meaning.partition(". ")[0].rstrip(".") + "."  # its first sentence
        lines += [*textwrap.wrap(meaning, LINE, initial_indent="# ", subsequent_indent="# "), line if key in values else f"# {line}"]
    return "\n".join(lines) + "\n"


def _command(file: Path, *options: str) -> str:
    return shlex.join(["fulltilt", "train", str(file), *options])
