"""The benchmark of whole steps: ours for real on a tiny shape, TRL for real where it is installed, and what is asked of it everywhere."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
from transformers import AutoTokenizer, TrainerControl, TrainerState

from fulltilt.bench import device as devices
from fulltilt.bench import peers, settings, shapes, step
from fulltilt.bench.figures import StepTiming, fastest
from fulltilt.bench.job import BenchJob, run_batches
from fulltilt.bench.options import BenchOptions
from fulltilt.bench.workload import STEP_WORKLOADS, Even, Workload
from fulltilt.records import UserError

trl: Any = peers.load("peer_trl")
SHAPE = {"model_type": "qwen2", **models.SMALL, "tie_word_embeddings": True}
WITHOUT_TRL = importlib.util.find_spec("trl") is None
ONE_START = tuple(f"{name}={value}" for name, value in (("gradient_checkpointing", "true"), ("per_device_train_batch_size", 4)))


@pytest.fixture(autouse=True)
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", SHAPE)
    monkeypatch.setitem(STEP_WORKLOADS, "tiny", Workload("tiny", 4, 2, Even(5, 9), Even(24, 24)))


def tiny_job(folder: Path, *overrides: str, **other: Any) -> BenchJob:
    asked: dict[str, Any] = {"model": "tiny", "workload": "tiny", "device": "cpu", "repeats": 2, "overrides": list(overrides)}
    return step.prepare(BenchOptions(**{**asked, **other}), folder)


def tiny_task(folder: Path, device: str = "cpu", generation: str = "transformers", trl_options: tuple[str, ...] = ()) -> Any:
    """As `step.run` makes it, for a device and an engine that need not be there."""
    job = tiny_job(folder)
    there = replace(job, device=torch.device(device), options=replace(job.options, generation=generation, trl=list(trl_options)))
    return trl.TrlTask(there, folder / "trl", response_tokens=24)


def asked(given: tuple[str, ...], samples: int, device: str, generation: str) -> Any:
    """What is read of a job to choose TRL's settings."""
    return SimpleNamespace(options=SimpleNamespace(trl=given), samples=samples, device=torch.device(device), generation=generation)


def quiet(text: str) -> None:
    pass


# -- what both read -----------------------------------------------------------------------------------------------------------------------


def test_every_word_of_a_prompt_is_one_token_of_its_own(tmp_path: Path) -> None:
    """Read as a run and TRL read it: from the folder of a Qwen2 model, for which transformers has rules of its own."""
    job = tiny_job(tmp_path)
    found = AutoTokenizer.from_pretrained(tmp_path / "model")
    words, _, _ = step.make_language(job.source.vocabulary)
    ids = found("".join(words)).input_ids
    assert len(ids) == len(set(ids)) == len(words) > job.source.vocabulary / 2
    assert len(found) == job.source.vocabulary
    assert [found.decode([token]) for token in ids] == list(words)


def test_each_step_has_prompts_of_its_own_and_as_many_tokens(tmp_path: Path) -> None:
    job = tiny_job(tmp_path)
    first, second, third = job.requests
    assert first.prompts[0].ids.tolist() != second.prompts[0].ids.tolist() != third.prompts[0].ids.tolist()
    lengths = sum(len(prompt.ids) for prompt in first.prompts)
    assert step.step_tokens(job) == (8 * 24 + 2 * lengths,) * 3
    # The run reads as many prompts, of the same lengths, in the same order.
    read = [[len(prompt.ids) for prompt in batch] for batch in run_batches(job.config)]
    assert read == [[len(prompt.ids) for prompt in requests.prompts] for requests in job.requests]


# -- ours ---------------------------------------------------------------------------------------------------------------------------------


def test_steps_of_ours(tmp_path: Path) -> None:
    """Of 576 tokens drawn from 160, some are end tokens: that every response has its 24 is seen to by `one_step`."""
    found = step.run(tiny_job(tmp_path, "actor.token_budget=70"), quiet)
    ours = found["engines"]["fulltilt"]
    assert len(ours["step_seconds_all"]) == 2 and ours["first_step_seconds"] > 0 and ours["start_seconds"] > 0
    assert ours["tokens_per_s"] == pytest.approx(found["workload"]["tokens_of_a_step"] / ours["step_seconds"])
    assert set(ours["phases"]) == {"rollout", "reward", "advantage", "update-actor", "sync"}
    assert sum(ours["phases"].values()) <= sum(ours["step_seconds_all"])
    assert ours["rollout_seconds"] == ours["phases"]["rollout"]
    # Rewards that differ within a group are what makes a gradient.
    assert ours["metrics"]["reward/groups_with_variance"] == 1 and min(ours["grad_norms"]) > 0
    assert any("at most 70 tokens" in line for line in ours["plan"]) and ours["setting"] == {"actor.token_budget": "70"}
    assert (found["ratio"], found["ratios"], ours["peak_memory_bytes"], ours["eager_reason"]) == (None, {}, None, None)
    assert found["workload"]["response_tokens"]["smallest"] == found["workload"]["response_tokens"]["largest"] == 24
    assert found["steps"] == {"measured": 2, "warm_up": 1}
    text = step.table(json.loads(json.dumps(found)))
    assert f"{ours['step_seconds']:.2f}" in text and "every response 24" in text and "actor.token_budget 70" in text


# -- settings in turns --------------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_settings_take_turns_and_one_that_fails_stays_in_the_result(tmp_path: Path) -> None:
    """A KV cache that holds no sample is refused when the run is planned, which ends no other setting."""
    tried = ["actor.token_budget=70", "rollout.kv_bytes=4096", "actor.token_budget=140 train.recompute=full"]
    given: dict[str, Any] = {"model": "tiny", "workload": "tiny", "device": "cpu", "repeats": 1, "turns": 2, "tried": tried}
    found = settings.run(settings.prepare(BenchOptions(**given), tmp_path), quiet)
    assert list(found["settings"]) == ["auto", *tried]
    good = {name: one for name, one in found["settings"].items() if not one["error"]}
    assert set(found["settings"]) - set(good) == {"rollout.kv_bytes=4096"}
    assert len(good["auto"]["step_seconds_all"]) == 2, "the others have a second turn if they are about as fast"
    assert all(len(one["step_seconds_all"]) in (1, 2) and one["tokens_per_s"] > 0 for one in good.values())
    assert all(one["metrics"]["actor/micro_batches"] and one["probed"]["updates"] == () for one in good.values())
    assert any("at most 70 tokens" in line for line in good["actor.token_budget=70"]["plan"])
    assert any("full recompute" in line for line in good[tried[2]]["plan"])
    fastest_one = max(one["tokens_per_s"] for one in good.values())
    assert found["auto_of_best"] == pytest.approx(good["auto"]["tokens_per_s"] / fastest_one)
    text = settings.table(json.loads(json.dumps(found)))
    assert "of the best setting" in text and "rollout.kv_bytes=4096 failed: " in text


@pytest.mark.parametrize(
    ("tried", "words"),
    [
        (["train.recompute=full"] * 2, "it is there twice"),
        ([" "], "write settings with spaces between them"),
        (["actor.lr=1"], "not a setting of this measurement"),
        (["train.recompute=sometimes"], "train.recompute"),
    ],
)
def test_mistakes_in_settings(tried: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        settings.prepare(BenchOptions(model="tiny", workload="tiny", device="cpu", tried=tried), tmp_path)


def test_settings_that_are_far_slower_have_one_turn() -> None:
    seconds = {"auto": (9.0,), "fast": (1.0, 1.02), "near": (1.05,), "slow": (1.2,), "failed": ()}
    found = {name: [StepTiming({}, own, error=None if own else "it does not fit")] for name, own in seconds.items()}
    assert settings.worth_another_turn(found) == ["auto", "fast", "near"]


def test_predictions_stand_beside_what_was_measured() -> None:
    lines = [{"predicted/timing_s/gen": 2.0, "timing_s/gen": 1.0 + late, "predicted/unmeasured": 1.0} for late in (0.0, 3.0)]
    assert settings.predictions(lines) == {"timing_s/gen": {"predicted": 2.0, "measured": 2.5, "error": pytest.approx(-0.2)}}
    pairs = [{"timing_s/gen": {"predicted": 1.0, "measured": 2.0, "error": error}} for error in (-0.5, 0.1)]
    assert settings.errors(pairs) == {"timing_s/gen": {"mean": pytest.approx(0.3), "worst": 0.5, "runs": 2}}


# -- options ------------------------------------------------------------------------------------------------------------------------------


def test_options_resolved(tmp_path: Path) -> None:
    sizes = {"prompts": 6, "samples": 3, "new_tokens": 10, "repeats": 4}
    job = tiny_job(tmp_path, "actor.token_budget=4096", model=None, workload="small", **sizes)
    workload = job.requests[0].workload
    assert (workload.name, workload.prompts, workload.samples, job.requests[0].longest_response) == ("small", 6, 3, 10)
    assert job.source.name == "small" and len(job.requests) == 5
    assert STEP_WORKLOADS["step"].prompts * STEP_WORKLOADS["step"].samples == 512
    assert STEP_WORKLOADS["step"].response_tokens == Even(512, 512)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": "nowhere"}, "--model nowhere: a step is measured on a named shape (0.5B, 1.5B, 7B, 2.7B-A0.5B, small, tiny)"),
        ({"workload": "design"}, "--workload design: unknown workload; choose from step, small"),
        ({"against": "verl"}, "unknown peer 'verl'; choose from trl"),
        ({"samples": 1}, "--samples 1: GRPO compares"),
        ({"trl": ("dtype=float32",)}, "--trl: trl is not measured here"),
        ({"generation": "vllm"}, "--generation: trl is not measured here"),
        ({"against": "trl", "generation": "sglang"}, "--generation sglang: unknown; choose from vllm, transformers"),
        ({"against": "trl", "generation": "vllm"}, "--generation vllm: TRL runs vLLM beside the trainer on a CUDA device only"),
        ({"overrides": ("algorithm.epochs=2",)}, "algorithm.epochs=2: not a setting of this measurement"),
        ({"overrides": ("rollout.max_new_tokens=2",)}, "rollout.max_new_tokens=2: not a setting of this measurement"),
        ({"overrides": ("actor.token_budget=many",)}, "actor.token_budget: must be"),
        ({"overrides": ("actor.token_budget",)}, "actor.token_budget: not a setting of this measurement. Write KEY=VALUE"),
    ],
)
def test_mistakes_are_reported_before_weights_are_made(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as told:
        tiny_job(tmp_path, **{"workload": None, **given})
    assert words in str(told.value)


@pytest.mark.skipif(not WITHOUT_TRL, reason="TRL is installed: its absence cannot be shown")
def test_without_trl(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="TRL is not installed"):
        tiny_job(tmp_path, against="trl")


@pytest.mark.long  # a process that imports torch
@pytest.mark.skipif(not WITHOUT_TRL, reason="TRL is installed: its absence cannot be shown")
def test_a_process_without_trl(tmp_path: Path) -> None:
    (found,) = trl.measure_steps(tiny_task(tmp_path, trl_options=ONE_START), quiet)
    assert found.error is not None and "No module named" in found.error and found.median is None


# -- what is asked of TRL -----------------------------------------------------------------------------------------------------------------


def test_what_is_tried_of_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl, "installed", lambda module: True)
    found = trl.axes(asked((), 512, "cuda", "vllm"))
    assert {name: values[0] for name, values in found.items()} == {
        "gradient_checkpointing": True, "per_device_train_batch_size": 8, "use_liger_kernel": False, "dtype": "float32",
        "attn_implementation": "sdpa", "vllm_importance_sampling_correction": True, "vllm_gpu_memory_utilization": 0.3,
        "vllm_enable_sleep_mode": False,
    }  # fmt: skip
    assert found["vllm_importance_sampling_correction"] == (True, False) and found["vllm_enable_sleep_mode"] == (False, True)
    assert found["per_device_train_batch_size"] == (8, 32, 64, 128) and found["use_liger_kernel"] == (False, True)
    given = ("per_device_train_batch_size=16, 128", "gradient_checkpointing=False", "vllm_gpu_memory_utilization=0.25")
    assert trl.axes(asked(given, 512, "cuda", "vllm")) == found | {
        "per_device_train_batch_size": (16, 128), "gradient_checkpointing": (False,), "vllm_gpu_memory_utilization": (0.25,),
    }  # fmt: skip
    # What cannot run here is not tried, and batches divide the step's samples.
    monkeypatch.setattr(trl, "installed", lambda module: False)
    assert trl.axes(asked((), 96, "cuda", "vllm")) == found | {
        "per_device_train_batch_size": (8, 32), "use_liger_kernel": (False,), "attn_implementation": ("sdpa",),
    }  # fmt: skip
    assert trl.axes(asked((), 6, "cpu", "transformers")) == {
        "gradient_checkpointing": (True, False), "per_device_train_batch_size": (6,), "use_liger_kernel": (False,), "dtype": ("float32",),
        "attn_implementation": ("sdpa",),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("per_device_train_batch_size=7", "7 does not divide the 8 samples of a step"),
        ("per_device_train_batch_size=0", "per_device_train_batch_size takes whole numbers"),
        ("gradient_checkpointing=often", "gradient_checkpointing takes true or false"),
        ("dtype=int8", "dtype takes float32 or bfloat16"),
        ("dtype", "write NAME=VALUE"),
        ("learning_rate=1", "with one of gradient_checkpointing"),
        ("vllm_gpu_memory_utilization=0.5", "vLLM generates nothing here"),
    ],
)
def test_values_that_trl_is_not_asked_with(text: str, words: str) -> None:
    with pytest.raises(UserError) as told:
        trl.axes(asked((text,), 8, "cpu", "transformers"))
    assert f"--trl {text}: " in str(told.value) and words in str(told.value)


def test_the_search_goes_on_from_the_best_and_survives_what_fails() -> None:
    """Recomputation off gains, batch 4 gains on top, batch 8 does not fit without recomputation."""
    asked: list[tuple[bool, int, str]] = []

    def measure(setting: trl.Setting) -> StepTiming:
        recompute, batch, dtype = asked_for = (setting["recompute"], setting["batch"], setting["dtype"])
        asked.append(asked_for)
        if batch == 8 and not recompute:
            return StepTiming(setting, error="out of memory")
        return StepTiming(setting, seconds=(10 + 5 * recompute - batch / 2 + 3 * (dtype == "b"),))

    tried = trl.search({"recompute": (True, False), "batch": (2, 4, 8), "dtype": ("a", "b")}, measure)
    assert asked == [(True, 2, "a"), (False, 2, "a"), (False, 4, "a"), (False, 8, "a"), (False, 4, "b")]
    best = fastest(tried)
    assert best is not None and best.setting == {"recompute": False, "batch": 4, "dtype": "a"} and best.median == 8
    assert fastest([StepTiming({}, error="out of memory")]) is None


def test_a_setting_that_fails_first_does_not_end_the_search() -> None:
    tried = trl.search(
        {"batch": (8, 4)},
        lambda setting: StepTiming(setting, error="out of memory") if setting["batch"] == 8 else StepTiming(setting, seconds=(2.0,)),
    )
    assert [steps.error for steps in tried] == ["out of memory", None]


def test_what_does_not_fit_is_tried_with_vllm_asleep() -> None:
    """Asleep alone it gains nothing; batch 4 fits only so, and is the fastest."""
    asked: list[tuple[int, bool]] = []

    def measure(setting: trl.Setting) -> StepTiming:
        batch, asleep = setting["batch"], setting["vllm_enable_sleep_mode"]
        asked.append((batch, asleep))
        return (
            StepTiming(setting, error="out of memory")
            if batch >= 4 * (1 + asleep)
            else StepTiming(setting, seconds=(10 - 2 * batch + asleep,))
        )

    tried = trl.search({"batch": (2, 4, 8), "vllm_enable_sleep_mode": (False, True)}, measure)
    assert asked == [(2, False), (4, False), (4, True), (8, True)]
    best = fastest(tried)
    assert best is not None and best.setting == {"batch": 4, "vllm_enable_sleep_mode": True}
    asked.clear()
    trl.search({"batch": (2, 4), "vllm_enable_sleep_mode": (False,)}, measure)  # as the user wants it
    assert asked == [(2, False), (4, False)]


def test_the_arguments_of_a_step(tmp_path: Path) -> None:
    task = tiny_task(tmp_path, device="cuda", generation="vllm")
    setting = {
        "gradient_checkpointing": False, "per_device_train_batch_size": 4, "use_liger_kernel": True, "dtype": "bfloat16",
        "attn_implementation": "sdpa", "vllm_gpu_memory_utilization": 0.5, "vllm_importance_sampling_correction": False,
    }  # fmt: skip
    found = trl.arguments(task, setting, tmp_path / "output")
    # One optimizer step for one rollout of 4 prompts with 2 samples each.
    assert found["per_device_train_batch_size"] * found["gradient_accumulation_steps"] == 8 and found["num_generations"] == 2
    assert (found["num_iterations"], found["beta"], found["max_steps"], found["max_completion_length"]) == (1, 0.0, 3, 24)
    assert (found["temperature"], found["learning_rate"], found["weight_decay"], found["max_grad_norm"]) == (1.0, 1e-6, 0.0, 1.0)
    assert found["vllm_importance_sampling_correction"] is False
    assert found["model_init_kwargs"] == {"dtype": "bfloat16", "attn_implementation": "sdpa"} and "dtype" not in found
    longest = max(len(prompt.ids) for batch in task.batches for prompt in batch)
    assert found["generation_kwargs"]["ignore_eos"] and found["vllm_max_model_length"] == 24 + longest
    assert (found["bf16"], found["use_cpu"], found["use_vllm"], found["vllm_mode"]) == (True, False, True, "colocate")
    on_cpu = trl.arguments(tiny_task(tmp_path), setting, tmp_path / "output")
    assert (on_cpu["use_vllm"], on_cpu["bf16"], on_cpu["generation_kwargs"]) == (False, False, {"min_new_tokens": 24})
    request = trl.request_of(task, setting, tmp_path / "asked")
    assert request["rates"] == [1, 1, 1] and request["order"] == list(range(12)) and request["response_tokens"] == 24
    assert [tokens + 8 * 24 for tokens in request["prompt_tokens"]] == list(step.step_tokens(tiny_job(tmp_path)))


def test_an_answer_that_is_not_what_was_asked_is_an_error() -> None:
    lines = [{"step_seconds": seconds, "rollout_seconds": rollout} for seconds, rollout in ((9.0, 5.0), (2.0, 1.0), (4.0, 1.5))]
    answer = {"grad_norms": [1.0, 1.0, 1.0], "peak_bytes": 7, "peak_device_bytes": 8, "trainer_seconds": 60.0}
    found = trl.step_timing(3, {"batch": 4}, lines, answer)
    assert (found.seconds, found.rollout_seconds, found.first_step_seconds, found.error) == ((2.0, 4.0), (1.0, 1.5), 9.0, None)
    written = found.as_json(tokens=30)
    names = ("step_seconds", "rollout_seconds", "tokens_per_s", "peak_device_bytes", "start_seconds")
    assert [written[name] for name in names] == [3.0, 1.25, 10, 8, 60.0]
    for made, other, words in (
        (lines[:1], {}, "made 1 steps instead of 3"),
        ([], {"error": "OutOfMemoryError: no"}, "OutOfMemoryError: no"),
    ):
        failed = trl.step_timing(3, {"batch": 4}, made, answer | other)
        assert failed.error is not None and words in failed.error and failed.median is None


def watch_of(folder: Path, **other: Any) -> Any:
    asked = {
        "device": "cpu", "samples": 2, "limit_s": None, "save_at": [], "models": str(folder), "lines": str(folder / "steps.jsonl"),
        "begun": time.time(), "prompt_tokens": [10, 24, 8], "response_tokens": None,
    }  # fmt: skip
    return trl.Watch({**asked, **other})


def ends_training(watch: Any, step: int, tokens_seen: int) -> bool:
    control = TrainerControl()
    watch.on_step_end(None, TrainerState(global_step=step, num_input_tokens_seen=tokens_seen), control)
    return control.should_training_stop


def test_prompts_or_responses_of_other_tokens_end_the_measurement_at_once(tmp_path: Path) -> None:
    begun = time.time()
    watch = watch_of(tmp_path)
    reward = watch.reward(lambda texts, rows: [float(len(text)) for text in texts])
    for number in (1, 2):
        watch.on_step_begin()
        reward(["a", "bcd"], completion_ids=[[1, 2], [3] * (2 + number)], row=[0, 1])
        if number == 1:
            assert not ends_training(watch, number, 15)
    with pytest.raises(ValueError, match="step 2 had prompts of 20 tokens instead of 24"):
        ends_training(watch, 2, 41)
    (line,) = [json.loads(text) for text in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert (line["step"], line["reward"], line["response_length"]) == (1, 2.0, 2.5)
    assert 0 <= line["rollout_seconds"] <= line["step_seconds"] <= line["seconds"] <= time.time() - begun
    forced = watch_of(tmp_path, response_tokens=3).reward(lambda texts, rows: [0.0, 0.0])
    assert forced(["a", "b"], completion_ids=[[1, 2, 3]] * 2, row=[0, 1]) == [0.0, 0.0]
    with pytest.raises(AssertionError, match=r"responses of \[2\] tokens instead of 3"):
        forced(["a", "b"], completion_ids=[[1, 2, 3], [1, 2]], row=[0, 1])
    with pytest.raises(AssertionError, match="1 samples in a rollout instead of 2"):
        forced(["a"], completion_ids=[[1, 2, 3]], row=[0])


def test_saving_is_not_in_the_seconds(tmp_path: Path) -> None:
    begun = time.time()
    watch = watch_of(tmp_path, save_at=[1], limit_s=0.0, begun=begun)
    watch.save = lambda folder: time.sleep(0.5)
    watch.reward(lambda texts, rows: [0.0, 1.0])(["a", "b"], completion_ids=[[1], [2]], row=[0, 1])
    assert ends_training(watch, 1, 12)
    now = watch.now()
    assert time.time() - begun - now > 0.49


def test_how_many_times_faster_by_the_medians_of_the_best_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = replace(tiny_job(tmp_path), options=BenchOptions(against="trl"))
    ours = StepTiming({}, seconds=(2.0, 1.0, 3.0), peak_device_bytes=10, details={"phases": {}, "eager_reason": "a hook"})
    theirs = [
        StepTiming({"a": 1}, seconds=(9.0, 8.0, 20.0), peak_device_bytes=30),
        StepTiming({"a": 2}, seconds=(10.0,)),
        StepTiming({"a": 3}, error="no"),
    ]
    found = step.document(job, {"fulltilt": [ours], "trl": theirs}, parameters=1000)
    assert found["ratio"] == found["ratios"]["trl"] == 4.5 and found["memory_ratios"]["trl"] == 3
    assert found["engines"]["trl"]["setting"] == {"a": 1} and len(found["engines"]["trl"]["all_settings"]) == 3
    text = step.table(found)
    assert "decoded without them, slower: a hook" in text
    assert "4.50 times as fast as trl's" in text and "trl failed with a 3: no" in text and "3.00 times as much memory" in text
    nothing = step.document(job, {"fulltilt": [ours], "trl": theirs[2:]}, parameters=1000)
    assert nothing["ratio"] is None and "trl gave no figure to compare with" in step.table(nothing)


# -- a process of its own ------------------------------------------------------------------------------------------------------------------


def test_a_peer_that_answers_fails_or_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "peer.py").write_text(PEER)
    monkeypatch.setenv("SET", "by the user")

    def ask(name: str) -> dict[str, Any]:
        defaults = {"SET": "by default", "UNSET": "by default"}
        with peers.Peer(tmp_path / "peer.py", {"do": name}, tmp_path / name, defaults) as peer:
            while name == "sleep" and not peer.log.read_text():  # it may take longer than the limit to start
                time.sleep(0.02)
            return peer.measure()

    assert ask("answer") == {"begun": True, "SET": "by the user", "UNSET": "by default", "HF_HUB_OFFLINE": "1"}
    assert ask("fail") == {"begun": True, "error": "ValueError: too bad"}
    assert ask("die") == {"error": "ended with code 3: last words"}
    monkeypatch.setattr(peers, "LIMIT_S", 2.0)
    assert ask("sleep") == {"error": "took longer than 2 s: asleep"}


def test_peers_start_together_and_are_measured_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "peer.py").write_text(PEER)
    with ExitStack() as started:
        first, second, dead = (
            started.enter_context(peers.Peer(tmp_path / "peer.py", {"do": name}, tmp_path / str(number)))
            for number, name in enumerate(("turn", "turn", "die"))
        )
        for peer in (first, second, dead):
            peer.wait_until_ready()
        assert first.child.poll() is None and second.child.poll() is None and dead.child.poll() == 3
        begin = time.time()
        ends = [peer.measure()["measured"] for peer in (first, second)]
        assert begin < ends[0] < ends[1]
        assert "last words" in dead.measure()["error"]


def test_a_peer_whose_parent_is_gone_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "peer.py").write_text(PEER)
    (tmp_path / "parent.py").write_text(PARENT)
    monkeypatch.setenv("PYTHONPATH", str(Path(peers.__file__).parents[2]))
    command = [sys.executable, str(tmp_path / "parent.py"), str(tmp_path / "asked"), "sleep"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert "the parent dies" in ended.stderr
    deadline = time.monotonic() + 50  # it would sleep for longer
    while Path(f"/proc/{int(ended.stdout)}").exists():
        assert time.monotonic() < deadline, "a peer works for nobody"
        time.sleep(0.05)


PARENT = """
import os, sys, time
from pathlib import Path
from fulltilt.bench import peers

peer = peers.Peer(Path(__file__).with_name("peer.py"), {"do": sys.argv[2]}, Path(sys.argv[1]))
while not peer.log.read_text():
    time.sleep(0.02)
print(peer.child.pid, flush=True)
print("the parent dies", file=sys.stderr, flush=True)
os._exit(1)
"""


PEER = """
import os, sys, time
from fulltilt.bench import peers

def run(request, answer):
    answer["begun"] = True
    if request["do"] == "fail":
        raise ValueError("too bad")
    if request["do"] == "die":
        print("last words", flush=True)
        os._exit(3)
    if request["do"] == "turn":
        print("ready", flush=True)
        peers.wait_for_turn()
        answer["measured"] = time.time()
        return
    if request["do"] == "sleep":
        print("asleep", flush=True)
        time.sleep(60)
    answer.update({name: os.environ[name] for name in ("SET", "UNSET", "HF_HUB_OFFLINE")})

peers.serve(run)
"""


# -- TRL itself ---------------------------------------------------------------------------------------------------------------------------


def test_trl_knows_every_argument(tmp_path: Path) -> None:
    config = pytest.importorskip("trl", reason="TRL is not installed").GRPOConfig
    task = tiny_task(tmp_path, generation="vllm")
    setting = {name: values[0] for name, values in trl.axes(asked((), 8, "cpu", "vllm")).items()}
    made = config(**trl.arguments(task, setting, tmp_path / "output"))
    assert made.generation_batch_size == task.job.samples and made.steps_per_generation == made.gradient_accumulation_steps == 1
    for name, axis in trl.AXES.items():
        if not axis.of_model:
            assert config.__dataclass_fields__[name].default == axis.values[0], f"TRL's own {name} is another"


def test_a_run_beside_trl(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed")
    found = step.run(tiny_job(tmp_path, against="trl", trl=("per_device_train_batch_size=4",)), quiet)
    ours, theirs = found["engines"]["fulltilt"], found["engines"]["trl"]
    assert theirs["error"] is None, theirs["error"]
    assert found["ratio"] == pytest.approx(theirs["step_seconds"] / ours["step_seconds"])
    assert [each["error"] for each in theirs["all_settings"]] == [None, None]
    assert len(theirs["step_seconds_all"]) == 2 and 0 < theirs["rollout_seconds"] < max(theirs["step_seconds_all"])
    # The same weights, prompts, loss and advantages, other samples: gradients of the same size.
    assert sum(theirs["grad_norms"]) == pytest.approx(sum(ours["grad_norms"]), rel=0.3)
    assert "trl" in found["versions"] and found["generation"] == {"trl": "transformers"}
    assert "times as fast as trl's" in step.table(found)


@pytest.mark.skipif(WITHOUT_TRL or importlib.util.find_spec("vllm") is not None, reason="wants TRL without vLLM")
def test_trl_without_vllm() -> None:
    with pytest.raises(UserError, match="generates with vLLM, which is not installed"):
        trl.check("vllm", "cuda")


# -- on a GPU -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_peak_memory_on_the_device() -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, in_use_before = devices.peak_memory("cuda")
    del (block := {"held": torch.empty(2**30, dtype=torch.uint8, device="cuda")})["held"]
    assert not block
    torch.cuda.empty_cache()
    after, in_use = devices.peak_memory("cuda")
    assert before is not None and after is not None and in_use is not None and in_use_before is not None
    assert after - before == 2**30
    # What lies beside torch's own hardly changes meanwhile.
    assert abs(in_use - in_use_before - 2**30) < 2**28
    assert devices.peak_memory("cuda", held_by_others=2**20)[1] == pytest.approx(in_use - 2**20, abs=2**28)


@pytest.mark.gpu
def test_steps_of_ours_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tiny_job(tmp_path, model="small", workload="small", device="cuda", prompts=4, samples=4)
    found = step.run(job, quiet)
    ours = found["engines"]["fulltilt"]
    # The peaks of the steps, and not what was left when their phases had ended.
    gib, metrics = 2**30, ours["metrics"]
    phases = [value * gib for name, value in metrics.items() if name.startswith("memory_gib/") and name.endswith("/peak")]
    assert (
        min(ours["grad_norms"]) > 0
        and max(phases) <= ours["peak_memory_bytes"] + 1
        and ours["peak_memory_bytes"] < ours["peak_device_bytes"]
    )
    assert (
        ours["peak_memory_bytes"] > torch.cuda.max_memory_allocated() and ours["peak_device_bytes"] > metrics["memory_gib/reserved"] * gib
    )
    assert ours["captures"] > 0 and ours["eager_reason"] is None
    # bfloat16: rollout and trainer round in other places.
    assert ours["metrics"]["rollout_corr/logprob_abs_gap"] < 0.01


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_run_beside_trl_with_vllm(tmp_path: Path) -> None:
    for module in ("trl", "vllm"):
        pytest.importorskip(module, reason=f"{module} is not installed")
    values = {name: axis.values[0] for name, axis in trl.AXES.items()} | {
        "vllm_gpu_memory_utilization": 0.1,
        "per_device_train_batch_size": 4,
    }
    given = tuple(f"{name}={value}" for name, value in values.items())
    job = tiny_job(tmp_path, model="small", workload="small", device="cuda", prompts=4, samples=4, against="trl", trl=given)
    theirs = step.run(job, quiet)["engines"]["trl"]
    assert theirs["error"] is None, theirs["all_settings"]
    assert 0 < theirs["peak_memory_bytes"] < theirs["peak_device_bytes"] and min(theirs["grad_norms"]) > 0
