"""A trace of a pass through a sharded model: the order in which it gathers parameters, and what it leaves whole.

Enters: the model's `Shards`, and a pass. Leaves: `PassTrace`. Guaranteed: the trace is taken in the collectives and the layers themselves;
afterwards the model is as before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fulltilt.model.arrays import is_shard
from fulltilt.model.scalar import decoder_layers
from fulltilt.parallel.apply import CountedGather, Shards

OUTSIDE = "outside"  # of the layers: the parameters of embedding, last norm and head


@dataclass(frozen=True)
class PassTrace:
    """The gathers and layers of a pass, in order. Example: PassTrace(("gather outside", "gather 0", "gather 1", "run 0", "run 1"), 4096)"""

    events: tuple[str, ...]
    whole_bytes: int  # bytes of parameters that were whole when the pass ended

    @property
    def ahead(self) -> int:
        """The number of layers whose gather began before the previous layer ran."""
        order = {event: place for place, event in reversed(list(enumerate(self.events)))}  # the first place of each event
        runs = sum(event.startswith("run ") for event in order)
        return sum(order[f"gather {layer}"] < order[f"run {layer - 1}"] for layer in range(1, runs))


class TracedGather(CountedGather):
    def __init__(self, counted: CountedGather, event: str, events: list[str]) -> None:
        super().__init__(counted.moved, counted.progress, counted.unit)
        self.event, self.events = event, events

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.events.append(self.event)
        return super().__call__(*args, **kwargs)


def traced(shards: Shards, compute: Callable[[], Any]) -> PassTrace:
    """Trace `compute`, which must make its passes through the model on all workers."""
    model, events = shards.model, list[str]()
    layers = decoder_layers(model, "a pass cannot be traced")
    hooks = [layer.register_forward_pre_hook(lambda *_, place=place: events.append(f"run {place}")) for place, layer in enumerate(layers)]
    places = {id(layer): str(place) for place, layer in enumerate(layers)} | {id(model): OUTSIDE}
    for number, unit in enumerate(shards.units):
        event = f"gather {places.get(id(unit), 'score')}"
        unit.set_custom_all_gather(TracedGather(shards.gather_of(number), event, events))  # type: ignore[arg-type]
    try:
        compute()
        return PassTrace(tuple(events), sum(own.nbytes for own in model.parameters() if not is_shard(own)))
    finally:
        for hook in hooks:
            hook.remove()
        for number, unit in enumerate(shards.units):
            unit.set_custom_all_gather(shards.gather_of(number))  # type: ignore[arg-type]
