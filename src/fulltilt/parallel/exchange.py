"""Parameters from the workers that have parts of them to the workers that need them whole, through a buffer of bounded size.

Enters: a layout, which says who has what, and the memory that parts come from and go to. Leaves: memory filled. Guaranteed: nothing is
allocated after the exchange was made; numbers are rounded to the type of the buffer, once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fulltilt.parallel.layout import RowLayout
from fulltilt.parallel.ranks import Ranks

Copies = list[tuple[torch.Tensor, torch.Tensor]]  # (target, source)


class Exchange:
    """A gather that can be repeated. `own`: this worker's numbers of each parameter, flat. `targets`: where whole ones go; None: not needed
    here."""

    def __init__(
        self, layout: RowLayout, ranks: Ranks, dtype: torch.dtype, device: torch.device,
        own: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor] | None,
    ) -> None:  # fmt: skip
        self.ranks, width = ranks, layout.in_a_round(dtype.itemsize)
        self.buffer = torch.zeros(ranks.size * width, dtype=dtype, device=device)
        rows, begin = self.buffer.view(ranks.size, width), 0
        self.rounds: list[tuple[Copies, Copies]] = [([], []) for _ in range(0, layout.stretch, width)]  # into the buffer and out of it
        for name in layout.shapes:
            done, each = 0, layout.width(name)
            while done < each:
                number, place = divmod(begin + done, width)
                parts = rows[:, place : min(width, place + each - done)]
                given = own[name][done : done + parts.shape[1]]
                into, out = self.rounds[number]
                into.append((parts[ranks.rank, : len(given)], given))
                if targets is not None:
                    out += spread(parts, flat(targets[name]), each, done)
                done += parts.shape[1]
            begin += each

    @torch.no_grad()
    def gather(self) -> None:
        for into, out in self.rounds:
            copy_all(into)
            self.ranks.gather(self.buffer)
            copy_all(out)


def spread(parts: torch.Tensor, target: torch.Tensor, each: int, first: int) -> Copies:
    """Copies from a row for each worker to a flat parameter, of which every worker has `each` numbers, but the last ones fewer or none. The
    rows begin with the `first`-th number of each worker."""
    full, length = len(target) // each, parts.shape[1]
    last = target[full * each + first :][:length]
    return [
        (target[: full * each].view(full, each)[:, first : first + length], parts[:full]),
        *([(last, parts[full, : len(last)])] if len(last) else []),
    ]


def length_of(numbers: slice) -> int:
    return int(numbers.stop - numbers.start)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers in the order of memory, so that parameter, gradient and states correspond whatever the strides are."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def copy_all(pairs: Copies) -> None:
    """Copy each (target, source), rounded to the target's type."""
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
