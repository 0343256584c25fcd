"""Tensors of a checkpoint that are in memory, and micro-batches of a pass without gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fulltilt.batching.pack import MicroSizing, pack
from fulltilt.records import MicroBatch, MiniBatch, Row
from fulltilt.training.trainer import Trainer


class InMemory:
    """What `Checkpoint.open` gives, of tensors that were never written."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in tensors.items()}

    def names(self) -> list[str]:
        return sorted(self.tensors)

    def size(self, name: str) -> int:
        return self.tensors[name].numel()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def numbers(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.tensors[name].flatten()[start:stop]


def restored(optimizer: Any, tensors: Mapping[str, torch.Tensor], updates: int, skipped: int) -> None:
    optimizer.restore(InMemory(tensors), updates, skipped)


def forward_micro_batches(rows: Sequence[Row], sizing: MicroSizing) -> list[MicroBatch]:
    return [pack(rows, indices, packing=sizing.packing) for indices in sizing.schedule([row.tokens for row in rows])]


def accumulated(trainer: Trainer, batch: MiniBatch) -> dict[str, float]:
    """Gradients of a whole mini-batch on one worker, and its metrics."""
    return trainer.accumulate(batch).metrics(batch.trained_tokens, silent=batch.silent)
