"""ChatLearn's configurations as runs of ours: its FSDP and Megatron templates translate whole, and one runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
import runs
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from test_compat_verl import ANY_VALUE, built_aliases, check, known_keys, missing

from fulltilt.compat import command
from fulltilt.compat.chatlearn import CHATLEARN
from fulltilt.compat.surroundings import Surroundings
from fulltilt.compat.translate import Translation
from fulltilt.records import UserError

TRAINER, POLICY, REF = "models.policy_trainer", "models.policy", "models.ref_policy"
SHARED: dict[str, Any] = {
    "runtime_args": {
        "exp_name": "mine", "colocation": ["policy", "policy_trainer", "ref_policy"], "output_dir": "run", "data_path": "train.jsonl",
        "eval_data_path": "val.jsonl", "data_checkpoint_path": "${runtime_args.output_dir}/data_checkpoint_path/", "num_episode": 200,
        "sample_per_episode": 512, "train_micro_batch_size": 8, "train_global_batch_size": 256, "save_episode_interval": 200,
        "data_shuffle": True, "data_rerank": True, "max_replay_episode": 2, "eval_episode_interval": 5,
        "enable_eval_before_training": False, "rollout_backend": "vllm",
        "log_args_dict": {"log_dir": "${runtime_args.output_dir}", "enable_wandb": False, "wandb_name": "${runtime_args.exp_name}"},
    },
    "models": {
        "policy_trainer": {
            "free_gpu_memory": {"offload_weights": True, "offload_optimizer_states": True, "free_grad_buffers": True},
            "optimizer": {"lr": "2e-6", "clip_grad": 1}, "trainable": True, "generation_batch_size": 8, "gpu_per_process": 1, "num_gpu": 4,
            "train_micro_batch_size": "${runtime_args.train_micro_batch_size}", "pos_clip_ratio": 0.28, "neg_clip_ratio": 0.2,
        },
        "ref_policy": {
            "free_gpu_memory": {"offload_weights": True}, "generation_batch_size": 8, "gpu_per_process": 1, "trainable": False,
            "num_gpu": "${models.policy_trainer.num_gpu}", "load": "${models.policy_trainer.load}",
            "packing": "${models.policy_trainer.packing}", "max_token_in_packing": "${models.policy_trainer.max_token_in_packing}",
        },
        "policy": {
            "free_gpu_memory": {"offload_weights": True}, "generation_batch_size": 256, "gpu_per_process": 1, "enforce_eager": False,
            "num_gpu": "${models.policy_trainer.num_gpu}", "tensor_model_parallel_size": 1, "trainable": False, "load": "model",
            "num_inference_per_prompt": 32, "seq_length": 2048, "max_seq_len_to_capture": 2348, "temperature": 1.0, "top_p": 1.0,
            "eval_temperature": 0.6, "eval_top_p": 0.95, "eval_top_k": 20, "vllm_prompt_key": "prompt", "enable_thinking": False,
            "enable_stage_resume": False, "gpu_memory_utilization": 0.8, "vllm_input_ids_key": "input_ids",
        },
        "reward": {"num_cpu": 2, "cpu_per_process": 1, "generation_batch_size": 256},
    },
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "fsdp": {
        "use_expandable_segments": False, "fsdp_size": "${models.policy_trainer.num_gpu}", "ulysses_sequence_parallel_size": 1,
        "packing": False, "meta_init": False, "groupgemm": False, "max_token_in_packing": 32768, "load": "model",
        "gradient_checkpointing": True, "entropy_coef": 0.0, "kl_coef": 0.0, "save_hf": True,
    },
    "megatron": {
        "bf16": True, "seq_length": 2048, "tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "${models.policy.load}",
        "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "expert_tensor_parallel_size": None,
        "expert_model_parallel_size": 1, "context_parallel_size": 1, "virtual_pipeline_model_parallel_size": None,
        "decoder_first_pipeline_num_layers": None, "decoder_last_pipeline_num_layers": None, "moe_router_force_load_balancing": False,
        "load": "megatron_model", "sequence_parallel": True, "use_distributed_optimizer": True, "recompute_granularity": None,
        "use_group_sequence_policy": False, "packing": True, "max_token_in_packing": "${models.policy_trainer.seq_length}",
    },
}  # fmt: skip


def template(folder: Path, backend: str, **runtime: Any) -> Path:
    """A configuration with the keys of ChatLearn's template for a backend."""
    document = json.loads(json.dumps(SHARED))
    document["runtime_args"] |= {"train_backend": backend, **runtime}
    document["models"]["policy_trainer"] |= OWN[backend]
    path = folder / f"grpo_{backend}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def translated(path: Path, *overrides: str, **options: Any) -> Translation:
    return command.from_chatlearn(path, overrides, Surroundings(files=False), **options)


def values(translation: Translation) -> dict[str, Any]:
    return {key: value.value for key, value in translation.values.items()}


def test_the_fsdp_template_translates_whole(tmp_path: Path) -> None:
    found = translated(template(tmp_path, "fsdp"))
    expected = {
        "algorithm.name": "grpo", "algorithm.prompts_per_step": 16, "algorithm.samples_per_prompt": 32, "algorithm.minibatches_per_step": 2,
        "algorithm.clip_high": 0.28, "train.lr": 2e-6, "train.betas": [0.9, 0.95], "train.weight_decay": 0.01, "run.steps": 200,
        "train.shard": "full", "train.packing": False, "actor.micro_batch": 8, "train.recompute": "full", "cluster.workers": 4,
        "eval.temperature": 0.6, "data.template_args": {"enable_thinking": False}, "rollout.max_seqs": 256, "run.eval_every": 5,
        "algorithm.importance_cap": 0.0, "reward.function": "math", "run.seed": 1234, "model.path": "model", "reward.workers": 2,
    }  # fmt: skip
    got = values(found)
    assert {key: got.get(key) for key in expected} == expected
    assert not found.problems


def test_the_megatron_template_translates_whole(tmp_path: Path) -> None:
    found = translated(template(tmp_path, "megatron"))
    expected = {
        "train.shard": "optimizer", "train.tensor_parallel": 2, "train.packing": True, "actor.dynamic_batch": True,
        "actor.token_budget": 2048, "model.path": "model",
    }  # fmt: skip
    got = values(found)
    assert {key: got.get(key) for key in expected} == expected
    assert not found.problems
    load = next(each for each in found.answers if each.key == f"{TRAINER}.load")
    assert load.kind == "means nothing" and "Hugging Face folder" in load.why


def test_overrides_come_last_and_units_are_told(tmp_path: Path) -> None:
    path = template(tmp_path, "fsdp")
    found = translated(path, "runtime_args.sample_per_episode=64", f"{POLICY}.num_inference_per_prompt=8", f"{TRAINER}.num_gpu=16")
    told = {each.key: each for each in found.answers}
    assert told["runtime_args.sample_per_episode"].why == "64 samples / 8 per prompt = 8 prompts"
    assert values(found)["cluster.nodes"] == 2 and values(found)["cluster.workers"] == 8
    uneven = translated(path, "runtime_args.sample_per_episode=100")
    assert any("no whole number of prompts" in problem for problem in uneven.problems)
    wrong = translated(path, "runtime_args.num_episodes=3")
    assert any("the nearest is runtime_args.num_episode" in problem for problem in wrong.problems)
    limits = [f"{POLICY}.max_prompt_tokens_length=1024", f"{POLICY}.max_response_tokens_length=512"]
    got = values(translated(path, *limits))
    assert (got["data.max_prompt_tokens"], got["rollout.max_new_tokens"]) == (1024, 512)
    with pytest.raises(UserError, match="no such file"):
        translated(tmp_path / "gone.yaml")


def test_what_an_override_leaves_without_effect_is_left_out(tmp_path: Path) -> None:
    offloads = [f"{TRAINER}.free_gpu_memory.offload_optimizer_states", f"{REF}.free_gpu_memory.offload_weights"]
    found = translated(template(tmp_path, "fsdp"), f"{TRAINER}.kl_coef=0.1")
    assert {each.kind for each in found.answers if each.key in offloads} == {"honoured"}
    on_cpu = command.overridden(found, ["run.device=cpu"])
    assert {each.kind for each in on_cpu.answers if each.key in offloads} == {"means nothing"}
    assert all("on the CPU" in each.why for each in on_cpu.answers if each.key in offloads)
    assert not [key for key in values(on_cpu) if "offload" in key]
    by_hand = command.overridden(found, ["run.device=cpu", "train.offload_optimizer=true"])  # refused when the run starts
    assert values(by_hand)["train.offload_optimizer"] is True


SCRIPT = """#!/bin/bash
set -x
export CHATLEARN=$(pwd)
exp_name=first
python chatlearn/entrypoint.py grpo --config-file {file} \\
    runtime_args.exp_name=${{exp_name}} runtime_args.output_dir=/out/${{exp_name}} \\
    models.policy_trainer.num_gpu=${{num_device:-4}} \\
    runtime_args.sample_per_episode=64 2>&1 | tee log_${{RANK}}.log ; exit ${{PIPESTATUS[0]}}
"""


def test_a_script_is_followed_to_its_configuration(tmp_path: Path) -> None:
    path = template(tmp_path, "fsdp")
    (tmp_path / "train.sh").write_text(SCRIPT.format(file=path))
    got = values(translated(tmp_path / "train.sh", "models.policy.seed=7"))
    expected = {"run.dir": "/out/first", "cluster.workers": 4, "algorithm.prompts_per_step": 2, "run.seed": 7}
    assert {key: got[key] for key in expected} == expected
    for text, told in (
        ("echo", "no command in it starts ChatLearn"),
        ("python chatlearn/entrypoint.py dpo --config-file x.yaml", "ChatLearn's dpo is not built here"),
        ("python chatlearn/entrypoint.py grpo a=1", "has no --config-file"),
        ("python chatlearn/entrypoint.py grpo --config-file x.yaml a.b=$GONE", "line 1: \\$GONE is not set"),
    ):
        (tmp_path / "wrong.sh").write_text(text)
        with pytest.raises(UserError, match=told):
            translated(tmp_path / "wrong.sh")


def test_parallel_sizes_of_engine_and_reference_role_are_translated(tmp_path: Path) -> None:
    sizes = [f"{TRAINER}.kl_coef=0.01", f"{REF}.tensor_model_parallel_size=4", f"{REF}.expert_model_parallel_size=1"]
    engine = [f"{POLICY}.tensor_model_parallel_size=2", f"{POLICY}.expert_model_parallel_size=2"]
    got = values(translated(template(tmp_path, "megatron"), *sizes, *engine))
    expected = {"ref.tensor_parallel": 4, "ref.expert_parallel": 1, "rollout.expert_parallel": 2}
    assert {key: got.get(key) for key in expected} == expected
    assert len(built_aliases("chatlearn")) > 20 and missing("chatlearn", CHATLEARN) == []


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(known_keys(CHATLEARN)), ANY_VALUE, max_size=20), st.booleans())
def test_random_keys_of_chatlearn_are_all_answered(keys: dict[str, Any], retune: bool) -> None:
    check(CHATLEARN, keys, retune)


def test_the_command_line_takes_a_configuration(tmp_path: Path) -> None:
    path = template(tmp_path, "fsdp")
    ended = runs.command_here(tmp_path, "chatlearn", path.name, "runtime_args.num_episode=7", "--dry-run", "--json")
    found = json.loads(ended.out)
    assert ended.code == 0 and found["run"]["run"]["steps"] == 7 and sum(found["counts"].values()) == len(found["keys"])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_configuration_runs_two_steps_on_two_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLTILT_SHARE_DEVICES", "1")
    models.save("qwen2", tmp_path / "model")
    rows = [
        {"prompt": [{"role": "user", "content": f"{n}+1="}], "ground_truth": str(n + 1), "data_source": "openai/gsm8k"} for n in range(16)
    ]
    runs.write_rows(tmp_path / "train.jsonl", rows)
    runs.write_rows(tmp_path / "val.jsonl", rows[:2])
    path = template(tmp_path, "fsdp", num_episode=2, sample_per_episode=8, train_global_batch_size=8, train_micro_batch_size=2)
    small = [f"{TRAINER}.num_gpu=2", f"{POLICY}.num_inference_per_prompt=4", f"{POLICY}.seq_length=24", f"{TRAINER}.kl_coef=0.01"]
    ours = ["--set", "run.device=cpu", "--set", "reward.function=gsm8k", "--set", "eval.max_new_tokens=8"]
    ended = runs.command(tmp_path, "chatlearn", path.name, "--quiet", *ours, *small, seconds=800)
    assert ended.code == 0, ended.error
    assert len(runs.metrics(tmp_path)) == 2
