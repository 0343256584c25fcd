"""Out-of-memory errors on purpose, to test how a run handles them. Off unless the environment variable FULLTILT_OUT_OF_MEMORY is set.

Its value is a list, separated by commas, of `ROLE.WHERE:NUMBER`, or `ROLE.WHERE:FIRST-LAST` for several in a row, each followed by
`@WORKER` unless all workers shall fail. NUMBER counts from 1, since the worker was made:

    forward     passes with a gradient: in the model's last layer, before its results exist
    backward    the same passes: when half of the gradients have been accumulated; where parameters are sharded, half of the layers'
    optimizer   optimizer steps: once gradients are summed over all workers, before the first parameter changes
    passes      passes without a gradient, in the same place
    collectives exchanges between workers inside passes, with and without a gradient and in rollouts: before they begin
    cache       the engine's calls for a KV cache, one in each rollout (the role is the actor, as below)
    prefill     the engine's prefill passes: in the model's last layer
    decode      the engine's decoding passes, of several steps each
    steps       the steps of these, where no CUDA graph holds them: in the model's last layer

Example: FULLTILT_OUT_OF_MEMORY="actor.backward:3,critic.forward:1-3@1"
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from typing import Any

import torch

from fulltilt.cluster.worker import Worker
from fulltilt.model.arrays import is_shard
from fulltilt.records import UserError

VARIABLE = "FULLTILT_OUT_OF_MEMORY"
FAULT = re.compile(r"(?P<role>\w+)\.(?P<where>\w+):(?P<first>\d+)(-(?P<last>\d+))?(@(?P<worker>\d+))?")


def install(worker: Worker, faults: str | None = None) -> None:
    """Make a worker run out of memory where `faults` says, or else the environment variable."""
    given = os.environ.get(VARIABLE, "") if faults is None else faults
    for text in filter(None, given.split(",")):
        found = FAULT.fullmatch(text.strip())
        if found is None or found["where"] not in PLACES:
            raise UserError(f"{VARIABLE}: {text!r} is not ROLE.WHERE:NUMBER, with WHERE one of {', '.join(PLACES)}")
        here = found["worker"] is None or int(found["worker"]) == worker.ranks.number
        if here and found["role"] in worker.roles:
            due = Due(int(found["first"]), int(found["last"] or found["first"]))
            PLACES[found["where"]](worker, found["role"], due)


class Due:
    """Decides whether a call is to fail. `first`: the number of the first call to fail."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last, self._numbers = first, last, itertools.count(1)

    def __call__(self) -> bool:
        return self.first <= next(self._numbers) <= self.last


def fail(*_: object) -> None:
    raise torch.OutOfMemoryError("out of memory on purpose. Tried to allocate 20.00 GiB.")


def before(owner: Any, method: str, due: Callable[[], bool], then: Callable[[], object] = fail) -> None:
    """Do something before each call of an object's method for which `due` is true."""
    own = getattr(owner, method)

    def called(*given: Any, **named: Any) -> Any:
        if due():
            then()
        return own(*given, **named)

    setattr(owner, method, called)


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [each for name, each in model.named_modules() if re.fullmatch(r".*\blayers\.\d+", name)]


def fail_in(layer: torch.nn.Module) -> None:
    """Fail once, before the layer computes."""

    def stop(*_: object) -> None:
        handle.remove()
        fail()

    handle = layer.register_forward_pre_hook(stop)


def in_forward(worker: Worker, role: str, due: Callable[[], bool]) -> None:
    layers = layers_of(worker.trainers[role].role.model)
    before(worker.trainers[role].role, "terms", due, lambda: fail_in(layers[-1]))


def in_backward(worker: Worker, role: str, due: Callable[[], bool]) -> None:
    model = worker.trainers[role].role.model
    learning, layers = [each for each in model.parameters() if each.requires_grad], layers_of(model)

    def once() -> None:
        def stop(*_: object) -> None:
            handle.remove()
            fail()

        def watch(_: object, __: object, states: Any) -> None:
            handle.remove()
            (states[0] if isinstance(states, tuple) else states).register_hook(fail)

        if any(map(is_shard, learning)):  # gradients go to whole parameters, which every pass makes again
            handle = layers[len(layers) // 2 - 1].register_forward_hook(watch)
        else:
            handle = learning[len(learning) // 2].register_hook(stop)

    before(worker.trainers[role].role, "terms", due, once)


def in_optimizer(worker: Worker, role: str, due: Callable[[], bool]) -> None:
    before(worker.trainers[role].optimizer, "_reserve", due)


def in_passes(worker: Worker, role: str, due: Callable[[], bool]) -> None:
    """Fail in passes without gradient. `part_of` is called in every pass, also by a copy of the role, which shares the method."""
    layers = layers_of(worker.roles[role].model)
    before(worker.roles[role], "part_of", lambda: not torch.is_grad_enabled() and due(), lambda: fail_in(layers[-1]))


def in_collectives(worker: Worker, role: str, due: Callable[[], bool]) -> None:
    before(worker.ranks.progress, "collective", due)


def in_cache(worker: Worker, role: str, due: Callable[[], bool]) -> None:
    before(worker.engine.runner, "acquire", due)  # type: ignore[union-attr]


def in_prefill(worker: Worker, role: str, due: Callable[[], bool]) -> None:
    runner: Any = worker.engine.runner  # type: ignore[union-attr]
    before(runner, "run", due, lambda: fail_in(layers_of(runner.model)[-1]))


def in_decode(worker: Worker, role: str, due: Callable[[], bool]) -> None:
    on_cpu = worker.account.device.type == "cpu"  # on a CPU, steps run when their results are asked for
    method = "launch" if not on_cpu else "_take" if worker.sampling.size == 1 else "start"
    before(worker.engine.decoder, method, due)  # type: ignore[union-attr]


def in_steps(worker: Worker, role: str, due: Callable[[], bool]) -> None:
    decoder: Any = worker.engine.decoder  # type: ignore[union-attr]
    before(decoder, "_advance", due, lambda: fail_in(layers_of(decoder.model)[-1]))


PLACES: dict[str, Callable[[Worker, str, Callable[[], bool]], None]] = {
    "forward": in_forward,
    "backward": in_backward,
    "optimizer": in_optimizer,
    "passes": in_passes,
    "collectives": in_collectives,
    "cache": in_cache,
    "prefill": in_prefill,
    "decode": in_decode,
    "steps": in_steps,
}
