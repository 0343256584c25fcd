"""A model of which every worker of a group holds a part: what tensor and expert parallelism have in common.

Enters: a model whose parameters were cut as a table says. Leaves: `ModelPart`, whole parameters in main memory for an export, and
copies for a rollout engine: `PartTwin`, a whole one, and `RolloutCopy`, divided in any way. Guaranteed: every parameter keeps its name; the
parameters of copies stay at the same addresses.
All workers of the group must call the same functions at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch

from fulltilt.model.arrays import local
from fulltilt.parallel.apply import Shards
from fulltilt.parallel.cuts import CutTensor
from fulltilt.parallel.ranks import Ranks
from fulltilt.parallel.slices import SliceTable, join, take_part


@dataclass(eq=False)
class ModelPart:
    """This worker's part of a model. This class: what several hold, all have in common, as plain data parallelism has."""

    model: torch.nn.Module
    table: SliceTable
    ranks: Ranks  # the workers that hold all parts
    whole: Mapping[str, tuple[int, ...]]  # the shapes of the whole parameters
    version: int = field(default=0, init=False)  # how many times the parameters were changed

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of this worker's parts."""
        return {name: self.table.cuts[name].shape(shape, self.ranks.rank) for name, shape in self.whole.items()}

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def is_whole(self, name: str) -> bool:
        """Whether every worker holds all of a parameter."""
        return self.shapes[name] == self.whole[name]

    def cut(self, name: str) -> CutTensor:
        return CutTensor(self.table.cuts[name], self.whole[name], self.ranks.size)

    def saved_as(self, name: str) -> str | None:
        """What follows the name of a tensor in a checkpoint if it is one part of several; None: another worker saves the same."""
        return "" if self.is_whole(name) else f"#{self.ranks.rank}"

    def sum_shared(self, gradients: Mapping[str, torch.Tensor], own: Mapping[str, slice] | None = None) -> None:
        """Make gradients whole, in place, of numbers that several workers hold and find a part of."""

    def norm(self, gradients: Mapping[str, torch.Tensor], own: Mapping[str, slice] | None = None) -> torch.Tensor:
        """This worker's part of a norm over all workers, which counts every number once, however many hold it. `own`: the range of the
        numbers of this worker's part of each parameter that the gradients are of, flat; None: all."""
        given = list(gradients.values())
        return torch.nn.utils.get_total_norm(given) if given else torch.zeros((), device=self.device)


def shapes_of(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def cut_parameters(model: torch.nn.Module, table: SliceTable, rank: int) -> None:
    """Replace every parameter that is cut by this worker's part. A tied one stays tied."""
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for leaf, whole in list(module.named_parameters(recurse=False)):
            if whole not in made:
                own = table.local_slice(f"{prefix}.{leaf}", whole.detach(), rank)
                part = torch.nn.Parameter(own.clone(memory_format=torch.contiguous_format), requires_grad=whole.requires_grad)
                made[whole] = whole if own.shape == whole.shape else part
            setattr(module, leaf, made[whole])
        if isinstance(module, torch.nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, torch.nn.Embedding):
            module.num_embeddings = len(module.weight)


@torch.no_grad()
def gather_whole(part: ModelPart, name: str, own: torch.Tensor, *, wanted: bool = True) -> torch.Tensor | None:
    """A whole parameter from the parts of all workers; None where it is not wanted."""
    ranks, cut = part.ranks, part.table.cuts[name]
    shapes = [cut.shape(part.whole[name], rank) for rank in range(ranks.size)]
    counts = [math.prod(shape) for shape in shapes]
    memory = torch.zeros(ranks.size * max(counts), dtype=own.dtype, device=own.device)
    ranks.own(memory)[: own.numel()] = own.reshape(-1)
    ranks.gather(memory)
    rows = zip(memory.view(ranks.size, -1), counts, shapes, strict=True)
    return join(cut, [row[:count].view(shape) for row, count, shape in rows]) if wanted else None


@torch.no_grad()
def join_on_first(part: ModelPart, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """Whole parameters in main memory on the first worker, from the parts of all; None on the others. All must call it with the parts of
    the same parameters."""
    first, found = part.ranks.rank == 0, dict[str, torch.Tensor]()
    for name, own in parts.items():
        whole = own if part.is_whole(name) else gather_whole(part, name, own, wanted=first)
        if whole is not None and first:
            found[name] = whole.cpu()
    return found if first else None


class RolloutCopy:
    """A model for a rollout engine that is divided in another way than the one that learns: it has memory of its own."""

    def __init__(self, model: torch.nn.Module, target: ModelPart | None) -> None:
        """`target`: the part of `model` that this worker has; None: it is whole."""
        self.model, self.target = model, target
        self._latest: Callable[[], int] = lambda: 0
        self._get: Mapping[str, Callable[[], torch.Tensor]] = {}
        self.version = 0

    def follow(self, source: torch.nn.Module, part: ModelPart | None, shards: Shards | None, latest: Callable[[], int]) -> None:
        """Name what learns: a model that may be a part, and may be shared out. `latest` counts how often it has changed."""
        self._latest, self.version = latest, -1
        types = {name: own.dtype for name, own in self.model.named_parameters()}
        trained = {name: own for name, own in source.named_parameters() if own.requires_grad}

        def whole(name: str, own: torch.Tensor) -> torch.Tensor:
            found = gather_rows(shards, name, own, types[name]) if shards else own.detach().to(types[name])
            if part is None or part.is_whole(name):
                return found
            gathered = gather_whole(part, name, found)
            assert gathered is not None
            return gathered

        self._get = {name: partial(whole, name, own) for name, own in trained.items()}

    @torch.no_grad()
    def sync(self) -> None:
        """Get the latest values, unless it has them: one parameter after another is whole for a moment."""
        if self.current:
            return
        targets = dict(self.model.named_parameters())
        for name, get in self._get.items():
            found = get()
            targets[name].copy_(take_part(self.target.table.cuts[name], found, self.target.ranks.rank) if self.target else found)
        self.version = self._latest()

    @property
    def current(self) -> bool:
        return self.version == self._latest()

    def memory(self) -> Iterator[torch.Tensor]:
        yield from self.model.parameters()


def gather_rows(shards: Shards, name: str, own: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A parameter that is shared out by rows, whole, in the given type."""
    group, layout = shards.group_of(name), shards.layout([name])
    held, memory = local(own).detach().reshape(-1), torch.zeros(group.size * layout.width(name), dtype=dtype, device=own.device)
    group.own(memory)[: len(held)] = held
    group.gather(memory)
    return memory[: own.numel()].view(own.shape)


class PartTwin:
    """The whole model for a rollout engine, beside a part that learns."""

    def __init__(self, model: torch.nn.Module, part: ModelPart) -> None:
        """`model`: like the whole one that was cut, with memory that nothing else changes."""
        self.model, self.part, self.version = model, part, part.version
        self._sources = {name: own for name, own in part.model.named_parameters() if own.requires_grad}
        self._targets = dict(model.named_parameters())

    @torch.no_grad()
    def sync(self) -> None:
        """Get the latest values, unless it has them."""
        if self.current:
            return
        for name, own in self._sources.items():
            target, cut = self._targets[name], self.part.table.cuts[name]
            if self.part.is_whole(name):
                target.copy_(own)
            elif cut.in_order and target.is_contiguous():  # straight into its memory
                memory = target.detach().view(-1)
                self.part.ranks.own(memory).copy_(own.reshape(-1))
                self.part.ranks.gather(memory)
            else:
                whole = gather_whole(self.part, name, own.detach())
                assert whole is not None
                target.copy_(whole)
        self.version = self.part.version

    @property
    def current(self) -> bool:
        return self.version == self.part.version

    def memory(self) -> Iterator[torch.Tensor]:
        yield from self.model.parameters()
