"""The models of a run whose workers share out parameters: `train.shard` "full" and "hybrid".

Enters: one loaded model after another, with adapters, and the workers. Leaves: `SharedModels`: the same models shared out, and the whole
actor for rollouts and exports. Guaranteed: a model's whole parameters are given back before the next one is loaded, but for those that a
rollout engine reads; where parameters are not shared out, nothing is done and nothing is held.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fulltilt.cluster.loading import Models, exporter
from fulltilt.cluster.sizes import role_facts
from fulltilt.parallel.apply import Shards, Sharing, shard, share
from fulltilt.parallel.ranks import Ranks
from fulltilt.parallel.twin import Twin, over_same_memory, whole_on_host, without_memory
from fulltilt.plan import RoleFacts
from fulltilt.schema import Config
from fulltilt.words import in_bytes


@dataclass(eq=False)
class SharedModels:
    shards: dict[str, Shards] = field(default_factory=dict)  # by role
    facts: dict[str, RoleFacts] = field(default_factory=dict)  # what each role's model was like before it was shared out
    rollout: PreTrainedModel | None = None  # the whole actor, for the engine
    structure: PreTrainedModel | None = None  # the actor without memory, where no engine needs it whole
    twin: Twin | None = None  # keeps `rollout` at the latest weights
    collected: PreTrainedModel | None = None  # the whole actor in main memory, for an export
    adapters_alone: bool = False  # whether an export has only these

    def collect(self) -> None:
        """Make the whole actor for an export, on all workers at the same time."""
        if self.twin:
            self.twin.sync()
        elif self.structure is not None:
            self.collected = whole_on_host(self.shards["actor"], self.structure, learning=self.adapters_alone)

    def exporter(self, config: Config, models: Models, tokenizer: PreTrainedTokenizerBase) -> tuple[Callable[[Path], None], int]:
        """As `loading.exporter`; what `collect` has made is written."""
        if "actor" not in models.own:
            return lambda folder: None, 0
        export, count = exporter(config, self.rollout or self.structure or models.actor, tokenizer)
        if self.structure is None:
            return export, count

        def export_collected(folder: Path) -> None:
            assert self.collected is not None
            exporter(config, self.collected, tokenizer)[0](folder)
            self.collected = None

        return export_collected, count

    def notes(self) -> Iterator[str]:
        for role, shards in self.shards.items():
            held, sharing = sum(numbers.nbytes for numbers in shards.own().values()), shards.sharing
            groups = f", in {sharing.everyone.size // sharing.group.size} groups" if sharing.group.size < sharing.everyone.size else ""
            yield f"{role}: parameters shared out among {sharing.group.size} workers{groups}, {in_bytes(held)} each"
        if self.twin:
            held = sum(tensor.nbytes for tensor in self.twin.memory())
            yield f"rollout: every worker has the whole actor for it, {in_bytes(held)}"


@dataclass(frozen=True, eq=False)
class ModelSharer:
    """Shares out one role's model after another, each as soon as it is loaded."""

    found: SharedModels
    sharing: Sharing
    device: torch.device
    learners: Collection[str]
    sampled: bool  # whether an engine needs the actor whole

    @staticmethod
    def of(config: Config, ranks: Ranks, device: torch.device, learners: Collection[str], *, sampled: bool) -> ModelSharer:
        train, found = config.train, SharedModels(adapters_alone=config.lora.rank > 0 and config.lora.export != "merged")
        knobs = {"reshard_after_forward": train.reshard_after_forward, "forward_prefetch": train.forward_prefetch}
        return ModelSharer(found, share(ranks, device.type, train.shard_size, **knobs), device, learners, sampled)

    def share_out(self, role: str, model: torch.nn.Module) -> None:
        found = self.found
        found.facts[role] = role_facts(model, learns=role in self.learners)
        if role == "actor":
            assert isinstance(model, PreTrainedModel)
            if self.sampled:
                found.rollout = over_same_memory(model)
            else:
                found.structure = without_memory(model)
        found.shards[role] = shard(model, self.sharing)
        if role == "actor" and found.rollout is not None:
            found.twin = Twin(found.rollout, found.shards[role])
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # whole parameters are in pieces into which those of the next role may not fit
