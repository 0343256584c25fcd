"""A data set, and the order in which a run goes through it: batches, epochs, and the place to resume from.

Enters: the items of a data set, a `Cursor`, the seed. Leaves: the next batch and the next cursor. Guaranteed: pure functions of their
arguments, so a run that resumes from a saved cursor sees exactly the batches of an uninterrupted one; no item comes twice in an epoch;
no batch is ever partial or spans two epochs.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Generic, TypeVar

import numpy as np

from fulltilt.records import Prompt, Row, UserError
from fulltilt.words import many

Item = TypeVar("Item", Prompt, Row)


@dataclass(frozen=True)
class Cursor:
    """How far a run has come in its data. Two numbers, saved with every checkpoint."""

    epoch: int = 0
    offset: int = 0  # items of this epoch already taken

    def __post_init__(self) -> None:
        assert self.epoch >= 0 and self.offset >= 0, f"no such place in the data: {self}"


# A step asks for one batch, and the order stays the same for the whole epoch.
@lru_cache(maxsize=4)
def epoch_order(size: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """The order of `size` items in an epoch: a permutation by (seed, epoch), or the order of the files."""
    order = np.arange(size)
    if shuffle:
        order = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch]))).permutation(size)
    order.flags.writeable = False
    return order


@dataclass(frozen=True, eq=False)
class InEpochs(Generic[Item]):
    """A data set, in the order of its files, that is used in epochs of whole batches."""

    noun: ClassVar[str]  # what an item is called in messages, in the singular

    items: tuple[Item, ...]
    said: str = ""  # what was read and what was left out, in words

    @property
    def longest(self) -> int:
        """Tokens of the longest item."""
        return max(len(item.ids) for item in self.items)

    def __len__(self) -> int:
        return len(self.items)

    def describe(self) -> str:
        return f"{self.said}; the longest {self.noun} kept has {many(self.longest, 'token')}"

    def take(self, cursor: Cursor, count: int, seed: int, shuffle: bool) -> tuple[tuple[Item, ...], Cursor]:
        """The next `count` items from `cursor`, and the cursor after them. Where an epoch has fewer left, the next one begins."""
        self.steps_per_epoch(count)
        if cursor.offset + count > len(self):
            cursor = Cursor(cursor.epoch + 1, 0)
        order = epoch_order(len(self), seed, cursor.epoch, shuffle)
        end = cursor.offset + count
        return tuple(self.items[index] for index in order[cursor.offset : end]), Cursor(cursor.epoch, end)

    def steps_per_epoch(self, count: int, key: str = "algorithm.prompts_per_step") -> int:
        """`key` is the setting that says how many items are taken at a time, for messages."""
        assert count > 0, "a batch holds at least one item"
        if len(self) < count:
            raise UserError(
                f"a {_unit(key)} takes {many(count, self.noun)}, but the data set has only {len(self)}. Lower {key} to at most "
                f"{len(self)}, or give more data."
            )
        return len(self) // count

    def describe_epoch(self, count: int, key: str = "algorithm.prompts_per_step") -> str:
        steps = self.steps_per_epoch(count, key)
        left_out = len(self) - steps * count
        rest = f"each epoch leaves out {left_out} of its {len(self)}, too few for a full batch" if left_out else "none is left out"
        return f"an epoch is {many(steps, _unit(key))} of {many(count, self.noun)}; {rest}"

    def digest(self) -> str:
        """Identifies the data set by its tokens, which of them are trained on, and what answers are judged by, in order."""
        found = hashlib.sha256()
        for item in self.items:
            found.update(len(item.ids).to_bytes(8, "little") + item.ids.tobytes() + _beside_tokens(item))
        return found.hexdigest()


def _beside_tokens(item: Prompt | Row) -> bytes:
    if isinstance(item, Row):
        return item.mask.tobytes()
    judged_by = [item.data_source, item.ground_truth, dict(item.extra_info)]
    return json.dumps(judged_by, sort_keys=True, default=str).encode("utf-8", "backslashreplace")


def _unit(key: str) -> str:
    return "round" if key.endswith("round") else "step"
