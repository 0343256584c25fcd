"""Data: files to prompts and SFT rows, with real tokenizers and real files."""

from __future__ import annotations

import collections
import csv
import datetime
import decimal
import gzip
import json
import math
import os
import random
import re
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import hub_server
import models
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from fulltilt.data import formats
from fulltilt.data.files import read_rows, rows_in_memory
from fulltilt.data.order import Cursor
from fulltilt.data.prompts import PromptSet, load_prompts
from fulltilt.data.sft import load_sft
from fulltilt.data.template import PromptEncoder
from fulltilt.model import chat_template
from fulltilt.model.load import load_tokenizer
from fulltilt.records import Prompt, UserError
from fulltilt.schema import DataConfig, ModelConfig

REPOSITORY = Path(__file__).resolve().parents[1]
BOS, EOS, TURN = 0, 1, 2  # ids of <s>, </s> and <|turn|>
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if style is defined %}({{ style }}){% endif %}{% endif %}"
)
USER = [{"role": "user", "content": "2+3="}]

# Rows of verl's layout whose structs differ in their keys, so that parquet fills some with None.
ROWS: list[dict[str, Any]] = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "system", "content": "Add.", "name": "teacher"}, {"role": "user", "content": f"{number}+1="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"index": number, "hint": "count"} if number % 2 else {"index": number},
    }
    for number in range(5)
]


def make_tokenizer(post: str = "<s> $A", template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level, so every text comes back as it was; `post` says which special tokens it adds by itself."""
    core = Tokenizer(BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<s>", "</s>", "<|turn|>"]
    core.train_from_iterator([], trainers.BpeTrainer(special_tokens=specials, initial_alphabet=alphabet, show_progress=False))
    core.post_processor = processors.TemplateProcessing(single=post, special_tokens=[("<s>", BOS), ("</s>", EOS)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", extra_special_tokens=["<|turn|>"])
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def data(**settings: Any) -> DataConfig:
    return DataConfig(train="unused", **settings)


def encode(tokenizer: PreTrainedTokenizerFast, prompt: object, **settings: Any) -> tuple[list[int], str]:
    ids, text, _ = PromptEncoder(tokenizer, data(**settings)).encode(prompt)
    assert ids.dtype == np.int64
    return ids.tolist(), text


def plain(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def write_lines(path: Path, rows: Sequence[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_arrow(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)


def write_saved_folder(folder: Path, rows: list[dict[str, Any]], shards: int = 2) -> str:
    """What `Dataset.save_to_disk` writes; state.json lists the shards, here against the order of their names."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05}-of-{shards:05}.arrow" for number in reversed(range(shards))]
    size = -(-len(rows) // shards)
    for number, name in enumerate(names):
        write_arrow(folder / name, rows[number * size : (number + 1) * size])
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_format_type": None, "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return str(folder)


def write_format(kind: str, folder: Path, rows: list[dict[str, Any]]) -> str:
    if kind.endswith(".gz"):
        plain = Path(write_format(kind.removesuffix(".gz"), folder, rows))
        plain.with_name(plain.name + ".gz").write_bytes(gzip.compress(plain.read_bytes()))
        return f"{plain}.gz"
    if kind == "jsonl":
        return write_lines(folder / "train.jsonl", rows)
    if kind == "json":
        (folder / "train.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
        return str(folder / "train.json")
    if kind == "csv":
        with (folder / "train.csv").open("w", encoding="utf-8", newline="") as file:
            cells = csv.DictWriter(file, list(rows[0]))
            cells.writeheader()
            cells.writerows({key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()} for row in rows)
        return str(folder / "train.csv")
    if kind == "arrow":
        write_arrow(folder / "train.arrow", rows)
        return str(folder / "train.arrow")
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet", row_group_size=2)
        return str(folder / "train.parquet")
    if kind == "saved":
        return write_saved_folder(folder / "saved", rows)
    if kind == "saved-splits":
        write_saved_folder(folder / "splits" / "train", rows)
        write_saved_folder(folder / "splits" / "test", rows[:1], shards=1)
        (folder / "splits" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
        return str(folder / "splits")
    assert kind == "hub"
    inside = folder / "hub" / "data"
    inside.mkdir(parents=True)
    (folder / "hub" / "dataset_infos.json").write_text("{}")
    pq.write_table(pa.Table.from_pylist(rows[:3]), inside / "train-00000-of-00002.parquet")
    pq.write_table(pa.Table.from_pylist(rows[3:]), inside / "train-00001-of-00002.parquet")
    pq.write_table(pa.Table.from_pylist(rows[:1]), inside / "test-00000-of-00001.parquet")
    return str(folder / "hub")


def refused(path: str | Path) -> str:
    with pytest.raises(UserError) as caught:
        list(read_rows(path))
    return str(caught.value)


# Files


@pytest.mark.parametrize(
    "kind", ["jsonl", "json", "csv", "jsonl.gz", "json.gz", "csv.gz", "arrow", "parquet", "saved", "saved-splits", "hub"]
)
def test_every_format_gives_the_same_prompts(kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    loaded = load_prompts(write_format(kind, tmp_path, ROWS), tokenizer, data())
    assert f"{len(ROWS)} rows read" in loaded.describe() and len(loaded) == len(ROWS)
    assert ("rows read from" in loaded.describe()) == (kind in ("saved", "saved-splits", "hub"))  # which files of a folder were taken
    for number, prompt in enumerate(loaded.items):
        assert prompt.uid == number
        assert prompt.text == f"<s>[system]Add.</s>\n[user]{number}+1=</s>\n[assistant]"
        assert prompt.ids.tolist() == [BOS, *plain(tokenizer, prompt.text.removeprefix("<s>"))]
        assert (prompt.data_source, prompt.ground_truth) == ("openai/gsm8k", str(number + 1))
        assert prompt.extra_info == {**ROWS[number]["extra_info"], "ability": "math"}
        assert prompt.source == tuple(ROWS[number]["prompt"])


def test_places_name_the_line_or_the_row(tmp_path: Path) -> None:
    lines = tmp_path / "train.jsonl"
    lines.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n{"prompt": "b"}')
    assert list(read_rows(lines)) == [({"prompt": "a"}, f"{lines}:1"), ({"prompt": "b"}, f"{lines}:3")]
    pq.write_table(pa.table({"prompt": [str(number) for number in range(1500)]}), tmp_path / "train.parquet")
    placed = list(read_rows(tmp_path / "train.parquet"))
    assert placed[1200] == ({"prompt": "1200"}, f"{tmp_path / 'train.parquet'} row 1200 (counted from 0)")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": \n', ["a.jsonl:2", "not valid JSON", "one whole JSON object"]),
        ("a.jsonl", b'{"prompt": "x"}\n["y"]\n', ["a.jsonl:2", "not an object"]),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": "\xff"}\n', ["a.jsonl:2", "not UTF-8"]),
        ("a.jsonl", b"", ["a.jsonl", "holds no rows"]),
        ("a.jsonl", b"\n \n", ["a.jsonl", "holds no rows"]),
        ("a.parquet", b"PAR1 and nothing else", ["a.parquet", "write it again"]),
        ("a.parquet", b"", ["a.parquet", "write it again"]),
        ("a.arrow", b"not a stream", ["a.arrow", "write it again"]),
        ("a.jsonl", b'{"prompt": "x"} {"prompt": "y"}\n', ["a.jsonl:1", "extra text after column 15"]),
        (
            "a.jsonl",
            b'{"prompt": "x"}\n{"prompt": "y", "n": {"a": 1, "a": 2}}\n',
            ["a.jsonl:2", "the key 'a' is there twice", "Remove one"],
        ),
        ("a.jsonl", b'{"prompt": "\\ud83d"}\n', ["a.jsonl:1", "column 'prompt'", "half of a surrogate pair (\\ud83d)"]),
        ("a.jsonl", b'{"prompt": "x", "info": [{"\\uDE00": 1}]}\n', ["a.jsonl:1", "column 'info'", "half of a surrogate pair (\\ude00)"]),
        ("a.jsonl", b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}\n", ["a.jsonl:1", "column 'prompt'", "more than 64 deep"]),
        ("a.jsonl", b'{"prompt": ' + b"[" * 10**5 + b"]" * 10**5 + b"}\n", ["a.jsonl:1", "not valid JSON", "recursion"]),
        ("a.jsonl", b'{"prompt": ' + b"1" * 5000 + b"}\n", ["a.jsonl:1", "not valid JSON", "digits"]),
        ("a.jsonl", b'{"prompt": "x\x00"}\n', ["a.jsonl:1", "not valid JSON", "control character"]),
        ("a.jsonl", b'\xff\xfe{\x00"\x00', ["a.jsonl:1", "not UTF-8", "Save the file as UTF-8"]),
        ("a.jsonl", b"PAR1\x15\x04", ["a.jsonl: its name ends in .jsonl, but its content is a parquet file", "Rename it"]),
        ("a.jsonl", gzip.compress(b'{"prompt": "x"}\n', mtime=0), ["a.jsonl", "content is compressed with gzip"]),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", ["a.jsonl", "pointer", "git lfs pull"]),
        ("a.parquet", b"<!DOCTYPE html><html>", ["a.parquet", "a web page"]),
        ("a.jsonl", b'\n<?xml version="1.0"?><Error>', ["a.jsonl: it is a web page, not the file itself. Download or copy it again."]),
        ("a.arrow", b"ARROW1\x00\x00", ["a.arrow", "random-access format"]),
        ("a.json", b'[{"prompt": "x"},\n {"prompt": "y"}', ["a.json", "the list is not closed after row 1 (counted from 0)"]),
        ("a.json", b'[{"prompt": "x"},\n {"prompt": "y", "prompt": "z"}]', ["a.json row 1", "the key 'prompt' is there twice"]),
        ("a.json", b'[{"prompt": "x"} {"prompt": "y"}]', ["a.json", "no comma follows row 0"]),
        ("a.json", b'[{"prompt": "x"},]', ["a.json row 1", "not valid JSON"]),
        ("a.json", b'[{"prompt": "x"}] x', ["a.json", "text after the end of its list"]),
        ("a.json", b"[7]", ["a.json row 0", "a JSON int, not an object"]),
        ("a.json", b"[ ]", ["a.json", "holds no rows"]),
        ("a.csv", b"prompt,answer\nx,5\ny\n", ["a.csv:3", "1 cells, but the header has 2", "between quotes"]),
        ("a.csv", b"prompt,answer,prompt\nx,5,y\n", ["a.csv", "the column 'prompt' is there twice"]),
        ("a.csv", b'prompt,answer\n"x,5\ny,6\n', ["a.csv", "cannot be read after row 0", "unexpected end of data"]),
        ("a.csv", b"prompt,answer\n\xff,5\n", ["a.csv:2", "not UTF-8"]),
        ("a.csv", b"prompt,answer\n\"[{'role': 'user'}]\",5\n", ["a.csv:2", "as Python prints them", "json.dumps"]),
        ("a.csv", b'prompt\n"[{""role"": ""user"", ""role"": ""user""}]"\n', ["a.csv:2", "the key 'role' is there twice"]),
        ("a.csv", b"prompt,answer\rx,5\r", ["a.csv: its lines end in a carriage return (CR) alone", "LF or CRLF"]),
        ("a.jsonl", b'{"prompt": "x"}\r{"prompt": "y"}', ["a.jsonl: its lines end in a carriage return (CR) alone"]),
        ("a.json", b'{"prompt": ["x", "y"], "answer": [1, 2]}', ["a.json: one JSON object with the keys 'prompt', 'answer', not rows"]),
        ("a.json", b'{\n "version": 1,\n "data": [{"prompt": "x"}]\n}', ["a.json: one JSON object with the keys 'version', 'data', not"]),
        ("a.csv", b"prompt, answer\nx, 5\n", ["a.csv: the header has spaces around the column name ' answer'", "cells keep their spaces"]),
        ("a.csv", b"prompt,answer\n", ["a.csv", "holds no rows"]),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "x"}\n', mtime=0)[:-9], ["a.jsonl.gz", "cannot be read after row", "incomplete"]),
        ("a.jsonl.gz", b'{"prompt": "x"}\n', ["a.jsonl.gz", "cannot be read after row 0", "ot a gzip"]),
        ("a.txt", b"prompt\nx\n", ["a.txt", "unknown kind of file '.txt'", ".parquet", "Convert it"]),
    ],
)
def test_a_broken_file_is_named_with_its_remedy(name: str, content: bytes, words: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    message = refused(tmp_path / name)
    assert all(word in message for word in words), message


def test_a_file_of_another_kind_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    assert "a.jsonl: a named pipe, not a file" in refused(tmp_path / "a.jsonl")
    assert "/dev/zero: a device, not a file" in refused("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s.jsonl"))
        assert "s.jsonl: a socket, not a file" in refused(tmp_path / "s.jsonl")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    assert "loop.jsonl: cannot be opened (Too many levels of symbolic links)" in refused(tmp_path / "loop.jsonl")
    assert "cannot be opened (File name too long)" in refused(tmp_path / ("a" * 300 + ".jsonl"))
    assert "cannot be opened" in refused(str(tmp_path / "a\0.jsonl"))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train").symlink_to(tmp_path / "set")
    assert "no data files inside" in refused(tmp_path / "set")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.parquet"):
        (tmp_path / name).touch(mode=0)
        assert f"{name}: cannot be read (Permission denied)" in refused(tmp_path / name)


def test_a_compressed_file_is_not_unpacked_without_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_UNPACKED_BYTES", 2**20)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "x"}\n' * 2**17, mtime=0))
    assert "unpacks to more than 200 times its size" in refused(tmp_path / "a.jsonl.gz")
    monkeypatch.setattr(formats, "_MOST_LINE_BYTES", 1000)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"prompt\n" + b"x" * 1001, mtime=0))
    assert "a.csv.gz:2: the line has more than 1000 B" in refused(tmp_path / "a.csv.gz")


def test_a_parquet_file_of_few_bytes_is_not_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that is stored once and stands in every row: one that packs well, and one that does not pack at all."""
    path = tmp_path / "a.parquet"
    for value, most in (("x" * 200_000, 2**20), (random.Random(0).randbytes(10_000).hex(), 2**17)):
        pq.write_table(pa.table({"prompt": [value] * 100}, schema=pa.schema({"prompt": pa.string()})), path, compression="zstd")
        monkeypatch.setattr(formats, "_UNPACKED_BYTES", most)
        before, rows = pa.total_allocated_bytes(), read_rows(path)
        assert next(rows)[0] == {"prompt": value} and pa.total_allocated_bytes() - before < 2 * most
        if value.startswith("x"):
            assert "unpacks to more than 200 times its size" in refused(path)
        else:
            assert len(list(rows)) == 99
    monkeypatch.undo()
    long = pa.ListArray.from_arrays(pa.array([0, 10**7], pa.int32()), pa.nulls(10**7, pa.int64()))
    pq.write_table(pa.table({"prompt": long}), path)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**25, limits[1]))
    try:
        with pytest.raises(MemoryError):  # no fault of the file
            next(read_rows(path))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    monkeypatch.setattr(formats, "_UNPACKED_BYTES", 10**7)
    assert "unpacks to more than 200 times its size" in refused(path)


def test_a_parquet_column_that_cannot_be_used_is_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path, text = tmp_path / "a.parquet", pa.array(["x", "y"])
    pq.write_table(pa.Table.from_arrays([text, text], names=["prompt", "prompt"]), path)
    assert "the column 'prompt' is there twice" in refused(path)
    pq.write_table(pa.table({"prompt": text, "made": pa.array([10**17, 3 * 10**18], pa.duration("s"))}), path)
    assert "the column 'made' of type duration[s] cannot be read" in refused(path)
    pq.write_table(pa.table({"prompt": pa.array([b"x"])}), path)
    with pytest.raises(UserError, match=r"row 0 .*found bytes"):
        load_prompts(str(path), tokenizer, data())


def test_parquet_columns_of_any_type_are_read(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    when = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    table = pa.table(
        {
            "prompt": pa.array(["1", "2"]).dictionary_encode(),
            "answer": pa.array([decimal.Decimal("1.50"), None], pa.decimal128(8, 2)),
            "extra_info": pa.array([{"at": when, "raw": b"\xff", "map": [1]}, None]),
            "large": pa.array(["a", "b"], pa.large_string()),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    loaded = load_prompts(str(tmp_path / "a.parquet"), tokenizer, data())
    assert [prompt.ground_truth for prompt in loaded.items] == [decimal.Decimal("1.50"), None] and loaded.digest()
    assert loaded.items[0].extra_info == {"at": when, "raw": b"\xff", "map": [1]}


def test_csv_cells_are_text_except_messages_and_objects(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        cells = csv.writer(file)
        cells.writerow(["", "prompt", "answer", "extra_info"])
        cells.writerow(["0", json.dumps(USER), "007", json.dumps({"level": 1})])
        cells.writerow(["1", 'a "quoted",\r\ntwo-line \u00e9 prompt', "", "{not JSON"])
        cells.writerow(["2", "[1, 2]", '{"a": 1}', ""])
    assert [(row, place.rpartition(":")[2]) for row, place in read_rows(path)] == [
        ({"": "0", "prompt": USER, "answer": "007", "extra_info": {"level": 1}}, "2"),
        ({"": "1", "prompt": 'a "quoted",\r\ntwo-line \u00e9 prompt', "answer": None, "extra_info": "{not JSON"}, "4"),
        ({"": "2", "prompt": "[1, 2]", "answer": '{"a": 1}', "extra_info": None}, "5"),
    ]


def test_json_lists_and_lines_have_the_same_rows(tmp_path: Path) -> None:
    for indent in (None, 1):
        (tmp_path / "a.json").write_text("\ufeff\r\n " + json.dumps(ROWS, indent=indent) + "\n", encoding="utf-8")
        assert [row for row, _ in read_rows(tmp_path / "a.json")] == ROWS
    assert [place for _, place in read_rows(tmp_path / "a.json")][3] == f"{tmp_path / 'a.json'} row 3 (counted from 0)"
    # What JSON has no word for, Python writes and reads.
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "x", "hint": NaN, "top": -Infinity}\r\n')
    ((row, _),) = read_rows(tmp_path / "a.jsonl")
    assert row["hint"] != row["hint"] and row["top"] == float("-inf")


def damaged(content: bytes, chance: random.Random) -> bytes:
    """The content with bytes changed, removed, put in or cut off."""
    left = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(left) + 1)
        match chance.randrange(4):
            case 0:
                left[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                del left[place:]
            case 2:
                del left[place : place + chance.randint(1, 20)]
            case 3:
                other = chance.randrange(len(left) + 1)
                left[place:place] = left[other : other + chance.randint(1, 60)]
    return bytes(left)


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "jsonl.gz", "json.gz", "csv.gz", "parquet", "arrow"])
def test_a_damaged_file_is_read_or_refused(kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    whole = write_format(kind, tmp_path, ROWS)
    content, path = Path(whole).read_bytes(), tmp_path / f"damaged.{kind}"
    load_prompts(whole, tokenizer, data())
    for seed in range(60):
        path.write_bytes(damaged(content, random.Random(seed)))
        try:
            load_prompts(str(path), tokenizer, data())
        except UserError as error:
            assert f"damaged.{kind}" in str(error), (seed, error)


TEXTS = ["", " ", "2+3=", "\ud800", "\U0001f600", "\x00", "\ufeff", "</s>", "<s>", "assistant", "{{ x }}", "x" * 200]
KEYS = ["role", "content", "weight", "tool_calls", "reasoning_content", "text", "type", "ground_truth", "\udfff"]


def odd_value(chance: random.Random, depth: int = 0) -> Any:
    match chance.randrange(8 if depth < 4 else 4):
        case 0 | 1:
            return chance.choice(TEXTS)
        case 2:
            return chance.choice([0, -1, 10**400, True, math.nan, math.inf, 1e308])
        case 3:
            return chance.choice([None, {}, []])
        case 4 | 5:
            return [odd_value(chance, depth + 1) for _ in range(chance.randrange(4))]
        case 6:
            return {chance.choice(KEYS): odd_value(chance, depth + 1) for _ in range(chance.randrange(5))}
    nested = odd_value(chance, depth + 1)
    for _ in range(chance.choice([1, 70, 400])):
        nested = [nested]
    return nested


def odd_message(chance: random.Random) -> dict[str, Any]:
    message = {"role": chance.choice(["user", "assistant", "system", "tool"]), "content": chance.choice(TEXTS[2:])}
    return {**message, **{chance.choice(KEYS): odd_value(chance, 1) for _ in range(chance.randrange(3))}}


def odd_row(chance: random.Random) -> dict[str, Any]:
    prompts = [lambda: odd_value(chance), lambda: [odd_message(chance) for _ in range(chance.randrange(4))], lambda: "2+3="]
    row = {key: chance.choice(prompts)() for key in ("prompt", "messages") if chance.random() < 0.7}
    others = ("response", "ground_truth", "answer", "reward_model", "extra_info", "data_source", "ability", "\ud800")
    return row | {key: odd_value(chance) for key in others if chance.random() < 0.12}


def test_a_row_of_any_values_is_used_or_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    outcomes = collections.Counter[bool]()
    for seed in range(150):
        chance = random.Random(seed)
        row = odd_row(chance)
        config = data(apply_template=chance.choice(["auto", "always"]))
        for load in (load_prompts, load_sft):
            for give in (lambda row: write_lines(tmp_path / "a.jsonl", [row]), lambda row: rows_in_memory([row])):
                try:
                    load(give(row), tokenizer, config).digest()
                    outcomes[True] += 1
                except UserError as error:
                    assert "a.jsonl:1: " in str(error) or "row 0 " in str(error), (seed, error)
                    outcomes[False] += 1
    assert min(outcomes[True], outcomes[False]) > 20


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "no/such.jsonl: no such file" in refused(tmp_path / "no" / "such.jsonl")


def test_a_parquet_file_without_rows_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "a.parquet")
    assert "holds no rows" in refused(tmp_path / "a.parquet")


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    # The foot stays whole, so the file opens, and the damage shows only when the rows are read.
    pq.write_table(pa.table({"prompt": ["x" * 50] * 3000}), path, use_dictionary=False, compression="snappy")
    content = bytearray(path.read_bytes())
    content[4:60] = b"\xff" * 56
    path.write_bytes(content)
    assert "a.parquet: cannot be read after row 0" in refused(path)


def test_a_dataset_dict_without_train_names_its_splits(tmp_path: Path) -> None:
    write_saved_folder(tmp_path / "set" / "validation", ROWS)
    (tmp_path / "set" / "dataset_dict.json").write_text(json.dumps({"splits": ["validation", "test"]}))
    message = refused(tmp_path / "set")
    assert "validation, test" in message and str(tmp_path / "set" / "validation") in message
    assert len(list(read_rows(tmp_path / "set" / "validation"))) == len(ROWS)


def test_a_saved_folder_with_something_missing_is_refused(tmp_path: Path) -> None:
    folder = Path(write_saved_folder(tmp_path / "saved", ROWS))
    (folder / "data-00001-of-00002.arrow").unlink()
    assert "data-00001-of-00002.arrow" in refused(folder)
    (folder / "state.json").write_text("{}")
    assert "state.json: does not list its data files" in refused(folder)
    (folder / "state.json").write_text('{"_data_files": [], "_indices_data_files": [{"filename": "indices.arrow"}]}')
    assert "save_to_disk again" in refused(folder)
    (folder / "state.json").write_text("{")
    assert "state.json: cannot be read" in refused(folder)


def test_a_folder_of_files_is_never_read_by_guessing(tmp_path: Path) -> None:
    assert "no data files inside" in refused(tmp_path)
    write_lines(tmp_path / "test.jsonl", [{"prompt": "t"}])
    assert "no file of a split 'train', but test.jsonl" in refused(tmp_path)
    write_lines(tmp_path / "train.jsonl", [{"prompt": "a"}])
    assert [row for row, _ in read_rows(tmp_path)] == [{"prompt": "a"}]
    write_lines(tmp_path / "train_sft.jsonl", [{"prompt": "b"}])
    assert "several data sets: train.jsonl, train_sft.jsonl" in refused(tmp_path)


def test_shards_are_read_by_number_and_a_missing_one_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    for number in (10, 2, 1):
        write_lines(tmp_path / "parts" / f"part-{number}.jsonl", [{"prompt": str(number)}])
    assert [row["prompt"] for row, _ in read_rows(tmp_path / "parts")] == ["1", "2", "10"]
    (tmp_path / "shards").mkdir()
    write_lines(tmp_path / "shards" / "train-00000-of-00002.jsonl", [{"prompt": "0"}])
    assert "the data set has 2 files, but 1 are here" in refused(tmp_path / "shards")


# Data sets of the hub


def parquet(*prompts: str) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"prompt": list(prompts), "answer": ["1"] * len(prompts)}), sink)
    return bytes(sink.getvalue())


CARD = """---
license: mit
configs:
- config_name: easy
  data_files:
  - split: train
    path: easy/*
  - split: test
    path: [all.jsonl, "./easy/two.jsonl"]
- config_name: hard
  default: true
  data_dir: hard
  data_files: ["x-10.*", "**"]
- config_name: 2024
  data_dir: hard
- config_name: gone
  data_files: gone/*.jsonl
---
# Sums
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hub_server.Hub]:
    """A hub with a data set that it converted to parquet, and four that it did not: of JSON lines, of folders with numbers, and two whose
    README.md says which files are which, of which one is converted too."""
    with hub_server.serve() as served:
        served.use_in_tests(monkeypatch, tmp_path / "cache")
        served.commit("datasets", "org/sums", {"README.md": b"x", "main/train-00000-of-00001.parquet": parquet("own")})
        shards = {
            "main/train/0000": "a",
            "main/train/0001": "b",
            "main/test/0000": "t",
            "hard/train/0000": "h",
            "big/partial-train/0000": "p",
        }
        converted = {f"{shard}.parquet": parquet(prompt) for shard, prompt in shards.items()}
        served.commit("datasets", "org/sums", converted, "refs/convert/parquet")
        served.commit("datasets", "org/lines", {"data/train.jsonl": b'{"prompt": "l"}\n', "data/test.jsonl": b'{"prompt": "m"}\n'})
        served.commit("datasets", "org/dumps", {f"data/CC-{dump}/000_0000{dump[-1]}.parquet": parquet(dump) for dump in ("13-20", "14-21")})
        rows = {
            name: b'{"prompt": "%s"}\n' % name.encode() for name in ("easy/one", "easy/two", "easy/deep/no", "hard/x-9", "hard/x-10", "all")
        }
        named = {f"{name}.jsonl": text for name, text in rows.items()} | {"easy/notes.txt": b"x", "README.md": CARD.encode()}
        served.commit("datasets", "org/named", named)
        served.commit("datasets", "org/marked", {"README.md": CARD.encode()})
        served.commit(
            "datasets", "org/marked", {f"{name}/train/0000.parquet": parquet(name) for name in ("easy", "hard")}, "refs/convert/parquet"
        )
        yield served


@pytest.mark.parametrize(
    ("name", "branch", "prompts"),
    [
        ("org/sums/main", "refs/convert/parquet", ["a", "b"]),
        ("org/sums/main:test", "refs/convert/parquet", ["t"]),
        ("org/sums/hard:train", "refs/convert/parquet", ["h"]),
        ("org/sums@main", "main", ["own"]),
        ("org/lines", "main", ["l"]),
        ("org/lines:test", "main", ["m"]),
        ("org/dumps/CC-13-20@main:train", "main", ["13-20"]),
        ("org/named/easy", "main", ["easy/one", "easy/two"]),
        ("org/named/easy:test", "main", ["all", "easy/two"]),
        ("org/named", "main", ["hard/x-10", "hard/x-9"]),
        ("org/named/2024", "main", ["hard/x-9", "hard/x-10"]),
        ("org/named/deep", "main", ["easy/deep/no"]),
        ("org/marked", "refs/convert/parquet", ["hard"]),
    ],
)
def test_a_name_on_the_hub_is_downloaded_once(
    name: str, branch: str, prompts: list[str], hub: hub_server.Hub, tokenizer: PreTrainedTokenizerFast
) -> None:
    repository = re.findall(r"^\w+/\w+", name)[0]
    version = f"{repository} at commit {hub.branches['datasets', repository][branch]}"
    for _ in range(2):
        loaded = load_prompts(name, tokenizer, data())
        assert [prompt.source for prompt in loaded.items] == prompts and loaded.versions == (version,)
        assert re.search(rf"read from {re.escape(version)} \([^)]+\), none with", loaded.describe())
    gets = [request for request in hub.requests if request.startswith("GET") and "/resolve/" in request]
    assert len(gets) == len({*gets}) == len(prompts) + any(request.endswith("/README.md") for request in gets)
    # What is in the cache is read without a network, and at the same commit.
    hub.broken = True
    assert load_prompts(name, tokenizer, data()).versions == (version,)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/sums", "org/sums: name one of its configurations, which are big, hard, main. For example org/sums/big:train"),
        ("org/sums/easy", "name one of its configurations, which are big, hard, main"),
        ("org/sums/main:validation", "no split 'validation', but test, train. For example org/sums/main:test"),
        ("org/sums/big", "converted only the first part of its split 'train'.*org/sums@main:train"),
        ("org/sums@old:train", "has no revision 'old'"),
        ("org/lines:validation", "no file of a split 'validation', but data/test.jsonl, data/train.jsonl"),
        ("org/lines/none", "no folder 'none' in it"),
        ("org/named/none", "name one of its configurations, which are easy, hard, 2024, gone. For example org/named/easy:train"),
        ("org/named/easy@main:validation", "no split 'validation', but train, test. Name one"),
        ("org/named/gone", "its README.md names gone/\\*.jsonl for the split 'train', but no data file has such a name"),
        ("org/nothing", "org/nothing: no file or folder here, and no data set on the hub.*HF_TOKEN"),
    ],
)
def test_a_name_that_the_hub_does_not_have_is_refused(name: str, words: str, hub: hub_server.Hub) -> None:
    assert re.search(words, refused(name))


@pytest.mark.parametrize(
    ("card", "why"),
    [
        ("configs: [", "while parsing"),
        ("configs: 7", "configs: Input should be a valid list"),
        ("- a", "repo card"),
        ("configs:\n- data_files: {train: a}", "configs.0.data_files"),
    ],
)
def test_a_readme_that_cannot_be_used_is_named(card: str, why: str, hub: hub_server.Hub) -> None:
    hub.commit("datasets", "org/lines", {"README.md": f"---\n{card}\n---\n".encode(), "train.jsonl": b'{"prompt": "l"}\n'})
    assert f"org/lines: the YAML at the beginning of its README.md cannot be used ({why}" in refused("org/lines")


def test_a_hub_that_gives_nothing_is_told_in_one_line(hub: hub_server.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated.add("org/lines")
    assert "org/lines: the hub gives this data set only to people who accepted its terms" in refused("org/lines")
    hub.broken = True
    assert "the hub cannot be reached (Server error '503" in refused("org/sums/main")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    message = refused("org/sums/main")
    assert "refused" in message and "Check the network, HF_ENDPOINT and HF_HUB_OFFLINE" in message and "\n" not in message
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "offline mode is enabled" in refused("org/sums/main")
    # Of two shards one was lost: what is left is not the split.
    hub.broken = False
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    list(read_rows("org/sums/main"))
    next(Path(constants.HF_HUB_CACHE).rglob("main/train/0001.parquet")).unlink()
    hub.broken = True
    assert "not whole in the hub's cache" in refused("org/sums/main")


def test_a_cache_that_cannot_be_written_is_not_blamed_on_the_network(
    hub: hub_server.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    message = refused("org/lines")
    assert "file/hub cannot be used (Not a directory)" in message and "set HF_HOME" in message and "network" not in message


def test_only_what_can_be_no_path_is_asked_for_on_the_hub(tmp_path: Path, hub: hub_server.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    paths = ("train", "org/lines", "org2/train.jsonl", "org2/train.tsv", "./org2/lines", "~/org2/lines", "a/b/c/d", "/org2/lines", "org2/")
    for name in paths:
        assert "no such file or folder" in refused(name), name
    assert not hub.requests
    assert [row for row, _ in read_rows("org/lines:train")] == [{"prompt": "l"}]
    write_lines(tmp_path / "org" / "lines", [{"prompt": "x"}])
    assert "unknown kind of file" in refused("org/lines")


@pytest.mark.long  # a process of its own: transformers reads the hub's address when it is imported
def test_a_run_takes_model_and_data_from_the_hub(hub: hub_server.Hub, tmp_path: Path, model_folders: Callable[[str], Path]) -> None:
    hub.commit_folder("models", "org/tiny", model_folders("llama"))
    given = {"model.path": "org/tiny", "data.train": "org/sums/main", "data.val": "org/sums/main:test", "algorithm.prompts_per_step": "2"}
    given |= {"reward.function": "exact_match", "run.dir": str(tmp_path / "run"), "run.steps": "1", "rollout.max_new_tokens": "4"}
    environment = {**os.environ, **hub.environment(tmp_path / "home"), "PYTHONPATH": str(REPOSITORY / "src")}
    (tmp_path / "run.toml").touch()
    command = [sys.executable, "-m", "fulltilt", "train", "run.toml", *(f"{key}={value}" for key, value in given.items()), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120)
    assert (result.returncode, result.stdout) == (0, "run.toml: no mistakes found\n"), result.stderr
    assert "Traceback" not in result.stderr and any("org/tiny/resolve" in request for request in hub.requests)


# Rows given from Python


class Lazy:
    """As a `datasets.Dataset` gives its rows: one at a time, each time it is iterated over."""

    def __iter__(self) -> Any:
        yield from ROWS


def test_rows_from_python_are_those_of_a_file(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    name = rows_in_memory(ROWS)
    assert name.startswith("memory:") and name == rows_in_memory(tuple(ROWS)) == rows_in_memory(Lazy())
    assert load_prompts(name, tokenizer, data()).digest() == load_prompts(write_format("jsonl", tmp_path, ROWS), tokenizer, data()).digest()
    assert rows_in_memory(ROWS[:4]) != name and rows_in_memory([{"prompt": "1", "answer": 1}]) != rows_in_memory(
        [{"prompt": "1", "answer": "1"}]
    )
    assert [row["answer"] for row, _ in read_rows(rows_in_memory([{"prompt": "a", "answer": np.float64(2)}]))] == [2.0]


def test_rows_from_python_are_copied() -> None:
    rows: list[dict[str, Any]] = [{"prompt": [{"role": "user", "content": "a"}]}]
    name = rows_in_memory(rows)
    rows[0]["prompt"][0]["content"] = "b"
    assert [row for row, _ in read_rows(name)] == [{"prompt": [{"role": "user", "content": "a"}]}] and rows_in_memory(rows) != name


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "holds no rows"),
        ({"train": ROWS}, "found dict, not rows.*one split"),
        ("train.jsonl", "found str, not rows"),
        (7, "found int, not rows"),
        (["prompt", "answer"], "row 0 .*found str, not a dictionary of columns.*to_dict"),
        ([*ROWS, {"prompt": object()}], "row 5 .*column 'prompt': a value of type object.*remove the column"),
        ([{1: "prompt"}], "row 0 .*the key 1 is of type int"),
    ],
)
def test_rows_from_python_that_are_none_are_refused(rows: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        rows_in_memory(rows)


def test_a_broken_row_from_python_is_named(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match=r"row 1 \(counted from 0\): the row has no 'prompt'.*Columns of this row: question"):
        load_prompts(rows_in_memory([{"prompt": "1"}, {"question": "2"}]), tokenizer, data())
    assert "Give the same rows again" in refused("memory:0123")


# Prompts to ids


def test_messages_go_through_the_template_once(tokenizer: PreTrainedTokenizerFast) -> None:
    ids, text = encode(tokenizer, USER)
    assert text == "<s>[user]2+3=</s>\n[assistant]"
    assert ids.count(BOS) == 1 and ids[0] == BOS
    assert encode(tokenizer, np.array(USER, dtype=object))[0] == ids


def test_a_template_that_writes_two_bos_tokens_gives_one() -> None:
    ids, text = encode(make_tokenizer(template="{{ bos_token }}" + TEMPLATE), USER)
    assert ids[0] == BOS and BOS not in ids[1:] and text == "<s>[user]2+3=</s>\n[assistant]"


@pytest.mark.parametrize("post", ["<s> $A", "<s> $A </s>"])
@pytest.mark.parametrize("written", ["2+3=", "<s>2+3=", "<s><s>2+3="])
def test_a_string_has_one_bos_and_no_eos(post: str, written: str) -> None:
    tokenizer = make_tokenizer(post)
    assert encode(tokenizer, written) == ([BOS, *plain(tokenizer, "2+3=")], "<s>2+3=")


def test_special_tokens_are_those_of_the_tokenizer() -> None:
    tokenizer = make_tokenizer("$A </s>")
    assert encode(tokenizer, "2+3=")[0] == plain(tokenizer, "2+3=")
    # An end of sequence that the user wrote is part of the prompt.
    assert encode(tokenizer, "2</s>")[0] == [*plain(tokenizer, "2"), EOS]


def test_template_args_reach_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    assert encode(tokenizer, USER, template_args={"style": "brief"})[1].endswith("[assistant](brief)")


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"template_args": {"stile": 1}}, "does not read stile"),
        ({"template_args": {"tokenize": False}}, "cannot set tokenize"),
        ({"template_args": {"style": 1}, "apply_template": "never"}, "template_args need a chat template"),
        ({"system": "Add.", "apply_template": "never"}, "data.system needs a chat template"),
    ],
)
def test_a_setting_without_effect_is_refused_at_once(settings: dict[str, Any], word: str, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match=word):
        PromptEncoder(tokenizer, data(**settings))


def test_a_setting_without_effect_on_a_string_names_the_row(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_lines(tmp_path / "train.jsonl", [{"prompt": USER}, {"prompt": "2+3="}])
    for options in ({"system": "Add."}, {"template_args": {"style": "brief"}}):
        with pytest.raises(UserError, match=r"train\.jsonl:2: .*needs? a chat template.*'always'"):
            load_prompts(path, tokenizer, data(**options))


def test_apply_template_says_what_becomes_of_strings(tokenizer: PreTrainedTokenizerFast) -> None:
    assert encode(tokenizer, "2+3=", apply_template="always") == encode(tokenizer, USER)
    assert encode(tokenizer, "2+3=", apply_template="never") == encode(tokenizer, "2+3=")
    with pytest.raises(UserError, match=r"data\.apply_template is 'never'"):
        encode(tokenizer, USER, apply_template="never")


def test_the_system_message_is_put_before_prompts_that_have_none(tokenizer: PreTrainedTokenizerFast) -> None:
    own = [{"role": "system", "content": "Mine."}, *USER]
    assert encode(tokenizer, USER, system="Add.")[1] == "<s>[system]Add.</s>\n[user]2+3=</s>\n[assistant]"
    assert encode(tokenizer, "2+3=", system="Add.", apply_template="always") == encode(tokenizer, USER, system="Add.")
    assert encode(tokenizer, own, system="Add.") == encode(tokenizer, own)


def test_a_missing_chat_template_names_the_remedy() -> None:
    bare = make_tokenizer(template=None)
    with pytest.raises(UserError, match=r"model\.chat_template"):
        encode(bare, USER)
    with pytest.raises(UserError, match=r"model\.chat_template"):
        PromptEncoder(bare, data(apply_template="always"))
    assert encode(bare, "2+3=")[1] == "<s>2+3="


def test_what_the_template_refuses_is_the_users_to_mend() -> None:
    strict = make_tokenizer(template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match="roles must alternate"):
        encode(strict, USER)


@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        ([{"content": "2+3="}], "message 1 has no 'role'"),
        ([*USER, {"role": "user"}], "message 2 .* has no 'content'"),
        ([*USER, {"role": "user", "content": None}], "message 2 .* has no 'content'"),
        ([{"role": "user", "content": 5}], "message 1 .* type int"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "not text"),
        (["2+3="], "message 1 is of type str"),
        ([*USER, {"role": "assistant", "content": "5"}], "nothing to answer"),
        ([], "empty"),
        ([{"role": "user", "content": ""}], "empty"),
        ("", "empty"),
        (" \n", "empty"),
        (7, "found int"),
        ({"role": "user", "content": "2+3="}, "found dict"),
        (None, "no 'prompt'.*data.prompt_key"),
    ],
)
def test_a_broken_prompt_names_file_line_and_columns(prompt: object, word: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_lines(tmp_path / "train.jsonl", [{"prompt": "1"}, {"prompt": "2"}, {"prompt": prompt, "level": 1}])
    with pytest.raises(UserError, match=word) as caught:
        load_prompts(path, tokenizer, data())
    assert f"{path}:3: " in str(caught.value) and "Columns of this row: prompt, level." in str(caught.value)


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ({"question": "2"}, "no 'prompt'"),
        ({"prompt": "2", "extra_info": "x"}, "'extra_info' is of type str"),
        ({"prompt": "2", "reward_model": "rule"}, "'reward_model' is of type str"),
        ({"prompt": "2", "data_source": 3}, "'data_source' is of type int"),
    ],
)
def test_a_broken_row_names_its_file(row: dict[str, Any], word: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    with pytest.raises(UserError, match=rf"train\.parquet row 0 .*{word}"):
        load_prompts(str(tmp_path / "train.parquet"), tokenizer, data())


def test_columns_other_than_verls(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [
        {"text": "a", "ground_truth": "1", "answer": "long"},
        {"text": "b", "answer": "2"},
        {
            "text": "c",
            "reward_model": {"ground_truth": 0},
            "answer": "3",
            "ability": "math",
            "extra_info": {"ability": "own", "none": None},
        },
        {"text": "d"},
    ]
    prompts = load_prompts(write_lines(tmp_path / "a.jsonl", rows), tokenizer, data(prompt_key="text")).items
    assert [prompt.ground_truth for prompt in prompts] == ["1", "2", 0, None]
    assert [prompt.extra_info for prompt in prompts] == [{}, {}, {"ability": "own"}, {}]
    assert {prompt.data_source for prompt in prompts} == {"unknown"}


def test_a_prompts_source_is_what_its_ids_were_made_from(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "2+3="}])
    assert load_prompts(path, tokenizer, data()).items[0].source == "2+3="
    prompt = load_prompts(path, tokenizer, data(apply_template="always", system="Add.")).items[0]
    assert prompt.source == ({"role": "system", "content": "Add."}, *USER)
    assert tokenizer.apply_chat_template(list(prompt.source), add_generation_prompt=True, return_dict=False) == prompt.ids.tolist()


# Templates that go wrong

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "word"),
    [
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
        (ENDLESS, "does not seem to end"),
        ("{{ 9 ** 999999999 }}", "does not seem to end"),
        ("{{ messages[0].role * 100000000000 }}", "more than 4.0 GiB of memory"),
        ("{% for %}", "Expected an expression"),
        ("{{ 'a' + 1 }}", "can only concatenate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception('no system messages') }}", "no system messages"),
    ],
)
def test_a_template_that_goes_wrong_is_refused(
    template: str, word: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 0.3)
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "x"}, {"prompt": USER}])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(
        UserError, match=r"a\.jsonl:2: the chat template cannot write this conversation: .*set model\.chat_template"
    ) as caught:
        load_prompts(path, make_tokenizer(template=template), data())
    assert word in str(caught.value)
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


def test_a_template_that_does_not_end_for_a_later_row_is_stopped_in_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 0.3)
    tokenizer = make_tokenizer(template="{% if messages[0].content == 'stop' %}" + ENDLESS + "{% endif %}" + TEMPLATE)
    expected = encode(tokenizer, USER)
    found: list[object] = []

    def use() -> None:
        with pytest.raises(UserError, match="does not seem to end") as caught:
            encode(tokenizer, [{"role": "user", "content": "stop"}])
        found.extend([caught.value, encode(tokenizer, USER)])

    thread = threading.Thread(target=use)
    for run in (use, thread.start):
        run()
    thread.join()
    assert found[1] == found[3] == expected


def test_a_template_does_not_limit_the_memory_of_other_threads(tokenizer: PreTrainedTokenizerFast) -> None:
    found = []

    class Content:
        def __str__(self) -> str:
            found.append(resource.getrlimit(resource.RLIMIT_AS))
            return "x"

    message = {"role": "user", "content": Content()}
    assert "[user]x" in chat_template.render(tokenizer, TEMPLATE, [message])
    assert found == [resource.getrlimit(resource.RLIMIT_AS)]


def test_a_template_file_is_utf8_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jinja"
    path.write_bytes(b"\xef\xbb\xbf{{ bos_token }}")
    assert chat_template.read_template(str(path), "model.chat_template") == "{{ bos_token }}"
    for content, word in ((b"{{ '\xff' }}", r"is not UTF-8 text \(invalid start byte at byte 4\)"), (b" \n", "is empty")):
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"model\.chat_template: .*a\.jinja {word}"):
            chat_template.read_template(str(path), "model.chat_template")
    folder = models.save("llama", tmp_path / "model")
    path.write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"reward_model\.chat_template: .*is not UTF-8"):
        load_tokenizer(ModelConfig(path=str(folder)), str(folder), "reward_model.path", str(path))
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"can't decode byte 0xff.*Repair or replace .*chat_template\.jinja"):
        load_tokenizer(ModelConfig(path=str(folder)))


def test_a_tokenizer_that_fails_is_named_with_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        """As compiled code raises it: not an Exception."""

    def fail(*_: object, **__: object) -> None:
        raise Panic("range end index 7 out of range")

    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "x"}])
    tokenizer = make_tokenizer()
    monkeypatch.setattr(type(tokenizer), "_encode_plus", fail)
    with pytest.raises(UserError, match=r"a\.jsonl:1: the tokenizer cannot read this text \(range end index"):
        load_prompts(path, tokenizer, data())
    monkeypatch.setattr(type(tokenizer), "_encode_plus", lambda *_, **__: bytearray(2**60))
    with pytest.raises(MemoryError):  # no fault of the row
        load_prompts(path, tokenizer, data())


# Over-long prompts


@pytest.mark.parametrize("template", ["auto", "always"])
def test_a_prompt_of_megabytes_is_left_out_without_tokenising_it(
    template: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = 0

    def tokenised(self: PromptEncoder, text: str, **options: Any) -> list[int]:
        nonlocal longest
        longest = max(longest, len(text))
        return original(self, text, **options)

    original = PromptEncoder._tokenise
    monkeypatch.setattr(PromptEncoder, "_tokenise", tokenised)
    rows = [{"prompt": "1" * 5_000_000}, {"prompt": "2"}, {"prompt": "3" * 900}]
    loaded = load_prompts(write_lines(tmp_path / "a.jsonl", rows), tokenizer, data(max_prompt_tokens=500, apply_template=template))
    assert [prompt.uid for prompt in loaded.items] == [1] and longest < 1000
    assert "3 rows read, 2 left out with prompts of more than 500 tokens" in loaded.describe()
    with pytest.raises(UserError, match=r"all 1 prompts .*the shortest has at least 15\d+ tokens"):
        load_prompts(write_lines(tmp_path / "b.jsonl", rows[:1]), tokenizer, data(max_prompt_tokens=500, apply_template=template))


@settings(deadline=None, max_examples=20)
@given(
    lengths=st.lists(st.integers(0, 900), min_size=1, max_size=6),
    most=st.integers(1, 60),
    limit=st.integers(1, 60),
    turns=st.integers(1, 2),
)
def test_lengths_by_characters_leave_out_what_lengths_by_tokens_would(
    lengths: list[int], most: int, limit: int, turns: int, tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [{"messages": said(*["1" * length, "2" * (length // 3 + 1)] * turns)} for length in lengths]
    path = write_lines(tmp_path_factory.mktemp("long") / "a.jsonl", [*rows, {"messages": said("1", "2")}])
    config = data(max_prompt_tokens=24 + most, max_tokens=48 + limit)
    loaded = load_sft(path, tokenizer, config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptEncoder, "_short_enough", lambda self, text, limit: text)
        whole = load_sft(path, tokenizer, config)
    assert (loaded.digest(), loaded.said) == (whole.digest(), whole.said)


def test_an_sft_row_of_megabytes_without_a_limit_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"messages": said("2+3=", "5")}, {"messages": said("2+3=", "5" * 2**24)}])
    with pytest.raises(UserError, match=r"a\.jsonl:2: the text has 16\d+ characters.*data\.max_tokens leaves it out"):
        load_sft(path, tokenizer, data())
    assert "1 left out with rows of more than 50 tokens" in load_sft(path, tokenizer, data(max_tokens=50)).describe()


def test_the_length_filter_counts_final_ids(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    first = write_lines(tmp_path / "a.jsonl", [{"prompt": "1234"}, {"prompt": "123"}])
    second = write_lines(tmp_path / "b.jsonl", [{"prompt": "12345"}, {"prompt": "12"}])
    # "1234" is four characters and, with its beginning-of-sequence token, five tokens.
    loaded = load_prompts([first, second], tokenizer, data(max_prompt_tokens=4))
    assert [(prompt.uid, prompt.text) for prompt in loaded.items] == [(1, "<s>123"), (3, "<s>12")]
    assert loaded.describe() == "4 rows read, 2 left out with prompts of more than 4 tokens; the longest prompt kept has 4 tokens"
    assert "none with a prompt over 6 tokens" in load_prompts([first, second], tokenizer, data(max_prompt_tokens=6)).describe()


def test_all_prompts_too_long_names_limit_and_shortest(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "12345"}, {"prompt": "123"}])
    with pytest.raises(UserError, match=r"all 2 prompts.*data\.max_prompt_tokens = 3; the shortest has 4 tokens\. Raise"):
        load_prompts(path, tokenizer, data(max_prompt_tokens=3))


# Order


def numbered(count: int) -> PromptSet:
    return PromptSet(tuple(Prompt(uid, np.array([uid]), str(uid)) for uid in range(count)))


def taken(
    prompts: PromptSet, cursor: Cursor, count: int, steps: int, seed: int = 7, shuffle: bool = True
) -> tuple[list[list[int]], Cursor]:
    batches = []
    for _ in range(steps):
        batch, cursor = prompts.take(cursor, count, seed, shuffle)
        batches.append([prompt.uid for prompt in batch])
    return batches, cursor


def test_each_epoch_is_another_order_and_the_last_partial_batch_is_left_out() -> None:
    batches, cursor = taken(numbered(11), Cursor(), 3, steps=6)
    epochs = [list(chain(*batches[:3])), list(chain(*batches[3:]))]
    assert all(len(batch) == 3 for batch in batches) and all(len(set(epoch)) == 9 for epoch in epochs)
    assert epochs[0] != epochs[1] and epochs[0] != sorted(epochs[0])
    assert cursor == Cursor(1, 9)
    assert taken(numbered(11), Cursor(), 3, steps=6) == (batches, cursor)
    assert taken(numbered(11), Cursor(), 3, steps=6, seed=8)[0] != batches


def test_without_shuffling_the_order_is_the_files() -> None:
    batches, cursor = taken(numbered(5), Cursor(), 2, steps=3, shuffle=False)
    assert batches == [[0, 1], [2, 3], [0, 1]] and cursor == Cursor(1, 2)


@settings(deadline=None)  # a busy machine is not a failure
@given(size=st.integers(1, 30), share=st.floats(0.01, 1), before=st.integers(0, 8), after=st.integers(1, 8), seed=st.integers(0, 2**40))
def test_a_resumed_order_is_the_uninterrupted_one(size: int, share: float, before: int, after: int, seed: int) -> None:
    count = max(1, int(size * share))
    whole, end = taken(numbered(size), Cursor(), count, before + after, seed)
    _, saved = taken(numbered(size), Cursor(), count, before, seed)
    assert taken(numbered(size), Cursor(saved.epoch, saved.offset), count, after, seed) == (whole[before:], end)
    steps = numbered(size).steps_per_epoch(count)
    for epoch in range(0, len(whole), steps):
        seen = list(chain(*whole[epoch : epoch + steps]))
        assert len(set(seen)) == len(seen)


def test_epochs_are_described_in_words() -> None:
    assert numbered(11).steps_per_epoch(3) == 3
    assert numbered(11).describe_epoch(3) == "an epoch is 3 steps of 3 prompts; each epoch leaves out 2 of its 11, too few for a full batch"
    assert numbered(4).describe_epoch(4) == "an epoch is 1 step of 4 prompts; none is left out"
    assert numbered(8).describe_epoch(4, "algorithm.prompts_per_round") == "an epoch is 2 rounds of 4 prompts; none is left out"


def test_a_step_larger_than_the_data_is_refused() -> None:
    for ask in (lambda: numbered(3).take(Cursor(), 4, 0, True), lambda: numbered(3).steps_per_epoch(4)):
        with pytest.raises(UserError, match=r"takes 4 prompts.*only 3\. Lower algorithm\.prompts_per_step to at most 3"):
            ask()


def test_a_round_larger_than_the_data_is_refused_by_its_own_key() -> None:
    with pytest.raises(UserError, match=r"a round takes 4 prompts.*only 3\. Lower algorithm\.prompts_per_round to at most 3"):
        numbered(3).steps_per_epoch(4, "algorithm.prompts_per_round")


def test_a_digest_tells_prompts_apart_by_what_answers_are_judged_by(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    def digest(*rows: dict[str, Any]) -> str:
        return load_prompts(write_lines(tmp_path / "a.jsonl", rows), tokenizer, data()).digest()

    row = ROWS[1]
    others: list[dict[str, Any]] = [
        {"data_source": "other"},
        {"reward_model": {"style": "rule", "ground_truth": "3"}},
        {"reward_model": {"style": "rule", "ground_truth": 2}},
        {"extra_info": {"index": 1, "hint": "guess"}},
        {"extra_info": {"index": 1}},
        {"ability": "history"},
    ]
    digests = [digest(row), *(digest({**row, **other}) for other in others), digest(row, ROWS[2]), digest({**row, **others[0]}, ROWS[2])]
    assert len(set(digests)) == len(digests)
    # The order of keys is no part of it, nor what no reward is told.
    assert digest({**row, "extra_info": {"hint": "count", "index": 1}, "comment": "unread"}) == digests[0]


def test_a_digest_tells_data_sets_apart_by_tokens_order_and_mask(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    def digest(rows: list[dict[str, Any]], load: Any = load_sft, **settings: Any) -> str:
        found: str = load(write_lines(tmp_path / "a.jsonl", rows), tokenizer, data(**settings)).digest()
        return found

    one, other = {"prompt": "2+3=", "response": "5"}, {"prompt": "2+4=", "response": "6"}
    talk = {"messages": [*USER, {"role": "assistant", "content": "5"}] * 2}
    rows = [[one], [one, other], [other, one], [{"prompt": "2+3", "response": "=5"}], [talk]]
    digests = [*map(digest, rows), digest([talk], train_turns="last"), *(digest(part, load_prompts) for part in rows[:3])]
    assert len(set(digests)) == len(digests)
    assert digest([{**one, "comment": "no token"}]) == digest([one])


# SFT rows


def sft_rows(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, Any]], **settings: Any) -> list[tuple[str, str]]:
    """Each row as (text not trained on, text trained on)."""
    split = []
    for row in load_sft(write_lines(tmp_path / "sft.jsonl", rows), tokenizer, data(**settings)).items:
        assert row.ids.dtype == np.int64 and row.mask.dtype == np.bool_ and len(row.ids) == len(row.mask)
        start = int(row.mask.argmax())
        assert row.mask[start:].all() and start > 0
        split.append((tokenizer.decode(row.ids[:start]), tokenizer.decode(row.ids[start:])))
    return split


def test_sft_trains_on_the_response_and_its_end_only(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "2+3=", "response": "5"},
        {"prompt": USER, "response": "5"},
        {"messages": [*USER, {"role": "assistant", "content": "5"}]},
    ]
    templated = ("<s>[user]2+3=</s>\n[assistant]", "5</s>")
    assert sft_rows(tmp_path, tokenizer, rows) == [("<s>2+3=", "5</s>"), templated, templated]
    assert sft_rows(tmp_path, tokenizer, rows[:1], apply_template="always") == [templated]


def test_sft_prompts_are_those_of_rollout(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": USER, "response": "5"}, {"prompt": [{"role": "system", "content": "Mine."}, *USER], "response": "5"}]
    path = write_lines(tmp_path / "a.jsonl", rows)
    config = data(system="Add.", template_args={"style": "brief"})
    for row, prompt in zip(load_sft(path, tokenizer, config).items, load_prompts(path, tokenizer, config).items, strict=True):
        assert row.ids[~row.mask].tolist() == prompt.ids.tolist()
        # This template writes the style only before an answer that is still to come, so the answer is put there by itself.
        assert tokenizer.decode(row.ids[row.mask]) == "5</s>"


def test_sft_keeps_what_the_template_writes_around_the_answer(tmp_path: Path) -> None:
    spaced = make_tokenizer(template=TEMPLATE.replace("]{{ message['content'] }}", "]{{ ' ' + message['content'] }}<|turn|>\n"))
    rows = [{"prompt": USER, "response": "5"}]
    assert sft_rows(tmp_path, spaced, rows)[0][1] == " 5<|turn|>\n</s>"
    # No end of sequence from the template: one is put there.
    turns = make_tokenizer(template=TEMPLATE.replace("{{ eos_token }}", "<|turn|>"))
    assert sft_rows(tmp_path, turns, rows)[0][1] == "5<|turn|>\n</s>"
    # Unless generation stops at the template's own end of turn.
    row = load_sft(str(tmp_path / "sft.jsonl"), turns, data(), end_ids=[TURN]).items[0]
    assert turns.decode(row.ids[row.mask]) == "5<|turn|>"


def test_sft_trains_on_what_a_template_drops(tmp_path: Path) -> None:
    forgetful = make_tokenizer(template=TEMPLATE.replace("message['content']", "message['content'].split('</think>')[-1]"))
    rows: list[dict[str, Any]] = [{"prompt": USER, "response": "<think>count</think>5"}]
    assert sft_rows(tmp_path, forgetful, rows)[0][1] == "<think>count</think>5</s>"


def said(*texts: str) -> list[dict[str, str]]:
    """A conversation in which user and assistant take turns."""
    return [{"role": "assistant" if place % 2 else "user", "content": text} for place, text in enumerate(texts)]


CHATML = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
# In the manner of reasoning models: earlier turns lose their reasoning, the last one has a block for it even when there is none.
FORGETS = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{% set parts = m['content'].split('</think>') %}"
    "{% if m['role'] == 'assistant' and loop.last %}<think>{{ parts[0].replace('<think>', '') if parts | length > 1 }}</think>{% endif %}"
    "{{ parts[-1] }}</s>\n{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
TEMPLATES = {
    "an end token after every message": (TEMPLATE, 1),
    "chatml": (CHATML, 1),
    "contents trimmed": (CHATML.replace("m['content']", "m['content'] | trim"), 1),
    "generation marks around content only": (
        CHATML.replace("{{ m['content'] }}", "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
                       "{% else %}{{ m['content'] }}{% endif %}"), 1,
    ),
    "no words before an answer": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] + eos_token }}"
        "{% else %}[INST]{{ m['content'] }}[/INST]{% endif %}{% endfor %}", 1,
    ),
    "the assistant under another name": (CHATML.replace("{{ m['role'] }}", "{{ 'model' if m['role'] == 'assistant' else m['role'] }}")
                                         .replace("<|turn|>assistant", "<|turn|>model"), 1),
    "reasoning dropped": (FORGETS, 3),
    "reasoning block only where one answers now": (
        CHATML.replace("<|turn|>assistant\n", "<|turn|>assistant\n<think></think>"), 3,
    ),
    "no end of turn": (CHATML.replace("</s>", ""), 3),
    "only the end of the conversation": (CHATML.replace("</s>", "") + "{% if not add_generation_prompt %}</s>{% endif %}", 3),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("train_turns", ["all", "last"])
def test_every_trained_token_stands_behind_what_rollout_reads(name: str, train_turns: str, tmp_path: Path) -> None:
    template, expected_rows = TEMPLATES[name]
    tokenizer = make_tokenizer(template=template)
    config = data(train_turns=train_turns, system="Add.")
    talk = [*said("2+3=", "<think>two</think>5", "and 1?", " 6 "), {"role": "tool", "content": "right"}, *said("x", "bye")[1:]]
    loaded = load_sft(write_lines(tmp_path / "a.jsonl", [{"messages": talk}]), tokenizer, config)
    encoder = PromptEncoder(tokenizer, config)
    turns = [place for place, message in enumerate(talk) if message["role"] == "assistant"]
    expected = [(encoder.encode(talk[:turn]).ids.tolist(), talk[turn]["content"]) for turn in turns][-1 if train_turns == "last" else 0 :]
    found = []
    for row in loaded.items:
        assert row.ids.dtype == np.int64 and row.mask.dtype == np.bool_ and row.mask[-1]
        edges = np.flatnonzero(np.diff(row.mask.astype(int), prepend=0, append=0))
        for start, end in edges.reshape(-1, 2).tolist():
            assert row.ids[end - 1] == EOS and EOS not in row.ids[start : end - 1]
            found.append((row.ids[:start].tolist(), tokenizer.decode(row.ids[start : end - 1])))
    assert [prompt for prompt, _ in found] == [prompt for prompt, _ in expected]
    for (_, written), (_, answer) in zip(found, expected, strict=True):
        assert answer.strip() in written and len(written) <= len(answer) + len("<think></think>\n")
    assert len(loaded.items) == (expected_rows if train_turns == "all" else 1)
    assert ("1 conversation became 3 rows" in loaded.describe()) == (len(loaded.items) == 3)


def test_sft_writes_a_conversation_in_one_row(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(template=CHATML)
    path = write_lines(tmp_path / "a.jsonl", [{"chat": said("2+3=", "5", "and 1?", "6"), "prompt": "ignored: there is no response"}])
    (row,) = load_sft(path, tokenizer, data(messages_key="chat")).items
    text = "<|turn|>user\n2+3=</s>\n<|turn|>assistant\n5</s>\n<|turn|>user\nand 1?</s>\n<|turn|>assistant\n6</s>"
    assert tokenizer.decode(row.ids) == text and tokenizer.decode(row.ids[row.mask]) == "5</s>6</s>"


def test_sft_weighs_the_messages_of_the_assistant(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    talk: list[dict[str, Any]] = said("a", "1", "b", "2", "c", "3")
    talk[1]["weight"], talk[3]["weight"], talk[5]["weight"] = 1, 1, 0
    rows: list[dict[str, Any]] = [{"messages": talk}, {"messages": said("a", "4")}]
    for write in ("jsonl", "parquet"):  # parquet gives every message a weight, mostly None
        path = write_format(write, tmp_path, rows)
        all_turns, last_turn = (load_sft(path, tokenizer, data(train_turns=turns)).items for turns in ("all", "last"))
        assert [tokenizer.decode(row.ids[row.mask]) for row in all_turns] == ["1</s>2</s>", "4</s>"]
        assert [tokenizer.decode(row.ids[row.mask]) for row in last_turn] == ["2</s>", "4</s>"]
        assert tokenizer.decode(all_turns[0].ids).endswith("[user]b</s>\n[assistant]2</s>")


def test_sft_rows_of_a_split_conversation_are_limited_one_by_one(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(template=FORGETS)
    path = write_lines(tmp_path / "a.jsonl", [{"messages": said("a", "1", "b", "2", "c", "3")}])
    whole = load_sft(path, tokenizer, data())
    prompts = [int(row.mask.argmax()) for row in whole.items]
    loaded = load_sft(path, tokenizer, data(max_prompt_tokens=prompts[1]))
    assert [row.ids.tolist() for row in loaded.items] == [row.ids.tolist() for row in whole.items[:2]]
    assert "1 row read, 1 left out with prompts of more than" in loaded.describe() and "1 conversation became 3 rows" in loaded.describe()


def test_sft_leaves_out_rows_beyond_max_tokens(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "1" * n, "response": "2" * m} for n, m in ((1, 1), (1, 9), (9, 1), (2, 2))])
    loaded = load_sft(path, tokenizer, data(max_prompt_tokens=8, max_tokens=6))
    assert [row.tokens for row in loaded.items] == [4, 6]
    assert loaded.describe() == (
        "4 rows read, 1 left out with prompts of more than 8 tokens, 1 left out with rows of more than 6 tokens; "
        "the longest row kept has 6 tokens"
    )
    with pytest.raises(
        UserError, match=r"all 4 rows are longer than data\.max_tokens = 3; the shortest has 4 tokens\. Raise data\.max_tok"
    ):
        load_sft(path, tokenizer, data(max_tokens=3))


def test_sft_trains_on_reasoning_and_tool_calls_or_refuses(tmp_path: Path) -> None:
    calls = "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    speaks = CHATML.replace("{{ m['content'] }}", "<think>{{ m.reasoning_content }}</think>{{ m['content'] }}" + calls)
    answer = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [{"name": "add"}]}
    path = write_lines(tmp_path / "a.jsonl", [{"messages": [*USER, answer]}])
    tokenizer = make_tokenizer(template=speaks)
    (row,) = load_sft(path, tokenizer, data()).items
    assert tokenizer.decode(row.ids[row.mask]) == '<think>hm</think>[{"name": "add"}]</s>'
    for deaf in (speaks.replace("{{ m.reasoning_content }}", ""), speaks.replace(calls, "")):
        with pytest.raises(UserError, match=r"reasoning_content and tool_calls would be lost"):
            load_sft(path, make_tokenizer(template=deaf), data())


def test_sft_ends_a_response_once(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    assert sft_rows(tmp_path, tokenizer, [{"prompt": "2+3=", "response": "5</s>"}]) == [("<s>2+3=", "5</s>")]
    # Here the template ends the turn and then the text, and sampling stops at either.
    twice = make_tokenizer(template=TEMPLATE.replace("{{ eos_token }}", "<|turn|>\n{{ eos_token }}"))
    row = load_sft(write_lines(tmp_path / "a.jsonl", [{"prompt": USER, "response": "5</s>"}]), twice, data(), end_ids=[TURN]).items[0]
    assert twice.decode(row.ids[row.mask]) == "5</s>"


def test_a_column_may_be_inside_another(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [
        {"extra_info": {"question": "2+3=", "answer": "5"}},
        {"extra_info.question": "1+1=", "extra_info": {"question": "no", "answer": "2"}},
    ]
    file = write_lines(tmp_path / "a.jsonl", rows)
    config = data(prompt_key="extra_info.question", response_key="extra_info.answer")
    assert [prompt.text for prompt in load_prompts(file, tokenizer, config).items] == ["<s>2+3=", "<s>1+1="]
    loaded = load_sft(file, tokenizer, config)
    assert [tokenizer.decode(row.ids[row.mask]) for row in loaded.items] == ["5</s>", "2</s>"]
    with pytest.raises(UserError, match=r"no 'extra_info\.gone'"):
        load_prompts(file, tokenizer, data(prompt_key="extra_info.gone"))


def test_sft_leaves_out_over_long_prompts_and_goes_in_epochs(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"question": "1" * length, "solution": "a long answer"} for length in (5, 3, 2, 1)]
    config = data(max_prompt_tokens=4, prompt_key="question", response_key="solution")
    loaded = load_sft(write_lines(tmp_path / "a.jsonl", rows), tokenizer, config)
    assert (loaded.longest, len(loaded)) == (4 + len("a long answer") + 1, 3)
    assert "4 rows read, 1 left out with prompts of more than 4 tokens" in loaded.describe()
    assert loaded.describe_epoch(2) == "an epoch is 1 step of 2 rows; each epoch leaves out 1 of its 3, too few for a full batch"
    batch, cursor = loaded.take(Cursor(0, 2), 2, seed=0, shuffle=False)
    assert batch == loaded.items[:2] and cursor == Cursor(1, 2)


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ({"prompt": "2"}, "needs 'prompt' and 'response', or 'messages'"),
        ({"prompt": "2", "response": 5}, "'response' is of type int"),
        ({"prompt": "2", "response": ""}, "response is empty"),
        ({"messages": USER}, "must be a list of messages that ends with the assistant's"),
        ({"messages": [{"role": "assistant", "content": "5"}]}, "'5' .assistant. answers nothing"),
        ({"messages": [*USER, *said("a", "5")[1:], *said("a", "6")[1:]]}, "'6' .assistant. answers nothing"),
        ({"prompt": said("a", "5"), "response": "6"}, "'6' .assistant. answers nothing"),
        ({"messages": [{**USER[0], "weight": 1}, {"role": "assistant", "content": "5"}]}, "'2.3=' .user. has the weight 1"),
        ({"messages": [*USER, {"role": "assistant", "content": "5", "weight": 0.5}]}, "'5' .assistant. has the weight 0.5"),
        ({"messages": [*USER, {"role": "assistant", "content": "5", "weight": 0}]}, "nothing to train on"),
        ({"messages": [*USER, {"role": "assistant", "content": ""}]}, "response is empty"),
        ({"messages": [*USER, {"role": "assistant", "tool_calls": [{"name": "add"}]}]}, "its tool_calls would be lost"),
    ],
)
def test_a_broken_sft_row_names_file_and_line(row: dict[str, Any], word: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "1", "response": "1"}, row])
    with pytest.raises(UserError, match=rf"a\.jsonl:2: .*{word}"):
        # The style makes the template write the conversation otherwise than the prompt.
        load_sft(path, tokenizer, data(template_args={"style": "brief"}, apply_template="always"))


def test_sft_needs_a_template_that_writes_the_prompt(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.jsonl:1: the chat template writes nothing before the response"):
        load_sft(write_lines(tmp_path / "a.jsonl", [{"prompt": USER, "response": "1"}]), make_tokenizer(template="{{ '' }}"), data())


def test_sft_needs_an_end_of_sequence_token(tmp_path: Path) -> None:
    endless = make_tokenizer()
    endless.eos_token = None
    with pytest.raises(UserError, match="no end-of-sequence token"):
        load_sft(write_lines(tmp_path / "a.jsonl", [{"prompt": "1", "response": "1"}]), endless, data())


# examples/*/prepare.py


def prepare(*arguments: object, example: str = "gsm8k") -> subprocess.CompletedProcess[str]:
    script = REPOSITORY / "examples" / example / "prepare.py"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    command = [sys.executable, str(script), *(str(argument) for argument in arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


def test_gsm8k_is_prepared_for_rl_and_sft(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    answers = ["48/2 = <<48/2=24>>24 clips.\n#### 24", "It is $<<0.5*10=5.0>>5.\n#### 1,005", "None.\n#### -3"]
    questions = [{"question": f"How many \u00e9 {number}?", "answer": answer} for number, answer in enumerate(answers)]
    (tmp_path / "source").mkdir()
    write_lines(tmp_path / "source" / "train.jsonl", questions)
    write_lines(tmp_path / "source" / "test.jsonl", questions[:1])
    out = tmp_path / "made" / "out"
    result = prepare("--source", tmp_path / "source", "--out", out)
    assert result.returncode == 0, result.stderr
    names = [f"{split}{ending}" for split in ("test", "train") for ending in (".jsonl", ".parquet", "_sft.jsonl")]
    assert sorted(path.name for path in out.iterdir()) == names
    rows = [row for row, _ in read_rows(out / "train.parquet")]
    assert rows == [row for row, _ in read_rows(out / "train.jsonl")]
    assert rows[1] == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {"role": "user", "content": 'How many \u00e9 1? Let\'s think step by step and output the final answer after "####".'},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1005"},
        "extra_info": {"split": "train", "index": 1, "question": "How many \u00e9 1?", "answer": answers[1]},
    }
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["24", "1005", "-3"]
    trained = load_sft(str(out / "train_sft.jsonl"), tokenizer, data()).items[0]
    assert tokenizer.decode(trained.ids[trained.mask]) == "48/2 = 24 clips.\n#### 24</s>"


@pytest.mark.long
def test_preparing_refuses_what_is_not_gsm8k_and_writes_nothing(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    assert "no such folder" in prepare("--source", source, "--out", out).stderr
    source.mkdir()
    write_lines(source / "train.jsonl", [{"question": "q", "answer": "#### 1"}])
    write_lines(source / "test.jsonl", [{"question": "q", "answer": "no number"}])
    result = prepare("--source", source, "--out", out)
    assert result.returncode == 2 and "test.jsonl:1: the answer does not end with" in result.stderr
    assert "Traceback" not in result.stderr and not out.exists()
    assert "is the source itself" in prepare("--source", source, "--out", source).stderr
    assert "--source" in prepare("--help").stdout


def test_problems_are_prepared_once_each_with_their_final_answer(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    solution = "First \\boxed{1}, then it is \\boxed{\\frac{1}{2}} in all."
    pairs = [("a", solution), ("b", " 7 "), ("a ", "\\boxed{\\frac{1}{2}}"), ("c", "1"), ("c", "2")]
    source = write_lines(tmp_path / "source.jsonl", [{"prompt": problem, "solution": answer} for problem, answer in pairs])
    out = tmp_path / "made" / "train.parquet"
    columns = ("--problem", "prompt", "--answer", "solution", "--name", "competition")
    result = prepare("--source", source, "--out", out, *columns, example="math")
    assert result.returncode == 0 and "2 problems; 1 left out that came with more than one answer" in result.stdout, result.stderr
    prompts = load_prompts(str(out), tokenizer, data()).items
    assert [(prompt.ground_truth, prompt.data_source) for prompt in prompts] == [("\\frac{1}{2}", "competition"), ("7", "competition")]
    assert 'a\n\nThink step by step. Write the final answer alone on the last line, after "Answer:".</s>' in prompts[0].text
    write_lines(tmp_path / "source.jsonl", [{"problem": "a", "answer": "\\boxed{1"}])
    result = prepare("--source", source, "--out", tmp_path / "other.parquet", example="math")
    assert result.returncode == 2 and "source.jsonl:1: needs 'problem' and 'answer'" in result.stderr
    assert "Traceback" not in result.stderr and not (tmp_path / "other.parquet").exists()
