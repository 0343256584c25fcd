"""Reading a model's parameters from its files, only as far as this worker needs them.

Enters: a model whose parameters are in files (model/stored.py), divided or sharded while it had no memory. Leaves: the same model with its
parameters on its device. Guaranteed: numbers are those of the whole model, cut; in addition, memory is taken for one tensor's part at a
time; tied parameters stay tied; a number that is not finite is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from fulltilt.model import lora
from fulltilt.model.arrays import is_shard, local
from fulltilt.model.load import refuse_not_finite
from fulltilt.model.stored import Box, StoredWeights, everything, stored_weights
from fulltilt.parallel.apply import Shards
from fulltilt.parallel.cuts import Cut
from fulltilt.parallel.parts import ModelPart


@torch.no_grad()
def fill(model: torch.nn.Module, part: ModelPart | None = None, shards: Shards | None = None) -> None:
    """Read the parameters of a model. `part`: how the model was divided. `shards`: how it was sharded."""
    stored = stored_weights(model)
    if stored is None:
        return
    without = [name for name, own in model.named_parameters() if own.is_meta]
    take_memory(model, stored.device)
    parameters = dict(model.named_parameters())
    for name in without:
        fill_parameter(stored, name, parameters[name], part, shards)
    refuse_not_finite(((name, local(parameters[name])) for name in without), stored.source, stored.key)


def fill_parameter(stored: StoredWeights, name: str, own: torch.nn.Parameter, part: ModelPart | None, shards: Shards | None) -> None:
    source = stored.tensors[lora.plain_name(name).removeprefix("body.")]
    shape, cut, rank = tuple(source.shape), Cut.whole(len(source), 1), 0
    if part is not None:
        cut, rank = part.table.cuts[name], part.ranks.rank
    rows = range(cut.shape(shape, rank)[0])
    if shards is not None:
        each = math.prod(own.shape[1:])
        flat = shards.layout([name]).own(name, shards.group_of(name).rank)
        rows = range(flat.start // each, flat.stop // each) if each else range(0)
    assert local(own).shape[0] == len(rows), f"{name}: {tuple(own.shape)} of {shape}"
    for target, box in stretches(local(own), shape, cut.dim, cut.parts(rank), rows):
        source.copy_into(target, box)


def stretches(
    target: torch.Tensor, shape: Sequence[int], dim: int, parts: Sequence[range], rows: range
) -> Iterator[tuple[torch.Tensor, Box]]:
    """Yield views of a parameter's memory, each with the box of the whole tensor that belongs there. `parts`: the ranges that a member has
    of the whole along `dim`. `rows`: the rows of the member's part that this worker has."""
    begin = 0
    for part in parts:
        box, end = list(everything(shape)), begin + len(part)
        if dim == 0:
            start, stop = max(begin, rows.start), min(end, rows.stop)
            place, box[0] = start - rows.start, range(part.start + start - begin, part.start + stop - begin)
        else:
            place, box[0], box[dim] = begin, rows, part
        if all(map(len, box)):
            yield target.narrow(dim, place, len(box[dim])), tuple(box)
        begin = end


def take_memory(model: torch.nn.Module, device: torch.device) -> None:
    """Allocate every parameter that has no memory, or this worker's shard of it, on the device."""
    tied: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for leaf, each in module.named_parameters(recurse=False):
            tied.setdefault(id(each), []).append((module, leaf))
    if any(map(is_shard, model.parameters())):
        model._apply(lambda own: torch.empty_like(own, device=device) if own.is_meta else own)  # FSDP2 notices this way
        for (module, leaf), *others in tied.values():
            for other, name in others:
                setattr(other, name, getattr(module, leaf))
        return
    for homes in tied.values():
        own: torch.nn.Parameter = getattr(*homes[0])
        if own.is_meta:
            made = torch.nn.Parameter(torch.empty_like(own, device=device), requires_grad=own.requires_grad)
            for module, leaf in homes:
                setattr(module, leaf, made)
