"""The models of a run whose workers shard parameters (`train.shard` "full" and "hybrid") or hold parts of models (`train.tensor_parallel`,
`train.expert_parallel`).

Enters: one loaded model after another, with adapters, and the workers. Leaves: `SharedModels`: the same models, divided and sharded, and
the whole actor for rollouts and exports; where layers are divided, a rollout engine reads the worker's part. Guaranteed: a model's whole
parameters are freed before the next one is loaded, except for those that a rollout engine reads; where models are neither divided nor
sharded, nothing is done and nothing is held.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fulltilt.cluster.loading import Models, Placing, body_of, exporter
from fulltilt.cluster.sizes import role_facts
from fulltilt.model.experts import why_one_by_one
from fulltilt.model.stored import READ_WHOLE, release, stored_weights
from fulltilt.parallel.apply import Shards, Sharing, shard, share, with_experts
from fulltilt.parallel.experts import ExpertSplit, expert_modules, split_experts
from fulltilt.parallel.filling import fill
from fulltilt.parallel.grid import Grid
from fulltilt.parallel.parts import ModelPart, RolloutCopy, join_on_first
from fulltilt.parallel.ranks import Ranks
from fulltilt.parallel.tensor import TensorSplit, split
from fulltilt.parallel.twin import Twin, like, over_same_memory, part_memory, whole_on_host, without_memory
from fulltilt.plan.decisions import own_sizes
from fulltilt.plan.facts import RoleFacts
from fulltilt.schema import Config
from fulltilt.words import in_bytes


@dataclass(eq=False)
class SharedModels:
    parts: dict[str, ModelPart] = field(default_factory=dict)  # by role: this worker's part of a model
    shards: dict[str, Shards] = field(default_factory=dict)  # by role
    facts: dict[str, RoleFacts] = field(default_factory=dict)  # facts about each role's model from before it was sharded
    rollout: PreTrainedModel | None = None  # the whole actor, or this worker's part of it, for the engine
    structure: PreTrainedModel | None = None  # the actor, or this worker's part of it, without memory, where no engine needs it
    twin: Twin | RolloutCopy | None = None  # keeps `rollout` at the latest weights
    undivided: PreTrainedModel | None = None  # the actor without memory, from before it was divided
    tells: bool = True  # whether this worker is the first of those with the same part
    collected: PreTrainedModel | None = None  # the whole actor in main memory, for an export
    adapters_alone: bool = False  # whether an export has only adapters
    read_whole: dict[str, str] = field(default_factory=dict)  # by role: why the model's files could not be read in parts
    copied: bool = False  # whether the engine's model is divided in another way than the actor, so that exports need another model

    def collect(self) -> None:
        """Put the whole actor together for an export. All workers must call this at the same time."""
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
        """Like `loading.exporter`, but writes what `collect` has put together."""
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

    def notes(self, config: Config) -> Iterator[str]:
        for role, why in self.read_whole.items():
            yield f"{role}: read whole by every worker before it was divided or shared out: {why}"
        for role, made in self.parts.items():
            held = sum(parameter.nbytes for parameter in made.model.parameters()) if role not in self.shards else None
            what = "each layer" if isinstance(made, TensorSplit) else "experts"
            whole = " with whole experts" if isinstance(made, TensorSplit) and made.whole_experts else ""
            yield f"{role}: {what} divided among {made.ranks.size} workers{whole}{f', {in_bytes(held)} each' if held else ''}"
            if reason := why_narrow(made, self.shards[role].types if role in self.shards else {}):
                key = f"{'train' if own_sizes(config, role) == (None, None) else role}.expert_parallel"
                yield f"{role}: experts run one by one, which is slow: {reason}. Set {key} = {made.ranks.size}"
        for role, shards in self.shards.items():
            held, sharing = sum(numbers.nbytes for numbers in shards.own().values()), shards.sharing
            groups = f", in {sharing.everyone.size // sharing.group.size} groups" if sharing.group.size < sharing.everyone.size else ""
            yield f"{role}: parameters shared out among {sharing.group.size} workers{groups}, {in_bytes(held)} each"
        if self.twin:
            held = sum(tensor.nbytes for tensor in self.twin.memory())
            whole = "the whole actor" if self.copied or not isinstance(self.parts.get("actor"), TensorSplit) else "its part of the actor"
            if isinstance(self.twin, RolloutCopy) and self.twin.target:
                whole, reason = f"one of {self.twin.target.ranks.size} parts of the actor", why_narrow(self.twin.target)
                if reason:
                    size = self.twin.target.ranks.size
                    yield f"rollout: experts run one by one, which is slow: {reason}. Set rollout.expert_parallel = {size}"
            yield f"rollout: every worker has {whole} for it, {in_bytes(held)}"


def why_narrow(part: ModelPart, types: Mapping[str, torch.dtype] = MappingProxyType({})) -> str | None:
    """Return why torch does not take a part's experts in one call, although it would take all experts. `types`: the types to compute with,
    for parameters of other types."""
    for prefix, module in expert_modules(part.model):
        for leaf, parameter in module.named_parameters():
            name = f"{prefix}.{leaf}"
            dtype = types.get(name, parameter.dtype)
            whole, own = (torch.empty(shapes[name], dtype=dtype, device="meta") for shapes in (part.whole, part.shapes))
            if whole.ndim == 3 and why_one_by_one(whole) is None and (reason := why_one_by_one(own)):
                return reason
    return None


@dataclass(frozen=True, eq=False)
class ModelDivider:
    """Divides the roles' models one after another, each as soon as it is loaded and before it is fused."""

    found: SharedModels
    members: Mapping[str, Ranks]  # by role: the workers that together hold all parts
    rollout: Ranks | None = None  # the members that sample together, if the engine reads a model that is divided in another way
    whole_experts: Collection[str] = ()  # roles of which each member has some whole experts, rather than a part of every expert
    rollout_whole: bool = False  # the same for the model that an engine reads
    keys: Mapping[str, str] = field(default_factory=dict)  # by role, or "rollout": the setting for the number of members

    def divide(self, role: str, model: torch.nn.Module) -> PreTrainedModel | None:
        """Divide a role's model. May return a model for the engine, which is to be fused too."""
        found, ranks, copied = self.found, self.members[role], None
        if role == "actor":
            assert isinstance(model, PreTrainedModel)
            if self.rollout is not None:
                copied = found.rollout = over_same_memory(model)
                target = self._split(copied, self.rollout, self.rollout_whole, "rollout") if self.rollout.size > 1 else None
                found.twin, found.copied = RolloutCopy(copied, target), True
            if ranks.size > 1:
                found.undivided = without_memory(model)
        if ranks.size > 1:
            found.parts[role] = self._split(model, ranks, role in self.whole_experts, role)
        if copied is not None:
            part_memory(copied, model)
        return copied

    def _split(self, model: torch.nn.Module, ranks: Ranks, whole_experts: bool, what: str) -> TensorSplit:
        whole_experts = whole_experts and any(True for _ in expert_modules(model))
        return split(model, ranks, whole_experts=whole_experts, key=self.keys.get(what, "train.tensor_parallel"))


@dataclass(frozen=True, eq=False)
class ExpertDivider:
    """Divides the experts of the roles' models one after another. Models whose parameters are still in files are divided before they are
    fused, so that only this worker's experts are read; loaded ones afterwards. A model without experts stays whole."""

    found: SharedModels
    holders: Mapping[str, Ranks]  # by role, where experts are divided: the workers that together have all experts
    sampled: bool  # whether an engine needs the actor whole
    shared: bool  # whether the actor's parameters are also sharded
    keys: Mapping[str, str] = field(default_factory=dict)  # by role: the setting for the number of holders, for messages

    def divide(self, role: str, model: torch.nn.Module) -> None:
        if role not in self.holders or not any(True for _ in expert_modules(model)):
            return
        found = self.found
        if role == "actor":
            assert isinstance(model, PreTrainedModel)
            if self.sampled and not found.copied:
                found.rollout = over_same_memory(model)
                found.twin, found.copied = RolloutCopy(found.rollout, None), self.shared
            if not self.sampled or found.copied:
                found.undivided = without_memory(model)
        found.parts[role] = split_experts(model, self.holders[role], self.keys.get(role, "train.expert_parallel"))
        if role == "actor" and found.rollout is not None:
            part_memory(found.rollout, model)


@dataclass(frozen=True, eq=False)
class ModelSharer:
    """Shards the roles' models one after another, each as soon as it is loaded."""

    found: SharedModels
    sharings: Mapping[str, Sharing]  # by role, where parameters are sharded
    device: torch.device
    learners: Collection[str]
    sampled: bool  # whether an engine needs the actor whole

    @staticmethod
    def of(
        found: SharedModels, config: Config, grids: Mapping[str, Grid], device: torch.device, learners: Collection[str], *, sampled: bool
    ) -> ModelSharer:
        """Make the object. `grids`: by role, where parameters are sharded. All workers must call this at the same time."""
        train, made = config.train, dict[Grid, Sharing]()
        knobs = {"reshard_after_forward": train.reshard_after_forward, "forward_prefetch": train.forward_prefetch}
        for grid in dict.fromkeys(grids.values()):
            size = train.shard_size if train.shard_size and grid.data.size % train.shard_size == 0 else None
            sharing = share(grid.data, device.type, size, **knobs)
            made[grid] = with_experts(sharing, grid.replicas, device.type) if grid.replicas else sharing
        return ModelSharer(found, {role: made[grid] for role, grid in grids.items()}, device, learners, sampled)

    def share_out(self, role: str, model: torch.nn.Module) -> None:
        """Shard a role's model. If its parameters are still in files, this worker reads its rows from there."""
        if role not in self.sharings:
            return
        sharing = self.sharings[role]
        found = self.found
        part = found.parts.get(role)
        found.facts[role] = role_facts(model, learns=role in self.learners, part=part)
        if role == "actor":
            assert isinstance(model, PreTrainedModel)
            if self.sampled and not found.copied:
                found.rollout = over_same_memory(model)
            else:
                found.structure = without_memory(model)
        found.shards[role] = shard(model, sharing if isinstance(part, ExpertSplit) else replace(sharing, experts=None))
        fill(model, part, found.shards[role])
        if role == "actor" and found.rollout is not None and not found.copied:
            found.twin = Twin(found.rollout, found.shards[role])
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # pieces of freed whole parameters may be too small for those of the next role


@dataclass(frozen=True, eq=False)
class Placer(Placing):
    """Divides and shards the roles' models one after another, and reads only this worker's part from their files. A model that this worker
    needs whole anyway, because its engine reads it or because the worker learns all of it, is read before it is divided. A model of which
    the engine keeps a part beside the shards is read before it is sharded."""

    found: SharedModels
    whole: bool  # whether this worker has the whole actor
    sampled: bool  # whether an engine reads the actor, or a part of it
    divider: ModelDivider | None = None
    experts: ExpertDivider | None = None
    sharer: ModelSharer | None = None

    def stored(self, role: str) -> bool:
        return bool(self.divider or self.experts or self.sharer)

    def loaded(self, role: str, model: torch.nn.Module) -> None:
        if stored_weights(model) is None:
            if why := getattr(body_of(model), READ_WHOLE, None):
                self.found.read_whole[role] = why
        elif role == "actor" and self.whole:
            self._complete(model)

    def divide(self, role: str, model: torch.nn.Module) -> PreTrainedModel | None:
        also = self.divider.divide(role, model) if self.divider else None
        if stored_weights(model) is None:
            return also
        if self.experts:
            self.experts.divide(role, model)
        part = self.found.parts.get(role)
        if also is not None:
            assert isinstance(self.found.twin, RolloutCopy)
            fill(also, self.found.twin.target)
            release(also, files=False)
        if not self.sharer or role not in self.sharer.sharings or (role == "actor" and self.sampled and also is None):
            self._complete(model, part)
        return also

    def finish(self, role: str, model: torch.nn.Module) -> None:
        if self.experts and role not in self.found.parts:
            self.experts.divide(role, model)
        if self.sharer:
            self.sharer.share_out(role, model)
        release(model)

    def rest(self, role: str) -> None:
        if role in self.found.shards:
            self.found.shards[role].rest()

    def _complete(self, model: torch.nn.Module, part: ModelPart | None = None) -> None:
        fill(model, part)
        release(model)
