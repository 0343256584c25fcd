"""Progress of a worker in passes that all workers make at the same time, so that a worker that abandons a pass keeps no other waiting.

Every pass through a sharded model (parallel/apply.py) makes the same collectives in the same order, however many tokens it has. So a worker
that runs out of memory in the middle of a pass makes another pass over a filler of two tokens, in which it leaves out the collectives that
it has already made, and takes part in the others. What the workers compute from them is meaningless, and all of them drop it.

Where workers compute a micro-batch together, their collectives are as large as the micro-batch: there the worker sends zeros in place of
its filler's numbers, for as many tokens as the others expect. Where workers announce how many rows they will send, the worker keeps to its
announcement, with rows of zeros.

Enters: the beginnings of passes and collectives. Leaves: which collectives a worker takes part in. Guaranteed: in every pass each
collective is made once, whether the pass was abandoned or not. No tensor is seen here.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

Given = TypeVar("Given")  # a micro-batch


@dataclass(eq=False)
class PassProgress:
    """Counts the collectives of the current pass, by kind.

    Example: an abandoned pass had made "gather 0" and "gather 1". The pass that completes it leaves these two out and makes "gather 2",
    "reduce 2", "reduce 1" and "reduce 0".
    """

    begun: int = 0  # passes, not counting those that complete an abandoned one
    in_doubt: bool = False  # whether a collective has failed, so that nobody knows whether the other workers have its results
    made: Counter[Hashable] = field(default_factory=Counter)  # collectives of the latest pass
    dropped: bool = False  # whether this worker has abandoned a pass: its results until the last pass are dropped
    told: dict[Hashable, Any] = field(default_factory=dict)  # what workers have announced in the latest pass, by place
    tokens: int | None = None  # the size of this worker's part of the micro-batch that a filler stands for; None: no filler
    _left_out: Counter[Hashable] | None = None  # collectives that the completing pass leaves out; None: no such pass is running

    def begin(self) -> None:
        """Begin a pass."""
        if self._left_out is None:
            self.begun += 1
            self.made.clear()
            self.told.clear()

    @contextlib.contextmanager
    def collective(self, what: Hashable) -> Iterator[bool]:
        """Enclose a collective. Yields whether to take part: not if this worker did so before it abandoned the pass."""
        if self._left_out is not None and self._left_out[what]:
            self._left_out[what] -= 1
            yield False
            return
        yield True
        self.made[what] += 1

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Enclose an operation whose failure may leave some workers with its results and others without."""
        self.in_doubt = True  # until the operation has returned
        yield
        self.in_doubt = False

    @contextlib.contextmanager
    def standing_in(self, tokens: int) -> Iterator[None]:
        """Enclose a pass over a filler in place of a micro-batch. `tokens`: the size of this worker's part of the micro-batch."""
        self.tokens = tokens
        try:
            yield
        finally:
            self.tokens = None

    @contextlib.contextmanager
    def completing(self) -> Iterator[None]:
        """Enclose a pass that completes the last one."""
        self._left_out = Counter(self.made)
        try:
            yield
        finally:
            self._left_out = None


class GathersInPasses(Protocol):
    """A model whose parameters are sharded (`Shards`)."""

    @property
    def may_give_up(self) -> bool:
        """Whether a pass in which this worker ran out of memory can be completed."""

    def completing(self) -> AbstractContextManager[None]:
        """Enclose a pass that completes the last one."""


class JointPasses(Generic[Given]):
    """The passes of a mini-batch, or of a phase without gradient, which other workers make at the same time: all workers, where parameters
    are sharded, or those that compute micro-batches together; elsewhere there are no such passes. A worker that abandons a pass makes the
    remaining ones over fillers, so that the others can finish."""

    def __init__(
        self, progress: PassProgress, models: Sequence[GathersInPasses], agreed: int, micro_batches: Sequence[Given], *, together: bool
    ) -> None:
        """`models`: the model, if it is sharded. `agreed`: the least number of passes that all workers make. `micro_batches`: this
        worker's, which it computes `together` with others."""
        self.agreed, self._given = agreed, [*micro_batches] if together else []
        self._progress, self._models, self._before = progress, models, progress.begun

    @property
    def may_be_given_up(self) -> bool:
        return not self._progress.in_doubt and all(model.may_give_up for model in self._models)

    def complete(self, make_pass: Callable[[Given | None], object]) -> Iterator[None]:
        """Make the remaining passes, and yield after every one. `make_pass`: makes such a pass over a filler, in place of the given
        micro-batch if other workers compute that too."""
        passes = [*self._given, *[None] * (self.agreed - len(self._given))]
        begun, self._progress.dropped = self._progress.begun - self._before, True
        try:
            if passes and begun:
                with contextlib.ExitStack() as stack:
                    for model in self._models:  # first, since it has more collectives to leave out
                        stack.enter_context(model.completing())
                    stack.enter_context(self._progress.completing())
                    make_pass(passes[begun - 1])
                yield
            for given in passes[begun:]:
                make_pass(given)
                yield
        finally:
            self._progress.dropped = False
