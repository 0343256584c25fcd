"""Whole copies of a sharded model: one that a rollout engine reads, and one in main memory for an export.

Enters: the plain model before it is sharded, and its `Shards` afterwards. Leaves: a plain model of the same kind. Guaranteed: a twin's
parameters stay at the same addresses, so captured graphs stay valid; they are gathered through a buffer of bounded size; a twin knows
whether it has the latest values. All workers must call the same functions at the same time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch

from fulltilt.model.fuse import joined_tensors, rejoin, separate
from fulltilt.parallel.apply import Shards
from fulltilt.parallel.exchange import Exchange

Model = TypeVar("Model", bound=torch.nn.Module)


def like(model: Model, make: Callable[[str, torch.nn.Parameter], torch.Tensor]) -> Model:
    """Make a model of the same kind. `make` returns the memory of each parameter. Tied parameters stay tied."""
    made = {
        id(parameter): torch.nn.Parameter(make(name, parameter), requires_grad=parameter.requires_grad)
        for name, parameter in model.named_parameters()
    }
    joined = {id(whole): whole for whole in joined_tensors(model)}  # not copied, because they are as large as the parameters
    return copy.deepcopy(model, memo={**made, **joined})


def over_same_memory(model: Model) -> Model:
    """Make a second model with the memory of the first, which keeps that memory when the first is sharded. Layers that run as one product
    still do."""
    return like(model, lambda name, parameter: parameter.detach())


@torch.no_grad()
def part_memory(copied: torch.nn.Module, model: torch.nn.Module) -> None:
    """Give a model made by `over_same_memory` its own memory wherever the other model still uses the same."""
    taken = {own.untyped_storage().data_ptr() for own in model.parameters()}
    for own in copied.parameters():
        if own.untyped_storage().data_ptr() in taken:
            own.data = own.data.clone()
    rejoin(copied)


def without_memory(model: Model) -> Model:
    found = like(model, lambda name, parameter: torch.empty_like(parameter, device="meta"))
    separate(found)
    return found


class Twin:
    """The whole model that a rollout engine reads."""

    def __init__(self, model: torch.nn.Module, shards: Shards) -> None:
        self.model, self.shards, self.version = model, shards, shards.version
        trained = [name for name, parameter in shards.model.named_parameters() if parameter.requires_grad]
        parameters = dict(model.named_parameters())
        self._exchanges = exchanges(shards, {name: parameters[name] for name in trained}, parameters)

    def sync(self) -> None:
        """Get the latest values, unless the twin already has them."""
        if self.current:
            return
        for exchange in self._exchanges:
            exchange.gather()
        self.version = self.shards.version

    @property
    def current(self) -> bool:
        return self.version == self.shards.version

    def memory(self) -> Iterator[torch.Tensor]:
        yield from self.model.parameters()
        yield from (exchange.buffer for exchange in self._exchanges)


def whole_on_host(shards: Shards, structure: Model, *, wanted: bool, learning: bool = False) -> Model | None:
    """Return a copy of the whole model, or of this worker's part of it, in main memory; None if not `wanted`. `structure`: a similar model
    without memory. `learning`: whether only parameters that learn get memory."""
    parameters = {name: each for name, each in structure.named_parameters() if each.requires_grad or not learning}
    memory = {name: torch.empty_like(parameter, device="cpu") for name, parameter in parameters.items()} if wanted else None
    for exchange in exchanges(shards, parameters, memory):
        exchange.gather()
    return None if memory is None else like(structure, lambda name, parameter: memory.get(name, parameter))


def exchanges(shards: Shards, wanted: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor] | None) -> list[Exchange]:
    """Make one exchange for each type of the wanted parameters, all with the same buffer. `targets`: memory for the parameters; None: this
    worker does not need them."""
    own, found = shards.own(), []
    kinds = {name: (parameter.dtype, name in shards.apart) for name, parameter in wanted.items()}
    for kind in dict.fromkeys(kinds.values()):
        names = [name for name, each in kinds.items() if each == kind]
        found.append((shards.layout(names), shards.group_of(names[0]), kind[0]))
    device = next(iter(own.values())).device
    bucket = max((layout.bucket_bytes(dtype.itemsize) for layout, _, dtype in found), default=0)
    memory = torch.zeros(bucket, dtype=torch.uint8, device=device)
    return [Exchange(layout, ranks, dtype, device, own, targets, memory=memory) for layout, ranks, dtype in found]
