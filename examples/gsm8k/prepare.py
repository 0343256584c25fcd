"""Turn GSM8K's own files into training data.

Enters: a folder with GSM8K's `train.jsonl` and `test.jsonl` (fields `question` and `answer`). Leaves, for each of the two:

    train.parquet      verl's layout: prompt (messages), data_source, ability, reward_model.ground_truth, extra_info
    train.jsonl        the same rows as JSON lines
    train_sft.jsonl    prompt and response, for supervised fine-tuning

GSM8K's solutions are text with calculator annotations, "He sprints 3*3=<<3*3=9>>9 times". `solutions` says what is left of them in the
responses: the text, the annotated text as it is, or only the equations, one a line; the last line is always "#### 540". Guaranteed:
nothing is written unless both files are whole.

    python examples/gsm8k/prepare.py --source DOWNLOADED --out data/gsm8k
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fulltilt.data.files import read_rows
from fulltilt.records import UserError

ANNOTATION = re.compile(r"<<([^<>]*)>>")
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
SPLITS = ("train", "test")


def training_row(split: str, index: int, question: str, answer: str, place: str) -> dict[str, Any]:
    """One row in verl's layout."""
    final = re.search(r"####\s*(\S+)\s*$", answer)
    if final is None:
        raise UserError(f"{place}: the answer does not end with '#### NUMBER'. Download GSM8K again.")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final[1].replace(",", "")},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }


def text(answer: str) -> str:
    """People do not write `<<48/2=24>>`, so the model need not."""
    return ANNOTATION.sub("", answer)


def annotated(answer: str) -> str:
    return answer


def equations(answer: str) -> str | None:
    """None of a solution that has none."""
    found = ANNOTATION.findall(answer)
    return "\n".join([*found, answer.splitlines()[-1]]) if found else None


SOLUTIONS: dict[str, Callable[[str], str | None]] = {"text": text, "annotated": annotated, "equations": equations}


def sft_rows(rows: Iterable[dict[str, Any]], solutions: str) -> Iterator[dict[str, Any]]:
    """The same rows for supervised fine-tuning."""
    for row in rows:
        response = SOLUTIONS[solutions](row["extra_info"]["answer"])
        if response is not None:
            yield {"prompt": row["prompt"], "response": response}


def read_split(source: Path, split: str, most: int | None) -> list[dict[str, Any]]:
    rows = []
    for index, (row, place) in enumerate(islice(read_rows(source / f"{split}.jsonl"), most)):
        question, answer = row.get("question"), row.get("answer")
        if not isinstance(question, str) or not isinstance(answer, str):
            raise UserError(f"{place}: needs 'question' and 'answer', both strings; found: {', '.join(row) or 'nothing'}.")
        rows.append(training_row(split, index, question, answer, place))
    return rows


def write_json_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """A file that is there is a file that is whole."""
    partial = path.with_name(path.name + ".partial")
    try:
        write(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    print(f"wrote {path}")


def write_split(out: Path, split: str, rows: list[dict[str, Any]], solutions: str) -> None:
    write_whole(out / f"{split}.parquet", lambda path: pq.write_table(pa.Table.from_pylist(rows), path))
    write_whole(out / f"{split}.jsonl", lambda path: write_json_lines(path, rows))
    write_whole(out / f"{split}_sft.jsonl", lambda path: write_json_lines(path, sft_rows(rows, solutions)))


def prepare(source: Path, out: Path, solutions: str = "text", most: int | None = None) -> None:
    """`most`: only so many rows of each file, its first ones."""
    if not source.is_dir():
        raise UserError(f"{source}: no such folder. Give --source the folder that holds GSM8K's train.jsonl and test.jsonl.")
    if out.resolve() == source.resolve():
        raise UserError(f"{out}: is the source itself, whose files would be overwritten. Give --out another folder.")
    splits = {split: read_split(source, split, most) for split in SPLITS}
    out.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        write_split(out, split, rows, solutions)


def main() -> int:
    parser = argparse.ArgumentParser(description="Turn GSM8K's own files into training data: parquet, JSON lines and SFT rows.")
    parser.add_argument("--source", type=Path, required=True, metavar="DIR", help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write to; made if it is not there")
    parser.add_argument("--solutions", choices=SOLUTIONS, default="text", help="what SFT rows keep of a solution (default: text)")
    arguments = parser.parse_args()
    try:
        prepare(arguments.source, arguments.out, arguments.solutions)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
