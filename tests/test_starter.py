"""The files that `fulltilt init` writes: they pass the check as they are, and nothing is overwritten."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

import pytest
import runs

from fulltilt.schema import keys, words
from fulltilt.starter import TASKS


@pytest.fixture
def folder(tmp_path: Path, model_folders: Callable[[str], Path]) -> Path:
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    (folder / "reward.py").unlink()
    return folder


def init(folder: Path, task: str, *options: str) -> runs.Ended:
    data = "sft.jsonl" if task == "sft" else "train.jsonl"
    return runs.command_here(folder, "init", task, *options, "--model", "model", "--data", data)


@pytest.mark.parametrize("task", TASKS)
def test_a_written_file_passes_the_check(folder: Path, task: str) -> None:
    ended = init(folder, task)
    assert (ended.code, ended.error) == (0, "")
    assert ended.out.endswith(f"wrote {task}.toml\ncheck it: fulltilt train {task}.toml --check\n")
    text = (folder / f"{task}.toml").read_text()
    assert "fulltilt knobs --all WORD" in text and all(len(line) <= 140 for line in text.splitlines())
    commented = tomllib.loads(text.replace("\n# val =", "\nval =").replace("\n# eval_every =", "\neval_every ="))
    assert {"val", "eval_every"} <= {*commented["data"], *commented["run"]}
    for section, own in tomllib.loads(text).items():  # each key below a line of its meaning
        for name in own:
            lines = text.partition(f"\n[{section}]\n")[2].partition(f"\n{name} = ")[0].splitlines()
            above = [line[2:] for line in takewhile(lambda line: line.startswith("# ") and " = " not in line, reversed(lines))]
            meaning = words(keys()[f"{section}.{name}"]).meaning
            assert " ".join(reversed(above)) == meaning.partition(". ")[0].rstrip(".") + "."  # a whole sentence
    shorter = ["rollout.max_new_tokens=16"] if task != "sft" else []  # the model has few positions
    checked = runs.command_here(folder, "train", f"{task}.toml", "--check", "run.device=cpu", *shorter)
    assert (checked.code, checked.out) == (0, f"{task}.toml: no mistakes found\n"), checked


def test_a_run_of_a_written_file(folder: Path) -> None:
    (folder / "mine here").mkdir()
    assert "fulltilt train 'mine here/first.toml' --check" in init(folder, "reward", "mine here/first.toml").out
    small = ["run.steps=1", "rollout.max_new_tokens=4", "algorithm.prompts_per_step=2", "algorithm.samples_per_prompt=2", "run.device=cpu"]
    ended = runs.command_here(folder, "train", "mine here/first.toml", *small)
    assert ended.code == 0, ended.error
    assert (folder / "runs" / "first" / "metrics.jsonl").is_file()


def test_nothing_is_overwritten(folder: Path) -> None:
    (folder / "reward.py").write_text("mine")
    before = runs.contents(folder)
    for task, file in (("reward", "new.toml"), ("grpo", "run.toml"), ("grpo", "model"), ("grpo", "gone/x.toml"), ("gpro", "new.toml")):
        ended = init(folder, task, file)
        assert (ended.code, ended.out) == (2, "") and "Traceback" not in ended.error, ended
    assert runs.contents(folder) == before
    assert "run.toml exists already, and init overwrites nothing" in init(folder, "grpo", "run.toml").error
    assert "model is a folder. Give the name of a file, such as model/grpo.toml" in init(folder, "grpo", "model/").error
    for name in ("a\nb.toml", "a\r.toml", "\x1b[2J.toml"):
        assert "the name has a line break or another character that cannot be printed" in init(folder, "grpo", name).error
    assert runs.contents(folder) == before
    assert "gpro: no such task. Choose grpo, ppo, dapo, sft or reward" in init(folder, "gpro").error
    assert "cannot be written: File name too long" in init(folder, "grpo", "x" * 300).error


def test_without_paths_it_says_what_to_set(tmp_path: Path) -> None:
    ended = runs.command_here(tmp_path, "init", "grpo")
    assert ended.out == "wrote grpo.toml\nset model.path and data.train in it, then check it: fulltilt train grpo.toml --check\n"
    refused = runs.command_here(tmp_path, "train", "grpo.toml", "--check")
    assert refused.code == 2 and "model.path: no such folder" in refused.error and "data.train: no such file" in refused.error
