"""Odd values, and what damages bytes and JSON. All chance comes from the generator given."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

ESCAPES = "\x1b]0;owned\x07\x1b[31mred\x1b[0m\x1b[2J"  # sets the title of a terminal and clears it
TEXTS = (
    "", " ", "\n", "auto", "none", "true", "0", "-1", "nan", "~", "~/x", "../..", "/", "/dev/null", "a" * 300, "a" * 100_000, "\0", "x\0y",
    ESCAPES, "\u202egnirts", "\ufeffx", "é" * 50, "\U0001f600", "\ud800", "%s%n", "${HOME}", "{{ x }}", "{}", "[]", "'", '"', "\\",
    "rm -rf", "file:///etc/passwd", "https://example.org/x", "a/b", "a b", "-x", "--help", "#", "=",
)  # fmt: skip
NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 7, 255, 1000, 65_536, 10**6, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, 0.0, -0.0, 0.5, 1.5,
    1e-320, 1e-30, 1e-8, 1e10, 1e38, 1e39, 1e300, 1e308, -1e308, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
SMALL_NUMBERS = (1, 2, 3, 5, 8, 13, 64, 255)  # that most keys accept
PAGE = b"<!DOCTYPE html>\n<html><head><title>404 Not Found</title></head><body>Not Found</body></html>\n"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 988097824\n"


def odd_value(chance: random.Random, depth: int = 0) -> Any:
    """A value of any type that JSON or TOML has."""
    kind = chance.randrange(10)
    if kind < 4:
        return chance.choice(NUMBERS)
    if kind < 7 or depth > 2:
        return chance.choice(TEXTS)
    if kind == 7:
        return chance.random() < 0.5
    if kind == 8:
        return [odd_value(chance, depth + 1) for _ in range(chance.randrange(4))]
    return {chance.choice(("a", "role", "content", "", "é", "\x1b")): odd_value(chance, depth + 1) for _ in range(chance.randrange(3))}


# ---- bytes -------------------------------------------------------------------------------------------------------------------------------


def _place(data: bytes, chance: random.Random) -> int:
    return chance.randrange(len(data) + 1)


def _flip(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 3, 20))):
        if changed:
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _cut_out(data: bytes, chance: random.Random) -> bytes:
    one, other = sorted((_place(data, chance), _place(data, chance)))
    return data[:one] + data[other:]


def _repeat(data: bytes, chance: random.Random) -> bytes:
    one, other = sorted((_place(data, chance), _place(data, chance)))
    return data[:other] + data[one:]


def _insert(data: bytes, chance: random.Random) -> bytes:
    at = _place(data, chance)
    return data[:at] + chance.choice((chance.randbytes(9), b"\0", b"\xff\xfe", b"\r\n", b'"', b"}", b"[", b"\x1b[2J")) + data[at:]


def _utf_16(data: bytes, chance: random.Random) -> bytes:
    return data.decode("latin-1").encode("utf-16")


DAMAGE: Mapping[str, Callable[[bytes, random.Random], bytes]] = {
    "truncated": lambda data, chance: data[: _place(data, chance)],
    "bits flipped": _flip,
    "a part cut out": _cut_out,
    "a part repeated": _repeat,
    "bytes inserted": _insert,
    "emptied": lambda data, chance: b"",
    "filled with zeros": lambda data, chance: bytes(len(data)),
    "random": lambda data, chance: chance.randbytes(chance.choice((1, 8, 100, 5000))),
    "a web page": lambda data, chance: PAGE,
    "a pointer to large storage": lambda data, chance: POINTER,
    "with a byte-order mark": lambda data, chance: b"\xef\xbb\xbf" + data,
    "in UTF-16": _utf_16,
    "with other line ends": lambda data, chance: data.replace(b"\n", b"\r\n"),
    "null": lambda data, chance: b"null",
    "a list": lambda data, chance: b"[]",
    "an object": lambda data, chance: b"{}",
    "a number": lambda data, chance: b"1e999",
    "deeply nested": lambda data, chance: b'{"a":' * 20_000,
}  # fmt: skip


def damaged(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    name = chance.choice(list(DAMAGE))
    return DAMAGE[name](data, chance), name


# ---- JSON --------------------------------------------------------------------------------------------------------------------------------


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        if len(path) < 3:
            yield from _places(inner, (*path, key))


def changed_json(document: Any, chance: random.Random) -> tuple[Any, str]:
    """The document with one value removed, replaced or made a list, and which."""
    places = list(_places(document))
    if not places:
        return odd_value(chance), "replaced"
    # A vocabulary has hundreds of places, and what matters few.
    shallow = [place for place in places if len(place) == 1]
    path = chance.choice(shallow if chance.random() < 0.7 else places)
    holder = document
    for key in path[:-1]:
        holder = holder[key]
    name = ".".join(map(str, path))
    how = chance.randrange(8)
    if how == 0:
        del holder[path[-1]]
        return document, f"without {name}"
    if how == 1:
        holder[path[-1]] = [holder[path[-1]]]
    elif how == 2 and isinstance(holder[path[-1]], int | float):
        holder[path[-1]] = holder[path[-1]] * chance.choice((-1, 0, 2, 3, 1000, 10**12))
    elif how == 3:
        holder[path[-1]] = None
    else:
        holder[path[-1]] = odd_value(chance)
    return document, f"{name} = {str(holder[path[-1]])[:60]!r}"


def dumped(document: Any) -> bytes:
    return json.dumps(document).encode()


def changed_tensors(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    """A safetensors file with another header over the same numbers, or with other numbers."""
    size = struct.unpack("<Q", data[:8])[0]
    header, numbers = json.loads(data[8 : 8 + size]), data[8 + size :]
    names = sorted(name for name in header if name != "__metadata__")
    name = chance.choice(names)
    how = chance.choice(("nan", "inf", "renamed", "dropped", "shape", "type", "offsets", "no tensors", "header length", "metadata"))
    if how in ("nan", "inf"):
        begin, end = header[name]["data_offsets"]
        value = struct.pack("<f", float(how)) * ((end - begin) // 4)
        numbers = numbers[:begin] + value + numbers[end:]
    elif how == "renamed":
        header[f"other.{name}"] = header.pop(name)
    elif how == "dropped":
        del header[name]
    elif how == "shape":
        header[name]["shape"] = chance.choice(([], [0], [*header[name]["shape"], 1], header[name]["shape"][::-1], [-1], [2**62, 4]))
    elif how == "type":
        header[name]["dtype"] = chance.choice(("I32", "F64", "U32", "X", "", None))
    elif how == "offsets":
        header[name]["data_offsets"] = chance.choice(([0, 0], [0, 2**60], [8, 0], ["a", "b"], None))
    elif how == "no tensors":
        header = {}
    elif how == "metadata":
        header["__metadata__"] = chance.choice(({"format": "tf"}, {"format": 3}, [], None, {}))
    text = dumped(header)
    length = chance.choice((0, 7, 2**40, 2**63)) if how == "header length" else len(text)
    return struct.pack("<Q", length) + text + numbers, f"{how} of {name}"
