"""The run's configuration: frozen, free of torch, checked whole before any model loads.

Enters: a TOML file and `key=value` overrides. Leaves: one frozen `Config`. Guaranteed: every mistake is reported at once, each with its
place and remedy; an unknown key names the nearest known one; a knob that is not built is refused, never ignored; nothing is converted
in silence ("64" is no number). Every key's meaning stands under it and is what the generated reference page prints. Relative paths are
relative to the current directory.
"""

from __future__ import annotations

import copy
import datetime
import difflib
import json
import math
import os
import re
import tomllib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from fulltilt import knobs
from fulltilt.records import EngineName, UserError

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Auto = Literal["auto"]
Recompute = Literal["auto", "none", "selective", "full"]
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.0001, 10000


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False)


class ModelConfig(Section):
    path: str = Field(min_length=1)
    """Folder of a Hugging Face causal language model (safetensors), or a hub name when online."""
    revision: str | None = None
    """Branch, tag or commit of a hub name."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you have read that code."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Type of the parameters that compute. `auto`: bfloat16 on CUDA, float32 on CPU. Master weights and moments are never below float32."""
    chat_template: str | None = None
    """File with a chat template that replaces the tokenizer's own."""


class DataConfig(Section):
    train: str | list[str] = Field(min_length=1)
    """Parquet (verl's layout), JSON-lines file or Hugging Face dataset folder; a list is read in order as one data set."""
    val: str | list[str] | None = None
    """Validation data, in the same formats."""
    max_prompt_tokens: Positive = 1024
    """Longer prompts, counted on the final token ids, are left out; how many is reported."""
    max_tokens: Positive | None = None
    """Longer SFT rows, prompt and response together, are left out; how many is reported. Left out: a row may have as many as the model
    has positions, and a longer one is an error."""
    prompt_key: str = "prompt"
    """Column with the prompt: a list of messages, or a string."""
    response_key: str = "response"
    """Column with the response of an SFT row."""
    messages_key: str = "messages"
    """Column with a whole conversation, for SFT rows that have no prompt and response."""
    train_turns: Literal["all", "last"] = "all"
    """Which of the assistant's turns an SFT conversation trains on."""
    apply_template: Literal["auto", "always", "never"] = "auto"
    """Put string prompts through the chat template as a user message. `auto`: messages always, strings never."""
    system: str | None = None
    """System message put before every prompt that has none."""
    template_args: dict[str, Any] = Field(default_factory=dict)
    """Extra arguments of the chat template, e.g. `{ enable_thinking = false }`."""
    shuffle: bool = True
    """Reshuffle each epoch, by `run.seed` and the epoch's number."""


class AlgorithmConfig(Section):
    name: Literal["grpo", "dr_grpo", "dapo", "ppo", "rloo", "reinforce++", "reinforce++_baseline", "remax", "gspo", "cispo", "sft"] = "grpo"
    """The preset. Keys below that are left out take the preset's values."""
    prompts_per_step: Positive = 64
    """Prompts of one step, over all devices. For SFT: rows of one step."""
    samples_per_prompt: Positive = 8
    """Samples of each prompt: the size of a group. Ignored by SFT presets, where setting it is an error."""
    minibatches_per_step: Positive = 1
    """Optimizer steps made from one rollout, per epoch."""
    epochs: Positive = 1
    """How often a step's samples are gone through."""
    clip_low: float | None = Field(default=None, ge=0, le=1)
    """The probability ratio is clipped below at 1 - clip_low."""
    clip_high: float | None = Field(default=None, ge=0)
    """The probability ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = Field(default=None, ge=0)
    """With a negative advantage the loss is bounded by this many times the advantage (must exceed 1). 0 switches it off."""
    kl_coef: float | None = Field(default=None, ge=0)
    """Weight of the KL term against the reference role in the loss. 0: there is none."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """Of the KL term in the loss. k1: log p/q. k2: half its square. k3: q/p - 1 - log q/p."""
    reward_kl_coef: float | None = Field(default=None, ge=0)
    """Weight of the per-token KL penalty in the reward; where it starts, if it is adaptive. 0: there is none."""
    reward_kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """Of the KL penalty in the reward."""
    reward_kl_target: float | None = Field(default=None, gt=0)
    """Makes the penalty adaptive: its weight rises while the mean KL per token is above this, and falls while it is below."""
    reward_kl_horizon: Positive | None = None
    """How fast it adapts: samples over which the weight could change by about a fifth of itself."""
    entropy_coef: float | None = Field(default=None, ge=0)
    """Weight of the entropy bonus in the loss."""
    aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] | None = None
    """How per-token losses of a mini-batch become one number. `seq-mean-token-sum-norm` divides each sample's sum by `length_norm`."""
    length_norm: Positive | None = None
    """Divisor of `seq-mean-token-sum-norm`; left out: `rollout.max_new_tokens`."""
    normalize_by_std: bool | None = None
    """Divide a group's advantages by the standard deviation of its rewards."""
    whiten: bool | None = None
    """Bring the advantages of a step's trained tokens to mean 0 and standard deviation 1."""
    gamma: float | None = Field(default=None, gt=0, le=1)
    """Discount of later rewards, per token."""
    gae_lambda: float | None = Field(default=None, ge=0, le=1)
    """Generalised advantage estimation: 0 trusts the critic, 1 the rewards."""
    value_clip: float | None = Field(default=None, ge=0)
    """The critic's new values are clipped to this distance from the old ones. 0 switches it off."""
    critic_warmup: NotNegative | None = None
    """First steps of the run in which only the critic is updated."""
    dynamic_sampling: bool | None = None
    """Leave out groups whose rewards are all equal, and go on sampling until the step is full; those too many are used in the next step."""
    prompts_per_round: Positive | None = None
    """Prompts sampled at a time under dynamic sampling; left out: `prompts_per_step`."""
    max_rounds: Positive | None = None
    """Most rounds of sampling in a step; then the step makes do with the groups it has."""
    overlong_buffer: NotNegative | None = None
    """The last so many tokens before `rollout.max_new_tokens` in which a growing penalty is taken off the reward. 0: none."""
    overlong_penalty: float | None = Field(default=None, gt=0)
    """What a response of `rollout.max_new_tokens` tokens loses."""
    advantage: str | None = None
    """`FILE.py:NAME`: a function of your own in place of the preset's advantage (docs/algorithms.md)."""
    loss: str | None = None
    """`FILE.py:NAME`: a function of your own in place of the preset's loss (docs/algorithms.md)."""
    importance_cap: float | None = Field(default=None, ge=0)
    """Truncation of the importance weight between trainer and rollout log-probs. 0 switches the correction off."""


class RolloutConfig(Section):
    max_new_tokens: Positive = 256
    """Longest response."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; the trainer's log-probs use the same. From 0.0001 to 10000, or 0 (greedy), which is refused for
    training."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling. The trainer does not apply it: below 1 the run warns."""
    top_k: NotNegative = 0
    """Sample among the k likeliest tokens; 0: all. The trainer does not apply it: above 0 the run warns."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Strings that end a response, also across token borders. The tokens that complete one stay in the sample; its text ends before it."""
    engine: EngineName = "native"
    """The engine that generates."""
    kv_bytes: Positive | Auto = "auto"
    """Bytes of the KV cache; on CUDA, more than is free beside what decoding needs is an error. Not together with memory_fraction."""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] | Auto = "auto"
    """Share of the device's memory that is free at start to be used as KV cache; on CUDA, one that leaves too little for decoding is an
    error. Not together with kv_bytes."""
    block_tokens: Positive = 16
    """Tokens of one KV block."""
    max_seqs: Positive | Auto = "auto"
    """Most samples decoded at once, as far as the KV cache holds them. `auto`: all samples of a step (`algorithm.prompts_per_step` times
    `algorithm.samples_per_prompt`), at most 1024 (256 on CPU)."""
    max_batched_tokens: Positive | Auto = "auto"
    """Most tokens of a pass that prefills; passes that decode are bounded by `max_seqs`, and no pass does both. `auto`: 16384 on CUDA, 4096
    on CPU, or `max_seqs` if that is more."""
    chunked_prefill: bool = True
    """Split long prompts over passes, between which decoding goes on. Off: a prompt is prefilled whole, alone if it must be."""
    prefix_sharing: bool = True
    """Prefill a group's prompt once and share its blocks. Prompts of other groups that begin alike share the full blocks of their
    beginning, and a sample that was put back finds again those of its blocks that are still there."""
    cuda_graphs: bool | Auto = "auto"
    """Decode by replaying captured CUDA graphs, so that a step costs no launches on the host. `auto`: on CUDA, where a graph can
    hold the model and `train.offload_params` is not on; `true` is an error where none can."""
    release_memory: bool | Auto = "auto"
    """Give the KV cache's memory back between rollouts, for the update. Off: it is kept, and `auto` sizes it smaller. `auto`: on."""
    log_stats: bool = True
    """Engine statistics: a line in the log for every 10 seconds of generating; tokens per second and latencies in the metrics. Off: counts
    in the metrics only."""


class RewardConfig(Section):
    function: str | dict[str, float] = "gsm8k"
    """`gsm8k` (strict), `gsm8k_flexible`, `math`, `dapo`, `reward_model`, or `FILE.py:NAME` for your own, single or batch, verl's signature
    accepted. A table of names and weights is their weighted sum: `{ math = 1.0, "style.py:short" = 0.2 }`."""
    sources: dict[str, str | dict[str, float]] = Field(default_factory=dict)
    """Another function (or weighted sum) for some values of a row's `data_source`."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Deadline of one call. A call that runs past it is killed, counted and scored by `on_error`."""
    workers: Positive | Auto = "auto"
    """Reward processes. `auto`: one per core."""
    memory_gb: float = Field(default=4.0, gt=0)
    """Address space of one reward process; beyond it a call fails with MemoryError."""
    on_error: Literal["exclude", "score"] = "exclude"
    """A sample whose reward crashed or ran out of time: `exclude` leaves it out of the batch and of its group's baseline, `score` gives it
    `error_score`."""
    error_score: float = 0.0
    """The reward of a failed call under `on_error = "score"`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Extra keyword arguments of your own function."""


class TrainConfig(Section):
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or down to `min_lr_ratio` of the peak at the run's last step."""
    warmup_steps: NotNegative = 0
    """Optimizer steps over which the learning rate rises from 0."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where linear and cosine schedules end, as a share of `lr`."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay, on matrices only."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(default=(0.9, 0.999), strict=False)
    """AdamW's betas."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 switches clipping off."""
    fused_layers: bool | Auto = "auto"
    """Run each layer with few kernels: one product for queries, keys and values, one for gate and up, and one kernel for each norm, rotary
    embedding and gated product. Rollout and update run the same layers. `auto`: on CUDA, for families that are known, once values and
    gradients were found to agree with transformers' own; off where `compile` is on."""
    compile: bool | Auto = "auto"
    """Run the layers through torch.compile, in updates and in passes without gradient; rollout runs them as they are. Once values and
    gradients were found to agree. `auto`: off."""
    packing: bool = True
    """Put samples side by side, for the actor and the reference role. Off: each is padded to the longest of its micro-batch, and the token
    budget counts the padding: to see what packing gains."""
    recompute: Recompute = "auto"
    """What is computed again in the backward pass instead of being kept: nothing; all that is cheap, which is all but matrix products and
    attention ("selective"); or whole layers ("full"). `auto`: the least with which a micro-batch is estimated to fit; on the CPU none."""
    recompute_layers: Positive | Auto = "auto"
    """With `recompute_method` "block": the first so many layers are recomputed, the others keep everything. With "uniform": all are, so
    many at a time, from what the first of these was given. For roles whose `recompute` is "selective" or "full". `auto`: all, one by
    one."""
    recompute_method: Literal["block", "uniform"] = "block"
    """What `recompute_layers` counts."""
    offload_activations: bool | Auto = "auto"
    """Keep what the backward pass needs on the host until it is needed, with `recompute` or alone. `auto`: where recompute does not save
    enough."""
    offload_params: bool | Auto = "auto"
    """The actor's parameters are on the host while another role works. Not together with CUDA graphs. `auto`: off."""
    offload_optimizer: bool | Auto = "auto"
    """Masters and moments are on the host, and pass through the device in pieces when the optimizer steps. `auto`: where parameters,
    gradients and optimizer would leave less than a fifth of the device free."""
    offload_grads: bool | Auto = "auto"
    """Gradients hold memory only from the first micro-batch of an optimizer step to its end. `auto`: with `offload_optimizer`."""
    fused_head: bool = True
    """Log-probs and entropy without the logits of a whole micro-batch, forward and backward. Off: with them, in float32."""
    entropy_chunk: Positive | Auto = "auto"
    """Most tokens whose entropy is computed at a time; where the head is fused, the log-probs too, and never more than stay within a
    bounded piece of memory. `auto`: as many as that; all where the head is not fused."""
    entropy_recompute: bool = True
    """Compute the entropy again in the backward pass instead of keeping what its gradient needs: the softmax of all tokens, or their logits
    in float32 where the head is fused. For algorithms with an entropy bonus."""
    head_recompute: bool | Auto = "auto"
    """Make the logits of the fused head again in the backward pass. Off: those of a whole micro-batch are kept until then, in float32,
    which saves one of the head's four matrix products. `auto`: off on CUDA, where a micro-batch is estimated to fit with them and without
    any other recompute or offload of activations; else on."""


class ActorConfig(Section):
    dynamic_batch: bool = True
    """Fill micro-batches up to the token budget. Off: `micro_batch` samples each."""
    micro_batch: Positive | None = None
    """Samples of a micro-batch when dynamic_batch is off."""
    token_budget: Positive | Auto = "auto"
    """Most tokens of an update's micro-batch; a longer sample gets one alone. `auto`: 8192 on CPU; on CUDA 16384, and for
    models below about 500 million parameters up to 65536 where they fit well, so that the device does not wait for the host."""
    forward_token_budget: Positive | Auto = "auto"
    """The same for passes without gradients. `auto`: twice the token budget."""


class RefConfig(Section):
    path: str | None = None
    """Model of the reference role; left out: `model.path` as it was at the start of the run."""
    offload_params: bool | Auto = "auto"
    """Its parameters are on the host while another role works. `auto`: where the roles' parameters and gradients would leave less than a
    fifth of the device free."""
    entropy_chunk: Positive | Auto = "auto"
    """As for the actor: most tokens whose log-probs are computed at a time. The reference role computes no entropy."""
    dynamic_batch: bool = True
    """As for the actor."""
    micro_batch: Positive | None = None
    """As for the actor."""
    forward_token_budget: Positive | Auto = "auto"
    """Most tokens of a micro-batch. `auto`: the actor's; with a `path` of its own, as for an actor of any size."""


class CriticConfig(Section):
    path: str | None = None
    """Model that the critic starts from: a language model, which gets a new value head, or a reward model, whose head is kept. Left out:
    `model.path`."""
    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate of the critic; the rest of its optimizer is as `[train]` says."""
    packing: bool | None = None
    """As `[train]` has it, if left out."""
    recompute: Recompute | None = None
    """As `[train]` has it, if left out; `recompute_layers` and `recompute_method` are those of `[train]`."""
    offload_activations: bool | Auto | None = None
    """As `[train]` has it, if left out."""
    offload_params: bool | Auto | None = None
    """Its parameters are on the host while another role works. As `[train]` has it, if left out; `auto` as for the reference role."""
    offload_optimizer: bool | Auto | None = None
    """As `[train]` has it, if left out."""
    dynamic_batch: bool = True
    """As for the actor."""
    micro_batch: Positive | None = None
    """As for the actor."""
    token_budget: Positive | Auto = "auto"
    """As for the actor. `auto`: twice the actor's where that is a number, since there is no vocabulary head; else 16384 on CPU, and on CUDA
    32768, or for critics below about 250 million parameters up to 131072 where they fit well."""
    forward_token_budget: Positive | Auto = "auto"
    """As for the actor. `auto`: twice the critic's token budget."""


class RewardModelConfig(Section):
    path: str | None = None
    """Folder or hub name of a sequence classification model with one label; its own tokenizer and chat template are used."""
    chat_template: str | None = None
    """File with a chat template that replaces the one of the reward model's tokenizer."""
    packing: bool | None = None
    """As `[train]` has it, if left out."""
    offload_params: bool | Auto = "auto"
    """Its parameters are on the host while another role works. `auto`: as for the reference role."""
    dynamic_batch: bool = True
    """As for the actor."""
    micro_batch: Positive | None = None
    """As for the actor."""
    forward_token_budget: Positive | Auto = "auto"
    """Most tokens of a micro-batch. `auto`: twice the actor's, which is not enlarged for that where the actor is small."""


class LoraConfig(Section):
    rank: NotNegative = 0
    """Rank of the adapters. 0: no adapters, all parameters are trained."""
    alpha: float | None = Field(default=None, gt=0)
    """The adapters' output is scaled by alpha / rank. Left out: twice the rank."""
    targets: list[Annotated[str, Field(min_length=1)]] | Literal["all-linear"] = "all-linear"
    """Layers that get an adapter, by the ends of their names (`q_proj`); `all-linear`: every linear layer but the head."""
    parameters: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Parameters that are no layers of their own, such as stacked experts, by the ends of their names (`mlp.experts.gate_up_proj`)."""
    path: str | None = None
    """Folder of an adapter to start from, as peft saves it."""
    critic: bool = True
    """The critic too learns through adapters (and its head)."""
    export: Literal["adapter", "merged"] = "adapter"
    """What a checkpoint's `model/` holds: the adapter, which peft loads, or the whole model with the adapter added in."""


class EvalConfig(Section):
    samples_per_prompt: Positive = 1
    """Samples of each validation prompt."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of validation: from 0.0001 to 10000, or 0, which is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling of validation."""
    top_k: NotNegative = 0
    """Top-k of validation."""
    max_new_tokens: Positive | None = None
    """Longest response of validation; left out: `rollout.max_new_tokens`."""
    max_prompts: Positive | None = None
    """Use only the first so many validation prompts."""


class HealthConfig(Section):
    patience: Positive = 10
    """A rule that holds for so many steps in a row stops the run. It warns at the first."""
    stop: bool = True
    """Off: only warn."""
    ignore: list[
        Literal[
            "no-variance", "not-finite", "entropy-collapse", "entropy-explosion", "all-clipped", "reward-errors", "logprob-gap",
            "memory-growth",
        ]
    ] = Field(default_factory=list)  # fmt: skip
    """Rules that are not looked at."""
    entropy_floor: float = Field(default=0.005, ge=0)
    """`entropy-collapse`: `rollout/entropy` below this, in nats per token."""
    max_entropy_rise: float = Field(default=4.0, gt=1)
    """`entropy-explosion`: `rollout/entropy` above so many times that of the run's first step, and above 1 nat per token."""
    max_clip_ratio: float = Field(default=0.99, ge=0, le=1)
    """`all-clipped`: a larger share of responses cut at `rollout.max_new_tokens`."""
    max_reward_errors: float = Field(default=0.5, ge=0, le=1)
    """`reward-errors`: a larger share of samples whose reward failed."""
    max_logprob_gap: float = Field(default=0.05, gt=0)
    """`logprob-gap`: mean absolute difference between rollout and trainer log-probs above this. Rounding to bfloat16 alone makes 0.025 of
    SmolLM2-135M's on a CPU."""


class LogConfig(Section):
    to: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = Field(default_factory=list)
    """Loggers that get every number of `metrics.jsonl`, each an extra to install: `pip install "fulltilt[tensorboard]"`."""
    project: str = Field(default="fulltilt", min_length=1)
    """Project (wandb, trackio) or experiment (mlflow)."""
    name: str | None = None
    """Name of the run; left out: the last part of `run.dir`."""
    val_samples: NotNegative = 16
    """Validation samples shown as a table at each validation."""


class RunConfig(Section):
    dir: str = Field(default="runs/run", min_length=1)
    """Folder of checkpoints, metrics and rollouts."""
    steps: Positive | None = None
    """Steps to run. One of `steps` and `epochs`."""
    epochs: Positive | None = None
    """Passes over the training data. One of `steps` and `epochs`."""
    seed: NotNegative = 0
    """Seed of shuffling and sampling."""
    save_every: NotNegative = 10
    """Steps between checkpoints; the last step is always saved. 0: only the last."""
    keep: Positive = 2
    """Newest checkpoints kept."""
    eval_every: NotNegative = 0
    """Steps between validations; 0: none."""
    eval_before: bool = False
    """Validate before the first step."""
    resume: Literal["auto", "never", "force"] = "auto"
    """A run folder that holds checkpoints: `auto` goes on if the configuration agrees, `force` whatever changed, `never` refuses."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run. `auto`: CUDA if there is one."""
    threads: Positive | Auto = "auto"
    """Threads of torch on the CPU; a checkpoint keeps the number, which decides the last bits of a sum. `auto`: OMP_NUM_THREADS if it is
    set; else one for models under 30 million parameters, and one per core for larger ones."""
    deterministic: bool = False
    """Use only deterministic kernels on CUDA, so that a resumed run is bit-equal there too. On CPU it always is."""
    save_rollouts: Positive = 16
    """Samples of each step written to `rollouts/`, and of each validation to `validation/` (prompt, response, reward and its parts), whole
    groups first to last."""


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


FREE_ON_RESUME: frozenset[str] = frozenset(
    {
        "run.steps",
        "run.epochs",
        "run.save_every",
        "run.keep",
        "run.eval_every",
        "run.eval_before",
        "run.resume",
        "run.dir",
        "run.save_rollouts",
        "reward.workers",
        "reward.timeout_s",
        "rollout.log_stats",
    }
    | {f"eval.{key}" for key in EvalConfig.model_fields}
    | {f"health.{key}" for key in HealthConfig.model_fields}
    | {f"log.{key}" for key in LogConfig.model_fields}
    | {"lora.export"}
    # What is kept where, and what is computed again, changes no bit of a run, as long as its KV cache still fits (plan.keep_budgets).
    | {f"train.{key}" for key in ("recompute", "recompute_layers", "recompute_method")}
    | {f"train.offload_{kind}" for kind in ("activations", "params", "optimizer", "grads")}
    | {f"critic.{key}" for key in ("recompute", "offload_activations", "offload_params", "offload_optimizer")}
    | {"ref.offload_params", "reward_model.offload_params"}
)
"""Keys that may differ between a checkpoint and the run that resumes it."""

Check = Callable[[Config], Iterable[str]]


# ---- reading -----------------------------------------------------------------------------------------------------------------------


def load(path: Path | str, overrides: Sequence[str] = (), extra_checks: Sequence[Check | Rule] = ()) -> Config:
    """The configuration of a TOML file with `key=value` overrides on top. Raises one UserError that holds every mistake.

    `extra_checks` find further mistakes; rooms that this one must not import have theirs. One that does not say which keys it reads is
    asked when every value is legal.
    """
    return parse(_read_toml(Path(path)), overrides, str(path), extra_checks)


def parse(
    data: Mapping[str, Any], overrides: Sequence[str] = (), origin: str = "configuration", extra_checks: Sequence[Check | Rule] = ()
) -> Config:
    """As `load`, from tables that were read already; `origin` names them in the error."""
    tables: dict[str, Any] = copy.deepcopy(dict(data))
    mistakes = [*_apply_overrides(tables, overrides)]
    mistakes += _take_unknown_keys(tables)
    wrong_values = [*_wrong_values(tables)]
    mistakes += wrong_values
    config = _with_stand_ins(tables, {key for mistake in wrong_values for key in mistake.about})
    spoken_for = {key for mistake in mistakes for key in mistake.about}
    for rule in (*RULES, *(check for check in extra_checks if isinstance(check, Rule))):
        if spoken_for.isdisjoint(rule.keys):
            mistakes += [Mistake(text) for text in rule.check(config)]
    if not wrong_values:
        mistakes += [Mistake(text) for check in extra_checks if not isinstance(check, Rule) for text in check(config)]
    if mistakes:
        raise UserError(report(origin, [mistake.text for mistake in mistakes]))
    return config


@dataclass(frozen=True)
class Mistake:
    text: str  # key, what is wrong, what was given, remedy
    about: tuple[str, ...] = ()  # keys that no rule need look at any more: their values are not what the user meant


def report(origin: str, mistakes: Sequence[str]) -> str:
    """All mistakes as one message."""
    count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
    return "\n".join([f"{origin}: {count}", *(f"  {number}. {text}" for number, text in enumerate(mistakes, 1))])


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file. Give the path of a run's TOML file.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}). Save it as UTF-8.") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}. Give the path of a run's TOML file.") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(_syntax_error(path, text, str(error))) from None


def _syntax_error(path: Path, text: str, message: str) -> str:
    lines = text.splitlines() or [""]
    at = re.search(r" \(at line (\d+), column \d+\)", message)
    number = min(int(at.group(1)), len(lines)) if at else len(lines)
    what = re.sub(r" \(at .*\)$", "", message)
    remedy = "Mend this line: text needs quotes, a section is written [name]."
    return f"{path}, line {number}: not valid TOML: {what}\n    {lines[number - 1]}\n{remedy}"


# ---- overrides ---------------------------------------------------------------------------------------------------------------------


def _apply_overrides(tables: dict[str, Any], overrides: Sequence[str]) -> Iterator[Mistake]:
    for override in overrides:
        key, equals, value = override.partition("=")
        parts = _key_parts(key.strip())
        if not equals or not all(parts):
            yield Mistake(f"{override}: not an override. Write section.key=value, for example run.steps=100")
            continue
        table = tables
        for depth, part in enumerate(parts[:-1], 1):
            inner = table.setdefault(part, {})
            if not isinstance(inner, dict):
                above = ".".join(parts[:depth])
                yield Mistake(f"{key.strip()}: {above} is a value ({_shown(inner)}), not a table: nothing can be set below it", (above,))
                break
            table = inner
        else:
            table[parts[-1]] = _override_value(value.strip())


def _key_parts(key: str) -> list[str]:
    """The parts of a dotted key; quotes keep dots together, as in TOML."""
    try:
        table: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        return key.split(".")
    parts = []
    while isinstance(table, dict) and len(table) == 1:
        ((part, table),) = table.items()
        parts.append(part)
    return parts if table == 0 else [""]


def _override_value(text: str) -> Any:
    # People who come from verl write Python's True and False, which TOML does not know.
    if text in ("True", "False"):
        return text == "True"
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return table["value"] if len(table) == 1 else text


# ---- keys --------------------------------------------------------------------------------------------------------------------------


def keys() -> dict[str, FieldInfo]:
    """Every dotted key of a configuration, in the order of the schema."""
    return {f"{section}.{key}": field for section, schema in sections().items() for key, field in schema.model_fields.items()}


def sections() -> dict[str, type[Section]]:
    """The sections of a configuration, in the order of the schema."""
    found = {name: field.annotation for name, field in Config.model_fields.items()}
    return {name: schema for name, schema in found.items() if isinstance(schema, type) and issubclass(schema, Section)}


def _take_unknown_keys(tables: dict[str, Any]) -> Iterator[Mistake]:
    """Remove from `tables` what the schema does not know, and say of each such key what it may have been meant to be."""
    schemas = sections()
    for name in list(tables):
        if name not in schemas:
            yield from _unknown(name, tables.pop(name))
        elif isinstance(tables[name], dict):
            for key in [key for key in tables[name] if key not in schemas[name].model_fields]:
                yield from _unknown(f"{name}.{key}", tables[name].pop(key))


def _unknown(key: str, value: Any) -> Iterator[Mistake]:
    found = knobs.find_all(key) or (() if isinstance(value, dict) else knobs.find_by_end(key))
    if isinstance(value, dict) and value and not any(source == "native" for _, source in found):
        for part, inner in value.items():
            yield from _unknown(f"{key}.{part}", inner)
    elif found:
        yield Mistake(f"{key}: {_known_elsewhere(found, key, value)}", tuple(knob.name for knob, _ in found))
    elif (ours := _elsewhere(key)) is not None:
        yield Mistake(f"{key}: unknown key; what verl or TRL calls so is {ours} here")
    else:
        nearest = _nearest(key)
        yield Mistake(f"{key}: unknown key{_suggestion(nearest)}", (nearest,) if nearest else ())


def _elsewhere(key: str) -> str | None:
    """What a key of verl or TRL is called here, by its last two parts or its last one."""
    parts = key.split(".")
    return ELSEWHERE.get(".".join(parts[-2:])) or ELSEWHERE.get(parts[-1])


ELSEWHERE: Mapping[str, str] = {
    "adv_estimator": "algorithm.name",
    "beta": "algorithm.kl_coef",
    "bf16": "model.dtype",
    "clip_ratio": "algorithm.clip_low and algorithm.clip_high",
    "clip_ratio_high": "algorithm.clip_high",
    "clip_ratio_low": "algorithm.clip_low",
    "critic_warmup": "algorithm.critic_warmup",
    "custom_reward_function.name": "reward.function",
    "custom_reward_function.path": "reward.function",
    "default_local_dir": "run.dir",
    "entropy_coeff": "algorithm.entropy_coef",
    "epsilon": "algorithm.clip_low and algorithm.clip_high",
    "epsilon_high": "algorithm.clip_high",
    "experiment_name": "log.name",
    "filter_groups": "algorithm.dynamic_sampling",
    "grad_clip": "train.clip_grad",
    "gradient_checkpointing": "train.recompute",
    "kl_ctrl.kl_coef": "algorithm.reward_kl_coef",
    "kl_loss_coef": "algorithm.kl_coef",
    "kl_loss_type": "algorithm.kl_estimator",
    "lam": "algorithm.gae_lambda",
    "learning_rate": "train.lr",
    "logger": "log.to",
    "loss_agg_mode": "algorithm.aggregation",
    "lr_scheduler_type": "train.schedule",
    "max_completion_length": "rollout.max_new_tokens",
    "max_grad_norm": "train.clip_grad",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "max_steps": "run.steps",
    "model.name": "model.path",
    "model_name_or_path": "model.path",
    "num_generations": "algorithm.samples_per_prompt",
    "num_iterations": "algorithm.epochs",
    "num_train_epochs": "run.epochs",
    "output_dir": "run.dir",
    "project_name": "log.project",
    "report_to": "log.to",
    "reward_funcs": "reward.function",
    "per_device_train_batch_size": "algorithm.prompts_per_step and actor.token_budget",
    "save_freq": "run.save_every",
    "save_steps": "run.save_every",
    "scale_rewards": "algorithm.normalize_by_std",
    "test_freq": "run.eval_every",
    "total_epochs": "run.epochs",
    "total_training_steps": "run.steps",
    "train_files": "data.train",
    "use_kl_in_reward": "algorithm.reward_kl_coef above 0",
    "use_kl_loss": "algorithm.kl_coef above 0",
    "val_before_train": "run.eval_before",
    "val_files": "data.val",
}
"""What people who come from verl or TRL write for keys that are no performance knobs (those are in the ledger), by the last part or the
last two."""

_SYSTEMS: dict[knobs.Source, str] = {"verl": "verl's", "chatlearn": "ChatLearn's"}
_NOT_BUILT = "known knob, not built in this version: remove it"


def _known_elsewhere(found: Sequence[tuple[knobs.Knob, knobs.Source]], key: str, value: Any) -> str:
    """What to do with a key that the ledger knows but the configuration does not take."""
    first, source = found[0]
    if source == "native":
        return _NOT_BUILT if first.legal else f"not a setting: {first.must_change}. Remove it"
    names = " and ".join(knob.name for knob, _ in found)
    built = [knob for knob, _ in found if knob.built]
    if not built:
        return f"{_SYSTEMS[source]} name for {names}, a {_NOT_BUILT}"
    same = knobs.translate(key, value)
    advice = ", ".join(f"{knob.name} = {'...' if same is None else _shown(same)}" for knob in built)
    others = "".join(f"; {knob.name} is a known knob, not built in this version" for knob, _ in found if not knob.built)
    notes = list(dict.fromkeys(knob.note for knob in built if knob.note))
    told = [note for note in notes if not any(note != other and note in other for other in notes)]
    return f"{_SYSTEMS[source]} name for {names}: write {advice}{others}" + "".join(f" ({note})" for note in told)


def _nearest(key: str) -> str | None:
    """The known name most like `key`, judged by the whole name and by its last part; None if nothing is like it."""

    def likeness(name: str) -> float:
        whole = difflib.SequenceMatcher(None, key, name).ratio()
        last = difflib.SequenceMatcher(None, key.rpartition(".")[2], name.rpartition(".")[2]).ratio()
        # A key that was put into the wrong section must not lose to a stranger in the section it was put into, and a section alone is
        # no likeness.
        return max(whole if last >= 0.5 else 0.0, 0.97 * last)

    names = dict.fromkeys([*keys(), *(knob.name for knob in knobs.LEDGER if knob.legal)])
    best = max(names, key=likeness)
    return best if likeness(best) >= 0.65 else None


def _suggestion(nearest: str | None) -> str:
    if nearest is None:
        return ", and none is like it: remove it. docs/reference.md lists every key"
    built = "" if nearest in keys() else ", which is a knob not built in this version: remove it"
    return f"; the nearest is {nearest}{built}"


# ---- values ------------------------------------------------------------------------------------------------------------------------


def _wrong_values(tables: Mapping[str, Any]) -> Iterator[Mistake]:
    """Where the schema does not accept `tables`, one mistake per key, in our words: pydantic says a union's alternatives one by one."""
    try:
        # A missing section must be told key by key.
        Config.model_validate({name: tables.get(name, {}) for name in sections()})
    except ValidationError as invalid:
        errors = invalid.errors(include_url=False)
    else:
        return
    fields = keys()
    kinds: dict[str, str] = {}
    for error in errors:
        kinds.setdefault(".".join(str(part) for part in error["loc"][:2]), error["type"])
    for key, kind in kinds.items():
        section, _, name = key.partition(".")
        if key not in fields:
            text = f"must be a table, got {_shown(tables[key])}. Write [{key}] and its keys on lines of their own"
            yield Mistake(f"{key}: {text}", (key, *(f"{key}.{field}" for field in sections()[key].model_fields)))
        elif name not in tables.get(section, {}):
            yield Mistake(f"{key}: missing, and every run needs it. {fields[key].description}", (key,))
        else:
            found = knobs.find(key)
            note = f". {found[0].note}" if kind == "literal_error" and found and found[0].note else ""
            yield Mistake(f"{key}: must be {legal_values(fields[key])}, got {_shown(tables[section][name])}{note}", (key,))


def _with_stand_ins(tables: Mapping[str, Any], wrong: set[str]) -> Config:
    """The configuration with defaults in place of wrong values, so that the rules that do not read them can still be asked."""
    clean: dict[str, dict[str, Any]] = {
        name: {} if name in wrong else {key: value for key, value in tables.get(name, {}).items() if f"{name}.{key}" not in wrong}
        for name in sections()
    }
    clean["model"].setdefault("path", ".")
    clean["data"].setdefault("train", ".")
    return Config.model_validate(clean)


_BOUNDS = (("gt", "greater than"), ("ge", "at least"), ("lt", "less than"), ("le", "at most"))
_PLAIN = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Any: "any value"}


def legal_values(field: FieldInfo) -> str:
    """The values a key takes, in words: `"auto" or a whole number greater than 0`."""
    return _legal(field.annotation, field.metadata)


def _legal(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _legal(arguments[0], [bound for extra in arguments[1:] for bound in getattr(extra, "metadata", [extra])])
    if origin is Literal:
        return _either([_shown(value) for value in arguments])
    if origin in (Union, types.UnionType):
        choices = [_legal(kind, metadata) for kind in arguments if kind is not type(None)]
        return _either(sorted(choices, key=lambda words: not words.startswith('"')))
    if origin is list:
        return f"a list of {_legal(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)}, each {_legal(arguments[0])}"
    if origin is dict:
        return "a table" if arguments[1] is Any else f"a table of {_legal(arguments[1])}"
    bounds = [f"{words} {getattr(bound, name)}" for bound in metadata for name, words in _BOUNDS if hasattr(bound, name)]
    filled = " that is not empty" if any(getattr(bound, "min_length", 0) for bound in metadata) else ""
    return " ".join([_PLAIN[annotation] + filled, *filter(None, [" and ".join(bounds)])])


def _either(choices: Sequence[str]) -> str:
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"


def _shown(value: Any) -> str:
    text = toml_value(value)
    if isinstance(value, float) and not math.isfinite(value):
        text += " (not a finite number)"
    return text if len(text) <= 100 else f"{text[:97]}..."


# ---- rules between keys ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    keys: tuple[str, ...]  # all that it reads: it is not asked when one of them is reported already
    check: Check


def _steps_or_epochs(config: Config) -> Iterator[str]:
    steps, epochs = config.run.steps, config.run.epochs
    if steps is None and epochs is None:
        yield "run.steps: neither run.steps nor run.epochs is given. Set one of them, for example run.steps = 100"
    if steps is not None and epochs is not None:
        yield f"run.steps: given together with run.epochs ({steps} and {epochs}). Remove one of them"


def _validation_data(config: Config) -> Iterator[str]:
    asked = [key for key, on in (("run.eval_every", config.run.eval_every > 0), ("run.eval_before", config.run.eval_before)) if on]
    if asked and config.data.val is None:
        yield f"data.val: missing, but {' and '.join(asked)} asks for validation. Set data.val, or remove {' and '.join(asked)}"


def _one_kv_size(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.kv_bytes != "auto" and rollout.memory_fraction != "auto":
        yield (
            f"rollout.kv_bytes: given together with rollout.memory_fraction ({rollout.kv_bytes} and {rollout.memory_fraction}); "
            "both set the size of the KV cache. Remove one of them"
        )


def _temperature_of(section: str) -> Callable[[Config], Iterator[str]]:
    """Beyond these bounds float32 cannot hold the logits, or their differences, once they are divided by the temperature."""

    def check(config: Config) -> Iterator[str]:
        value = getattr(config, section).temperature
        if value != 0 and not LEAST_TEMPERATURE <= value <= MOST_TEMPERATURE:
            yield (
                f"{section}.temperature: {value} is out of range. Use one from {LEAST_TEMPERATURE} to {MOST_TEMPERATURE}, "
                "or 0 for greedy samples"
            )

    return check


def _batching_of(role: str) -> Callable[[Config], Iterator[str]]:
    def check(config: Config) -> Iterator[str]:
        settings = getattr(config, role)
        if settings.dynamic_batch and settings.micro_batch is not None:
            yield (
                f"{role}.micro_batch: {settings.micro_batch} has no effect while {role}.dynamic_batch is on. "
                f"Remove it, or set {role}.dynamic_batch = false"
            )
        if settings.dynamic_batch:
            return
        if settings.micro_batch is None:
            yield f"{role}.micro_batch: missing, but {role}.dynamic_batch is off. Set {role}.micro_batch, the samples of a micro-batch"
        for key in ("token_budget", "forward_token_budget"):
            if getattr(settings, key, "auto") != "auto":
                yield (
                    f"{role}.{key}: {getattr(settings, key)} has no effect while {role}.dynamic_batch is off. "
                    f"Remove it, or remove {role}.dynamic_batch"
                )

    return check


def _eval_sampling(config: Config) -> Iterator[str]:
    section = config.eval
    if section.temperature > 0:
        return
    without_effect = {"top_p": section.top_p < 1, "top_k": section.top_k > 0, "samples_per_prompt": section.samples_per_prompt > 1}
    for key, given in without_effect.items():
        if given:
            yield f"eval.{key}: eval.temperature is 0, every sample of a prompt is the same. Remove the key, or set a temperature above 0."


def _enough_prompts(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.minibatches_per_step > algorithm.prompts_per_step:
        yield (
            f"algorithm.minibatches_per_step: {algorithm.minibatches_per_step} is more than algorithm.prompts_per_step "
            f"({algorithm.prompts_per_step}); a mini-batch holds at least one prompt. Lower it, or raise prompts_per_step"
        )


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def _offline() -> bool:
    given = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return given.upper() in {"1", "ON", "YES", "TRUE"}


def _model_folder(key: str, path: str | None) -> Iterator[str]:
    if path is None:
        return
    folder = Path(path)
    if folder.is_dir():
        if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
            yield f"{key}: {_shown(path)} holds an adapter, not a model. Give the model that it belongs to, and the adapter as lora.path"
        elif not (folder / "config.json").is_file():
            yield f"{key}: {_shown(path)} has no config.json. Give the folder of a Hugging Face model"
    elif folder.exists():
        yield f"{key}: {_shown(path)} is a file. Give the folder of a Hugging Face model"
    elif not _HUB_NAME.fullmatch(path):
        yield f"{key}: no such folder: {_shown(path)}{_tilde(path)}. Give the folder of a Hugging Face model, or a hub name like org/name"
    elif _offline() and not _cached(path):
        yield (
            f"{key}: no such folder: {_shown(path)}; it is not in the hub's cache and HF_HUB_OFFLINE forbids asking the hub for it. "
            "Give the folder of a Hugging Face model, or unset HF_HUB_OFFLINE"
        )


def _cached(name: str) -> bool:
    """Whether any revision of a hub's model was downloaded before."""
    from huggingface_hub import constants

    return any((Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").glob("snapshots/*/config.json"))


def _tilde(path: str) -> str:
    return " (~ is not expanded)" if path.startswith("~") else ""


def _revision_of_a_hub_name(config: Config) -> Iterator[str]:
    if config.model.revision is not None and Path(config.model.path).is_dir():
        yield f"model.revision: {_shown(config.model.revision)} has no effect, since model.path is a folder. Remove it"


def _data_exists(key: str, given: str | list[str] | None) -> Iterator[str]:
    paths = [given] if isinstance(given, str) else given or []
    for path in paths:
        if not path or not Path(path).exists():
            yield f"{key}: no such file or folder: {_shown(path)}{_tilde(path)}. Paths are relative to the current directory"


def _template_exists(key: str, path: str | None) -> Iterator[str]:
    if path is not None and not Path(path).is_file():
        yield f"{key}: no such file: {_shown(path)}{_tilde(path)}. Paths are relative to the current directory"


def _adapter_exists(config: Config) -> Iterator[str]:
    path = config.lora.path
    if path is not None and not (Path(path) / "adapter_config.json").is_file():
        yield f"lora.path: {_shown(path)}{_tilde(path)} has no adapter_config.json. Give the folder of an adapter that peft saved"


REWARD_MODEL = "reward_model"
# Each file in reward/rules is a built-in reward: its name is known without importing it.
REWARDS = (*sorted(file.stem for file in (Path(__file__).parent / "reward" / "rules").glob("[!_]*.py")), REWARD_MODEL)


def reward_weights(function: str | Mapping[str, float]) -> dict[str, float]:
    """A reward as a weighted sum, which a single name is too: `"math"` -> `{"math": 1.0}`."""
    return {function: 1.0} if isinstance(function, str) else dict(function)


def _reward_exists(key: str, function: str) -> Iterator[str]:
    if function in REWARDS:
        return
    file, _, name = function.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        yield f"{key}: {_shown(function)} names no reward. Use {_either([_shown(known) for known in REWARDS])}, or write FILE.py:NAME"
    elif not Path(file).is_file():
        yield f"{key}: no such file: {_shown(file)}{_tilde(file)}. Paths are relative to the current directory"


def _rewards_exist(config: Config) -> Iterator[str]:
    named = {"reward.function": config.reward.function, **{f"reward.sources.{key}": each for key, each in config.reward.sources.items()}}
    for key, function in named.items():
        weights = reward_weights(function)
        if not weights:
            yield f"{key}: an empty table is no reward. Name at least one function with its weight"
        for name, weight in weights.items():
            yield from _reward_exists(key, name)
            if weight == 0:
                yield f"{key}: {_shown(name)} has the weight 0 and no effect. Remove it, or give it another weight"


def uses_reward_model(config: Config) -> bool:
    return any(REWARD_MODEL in reward_weights(function) for function in (config.reward.function, *config.reward.sources.values()))


def _reward_model_named(config: Config) -> Iterator[str]:
    if uses_reward_model(config) and config.reward_model.path is None:
        yield "reward_model.path: missing, but the reward names reward_model. Set it to the reward model's folder"
    if not uses_reward_model(config):
        for key in sorted(config.reward_model.model_fields_set):
            yield f"reward_model.{key}: no reward names reward_model. Set reward.function = {_shown(REWARD_MODEL)}, or remove the key"


def _function_named(config: Config) -> Iterator[str]:
    named = {name for function in (config.reward.function, *config.reward.sources.values()) for name in reward_weights(function)}
    # What becomes of a sample that the model cannot read is decided by the same two keys.
    without_effect = sorted(config.reward.model_fields_set - {"function", "sources", "on_error", "error_score"})
    for key in without_effect if named == {REWARD_MODEL} else ():
        yield f"reward.{key}: the only reward is reward_model, which calls no function. Remove the key, or name a function too"


def _validation_used(config: Config) -> Iterator[str]:
    if config.data.val is not None:
        return
    for key in [
        *(f"eval.{key}" for key in sorted(config.eval.model_fields_set)),
        *(["log.val_samples"] if "val_samples" in config.log.model_fields_set else []),
    ]:
        yield f"{key}: there is no validation data. Set data.val, or remove the key"


_THRESHOLDS = {
    "entropy_floor": "entropy-collapse",
    "max_clip_ratio": "all-clipped",
    "max_reward_errors": "reward-errors",
    "max_logprob_gap": "logprob-gap",
}


def _health_used(config: Config) -> Iterator[str]:
    health = config.health
    if "patience" in health.model_fields_set and not health.stop:
        yield "health.patience: health.stop is off, so no number of steps stops the run. Remove one of them"
    for key, rule in _THRESHOLDS.items():
        if key in health.model_fields_set and rule in health.ignore:
            yield f"health.{key}: health.ignore leaves {rule} out. Remove the key, or {rule} from health.ignore"


def _no_effect(config: Config) -> Iterator[str]:
    if "min_lr_ratio" in config.train.model_fields_set and config.train.schedule == "constant":
        yield 'train.min_lr_ratio: train.schedule is "constant", which ends where it begins. Remove the key, or set another schedule'
    if "error_score" in config.reward.model_fields_set and config.reward.on_error == "exclude":
        yield 'reward.error_score: reward.on_error is "exclude", so a failed sample has no score. Remove the key, or set on_error = "score"'


def _recompute_used(config: Config) -> Iterator[str]:
    train = config.train
    recomputes = {train.recompute, config.critic.recompute} & {"selective", "full"}
    for key in ("recompute_layers", "recompute_method"):
        if key in train.model_fields_set and not recomputes:
            yield (
                f"train.{key}: train.recompute is {_shown(train.recompute)}, which names no layers to recompute. Remove the key, or set "
                'train.recompute to "selective" or "full"'
            )
    if "recompute_method" in train.model_fields_set and recomputes and train.recompute_layers == "auto":
        yield (
            f"train.recompute_method: {_shown(train.recompute_method)} has no effect while all layers are recomputed one by one. Remove "
            "it, or set train.recompute_layers"
        )


def _entropy_of_ref(config: Config) -> Iterator[str]:
    if config.ref.entropy_chunk != "auto" and not config.train.fused_head:
        yield (
            f"ref.entropy_chunk: {config.ref.entropy_chunk} has no effect while train.fused_head is off, since the reference role computes "
            "no entropy. Remove one of them"
        )


# What a feature of knobs.TOGETHER is in a configuration: the key as a user wrote it where it is on, None where it is off or left to auto.
FEATURES: Mapping[str, Callable[[Config], str | None]] = {
    "compile": lambda config: "train.compile = true" if config.train.compile is True else None,
    "fused_layers": lambda config: "train.fused_layers = true" if config.train.fused_layers is True else None,
    "lora": lambda config: f"lora.rank = {config.lora.rank}" if config.lora.rank else None,
    "fused_head": lambda config: "train.fused_head = true" if config.train.fused_head else None,
    "cuda_graphs": lambda config: "rollout.cuda_graphs = true" if config.rollout.cuda_graphs is True else None,
    "selective": lambda config: _recomputes(config, "selective"),
    "full": lambda config: _recomputes(config, "full"),
    "offload_activations": lambda config: _switched_on(config, "offload_activations"),
    "offload_params": lambda config: "train.offload_params = true" if config.train.offload_params is True else None,
}


def _recomputes(config: Config, kind: str) -> str | None:
    return next((f"{name}.recompute = {_shown(kind)}" for name in ("train", "critic") if getattr(config, name).recompute == kind), None)


def _switched_on(config: Config, key: str) -> str | None:
    return next((f"{name}.{key} = true" for name in ("train", "critic") if getattr(getattr(config, name), key) is True), None)


def _together(config: Config) -> Iterator[str]:
    for pair in knobs.TOGETHER:
        one, other = FEATURES[pair.one](config), FEATURES[pair.other](config)
        if not pair.allowed and one and other:
            yield f"{one.partition(' ')[0]}: {one} does not go with {other}: {pair.why}. Remove one of them"


def _lora_used(config: Config) -> Iterator[str]:
    if config.lora.rank:
        return
    for key in sorted(config.lora.model_fields_set - {"rank"}):
        yield f"lora.{key}: lora.rank is 0, so there are no adapters. Set lora.rank, for example to 16, or remove the key"


def _run_folder(config: Config) -> Iterator[str]:
    if Path(config.run.dir).is_file():
        yield f"run.dir: {_shown(config.run.dir)} is a file. Name a folder, which need not exist"


RULES: tuple[Rule, ...] = (
    Rule(("model.path",), lambda config: _model_folder("model.path", config.model.path)),
    Rule(("model.path", "model.revision"), _revision_of_a_hub_name),
    Rule(("model.chat_template",), lambda config: _template_exists("model.chat_template", config.model.chat_template)),
    Rule(("data.train",), lambda config: _data_exists("data.train", config.data.train)),
    Rule(("data.val",), lambda config: _data_exists("data.val", config.data.val)),
    Rule(("data.val", "run.eval_every", "run.eval_before"), _validation_data),
    Rule(("algorithm.minibatches_per_step", "algorithm.prompts_per_step"), _enough_prompts),
    Rule(("rollout.kv_bytes", "rollout.memory_fraction"), _one_kv_size),
    Rule(("rollout.temperature",), _temperature_of("rollout")),
    Rule(("eval.temperature",), _temperature_of("eval")),
    Rule(("reward.function", "reward.sources"), _rewards_exist),
    Rule(("reward.function", "reward.sources", "reward_model.path"), _reward_model_named),
    Rule(("reward_model.path",), lambda config: _model_folder("reward_model.path", config.reward_model.path)),
    Rule(("reward_model.chat_template",), lambda config: _template_exists("reward_model.chat_template", config.reward_model.chat_template)),
    Rule(("critic.path",), lambda config: _model_folder("critic.path", config.critic.path)),
    Rule(("critic.dynamic_batch", "critic.micro_batch", "critic.token_budget", "critic.forward_token_budget"), _batching_of("critic")),
    Rule(("reward_model.dynamic_batch", "reward_model.micro_batch", "reward_model.forward_token_budget"), _batching_of("reward_model")),
    Rule(("lora.rank", "lora.alpha", "lora.targets", "lora.parameters", "lora.path"), _lora_used),
    Rule(("lora.path",), _adapter_exists),
    Rule(("reward.function", "reward.sources"), _function_named),
    Rule(("data.val",), _validation_used),
    Rule(("health.stop", "health.ignore"), _health_used),
    Rule(("train.schedule", "reward.on_error"), _no_effect),
    Rule(("train.recompute", "train.recompute_layers", "train.recompute_method", "critic.recompute"), _recompute_used),
    Rule(("ref.entropy_chunk", "train.fused_head"), _entropy_of_ref),
    Rule(
        (
            *(f"train.{key}" for key in ("compile", "fused_layers", "fused_head", "recompute", "offload_activations", "offload_params")),
            *("critic.recompute", "critic.offload_activations", "lora.rank", "rollout.cuda_graphs"),
        ),
        _together,
    ),
    Rule(("actor.dynamic_batch", "actor.micro_batch", "actor.token_budget", "actor.forward_token_budget"), _batching_of("actor")),
    Rule(("ref.dynamic_batch", "ref.micro_batch", "ref.forward_token_budget"), _batching_of("ref")),
    Rule(("ref.path",), lambda config: _model_folder("ref.path", config.ref.path)),
    Rule(("run.steps", "run.epochs"), _steps_or_epochs),
    Rule(("run.dir",), _run_folder),
    Rule(("eval.temperature", "eval.top_p", "eval.top_k", "eval.samples_per_prompt"), _eval_sampling),
)


def warnings(config: Config) -> list[str]:
    """What is allowed but may not be what the user meant."""
    rollout = config.rollout
    not_applied = "the trainer does not apply it, its log-probs are those of the full softmax"
    conditions = (
        (rollout.top_p < 1, f"rollout.top_p = {rollout.top_p}: {not_applied}"),
        (rollout.top_k > 0, f"rollout.top_k = {rollout.top_k}: {not_applied}"),
    )
    return [text for holds, text in conditions if holds]


# ---- writing and comparing ---------------------------------------------------------------------------------------------------------


def flatten(config: Config) -> dict[str, Any]:
    """Every dotted key with its value, defaults included."""
    return {key: getattr(getattr(config, key.partition(".")[0]), key.partition(".")[2]) for key in keys()}


def snapshot(config: Config) -> dict[str, Any]:
    """What a checkpoint keeps of a configuration: every key, in JSON's types."""
    plain: dict[str, Any] = json.loads(json.dumps(flatten(config), default=str))
    return plain


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The dotted keys in which two snapshots differ, those of FREE_ON_RESUME left out. One may come from a version that had fewer keys:
    what only one of them has is not compared."""
    return [key for key in saved if key in now and saved[key] != now[key] and key not in FREE_ON_RESUME]


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


def toml_value(value: Any) -> str:
    """One value as TOML writes it."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            # TOML's basic strings are JSON's, but for the one control character that JSON leaves bare.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(toml_value(item) for item in value)}]"
        case Mapping():
            inside = ", ".join(f"{_toml_key(str(key))} = {toml_value(item)}" for key, item in value.items())
            return f"{{ {inside} }}" if inside else "{}"
        case datetime.datetime() | datetime.date() | datetime.time():
            return value.isoformat()
        case _:
            return str(value)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)
