"""Offload of parameters and optimizer states: they are in main memory while the device does not need them.

Enters: a role's model, or the states that an optimizer keeps per parameter. Leaves: the same tensors, on the device when they are used.

`Residence` moves the parameters of a role. Device memory is given back, but every Parameter stays the same object and every view of it a
view: only the storage is emptied and filled. What this means on one device:
  ref, reward model   they never change: one copy to the host for the whole run, later only device memory is given back;
  critic              copied out again after an update;
  actor               may leave only while another role works, and not at all with CUDA graphs: graphs read parameters by address, and
                      memory that was given back may belong to another tensor later. Reserving it would save nothing.

`States` holds an optimizer's states: on the device, or on the host and streamed in buckets through memory that is allocated once, so that
the next bucket comes in and the previous one goes out while one is computed on.

Guaranteed: values come back bit for bit; host memory has the exact size (torch's own pinned memory is rounded up to a power of two) and is
allocated once; nothing is used before its copy has arrived, nor overwritten before its copy has left; all memory of a streamed pass is
allocated before its first bucket. Copies run on streams of their own; on a CPU the same code copies within main memory.

    residence = Residence(ref.model, "ref", learns=False)
    residence.to_host()
    with residence.needed():        # around the phase
        annotate(...)
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from fulltilt.memory.host import free_host_bytes
from fulltilt.records import UserError

ALIGN = 256  # bytes: alignment of tensors in one memory, and of buckets
PORTABLE = 1  # cudaHostRegisterPortable
MORE_MEMORY = "Free main memory, raise the container's memory limit, or switch an offload knob off"
Mark = torch.cuda.Event | None  # a point in a stream; None: already reached


@dataclass(frozen=True)
class OffloadSetting:
    """Which parts of an optimizer are not on the device all the time."""

    optimizer: bool = False  # masters and moments are on the host, and streamed through the device in a step
    grads: bool = False  # accumulated gradients exist only from a mini-batch's first pass to the end of its step
    bucket_bytes: int = 256 << 20  # size of a bucket of masters and moments
    buckets: int = 3  # on the device at a time: one comes in, one is computed on, one goes out


ON_DEVICE = OffloadSetting()


def why_not(device: str) -> str | None:
    """Why offload can have no effect on a device of this type."""
    return None if device == "cuda" else "the run is on the CPU: its memory is the host's already"


def why_not_params(role: str, device: str, *, cuda_graphs: bool = False, alone: bool = False, shared: bool = False) -> str | None:
    """Why a role's parameters cannot leave the device. `alone`: no other role has its own model. `shared`: the model is the actor's."""
    if reason := why_not(device):
        return reason
    if shared:
        return f"the {role} runs the actor's own model without its adapters: it has no parameters that could leave"
    if role == "actor" and alone:
        return "no other role has a model of its own, so there is no phase in which the actor's parameters could be away"
    if role == "actor" and cuda_graphs:
        return (
            "rollout replays CUDA graphs, which read the actor's parameters at fixed addresses, and memory that was given back may belong "
            "to another tensor when they return. Set rollout.cuda_graphs = false"
        )
    return None


# ---- memory and copies -----------------------------------------------------------------------------------------------------------------


class Pages(mmap.mmap):
    """Pages from the system. A class of our own, so that a finalizer runs before the pages are unmapped."""


def host_memory(count: int, device: torch.device) -> torch.Tensor:
    """`count` bytes of zeros in main memory [count], pinned for a CUDA device."""
    if not count or not hasattr(mmap, "MADV_DONTFORK"):  # not on Linux: correct, but copies block the program
        return torch.zeros(count, dtype=torch.uint8)
    free, needed = free_host_bytes(), f"{count / 2**30:.1f} GiB of main memory"
    if count > free:  # the system would kill the process when the pages are touched
        raise UserError(f"{needed} are needed for offload, and {free / 2**30:.1f} GiB are free. {MORE_MEMORY}")
    try:
        pages = Pages(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise UserError(f"{needed} could not be allocated for offload: {error.strerror}. {MORE_MEMORY}") from error
    for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):  # after a fork the program's pages would no longer be the device's
        with contextlib.suppress(OSError):
            pages.madvise(advice)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    memory.zero_()  # touches the pages from all threads; the driver would touch them one by one
    if device.type == "cuda":
        failed = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), count, PORTABLE))
        if failed:
            raise UserError(f"{needed} could not be pinned for offload (CUDA error {failed}). {MORE_MEMORY}")
        weakref.finalize(pages, unpin, memory.data_ptr()).atexit = False  # at exit the system does it
    return memory


def unpin(address: int) -> None:
    torch.cuda.synchronize()  # a copy may be running
    torch.cuda.cudart().cudaHostUnregister(address)


class Lane:
    """A stream of copies beside the compute stream. On a CPU copies run at once."""

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
        """Once freed, its memory is not reused until the copies queued so far are done."""
        if self._stream is not None:
            tensor.record_stream(self._stream)


def now(device: torch.device) -> Mark:
    """The mark after all work queued in the compute stream so far."""
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

    `learns`: they change on the device, so they are copied out whenever they leave. Running a model that is away fails at once.
    """

    def __init__(self, model: torch.nn.Module, role: str, *, learns: bool) -> None:
        self.role, self.learns, self.on_device = role, learns, True
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in model.parameters() if tensor.numel()}
        assert all(storage.resizable() for storage in storages.values()), "a parameter is in memory that cannot be given back"
        self.device = next(model.parameters()).device
        self._device_flats = [torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage) for storage in storages.values()]  # type: ignore[call-overload]
        self.nbytes = sum(len(flat) for flat in self._device_flats)
        self._host = host_memory(sum(aligned(len(flat)) for flat in self._device_flats), self.device)
        parts = self._host.split([aligned(len(flat)) for flat in self._device_flats])
        self._host_flats = [part[: len(flat)] for part, flat in zip(parts, self._device_flats, strict=True)]
        self._out, self._in = Lane(self.device), Lane(self.device)
        self._copied = self._in_use = False
        self._left: Mark = None
        self._arrived: Mark = None
        for body in bodies(model):
            body.register_forward_pre_hook(self._refuse_absent)

    @contextmanager
    def needed(self, *, unchanged: bool = False) -> Iterator[None]:
        """Have the parameters on the device inside the context, around a phase in which the role works. Does not nest. `unchanged`: the
        phase only reads, so a role that learns need not be copied out after it."""
        assert not self._in_use, f"the {self.role} is in use already"
        self.to_device()
        self._in_use = True
        try:
            yield
        finally:
            self._in_use = False
            self.to_host(unchanged=unchanged)

    @torch.no_grad()
    def to_host(self, *, unchanged: bool = False) -> None:
        """Give the device memory back. Copies run beside the computation that follows."""
        if not self.on_device:
            return
        wait(self.device, self._arrived)
        if not self._copied or (self.learns and not unchanged):
            self._left = self._out.copy(zip(self._host_flats, self._device_flats, strict=True), [now(self.device)])
            self._copied = True
            for flat in self._device_flats:
                self._out.uses(flat)
        self._give_back()

    @torch.no_grad()
    def fetch(self) -> None:
        """Allocate the device memory and start filling it. May be called a phase before `to_device`, where memory allows."""
        if self.on_device:
            return
        try:
            for flat in self._device_flats:
                flat.untyped_storage().resize_(len(flat))
        except torch.OutOfMemoryError:
            self._give_back()
            raise
        self._arrived = self._in.copy(zip(self._device_flats, self._host_flats, strict=True), [now(self.device), self._left])
        self.on_device = True

    def to_device(self) -> None:
        """Have the parameters on the device for all computation from here on."""
        self.fetch()
        wait(self.device, self._arrived)

    def memory(self) -> Iterator[torch.Tensor]:
        """Its host memory."""
        yield self._host

    def _give_back(self) -> None:
        self.on_device = False
        for flat in self._device_flats:
            flat.untyped_storage().resize_(0)

    def _refuse_absent(self, *_: object) -> None:
        assert self.on_device, f"the parameters of the {self.role} are on the host: it runs only inside needed()"


def bodies(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The transformer inside a model with any head."""
    return next(([module.base_model] for module in model.modules() if isinstance(module, PreTrainedModel)), [])


def absent(tensor: torch.Tensor) -> bool:
    """Whether the tensor's values are on the host, its device memory given back."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


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
    """Numbers of an entry that are on the device together: all of them, unless they are streamed."""

    name: str
    numbers: slice
    states: dict[str, torch.Tensor]  # kind -> flat, on the device


class Layout:
    """Placement of entries: one memory per kind, an entry at the same place in each, entries with most kinds first, so that every kind
    fills the beginning of its memory. A bucket is the same range of each memory. Allocates nothing: a plan can use it without weights."""

    def __init__(self, entries: Iterable[Entry], bucket_bytes: int | None = None) -> None:
        """`bucket_bytes`: for all kinds together; None: one bucket for everything."""
        self.entries = sorted(entries, key=lambda entry: -len(entry.kinds))
        self.kinds = self.entries[0].kinds if self.entries else ()
        self.places: dict[str, int] = {}
        self.extents = dict.fromkeys(self.kinds, 0)
        end = 0
        for entry in self.entries:
            self.places[entry.name] = end
            end += aligned(entry.nbytes)
            self.extents |= dict.fromkeys(entry.kinds, end)
        assert self.extents.keys() == set(self.kinds), "every entry's kinds are among the first one's"
        wanted = end if bucket_bytes is None else bucket_bytes // max(1, len(self.kinds)) // ALIGN * ALIGN
        self.width = min(max(wanted, ALIGN), end)  # bytes of a bucket in each kind's memory
        self.count = -(-end // self.width) if end else 0

    @property
    def nbytes(self) -> int:
        return sum(self.extents.values())

    def stretch(self, number: int, kind: str) -> slice:
        """The bucket's range in the kind's memory."""
        end = self.extents[kind]
        return slice(min(number * self.width, end), min((number + 1) * self.width, end))

    def cuts(self) -> Iterator[tuple[int, Entry, slice]]:
        """Bucket, entry, and the bytes of the entry that are in the bucket."""
        for entry in self.entries:
            place, end = self.places[entry.name], self.places[entry.name] + entry.nbytes
            for number in range(place // self.width, -(-end // self.width) if entry.count else 0):
                begin = max(place, number * self.width)
                yield number, entry, slice(begin - place, min(end, (number + 1) * self.width) - place)


class States:
    """Memory for a layout: on the device, or on the host with `slots` buckets of it on the device. Zeros at the start."""

    def __init__(self, layout: Layout, device: torch.device, slots: int = 0) -> None:
        """`slots`: 0 keeps all on the device and needs a layout of one bucket."""
        assert slots != 1 and (slots or layout.count <= 1)
        self.layout, self.device = layout, device
        self._homes = {
            kind: host_memory(extent, device) if slots else torch.zeros(extent, dtype=torch.uint8, device=device)
            for kind, extent in layout.extents.items()
        }
        self._slots = [
            {kind: torch.empty(min(layout.width, extent), dtype=torch.uint8, device=device) for kind, extent in layout.extents.items()}
            for _ in range(min(slots, layout.count))
        ]
        self._in, self._out = Lane(device), Lane(device)
        self._left: list[Mark] = [now(device)] * len(self._slots)  # when each slot may be filled again
        for slot in self._slots:
            for memory in slot.values():
                self._in.uses(memory)
                self._out.uses(memory)
        self.buckets: list[list[Part]] = [[] for _ in range(layout.count)]
        for number, entry, of_entry in layout.cuts():
            self.buckets[number].append(self._part(number, entry, of_entry))

    def _part(self, number: int, entry: Entry, of_entry: slice) -> Part:
        begin = self.layout.places[entry.name] + of_entry.start - number * self.layout.width
        place = slice(begin, begin + of_entry.stop - of_entry.start)
        memory = self._slots[number % len(self._slots)] if self._slots else self._homes
        states = {kind: memory[kind][place].view(entry.dtype) for kind in entry.kinds}
        size = entry.dtype.itemsize
        return Part(entry.name, slice(of_entry.start // size, of_entry.stop // size), states)

    def home(self, entry: Entry, kind: str) -> torch.Tensor:
        """An entry's numbers in their permanent memory [count]. Those on the host are up to date after `settle`."""
        place = self.layout.places[entry.name]
        return self._homes[kind][place : place + entry.nbytes].view(entry.dtype)

    def stream(self, read: Sequence[str] | None = None, written: Sequence[str] | None = None) -> Iterator[int]:
        """The numbers of the buckets, each of which is on the device until the next one is requested. `read`: kinds that are copied in;
        `written`: kinds that are copied out again; None: all."""
        if not self._slots:
            yield from range(len(self.buckets))
            return
        arrived = self._fetch(0, read, self._left)  # all that the last pass copied out must have arrived before it is read again
        for number in range(len(self.buckets)):
            slot = number % len(self._slots)
            following = None
            if number + 1 < len(self.buckets):
                following = self._fetch(number + 1, read, [self._left[(number + 1) % len(self._slots)]])
            wait(self.device, arrived)
            yield number
            pairs = [(home, part) for part, home in self._pairs(number, written)]
            self._left[slot] = self._out.copy(pairs, [now(self.device)])
            arrived = following

    def settle(self) -> None:
        """Wait until all written states are on the host."""
        for mark in self._left:
            if mark is not None:
                mark.synchronize()

    def memory(self) -> Iterator[torch.Tensor]:
        """All of its memory, on the host and on the device."""
        for memory in (self._homes, *self._slots):
            yield from memory.values()

    def _fetch(self, number: int, kinds: Sequence[str] | None, after: Iterable[Mark]) -> Mark:
        return self._in.copy(self._pairs(number, kinds), after)

    def _pairs(self, number: int, kinds: Sequence[str] | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The bucket's memory in its slot, and its permanent memory."""
        slot, found = self._slots[number % len(self._slots)], []
        for kind in self.layout.kinds:
            stretch = self.layout.stretch(number, kind)
            if stretch.start < stretch.stop and (kinds is None or kind in kinds):
                found.append((slot[kind][: stretch.stop - stretch.start], self._homes[kind][stretch]))
        return found
