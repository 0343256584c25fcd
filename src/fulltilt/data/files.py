"""Finding the rows of a data set: in files and folders, on the Hugging Face hub, or in the memory of this process.

Enters: a path, a name such as `openai/gsm8k/main:train`, or a name of `rows_in_memory`. Leaves: a `DataSource`: rows as plain dictionaries,
one at a time, each with its location for messages. Guaranteed: rows come in the order of the file (and files in the order of their shards);
a file that is missing, broken, incomplete, empty or not a data file is a `UserError` that names it and the remedy; if a folder holds
several data sets, none is guessed; only a name that cannot be meant as a path is looked up on the hub.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePath
from typing import Any

from fulltilt.data import hub
from fulltilt.data.formats import SUFFIXES, PlacedRow, plain_row, read_rows_of, suffix_of
from fulltilt.data.shards import choose_files
from fulltilt.records import RunWarning, UserError
from fulltilt.schema import MEMORY, hub_dataset
from fulltilt.words import listed, many

_MOST_FILES = 100_000
_TELL_S = 10.0  # seconds between two messages about reading rows from Python
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_in_memory: dict[str, tuple[dict[str, Any], ...]] = {}  # rows given from Python, by their names in a configuration


@dataclass(frozen=True)
class DataSource:
    rows: Iterator[PlacedRow]
    version: str = ""  # repository and commit that the rows of a hub name were read from, to read the same ones again
    files: tuple[Path, ...] = ()  # the files that were chosen for a folder or a name on the hub


def open_data(name: str | Path) -> DataSource:
    """Open the rows of a path, a name on the hub or a name of `rows_in_memory`."""
    given = str(name)
    if given.startswith(MEMORY):
        return DataSource(_read_memory(given))
    path = Path(given).expanduser()
    dataset = hub_dataset(given)
    if dataset is not None:
        fetched = hub.fetch(dataset)
        return DataSource(_read_files(given, fetched.files), fetched.version, fetched.files)
    files = _files_of_folder(path) if _is_folder(path) else [path]
    # Looked up before the first row is read: a wrong name among the last shards is reported before the first are read.
    for file in files:
        _refuse_unknown_kind(file)
    return DataSource(_read_files(given, files), files=() if files == [path] else tuple(files))


def read_rows(path: str | Path) -> Iterator[PlacedRow]:
    """Yield the rows of a data set, each with its location: `({"prompt": "2+3="}, "train.jsonl:17")`."""
    return open_data(path).rows


def _is_folder(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        where = "Check data.train and data.val; paths are relative to the folder you start from."
        raise UserError(f"{path}: no such file or folder. {where}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be opened ({reason}). Check data.train and data.val.") from error
    if stat.S_IFMT(mode) in _KINDS:
        raise UserError(f"{path}: {_KINDS[stat.S_IFMT(mode)]}, not a file. Data is read more than once: write it to a file first.")
    return stat.S_ISDIR(mode)


def _read_files(name: str, files: Sequence[Path]) -> Iterator[PlacedRow]:
    empty = True
    for file in files:
        for placed in read_rows_of(file):
            empty = False
            yield placed
    if empty:
        raise UserError(f"{name}: holds no rows. Write the data again, or remove this path from the configuration.")


def _refuse_unknown_kind(file: Path) -> None:
    if not suffix_of(file):
        raise UserError(
            f"{file}: unknown kind of file '{file.suffix}'. Known: {', '.join(SUFFIXES)}, and Hugging Face dataset folders. "
            "Convert it, e.g. with pandas: frame.to_parquet('train.parquet')."
        )


# ---- rows given from Python ----------------------------------------------------------------------------------------------------------


def rows_in_memory(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a name such as `memory:3f5a...` for these rows, which may be used instead of any path to data, in this process. The same rows
    always have the same name, so that a run can resume with them. `rows`: a list of dictionaries, a `datasets.Dataset`, or another
    iterable."""
    accepted = "Give a list of dictionaries, one split of a data set, or frame.to_dict('records') of a pandas table."
    if isinstance(rows, Mapping | str | bytes) or not isinstance(rows, Iterable):
        raise UserError(f"found {type(rows).__name__}, not rows. {accepted}")
    kept, found = [], hashlib.sha256()
    told_at = time.monotonic() + _TELL_S
    for number, row in enumerate(rows):
        if time.monotonic() > told_at:
            text = f"{many(number, 'row')} read from Python so far. A run begins once all have been read"
            warnings.warn(text, RunWarning, stacklevel=2)
            told_at += _TELL_S
        if not isinstance(row, Mapping):
            raise UserError(f"{_memory_place(number)}: found {type(row).__name__}, not a dictionary of columns. {accepted}")
        kept.append(plain_row(row, _memory_place(number)))
        found.update(json.dumps(kept[-1], default=lambda value: [type(value).__name__, str(value)]).encode() + b"\n")
    if not kept:
        raise UserError("holds no rows. Give at least one row, or a path.")
    name = MEMORY + found.hexdigest()[:32]
    _in_memory[name] = tuple(kept)
    return name


def forget_rows(name: str) -> None:
    """Free the rows behind a name of `rows_in_memory`."""
    _in_memory.pop(name, None)


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


# ---- folders -------------------------------------------------------------------------------------------------------------------------


def _files_of_folder(folder: Path) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():
        return _files_of_folder(_train_split(folder))
    if (folder / "state.json").is_file():
        return _saved_files(folder)
    return _files_below(folder)


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
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{file}: cannot be read ({error}). Copy or save the data set again.") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: not a JSON object. Copy or save the data set again.")
    return content


def _files_below(folder: Path) -> list[Path]:
    """Return the data files of a folder as on the hub: those of the training split if files are named by split, otherwise all."""
    names = list(islice(_names_below(folder), _MOST_FILES + 1))
    if len(names) > _MOST_FILES:
        raise UserError(f"{folder}: holds more than {_MOST_FILES} files. Give the folder of one data set.")
    return [folder / name for name in choose_files(sorted(names), str(folder))]


def _names_below(folder: Path) -> Iterator[PurePath]:
    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror}). Check its permissions.") from error

    for parent, _, names in os.walk(folder, onerror=refuse):
        yield from (Path(parent, name).relative_to(folder) for name in names if Path(parent, name).is_file())
