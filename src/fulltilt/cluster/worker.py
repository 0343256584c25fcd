"""The worker: everything that knows a device, behind one narrow line.

Enters: prompts, rows and names of roles, phases and steps. Leaves: groups, annotated rows, metrics, and checkpoint files. Guaranteed: only
records that pickle, numbers and paths cross the line, in both directions; a caller never sees a tensor, a model or an optimizer. On one
device a call is a plain call in the same process and a row is its own handle, so that the same calls can later go to processes. What does
not pickle stays on its side: callbacks (`report`, `say`) are the caller's and are given numbers or text, the stream of `weights` is the
worker's, whose engine reads it. A group says by its place which of the caller's prompts it is of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fulltilt.algo.base import Algorithm
from fulltilt.batching.pack import MicroSizing, forward_micro_batches, minibatch, scatter
from fulltilt.batching.schedule import split_minibatches
from fulltilt.blame import is_out_of_memory
from fulltilt.memory.account import Account, Reading
from fulltilt.memory.offload import Residence
from fulltilt.plan import Plan, releases_memory
from fulltilt.records import Group, MicroBatch, MiniBatch, Prompt, Row, UserError
from fulltilt.rollout.engine import Engine, Listener
from fulltilt.rollout.sampler import Sampling
from fulltilt.rollout.stats import EngineStats
from fulltilt.schema import Config
from fulltilt.training.checkpoint import Digests, write_trainer
from fulltilt.training.roles import Policy, Role, annotate_all
from fulltilt.training.trainer import Trainer
from fulltilt.words import first_line

Metrics = dict[str, float]
Report = Callable[[int, int], None]  # how many micro-batches of a pass, or optimizer steps of an update, are done, and of how many
CRITIC_TENSORS, SURPLUS_TENSORS = "critic/", "surplus/"  # prefixes of tensor names in a checkpoint; the actor's tensors have none


@dataclass(frozen=True, eq=False)
class Annotated:
    rows: list[Row]
    pad_tokens: int  # computed beside the rows' own tokens


class Residents:
    """Moves the parameters of roles between device and host, so that only the roles at work are on the device. A role that was not added
    is always on the device."""

    def __init__(self) -> None:
        self._residences: dict[str, Residence] = {}
        self._changed: set[str] = set()

    def add(self, role: str, model: torch.nn.Module, *, learns: bool) -> None:
        self._residences[role] = Residence(model, role, learns=learns)

    def need(self, *roles: str, update: bool = False) -> None:
        """Bring these roles to the device, after all others have left it to make room. `update`: their parameters are about to change."""
        for role, residence in self._residences.items():
            if role not in roles:
                residence.to_host(unchanged=role not in self._changed)
                self._changed.discard(role)
        for role in roles:
            if role in self._residences:
                if role == "actor" and not self._residences[role].on_device:
                    # The actor stays through the rollout. Placed in memory that the KV cache has lent, it would keep the cache from it.
                    torch.cuda.empty_cache()
                self._residences[role].to_device()
                self._changed |= {role} if update else set()

    def memory(self) -> Iterator[torch.Tensor]:
        for residence in self._residences.values():
            yield from residence.memory()


LESS_IN_UPDATES = (
    'Lower {role}.token_budget (a longer sample runs alone), or set {section}.recompute = "full", {section}.offload_activations = true or '
    "{section}.offload_optimizer = true"
)
LESS_IN_PASSES = "Lower {role}.forward_token_budget (a longer sample runs alone)"
LESS_IN_ROLLOUT = "Set a smaller rollout.kv_bytes or rollout.max_seqs"
LESS_MEMORY = {
    "update-actor": LESS_IN_UPDATES.format(section="train", role="actor"),
    "update-critic": LESS_IN_UPDATES.format(section="critic", role="critic"),
    "rollout": LESS_IN_ROLLOUT,
    "eval": f"{LESS_IN_ROLLOUT}, or a smaller actor.forward_token_budget",
    "old-logprob": LESS_IN_PASSES.format(role="actor"),
    "ref-logprob": LESS_IN_PASSES.format(role="ref"),
    "values": LESS_IN_PASSES.format(role="critic"),
    "reward": LESS_IN_PASSES.format(role="reward_model"),
}


@contextlib.contextmanager
def enough_memory(phase: str | None = None) -> Iterator[None]:
    """Turn an out-of-memory error inside a phase into one that names the settings that would help."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        remedy = LESS_MEMORY.get(phase or "", "Set train.offload_optimizer = true, use a smaller model, or LoRA (lora.rank)")
        what = first_line(error)
        # Without its traceback, which would keep alive everything that filled the memory.
        raise UserError(f"out of memory{f' in {phase}' if phase else ''}: {what} {remedy}") from error.with_traceback(None)


@dataclass(eq=False)
class Worker:
    """One device with its roles, optimizers, engine and memory account."""

    config: Config
    algorithm: Algorithm
    plan: Plan
    roles: Mapping[str, Role]
    trainers: Mapping[str, Trainer]  # one for each role that learns
    engine: Engine | None  # None: nothing is sampled (SFT)
    residents: Residents
    account: Account
    update_sizes: Mapping[str, MicroSizing]  # micro-batch sizes in updates, one per role
    forward_sizes: Mapping[str, MicroSizing]  # micro-batch sizes without gradients, one per role
    export: Callable[[Path], None]  # writes the actor for others to load
    export_bytes: int  # about how many bytes `export` writes
    _unwritten: Callable[[], Digests] | None = None  # does the rest of the last `save`

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Enclose all calls of a phase: its memory is measured, and out-of-memory errors name the settings that would help."""
        with enough_memory(name), self.account.phase(name):
            yield

    # -- rollout --------------------------------------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int) -> Generator[Group, None, None]:
        """One group for each prompt, each as soon as it is complete. The KV cache is given back also where the caller stops early."""
        assert self.engine
        self.residents.need("actor")
        try:
            yield from self.engine.generate(prompts, sampling, seed)
            self.account.look()  # while the KV cache still exists
        finally:
            if releases_memory(self.config):
                self.engine.release()

    def rollout_stats(self) -> EngineStats:
        """The engine's statistics of the last `generate`."""
        assert self.engine
        return self.engine.stats()

    def report_rollout(self, say: Callable[[str], None], interval: float) -> None:
        """Have the engine describe its progress after every `interval` seconds of generating."""
        if self.engine and self.config.rollout.log_stats:
            self.engine.report(say, interval)

    def listen(self, listen: Listener | None) -> None:
        """Have the engine tell of the tokens of each sample as they come, until told otherwise."""
        assert self.engine
        self.engine.listener = listen

    def sync(self, version: int) -> None:
        """Bring the engine to the trainer's weights, which have changed."""
        assert self.engine
        self.engine.sync(version, self.weights())

    # -- passes without gradient ----------------------------------------------------------------------------------------------------

    def annotate(self, role: str, field: str, rows: Sequence[Row], report: Report) -> Annotated:
        """The rows with the role's number for each trained token, as `field`."""
        micro_batches = forward_micro_batches(rows, self.forward_sizes[role])
        found = []
        for numbers in self._passes(role, micro_batches):
            found.append(numbers)
            report(len(found), len(micro_batches))
        return Annotated(scatter(rows, micro_batches, found, field), sum(micro.pad_tokens for micro in micro_batches))

    def sum_logprobs(self, rows: Sequence[Row]) -> tuple[float, int]:
        """The sum of the actor's log-probs over all trained tokens of the rows, and how many tokens these are."""
        total, tokens = 0.0, 0
        for logprobs in self._passes("actor", forward_micro_batches(rows, self.forward_sizes["actor"])):
            total += float(logprobs.sum(dtype=np.float64))
            tokens += len(logprobs)
        return total, tokens

    def _passes(self, name: str, micro_batches: Sequence[MicroBatch]) -> Iterator[np.ndarray]:
        role = self.roles[name]
        self.residents.need("actor" if role.model is self.actor.model else name)  # the reference may be the actor without its adapters
        with self.account.passes(role.head_bytes(micro_batches, learns=False)):
            yield from annotate_all(role, micro_batches)

    @property
    def actor(self) -> Policy:
        actor = self.roles["actor"]
        assert isinstance(actor, Policy)
        return actor

    # -- updates --------------------------------------------------------------------------------------------------------------------

    def update(self, role: str, rows: Sequence[Row], updates_before: int, report: Report) -> Metrics:
        """Make every optimizer step of a role from these rows, after `updates_before` earlier ones. Metrics are means over these steps, and
        counts: `updates`, and `skipped_updates`, whose gradient was not finite. The first report is made before any parameter changes."""
        trainer, epochs = self.trainers[role], self.config.algorithm.epochs
        alone = role == "actor" and self.algorithm.advantage_alone
        self.residents.need(role, update=True)
        trainer.optimizer.begin(updates_before)
        batches = self._minibatches(rows, self.update_sizes[role], advantage_alone=alone)
        found: list[Metrics] = []
        for batch in batches * epochs:
            with self.account.passes(trainer.role.head_bytes(batch.micro_batches, learns=True)):
                metrics = trainer.accumulate(batch)
            report(len(found), epochs * len(batches))
            found.append(metrics | trainer.apply())
            report(len(found), epochs * len(batches))
        micro_batches = [micro for batch in batches for micro in batch.micro_batches]
        counts: Metrics = {
            "skipped_updates": sum(metrics.pop(f"{role}/skipped_updates") for metrics in found),
            "updates": len(found),
            "micro_batches": epochs * len(micro_batches),
            "pad_tokens": epochs * sum(micro.pad_tokens for micro in micro_batches),
            **({"samples_left_out": len(rows) - sum(len(micro.rows) for micro in micro_batches)} if alone else {}),
        }
        return mean_of(found) | {f"{role}/{name}": count for name, count in counts.items()}

    def _minibatches(self, rows: Sequence[Row], sizing: MicroSizing, *, advantage_alone: bool) -> list[MiniBatch]:
        algorithm = self.algorithm
        if not any(row.mask.any() for row in rows):
            return []
        split = split_minibatches([row.group for row in rows], self.config.algorithm.minibatches_per_step)
        make = partial(minibatch, aggregation=algorithm.aggregation, length_norm=algorithm.length_norm, micro=sizing)
        return [make([rows[index] for index in part], advantage_alone=advantage_alone) for part in split]

    def metrics(self) -> Metrics:
        """Memory, measured since the last call."""
        peak = self.account.peak_bytes
        return {**({"perf/max_memory_allocated_gb": peak / 2**30} if peak else {}), **self.account.metrics()}

    def pending_memory(self) -> dict[str, Reading]:
        """Memory that was measured and is in no `metrics` yet, for `restore_memory` in another process."""
        return self.account.pending()

    def restore_memory(self, pending: Mapping[str, Reading]) -> None:
        self.account.restore(pending)

    # -- weights and checkpoints ----------------------------------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The actor's parameters by their names, one after another, for an engine that keeps a copy of its own."""
        self.residents.need("actor")
        yield from ((name, parameter.detach()) for name, parameter in self.actor.model.named_parameters())

    def state(self) -> dict[str, Any]:
        """What a checkpoint's state holds about the optimizers."""
        counts = {role: {"updates": each.optimizer.updates, "skipped": each.optimizer.skipped} for role, each in self.trainers.items()}
        return {**counts["actor"], "critic": counts.get("critic")}

    def save(self, arrays: Mapping[str, np.ndarray], folder: Path, beside: bool) -> None:
        """Write the exported model and the trainer's tensors, the caller's arrays among them, into a checkpoint's folder. With `beside`
        the tensors may only be copied, for `finish_save` to write."""
        self._unwritten = None  # the copy of a save that failed
        tensors = self._tensors() | {name: torch.from_numpy(array) for name, array in arrays.items()}
        self._unwritten = write_trainer(folder, tensors, self.export, beside=beside)

    def finish_save(self) -> Digests:
        """Write what `save` left unwritten, in any thread: it reads nothing that training changes. Returns the digests of files that are
        known already."""
        write, self._unwritten = self._unwritten, None
        return write() if write else {}

    @cached_property
    def checkpoint_bytes(self) -> int:
        return self.export_bytes + sum(tensor.nbytes for tensor in self._tensors().values())

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The states of the roles that learn, beside the exported model."""
        self.residents.need("actor", "critic")
        prefixes = {"actor": "", "critic": CRITIC_TENSORS}
        own = {prefixes[role]: trainer.optimizer.tensors() for role, trainer in self.trainers.items()}
        return {f"{prefix}{name}": tensor for prefix, tensors in own.items() for name, tensor in tensors.items()}

    def close(self) -> None:
        if self.engine:
            self.engine.release()


def mean_of(found: Sequence[Metrics]) -> Metrics:
    """The mean of each metric over the optimizer steps that have it."""
    names = dict.fromkeys(name for metrics in found for name in metrics)
    return {name: float(np.mean([metrics[name] for metrics in found if name in metrics])) for name in names}
