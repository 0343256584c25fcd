"""A role is a composition: a model with its head, and an optimizer or none.

Enters: a loaded model. Leaves: actor (trained) and ref (frozen), with one way to run a packed micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from fulltilt.model.attention import Packed
from fulltilt.model.forward import hidden_states
from fulltilt.model.heads import Head, token_logprobs
from fulltilt.records import MicroBatch
from fulltilt.train.optim import Optimizer


@dataclass(frozen=True, eq=False)
class Role:
    name: str
    model: PreTrainedModel
    temperature: float  # of the rollout whose samples are looked at
    optimizer: Optimizer | None = None

    def run(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob and entropy of each trained token [R], with gradient unless it is switched off."""
        device = self.model.device
        ids, positions, trained = (torch.from_numpy(array).to(device) for array in (micro.ids, micro.positions, micro.trained))
        hidden = hidden_states(self.model, ids, positions, Packed.of(micro.cu_seqlens, device))
        return token_logprobs(hidden[trained - 1], Head.of(self.model), ids[trained], self.temperature)

    @torch.no_grad()
    def logprobs(self, micro: MicroBatch) -> np.ndarray:
        """float32 [R], without gradients."""
        return self.run(micro)[0].float().cpu().numpy()


def frozen(name: str, model: PreTrainedModel, temperature: float) -> Role:
    model.requires_grad_(False)
    return Role(name, model, temperature)
