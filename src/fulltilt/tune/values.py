"""Checks of values that a TOML file gives for the fields of records: unknown keys, types, ranges and choices.

Enters: the keys of a section, and the type of each, as the record's annotations have it. Leaves: a `ValueMistake` for each wrong key.
Guaranteed: a boolean is not a number, and numbers are finite and no larger than what the models of memory and time can compute with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fulltilt.schema import shown
from fulltilt.words import either

Range = tuple[float, float]
MOST = 10**7  # a larger number of tokens, samples or GPUs is a mistake
COUNT: Range = (1, MOST)
REMEDIES: Mapping[type, str] = {
    bool: "Give true or false",
    str: "Give text in quotes",
    int: "Give a whole number from {0:.12g} to {1:.12g}",
    float: "Give a number from {0:.12g} to {1:.12g}",
}


@dataclass(frozen=True)
class ValueMistake:
    place: str  # section.key, or the section alone
    text: str  # what is wrong, what was given, remedy

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


def types_of(record: type) -> dict[str, Any]:
    """Return the type of each field of a record."""
    return get_type_hints(record)


def wrong_values(section: str, given: Mapping[str, Any], types: Mapping[str, Any], ranges: Mapping[str, Range]) -> Iterator[ValueMistake]:
    """Yield what is wrong with the keys of a section. `ranges`: of numbers, by `section.key`; others are counts."""
    if unknown := given.keys() - types.keys():
        yield ValueMistake(section, f"unknown key {', '.join(sorted(unknown))}. Known are {', '.join(sorted(types))}")
    for key in [own for own in given if own in types]:
        place = f"{section}.{key}"
        if instead := remedy(given[key], types[key], ranges.get(place, COUNT)):
            yield ValueMistake(place, f"{shown(given[key])} is not a possible value. {instead}")


def remedy(value: Any, annotation: Any, within: Range) -> str | None:
    """Return what to give instead of a value; None: it is possible."""
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
        return None if value in choices else f"Give {either([shown(each) for each in choices])}"
    kind = next(each for each in REMEDIES if each in (get_args(annotation) or (annotation,)))  # TOML has no None
    return None if is_possible(value, kind, within) else REMEDIES[kind].format(*within)


def is_possible(value: Any, kind: type, within: Range) -> bool:
    if kind in (bool, str):
        return isinstance(value, kind)
    is_number = isinstance(value, int | float if kind is float else int) and not isinstance(value, bool)
    return is_number and bool(within[0] <= value <= within[1])
