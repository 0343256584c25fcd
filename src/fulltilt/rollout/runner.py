"""Running the scheduler's passes through the model.

Enters: a `Pass`. Leaves: the logits of the tokens that samples are drawn from. Guaranteed: the parameters are the trainer's own, read in
place; keys and values of the pass are in the cache afterwards.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping

import numpy as np
import torch
from transformers import PreTrainedModel

from fulltilt.model.arrays import to_device
from fulltilt.model.attention import LayerShape, Packed, Paged
from fulltilt.model.forward import hidden_states
from fulltilt.model.heads import Head
from fulltilt.rollout.scheduler import Pass

ALIGNED = 128  # every layer's cache begins at a multiple of this many elements, because kernels read 16 bytes at a time


def bytes_per_token(layers: Mapping[int, LayerShape], dtype: torch.dtype) -> int:
    return sum(2 * shape.key_heads * shape.head_width * dtype.itemsize for shape in layers.values())


def memory(numbers: int, model: PreTrainedModel) -> torch.Tensor:
    """Allocate memory for this many elements, initialised if attention may read slots that were never written."""
    if model.device.type == "cpu":  # untouched zeros take neither memory nor time, and most of a large cache is never touched
        return torch.from_numpy(np.zeros(numbers * model.dtype.itemsize, np.uint8)).view(model.dtype)
    found = empty(numbers, model)
    return found.zero_() if reads_unwritten(model) else found


def empty(numbers: int, model: PreTrainedModel) -> torch.Tensor:
    try:
        return torch.empty(numbers, dtype=model.dtype, device=model.device)
    except torch.OutOfMemoryError:
        gc.collect()  # objects in reference cycles may occupy part of the memory that the cache had before
        torch.cuda.empty_cache()
        return torch.empty(numbers, dtype=model.dtype, device=model.device)


def reads_unwritten(model: PreTrainedModel) -> bool:
    """Return whether attention may read slots that were never written. Flash attention and the decoding kernels do not; torch's own
    attention, which runs everywhere else, gives such slots the weight 0, and 0 times an arbitrary value may be NaN."""
    flash = model.device.type == "cuda" and model.dtype in (torch.bfloat16, torch.float16)
    return not flash or getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None


class Runner:
    def __init__(self, model: PreTrainedModel, layers: Mapping[int, LayerShape], blocks: int, block_tokens: int) -> None:
        self.model, self.head = model, Head.of(model)
        self.blocks, self.block_tokens = blocks, block_tokens
        self.layers = [layers[index] for index in sorted(layers)]
        self.keys: list[torch.Tensor] = []  # the cache of each layer [slots, heads, width]; empty while it is not held
        self.values: list[torch.Tensor] = []

    def acquire(self) -> None:
        """Allocate the cache if it is not held: one piece for all layers. On CUDA the allocator keeps the piece after `release`, splits
        activations from it, and hands it out whole again once they are gone."""
        if self.keys:
            return
        shapes = [(self.blocks * self.block_tokens, shape.key_heads, shape.head_width) for shape in self.layers for _ in range(2)]
        steps = [-(-math.prod(shape) // ALIGNED) * ALIGNED for shape in shapes]
        whole = memory(sum(steps), self.model)
        caches = [part[: math.prod(shape)].view(shape) for part, shape in zip(whole.split(steps), shapes, strict=True)]
        self.keys += caches[0::2]
        self.values += caches[1::2]

    def release(self) -> None:
        """Free the cache's memory for the update."""
        # The lists themselves are emptied, so that no other holder of them keeps the memory.
        self.keys.clear()
        self.values.clear()

    @property
    def held_bytes(self) -> int:
        return sum(cache.nbytes for cache in self.keys + self.values)

    @torch.no_grad()
    def run(self, step: Pass) -> torch.Tensor:
        """Return the logits of the rows that samples are drawn from, float32 [rows, vocabulary], in the order of `step.work`."""
        self.copy(step.copies)
        device = self.model.device
        ids = [token for work in step.work for token in work.sequence.ids(work.start, work.start + work.count)]
        positions = np.concatenate([np.arange(work.start, work.start + work.count) for work in step.work])
        hidden = hidden_states(self.model, to_device(np.array(ids), device), to_device(positions, device), self._context(step))
        ends = np.cumsum([work.count for work in step.work]) - 1
        drawn = [int(end) for end, work in zip(ends, step.work, strict=True) if work.samples]
        return self.head.logits(hidden[to_device(np.array(drawn, dtype=np.int64), device)])

    @torch.no_grad()
    def stand_in(self, step: Pass) -> None:
        """Run a pass over a filler, with the collectives of `run`. The cache's contents are meaningless afterwards."""
        device, places = self.model.device, np.arange(2)
        filler = Packed.of(np.array([0, 2]), device)
        slots = to_device(places, device)
        context = Paged(keys=self.keys, values=self.values, slots=slots, new=filler, whole=filler, read=slots)
        hidden = hidden_states(self.model, to_device(np.zeros(2, dtype=np.int64), device), to_device(places, device), context)
        self.head.logits(hidden[:1].expand(sum(bool(work.samples) for work in step.work), -1))

    def copy(self, copies: tuple[tuple[int, int], ...]) -> None:
        if not copies:
            return
        place = np.arange(self.block_tokens)
        sources, targets = (
            to_device((np.array(blocks)[:, None] * self.block_tokens + place).ravel(), self.model.device)
            for blocks in zip(*copies, strict=True)
        )
        for cache in self.keys + self.values:
            cache.index_copy_(0, targets, cache[sources])  # read completely before writing: a source may also be a target

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
        return Paged(
            keys=self.keys,
            values=self.values,
            slots=to_device(slots[new], device),
            new=Packed.of(np.cumsum([0, *counts]), device),
            whole=Packed.of(np.cumsum([0, *lengths]), device),
            read=to_device(slots[old], device),
        )
