"""Predicted bytes that the collectives of a step move.

Enters: the work of each role in a step (`RoleWork`), how workers shard models, where workers hold rows, which rows go where (`RowTraffic`),
and where workers sample together, the passes of their rollout (`RolloutWork`). Leaves: bytes by kind of collective, as `Ranks.moved` counts
them; if workers move different numbers of bytes, those of the worker that moves most of that kind. Guaranteed: arithmetic alone, equal to
the count for steps in which no memory runs out and gradients are finite (a step that is skipped gathers nothing), if a gradient reaches
every layer.

Recompute does not change the bytes of sharded parameters, which are gathered for the backward pass anyway. Collectives inside layers, those
of Ulysses (`ulysses_pass`), of tensor parallelism (`tensor_pass`) and of expert parallelism (`expert_pass`), run again in layers that are
computed again. How many rows a worker gets for its experts is the routers' choice: it is given, or taken to be as many as the worker sends,
which is exact for the sum over the workers of a group (`most_received` is the bound for one).

The passes of a rollout are given (`PrefillPass`, `DecodePass`), since they depend on the lengths of prompts and responses, and on when the
engine's scheduler admits which. For decoding steps, only the sum of their rows counts: on a CPU, where no sample is put back, one row for
every token of a response except the first, which a prefill pass draws.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Literal

from fulltilt.parallel.cuts import vocabulary_rows
from fulltilt.parallel.entries import COUNT, KIND, MOST_NUMBERS, NUMBER_BYTES, NUMBERS_ENTRY, ROW_ENTRY, TOKEN_BYTES
from fulltilt.parallel.holdings import gathered_layouts
from fulltilt.parallel.layout import ParameterSize, Sharding, Sizes, lay_out_rows, lay_out_sizes, learning, padded
from fulltilt.shape import DecoderLayer, Experts, LayerDivision, Recompute, Shape

Reads = Literal["value", "logprob", "entropy"]  # what a pass computes for a token: a critic's value, the log-prob, or log-prob and entropy
NORM, FLAG = 8, 4  # bytes of the squared norm, and of a flag per parameter: whether it has a gradient
FAILED = 8  # bytes of the flag that a worker has run out of memory
ROW_COUNT = 4  # bytes of the number of rows that go to an expert
PASSES = 8  # bytes of the number of passes that workers agree on, where all must make equally many
CAPTURED = 8  # bytes of the flag that a member that samples has failed to capture a CUDA graph
RUNS_OF_CAPTURE = 2  # how often a step runs before it is captured as a CUDA graph
LOOK = 2 * 8  # bytes that members exchange before a pass: whether to stop, and whether an answer of the driver is missing
COLUMNS, ROUTER = ("o_proj", "down_proj"), "shared_expert_gate"  # projections that tensor parallelism cuts by columns, or leaves whole
WHITENING = 5  # sums over all workers in whitening: two counts, the ends, the sum, the sum of squares


@dataclass(frozen=True)
class Stream:
    """The tokens of a micro-batch, and which results are read.

    Example, a prompt of 4 tokens and a response of 5: Stream(9, [range(3, 8)])
    """

    tokens: int
    read: Sequence[range]  # places, ascending: those before trained tokens, whose log-probs, entropies or values are read

    @staticmethod
    def of(rows: Iterable[tuple[int, int]]) -> Stream:
        """Make the stream of rows, from the tokens of each prompt and of each response, which is trained on."""
        end, read = 0, []
        for prompt, response in rows:
            read.append(range(end + prompt - 1, end + prompt + response - 1))
            end += prompt + response
        return Stream(end, read)

    @property
    def results(self) -> int:
        return sum(map(len, self.read))

    def part(self, size: int, rank: int) -> Stream:
        """Return a worker's part, if `size` workers have one part each."""
        each = padded(self.tokens, size) // size
        own = range(rank * each, (rank + 1) * each)
        found = (range(max(places.start, own.start) - own.start, min(places.stop, own.stop) - own.start) for places in self.read)
        return Stream(each, [places for places in found if places])

    def most_results(self, size: int) -> int:
        """Return how many results are read of the part with most, if `size` workers have one part of the tokens each."""
        return max(self.part(size, rank).results for rank in range(size))


FILLER = Stream(2, (range(1),))  # the pass of a worker with fewer micro-batches than others, where all must make equally many


@dataclass(frozen=True)
class GroupWork:
    """The micro-batches of a role that groups of workers compute together, without fillers."""

    shape: Shape
    size: int  # workers of a group
    updates: Sequence[Sequence[Stream]] = ()  # the streams of each group, in all optimizer steps
    scored: Sequence[Sequence[Stream]] = ()  # the streams of each group, in all phases without gradient
    reads: Reads = "entropy"  # in updates; "value" for a critic
    recompute: Recompute = field(default_factory=Recompute)


@dataclass(frozen=True)
class SequenceWork(GroupWork):
    """The micro-batches of a role whose tokens are divided among the workers of groups (parallel/sequence.py)."""


@dataclass(frozen=True)
class TensorWork(GroupWork):
    """The micro-batches of a role whose layers are divided among the workers of groups (parallel/tensor.py). Where several such groups
    share the tokens of a micro-batch, both kinds of work are given, with the same streams."""

    learns: Literal["all", "adapters"] = "all"  # parameters that have a gradient
    duplicated: int = 0  # numbers that learn, in rows that several but not all members hold (`duplicated_rows`)


@dataclass(frozen=True)
class ExpertPass:
    """A worker's micro-batch in a model whose experts are divided."""

    tokens: int
    received: Sequence[int] | None = None  # rows that the worker receives in each layer with experts; None: as many as it sends


@dataclass(frozen=True)
class ExpertWork:
    """The micro-batches of a role whose experts are divided among groups of workers (parallel/experts.py), without fillers."""

    shape: Shape
    updates: Sequence[Sequence[ExpertPass]] = ()  # for each worker, the passes in all optimizer steps
    scored: Sequence[Sequence[ExpertPass]] = ()  # for each worker, the passes in all phases without gradient
    recompute: Recompute = field(default_factory=Recompute)


@dataclass(frozen=True)
class RoleWork:
    """The work of a role in a step. Example: RoleWork(sizes, 2, batches=4, passes=8, scored=(3,))"""

    sizes: Sizes
    itemsize: int  # bytes of a number that the model computes with
    batches: int = 0  # optimizer steps: mini-batches times epochs
    passes: int = 0  # with gradient, in all optimizer steps: of the worker with the most, up to which others run fillers
    scored: Sequence[int] = ()  # passes without gradient, one number per phase: of the worker with the most
    synced: int = 0  # how often a rollout engine gets new values
    parts: int = 1  # number of parts of parameters that the engine's model has whole, or in parts of another size
    sequence: SequenceWork | None = None  # given where groups of workers share micro-batches; `passes` and `scored` are then per group
    tensor: TensorWork | None = None  # given where groups of members divide layers: the same, and `workers` have the same part
    experts: ExpertWork | None = None  # where groups of workers divide experts


@dataclass(frozen=True)
class PrefillPass:
    """A pass over prompts, and over samples that were put back and continue."""

    tokens: int  # the sum over all of them, except for tokens whose keys and values are already in the cache
    drawn: int  # rows of logits: one for each prompt or sample that ends in the pass, and one for all samples of a group


@dataclass(frozen=True)
class DecodePass:
    """Decoding steps between two looks of the host.

    Example, three samples for four steps: DecodePass([3, 3, 2, 1]) on a CPU if two of them end, and DecodePass([3] * 4) on CUDA.
    """

    steps: Sequence[int]  # samples that each step computes: those still running, and on CUDA also those that ended since the host looked


@dataclass(frozen=True)
class RolloutWork:
    """A rollout by groups whose members have a part of every layer each (`rollout.tensor_parallel`). The caller gives every pass of every
    group, in which no memory runs out. Experts, in parts or whole on members, and whether embeddings are tied make no difference."""

    shape: Shape
    size: int  # members of a group
    itemsize: int  # bytes of a number that the engine's model computes with
    passes: Sequence[Sequence[PrefillPass | DecodePass]]  # one sequence of passes per group
    graphs: Sequence[int] = ()  # batch sizes of CUDA graphs, ascending, to which decoding steps are padded; empty: no graphs
    captures: Sequence[int] = ()  # batch sizes of the graphs that each group captures in this rollout


@dataclass(frozen=True)
class Trip:
    """The way of a row from the worker that holds it to a worker that computes with it."""

    tokens: int
    home: int  # the rank of the worker that holds it
    computed: int  # the rank of the worker that computes with it
    tells: bool = True  # whether this worker sends results back: the first of several that compute the row together


@dataclass(frozen=True)
class RowExchange:
    """Rows that go to the workers that compute with them, in one phase."""

    trips: Sequence[Trip]
    fields: int = 0  # numbers per token that go with a row: none for a pass without gradient, all that it has for an update
    returns: bool = False  # whether a number per token goes back, as after a pass without gradient


@dataclass(frozen=True)
class RowTraffic:
    """Exchanges between workers that hold rows, in one step."""

    workers: int  # all workers of the run
    exchanges: Sequence[RowExchange]
    sums: int = 0  # number of sums over all workers: WHITENING for each whitening, unless all numbers are equal

    @property
    def sent_bytes(self) -> list[int]:
        """Return the bytes that each worker sends, including the sizes of its parcels."""
        of_everyone = self.workers * 2 * COUNT
        found = [self.sums * (of_everyone + self.workers * MOST_NUMBERS * 8)] * self.workers
        for exchange in self.exchanges:
            found = [count + of_everyone * (1 + exchange.returns) for count in found]
            of_token = TOKEN_BYTES + exchange.fields * NUMBER_BYTES
            for trip in (trip for trip in exchange.trips if trip.home != trip.computed):
                found[trip.home] += ROW_ENTRY.itemsize + trip.tokens * of_token
                if exchange.returns and trip.tells:
                    found[trip.computed] += NUMBERS_ENTRY.itemsize + trip.tokens * NUMBER_BYTES
        return found


def predict(
    roles: Sequence[RoleWork], sharding: Sharding, rows: RowTraffic | None = None, rollout: RolloutWork | None = None
) -> Counter[str]:
    """Predict the bytes that each worker moves in a step. `rows`: given where workers hold rows, as on several machines. `rollout`: given
    where workers sample together; other workers move nothing in a rollout."""
    found: Counter[str] = Counter()
    for role in roles:
        found += of_parameters(role, sharding) + of_sync(role, sharding)
    streams = [
        sum((of_passes(role, sharding, rank) + of_steps(role, sharding, rank) for role in roles), Counter[str]())
        for rank in range(sharding.workers)
    ]
    # Members with different parts of the layers make the same passes, but may sample in other groups than they learn in.
    members = max((role.tensor.size for role in roles if role.tensor), default=1)
    learned = [own for own in streams for _ in range(members)]
    parcels = [Counter({KIND: count}) for count in rows.sent_bytes] if rows else []
    sampled = [own for group in range(len(rollout.passes)) for own in [of_rollout(rollout, group)] * rollout.size] if rollout else []
    apart = [sum(own, Counter[str]()) for own in zip_longest(learned, parcels, sampled, fillvalue=Counter[str]())]
    kinds = sorted({kind for own in apart for kind in own})
    return found + Counter({kind: max(own[kind] for own in apart) for kind in kinds})


def of_parameters(role: RoleWork, sharding: Sharding) -> Counter[str]:
    """Return the bytes of parameters and gradients. Divided experts are sharded across the workers that have the same experts."""
    if sharding.experts > 1:
        common, own = (replace(role, sizes=tuple(each for each in role.sizes if each.apart is apart)) for apart in (False, True))
        size = sharding.workers // sharding.experts
        replicas = replace(sharding, workers=size, group=size, experts=1)
        return of_parameters(common, replace(sharding, experts=1)) + of_parameters(own, replicas)
    if sharding.workers == 1:
        return Counter()
    return of_shards(role, sharding) if sharding.parameters else of_whole(role, sharding.workers)


def of_steps(role: RoleWork, sharding: Sharding, rank: int) -> Counter[str]:
    """Return the bytes of agreements of all workers. In an optimizer step: the norm of the gradient, and gradients of numbers that several
    members of a group hold, of which a worker may have more rows than another; whether a worker has run out of memory; and where passes
    wait for other workers, the number of passes."""
    members = role.tensor.size if role.tensor else 1
    if sharding.workers * members == 1:
        return Counter()
    waits = sharding.parameters or role.experts is not None
    found = role.batches * (NORM + FAILED) + (role.batches + len(role.scored)) * PASSES * waits
    if role.tensor:
        rows, shared = lay_out_rows(role.sizes, sharding.group), role.tensor.duplicated * max(4, role.itemsize)
        for place, own in learning(role.sizes):
            stretch = rows.own(str(place), rank % sharding.group)
            shared += (0 if own.divided else stretch.stop - stretch.start if sharding.parameters else own.count) * own.wide
        found += role.batches * shared
    return Counter({"all-reduce": found})


def of_whole(role: RoleWork, workers: int) -> Counter[str]:
    """Return the bytes of whole parameters. In an optimizer step, gradients are summed into one stretch per worker, and new parameters are
    gathered from all. No collective moves parameters in rollouts or passes."""
    layouts = lay_out_sizes(role.sizes, workers)
    each = {
        "all-reduce": FLAG * len(learning(role.sizes)),
        "reduce-scatter": sum(layout.total * max(4, itemsize) for itemsize, layout in layouts.items()),
        "all-gather": sum(layout.total * itemsize for itemsize, layout in layouts.items()),
    }
    return Counter({kind: role.batches * count for kind, count in each.items() if role.batches})


def of_shards(role: RoleWork, sharding: Sharding) -> Counter[str]:
    """Return the bytes of sharded parameters. Every pass gathers the parameters of each layer, and again for the backward pass if they were
    freed. Parameters outside the layers are kept until the backward pass, or the end of the phase. Each backward pass sums gradients into
    the shards, and then over groups."""
    rows = lay_out_rows(role.sizes, sharding.group)

    def whole(own: ParameterSize, place: int) -> int:
        return sharding.group * rows.width(str(place)) * (max(4, role.itemsize) if own.scores else role.itemsize)

    outside = sum(whole(own, place) for place, own in enumerate(role.sizes) if own.layer is None and not own.scores)
    inside = sum(whole(own, place) for place, own in enumerate(role.sizes)) - outside
    learned = sum(rows.width(str(place)) for place, _ in learning(role.sizes)) * max(4, role.itemsize)
    found = Counter[str]()
    found["all-gather"] = role.passes * (outside + (2 if sharding.reshard else 1) * inside)
    found["all-gather"] += sum(outside + (passes if sharding.reshard else 1) * inside for passes in role.scored if passes)
    found["reduce-scatter"] = role.passes * sharding.group * learned
    found["all-reduce"] += role.passes * learned if sharding.group < sharding.workers else 0
    return found


def of_sync(role: RoleWork, sharding: Sharding) -> Counter[str]:
    """Return the bytes of a rollout engine's new values, which its model gets in rounds of equal size."""
    layouts = gathered_layouts(role.sizes, sharding, role.parts)
    return Counter({"all-gather": role.synced * sum(layout.gathered_bytes(itemsize) for layout, itemsize in layouts)})


# ---- passes that several workers compute together ----------------------------------------------------------------------------------------


def of_passes(role: RoleWork, sharding: Sharding, rank: int) -> Counter[str]:
    """Return a worker's bytes in passes over streams that its group shares, or whose tokens go to the experts of others. Where parameters
    are sharded, and for experts, workers with fewer micro-batches than others run fillers."""
    sequence, tensor, experts, found = role.sequence, role.tensor, role.experts, Counter[str]()
    sharing, members = sequence.size if sequence else 1, tensor.size if tensor else 1

    def of_pass(stream: Stream, reads: Reads, learns: bool) -> Counter[str]:
        moved = Counter[str]()
        if sequence and sharing > 1:  # each member has its own heads of the tokens
            shape = replace(sequence.shape, layers=tuple(map(LayerDivision(members).own, sequence.shape.layers)))
            moved += ulysses_pass(shape, sharing, role.itemsize, stream, reads, learns=learns, recompute=sequence.recompute)
        if tensor:
            kind: Literal["all", "adapters", "none"] = tensor.learns if learns else "none"
            part = stream.part(sharing, rank % sharing) if sharing > 1 else stream
            moved += tensor_pass(tensor.shape, members, role.itemsize, part, reads, learns=kind, recompute=tensor.recompute)
        return moved

    if work := tensor or sequence:
        found += of_streams(role, sharding, work, rank // sharing, of_pass)
    if experts:
        for given, count, learns in ((experts.updates, role.passes, True), (experts.scored, sum(role.scored), False)):
            own = list(given[rank]) if given else []
            for each in [*own, *[ExpertPass(FILLER.tokens)] * (count - len(own))]:
                found += expert_pass(experts.shape, role.itemsize, each, learns=learns, recompute=experts.recompute)
    return found


def of_streams(
    role: RoleWork, sharding: Sharding, work: GroupWork, group: int, of_pass: Callable[[Stream, Reads, bool], Counter[str]]
) -> Counter[str]:
    """Sum the bytes of a group's passes, including its fillers."""
    found, plain = Counter[str](), "value" if work.reads == "value" else "logprob"
    kinds: list[tuple[Any, int, Any, bool]] = [(work.updates, role.passes, work.reads, True), (work.scored, sum(role.scored), plain, False)]
    for given, count, reads, learns in kinds:
        own = list(given[group]) if given else []
        for stream in own:
            found += of_pass(stream, reads, learns)
        for _ in range(count - len(own) if sharding.parameters else 0):
            found += of_pass(FILLER, plain, learns)  # type: ignore[arg-type]
    return found


def expert_pass(
    shape: Shape,
    itemsize: int,
    given: ExpertPass,
    *,
    learns: bool,
    recompute: Recompute = Recompute(),  # noqa: B008 (frozen)
) -> Counter[str]:
    """Return the bytes that a worker sends in a pass of a model whose experts are divided, to itself as well (parallel/experts.py).

    In every layer with experts it sends the number of rows for each expert, one row for each expert of a token, and results of the rows
    that it has received. Gradients go the same way, and where a layer is recomputed, everything but the gradients goes once more."""
    again = {index for unit in recompute.units(len(shape.layers)) for index in unit} if learns else set[int]()
    divided = [(index, layer.experts) for index, layer in enumerate(shape.layers) if layer.experts]
    found = 0
    for place, (index, experts) in enumerate(divided):
        sent = experts.active * given.tokens
        rows = sent + (sent if given.received is None else given.received[place])
        found += (1 + (index in again)) * experts.count * ROW_COUNT + (1 + learns + (index in again)) * rows * shape.width * itemsize
    return Counter({KIND: found})


def most_received(experts: Experts, size: int, tokens: int) -> int:
    """Return the most rows that a worker can receive in a layer: for each of the `tokens` of its group of `size`, as many as it has experts
    to choose."""
    return min(experts.active, experts.count // size) * tokens


def ulysses_pass(
    shape: Shape, size: int, itemsize: int, stream: Stream, reads: Reads, *,
    learns: bool, recompute: Recompute = Recompute(),  # noqa: B008 (frozen)
) -> Counter[str]:  # fmt: skip
    """Return the bytes on each worker of a group of `size` in a pass over a stream that the group shares (parallel/sequence.py).

    In every layer queries, keys and values go to the workers that have their heads, and attention's output goes back; so do their
    gradients, and where a layer is computed again, all of it goes once more. Results are gathered, from each worker as many as the worker
    with most has."""
    own = padded(stream.tokens, size) // size
    again = {index for unit in recompute.units(len(shape.layers)) for index in unit} if learns else set()
    times = [1 + learns + (index in again) for index in range(len(shape.layers))]
    numbers = sum(count * exchanged_numbers(layer, size) for count, layer in zip(times, shape.layers, strict=True))
    results = (2 if reads == "entropy" else 1) * size * stream.most_results(size)
    return Counter({KIND: own * numbers * itemsize, "all-gather": results * max(4, itemsize)})


def exchanged_numbers(layer: DecoderLayer, size: int) -> int:
    """Return how many numbers of a token go around attention: queries, keys, values and output. If there are fewer key heads than workers,
    each worker gets one."""
    key_heads = layer.key_heads if layer.key_heads % size == 0 else size
    return (2 * layer.heads + 2 * key_heads) * layer.head_width


def tensor_pass(
    shape: Shape, size: int, itemsize: int, stream: Stream, reads: Reads, *,
    learns: Literal["all", "adapters", "none"] = "all", recompute: Recompute = Recompute(),  # noqa: B008 (frozen)
) -> Counter[str]:  # fmt: skip
    """Return the bytes on each member of a tensor-parallel group in a pass over a stream (parallel/tensor.py). `learns`: the parameters
    that have a gradient; with adapters, every attention and feed-forward layer has one."""
    blocks = 2 * len(shape.layers)  # attention and feed-forward layers: tokens are gathered before each, and summed and scattered after it
    gathers = blocks + 1  # after the last norm
    scatters = blocks + 1  # after the embedding
    if learns != "none":
        # A gather's backward pass is a scatter, and the other way round. With adapters alone no gradient enters the first layer's gather
        # and the embedding.
        gathers, scatters = (each + blocks + (learns == "all") for each in (gathers, scatters))
        for unit in recompute.units(len(shape.layers)):
            # Recomputing layers stops at the last tensor that was saved for their backward pass. Where the last block's sum is merely added
            # to the residual, that tensor comes before the sum.
            gathers, scatters = gathers + 2 * len(unit), scatters + 2 * len(unit) - (not norms_behind_blocks(shape))
    tokens, wide = padded(stream.tokens, size), max(4, itemsize)
    found = Counter({"all-gather": gathers * tokens * shape.width * itemsize, "reduce-scatter": scatters * tokens * shape.width * itemsize})
    if reads == "value":
        found["all-gather"] += tokens * wide
    else:  # the largest number of a row; the sum of exponentials, the chosen one, and the terms of the entropy
        found["all-reduce"] = (4 if reads == "entropy" else 3) * max(1, stream.results) * wide
    return found


def norms_behind_blocks(shape: Shape) -> bool:
    return shape.family is not None and shape.family.norms > 2


# ---- rollouts of members that sample together --------------------------------------------------------------------------------------------


def of_rollout(work: RolloutWork, group: int) -> Counter[str]:
    """Return the bytes on each member of a group in a rollout. A CUDA graph's step runs a few times before it is captured; then members
    agree on whether one of them has failed, by an all-reduce on the device."""
    captured = [DecodePass([size] * RUNS_OF_CAPTURE) for size in work.captures]
    passes = [*work.passes[group], *captured]
    found = sum((rollout_pass(work.shape, work.size, work.itemsize, own, work.graphs) for own in passes), Counter[str]())
    return found + Counter({"all-reduce": CAPTURED * len(work.captures)})


def rollout_pass(
    shape: Shape, size: int, itemsize: int, given: PrefillPass | DecodePass, graphs: Sequence[int] = ()
) -> Counter[str]:  # fmt: skip
    """Return the bytes on each member of a tensor-parallel group of `size` in a pass of its engine (parallel/tensor.py).

    In a prefill pass, tokens are gathered before each attention and feed-forward layer and after the last norm, and summed and scattered
    after the embedding and each such layer. A decoding step sums all tokens on all members instead, and has nothing to gather. Each member
    gets the logits of all parts of the vocabulary, in float32 or better, where parts have equally many rows."""
    sums = 2 * len(shape.layers) + 1  # after the embedding, and after attention and feed-forward of each layer
    if isinstance(given, DecodePass):
        drawn = sum(times * filled_up(rows, graphs) for rows, times in Counter(given.steps).items())
        found = Counter({"all-reduce": sums * drawn * shape.width * itemsize})
    else:
        drawn, moved = given.drawn, sums * padded(given.tokens, size) * shape.width * itemsize
        found = Counter({"all-gather": moved, "reduce-scatter": moved})
    found["all-gather"] += size * vocabulary_rows(shape.vocabulary, size) * drawn * max(4, itemsize)
    return found


def filled_up(rows: int, graphs: Sequence[int]) -> int:
    """Return how many rows a decoding step computes for this many samples."""
    return next(size for size in graphs if size >= rows) if graphs else rows


def agreed_bytes(
    passes: Sequence[PrefillPass | DecodePass], *, calls: int = 1, graphs: bool = False, every_step: bool = True, looks: int = 0
) -> int:
    """Return the bytes of agreements in main memory of members that sample together, which `Ranks.moved` does not count and `predict`
    leaves out.

    After a pass that no CUDA graph holds, and after taking the memory of the KV cache in each of the engine's `calls`, each member says
    whether its memory has run out; on a CPU also after `every_step` of a decoding pass. With a queue of prompts, members agree on whether
    to stop before every fourth pass, and before each pass that begins while an answer of the driver is missing; the number of these `looks`
    depends on timing."""
    found = calls * FAILED + looks * LOOK
    for own in passes:
        if isinstance(own, PrefillPass):
            found += FAILED
        elif not graphs:
            found += FAILED * (1 + every_step * len(own.steps))
    return found


def shared_numbers(shape: Shape, size: int, *, score: int = 0) -> int:
    """Return how many numbers have gradients that members of a tensor-parallel group sum before each optimizer step
    (`TensorSplit.sum_shared`), because several members hold them: norms, routers, biases that are added once, and heads of keys and values
    if there are fewer than members. `score`: numbers of a critic's head."""
    family, found = shape.known_family(), score + shape.parameters_by_kind()["norms"]
    for layer in shape.layers:
        found += layer.experts.count * shape.width if layer.experts else 0
        found += 2 * layer.head_width if family.head_norms else 0
        for name, (inner, outer, _) in shape.products(layer).items():
            found += duplicated_rows(layer, name, size) * (inner + bool(family.qkv_bias))
            if name.endswith(COLUMNS):
                found += outer if (family.output_bias if name.endswith("o_proj") else family.mlp_bias) else 0
            elif name.endswith(ROUTER):
                found += inner * outer
    return found


def shared_adapter_numbers(
    shape: Shape, size: int, rank: int, targets: Iterable[str] | Literal["all-linear"] = "all-linear", stacked: Iterable[str] = (),
    *, whole_experts: bool = False,
) -> int:  # fmt: skip
    """Return the same where only adapters learn: for each adapter the side that is not cut, and rows of the other side where keys and
    values are duplicated; nothing for adapters on whole experts, which one member has."""
    found = 0
    for place, name, (inner, outer, copies) in shape.adapted(targets, () if whole_experts else stacked):
        layer = shape.layers[place]
        whole = {"A": not name.endswith(COLUMNS), "B": name.endswith((*COLUMNS, ROUTER))}
        found += rank * copies * (whole["A"] * inner + whole["B"] * outer) + rank * duplicated_rows(layer, name, size)
    return found


def duplicated_rows(layer: DecoderLayer, name: str, size: int) -> int:
    """Return how many rows of a projection several of `size` members hold."""
    projections = {"self_attn.k_proj": 1, "self_attn.v_proj": 1, "self_attn.qkv_proj": 2}
    return projections.get(name, 0) * layer.keys if layer.key_heads % size else 0


def sent_bytes(moved: Mapping[str, int], workers: int) -> float:
    """Return the fewest bytes that each worker can send, and receive, in such collectives: everything that it has for the others, or needs
    from them, once; for an all-reduce twice."""
    return (workers - 1) / workers * sum((2 if kind == "all-reduce" else 1) * count for kind, count in moved.items())
