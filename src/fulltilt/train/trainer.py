"""One optimizer step from one mini-batch.

`accumulate`, then `apply`. Enters: a `MiniBatch` whose weights hold the global denominator, and a loss. Leaves: changed parameters and
metrics. Guaranteed: the gradient is that of the whole mini-batch however it is cut into micro-batches; one that is not finite changes
nothing and shows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch

from fulltilt.records import LossParts, MicroBatch, MiniBatch, TokenTerms
from fulltilt.train.optim import Optimizer
from fulltilt.train.roles import Role

Loss = Callable[[TokenTerms], LossParts]


class Trainer:
    def __init__(self, actor: Role, loss: Loss, *, entropy_gradient: bool) -> None:
        assert actor.optimizer is not None
        self.actor = actor
        self.optimizer: Optimizer = actor.optimizer
        self.loss = loss
        self.entropy_gradient = entropy_gradient

    def accumulate(self, batch: MiniBatch) -> dict[str, float]:
        """Gradients of the whole mini-batch, on top of what is there."""
        sums: dict[str, torch.Tensor] = defaultdict(lambda: torch.zeros((), device=self.actor.model.device))
        weighted: dict[str, torch.Tensor] = defaultdict(lambda: torch.zeros((), device=self.actor.model.device))
        for micro in batch.micro_batches:
            if not len(micro.trained):
                continue
            parts = self.loss(self._terms(micro))
            parts.loss.backward()  # type: ignore[no-untyped-call]
            for name, value in parts.sums.items():
                sums[name] = sums[name] + value.detach()
            for name, value in parts.weighted.items():
                weighted[name] = weighted[name] + value.detach()
        tokens = max(1, batch.trained_tokens)
        return {name: float(value) / tokens for name, value in sums.items()} | {name: float(value) for name, value in weighted.items()}

    def apply(self) -> dict[str, float]:
        """One optimizer step with the gradients that are there."""
        report = self.optimizer.step()
        return {
            "actor/grad_norm": report.grad_norm,
            "actor/lr": report.lr,
            "actor/skipped_updates": float(report.skipped),
        }

    def _terms(self, micro: MicroBatch) -> TokenTerms:
        logprobs, entropy = self.actor.run(micro)

        def on_device(array: np.ndarray | None) -> torch.Tensor | None:
            return None if array is None else torch.from_numpy(array).to(device=logprobs.device, dtype=logprobs.dtype)

        weights = on_device(micro.weights)
        assert weights is not None
        return TokenTerms(
            logprobs=logprobs,
            entropy=entropy if self.entropy_gradient else entropy.detach(),
            weights=weights,
            rollout_logprobs=on_device(micro.rollout_logprobs),
            old_logprobs=on_device(micro.old_logprobs),
            ref_logprobs=on_device(micro.ref_logprobs),
            advantages=on_device(micro.advantages),
        )
