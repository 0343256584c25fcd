"""The benchmark of learning: what is asked of TRL, what is made of what was measured, and both for real."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
import runs
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fulltilt.bench import peers
from fulltilt.bench.job import BenchJob
from fulltilt.bench.options import BenchOptions
from fulltilt.records import UserError

trl: Any = peers.load("peer_trl")
learn: Any = peers.load("learn")
WITHOUT_TRL = importlib.util.find_spec("trl") is None
TABLES = {
    "model": {"path": "model"},
    "data": {"train": "train.jsonl", "val": "val.jsonl", "max_prompt_tokens": 16},
    "algorithm": {"name": "grpo", "prompts_per_step": 4, "samples_per_prompt": 4},
    "rollout": {"max_new_tokens": 12, "temperature": 0.9},
    "reward": {"function": "reward.py:score"},
    "train": {"lr": 2e-3, "schedule": "cosine", "warmup_steps": 3, "weight_decay": 0.01},
    "health": {"ignore": ["all-clipped"]},
    "run": {"dir": "run", "steps": 12, "eval_every": 6, "seed": 7, "device": "cpu"},
}


@pytest.fixture
def place(tmp_path: Path, model_folders, monkeypatch: pytest.MonkeyPatch) -> Path:
    runs.make(tmp_path / "place", model_folders("llama"), TABLES)
    monkeypatch.chdir(tmp_path / "place")
    return tmp_path / "place"


def job(place: Path, *overrides: str, **other: Any) -> BenchJob:
    return learn.prepare(BenchOptions(run=place / "run.toml", folder=place / "bench", overrides=list(overrides), **other), place)


def task(place: Path, *overrides: str, generation: str = "transformers") -> Any:
    asked = job(place, *overrides)
    there = replace(asked, options=replace(asked.options, generation=generation))
    return trl.TrlTask(there, place / "asked", save_at=learn.evaluated(asked))


def one_setting(given: tuple[str, ...], samples: int, device: str, generation: str) -> Any:
    options = SimpleNamespace(trl=given)
    return trl.one_setting(SimpleNamespace(options=options, samples=samples, device=torch.device(device), generation=generation))


def request(place: Path, *overrides: str) -> dict[str, Any]:
    found: dict[str, Any] = trl.request_of(task(place, *overrides), one_setting((), 16, "cpu", "transformers"), place / "asked")
    return found


def quiet(text: str) -> None:
    pass


# -- options ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("algorithm.name=ppo",), "algorithm.name: is compared only as GRPO has it"),
        (("algorithm.minibatches_per_step=2",), "algorithm.minibatches_per_step: is compared only as GRPO has it"),
        (
            ("algorithm.kl_coef=0.1",),
            "algorithm.kl_coef: is compared only as GRPO has it, with one optimizer step for each rollout. Leave it out, or set it to 0",
        ),
        (("rollout.stop=['x']",), "rollout.stop: is not compared"),
        (("reward.function={ gsm8k = 1.0, gsm8k_flexible = 0.5 }",), "reward: is compared with one function"),
        (("lora.rank=2",), "lora.rank: adapters are not compared"),
    ],
)
def test_what_would_not_be_the_same_is_refused(place: Path, overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError) as told:
        job(place, *overrides, against="trl")
    assert words in str(told.value)
    assert job(place, *overrides).options.peers == ()  # ours alone can be anything that has a reward


def test_what_grpo_has_may_be_said(place: Path) -> None:
    """So that what a run file has can be taken back by an override."""
    given = ("algorithm.kl_coef=0", "algorithm.normalize_by_std=true", "algorithm.entropy_coef=0.01")
    assert list(trl.refused(job(place, *given).config)) == []


def test_what_has_no_reward_is_refused(tmp_path: Path, model_folders, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {
        "model": {"path": "model"},
        "data": {"train": "sft.jsonl"},
        "algorithm": {"name": "sft", "prompts_per_step": 4},
        "run": {"steps": 1},
    }
    place = runs.make(tmp_path / "place", model_folders("llama"), tables)
    monkeypatch.chdir(place)
    with pytest.raises(UserError, match="sft, which has no reward"):
        job(place)


def test_other_weights_under_the_same_name_are_another_question(place: Path) -> None:
    model = (place / "model").resolve()
    (place / "model").unlink()
    shutil.copytree(model, place / "model")
    asked = learn.asked_of(job(place), learn.OURS)
    assert learn.asked_of(job(place), learn.OURS) == asked and asked["commit"]
    for name in ("model/model.safetensors", "train.jsonl", "val.jsonl"):
        os.utime(place / name, ns=(1, 1))
        before, asked = asked, learn.asked_of(job(place), learn.OURS)
        assert [path for path, state in asked["files"].items() if before["files"][path] != state] == [name]


@pytest.mark.long
def test_killed_it_leaves_no_run_behind(place: Path) -> None:
    parent = runs.start(place, "bench", "learn", "run.toml", "run.steps=1000000", "run.eval_every=0", "--dir", "bench")
    metrics = place / "bench" / "fulltilt" / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.is_file() and metrics.read_text().count("\n") > 2)
    os.kill(parent.pid, signal.SIGKILL)  # alone, not its group

    def stands_still() -> bool:
        made = metrics.read_text()
        time.sleep(2)
        return metrics.read_text() == made

    wait_until(stands_still)


def wait_until(true: Callable[[], bool]) -> None:
    for _ in range(600):
        if true():
            return
        time.sleep(0.2)
    raise AssertionError("it does not come")


def test_options_that_speak_of_trl_alone(place: Path) -> None:
    with pytest.raises(UserError, match="--trl: trl is not measured here"):
        job(place, trl=["dtype=float32"])
    with pytest.raises(UserError, match="unknown peer 'verl'"):
        job(place, against="verl")


def test_trl_has_what_is_faster_unless_it_is_told_otherwise() -> None:
    found = one_setting((), 96, "cuda", "vllm")
    assert (found["gradient_checkpointing"], found["per_device_train_batch_size"]) == (False, 32)
    # Weights in bfloat16 have no float32 masters: steps of this size would be lost in them.
    assert found["dtype"] == "float32"
    told = one_setting(("gradient_checkpointing=true", "vllm_gpu_memory_utilization=0.5"), 96, "cuda", "vllm")
    assert told == {**found, "gradient_checkpointing": True, "vllm_gpu_memory_utilization": 0.5}
    with pytest.raises(UserError, match="--trl per_device_train_batch_size: give one value"):
        one_setting(("per_device_train_batch_size=8,16",), 96, "cuda", "vllm")


# -- what is asked of TRL -----------------------------------------------------------------------------------------------------------------


def test_trl_is_asked_for_the_run_file(place: Path) -> None:
    asked = request(place)
    found = asked["arguments"]
    assert found["per_device_train_batch_size"] * found["gradient_accumulation_steps"] == 16 and found["num_generations"] == 4
    assert (found["max_steps"], found["max_completion_length"], found["temperature"], found["learning_rate"]) == (12, 12, 0.9, 2e-3)
    assert (found["weight_decay"], found["adam_beta1"], found["adam_beta2"], found["max_grad_norm"]) == (0.01, 0.9, 0.999, 1.0)
    assert (found["use_vllm"], found["bf16"], found["use_cpu"], found["shuffle_dataset"]) == (False, False, True, False)
    with_bonus = request(place, "algorithm.entropy_coef=0.02")["arguments"]
    assert "entropy_coef" not in found and with_bonus["entropy_coef"] == 0.02
    assert asked["save_at"] == [6, 12] and len(asked["rates"]) == 12 and asked["rates"][2] == 1 and asked["rates"][0] == 1 / 3
    # The rewards' rows, and every step's prompts in the run's order: an epoch of 18 is 4 steps.
    assert len(asked["order"]) == 48 and sorted(asked["order"][:16]) == sorted(set(asked["order"][:16]))
    rows = asked["rows"]
    assert {row["judged_by"]["ground_truth"] for row in rows} == {str(4 * n) for n in range(runs.PROMPTS)}
    tokens = [sum(len(rows[number]["prompt"]) for number in asked["order"][step * 4 : step * 4 + 4]) * 4 for step in range(12)]
    assert asked["prompt_tokens"] == tokens  # one token a character


@pytest.mark.long
def test_the_prompts_are_those_that_the_run_takes(place: Path) -> None:
    runs.train(place, "run.steps=5", "run.save_rollouts=64", "run.eval_every=0")
    asked = request(place, "run.steps=5")
    for step in range(1, 6):
        taken = [line["ground_truth"] for line in runs.rollouts(place, step)][::4]
        order = asked["order"][4 * (step - 1) : 4 * step]
        assert [asked["rows"][number]["judged_by"]["ground_truth"] for number in order] == taken


def test_rewards_in_the_other_process_are_the_runs_own(place: Path) -> None:
    rows = request(place)["rows"]
    score = trl.scorer({"function": "reward.py:score", "args": {}}, rows)
    assert score(["abc", "ABC"], [0, 1]) == [3 / 24, 0]


def test_vllm_is_spared_what_trl_does_anyway(place: Path) -> None:
    found = trl.arguments(task(place, generation="vllm"), one_setting((), 16, "cuda", "vllm"), place / "output")
    longest = max(len(prompt.ids) for batch in task(place).batches for prompt in batch)
    assert found["generation_kwargs"] == {"detokenize": False} and found["vllm_max_model_length"] == longest + 12


# -- what is made of it -------------------------------------------------------------------------------------------------------------------


def test_validations_are_not_in_the_seconds() -> None:
    lines = [
        (12.0, {"step": 0, "val/reward/mean": 0.1, "timing_s/testing": 2.0}),
        (15.0, {"step": 1, "critic/score/mean": 0.2, "timing_s/step": 3.0, "rollout_corr/logprob_abs_gap": 1e-4}),
        (23.0, {"step": 2, "critic/score/mean": 0.3, "timing_s/step": 3.0, "val/reward/mean": 0.4, "timing_s/testing": 5.0}),
    ]
    found = learn.read_ours(lines)
    assert found["start_seconds"] == 10
    assert [(line["step"], line["seconds"], line["reward"]) for line in found["steps"]] == [(1, 13, 0.2), (2, 16, 0.3)]
    assert found["steps"][0]["logprob_gap"] == 1e-4
    assert [(point["step"], point["seconds"], point["accuracy"]) for point in found["accuracy"]] == [(0, 10, 0.1), (2, 16, 0.4)]


def learned(seconds: float, rewards: list[float]) -> learn.Found:
    steps = [{"step": number, "seconds": 5 + seconds * number, "reward": reward} for number, reward in enumerate(rewards, 1)]
    return {"setting": {}, "steps": steps, "accuracy": [], "start_seconds": 5.0, "error": None}


def test_who_had_the_reward_first() -> None:
    """The peer rises to 0.5 in 30 steps and stays there; ours gains twice as much in a step, in a third of the time."""
    theirs = learned(6, [min(0.5, number / 60) for number in range(1, 61)])
    ours = learned(2, [number / 30 for number in range(1, 31)])
    found = learn.compare(ours, theirs)
    assert found is not None and found["reward"] == pytest.approx(0.5)
    # Means of 10 steps: ours is 15.5 / 30 at step 20 and 14.5 / 30 before it; theirs is 0.5 when all ten are, at step 39.
    assert found["seconds"] == 5 + 2 * 20 and found["their_seconds"] == pytest.approx(5 + 6 * 39)
    assert found["ratio"] == pytest.approx(239 / 45) and found["ratio_of_whole"] == pytest.approx(365 / 45)
    never = learn.compare(learned(2, [0.1] * 30), theirs)
    assert never is not None and (never["seconds"], never["ratio"]) == (None, None)
    assert learn.compare(learned(2, [0.9] * 9), theirs) is None


def test_the_document_and_its_table(place: Path) -> None:
    asked = replace(job(place), options=BenchOptions(against="trl"))
    ours, theirs = learned(2, [n / 30 for n in range(1, 31)]), learned(6, [min(0.5, n / 60) for n in range(1, 61)])
    found = learn.document(asked, {name: learn.with_beginning(each, 0.25) for name, each in (("fulltilt", ours), ("trl", theirs))})
    assert found["ratio"] == found["reached"]["trl"]["ratio"]
    assert found["systems"]["trl"]["accuracy"] == [{"step": 0, "seconds": 5.0, "accuracy": 0.25}]
    assert learn.with_beginning({"steps": [], "accuracy": []}, 0.25)["accuracy"] == []
    assert [(curve["label"], curve["metric"], len(curve["values"])) for curve in found["curves"]] == [
        ("fulltilt", "reward", 30), ("fulltilt", "accuracy", 1), ("trl", "reward", 60), ("trl", "accuracy", 1),
    ]  # fmt: skip
    text = learn.table(json.loads(json.dumps(found)))
    assert "5.31 times sooner than trl (239.0 s)" in text and "4 prompts x 4 samples" in text
    failed = {"setting": {}, "steps": [], "accuracy": [], "error": "out of memory"}
    assert "trl failed: out of memory" in learn.table(learn.document(asked, {"fulltilt": ours, "trl": failed}))


# -- for real -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not WITHOUT_TRL, reason="TRL is installed: its absence cannot be shown")
def test_without_trl(place: Path) -> None:
    with pytest.raises(UserError, match="TRL is not installed"):
        job(place, against="trl")


def test_what_failed_is_measured_again(place: Path) -> None:
    answers = [learned(1, [0.1]) | {"error": "out of memory"}, learned(1, [0.2]), learned(1, [0.3])]
    asked = job(place)
    found = [learn.kept(asked, "trl", lambda job, say: answers.pop(0), quiet) for _ in range(3)]
    assert [each["error"] for each in found] == ["out of memory", None, None] and found[1] == found[2]


def test_models_are_evaluated_one_by_one_and_go_on_after_a_kill(place: Path) -> None:
    asked, models = job(place), place / "bench" / "trl" / "models"
    steps = learned(1, [0.1] * 12)["steps"]
    for step in (6, 12):
        shutil.copytree(place / "model", models / f"step-{step:08d}")
    (models / "step-00000012" / "config.json").rename(models / "config.json")  # what ends the first try half-way
    with pytest.raises(UserError, match=r"has no config\.json"):
        learn.evaluate_models(asked, steps, quiet)
    assert sorted(path.name for path in models.glob("step-*")) == ["step-00000012"]
    (models / "config.json").rename(models / "step-00000012" / "config.json")
    said: list[str] = []
    found = learn.evaluate_models(asked, steps, said.append)
    assert [(point["step"], point["seconds"]) for point in found] == [(6, 11.0), (12, 17.0)] and len(said) == 1
    assert found[0]["accuracy"] == found[1]["accuracy"] == learn.accuracy_of(asked, "model")
    assert learn.evaluate_models(asked, steps, quiet) == found and not list(models.glob("step-*"))


@pytest.mark.long
def test_ours_is_measured_once(place: Path) -> None:
    found = learn.run(job(place), quiet)
    ours = found["systems"]["fulltilt"]
    assert ours["error"] is None and [line["step"] for line in ours["steps"]] == list(range(1, 13))
    # What the clock of this process saw is what the run says of its steps, or more. On a busy machine the first line is read late, which
    # makes it less: 5% were seen.
    assert ours["steps"][-1]["seconds"] - ours["start_seconds"] >= 0.7 * sum(line["step_seconds"] for line in ours["steps"]) > 0
    assert ours["start_seconds"] > 0 and [point["step"] for point in ours["accuracy"]] == [0, 6, 12]
    assert max(line["logprob_gap"] for line in ours["steps"]) < 1e-4
    assert all(line["importance_weight"] == pytest.approx(1, abs=1e-4) for line in ours["steps"])
    # Nothing is sampled before the first step: it has all captures in its seconds.
    assert "validation after step 0" not in (place / "bench" / "fulltilt" / "log.txt").read_text()
    said: list[str] = []
    assert learn.run(job(place), said.append)["systems"] == found["systems"]
    assert len(said) == 2 and all("measured before" in text for text in said)
    # Another question is another measurement.
    other = learn.run(job(place, "run.steps=2", "run.eval_every=0"), quiet)["systems"]["fulltilt"]
    assert len(other["steps"]) == 2 and other["accuracy"] == []


@pytest.mark.long
def test_a_run_that_fails_is_a_result(place: Path) -> None:
    found = learn.measure_ours(job(place, "reward.function=reward.py:not_a_number"), quiet)
    assert "ended with code 2" in found["error"] and found["steps"] == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_both(place: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed")
    found = learn.run(job(place, against="trl"), quiet)
    ours, theirs = found["systems"]["fulltilt"], found["systems"]["trl"]
    assert ours["error"] is None and theirs["error"] is None, theirs["error"]
    assert [line["step"] for line in theirs["steps"]] == list(range(1, 13))
    assert theirs["learning_rates"] == pytest.approx([line["learning_rate"] for line in ours["steps"]])
    # The same weights, prompts, loss and advantages, other samples: gradients of one size.
    assert theirs["grad_norms"][0] == pytest.approx(ours["steps"][0]["grad_norm"], rel=0.5)
    assert [point["step"] for point in theirs["accuracy"]] == [0, 6, 12]
    assert theirs["accuracy"][0]["accuracy"] == ours["accuracy"][0]["accuracy"]
    # Both learn that small letters are better.
    for each in (ours, theirs):
        rewards = [line["reward"] for line in each["steps"]]
        assert sum(rewards[-4:]) > sum(rewards[:4])
    assert found["reached"]["trl"] is not None and found["versions"]["trl"]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_bonus_is_the_same_in_both(place: Path) -> None:
    """So large that it is nearly all of the gradient, which then hangs little on the samples."""
    pytest.importorskip("trl", reason="TRL is not installed")
    asked = job(place, "algorithm.entropy_coef=100", "run.steps=1", "run.eval_every=0", against="trl")
    systems = learn.run(asked, quiet)["systems"]
    assert systems["trl"]["grad_norms"][0] == pytest.approx(systems["fulltilt"]["steps"][0]["grad_norm"], rel=0.1)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_limit_of_minutes(place: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed")
    found = learn.run(job(place, "run.steps=100000", "run.eval_every=0", against="trl", minutes=0.25), quiet)
    for each in found["systems"].values():
        assert each["error"] is None and 0 < len(each["steps"]) < 100000
        assert all(line["seconds"] <= 15 + 1 for line in each["steps"][:-1])  # a pipe between the two clocks


def test_trl_knows_every_argument(place: Path) -> None:
    config = pytest.importorskip("trl", reason="TRL is not installed").GRPOConfig
    made = config(**trl.arguments(task(place, generation="vllm"), one_setting((), 16, "cpu", "vllm"), place / "output"))
    assert made.generation_batch_size == 16 and made.steps_per_generation == made.gradient_accumulation_steps == 1


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_both_on_a_gpu(place: Path) -> None:
    for module in ("trl", "vllm"):
        pytest.importorskip(module, reason=f"{module} is not installed")
    # Heads of 64 in bfloat16, as real models have them: not every backend of vLLM's attention knows narrower ones.
    torch.manual_seed(0)
    wide = LlamaConfig(**{**models.SMALL, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1})
    LlamaForCausalLM(wide).to(torch.bfloat16).save_pretrained(place / "wide")
    models.tokenizer().save_pretrained(place / "wide")
    asked = job(place, "run.device=cuda", "model.path=wide", against="trl", trl=["vllm_gpu_memory_utilization=0.1"])
    assert asked.generation == "vllm" and not torch.cuda.is_initialized()
    found = learn.run(asked, quiet)
    assert [each["error"] for each in found["systems"].values()] == [None, None]
    for each in found["systems"].values():
        assert len(each["steps"]) == 12 and [point["step"] for point in each["accuracy"]] == [0, 6, 12]
