"""verl's trainers for supervised fine-tuning, key by key: `verl.trainer.fsdp_sft_trainer` and `verl.trainer.sft_trainer`.

The table has the form of `verl`'s; the two trainers have different names for the same settings, which are in the same rows.
"""

from __future__ import annotations

from fulltilt.compat import verl_rules as rules
from fulltilt.compat.outcome import Outcome
from fulltilt.compat.translate import (
    Ask,
    Conversion,
    Key,
    Table,
    nothing,
    number,
    off,
    only,
    sets,
    switch,
    to,
    truth,
    whole,
)
from fulltilt.compat.verl import ALWAYS_SAVED, LAUNCHER, NO_PADDING

ENGINE = "{engine,model.fsdp_config}"


def micro(ask: Ask) -> Outcome:
    if ask.value is None or whole(ask.value) < 1:
        return Outcome("means nothing", "left to auto")
    if truth(ask.read("data.use_dynamic_bsz") or False):
        return Outcome("means nothing", "micro-batches are filled by tokens, for data.use_dynamic_bsz is on")
    return sets({"actor.dynamic_batch": False, "actor.micro_batch": whole(ask.value)})


def micro_over_all(ask: Ask) -> Outcome:
    if ask.value is None:
        return rules.NULL
    each = max(1, whole(ask.value) // rules.workers(ask))
    why = f"counted over all GPUs, which verl deprecates: {whole(ask.value)} / {rules.workers(ask)} GPUs = {each} per GPU"
    return sets({"actor.dynamic_batch": False, "actor.micro_batch": each}, why)


def column(ours: str, keys: str) -> Conversion:
    """Return a conversion of a column's name; verl reads a part of the column, if `keys` names one."""

    def become(ask: Ask) -> Outcome:
        if ask.value is None or (not ask.given and rules.truth_or_false(ask.read("data.multiturn.enable"))):
            return rules.NULL
        parts = ask.read(keys) if ask.has(keys) else None
        path = [str(ask.value), *(parts if isinstance(parts, list) else [parts] if parts else [])]
        return sets({ours: ".".join(map(str, path))}, "the column, and what its objects have under a name" if parts else "")

    return become


def inside(ours: str, name: str) -> Conversion:
    """Return a conversion of a name inside the objects of a column."""

    def become(ask: Ask) -> Outcome:
        if ask.value in (None, []):
            return Outcome("means nothing", "columns are read whole, as here")
        path = [ask.read(name), *(ask.value if isinstance(ask.value, list) else [ask.value])]
        return sets({ours: ".".join(map(str, path))}, "the column, and what its objects have under a name")

    return become


def longer(ask: Ask) -> Outcome:
    skipped = "a row with more tokens than data.max_tokens is skipped here, and the run reports how many are"
    told = {
        None: "verl stops at such a row",
        "error": "verl stops at such a row",
        "left": "verl cuts the row",
        "right": "verl cuts the row",
    }
    if ask.value not in told:
        return Outcome("refused", "use error, left or right")
    return Outcome("means nothing", f"{told[ask.value]}; {skipped}")


SFT = Table(
    "verl's SFT trainer",
    (
        Key("data.train_files", rules.files_to("data.train")),
        Key("data.val_files", rules.files_to("data.val")),
        Key("data.train_batch_size", to("algorithm.prompts_per_step"), default=256, note="rows of an optimizer step, over all GPUs"),
        Key("data.prompt_key", column("data.prompt_key", "data.prompt_dict_keys"), default="question"),
        Key("data.response_key", column("data.response_key", "data.response_dict_keys"), default="answer"),
        Key("data.prompt_dict_keys", inside("data.prompt_key", "data.prompt_key")),
        Key("data.response_dict_keys", inside("data.response_key", "data.response_key")),
        Key("data.messages_key data.multiturn.messages_key", to("data.messages_key")),
        Key("data.multiturn.enable", nothing("a row with messages is read as a conversation, one with prompt and response as such")),
        Key(
            "data.tools_key data.multiturn.tools_key data.enable_thinking_key data.multiturn.enable_thinking_key "
            "data.enable_thinking_default",
            nothing("columns of tools and of thinking are not read"),
        ),
        Key("data.max_length", to("data.max_tokens"), default=1024),
        Key(
            "data.{max_prompt_length,max_response_length}",
            nothing("verl's SFT reads data.max_length alone, for prompt and response together"),
        ),
        Key("data.truncation", longer),
        Key("data.micro_batch_size_per_gpu", micro),
        Key("data.micro_batch_size", micro_over_all),
        Key("data.use_dynamic_bsz", switch("actor.dynamic_batch")),
        Key("data.max_token_len_per_gpu", to("actor.token_budget")),
        Key("data.apply_chat_template_kwargs data.apply_chat_template_kwargs.*", rules.template_argument),
        Key("data.{train_max_samples,val_max_samples}", only(-1, None, nothing="all rows, as here", refused="write a smaller file")),
        Key(
            "data.custom_cls data.custom_cls.*",
            off("a data set class of your own cannot be loaded. Write its rows to a file (docs/data.md)"),
        ),
        Key(
            "data.chat_template", off("model.chat_template names a file. Write the template to one, and give it in the run file (--write)")
        ),
        Key("data.{balance_dp_token,use_shm,num_workers,ignore_input_ids_mismatch}", nothing("there is nothing of this kind here")),
        Key("data.pad_mode", nothing(NO_PADDING)),
        Key("model.partial_pretrain model.path", to("model.path")),
        Key("model.trust_remote_code", switch("model.trust_remote_code")),
        Key("model.enable_gradient_checkpointing", to("train.recompute", values={True: "full", False: "none"})),
        Key("model.enable_activation_offload", switch("train.offload_activations")),
        Key("model.use_liger model.use_liger_kernel", switch("train.fused_layers")),
        Key("model.use_fused_kernels", switch("train.fused_head")),
        Key("model.use_remove_padding use_remove_padding", switch("train.packing")),
        Key("model.lora_rank model.lora.rank", to("lora.rank"), default=0),
        Key("model.lora_alpha model.lora.alpha", number("lora.alpha"), default=16.0),
        Key("model.target_modules model.lora.target_modules", rules.targets),
        Key("model.exclude_modules", off("name the layers that get an adapter: model.target_modules=[q_proj,v_proj]")),
        Key("model.lora_adapter_path model.lora.adapter_path", to("lora.path")),
        Key("model.lora.*", nothing("adapters start at 0, and all else is frozen")),
        Key("model.strategy engine.strategy", to("train.shard", values={"fsdp": "full", "fsdp2": "full", "megatron": "optimizer"})),
        Key(f"{ENGINE}.{{param_offload,offload_params}}", switch("train.offload_params")),
        Key("model.fsdp_config.cpu_offload", switch("train.offload_optimizer", "train.offload_params")),
        Key(f"{ENGINE}.optimizer_offload", switch("train.offload_optimizer")),
        Key(f"{ENGINE}.reshard_after_forward", switch("train.reshard_after_forward")),
        Key(f"{ENGINE}.forward_prefetch", switch("train.forward_prefetch")),
        Key("engine.tensor_model_parallel_size", to("train.tensor_parallel")),
        Key("engine.expert_model_parallel_size", to("train.expert_parallel")),
        Key(
            "engine.{pipeline_model_parallel_size,virtual_pipeline_model_parallel_size,context_parallel_size,expert_tensor_parallel_size}",
            rules.one_size(None, "this kind of parallelism", "Use tensor_model_parallel_size, or --retune"),
        ),
        Key("ulysses_sequence_parallel_size engine.ulysses_sequence_parallel_size", to("train.sequence_parallel")),
        Key("engine model.fsdp_config", nothing("there is one trainer here")),
        Key(f"{ENGINE}.*", nothing("parameters are shared out layer by layer, float32 masters kept")),
        Key("model.override_config model.override_config.*", rules.dropout),
        Key(
            "model.{external_lib,hf_config_path,tokenizer_path,custom_chat_template}",
            off("configuration and tokenizer are those of model.path"),
        ),
        Key("model.{use_shm,tiled_mlp.*,mtp.*,fused_kernel_options.*,fused_kernel_options,truncate_padding}", nothing("off, as here")),
        Key("optim.lr", number("train.lr"), default=1e-5),
        Key("optim.betas", to("train.betas"), default=[0.9, 0.95]),
        Key("optim.weight_decay", number("train.weight_decay"), default=0.01, note="here on matrices only, in verl on all parameters"),
        Key("optim.clip_grad", number("train.clip_grad"), default=1.0),
        Key(
            "optim.lr_warmup_steps",
            lambda ask: (
                nothing("lr_warmup_steps_ratio counts")(ask)
                if whole(ask.value or -1) < 1
                else sets({"train.warmup_steps": whole(ask.value)})
            ),
        ),
        Key("optim.{lr_warmup_steps_ratio,warmup_steps_ratio}", rules.warmup_ratio("optim", per_step=False), default=0.1),
        Key("optim.{lr_scheduler,lr_scheduler_type,warmup_style,lr_decay_style}", rules.schedule("train"), default="cosine"),
        Key("optim.min_lr_ratio", number("train.min_lr_ratio")),
        Key("optim.min_lr", rules.least_rate("", "train")),
        Key("optim.optimizer", rules.optimizer),
        Key("optim.optimizer_impl", rules.optimizer_package),
        Key("optim.override_optimizer_config optim.override_optimizer_config.*", off("AdamW has no further settings here")),
        Key("optim optim.*", nothing("AdamW has no setting of this kind here")),
        Key("trainer.total_training_steps", rules.steps),
        Key("trainer.total_epochs", rules.epochs, default=4),
        Key("trainer.n_gpus_per_node", to("cluster.workers")),
        Key("trainer.nnodes", rules.nodes),
        Key("trainer.device", rules.device),
        Key("trainer.seed", to("run.seed"), default=1),
        Key("trainer.project_name", rules.for_loggers("log.project"), default="gsm8k-sft"),
        Key("trainer.experiment_name", rules.for_loggers("log.name"), default="test"),
        Key("trainer.default_local_dir", rules.folder, default=None),
        Key("trainer.logger", rules.loggers),
        Key("trainer.save_freq", rules.every("run.save_every"), default=-1),
        Key("trainer.test_freq", rules.every("run.eval_every"), default=-1),
        Key("trainer.max_ckpt_to_keep", rules.kept, default=None),
        Key("trainer.resume_mode", rules.resume, default="auto"),
        Key("trainer.{resume_from_path,resume_path}", off("a run resumes from the newest checkpoint in run.dir")),
        Key("trainer.default_hdfs_dir", off("checkpoints are in run.dir. Copy them from there")),
        Key("trainer.balance_batch", switch("train.balance")),
        Key("trainer.{profile_interval,checkpoint.*,checkpoint}", nothing(ALWAYS_SAVED)),
        Key("checkpoint.*", nothing(ALWAYS_SAVED)),
        Key("profiler.* global_profiler.*", nothing("timing_s/* metrics have the seconds of each phase")),
        Key("hydra.*", nothing("Hydra's own settings")),
        Key("*._target_", nothing("the name of a class of verl's")),
        *LAUNCHER,
    ),
    always={"algorithm.name": "sft", "data.apply_template": "always"},
)

NEWER = {
    "data.prompt_key": None,
    "data.response_key": None,
    "optim.lr": 1e-3,
    "optim.betas": [0.9, 0.999],
    "optim.lr_warmup_steps_ratio": 0.0,
    "optim.lr_scheduler": "constant",
}
"""Defaults of `verl.trainer.sft_trainer`, where they differ from those of `verl.trainer.fsdp_sft_trainer`."""
