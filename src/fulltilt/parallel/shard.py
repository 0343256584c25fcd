"""The division of a model's parameters among workers, and the memory that they lie in.

Enters: parameters, and how many workers divide them. Leaves: for each type of number, a `Layout`: one memory with all parameters of that
type one after another, cut into as many equal stretches as there are workers. Guaranteed: every number belongs to exactly one worker;
parameters that are neighbours in their own memory, such as layers that run as one product, are neighbours here too; the layout depends on
the parameters alone and, except for padding at its end, not on the number of workers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fulltilt.parallel.layout import Layout, places


def lay_out(parameters: Mapping[str, torch.Tensor], workers: int) -> dict[torch.dtype, Layout]:
    found: dict[torch.dtype, Layout] = {}
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters.values()):
        own = {name: parameter for name, parameter in parameters.items() if parameter.dtype == dtype}
        runs = neighbours(own)
        found[dtype] = places([(name, own[name].numel(), name != run[0]) for run in runs for name in run], workers)
    return found


def neighbours(parameters: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Find runs of parameters that follow one another in one storage without a gap, in the order of each storage's first parameter. All
    workers find the same runs: addresses of different storages are never compared."""
    storages: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        storages.setdefault(parameter.untyped_storage().data_ptr(), []).append(name)
    runs: list[list[str]] = []
    for names in storages.values():
        end = -1
        for name in sorted(names, key=lambda name: parameters[name].storage_offset()):
            begin = int(parameters[name].storage_offset())
            if begin == end:
                runs[-1].append(name)
            else:
                runs.append([name])
            end = begin + parameters[name].numel()
    return runs


@torch.no_grad()
def move_into(layout: Layout, parameters: Mapping[str, torch.nn.Parameter]) -> torch.Tensor:
    """Move parameters into one memory as the layout says; each stays the same parameter. Call it before anything keeps an address."""
    sample = parameters[next(iter(layout.places))]
    memory = torch.zeros(layout.total, dtype=sample.dtype, device=sample.device)
    for name, place in layout.places.items():
        parameter = parameters[name]
        assert parameter.is_contiguous(), f"{name} does not lie in the order of its shape, in which workers share it out"
        part = memory[place : place + layout.counts[name]].view(parameter.shape)
        parameter.data = part.copy_(parameter)
    return memory
