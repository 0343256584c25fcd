"""Statistics of a validation, against brute force over every draw."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fulltilt.observe import validation
from fulltilt.observe.validation import best_of, majority_of, sample_rows, sizes, summarise
from fulltilt.records import Group, Prompt, Sample, Score

VALUES = st.floats(-4, 4, width=32)
ANSWERS = st.sampled_from(["5", "6", "7", "8", None])
# Sums of up to 70 draws, in another order: a few roundings of numbers up to 4.
CLOSE = {"rel": 1e-12, "abs": 1e-12}


def group(uid: int, samples: int, source: str = "sums", truth: object = "5") -> Group:
    prompt = Prompt(uid, np.arange(3), f"2+3= ({uid})", source, truth)
    drawn = (
        Sample(index, np.arange(index + 1), np.zeros(index + 1, dtype=np.float32), "stop", f"answer {uid}.{index}")
        for index in range(samples)
    )
    return Group(prompt, tuple(drawn))


def scores(*values: float, answers: Sequence[str | None] = ()) -> list[Score]:
    return [Score(value, answer=answer) for value, answer in zip(values, answers or [None] * len(values), strict=True)]


FAILED = Score(-100.0, {"acc": -100.0}, error="ran out of time", answer="100")


# ---- K of N, by brute force


def vote(drawn: Sequence[tuple[float, str | None]]) -> float:
    """A majority vote as one would hold it by hand."""
    votes = Counter(answer for _, answer in drawn if answer is not None)
    if not votes:
        return math.fsum(value for value, _ in drawn) / len(drawn)
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    worth = [math.fsum(value for value, answer in drawn if answer == winner) / votes[winner] for winner in winners]
    return math.fsum(worth) / len(worth)


@settings(max_examples=60, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=8), st.data())
def test_best_of_is_the_mean_over_all_draws(values: list[float], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(values)))
    expected = math.fsum(max(drawn) for drawn in combinations(values, size)) / math.comb(len(values), size)
    assert best_of(values, size) == pytest.approx(expected, **CLOSE)


@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(VALUES, ANSWERS), min_size=1, max_size=8), st.data())
def test_majority_of_is_the_mean_over_all_draws(samples: list[tuple[float, str | None]], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(samples)))
    expected = math.fsum(vote(drawn) for drawn in combinations(samples, size)) / math.comb(len(samples), size)
    values, answers = zip(*samples, strict=True)
    assert majority_of(values, answers, size) == pytest.approx(expected, **CLOSE)


def test_majority_of_many_samples_is_a_probability() -> None:
    """The numbers of ways are beyond float64's whole numbers at the most samples that are voted on: worth 1 each, answers must give 1."""
    answers = [str(number % 17) if number % 5 else None for number in range(validation.MOST_VOTERS)]
    for size in sizes(len(answers)):
        assert majority_of([1.0] * len(answers), answers, size) == pytest.approx(1.0, rel=1e-12)


def test_sizes() -> None:
    assert [sizes(samples) for samples in (1, 2, 3, 4, 6, 8)] == [[], [2], [2, 3], [2, 4], [2, 4, 6], [2, 4, 8]]


# ---- names and numbers


def test_one_sample_per_prompt() -> None:
    found = summarise([group(0, 1), group(1, 1)], [scores(1.0), scores(0.0)], 1)
    assert found == {
        "val/reward/mean": 0.5,
        "val-core/sums/reward/mean@1": 0.5,
        "val/prompts": 2,
        "val/response_length/mean": 1.0,
        "val/reward_errors": 0,
    }


def test_names_are_verls() -> None:
    """Over all N samples in val-core, over fewer in val-aux; accuracy like the reward; a part only as its mean."""
    parts = [{"acc": 1.0, "format": 0.5}, {"acc": 0.0, "format": 0.5}, {"acc": 0.0, "format": 1.0}, {"acc": 1.0}]
    given = [Score(2 * part["acc"] - 1, part, answer=str(part["acc"])) for part in parts]
    found = summarise([group(0, 4)], [given], 4)
    core = {f"val-core/sums/{name}/{what}" for name in ("reward", "acc") for what in ("mean@4", "best@4/mean", "maj@4/mean")}
    of_fewer = ("std@4", "worst@4/mean", "best@2/mean", "worst@2/mean", "maj@2/mean")
    assert {name for name in found if name.startswith("val-core/")} == core
    assert {name for name in found if name.startswith("val-aux/")} == {
        "val-aux/sums/format/mean@4", *(f"val-aux/sums/{name}/{what}" for name in ("reward", "acc") for what in of_fewer)
    }  # fmt: skip
    assert found["val-aux/sums/format/mean@4"] == pytest.approx(2 / 3)
    assert found["val-core/sums/reward/mean@4"] == 0 and found["val-core/sums/acc/mean@4"] == 0.5
    assert found["val-aux/sums/reward/std@4"] == 1 and found["val-aux/sums/acc/std@4"] == 0.5
    assert found["val-core/sums/reward/best@4/mean"] == 1 and found["val-aux/sums/reward/worst@4/mean"] == -1
    # Of the six pairs one is right twice, one wrong twice, and four are one of each.
    assert found["val-aux/sums/reward/best@2/mean"] == pytest.approx(4 / 6)
    assert found["val-aux/sums/reward/worst@2/mean"] == pytest.approx(-4 / 6)
    assert found["val-core/sums/reward/maj@4/mean"] == 0  # a tie of right and wrong


def test_sources_apart_and_prompts_alike() -> None:
    """A number of a source is the mean over its prompts, however many of their samples were good."""
    groups = [group(0, 2, "a"), group(1, 2, "b/c"), group(2, 2, "a")]
    found = summarise(groups, [scores(1.0, 0.0), scores(0.25, 0.75), [Score(1.0), FAILED]], 2)
    assert found["val-core/a/reward/mean@2"] == 0.75
    assert found["val-core/b/c/reward/mean@2"] == 0.5
    assert found["val/reward/mean"] == pytest.approx(3 / 5)
    assert not any("maj@" in name for name in found)  # no score carries an answer


def test_failed_rewards_have_no_part() -> None:
    groups = [group(0, 4), group(1, 4), group(2, 4)]
    few = [Score(3.0, answer="a"), Score(1.0, answer="b"), FAILED, FAILED]
    found = summarise(groups, [scores(0.0, 1.0, 2.0, 3.0, answers=["a", "a", "b", None]), few, [FAILED] * 4], 4)
    assert found["val/reward_errors"] == 6
    assert found["val/reward/mean"] == pytest.approx(10 / 6)
    assert found["val-core/sums/reward/mean@4"] == pytest.approx((1.5 + 2.0) / 2)
    assert found["val-aux/sums/reward/best@2/mean"] == pytest.approx((best_of([0, 1, 2, 3], 2) + 3) / 2)
    # Only the first prompt has four good samples.
    assert found["val-core/sums/reward/best@4/mean"] == 3 and found["val-core/sums/reward/maj@4/mean"] == 0.5
    assert not any("acc" in name for name in found)


def test_nothing_but_failures() -> None:
    assert summarise([group(0, 2)], [[FAILED, FAILED]], 2) == {
        "val/prompts": 1,
        "val/response_length/mean": 1.5,
        "val/reward_errors": 2,
    }
    assert summarise([], [], 2) == {"val/prompts": 0, "val/reward_errors": 0}


def test_majorities_of_a_part_end_where_they_become_costly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "MOST_VOTERS", 3)
    found = summarise([group(0, 4)], [scores(0.0, 1.0, 2.0, 3.0, answers=["a", "a", "b", "c"])], 4)
    assert [name for name in found if "maj@" in name] == ["val-core/sums/reward/maj@4/mean"]
    assert "val-aux/sums/reward/best@2/mean" in found


# ---- samples to look at


def test_rows_are_spread_over_the_prompts() -> None:
    groups = [group(uid, 2, source="a" if uid < 3 else "b") for uid in range(6)]
    given = [[Score(uid / 2, answer=str(uid)), FAILED] for uid in range(6)]
    columns, rows = sample_rows(groups, given, 3)
    assert [dict(zip(columns, row, strict=True))["uid"] for row in rows] == [0, 2, 4]
    assert dict(zip(columns, rows[2], strict=True)) == {
        "uid": 4, "source": "b", "sample": 0, "prompt": "2+3= (4)", "response": "answer 4.0", "ground_truth": "5", "answer": "4",
        "reward": 2.0, "finish": "stop", "error": None,
    }  # fmt: skip
    _, rows = sample_rows(groups, given, 8)
    shown = [dict(zip(columns, row, strict=True)) for row in rows]
    assert [(row["uid"], row["sample"]) for row in shown] == [*((uid, 0) for uid in range(6)), (0, 1), (1, 1)]
    assert (shown[-1]["reward"], shown[-1]["error"]) == (None, "ran out of time")
    assert len(sample_rows(groups, given, 100)[1]) == 12
    assert sample_rows(groups, given, 0) == (columns, []) and sample_rows([], [], 4) == (columns, [])
