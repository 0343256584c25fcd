"""The description of a run, of fulltilt or of another system: the one record that the models of memory and time read.

Enters: a TOML file (`read`), or the fields themselves. Leaves: a frozen `RunDescription`. Guaranteed: nothing is loaded; unknown keys,
wrong values and impossible layouts of a file are all reported at once, each with its place and remedy.

    [model]                       # shape: a name of tune/shapes.py, or a folder with a config.json
    shape = "Qwen2.5-7B"
    reference = true              # a reference model of the same size, resident; so may be critic and reward_model
    [hardware]
    gpus = "8xH100-80GB"          # or other hardware: with flops, hbm, host_link, gpu_link, network, memory_gb
    [train]
    backend = "megatron"          # or fsdp, the default if the layout has that word
    layout = "tp4pp2vpp2cp2ep8"   # fsdp: "sp4fsdp8"
    offload = true
    recompute = "full"
    token_budget = 20480          # or micro_batch, in samples
    [rollout]
    tensor = 1
    memory_share = 0.6
    [batch]
    prompts = 512
    samples = 16
    minibatch_prompts = 32
    [lengths]
    most_prompt = 2048
    most_response = 8192
    response = 1200               # mean
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from fulltilt.hardware import Accelerator, Cluster, count_of, name_of
from fulltilt.records import UserError
from fulltilt.schema import shown
from fulltilt.shape import Recompute, Shape
from fulltilt.tune.constants import FULLTILT, VERL, SystemCosts
from fulltilt.tune.lengths import Lengths
from fulltilt.tune.shapes import named_shape
from fulltilt.tune.values import MOST, Range, ValueMistake, types_of, wrong_values
from fulltilt.words import shortened

Backend = Literal["megatron", "fsdp"]
Read = TypeVar("Read")
LAYOUT_WORDS = {
    "tp": "tensor", "pp": "pipeline", "vpp": "virtual", "vp": "virtual", "cp": "context", "sp": "sequence", "ulysses": "sequence",
    "usp": "sequence", "ep": "expert", "etp": "expert_tensor", "fsdp": "shard", "hsdp": "shard",
}  # fmt: skip
# Keys of a description that are fields of a `RunDescription`, and may be in [model] or in [train].
OF_RUN = (
    "backend", "entropy", "fused_head", "fused_rope", "offload_activations", "offload_grads", "offload_optimizer", "offload_params",
    "offload_reference", "old_logprobs", "reference",
)  # fmt: skip
BUDGETS = {"token_budget": "micro_batch", "forward_token_budget": "forward_micro_batch"}  # sizes in tokens, and the same in samples
MICRO_BATCHES = (*BUDGETS, *BUDGETS.values())  # keys of [train] about micro-batches
OF_MODEL: tuple[Role, ...] = ("critic", "reward_model")  # keys of [model] that add a model of the same size, laid out as the actor's
SYSTEMS: Mapping[str, SystemCosts] = {"verl": VERL, "fulltilt": FULLTILT}


@dataclass(frozen=True)
class TrainLayout:
    """Division of a trained role among GPUs. Example: TrainLayout.parse("tp4pp2cp2") -> tensor 4, pipeline 2, context 2"""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1  # parts of a stage that take turns (virtual pipeline)
    context: int = 1  # GPUs that share a sequence by passing keys and values on in a ring
    sequence: int = 1  # GPUs that share a sequence by exchanging heads (Ulysses)
    expert: int = 1
    expert_tensor: int = 1
    whole_experts: bool = False  # each GPU of a tensor group has other experts, whole, instead of a part of every expert
    shard: int = 1  # FSDP: GPUs that together hold every parameter once

    @staticmethod
    def parse(text: str) -> TrainLayout:
        written = dict(re.findall(r"([a-z]+)[\s_=:-]*(\d+)", text.lower()))
        if any(len(size) > len(str(MOST)) for size in written.values()):
            raise UserError(f"layout {shown(text)}: a size is too large. Write sizes of at most {MOST}")
        found = {name: int(size) for name, size in written.items()}
        if unknown := found.keys() - LAYOUT_WORDS.keys() - {"dp", "edp"}:
            raise UserError(
                f"layout {text!r}: {', '.join(sorted(unknown))} is unknown. Write for example tp4pp2cp2, tp4pp2vpp2ep8 or sp4fsdp8"
            )
        sizes: dict[str, Any] = {LAYOUT_WORDS[name]: max(1, size) for name, size in found.items() if name in LAYOUT_WORDS}
        return TrainLayout(**sizes)

    @property
    def divides_experts(self) -> bool:
        """Whether tokens are sent to experts on other GPUs, so that experts are not divided like other layers."""
        return self.expert > 1 or self.expert_tensor > 1

    @property
    def expert_places(self) -> int:
        """Number of GPUs that hold different experts."""
        return self.tensor if self.whole_experts and not self.divides_experts else self.expert

    @property
    def expert_parts(self) -> int:
        """Number of GPUs that share one expert."""
        if self.divides_experts:
            return self.expert_tensor
        return 1 if self.whole_experts else self.tensor

    @property
    def model_parallel(self) -> int:
        """Number of GPUs that compute a micro-batch together."""
        return self.tensor * self.pipeline * self.context * self.sequence


@dataclass(frozen=True)
class Calibration:
    """Measured seconds of a device and its host, as multiples of the modelled ones, once a probe has measured them."""

    host: float = 1.0  # the host's launches
    passes: float = 1.0  # the device in passes over micro-batches
    decoding: float = 1.0  # the device in decode steps
    rollout_s: float = 0.0  # seconds of a rollout beside its prompts and decode steps


AS_MODELLED = Calibration()


@dataclass(frozen=True)
class EngineDescription:
    """The rollout engine of a run."""

    tensor: int = 1
    memory_share: float = 0.6  # share of the GPU's whole memory that an instance takes while it is awake
    graphs: bool = True  # CUDA graphs; False: eager
    max_seqs: int = 1024  # samples decoded at once (verl's default)
    max_batched_tokens: int = 16384  # tokens in a pass over prompts, for which fulltilt's engine has memory outside its share
    shares_prompts: bool = True  # a prompt is read once for all its samples
    sleeps: bool = True  # frees its memory while other phases run
    own_copy: bool = True  # False: the engine reads the trainer's parameters, as fulltilt's does
    keeps_copy: bool = False  # its own copy stays on the GPU while it sleeps


@dataclass(frozen=True)
class BatchDescription:
    prompts: int = 512
    samples: int = 16
    minibatch_prompts: int = 32
    token_budget: int | None = None  # tokens a GPU in a micro-batch of the update; None: sized by samples
    micro_batch: int = 2  # samples in a micro-batch of the update
    forward_token_budget: int | None = None
    forward_micro_batch: int = 4
    epochs: int = 1  # passes of the update over a step's samples
    sampled: int | None = None  # prompts of a round of dynamic sampling; None: those of the step

    @property
    def rows(self) -> int:
        return self.prompts * self.samples

    @property
    def rollout_prompts(self) -> int:
        """Prompts that are sampled at once; dynamic sampling keeps the useful ones."""
        return self.prompts if self.sampled is None else self.sampled

    @property
    def rollout_rows(self) -> int:
        return self.rollout_prompts * self.samples

    @property
    def updates(self) -> int:
        """Mini-batches of an epoch."""
        return max(1, -(-self.prompts // self.minibatch_prompts))


Role = Literal["critic", "ref", "reward_model"]


@dataclass(frozen=True)
class RoleDescription:
    """A model beside the actor's, on the same GPUs or on some of its own."""

    role: Role
    run: RunDescription  # its model, GPUs, layout and micro-batches, as if it were alone there; it samples nothing
    apart: bool = False  # it has GPUs of its own

    @property
    def called(self) -> str:
        return {"critic": "critic", "ref": "reference", "reward_model": "reward model"}[self.role]


@dataclass(frozen=True)
class RunDescription:
    shape: Shape
    cluster: Cluster
    lengths: Lengths
    backend: Backend = "megatron"
    layout: TrainLayout = field(default_factory=TrainLayout)
    engine: EngineDescription = field(default_factory=EngineDescription)
    batch: BatchDescription = field(default_factory=BatchDescription)
    recompute: Recompute = field(default_factory=Recompute)
    offload_params: bool = False
    offload_grads: bool = False
    offload_optimizer: bool = False
    offload_activations: bool = False  # activations are on the host until the backward pass
    trained: int | None = None  # numbers that are trained, beside a frozen model (LoRA); None: the whole model is trained
    old_logprobs: bool = True  # the trainer computes the policy's log-probs before the step's first update
    reference: bool = False  # a frozen model of the same size computes log-probs too
    shared_reference: bool = False  # the actor without its adapters computes the reference log-probs: no second model is held
    offload_reference: bool = False
    fused_head: bool = False  # logits are never held as a whole
    kept_logits: bool = False  # logits are kept until the backward pass
    fused_rope: bool = False
    fused_kernels: bool | None = None  # norms, positions and gates are one kernel each; None: the system's default
    entropy: bool = True  # the update computes the entropy's gradient
    rollout: bool = True  # False: it trains on given rows, without a rollout
    vocabulary_head: bool = True  # False: the model gives one number a token, as a critic does
    itemsize: int = 2  # bytes of a number in computation; below 4, master weights are kept as well
    others: tuple[RoleDescription, ...] = ()
    system: SystemCosts = VERL
    calibration: Calibration = AS_MODELLED
    name: str = ""

    def __post_init__(self) -> None:
        for wrong in wrong_groups(self.layout, self.cluster.gpus, len(self.shape.layers)):
            raise UserError(f"{self.name or 'layout'}: {wrong}")

    @property
    def gpu(self) -> Accelerator:
        return self.cluster.gpu

    @property
    def fused_layers(self) -> bool:
        """Whether norms, positions and gates are one kernel each. FSDP runs of other systems have Hugging Face's layers."""
        return (self.backend != "fsdp" or self.system.packs) if self.fused_kernels is None else self.fused_kernels

    @property
    def data(self) -> int:
        """Number of GPU groups that compute different micro-batches."""
        return self.cluster.gpus // self.layout.model_parallel

    @property
    def shard(self) -> int:
        """Number of GPUs that shard parameters (FSDP), or optimizer states (Megatron: the GPUs with the same part of the model)."""
        layout = self.layout
        if self.backend == "fsdp":
            return layout.shard if layout.shard > 1 else self.cluster.gpus
        return self.data * layout.context * layout.sequence

    @property
    def engines(self) -> int:
        return max(1, self.cluster.gpus // self.engine.tensor)

    @cached_property
    def fullest_stage(self) -> Shape:
        """The layers of a pipeline's first stage, which has its share of the layers and the most micro-batches in flight."""
        return replace(self.shape, layers=self.shape.layers[: -(-len(self.shape.layers) // self.layout.pipeline)])

    @property
    def all_gpus(self) -> int:
        """Number of all GPUs, including those of roles that have their own."""
        return self.cluster.gpus + sum(own.run.cluster.gpus for own in self.others if own.apart)

    @property
    def tokens(self) -> float:
        """Prompt and response tokens of a step."""
        return self.batch.rows * self.lengths.mean

    def with_response(self, tokens: float) -> RunDescription:
        others = tuple(replace(own, run=own.run.with_response(tokens)) for own in self.others)
        return replace(self, lengths=replace(self.lengths, response=tokens), others=others)

    def beside(self, role: Role, **changed: Any) -> RoleDescription:
        """Return a model of that role on the same GPUs, like the actor's but for `changed`."""
        like = replace(self, others=(), rollout=False, reference=False, shared_reference=False, **changed)
        if role == "ref":
            return RoleDescription(role, replace(like, trained=0))
        own = replace(like, vocabulary_head=False, entropy=False)
        return RoleDescription(role, own if role == "critic" else replace(own, trained=0))


# ---- layouts that no run can have --------------------------------------------------------------------------------------------------------


def wrong_groups(layout: TrainLayout, gpus: int, layers: int) -> Iterator[str]:
    """Yield why a model of so many layers cannot be divided among so many GPUs."""
    if gpus % layout.model_parallel:
        yield f"{gpus} GPUs cannot be divided into groups of {layout.model_parallel}. Change the layout"
    # Megatron may count the embedding and the head as layers where it divides them among stages.
    if layout.pipeline * layout.virtual > layers + 2:
        yield f"more pipeline stages than the model's {layers} layers. Use fewer"


@dataclass(frozen=True)
class EvenSplit:
    """A number of GPUs, heads or experts that a run divides into equal parts."""

    place: str  # key of the description that sets the parts
    count: int
    noun: str
    parts: int
    named: str  # the parts as the description writes them

    @property
    def uneven(self) -> bool:
        return self.count % self.parts > 0

    @property
    def mistake(self) -> ValueMistake:
        text = f"{self.count} {self.noun} cannot be divided evenly among {self.parts} ({self.named}). Give a size that divides {self.count}"
        return ValueMistake(self.place, text)


def even_splits(layout: TrainLayout, cluster: Cluster, shape: Shape, tensor: int) -> Iterator[EvenSplit]:
    """Yield what must be divided evenly, beside GPUs into groups. `tensor`: GPUs of a rollout engine."""
    gpus, experts, engine = cluster.gpus, counts_of_experts(shape), f"tensor = {tensor}"
    heads_apart, experts_apart = layout.tensor * layout.sequence, layout.pipeline * layout.expert * layout.expert_tensor
    yield EvenSplit("rollout.tensor", gpus, "GPUs", tensor, engine)
    yield EvenSplit("train.layout", gpus, "GPUs", layout.shard, f"fsdp{layout.shard}")
    if experts:  # `wrong_layout` has another message for dense models
        yield EvenSplit("train.layout", gpus, "GPUs", experts_apart, sizes(pp=layout.pipeline, ep=layout.expert, etp=layout.expert_tensor))
    for count in experts:
        yield EvenSplit("train.layout", count, "experts", layout.expert, f"ep{layout.expert}")
    for heads in sorted({layer.heads for layer in shape.layers}):
        yield EvenSplit("train.layout", heads, "attention heads", heads_apart, sizes(tp=layout.tensor, sp=layout.sequence))
        yield EvenSplit("rollout.tensor", heads, "attention heads", tensor, engine)


def sizes(**given: int) -> str:
    """Write sizes as layouts have them, without those of 1."""
    return "".join(f"{word}{size}" for word, size in given.items() if size > 1)


def counts_of_experts(shape: Shape) -> list[int]:
    """Return the numbers of experts that layers of a model have; an empty list for a dense model."""
    return sorted({layer.experts.count for layer in shape.layers if layer.experts})


def wrong_layout(layout: TrainLayout, cluster: Cluster, shape: Shape, tensor: int) -> Iterator[ValueMistake]:
    """Yield why a described run cannot be laid out as its description says."""
    yield from (ValueMistake("train.layout", wrong) for wrong in wrong_groups(layout, cluster.gpus, len(shape.layers)))
    yield from (own.mistake for own in even_splits(layout, cluster, shape, tensor) if own.uneven)
    if layout.divides_experts and not counts_of_experts(shape):
        own = sizes(ep=layout.expert, etp=layout.expert_tensor)
        yield ValueMistake(
            "train.layout", f"{own} divides experts, and this model has none. Remove ep and etp, or give a model with experts"
        )
    if layout.virtual > 1 and layout.pipeline == 1:
        yield ValueMistake(
            "train.layout", f"vpp{layout.virtual} divides pipeline stages, and there is only one. Add pp2 or more, or remove vpp"
        )


LAYOUT_WORD = re.compile(r"([a-z]+)[\s_=:]*([0-9]{0,7})")
SEPARATORS = " \t\n_,;+/-"
WITHOUT_SIZE = {"all", "dp", "fsdp"}  # words of a layout that mean all GPUs if no size follows


def wrong_words(words: Mapping[str, str], layout: TrainLayout, backend: Backend, gpus: int) -> Iterator[ValueMistake]:
    """Yield which words of a layout contradict the backend or the number of GPUs, beside those that divide the model."""
    if "shard" in words and backend == "megatron":
        yield ValueMistake("train.layout", f'fsdp{words["shard"]} needs train.backend = "fsdp", which is "megatron". Change one of them')
    copies = {"dp": layout.model_parallel, "edp": layout.pipeline * layout.expert_places * layout.expert_parts}
    for word, group in copies.items():
        stated, made = words.get(word), gpus // group
        hybrid = layout.shard > 1 and stated == str(gpus // layout.shard)  # dp counts copies of the shards
        if stated and not gpus % group and int(stated) != made and not hybrid:
            text = f"{word}{stated} contradicts the rest: {gpus} GPUs in groups of {group} make {word}{made}. Change it, or leave it out"
            yield ValueMistake("train.layout", text)


def words_of_layout(text: str) -> dict[str, str]:
    """Return the words of a layout with their sizes, which may be empty; words that divide the model by their names in `TrainLayout`."""
    return {LAYOUT_WORDS.get(word, word): size for word, size in LAYOUT_WORD.findall(text.lower())}


def described_layout(text: str) -> TrainLayout:
    """Read the layout of a description. Tables are read more freely, and may leave sizes out or have other words beside them."""
    found = LAYOUT_WORD.findall(text.lower())
    names = [LAYOUT_WORDS.get(word, word) for word, _ in found]
    rest = LAYOUT_WORD.sub("", text.lower()).strip(SEPARATORS)
    without = [word for word, size in found if not size and word not in WITHOUT_SIZE]
    mistakes = {
        f"{shortened(rest, 40)} follows no word": bool(rest),
        f"{shortened(', '.join(without), 40)} has no size": bool(without),
        "a size is 0": any(size and not int(size) for _, size in found),
        "a size is given twice": len(names) > len(set(names)),
    }
    if wrong := [text for text, holds in mistakes.items() if holds]:
        raise UserError(f"{shown(text)}: {', and '.join(wrong)}. Write words with sizes of at least 1, such as tp4pp2cp2 or sp4fsdp8")
    return TrainLayout.parse(text)


# ---- TOML --------------------------------------------------------------------------------------------------------------------------------

SHARED_TYPES = {key: kind for key, kind in types_of(RunDescription).items() if key in OF_RUN}
BATCH_TYPES = types_of(BatchDescription)
# Type of each key, by section, except for [hardware], which `Cluster` reads.
TYPES: Mapping[str, Mapping[str, Any]] = {
    "model": {"shape": str, **dict.fromkeys(OF_MODEL, bool), **SHARED_TYPES},
    "train": {
        "layout": str, "offload": bool, "recompute": types_of(Recompute)["kind"], "system": Literal["verl", "fulltilt"],
        **{key: BATCH_TYPES[key] for key in MICRO_BATCHES}, **SHARED_TYPES,
    },
    "rollout": types_of(EngineDescription),
    "batch": BATCH_TYPES,
    "lengths": {key: kind for key, kind in types_of(Lengths).items() if key != "validated"},  # for own runs alone
}  # fmt: skip
RANGES: Mapping[str, Range] = {"rollout.memory_share": (0.01, 1.0), "lengths.prompt": (1, MOST), "lengths.response": (1, MOST)}
# Keys that are at most as large as another of their section, with the record that has their defaults.
LIMITED: tuple[tuple[str, str, str, Any], ...] = (
    ("batch", "minibatch_prompts", "prompts", BatchDescription()),
    ("lengths", "prompt", "most_prompt", Lengths()),
    ("lengths", "response", "most_response", Lengths()),
)
# Sections that may both have a key, which only one of them may set.
ALTERNATIVES = (("model", "train"), ("train", "batch"))


def read(path: Path, hardware: str | None = None, shape: str | None = None, response: float | None = None) -> RunDescription:
    """Return the run that a file describes. `hardware`, `shape`, `response`: of the command line, instead of the file's."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: cannot be read: {getattr(error, 'strerror', error)}. Give a TOML file as docs/planning.md shows it"
        ) from error
    return describe(given, str(path), hardware, shape, response)


def describe(
    given: Mapping[str, Any], name: str = "description", hardware: str | None = None, instead: str | None = None,
    response: float | None = None,
) -> RunDescription:  # fmt: skip
    """Return the description that the tables of a TOML file give. Raises one UserError that holds every mistake. `hardware`, `instead` for
    the name of the shape, and `response` for its mean tokens: options of the command line, which replace the file's values unread."""
    parts = {section: dict(own) if isinstance(own := given.get(section, {}), Mapping) else {} for section in ("hardware", *TYPES)}
    model, train, batch = parts["model"], parts["train"], parts["batch"]
    model |= {} if instead is None else {"shape": instead}
    parts["lengths"] |= {} if response is None else {"response": response}
    mistakes = [*wrong_sections(given), *wrong_keys(parts)]
    if response is not None:
        mistakes = [replace(each, place="--response-tokens") if each.place == "lengths.response" else each for each in mistakes]
    shape = taken("model.shape" if instead is None else "--shape", lambda: named_shape(model["shape"]), mistakes)
    cluster = described_gpus(parts["hardware"], hardware, mistakes)
    layout = taken("train.layout", lambda: described_layout(train.get("layout", "")), mistakes)
    wrong = {mistake.place for mistake in mistakes}
    words = words_of_layout(train.get("layout", "")) if layout else {}
    backend: Backend = train.get("backend", model.get("backend", "fsdp" if "shard" in words else "megatron"))
    tensor = 1 if "rollout.tensor" in wrong else parts["rollout"].get("tensor", 1)
    if shape and cluster and layout and wrong.isdisjoint({"train.backend", "model.backend"}):
        mistakes += [*wrong_layout(layout, cluster, shape, tensor), *wrong_words(words, layout, backend, cluster.gpus)]
    if mistakes or not (shape and cluster and layout):
        raise UserError("\n".join(str(each) if each.place.startswith("--") else f"{name}: {each}" for each in mistakes))
    offloads = ("offload_params", "offload_grads", "offload_optimizer")
    found = RunDescription(
        shape=shape,
        cluster=cluster,
        lengths=Lengths(**parts["lengths"]),
        layout=layout,
        engine=EngineDescription(**parts["rollout"]),
        batch=BatchDescription(**batch, **{key: train[key] for key in MICRO_BATCHES if key in train}),
        recompute=Recompute(train.get("recompute", "none")),
        system=SYSTEMS[train.get("system", "verl")],
        name=name,
        **dict.fromkeys(offloads, train.get("offload", False))
        | {key: value for key, value in {**model, **train, "backend": backend}.items() if key in SHARED_TYPES},
    )
    return replace(found, others=tuple(found.beside(role) for role in OF_MODEL if model.get(role)))


def described_gpus(section: Mapping[str, Any], hardware: str | None, mistakes: list[ValueMistake]) -> Cluster | None:
    """Return the GPUs of [hardware], or those of the command line: as many as [hardware] names if it gives no number."""
    if hardware is None:
        return taken("hardware", lambda: Cluster.of_figures(section), mistakes)
    found = taken("--hardware", lambda: Cluster.parse(hardware), mistakes)
    if found is None or Cluster.parse(hardware, found.gpus + 1) == found:
        return found
    count = taken("hardware", lambda: number_of_gpus(section), mistakes)
    return replace(found, gpus=count) if count else None


def number_of_gpus(section: Mapping[str, Any]) -> int:
    """Return the number of GPUs of [hardware], whose name and figures need not be known."""
    text = section.get("gpus", "")
    return count_of(text) if isinstance(text, str) and name_of(text)[:1].isalpha() else Cluster.of_figures(section).gpus


def wrong_sections(given: Mapping[str, Any]) -> Iterator[ValueMistake]:
    """Yield what is wrong with the sections of a description, whatever their keys are."""
    known = {"hardware", *TYPES}
    for section in sorted(given.keys() - known):
        yield ValueMistake(section, f"unknown section. Known are {', '.join(sorted(known))}")
    for section in [own for own in sorted(known) if not isinstance(given.get(own, {}), Mapping)]:
        yield ValueMistake(section, f"{shown(given[section])} is not a section. Write [{section}], with keys of its own")


def wrong_keys(parts: Mapping[str, Mapping[str, Any]]) -> Iterator[ValueMistake]:
    """Yield what is wrong with keys and values of the sections that `TYPES` has."""
    wrong = [mistake for section, types in TYPES.items() for mistake in wrong_values(section, parts[section], types, RANGES)]
    yield from wrong
    if "shape" not in parts["model"]:
        yield ValueMistake("model.shape", "no model is given. Give a named shape or a folder with a config.json")
    for first, second in ALTERNATIVES:
        for key in sorted(parts[first].keys() & parts[second].keys() & TYPES[first].keys() & TYPES[second].keys()):
            yield ValueMistake(f"{second}.{key}", f"{first}.{key} is given too. Give one of them")
    for budget, samples in BUDGETS.items():
        given = {key: f"{section}.{key}" for section in ("train", "batch") for key in (budget, samples) if key in parts[section]}
        if len(given) > 1:
            yield ValueMistake(given[samples], f"{given[budget]} is given too, which sizes micro-batches by tokens. Give one of them")
    places = {mistake.place for mistake in wrong}
    for section, key, limit, defaults in LIMITED:
        if places.isdisjoint({f"{section}.{key}", f"{section}.{limit}"}):
            yield from above_limit(section, key, limit, parts[section], defaults)


def above_limit(section: str, key: str, limit: str, given: Mapping[str, Any], defaults: Any) -> Iterator[ValueMistake]:
    """Yield a mistake if the value of a key is larger than that of its limit."""
    value, most = (given.get(name, getattr(defaults, name)) for name in (key, limit))
    if value > most:
        by_default = "" if key in given else ", its default,"
        yield ValueMistake(f"{section}.{key}", f"{shown(value)}{by_default} is more than {section}.{limit} = {most}. Give at most {most}")


def taken(place: str, read: Callable[[], Read], mistakes: list[ValueMistake]) -> Read | None:
    """Return what a key or a section is read as; None if it is wrong, which is added to the mistakes."""
    if place in {mistake.place for mistake in mistakes}:
        return None
    try:
        return read()
    except UserError as error:
        mistakes += [ValueMistake(place, line.removeprefix(place).removeprefix(":").strip()) for line in str(error).splitlines()]
    except OSError as error:  # a name that no file can have
        mistakes.append(ValueMistake(place, f"cannot be looked up: {error.strerror}. Give another name or path"))
    return None
