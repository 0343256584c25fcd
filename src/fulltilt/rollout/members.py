"""Handling of out-of-memory errors among members that sample together, each with a part of every layer.

Enters: a function for a member's passes, which all members make together, and a function for such a pass over a filler. Leaves: the
member's result, or `OutOfMemoryOnMember`, which all members raise at the same place. Guaranteed: each collective of these passes was made
once on every member when that error is raised, so that none waits for another; a member that is alone calls nothing. An error inside a
collective, one in the filler, and one in passes that cannot be made over a filler are raised on their own member only, and the run ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from fulltilt.memory.trial import MemoryTrial, free_unused
from fulltilt.parallel.progress import JointPasses
from fulltilt.parallel.ranks import ALONE, Ranks

Computed = TypeVar("Computed")


class OutOfMemoryOnMember(MemoryError):
    """Memory ran out on this member or on another one."""


@dataclass(eq=False)
class Members:
    ranks: Ranks = ALONE  # for agreements in main memory
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    agreed: str | None = None  # after `OutOfMemoryOnMember`: this member's report, or "" if only others ran out of memory; otherwise None

    def make(
        self, compute: Callable[[], Computed], stand_in: Callable[[int], None], tokens: Sequence[int], *, may_give_up: bool = True
    ) -> Computed:
        """Return the result of `compute`. `tokens`: the size of each pass that it makes together with the other members. `stand_in`: makes
        a pass over a filler, in place of a pass of that size. `may_give_up`: whether passes can be replaced this way."""
        self.agreed = None
        if self.ranks.alone or not may_give_up:
            return compute()
        found: list[Computed] = []
        joint = JointPasses(self.ranks.progress, (), 0, tokens, together=True)
        trial = MemoryTrial(lambda: joint.may_be_given_up)
        with trial:
            found.append(compute())
        if trial.failure is not None:
            free_unused(self.device)
            for _ in joint.complete(lambda given: stand_in(given or 0)):
                pass
        (failed,) = self.ranks.most_of_each([trial.failure is not None])
        if failed:
            self.agreed = trial.failure or ""
            raise OutOfMemoryOnMember(trial.failure or "on another member")
        return found[0]

    def begin_pass(self) -> None:
        self.ranks.progress.begin()

    @contextmanager
    def standing_in(self, tokens: int) -> Iterator[None]:
        """Enclose a pass over a filler in place of a pass of that size."""
        self.begin_pass()
        with self.ranks.progress.standing_in(tokens):
            yield
