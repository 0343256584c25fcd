"""Checkpoints that survive a kill at any moment.

Enters: a JSON-able state, and a function that writes the exported model and named tensors (`write_trainer`). Leaves: folders
`step-00000010/` with

    model/               a Hugging Face export; transformers loads it as it is
    trainer.safetensors  named tensors: moments, and master weights where they differ from the model's
    state.json           everything else that a resumed run needs
    manifest.json        written last: format, step, and every file's size and sha256

and `best`, a link to the best of them, if the run names a metric for it. Several workers write one file of tensors each, all at once:
`trainer-00000-of-00004.safetensors` and so on. A key is a tensor's name, or `NAME@START` for a flat piece of it, in row-major order, whose
first number is the tensor's number START. Where the members of a group hold one part each of a model, a tensor's name is `NAME#PART`, and
the file's metadata says how the tensor is cut. `SavedTensors` reads any range of numbers from any set of pieces and parts, so that a run
can resume on another number of workers, however they shard models.

Guaranteed: a folder gets its final name only when all of it is on the disk, so a partial folder left by a kill is never taken for a
checkpoint; the newest intact checkpoint is deleted only after a newer one is in place, and an intact best only after a better one; a file
that is changed or truncated later is detected by its hash, and an incomplete set of workers' files by their names; once a checkpoint is in
place, a link or a deletion that fails is only a warning; files have the umask's modes. Only one process may write to a store at a time:
call `finish` or `abandon` before another one does. With `beside`, `save` returns as soon as its caller may change the saved tensors, and a
thread does the rest; its errors are raised by `finish` or the next `save`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import math
import mmap
import os
import re
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fulltilt.folders import read_file, use_usual_modes, without_waiting
from fulltilt.memory.host import free_host_bytes
from fulltilt.parallel.cuts import CutTensor
from fulltilt.parallel.slices import join, take_part
from fulltilt.records import RunWarning, UserError
from fulltilt.words import in_bytes

FORMAT = 1
MODEL, TENSORS, STATE, MANIFEST = "model", "trainer.safetensors", "state.json", "manifest.json"
SHARD = re.compile(r"trainer-\d{5,}-of-\d{5,}\.safetensors")  # the tensors of one of several workers
PIECE = re.compile(r"(.*)@(\d+)", re.DOTALL)  # the key of a flat piece: the tensor's name, and the number at which the piece begins
PART = re.compile(r"(.*)#(\d+)", re.DOTALL)  # the name of a part of a tensor: the tensor's name, and the rank of the member that holds it
CUTS = "cuts"  # in a file's metadata: the cut of each tensor of which the file has a part
BEST = "best"
FINISHED = re.compile(r"step-(\d{8,})(\.replaced)?")
UNFINISHED = re.compile(r"step-\d{8,}\.partial-\d+|\.trash-.*")
MARGIN_BYTES, MARGIN_SHARE = 16 * 2**20, 0.02  # room for headers, directory blocks and files that other programs write meanwhile
BLOCK_BYTES = 16 * 2**20  # bytes to hash at once
FLUSH_BYTES = 64 * 2**20  # bytes to flush to the disk at once
START_FLUSH, WAIT_FOR_FLUSH = 2, 7  # flags of Linux's sync_file_range
LOST_ON_DISK = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
ALIGNMENT = 64  # bytes to which copied tensors are aligned: enough for any type
COPY_SHARE = 0.25  # share of free main memory for the copies of all workers, which are written while training continues

Digests = dict[str, tuple[int, str]]  # size in bytes and sha256 of files, by their names in the checkpoint


@dataclass(frozen=True)
class Checkpoint:
    """One intact checkpoint."""

    path: Path
    step: int

    @property
    def model_folder(self) -> Path:
        return self.path / MODEL

    @contextlib.contextmanager
    def open(self) -> Iterator[SavedTensors]:
        """Open the tensors for the duration of the block. Tensors that were read stay valid after it."""
        with contextlib.ExitStack() as files:
            opened = [files.enter_context(safe_open(self.path / name, framework="pt")) for name in self._tensor_files()]
            yield SavedTensors(self.path, pieces_of(self.path, opened), cuts_of(opened))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors in their shapes. Only for a checkpoint that one worker wrote."""
        assert len(self._tensor_files()) == 1, "pieces have no shape: use `open`"
        with self.open() as saved:
            return {name: saved.whole(name, saved.shape(name)) for name in saved.names()}

    def arrays(self, prefix: str, worker: int = 0) -> dict[str, np.ndarray]:
        """Return the tensors in a worker's file whose names begin with `prefix`, without the prefix. No other tensor is read."""
        with safe_open(self.path / self._tensor_files()[worker], framework="np") as file:
            return {name.removeprefix(prefix): file.get_tensor(name) for name in file.keys() if name.startswith(prefix)}  # noqa: SIM118

    def _tensor_files(self) -> list[str]:
        """Return the tensor files in the manifest: no other file was verified."""
        return tensor_files(json.loads(read_file(self.path / MANIFEST))["files"])

    def state(self) -> dict[str, Any]:
        """Return the state given to `save`, through JSON: tuples come back as lists, keys as strings."""
        state: dict[str, Any] = json.loads((self.path / STATE).read_text(encoding="utf-8"))
        return state


@dataclass(frozen=True)
class SavedPiece:
    """Consecutive numbers of a tensor in one file of a checkpoint."""

    file: Any  # an open safetensors file
    key: str
    start: int  # place of the first number among the tensor's
    shape: tuple[int, ...]  # the tensor's own shape; for a piece, its length

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return the tensor's flat numbers in this range, which this piece must hold. Only the rows with these numbers are read."""
        row = math.prod(self.shape[1:])
        if not self.shape or not row:  # one number, or none at all
            return self.file.get_tensor(self.key).flatten()[start - self.start : stop - self.start]  # type: ignore[no-any-return]
        first, last = (start - self.start) // row, -(-(stop - self.start) // row)
        begin = self.start + first * row
        return self.file.get_slice(self.key)[first:last].flatten()[start - begin : stop - begin]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class SavedTensors:
    """The tensors of an open checkpoint, in whatever files and pieces. A tensor that was read may be the file itself, mapped into memory:
    copy it before changing it."""

    path: Path
    pieces: Mapping[str, Sequence[SavedPiece]]  # by name, in order, without gaps; for a tensor in parts, by NAME#0, NAME#1 …
    cuts: Mapping[str, CutTensor] = field(default_factory=dict)  # how tensors in parts were cut
    _joined: dict[str, torch.Tensor] = field(default_factory=dict)  # the last joined tensor, flat

    def names(self) -> list[str]:
        return sorted({name if (cut := PART.fullmatch(name)) is None else cut[1] for name in self.pieces})

    def size(self, name: str) -> int:
        """Return how many numbers the tensor has."""
        return math.prod(self.cuts[name].shape) if name in self.cuts else self.pieces[name][-1].stop

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that was saved whole, or in parts. A tensor in pieces is flat: its shape was not saved."""
        if name in self.cuts:
            return self.cuts[name].shape
        pieces = self.pieces[name]
        return pieces[0].shape if len(pieces) == 1 else (self.size(name),)

    def part(self, name: str, wanted: CutTensor, rank: int, start: int, stop: int) -> torch.Tensor:
        """Return a range of numbers, flat, of a member's part of a tensor, however the tensor was saved."""
        if self.cuts.get(name) == wanted:
            return self._part(name, rank)[1](start, stop)
        return take_part(wanted.cut, self.whole(name, wanted.shape), rank).reshape(-1)[start:stop]

    def _part(self, name: str, rank: int) -> tuple[tuple[int, ...], Callable[[int, int], torch.Tensor]]:
        """Return the shape of a saved part, and a function that reads a range of its numbers. Raises UserError if the part is missing."""
        shape, part = self.cuts[name].cut.shape(self.cuts[name].shape, rank), f"{name}#{rank}"
        if part not in self.pieces or self.size(part) != math.prod(shape):
            raise damaged(self.path, f"part {rank} of {name} is missing or of another size")
        return shape, partial(self.numbers, part)

    def _join(self, name: str) -> torch.Tensor:
        """Return a tensor in parts, flat. It is kept until another one is joined, since its ranges are often read one after another."""
        if name not in self._joined:
            own, parts = self.cuts[name], []
            for rank in range(own.size):
                shape, numbers = self._part(name, rank)
                parts.append(numbers(0, math.prod(shape)).view(shape))
            self._joined.clear()
            self._joined[name] = join(own.cut, parts).view(-1)
        return self._joined[name]

    def numbers(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return a range of the tensor's numbers, flat. Raises UserError if the range goes beyond the saved numbers."""
        assert 0 <= start <= stop, f"numbers {start} to {stop} of {name}"
        if stop > self.size(name):
            raise damaged(self.path, f"{name} has {self.size(name)} numbers, fewer than {stop}")
        if name in self.cuts:
            return self._join(name)[start:stop]
        meets = [piece for piece in self.pieces[name] if piece.start < stop and piece.stop > start]
        found = [piece.read(max(start, piece.start), min(stop, piece.stop)) for piece in meets]
        if not found:
            first = self.pieces[name][0]
            return first.read(first.start, first.start)
        return found[0] if len(found) == 1 else torch.cat(found)

    def whole(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Return the tensor in this shape. Raises UserError if it has another number of numbers."""
        if self.size(name) != math.prod(shape):
            raise damaged(self.path, f"{name} has {self.size(name)} numbers, which do not fill the shape {list(shape)}")
        return self.numbers(name, 0, self.size(name)).view(tuple(shape))

    def select(self, prefix: str = "", *, without: tuple[str, ...] = ()) -> SavedTensors:
        """Return only the tensors whose names begin with `prefix`, without the prefix, except those whose names begin with one of
        `without`."""
        chosen = {name: pieces for name, pieces in self.pieces.items() if name.startswith(prefix) and not name.startswith(without)}
        cuts = {
            name.removeprefix(prefix): cut for name, cut in self.cuts.items() if name.startswith(prefix) and not name.startswith(without)
        }
        return SavedTensors(self.path, {name.removeprefix(prefix): pieces for name, pieces in chosen.items()}, cuts)


@dataclass(frozen=True)
class BestCheckpoint:
    """The step and the metric of the best checkpoint. Example: BestCheckpoint("-val/loss", 30, 1.25) is the checkpoint of step 30; with a
    minus, lower is better."""

    metric: str
    step: int
    value: float

    def beats(self, other: BestCheckpoint | None) -> bool:
        sign = -1 if self.metric.startswith("-") else 1
        return other is None or sign * self.value > sign * other.value


Write = Callable[[Path, bool], Callable[[], Digests] | None]
Found = TypeVar("Found", Checkpoint, Checkpoint | None)
Result = TypeVar("Result")


class CheckpointStore:
    """The checkpoints of one run: at most `keep` intact ones, the newest, and the best one."""

    def __init__(self, folder: Path, keep: int) -> None:
        assert keep > 0
        self.folder = Path(folder)
        self.keep = keep
        self.newest = 0  # step of the checkpoint that `latest` found or `save` began to write; 0: none
        self.on_saved: Callable[[], None] = lambda: None  # called when a checkpoint is in place, by whichever thread wrote it
        self.best: BestCheckpoint | None = None  # kept in addition to the newest `keep`
        self.skipped: list[str] = []  # folders that the last call of `latest` or `find_best` rejected, with reasons
        self._verified: set[Path] = set()  # hashed or written by this process, so that rotation need not read them again
        self._background: Future[None] | None = None  # the save that a background thread is writing
        self._thread: threading.Thread
        self._stop = threading.Event()  # tells the background save to stop
        self._before = 0  # `newest` before the background save began

    def save(
        self, step: int, state: Mapping[str, Any], write: Write, written_bytes: int, *, beside: bool = False,
        best: BestCheckpoint | None = None,
    ) -> Path:  # fmt: skip
        """Write a checkpoint, then delete those beyond `keep` and `best`. `write` fills the given folder, which exists, with about
        `written_bytes` and may add to the state; its second argument says whether it may leave a part to the function that it returns,
        which returns the digests of files that need not be read again.

        With `beside`, the checkpoint is in place only after `finish`: a thread hashes, waits for the disk and deletes, and also writes the
        tensors if a copy of them fits well into main memory. Raises UserError when the disk is full or not writable; then no checkpoint has
        changed and no partial folder is left.
        """
        self.finish()
        target = self.path(step)
        unfinished = self.folder / f"{target.name}.partial-{os.getpid()}"
        needed = len(json.dumps(state, indent=1)) + written_bytes
        with self._whole_or_nothing(step, unfinished, needed):
            self._clean_up()
            self.require_space(needed)
            unfinished.mkdir(parents=True)
            later = write(unfinished, beside)
            (unfinished / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
            if beside:
                self._background = Future()
                rest = (step, unfinished, target, needed, later, best)
                # A daemon thread: a disk that hangs must not keep the process from ending.
                self._thread = threading.Thread(target=self._in_background, args=(self._background, rest), name="checkpoint", daemon=True)
                self._thread.start()
        if not beside:
            self._complete(step, unfinished, target, needed, later, best)
        self._before, self.newest = self.newest, step
        return target

    def finish(self, *, wait: bool = True) -> None:
        """Wait until the background save is in place; without `wait`, only check whether it has ended. Raises its errors."""
        if self._background is not None and (wait or self._background.done()):
            error = self._background.exception()
            self._thread.join()  # the thread still frees its tensors
            self._background = None  # not earlier: the wait can be interrupted
            if error is not None:
                self.newest = self._before
                raise error.with_traceback(None)  # the traceback's frames would hold the tensors

    def abandon(self) -> None:
        """Stop the background save after its current file, as a kill would, without raising its errors."""
        if self._background is not None:
            self._stop.set()
            with contextlib.suppress(Exception):
                self.finish()
            self._stop.clear()

    def _in_background(self, future: Future[None], rest: tuple[Any, ...]) -> None:
        try:
            self._complete(*rest)
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise CancelledError

    def _complete(
        self, step: int, unfinished: Path, target: Path, needed: int, later: Callable[[], Digests] | None, best: BestCheckpoint | None
    ) -> None:
        """Complete a save. Reads nothing that training changes."""
        with self._whole_or_nothing(step, unfinished, needed):
            self._go_on()
            known = later() if later is not None else {}
            write_manifest(unfinished, step, self._go_on, known)
            self._go_on()
            self._put_in_place(unfinished, target)
        self._verified.add(target)
        with warn_if_refused("the run's folder does not say that there is a checkpoint"):
            self.on_saved()
        self._point_to(best)
        self._rotate(step)

    @contextlib.contextmanager
    def _whole_or_nothing(self, step: int, unfinished: Path, needed: int) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            remove(unfinished)  # before free space is reported
            if not isinstance(error, Exception) or system_error_number(error) is None:
                raise
            raise UserError(
                f"the checkpoint of step {step} could not be written to {self.folder}: {error}. {in_bytes(needed)} are needed, "
                f"{in_bytes(self._free_bytes())} are free; free some space or make the folder writable, or set run.dir to another disk"
            ) from error

    def holds(self, step: int) -> bool:
        """Return whether a checkpoint of this step is in place, without reading it."""
        return self.path(step).is_dir()

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def latest(self, *, hashes: bool = True) -> Checkpoint | None:
        """Return the newest checkpoint whose files are complete and unchanged. Writes nothing, and reads every byte of it; without
        `hashes`, only the sizes of its files."""
        self.finish()
        found = self._first_intact(self._finished, hashes)
        self.newest = found.step if found else 0
        return found

    def find_best(self) -> Checkpoint | None:
        """Return the checkpoint that `best` points to, if its files are complete and unchanged."""
        link = self.folder / BEST
        return self._first_intact(lambda: [(path, step) for path, step in self._finished() if path.resolve() == link.resolve()])

    def _first_intact(self, known: Callable[[], list[tuple[Path, int]]], hashes: bool = True) -> Checkpoint | None:
        self.skipped = []
        for path, step in known():
            damage = find_damage(path, step, hashes)
            if damage is None:
                self._verified |= {path} if hashes else set()
                return Checkpoint(path, step)
            if path.exists():
                self.skipped.append(f"{path}: {damage}")
            else:  # a run that is still training has deleted it, and has newer checkpoints
                return self._first_intact(known, hashes)
        return None

    def at(self, step: int) -> Checkpoint:
        """Return the checkpoint of one step. Raises UserError if it is missing or damaged."""
        there = dict(reversed([(number, path) for path, number in self._finished()]))
        if step not in there:
            steps = ", ".join(map(str, sorted(there)))
            others = f"those of steps {steps}" if len(there) > 1 else f"that of step {steps}" if there else "none"
            raise UserError(f"{self.folder} has no checkpoint of step {step}; it has {others}")
        if damage := find_damage(there[step], step):
            raise damaged(there[step], damage)
        return Checkpoint(there[step], step)

    def tidy(self, best: BestCheckpoint | None) -> None:
        """Finish the work of a killed process: the link to the best checkpoint, deletions, an interrupted replacement. Call it after
        `latest`."""
        with warn_if_refused(f"what a killed process has left in {self.folder} is still there"):
            self._clean_up()
        self._point_to(best if best and self.holds(best.step) else None)
        if any(self.best is None or step != self.best.step for _, step in self._finished()[self.keep :]):
            self._rotate(self.newest)

    def _point_to(self, best: BestCheckpoint | None) -> None:
        link, new = self.folder / BEST, self.folder / f".{BEST}"
        self.best = best
        with warn_if_refused(f"the link {link} to the best checkpoint is out of date"):
            new.unlink(missing_ok=True)  # a killed process may have left it
            if best is not None:
                new.symlink_to(f"step-{best.step:08d}")
                new.replace(link)
            elif link.is_symlink():
                link.unlink()

    def _finished(self) -> list[tuple[Path, int]]:
        """Return finished checkpoints, newest first; for one step, the new one before the one that it replaces."""
        if not self.folder.is_dir():
            return []
        matches = [(path, FINISHED.fullmatch(path.name)) for path in sorted(self.folder.iterdir())]
        found = [(path, int(match[1])) for path, match in matches if match and path.is_dir()]
        return sorted(found, key=lambda entry: entry[1], reverse=True)

    def _clean_up(self) -> None:
        """Clean up after a killed process: delete partial folders, and undo an interrupted replacement."""
        if not self.folder.is_dir():
            return
        for path in list(self.folder.iterdir()):
            if UNFINISHED.fullmatch(path.name):
                remove(path)
        for path, step in self._finished():
            if path.suffix == ".replaced":
                if path.with_suffix("").exists():
                    self._delete(path)
                else:
                    path.rename(self.path(step))

    def require_space(self, needed: int) -> None:
        """Raise UserError unless a checkpoint of `needed` bytes fits."""
        wanted, free = needed + max(MARGIN_BYTES, int(needed * MARGIN_SHARE)), self._free_bytes()
        if wanted > free:
            raise UserError(
                f"not enough disk space for a checkpoint: {in_bytes(wanted)} needed, {in_bytes(free)} free in {self.folder}. "
                "Nothing was written. Free some space, lower run.keep, or set run.dir to another disk"
            )

    def _free_bytes(self) -> int:
        existing = next(folder for folder in (self.folder.absolute(), *self.folder.absolute().parents) if folder.exists())
        return shutil.disk_usage(existing).free

    def _put_in_place(self, unfinished: Path, target: Path) -> None:
        replaced = target.with_suffix(".replaced")
        if target.exists():
            # `latest` reads the replaced one until the new one has its name: a kill between the two renames loses nothing.
            self._verified.discard(target)
            target.rename(replaced)
        unfinished.rename(target)
        sync_folder(self.folder)
        with warn_if_refused(f"{replaced} was not deleted and still takes space"):
            if replaced.exists():
                self._delete(replaced)

    def _rotate(self, saved: int) -> None:
        """Keep the checkpoint just saved, the next intact ones before it, and the best one if it is intact; otherwise forget which was
        best. A later checkpoint, from which a resumed run fell back, is deleted if it is damaged; an intact one is the user's and stays."""
        with warn_if_refused(f"checkpoints beyond run.keep were not deleted from {self.folder} and still take space"):
            self._delete_all_but_kept(saved)
        if self.best and not self.holds(self.best.step):
            text = f"the best checkpoint, that of step {self.best.step}, was damaged or deleted: the search for the best one starts again"
            warnings.warn(text, RunWarning, stacklevel=2)
            self._point_to(None)

    def _delete_all_but_kept(self, saved: int) -> None:
        kept = 1
        for path, step in self._finished():
            if step == saved:
                continue
            intact = find_damage(path, step, hashes=path not in self._verified) is None
            if intact and (step > saved or kept < self.keep or (self.best and step == self.best.step)):
                self._verified.add(path)
                kept += step < saved
            else:
                self._delete(path)

    def _delete(self, path: Path) -> None:
        # Renamed first, so that an interrupted deletion cannot be taken for a checkpoint.
        trash = self.folder / f".trash-{path.name}-{time.time_ns()}"
        path.rename(trash)
        self._verified.discard(path)
        sync_folder(self.folder)
        remove(trash)


def copy_to_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """Copy tensors into one separate memory, which returns to the system with the last of the copies: memory that `malloc` gives for
    tensors below 32 MiB may stay with the process. Returns None if the system refuses so much memory."""
    sizes = [tensor.nbytes for tensor in tensors.values()]
    *begins, count = accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)
    try:
        held = mmap.mmap(-1, max(1, count), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # not every system has huge pages, which halve the time of a copy
            held.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(held, dtype=torch.uint8)
    return {
        name: whole[begin : begin + size].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        for (name, tensor), begin, size in zip(tensors.items(), begins, sizes, strict=True)
    }


def tensors_file(rank: int, size: int) -> str:
    """Return the name of the file with the tensors of worker `rank` of `size`."""
    return TENSORS if size == 1 else f"trainer-{rank:05d}-of-{size:05d}.safetensors"


def tensor_files(listed: Iterable[str]) -> list[str]:
    """Return the tensor files in a manifest, in order of rank; none if they are not exactly those of one save."""
    found = sorted(name for name in listed if name == TENSORS or SHARD.fullmatch(name))
    return found if found == [tensors_file(rank, len(found)) for rank in range(len(found))] else []


def pieces_of(path: Path, files: Iterable[Any]) -> dict[str, list[SavedPiece]]:
    """Return the pieces of every tensor in a checkpoint's open files, in order. A whole tensor that several workers wrote is read from the
    first worker's file."""
    found: dict[str, list[SavedPiece]] = {}
    for file in files:
        for key in file.keys():  # noqa: SIM118 (not a mapping)
            match = PIECE.fullmatch(key)
            name, start = (match[1], int(match[2])) if match else (key, 0)
            if match or not any(piece.key == key for piece in found.get(name, ())):
                found.setdefault(name, []).append(SavedPiece(file, key, start, tuple(file.get_slice(key).get_shape())))
    for name, pieces in found.items():
        pieces.sort(key=lambda piece: (piece.start, piece.stop))
        ends = (0, *(piece.stop for piece in pieces[:-1]))
        for piece, end in zip(pieces, ends, strict=True):
            if piece.start != end:
                raise damaged(path, f"the pieces of {name} do not meet at its number {end}")
    return found


def cuts_of(files: Iterable[Any]) -> dict[str, CutTensor]:
    """Return how tensors in parts are cut, from a checkpoint's open files."""
    found: dict[str, CutTensor] = {}
    for file in files:
        given = json.loads((file.metadata() or {}).get(CUTS, "{}"))
        found |= {name: CutTensor.from_json(cut) for name, cut in given.items()}
    return found


def damaged(path: Path, why: str) -> UserError:
    return UserError(f"{path}: the checkpoint is damaged: {why}. Choose another step")


def write_trainer(
    folder: Path, tensors: Mapping[str, torch.Tensor], export: Callable[[Path], None], *, beside: bool, rank: int = 0, size: int = 1,
    here: int = 1, cuts: Mapping[str, CutTensor] | None = None,
) -> Callable[..., Digests]:  # fmt: skip
    """Write the tensors of worker `rank` of `size` into a checkpoint's folder, and the first worker's exported model. With `beside`, and if
    copies of all `here` workers of this machine fit well into main memory, the tensors are only copied. Returns a function that does the
    rest, in any thread: it writes the copy, and hashes the worker's file unless there is only one worker. Its argument, if any, is called
    after each piece of that file."""
    if rank == 0:
        (folder / MODEL).mkdir()
        export(folder / MODEL)
    fits = beside and here * sum(tensor.nbytes for tensor in tensors.values()) <= COPY_SHARE * free_host_bytes()
    copies = copy_to_host(tensors) if fits else None
    if copies is None:
        write_tensors(folder, tensors, rank, size, cuts)
    return partial(finish_trainer, folder, copies, rank, size, cuts)


def finish_trainer(
    folder: Path, copies: dict[str, torch.Tensor] | None, rank: int, size: int, cuts: Mapping[str, CutTensor] | None,
    go_on: Callable[[], None] = lambda: None,
) -> Digests:  # fmt: skip
    if copies is not None:
        write_tensors(folder, copies, rank, size, cuts)
        copies.clear()  # their memory is not needed while the file is hashed
    return hash_files(folder, [folder / tensors_file(rank, size)], go_on) if size > 1 else {}


def write_tensors(
    folder: Path, tensors: Mapping[str, torch.Tensor], rank: int = 0, size: int = 1, cuts: Mapping[str, CutTensor] | None = None
) -> None:
    """Write a worker's tensors to its file. `cuts`: of tensors that workers save in parts."""
    metadata = {CUTS: json.dumps({name: cut.to_json() for name, cut in cuts.items()})} if cuts else None
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / tensors_file(rank, size), metadata)


def hash_files(folder: Path, paths: Iterable[Path], go_on: Callable[[], None] = lambda: None) -> Digests:
    """Hash files of a checkpoint's folder, and flush them to the disk. `go_on`: called after each piece; no piece takes long."""
    found: Digests = {}
    for path in paths:
        with path.open("rb") as stream:
            digest, hashed = hashlib.sha256(), 0
            while block := stream.read(BLOCK_BYTES):
                go_on()
                digest.update(block)
                flush_range(stream.fileno(), hashed, len(block), START_FLUSH)
                hashed += len(block)
            found[path.relative_to(folder).as_posix()] = (os.fstat(stream.fileno()).st_size, digest.hexdigest())
            for begin in range(0, hashed, FLUSH_BYTES):
                flush_range(stream.fileno(), begin, FLUSH_BYTES, WAIT_FOR_FLUSH)
                go_on()
            os.fsync(stream.fileno())
    return found


def flush_range(descriptor: int, begin: int, count: int, flags: int) -> None:
    """Flush some bytes of a file to the disk, where the system can do that, because `fsync` of a large file may take minutes without a sign
    of progress. `fsync` must still follow, since only it flushes everything that belongs to the file."""
    if sys.platform != "linux":
        return
    call = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if call and call(descriptor, ctypes.c_int64(begin), ctypes.c_int64(count), flags) and (number := ctypes.get_errno()) in LOST_ON_DISK:
        raise OSError(number, os.strerror(number))


def write_manifest(folder: Path, step: int, go_on: Callable[[], None] = lambda: None, known: Digests | None = None) -> None:
    """Flush everything in the folder to the disk, the manifest last. `known`: digests of files that their writers have hashed and
    flushed."""
    use_usual_modes(folder)
    known = known or {}
    unread = sorted(path for path in folder.rglob("*") if path.is_file() and path.relative_to(folder).as_posix() not in known)
    digests = hash_files(folder, unread, go_on) | known
    files = {name: {"bytes": count, "sha256": digest} for name, (count, digest) in digests.items()}
    for below in sorted(path for path in folder.rglob("*") if path.is_dir()):
        sync_folder(below)
    with (folder / MANIFEST).open("w", encoding="utf-8") as stream_out:
        json.dump({"format": FORMAT, "step": step, "files": files}, stream_out, indent=1)
        stream_out.flush()
        os.fsync(stream_out.fileno())
    sync_folder(folder)


def find_damage(folder: Path, step: int, hashes: bool = True) -> str | None:
    """Return why this folder is not an intact checkpoint of that step, or None if it is. Sizes are checked first, at no cost."""
    try:
        manifest = json.loads(read_file(folder / MANIFEST))
        if manifest["format"] != FORMAT:
            return f"its format is {manifest['format']}, this version reads {FORMAT}"
        if manifest["step"] != step:
            return f"its manifest names step {manifest['step']}"
        listed = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        return f"{MANIFEST} is not readable ({type(error).__name__}: {error})"
    if STATE not in listed:
        return f"{MANIFEST} does not list {STATE}"
    if not tensor_files(listed):
        return f"{MANIFEST} lists neither {TENSORS} nor exactly the files of one number of workers"
    try:
        for name, (count, _) in listed.items():
            actual = (folder / name).stat().st_size
            if actual != count:
                return f"{name} has {actual} bytes instead of {count}"
        for name, (_, digest) in listed.items() if hashes else ():
            with open(folder / name, "rb", opener=without_waiting) as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != digest:
                    return f"{name} has changed since it was written (sha256 differs)"
    except FileNotFoundError as error:
        return f"{os.path.relpath(error.filename, folder)} is missing"
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL character
        return f"not readable: {error}"
    return None


def sync_folder(folder: Path) -> None:
    """Flush a folder to the disk: a rename or a new file is on the disk only when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def warn_if_refused(consequence: str) -> Iterator[None]:
    """Turn a refusal of the system into a warning, where no checkpoint depends on the operation and the next save repeats it."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"{consequence}: {error}. The checkpoints themselves are complete", RunWarning, stacklevel=3)


def remove(folder: Path) -> None:
    if folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError as error:
            # Not a reason to end the run: the folder's name marks it as incomplete, and the next save tries to delete it again.
            warnings.warn(f"{folder} could not be deleted and still takes space: {error}", RunWarning, stacklevel=2)


def system_error_number(error: BaseException) -> int | None:
    """Return the errno of a failed write. safetensors and tokenizers have it only in their messages."""
    if isinstance(error, OSError):
        return error.errno
    match = re.search(r"\(os error (\d+)\)|Os \{ code: (\d+)", str(error))
    return int(match[1] or match[2]) if match else None


def open_checkpoint(find: Callable[[], Found], read: Callable[[Found], Result], warn: Callable[[str], None]) -> Result:
    """Return what `read` returns for the checkpoint that `find` returns. A run that is still training may delete the checkpoint meanwhile;
    then `find` is called again."""
    while True:
        found = find()
        try:
            return read(found)
        except Exception:  # the exception for a missing file depends on the library
            if found is None or found.path.exists():
                raise
            warn(f"{found.path} was deleted by its run while it was read: the next checkpoint is taken")
