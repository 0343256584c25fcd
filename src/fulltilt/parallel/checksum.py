"""A checksum of some of a model's numbers, by which workers that must have the same weights are compared.

Enters: parameters, and the number of the comparison. Leaves: a short text. Guaranteed: it depends on the numbers alone, to the bit; every
comparison looks at other numbers of each parameter, at the same places on every worker, so that a lasting difference is found sooner or
later; the cost does not grow with the size of the parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

NUMBERS = 64  # at least this many numbers of each parameter, if it has as many


@torch.no_grad()
def checksum(parameters: Iterable[torch.Tensor], turn: int) -> str:
    chosen: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        step = max(1, parameter.numel() // NUMBERS)
        chosen.setdefault(parameter.dtype, []).append(parameter.detach().reshape(-1)[turn % step :: step])
    found = hashlib.blake2b(digest_size=8)
    for numbers in chosen.values():
        found.update(torch.cat(numbers).view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()
