"""Small helpers for the sentences that people read: counts with their nouns, lists of choices, sizes, shortened texts, errors, and foreign
text made safe for a terminal.

Numbers and names enter, phrases leave. Imports nothing of the package, so that every room may use it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Control characters except line feed and tab, separators of lines, marks that hide text or change its direction, and lone surrogates.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)


def many(count: int, noun: str) -> str:
    """Write a count with its noun. Example: `1 row`, `3 rows`, `2 batches`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('tch') else 's'}"


def joined(names: Sequence[str], last: str) -> str:
    """Join names. Example with `last` = "or": `a`, `a or b`, `a, b or c`."""
    return f" {last} ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def either(choices: Sequence[str]) -> str:
    return joined(choices, "or")


def listed(names: Sequence[object], most: int = 8) -> str:
    """List the first `most` names, and how many more there are: `a, b and 3 more`."""
    return ", ".join(map(str, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def shortened(text: str, most: int) -> str:
    """Return the text, or its first characters followed by three dots: never more than `most` characters."""
    return text if len(text) <= most else text[: most - 3] + "..."


def printable(text: str) -> str:
    """Return the text with an escape (`\\u001b`, as TOML and JSON write it) for every character that a terminal would obey or hide."""
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}" if ord(found[0]) < 2**16 else f"\\U{ord(found[0]):08x}", text)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, with the next one if it ends in a colon; the error's type if it has no message."""
    first, *others = str(error).strip().splitlines() or [type(error).__name__]
    return (f"{first} {others[0].strip()}" if first.endswith(":") and others else first)[:300]


def in_bytes(count: float) -> str:
    """Write a size in bytes. Example: `512 B`, `1.5 MiB`, `80.0 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
