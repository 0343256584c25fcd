"""Make new problems of GSM8K's: the same sentences with other numbers, and the answer that follows from them.

Enters: a folder with GSM8K's own `train.jsonl`, whose solutions carry their equations, "48+24 = <<48+24=72>>72". Leaves: one file in the
layout of `prepare.py`'s train.parquet. Numbers of the question that the equations use are drawn anew, between half and twice of what they
were, and the equations are computed again. Guaranteed: every equation holds, a number that was whole and above 0 stays so, no two problems
are the same and none is one of GSM8K's; a problem whose equations cannot be followed is left out; one seed gives one file. Not guaranteed:
that every problem makes sense. A number may mean something that no equation shows ("in 6 days", of a week's 7).

    python examples/gsm8k/variants.py --source DOWNLOADED --out data/gsm8k/variants.parquet
"""

from __future__ import annotations

import argparse
import ast
import operator
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import prepare
import pyarrow as pa
import pyarrow.parquet as pq

from fulltilt.data.files import read_rows
from fulltilt.records import UserError

EACH = 12  # of every problem, at most
TRIES = 60  # of drawing numbers with which all equations stay whole
LEAST = 3  # smaller numbers are often part of the wording
YEARS = range(1900, 2101)
NUMBER = re.compile(r"\d+(?:\.\d+)?")
# A number that stands for itself: no part of a word, a time, a fraction, a decimal or a percentage.
WHOLE = re.compile(r"(?<![\w.,/:-])(\d{1,3}(?:,\d{3})+|\d+)(?![\w/:%-]|[.,]\d| percent)")
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


@dataclass(frozen=True)
class Equation:
    left: str
    value: Fraction


@dataclass(frozen=True)
class Spot:
    """A number in the question that can be another."""

    begin: int
    end: int
    value: int


def value_of(expression: str) -> Fraction | None:
    """None of what is not made of numbers, the four operations and brackets."""

    def of(node: ast.AST) -> Fraction:
        match node:
            case ast.BinOp(left, operation, right) if type(operation) in OPERATIONS:
                return OPERATIONS[type(operation)](of(left), of(right))
            case ast.Constant(int() | float()):
                return Fraction(ast.get_source_segment(expression, node) or "")
        raise ValueError

    expression = expression.strip()
    try:
        return of(ast.parse(expression, mode="eval").body)
    except (ValueError, SyntaxError, ZeroDivisionError):
        return None


def written(value: Fraction) -> str | None:
    """As people write it, with at most four decimals; None of a third."""
    text = f"{float(value):.4f}".rstrip("0").rstrip(".")
    return text if Fraction(text) == value else None


def equations_of(answer: str) -> list[Equation] | None:
    """None where one of them does not hold, or the last is not the answer."""
    found = []
    for text in prepare.ANNOTATION.findall(answer):
        left, _, right = text.replace(",", "").partition("=")
        value = value_of(left)
        computes = NUMBER.fullmatch(left.strip()) is None  # else it says what no other equation does: "640=640"
        if value is None or not computes or not NUMBER.fullmatch(right.strip()) or Fraction(right.strip()) != value:
            return None
        found.append(Equation(left, value))
    final = answer.rpartition("####")[2].strip().replace(",", "")
    return found if found and final.isdecimal() and found[-1].value == int(final) else None


def spots_of(question: str, equations: Sequence[Equation]) -> list[Spot]:
    """Numbers that are there once and mean one thing: an equation reads them, and none has them as its result."""
    there = NUMBER.findall(question.replace(",", ""))
    read = {Fraction(number) for equation in equations for number in NUMBER.findall(equation.left)}
    results = {equation.value for equation in equations}
    found = [Spot(match.start(1), match.end(1), int(match[1].replace(",", ""))) for match in WHOLE.finditer(question)]
    return [
        spot
        for spot in found
        if spot.value >= LEAST and spot.value not in YEARS and there.count(str(spot.value)) == 1 and Fraction(spot.value) in read - results
    ]


def drawn(value: int, chance: random.Random) -> int:
    """As round as it was."""
    step = 10 if value % 100 == 0 else 5 if value % 10 == 0 else 1
    number = chance.randint(max(2, value // 2), max(2 * value, value + 4))
    return max(step, number // step * step)


def computed(equations: Sequence[Equation], new: dict[Fraction, Fraction]) -> list[Equation] | None:
    """The equations with other numbers, results put into those that read them; None where a number becomes what nobody would write."""
    known, found = dict(new), []
    for equation in equations:
        texts = {number: written(known.get(Fraction(number), Fraction(number))) for number in NUMBER.findall(equation.left)}
        if None in texts.values():
            return None
        left = NUMBER.sub(partial(replaced, texts), equation.left)
        value = value_of(left)
        if value is None or value <= 0 or (equation.value.denominator == 1 and value.denominator != 1) or written(value) is None:
            return None
        if known.setdefault(equation.value, value) != value:  # one number, two meanings
            return None
        found.append(Equation(left, value))
    return found


def replaced(texts: Mapping[str, str], number: re.Match[str]) -> str:
    return texts[number[0]]


def variant(question: str, answer: str, chance: random.Random) -> tuple[str, str] | None:
    """Another question and its solution, or None where there is none to be found."""
    equations = equations_of(answer)
    spots = spots_of(question, equations) if equations else []
    for _ in range(TRIES if spots else 0):
        new = {spot.value: drawn(spot.value, chance) for spot in spots}
        found = computed(equations or [], {Fraction(old): Fraction(number) for old, number in new.items()})
        if found is None or all(old == number for old, number in new.items()):
            continue
        text = question
        for spot in reversed(spots):
            text = text[: spot.begin] + str(new[spot.value]) + text[spot.end :]
        lines = [f"<<{equation.left}={written(equation.value)}>>" for equation in found]
        return text, "\n".join([*lines, f"#### {found[-1].value}"])
    return None


def variants(rows: Sequence[tuple[str, str]], each: int, seed: int) -> Iterator[dict[str, Any]]:
    """Of (question, answer), one of every problem before the second of any."""
    chance, seen = random.Random(seed), {question for question, _ in rows}
    for _ in range(each):
        for index, (question, answer) in enumerate(rows):
            found = variant(question, answer, chance)
            if found is not None and found[0] not in seen:
                seen.add(found[0])
                yield prepare.training_row("train", index, *found, f"a variant of problem {index}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Make problems of GSM8K's with other numbers.")
    parser.add_argument("--source", type=Path, required=True, metavar="DIR", help="folder with GSM8K's train.jsonl")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="parquet file to write")
    parser.add_argument("--each", type=int, default=EACH, metavar="N", help=f"variants of a problem, at most (default: {EACH})")
    parser.add_argument("--seed", type=int, default=0, metavar="NUMBER", help="of the numbers that are drawn (default: 0)")
    arguments = parser.parse_args()
    try:
        if not arguments.source.is_dir():
            raise UserError(f"--source {arguments.source}: no such folder. Give the one that holds GSM8K's train.jsonl")
        rows = [(row["question"], row["answer"]) for row, _ in read_rows(arguments.source / "train.jsonl")]
        made = list(variants(rows, arguments.each, arguments.seed))
        if not made:
            raise UserError(f"--source {arguments.source}: of none of its {len(rows)} problems a variant can be made")
        random.Random(arguments.seed).shuffle(made)
        prepare.write_whole(arguments.out, lambda path: pq.write_table(pa.Table.from_pylist(made), path, compression="zstd"))
    except KeyError as error:
        print(f"error: --source {arguments.source}: a row has no {error}. Give the folder with GSM8K's own files", file=sys.stderr)
        return 2
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(made)} problems of {len({row['extra_info']['index'] for row in made})} of GSM8K's {len(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
