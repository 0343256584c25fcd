"""The loop by which every kind of data set is loaded.

Enters: paths, a function that turns one row into items, and the limits on their lengths. Leaves: the data set of the items kept.
Guaranteed: rows are numbered over all files before any is left out; an over-long item is left out and counted, never cut; a row that
cannot be used is a `UserError` with its file, line and columns; no data, or none short enough, is a `UserError` with the remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fulltilt.data.files import read_rows
from fulltilt.data.order import InEpochs
from fulltilt.records import UserError
from fulltilt.words import many

DataSet = TypeVar("DataSet", bound=InEpochs[Any])
Value = TypeVar("Value")
Columns = Mapping[str, Any]
Parse = Callable[[int, Columns], Sequence[Any]]  # a row's number and its columns give the items made of it


@dataclass(frozen=True)
class Limit:
    """Items of more tokens than `most` are left out."""

    key: str  # the user's setting
    most: int
    noun: str  # what is measured, in the singular
    tokens: Callable[[Any], int]  # of an item

    def said(self, left_out: int) -> str:
        if not left_out:
            return f"none with a {self.noun} over {self.most} tokens"
        return f"{left_out} left out with {self.noun}s of more than {self.most} tokens"


def load_items(kind: type[DataSet], paths: str | Sequence[str], parse: Parse, limits: Sequence[Limit]) -> DataSet:
    """Every row of `paths`, in order, through `parse`; items beyond a limit are left out."""
    names = [paths] if isinstance(paths, str) else list(paths)
    kept: list[Any] = []
    beyond: list[tuple[Limit, int]] = []  # for each item left out: the first limit that it breaks, and its tokens
    rows_read = 0
    for name in names:
        for row, place in read_rows(name):
            for item in _parsed(parse, rows_read, row, place):
                broken = next(((limit, found) for limit in limits if (found := limit.tokens(item)) > limit.most), None)
                if broken is None:
                    kept.append(item)
                else:
                    beyond.append(broken)
            rows_read += 1
    if not rows_read:
        raise UserError("the data set is empty: no file was given. Set data.train.")
    if not kept:
        _refuse_all_beyond(names, beyond)
    said = [f"{many(rows_read, 'row')} read", *(each.said(sum(limit is each for limit, _ in beyond)) for each in limits)]
    return kind(tuple(kept), ", ".join(said))


def _refuse_all_beyond(names: Sequence[str], beyond: Sequence[tuple[Limit, int]]) -> None:
    limit, _ = beyond[0]
    shortest = min(tokens for broken, tokens in beyond if broken is limit)
    also = sorted({f"{other.key} = {other.most}" for other, _ in beyond if other is not limit})
    raise UserError(
        f"{', '.join(names)}: all {len(beyond)} {limit.noun}s are longer than {' or '.join([f'{limit.key} = {limit.most}', *also])}; the "
        f"shortest has {shortest} tokens. Raise {limit.key}, or give shorter {limit.noun}s."
    )


def _parsed(parse: Parse, number: int, row: Columns, place: str) -> Sequence[Any]:
    try:
        return parse(number, row)
    except UserError as error:
        raise UserError(f"{place}: {error} Columns of this row: {', '.join(row) or 'none'}.") from error


def column(row: Columns, name: str, kind: type[Value], expected: str) -> Value | None:
    """A column that a row may have; None if it has not."""
    value = row.get(name)
    if value is not None and not isinstance(value, kind):
        raise UserError(f"'{name}' is of type {type(value).__name__}; it must be {expected}.")
    return value
