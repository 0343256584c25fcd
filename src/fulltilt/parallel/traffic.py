"""What the collectives of a step move, predicted.

Enters: what each role does in a step (`RoleWork`), and what workers share out. Leaves: bytes by kind of collective, as `Ranks.moved` counts
them on every worker. Guaranteed: arithmetic alone, equal to the count for steps whose gradients are finite (one that is skipped gathers
nothing), if a gradient reaches every layer. Recomputed layers count as others: their parameters are gathered for the backward pass anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fulltilt.parallel.holdings import by_type
from fulltilt.parallel.layout import ParameterSize, Sharding, Sizes, lay_out_rows, lay_out_sizes, learning

NORM, FLAG = 8, 4  # bytes of the squared norm, and of what says for each parameter whether it has a gradient
COUNT = 8  # bytes of a number of passes that workers agree on, where all must make as many


@dataclass(frozen=True)
class RoleWork:
    """What a role does in a step. Example: RoleWork(sizes, 2, batches=4, passes=8, scored=(3,))"""

    sizes: Sizes
    itemsize: int  # bytes of a number that the model computes with
    batches: int = 0  # optimizer steps: mini-batches times epochs
    passes: int = 0  # with gradient, in all of them: of the worker with the most, whose number the others fill up to
    scored: Sequence[int] = ()  # passes without gradient of each phase, of the worker with the most
    synced: int = 0  # how often a rollout engine gets the new values


def predict(roles: Sequence[RoleWork], sharding: Sharding) -> Counter[str]:
    """Bytes on each worker in a step."""
    found: Counter[str] = Counter()
    for role in roles if sharding.workers > 1 else ():
        found += of_shards(role, sharding) if sharding.parameters else of_whole(role, sharding.workers)
    return found


def of_whole(role: RoleWork, workers: int) -> Counter[str]:
    """Every worker has all parameters. In an optimizer step gradients are summed into a stretch for each worker, and new parameters are
    gathered from all. No collective runs in rollouts or passes."""
    layouts = lay_out_sizes(role.sizes, workers)
    each = {
        "all-reduce": NORM + FLAG * len(learning(role.sizes)),
        "reduce-scatter": sum(layout.total * max(4, itemsize) for itemsize, layout in layouts.items()),
        "all-gather": sum(layout.total * itemsize for itemsize, layout in layouts.items()),
    }
    return Counter({kind: role.batches * count for kind, count in each.items() if role.batches})


def of_shards(role: RoleWork, sharding: Sharding) -> Counter[str]:
    """Every pass gathers the parameters of each layer, and again for the backward pass if they were given back. What lies outside the
    layers is kept until the backward pass, or the end of the phase. Each backward pass sums gradients into the shards, and then over
    groups."""
    rows = lay_out_rows(role.sizes, sharding.group)

    def whole(own: ParameterSize, place: int) -> int:
        return sharding.group * rows.width(str(place)) * (max(4, role.itemsize) if own.scores else role.itemsize)

    outside = sum(whole(own, place) for place, own in enumerate(role.sizes) if own.layer is None and not own.scores)
    inside = sum(whole(own, place) for place, own in enumerate(role.sizes)) - outside
    learned = sum(rows.width(str(place)) for place, _ in learning(role.sizes)) * max(4, role.itemsize)
    found = Counter({"all-reduce": role.batches * (NORM + COUNT) + len(role.scored) * COUNT})
    found["all-gather"] = role.passes * (outside + (2 if sharding.reshard else 1) * inside)
    found["all-gather"] += sum(outside + (passes if sharding.reshard else 1) * inside for passes in role.scored if passes)
    found["reduce-scatter"] = role.passes * sharding.group * learned
    found["all-reduce"] += role.passes * learned if sharding.group < sharding.workers else 0
    found["all-gather"] += role.synced * sum(exchanged(own, sharding.group) for own in by_type(role.sizes))
    return found


def exchanged(sizes: Sizes, workers: int) -> int:
    """Bytes of whole parameters of one type, gathered in rounds of equal size."""
    layout, itemsize = lay_out_rows(sizes, workers), sizes[0].itemsize
    at_once = layout.in_a_round(itemsize)
    return -(-layout.stretch // at_once) * at_once * workers * itemsize


def sent_bytes(moved: Mapping[str, int], workers: int) -> float:
    """The fewest bytes that each worker can send, and receive, in such collectives: of what it has for the others, or needs from them,
    everything once; for an all-reduce twice."""
    return (workers - 1) / workers * sum((2 if kind == "all-reduce" else 1) * count for kind, count in moved.items())
