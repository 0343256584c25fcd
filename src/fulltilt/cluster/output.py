"""The output of a worker's process: its end, for the driver's message about a worker that died, and all of it in a file that stays.

Enters: standard output and error, which go to one file without a name (`child`), and later the path of a file to keep them in. Leaves: that
file, including output from before it had a path. Guaranteed: a file that cannot be written is not an error; no file is made where nothing
was written; output of earlier processes in the same file stays in front.
"""

from __future__ import annotations

import contextlib
import os
import threading

LARGEST_OUTPUT = 16 * 2**20  # bytes of standard output and error that are kept for the driver
BLOCK_BYTES = 2**20
OUTPUT = 1  # the descriptor of standard output


class Output:
    def __init__(self) -> None:
        self.path: str | None = None  # the file to keep, in a folder whose parent exists
        self._file: int | None = None
        self._copied = 0
        self._lock = threading.Lock()  # calls may end in several threads

    def copy(self) -> None:
        """Append new output to the file."""
        if self.path is not None:
            with self._lock, contextlib.suppress(OSError):
                self._copy(self.path)

    def _copy(self, path: str) -> None:
        while new := os.pread(OUTPUT, BLOCK_BYTES, self._copied):
            if self._file is None:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(os.path.dirname(path))
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            self._copied += os.write(self._file, new)

    def bound(self) -> None:
        """Truncate the file without a name once it is large: only its end is of use."""
        self.copy()
        with self._lock, contextlib.suppress(OSError):
            if os.fstat(OUTPUT).st_size > LARGEST_OUTPUT:
                os.ftruncate(OUTPUT, 0)
                self._copied = 0
