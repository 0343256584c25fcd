"""A reward process from inside: calls enter over one inherited socket, one answer for each leaves.

Messages to a worker are pickles, each after its size, since ground truths may hold any plain or numpy value. Its answers are lines of JSON:
a process that runs a user's code must not be able to make the trainer unpickle anything. A worker answers calls one after the other or,
from the first call of an asynchronous function on, all at once, on one event loop that lives as long as the process. From then on it
reports when each call begins. The loop answers for a call that ignores its cancellation, and a thread answers for a call that blocks the
loop.

Guaranteed: what the function prints goes nowhere and takes no memory (its last two kilobytes are kept for error reports); memory is
limited; a fork of the function never answers in its parent's place; the process ends with the trainer. Side effects of one call (alarm,
working directory, closed output, random state) do not reach the next, so a score does not depend on which worker computed it. (Asynchronous
calls run side by side: only the code before a call's first `await` runs undisturbed.) The process is confined before any code of the user's
runs. Imports neither torch nor numpy and starts fast. The trainer enforces deadlines: this process may hang at any point.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import json
import os
import pickle
import random
import resource
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fulltilt.reward import functions
from fulltilt.reward.confine import Confinement
from fulltilt.user_code import UserCode, UserCodeError, describe

if TYPE_CHECKING:  # imported where it is used: a worker starts in half the time without it
    import asyncio

LOST_CONNECTION = 113  # exit code: the function has closed the descriptors of its process
MOST_CHILDREN = 32  # most processes that calls may leave behind before the worker asks to be replaced
SIZE_BYTES = 8  # size field before each message to a worker
OUTPUT_TAIL = 2048
DETAIL_LENGTH = 8000
WATCH_S = 0.2  # seconds between looks at the event loop
BLOCKED_S = 1.0  # a call blocks the event loop if it is seen running for this long

_write_json = json.JSONEncoder(ensure_ascii=False).encode

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Setup:
    """The trainer's first message to a worker."""

    functions: tuple[UserCode, ...]
    args: dict[str, Any]
    memory_bytes: int
    timeout_s: float  # deadline of asynchronous calls; the trainer enforces the deadlines of all others
    grace_s: float  # seconds from its deadline within which a cancelled asynchronous call must end
    confinement: Confinement | None


@dataclass(frozen=True)
class Request:
    """One call, as it is sent to a worker."""

    id: int
    function: int  # index into Setup.functions
    prompt: bytes  # pickle of data_source, ground_truth, extra_info, prompt_str
    texts: tuple[str, ...]
    seed: int


@dataclass(eq=False)
class RunningCall:
    """A call on the event loop."""

    request: Request
    began: float
    blocks: bool = False
    answered: bool = False  # whether it has been answered, although it or a task that it started may continue


class _Tail(io.RawIOBase):
    """Takes the function's output and keeps only its end. Its descriptor leads to /dev/null."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self.kept = b""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.kept = (self.kept + bytes(view[-OUTPUT_TAIL:]))[-OUTPUT_TAIL:]
        return len(view)


def past_deadline(timeout_s: float) -> str:
    return f"ran past its deadline of {timeout_s:g} s (reward.timeout_s)"


class RewardWorker:
    def __init__(self, connection: int) -> None:
        self._connection = connection
        self._pid = os.getpid()
        self._folder = os.getcwd()
        self._functions: list[functions.RewardFunction] = []
        self._setup: Setup
        self._finished = 0  # number of finished calls
        self._answers: asyncio.StreamWriter | None = None  # writes answers from the event loop, once it runs
        self._running: weakref.WeakKeyDictionary[asyncio.Task[Any], RunningCall] = weakref.WeakKeyDictionary()

    def serve(self) -> None:
        """Answer until the trainer is gone, then kill everything that the functions started, and this process itself."""
        with contextlib.suppress(EOFError, pickle.UnpicklingError):
            if self._load(self._next_message()):
                requests = self._next_message()
                while not self._functions[requests[0].function].asynchronous:
                    self._answer_all(requests)
                    requests = self._next_message()
                self._answer_at_once(requests)
        os.killpg(self._pid, signal.SIGKILL)

    def _next_message(self) -> Any:
        return pickle.loads(self._read(int.from_bytes(self._read(SIZE_BYTES))))

    def _read(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            parts.append(os.read(self._connection, min(size, 2**20)))
            if not parts[-1]:
                raise EOFError
            size -= len(parts[-1])
        return b"".join(parts)

    def _send(self, message: Any) -> None:
        # A forked child of the user's function must not answer in its parent's place.
        if os.getpid() != self._pid:
            os._exit(0)
        line = _write_json(message).encode("utf-8", "replace") + b"\n"
        try:
            if self._answers:
                self._answers.write(line)
                return
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._connection, rest) :]
        except OSError:
            os._exit(LOST_CONNECTION)

    def _load(self, setup: Setup) -> bool:
        memory_limited = _limit_memory(setup.memory_bytes)
        # Otherwise a child that outlives its worker would keep the trainer from seeing that the worker is gone.
        os.register_at_fork(after_in_child=lambda: os.close(self._connection))
        self._setup = setup
        _redirect_output()
        try:
            if setup.confinement:
                setup.confinement.take_on()
            self._functions = functions.load(setup.functions, setup.args, self._explain)
        except OSError as error:
            self._send(f"the system refuses to confine reward processes: {error}. Set reward.sandbox = false")
            return False
        except UserCodeError as error:
            self._send(str(error)[:DETAIL_LENGTH])
            return False
        facts = ("batch", "asynchronous", "needs_truth")
        self._send([memory_limited, *([getattr(each, fact) for each in self._functions] for fact in facts)])
        return True

    def _answer_all(self, requests: Sequence[Request]) -> None:
        # The deadline of the first call counts from here, and that of a later call from the previous answer.
        self._send("begin")
        for request in requests:
            began = time.perf_counter()
            answer = self._call(request)
            if self._finish(request, answer, began):
                return

    def _answer_at_once(self, requests: Sequence[Request]) -> None:
        import asyncio

        # Not `asyncio.run`: at the end it would wait for calls that ignore their cancellation.
        loop = asyncio.new_event_loop()
        loop.set_task_factory(self._make_task)
        with contextlib.suppress(RuntimeError):  # if the system allows no thread, the trainer's deadlines must do
            threading.Thread(target=self._watch, args=(loop,), daemon=True).start()
        loop.run_until_complete(self._converse(requests))

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        """Make a task that belongs to the call which starts it."""
        import asyncio

        task = asyncio.Task(coroutine, loop=loop, **options)
        if call := self._on(loop):
            self._running[task] = call
        return task

    def _on(self, loop: asyncio.AbstractEventLoop) -> RunningCall | None:
        """Return the call that runs on the event loop at this moment."""
        import asyncio

        task = asyncio.current_task(loop)
        return self._running.get(task) if task else None

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        last, seen = None, 0
        while True:
            time.sleep(WATCH_S)
            call = self._on(loop)
            last, seen = call, seen + 1 if call and call is last else 0
            if call is None or seen * WATCH_S < BLOCKED_S:
                continue
            call.blocks = True
            if not call.answered and time.perf_counter() - call.began > self._setup.timeout_s:
                stack = traceback.format_stack(sys._current_frames()[threading.main_thread().ident or 0], limit=-20)
                message = f"blocked its event loop and {past_deadline(self._setup.timeout_s)}. Use an async client, or make it a plain def"
                self._answer_for(call, blocks=True, message=message, detail="".join(stack)[-DETAIL_LENGTH:])
                return

    def _answer_for(self, call: RunningCall, **said: Any) -> None:
        """Answer for a call that does not end after its deadline: it ignored its cancellation, or blocks the event loop."""
        call.answered = True
        answer = self._timeout() | said | {"id": call.request.id, "seconds": time.perf_counter() - call.began, "ends_process": True}
        self._send(answer)

    def _timeout(self) -> dict[str, Any]:
        return {"failure": "timeout", "message": past_deadline(self._setup.timeout_s)}

    async def _converse(self, requests: Sequence[Request]) -> None:
        import asyncio

        stream, self._answers = await asyncio.open_connection(sock=socket.socket(fileno=self._connection))
        running: set[asyncio.Task[None]] = set()  # the loop itself keeps no task alive
        while True:
            for request in requests:
                running.add(task := asyncio.create_task(self._answer(request)))
                task.add_done_callback(running.discard)
            size = int.from_bytes(await stream.readexactly(SIZE_BYTES))
            requests = pickle.loads(await stream.readexactly(size))

    async def _answer(self, request: Request) -> None:
        import asyncio

        task = asyncio.current_task()
        assert task
        call = self._running[task] = RunningCall(request, time.perf_counter())
        deaf = asyncio.get_running_loop().call_later(self._setup.timeout_s + self._setup.grace_s, self._answer_for, call)
        self._send(request.id)
        output = self._prepare(request)
        try:
            async with asyncio.timeout(self._setup.timeout_s) as limit:
                function = self._functions[request.function]
                scores = function.results(await function.call(pickle.loads(request.prompt), request.texts), len(request.texts))
            answer: dict[str, Any] = {"scores": scores}
        except BaseException as error:
            answer = self._failure(error, request, output)
        if limit.expired():  # however the call reacted to its cancellation
            answer = self._timeout()
        deaf.cancel()
        if not call.answered:
            call.answered = True
            self._finish(request, answer | {"blocks": call.blocks}, call.began)

    def _finish(self, request: Request, answer: dict[str, Any], began: float) -> bool:
        """Send the answer, with the fields of a `CallOutcome` (`process`). Returns whether the process must be replaced."""
        # Side effects of the call must not reach the next.
        signal.alarm(0)
        with contextlib.suppress(OSError):
            os.chdir(self._folder)
        answer |= {"id": request.id, "seconds": time.perf_counter() - began}
        answer["ends_process"] = "try_again" in answer or _children_left()
        self._finished += 1
        self._send(answer)
        return bool(answer["ends_process"])

    def _prepare(self, request: Request) -> _Tail:
        _seed(request.seed)
        return _redirect_output()

    def _call(self, request: Request) -> dict[str, Any]:
        output = self._prepare(request)
        try:
            return {"scores": self._functions[request.function].score(pickle.loads(request.prompt), request.texts)}
        except BaseException as error:
            return self._failure(error, request, output)

    def _failure(self, error: BaseException, request: Request, output: _Tail) -> dict[str, Any]:
        """Describe a failure. sys.exit and KeyboardInterrupt are included: nothing that a function raises ends its process."""
        if isinstance(error, functions.NotANumber):
            return {"failure": "mistake", "sample": error.args[0], "message": error.args[1]}
        if isinstance(error, functions.WrongResult):
            return {"failure": "error", "message": str(error), "final": True}
        if isinstance(error, MemoryError):
            message = "took more memory than reward.memory_gb allows"
            return {"failure": "error", "message": message, "try_again": self._finished > 0}
        return self._describe(error, request, output)

    def _describe(self, error: BaseException, request: Request, output: _Tail) -> dict[str, Any]:
        described = describe(error, self._setup.functions[request.function].path) + self._explain(error)
        trace = "".join(traceback.format_exception(error, limit=-20))
        printed = output.kept.decode(errors="replace")
        detail = f"{trace[-DETAIL_LENGTH:]}{'output ends: ' if printed else ''}{printed}"
        return {"failure": "error", "message": f"raised {described}", "detail": detail}

    def _explain(self, error: BaseException) -> str:
        return self._setup.confinement.explain(error) if self._setup.confinement else ""


def _redirect_output() -> _Tail:
    """Redirect the output. Called for every call, since the previous call may have closed or replaced the output."""
    tail = _Tail(1)
    for name in ("stdout", "stderr"):
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(tail), encoding="utf-8", errors="replace", line_buffering=True))
    return tail


def _seed(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _limit_memory(limit: int) -> bool:
    """Limit this process's memory. Returns whether that worked: macOS may refuse, and then only the deadline protects the machine's
    memory."""
    try:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    except (ValueError, OSError):
        return False
    return True


def _children_left() -> bool:
    """Return whether calls left more processes behind than a worker may keep."""
    if not hasattr(os, "waitid"):
        return False
    try:
        # Does not reap children: the function may wait for their exit status itself.
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return len(family_of(os.getpid(), generations=1)) > MOST_CHILDREN


def family_of(ancestor: int, generations: int) -> list[int]:
    """Return the descendants of a process, read from /proc; none if there is no /proc."""
    children: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                # The second field, the name in brackets, may contain spaces and brackets.
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError):
            continue
        children.setdefault(parent, []).append(int(entry))
    family: list[int] = []
    newest = [ancestor]
    for _ in range(generations):
        newest = [child for parent in newest for child in children.get(parent, ())]
        family += newest
    return family


def _end_with(trainer: int) -> None:
    """Make Linux kill this process when the trainer's thread that started it ends; elsewhere end of file and the guard end it."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Daemons that a function detaches stay in this process's family, where they can be counted and killed.
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != trainer:
        os._exit(0)


def main() -> None:
    connection, crash_log, trainer = map(int, sys.argv[1:4])
    sys.argv = [""]
    _end_with(trainer)
    # When the machine runs out of memory, Linux should kill a reward process before the trainer.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Writes to its own descriptor, since standard error goes to /dev/null: reports where a segmentation fault happened.
    faulthandler.enable(file=crash_log)
    worker = RewardWorker(connection)
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)
    worker.serve()
