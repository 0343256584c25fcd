"""The description of a run, of fulltilt or of another system: the one record that the models of memory and time read.

Enters: a TOML file (`read`), or the fields themselves. Leaves: a frozen `RunDescription`. Guaranteed: nothing is loaded; an impossible
layout and an unknown key are refused with the remedy.

    [model]                       # shape: a name of tune/shapes.py, or a folder with a config.json
    shape = "Qwen2.5-7B"
    reference = true              # a reference model of the same size, resident; so may be critic and reward_model
    [hardware]
    gpus = "8xH100-80GB"          # or other hardware: with flops, hbm, host_link, gpu_link, network, memory_gb
    [train]
    backend = "megatron"          # or fsdp
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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from fulltilt.hardware import Accelerator, Cluster
from fulltilt.records import UserError
from fulltilt.shape import Recompute, Shape
from fulltilt.tune.constants import FULLTILT, VERL, SystemCosts
from fulltilt.tune.lengths import Lengths
from fulltilt.tune.shapes import named_shape

Backend = Literal["megatron", "fsdp"]
LAYOUT_WORDS = {
    "tp": "tensor", "pp": "pipeline", "vpp": "virtual", "vp": "virtual", "cp": "context", "sp": "sequence", "ulysses": "sequence",
    "usp": "sequence", "ep": "expert", "etp": "expert_tensor", "fsdp": "shard", "hsdp": "shard",
}  # fmt: skip
# Keys of a description that are fields of a `RunDescription`, and may be in [model] or in [train].
OF_RUN = (
    "backend", "entropy", "fused_head", "fused_rope", "offload_activations", "offload_grads", "offload_optimizer", "offload_params",
    "offload_reference", "old_logprobs", "reference",
)  # fmt: skip
MICRO_BATCHES = ("token_budget", "micro_batch", "forward_token_budget", "forward_micro_batch")  # keys of [train] about micro-batches
OF_MODEL: tuple[Role, ...] = ("critic", "reward_model")  # keys of [model] that add a model of the same size, laid out as the actor's
OF_TRAIN = ("layout", "offload", "recompute", "system", *MICRO_BATCHES)


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
        found = {name: int(size) for name, size in re.findall(r"([a-z]+)[\s_=:-]*(\d+)", text.lower())}
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
        together = self.layout.model_parallel
        if self.cluster.gpus % together:
            raise UserError(
                f"{self.name or 'layout'}: {self.cluster.gpus} GPUs cannot be divided into groups of {together}. Change the layout"
            )
        # Megatron may count the embedding and the head as layers where it divides them among stages.
        if self.layout.pipeline * self.layout.virtual > len(self.shape.layers) + 2:
            raise UserError(f"{self.name or 'layout'}: more pipeline stages than the model's {len(self.shape.layers)} layers. Use fewer")

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


# ---- TOML --------------------------------------------------------------------------------------------------------------------------------


def read(path: Path) -> RunDescription:
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read: {getattr(error, 'strerror', error)}. Give a TOML file as docs/planning.md shows it"
        ) from error
    return describe(given, str(path))


def describe(given: Mapping[str, Any], name: str = "description") -> RunDescription:
    """Return the description that the tables of a TOML file give."""
    known = {"model", "hardware", "train", "rollout", "batch", "lengths"}
    if unknown := given.keys() - known:
        raise UserError(f"{name}: unknown section {', '.join(sorted(unknown))}. Known are {', '.join(sorted(known))}")
    parts: dict[str, dict[str, Any]] = {section: section_of(given, section, name) for section in known}
    model, train, batch = parts["model"], parts["train"], parts["batch"]
    if "shape" not in model:
        raise UserError(f"{name}: model.shape is missing. Give a named shape or a folder with a config.json")
    budgets = {key: train.pop(key) for key in MICRO_BATCHES if key in train}
    offload = train.pop("offload", None)
    everything = ("offload_params", "offload_grads", "offload_optimizer")
    extra = dict.fromkeys(everything, bool(offload)) if offload is not None else {}
    added: list[Role] = [role for role in OF_MODEL if model.pop(role, False)]
    try:
        found = RunDescription(
            shape=named_shape(str(model.pop("shape"))),
            cluster=Cluster.of_figures(parts["hardware"], where=f"{name}: hardware"),
            lengths=Lengths(**checked(parts["lengths"], fields_of(Lengths), f"{name}: lengths")),
            layout=TrainLayout.parse(str(train.pop("layout", ""))),
            engine=EngineDescription(**checked(parts["rollout"], fields_of(EngineDescription), f"{name}: rollout")),
            batch=BatchDescription(**checked(batch, fields_of(BatchDescription), f"{name}: batch") | budgets),
            recompute=Recompute(train.pop("recompute", "none")),
            system={"verl": VERL, "fulltilt": FULLTILT}[train.pop("system", "verl")],
            name=name,
            **extra | checked(train, OF_RUN, f"{name}: train", OF_TRAIN) | checked(model, OF_RUN, f"{name}: model", ("shape", *OF_MODEL)),
        )
    except UserError:  # its message already says what is wrong
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{name}: {error} is not a possible value. Correct it") from error
    return replace(found, others=tuple(found.beside(role) for role in added))


def section_of(given: Mapping[str, Any], section: str, name: str) -> dict[str, Any]:
    found = given.get(section, {})
    if not isinstance(found, Mapping):
        raise UserError(f"{name}: {section} must be a section, with keys of its own")
    return dict(found)


def fields_of(record: type) -> tuple[str, ...]:
    return tuple(own.name for own in fields(record))


def checked(given: dict[str, Any], known: Iterable[str], where: str, taken: Iterable[str] = ()) -> dict[str, Any]:
    """Return the remaining keys of a section, and refuse unknown ones. `taken`: keys that the section may have too and that were already
    read."""
    if unknown := given.keys() - set(known):
        raise UserError(f"{where}: unknown key {', '.join(sorted(unknown))}. Known are {', '.join(sorted({*known, *taken}))}")
    return given
