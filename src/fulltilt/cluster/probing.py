"""Micro-batches that are measured at the start of a run, for the plan.

Enters: the trainer of a role, before anything has learned. Leaves: `UpdatePass` records, smallest first. Guaranteed: parameters, optimizer
and random numbers stay as they are: micro-batches have weight 0, and their gradients are dropped; one that does not fit ends the
measurement, without harm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks

from fulltilt.blame import is_out_of_memory
from fulltilt.plan import RoleFacts, RoleSettings
from fulltilt.records import MicroBatch, UpdateCosts, UpdatePass
from fulltilt.training.roles import Policy
from fulltilt.training.trainer import Trainer

Probe = Callable[[str, Callable[[bool], Sequence[UpdatePass]]], UpdateCosts | None]  # `tune.probe.Prober`
PARTS = (32, 16, 8, 4)  # measured micro-batches have the planned token budget divided by each of these
LEAST_TOKENS = 64
REPEATS = 2  # the faster one counts
MOST_SECONDS = 12.0  # after which no further micro-batch is begun: with the one in progress, less than 20


def probe_updates(
    probe: Probe, trainers: Mapping[str, Trainer], facts: Mapping[str, RoleFacts], settings: Mapping[str, RoleSettings],
    budgets: Mapping[str, int], longest: int,
) -> dict[str, UpdateCosts]:  # fmt: skip
    """The costs of each role's updates. `budgets`: tokens of a micro-batch, as planned without a measurement. `longest`: tokens of the
    longest sample."""
    found = {}
    for role, trainer in trainers.items():

        def measure(clock: bool, trainer: Trainer = trainer, role: str = role) -> list[UpdatePass]:
            return list(measure_updates(trainer, budgets[role], longest, facts[role].shape.vocabulary, clock=clock))

        costs = probe(about(trainer, facts[role], settings[role], budgets[role], longest), measure)
        if costs is not None:
            found[role] = costs
    return found


def about(trainer: Trainer, facts: RoleFacts, settings: RoleSettings, budget: int, longest: int) -> str:
    """Everything that the costs of an update depend on."""
    device = trainer.role.device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    sizes = (facts.shape, facts.parameter_bytes, facts.trained, facts.itemsize, facts.fused, facts.vocabulary_head)
    entropy = trainer.role.learning_entropy if isinstance(trainer.role, Policy) else ""
    return repr((where, torch.__version__, sizes, asdict(settings), entropy, budget, longest))


def measure_updates(trainer: Trainer, budget: int, longest: int, vocabulary: int, *, clock: bool) -> Iterator[UpdatePass]:
    """Passes over micro-batches of a few sizes, of samples as long as there may be and of short ones."""
    begin = time.perf_counter() if clock else 0.0
    lengths = sorted({max(2, min(longest, budget // part)) for part in (PARTS[0], PARTS[-1])})
    sizes = sorted({max(LEAST_TOKENS, budget // part) for part in PARTS})
    trainer.optimizer.prepare()
    try:
        one_pass(trainer, micro_batch(sizes[0], lengths[0], vocabulary), clock=False)  # compiles and takes workspaces
        for tokens in sizes:
            for length in lengths:
                micro = micro_batch(tokens, min(length, tokens), vocabulary)
                passes = [one_pass(trainer, micro, clock=clock) for _ in range(REPEATS if clock else 1)]
                yield min(passes, key=lambda own: own.seconds or 0.0)
                if clock and time.perf_counter() - begin > MOST_SECONDS:
                    return
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    finally:
        trainer.optimizer.zero_grad()
        if trainer.role.device.type == "cuda":
            torch.cuda.empty_cache()  # pieces of these sizes would lie in the way of the KV cache


def micro_batch(tokens: int, length: int, vocabulary: int) -> MicroBatch:
    """Samples of so many tokens, of which all but the first are trained on, with weight 0."""
    count = max(1, tokens // length)
    positions = np.tile(np.arange(length), count)
    trained = np.flatnonzero(positions)
    return MicroBatch(
        ids=np.arange(count * length) * 7919 % vocabulary,  # many different tokens, for routers to experts
        positions=positions,
        cu_seqlens=np.arange(0, count * length + 1, length, dtype=np.int32),
        rows=tuple(range(count)),
        trained=trained,
        trained_row=trained // length,
        weights=np.zeros(len(trained)),
        fresh=np.ones(len(trained), bool),
    )


def one_pass(trainer: Trainer, micro: MicroBatch, *, clock: bool) -> UpdatePass:
    device, kept = trainer.role.device, KeptBytes(trainer.role.model.parameters())  # type: ignore[attr-defined]
    on_cuda = device.type == "cuda"
    before = 0
    if on_cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    begin = time.perf_counter() if clock else 0.0
    if on_cuda:
        run(trainer, micro)
        torch.cuda.synchronize(device)
    else:
        with saved_tensors_hooks(kept.put, kept.take):
            run(trainer, micro)
    seconds = time.perf_counter() - begin if clock else None
    taken = kept.count
    if on_cuda:
        taken = torch.cuda.max_memory_allocated(device) - max(before, torch.cuda.memory_allocated(device))
    lengths = np.diff(micro.cu_seqlens).astype(np.int64)
    return UpdatePass(len(micro.ids), int((lengths**2).sum()), taken, seconds)


def run(trainer: Trainer, micro: MicroBatch) -> None:
    """Forward and backward through the whole model, with the head of an update, for a gradient of zero."""
    role = trainer.role
    if isinstance(role, Policy):
        logprobs, entropy = role.run(micro, role.learning_entropy)
        loss = 0 * logprobs.sum() + (0 * entropy.sum() if entropy is not None else 0)
    else:
        loss = 0 * role.run(micro).sum()  # type: ignore[attr-defined]
    loss.backward()


class KeptBytes:
    """Counts what a forward pass keeps for its backward pass: on a CPU nothing else measures it."""

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
