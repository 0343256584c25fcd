"""How trainer and worker processes frame their messages: four bytes of length, then the payload.

Trainer to worker the payload is a pickle, since ground truths may hold any plain or numpy value. Worker to trainer it is JSON only: a
process that runs a user's code must not be able to make the trainer unpickle anything.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

HEADER = struct.Struct(">I")
LARGEST_ANSWER = 16 * 2**20


class BadMessage(Exception):
    """What arrived from a worker process is not what a worker sends."""


def frame(payload: bytes) -> bytes:
    return HEADER.pack(len(payload)) + payload


def read_frame(fd: int) -> bytes | None:
    """The next whole message of a blocking descriptor; None when the other side is gone."""
    header = _read_exactly(fd, HEADER.size)
    return None if header is None else _read_exactly(fd, HEADER.unpack(header)[0])


def write_frame(fd: int, payload: bytes) -> None:
    rest = memoryview(frame(payload))
    while rest:
        rest = rest[os.write(fd, rest) :]


def _read_exactly(fd: int, size: int) -> bytes | None:
    pieces = bytearray()
    while len(pieces) < size:
        piece = os.read(fd, min(size - len(pieces), 2**20))
        if not piece:
            return None
        pieces += piece
    return bytes(pieces)


class FrameReader:
    """Cuts what arrives in any pieces into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields the messages that are now whole; BadMessage if what arrived cannot be one."""
        self._bytes += data
        while len(self._bytes) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._bytes)
            if size > LARGEST_ANSWER:
                raise BadMessage(f"a message of {size} bytes")
            if len(self._bytes) < HEADER.size + size:
                return
            message = bytes(self._bytes[HEADER.size : HEADER.size + size])
            del self._bytes[: HEADER.size + size]
            yield message
