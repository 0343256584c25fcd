"""fulltilt from Python: the same runs, checks and files as the command line; functions and rows in place of files; nothing left behind."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import runs
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import fulltilt
from fulltilt import callables, demo, user_code
from fulltilt.callables import Callables, travelling
from fulltilt.data import files
from fulltilt.loop.folder import SNAPSHOT
from fulltilt.observe.console import Console
from fulltilt.records import RunWarning
from fulltilt.user_code import UserCodeError

ModelFolders = Callable[[str], Path]
ROWS = [{"prompt": f"{number}+{number}=", "ground_truth": str(number), "data_source": "sums"} for number in range(18)]
SMALL: dict[str, Any] = {
    "data": ROWS, "algorithm": {"name": "grpo", "prompts_per_step": 4, "samples_per_prompt": 4}, "steps": 2, "max_new_tokens": 12,
    "lr": 1e-3, "device": "cpu", "seed": 3, "health": {"ignore": ["all-clipped"]},
}  # fmt: skip


def letters(solution_str: str, ground_truth: str) -> dict[str, float]:
    count = sum(map(str.islower, solution_str))
    return {"score": count / 24, "letters": count, "truth": float(ground_truth)}


@pytest.fixture
def small(tmp_path: Path, model_folders: ModelFolders, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    return {**SMALL, "model": model_folders("qwen2"), "reward": letters, "run_dir": "run"}


@pytest.fixture
def folder(tmp_path: Path, model_folders: ModelFolders) -> Path:
    return runs.make(tmp_path / "folder", model_folders("qwen2"))


# -- a run ------------------------------------------------------------------------------------------------------------------------------


def test_six_lines_train_a_model(small: dict[str, Any]) -> None:
    told: list[tuple[int, dict[str, Any]]] = []
    result = fulltilt.train(**small, on_step=lambda step, metrics: told.append((step, metrics)))
    assert (result.steps, result.interrupted, result.folder) == (2, False, Path("run").absolute())
    assert [line["step"] for line in result.metrics] == [1, 2] and told == [(line["step"], line) for line in result.metrics]
    assert result.metrics[0]["reward/parts/truth"] >= 0 and result.reward_last == result.metrics[-1]["critic/score/mean"]
    assert [sample["step"] for sample in result.samples] == [1] * 16 + [2] * 16
    assert all(sample["reward"] == letters(sample["response"], sample["ground_truth"])["score"] for sample in result.samples)
    assert result.model is not None and AutoModelForCausalLM.from_pretrained(result.model).num_parameters() > 0
    assert str(result.folder) in repr(result) and len(repr(result)) < 500
    # What was asked for is done: the same call resumes, and has nothing to do.
    assert fulltilt.train(**small).metrics == result.metrics


@pytest.mark.long
def test_runs_of_one_process_and_of_the_command_line_are_the_same_to_the_bit(tmp_path: Path, model_folders: ModelFolders) -> None:
    """Also after a run that failed, one in another dtype, and one with other threads."""
    command, first, other, second = (runs.make(tmp_path / name, model_folders("qwen2")) for name in ("command", "first", "other", "second"))
    assert runs.command_forked(command, "train", "run.toml", "run.steps=2").code == 0
    before = torch.get_num_threads(), torch.get_deterministic_debug_mode(), signal.getsignal(signal.SIGINT)
    with contextlib.chdir(first):
        fulltilt.train("run.toml", steps=2)
    with contextlib.chdir(other):
        with pytest.raises(fulltilt.UserError, match="not_a_number"):
            fulltilt.train("run.toml", reward="reward.py:not_a_number", run_dir="failed")
        fulltilt.train("run.toml", overrides=["model.dtype=float64", "run.threads=2", "run.steps=1"])
    with contextlib.chdir(second):
        fulltilt.train("run.toml", steps=2)
    assert (torch.get_num_threads(), torch.get_deterministic_debug_mode(), signal.getsignal(signal.SIGINT)) == before
    for folder in (first, second):
        runs.assert_equal_runs(folder, command)


@pytest.mark.long
@pytest.mark.usefixtures("garbage")
def test_nothing_of_a_run_stays_in_memory(small: dict[str, Any]) -> None:
    def tensors() -> int:
        return sum(type(found) is torch.nn.Parameter for found in gc.get_objects())

    gc.collect()
    before = tensors()
    fulltilt.train(**small)
    assert tensors() == before
    with pytest.raises(fulltilt.UserError, match="returned nan") as kept:  # a notebook keeps the last error
        fulltilt.train(**{**small, "run_dir": "other", "reward": lambda solution_str: float("nan")})
    assert tensors() == before and kept.value.__traceback__ is not None
    fulltilt.generate("run", ["1+1="], max_new_tokens=4)
    assert tensors() == before


def test_a_run_in_another_thread(small: dict[str, Any]) -> None:
    found: list[fulltilt.TrainResult] = []
    thread = threading.Thread(target=lambda: found.append(fulltilt.train(**small)))
    thread.start()
    thread.join()
    assert found[0].steps == 2


def test_ctrl_c_saves_and_returns(small: dict[str, Any]) -> None:
    def interrupt(step: int, metrics: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    result = fulltilt.train(**small, on_step=interrupt)
    assert result.interrupted and result.steps == 1 and result.model is not None
    assert fulltilt.train(**small).steps == 2


@pytest.mark.long
@pytest.mark.parametrize("returned", [False, pytest.param(np.bool_(False), marks=pytest.mark.matrix), None])
def test_a_callback_ends_a_run_after_it_is_saved(small: dict[str, Any], tmp_path: Path, returned: Any) -> None:
    """Also one that changes the current folder."""
    (tmp_path / "elsewhere").mkdir()

    def stop(step: int, metrics: dict[str, Any]) -> Any:
        os.chdir(tmp_path / "elsewhere")
        if returned is None:
            raise RuntimeError("enough")
        return returned

    if returned is None:
        with pytest.raises(RuntimeError, match="enough"):
            fulltilt.train(**small, on_step=stop)
    else:
        assert fulltilt.train(**small, on_step=stop).interrupted
    assert list(runs.checkpoints(Path())) == [1]
    assert fulltilt.train(**small).steps == 2


# -- what is given ----------------------------------------------------------------------------------------------------------------------


def mistakes(**given: Any) -> list[str]:
    with pytest.raises(fulltilt.UserError) as raised:
        fulltilt.check(**given)
    first, *others = str(raised.value).splitlines()
    assert first == f"fulltilt.check: {len(others)} mistake{'s' * (len(others) > 1)}"
    return [text.partition(". ")[2] for text in others]


def test_every_mistake_at_once(small: dict[str, Any]) -> None:
    assert issubclass(fulltilt.UserError, ValueError)
    wrong = {**small, "stesp": 3, "epochs": 2, "train": {"lr": 1}, "reward": "mtah", "data": [{"prompt": object()}], "rollout": 3}
    del wrong["max_new_tokens"]
    found = mistakes(**wrong, eval_temperature="hot")
    expected = [
        "stesp: unknown key; the nearest is run.steps",
        "rollout: must be a table, got 3",
        "eval.temperature: must be a number",
        "lr: train.lr is also set by train. Give it once",
        "epochs: may be algorithm.epochs or run.epochs. Write algorithm_epochs= or run_epochs=",
        "data.train: rows given from Python, row 0",
        'reward.function: "mtah" is not a reward',
    ]
    assert [text for text in expected if not any(line.startswith(text) for line in found)] == [], found


def test_nothing_is_written_where_something_is_wrong(small: dict[str, Any]) -> None:
    with pytest.raises(fulltilt.UserError, match=r"rollout\.max_new_tokens"):
        fulltilt.train(**{**small, "max_new_tokens": 5000})
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fulltilt.train(3), "fulltilt.train: its first argument is of type int"),
        (lambda: fulltilt.train("nowhere.toml", steps=3), "nowhere.toml: no such file"),
        (
            lambda: fulltilt.train(on_step="print"),
            "on_step: 'print' is not a callable object. Give a function of the step's number and its metrics",
        ),
        (lambda: fulltilt.train(overrides="run.stesp=3"), "run.stesp: unknown key; the nearest is run.steps"),
        (lambda: fulltilt.generate(None, []), "fulltilt.generate: the model is of type NoneType"),
        (
            lambda: fulltilt.train(on_step=lambda step: None),
            r"on_step: too many .*def on_step\(step, metrics\)",
        ),
        (
            lambda: fulltilt.check(on_step=lambda a, b, c: None),
            "on_step: missing a required argument: 'c'",
        ),
        (lambda: fulltilt.train(on_step=awaited), "on_step: it is an async function, which nothing would await"),
        (lambda: fulltilt.check(overrides=3), "overrides: give a list of texts"),
        (lambda: fulltilt.check(overrides=[None]), "overrides: give a list of texts"),
        (lambda: fulltilt.check(rollout=endless()), "a table or list holds itself, or is nested too deep"),
        (lambda: fulltilt.generate(".", ["1"], samples="two"), "samples: must be a whole number"),
        (lambda: fulltilt.evaluate(model="."), "data: nothing to evaluate on"),
        (lambda: fulltilt.evaluate(latest=True, data=ROWS), "evaluated with the settings of its run. Give the run's file, for example"),
        (lambda: fulltilt.evaluate(checkpoint=3, run_dir="runs/a"), r'fulltilt.evaluate\("runs/a/snapshot.toml", latest=True\)'),
    ],
    ids=range(15),
)
def test_arguments_of_the_wrong_kind(call: Callable[[], object], words: str) -> None:
    with pytest.raises(fulltilt.UserError, match=words):
        call()


async def awaited(step: int, metrics: dict[str, Any]) -> None: ...


def endless() -> dict[str, Any]:
    table: dict[str, Any] = {}
    table["itself"] = table
    return table


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"data": []}, "data.train: holds no rows. Give at least one row, or a path."),
        ({"val": ()}, "data.val: holds no rows. Give at least one row, or a path."),
        ({"data": lambda: ROWS}, "data.train: must be text that is not empty or a list of text, got <function"),
        ({"model": len}, "model.path: must be text that is not empty, got <built-in function len>"),
        ({"keep_best": "foo/bar"}, 'run.keep_best: no metric is called "foo/bar". Use one that begins with val/, val-core/, '),
        ({"max_tokens": 3}, "data.max_tokens: 3 has no effect .* The length of sampled responses is rollout.max_new_tokens"),
    ],
    ids=lambda given: str(given)[:30],
)
def test_values_that_no_run_can_use(small: dict[str, Any], given: dict[str, Any], words: str) -> None:
    (found,) = mistakes(**{**small, **given})
    assert re.match(words, found), found


def test_check_takes_what_train_takes(small: dict[str, Any]) -> None:
    fulltilt.check(**small, quiet=True, on_step=print)
    assert list(Path().iterdir()) == []


def test_a_ground_truth_that_no_row_has_is_refused_and_one_that_some_lack_is_noted(small: dict[str, Any]) -> None:
    misspelt = [{"prompt": row["prompt"], "groundtruth": row["ground_truth"]} for row in ROWS]
    (found,) = mistakes(**{**small, "data": misspelt})
    assert re.search("data.train: no row has a ground truth, which .*letters requires", found)
    assert 'The columns are "prompt", "groundtruth" (the nearest: "groundtruth"). Name the column ground_truth, or' in found
    with pytest.raises(fulltilt.UserError, match=r"data\.val: no row has a ground truth, which .*exact_match requires"):
        fulltilt.evaluate(**{**small, "data": misspelt, "reward": ["exact_match"]})
    fulltilt.check(**{**small, "data": misspelt, "reward": lambda solution_str, ground_truth=None: 1.0})
    told: list[str] = []
    console = Console(quiet=True)
    console.note = told.append  # type: ignore[method-assign]
    some = [{key: value for key, value in row.items() if key == "prompt" or number} for number, row in enumerate(ROWS)]
    fulltilt.evaluate(**{**small, "data": some, "reward": "exact_match", "console": console})
    note = "data.val: 1 of the 18 rows that exact_match scores have no ground truth, which it requires: it gets None for them"
    assert note in told


def test_check_tells_mistakes_of_all_rows_and_of_the_reward(small: dict[str, Any]) -> None:
    def fails(solution_str: str) -> float:
        raise RuntimeError("never works")

    rows = [*ROWS[:2], {"prompt": 3}, *ROWS[2:], *({"promt": "x"} for _ in range(7))]
    *of_rows, more, reward = mistakes(**{**small, "data": rows, "val": [{"prompt": ""}, *ROWS], "reward": fails})
    assert [re.search(r"row (\d+)", text)[1] for text in of_rows] == ["0", "2", "19", "20", "21", "22"]  # type: ignore[index]
    assert more == "data.train: 3 more rows with mistakes" and "never works" in reward


def test_splits_of_a_data_set_are_not_rows(small: dict[str, Any]) -> None:
    from datasets import Dataset, DatasetDict

    whole = DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS)})
    told = "has the splits train and test. Give one split, for example dataset['train']"
    assert mistakes(**{**small, "data": whole}) == [f"data: {told}"]
    assert mistakes(**{**small, "data": {"train": ROWS, "val": whole}}) == [f"data.val: {told}"]


def test_reading_rows_for_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_TELL_S", 0.05)
    with pytest.warns(RunWarning, match=r"2 rows read from Python so far\. A run begins once all have been read"):
        files.forget_rows(files.rows_in_memory(row for row in ROWS[:3] if row is not ROWS[2] or not time.sleep(0.1)))


def test_rows_are_freed(small: dict[str, Any]) -> None:
    with pytest.raises(fulltilt.UserError):
        fulltilt.check(**small, stesp=3)
    assert files._in_memory == {}


def test_ways_to_give_the_same(small: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables, keywords and a file with overrides are one configuration."""
    from fulltilt.api import configured

    tables = {
        "model": {"path": str(small["model"])}, "data": {"train": tuple(ROWS)}, "reward": {"function": letters},
        "algorithm": small["algorithm"],
        "run": {"steps": 2, "device": "cpu", "seed": 3, "dir": Path("run")}, "rollout": {"max_new_tokens": 12}, "train": {"lr": 1e-3},
        "health": {"ignore": ("all-clipped",)},
    }  # fmt: skip
    with configured("x", None, small, (), logged=True) as one, configured("x", tables, {}, (), logged=True) as other:
        assert one == other and one.reward.function == "python:letters"
    monkeypatch.chdir(folder)
    with configured("x", "run.toml", {"steps": 7, "eval_temperature": 0.5, "val": ROWS}, ["run.steps=9"], logged=True) as read:
        assert (read.run.steps, read.eval.temperature, read.data.val[:7]) == (9, 0.5, "memory:")


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ("gsm8k", "gsm8k"),
        (letters, "python:letters"),
        ([letters, "gsm8k"], {"python:letters": 1.0, "gsm8k": 1.0}),
        ({letters: 0.5, "math": 1.0}, {"python:letters": 0.5, "math": 1.0}),
        ({"function": {letters: 1.0}, "timeout_s": 3}, {"python:letters": 1.0}),
        ({"sources": {"sums": letters}}, "gsm8k"),
    ],
    ids=lambda given: str(type(given).__name__),
)
def test_rewards_in_every_form(small: dict[str, Any], reward: Any, expected: Any) -> None:
    from fulltilt.api import configured

    with configured("x", None, {**small, "reward": reward}, (), logged=True) as config:
        assert config.reward.function == expected
        assert config.reward.sources in ({}, {"sums": "python:letters"})


@dataclass
class Judge:
    """A reward that cannot be a key: dataclasses are not hashable."""

    weight: float = 1.0

    def __call__(self, solution_str: str) -> float:
        return self.weight


def test_a_list_of_rewards_may_hold_any_callable(small: dict[str, Any]) -> None:
    from fulltilt.api import configured

    with configured("x", None, {**small, "reward": [Judge(), Judge(), letters]}, (), logged=True) as config:
        assert config.reward.function == {"python:Judge": 1.0, "python:Judge-2": 1.0, "python:letters": 1.0}


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ({0: 1.0}, "reward.0: unknown key"),
        ({letters: 1.0, 0: 1.0}, 'reward.function: "0" is not a reward'),
        ([["x"]], 'reward: ["x"] is of type list. Give a function, the name of a built-in one or FILE.py:NAME'),
        (3, "reward: 3 is of type int. Give a function, the name of a built-in one or FILE.py:NAME"),
        ([letters, letters], "reward: python:letters is in the list 2 times. Give it once, with its weight"),
        ([], "reward: the list is empty. Give a function"),
    ],
    ids=range(6),
)
def test_rewards_of_no_form(small: dict[str, Any], reward: Any, words: str) -> None:
    (found,) = mistakes(**{**small, "reward": reward})
    assert found.startswith(words)


def test_the_error_beneath_is_kept_as_text(small: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {**small, "data": [{"prompt": object()}]}
    for shown in (False, True):
        if shown:
            monkeypatch.setenv("FULLTILT_TRACEBACK", "1")
        with pytest.raises(fulltilt.UserError) as raised:
            fulltilt.check(**wrong)
        assert raised.value.__cause__ is raised.value.__context__ is None
        assert ["Traceback" in note for note in getattr(raised.value, "__notes__", [])] == [True] * shown


def test_a_dataset_is_data(small: dict[str, Any]) -> None:
    """Rows have a name that is made from their content: the same name is the same run."""
    import datasets

    from fulltilt.api import configured

    dataset = datasets.Dataset.from_list(ROWS)
    with configured("x", None, small, (), logged=True) as expected:
        for data in (dataset, dataset.to_iterable_dataset(), {"train": dataset}, pandas_rows()):
            with configured("x", None, {**small, "data": data}, (), logged=True) as config:
                assert config == expected
    splits = datasets.DatasetDict(train=dataset, test=dataset)
    assert mistakes(**{**small, "data": splits})[0].startswith("data: has the splits train and test. Give one split")
    assert "frame.to_dict('records')" in mistakes(**{**small, "data": dataset.to_pandas()})[0]


def pandas_rows() -> list[dict[str, Any]]:
    import pandas

    return pandas.DataFrame(ROWS).to_dict("records")


# -- functions --------------------------------------------------------------------------------------------------------------------------


def sent(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a reward process loads it."""
    made = Callables()
    code = travelling(made.codes[made.name(function)])
    assert code.given is None and code.pickled
    return user_code.function(code, as_script=True)


def make_scorer(weight: float) -> Callable[..., float]:
    def scorer(solution_str: str) -> float:
        return weight * len(solution_str)

    return scorer


class Scorer:
    def __init__(self, weight: float) -> None:
        self.weight = weight

    def __call__(self, solution_str: str) -> float:
        return self.weight * len(solution_str)

    def method(self, solution_str: str) -> float:
        return self(solution_str)


FORMS: dict[str, tuple[str, Callable[..., float]]] = {
    "closure": ("scorer", make_scorer(2)),
    "lambda": ("lambda", lambda solution_str: 2 * len(solution_str)),
    "partial": ("scorer", functools.partial(make_scorer(2))),
    "object": ("Scorer", Scorer(2)),
    "method": ("method", Scorer(2).method),
}


@pytest.mark.parametrize("form", FORMS)
def test_functions_of_every_form_travel(form: str) -> None:
    name, function = FORMS[form]
    made = Callables()
    assert made.name(function) == made.name(function) == f"python:{name}"
    assert sent(function)(solution_str="abc") == 6


def test_a_coroutine_is_a_reward(small: dict[str, Any]) -> None:
    async def judged(solution_str: str) -> float:
        return float(len(solution_str))

    assert fulltilt.train(**{**small, "reward": judged, "steps": 1}).metrics[0]["reward/errors"] == 0


def test_functions_of_the_same_name_stay_apart() -> None:
    made = Callables()
    assert [made.name(make_scorer(weight)) for weight in (1, 2)] == ["python:scorer", "python:scorer-2"]


PROGRAM = """
import functools, re
TABLE = {"a": [1, (2.5, None)], "b": {"x", "y", "z"}}
PATTERN = re.compile("[0-9]+")
def helper(text, scale=1):
    return [TABLE for _ in text] and scale * len(PATTERN.findall(text))
def again(text):
    return helper(text) or score(text)
def score(solution_str, weight=1.0):
    return weight * sum(again(text) for text in solution_str)
def made(weight):
    return lambda solution_str: weight * score(solution_str)
class Judge:
    bonus = 1
    def __init__(self, weight):
        self.weight = weight
    def __call__(self, solution_str):
        return self.weight * helper(solution_str) + self.bonus
    @staticmethod
    def static(text):
        return 7
@functools.wraps(score)
def wrapped(*given):
    return 11 * score(*given)
GIVEN = [score, functools.partial(score, weight=2.0), made(3), Judge(4), Judge(4).__call__, wrapped, functools.cache(score)]
"""


@functools.cache
def digests(program: str) -> list[str]:
    program_globals: dict[str, Any] = {"__name__": "__main__"}
    exec(program, program_globals)
    made = Callables()
    return [made.codes[made.name(function)].digest for function in program_globals["GIVEN"]]


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ("", "", []),
        ("PATTERN.findall", "PATTERN.split", range(7)),
        ("[0-9]+", "[0-8]+", range(7)),
        ("2.5, None", "2.75, None", range(7)),
        ('"z"', '"w"', range(7)),
        ("scale=1", "scale=2", range(7)),
        ("weight=2.0", "weight=3.0", [1]),
        ("made(3)", "made(5)", [2]),
        ("Judge(4), Judge(4)", "Judge(6), Judge(6)", [3, 4]),
        ("bonus = 1", "bonus = 2", [3, 4]),
        ("return 7", "return 8", [3, 4]),
        ("11 *", "12 *", [5]),
    ],
)
def test_a_function_is_another_when_anything_that_it_uses_changes(before: str, after: str, changed: list[int]) -> None:
    one, other = digests(PROGRAM), digests(PROGRAM.replace(before, after))
    assert [place for place, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]] == list(changed)


def test_a_function_is_the_same_in_every_process(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    show = "from fulltilt.callables import source_of\nprint([source_of(each) for each in GIVEN])\n"
    file.write_text(PROGRAM + show)
    found = {
        subprocess.run(
            [sys.executable, file], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in "12"
    }
    assert len(found) == 1


def test_a_module_that_another_process_cannot_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: dict[str, Any]) -> None:
    """The function's module travels with it; modules beside it are found where the program finds them."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "mine.py").write_text("import beside\nWEIGHT = 3\ndef score(solution_str):\n    return WEIGHT * beside.one()\n")
    (tmp_path / "lib" / "beside.py").write_text("def one():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path / "lib")
    try:
        result = fulltilt.train(**{**small, "reward": importlib.import_module("mine").score, "steps": 1})
    finally:
        del sys.modules["mine"], sys.modules["beside"]
    assert (result.reward_first, result.metrics[0]["reward/errors"]) == (3.0, 0)


class Locked:
    def __init__(self) -> None:
        self.guard = threading.Lock()

    def __call__(self, solution_str: str) -> float:
        return 1.0


LOCK, FILE = threading.Lock(), open(os.devnull, "w")  # noqa: SIM115


def locked(solution_str: str) -> float:
    with LOCK:
        return 1.0


def writes(solution_str: str) -> float:
    return float(FILE.write(solution_str))


@pytest.mark.parametrize(
    ("function", "words"), [(locked, ["'LOCK'", "lock"]), (writes, ["'FILE'"]), (Locked(), ["'guard'"])], ids=["lock", "file", "object"]
)
def test_a_function_that_cannot_travel_is_refused_by_name(small: dict[str, Any], function: Callable[..., float], words: list[str]) -> None:
    with pytest.raises(
        fulltilt.UserError, match=f"the function '{callables.plain_name(function)}' cannot be sent to other processes"
    ) as refused:
        fulltilt.check(**{key: value for key, value in small.items() if key != "quiet"} | {"reward": function})
    assert [word for word in (*words, "FILE.py:NAME") if word not in str(refused.value)] == []


@pytest.mark.gpu
def test_a_tensor_on_a_gpu_does_not_travel() -> None:
    weight = torch.ones(1, device="cuda")
    with pytest.raises(UserCodeError, match=r"cannot pickle a tensor on cuda:0 \(it uses 'weight'\)"):
        sent(lambda solution_str: float(weight))


def test_what_a_function_raises_names_it_and_its_line(small: dict[str, Any]) -> None:
    def fails(solution_str: str, ground_truth: str) -> float:
        if int(ground_truth) % 2:
            raise KeyError("no opinion")
        return 1.0

    warned: list[str] = []
    fulltilt.train(**{**small, "reward": fails, "steps": 1}, console=Warned(warned))
    line = fails.__code__.co_firstlineno + 2
    assert any(f"python:fails raised KeyError: 'no opinion' (test_api.py:{line})" in text for text in warned), warned


class Warned(Console):
    def __init__(self, kept: list[str]) -> None:
        super().__init__(quiet=True)
        self.kept = kept

    def warn(self, text: str) -> None:
        self.kept.append(text)


def test_an_advantage_and_a_loss_from_python(small: dict[str, Any]) -> None:
    seen = []

    def advantage(rewards: Any, groups: Any, gamma: float = 1.0) -> Any:
        seen.append(len(rewards))
        return rewards - rewards.mean()

    result = fulltilt.train(**{**small, "steps": 1}, advantage=advantage, loss=lambda terms: -terms.logprobs * terms.advantages)
    assert result.steps == 1 and seen[-1] == 16
    with pytest.raises(fulltilt.UserError, match=r"python:lambda.*it takes none of rewards, groups"):
        fulltilt.train(**small, advantage=lambda x: x)


def test_the_command_line_cannot_start_what_python_gave(small: dict[str, Any]) -> None:
    fulltilt.train(**{**small, "data": str(written_rows()), "steps": 1})
    ended = runs.command_here(Path.cwd(), "train", f"run/{SNAPSHOT}", "run.dir=again")
    assert ended.code == 2 and 'reward.function: "python:letters": it stands for a function that a Python program gave' in ended.error


def written_rows() -> Path:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return Path("rows.jsonl")


def test_source_is_the_same_in_every_process() -> None:
    assert b"return weight * len(solution_str)" in callables.source_of(make_scorer(1))
    typed: dict[str, Any] = {}
    exec("def score(solution_str): return len(solution_str)", typed)
    assert callables.source_of(typed["score"]) == callables.source_of(typed["score"]) != callables.source_of(len)


# -- evaluation and generation ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model_folders: ModelFolders) -> Path:
    place = tmp_path_factory.mktemp("trained")
    given = {**SMALL, "model": model_folders("qwen2"), "reward": letters, "steps": 2, "save_every": 1}
    fulltilt.train(**given, run_dir=place / "whole")
    fulltilt.train(**given, run_dir=place / "adapters", lora={"rank": 2}, overrides=["train.lr=0.05"])
    return place


def test_other_rows_are_called_rows(trained: Path, model_folders: ModelFolders) -> None:
    given = {**SMALL, "model": model_folders("qwen2"), "reward": letters, "run_dir": trained / "whole", "data": ROWS[:9]}
    with pytest.raises(fulltilt.UserError, match=r"data\.train \(rows given from Python, now other rows given from Python\)"):
        fulltilt.train(**given, quiet=True)


def test_evaluate(trained: Path, small: dict[str, Any], model_folders: ModelFolders) -> None:
    given = {"data": ROWS, "reward": letters, "max_new_tokens": 8, "device": "cpu"}
    found = fulltilt.evaluate(model=model_folders("qwen2"), **given)
    assert found["step"] == 0 and found["val/reward/mean"] >= 0
    same = {key: value for key, value in small.items() if key != "data"} | {
        "run_dir": trained / "whole",
        "data": {"train": ROWS, "val": ROWS},
    }
    newest, first = fulltilt.evaluate(**same, latest=True), fulltilt.evaluate(**same, checkpoint=1)
    assert (newest["step"], first["step"]) == (2, 1)
    assert newest["val/reward/mean"] == fulltilt.evaluate(model=newest["model"], **{**given, "max_new_tokens": 12})["val/reward/mean"]
    with pytest.raises(fulltilt.UserError, match="no checkpoint of step 7; it has those of steps 1, 2"):
        fulltilt.evaluate(**same, checkpoint=7)


def test_generate_is_what_transformers_would(trained: Path) -> None:
    prompts = ["1+1=", [{"role": "user", "content": "hi"}]]
    found = fulltilt.generate(trained / "whole", prompts, temperature=0, max_new_tokens=8, details=True, device="cpu")
    folder = runs_model(trained / "whole", 2)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for prompt, completion in zip(["1+1=", "<s>u:hi\na:"], found, strict=True):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        expected = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
        assert completion.tokens == expected and completion.text == tokenizer.decode(expected, skip_special_tokens=True)
        assert len(completion.logprobs) == len(expected) and completion.finish in ("stop", "length")


def runs_model(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}" / "model"


def test_generate_from_every_kind_of_folder(trained: Path, model_folders: ModelFolders) -> None:
    given: dict[str, Any] = {"max_new_tokens": 8, "seed": 1, "samples": 3, "device": "cpu"}
    newest = fulltilt.generate(trained / "adapters", ["1+1="], **given)
    assert [len(group) for group in newest] == [3] and len(set(newest[0])) > 1
    assert newest == fulltilt.generate(runs_model(trained / "adapters", 2), ["1+1="], **given)
    assert newest != fulltilt.generate(trained / "adapters", ["1+1="], step=1, **given)
    assert newest != fulltilt.generate(model_folders("qwen2"), ["1+1="], **given)
    assert fulltilt.generate(model_folders("qwen2"), [], **given) == []


SPELLINGS = {
    "max_tokens": "max_new_tokens", "max_completion_length": "max_new_tokens", "max_length": "max_new_tokens", "temp": "temperature",
    "do_sample": "temperature", "eval_temperature": "temperature", "num_samples": "samples", "num_generations": "samples",
    "num_return_sequences": "samples", "samples_per_prompt": "samples", "data": "prompts",
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": "nowhere"}, "model: no such folder"),
        ({"model": "no\0where"}, r"model: no file or folder can be called .* it holds a NUL character"),
        ({"model": "nowhere", "step": 1}, "nowhere is not the folder of a run"),
        ({"prompts": "1+1="}, "prompts: give a list"),
        ({"prompts": {"a": "1+1="}}, "prompts: give a list"),
        ({"prompts": [{"role": "user", "content": "hi"}]}, r"prompts\[0\]: is of type dict. Give a string, or a conversation"),
        ({"temperature": -1}, r" 1\. temperature: must be a number at least 0"),
        ({"temperature": None}, "^temperature: is None"),
        ({"temperature": 0, "top_p": 0.5}, "top_p: 0.5 has no effect while temperature is 0.0. Remove it, or set temperature above 0"),
        ({"seed": -1}, r" 1\. seed: must be a whole number"),
        ({"max_new_tokens": 5000}, r"prompts\[0\]: it has 4 tokens, and the model was made for 512 positions: .*or lower max_new_tokens"),
        ({"prompts": ["1+1=", "1" * 600]}, r"prompts\[1\]: it has 600 tokens, and the model was made for 512 positions: .* the prompt$"),
        ({"tempreature": 1}, "tempreature: unknown key; the nearest is temperature"),
        ({"system": "Be brief."}, r"prompts\[0\]: system needs a chat template, .* Set apply_template = 'always', or remove system"),
        (
            {"lr": 1, "max_prompt_tokens": 3},
            "lr: train.lr has no effect on generation. Remove it\n.*max_prompt_tokens: data.max_prompt_tokens has",
        ),
        ({"reward": "math"}, "reward: reward.function has no effect on generation"),
        ({"health": {"stop": False}}, "health: health.stop has no effect on generation"),
        *(({name: 2}, f"{name}: not a keyword of fulltilt.generate. Write {ours}=") for name, ours in SPELLINGS.items()),
        ({"learning_rate": 2}, "learning_rate: train.lr has no effect"),
        (
            {"per_device_train_batch_size": 2},
            "per_device_train_batch_size: algorithm.prompts_per_step and actor.token_budget have no effect",
        ),
        ({"n": 2}, "n: verl's name for samples: write samples = 2"),
        ({"stop_strings": ["x"]}, r'stop_strings: unknown key; other systems\' name for stop: write stop = \["x"\]'),
    ],
    ids=str,
)
def test_mistakes_of_generate(given: dict[str, Any], words: str, model_folders: ModelFolders) -> None:
    with pytest.raises(fulltilt.UserError, match=words):
        fulltilt.generate(**{"model": model_folders("qwen2"), "prompts": ["1+1="], "device": "cpu", **given})


def test_a_short_model_answers_as_far_as_its_positions_go(tmp_path: Path) -> None:
    folder = models.save("qwen2", tmp_path / "short")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 32}))
    (found,) = fulltilt.generate(folder, (prompt for prompt in ["1+1="]), temperature=0, details=True, device="cpu")
    assert (len(found.tokens), found.finish) == (28, "length") or (len(found.tokens) <= 28 and found.finish == "stop")


# -- a notebook -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_notebook_trains_plots_and_talks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a real kernel: its functions live in no file, and its error would be the last thing it keeps."""
    import nbclient
    import nbformat

    monkeypatch.setenv("PYTHONPATH", runs.search_path())
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    notebook = nbformat.read(runs.SOURCE.parent / "examples" / "notebook" / "train.ipynb", as_version=4)
    assert [cell.outputs for cell in notebook.cells if cell.cell_type == "code" and cell.outputs] == []
    checks = "assert result.reward_first < 0.7 < 0.85 < result.reward_last, result"
    notebook.cells.append(nbformat.v4.new_code_cell(checks))
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    picture, answers = next(cell for cell in code if "plt.show()" in cell.source), code[-2]
    if importlib.util.find_spec("matplotlib") is not None:
        assert any("image/png" in output.get("data", {}) for output in picture.outputs), picture.outputs
    assert answers.outputs[0].data["text/plain"] == "['5', '8', '5']"


# -- the page ---------------------------------------------------------------------------------------------------------------------------

FEWER = {'steps(=|": )20': r"steps\g<1>1", r'max_new_tokens(=|": )\d+': r"max_new_tokens\g<1>6"}
RUN_FILE = """
model.path = "models/mine"
data.train = "mine/rows.jsonl"
run = { steps = 3, dir = "runs/mine" }
rollout.max_new_tokens = 6
"""


@pytest.mark.long
def test_every_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In the page's order and in one program, with a model that fits here and fewer steps."""
    page = (runs.SOURCE.parent / "docs" / "python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    demo.make_model(tmp_path / "models" / "mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "run.toml").write_text(RUN_FILE)
    (tmp_path / "mine" / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+1=", "ground_truth": "1"}) + "\n" for n in range(64)))
    names: dict[str, Any] = {"__name__": "__main__"}
    for kind, text in blocks:
        if kind == "python":
            for usual, fewer in FEWER.items():
                text = re.sub(usual, fewer, text)
            capsys.readouterr()
            exec(compile(text, "page", "exec"), names)
        else:  # what the block before it prints
            assert text.strip() in capsys.readouterr().out
    assert names["completion"].finish in ("stop", "length") and len(names["completion"].tokens) <= 6
