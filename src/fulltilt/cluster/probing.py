"""Micro-batches and rollouts that are measured at the start of a run, for the plan and for predictions.

Enters: the trainer of a role, or the engine, before anything has learned. Leaves: `UpdatePass` and `RolloutPass` records, smallest first.
If memory runs out, no larger micro-batch is tried, or the rollouts do not count as measured. Guaranteed: parameters, optimizer, random
generators, statistics and limits stay as they are: gradients and samples are dropped, the algorithm's loss is never called, and the
engine's memory is freed.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import transformers
from torch.autograd.graph import saved_tensors_hooks

import fulltilt
from fulltilt.cluster.sizes import free_bytes
from fulltilt.hardware import processor
from fulltilt.memory.trial import MemoryTrial, RandomState, free_unused
from fulltilt.plan.decisions import RoleSettings
from fulltilt.plan.facts import RoleFacts
from fulltilt.records import MicroBatch, Prompt, RolloutPass, UpdateCosts, UpdatePass, UpdatePasses
from fulltilt.rollout.engine import Engine, EngineLimits, RolloutLimits
from fulltilt.rollout.sampler import Sampling
from fulltilt.rollout.stats import Recorder
from fulltilt.training.roles import Policy
from fulltilt.training.trainer import Trainer
from fulltilt.words import first_line

# Measured micro-batches: the largest one's tokens divided by each key, with this many passes. On a GPU the small ones measure the host, for
# which the GPU waits, and the largest one the device.
SIZES = {"cuda": {32: 9, 8: 5, 1: 3}, "cpu": {32: 2, 16: 2, 8: 2, 4: 2}}
SHORT = 32  # short samples have this part of the largest micro-batch
LEAST_TOKENS = 64
REPEATS = 2  # rollouts, of which the fastest counts
MOST_SECONDS = 15.0  # for updates of a role, after a first pass that may compile; rollouts have what the actor's updates leave
RESPONSES = (16, 80)  # tokens of each response in the two measured rollouts, whose difference is decode steps only
MOST_PROMPT_TOKENS = 32768  # of all prompts of a measured rollout together

Found = TypeVar("Found")


class Probe(Protocol):
    """Finds earlier measurements, or makes them: `tune.probe.Prober`. The keys are everything that the results depend on."""

    @property
    def clock(self) -> bool:
        """Whether seconds are measured."""

    def updates(self, key: str, measure: Callable[[], UpdatePasses], *, free_bytes: int, apart: bool) -> UpdateCosts | None: ...

    def rollouts(self, key: str, measure: Callable[[], Sequence[RolloutPass]]) -> Sequence[RolloutPass]: ...


class TimeLimit:
    """The seconds that measurements may take; those inside `counted` are used up. Without a clock, measurements may take any time."""

    def __init__(self, seconds: float, *, clock: bool) -> None:
        self._left = seconds if clock else math.inf

    def allows(self, seconds: float = 0.0) -> bool:
        """Return whether there is time for something that takes this long."""
        return seconds < self._left

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        if math.isinf(self._left):
            yield
            return
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._left -= time.perf_counter() - begin


def environment(device: torch.device, config_keys: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return everything that all measurements depend on, besides the model."""
    host = f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    versions = (fulltilt.__version__, torch.__version__, transformers.__version__)
    return (torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU", host, versions, dict(config_keys))


def may_run_out() -> MemoryTrial:
    """A trial for a measurement in which memory may run out: the measurement is dropped, and need not be repeated."""
    return MemoryTrial(lambda: True)


@contextlib.contextmanager
def leaving_no_trace(device: torch.device) -> Iterator[None]:
    """Free what measurements leave in the allocator, however they end: pieces of their sizes would fragment the KV cache's memory."""
    try:
        yield
    finally:
        free_unused(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)


def measured_if_possible(measure: Callable[[], Found], nothing: Found, notes: list[str]) -> Found:
    """Return what `measure` returns. A run needs no probe: on an error it gets a note, and continues with what was planned."""
    try:
        return measure()
    except Exception as error:
        notes.append(f"the probe has measured nothing: {first_line(error)}")
        return nothing


# ---- updates -----------------------------------------------------------------------------------------------------------------------------


def probe_updates(
    probe: Probe, trainers: Mapping[str, Trainer], facts: Mapping[str, RoleFacts], settings: Mapping[str, RoleSettings],
    largest: Mapping[str, int], longest: int, where: tuple[Any, ...], limits: Mapping[str, TimeLimit], bring: Callable[[str], None],
    notes: list[str],
) -> dict[str, UpdateCosts]:  # fmt: skip
    """Measure the costs of each role's updates. `largest`: tokens of its largest micro-batch, as planned without measurements. `longest`:
    tokens of the longest sample. `where`: the `environment`. `limits`: one per role, so that a slow one leaves time to the next. `bring`:
    moves a role to the device, and all others that may leave off it, as for its update. `notes`: gets what was not measured, and why."""
    found, free = {}, min(free_bytes(own.role.device) for own in trainers.values())
    for role, trainer in trainers.items():

        def measure(trainer: Trainer = trainer, role: str = role) -> UpdatePasses:
            bring(role)
            with leaving_no_trace(trainer.role.device):
                found = measure_updates(trainer, largest[role], longest, facts[role].shape.vocabulary, limits[role], clock=probe.clock)
            if not found.complete:
                why = f"{MOST_SECONDS:.0f} seconds were too few for all sizes of its micro-batches"
                notes.append(f"probe: updates of the {role} count as not measured, and its token budget stays: {why}")
            return replace(found, free_bytes=free)

        own = facts[role]
        sizes = (own.shape, own.parameter_bytes, own.trained, own.itemsize, own.fused, own.vocabulary_head)
        entropy = trainer.role.learning_entropy if isinstance(trainer.role, Policy) else ""
        key = repr((where, sizes, asdict(settings[role]), entropy, largest[role], longest))
        costs = probe.updates(key, measure, free_bytes=free, apart=trainer.role.device.type == "cuda")
        if costs is not None:
            found[role] = costs
    return found


@dataclass(frozen=True)
class MeasuredSize:
    """The size of a measured micro-batch."""

    tokens: int
    length: int  # tokens of each sample
    passes: int  # passes to measure, of which the median counts

    def micro_batch(self, vocabulary: int) -> MicroBatch:
        return micro_batch(self.tokens, max(2, min(self.length, self.tokens)), vocabulary)


def measure_updates(trainer: Trainer, largest: int, longest: int, vocabulary: int, limit: TimeLimit, *, clock: bool) -> UpdatePasses:
    """Measure passes over micro-batches of a few sizes, of samples as long as possible and of short ones. Measurements end where memory
    runs out: the cost of the smaller sizes, and that this one does not fit, is just what the plan needs."""
    kind = trainer.role.device.type
    sizes = [MeasuredSize(max(LEAST_TOKENS, largest // part), longest, passes) for part, passes in SIZES[kind].items()]
    short = max(2, min(longest, largest // SHORT))
    sizes += [replace(own, length=short) for own in (sizes if kind == "cpu" else sizes[-1:])]
    passes: list[UpdatePass] = []
    trainer.optimizer.prepare()
    try:
        with may_run_out() as trial:
            one_pass(trainer, sizes[0].micro_batch(vocabulary))  # compiles and takes workspaces
        if trial.failure is not None:
            return UpdatePasses((), ran_out_at=len(sizes[0].micro_batch(vocabulary).ids))
        token_s = 0.0
        for size in sorted(set(sizes), key=lambda own: own.tokens):
            if not limit.allows(token_s * size.tokens * size.passes):
                return UpdatePasses(tuple(passes), complete=False)
            with limit.counted(), may_run_out() as trial:
                passes.append(measure_size(trainer, size, vocabulary, clock=clock))
            if trial.failure is not None:
                return UpdatePasses(tuple(passes), ran_out_at=len(size.micro_batch(vocabulary).ids))
            token_s = (passes[-1].seconds or 0.0) / passes[-1].tokens  # at most, for the next larger size
        return UpdatePasses(tuple(passes))
    finally:
        trainer.optimizer.zero_grad()


def micro_batch(tokens: int, length: int, vocabulary: int) -> MicroBatch:
    """Make a micro-batch of samples with this many tokens, of which all but the first are trained on. The weights make gradients like those
    of a step: a GPU multiplies zeros faster."""
    count = max(1, tokens // length)
    positions = np.tile(np.arange(length), count)
    trained = np.flatnonzero(positions)
    return MicroBatch(
        ids=np.arange(count * length) * 7919 % vocabulary,  # many different tokens, so that routers choose different experts
        positions=positions,
        cu_seqlens=np.arange(0, count * length + 1, length, dtype=np.int32),
        rows=tuple(range(count)),
        trained=trained,
        trained_row=trained // length,
        weights=np.random.default_rng(0).standard_normal(len(trained)) / len(trained),
        fresh=np.ones(len(trained), bool),
    )


def measure_size(trainer: Trainer, size: MeasuredSize, vocabulary: int, *, clock: bool) -> UpdatePass:
    device, micro = trainer.role.device, size.micro_batch(vocabulary)
    taken, seconds = 0, None
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    else:
        kept = KeptBytes(trainer.role.model.parameters())  # type: ignore[attr-defined]
        with saved_tensors_hooks(kept.put, kept.take):
            one_pass(trainer, micro)
        taken = kept.count
    if clock or device.type == "cuda":
        with collection_off():  # a run's objects are frozen once it begins
            times = [seconds_of_pass(trainer, micro, clock=clock) for _ in range(size.passes)]
            seconds = median(times) if clock else None  # a pass that the host delays does not count
    if device.type == "cuda":
        taken = torch.cuda.max_memory_allocated(device) - max(before, torch.cuda.memory_allocated(device))
    lengths = np.diff(micro.cu_seqlens).astype(np.int64)
    return UpdatePass(len(micro.ids), int((lengths**2).sum()), taken, seconds)


def seconds_of_pass(trainer: Trainer, micro: MicroBatch, *, clock: bool) -> float:
    begin = time.perf_counter() if clock else 0.0
    one_pass(trainer, micro)
    return time.perf_counter() - begin if clock else 0.0


@contextlib.contextmanager
def collection_off() -> Iterator[None]:
    """Turn Python's garbage collection off."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def one_pass(trainer: Trainer, micro: MicroBatch) -> None:
    """Make a forward and backward pass through the whole model, with the head of an update. The algorithm's loss is left out: it may be the
    user's own and keep its inputs, and takes little time."""
    role, device = trainer.role, trainer.role.device
    weights = torch.from_numpy(micro.weights).to(device)
    if isinstance(role, Policy):
        logprobs, entropy = role.run(micro, role.learning_entropy)
        learned = (logprobs * weights).sum()
        learned = learned + entropy.mean() if entropy is not None and entropy.requires_grad else learned
    else:
        learned = (role.run(micro) * weights).sum()  # type: ignore[attr-defined]
    learned.backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class KeptBytes:
    """Counts the bytes that a forward pass keeps for its backward pass: on a CPU nothing else measures them."""

    def __init__(self, parameters: Iterator[torch.nn.Parameter]) -> None:
        self._seen = {own.untyped_storage().data_ptr() for own in parameters}
        self.count = 0

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.count += storage.nbytes()
        return tensor

    @staticmethod
    def take(tensor: torch.Tensor) -> torch.Tensor:
        return tensor


# ---- rollouts ----------------------------------------------------------------------------------------------------------------------------


def probe_rollouts(
    probe: Probe, engine: Engine, limits: EngineLimits, facts: RoleFacts, sampling: Sampling, prompts: int, longest: int,
    where: tuple[Any, ...], device: torch.device, limit: TimeLimit, notes: list[str],
) -> Sequence[RolloutPass]:  # fmt: skip
    """Measure short rollouts of an engine. `prompts`: number of prompts that the engine gets in a step. `longest`: tokens of the longest.
    Measured prompts are longer, within limits, so that the cache is as full as in the middle of a response. Returns nothing if
    that does not fit. `notes`: get the reason if nothing counts as measured."""
    asked = measured_prompts(limits, facts.shape.vocabulary, sampling, prompts, longest)
    if not asked:
        return ()
    sampling = replace(sampling, samples=max(1, min(sampling.samples, limits.max_seqs // len(asked))), stop=())

    def measure() -> list[RolloutPass]:
        random, found = RandomState.of(device), list[RolloutPass]()
        try:
            with leaving_no_trace(device), may_run_out() as trial:
                found += measure_rollouts(engine, asked, sampling, device, limit)
        finally:
            random.restore(device)
            lowered = engine.take_limits()  # what it reports now was no rollout of the run
            engine.limit(RolloutLimits(limits.blocks, limits.max_seqs, limits.max_batched_tokens))
            engine.release()
            engine.recorder = Recorder()
        # After memory has run out, an engine continues with fewer samples at once, which takes longer than the run's rollouts.
        failures = [trial.failure] if trial.failure is not None else list(lowered.failures) if lowered else []
        if failures:
            notes.append(f"probe: rollouts count as not measured, for memory ran out in one: {failures[0]}")
        elif len(found) < len(RESPONSES):
            notes.append(f"probe: rollouts count as not measured: {MOST_SECONDS:.0f} seconds were too few for the actor's updates and them")
        return found if not failures and len(found) == len(RESPONSES) else []

    # Without the number of blocks: it follows from free memory, and so from what was measured before.
    own = replace(limits, blocks=0)
    sizes = (facts.shape, facts.parameter_bytes, facts.itemsize, facts.fused, asdict(own))
    return probe.rollouts(repr((where, sizes, sampling, len(asked), len(asked[0].ids))), measure)


def measured_prompts(limits: EngineLimits, vocabulary: int, sampling: Sampling, prompts: int, longest: int) -> list[Prompt]:
    """Make as many prompts as run at once, or as the KV cache holds, each as long as a run's samples may be when part of them is drawn."""
    count = max(1, min(prompts, limits.max_seqs // sampling.samples))
    wanted = min(longest + sampling.max_new_tokens // 4, MOST_PROMPT_TOKENS // count, limits.max_batched_tokens)
    tokens = min(wanted, (limits.longest or longest + sampling.max_new_tokens) - RESPONSES[-1])
    if tokens < 1:
        return []
    of_sample = -(-(tokens + RESPONSES[-1]) // limits.block_tokens) + 1
    count = min(count, limits.blocks // (of_sample * max(1, min(sampling.samples, limits.max_seqs))))
    return [Prompt(place, (np.arange(tokens) + place) * 7919 % vocabulary, "") for place in range(count)]


def measure_rollouts(
    engine: Engine, prompts: Sequence[Prompt], sampling: Sampling, device: torch.device, limit: TimeLimit
) -> Iterator[RolloutPass]:
    @limit.counted()
    def run(tokens: int) -> RolloutPass:
        lengths = {(prompt.uid, index): tokens for prompt in prompts for index in range(sampling.samples)}
        begin = time.perf_counter()
        for _ in engine.generate(prompts, replace(sampling, max_new_tokens=tokens), 0, lengths):
            pass
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begin
        return RolloutPass(len(prompts), sampling.samples, len(prompts[0].ids), tokens, engine.stats().decode_seconds, seconds)

    if not limit.allows():
        return
    latest = run(RESPONSES[0])  # compiles and captures CUDA graphs
    for tokens in RESPONSES:
        expected = latest.seconds + latest.decode_seconds * (tokens / latest.response_tokens - 1)  # at most: nothing compiles any more
        if not limit.allows(REPEATS * expected):
            return
        latest = min((run(tokens) for _ in range(REPEATS)), key=lambda own: own.seconds)
        yield latest
