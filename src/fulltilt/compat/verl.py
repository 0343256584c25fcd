"""verl's PPO trainer, `python3 -m verl.trainer.main_ppo`, key by key: versions 0.4 to 0.9, both worker stacks, FSDP and Megatron.

To answer another key, add a row. `default`: verl's, for keys that are part of the algorithm. Rows that set the same key of ours are in the
order of their precedence. Keys that verl moved or renamed are in one row with their successors.
"""

from __future__ import annotations

from collections.abc import Iterator

from fulltilt.compat import verl_rules as rules
from fulltilt.compat.translate import Key, Table, nothing, number, off, only, same_as, switch, to
from fulltilt.compat.verl_rules import ACTOR, CORRECTION, CRITIC, GPUS, MODEL, NODES, OVERLONG, REF, REWARD_MODEL, ROLLOUT

NO_PADDING = "no batch is padded here"
ONE_ENGINE = "an argument of an engine that the native one takes the place of"
ALWAYS_SAVED = "a checkpoint always holds the model as Hugging Face has it, the optimizer and all that resuming needs"
NOT_SHARED = "it is Ray's or NCCL's: workers are watched by cluster.stall_s and cluster.deadline_s"
NO_STAGES = "there are no pipeline stages here"
WHOLE = "prompts are read as messages and put through the chat template here"

# Names of roles in braces, in a shell's form.
ROLES = f"{{{ACTOR},{REF},{CRITIC}}}"
OPTIM = f"{{{ACTOR},{CRITIC}}}.optim"
ENGINES = f"{{{ACTOR}.megatron,{REF}.megatron,{CRITIC}.megatron,{REWARD_MODEL}.megatron}}"
CRITIC_SHARED = f"{CRITIC}.model.fsdp_config,{CRITIC}.fsdp_config,{CRITIC}.fsdp"  # the forms of verl 0.4, 0.6 and 0.8
SHARED = f"{{{ACTOR}.fsdp_config,{REF}.fsdp_config,{CRITIC_SHARED},{REWARD_MODEL}.model.fsdp_config}}"
REWARD_ENGINE = "{reward_model,reward.reward_model}.rollout"

DATA: tuple[Key, ...] = (
    Key("data.train_files", rules.files_to("data.train")),
    Key("data.val_files", rules.files_to("data.val")),
    Key("data.train_batch_size", to("algorithm.prompts_per_step"), default=1024),
    Key("data.max_prompt_length", to("data.max_prompt_tokens"), default=512),
    Key("data.max_response_length", to("rollout.max_new_tokens"), default=512),
    Key("data.prompt_key", to("data.prompt_key"), default="prompt"),
    Key("data.shuffle", switch("data.shuffle"), default=True),
    Key("data.seed", to("run.seed")),
    Key("data.gen_batch_size", rules.prompts_of_round),
    Key("data.trust_remote_code", switch("model.trust_remote_code")),
    Key("data.truncation", rules.truncation),
    Key(
        "data.filter_overlong_prompts",
        nothing("longer prompts are always skipped here, and the run reports how many are: verl stops at one, unless this is True"),
    ),
    Key("data.filter_overlong_prompts_workers data.dataloader_num_workers data.use_shm", nothing("reading data takes no workers here")),
    Key("data.apply_chat_template_kwargs.* data.apply_chat_template_kwargs", rules.template_argument),
    Key("data.val_batch_size", nothing("validation prompts go to the engine all at once, as in verl: the key is deprecated there")),
    Key("data.val_max_samples", rules.all_prompts),
    Key(
        "data.train_max_samples",
        only(-1, None, nothing="all rows, as here", refused="a part of the data cannot be chosen here. Write a smaller file"),
    ),
    Key("data.validation_shuffle", nothing("the order of validation prompts changes no result")),
    Key("data.return_raw_input_ids data.return_raw_chat data.return_full_prompt data.need_tools_kwargs", nothing(WHOLE)),
    Key(
        "data.return_multi_modal_inputs data.image_key data.video_key data.audio_key data.image_patch_size",
        nothing("pictures are not read"),
    ),
    Key("data.mm_processor_kwargs data.mm_processor_kwargs.*", off("pictures are not built in this version")),
    Key("data.tokenizer", off("the tokenizer is that of model.path. Put another one into the model's folder")),
    Key(
        "data.reward_fn_key",
        only("data_source", nothing="the column is data_source here too", refused="the column must be called data_source. Rename it"),
    ),
    Key("data.custom_cls.* data.custom_cls", off("a data set class of your own cannot be loaded. Write its rows to a file (docs/data.md)")),
    Key("data.sampler.* data.sampler", off("a sampler of your own cannot be loaded. Order the rows in the file, with data.shuffle=False")),
    Key("data.datagen.* data.datagen", off("data cannot be generated during a run")),
    Key("data.databuffer.* data.databuffer", off("filtered rows are not kept: they come again with the next epoch")),
    Key("data.tool_config_path data.function_tool_path", rules.multi_turn),
)


ALGORITHM: tuple[Key, ...] = (
    Key("algorithm.adv_estimator", rules.estimator, default="gae"),
    Key(rules.LOSS_MODE, rules.loss_mode, default="vanilla"),
    Key(f"{ROLLOUT}.n", rules.samples, default=1),
    Key(f"{{{ACTOR},{REF},{CRITIC}}}.rollout_n", same_as(f"{ROLLOUT}.n", what="one number of samples per prompt")),
    Key(f"{ACTOR}.ppo_mini_batch_size", rules.minibatches, default=256),
    Key(f"{CRITIC}.ppo_mini_batch_size", same_as(f"{ACTOR}.ppo_mini_batch_size", what="actor and critic have the same mini-batches")),
    Key(f"{ACTOR}.ppo_epochs", to("algorithm.epochs"), default=1),
    Key(f"{CRITIC}.ppo_epochs", same_as(f"{ACTOR}.ppo_epochs", what="actor and critic make the same passes")),
    Key(f"{ACTOR}.clip_ratio_low", number("algorithm.clip_low"), default=0.2),
    Key(f"{ACTOR}.clip_ratio_high", number("algorithm.clip_high"), default=0.2),
    Key(f"{ACTOR}.clip_ratio", rules.clip_ratio),
    Key(f"{ACTOR}.clip_ratio_c", number("algorithm.dual_clip"), default=3.0),
    Key(f"{ACTOR}.loss_agg_mode", rules.aggregation(), default="token-mean"),
    Key(f"{CRITIC}.loss_agg_mode", rules.critic_aggregation),
    Key(
        f"{ACTOR}.use_token_level_loss",
        rules.aggregation({True: "token-mean", False: "seq-mean-token-mean"}),
        note="verl before 0.3; loss_agg_mode took its place",
    ),
    Key(f"{ACTOR}.loss_scale_factor", to("algorithm.length_norm")),
    Key(f"{CRITIC}.loss_scale_factor", same_as(f"{ACTOR}.loss_scale_factor", what="actor and critic have the same divisor")),
    Key(f"{ACTOR}.entropy_coeff", number("algorithm.entropy_coef"), default=0.0),
    Key(f"{ACTOR}.policy_loss.clip_cov_ratio", rules.loss_setting("algorithm.cov_share", "clip_cov"), default=0.0002),
    Key(f"{ACTOR}.policy_loss.clip_cov_lb", rules.loss_setting("algorithm.cov_low", "clip_cov"), default=1.0),
    Key(f"{ACTOR}.policy_loss.clip_cov_ub", rules.loss_setting("algorithm.cov_high", "clip_cov"), default=5.0),
    Key(f"{ACTOR}.policy_loss.kl_cov_ratio", rules.loss_setting("algorithm.cov_share", "kl_cov"), default=0.0002),
    Key(f"{ACTOR}.policy_loss.ppo_kl_coef", rules.loss_setting("algorithm.cov_kl_coef", "kl_cov"), default=0.1),
    Key(f"{ACTOR}.tau_pos", rules.loss_setting("algorithm.tau_pos", "sapo"), default=1.0),
    Key(f"{ACTOR}.tau_neg", rules.loss_setting("algorithm.tau_neg", "sapo"), default=1.05),
    Key(
        f"{ACTOR}.policy_loss.{{dro_beta,cppo.*,rollout_correction.*,rollout_correction}}",
        nothing("for a loss that is not built; loss_mode names the loss"),
    ),
    Key(f"{ACTOR}.use_kl_loss", rules.kl_loss, default=False),
    Key(f"{ACTOR}.kl_loss_coef", rules.kl_loss_coef, default=0.001),
    Key(f"{ACTOR}.kl_loss_type", rules.kl_name("algorithm.kl_estimator"), default="low_var_kl"),
    Key("algorithm.use_kl_in_reward", rules.reward_kl, default=False),
    Key("algorithm.kl_penalty", rules.kl_name("algorithm.reward_kl_estimator"), default="kl"),
    Key("algorithm.kl_ctrl.kl_coef critic.kl_ctrl.kl_coef", rules.reward_kl_part("algorithm.reward_kl_coef"), default=0.001),
    Key("algorithm.kl_ctrl.target_kl", rules.reward_kl_part("algorithm.reward_kl_target", adaptive=True), default=0.1),
    Key("algorithm.kl_ctrl.horizon", rules.reward_kl_part("algorithm.reward_kl_horizon", adaptive=True), default=10000),
    Key(
        "algorithm.kl_ctrl.type critic.kl_ctrl.type",
        only("fixed", "adaptive", None, nothing="decides whether target_kl and horizon are read", refused="use fixed or adaptive"),
    ),
    Key("algorithm.norm_adv_by_std_in_grpo", switch("algorithm.normalize_by_std"), default=True),
    Key("algorithm.gamma", number("algorithm.gamma"), default=1.0),
    Key("algorithm.lam", number("algorithm.gae_lambda"), default=1.0),
    Key(f"{CRITIC}.cliprange_value", number("algorithm.value_clip"), default=0.5),
    Key("trainer.critic_warmup", to("algorithm.critic_warmup"), default=0),
    Key(
        rules.FILTER,
        switch("algorithm.dynamic_sampling"),
        default=False,
        note="in verl before 0.8 only recipe.dapo reads it, and main_ppo ignores it",
    ),
    Key(
        "algorithm.filter_groups.metric",
        nothing("groups are compared here by the reward as its function gives it, before the overlong penalty and any KL"),
    ),
    Key(
        "algorithm.filter_groups.max_num_gen_batches",
        lambda ask: rules.sets({"algorithm.max_rounds": rules.whole(ask.value) if rules.whole(ask.value) > 0 else 10_000}),
        note="after it verl stops the run; here the step uses the groups that it has",
    ),
    Key("algorithm.filter_groups.max_inflight_gen_batches", nothing("rounds of sampling follow one another here")),
    Key(f"{CORRECTION}.rollout_is", rules.importance, default=None),
    Key(f"{CORRECTION}.rollout_is_threshold", rules.importance_part, default=2.0),
    Key(f"{CORRECTION}.rollout_is_batch_normalize", rules.importance_part, default=False),
    Key(f"{CORRECTION}.{{bypass_mode,bypass_old_logprob_for_rollout}}", rules.bypass, default=False),
    Key(f"{ACTOR}.tis_imp_ratio_cap", rules.older_cap, note="verl 0.5; algorithm.rollout_correction took its place"),
    Key(f"{CORRECTION}.rollout_rs", rules.rejection, default=None),
    Key(f"{CORRECTION}.{{rollout_rs_threshold,rollout_rs_threshold_lower}}", rules.rejection, default=None),
    Key(
        f"{CORRECTION}.loss_type",
        only(
            "ppo_clip", None, nothing="PPO's clipped surrogate", refused="only ppo_clip is built. For a policy gradient use loss_mode=gpg"
        ),
    ),
    Key(f"{CORRECTION}.{{use_pure_rollout_correction,use_policy_gradient}}", off("a policy gradient without clipping is loss_mode=gpg")),
    Key(f"{CORRECTION}.rollout_token_veto_threshold", off("no sample is vetoed by one token. Use rollout_rs=seq_max_k2")),
    Key(f"{CORRECTION}.debug_rollout_actor_probs", nothing("rollout_corr/* metrics are always there")),
    Key("algorithm.rollout_is{,_threshold,_threshold_lower,_level,_mode,_veto_threshold}", rules.importance_of_060),
    Key("algorithm.rollout_is_batch_normalize", off(f"write {CORRECTION}.rollout_is_batch_normalize=True")),
    Key("algorithm.use_pf_ppo", off("preference feedback PPO is not built")),
    Key("algorithm.pf_ppo.*", nothing("use_pf_ppo is off, as here")),
    Key("algorithm.gdpo_reward_keys algorithm.gdpo_reward_weights", rules.reward_parts),
    Key(
        f"{ACTOR}.{{calculate_entropy,calculate_sum_pi_squared,sum_pi_squared_checkpointing}}",
        nothing("computed where an algorithm needs it"),
    ),
    Key(f"{{{ACTOR},{CRITIC}}}.shuffle", nothing("mini-batches hold whole groups, in the order in which prompts are drawn")),
    Key(f"{{{ACTOR},{CRITIC}}}.data_loader_seed", nothing("mini-batches are not drawn: run.seed decides the order of prompts")),
)

OPTIMIZER: tuple[Key, ...] = (
    Key(f"{ACTOR}.optim.lr", number("train.lr"), default=1e-6),
    Key(f"{CRITIC}.optim.lr", number("critic.lr"), default=1e-5),
    Key(f"{ACTOR}.optim.weight_decay", number("train.weight_decay"), default=0.01, note="here on matrices only, in verl on all parameters"),
    Key(f"{CRITIC}.optim.weight_decay", number("critic.weight_decay"), default=0.01),
    Key(f"{ACTOR}.optim.betas", to("train.betas"), default=[0.9, 0.999]),
    Key(f"{CRITIC}.optim.betas", same_as(f"{ACTOR}.optim.betas", what="actor and critic have the same betas")),
    Key(f"{ACTOR}.grad_clip", number("train.clip_grad"), default=1.0),
    Key(f"{ACTOR}.optim.clip_grad", number("train.clip_grad")),
    Key(f"{CRITIC}.grad_clip", number("critic.clip_grad"), default=1.0),
    Key(f"{CRITIC}.optim.clip_grad", number("critic.clip_grad")),
    *(
        row
        for role, section in ((ACTOR, "train"), (CRITIC, "critic"))
        for row in (
            Key(f"{role}.optim.lr_warmup_steps", rules.warmup_steps(section)),
            Key(f"{role}.optim.lr_warmup_steps_ratio", rules.warmup_ratio(f"{role}.optim", section), default=0.0),
            Key(f"{role}.optim.{{lr_scheduler_type,warmup_style,lr_decay_style,decay_type}}", rules.schedule(section), default="constant"),
            Key(f"{role}.optim.{{min_lr_ratio,min_lr_factor}}", number(f"{section}.min_lr_ratio")),
            Key(f"{role}.optim.{{min_lr,lr_min}}", rules.least_rate(role, section)),
        )
    ),
    Key(f"{OPTIM}.num_cycles", only(0.5, None, nothing="half a cosine, as here", refused="the cosine falls once, to its end. Use 0.5")),
    Key(f"{OPTIM}.{{optimizer,name}}", rules.optimizer),
    Key(f"{OPTIM}.optimizer_impl", rules.optimizer_package),
    Key(f"{OPTIM}.total_training_steps", nothing("verl fills it in itself: trainer.total_training_steps counts")),
    Key(
        f"{OPTIM}.{{lr_warmup_init,lr_start}}",
        only(0, 0.0, nothing="the learning rate rises from 0", refused="the learning rate rises from 0. Remove it"),
    ),
    Key(
        f"{OPTIM}.lr_decay_ratio",
        only(1, 1.0, nothing="it falls until the last step, as here", refused="the learning rate falls until the run's last step"),
    ),
    Key(f"{REF}.optim.*", nothing("the reference role does not learn")),
    Key(f"{OPTIM}.{{lr_decay_steps,lr_wsd_decay_steps}}", off("the learning rate falls until the run's last step")),
    Key(f"{OPTIM}.{{lr_wsd_decay_style,lr_wsd_stable_steps_ratio,zero_indexed_step}}", nothing("for the schedule wsd, which is not built")),
    Key(
        f"{OPTIM}.weight_decay_incr_style", only("constant", None, nothing="constant, as here", refused="the weight decay is constant here")
    ),
    Key(f"{OPTIM}.use_checkpoint_opt_param_scheduler", nothing("a resumed run goes on with its own schedule")),
    Key(
        f"{OPTIM}.{{muon_*,use_layer_wise_distributed_optimizer}}".replace(
            "muon_*",
            ",".join(
                f"muon_{name}"
                for name in (
                    "momentum",
                    "nesterov",
                    "split_qkv",
                    "scale_mode",
                    "coefficient_type",
                    "num_ns_steps",
                    "tp_mode",
                    "fp32_matmul_prec",
                    "extra_scale_factor",
                    "scalar_optimizer",
                    "match_adamw_update_rms",
                )
            ),
        ),
        nothing("for Muon, which is not built"),
    ),
    *(
        Key(
            f"{role}.optim.override_optimizer_config.{{optimizer_cpu_offload,optimizer_offload_fraction}}",
            rules.host_optimizer(section, role),
        )
        for role, section in ((ACTOR, "train"), (CRITIC, "critic"))
    ),
    Key(
        f"{OPTIM}.override_optimizer_config.{{overlap_cpu_optimizer_d2h_h2d,use_precision_aware_optimizer,decoupled_weight_decay,store_param_remainders}}",
        nothing("moments and master weights are float32, and pass through the GPU in pieces where they are on the host"),
    ),
    Key(
        f"{OPTIM}.{{use_precision_aware_optimizer,main_grads_dtype,main_params_dtype,exp_avg_dtype,exp_avg_sq_dtype}}",
        nothing("moments, master weights and gradients are float32"),
    ),
    Key(f"{OPTIM}.override_optimizer_config.eps {OPTIM}.eps", number("train.eps")),
    Key(f"{OPTIM}.override_optimizer_config {OPTIM}.override_optimizer_config.*", off("AdamW has no further settings here")),
)


_ACTOR_MICRO = (f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_micro_batch_size")
_REF_MICRO = (f"{REF}.log_prob_micro_batch_size_per_gpu", f"{REF}.log_prob_micro_batch_size")
_CRITIC_MICRO = (f"{CRITIC}.ppo_micro_batch_size_per_gpu", f"{CRITIC}.ppo_micro_batch_size")
_REWARD_MICRO = (f"{REWARD_MODEL}.micro_batch_size_per_gpu", f"{REWARD_MODEL}.micro_batch_size")
_USED = {name: f"{role}.{key}" for name, role, key in (
    ("actor", ACTOR, "use_dynamic_bsz"), ("rollout", ROLLOUT, "log_prob_use_dynamic_bsz"), ("ref", REF, "log_prob_use_dynamic_bsz"),
    ("critic", CRITIC, "use_dynamic_bsz"), ("reward_model", REWARD_MODEL, "use_dynamic_bsz"),
)}  # fmt: skip

BATCHES: tuple[Key, ...] = (
    Key(
        _USED["actor"],
        rules.dynamic_batch("actor", *_ACTOR_MICRO),
    ),
    Key(
        f"{ACTOR}.use_dynamic_batchsize training.use_dynamic_batchsize use_dynamic_batchsize",
        rules.dynamic_batch("actor", *_ACTOR_MICRO),
        note="one guide's spelling; verl's key is use_dynamic_bsz",
    ),
    Key(_USED["rollout"], same_as(_USED["actor"], what="all passes of the actor are batched alike", performance=True)),
    Key(_USED["ref"], rules.dynamic_batch("ref", *_REF_MICRO)),
    Key(_USED["critic"], rules.dynamic_batch("critic", *_CRITIC_MICRO)),
    Key(_USED["reward_model"], rules.dynamic_batch("reward_model", *_REWARD_MICRO)),
    Key(_ACTOR_MICRO[0], rules.micro_batch("actor", _USED["actor"])),
    Key(_ACTOR_MICRO[1], rules.micro_batch("actor", _USED["actor"], over_all=True, before=_ACTOR_MICRO[:1])),
    Key(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", rules.micro_batch("actor", _USED["actor"], before=_ACTOR_MICRO)),
    Key(
        f"{ROLLOUT}.log_prob_micro_batch_size",
        rules.micro_batch("actor", _USED["actor"], over_all=True, before=(*_ACTOR_MICRO, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu")),
    ),
    Key(_REF_MICRO[0], rules.micro_batch("ref", _USED["ref"])),
    Key(_REF_MICRO[1], rules.micro_batch("ref", _USED["ref"], over_all=True, before=_REF_MICRO[:1])),
    Key(_CRITIC_MICRO[0], rules.micro_batch("critic", _USED["critic"])),
    Key(
        _CRITIC_MICRO[1],
        rules.micro_batch("critic", _USED["critic"], over_all=True, before=_CRITIC_MICRO[:1], sizes=rules.sequence_sizes(CRITIC)),
    ),
    Key(
        f"{CRITIC}.forward_micro_batch_size_per_gpu",
        rules.micro_batch("critic", _USED["critic"], before=_CRITIC_MICRO),
        note="it counts samples, though one guide lists it as a cap on tokens",
    ),
    Key(
        f"{CRITIC}.forward_micro_batch_size",
        rules.micro_batch(
            "critic",
            _USED["critic"],
            over_all=True,
            before=(*_CRITIC_MICRO, f"{CRITIC}.forward_micro_batch_size_per_gpu"),
            sizes=rules.sequence_sizes(CRITIC),
        ),
    ),
    Key(_REWARD_MICRO[0], rules.micro_batch("reward_model", _USED["reward_model"])),
    Key(_REWARD_MICRO[1], rules.micro_batch("reward_model", _USED["reward_model"], over_all=True, before=_REWARD_MICRO[:1], sizes=())),
    Key(
        f"{REWARD_MODEL}.forward_micro_batch_size_per_gpu",
        rules.micro_batch("reward_model", _USED["reward_model"], before=_REWARD_MICRO),
        note="one guide's spelling; verl's key is micro_batch_size_per_gpu",
    ),
    Key(f"{ACTOR}.ppo_max_token_len_per_gpu", rules.token_budget("actor.token_budget", _USED["actor"])),
    Key(f"{ROLLOUT}.log_prob_max_token_len_per_gpu", rules.token_budget("actor.forward_token_budget", _USED["rollout"])),
    Key(f"{REF}.log_prob_max_token_len_per_gpu", rules.token_budget("ref.forward_token_budget", _USED["ref"])),
    Key(f"{CRITIC}.ppo_max_token_len_per_gpu", rules.token_budget("critic.token_budget", _USED["critic"])),
    Key(f"{CRITIC}.forward_max_token_len_per_gpu", rules.token_budget("critic.forward_token_budget", _USED["critic"])),
    Key(f"{REWARD_MODEL}.forward_max_token_len_per_gpu", rules.token_budget("reward_model.forward_token_budget", _USED["reward_model"])),
    Key("trainer.balance_batch", switch("train.balance")),
    Key("trainer.balance_keep_minibatch", nothing("balancing never moves a sample to another mini-batch here")),
)

_ENTROPY = "entropy_from_logits_with_chunking"
_MODEL_TYPE = only(
    "fp32", "float32", None, nothing="master weights and moments are float32 here", refused="master weights are float32. Remove it"
)

TRAINING: tuple[Key, ...] = (
    Key(f"{ACTOR}.fsdp_config.fsdp_size", rules.shard_size),
    Key(f"{ACTOR}.strategy {ACTOR}.fsdp_config.strategy", rules.sharding),
    Key(
        f"{{{REF},{CRITIC},{REWARD_MODEL}}}.strategy {{{REF}.fsdp_config,{CRITIC_SHARED}}}.strategy",
        nothing("all roles are shared out as the actor is (train.shard)"),
    ),
    Key(
        f"{{{REF}.fsdp_config,{CRITIC_SHARED},{REWARD_MODEL}.model.fsdp_config}}.fsdp_size",
        nothing("all roles are shared out as the actor is (train.shard)"),
    ),
    Key(
        "model_engine",
        rules.group_of(
            {
                "dp": "FSDP",
                "megatron": "Megatron",
                "veomni": "VeOmni",
                "torchtitan": "TorchTitan",
                "automodel": "AutoModel",
            }
        ),
        note="there is one trainer here; what it shares out is train.shard",
    ),
    Key(f"{ACTOR}.fsdp_config.reshard_after_forward", switch("train.reshard_after_forward")),
    Key(f"{ACTOR}.fsdp_config.forward_prefetch", switch("train.forward_prefetch"), note="verl drops it under FSDP2; it holds here"),
    Key(
        f"{{{REF}.fsdp_config,{CRITIC_SHARED},{REWARD_MODEL}.model.fsdp_config}}.{{reshard_after_forward,forward_prefetch}}",
        nothing("all roles gather parameters as the actor does (train.reshard_after_forward, train.forward_prefetch)"),
    ),
    Key(f"{ACTOR}.fsdp_config.param_offload {ACTOR}.megatron.param_offload", switch("train.offload_params")),
    Key(
        f"{ACTOR}.fsdp_config.offload_policy",
        switch("train.offload_params"),
        note="verl streams each layer from the host in every pass; here a role's parameters come once for each of its phases",
    ),
    Key(f"{ACTOR}.fsdp_config.optimizer_offload {ACTOR}.megatron.optimizer_offload", rules.moved_optimizer("train", ACTOR)),
    Key(
        f"{ACTOR}.megatron.grad_offload {ACTOR}.fsdp_config.grad_offload",
        switch("train.offload_grads"),
        note="verl reads it nowhere; here it frees the memory of gradients between updates",
    ),
    Key(
        f"{REF}.fsdp_config.param_offload {REF}.megatron.param_offload",
        switch("ref.offload_params"),
        note="under FSDP verl keeps the reference model on the host whatever this says; here it is obeyed",
    ),
    Key(
        f"{REF}.{{fsdp_config,megatron}}.{{optimizer_offload,grad_offload,offload_policy}}",
        nothing("the reference role has no optimizer and no gradients"),
    ),
    Key(f"{{{CRITIC_SHARED},{CRITIC}.megatron}}.param_offload", switch("critic.offload_params")),
    Key(f"{{{CRITIC_SHARED},{CRITIC}.megatron}}.optimizer_offload", rules.moved_optimizer("critic", CRITIC)),
    Key(f"{{{CRITIC_SHARED}}}.offload_policy", switch("critic.offload_params")),
    Key(
        f"{{{CRITIC_SHARED},{CRITIC}.megatron}}.grad_offload",
        nothing("train.offload_grads is for actor and critic; verl reads it nowhere"),
    ),
    Key(f"{REWARD_MODEL}.model.fsdp_config.param_offload {REWARD_MODEL}.megatron.param_offload", switch("reward_model.offload_params")),
    Key(
        f"{REWARD_MODEL}.{{model.fsdp_config,megatron}}.{{optimizer_offload,grad_offload,offload_policy}}",
        nothing("the reward model has no optimizer and no gradients"),
    ),
    Key(f"{ENGINES}.offload.*", off("set param_offload, grad_offload or optimizer_offload instead", performance=True)),
    Key(
        f"{SHARED}.{{wrap_policy.*,wrap_policy,use_orig_params,use_no_sync_for_gradient_accumulation}}",
        nothing("each layer is one unit of what is shared out"),
    ),
    Key(
        f"{SHARED}.{{model_dtype,mixed_precision,mixed_precision.*}}",
        nothing("shared parameters are float32 here, and compute in model.dtype"),
    ),
    Key(
        f"{{{SHARED[1:-1]},{ENGINES[1:-1]}}}.dtype",
        only("bfloat16", "bf16", None, nothing="bfloat16 on CUDA, as here", refused="float16 is not built. Use bfloat16"),
    ),
    Key(f"{{{ACTOR},{REF},{CRITIC},{SHARED[1:-1]}}}.{{pad_to_length,pad_to_length_bucket}}", nothing(NO_PADDING)),
    Key(f"{SHARED}.full_determinism", switch("run.deterministic")),
    Key(f"{SHARED}.{{seed,forward_only,qat.*,turbo_config.*}}", nothing("there is nothing of this kind here: run.seed is the seed")),
    Key(
        f"{ACTOR}.ulysses_sequence_parallel_size {ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
        to("train.sequence_parallel"),
        note="in verl it does nothing for models that it does not patch; here a size that cannot be is refused",
    ),
    Key(f"{REF}.ulysses_sequence_parallel_size {REF}.fsdp_config.ulysses_sequence_parallel_size", to("ref.sequence_parallel")),
    Key(
        f"{CRITIC}.ulysses_sequence_parallel_size {{{CRITIC_SHARED}}}.ulysses_sequence_parallel_size",
        to("critic.sequence_parallel"),
    ),
    Key(
        f"{REWARD_MODEL}.ulysses_sequence_parallel_size {REWARD_MODEL}.model.fsdp_config.ulysses_sequence_parallel_size",
        to("reward_model.sequence_parallel"),
    ),
    Key(
        "training.ulysses_degree ulysses_degree",
        to("train.sequence_parallel"),
        note="one guide's spelling; verl's key is ulysses_sequence_parallel_size",
    ),
    Key("training.sequence_parallel", nothing("one guide's switch; its size is ulysses_degree")),
    Key(
        f"{ACTOR}.{_ENTROPY} {ACTOR}.fsdp_config.{_ENTROPY} {ACTOR}.megatron.{_ENTROPY}",
        rules.chunked_entropy("train.entropy_chunk", ACTOR),
    ),
    Key(
        f"{REF}.{_ENTROPY} {REF}.fsdp_config.{_ENTROPY} {REF}.megatron.{_ENTROPY}",
        rules.chunked_entropy("ref.entropy_chunk", REF),
    ),
    Key(
        f"{{{CRITIC_SHARED},{CRITIC}.megatron,{REWARD_MODEL}.megatron}}.{_ENTROPY}",
        nothing("a critic has no entropy"),
    ),
    Key(
        f"{{{ACTOR},{REF},{SHARED[1:-1]},{ENGINES[1:-1]}}}.entropy_from_logits_chunk_size",
        nothing(f"read with {_ENTROPY}, as its number of tokens"),
    ),
    Key(f"{ACTOR}.entropy_checkpointing {ACTOR}.fsdp_config.entropy_checkpointing", switch("train.entropy_recompute")),
    Key(
        f"{REF}.entropy_checkpointing {{{REF}.fsdp_config,{CRITIC_SHARED}}}.entropy_checkpointing",
        nothing("only the actor's entropy has a gradient"),
    ),
    Key(
        f"{ACTOR}.use_torch_compile {ACTOR}.fsdp_config.use_torch_compile",
        switch("train.compile"),
        note="verl compiles only the entropy; train.compile compiles the layers",
    ),
    Key(
        f"{REF}.use_torch_compile {{{REF}.fsdp_config,{CRITIC_SHARED}}}.use_torch_compile",
        nothing("train.compile is for all roles"),
    ),
    Key(
        f"{ACTOR}.use_remove_padding {REF}.use_remove_padding", nothing("verl fills it in from actor_rollout_ref.model.use_remove_padding")
    ),
    Key(f"{ACTOR}.use_fused_kernels {REF}.use_fused_kernels", nothing("verl fills it in from actor_rollout_ref.model.use_fused_kernels")),
    Key(f"{ACTOR}.use_prefix_grouper", off("a group's prompt is computed with each sample in an update", performance=True)),
    Key(
        f"{{{ACTOR},{REF}}}.router_replay.* {ENGINES}.router_replay.* {ROLLOUT}.enable_rollout_routing_replay",
        off("rollout and training run the same experts on the same weights here: there is no routing to replay"),
    ),
    Key(f"{{{ACTOR},{REF}}}.qat.* {ENGINES}.qat.*", nothing("weights are not quantised")),
    Key(f"{ACTOR}.freeze_vision_tower", nothing("pictures are not read")),
    Key(f"{{{ACTOR},{REF},{CRITIC},{REWARD_MODEL}}}.load_weight", nothing("weights are always loaded")),
    Key(f"{{{ACTOR},{CRITIC}}}.checkpoint.*", nothing(ALWAYS_SAVED)),
    Key(f"{REF}.{{sync_actor,sync_actor_alpha,sync_steps}}", off("the reference role stays as it was at the start")),
    Key(f"{REF}.model.path {REF}.model", to("ref.path")),
)

TRANSFORMER = "override_transformer_config"
PIPELINE = (
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "account_for_loss_in_pipeline_split",
    "account_for_embedding_in_pipeline_split", "deallocate_pipeline_outputs", "pipeline_model_parallel_layout", "overlap_p2p_comm",
    "batch_p2p_comm", "defer_embedding_wgrad_compute", "pipeline_dtype", "virtual_pipeline_model_parallel_size",
    "first_pipeline_num_layers", "last_pipeline_num_layers",
)  # fmt: skip
EXPERTS = (
    "moe_grouped_gemm", "moe_token_dispatcher_type", "moe_enable_deepep", "moe_shared_expert_overlap", "moe_router_dtype",
    "moe_router_load_balancing_type", "moe_flex_dispatcher_backend", "moe_pad_expert_input_to_capacity", "moe_router_fusion",
    "moe_permute_padding_for_fp8", "moe_deepep_num_sms", "moe_router_force_load_balancing", "moe_per_layer_logging",
    "moe_router_padding_for_fp8", "moe_router_padding_for_quantization", "moe_hybridep_num_sms", "moe_apply_probs_on_input",
    "overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "moe_router_pre_softmax", "moe_layer_freq",
)  # fmt: skip
KERNELS = (
    "attention_backend", "variable_seq_lengths", "gradient_accumulation_fusion", "use_flash_attn", "attention_softmax_in_fp32",
    "disable_bf16_reduced_precision_matmul", "tp_comm_overlap", "async_tensor_model_parallel_allreduce", "cross_entropy_loss_fusion",
    "cross_entropy_fusion_impl", "use_fused_rotary_pos_emb", "use_fused_swiglu", "use_flash_attn_npu", "sequence_parallel",
    "use_cpu_initialization", "batch_invariant_mode", "cpu_offloading", "cpu_offloading_num_layers", "swap_attention", "use_ascend_mc2",
    "context_parallel_size", "cp_comm_type", "calculate_per_token_loss", "enable_cuda_graph", "external_cuda_graph", "cuda_graph_scope",
    "mtp_num_layers", "mtp_loss_scaling_factor", "normalization", "swiglu", "num_query_groups", "no_rope_fusion", "recompute_mtp_layer",
)  # fmt: skip


MEGATRON, OTHERS = f"{ACTOR}.megatron", f"{{{REF}.megatron,{CRITIC}.megatron,{REWARD_MODEL}.megatron}}"


def _megatron_sizes() -> Iterator[Key]:
    """Yield the sizes by which Megatron divides a model: the actor's as keys of [train]; those of other roles as their own, if we have such
    keys."""
    layout = {
        "tensor_model_parallel_size": to("train.tensor_parallel"),
        "expert_model_parallel_size": to("train.expert_parallel"),
        "pipeline_model_parallel_size": rules.one_size(None, "pipeline parallelism", "Use tensor_model_parallel_size, or --retune"),
        "virtual_pipeline_model_parallel_size": rules.one_size(None, "virtual pipeline stages", "Use null, or --retune"),
        "context_parallel_size": rules.one_size(None, "context parallelism", "Use actor.ulysses_sequence_parallel_size, or --retune"),
        "expert_tensor_parallel_size": rules.one_size(None, "tensor parallelism of experts", "Use 1 or null, or --retune"),
    }
    for name, become in layout.items():
        yield Key(f"{MEGATRON}.{name}", become)
        if name in rules.SIZES:
            for section, role in (("ref", REF), ("critic", CRITIC), ("reward_model", REWARD_MODEL)):
                yield Key(f"{role}.megatron.{name}", rules.size_of_role(section, f"{role}.megatron", MEGATRON))
            continue
        yield Key(f"{OTHERS}.{name}", same_as(f"{MEGATRON}.{name}", what="all roles have the actor's layout", performance=True))


def _megatron() -> Iterator[Key]:
    """Yield the keys of Megatron's engine, except sizes and the model."""
    yield Key(f"{ENGINES}.sequence_parallel", nothing("with tensor parallelism the layers' inputs are whole on each GPU here"))
    yield Key(
        f"{MEGATRON}.use_distributed_optimizer",
        to("train.shard", values={True: "optimizer", False: "optimizer"}),
        note="master weights and moments are always shared out",
    )
    yield Key(f"{OTHERS}.use_distributed_optimizer", nothing("train.shard is for all roles"))
    yield Key(f"{ENGINES}.use_dist_checkpointing", nothing("weights are read from the Hugging Face folder of model.path"))
    yield Key(
        f"{ENGINES}.{{dist_checkpointing_path,dist_checkpointing_prefix,dist_ckpt_optim_fully_reshardable,"
        "distrib_optim_fully_reshardable_mem_efficient}",
        nothing("weights are read from the Hugging Face folder of model.path; a checkpoint may be resumed with another number of GPUs"),
    )
    yield Key(f"{ENGINES}.{{use_mbridge,vanilla_mbridge}}", nothing("Hugging Face's weights need no bridge here"))
    yield Key(f"{ENGINES}.{{seed,forward_only}}", nothing("run.seed is the seed"))
    yield Key(f"{ENGINES}.use_remove_padding", nothing("actor_rollout_ref.model.use_remove_padding is train.packing"))
    yield Key(f"{ENGINES}.{{pad_bshd_to_minibatch_max,pad_to_length,pad_to_length_bucket}}", nothing(NO_PADDING))
    yield Key(f"{ENGINES}.use_megatron_fsdp", off("use fsdp_config.fsdp_size, which is train.shard", performance=True))
    yield Key(
        f"{ENGINES}.{{dynamic_context_parallel,max_seqlen_per_dp_cp_rank}}", off("context parallelism is not built", performance=True)
    )
    yield Key(f"{ENGINES}.override_ddp_config {ENGINES}.override_ddp_config.*", nothing("gradients are summed once an update, in float32"))
    yield Key(
        f"{ENGINES}.override_mcore_model_config {ENGINES}.override_mcore_model_config.*",
        off("the model's own config.json holds here. Change it there"),
    )


def _megatron_model() -> Iterator[Key]:
    """Yield the keys of the model that Megatron's users override: recompute, fused kernels, experts."""
    yield Key(f"{MEGATRON}.{TRANSFORMER}.recompute_granularity", to("train.recompute"))
    yield Key(f"{MEGATRON}.{TRANSFORMER}.recompute_method", to("train.recompute_method"))
    yield Key(f"{MEGATRON}.{TRANSFORMER}.recompute_num_layers", to("train.recompute_layers"))
    yield Key(f"{ENGINES}.{TRANSFORMER}.recompute_modules", nothing('"selective" recomputes all but matrix products and attention here'))
    yield Key(f"{{{CRITIC}}}.megatron.{TRANSFORMER}.recompute_granularity", to("critic.recompute"))
    yield Key(
        f"{{{REF}.megatron,{REWARD_MODEL}.megatron}}.{TRANSFORMER}.recompute_granularity", nothing("a role without gradients keeps nothing")
    )
    yield Key(f"{OTHERS}.{TRANSFORMER}.{{recompute_method,recompute_num_layers}}", nothing("train.recompute_layers is for all roles"))
    for role in (ACTOR, REF, CRITIC, REWARD_MODEL):
        above = f"{role}.megatron.{TRANSFORMER}"
        yield Key(f"{above}.{{{','.join(rules.FUSIONS)}}}", rules.fusion(above))
    yield Key(f"{ENGINES}.{TRANSFORMER}.{{{','.join(PIPELINE)}}}", nothing(NO_STAGES))
    yield Key(
        f"{ENGINES}.{TRANSFORMER}.{{{','.join(EXPERTS)}}}",
        nothing("experts run grouped here; tokens are routed as the model's own code does"),
    )
    yield Key(f"{ENGINES}.{TRANSFORMER}.{{{','.join(KERNELS)}}}", nothing("the kernels here are fixed for each device"))
    yield Key(
        f"{ENGINES}.{TRANSFORMER}.{{moe_aux_loss_coeff,moe_z_loss_coeff}}",
        only(0, 0.0, None, nothing="no auxiliary loss, as here", refused="an auxiliary loss of experts is not built. Use 0"),
    )
    yield Key(
        f"{ENGINES}.{TRANSFORMER}.{{attention_dropout,hidden_dropout}}",
        only(0, 0.0, nothing="no dropout, as here", refused="dropout is not built. Use 0"),
    )
    yield Key(f"{ENGINES}.{TRANSFORMER}.{{fp8,fp8_recipe,fp8_param,fp8_margin}}", off("FP8 is not built"))
    yield Key(f"{ENGINES}.{TRANSFORMER}", nothing("no setting"))
    yield Key(f"{MODEL}.gradient_checkpointing_kwargs.activations_checkpoint_granularity", to("train.recompute"))
    yield Key(f"{MODEL}.gradient_checkpointing_kwargs.activations_checkpoint_method", to("train.recompute_method"))
    yield Key(f"{MODEL}.gradient_checkpointing_kwargs.activations_checkpoint_num_layers", to("train.recompute_layers"))
    yield Key(f"{CRITIC}.model.gradient_checkpointing_kwargs.*", nothing("train.recompute_layers is for all roles"))


OTHER_ENGINES = "{veomni,torchtitan,automodel}"


def _other_engines() -> Iterator[Key]:
    """Yield the settings of VeOmni, TorchTitan and AutoModel that are common with FSDP and Megatron."""
    actor = f"{ACTOR}.{OTHER_ENGINES}"
    yield Key(f"{actor}.param_offload", switch("train.offload_params"))
    yield Key(f"{actor}.optimizer_offload", rules.moved_optimizer("train", ACTOR))
    yield Key(f"{actor}.{{tensor_parallel_size,tp_size}}", to("train.tensor_parallel"))
    yield Key(f"{actor}.{{expert_parallel_size,ep_size}}", to("train.expert_parallel"))
    yield Key(f"{actor}.ulysses_parallel_size", to("train.sequence_parallel"))
    yield Key(
        f"{actor}.{{pipeline_parallel_size,pp_size,context_parallel_size,cp_size}}",
        rules.one_size(None, "this kind of parallelism", "Use tensor_parallel_size or ulysses_parallel_size, or --retune"),
    )
    yield Key(f"{actor}.*", nothing("there is one trainer here, in the place of every engine of verl's"))
    yield Key(f"{{{REF},{CRITIC}}}.{OTHER_ENGINES}.*", nothing("all roles have the actor's trainer"))


_TILED = off("layers are not computed in tiles. Use enable_gradient_checkpointing", performance=True)
MODELS: tuple[Key, ...] = (
    Key(f"{MODEL}.path", to("model.path")),
    Key(f"{MODEL}.trust_remote_code", switch("model.trust_remote_code")),
    Key(
        f"{MODEL}.custom_chat_template",
        off("model.chat_template names a file. Write the template to one, and give it in the run file (--write)"),
    ),
    Key(f"{MODEL}.enable_gradient_checkpointing", rules.checkpointing("train.recompute")),
    Key(f"{CRITIC}.model.enable_gradient_checkpointing", rules.checkpointing("critic.recompute")),
    Key(f"{MODEL}.enable_activation_offload", switch("train.offload_activations")),
    Key(f"{CRITIC}.model.enable_activation_offload", switch("critic.offload_activations")),
    Key(f"{MODEL}.use_remove_padding {MODEL}.use_rmpad", switch("train.packing")),
    Key(f"{CRITIC}.model.use_remove_padding {CRITIC}.model.use_rmpad", switch("critic.packing")),
    Key(f"{REWARD_MODEL}.model.use_remove_padding {REWARD_MODEL}.model.use_rmpad", switch("reward_model.packing")),
    Key(f"{MODEL}.truncate_padding", nothing(NO_PADDING)),
    Key(f"{MODEL}.use_liger", switch("train.fused_layers")),
    Key(
        f"{MODEL}.use_liger_kernel training.use_liger_kernel use_liger_kernel",
        switch("train.fused_layers"),
        note="one guide's spelling; verl's key is use_liger",
    ),
    Key(
        f"{MODEL}.use_fused_kernels {MODEL}.use_fused_loss",
        switch("train.fused_head"),
        note="verl's torch backend gives log-probs in bfloat16, and wrong ones at the borders of a sequence's parts; here they are float32",
    ),
    Key(f"{MODEL}.fused_kernel_options {MODEL}.fused_kernel_options.*", nothing("there is one implementation for each device")),
    Key(
        f"{REWARD_MODEL}.model.use_fused_kernels {CRITIC}.model.use_fused_kernels {CRITIC}.model.fused_kernel_options.*",
        nothing("these models have no vocabulary head"),
    ),
    Key(f"{{{MODEL},{CRITIC}.model}}.tiled_mlp.enabled", _TILED),
    Key(f"{{{MODEL},{CRITIC}.model}}.tiled_mlp.num_shards", nothing("for tiled_mlp.enabled")),
    Key(f"{MODEL}.lora_rank {MODEL}.lora.rank", to("lora.rank"), default=0),
    Key(f"{MODEL}.lora.alpha", rules.of_engine(number("lora.alpha"), f"{MODEL}.lora_alpha")),
    Key(f"{MODEL}.lora_alpha", rules.of_engine(rules.lora_alpha, f"{MODEL}.lora.alpha"), default=16.0),
    Key(f"{MODEL}.lora.target_modules", rules.of_engine(rules.targets, f"{MODEL}.target_modules")),
    Key(f"{MODEL}.target_modules", rules.of_engine(rules.targets, f"{MODEL}.lora.target_modules")),
    Key(
        f"{MODEL}.exclude_modules {MODEL}.lora.exclude_modules", off("name the layers that get an adapter: target_modules=[q_proj,v_proj]")
    ),
    Key(f"{MODEL}.lora_adapter_path {MODEL}.lora.adapter_path", to("lora.path")),
    Key(f"{MODEL}.lora.merge", nothing("adapters run unmerged in rollouts, which loses no bits")),
    Key(f"{MODEL}.lora.dropout", only(0, 0.0, nothing="no dropout, as here", refused="dropout is not built. Use 0")),
    Key(f"{MODEL}.lora.type", only("lora", None, nothing="LoRA, as here", refused="only LoRA is built")),
    Key(
        f"{MODEL}.lora.{{dropout_position,lora_A_init_method,lora_B_init_method,a2a_experimental,dtype,freeze_vision_model,"
        "freeze_vision_projection,freeze_language_model}",
        nothing("adapters start at 0, and all else is frozen"),
    ),
    Key(f"{CRITIC}.model.lora_rank", rules.critic_adapters),
    Key(
        f"{CRITIC}.model.{{lora_alpha,target_modules,exclude_modules,lora_adapter_path,lora.*}}",
        nothing("the critic's adapters are like the actor's"),
    ),
    Key(f"{CRITIC}.model.use_liger", nothing("train.fused_layers is for all roles")),
    Key(
        f"{{{MODEL},{CRITIC}.model,{REWARD_MODEL}.model}}.{{override_config,override_config.*}}",
        rules.dropout,
    ),
    Key(f"{{{MODEL},{CRITIC}.model,{REWARD_MODEL}.model}}.use_shm", nothing("models are read where they are")),
    Key(
        f"{{{MODEL},{CRITIC}.model,{REWARD_MODEL}.model}}.external_lib",
        off("a package of your own is not imported. Models are those of transformers"),
    ),
    Key(f"{MODEL}.{{hf_config_path,tokenizer_path}}", off("configuration and tokenizer are those of model.path. Put them into its folder")),
    Key(f"{MODEL}.{{return_last_hidden_state,use_prefix_grouper}}", nothing("computed where it is needed")),
    Key(f"{{{MODEL},{CRITIC}.model}}.mtp.*", rules.multi_token),
    Key(f"{CRITIC}.model.path", to("critic.path")),
    Key(f"{CRITIC}.model.{{tokenizer_path,custom_chat_template}}", nothing("the critic reads the actor's tokens")),
    Key(f"{CRITIC}.model.hf_config_path", off("the configuration is that of critic.model.path. Put it into its folder")),
    Key(f"{{{CRITIC},{REWARD_MODEL}}}.model.trust_remote_code", switch("model.trust_remote_code")),
    Key(f"{CRITIC}.enable", rules.critic_switch),
    Key(f"{CRITIC}.nccl_timeout {REWARD_MODEL}.nccl_timeout actor_rollout_ref.nccl_timeout", nothing(NOT_SHARED)),
    Key("actor_rollout_ref.hybrid_engine", only(True, None, nothing="as here", refused="rollout and training share their GPUs. Use True")),
)


GENERATION: tuple[Key, ...] = (
    Key(f"{ROLLOUT}.name", rules.engine),
    Key(f"{ROLLOUT}.mode", nothing("requests and batches go through one scheduler here")),
    Key(f"{ROLLOUT}.temperature", number("rollout.temperature"), default=1.0),
    Key(f"{ROLLOUT}.top_p", number("rollout.top_p"), default=1.0),
    Key(f"{ROLLOUT}.top_k", to("rollout.top_k", values={-1: 0}), default=-1),
    Key(f"{ROLLOUT}.do_sample", rules.sampling),
    Key(f"{ROLLOUT}.prompt_length", same_as("data.max_prompt_length", what="one limit for prompts")),
    Key(f"{ROLLOUT}.response_length", same_as("data.max_response_length", what="one limit for responses")),
    Key(f"{ROLLOUT}.max_model_len", rules.long_enough()),
    Key(f"{ROLLOUT}.dtype", nothing("rollouts compute in the trainer's type, model.dtype")),
    Key(f"{ROLLOUT}.gpu_memory_utilization", rules.kv_bytes(f"{MODEL}.path", f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.name")),
    Key(f"{ROLLOUT}.tensor_model_parallel_size", to("rollout.tensor_parallel")),
    Key(
        f"{ROLLOUT}.tensor_parallel_size",
        to("rollout.tensor_parallel"),
        note="one guide's spelling; verl's key is tensor_model_parallel_size",
    ),
    Key(
        f"{ROLLOUT}.{{data_parallel_size,pipeline_model_parallel_size,moe_tensor_parallel_size}}",
        rules.one_size(None, "this division of the engine", "Use tensor_model_parallel_size, or --retune"),
    ),
    Key(f"{ROLLOUT}.expert_parallel_size", to("rollout.expert_parallel")),
    Key(f"{ROLLOUT}.max_num_seqs", to("rollout.max_seqs")),
    Key(f"{ROLLOUT}.max_batch_size", to("rollout.max_seqs"), note="TensorRT-LLM's name; verl's key is max_num_seqs"),
    Key(f"{ROLLOUT}.max_num_batched_tokens", to("rollout.max_batched_tokens")),
    Key(f"{ROLLOUT}.enable_chunked_prefill", switch("rollout.chunked_prefill")),
    Key(f"{ROLLOUT}.enable_prefix_caching", switch("rollout.prefix_sharing")),
    Key(f"{ROLLOUT}.enforce_eager", rules.eager),
    Key(f"{ROLLOUT}.free_cache_engine", switch("rollout.release_memory")),
    Key(f"{ROLLOUT}.disable_log_stats", switch("rollout.log_stats", inverse=True, why="the opposite sense")),
    Key(f"{ROLLOUT}.ignore_eos", off("a response ends at its end token")),
    Key(f"{ROLLOUT}.calculate_log_probs", nothing("every sample has its log-probs here")),
    Key(
        f"{ROLLOUT}.logprobs_mode",
        only(
            "processed_logprobs", None, nothing="at the sampling temperature, as here", refused="log-probs are at the sampling temperature"
        ),
    ),
    Key(
        f"{ROLLOUT}.over_sample_rate",
        only(0, 0.0, None, nothing="every sample is finished, as here", refused="every sample is finished here. Use 0"),
    ),
    Key(
        f"{ROLLOUT}.quantization {ROLLOUT}.quantization_config_file",
        off("rollouts run the trainer's weights, which are not quantised. Remove it"),
    ),
    Key(f"{ROLLOUT}.{{skip_rollout,use_fire_sampling}}", off("every step samples, by temperature, top-p and top-k")),
    Key(f"{ROLLOUT}.{{skip_dump_dir,skip.*}}", nothing("every step samples")),
    Key(
        f"{ROLLOUT}.sampling_kwargs {ROLLOUT}.sampling_kwargs.* {ROLLOUT}.val_kwargs.sampling_kwargs",
        off("sampling is by temperature, top-p and top-k"),
    ),
    Key(
        f"{ROLLOUT}.{{load_format,layered_summon,cudagraph_capture_sizes,multi_stage_wake_up,update_weights_bucket_megabytes,"
        "scheduling_policy,skip_tokenizer_init,use_block_quant_rollout,cast_to_rollout_dtype,limit_images,chat_scheduler,full_determinism,seed,"
        "max_concurrent_prompts,qat,router_config_path,moe_load_balance_metrics_interval}",
        nothing(ONE_ENGINE),
    ),
    Key(
        f"{ROLLOUT}.{{engine_kwargs,engine_kwargs.*,checkpoint_engine.*,layer_name_map.*,prometheus.*,trace.*,mtp,mtp.*,disaggregation.*,router.*}}",
        nothing(ONE_ENGINE),
    ),
    Key(f"{ROLLOUT}.val_kwargs.temperature", rules.validation_temperature, default=0.0),
    Key(f"{ROLLOUT}.val_kwargs.do_sample", rules.validation_sampling),
    Key(f"{ROLLOUT}.val_kwargs.top_p", number("eval.top_p"), default=1.0),
    Key(f"{ROLLOUT}.val_kwargs.top_k", to("eval.top_k", values={-1: 0}), default=-1),
    Key(f"{ROLLOUT}.val_kwargs.n", to("eval.samples_per_prompt"), default=1),
    Key(f"{ROLLOUT}.multi_turn.*", rules.multi_turn),
    Key(
        f"{ROLLOUT}.agent.default_agent_loop",
        only(
            "single_turn_agent",
            None,
            nothing="a sample is one response to one prompt",
            refused="multi-turn rollouts are not built: a sample is one response to one prompt",
        ),
    ),
    Key(
        f"{ROLLOUT}.agent.{{agent_loop_config_path,custom_async_server.*,agent_loop_manager_class}}",
        off("an agent loop of your own cannot be loaded: multi-turn rollouts are not built"),
    ),
    Key(f"{ROLLOUT}.agent.*", nothing("there are no agent loops here")),
    Key(f"{ROLLOUT}.{{nnodes,n_gpus_per_node}}", nothing("rollout and training share their GPUs")),
)

REWARDS: tuple[Key, ...] = (
    Key(" ".join(f"{key}.path" for key in rules.CUSTOM), rules.reward_function, default=None),
    Key(" ".join(f"{key}.name" for key in rules.CUSTOM), rules.reward_name),
    Key(" ".join(f"{key}.reward_kwargs.*" for key in rules.CUSTOM), rules.reward_argument),
    Key(" ".join(rules.ENABLED), rules.reward_model_on),
    Key("reward_model.model.path reward.reward_model.model_path", to("reward_model.path")),
    Key(
        "reward_model.model.input_tokenizer",
        nothing("the response goes to the reward model as text, through its own tokenizer and chat template"),
    ),
    Key("reward_model.max_length", rules.long_enough()),
    Key(" ".join(rules.MANAGERS), rules.manager),
    Key(
        "{reward_manager,reward.reward_manager}.source {reward_manager,reward.reward_manager}.module.*",
        only(
            "register",
            "custom_reward_manager",
            None,
            nothing="one that verl has",
            refused="a reward manager of your own cannot be loaded. Give its function: custom_reward_function.path",
        ),
    ),
    *(Key(" ".join(f"{key}.{part}" for key in OVERLONG), rules.overlong(part)) for part in ("enable", "len", "penalty_factor")),
    Key(" ".join(f"{key}.log" for key in OVERLONG), nothing("critic/rewards/* metrics include the penalty, and critic/score/* do not")),
    Key("{reward_model,reward}.reward_kwargs.max_resp_len", rules.overlong("max_resp_len")),
    Key("{reward_model,reward}.reward_kwargs.*", off("the reward manager takes no further arguments here")),
    Key(
        "reward_model.{launch_reward_fn_async,use_reward_loop,reward_loop_source,reward_loop_class_name,reward_loop_module_path}",
        nothing("rewards are computed while samples are still being generated"),
    ),
    Key("{reward_model,reward}.num_workers", to("reward.workers")),
    Key(
        "{sandbox_fusion,reward_model.sandbox_fusion,reward.sandbox_fusion}.url",
        off("a code sandbox is called from a reward function of your own: custom_reward_function.path"),
    ),
    Key(
        "{sandbox_fusion,reward_model.sandbox_fusion,reward.sandbox_fusion}.{max_concurrent,memory_limit_mb}",
        nothing("for sandbox_fusion.url"),
    ),
    Key("reward.compute_score_kwargs reward.compute_score_kwargs.*", rules.score_method),
    Key("{reward_model,reward.reward_model}.{n_gpus_per_node,nnodes}", rules.reward_workers),
    Key("{reward_model,reward.reward_model}.enable_resource_pool", rules.reward_workers),
    Key(
        f"{REWARD_ENGINE} {REWARD_ENGINE}.*",
        nothing("a reward model that scores runs in the trainer, packed; an LLM as a judge is an async reward function"),
    ),
)


PROFILED = f"{{{ACTOR},{REF},{ROLLOUT},{CRITIC},{REWARD_MODEL}}}"
TRAINER: tuple[Key, ...] = (
    Key("trainer.total_training_steps", rules.steps),
    Key("trainer.total_epochs", rules.epochs, default=30),
    Key(GPUS, to("cluster.workers")),
    Key(NODES, rules.nodes),
    Key("trainer.device", rules.device),
    Key("trainer.default_local_dir", rules.folder, default=None),
    Key("trainer.project_name", rules.named_folder("log.project"), default="verl_examples"),
    Key("trainer.experiment_name", rules.named_folder("log.name"), default="gsm8k"),
    Key("trainer.logger", rules.loggers),
    Key("trainer.wandb_proxy", nothing("wandb reads HTTPS_PROXY from the environment")),
    Key("trainer.log_val_generations", rules.for_loggers("log.val_samples")),
    Key("trainer.save_freq", rules.every("run.save_every"), default=-1),
    Key("trainer.test_freq", rules.every("run.eval_every"), default=-1),
    Key("trainer.val_before_train", rules.before_training, default=True),
    Key("trainer.val_only", off("`fulltilt eval RUN.toml` validates without training: save the run file with --write")),
    Key("trainer.resume_mode", rules.resume, default="auto"),
    Key("trainer.resume_from_path", off("a run resumes from the newest checkpoint in run.dir")),
    Key("trainer.max_actor_ckpt_to_keep", rules.kept, default=None),
    Key(
        "trainer.{max_critic_ckpt_to_keep,max_ref_ckpt_to_keep}",
        nothing("one checkpoint holds all roles: trainer.max_actor_ckpt_to_keep counts"),
    ),
    Key("trainer.default_hdfs_dir trainer.remove_previous_ckpt_in_save", off("checkpoints are in run.dir. Copy them from there")),
    Key(
        "trainer.{rollout_data_dir,validation_data_dir}",
        nothing("samples are always written to rollouts/ and validation/ in the run's folder"),
    ),
    Key(
        "trainer.{del_local_ckpt_after_load,ray_wait_register_center_timeout,esi_redundant_time,use_legacy_worker_impl,use_v1}",
        nothing("there is nothing of this kind here"),
    ),
    Key("trainer.checkpoint_callback_class", off("use `on_step` of fulltilt.train in Python (docs/python.md)")),
    Key(
        "trainer.v1.trainer_mode",
        only("sync", None, nothing="synchronous, as here", refused="asynchronous training is not built. Use sync"),
    ),
    Key("trainer.v1.*", nothing("for asynchronous training, which is not built")),
    Key(
        f"{PROFILED}.profiler.* {PROFILED}.profile.* actor_rollout_ref.profiler.* global_profiler.* profiler.* trainer.profile_steps "
        "trainer.npu_profile.* "
        "trainer.controller_nsight_options.* trainer.worker_nsight_options.* trainer.profile_continuous_steps",
        nothing("profilers of Ray's workers are not started; timing_s/* metrics have the seconds of each phase"),
    ),
    Key("ray_kwargs.* ray_init.*", nothing(NOT_SHARED)),
    Key("transfer_queue.* transfer_queue", nothing("samples stay on the workers that made them")),
    Key("hydra.*", nothing("Hydra's own settings")),
    Key("skip.*", nothing("every step samples")),
    Key("distillation.enabled distillation.enable", off("distillation is not built")),
    Key("distillation.*", nothing("distillation is off, as here")),
    Key("*._target_", nothing("the name of a class of verl's")),
)


LAUNCHER: tuple[Key, ...] = (
    Key("torchrun.{nproc_per_node,nproc-per-node}", rules.processes),
    Key("torchrun.nnodes", rules.nodes),
    Key("torchrun.*", nothing("workers find one another by themselves")),
    Key("launcher.*", nothing("of the program that would start verl")),
)


# Keys that verl's own files refer to but do not have: reward_model.forward_max_token_len_per_gpu of 0.5 to 0.7. Older files name the
# critic's.
DANGLING = {"reward_model.ppo_max_token_len_per_gpu": "${oc.select:critic.forward_max_token_len_per_gpu,null}"}


PPO = Table(
    "verl",
    (
        *DATA,
        *ALGORITHM,
        *OPTIMIZER,
        *BATCHES,
        *TRAINING,
        *_megatron_sizes(),
        *_megatron(),
        *_megatron_model(),
        *_other_engines(),
        *MODELS,
        *GENERATION,
        *REWARDS,
        *TRAINER,
        *LAUNCHER,
    ),
)
