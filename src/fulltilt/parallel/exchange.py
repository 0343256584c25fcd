"""Parameters from the workers that have parts of them to the workers that need them whole, through a buffer of bounded size.

Enters: a layout, which says who has what, and the memory that parts come from and go to. Leaves: memory filled. Guaranteed: nothing is
allocated after the exchange was made; numbers are rounded to the type of the buffer, once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fulltilt.parallel.layout import RowLayout
from fulltilt.parallel.ranks import Ranks

Copies = list[tuple[torch.Tensor, torch.Tensor]]  # (target, source)


class Exchange:
    """A gather that can be repeated. `given`: this worker's numbers of a parameter, by name and range. `wanted`: where a range of numbers
    goes; None: not needed here."""

    def __init__(
        self, layout: RowLayout, ranks: Ranks, dtype: torch.dtype, device: torch.device,
        given: Callable[[str, slice], torch.Tensor], wanted: Callable[[str, slice], torch.Tensor] | None,
    ) -> None:  # fmt: skip
        self.ranks, width = ranks, layout.in_a_round(dtype.itemsize)
        self.buffer = torch.zeros(ranks.size * width, dtype=dtype, device=device)
        rows = self.buffer.view(ranks.size, width)
        self.rounds: list[tuple[Copies, Copies]] = []  # into the buffer and out of it
        for begin in range(0, layout.stretch, width):
            into, out = Copies(), Copies()
            for rank, name, numbers, place in layout.pieces(begin, width):
                part = rows[rank, place : place + length_of(numbers)]
                if rank == ranks.rank:
                    into.append((part, given(name, numbers)))
                if wanted is not None:
                    out.append((wanted(name, numbers), part))
            self.rounds.append((into, out))

    @torch.no_grad()
    def gather(self) -> None:
        for into, out in self.rounds:
            copy_all(into)
            self.ranks.gather(self.buffer)
            copy_all(out)


def length_of(numbers: slice) -> int:
    return int(numbers.stop - numbers.start)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers in the order of memory, so that parameter, gradient and states correspond whatever the strides are."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def copy_all(pairs: Copies) -> None:
    """Copy each (target, source), rounded to the target's type."""
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
