"""A data set: how rows of files become its items, and the order in which a run uses them (batches, epochs, the position to resume from).

Enters: paths, a function that turns one row into items, and the limits on their lengths; then a `Cursor` and the seed. Leaves: the data set
with the kept items; then the next batch and the next cursor. Guaranteed: rows are numbered over all files before any is left out; an
over-long item is left out and counted, never cut; a row that cannot be used is a `UserError` with its file, line and columns. Batches are
pure functions of their arguments, so a run that resumes from a saved cursor sees exactly the batches of an uninterrupted one; no item comes
twice in an epoch; no batch is ever partial or spans two epochs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from fulltilt.data.files import open_data
from fulltilt.data.template import OverLong
from fulltilt.records import Prompt, Row, UserError
from fulltilt.words import listed, many

Item = TypeVar("Item", Prompt, Row)
Value = TypeVar("Value")
Columns = Mapping[str, Any]
Parse = Callable[[int, Columns], Sequence[Any]]  # maps a row's number and its columns to items


@dataclass(frozen=True)
class Cursor:
    """A run's position in its data. Two numbers, saved with every checkpoint."""

    epoch: int = 0
    offset: int = 0  # items of this epoch already taken

    def __post_init__(self) -> None:
        assert self.epoch >= 0 and self.offset >= 0, f"no such place in the data: {self}"


# A step asks for one batch, and the order stays the same for the whole epoch.
@lru_cache(maxsize=4)
def epoch_order(size: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Return the order of `size` items in an epoch: a permutation by (seed, epoch), or the order of the files."""
    order = np.arange(size)
    if shuffle:
        order = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch]))).permutation(size)
    order.flags.writeable = False
    return order


@dataclass(frozen=True, eq=False)
class InEpochs(Generic[Item]):
    """A data set, in the order of its files, that is used in epochs of whole batches."""

    noun: ClassVar[str]  # singular noun for an item in messages

    items: tuple[Item, ...]
    said: str = ""  # rows that were read and left out, in words
    versions: tuple[str, ...] = ()  # the commits of the data sets on the hub that were read
    columns: tuple[str, ...] = ()  # columns of the rows

    @property
    def longest(self) -> int:
        """Tokens of the longest item."""
        return max(len(item.ids) for item in self.items)

    def __len__(self) -> int:
        return len(self.items)

    def describe(self) -> str:
        return f"{self.said}; the longest {self.noun} kept has {many(self.longest, 'token')}"

    def take(self, cursor: Cursor, count: int, seed: int, shuffle: bool) -> tuple[tuple[Item, ...], Cursor]:
        """Return the next `count` items from `cursor`, and the cursor after them. If an epoch has fewer left, the next one begins."""
        self.steps_per_epoch(count)
        if cursor.offset + count > len(self):
            cursor = Cursor(cursor.epoch + 1, 0)
        order = epoch_order(len(self), seed, cursor.epoch, shuffle)
        end = cursor.offset + count
        return tuple(self.items[index] for index in order[cursor.offset : end]), Cursor(cursor.epoch, end)

    def steps_per_epoch(self, count: int, key: str = "algorithm.prompts_per_step") -> int:
        """Return the number of steps in an epoch. `key` is the setting that says how many items are taken at a time, for messages."""
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
        """Return an identifier of the data set by its tokens, which of them are trained on, and what answers are judged by, in order."""
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


# ---- loading ----------------------------------------------------------------------------------------------------------------------

DataSet = TypeVar("DataSet", bound=InEpochs[Any])


@dataclass(frozen=True)
class Limit:
    """A limit on tokens: items with more than `most` are left out."""

    key: str  # the user's setting
    most: int
    noun: str  # singular noun for what is measured
    tokens: Callable[[Any], int]  # counts the tokens of an item

    def said(self, left_out: int) -> str:
        if not left_out:
            return f"none with a {self.noun} over {self.most} tokens"
        return f"{left_out} left out with {self.noun}s of more than {self.most} tokens"


def load_items(
    kind: type[DataSet], paths: str | Sequence[str], parse: Parse, limits: Sequence[Limit], wrong: list[str] | None = None
) -> DataSet:
    """Parse every row of `paths`, in order; items beyond a limit are left out. `wrong`: a list for the mistakes in rows, which are then
    left out, to find all of them; without it the first mistake is raised."""
    names = [paths] if isinstance(paths, str) else list(paths)
    kept: list[Any] = []
    beyond: list[tuple[Limit, int]] = []  # for each item left out: the first limit that it breaks, and its tokens
    rows_read = 0
    versions, chosen, counted = [], [], ""
    columns: dict[str, None] = {}
    for name in names:
        source = open_data(name)
        versions.extend([source.version] if source.version else [])
        chosen.extend([f"{source.version or name} ({listed([file.name for file in source.files], 3)})"] if source.files else [])
        for row, place in source.rows:
            try:
                items = _parsed(parse, rows_read, row, place)
            except OverLong as error:
                beyond.append((next(limit for limit in limits if limit.key == error.key), error.tokens))
                items, counted = (), "at least "
            except UserError as error:
                if wrong is None:
                    raise
                wrong.append(str(error))
                items = ()
            for item in items:
                broken = next(((limit, found) for limit in limits if (found := limit.tokens(item)) > limit.most), None)
                if broken is None:
                    kept.append(item)
                else:
                    beyond.append(broken)
            columns.update(dict.fromkeys(row))
            rows_read += 1
    if not rows_read:
        raise UserError("the data set is empty: no file was given. Set data.train.")
    if not kept and beyond:
        _refuse_all_beyond(names, beyond, counted)
    read_from = f" from {' and '.join(chosen)}" if chosen else ""
    said = [f"{many(rows_read, 'row')} read{read_from}", *(each.said(sum(limit is each for limit, _ in beyond)) for each in limits)]
    return kind(tuple(kept), ", ".join(said), tuple(versions), tuple(columns))


def _refuse_all_beyond(names: Sequence[str], beyond: Sequence[tuple[Limit, int]], counted: str) -> None:
    limit, _ = beyond[0]
    shortest = min(tokens for broken, tokens in beyond if broken is limit)
    also = sorted({f"{other.key} = {other.most}" for other, _ in beyond if other is not limit})
    raise UserError(
        f"{', '.join(names)}: all {len(beyond)} {limit.noun}s are longer than {' or '.join([f'{limit.key} = {limit.most}', *also])}; the "
        f"shortest has {counted}{shortest} tokens. Raise {limit.key}, or give shorter {limit.noun}s."
    )


def _parsed(parse: Parse, number: int, row: Columns, place: str) -> Sequence[Any]:
    try:
        return parse(number, row)
    except UserError as error:
        raise UserError(f"{place}: {error} Columns of this row: {', '.join(row) or 'none'}.") from error


def value_at(row: Columns, name: str) -> Any:
    """Return a column, or a value inside an object in one: `extra_info.question`. None if there is none. A column with the whole name comes
    first."""
    if name in row or "." not in name:
        return row.get(name)
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def column(row: Columns, name: str, kind: type[Value], expected: str) -> Value | None:
    """Return a column that a row may have; None if it has not."""
    value = value_at(row, name)
    if value is not None and not isinstance(value, kind):
        raise UserError(f"'{name}' is of type {type(value).__name__}; it must be {expected}.")
    return value
