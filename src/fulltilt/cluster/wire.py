"""Messages between the driver and a worker process: pickles followed by their large buffers, over one stream socket.

Enters and leaves: messages. Guaranteed: arrays of `OUT_OF_BAND` bytes or more are sent from their own memory and received into their final
memory, without a copy between; whoever packs such a message must not change its arrays until it was sent. An array arrives writable if it
was writable. Sends from several threads do not mix, and a message that cannot be packed sends nothing.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

OUT_OF_BAND = 16 * 2**10  # bytes from which a buffer is sent by its own system call
MOST_BUFFERS = 512  # in one system call; systems allow 1024
SOCKET_BUFFER = 2**21  # bytes; the system may give less
HEAD = struct.Struct("<QQ")  # bytes of the pickle, number of buffers


class Start(NamedTuple):
    """Driver to worker: call a method. The first call of a worker makes its object: `method` is then "package.module:function"."""

    call: int
    method: str
    args: tuple[Any, ...]
    aside: bool


class Tell(NamedTuple):
    """Driver to worker: a message for the inbox of a call."""

    call: int
    message: Any


class Cancel(NamedTuple):
    """Driver to worker: close the generator of a call."""

    call: int


class KeepOutput(NamedTuple):
    """Driver to worker: from now on, append the process's output to this file, beginning with earlier output."""

    path: str


class Leave(NamedTuple):
    """Driver to worker: end the process when the call in progress has ended."""


class Hello(NamedTuple):
    """Worker to driver: the process runs, and signals may be sent to it."""


class Item(NamedTuple):
    """Worker to driver: an item that a method has yielded."""

    call: int
    item: Any


class Warned(NamedTuple):
    """Worker to driver: a warning for the user, which belongs to no call."""

    text: str


class Result(NamedTuple):
    """Worker to driver: the value that a method has returned, or None if it was cancelled."""

    call: int
    result: Any


@dataclass(frozen=True)
class Failure:
    """Worker to driver: the exception that ended a call."""

    call: int | None  # None: a message could not be read
    text: str  # the whole message of a UserError; for other exceptions type, first line and place
    traceback: str
    is_user_error: bool
    of_collective: bool  # whether torch.distributed raised it, perhaps only because another worker failed


def pack(message: Any, *, copy: bool = False) -> list[memoryview]:
    """Return the parts of a message. They refer to its large arrays, unless a copy is asked for."""
    buffers: list[memoryview] = []

    def in_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if copy or raw.nbytes < OUT_OF_BAND:
            return True
        buffers.append(raw)
        return False

    body = pickle.dumps(message, protocol=5, buffer_callback=in_band)
    head = HEAD.pack(len(body), len(buffers)) + struct.pack(f"<{len(buffers)}Q", *(each.nbytes for each in buffers))
    return [memoryview(head), memoryview(body), *buffers]


def pickled_once() -> Callable[[Any], pickle.PickleBuffer]:
    """Return a function that pickles objects for messages to many workers. For an object that it has pickled before, it returns the same
    pickle, which messages do not copy."""
    made: dict[int, tuple[Any, pickle.PickleBuffer]] = {}  # keeps each object, so that no other one gets its identity

    def pickled(given: Any) -> pickle.PickleBuffer:
        if id(given) not in made:
            made[id(given)] = given, pickle.PickleBuffer(pickle.dumps(given))
        return made[id(given)][1]

    return pickled


class Connection:
    """One end of a stream socket. One thread receives; any thread sends."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()
        self.sent_bytes = 0
        self.received_bytes = 0
        if end.family == socket.AF_UNIX:
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                end.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
        else:  # the system sizes the buffers of connections between machines, but delays small messages
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, parts: list[memoryview]) -> None:
        """Send a packed message. Raises OSError if nobody will receive it."""
        with self._sending:
            first, offset = 0, 0  # the first part that is not fully sent, and how many of its bytes are
            while first < len(parts):
                count = self._socket.sendmsg([parts[first][offset:], *parts[first + 1 : first + MOST_BUFFERS]])
                self.sent_bytes += count
                offset += count
                while first < len(parts) and offset >= len(parts[first]):
                    offset -= len(parts[first])
                    first += 1

    def receive(self) -> Any:
        """Return the next message. Raises EOFError or OSError if there can be none; any other exception means that a message cannot be
        unpickled, and the next one can still be received."""
        body, count = HEAD.unpack(self._exactly(HEAD.size))
        sizes = struct.unpack(f"<{count}Q", self._exactly(8 * count))
        pickled = self._exactly(body)
        return pickle.loads(pickled, buffers=[self._exactly(size) for size in sizes])

    def _exactly(self, size: int) -> memoryview:
        memory = np.empty(size, np.uint8).data  # not cleared first, as the memory of a bytearray would be
        received = 0
        while received < size:
            count = self._socket.recv_into(memory[received:], size - received, socket.MSG_WAITALL)
            if not count:
                raise EOFError
            received += count
        self.received_bytes += size
        return memory

    def shut(self) -> None:
        """Shut the socket down, which ends the waits of both threads here, and of the other end."""
        with contextlib.suppress(OSError):  # the other end is gone
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
