"""Reading, checking and writing a run's configuration, whole, before any model loads.

Enters: a TOML file and `key=value` overrides. Leaves: one frozen `Config`, whose keys and their meaning are in `schema`. Guaranteed: every
mistake is reported at once, each with its place and remedy; an unknown key names the nearest known one; a knob that is not built is
refused, never ignored; a key that has no effect is an error. Relative paths are relative to the current directory, and `~` is expanded. Any
file that is not TOML, whatever its kind, size or nesting, is a UserError too.
"""

from __future__ import annotations

import copy
import difflib
import errno
import json
import os
import re
import shlex
import stat
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fulltilt import knobs, schema, user_code
from fulltilt.presets import LARGEST_ERROR, NORMALISED_SUM
from fulltilt.records import UserError
from fulltilt.schema import (
    AlgorithmConfig,
    Config,
    conditions,
    flatten,
    keys,
    legal_values,
    row_of,
    samples_from_copy,
    sections,
    shown,
    toml_value,
    value_of,
    words,
)
from fulltilt.settings import algorithm_settings, bounds_of, holds, in_effect, is_set, own_functions, preset_of, used_keys
from fulltilt.user_code import UserCodeError
from fulltilt.words import either, many, printable, shortened

LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.0001, 10000
MOST_BYTES = 2**20  # the largest run file that is read: a larger file is something else
MOST_DEPTH = 32  # deepest nesting of tables and lists: beyond it, reading and writing would exhaust the stack

FREE_ON_RESUME = frozenset(key for key, field in keys().items() if row_of(field).free or sections()[key.partition(".")[0]].free)
"""Keys that may differ between a checkpoint and the run that resumes it. Which activations are kept, and where, changes no bit of a run as
long as its KV cache still fits (plan.keep_budgets)."""


@dataclass(frozen=True)
class ConfigRule:
    """A check of values that are legal by themselves."""

    keys: tuple[str, ...]  # all keys that the check reads: it is skipped if one of them is already reported
    check: Callable[[Config], Iterable[str]]
    files: bool = False  # whether the check looks at files that keys name


@dataclass(frozen=True)
class Mistake:
    text: str  # key, what is wrong, what was given, remedy
    about: tuple[str, ...] = ()  # keys that rules should not read any more: their values are not what the user meant


# ---- reading -----------------------------------------------------------------------------------------------------------------------


def load(path: Path | str, overrides: Sequence[str] = (), rules: Sequence[ConfigRule] = (), *, here: bool = True) -> Config:
    """Return the configuration of a TOML file with `key=value` overrides on top. Raises one UserError that holds every mistake.

    `rules`: further rules, of rooms that this one must not import. `here`: whether files, folders and models that keys name must exist.
    """
    return parse(read_toml(Path(path)), overrides, str(path), rules, here=here)


def parse(
    data: Mapping[str, Any], overrides: Sequence[str] = (), origin: str = "configuration", rules: Sequence[ConfigRule] = (), *,
    here: bool = True,
) -> Config:  # fmt: skip
    """Do the same as `load`, from tables that were read already; `origin` names them in errors."""
    if _too_deep(data):
        raise UserError(f"{origin}: tables and lists are nested more than {MOST_DEPTH} deep. No key takes such a value: remove it")
    tables: dict[str, Any] = copy.deepcopy(dict(data))
    mistakes = [*_apply_overrides(tables, overrides)]
    mistakes += _take_unknown_keys(tables)
    wrong_values = [*_wrong_values(tables)]
    mistakes += wrong_values
    config = _with_stand_ins(tables, {key for mistake in wrong_values for key in mistake.about})
    reported = {key for mistake in mistakes for key in mistake.about}
    found = [mistake.text for mistake in mistakes]
    kept = [rule for rule in (*RULES, *rules) if (here or not rule.files) and reported.isdisjoint(rule.keys)]
    found += [text for rule in kept for text in _broken(rule, config)]
    if found:
        raise UserError(report(origin, found))
    return config


def checked(config: Config, overrides: Sequence[str] = ()) -> Config:
    """Return a configuration with `key=value` overrides on top, checked as a run file is. Files that keys name need not exist."""
    given = {name: {key: getattr(table, key) for key in sorted(table.model_fields_set)} for name, table in config}
    return parse(given, overrides, here=False)


def _broken(rule: ConfigRule, config: Config) -> Iterator[str]:
    """Yield the mistakes that a rule finds; a path that the system does not let it look at is a mistake too."""
    try:
        yield from rule.check(config)
    except OSError as error:
        yield f"{rule.keys[0]}: {shown(str(error.filename))}: {error.strerror}. Give a path that you may read"


def report(origin: str, mistakes: Sequence[str]) -> str:
    """Return all mistakes as one message."""
    return "\n".join([f"{origin}: {many(len(mistakes), 'mistake')}", *(f"  {number}. {text}" for number, text in enumerate(mistakes, 1))])


def read_toml(path: Path) -> dict[str, Any]:
    remedy = "Give the path of a run's TOML file."
    try:
        odd = _why_no_run_file(path.stat())
        text = "" if odd else path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file. {remedy} `fulltilt init` writes one") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}). Save it as UTF-8.") from None
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL character
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', error)}. {remedy}") from None
    if odd:
        raise UserError(f"{path}: {odd}. {remedy}")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise UserError(f"{path}: tables and lists are nested too deep. No key takes such a value: remove it") from None
    except ValueError as error:  # a TOMLDecodeError, or a number with more digits than Python reads
        raise UserError(_syntax_error(path, text, str(error))) from None


def _why_no_run_file(found: os.stat_result) -> str | None:
    if stat.S_ISDIR(found.st_mode):
        return "a folder"
    if not stat.S_ISREG(found.st_mode):  # reading a pipe or a device may never end
        return "not a regular file"
    return f"has {found.st_size:,} bytes, and a run's file at most {MOST_BYTES:,}" if found.st_size > MOST_BYTES else None


def _too_deep(value: Any, depth: int = 0) -> bool:
    """Return whether tables and lists are nested deeper than MOST_DEPTH."""
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return depth > MOST_DEPTH or any(_too_deep(each, depth + 1) for each in inside)


def _syntax_error(path: Path, text: str, message: str) -> str:
    lines = text.split("\n")
    at = re.search(r" \(at line (\d+), column \d+\)", message)
    number = min(int(at.group(1)), len(lines)) if at else len(lines)
    what = re.sub(r" \(at .*\)$", "", message)
    remedy = "Fix this line: text needs quotes, a section is written [name]."
    return f"{path}, line {number}: not valid TOML: {what}\n    {shortened(printable(lines[number - 1].rstrip()), 120)}\n{remedy}"


# ---- overrides ---------------------------------------------------------------------------------------------------------------------


def _apply_overrides(tables: dict[str, Any], overrides: Sequence[str]) -> Iterator[Mistake]:
    said: dict[tuple[str, ...], str] = {}  # the override that set or unset a key
    for typed, override in _separated(overrides):
        key, equals, value = (part.strip() for part in override.partition("="))
        name = key.lstrip("~+")
        parts, given = tuple(_key_parts(name)), _override_value(value)
        if not all(parts) or len(parts) > MOST_DEPTH or _too_deep(given) or not (equals or key.startswith("~")):
            yield Mistake(f"{_in_a_line(typed)}: not an override. Write section.key=value, for example run.steps=100")
        elif wrong := _wrong_spelling(typed, override, key, value):
            yield Mistake(f"{_in_a_line(typed)}: {wrong}", (name,))
        elif len(parts) == 1 and given == {}:
            yield Mistake(f"{_in_a_line(typed)}: sets no key. Remove it, or write ~{name} to unset all keys of the section")
        else:
            yield from _apply(tables, typed, _places(parts, given), said, unset=not equals)


def _places(parts: tuple[str, ...], given: Any) -> dict[tuple[str, ...], Any]:
    """Return the keys that an override sets or unsets. A table in place of a section sets its own keys, and leaves the others as they
    are."""
    return {(*parts, key): each for key, each in given.items()} if len(parts) == 1 and isinstance(given, dict) else {parts: given}


def _apply(
    tables: dict[str, Any], typed: str, places: Mapping[tuple[str, ...], Any], said: dict[tuple[str, ...], str], *, unset: bool
) -> Iterator[Mistake]:
    """Set or unset keys, unless an earlier override has done so: then it is not known which of the two is meant."""
    for place, value in places.items():
        if before := next((said[other] for other in said if other[: len(place)] == place), None):
            key = ".".join(place)
            yield Mistake(f"{_in_a_line(before)} and {_in_a_line(typed)} both set {_in_a_line(key)}. Give one of them", (key,))
            continue
        said[place] = typed
        yield from _unset(tables, place) if unset else _set(tables, place, value)


def _wrong_spelling(typed: str, override: str, key: str, value: str) -> str | None:
    """Return what to write instead of an override whose key and value are understood; None: its spelling is right."""
    name, equals = key.lstrip("~+"), "=" in override
    if not _is_text(override):
        return "not UTF-8 text. Write it into the file, which can name every character"
    if typed != override:
        return f"an override has no spaces. Write {_spelled(key, value)}"
    if key.startswith("~") and equals:
        return f"a key is unset without a value. Write ~{name}"
    if key.startswith("+"):
        return f"a key need not be in the file to be set. Write {_spelled(name, value)}"
    return None


def _separated(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each override as it was typed and as it was meant: the two differ if there are spaces around the equals sign, or in its
    place."""
    rest = list(overrides)
    while rest:
        typed = [rest.pop(0)]
        if re.fullmatch(r"[\w.]+\.\w+ *=?", typed[0]):
            while rest and len(typed) < 3 and typed[-1] in (typed[0], "=") and re.fullmatch(r"=[^=]*|[^=~][^=]*", rest[0]):
                typed.append(rest.pop(0))
        meant = f"{typed[0].strip(' =')}={typed[-1].lstrip(' =')}" if len(typed) > 1 else typed[0]
        yield " ".join(typed), meant


def _spelled(key: str, value: str) -> str:
    """Write an override as it is typed into a shell."""
    return f"{key}={shlex.quote(value) if value else 'VALUE'}"


def _is_text(text: str) -> bool:
    """Return whether the text can be written as UTF-8: the shell's arguments may hold any byte."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _set(tables: dict[str, Any], parts: Sequence[str], value: Any) -> Iterator[Mistake]:
    table = tables
    for depth, part in enumerate(parts[:-1], 1):
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            key, above = ".".join(parts), ".".join(parts[:depth])
            yield Mistake(f"{key}: {above} is a value ({shown(inner)}), not a table: nothing can be set below it", (above,))
            return
        table = inner
    table[parts[-1]] = value


def _unset(tables: dict[str, Any], parts: Sequence[str]) -> Iterator[Mistake]:
    table: Any = tables
    for part in parts[:-1]:
        table = table.get(part) if isinstance(table, dict) else None
    if not isinstance(table, dict) or parts[-1] not in table:
        key = ".".join(parts)
        yield Mistake(f"~{key}: nothing to unset, for the file does not set {key}. Remove it", (key,))
    else:
        del table[parts[-1]]


def instead_of_option(option: str, following: str | None) -> str | None:
    """Return the override that is meant by an option such as `--train.lr 1e-4`, `--recompute=full` or `--no-packing`, or the overrides that
    may be meant (`--workers 2`); None if no key has such a name. `following`: the next word of the command line."""
    name, equals, value = option.lstrip("-").partition("=")
    name = name.replace("-", "_")
    if not (meant := _keys_named(name)) and (meant := _keys_named(name.removeprefix("no_"))):
        return either([f"{key}=false" for key in meant])
    is_value = following is not None and not equals and "=" not in following and not re.match(r"-+[A-Za-z]", following)
    return either([_spelled(key, following or "" if is_value else value) for key in meant]) if meant else None


# Sections whose keys are not meant if another section has a key of the same name: most inherit from it.
_SECONDARY = frozenset({"ref", "critic", "reward_model", "lora", "eval", "log", "health"})


def _keys_named(name: str) -> list[str]:
    """Return the keys that a user may mean by a name: the whole key, its last part, or another system's name."""
    by_end = [key for key in keys() if name in (key, key.partition(".")[2])]
    main = [key for key in by_end if key.partition(".")[0] not in _SECONDARY]
    return main or by_end[:1] or knobs.elsewhere(name)[:1]


def _key_parts(key: str) -> list[str]:
    """Return the parts of a dotted key; quotes keep dots together, as in TOML."""
    try:
        table: Any = tomllib.loads(f"{key} = 0")
    except (ValueError, RecursionError):
        return key.split(".")
    parts = []
    while isinstance(table, dict) and len(table) == 1:
        ((part, table),) = table.items()
        parts.append(part)
    return parts if table == 0 else [""]


def _override_value(text: str) -> Any:
    # Users of verl write Python's True and False, which TOML does not know.
    if text in ("True", "False"):
        return text == "True"
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return table["value"] if len(table) == 1 else text


# ---- unknown keys ------------------------------------------------------------------------------------------------------------------

_SYSTEMS: dict[knobs.Source, str] = {"verl": "verl's", "chatlearn": "ChatLearn's"}
_NOT_BUILT = "known knob, not built in this version: remove it"


def _take_unknown_keys(tables: dict[str, Any]) -> Iterator[Mistake]:
    """Remove the keys that the schema does not know from `tables`, and yield for each what may have been meant."""
    schemas = sections()
    for name in list(tables):
        if name not in schemas:
            yield from _unknown(name, tables.pop(name))
        elif isinstance(tables[name], dict):
            for key in [key for key in tables[name] if key not in schemas[name].model_fields]:
                yield from _unknown(f"{name}.{key}", tables[name].pop(key))


def _in_a_line(text: str) -> str:
    """Quote the user's words for a message, whatever characters they contain."""
    return shortened(toml_value(text)[1:-1], 100)


def _unknown(key: str, value: Any) -> Iterator[Mistake]:
    found, said = knobs.find(key), _in_a_line(key)
    if isinstance(value, dict) and value and not any(source == "native" for _, source in found):
        for part, inner in value.items():
            yield from _unknown(f"{key}.{part}", inner)
    elif found:
        yield Mistake(f"{said}: {_known_elsewhere(found, key, value)}", tuple(knob.name for knob, _ in found))
    elif ours := knobs.elsewhere(key):
        yield Mistake(f"{said}: unknown key; other systems' name for {' and '.join(ours)}: {_carried_over(key, ours, value)}", tuple(ours))
    elif (near := nearest(key, [*keys(), *(knob.name for knob in knobs.LEDGER if knob.legal)])) is None:
        yield Mistake(f"{said}: unknown key; no known key is similar: remove it. docs/reference.md lists every key")
    else:
        built = "" if near in keys() else ", which is a knob not built in this version: remove it"
        yield Mistake(f"{said}: unknown key; the nearest is {near}{built}", (near,))


def _known_elsewhere(found: Sequence[tuple[knobs.Knob, knobs.Source]], key: str, value: Any) -> str:
    """Return the remedy for a key that the ledger knows but the configuration does not take."""
    first, source = found[0]
    if source == "native":
        return _NOT_BUILT if first.legal else f"not a setting: {first.must_change}. Remove it"
    names = " and ".join(knob.name for knob, _ in found)
    built = [knob for knob, _ in found if knob.built]
    if not built:
        return f"{_SYSTEMS[source]} name for {names}, a {_NOT_BUILT}"
    same = knobs.translate(key, value)
    advice = ", ".join(f"{knob.name} = {'...' if same is None else shown(same)}" for knob in built)
    notes = list(dict.fromkeys(knob.note for knob in built if knob.note))
    told = [note for note in notes if not any(note != other and note in other for other in notes)]
    return f"{_SYSTEMS[source]} name for {names}: write {advice}" + "".join(f" ({note})" for note in told)


def _carried_over(theirs: str, ours: Sequence[str], value: Any) -> str:
    """Return what to write for another system's key that is not a knob; if its value has another meaning or is not legal, the meaning of
    ours."""
    split = [key.split(".") for key in ours]
    illegal = any(mistake.about for key in split for mistake in _wrong_values({key[0]: {key[1]: value}}) if ".".join(key) in mistake.about)
    if illegal or knobs.has_another_meaning(theirs):
        return " ".join(words(keys()[key]).meaning for key in ours)
    return "write " + ", ".join(f"{key} = {shown(value)}" for key in ours)


def nearest(key: str, names: Iterable[str]) -> str | None:
    """Return the name most similar to `key`, by the whole name and by its last part; None if none is similar."""

    def similarity(name: str) -> float:
        whole = difflib.SequenceMatcher(None, key, name).ratio()
        last = difflib.SequenceMatcher(None, key.rpartition(".")[2], name.rpartition(".")[2]).ratio()
        # A key in the wrong section must not lose to an unrelated key of that section, but only to a similar one; and a common section
        # alone does not make two keys similar.
        beside = key.rpartition(".")[0] == name.rpartition(".")[0] and last >= 0.75
        return max(whole if last >= 0.5 else 0.0, 0.97 * last) + (0.15 if beside else 0.0)

    best = max(names, key=similarity)
    return best if similarity(best) >= 0.65 else None


# ---- values ------------------------------------------------------------------------------------------------------------------------


def _wrong_values(tables: Mapping[str, Any]) -> Iterator[Mistake]:
    """Yield one mistake for each key whose value the schema does not accept, in our words: pydantic lists a union's alternatives one by
    one."""
    try:
        # The keys of a missing section are reported one by one.
        Config.model_validate({name: tables.get(name, {}) for name in sections()})
    except ValidationError as invalid:
        errors = invalid.errors(include_url=False)
    else:
        return
    fields = keys()
    kinds: dict[str, str] = {}
    for error in errors:
        kinds.setdefault(".".join(str(part) for part in error["loc"][:2]), error["type"])
    for key, kind in kinds.items():
        section, _, name = key.partition(".")
        if key not in fields:
            text = f"must be a table, got {shown(tables[key])}. Write [{key}] and its keys on lines of their own"
            yield Mistake(f"{key}: {text}", (key, *(f"{key}.{field}" for field in sections()[key].model_fields)))
        elif name not in tables.get(section, {}):
            yield Mistake(f"{key}: missing, and every run needs it. {words(fields[key]).meaning}", (key,))
        else:
            about = words(fields[key]).note
            note = f". {about}" if kind == "literal_error" and about else ""
            yield Mistake(f"{key}: must be {legal_values(fields[key])}, got {shown(tables[section][name])}{note}", (key,))


def _with_stand_ins(tables: Mapping[str, Any], wrong: set[str]) -> Config:
    """Return the configuration with defaults in place of wrong values, so that rules that do not read them can still be checked."""
    clean: dict[str, dict[str, Any]] = {
        name: {} if name in wrong else {key: value for key, value in tables.get(name, {}).items() if f"{name}.{key}" not in wrong}
        for name in sections()
    }
    clean["model"].setdefault("path", ".")
    clean["data"].setdefault("train", ".")
    return Config.model_validate(clean)


# ---- rules between keys ------------------------------------------------------------------------------------------------------------


CHOOSING = ("algorithm.name", "algorithm.advantage", "algorithm.loss")


def _rules_of_use() -> Iterator[ConfigRule]:
    for key in keys():
        if found := conditions(key):
            yield ConfigRule(_all_read(key, *chain(*(each.reads for each in found))), partial(_has_effect, key))


def _all_read(*names: str) -> tuple[str, ...]:
    """Return the keys themselves, with those that choose the algorithm if some of them are in [algorithm], where its preset has values."""
    return (*names, *(CHOOSING if any(name.startswith("algorithm.") for name in names) else ()))


def _has_effect(key: str, config: Config) -> Iterator[str]:
    """Yield a mistake if a key is set but has no effect, or is required but not set; `auto` counts as set only where the whole section has
    no effect."""
    section, _, name = key.partition(".")
    if section == "algorithm" and name not in preset_of(config).defaults:
        return  # reported by `_algorithm_reads`
    for used_if in conditions(key):
        effective = holds(config, used_if)
        given = is_set(config, key) or (used_if.whole_section and name in getattr(config, section).model_fields_set)
        if effective and (given or not used_if.required):
            continue
        read = {each: in_effect(config, each) for each in used_if.reads if each != key}
        why = " and ".join(f"{each} is {'not set' if seen is None else shown(seen)}" for each, seen in read.items())
        if effective and all(seen is None for seen in read.values()):
            yield f"{key}: missing. Set {either([key, *read])}"
        elif effective:
            yield f"{key}: missing, but {why}. Set it: {words(keys()[key]).meaning.partition(' Left out: ')[0]}"
        elif given:
            remedy = used_if.remedy.format(section=section)
            yield f"{key}: {shown(value_of(config, key))} has no effect while {why}. Remove it, or {remedy}"
        return


def _validation_data(config: Config) -> Iterator[str]:
    asked = [key for key, on in (("run.eval_every", config.run.eval_every > 0), ("run.eval_before", config.run.eval_before)) if on]
    if asked and config.data.val is None:
        ask = "asks" if len(asked) == 1 else "ask"
        yield f"data.val: missing, but {' and '.join(asked)} {ask} for validation. Set data.val, or remove {' and '.join(asked)}"


def _best_has_values(config: Config) -> Iterator[str]:
    run = config.run
    if run.keep_best is None:
        return
    name, groups = run.keep_best.removeprefix("-"), (*schema.VALIDATION_METRICS, *schema.METRICS)
    validated = schema.VALIDATED_REWARDS if preset_of(config).rollout else schema.VALIDATED_LOSS
    if not name.startswith(groups):
        yield f"run.keep_best: no metric is called {shown(name)}. Use one that begins with {either(groups)} (docs/metrics.md)"
    elif name.startswith("val/") and name not in validated:
        yield f"run.keep_best: validations of this run have no metric {shown(name)}. Use {either(validated)}, or one of a data source"
    elif name.startswith(schema.VALIDATION_METRICS):
        if not run.eval_every:
            yield f"run.keep_best: {shown(run.keep_best)} is a metric of validation, and run.eval_every is 0. Set run.eval_every"
    elif not run.save_every:
        why = "is compared where a checkpoint is saved, and run.save_every is 0"
        yield f"run.keep_best: {shown(run.keep_best)} {why}. Set run.save_every, or use a metric of validation"


def _temperature(section: str, config: Config) -> Iterator[str]:
    """Refuse temperatures beyond which float32 cannot hold the logits, or their differences, divided by them."""
    value = getattr(config, section).temperature
    if value != 0 and not LEAST_TEMPERATURE <= value <= MOST_TEMPERATURE:
        bounds = f"{LEAST_TEMPERATURE} to {MOST_TEMPERATURE}"
        yield f"{section}.temperature: {value} is out of range. Use a value from {bounds}, or 0 for greedy samples"


def _enough_prompts(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.minibatches_per_step > algorithm.prompts_per_step:
        yield (
            f"algorithm.minibatches_per_step: {algorithm.minibatches_per_step} is more than algorithm.prompts_per_step "
            f"({algorithm.prompts_per_step}); a mini-batch holds at least one prompt. Lower it, or raise prompts_per_step"
        )


def _reward_exists(key: str, function: str) -> Iterator[str]:
    if function in schema.REWARDS:
        return
    if function.startswith(user_code.FROM_PYTHON):
        try:
            user_code.locate(function)
        except UserCodeError as error:
            yield f"{key}: {shown(function)}: {error}"
        return
    file, _, name = function.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        known = either([shown(each) for each in schema.REWARDS])
        yield f"{key}: {shown(function)} is not a reward. Use {known}, or write FILE.py:NAME"
    else:
        yield from _file_exists(key, file)


def _rewards_exist(config: Config) -> Iterator[str]:
    named = {"reward.function": config.reward.function, **{f"reward.sources.{key}": each for key, each in config.reward.sources.items()}}
    for key, function in named.items():
        weights = schema.reward_weights(function)
        if not weights:
            yield f"{key}: an empty table is not a reward. Name at least one function with its weight"
        for name, weight in weights.items():
            yield from _reward_exists(key, name)
            if weight == 0:
                yield f"{key}: {shown(name)} has the weight 0 and no effect. Remove it, or give it another weight"


def _algorithm_reads(config: Config) -> list[str]:
    """Return the mistakes in [algorithm]: every key that is set must be read, and the parameters of the user's own functions must have
    values."""
    name, algorithm = config.algorithm.name, AlgorithmConfig.model_fields
    try:
        own, used = own_functions(config), used_keys(config)
        wrong = [str(error) for function in own.values() for error in function.wrong_parameters()]
    except UserError as error:  # the file cannot be used, so the keys that its function takes are not known
        return [str(error)]
    for key in (key for key in algorithm if key not in used and is_set(config, f"algorithm.{key}")):
        if own and key in preset_of(config).defaults:
            functions, many_of_them = " and ".join(function.code.name for function in own.values()), len(own) > 1
            taken, which = ("do not take it", "one of them") if many_of_them else ("does not take it", "the function")
            wrong.append(f"algorithm.{key}: {functions} {taken}. Remove the key, or give {which} a parameter {key}")
        else:
            reads, chosen = ", ".join(sorted(used)), [each for each in ("advantage", "loss") if is_set(config, f"algorithm.{each}")]
            beside = " and ".join(f"{each} {getattr(config.algorithm, each)!r}" for each in chosen)
            who = f"{name!r} with {beside}" if beside else repr(name)
            wrong.append(f"algorithm.{key}: the algorithm {who} does not use it. Remove the key; {who} reads {reads}")
    return wrong


def _wrong_numbers(config: Config) -> Iterator[str]:
    """Yield numbers with which the algorithm could learn nothing, or not what it should."""
    preset, settings = preset_of(config), algorithm_settings(config)
    if not preset.rollout:
        if settings["aggregation"] == NORMALISED_SUM and not is_set(config, "algorithm.length_norm"):
            yield f"algorithm.length_norm: {NORMALISED_SUM!r} divides by it. Set it, for example to the longest response in tokens"
        return
    samples, clip = config.algorithm.samples_per_prompt, settings.get("dual_clip", 0)
    if samples < preset.smallest_group:
        remedy = f"Use at least {preset.smallest_group} samples per prompt"
        yield f"algorithm.samples_per_prompt = {samples}: a group of one has no baseline, every advantage would be 0. {remedy}"
    if 0 < clip <= 1:
        why = "must exceed 1, or it would also bound tokens whose probability has not changed"
        yield f"algorithm.dual_clip = {clip}: {why}. Use for example 3, or 0 to switch it off"
    if config.rollout.temperature == 0:
        remedy = "Use a temperature above 0, for example 1; eval.temperature may stay 0"
        yield f"rollout.temperature = 0: the samples of a prompt would all be the same greedy one. {remedy}"
    if settings.get("dynamic_sampling") and config.run.epochs is not None:
        why = "with dynamic sampling a step takes any number of prompts, so the run's length in steps is not known"
        yield f"run.epochs: {why}. Set run.steps instead, or algorithm.dynamic_sampling = false"
    if settings.get("dynamic_sampling") and settings["importance_cap"] == 0 and settings["importance_level"] != "bypass":
        why = "dynamic sampling trains on samples of older weights, which need the importance weight"
        yield f"algorithm.importance_cap = 0: {why}. Set it above 0, for example to 2"
    yield from _wrong_bounds(settings)
    if "reward_parts" in preset.defaults:
        for key in ("reward_kl_coef", "overlong_buffer"):
            if settings[key]:
                yield f"algorithm.{key} = {settings[key]}: gdpo reads the parts of the reward, which it does not change. Set it to 0"
    if {"cov_low", "cov_high"} <= settings.keys() and settings["cov_low"] >= settings["cov_high"]:
        given = f"algorithm.cov_low = {settings['cov_low']} and algorithm.cov_high = {settings['cov_high']}"
        yield f"{given}: no covariance lies between them. Lower the first, or raise the second"
    yield from _wrong_lengths(config, settings)


def _wrong_bounds(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield bounds of the rollout correction that are too many, too few or in the wrong order."""
    cap, names, bounds = settings["importance_cap"], settings.get("rejection"), settings.get("rejection_bounds")
    if isinstance(cap, list) and (len(cap) != 2 or not cap[0] < cap[1]):
        yield f"algorithm.importance_cap = {cap}: give one number, or a lower and an upper bound, outside of which weights are 0"
    if names is None or bounds is None:
        return
    count = len(names) if isinstance(names, list) else None
    if count == 0 or (count is not None and len(set(names)) < count):
        yield f"algorithm.rejection = {names}: name each criterion once, and at least one"
        return
    if count is not None and isinstance(bounds, list) and len(bounds) != count:
        yield f"algorithm.rejection_bounds = {bounds}: give one number for all criteria, or an entry for each of the {count}"
        return
    for name, own in bounds_of(settings).items():
        if not isinstance(own, list):
            if name.endswith("k1") and own <= 1:
                yield f"algorithm.rejection_bounds = {own}: for {name} one number u stands for ratios from 1/u to u. Use a number above 1"
        elif not name.endswith("k1"):
            yield f"algorithm.rejection_bounds = {own}: {name} has an upper bound only. Give one number"
        elif len(own) != 2 or not all(isinstance(each, float | int) for each in own) or not own[0] < own[1]:
            yield f"algorithm.rejection_bounds = {own}: {name} has a lower and an upper ratio. Give two numbers, the smaller first"


def _wrong_lengths(config: Config, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield numbers that do not fit the length of responses, of steps or of the run."""
    longest, steps, samples = config.rollout.max_new_tokens, config.run.steps, config.algorithm.samples_per_prompt
    buffer, warmup, horizon = settings["overlong_buffer"], settings.get("critic_warmup", 0), settings["reward_kl_horizon"]
    if buffer > longest:
        why = f"more than rollout.max_new_tokens ({longest}), so even the shortest response would be penalised"
        yield f"algorithm.overlong_buffer = {buffer}: {why}. Use at most {longest}"
    if steps is not None and warmup >= steps:
        why = f"the run has {many(steps, 'step')}, so the actor would never be updated"
        yield f"algorithm.critic_warmup = {warmup}: {why}. Use less, or raise run.steps"
    samples *= config.algorithm.prompts_per_step
    if settings["reward_kl_coef"] and settings.get("reward_kl_target") and samples * LARGEST_ERROR >= horizon:
        why = f"a step has {samples} samples, so one step could bring the weight of the penalty to 0 or below"
        yield f"algorithm.reward_kl_horizon = {horizon}: {why}. Use more than {int(samples * LARGEST_ERROR)}"


def _together(config: Config) -> Iterator[str]:
    values = flatten(config)
    for pair in knobs.TOGETHER:
        one, other = (knobs.FEATURES[name].setting(values) for name in (pair.one, pair.other))
        allowed = pair.allowed or (pair.if_copied and samples_from_copy(config))
        if not allowed and one and other:
            yield f"{one.partition(' ')[0]}: {one} does not go with {other}: {pair.why}. Remove one of them"


def _run_folder(config: Config) -> Iterator[str]:
    given = config.run.dir
    if os.path.isfile(given):
        yield f"run.dir: {shown(given)} is a file. Name a folder, which need not exist"
    elif "\0" in given or any(len(part.encode()) > 255 for part in given.split("/")):
        yield f"run.dir: no folder can be called {shown(given)}: it holds a NUL character, or a part of more than 255 bytes. Name another"
    elif given.startswith("~"):
        yield f"run.dir: {shown(given)} cannot be expanded{_tilde(given)}. Name a folder by its path"


def _address(config: Config) -> Iterator[str]:
    given = config.cluster.address
    if given not in (None, "auto") and not re.fullmatch(r"[^/\s]+:\d{1,5}", given):
        yield (
            f"cluster.address: {shown(given)} is not HOST:PORT. Use that of a Ray cluster which this machine is part of, for example "
            "10.0.0.1:6379, as `ray start --head` prints it; or auto"
        )


def _stalls(config: Config) -> Iterator[str]:
    stall_s, deadline_s = config.cluster.stall_s, config.cluster.deadline_s
    if is_set(config, "cluster.stall_s") and stall_s >= deadline_s:
        yield f"cluster.stall_s: {stall_s:g} has no effect: a worker is given up after {deadline_s:g} s (cluster.deadline_s). Use less"


# ---- files that keys name ------------------------------------------------------------------------------------------------------------

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def _offline() -> bool:
    given = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return given.upper() in {"1", "ON", "YES", "TRUE"}


def _model_exists(key: str, path: str) -> Iterator[str]:
    folder, given = Path(path), f"{key}: {shown(path)}"
    if _there(folder) and os.path.isdir(folder):
        if shards := _shards_of(folder):
            merge = f"python -m verl.model_merger merge --backend fsdp --local_dir {shards} --target_dir MERGED"
            yield f"{given} has its weights in verl's FSDP shards (model_world_size_N_rank_K.pt), which are not read. Merge them: {merge}"
        elif (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
            yield f"{given} holds an adapter, not a model. Give the model that it belongs to, and the adapter as lora.path"
        elif not (folder / "config.json").is_file():
            yield f"{given} has no config.json. Give {_model_meant(folder)}"
    elif os.path.exists(folder):
        yield f"{given} is a file. Give the folder of a Hugging Face model"
    elif not _HUB_NAME.fullmatch(path):
        yield f"{key}: no such folder: {shown(path)}{_tilde(path)}. Give the folder of a Hugging Face model, or a hub name like org/name"
    elif _offline() and not _cached(path):
        yield (
            f"{key}: no such folder: {shown(path)}; it is not in the hub's cache and HF_HUB_OFFLINE forbids asking the hub for it. "
            "Give the folder of a Hugging Face model, or unset HF_HUB_OFFLINE"
        )


def _model_meant(folder: Path) -> str:
    """Return what to give instead of a folder without a model: for the folder of a run, its newest checkpoint's model."""
    for pattern in _CHECKPOINTS:
        if found := sorted(folder.glob(pattern), key=_by_number):
            return f"the folder of the checkpoint's model: {found[-1].parent}"
    return "the folder of a Hugging Face model"


def _by_number(path: Path) -> list[Any]:
    """Return a sort key that orders paths by the numbers in them: global_step_20 before global_step_100."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]


# Places of models below the folder of a run: of fulltilt, of verl and of ChatLearn.
_CHECKPOINTS = (
    "model/config.json", "step-*/model/config.json", "checkpoints/step-*/model/config.json", "huggingface/config.json",
    "actor/huggingface/config.json", "global_step_*/actor/huggingface/config.json", "global_step_*/huggingface/config.json",
    "save_model/policy_trainer/*/config.json", "save_model/policy_trainer/*/huggingface/config.json",
)  # fmt: skip


def _shards_of(folder: Path) -> Path | None:
    """Return the folder of verl's FSDP shards, if they are the only weights in or around a folder."""
    for shards in (folder, folder / "actor", folder.parent if folder.name == "huggingface" else folder):
        if any(shards.glob("model_world_size_*_rank_*.pt")):
            readable = [each for where in (folder, shards / "huggingface") for each in where.glob("*.safetensors")]
            return None if readable else shards
    return None


def _there(path: str | Path) -> bool:
    """Return whether the path exists. Raises OSError if the system does not say, for example because a folder above it cannot be read."""
    try:
        os.stat(path)
    except ValueError:  # a path with a NUL character
        return False
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            raise
        return False
    return True


def _cached(name: str) -> bool:
    """Return whether any revision of a hub's model was downloaded before."""
    from huggingface_hub import constants

    return any((Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").glob("snapshots/*/config.json"))


def _tilde(path: str) -> str:
    """Explain a `~` that is left at the beginning of a path: it could not be expanded."""
    name = path[1:].partition("/")[0]
    return f" (there is no user {shown(name) if name else 'with a home folder'})" if path.startswith("~") else ""


def _data_exists(key: str, given: str | list[str]) -> Iterator[str]:
    for path in [given] if isinstance(given, str) else given:
        on_hub = schema.hub_dataset(path)
        if on_hub is not None and on_hub.split is None and key == "data.val":
            yield f"{key}: {shown(path)} on the hub has several splits. Name one, for example {path}:test"
        if on_hub is None and not path.startswith(schema.MEMORY) and not _there(path):
            yield f"{key}: no such file or folder: {shown(path)}{_tilde(path)}. Paths are relative to the current directory"


def _file_exists(key: str, path: str) -> Iterator[str]:
    if not (_there(path) and os.path.isfile(path)):
        yield f"{key}: no such file: {shown(path)}{_tilde(path)}. Paths are relative to the current directory"


def _adapter_exists(key: str, path: str) -> Iterator[str]:
    if not _there(Path(path) / "adapter_config.json"):
        yield f"{key}: {shown(path)}{_tilde(path)} has no adapter_config.json. Give the folder of an adapter that peft saved"


_EXISTS: Mapping[str, Callable[[str, Any], Iterator[str]]] = {
    "model": _model_exists,
    "adapter": _adapter_exists,
    "file": _file_exists,
    "data": _data_exists,
}


def _exists(key: str, kind: str, config: Config) -> Iterator[str]:
    given = value_of(config, key)
    return iter(()) if given is None or _no_path(given) else _EXISTS[kind](key, given)


def _no_path(given: Any) -> bool:
    return isinstance(given, str) and "\0" in given


def _may_exist(key: str, config: Config) -> Iterator[str]:
    if _no_path(given := value_of(config, key)):
        yield f"{key}: no file or folder can be called {shown(given)}: it holds a NUL character. Name another"


_NUMBERS = (
    *CHOOSING,
    *("algorithm.prompts_per_step", "algorithm.samples_per_prompt", "algorithm.dual_clip", "algorithm.aggregation"),
    *("algorithm.length_norm", "algorithm.dynamic_sampling", "algorithm.importance_cap", "algorithm.overlong_buffer", "run.steps"),
    *("algorithm.importance_level", "algorithm.rejection", "algorithm.rejection_bounds", "algorithm.cov_low", "algorithm.cov_high"),
    *("algorithm.critic_warmup", "rollout.temperature", "rollout.max_new_tokens", "run.epochs"),
    *("algorithm.reward_kl_coef", "algorithm.reward_kl_target", "algorithm.reward_kl_horizon"),
)
RULES: tuple[ConfigRule, ...] = (
    *(
        ConfigRule((key,), partial(_exists, key, row_of(field).names), files=True)
        for key, field in keys().items()
        if row_of(field).names in _EXISTS
    ),
    *(ConfigRule((key,), partial(_may_exist, key)) for key, field in keys().items() if row_of(field).names in _EXISTS),
    ConfigRule(("data.val", "run.eval_every", "run.eval_before"), _validation_data),
    ConfigRule(("run.keep_best", "run.eval_every", "run.save_every", "algorithm.name"), _best_has_values),
    ConfigRule(("algorithm.minibatches_per_step", "algorithm.prompts_per_step"), _enough_prompts),
    *(ConfigRule((f"{section}.temperature",), partial(_temperature, section)) for section in ("rollout", "eval")),
    ConfigRule(("reward.function", "reward.sources"), _rewards_exist, files=True),
    *_rules_of_use(),
    ConfigRule(tuple(sorted({key for feature in knobs.FEATURES.values() for key in feature.keys})), _together),
    ConfigRule(("run.dir",), _run_folder, files=True),
    ConfigRule(("cluster.address",), _address),
    ConfigRule(("cluster.stall_s", "cluster.deadline_s"), _stalls),
    ConfigRule(CHOOSING, _algorithm_reads),
    ConfigRule(_NUMBERS, _wrong_numbers),
)


def warnings(config: Config) -> list[str]:
    """Return warnings about settings that are allowed but may not be what the user meant."""
    not_applied = "the trainer does not apply it, its log-probs are those of the full softmax"
    values = {key: getattr(config.rollout, key) for key, off in (("top_p", 1), ("top_k", 0)) if getattr(config.rollout, key) != off}
    unapplied = [f"rollout.{key} = {value}: {not_applied}" for key, value in values.items()]
    return [*unapplied, *_data_twice("data.train", config.data.train), *_data_twice("data.val", config.data.val or [])]


def _data_twice(key: str, given: str | list[str]) -> Iterator[str]:
    paths = Counter(os.path.realpath(path) for path in given) if isinstance(given, list) else Counter[str]()
    for path, count in paths.items():
        if count > 1:
            names = list(dict.fromkeys(shown(each) for each in given if os.path.realpath(each) == path))
            yield f"{key}: {' and '.join(names)} is there {count} times, so that each of its rows counts {count} times"


# ---- writing and comparing ---------------------------------------------------------------------------------------------------------


def snapshot(config: Config) -> dict[str, Any]:
    """Return the part of a configuration that a checkpoint keeps: every key, in JSON's types."""
    plain: dict[str, Any] = json.loads(json.dumps(flatten(config), default=str))
    return plain


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys in which two snapshots differ, except FREE_ON_RESUME. One snapshot may come from a version with fewer keys:
    keys that only one of them has are not compared."""
    return [key for key in saved if key in now and saved[key] != now[key] and key not in FREE_ON_RESUME]
