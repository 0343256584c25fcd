"""Dynamic sampling: filling a step with useful groups, carrying the rest over, and keeping it through a checkpoint."""

from __future__ import annotations

import functools
import json
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import runs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from variants import sample_cases

from fulltilt.records import Group, Prompt, Sample, Score, UserError
from fulltilt.rollout.collect import ScoredGroup, StepGroups, collect, fill
from fulltilt.rollout.sampler import Sampling
from fulltilt.rollout.surplus import pack, unpack

# -- one round --------------------------------------------------------------------------------------------------------------------------


def test_groups_are_told_apart_by_their_place() -> None:
    """A row may come twice in a round, and a worker in another process answers with copies of the prompts."""
    prompts = [Prompt(uid=uid, ids=np.array([uid]), text="") for uid in (3, 3, 5)]

    def generate(asked: Sequence[Prompt], sampling: Sampling, seed: int) -> Iterator[Group]:
        for place in (2, 0, 1):
            yield pickle.loads(pickle.dumps(Group(asked[place], (), place)))

    seen: list[Group] = []
    groups = collect(generate, prompts, Sampling(), 0, seen.append)
    assert [group.place for group in groups] == [0, 1, 2] and [group.place for group in seen] == [2, 0, 1]
    assert all(group.prompt is prompt for group, prompt in zip(groups, prompts, strict=True))
    assert all(group is groups[group.place] for group in seen)


# -- filling ----------------------------------------------------------------------------------------------------------------------------


def group(number: int, step: int, useful: bool) -> ScoredGroup:
    """A group of two, with different rewards if it is useful."""
    prompt = Prompt(uid=number, ids=np.array([number]), text="")
    samples = tuple(Sample(index, np.array([7]), np.array([-1.0], dtype=np.float32), "stop", "") for index in (0, 1))
    return ScoredGroup(Group(prompt, samples), (Score(0.0), Score(float(useful))), step)


def is_useful(kept: ScoredGroup) -> bool:
    return kept.scores[0].value != kept.scores[1].value


def uids(kept: Sequence[ScoredGroup]) -> list[int]:
    return [each.group.prompt.uid for each in kept]


class Rounds:
    """Groups that come in rounds, some of them useful; notes what was asked for."""

    def __init__(self, useful: Sequence[bool], per_round: int) -> None:
        self.groups = [group(number, 0, each) for number, each in enumerate(useful)]
        self.per_round = per_round
        self.given: list[ScoredGroup] = []
        self.asked: list[int] = []

    def ask(self, number: int) -> Sequence[ScoredGroup]:
        self.asked.append(number)
        found = [self.groups[(len(self.given) + place) % len(self.groups)] for place in range(self.per_round)]
        found = [ScoredGroup(each.group, each.scores, len(self.asked)) for each in found]  # a prompt that comes again is another group
        self.given += found
        return found


flags = st.lists(st.booleans(), min_size=1, max_size=30)


@settings(max_examples=300, deadline=None)
@given(useful=flags, per_round=st.integers(1, 8), wanted=st.integers(1, 9), max_rounds=st.integers(1, 5), steps=st.integers(1, 6))
def test_over_many_steps_nothing_is_lost_repeated_or_reordered(
    useful: list[bool], per_round: int, wanted: int, max_rounds: int, steps: int
) -> None:
    rounds = Rounds(useful, per_round)
    surplus: Sequence[ScoredGroup] = ()
    used: list[ScoredGroup] = []
    for _ in range(steps):
        rounds.asked.clear()
        before = len(rounds.given)
        filled = fill(wanted, surplus, rounds.ask, is_useful, max_rounds)
        new = rounds.given[before:]
        assert rounds.asked == list(range(filled.rounds)) and filled.rounds <= max_rounds
        assert list(filled.sampled) == new
        assert filled.dropped == sum(not is_useful(each) for each in new)
        assert len(filled.kept) == wanted or (len(filled.kept) < wanted and filled.rounds == max_rounds and not filled.surplus)
        assert [*filled.kept, *filled.surplus] == [*surplus, *filter(is_useful, new)]
        # No more rounds than needed: without the last one, the step would have been short.
        without_last = new[:-per_round] if new else new
        assert not filled.rounds or len(surplus) + sum(map(is_useful, without_last)) < wanted
        used += filled.kept
        surplus = filled.surplus
    assert [*used, *surplus] == [each for each in rounds.given if is_useful(each)]


def filled(wanted: int, surplus: Sequence[ScoredGroup], useful: str, per_round: int, max_rounds: int) -> StepGroups:
    return fill(wanted, surplus, Rounds([each == "u" for each in useful], per_round).ask, is_useful, max_rounds)


def test_groups_of_several_rounds_fill_a_step() -> None:
    found = filled(3, (), "..u.uu.u", per_round=3, max_rounds=5)
    assert uids(found.kept) == [2, 4, 5] and found.rounds == 2 and found.dropped == 3 and found.surplus == ()
    assert uids(found.sampled) == [0, 1, 2, 3, 4, 5]


def test_too_many_are_kept_for_the_next_step() -> None:
    found = filled(2, (), "uuuu", per_round=4, max_rounds=5)
    assert uids(found.kept) == [0, 1] and uids(found.surplus) == [2, 3] and found.rounds == 1


def test_surplus_comes_first_and_may_suffice() -> None:
    left = [group(100 + number, 5, useful=True) for number in range(3)]
    found = filled(2, left, "uu", per_round=2, max_rounds=5)
    assert uids(found.kept) == [100, 101] and uids(found.surplus) == [102]
    assert (found.rounds, found.sampled, found.dropped) == (0, (), 0)
    found = filled(4, left, "uu", per_round=2, max_rounds=5)
    assert uids(found.kept) == [100, 101, 102, 0] and uids(found.surplus) == [1] and found.rounds == 1


def test_when_rounds_run_out_the_step_is_short() -> None:
    found = filled(3, (), "u.........", per_round=2, max_rounds=4)
    assert uids(found.kept) == [0] and (found.rounds, found.dropped) == (4, 7)
    found = filled(3, (), "....", per_round=2, max_rounds=2)
    assert (found.kept, found.surplus, found.rounds, found.dropped) == ((), (), 2, 4)


# -- through a checkpoint ---------------------------------------------------------------------------------------------------------------

PROMPTS = {uid: Prompt(uid=uid, ids=np.arange(uid + 1), text=f"{uid}+1=") for uid in range(4)}

texts = st.text(st.characters() | st.characters(categories=["Cs"]), max_size=6)  # lone surrogates too
numbers = st.floats(allow_nan=False, allow_infinity=False)
logprobs = st.lists(st.floats(max_value=0, width=32, allow_nan=False), max_size=4)
samples = st.builds(
    lambda values, finish, text: (np.array(values, dtype=np.float32), finish, text), logprobs, st.sampled_from(["stop", "length"]), texts
)
scores = st.builds(
    Score,
    numbers,
    parts=st.dictionaries(st.sampled_from(["accuracy", "format", "é"]), numbers | st.integers(), max_size=3),
    error=st.none() | texts,
    answer=st.none() | texts,
)


@st.composite
def kept_groups(draw: Callable[..., object]) -> ScoredGroup:
    drawn = draw(st.lists(st.tuples(samples, scores), max_size=3))
    assert isinstance(drawn, list)
    ids = np.random.default_rng(len(drawn)).integers(0, 2**40, 100)
    uid, step = draw(st.integers(0, 3)), draw(st.integers(0, 10**6))
    assert isinstance(uid, int) and isinstance(step, int)
    made = tuple(Sample(index, ids[: len(values)], values, finish, text) for index, ((values, finish, text), _) in enumerate(drawn))
    return ScoredGroup(Group(PROMPTS[uid], made), tuple(score for _, score in drawn), step)


def same(one: ScoredGroup, other: ScoredGroup) -> bool:
    def plain(kept: ScoredGroup) -> object:
        return (
            kept.step,
            kept.group.prompt.uid,
            [(s.index, s.ids.dtype, s.ids.tobytes(), s.logprobs.dtype, s.logprobs.tobytes(), s.finish, s.text) for s in kept.group.samples],
            # repr, since -0.0 equals 0.0 and 1 equals 1.0.
            [(repr(score.value), repr(dict(score.parts)), score.error, score.answer) for score in kept.scores],
        )

    return plain(one) == plain(other)


@settings(max_examples=200, deadline=None)
@given(st.lists(kept_groups(), max_size=5))
def test_groups_come_back_bit_for_bit(kept: list[ScoredGroup]) -> None:
    arrays, described = pack(kept)
    stored = json.loads(json.dumps(described))
    assert json.dumps(stored, ensure_ascii=False).encode()  # even where the JSON is written as it is, it is UTF-8
    found, left_out = unpack({0: {name: array.copy() for name, array in arrays.items()}}, stored, PROMPTS)
    assert left_out == 0 and len(found) == len(kept)
    assert all(map(same, found, kept))
    assert all(each.group.prompt is PROMPTS[each.group.prompt.uid] for each in found)


def test_the_hard_cases_by_name() -> None:
    """A pair of lone surrogates, which JSON would join; a number that float32 cannot hold; a minus zero; an empty response."""
    values = np.array([-0.1, np.nextafter(np.float32(-1), np.float32(0))], dtype=np.float32)
    made = (
        Sample(0, np.array([2**40, 1]), values, "stop", "a\ud83d\ude00b"),
        Sample(1, np.zeros(0, np.int64), np.zeros(0, np.float32), "length", ""),
    )
    score = Score(0.1, {"minus": -0.0, "third": 1 / 3}, answer="\ud83d\ude00")
    kept = ScoredGroup(Group(PROMPTS[2], made), (score, Score(0.0, error="Traceback \ud83d\ude00")), 12)
    arrays, described = pack([kept])
    (found,), _ = unpack({0: arrays}, json.loads(json.dumps(described)), PROMPTS)
    assert same(found, kept)
    assert len(found.group.samples[0].text) == 4 and found.scores[0].value == 0.1


def test_nothing_carried_over_is_nothing_again() -> None:
    arrays, described = pack([])
    assert {name: (array.shape, array.dtype) for name, array in arrays.items()} == {
        "ids": ((0,), np.int64),
        "logprobs": ((0,), np.float32),
        "lengths": ((0,), np.int64),
    }
    assert unpack({0: arrays}, described, PROMPTS) == ([], 0)


def test_groups_of_prompts_that_are_gone_are_left_out_and_counted() -> None:
    kept = [ScoredGroup(group(uid, 3, useful=True).group, (Score(0.0), Score(1.0)), 3) for uid in (5, 6, 7)]
    arrays, described = pack(kept)
    five, six, seven = (each.group.prompt for each in kept)
    other_row = Prompt(uid=6, ids=np.array([60]), text="")
    found, left_out = unpack({0: arrays}, described, {5: five, 6: other_row})
    assert uids(found) == [5] and left_out == 2
    found, left_out = unpack({0: arrays}, described, {6: six, 7: seven})
    assert [same(*pair) for pair in zip(found, kept[1:], strict=True)] == [True, True] and left_out == 1


# -- DAPO with nine useless groups in ten -----------------------------------------------------------------------------------------------

ModelFolders = Callable[[str], Path]

SPARSE = '''
import zlib


def one_in_ten(solution_str, ground_truth):
    """Tells samples apart for rows 3, 13, 23 and so on."""
    return zlib.crc32(solution_str.encode()) / 2**32 if int(ground_truth) % 10 == 3 else 0.0


def always(solution_str, ground_truth):
    return zlib.crc32(solution_str.encode()) / 2**32


def never(solution_str, ground_truth):
    return 1.0


def half_fail(solution_str, ground_truth):
    """1 or a failure."""
    if zlib.crc32(solution_str.encode()) % 2:
        raise RuntimeError("no opinion")
    return 1.0
'''

DAPO = {
    "model": {"path": "model"},
    "data": {"train": "sparse.jsonl", "max_prompt_tokens": 16, "shuffle": False},
    "algorithm": {"name": "dapo", "prompts_per_step": 3, "prompts_per_round": 20, "samples_per_prompt": 3, "minibatches_per_step": 2},
    "rollout": {"max_new_tokens": 6},
    "reward": {"function": "sparse.py:one_in_ten", "workers": 2},
    "train": {"lr": 2e-3},
    "health": {"ignore": ["all-clipped"]},  # a random model seldom draws its end token
    "run": {"dir": "run", "steps": 4, "save_every": 1, "keep": 9, "seed": 7, "device": "cpu"},
}


def make(folder: Path, model: Path, rows: int = 40) -> Path:
    runs.make(folder, model, DAPO)
    (folder / "sparse.py").write_text(SPARSE)
    write_sums(folder, rows)
    return folder


def write_sums(folder: Path, rows: int, added: int = 1) -> None:
    runs.write_rows(folder / "sparse.jsonl", [{"prompt": f"{n}+{added}=", "ground_truth": str(n)} for n in range(rows)])


def trained_on(folder: Path, step: int) -> list[int]:
    """Rows of the groups of a step, in order."""
    return [line["uid"] for line in runs.rollouts(folder, step) if line["sample"] == 0]


def column(folder: Path, name: str) -> list[float]:
    return [line[name] for line in runs.metrics(folder)]


@pytest.mark.long
def test_rounds_fill_a_step_and_what_is_left_over_is_used_in_the_next(tmp_path: Path, model_folders: ModelFolders) -> None:
    folder = make(tmp_path / "folder", model_folders("qwen2"))
    said = runs.train(folder).said
    assert [trained_on(folder, step) for step in (1, 2, 3, 4)] == [[3, 13, 23], [33, 3, 13], [23, 33, 3], [13, 23, 33]]
    assert column(folder, "train/num_gen_batches") == [2, 1, 2, 1]
    assert column(folder, "rollout/groups_kept") == [3, 3, 3, 3]
    assert column(folder, "rollout/groups_carried") == [1, 0, 1, 0]
    assert column(folder, "rollout/groups_dropped") == [36, 18, 36, 18]
    assert column(folder, "rollout/lag_max") == [0, 1, 0, 1]
    assert column(folder, "reward/samples") == [120, 60, 120, 60]
    assert column(folder, "reward/groups_with_variance") == [0.1] * 4
    assert column(folder, "actor/updates") == [2] * 4
    # What step 2 trained on first is what step 1 had too much of, and was not sampled again.
    (carried,) = runs.state(runs.checkpoints(folder)[1])["surplus"]
    first = runs.rollouts(folder, 2)[:3]
    assert (carried["uid"], carried["step"]) == (33, 1)
    assert [(line["response"], line["reward"]) for line in first] == [(sample["text"], sample["value"]) for sample in carried["samples"]]
    assert "warning" not in said


def test_when_rounds_run_out_the_batch_shrinks_and_the_run_says_so(tmp_path: Path, model_folders: ModelFolders) -> None:
    """One group for two mini-batches; that is one update."""
    folder = make(tmp_path / "folder", model_folders("qwen2"))
    said = runs.train(folder, "algorithm.prompts_per_round=10", "algorithm.max_rounds=1", "run.steps=2").said
    assert "warning: step 1: 1 of 3 groups after 1 round" in said and "algorithm.max_rounds" in said
    assert [trained_on(folder, step) for step in (1, 2)] == [[3], [13]]
    assert column(folder, "rollout/groups_dropped") == [9, 9]
    assert column(folder, "actor/updates") == [1, 1]
    assert all(norm > 0 for norm in column(folder, "actor/grad_norm"))


def test_the_schedule_ends_with_the_run_although_steps_are_short(tmp_path: Path, model_folders: ModelFolders) -> None:
    """Each step could make two updates and makes the first of them. The warm-up is three updates, the other five fall to nothing."""
    folder = make(tmp_path / "folder", model_folders("qwen2"))
    short = ("algorithm.prompts_per_round=10", "algorithm.max_rounds=1", "train.schedule=linear", "train.warmup_steps=3")
    runs.train(folder, *short)
    assert column(folder, "actor/updates") == [1] * 4
    assert column(folder, "actor/lr") == pytest.approx([2e-3 / 3, 2e-3, 2e-3 * 4 / 5, 2e-3 * 2 / 5])


def test_a_round_must_fit_the_data_and_a_step_need_not(tmp_path: Path, model_folders: ModelFolders) -> None:
    folder = make(tmp_path / "folder", model_folders("qwen2"), rows=8)
    with pytest.raises(UserError, match=r"a round takes 9 prompts.*only 8\. Lower algorithm\.prompts_per_round to at most 8"):
        runs.train(folder, "algorithm.prompts_per_round=9")
    assert not (folder / "run").exists()
    options = ("algorithm.prompts_per_step=10", "algorithm.prompts_per_round=4", "reward.function=sparse.py:always", "run.steps=1")
    said = runs.train(folder, *options, "run.save_rollouts=30").said
    assert trained_on(folder, 1) == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1] and column(folder, "rollout/groups_carried") == [2]
    assert "an epoch is 2 rounds of 4 prompts" in said and "1 step (2 rounds an epoch)" in said


def test_without_any_useful_group_the_update_is_left_out(tmp_path: Path, model_folders: ModelFolders) -> None:
    folder = make(tmp_path / "folder", model_folders("qwen2"))
    said = runs.train(folder, "reward.function=sparse.py:never", "algorithm.max_rounds=2", "run.steps=1").said
    assert "warning: step 1: 0 of 3 groups after 2 rounds" in said
    assert "no sample of this step can be trained on: the actor's update is left out" in said
    assert "step 1: no-variance: no group of this step has two different rewards" in said
    (line,) = runs.metrics(folder)
    assert (line["actor/updates"], line["rollout/groups_dropped"], line["reward/samples"]) == (0, 40, 120)
    before = load_file(folder / "model" / "model.safetensors")
    after = runs.parameters(runs.checkpoints(folder)[1])
    assert all(torch.equal(before[name], after[name]) for name in after)


@pytest.mark.parametrize(("policy", "useful"), [("exclude", 0), ("score", 3)])
def test_failed_rewards_count_as_the_policy_says(tmp_path: Path, model_folders: ModelFolders, policy: str, useful: int) -> None:
    """Those that did not fail are all equal: only where failures have a score of their own is there something to learn."""
    folder = make(tmp_path / "folder", model_folders("qwen2"))
    options = ("reward.function=sparse.py:half_fail", f"reward.on_error={policy}", "algorithm.samples_per_prompt=12")
    said = runs.train(folder, *options, "algorithm.prompts_per_round=4", "algorithm.max_rounds=1", "run.steps=1").said
    (line,) = runs.metrics(folder)
    assert line["rollout/groups_kept"] == useful and 0 < line["reward/errors"] < 48
    assert ("in 4 all rewards were equal or failed" in said) == (not useful)


@pytest.mark.long
def test_a_kill_with_surplus_in_hand_loses_nothing(tmp_path: Path, model_folders: ModelFolders) -> None:
    """Five useful groups a round of fifty: every second step leaves some over, the others need not sample at all."""
    options = ("algorithm.prompts_per_round=50", "run.steps=6", "run.save_every=2")
    expected = make(tmp_path / "expected", model_folders("qwen2"), rows=50)
    runs.train(expected, *options)
    assert column(expected, "train/num_gen_batches") == [1, 1, 0, 1, 0, 1]
    assert column(expected, "rollout/groups_carried") == [2, 4, 1, 3, 0, 2]
    assert all(runs.state(path)["surplus"] for path in runs.checkpoints(expected).values())

    folder = make(tmp_path / "killed", model_folders("qwen2"), rows=50)
    process = runs.start(folder, "train", "run.toml", "--json", *options, first=functools.partial(runs.hold_after, 3))
    assert all(process.stdout.readline() for _ in range(3)), (folder / "said.txt").read_text()
    while 2 not in runs.checkpoints(folder):  # which a thread writes
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL and 2 in runs.checkpoints(folder)
    resumed = runs.train(folder, *options)
    assert "resuming from step" in resumed.said
    runs.assert_equal_runs(folder, expected)

    # Other rows in the place of those that the groups were sampled for: the groups are left out, not joined to these.
    for step, path in runs.checkpoints(folder).items():
        if step > 2:
            shutil.rmtree(path)
    write_sums(folder, rows=50, added=2)
    forced = runs.train(folder, *options, "run.steps=3", "run.resume=force").said
    assert "warning: 4 groups carried over from before the checkpoint are left out" in forced
    assert runs.metrics(folder)[-1]["rollout/lag_max"] == 0


@pytest.mark.parametrize("other", sample_cases(["grpo", "sft"], "grpo"))
def test_groups_in_hand_are_left_out_by_an_algorithm_that_carries_none(tmp_path: Path, model_folders: ModelFolders, other: str) -> None:
    before = make(tmp_path / "before", model_folders("qwen2"))
    runs.train(before, "run.steps=1")
    assert len(runs.state(runs.checkpoints(before)[1])["surplus"]) == 1
    algorithm = {key: value for key, value in DAPO["algorithm"].items() if key != "prompts_per_round"} | {"name": "grpo"}
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"), runs.SFT if other == "sft" else {**DAPO, "algorithm": algorithm})
    shutil.copytree(before / "run", folder / "run")
    for name in ("sparse.py", "sparse.jsonl"):
        shutil.copy(before / name, folder)
    said = runs.train(folder, "run.steps=2", "run.save_every=1", "run.resume=force").said
    assert "warning: 1 groups carried over from before the checkpoint are left out: the algorithm carries none" in said
    last = runs.checkpoints(folder)[2]
    assert runs.state(last)["surplus"] == [] and not any(name.startswith("surplus/") for name in load_file(last / "trainer.safetensors"))
    if other == "grpo":
        assert trained_on(folder, 2) == [0, 1, 2]  # two rounds of twenty were the whole file
