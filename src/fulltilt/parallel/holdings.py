"""Predicted bytes that a worker holds of a model: parameters, gradients and optimizer.

Enters: the sizes of a model's parameters, and how workers shard them. Leaves: `Holdings`. Guaranteed: arithmetic alone, without torch;
equal to the bytes of the storages that a worker has in an update, padding included. `passing_bytes` estimates the additional memory of
passes while parameters are gathered, `loading_bytes` the memory that loading a model takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from fulltilt.parallel.layout import ParameterSize, RowLayout, Sharding, Sizes, lay_out_rows, lay_out_sizes, learning, padded

STATE_ALIGN = 256  # bytes: alignment of the optimizer's states (memory/offload.py)
MOMENTS = 2


@dataclass(frozen=True)
class Holdings:
    """Bytes of one model on one worker."""

    parameters: int
    gradients: int
    optimizer: int  # masters and moments

    def __add__(self, other: Holdings) -> Holdings:
        return Holdings(self.parameters + other.parameters, self.gradients + other.gradients, self.optimizer + other.optimizer)

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@cache
def held_bytes(sizes: Sizes, sharding: Sharding, rank: int = 0) -> Holdings:
    """Return the bytes that a worker holds. `rank`: the worker; others differ only by what does not divide evenly. Sizes of divided experts
    are those of the worker's own."""
    if sharding.experts > 1:
        common, own = (tuple(each for each in sizes if each.apart is apart) for apart in (False, True))
        size, of_worker = sharding.workers // sharding.experts, of_shards if sharding.parameters else of_whole
        replicas = replace(sharding, workers=size, group=size)
        return of_worker(common, sharding, rank) + of_worker(own, replicas, rank // sharding.experts)
    return of_shards(sizes, sharding, rank) if sharding.parameters else of_whole(sizes, sharding, rank)


def of_whole(sizes: Sizes, sharding: Sharding, rank: int) -> Holdings:
    """Return a worker's bytes where parameters are whole: all parameters and accumulators, and the states of its stretch. Accumulators of
    one type share one memory, and so do parameters that several workers exchange. Numbers that are their own masters have autograd's own
    gradients, which several workers copy into an accumulator."""
    several, layouts = sharding.workers > 1, lay_out_sizes(sizes, sharding.workers)
    parameters = sum(own.bytes for own in sizes if not (own.learns and several))
    gradients, states = 0, list[tuple[int, bool]]()
    for itemsize, layout in layouts.items():
        low = itemsize < 4
        parameters += layout.total * itemsize if several else 0
        gradients += layout.total * max(4, itemsize) if low or several else 0
        gradients += 0 if low else sum(layout.counts.values()) * itemsize
        states += [(length(layout.own(name, rank)) * max(4, itemsize), low) for name in layout.places]
    return Holdings(parameters, gradients, state_bytes(states))


def of_shards(sizes: Sizes, sharding: Sharding, rank: int) -> Holdings:
    """Return a worker's bytes where parameters are sharded: some rows of each parameter, as many as the first worker of its group has,
    which are their own masters where they learn."""
    layout = lay_out_rows(sizes, sharding.group)
    parameters = shard_bytes(sizes, sharding.group)
    gradients = sum(layout.width(str(place)) * own.wide for place, own in learning(sizes))
    owned = [(length(layout.own(str(place), rank % sharding.group)) * own.wide, False) for place, own in learning(sizes)]
    return Holdings(parameters, gradients, state_bytes(owned))


def state_bytes(states: Iterable[tuple[int, bool]]) -> int:
    """Return the bytes of optimizer states. `states`: for each parameter, the bytes of its part, and whether it has a master besides its
    two moments."""
    return sum(padded(count, STATE_ALIGN) * (MOMENTS + master) for count, master in states)


def length(numbers: slice) -> int:
    return int(numbers.stop - numbers.start)


@cache
def twin_bytes(sizes: Sizes, sharding: Sharding) -> int:
    """Return the bytes of the whole model that a rollout engine reads where parameters are sharded, and of the buffer for its new
    values."""
    return sum(own.bytes for own in sizes) + bucket_bytes(sizes, sharding)


def rollout_bytes(sizes: Sizes, sharding: Sharding) -> int:
    """Return what a rollout engine needs beside the model that learns: nothing where all parameters are whole, else a model with all of
    them."""
    if sharding.experts > 1:
        return sum(own.bytes * (sharding.experts if own.divided else 1) for own in sizes) + bucket_bytes(sizes, sharding, sharding.experts)
    return twin_bytes(sizes, sharding) if sharding.parameters else 0


def bucket_bytes(sizes: Sizes, sharding: Sharding, parts: int = 1) -> int:
    """Return the bytes of the buffer through which a rollout engine's model gets new values; 0 if no number comes from another worker.
    `parts`: into how many parts a cut parameter is divided which the model needs otherwise; 1: it needs this worker's part."""
    return max((layout.bucket_bytes(itemsize) for layout, itemsize in gathered_layouts(sizes, sharding, parts)), default=0)


def gathered_layouts(sizes: Sizes, sharding: Sharding, parts: int = 1) -> list[tuple[RowLayout, int]]:
    """Return how parameters that learn, grouped by kind, are gathered for a rollout engine's model, each layout with the bytes of a
    number."""
    found = []
    for kind in dict.fromkeys((own.itemsize, own.divided and parts > 1, own.apart) for _, own in learning(sizes)):
        itemsize, cut, apart = kind
        own = [own for _, own in learning(sizes) if (own.itemsize, own.divided and parts > 1, own.apart) == kind]
        workers = (sharding.workers // sharding.experts if apart else sharding.group) if sharding.parameters else 1
        layout = replace(lay_out_rows(own, workers), parts=parts if cut else 1)
        if layout.workers * layout.parts > 1:
            found.append((layout, itemsize))
    return found


@cache
def passing_bytes(sizes: Sizes, sharding: Sharding, itemsize: int) -> int:
    """Estimate the bytes that a forward and backward pass takes for whole parameters of `itemsize` bytes a number, where parameters are
    sharded: those outside the layers, two layers (all layers if they are not freed), and for the largest unit the buffer for gathering it,
    or its gradients and the buffer for summing them."""
    if not sharding.parameters:
        return 0
    units = unit_counts(sizes)
    of_layers = [count for layer, (count, _) in units.items() if layer is not None]
    outside, largest = units.get(None, (0, 0)), max(of_layers, default=0)
    gathered = outside[0] + (min(2 * largest, sum(of_layers)) if sharding.reshard else sum(of_layers))
    through = max((max(itemsize * count, (itemsize + max(4, itemsize)) * learned) for count, learned in units.values()), default=0)
    return gathered * itemsize + through


@cache
def loading_bytes(sizes: Sizes, sharding: Sharding, itemsize: int, *, fused: bool, stays: bool) -> int:
    """Estimate the most bytes that a model takes while it is loaded, where parameters are sharded. `stays`: whether a rollout engine keeps
    the model's parameters beside the shards: then they are loaded before it is sharded. Otherwise each worker reads only its rows.

    Comparing fused layers takes two sets of gradients of two layers; where the model has no parameters yet, also two layers that stand for
    it. Verifying a sharded model takes as much as a pass without gradients. A sharded unit has its shards and its whole parameters, those
    that learn as wide as their shards.
    """
    whole, units, shards = sum(own.bytes for own in sizes), units_of(sizes), 0
    of_layers = [sum(own.count * own.wide for own in unit if own.learns) for layer, unit in units if fused and layer is not None]
    compared = 4 * max(of_layers, default=0)
    if not stays:
        standing_in = [sum(own.bytes for own in unit) for layer, unit in units if fused and layer is not None]
        held = sum(shard_bytes(unit, sharding.group) for _, unit in units)
        passing = tuple(replace(own, learns=False) for own in sizes)
        return max(held + passing_bytes(passing, sharding, itemsize), compared + 2 * max(standing_in, default=0))
    most = whole + compared
    for _, unit in units:
        widened = sum(own.count * own.wide for own in unit if own.learns and own.wide > own.itemsize)
        shards += shard_bytes(unit, sharding.group)
        most = max(most, whole + widened + shards)
    return most


def shard_bytes(sizes: Sizes, group: int) -> int:
    """Return the bytes of a worker's rows; rows that learn are as wide as their masters."""
    layout = lay_out_rows(sizes, group)
    return sum(layout.width(str(place)) * (own.wide if own.learns else own.itemsize) for place, own in enumerate(sizes))


def units_of(sizes: Sizes) -> list[tuple[int | None, Sizes]]:
    """Return the parameters of each layer, and last those outside the layers, in the order in which they are sharded."""
    layers = sorted({own.layer for own in sizes if own.layer is not None})
    return [(layer, tuple(own for own in sizes if own.layer == layer)) for layer in (*layers, None)]


def unit_counts(sizes: Iterable[ParameterSize]) -> dict[int | None, tuple[int, int]]:
    """Return, for each layer and for None (outside the layers), how many numbers it has and how many of them learn."""
    found: dict[int | None, tuple[int, int]] = {}
    for own in sizes:
        count, learned = found.get(own.layer, (0, 0))
        found[own.layer] = count + own.count, learned + (own.count if own.learns else 0)
    return found
