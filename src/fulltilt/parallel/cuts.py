"""How tensor and expert parallelism cut a model's tensors, and which sizes are legal: arithmetic alone, without torch.

Enters: a model's sizes and the number of workers that share it. Leaves: legal sizes of tensor, expert and sequence parallelism, and why
another size is not legal; for a tensor, the rows or columns that each member holds (`Cut`). Guaranteed: every row or column is held by at
least one member, and by as many as its section says; members that hold the same rows or columns are neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fulltilt.records import UserError
from fulltilt.shape import Shape
from fulltilt.words import listed

VOCABULARY_ALIGN = 8  # rows: 16 bytes of bfloat16 logits, which matrix products need to be fast


@dataclass(frozen=True)
class CutSection:
    """Consecutive rows or columns of a tensor, divided into equal stretches; the last stretch may be shorter."""

    length: int
    each: int  # length of a stretch
    copies: int = 1  # number of neighbouring members that hold the same stretch

    def part(self, rank: int) -> range:
        """Return a member's range of the section, counted from the section's beginning."""
        start = min(self.length, rank // self.copies * self.each)
        return range(start, min(self.length, start + self.each))


@dataclass(frozen=True)
class Cut:
    """The rows (or columns, or other slices along one dimension) of a tensor that each member holds.

    If several members hold a stretch, each finds a part of its gradient; the whole gradient is the sum over these members.

        Cut.rows(8, 2)                          member 0: rows 0 to 3, member 1: rows 4 to 7
        Cut.whole(8, 2)                         both: all rows
        Cut(0, (CutSection(8, 4), CutSection(2, 1)))  member 0: rows 0 to 3 and 8; member 1: rows 4 to 7 and 9
    """

    dim: int
    sections: tuple[CutSection, ...]

    @staticmethod
    def rows(length: int, size: int, dim: int = 0) -> Cut:
        return Cut(dim, (even(length, size),))

    @staticmethod
    def whole(length: int, size: int) -> Cut:
        return Cut(0, (CutSection(length, length, size),))

    @property
    def shared(self) -> bool:
        """Whether several members hold the same numbers, so that their gradients have to be summed."""
        return any(section.copies > 1 for section in self.sections)

    @property
    def in_order(self) -> bool:
        """Whether the members' parts, one after another, are the whole tensor."""
        return self.dim == 0 and len(self.sections) == 1 and self.sections[0].copies == 1 and self.length % self.sections[0].each == 0

    @property
    def length(self) -> int:
        """The length of the whole tensor along the dimension that is cut."""
        return sum(section.length for section in self.sections)

    def parts(self, rank: int) -> list[range]:
        """Return a member's ranges, one per section, counted from the beginning of the whole tensor."""
        found, start = [], 0
        for section in self.sections:
            own = section.part(rank)
            found.append(range(start + own.start, start + own.stop))
            start += section.length
        return found

    def shape(self, whole: Sequence[int], rank: int) -> tuple[int, ...]:
        """Return the shape of a member's part of a tensor."""
        own = sum(map(len, self.parts(rank)))
        return (*whole[: self.dim], own, *whole[self.dim + 1 :])

    def at(self, dim: int) -> Cut:
        """Return the same cut along another dimension."""
        return Cut(dim, self.sections)


@dataclass(frozen=True)
class CutTensor:
    """A tensor that members hold in parts."""

    cut: Cut
    shape: tuple[int, ...]  # of the whole tensor
    size: int  # number of members

    def to_json(self) -> dict[str, Any]:
        sections = [[section.length, section.each, section.copies] for section in self.cut.sections]
        return {"dim": self.cut.dim, "sections": sections, "shape": list(self.shape), "size": self.size}

    @staticmethod
    def from_json(given: Mapping[str, Any]) -> CutTensor:
        cut = Cut(given["dim"], tuple(CutSection(*section) for section in given["sections"]))
        return CutTensor(cut, tuple(given["shape"]), given["size"])


def even(length: int, size: int, unit: int = 1) -> CutSection:
    """Divide `length` rows in units of `unit`, the same number for each member. If there are fewer units than members, units are
    duplicated."""
    units = length // unit
    assert length % unit == 0 and (units % size == 0 or size % units == 0), f"{length} rows in units of {unit} for {size} members"
    return CutSection(length, length // size) if units % size == 0 else CutSection(length, unit, size // units)


def vocabulary_rows(vocabulary: int, size: int) -> int:
    """Return how many rows of an embedding each member holds; the last member may hold fewer."""
    return -(-vocabulary // (size * VOCABULARY_ALIGN)) * VOCABULARY_ALIGN


# ---- which sizes are legal -------------------------------------------------------------------------------------------------------------


def why_not(shape: Shape, size: int, *, whole_experts: bool = False) -> str | None:
    """Return why a model cannot be cut for this many members; None if it can. `whole_experts`: whether each member has some whole experts,
    rather than a part of every expert."""
    if size > 1 and shape.family and shape.family.whole_head_norms:
        return "its norms of queries and keys are over all heads at once"
    for layer in shape.layers:
        if layer.heads % size:
            return f"the model has {layer.heads} query heads"
        if layer.key_heads % size and size % layer.key_heads:
            return f"the model has {layer.key_heads} key-value heads, which can be divided among the members or duplicated, but not both"
        inner = {"its gated layers are": layer.inner}
        if layer.experts:
            inner = {"its experts are": 0 if whole_experts else layer.experts.inner, "its shared experts are": layer.experts.shared_inner}
        for words, width in inner.items():
            if width % size:
                return f"{words} {width} numbers wide"
    if (size - 1) * vocabulary_rows(shape.vocabulary, size) >= shape.vocabulary:
        return f"the model has a vocabulary of {shape.vocabulary} only"
    return None


def legal_sizes(shape: Shape, workers: int = 0, *, whole_experts: bool = False) -> list[int]:
    """Return the numbers of workers among which each layer may be divided. `workers`: a number that the sizes must divide; 0: any."""
    most = min((layer.heads for layer in shape.layers), default=1)
    sizes = legal_expert_sizes(shape) if whole_experts and expert_counts(shape) else range(1, most + 1)
    return [size for size in sizes if workers % size == 0 and why_not(shape, size, whole_experts=whole_experts) is None]


def require_legal(shape: Shape, size: int, key: str, *, whole_experts: bool = False) -> None:
    """Refuse a size that is not legal. `key`: the setting that gives the size."""
    if (reason := why_not(shape, size, whole_experts=whole_experts)) is not None:
        legal = legal_sizes(shape, whole_experts=whole_experts)
        raise UserError(f"{key} = {size}: {reason}. Legal sizes for this model: {listed(legal, 32)}")


def why_not_experts(shape: Shape, size: int) -> str | None:
    """Return why a model's experts cannot be divided among this many workers; None if they can."""
    counts = expert_counts(shape)
    if size > 1 and not counts:
        return "the model has no experts"
    return next((f"the model has {count} experts in a layer" for count in counts if count % size), None)


def legal_expert_sizes(shape: Shape, workers: int = 0) -> list[int]:
    """Return the numbers of workers among which experts may be divided. `workers`: a number that the sizes must divide; 0: any."""
    most = min(expert_counts(shape), default=1)
    return [size for size in range(1, most + 1) if workers % size == 0 and why_not_experts(shape, size) is None]


def require_legal_experts(shape: Shape, size: int, key: str) -> None:
    """Refuse a size that is not legal for experts. `key`: the setting that gives the size."""
    if (reason := why_not_experts(shape, size)) is not None:
        raise UserError(f"{key} = {size}: {reason}. Legal sizes for this model: {listed(legal_expert_sizes(shape), 32)}")


def expert_counts(shape: Shape) -> list[int]:
    """Return the different numbers of experts in the model's layers."""
    return sorted({layer.experts.count for layer in shape.layers if layer.experts})


def whole_experts_in_rollouts(given: int | Literal["auto"], rollout: int, tensor: int, experts: int, shape: Shape) -> bool:
    """Return whether each of the `rollout` members that sample together has some whole experts, rather than a part of every expert.

    `given`: the setting. `tensor`, `experts`: among how many members of a tensor-parallel group the layers of the model that learns are
    divided, and their experts. `auto`: as in the model that learns, if both groups have equally many members, since the engine then reads
    that model; otherwise wherever the number of experts allows it, which keeps products wide.
    """
    if rollout == 1 or not expert_counts(shape):
        return False
    if given != "auto":
        return given > 1
    return experts > 1 if rollout == tensor else why_not_experts(shape, rollout) is None


def legal_sequence_sizes(shape: Shape, workers: int, parts: int = 1) -> list[int]:
    """Return how many of the `workers` that have the same part of a model may share a micro-batch's tokens. `parts`: among how many workers
    each layer is divided."""
    return sequence_sizes(((layer.heads // parts, max(1, layer.key_heads // parts)) for layer in shape.layers), workers)


def sequence_sizes(heads: Iterable[tuple[int, int]], workers: int) -> list[int]:
    """Return how many workers may share the tokens of a micro-batch (parallel/sequence.py). `heads`: heads and key heads of each layer.
    Each worker needs equally many heads, and its own key heads or one that others have too.

    Example: layers of 12 heads and 2 key heads, 8 workers -> [1, 2, 4]
    """
    shapes = set(heads)
    dividing = [size for size in range(1, workers + 1) if workers % size == 0]
    return [size for size in dividing if all(own % size == 0 and 0 in (keys % size, size % keys) for own, keys in shapes)]
