"""The translation of another system's configuration by a table of its keys and their counterparts here.

Enters: a table (`Key`: their key, what it becomes, their default), the keys that a user gave, and the known facts about files and GPUs.
Leaves: a `Translation`: one `Answer` for each given key, the values of our keys with their sources, and the mistakes that are left in the
run file. Guaranteed: each given key has exactly one answer, "honoured", "means nothing" or "refused"; an unknown key is refused with the
nearest known one; a value that our schema or rules do not accept is refused in their words; a key without effect here is left out of the
run file, with the reason. Neither torch nor a file is needed.

A row of the table, a `Key`, has no code except its conversion, a function of an `Ask`; the functions at the end of this file make the
common conversions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from fulltilt import config as configuration
from fulltilt.compat.outcome import Kind, Outcome
from fulltilt.compat.surroundings import Surroundings
from fulltilt.compat.without_effect import without_effect
from fulltilt.records import UserError
from fulltilt.schema import Config, conditions, expanded, keys, legal_values, row_of, sections, shown, toml_value
from fulltilt.settings import holds, in_effect, used_keys
from fulltilt.words import printable

NO_DEFAULT: Any = object()  # marks a key that sets nothing here if it is not given
REMOVED: Any = object()  # the value of a key that Hydra's ~key removes
# Value of a key that must be set once the data is known: an empty table is a legal value of reward.function that no run accepts.
UNDECIDED: Mapping[str, float] = {}

# Our performance knobs, which `retune` leaves to `auto`. The user decides how many machines and GPUs there are.
PERFORMANCE = frozenset(
    key for key, field in keys().items() if row_of(field).section and not row_of(field).changes.startswith("nothing")
) - {key for key in keys() if key.startswith("cluster.")}


@dataclass(frozen=True)
class Theirs:
    """Another system's configuration: the given keys, over its defaults."""

    given: Mapping[str, Any]
    defaults: Mapping[str, Any]
    seen: Surroundings
    program: str  # the module that the user starts, such as `verl.trainer.main_ppo`

    def read(self, *names: str) -> Any:
        """Return the value of the first of these keys that was given; else the default of the first that has one."""
        found = [self.given[name] for name in names if self.has(name)]
        return found[0] if found else next((self.defaults[name] for name in names if name in self.defaults), None)

    def has(self, *names: str) -> bool:
        return any(name in self.given and self.given[name] is not REMOVED for name in names)


@dataclass(frozen=True)
class Ask:
    """One key and value to convert, with the configuration around them."""

    key: str
    value: Any
    theirs: Theirs
    below: str = ""  # the part of the key that the row's `*` matches

    def read(self, *names: str) -> Any:
        return self.theirs.read(*names)

    def has(self, *names: str) -> bool:
        return self.theirs.has(*names)

    @property
    def given(self) -> bool:
        return self.has(self.key)


Conversion = Callable[[Ask], Outcome]


@dataclass(frozen=True)
class Key:
    """A key of another system, or several with the same answer."""

    theirs: str  # dotted; braces as a shell expands them; one that ends in ".*" stands for every key below it
    becomes: Conversion
    default: Any = NO_DEFAULT  # their default, if it is part of the algorithm: it then holds here too if the key is not given
    note: str = ""  # shown with the answer: how verl treats the key, an error in a guide


@dataclass(frozen=True)
class Table:
    """The known keys of another system's configuration."""

    system: str  # its name, for people
    rows: Sequence[Key]
    always: Mapping[str, Any] = field(default_factory=dict)  # values of our keys that no key of theirs sets

    @cached_property
    def exact(self) -> dict[str, tuple[int, Key]]:
        found: dict[str, tuple[int, Key]] = {}
        for number, row in enumerate(self.rows):
            for name in expanded_all(row.theirs):
                assert name not in found, f"{name} has two rows"
                found[name] = (number, row)
        return found

    @cached_property
    def defaults(self) -> dict[str, Any]:
        return {name: row.default for name, (_, row) in self.exact.items() if row.default is not NO_DEFAULT}

    def find(self, key: str) -> tuple[int, Key, str] | None:
        """Return the row of a key, its index in the table, and the part of the key that its `*` matches."""
        if key in self.exact:
            return (*self.exact[key], "")
        parts = key.split(".")
        if (last := f"*.{parts[-1]}") in self.exact:
            return (*self.exact[last], "")
        for length in range(len(parts) - 1, 0, -1):
            if (above := ".".join(parts[:length]) + ".*") in self.exact:
                return (*self.exact[above], ".".join(parts[length:]))
        return None

    @cached_property
    def names(self) -> list[str]:
        """Return every key that has a row of its own; for a wildcard, the key above it."""
        return [name.removesuffix(".*") for name in self.exact]


def expanded_all(names: str) -> list[str]:
    """Return the names of a row: alternatives separated by spaces, braces expanded."""
    return [each for name in names.split() for each in expanded(name)]


@dataclass(frozen=True)
class Answer:
    key: str  # theirs
    value: Any
    kind: Kind
    sets: Mapping[str, Any]  # our keys and their values
    why: str
    pending: tuple[str, ...] = ()  # our keys that it sets once the data is known

    @property
    def assignment(self) -> str:
        return f"~{self.key}" if self.value is REMOVED else f"{self.key}={written(self.value)}"


@dataclass(frozen=True)
class Value:
    """A value of one of our keys, with its sources."""

    value: Any
    sources: tuple[str, ...]  # their keys
    why: str
    given: bool  # given by the user; else it is the other system's default


@dataclass(frozen=True)
class Translation:
    system: str
    program: str
    answers: tuple[Answer, ...]
    values: Mapping[str, Value]  # by our dotted keys, in the order of the schema
    mistakes: tuple[str, ...]  # mistakes in the run file, beside refused keys
    notes: tuple[str, ...]
    pending: Mapping[str, str] = field(default_factory=dict)  # our keys whose values depend on data that is not here, and why

    @property
    def tables(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for key, value in self.values.items():
            section, _, name = key.partition(".")
            found.setdefault(section, {})[name] = value.value
        return found

    def of_kind(self, kind: Kind) -> list[Answer]:
        return [answer for answer in self.answers if answer.kind == kind]

    @property
    def undecided(self) -> dict[str, str]:
        """Keys that somebody must set because their values depend on data that is not here, and why."""
        unscored = {key: value.why for key, value in self.values.items() if key == "reward.function" and value.value == UNDECIDED}
        return unscored | dict(self.pending)

    @property
    def problems(self) -> list[str]:
        """Everything that prevents the run from starting."""
        refused = (f"{answer.assignment}: {answer.why}" for answer in self.of_kind("refused"))
        return [*refused, *self.mistakes, *(f"{key}: {why}" for key, why in self.undecided.items())]


def translate(
    table: Table, given: Mapping[str, Any], program: str, seen: Surroundings, *, retune: bool = False, notes: Sequence[str] = (),
    assumed: Mapping[str, Any] | None = None,
) -> Translation:  # fmt: skip
    """Translate a configuration. `retune`: leave performance settings to `auto`. `assumed`: further defaults, of this program."""
    theirs = Theirs(given, {**table.defaults, **(assumed or {})}, seen, program)
    outcomes: dict[str, Outcome] = {}
    places: dict[str, int] = {}
    for key, value in given.items():
        found = table.find(key)
        if found is None:
            outcomes[key] = unknown(table, key, value)
            continue
        place, row, below = found
        outcome = asked(row, Ask(key, value, theirs, below))
        places[key] = place
        outcomes[key] = retuned(outcome) if retune else outcome
    draft = Draft(table, outcomes, {key: Value(value, (), "", given=False) for key, value in table.always.items()})
    for key in sorted(places, key=lambda key: places[key]):
        draft.take(key, outcomes[key], given=True)
    for place, row in enumerate(table.rows):
        if row.default is not NO_DEFAULT and place not in places.values():
            key = expanded_all(row.theirs)[0]
            outcome = asked(row, Ask(key, theirs.defaults[key], theirs))
            draft.take(key, retuned(outcome) if retune else outcome, given=False)
    draft.settle()
    ends = {key: draft.outcomes[key] for key in given}
    answers = (Answer(key, given[key], end.kind, end.sets, end.why, tuple(end.pending)) for key, end in ends.items())
    ordered = {key: draft.values[key] for key in keys() if key in draft.values}
    return Translation(table.system, program, tuple(answers), ordered, tuple(draft.mistakes), tuple(notes), draft.pending)


def asked(row: Key, ask: Ask) -> Outcome:
    """Return the outcome of a row for a value. A value of another type than its conversion expects is refused."""
    if ask.value is REMOVED:
        return Outcome("means nothing", "removed with ~, so it is not set here either")
    try:
        outcome = row.becomes(ask)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        told = str(error) if isinstance(error, WrongValue) else f"{written(ask.value)} is not a value that this key takes"
        return Outcome("refused", told)
    return replace(outcome, why=". ".join(filter(None, (outcome.why.rstrip("."), row.note))))


class WrongValue(ValueError):
    """A value that a conversion cannot read; the message says why."""


def retuned(outcome: Outcome) -> Outcome:
    if not (outcome.performance or (outcome.sets and outcome.sets.keys() <= PERFORMANCE)):
        return outcome
    became = ", ".join(f"{key} = {toml_value(value)}" for key, value in outcome.sets.items()) or outcome.why
    return Outcome("means nothing", f"--retune leaves this performance setting to auto. Without it: {became}")


def unknown(table: Table, key: str, value: Any) -> Outcome:
    """Return the outcome of a key without a row: a whole table of theirs, a choice among their files, or an unknown key."""
    whole_table = key.partition("@")[2] or key
    below = next((name for name in table.names if name == whole_table or name.startswith(f"{whole_table}.")), None)
    if below and (value is REMOVED or value in (None, {})):
        return Outcome("means nothing", "a whole table: none of its keys is given, and their defaults hold")
    if below:
        return Outcome("refused", f"a whole table of {table.system}'s, or a choice among its files: give its keys, such as {below}")
    near = configuration.nearest(key, table.names)
    told = f"the nearest is {near}" if near else "no known key is similar"
    return Outcome("refused", f"unknown key of {table.system}; {told}")


@dataclass
class Draft:
    """Our values while they are collected, and the outcomes of the keys that set them."""

    table: Table
    outcomes: dict[str, Outcome]  # outcomes of the given keys
    values: dict[str, Value] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)
    pending: dict[str, str] = field(default_factory=dict)

    def take(self, key: str, outcome: Outcome, *, given: bool) -> None:
        """Add the values that a key sets. Given values take precedence over defaults; of two given keys the one earlier in the table."""
        if outcome.kind == "refused" and not given:
            self.mistakes.append(f"{key} ({self.table.system}'s default): {outcome.why}")
        for ours, why in outcome.pending.items():
            if ours not in self.values:
                self.pending.setdefault(ours, why)
        for ours, value in outcome.sets.items():
            before = self.values.get(ours)
            if before is None and ours in self.pending and not given:
                continue
            if before is None:
                self.values[ours] = Value(value, (key,), outcome.why, given)
            elif before.value == value and given == before.given:
                self.values[ours] = replace(before, sources=(*before.sources, key))
            elif given:
                first = before.sources[0]
                self.outcomes[key] = Outcome("refused", f"{ours} is {toml_value(before.value)} already, by {first}. Give one of them")

    def settle(self) -> None:
        """Leave out values without effect, and refuse wrong ones, until nothing changes."""
        for _ in range(len(keys())):
            if not self._drop(self._illegal()) and not self._drop(self._without_effect()) and not self._drop(self._broken()):
                break
        self._unneeded()
        self._missing()

    def _unneeded(self) -> None:
        """Forget pending values that would have no effect."""
        config = self._config()
        for ours in [key for key in self.pending if not all(holds(config, condition) for condition in conditions(key))]:
            del self.pending[ours]
            for key, outcome in self.outcomes.items():
                if ours in outcome.pending:
                    self.outcomes[key] = Outcome("means nothing", f"{ours} has no effect with the other keys as they are")

    def _config(self) -> Config:
        tables: dict[str, dict[str, Any]] = {name: {} for name in sections()}
        for key, value in self.values.items():
            section, _, name = key.partition(".")
            tables[section][name] = value.value
        tables["model"].setdefault("path", ".")
        tables["data"].setdefault("train", ".")
        return Config.model_validate(tables)

    def _illegal(self) -> Iterator[tuple[str, Outcome]]:
        """Yield keys that the schema does not know or whose values it does not accept."""
        for key in [key for key in self.values if key not in keys()]:
            yield key, Outcome("refused", f"{key} is not built in this version")
        try:
            self._config()
        except ValidationError as invalid:
            for key in {".".join(str(part) for part in error["loc"][:2]) for error in invalid.errors(include_url=False)}:
                if key in self.values and key in keys():
                    wrong = f"{key} must be {legal_values(keys()[key])}, and this would be {shown(self.values[key].value)}"
                    yield key, Outcome("refused", wrong)

    def _without_effect(self) -> Iterator[tuple[str, Outcome]]:
        config = self._config()
        try:
            used = used_keys(config)
        except UserError:  # a function's file is not here, so the keys that it reads are not known
            used = {key.partition(".")[2] for key in keys() if key.startswith("algorithm.")}
        for key in self.values:
            section, _, name = key.partition(".")
            if section == "algorithm" and name not in used:
                yield key, Outcome("means nothing", f"the algorithm {config.algorithm.name!r} does not read {key}")
                continue
            for condition in conditions(key):
                if not holds(config, condition):
                    read = [each for each in condition.reads if each != key]
                    why = " and ".join(f"{each} is {_seen(in_effect(config, each))}" for each in read)
                    yield key, Outcome("means nothing", f"{key} has no effect while {why}")
                    break
        yield from ((key, outcome) for key, outcome in without_effect(config) if key in self.values)

    def _broken(self) -> Iterator[tuple[str, Outcome]]:
        """Yield given keys that break a rule between keys."""
        for key, text in self._rules():
            if key in self.values and self.values[key].given:
                yield key, Outcome("refused", text)

    def _rules(self) -> Iterator[tuple[str, str]]:
        """Yield mistakes between keys, for which no file is needed, with the key that each is about."""
        config = self._config()
        for rule in configuration.RULES:
            for text in () if rule.files else rule.check(config):
                about = re.match(r"[a-z_]+\.[a-z_]+", text)
                yield about[0] if about else rule.keys[0], text

    def _missing(self) -> None:
        for key, of in (("model.path", "the model"), ("data.train", "the training data")):
            if key not in self.values:
                self.mistakes.append(f"{key}: missing, and every run needs it: {of}")
        self.mistakes += [text for key, text in self._rules() if key not in self.pending]

    def _drop(self, found: Iterator[tuple[str, Outcome]]) -> bool:
        """Remove keys, and change the answers of the user's keys that set them accordingly. Returns whether there were any."""
        dropped = dict(found)
        for ours, outcome in dropped.items():
            value = self.values.pop(ours)
            for key in value.sources if value.given else ():
                if (before := self.outcomes[key]).kind == "honoured":
                    left = {each: kept for each, kept in before.sets.items() if each != ours and each in self.values}
                    told = f"{before.why}. {outcome.why}" if before.why else outcome.why
                    kind = "honoured" if left and outcome.kind != "refused" else outcome.kind
                    self.outcomes[key] = Outcome(kind, told if outcome.kind != "refused" else outcome.why, left)
        return bool(dropped)


def _seen(value: Any) -> str:
    return "not set" if value is None else shown(value)


def written(value: Any) -> str:
    """Write a value as another system's user writes it."""
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{written(each)}" for key, each in value.items()) + "}"
    return printable(str(value)).replace("\n", "\\n")


# ---- conversions -------------------------------------------------------------------------------------------------------------------


def sets(values: Mapping[str, Any], why: str = "") -> Outcome:
    return Outcome("honoured", why, values)


def pending(ours: str, why: str) -> Outcome:
    """Return the outcome for a value that will be honoured, and that is known only with the data."""
    return Outcome("honoured", why, pending={ours: why})


def to(*ours: str, why: str = "", values: Mapping[Any, Any] | None = None) -> Conversion:
    """Return a conversion that sets these keys of ours to the value, or to its counterpart in `values`. `null` sets nothing."""

    def become(ask: Ask) -> Outcome:
        if ask.value is None and None not in (values or {}):
            return Outcome("means nothing", "null: nothing is set")
        value = ask.value
        if values is not None and isinstance(value, bool | int | float | str | None):
            value = values.get(value, value)
        if isinstance(value, list):
            value = [plain(each) for each in value]
        return sets(dict.fromkeys(ours, value), why)

    return become


def plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else written(value)


def number(*ours: str, why: str = "", scale: float = 1.0) -> Conversion:
    """Return a conversion of a number into a float: other systems write 1 for 1.0."""

    def become(ask: Ask) -> Outcome:
        if ask.value is None:
            return Outcome("means nothing", "null: nothing is set")
        return sets(dict.fromkeys(ours, a_number(ask.value) * scale), why)

    return become


def a_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise WrongValue(f"{written(value)} is not a number")
    try:
        return float(value)
    except ValueError:
        raise WrongValue(f"{written(value) or 'an empty text'} is not a number") from None


def whole(value: Any) -> int:
    """Return a whole number, also from 512.0 or "512"."""
    exact = a_number(value)
    if not exact.is_integer():
        raise WrongValue(f"{written(value)} is not a whole number")
    return int(exact)


def truth(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool | int | None):
        raise WrongValue(f"{written(value)} is not true or false")
    return bool(value)


def switch(*ours: str, inverse: bool = False, why: str = "") -> Conversion:
    """Return a conversion of true or false; `inverse`: ours has the opposite sense."""

    def become(ask: Ask) -> Outcome:
        if ask.value is None:
            return Outcome("means nothing", "null: nothing is set")
        return sets(dict.fromkeys(ours, truth(ask.value) != inverse), why)

    return become


def nothing(why: str) -> Conversion:
    return lambda ask: Outcome("means nothing", why)


def refused(why: str, *, performance: bool = False) -> Conversion:
    return lambda ask: Outcome("refused", why, performance=performance)


def only(*values: Any, nothing: str, refused: str, performance: bool = False) -> Conversion:
    """Return a conversion in which these values mean nothing here, and every other value is refused."""

    def become(ask: Ask) -> Outcome:
        allowed = any(ask.value == value and isinstance(ask.value, bool) == isinstance(value, bool) for value in values)
        return Outcome("means nothing", nothing) if allowed else Outcome("refused", refused, performance=performance)

    return become


def off(refused: str, *, performance: bool = False) -> Conversion:
    """Return a conversion in which a switch that is off, or an empty value, means nothing, and every other value is refused."""

    def become(ask: Ask) -> Outcome:
        empty = ask.value in (None, False, "", "null", [], {}, "disabled", "none")
        return Outcome("means nothing", "off, as here") if empty else Outcome("refused", refused, performance=performance)

    return become


def same_as(*names: str, what: str, performance: bool = False) -> Conversion:
    """Return a conversion of a value that must equal that of another of their keys, because ours has one number for both."""

    def become(ask: Ask) -> Outcome:
        other = ask.read(*names)
        if ask.value is None or other is None or ask.value == other:
            return Outcome("means nothing", f"{what}: as {names[0]}")
        return Outcome("refused", f"{what}, and {names[0]} is {written(other)}. Give both the same value", performance=performance)

    return become
