"""verl's commands as runs of ours: each key with its answer, Hydra's and the shell's spellings, and whole commands that run."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import models
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import runs
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification

from fulltilt.algo.build import build
from fulltilt.compat import command, hydra, shell
from fulltilt.compat.outcome import KINDS
from fulltilt.compat.surroundings import Surroundings
from fulltilt.compat.translate import Table, Translation, translate
from fulltilt.compat.verl import PPO
from fulltilt.compat.verl_sft import SFT
from fulltilt.config import RULES
from fulltilt.hardware import Cluster, accelerator
from fulltilt.knobs import LEDGER
from fulltilt.plan import legal
from fulltilt.records import UserError
from fulltilt.schema import Config
from fulltilt.shape import SHAPES
from fulltilt.tune.own import own_plan
from fulltilt.tune.shapes import named_shape

BASE = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=org/model"]
GRPO = [
    *BASE,
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=4",
    "trainer.n_gpus_per_node=8",
    "trainer.total_training_steps=10",
]
PPO_RUN = [*BASE, "trainer.n_gpus_per_node=8", "trainer.total_training_steps=10"]
UNSEEN = Surroundings(files=False)
ARR, ACTOR, ROLLOUT, REF = "actor_rollout_ref", "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"


def translated(*arguments: str, seen: Surroundings = UNSEEN, **options: Any) -> Translation:
    return command.from_verl(arguments, seen, environment={"HOME": "/home/me"}, **options)


def answer(translation: Translation, key: str) -> command.Answer:
    return next(each for each in translation.answers if each.key == key)


def values(translation: Translation) -> dict[str, Any]:
    return {key: value.value for key, value in translation.values.items()}


# -- the keys of verl's scripts, before and after ----------------------------------------------------------------------------------------

KL = [f"{ACTOR}.use_kl_loss=True"]
TOKENS = [f"{ACTOR}.use_dynamic_bsz=True"]
VALIDATED = ["data.val_files=val.parquet", f"{ROLLOUT}.val_kwargs.do_sample=True", f"{ROLLOUT}.val_kwargs.temperature=1.0"]
REWARDED = ["reward_model.enable=True", "reward_model.model.path=org/judge"]
PPO_SMALL = ["algorithm.adv_estimator=gae", f"{ACTOR}.ppo_mini_batch_size=512"]
DAPO = ["reward_model.reward_manager=dapo", "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True"]
BUFFER = "reward_model.reward_kwargs.overlong_buffer_cfg"

CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "data.train_files=['a.parquet','b.parquet']": ([], {"data.train": ["a.parquet", "b.parquet"]}),
    "data.val_files=test.parquet": ([], {"data.val": "test.parquet"}),
    "data.train_batch_size=512": ([], {"algorithm.prompts_per_step": 512}),
    "data.max_prompt_length=1024": ([], {"data.max_prompt_tokens": 1024}),
    "data.max_response_length=2048": ([], {"rollout.max_new_tokens": 2048}),
    "data.prompt_key=question": ([], {"data.prompt_key": "question"}),
    "data.shuffle=False": ([], {"data.shuffle": False}),
    "data.seed=7": ([], {"run.seed": 7}),
    "data.gen_batch_size=96": (["algorithm.filter_groups.enable=True"], {"algorithm.prompts_per_round": 96}),
    "data.apply_chat_template_kwargs.enable_thinking=False": ([], {"data.template_args": {"enable_thinking": False}}),
    "algorithm.adv_estimator=rloo": ([], {"algorithm.name": "rloo"}),
    "algorithm.gamma=0.99": (["algorithm.adv_estimator=gae"], {"algorithm.gamma": 0.99}),
    "algorithm.lam=0.95": (["algorithm.adv_estimator=gae"], {"algorithm.gae_lambda": 0.95}),
    "algorithm.norm_adv_by_std_in_grpo=False": ([], {"algorithm.normalize_by_std": False}),
    "algorithm.use_kl_in_reward=True": ([], {"algorithm.reward_kl_coef": 0.001}),
    "algorithm.kl_ctrl.kl_coef=0.05": (["algorithm.use_kl_in_reward=True"], {"algorithm.reward_kl_coef": 0.05}),
    "algorithm.kl_penalty=low_var_kl": (["algorithm.use_kl_in_reward=True"], {"algorithm.reward_kl_estimator": "k3"}),
    "algorithm.filter_groups.enable=True": ([], {"algorithm.dynamic_sampling": True, "algorithm.importance_cap": 2.0}),
    "algorithm.filter_groups.max_num_gen_batches=5": (["algorithm.filter_groups.enable=True"], {"algorithm.max_rounds": 5}),
    f"{ARR}.model.path=/models/qwen": ([], {"model.path": "/models/qwen"}),
    f"{ARR}.model.use_remove_padding=True": ([], {"train.packing": True}),
    f"{ARR}.model.enable_gradient_checkpointing=True": ([], {"train.recompute": "full"}),
    f"{ARR}.model.enable_activation_offload=True": ([], {"train.offload_activations": True}),
    f"{ARR}.model.use_fused_kernels=True": ([], {"train.fused_head": True}),
    f"{ARR}.model.use_liger=True": ([], {"train.fused_layers": True}),
    f"{ARR}.model.trust_remote_code=True": ([], {"model.trust_remote_code": True}),
    f"{ARR}.model.lora_rank=32": ([], {"lora.rank": 32, "lora.alpha": 16.0}),
    f"{ARR}.model.lora_alpha=64": ([f"{ARR}.model.lora_rank=32"], {"lora.alpha": 64.0}),
    f"{ARR}.model.target_modules=[q_proj,v_proj]": ([f"{ARR}.model.lora_rank=32"], {"lora.targets": ["q_proj", "v_proj"]}),
    f"{ACTOR}.optim.lr=5e-7": ([], {"train.lr": 5e-7}),
    f"{ACTOR}.optim.weight_decay=0.1": ([], {"train.weight_decay": 0.1}),
    f"{ACTOR}.optim.lr_warmup_steps=10": ([f"{ACTOR}.ppo_mini_batch_size=512"], {"train.warmup_steps": 20}),  # two updates a step
    f"{ACTOR}.optim.lr_warmup_steps_ratio=0.2": ([f"{ACTOR}.ppo_mini_batch_size=512"], {"train.warmup_steps": 4}),  # of 10 steps
    f"{ACTOR}.optim.warmup_style=cosine": ([], {"train.schedule": "cosine"}),
    f"{ACTOR}.grad_clip=0.5": ([], {"train.clip_grad": 0.5}),
    f"{ACTOR}.ppo_mini_batch_size=128": ([], {"algorithm.minibatches_per_step": 8}),  # of 1024 prompts
    f"{ACTOR}.ppo_epochs=2": ([], {"algorithm.epochs": 2}),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=4": ([], {"actor.dynamic_batch": False, "actor.micro_batch": 4}),
    f"{ACTOR}.ppo_micro_batch_size=64": ([], {"actor.dynamic_batch": False, "actor.micro_batch": 8}),  # 64 over 8 GPUs
    f"{ACTOR}.use_dynamic_bsz=True": ([], {"actor.dynamic_batch": True}),
    f"{ACTOR}.ppo_max_token_len_per_gpu=24000": (TOKENS, {"actor.token_budget": 24000}),
    f"{ACTOR}.clip_ratio_low=0.1": ([], {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.2}),
    f"{ACTOR}.clip_ratio_high=0.28": ([], {"algorithm.clip_high": 0.28}),
    f"{ACTOR}.clip_ratio=0.3": ([], {"algorithm.clip_low": 0.3, "algorithm.clip_high": 0.3}),
    f"{ACTOR}.clip_ratio_c=10.0": ([], {"algorithm.dual_clip": 10.0}),
    f"{ACTOR}.entropy_coeff=0.001": ([], {"algorithm.entropy_coef": 0.001}),
    f"{ACTOR}.loss_agg_mode=seq-mean-token-mean": ([], {"algorithm.aggregation": "seq-mean-token-mean"}),
    f"{ACTOR}.use_kl_loss=True": ([], {"algorithm.kl_coef": 0.001, "algorithm.kl_estimator": "k3"}),
    f"{ACTOR}.kl_loss_coef=0.01": (KL, {"algorithm.kl_coef": 0.01}),
    f"{ACTOR}.kl_loss_type=mse": (KL, {"algorithm.kl_estimator": "k2"}),
    f"{ACTOR}.policy_loss.loss_mode=gspo": ([], {"algorithm.name": "gspo"}),
    f"{ACTOR}.ulysses_sequence_parallel_size=2": ([], {"train.sequence_parallel": 2}),
    f"{ACTOR}.strategy=fsdp2": ([], {"train.shard": "full"}),
    f"{ACTOR}.fsdp_config.fsdp_size=4": ([], {"train.shard": "hybrid", "train.shard_size": 4}),
    f"{ACTOR}.fsdp_config.param_offload=True": (KL, {"train.offload_params": True}),
    f"{ACTOR}.fsdp_config.optimizer_offload=True": ([], {"train.offload_optimizer": True}),
    f"{ACTOR}.fsdp_config.forward_prefetch=True": ([f"{ACTOR}.strategy=fsdp2"], {"train.forward_prefetch": True}),
    f"{ACTOR}.entropy_from_logits_with_chunking=True": ([], {"train.entropy_chunk": 2048}),
    f"{ACTOR}.megatron.tensor_model_parallel_size=2": ([], {"train.tensor_parallel": 2}),
    f"+{ACTOR}.megatron.override_transformer_config.apply_rope_fusion=True": ([], {"train.fused_layers": True}),
    f"{ACTOR}.megatron.override_transformer_config.recompute_granularity=selective": ([], {"train.recompute": "selective"}),
    f"{REF}.log_prob_micro_batch_size_per_gpu=8": (KL, {"ref.dynamic_batch": False, "ref.micro_batch": 8}),
    f"{REF}.log_prob_max_token_len_per_gpu=32768": ([*KL, *TOKENS], {"ref.forward_token_budget": 32768}),
    f"{REF}.fsdp_config.param_offload=True": (KL, {"ref.offload_params": True}),
    f"{ROLLOUT}.name=sglang": ([], {"rollout.engine": "native"}),
    f"{ROLLOUT}.n=8": ([], {"algorithm.samples_per_prompt": 8}),
    f"{ROLLOUT}.temperature=0.7": ([], {"rollout.temperature": 0.7}),
    f"{ROLLOUT}.top_p=0.9": ([], {"rollout.top_p": 0.9}),
    f"{ROLLOUT}.top_k=-1": ([], {"rollout.top_k": 0}),
    f"{ROLLOUT}.tensor_model_parallel_size=2": ([], {"rollout.tensor_parallel": 2}),
    f"{ROLLOUT}.max_num_seqs=256": ([], {"rollout.max_seqs": 256}),
    f"{ROLLOUT}.max_batch_size=384": ([], {"rollout.max_seqs": 384}),
    f"{ACTOR}.veomni.param_offload=True": (KL, {"train.offload_params": True}),
    f"{ACTOR}.torchtitan.tensor_parallel_size=2": ([], {"train.tensor_parallel": 2}),
    f"{ACTOR}.optim.eps=1e-6": ([], {"train.eps": 1e-6}),
    f"+{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=True": (
        [f"{ACTOR}.megatron.optimizer_offload=False"],
        {"train.offload_optimizer": True},
    ),
    f"{ROLLOUT}.max_num_batched_tokens=8192": ([], {"rollout.max_batched_tokens": 8192}),
    f"{ROLLOUT}.enable_chunked_prefill=False": ([], {"rollout.chunked_prefill": False}),
    f"{ROLLOUT}.enable_prefix_caching=False": ([], {"rollout.prefix_sharing": False}),
    f"{ROLLOUT}.enforce_eager=True": ([], {"rollout.cuda_graphs": False}),
    f"{ROLLOUT}.free_cache_engine=False": ([], {"rollout.release_memory": False}),
    f"{ROLLOUT}.disable_log_stats=False": ([], {"rollout.log_stats": True}),
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu=40960": (TOKENS, {"actor.forward_token_budget": 40960}),
    f"{ROLLOUT}.val_kwargs.temperature=0.6": (VALIDATED[:2], {"eval.temperature": 0.6}),
    f"{ROLLOUT}.val_kwargs.top_p=0.7": (VALIDATED, {"eval.top_p": 0.7}),
    f"{ROLLOUT}.val_kwargs.n=16": (VALIDATED, {"eval.samples_per_prompt": 16}),
    "critic.optim.lr=2e-5": (["algorithm.adv_estimator=gae"], {"critic.lr": 2e-5}),
    "critic.optim.lr_warmup_steps=5": (PPO_SMALL, {"critic.warmup_steps": 10, "train.warmup_steps": 0}),  # two updates a step
    "critic.optim.lr_warmup_steps_ratio=0.5": (PPO_SMALL, {"critic.warmup_steps": 10}),  # of 10 steps
    "critic.optim.warmup_style=cosine": (PPO_SMALL, {"critic.schedule": "cosine", "train.schedule": "constant"}),
    "critic.optim.weight_decay=0.1": (PPO_SMALL, {"critic.weight_decay": 0.1, "train.weight_decay": 0.01}),
    "critic.grad_clip=0.5": (PPO_SMALL, {"critic.clip_grad": 0.5, "train.clip_grad": 1.0}),
    "critic.model.use_remove_padding=True": (PPO_SMALL, {"critic.packing": True}),
    "critic.model.enable_gradient_checkpointing=True": (PPO_SMALL, {"critic.recompute": "full"}),
    "critic.fsdp.param_offload=True": (PPO_SMALL, {"critic.offload_params": True}),
    "critic.model.path=org/critic": (["algorithm.adv_estimator=gae"], {"critic.path": "org/critic"}),
    "critic.ppo_micro_batch_size_per_gpu=2": (["algorithm.adv_estimator=gae"], {"critic.dynamic_batch": False, "critic.micro_batch": 2}),
    "critic.ppo_micro_batch_size=16": (  # 16 over 8 GPUs / 4 of a sequence, whatever the actor's sequences are divided into
        ["algorithm.adv_estimator=gae", "critic.ulysses_sequence_parallel_size=4"],
        {"critic.micro_batch": 8},
    ),
    "critic.cliprange_value=0.2": (["algorithm.adv_estimator=gae"], {"algorithm.value_clip": 0.2}),
    "trainer.critic_warmup=3": (["algorithm.adv_estimator=gae"], {"algorithm.critic_warmup": 3}),
    "reward_model.enable=True": (REWARDED[1:], {"reward.function": "reward_model", "reward_model.path": "org/judge"}),
    "reward_model.micro_batch_size_per_gpu=8": (REWARDED, {"reward_model.dynamic_batch": False, "reward_model.micro_batch": 8}),
    "custom_reward_function.path=mine.py": ([], {"reward.function": "mine.py:compute_score"}),
    "custom_reward_function.name=score": (["custom_reward_function.path=mine.py"], {"reward.function": "mine.py:score"}),
    f"+{BUFFER}.len=128": (DAPO, {"algorithm.overlong_buffer": 128}),
    f"+{BUFFER}.penalty_factor=0.5": ([*DAPO, f"+{BUFFER}.len=128"], {"algorithm.overlong_penalty": 0.5}),
    "trainer.n_gpus_per_node=4": ([], {"cluster.workers": 4}),
    "trainer.nnodes=2": ([], {"cluster.nodes": 2, "cluster.address": "auto"}),
    "trainer.total_epochs=15": (["~trainer.total_training_steps"], {"run.epochs": 15}),
    "trainer.total_training_steps=100": ([], {"run.steps": 100}),
    "trainer.save_freq=20": ([], {"run.save_every": 20}),
    "trainer.test_freq=5": (VALIDATED, {"run.eval_every": 5}),
    "trainer.val_before_train=False": (VALIDATED, {"run.eval_before": False}),
    "trainer.logger=['console','wandb','swanlab']": ([], {"log.to": ["wandb"], "log.project": "verl_examples"}),
    "trainer.project_name=mine": (["trainer.logger=[wandb]"], {"log.project": "mine"}),
    "trainer.experiment_name=first": ([], {"run.dir": "checkpoints/verl_examples/first"}),
    "trainer.default_local_dir=runs/mine": ([], {"run.dir": "runs/mine"}),
    "trainer.max_actor_ckpt_to_keep=3": ([], {"run.keep": 3}),
    "trainer.max_actor_ckpt_to_keep=0": ([], {"run.keep": 10_000}),
    "trainer.resume_mode=disable": ([], {"run.resume": "never"}),
    "trainer.balance_batch=True": ([], {"train.balance": True}),
    "trainer.device=cpu": ([], {"run.device": "cpu"}),
}


@pytest.mark.parametrize("assignment", CASES)
def test_a_key_of_verls_scripts_becomes_one_of_ours(assignment: str) -> None:
    beside, expected = CASES[assignment]
    found = translated(*GRPO, *beside, assignment)
    got = values(found)
    assert {key: got.get(key) for key in expected} == expected
    assert found.mistakes == ()
    key = assignment.lstrip("+").partition("=")[0]
    assert answer(found, key).kind == "honoured", answer(found, key).why


def test_what_is_not_given_is_verls_default_not_ours() -> None:
    got = values(translated(*PPO_RUN))
    ours = {
        "algorithm.name": "ppo", "algorithm.samples_per_prompt": 1, "algorithm.prompts_per_step": 1024, "algorithm.minibatches_per_step": 4,
        "train.weight_decay": 0.01, "algorithm.importance_cap": 0.0, "data.max_prompt_tokens": 512, "critic.lr": 1e-5, "run.keep": 10_000,
    }  # fmt: skip
    assert {key: got[key] for key in ours} == ours
    assert not [key for key in got if key.startswith(("rollout.max_seqs", "actor.", "train.shard", "cluster.nodes"))]  # left to auto
    assert values(translated(*BASE))["run.epochs"] == 30


REFUSED = {
    f"{ROLLOUT}.multi_turn.enable=True": "multi-turn rollouts and tools are not built",
    f"{ROLLOUT}.multi_turn.tool_config_path=tools.yaml": "multi-turn rollouts and tools are not built",
    f"{ACTOR}.megatron.pipeline_model_parallel_size=2": "pipeline parallelism is not built",
    f"{ACTOR}.optim.lr_scheduler_type=wsd": "the schedule wsd is not built",
    "data.custom_cls.path=mine.py": "a data set class of your own",
    "algorithm.adv_estimator=mystery": "verl's estimator mystery is not built",
    f"{ACTOR}.kl_loss_type=full": "has no equivalent here",
    "trainer.device=npu": "there is no device npu",
    "data.train_batch_size=many": "algorithm.prompts_per_step must be a whole number",
    f"{ACTOR}.clip_ratio_c=0.5": "must exceed 1",
    f"{ROLLOUT}.n=1": "verl then takes the reward itself as the advantage",
    f"{ACTOR}.veomni.pipeline_parallel_size=2": "is not built",
    f"{ROLLOUT}.nn=3": "the nearest is actor_rollout_ref.rollout.n",
    "no_such_thing.at_all=3": "unknown key of verl",
    "actor@actor_rollout_ref.actor=megatron_actor": "give its keys, such as actor_rollout_ref.actor.",
    f"{ACTOR}.optim.lr=": "an empty text is not a number",
    f"{ROLLOUT}.quantization=fp8": "not quantised",
    "trainer.val_only=True": "fulltilt eval",
}


@pytest.mark.parametrize("assignment", REFUSED)
def test_what_cannot_be_honoured_is_refused_with_the_reason(assignment: str) -> None:
    found = translated(*GRPO, assignment)
    refused = answer(found, assignment.partition("=")[0])
    assert refused.kind == "refused" and REFUSED[assignment] in refused.why
    assert any(assignment.partition("=")[0] in problem for problem in found.problems)


NOTHING = {
    "data.truncation=left": "verl cuts the prompt (left)",
    "algorithm.rollout_correction=null": "none of its keys is given",
    f"{ROLLOUT}.multi_turn=null": "none of its keys is given",
    "data.gen_batch_size=2048": "a step has data.train_batch_size prompts here",
    f"{ACTOR}.kl_loss_coef=0.01": "use_kl_loss is False",
    f"{ACTOR}.ppo_max_token_len_per_gpu=9000": "only with actor_rollout_ref.actor.use_dynamic_bsz=True",
    f"{REF}.fsdp_config.param_offload=True": "has no effect while",
    f"{ACTOR}.profiler.enable=True": "profilers of Ray's workers",
    f"{ROLLOUT}.engine_kwargs.vllm.swap_space=32": "an argument of an engine",
    "critic.optim.lr=1e-5": "has no effect while algorithm.name",
    f"{ACTOR}.fsdp_config.param_offload=True": "there is no phase in which the actor's parameters could be away",
    f"{ACTOR}.entropy_checkpointing=False": "the loss has no entropy bonus",
    f"{ROLLOUT}.val_kwargs.n=4": "data.val is not set",
    "ray_kwargs.ray_init.num_cpus=8": "cluster.stall_s",
    f"{ACTOR}.veomni.ckpt_manager=dcp": "one trainer here",
    f"{REF}.optim.lr=1e-6": "does not learn",
    f"{ACTOR}.optim.override_optimizer_config.optimizer_offload_fraction=0.5": "optimizer_cpu_offload is off",
    f"{ACTOR}._target_=verl.workers.config.FSDPActorConfig": "the name of a class",
}


@pytest.mark.parametrize("assignment", NOTHING)
def test_what_means_nothing_here_says_why(assignment: str) -> None:
    found = answer(translated(*GRPO, assignment), assignment.partition("=")[0])
    assert found.kind == "means nothing" and NOTHING[assignment] in found.why


def test_a_share_of_the_gpu_becomes_bytes_with_its_arithmetic(tmp_path: Path) -> None:
    shape = {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    (tmp_path / "config.json").write_text(
        json.dumps({**shape, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True})
    )
    arguments = [*GRPO, f"{ARR}.model.path={tmp_path}", f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.gpu_memory_utilization=0.5"]
    found = answer(translated(*arguments, seen=Surroundings(gpu_bytes=80 * 2**30)), f"{ROLLOUT}.gpu_memory_utilization")
    assert found.sets == {"rollout.kv_bytes": 40 * 2**30 - 494_032_768 * 2}  # 40 GiB less the weights of 0.5B in bfloat16
    assert "0.5 x 80.0 GiB - 942.3 MiB of weights = 39.1 GiB" in found.why
    by_name = [*GRPO, f"{ARR}.model.path=org/half-a-billion", *arguments[-2:]]
    hub = Surroundings(files=False, gpu_bytes=80 * 2**30, sizes_of=lambda name: SHAPES["0.5B"] if "half" in name else None)
    assert answer(translated(*by_name, seen=hub), f"{ROLLOUT}.gpu_memory_utilization").sets == found.sets
    unseen = answer(translated(*arguments), f"{ROLLOUT}.gpu_memory_utilization")
    assert unseen.sets == {"rollout.kv_bytes": "auto"} and "no GPU is seen here" in unseen.why


def test_what_verl_does_with_a_misleading_key_is_told() -> None:
    found = translated(
        *GRPO, f"{ACTOR}.clip_ratio=0.3", f"{ACTOR}.megatron.grad_offload=True", f"{ACTOR}.fsdp_config.forward_prefetch=True"
    )
    assert "verl ignores clip_ratio" in answer(found, f"{ACTOR}.clip_ratio").why
    assert "verl reads it nowhere" in answer(found, f"{ACTOR}.megatron.grad_offload").why
    assert "verl drops it under FSDP2" in answer(found, f"{ACTOR}.fsdp_config.forward_prefetch").why


@pytest.mark.parametrize(
    ("key", "given", "told"),
    [
        (f"{ACTOR}.ppo_mini_batch_size", ["data.train_batch_size=1000", f"{ACTOR}.ppo_mini_batch_size=300"],
         "1000 prompts / 300 prompts = 4 mini-batches, as even as can be; in verl the last has 100, or it refuses the sizes"),
        (f"{ACTOR}.ppo_mini_batch_size", ["data.train_batch_size=96", f"{ACTOR}.ppo_mini_batch_size=96"],
         "96 prompts / 96 prompts = 1 mini-batch"),
        (f"{ACTOR}.ppo_micro_batch_size",
         [f"{ACTOR}.ppo_micro_batch_size=64", "trainer.nnodes=4", f"{ACTOR}.ulysses_sequence_parallel_size=2"],
         "64 / 32 GPUs / 2 of a sequence = 4 per GPU"),
        (f"{ACTOR}.ppo_micro_batch_size", [f"{ACTOR}.ppo_micro_batch_size=4"], "4 / 8 GPUs = 1 per GPU, and at least 1"),
        (f"{ACTOR}.optim.lr_warmup_steps", ["data.train_batch_size=100", f"{ACTOR}.ppo_mini_batch_size=40", f"{ACTOR}.ppo_epochs=2",
         f"{ACTOR}.optim.lr_warmup_steps=5"], "5 steps x 6 updates = 30 optimizer steps"),
        (f"{ACTOR}.optim.override_optimizer_config.optimizer_offload_fraction",
         [f"{ACTOR}.optim.override_optimizer_config.{each}" for each in ("optimizer_cpu_offload=True", "optimizer_offload_fraction=0.75")],
         "Megatron leaves 0.25 of them on the GPU"),
    ],
)  # fmt: skip
def test_where_units_change_the_arithmetic_is_told(key: str, given: list[str], told: str) -> None:
    found = translated(*GRPO, *given)
    assert told in answer(found, key).why and answer(found, key).kind == "honoured" and found.mistakes == ()


def test_a_group_of_one_is_named_also_where_it_is_verls_default() -> None:
    alone = translated(*BASE, "algorithm.adv_estimator=rloo", "trainer.total_training_steps=5")
    assert "actor_rollout_ref.rollout.n (verl's default): a group of one has no baseline" in alone.mistakes[0]
    for estimator in ("gae", "remax", "reinforce_plus_plus"):
        assert translated(*BASE, f"algorithm.adv_estimator={estimator}", "trainer.total_training_steps=5").mistakes == ()


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_a_run_of_7b_with_verls_usual_settings_fits_as_it_is_given(gpus: int) -> None:
    """The KV cache is a share of the GPU that the user has chosen: what else is on the GPU must leave it."""
    usual = [
        f"{ARR}.model.path=Qwen/Qwen2.5-7B-Instruct", "data.max_prompt_length=1024", "data.max_response_length=2048", *KL, f"{ROLLOUT}.n=8",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=16", f"{ROLLOUT}.gpu_memory_utilization=0.6", f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.tensor_model_parallel_size={min(2, gpus)}", f"trainer.n_gpus_per_node={gpus}",
        f"{ARR}.model.enable_gradient_checkpointing=True",
    ]  # fmt: skip
    shape = named_shape("Qwen/Qwen2.5-7B-Instruct")
    seen = Surroundings(files=False, gpu_bytes=accelerator("H100").memory, sizes_of=lambda name: SHAPES["7B"])
    for retune in (False, True):
        config = command.config_of(translated(*GRPO, *usual, seen=seen, retune=retune))
        assert retune or config.rollout.kv_bytes != "auto"
        planned = own_plan(config, shape, Cluster.parse("H100", gpus), None)
        assert not planned.refused


@pytest.mark.parametrize("mode", ["gspo", "sapo", "geo_mean"])
def test_losses_that_verl_aggregates_in_one_way_have_it(mode: str) -> None:
    loss, given_mode = f"{ACTOR}.policy_loss.loss_mode={mode}", f"{ACTOR}.loss_agg_mode=token-mean"
    for more in ([], [given_mode]):
        assert values(translated(*GRPO, loss, *more))["algorithm.aggregation"] == "seq-mean-token-mean"
    told = answer(translated(*GRPO, loss, given_mode), f"{ACTOR}.loss_agg_mode")
    assert told.kind == "means nothing" and "verl does not read it for this loss" in told.why
    refused = answer(translated(*PPO_RUN, loss, "critic.loss_agg_mode=token-mean"), "critic.loss_agg_mode")
    assert refused.kind == "refused" and "seq-mean-token-mean" in refused.why


def test_under_bypass_nothing_of_importance_sampling_is_read() -> None:
    above = "algorithm.rollout_correction"
    bypass = [*GRPO, f"{above}.bypass_mode=True", f"{above}.rollout_is_threshold=5"]
    found = translated(*bypass, f"{above}.rollout_is=sequence")
    assert values(found)["algorithm.importance_level"] == "bypass" and "algorithm.importance_cap" not in found.values
    assert answer(found, f"{above}.bypass_mode").kind == "honoured" and found.mistakes == ()
    for key in ("rollout_is", "rollout_is_threshold"):
        told = answer(found, f"{above}.{key}")
        assert told.kind == "means nothing" and told.why.startswith("under bypass")
    rejecting = translated(*bypass, f"{above}.rollout_rs=seq_max_k2")  # its bound is that of importance sampling, unless it has one
    assert answer(rejecting, f"{above}.rollout_is_threshold").sets["algorithm.rejection_bounds"] == 5.0


def test_importance_sampling_of_verl_0_6_0_is_read() -> None:
    above = "algorithm.rollout_is"
    on = [f"{above}=True", f"{above}_threshold=2.0", f"{above}_veto_threshold=null"]
    assert values(translated(*GRPO, *on))["algorithm.importance_cap"] == 2.0
    masked = values(translated(*GRPO, *on, f"{above}_level=sequence", f"{above}_mode=mask"))
    assert (masked["algorithm.importance_cap"], masked["algorithm.importance_level"]) == ([0.5, 2.0], "sequence")
    for without in (on[:1], on[1:]):
        off = translated(*GRPO, *without)
        assert values(off)["algorithm.importance_cap"] == 0.0 and answer(off, without[0].partition("=")[0]).kind == "means nothing"
    assert "below 1e-4" in answer(translated(*GRPO, *on[:2]), above).why
    for wrong, told in ((f"{above}_veto_threshold=1e-4", "left out for one token"), (f"{above}_level=geometric", "not built")):
        refused = answer(translated(*GRPO, *on[:2], wrong), wrong.partition("=")[0])
        assert refused.kind == "refused" and told in refused.why


def test_roles_have_parallel_sizes_of_their_own_where_they_differ() -> None:
    actor, ref, tensor, experts = f"{ACTOR}.megatron", f"{REF}.megatron", "tensor_model_parallel_size", "expert_model_parallel_size"
    shared = [*GRPO, *KL, f"{actor}.{tensor}=2", f"{actor}.{experts}=2"]
    same = translated(*shared, f"{ref}.{tensor}=2", f"{ref}.{experts}=2")
    assert not [key for key in same.values if key.startswith("ref.")] and answer(same, f"{ref}.{tensor}").kind == "means nothing"
    differing = values(translated(*shared, f"{ref}.{tensor}=2", f"{ref}.{experts}=1"))  # a role with one size of its own has 1 as the other
    assert (differing["ref.tensor_parallel"], differing["ref.expert_parallel"]) == (2, 1)
    others = [f"critic.megatron.{tensor}=4", f"reward_model.megatron.{experts}=8", *REWARDED, f"{ROLLOUT}.expert_parallel_size=2"]
    got = values(translated(*PPO_RUN, *others, f"{ROLLOUT}.{tensor}=2"))
    expected = {"critic.tensor_parallel": 4, "reward_model.expert_parallel": 8, "rollout.expert_parallel": 2}
    assert {key: got.get(key) for key in expected} == expected


def built_aliases(system: str) -> list[str]:
    """The names that built knobs have in a system; in ChatLearn those that name the model, as its files do."""
    names = {alias for knob in LEDGER if knob.built for alias in getattr(knob, system) if not alias.endswith(".*")}
    return sorted(name for name in names if system == "verl" or name.startswith("models."))


def missing(system: str, *tables: Table) -> list[str]:
    """Names of built knobs that no table of a system knows, or that are said not to be built."""
    found = []
    for alias in built_aliases(system):
        table = next((table for table in tables if table.find(alias)), tables[0])
        for value in (2, True):
            (told,) = translate(table, {alias: value}, "test", UNSEEN).answers
            if told.kind == "refused" and ("not built" in told.why or "unknown key" in told.why):
                found.append(f"{told.assignment}: {told.why}")
    return found


@pytest.mark.long
def test_every_knob_that_is_built_is_translated() -> None:
    assert len(built_aliases("verl")) > 60 and missing("verl", PPO, SFT) == []


def test_retuning_leaves_performance_settings_to_auto() -> None:
    kept = [f"{ACTOR}.ppo_mini_batch_size=64", f"{ACTOR}.clip_ratio_low=0.1"]
    dropped = [f"{ACTOR}.ppo_micro_batch_size_per_gpu=4", f"{ROLLOUT}.max_num_seqs=64", f"{ACTOR}.megatron.pipeline_model_parallel_size=4"]
    found = translated(*GRPO, *kept, *dropped, "custom_reward_function.path=mine.py", retune=True)
    assert not found.problems
    assert {answer(found, each.partition("=")[0]).kind for each in dropped} == {"means nothing"}
    assert {answer(found, each.partition("=")[0]).kind for each in kept} == {"honoured"}
    assert values(found)["cluster.workers"] == 8 and "rollout.max_seqs" not in found.values


def test_rewards_are_chosen_by_the_data_source(tmp_path: Path) -> None:
    def sources(*names: str) -> dict[str, Any]:
        rows = [{"data_source": name, "prompt": "1"} for name in names]
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
        found = translated(*GRPO, f"data.train_files={tmp_path / 'rows.parquet'}", seen=Surroundings())
        return {**values(found), "mistakes": found.mistakes}

    assert sources("openai/gsm8k")["reward.function"] == "gsm8k"
    both = sources("aime_2024", "openai/gsm8k")
    assert (both["reward.function"], both["reward.sources"]) == ("dapo", {"openai/gsm8k": "gsm8k"})
    assert "no rule is built for the data source mine" in sources("mine")["mistakes"][0]


def test_the_length_of_a_run_with_dynamic_sampling_is_counted(tmp_path: Path) -> None:
    parquet.write_table(pa.Table.from_pylist([{"data_source": "openai/gsm8k", "prompt": "1"}] * 100), tmp_path / "rows.parquet")
    arguments = [*BASE, "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4", "algorithm.filter_groups.enable=True", "data.train_batch_size=8"]
    arguments += [
        f"data.train_files={tmp_path / 'rows.parquet'}",
        "data.gen_batch_size=16",
        "trainer.total_epochs=3",
        f"{ACTOR}.ppo_mini_batch_size=8",
    ]
    assert values(translated(*arguments, seen=Surroundings()))["run.steps"] == 100 // 16 * 3
    unseen = translated(*arguments, "custom_reward_function.path=mine.py")
    assert answer(unseen, "trainer.total_epochs").pending == ("run.steps",) and unseen.mistakes == ()
    assert "Add trainer.total_training_steps=N" in unseen.undecided["run.steps"] and "TO BE SET: run.steps" in command.run_file(unseen)
    assert not command.overridden(unseen, ["run.steps=5"]).problems


# -- never dropped, never a crash --------------------------------------------------------------------------------------------------------

WORDS = ["fsdp2", "megatron", "token-mean", "grpo", "gae", "kl", "vllm", "cuda", "auto", "left", "a_b.parquet", "sequence", "dapo", "full"]
ANY_VALUE = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 4096), st.floats(-2, 2e4, allow_nan=False), st.sampled_from(WORDS), st.text(max_size=8),
    st.lists(st.sampled_from(WORDS), max_size=3), st.just({}),
)  # fmt: skip


def known_keys(table: Table) -> list[str]:
    """Every key of a table; below a wildcard, a made-up one."""
    return [name.replace("*._target_", "critic._target_").replace(".*", ".anything") for name in table.exact]


def check(table: Table, keys: dict[str, Any], retune: bool) -> None:
    found = translate(table, {**keys}, "fuzz", UNSEEN, retune=retune)
    assert [each.key for each in found.answers] == list(keys)
    assert sum(len(found.of_kind(kind)) for kind in KINDS) == len(keys)
    assert all(each.why for each in found.answers if each.kind != "honoured")
    for each in found.of_kind("honoured"):
        assert (each.sets or each.pending) and each.sets.keys() <= found.values.keys()
    tables = tomllib.loads(command.run_file(found))
    config = Config.model_validate(
        {**tables, "model": {"path": ".", **tables.get("model", {})}, "data": {"train": ".", **tables.get("data", {})}}
    )
    broken = [text for rule in RULES if not rule.files for text in rule.check(config)]
    to_be_set = tuple(f"{key}:" for key in found.undecided)  # by the user, which the run file says
    assert {text for text in broken if not text.startswith(to_be_set)} <= set(found.mistakes)
    json.dumps(command.as_document(found), default=str)
    assert command.shown(found)


@settings(max_examples=30, deadline=None)
@example(keys={"algorithm.filter_groups.enable": 1}, retune=False)  # epochs are no number of steps then
@given(st.dictionaries(st.sampled_from(known_keys(PPO)), ANY_VALUE, max_size=25), st.booleans())
def test_random_keys_of_verl_are_all_answered(keys: dict[str, Any], retune: bool) -> None:
    check(PPO, keys, retune)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from(known_keys(SFT)), ANY_VALUE, max_size=15), st.booleans())
def test_random_keys_of_its_sft_trainer_are_all_answered(keys: dict[str, Any], retune: bool) -> None:
    check(SFT, keys, retune)


SWITCHES = [
    f"{ACTOR}.{each}" for each in (
        "strategy=fsdp2", "strategy=megatron", "fsdp_config.fsdp_size=4", "fsdp_config.param_offload=True", "fsdp_config.grad_offload=True",
        "fsdp_config.optimizer_offload=True", "use_torch_compile=True", "entropy_checkpointing=False", "entropy_checkpointing=True",
        "entropy_coeff=0.01", "megatron.tensor_model_parallel_size=2", "megatron.expert_model_parallel_size=2", "use_kl_loss=True",
        "megatron.override_transformer_config.recompute_granularity=full", "megatron.override_transformer_config.recompute_method=uniform",
        "megatron.override_transformer_config.recompute_num_layers=2",
    )
] + [
    f"{REF}.fsdp_config.param_offload=True", f"{REF}.model.path=org/older", f"{ARR}.model.lora_rank=8",
    f"{ROLLOUT}.tensor_model_parallel_size=2",
    f"{ROLLOUT}.expert_parallel_size=2", f"{ARR}.model.enable_activation_offload=True", "algorithm.use_kl_in_reward=True",
    "critic.fsdp.param_offload=True", "critic.fsdp.optimizer_offload=True", "trainer.device=cpu", "trainer.n_gpus_per_node=1",
    "reward_model.enable=True", "reward_model.model.path=org/judge", "reward_model.model.fsdp_config.param_offload=True",
    "reward_model.enable_resource_pool=True", "reward_model.n_gpus_per_node=2",
]  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["grpo", "gae"]), st.sets(st.sampled_from(SWITCHES), max_size=9))
def test_what_is_honoured_is_not_refused_when_the_run_starts(estimator: str, given_keys: set[str]) -> None:
    """What a run says at its start about keys without effect, the translation has said before."""
    run = [*GRPO, f"algorithm.adv_estimator={estimator}", "custom_reward_function.path=mine.py", *sorted(given_keys)]
    found = translated(*{each.partition("=")[0]: each for each in run}.values())
    config = command.config_of(found)
    algorithm, device = build(config), "cpu" if config.run.device == "cpu" else "cuda"
    said = [*legal.settings_without_effect(config, algorithm, device), *legal.wrong_sharing(config, device)]
    assert said == [] or found.mistakes


# -- Hydra's spellings ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("null", None), ("True", True), ("false", False), ("1e-6", 1e-6), ("0.", 0.0), ("-1", -1), ("10_000", 10000), ("text", "text"),
        ("'a b'", "a b"), ('["a","b"]', ["a", "b"]), ("[a, 1, null]", ["a", 1, None]), ("{a: 1, b: [x]}", {"a": 1, "b": ["x"]}),
        ("[]", []), ("0.5_2.0", "0.5_2.0"), ("/path/with=sign", "/path/with=sign"), ("it's", "it's"), ("[${a},2]", ["${a}", 2]),
    ],
)  # fmt: skip
def test_values_are_read_as_hydra_reads_them(text: str, value: Any) -> None:
    assert hydra.parsed(text) == value


def test_overrides_have_marks_and_the_last_one_counts() -> None:
    found = hydra.overrides(["+a.b=1", "++a.c=2", "a.b=3", "~d.e", "f={x:1,y:{z:2}}"])
    assert {key: value for key, value in found.items() if key != "d.e"} == {"a.c": 2, "a.b": 3, "f.x": 1, "f.y.z": 2}
    assert answer(translated(*GRPO, f"~{ACTOR}.optim.lr"), f"{ACTOR}.optim.lr").kind == "means nothing"
    for wrong in ("a", "a b=1", "=3", "[1"):
        with pytest.raises(UserError):
            hydra.overrides([wrong, "k=[1"])


def test_interpolation_reads_keys_defaults_and_the_environment() -> None:
    given = {
        "a": "${b}",
        "b": 4,
        "c.d": "${.e}",
        "c.e": "x${a}",
        "f": "${oc.env:HOME}/m",
        "g": "${oc.env:GONE,7}",
        "h": "${oc.select:z,null}",
    }
    found = hydra.resolved({**given, "i": "${k}"}, {"k": 512}.get, {"HOME": "/home/me"})
    assert found == {"a": 4, "b": 4, "c.d": "x4", "c.e": "x4", "f": "/home/me/m", "g": 7, "h": None, "i": 512}
    for wrong, told in (
        ("${oc.env:GONE}", "has no GONE"),
        ("${gone}", "has no value"),
        ("${a}", "refers to itself"),
        ("${eval:1}", "resolver"),
    ):
        with pytest.raises(UserError, match=told):
            hydra.resolved({"a": wrong}, {}.get, {})


def test_relative_interpolation_counts_from_where_it_stands() -> None:
    assert hydra.resolved({"a.x": "${b.y}", "b.y": "${.z}", "b.z": 5}, {}.get, {})["a.x"] == 5
    # verl 0.5 to 0.7: a value of the reward model names a key that their files do not have; older ones name the critic's.
    dangling = ["reward_model.forward_max_token_len_per_gpu=${.ppo_max_token_len_per_gpu}", "reward_model.use_dynamic_bsz=True", *REWARDED]
    assert answer(translated(*GRPO, dangling[0]), "reward_model.forward_max_token_len_per_gpu").kind == "means nothing"
    critic = ["critic.ppo_max_token_len_per_gpu=9000", "critic.forward_max_token_len_per_gpu=${.ppo_max_token_len_per_gpu}"]
    assert values(translated(*GRPO, *dangling, *critic))["reward_model.forward_token_budget"] == 9000


def test_a_configuration_of_ones_own_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n  - ppo_megatron_trainer\n  - _self_\nactor_rollout_ref:\n  rollout:\n    n: 6\n  actor:\n    optim:\n      lr: 2e-6\n"
    )
    found = translated(
        f"--config-path={tmp_path}", "--config-name", "mine", *BASE, "algorithm.adv_estimator=grpo", "trainer.total_epochs=1"
    )
    assert (values(found)["algorithm.samples_per_prompt"], values(found)["train.lr"]) == (6, 2e-6)
    with pytest.raises(UserError, match="verl has no such configuration"):
        translated("--config-name=gone", *BASE)


# -- scripts -------------------------------------------------------------------------------------------------------------------------------

SCRIPT = """#!/usr/bin/env bash
set -xeuo pipefail
# It's a comment with a quote
home=${DATA_HOME:-"${HOME}/verl"}
n=${SAMPLES:-4}
length=$((1024 * 2))
files="['$home/a.parquet', '$home/b.parquet']"
if [ "$n" -gt 2 ] && [ -n "$home" ]; then
    mini=8
else
    mini=16
fi
case "${DEVICE:-gpu}" in
    npu) batch=1 ;;
    gpu|cuda)
        batch=32
        ;;
    *) exit 1 ;;
esac
[ "$n" -eq 4 ] && kl=True || kl=False
ARGS=(
    data.train_batch_size=${batch}  # prompts
    +trainer.experiment_name='one two'
)
ARGS+=(actor_rollout_ref.actor.use_kl_loss=$kl)
ray job submit --no-wait --runtime-env="env.yaml" -- \\
    python3 -m verl.trainer.main_ppo --config-name='ppo_trainer.yaml' \\
    data.train_files="$files" data.max_response_length=${length} \\
    actor_rollout_ref.rollout.n=$n actor_rollout_ref.actor.ppo_mini_batch_size=$mini \\
    trainer.logger=['console','wandb'] "${ARGS[@]}" $@ 2>&1 | tee log.txt
"""


def test_a_script_is_followed_to_its_command_and_never_executed(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT)
    found = translated(
        str(path), *BASE[1:], "algorithm.adv_estimator=grpo", "trainer.total_epochs=1", "custom_reward_function.path=mine.py"
    )
    got = values(found)
    expected = {
        "data.train": ["/home/me/verl/a.parquet", "/home/me/verl/b.parquet"], "algorithm.prompts_per_step": 32, "algorithm.kl_coef": 0.001,
        "algorithm.minibatches_per_step": 4, "rollout.max_new_tokens": 2048, "log.name": "one two", "algorithm.samples_per_prompt": 4,
    }  # fmt: skip
    assert {key: got[key] for key in expected} == expected and not found.problems
    assert answer(found, "launcher.runtime-env").kind == "means nothing"
    assert found.notes == ("from the environment: HOME",)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("\nX=$(date)\npython3 -m verl.trainer.main_ppo trainer.experiment_name=$X", "line 2: $(date) would have to be run"),
        ("python3 -m verl.trainer.main_ppo \\\n a=$GONE", "line 2: $GONE is not set"),
        ("\n\nfor i in 1 2; do\n python3 -m verl.trainer.main_ppo a=$i\ndone", "line 3: a `for` loop is not followed"),
        ("for i in 1 2; do\n X=$i\ndone\npython3 -m verl.trainer.main_ppo a=$X", "line 1: a `for` loop is not followed"),
        ("f() {\n f\n}\nf", "the function f calls itself"),
        ("exit 0\npython3 -m verl.trainer.main_ppo a=1", "line 1: the script ends here"),
        ("X=${Y:-$(date)}\npython3 -m verl.trainer.main_ppo trainer.b=$X", "or set Y in the environment. Or give trainer.b=VALUE"),
        ("A=(a=1 trainer.b=$(date))\npython3 -m verl.trainer.main_ppo ${A[@]}", "line 1: $(date) would have to be run"),
        ("if python3 -c 'x'; then\npython3 -m verl.trainer.main_ppo a=1\nfi", "depends on what is not known"),
        ("echo hello", "no command in it starts a trainer"),
        ("python3 -m verl.trainer.main_ppo a=1\npython3 -m verl.trainer.main_ppo a=2", "lines 1 and 2 each start a trainer"),
        ('python3 -m verl.trainer.main_ppo a="1', "is not closed"),
    ],
)  # fmt: skip
def test_what_a_script_hides_is_refused_by_its_line(text: str, told: str) -> None:
    with pytest.raises(UserError) as error:
        shell.read(text, [], {})
    assert told in str(error.value)


NEWER = """LAUNCH=(python3)
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
BACKEND=${BACKEND:-vllm}
if [ "${USE_UV:-1}" != 0 ] && [ "${DEVICE:-gpu}" = gpu ] && { [ "${BACKEND}" = vllm ] || [ "${BACKEND}" = sglang ]; }; then
    uv sync --extra "${BACKEND}" --frozen
    LAUNCH=(uv run --frozen python3)
fi
EXTRA=(
)
PYTHONUNBUFFERED=1 nohup "${LAUNCH[@]}" -m verl.trainer.main_ppo \\
    actor_rollout_ref.rollout.name=$BACKEND \\
    "${EXTRA[@]}" \\
    "$@" > run.log 2>&1 &
"""


def test_a_script_with_arrays_and_conditions_needs_only_what_it_cannot_know() -> None:
    unknown = shell.read(NEWER, ["a=1"], {})  # Ray's trainer does not depend on what starts Python
    assert unknown.arguments == ("actor_rollout_ref.rollout.name=vllm", "a=1") and unknown.launcher == ("nohup",)
    with pytest.raises(UserError, match=r"line 2: .* would have to be run.* and the condition in line 4 needs it"):
        shell.read(NEWER.replace("main_ppo", "sft_trainer"), ["a=1"], {})
    launch = shell.read(NEWER.replace("\n", "\r\n"), ["a=1", "b=x y"], {"DEVICE": "gpu"})
    assert launch.arguments == ("actor_rollout_ref.rollout.name=vllm", "a=1", "b=x y")
    assert launch.launcher == ("nohup", "uv", "run", "--frozen")


ODD = """ulimit -n 65535
trap 'echo failed' ERR
: "${RUN:=first}"
if ! command -v ray >/dev/null; then echo none; fi
[[ $GPUS =~ ^[0-9]+$ ]] && checked=yes
[[ -v GPUS ]] && set=yes
read -r A B <<< "1 2"
mapfile -t FILES < <(ls data)
((n = 4 * 2))
(( GPUS > 4 )) && big=1
while read -r line; do echo "$line"; done < /etc/hosts
CMD=(python3 -m verl.trainer.main_ppo)
if (( GPUS == 8 )); then CMD+=(gpus=$GPUS); else CMD+=(gpus=few); fi
CMD+=(run="$RUN" big=${big:-0} checked=$checked set=${set:-no})
exec "${CMD[@]}" lr=1e-6 `# a comment within` \\
    "$@"
"""


def test_what_a_script_does_beside_its_command_does_not_matter() -> None:
    launch = shell.read(ODD, ["x=1"], {"GPUS": "8"})
    assert launch.arguments == ("gpus=8", "run=first", "big=1", "checked=yes", "set=yes", "lr=1e-6", "x=1")
    assert shell.read(ODD, [], {"GPUS": "4"}).arguments[:3] == ("gpus=few", "run=first", "big=0")
    for name, told in (("A", "line 7: `read` sets"), ("FILES", "line 8: `mapfile` sets"), ("n", r"line 9: \(\( \)\) sets \$n")):
        with pytest.raises(UserError, match=told):
            shell.read(ODD.replace("lr=1e-6", f"needed=${name}"), [], {"GPUS": "8", "A": "from elsewhere"})


def test_values_that_are_not_needed_may_stay_unknown() -> None:
    text = "NOW=$(date)\nD=${DEVICE:-$(which x)}\n[ -f env.sh ] && source env.sh\npython3 -m verl.trainer.main_ppo a=1"
    assert shell.read(text, [], {}).arguments == ("a=1",)
    assert shell.read("python3 -m verl.trainer.main_ppo a=${X:-$(date)}", [], {"X": "5"}).arguments == ("a=5",)
    assert shell.read('python3 -m verl.trainer.main_ppo "a=${X:-it\'s}"', [], {}).arguments == ("a=it's",)
    assert shell.read("CMD='python3 -m verl.trainer.main_ppo a=1'\nCMD+=' b=2'\neval $CMD", [], {}).arguments == ("a=1", "b=2")
    assert shell.read('N=3\ndocker exec x bash -lc "python3 -m verl.trainer.main_ppo a=$N"', [], {}).arguments == ("a=3",)


PARTS = """shift_by=1
NAMES=(zero a=1 b=2 c=3)
long=Qwen2.5-7B key=long
python3 -m verl.trainer.main_ppo "${NAMES[@]:1:2}" d=${long:0:4} e=${long: -2} f=${!key} "${@:2}" g=$((shift_by + 1))
"""


def test_parts_of_arguments_arrays_and_values_are_read() -> None:
    launch = shell.read(PARTS, ["first", "x=1", "y=2 3"], {})
    assert launch.arguments == ("a=1", "b=2", "d=Qwen", "e=7B", "f=Qwen2.5-7B", "x=1", "y=2 3", "g=2") and launch.notes == ()
    alone = "python3 -m verl.trainer.main_ppo a=${GONE:1}"
    with pytest.raises(UserError, match=r"line 1: \$GONE is not set"):
        shell.read(alone, [], {})


def lr_of(text: str, environment: dict[str, str] | None = None) -> str:
    """What a script makes of $LR, or the words with which it is refused."""
    try:
        return shell.read(f"{text}\npython3 -m verl.trainer.main_ppo lr=$LR", [], environment or {}).arguments[0]
    except UserError as error:
        return str(error).removesuffix(". Or give lr=VALUE behind the script")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("LR=1\nunset Y\n[[ -v Y ]] && LR=2", "lr=1"),
        ("LR=1\n[[ -v Y ]] && LR=2", "lr=1"),
        ("LR=1\nY=\n[[ -v Y ]] && LR=2", "lr=2"),
        ("LR=1\nunset Y\nif [[ ! -v Y ]]; then LR=2; fi", "lr=2"),
        ("LR=1\nY=$(date)\n[[ -v Y ]] && LR=2", "line 3: whether $LR is set here depends on what is not known"),
        ("LR=1\nY=$(date)\nif [[ -v Y ]]; then LR=2; fi", "line 2: $(date) would have to be run"),
        ("LR=1\n[ -f a ] && unset Y\nif [[ -v Y ]]; then LR=2; fi", "line 2: whether $Y is set here depends"),
        ("LR=1\nif [[ -v Y || -v Z ]]; then LR=2; fi", "line 2: whether $LR is set here depends"),
        ("LR=1\nif ! ; then LR=2; fi", "line 2: whether $LR is set here depends"),
        ("LR=1\nA=()\n[[ -v A ]] && LR=2", "lr=1"),
    ],
)  # fmt: skip
def test_a_script_asks_whether_a_variable_is_set(text: str, told: str) -> None:
    assert lr_of(text).startswith(told)


@pytest.mark.parametrize(
    "setting",
    [
        "read LR < lr.txt", "IFS=, read -r A LR < lr.txt", "mapfile -t LR < lr.txt", "let LR=5", 'let "LR *= 2"', "let ++LR", "((LR += 1))",
        "printf -v LR %s 5", "unset LR", "getopts l: LR", "! read LR < lr.txt",
    ],
)  # fmt: skip
def test_what_a_script_may_read_or_unset_is_not_known(setting: str) -> None:
    whether = "line 2: whether $LR is set here depends on what is not known"
    assert lr_of(f"LR=1\nif [ -f a ]; then {setting}; fi") == whether
    assert lr_of(f"LR=1\n[ -f a ] && {setting}") == whether
    assert lr_of(f"LR=1\nfor i in 1 2; do {setting}; done").startswith("line 2: a `for` loop is not followed")
    assert lr_of(f"LR=1\nif {setting}; then echo; fi").startswith("line 2: ")
    assert lr_of(f"LR=1\nset_it() {{\n{setting}\n}}\n[ -f a ] && set_it").startswith("line 3: whether $LR is set here depends")
    assert lr_of(f"LR=1\nif [ -f a ]; then echo {setting.split()[0]}; fi") == "lr=1" or setting.startswith("((")


@pytest.mark.parametrize(
    ("test", "told"),
    [
        ("12 =~ ^[[:digit:]]+$", True), ("1a =~ ^[[:digit:]]+$", False), ("a_1 =~ ^[[:alpha:]_][^[:space:]]*$", True),
        ("axb =~ a.b", True), ('axb =~ "a.b"', False), ("axb =~ 'a.b'", False), ('a.b =~ ^"a.b"$', True), ("axb =~ ^a\\.b$", False),
        ("a.b =~ ^a\\.b$", True), ("axb =~ $P", True), ('axb =~ "$P"', False), ("a-b =~ [[:punct:]]", True), ("a] =~ []]$", True),
        ("Ab =~ ^[[:upper:]][[:lower:]]$", True), ("fF0 =~ ^[[:xdigit:]]+$", True), ("a =~ [^]a]", False), ("! axb =~ ^b", True),
        ("a =~ [", None), ("a =~ *a", None), ("a =~ [[:gone:]]", None), ("a =~ ^\\d$", None), ("a =~ a+?", None), ("a =~ a{9,1}", None),
        ("a =~ [\\.]", None), ("a =~ ^$(date)", None),
        ("c =~ a|b", None),
    ],
)  # fmt: skip
def test_a_script_matches_patterns_as_bash_does(test: str, told: bool | None) -> None:
    found = lr_of(f"LR=1\nP=a.b\nif [[ {test} ]]; then LR=2; fi")
    assert found.startswith("line 3: ") if told is None else found == f"lr={1 + told}"
    assert (lr_of(f"LR=1\nP=a.b\n[[ {test} ]] && LR=2") == found) is (told is not None)
    if told is not None and (bash := shutil.which("bash")):
        assert subprocess.run([bash, "-c", f"P=a.b; [[ {test} ]]"], check=False).returncode == 1 - told


def test_a_script_compares_words_around_variables_that_are_not_set() -> None:
    for before in ("", "unset GONE", "unset GONE OTHER"):
        assert lr_of(f'{before}\nLR=1\nif [ "x$GONE$OTHER" = x ]; then LR=2; fi') == "lr=2"
        assert lr_of(f"{before}\nLR=1\nif [[ $GONE == x ]]; then LR=2; fi") == "lr=1"
        assert lr_of(f'{before}\nLR=1\nif [ -z "$1" ]; then LR=2; fi') == "lr=2"


@pytest.mark.parametrize(("before", "learning_rate"), [("X=1", "2"), ("X=", "2"), ("unset X", "1"), ("X=1; unset X", "1"), ("", "1")])
def test_a_script_takes_another_value_where_a_variable_is_set(before: str, learning_rate: str) -> None:
    assert lr_of(f"{before}\nLR=1${{X+0}}\n[[ $LR == 10 ]] && LR=2") == f"lr={learning_rate}"


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("1:-2", "bcd"), (" -9", ""), (" -9:2", ""), (" -3:-1", "de"), ("9:1", ""), ("0:9", "abcdef"), ("2", "cdef"), ("4:-2", ""),
        ("4:-4", None),
    ],
)  # fmt: skip
def test_a_script_takes_a_slice_of_a_value_as_bash_does(part: str, value: str | None) -> None:
    assert lr_of(f"X=abcdef\nLR=${{X:{part}}}") == (f"line 2: ${{X:{part}}} has no value" if value is None else f"lr={value}")
    if value is not None and (bash := shutil.which("bash")):
        assert subprocess.run([bash, "-c", f'X=abcdef; printf %s "${{X:{part}}}"'], capture_output=True, text=True).stdout == value


@pytest.mark.parametrize("name", ["run.sh", "run.bash", "run.slurm", "run.sbatch"])
def test_scripts_have_several_endings(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("#SBATCH --gres=gpu:8\npython3 -m verl.trainer.main_ppo data.train_batch_size=${SIZE:-8} \\\n  $@\n")
    assert values(translated(str(tmp_path / name), *GRPO))["algorithm.prompts_per_step"] == 8


HELPERS = """log() { echo "$*"; }
wait_for() { until ray status; do sleep 1; done; }
while true; do if ray status; then break; fi; done
if command -v nvidia-smi &> /dev/null; then GPUS=$(nvidia-smi -L | wc -l); else GPUS=0; fi
train() {
    local model=$1; shift
    log "start"
    python3 -m verl.trainer.main_ppo model=${model##*/} small=${model,,} length=$((2 ** 10)) gpus=$GPUS "$@" \\
        # a comment ends the command
        +late.key=1
}
[ -d data ] || exit 1
train Org/M "$@" b=${LIST:-x}
exit $?
"""


def test_functions_are_followed_and_a_value_behind_the_script_replaces_one_that_is_not_known() -> None:
    with pytest.raises(UserError, match=r"line 4: whether \$GPUS is set here depends .* Or give gpus=VALUE behind the script"):
        shell.read(HELPERS, [], {})
    launch = shell.read(HELPERS, ["gpus=8"], {})
    assert launch.arguments == ("model=M", "small=org/m", "length=1024", "gpus=8", "b=x")
    assert any("line 4: gpus is not known there" in note for note in launch.notes)
    assert any("line 10: +late.key=1 is not part of the command" in note for note in launch.notes)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="aX=$\"'\\(){}[]|&;<>#\n -m:@1\t`", max_size=60))
def test_any_text_is_a_script_or_a_mistake(text: str) -> None:
    with contextlib.suppress(UserError):
        shell.read(text + "\npython3 -m verl.trainer.main_ppo a=1", [], {})


def test_sft_commands_are_translated_too() -> None:
    launcher = ["torchrun", "--standalone", "--nnodes=1", "--nproc_per_node=4", "-m", "verl.trainer.fsdp_sft_trainer"]
    rest = [
        "data.train_files=a.parquet",
        "model.partial_pretrain=org/m",
        "optim.lr=1e-4",
        "data.micro_batch_size_per_gpu=4",
        "data.max_length=512",
    ]
    found = translated(*launcher, *rest, "optim.lr_warmup_steps=5", "model.lora_rank=8", "data.messages_key=chat")
    got = values(found)
    expected = {
        "algorithm.name": "sft", "cluster.workers": 4, "model.path": "org/m", "train.lr": 1e-4, "actor.micro_batch": 4, "run.epochs": 4,
        "data.max_tokens": 512, "train.warmup_steps": 5, "lora.rank": 8, "train.schedule": "cosine", "data.messages_key": "chat",
    }  # fmt: skip
    assert {key: got[key] for key in expected} == expected and not found.problems
    assert not [key for key in got if key.startswith(("rollout.", "reward.", "critic."))]
    inside = ["data.prompt_key=extra_info", "data.prompt_dict_keys=['question']", "+data.response_dict_keys=['answer']"]
    nested = translated(*launcher, *rest, *inside, "data.response_key=extra_info", "trainer.save_freq=after_each_epoch")
    got = values(nested)
    assert (got["data.prompt_key"], got["data.response_key"], got["data.apply_template"]) == (
        "extra_info.question",
        "extra_info.answer",
        "always",
    )
    assert list(nested.undecided) == ["run.save_every", "train.warmup_steps"] and not nested.of_kind("refused")
    both = translated(*launcher, *rest, "data.max_prompt_length=64", "data.max_response_length=64")  # as in an example of verl's
    assert "for prompt and response together" in answer(both, "data.max_prompt_length").why
    with pytest.raises(UserError, match="has its own trainer"):
        translated("python3", "-m", "verl.trainer.main_generation", "a=1")


# -- the command line ----------------------------------------------------------------------------------------------------------------------

MEGATRON = [
    "python3", "-m", "verl.trainer.main_ppo", "--config-path=config", "--config-name=ppo_megatron_trainer.yaml", *GRPO,
    *(f"{ACTOR}.megatron.{each}" for each in (
        "tensor_model_parallel_size=2", "pipeline_model_parallel_size=1", "virtual_pipeline_model_parallel_size=null",
        "context_parallel_size=1", "expert_model_parallel_size=1", "expert_tensor_parallel_size=1", "param_offload=False",
        "optimizer_offload=True", "grad_offload=True", "use_mbridge=True", "use_dist_checkpointing=False", "use_distributed_optimizer=True",
        "override_transformer_config.recompute_method=uniform", "override_transformer_config.recompute_granularity=full",
        "override_transformer_config.recompute_num_layers=1", "override_transformer_config.moe_grouped_gemm=True",
        "override_transformer_config.masked_softmax_fusion=True", "override_transformer_config.num_layers_in_first_pipeline_stage=5",
    )),
    f"{REF}.megatron.tensor_model_parallel_size=2", f"{REF}.megatron.param_offload=True", f"{ACTOR}.use_kl_loss=True",
    f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.gpu_memory_utilization=0.6", f"{ROLLOUT}.tensor_model_parallel_size=2",
]  # fmt: skip


def test_a_dry_run_answers_every_key_of_a_megatron_command_and_needs_nothing(tmp_path: Path) -> None:
    ended = runs.command_here(tmp_path, "verl", *MEGATRON, "--dry-run", "--json")
    found = json.loads(ended.out)
    given_keys = [word for word in MEGATRON if "=" in word and not word.startswith("--")]
    assert ended.code == 0 and len(found["keys"]) == len(given_keys) == sum(found["counts"].values())
    assert found["counts"]["refused"] == 0 and found["mistakes"] == [] and list(found["undecided"]) == ["reward.function"]
    assert found["run"]["train"]["recompute"] == "full" and found["run"]["train"]["recompute_method"] == "uniform"
    text = runs.command_here(tmp_path, "verl", *MEGATRON, "--dry-run")
    assert (
        "the native engine takes vLLM's place" in text.out
        and "it depends on the data, which is not here" in text.out
        and "[algorithm]" in text.out
    )


@pytest.mark.long
def test_retuning_shows_both_plans_and_keeping_an_engine_needs_one_that_is_built(tmp_path: Path) -> None:
    run = [*GRPO, f"{ARR}.model.path=Qwen/Qwen2.5-7B-Instruct", f"{ROLLOUT}.tensor_model_parallel_size=4", f"{ROLLOUT}.name=vllm"]
    ended = runs.command_here(tmp_path, "verl", *run, "--dry-run", "--retune", "--hardware", "8xH100", "--json")
    plans = json.loads(ended.out)["plans"]
    seconds = {name: plan["step_seconds"]["step"] for name, plan in plans.items()}
    assert list(seconds) == ["as given", "--retune"] and 0 < seconds["--retune"] <= seconds["as given"]
    assert plans["as given"]["knobs"]["rollout.tensor_parallel"] == 4 != plans["--retune"]["knobs"]["rollout.tensor_parallel"]
    text = runs.command_here(tmp_path, "verl", *run, "--dry-run", "--retune").out
    assert "predicted for 8 x H100" in text and "seconds a step" in text
    refused = runs.command_here(tmp_path, "verl", *run, "--dry-run", "--keep-engine", "--json")
    engine = next(each for each in json.loads(refused.out)["keys"] if each["key"] == f"{ROLLOUT}.name")
    assert engine["answer"] == "refused" and "built are hf, native" in engine["why"]
    kept = translated(*GRPO, f"{ROLLOUT}.name=hf", seen=Surroundings(files=False, keep_engine=True))
    assert values(kept)["rollout.engine"] == "hf"


def test_a_run_file_is_written_and_refused_keys_stop_a_run(tmp_path: Path) -> None:
    undecided = runs.command_here(tmp_path, "verl", *GRPO, "--write", "undecided.toml", "--quiet")
    assert undecided.code == 2 and "--set reward.function=gsm8k" in undecided.error
    checked = runs.command_here(tmp_path, "train", "undecided.toml", "--check")
    assert checked.code == 2 and "reward.function: an empty table is not a reward" in checked.error
    scored = [*GRPO, "--set", "reward.function=math"]
    ended = runs.command_here(tmp_path, "verl", *scored, "--write", "run.toml", "--quiet")
    tables = tomllib.loads((tmp_path / "run.toml").read_text())
    assert ended.code == 0 and tables["algorithm"]["samples_per_prompt"] == 4
    assert tables["reward"]["function"] == "math" and tables["reward"]["sources"]["openai/gsm8k"] == "gsm8k"
    assert "# actor_rollout_ref.rollout.n" in (tmp_path / "run.toml").read_text()
    runs.command_here(tmp_path, "verl", *GRPO, "--set", "run.seed=9", "--write", "set.toml", "--quiet")
    assert tomllib.loads((tmp_path / "set.toml").read_text())["run"]["seed"] == 9
    assert "the nearest is run.seed" in runs.command_here(tmp_path, "verl", *GRPO, "--set", "run.seeds=9", "--dry-run").error
    again = runs.command_here(tmp_path, "verl", *GRPO, "--write", "run.toml")
    assert again.code == 2 and "exists already" in again.error
    refused = runs.command_here(tmp_path, "verl", *scored, f"{ROLLOUT}.multi_turn.enable=True", "--quiet")
    assert refused.code == 2 and "1 key cannot be honoured" in refused.error and "multi-turn" in refused.error


# -- whole commands ------------------------------------------------------------------------------------------------------------------------

SHARED = [
    "data.train_files=train.parquet", "data.val_files=val.parquet", "data.train_batch_size=4", "data.max_prompt_length=32",
    "data.max_response_length=16", f"{ARR}.model.path=model", f"{ACTOR}.optim.lr=1e-4", f"{ACTOR}.ppo_mini_batch_size=2",
    f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.gpu_memory_utilization=0.6", f"{ROLLOUT}.tensor_model_parallel_size=1", "trainer.nnodes=1",
    "trainer.n_gpus_per_node=2", "trainer.device=cpu", "trainer.total_training_steps=2", "trainer.logger=[console]",
    "trainer.save_freq=-1", "trainer.test_freq=2", "trainer.val_before_train=True", "trainer.default_local_dir=run",
]  # fmt: skip
SCORED = ["custom_reward_function.path=reward.py", "custom_reward_function.name=score"]
COMMANDS = {
    "GRPO on FSDP": [
        "python3", "-m", "verl.trainer.main_ppo", *SHARED, *SCORED, "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4", *KL,
        f"{ACTOR}.strategy=fsdp2", f"{ACTOR}.ppo_micro_batch_size_per_gpu=2", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=2",
        f"{REF}.log_prob_micro_batch_size_per_gpu=2", f"{ARR}.model.use_remove_padding=True",
        f"{ARR}.model.enable_gradient_checkpointing=True",
    ],
    "PPO with critic and reward model": [
        "python3", "-m", "verl.trainer.main_ppo", *SHARED, "algorithm.adv_estimator=gae", "critic.model.path=model",
        "critic.optim.lr=1e-4", "critic.ppo_micro_batch_size_per_gpu=2", "critic.model.enable_gradient_checkpointing=False",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=2", "reward_model.enable=True", "reward_model.model.path=judge",
        "reward_model.micro_batch_size_per_gpu=2", "algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.01",
    ],
    "DAPO": [
        "ray", "job", "submit", "--no-wait", "--", "python3", "-m", "recipe.dapo.main_dapo", *SHARED, *SCORED,
        "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4", "data.gen_batch_size=8", "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=acc", "algorithm.filter_groups.max_num_gen_batches=3", f"{ACTOR}.clip_ratio_low=0.2",
        f"{ACTOR}.clip_ratio_high=0.28", f"{ACTOR}.clip_ratio_c=10.0", "reward_model.overlong_buffer.enable=True",
        "reward_model.overlong_buffer.len=4", "reward_model.overlong_buffer.penalty_factor=1.0", f"{ACTOR}.use_dynamic_bsz=True",
        f"{ACTOR}.ppo_max_token_len_per_gpu=256", f"{ACTOR}.optim.lr_warmup_steps=1",
    ],
}  # fmt: skip


def prepare(folder: Path) -> None:
    """A tiny model, a reward model, a reward function and data in verl's layout."""
    models.save("qwen2", folder / "model")
    torch.manual_seed(1)
    judge = models.FAMILIES["qwen2"]()
    judge.num_labels = 1
    AutoModelForSequenceClassification.from_config(judge).save_pretrained(folder / "judge")
    models.tokenizer().save_pretrained(folder / "judge")
    (folder / "reward.py").write_text(runs.REWARDS)
    rows = [
        {
            "data_source": "sums", "prompt": [{"role": "user", "content": f"{n}+{3 * n}="}], "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(4 * n)}, "extra_info": {"index": n},
        }
        for n in range(24)
    ]  # fmt: skip
    parquet.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    parquet.write_table(pa.Table.from_pylist(rows[:3]), folder / "val.parquet")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_whole_command_runs_two_steps_on_two_workers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLTILT_SHARE_DEVICES", "1")
    prepare(tmp_path)
    ended = runs.command(tmp_path, "verl", "--quiet", *COMMANDS[name], seconds=800)
    assert ended.code == 0, ended.error
    before, *lines = runs.metrics(tmp_path)
    assert "val/reward/mean" in before  # trainer.val_before_train
    assert len(lines) == 2 and all("actor/grad_norm" in line for line in lines)
    assert ("critic/vf_loss" in lines[-1]) == (name.startswith("PPO"))
