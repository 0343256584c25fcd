"""The folder of a run, while one process holds it.

Enters: `run.dir`. Leaves: a `RunFolder`, locked until its context ends. Guaranteed: only a new, an empty or a run's own folder is opened;
two processes never hold the same folder; metrics and rollouts whose checkpoints were deleted are moved to `before-1/`, `before-2/`, ... and
never overwritten; a folder that is removed or renamed during the run is noticed before more is written; write permissions that the owner
has lost are restored.

The marker `.fulltilt` is also the lock. Its first line says what it is; a second line says that the run has had a checkpoint: without a
checkpoint, a killed run's results are computed again. A marker with any other content, such as an empty one made by a user, counts as that
of a run with a checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from fulltilt.folders import RUN_MARKER, move_aside, refuse_foreign
from fulltilt.records import RunWarning, UserError
from fulltilt.words import listed

SNAPSHOT, PLAN, METRICS, ROLLOUTS, VALIDATION = "snapshot.toml", "plan.json", "metrics.jsonl", "rollouts", "validation"
WORKERS = "workers"  # the folder with the output of workers in other processes
MARKER_TEXT = "The folder of a fulltilt run. While this file is here, fulltilt writes and deletes files in the folder.\n"
HAD_CHECKPOINT = "The run has had a checkpoint.\n"


class RunFolder:
    def __init__(self, path: Path, marker: TextIO) -> None:
        """`marker`: the open marker file, locked until the run ends."""
        self.path = path
        self._marker = marker
        marker.seek(0)
        self.had_checkpoint = marker.read() != MARKER_TEXT

    def note_checkpoint(self) -> None:
        """Note that the run has a checkpoint: from now on, metrics and rollouts are kept even if all checkpoints are deleted."""
        if not self.had_checkpoint:
            self._marker.write(HAD_CHECKPOINT)
            self._marker.flush()
            self.had_checkpoint = True

    def move_aside(self) -> Path | None:
        """Move the metrics and rollouts of a run whose checkpoints were deleted. Returns the folder that holds them now; None if there are
        none. From then on the folder is that of a run without a checkpoint."""
        if not self.had_checkpoint:
            return None
        found = [path for name in (METRICS, ROLLOUTS, VALIDATION) if has_content(path := self.path / name)]
        with self.writing():
            aside = move_aside(found, self.path)
            for path in (self.path / SNAPSHOT, self.path / PLAN):
                if aside and path.is_file():
                    shutil.copy(path, aside)
            self._marker.truncate(0)
            self._marker.write(MARKER_TEXT)
            self._marker.flush()
        self.had_checkpoint = False
        return aside

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"run.dir: {self.path} cannot be written: {error.strerror}. Use another folder") from error

    def require_in_place(self) -> None:
        """Raise UserError if the folder is no longer the one that the run opened. Restore its owner's permission to write."""
        self._restore_modes()
        held = os.fstat(self._marker.fileno())
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self.path / RUN_MARKER), held):
                return
        moved = moved_to(self._marker) if held.st_nlink else None
        if moved:
            raise UserError(
                f"run.dir: {self.path} was moved to {moved} during the run, which has stopped. Its files are there. To resume it, repeat "
                f"the command with run.dir={moved}"
            )
        raise UserError(
            f"run.dir: {self.path}, or the file {RUN_MARKER} in it, was deleted during the run, which has stopped since nothing can be "
            "saved there. Repeat the command to start the run again"
        )

    def _restore_modes(self) -> None:
        """Restore lost modes: no sandbox keeps a reward function from changing modes."""
        if lost := [str(path) for path in self._written() if made_writable(path)]:
            warnings.warn(f"the mode of {listed(lost)} was changed during the run and has been restored", RunWarning, stacklevel=2)

    def _written(self) -> Iterator[Path]:
        """Yield the paths that a run must be able to write, outermost first."""
        yield self.path
        yield from map(self.path.joinpath, (RUN_MARKER, SNAPSHOT, PLAN, METRICS, ROLLOUTS, VALIDATION, "checkpoints"))
        yield from self.path.glob("checkpoints/*/")


def made_writable(path: Path) -> bool:
    """Make a path usable for its owner. Returns whether it was not before, and now is."""
    with contextlib.suppress(OSError):
        mode = path.stat().st_mode
        needed = 0o700 if stat.S_ISDIR(mode) else 0o600
        if mode & needed != needed:
            path.chmod(stat.S_IMODE(mode) | needed)
            return True
    return False


def has_content(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.is_file() and path.stat().st_size > 0


def moved_to(marker: TextIO) -> Path | None:
    """Return the folder in which an open file is now; None if the system does not tell."""
    with contextlib.suppress(OSError):
        return Path(os.readlink(f"/proc/self/fd/{marker.fileno()}")).parent
    return None


@contextlib.contextmanager
def open_run_folder(path: Path, *, new: bool = False) -> Iterator[RunFolder]:
    """Create the folder if there is none, and lock it: two processes would destroy each other's work. `new`: whether it was not a run's
    folder when the run was prepared; if it is one now, another process was faster."""
    refuse_foreign(path, RUN_MARKER, "run.dir")
    other = f"run.dir: another process is running in {path}. Wait for it, or use another folder"
    try:
        path.mkdir(parents=True, exist_ok=True)
        marker = open(path / RUN_MARKER, "a+", encoding="utf-8", errors="replace")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"run.dir: {path} cannot be written: {error.strerror}. Choose another folder") from error
    with marker:
        try:
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(other) from None
        except OSError as error:
            raise UserError(f"run.dir: {path} cannot be locked: {error.strerror}. Use a folder on another file system") from error
        if os.fstat(marker.fileno()).st_size == 0:
            marker.write(MARKER_TEXT if new else MARKER_TEXT + HAD_CHECKPOINT)
            marker.flush()
        elif new:
            raise UserError(other)
        yield RunFolder(path, marker)
