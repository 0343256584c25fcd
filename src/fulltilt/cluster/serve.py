"""A worker process from inside: makes its object in the first call, and answers calls over one inherited socket.

Enters: messages of the driver (`wire`). Leaves: items, results and failures. Guaranteed: a thread of its own reads the messages, so that
sending to a worker never waits for its computation; calls run one after the other in the main thread, those started `aside` in a thread
each; whatever a call raises is reported, and so are warnings. The process ends with the driver: by the system's signal where there is one
(Linux), else at the end of the socket. A worker ignores signals that ask processes to stop, since the driver may want to save first.
SIGUSR1 makes it write its stacks, even while it is stuck in C. While it makes its object, it shows progress by the pages of memory that it
fills, not by the clock (`alive`). Imports neither torch nor anything that the driver did not name.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import io
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Generator
from queue import Empty, SimpleQueue
from typing import Any, NoReturn, TextIO

from fulltilt.cluster.alive import LoadedBytes, signs_of_progress
from fulltilt.cluster.hosts import produced
from fulltilt.cluster.output import Output
from fulltilt.cluster.stacks import StackFrame
from fulltilt.cluster.wire import Cancel, Connection, Failure, Hello, Item, KeepOutput, Leave, Result, Start, Tell, Warned, pack
from fulltilt.observe.streams import text_for_user
from fulltilt.records import UserError
from fulltilt.words import first_line

LONGEST_TRACEBACK = 20_000  # characters
STALL_S = "FULLTILT_STALL_S"  # the environment variable for the seconds after which the driver reports a silent worker
SIGNS = 4  # signs of life that a worker with progress sends in this time
_PR_SET_PDEATHSIG = 1


class ProcessInbox:
    """Messages for one call: put by the thread that reads the socket, taken by the call. `send` sends the driver an item of the call."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        self.send = send
        self.sign_s = float(os.environ.get(STALL_S, "45")) / SIGNS
        self._messages: SimpleQueue[list[Any]] = SimpleQueue()  # an empty list only wakes the call
        self.cancelled = False

    def put(self, *messages: Any) -> None:
        self._messages.put(list(messages))

    def cancel(self) -> None:
        self.cancelled = True
        self.put()

    def poll(self) -> list[Any]:
        found: list[Any] = []
        with contextlib.suppress(Empty):
            while True:
                found += self._messages.get_nowait()
        return self._unless_cancelled(found)

    def wait(self, timeout: float | None = None) -> list[Any]:
        found = []
        with contextlib.suppress(Empty):
            found = self._messages.get(timeout=timeout)
        return found + self.poll()

    def _unless_cancelled(self, found: list[Any]) -> list[Any]:
        if self.cancelled:
            raise GeneratorExit
        return found


class Server:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._waiting: SimpleQueue[Start | None] = SimpleQueue()  # calls for the main thread; None: leave
        self._inboxes: dict[int, ProcessInbox] = {}  # by call, for those that have not ended
        self._warned: SimpleQueue[str] = SimpleQueue()  # warnings that the driver has not received yet
        self._output = Output()
        self._worker: Any = None

    def serve(self) -> None:
        threading.Thread(target=self._read, name="messages", daemon=True).start()
        warnings.showwarning = self._show_warning
        self._send(Hello())
        while start := self._waiting.get():
            self._run(start)

    def _show_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """Show a warning in this process's output, and in the driver's if it is for the user."""
        print(warnings.formatwarning(message, category, filename, lineno, line), end="", file=file or sys.stderr)
        text = text_for_user(message, category, filename, lineno)
        if text is not None:
            self._warned.put(text)  # sent later: a destructor may warn while a message is being sent

    def _tell_warnings(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._send(Warned(self._warned.get_nowait()))

    def _read(self) -> None:
        while True:
            try:
                self._take(self._connection.receive())
            except (EOFError, OSError):
                _end_at_once()
            except BaseException as error:
                self._send(failure_of(error, None))

    def _take(self, message: Any) -> None:
        match message:
            case Start(call=call, aside=aside):
                self._inboxes[call] = ProcessInbox(lambda item: self._send(Item(call, item)))
                if aside:
                    threading.Thread(target=self._run, args=(message,), daemon=True).start()
                else:
                    self._waiting.put(message)
            case Tell(call=call, message=told):
                if inbox := self._inboxes.get(call):  # the call may end at any moment
                    inbox.put(told)
            case Cancel(call=call):
                if inbox := self._inboxes.get(call):
                    inbox.cancel()
            case KeepOutput(path):
                self._output.path = path
            case Leave():
                self._waiting.put(None)

    def _run(self, start: Start) -> None:
        self._output.bound()
        try:
            outcome = self._outcome(start)
            self._output.copy()
            self._tell_warnings()
            self._send(outcome)
        except BaseException as error:  # also a result that cannot be pickled
            self._output.copy()
            self._tell_warnings()
            self._send(failure_of(error, start.call))
        finally:
            del self._inboxes[start.call]

    def _outcome(self, start: Start) -> Result:
        inbox = self._inboxes[start.call]
        making = self._worker is None
        running = self._make(start, inbox) if making else produced(getattr(self._worker, start.method), start.args, inbox)
        try:
            while not inbox.cancelled:
                self._send(Item(start.call, next(running)))
            running.close()
        except StopIteration as end:
            return Result(start.call, end.value)
        except GeneratorExit:  # the method looked into the inbox of a cancelled call
            pass
        return Result(start.call, None)

    def _make(self, start: Start, inbox: ProcessInbox) -> Generator[Any, None, None]:
        self._worker = yield from produced(imported_and_called, (start.method, start.args), inbox)
        assert self._worker is not None
        gc.collect()
        gc.freeze()  # objects made so far stay as long as the process; garbage collection over them would sometimes delay a step by 0.2 s

    def _send(self, message: Any) -> None:
        parts = pack(message)
        try:
            self._connection.send(parts)
        except OSError:
            _end_at_once()


def imported_and_called(path: str, args: tuple[bytes, ...], inbox: ProcessInbox) -> Generator[Any, None, Any]:
    """Import a function and call it. `args`: pickled one by one, so that the imports that they need are made here."""
    module, _, name = path.partition(":")
    with signs_of_progress(inbox, LoadedBytes()):
        function = getattr(importlib.import_module(module), name)
        return (yield from produced(function, [pickle.loads(each) for each in args], inbox))


def failure_of(error: BaseException, call: int | None) -> Failure:
    trace = "".join(traceback.format_exception(error))[-LONGEST_TRACEBACK:]
    if isinstance(error, UserError):
        return Failure(call, str(error), trace, is_user_error=True, of_collective=False)
    frames = [StackFrame(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in traceback.walk_tb(error.__traceback__)]
    kind, text = type(error).__name__, first_line(error)
    text = kind if text == kind else f"{kind}: {text}"
    place = f" ({frames[-1]})" if frames else ""
    return Failure(call, f"{text}{place}", trace, is_user_error=False, of_collective=_of_collective(error, frames[-1:]))


def _of_collective(error: BaseException, innermost: list[StackFrame]) -> bool:
    """Return whether torch.distributed raised the error. An operation that is waited for raises without a frame of its own."""
    backend = type(error).__name__.startswith("Dist") or any(name in str(error).lower() for name in ("gloo", "nccl"))
    return backend or any(frame.is_of_collective for frame in innermost)


def _end_at_once() -> NoReturn:
    """End this process and everything that it started, because the driver is gone."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _end_with(driver: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != driver:
        _end_at_once()


def main() -> None:
    connection, stacks, driver = map(int, sys.argv[1:])
    sys.argv = sys.argv[:1]
    _end_with(driver)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for descriptor in (connection, stacks):
        os.set_inheritable(descriptor, False)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stacks)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # what was printed before a crash is not lost
    Server(Connection(socket.socket(fileno=connection))).serve()


if __name__ == "__main__":
    main()
