"""Sizes of a worker's part of every parameter, from a model's shape, without loading the model.

Enters: a shape of a known family, its adapters, and how workers divide the layers or the experts. Leaves: the sizes of the first worker's
parts, which are the largest: the last one may have fewer rows of a vocabulary. Guaranteed: arithmetic alone, without torch; parameter by
parameter the sizes are those that the tables of a loaded model give (parallel/slices.py, parallel/experts.py), duplicated heads of keys
and values, whole norms and routers, and the rounding of a vocabulary's rows included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from fulltilt.parallel.cuts import Cut, CutSection, even, vocabulary_rows
from fulltilt.parallel.layout import ParameterSize, Sizes
from fulltilt.shape import DecoderLayer, LayerDivision, ModelFamily, Shape

COLUMNS, ROUTER, STACKS = ("o_proj", "down_proj"), "shared_expert_gate", "mlp.experts."


@dataclass(frozen=True)
class Adapters:
    """The settings of a model's low-rank adapters, as in [lora]. Example: Adapters(16, "all-linear")"""

    rank: int
    targets: tuple[str, ...] | Literal["all-linear"]  # endings of the names of linear layers
    stacked: tuple[str, ...] = ()  # endings of the names of stacked experts


@dataclass(frozen=True)
class CutParameter:
    """A whole parameter, and how it is cut."""

    shape: tuple[int, ...]
    cut: Cut
    layer: int | None = None
    adapts: bool = False  # belongs to an adapter
    scores: bool = False  # belongs to the head of a critic or reward model


@cache
def portion_sizes(
    shape: Shape, division: LayerDivision, itemsize: int, *, learns: bool, adapters: Adapters | None = None, vocabulary_head: bool = True
) -> Sizes:
    """Return the sizes of the first worker's parts, learning ones first. `adapters`: if given, only they learn, and a critic's head.
    `vocabulary_head`: False for a critic or reward model, which has a score instead."""
    found = []
    for own in cut_parameters_of(shape, division, adapters, vocabulary_head=vocabulary_head):
        part = own.cut.shape(own.shape, 0)
        cut, trained = part != own.shape, learns and (adapters is None or own.adapts or own.scores)
        size = max(4, itemsize) if own.scores else itemsize
        found.append(ParameterSize(part, size, trained, own.layer, scores=own.scores, apart=cut and division.experts > 1, cut=cut))
    return tuple(sorted(found, key=lambda own: not own.learns))


def cut_parameters_of(shape: Shape, division: LayerDivision, adapters: Adapters | None, *, vocabulary_head: bool) -> Iterator[CutParameter]:
    """Yield every parameter of a model, with how it is cut among the members of a group, or among workers that divide experts."""
    family, size = shape.known_family(), division.members * division.experts

    def whole(*numbers: int, layer: int | None = None, scores: bool = False) -> CutParameter:
        return CutParameter(numbers, Cut.whole(numbers[0], size), layer, scores=scores)

    rows = CutSection(shape.vocabulary, vocabulary_rows(shape.vocabulary, size))
    cut = Cut(0, (rows,)) if division.members > 1 else Cut.whole(shape.vocabulary, size)
    table = CutParameter((shape.vocabulary, shape.width), cut)
    yield table
    for index, layer in enumerate(shape.layers):
        attention = [each for each in shape.products(layer).items() if each[0].startswith("self_attn.")]
        mlp = [each for each in shape.products(layer).items() if each[0].startswith("mlp.")]
        yield from matrices(layer, index, attention, division, family)
        if family.head_norms:
            for heads in (layer.queries, layer.keys) if family.whole_head_norms else (layer.head_width,) * 2:
                yield whole(heads, layer=index)
        if layer.experts:
            yield whole(layer.experts.count, shape.width, layer=index)
        yield from matrices(layer, index, mlp, division, family)
        yield from (whole(shape.width, layer=index) for _ in range(family.norms))
    yield whole(shape.width)
    if not vocabulary_head:
        yield whole(1, shape.width, scores=True)
    elif not shape.tied:
        yield table
    yield from adapter_parameters(shape, division, adapters) if adapters else ()


def matrices(
    layer: DecoderLayer, index: int, products: Iterable[tuple[str, tuple[int, int, int]]], division: LayerDivision, family: ModelFamily
) -> Iterator[CutParameter]:
    """Yield the products of a layer (`Shape.products`), each with its bias. Every member has the bias of a layer that is cut by columns,
    and it is added once; experts have none."""
    for name, (inner, outer, copies) in products:
        stacked = name.startswith(STACKS)
        numbers = (copies, outer, inner) if stacked else (outer, inner)
        cut = weight_cut(layer, name, numbers, division)
        yield CutParameter(numbers, cut, index)
        biased = family.mlp_bias if name.startswith("mlp.") else family.output_bias if name.endswith("o_proj") else family.qkv_bias
        if biased and not stacked:
            yield CutParameter((outer,), cut if cut.dim == 0 else Cut.whole(outer, division.members * division.experts), index)


def weight_cut(layer: DecoderLayer, name: str, whole: tuple[int, ...], division: LayerDivision) -> Cut:
    """Return how a layer's matrix is cut, or a stack of matrices whose first dimension counts experts."""
    size = division.members * division.experts
    if name.startswith(STACKS):
        if division.experts > 1 or division.whole_experts:
            return Cut.rows(whole[0], size)
        return Cut.rows(whole[2], size, dim=2) if name.endswith(COLUMNS) else Cut(1, (even(whole[1] // 2, size),) * 2)
    if division.experts > 1 or name.endswith(ROUTER):
        return Cut.whole(whole[0], size)
    if name.endswith(COLUMNS):
        return Cut.rows(whole[1], size, dim=1)
    if name.startswith("mlp."):
        return Cut(0, (even(whole[0] // 2, size),) * 2) if name.endswith("gate_up_proj") else Cut.rows(whole[0], size)
    queries, keys = even(layer.queries, size, layer.head_width), even(layer.keys, size, layer.head_width)
    return Cut(0, {"q_proj": (queries,), "qkv_proj": (queries, keys, keys)}.get(name.removeprefix("self_attn."), (keys,)))


def adapter_parameters(shape: Shape, division: LayerDivision, adapters: Adapters) -> Iterator[CutParameter]:
    """Yield the parameters of adapters. A layer cut by rows has its rows of B, and all of A; one cut by columns has its columns of A, and
    all of B. Adapters of whole experts go with their experts: peft numbers the ranks of all experts, expert by expert in A, and rank by
    rank in B."""
    size = division.members * division.experts
    for place, name, (inner, outer, copies) in shape.adapted(adapters.targets, adapters.stacked):
        stacked, ranks = name.startswith(STACKS), adapters.rank * copies
        cut = weight_cut(shape.layers[place], name, (copies, outer, inner) if stacked else (outer, inner), division)
        a, b = Cut.whole(ranks, size), Cut.whole(outer, size)
        if stacked and cut.dim == 0:
            a, b = Cut.rows(ranks, size), Cut(1, (even(copies, size),) * adapters.rank)
        elif cut != Cut.whole(cut.length, size):
            a, b = (a, cut.at(0)) if cut.dim == (1 if stacked else 0) else (cut.at(1), b)
        for numbers, own in (((ranks, inner), a), ((outer, ranks), b)):
            yield CutParameter(numbers, own, place, adapts=True)
