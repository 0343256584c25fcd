"""One worker process as the trainer sees it: started, talked to without ever blocking, killed with all it started.

Its standard output and input are /dev/null. Messages go over a socket of its own (`worker` says in which form). What the interpreter
writes when it crashes goes into a pipe that is read only afterwards; the kernel bounds the pipe, and nobody waits for a reader.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fulltilt.reward.worker import LOST_CONNECTION, Request, family_of

PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
# Finds this very fulltilt, then takes its folder off the path again so that nothing in it can hide a module of the standard library.
BOOTSTRAP = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import fulltilt
del sys.path[0]
from fulltilt.reward.worker import main
main()
"""
EXIT_GRACE_S = 0.25
LARGEST_ANSWER = 16 * 2**20  # bytes


class BadMessage(Exception):
    """What arrived from a worker process is not what a worker sends."""


@dataclass(eq=False)
class RewardCall:
    """A request with what only the trainer knows of it."""

    request: Request
    label: Any  # the caller's own, handed back with the outcome
    fresh: bool = False  # must run in a process that has run nothing before


class WorkerProcess:
    def __init__(self, setup: bytes) -> None:
        """Starts it. OSError if the system refuses."""
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            crash_log, crash_log_end = os.pipe()
            undo.callback(os.close, crash_log)
            try:
                self._process = _start(theirs.fileno(), crash_log_end)
            finally:
                theirs.close()
                os.close(crash_log_end)
            undo.pop_all()
        ours.setblocking(False)
        os.set_blocking(crash_log, False)
        self._socket = ours
        self._crash_log = crash_log
        self._received = b""  # the beginning of the next message
        self._unsent = bytearray()
        # What the process is doing, kept up to date by the dispatcher.
        self.greeted = False
        self.ready = False
        self.calls: deque[RewardCall] = deque()
        self.finished = 0
        self.began = time.monotonic()  # the current call, or loading
        self.send(setup)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, payload: bytes) -> None:
        self._unsent += payload
        self.flush()

    def flush(self) -> None:
        """Sends what the socket takes now."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            # The worker is gone: reading its end of file tells the dispatcher.
            self._unsent.clear()

    @property
    def unsent(self) -> bool:
        return bool(self._unsent)

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """Messages that have arrived, and whether the connection still stands. BadMessage if something else came."""
        messages: list[dict[str, Any]] = []
        while True:
            try:
                data = self._socket.recv(2**18)
            except BlockingIOError:
                return messages, True
            except OSError:
                return messages, False
            if not data:
                return messages, False
            *lines, self._received = (self._received + data).split(b"\n")
            messages += map(_decoded, lines)
            if len(self._received) > LARGEST_ANSWER:
                raise BadMessage("too long")

    def cause_of_death(self) -> tuple[str, str]:
        """After the connection broke: what happened, in words, and what the interpreter said."""
        self.wait(EXIT_GRACE_S)
        code = self._process.poll()
        if code is None or code == LOST_CONNECTION:
            return "closed the descriptors of its process", ""
        said = self._crash_report()
        places = [line.strip() for line in said.splitlines() if line.strip().startswith("File ")]
        if code >= 0:
            return f"ended its process with exit code {code}", said
        hint = " (the machine may be out of memory)" if code == -signal.SIGKILL else ""
        return f"crashed with {signal.Signals(-code).name}{hint}{f' at {places[0]}' if places else ''}", said

    def _crash_report(self) -> str:
        try:
            return os.read(self._crash_log, 2**16).decode(errors="replace")
        except OSError:
            return ""

    def kill(self) -> None:
        """Ends the process, its group and what left its group, and closes the connection. Does not wait."""
        family = family_of(self.pid, generations=8) if self._process.returncode is None else []
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for member in family:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(member, signal.SIGKILL)
        self._socket.close()
        os.close(self._crash_log)

    def reaped(self) -> bool:
        return self._process.poll() is not None

    def wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)


class Guard:
    """The trainer's end of the guard process, told which groups live."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def tell(self, sign: str, pid: int) -> None:
        """`+`: this process group lives; `-`: it does not any more."""
        assert self._process.stdin is not None
        # Without its guard a worker still ends with the trainer, but what its function started may go on.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._process.stdin.fileno(), f"{sign}{pid}\n".encode())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _decoded(message: bytes) -> dict[str, Any]:
    try:
        decoded = json.loads(message)
    except (ValueError, RecursionError) as error:
        raise BadMessage("not JSON") from error
    if not isinstance(decoded, dict):
        raise BadMessage("not an object")
    return decoded


def _start(connection: int, crash_log: int) -> subprocess.Popen[bytes]:
    # There is a process for every core already, and thread pools take address space for every core of the machine.
    environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # Otherwise the order of a set of strings, and a score that depends on it, would change from worker to worker.
    environment.setdefault("PYTHONHASHSEED", "0")
    return subprocess.Popen(
        [sys.executable, "-P", "-c", BOOTSTRAP, PACKAGE_ROOT, str(connection), str(crash_log), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=crash_log,
        pass_fds=(connection, crash_log),
        # Its own session: Ctrl-C in the terminal is not for it, and its whole group can be killed at once.
        start_new_session=True,
        env=environment,
    )
