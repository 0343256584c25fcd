"""Samples and their rows in the worker that drew them: on several machines, they do not pass through the driver.

Enters: groups as the engine completes them, and the driver's orders, which name groups and rows by numbers. Leaves: heads, scores and sums
for the driver, and rows for other workers, directly. Guaranteed: results equal those of a driver with all rows in its process, by the same
functions; the rows of a group stay with their group, so that only whitening needs other workers; reward functions run in processes of this
worker's machine. All workers must be called at the same time for `exchange`, `give_back` and `estimate`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from pathlib import Path
from typing import Any

import numpy as np

from fulltilt.algo.advantage import Everyone, exact_parts
from fulltilt.algo.base import Algorithm
from fulltilt.batching.pack import numbers_of_rows
from fulltilt.memory.host import usable_cores
from fulltilt.observe.metrics import RowSums, rollout_lines, write_stretches
from fulltilt.parallel.entries import COUNT, MOST_NUMBERS
from fulltilt.parallel.parcels import Parcels, pack_numbers, pack_rows, unpack_numbers, unpack_rows
from fulltilt.plan.legal import wrong_shares
from fulltilt.records import ANNOTATED_FIELDS, AnySample, Group, GroupHead, Prompt, Row, RowHead, SampleHead, Score, UserError
from fulltilt.reward.base import RewardPool, RewardStats
from fulltilt.reward.model import RewardEncoder, add_model_scores, model_weight
from fulltilt.rollout import surplus
from fulltilt.rollout.collect import ScoredGroup
from fulltilt.schema import Config, RewardConfig

WAITING_S = 5.0  # how often a worker that waits for rewards sends a sign of life
UNSENT = Prompt(-1, np.zeros(0, np.int64), "")  # stands in a head for the prompt, which the driver has


@dataclass(frozen=True)
class RowSpec:
    """Everything that a sample's row has besides its tokens."""

    group: int  # the group's place in the step
    sample: int  # the sample's place in its group
    reward: float
    parts: tuple[float, ...]  # the parts of the reward that the algorithm asks for
    baseline: float | None
    lag: int


def shaped_reward(score: Score, tokens: int, algorithm: Algorithm) -> float:
    """Return the reward, less the algorithm's penalty for long responses."""
    return score.value + (algorithm.overlong(tokens) if algorithm.overlong else 0.0)


def specify_rows(
    kept: Sequence[ScoredGroup], algorithm: Algorithm, step: int, *, exclude_errors: bool, baselines: Sequence[Score] | None = None
) -> list[RowSpec]:
    """Describe the samples that become rows, in prompt order. `exclude_errors`: whether to leave out samples whose reward or baseline
    failed."""
    found = []
    for number, entry in enumerate(kept):
        baseline = baselines[number] if baselines else None
        samples: Sequence[AnySample] = entry.group.samples
        for place, (sample, score) in enumerate(zip(samples, entry.scores, strict=True)):
            if exclude_errors and any(each.error is not None for each in (score, baseline) if each):
                continue
            reward = shaped_reward(score, sample.tokens, algorithm)
            parts = tuple(reward_part(score, name) for name in algorithm.reward_parts)
            found.append(RowSpec(number, place, reward, parts, baseline.value if baseline else None, step - entry.step))
    return found


def reward_part(score: Score, name: str) -> float:
    """Return a part of a sample's reward by its name; `score` is the whole reward. A failed reward has the same value for every part."""
    if score.error is not None or (name == "score" and name not in score.parts):
        return score.value
    if name not in score.parts:
        raise UserError(
            f"algorithm.reward_parts: the reward of a sample has no part {name!r}. Its parts: {', '.join(['score', *score.parts])}. Use "
            "these names, or have the reward function return the part in its dictionary"
        )
    return score.parts[name]


def build_row(group: Group, spec: RowSpec) -> Row:
    """Make a sample's row for the trainer."""
    prompt, sample = group.prompt.ids, group.samples[spec.sample]
    return Row(
        ids=np.concatenate([prompt, sample.ids]),
        mask=np.arange(len(prompt) + len(sample.ids)) >= len(prompt),
        group=spec.group,
        reward=spec.reward,
        parts=spec.parts,
        baseline=spec.baseline,
        lag=spec.lag,
        rollout_logprobs=np.concatenate([np.zeros(len(prompt), dtype=np.float32), sample.logprobs]),
    )


def share_of_rewards(config: RewardConfig, size: int, beside: int) -> RewardConfig:
    """Return the settings of one worker's reward processes: a machine's cores are divided among its `beside` workers, concurrent calls
    among all workers."""
    for text in wrong_shares(config, size, beside):
        raise UserError(text)
    processes = usable_cores() if config.workers == "auto" else config.workers
    calls = config.concurrency if config.concurrency == "auto" else max(1, config.concurrency // size)
    return config.model_copy(update={"workers": max(1, processes // beside), "concurrency": calls})


class AllWorkers(Everyone):
    """Statistics over all workers, which must ask for them at the same time."""

    def __init__(self, parcels: Parcels) -> None:
        self.parcels = parcels

    def gather(self, numbers: Sequence[float]) -> list[float]:
        padded = np.zeros(MOST_NUMBERS)
        padded[: len(numbers)] = numbers
        parcel = np.int64(len(numbers)).tobytes() + padded.tobytes()
        received = self.parcels.swap([parcel] * self.parcels.size)
        counts = [int(np.frombuffer(found, np.int64, 1)[0]) for found in received]
        return [
            number for found, count in zip(received, counts, strict=True) for number in np.frombuffer(found, "f8", count, COUNT).tolist()
        ]

    def sum(self, numbers: Sequence[float]) -> float:
        return fsum(self.gather(exact_parts(numbers)))


@dataclass(frozen=True)
class Visitor:
    """A row that this worker computes with, wherever it is held."""

    row: Row
    home: int  # the rank of the worker that holds it


class Shelf:
    def __init__(
        self, config: Config, algorithm: Algorithm, parcels: Parcels, reward: RewardPool | None, encoder: RewardEncoder | None
    ) -> None:
        """`reward`: None if this worker samples nothing."""
        self.config, self.algorithm, self.encoder = config, algorithm, encoder
        self._parcels, self._everyone, self._reward = parcels, AllWorkers(parcels), reward
        self.arrays: dict[str, np.ndarray] = {}  # arrays of the carried-over groups, for the next checkpoint
        self._numbers = itertools.count()
        self._groups: dict[int, Group] = {}
        self._scores: dict[int, list[Score]] = {}  # scores by functions only, until the reward model's are added
        self._judged: dict[int, list[Hashable | str]] = {}  # for each sample, the key of its row for the reward model, or why it has none
        self._rows: dict[Hashable, Row] = {}
        # Rows that this worker computes with, by purpose, then by index in the list that the driver plans with.
        self._visitors: dict[str, dict[int, Visitor]] = {}
        self._lent: dict[str, dict[int, Hashable]] = {}  # keys of rows held here that other workers compute with, in the same way
        self._found: dict[str, dict[int, np.ndarray]] = {}  # numbers that passes have computed for visiting rows

    def carried(self) -> float:
        """Return how much workers have exchanged: while a transfer hangs, the number does not grow."""
        return self._parcels.carried

    # -- samples and scores ---------------------------------------------------------------------------------------------------------

    def keep(self, group: Group) -> GroupHead:
        """Hold a group that was just sampled, and have it scored."""
        assert self._reward
        with contextlib.suppress(UserError):  # an earlier group's error: `collect` raises it, when all workers are ready for that
            self._reward.submit(group)
        return self.adopt([group])[0]

    def adopt(self, groups: Sequence[Group]) -> list[GroupHead]:
        """Hold groups, which are scored elsewhere."""
        found = []
        for group in groups:
            number = next(self._numbers)
            self._groups[number] = group
            heads = tuple(SampleHead(sample.index, sample.finish, sample.tokens) for sample in group.samples)
            found.append(GroupHead(UNSENT, heads, group.place, self._parcels.rank, number))
        return found

    def collect(self, numbers: Sequence[int]) -> Generator[None, None, list[list[Score]]]:
        """Return the scores of groups by their functions. While waiting, yields None now and then."""
        if not numbers:
            return []
        assert self._reward
        groups = [self._groups[number] for number in numbers]
        while not self._reward.wait(groups, WAITING_S):
            yield
        found = self._reward.collect(groups)
        if self.encoder:
            self._scores |= zip(numbers, found, strict=True)
        return found

    def encode(self, numbers: Sequence[int]) -> list[list[RowHead | str]]:
        """Make rows for the reward model, for each group whose reward names it. A string in place of a head says why a sample has no
        row."""
        assert self.encoder
        found = []
        for number in numbers:
            group = self._groups[number]
            written = self.encoder.rows([group]) if model_weight(group, self.config.reward) is not None else []
            heads: list[RowHead | str] = []
            for place, row in enumerate(written):
                key = ("reward_model", number, place)
                if isinstance(row, Row):
                    self._rows[key] = row
                heads.append(row if isinstance(row, str) else RowHead(self._parcels.rank, key, row.tokens, row.trained))
            self._judged[number] = [head if isinstance(head, str) else head.key for head in heads]
            found.append(heads)
        return found

    def judged(self, numbers: Sequence[int]) -> list[list[Score]]:
        """Return the scores of groups with the reward model's numbers, which the rows have by now."""
        groups, scores = [self._groups[number] for number in numbers], [self._scores.pop(number) for number in numbers]
        written = [each for number in numbers for each in self._judged.pop(number)]
        found = [each if isinstance(each, str) else self._model_value(each) for each in written]
        return add_model_scores(groups, scores, found, self.config.reward)

    def _model_value(self, key: Hashable) -> float:
        values = self._rows.pop(key).values
        assert values is not None
        return float(values[-1])

    def report(self) -> tuple[RewardStats, list[str]]:
        """Return counts of reward calls, and notes on the functions."""
        return (self._reward.stats(), self._reward.take_notes()) if self._reward else (RewardStats(), [])

    def write_lines(self, numbers: Sequence[int], path: Path, scores: Sequence[Sequence[Score]]) -> list[int]:
        """Write groups as lines for people, if there are any groups. Returns the bytes of each group."""
        if not numbers:
            return []
        return write_stretches(path, [rollout_lines(self._groups[number], own) for number, own in zip(numbers, scores, strict=True)])

    def texts(self, places: Sequence[tuple[int, int]]) -> list[str]:
        return [self._groups[number].samples[place].text for number, place in places]

    def carry(self, numbers: Sequence[int]) -> None:
        """Keep these groups for the next checkpoint, in this order. The driver saves their scores."""
        self.arrays = surplus.pack_samples([self._groups[number] for number in numbers]) if numbers else {}

    def release(self, numbers: Sequence[int]) -> list[str]:
        """Drop all rows, and all groups but these. Returns new lines for the file of failed reward calls."""
        self._groups = {number: self._groups[number] for number in numbers}
        self._visitors, self._lent, self._rows, self._found = {}, {}, {}, {}
        return self.take_errors()

    def take_errors(self) -> list[str]:
        """Return new lines for the file of failed reward calls."""
        return self._reward.take_errors() if self._reward else []

    # -- rows -----------------------------------------------------------------------------------------------------------------------

    def make_rows(self, specs: Mapping[int, tuple[int, RowSpec]]) -> None:
        """Make the rows of a step from groups held here. `specs`: by the row's index in the step, the group's number and the row's
        description."""
        self._rows = {index: build_row(self._groups[number], spec) for index, (number, spec) in specs.items()}

    def exchange(self, purpose: str, wanted: Sequence[Mapping[int, Hashable]], whole: bool) -> None:
        """Send rows to the workers that compute with them. `wanted`: for each worker, the keys of rows held here, by their indices in the
        driver's plan. `whole`: whether to send all numbers, rather than only those that a pass reads."""
        own = self._parcels.rank
        sent = [[(index, self._sent(key, whole=whole)) for index, key in each.items()] for each in wanted]
        stay, sent[own] = sent[own], []
        received = self._parcels.swap([pack_rows(rows) for rows in sent])
        found = [(own, stay), *((home, unpack_rows(parcel)) for home, parcel in enumerate(received))]
        self._visitors[purpose] = {index: Visitor(row, home) for home, rows in found for index, row in rows}
        self._lent[purpose] = {index: key for each in wanted for index, key in each.items()}

    def _sent(self, key: Hashable, *, whole: bool) -> Row:
        nothing: dict[str, Any] = dict.fromkeys(ANNOTATED_FIELDS)
        return self._rows[key] if whole else replace(self._rows[key], **nothing)

    def visiting(self, purpose: str) -> dict[int, Row]:
        """Return the rows that were sent here for a purpose, by their indices in the driver's plan."""
        return {index: visitor.row for index, visitor in self._visitors[purpose].items()}

    def note(self, purpose: str, plan: Sequence[Sequence[int]], numbers: Sequence[np.ndarray]) -> None:
        """Remember a pass's number for each trained token of these micro-batches, for `give_back`."""
        self._found[purpose] = numbers_of_rows(self.visiting(purpose), plan, numbers)

    def give_back(self, field: str) -> None:
        """Send a pass's numbers for this field to the workers that hold the rows."""
        own, visitors, keys = self._parcels.rank, self._visitors.pop(field), self._lent.pop(field)
        sent: list[list[tuple[int, np.ndarray]]] = [[] for _ in range(self._parcels.size)]
        for index, numbers in self._found.pop(field, {}).items():
            sent[visitors[index].home].append((index, numbers))
        stay, sent[own] = sent[own], []
        received = self._parcels.swap([pack_numbers(numbers) for numbers in sent])
        for index, numbers in [*stay, *(each for parcel in received for each in unpack_numbers(parcel))]:
            self._rows[keys[index]] = replace(self._rows[keys[index]], **{field: numbers})  # type: ignore[arg-type]

    # -- advantages -----------------------------------------------------------------------------------------------------------------

    def correct(self) -> None:
        """Compare the rows with the engine that sampled them: reject rows that differ too much, and weight the others."""
        assert self.algorithm.correct
        rows = self.algorithm.correct(list(self._rows.values()), everyone=self._everyone)
        self._rows = dict(zip(self._rows, rows, strict=True))

    def penalise(self, coef: float) -> list[float]:
        """Subtract the KL penalty from the rewards. Returns the mean KL of each row."""
        assert self.algorithm.reward_kl
        rows, means = self.algorithm.reward_kl.penalise(list(self._rows.values()), coef)
        self._rows = dict(zip(self._rows, rows, strict=True))
        return means

    def estimate(self) -> None:
        """Give the rows their advantages."""
        rows = self.algorithm.advantage(list(self._rows.values()), everyone=self._everyone)
        self._rows = dict(zip(self._rows, rows, strict=True))

    def rows(self) -> list[Row]:
        """Return all rows of the step that are held here, in order."""
        return list(self._rows.values())

    def assign(self, fields: Sequence[Mapping[str, Any]]) -> None:
        """Set these fields of the rows held here. `fields`: one mapping per row."""
        self._rows = {key: replace(row, **own) for (key, row), own in zip(self._rows.items(), fields, strict=True)}

    def summarise(self) -> tuple[list[tuple[bool, int]], RowSums]:
        """Return, for each row, whether it teaches anything and how many of its tokens are trained on; and sums for metrics."""
        rows = self.rows()
        return [(row.teaches, row.trained) for row in rows], RowSums.of(rows)

    def close(self) -> None:
        if self._reward:
            self._reward.close()
