"""The fuzzer's own judgement: what it must call a fault, and that a case is the same whenever it is made. The cases: `make faults`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "faults"))

import cases
import kills
import models
import tree
from child import Ended


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> tree.Templates:
    """All but true runs: folders with the names of their files are enough to be damaged."""
    folder = tmp_path_factory.mktemp("templates")
    for name in ("model", "ref", "critic", "reward_model", "adapter"):
        models.save("qwen2", folder / name)
    tree.make_data(folder / "data")
    for name in tree.FINISHED:
        run = folder / "finished" / name / "run"
        for file in ("run.toml", "plan.json", "metrics.jsonl", "rollouts/step-000001.jsonl", "checkpoints/step-00000001/state.json"):
            (run / file).parent.mkdir(parents=True, exist_ok=True)
            (run / file).write_text(f'{{"step": 1, "config": {{"a": "{file}"}}}}\n')
    return tree.Templates(folder)


@pytest.fixture
def small(tmp_path: Path, templates: tree.Templates) -> tree.Tree:
    made = tree.Tree.make(tmp_path / "case", templates, "grpo")
    made.arguments = ["train", "run.toml"]
    made.write()
    return made


def test_the_same_seed_and_number_make_the_same_case(tmp_path: Path, templates: tree.Templates) -> None:
    """Sixty of them, so that every group is among them."""
    for number in range(60):
        one, other = (cases.make(3, number, tmp_path / side / str(number), templates) for side in ("one", "other"))
        for made in (one, other):
            made.write()
        for name in ("said", "arguments", "environment", "surroundings", "meanwhile"):
            assert getattr(one, name) == getattr(other, name)
        relative = [{path.relative_to(made.root): entry for path, entry in tree.digest(made.root).items()} for made in (one, other)]
        assert relative[0] == relative[1], one.said
        for made in (one, other):
            cases.remove(made.root)


def files_judged(made: tree.Tree, change: Any) -> list[str]:
    before = tree.digest(made.root)
    change(made.root)
    return [verdict.kind for verdict in cases.judge_files(made, before, tree.digest(made.root))]


def test_files_of_the_user_may_not_change(small: tree.Tree) -> None:
    assert files_judged(small, lambda root: (root / "notes.txt").write_text("other")) == ["a file of the user's has changed"]
    assert files_judged(small, lambda root: (root / "notes.txt").unlink()) == ["a file of the user's is gone"]
    assert files_judged(small, lambda root: (root / "reward.py").chmod(0o600)) == ["a file of the user's has another kind or mode"]
    assert files_judged(small, lambda root: (root / "metrics.jsonl").touch()) == ["a new file in a folder of the user's"]
    assert files_judged(small, lambda root: (root / "tmp" / "left").touch()) == ["a new file in TMPDIR"]


def test_the_run_folder_may_be_written_unless_the_command_only_reads(small: tree.Tree) -> None:
    def train(root: Path) -> None:
        (root / "run" / "checkpoints").mkdir(parents=True)
        (root / "run" / "metrics.jsonl").touch()

    assert files_judged(small, train) == []
    small.arguments.append("--check")
    assert files_judged(small, lambda root: (root / "run" / "plan.json").touch()) == ["a new file in a folder of the user's"]


def test_an_earlier_run_may_change_but_not_what_the_user_put_there(small: tree.Tree) -> None:
    small.with_earlier_run("grpo")
    assert files_judged(small, lambda root: (root / "run" / "metrics.jsonl").write_text("cut")) == []
    assert files_judged(small, lambda root: (root / "run" / "my-notes.txt").unlink()) == ["a file of the user's is gone"]


def test_history_without_checkpoints_must_stay_somewhere(small: tree.Tree) -> None:
    small.with_earlier_run("grpo")
    small.history = True
    lost = "the earlier run's metrics or rollouts are lost"
    assert files_judged(small, lambda root: (root / "run" / "rollouts" / "step-000001.jsonl").unlink()) == [lost]
    assert files_judged(small, lambda root: (root / "run" / "metrics.jsonl").rename(root / "run" / "metrics.old")) == []


TRACEBACK = 'Traceback (most recent call last):\n  File "/x/src/fulltilt/data/files.py", line 7, in read\n    x\nKeyError: 3\n'


@pytest.mark.parametrize(
    ("ended", "kind"),
    [
        (Ended(1, "", TRACEBACK, 1.0), "traceback: KeyError at data/files.py:7 read"),
        (Ended(1, "", "", 1.0, crash=TRACEBACK), "traceback: KeyError at data/files.py:7 read"),
        (Ended(-11, "", "", 1.0), "exit code -11"),
        (Ended(3, "", "error: x", 1.0), "exit code 3"),
        (Ended(2, "", "", 1.0), "exit code 2 without a message"),
        (Ended(0, "\x1b[2J", "", 1.0), "a control character in the output"),
        (Ended(0, "", "/x/torch/y.py:3: UserWarning: old\n", 1.0), "a library's warning: #: UserWarning: old"),
        (Ended(0, "", "", 1.0, left=("sleep 1000",)), "a process is left behind"),
        (Ended(-9, "", "", 60.0, stuck_at='Thread:\n  File "/x/src/fulltilt/config.py", line 9 in load\n'), "hangs at config.py:9 load"),
        (Ended(2, "", "error: x\n" * 9999, 1.0), "a very long message"),
        (Ended(2, "", "error: data.train: KeyError: 'x'. Repair it\n", 1.0), "an internal error told as the user's: KeyError"),
    ],
)
def test_how_a_command_may_not_end(small: tree.Tree, ended: Ended, kind: str) -> None:
    assert kind in [verdict.kind for verdict in (*cases.judge_end(small, ended, False), *cases.judge_output(small, ended))]


@pytest.mark.parametrize("code", [0, 2, 130])
def test_how_a_command_may_end(small: tree.Tree, code: int) -> None:
    quoted = "error: run.toml: 1 mistake\n  1. reward.py:f raised KeyError: 'x' (reward.py:3). Fix the function\n"
    ended = Ended(code, "step 1/2\n", quoted, 1.0)
    assert not [*cases.judge_end(small, ended, False), *cases.judge_output(small, ended)]


def run_folder(folder: Path, lines: list[dict[str, Any]]) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_what_tells_a_killed_run_from_one_left_alone(tmp_path: Path) -> None:
    line = {"step": 1, "reward": 0.5, "memory_gib/kv": 1.0, "timing_s/step": 0.1}
    expected = run_folder(tmp_path / "expected", [line])
    same = run_folder(tmp_path / "same", [line | {"timing_s/step": 0.2}])
    assert list(kills.differences(same, expected, set())) == []
    other = run_folder(tmp_path / "other", [{"step": 1, "reward": 0.6, "timing_s/step": 0.1}])
    (other / "checkpoints" / "step-00000001.partial-7").mkdir()
    (other / "stray").touch()
    assert list(kills.differences(other, expected, set())) == [
        "metrics of step 1 have other values: ['reward']",
        "metrics of step 1 have other names: ['memory_gib/kv']",
        "other files: ['stray']",
        "checkpoints/ holds ['step-00000001.partial-7'] instead of []",
    ]
