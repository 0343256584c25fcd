"""Running a pass of the scheduler through the model.

Enters: a `Pass`. Leaves: the logits of the tokens that samples are drawn from. Guaranteed: the parameters are the trainer's own, read in
place; keys and values of the pass are in the cache afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from transformers import PreTrainedModel

from fulltilt.model.attention import LayerShape, Paged
from fulltilt.model.forward import hidden_states
from fulltilt.model.heads import Head
from fulltilt.rollout.scheduler import Pass


def bytes_per_token(layers: Mapping[int, LayerShape], dtype: torch.dtype) -> int:
    return sum(2 * shape.key_heads * shape.head_width * dtype.itemsize for shape in layers.values())


class Runner:
    def __init__(self, model: PreTrainedModel, layers: Mapping[int, LayerShape], blocks: int, block_tokens: int) -> None:
        self.model = model
        self.head = Head.of(model)
        self.blocks = blocks
        self.block_tokens = block_tokens
        self._layers = [layers[index] for index in sorted(layers)]
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def acquire(self) -> None:
        """Take the cache's memory, if it is not held."""
        if self._keys:
            return
        for shape in self._layers:
            size = (self.blocks * self.block_tokens, shape.key_heads, shape.head_width)
            for caches in (self._keys, self._values):
                caches.append(torch.zeros(size, dtype=self.model.dtype, device=self.model.device))

    def release(self) -> None:
        """Give the cache's memory back for the update."""
        self._keys, self._values = [], []

    @property
    def caches(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return self._keys, self._values

    @property
    def held_bytes(self) -> int:
        return sum(cache.nbytes for cache in self._keys + self._values)

    @torch.no_grad()
    def run(self, step: Pass) -> torch.Tensor:
        """Logits float32 [rows that samples are drawn from, vocabulary], in the order of `step.work`."""
        self.copy(step.copies)
        device = self.model.device
        ids = [token for work in step.work for token in work.sequence.ids(work.start, work.start + work.count)]
        positions = np.concatenate([np.arange(work.start, work.start + work.count) for work in step.work])
        hidden = hidden_states(self.model, torch.tensor(ids, device=device), torch.from_numpy(positions).to(device), self._context(step))
        ends = np.cumsum([work.count for work in step.work]) - 1
        drawn = [int(end) for end, work in zip(ends, step.work, strict=True) if work.samples]
        return self.head.logits(hidden[torch.tensor(drawn, dtype=torch.int64, device=device)])

    def copy(self, copies: tuple[tuple[int, int], ...]) -> None:
        if not copies:
            return
        place = np.arange(self.block_tokens)
        sources, targets = (
            torch.from_numpy((np.array(blocks)[:, None] * self.block_tokens + place).ravel()).to(self.model.device)
            for blocks in zip(*copies, strict=True)
        )
        for cache in self._keys + self._values:
            cache.index_copy_(0, targets, cache[sources])  # read whole before it is written: a source may be another's target

    def _context(self, step: Pass) -> Paged:
        device = self.model.device
        lengths = np.array([work.start + work.count for work in step.work])
        counts = np.array([work.count for work in step.work])
        table = np.zeros((len(step.work), max(len(work.sequence.blocks) for work in step.work)), dtype=np.int64)
        for row, work in enumerate(step.work):
            table[row, : len(work.sequence.blocks)] = work.sequence.blocks
        slots = (table[:, :, None] * self.block_tokens + np.arange(self.block_tokens)).reshape(len(table), -1)
        place = np.arange(slots.shape[1])
        new = (place >= (lengths - counts)[:, None]) & (place < lengths[:, None])
        old = place < lengths[:, None]
        move = lambda array, dtype=np.int64: torch.from_numpy(array.astype(dtype)).to(device)  # noqa: E731
        return Paged(
            keys=self._keys,
            values=self._values,
            slots=move(slots[new]),
            query_lengths=tuple(counts.tolist()),
            key_lengths=tuple(lengths.tolist()),
            read=move(slots[:, : int(lengths.max())]),
            read_flat=move(slots[old]),
            cu_queries=move(np.concatenate([[0], np.cumsum(counts)]), np.int32),
            cu_keys=move(np.concatenate([[0], np.cumsum(lengths)]), np.int32),
        )
