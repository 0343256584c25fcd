"""A worker that trains a tiny model together with others over gloo, for tests of how parameters are shared out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from devices import Member
from safetensors import safe_open

from fulltilt.algo.build import build
from fulltilt.memory.activations import offload_activations
from fulltilt.memory.offload import OffloadSetting, Residence
from fulltilt.memory.recompute import apply_recompute
from fulltilt.model import lora
from fulltilt.model.arrays import local
from fulltilt.model.fuse import check_fused, fuse
from fulltilt.model.load import load_model
from fulltilt.model.scalar import load_scalar
from fulltilt.parallel import layout
from fulltilt.parallel.apply import Shards, shard, share
from fulltilt.parallel.ranks import ALONE, Ranks
from fulltilt.parallel.trace import PassTrace, traced
from fulltilt.parallel.twin import Twin, over_same_memory, whole_on_host, without_memory
from fulltilt.records import MicroBatch, MiniBatch
from fulltilt.schema import Config, LoraConfig, ModelConfig, TrainConfig
from fulltilt.shape import Recompute
from fulltilt.training.checkpoint import SavedTensors, pieces_of, write_tensors
from fulltilt.training.optim import Optimizer
from fulltilt.training.roles import Critic, Policy
from fulltilt.training.trainer import Trainer

CPU = torch.device("cpu")
ALGORITHM = {"kl_coef": 0.1, "entropy_coef": 0.05}


@dataclass(frozen=True, eq=False)
class Case:
    folder: Path
    workers: int = 1
    shard: str = "optimizer"  # "full", or "hybrid" in groups of 2
    role: str = "actor"
    dtype: str = "float64"
    adapters: bool = False
    fused: bool = False
    recompute: str = "none"
    offloads: bool = False  # activations and optimizer states
    knobs: dict[str, bool] = field(default_factory=dict)


@dataclass(eq=False)
class Trained:
    """A role that learns, as one worker has it."""

    trainer: Trainer
    shards: Shards | None
    twin: Twin | None
    structure: Any

    @staticmethod
    def of(case: Case, ranks: Ranks = ALONE) -> Trained:
        keys = {"name": "ppo" if case.role == "critic" else "grpo", **ALGORITHM}
        algorithm = build(Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}, "algorithm": keys}))
        torch.manual_seed(0)
        settings = ModelConfig(path=str(case.folder), dtype=case.dtype)  # type: ignore[arg-type]
        model: Any = load_scalar(settings, CPU, key="model.path", head="new") if case.role == "critic" else load_model(settings, CPU)
        if case.adapters:
            lora.add_adapters(model, LoraConfig(rank=2), 0, None)
        for name, parameter in model.named_parameters():  # what begins at zero would hide half of the gradient
            if "lora_B" in name or "score" in name:
                parameter.data += 0.1
        if case.fused:
            assert fuse(model.body if case.role == "critic" else model).left_alone is None
        shards, twin, structure = None, None, None
        if case.shard != "optimizer":
            sharing = share(ranks, "cpu", 2 if case.shard == "hybrid" else None, **case.knobs)
            whole, structure = over_same_memory(model), without_memory(model)
            shards = shard(model, sharing)
            with patch.object(layout, "EXCHANGE_BYTES", 3000):  # many rounds
                twin = Twin(whole, shards)
        if case.fused and twin:
            trained, copied = (check_fused(each.body if case.role == "critic" else each) for each in (model, twin.model))
            assert (trained.layers, trained.joined, copied.joined) == (copied.layers, 0, 0 if case.adapters else 2 * copied.layers)
        if case.recompute != "none":
            apply_recompute(model, Recompute(case.recompute))  # type: ignore[arg-type]
        if case.offloads:
            offload_activations(model, smallest=1)
        offload = OffloadSetting(optimizer=case.offloads, grads=case.offloads)
        optimizer = Optimizer(model, TrainConfig(lr=1e-2), 10, keeps_parameters=True, offload=offload, ranks=ranks, shards=shards)
        role = Critic("critic", model, optimizer) if case.role == "critic" else Policy("actor", model, 0.8, optimizer, True)
        loss = algorithm.value_loss if case.role == "critic" else algorithm.loss
        assert loss
        return Trained(Trainer(role, loss), shards, twin, structure)

    def passes(self, batch: MiniBatch, ranks: Ranks) -> int:
        return ranks.most(len(batch.micro_batches), CPU) if self.shards else 0

    def gradients(self) -> dict[str, tuple[int, np.ndarray]]:
        """This worker's part of the summed gradients, and where each begins."""
        held = self.trainer.optimizer._held
        return {name: (held.own[name].start, numbers.numpy().copy()) for name, numbers in held.reduced().items()}

    def numbers(self) -> dict[str, tuple[int, np.ndarray]]:
        """This worker's part of parameters and moments."""
        found = {}
        for key, tensor in self.trainer.optimizer.tensors().items():
            name, _, start = key.partition("@")
            found[name] = (int(start or 0), tensor.detach().flatten().double().numpy().copy())
        return found


class ShardWorker:
    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        pairs = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
        groups = {size: dist.group.WORLD, 2: pairs[rank // 2]}
        self.all = {workers: Ranks(rank % workers, workers, group) for workers, group in groups.items()}

    def ranks(self, workers: int) -> Ranks:
        found = self.all[workers]
        found.moved.update(dict.fromkeys(found.moved, 0))
        return found

    def gradient(self, case: Case, parts: Sequence[MiniBatch]) -> dict[str, Any]:
        """The gradient of one mini-batch, of which this worker gets its part, and what it took."""
        ranks = self.ranks(case.workers)
        made, part = Trained.of(case, ranks), parts[ranks.rank]
        if case.adapters:  # the reference role's pass comes first
            with torch.no_grad(), lora.without_adapters(made.trainer.role.model):  # type: ignore[attr-defined]
                made.trainer.role.nothing()
        annotated = made.trainer.role.annotate(parts[0].micro_batches[0]).numpy()
        for shards in [made.shards] if made.shards else []:
            shards.rest()
        before = dict(ranks.moved)
        sums = made.trainer.accumulate(part, made.passes(part, ranks))
        moved = {kind: count - before.get(kind, 0) for kind, count in ranks.moved.items() if count}
        model: Any = made.trainer.role.model  # type: ignore[attr-defined]
        parameters = list(model.parameters())
        return {
            "gradients": made.gradients(),
            "sums": sums,
            "annotated": annotated,
            "moved": moved,
            "parameters": sum(local(p).numel() for p in parameters),
            "accumulated": sum(local(p.grad).numel() for p in parameters if p.grad is not None),
            "states": sum(tensor.nbytes for tensor in made.trainer.optimizer.memory()),
        }

    def away(self, case: Case, micro: MicroBatch) -> dict[str, Any]:
        """A role whose shards leave and come back: their bytes, what it says without them, and its numbers before and after."""
        made = Trained.of(case, self.ranks(case.workers))
        assert made.shards
        model: Any = made.trainer.role.model  # type: ignore[attr-defined]

        def held() -> int:
            return sum(local(parameter.detach()).untyped_storage().nbytes() for parameter in model.parameters())

        numbers = [made.trainer.role.annotate(micro).numpy()]
        made.shards.rest()
        found = [held()]
        residence = Residence(model, case.role, learns=True)
        residence.to_host()
        found.append(held())
        said = []
        for use in (partial(made.trainer.role.annotate, micro), made.trainer.optimizer.tensors):
            try:
                use()
            except AssertionError as error:
                said.append(str(error))
        residence.to_device()
        found.append(held())
        numbers.append(made.trainer.role.annotate(micro).numpy())
        made.shards.rest()
        return {"bytes": found, "host": sum(memory.nbytes for memory in residence.memory()), "said": said, "numbers": numbers}

    def train(self, case: Case, parts: Sequence[MiniBatch], folder: Path) -> dict[str, Any]:
        """Two steps, after which the worker's part of a checkpoint is written."""
        ranks = self.ranks(case.workers)
        made, part = Trained.of(case, ranks), parts[ranks.rank]
        reports = []
        for _ in range(2):
            made.trainer.accumulate(part, made.passes(part, ranks))
            reports.append(made.trainer.optimizer.step())
        found = {"numbers": made.numbers(), "norms": [report.grad_norm for report in reports], **self.twins(made)}
        if self.rank < case.workers:
            write_tensors(folder, made.trainer.optimizer.tensors(), ranks.rank, ranks.size)
        dist.barrier()
        return found

    def twins(self, made: Trained) -> dict[str, Any]:
        if made.twin is None or made.shards is None:
            return {}
        addresses = [parameter.data_ptr() for parameter in made.twin.model.parameters()]
        stale = made.twin.current
        made.twin.sync()
        assert addresses == [parameter.data_ptr() for parameter in made.twin.model.parameters()]
        copy = whole_on_host(made.shards, made.structure, wanted=made.shards.sharing.everyone.rank == 0)
        assert (copy is None) == (made.shards.sharing.everyone.rank > 0)
        values = {name: parameter.detach().double().numpy() for name, parameter in made.twin.model.named_parameters()}
        pairs = zip(copy.parameters(), made.twin.model.parameters(), strict=True) if copy is not None else ()
        same = all(torch.equal(one, other) for one, other in pairs)
        return {"stale": not stale, "current": made.twin.current, "twin": values, "copy is the same": same}

    def resume(self, case: Case, folder: Path, files: Sequence[str]) -> dict[str, Any]:
        made = Trained.of(case, self.ranks(case.workers))
        restore(made, folder, files)
        return {"numbers": made.numbers()}

    def deadlines(self, seconds: float) -> set[float]:
        """Of the groups of hybrid workers that must not wait longer."""
        mesh = share(replace(self.ranks(4), deadline=timedelta(seconds=seconds), made={}), "cpu", 2).mesh
        groups = [mesh[name].get_group() for name in ("replicate", "shard")]
        return {group._get_backend(CPU).options._timeout.total_seconds() for group in groups}

    def trace(self, case: Case, parts: Sequence[MiniBatch]) -> PassTrace:
        """The order of gathers and of layers in a micro-batch."""
        ranks = self.ranks(case.workers)
        made = Trained.of(case, ranks)
        assert made.shards
        part = parts[ranks.rank]
        return traced(made.shards, lambda: made.trainer.accumulate(part, made.passes(part, ranks)))


def restore(made: Trained, folder: Path, files: Sequence[str]) -> None:
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(folder / name, framework="pt")) for name in files]
        made.trainer.optimizer.restore(SavedTensors(folder, pieces_of(folder, opened)), updates=2, skipped=0)


def make(member: Member) -> ShardWorker:
    """In a process of the pool (tests/devices.py), at the same time in all of them."""
    return ShardWorker(member.rank, dist.get_world_size())
