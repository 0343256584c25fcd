"""The interface of a host of workers for the driver, whatever the workers are: one worker in this process, processes, or actors of Ray.

A worker is an object. Enters: a method's name and one tuple of picklable arguments per worker that is called. Leaves: items, which the
method yields while it runs, and one result per worker, which it returns. A method may be a plain function or a generator. If it has a
parameter `inbox`, it receives the messages that the driver sends to the running call. Guaranteed by every host: no callback crosses, calls
of a worker run one after the other in the order in which they were started (except those started `aside`), and an error of a worker is
raised where the driver waits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Place:
    """The location of a worker."""

    machine: str  # the machine whose memory and cores its workers share
    gpu: str  # the machine's name for the GPU; empty on a CPU
    device: str  # its name in torch in the worker's process
    node: str = ""  # the cluster's name for the location; in tests one machine may be several nodes


class Hosts(Protocol):
    @property
    def size(self) -> int:
        """The number of workers. Their ranks are 0 to size - 1."""

    @property
    def worker(self) -> Any | None:
        """The worker's object if it is in this process; None if workers are in other processes."""

    @property
    def sent_bytes(self) -> int:
        """Bytes sent from this process to workers in other processes."""

    @property
    def received_bytes(self) -> int:
        """Bytes that workers in other processes have sent to this one."""

    def start(
        self, method: str, args: Sequence[tuple[Any, ...] | None], *, what: str, aside: bool = False, together: bool = False
    ) -> WorkerCall:
        """Call a method of workers. `args`: one tuple per worker, in order of rank; None: the worker is not called, and its result is None.
        `what`: the name of this call for people, for example "update-actor". `aside`: it may run in a thread, beside other calls of the
        worker. `together`: workers wait for one another inside the method, so that none may stop by itself; to stop early, the driver sends
        a message on which workers agree."""

    def keep_output(self, folder: Path) -> None:
        """Have the processes of workers append their output to files N.log of a folder, which is created in an existing one. A file is up
        to date when a call has returned."""

    def hurry(self) -> None:
        """Prepare to stop the run: from now on, a worker that is stuck is soon ended. Called in a signal handler."""

    def close(self) -> None:
        """End all workers. May be called again."""


class WorkerCall(Protocol):
    @property
    def seconds(self) -> float:
        """Seconds from the start to the last result, once it has arrived."""

    def items(self) -> Iterator[tuple[int, Any]]:
        """Yield rank and item, in order of arrival, until every worker has returned. If the iterator ends early, because it is closed or
        because an exception arrives while it waits, the call is cancelled."""

    def tell(self, rank: int, message: Any) -> None:
        """Put a message into the inbox of the method that runs on this worker."""

    def results(self) -> list[Any]:
        """Return one result per worker, in order of rank, after dropping the remaining items. If an exception arrives while it waits, the
        call continues, and its results can be asked for again."""

    def cancel(self) -> None:
        """Have every worker close the method's generator at its next item or look into its inbox. A plain method, and one that was called
        with `together`, runs to its end. A cancelled call has no results."""


class Inbox(Protocol):
    """Messages of the driver to a running method. Raises GeneratorExit once the call is cancelled, as closing a generator does."""

    @property
    def sign_s(self) -> float | None:
        """Seconds after which a method should send something, so that the driver does not consider it stuck; None: the driver runs in the
        same thread, and waits for no sign."""

    def poll(self) -> list[Any]:
        """Return all messages since the last time, without waiting."""

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Wait for a message, and return all since the last time. Returns an empty list at the end of `timeout` seconds, or where the
        driver runs in the same thread, so that none can arrive: a method that needs one must yield."""

    def send(self, item: Any) -> None:
        """Give the driver an item at once, in the middle of the method's computation. If the driver runs in the same thread, it gets the
        item together with the next one that is yielded."""


class WorkerError(Exception):
    """A worker failed through no mistake that the user can fix. The message names the worker, the call and the error."""

    def __init__(self, text: str, worker_traceback: str = "") -> None:
        super().__init__(text)
        self.worker_traceback = worker_traceback
        if worker_traceback:
            self.__cause__ = WorkerTraceback(worker_traceback)


class WorkerDied(WorkerError):
    """The process of a worker has ended."""


class WorkerStuck(WorkerError):
    """A worker has sent nothing for so long that it was ended."""


class WorkerTraceback(Exception):
    """The traceback inside a worker as text. It is the cause of the error in the driver, so it is shown with that error's traceback."""

    def __str__(self) -> str:
        return f"in the worker:\n{self.args[0]}"


def produced(function: Callable[..., Any], args: Sequence[Any], inbox: Inbox) -> Generator[Any, None, Any]:
    """Call a worker's method as a generator, which yields its items and returns its result."""
    wanted = {"inbox": inbox} if "inbox" in inspect.signature(function).parameters else {}
    outcome = function(*args, **wanted)
    if isinstance(outcome, Generator):
        outcome = yield from outcome
    return outcome


def no_results(what: str) -> RuntimeError:
    return RuntimeError(f"{what} has no results: the call was cancelled or failed")
