"""The loop that every kind of data set is loaded by.

Enters: paths, a function that turns one row into items, and the limits on their lengths. Leaves: the items kept and what was counted on
the way. Guaranteed: rows are numbered over all files before any is left out; an over-long item is left out and counted, never cut; a row
that cannot be used is a `UserError` with its file, line and columns; no data, or none short enough, is a `UserError` with the remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fulltilt.data.files import read_rows
from fulltilt.records import UserError

Item = TypeVar("Item")
Columns = Mapping[str, Any]


@dataclass(frozen=True)
class Limit(Generic[Item]):
    """Items of more tokens than `most` are left out."""

    key: str  # that the user sets it by
    most: int
    noun: str  # what is measured, in the singular
    tokens: Callable[[Item], int]


@dataclass(frozen=True, eq=False)
class Loaded(Generic[Item]):
    items: tuple[Item, ...]
    rows_read: int
    too_long: int
    said: str  # what was read and what was left out, in words


def load_items(paths: str | Sequence[str], parse: Callable[[int, Columns], Sequence[Item]], limits: Sequence[Limit[Item]]) -> Loaded[Item]:
    """Every row of `paths`, in order, through `parse(row number, row)`; items beyond a limit are left out."""
    names = [paths] if isinstance(paths, str) else list(paths)
    kept: list[Item] = []
    beyond: list[tuple[Limit[Item], int]] = []  # of each item left out: the first limit that it breaks, and its tokens
    rows_read = 0
    for name in names:
        for row, place in read_rows(name):
            for item in _parsed(parse, rows_read, row, place):
                broken = next(((limit, tokens) for limit in limits if (tokens := limit.tokens(item)) > limit.most), None)
                if broken is None:
                    kept.append(item)
                else:
                    beyond.append(broken)
            rows_read += 1
    if not rows_read:
        raise UserError("the data set is empty: no file was given. Set data.train.")
    if not kept:
        _refuse_all_beyond(names, beyond)
    return Loaded(tuple(kept), rows_read, len(beyond), _in_words(rows_read, limits, [limit for limit, _ in beyond]))


def many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _in_words(rows_read: int, limits: Sequence[Limit[Item]], broken: Sequence[Limit[Item]]) -> str:
    counts = [(limit, broken.count(limit)) for limit in limits]
    said = [
        f"{count} left out with {limit.noun}s of more than {limit.most} tokens"
        if count
        else f"none with a {limit.noun} over {limit.most} tokens"
        for limit, count in counts
    ]
    return ", ".join([f"{many(rows_read, 'row')} read", *said])


def _refuse_all_beyond(names: Sequence[str], beyond: Sequence[tuple[Limit[Item], int]]) -> None:
    limit, _ = beyond[0]
    shortest = min(tokens for broken, tokens in beyond if broken is limit)
    also = sorted({f"{other.key} = {other.most}" for other, _ in beyond if other is not limit})
    raise UserError(
        f"{', '.join(names)}: all {len(beyond)} {limit.noun}s are longer than {' or '.join([f'{limit.key} = {limit.most}', *also])}; the "
        f"shortest has {shortest} tokens. Raise {limit.key}, or give shorter {limit.noun}s."
    )


def _parsed(parse: Callable[[int, Columns], Sequence[Item]], number: int, row: Columns, place: str) -> Sequence[Item]:
    try:
        return parse(number, row)
    except UserError as error:
        raise UserError(f"{place}: {error} Columns of this row: {', '.join(row) or 'none'}.") from error
