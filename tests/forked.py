"""Processes of workers that are forked from this one instead of started anew: to import torch takes a new process longer than most tests.

Everything after that, from the connection to the end with the driver, is that of a worker's own process (`fulltilt.cluster.serve`).
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fulltilt.cluster import child, processes, serve

NAME = "forked-worker"
POSSIBLE = sys.platform == "linux" and os.environ.get("TRITON_INTERPRET") == "1"  # CUDA does not survive a fork


class Forked(subprocess.Popen[bytes]):
    """The process, with the interface of those that are started."""

    def __init__(self, pid: int) -> None:
        self.pid, self.args, self.returncode = pid, [NAME], None  # type: ignore[assignment]
        self.stdin = self.stdout = self.stderr = None
        self._child_created, self._waitpid_lock = True, threading.Lock()


def start_child(rank: int, environment: Mapping[str, str], connection: socket.socket, folder: str | None = None) -> child.Child:
    """In place of `child.start_child`."""
    with contextlib.ExitStack() as on_failure, connection:
        output, stacks = (on_failure.enter_context(child.appended_file()) for _ in range(2))
        driver, variables = os.getpid(), {**environment, "FULLTILT_WORKER": str(rank)}
        pid = os.fork()
        if not pid:
            try:
                become_worker(connection.fileno(), stacks.fileno(), output.fileno(), folder, variables, driver)
            finally:
                os._exit(1)
        on_failure.pop_all()
        return child.Child(Forked(pid), output, stacks)


def become_worker(connection: int, stacks: int, output: int, folder: str | None, variables: Mapping[str, str], driver: int) -> None:
    """Nothing of the driver's stays open, or the ends of the connections of other workers would; and nothing of it is collected as garbage
    here, as objects with threads of their own, which this process has not, abort it when they end."""
    gc.freeze()
    os.setsid()
    Path("/proc/self/comm").write_text(NAME)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in (connection, stacks):
            with contextlib.suppress(OSError):  # that of the listing
                os.close(descriptor)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.alarm(0)
    os.environ.update(variables)
    os.chdir(folder or ".")
    sys.argv = [NAME, str(connection), str(stacks), str(driver)]
    serve.main()
    os._exit(0)


def use_always() -> None:
    """In the process of a command: its workers are forked."""
    if POSSIBLE:
        processes.start_child = start_child  # type: ignore[attr-defined]


def use(patch: Any) -> None:
    if POSSIBLE:
        patch.setattr(processes, "start_child", start_child)


def children_of(process: int) -> set[int]:
    """The processes that it has started, from whichever thread; none if it has ended. Threads may end while they are read."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(OSError):
                found.update(map(int, (task / "children").read_text().split()))
    return found


def workers_of(process: int) -> list[int]:
    """The processes of workers that it has started, in order of rank."""
    return sorted(filter(is_worker, children_of(process)))


def is_worker(pid: int) -> bool:
    """Whether it is the process of a worker, forked or not."""
    folder = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        return b"fulltilt.cluster.serve" in (folder / "cmdline").read_bytes() or (folder / "comm").read_text().strip() == NAME
    return False
