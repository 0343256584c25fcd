"""Offload of activations: saved tensors are on the host between the forward and the backward pass.

Enters: a loaded model on its device, after fusing and recompute. Leaves: the same model, whose decoder layers send the tensors that they
save for the backward pass to host memory as soon as they have run, and the record of pending copies. With recompute these tensors are the
inputs of layers, and kept results of products and attention. The backward pass fetches them one layer ahead.

Guaranteed: tensors come back with their bits, shape, strides and alignment. A storage is copied once per layer, however many views of it
were saved. Parameters, arguments that all layers share (rotary angles, bounds of documents), small tensors and the last layer, which is
needed first, stay on the device. The host waits for nothing: copies run on a stream of their own, and streams wait for each other. While a
layer runs, at most one other is being copied out and at most one is fetched early, so device memory is bounded although the host runs
ahead of the device; between the passes only the last layer's tensors are on the device. Host memory is pinned once, in pages that serve
micro-batches of any size. Without gradients nothing changes. On CPU the same code copies within main memory, for tests: it saves nothing.

    offload_activations(model).pages.memory()  # its host memory
    saved_bytes(run)  # bytes that autograd keeps for the backward pass of run()'s result
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fulltilt.memory.offload import Lane, Mark, host_memory, now, wait
from fulltilt.memory.recompute import NO_LAYERS, Forward, put_around, saving_to
from fulltilt.model.scalar import decoder_layers

SMALLEST = 1 << 20  # smaller storages are not worth a copy
PAGE = 16 << 20  # bytes of host memory that belong to one layer at a time
ALIGNED = 512  # torch's allocator aligns to it; kernels choose their form by alignment, so fetched tensors have the same


def offload_activations(model: torch.nn.Module, *, smallest: int = SMALLEST, page: int = PAGE) -> ActivationOffload:
    """Send the tensors that the model's layers save to the host."""
    assert smallest >= 1 and page % ALIGNED == 0
    layers = decoder_layers(model, NO_LAYERS)
    offload = ActivationOffload(next(layers[0].parameters()).device, smallest, page)
    for layer in layers:
        forward = OffloadedForward(layer.forward, offload, layer, layer is layers[0], layer is layers[-1])
        put_around(layer, forward)
    return offload


class ActivationOffload:
    """State shared by the layers of one model: pending copies, and the host memory for them."""

    def __init__(self, device: torch.device, smallest: int, page: int) -> None:
        self.device, self.smallest = device, smallest
        self.lane, self.pages = Lane(device), HostPages(device, page)
        self._waiting: SavedByLayer | None = None  # tensors being copied to the host, still on the device
        self._latest: weakref.ref[SavedByLayer] | None = None
        self._given: dict[int, set[int]] = {}  # id of an argument of this pass -> addresses of the storages in it

    def begin(self, parameters: Sequence[torch.Tensor], given: Sequence[Any], *, first: bool, last: bool) -> SavedByLayer:
        if first:
            self._let_go()  # left by a pass that was aborted
            self._latest = None
            self._given.clear()
        stays = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        for value in given:
            if id(value) not in self._given:  # the caller holds the value for as long as the pass lasts
                self._given[id(value)] = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(value)}
            stays |= self._given[id(value)]
        return SavedByLayer(self, stays, leaves=not last)

    def close(self, saved: SavedByLayer) -> None:
        """Send a layer's saved tensors after it has run, and release those that have been sent."""
        if not saved.parcels:  # the layer's call was deferred to a later one
            return
        saved.before = self._latest() if self._latest else None
        self._latest = weakref.ref(saved)
        saved.close()
        self._let_go()
        self._waiting = saved if saved.leaves else None

    def _let_go(self) -> None:
        """Make the compute stream wait for the copies of the previous layer, and release its device memory."""
        if self._waiting is not None:
            self._waiting.let_go()
        self._waiting = None


@dataclass(eq=False)
class OffloadedForward:
    """The forward function of one layer. Without gradients, it is the layer's own."""

    own: Forward
    offload: ActivationOffload
    layer: torch.nn.Module  # its parameters may be other tensors in each pass, if they are sharded
    first: bool
    last: bool
    outermost = True

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.own(hidden_states, *args, **kwargs)
        saved = self.offload.begin(list(self.layer.parameters()), [*args, *kwargs.values()], first=self.first, last=self.last)
        with saving_to(saved):
            out = self.own(hidden_states, *args, **kwargs)
        self.offload.close(saved)
        return out


# ---- tensors that a layer saves ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class View:
    """A saved tensor, as a view of its parcel."""

    parcel: Parcel
    dtype: torch.dtype
    offset: int  # bytes from the beginning of the storage
    shape: torch.Size
    stride: tuple[int, ...]


class Parcel:
    """One storage of a layer. Views hold it until the last of their nodes has run backward."""

    def __init__(self, saved: SavedByLayer, tensor: torch.Tensor) -> None:
        self.saved = saved
        self.storage: torch.UntypedStorage | None = tensor.untyped_storage()
        self.begin, self.end = self.storage.nbytes(), 0  # range of bytes that views cover
        self.origin = 0  # byte of the original storage at which the current storage begins
        self.place: int | None = None  # offset of its bytes in its layer's host memory

    @property
    def span(self) -> int:
        return self.end - self.begin

    def __del__(self) -> None:
        # The memory goes back to the compute stream, which must not write there before copies from and to it are done.
        if self.storage is not None:
            self.saved.settle()


class SavedByLayer:
    """All tensors that one layer has saved in one pass, which are copied together. Implements `Keeper`."""

    def __init__(self, offload: ActivationOffload, stays: set[int], *, leaves: bool) -> None:
        self.offload, self.leaves = offload, leaves
        self.parcels: weakref.WeakValueDictionary[int, Parcel] = weakref.WeakValueDictionary()  # by address in the forward pass
        self.before: SavedByLayer | None = None
        self.opened = False
        self._stays = stays
        self._pages: list[torch.Tensor] = []
        self._pending: Mark = None  # end of its copies, until the compute stream has waited for it

    def put(self, tensor: torch.Tensor) -> Any:
        address = tensor.untyped_storage().data_ptr() if movable(tensor, self.offload.device) else 0
        if address == 0 or address in self._stays:
            return tensor.detach()
        parcel = self.parcels.get(address)
        if parcel is None:
            parcel = self.parcels[address] = Parcel(self, tensor)
        offset = int(tensor.storage_offset()) * tensor.itemsize
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        parcel.begin = min(parcel.begin, offset // ALIGNED * ALIGNED)
        parcel.end = max(parcel.end, offset + reach * tensor.itemsize)
        return View(parcel, tensor.dtype, offset, tensor.shape, tensor.stride())

    def take(self, held: Any) -> torch.Tensor:
        if isinstance(held, torch.Tensor):
            return held
        parcel = held.parcel
        parcel.saved.open()
        here = torch.empty(0, dtype=held.dtype, device=parcel.storage.device)
        return here.set_(parcel.storage, (held.offset - parcel.origin) // held.dtype.itemsize, held.shape, held.stride)

    def close(self) -> None:
        """Start copying to the host."""
        offload, on_host, self._stays = self.offload, 0, set()
        leaving = [parcel for parcel in list(self.parcels.values()) if self.leaves and parcel.span >= offload.smallest]
        for parcel in leaving:
            parcel.place, on_host = on_host, on_host + -(-parcel.span // ALIGNED) * ALIGNED
        if leaving:
            self._pages = offload.pages.take(on_host)
            pairs = [(page, part) for parcel in leaving for page, part in self._pieces(parcel)]
            self._pending = offload.lane.copy(pairs, [now(offload.device)])

    def let_go(self) -> None:
        """Release the device memory of tensors that are on the host, once the copies are done."""
        if self.opened:
            return
        self.settle()
        for parcel in list(self.parcels.values()):
            if parcel.place is not None:
                parcel.storage = None

    def open(self) -> None:
        """Bring the layer's tensors to the device when its backward pass begins, and start fetching those of the layer before it."""
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
                parcel.storage = torch.empty(parcel.span, dtype=torch.uint8, device=self.offload.device).untyped_storage()
                parcel.origin = parcel.begin
            # The memory was the compute stream's until now: copies come after all of its queued work.
            pairs = [(part, page) for parcel in missing for page, part in self._pieces(parcel)]
            self._pending = self.offload.lane.copy(pairs, [now(self.offload.device)])
            self._leave_host()

    def settle(self) -> None:
        """Let the compute stream use, change or free copied memory from here on."""
        if self._pending is not None:
            wait(self.offload.device, self._pending)
            self._pending = None

    def _pieces(self, parcel: Parcel) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the bytes of a parcel, page by page, on the host and on the device."""
        assert parcel.place is not None and parcel.storage is not None
        size, done = self.offload.pages.size, 0
        whole = torch.empty(0, dtype=torch.uint8, device=parcel.storage.device).set_(parcel.storage)  # type: ignore[call-overload]
        here = whole[parcel.begin - parcel.origin : parcel.end - parcel.origin]
        while done < parcel.span:
            page, start = divmod(parcel.place + done, size)
            count = min(size - start, parcel.span - done)
            yield self._pages[page][start : start + count], here[done : done + count]
            done += count

    def _leave_host(self) -> None:
        """Free the pages. Other layers may take them at once: only the lane writes them, after all copies queued so far."""
        self.offload.pages.give(self._pages)
        self._pages = []

    def __del__(self) -> None:
        self._leave_host()  # after an aborted pass


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
    """Host memory in pages of one size. It grows to the most that was ever needed at once."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.size, self._device = size, device
        self._free: list[torch.Tensor] = []
        self._taken: list[torch.Tensor] = []  # allocations, free or in use

    def memory(self) -> Iterator[torch.Tensor]:
        yield from self._taken

    def take(self, wanted: int) -> list[torch.Tensor]:
        count = -(-wanted // self.size)
        missing = (count - len(self._free)) * self.size
        if missing > 0:
            self._taken.append(host_memory(missing, self._device))
            self._free += self._taken[-1].split(self.size)
        return [self._free.pop() for _ in range(count)]

    def give(self, pages: Sequence[torch.Tensor]) -> None:
        self._free += pages


# ---- counting ----------------------------------------------------------------------------------------------------------------------


def saved_bytes(run: Callable[[], Any]) -> int:
    """Return the bytes that autograd holds for the backward pass of `run`'s result, including results that selective recompute keeps: every
    storage once, whole, without parameters. Tensors that an offloading model sends to the host are counted by its handle instead."""
    counter = SavedCounter()
    with saving_to(counter):
        result = run()
    total = counter.total()
    del result  # frees the graph, which held the counted tensors
    return total


@dataclass(frozen=True, eq=False)
class SavedTensor:
    tensor: torch.Tensor
    of_parameter: bool


class SavedCounter:
    """Counts the tensors that are still held. Implements `Keeper`."""

    def __init__(self) -> None:
        self._held: weakref.WeakSet[SavedTensor] = weakref.WeakSet()

    def put(self, tensor: torch.Tensor) -> SavedTensor:
        held = SavedTensor(tensor.detach(), any(isinstance(of, torch.nn.Parameter) for of in (tensor, tensor._base)))
        self._held.add(held)
        return held

    def take(self, held: SavedTensor) -> torch.Tensor:
        return held.tensor

    def total(self) -> int:
        sizes = {held.tensor.untyped_storage().data_ptr(): held.tensor.untyped_storage().nbytes() for held in self._held}
        parameters = {held.tensor.untyped_storage().data_ptr() for held in self._held if held.of_parameter}
        return sum(size for address, size in sizes.items() if address not in parameters)
