"""One worker process, seen from the trainer: it is started, given requests, and killed with everything that it has started. One thread uses
it.

Enters: the setup, then requests. Leaves: one `CallOutcome` for each request, in order, whatever the process does. Guaranteed: nothing waits
without a deadline: a call has its seconds from the moment the process begins it, loading has `LOAD_S`. What the process sends is checked,
since a user's function may have written it.

Its standard output and input are /dev/null. Messages go over a socket of its own (`worker` says in which form). The interpreter's output in
a crash goes into a pipe that is read only afterwards; the kernel limits the pipe's size, and nobody waits for a reader.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from pydantic import FiniteFloat, TypeAdapter, ValidationError

from fulltilt.records import UserError
from fulltilt.reward.worker import LOST_CONNECTION, SIZE_BYTES, Request, family_of, past_deadline

PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
# Imports this installation of fulltilt, then removes its folder from the path so that nothing in it can hide a module of the standard
# library.
BOOTSTRAP = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import fulltilt
del sys.path[0]
from fulltilt.reward.worker import main
main()
"""
LOAD_S = 120.0
EXIT_GRACE_S = 0.25
KILL_S = 5.0
LARGEST_ANSWER = 16 * 2**20  # bytes
# If a message is not one that a worker sends, the user's function has found its process's descriptor.
FORGED = ("wrote into the connection of its process", "")

Message = TypeVar("Message")


class StartFailed(UserError):
    """The process could not be started, or ended while loading; another try may succeed."""


class ProcessLost(Exception):
    """The process has ended or must be killed. `args`: a description, to follow a subject, and the interpreter's output."""


@dataclass(frozen=True)
class CallOutcome:
    """The end of a call: scores in the order of its samples, or a failure, whose message continues the function's name."""

    id: int = 0  # the request's id
    scores: tuple[tuple[FiniteFloat, dict[str, FiniteFloat], str | None], ...] = ()  # for each sample: value, parts, answer
    failure: Literal["error", "timeout", "crash", "mistake"] | None = None
    message: str = ""
    detail: str = ""
    sample: int = 0  # for a mistake: which of the call's samples
    seconds: FiniteFloat = 0.0
    ends_process: bool = False  # whether the process must be replaced
    try_again: bool = False  # whether earlier calls may have caused the failure, so that a fresh process should try once more
    final: bool = False  # whether another try would end in the same way
    blocks: bool = False  # whether an asynchronous call kept its event loop from running for a second or more

    def answers(self, request: Request) -> bool:
        complete = bool(self.failure) or len(self.scores) == len(request.texts)
        return self.id == request.id and complete and self.sample in range(len(request.texts))


def late(timeout_s: float) -> CallOutcome:
    return CallOutcome(failure="timeout", message=past_deadline(timeout_s), seconds=timeout_s, ends_process=True)


class Loaded(NamedTuple):
    memory_limited: bool
    batch: tuple[bool, ...]  # one value for each function of the setup
    asynchronous: tuple[bool, ...]
    needs_truth: tuple[bool, ...]


# Messages of a worker, in this order: what it has loaded, or why it cannot; then, for each handful of requests, that it begins, and the
# outcomes; for asynchronous calls, the id of one that begins, or an outcome.
LOADED: TypeAdapter[Loaded | str] = TypeAdapter(Loaded | str)
BEGIN: TypeAdapter[Literal["begin"]] = TypeAdapter(Literal["begin"])
OUTCOME = TypeAdapter(CallOutcome)
EVENT: TypeAdapter[int | CallOutcome] = TypeAdapter(int | CallOutcome)


class Guard:
    """The trainer's end of the guard process, which it tells which process groups are alive."""

    def __init__(self, folder: str) -> None:
        """Start the guard. Raises StartFailed if the system refuses. `folder`: removed if the trainer was killed."""
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py")), folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise  # not the guard's fault: the command line names the limit
            raise StartFailed(f"the guard of the reward processes could not be started: {error}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, sign: str, pid: int) -> None:
        """Report a process group. `sign`: "+" if it is alive, "-" if it no longer is."""
        assert self._process.stdin is not None
        # Without its guard a worker still ends with the trainer, but what its function started may continue.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._process.stdin.fileno(), f"{sign}{pid}\n".encode())

    def close(self) -> None:
        """End the guard, after every group has been killed."""
        with self._process:
            self._process.kill()


class WorkerProcess:
    def __init__(self, guard: Guard, environment: Mapping[str, str], *descriptors: int) -> None:
        """Start the process. Raises StartFailed if the system refuses. `descriptors`: further descriptors that it inherits."""
        try:
            with contextlib.ExitStack() as theirs, contextlib.ExitStack() as on_failure:
                self._socket, its_socket = socket.socketpair()
                on_failure.enter_context(self._socket)
                theirs.enter_context(its_socket)
                crash_log, crash_log_end = os.pipe()
                theirs.callback(os.close, crash_log_end)
                self._crash_log = on_failure.enter_context(io.FileIO(crash_log))
                os.set_blocking(crash_log, False)
                self._process = _start((its_socket.fileno(), crash_log_end, *descriptors), environment)
                on_failure.pop_all()
        except OSError as error:
            raise StartFailed(f"a reward process could not be started: {error}") from error
        self._guard = guard
        self._guard.tell("+", self._process.pid)
        self._received = b""  # the beginning of the next message
        self._family: set[int] = set()  # descendants that have been noted so far
        self.used = False  # whether it has finished a call
        self.loaded: Loaded | None = None

    def load(self, setup: bytes, files: str) -> Loaded:
        """Load the functions. Raises UserError for a mistake in one of them, StartFailed if the process ended."""
        try:
            self._send(setup, LOAD_S)
            loaded = self._receive(LOADED, LOAD_S)
        except TimeoutError:
            raise UserError(f"the reward process did not load {files} within {LOAD_S:g} s") from None
        except ProcessLost as lost:
            did, wrote = lost.args
            said = f": {wrote.strip()[-2000:]}" if wrote else ""
            raise StartFailed(f"a reward process that was loading {files} {did}{said}") from None
        if isinstance(loaded, str):
            raise UserError(loaded)
        self.loaded = loaded
        return loaded

    def outcomes(self, requests: Sequence[Request], timeout_s: float) -> Iterator[CallOutcome]:
        """Hand the requests over, and yield their outcomes in order. An outcome that ends the process is the last one."""
        begun = False
        for request in requests:
            try:
                if not begun:
                    self.give(requests, timeout_s)
                    begun = bool(self._receive(BEGIN, timeout_s))
                outcome = self._receive(OUTCOME, timeout_s)
                if not outcome.answers(request):
                    raise ProcessLost(*FORGED)
            except TimeoutError:
                # Earlier calls of the process, or a busy machine, may have kept it from beginning this call.
                outcome = replace(late(timeout_s), try_again=not begun)
            except ProcessLost as lost:
                did, wrote = lost.args
                outcome = CallOutcome(failure="crash", message=did, detail=wrote, ends_process=True, try_again=self.used or not begun)
            self.used = True
            yield outcome

    def give(self, requests: Sequence[Request], seconds: float) -> None:
        """Hand requests over. Raises TimeoutError if the process does not take them in time."""
        self._send(pickle.dumps(requests), seconds)

    def event(self, seconds: float) -> int | CallOutcome:
        """Return the next of several asynchronous calls that begins or ends. Raises TimeoutError if there is none in time, ProcessLost if
        there can be none."""
        return self._receive(EVENT, seconds)

    def interrupt(self) -> None:
        """Interrupt, from another thread, the thread that waits for this process or hands it calls: it finds the connection closed. So does
        the process, which then ends."""
        self._note_family()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """End the process, its group, and processes that left its group."""
        pid = self._process.pid
        self._note_family()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        for member in self._family:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(member, signal.SIGKILL)
        self._guard.tell("-", pid)
        self._socket.close()
        self._crash_log.close()
        self._wait(KILL_S)

    def _note_family(self) -> None:
        """Note the process's descendants while it lives: once it has ended, nothing shows whose children those are that have left its
        group."""
        if self._process.returncode is None:
            self._family.update(family_of(self._process.pid, generations=8))

    def _wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def _send(self, payload: bytes, seconds: float) -> None:
        self._socket.settimeout(seconds)
        # A worker that is gone is noticed when its answer is read.
        with contextlib.suppress(ConnectionError):
            self._socket.sendall(len(payload).to_bytes(SIZE_BYTES) + payload)

    def _receive(self, expected: TypeAdapter[Message], seconds: float) -> Message:
        """Return the next message. Raises TimeoutError if there is none in time, ProcessLost if there can be none."""
        try:
            return expected.validate_json(self._next_line(time.monotonic() + seconds))
        except ValidationError:
            raise ProcessLost(*FORGED) from None

    def _next_line(self, deadline: float) -> bytes:
        while b"\n" not in self._received and len(self._received) <= LARGEST_ANSWER:
            # Also past the deadline: an answer that arrived while this thread could not run is an answer in time.
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                arrived = self._socket.recv(2**18)
            except ConnectionError:
                arrived = b""
            if not arrived:
                raise ProcessLost(*self._cause_of_death())
            self._received += arrived
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _cause_of_death(self) -> tuple[str, str]:
        """Return what happened, in words, and the interpreter's output. Called after the connection broke."""
        self._wait(EXIT_GRACE_S)
        lives = self._process.poll() is None
        self._note_family()
        self._process.kill()  # a process that merely ends slowly keeps its exit code
        self._wait(KILL_S)
        code = self._process.poll()
        if code in (None, LOST_CONNECTION) or (lives and code == -signal.SIGKILL):
            return "closed the descriptors of its process", ""
        wrote = (self._crash_log.read(2**16) or b"").decode(errors="replace")
        if code >= 0:
            return f"ended its process with exit code {code}", wrote
        places = [line.strip() for line in wrote.splitlines() if line.strip().startswith("File ")]
        hint = " (the machine may be out of memory)" if code == -signal.SIGKILL else ""
        return f"crashed with {signal.Signals(-code).name}{hint}{f' at {places[0]}' if places else ''}", wrote


def _start(descriptors: tuple[int, ...], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    connection, crash_log, *_ = descriptors
    return subprocess.Popen(
        [sys.executable, "-P", "-c", BOOTSTRAP, PACKAGE_ROOT, str(connection), str(crash_log), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=crash_log,
        pass_fds=descriptors,
        # A separate session: Ctrl-C in the terminal does not reach it, and its whole group can be killed at once.
        start_new_session=True,
        env=environment,
    )
