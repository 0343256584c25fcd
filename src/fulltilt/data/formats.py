"""Reading one data file: JSON lines, a JSON list or CSV, each also compressed with gzip; parquet; an arrow stream.

Enters: a file whose name says its format. Leaves: its rows as plain dictionaries, in order, each with its location for messages.
Guaranteed: unreadable content of any kind is a `UserError` that names the file, the row and the remedy; a name that disagrees with the
content is reported before the first row is read; a key or column that a row has twice is refused; a row is text that can be encoded, and
never nested deeper than MOST_DEPTH; a file that unpacks to far more than its size is refused as early as possible. A JSON list is held in
memory as a whole; other files are read line by line or in batches of rows, of a parquet file in batches of bounded size. A `MemoryError` is
passed on: it does not mean a bad file.

Locations: `train.jsonl:17` is line 17, the first being 1, as editors count; `train.parquet row 17` counts from 0, as pandas and pyarrow
do.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import gzip
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fulltilt.folders import substitute_in
from fulltilt.records import UserError
from fulltilt.words import first_line, in_bytes, listed

PlacedRow = tuple[dict[str, Any], str]
Reader = Callable[[Path], Iterator[PlacedRow]]

MOST_DEPTH = 64
_MOST_LINE_BYTES = 2**28
_UNPACKED_BYTES, _UNPACKED_RATIO = 2**30, 200  # a file that exceeds both is refused; text packs to a tenth, seldom to a hundredth
_BATCH_ROWS = 64  # with fewer rows reading takes longer, with more it is not faster
_SCALARS = (int, float, bytes, decimal.Decimal, datetime.date, datetime.time, datetime.timedelta, type(None))
_HALF_OF_A_PAIR = re.compile("[\ud800-\udfff]")
_CELLS_WITH_OBJECTS = frozenset({"extra_info", "reward_model"})
_PARQUET, _ARROW, _GZIP = "a parquet file", "an arrow stream", "compressed with gzip"
_MAGIC = {  # first bytes of files that are not text, in lower case
    b"par1": _PARQUET,
    b"\xff\xff\xff\xff": _ARROW,
    b"\x1f\x8b": _GZIP,
    b"arrow1": "an arrow file of the random-access format, of which only streams are read",
    b"pk\x03\x04": "a zip archive",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
}


def read_rows_of(file: Path) -> Iterator[PlacedRow]:
    """Yield the rows of a data file, each with its location."""
    read = 0
    try:
        _refuse_other_content(file)
        for placed in _READERS[suffix_of(file)](file):
            yield placed
            read += 1
    except (UserError, MemoryError):
        raise
    except Exception as error:  # any error that the decoders raise for wrong content
        if isinstance(error, OSError) and error.errno:
            raise UserError(f"{file}: cannot be read ({error.strerror}). Check its permissions.") from error
        raise UserError(
            f"{file}: cannot be read after row {read} ({first_line(error)}). The file is damaged, incomplete or of another kind than its "
            "name says: download or write it again."
        ) from error


def suffix_of(file: PurePath) -> str:
    """Return the end of the file's name that says its format, such as `.jsonl.gz`; an empty string if there is none."""
    return next((suffix for suffix in _READERS if file.name.lower().endswith(suffix)), "")


def plain_row(row: object, place: str) -> dict[str, Any]:
    """Return a copy of a row that consists only of Python's own types, so that later changes to the original do not affect it."""
    if not isinstance(row, Mapping):
        raise UserError(f"{place}: found {type(row).__name__}, not an object of columns.")
    plain: dict[str, Any] = {}
    for name, value in row.items():
        try:
            plain |= _plain({name: value})
        except UserError as error:
            raise UserError(f"{place}: column {name!r}: {error} Change it, or remove the column.") from error
    return plain


def _plain(value: Any, depth: int = 0) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, str):
        if not value.isascii() and (half := _HALF_OF_A_PAIR.search(value)):
            raise UserError(f"the text has half of a surrogate pair (\\u{ord(half[0]):04x}), which is not a character.")
        return value
    if isinstance(value, _SCALARS):
        return value
    if depth > MOST_DEPTH:
        raise UserError(f"lists and objects are nested more than {MOST_DEPTH} deep.")
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str)]
        if wrong:
            raise UserError(f"the key {wrong[0]!r} is of type {type(wrong[0]).__name__}; keys must be strings.")
        return {_plain(key): _plain(entry, depth + 1) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, depth + 1) for entry in value]
    raise UserError(f"a value of type {type(value).__name__} cannot be used: columns hold text, numbers, lists and objects.")


def _refuse_other_content(file: Path) -> None:
    with file.open("rb") as opened:
        head = opened.read(64)
    if substitute := substitute_in(head):
        raise UserError(f"{file}: {'. '.join(substitute)}.")
    suffix = suffix_of(file)
    expected = _GZIP if suffix.endswith(".gz") else {".parquet": _PARQUET, ".arrow": _ARROW}.get(suffix)
    found = next((kind for magic, kind in _MAGIC.items() if head.lower().startswith(magic)), None)
    if found and found != expected:
        raise UserError(f"{file}: its name ends in {suffix}, but its content is {found}. Rename it, or write the file again.")


def _refuse_twice(names: Iterable[str], file: Path) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UserError(f"{file}: the column {twice[0]!r} is there twice, and which is meant is not known. Rename or remove one of them.")


def _refuse_bomb(file: Path, size: int, unpacked: int) -> None:
    if unpacked > _UNPACKED_BYTES and unpacked > _UNPACKED_RATIO * size:
        raise UserError(f"{file}: unpacks to more than {_UNPACKED_RATIO} times its size. Give it unpacked, as JSON lines, if it is right.")


# ---- text --------------------------------------------------------------------------------------------------------------------------


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    """Yield each line of a text file, unpacked, with its location."""
    size, read, number = file.stat().st_size, 0, 0
    with file.open("rb") as stored, gzip.open(stored) if suffix_of(file).endswith(".gz") else stored as stream:
        # Read as bytes, so that text in another encoding is reported with its line.
        while line := stream.readline(_MOST_LINE_BYTES + 1):
            read, number = read + len(line), number + 1
            place = f"{file}:{number}"
            if len(line) > _MOST_LINE_BYTES:
                raise UserError(f"{place}: the line has more than {in_bytes(_MOST_LINE_BYTES)}. Write one row a line.")
            _refuse_bomb(file, size, read)
            try:
                # Some editors put a byte-order mark before the first line.
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise UserError(f"{place}: not UTF-8 text ({error.reason} at byte {error.start}). Save the file as UTF-8.") from error
            yield text, place


def _refuse_carriage_returns(text: str, file: Path) -> None:
    if "\r" in text.rstrip("\r\n"):
        remedy = "Save it with LF or CRLF at the end of lines."
        raise UserError(f"{file}: its lines end in a carriage return (CR) alone. {remedy}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise UserError(f"the key {key!r} is there twice, and which is meant is not known. Remove one of them.")
    return found


_JSON = json.JSONDecoder(object_pairs_hook=_object)


def _json_value(text: str, start: int, place: str, remedy: str) -> tuple[Any, int]:
    """Return the JSON value that begins at `start`, and where it ends."""
    try:
        return _JSON.raw_decode(text, start)
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not valid JSON ({error}). {remedy}") from error


def _json_row(row: object, text: str, place: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UserError(f'{place}: a JSON {type(row).__name__}, not an object. Each row must be an object such as {{"prompt": ...}}.')
    # The whole row is checked only if its text could contain something that is refused.
    suspicious = "\\ud" in text or "\\uD" in text or text.count("[") + text.count("{") > MOST_DEPTH
    return plain_row(row, place) if suspicious else row


def _read_json_lines(file: Path) -> Iterator[PlacedRow]:
    remedy = "Each line must be one whole JSON object; a file named .json may also be one list of objects."
    for text, place in _lines(file):
        if line := text.strip():
            row, end = _json_value(line, 0, place, remedy)
            if end != len(line):
                _refuse_carriage_returns(line, file)
                raise UserError(f"{place}: not valid JSON (extra text after column {end}). {remedy}")
            yield _json_row(row, line, place), place


def _read_json(file: Path) -> Iterator[PlacedRow]:
    """Read one list of objects, or one object a line."""
    first = next((text.strip() for text, _ in _lines(file) if text.strip()), "")
    if first.startswith("["):
        return _read_json_list(file)
    _refuse_one_object(file, first)
    return _read_json_lines(file)


def _refuse_one_object(file: Path, first: str) -> None:
    """Refuse a file that is one object, over several lines or with its columns as lists, instead of rows."""
    try:
        found = json.loads(first)
        is_row = (
            not isinstance(found, dict) or not found or any(not isinstance(each, list) or _are_messages(each) for each in found.values())
        )
    except (ValueError, RecursionError):
        try:
            found, is_row = json.loads("".join(text for text, _ in _lines(file))), False
        except (ValueError, RecursionError):
            return
    if isinstance(found, dict) and not is_row:
        keys, remedy = listed([repr(key) for key in found]), "Write a list of rows, with pandas: frame.to_json(file, orient='records')."
        raise UserError(f"{file}: one JSON object with the keys {keys}, not rows. {remedy}")


def _read_json_list(file: Path) -> Iterator[PlacedRow]:
    text = "".join(text for text, _ in _lines(file)).strip()
    position, number, remedy = 1, 0, "The file must be one list of JSON objects with commas between them, or one object a line."
    separator, end = re.compile(r"\s*"), re.compile(r"\s*]")
    while not (closed := end.match(text, position)):
        place = f"{file} row {number} (counted from 0)"
        start = separator.match(text, position)
        if start is None:
            wrong = "no comma follows" if text[position:].strip() else "the list is not closed after"
            raise UserError(f"{file}: {wrong} row {number - 1} (counted from 0). {remedy}")
        row, position = _json_value(text, start.end(), place, remedy)
        yield _json_row(row, text[start.end() : position], place), place
        separator, number = re.compile(r"\s*,\s*"), number + 1
    if closed.end() != len(text):
        raise UserError(f"{file}: has text after the end of its list. {remedy}")


def _read_csv(file: Path) -> Iterator[PlacedRow]:
    before = csv.field_size_limit(_MOST_LINE_BYTES)
    try:
        first = next((text for text, _ in _lines(file)), "")
        if first.count('"') == 0 or "\n" not in first:
            _refuse_carriage_returns(first, file)
        rows = csv.reader((text for text, _ in _lines(file)), strict=True)
        header = next(rows, [])
        _refuse_twice(header, file)
        if spaced := [name for name in header if name != name.strip()]:
            remedy = "Remove them, and those after the commas of the rows: cells keep their spaces."
            raise UserError(f"{file}: the header has spaces around the column name {spaced[0]!r}. {remedy}")
        for cells in filter(None, rows):
            place = f"{file}:{rows.line_num}"
            if len(cells) != len(header):
                remedy = "Put cells that contain commas, quotes or line breaks between quotes."
                raise UserError(f"{place}: the row has {len(cells)} cells, but the header has {len(header)}. {remedy}")
            yield {name: _cell(name, cell, place) for name, cell in zip(header, cells, strict=True)}, place
    finally:
        csv.field_size_limit(before)


def _cell(name: str, text: str, place: str) -> Any:
    """Return a cell's text, or the value of JSON text: messages in any column, an object in a column that holds objects. An empty cell is
    missing."""
    if text.startswith("[{'"):
        raise UserError(f"{place}: column {name!r} has messages as Python prints them. Write them with json.dumps, or save parquet.")
    if text.startswith("[") or (text.startswith("{") and name in _CELLS_WITH_OBJECTS):
        try:
            value, end = _JSON.raw_decode(text)
        except UserError as error:
            raise UserError(f"{place}: column {name!r}: {error}") from error
        except (ValueError, RecursionError):
            return text
        if not text[end:].strip() and (_are_messages(value) or isinstance(value, dict)):
            return _json_row({name: value}, text, place)[name]
    return text or None


def _are_messages(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, dict) and "role" in entry for entry in value)


# ---- arrow -------------------------------------------------------------------------------------------------------------------------


def _read_parquet(file: Path) -> Iterator[PlacedRow]:
    with pq.ParquetFile(file) as parquet:
        yield from _placed(file, parquet.schema_arrow.names, _parquet_batches(file, parquet))


def _parquet_batches(file: Path, parquet: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    """Yield batches of rows that take at most about _UNPACKED_BYTES, unless a single row takes more."""
    groups = [_stored_bytes(parquet.metadata.row_group(number)) for number in range(parquet.num_row_groups)]
    size, read = file.stat().st_size, 0
    _refuse_bomb(file, size, sum(groups))
    for number, stored in enumerate(groups):
        # A value that is stored once can be in many rows, and no value is larger than all that its group of rows stores.
        rows = min(_BATCH_ROWS, max(1, _UNPACKED_BYTES // max(1, stored)))
        for batch in parquet.iter_batches(batch_size=rows, row_groups=[number]):
            read += batch.nbytes
            _refuse_bomb(file, size, read)
            yield batch


def _stored_bytes(group: pq.RowGroupMetaData) -> int:
    columns = (group.column(number) for number in range(group.num_columns))
    # Equal consecutive values are stored once with their count, and take 8 bytes each when read.
    return sum(max(column.total_uncompressed_size, 8 * column.num_values) for column in columns)


def _read_arrow(file: Path) -> Iterator[PlacedRow]:
    with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
        yield from _placed(file, stream.schema.names, stream)


def _placed(file: Path, names: Sequence[str], batches: Iterable[pa.RecordBatch]) -> Iterator[PlacedRow]:
    _refuse_twice(names, file)
    number = 0
    for batch in batches:
        batch.validate(full=True)  # a damaged stream could make pyarrow read outside its memory
        for row in _rows_of(batch, file):
            yield row, f"{file} row {number} (counted from 0)"
            number += 1


def _rows_of(batch: pa.RecordBatch, file: Path) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = batch.to_pylist()
    except MemoryError:
        raise
    except Exception:
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                column.to_pylist()
            except Exception as error:
                what = f"the column {name!r} of type {column.type} cannot be read ({first_line(error)})"
                raise UserError(f"{file}: {what}. Remove the column, or convert it to text.") from error
        raise
    return found


_READERS: Mapping[str, Reader] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".jsonl.gz": _read_json_lines,
    ".json.gz": _read_json,
    ".csv.gz": _read_csv,
    ".arrow": _read_arrow,
}
SUFFIXES = tuple(_READERS)
