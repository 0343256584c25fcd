"""Sequence parallelism by Ulysses: the workers of a group compute a micro-batch together, each a part of its tokens.

Enters: a stream of tokens, the same on all workers of a group. Leaves: the numbers of all tokens, on all workers. Guaranteed: outside
attention a worker computes with its own tokens only; inside, with all tokens and a part of the heads; a worker's gradient is that of its
own tokens, so that the sum over the workers is the gradient of the whole micro-batch; every collective adds its bytes to `Ranks.moved`. All
workers of a group must make the same passes at the same time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fulltilt.parallel.ranks import ALONE, Ranks, gather_into


def make_groups(ranks: Ranks, sizes: Collection[int], step: int = 1) -> dict[int, SequenceGroup]:
    """Make this worker's group for each size above 1. Groups are neighbours, on one machine if the size divides a machine's workers; or,
    where `step` neighbours each hold a part of the model, workers `step` places apart. All workers of `ranks` must call this with the same
    sizes."""
    return {size: SequenceGroup(ranks.line(size, step)) for size in sorted({*sizes} - {1})}


@dataclass(frozen=True, eq=False)
class SequenceGroup:
    ranks: Ranks  # the workers of the group, in the order of their parts of every stream

    @property
    def size(self) -> int:
        return self.ranks.size

    @property
    def first(self) -> bool:
        """Whether this worker is the one that reports the group's results."""
        return self.ranks.rank == 0

    def own(self, tokens: int) -> slice:
        """Return this worker's part of a stream, whose length is a multiple of the group's size."""
        each = tokens // self.size
        return slice(self.ranks.rank * each, (self.ranks.rank + 1) * each)

    def to_heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Exchange all heads of this worker's tokens for all tokens of its heads: [T / size, heads, width] -> [T, heads / size, width]. If
        there are fewer key heads than workers, some workers have the same one."""
        k, v = (self._enough(states) for states in (k, v))
        tokens, width = q.shape[0], q.shape[2]
        # In one exchange: a worker's heads of all three tensors lie side by side.
        parts = torch.cat([states.reshape(tokens, self.size, -1, width) for states in (q, k, v)], dim=2)
        found = Exchanged.apply(parts.transpose(0, 1), self.ranks).reshape(self.size * tokens, -1, width)
        counts = [states.shape[1] // self.size for states in (q, k, v)]
        return found.split(counts, dim=1)  # type: ignore[no-any-return]

    def to_tokens(self, out: torch.Tensor) -> torch.Tensor:
        """Invert `to_heads` for attention's output: [T, heads / size, width] -> [T / size, heads, width]."""
        tokens, heads, width = out.shape
        parts = Exchanged.apply(out.reshape(self.size, tokens // self.size, heads, width), self.ranks)
        return parts.transpose(0, 1).reshape(tokens // self.size, self.size * heads, width)

    def _enough(self, states: torch.Tensor) -> torch.Tensor:
        heads = states.shape[1]
        return states if heads % self.size == 0 else states.repeat_interleave(self.size // heads, dim=1)

    def gather(self, own: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return the numbers of all workers [R], in order. `counts`: how many each worker has. The gradient is that of this worker's
        numbers: all workers compute the same loss from all numbers."""
        return Gathered.apply(own, tuple(counts), self.ranks) if any(counts) else own  # type: ignore[no-any-return]


class Exchanged(torch.autograd.Function):
    """Exchanges places with other workers, [size, ...] -> [size, ...]: place i goes to worker i, and place i of the result is from worker
    i."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        return exchange_tokens(parts, ranks)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_parts: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return exchange_tokens(of_parts, ctx.ranks), None


def exchange_tokens(parts: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Call `exchange` with [size, tokens, ...]. In a pass over a filler, send as many zeros as the others expect."""
    with ranks.progress.collective("tokens") as takes_part:
        tokens = ranks.progress.tokens
        if takes_part and tokens is None:
            return exchange(parts, ranks)
        if takes_part and tokens is not None:
            exchange(parts.new_zeros(len(parts), tokens, *parts.shape[2:]), ranks)
        return torch.zeros_like(parts)


def exchange(parts: torch.Tensor, ranks: Ranks, counts: tuple[Sequence[int], Sequence[int]] | None = None) -> torch.Tensor:
    """Send place i of [size, ...] to worker i, and return what each worker has sent here, in order. `counts`: if given, the numbers of rows
    that go to each worker and come from each, in place of one place per worker."""
    parts = parts.contiguous()
    ranks.moved["all-to-all"] += parts.nbytes
    sent, received = counts or (None, None)
    # For workers that share a GPU: gloo exchanges main memory only.
    given = parts.cpu() if parts.is_cuda and dist.get_backend(ranks.group) == "gloo" else parts
    found = torch.empty_like(given) if received is None else given.new_empty(sum(received), *given.shape[1:])
    with ranks.progress.sending():
        dist.all_to_all_single(found, given, received, sent, group=ranks.group)
        return found.to(parts.device)


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, counts: tuple[int, ...], ranks: Ranks) -> torch.Tensor:
        ctx.own = slice(sum(counts[: ranks.rank]), sum(counts[: ranks.rank + 1]))
        widest = max(counts)
        found = own.new_zeros(len(counts) * widest)
        with ranks.progress.collective("results") as takes_part:
            if takes_part:
                ranks.moved["all-gather"] += found.nbytes
                padded = torch.nn.functional.pad(own.detach(), (0, widest - len(own)))
                with ranks.progress.sending():
                    gather_into(found, padded, group=ranks.group)
        return torch.cat([numbers[:count] for numbers, count in zip(found.split(widest), counts, strict=True)])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_all: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return of_all[ctx.own], None, None


ONE = SequenceGroup(ALONE)
