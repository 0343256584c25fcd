"""Memory account: measured memory of each kind of tensor in each phase.

Enters: for each kind, functions that list its current tensors (caches come and go, offloaded tensors move); phases as they begin and end,
and the passes inside them. Leaves: a `Reading` for each phase, and the metrics `memory_gib/...` of docs/metrics.md.

Guaranteed: a storage is counted once, whole, for the first of KINDS that lists it (a float32 parameter is its own master; joined weights
are views of one storage); host memory of a CUDA run is counted apart. A phase reports the most of each kind found at the end of its passes,
at calls of `look`, and at its own end, since gradients and caches may be gone by then. On CUDA the other numbers come from torch's
allocator, which counts when memory is requested and not when a kernel runs, so nothing waits for the device. `other` is the allocated
memory at the end minus the known kinds. On a CPU torch counts nothing, so peak, activations and `other` are left out rather than guessed;
the process's resident bytes are reported. A look takes two microseconds per known tensor.

    account = Account(device, {"parameters": [lambda: weights_of(model)], "gradients": [lambda: gradients_of(model)]})
    with account.phase("update-actor"):
        with account.passes():  # forward and backward only: memory that they take and give back counts as activations
            trainer.accumulate(batch)
        trainer.apply()
    account.metrics()  # for the phases that ended since the last call

On CUDA an account resets the allocator's peaks at every border between phases and passes, so use `peak_bytes` and `peak_reserved_bytes`
instead of `torch.cuda.max_memory_allocated` and `max_memory_reserved` for the peaks of the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch

from fulltilt.model.arrays import local
from fulltilt.observe.health import MEMORY
from fulltilt.observe.metrics import TIMING_NAMES
from fulltilt.words import in_bytes

# Activations have a list of tensors only where they are offloaded, for their host memory; the allocator measures those on the device.
Kind = Literal["parameters", "gradients", "optimizer", "kv", "activations"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Source = Callable[[], Iterable[torch.Tensor]]


@dataclass(frozen=True)
class HeldBytes:
    """Bytes of each kind of tensor."""

    device: Mapping[str, int]
    host: Mapping[str, int]  # bytes by kind that a CUDA run has offloaded

    def most(self, other: HeldBytes) -> HeldBytes:
        """Return the larger number of each kind."""
        device = {kind: max(count, other.device.get(kind, 0)) for kind, count in self.device.items()}
        return HeldBytes(device, {kind: max(count, other.host.get(kind, 0)) for kind, count in self.host.items()})


@dataclass(frozen=True)
class Reading:
    """Memory of one phase, in bytes; if the phase ran twice in a step, the most of both. None: not measurable on this device."""

    held: HeldBytes = HeldBytes({}, {})  # the most of each kind
    other: int | None = None  # bytes on the device of no known kind, at the end
    reserved: int | None = None  # bytes that the allocator has taken from the device, in use or not, at the end
    peak: int | None = None
    activations: int | None = None  # the most that passes allocated beyond the memory before or after them, including the head's share
    head: int | None = None  # the head's largest temporaries, by its own count

    def most(self, other: Reading) -> Reading:
        """Return the larger of each number, for example of two workers."""
        names = ("other", "reserved", "peak", "activations", "head")
        found = {name: larger(getattr(self, name), getattr(other, name)) for name in names}
        return Reading(self.held.most(other.held), **found)

    def numbers(self) -> dict[str, int | None]:
        on_host = sum(self.held.host.values()) if self.peak is not None else None
        passing = {"peak": self.peak, "activations": self.activations, "head": self.head}
        return {**self.held.device, "other": self.other, "host": on_host, **passing}  # activations: the allocator's number


@dataclass(eq=False)
class Span:
    """A phase, or the passes inside one, during its measurement: bytes allocated at its beginning and end, and the most in between."""

    begin: int
    end: int = 0
    peak: int = 0


class Account:
    def __init__(self, device: torch.device, sources: Mapping[Kind, Sequence[Source]]) -> None:
        """`sources`: by kind; a kind without an entry is not reported."""
        self.device = device
        self._sources = {kind: tuple(sources[kind]) for kind in KINDS if kind in sources}
        self._counted = device.type == "cuda"
        self._peak = self._peak_reserved = self._reserved = 0
        self._spans: list[Span] = []  # open spans, the innermost last
        self._phases: list[Reading] = []  # readings of open phases, the innermost last
        self._readings: dict[str, Reading] = {}  # readings of phases that ended since the last `take`

    def held(self) -> HeldBytes:
        """Return the bytes of the tensors that exist now, each storage once."""
        on_device: dict[str, int] = dict.fromkeys(self._sources, 0)
        on_host = dict(on_device)
        seen: set[int] = set()
        for kind, sources in self._sources.items():
            for tensor in (tensor for source in sources for tensor in source()):
                storage = tensor.untyped_storage()
                address = storage.data_ptr()
                if address and address not in seen:
                    seen.add(address)
                    side = on_device if tensor.device.type == self.device.type else on_host
                    side[kind] += storage.nbytes()
        return HeldBytes(on_device, on_host)

    def explain(self, reported: str) -> str:
        """Extend an out-of-memory report by the memory that is held in addition to the failed work."""
        held = self.held().device
        kinds = ", ".join(f"{kind} {in_bytes(count)}" for kind, count in held.items() if count)
        of = f", on a device of {in_bytes(self.device_bytes)}" if self._counted else ""
        return f"{reported.rstrip('.')}. Held beside that work: {kinds}{of}." if reported and kinds else reported

    @property
    def peak_bytes(self) -> int | None:
        """The most memory that was ever allocated on the device; None on a CPU."""
        self._mark()
        return self._peak if self._counted else None

    @property
    def device_bytes(self) -> int:
        """The memory of the device; 0 on a CPU."""
        return torch.cuda.mem_get_info(self.device)[1] if self._counted else 0

    @property
    def peak_reserved_bytes(self) -> int | None:
        """The most memory that the allocator ever took from the device, in use or not; None on a CPU."""
        self._mark()
        return self._peak_reserved if self._counted else None

    def look(self) -> None:
        """Count the memory that is held now. Call it before a phase frees tensors."""
        held = self.held()
        self._phases = [replace(reading, held=held.most(reading.held)) for reading in self._phases]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase, unless it fails. Phases may nest: an inner one's peak counts for the outer one too."""
        assert name in TIMING_NAMES, f"{name!r} is not the name of a phase"
        with self._span() as span:
            self._phases.append(self._readings.get(name, Reading()))
            try:
                yield
            finally:
                reading = self._phases.pop()
        held = self.held()
        reading = replace(reading, held=held.most(reading.held))
        if self._counted:
            other, peak = span.end - sum(held.device.values()), larger(reading.peak, span.peak)
            reading = replace(reading, other=other, reserved=self._reserved, peak=peak)
        self._readings[name] = reading

    @contextmanager
    def passes(self, head_bytes: int | None = None) -> Iterator[None]:
        """Measure passes through a model and nothing else: memory that moves to or from the device inside would count as activations.
        Gradients, which stay, do not. Held tensors are counted at the end. `head_bytes`: the largest temporaries of the head in these
        passes, by its own count, since its backward pass cannot be measured separately from here."""
        assert self._phases, "passes are part of a phase"
        with self._span() as span:
            yield
        self.look()
        found = self._phases[-1]
        taken = span.peak - max(span.begin, span.end) if self._counted else None
        self._phases[-1] = replace(found, activations=larger(found.activations, taken), head=larger(found.head, head_bytes))

    def take(self) -> dict[str, Reading]:
        """Return the readings of the phases that ended since the last call, in the order in which they first ended."""
        readings, self._readings = self._readings, {}
        return readings

    def pending(self) -> dict[str, Reading]:
        """Return the readings that `take` would return, without removing them."""
        return dict(self._readings)

    def restore(self, pending: Mapping[str, Reading]) -> None:
        """Add the readings that another process's `pending` has returned."""
        self._readings = {phase: reading for phase, reading in pending.items() if phase in TIMING_NAMES}

    def metrics(self) -> dict[str, float]:
        """Return the result of `take` under the names of docs/metrics.md, in GiB. Phases that end after a step's metrics are written count
        for the next step."""
        readings = self.take()
        found: dict[str, int | None] = {
            f"{TIMING_NAMES[phase]}/{name}": count for phase, reading in readings.items() for name, count in reading.numbers().items()
        }
        found["reserved"] = max((reading.reserved for reading in readings.values() if reading.reserved is not None), default=None)
        found["process"] = process_bytes()
        return {f"{MEMORY}{name}": count / 2**30 for name, count in found.items() if count is not None}

    @contextmanager
    def _span(self) -> Iterator[Span]:
        span = Span(begin=self._mark())
        self._spans.append(span)
        try:
            yield span
        finally:
            span.end = self._mark()
            self._spans.pop()

    def _mark(self) -> int:
        """Give every open span the peak since the last mark. Returns the bytes allocated now."""
        if not self._counted:
            return 0
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        allocated = stats["allocated_bytes"]["all"]
        self._peak = max(self._peak, allocated["peak"])
        reserved = stats["reserved_bytes"]["all"]
        self._reserved, self._peak_reserved = reserved["current"], max(self._peak_reserved, reserved["peak"])
        for span in self._spans:
            span.peak = max(span.peak, allocated["peak"])
        torch.cuda.reset_peak_memory_stats(self.device)
        return int(allocated["current"])


def weights_of(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield a model's parameters and buffers."""
    yield from map(local, model.parameters())
    yield from model.buffers()


def gradients_of(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield accumulators and autograd's own gradients that exist now."""
    for parameter in model.parameters():
        for gradient in (getattr(parameter, "main_grad", None), parameter.grad):
            if gradient is not None:
                yield local(gradient)


def process_bytes() -> int | None:
    """Return the main memory that this process uses now; None if the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def larger(one: int | None, other: int | None) -> int | None:
    return max((count for count in (one, other) if count is not None), default=None)
