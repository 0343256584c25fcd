"""Hydra's and OmegaConf's spellings, as verl's and ChatLearn's users write them: overrides, YAML files and interpolation.

Enters: arguments such as `data.train_batch_size=64`, `+key=v`, `++key=v`, `~key`, or a YAML file. Leaves: a flat mapping of dotted keys to
plain values, with `${key}`, `${oc.env:NAME,default}` and `${oc.select:key,default}` resolved. Guaranteed: nothing is executed; unreadable
text is a UserError that quotes it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from fulltilt.compat.translate import REMOVED
from fulltilt.records import UserError
from fulltilt.words import first_line, shortened

MOST_BYTES, MOST_KEYS, MOST_DEPTH = 2**20, 20_000, 32

_FLOAT = re.compile(r"[+-]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d+)?|[+-]?(?:inf|nan)", re.IGNORECASE)
_INT = re.compile(r"[+-]?\d[\d_]*")
_KEY = re.compile(r"[\w@/-]+(?:\.[\w@/-]+)*")


def overrides(arguments: list[str]) -> dict[str, Any]:
    """Return the keys and values of Hydra's overrides; the last value of a key counts."""
    found: dict[str, Any] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        name = key.strip().lstrip("+~")
        if not _KEY.fullmatch(name) or not (equals or key.startswith("~")):
            raise UserError(f"{shortened(argument, 100)}: not an override. Write key=value, as in data.train_batch_size=64")
        new = {name: REMOVED} if key.startswith("~") else dict(flat(name, parsed(value.strip())))
        for each in [each for each in found if each == name or each.startswith(f"{name}.")]:
            del found[each]
        found |= new
    return found


def flat(key: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield every value with its dotted key. An empty table is a value."""
    if depth > MOST_DEPTH:
        raise UserError(f"{shortened(key, 100)}: tables are nested more than {MOST_DEPTH} deep")
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from flat(f"{key}.{name}" if key else str(name), inner, depth + 1)
    else:
        yield key, value


# ---- values ------------------------------------------------------------------------------------------------------------------------


def parsed(text: str) -> Any:
    """Read a value as Hydra does: null, true, numbers, quoted text, [lists] and {tables}; anything else is text."""
    value, rest = _value(text, "", 0) if text[:1] in "[{'\"" and text else (scalar(text), "")
    return value if not rest.strip() else text


def scalar(text: str) -> Any:
    bare = text.strip()
    known = {"null": None, "none": None, "~": None, "true": True, "false": False}
    if bare.lower() in known:
        return known[bare.lower()]
    if _INT.fullmatch(bare) and len(bare) < 40:
        return int(bare)
    return float(bare) if _FLOAT.fullmatch(bare) else bare


def _value(text: str, ends: str, depth: int) -> tuple[Any, str]:
    """Read a value at the beginning of a text, up to one of `ends`. Returns it with the text after it."""
    text = text.lstrip()
    if depth > MOST_DEPTH:
        raise UserError(f"{shortened(text, 100)}: lists are nested more than {MOST_DEPTH} deep")
    if text[:1] in ("'", '"') and text:
        end = text.find(text[0], 1)
        while end > 0 and text[end - 1] == "\\":
            end = text.find(text[0], end + 1)
        if end < 0:
            raise UserError(f"{shortened(text, 100)}: a quote is not closed")
        return text[1:end].replace(f"\\{text[0]}", text[0]), text[end + 1 :]
    if text[:1] == "[":
        return _items(text[1:], "]", depth)
    if text[:1] == "{":
        pairs, rest = _items(text[1:], "}", depth)
        return {str(name): value for name, value in pairs}, rest
    end = _bare_end(text, ends)
    return scalar(text[:end]), text[end:]


def _bare_end(text: str, ends: str) -> int:
    """Return where unquoted text ends; text between `${` and `}` belongs to it."""
    inside = 0
    for place, character in enumerate(text):
        if text.startswith("${", place):
            inside += 1
        elif character == "}" and inside:
            inside -= 1
        elif not inside and character in ends:
            return place
    return len(text)


def _items(text: str, end: str, depth: int) -> tuple[list[Any], str]:
    found: list[Any] = []
    text = text.lstrip()
    while not text.startswith(end):
        if not text:
            raise UserError(f"a {'list' if end == ']' else 'table'} is not closed with {end}")
        name = None
        if end == "}":
            name, text = _value(text, ":", depth + 1)
            if not text.lstrip().startswith(":"):
                raise UserError(f"{shortened(str(name), 60)}: a table needs a colon between key and value")
            text = text.lstrip()[1:]
        value, text = _value(text, f",{end}", depth + 1)
        found.append((name, value) if end == "}" else value)
        text = text.lstrip()
        if text.startswith(","):
            text = text[1:].lstrip()
        elif not text.startswith(end):
            raise UserError(f"{shortened(text, 60)}: expected a comma or {end}")
    return found, text[1:]


# ---- YAML files --------------------------------------------------------------------------------------------------------------------


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the flat keys of a YAML file."""
    try:
        if not path.is_file():
            raise UserError(f"{path}: no such file. Give the path of a YAML file")
        if path.stat().st_size > MOST_BYTES:
            raise UserError(f"{path}: has more than {MOST_BYTES:,} bytes. Give a configuration")
        text = path.read_text(encoding="utf-8-sig")
        if re.search(r"^[^#'\"]*[:\-]\s+[&*]\w", text, re.MULTILINE):
            raise UserError(f"{path}: YAML anchors (& and *) are not read. Write the values out")
        document = yaml.safe_load(text)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}. Give a YAML file") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path}: not valid YAML: {first_line(error)}") from None
    if not isinstance(document, dict):
        raise UserError(f"{path}: holds no keys. Give a configuration")
    found = {key: plain(value) for key, value in flat("", document)}
    if len(found) > MOST_KEYS:
        raise UserError(f"{path}: has more than {MOST_KEYS:,} keys. Give a configuration")
    return found


def plain(value: Any) -> Any:
    """Return a YAML value in Hydra's types: 2e-6, which YAML reads as text, is a number."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if value == {}:
        return value
    if isinstance(value, str) and _FLOAT.fullmatch(value.strip()) and re.search(r"\d", value):
        return scalar(value)
    return value if isinstance(value, bool | int | float | str | None) else str(value)


# ---- interpolation -----------------------------------------------------------------------------------------------------------------

_INNERMOST = re.compile(r"\$\{((?:[^${}]|\{\})*)\}")  # {} may be a default


def resolved(given: Mapping[str, Any], default: Callable[[str], Any], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the values with interpolation resolved. `default`: returns the value of a key that was not given."""
    names = os.environ if environment is None else environment

    def whole(value: Any, key: str, depth: int) -> Any:
        if isinstance(value, list):
            return [whole(each, key, depth) for each in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        if depth > MOST_DEPTH:
            raise UserError(f"{key}: {shortened(value, 80)} refers to itself")
        if match := re.fullmatch(_INNERMOST, value):
            return whole(one(match[1], key, depth), key, depth + 1)
        replaced = _INNERMOST.sub(lambda match: str(whole(one(match[1], key, depth), key, depth + 1)), value)
        if replaced == value:
            raise UserError(f"{key}: {shortened(value, 80)}: this interpolation is not closed")
        return whole(replaced, key, depth + 1)

    def one(text: str, key: str, depth: int) -> Any:
        resolver, colon, rest = text.partition(":")
        if not colon:
            return looked_up(text.strip(), key, depth)
        name, comma, other = (part.strip() for part in rest.partition(","))
        if resolver == "oc.env":
            if name in names:
                return scalar(names[name])
            if comma:
                return parsed(other)
            raise UserError(f"{key}: ${{{text}}}: the environment has no {name}. Set it, or write a default: ${{oc.env:{name},VALUE}}")
        if resolver == "oc.select":
            found = looked_up(name, key, depth, missing=None)
            return parsed(other) if found is None and comma else found
        raise UserError(f"{key}: ${{{text}}}: the resolver {resolver} is not read. Write the value out")

    def looked_up(name: str, key: str, depth: int, missing: Any = UserError) -> Any:
        if name.startswith("."):
            above = key.split(".")[: -(len(name) - len(name.lstrip(".")))]
            name = ".".join([*above, name.lstrip(".")])
        if name in given and given[name] is not REMOVED:
            return whole(given[name], name, depth + 1)  # relative names there are relative to that key
        found = default(name)
        if found is None and missing is UserError:
            raise UserError(f"{key}: ${{{name}}} has no value here. Set {name}, or write the value out")
        return whole(found, name, depth + 1)

    return {key: whole(value, key, 0) for key, value in given.items()}
