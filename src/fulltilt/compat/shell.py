"""The command of a shell script, read and never executed.

Enters: the text of a script, its arguments and environment variables. Leaves: `Launch`: the words before and after `-m MODULE` of the one
command that starts a verl trainer. Guaranteed: no process is started; assignments, defaults (`${X:-y}`), arithmetic, arrays, functions,
`if`, `case`, `&&` and `||` over known values are followed; an unknown value (`$(...)`, a variable that is not set, one that a loop or an
undecided condition sets) is refused, with its line, if the command needs it; so is a loop that starts a trainer.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from fulltilt.records import UserError
from fulltilt.words import shortened


@dataclass(frozen=True)
class Trainers:
    """The programs that a script may start."""

    module: re.Pattern[str]  # pattern of the module after `python3 -m`
    file: re.Pattern[str]
    example: str

    def is_module(self, word: Any) -> bool:
        return isinstance(word, str) and bool(self.module.fullmatch(word))

    def is_file(self, word: Any) -> bool:
        return isinstance(word, str) and bool(self.file.fullmatch(word))


VERL = Trainers(
    re.compile(r"(?:verl|recipe)(?:\.\w+)+"),
    re.compile(r"(?:.*/)?(?:main_ppo|main_dapo|fsdp_sft_trainer|sft_trainer)\.py"),
    "a trainer of verl's: `python3 -m verl.trainer.main_ppo ...`",
)
CHATLEARN = Trainers(
    re.compile(r"chatlearn\.entrypoint"),
    re.compile(r"(?:.*/)?entrypoint\.py"),
    "ChatLearn: `python chatlearn/entrypoint.py grpo --config-file FILE ...`",
)
NAME = r"[A-Za-z_]\w*"
OVERRIDE = re.compile(r"[+~]*([\w@/-]+(?:\.[\w@/-]+)*)=")
SETTING = ("read", "mapfile", "readarray", "getopts", "let", "printf", "unset")  # commands that may set or unset variables they name
LOOPS = ("for", "while", "until", "select")
MOST_CALLS = 30  # most nested calls of functions
MAYBE = -1  # the status of a command that would have to be executed


@dataclass(frozen=True)
class Launch:
    program: str
    launcher: tuple[str, ...]  # words before the module, such as those of torchrun
    arguments: tuple[str, ...]
    line: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unknown:
    """A value that only executing the script would give."""

    line: int
    why: str
    key: str = ""  # the key of verl that gets the value
    unset: str = ""  # the variable that `unset` has removed

    @property
    def told(self) -> str:
        remedy = f". Or give {self.key}=VALUE behind the script" if self.key else ""
        return f"line {self.line}: {self.why}{remedy}"


class NotKnown(Exception):
    def __init__(self, unknown: Unknown) -> None:
        self.unknown = unknown

    def needed(self, line: int) -> NotKnown:
        """Return the same exception for a condition that needs the value."""
        return NotKnown(replace(self.unknown, why=f"{self.unknown.why}, and the condition in line {line} needs it"))


class Ended(Exception):
    """Raised by `exit` or `return`."""

    def __init__(self, line: int, word: str) -> None:
        self.line, self.word = line, word


@dataclass(frozen=True)
class Word:
    text: str  # the word as written, with its quotes
    line: int


# ---- reading words -----------------------------------------------------------------------------------------------------------------


def wrong(line: int, text: str) -> UserError:
    return UserError(f"line {line}: {text}")


def tokens(text: str) -> Iterator[Word]:
    """Yield words and operators of a script; comments, line continuations and here-documents are left out."""
    place, line, start = 0, 1, True
    documents: list[str] = []
    while place < len(text):
        character = text[place]
        if text.startswith("\\\n", place):
            place, line = place + 2, line + 1
        elif character == "\n":
            yield Word("\n", line)
            place, line, start = place + 1, line + 1, True
            for mark in documents:
                stop = re.compile(rf"^\s*{re.escape(mark)}\s*$", re.MULTILINE).search(text, place)
                after = len(text) if stop is None else stop.end()
                line += text.count("\n", place, after)
                place = after
            documents = []
        elif character in " \t\r":
            place, start = place + 1, True
        elif character == "#" and start:
            line_end = text.find("\n", place)
            place = len(text) if line_end < 0 else line_end
        elif found := re.compile(r"(?:\d*|&)(?:<<<|<<-?|>>|>&|<&|>\||[<>])(?:&?\d+\b|-)?|;;&?|&&|\|\||[;&|()]").match(text, place):
            if text.startswith(("<(", ">("), place):  # a word whose value only executing it would give
                end = bracket_end(text, place + 1, line)
                yield Word(text[place:end], line)
                line += text.count("\n", place, end)
                place, start = end, False
                continue
            operator_text = found[0]
            if "<<" in operator_text and "<<<" not in operator_text:
                named = re.compile(r"\s*(['\"]?)([\w-]+)\1").match(text, found.end())
                documents += [named[2]] if named else []
            yield Word(operator_text, line)
            place, start = found.end(), True
        else:
            end = word_end(text, place, line)
            yield Word(text[place:end], line)
            line += text.count("\n", place, end)
            place, start = end, False


def word_end(text: str, place: int, line: int) -> int:
    """Return where a word ends: quotes and brackets of expansions keep spaces inside, and so does an array after `=`."""
    begin = place
    while place < len(text):
        character = text[place]
        if character == "\\":
            place += 2
        elif character == "'":
            place = closing(text, place + 1, "'", line)
        elif character == '"':
            place = quoted_end(text, place + 1, line)
        elif character == "`":
            place = closing(text, place + 1, "`", line)
        elif text.startswith(("$(", "${"), place):
            place = bracket_end(text, place + 1, line)
        elif character == "(" and re.fullmatch(rf"{NAME}\+?=", text[begin:place]):
            place = bracket_end(text, place, line)
        elif character in " \t\r\n;&|()<>":
            break
        else:
            place += 1
    return min(place, len(text))


def closing(text: str, place: int, mark: str, line: int) -> int:
    end = text.find(mark, place)
    if end < 0:
        raise wrong(line, f"a {mark} is not closed")
    return end + 1


def quoted_end(text: str, place: int, line: int) -> int:
    while place < len(text) and text[place] != '"':
        if text[place] == "\\":
            place += 2
        elif text.startswith(("$(", "${"), place):
            place = bracket_end(text, place + 1, line)
        else:
            place += 1
    if place >= len(text):
        raise wrong(line, 'a " is not closed')
    return place + 1


def bracket_end(text: str, place: int, line: int) -> int:
    """Return where the bracket that opens at `place` is closed."""
    opened, close, depth = text[place], {"(": ")", "{": "}"}[text[place]], 0
    while place < len(text):
        character = text[place]
        if character == "\\":
            place += 2
            continue
        if character == "'" and opened == "(":
            place = closing(text, place + 1, "'", line)
            continue
        if character == '"':
            place = quoted_end(text, place + 1, line)
            continue
        if character == "#" and opened == "(" and text[place - 1] in " \t\n":
            place = (text.find("\n", place) + 1 or len(text) + 1) - 1
            continue
        depth += (character == opened) - (character == close)
        place += 1
        if depth == 0:
            return place
    raise wrong(line, f"a {opened} is not closed")


# ---- following the script ----------------------------------------------------------------------------------------------------------

_REDIRECTION = re.compile(r"(?:\d*|&)(?:<<<|<<-?|>>|>&|<&|>\||[<>])(?:&?\d+|-)?")
_ARITHMETIC: Mapping[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv, ast.Div: operator.floordiv,
    ast.Mod: operator.mod, ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Pow: lambda base, power: base ** min(power, 64),
}  # fmt: skip
_COMPARE: Mapping[str, Any] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip
_SIGNS: Mapping[str, Any] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_ASSIGNMENT = re.compile(rf"({NAME})(\+?)=(.*)", re.DOTALL)


@dataclass
class Script:
    """State of a script, as far as it was followed."""

    arguments: list[Any]  # texts, or Unknown
    environment: Mapping[str, str]
    trainers: Trainers = VERL
    variables: dict[str, Any] = field(default_factory=dict)  # text, list of texts and Unknown, or Unknown
    functions: dict[str, list[Word]] = field(default_factory=dict)
    calls: int = 0  # number of functions that are being followed
    added: frozenset[str] = frozenset()  # keys of the arguments after the script
    notes: list[str] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    taken: dict[str, None] = field(default_factory=dict)  # environment variables that were read
    passed_on: bool = False  # whether the script passes its arguments on

    # ---- commands ------------------------------------------------------------------------------------------------------------------

    def follow(self, words: list[Word]) -> None:
        """Follow a list of commands."""
        place, status = 0, 0
        joined = ""  # the operator that joins a command to the one before it
        while place < len(words):
            word = words[place]
            if word.text in ("\n", ";", "&"):
                place, joined = place + 1, ""
            elif word.text in ("&&", "||", "|"):
                place, joined = place + 1, word.text
            else:
                doubtful = status == MAYBE and joined in ("&&", "||")
                skip = doubtful or (joined == "&&" and status != 0) or (joined == "||" and status == 0)
                before = place
                place, result = self._one(words, place, skip=skip or joined == "|")
                if doubtful:
                    self._doubt(words[before:place])
                kept = skip or (joined == "|" and status == MAYBE)  # the | of [[ X =~ a|b ]] divides it in this way
                status = status if kept else result

    def _one(self, words: list[Word], place: int, *, skip: bool) -> tuple[int, int]:
        """Follow the command at an index. Returns the index after it, and its status."""
        word = words[place]
        if word.text in LOOPS:
            return self._loop(words, place, skip=skip)
        if body := function_body(words, place):
            name, begin, end = body
            self.functions[name] = words[begin:end]
            return end + 1, 0
        if word.text == "if":
            return self._if(words, place, skip=skip)
        if word.text == "case":
            return self._case(words, place, skip=skip)
        if is_arithmetic(words, place):
            end = matching(words, place, "(", ")")
            return end + 1, 0 if skip else {True: 0, False: 1, None: MAYBE}[self._decide(words[place : end + 1], word.line)[0]]
        if word.text in ("{", "("):
            end = matching(words, place, word.text, {"{": "}", "(": ")"}[word.text])
            if not skip:
                self.follow(words[place + 1 : end])
            return end + 1, 0
        end = place
        while end < len(words) and words[end].text not in ("\n", ";", "&", "|", "&&", "||", ")", ";;"):
            end += 1
        if end == place:
            raise wrong(word.line, f"{word.text} is not expected here")
        return end, 0 if skip else self._simple(words[place:end])

    def _doubt(self, words: list[Word], reason: Unknown | None = None, seen: frozenset[str] = frozenset()) -> None:
        """Follow commands that may or may not be executed: the variables that they assign become unknown, and they must start no
        trainer."""
        line = words[0].line if words else 0
        for place, word in enumerate(words):
            for name in may_set(words, place):
                self.variables[name] = reason or Unknown(word.line, f"whether ${name} is set here depends on what is not known")
            if place and ((self.trainers.is_module(word.text) and words[place - 1].text == "-m") or self.trainers.is_file(word.text)):
                told = "whether this command is run depends on what is not known. Give the arguments of the run themselves"
                raise wrong(reason.line, reason.why) if reason else wrong(line, told)
            if word.text == "shift" and begins_command(words, place):
                self.arguments = [reason or Unknown(word.line, "the arguments that `shift` leaves here are not known")]
            if word.text in self.functions and word.text not in seen and begins_command(words, place):
                self._doubt(self.functions[word.text], reason, seen | {word.text})

    def _loop(self, words: list[Word], place: int, *, skip: bool) -> tuple[int, int]:
        """Follow a loop: skipped if its condition is false at once, otherwise only allowed to set variables that the command does not
        need."""
        end, word = loop_end(words, place), words[place]
        body = next((at for at in range(place, end) if words[at].text == "do" and begins_command(words, at)), place)
        if skip or (word.text in ("while", "until") and self._decide(words[place + 1 : body], word.line)[0] is (word.text == "until")):
            return end + 1, 0
        why = f"a `{word.text}` loop is not followed. Give the arguments of the run themselves"
        self._doubt(words[place:end], Unknown(word.line, why))
        if word.text in ("for", "select") and place + 1 < end:
            self.variables[words[place + 1].text] = Unknown(word.line, why)
        return end + 1, 0

    def _decide(self, condition: list[Word], line: int) -> tuple[bool | None, Unknown | None]:
        """Return whether a condition holds. None: it would have to be executed, or needs an unknown value."""
        try:
            return self._holds(condition, line), None
        except NotKnown as error:
            return None, error.unknown

    def _if(self, words: list[Word], place: int, *, skip: bool) -> tuple[int, int]:
        end, line = matching(words, place, "if", "fi"), words[place].line
        parts = divided(words[place + 1 : end], ("then", "elif", "else"))
        condition = parts[0][1]
        for mark, inside in () if skip else parts[1:]:
            if mark == "elif":
                condition = inside
                continue
            holds, reason = (True, None) if mark == "else" else self._decide(condition, line)
            if holds is None:
                self._doubt([word for _, part in parts[1:] for word in part] or words[place:end], reason)
            if holds is not False:
                if holds:
                    self.follow(inside)
                break
        return end + 1, 0

    def _case(self, words: list[Word], place: int, *, skip: bool) -> tuple[int, int]:
        end, line = matching(words, place, "case", "esac"), words[place].line
        inside = words[place + 3 : end]
        try:
            value = "" if skip else self._known(words[place + 1], line)
        except NotKnown as error:
            self._doubt(inside, error.unknown)
            return end + 1, 0
        while inside and not skip:
            inside = [word for word in inside[:1] if word.text not in ("\n", "(")] + inside[1:]
            close = next((number for number, word in enumerate(inside) if word.text == ")"), None)
            if close is None:
                break
            body_end = branch_end(inside, close + 1)
            patterns = [self._known(word, line, default="") for word in inside[:close] if word.text not in ("|", "\n")]
            if any(fnmatch.fnmatchcase(value, pattern) for pattern in patterns):
                self.follow(inside[close + 1 : body_end])
                break
            inside = inside[body_end + 1 :]
        return end + 1, 0

    def _holds(self, words: list[Word], line: int) -> bool | None:
        """Return whether a condition holds: tests, joined by && and ||. None: it would have to be executed."""
        status: bool | None = True
        joined = ""
        place = 0
        while place < len(words):
            if words[place].text in ("\n", ";"):
                place += 1
                continue
            if words[place].text in ("&&", "||"):
                place, joined = place + 1, words[place].text
                continue
            if words[place].text == "{":
                end = matching(words, place, "{", "}")
                found = self._holds(words[place + 1 : end], line)
                end += 1
            else:
                end = place
                while end < len(words) and words[end].text not in ("\n", ";", "&&", "||"):
                    end += 1
                found = self._test(words[place:end], line)
            decided = {"": True, "&&": False, "||": True}[joined]  # the value of either side that decides the whole
            if joined and (status is decided or found is decided):
                status = decided
            elif joined and (status is None or found is None):
                status = None
            else:
                status = found
            place = end
        return status

    def _test(self, words: list[Word], line: int) -> bool | None:
        first = words[0].text if words else ""
        if first == "!":
            found = self._test(words[1:], line)
            return None if found is None else not found
        if is_arithmetic(words, 0):
            return self._compared(words, line)
        if first not in ("[", "[[", "test"):
            self._doubt(words, Unknown(line, "a command within a condition is not followed. Give the arguments of the run themselves"))
            return None
        if words[-1].text != {"[": "]", "[[": "]]"}.get(first, words[-1].text):  # the && or || of [[ A || B ]] divides it
            return None
        inner = words[1 : -1 if first != "test" else None]
        if first == "[[" and len(inner) > 1 and inner[0].text == "!" and inner[1].text != "!":
            found = self._test([words[0], *words[2:]], line)
            return None if found is None else not found
        if len(inner) == 2 and inner[0].text == "-v":
            return self._is_set(inner[1], line)
        if first == "[[" and len(inner) == 3 and inner[1].text == "=~":
            return bool(self._pattern(inner[2], line).search(self._known(inner[0], line, default="")))
        if inner and inner[0].text.strip('"') in ("-f", "-d", "-e", "-x", "-r", "-s"):
            return None
        return tested([self._known(word, line, default="") for word in inner], line)

    def _is_set(self, word: Word, line: int) -> bool:
        """Evaluate `[[ -v NAME ]]`."""
        name = self._known(word, line)
        if name.isdigit():
            return int(name) <= int(self._read("#", line))
        if not re.fullmatch(NAME, name):
            raise NotKnown(Unknown(line, f"the test -v {shortened(name, 60)} is not followed. Give the arguments of the run themselves"))
        value = self._value(name)
        if isinstance(value, Unknown):
            if value.unset != name:
                raise NotKnown(value).needed(line)
            return False
        return bool(value) if isinstance(value, list) else value is not None

    def _pattern(self, word: Word, line: int) -> re.Pattern[str]:
        """Return the right side of `=~` as a pattern: quoted text is literal."""
        text, place = word.text, 0
        parts: list[tuple[str, bool]] = []  # characters, and whether they were quoted
        while place < len(text):
            try:
                found, end, quoted = self._pattern_part(text, place, line)
            except NotKnown as error:
                raise error.needed(line) from None
            parts += [(character, quoted) for character in found]
            place = end
        with suppress(re.error, OverflowError, RecursionError):
            if (written := python_pattern(parts)) is not None:
                return re.compile(written, re.DOTALL)
        told = f"the pattern {shortened(text, 60)} behind =~ is not followed. Give the arguments of the run themselves"
        raise NotKnown(Unknown(line, told))

    def _pattern_part(self, text: str, place: int, line: int) -> tuple[str, int, bool]:
        """Return the text of a pattern's part at an index, where it ends, and whether it was quoted."""
        if text.startswith(("$'", '$"'), place):
            raise NotKnown(Unknown(line, f"{shortened(text[place:], 60)} is not read. Write its result"))
        if text[place] == "'" and "'" in text[place + 1 :]:
            end = text.index("'", place + 1)
            return text[place + 1 : end], end + 1, True
        if text[place] == '"':
            end = quoted_end(text, place + 1, line)
            return self._quoted(text[place + 1 : end - 1], line), end, True
        if text[place] in "$`":
            value, end = self._variable(text, place, line)
            return value, end, False
        if text[place] != "\\":
            return text[place], place + 1, False
        escaped = text[place + 1 : place + 2]
        if escaped.isalnum() or escaped in ("", *"<>`'"):  # versions of bash differ
            raise NotKnown(Unknown(line, f"the pattern {shortened(text, 60)} behind =~ is not followed. Put it into a variable"))
        return escaped, place + 2, True

    def _compared(self, words: list[Word], line: int) -> bool | None:
        """Evaluate `((A > B))`; variables that it assigns become unknown. None: it is not a comparison."""
        inside = " ".join(word.text for word in words[2:-2])
        for name in arithmetic_sets(inside):
            self.variables[name] = Unknown(line, f"(( )) sets ${name}, and is not followed")
        sides = re.fullmatch(r"([^=<>!&|]+?)\s*([=!]\s*=|[<>]\s*=?)\s*([^=<>!&|]+)", inside)
        if sides is None:
            return None
        return bool(_SIGNS[sides[2].replace(" ", "")](self._arithmetic(sides[1], line), self._arithmetic(sides[3], line)))

    def _known(self, word: Word, line: int, default: str | None = None) -> str:
        try:
            return "".join(self.expand(word.text, word.line, split=False)) if word.text not in ("=~", "==", "!=", "=") else word.text
        except NotKnown as error:
            name, _, rest = error.unknown.why.removeprefix("$").partition(" ")
            if default is None or rest != "is not set":
                raise error.needed(line) from None
        if not name.isidentifier():  # an argument of the script
            return default
        before = self.variables.get(name)
        self.variables[name] = default  # the rest of the word stays: "x$NAME" is x
        try:
            return self._known(word, line, default)
        finally:
            del self.variables[name]
            if before is not None:
                self.variables[name] = before

    def _simple(self, words: list[Word]) -> int:
        words = without_redirections(words)
        while words and (assigned := _ASSIGNMENT.fullmatch(words[0].text)):
            self._assign(assigned, words[0].line)
            words = words[1:]
        if not words:
            return 0
        first, line = words[0].text, words[0].line
        if first in ("export", "declare", "readonly", "local", "typeset"):
            for word in words[1:]:
                if assigned := _ASSIGNMENT.fullmatch(word.text):
                    self._assign(assigned, word.line)
        elif first in SETTING:
            whole = {word.text.strip("'\"") for word in words} if first == "unset" else set()  # not ARRAY[0]
            for name in names_set(words):
                gone, changed = Unknown(line, f"${name} is not set", unset=name), f"`{first}` sets ${name}, and is not followed"
                self.variables[name] = gone if name in whole else Unknown(line, changed)
        elif first == ":":
            self._pieces(words[1:])  # for what `${X:=default}` sets
        elif first == "shift":
            self.arguments = self.arguments[int(words[1].text) if len(words) > 1 and words[1].text.isdigit() else 1 :]
        elif first in ("exit", "return"):
            raise Ended(line, first)
        elif first in ("[", "[[", "test"):
            return {True: 0, False: 1, None: MAYBE}[self._decide(words, line)[0]]
        elif first in self.functions:
            self._call(first, words)
        elif self.launches and OVERRIDE.match(first) and "." in first.partition("=")[0]:
            why = "not part of the command, which a comment, an empty line or a missing backslash ends: verl does not get it either"
            self.notes.append(f"line {line}: {shortened(first, 80)} is {why}")
        elif first not in ("echo", "set", "cd", "mkdir", "source", ".", "true", ":"):
            self._launch(words)
        return 0

    def _pieces(self, words: Sequence[Word]) -> list[Any]:
        """Expand words; an unknown one stays, with the key of verl's that it would set."""
        pieces: list[Any] = []
        for word in words:
            try:
                pieces += self.expand(word.text, word.line, split=True)
            except NotKnown as error:
                named = OVERRIDE.match(word.text.lstrip("\"'"))
                pieces.append(replace(error.unknown, key=named[1]) if named else error.unknown)
        return pieces

    def _call(self, name: str, words: Sequence[Word]) -> None:
        """Follow a function that the script defines."""
        if self.calls >= MOST_CALLS:
            raise wrong(words[0].line, f"the function {name} calls itself, and is not followed. Give the arguments of the run themselves")
        before, self.arguments = self.arguments, self._pieces(words[1:])
        self.calls += 1
        try:
            self.follow(self.functions[name])
        except Ended as ended:
            if ended.word != "return":
                raise
        finally:
            self.arguments, self.calls = before, self.calls - 1

    def _launch(self, words: list[Word]) -> None:
        """Record the command if it starts a trainer."""
        pieces = self._pieces(words)
        if text := text_of_command(pieces):
            self._inside(text, words[0].line)
            return
        for place, piece in enumerate(pieces):
            module = place + 1 < len(pieces) and piece == "-m" and self.trainers.is_module(pieces[place + 1])
            if not module and not self.trainers.is_file(piece):
                continue
            program = pieces[place + 1] if module else piece
            before = [each for each in pieces[:place] if isinstance(each, Unknown) or not re.fullmatch(r"(?:.*/)?python[\d.]*", each)]
            if "sft" not in program and any(isinstance(each, Unknown) for each in before):  # Ray starts its workers, whatever starts Ray
                self.notes.append(f"line {words[0].line}: what stands before python is not known, and not needed")
                before = [each for each in before if isinstance(each, str)]
            rest = self._without_overridden(pieces[place + (2 if module else 1) :])
            if unknown := [each for each in (*before, *rest) if isinstance(each, Unknown)]:
                raise UserError("\n".join(each.told for each in dict.fromkeys(unknown)))
            self.launches.append(Launch(program, tuple(before), tuple(rest), words[0].line))
            return

    def _inside(self, text: str, line: int) -> None:
        """Follow the text of `eval` or `bash -c`."""
        if self.calls >= MOST_CALLS:
            raise wrong(line, "commands within commands are not followed this deep. Give the arguments of the run themselves")
        self.calls += 1
        try:
            self.follow([Word(word.text, line + word.line - 1) for word in tokens(text)])
        finally:
            self.calls -= 1

    def _without_overridden(self, pieces: list[Any]) -> list[Any]:
        """Return arguments without unknown values of keys that are given again after them."""
        kept: list[Any] = []
        later = set() if self.passed_on else set(self.added)
        for piece in reversed(pieces):
            if isinstance(piece, Unknown) and piece.key in later:
                self.notes.append(f"line {piece.line}: {piece.key} is not known there; the value given behind it counts")
                continue
            kept.append(piece)
            if isinstance(piece, str) and (named := OVERRIDE.match(piece)):
                later.add(named[1])
        return kept[::-1]

    def _assign(self, assigned: re.Match[str], line: int) -> None:
        name, add, text = assigned[1], assigned[2] == "+", assigned[3]
        try:
            if text.startswith("("):
                inside = list(tokens(text[1:-1]))
                value: Any = []
                value += self._pieces([Word(word.text, line + word.line - 1) for word in inside if word.text != "\n"])
            else:
                value = "".join(self.expand(text, line, split=False))
        except NotKnown as error:
            value = replace(error.unknown, unset="")
        before = self.variables.get(name, [] if isinstance(value, list) else "")
        if add and not isinstance(value, Unknown):
            value = before if isinstance(before, Unknown) else before + value
        self.variables[name] = value

    # ---- expansion -----------------------------------------------------------------------------------------------------------------

    def expand(self, text: str, line: int, *, split: bool) -> list[str]:
        """Return the words that a written word expands to. `split`: results of unquoted expansions are split at spaces."""
        if text.startswith(("<(", ">(")):
            raise NotKnown(Unknown(line, f"{shortened(text, 60)} would have to be run. Write the value out"))
        if text in ('"$@"', '"${@}"') or (text in ("$@", "$*", "${@}", "${*}") and split):
            self.passed_on = self.passed_on or self.calls == 0
            return list(self.arguments)
        if array := re.fullmatch(rf'"?\$\{{({NAME})\[[@*]\]\}}"?', text):
            return self._array(array[1], line)
        if part := re.fullmatch(rf'"?\$\{{([@*]|{NAME}\[[@*]\]):([^{{}}:]+)(?::([^{{}}:]+))?\}}"?', text):
            return self._slice(part[1], part[2], part[3], line)
        words, place, quoted = [""], 0, False
        if text.startswith("~") and (len(text) == 1 or text[1] == "/"):
            words, place = [self.environment.get("HOME", "~")], 1
        while place < len(text):
            character = text[place]
            if character == "\\" and place + 1 < len(text):
                words[-1] += "" if text[place + 1] == "\n" else text[place + 1]
                place += 2
            elif character == "'" and "'" in text[place + 1 :]:  # a single one is an apostrophe, as in "${X:-it's}"
                end = text.index("'", place + 1)
                words[-1] += text[place + 1 : end]
                place, quoted = end + 1, True
            elif character == '"':
                end = quoted_end(text, place + 1, line)
                words[-1] += self._quoted(text[place + 1 : end - 1], line)
                place, quoted = end, True
            elif character in "$`":
                value, place = self._variable(text, place, line)
                pieces = value.split() if split else [value]
                words = [*words[:-1], words[-1] + (pieces[0] if pieces else ""), *pieces[1:]]
            else:
                words[-1] += character
                place += 1
        return words if quoted or any(words) or not split else []

    def _quoted(self, text: str, line: int) -> str:
        found, place = "", 0
        while place < len(text):
            if text[place] == "\\" and text[place + 1 : place + 2] in ('"', "\\", "$", "`", "\n"):
                found += "" if text[place + 1] == "\n" else text[place + 1]
                place += 2
            elif text[place] in "$`":
                value, place = self._variable(text, place, line)
                found += value
            else:
                found += text[place]
                place += 1
        return found

    def _array(self, name: str, line: int) -> list[str]:
        value = self.variables.get(name)
        if isinstance(value, Unknown):
            raise NotKnown(value)
        if value is None:
            raise NotKnown(Unknown(line, f"${name} is not set"))
        return list(value) if isinstance(value, list) else [value]

    def _slice(self, name: str, begin: str, count: str | None, line: int) -> list[str]:
        """Evaluate `"${@:2}"` and `"${ARGS[@]:1:3}"`: arguments count from 1, elements of an array from 0."""
        whole = name in ("@", "*")
        if whole:
            self.passed_on = self.passed_on or self.calls == 0
        values = list(self.arguments) if whole else self._array(name.partition("[")[0], line)
        first = self._arithmetic(begin, line) - whole
        if first < 0:
            raise NotKnown(Unknown(line, f"${{{name}:{begin}}} is not read. Write its result"))
        taken = len(values) if count is None else self._arithmetic(count, line)
        if taken < 0:
            raise NotKnown(Unknown(line, f"${{{name}:{begin}:{count}}} has no value"))
        return values[first : first + taken]

    def _joined(self, values: Sequence[Any]) -> str:
        for value in values:
            if isinstance(value, Unknown):
                raise NotKnown(value)
        return " ".join(values)

    def _variable(self, text: str, place: int, line: int) -> tuple[str, int]:
        """Return the value of an expansion, and the index after it."""
        if text[place] == "`" and text[place + 1 : place + 2] == "#":  # a comment inside a command
            return "", closing(text, place + 1, "`", line)
        if text[place] == "`":
            raise NotKnown(Unknown(line, f"{shortened(text[place:], 60)} would have to be run"))
        if text.startswith("$((", place):
            end = bracket_end(text, place + 1, line)
            return str(self._arithmetic(text[place + 3 : end - 2], line)), end
        if text.startswith("$(", place):
            end = bracket_end(text, place + 1, line)
            raise NotKnown(Unknown(line, f"{shortened(text[place:end], 60)} would have to be run. Write its result"))
        if text.startswith("${", place):
            end = bracket_end(text, place + 1, line)
            return self._parameter(text[place + 2 : end - 1], line), end
        if match := re.compile(rf"\$({NAME}|[0-9@*#?$!])").match(text, place):
            return self._read(match[1], line), match.end()
        return "$", place + 1

    def _parameter(self, inside: str, line: int) -> str:
        if array := re.fullmatch(rf"({NAME})\[[@*]\]", inside):
            return self._joined(self._array(array[1], line))
        if counted := re.fullmatch(rf"#({NAME})(\[[@*]\])?", inside):
            return str(len(self._array(counted[1], line) if counted[2] else self._read(counted[1], line)))
        if element := re.fullmatch(rf"({NAME})\[(\d+)\]", inside):
            values = self._array(element[1], line)
            if int(element[2]) < len(values):
                return self._joined(values[int(element[2]) :][:1])
        if changed := re.fullmatch(rf"({NAME}|[0-9])(##?|%%?|//?|,,?|\^\^?)(.*)", inside, re.DOTALL):
            return self._changed(self._read(changed[1], line), changed[2], changed[3], line)
        if named := re.fullmatch(rf"!({NAME})", inside):
            return self._read(self._read(named[1], line), line)
        if part := re.fullmatch(rf"({NAME}|[0-9]):( ?[^-=+?:{{}}][^:{{}}]*)(?::([^:{{}}]+))?", inside):
            first, count = self._arithmetic(part[2], line), part[3]
            text = sliced(self._read(part[1], line), first, None if count is None else self._arithmetic(count, line))
            if text is None:
                raise NotKnown(Unknown(line, f"${{{inside}}} has no value"))
            return text
        match = re.fullmatch(rf"({NAME}|[0-9@*#])(?:(:?[-=+?])(.*))?", inside, re.DOTALL)
        if match is None:
            raise NotKnown(Unknown(line, f"${{{shortened(inside, 60)}}} is not read. Write its result"))
        name, how, other = match[1], match[2] or "", match[3] or ""
        value = self._value(name)
        empty = value is None or (how.startswith(":") and value == "")
        unset = isinstance(value, Unknown) and value.why.endswith("is not set")
        if isinstance(value, Unknown) and not (unset and how[-1:] in ("-", "=", "+")):
            raise NotKnown(value)
        if how.endswith("+"):
            return "" if empty or unset else self._quoted_or_bare(other, line)
        if how[-1:] in ("-", "=") and (empty or isinstance(value, Unknown)):
            try:
                found = self._quoted_or_bare(other, line)
            except NotKnown as error:
                if name.isdigit() or name in self.variables:
                    raise
                why = f"{error.unknown.why.removesuffix('.')}, or set {name} in the environment"
                raise NotKnown(replace(error.unknown, why=why)) from None
            if how.endswith("="):
                self.variables[name] = found
            return found
        return self._read(name, line)

    def _changed(self, value: str, how: str, rest: str, line: int) -> str:
        """Evaluate `${X##*/}` and similar expansions: a value without the text that a pattern matches, with a pattern replaced, or in other
        case."""
        if how[0] in ",^":
            change = str.lower if how[0] == "," else str.upper
            return change(value) if len(how) == 2 else change(value[:1]) + value[1:]
        if how[0] == "/":
            pattern, _, new = rest.partition("/")
            shape = fnmatch.translate(self._quoted_or_bare(pattern, line)).removesuffix(r"\Z").removesuffix(r"\z")
            text = self._quoted_or_bare(new, line)
            return re.sub(shape, lambda _: text, value, count=0 if len(how) == 2 else 1)
        pattern = self._quoted_or_bare(rest, line)
        cuts = range(len(value) + 1)  # lengths of the removed beginning, or of the part that stays
        if how[0] == "#":
            fits = [cut for cut in cuts if fnmatch.fnmatchcase(value[:cut], pattern)]
            return value[(max(fits) if len(how) == 2 else min(fits)) :] if fits else value
        fits = [cut for cut in cuts if fnmatch.fnmatchcase(value[cut:], pattern)]
        return value[: (min(fits) if len(how) == 2 else max(fits))] if fits else value

    def _quoted_or_bare(self, text: str, line: int) -> str:
        return "".join(self.expand(text, line, split=False))

    def _value(self, name: str) -> Any:
        if name.isdigit():
            number = int(name)
            return self.arguments[number - 1] if 0 < number <= len(self.arguments) else None
        if name in ("@", "*"):
            self.passed_on = self.passed_on or self.calls == 0
            return self._joined(self.arguments)
        if name == "#":
            return next((each for each in self.arguments if isinstance(each, Unknown)), str(len(self.arguments)))
        if name in self.variables:
            return self.variables[name]
        if name in self.environment:
            self.taken[name] = None
            return self.environment[name]
        return None

    def _read(self, name: str, line: int) -> str:
        value = self._value(name)
        if isinstance(value, Unknown):
            raise NotKnown(value)
        if value is None:
            raise NotKnown(Unknown(line, f"${name} is not set"))
        return self._joined(value) if isinstance(value, list) else str(value)

    def _arithmetic(self, text: str, line: int) -> int:
        written = re.sub(rf"\$\{{({NAME})\}}|\$({NAME})", lambda match: match[1] or match[2], text).strip()
        try:
            tree = ast.parse(written, mode="eval").body
        except (SyntaxError, ValueError):
            raise NotKnown(Unknown(line, f"$(({shortened(text, 60)})) is not read. Write its result")) from None

        def value(node: ast.AST) -> int:
            match node:
                case ast.Constant(value=int(number)):
                    return number
                case ast.Name(id=name):
                    return self._arithmetic(self._read(name, line), line)
                case ast.UnaryOp(op=kind, operand=operand) if type(kind) in _ARITHMETIC:
                    return int(_ARITHMETIC[type(kind)](value(operand)))
                case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _ARITHMETIC:
                    return int(_ARITHMETIC[type(kind)](value(left), value(right)))
            raise NotKnown(Unknown(line, f"$(({shortened(text, 60)})) is not read. Write its result"))

        try:
            return value(tree)
        except (ZeroDivisionError, RecursionError):
            raise NotKnown(Unknown(line, f"$(({shortened(text, 60)})) has no value")) from None


def text_of_command(pieces: Sequence[Any]) -> str:
    """Return the text that `eval` or `bash -c` would execute; an empty string if the command is neither."""
    if pieces and pieces[0] == "eval" and all(isinstance(each, str) for each in pieces):
        return " ".join(pieces[1:])
    for place, piece in enumerate(pieces[:-2]):
        three = [piece, *pieces[place + 1 : place + 3]]
        if all(isinstance(each, str) for each in three) and re.fullmatch(r"(?:.*/)?(?:ba|z)?sh -[a-z]*c", " ".join(three[:2])):
            return str(three[2])
    return ""


def is_arithmetic(words: Sequence[Word], place: int) -> bool:
    """Return whether `((` is at an index."""
    return [word.text for word in words[place : place + 2]] == ["(", "("]


def begins_command(words: Sequence[Word], place: int) -> bool:
    before = ("\n", ";", "&", "&&", "||", "|", "then", "else", "elif", "do", "{", "(", ")", ";;", "if", "while", "until")
    return place == 0 or words[place - 1].text in before


def names_set(command: Sequence[Word]) -> list[str]:
    """Return the variables that a command of SETTING sets or unsets."""
    first, rest = command[0].text, [word.text for word in command[1:]]
    if first == "let":
        return [name for text in rest for name in arithmetic_sets(text.replace("\\", ""))]
    if first == "printf":
        rest = rest[1:2] if rest[:1] == ["-v"] else []
    if first == "unset" and "-f" in rest:  # a function
        return []
    return [named[0] for text in rest if (named := re.match(NAME, text.strip("'\"")))]


def arithmetic_sets(text: str) -> list[str]:
    """Return the variables that arithmetic sets."""
    before, after = r"(?:\+\+|--)\s*", r"(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)"
    return [first or second for first, second in re.findall(rf"{before}({NAME})|({NAME})\s*{after}", text)]


def may_set(words: Sequence[Word], place: int) -> list[str]:
    """Return the variables that the word at an index sets or unsets: an assignment, or a command that begins there."""
    if assigned := _ASSIGNMENT.fullmatch(words[place].text):
        return [assigned[1]]
    ends = ("\n",) if is_arithmetic(words, place) else ("\n", ";", "&", "|", "&&", "||", ")", ";;")
    end = next((number for number in range(place, len(words)) if words[number].text in ends), len(words))
    if is_arithmetic(words, place):
        return arithmetic_sets(" ".join(word.text for word in words[place:end]))
    begin = place
    while begin and (words[begin - 1].text in ("!", "builtin", "command") or _ASSIGNMENT.fullmatch(words[begin - 1].text)):
        begin -= 1  # for example `while IFS= read X`
    if words[place].text not in SETTING or not begins_command(words, begin):
        return []
    return names_set(without_redirections(words[place:end]))


def sliced(value: str, first: int, count: int | None) -> str | None:
    """Evaluate `${X:first:count}`: numbers below 0 count from the end. None: it ends before it begins, a mistake in bash."""
    begin = first + len(value) if first < 0 else first
    if not 0 <= begin <= len(value):
        return ""
    end = len(value) if count is None else count + (len(value) if count < 0 else begin)
    return value[begin:end] if end >= begin else None


_CLASSES: Mapping[str, str] = {
    "digit": "0-9", "alpha": "a-zA-Z", "alnum": "a-zA-Z0-9", "space": r" \t\n\r\f\v", "upper": "A-Z", "lower": "a-z",
    "punct": r"!-/:-@\[-`{-~", "xdigit": "0-9A-Fa-f",
}  # fmt: skip


def python_pattern(parts: Sequence[tuple[str, bool]]) -> str | None:
    """Return a pattern of bash's, given as characters and whether each is quoted, in Python's form. None: it is not followed."""
    text = "".join(character for character, _ in parts)
    found, place = "", 0
    while place < len(parts):
        character, quoted = parts[place]
        following = text[place + 1 : place + 2] if not (quoted or any(each for _, each in parts[place + 1 : place + 2])) else ""
        if quoted:
            found += re.escape(character)
        elif character == "[":
            end = set_end(text, place)
            if any(quoted and not each.isalnum() for each, quoted in parts[place:end]) or (inside := python_set(text[place:end])) is None:
                return None
            found, place = found + inside, end - 1
        elif character == "\\":
            if following not in tuple("wWsSbB") and (following.isalnum() or following in ("", *"<>`'")):
                return None
            found, place = found + (character + following if following.isalnum() else re.escape(following)), place + 1
        elif (character in "*+?}" and following in tuple("*+?")) or character + following == "(?":
            return None  # Python gives it another meaning
        else:
            found += r"\Z" if character == "$" else character
        place += 1
    return found


def set_end(text: str, place: int) -> int:
    """Return the index after the set `[...]` that begins at an index."""
    written = re.compile(r"\[\^?\]?(?:\[:\w*:\]|[^\]])*\]").match(text, place)
    return written.end() if written else len(text)


def python_set(text: str) -> str | None:
    """Return a set such as `[[:digit:].]` in Python's form. None: it is not followed."""
    written = re.fullmatch(r"\[(\^?)(\]?(?:\[:\w*:\]|[^\]])*)\]", text)
    if written is None or "\\" in text or re.search(r"\[[.=]", written[2]):
        return None
    found = ""
    for name, character in re.findall(r"\[:(\w*):\]|(.)", written[2], re.DOTALL):
        if not character and name not in _CLASSES:
            return None
        found += _CLASSES[name] if not character else character if character == "-" else re.escape(character)
    return f"[{written[1]}{found}]"


def function_body(words: Sequence[Word], place: int) -> tuple[str, int, int] | None:
    """Return the name of a function that is defined at an index, and where its body begins and ends."""
    named = place + (words[place].text == "function")
    begin = named + 1
    brackets = [word.text for word in words[begin : begin + 2]] == ["(", ")"]
    if named >= len(words) or not (brackets or named > place):
        return None
    begin += 2 * brackets
    while begin < len(words) and words[begin].text == "\n":
        begin += 1
    if begin >= len(words) or words[begin].text not in ("{", "("):
        raise wrong(words[place].line, "a function without a body in brackets is not followed. Give the arguments of the run themselves")
    end = matching(words, begin, words[begin].text, {"{": "}", "(": ")"}[words[begin].text])
    return words[named].text, begin + 1, end


def loop_end(words: Sequence[Word], place: int) -> int:
    """Return the index of the `done` of a loop."""
    depth = 0
    for number in range(place, len(words)):
        if begins_command(words, number):
            depth += words[number].text in LOOPS
            depth -= words[number].text == "done"
        if depth == 0:
            return number
    raise wrong(words[place].line, f"`{words[place].text}` has no `done`")


def matching(words: Sequence[Word], place: int, begin: str, end: str) -> int:
    """Return the index of the word that closes the one at `place`."""
    depth = 0
    for number in range(place, len(words)):
        at_start = number == 0 or words[number - 1].text in ("\n", ";", "&", "&&", "||", "|", "then", "else", "do", "{", ";;", ")", "(")
        if words[number].text == begin and (at_start or begin in "({"):
            depth += 1
        elif words[number].text == end and (at_start or end in ")}"):
            depth -= 1
            if depth == 0:
                return number
    raise wrong(words[place].line, f"`{begin}` has no `{end}`")


def divided(words: Sequence[Word], marks: Sequence[str]) -> list[tuple[str, list[Word]]]:
    """Return the parts of an `if`, each with the word that begins it; an inner `if` stays in its part."""
    parts: list[tuple[str, list[Word]]] = [("", [])]
    depth = 0
    for number, word in enumerate(words):
        at_start = number == 0 or words[number - 1].text in ("\n", ";", "then", "else", "do", "{", ")", "&&", "||", ";;")
        if at_start and word.text in ("if", "case"):
            depth += 1
        elif at_start and word.text in ("fi", "esac"):
            depth -= 1
        if depth == 0 and at_start and word.text in marks:
            parts.append((word.text, []))
        else:
            parts[-1][1].append(word)
    return parts


def branch_end(words: Sequence[Word], place: int) -> int:
    """Return where a branch of a `case` ends."""
    depth = 0
    for number in range(place, len(words)):
        at_start = words[number - 1].text in ("\n", ";", "then", "else", "do", "{", ")", ";;")
        depth += at_start and words[number].text == "case"
        depth -= at_start and words[number].text == "esac"
        if depth == 0 and words[number].text.startswith(";;"):
            return number
    return len(words)


def without_redirections(words: Sequence[Word]) -> list[Word]:
    kept, skip = [], False
    for word in words:
        if _REDIRECTION.fullmatch(word.text):
            skip = not re.search(r"&?\d+$|-$", word.text[1:]) if ("&" in word.text[1:] or word.text.endswith("-")) else True
        elif skip:
            skip = False
        else:
            kept.append(word)
    return kept


def tested(words: list[str], line: int) -> bool:
    """Return the result of `[ ... ]`."""
    match words:
        case ["!", *rest]:
            return not tested(rest, line)
        case ["-z", text]:
            return text == ""
        case ["-n", text] | [text]:
            return text != ""
        case [left, "=" | "==", right]:
            return fnmatch.fnmatchcase(left, right)
        case [left, "!=", right]:
            return not fnmatch.fnmatchcase(left, right)
        case [left, sign, right] if sign in _COMPARE and all(re.fullmatch(r"-?\d+", each) for each in (left, right)):
            return bool(_COMPARE[sign](int(left), int(right)))
    told = f"the test [ {shortened(' '.join(words), 60)} ] is not followed. Give the arguments of the run themselves"
    raise NotKnown(Unknown(line, told))


def read(text: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None, trainers: Trainers = VERL) -> Launch:
    """Return the command of a script that starts a trainer. Raises a UserError with the line that cannot be followed."""
    added = frozenset(named[1] for each in arguments if (named := OVERRIDE.match(each)))
    script = Script(list(arguments), os.environ if environment is None else environment, trainers, added=added)
    ended = None
    try:
        script.follow(list(tokens(text.replace("\r\n", "\n"))))
    except Ended as error:
        ended = error
    if ended and not script.launches:
        raise wrong(ended.line, f"the script ends here, by `{ended.word}`, before it starts a trainer")
    if not script.launches:
        raise UserError(f"no command in it starts {trainers.example}")
    if len(script.launches) > 1:
        lines = " and ".join(str(launch.line) for launch in script.launches)
        raise UserError(f"lines {lines} each start a trainer. Give a script with one run")
    (launch,) = script.launches
    notes = [*([f"from the environment: {', '.join(script.taken)}"] if script.taken else []), *script.notes]
    if arguments and not script.passed_on:
        notes.append("the script does not hand its arguments on ($@): here they are added at the end of its command")
        launch = Launch(launch.program, launch.launcher, (*launch.arguments, *arguments), launch.line)
    return Launch(launch.program, launch.launcher, launch.arguments, launch.line, tuple(notes))
