"""The samples of a run, as the loop uses them: held here in the driver or, on several machines, by the workers that drew them.

Enters: prompts. Leaves: groups with their scores, rows with advantages, sums for metrics, files for people, arrays for checkpoints. Both
classes have the same methods. The loop gets and gives back whole groups and rows, or only their heads; it reads no more than heads have, so
its code is the same. Guaranteed: both classes compute the same, metrics up to the order in which numbers are added; on several machines
neither tokens nor texts pass through the driver, except for a user's own advantage function, which reads all rows, for the few samples that
a logger shows after a validation, and for carried-over groups when a run is resumed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from fulltilt.algo.base import Algorithm
from fulltilt.batching.schedule import in_order
from fulltilt.cluster.crew import Crew
from fulltilt.cluster.hosts import WorkerError
from fulltilt.cluster.shelf import build_row, specify_rows
from fulltilt.observe.metrics import RolloutFiles, RowSums
from fulltilt.observe.validation import texts_of
from fulltilt.records import Group, GroupHead, Prompt, Row, RowHead, Score
from fulltilt.reward.base import ERRORS_FILE, RewardPool, RewardStats, append_errors
from fulltilt.reward.model import RewardEncoder, add_model_scores, model_weight
from fulltilt.rollout import surplus
from fulltilt.rollout.collect import ScoredGroup, collect
from fulltilt.rollout.sampler import Sampling
from fulltilt.schema import Config

Judge = Callable[[Sequence[Any]], list[Any]]  # returns the reward model's values of rows
Say = Callable[[str], None]
GATHERED = "algorithm.advantage: the rows of every step are sent to the driver, since this function reads all of them"


@dataclass(frozen=True, eq=False)
class Estimated:
    rows: list[Any]  # with advantages
    divergences: list[float]  # with a KL penalty: the mean KL of each row; otherwise empty
    sums: RowSums


class SamplesHere:
    """Samples in this process, with reward functions in processes of this machine."""

    def __init__(self, config: Config, algorithm: Algorithm, crew: Crew, reward: RewardPool, encoder: RewardEncoder | None) -> None:
        self.config, self.algorithm, self.crew, self.reward, self.encoder = config, algorithm, crew, reward, encoder

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int, on_group: Callable[[], None]) -> tuple[Group, ...]:
        """Sample one group for each prompt. Complete groups are scored while the others are sampled."""

        def hand_over(group: Group) -> None:
            self.reward.submit(group)
            on_group()

        return collect(self.crew.generate, prompts, sampling, seed, hand_over)

    def score(self, groups: Sequence[Group], judge: Judge, warn: Say) -> list[list[Score]]:
        """Return the scores of sampled groups, in their order."""
        scores = self.reward.collect(groups)
        if self.encoder is None:
            return scores
        written = self.encoder.rows([group for group in groups if model_weight(group, self.config.reward) is not None])
        warn_of_unread(written, warn)
        found = iter(float(row.values[-1]) for row in judge([row for row in written if isinstance(row, Row)]))
        return add_model_scores(groups, scores, [row if isinstance(row, str) else next(found) for row in written], self.config.reward)

    def rows(self, kept: Sequence[ScoredGroup], step: int, *, exclude_errors: bool, baselines: Sequence[Score] | None) -> list[Row]:
        """Make rows for the trainer, in prompt order."""
        specs = specify_rows(kept, self.algorithm, step, exclude_errors=exclude_errors, baselines=baselines)
        return [build_row(entry, spec) for spec in specs if isinstance(entry := kept[spec.group].group, Group)]

    def estimate(self, rows: Sequence[Row], coef: float | None) -> Estimated:
        """Give rows their advantages. `coef`: the weight of the KL penalty, if the algorithm has one."""
        penalised, divergences = list(rows), list[float]()
        if self.algorithm.correct:
            penalised = self.algorithm.correct(penalised)
        if self.algorithm.reward_kl and coef is not None:
            penalised, divergences = self.algorithm.reward_kl.penalise(penalised, coef)
        found = self.algorithm.advantage(penalised)
        return Estimated(found, divergences, RowSums.of(found))

    def write(self, files: RolloutFiles, step: int, groups: Sequence[Group], scores: Sequence[Sequence[Score]]) -> None:
        files.write(step, groups, scores)

    def texts(self, places: Sequence[tuple[Group, int]]) -> list[str]:
        """Return the texts of samples. `places`: each sample's group and its place in the group."""
        return texts_of(places)

    def stats(self) -> RewardStats:
        """Return counts of reward calls since the run was started."""
        return self.reward.stats()

    def take_notes(self) -> list[str]:
        return self.reward.take_notes()

    def pack(self, kept: Sequence[ScoredGroup]) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
        """Pack carried-over groups for a checkpoint: arrays, and entries for its state."""
        return surplus.pack(kept) if kept else ({}, [])

    def adopt(self, kept: Sequence[ScoredGroup]) -> tuple[ScoredGroup, ...]:
        """Take over the carried-over groups of a checkpoint."""
        return tuple(kept)

    def release(self, kept: Sequence[ScoredGroup]) -> None:
        """Drop all groups but these."""

    def close(self) -> None:
        self.reward.close()


class SamplesThere:
    """Samples held by the workers that drew them, each with reward processes on its machine."""

    def __init__(self, config: Config, algorithm: Algorithm, crew: Crew, encoder: RewardEncoder | None, *, write_errors: bool) -> None:
        self.config, self.algorithm, self.crew, self.encoder = config, algorithm, crew, encoder
        self._errors_file = Path(config.run.dir) / ERRORS_FILE if write_errors else None
        self._notes: dict[str, bool] = {GATHERED: False} if algorithm.own_advantage else {}  # whether each note was shown

    def _held(self, method: str, *args: Any, what: str) -> list[Any]:
        """Make the same call on every worker, and return the results."""
        return self.crew.held(method, [args] * self.crew.hosts.size, what=what)

    def _of(self, method: str, groups: Sequence[GroupHead], *beside: Sequence[Any], what: str) -> list[Any]:
        """Call a method that returns one result per group, and return the results in the order of groups. `beside`: further arguments, one
        per group."""
        places = self._places(groups)
        args = [([groups[place].number for place in own], *([each[place] for place in own] for each in beside)) for own in places]
        return in_order(places, self.crew.held(method, args, what=what))

    def _places(self, heads: Sequence[GroupHead | RowHead]) -> list[list[int]]:
        """Return, for each worker, the places of the heads whose samples it holds."""
        return [[place for place, head in enumerate(heads) if head.home == rank] for rank in range(self.crew.hosts.size)]

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int, on_group: Callable[[], None]) -> tuple[GroupHead, ...]:
        return collect(self.crew.generate, prompts, sampling, seed, lambda group: on_group())

    def score(self, groups: Sequence[GroupHead], judge: Judge, warn: Say) -> list[list[Score]]:
        scores = self._of("collect", groups, what="reward")
        if self.encoder is None:
            return scores
        written = [head for heads in self._of("encode", groups, what="reward") for head in heads]
        warn_of_unread(written, warn)
        judge([head for head in written if isinstance(head, RowHead)])
        return self._of("judged", groups, what="reward")

    def rows(self, kept: Sequence[ScoredGroup], step: int, *, exclude_errors: bool, baselines: Sequence[Score] | None) -> list[RowHead]:
        specs = specify_rows(kept, self.algorithm, step, exclude_errors=exclude_errors, baselines=baselines)
        heads, wanted = [], [dict[int, Any]() for _ in range(self.crew.hosts.size)]
        for index, spec in enumerate(specs):
            group = kept[spec.group].group
            assert isinstance(group, GroupHead)
            trained = group.samples[spec.sample].tokens
            heads.append(RowHead(group.home, index, len(group.prompt.ids) + trained, trained, spec.group, spec.lag))
            wanted[group.home][index] = (group.number, spec)
        self.crew.held("make_rows", [(own,) for own in wanted], what="rows")
        return heads

    def estimate(self, rows: Sequence[RowHead], coef: float | None) -> Estimated:
        places, divergences = self._places(rows), list[float]()
        if self.algorithm.correct:
            self._held("correct", what="advantage")
        if self.algorithm.reward_kl and coef is not None:
            divergences = in_order(places, self._held("penalise", coef, what="advantage"))
        if self.algorithm.own_advantage:
            whole = self.algorithm.advantage(in_order(places, self._held("rows", what="advantage")))
            fields = [{"advantages": row.advantages, "returns": row.returns} for row in whole]
            self.crew.held("assign", [([fields[place] for place in own],) for own in places], what="advantage")
        else:
            self._held("estimate", what="advantage")
        found: list[tuple[list[tuple[bool, int]], RowSums]] = self._held("summarise", what="advantage")
        about = in_order(places, [each for each, _ in found])
        heads = [replace(row, teaches=teaches, trained=trained) for row, (teaches, trained) in zip(rows, about, strict=True)]
        return Estimated(heads, divergences, reduce(RowSums.__add__, (sums for _, sums in found)))

    def write(self, files: RolloutFiles, step: int, groups: Sequence[GroupHead], scores: Sequence[Sequence[Score]]) -> None:
        """Have each worker write its lines to a file, and join the files in order."""
        shown = files.shown(groups)
        places = self._places(shown)
        args = [
            ([shown[place].number for place in own], files.part(step, rank), [scores[place] for place in own])
            for rank, own in enumerate(places)
        ]
        sizes = in_order(places, self.crew.held("write_lines", args, what="rollouts"))
        files.join(step, [(group.home, size) for group, size in zip(shown, sizes, strict=True)])

    def texts(self, places: Sequence[tuple[GroupHead, int]]) -> list[str]:
        heads = [group for group, _ in places]
        asked = [[(heads[place].number, places[place][1]) for place in own] for own in self._places(heads)]
        return in_order(self._places(heads), self.crew.held("texts", [(own,) for own in asked], what="texts"))

    def stats(self) -> RewardStats:
        found: list[tuple[RewardStats, list[str]]] = self._held("report", what="reward")
        self._notes = {note: False for _, notes in found for note in notes} | self._notes
        return reduce(RewardStats.__add__, (stats for stats, _ in found))

    def take_notes(self) -> list[str]:
        new = [note for note, told in self._notes.items() if not told]
        self._notes |= dict.fromkeys(new, True)
        return new

    def pack(self, kept: Sequence[ScoredGroup]) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
        """Have each worker keep the arrays of its groups for the checkpoint."""
        groups = heads_of(kept)
        self.crew.held("carry", [([groups[place].number for place in own],) for own in self._places(groups)], what="save")
        return {}, [surplus.described(each) for each in kept]

    def adopt(self, kept: Sequence[ScoredGroup]) -> tuple[ScoredGroup, ...]:
        places = [list(range(rank, len(kept), self.crew.hosts.size)) for rank in range(self.crew.hosts.size)]
        found = in_order(places, self.crew.held("adopt", [([kept[place].group for place in own],) for own in places], what="resuming"))
        return tuple(replace(each, group=replace(head, prompt=each.group.prompt)) for each, head in zip(kept, found, strict=True))

    def release(self, kept: Sequence[ScoredGroup]) -> None:
        groups = heads_of(kept)
        args = [([groups[place].number for place in own],) for own in self._places(groups)]
        self._write_errors(self.crew.held("release", args, what="the end of a step"))

    def close(self) -> None:
        """Write errors of a step that did not end, if the workers still answer. Reward processes end with their workers."""
        with contextlib.suppress(WorkerError):
            self._write_errors(self._held("take_errors", what="the end"))

    def _write_errors(self, of_workers: Sequence[Sequence[str]]) -> None:
        errors = [line for lines in of_workers for line in lines]
        if self._errors_file and errors:
            append_errors(self._errors_file, "".join(errors))


Samples: TypeAlias = SamplesHere | SamplesThere


def warn_of_unread(written: Sequence[Any], warn: Say) -> None:
    if unread := [each for each in written if isinstance(each, str)]:
        warn(f"{len(unread)} of {len(written)} samples could not be scored: {unread[0]}")


def heads_of(kept: Sequence[ScoredGroup]) -> list[GroupHead]:
    return [each.group for each in kept if isinstance(each.group, GroupHead)]
