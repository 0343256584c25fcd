"""ChatLearn's GRPO configurations, key by key: its FSDP and Megatron templates and the classes behind them.

The table has the form of `verl`'s. ChatLearn counts samples where fulltilt counts prompts, and GPUs over all machines.
"""

from __future__ import annotations

import math
from typing import Any

from fulltilt.compat import verl_rules as rules
from fulltilt.compat.outcome import Outcome
from fulltilt.compat.translate import (
    Ask,
    Conversion,
    Key,
    Table,
    a_number,
    nothing,
    number,
    off,
    only,
    refused,
    same_as,
    sets,
    switch,
    to,
    truth,
    whole,
    written,
)  # fmt: skip
from fulltilt.words import many

RUN, POLICY, TRAINER, REF, REWARD = "runtime_args", "models.policy", "models.policy_trainer", "models.ref_policy", "models.reward"
SAMPLES, PER_PROMPT = f"{RUN}.sample_per_episode", f"{POLICY}.num_inference_per_prompt"
PER_PROMPTS = (PER_PROMPT, f"{RUN}.num_inference_per_prompt")
MODELS = f"{{{POLICY},{TRAINER},{REF},{REWARD}}}"
TRAINED = f"{{{TRAINER},{REF}}}"
GPUS_OF_A_MACHINE = 8


def prompts(ask: Ask) -> Outcome:
    samples, each = whole(ask.value), whole(ask.read(*PER_PROMPTS))
    count = samples // each
    if samples % each:
        return Outcome("refused", f"{samples} samples are no whole number of prompts with {each} samples each. Use a multiple of {each}")
    return sets({"algorithm.prompts_per_step": count}, f"{samples} samples / {each} per prompt = {count} prompts")


def minibatches(ask: Ask) -> Outcome:
    samples, batch = whole(ask.read(SAMPLES)), whole(ask.value)
    if batch > samples:
        return Outcome("refused", f"{batch} samples are more than an episode has ({samples}). Use at most {samples}")
    count = math.ceil(samples / batch)
    return sets({"algorithm.minibatches_per_step": count}, f"{samples} samples / {batch} samples = {many(count, 'mini-batch')}")


def packed(ask: Ask) -> bool:
    return truth(ask.read(f"{TRAINER}.packing") or False)


def packing(ask: Ask) -> Outcome:
    on = truth(ask.value)
    why = "its guide says that packing is on by default; its code has it off"
    if on:
        return sets({"train.packing": True, "actor.dynamic_batch": True}, f"packing, and micro-batches filled by tokens; {why}")
    return sets({"train.packing": False}, why)


def ref_packing(ask: Ask) -> Outcome:
    if truth(ask.value) != packed(ask):
        return Outcome("refused", f"actor and reference role are packed alike. Give {TRAINER}.packing the same value", performance=True)
    return sets({"ref.dynamic_batch": True}) if truth(ask.value) else Outcome("means nothing", "as for policy_trainer")


def budget(*ours: str) -> Conversion:
    def become(ask: Ask) -> Outcome:
        if not packed(ask):
            return Outcome("means nothing", f"{TRAINER}.packing is off: ChatLearn does not read it either")
        return sets(dict.fromkeys(ours, whole(ask.value)), "a hard cap")

    return become


def micro(section: str, *before: str) -> Conversion:
    """Return a conversion of the samples of a micro-batch, which count if samples are not packed."""

    def become(ask: Ask) -> Outcome:
        if packed(ask):
            return Outcome("means nothing", f"micro-batches are filled by tokens: {TRAINER}.packing is on")
        if first := next((key for key in before if ask.read(key) is not None), None):
            if whole(ask.read(first)) == whole(ask.value):
                return Outcome("means nothing", f"as {first}")
            return Outcome("means nothing", f"all passes of the actor have actor.micro_batch, which is {first}={written(ask.read(first))}")
        return sets({f"{section}.dynamic_batch": False, f"{section}.micro_batch": whole(ask.value)})

    return become


def gpus(ask: Ask) -> Outcome:
    count = whole(ask.value)
    if count == 0:
        return Outcome("means nothing", "no GPUs")
    if count <= GPUS_OF_A_MACHINE:
        return sets({"cluster.workers": count})
    machines = math.ceil(count / GPUS_OF_A_MACHINE)
    how = f"{count} GPUs over all machines = {machines} machines of {GPUS_OF_A_MACHINE}, over the Ray cluster of this machine"
    return sets({"cluster.nodes": machines, "cluster.workers": GPUS_OF_A_MACHINE, "cluster.address": "auto"}, how)


def backend(ask: Ask) -> Outcome:
    if ask.value == "megatron":
        return sets({"train.shard": "optimizer"}, "as Megatron's distributed optimizer")
    if ask.value == "fsdp":
        alone = whole(ask.read(f"{TRAINER}.num_gpu") or 0) == 1
        return Outcome("means nothing", "one GPU has nothing to share out") if alone else sets({"train.shard": "full"}, "as FSDP")
    return Outcome("refused", f"{written(ask.value)} is neither fsdp nor megatron")


def shard_size(ask: Ask) -> Outcome:
    total = whole(ask.read(f"{TRAINER}.num_gpu") or 0)
    if total and 1 < whole(ask.value) < total:
        return Outcome("means nothing", f"ChatLearn always shares out over all {total} GPUs, and so does this")
    return Outcome("means nothing", "all GPUs, as ChatLearn always has it")


def trained_model(ask: Ask) -> Outcome:
    if ask.read(f"{RUN}.train_backend") == "megatron" and ask.read(f"{POLICY}.load") is not None:
        return Outcome("means nothing", f"weights are read from the Hugging Face folder of {POLICY}.load, not from Megatron's")
    return sets({"model.path": str(ask.value)})


def reference(ask: Ask) -> Outcome:
    if ask.value in (None, ask.read(f"{TRAINER}.load"), ask.read(f"{POLICY}.load")):
        return Outcome("means nothing", "the model as it was at the start, as here")
    return sets({"ref.path": str(ask.value)})


def data(ours: str) -> Conversion:
    def become(ask: Ask) -> Outcome:
        if ask.value is None:
            return rules.NULL
        found = [path.strip() for path in str(ask.value).split(",")] if not isinstance(ask.value, list) else rules.files(ask.value)
        return sets({ours: found[0] if len(found) == 1 else found})

    return become


def responses(ask: Ask) -> Outcome:
    """Convert ChatLearn's limit, which is for prompt and response together."""
    longest = whole(ask.value)
    response = ask.read(f"{POLICY}.max_new_tokens", f"{POLICY}.max_response_tokens_length")
    tokens = longest if response is None else min(whole(response), longest) if ask.given else whole(response)
    how = f"ChatLearn's limit of {longest} is for prompt and response together; here each has its own"
    prompt = ask.read(f"{POLICY}.max_prompt_tokens_length")
    return sets({"rollout.max_new_tokens": tokens, "data.max_prompt_tokens": longest if prompt is None else whole(prompt)}, how)


def response(ask: Ask) -> Outcome:
    longest = whole(ask.value)
    if ask.has(f"{POLICY}.seq_length"):
        longest = min(longest, whole(ask.read(f"{POLICY}.seq_length")))
    return sets({"rollout.max_new_tokens": longest})


def objective(ask: Ask) -> Outcome:
    return sets({"algorithm.name": "gspo" if truth(ask.value) else "grpo"})


def wanted_loggers(ask: Ask) -> list[str]:
    return [each for each in ("tensorboard", "wandb") if truth(ask.read(f"{RUN}.log_args_dict.enable_{each}") or False)]


def for_loggers(ours: str) -> Conversion:
    def become(ask: Ask) -> Outcome:
        return sets({ours: ask.value}) if wanted_loggers(ask) else Outcome("means nothing", "no logger is on, which would show it")

    return become


def logger(name: str) -> Conversion:
    def become(ask: Ask) -> Outcome:
        wanted = wanted_loggers(ask)
        return sets({"log.to": wanted}) if truth(ask.value) else Outcome("means nothing", f"{name} is off")

    return become


def betas(ask: Ask) -> Outcome:
    return sets({"train.betas": [a_number(ask.read(f"{TRAINER}.optimizer.adam_beta{number}")) for number in (1, 2)]})


def recompute(ask: Ask) -> Outcome:
    return sets({"train.recompute": "full" if truth(ask.value) else "none"})


def thinking(ask: Ask) -> Outcome:
    """Convert `enable_thinking`. ChatLearn gives it to every chat template; here an argument that the template does not read is a
    mistake."""
    path = str(ask.read(f"{POLICY}.load", f"{TRAINER}.load") or "")
    template = ask.theirs.seen.chat_template(path)
    if (template is not None and "enable_thinking" not in template) or (template is None and not ask.given and "qwen3" not in path.lower()):
        return Outcome("means nothing", "the model's chat template does not read it")
    return sets({"data.template_args": {"enable_thinking": truth(ask.value)}}, "an argument of the chat template")


def penalty(neutral: float) -> Conversion:
    return only(
        neutral, int(neutral), nothing="no penalty, as here", refused="sampling is by temperature, top-p and top-k alone. Remove it"
    )


def folder(ask: Ask) -> Outcome:
    return sets({"run.dir": str(ask.value)})


def engine(ask: Ask) -> Outcome:
    return rules.engine(ask)


def decay(ask: Ask) -> Outcome:
    return Outcome("means nothing", "the learning rate is constant, as in ChatLearn")


LAYOUT: dict[str, Conversion] = {
    "tensor_model_parallel_size": to("train.tensor_parallel"),
    "expert_model_parallel_size": to("train.expert_parallel"),
    "pipeline_model_parallel_size": rules.one_size(None, "pipeline parallelism", "Use tensor_model_parallel_size, or --retune"),
    "virtual_pipeline_model_parallel_size": rules.one_size(None, "virtual pipeline stages", "Use null, or --retune"),
    "context_parallel_size": rules.one_size(None, "context parallelism", "Use ulysses_sequence_parallel_size, or --retune"),
    "expert_tensor_parallel_size": rules.one_size(None, "tensor parallelism of experts", "Use 1 or null, or --retune"),
}

FUSIONS = "{apply_rope_fusion,bias_swiglu_fusion,bias_dropout_fusion,masked_softmax_fusion,bias_activation_fusion}"
PLACES: Any = "where processes run is decided by cluster.workers and cluster.nodes"

CHATLEARN = Table(
    "ChatLearn",
    (
        Key(f"{TRAINER}.use_group_sequence_policy", objective, default=False),
        Key(SAMPLES, prompts),
        Key(" ".join(PER_PROMPTS), to("algorithm.samples_per_prompt"), default=32),
        Key(f"{RUN}.train_global_batch_size", minibatches),
        Key(f"{RUN}.num_training_epoch", to("algorithm.epochs"), default=1),
        Key(f"{RUN}.num_episode", to("run.steps")),
        Key(f"{RUN}.save_episode_interval", rules.every("run.save_every")),
        Key(f"{RUN}.eval_episode_interval", rules.every("run.eval_every"), default=0),
        Key(f"{RUN}.enable_eval_before_training", switch("run.eval_before")),
        Key(f"{RUN}.enable_resume_training", to("run.resume", values={True: "auto", False: "never"}), default=True),
        Key(f"{RUN}.data_path", data("data.train")),
        Key(f"{RUN}.eval_data_path", data("data.val")),
        Key(f"{RUN}.output_dir", folder),
        Key(f"{RUN}.exp_name", for_loggers("log.name"), default="CHATLEARN"),
        Key(f"{RUN}.data_shuffle", switch("data.shuffle"), default=True),
        Key(f"{RUN}.train_backend", backend),
        Key(f"{RUN}.rollout_backend", engine),
        Key(f"{RUN}.train_micro_batch_size", micro("actor")),
        Key(f"{TRAINER}.train_micro_batch_size", micro("actor", f"{RUN}.train_micro_batch_size")),
        Key(f"{RUN}.data_ratio", off("files are read in order as one data set. Write them with the ratio that you want")),
        Key(f"{RUN}.consumed_samples", only(0, None, nothing="from the beginning", refused="a resumed run goes on where it was")),
        Key(f"{RUN}.{{max_replay_episode,replay_episode_offset}}", nothing("each step trains on its own samples")),
        Key(
            f"{RUN}.{{data_rerank,data_checkpoint_path,max_data_ckpt_nums,load_data_checkpoint_iteration,stream_data_loader_type}}",
            nothing("a checkpoint holds the place in the data"),
        ),
        Key(
            f"{RUN}.{{coalesced_buffer_mb,coalesce_param,concurrent_comm,param_sync_comm_type,param_sync_max_workers,"
            "routed_expert_regrouping_comm_type,bucket_size_mb_in_memory_manager,free_sync_collective_group,validate_param_sync}",
            nothing(f"there is nothing to set for it: the native engine {rules.WEIGHTS}"),
        ),
        Key(
            f"{RUN}.{{colocation,concurrent_setup,cpu_schedule_strategy,policy_to_regroup_queue,debug,nsys,profiler_dir,exit_actor_when_error}}",
            nothing("rollout and training share their GPUs, and one process decides"),
        ),
        Key(f"{RUN}.log_args_dict.enable_wandb", logger("wandb")),
        Key(f"{RUN}.log_args_dict.enable_tensorboard", logger("tensorboard")),
        Key(f"{RUN}.log_args_dict.wandb_project", for_loggers("log.project")),
        Key(f"{RUN}.log_args_dict.wandb_name", same_as(f"{RUN}.exp_name", what="a run has one name")),
        Key(f"{RUN}.log_args_dict.*", nothing("metrics are always written to the run's folder")),
        Key(f"{RUN}.use_rollout_manager {RUN}.use_partial_rollout {RUN}.partial_rollout", off("partial rollouts are not built")),
        Key(f"{RUN}.{{task_type,agent_cfg_path,agent_cfg_path.*}}", off("multi-turn rollouts and tools are not built in this version")),
        Key("runtime_env.*", nothing("processes have this one's environment")),
        Key(f"{POLICY}.load", to("model.path")),
        Key(f"{TRAINER}.{{load,pretrain_or_model}}", trained_model),
        Key(f"{REF}.{{load,pretrain_or_model}}", reference),
        Key(f"{POLICY}.seq_length", responses, default=2048),
        Key(f"{POLICY}.{{max_new_tokens,max_response_tokens_length}}", response),
        Key(f"{POLICY}.max_prompt_tokens_length", to("data.max_prompt_tokens")),
        Key(f"{RUN}.model_type", only("llm", None, nothing="a language model, as here", refused="pictures are not built in this version")),
        Key(f"{TRAINED}.{{model_provider_module,trust_remote_code}}", nothing("models are those of transformers")),
        Key(f"{TRAINED}.seq_length", same_as(f"{POLICY}.seq_length", what="one limit of tokens")),
        Key(f"{POLICY}.temperature", number("rollout.temperature"), default=1.0),
        Key(f"{POLICY}.top_p", number("rollout.top_p"), default=1.0),
        Key(f"{POLICY}.top_k", to("rollout.top_k", values={-1: 0}), default=-1),
        Key(f"{POLICY}.eval_temperature", number("eval.temperature"), default=0.6),
        Key(f"{POLICY}.eval_top_p", number("eval.top_p"), default=0.95),
        Key(f"{POLICY}.eval_top_k", to("eval.top_k", values={-1: 0}), default=20),
        Key(f"{POLICY}.{{,eval_}}{{presence,frequency}}_penalty", penalty(0.0)),
        Key(f"{POLICY}.{{,eval_}}repetition_penalty", penalty(1.0)),
        Key(f"{POLICY}.enable_thinking", thinking, default=False),
        Key(f"{POLICY}.seed", to("run.seed"), default=1234),
        Key(f"{{{TRAINER},{REF},{REWARD}}}.seed", nothing("models.policy.seed is the run's seed")),
        Key(f"{POLICY}.tensor_model_parallel_size", to("rollout.tensor_parallel")),
        Key(f"{POLICY}.expert_model_parallel_size", to("rollout.expert_parallel")),
        Key(
            f"{POLICY}.pipeline_model_parallel_size",
            rules.one_size(None, "this division of the engine", "Use tensor_model_parallel_size, or --retune"),
        ),
        Key(f"{POLICY}.generation_batch_size", to("rollout.max_seqs")),
        Key(f"{POLICY}.max_num_batched_tokens", to("rollout.max_batched_tokens")),
        Key(
            f"{POLICY}.gpu_memory_utilization",
            rules.kv_bytes(f"{POLICY}.load", f"{POLICY}.tensor_model_parallel_size", f"{RUN}.rollout_backend"),
        ),
        Key(f"{POLICY}.enforce_eager", rules.eager),
        Key(f"{POLICY}.{{free_gpu_memory,free_gpu_memory.offload_weights,offload_weights}}", switch("rollout.release_memory")),
        Key(
            f"{POLICY}.free_gpu_memory.{{free_grad_buffers,offload_optimizer_states}}",
            nothing("an engine has neither gradients nor optimizer"),
        ),
        Key(
            f"{POLICY}.{{vllm_prompt_key,vllm_input_ids_key,max_seq_len_to_capture,enable_stage_resume,tokenizer,is_sync_mode}}",
            nothing("an argument of an engine that the native one takes the place of"),
        ),
        Key(f"{TRAINER}.num_gpu", gpus),
        Key(f"{{{POLICY},{REF}}}.num_gpu", same_as(f"{TRAINER}.num_gpu", what="all roles share the run's GPUs")),
        Key(
            f"{REWARD}.num_gpu",
            only(
                0,
                None,
                nothing="rewards run on the CPU",
                refused='a reward model is reward.function = "reward_model" in the run file (--write)',
            ),
        ),
        Key(f"{REWARD}.num_cpu", to("reward.workers", values={0: 1})),
        Key(
            f"{{{POLICY},{TRAINER},{REF}}}.num_cpu "
            f"{MODELS}.{{gpu_per_process,cpu_per_process,num_replica,replica_dp_size,trainable,sync_frequency}}",
            nothing(PLACES),
        ),
        Key(f"{REWARD}.generation_batch_size", nothing("samples are scored one by one, as they are finished")),
        Key(f"{REWARD}.{{load,packing,max_token_in_packing}}", nothing("the reward is a rule")),
        Key(f"{TRAINER}.packing", packing),
        Key(f"{REF}.packing", ref_packing),
        Key(f"{POLICY}.{{packing,max_token_in_packing}}", nothing("rollouts have no padding")),
        Key(f"{TRAINER}.max_token_in_packing", budget("actor.token_budget", "actor.forward_token_budget")),
        Key(f"{REF}.max_token_in_packing", budget("ref.forward_token_budget")),
        Key(f"{TRAINER}.generation_batch_size", micro("actor", f"{TRAINER}.train_micro_batch_size", f"{RUN}.train_micro_batch_size")),
        Key(f"{REF}.generation_batch_size", micro("ref")),
        Key(f"{TRAINER}.{{free_gpu_memory.offload_weights,offload_weights}}", switch("train.offload_params")),
        Key(f"{TRAINER}.{{free_gpu_memory.offload_optimizer_states,offload_optimizer_states}}", switch("train.offload_optimizer")),
        Key(f"{TRAINER}.{{free_gpu_memory.free_grad_buffers,free_grad_buffers}}", switch("train.offload_grads")),
        Key(f"{REF}.{{free_gpu_memory.offload_weights,offload_weights}}", switch("ref.offload_params")),
        Key(
            f"{{{REF},{REWARD}}}.free_gpu_memory.* {{{REF},{POLICY},{REWARD}}}.{{free_grad_buffers,offload_optimizer_states}}",
            nothing("this role has neither gradients nor optimizer"),
        ),
        Key(f"{TRAINED}.{{fsdp_size,zero_size}}", shard_size),
        Key(f"{TRAINER}.{{ulysses_sequence_parallel_size,sp_size}}", to("train.sequence_parallel")),
        Key(f"{REF}.{{ulysses_sequence_parallel_size,sp_size}}", to("ref.sequence_parallel")),
        *(Key(f"{TRAINER}.{name}", become) for name, become in LAYOUT.items()),
        *(
            Key(
                f"{REF}.{name}",
                rules.size_of_role("ref", REF, TRAINER)
                if name in rules.SIZES
                else same_as(f"{TRAINER}.{name}", what="all roles have the actor's layout", performance=True),
            )
            for name in LAYOUT
        ),
        Key(f"{TRAINER}.gradient_checkpointing", recompute),
        Key(f"{TRAINER}.recompute_granularity", to("train.recompute")),
        Key(
            f"{TRAINER}.{{meta_init,use_expandable_segments,save_hf}} {REF}.{{meta_init,use_expandable_segments,save_hf}}",
            nothing("models load shard by shard, and a checkpoint holds the model as Hugging Face has it"),
        ),
        Key(f"{TRAINED}.groupgemm", nothing("experts always run grouped")),
        Key(f"{TRAINER}.optimizer.lr {TRAINER}.learning_rate", number("train.lr"), default=2e-6),
        Key(f"{TRAINER}.optimizer.min_lr", decay),
        Key(f"{TRAINER}.optimizer.clip_grad {TRAINER}.grad_clip", number("train.clip_grad"), default=1.0),
        Key(f"{TRAINER}.optimizer.weight_decay", number("train.weight_decay"), default=0.01, note="here on matrices only"),
        Key(f"{TRAINER}.optimizer.adam_beta1", betas, default=0.9),
        Key(f"{TRAINER}.optimizer.adam_beta2", betas, default=0.95),
        Key(f"{TRAINER}.pos_clip_ratio", number("algorithm.clip_high"), default=0.2),
        Key(f"{TRAINER}.{{neg_clip_ratio,negative_clip_ratio}}", number("algorithm.clip_low"), default=0.2),
        Key(f"{TRAINER}.final_clip_ratio", number("algorithm.dual_clip"), default=3.0),
        Key(f"{TRAINER}.diff_clip_ratio", nothing("the log ratio is clipped here too, at 20")),
        Key(f"{TRAINER}.entropy_coef", number("algorithm.entropy_coef"), default=0.0),
        Key(f"{TRAINER}.kl_coef", number("algorithm.kl_coef"), default=0.0),
        Key(f"{TRAINED}.{FUSIONS} {TRAINED}.megatron_model_cfg.{FUSIONS}", switch("train.fused_layers")),
        Key(f"{TRAINED}.megatron_model_cfg.* {TRAINED}.megatron_model_cfg", nothing("the model's own config.json says what it is")),
        Key(f"{TRAINED}.bf16", only(True, None, nothing="bfloat16 on CUDA, as here", refused="set model.dtype in the run file (--write)")),
        Key(f"{TRAINED}.moe_router_force_load_balancing", off("tokens are routed as the model does")),
        Key(
            f"{TRAINED}.{{tokenizer_type,tokenizer_model,sequence_parallel,use_distributed_optimizer,decoder_first_pipeline_num_layers,"
            "decoder_last_pipeline_num_layers,attention_backend,variable_seq_lengths,save,save_interval,log_interval,train_iters,"
            "use_checkpoint_opt_param_scheduler,no_load_optim,no_load_rng,no_load_scheduler,finetune,calculate_per_token_loss,"
            "gradient_accumulation_fusion,async_tensor_model_parallel_allreduce,overlap_p2p_comm,batch_p2p_comm,"
            "deallocate_pipeline_outputs,attention_softmax_in_fp32,use_legacy_models,moe_router_dtype}",
            nothing(
                "one of Megatron's arguments: tokenizer and weights come from the Hugging Face folder, and there are no pipeline stages"
            ),
        ),
        Key(
            "models.{agent,rollout_manager,value,ref_value,reward_model,partial_rollout_manager}.*",
            refused("this model is not built: GRPO has policy, policy_trainer, ref_policy and reward"),
        ),
        Key("hydra.*", nothing("Hydra's own settings")),
    ),
    always={"algorithm.importance_cap": 0.0, "reward.function": "math", "algorithm.aggregation": "token-mean"},
)
