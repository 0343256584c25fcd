"""Selection of the files of one data set among many: the shards of a split, in their order.

Enters: the names of all files of a folder or of a repository on the hub, relative to it. Leaves: those of one split. Guaranteed: if several
data sets could be meant, or a shard is missing, a `UserError` names the files, and nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

from fulltilt.data.formats import SUFFIXES, suffix_of
from fulltilt.records import UserError
from fulltilt.words import listed

_SPLITS = {
    "train": frozenset({"train", "training"}),
    "test": frozenset({"test", "testing"}),
    "validation": frozenset({"validation", "valid", "val", "dev"}),
    "eval": frozenset({"eval", "evaluation"}),
}
# Files that `datasets` and the hub write beside the data; they describe the data and hold none of it.
_DESCRIPTIONS = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})


def choose_files(found: Sequence[PurePath], where: str, split: str = "train") -> list[PurePath]:
    """Return the data files of a split among all files of a data set, in the order of its shards. `where` is the data set's name, for
    messages."""
    data = [file for file in found if is_data(file)]
    if not data:
        raise UserError(f"{where}: no data files inside ({', '.join(SUFFIXES)}). Give a data file, or a folder that holds some.")
    names = _SPLITS.get(split, frozenset({split.lower()}))
    chosen = [file for file in data if _words(file) & names]
    if not chosen and (split != "train" or any(_words(file) & frozenset().union(*_SPLITS.values()) for file in data)):
        raise UserError(f"{where}: no file of a split '{split}', but {listed(data)}. Give the file or the split that you mean.")
    chosen = chosen or data
    # Shards of one data set are in the same folder and have the same name except for numbers.
    if len({(file.parent, re.sub(r"\d+", "#", file.name)) for file in chosen}) > 1:
        raise UserError(f"{where}: holds several data sets: {listed(chosen)}. Give the file you mean, or a list of files.")
    _refuse_missing_shards(where, chosen)
    return sorted(chosen, key=lambda file: [int(digits) for digits in re.findall(r"\d+", file.name)])


def is_data(file: PurePath) -> bool:
    """Return whether a file of a data set holds rows, by its name."""
    return bool(suffix_of(file)) and file.name not in _DESCRIPTIONS and not any(part.startswith(".") for part in file.parts)


def _words(file: PurePath) -> set[str]:
    return set(re.findall(r"[a-z]+", str(file)[: -len(suffix_of(file))].lower()))


def _refuse_missing_shards(where: str, files: Sequence[PurePath]) -> None:
    counts = {int(match[1]) for file in files if (match := re.search(r"-\d+-of-(\d+)$", file.name[: -len(suffix_of(file))]))}
    if counts and counts != {len(files)}:
        wanted = " or ".join(str(count) for count in sorted(counts))
        raise UserError(f"{where}: by its file names the data set has {wanted} files, but {len(files)} are here. Download it again.")
