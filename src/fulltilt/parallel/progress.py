"""How far a worker has come in passes that all workers make at the same time, so that one that gives a pass up keeps no other waiting.

Every pass through a model that is shared out (parallel/apply.py) makes the same collectives in the same order, however many tokens it has.
So a worker that runs out of memory in the middle of one makes another over a filler of two tokens, in which it leaves out the collectives
that it has made already, and takes part in the others. What the workers compute from them means nothing, and all of them drop it.

Where workers compute a micro-batch together, their collectives are as large as the micro-batch: there the worker sends zeros in place of
what it has for its filler, for as many tokens as the others expect.

Enters: where passes and collectives begin. Leaves: which collectives a worker takes part in. Guaranteed: in every pass each collective is
made once, whether the pass was given up or not. No tensor is seen here.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field


@dataclass(eq=False)
class PassProgress:
    """Counts the collectives of the pass that is being made, by what they exchange.

    Example: a pass that was given up had made "gather 0" and "gather 1". The one that completes it leaves these two out and makes
    "gather 2", "reduce 2", "reduce 1" and "reduce 0".
    """

    begun: int = 0  # passes, without those that complete one that was given up
    in_doubt: bool = False  # whether a collective has failed: nobody knows whether the other workers have what they need of it
    made: Counter[Hashable] = field(default_factory=Counter)  # of the pass that began last
    tokens: int | None = None  # of this worker's part of the micro-batch for which it computes a filler; None: it computes no filler
    _left_out: Counter[Hashable] | None = None  # of the pass that completes it; None: there is none

    def begin(self) -> None:
        """A pass begins."""
        if self._left_out is None:
            self.begun += 1
            self.made.clear()

    @contextlib.contextmanager
    def collective(self, what: Hashable) -> Iterator[bool]:
        """Encloses a collective. Whether to take part: not if this worker did before it gave the pass up."""
        if self._left_out is not None and self._left_out[what]:
            self._left_out[what] -= 1
            yield False
            return
        self.in_doubt = True  # until it has returned
        yield True
        self.in_doubt = False
        self.made[what] += 1

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
