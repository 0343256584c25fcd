"""One worker process as the trainer sees it: started, talked to without ever blocking, killed with all it started.

Its standard output and input are /dev/null. Messages go over a socket of its own; a pipe that is read only after death holds what
the interpreter said when it crashed (the kernel bounds it, and nobody waits for a reader).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from fulltilt.reward import wire
from fulltilt.reward.worker import LOST_CONNECTION, family_of

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
        self._frames = wire.FrameReader()
        self._unsent = bytearray()
        self.send(setup)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, payload: bytes) -> None:
        self._unsent += wire.frame(payload)
        self.flush()

    def flush(self) -> bool:
        """Sends what the socket takes now; whether something is left."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return True
        except OSError:
            # The worker is gone: reading its end of file tells the dispatcher.
            self._unsent.clear()
        return False

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
            for message in self._frames.feed(data):
                messages.append(_decoded(message))

    def cause_of_death(self) -> tuple[str, str]:
        """After the connection broke: what happened, in words, and what the interpreter said."""
        self.wait(EXIT_GRACE_S)
        code = self._process.poll()
        if code is None or code == LOST_CONNECTION:
            return "closed the descriptors of its process", ""
        said = self.crash_log()
        places = [line.strip() for line in said.splitlines() if line.strip().startswith("File ")]
        if code >= 0:
            return f"ended its process with exit code {code}", said
        hint = " (the machine may be out of memory)" if code == -signal.SIGKILL else ""
        return f"crashed with {signal.Signals(-code).name}{hint}{f' at {places[0]}' if places else ''}", said

    def crash_log(self) -> str:
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

    def add(self, pid: int) -> None:
        self._tell(f"+{pid}\n")

    def remove(self, pid: int) -> None:
        self._tell(f"-{pid}\n")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        # Without its guard a worker still ends with the trainer by itself, save what its function started.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._process.stdin.fileno(), line.encode())

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
        raise wire.BadMessage("not JSON") from error
    if not isinstance(decoded, dict):
        raise wire.BadMessage("not an object")
    return decoded


def _start(connection: int, crash_log: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", BOOTSTRAP, PACKAGE_ROOT, str(connection), str(crash_log), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=crash_log,
        pass_fds=(connection, crash_log),
        # Its own session: Ctrl-C in the terminal is not for it, and its whole group can be killed at once.
        start_new_session=True,
        env=_environment(),
    )


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    # There is a process for every core already, and thread pools take address space for every core of the machine.
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # Otherwise the order of a set of strings, and a score that hangs on it, would change from worker to worker.
    environment.setdefault("PYTHONHASHSEED", "0")
    return environment
