"""Sources of a translation beside the configuration: data files, a model's sizes and the memory of a GPU.

Guaranteed: torch is not imported; a missing or unreadable source is None, and a translation then says what it could not compute.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fulltilt.records import UserError
from fulltilt.shape import Shape


@dataclass(frozen=True)
class Surroundings:
    files: bool = True  # whether files may be read
    gpu_bytes: int | None = None  # memory of one GPU; None: not known
    sizes_of: Callable[[str], Mapping[str, Any] | None] | None = None  # a well-known model's sizes by its name, in config.json's form
    keep_engine: bool = False  # whether the engine must be the named one

    @staticmethod
    def here(gpu_bytes: int | None = None, sizes_of: Callable[[str], Mapping[str, Any] | None] | None = None) -> Surroundings:
        return Surroundings(gpu_bytes=gpu_bytes or _smallest_gpu(), sizes_of=sizes_of)

    def rows(self, paths: Sequence[str]) -> int | None:
        """Return the number of rows of all data files together."""
        counts = [_rows(Path(os.path.expanduser(path))) if self.files else None for path in paths]
        return sum(count for count in counts if count is not None) if counts and None not in counts else None

    def sources(self, paths: Sequence[str]) -> list[str] | None:
        """Return the values of the column `data_source`, over all files."""
        found = [_sources(Path(os.path.expanduser(path))) if self.files else None for path in paths]
        return sorted({each for one in found for each in one or ()}) if found and None not in found else None

    def chat_template(self, path: str) -> str | None:
        """Return the text that contains a model's chat template."""
        return _chat_template(Path(os.path.expanduser(path))) if self.files else None

    def weights(self, path: str, itemsize: int = 2) -> int | None:
        """Return the bytes of a model's parameters: of a folder, or of a well-known model by its name on the hub."""
        folder = Path(os.path.expanduser(path))
        try:
            if self.files and (folder / "config.json").is_file():
                shape = Shape.read(folder)
            elif self.sizes_of and (sizes := self.sizes_of(path)) is not None:
                shape = Shape.from_config(sizes)
            else:
                return None
            return sum(shape.parameters_by_kind().values()) * itemsize
        except UserError:
            return None


def _chat_template(folder: Path) -> str | None:
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        try:
            return (folder / name).read_text(encoding="utf-8")
        except (OSError, ValueError):
            continue
    return None


def _rows(path: Path) -> int | None:
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as parquet

            return int(parquet.ParquetFile(path).metadata.num_rows)
        if path.suffix == ".jsonl":
            with path.open("rb") as lines:
                return sum(1 for line in lines if line.strip())
    except (OSError, ValueError):
        return None
    return None


def _sources(path: Path) -> set[str] | None:
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as parquet

            if "data_source" not in parquet.read_schema(path).names:
                return set()
            return {str(each) for each in parquet.read_table(path, columns=["data_source"])["data_source"].unique().to_pylist()}
        if path.suffix == ".jsonl":
            with path.open(encoding="utf-8") as lines:
                rows: list[Any] = [json.loads(line) for line in lines if line.strip()]
            return {str(row["data_source"]) for row in rows if isinstance(row, dict) and "data_source" in row}
    except (OSError, ValueError):
        return None
    return None


def _smallest_gpu() -> int | None:
    """Return the bytes of the GPU with the least memory, from its driver."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
        return min(int(mib) for mib in told) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
