"""Reading rows from the files people have.

Enters: the path of a parquet file, a JSON-lines file, an arrow stream, a folder written by Hugging Face's `Dataset.save_to_disk`, or a
folder of data files as on the Hugging Face hub. Leaves: rows as plain dictionaries, one at a time, each with its place for messages.
Guaranteed: rows come in the order of the file (and files in the order of their shards); a missing, broken, incomplete or empty file is a
`UserError` that names the file, the line where there is one, and the remedy; where a folder holds several data sets, none is guessed.

Places: `train.jsonl:17` is line 17, the first being 1, as editors count; `train.parquet row 17` counts from 0, as pandas and pyarrow do.
"""

from __future__ import annotations

import datetime
import decimal
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fulltilt.records import UserError
from fulltilt.schema import MEMORY
from fulltilt.words import listed

PlacedRow = tuple[dict[str, Any], str]
Reader = Callable[[Path], Iterator[PlacedRow]]

_SPLIT_NAMES = frozenset({"train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation"})
_TRAIN_NAMES = frozenset({"train", "training"})
# Written beside the data by `datasets` and by the hub; they describe the data and hold none of it.
_DESCRIPTIONS = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
_BATCH_ROWS = 1024
_SCALARS = (str, int, float, bytes, decimal.Decimal, datetime.date, datetime.time, datetime.timedelta, type(None))
_in_memory: dict[str, tuple[dict[str, Any], ...]] = {}  # rows given from Python, by the name that stands for them in a configuration


def rows_in_memory(rows: Iterable[Mapping[str, Any]]) -> str:
    """A name such as `memory:3f5a...` that stands for these rows wherever a path to data may stand, in this process. The same rows always
    have the same name, so that a run can resume with them. `rows`: a list of dictionaries, a `datasets.Dataset`, or another iterable."""
    if isinstance(rows, Mapping | str | bytes) or not isinstance(rows, Iterable):
        raise UserError(f"data: found {type(rows).__name__}, not rows. Give a list of dictionaries, or one split of a data set.")
    kept = tuple(_plain_row(number, row) for number, row in enumerate(rows))
    if not kept:
        raise UserError("data: holds no rows. Give at least one.")
    found = hashlib.sha256()
    for row in kept:
        found.update(json.dumps(row, default=lambda value: [type(value).__name__, str(value)]).encode() + b"\n")
    name = MEMORY + found.hexdigest()[:32]
    _in_memory[name] = kept
    return name


def _plain_row(number: int, row: object) -> dict[str, Any]:
    place = _memory_place(number)
    if not isinstance(row, Mapping):
        raise UserError(
            f"{place}: found {type(row).__name__}, not a dictionary of columns. Give a list of dictionaries, one split of a data set, or "
            "frame.to_dict('records') of a pandas table."
        )
    try:
        plain: dict[str, Any] = _plain(row)
    except (TypeError, RecursionError) as error:
        raise UserError(f"{place}: {error}. Columns hold text, numbers, lists and dictionaries: convert or remove its column.") from error
    return plain


def _plain(value: Any) -> Any:
    """A copy of lists and dictionaries only, so that nothing that the caller does later changes it."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str)]
        if wrong:
            raise TypeError(f"a key is {wrong[0]!r}, of type {type(wrong[0]).__name__}, not text")
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    raise TypeError(f"a value is of type {type(value).__name__}")


def _memory_place(number: int) -> str:
    return f"rows given from Python, row {number} (counted from 0)"


def _read_memory(name: str) -> Iterator[PlacedRow]:
    rows = _in_memory.get(name)
    if rows is None:
        raise UserError(
            f"{name}: stands for rows that were given from Python, and this process does not have them. Give the same rows again, from "
            "Python, or write them to a file and give its path."
        )
    return ((dict(row), _memory_place(number)) for number, row in enumerate(rows))


def read_rows(path: str | Path) -> Iterator[PlacedRow]:
    """The rows of a file, a folder or a name of `rows_in_memory`, each with its place: `({"prompt": "2+3="}, "train.jsonl:17")`."""
    if str(path).startswith(MEMORY):
        return _read_memory(str(path))
    path = Path(path).expanduser()
    if path.is_dir():
        files = _files_of_folder(path)
    elif path.exists():
        files = [path]
    else:
        raise UserError(f"{path}: no such file or folder. Check data.train and data.val; paths are relative to the folder you start from.")
    # Looked up before the first row is read: a wrong name among the last shards is reported before the first are read.
    readers = [(file, _reader(file)) for file in files]
    return _read_files(path, readers)


def _read_files(path: Path, readers: list[tuple[Path, Reader]]) -> Iterator[PlacedRow]:
    empty = True
    for file, reader in readers:
        for placed in reader(file):
            empty = False
            yield placed
    if empty:
        raise UserError(f"{path}: holds no rows. Write the data again, or remove this path from the configuration.")


def _reader(file: Path) -> Reader:
    reader = _READERS.get(file.suffix.lower())
    if reader is None:
        raise UserError(
            f"{file}: unknown kind of file '{file.suffix}'. Known: {', '.join(_READERS)}, and Hugging Face dataset folders. "
            "Convert it, e.g. with pandas: frame.to_parquet('train.parquet')."
        )
    return reader


def _read_json_lines(file: Path) -> Iterator[PlacedRow]:
    place = str(file)
    try:
        # Read as bytes, so that text in another encoding is reported with its line.
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                place = f"{file}:{number}"
                # Some editors put a byte-order mark before the first line.
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield _json_row(text, place), place
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}). Check its permissions.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8 text ({error.reason} at byte {error.start}). Save the file as UTF-8.") from error


def _json_row(text: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{place}: not valid JSON ({error}). Each line must be one whole JSON object; a JSON list or an indented file must be "
            "rewritten as one object a line."
        ) from error
    if not isinstance(row, dict):
        raise UserError(f'{place}: a JSON {type(row).__name__}, not an object. Each line must be an object such as {{"prompt": ...}}.')
    return row


def _parquet_batches(file: Path) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(file) as parquet:
        yield from parquet.iter_batches(batch_size=_BATCH_ROWS)


def _arrow_batches(file: Path) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
        yield from stream


def _read_batches(batches: Callable[[Path], Iterator[pa.RecordBatch]], file: Path) -> Iterator[PlacedRow]:
    number = 0
    try:
        for batch in batches(file):
            for row in batch.to_pylist():
                yield row, f"{file} row {number} (counted from 0)"
                number += 1
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(
            f"{file}: cannot be read after row {number} ({error}). The file is damaged, incomplete or of another kind than its name "
            "says: download or write it again."
        ) from error


_READERS: Mapping[str, Reader] = {
    ".parquet": partial(_read_batches, _parquet_batches),
    ".jsonl": _read_json_lines,
    ".json": _read_json_lines,
    ".arrow": partial(_read_batches, _arrow_batches),
}


def _files_of_folder(folder: Path) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():
        return _files_of_folder(_train_split(folder))
    if (folder / "state.json").is_file():
        return _saved_files(folder)
    return _hub_files(folder)


def _train_split(folder: Path) -> Path:
    description = folder / "dataset_dict.json"
    splits = _json_file(description).get("splits")
    if not isinstance(splits, list) or not splits:
        raise UserError(f"{description}: names no splits. Save the data set again with DatasetDict.save_to_disk.")
    if "train" not in splits:
        raise UserError(
            f"{folder}: has no split 'train', but {listed(splits)}. Give the folder of the split you mean, e.g. {folder / str(splits[0])}."
        )
    return folder / "train"


def _saved_files(folder: Path) -> list[Path]:
    description = folder / "state.json"
    state = _json_file(description)
    if state.get("_indices_data_files"):
        raise UserError(
            f"{folder}: saved by an old version of `datasets` with a selection of rows kept aside. Load it and call save_to_disk again "
            "with version 2.0 or later."
        )
    try:
        files = [folder / entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise UserError(f"{description}: does not list its data files. Save the data set again with Dataset.save_to_disk.") from error
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise UserError(f"{folder}: data files named in state.json are missing: {listed(missing)}. Copy or save the whole folder again.")
    return files


def _json_file(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, OSError) as error:
        raise UserError(f"{file}: cannot be read ({error}). Copy or save the data set again.") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: not a JSON object. Copy or save the data set again.")
    return content


def _hub_files(folder: Path) -> list[Path]:
    """The data files of a folder as on the hub: those of the training split where files are named by split, otherwise all."""
    found = [file for file in sorted(folder.rglob("*")) if _is_data(file, folder)]
    if not found:
        raise UserError(f"{folder}: no data files inside ({', '.join(_READERS)}). Give a data file, or a folder that holds some.")
    training = [file for file in found if _words(file, folder) & _TRAIN_NAMES]
    chosen = training or found
    if not training and any(_words(file, folder) & _SPLIT_NAMES for file in found):
        raise UserError(f"{folder}: no file of a split 'train', but {_relative(found, folder)}. Give the file you mean.")
    # Shards of one data set are in the same folder and have the same name except for numbers.
    if len({(file.parent, re.sub(r"\d+", "#", file.name)) for file in chosen}) > 1:
        raise UserError(f"{folder}: holds several data sets: {_relative(chosen, folder)}. Give the file you mean, or a list of files.")
    _refuse_missing_shards(folder, chosen)
    return sorted(chosen, key=lambda file: [int(digits) for digits in re.findall(r"\d+", file.name)])


def _is_data(file: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return file.is_file() and not hidden and file.suffix.lower() in _READERS and file.name not in _DESCRIPTIONS


def _words(file: Path, folder: Path) -> set[str]:
    return set(re.findall(r"[a-z]+", str(file.relative_to(folder).with_suffix("")).lower()))


def _refuse_missing_shards(folder: Path, files: list[Path]) -> None:
    counts = {int(match[1]) for file in files if (match := re.search(r"-\d+-of-(\d+)$", file.stem))}
    if counts and counts != {len(files)}:
        wanted = " or ".join(str(count) for count in sorted(counts))
        raise UserError(
            f"{folder}: by its file names the data set has {wanted} files, but {len(files)} are here. Download the folder again."
        )


def _relative(files: list[Path], folder: Path) -> str:
    return listed([str(file.relative_to(folder)) for file in files])
