"""Values of options as people write them.

Enters: text from the command line. Leaves: words, numbers, bytes. Guaranteed: what cannot be read is the user's mistake, named by its
option; no torch.
"""

from __future__ import annotations

import re

from fulltilt.records import UserError

UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def words(text: str) -> tuple[str, ...]:
    return tuple(word for word in (part.strip() for part in text.split(",")) if word)


def numbers(option: str, text: str) -> tuple[int, ...]:
    """Example: "256,512" -> (256, 512)"""
    found = words(text)
    if not found or not all(re.fullmatch(r"[1-9]\d*", word) for word in found):
        raise UserError(f"{option} {text}: give whole numbers above 0, with commas between them, for example 512,1024")
    return tuple(int(word) for word in found)


def size(option: str, text: str | None) -> int | None:
    """Example: "12GiB" -> 12884901888"""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip(), flags=re.IGNORECASE)
    if not found or found[2].upper() not in UNITS or float(found[1]) == 0:
        raise UserError(f"{option} {text}: give bytes above 0, as a number or with a unit: 12GiB, 500MiB, 12e9 is written 12GB")
    return int(float(found[1]) * UNITS[found[2].upper()])
