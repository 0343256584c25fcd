"""Values of options as people write them.

Enters: text from the command line. Leaves: words, numbers, bytes, a file that can be written. Guaranteed: what cannot be read or written is
the user's mistake, named by its option; no torch.
"""

from __future__ import annotations

import os
import re
from fractions import Fraction
from pathlib import Path

from fulltilt.records import UserError

UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def words(text: str) -> tuple[str, ...]:
    return tuple(word for word in (part.strip() for part in text.split(",")) if word)


def numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    """Example: "256,512" -> (256, 512)"""
    if text is None:
        return None
    found = words(text)
    if not found or not all(re.fullmatch(r"[1-9]\d*", word) for word in found):
        raise UserError(f"{option} {text}: give whole numbers above 0, with commas between them, for example 512,1024")
    return tuple(int(word) for word in found)


def size(option: str, text: str | None) -> int | None:
    """Example: "12GiB" -> 12884901888"""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip(), flags=re.IGNORECASE)
    count = int(Fraction(found[1]) * UNITS.get(found[2].upper(), 0)) if found else 0
    if count < 1:
        raise UserError(f"{option} {text}: give 1 byte or more, as a number or with a unit: 12GiB, 500MiB, 12e9 is written 12GB")
    return count


def check_writable(option: str, file: Path) -> None:
    """Found out by opening it, for permissions are not all that can be in the way. Leaves no new file behind."""
    if not file.parent.is_dir():
        raise UserError(f"{option} {file}: there is no folder {file.parent}. Make it first")
    known = os.path.lexists(file)
    try:
        file.open("a", encoding="utf-8").close()
    except OSError as error:
        raise UserError(f"{option} {file}: it cannot be written ({error.strerror}). Give a file that can") from error
    if not known:
        file.unlink()


def write(option: str, file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{option} {file}: it could not be written ({error.strerror}). What was measured is on standard output") from error
