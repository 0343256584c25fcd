"""How far a worker has come in passes that all workers make at the same time, so that one that gives a pass up keeps no other waiting.

Every pass through a model that is shared out (parallel/apply.py) makes the same collectives in the same order, however many tokens it has.
So a worker that runs out of memory in the middle of one makes another over a filler of two tokens, in which it leaves out the collectives
that it has made already, and takes part in the others. What the workers compute from them means nothing, and all of them drop it.

Where workers compute a micro-batch together, their collectives are as large as the micro-batch: there the worker sends zeros in place of
what it has for its filler, for as many tokens as the others expect. Where workers tell one another how many rows they will send, a worker
that has told it keeps to that, with rows of zeros.

Enters: where passes and collectives begin. Leaves: which collectives a worker takes part in. Guaranteed: in every pass each collective is
made once, whether the pass was given up or not. No tensor is seen here.
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
    """Counts the collectives of the pass that is being made, by what they exchange.

    Example: a pass that was given up had made "gather 0" and "gather 1". The one that completes it leaves these two out and makes
    "gather 2", "reduce 2", "reduce 1" and "reduce 0".
    """

    begun: int = 0  # passes, without those that complete one that was given up
    in_doubt: bool = False  # whether a collective has failed: nobody knows whether the other workers have what they need of it
    made: Counter[Hashable] = field(default_factory=Counter)  # collectives of the pass that began last
    dropped: bool = False  # whether this worker has given a pass up: what it computes until the last pass is dropped
    told: dict[Hashable, Any] = field(default_factory=dict)  # what workers have told one another in the pass that began last, by where
    tokens: int | None = None  # the size of this worker's part of the micro-batch that a filler stands for; None: no filler
    _left_out: Counter[Hashable] | None = None  # collectives that the completing pass leaves out; None: there is no such pass

    def begin(self) -> None:
        """A pass begins."""
        if self._left_out is None:
            self.begun += 1
            self.made.clear()
            self.told.clear()

    @contextlib.contextmanager
    def collective(self, what: Hashable) -> Iterator[bool]:
        """Encloses a collective. Whether to take part: not if this worker did before it gave the pass up."""
        if self._left_out is not None and self._left_out[what]:
            self._left_out[what] -= 1
            yield False
            return
        yield True
        self.made[what] += 1

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Encloses what may end with an error when some workers have what they need and others do not."""
        self.in_doubt = True  # until it has returned
        yield
        self.in_doubt = False

    @contextlib.contextmanager
    def standing_in(self, tokens: int) -> Iterator[None]:
        """Encloses a pass over a filler in place of a micro-batch, of which this worker's part has so many tokens."""
        self.tokens = tokens
        try:
            yield
        finally:
            self.tokens = None

    @contextlib.contextmanager
    def completing(self) -> Iterator[None]:
        """Encloses a pass that completes the last one."""
        self._left_out = Counter(self.made)
        try:
            yield
        finally:
            self._left_out = None


class GathersInPasses(Protocol):
    """A model whose parameters are shared out (`Shards`)."""

    @property
    def may_give_up(self) -> bool:
        """Whether a pass can be completed in which this worker ran out of memory."""

    def completing(self) -> AbstractContextManager[None]:
        """Encloses a pass that completes the last one."""


class JointPasses(Generic[Given]):
    """The passes of a mini-batch, or of a phase without gradient, which other workers make at the same time: all, where parameters are
    shared out, or those that compute micro-batches together. A worker that gives one up makes all that are left of them over fillers, so
    that the others come to their end. Elsewhere there are none."""

    def __init__(
        self, progress: PassProgress, models: Sequence[GathersInPasses], agreed: int, micro_batches: Sequence[Given], *, together: bool
    ) -> None:
        """`models`: the model, where it is shared out. `agreed`: how many passes all workers make at least. `micro_batches`: those of this
        worker, which it computes `together` with others."""
        self.agreed, self._given = agreed, [*micro_batches] if together else []
        self._progress, self._models, self._before = progress, models, progress.begun

    @property
    def may_be_given_up(self) -> bool:
        return not self._progress.in_doubt and all(model.may_give_up for model in self._models)

    def complete(self, make_pass: Callable[[Given | None], object]) -> Iterator[None]:
        """Make what is left of them, with a stop after every pass. `make_pass`: makes one of the same kind over a filler, in place of the
        micro-batch that is given, where other workers compute it too."""
        passes = [*self._given, *[None] * (self.agreed - len(self._given))]
        begun, self._progress.dropped = self._progress.begun - self._before, True
        try:
            if passes and begun:
                with contextlib.ExitStack() as stack:
                    for model in self._models:  # first, since it knows of more collectives to leave out
                        stack.enter_context(model.completing())
                    stack.enter_context(self._progress.completing())
                    make_pass(passes[begun - 1])
                yield
            for given in passes[begun:]:
                make_pass(given)
                yield
        finally:
            self._progress.dropped = False
