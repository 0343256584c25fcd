"""Standard output and standard error, which a command may lose at any moment, and the text that libraries write to them.

Enters: text. Leaves: the same text, as long as someone can read it. Guaranteed: writing to an `Outlet` never raises, even if the stream is
lost: its reader or its terminal is gone, the disk is full, or it was closed before the command began. A character that the stream's
encoding does not have is written as an escape.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO, cast

from fulltilt.records import RunWarning
from fulltilt.words import printable

SHOW_ALL = "FULLTILT_WARNINGS"  # environment variable that shows the messages of libraries
LIBRARIES = (str(Path(__file__).parents[1]), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


class Outlet:
    """A text stream that outlives its reader."""

    def __init__(self, stream: TextIO | None) -> None:
        """Wrap a stream, which is None if the descriptor was closed before Python began."""
        self.lost: Exception | None = None if stream else OSError(errno.EBADF, "it is closed")
        self._stream = stream or open(os.devnull, "w")  # noqa: SIM115 (open as long as the process)
        self._on_loss: Callable[[str], None] | None = None
        self.owns_descriptor = False  # whether the stream is this process's own, and not one that a Python program lent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def loss_is_told(self) -> bool:
        """Whether someone reports the loss of this stream when it happens."""
        return self._on_loss is not None

    @property
    def reason(self) -> str:
        """Reason of the loss, to follow a colon."""
        if isinstance(self.lost, BrokenPipeError):
            return "its reader has gone"
        return getattr(self.lost, "strerror", None) or str(self.lost)

    def tell_loss(self, tell: Callable[[str], None]) -> None:
        """Call `tell` once with the reason when the stream is lost, or now if it was lost before."""
        self._on_loss = tell
        if self.lost:
            tell(self.reason)

    def write(self, text: str) -> int:
        if self.lost:
            return len(text)
        with self._surviving():
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                encoding = self._stream.encoding
                self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        with self._surviving():
            self._stream.flush()

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:  # a program that shares the stream has made it non-blocking, and its reader is slow
            with contextlib.suppress(OSError, ValueError):
                os.set_blocking(self._stream.fileno(), True)
                self._stream.flush()
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            if self.lost:
                return
            self.lost = error
            if self.owns_descriptor:
                self._discard()
            if self._on_loss:
                self._on_loss(self.reason)

    def _discard(self) -> None:
        """Let the descriptor discard the text of child processes, of libraries and of Python's own flush at exit, too."""
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def outlet(stream: TextIO | Outlet | None) -> Outlet:
    return stream if isinstance(stream, Outlet) else Outlet(stream)


def protect() -> tuple[Outlet, Outlet]:
    """Make standard output and standard error of this process outlive their readers. Returns both."""
    # Otherwise the next files to be opened would get the numbers of closed descriptors, and messages would be written into them.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115 (open as long as the process)
    out, error = outlet(sys.stdout), outlet(sys.stderr)
    out.owns_descriptor = error.owns_descriptor = True
    sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, error)
    return out, error


def wrapped(text: str, stream: TextIO) -> str:
    """Break the text's long lines between words for a terminal, which would break them anywhere. In a file they stay whole."""
    if not stream.isatty():
        return text
    columns = os.get_terminal_size(stream.fileno()).columns or 80
    return "\n".join(
        textwrap.fill(
            line, columns, subsequent_indent=" " * (len(line) - len(line.lstrip())), break_long_words=False, break_on_hyphens=False
        )
        for line in text.split("\n")
    )


def quiet_libraries() -> None:
    """Keep warnings, reports and progress bars of libraries from the console. Errors, the package's own warnings and those about a user's
    own files are still shown. Python's option -W, or the environment variable FULLTILT_WARNINGS, shows everything again."""
    if sys.warnoptions or os.environ.get(SHOW_ALL):
        return
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    warnings.showwarning = _show_warning


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
) -> None:
    text = text_for_user(message, category, filename, lineno)
    if text is not None:
        print(printable(f"warning: {text}"), file=file or sys.stderr)


def text_for_user(message: Warning | str, category: type[Warning], filename: str, lineno: int) -> str | None:
    """Return the text to show for a warning; None: it is a library's, and about none of the user's files."""
    if issubclass(category, RunWarning):
        return str(message)
    if os.path.isfile(filename) and not filename.startswith(LIBRARIES):
        return f"{filename}:{lineno}: {message}"
    return None
