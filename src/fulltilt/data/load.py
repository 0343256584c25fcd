"""The loop that every kind of data set is loaded by.

Enters: paths, the limit on prompt tokens, and a function that turns one row into an item. Leaves: the items kept and what was counted on
the way. Guaranteed: rows are numbered over all files before any is left out; an over-long prompt is left out and counted, never cut; a row
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


@dataclass(frozen=True, eq=False)
class Loaded(Generic[Item]):
    items: tuple[Item, ...]
    rows_read: int
    too_long: int


def load_items(
    paths: str | Sequence[str], limit: int, parse: Callable[[int, Columns], Item], prompt_tokens: Callable[[Item], int]
) -> Loaded[Item]:
    """Every row of `paths`, in order, through `parse(row number, row)`; items with more than `limit` prompt tokens are left out."""
    names = [paths] if isinstance(paths, str) else list(paths)
    kept: list[Item] = []
    lengths: list[int] = []
    for name in names:
        for row, place in read_rows(name):
            item = _parsed(parse, len(lengths), row, place)
            lengths.append(prompt_tokens(item))
            if lengths[-1] <= limit:
                kept.append(item)
    if not lengths:
        raise UserError("the data set is empty: no file was given. Set data.train.")
    if not kept:
        raise UserError(
            f"{', '.join(names)}: all {len(lengths)} prompts are longer than data.max_prompt_tokens = {limit}; the shortest has "
            f"{min(lengths)} tokens. Raise data.max_prompt_tokens, or give shorter prompts."
        )
    return Loaded(tuple(kept), rows_read=len(lengths), too_long=len(lengths) - len(kept))


def describe_loaded(rows_read: int, too_long: int, limit: int, longest: str) -> str:
    """What was read and what was left out, in words."""
    left_out = f"{too_long} left out with prompts of more than {limit} tokens" if too_long else f"none with a prompt over {limit} tokens"
    return f"{rows_read} row{'s' if rows_read != 1 else ''} read, {left_out}; {longest}"


def _parsed(parse: Callable[[int, Columns], Item], number: int, row: Columns, place: str) -> Item:
    try:
        return parse(number, row)
    except UserError as error:
        raise UserError(f"{place}: {error} Columns of this row: {', '.join(row) or 'none'}.") from error
