"""One worker's share of the parameters that an optimizer changes, and of their gradients.

Enters: a model's trained parameters, and the workers that train them together. Leaves: for each parameter the numbers that this worker
updates (`own`, `numbers`), and their gradients summed over all workers (`reduced`). Guaranteed: every number is updated by one worker (one
of each group, if groups hold the same); after `changed` every worker computes with the new values. Three ways:

    WholeParameters   every worker has all parameters. Accumulators of one type are one memory, cut into a stretch for each worker:
                      gradients are summed into the stretches, and new parameters are sent to all. No collective runs before the step.
    ExpertsApart      the same, but experts are those that some workers have in common.
    ParameterShards   every worker has a part of each parameter (parallel/apply.py), whose gradient arrives summed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from fulltilt.model.arrays import local
from fulltilt.model.fuse import rejoin
from fulltilt.parallel.apply import Shards
from fulltilt.parallel.exchange import copy_all, flat, length_of
from fulltilt.parallel.parts import ModelPart
from fulltilt.parallel.ranks import Ranks
from fulltilt.parallel.shard import lay_out, move_into

Parameters = Mapping[str, torch.nn.Parameter]


@dataclass(frozen=True, eq=False)
class Divided:
    """Groups of workers for a model of which this worker has a part. Workers with the same part divide its numbers."""

    part: ModelPart
    everyone: Ranks  # the workers with all parts
    replicas: Ranks | None = None  # given if only some parameters are in parts: the workers with the same parts of these


class Held(Protocol):
    ranks: Ranks  # the workers among which the numbers are divided
    own: Mapping[str, slice]  # the range of each parameter's numbers that this worker updates; it may be empty
    saves: bool  # whether this worker saves its numbers into checkpoints: no other worker saves the same

    @property
    def version(self) -> int:
        """How many times the numbers were changed."""

    @property
    def accumulators(self) -> list[torch.Tensor]:
        """The memory of accumulated gradients that exists now."""

    def numbers(self, name: str) -> torch.Tensor:
        """Return this worker's numbers of a parameter, flat, in their permanent memory."""

    def is_own_master(self, name: str) -> bool:
        """Return whether a parameter's numbers are precise enough to be updated directly."""

    def rounded(self, name: str) -> bool:
        """Return whether the model computes with numbers too coarse to be their own masters: then a checkpoint holds a master."""

    def prepare(self) -> None:
        """Allocate the accumulators, unless they exist."""

    def clear(self, *, free: bool) -> None:
        """Set the gradients to zero, or free their memory."""

    def reduced(self) -> dict[str, torch.Tensor]:
        """Return the gradients of this worker's numbers, flat, summed over all workers. A parameter without a gradient on any worker is
        left out, unless it has an accumulator."""

    def norm(self, gradients: Mapping[str, torch.Tensor]) -> float:
        """Return the norm of all gradients, from those of this worker's numbers, with the same bits on every worker, or workers would drift
        apart."""

    def changed(self) -> None:
        """Make all workers compute with the updated numbers."""


class WholeParameters:
    saves: bool = True
    version: int = 0
    own: Mapping[str, slice]
    gradients: dict[torch.dtype, torch.Tensor]

    def __init__(self, model: torch.nn.Module, parameters: Parameters, ranks: Ranks, divided: Divided | None = None) -> None:
        self.parameters, self.ranks, self.divided = parameters, ranks, divided
        self.layouts = lay_out(parameters, ranks.size)
        self.memories: list[torch.Tensor] = []
        if not ranks.alone:  # all parameters of a type in one memory, so that workers exchange them in place
            self.memories = [move_into(layout, parameters) for layout in self.layouts.values()]
            rejoin(model)
        self.own = {name: layout.own(name, ranks.rank) for layout in self.layouts.values() for name in layout.places}
        self.gradients = {}
        for parameter in filter(is_low, parameters.values()):
            parameter.register_post_accumulate_grad_hook(accumulate)

    @property
    def accumulators(self) -> list[torch.Tensor]:
        return list(self.gradients.values())

    def numbers(self, name: str) -> torch.Tensor:
        return flat(self.parameters[name])[self.own[name]]

    def is_own_master(self, name: str) -> bool:
        return not is_low(self.parameters[name])

    def rounded(self, name: str) -> bool:
        return is_low(self.parameters[name])

    def prepare(self) -> None:
        """Allocate accumulators. A parameter that is its own master needs none, unless its gradient has to be summed over workers."""
        if self.gradients:
            return
        for dtype, layout in self.layouts.items():
            if low(dtype) or not self.ranks.alone:
                wide = torch.float32 if low(dtype) else dtype
                self.gradients[dtype] = memory = torch.zeros(layout.total, dtype=wide, device=device_of(self.parameters))
                for name, place in layout.places.items() if low(dtype) else ():
                    parameter = self.parameters[name]
                    parameter.main_grad = shaped(memory[place:], parameter)  # type: ignore[attr-defined]

    def clear(self, *, free: bool) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
            if free and hasattr(parameter, "main_grad"):
                del parameter.main_grad
        if free:
            self.gradients.clear()
        for memory in self.gradients.values():
            memory.zero_()

    @torch.no_grad()
    def reduced(self) -> dict[str, torch.Tensor]:
        found = {name: p.main_grad if is_low(p) else p.grad for name, p in self.parameters.items()}  # type: ignore[attr-defined]
        flats = {name: flat(like_parameter(gradient, self.parameters[name])) for name, gradient in found.items() if gradient is not None}
        if self.divided:
            self.divided.part.sum_shared(flats)
        if self.ranks.alone or not self.parameters:
            return flats
        given = torch.tensor([name in flats for name in self.parameters], dtype=torch.float32, device=device_of(self.parameters))
        self.ranks.sum(given)
        for dtype, layout in self.layouts.items():
            memory = self.gradients[dtype]
            if not low(dtype):
                copy_all(
                    [(memory[place : place + layout.counts[name]], flats[name]) for name, place in layout.places.items() if name in flats]
                )
            self.ranks.reduce(memory)
        wanted = {name for name, count in zip(self.parameters, given.tolist(), strict=True) if count}
        return {
            name: self.gradients[dtype][place + own.start : place + own.stop]
            for dtype, layout in self.layouts.items()
            for name, place in layout.places.items()
            if name in wanted and length_of(own := self.own[name])
        }

    def norm(self, gradients: Mapping[str, torch.Tensor]) -> float:
        if self.divided:
            return self.divided.everyone.norm(self.divided.part.norm(gradients, self.own))
        return self.ranks.norm(norm_of(gradients, self.parameters))

    def changed(self) -> None:
        for memory in self.memories:
            self.ranks.gather(memory)
        self.version += 1


class ExpertsApart:
    """Whole parameters, where experts are divided only among the workers that have the same experts."""

    saves: bool = True
    version: int = 0

    def __init__(self, model: torch.nn.Module, parameters: Parameters, ranks: Ranks, divided: Divided) -> None:
        assert divided.replicas is not None
        self.parameters, self.ranks, self.divided = parameters, ranks, divided
        common = {name: own for name, own in parameters.items() if divided.part.is_whole(name)}
        self._common = WholeParameters(model, common, ranks)
        experts = {name: own for name, own in parameters.items() if name not in common}
        self._experts = WholeParameters(model, experts, divided.replicas)
        self._both = (self._common, self._experts)
        self.own: Mapping[str, slice] = {**self._common.own, **self._experts.own}

    def _holding(self, name: str) -> WholeParameters:
        return self._common if name in self._common.own else self._experts

    @property
    def accumulators(self) -> list[torch.Tensor]:
        return [memory for each in self._both for memory in each.accumulators]

    def numbers(self, name: str) -> torch.Tensor:
        return self._holding(name).numbers(name)

    def is_own_master(self, name: str) -> bool:
        return not is_low(self.parameters[name])

    def rounded(self, name: str) -> bool:
        return is_low(self.parameters[name])

    def prepare(self) -> None:
        for each in self._both:
            each.prepare()

    def clear(self, *, free: bool) -> None:
        for each in self._both:
            each.clear(free=free)

    def reduced(self) -> dict[str, torch.Tensor]:
        return {**self._common.reduced(), **self._experts.reduced()}

    def norm(self, gradients: Mapping[str, torch.Tensor]) -> float:
        """Return the norm of all gradients. Every number is in one stretch: a common parameter's among all workers, an expert's among those
        that have it."""
        return self.divided.everyone.norm(norm_of(gradients, self.parameters))

    def changed(self) -> None:
        for each in self._both:
            each.changed()
        self.version += 1


class ParameterShards:
    own: Mapping[str, slice]

    def __init__(self, parameters: Parameters, shards: Shards, divided: Divided | None = None) -> None:
        self.parameters, self.shards, self.ranks, self.saves = parameters, shards, shards.sharing.group, shards.sharing.first
        self.divided = divided
        self.own = {name: shards.layout([name]).own(name, shards.group_of(name).rank) for name in parameters}
        self._numbers = {name: numbers for name, numbers in shards.own().items() if name in parameters}

    @property
    def accumulators(self) -> list[torch.Tensor]:
        """Empty: each parameter has its own gradient."""
        return []

    def numbers(self, name: str) -> torch.Tensor:
        return self._numbers[name]

    def is_own_master(self, name: str) -> bool:
        return True

    def rounded(self, name: str) -> bool:
        return low(self.shards.types[name])

    def prepare(self) -> None:
        """Do nothing: gradients have memory from the first backward pass to the end of the step."""

    def clear(self, *, free: bool) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def reduced(self) -> dict[str, torch.Tensor]:
        given = {name: local(p.grad).view(-1) for name, p in self.parameters.items() if p.grad is not None}
        found = {name: gradient for name, gradient in given.items() if length_of(self.own[name])}
        if self.divided:
            self.divided.part.sum_shared(found, self.own)
        return found

    def norm(self, gradients: Mapping[str, torch.Tensor]) -> float:
        """Return the norm as one sum over all groups, which have the same gradients: each group's own sum could add up in another order."""
        sharing = self.shards.sharing
        everyone = self.divided.everyone if self.divided else sharing.everyone
        own = self.divided.part.norm(gradients, self.own) if self.divided else norm_of(gradients, self.parameters)
        return everyone.norm(own * math.sqrt(self.ranks.size / sharing.everyone.size))

    def changed(self) -> None:
        self.shards.version += 1

    @property
    def version(self) -> int:
        return self.shards.version


def norm_of(gradients: Mapping[str, torch.Tensor], parameters: Parameters) -> torch.Tensor:
    given = list(gradients.values())
    return torch.nn.utils.get_total_norm(given) if given else torch.zeros((), device=device_of(parameters))


def device_of(parameters: Parameters) -> torch.device:
    return next((parameter.device for parameter in parameters.values()), torch.device("cpu"))


def is_low(parameter: torch.Tensor) -> bool:
    """Return whether the parameter's type is too coarse for it to be its own master."""
    return low(parameter.dtype)


def low(dtype: torch.dtype) -> bool:
    return dtype not in (torch.float32, torch.float64)


def shaped(memory: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the numbers at the beginning of `memory`, in the shape of the parameter."""
    return memory.as_strided(parameter.shape, parameter.stride())


def like_parameter(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient with its parameter's strides. Autograd's own gradients have them; a gradient set by other code may not."""
    return gradient if gradient.stride() == parameter.stride() else torch.empty_like(parameter).copy_(gradient)


def accumulate(parameter: torch.Tensor) -> None:
    """Add a micro-batch's gradient to the float32 accumulator and drop it. The head adds its own gradient there and leaves none."""
    if parameter.grad is not None:
        assert hasattr(parameter, "main_grad"), "Optimizer.prepare comes before the first pass of a mini-batch"
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
