"""One optimizer step from one mini-batch.

`accumulate`, then `apply`. Enters: a `MiniBatch`, or a worker's part of one, whose weights hold the global denominator, and a loss. Leaves:
changed parameters, sums for the metrics, and the optimizer's metrics under the role's name. Guaranteed: the gradient is that of the whole
mini-batch, however it is cut into micro-batches and dealt to workers; a gradient that is not finite changes nothing and is reported. A loss
that treats some tokens of a mini-batch apart gets them from `Marking`, after a pass without gradient over all micro-batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from fulltilt.records import LossParts, LossSums, MicroBatch, MiniBatch
from fulltilt.training.optim import Optimizer
from fulltilt.training.roles import FILLER, Role, annotate_all

# Takes micro-batches, the policy's log-probs of their trained tokens and the number of updates so far; returns the micro-batches with
# `marked`.
Marking = Callable[[Sequence[MicroBatch], Sequence[np.ndarray], int], list[MicroBatch]]


class Trainer:
    def __init__(
        self, role: Role, loss: Callable[[Any], LossParts], marking: Marking | None = None, rest: Callable[[], None] | None = None
    ) -> None:
        """`loss` takes the role's `terms`. `rest`: called after passes without gradient, where parameters are sharded."""
        assert role.optimizer is not None
        self.marking, self.rest = marking, rest
        self.role = role
        self.optimizer: Optimizer = role.optimizer
        self.loss = loss

    def accumulate(self, batch: MiniBatch, passes: int = 0) -> LossSums:
        """Add the gradients of these micro-batches to the accumulated ones. `passes`: the least number of passes to make; passes without a
        micro-batch add nothing."""
        running = self.accumulating(batch, passes)
        while True:
            try:
                next(running)
            except StopIteration as end:
                found: LossSums = end.value
                return found

    def accumulating(self, batch: MiniBatch, passes: int = 0) -> Generator[None, None, LossSums]:
        """Accumulate like `accumulate`, but yield after every pass."""
        self.optimizer.prepare()
        sums, weighted, numerators, counts = (Totals(self.role.device) for _ in range(4))
        micro_batches = [micro for micro in batch.micro_batches if len(micro.trained)]
        if self.marking:
            micro_batches = yield from self._marked(micro_batches, passes, self.marking)
        for micro in micro_batches:
            parts = self.loss(self.role.terms(micro))
            parts.loss.backward()  # type: ignore[no-untyped-call]
            sums.add(parts.sums)
            weighted.add(parts.weighted)
            numerators.add({name: ratio[0] for name, ratio in parts.ratios.items()})
            counts.add({name: ratio[1] for name, ratio in parts.ratios.items()})
            yield
        for _ in range(passes - len(micro_batches)):
            self.make_nothing()
            yield
        return LossSums(sums.numbers(), weighted.numbers(), numerators.numbers(), counts.numbers())

    def make_nothing(self, micro: MicroBatch | None = None) -> None:
        """Make a pass that adds nothing to the gradients. `micro`: the micro-batch that this pass replaces, for workers that compute it
        together."""
        with nullcontext(self.role.nothing()) if micro is None else self.role.standing_in(micro) as loss:
            loss.backward()  # type: ignore[no-untyped-call]

    def _marked(self, micro_batches: list[MicroBatch], passes: int, marking: Marking) -> Generator[None, None, list[MicroBatch]]:
        logprobs = []
        for numbers in annotate_all(self.role, [*micro_batches, *[FILLER] * (passes - len(micro_batches))]):
            logprobs.append(numbers)
            yield
        if self.rest:
            self.rest()
        return marking(micro_batches, logprobs[: len(micro_batches)], self.optimizer.updates)

    def apply(self, *, failed: bool = False) -> dict[str, float]:
        """Make one optimizer step with the accumulated gradients. `failed`: whether they are incomplete, because memory ran out."""
        report = self.optimizer.step(failed=failed)
        return {
            f"{self.role.name}/grad_norm": report.grad_norm,
            f"{self.role.name}/lr": report.lr,
            f"{self.role.name}/skipped_updates": float(report.skipped),
        }


class Totals:
    """Sums by name, kept on the device: reading a number means waiting for the device, so all are read once, at the end."""

    def __init__(self, device: torch.device) -> None:
        self._found: dict[str, torch.Tensor] = defaultdict(lambda: torch.zeros((), device=device))

    def add(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, value in values.items():
            self._found[name] = self._found[name] + value.detach()

    def numbers(self) -> dict[str, float]:
        return {name: float(value) for name, value in self._found.items()}
