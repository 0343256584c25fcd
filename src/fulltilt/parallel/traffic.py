"""What the collectives of a step move, predicted.

Enters: what each role does in a step (`RoleWork`), what workers share out, and where workers hold the rows, which of them go where
(`RowTraffic`). Leaves: bytes by kind of collective, as `Ranks.moved` counts them on every worker; of all-to-alls, on the worker that sends
most. Guaranteed: arithmetic alone, equal to the count for steps whose gradients are finite (one that is skipped gathers nothing), if a
gradient reaches every layer. Recomputed layers count as others: their parameters are gathered for the backward pass anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fulltilt.parallel.holdings import by_type
from fulltilt.parallel.layout import ParameterSize, Sharding, Sizes, lay_out_rows, lay_out_sizes, learning
from fulltilt.parallel.parcels import COUNT, KIND, MOST_NUMBERS, NUMBER_BYTES, NUMBERS_ENTRY, ROW_ENTRY, TOKEN_BYTES

NORM, FLAG = 8, 4  # bytes of the squared norm, and of what says for each parameter whether it has a gradient
PASSES = 8  # bytes of a number of passes that workers agree on, where all must make as many
WHITENING = 5  # sums, or numbers of all workers, that whitening asks for: two counts, the ends, the sum, the sum of squares


@dataclass(frozen=True)
class RoleWork:
    """What a role does in a step. Example: RoleWork(sizes, 2, batches=4, passes=8, scored=(3,))"""

    sizes: Sizes
    itemsize: int  # bytes of a number that the model computes with
    batches: int = 0  # optimizer steps: mini-batches times epochs
    passes: int = 0  # with gradient, in all of them: of the worker with the most, whose number the others fill up to
    scored: Sequence[int] = ()  # passes without gradient of each phase, of the worker with the most
    synced: int = 0  # how often a rollout engine gets the new values


@dataclass(frozen=True)
class Trip:
    """A row's way from the worker that holds it to the one that computes with it."""

    tokens: int
    home: int  # the rank of the worker that holds it
    computed: int  # the rank of the worker that computes with it


@dataclass(frozen=True)
class Exchange:
    """Rows that go to the workers that compute with them, for one phase."""

    trips: Sequence[Trip]
    fields: int = 0  # numbers for each token that go with a row: none for a pass without gradient; all that it has for an update
    returns: bool = False  # whether a number for each token goes back, as after a pass without gradient


@dataclass(frozen=True)
class RowTraffic:
    """What goes between workers that hold rows, in a step."""

    workers: int  # all of the run
    exchanges: Sequence[Exchange]
    sums: int = 0  # sums over all workers: whitening takes WHITENING of them, unless all numbers are equal

    def sent_bytes(self, rank: int) -> int:
        """Bytes that a worker sends, the sizes of its parcels included."""
        everyone, own = self.workers * 2 * COUNT, 0
        for exchange in self.exchanges:
            abroad = [trip for trip in exchange.trips if trip.home != trip.computed]
            of_token = TOKEN_BYTES + exchange.fields * NUMBER_BYTES
            own += everyone + sum(ROW_ENTRY.itemsize + trip.tokens * of_token for trip in abroad if trip.home == rank)
            if exchange.returns:
                back = [trip for trip in abroad if trip.computed == rank]
                own += everyone + sum(NUMBERS_ENTRY.itemsize + trip.tokens * NUMBER_BYTES for trip in back)
        return own + self.sums * (everyone + self.workers * MOST_NUMBERS * 8)


def predict(roles: Sequence[RoleWork], sharding: Sharding, rows: RowTraffic | None = None) -> Counter[str]:
    """Bytes on each worker in a step. `rows`: given where workers hold them, as on several machines."""
    found: Counter[str] = Counter()
    for role in roles if sharding.workers > 1 else ():
        found += of_shards(role, sharding) if sharding.parameters else of_whole(role, sharding.workers)
    if rows:
        found[KIND] = max(map(rows.sent_bytes, range(rows.workers)))
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
    found = Counter({"all-reduce": role.batches * (NORM + PASSES) + len(role.scored) * PASSES})
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
