"""A worker's process, as the process that started it has it: the driver, or what keeps the workers of another machine.

Enters: one end of a socket, whose other end the driver has. Leaves: the process that serves it (`serve`), its signs of life, its last
words and its stacks. Guaranteed: it is killed with everything that it has started, and leaves no file behind.
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

COMPUTED_S = 0.1  # processor time that is more than writing a stack
OUTPUT_LINES = 10  # lines of a dead worker's output that are shown
WRITTEN_S = 0.1  # seconds after which a stack to which nothing was added is whole
REAP_S = 5.0  # how long a process that was killed, or has closed its socket, may take to end


@dataclass(frozen=True)
class Obituary:
    """How a worker has ended."""

    how: str  # Example: ended with exit code 3
    hint: str = ""
    output: str = ""  # its last lines


class ChildProcess(Protocol):
    """The process of a worker, on this machine or another. No method takes long, whatever the process does. Waiting for many processes,
    one after the other, would: their launcher does that for all at once."""

    @property
    def pid(self) -> int: ...

    @property
    def place(self) -> str:
        """Example: process 4711 on node-b"""

    def kill(self) -> None:
        """End the process with everything that it has started."""

    def ended(self) -> bool: ...

    def is_active(self) -> bool:
        """Whether it has computed since the last time, or waits for a disk. Where that is not known: yes."""

    def obituary(self) -> Obituary:
        """Called when its connection has ended. Ends what is left of it."""

    def close(self) -> None:
        """Forget a process that has ended."""


@dataclass(eq=False)
class Child:
    """A process that this one has started."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]  # standard output and error of the process
    stacks: IO[bytes]
    computed_s: float = 0.0  # processor time, when it was last looked at
    over: bool = False  # whether the process has ended, and its group was killed

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def place(self) -> str:
        return f"process {self.pid}"

    def kill(self) -> None:
        """Does nothing once the process is gone: another may have its number."""
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
        self.kill()  # what it has started, and itself if it only closed the socket
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
        """Whether `read_stacks` will have them. Only for a process that has greeted: a signal ends one that still starts."""
        if self.ended():
            return False
        os.ftruncate(self.stacks.fileno(), 0)
        self.process.send_signal(signal.SIGUSR1)
        return True

    def read_stacks(self, deadline: float) -> str:
        """What the process has written since it was asked, once it has written no more for a moment."""
        while not self._stacks_are_written() and (os.fstat(self.stacks.fileno()).st_size or time.monotonic() < deadline):
            time.sleep(0.02)
        return os.pread(self.stacks.fileno(), 2**20, 0).decode(errors="replace")

    def _stacks_are_written(self) -> bool:
        """A busy machine may interrupt the process in the middle of a stack. The file's own time tells how long nothing has been added, so
        that the stacks of many workers, which write at the same time, do not have to be waited for one after the other."""
        about = os.fstat(self.stacks.fileno())
        return about.st_size > 0 and not 0 <= time.time() - about.st_mtime < WRITTEN_S  # below 0: the clock was set

    def close(self) -> None:
        self.output.close()
        self.stacks.close()


def wait_for_ends(children: Iterable[Child], seconds: float) -> None:
    """Wait until all have ended, but not longer than this."""
    deadline = time.monotonic() + seconds
    for child in children:
        child.wait(max(0.0, deadline - time.monotonic()))


def stacks_of(children: Mapping[int, Child], seconds: float) -> dict[int, str]:
    """What each of these has written about its stacks within this time. They write at the same time."""
    asked = {key: child for key, child in children.items() if child.ask_for_stacks()}
    deadline = time.monotonic() + seconds
    return {key: child.read_stacks(deadline) for key, child in asked.items()}


def start_child(rank: int, environment: Mapping[str, str], connection: socket.socket, folder: str | None = None) -> Child:
    """A process that serves the connection, which is closed here. `environment`: variables besides those of this process. `folder`: the
    one that it works in, if not that of this process."""
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
    """A file without a name, in which every write goes to the end, also after it was cut."""
    file = tempfile.TemporaryFile()  # noqa: SIM115
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    return file


def signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return "a real-time signal"


def python_path() -> str:
    """The folders in which this process finds modules; without a name, the current one is meant."""
    return os.pathsep.join(os.path.abspath(folder) for folder in sys.path if isinstance(folder, str))
