"""The facts that a plan is made from: hardware, data, and the memory of each role's model.

Enters: shapes, or the tables of loaded models. Leaves: `RoleFacts` and `Facts`, frozen. Guaranteed: neither torch nor a model is needed:
unmeasured facts follow from the models' shapes, and those that a loaded model has measured replace them. Bytes of micro-batches are
estimates of the most that a worker takes. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fulltilt import footprint
from fulltilt.footprint import HeadOptions, head_bytes
from fulltilt.parallel.cuts import expert_counts, vocabulary_rows
from fulltilt.parallel.holdings import Holdings, bucket_bytes, held_bytes, rollout_bytes
from fulltilt.parallel.layout import UNSHARDED, ParameterSize, Sharding, Sizes
from fulltilt.parallel.portions import Adapters, portion_sizes
from fulltilt.schema import Config
from fulltilt.shape import WHOLE_LAYERS, LayerDivision, Recompute, Shape

ACTIVATION_MARGIN = 1.055  # factor of the bytes that layers keep by formula: the allocator rounds up, and gradients lie between the pieces


@dataclass(frozen=True)
class RoleFacts:
    """Facts of a role's model that its memory depends on."""

    shape: Shape
    parameter_bytes: int
    trained: int = 0  # numbers that are trained; 0: the role is not
    itemsize: int = 2  # bytes of a number in computation; below 4, master weights are kept as well
    fused: bool = False  # whether its layers run fused
    vocabulary_head: bool = True  # False: a critic or a reward model
    sizes: Sizes = ()  # sizes of its parameters, if the model is loaded
    division: LayerDivision = WHOLE_LAYERS  # how workers divide its layers; `shape` describes whole ones
    adapters: Adapters | None = None  # adapters that are trained in place of its other parameters, if the model is not loaded

    @staticmethod
    def of_shape(shape: Shape, config: Config, device: str, *, learns: bool, role: str = "actor") -> RoleFacts:
        """Return the facts of a model that is not loaded."""
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
        """Return the facts of a worker that has one of `parts` parts of every layer, or one of `experts` parts of the experts, of a model
        that is not loaded. `whole_experts`: a part of every layer, but some of the experts whole. The worker is the first of its group,
        which holds most."""
        if experts > 1:
            return self.with_experts(experts)
        return self._divided(LayerDivision(parts, whole_experts=whole_experts)) if parts > 1 else self

    def with_experts(self, size: int) -> RoleFacts:
        """Return the facts of a worker that has one of `size` parts of the experts, of a model that is not loaded."""
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
        """Return the bytes that a worker holds of the model in an update."""
        return held_bytes(self.known_sizes, sharding)

    @cached_property
    def known_sizes(self) -> Sizes:
        return self.sizes or tuple(self._evenly())

    def _evenly(self) -> Iterator[ParameterSize]:
        """Yield sizes for a model that is not loaded: layers of equal size, over which adapters are spread, and the embedding and the
        head."""
        count, layers = self.parameter_bytes // self.itemsize, len(self.shape.layers)
        tables = 1 if self.shape.tied or not self.vocabulary_head else 2
        outside = min(count, tables * self.shape.vocabulary * self.shape.width)
        each, rest = divmod(count - outside, layers)
        adapted = each if self.trained >= count else min(each, self.trained // layers)  # numbers of a layer that are trained
        for layer, numbers in [(None, outside + rest), *((layer, each) for layer in range(layers))]:
            learned = adapted if layer is not None else min(numbers, self.trained - layers * adapted)
            for own, learns in ((learned, True), (numbers - learned, False)):
                if own:
                    yield ParameterSize((own,), self.itemsize, learns, layer)

    def kept_bytes(self, keys: Mapping[str, Any]) -> int:
        """Return the bytes that a token of a micro-batch holds until its backward pass; one of a member's own tokens, if members share
        layers."""
        kept = self.shape.kept_bytes(self.itemsize, fused=self.fused, recompute=recomputing(keys), division=self.division)
        return int(ACTIVATION_MARGIN * kept)

    def working_bytes(self, keys: Mapping[str, Any]) -> int:
        """Return the bytes of a token that the start of the backward pass holds beside the kept ones: a layer's gradients, about as large
        as what the layer keeps, and everything that is computed again of the last unit. After a last layer that kept everything, units need
        less than it has freed."""
        layers = self.shape.layers
        units = recomputing(keys).units(len(layers))
        again = max(map(len, units)) if units and units[-1].stop == len(layers) else 0
        of_layers = (self.shape.layer_bytes(layer, self.itemsize, fused=self.fused, division=self.division) for layer in set(layers))
        largest = max(of_layers, default=0)
        return int(ACTIVATION_MARGIN * largest * (1 + again))

    def update_bytes(self, tokens: int, keys: Mapping[str, Any], *, entropy_gradient: bool = False) -> int:
        """Estimate the most bytes of a micro-batch of which a worker has `tokens` tokens. The head is done before the layers' backward
        pass begins; each member of a group has a part of the logits of all tokens."""
        of_head = self.head_bytes(tokens * self.division.members, keys, entropy_gradient)
        return tokens * self.kept_bytes(keys) + max(of_head, tokens * self.working_bytes(keys))

    def forward_bytes(self, tokens: int, keys: Mapping[str, Any]) -> int:
        """Estimate the most bytes of a pass of `tokens` tokens without gradient: those of a layer, or of the head."""
        largest = max((self.shape.layer_bytes(layer, self.itemsize, fused=self.fused) for layer in set(self.shape.layers)), default=0)
        return max(int(ACTIVATION_MARGIN * largest * tokens), self.head_bytes(tokens, keys, entropy_gradient=False))

    def head_bytes(self, tokens: int, keys: Mapping[str, Any], entropy_gradient: bool) -> int:
        """Return the most bytes of the vocabulary head's temporaries, if all tokens are trained on."""
        if not self.vocabulary_head:
            return 0
        given = (keys.get("fused_head", True), keys.get("entropy_chunk"), keys.get("entropy_recompute", True))
        options = HeadOptions(*given, recompute=keys.get("head_recompute") is not False)
        entropy: footprint.Entropy = "gradient" if entropy_gradient else "value"
        return head_bytes(tokens, self.shape.vocabulary, self.shape.width, options, itemsize=self.itemsize, entropy=entropy).peak


@dataclass(frozen=True, order=True)
class RoleSizes:
    """Numbers of workers among which the model of a role is divided."""

    tensor: int = 1  # workers that share each layer
    experts: int = 1  # workers that share the experts; beside shared layers, 1 (parts of all experts) or the same number (some whole)

    @property
    def apart(self) -> int:
        """Number of workers that share the experts and send tokens to one another."""
        return self.experts if self.tensor == 1 else 1


def recomputing(keys: Mapping[str, Any]) -> Recompute:
    return Recompute(keys["recompute"], keys.get("recompute_layers"), keys.get("recompute_method", "block"))


@dataclass(frozen=True)
class Facts:
    """Everything that a plan is made from, beside the configuration. None: not measured, so computed from the actor's shape."""

    device: str  # "cuda" or "cpu"
    device_bytes: int  # memory of the device; 0 on a CPU
    host_bytes: int  # free main memory: one worker's share, where several share a machine
    roles: Mapping[str, RoleFacts]  # the roles that have a model of their own: the actor and others, or one role with workers of its own
    longest: int  # tokens of the longest prompt (of the longest row, for SFT), over training and validation
    steps_per_epoch: int
    rollout: bool = True  # False: nothing is sampled
    cores: int = 1  # CPU threads that torch would use by default
    threads_given: bool = False  # whether OMP_NUM_THREADS sets the number of threads
    processors: int = footprint.PROCESSORS  # multiprocessors of the device
    free_bytes: int | None = None  # free memory of the device, with models and optimizers in place
    kv_bytes_per_token: int | None = None
    decode_bytes: int | None = None  # memory of decoding `most_seqs` samples at once, beside the KV cache
    not_captured: str | None = None  # why no CUDA graph can hold the model, as far as is known
    layers: str = ""  # whether the roles' layers run fused, in words
    sharding: Sharding = UNSHARDED  # how workers with the same part of the models shard their states
    parts: int = 1  # number of workers that share each layer
    rollout_parts: int = 1  # number of workers that share each layer of the model that an engine reads
    copy_bytes: int = 0  # parameters of an engine's copy that is divided in another way than the actor
    beside: int = 1  # workers of a machine, which share its main memory
    within: int | None = None  # a number that the sizes of groups on one machine divide; None: all workers are on one machine
    division: tuple[str, ...] = ()  # how `auto` has divided the models, and why, in words
    divisions: Mapping[str, RoleSizes] = field(
        default_factory=dict
    )  # roles that are divided in another way than `parts` and `sharding` say

    def parts_of(self, role: str) -> int:
        """Return the number of workers that share each layer of a role's model."""
        return self.divisions[role].tensor if role in self.divisions else self.parts

    def sharding_of(self, role: str) -> Sharding:
        """Return the sharding among the workers with the same part of a role's model."""
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
        """Bytes that an engine's model takes beside the actor, with the buffer that its new values pass through."""
        sharding, sizes = self.sharding, self.actor.known_sizes
        if not self.copy_bytes:
            return rollout_bytes(sizes, sharding)
        return self.copy_bytes + bucket_bytes(sizes, sharding, max(self.parts, sharding.experts))

    @property
    def actor(self) -> RoleFacts:
        return self.roles["actor"]

    @property
    def largest_work(self) -> RoleFacts:
        """The role that takes most of these workers' time."""
        return self.roles["actor"] if "actor" in self.roles else next(iter(self.roles.values()))

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values on a worker that samples in a group of `rollout_parts`."""
        if self.kv_bytes_per_token is not None:
            return self.kv_bytes_per_token
        parts, itemsize = self.rollout_parts, self.actor.itemsize  # beyond the number of key heads, parts are copies
        return sum(2 * max(1, layer.key_heads // parts) * layer.head_width * itemsize for layer in self.actor.shape.layers)


def evaluates(facts: Facts) -> bool:
    """Return whether the actor is not trained, as far as its model is known."""
    return "actor" in facts.roles and not facts.actor.trained
