"""A role is a composition: a model with its head, and an optimizer or none.

Enters: a loaded model. Leaves: actor and ref (`Policy`), critic (`Critic`), reward model (`Scorer`), each with one way to run a packed
micro-batch: `terms` for the loss of a role that learns, `annotate` for one number per trained token, without gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from fulltilt.model.attention import Packed
from fulltilt.model.forward import hidden_states
from fulltilt.model.heads import Head, token_logprobs
from fulltilt.model.scalar import ScalarModel
from fulltilt.records import MicroBatch, TokenTerms, ValueTerms
from fulltilt.train.optim import Optimizer

Terms = TypeVar("Terms", covariant=True)


class Learner(Protocol[Terms]):
    """A role that is trained."""

    name: str
    optimizer: Optimizer | None

    @property
    def device(self) -> torch.device: ...

    def terms(self, micro: MicroBatch) -> Terms: ...


class Annotator(Protocol):
    """A role that is asked for one number per trained token."""

    name: str

    def annotate(self, micro: MicroBatch) -> np.ndarray: ...


@dataclass(eq=False)
class Policy:
    name: str
    model: PreTrainedModel
    temperature: float  # of the rollout whose samples are looked at
    optimizer: Optimizer | None = None
    entropy_gradient: bool = False
    as_role: Callable[[], AbstractContextManager[Any]] = nullcontext  # entered for every pass: the model may be another role too

    @property
    def device(self) -> torch.device:
        return self.model.device

    def run(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob and entropy of each trained token [R], with gradient unless it is switched off."""
        ids, positions, trained = stream(micro, self.device)
        with self.as_role():
            hidden = hidden_states(self.model, ids, positions, Packed.of(micro.cu_seqlens, self.device))
            return token_logprobs(hidden[trained - 1], Head.of(self.model), ids[trained], self.temperature)

    def terms(self, micro: MicroBatch) -> TokenTerms:
        logprobs, entropy = self.run(micro)
        return TokenTerms(
            logprobs=logprobs,
            entropy=entropy if self.entropy_gradient else entropy.detach(),
            weights=like(micro.weights, logprobs),
            row=torch.from_numpy(micro.trained_row).to(self.device),
            rollout_logprobs=like_if_any(micro.rollout_logprobs, logprobs),
            old_logprobs=like_if_any(micro.old_logprobs, logprobs),
            ref_logprobs=like_if_any(micro.ref_logprobs, logprobs),
            advantages=like_if_any(micro.advantages, logprobs),
            fresh=torch.from_numpy(micro.fresh).to(self.device),
        )

    @torch.no_grad()
    def annotate(self, micro: MicroBatch) -> np.ndarray:
        """Log-probs, float32 [R]."""
        return self.run(micro)[0].float().cpu().numpy()


@dataclass(eq=False)
class Critic:
    """Says of each trained token what reward is to be expected, given the text before it."""

    name: str
    model: ScalarModel
    optimizer: Optimizer | None = None

    @property
    def device(self) -> torch.device:
        return self.model.device

    def run(self, micro: MicroBatch) -> torch.Tensor:
        ids, positions, trained = stream(micro, self.device)
        return self.model.values(ids, positions, Packed.of(micro.cu_seqlens, self.device))[trained - 1]

    def terms(self, micro: MicroBatch) -> ValueTerms:
        values = self.run(micro)
        assert micro.values is not None and micro.returns is not None, "a critic learns from its old values and the returns"
        return ValueTerms(values, like(micro.weights, values), like(micro.values, values), like(micro.returns, values))

    @torch.no_grad()
    def annotate(self, micro: MicroBatch) -> np.ndarray:
        """Values, float32 [R]."""
        return self.run(micro).float().cpu().numpy()


@dataclass(eq=False)
class Scorer:
    """A reward model: one number for each text, read at its last token, the only one that its row marks as trained."""

    name: str
    model: ScalarModel

    @torch.no_grad()
    def annotate(self, micro: MicroBatch) -> np.ndarray:
        """Scores, float32 [R]."""
        ids, positions, marked = stream(micro, self.model.device)
        return self.model.values(ids, positions, Packed.of(micro.cu_seqlens, self.model.device))[marked].float().cpu().numpy()


def stream(micro: MicroBatch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids, positions, trained = (torch.from_numpy(array).to(device) for array in (micro.ids, micro.positions, micro.trained))
    return ids, positions, trained


def like(array: np.ndarray, other: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(array).to(device=other.device, dtype=other.dtype)


def like_if_any(array: np.ndarray | None, other: torch.Tensor) -> torch.Tensor | None:
    return None if array is None else like(array, other)
