"""The models of a run whose workers share out parameters (`train.shard` "full" and "hybrid") or hold parts (`train.tensor_parallel`,
`train.expert_parallel`).

Enters: one loaded model after another, with adapters, and the workers. Leaves: `SharedModels`: the same models, divided and shared out, and
the whole actor for rollouts and exports; where layers are divided, a rollout engine reads the worker's part. Guaranteed: a model's whole
parameters are given back before the next one is loaded, but for those that a rollout engine reads; where models are neither divided nor
shared out, nothing is done and nothing is held.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fulltilt.cluster.loading import Models, exporter
from fulltilt.cluster.sizes import role_facts
from fulltilt.parallel.apply import Shards, Sharing, shard, share, with_experts
from fulltilt.parallel.experts import ExpertSplit, expert_modules, split_experts
from fulltilt.parallel.grid import Grid
from fulltilt.parallel.parts import ModelPart, PartTwin, RolloutCopy, join_on_first
from fulltilt.parallel.ranks import Ranks
from fulltilt.parallel.tensor import TensorSplit, split
from fulltilt.parallel.twin import Twin, like, over_same_memory, part_memory, whole_on_host, without_memory
from fulltilt.plan import RoleFacts
from fulltilt.schema import Config
from fulltilt.words import in_bytes


@dataclass(eq=False)
class SharedModels:
    parts: dict[str, ModelPart] = field(default_factory=dict)  # by role: this worker's part of a model
    shards: dict[str, Shards] = field(default_factory=dict)  # by role
    facts: dict[str, RoleFacts] = field(default_factory=dict)  # what each role's model was like before it was shared out
    rollout: PreTrainedModel | None = None  # the whole actor, or this worker's part of it, for the engine
    structure: PreTrainedModel | None = None  # the actor, or the part, without memory, where no engine needs it
    twin: Twin | PartTwin | RolloutCopy | None = None  # keeps `rollout` at the latest weights
    undivided: PreTrainedModel | None = None  # the actor without memory, before it was divided
    tells: bool = True  # whether this worker is the first of those that hold the same part
    collected: PreTrainedModel | None = None  # the whole actor in main memory, for an export
    adapters_alone: bool = False  # whether an export has only these

    @property
    def copied(self) -> bool:
        """Whether the engine's model is divided in another way than the actor."""
        return isinstance(self.twin, RolloutCopy)

    def collect(self) -> None:
        """Make the whole actor for an export, on all workers at the same time."""
        if self.twin and not self.copied:
            self.twin.sync()
        elif self.structure is not None:
            self.collected = whole_on_host(self.shards["actor"], self.structure, wanted=self.tells, learning=self.adapters_alone)
        if self.undivided is not None and self.tells:
            made = self.parts["actor"]
            part = (None if self.copied else self.rollout) or self.collected or made.model
            wanted = {name: each for name, each in part.named_parameters() if each.requires_grad or not self.adapters_alone}
            memory = join_on_first(made, {name: each.detach().to(self.undivided.dtype) for name, each in wanted.items()})
            self.collected = like(self.undivided, lambda name, own: memory.get(name, own)) if memory is not None else None

    def exporter(self, config: Config, models: Models, tokenizer: PreTrainedTokenizerBase) -> tuple[Callable[[Path], None], int]:
        """As `loading.exporter`; what `collect` has made is written."""
        if "actor" not in models.own:
            return lambda folder: None, 0
        of_engine = None if self.copied else self.rollout
        export, count = exporter(config, self.undivided or of_engine or self.structure or models.actor, tokenizer)
        if self.structure is None and self.undivided is None:
            return export, count

        def export_collected(folder: Path) -> None:
            assert self.collected is not None
            exporter(config, self.collected, tokenizer)[0](folder)
            self.collected = None

        return export_collected, count

    def notes(self) -> Iterator[str]:
        for role, made in self.parts.items():
            held = sum(parameter.nbytes for parameter in made.model.parameters()) if role not in self.shards else None
            what = "each layer" if isinstance(made, TensorSplit) else "experts"
            yield f"{role}: {what} divided among {made.ranks.size} workers{f', {in_bytes(held)} each' if held else ''}"
        for role, shards in self.shards.items():
            held, sharing = sum(numbers.nbytes for numbers in shards.own().values()), shards.sharing
            groups = f", in {sharing.everyone.size // sharing.group.size} groups" if sharing.group.size < sharing.everyone.size else ""
            yield f"{role}: parameters shared out among {sharing.group.size} workers{groups}, {in_bytes(held)} each"
        if self.twin:
            held = sum(tensor.nbytes for tensor in self.twin.memory())
            whole = "the whole actor" if self.copied or not isinstance(self.parts.get("actor"), TensorSplit) else "its part of the actor"
            if isinstance(self.twin, RolloutCopy) and self.twin.target:
                whole = f"one of {self.twin.target.ranks.size} parts of the actor"
            yield f"rollout: every worker has {whole} for it, {in_bytes(held)}"


@dataclass(frozen=True, eq=False)
class ModelDivider:
    """Divides one role's model after another, each as soon as it is loaded, and before it is fused."""

    found: SharedModels
    members: Mapping[str, Ranks]  # by role: those that hold all parts
    rollout: Ranks | None = None  # given where an engine reads a model that is divided in another way: the members that sample together

    def divide(self, role: str, model: torch.nn.Module) -> PreTrainedModel | None:
        """Returns a model for the engine, which is to be fused too."""
        found, ranks, copied = self.found, self.members[role], None
        if role == "actor":
            assert isinstance(model, PreTrainedModel)
            if self.rollout is not None:
                copied = found.rollout = over_same_memory(model)
                found.twin = RolloutCopy(copied, split(copied, self.rollout) if self.rollout.size > 1 else None)
            if ranks.size > 1:
                found.undivided = without_memory(model)
        if ranks.size > 1:
            found.parts[role] = split(model, ranks)
        if copied is not None:
            part_memory(copied, model)
        return copied


@dataclass(frozen=True, eq=False)
class ExpertDivider:
    """Divides the experts of one role's model after another, each when it is loaded and fused. A model without experts stays whole."""

    found: SharedModels
    holders: Mapping[str, Ranks]  # by role, where experts are divided: the workers that have all of them
    sampled: bool  # whether an engine needs the actor whole
    shared: bool  # whether parameters of the actor are shared out, too

    def divide(self, role: str, model: torch.nn.Module) -> None:
        if role not in self.holders or not any(True for _ in expert_modules(model)):
            return
        found = self.found
        if role == "actor":
            assert isinstance(model, PreTrainedModel)
            if self.sampled and not found.copied:
                found.rollout = over_same_memory(model)
                found.twin = RolloutCopy(found.rollout, None) if self.shared else None
            if not self.sampled or found.copied:
                found.undivided = without_memory(model)
        found.parts[role] = split_experts(model, self.holders[role])
        if role == "actor" and found.rollout is not None:
            part_memory(found.rollout, model)
            found.twin = found.twin or PartTwin(found.rollout, found.parts[role])


@dataclass(frozen=True, eq=False)
class ModelSharer:
    """Shares out one role's model after another, each as soon as it is loaded."""

    found: SharedModels
    sharings: Mapping[str, Sharing]  # by role, where parameters are shared out
    device: torch.device
    learners: Collection[str]
    sampled: bool  # whether an engine needs the actor whole

    @staticmethod
    def of(
        found: SharedModels, config: Config, grids: Mapping[str, Grid], device: torch.device, learners: Collection[str], *, sampled: bool
    ) -> ModelSharer:
        """`grids`: by role, where parameters are shared out. All workers must call it at the same time."""
        train, made = config.train, dict[Grid, Sharing]()
        knobs = {"reshard_after_forward": train.reshard_after_forward, "forward_prefetch": train.forward_prefetch}
        for grid in dict.fromkeys(grids.values()):
            size = train.shard_size if train.shard_size and grid.data.size % train.shard_size == 0 else None
            sharing = share(grid.data, device.type, size, **knobs)
            made[grid] = with_experts(sharing, grid.replicas, device.type) if grid.replicas else sharing
        return ModelSharer(found, {role: made[grid] for role, grid in grids.items()}, device, learners, sampled)

    def share_out(self, role: str, model: torch.nn.Module) -> None:
        if role not in self.sharings:
            return
        sharing = self.sharings[role]
        found = self.found
        part = found.parts.get(role)
        apart = part.names if isinstance(part, ExpertSplit) else ()
        found.facts[role] = role_facts(model, learns=role in self.learners, apart=apart)
        if role == "actor":
            assert isinstance(model, PreTrainedModel)
            if self.sampled and not found.copied:
                found.rollout = over_same_memory(model)
            else:
                found.structure = without_memory(model)
        found.shards[role] = shard(model, sharing if apart else replace(sharing, experts=None))
        if role == "actor" and found.rollout is not None and not found.copied:
            found.twin = Twin(found.rollout, found.shards[role])
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # whole parameters are in pieces into which those of the next role may not fit
