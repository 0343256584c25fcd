"""Chat templates: reading a file with one, and writing conversations with one.

A template comes with a model and is a program. jinja's sandbox keeps it away from the system, but not from running for ever.

Enters: a tokenizer with its template, and messages. Leaves: the text that the template writes. Guaranteed: whatever the template does, the
result is a text or a `UserError`. Its first conversation is tried in a child process, which the system ends after SECONDS of processor
time, whatever it does, and which on Linux may use BYTES more memory; later conversations are interrupted in this process, in any thread, at
the interpreter's next step. The memory of the process itself is not limited: such a limit would hold for all its threads. A `MemoryError`
there is raised as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fulltilt.records import UserError
from fulltilt.words import first_line, in_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS = 5.0  # processor time for one conversation; usual templates take less than a millisecond
BYTES = 4 * 2**30
_CANNOT = "the chat template cannot write this conversation"
_OUT_OF_MEMORY = 3  # the exit status of a child


class TemplateOverdue(BaseException):
    """Raised inside a template that runs for too long. Not an `Exception`, so that no code of a template's filters catches it."""


def read_template(path: str, key: str) -> str:
    """Return the text of a file with a chat template; `key` is the setting that names it."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{key}: {path} is not UTF-8 text ({error.reason} at byte {error.start}). Save the file as UTF-8") from error
    except OSError as error:
        raise UserError(f"{key}: {path} cannot be read ({error.strerror}). Give a file with a chat template") from error
    if not text.strip():
        raise UserError(f"{key}: {path} is empty. Give a file with a chat template")
    return text


def render(tokenizer: PreTrainedTokenizerBase, template: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Return a conversation as a chat template writes it, special tokens included."""
    write = partial(tokenizer.apply_chat_template, list(messages), chat_template=template, tokenize=False, **options)
    try:
        with _rendering:
            if template not in _tried:
                _try_in_child(write)
                _tried.add(template)
            with _deadline.watched():
                return str(write())
    except (UserError, MemoryError):
        raise
    except TemplateOverdue as error:
        raise UserError(f"{_CANNOT}: it was stopped after {SECONDS:.0f} seconds, as it does not seem to end.") from error
    except RecursionError as error:
        raise UserError(f"{_CANNOT}: it calls itself without end.") from error
    except Exception as error:  # a template can raise anything that Python can
        raise UserError(f"{_CANNOT}: {first_line(error).rstrip('.')}.") from error


def _try_in_child(write: Callable[[], Any]) -> None:
    """Use a template for the first time in a child process: an operation such as 9 ** 9 ** 9 never returns to the interpreter, and only
    ending its process stops it. Any other error of the child occurs again in this process, where it is reported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child uses none of the other threads
        child = os.fork()
    if child == 0:
        _write_and_exit(write)
    ended, until = 0, time.monotonic() + 3 * SECONDS
    while not ended and time.monotonic() < until:
        time.sleep(0.002)
        ended, status, used = os.wait4(child, os.WNOHANG)
    if not ended:
        os.kill(child, signal.SIGKILL)
        _, status, used = os.wait4(child, 0)
    # A child that was killed here may only have waited for a busy machine: the template is not blamed for that.
    if os.WIFSIGNALED(status) and used.ru_utime + used.ru_stime > SECONDS / 10:
        raise TemplateOverdue
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _OUT_OF_MEMORY:
        raise UserError(f"{_CANNOT}: it asked for more than {in_bytes(BYTES)} of memory.")


def _write_and_exit(write: Callable[[], Any]) -> NoReturn:
    status = 0
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(SECONDS), math.ceil(SECONDS) + 1))
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        _limit_memory()
        write()
    except MemoryError:
        status = _OUT_OF_MEMORY
    finally:
        os._exit(status)


def _limit_memory() -> None:
    """Limit this process to BYTES more memory than it has now."""
    if sys.platform.startswith("linux"):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        set_before = [limit for limit in resource.getrlimit(resource.RLIMIT_AS) if limit != resource.RLIM_INFINITY]
        least = min([pages * resource.getpagesize() + BYTES, *set_before])
        resource.setrlimit(resource.RLIMIT_AS, (least, least))


class _Deadline:
    """Interrupts a template that runs too long. Signals would reach the main thread only; an exception set by another thread reaches any
    thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None  # the thread in which a template runs
        self._conversation = 0  # number of conversations so far
        self._watcher = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        with self._lock:
            self._thread, self._conversation = threading.get_ident(), self._conversation + 1
            if not self._watcher:
                self._watcher = True
                threading.Thread(target=self._watch, name="template-deadline", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                if self._thread is None:  # the exception has just been set, and must not arrive later
                    _set_exception(threading.get_ident(), None)
                self._thread = None

    def _watch(self) -> None:
        seen, began, used = 0, 0.0, 0.0  # the clocks are read in this thread, because reading them for every row would slow down loading
        while True:
            time.sleep(SECONDS / 20)
            with self._lock:
                if self._thread is None:
                    self._watcher = False
                    return
                now, processor = time.monotonic(), time.process_time()
                if seen != self._conversation:
                    seen, began, used = self._conversation, now, processor
                # Wall time alone would blame the template for a stopped or overloaded machine.
                elif now - began > SECONDS and processor - used > SECONDS / 2:
                    thread, self._thread = self._thread, None  # only once: the thread may already be leaving
                    _set_exception(thread, TemplateOverdue)


def _set_exception(thread: int, kind: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None if kind is None else ctypes.py_object(kind))


_rendering, _deadline = threading.Lock(), _Deadline()
_tried: set[str] = set()  # templates that have finished once
