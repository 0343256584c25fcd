"""Statistics of a validation, under verl's names.

Enters: the validation groups and the score of each of their samples. Leaves: one number per name, and a few samples for people. Guaranteed:
the statistics of K out of a prompt's N samples (`best@K`, `worst@K`, `maj@K`) are exact expectations over all ways to draw K of them
without replacement, and use no random numbers; a failed reward counts only in the number of failures; a statistic without any value is
left out. Free of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import comb
from typing import Any

import numpy as np

from fulltilt.observe.metrics import mean_of
from fulltilt.records import AnyGroup, Group, Score

# Variables whose statistics over all N samples go to `val-core`, as in verl: the reward and, if the reward function returns it, accuracy.
REWARD = "reward"
CORE = (REWARD, "acc")

MOST_VOTERS = 128  # with more samples, only the majority of all N is computed: maj@K would take seconds

COLUMNS = ("uid", "source", "sample", "prompt", "response", "ground_truth", "answer", "reward", "finish", "error")

Values = tuple[list[float], list[str | None]]  # one variable of a prompt's successfully scored samples, and their answers


def summarise(groups: Sequence[AnyGroup], scores: Sequence[Sequence[Score]], samples: int) -> dict[str, float]:
    """Return every number of a validation with `samples` samples per prompt. `scores` holds, for each group, the score of each of its
    samples."""
    good = [[score for score in of_group if score.error is None] for of_group in scores]
    of_source: dict[str, list[Sequence[Score]]] = {}
    for group, of_group in zip(groups, good, strict=True):
        of_source.setdefault(group.prompt.data_source, []).append(of_group)
    lengths = [sample.tokens for group in groups for sample in group.samples]
    return {
        **mean_of("val/reward/mean", (score.value for of_group in good for score in of_group)),
        **{name: value for source, prompts in of_source.items() for name, value in _source(source, prompts, samples).items()},
        "val/prompts": len(groups),
        **mean_of("val/response_length/mean", lengths),
        "val/reward_errors": sum(score.error is not None for of_group in scores for score in of_group),
    }


def texts_of(places: Sequence[tuple[Group, int]]) -> list[str]:
    """Return the texts of samples, each given by its group and its index there."""
    return [group.samples[index].text for group, index in places]


def sample_rows(
    groups: Sequence[AnyGroup], scores: Sequence[Sequence[Score]], limit: int, read: Callable[..., list[str]] = texts_of
) -> tuple[list[str], list[list[Any]]]:
    """Return up to `limit` samples for people: prompts spread evenly over the data, the same in every validation, first samples first.
    `read` returns texts, as `texts_of` does."""
    shown = min(limit, len(groups))
    chosen = [number * len(groups) // shown for number in range(shown)]
    most = max((len(groups[number].samples) for number in chosen), default=0)
    places = [(number, index) for index in range(most) for number in chosen if index < len(groups[number].samples)][:limit]
    texts = read([(groups[number], index) for number, index in places])
    return list(COLUMNS), [_row(groups[each], index, text, scores[each][index]) for (each, index), text in zip(places, texts, strict=True)]


def _row(group: AnyGroup, index: int, text: str, score: Score) -> list[Any]:
    prompt, sample = group.prompt, group.samples[index]
    truth = None if prompt.ground_truth is None else str(prompt.ground_truth)
    reward = score.value if score.error is None else None
    return [
        prompt.uid, prompt.data_source, sample.index, prompt.text, text, truth, score.answer, reward, sample.finish, score.error,
    ]  # fmt: skip


# ---- one data source -------------------------------------------------------------------------------------------------------------------


def _source(source: str, prompts: Sequence[Sequence[Score]], samples: int) -> dict[str, float]:
    # As in verl, `reward` is the score itself: a part of that name is not shown.
    parts = dict.fromkeys(name for prompt in prompts for score in prompt for name in score.parts if name != REWARD)
    found: dict[str, float] = {}
    whole = tuple(f"{what}@{samples}" for what in ("mean", "best", "maj"))
    for variable in (REWARD, *parts):
        values = [_values(prompt, variable) for prompt in prompts]
        for name, value in _statistics(values, samples, only_mean=variable not in CORE).items():
            section = "val-core" if variable in CORE and name.partition("/")[0] in whole else "val-aux"
            found[f"{section}/{source}/{variable}/{name}"] = value
    return found


def _values(prompt: Sequence[Score], variable: str) -> Values:
    """Return one variable of a prompt's samples, with the samples' answers."""
    with_it = [score for score in prompt if variable == REWARD or variable in score.parts]
    return [score.value if variable == REWARD else score.parts[variable] for score in with_it], [score.answer for score in with_it]


def _statistics(prompts: Sequence[Values], samples: int, *, only_mean: bool) -> dict[str, float]:
    """Return means over prompts. A prompt with fewer than K successfully scored samples is left out of the statistics of K."""
    found = mean_of(f"mean@{samples}", (_average(values) for values, _ in prompts if values))
    if samples == 1 or only_mean:
        return found
    found |= mean_of(f"std@{samples}", (float(np.std(values)) for values, _ in prompts if values))
    answered = any(answer is not None for _, answers in prompts for answer in answers)
    for size in sizes(samples):
        enough = [(values, answers) for values, answers in prompts if len(values) >= size]
        found |= mean_of(f"best@{size}/mean", (best_of(values, size) for values, _ in enough))
        found |= mean_of(f"worst@{size}/mean", (-best_of([-value for value in values], size) for values, _ in enough))
        if answered and (size == samples or samples <= MOST_VOTERS):
            found |= mean_of(f"maj@{size}/mean", (majority_of(values, answers, size) for values, answers in enough))
    return found


def sizes(samples: int) -> list[int]:
    """Return the K of best@K: powers of two below N, and N itself."""
    return [*(2**power for power in range(1, samples.bit_length()) if 2**power < samples), *([samples] if samples > 1 else [])]


def _average(values: Sequence[float]) -> float:
    return float(np.mean(values))


# ---- K of N samples --------------------------------------------------------------------------------------------------------------------


def best_of(values: Sequence[float], size: int) -> float:
    """Return the expected maximum of `size` of the values: the i-th smallest is the maximum in C(i - 1, size - 1) of the C(N, size)
    draws."""
    draws = comb(len(values), size)
    return sum(value * (comb(rank, size - 1) / draws) for rank, value in enumerate(sorted(values)))


def majority_of(values: Sequence[float], answers: Sequence[str | None], size: int) -> float:
    """Return the expected value of the answer that most of `size` samples gave.

    The value of an answer is the mean value of the samples that gave it; tied answers count with their average. A sample without an answer
    has no vote; the value of a draw without any vote is the mean of its samples.
    """
    with_answer: dict[str, list[float]] = {}
    blank: list[float] = []
    for value, answer in zip(values, answers, strict=True):
        (blank if answer is None else with_answer.setdefault(answer, [])).append(value)
    if size == len(values):
        most = max(map(len, with_answer.values()), default=0)
        return _average([_average(each) for each in with_answer.values() if len(each) == most] or blank)
    # Given how many of an answer's samples are drawn, every choice of them is equally likely, so their expected mean value is that of all
    # samples with the answer. It is enough to enumerate the numbers of votes instead of the draws.
    counts = tuple(sorted(map(len, with_answer.values())))
    silent = comb(len(blank), size) / comb(len(values), size)
    return sum(
        (_average(each) * win_share(len(each), counts, len(blank), size) for each in with_answer.values()),
        start=silent * _average(blank) if silent else 0.0,
    )


@lru_cache(maxsize=4096)
def win_share(count: int, counts: tuple[int, ...], blank: int, size: int) -> float:
    """Return how often an answer that `count` samples gave wins, a tie among t answers counting 1/t. `counts` are the votes of all answers,
    this one included, sorted; `blank` samples have no vote."""
    others = list(counts)
    others.remove(count)
    share = 0.0
    for votes in range(1, min(count, size) + 1):
        # ways[t, s]: draws in which the others and the blanks are s of the samples, t others have just as many votes, and none has more.
        ways = np.zeros((size // votes + 1, size - votes + 1))
        ways[0] = [comb(blank, drawn) for drawn in range(size - votes + 1)]
        for other in others:
            before = ways.copy()
            for drawn in range(1, min(other, votes, size - votes) + 1):
                tied = int(drawn == votes)
                added = float(comb(other, drawn)) * before[: len(ways) - tied, : size - votes + 1 - drawn]
                ways[tied:, drawn:] += added
        share += comb(count, votes) * float(np.sum(ways[:, -1] / np.arange(1, len(ways) + 1)))
    return share / comb(sum(counts) + blank, size)
