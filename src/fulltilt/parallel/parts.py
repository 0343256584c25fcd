"""A model divided among the workers of a group: code that tensor and expert parallelism have in common.

Enters: a model whose parameters were cut as a table says. Leaves: `ModelPart`, whole parameters in main memory for an export, and
copies for a rollout engine, whole or divided in any other way (`RolloutCopy`). Guaranteed: every parameter keeps its name; the parameters
of copies stay at the same addresses.
All workers of the group must call the same functions at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from fulltilt.parallel.apply import Shards
from fulltilt.parallel.cuts import CutTensor
from fulltilt.parallel.exchange import Copies, Exchange, PartTransfer, copy_all, spread
from fulltilt.parallel.layout import RowLayout
from fulltilt.parallel.ranks import ALONE, Ranks
from fulltilt.parallel.slices import SliceTable, join


@dataclass(eq=False)
class ModelPart:
    """This worker's part of a model. This base class leaves the gradients of numbers that several workers hold to the sums of data
    parallelism."""

    model: torch.nn.Module
    table: SliceTable
    ranks: Ranks  # the workers that together hold all parts
    whole: Mapping[str, tuple[int, ...]]  # the shapes of the whole parameters

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of this worker's parts."""
        return {name: self.table.cuts[name].shape(shape, self.ranks.rank) for name, shape in self.whole.items()}

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def is_whole(self, name: str) -> bool:
        """Return whether every worker holds all of a parameter."""
        return self.shapes[name] == self.whole[name]

    def cut(self, name: str) -> CutTensor:
        return CutTensor(self.table.cuts[name], self.whole[name], self.ranks.size)

    def saved_as(self, name: str) -> str | None:
        """Return the suffix of a tensor's name in a checkpoint, to tell parts from one another; None if another worker saves the same
        tensor."""
        return "" if self.is_whole(name) else f"#{self.ranks.rank}"

    def sum_shared(self, gradients: Mapping[str, torch.Tensor], own: Mapping[str, slice] | None = None) -> None:
        """Sum gradients in place, where several workers hold the same numbers and each finds a part of the gradient."""

    def norm(self, gradients: Mapping[str, torch.Tensor], own: Mapping[str, slice] | None = None) -> torch.Tensor:
        """Return this worker's part of a norm over all workers, which counts every number once, however many hold it. `own`: for each
        parameter, the range of this worker's numbers that the gradients belong to, flat; None: all."""
        given = list(gradients.values())
        return torch.nn.utils.get_total_norm(given) if given else torch.zeros((), device=self.device)


def shapes_of(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def cut_parameters(model: torch.nn.Module, table: SliceTable, rank: int) -> None:
    """Replace every parameter that is cut by this worker's part of it. A tied parameter stays tied."""
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
    """Return a whole parameter from the parts of all workers; None if not `wanted`. Parts in main memory pass through the device, which the
    workers' collectives need."""
    ranks, cut = part.ranks, part.table.cuts[name]
    shapes = [cut.shape(part.whole[name], rank) for rank in range(ranks.size)]
    counts = [math.prod(shape) for shape in shapes]
    memory = torch.zeros(ranks.size * max(counts), dtype=own.dtype, device=part.device)
    ranks.own(memory)[: own.numel()] = own.reshape(-1)
    ranks.gather(memory)
    rows = zip(memory.view(ranks.size, -1), counts, shapes, strict=True)
    return join(cut, [row[:count].view(shape) for row, count, shape in rows]) if wanted else None


@torch.no_grad()
def join_on_first(part: ModelPart, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """Return whole parameters in main memory on the first worker, from the parts of all; None on the others. All workers must call this
    with the parts of the same parameters."""
    first, found = part.ranks.rank == 0, dict[str, torch.Tensor]()
    for name, own in parts.items():
        whole = own if part.is_whole(name) else gather_whole(part, name, own, wanted=first)
        if whole is not None and first:
            found[name] = whole.cpu()
    return found if first else None


class RolloutCopy:
    """A rollout engine's model with its own memory, beside a model that learns and is divided in another way. New values come in buckets of
    bounded size, each with numbers of several parameters."""

    def __init__(self, model: torch.nn.Module, target: ModelPart | None) -> None:
        """`target`: the part of `model` that this worker has; None: the model is whole."""
        self.model, self.target = model, target
        self._latest: Callable[[], int] = lambda: 0
        self._exchanges: list[Exchange] = []
        self._copies: Copies = []  # copies of parameters that every worker has whole
        self.bucket = torch.zeros(0, dtype=torch.uint8)
        self.version = 0

    def follow(self, source: torch.nn.Module, part: ModelPart | None, shards: Shards | None, latest: Callable[[], int]) -> None:
        """Set the model that learns, which may be a part and may be sharded. Its parameters must keep their addresses. `latest`: returns
        how often the model has changed."""
        self._latest, self.version = latest, -1
        targets, device = dict(self.model.named_parameters()), next(self.model.parameters()).device
        learning = {name: own for name, own in source.named_parameters() if own.requires_grad}
        numbers = shards.own() if shards else {name: own.detach().view(-1) for name, own in learning.items()}
        whole = {name: part.whole[name] if part else tuple(own.shape) for name, own in learning.items()}
        wanted, place = (self.target.table.cuts, self.target.ranks.rank) if self.target else (None, 0)
        kinds: dict[tuple[torch.dtype, bool, bool], list[str]] = {}
        for name in learning:
            cut, apart = part is not None and not part.is_whole(name), shards is not None and name in shards.apart
            kinds.setdefault((targets[name].dtype, cut, apart), []).append(name)
        made: list[tuple[RowLayout, Ranks, torch.dtype, PartTransfer]] = []
        self._copies = []
        for (dtype, cut, _), names in kinds.items():
            division = (
                PartTransfer(part.ranks, part.table.cuts, wanted, place) if part and cut else PartTransfer(wanted=wanted, place=place)
            )
            group = shards.group_of(names[0]) if shards else ALONE
            shapes = {name: division.cuts[name].shape(whole[name], 0) if division.cuts else whole[name] for name in names}
            layout = RowLayout(shapes, group.size, division.ranks.size)
            if layout.workers * layout.parts > 1:
                made.append((layout, group if group.size > 1 else ALONE, dtype, division))
                continue
            for name in names:
                common = division.overlaps(name, whole[name] or (1,), 0)
                self._copies += spread(numbers[name][None], 0, whole[name] or (1,), common, targets[name])
        bucket = max((layout.bucket_bytes(dtype.itemsize) for layout, _, dtype, _ in made), default=0)
        self.bucket = memory = torch.zeros(bucket, dtype=torch.uint8, device=device)
        self._exchanges = [
            Exchange(layout, group, dtype, device, numbers, targets, division, whole, memory) for layout, group, dtype, division in made
        ]

    @torch.no_grad()
    def sync(self) -> None:
        """Get the latest values, unless the model already has them."""
        if self.current:
            return
        copy_all(self._copies)
        for exchange in self._exchanges:
            exchange.gather()
        self.version = self._latest()

    @property
    def current(self) -> bool:
        return self.version == self._latest()

    def memory(self) -> Iterator[torch.Tensor]:
        yield from self.model.parameters()
        yield self.bucket
