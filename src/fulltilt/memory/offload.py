"""Offload of parameters and optimizer states to main memory while the device does not need them.

Enters: a role's model, or the states that an optimizer keeps per parameter. Leaves: the same tensors, on the device when they are used.

`Residence` moves the parameters of a role, or this worker's shards of them. Device memory is freed, but every Parameter stays the same
object and every view of it a view: only the storage is emptied and filled. What this means on one device:
  ref, reward model   they never change: one copy to the host for the whole run, later only device memory is freed;
  critic              copied out again after an update;
  actor               may leave only while another role works, and not at all with CUDA graphs: graphs read parameters by address, and
                      memory that was freed may belong to another tensor later. Reserving it would save nothing. Where parameters
                      are sharded, an engine reads a whole copy of the actor, and its shards are away in rollouts too.

`States` holds an optimizer's states: on the device, or on the host and streamed in buckets through memory that is allocated once, so that
the next bucket comes in and the previous one goes out while one is computed on.

Guaranteed: values come back bit for bit; host memory has the exact size (torch's own pinned memory is rounded up to a power of two) and is
allocated once; nothing is used before its copy has arrived, nor overwritten before its copy has left; all memory of a streamed pass is
allocated before its first bucket. Copies run on streams of their own; on a CPU the same code copies within main memory.

    residence = Residence(ref.model, "ref", learns=False)
    residence.to_host()
    residence.to_device()  # before the phase in which the role works
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from fulltilt.memory.host import free_host_bytes
from fulltilt.model.arrays import local
from fulltilt.model.forward import ONE_PASS
from fulltilt.records import UserError

ALIGN = 256  # bytes: alignment of tensors in one memory, and of buckets
PORTABLE = 1  # cudaHostRegisterPortable
MORE_MEMORY = "Free main memory, raise the container's memory limit, or switch an offload knob off"
Mark = torch.cuda.Event | None  # a point in a stream; None: already reached


@dataclass(frozen=True)
class OffloadSetting:
    """Settings: which parts of an optimizer are not on the device all the time."""

    optimizer: bool = False  # masters and moments are on the host, and streamed through the device in a step
    grads: bool = False  # accumulated gradients exist only from a mini-batch's first pass to the end of its step
    bucket_bytes: int = 256 << 20  # size of a bucket of masters and moments
    buckets: int = 3  # buckets on the device at a time, at least 2: one comes in, one is computed on, one goes out


ON_DEVICE = OffloadSetting()


# ---- memory and copies -----------------------------------------------------------------------------------------------------------------


class Pages(mmap.mmap):
    """Pages from the system. A separate class, so that a finalizer runs before the pages are unmapped."""


def host_memory(count: int, device: torch.device) -> torch.Tensor:
    """Allocate `count` bytes of zeros in main memory [count], pinned for a CUDA device."""
    if not count or not hasattr(mmap, "MADV_DONTFORK"):  # not on Linux: correct, but copies block the program
        return torch.zeros(count, dtype=torch.uint8)
    free, needed = free_host_bytes(), f"{count / 2**30:.1f} GiB of main memory"
    if count > free:  # the system would kill the process when it touches the pages
        raise UserError(f"{needed} are needed for offload, and {free / 2**30:.1f} GiB are free. {MORE_MEMORY}")
    try:
        pages = Pages(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise UserError(f"{needed} could not be allocated for offload: {error.strerror}. {MORE_MEMORY}") from error
    for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):  # pages must stay the device's after a fork of the program
        with contextlib.suppress(OSError):
            pages.madvise(advice)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    memory.zero_()  # touches the pages from all threads; the driver would touch them one by one
    if device.type == "cuda":
        failed = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), count, PORTABLE))
        if failed:
            raise UserError(f"{needed} could not be pinned for offload (CUDA error {failed}). {MORE_MEMORY}")
        weakref.finalize(pages, unpin, memory.data_ptr()).atexit = False  # at exit, the system unpins the memory
    return memory


def unpin(address: int) -> None:
    torch.cuda.synchronize()  # a copy may be running
    torch.cuda.cudart().cudaHostUnregister(address)


class Lane:
    """A stream of copies beside the compute stream. On a CPU, copies run at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], after: Iterable[Mark]) -> Mark:
        """Queue a copy of each (target, source) after the marks. Does not wait; returns the mark at which all copies are done."""
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        for mark in after:
            if mark is not None:
                self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def uses(self, tensor: torch.Tensor) -> None:
        """Keep the tensor's memory from being reused after it is freed, until the copies queued so far are done."""
        if self._stream is not None:
            tensor.record_stream(self._stream)


def now(device: torch.device) -> Mark:
    """Return the mark after all work queued in the compute stream so far."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def wait(device: torch.device, mark: Mark) -> None:
    """Make the compute stream wait for the mark. The program itself does not wait."""
    if mark is not None:
        torch.cuda.current_stream(device).wait_event(mark)


def aligned(count: int) -> int:
    return -(-count // ALIGN) * ALIGN


# ---- parameters of a role --------------------------------------------------------------------------------------------------------------


class Residence:
    """Moves the parameters of a role's model, which are on the device at first.

    `learns`: whether parameters change on the device, so that they are copied out whenever they leave. Running a model that is on the host
    fails at once.
    """

    def __init__(self, model: torch.nn.Module, role: str, *, learns: bool) -> None:
        self.role, self.learns, self.on_device = role, learns, True
        # A shard's memory may be longer than this worker's part of the parameter, because all workers exchange equally many bytes.
        found = (local(parameter.detach()).untyped_storage() for parameter in model.parameters())
        storages = {storage.data_ptr(): storage for storage in found if storage.nbytes()}
        assert all(storage.resizable() for storage in storages.values()), "a parameter is in memory that cannot be given back"
        self.device = next(model.parameters()).device
        self._device_flats = [torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage) for storage in storages.values()]  # type: ignore[call-overload]
        self._host = host_memory(sum(aligned(len(flat)) for flat in self._device_flats), self.device)
        parts = self._host.split([aligned(len(flat)) for flat in self._device_flats])
        self._host_flats = [part[: len(flat)] for part, flat in zip(parts, self._device_flats, strict=True)]
        self._out, self._in = Lane(self.device), Lane(self.device)
        self._copied = False
        self._left: Mark = None
        # the transformer inside a model with any head
        body = next((module.base_model for module in model.modules() if isinstance(module, PreTrainedModel)), None)
        if body is not None:
            body.register_forward_pre_hook(self._refuse_absent)
        if whole_pass := getattr(model, ONE_PASS, None):  # it gathers shards before the body runs
            setattr(model, ONE_PASS, partial(self._refuse_or_run, whole_pass))

    @torch.no_grad()
    def to_host(self, *, unchanged: bool = False) -> None:
        """Free the device memory. Copies run during the computation that follows. `unchanged`: whether the role was only read since it
        came, so that even a role that learns need not be copied out again."""
        if not self.on_device:
            return
        if not self._copied or (self.learns and not unchanged):
            self._left = self._out.copy(zip(self._host_flats, self._device_flats, strict=True), [now(self.device)])
            self._copied = True
            for flat in self._device_flats:
                self._out.uses(flat)
        self._give_back()

    @torch.no_grad()
    def to_device(self) -> None:
        """Bring the parameters to the device for all computation from here on."""
        if self.on_device:
            return
        try:
            for flat in self._device_flats:
                flat.untyped_storage().resize_(len(flat))
        except torch.OutOfMemoryError:
            self._give_back()
            raise
        pairs = zip(self._device_flats, self._host_flats, strict=True)
        wait(self.device, self._in.copy(pairs, [now(self.device), self._left]))
        self.on_device = True

    def memory(self) -> Iterator[torch.Tensor]:
        """Yield the host memory of the parameters."""
        yield self._host

    def _give_back(self) -> None:
        self.on_device = False
        for flat in self._device_flats:
            flat.untyped_storage().resize_(0)

    def _refuse_or_run(self, run: Callable[..., Any], *given: Any) -> Any:
        self._refuse_absent()
        return run(*given)

    def _refuse_absent(self, *_: object) -> None:
        assert self.on_device, f"the parameters of the {self.role} are on the host: it runs only after to_device()"


def absent(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's values, or this worker's part of them, are on the host only."""
    own = local(tensor.detach())
    return own.numel() > 0 and own.untyped_storage().nbytes() == 0


# ---- states of an optimizer ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """States of one tensor: `count` numbers of each kind."""

    name: str
    count: int
    dtype: torch.dtype
    kinds: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Part:
    """An entry's numbers that are on the device together: all of them, unless they are streamed."""

    name: str
    numbers: slice
    states: dict[str, torch.Tensor]  # by kind: numbers on the device, flat


class States:
    """Memory for states, initially zeros: on the device, or on the host with a few buckets on the device.

    One memory per kind, an entry at the same place in each, entries with most kinds first, so that every kind fills the beginning of its
    memory. A bucket is the same range of each memory."""

    def __init__(self, entries: Iterable[Entry], device: torch.device, offload: OffloadSetting = ON_DEVICE) -> None:
        self.device, self._entries = device, sorted(entries, key=lambda entry: -len(entry.kinds))
        self._places: dict[str, int] = {}
        extents: dict[str, int] = {}  # bytes by kind
        end = 0
        for entry in self._entries:
            self._places[entry.name] = end
            end += aligned(entry.nbytes)
            extents |= dict.fromkeys(entry.kinds, end)
        self._allocate(extents, end, offload)

    def _allocate(self, extents: Mapping[str, int], end: int, offload: OffloadSetting) -> None:
        assert offload.buckets >= 2
        device = self.device
        wanted = offload.bucket_bytes // max(1, len(extents)) // ALIGN * ALIGN if offload.optimizer else end
        self._width = min(max(wanted, ALIGN), end)  # bytes of a bucket in the memory of each kind
        count = -(-end // self._width) if end else 0
        self._homes = {
            kind: host_memory(extent, device) if offload.optimizer else torch.zeros(extent, dtype=torch.uint8, device=device)
            for kind, extent in extents.items()
        }
        self._slots = [
            {kind: torch.empty(min(self._width, extent), dtype=torch.uint8, device=device) for kind, extent in extents.items()}
            for _ in range(min(offload.buckets, count) if offload.optimizer else 0)
        ]
        self._in, self._out = Lane(device), Lane(device)
        self._left: list[Mark] = [now(device)] * len(self._slots)  # when each slot may be refilled
        for memory in (memory for slot in self._slots for memory in slot.values()):
            self._in.uses(memory)
            self._out.uses(memory)
        self.buckets = [list(self._parts(number)) for number in range(count)]

    def _parts(self, number: int) -> Iterator[Part]:
        """Yield a bucket's part of each entry."""
        first, last = number * self._width, (number + 1) * self._width
        memory = self._slots[number % len(self._slots)] if self._slots else self._homes
        for entry in self._entries:
            place, size = self._places[entry.name], entry.dtype.itemsize
            begin, end = max(place, first), min(place + entry.nbytes, last)
            if begin < end:
                states = {kind: memory[kind][begin - first : end - first].view(entry.dtype) for kind in entry.kinds}
                yield Part(entry.name, slice((begin - place) // size, (end - place) // size), states)

    def home(self, entry: Entry, kind: str) -> torch.Tensor:
        """Return an entry's numbers in their permanent memory [count]. Numbers on the host are up to date after `settle`."""
        place = self._places[entry.name]
        return self._homes[kind][place : place + entry.nbytes].view(entry.dtype)

    def stream(self, read: Sequence[str] | None = None, written: Sequence[str] | None = None) -> Iterator[int]:
        """Yield the numbers of the buckets, each of which is on the device until the next one is requested. `read`: kinds to copy in.
        `written`: kinds to copy out again. None: all kinds."""
        if not self._slots:
            yield from range(len(self.buckets))
            return
        # Everything that the last pass copied out must have arrived before it is read again.
        arrived = self._in.copy(self._pairs(0, read), self._left)
        for number in range(len(self.buckets)):
            following = None
            if number + 1 < len(self.buckets):
                following = self._in.copy(self._pairs(number + 1, read), [self._left[(number + 1) % len(self._slots)]])
            wait(self.device, arrived)
            yield number
            pairs = [(home, part) for part, home in self._pairs(number, written)]
            self._left[number % len(self._slots)] = self._out.copy(pairs, [now(self.device)])
            arrived = following

    def settle(self) -> None:
        """Wait until all written states are on the host."""
        for mark in self._left:
            if mark is not None:
                mark.synchronize()

    def memory(self) -> Iterator[torch.Tensor]:
        """Yield all memory of the states, on the host and on the device."""
        for memory in (self._homes, *self._slots):
            yield from memory.values()

    def _pairs(self, number: int, kinds: Sequence[str] | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return pairs of a bucket's memory in its slot and its permanent memory."""
        slot, bucket = self._slots[number % len(self._slots)], slice(number * self._width, (number + 1) * self._width)
        homes = {kind: home[bucket] for kind, home in self._homes.items() if kinds is None or kind in kinds}
        return [(slot[kind][: len(home)], home) for kind, home in homes.items() if len(home)]
