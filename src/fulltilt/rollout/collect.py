"""Collecting a step's groups.

Enters: the step's prompts. Leaves: one group for each, in prompt order whatever order they finished in. Guaranteed: `on_group` sees each
group the moment it is complete, so that rewards run while generation goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fulltilt.records import Group, Prompt
from fulltilt.rollout.engine import Engine
from fulltilt.rollout.sampler import Sampling


def collect(
    engine: Engine, prompts: Sequence[Prompt], sampling: Sampling, seed: int, on_group: Callable[[Group], None]
) -> tuple[Group, ...]:
    finished: dict[int, Group] = {}
    for group in engine.generate(prompts, sampling, seed):
        on_group(group)
        finished[id(group.prompt)] = group
    return tuple(finished[id(prompt)] for prompt in prompts)
