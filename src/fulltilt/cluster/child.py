"""A worker's process, seen from the process that started it: the driver, or the keeper of another machine's workers.

Enters: one end of a socket, whose other end the driver has. Leaves: the process that serves it (`serve`), its signs of life, its last
output and its stacks. Guaranteed: the process is killed with everything that it has started, and leaves no file behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

COMPUTED_S = 0.1  # processor time that writing a stack does not reach
OUTPUT_LINES = 10  # lines of a dead worker's output that are shown
WRITTEN_S = 0.1  # seconds after which a stack that has not grown is complete
REAP_S = 5.0  # how long a process that was killed, or has closed its socket, may take to end


@dataclass(frozen=True)
class Obituary:
    """How a worker's process ended."""

    how: str  # Example: ended with exit code 3
    hint: str = ""
    output: str = ""  # its last lines


class ChildProcess(Protocol):
    """The process of a worker, on this machine or another. No method takes long, whatever the process does. Waiting for many processes one
    after the other would take long, so their launcher waits for all at once."""

    @property
    def pid(self) -> int: ...

    @property
    def place(self) -> str:
        """Example: process 4711 on node-b"""

    def kill(self) -> None:
        """End the process with everything that it has started."""

    def ended(self) -> bool: ...

    def is_active(self) -> bool:
        """Return whether the process has computed since the last call, or waits for a disk; True where that is unknown."""

    def obituary(self) -> Obituary:
        """Describe how the process ended, and end what is left of it. Called when its connection has ended."""

    def close(self) -> None:
        """Forget a process that has ended."""


@dataclass(eq=False)
class Child:
    """A process that this process has started."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]  # standard output and error of the process
    stacks: IO[bytes]
    computed_s: float = 0.0  # processor time at the last look
    over: bool = False  # whether the process has ended, and its group was killed

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def place(self) -> str:
        return f"process {self.pid}"

    def kill(self) -> None:
        """Kill the process group. Does nothing once the process is gone, because another process may have its number."""
        if not self.over:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self.over = self.ended()

    def wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def ended(self) -> bool:
        return self.process.poll() is not None

    def is_active(self) -> bool:
        try:
            threads = [path.read_text().rpartition(")")[2].split() for path in Path(f"/proc/{self.pid}/task").glob("*/stat")]
        except OSError:  # a thread has ended meanwhile
            return True
        used_s = sum(int(fields[11]) + int(fields[12]) for fields in threads) / os.sysconf("SC_CLK_TCK")
        if not threads or abs(used_s - self.computed_s) > COMPUTED_S:
            self.computed_s = used_s
            return True
        return any(fields[0] == "D" for fields in threads)

    def obituary(self) -> Obituary:
        self.wait(REAP_S)
        code = self.process.returncode
        self.kill()  # kills what it has started, and the process itself if it only closed the socket
        output = self._last_output()
        if code is None:
            return Obituary("has closed its connection", output=output)
        if code >= 0:
            return Obituary(f"ended with exit code {code}", output=output)
        hint = "The system kills processes so when the machine's memory is used up: see dmesg" if code == -signal.SIGKILL else ""
        return Obituary(f"was killed by signal {-code} ({signal_name(-code)})", hint, output)

    def _last_output(self) -> str:
        size = os.fstat(self.output.fileno()).st_size
        text = os.pread(self.output.fileno(), 2**14, max(0, size - 2**14)).decode(errors="replace")
        return "\n".join(text.rstrip().splitlines()[-OUTPUT_LINES:])

    def ask_for_stacks(self) -> bool:
        """Ask for stacks. Returns whether `read_stacks` will find them. Only for a process that has greeted: the signal ends one that still
        starts."""
        if self.ended():
            return False
        os.ftruncate(self.stacks.fileno(), 0)
        self.process.send_signal(signal.SIGUSR1)
        return True

    def read_stacks(self, deadline: float) -> str:
        """Return what the process has written since it was asked, once it has stopped writing for a moment."""
        while not self._stacks_are_written() and (os.fstat(self.stacks.fileno()).st_size or time.monotonic() < deadline):
            time.sleep(0.02)
        return os.pread(self.stacks.fileno(), 2**20, 0).decode(errors="replace")

    def _stacks_are_written(self) -> bool:
        """Return whether the stacks are complete. A busy machine may interrupt the process in the middle of a stack. The file's own time
        shows for how long nothing was added, so that many workers, which write at the same time, need not be waited for one after the
        other."""
        about = os.fstat(self.stacks.fileno())
        return about.st_size > 0 and not 0 <= time.time() - about.st_mtime < WRITTEN_S  # below 0: the clock was changed

    def close(self) -> None:
        self.output.close()
        self.stacks.close()


def wait_for_ends(children: Iterable[Child], seconds: float) -> None:
    """Wait until all processes have ended, but not longer than this."""
    deadline = time.monotonic() + seconds
    for child in children:
        child.wait(max(0.0, deadline - time.monotonic()))


def stacks_of(children: Mapping[int, Child], seconds: float) -> dict[int, str]:
    """Return the stacks that each of these processes writes within this time. They write at the same time."""
    asked = {key: child for key, child in children.items() if child.ask_for_stacks()}
    deadline = time.monotonic() + seconds
    return {key: child.read_stacks(deadline) for key, child in asked.items()}


def start_child(rank: int, environment: Mapping[str, str], connection: socket.socket, folder: str | None = None) -> Child:
    """Start a process that serves the connection, which is closed here. `environment`: variables in addition to those of this process.
    `folder`: its working folder, if not that of this process."""
    with contextlib.ExitStack() as on_failure, connection:
        output, stacks = (on_failure.enter_context(appended_file()) for _ in range(2))
        passed = (connection.fileno(), stacks.fileno())
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fulltilt.cluster.serve", *map(str, passed), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=passed,
            cwd=folder,
            start_new_session=True,  # Ctrl-C in the terminal is for the driver, and the whole group can be killed at once
            env={**os.environ, "PYTHONPATH": python_path(), **environment, "FULLTILT_WORKER": str(rank)},
        )
        on_failure.pop_all()
        return Child(process, output, stacks)


def appended_file() -> IO[bytes]:
    """Make a file without a name in which every write goes to the end, even after it was truncated."""
    file = tempfile.TemporaryFile()  # noqa: SIM115
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    return file


def signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return "a real-time signal"


def python_path() -> str:
    """Return the folders in which this process finds modules; an empty name means the current folder."""
    return os.pathsep.join(os.path.abspath(folder) for folder in sys.path if isinstance(folder, str))
