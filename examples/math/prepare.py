"""Turn problems with final answers into training data for a run on mathematics.

Enters: a file of problems as fulltilt reads it (parquet, JSON lines), with a column for the problem and one for its answer; an answer may
be a whole solution that ends with `\\boxed{...}`. Leaves: one parquet file in verl's layout. Guaranteed: a problem that comes twice is
written once, and one that comes with two answers not at all; a row without answer is an error that names it, and nothing is written.

    python examples/math/prepare.py --source DOWNLOADED.parquet --out data/math/train.parquet
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fulltilt.data.files import read_rows
from fulltilt.records import UserError

INSTRUCTION = 'Think step by step. Write the final answer alone on the last line, after "Answer:".'
BOXED = "\\boxed{"


def final_answer(answer: str) -> str:
    """What the last box of a solution holds; an answer without a box is taken as it is."""
    start = answer.rfind(BOXED)
    if start < 0:
        return answer.strip()
    depth = 0
    for place in range(start + len(BOXED) - 1, len(answer)):
        depth += {"{": 1, "}": -1}.get(answer[place], 0)
        if depth == 0:
            return answer[start + len(BOXED) : place].strip()
    return ""


def training_row(index: int, problem: str, answer: str, source: str) -> dict[str, Any]:
    """One row in verl's layout."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": f"{problem}\n\n{INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": index},
    }


def read_problems(source: Path, problem_key: str, answer_key: str) -> dict[str, set[str]]:
    """Each problem with its final answers, in the order of the file."""
    found: dict[str, set[str]] = {}
    for row, place in read_rows(source):
        problem, answer = row.get(problem_key), row.get(answer_key)
        if not isinstance(problem, str) or not isinstance(answer, str) or not final_answer(answer):
            raise UserError(
                f"{place}: needs '{problem_key}' and '{answer_key}', both text that is not empty; it has: {', '.join(row)}. "
                "Name the columns with --problem and --answer."
            )
        found.setdefault(problem.strip(), set()).add(final_answer(answer))
    return found


def prepare(source: Path, out: Path, problem_key: str, answer_key: str, name: str) -> None:
    problems = read_problems(source, problem_key, answer_key)
    agreed = [(problem, *answers) for problem, answers in problems.items() if len(answers) == 1]
    rows = [training_row(index, problem, answer, name) for index, (problem, answer) in enumerate(agreed)]
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    try:
        pq.write_table(pa.Table.from_pylist(rows), partial)
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
    print(f"wrote {out}: {len(rows)} problems; {len(problems) - len(rows)} left out that came with more than one answer")


def main() -> int:
    parser = argparse.ArgumentParser(description="Turn problems with final answers into training data in verl's layout.")
    parser.add_argument("--source", type=Path, required=True, metavar="FILE", help="parquet or JSON-lines file of problems")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.parquet", help="file to write")
    parser.add_argument("--problem", default="problem", metavar="COLUMN", help="column with the problem")
    parser.add_argument("--answer", default="answer", metavar="COLUMN", help="column with the answer, or with a solution that boxes it")
    parser.add_argument("--name", default="math", metavar="NAME", help="data_source of the rows")
    arguments = parser.parse_args()
    try:
        prepare(arguments.source, arguments.out, arguments.problem, arguments.answer, arguments.name)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
