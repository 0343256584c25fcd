"""Health: every rule at its border, streaks over steps and resumes, and real runs made to fail."""

from __future__ import annotations

import math
import re
import shutil
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest
import runs
from safetensors.torch import load_file, save_file
from variants import sample_cases

from fulltilt.observe.health import GROWTH_GIB, GROWTH_STEPS, PAGE, RULES, WARM_UP_STEPS, Health, Unhealthy, Verdict, last_good
from fulltilt.records import UserError
from fulltilt.schema import HealthConfig, toml_value

# A step of a run that is well, under the names of docs/metrics.md.
WELL: Mapping[str, float] = {
    "reward/groups_with_variance": 0.5,
    "critic/score/max": 1.0,
    "critic/score/min": 0.0,
    "critic/advantages/max": 0.7,
    "critic/advantages/min": -0.7,
    "actor/skipped_updates": 0,
    "critic/skipped_updates": 0,
    "rollout/entropy": 1.2,
    "response_length/mean": 40.0,
    "response_length/clip_ratio": 0.1,
    "reward/errors": 0,
    "reward/samples": 64,
    "rollout_corr/logprob_abs_gap": 1e-4,
}
NAMES = tuple(rule.name for rule in RULES)


def sick(changed: Mapping[str, float], **config: object) -> tuple[str, ...]:
    return Health(HealthConfig(**config)).look(1, {**WELL, **changed}).sick  # type: ignore[arg-type]


# -- single rules -----------------------------------------------------------------------------------------------------------------------


def test_the_configuration_knows_every_rule() -> None:
    (inside,) = get_args(HealthConfig.model_fields["ignore"].annotation)
    assert set(get_args(inside)) == set(NAMES)


def test_a_run_that_is_well_hears_nothing() -> None:
    assert Health(HealthConfig()).look(1, WELL) == Verdict((), (), None, may_save=True)


@pytest.mark.parametrize("step", [{}, {"train/loss": 0.1, "actor/entropy": 0.001, "actor/skipped_updates": 0}], ids=["nothing", "sft"])
def test_what_is_not_measured_is_not_sick(step: Mapping[str, float]) -> None:
    assert Health(HealthConfig()).look(1, step).sick == ()


@pytest.mark.parametrize(
    ("entropies", "holds"),
    [
        ([0.3, 1.2], False),
        ([0.3, 1.21], True),
        ([0.01, 1.0], False),  # many times more, and still little
        ([0.01, 1.01], True),
        ([1.3, 5.1], False),
        ([None, 0.3, 1.21], True),  # what the first step lacks, the second has
        ([math.nan, 0.3, 1.21], True),
        ([0.3, 0.9, 1.1, 1.21], True),  # slowly: it is the first that counts
        ([0.3, 1.21, None], False),
        ([0.3, 1.21, 0.3], False),
    ],
)
def test_entropy_that_rises_far_above_the_first(entropies: list[float | None], holds: bool) -> None:
    steps = [{**WELL, "rollout/entropy": value} for value in entropies]
    health = Health(HealthConfig())
    *_, verdict = [health.look(step, {name: each for name, each in found.items() if each is not None}) for step, found in enumerate(steps)]
    assert verdict.sick == (("entropy-explosion",) if holds else ())


def test_the_entropy_that_a_run_began_with_outlives_a_resume() -> None:
    before = Health(HealthConfig())
    before.look(1, {**WELL, "rollout/entropy": 0.3})
    before.look(2, {**WELL, "rollout/entropy": 0.9})
    assert before.first_entropy == 0.3
    risen = {**WELL, "rollout/entropy": 1.21}
    assert Health(HealthConfig(), {}, before.first_entropy).look(3, risen).sick == ("entropy-explosion",)
    assert Health(HealthConfig(max_entropy_rise=5), {}, before.first_entropy).look(3, risen).sick == ()
    assert Health(HealthConfig()).look(3, risen).sick == ()


NO_ADVANTAGE = {"critic/advantages/max": 0.0, "critic/advantages/min": 0.0}
BORDERS = [
    ("no-variance", {"reward/groups_with_variance": 0.0, **NO_ADVANTAGE}, {"reward/groups_with_variance": 0.01, **NO_ADVANTAGE}),
    ("not-finite", {"actor/skipped_updates": 1}, {"actor/skipped_updates": 0}),
    ("not-finite", {"critic/skipped_updates": 2}, {"critic/skipped_updates": 0}),
    ("not-finite", {"actor/pg_loss": math.nan}, {"actor/pg_loss": 1e300}),
    ("not-finite", {"actor/grad_norm": -math.inf}, {"actor/grad_norm": 0.0}),
    ("entropy-collapse", {"rollout/entropy": 0.00499}, {"rollout/entropy": 0.005}),
    ("all-clipped", {"response_length/clip_ratio": 0.9901}, {"response_length/clip_ratio": 0.99}),
    ("reward-errors", {"reward/errors": 33}, {"reward/errors": 32}),
    ("all-rewards-failed", {"val/reward_errors": 4}, {"val/reward_errors": 4, "val/reward/mean": 0.0}),
    ("logprob-gap", {"rollout_corr/logprob_abs_gap": 0.0501}, {"rollout_corr/logprob_abs_gap": 0.05}),
]


@pytest.mark.parametrize(("name", "beyond", "just_well"), BORDERS)
def test_a_rule_holds_beyond_its_border_only(name: str, beyond: Mapping[str, float], just_well: Mapping[str, float]) -> None:
    assert sick(beyond) == (name,)
    assert sick(just_well) == ()


@pytest.mark.parametrize(
    ("name", "metrics", "wider"),
    [
        ("entropy-collapse", {"rollout/entropy": 0.2}, {"entropy_floor": 0.3}),
        ("all-clipped", {"response_length/clip_ratio": 0.2}, {"max_clip_ratio": 0.1}),
        ("reward-errors", {"reward/errors": 1}, {"max_reward_errors": 0.0}),
        ("logprob-gap", {}, {"max_logprob_gap": 1e-5}),
    ],
)
def test_borders_are_those_of_the_configuration(name: str, metrics: Mapping[str, float], wider: Mapping[str, float]) -> None:
    assert sick(metrics) == ()
    assert sick(metrics, **wider) == (name,)
    assert sick(metrics, **wider, ignore=[name]) == ()


@pytest.mark.parametrize(
    ("metrics", "holds"),
    [
        ({"critic/advantages/max": 0.0}, False),
        ({"critic/advantages/min": 0.0}, False),
        ({}, False),  # groups of one, or alike within and different without: a critic or the batch's mean tells them apart
        ({"critic/score/min": 1.0}, True),  # every reward of the step is the same: what a critic's errors make of that is noise
        ({"critic/score/min": 1.0, "reward/errors": 3}, False),  # failed ones have the score of reward.on_error
        ({"critic/score/min": 1.0, "rollout/lag_max": 1}, False),  # groups of earlier steps were trained on
        (NO_ADVANTAGE, True),
    ],
)
def test_groups_without_variance_may_still_teach_algorithms_without_group_baselines(metrics: Mapping[str, float], holds: bool) -> None:
    assert sick({"reward/groups_with_variance": 0.0, **metrics}) == (("no-variance",) if holds else ())


def test_rewards_that_all_failed_are_not_said_to_be_alike() -> None:
    """They are the errors' rule."""
    failed = {"reward/groups_with_variance": 0.0, "reward/errors": 64, "reward/samples": 64}
    assert sick({**failed, **NO_ADVANTAGE}) == ("reward-errors", "all-rewards-failed")


@pytest.mark.parametrize("stop", [True, False])
def test_a_rule_that_stops_at_once_silences_only_the_rule_that_it_covers(stop: bool) -> None:
    health = Health(HealthConfig(stop=stop))
    verdict = health.look(1, {**WELL, "reward/errors": 64, "reward/samples": 64, "response_length/clip_ratio": 1.0})
    said = [text.split(":")[1].strip() for text in verdict.warnings]
    assert said == ["all-clipped", *([] if stop else ["all-rewards-failed"])]
    told_then = health.look(2, {**WELL, "reward/errors": 60, "reward/samples": 64}).warnings
    assert ["reward-errors" in text for text in told_then] == [True]


def test_a_single_sample_has_nothing_to_differ_from() -> None:
    alike = {"reward/groups_with_variance": 0.0, "critic/score/min": 1.0, **NO_ADVANTAGE}
    assert sick({**alike, "reward/samples": 1}) == ()
    assert sick({**alike, "reward/samples": 2}) == ("no-variance",)


def test_a_step_whose_update_was_left_out_for_want_of_variance_is_sick() -> None:
    lengths = {name: value for name, value in WELL.items() if name.startswith(("response_length", "reward/"))}
    assert Health(HealthConfig()).look(1, {**lengths, "reward/groups_with_variance": 0}).sick == ("no-variance",)


def test_names_of_numbers_that_are_not_finite_are_told() -> None:
    bad = {f"actor/bad_{number}": math.nan for number in range(5)}
    (warning,) = Health(HealthConfig()).look(1, {**WELL, **bad}).warnings
    assert "not finite: actor/bad_0, actor/bad_1, actor/bad_2 and 2 more" in warning


# -- steps in a row ---------------------------------------------------------------------------------------------------------------------

CLIPPED = {**WELL, "response_length/clip_ratio": 1.0}
FAILING = {**WELL, "reward/errors": 60}


def test_a_streak_warns_once_and_stops_at_patience() -> None:
    health = Health(HealthConfig(patience=3))
    first = health.look(7, CLIPPED)
    (warning,) = first.warnings
    assert warning == (
        "step 7: all-clipped: 100.0% of the responses were cut off, more than health.max_clip_ratio = 0.99. If it lasts for 2 steps more, "
        "the run stops: see docs/health.md#all-clipped"
    )
    assert first.stop is None and not first.may_save
    assert health.look(8, CLIPPED) == Verdict(("all-clipped",), (), None, may_save=False)
    last = health.look(9, CLIPPED)
    assert last.stop and last.stop.startswith(
        "the run stopped itself after step 9\n  all-clipped for 3 steps in a row: 100.0% of the responses were cut"
    )
    assert "raise rollout.max_new_tokens" in last.stop
    assert last.warnings == () and health.streaks == {"all-clipped": 3}


def test_recovery_is_told_and_counts_from_the_start_again() -> None:
    health = Health(HealthConfig(patience=2))
    health.look(1, CLIPPED)
    well = health.look(2, WELL)
    assert (well.warnings, well.notes) == ((), ("step 2: all-clipped no longer holds, after 1 step",)) and well.may_save
    assert health.streaks == {}
    again = health.look(3, CLIPPED)
    assert again.stop is None and len(again.warnings) == 1
    assert health.look(4, CLIPPED).stop


def test_a_patience_of_one_stops_at_once() -> None:
    verdict = Health(HealthConfig(patience=1)).look(1, CLIPPED)
    assert verdict.stop and verdict.stop.startswith("the run stopped itself after step 1\n  all-clipped:") and verdict.warnings == ()


def test_several_rules_count_for_themselves() -> None:
    health = Health(HealthConfig(patience=3))
    health.look(1, CLIPPED)
    both = health.look(2, {**CLIPPED, **FAILING, "response_length/clip_ratio": 1.0})
    assert both.sick == ("all-clipped", "reward-errors")
    assert [warning.split(": ")[1] for warning in both.warnings] == ["reward-errors"]
    third = health.look(3, {**FAILING, "response_length/clip_ratio": 1.0})
    assert third.stop and third.stop.count("in a row") == 1 and "all-clipped for 3 steps" in third.stop
    assert health.streaks == {"all-clipped": 3, "reward-errors": 2}
    fourth = health.look(4, {**FAILING, "response_length/clip_ratio": 1.0})
    assert fourth.stop and "all-clipped for 4 steps" in fourth.stop and "reward-errors for 3 steps" in fourth.stop
    assert health.look(5, FAILING).notes == ("step 5: all-clipped no longer holds, after 4 steps",)


def test_only_warning_never_stops_and_keeps_no_checkpoint_back() -> None:
    health = Health(HealthConfig(patience=2, stop=False))
    verdicts = [health.look(step, CLIPPED) for step in range(1, 5)]
    assert [len(verdict.warnings) for verdict in verdicts] == [1, 0, 0, 0]
    assert "The run continues because health.stop is off: see" in verdicts[0].warnings[0]
    assert all(verdict.stop is None and verdict.may_save and verdict.sick == ("all-clipped",) for verdict in verdicts)


@pytest.mark.parametrize("cut", range(5))
def test_a_resumed_run_stops_where_an_uninterrupted_one_does(cut: int) -> None:
    steps = [CLIPPED, WELL, CLIPPED, {**FAILING, "response_length/clip_ratio": 1.0}, CLIPPED, CLIPPED]
    config = HealthConfig(patience=3)
    straight, resumed = Health(config), Health(config)
    for number, metrics in enumerate(steps, 1):
        if number == cut + 1:
            resumed = Health(config, resumed.streaks)
        expected, found = straight.look(number, metrics), resumed.look(number, metrics)
        assert (found.sick, found.stop, found.may_save) == (expected.sick, expected.stop, expected.may_save)
        assert (found.stop is not None) == (number >= 5)
    assert resumed.streaks == straight.streaks == {"all-clipped": 4}


def test_who_resumes_in_the_middle_of_a_streak_is_told_again() -> None:
    (warning,) = Health(HealthConfig(), {"all-clipped": 4}).look(30, CLIPPED).warnings
    assert "If it lasts for 5 steps more, after 5 steps so far, the run stops" in warning
    assert Health(HealthConfig(), {"all-clipped": 4}).look(30, WELL).notes == ("step 30: all-clipped no longer holds, after 4 steps",)


def test_saved_streaks_of_rules_that_are_ignored_now_are_dropped() -> None:
    health = Health(HealthConfig(ignore=["all-clipped"]), {"all-clipped": 9, "a-rule-of-another-version": 3})
    assert health.streaks == {}
    assert health.look(1, CLIPPED) == Verdict((), (), None, may_save=True)


# -- memory that grows ------------------------------------------------------------------------------------------------------------------


def grow(health: Health, values: Sequence[float | None], name: str = "memory_gib/update_actor/other", first: int = 1) -> list[Verdict]:
    """The verdicts of steps that measure these numbers of GiB; None: the step does not measure it."""
    return [health.look(step, {**WELL, **({} if value is None else {name: value})}) for step, value in enumerate(values, first)]


QUIET = [1.0] * WARM_UP_STEPS
ENOUGH = GROWTH_STEPS + 1  # numbers, of which the first has none before it


def rising(by: float, count: int = ENOUGH, start: float = 1.0) -> list[float]:
    return [start + by * number for number in range(count)]


def test_growth_in_every_step_warns_and_never_stops() -> None:
    health = Health(HealthConfig(patience=1))
    verdicts = grow(health, QUIET + rising(0.5, ENOUGH + 3))
    assert [verdict.sick for verdict in verdicts] == [()] * (WARM_UP_STEPS + GROWTH_STEPS) + [("memory-growth",)] * 4
    assert all(verdict.stop is None and verdict.may_save for verdict in verdicts) and health.streaks == {}
    told = [(step, text) for step, verdict in enumerate(verdicts, 1) for text in verdict.warnings]
    ((step, text),) = told
    assert step == WARM_UP_STEPS + ENOUGH
    assert text == (
        f"step {step}: memory-growth: memory held has grown in every step: other at the end of update_actor by 5.00 to 6.00 GiB "
        "in 10 steps. This rule only warns: see docs/health.md#memory-growth"
    )
    (passed,) = grow(health, [1.0], first=step + 4)
    assert passed.notes == (f"step {step + 4}: memory-growth no longer holds, after 4 steps",)


@pytest.mark.parametrize(
    ("values", "holds"),
    [
        (QUIET + rising(1.01 * GROWTH_GIB / (GROWTH_STEPS - 1)), True),
        (QUIET + rising(0.99 * GROWTH_GIB / (GROWTH_STEPS - 1)), False),  # in every step, but by little in all
        (QUIET + rising(0.99 * GROWTH_GIB / (GROWTH_STEPS - 1), ENOUGH + 1), True),  # slowly, and more than that in the end
        (QUIET + rising(1.0, ENOUGH - 1), False),
        (rising(1.0, ENOUGH + WARM_UP_STEPS - 1), False),  # what the first steps take is not growth
        (QUIET + rising(1.0, 6) + rising(1.0, 6, start=6.0), False),  # a step that does not grow ends it
        (QUIET + [number for value in rising(1.0) for number in (value, None)], True),  # a phase that not every step has
        (QUIET + [1.0 + step % 2 for step in range(40)], False),
        (QUIET + rising(0.001) + rising(0.001, start=3.0), False),  # a checkpoint's copy, once, where memory grows by next to nothing
        (QUIET + rising(0.001) + rising(0.001, start=3.0) + [5.0], True),  # and once more
    ],
    ids=["beyond", "too little", "slow", "too few", "warm-up", "a pause", "now and then", "up and down", "once", "twice"],
)
def test_growth_is_long_and_large(values: list[float | None], holds: bool) -> None:
    assert grow(Health(HealthConfig()), values)[-1].sick == (("memory-growth",) if holds else ())


@pytest.mark.parametrize(
    ("name", "followed"),
    [
        ("memory_gib/gen/kv", True),
        ("memory_gib/update_actor/host", True),
        ("memory_gib/process", True),
        ("memory_gib/update_actor/peak", False),  # longer samples take more
        ("memory_gib/update_actor/activations", False),
        ("memory_gib/update_actor/head", False),
        ("memory_gib/reserved", False),
        ("perf/max_memory_allocated_gb", False),
    ],
)
def test_what_is_held_is_followed(name: str, followed: bool) -> None:
    assert grow(Health(HealthConfig()), QUIET + rising(1.0), name)[-1].sick == (("memory-growth",) if followed else ())


def test_each_kind_that_grew_is_named_once_largest_first() -> None:
    health = Health(HealthConfig())
    rates = {"memory_gib/gen/kv": 0.1, "memory_gib/adv/kv": 0.2, "memory_gib/process": 0.3, "memory_gib/gen/parameters": 0.0}
    for step in range(1, WARM_UP_STEPS + ENOUGH + 1):
        verdict = health.look(step, {name: 1.0 + rate * step for name, rate in rates.items()})
    (warning,) = verdict.warnings
    assert "in every step: process by 3.00 to 4.90 GiB in 10 steps, kv at the end of adv by 2.00 to 3.60 GiB in 10 steps. " in warning


def test_growth_keeps_no_other_rule_from_stopping_the_run() -> None:
    health = Health(HealthConfig(patience=2))
    grow(health, QUIET + rising(1.0))
    first, second = (health.look(step, {**CLIPPED, "memory_gib/update_actor/other": 100.0 + step}) for step in (1, 2))
    assert first.sick == ("all-clipped", "memory-growth") and not first.may_save
    assert second.stop and "all-clipped for 2 steps" in second.stop and "memory" not in second.stop
    assert health.streaks == {"all-clipped": 2}


def test_every_rule_has_a_section_of_the_page_that_its_warning_names() -> None:
    page = (Path(__file__).parents[1] / PAGE).read_text(encoding="utf-8")
    assert [name for name in re.findall(r"^### (\S+)$", page, flags=re.MULTILINE)] == [rule.name for rule in RULES]


# -- the error --------------------------------------------------------------------------------------------------------------------------


def test_the_error_names_cause_remedy_and_checkpoint() -> None:
    stop = Health(HealthConfig(patience=1)).look(30, FAILING).stop
    assert stop and stop.startswith("the run stopped itself after step 30\n  reward-errors: the reward of 60 of 64 ")
    assert "Remedy: read the run's reward_errors.jsonl" in stop
    where = last_good(20, Path("runs/mine/checkpoints"))
    assert where.startswith("The last good checkpoint is runs/mine/checkpoints/step-00000020. Fix the cause")
    assert "The newest checkpoint, saved while the rule held, is mine/step-00000030." in last_good(30, Path("mine"), good=False)
    assert issubclass(Unhealthy, UserError)


# -- real runs --------------------------------------------------------------------------------------------------------------------------

ModelFolders = Callable[[str], Path]

# Without shuffling, rows 0 to 7 are those of the first two steps. A row's true answer is four times its number.
FAULTS = '''
def letters(solution_str):
    return sum(character.islower() for character in solution_str) / 24


def constant_later(data_source, solution_str, ground_truth, extra_info):
    return letters(solution_str) if float(ground_truth) < 32 else 0.5


def fails_later(data_source, solution_str, ground_truth, extra_info):
    if float(ground_truth) >= 32 and float(ground_truth) % 16:
        raise RuntimeError("no opinion")
    return letters(solution_str)


def all_fail_later(data_source, solution_str, ground_truth, extra_info):
    if float(ground_truth) >= 32:
        raise RuntimeError("no opinion")
    return letters(solution_str)


def root_of_zero(terms):
    """Its value is the surrogate's; the gradient of a square root at 0 is infinite."""
    distance = (terms.logprobs - terms.logprobs.detach()).square().sum().sqrt()
    return -terms.advantages * (terms.logprobs - terms.logprobs.detach()).exp() + distance
'''

CAPITALS = f"rollout.stop={toml_value(list(string.ascii_uppercase))}"  # so that most responses end by themselves
QUICK = (
    "run.steps=6", "run.save_every=1", "run.eval_every=0", "run.eval_before=false", "run.keep=9", "data.shuffle=false",
    "algorithm.kl_coef=0", "algorithm.minibatches_per_step=1", "train.schedule=constant", "health.patience=2", "health.ignore=[]",
)  # fmt: skip
FORCE = "run.resume=force"


@dataclass(frozen=True)
class Fault:
    """A run made to fail in one way, and the same run mended."""

    rule: str
    wrong: tuple[str, ...]
    mended: tuple[str, ...]
    measured: str  # a pattern
    remedy: str
    well: int = 0  # steps before the fault shows
    sharp: float = 1.0  # the model's head is multiplied by this


REAL = (
    Fault(
        "no-variance",
        (CAPITALS, "reward.function=faults.py:constant_later"),
        (CAPITALS, "reward.function=reward.py:score", FORCE),
        "no group of this step has two different rewards: every sample got 0.5",
        "fix a reward that cannot tell samples apart",
        well=2,
    ),
    Fault(
        "reward-errors",
        (CAPITALS, "reward.function=faults.py:fails_later"),
        (CAPITALS, "reward.function=reward.py:score", FORCE),
        "the reward of 12 of 16 samples failed, more than health.max_reward_errors = 0.5",
        "read the run's reward_errors.jsonl",
        well=2,
    ),
    Fault(
        "not-finite",
        (CAPITALS, "algorithm.loss=faults.py:root_of_zero"),
        (CAPITALS, FORCE),
        "1 of the actor's optimizer steps skipped because the gradient is not finite",
        "check the model's weights and any loss or advantage of your own",
    ),
    Fault(
        "entropy-collapse",
        (CAPITALS,),
        (CAPITALS, "rollout.temperature=1000.0", FORCE),
        r"rollout/entropy is [\de.-]+ nats per token, below health.entropy_floor = 0.005",
        "raise algorithm.clip_high or algorithm.entropy_coef",
        sharp=1000.0,
    ),
    Fault(
        "entropy-explosion",
        (CAPITALS, "train.lr=5e-4", "train.weight_decay=1000", "train.warmup_steps=0"),  # halves the weights in every step
        # The update of the last good step has halved them already: what that did stays.
        (CAPITALS, "train.lr=1e-4", "train.weight_decay=0", "train.warmup_steps=0", "health.max_entropy_rise=20", FORCE),
        r"rollout/entropy is [\d.]+ nats per token, more than health.max_entropy_rise = 4 times the 0.38\d* of the run's first step",
        "lower algorithm.entropy_coef or train.lr",
        well=2,
        sharp=15.0,
    ),
    Fault(
        "all-clipped",
        ("rollout.max_new_tokens=2", "health.max_clip_ratio=0.8"),  # a random model happens to draw the end token now and then
        (CAPITALS, "rollout.max_new_tokens=16", FORCE),
        r"[\d.]+% of the responses were cut off, more than health.max_clip_ratio = 0.8",
        "raise rollout.max_new_tokens; if no response ever ends, check the chat template and the end token, or set rollout.stop",
    ),
    Fault(
        "logprob-gap",
        (CAPITALS, "model.dtype=bfloat16", "health.max_logprob_gap=1e-3"),  # two layers of 32 numbers lose little
        (CAPITALS, "model.dtype=bfloat16"),
        r"rollout_corr/logprob_abs_gap is 0.00\d+, above health.max_logprob_gap = 0.001",
        "health.max_logprob_gap may be raised",
        sharp=5.0,
    ),
)


def sharpened(model: Path, folder: Path, factor: float) -> Path:
    """The same model, surer of itself."""
    shutil.copytree(model, folder)
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * factor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make(folder: Path, model: Path) -> Path:
    runs.make(folder, model)
    (folder / "faults.py").write_text(FAULTS)
    return folder


def test_every_rule_that_stops_a_run_has_one_that_fails() -> None:
    assert {fault.rule for fault in REAL} == {rule.name for rule in RULES if rule.stops and not rule.at_once}


# One that comes after good steps. What each rule measures is tested above.
BY_DEFAULT = ("entropy-collapse",)


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, id=fault.rule, marks=() if fault.rule in BY_DEFAULT else pytest.mark.long) for fault in REAL]
)
def test_a_run_made_to_fail_names_its_cause_and_goes_on_once_mended(tmp_path: Path, model_folders: ModelFolders, fault: Fault) -> None:
    folder = make(tmp_path / "folder", sharpened(model_folders("qwen2"), tmp_path / "model", fault.sharp))
    stop = fault.well + 2
    failed = runs.command_here(folder, "train", "run.toml", *QUICK, *fault.wrong)
    assert failed.code == 2, failed.error
    warned, _, message = failed.error.partition("error: ")
    assert re.search(rf"warning: step {fault.well + 1}: {fault.rule}: {fault.measured}[.;] ", warned), warned
    assert warned.count(f": {fault.rule}: ") == 1
    assert message.startswith(f"the run stopped itself after step {stop}\n")
    assert re.search(rf"\n  {fault.rule} for 2 steps in a row: {fault.measured};", message), message
    assert fault.remedy in message and "Traceback" not in failed.error
    # Nothing is saved while a rule holds: the newest checkpoint is from before, or all that there is.
    saved = fault.well or stop
    assert list(runs.checkpoints(folder)) == (list(range(1, saved + 1)) if fault.well else [stop])
    said = "The last good checkpoint is" if fault.well else "The newest checkpoint, saved while the rule held, is"
    assert f"{said} run/checkpoints/step-{saved:08d}. Fix the cause" in message
    assert [line["step"] for line in runs.metrics(folder)] == list(range(1, stop + 1))
    before = runs.metrics(folder)[:saved]

    mended = runs.command_here(folder, "train", "run.toml", *QUICK, *fault.mended)
    assert mended.code == 0, mended.error
    assert f"resuming from step {saved}" in mended.out
    assert (f"step {saved + 1}: {fault.rule} no longer holds" in mended.out) == (not fault.well)
    assert runs.metrics(folder)[:saved] == before
    assert [line["step"] for line in runs.metrics(folder)] == list(range(1, 7))
    assert list(runs.checkpoints(folder))[-1] == 6
    assert all(tensor.isfinite().all() for tensor in runs.parameters(runs.checkpoints(folder)[6]).values())


def test_a_run_resumed_in_the_middle_of_a_streak_counts_on(tmp_path: Path, model_folders: ModelFolders) -> None:
    """The last step is saved as ever, sick or not."""
    folder = make(tmp_path / "folder", model_folders("qwen2"))
    wrong = ("rollout.max_new_tokens=2", "health.max_clip_ratio=0.8", "health.patience=3")
    first = runs.command_here(folder, "train", "run.toml", *QUICK, *wrong, "run.steps=2")
    assert first.code == 0, first.error
    assert runs.state(runs.checkpoints(folder)[2])["health"] == {"all-clipped": 2}
    failed = runs.command_here(folder, "train", "run.toml", *QUICK, *wrong)
    assert failed.code == 2
    assert "the run stopped itself after step 3\n  all-clipped for 3 steps in a row: " in failed.error
    assert list(runs.checkpoints(folder)) == [2]


def test_the_first_entropy_is_kept_unless_sampling_changes(tmp_path: Path, model_folders: ModelFolders) -> None:
    folder = make(tmp_path / "folder", model_folders("qwen2"))
    ignore = 'health.ignore=["all-clipped"]'
    runs.train(folder, *QUICK, CAPITALS, ignore, "run.steps=2")
    first = runs.metrics(folder)[0]["rollout/entropy"]
    runs.train(folder, *QUICK, CAPITALS, ignore, "run.steps=3", FORCE)
    assert [runs.state(runs.checkpoints(folder)[step])["first_entropy"] for step in (1, 2, 3)] == [first] * 3
    runs.train(folder, *QUICK, CAPITALS, ignore, "run.steps=4", "rollout.temperature=0.5", FORCE)
    found = runs.state(runs.checkpoints(folder)[4])["first_entropy"]
    assert found == runs.metrics(folder)[3]["rollout/entropy"] and found < first


def test_a_fault_that_passes_costs_only_its_own_checkpoints(tmp_path: Path, model_folders: ModelFolders) -> None:
    folder = make(tmp_path / "folder", model_folders("qwen2"))
    options = (CAPITALS, "reward.function=faults.py:constant_later", "health.patience=3")
    trained = runs.train(folder, *QUICK, *options)
    assert trained.summary.steps == 6
    assert "step 3: no-variance: " in trained.said and "step 5: no-variance no longer holds, after 2 steps" in trained.said
    assert list(runs.checkpoints(folder)) == [1, 2, 5, 6]


def test_a_run_that_only_warns_goes_on_and_saves(tmp_path: Path, model_folders: ModelFolders) -> None:
    folder = make(tmp_path / "folder", model_folders("qwen2"))
    quick = [option for option in QUICK if not option.startswith("health.")]
    trained = runs.train(folder, *quick, CAPITALS, "reward.function=faults.py:constant_later", "health.stop=false", "run.steps=4")
    assert trained.said.count(": no-variance: ") == 1 and "The run continues because health.stop is off: see" in trained.said
    assert list(runs.checkpoints(folder)) == [1, 2, 3, 4]


def test_an_ignored_rule_says_nothing(tmp_path: Path, model_folders: ModelFolders) -> None:
    folder = make(tmp_path / "folder", model_folders("qwen2"))
    ignore = 'health.ignore=["no-variance"]'
    trained = runs.train(folder, *QUICK, CAPITALS, "reward.function=faults.py:constant_later", ignore, "run.steps=4")
    assert "no-variance" not in trained.said and list(runs.checkpoints(folder)) == [1, 2, 3, 4]


def test_a_run_with_one_sample_a_step_is_no_sick_run(tmp_path: Path, model_folders: ModelFolders) -> None:
    folder = make(tmp_path / "folder", model_folders("qwen2"))
    options = ("algorithm.name=ppo", "algorithm.prompts_per_step=1", "algorithm.samples_per_prompt=1", "health.patience=1")
    ignore = 'health.ignore=["all-clipped"]'  # one response in a row may well be cut
    trained = runs.train(folder, *QUICK, CAPITALS, *options, ignore, "run.steps=2")
    assert trained.summary.steps == 2 and "no-variance" not in trained.said
    assert [(line["reward/samples"], line["reward/groups_with_variance"]) for line in runs.metrics(folder)] == [(1, 0), (1, 0)]


def test_a_step_whose_rewards_all_failed_stops_the_run_at_once(tmp_path: Path, model_folders: ModelFolders) -> None:
    """The last step too. The message names the rule, and repeating the command resumes from the step before."""
    folder = make(tmp_path / "folder", model_folders("qwen2"))
    options = (*QUICK, CAPITALS, "reward.function=faults.py:all_fail_later", "run.steps=3", "health.patience=10")
    failed = runs.command_here(folder, "train", "run.toml", *options)
    assert failed.code == 2 and "Traceback" not in failed.error, failed.error
    _, _, message = failed.error.partition("error: ")
    assert message.startswith("the run stopped itself after step 3\n  all-rewards-failed:"), message
    assert "every sample of the step failed (16 of 16)" in message and "read the run's reward_errors.jsonl" in message
    assert "The last good checkpoint is run/checkpoints/step-00000002" in message
    assert list(runs.checkpoints(folder)) == [1, 2]
    ignored = runs.command_here(folder, "train", "run.toml", *options, 'health.ignore=["all-rewards-failed"]')
    assert ignored.code == 0, ignored.error
    assert list(runs.checkpoints(folder))[-1] == 3


@pytest.mark.parametrize("steps", sample_cases([1, 2], 2))
def test_a_run_whose_rewards_never_worked_does_not_end_well_when_repeated(tmp_path: Path, model_folders: ModelFolders, steps: int) -> None:
    folder = make(tmp_path / "folder", model_folders("qwen2"))
    options = (*QUICK, "reward.function=reward.py:always_fails", f"run.steps={steps}")
    for _ in range(2):
        failed = runs.command_here(folder, "train", "run.toml", *options)
        assert failed.code == 2 and "all-rewards-failed" in failed.error, failed.error


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_validation_whose_rewards_all_failed_is_an_error(tmp_path: Path, model_folders: ModelFolders, command: str) -> None:
    folder = make(tmp_path / "folder", model_folders("qwen2"))
    options = ("reward.function=reward.py:always_fails", "run.steps=1", "run.eval_every=1")
    failed = runs.command_here(folder, command, "run.toml", *options)
    assert failed.code == 2 and "error: all-rewards-failed: the reward of every sample of the validation failed" in failed.error
    assert "Traceback" not in failed.error
