"""Checks of folders and files before commands write to them or read them: commands write only to their own folders, empty ones and new
ones.

Enters: a path that a user gave, before anything is written there. Leaves: nothing, or a UserError that says what is there. Guaranteed: no
file of another program is overwritten or deleted. A folder belongs to a command if it holds that command's marker.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from fulltilt.records import UserError
from fulltilt.words import listed

RUN_MARKER, DEMO_MARKER, BENCH_MARKER = ".fulltilt", ".fulltilt-demo", ".fulltilt-bench"
MODEL_WEIGHTS = ("model*.safetensors", "adapter_model.*", "pytorch_model*.bin")
BESIDE_WEIGHTS = (
    *("*config.json", "*.index.json", "*token*.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "*.py"),
    *("chat_template.*", "additional_chat_templates/*"),
)
SAMPLES, SAMPLE_BYTES = 256, 2**17  # the digest of a larger file is made from this many pieces of this size
NAMED = 3  # at most this many entries of a folder are named in an error


def refuse_foreign(folder: Path, marker: str, key: str) -> None:
    """Raise UserError unless the folder holds `marker`, is empty, or can be made. `key`: the key or option that names the folder."""
    try:
        inside = sorted(os.listdir(folder))
    except FileNotFoundError:
        inside = []
        parent = next(parent for parent in folder.absolute().parents if os.path.lexists(parent))
        try:
            os.rmdir(tempfile.mkdtemp(prefix=marker, dir=parent))  # modes do not tell about /proc or about a full file system
        except OSError as error:
            why = f"{parent} is not a folder that can be written ({error.strerror})"
            raise UserError(f"{key}: {folder} cannot be made: {why}. Use another folder") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL character
        raise UserError(f"{key}: {folder} cannot be used: {getattr(error, 'strerror', error)}. Use another folder") from None
    if marker == RUN_MARKER and marker not in inside and any(folder.glob("checkpoints/step-*/manifest.json")):
        raise UserError(
            f"{key}: {folder} holds checkpoints of a run, but not the run's file {marker}. Nothing was changed. To resume the run, create "
            f"an empty file {marker} there; otherwise use another folder"
        )
    if inside and marker not in inside:
        raise UserError(
            f"{key}: {folder} holds {listed(inside, NAMED)}, which fulltilt did not write there: it has no file {marker}. Nothing was "
            "changed. Use another folder; it need not exist"
        )


def move_aside(found: Sequence[Path], folder: Path) -> Path | None:
    """Move the entries found in the folder into the first of `before-1/`, `before-2/`, ... that does not exist there. Returns that folder;
    None if nothing was found."""
    if not found:
        return None
    aside = next(path for number in count(1) if not os.path.lexists(path := folder / f"before-{number}"))
    aside.mkdir()
    for path in found:
        path.rename(aside / path.name)
    return aside


def without_waiting(path: str, flags: int) -> int:
    """Open a file as an `opener` for `open`: a pipe in place of a file is empty, or cannot be written, instead of waiting for its other
    end."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def read_file(path: Path) -> bytes:
    with open(path, "rb", opener=without_waiting) as stream:
        return stream.read()


def substitute_in(start: bytes) -> tuple[str, str] | None:
    """Return what is in place of a file that was never downloaded, judged by its first bytes, with the remedy; None: it may be the file
    itself."""
    begins = start.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if begins.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the file itself", "Run `git lfs pull` in that folder"
    if begins.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        return "it is a web page, not the file itself", "Download or copy it again"
    return None


def refuse_foreign_json(file: Path, key: str, option: str) -> None:
    """Raise UserError if the file exists and is not a JSON object with `key`, which all files of `option` have. Devices are not checked."""
    try:
        if not file.is_file() or file.stat().st_size == 0:
            return
    except OSError as error:
        raise UserError(f"{option}: {file} cannot be used: {error.strerror}. Give another name") from error
    try:
        found: Any = json.loads(read_file(file))
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or key not in found:
        raise UserError(f"{option}: {file} exists, and fulltilt did not write it. Nothing was changed. Give another name, or delete it")


def use_usual_modes(folder: Path) -> None:
    """Give every file below the folder the mode of a new file: safetensors makes files that only their owner can read."""
    probe = folder / f".mode-{os.getpid()}"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_mode & 0o777 != mode:
            path.chmod(mode)


def content_digests(folder: Path) -> dict[str, str]:
    """Return a digest of each file that loading the model or the adapter may read, by its name in the folder: of weights by samples, so
    that large models cost little, of all others by the whole content."""
    files = {
        path: most for most, kinds in ((SAMPLES, MODEL_WEIGHTS), (None, BESIDE_WEIGHTS)) for kind in kinds for path in folder.glob(kind)
    }
    return {path.relative_to(folder).as_posix(): content_digest(path, most) for path, most in sorted(files.items()) if path.is_file()}


def content_digest(file: Path, samples: int | None = None) -> str:
    """Return a digest of the file's size and content; for a large file, of about `samples` samples, spread evenly from its first byte
    on."""
    size = file.stat().st_size
    found = hashlib.sha256(str(size).encode())
    distance = max(SAMPLE_BYTES, (size - SAMPLE_BYTES) // (samples - 1)) if samples else SAMPLE_BYTES
    with file.open("rb") as opened:
        for place in range(0, size, distance):
            opened.seek(place)
            found.update(opened.read(SAMPLE_BYTES))
    return found.hexdigest()
