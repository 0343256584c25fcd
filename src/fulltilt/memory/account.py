"""Who holds how much memory, by kind and by phase, measured.

Enters: for each kind, functions that name its tensors at the moment they are asked (caches come and go, offloaded tensors move); phases
as they begin and end, and the passes inside them. Leaves: a `Reading` for each phase, and the metrics `memory_gib/...` of docs/metrics.md.

Guaranteed: a storage is counted once, whole, as the first of KINDS that names it (a float32 parameter is its own master; joined weights are
views of one storage); what is on the host beside a CUDA device is counted apart. Of each kind a phase says the most that a look has found:
when its passes ended, when asked to look, and when it ended itself, for gradients and caches are gone by then. On CUDA the rest comes from
torch's allocator, which counts when memory is asked for and not when a kernel runs: nothing waits for the device. `other` is what the
allocator has handed out at the end less the known kinds. On a CPU torch counts nothing, so peak, activations and `other` are left out
rather than guessed; the process's resident bytes are said for what they are. A look costs two microseconds for every known tensor.

    account = Account(device, {"parameters": [lambda: weights_of(model)], "gradients": [lambda: gradients_of(model)]})
    with account.phase("update-actor"):
        with account.passes():  # forward and backward alone: what they take and give back is called activations
            trainer.accumulate(batch)
        trainer.apply()
    account.metrics()  # of the phases that ended since it was last asked

On CUDA an account resets the allocator's peaks at every border, so `torch.cuda.max_memory_allocated` and `max_memory_reserved` say less
than before: `peak_bytes` and `peak_reserved_bytes` are those of the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch

from fulltilt.observe.health import MEMORY
from fulltilt.observe.metrics import TIMING_NAMES

# Activations are named where they are offloaded, for the host's sake; what is on the device of them, the allocator tells.
Kind = Literal["parameters", "gradients", "optimizer", "kv", "activations"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Source = Callable[[], Iterable[torch.Tensor]]


@dataclass(frozen=True)
class HeldBytes:
    """Bytes of each kind."""

    device: Mapping[str, int]
    host: Mapping[str, int]  # beside a CUDA device: offloaded

    def most(self, other: HeldBytes | None) -> HeldBytes:
        """The larger number of each kind."""
        if other is None:
            return self
        device = {kind: max(count, other.device[kind]) for kind, count in self.device.items()}
        return HeldBytes(device, {kind: max(count, other.host[kind]) for kind, count in self.host.items()})


@dataclass(frozen=True)
class Reading:
    """Of one phase, in bytes. None: not to be known here."""

    held: HeldBytes  # the most of each kind that a look has found
    other: int | None = None  # of no known kind, on the device, at the end
    reserved: int | None = None  # taken from the device, handed out or not, at the end
    peak: int | None = None
    activations: int | None = None  # the most that passes took beyond what was there before or after them, the head's share included
    head: int | None = None  # the head's largest temporaries, by its own count

    def after(self, earlier: Reading) -> Reading:
        """Of a phase that came twice in a step."""
        return replace(
            self,
            held=self.held.most(earlier.held),
            peak=larger(earlier.peak, self.peak),
            activations=larger(earlier.activations, self.activations),
            head=larger(earlier.head, self.head),
        )

    def numbers(self) -> dict[str, int | None]:
        on_host = sum(self.held.host.values()) if self.peak is not None else None
        passing = {"peak": self.peak, "activations": self.activations, "head": self.head}
        return {**self.held.device, "other": self.other, "host": on_host, **passing}  # activations on the device: as the allocator counts


@dataclass(eq=False)
class Span:
    """A stretch of work that is being measured."""

    begin: int  # allocated when it began
    end: int = 0  # and when it ended
    peak: int = 0  # the most allocated in between
    held: HeldBytes | None = None  # the most that looks have found so far, of a phase
    activations: int | None = None  # of the passes in it
    head: int | None = None


class Account:
    def __init__(self, device: torch.device, sources: Mapping[Kind, Sequence[Source]]) -> None:
        """`sources`: a kind that is not there is not reported."""
        self.device = device
        self._sources = {kind: tuple(sources[kind]) for kind in KINDS if kind in sources}
        self._counted = device.type == "cuda"
        self._peak = self._peak_reserved = 0
        self._spans: list[Span] = []  # open, the innermost last
        self._phases: list[Span] = []  # those of them that are phases
        self._readings: dict[str, Reading] = {}  # of phases that ended since they were last asked for

    def held(self) -> HeldBytes:
        """Bytes of the tensors that are there now, each storage once."""
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

    @property
    def peak_bytes(self) -> int | None:
        """The most that was ever allocated on the device; None on a CPU."""
        self._mark()
        return self._peak if self._counted else None

    @property
    def peak_reserved_bytes(self) -> int | None:
        """The most that the allocator ever had from the device, handed out or not; None on a CPU."""
        self._mark()
        return self._peak_reserved if self._counted else None

    def look(self) -> None:
        """Before what a phase holds is given back inside it."""
        held = self.held()
        for phase in self._phases:
            phase.held = held.most(phase.held)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures a phase, unless it fails. Phases may nest: an inner one's peak is the outer one's too."""
        assert name in TIMING_NAMES, f"{name!r} is not the name of a phase"
        with self._span() as span:
            self._phases.append(span)
            try:
                yield
            finally:
                self._phases.pop()
        reading = self._read(span)
        self._readings[name] = reading.after(self._readings[name]) if name in self._readings else reading

    @contextmanager
    def passes(self, head_bytes: int | None = None) -> Iterator[None]:
        """Around passes through a model and nothing else: what moves to or from the device for them belongs outside, or it is counted as
        activations. Gradients that are made in them stay, and are not. What is held is looked at when they end. `head_bytes`: the largest
        temporaries of the head in these passes, by its own count, for no border can be drawn around its backward pass from here."""
        assert self._phases, "passes are part of a phase"
        with self._span() as span:
            yield
        self.look()
        phase = self._phases[-1]
        if self._counted:
            phase.activations = larger(phase.activations, span.peak - max(span.begin, span.end))
        phase.head = larger(phase.head, head_bytes)

    def take(self) -> dict[str, Reading]:
        """The phases that ended since they were last asked for, in the order in which they first ended."""
        readings, self._readings = self._readings, {}
        return readings

    def metrics(self) -> dict[str, float]:
        """The same under the names of docs/metrics.md, in GiB. What ended after the last step's line is in this one."""
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
        """A border: every open span learns the peak since the last one. Returns what is allocated now."""
        if not self._counted:
            return 0
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        allocated = stats["allocated_bytes"]["all"]
        self._peak = max(self._peak, allocated["peak"])
        self._peak_reserved = max(self._peak_reserved, stats["reserved_bytes"]["all"]["peak"])
        for span in self._spans:
            span.peak = max(span.peak, allocated["peak"])
        torch.cuda.reset_peak_memory_stats(self.device)
        return int(allocated["current"])

    def _read(self, span: Span) -> Reading:
        held = self.held()
        most = held.most(span.held)
        if not self._counted:
            return Reading(most, head=span.head)
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        allocated, reserved = (int(stats[name]["all"]["current"]) for name in ("allocated_bytes", "reserved_bytes"))
        return Reading(
            held=most,
            other=allocated - sum(held.device.values()),
            reserved=reserved,
            peak=span.peak,
            activations=span.activations,
            head=span.head,
        )


def weights_of(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, and the few buffers that a model has."""
    yield from model.parameters()
    yield from model.buffers()


def gradients_of(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Accumulators and what autograd has left, as far as they are there."""
    for parameter in model.parameters():
        for gradient in (getattr(parameter, "main_grad", None), parameter.grad):
            if gradient is not None:
                yield gradient


def process_bytes() -> int | None:
    """Of this process in the computer's own memory, now; None where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def larger(one: int | None, other: int | None) -> int | None:
    return max((count for count in (one, other) if count is not None), default=None)
