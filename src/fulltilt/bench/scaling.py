"""The cost of a step's collectives at sizes that cannot be tried here: the tables of docs/scaling.md.

Enters: nothing; devices and the work of a step are in this file. Leaves: five tables on standard output, in Markdown. Guaranteed: bytes are
those of parallel/traffic.py and parallel/holdings.py, which equal the counted ones; the choices of `auto` are the plan's; arithmetic is
that of batching/cost.py, and for decoding that of bench/roofline.py; nothing is loaded or measured.

    python -m fulltilt.bench.scaling
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fulltilt.batching.cost import PASSES, ModelSize, update_flops
from fulltilt.bench.roofline import DEVICES, StepCost, bound
from fulltilt.footprint import sizes_up_to
from fulltilt.parallel.cuts import legal_expert_sizes, legal_sequence_sizes, legal_sizes
from fulltilt.parallel.holdings import held_bytes, passing_bytes, rollout_bytes
from fulltilt.parallel.layout import UNSHARDED, Sharding, Sizes
from fulltilt.parallel.portions import portion_sizes
from fulltilt.parallel.traffic import (
    WHITENING,
    DecodePass,
    ExpertPass,
    PrefillPass,
    RoleWork,
    RolloutWork,
    RowExchange,
    RowTraffic,
    Stream,
    Trip,
    expert_pass,
    predict,
    sent_bytes,
    shared_numbers,
    tensor_pass,
    ulysses_pass,
)
from fulltilt.plan.cache import MOST_SEQS
from fulltilt.plan.facts import Facts, RoleFacts
from fulltilt.plan.micro_batches import TOKEN_BUDGET
from fulltilt.plan.sharding import RESERVE, choose_sharding
from fulltilt.schema import Config
from fulltilt.shape import WHOLE_LAYERS, LayerDivision, Recompute, Shape

MODELS = ("0.5B", "7B", "32B", "70B")
WITH_EXPERTS = "Qwen3-30B-A3B"
GPUS = (8, 64, 1024)
OF_MACHINE = 8  # GPUs that NVLink joins
NVLINK = 900e9 / 2  # bytes per second that a GPU sends while it receives at the same rate
NETWORK = 400e9 / 8  # bytes per second of one adapter, in each direction
MEMORY = int(141e9)  # bytes of an H200
DEVICE = DEVICES[r"\bH200\b"]
FLOPS, SHARE = DEVICE.flops, 0.5  # FLOP/s of the device, and the share of it that passes reach
LATENCY = 20e-6  # seconds of a small all-reduce between GPUs of a machine (nccl-tests)
PROMPTS, SAMPLES, PROMPT, RESPONSE, UPDATES = 512, 512 * 16, 512, 1536, 4  # prompts and samples of a step, tokens of each, optimizer steps
ITEMSIZE, GRADIENT = 2, 4  # bytes of a number in bfloat16, and of its gradient
GROUPS = (2, 4, 8)  # GPUs that share micro-batches or layers
TOGETHER = ((2, 2), (2, 4))  # sizes of Ulysses and of tensor parallelism, for layouts with both
LONG_MODELS, LONG_TOKENS, LONG_RECOMPUTE = ("7B", "32B"), (32768, 131072), Recompute("full")


@dataclass(frozen=True)
class Scale:
    """One model on some GPUs, in groups that share micro-batches (Ulysses) or layers (tensor parallelism). `sharding` says what GPUs with
    the same part of every layer shard, and among how many experts are divided."""

    model: str
    sharding: Sharding
    sequence: int = 1  # GPUs that share micro-batches
    tensor: int = 1  # GPUs that share layers

    @property
    def gpus(self) -> int:
        return self.sharding.workers * self.tensor

    @cached_property
    def shape(self) -> Shape:
        return Shape.named(self.model)

    @cached_property
    def sizes(self) -> Sizes:
        """The sizes of a GPU's part of every layer."""
        return role_of(self.shape).part(self.tensor, self.sharding.experts).known_sizes

    @cached_property
    def held_bytes(self) -> int:
        """Bytes on each GPU in an update, without activations."""
        twin = rollout_bytes(self.sizes, self.sharding)
        return held_bytes(self.sizes, self.sharding).total + passing_bytes(self.sizes, self.sharding, ITEMSIZE) + twin

    @cached_property
    def compute_s(self) -> float:
        """Seconds of the forward and backward passes over all samples of a step."""
        lengths = [PROMPT + RESPONSE] * SAMPLES
        flops = update_flops(ModelSize.of_shape(self.shape), lengths, SAMPLES * RESPONSE).total
        return flops / (self.gpus * FLOPS * SHARE)

    @cached_property
    def moved(self) -> Mapping[str, int]:
        """Bytes of parameters and gradients that a GPU moves."""
        tokens = SAMPLES // UPDATES * (PROMPT + RESPONSE)
        # Micro-batches in an optimizer step: GPUs that share their tokens have a token budget each, GPUs that share layers have one
        # together.
        passes = -(-tokens // (self.gpus // self.tensor * TOKEN_BUDGET["cuda"]))
        return predict([RoleWork(self.sizes, ITEMSIZE, UPDATES, UPDATES * passes, synced=1, parts=self.sharding.experts)], self.sharding)

    @cached_property
    def group_traffic(self) -> Sequence[tuple[int, Mapping[str, int]]]:
        """The size of each kind of group, of GPUs that share micro-batches, layers or experts, and the bytes that a GPU moves in it, for
        all samples of a step. Each sample counts as a separate micro-batch: only padding, and how often numbers of rows are sent, depends
        on that. Routers send a GPU as many rows as it sends."""
        samples, stream = SAMPLES * self.sequence * self.tensor // self.gpus, Stream.of([(PROMPT, RESPONSE)])
        part = max((stream.part(self.sequence, rank) for rank in range(self.sequence)), key=lambda own: own.results)
        found: list[tuple[int, Counter[str]]] = []
        if self.sequence > 1:  # each has its own heads for all the tokens
            own = replace(self.shape, layers=tuple(map(LayerDivision(self.tensor).own, self.shape.layers)))
            found.append((self.sequence, ulysses_pass(own, self.sequence, ITEMSIZE, stream, "entropy", learns=True)))
        if self.tensor > 1:
            found.append((self.tensor, tensor_pass(self.shape, self.tensor, ITEMSIZE, part, "entropy")))
        if self.sharding.experts > 1:
            found.append((self.sharding.experts, expert_pass(self.shape, ITEMSIZE, ExpertPass(part.tokens), learns=True)))
        moved = [(size, Counter({kind: samples * count for kind, count in own.items()})) for size, own in found]
        shared = UPDATES * GRADIENT * shared_numbers(self.shape, self.tensor) if self.tensor > 1 else 0
        return [*moved, (self.tensor, Counter({"all-reduce": shared}))]

    @property
    def moved_in_group(self) -> int:
        return sum(sum(moved.values()) for _, moved in self.group_traffic)

    @cached_property
    def group_s(self) -> float:
        """Seconds of the collectives within groups, which are on one machine."""
        return sum(sent_bytes(moved, size) for size, moved in self.group_traffic) / NVLINK

    def collectives_s(self, adapters: int) -> float:
        """Return the seconds of all collectives. `adapters`: network adapters of each machine. A ring passes through every machine once for
        each of its adapters, and through all GPUs of the machine: the slower of the two links decides. Rings of GPUs with different parts
        of layers share the adapters. Groups of a machine's GPUs use NVLink; traffic between groups goes through a GPU's own part of the
        adapters."""
        if self.sharding.shard == "hybrid":
            between = {"all-reduce": self.moved["all-reduce"]}
            inside = {kind: count for kind, count in self.moved.items() if kind not in between}
            outside = sent_bytes(between, self.sharding.workers // self.sharding.group) / (adapters * NETWORK / OF_MACHINE)
            return sent_bytes(inside, self.sharding.group) / NVLINK + outside + self.group_s
        speed = NVLINK if self.gpus <= OF_MACHINE else min(NVLINK, adapters * NETWORK / self.tensor)
        return sent_bytes(self.moved, self.sharding.workers) / speed + self.group_s


def role_of(shape: Shape) -> RoleFacts:
    count = sum(shape.parameters_by_kind().values())
    return RoleFacts(shape, ITEMSIZE * count, count, ITEMSIZE, sizes=portion_sizes(shape, WHOLE_LAYERS, ITEMSIZE, learns=True))


def scales(model: str, gpus: int) -> Iterator[tuple[Scale, bool]]:
    """Yield the ways to shard a model, and whether `auto` chooses each."""
    config = Config.model_validate({"model": {"path": model}, "data": {"train": "none"}})
    facts = Facts("cuda", MEMORY, 0, {"actor": role_of(Shape.named(model))}, 0, 1, sharding=Sharding(workers=gpus))
    chosen = choose_sharding(config, facts, OF_MACHINE)
    for shard, group in (("optimizer", gpus), ("hybrid", OF_MACHINE), ("full", gpus)):
        if shard != "hybrid" or gpus > OF_MACHINE:
            yield Scale(model, Sharding(shard, gpus, group)), shard == chosen.shard  # type: ignore[arg-type]


def table() -> Iterator[str]:
    heads = ("model", "GPUs", "`train.shard`", "held by each", "moved by each in a step", "passes")
    yield f"| {' | '.join([*heads, 'collectives, 8 adapters', 'collectives, 1 adapter', 'what binds'])} |"
    yield f"|{'---|' * (len(heads) + 3)}"
    for model in MODELS:
        for gpus in GPUS:
            for scale, chosen in scales(model, gpus):
                times = [scale.compute_s, scale.collectives_s(OF_MACHINE), scale.collectives_s(1)]
                cells = [f"{scale.held_bytes / 1e9:.0f} GB", f"{sum(scale.moved.values()) / 1e9:.0f} GB", *map(in_seconds, times)]
                shard = f"**{scale.sharding.shard}**" if chosen else scale.sharding.shard
                yield f"| {' | '.join([model, f'{gpus:,}', shard, *cells, binding(scale)])} |"


def binding(scale: Scale) -> str:
    if scale.held_bytes > MEMORY:
        return "memory: it does not fit"
    compute, fast, slow = scale.compute_s, scale.collectives_s(OF_MACHINE), scale.collectives_s(1)
    if fast > compute:
        return "NVLink" if scale.gpus <= OF_MACHINE or scale.group_s > fast / 2 else "the network"
    return (
        "arithmetic"
        if slow < compute / 4 or scale.gpus <= OF_MACHINE
        else f"arithmetic; with 1 adapter {'the network' if slow > compute else 'both'}"
    )


def layouts(model: str, gpus: int) -> Iterator[tuple[str, Scale]]:
    """Yield groups that share micro-batches, layers or experts, by name, each with the first sharding that leaves a fifth of a GPU free, or
    else with the one that takes least."""
    shape = Shape.named(model)
    for size in groups_of(shape):
        yield f"Ulysses {size}", first_that_fits(Scale(model, sharding, sequence=size) for sharding in shardings(gpus))
    for size in (size for size in GROUPS if size in legal_sizes(shape)):
        yield f"tensor {size}", first_that_fits(Scale(model, sharding, tensor=size) for sharding in shardings(gpus, size))
    for size in (size for size in GROUPS if size in legal_expert_sizes(shape)):
        divided = (replace(each, experts=size) for each in shardings(gpus) if each.shard != "hybrid")
        yield f"experts {size}", first_that_fits(Scale(model, sharding) for sharding in divided)
    yield from combined_layouts(shape, model, gpus)


def combined_layouts(shape: Shape, model: str, gpus: int) -> Iterator[tuple[str, Scale]]:
    """Yield layouts with groups of two kinds. If layers and experts are divided among the same GPUs, each has some of the experts whole:
    the traffic is the same as for parts of experts."""
    for sequence, tensor in TOGETHER:
        if tensor in legal_sizes(shape) and sequence in legal_sequence_sizes(shape, OF_MACHINE // tensor, tensor):
            found = first_that_fits(Scale(model, sharding, sequence, tensor) for sharding in shardings(gpus, tensor))
            yield f"Ulysses {sequence}, tensor {tensor}", found
    for size in GROUPS[1:]:
        if size in legal_expert_sizes(shape) and size in legal_sizes(shape, whole_experts=True):
            yield f"tensor {size}, experts {size}", first_that_fits(Scale(model, own, tensor=size) for own in shardings(gpus, size))
    if OF_MACHINE in legal_expert_sizes(shape) and 2 in groups_of(shape):
        divided = (replace(each, experts=OF_MACHINE) for each in shardings(gpus) if each.shard != "hybrid")
        yield f"Ulysses 2, experts {OF_MACHINE}", first_that_fits(Scale(model, sharding, sequence=2) for sharding in divided)


def groups_of(shape: Shape) -> list[int]:
    """Return how many GPUs of a machine may share a micro-batch."""
    legal = legal_sequence_sizes(shape, OF_MACHINE)
    return [size for size in GROUPS if size in legal]


def shardings(gpus: int, tensor: int = 1) -> Iterator[Sharding]:
    """Yield the shardings among GPUs with the same part of every layer. A group of `hybrid` is within a machine."""
    workers, group = gpus // tensor, OF_MACHINE // tensor
    yield Sharding("optimizer", workers, workers)
    if group > 1 and gpus > OF_MACHINE:
        yield Sharding("hybrid", workers, group)
    if workers > 1:
        yield Sharding("full", workers, workers)


def first_that_fits(given: Iterable[Scale]) -> Scale:
    found = list(given)
    return next((scale for scale in found if scale.held_bytes <= (1 - RESERVE) * MEMORY), min(found, key=lambda scale: scale.held_bytes))


def layouts_table() -> Iterator[str]:
    """Yield a row for each layout, with the numbers at 8, 64 and 1,024 GPUs side by side."""
    heads = ["model", "layout", "`train.shard`", "held, GB", "moved within groups, GB", "moved for parameters, GB"]
    heads += ["passes, s", "collectives, s", *(f"what binds at {gpus:,}" for gpus in GPUS)]
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for model in (*MODELS, WITH_EXPERTS):
        for (name, *_), found in (zip(*columns, strict=True) for columns in zip(*(layouts(model, gpus) for gpus in GPUS), strict=True)):
            counts = [(scale.held_bytes, scale.moved_in_group, sum(scale.moved.values())) for scale in found]
            times = [(scale.compute_s, scale.collectives_s(OF_MACHINE)) for scale in found]
            cells = [[scale.sharding.shard for scale in found]]
            cells += [[f"{count / 1e9:,.0f}" for count in column] for column in zip(*counts, strict=True)]
            cells += [[in_seconds(seconds).removesuffix(" s") for seconds in column] for column in zip(*times, strict=True)]
            yield f"| {' | '.join([model, name, *map(side_by_side, cells), *map(binding, found)])} |"


def side_by_side(cells: Sequence[str]) -> str:
    return cells[0] if len({*cells}) == 1 else " / ".join(cells)


# ---- rollouts ----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DividedRollout:
    """The rollout of the step, by groups of GPUs that sample together. Beside the KV cache a GPU has only its part of the parameters."""

    model: str
    members: int
    gpus: int

    @cached_property
    def shape(self) -> Shape:
        return Shape.named(self.model)

    @property
    def samples(self) -> int:
        """Number of samples of a group."""
        return SAMPLES * self.members // self.gpus

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values on each member: with fewer key heads than members, several have the same head."""
        own = replace(self.shape, layers=tuple(map(LayerDivision(self.members).own, self.shape.layers)))
        return own.kv_bytes_per_token(ITEMSIZE)

    @cached_property
    def at_once(self) -> int:
        """Samples that a group decodes at once: as many as `auto` allows and the cache holds."""
        weights = role_of(self.shape).part(self.members).parameter_bytes
        cached = ((1 - RESERVE) * MEMORY - weights) / (self.token_bytes * (PROMPT + RESPONSE))
        return min(self.samples, MOST_SEQS["cuda"], int(cached))

    @property
    def waves(self) -> list[tuple[int, int]]:
        """Waves of samples that are decoded at once, one after another: how many samples, and how many such waves."""
        whole, rest = divmod(self.samples, self.at_once)
        return [(self.at_once, whole), *([(rest, 1)] if rest else [])]

    @cached_property
    def moved(self) -> Counter[str]:
        """Bytes that a group moves. Each prompt goes through a prefill pass once, which gives the first tokens of all its samples; CUDA
        graphs are captured already."""
        prompts = PROMPTS * self.members // self.gpus
        steps = [DecodePass([rows] * (times * (RESPONSE - 1))) for rows, times in self.waves]
        work = RolloutWork(
            self.shape, self.members, ITEMSIZE, [[PrefillPass(prompts * PROMPT, prompts), *steps]], sizes_up_to(self.at_once)
        )
        return predict([], UNSHARDED, rollout=work)

    @property
    def steps(self) -> int:
        """Number of decode steps of a group."""
        return sum(times for _, times in self.waves) * (RESPONSE - 1)

    @property
    def latency_s(self) -> float:
        """Seconds of latency. A step has an all-reduce after the embedding and two in each layer, and gathers its logits."""
        return self.steps * (2 * len(self.shape.layers) + 2) * LATENCY

    def collectives_s(self, speed: float) -> float:
        """Return the seconds of the collectives. `speed`: bytes per second of the link between members."""
        return sent_bytes(self.moved, self.members) / speed

    @cached_property
    def prefill_s(self) -> float:
        flops = update_flops(ModelSize.of_shape(self.shape), [PROMPT], 1).total / PASSES
        return PROMPTS / self.gpus * flops / (FLOPS * SHARE)

    @cached_property
    def decode_s(self) -> dict[str, float]:
        """The least seconds of decoding, and how many of its steps are bound by reading memory."""
        found = Counter[str]()
        for rows, times in self.waves:
            steps = ((rows, rows * (PROMPT + drawn)) for drawn in range(1, RESPONSE))
            least = bound(steps, self._step_cost(rows), DEVICE)
            found.update({"all": times * least["seconds"], "steps of memory": times * least["memory_bound_steps"]})
        return dict(found)

    def _step_cost(self, rows: int) -> StepCost:
        """Return the cost of a step on each member. Of the experts, a step reads those that some sample is sent to, if routers choose
        evenly."""
        size, shape, members = ModelSize.of_shape(self.shape), self.shape, self.members
        read = sum(shape.parameters_by_kind().values()) - (0 if shape.tied else shape.vocabulary * shape.width)
        for layer in shape.layers:
            if layer.experts:
                read -= round(shape.expert_parameters(layer) * (1 - layer.experts.active / layer.experts.count) ** rows)
        scores = sum(4 * width for width, _ in size.attention)
        flops = 2 * (size.layer_weights + size.head_weights)
        return StepCost(ITEMSIZE * read // members, self.token_bytes, flops / members, scores / members)

    @property
    def binding(self) -> str:
        memory = self.decode_s["steps of memory"] * 2 > self.steps
        computing = {"memory's bandwidth" if memory else "arithmetic": self.prefill_s + self.decode_s["all"]}
        times = computing | {"NVLink": self.collectives_s(NVLINK), "latency": self.latency_s}
        slowest = max(times, key=lambda cause: times[cause])
        return slowest if self.collectives_s(NETWORK) < times[slowest] else f"{slowest}; with 400 Gb/s the network"


def rollouts_table() -> Iterator[str]:
    """Yield a row for each size of groups, with the numbers at 8, 64 and 1,024 GPUs side by side."""
    heads = ["model", "`rollout.tensor_parallel`", "samples of a group", "at once", "moved, GB", "prefill and decoding, s"]
    heads += ["collectives on NVLink, s", "with 400 Gb/s, s", "latency, s", *(f"what binds at {gpus:,}" for gpus in GPUS)]
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for model in (*MODELS, WITH_EXPERTS):
        for size in (size for size in GROUPS if size in legal_sizes(Shape.named(model))):
            found = [DividedRollout(model, size, gpus) for gpus in GPUS]
            cells = [[f"{own.samples:,}" for own in found], [f"{own.at_once:,}" for own in found]]
            cells += [[f"{sum(own.moved.values()) / 1e9:,.0f}" for own in found]]
            links = [(own.collectives_s(NVLINK), own.collectives_s(NETWORK)) for own in found]
            times = [(own.prefill_s + own.decode_s["all"], *link, own.latency_s) for own, link in zip(found, links, strict=True)]
            cells += [[in_seconds(seconds).removesuffix(" s") for seconds in column] for column in zip(*times, strict=True)]
            bound_by = [own.binding for own in found]
            yield f"| {' | '.join([model, str(size), *map(side_by_side, cells), *bound_by])} |"


# ---- long samples ------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LongSamples:
    """A step with as many tokens as that of `Scale`, in samples of `tokens` tokens each, with recomputed layers."""

    model: str
    tokens: int
    sequence: int
    gpus: int = 64

    @cached_property
    def scale(self) -> Scale:
        (found,) = (scale for scale, chosen in scales(self.model, self.gpus) if chosen)
        return found

    @property
    def samples(self) -> int:
        """Number of samples of an optimizer step."""
        return SAMPLES * (PROMPT + RESPONSE) // self.tokens // UPDATES

    def working_gpus(self, gpus: int) -> int:
        """Return how many GPUs have a part of a sample, in an optimizer step."""
        return min(gpus, self.samples * self.sequence)

    @property
    def at_once(self) -> int:
        """Samples of a micro-batch: as many as the token budgets of its GPUs allow together, and at least one."""
        return max(1, self.sequence * TOKEN_BUDGET["cuda"] // self.tokens)

    @property
    def own_samples(self) -> int:
        """Samples of an optimizer step on the GPUs that have most."""
        return -(-self.samples // (self.gpus // self.sequence))

    @cached_property
    def activation_bytes(self) -> int:
        """About the bytes of a micro-batch on each GPU, by the plan's estimate."""
        tokens = min(self.at_once, self.own_samples) * self.tokens // self.sequence
        return role_of(self.scale.shape).update_bytes(tokens, {"recompute": LONG_RECOMPUTE.kind})

    @cached_property
    def compute_s(self) -> float:
        flops = update_flops(ModelSize.of_shape(self.scale.shape), [self.tokens], self.tokens - PROMPT).total
        return UPDATES * self.own_samples * flops / (self.sequence * FLOPS * SHARE)

    @cached_property
    def moved(self) -> int:
        """Bytes that are exchanged around attention, and bytes of results."""
        if self.sequence == 1:
            return 0
        stream = Stream.of([(PROMPT, self.tokens - PROMPT)])
        one = ulysses_pass(self.scale.shape, self.sequence, ITEMSIZE, stream, "entropy", learns=True, recompute=LONG_RECOMPUTE)
        return UPDATES * self.own_samples * sum(one.values())

    @property
    def group_s(self) -> float:
        return sent_bytes({"all-to-all": self.moved}, self.sequence) / NVLINK

    @cached_property
    def collectives_s(self) -> float:
        """Return the seconds of collectives, with those of parameters and gradients, and an adapter for each GPU."""
        assert self.scale.sharding.shard != "hybrid" and self.gpus > OF_MACHINE
        passes = UPDATES * -(-self.own_samples // self.at_once)
        of_parameters = predict([RoleWork(self.scale.sizes, ITEMSIZE, UPDATES, passes, synced=1)], self.scale.sharding)
        return sent_bytes(of_parameters, self.gpus) / min(NVLINK, OF_MACHINE * NETWORK) + self.group_s

    @property
    def binding(self) -> str:
        if self.scale.held_bytes + self.activation_bytes > MEMORY:
            return "memory: it does not fit"
        if self.collectives_s < self.compute_s:
            return "arithmetic"
        return "NVLink" if self.group_s > self.collectives_s / 2 else "the network"


def long_table() -> Iterator[str]:
    heads = ("model", "tokens of a sample", "Ulysses", "held by each", "a micro-batch", "GPUs at work of 64", "of 1,024")
    yield f"| {' | '.join([*heads, 'moved within groups', 'passes', 'collectives within groups', 'all', 'what binds'])} |"
    yield f"|{'---|' * (len(heads) + 5)}"
    for model in LONG_MODELS:
        for tokens, size in itertools.product(LONG_TOKENS, (1, *groups_of(Shape.named(model)))):
            own = LongSamples(model, tokens, size)
            counts = [f"{count / 1e9:.0f} GB" for count in (own.scale.held_bytes, own.activation_bytes)]
            working = [f"{own.working_gpus(gpus):,}" for gpus in GPUS[1:]]
            moved, within = (f"{own.moved / 1e9:,.0f} GB", in_seconds(own.group_s)) if own.moved else ("none", "")
            times = [in_seconds(own.compute_s), within, in_seconds(own.collectives_s)]
            yield f"| {' | '.join([model, f'{tokens:,}', str(size), *counts, *working, moved, *times, own.binding])} |"


def in_seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds < 1 else f"{seconds:.1f} s"


def rows_table() -> Iterator[str]:
    """Yield the bytes of rows, each of which is computed by another worker than its holder: old and reference log-probs, PPO's values,
    updates."""
    yield "| GPUs | samples on each | GRPO | PPO | PPO, 8 adapters | PPO, 1 adapter |"
    yield f"|{'---|' * 6}"
    for gpus in GPUS:
        own = SAMPLES // gpus
        if gpus <= OF_MACHINE:
            yield f"| {gpus} | {own:,} | none | none | | |"
            continue
        trips = [Trip(PROMPT + RESPONSE, rank, (rank + 1) % gpus) for rank in range(gpus) for _ in range(own)]
        passes = [RowExchange(trips, returns=True)] * 2
        grpo = RowTraffic(gpus, [*passes, RowExchange(trips, fields=4)])
        ppo = RowTraffic(gpus, [*passes, passes[0], RowExchange(trips, fields=6), RowExchange(trips, fields=6)], WHITENING)
        moved = [predict([], UNSHARDED, each)["all-to-all"] for each in (grpo, ppo)]
        times = [f"{max(moved) / speed * 1e3:.1f} ms" for speed in (NETWORK, NETWORK / OF_MACHINE)]
        yield f"| {' | '.join([f'{gpus:,}', f'{own:,}', *(f'{count / 1e6:.1f} MB' for count in moved), *times])} |"


def main() -> None:
    for line in (*table(), "", *layouts_table(), "", *rollouts_table(), "", *long_table(), "", *rows_table()):
        print(line)


if __name__ == "__main__":
    main()
