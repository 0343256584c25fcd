"""The plan: every derived number of a run, worked out before its first step and printed once, in words.

Enters: the configuration and one record of facts about hardware, models and data. Leaves: a frozen `Plan`. Guaranteed: neither torch nor a
model is needed: what is not measured follows from the models' shapes (`plan_of`), and facts that a loaded model has measured take the place
of computed ones; a number that the user set is taken as it is or refused with the reason; `auto` becomes a number here and nowhere else;
the numbers that execution depends on (`budgets`) go into every checkpoint, so that a resumed run computes in the same shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from fulltilt import footprint
from fulltilt.footprint import HeadOptions, head_bytes
from fulltilt.parallel.cuts import (
    expert_counts,
    legal_expert_sizes,
    legal_sequence_sizes,
    legal_sizes,
    vocabulary_rows,
    whole_experts_in_rollouts,
)
from fulltilt.parallel.holdings import Holdings, bucket_bytes, held_bytes, loading_bytes, passing_bytes, rollout_bytes, twin_bytes
from fulltilt.parallel.layout import UNSHARDED, ParameterSize, Sharding, Sizes
from fulltilt.parallel.portions import Adapters, portion_sizes
from fulltilt.records import UpdateCosts, UserError
from fulltilt.schema import Config, shares_model, value_of
from fulltilt.shape import WHOLE_LAYERS, LayerDivision, Recompute, Shape
from fulltilt.words import either, in_bytes, many

# What `auto` means until it is measured: generous on a GPU, where small passes waste the chip; small on a CPU, where they cost nothing.
TOKEN_BUDGET = {"cuda": 16384, "cpu": 8192}
ENLARGED = 4  # times a token budget, at most, that `auto` gives a small model
# Parameters times tokens below which the host probably takes longer to launch a micro-batch's kernels than the device to run them: an H200
# took 0.13 s for 16384 tokens of 135 million parameters, 10% of what it computes in that time (docs/bench/gsm8k_tuning.json).
BUSY = 1 << 43
BUDGET_SHARE = 0.5  # share of the memory left on the device that an enlarged micro-batch may take
MOST_SEQS = {"cuda": 1024, "cpu": 256}
BATCHED_TOKENS = {"cuda": 16384, "cpu": 4096}
PASS_SHARE = 1 / 4  # the most that `auto` gives to a pass over prompts, as a share of the memory for it and the KV cache
LEAST_PASS = 2048  # tokens of a pass over prompts, below which `auto` does not go: shorter ones waste the chip
ONE_THREAD_PARAMETERS = 30_000_000  # a rule of thumb: below it one thread was faster where others ran beside it
KV_SHARE = {"cuda": 0.85, "cpu": 0.25}
KEPT_SHARE = {"cuda": 0.5, "cpu": 0.25}  # where the cache stays while the update runs beside it
RESERVE = 1 / 5  # share of the device that parameters, gradients and optimizer leave to activations and KV cache, or go to the host
SLACK = 1 / 16  # share of the device for the driver, workspaces, captured graphs, inputs and pieces of memory that fit nothing
STREAMED = 3 * (256 << 20)  # bytes of an optimizer on the host that are on the device: the slots of memory/offload.py
SAMPLE_BYTES = 1024  # the least host memory that a sample takes, whatever its length
BEYOND = "the group reaches over machines, because none within one suffices"
LONG_SAMPLE = 8192  # tokens: up to here `auto` lets no workers share a sample, as the guides have it
CACHED_SAMPLES = 16  # longest samples that a KV cache should hold; else `auto` divides a model for rollouts
HEADROOM = 0.15  # share of an update's memory that a micro-batch leaves free which takes more than was foreseen, or is larger than planned
AS_FORESEEN = 1.03  # times the bytes that were foreseen, up to which a measurement agrees with them
LEAST_BUDGET = 1024  # tokens, below which `auto` does not go
# Of the seconds that a micro-batch's tokens take the device, those that the host may take for its launches before `auto` gives it more: it
# launches ahead, and the device waits only where it falls behind.
WAITING = 3 / 4
ACTIVATION_MARGIN = 1.055  # times the bytes that layers keep by formula: the allocator rounds up, and gradients lie between the pieces


@dataclass(frozen=True)
class Budgets:
    """Numbers that execution depends on and results do not. A checkpoint keeps them."""

    threads: int  # that torch uses on the CPU
    kv_blocks: int
    max_seqs: int
    max_batched_tokens: int
    token_budget: int
    forward_token_budget: int
    ref_token_budget: int
    critic_token_budget: int
    critic_forward_token_budget: int
    reward_model_token_budget: int
    workers: int = 1  # that have the actor: for another number all these are planned again
    parts: int = 1  # among how many of them each layer is divided: the same holds
    rollout_parts: int = 1  # and each layer that an engine reads


@dataclass(frozen=True)
class RoleSettings:
    """How one role runs, every `auto` and every key taken over from `[train]` resolved. What a key does not touch stays at its default."""

    packing: bool = True
    sequence_parallel: int = 1  # workers that compute a micro-batch together
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_layers: int | None = None  # None: all, each by itself
    recompute_method: Literal["block", "uniform"] = "block"
    offload_activations: bool = False
    offload_params: bool = False
    offload_optimizer: bool = False
    offload_grads: bool = False
    fused_head: bool = True
    entropy_chunk: int | None = None  # None: by memory
    entropy_recompute: bool = True
    head_recompute: bool = True


@dataclass(frozen=True)
class RoleFacts:
    """A role's model, as far as its memory goes."""

    shape: Shape
    parameter_bytes: int
    trained: int = 0  # numbers that learn; 0: the role does not
    itemsize: int = 2  # bytes of a number that computes; below 4, masters are kept beside it
    fused: bool = False  # whether its layers run fused
    vocabulary_head: bool = True  # False: a critic or a reward model
    sizes: Sizes = ()  # what its parameters have, where the model is loaded
    division: LayerDivision = WHOLE_LAYERS  # how workers divide its layers; `shape` is that of whole ones
    adapters: Adapters | None = None  # that learn in place of its other parameters, where the model is not loaded

    @staticmethod
    def of_shape(shape: Shape, config: Config, device: str, *, learns: bool, role: str = "actor") -> RoleFacts:
        """The facts of a model that is not loaded."""
        scalar = role in ("critic", "reward_model")
        counts = shape.parameters_by_kind()
        count = sum(counts.values()) + (shape.width + 1 - counts["head"] if scalar else 0)
        itemsize = {"auto": 2 if device == "cuda" else 4, "bfloat16": 2, "float32": 4, "float64": 8}[config.model.dtype]
        lora, adapters, extra = config.lora, None, 0
        if adapted := learns and lora.rank and (role == "actor" or lora.critic):
            targets: Any = lora.targets if lora.targets == "all-linear" else tuple(lora.targets)
            adapters = Adapters(lora.rank, targets, tuple(lora.parameters))
            extra = shape.lora_parameters(lora.rank, lora.targets, lora.parameters)
        trained = (extra + (shape.width + 1 if scalar else 0) if adapted else count) if learns else 0
        wanted = config.train.fused_layers is True or (config.train.fused_layers == "auto" and device == "cuda")
        fused = wanted and config.train.compile is not True and shape.known_family().fused
        held = itemsize * (count + extra)
        return RoleFacts(shape, held, trained, itemsize, fused, vocabulary_head=not scalar, adapters=adapters)

    def part(self, parts: int, experts: int = 1, *, whole_experts: bool = False) -> RoleFacts:
        """The facts of a worker that has one of so many parts of every layer, or of the experts, of the model, which is not loaded.
        `whole_experts`: of every layer, but some of the experts whole. The worker is the first of its group, which holds most."""
        if experts > 1:
            return self.with_experts(experts)
        return self._divided(LayerDivision(parts, whole_experts=whole_experts)) if parts > 1 else self

    def with_experts(self, size: int) -> RoleFacts:
        """The facts of a worker that has one of `size` parts of the experts, of a model that is not loaded."""
        return self._divided(LayerDivision(experts=size)) if size > 1 and expert_counts(self.shape) else self

    def _divided(self, division: LayerDivision) -> RoleFacts:
        assert self.division == WHOLE_LAYERS, "a part is divided again"
        options: dict[str, Any] = {"adapters": self.adapters, "vocabulary_head": self.vocabulary_head}
        sizes, shape = portion_sizes(self.shape, division, self.itemsize, learns=self.trained > 0, **options), self.shape
        if self.vocabulary_head and division.members > 1:
            shape = replace(shape, vocabulary=min(shape.vocabulary, vocabulary_rows(shape.vocabulary, division.members)))
        of_part = {"parameter_bytes": sum(each.bytes for each in sizes), "trained": sum(each.count for each in sizes if each.learns)}
        return replace(self, shape=shape, division=division, sizes=sizes, **of_part)  # type: ignore[arg-type]

    def held(self, sharding: Sharding) -> Holdings:
        """What a worker holds of it in an update."""
        return held_bytes(self.known_sizes, sharding)

    @cached_property
    def known_sizes(self) -> Sizes:
        return self.sizes or tuple(self._evenly())

    def _evenly(self) -> Iterator[ParameterSize]:
        """Sizes for a model that is not loaded: layers of equal size, over which adapters are spread, and the embedding and the head."""
        count, layers = self.parameter_bytes // self.itemsize, len(self.shape.layers)
        tables = 1 if self.shape.tied or not self.vocabulary_head else 2
        outside = min(count, tables * self.shape.vocabulary * self.shape.width)
        each, rest = divmod(count - outside, layers)
        adapted = each if self.trained >= count else min(each, self.trained // layers)  # numbers of a layer that learn
        for layer, numbers in [(None, outside + rest), *((layer, each) for layer in range(layers))]:
            learned = adapted if layer is not None else min(numbers, self.trained - layers * adapted)
            for own, learns in ((learned, True), (numbers - learned, False)):
                if own:
                    yield ParameterSize((own,), self.itemsize, learns, layer)

    def kept_bytes(self, keys: Mapping[str, Any]) -> int:
        """Bytes that a token of a micro-batch holds until its backward pass; one of a member's own, where members divide layers."""
        kept = self.shape.kept_bytes(self.itemsize, fused=self.fused, recompute=recomputing(keys), division=self.division)
        return int(ACTIVATION_MARGIN * kept)

    def working_bytes(self, keys: Mapping[str, Any]) -> int:
        """Bytes that it holds beside them when the backward pass begins: a layer's gradients, about as large as what the layer keeps, and
        everything that is computed again of the last unit. After a last layer that kept everything, units need less than it gave back."""
        layers = self.shape.layers
        units = recomputing(keys).units(len(layers))
        again = max(map(len, units)) if units and units[-1].stop == len(layers) else 0
        of_layers = (self.shape.layer_bytes(layer, self.itemsize, fused=self.fused, division=self.division) for layer in set(layers))
        largest = max(of_layers, default=0)
        return int(ACTIVATION_MARGIN * largest * (1 + again))

    def update_bytes(self, tokens: int, keys: Mapping[str, Any], *, entropy_gradient: bool = False) -> int:
        """About the most bytes that a micro-batch takes of which a worker has `tokens` tokens. The head is done before the layers' backward
        pass begins; each member of a group has a part of the logits of all tokens."""
        of_head = self.head_bytes(tokens * self.division.members, keys, entropy_gradient)
        return tokens * self.kept_bytes(keys) + max(of_head, tokens * self.working_bytes(keys))

    def forward_bytes(self, tokens: int, keys: Mapping[str, Any]) -> int:
        """About the most bytes that a pass of `tokens` tokens without gradient takes: those of a layer, or of the head."""
        largest = max((self.shape.layer_bytes(layer, self.itemsize, fused=self.fused) for layer in set(self.shape.layers)), default=0)
        return max(int(ACTIVATION_MARGIN * largest * tokens), self.head_bytes(tokens, keys, entropy_gradient=False))

    def head_bytes(self, tokens: int, keys: Mapping[str, Any], entropy_gradient: bool) -> int:
        """Most bytes of the vocabulary head's temporaries, where all tokens are trained on."""
        if not self.vocabulary_head:
            return 0
        given = (keys.get("fused_head", True), keys.get("entropy_chunk"), keys.get("entropy_recompute", True))
        options = HeadOptions(*given, recompute=keys.get("head_recompute") is not False)
        entropy: footprint.Entropy = "gradient" if entropy_gradient else "value"
        return head_bytes(tokens, self.shape.vocabulary, self.shape.width, options, itemsize=self.itemsize, entropy=entropy).peak


@dataclass(frozen=True, order=True)
class RoleSizes:
    """Among how many workers the model of a role is divided."""

    tensor: int = 1  # each layer
    experts: int = 1  # with layers divided, too, it is 1 or the same number: members have some experts whole, or parts of all

    @property
    def apart(self) -> int:
        """Among how many workers experts are divided that send tokens to one another."""
        return self.experts if self.tensor == 1 else 1


def recomputing(keys: Mapping[str, Any]) -> Recompute:
    return Recompute(keys["recompute"], keys.get("recompute_layers"), keys.get("recompute_method", "block"))


@dataclass(frozen=True)
class Facts:
    """Everything that a plan is made from, beside the configuration. None: not measured, and computed from the actor's shape."""

    device: str  # "cuda" or "cpu"
    device_bytes: int  # memory of the device; 0 on a CPU
    host_bytes: int  # free memory of the host
    roles: Mapping[str, RoleFacts]  # the roles that have a model of their own: the actor and others, or one that has workers of its own
    longest: int  # tokens of the longest prompt (of the longest row, for SFT), over training and validation
    steps_per_epoch: int
    rollout: bool = True  # False: nothing is sampled
    cores: int = 1  # that torch would use if left alone
    threads_given: bool = False  # by OMP_NUM_THREADS
    processors: int = footprint.PROCESSORS  # multiprocessors of the device
    free_bytes: int | None = None  # on the device, with models and optimizers in place
    kv_bytes_per_token: int | None = None
    decode_bytes: int | None = None  # that decoding `most_seqs` samples at once takes beside the KV cache
    not_captured: str | None = None  # why no CUDA graph can hold the model, as far as is known
    layers: str = ""  # whether the roles' layers run fused, in words
    sharding: Sharding = UNSHARDED  # what workers share out, those with the same part of the models
    parts: int = 1  # among how many workers each layer is divided
    rollout_parts: int = 1  # the same, of the model that an engine reads
    copy_bytes: int = 0  # parameters of a model for the engine that is divided in another way than the actor
    within: int | None = None  # a number that sizes of groups divide that are on one machine; None: all workers are on one
    division: tuple[str, ...] = ()  # among how many workers `auto` has divided models, and why, in words
    divisions: Mapping[str, RoleSizes] = field(
        default_factory=dict
    )  # roles that are divided in another way than `parts` and `sharding` say

    def parts_of(self, role: str) -> int:
        """Among how many workers each layer of a role's model is divided."""
        return self.divisions[role].tensor if role in self.divisions else self.parts

    def sharding_of(self, role: str) -> Sharding:
        """What the workers with the same part of a role's model share out."""
        if role not in self.divisions:
            return self.sharding
        own = self.divisions[role]
        return self.sharding.among(self.sharding.workers * self.parts // own.tensor, own.apart)

    @property
    def samples_from_copy(self) -> bool:
        """Whether an engine reads a copy of the actor, which stays on the device."""
        return bool(self.copy_bytes) or self.sharding.parameters or self.sharding.experts > 1

    @property
    def engine_bytes(self) -> int:
        """Bytes that an engine's model takes beside the actor, and the buffer that its new values come through."""
        sharding, sizes = self.sharding, self.actor.known_sizes
        if not self.copy_bytes:
            return rollout_bytes(sizes, sharding)
        return self.copy_bytes + bucket_bytes(sizes, sharding, max(self.parts, sharding.experts))

    @property
    def actor(self) -> RoleFacts:
        return self.roles["actor"]

    @property
    def largest_work(self) -> RoleFacts:
        """The role that these workers spend most of their time with."""
        return self.roles["actor"] if "actor" in self.roles else next(iter(self.roles.values()))

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values that a worker has, which samples with `rollout_parts` others."""
        if self.kv_bytes_per_token is not None:
            return self.kv_bytes_per_token
        parts, itemsize = self.rollout_parts, self.actor.itemsize  # heads beyond their number are copies
        return sum(2 * max(1, layer.key_heads // parts) * layer.head_width * itemsize for layer in self.actor.shape.layers)


@dataclass(frozen=True)
class RolePlan:
    """How each role runs, with every `auto` decided."""

    settings: Mapping[str, RoleSettings]
    budgets: Mapping[str, int] = field(default_factory=dict)  # tokens that `auto` gives to micro-batches of roles that learn, on CUDA
    words: tuple[str, ...] = ()  # what differs from the defaults, and why
    reasons: Mapping[tuple[str, str], str] = field(default_factory=dict)  # why `auto` became what it did, by role and key


@dataclass(frozen=True)
class Plan:
    steps: int
    updates_per_step: int
    budgets: Budgets
    roles: Mapping[str, RoleSettings]
    words: tuple[str, ...]
    reasons: Mapping[tuple[str, str], str] = field(default_factory=dict)  # as those of `RolePlan`

    def beside(self, other: Plan) -> Plan:
        """The plan of a run in which other workers, with the other plan, have roles that these do not."""
        budgets = {name: getattr(other.budgets, name) for role in other.roles for name in OWN_BUDGETS[role]}
        together = replace(self, budgets=replace(self.budgets, **budgets), roles={**self.roles, **other.roles})
        return replace(together, words=(*self.words, *other.words), reasons={**self.reasons, **other.reasons})


def plan_of(
    model: Shape | Mapping[str, Any] | str | Path, config: Config, *, device: str, device_bytes: int, host_bytes: int, longest: int,
    roles: Collection[str] = ("actor",), steps_per_epoch: int = 1, **more: Any,
) -> Plan:  # fmt: skip
    """The plan of a run whose model is not loaded: a shape, the contents of a config.json, or a folder that has one. `roles`: those of the
    run that have a model of their own, all of this shape; `more`: other fields of `Facts`."""
    shape = model if isinstance(model, Shape) else Shape.from_config(model) if isinstance(model, Mapping) else Shape.read(model)
    found = {role: RoleFacts.of_shape(shape, config, device, learns=role in KEPT_AS, role=role) for role in roles}
    facts = Facts(device, device_bytes, host_bytes, found, longest, steps_per_epoch, **more)
    check_loading(facts)
    return make_plan(config, facts)


def make_plan(config: Config, facts: Facts, kept: Mapping[str, Any] | None = None, roles: RolePlan | None = None) -> Plan:
    """The plan of a run; `kept` are the budgets of the checkpoint it resumes from. `roles`: given where they run already."""
    algorithm = config.algorithm
    samples = algorithm.prompts_per_step * (algorithm.samples_per_prompt if facts.rollout else 1)
    if "actor" in facts.roles:
        check_context(config, facts.longest, facts.actor.shape.positions, rollout=facts.rollout)
    missing = why_decoding_has_no_graphs(config, facts)
    if facts.rollout and config.rollout.cuda_graphs is True and missing:
        reason = f"no graph can hold the model: {facts.not_captured}" if facts.not_captured else missing
        raise UserError(f"rollout.cuda_graphs: true, but {reason}. Remove the key: decoding then runs without graphs")
    check_samples(facts, samples)
    roles = roles or plan_roles(config, facts, kept)
    memory = rollout_memory(config, facts, roles, samples)
    check_decoding(config, facts, memory, samples)
    budgets = make_budgets(config, facts, roles, memory, samples)
    changed: list[str] = []
    if kept:
        budgets, changed = keep_budgets(config, facts, memory, budgets, kept)
    if facts.rollout:
        check_cache(config, facts, memory, budgets.kv_blocks)
    steps = count_steps(config, facts.steps_per_epoch)
    if "actor" not in facts.roles:
        own = {role: roles.settings[role] for role in facts.roles}
        words = tuple(words_of_own_workers(config, facts, roles, budgets))
        return Plan(steps, updates_per_step(config), budgets, own, words, roles.reasons)
    words = (*in_words(config, facts, roles, memory, budgets, steps, samples), *changed)
    return Plan(steps, updates_per_step(config), budgets, roles.settings, words, roles.reasons)


# ---- the KV cache and budgets ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RolloutMemory:
    """The device's memory in a rollout, in bytes."""

    free: int  # with models and optimizers in place
    decode: int  # that decoding takes beside the KV cache
    returning: int  # that comes back in other phases and is not counted as taken, where the cache stays


def rollout_memory(config: Config, facts: Facts, roles: RolePlan, samples: int) -> RolloutMemory:
    decode = facts.decode_bytes
    if decode is None:
        decode = decode_bytes(config, facts, most_seqs(config, facts.device, samples)) if facts.rollout else 0
    free = facts.free_bytes
    if free is None and facts.device == "cuda":
        free = int((1 - SLACK) * facts.device_bytes) - resident({role: vars(own) for role, own in roles.settings.items()}, facts, None)
    elif free is None:
        free = facts.host_bytes
    return RolloutMemory(max(0, free), decode, 0 if releases_memory(config) else returning(facts, roles.settings))


def decode_bytes(config: Config, facts: Facts, rows: int) -> int:
    """About the bytes that decoding `rows` samples at once takes beside the KV cache: logits, where each sample stands, and on CUDA the
    kernels' workspaces, a layer's temporaries, and what captured graphs keep."""
    actor, block = facts.actor, config.rollout.block_tokens
    shape, itemsize = actor.shape, actor.itemsize
    blocks = -(-(facts.longest + longest_response(config) + footprint.BURST) // block) + footprint.TABLE_STEP
    vocabulary = shape.vocabulary * facts.parts  # each member samples from all logits: its own part, those gathered, and these in order
    logits = vocabulary if facts.rollout_parts == 1 else 2 * vocabulary + vocabulary // facts.rollout_parts
    found = 4 * rows * (logits + blocks) + footprint.progress_bytes(rows)
    if facts.device != "cuda":
        return found
    sizes, first = footprint.sizes_up_to(rows), shape.layers[0]
    of_attention = 4 * max(
        footprint.workspace_numbers(size, layer.heads, layer.key_heads, layer.head_width, itemsize, blocks * block, facts.processors)
        for size in sizes
        for layer in set(shape.layers)
    )
    of_layer = 2 * rows * itemsize * (4 * shape.width + 3 * first.inner)  # twice, for pieces of a pool that do not fit the next size
    of_graphs = (
        0 if why_decoding_has_no_graphs(config, facts) else footprint.GRAPH_BYTES * 2 * len(sizes)
    )  # with top-k and top-p, and without
    of_trials = footprint.trial_bytes(shape.width, 2 * first.inner, itemsize) if itemsize == 2 and actor.fused else 0
    return found + of_attention + footprint.sampling_bytes(rows, vocabulary) + of_layer + of_graphs + of_trials


def keep_budgets(
    config: Config, facts: Facts, memory: RolloutMemory, planned: Budgets, kept: Mapping[str, Any]
) -> tuple[Budgets, list[str]]:
    """The budgets of the checkpoint, and in words what cannot be kept: a cache that was sized by `auto` when more was free on the device,
    because it was another device or more had been offloaded."""
    budgets = replace(planned, **kept)  # an older version's checkpoint may lack some
    if not facts.rollout:
        return budgets, []
    # Validation may ask for longer responses than before.
    budgets = replace(budgets, kv_blocks=max(budgets.kv_blocks, blocks_per_sample(config, facts)))
    given = {config.rollout.kv_bytes, config.rollout.memory_fraction} - {"auto"}
    cache = cache_bytes(config, facts, budgets.kv_blocks)
    if given or facts.device != "cuda" or cache + memory.decode + memory.returning <= memory.free:
        return budgets, []
    words = (
        f"the KV cache of {in_bytes(cache)} that the run began with does not fit into the {in_bytes(memory.free)} that are free now: "
        "a smaller one is taken, and samples may differ in their last bits from those of a run that was not interrupted"
    )
    passes = min(budgets.max_batched_tokens, planned.max_batched_tokens)  # the smaller cache was planned beside such ones
    return replace(budgets, kv_blocks=planned.kv_blocks, max_batched_tokens=passes), [words]


def count_steps(config: Config, steps_per_epoch: int) -> int:
    return config.run.steps or (config.run.epochs or 1) * steps_per_epoch


def updates_per_step(config: Config) -> int:
    """Optimizer steps made from one rollout."""
    return config.algorithm.minibatches_per_step * config.algorithm.epochs


def check_context(config: Config, longest_read: int, limit: int | None, *, rollout: bool, whose: str = "the model") -> None:
    """`longest_read`: tokens of the longest prompt, or of the longest row for SFT. `limit`: positions that the model, or another that reads
    whole samples, was made for."""
    response = longest_response(config) if rollout else 0
    longest = longest_read + response
    if limit is None or longest <= limit:
        return
    made_for = f"{whose} was made for {limit} positions"
    if not rollout:
        remedy = f"Set data.max_tokens = {limit} to leave such rows out, or shorten them"
        raise UserError(f"data.train: the longest row has {longest} tokens, {made_for}. {remedy}")
    key = "rollout.max_new_tokens" if response == config.rollout.max_new_tokens else "eval.max_new_tokens"
    ways = [f"lower {key} to at most {limit - longest_read}"] if limit > longest_read else []
    ways += [f"set data.max_prompt_tokens = {limit - response} to leave longer prompts out"] if limit > response else []
    remedy = ", or ".join(ways) or f"lower {key} below {limit} and leave long prompts out (data.max_prompt_tokens)"
    needs = f"the longest prompt ({longest_read} tokens) with a response of {response} needs {longest}"
    raise UserError(f"{key}: {needs}, {made_for}. {remedy[0].upper()}{remedy[1:]}")


def check_samples(facts: Facts, samples: int) -> None:
    if samples * SAMPLE_BYTES > facts.host_bytes:
        raise UserError(
            f"algorithm.samples_per_prompt: a step of {samples} samples takes {in_bytes(samples * SAMPLE_BYTES)} or more of the host's "
            f"memory, of which {in_bytes(facts.host_bytes)} are free. Lower it, or algorithm.prompts_per_step"
        )


def check_decoding(config: Config, facts: Facts, memory: RolloutMemory, samples: int) -> None:
    if facts.rollout and memory.decode > memory.free:
        rows = most_seqs(config, facts.device, samples)
        raise UserError(
            f"rollout.max_seqs: decoding {many(rows, 'sample')} at once takes {in_bytes(memory.decode)} beside the KV cache, and "
            f"{in_bytes(memory.free)} are free. Use less than {rows}"
        )


def check_cache(config: Config, facts: Facts, memory: RolloutMemory, blocks: int) -> None:
    """Refuse a KV cache whose size the user set and that does not fit. On a CPU decoding is not counted: what is free there is a guess, and
    a block takes memory only once it is written."""
    key = "kv_bytes" if config.rollout.kv_bytes != "auto" else "memory_fraction"
    given, cache = getattr(config.rollout, key), cache_bytes(config, facts, blocks)
    if given != "auto" and cache + (memory.decode if facts.device == "cuda" else 0) > memory.free:
        raise UserError(
            f"rollout.{key}: {given} makes a KV cache of {in_bytes(cache)}, and decoding needs {in_bytes(memory.decode)} beside it, but "
            f"{in_bytes(memory.free)} are free on this device. Lower it, or leave it out for auto"
        )


def cache_bytes(config: Config, facts: Facts, blocks: int) -> int:
    return blocks * config.rollout.block_tokens * facts.token_bytes


def unless_auto(given: int | str, planned: int) -> int:
    return planned if isinstance(given, str) else given


def longest_response(config: Config) -> int:
    return max(config.rollout.max_new_tokens, config.eval.max_new_tokens or 0)


def graphs_without_device(config: Config, device: str) -> Iterator[str]:
    if config.rollout.cuda_graphs is True and device != "cuda":
        yield (
            "rollout.cuda_graphs: true, but this run is on the CPU, and only a CUDA device has graphs. Remove the key (auto is on where "
            "there is one), or set run.device = cuda"
        )


def uses_graphs(config: Config, device: str, *, copied: bool = False) -> bool:
    """Whether decoding steps are captured, if a graph can hold the model. `copied`: whether the engine reads a copy of the actor, or
    nothing learns: then what it reads never leaves the device."""
    return device == "cuda" and config.rollout.cuda_graphs is not False and (copied or config.train.offload_params is not True)


def why_decoding_has_no_graphs(config: Config, facts: Facts) -> str | None:
    """Why no decoding step is captured, in words; None: they are."""
    if uses_graphs(config, facts.device, copied=facts.samples_from_copy or evaluates(facts)):
        return facts.not_captured
    if config.rollout.cuda_graphs is False:
        return "rollout.cuda_graphs is off"
    return "the run is on the CPU" if facts.device == "cpu" else "train.offload_params moves the weights that they would read"


def releases_memory(config: Config) -> bool:
    return config.rollout.release_memory is not False


def most_seqs(config: Config, device: str, samples: int) -> int:
    """Samples decoded at once."""
    return unless_auto(config.rollout.max_seqs, max(1, min(MOST_SEQS[device], samples)))


def make_budgets(config: Config, facts: Facts, roles: RolePlan, memory: RolloutMemory, samples: int) -> Budgets:
    token_budget, critic = (update_budget(config, facts.device, role, roles.budgets) for role in ("actor", "critic"))
    forward = unless_auto(config.actor.forward_token_budget, 2 * token_budget)
    # The models of other roles may be larger than the actor.
    of_others = unless_auto(config.actor.forward_token_budget, 2 * update_budget(config, facts.device, "actor", {}))
    max_seqs = most_seqs(config, facts.device, samples if facts.rollout else 0)
    batched = unless_auto(config.rollout.max_batched_tokens, pass_tokens(config, facts, memory, max_seqs))
    small = facts.device == "cpu" and facts.largest_work.parameter_bytes < ONE_THREAD_PARAMETERS * facts.largest_work.itemsize
    return Budgets(
        threads=unless_auto(config.run.threads, 1 if small and not facts.threads_given else facts.cores),
        kv_blocks=kv_blocks(config, facts, memory, max_seqs, batched) if facts.rollout else 0,
        max_seqs=max_seqs,
        max_batched_tokens=batched,
        token_budget=token_budget,
        forward_token_budget=forward,
        ref_token_budget=unless_auto(config.ref.forward_token_budget, of_others if config.ref.path else forward),
        critic_token_budget=critic,
        critic_forward_token_budget=unless_auto(config.critic.forward_token_budget, 2 * critic),
        reward_model_token_budget=unless_auto(config.reward_model.forward_token_budget, 2 * of_others),
        workers=facts.sharding.workers * facts.parts,
        parts=facts.parts,
        rollout_parts=facts.rollout_parts,
    )


def blocks_per_sample(config: Config, facts: Facts) -> int:
    """Blocks that the longest sample needs."""
    return -(-(facts.longest + longest_response(config)) // config.rollout.block_tokens)


def prefill_bytes(shape: Shape, tokens: float, itemsize: int, *, fused: bool, parts: int = 1) -> int:
    """About the bytes that an engine's pass over so many tokens of prompts takes: those of the layer that keeps most. `parts`: among how
    many workers it is divided."""
    return int(tokens * max(shape.layer_bytes(layer, itemsize, fused=fused) for layer in set(shape.layers)) / parts)


def pass_bytes(facts: Facts, tokens: float) -> int:
    """The same for the actor. 0 on a CPU, where memory is taken as it is needed."""
    if facts.device != "cuda":
        return 0
    actor = facts.actor
    return prefill_bytes(actor.shape, tokens, actor.itemsize, fused=actor.fused, parts=facts.rollout_parts)


def most_in_a_pass(config: Config, facts: Facts) -> float:
    """The most tokens that an engine's passes over prompts can have: those of all prompts that it gets in a step. How many it gets in a
    validation is not known here."""
    if config.data.val is not None:
        return math.inf
    replicas = max(1, facts.sharding.workers * facts.parts // facts.rollout_parts)
    prompts = config.algorithm.prompts_per_round or config.algorithm.prompts_per_step
    return -(-prompts // replicas) * facts.longest


def pass_tokens(config: Config, facts: Facts, memory: RolloutMemory, max_seqs: int) -> int:
    """Tokens of a pass over prompts where the user gave no number: fewer where the KV cache would have to be small for them."""
    rollout, tokens = config.rollout, max(BATCHED_TOKENS[facts.device], max_seqs)
    if not facts.rollout or facts.device != "cuda":
        return tokens
    room = memory.free - memory.decode - memory.returning
    left = PASS_SHARE * room
    if rollout.kv_bytes != "auto":
        left = room - rollout.kv_bytes
    elif rollout.memory_fraction != "auto":
        left = room - rollout.memory_fraction * memory.free
    while tokens // 2 >= max(LEAST_PASS, max_seqs) and pass_bytes(facts, tokens) > left:
        tokens //= 2
    return tokens


def kv_blocks(config: Config, facts: Facts, memory: RolloutMemory, max_seqs: int, batched: int) -> int:
    """`batched`: tokens of a pass over prompts, which needs memory beside the cache."""
    rollout = config.rollout
    block_bytes = facts.token_bytes * rollout.block_tokens
    per_sample = blocks_per_sample(config, facts)
    if rollout.kv_bytes != "auto":
        available, source = rollout.kv_bytes, f"rollout.kv_bytes = {rollout.kv_bytes}"
    elif rollout.memory_fraction != "auto":
        available = int(rollout.memory_fraction * memory.free)
        source = f"rollout.memory_fraction = {rollout.memory_fraction} of {in_bytes(memory.free)} free"
    else:
        share = (KV_SHARE if releases_memory(config) else KEPT_SHARE)[facts.device]
        # One block more than a sample needs: newcomers wait until those that run have a block each to grow by.
        most = (per_sample + 1) * max_seqs * block_bytes
        room = max(0, memory.free - memory.decode - memory.returning)
        prefill = pass_bytes(facts, min(batched, most_in_a_pass(config, facts)))
        available = max(0, min(most, int(share * room), room - prefill))
        of_prefill = f" and {in_bytes(prefill)} for a pass over prompts" if prefill else ""
        source = f"the {in_bytes(memory.free)} free on this device, {in_bytes(memory.decode)} of them for decoding{of_prefill},"
    blocks = available // block_bytes
    if blocks < per_sample:
        raise UserError(
            f"the KV cache: {source} gives {blocks} blocks of {rollout.block_tokens} tokens ({in_bytes(block_bytes)} each), one sample "
            f"may need {per_sample} (longest prompt plus rollout.max_new_tokens). Give it {in_bytes(per_sample * block_bytes)} or more, or "
            f"lower rollout.{'block_tokens' if per_sample == 1 else 'max_new_tokens'}"
            + ("" if rollout.max_batched_tokens == "auto" else ", or rollout.max_batched_tokens")
        )
    return blocks


# ---- how roles run ---------------------------------------------------------------------------------------------------------------------

# The keys of each role. A role's own section comes before [train], where it has the key and a value for it.
OF_SCORING = ("packing", "offload_params", "sequence_parallel")
OF_LEARNING = (
    *OF_SCORING, "recompute", "recompute_layers", "recompute_method", "offload_activations", "offload_optimizer", "offload_grads",
)  # fmt: skip
ROLE_KEYS = {
    "actor": (*OF_LEARNING, "fused_head", "entropy_chunk", "entropy_recompute", "head_recompute"),
    "critic": OF_LEARNING,
    "ref": (*OF_SCORING, "fused_head", "entropy_chunk"),
    "reward_model": OF_SCORING,
}
OWN_BUDGETS = {  # the budgets of roles that may have workers of their own
    "critic": ("critic_token_budget", "critic_forward_token_budget"),
    "ref": ("ref_token_budget",),
    "reward_model": ("reward_model_token_budget",),
}
KEPT_AS = {"actor": "token_budget", "critic": "critic_token_budget"}  # roles that learn, and their budgets' names in a checkpoint
OFFLOADS = ("offload_activations", "offload_params", "offload_optimizer", "offload_grads")


@dataclass(frozen=True)
class Decisions:
    """The keys of each role, `auto` where nothing has been decided yet, and why `auto` became what it did."""

    keys: Mapping[str, Mapping[str, Any]]
    reasons: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def decide(self, role: str, key: str, value: Any, why: str | None = None) -> Decisions:
        """The decisions with that value, if the key was left to `auto`."""
        if self.keys[role].get(key) != "auto":
            return self
        decided = self.replace(role, key, value)
        return decided if why is None else replace(decided, reasons={**self.reasons, (role, key): why})

    def replace(self, role: str, key: str, value: Any) -> Decisions:
        """The decisions with that value in place of any other."""
        return replace(self, keys={**self.keys, role: {**self.keys[role], key: value}})

    def sequence(self, role: str) -> int:
        given = self.keys[role]["sequence_parallel"]
        return 1 if given == "auto" else int(given)

    def settings(self) -> dict[str, RoleSettings]:
        """Every `auto` that nothing has decided otherwise is off, but for what saves memory at the cost of time alone."""
        off: dict[str, Any] = {"recompute": "none", "head_recompute": True, "sequence_parallel": 1}
        return {
            role: RoleSettings(**{key: off.get(key, False) if value == "auto" else value for key, value in keys.items()})
            for role, keys in self.keys.items()
        }


def plan_roles(config: Config, facts: Facts, kept: Mapping[str, Any] | None = None) -> RolePlan:
    """The settings of every role. What `auto` becomes depends on all memory that the device has and not on what happens to be free there,
    so that a resumed run decides alike; `kept`: its budgets, which the rest must fit."""
    made = given_decisions(config, facts)
    check_layers(facts, made)
    trained = [role for role, model in facts.roles.items() if model.trained]
    budgets: dict[str, int] = {}
    on_cuda = facts.device == "cuda"  # on a CPU there is no second memory, and time is shorter than memory
    if on_cuda:
        made = decide_offloads(config, made, facts)
        of_kept = {role: kept[key] for role, key in KEPT_AS.items() if kept and key in kept}
        by_auto = config.actor.token_budget == "auto"
        budgets = {role: of_kept.get(role) or decide_budget(config, made, facts, role) for role in trained if by_auto}
    made = decide_sequence(config, made, facts, budgets)
    if on_cuda:
        for role in trained:
            made = decide_activations(config, made, facts, role, budgets)
        check_host(config, facts, made, budgets)
    settings = made.settings()
    words = (role_in_words(role, settings[role], made.reasons) for role in facts.roles)
    return RolePlan(settings, budgets, tuple(text for text in words if text), made.reasons)


def given_decisions(config: Config, facts: Facts) -> Decisions:
    """What the user has decided. By `auto` parameters never leave the device where no other role works."""
    made = Decisions({role: given_settings(config, role) for role in {**facts.roles, "ref": None, "actor": None}})
    for role in facts.roles if len(facts.roles) == 1 else ():
        made = made.decide(role, "offload_params", False)
    return made


def decide_sequence(config: Config, made: Decisions, facts: Facts, budgets: Mapping[str, int]) -> Decisions:
    """How many workers compute a micro-batch together. `auto`: as few as a long sample needs."""
    models = dict(facts.roles)
    if "actor" in models and shares_model(config):
        models.setdefault("ref", facts.actor)
    for role, model in models.items():
        workers, parts = facts.sharding_of(role).workers, facts.parts_of(role)
        legal = legal_sequence_sizes(model.shape, workers, parts)
        given = made.keys[role]["sequence_parallel"]
        if given != "auto" and given not in legal and evaluates(facts):  # perhaps on other workers than the run that learned
            made = made.replace(role, "sequence_parallel", max(size for size in legal if size < given))
        elif wrong := wrong_sequence_size(config, role, model.shape, workers, parts):
            raise UserError(wrong)
        if facts.device == "cuda" and longest_row(config, facts) > LONG_SAMPLE and len(legal) > 1:
            near = on_one_machine(legal, facts.within, parts)
            size, why = max(sizes_of_long_samples(config, made, facts, role, legal, near, budgets), default=(1, ""))
            made = made.decide(role, "sequence_parallel", size, why if size in near else f"{why}; {BEYOND}")
    return made


def on_one_machine(sizes: Sequence[int], within: int | None, parts: int = 1) -> list[int]:
    """The sizes with which groups stay within a machine, where `parts` workers have the parts of each member's layers; all sizes, where
    these alone do not. `within`: a number that sizes of groups divide that are on one machine; None: any."""
    return [size for size in sizes if within is None or within % (parts * size) == 0] or list(sizes)


def sizes_of_long_samples(
    config: Config, made: Decisions, facts: Facts, role: str, legal: Sequence[int], near: Sequence[int], budgets: Mapping[str, int]
) -> Iterator[tuple[int, str]]:
    """How many workers the longest samples need, and why: where one does not fit into what a token budget allows, or a worker's memory, and
    where there are fewer samples than workers. `near`: the sizes whose groups are on one machine; only samples that fit with none of them
    take a larger one."""
    longest, workers = longest_row(config, facts), facts.sharding_of(role).workers
    told = f"the longest sample may have {longest} tokens"

    def least(fits: Callable[[int], bool]) -> int:
        return next((size for size in (*near, *legal) if fits(-(-longest // size))), legal[-1])

    most = update_budget(config, facts.device, role, budgets)
    by_hand = config.critic.token_budget if role == "critic" and config.critic.token_budget != "auto" else config.actor.token_budget
    if by_hand != "auto" and longest > most:
        yield least(lambda tokens: tokens <= most), f"{told}, and a worker gets {most}"
    left, model = left_for_update(config, made, facts, role if role in facts.roles else "actor"), facts.roles.get(role, facts.largest_work)
    if (needed := long_sample_bytes(config, made, model, role, longest)) > left:
        fitting = least(lambda tokens: long_sample_bytes(config, made, model, role, tokens) <= left)
        yield fitting, f"{told}, which would take {in_bytes(needed)}, and {in_bytes(max(0, left))} are left"
    algorithm = config.algorithm
    samples = algorithm.prompts_per_step * (algorithm.samples_per_prompt if facts.rollout else 1)
    samples = -(-samples // algorithm.minibatches_per_step) if role in KEPT_AS else samples
    if samples < workers:
        size = next((size for size in near if workers // size <= samples), near[-1])
        yield size, f"{told}, and {many(samples, 'sample')} are computed at a time on {workers} workers"


def long_sample_bytes(config: Config, made: Decisions, model: RoleFacts, role: str, tokens: int) -> int:
    """About the bytes that so many tokens of a sample take at least: with all recompute that `auto` may choose, and nothing on the host but
    what the user sends there."""
    keys = made.keys[role]
    if not model.trained or role not in KEPT_AS:
        return model.forward_bytes(tokens, keys)
    at, tokens = {**keys, "recompute": "full" if keys["recompute"] == "auto" else keys["recompute"]}, -(-tokens // model.division.members)
    away = tokens * model.kept_bytes(at) if keys["offload_activations"] is True else 0
    return model.update_bytes(tokens, at, entropy_gradient=bool(config.algorithm.entropy_coef)) - away


def wrong_sequence_size(config: Config, role: str, shape: Shape, workers: int, parts: int) -> str | None:
    """What is wrong with the number of workers that are to share a role's micro-batches. `workers`: those that have the role, and the same
    part of its model; `parts`: among how many each layer is divided."""
    legal, size = legal_sequence_sizes(shape, workers, parts), given_settings(config, role)["sequence_parallel"]
    if size == "auto" or size in legal:
        return None
    must = f"the number must divide the {workers} that have this role, and fit the model's attention heads"
    if workers == 1:
        must = "only one has this role"
    sizes = either([str(each) for each in legal])
    remedy = f"Use {sizes}" if len(legal) > 1 else "Remove the key"
    key = size_key(config, role, "sequence_parallel")
    inherits = role != "actor" and not key.startswith(role)
    of_role, remedy = (f" of the {role}", f"Set {role}.sequence_parallel = {sizes}") if inherits else ("", remedy)
    return f"{key}: {size} workers cannot share micro-batches{of_role}: {must}. {remedy}"


def longest_row(config: Config, facts: Facts) -> int:
    """Tokens of the longest sample that there may be."""
    return facts.longest + (longest_response(config) if facts.rollout else 0)


def given_settings(config: Config, role: str) -> dict[str, Any]:
    """The values that the user gave to the keys of a role, `auto` included."""
    found: dict[str, Any] = {}
    for key in ROLE_KEYS[role]:
        own = getattr(getattr(config, role), key, None)
        found[key] = getattr(config.train, key) if own is None else own
        if key in ("recompute_layers", "entropy_chunk") and found[key] == "auto":
            found[key] = None
    if found.get("recompute") == "auto":  # the number of layers belongs to a recompute that is named, perhaps of another role
        found |= {"recompute_layers": None, "recompute_method": "block"}
    return found


def resident(keys: Mapping[str, Mapping[str, Any]], facts: Facts, updated: str | None) -> int:
    """Bytes of parameters, gradients and optimizers on the device while a role is updated; None: in a rollout."""
    return sum(role_resident(keys, facts, role, updated) for role in facts.roles)


def role_resident(keys: Mapping[str, Mapping[str, Any]], facts: Facts, role: str, updated: str | None) -> int:
    model, away = facts.roles[role], {key for key in OFFLOADS if keys[role].get(key) is True}
    sharding = facts.sharding_of(role)
    held, shared = model.held(sharding), sharding.parameters
    # In a rollout an engine that reads a copy of the actor needs nothing else.
    at_work = updated or ("" if facts.samples_from_copy else "actor")
    parameters = held.parameters if role == at_work or "offload_params" not in away else 0
    gradients = held.gradients if role == updated or not ("offload_grads" in away or shared) else 0  # those of shards come with a pass
    optimizer = min(STREAMED, held.optimizer) if "offload_optimizer" in away else held.optimizer
    gathered = passing_bytes(model.known_sizes, sharding, model.itemsize) if role == updated else 0
    twin = facts.engine_bytes if facts.rollout and role == "actor" else 0
    return parameters + gradients + optimizer + gathered + twin


def returning(facts: Facts, settings: Mapping[str, RoleSettings]) -> int:
    """The most bytes that a role brings to the device when its phase comes: parameters that were away, gradients that were not there."""
    if facts.device != "cuda" or not any(model.trained for model in facts.roles.values()):
        return 0
    keys = {role: vars(settings[role]) for role in facts.roles}
    return max(role_resident(keys, facts, role, role) - role_resident(keys, facts, role, None) for role in facts.roles)


def why_crowded(config: Config, made: Decisions, facts: Facts) -> str | None:
    """Why something has to leave the device, in words: an update does not fit, or a rollout with a KV cache whose size the user set."""
    what, needed = "parameters, gradients and optimizer", most_resident(made, facts)
    if needed > (1 - RESERVE) * facts.device_bytes:
        return f"{what} would take {in_bytes(needed)} of the device's {in_bytes(facts.device_bytes)}"
    if not facts.rollout or "actor" not in facts.roles or config.rollout.kv_bytes == "auto":
        return None
    needed, what = useful_rollout(config, made, facts)
    if needed <= (1 - SLACK) * facts.device_bytes:
        return None
    return f"{what} would take {in_bytes(needed)} of the device's {in_bytes(facts.device_bytes)}"


def most_resident(made: Decisions, facts: Facts) -> int:
    """The most bytes of parameters, gradients and optimizers on the device in any update; where no role learns, of parameters."""
    trained: list[str | None] = [role for role, model in facts.roles.items() if model.trained]
    return max(resident(made.keys, facts, role) for role in trained or [None])


def decide_offloads(config: Config, made: Decisions, facts: Facts) -> Decisions:
    """Optimizer states leave first: they are needed for the shortest time, and are the most. Then the parameters of roles that wait, but
    never the actor's: CUDA graphs would have to go for it."""
    why = why_crowded(config, made, facts)
    for role, model in facts.roles.items():
        if model.trained and why:
            made = made.decide(role, "offload_optimizer", True, why)
        if made.keys[role].get("offload_optimizer") is True:
            made = made.decide(role, "offload_grads", True, "with the optimizer")
    for role in ("reward_model", "ref", "critic"):
        if role in facts.roles and len(facts.roles) > 1 and (why := why_crowded(config, made, facts)):
            made = made.decide(role, "offload_params", True, why)
    return made.decide("actor", "offload_params", False)


def loading_order(facts: Facts) -> dict[str, int]:
    """About the bytes on the device while each role is loaded, in the order in which roles are loaded: where parameters are shared out,
    first the roles that take most in addition to what stays of them."""
    found, before = dict[str, int](), 0
    taken = {role: loading_of(facts, role) for role in facts.roles}
    for role in sorted(taken, key=lambda role: taken[role][1] - taken[role][0]):
        most, staying = taken[role]
        found[role] = before + most
        before += staying
    return found


def loading_of(facts: Facts, role: str) -> tuple[int, int]:
    """About the most bytes that loading a role takes, and the bytes that stay. A worker reads only its part of a model, unless it needs the
    whole anyway, as an engine does that samples alone."""
    model, sampled = facts.roles[role], role == "actor" and facts.rollout
    copied = facts.copy_bytes if sampled else 0
    sharding = facts.sharding_of(role)
    if not sharding.parameters:
        return (model.parameter_bytes + copied,) * 2
    stays = sampled and not copied
    cut_from_whole = sampled and facts.rollout_parts == 1  # the whole is the engine's, and a part of it is there until it is shared out
    most = loading_bytes(model.known_sizes, sharding, model.itemsize, fused=model.fused, stays=stays or cut_from_whole)
    twin = twin_bytes(model.known_sizes, sharding) if stays else copied
    return most + copied, model.held(sharding).parameters + twin


def most_while_loading(facts: Facts) -> tuple[str, int]:
    """The role at whose loading the device has to hold most, and the bytes."""
    return max(loading_order(facts).items(), key=lambda item: item[1])


def check_loading(facts: Facts) -> None:
    """Refuse roles of several workers that do not fit on a device while they are loaded."""
    if facts.device != "cuda" or facts.sharding.workers * facts.parts == 1 or not facts.roles:
        return
    role, most = most_while_loading(facts)
    if most <= facts.device_bytes:
        return
    order = list(loading_order(facts))
    before = order[: order.index(role)]
    ways = ["a smaller model"]
    if facts.sharding.workers > 1 and not facts.sharding.parameters:
        ways.append('train.shard = "full" (each worker then loads its rows alone)')
    if role == "actor" and facts.rollout and facts.rollout_parts == 1 and (facts.sharding.parameters or facts.copy_bytes):
        ways.append("rollout.tensor_parallel (an engine that samples alone has the whole actor)")
    plain = {name: replace(model, fused=False) for name, model in facts.roles.items()}
    if most_while_loading(replace(facts, roles=plain))[1] <= facts.device_bytes:
        ways.append("train.fused_layers = false (no layers are compared then)")
    if before:
        ways.append(f"workers of its own for {either([other for other in order if other != 'actor'])} (cluster.roles)")
    divided = facts.parts > 1 and not facts.sharding.parameters
    how = f"train.tensor_parallel: with layers in {facts.parts} parts" if divided else f'train.shard: with "{facts.sharding.shard}"'
    rest = f", beside what is there of {' and '.join(before)}" if before else ""
    raise UserError(
        f"{how}, loading the {role} would take {in_bytes(most)} of each device's {in_bytes(facts.device_bytes)}: "
        f"{in_bytes(loading_of(facts, role)[0])} for its part of the {role}, and for verifying it{rest}. Use {either(ways)}"
    )


def choose_sharding(config: Config, facts: Facts, beside: int, *, only: str | None = None) -> Sharding:
    """What the workers of a run share out. `auto`: the optimizer where it fits, else parameters too, within the `beside` workers of a
    machine or among all; first without anything on the host, then with what `auto` may offload. `only`: why it must be the optimizer."""
    train, workers, experts = config.train, facts.sharding.workers, facts.sharding.experts
    possible = [Sharding("optimizer", workers, workers)]
    by_machines = train.shard == "auto" and experts == 1 and 1 < beside < workers and workers % beside == 0
    if train.shard == "hybrid" or by_machines:
        possible.append(Sharding("hybrid", workers, train.shard_size or beside, train.reshard_after_forward))
    possible.append(Sharding("full", workers, workers, train.reshard_after_forward))
    possible = [replace(each, experts=experts) for each in possible]
    if train.shard != "auto" and workers > 1:
        return next(each for each in possible if each.shard == train.shard)
    if workers == 1 or facts.device != "cuda" or only:
        return replace(possible[0], why=only or "")
    places = [(each, given_decisions(config, each)) for each in (replace(facts, sharding=sharding) for sharding in possible)]
    offloading = [(each, decide_offloads(config, made, each)) for each, made in places]
    can_load = [most_while_loading(each)[1] <= (1 - SLACK) * facts.device_bytes for each, _ in places]
    fitting = [
        each.sharding for made_ways in (places, offloading)
        for (each, made), loads in zip(made_ways, can_load, strict=True) if loads and not why_crowded(config, made, each)
    ]  # fmt: skip
    needs = [(most_while_loading(each)[1], most_resident(made, each)) for each, made in offloading]
    least = min(range(len(needs)), key=lambda place: (max(needs[place]), needs[place][1]))
    chosen = fitting[0] if fitting else possible[least]
    of_whole, made = places[0]
    otherwise = "" if chosen is possible[0] else ' with "optimizer"'
    what, needed = "parameters, gradients and optimizer", most_resident(made, of_whole)
    if otherwise and not can_load[0] and needed <= (loaded := most_while_loading(of_whole)[1]):
        what, needed = "all roles as they are loaded", loaded
    return replace(chosen, why=f"{what} would take {in_bytes(needed)} of each device's {in_bytes(facts.device_bytes)}{otherwise}")


# Keys that do not go with parameters that are shared out, and with models that are divided.
UNSHARED = {
    "train.compile": "compiled layers have not been tried with it",
    "train.offload_grads": "gradients of shards exist only from a pass to the optimizer step, so there are none to free between updates",
}
UNDIVIDED = {"train.compile": "compiled layers have not been tried with layers or experts that workers divide"}


def unshared(config: Config) -> dict[str, str]:
    """The keys that do not go with parameters that are shared out, and why."""
    found, together = {key: why for key, why in UNSHARED.items() if value_of(config, key) is True}, config.train.recompute_layers
    if config.train.recompute_method == "uniform" and together not in ("auto", 1):
        found["train.recompute_method"] = f"{together} layers would be recomputed together, and one at a time has whole parameters"
    return found


def why_unshared(config: Config) -> str | None:
    """Why `auto` shares out no parameters; None: it may."""
    return next((f"{key} is set" for key in unshared(config)), None)


def why_undivided(config: Config, *, sampled: bool) -> str | None:
    """Why `auto` divides no model; None: it may."""
    if sampled and config.rollout.engine != "native":
        return f'rollout.engine = "{config.rollout.engine}" samples from a whole model'
    return next((f"{key} is set" for key in UNDIVIDED if value_of(config, key) is True), None)


# ---- among how many workers models are divided -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Division:
    """Among how many workers models are divided. Example: Division(tensor=2, rollout=2)"""

    tensor: int = 1  # each layer
    experts: int = 1
    rollout: int = 1  # each layer that an engine reads
    words: tuple[str, ...] = field(default=(), compare=False)  # what `auto` has become, and why

    def of(self, config: Config, role: str) -> RoleSizes:
        """The sizes of a role. With one size of its own, the other is 1 unless the role has that, too."""
        tensor, experts = own_sizes(config, role)
        return RoleSizes(self.tensor, self.experts) if tensor is experts is None else RoleSizes(tensor or 1, experts or 1)


@dataclass(frozen=True)
class Fit:
    """Whether a run fits on devices when its models are divided in some way."""

    needed: int  # the most bytes on a device, with everything on the host that `auto` may send there
    sharding: Sharding
    why_not: str | None  # None: it fits


def choose_division(
    config: Config, facts: Facts, *, within: int, beside: int = 1, only: str | None = None, unshared: str | None = None
) -> Division:
    """What `auto` means for the sizes of tensor and expert parallelism: the first of `ways_to_divide` with which the run fits; if there is
    none, the one that takes least memory. `facts`: of whole models. `within`: a number that sizes must divide so that groups of neighbours
    are on one machine. `beside`: the workers of a machine, for `choose_sharding`. `only`: why `auto` divides nothing. `unshared`: why
    parameters cannot be shared out."""
    ways = list(ways_to_divide(config, facts, within))
    usual, _ = ways[0]
    autos = [key for key, value in sizes_given(config).items() if value == "auto"]
    own = bool(facts.roles) and not followers(config, facts)
    if facts.device != "cuda" or facts.sharding.workers == 1 or not autos or own:
        return usual
    if only or len({way for way, _ in ways}) == 1:
        return replace(usual, words=tuple(division_in_words(config, facts, usual, autos, {}, only or "no other size is legal")))
    tried = dict[Division, Fit]()
    for way, shares in ways:
        fit = tried[way] = tried.get(way) or how_it_fits(config, facts, way, beside, unshared)
        if fit.why_not is None and not (shares and fit.sharding.parameters):
            return replace(way, words=tuple(division_in_words(config, facts, way, autos, tried, within=within)))
    least = min(tried, key=lambda way: tried[way].needed)
    none = f"nothing fits, and this takes least: {tried[least].why_not}"
    return replace(least, words=tuple(division_in_words(config, facts, least, autos, tried, none, within=within)))


def own_sizes(config: Config, role: str) -> tuple[int | None, int | None]:
    """What a role's own section says of tensor and expert parallelism; None: the role follows [train]."""
    section = getattr(config, role)
    return getattr(section, "tensor_parallel", None), getattr(section, "expert_parallel", None)


def size_key(config: Config, role: str, name: str) -> str:
    """The key that a role's size comes from."""
    own = getattr(getattr(config, role), name, None) is not None
    return f"{role}.{name}" if own else f"train.{name}"


def followers(config: Config, facts: Facts) -> dict[str, RoleFacts]:
    """The roles that are divided as [train] says. One with a size of its own, of layers or of experts, is not (`Division.of`)."""
    return {role: model for role, model in facts.roles.items() if own_sizes(config, role) == (None, None)}


def sizes_given(config: Config) -> dict[str, int | str]:
    return {
        "train.tensor_parallel": config.train.tensor_parallel,
        "train.expert_parallel": config.train.expert_parallel,
        "rollout.tensor_parallel": config.rollout.tensor_parallel,
    }


def ways_to_divide(config: Config, facts: Facts, within: int) -> Iterator[tuple[Division, bool]]:
    """All legal divisions, the preferred ones first: nothing is divided, experts are, layers are; each with the smallest rollout groups
    first, because data parallelism beats tensor parallelism there, but before them with an engine that reads the parameters that learn.
    With each, whether it is meant only if the engine does so, without a copy."""
    rollout = config.rollout.tensor_parallel
    for of_layers, of_experts in dict.fromkeys(pairs_of_sizes(config, facts, within)):
        usual = unless_auto(rollout, of_layers) if facts.rollout else of_layers
        samplers, together = [usual], config.rollout.expert_parallel
        if rollout == "auto" and facts.rollout and "actor" in facts.roles:
            samplers = legal_sizes(facts.actor.shape, within) if together == "auto" or together == 1 else [together]
            usual = usual if usual in samplers else samplers[0]
        if evaluates(facts) and facts.rollout:  # one model, which the engine reads
            yield from ((Division(size, 1, size), False) for size in dict.fromkeys([usual, *samplers]))
            return
        if (of_experts == 1 or of_layers > 1) and usual == of_layers:
            yield Division(of_layers, of_experts, usual), facts.rollout and of_layers > 1 and len(samplers) > 1
        yield from ((Division(of_layers, of_experts, size), False) for size in samplers)


def pairs_of_sizes(config: Config, facts: Facts, within: int) -> Iterator[tuple[int, int]]:
    """Among how many workers layers and experts may be divided, the preferred pairs first: last those whose groups reach over machines.
    Members that divide layers have some of the experts whole where the number of experts allows it, as in rollouts, because products of
    parts are narrow; else a part of each."""
    tensor, experts = config.train.tensor_parallel, config.train.expert_parallel
    yield unless_auto(tensor, 1), unless_auto(experts, 1)
    found = list[tuple[int, int]]()
    if experts == "auto" and unless_auto(tensor, 1) == 1:
        found += [(1, size) for size in expert_sizes(config, facts)]
    if tensor == "auto":
        whole, parts = (tensor_sizes(config, facts, within, whole_experts=each) for each in (True, False))
        for size in sorted({*whole, *parts}):
            found += [(size, size)] * (size in whole and experts in ("auto", size))
            found += [(size, 1)] * (size in parts and experts in ("auto", 1))
    yield from sorted(found, key=lambda pair: reaches_beyond(config, facts, pair, within))


def reaches_beyond(config: Config, facts: Facts, pair: tuple[int, int], within: int) -> bool:
    """Whether groups that `auto` would make so reach over machines: of workers that divide layers or experts, or, where sizes of [train]
    or of roles say how many share micro-batches, of these with all parts of the layers."""
    tensor, experts = pair
    given = {given_settings(config, role)["sequence_parallel"] for role in followers(config, facts)} - {"auto"}
    groups = [experts, *(tensor * size for size in given if within % size == 0)]  # others reach over machines anyway
    return any(within % size for size in groups)


def evaluates(facts: Facts) -> bool:
    """Whether nothing learns from the actor, as far as its model is known."""
    return "actor" in facts.roles and not facts.actor.trained


def tensor_sizes(config: Config, facts: Facts, within: int, *, whole_experts: bool = False) -> list[int]:
    """Sizes that the layers of all roles without sizes of their own may be divided into, and that leave as many workers with the same part
    as other keys need. `whole_experts`: sizes with which each member has some experts whole, where the actor has experts and rollouts
    may have them so, too."""
    workers, shard, roles = facts.sharding.workers, config.train.shard, followers(config, facts)
    group = {"full": 2, "hybrid": config.train.shard_size or 2}.get(shard, 1)

    def legal(size: int) -> bool:
        rest = workers // size
        alike = [wrong_sequence_size(config, role, model.shape, rest, size) for role, model in roles.items()]
        return rest >= group and (shard != "hybrid" or rest % group == 0) and not any(alike)

    with_experts = [role for role, model in roles.items() if expert_counts(model.shape)]
    if whole_experts and (not with_experts or ("actor" in roles and "actor" not in with_experts) or config.rollout.expert_parallel == 1):
        return []
    of_roles = [set(legal_sizes(model.shape, within, whole_experts=whole_experts)) for model in roles.values()]
    return [size for size in sorted(set.intersection(*of_roles)) if legal(size)] if of_roles else []


def expert_sizes(config: Config, facts: Facts) -> list[int]:
    """Sizes that experts may be divided into, of all roles that have some and no sizes of their own."""
    roles, workers = followers(config, facts), facts.sharding.workers
    counts = [set(legal_expert_sizes(model.shape, workers)) for model in roles.values() if expert_counts(model.shape)]
    actor = facts.roles.get("actor")
    if config.train.shard == "hybrid" or not counts or (actor and not expert_counts(actor.shape)):
        return []
    return sorted(set.intersection(*counts))


def divided(config: Config, facts: Facts, way: Division) -> Facts:
    """The facts of a worker where whole models are divided so, or as roles have it that have sizes of their own."""
    sizes = {role: way.of(config, role) for role in facts.roles}
    of_all = sizes.get("actor") or next(iter(sizes.values()), RoleSizes(way.tensor, way.experts))
    sharding = replace(facts.sharding, workers=facts.sharding.workers // of_all.tensor, experts=of_all.apart)
    roles = {
        role: model.part(sizes[role].tensor, sizes[role].apart, whole_experts=sizes[role].experts > 1)
        for role, model in facts.roles.items()
    }
    copied = "actor" in roles and facts.rollout and (way.rollout != way.tensor or of_all.apart > 1 or other_experts(config, facts, way))
    found = replace(facts, roles=roles, sharding=sharding, parts=of_all.tensor, rollout_parts=way.rollout)
    found = replace(found, divisions={role: own for role, own in sizes.items() if own != of_all})
    if not copied:
        return found
    given = config.rollout.expert_parallel
    whole_experts = whole_experts_in_rollouts(given, way.rollout, way.tensor, way.experts, facts.actor.shape)
    return replace(found, copy_bytes=facts.actor.part(way.rollout, whole_experts=whole_experts).parameter_bytes)


def other_experts(config: Config, facts: Facts, way: Division) -> bool:
    """Whether workers that sample together divide experts in another way than those that learn, with as many of them for a layer."""
    learning = way.tensor > 1 and way.experts > 1 and bool(expert_counts(facts.actor.shape))
    return whole_experts_in_rollouts(config.rollout.expert_parallel, way.rollout, way.tensor, way.experts, facts.actor.shape) != learning


def how_it_fits(config: Config, whole: Facts, way: Division, beside: int, unshared: str | None = None) -> Fit:
    facts = divided(config, whole, way)
    facts = replace(facts, sharding=choose_sharding(config, facts, max(1, beside // way.tensor), only=unshared))
    made = decide_offloads(config, given_decisions(config, facts), facts)
    needed, why = most_resident(made, facts), why_crowded(config, made, facts)
    if facts.rollout and "actor" in facts.roles:
        why = why and why.replace(" and optimizer", ", optimizer and the engine's copy") if facts.engine_bytes else why
        sampling, words = useful_rollout(config, made, facts)
        if why is None and sampling > (1 - SLACK) * facts.device_bytes:
            why = f"{words} would take {in_bytes(sampling)} of the device's {in_bytes(facts.device_bytes)}"
        needed = max(needed, sampling)
    return Fit(needed, facts.sharding, why)


def useful_rollout(config: Config, made: Decisions, facts: Facts) -> tuple[int, str]:
    """About the bytes on the device in a rollout with a KV cache for `CACHED_SAMPLES` of the longest samples, or as many as there are, and
    what these are, in words."""
    algorithm = config.algorithm
    samples = algorithm.prompts_per_step * algorithm.samples_per_prompt
    replicas = facts.sharding.workers * facts.parts // facts.rollout_parts
    rows, longest = min(CACHED_SAMPLES, -(-samples // replicas)), facts.longest + longest_response(config)
    cache = rows * longest * facts.token_bytes if config.rollout.kv_bytes == "auto" else config.rollout.kv_bytes
    beside = resident(made.keys, facts, None) if releases_memory(config) else most_resident(made, facts)
    decode = decode_bytes(config, facts, most_seqs(config, facts.device, samples))
    of_cache = f"{many(rows, 'sample')} of {longest} tokens" if config.rollout.kv_bytes == "auto" else in_bytes(cache)
    return beside + decode + cache, f"models, optimizer and a KV cache for {of_cache}"


def division_in_words(
    config: Config, facts: Facts, chosen: Division, autos: Collection[str], tried: Mapping[Division, Fit], instead: str = "",
    *, within: int = 1,
) -> Iterator[str]:  # fmt: skip
    """A line for each size that `auto` has chosen. `instead`: why, if not because it is the first that fits."""
    beyond = f"; {BEYOND}" if chosen in tried and reaches_beyond(config, facts, (chosen.tensor, chosen.experts), within) else ""
    before = [(way, fit.why_not) for way, fit in tried.items() if way != chosen and fit.why_not]
    learns = not evaluates(facts)
    fits = f"the run fits, with {in_bytes(tried[chosen].needed)} of the device's {in_bytes(facts.device_bytes)}" if chosen in tried else ""
    if "train.expert_parallel" in autos and learns and any(expert_counts(model.shape) for model in facts.roles.values()):
        of_less = [why for way, why in before if way.experts < chosen.experts]
        yield f"train.expert_parallel = {chosen.experts} (auto: {instead or reason(of_less, chosen.experts, fits, beyond)})"
    if "train.tensor_parallel" in autos and learns:
        of_less = [why for way, why in before if way.tensor < chosen.tensor]
        yield f"train.tensor_parallel = {chosen.tensor} (auto: {instead or reason(of_less, chosen.tensor, fits, beyond)})"
    if "rollout.tensor_parallel" in autos and facts.rollout and "actor" in facts.roles:
        alike = [(way, why) for way, why in before if (way.tensor, way.experts) == (chosen.tensor, chosen.experts) or not learns]
        of_less = [why for way, why in alike if way.rollout < chosen.rollout]
        shared = "the engine reads the parameters that learn" if chosen.rollout == chosen.tensor > 1 and learns else fits
        yield f"rollout.tensor_parallel = {chosen.rollout} (auto: {instead or reason(of_less, chosen.rollout, shared)})"


def reason(shortages: Sequence[str], size: int, otherwise: str, beyond: str = "") -> str:
    """Why a size was chosen: what is short with a smaller one, if there was one to try. `beyond`: what is to be said of a group that
    reaches over machines."""
    return (f"with fewer, {shortages[-1]}" if size > 1 and shortages else otherwise) + (beyond if size > 1 else "")


def left_for_update(config: Config, made: Decisions, facts: Facts, role: str) -> int:
    """Bytes of the device beside what is resident in a role's update."""
    left = int((1 - SLACK) * facts.device_bytes) - resident(made.keys, facts, role)
    return left if releases_memory(config) else int(left * (1 - KEPT_SHARE[facts.device]))


def decide_budget(config: Config, made: Decisions, facts: Facts, role: str) -> int:
    """Tokens of a role's micro-batch where the user gave no number: more for a small model, as long as they take only a part of the memory
    that is left, with everything kept for the backward pass that may be kept; fewer where they do not fit with the least that may be."""
    tokens, model, given = update_budget(config, facts.device, role, {}), facts.roles[role], made.keys[role]
    if given["offload_activations"] is True:  # by hand: they have to fit the host
        return tokens
    all_kept = given["recompute"] in ("auto", "none")
    autos = {"recompute": "none", "offload_activations": False, "head_recompute": not all_kept}
    keys = {key: autos.get(key, value) if value == "auto" else value for key, value in given.items()}
    most, bonus = ENLARGED * tokens, bool(config.algorithm.entropy_coef)
    left = left_for_update(config, made, facts, role)
    available, longest = BUDGET_SHARE * left, longest_row(config, facts)  # a longer row has a micro-batch alone, whatever the budget
    while tokens > max(LEAST_BUDGET, longest) and least_update_bytes(config, model, tokens, given) > left:
        tokens //= 2
    if tokens < update_budget(config, facts.device, role, {}):
        return tokens
    while (
        tokens < most
        and tokens * model.parameter_bytes // model.itemsize < BUSY
        and model.update_bytes(-(-2 * tokens // model.division.members), keys, entropy_gradient=bonus) <= available
    ):
        tokens *= 2
    return tokens


def least_update_bytes(config: Config, model: RoleFacts, tokens: int, given: Mapping[str, Any]) -> int:
    """About the bytes that a micro-batch takes of the device with all recompute and offload of activations that `auto` may choose; of what
    is on its way to the host, a layer's are there."""
    keys, own = {**given, "recompute": "full" if given["recompute"] == "auto" else given["recompute"]}, -(-tokens // model.division.members)
    found = model.update_bytes(own, keys, entropy_gradient=bool(config.algorithm.entropy_coef))
    layers = len(model.shape.layers)
    return found if given["offload_activations"] is False else found - own * model.kept_bytes(keys) * (layers - 1) // layers


def budgets_by_costs(config: Config, facts: Facts, roles: RolePlan, costs: Mapping[str, UpdateCosts]) -> RolePlan:
    """The roles with token budgets that fit what their updates were measured to take: where that is more than was foreseen, no more than
    leaves `HEADROOM` of the memory free in the largest micro-batch there may be; and where seconds were measured, enough that the device
    seldom waits for the host. Where memory ran out, a micro-batch of as many tokens does not fit."""
    made = Decisions({role: vars(own) for role, own in roles.settings.items()})
    budgets, words = dict(roles.budgets), list(roles.words)
    for role, own in costs.items():
        if own.ran_out_at is not None or not made.keys[role]["offload_activations"]:  # with it they have to fit the host
            budgets[role] = budget_by_costs(config, facts, made, role, own, update_budget(config, facts.device, role, budgets))
        if own.token_bytes is not None or own.token_s is not None:
            words.append(costs_in_words(config, facts, made, role, own, budgets))
    return replace(roles, budgets=budgets, words=tuple(words))


def budget_by_costs(config: Config, facts: Facts, made: Decisions, role: str, costs: UpdateCosts, planned: int) -> int:
    bonus, left = bool(config.algorithm.entropy_coef), left_by_device(config, facts, made, role)

    def fits(budget: int) -> bool:
        tokens, taken = largest_bytes(config, facts, made, role, costs, budget)
        if costs.ran_out_at is not None and tokens >= costs.ran_out_at:
            return False
        foreseen = facts.roles[role].update_bytes(tokens, made.keys[role], entropy_gradient=bonus)
        # What takes no more than the plan has foreseen needs no more than the room that the plan has left.
        return taken <= (1 - HEADROOM) * left or (budget <= planned and taken <= AS_FORESEEN * foreseen <= AS_FORESEEN * left)

    def waits(budget: int) -> bool:
        seconds = costs.seconds(budget, budget * min(budget, longest_row(config, facts)))
        host, fixed = costs.host_s or 0.0, costs.fixed_s or 0.0
        return bool(seconds) and max(host, fixed) > WAITING * ((seconds or 0.0) - fixed)

    def largest(budget: int) -> int:
        return largest_bytes(config, facts, made, role, costs, budget)[0]

    tokens, most = planned, max(planned, ENLARGED * update_budget(config, facts.device, role, {}))
    while costs.ran_out_at is None and 2 * tokens <= most and waits(tokens) and fits(2 * tokens):
        tokens *= 2
    # The longest sample is as long in a smaller budget: where it does not fit alone, the others would only wait in more micro-batches.
    while tokens > LEAST_BUDGET and not fits(tokens) and largest(tokens // 2) < largest(tokens):
        tokens //= 2
    return tokens


def largest_bytes(config: Config, facts: Facts, made: Decisions, role: str, costs: UpdateCosts, budget: int) -> tuple[int, int]:
    """Tokens of the largest micro-batch that there may be with a budget, and the bytes that it takes."""
    tokens = micro_batch_tokens(config, facts, role, {role: budget}, made.sequence(role))
    bonus = bool(config.algorithm.entropy_coef)
    measured = costs.bytes(tokens)
    return tokens, facts.roles[role].update_bytes(tokens, made.keys[role], entropy_gradient=bonus) if measured is None else measured


def left_by_device(config: Config, facts: Facts, made: Decisions, role: str) -> int:
    return left_for_update(config, made, facts, role) if facts.device == "cuda" else int(BUDGET_SHARE * facts.host_bytes)


def costs_in_words(config: Config, facts: Facts, made: Decisions, role: str, costs: UpdateCosts, budgets: Mapping[str, int]) -> str:
    tokens, taken = largest_bytes(config, facts, made, role, costs, update_budget(config, facts.device, role, budgets))
    found = [f"{in_bytes(costs.token_bytes)} a token"] if costs.token_bytes is not None else []
    if costs.token_s is not None and costs.fixed_s is not None and costs.host_s is not None:
        least = f"at least {1e3 * costs.host_s:.3g} ms" if costs.host_s else f"{1e3 * costs.fixed_s:.3g} ms"
        found.append(f"{1e6 * costs.token_s:.3g} us a token and {least} a micro-batch")
    left = in_bytes(max(0, left_by_device(config, facts, made, role)))
    return (
        f"probe: an update of the {role} takes {' and '.join(found)} (micro-batches of up to {many(costs.largest, 'token')} were "
        f"measured); the largest there may be, {many(tokens, 'token')}, takes {in_bytes(taken)} of {left}"
    )


def decide_activations(config: Config, made: Decisions, facts: Facts, role: str, budgets: Mapping[str, int]) -> Decisions:
    """The least recompute that fits, and what does not fit even so goes to the host. What the user sends there must fit the host."""
    keys, model = made.keys[role], facts.roles[role]
    tokens = micro_batch_tokens(config, facts, role, budgets, made.sequence(role))
    left, bonus = left_for_update(config, made, facts, role), bool(config.algorithm.entropy_coef)
    of_host = facts.host_bytes - sum(on_host(config, facts, made, budgets).values())

    def shortage(level: str, **other: Any) -> str | None:
        at = {**keys, "recompute": level, **other}
        if keys["offload_activations"] is True:
            found, where, there = tokens * model.kept_bytes(at), "hold", of_host
        else:
            found, where, there = model.update_bytes(tokens, at, entropy_gradient=bonus), "take", left
        words = f"{many(tokens, 'token')} would {where} about {in_bytes(found)} in an update, and {in_bytes(max(0, there))} are left"
        return words + (" on the host" if where == "hold" else "") if found > there else None

    level = keys["recompute"]
    if level == "auto":
        levels = ("none", "full") if config.train.compile is True else ("none", "selective", "full")  # as knobs.TOGETHER has it
        level = next((level for level in levels if not shortage(level)), "full")
        made = made.decide(role, "recompute", level, None if level == "none" else shortage("none") or "")
    if why := shortage(level):
        made = made.decide(role, "offload_activations", True, why)
    # Last, with what is left: it saves less time for its bytes than all the others cost.
    all_kept = level == "none" and made.keys[role]["offload_activations"] is not True
    if not (model.vocabulary_head and keys.get("fused_head") and all_kept):
        return made
    again = shortage("none", head_recompute=False) is not None
    return made.decide(role, "head_recompute", again, None if again else "they fit")


def micro_batch_tokens(config: Config, facts: Facts, role: str, budgets: Mapping[str, int], sharing: int) -> int:
    """Tokens that a worker has of the largest micro-batch of an update, of which `sharing` workers compute a part each, or as many groups
    that divide layers: the members of such a group have a part of its tokens each between the layers."""
    section = config.critic if role == "critic" else config.actor
    longest, members = -(-longest_row(config, facts) // sharing), facts.parts_of(role)
    if not section.dynamic_batch and section.micro_batch:
        return section.micro_batch * -(-longest // members)
    return -(-max(update_budget(config, facts.device, role, budgets), longest) // members)


def update_budget(config: Config, device: str, role: str, budgets: Mapping[str, int]) -> int:
    """Tokens of a role's micro-batch in an update. The critic has no vocabulary head: twice the actor's, where that is given."""
    given, usual = config.actor.token_budget, TOKEN_BUDGET[device]
    if role == "actor":
        return unless_auto(given, budgets.get("actor", usual))
    return unless_auto(config.critic.token_budget, budgets.get("critic", 2 * usual) if given == "auto" else 2 * given)


def on_host(config: Config, facts: Facts, made: Decisions, budgets: Mapping[str, int]) -> dict[str, int]:
    """Bytes that are moved to the host, as far as that is decided, and with them those that a checkpoint passes through there."""
    kinds = {"optimizer": "offload_optimizer", "parameters": "offload_params", "activations": "offload_activations"}
    found: dict[str, int] = {}
    for role, model in facts.roles.items():
        keys, sharding = made.keys[role], facts.sharding_of(role)
        held = model.held(sharding)
        counts = {"optimizer": held.optimizer, "parameters": held.parameters if sharding.parameters else model.parameter_bytes}
        if model.trained and keys["recompute"] != "auto":
            counts["activations"] = micro_batch_tokens(config, facts, role, budgets, made.sequence(role)) * model.kept_bytes(keys)
        found |= {f"the {role}'s {kind}": count for kind, count in counts.items() if keys.get(kinds[kind]) is True and count}
    if (
        "actor" in facts.roles
        and facts.actor.trained
        and any(keys.get(key) is True for keys in made.keys.values() for key in kinds.values())
    ):
        found["weights on their way into a checkpoint"] = facts.actor.parameter_bytes
    return found


def check_host(config: Config, facts: Facts, made: Decisions, budgets: Mapping[str, int]) -> None:
    moved = on_host(config, facts, made, budgets)
    if sum(moved.values()) <= facts.host_bytes:
        return
    what = " and ".join(f"{kind} ({in_bytes(count)})" for kind, count in moved.items())
    less = (
        'Lower actor.token_budget, recompute more (train.recompute = "full", of all layers) or leave offload_activations out, or use'
        if any(kind.endswith("activations") for kind in moved)
        else "Use"
    )
    raise UserError(
        f"offload: {what} do not fit into the host's memory, of which {in_bytes(facts.host_bytes)} are free. {less} "
        "a smaller model or LoRA (lora.rank), or a computer with more memory"
    )


def check_layers(facts: Facts, made: Decisions) -> None:
    for role, model in facts.roles.items():
        keys, count = made.keys[role], len(model.shape.layers)
        if model.trained and keys["recompute"] in ("selective", "full") and (keys["recompute_layers"] or 0) > count:
            raise UserError(
                f"train.recompute_layers is {keys['recompute_layers']}, and the model has {count} layers ({role}). Give at most {count}"
            )


def role_in_words(role: str, own: RoleSettings, reasons: Mapping[tuple[str, str], str]) -> str:
    """Each key of a role that differs from its default, and why `auto` chose it; empty where none does."""
    of_layers = {"block": " of the first {}", "uniform": ", {} at a time"}[own.recompute_method]
    layers = of_layers.format(many(own.recompute_layers, "layer")) if own.recompute_layers else ""
    in_pieces = "log-probs" if role == "ref" else "log-probs and entropy" if own.fused_head else "entropy"
    texts = {
        "packing": "samples padded to the longest of their micro-batch",
        "sequence_parallel": f"{own.sequence_parallel} workers compute a micro-batch together, each a part of its tokens",
        "recompute": f"{own.recompute} recompute{layers}",
        "offload_activations": "activations on the host until the backward pass",
        "offload_params": "parameters on the host while another role works",
        "offload_optimizer": "optimizer on the host",
        "offload_grads": "gradients only while an optimizer step is made",
        "fused_head": "whole logits",
        "entropy_chunk": f"{in_pieces} of at most {many(own.entropy_chunk or 0, 'token')} at a time",
        "entropy_recompute": f"{'logits of all tokens' if own.fused_head else 'softmax'} kept for the entropy's gradient",
        "head_recompute": "logits kept until the backward pass",
    }
    differing = {key: text for key, text in texts.items() if getattr(own, key) != getattr(RoleSettings(), key)}
    why = {key: f" (auto: {reasons[role, key]})" for key in differing if (role, key) in reasons}
    return f"{role}: {'; '.join(text + why.get(key, '') for key, text in differing.items())}" if differing else ""


# ---- words -----------------------------------------------------------------------------------------------------------------------------


def in_words(config: Config, facts: Facts, roles: RolePlan, memory: RolloutMemory, budgets: Budgets, steps: int, samples: int) -> list[str]:
    algorithm, actor = config.algorithm, config.actor
    per_epoch = f"{many(facts.steps_per_epoch, 'round' if algorithm.prompts_per_round else 'step')} an epoch"
    each, updates = f"{many(steps, 'step')} ({per_epoch}), each of", many(updates_per_step(config), "optimizer step")
    layers = [*facts.division, *sharding_in_words(facts, roles), *roles.words, *([f"layers: {facts.layers}"] if facts.layers else [])]
    by_auto, usual, why_budget = actor.token_budget == "auto" and actor.dynamic_batch, TOKEN_BUDGET[facts.device], ""
    if by_auto and budgets.token_budget > usual:
        why_budget = " (auto: with fewer tokens of so small a model the device would wait)"
    elif by_auto and budgets.token_budget < usual:
        why_budget = " (auto: more would not fit into the device's memory)"
    if not facts.rollout:
        of_update = f"micro-batches of at most {budgets.token_budget} tokens{why_budget}"
        return [f"{each} {algorithm.prompts_per_step} rows, {updates}; {of_update}", *layers]
    longest = facts.longest + config.rollout.max_new_tokens
    alone = f"; a longer sample (up to {longest} tokens) runs alone" if actor.dynamic_batch and budgets.token_budget < longest else ""
    cache = "the cache stays during the update (rollout.release_memory)"
    if releases_memory(config):
        cache = "the update gets the cache's memory"
    prompts, of_each = many(algorithm.prompts_per_step, "prompt"), many(algorithm.samples_per_prompt, "sample")
    return [
        f"{each} {prompts} x {of_each} = {samples} samples, {updates}",
        f"rollout: KV cache of {in_bytes(cache_bytes(config, facts, budgets.kv_blocks))} for "
        f"{budgets.kv_blocks * config.rollout.block_tokens} tokens, at most "
        f"{many(budgets.max_seqs, 'sample')} at once, {budgets.max_batched_tokens} tokens a pass; {cache}; "
        f"{graphs_in_words(config, facts, memory.decode, samples)}",
        f"update: micro-batches of at most {micro(actor.micro_batch, budgets.token_budget)}{why_budget}; "
        f"passes without gradient {micro(actor.micro_batch, budgets.forward_token_budget)}{alone}",
        *layers,
    ]


def sharding_in_words(facts: Facts, roles: RolePlan) -> Iterator[str]:
    sharding, trained = facts.sharding, [role for role, model in facts.roles.items() if model.trained]
    if sharding.workers == 1 or not trained:
        return
    what = "parameters, gradients, master weights and moments" if sharding.parameters else "master weights and moments"
    groups = f", in groups of {sharding.group}" if sharding.shard == "hybrid" else ""
    why = f" (auto: {sharding.why})" if sharding.why else ""
    most = max(resident({role: vars(own) for role, own in roles.settings.items()}, facts, role) for role in trained)
    held = f"each holds {in_bytes(most)} in an update"
    if sharding.parameters:
        role, loading = most_while_loading(facts)
        held += f", and {in_bytes(loading)} while the {role} is loaded"
    yield f"{sharding.shard} sharding: {sharding.workers} workers share out {what}{groups}{why}; {held}"


def words_of_own_workers(config: Config, facts: Facts, roles: RolePlan, budgets: Budgets) -> Iterator[str]:
    """The plan of workers that have one role, which is not the actor."""
    (role,) = facts.roles
    *of_update, forward = (micro(getattr(config, role).micro_batch, getattr(budgets, name)) for name in OWN_BUDGETS[role])
    updates = f"updates in micro-batches of at most {of_update[0]}, " if of_update else ""
    yield f"{role} on workers of its own: {updates}passes without gradient of at most {forward}"
    yield from facts.division
    yield from roles.words
    if facts.layers:
        yield f"layers of the {role}: {facts.layers}"


def graphs_in_words(config: Config, facts: Facts, decode: int, samples: int) -> str:
    if missing := why_decoding_has_no_graphs(config, facts):
        return f"no CUDA graphs: {missing}"
    sizes = footprint.sizes_up_to(most_seqs(config, facts.device, samples))
    return f"CUDA graphs of {many(len(sizes), 'batch size')}, {in_bytes(decode)} for decoding"


def micro(samples: int | None, tokens: int) -> str:
    return many(samples, "sample") if samples else f"{tokens} tokens"
