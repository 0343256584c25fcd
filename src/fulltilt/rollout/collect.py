"""Collect the groups of a step.

`collect` is one round of sampling. Enters: prompts. Leaves: one group for each, in prompt order, whatever order they finished in.
Guaranteed: `on_group` sees each group as soon as it is complete, so that rewards run while generation continues.

`fill` is dynamic sampling. Enters: the number of useful groups for a step, groups left over from earlier steps, and a function that samples
a round of new groups. Leaves: the groups to train on and those left over. Guaranteed: the oldest groups come first, and within a round
prompt order is kept; no useful group is lost or used twice; no round is sampled once there are enough groups, and at most `max_rounds` in
all; after these, the step gets fewer groups instead of failing. Free of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TypeVar

from fulltilt.records import AnyGroup, Prompt, Score
from fulltilt.rollout.sampler import Sampling

SomeGroup = TypeVar("SomeGroup", bound=AnyGroup)
Generate = Callable[..., Generator[SomeGroup, None, None]]  # `generate(prompts, sampling, seed)` of a worker or an engine


def collect(
    generate: Generate[SomeGroup], prompts: Sequence[Prompt], sampling: Sampling, seed: int, on_group: Callable[[SomeGroup], None]
) -> tuple[SomeGroup, ...]:
    finished: dict[int, SomeGroup] = {}
    with closing(generate(prompts, sampling, seed)) as groups:  # even on an error, the engine frees its memory
        for group in groups:
            # found by its place: a worker in another process returns a copy of the prompt
            finished[group.place] = replace(group, prompt=prompts[group.place])
            on_group(finished[group.place])
    return tuple(finished[place] for place in range(len(prompts)))


@dataclass(frozen=True, eq=False)
class ScoredGroup:
    """A group with its scores, and the step in which it was sampled."""

    group: AnyGroup
    scores: tuple[Score, ...]  # one per sample
    step: int


@dataclass(frozen=True, eq=False)
class StepGroups:
    """The groups that one step collected."""

    kept: tuple[ScoredGroup, ...]  # to train on: as many as wanted, or fewer if the rounds were used up
    surplus: tuple[ScoredGroup, ...]  # useful groups that were not needed, for the next step
    sampled: tuple[ScoredGroup, ...]  # all groups of this step's rounds, useful or not
    rounds: int
    dropped: int  # number of sampled groups that were not useful


def fill(
    wanted: int,
    surplus: Sequence[ScoredGroup],
    ask: Callable[[int], Sequence[ScoredGroup]],
    useful: Callable[[ScoredGroup], bool],
    max_rounds: int,
) -> StepGroups:
    """Collect `wanted` useful groups. `ask`: gets the number of the round in this step, from 0, and returns the round's scored groups in
    prompt order. `surplus`: groups from the previous step, which are known to be useful."""
    ready, sampled = list(surplus), list[ScoredGroup]()
    rounds = 0
    while len(ready) < wanted and rounds < max_rounds:
        found = ask(rounds)
        rounds += 1
        sampled += found
        ready += filter(useful, found)
    return StepGroups(
        kept=tuple(ready[:wanted]),
        surplus=tuple(ready[wanted:]),
        sampled=tuple(sampled),
        rounds=rounds,
        dropped=len(surplus) + len(sampled) - len(ready),
    )
