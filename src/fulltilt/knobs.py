"""The ledger of performance knobs: every one that verl's and ChatLearn's tuning guides name, as data.

Enters: nothing. Leaves: `LEDGER`, one `Knob` per native name, `find`, which knows a key in any of the three spellings, and `TOGETHER`:
which of the features that touch layers and head may be on at once. Guaranteed: an
alias stands with one knob only, or is listed in `SHARED`; a knob with `built` false is not a key of the configuration, and setting it is an
error. What a run computes must not change with a knob of the sections "Rollout" and "Training memory and speed", nor with a role's
batching; the knobs under `algorithm` are part of the algorithm and no tuner touches them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Source = Literal["native", "verl", "chatlearn"]

ROLLOUT = "Rollout"
BATCHES = "Batches"
TRAINING = "Training memory and speed"

_COUNT = '"auto" or a whole number greater than 0'
_WHOLE = "a whole number greater than 0"
_SWITCH = "true or false"
_AUTO_SWITCH = '"auto", true or false'
_ALGORITHMIC = "nothing: it is part of the algorithm, and no tuner touches it"


@dataclass(frozen=True)
class Knob:
    """One performance setting under all its names.

    Example: Knob("rollout.max_seqs", "Rollout", verl=("actor_rollout_ref.rollout.max_num_seqs",), ..., built=True)
    """

    name: str  # the key in our configuration
    section: str  # ROLLOUT, BATCHES or TRAINING
    verl: tuple[str, ...]  # full dotted names; one that ends in ".*" stands for every key below it
    chatlearn: tuple[str, ...]
    legal: str  # the values it takes, in words; empty: nothing can be set, the engine does it by itself
    must_change: str  # the measurement that proves it
    auto: str  # what it is when left alone
    built: bool  # in this version
    note: str = ""  # what a user of an alias must know: another unit, the opposite sense, a slip in a guide

    @property
    def state(self) -> str:
        """For tables: "built", "not built", or "always on" for a behaviour that takes no value."""
        if not self.legal:
            return "always on"
        return "built" if self.built else "not built"


_ROLLOUT_KNOBS = (
    Knob(
        name="rollout.kv_bytes",
        section=ROLLOUT,
        verl=(),
        chatlearn=(),
        legal=_COUNT,
        must_change="KV blocks; most samples decoded at once",
        auto="what is measured free, less a reserve",
        built=True,
        note="The same memory as rollout.memory_fraction, in bytes: set one of the two.",
    ),
    Knob(
        name="rollout.memory_fraction",
        section=ROLLOUT,
        verl=("actor_rollout_ref.rollout.gpu_memory_utilization",),
        chatlearn=("models.policy.gpu_memory_utilization",),
        legal='"auto" or a number greater than 0, at most 1',
        must_change="KV blocks; most samples decoded at once",
        auto="what is measured free, less a reserve",
        built=True,
        note="gpu_memory_utilization is a share of the GPU's total memory for the whole instance in vLLM from 0.7 on, and of free memory "
        "for weights and KV cache in SGLang. Here it is the share of the memory free at start that becomes KV cache.",
    ),
    Knob(
        name="rollout.max_seqs",
        section=ROLLOUT,
        verl=("actor_rollout_ref.rollout.max_num_seqs",),
        chatlearn=("models.policy.generation_batch_size",),
        legal=_COUNT,
        must_change="samples decoded at once",
        auto="all samples of a step, at most 1024 (256 on CPU)",
        built=True,
    ),
    Knob(
        name="rollout.max_batched_tokens",
        section=ROLLOUT,
        verl=("actor_rollout_ref.rollout.max_num_batched_tokens",),
        chatlearn=("models.policy.max_num_batched_tokens",),
        legal=_COUNT,
        must_change="tokens of a prefill pass",
        auto="16384 on CUDA, 4096 on CPU, or max_seqs if that is more",
        built=True,
    ),
    Knob(
        name="rollout.tensor_parallel",
        section=ROLLOUT,
        verl=("actor_rollout_ref.rollout.tensor_model_parallel_size", "actor_rollout_ref.rollout.tensor_parallel_size"),
        chatlearn=("models.policy.tensor_model_parallel_size",),
        legal=_COUNT,
        must_change="weight bytes per GPU; number of replicas",
        auto="the smallest that fits: data parallel beats tensor parallel",
        built=False,
        note="tensor_parallel_size is the guides' spelling; verl's key is tensor_model_parallel_size.",
    ),
    Knob(
        name="rollout.chunked_prefill",
        section=ROLLOUT,
        verl=("actor_rollout_ref.rollout.enable_chunked_prefill",),
        chatlearn=(),
        legal=_SWITCH,
        must_change="longest decode stall during prefill",
        auto="on",
        built=True,
    ),
    Knob(
        name="rollout.prefix_sharing",
        section=ROLLOUT,
        verl=("actor_rollout_ref.rollout.enable_prefix_caching",),
        chatlearn=(),
        legal=_SWITCH,
        must_change="prefilled tokens; cache hit rate",
        auto="on",
        built=True,
    ),
    Knob(
        name="rollout.cuda_graphs",
        section=ROLLOUT,
        verl=("actor_rollout_ref.rollout.enforce_eager",),
        chatlearn=("models.policy.enforce_eager",),
        legal=_AUTO_SWITCH,
        must_change="kernel launches per decode step",
        auto="on for CUDA, where a graph can hold the model and train.offload_params is not on",
        built=True,
        note="enforce_eager has the opposite sense: enforce_eager = true is cuda_graphs = false.",
    ),
    Knob(
        name="rollout.release_memory",
        section=ROLLOUT,
        verl=("actor_rollout_ref.rollout.free_cache_engine",),
        chatlearn=("free_gpu_memory", "models.policy.free_gpu_memory", "models.policy.free_gpu_memory.*"),
        legal=_AUTO_SWITCH,
        must_change="bytes held by the engine during the update",
        auto="on",
        built=True,
    ),
    Knob(
        name="rollout.log_stats",
        section=ROLLOUT,
        verl=("actor_rollout_ref.rollout.disable_log_stats",),
        chatlearn=(),
        legal=_SWITCH,
        must_change="lines in the log with running, waiting, KV use, hit rate, preemptions, tokens/s and latency percentiles; the metrics "
        "beyond the counts",
        auto="on",
        built=True,
        note="disable_log_stats has the opposite sense: disable_log_stats = false is log_stats = true.",
    ),
    Knob(
        name="rollout.engine",
        section=ROLLOUT,
        verl=("actor_rollout_ref.rollout.name",),
        chatlearn=("runtime_args.rollout_backend",),
        legal='"native"',
        must_change="the engine that generates",
        auto="native",
        built=True,
        note="vllm, sglang, trtllm and tgi are not built in this version.",
    ),
    Knob(
        name="rollout.preemption",
        section=ROLLOUT,
        verl=(),
        chatlearn=(),
        legal="",
        must_change="when KV memory runs out a sample is put back and later finished: nothing lost, counted",
        auto="always on",
        built=False,
        note="It takes no value: the engine does it by itself.",
    ),
)

_ALGORITHM_KNOBS = (
    Knob(
        name="algorithm.prompts_per_step",
        section=BATCHES,
        verl=("data.train_batch_size",),
        chatlearn=("runtime_args.sample_per_episode",),
        legal=_WHOLE,
        must_change=_ALGORITHMIC,
        auto="64",
        built=True,
        note="Counted in prompts, over all devices. ChatLearn counts samples: divide sample_per_episode by num_inference_per_prompt.",
    ),
    Knob(
        name="algorithm.samples_per_prompt",
        section=BATCHES,
        verl=("actor_rollout_ref.rollout.n",),
        chatlearn=("runtime_args.num_inference_per_prompt", "models.policy.num_inference_per_prompt"),
        legal=_WHOLE,
        must_change=_ALGORITHMIC,
        auto="8",
        built=True,
    ),
    Knob(
        name="algorithm.epochs",
        section=BATCHES,
        verl=("actor_rollout_ref.actor.ppo_epochs", "critic.ppo_epochs"),
        chatlearn=("runtime_args.num_training_epoch",),
        legal=_WHOLE,
        must_change=_ALGORITHMIC,
        auto="1",
        built=True,
    ),
    Knob(
        name="algorithm.prompts_per_round",
        section=BATCHES,
        verl=("data.gen_batch_size",),
        chatlearn=(),
        legal=_WHOLE,
        must_change=_ALGORITHMIC,
        auto="prompts_per_step",
        built=True,
        note="For dynamic sampling.",
    ),
    Knob(
        name="algorithm.minibatches_per_step",
        section=BATCHES,
        verl=("actor_rollout_ref.actor.ppo_mini_batch_size", "critic.ppo_mini_batch_size"),
        chatlearn=("runtime_args.train_global_batch_size",),
        legal=_WHOLE,
        must_change=_ALGORITHMIC,
        auto="1",
        built=True,
        note="A number of mini-batches, not their size: data.train_batch_size / ppo_mini_batch_size in verl, "
        "sample_per_episode / train_global_batch_size in ChatLearn. Any number of devices; nothing need divide evenly.",
    ),
)

_MICRO_BATCH_NOTE = "Samples per GPU, used when dynamic_batch is off. verl's names without _per_gpu count over all GPUs and are deprecated."
_MICRO_BATCH_PROOF = "samples of a micro-batch; micro-batch count"
_DYNAMIC_PROOF = "micro-batches are filled by tokens, not by samples"
_BUDGET_PROOF = "micro-batch count; peak memory"
_BUDGET_NOTE = "A hard cap on tokens per GPU; with sequence parallelism a micro-batch holds that many times the budget, as in verl."
_PACKING_NOTE = "ChatLearn's packing sets two knobs here: packing and dynamic batch. Its guide says it is on by default; its code says off."

_BATCH_KNOBS = (
    Knob(
        name="actor.micro_batch",
        section=BATCHES,
        verl=(
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
            "actor_rollout_ref.actor.ppo_micro_batch_size",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size",
        ),
        chatlearn=(
            "runtime_args.train_micro_batch_size",
            "models.policy_trainer.train_micro_batch_size",
            "models.policy_trainer.generation_batch_size",
        ),
        legal=_WHOLE,
        must_change=_MICRO_BATCH_PROOF,
        auto="not used: dynamic_batch is on",
        built=True,
        note=_MICRO_BATCH_NOTE,
    ),
    Knob(
        name="ref.micro_batch",
        section=BATCHES,
        verl=("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", "actor_rollout_ref.ref.log_prob_micro_batch_size"),
        chatlearn=("models.ref_policy.generation_batch_size",),
        legal=_WHOLE,
        must_change=_MICRO_BATCH_PROOF,
        auto="not used: dynamic_batch is on",
        built=True,
        note=_MICRO_BATCH_NOTE,
    ),
    Knob(
        name="critic.micro_batch",
        section=BATCHES,
        verl=(
            "critic.ppo_micro_batch_size_per_gpu",
            "critic.ppo_micro_batch_size",
            "critic.forward_micro_batch_size_per_gpu",
            "critic.forward_micro_batch_size",
        ),
        chatlearn=(),
        legal=_WHOLE,
        must_change=_MICRO_BATCH_PROOF,
        auto="not used: dynamic_batch is on",
        built=True,
        note=_MICRO_BATCH_NOTE + " verl's guide lists critic.forward_micro_batch_size_per_gpu as a cap on tokens; it counts samples.",
    ),
    Knob(
        name="reward_model.micro_batch",
        section=BATCHES,
        verl=(
            "reward_model.micro_batch_size_per_gpu",
            "reward_model.micro_batch_size",
            "reward_model.forward_micro_batch_size_per_gpu",
        ),
        chatlearn=("models.reward.generation_batch_size",),
        legal=_WHOLE,
        must_change=_MICRO_BATCH_PROOF,
        auto="not used: dynamic_batch is on",
        built=True,
        note=_MICRO_BATCH_NOTE + " forward_micro_batch_size_per_gpu is the guide's spelling; verl's key is micro_batch_size_per_gpu.",
    ),
    Knob(
        name="actor.dynamic_batch",
        section=BATCHES,
        verl=(
            "actor_rollout_ref.actor.use_dynamic_bsz",
            "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz",
            "actor_rollout_ref.actor.use_dynamic_batchsize",
            "training.use_dynamic_batchsize",
            "use_dynamic_batchsize",
        ),
        chatlearn=("models.policy_trainer.packing", "packing"),
        legal=_SWITCH,
        must_change=_DYNAMIC_PROOF,
        auto="on",
        built=True,
        note="use_dynamic_batchsize is one guide's spelling; verl's key is use_dynamic_bsz. " + _PACKING_NOTE,
    ),
    Knob(
        name="ref.dynamic_batch",
        section=BATCHES,
        verl=("actor_rollout_ref.ref.log_prob_use_dynamic_bsz",),
        chatlearn=("models.ref_policy.packing",),
        legal=_SWITCH,
        must_change=_DYNAMIC_PROOF,
        auto="on",
        built=True,
        note=_PACKING_NOTE,
    ),
    Knob(
        name="critic.dynamic_batch",
        section=BATCHES,
        verl=("critic.use_dynamic_bsz",),
        chatlearn=(),
        legal=_SWITCH,
        must_change=_DYNAMIC_PROOF,
        auto="on",
        built=True,
    ),
    Knob(
        name="reward_model.dynamic_batch",
        section=BATCHES,
        verl=("reward_model.use_dynamic_bsz",),
        chatlearn=(),
        legal=_SWITCH,
        must_change=_DYNAMIC_PROOF,
        auto="on",
        built=True,
    ),
    Knob(
        name="actor.token_budget",
        section=BATCHES,
        verl=("actor_rollout_ref.actor.ppo_max_token_len_per_gpu",),
        chatlearn=("models.policy_trainer.max_token_in_packing",),
        legal=_COUNT,
        must_change=_BUDGET_PROOF,
        auto="8192 on CPU; on CUDA 16384, more for small models where it fits; the guides' hand rule is at least twice prompt and response",
        built=True,
        note=_BUDGET_NOTE,
    ),
    Knob(
        name="actor.forward_token_budget",
        section=BATCHES,
        verl=("actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",),
        chatlearn=("models.policy_trainer.max_token_in_packing",),
        legal=_COUNT,
        must_change=_BUDGET_PROOF,
        auto="twice the token budget: nothing is kept for a backward",
        built=True,
        note=_BUDGET_NOTE,
    ),
    Knob(
        name="ref.forward_token_budget",
        section=BATCHES,
        verl=("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",),
        chatlearn=("models.ref_policy.max_token_in_packing",),
        legal=_COUNT,
        must_change=_BUDGET_PROOF,
        auto="the actor's; with ref.path not enlarged for a small actor",
        built=True,
        note=_BUDGET_NOTE,
    ),
    Knob(
        name="critic.token_budget",
        section=BATCHES,
        verl=("critic.ppo_max_token_len_per_gpu",),
        chatlearn=(),
        legal=_COUNT,
        must_change=_BUDGET_PROOF,
        auto="twice the actor's number, as the guides' hand rule has it; with none, by the critic's own size: there is no vocabulary head",
        built=True,
        note=_BUDGET_NOTE,
    ),
    Knob(
        name="critic.forward_token_budget",
        section=BATCHES,
        verl=("critic.forward_max_token_len_per_gpu",),
        chatlearn=(),
        legal=_COUNT,
        must_change=_BUDGET_PROOF,
        auto="twice the critic's token budget",
        built=True,
        note=_BUDGET_NOTE,
    ),
    Knob(
        name="reward_model.forward_token_budget",
        section=BATCHES,
        verl=("reward_model.forward_max_token_len_per_gpu",),
        chatlearn=("models.reward.max_token_in_packing",),
        legal=_COUNT,
        must_change=_BUDGET_PROOF,
        auto="four times the actor's, as the guides' hand rule has it, not enlarged for a small actor: there is no vocabulary head",
        built=True,
        note=_BUDGET_NOTE,
    ),
    Knob(
        name="train.balance",
        section=BATCHES,
        verl=("trainer.balance_batch",),
        chatlearn=(),
        legal=_SWITCH,
        must_change="spread of token cost across ranks and across pipeline micro-batches",
        auto="on",
        built=False,
    ),
)


def _training(
    name: str,
    verl: tuple[str, ...],
    legal: str,
    must_change: str,
    auto: str,
    chatlearn: tuple[str, ...] = (),
    note: str = "",
    built: bool = False,
) -> Knob:
    return Knob(name, TRAINING, verl, chatlearn, legal, must_change, auto, built=built, note=note)


_RECOMPUTE_PROOF = "saved activation bytes; time"
_ACTIVATION_PROOF = "activation bytes on the GPU between forward and backward; works together with recompute"
_OFFLOAD_PROOF = "GPU bytes of that kind outside the phase that needs it"
_ULYSSES_PROOF = "tokens per rank in the layers = tokens / size"
_ULYSSES_NOTE = "Ulysses; sizes that a model's heads do not allow are refused with the legal ones."
_PADDING_PROOF = "pad tokens computed (0 when on)"
_RECOMPUTE = '"auto", "none", "selective" or "full"'
_AS_TRAIN = "as in [train]"
_WHEN_CROWDED = "on where parameters, gradients and optimizer would leave less than a fifth of the device free"
_WHEN_STILL_CROWDED = "on where they would even with the optimizer on the host"
_AS_LONG = "1 unless a sample does not fit"
_SHARD_PROOF = "parameter or activation bytes per GPU"

_MEMORY_KNOBS = (
    _training(
        "train.packing",
        ("actor_rollout_ref.model.use_remove_padding",),
        _SWITCH,
        _PADDING_PROOF,
        "on",
        chatlearn=("models.policy_trainer.packing", "packing"),
        note=_PACKING_NOTE,
        built=True,
    ),
    _training("critic.packing", ("critic.model.use_remove_padding",), _SWITCH, _PADDING_PROOF, _AS_TRAIN, built=True),
    _training("reward_model.packing", ("reward_model.model.use_remove_padding",), _SWITCH, _PADDING_PROOF, _AS_TRAIN, built=True),
    _training(
        "train.recompute",
        (
            "actor_rollout_ref.model.enable_gradient_checkpointing",
            "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity",
        ),
        _RECOMPUTE,
        _RECOMPUTE_PROOF,
        "the least with which a micro-batch is estimated to fit; none on CPU",
        chatlearn=("models.policy_trainer.recompute_granularity",),
        note='enable_gradient_checkpointing is a switch: true is "full", false is "none".',
        built=True,
    ),
    _training(
        "train.recompute_layers",
        ("actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers",),
        _COUNT,
        _RECOMPUTE_PROOF,
        "all, one by one",
        built=True,
    ),
    _training(
        "train.recompute_method",
        ("actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method",),
        '"block" or "uniform"',
        _RECOMPUTE_PROOF,
        "block",
        note="What recompute_layers counts, as in Megatron.",
        built=True,
    ),
    _training(
        "critic.recompute",
        ("critic.model.enable_gradient_checkpointing",),
        _RECOMPUTE,
        _RECOMPUTE_PROOF,
        _AS_TRAIN,
        note='enable_gradient_checkpointing is a switch: true is "full", false is "none".',
        built=True,
    ),
    _training(
        "train.offload_activations",
        ("actor_rollout_ref.model.enable_activation_offload",),
        _AUTO_SWITCH,
        _ACTIVATION_PROOF,
        "where recompute does not save enough",
        built=True,
    ),
    _training(
        "critic.offload_activations",
        ("critic.model.enable_activation_offload",),
        _AUTO_SWITCH,
        _ACTIVATION_PROOF,
        _AS_TRAIN,
        built=True,
    ),
    _training(
        "train.offload_params",
        ("actor_rollout_ref.actor.fsdp_config.param_offload", "actor_rollout_ref.actor.megatron.param_offload"),
        _AUTO_SWITCH,
        _OFFLOAD_PROOF,
        "off: CUDA graphs would have to be",
        chatlearn=("free_gpu_memory.offload_weights", "models.policy_trainer.free_gpu_memory.offload_weights"),
        note="On one device the actor's parameters leave only while another role works.",
        built=True,
    ),
    _training(
        "train.offload_optimizer",
        (
            "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
            "actor_rollout_ref.actor.megatron.optimizer_offload",
            "actor_rollout_ref.ref.megatron.optimizer_offload",
        ),
        _AUTO_SWITCH,
        _OFFLOAD_PROOF,
        _WHEN_CROWDED,
        chatlearn=("free_gpu_memory.offload_optimizer_states", "models.policy_trainer.free_gpu_memory.offload_optimizer_states"),
        note="The reference role has no optimizer: verl's key of that name there does nothing.",
        built=True,
    ),
    _training(
        "train.offload_grads",
        ("actor_rollout_ref.actor.megatron.grad_offload", "actor_rollout_ref.ref.megatron.grad_offload"),
        _AUTO_SWITCH,
        _OFFLOAD_PROOF,
        "with offload_optimizer",
        chatlearn=("free_gpu_memory.free_grad_buffers", "models.policy_trainer.free_gpu_memory.free_grad_buffers"),
        note="verl reads grad_offload nowhere. Between updates gradients are not moved, for they are zero: their memory is given back. The "
        "critic's go the same way.",
        built=True,
    ),
    _training(
        "ref.offload_params",
        ("actor_rollout_ref.ref.fsdp_config.param_offload", "actor_rollout_ref.ref.megatron.param_offload"),
        _AUTO_SWITCH,
        _OFFLOAD_PROOF,
        _WHEN_STILL_CROWDED,
        chatlearn=("models.ref_policy.free_gpu_memory.offload_weights",),
        built=True,
    ),
    _training(
        "critic.offload_params",
        ("critic.model.fsdp_config.param_offload",),
        _AUTO_SWITCH,
        _OFFLOAD_PROOF,
        f"{_AS_TRAIN}; auto: {_WHEN_STILL_CROWDED}",
        built=True,
    ),
    _training(
        "critic.offload_optimizer", ("critic.model.fsdp_config.optimizer_offload",), _AUTO_SWITCH, _OFFLOAD_PROOF, _AS_TRAIN, built=True
    ),
    _training("reward_model.offload_params", (), _AUTO_SWITCH, _OFFLOAD_PROOF, _WHEN_STILL_CROWDED, built=True),
    _training(
        "train.sequence_parallel",
        (
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
            "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size",
            "training.sequence_parallel",
            "training.ulysses_degree",
            "ulysses_degree",
        ),
        _COUNT,
        _ULYSSES_PROOF,
        _AS_LONG,
        chatlearn=("models.policy_trainer.ulysses_sequence_parallel_size", "ulysses_sequence_parallel_size"),
        note=_ULYSSES_NOTE + " training.sequence_parallel and ulysses_degree are one guide's spellings, not verl keys.",
    ),
    _training(
        "ref.sequence_parallel",
        ("actor_rollout_ref.ref.ulysses_sequence_parallel_size", "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size"),
        _COUNT,
        _ULYSSES_PROOF,
        _AS_LONG,
        chatlearn=("models.ref_policy.ulysses_sequence_parallel_size",),
        note=_ULYSSES_NOTE,
    ),
    _training(
        "critic.sequence_parallel",
        ("critic.ulysses_sequence_parallel_size",),
        _COUNT,
        _ULYSSES_PROOF,
        _AS_LONG,
        note=_ULYSSES_NOTE,
    ),
    _training(
        "reward_model.sequence_parallel",
        ("reward_model.ulysses_sequence_parallel_size",),
        _COUNT,
        _ULYSSES_PROOF,
        _AS_LONG,
        note=_ULYSSES_NOTE,
    ),
)

_SPEED_KNOBS = (
    _training(
        "train.fused_head",
        ("actor_rollout_ref.model.use_fused_kernels", "actor_rollout_ref.model.fused_kernel_options.impl_backend"),
        _SWITCH,
        "largest temporary of the head",
        "on",
        note="There is one implementation for each device: fused_kernel_options.impl_backend has no counterpart.",
        built=True,
    ),
    _training(
        "train.entropy_chunk",
        (
            "actor_rollout_ref.actor.entropy_from_logits_with_chunking",
            "actor_rollout_ref.actor.fsdp_config.entropy_from_logits_with_chunking",
        ),
        _COUNT,
        "largest temporary of the entropy, on every path",
        "as many tokens as stay within a bounded piece of memory; all where the head is not fused",
        note="A number of tokens; verl's key is a switch.",
        built=True,
    ),
    _training(
        "ref.entropy_chunk",
        ("actor_rollout_ref.ref.entropy_from_logits_with_chunking", "actor_rollout_ref.ref.fsdp_config.entropy_from_logits_with_chunking"),
        _COUNT,
        "largest temporary of the head",
        "as many tokens as stay within a bounded piece of memory",
        note="A number of tokens; verl's key is a switch. The reference role has no entropy: its log-probs come in such chunks.",
        built=True,
    ),
    _training(
        "train.entropy_recompute",
        ("actor_rollout_ref.actor.entropy_checkpointing", "actor_rollout_ref.actor.fsdp_config.entropy_checkpointing"),
        _SWITCH,
        "bytes saved for the entropy's backward",
        "on",
        built=True,
    ),
    _training(
        "train.head_recompute",
        (),
        _AUTO_SWITCH,
        "bytes saved for the head's backward",
        "off where the logits of a micro-batch fit beside all else, on CUDA",
        note="For the fused head; the other one keeps its logits in any case.",
        built=True,
    ),
    _training(
        "train.fused_layers",
        (
            "actor_rollout_ref.model.use_liger",
            "model.use_liger",
            "actor_rollout_ref.model.use_liger_kernel",
            "training.use_liger_kernel",
            "use_liger_kernel",
        ),
        _AUTO_SWITCH,
        "kernels per layer; memory; never two owners of one forward",
        "on for CUDA, where triton is installed, the model's family is known and compile is not on",
        note="For SFT and RL, with kernels of our own. use_liger_kernel is one guide's spelling; verl's key is use_liger.",
        built=True,
    ),
    _training(
        "train.forward_prefetch",
        ("actor_rollout_ref.actor.fsdp_config.forward_prefetch",),
        _SWITCH,
        "order of all-gather and compute, FSDP2 included",
        "on",
    ),
    _training(
        "train.compile",
        ("actor_rollout_ref.actor.use_torch_compile", "actor_rollout_ref.actor.fsdp_config.use_torch_compile"),
        _AUTO_SWITCH,
        "kernels per layer; step time",
        "off",
        note="Of the layers, in passes over packed samples: updates, log-probs, values. Rollout runs them as they are.",
        built=True,
    ),
    _training(
        "train.overlap_and_fusion",
        ("actor_rollout_ref.actor.megatron.override_transformer_config.*",),
        "a table of Megatron settings",
        "step time",
        "measured",
        note="For example apply_rope_fusion. ChatLearn takes these as Megatron arguments.",
    ),
)


def _shards() -> tuple[Knob, ...]:
    """The parallel sizes, which verl spells alike for the actor and the reference role."""
    native_and_alias = (
        ("tensor_parallel", "tensor_model_parallel_size", "1 within what fits; within a node"),
        ("pipeline_parallel", "pipeline_model_parallel_size", "1; below the micro-batch count"),
        ("context_parallel", "context_parallel_size", "1 below 8k tokens"),
        ("expert_parallel", "expert_model_parallel_size", "before expert-tensor"),
        ("expert_tensor_parallel", "expert_tensor_parallel_size", "1; after expert"),
        ("virtual_pipeline", "virtual_pipeline_model_parallel_size", "1"),
    )
    roles = (("train", "actor", "policy_trainer"), ("ref", "ref", "ref_policy"))
    return tuple(
        _training(
            f"{section}.{native}",
            (f"actor_rollout_ref.{role}.megatron.{alias}",),
            _COUNT,
            _SHARD_PROOF,
            auto,
            chatlearn=(f"models.{model}.{alias}",),
            note="The guides' rule of thumb is about 4 billion parameters per GPU.",
        )
        for native, alias, auto in native_and_alias
        for section, role, model in roles
    )


@dataclass(frozen=True)
class Pair:
    """Whether two features that both touch how layers and head run may be on at once."""

    one: str
    other: str
    allowed: bool
    why: str  # why not; or how they share the work


# What each feature is: the setting that switches it on.
FEATURES = {
    "compile": "`train.compile`",
    "fused_layers": "`train.fused_layers`",
    "lora": "`lora.rank` above 0",
    "fused_head": "`train.fused_head`",
    "cuda_graphs": "`rollout.cuda_graphs`",
    "selective": '`train.recompute = "selective"`',
    "full": '`train.recompute = "full"`',
    "offload_activations": "`train.offload_activations`",
    "offload_params": "`train.offload_params`",
}

TOGETHER: tuple[Pair, ...] = (
    Pair("compile", "fused_layers", False, "a layer's forward has one owner"),
    Pair("compile", "lora", True, "adapters are compiled with their layers"),
    Pair("compile", "fused_head", True, "the head is no part of a layer"),
    Pair("compile", "cuda_graphs", True, "graphs hold the layers as they are; only passes over packed samples are compiled"),
    Pair("compile", "selective", False, "selective recompute looks at single operations, and torch runs layers uncompiled to show them"),
    Pair("compile", "full", True, "compiled layers run twice"),
    Pair("compile", "offload_activations", True, "what compiled code saves is moved like anything else"),
    Pair("compile", "offload_params", True, "compiled code reads parameters where they are when it runs"),
    Pair("fused_layers", "lora", True, "projections with an adapter run one by one, all else fused"),
    Pair("fused_layers", "fused_head", True, "the head is no part of a layer"),
    Pair("fused_layers", "cuda_graphs", True, "rollout and update run the same layers"),
    Pair("fused_layers", "selective", True, "kernels of norms and products are run again"),
    Pair("fused_layers", "full", True, "fused layers run twice"),
    Pair("fused_layers", "offload_activations", True, "what kernels save is moved like anything else"),
    Pair("fused_layers", "offload_params", True, "joined weights are joined again when they come back"),
    Pair("lora", "fused_head", True, "no adapter is on the head"),
    Pair("lora", "cuda_graphs", True, "adapters are captured with their layers"),
    Pair("lora", "selective", True, "an adapter's products are kept like the others"),
    Pair("lora", "full", True, "layers and adapters run twice"),
    Pair("lora", "offload_activations", True, "what an adapter saves is moved like anything else"),
    Pair("lora", "offload_params", True, "adapters leave with the weights that they belong to"),
    Pair("fused_head", "cuda_graphs", True, "rollout reads its logits by itself"),
    Pair("fused_head", "selective", True, "the head is no part of a layer"),
    Pair("fused_head", "full", True, "the head is no part of a layer"),
    Pair("fused_head", "offload_activations", True, "the head keeps its hidden states on the device"),
    Pair("fused_head", "offload_params", True, "the head's weight leaves with the others"),
    Pair("cuda_graphs", "selective", True, "only passes with a gradient recompute"),
    Pair("cuda_graphs", "full", True, "only passes with a gradient recompute"),
    Pair("cuda_graphs", "offload_activations", True, "only passes with a gradient keep activations"),
    Pair("cuda_graphs", "offload_params", False, "graphs read weights by their address, and weights come back to another one"),
    Pair("selective", "offload_activations", True, "what is kept is moved"),
    Pair("selective", "offload_params", True, "layers are recomputed while their role works"),
    Pair("full", "offload_activations", True, "the inputs of layers are moved"),
    Pair("full", "offload_params", True, "layers are recomputed while their role works"),
    Pair("offload_activations", "offload_params", True, "activations are there while their role works"),
)
"""Every two features, once; selective and full recompute are values of one key. What is not allowed is refused when the configuration is
read, and a test builds and runs what is."""

LEDGER: tuple[Knob, ...] = _ROLLOUT_KNOBS + _ALGORITHM_KNOBS + _BATCH_KNOBS + _MEMORY_KNOBS + _SPEED_KNOBS + _shards()

SHARED: frozenset[str] = frozenset({"packing", "models.policy_trainer.packing", "models.policy_trainer.max_token_in_packing"})
"""Aliases that set two of our knobs at once."""


def _index() -> dict[str, list[tuple[Knob, Source]]]:
    index: dict[str, list[tuple[Knob, Source]]] = {}
    for knob in LEDGER:
        spellings: dict[Source, tuple[str, ...]] = {"native": (knob.name,), "verl": knob.verl, "chatlearn": knob.chatlearn}
        for source, names in spellings.items():
            for name in names:
                index.setdefault(name, []).append((knob, source))
    return index


_BY_NAME = _index()


def find_all(key: str) -> tuple[tuple[Knob, Source], ...]:
    """Every knob that `key` names, with the system whose name it is; empty if none. More than one only for `SHARED` aliases."""
    if key.endswith(".*"):
        return ()
    if key in _BY_NAME:
        return tuple(_BY_NAME[key])
    parts = key.split(".")
    for length in range(len(parts) - 1, 0, -1):
        below = ".".join(parts[:length]) + ".*"
        if below in _BY_NAME:
            return tuple(_BY_NAME[below])
    return ()


def find_by_end(key: str) -> tuple[tuple[Knob, Source], ...]:
    """As `find_all`, of a name whose beginning was left off (`rollout.n`), or that a guide writes with no section (`use_liger_kernel`)."""
    whole = [name for name in _BY_NAME if name.endswith(f".{key}")] if "." in key else []
    last = key.rpartition(".")[2]
    alone = _BY_NAME.get(last, []) if last not in SHARED else []
    return tuple(_BY_NAME[whole[0]] if len(whole) == 1 else alone)


_OPPOSITE: Mapping[Any, Any] = {True: False, False: True}
TRANSLATED: Mapping[str, Mapping[Any, Any]] = {
    "enforce_eager": _OPPOSITE,
    "disable_log_stats": _OPPOSITE,
    "enable_gradient_checkpointing": {True: "full", False: "none"},
    "gpu_memory_utilization": {},
    "name": {},
    "rollout_backend": {},
    "sample_per_episode": {},
    "ppo_mini_batch_size": {},
    "train_global_batch_size": {},
    "ppo_micro_batch_size": {},
    "log_prob_micro_batch_size": {},
    "forward_micro_batch_size": {},
    "micro_batch_size": {},
    "entropy_from_logits_with_chunking": {},
    "free_gpu_memory": {},
}
"""Last parts of aliases whose values mean something else here, in unit or sense: what theirs is of ours, as far as that can be told. The
values of all others are taken as they are."""


def translate(alias: str, value: Any) -> Any:
    """The value of a knob that does what `value` does under `alias`; None if that cannot be told."""
    known = TRANSLATED.get(alias.rpartition(".")[2])
    return value if known is None else known.get(value) if isinstance(value, bool | int | float | str) else None


def find(key: str) -> tuple[Knob, Source] | None:
    """The knob that `key` names in our, verl's or ChatLearn's spelling; of a shared alias, the first in the ledger."""
    found = find_all(key)
    return found[0] if found else None


def describe(knob: Knob) -> str:
    """All about a knob, for people."""
    facts = {
        "values": knob.legal,
        "auto": knob.auto,
        "must change": knob.must_change,
        "verl": ", ".join(knob.verl),
        "ChatLearn": ", ".join(knob.chatlearn),
        "note": knob.note,
    }
    return "\n".join([f"{knob.name} ({knob.state})", *(f"  {name}: {text}" for name, text in facts.items() if text)])
