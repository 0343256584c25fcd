"""Every key of a configuration, one row each: type, default, meaning, names in other systems, and when it has an effect.

Enters: nothing. Leaves: `Config` and its sections, frozen, and `KeyRow`, what a key's field says beside its type, default and meaning.
Guaranteed: torch is not imported. All else is read from these rows: the ledger and its aliases (`knobs`), error messages and rules
(`config`), and the reference page. A value is never converted silently ("64" is not a number), except verl's spelling of a choice, which
becomes ours (`KeyRow.spellings`).

To add a key: add its field here and the code that obeys it. A performance knob also has `section` and `changes`, and a proof in `proofs`.
The text below a key is its meaning; it ends with "`auto`: ..." or "Left out: ..." where the default needs words, and with "Note: ..." for
users of other systems.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from fulltilt.presets import NORMALISED_SUM, PRESETS, VERL_ESTIMATORS, VERL_LOSSES, VERL_NAMES, preset_for
from fulltilt.records import EngineName
from fulltilt.words import either, first_line, printable, shortened

MOST = 2**31 - 1  # the largest count: kernels, indices and other systems' settings hold it in 32 bits
Positive = Annotated[int, Field(ge=1, le=MOST)]
NotNegative = Annotated[int, Field(ge=0, le=MOST)]
GroupSize = Annotated[int, Field(ge=1, le=65536)]
Share = Annotated[float, Field(gt=0, le=1)]
# Beyond these float32 cannot hold the product with another number of its size, or the unit makes no sense.
Weight = Annotated[float, Field(ge=0, le=1_000_000)]
AboveZero = Annotated[float, Field(gt=0, le=1_000_000)]
Signed = Annotated[float, Field(ge=-1_000_000, le=1_000_000)]
LearningRate = Annotated[float, Field(gt=0, le=1000)]
Seconds = Annotated[float, Field(ge=0.001, le=365 * 24 * 3600)]
NotEmpty = Annotated[str, Field(min_length=1)]
Auto = Literal["auto"]
Count = Positive | Auto
Switch = bool | Auto
Recompute = Literal["auto", "none", "selective", "full"]
KLEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+"]
RewardKLEstimator = Literal["k1", "k2", "k3", "abs"]
Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
ImportanceLevel = Literal["token", "sequence", "token-normalized", "sequence-normalized", "bypass"]
Rejection = Literal[
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2",
    "seq_max_k3", "binary_kl",
]  # fmt: skip
if TYPE_CHECKING:
    AlgorithmName = str
else:
    AlgorithmName = Literal[tuple(PRESETS)]

# Sections of the ledger.
ROLLOUT = "Rollout"
BATCHES = "Batches"
TRAINING = "Training memory and speed"

VALIDATION_METRICS = ("val/", "val-core/", "val-aux/")  # how the names of metrics begin that only a validation has
METRICS = (  # how the others begin
    "actor/", "communication/", "critic/", "driver/", "memory_gib/", "memory_spread_gib/", "perf/", "prompt_length/", "ref/",
    "response_length/", "reward/", "reward_model/", "rollout/", "rollout_corr/", "sync/", "timing_per_token_ms/", "timing_s/", "train/",
)  # fmt: skip
VALIDATED_REWARDS = ("val/reward/mean", "val/prompts", "val/response_length/mean", "val/reward_errors")  # for data of any source
VALIDATED_LOSS = ("val/loss",)  # for SFT
REWARD_MODEL = "reward_model"
# Each file in reward/rules is a built-in reward: its name is known without importing it.
REWARDS = (*sorted(file.stem for file in (Path(__file__).parent / "reward" / "rules").glob("[!_]*.py")), REWARD_MODEL)


# ---- what a row says -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UsedIf:
    """When a key has an effect: while `holds` is true of the values of the keys in `reads`. Setting it at other times is an error. A key of
    [algorithm] that is left out has its preset's value."""

    reads: tuple[str, ...]  # a key without a dot is in the same section
    holds: Callable[..., bool]
    remedy: str  # what to do other than remove the key; `{section}` stands for the key's own
    required: bool = False  # where it has an effect, it must be set
    whole_section: bool = False  # elsewhere no key of the section may stand, not even one that is `auto`


def when(key: str, *values: Any, required: bool = False) -> UsedIf:
    """A key has an effect while another has one of these values; without values, while the other is above 0."""
    name, choices = key if "." in key else f"{{section}}.{key}", either([json.dumps(value) for value in values])
    remedy = f"set {name} above 0" if not values else f"set {name} {'=' if len(values) == 1 else 'to'} {choices}"
    if values in ((None,), ("auto",)):
        remedy = f"remove {name}"
    return UsedIf((key,), lambda seen: seen in values if values else bool(seen), remedy, required)


# What a path leads to: all but a folder must exist. A function is FILE.py:NAME; a table of weights has functions as its keys; sources is a
# table whose values are functions or such tables.
Names = Literal["", "model", "adapter", "file", "data", "folder", "function", "sources"]


@dataclass(frozen=True)
class KeyRow:
    """What a key's field says beside its type, default and meaning."""

    changes: str = ""  # the measurement that proves a knob; empty: the key is not a performance knob
    verl: tuple[str, ...] = ()  # full dotted names; one that ends in ".*" stands for every key below it
    chatlearn: tuple[str, ...] = ()
    values: Mapping[str, Mapping[Any, Any]] = field(default_factory=dict)  # last part of an alias -> our values for its, if they differ
    section: str = ""  # section of the ledger
    elsewhere: str = ""  # names in other systems of a key that is no knob: the last part, or the last two; `~` as for aliases
    spellings: Mapping[str, str] = field(default_factory=dict)  # verl's spellings of a value, which are accepted, and ours
    used_if: tuple[UsedIf, ...] = ()  # all of them
    names: Names = ""  # what the value is the path of
    free: bool = False  # may differ between a checkpoint and the run that resumes it
    note: str = ""  # as `Words.note`, where several keys share it


PREFIXES = {"MEGATRON.": "ARR.actor.megatron.override_transformer_config.", "ARR.": "actor_rollout_ref."}
MARKS: Mapping[str, Mapping[Any, Any]] = {"!": {True: False, False: True}, "~": {}}


def expanded(name: str) -> list[str]:
    """Names as a shell expands braces: `{actor,ref}.lr` is `actor.lr` and `ref.lr`."""
    before, brace, rest = name.partition("{")
    choices, _, after = rest.partition("}")
    return [before + choice + end for choice in choices.split(",") for end in expanded(after)] if brace else [name]


def row(default: Any = ..., changes: str = "", aliases: str = "", values: Mapping[str, Any] | None = None, **about: Any) -> Any:
    """The field of a key. `aliases`: verl's names, and after a bar ChatLearn's, with braces and the short forms of `PREFIXES`. A name with
    `!` has the opposite sense; the values of one with `~` mean something else. `about`: attributes of `KeyRow`, or of `Field`."""
    for short, whole in PREFIXES.items():
        aliases = aliases.replace(short, whole)
    theirs, others = ([each for name in system.split() for each in expanded(name)] for system in f"{aliases}|".split("|")[:2])
    marked = {name.lstrip("!~").rpartition(".")[2]: MARKS[name[0]] for name in theirs + others if name[0] in MARKS}
    own = {name: about.pop(name) for name in list(about) if name in KeyRow.__dataclass_fields__}
    if isinstance(used_if := own.get("used_if"), UsedIf):
        own["used_if"] = (used_if,)
    verl, chatlearn = (tuple(name.lstrip("!~") for name in names) for names in (theirs, others))
    found: Any = KeyRow(changes, verl, chatlearn, values={**marked, **(values or {})}, **own)
    return Field(default, json_schema_extra={"row": found}, **about)


def row_of(key: FieldInfo) -> KeyRow:
    extra = key.json_schema_extra
    found = extra.get("row") if isinstance(extra, dict) else None
    return found if isinstance(found, KeyRow) else KeyRow()


def why_invalid(error: Exception) -> str:
    """What is wrong with a document that someone else has written, in one line. Example: `cursor.epoch: Field required`."""
    if not isinstance(error, ValidationError):
        return first_line(error)
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False)
    used_if: ClassVar[tuple[UsedIf, ...]] = ()  # when its keys are used, all but those that these conditions read
    free: ClassVar[bool] = False  # all its keys may differ when a run is resumed

    @field_validator("*", mode="before")
    @classmethod
    def _our_spelling(cls, value: Any, info: ValidationInfo) -> Any:
        own = row_of(cls.model_fields[str(info.field_name)])
        if own.names:
            value = with_home(value, own.names)
        return own.spellings.get(value, value) if isinstance(value, str) else value


def with_home(given: Any, names: Names) -> Any:
    """The value of a key that names paths, with `~` and `~user` expanded. A user that does not exist stays as it is written."""
    if isinstance(given, str):
        return os.path.expanduser(given)
    if isinstance(given, list):
        return [with_home(each, names) for each in given]
    if isinstance(given, dict):
        return {name if names == "sources" else with_home(name, names): with_home(each, "function") for name, each in given.items()}
    return given


# ---- rows that several sections share --------------------------------------------------------------------------------------------------

_batch_number = partial(row, changes="nothing: it is part of the algorithm, and no tuner touches it", section=BATCHES)
_rollout = partial(row, section=ROLLOUT)
_KV_BLOCKS = "KV blocks; most samples decoded at once"
_training = partial(row, section=TRAINING)

_PACKING_NOTE = "ChatLearn's packing sets two knobs here: packing and dynamic batch. Its guide says it is on by default; its code says off."
_DYNAMIC_BATCH = "Fill micro-batches up to the token budget. Off: each has `micro_batch` samples."
_MICRO_BATCH = "Samples per micro-batch. Left out: not used, since `dynamic_batch` is on."
_PER_GPU = "Samples per GPU, used when dynamic_batch is off. verl's names without _per_gpu count over all GPUs and are deprecated."
_dynamic_batch = partial(row, True, "micro-batches are filled by tokens, not by samples", section=BATCHES, description=_DYNAMIC_BATCH)


def _micro_batch(aliases: str, note: str = "") -> Any:
    """verl's names without _per_gpu count over all GPUs."""
    over_all: dict[str, Any] = {f"{way}micro_batch_size": {} for way in ("", "ppo_", "log_prob_", "forward_")}
    about = {"used_if": when("dynamic_batch", False, required=True), "description": _MICRO_BATCH, "note": f"{_PER_GPU} {note}".strip()}
    return row(None, "samples of a micro-batch; micro-batch count", aliases, over_all, section=BATCHES, **about)


_token_budget = partial(
    row,
    "auto",
    "micro-batch count; peak memory",
    note="A hard cap on tokens per GPU; with sequence parallelism a micro-batch holds that many times the budget, as in verl.",
    section=BATCHES,
    used_if=when("dynamic_batch", True),
)
_packing = partial(_training, changes="pad tokens computed (0 when on)")
_recompute = partial(_training, changes="saved activation bytes; time", free=True)
_checkpointing = partial(
    _recompute,
    values={"enable_gradient_checkpointing": {True: "full", False: "none"}},
    note='enable_gradient_checkpointing is a switch: true is "full", false is "none".',
)
_activations = partial(
    _training, changes="activation bytes on the GPU between forward and backward; works together with recompute", free=True
)
_offload = partial(_training, changes="GPU bytes of that kind outside the phase that needs it", free=True)
_sharing = partial(_training, free=True)
_if_shared = partial(_sharing, used_if=when("shard", "full", "hybrid"))
_kl_estimator = partial(
    row,
    None,
    spellings={"kl": "k1", "mse": "k2", "low_var_kl": "k3", "kl+": "k1+", "mse+": "k2", "k2+": "k2", "low_var_kl+": "k3+"},
    note="verl's full has no equivalent here: it is not implemented there either.",
)
# In the reward an estimator has a value only.
_reward_kl_estimator = partial(
    _kl_estimator,
    spellings={"kl": "k1", "mse": "k2", "low_var_kl": "k3", "kl+": "k1", "mse+": "k2", "low_var_kl+": "k3"}
    | {f"{name}+": name for name in ("k1", "k2", "k3", "abs")},
)

_if_sampled = UsedIf(("algorithm.name",), lambda name: PRESETS[name].rollout, "choose an algorithm that samples responses and scores them")
_if_supervised = UsedIf(("algorithm.name",), lambda name: not PRESETS[name].rollout, 'set algorithm.name = "sft": others read prompts only')
_if_long_row = replace(_if_supervised, remedy='set algorithm.name = "sft". The length of sampled responses is rollout.max_new_tokens')
_if_critic = UsedIf(
    ("algorithm.name", "algorithm.advantage"),
    lambda name, advantage: preset_for(name, advantage).critic != "",
    'set algorithm.name = "ppo", which has a critic',
)
_if_recomputed = UsedIf(
    ("train.recompute", "critic.recompute"),
    lambda *recompute: not {"selective", "full"}.isdisjoint(recompute),
    'set train.recompute to "selective" or "full"',
)


_if_several = UsedIf(("cluster.workers", "cluster.nodes"), lambda workers, nodes: workers != 1 or nodes != 1, "set cluster.workers above 1")
_sequence = partial(_sharing, changes="tokens per rank in the layers = tokens / size", used_if=_if_several)
_divided = partial(_sharing, changes="parameter bytes of each worker", used_if=_if_several)
_if_apart = replace(
    _if_several,
    reads=("cluster.workers", "cluster.processes", "cluster.address"),
    holds=lambda workers, apart, address: workers != 1 or apart or address is not None,
)


def reward_weights(function: str | Mapping[str, float]) -> dict[str, float]:
    """A reward as a weighted sum, also for a single name: `"math"` -> `{"math": 1.0}`."""
    return {function: 1.0} if isinstance(function, str) else dict(function)


def rewards_named(function: str | Mapping[str, float], sources: Mapping[str, str | Mapping[str, float]]) -> set[str]:
    return {name for given in (function, *sources.values()) for name in reward_weights(given)}


_if_scored_by_model = UsedIf(
    ("reward.function", "reward.sources"), lambda *rewards: REWARD_MODEL in rewards_named(*rewards), 'set reward.function = "reward_model"'
)
_if_scored_by_function = UsedIf(
    ("function", "sources"), lambda *rewards: rewards_named(*rewards) != {REWARD_MODEL}, "name a function: the reward model calls none"
)
_calls_a_function = partial(row, used_if=_if_scored_by_function)


def _if_watched(rule: str) -> UsedIf:
    return UsedIf(("ignore",), lambda ignored: rule not in ignored, f'take "{rule}" out of health.ignore')


def _if_not_greedy(key: str, neutral: float) -> UsedIf:
    return UsedIf(("temperature", key), lambda temperature, value: temperature > 0 or value == neutral, "set eval.temperature above 0")


# ---- the keys --------------------------------------------------------------------------------------------------------------------------


class ModelConfig(Section):
    path: str = row(names="model", elsewhere="model.name model_name model_name_or_path", min_length=1)
    """Folder of a Hugging Face causal language model (safetensors), or a hub name when online."""
    revision: str | None = row(
        None, used_if=UsedIf(("path",), lambda path: not os.path.isdir(path), "give a hub name as model.path: a folder has no revisions")
    )
    """Branch, tag or commit of a hub name."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Leave this off unless you have read that code."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = row("auto", elsewhere="bf16")
    """Type of the parameters; master weights and moments are never below float32. `auto`: bfloat16 on CUDA, float32 on CPU."""
    chat_template: str | None = row(None, names="file")
    """File with a chat template that replaces the tokenizer's own."""


MEMORY = "memory:"  # begins names of rows that were given from Python, in place of a path to data
_HUB_DATASET = re.compile(
    r"(?P<repo>(?P<owner>[A-Za-z0-9][\w.-]*)/[\w.-]+)(/(?P<config>[\w.-]+))?(@(?P<revision>[\w.-]+))?(:(?P<split>[\w.-]+))?", re.ASCII
)


@dataclass(frozen=True)
class HubDataset:
    """A data set on the Hugging Face hub, as `data.train` names it: `owner/name[/config][@revision][:split]`."""

    repo: str
    config: str | None
    revision: str | None
    split: str | None


def hub_dataset(name: str) -> HubDataset | None:
    """What a name means on the hub; None if it is the path of a file or folder, or could only be a misspelled one: it ends like a file, or
    it begins with a folder that exists. A revision or a split says that the hub is meant."""
    match = _HUB_DATASET.fullmatch(name)
    if match is None or os.path.exists(name):
        return None
    path = name.partition(":")[0].partition("@")[0]
    explicit = match["revision"] or match["split"]
    if not explicit and (re.search(r"\.[A-Za-z]{2,8}$", path) or os.path.exists(match["owner"])):
        return None
    return HubDataset(match["repo"], match["config"], match["revision"], match["split"])


class DataConfig(Section):
    train: str | list[str] = row(names="data", elsewhere="train_files train_dataset dataset", min_length=1)
    """Data file (parquet in verl's layout, JSON lines, a JSON list, CSV; also with .gz), Hugging Face dataset folder, or a name on the hub:
    `owner/name[/config][@revision][:split]`. A list is read in order as one data set."""
    val: str | list[str] | None = row(None, names="data", elsewhere="val_files eval_dataset data.test data.validation")
    """Validation data, in the same formats. A name on the hub must say its split."""
    max_prompt_tokens: Positive = row(1024, elsewhere="max_prompt_length")
    """Prompts with more tokens than this are skipped; the number skipped is reported. Counted on the final token ids."""
    max_tokens: Positive | None = row(None, used_if=_if_long_row, elsewhere="~max_length ~max_seq_length")
    """SFT rows with more tokens than this, prompt and response together, are skipped; the number skipped is reported. Left out: a row may
    have as many tokens as the model has positions, and a longer one is an error."""
    prompt_key: str = "prompt"
    """Column with the prompt: a list of messages, or a string. `extra_info.question`: what the objects of a column have under a name."""
    response_key: str = row("response", used_if=_if_supervised)
    """Column with the response of an SFT row."""
    messages_key: str = row("messages", used_if=_if_supervised)
    """Column with a whole conversation, for SFT rows that have no prompt and response."""
    train_turns: Literal["all", "last"] = row("all", used_if=_if_supervised)
    """Which of the assistant's turns in a conversation SFT trains on."""
    apply_template: Literal["auto", "always", "never"] = "auto"
    """Put string prompts through the chat template as a user message. `auto`: messages always, strings never."""
    system: str | None = row(None, elsewhere="system_prompt")
    """System message put before every prompt that has none."""
    template_args: dict[str, Any] = Field(default_factory=dict)
    """Extra arguments of the chat template, e.g. `{ enable_thinking = false }`."""
    shuffle: bool = True
    """Reshuffle the data each epoch, using `run.seed` and the epoch number."""


class AlgorithmConfig(Section):
    name: AlgorithmName = row("grpo", elsewhere="adv_estimator", spellings=VERL_NAMES)
    """The algorithm: a preset of values for those keys of this section that are left out. Note: verl's other estimators are values of
    `advantage`, and its loss modes are values of `loss`."""
    prompts_per_step: Positive = _batch_number(
        64, aliases="data.train_batch_size | ~runtime_args.sample_per_episode", elsewhere="~per_device_train_batch_size ~batch_size"
    )
    """Prompts per step, over all devices. For SFT: rows per step. Note: Counted in prompts, over all devices. ChatLearn counts samples:
    divide sample_per_episode by num_inference_per_prompt."""
    samples_per_prompt: GroupSize = _batch_number(
        8,
        aliases="ARR.rollout.n | {runtime_args,models.policy}.num_inference_per_prompt",
        elsewhere="num_generations num_samples num_return_sequences group_size",
    )
    """Samples per prompt: the size of a group. SFT has none, and setting it there is an error."""
    minibatches_per_step: Positive = _batch_number(
        1, aliases="~{ARR.actor,critic}.ppo_mini_batch_size | ~runtime_args.train_global_batch_size"
    )
    """Mini-batches, which are optimizer steps, per rollout and epoch. Note: A number of mini-batches, not their size:
    data.train_batch_size / ppo_mini_batch_size in verl, sample_per_episode / train_global_batch_size in ChatLearn. It works with any number
    of devices; nothing must divide evenly."""
    epochs: Annotated[int, Field(ge=1, le=100)] = _batch_number(
        1, aliases="{ARR.actor,critic}.ppo_epochs | runtime_args.num_training_epoch", elsewhere="num_iterations"
    )
    """Number of passes over the samples of a step."""
    clip_low: float | None = row(None, elsewhere="clip_ratio clip_ratio_low epsilon", ge=0, le=1)
    """The probability ratio is clipped below at 1 - clip_low. docs/algorithms.md says what it bounds in other losses."""
    clip_high: Weight | None = row(None, elsewhere="clip_ratio clip_ratio_high epsilon epsilon_high")
    """The probability ratio is clipped above at 1 + clip_high. docs/algorithms.md says what it bounds in other losses."""
    dual_clip: Weight | None = None
    """Where the advantage is negative, the loss is bounded by this many times the advantage (must be above 1). With dppo_tv and dppo_kl:
    the largest ratio. 0 switches it off."""
    kl_coef: Weight | None = row(None, elsewhere="beta kl_loss_coef ~use_kl_loss")
    """Weight of the KL term against the reference role in the loss. 0: no such term."""
    kl_estimator: KLEstimator | None = _kl_estimator(elsewhere="kl_loss_type", used_if=when("kl_coef"))
    """Estimator of the KL term in the loss. k1: log p/q. k2: half its square. k3: q/p - 1 - log q/p. abs: the size of log p/q. k1+ and k3+:
    their value with the gradient of k2."""
    reward_kl_coef: Weight | None = row(None, elsewhere="kl_ctrl.kl_coef ~use_kl_in_reward")
    """Weight of the per-token KL penalty in the reward; the initial weight, if it is adaptive. 0: no penalty."""
    reward_kl_estimator: RewardKLEstimator | None = _reward_kl_estimator(elsewhere="kl_penalty", used_if=when("reward_kl_coef"))
    """Estimator of the KL penalty in the reward, as for `kl_estimator`."""
    reward_kl_target: AboveZero | None = row(None, used_if=when("reward_kl_coef"))
    """Makes the penalty adaptive: its weight rises while the mean KL per token is above this, and falls while it is below."""
    reward_kl_horizon: Positive | None = row(None, used_if=(when("reward_kl_coef"), when("reward_kl_target")))
    """How fast the weight adapts: the number of samples over which it can change by about a fifth of itself."""
    entropy_coef: Weight | None = row(None, elsewhere="entropy_coeff")
    """Weight of the entropy bonus in the loss."""
    aggregation: Aggregation | None = row(None, elsewhere="loss_agg_mode")
    """How the per-token losses of a mini-batch become one number. `seq-mean-token-sum-norm` divides each sample's sum by `length_norm`."""
    length_norm: Positive | None = row(None, used_if=when("aggregation", NORMALISED_SUM))
    """Divisor of `seq-mean-token-sum-norm`. Left out: `rollout.max_new_tokens`."""
    normalize_by_std: bool | None = row(None, elsewhere="scale_rewards")
    """Divide a group's advantages by the standard deviation of its rewards."""
    whiten: bool | None = None
    """Scale the advantages of a step's trained tokens to mean 0 and standard deviation 1."""
    gamma: float | None = Field(default=None, gt=0, le=1)
    """Discount of later rewards, per token."""
    gae_lambda: float | None = row(None, elsewhere="lam", ge=0, le=1)
    """Lambda of generalised advantage estimation: 0 trusts the critic, 1 the rewards."""
    value_clip: Weight | None = None
    """The critic's new values are clipped to this distance from the old ones. 0 switches it off."""
    critic_warmup: NotNegative | None = row(None, elsewhere="critic_warmup")
    """Number of steps at the start of the run in which only the critic is updated."""
    dynamic_sampling: bool | None = row(None, elsewhere="filter_groups")
    """Leave out groups whose rewards are all equal, and keep sampling until the step is full; surplus groups are used in the next step."""
    prompts_per_round: Positive | None = _batch_number(None, aliases="data.gen_batch_size", used_if=when("dynamic_sampling", True))
    """Prompts sampled at a time under dynamic sampling. Left out: `prompts_per_step`."""
    max_rounds: Annotated[int, Field(ge=1, le=10_000)] | None = row(None, used_if=when("dynamic_sampling", True))
    """Largest number of sampling rounds in a step; after that the step uses the groups it has."""
    overlong_buffer: NotNegative | None = None
    """Responses that end within this many tokens of `rollout.max_new_tokens` are penalised, more so the longer they are. 0: no penalty."""
    overlong_penalty: AboveZero | None = row(None, used_if=when("overlong_buffer"))
    """Penalty, taken off the reward, of a response of `rollout.max_new_tokens` tokens."""
    advantage: str | None = row(None, elsewhere="adv_estimator", names="function", spellings=VERL_ESTIMATORS)
    """In place of the preset's advantage, a built-in one by its name, or a function of your own as `FILE.py:NAME` (docs/algorithms.md)."""
    loss: str | None = row(None, elsewhere="loss_mode", names="function", spellings=VERL_LOSSES)
    """In place of the preset's loss, a built-in one by its name, or a function of your own as `FILE.py:NAME` (docs/algorithms.md)."""
    reward_parts: dict[NotEmpty, Signed] | None = row(
        None,
        elsewhere="~gdpo_reward_keys ~gdpo_reward_weights",
        used_if=UsedIf(("advantage",), lambda chosen: chosen == "gdpo", 'set {section}.advantage = "gdpo"', required=True),
    )
    """With `advantage = "gdpo"`: the parts of the reward that are compared within their group one by one, and the weight of each; `score`
    is the whole reward."""
    cov_share: Share | None = row(None, elsewhere="clip_cov_ratio kl_cov_ratio")
    """With the losses clip_cov and kl_cov: the share of a mini-batch's tokens that is left out or penalised; at least one token is."""
    cov_low: Signed | None = row(None, elsewhere="clip_cov_lb")
    """With clip_cov: tokens are left out from those whose covariance of advantage and log-prob is above this."""
    cov_high: Signed | None = row(None, elsewhere="clip_cov_ub")
    """With clip_cov: and below this."""
    cov_kl_coef: Weight | None = row(None, elsewhere="ppo_kl_coef")
    """With kl_cov: weight of the penalty, which is the size of the token's log ratio."""
    tau_pos: AboveZero | None = row(None, elsewhere="tau_pos")
    """With sapo: how sharply the gate closes as the ratio leaves 1, where the advantage is positive."""
    tau_neg: AboveZero | None = row(None, elsewhere="tau_neg")
    """With sapo: the same where the advantage is not positive."""
    importance_cap: Weight | list[Weight] | None = row(
        None,
        elsewhere="~rollout_is_threshold ~tis_imp_ratio_cap",
        used_if=UsedIf(("importance_level",), lambda level: level != "bypass", "set {section}.importance_level to another level"),
    )
    """Upper limit of the importance weight between trainer and rollout log-probs. 0 switches the weight off. Two numbers: weights outside
    of them are 0. Note: verl writes two bounds as one text, 0.5_2.0 for example."""
    importance_level: ImportanceLevel | None = row(
        None,
        elsewhere="~rollout_is ~rollout_is_batch_normalize ~bypass_mode",
        used_if=UsedIf(
            ("importance_cap", "importance_level"),
            lambda cap, level: bool(cap) or level == "bypass",
            "set {section}.importance_cap above 0",
        ),
    )
    """What has an importance weight: each token, or each sequence, which is a whole sample (the product over its tokens). `-normalized`:
    weights are divided by their mean over the step. `bypass`: no weight; the engine's log-probs take the place of the old ones, so that the
    ratio of the loss is the correction."""
    rejection: Rejection | list[Rejection] | None = row(
        None, elsewhere="~rollout_rs", spellings={"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
    )
    """Tokens, or samples, that are not trained on because trainer and engine differ too much; several criteria must all be met. In the
    names, r is the trainer's probability over the engine's; k1 is -log r, k2 half its square, k3 r - 1 - log r; `seq_` takes their sum,
    mean or largest over a sample. Note: verl writes several as one text with commas. Its token, sequence and geometric are token_k1,
    seq_sum_k1 and seq_mean_k1."""
    rejection_bounds: AboveZero | list[AboveZero | list[AboveZero]] | None = row(
        None,
        elsewhere="~rollout_rs_threshold",
        used_if=UsedIf(("rejection",), lambda names: names is not None, "set {section}.rejection", required=True),
    )
    """What is kept: for k1 the ratios exp(k1) from a lower to an upper bound, or one number u for 1/u to u; for others up to a number. With
    a list of criteria, one number for all or a list with an entry for each. Note: verl writes 0.5_2.0 for two bounds, and commas between
    criteria. As there, the bounds of k1 are those of 1/r."""


class RolloutConfig(Section):
    used_if = (_if_sampled,)

    max_new_tokens: Positive = row(256, elsewhere="max_completion_length max_response_length ~max_length")
    """Largest number of tokens in a response."""
    temperature: float = row(1.0, elsewhere="temp ~do_sample", ge=0)
    """Sampling temperature, also of the trainer's log-probs: 0.0001 to 10000, or 0 (greedy), which is refused for training."""
    top_p: Share = 1.0
    """Nucleus sampling. The trainer does not apply it: below 1 the run warns."""
    top_k: NotNegative = 0
    """Sample among the k most likely tokens; 0: all. The trainer does not apply it: above 0 the run warns."""
    stop: list[NotEmpty] = row([], elsewhere="stop_strings stop_sequences")
    """Strings that end a response, also across token borders. The tokens that complete one stay in the sample; its text ends before it."""
    engine: EngineName = _rollout("native", "the engine that generates", "~ARR.rollout.name | ~runtime_args.rollout_backend")
    """The engine that generates: `native`, or `hf`, transformers' own `generate`, which is slow, keeps a second copy of the model and runs
    no adapters. Note: vllm, sglang, trtllm and tgi are not built in this version."""
    kv_bytes: Annotated[int, Field(ge=1, le=10**15)] | Auto = _rollout("auto", _KV_BLOCKS, used_if=when("memory_fraction", "auto"))
    """Bytes of the KV cache; on CUDA, more than is free beside what decoding needs is an error. `auto`: the memory measured free, less a
    reserve. Note: The same memory as rollout.memory_fraction, in bytes: set one of the two."""
    memory_fraction: Share | Auto = _rollout(
        "auto", _KV_BLOCKS, "~ARR.rollout.gpu_memory_utilization | ~models.policy.gpu_memory_utilization"
    )
    """Share of the device memory free at start that becomes KV cache; on CUDA, a share that leaves too little for decoding is an error.
    Not together with `kv_bytes`. `auto`: the memory measured free, less a reserve. Note: gpu_memory_utilization is a share of the GPU's
    total memory for the whole instance in vLLM from 0.7 on, and of free memory for weights and KV cache in SGLang. Here it is the share of
    the memory free at start that becomes KV cache."""
    block_tokens: Positive = _rollout(16, "samples decoded at once where the KV cache is short: a sample's last block is partly empty")
    """Tokens per KV block."""
    tensor_parallel: Count = _rollout(
        "auto",
        "parameter bytes and KV heads of each worker; number of groups that sample",
        "ARR.rollout.tensor_{model_,}parallel_size | models.policy.tensor_model_parallel_size",
        used_if=UsedIf(
            ("cluster.workers", "cluster.nodes"), lambda workers, nodes: workers != 1 or nodes != 1, "set cluster.workers above 1"
        ),
    )
    """Neighbouring workers that sample together, each with a part of every layer and of the KV cache. It divides the number of workers and
    the model's heads. Another number than `train.tensor_parallel` takes a copy of the actor, divided so, which is brought up to date after
    each update. `auto`: that of `train.tensor_parallel` where no copy is needed for it and models, optimizer and a useful KV cache fit on
    a device; else the least with which they do, within a machine; on a CPU that of `train.tensor_parallel`. Note: tensor_parallel_size is
    the guides' spelling; verl's key is tensor_model_parallel_size."""
    expert_parallel: Count = _rollout(
        "auto",
        "experts of each worker that samples, and the width of their products",
        "ARR.rollout.expert_parallel_size",
        used_if=(_if_several, UsedIf(("tensor_parallel",), lambda size: size != 1, "set rollout.tensor_parallel above 1")),
    )
    """Of the workers that sample together (`tensor_parallel`), how many divide the experts of every layer among themselves: all of them, so
    that each has some experts whole, or 1: each has a part of every expert. It divides the number of experts. Another cut than that of the
    actor (`train.expert_parallel` with `train.tensor_parallel`) takes a copy of it. `auto`: as the actor, where equally many workers divide
    its layers; otherwise all of them where they divide the number of experts, which keeps products wide."""
    max_seqs: Count = _rollout("auto", "samples decoded at once", "ARR.rollout.max_num_seqs | models.policy.generation_batch_size")
    """Most samples decoded at once, as far as the KV cache holds them. `auto`: all samples of a step (`algorithm.prompts_per_step` times
    `algorithm.samples_per_prompt`), at most 1024 (256 on CPU)."""
    max_batched_tokens: Count = _rollout(
        "auto", "tokens of a prefill pass", "ARR.rollout.max_num_batched_tokens | models.policy.max_num_batched_tokens"
    )
    """Most tokens in a prefill pass; `max_seqs` bounds decode passes. `auto`: 16384 on CUDA, down to 2048 where the pass would leave too
    little for the KV cache; 4096 on CPU; or `max_seqs` if that is more."""
    chunked_prefill: bool = _rollout(True, "longest decode stall during prefill", "ARR.rollout.enable_chunked_prefill")
    """Split long prompts over several passes, with decoding in between. Off: a prompt is prefilled in one pass, if necessary alone."""
    prefix_sharing: bool = _rollout(True, "prefilled tokens; cache hit rate", "ARR.rollout.enable_prefix_caching")
    """Prefill a group's prompt once and share its blocks. Prompts of other groups with the same beginning share its full blocks, and a
    preempted sample reuses those of its blocks that are still in the cache."""
    cuda_graphs: Switch = _rollout("auto", "kernel launches per decode step", "!ARR.rollout.enforce_eager | !models.policy.enforce_eager")
    """Decode by replaying captured CUDA graphs, so that the host launches no kernels during a step. `true` is an error where no graph can
    hold the model. `auto`: on for CUDA, where a graph can hold the model and `train.offload_params` does not move what the engine reads.
    Note: enforce_eager has the opposite sense: enforce_eager = true is cuda_graphs = false."""
    release_memory: Switch = _rollout(
        "auto",
        "bytes held by the engine during the update",
        "ARR.rollout.free_cache_engine | ~{,models.policy.}free_gpu_memory models.policy.free_gpu_memory.*",
    )
    """Free the KV cache between rollouts, for the update. Off: it is kept, and an automatic size is smaller. `auto`: on."""
    log_stats: bool = _rollout(
        True,
        "log lines with running, waiting, KV use, hit rate, preemptions, tokens/s and latency percentiles; the metrics beyond the counts",
        "!ARR.rollout.disable_log_stats",
        free=True,
    )
    """Engine statistics: a log line every 10 seconds of generating, tokens per second and latencies in the metrics. Off: only counts, in
    the metrics. Note: disable_log_stats has the opposite sense: disable_log_stats = false is log_stats = true."""


class RewardConfig(Section):
    used_if = (_if_sampled,)

    function: str | dict[str, Signed] = row(
        "gsm8k", names="function", elsewhere="~custom_reward_function.name ~custom_reward_function.path ~reward_funcs ~reward_fn"
    )
    """A built-in reward (docs/rewards.md), such as `gsm8k` or `math`; `reward_model`; or `FILE.py:NAME` for your own, which scores one
    sample or a batch; verl's signature is accepted. A table of names and weights is their weighted sum:
    `{ math = 1.0, "style.py:short" = 0.2 }`."""
    sources: dict[str, str | dict[str, Signed]] = row({}, names="sources")
    """Another function (or weighted sum) for some values of a row's `data_source`."""
    timeout_s: Seconds = _calls_a_function(10.0, free=True)
    """Time limit of one call. A call that exceeds it is killed (cancelled, if it is `async`), counted and scored by `on_error`."""
    workers: Annotated[int, Field(ge=1, le=1024)] | Auto = _calls_a_function("auto", free=True)
    """Reward processes. `auto`: one per core."""
    concurrency: Annotated[int, Field(ge=1, le=4096)] | Auto = _calls_a_function("auto", free=True)
    """Calls of `async def` functions in flight at once; they share one process. `auto`: 32."""
    retries: Annotated[int, Field(ge=0, le=100)] = _calls_a_function(0, free=True)
    """How often a call that failed or timed out is tried again, after 0.5 s, then 1 s, 2 s and so on up to 30 s."""
    memory_gb: float = _calls_a_function(4.0, ge=0.1, le=1_000_000)
    """Address space of one reward process; beyond it a call fails with MemoryError."""
    on_error: Literal["exclude", "score"] = "exclude"
    """A sample whose reward crashed or timed out: `exclude` leaves it out of batch and baseline, `score` gives it `error_score`."""
    error_score: Signed = row(0.0, used_if=when("on_error", "score"))
    """The reward of a failed call under `on_error = "score"`."""
    args: dict[str, Any] = _calls_a_function({})
    """Extra keyword arguments of your own function."""
    env: list[NotEmpty] = _calls_a_function([], free=True)
    """Environment variables that reward processes get beside paths, locale, proxies and devices, such as an API key, by name."""
    sandbox: bool = _calls_a_function(True, free=True)
    """Reward functions cannot signal the trainer or write into `run.dir`, where the kernel can prevent it (docs/rewards.md)."""


class TrainConfig(Section):
    lr: LearningRate = row(1e-6, elsewhere="learning_rate")
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = row("constant", elsewhere="lr_scheduler_type")
    """Learning rate after the warm-up: constant, or falling to `min_lr_ratio` of the peak at the run's last step."""
    warmup_steps: NotNegative = row(0, elsewhere="~warmup_ratio")
    """Optimizer steps over which the learning rate rises from 0."""
    min_lr_ratio: float = row(0.0, used_if=when("schedule", "linear", "cosine"), ge=0, le=1)
    """Final learning rate of the linear and cosine schedules, as a share of `lr`."""
    weight_decay: float = Field(default=0.0, ge=0, le=1000)
    """Decoupled weight decay, on matrices only."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(default=(0.9, 0.999), strict=False)
    """AdamW's betas."""
    eps: float = Field(default=1e-8, ge=1e-30, le=1)
    """AdamW's epsilon."""
    clip_grad: Weight = row(1.0, elsewhere="grad_clip max_grad_norm")
    """Largest global gradient norm; 0 switches clipping off."""
    fused_layers: Switch = _training(
        "auto",
        "kernels per layer; memory; never two owners of one forward",
        "{ARR.,}model.use_liger {ARR.model.,training.,}use_liger_kernel",
    )
    """Run each layer with few kernels: one matrix product for queries, keys and values, one for gate and up, and one kernel for each norm,
    rotary embedding and gated product. Rollout and update run the same layers; with `shard` "full" or "hybrid", passes and updates compute
    queries, keys, values, gate and up one by one. `auto`: on for CUDA, where triton is installed, the model family is known, values and
    gradients agree with those of transformers, and `compile` is not on. Note: For SFT and RL, with kernels of our own. use_liger_kernel is
    one guide's spelling; verl's key is use_liger."""
    balance: bool = row(
        True, "spread of token cost across workers", "trainer.balance_batch", section=BATCHES, free=True, used_if=_if_several
    )
    """Deal micro-batches to workers by what they cost, so that all take about as long. Off: in turn."""
    shard: Literal["auto", "optimizer", "full", "hybrid"] = _sharing(
        "auto",
        "parameter, gradient and optimizer bytes of each worker",
        "ARR.actor.strategy critic.strategy",
        values={"strategy": {"fsdp": "full", "fsdp2": "full"}},
    )
    """What several workers share out among themselves. "optimizer": master weights and moments; each worker has all parameters, and its
    rollout engine reads them. "full": parameters and gradients too (FSDP2), for all roles; where a run samples, each worker has a second,
    whole copy of the actor in the type of `model.dtype` for its rollout engine. "hybrid": as "full", within groups of `shard_size` workers,
    which all have the same. Results are the same but for rounding. `auto`: "optimizer" where that leaves a fifth of each GPU free, else
    "hybrid" within machines, else "full"; on a CPU "optimizer". Note: verl's fsdp and fsdp2 are "full"."""
    shard_size: Positive | None = _sharing(
        None,
        "parameter bytes of each worker; bytes summed over groups",
        "ARR.actor.fsdp_config.fsdp_size critic.{model.,}fsdp_config.fsdp_size",
        used_if=when("shard", "hybrid", required=True),
    )
    """Workers of a group, with `shard` "hybrid". It divides the number of workers; with `cluster.roles`, that of the actor's workers, and
    of every role's that has more workers than a group. Left out: not used, since `shard` is another. Note: verl's -1, all workers, is
    `shard` "full"."""
    reshard_after_forward: bool = _if_shared(
        True,
        "gathers of a micro-batch; whole parameters between forward and backward",
        "ARR.actor.fsdp_config.reshard_after_forward critic.{model.,}fsdp_config.reshard_after_forward",
    )
    """Give a layer's gathered parameters back after its forward pass and gather them again for its backward pass. Off: they stay, which
    takes the memory of the whole model during a micro-batch and saves a gather for each layer."""
    forward_prefetch: bool = _if_shared(
        True,
        "order of gathers and layers",
        "ARR.actor.fsdp_config.forward_prefetch critic.{model.,}fsdp_config.forward_prefetch",
    )
    """Begin to gather a layer's parameters before the layer ahead of it computes. Off: when its own turn comes."""
    sequence_parallel: Count = _sequence(
        "auto",
        aliases="ARR.actor.{,fsdp_config.}ulysses_sequence_parallel_size training.{sequence_parallel,ulysses_degree} ulysses_degree "
        "| {models.policy_trainer.,}ulysses_sequence_parallel_size",
    )
    """Workers that compute a micro-batch together, each a part of its tokens, except in attention, where each has all tokens and a part of
    the heads (Ulysses): for samples whose activations do not fit on one device. It divides the number of workers and of the model's heads.
    A micro-batch then has so many times the token budget. `auto`: 1; on CUDA, where the longest sample may have more than 8192 tokens, the
    least with which it fits into a worker's memory and into a token budget that is given, and with which no worker is left without a
    sample. Note: training.sequence_parallel and ulysses_degree are one guide's spellings, not verl keys."""
    tensor_parallel: Count = _sharing(
        "auto",
        "parameter bytes of each worker",
        "ARR.actor.megatron.tensor_model_parallel_size | models.policy_trainer.tensor_model_parallel_size",
        used_if=_if_several,
    )
    """Neighbouring workers that hold one part each of every layer's matrices, and compute each layer together: some heads, columns and
    tokens of the vocabulary each, for models that do not fit on one device with gradients, optimizer and KV cache. It divides the number of
    workers, the model's heads and the width of its feed-forward layers. Each micro-batch and prompt goes to all of them; what `shard` and
    `sequence_parallel` share out, workers with the same part do. For all roles that have no size of their own. `auto`: 1 where the run fits
    on the devices as `shard` shares it out, or with experts that are divided; else the least with which it does, within a machine; on a CPU
    1. Note: The guides' rule of thumb is about 4 billion parameters per GPU."""
    expert_parallel: Count = _sharing(
        "auto",
        "parameter bytes of each worker",
        "ARR.actor.megatron.expert_model_parallel_size | models.policy_trainer.expert_model_parallel_size",
        used_if=_if_several,
    )
    """Neighbouring workers that divide the experts of every layer among themselves, and send tokens to their experts: for
    mixture-of-experts models whose experts do not fit on one device in an update. Each worker computes micro-batches of its own. It divides
    the number of workers and of experts. Rollouts have all experts on every worker, or what `rollout.tensor_parallel` and
    `rollout.expert_parallel` say. With `shard` "optimizer" or "full". With `tensor_parallel` it is 1 or the same number: then workers that
    compute a layer together have some of its experts whole, instead of a part of every one, and send nothing in addition. `auto`: 1
    where the run fits on the devices as `shard` shares it out, else the least with which it does. Where `auto` divides layers instead, it
    is the same number if that of experts allows it. With a `tensor_parallel` that is given, and on a CPU, 1."""
    compile: Switch = _training("auto", "kernels per layer; step time", "ARR.actor.{,fsdp_config.}use_torch_compile")
    """Run the layers through torch.compile in passes over packed samples (updates, log-probs, values), after checking that values and
    gradients agree. Rollout runs them uncompiled. `auto`: off."""
    packing: bool = _packing(True, aliases="ARR.model.use_remove_padding | {models.policy_trainer.,}packing")
    """Pack samples side by side, for the actor and the reference role. Off: each sample is padded to the longest of its micro-batch, and
    padding counts towards the token budget; this is to show what packing gains. Note: ChatLearn's packing sets two knobs here: packing and
    dynamic batch. Its guide says it is on by default; its code says off."""
    recompute: Recompute = _checkpointing(
        "auto",
        aliases="ARR.model.enable_gradient_checkpointing MEGATRON.recompute_granularity | models.policy_trainer.recompute_granularity",
        elsewhere="gradient_checkpointing",
    )
    """Which activations are recomputed in the backward pass instead of being kept. "selective": all cheap ones, which are all but matrix
    products and attention. "full": whole layers. `auto`: the least with which a micro-batch is estimated to fit; none on CPU."""
    recompute_layers: Count = _recompute("auto", aliases="MEGATRON.recompute_num_layers", used_if=_if_recomputed)
    """With `recompute_method` "block": recompute only the first N layers; the others keep all activations. With "uniform": recompute all
    layers in groups of N, keeping only the input of each group. For roles whose `recompute` is "selective" or "full". `auto`: all layers,
    one by one."""
    recompute_method: Literal["block", "uniform"] = _recompute(
        "block",
        aliases="MEGATRON.recompute_method",
        used_if=(_if_recomputed, UsedIf(("recompute_layers",), lambda layers: layers != "auto", "set train.recompute_layers")),
    )
    """What `recompute_layers` counts, as in Megatron."""
    offload_activations: Switch = _activations("auto", aliases="ARR.model.enable_activation_offload")
    """Keep activations on the host until the backward pass, with `recompute` or alone. `auto`: on where recompute does not suffice."""
    offload_params: Switch = _offload(
        "auto",
        aliases="ARR.actor.{fsdp_config.param_offload,fsdp_config.offload_policy,megatron.param_offload} "
        "| {,models.policy_trainer.}free_gpu_memory.offload_weights",
    )
    """Keep the actor's parameters on the host while another role works. Not together with CUDA graphs, unless rollouts read a copy, because
    workers share out parameters (`train.shard`) or divide them in another way than in rollouts: then they are on the host in rollouts too.
    `auto`: off. Note: verl's offload_policy streams each layer from the host in every pass; here a role's parameters come once for each of
    its phases."""
    offload_optimizer: Switch = _offload(
        "auto",
        aliases="ARR.{actor.fsdp_config,actor.megatron,ref.megatron}.optimizer_offload "
        "| {,models.policy_trainer.}free_gpu_memory.offload_optimizer_states",
    )
    """Keep master weights and moments on the host; they pass through the device in pieces when the optimizer steps. `auto`: on where
    parameters, gradients and optimizer would leave less than a fifth of the device free. Note: The reference role has no optimizer: verl's
    key of that name there does nothing."""
    offload_grads: Switch = _offload(
        "auto", aliases="ARR.{actor,ref}.megatron.grad_offload | {,models.policy_trainer.}free_gpu_memory.free_grad_buffers"
    )
    """Hold memory for gradients, of actor and critic, only from the first micro-batch of an optimizer step to its end. `auto`: as
    `offload_optimizer`. Note: verl reads grad_offload nowhere. Between updates gradients are zero, so they are not moved: their memory is
    freed."""
    fused_head: bool = _training(True, "largest temporary of the head", "ARR.model.{use_fused_kernels,fused_kernel_options.impl_backend}")
    """Compute log-probs and entropy, forward and backward, without holding the logits of a whole micro-batch. Off: with them, in
    float32. Note: There is one implementation for each device: fused_kernel_options.impl_backend has no counterpart."""
    entropy_chunk: Count = _training(
        "auto", "largest temporary of the entropy, on every path", "~ARR.actor.{,fsdp_config.}entropy_from_logits_with_chunking"
    )
    """Most tokens whose entropy is computed at a time; where the head is fused this holds for log-probs too, within a fixed memory limit.
    `auto`: as many tokens as a fixed memory limit allows; all where the head is not fused. Note: A number of tokens; verl's key is a
    switch."""
    entropy_recompute: bool = _training(True, "bytes saved for the entropy's backward", "ARR.actor.{,fsdp_config.}entropy_checkpointing")
    """Recompute the entropy in the backward pass. Off: keep what its gradient needs, which is the softmax of all tokens, or their logits
    in float32 where the head is fused. For algorithms with an entropy bonus."""
    head_recompute: Switch = _training("auto", "bytes saved for the head's backward")
    """Recompute the logits of the fused head in the backward pass. Off: the logits of a whole micro-batch are kept until then, in float32,
    which saves one of the head's four matrix products. `auto`: off on CUDA, where a micro-batch is estimated to fit with them and without
    any other recompute or offload of activations; else on. Note: For the fused head; the other one keeps its logits in any case."""


class ActorConfig(Section):
    dynamic_batch: bool = _dynamic_batch(
        aliases="ARR.{actor.,rollout.log_prob_}use_dynamic_bsz {ARR.actor.,training.,}use_dynamic_batchsize "
        "| {models.policy_trainer.,}packing",
        note=f"use_dynamic_batchsize is one guide's spelling; verl's key is use_dynamic_bsz. {_PACKING_NOTE}",
    )
    micro_batch: Positive | None = _micro_batch(
        "ARR.{actor.ppo,rollout.log_prob}_micro_batch_size{_per_gpu,} | {runtime_args,models.policy_trainer}.train_micro_batch_size "
        "models.policy_trainer.generation_batch_size"
    )
    token_budget: Count = _token_budget(
        aliases="ARR.actor.ppo_max_token_len_per_gpu | models.policy_trainer.max_token_in_packing", elsewhere="~per_device_train_batch_size"
    )
    """Most tokens in a micro-batch of an update; a longer sample gets a micro-batch of its own. The usual rule for setting it by hand is
    at least twice prompt and response. `auto`: 8192 on CPU; on CUDA 16384, fewer where they do not fit even with full recompute and offload
    of activations, and for models below about 500 million parameters up to 65536 where they fit well, so that the device does not wait for
    the host; `run.probe` sizes it by measurement."""
    forward_token_budget: Count = _token_budget(
        aliases="ARR.rollout.log_prob_max_token_len_per_gpu | models.policy_trainer.max_token_in_packing"
    )
    """Most tokens in a micro-batch without gradients. `auto`: twice the token budget, since nothing is kept for a backward pass."""


class RefConfig(Section):
    used_if = (
        _if_sampled,
        UsedIf(
            ("algorithm.kl_coef", "algorithm.reward_kl_coef"),
            lambda *weights: any(weights),
            "set algorithm.kl_coef or algorithm.reward_kl_coef above 0: without a KL there is no reference role",
        ),
    )

    path: str | None = row(None, names="model")
    """Model of the reference role. Left out: `model.path` as it was at the start of the run."""
    offload_params: Switch = _offload(
        "auto", aliases="ARR.ref.{fsdp_config,megatron}.param_offload | models.ref_policy.free_gpu_memory.offload_weights"
    )
    """Keep the reference role's parameters on the host while another role works. `auto`: on where the parameters and gradients of all
    roles would leave less than a fifth of the device free."""
    entropy_chunk: Count = _training(
        "auto",
        "largest temporary of the head",
        "~ARR.ref.{,fsdp_config.}entropy_from_logits_with_chunking",
        used_if=when("train.fused_head", True),
    )
    """Most tokens whose log-probs are computed at a time. The reference role computes no entropy. `auto`: as many tokens as a fixed memory
    limit allows. Note: A number of tokens; verl's key is a switch."""
    dynamic_batch: bool = _dynamic_batch(aliases="ARR.ref.log_prob_use_dynamic_bsz | models.ref_policy.packing", note=_PACKING_NOTE)
    micro_batch: Positive | None = _micro_batch("ARR.ref.log_prob_micro_batch_size{_per_gpu,} | models.ref_policy.generation_batch_size")
    forward_token_budget: Count = _token_budget(aliases="ARR.ref.log_prob_max_token_len_per_gpu | models.ref_policy.max_token_in_packing")
    """Most tokens in a micro-batch. `auto`: the actor's; with a `path` of its own, not enlarged for a small actor."""
    sequence_parallel: Count | None = _sequence(
        None, aliases="ARR.ref.{,fsdp_config.}ulysses_sequence_parallel_size | models.ref_policy.ulysses_sequence_parallel_size"
    )
    """As `train.sequence_parallel`. Left out: as in `[train]`."""
    tensor_parallel: Positive | None = _divided(
        None, aliases="ARR.ref.megatron.tensor_model_parallel_size | models.ref_policy.tensor_model_parallel_size"
    )
    """As `train.tensor_parallel`, for the reference role's model, unless that is the actor's (`lora.rank`). Left out: as in `[train]`, or 1
    with an `expert_parallel` of its own."""
    expert_parallel: Positive | None = _divided(
        None, aliases="ARR.ref.megatron.expert_model_parallel_size | models.ref_policy.expert_model_parallel_size"
    )
    """As `train.expert_parallel`, for the reference role's model, unless that is the actor's (`lora.rank`). Left out: as in `[train]`, or 1
    with a `tensor_parallel` of its own."""


class CriticConfig(Section):
    used_if = (_if_critic,)

    path: str | None = row(None, names="model")
    """Model that the critic starts from: a language model (gets a value head) or reward model (keeps its head). Left out: `model.path`."""
    lr: LearningRate = 1e-5
    """Peak learning rate of the critic. Optimizer settings that are not here are those of `[train]`."""
    schedule: Literal["constant", "linear", "cosine"] | None = row(None)
    """As `train.schedule`. Left out: as in `[train]`."""
    warmup_steps: NotNegative | None = row(None)
    """As `train.warmup_steps`. Left out: as in `[train]`."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] | None = row(None)
    """As `train.min_lr_ratio`, of `critic.lr`. Left out: as in `[train]`."""
    weight_decay: Annotated[float, Field(ge=0, le=1000)] | None = row(None)
    """As `train.weight_decay`. Left out: as in `[train]`."""
    clip_grad: Weight | None = row(None)
    """As `train.clip_grad`. Left out: as in `[train]`."""
    packing: bool | None = _packing(None, aliases="critic.model.use_remove_padding")
    """Pack samples side by side. Left out: as in `[train]`."""
    recompute: Recompute | None = _checkpointing(None, aliases="critic.model.enable_gradient_checkpointing")
    """As `train.recompute`; `recompute_layers` and `recompute_method` are those of `[train]`. Left out: as in `[train]`."""
    offload_activations: Switch | None = _activations(None, aliases="critic.model.enable_activation_offload")
    """As `train.offload_activations`. Left out: as in `[train]`."""
    offload_params: Switch | None = _offload(None, aliases="critic.model.fsdp_config.param_offload")
    """Keep the critic's parameters on the host while another role works; "auto" is as for `ref`. Left out: as in `[train]`."""
    offload_optimizer: Switch | None = _offload(None, aliases="critic.model.fsdp_config.optimizer_offload")
    """As `train.offload_optimizer`. Left out: as in `[train]`."""
    dynamic_batch: bool = _dynamic_batch(aliases="critic.use_dynamic_bsz")
    micro_batch: Positive | None = _micro_batch(
        "critic.{ppo,forward}_micro_batch_size{_per_gpu,}",
        "The guide lists critic.forward_micro_batch_size_per_gpu as a cap on tokens; it counts samples.",
    )
    token_budget: Count = _token_budget(aliases="critic.ppo_max_token_len_per_gpu")
    """Most tokens in a micro-batch of an update. `auto`: twice the actor's where that is a number, since there is no vocabulary head; else
    16384 on CPU, and on CUDA 32768, or for critics below about 250 million parameters up to 131072 where they fit well."""
    forward_token_budget: Count = _token_budget(aliases="critic.forward_max_token_len_per_gpu")
    """Most tokens in a micro-batch of a pass without gradients. `auto`: twice the critic's token budget."""
    sequence_parallel: Count | None = _sequence(None, aliases="critic.ulysses_sequence_parallel_size")
    """As `train.sequence_parallel`. Left out: as in `[train]`."""
    tensor_parallel: Positive | None = _divided(None, aliases="critic.megatron.tensor_model_parallel_size")
    """As `train.tensor_parallel`, for the critic's model. Left out: as in `[train]`, or 1 with an
    `expert_parallel` of its own."""
    expert_parallel: Positive | None = _divided(None, aliases="critic.megatron.expert_model_parallel_size")
    """As `train.expert_parallel`, for the critic's model. Left out: as in `[train]`, or 1 with a
    `tensor_parallel` of its own."""


class RewardModelConfig(Section):
    used_if = (_if_sampled, _if_scored_by_model)

    path: str | None = row(None, names="model", used_if=replace(_if_scored_by_model, required=True))
    """Folder or hub name of a sequence classification model with one label; its own tokenizer and chat template are used."""
    chat_template: str | None = row(None, names="file")
    """File with a chat template that replaces the one of the reward model's tokenizer."""
    packing: bool | None = _packing(None, aliases="reward_model.model.use_remove_padding")
    """Pack samples side by side. Left out: as in `[train]`."""
    offload_params: Switch = _offload("auto")
    """Keep the reward model's parameters on the host while another role works. `auto`: as for the reference role."""
    dynamic_batch: bool = _dynamic_batch(aliases="reward_model.use_dynamic_bsz")
    micro_batch: Positive | None = _micro_batch(
        "reward_model.micro_batch_size{_per_gpu,} reward_model.forward_micro_batch_size_per_gpu | models.reward.generation_batch_size",
        "forward_micro_batch_size_per_gpu is the guide's spelling of micro_batch_size_per_gpu.",
    )
    forward_token_budget: Count = _token_budget(aliases="reward_model.forward_max_token_len_per_gpu | models.reward.max_token_in_packing")
    """Most tokens in a micro-batch. `auto`: twice the actor's forward budget, as there is no vocabulary head; no more for a small actor."""
    sequence_parallel: Count | None = _sequence(None, aliases="reward_model.ulysses_sequence_parallel_size")
    """As `train.sequence_parallel`. Left out: as in `[train]`."""
    tensor_parallel: Positive | None = _divided(None, aliases="reward_model.megatron.tensor_model_parallel_size")
    """As `train.tensor_parallel`, for the reward model's model. Left out: as in `[train]`, or 1 with an
    `expert_parallel` of its own."""
    expert_parallel: Positive | None = _divided(None, aliases="reward_model.megatron.expert_model_parallel_size")
    """As `train.expert_parallel`, for the reward model's model. Left out: as in `[train]`, or 1 with a
    `tensor_parallel` of its own."""


class LoraConfig(Section):
    used_if = (UsedIf(("rank",), lambda rank: rank > 0, "set lora.rank, for example to 16"),)

    rank: Annotated[int, Field(ge=0, le=4096)] = row(0, elsewhere="lora_r lora.r")
    """Rank of the adapters. 0: no adapters, all parameters are trained."""
    alpha: AboveZero | None = None
    """The adapters' output is scaled by alpha / rank. Left out: twice the rank."""
    targets: list[NotEmpty] | Literal["all-linear"] = "all-linear"
    """Layers that get an adapter, by the ends of their names (`q_proj`); `all-linear`: every linear layer except the head."""
    parameters: list[NotEmpty] = Field(default_factory=list)
    """Parameters that are not layers of their own, such as stacked experts, by the ends of their names (`mlp.experts.gate_up_proj`)."""
    path: str | None = row(None, names="adapter")
    """Folder of an adapter to start from, as peft saves it."""
    critic: bool = row(True, used_if=_if_critic)
    """Train the critic through adapters too (and its head)."""
    export: Literal["adapter", "merged"] = row("adapter", free=True)
    """What a checkpoint's `model/` holds: the adapter, which peft loads, or the whole model with the adapter merged in."""


class EvalConfig(Section):
    used_if = (_if_sampled, UsedIf(("data.val",), lambda val: val is not None, "set data.val"))
    free = True

    samples_per_prompt: GroupSize = row(1, used_if=_if_not_greedy("samples_per_prompt", 1))
    """Samples of each validation prompt."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of validation: from 0.0001 to 10000, or 0, which is greedy."""
    top_p: Share = row(1.0, used_if=_if_not_greedy("top_p", 1))
    """Nucleus sampling of validation."""
    top_k: NotNegative = row(0, used_if=_if_not_greedy("top_k", 0))
    """Top-k sampling of validation; 0: all tokens."""
    max_new_tokens: Positive | None = None
    """Largest number of tokens in a validation response. Left out: `rollout.max_new_tokens`."""
    max_prompts: Positive | None = None
    """Use only the first N validation prompts."""


HealthRule = Literal[
    "no-variance", "not-finite", "entropy-collapse", "entropy-explosion", "all-clipped", "reward-errors", "all-rewards-failed",
    "logprob-gap", "memory-growth",
]  # fmt: skip


class HealthConfig(Section):
    free = True

    patience: Positive = row(10, used_if=when("stop", True))
    """A rule that holds for this many steps in a row stops the run. It warns at the first. `all-rewards-failed` stops it at once."""
    stop: bool = True
    """Stop an unhealthy run. Off: only warn."""
    ignore: list[HealthRule] = Field(default_factory=list)
    """Rules that are not checked."""
    entropy_floor: Weight = row(0.005, used_if=(_if_sampled, _if_watched("entropy-collapse")))
    """`entropy-collapse`: `rollout/entropy` is below this, in nats per token."""
    max_entropy_rise: float = row(4.0, used_if=_if_watched("entropy-explosion"), gt=1, le=1_000_000)
    """`entropy-explosion`: `rollout/entropy` is above this many times that of the run's first step, and above 1 nat per token."""
    max_clip_ratio: float = row(0.99, used_if=(_if_sampled, _if_watched("all-clipped")), ge=0, le=1)
    """`all-clipped`: a larger share of responses than this is cut at `rollout.max_new_tokens`."""
    max_reward_errors: float = row(0.5, used_if=(_if_sampled, _if_watched("reward-errors")), ge=0, le=1)
    """`reward-errors`: the reward failed for a larger share of samples than this."""
    max_logprob_gap: AboveZero = row(0.05, used_if=(_if_sampled, _if_watched("logprob-gap")))
    """`logprob-gap`: rollout and trainer log-probs differ by more, mean absolute. bfloat16 alone gives 0.025 (SmolLM2-135M, CPU)."""


class LogConfig(Section):
    free = True

    to: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = row([], elsewhere="logger report_to")
    """Loggers that get every number of `metrics.jsonl`, each an extra to install: `pip install "fulltilt[tensorboard]"`."""
    project: str = row("fulltilt", elsewhere="project_name", min_length=1)
    """Project (wandb, trackio) or experiment (mlflow)."""
    name: str | None = row(None, elsewhere="experiment_name")
    """Name of the run. Left out: the last part of `run.dir`."""
    val_samples: NotNegative = row(16, used_if=EvalConfig.used_if)
    """Validation samples shown as a table at each validation."""


class RunConfig(Section):
    dir: str = row("runs/run", names="folder", free=True, elsewhere="default_local_dir output_dir", min_length=1)
    """Folder of checkpoints, metrics and rollouts."""
    steps: Positive | None = row(None, free=True, elsewhere="max_steps total_training_steps", used_if=when("epochs", None, required=True))
    """Steps to run. Set either `steps` or `epochs`."""
    epochs: Positive | None = row(None, free=True, elsewhere="num_train_epochs num_epochs total_epochs")
    """Passes over the training data. Set either `steps` or `epochs`."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """Seed of shuffling and sampling."""
    save_every: NotNegative = row(10, free=True, elsewhere="save_freq save_steps")
    """Steps between checkpoints; the last step is always saved. 0: only the last."""
    keep: Positive = row(2, free=True, elsewhere="save_total_limit")
    """Number of checkpoints kept, the newest ones."""
    keep_best: NotEmpty | None = row(None, free=True, elsewhere="metric_for_best_model")
    """Metric of docs/metrics.md, for example `val/reward/mean`: the checkpoint with its highest value is kept too, and `checkpoints/best`
    links to it. With a minus in front, as in `-val/loss`, the lowest. A validation that is the best so far saves a checkpoint at once;
    other metrics are compared where a checkpoint is saved anyway. Left out: only the newest are kept."""
    eval_every: NotNegative = row(0, free=True, elsewhere="test_freq eval_steps")
    """Steps between validations; 0: none."""
    eval_before: bool = row(False, free=True, elsewhere="val_before_train")
    """Validate before the first step."""
    resume: Literal["auto", "never", "force"] = row("auto", free=True)
    """If the run folder holds checkpoints: `auto` resumes if the configuration agrees, `force` in any case, `never` refuses."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run. `auto`: CUDA if available."""
    threads: Annotated[int, Field(ge=1, le=1024)] | Auto = "auto"
    """CPU threads of torch; a checkpoint keeps the number, since it decides the last bits of a sum. `auto`: OMP_NUM_THREADS if it is set;
    else one for models under 30 million parameters, and one per core for larger ones."""
    deterministic: bool = False
    """Use only deterministic kernels on CUDA, so that a resumed run is bit-equal there too. On CPU it always is."""
    probe: bool | Auto = row("auto", free=True)
    """Measure a few micro-batches and short rollouts before the first step, size `auto` token budgets by them and scale predictions by
    them. For the actor that takes up to 15 seconds, and for a critic as many again, besides the first micro-batch of each and the first
    rollout, which may compile and have no limit. A budget stays that takes no more memory than was planned; where it takes more, or is
    raised, 15% of the memory for updates are left free. The user's cache folder keeps what was measured for the next run of the model on
    this device. With `deterministic` nothing reads a clock: memory alone is measured. Budgets that are given, and those of a resumed run,
    stay. Of several workers the first measures for all, where its passes need no other; else `true` is refused. `auto`: on a GPU."""
    save_rollouts: Positive = row(16, free=True, used_if=_if_sampled)
    """Samples of each step written to `rollouts/`, and of each validation to `validation/`, as whole groups in order."""


class ClusterConfig(Section):
    free: ClassVar[bool] = True  # a run may go on with another number of workers

    workers: Annotated[int, Field(ge=1, le=1024)] | Auto = _training(
        "auto", "workers started", "trainer.n_gpus_per_node", elsewhere="num_processes"
    )
    """Workers of each machine that compute the run together, each with one device; on a CPU each is a process with its share of the cores.
    One worker on one machine is the program's own process. More workers than GPUs, or on a CPU than cores, are refused, unless
    FULLTILT_SHARE_DEVICES=1 is set, for tests. `auto`: one for each GPU of the machine; one on a CPU."""
    nodes: Annotated[int, Field(ge=1, le=1024)] = _training(
        1,
        "workers started",
        "trainer.nnodes",
        elsewhere="num_machines",
        used_if=UsedIf(
            ("nodes", "address"),
            lambda nodes, address: nodes == 1 or address is not None,
            "set cluster.address to that of a Ray cluster with these machines",
        ),
    )
    """Machines that compute the run together. Each has `cluster.workers` workers."""
    address: NotEmpty | None = None
    """HOST:PORT of a Ray cluster, whose machines the workers are on, as `ray start --head` prints it. `auto`: the one of this machine, or a
    Ray that runs as long as this run does. Left out: the workers are processes of this machine."""
    roles: dict[Literal["critic", "ref", "reward_model"], Annotated[int, Field(ge=1, le=1024)]] = _training(
        {}, "workers that have only this role", elsewhere="~reward_model.n_gpus_per_node", used_if=_if_several
    )
    """Roles that get workers of their own, and how many of all workers of the run each gets: `{ reward_model = 2 }`. They hold that role
    alone; the others sample, train, and have all other roles. Left out: every worker has all roles."""
    processes: bool = row(
        False,
        used_if=UsedIf(
            ("workers", "address"), lambda workers, address: workers in (1, "auto") and address is None, "set cluster.workers = 1"
        ),
    )
    """Run a single worker in a process of its own too, as several always do: to measure what that costs."""
    stall_s: Seconds = row(45.0, used_if=_if_apart)
    """Seconds without a sign of progress after which a worker is reported, with the Python stacks of all workers."""
    deadline_s: Seconds = row(1800.0, used_if=_if_apart)
    """Seconds without a sign of progress after which a worker is given up, and the run ends."""
    restarts: NotNegative = row(0, used_if=_if_apart)
    """How often a run that has lost a worker, because its process died or it was given up, starts its workers again and resumes from its
    last checkpoint by itself. A step that fails twice in a row ends the run in any case."""


class Config(Section):
    """A run. Sections are TOML tables."""

    model: ModelConfig
    data: DataConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    train: TrainConfig = TrainConfig()
    actor: ActorConfig = ActorConfig()
    ref: RefConfig = RefConfig()
    critic: CriticConfig = CriticConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    lora: LoraConfig = LoraConfig()
    eval: EvalConfig = EvalConfig()
    health: HealthConfig = HealthConfig()
    log: LogConfig = LogConfig()
    run: RunConfig = RunConfig()
    cluster: ClusterConfig = ClusterConfig()


def shares_parameters(config: Config) -> bool:
    """Whether workers share out the parameters of models that learn."""
    return config.train.shard in ("full", "hybrid")


def samples_from_copy(config: Config) -> bool:
    """Whether a rollout engine reads a copy of the actor, as far as given keys say: parameters are shared out, experts alone are divided,
    or the engine's layers or experts are divided in another way."""
    train, rollout = config.train, config.rollout
    tensor, experts = (1 if size == "auto" else size for size in (train.tensor_parallel, train.expert_parallel))
    other = rollout.tensor_parallel not in ("auto", tensor) or rollout.expert_parallel not in ("auto", experts if tensor > 1 else 1)
    return shares_parameters(config) or (experts > 1 and tensor == 1) or other


def shares_model(config: Config) -> bool:
    """Whether the reference role is the actor without its adapters: they start at nothing, and no second model is held."""
    return config.lora.rank > 0 and config.lora.path is None and config.ref.path is None


def uses_reward_model(config: Config) -> bool:
    return REWARD_MODEL in rewards_named(config.reward.function, config.reward.sources)


@cache
def sections() -> dict[str, type[Section]]:
    """The sections of a configuration, in the order of the schema."""
    found = {name: field.annotation for name, field in Config.model_fields.items()}
    return {name: schema for name, schema in found.items() if isinstance(schema, type) and issubclass(schema, Section)}


@cache
def keys() -> dict[str, FieldInfo]:
    """Every dotted key of a configuration, in the order of the schema."""
    return {f"{section}.{key}": field for section, schema in sections().items() for key, field in schema.model_fields.items()}


@cache
def conditions(key: str) -> tuple[UsedIf, ...]:
    """All that must hold for a key to have an effect: what its section says, then its own row. They read keys by their full names."""
    section, _, name = key.partition(".")
    shared = (replace(each, whole_section=True) for each in sections()[section].used_if if name not in each.reads)
    found = (*shared, *row_of(keys()[key]).used_if)
    return tuple(replace(each, reads=tuple(read if "." in read else f"{section}.{read}" for read in each.reads)) for each in found)


def flatten(config: Config) -> dict[str, Any]:
    """Every dotted key with its value, defaults included."""
    return {key: value_of(config, key) for key in keys()}


def value_of(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return the configuration with these keys set, without checking them."""
    by_section: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        by_section.setdefault(section, {})[name] = value
    return config.model_copy(update={name: getattr(config, name).model_copy(update=own) for name, own in by_section.items()})


# ---- types and values in words ---------------------------------------------------------------------------------------------------------

_BOUNDS = (("gt", "greater than"), ("ge", "at least"), ("lt", "less than"), ("le", "at most"))
_PLAIN = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Any: "any value"}


def legal_values(key: FieldInfo) -> str:
    """The values a key takes, in words: `"auto" or a whole number greater than 0`."""
    return _legal(key.annotation, key.metadata)


def _legal(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _legal(arguments[0], [bound for extra in arguments[1:] for bound in getattr(extra, "metadata", [extra])])
    if origin is Literal:
        return either([shown(value) for value in arguments])
    if origin in (Union, types.UnionType):
        choices = [_legal(kind, metadata) for kind in arguments if kind is not type(None)]
        return either(sorted(choices, key=lambda words: not words.startswith('"'))).replace(" or true or", ", true or")
    if origin is list:
        return f"a list of {_legal(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)}, each {_legal(arguments[0])}"
    if origin is dict:
        names = f" for {_legal(arguments[0])}" if get_origin(arguments[0]) is Literal else ""
        return "a table" if arguments[1] is Any else f"a table of {_legal(arguments[1])}{names}"
    bounds = {name: getattr(bound, name) for bound in metadata for name, _ in _BOUNDS if hasattr(bound, name)}
    span = " and ".join(f"{words} {bounds[name]}" for name, words in _BOUNDS if name in bounds)
    if bounds.keys() == {"ge", "le"}:
        span = f"from {bounds['ge']} to {bounds['le']}"
    filled = " that is not empty" if any(getattr(bound, "min_length", 0) for bound in metadata) else ""
    return " ".join([_PLAIN[annotation] + filled, *filter(None, [span])])


@dataclass(frozen=True)
class Words:
    """The text below a key, in its parts."""

    meaning: str
    left_alone: str  # what the key is when it is not set
    note: str  # what a user of another system's name or value must know: another unit, the opposite sense, a slip in a guide


def words(key: FieldInfo) -> Words:
    meaning, _, note = " ".join((key.description or "").split()).partition(" Note: ")
    default = key.get_default(call_default_factory=True, validated_data={})
    said = re.search(r"(?:`auto`|Left out): (.*?)\.?$", meaning)
    left_alone = said[1] if said else {True: "on", False: "off"}[default] if isinstance(default, bool) else str(default)
    return Words(meaning, left_alone, " ".join(filter(None, (row_of(key).note, note))))


def default_value(key: FieldInfo) -> str:
    """The default as TOML writes it; "required" or "left out" where there is none."""
    if key.is_required():
        return "required"
    value = key.get_default(call_default_factory=True, validated_data={})
    return "left out" if value is None else toml_value(value)


def shown(value: Any) -> str:
    """One value as an error message shows it."""
    text = toml_value(value)
    if isinstance(value, float) and not math.isfinite(value):
        text += " (not a finite number)"
    return shortened(text, 100)


def toml_value(value: Any) -> str:
    """One value as TOML writes it."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            # TOML's basic strings are JSON's; a control character that JSON leaves unescaped is escaped in the same way.
            return printable(json.dumps(value, ensure_ascii=False))
        case list() | tuple():
            return f"[{', '.join(toml_value(item) for item in value)}]"
        case Mapping():
            inside = ", ".join(f"{_toml_key(str(key))} = {toml_value(item)}" for key, item in value.items())
            return f"{{ {inside} }}" if inside else "{}"
        case datetime.datetime() | datetime.date() | datetime.time():
            return value.isoformat()
        case _:
            return str(value)


def to_toml(config: Config) -> str:
    """A TOML file that parses to an equal configuration. Keys that were left out stand as comments, with their defaults: some keys
    count as used when they are present."""
    lines: list[str] = []
    for name, schema in sections().items():
        section = getattr(config, name)
        lines += ["", f"[{name}]"]
        for key in schema.model_fields:
            value = getattr(section, key)
            if value is not None:
                lines.append(f"{'' if key in section.model_fields_set else '# '}{key} = {toml_value(value)}")
    return "\n".join(lines[1:]) + "\n"


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)
