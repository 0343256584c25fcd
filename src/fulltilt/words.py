"""Small helpers for the sentences that people read: counts with their nouns, lists of choices, sizes, shortened texts, errors.

Numbers and names enter, phrases leave. Imports nothing, so that every room may use it.
"""

from __future__ import annotations

from collections.abc import Sequence


def many(count: int, noun: str) -> str:
    """Example: `1 row`, `3 rows`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def joined(names: Sequence[str], last: str) -> str:
    """Example with `last` = "or": `a`, `a or b`, `a, b or c`."""
    return f" {last} ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def either(choices: Sequence[str]) -> str:
    return joined(choices, "or")


def listed(names: Sequence[object], most: int = 8) -> str:
    """The first `most` names, and how many more there are: `a, b and 3 more`."""
    return ", ".join(map(str, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def shortened(text: str, most: int) -> str:
    """The text, or its first characters followed by three dots: never more than `most` characters."""
    return text if len(text) <= most else text[: most - 3] + "..."


def first_line(error: BaseException) -> str:
    """The first line of an error's message, with the next one where it ends in a colon, or its type where it has none."""
    first, *others = str(error).strip().splitlines() or [type(error).__name__]
    return (f"{first} {others[0].strip()}" if first.endswith(":") and others else first)[:300]


def in_bytes(count: float) -> str:
    """Example: `512 B`, `1.5 MiB`, `80.0 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
