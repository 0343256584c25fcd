"""The scratch folder of one case: all that a user has around a run, small enough to be made anew in milliseconds.

Enters: a folder for what is made once. Leaves: `Templates` (models, data in every form, finished runs), and from them a `Tree` for each
case, which mutations change. Guaranteed: whoever calls `prepare` computes nothing itself (a process that has started threads cannot be
forked safely): a forked child makes the templates.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import runs

from fulltilt.schema import toml_value

Tables = dict[str, dict[str, Any]]

REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    letters = sum(character.islower() for character in solution_str)
    return {"score": letters / 8, "letters": letters}
"""
TINY: Tables = {
    "model": {"path": "model"},
    "data": {"train": "train.jsonl", "val": "val.jsonl", "max_prompt_tokens": 16},
    "algorithm": {"name": "grpo", "prompts_per_step": 2, "samples_per_prompt": 2},
    "rollout": {"max_new_tokens": 4},
    "reward": {"function": "reward.py:score", "workers": 1},
    "train": {"lr": 1e-3},
    "health": {"ignore": ["all-clipped", "no-variance"]},  # a random model seldom draws its end token
    "run": {"dir": "run", "steps": 2, "save_every": 1, "keep": 2, "seed": 7, "device": "cpu"},
}


def scenario(**sections: dict[str, Any]) -> Tables:
    tables = deepcopy(TINY)
    for section, values in sections.items():
        tables[section] = tables.get(section, {}) | values
    return tables


SCENARIOS: dict[str, Tables] = {
    "grpo": scenario(),
    "kl": scenario(algorithm={"kl_coef": 0.05}, ref={"path": "ref"}),
    "dapo": scenario(algorithm={"name": "dapo", "max_rounds": 2}),
    "ppo": scenario(algorithm={"name": "ppo"}, critic={"path": "critic"}),
    "lora": scenario(lora={"rank": 2}),
    "adapter": scenario(lora={"rank": 2, "path": "adapter"}),
    "reward-model": {**scenario(reward_model={"path": "reward_model"}), "reward": {"function": "reward_model"}},
    "sft": {
        "model": TINY["model"],
        "data": TINY["data"] | {"train": "sft.jsonl", "val": "sft.jsonl"},
        "algorithm": {"name": "sft", "prompts_per_step": 2},
        "train": TINY["train"],
        "run": TINY["run"],
    },
}  # fmt: skip
FINISHED = ("grpo", "lora", "sft")  # of these there is a finished run to copy

PROMPTS = [{"prompt": f"{n}+{n}=", "ground_truth": str(2 * n), "data_source": "sums"} for n in range(6)]
DIALOGUES = [{"prompt": [{"role": "user", "content": f"{n}+{n}="}], "ground_truth": str(2 * n)} for n in range(6)]
PAIRS = [{"prompt": f"{n}+{n}=", "response": f"is {2 * n}."} for n in range(6)]


# ---- made once ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Templates:
    folder: Path

    def model(self, name: str) -> Path:
        return self.folder / name

    def run(self, name: str) -> Path:
        return self.folder / "finished" / name / "run"

    def data(self) -> Path:
        return self.folder / "data"


def make_templates(folder: Path, run: Callable[[Path, list[str]], int]) -> Templates:
    """Called in a forked child. `run` is given a folder and the arguments of a command."""
    import models
    import torch
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    for number, name in enumerate(("model", "ref", "critic")):
        models.save("qwen2", folder / name, seed=number)
    classifier = models.FAMILIES["qwen2"]()
    classifier.num_labels, classifier.pad_token_id = 1, 1
    AutoModelForSequenceClassification.from_config(classifier).save_pretrained(folder / "reward_model")
    models.tokenizer().save_pretrained(folder / "reward_model")
    make_data(folder / "data")
    templates = Templates(folder)
    for name in FINISHED:
        tree = Tree.make(folder / "finished" / name, templates, name)
        tree.write()
        assert run(tree.root, ["train", "run.toml", "--quiet"]) == 0, f"the finished run {name} could not be made"
    shutil.copytree(templates.run("lora") / "checkpoints" / "step-00000002" / "model", folder / "adapter")
    return templates


def make_data(folder: Path) -> None:
    """The prompts in every form, and tables whose columns are not what a run expects."""
    import csv

    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in PROMPTS).encode()
    (folder / "lines.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    (folder / "list.json").write_text(json.dumps(PROMPTS, indent=1))
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(PROMPTS[0]))
    writer.writeheader()
    writer.writerows(PROMPTS)
    (folder / "table.csv").write_text(text.getvalue())
    (folder / "table.tsv").write_text(text.getvalue().replace(",", "\t"))
    (folder / "table.csv.gz").write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))
    table = pa.Table.from_pylist(PROMPTS)
    prompts, numbers = [row["prompt"] for row in PROMPTS], list(range(6))
    odd: Mapping[str, pa.Table] = {
        "table": table,
        "dialogues": pa.Table.from_pylist(DIALOGUES),
        "pairs": pa.Table.from_pylist(PAIRS),
        "numbers": pa.table({"prompt": numbers}),
        "binary": pa.table({"prompt": [b"\xff\xfe"] * 6}),
        "nulls": pa.table({"prompt": pa.array([None] * 6, pa.string())}),
        "twice": pa.Table.from_arrays([pa.array(prompts), pa.array(numbers)], names=["prompt", "prompt"]),
        "nested": pa.table({"prompt": [[["a"]]] * 6}),
        "dictionary": pa.table({"prompt": pa.array(prompts).dictionary_encode(), "extra_info": pa.array(numbers, pa.timestamp("s"))}),
        "maps": pa.table({"prompt": prompts, "extra_info": pa.array([[("a", 1)]] * 6, pa.map_(pa.string(), pa.int64()))}),
        "durations": pa.table({"prompt": prompts, "ground_truth": pa.array([2**62] * 6, pa.duration("s"))}),
        "far": pa.table({"prompt": prompts, "ground_truth": pa.array([2**62] * 6, pa.timestamp("us"))}),
        "empty": table.slice(0, 0),
        "columnless": pa.table({}),
    }
    for name, each in odd.items():
        pq.write_table(each, folder / f"{name}.parquet")
    with pa.OSFile(str(folder / "stream.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)


# ---- one case ----------------------------------------------------------------------------------------------------------------------------


@dataclass
class Tree:
    """What a case changes before its command runs."""

    root: Path
    templates: Templates
    tables: Tables
    toml: bytes | None = None  # the run file, if it is no longer what the tables say
    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str | None] = field(default_factory=dict)  # None: not set
    surroundings: dict[str, Any] = field(default_factory=dict)  # limits and streams of the process: `child.Surroundings`
    modes: dict[str, int] = field(default_factory=dict)  # of files and folders, by name
    meanwhile: str = ""  # what happens to the run folder once there are metrics: a name of `child.MEANWHILE`
    held: Path | None = None  # a file that another process holds locked
    said: list[str] = field(default_factory=list)  # the mutations, in words
    run_dir: Path | None = None  # where run.dir leads; None: nowhere that may be written
    ours: set[Path] = field(default_factory=set)  # files of an earlier run
    history: bool = False  # the earlier run's metrics and rollouts must stay somewhere
    outputs: tuple[Path, ...] = ()  # files that the command is told to write
    long: bool = False  # a mutation may rightly make the run take hours: it must then end when it is told to

    @classmethod
    def make(cls, root: Path, templates: Templates, name: str) -> Tree:
        root.mkdir(parents=True)
        tables = deepcopy(SCENARIOS[name])
        for role in ("model", "ref", "critic", "reward_model"):
            if path := tables.get(role, {}).get("path"):
                shutil.copytree(templates.model(path), root / path)
        if "path" in tables.get("lora", {}):
            shutil.copytree(templates.model("adapter"), root / "adapter")
        runs.write_rows(root / "train.jsonl", PROMPTS)
        runs.write_rows(root / "val.jsonl", PROMPTS[:2])
        runs.write_rows(root / "sft.jsonl", PAIRS)
        (root / "reward.py").write_text(REWARD)
        (root / "notes.txt").write_text("The user's own file.\n")
        for folder in ("home", "tmp"):
            (root / folder).mkdir()
        return cls(root, templates, tables, run_dir=root / "run")

    def with_earlier_run(self, name: str) -> None:
        """A finished run of the same configuration, and a file of the user's among its files."""
        run = self.root / "run"
        shutil.copytree(self.templates.run(name), run, symlinks=True)
        self.ours = {path for path in run.rglob("*")}
        (run / "my-notes.txt").write_text("The user's own file, beside those of the run.\n")
        self.tables["run"]["steps"] = 3

    def write(self) -> None:
        """The run file, when all else has been changed."""
        text = in_toml(self.tables).encode("utf-8", "surrogatepass")
        (self.root / "run.toml").write_bytes(text if self.toml is None else self.toml)

    def may_change(self, path: Path, *, new: bool) -> bool:
        if path in self.outputs:
            return True
        if new and self.root / "home" in path.parents:
            return True  # caches of libraries
        if new and self.root / "tmp" in path.parents and path.relative_to(self.root / "tmp").parts[0].startswith("torchinductor_"):
            return True  # torch's cache of compiled layers, for the next run
        if self.read_only or self.run_dir is None:
            return False
        below = path == self.run_dir or self.run_dir in path.parents
        # A checkpoint is replaced and removed as a whole, with anything that was put into it (docs/checkpoints.md).
        checkpoint = any(parent.parent == self.run_dir / "checkpoints" and parent.name.startswith("step-") for parent in path.parents)
        # A path on the way to the run folder may be made, and one that is there may get a new member.
        return (below and (new or checkpoint or path in self.ours)) or (new and path in self.run_dir.parents)

    @property
    def read_only(self) -> bool:
        return self.arguments[:1] != ["train"] or "--check" in self.arguments


def in_toml(tables: Tables) -> str:
    lines = []
    for section, keys in tables.items():
        lines += [f"[{section}]", *(f"{key} = {toml_value(value)}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


Entry = tuple[str, int, str]  # kind, mode, and digest or target


def digest(root: Path) -> dict[Path, Entry]:
    """Everything below a folder, links not followed."""
    found: dict[Path, Entry] = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            about = path.lstat()
            found[path] = (stat.filemode(about.st_mode)[0], stat.S_IMODE(about.st_mode), content(path, about))
    return found


def content(path: Path, about: os.stat_result) -> str:
    if stat.S_ISLNK(about.st_mode):
        return os.readlink(path)
    if not stat.S_ISREG(about.st_mode):
        return ""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except PermissionError:  # where it is not root who fuzzes
        return f"{about.st_size} {about.st_mtime_ns}"
