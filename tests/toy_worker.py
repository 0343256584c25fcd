"""A worker that computes nothing, for tests of what calls it: its methods return, yield, raise, hang and die."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

from fulltilt.cluster.alive import Written, signs_of_progress
from fulltilt.cluster.hosts import Inbox
from fulltilt.records import RunWarning, UserError


def make(order: Any) -> ToyWorker:
    if isinstance(order, str):
        raise UserError(order)
    return ToyWorker(order)


def make_with(common: list[Any], order: int) -> ToyWorker:
    worker = ToyWorker(order)
    worker.log += common
    return worker


def make_in_steps(order: int) -> Generator[str, None, ToyWorker]:
    yield "half"
    return ToyWorker(order)


class ToyWorker:
    def __init__(self, order: int) -> None:
        self.order = order
        self.log: list[str] = []
        self.gate = threading.Event()

    def add(self, number: int) -> int:
        return self.order + number

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def give_back(self, value: Any) -> Any:
        return value

    def is_writable(self, array: np.ndarray) -> bool:
        return array.flags.writeable

    def count(self, to: int, through_gate: bool = False) -> Generator[int, None, int]:
        """`through_gate`: after the first number it waits for the gate."""
        try:
            for number in range(to):
                yield number
                if through_gate and number == 0:
                    self.wait_for_gate()
        finally:
            self.log.append(f"count ended at {number}")
        return self.order

    def read_log(self) -> list[str]:
        return self.log

    def echo(self, inbox: Inbox) -> Generator[Any, None, int]:
        """What it is told, until it is told None."""
        try:
            yield "ready"
            while True:
                for message in inbox.wait():
                    if message is None:
                        return self.order
                    yield message
        finally:
            self.log.append("echo ended")

    def send_within(self, inbox: Inbox) -> Generator[str, None, int]:
        inbox.send("first")
        inbox.send("second")
        yield "third"
        return self.order

    def idle(self, seconds: float, inbox: Inbox) -> list[Any]:
        return inbox.wait(seconds)

    def wait_for_gate(self) -> bool:
        opened = self.gate.wait(200)
        self.gate.clear()
        return opened

    def open_gate(self) -> None:
        self.gate.set()

    def refuse(self, rank: int) -> int:
        if self.order == rank:
            raise UserError("the toy refuses: give it another number")
        return self.order

    def fail(self, rank: int) -> None:
        if self.order == rank:
            raise KeyError("no such toy")

    def fail_as_collective(self, rank: int, after: float) -> None:
        """One worker fails of itself a moment after the others have noticed."""
        if self.order == rank:
            time.sleep(after)
            raise KeyError("the cause")
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")

    def unpicklable(self) -> Any:
        return lambda: None

    def exit(self, rank: int, code: int) -> None:
        if self.order == rank:
            print("on standard output")
            print("on standard error", file=sys.stderr)
            os._exit(code)
        time.sleep(200)

    def sleep_forever(self, rank: int) -> Iterator[str]:
        if self.order == rank:
            yield "begun"
        while self.order == rank:
            time.sleep(60)

    def compute_forever(self) -> Iterator[str]:
        """Never leaves C, and never lets another thread of the interpreter run."""
        yield "begun"
        re.match("(a+)+$", "a" * 60 + "b")

    def compute(self, seconds: float) -> int:
        """On the first worker, for which the others wait, though no stack shows it."""
        end = time.monotonic() + seconds
        while self.order == 0 and time.monotonic() < end:
            pass
        return self.order

    def write_slowly(self, path: str, seconds: float, inbox: Inbox) -> int:
        end = time.monotonic() + seconds
        with signs_of_progress(inbox, Written()), open(path, "wb", buffering=0) as file:
            while time.monotonic() < end:
                file.write(bytes(2**17))
                file.seek(0)
                time.sleep(0.02)
        return self.order

    def warn(self, ranks: list[int], text: str, path: str | None = None) -> None:
        """`path`: the file that the warning is about; None: it is this package's own."""
        if self.order in ranks:
            warnings.warn_explicit(text, UserWarning if path else RunWarning, path or __file__, 7)

    def print_much(self, size: int) -> None:
        print("x" * size)

    def output_bytes(self) -> int:
        return os.fstat(1).st_size

    def leave_child(self) -> int:
        """A process that holds the descriptors of this one."""
        if child := os.fork():
            return child
        time.sleep(60)
        os._exit(0)

    def rest(self, rank: int, seconds: float, inbox: Inbox) -> Iterator[int]:
        """One worker has a lot to do; the others wait for the driver meanwhile."""
        if rank:
            inbox.wait(seconds)
        for number in range(0 if rank else round(seconds / 0.1)):
            time.sleep(0.1)
            yield number

    def join(self, file: str, size: int) -> None:
        import torch.distributed

        torch.distributed.init_process_group("gloo", f"file://{file}", rank=self.order, world_size=size)

    def swap(self, parcels: list[bytes], piece: int, seconds: float, inbox: Inbox) -> list[bytes]:
        """With all workers, over a network that takes so long for each piece."""
        import torch.distributed as dist

        from fulltilt.parallel import parcels as module

        def slow(tensor: Any, **options: Any) -> Any:
            time.sleep(seconds)
            return send(tensor, **options)

        send, dist.isend = dist.isend, slow
        module.ROUND_BYTES = piece * len(parcels)
        own = module.Parcels(self.order, len(parcels), dist.distributed_c10d._get_default_group())
        with signs_of_progress(inbox, lambda: own.carried):
            return [bytes(parcel) for parcel in own.swap(parcels)]

    def reduce(self, absent: int) -> float:
        """The sum over all workers, for which one never comes."""
        import torch

        while self.order == absent:
            time.sleep(60)
        number = torch.tensor([float(self.order)])
        torch.distributed.all_reduce(number)
        return number.item()
