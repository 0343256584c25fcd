"""The models of a run whose workers share out parameters: `train.shard` "full" and "hybrid".

Enters: the loaded models, with adapters, and the workers. Leaves: `SharedModels`: the same models shared out, and the whole actor for
rollouts and exports. Guaranteed: where parameters are not shared out, nothing is done and nothing is held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fulltilt.cluster.loading import Models, exporter
from fulltilt.parallel.apply import Shards, shard, share
from fulltilt.parallel.ranks import Ranks
from fulltilt.parallel.twin import Twin, over_same_memory, whole_on_host, without_memory
from fulltilt.schema import Config
from fulltilt.words import in_bytes


@dataclass(eq=False)
class SharedModels:
    shards: Mapping[str, Shards] = field(default_factory=dict)  # by role
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


def share_out(config: Config, models: Models, ranks: Ranks, device: torch.device, *, sampled: bool) -> SharedModels:
    """Share out the models of all roles. `sampled`: whether an engine needs the actor whole."""
    train, found = config.train, SharedModels(adapters_alone=config.lora.rank > 0 and config.lora.export != "merged")
    if "actor" in models.own and sampled:
        found.rollout = over_same_memory(models.actor)
    elif "actor" in models.own:
        found.structure = without_memory(models.actor)
    sharing = share(
        ranks, device.type, train.shard_size, reshard_after_forward=train.reshard_after_forward, forward_prefetch=train.forward_prefetch
    )
    found.shards = {role: shard(model, sharing) for role, model in models.own.items()}
    if found.rollout is not None:
        found.twin = Twin(found.rollout, found.shards["actor"])
    return found
