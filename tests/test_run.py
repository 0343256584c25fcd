"""The loop on a tiny model: what a run writes, which phases it has, and that execution does not change what it computes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import plans
import pytest
import runs
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fulltilt.batching import pack
from fulltilt.cluster.assembly import assemble
from fulltilt.data.prompts import PromptSet
from fulltilt.loop.experience import training_sampling
from fulltilt.plan.make import make_plan
from fulltilt.rollout.sampler import sample_seed
from fulltilt.schema import Config

ModelFolders = Callable[[str], Path]
PLAIN = ("run.eval_every=0", "run.eval_before=false", "run.save_every=0")


@pytest.fixture
def folder(tmp_path: Path, model_folders: ModelFolders) -> Path:
    return runs.make(tmp_path / "folder", model_folders("qwen2"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model_folders: ModelFolders) -> tuple[Path, runs.Trained]:
    """A run of two steps with every phase there is: validation, old and reference log-probs, a checkpoint after each step."""
    folder = runs.make(tmp_path_factory.mktemp("whole") / "folder", model_folders("qwen2"))
    return folder, runs.train(folder, "run.steps=2", "run.eval_every=2", "run.save_every=1")


# -- what is written --------------------------------------------------------------------------------------------------------------------

NAMES = [
    "actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/grad_norm",
    "actor/lr", "critic/score/mean", "critic/score/max", "critic/score/min", "critic/rewards/mean", "critic/rewards/max",
    "critic/rewards/min", "critic/advantages/mean", "critic/advantages/max", "critic/advantages/min", "response_length/mean",
    "response_length/max", "response_length/min", "response_length/clip_ratio", "prompt_length/mean", "prompt_length/max",
    "prompt_length/min", "prompt_length/clip_ratio", "timing_s/gen", "timing_s/reward", "timing_s/old_log_prob", "timing_s/ref",
    "timing_s/adv", "timing_s/update_actor", "timing_s/step", "timing_per_token_ms/gen", "timing_per_token_ms/ref",
    "timing_per_token_ms/adv", "timing_per_token_ms/update_actor", "perf/total_num_tokens", "perf/time_per_step", "perf/throughput",
]  # fmt: skip


def test_metrics_have_verls_names_and_hang_together(whole: tuple[Path, runs.Trained]) -> None:
    _, first, second = runs.metrics(whole[0])
    for line in (first, second):
        assert [name for name in NAMES if name not in line] == []
        assert "nonfinite" not in line
        assert line["perf/total_num_tokens"] == 16 * (line["response_length/mean"] + line["prompt_length/mean"])
        assert line["perf/throughput"] == pytest.approx(line["perf/total_num_tokens"] / line["perf/time_per_step"])
        assert line["timing_s/step"] >= line["timing_s/gen"] + line["timing_s/update_actor"] > 0
        assert line["critic/score/min"] <= line["critic/score/mean"] <= line["critic/score/max"]
        assert line["reward/parts/letters"] == pytest.approx(24 * line["critic/score/mean"])
        assert (line["actor/updates"], line["actor/skipped_updates"]) == (2, 0)
        assert line["actor/grad_norm"] > 0
    # Three optimizer steps of warm-up, two in each step: a third and two thirds of the peak, then all of it twice.
    assert first["actor/lr"] == pytest.approx(2e-3 * 0.5)
    assert "timing_s/save_checkpoint" in second


def test_validation_before_and_every_so_often(whole: tuple[Path, runs.Trained]) -> None:
    folder, trained = whole
    before, first, second = runs.metrics(folder)
    assert [line["step"] for line in (before, first, second)] == [0, 1, 2]
    assert not any(name.startswith("val") for name in first)
    for line in (before, second):
        assert line["val-core/less/reward/mean@1"] == line["val/reward/mean"]
        assert line["val/reward_errors"] == 0
        assert line["timing_s/testing"] > 0
    assert "actor/pg_loss" not in before
    assert "validation after step 2: val/reward/mean" in trained.said


def test_rollouts_are_there_to_read(whole: tuple[Path, runs.Trained]) -> None:
    folder, _ = whole
    for step in (1, 2):
        lines = runs.rollouts(folder, step)
        assert len(lines) == 16
        for line in lines:
            assert line["prompt"] == f"{line['uid']}+{3 * line['uid']}="
            assert line["ground_truth"] == str(4 * line["uid"])
            letters = sum(character.islower() for character in line["response"])
            # The reward was asked about this very row and this very response.
            assert line["parts"] == {"letters": letters, "truth": 4 * line["uid"]}
            assert line["reward"] == pytest.approx(letters / 24)
        assert runs.metrics(folder)[step]["critic/score/mean"] == pytest.approx(sum(line["reward"] for line in lines) / 16)


def test_the_plan_is_said_in_words_once(whole: tuple[Path, runs.Trained]) -> None:
    said = whole[1].said
    assert said.count("4 prompts x 4 samples = 16 samples, 2 optimizer steps") == 1
    assert "18 rows read" in said and "leaves out 2 of its 18" in said


def test_the_summary_tells_what_was_achieved(whole: tuple[Path, runs.Trained]) -> None:
    folder, trained = whole
    lines, summary = runs.metrics(folder), trained.summary
    assert (summary.steps, summary.interrupted) == (2, False)
    assert (summary.reward_first, summary.reward_last) == (lines[1]["critic/score/mean"], lines[2]["critic/score/mean"])
    assert summary.tokens == sum(line["perf/total_num_tokens"] for line in lines[1:])


def test_the_export_loads_in_transformers(whole: tuple[Path, runs.Trained]) -> None:
    """And it is the trained model: not the one that the run started from, and in it is what the run's own folder says of itself."""
    folder, _ = whole
    exported = runs.checkpoints(folder)[2] / "model"
    model, report = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    started = AutoModelForCausalLM.from_pretrained(folder / "model")
    prompt = AutoTokenizer.from_pretrained(exported)("7+21=", return_tensors="pt").input_ids
    with torch.no_grad():
        assert not torch.equal(model(prompt).logits, started(prompt).logits)
    text = (folder / "run" / "snapshot.toml").read_text()
    assert "kl_coef = 0.05" in text and "steps = 2" in text


# -- which phases there are -------------------------------------------------------------------------------------------------------------


def test_one_mini_batch_has_no_pass_for_old_log_probs(folder: Path) -> None:
    runs.train(folder, *PLAIN, "run.steps=1", "algorithm.minibatches_per_step=1", "algorithm.kl_coef=0.0")
    (line,) = runs.metrics(folder)
    assert "timing_s/old_log_prob" not in line and "timing_s/ref" not in line and "actor/kl_loss" not in line
    assert line["actor/updates"] == 1
    # The update's own log-probs are the old ones, so no ratio differs from 1.
    assert (line["actor/ppo_kl"], line["actor/pg_clipfrac"]) == (0, 0)
    assert line["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("override", ["algorithm.minibatches_per_step=2", "algorithm.epochs=2"])
def test_more_updates_than_one_need_old_log_probs(folder: Path, override: str) -> None:
    runs.train(folder, *PLAIN, "run.steps=1", "algorithm.minibatches_per_step=1", "algorithm.kl_coef=0.0", "train.lr=0.02", override)
    (line,) = runs.metrics(folder)
    assert "timing_s/old_log_prob" in line and "timing_s/ref" not in line
    assert line["actor/updates"] == 2
    assert 0 < abs(line["actor/ppo_kl"]) < 1


def test_the_kl_term_is_against_where_the_run_started(folder: Path) -> None:
    """At the first update actor and reference are the same model; they are not after it. A larger weight holds them closer together."""
    drift = {}
    for weight in (0.01, 20.0):
        runs.train(folder, *PLAIN, "run.steps=4", "algorithm.minibatches_per_step=1", f"algorithm.kl_coef={weight}", f"run.dir=kl-{weight}")
        lines = [json.loads(line) for line in (folder / f"kl-{weight}" / "metrics.jsonl").read_text().splitlines()]
        assert all("timing_s/ref" in line and "timing_s/old_log_prob" not in line for line in lines)
        assert lines[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
        drift[weight] = lines[-1]["actor/kl_loss"]
        assert drift[weight] > 1e-5
    assert drift[20.0] < drift[0.01]


# -- rewards that fail ------------------------------------------------------------------------------------------------------------------


def failing(folder: Path, *overrides: str) -> tuple[dict[str, float], str]:
    trained = runs.train(folder, *PLAIN, "run.steps=1", "data.shuffle=false", "reward.function=reward.py:sometimes_fails", *overrides)
    (line,) = runs.metrics(folder)
    return line, trained.said


def test_a_failed_reward_leaves_its_samples_out(folder: Path) -> None:
    """Rows 0 and 2 of the four have answers that divide by eight: their groups fail."""
    line, said = failing(folder)
    assert (line["reward/errors"], line["reward/excluded"]) == (8, 8)
    assert "warning: step 1: 8 of 16 reward calls failed (8 raised an error)" in said and "no opinion" in said
    good = [row["reward"] for row in runs.rollouts(folder, 1) if row["error"] is None]
    assert len(good) == 8
    assert line["critic/score/mean"] == line["critic/rewards/mean"] == pytest.approx(sum(good) / 8)
    assert line["actor/updates"] == 2


def test_a_failed_reward_scores_what_was_asked(folder: Path) -> None:
    line, said = failing(folder, "reward.on_error=score", "reward.error_score=-3.0")
    assert (line["reward/errors"], line["reward/excluded"]) == (8, 0)
    assert "8 of 16 reward calls failed" in said
    rows = runs.rollouts(folder, 1)
    assert [row["reward"] for row in rows if row["error"] is not None] == [-3.0] * 8
    assert line["critic/rewards/min"] == -3
    assert line["critic/score/min"] >= 0, "a failed call has no part in the score"


def test_a_step_in_which_every_reward_fails_changes_no_parameter(folder: Path) -> None:
    ignored = 'health.ignore=["all-rewards-failed"]'
    said = runs.train(folder, *PLAIN, "run.steps=2", "reward.function=reward.py:always_fails", ignored).said
    assert said.count("16 of 16 reward calls failed") == 2
    assert said.count("no sample of this step can be trained on: the actor's update is left out") == 2
    for line in runs.metrics(folder):
        assert line["actor/updates"] == 0
        assert line["reward/excluded"] == 16
        assert "actor/pg_loss" not in line and "critic/score/mean" not in line
    exported, started = (AutoModelForCausalLM.from_pretrained(path) for path in (runs.checkpoints(folder)[2] / "model", folder / "model"))
    for (name, after), before in zip(exported.named_parameters(), started.parameters(), strict=True):
        assert torch.equal(after, before), name
    # The schedule goes by steps: it stands where the second one began.
    assert runs.state(runs.checkpoints(folder)[2])["updates"] == 2


def test_the_schedule_ends_with_the_run_although_the_rewards_of_a_step_fail(folder: Path) -> None:
    """Two updates a step; the second step makes none, since its rewards fail. The warm-up is three updates, the other five fall to 0."""
    with open(folder / "reward.py", "a") as file:
        file.write("\n\ndef not_then(solution_str, ground_truth):\n    return len(solution_str) / (not 16 <= int(ground_truth) < 32)\n")
    ignored = 'health.ignore=["all-rewards-failed"]'
    runs.train(folder, *PLAIN, "run.steps=4", "data.shuffle=false", "reward.function=reward.py:not_then", "train.schedule=linear", ignored)
    first, second, *later = runs.metrics(folder)
    assert (first["actor/updates"], second["actor/updates"]) == (2, 0) and "actor/lr" not in second
    assert first["actor/lr"] == pytest.approx(2e-3 * (1 / 3 + 2 / 3) / 2)
    assert [line["actor/lr"] for line in later] == pytest.approx([2e-3 * (4 / 5 + 3 / 5) / 2, 2e-3 * (2 / 5 + 1 / 5) / 2])


# -- warnings ---------------------------------------------------------------------------------------------------------------------------


def test_what_the_trainer_does_not_apply_is_warned_of(folder: Path) -> None:
    said = runs.train(folder, *PLAIN, "run.steps=1", "rollout.top_p=0.9", "rollout.top_k=7").said
    assert "warning: rollout.top_p = 0.9: the trainer does not apply it" in said
    assert "warning: rollout.top_k = 7: the trainer does not apply it" in said


# -- execution does not change the result -----------------------------------------------------------------------------------------------

# AdamW divides by the size of the gradient, so where that is near 0 it turns a rounding error into a whole step of the learning rate. With
# eps = 1 far above every gradient here the update is as good as lr times the averaged gradient, as in SGD: rounding stays rounding. Then
# parameters move by about 1e-2, float32 is good for 1e-7 of what it adds up, and 1e-5 separates the two by a wide margin on both sides.
LIKE_SGD = (
    "train.eps=1.0", "train.lr=0.5", "train.schedule=constant", "train.warmup_steps=0", "train.weight_decay=0.0", "train.clip_grad=0.0",
)  # fmt: skip
TOLERANCE = 1e-5

Line = dict[str, float]


def always(line: Line) -> bool:
    """For settings whose effect the plan tells: it is looked for there."""
    return True


# What is set, what the plan must then say, and what every step's metrics must then show: a setting without effect would prove nothing.
EXECUTIONS: dict[str, tuple[tuple[str, ...], str, Callable[[Line], bool]]] = {
    "a token budget of one sample": (("actor.token_budget=1",), "micro-batches of at most 1 tokens", always),
    "a token budget of a few": (("actor.token_budget=50",), "micro-batches of at most 50 tokens", always),
    "samples per micro-batch": (("actor.dynamic_batch=false", "actor.micro_batch=3"), "micro-batches of at most 3 samples", always),
    "budgets without gradient": (("actor.forward_token_budget=30", "ref.forward_token_budget=45"), "without gradient 30 tokens", always),
    "samples at once": (("rollout.max_seqs=3",), "at most 3 samples at once", lambda line: line["rollout/most_running"] == 3),
    "KV bytes": (("rollout.kv_bytes=6144", "rollout.block_tokens=4"), "cache of 6.0 KiB", lambda line: line["rollout/preemptions"] > 0),
    "tokens a pass": (("rollout.max_batched_tokens=4", "rollout.max_seqs=4"), "4 tokens a pass", lambda line: line["rollout/passes"] > 60),
    "no chunked prefill": (
        ("rollout.chunked_prefill=false", "rollout.max_batched_tokens=16"), "16 tokens a pass", lambda line: line["rollout/passes"] > 16,
    ),
    "no prefix sharing": (("rollout.prefix_sharing=false",), "", lambda line: line["rollout/prefix_hit_rate"] == 0),
}  # fmt: skip


@dataclass(frozen=True)
class TwoSteps:
    folder: Path
    said: str
    parameters: dict[str, torch.Tensor]

    def distance(self, others: Mapping[str, torch.Tensor]) -> float:
        return max(float((values - others[name]).abs().max()) for name, values in self.parameters.items())


def two_steps(folder: Path, *overrides: str) -> TwoSteps:
    said = runs.train(folder, *PLAIN, *LIKE_SGD, "run.steps=2", *overrides).said
    return TwoSteps(folder, said, runs.parameters(runs.checkpoints(folder)[2]))


@pytest.fixture(scope="module")
def as_planned(tmp_path_factory: pytest.TempPathFactory, model_folders: ModelFolders) -> TwoSteps:
    found = two_steps(runs.make(tmp_path_factory.mktemp("planned") / "folder", model_folders("qwen2")))
    assert found.distance(AutoModelForCausalLM.from_pretrained(found.folder / "model").state_dict()) > 500 * TOLERANCE
    for line in runs.metrics(found.folder):
        assert (line["rollout/preemptions"], line["rollout/passes"], line["rollout/most_running"]) == (0, 16, 16)
        assert line["rollout/prefix_hit_rate"] > 0
    return found


# Samples under other limits are compared on the engine itself, too.
BY_DEFAULT = ("a token budget of one sample", "KV bytes")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.long) for name in EXECUTIONS])
def test_the_result_does_not_depend_on(folder: Path, as_planned: TwoSteps, name: str) -> None:
    overrides, planned, took_effect = EXECUTIONS[name]
    found = two_steps(folder, *overrides)
    assert planned in found.said
    assert all(took_effect(line) for line in runs.metrics(folder))
    for step in (1, 2):
        sampled, expected = runs.rollouts(folder, step), runs.rollouts(as_planned.folder, step)
        assert [row["response"] for row in sampled] == [row["response"] for row in expected]
    assert found.distance(as_planned.parameters) < TOLERANCE


def test_samples_that_teach_nothing_are_not_computed(tmp_path: Path, model_folders: ModelFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the run is the same as with all of them."""
    settings = ("algorithm.kl_coef=0.0", "reward.function=reward.py:undecided")
    fewer = two_steps(runs.make(tmp_path / "fewer", model_folders("qwen2")), *settings)
    monkeypatch.setattr(pack, "with_advantage", lambda rows: list(range(len(rows))))
    all_of_them = two_steps(runs.make(tmp_path / "all", model_folders("qwen2")), *settings)
    assert fewer.distance(all_of_them.parameters) < TOLERANCE
    assert fewer.distance(AutoModelForCausalLM.from_pretrained(fewer.folder / "model").state_dict()) > 100 * TOLERANCE
    left_out = [line["actor/samples_left_out"] for line in runs.metrics(fewer.folder)]
    assert all(0 < count < 16 for count in left_out), left_out
    assert [line["actor/samples_left_out"] for line in runs.metrics(all_of_them.folder)] == [0, 0]
    norms = [[line["actor/grad_norm"] for line in runs.metrics(each.folder)] for each in (fewer, all_of_them)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)  # float32, other sums


def test_the_result_does_depend_on_the_algorithm(folder: Path, as_planned: TwoSteps) -> None:
    """The other half of the tests above: what must change the parameters does, by far more than they allow."""
    assert two_steps(folder, "algorithm.kl_coef=0.5").distance(as_planned.parameters) > 10 * TOLERANCE


def test_validation_samples_are_written_and_cut_back(folder: Path) -> None:
    options = (*PLAIN, "run.eval_before=true", "run.eval_every=1", "run.save_every=1")
    runs.train(folder, *options, "run.steps=2")
    files = folder / "run" / "validation"
    assert sorted(path.name for path in files.iterdir()) == ["step-000000.jsonl", "step-000001.jsonl", "step-000002.jsonl"]
    lines = [json.loads(line) for line in (files / "step-000002.jsonl").read_text().splitlines()]
    assert [line["prompt"].removeprefix("<s>") for line in lines] == ["100-1=", "101-1=", "102-1="]
    mean = sum(line["reward"] for line in lines) / 3
    assert runs.metrics(folder)[-1]["val/reward/mean"] == pytest.approx(mean)
    (files / "step-000009.jsonl").write_text("{}")
    assert "nothing to do. Ask for more with run.steps" in runs.train(folder, *options, "run.steps=2").said
    assert not (files / "step-000009.jsonl").exists()


def test_groups_enter_in_prompt_order(folder: Path) -> None:
    """Groups are done in another order than they were asked for, and the rewards of the first prompt come last."""
    with open(folder / "reward.py", "a") as file:
        file.write(
            "\n\ndef slow_first(data_source, solution_str, ground_truth, extra_info):\n"
            "    time.sleep(0.1 if ground_truth == '0' else 0)\n"
            "    return score(data_source, solution_str, ground_truth, extra_info)\n"
        )
    stop = f"rollout.stop={list('abc')}"  # later than one burst of decoding
    options = (*PLAIN, "run.steps=1", "data.shuffle=false", stop, "reward.function=reward.py:slow_first", "rollout.max_new_tokens=64")
    config = runs.read_config(folder, *options)
    with contextlib.chdir(folder), contextlib.closing(assemble(config)) as parts:
        assert parts.worker.engine is not None and isinstance(parts.train_data, PromptSet)
        groups = parts.worker.engine.generate(parts.train_data.items[:4], training_sampling(config), seed=int(sample_seed(7, 0, 1)))
        finished = [group.prompt.uid for group in groups]
    assert finished != [0, 1, 2, 3], "they happened to be done in order: choose another seed"
    runs.train(folder, *options)
    rows = runs.rollouts(folder, 1)
    assert [(row["uid"], row["sample"]) for row in rows] == [(uid, sample) for uid in range(4) for sample in range(4)]
    assert [row["parts"]["truth"] for row in rows] == [4 * row["uid"] for row in rows]


# -- data and SFT -----------------------------------------------------------------------------------------------------------------------


def test_epochs_go_through_the_data_in_ever_new_orders(folder: Path) -> None:
    """18 prompts in steps of 4: an epoch is 4 steps and leaves 2 out, no prompt comes twice in it."""
    text = (folder / "run.toml").read_text()
    (folder / "run.toml").write_text(text.replace("steps = 16\n", "epochs = 2\n", 1))
    trained = runs.train(folder, *PLAIN, "algorithm.samples_per_prompt=2")
    assert trained.summary.steps == 8
    order = [row["uid"] for step in range(1, 9) for row in runs.rollouts(folder, step) if row["sample"] == 0]
    first, second = order[:16], order[16:]
    assert len(set(first)) == len(set(second)) == 16
    assert first != second and first != sorted(first)


def test_sft_learns_its_rows(tmp_path: Path, model_folders: ModelFolders) -> None:
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"), runs.SFT)
    summary = runs.train(folder, "run.steps=24", "run.eval_every=12", "train.lr=0.01").summary
    lines = runs.metrics(folder)
    assert lines[-1]["train/loss"] < 0.6 * lines[0]["train/loss"]
    assert lines[23]["val/loss"] < lines[11]["val/loss"]
    assert (summary.reward_first, summary.reward_last) == (None, None)
    assert not any(name.startswith(("critic/", "response_length/", "timing_s/gen")) for name in lines[0])
    assert "train/loss" in lines[0] and lines[0]["actor/updates"] == 2
    assert not (folder / "run" / "rollouts").exists()


# -- threads ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_threads_are_planned_obeyed_and_kept(folder: Path) -> None:
    """Their number decides last bits, so a resumed run takes the checkpoint's and not what the machine would choose now."""
    before = torch.get_num_threads()
    try:
        runs.train(folder, *PLAIN, "run.steps=1", "run.threads=2")
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        assert runs.state(runs.checkpoints(folder)[1])["budgets"]["threads"] == 2
        runs.train(folder, *PLAIN, "run.steps=2", "run.threads=2")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_small_model_gets_one_thread_unless_told_otherwise() -> None:
    facts = plans.facts("cpu", 2**30, longest=10, kv_bytes_per_token=64)
    config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}, "run": {"steps": 1}})
    large = {"actor": replace(plans.SMALL, parameter_bytes=1_000_000_000)}
    assert make_plan(config, facts).budgets.threads == 1
    assert make_plan(config, replace(facts, roles=large)).budgets.threads == 8
    assert make_plan(config, replace(facts, threads_given=True, cores=3)).budgets.threads == 3
    assert make_plan(config, replace(facts, device="cuda")).budgets.threads == 8
