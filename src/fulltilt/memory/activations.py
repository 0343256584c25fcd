"""Saved activations on the host between the forward and the backward pass.

Enters: a loaded model on its device, after fusing and recompute. Leaves: the same model, whose decoder layers send what they save for the
backward pass to host memory as soon as they have run, and a handle that counts and undoes. With recompute, what is left to save goes:
inputs of layers, and kept results of products and attention. The backward pass finds everything back on the device, fetched a layer ahead.

Guaranteed: tensors come back with their bits, shape, strides and alignment. A storage goes once for a layer, however many views of it were
saved. Parameters, what all layers are given (rotary angles, bounds of documents), small tensors and the last layer, which is needed first,
stay. The host waits for nothing: copies run on a stream of their own, and streams wait for each other. While one layer runs at most `ahead`
others are on their way out, and at most one is fetched before its time, so device memory is bounded although the host runs ahead of the
device; between the passes the last layer alone is there. Host memory is pinned once, in pages that serve micro-batches of any size.
Without a gradient nothing changes.

On CPU the same code copies within main memory, for tests: it saves nothing there.

    handle = offload_activations(model)
    handle.device_bytes, handle.host_bytes, handle.sent_bytes
    handle.remove()
    saved_bytes(run)  # what autograd keeps for the backward pass of what run() returns
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from fulltilt.memory.offload import Lane, Mark, host_memory, now, wait
from fulltilt.memory.recompute import KEEPER, Forward, Forwards, decoder_layers

SMALLEST = 1 << 20  # bytes of a storage that is worth a copy
PAGE = 16 << 20  # bytes of host memory that belong to one layer at a time
ALIGNED = 512  # torch's allocator aligns to it; kernels choose their form by alignment, so what comes back has the same


def offload_activations(model: torch.nn.Module, *, smallest: int = SMALLEST, ahead: int = 1, page: int = PAGE) -> ActivationOffload:
    """Send what the model's layers save to the host. `ahead`: layers that may be on their way while the next one runs."""
    assert smallest >= 1 and ahead >= 0 and page % ALIGNED == 0
    layers = decoder_layers(model)
    offload = ActivationOffload(next(layers[0].parameters()).device, smallest, ahead, page)
    for layer in layers:
        forward = OffloadedForward(layer.forward, offload, list(layer.parameters()), layer is layers[0], layer is layers[-1])
        offload.forwards.put(layer, forward)
    return offload


class ActivationOffload:
    """The handle: what the layers of one model share."""

    def __init__(self, device: torch.device, smallest: int, ahead: int, page: int) -> None:
        self.device, self.smallest, self.ahead = device, smallest, ahead
        self.lane, self.pages, self.forwards = Lane(device), HostPages(device, page), Forwards()
        self.sent_bytes = 0  # since the beginning
        self.host_bytes = 0  # now, as are those on the device: of what layers have saved
        self.device_bytes = 0
        self._waiting: deque[SavedByLayer] = deque()  # on the way to the host, and still on the device
        self._latest: weakref.ref[SavedByLayer] | None = None
        self._given: dict[int, set[int]] = {}  # id of an argument of this pass -> addresses of the storages in it

    def remove(self) -> None:
        """The model as it was. Passes under way go on to their end."""
        self.forwards.remove()
        self._let_go(0)

    def begin(self, parameters: Sequence[torch.Tensor], given: Sequence[Any], *, first: bool, last: bool) -> SavedByLayer:
        if first:
            self._let_go(0)  # of a pass that broke off
            self._latest = None
            self._given.clear()
        stays = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        for value in given:
            if id(value) not in self._given:  # whoever called the layers holds it for as long as the pass lasts
                self._given[id(value)] = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(value)}
            stays |= self._given[id(value)]
        return SavedByLayer(self, stays, leaves=not last)

    def close(self, saved: SavedByLayer) -> None:
        """The layer has run: send what it saved, and let go of what has been sent."""
        if not saved.parcels:  # a layer whose call was put off to one behind it
            return
        saved.before = self._latest() if self._latest else None
        self._latest = weakref.ref(saved)
        saved.close()
        self._waiting.append(saved)
        self._let_go(self.ahead if saved.leaves else 0)

    def _let_go(self, allowed: int) -> None:
        """The computation waits for copies until no more than so many layers are under way."""
        while len(self._waiting) > allowed:
            self._waiting.popleft().let_go()


@dataclass(eq=False)
class OffloadedForward:
    """The forward of one layer: its own where no gradient is wanted."""

    own: Forward
    offload: ActivationOffload
    parameters: list[torch.nn.Parameter]
    first: bool
    last: bool
    outermost = True

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.own(hidden_states, *args, **kwargs)
        saved = self.offload.begin(self.parameters, [*args, *kwargs.values()], first=self.first, last=self.last)
        token = KEEPER.set(saved)
        try:
            with saved_tensors_hooks(saved.put, saved.take):
                out = self.own(hidden_states, *args, **kwargs)
        finally:
            KEEPER.reset(token)
        self.offload.close(saved)
        return out


# ---- what a layer saves ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class View:
    """A saved tensor: where it lies in its parcel."""

    parcel: Parcel
    dtype: torch.dtype
    offset: int  # bytes from the beginning of the storage
    shape: torch.Size
    stride: tuple[int, ...]


class Parcel:
    """One storage of a layer. Views hold it; it lives until the last of their nodes has run backward."""

    def __init__(self, saved: SavedByLayer, tensor: torch.Tensor) -> None:
        self.saved = saved
        self.storage: torch.UntypedStorage | None = tensor.untyped_storage()
        self.begin, self.end = self.storage.nbytes(), 0  # bytes that views cover
        self.origin = 0  # which byte of the storage stands first in the one that is here now
        self.place: int | None = None  # of its bytes among those that its layer has on the host

    def cover(self, offset: int, size: int) -> None:
        self.begin, self.end = min(self.begin, offset // ALIGNED * ALIGNED), max(self.end, offset + size)

    @property
    def span(self) -> int:
        return self.end - self.begin

    def bytes_here(self) -> torch.Tensor:
        assert self.storage is not None
        here = torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)  # type: ignore[call-overload]
        return here[self.begin - self.origin : self.end - self.origin]

    def count(self, sign: int) -> None:
        if self.storage is not None:
            self.saved.offload.device_bytes += sign * self.storage.nbytes()

    def let_go(self) -> None:
        self.count(-1)
        self.storage = None

    def make_room(self) -> None:
        self.storage = torch.empty(self.span, dtype=torch.uint8, device=self.saved.offload.device).untyped_storage()
        self.origin = self.begin
        self.count(+1)

    def __del__(self) -> None:
        # Its memory goes back to the computation, which must not write there before copies from and to it are over.
        if self.saved.closed and self.storage is not None:
            self.saved.settle()
            self.count(-1)


class SavedByLayer:
    """All that one layer has saved in one pass: the unit of copying. The hooks of autograd, and the keeper of selective recompute."""

    def __init__(self, offload: ActivationOffload, stays: set[int], *, leaves: bool) -> None:
        self.offload, self.leaves = offload, leaves
        self.parcels: weakref.WeakValueDictionary[int, Parcel] = weakref.WeakValueDictionary()  # by address in the forward pass
        self.before: SavedByLayer | None = None
        self.closed = self.opened = False
        self._stays = stays
        self._pages: list[torch.Tensor] = []
        self._on_host = 0
        self._pending: Mark = None  # when its copies are done, until the computation has been told to wait for that

    def put(self, tensor: torch.Tensor) -> Any:
        address = tensor.untyped_storage().data_ptr() if movable(tensor, self.offload.device) else 0
        if address == 0 or address in self._stays:
            return tensor.detach()
        parcel = self.parcels.get(address)
        if parcel is None:
            parcel = self.parcels[address] = Parcel(self, tensor)
        offset = int(tensor.storage_offset()) * tensor.itemsize
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        parcel.cover(offset, reach * tensor.itemsize)
        return View(parcel, tensor.dtype, offset, tensor.shape, tensor.stride())

    def take(self, held: Any) -> torch.Tensor:
        if isinstance(held, torch.Tensor):
            return held
        parcel = held.parcel
        parcel.saved.open()
        here = torch.empty(0, dtype=held.dtype, device=parcel.storage.device)
        return here.set_(parcel.storage, (held.offset - parcel.origin) // held.dtype.itemsize, held.shape, held.stride)

    def close(self) -> None:
        """Start on the way to the host what leaves."""
        offload, self.closed, self._stays = self.offload, True, set()
        parcels = list(self.parcels.values())
        for parcel in parcels:
            parcel.count(+1)
        leaving = [parcel for parcel in parcels if self.leaves and parcel.span >= offload.smallest]
        for parcel in leaving:
            parcel.place, self._on_host = self._on_host, self._on_host + -(-parcel.span // ALIGNED) * ALIGNED
        if not leaving:
            return
        self._pages = offload.pages.take(self._on_host)
        pairs = [(page, part) for parcel in leaving for page, part in self._pieces(parcel)]
        self._pending = offload.lane.copy(pairs, [now(offload.device)])
        offload.sent_bytes += sum(parcel.span for parcel in leaving)
        offload.host_bytes += self._on_host

    def let_go(self) -> None:
        """What is on the host leaves the device, as soon as the copies are over."""
        if self.opened:
            return
        self.settle()
        for parcel in list(self.parcels.values()):
            if parcel.place is not None:
                parcel.let_go()

    def open(self) -> None:
        """The layer's backward pass begins: what it saved is here, and what the layer before it saved is on its way."""
        if self.opened:
            return
        self.opened = True
        self.fetch()
        self.settle()
        self._leave_host()
        before, self.before = self.before, None
        if before is not None:
            before.fetch()

    def fetch(self) -> None:
        missing = [parcel for parcel in list(self.parcels.values()) if parcel.storage is None]
        if missing:
            for parcel in missing:
                parcel.make_room()
            # The room was the computation's until now: copies come behind all that it has been asked for.
            pairs = [(part, page) for parcel in missing for page, part in self._pieces(parcel)]
            self._pending = self.offload.lane.copy(pairs, [now(self.offload.device)])
            self._leave_host()

    def settle(self) -> None:
        """From here on the computation may use, change or free the memory that was copied from or to."""
        if self._pending is not None:
            wait(self.offload.device, self._pending)
            self._pending = None

    def _pieces(self, parcel: Parcel) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The bytes of a parcel piece by piece: on the host, on the device."""
        size, done = self.offload.pages.size, 0
        here = parcel.bytes_here()
        assert parcel.place is not None
        while done < parcel.span:
            page, start = divmod(parcel.place + done, size)
            count = min(size - start, parcel.span - done)
            yield self._pages[page][start : start + count], here[done : done + count]
            done += count

    def _leave_host(self) -> None:
        """Others may take the pages at once: they are written by the lane alone, behind what it has been asked for so far."""
        self.offload.pages.give(self._pages)
        self.offload.host_bytes -= self._on_host
        self._pages, self._on_host = [], 0

    def __del__(self) -> None:
        self._leave_host()  # of a pass that broke off


def movable(tensor: torch.Tensor, device: torch.device) -> bool:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return plain and tensor.device == device and tensor.numel() > 0 and not (tensor.is_conj() or tensor.is_neg())


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif dataclasses.is_dataclass(value):
        yield from tensors_in(list(vars(value).values()))


class HostPages:
    """Host memory in pages of one size. It grows to the most that was ever needed at once; after that nothing is allocated."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.size, self.allocated_bytes, self._device = size, 0, device
        self._free: list[torch.Tensor] = []
        self._taken: list[torch.Tensor] = []  # from the system, free or not

    def memory(self) -> Iterator[torch.Tensor]:
        yield from self._taken

    def take(self, wanted: int) -> list[torch.Tensor]:
        count = -(-wanted // self.size)
        missing = (count - len(self._free)) * self.size
        if missing > 0:
            self._taken.append(host_memory(missing, self._device))
            self._free += self._taken[-1].split(self.size)
            self.allocated_bytes += missing
        return [self._free.pop() for _ in range(count)]

    def give(self, pages: Sequence[torch.Tensor]) -> None:
        self._free += pages


# ---- counting ----------------------------------------------------------------------------------------------------------------------


def saved_bytes(run: Callable[[], Any]) -> int:
    """Bytes that autograd holds for the backward pass of what `run` returns, results that selective recompute keeps included: every
    storage once, whole; parameters not. What an offloading model sends away is not seen: its handle counts that."""
    tally = Tally()
    token = KEEPER.set(tally)
    try:
        with saved_tensors_hooks(tally.put, tally.take):
            result = run()
        total = tally.total()
    finally:
        KEEPER.reset(token)
    del result  # it held the graph, and the graph what was counted
    return total


@dataclass(frozen=True, eq=False)
class SavedTensor:
    tensor: torch.Tensor
    of_parameter: bool


class Tally:
    def __init__(self) -> None:
        self._held: weakref.WeakSet[SavedTensor] = weakref.WeakSet()

    def put(self, tensor: torch.Tensor) -> SavedTensor:
        held = SavedTensor(tensor.detach(), any(isinstance(of, torch.nn.Parameter) for of in (tensor, tensor._base)))
        self._held.add(held)
        return held

    def take(self, held: SavedTensor) -> torch.Tensor:
        return held.tensor

    def total(self) -> int:
        storages = {held: held.tensor.untyped_storage() for held in self._held}
        parameters = {storage.data_ptr() for held, storage in storages.items() if held.of_parameter}
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages.values()}
        return sum(size for address, size in sizes.items() if address not in parameters)
