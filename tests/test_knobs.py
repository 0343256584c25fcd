"""The ledger: it agrees with the configuration and with itself, and a knob that is not built is refused under every name it has."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fulltilt import knobs
from fulltilt.config import parse
from fulltilt.records import UserError
from fulltilt.schema import flatten, keys, toml_value

BUILT = {
    "algorithm.prompts_per_step": 32,
    "algorithm.samples_per_prompt": 4,
    "algorithm.epochs": 2,
    "algorithm.minibatches_per_step": 2,
    "rollout.block_tokens": 32,
    "rollout.kv_bytes": 2**20,
    "rollout.memory_fraction": 0.5,
    "rollout.max_seqs": 16,
    "rollout.max_batched_tokens": 512,
    "rollout.chunked_prefill": False,
    "rollout.prefix_sharing": False,
    "rollout.cuda_graphs": False,
    "rollout.release_memory": False,
    "rollout.log_stats": False,
    "rollout.engine": "native",
    "actor.dynamic_batch": False,
    "actor.micro_batch": 2,
    "actor.token_budget": 1024,
    "actor.forward_token_budget": 2048,
    "ref.dynamic_batch": False,
    "ref.micro_batch": 2,
    "ref.forward_token_budget": 2048,
    "algorithm.prompts_per_round": 8,
    "train.fused_layers": True,
    "train.compile": True,
    "train.packing": False,
    "train.recompute": "selective",
    "train.recompute_layers": 2,
    "train.recompute_method": "uniform",
    "train.offload_activations": True,
    "train.offload_params": True,
    "train.offload_optimizer": True,
    "train.offload_grads": True,
    "train.fused_head": False,
    "train.entropy_chunk": 64,
    "train.entropy_recompute": False,
    "train.head_recompute": False,
    "ref.offload_params": True,
    "ref.entropy_chunk": 64,
    "critic.packing": False,
    "critic.recompute": "full",
    "critic.offload_activations": True,
    "critic.offload_params": True,
    "critic.offload_optimizer": True,
    "reward_model.packing": False,
    "reward_model.offload_params": True,
    "critic.dynamic_batch": False,
    "critic.micro_batch": 2,
    "critic.token_budget": 1024,
    "critic.forward_token_budget": 2048,
    "reward_model.dynamic_batch": False,
    "reward_model.micro_batch": 2,
    "reward_model.forward_token_budget": 2048,
    "train.balance": False,
    **{f"{section}.sequence_parallel": 2 for section in ("train", "ref", "critic", "reward_model")},
    **{f"{section}.tensor_parallel": 2 for section in ("train", "rollout", "ref", "critic", "reward_model")},
    **{f"{section}.expert_parallel": 2 for section in ("train", "rollout", "ref", "critic", "reward_model")},
    "train.shard": "full",
    "train.shard_size": 2,
    "train.reshard_after_forward": False,
    "train.forward_prefetch": False,
    "cluster.workers": 2,
    "cluster.nodes": 2,
    "cluster.roles": {"critic": 1},
}
NEEDED_WITH = {
    "cluster.nodes": {"cluster.address": "auto"},
    "train.shard_size": {"train.shard": "hybrid"},
    "train.reshard_after_forward": {"train.shard": "full"},
    "train.forward_prefetch": {"train.shard": "full"},
    "algorithm.prompts_per_round": {"algorithm.dynamic_sampling": True},
    "train.recompute_layers": {"train.recompute": "full"},
    "train.recompute_method": {"train.recompute": "full", "train.recompute_layers": 2},
    "actor.dynamic_batch": {"actor.micro_batch": 2},
    "actor.micro_batch": {"actor.dynamic_batch": False},
    "ref.dynamic_batch": {"ref.micro_batch": 2},
    "ref.micro_batch": {"ref.dynamic_batch": False},
    "critic.dynamic_batch": {"critic.micro_batch": 2},
    "critic.micro_batch": {"critic.dynamic_batch": False},
    "reward_model.dynamic_batch": {"reward_model.micro_batch": 2},
    "reward_model.micro_batch": {"reward_model.dynamic_batch": False},
}


@pytest.fixture
def run(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "config.json").write_text("{}")
    return {"model": {"path": str(tmp_path)}, "data": {"train": str(tmp_path)}, "run": {"steps": 1}}


def tables(run: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    made = {name: dict(table) for name, table in run.items()}
    for key, value in values.items():
        section, _, name = key.partition(".")
        made.setdefault(section, {})[name] = value
    return made


def refusal(run: dict[str, Any], override: str) -> str:
    with pytest.raises(UserError) as error:
        parse(run, [override])
    head, line = str(error.value).splitlines()
    assert head == "configuration: 1 mistake"
    return line.removeprefix("  1. ")


def test_built_knobs_are_those_of_this_version() -> None:
    assert {knob.name for knob in knobs.LEDGER if knob.built} == set(BUILT)


@pytest.mark.parametrize("name", BUILT)
def test_a_built_knob_is_a_key_that_takes_a_legal_value(run: dict[str, Any], name: str) -> None:
    role = {
        "ref": {"algorithm.kl_coef": 0.1},
        "critic": {"algorithm.name": "ppo"},
        "reward_model": {"reward.function": "reward_model", "reward_model.path": run["model"]["path"]},
    }
    config = parse(tables(run, {name: BUILT[name], **NEEDED_WITH.get(name, {}), **role.get(name.partition(".")[0], {})}))
    assert flatten(config)[name] == BUILT[name]


def test_unbuilt_knobs_are_no_keys() -> None:
    assert not {knob.name for knob in knobs.LEDGER if not knob.built} & set(keys())


@pytest.mark.parametrize("knob", [knob for knob in knobs.LEDGER if not knob.built], ids=lambda knob: knob.name)
def test_an_unbuilt_knob_is_refused_under_every_name(run: dict[str, Any], knob: knobs.Knob) -> None:
    if knob.legal:
        assert refusal(run, f"{knob.name}=1") == f"{knob.name}: known knob, not built in this version: remove it"
    else:
        assert refusal(run, f"{knob.name}=1").startswith(f"{knob.name}: not a setting: ")
    for system, aliases in (("verl's", knob.verl), ("ChatLearn's", knob.chatlearn)):
        for alias in aliases:
            if alias not in knobs.SHARED:
                key = alias.replace(".*", ".any")
                assert (
                    refusal(run, f"{key}=1") == f"{key}: {system} name for {knob.name}, a known knob, not built in this version: remove it"
                )


@pytest.mark.parametrize("knob", [knob for knob in knobs.LEDGER if knob.built], ids=lambda knob: knob.name)
def test_an_alias_of_a_built_knob_says_what_to_write(run: dict[str, Any], knob: knobs.Knob) -> None:
    for system, aliases in (("verl's", knob.verl), ("ChatLearn's", knob.chatlearn)):
        for alias in set(aliases) - knobs.SHARED:
            key = alias.replace(".*", ".any")
            value = "..." if knobs.translate(key, 7) is None else "7"
            told = refusal(run, f"{key}=7")
            assert told.startswith(f"{key}: {system} name for {knob.name}: write {knob.name} = {value}")
            assert knob.note in told


def test_aliases_are_refused_in_a_file_as_well(run: dict[str, Any]) -> None:
    made = {
        **run,
        "actor_rollout_ref": {
            "rollout": {"n": 4, "enforce_eager": True},
            "model": {"use_fused_kernels": True},
            "ref": {"ulysses_sequence_parallel_size": 2},
        },
    }
    with pytest.raises(UserError) as error:
        parse(made)
    assert "actor_rollout_ref.rollout.n: verl's name for algorithm.samples_per_prompt: write algorithm.samples_per_prompt = 4" in str(
        error.value
    )
    assert "rollout.enforce_eager: verl's name for rollout.cuda_graphs: write rollout.cuda_graphs = false (enforce_eager has" in str(
        error.value
    )
    assert "model.use_fused_kernels: verl's name for train.fused_head: write train.fused_head = true" in str(error.value)
    assert "ref.ulysses_sequence_parallel_size: verl's name for ref.sequence_parallel: write ref.sequence_parallel = 2" in str(error.value)


def test_a_shared_alias_names_all_its_knobs(run: dict[str, Any]) -> None:
    told = refusal(run, "models.policy_trainer.packing=true")
    assert "ChatLearn's name for actor.dynamic_batch and train.packing: write actor.dynamic_batch = true, train.packing = true" in told
    assert told.count(knobs.find("models.policy_trainer.packing")[0][0].note) == 1
    told = refusal(run, "models.policy_trainer.max_token_in_packing=8192")
    assert "write actor.token_budget = 8192, actor.forward_token_budget = 8192" in told


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("actor_rollout_ref.rollout.enforce_eager=True", "write rollout.cuda_graphs = false"),
        ("actor_rollout_ref.rollout.disable_log_stats=False", "write rollout.log_stats = true"),
        ("actor_rollout_ref.model.enable_gradient_checkpointing=True", 'write train.recompute = "full"'),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384", "write actor.token_budget = 16384"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size=8", "write actor.micro_batch = ..."),
        ("actor_rollout_ref.rollout.gpu_memory_utilization=0.6", "write rollout.memory_fraction = ..."),
        ("runtime_args.sample_per_episode=512", "write algorithm.prompts_per_step = ..."),
    ],
)
def test_the_value_to_write_is_told_where_it_can_be(run: dict[str, Any], given: str, advice: str) -> None:
    assert advice in refusal(run, given)


def test_translated_names_are_those_of_the_ledger() -> None:
    names = {name.removesuffix(".*").rpartition(".")[2] for knob in knobs.LEDGER for name in (*knob.verl, *knob.chatlearn)}
    assert set(knobs.TRANSLATED) <= names


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("rollout.n=4", "verl's name for algorithm.samples_per_prompt: write algorithm.samples_per_prompt = 4"),
        ("rollout.enforce_eager=true", "verl's name for rollout.cuda_graphs: write rollout.cuda_graphs = false"),
        ("actor.ppo_max_token_len_per_gpu=4096", "verl's name for actor.token_budget: write actor.token_budget = 4096"),
        ("train.use_liger_kernel=true", "verl's name for train.fused_layers: write train.fused_layers = true"),
        ("rollout.packing=false", "unknown key; the nearest is train.packing"),  # a name of two knobs is not guessed
        ("reward_model.ulysses_degree=2", "verl's name for train.sequence_parallel: write train.sequence_parallel = 2"),
    ],
)
def test_a_name_put_into_a_section_of_ours_is_known(run: dict[str, Any], given: str, advice: str) -> None:
    assert advice in refusal(run, given)


def test_no_name_stands_for_two_knobs_unless_it_is_meant_to() -> None:
    names = Counter(name for knob in knobs.LEDGER for name in (knob.name, *knob.verl, *knob.chatlearn))
    assert {name for name, count in names.items() if count > 1} == knobs.SHARED


# -- what goes together -----------------------------------------------------------------------------------------------------------------


def test_every_two_features_are_in_the_table_once() -> None:
    pairs = [frozenset((pair.one, pair.other)) for pair in knobs.TOGETHER]
    names = list(knobs.FEATURES)
    expected = {frozenset((one, other)) for one in names for other in names if one != other} - {frozenset(("selective", "full"))}
    assert len(pairs) == len(set(pairs)) and set(pairs) == expected
    assert {key for feature in knobs.FEATURES.values() for key in feature.keys} <= set(keys())


# How each feature is switched on. fused_head is on by default.
SWITCHES: dict[str, dict[str, Any]] = {
    "compile": {"train.compile": True},
    "fused_layers": {"train.fused_layers": True},
    "lora": {"lora.rank": 2},
    "fused_head": {"train.fused_head": True},
    "cuda_graphs": {"rollout.cuda_graphs": True},
    "selective": {"train.recompute": "selective"},
    "full": {"train.recompute": "full"},
    "offload_activations": {"train.offload_activations": True},
    "offload_params": {"train.offload_params": True},
}


@pytest.mark.parametrize("pair", knobs.TOGETHER, ids=lambda pair: f"{pair.one}-{pair.other}")
def test_what_does_not_go_together_is_refused_and_all_else_is_not(run: dict[str, Any], pair: knobs.Pair) -> None:
    both = tables(run, {**SWITCHES[pair.one], **SWITCHES[pair.other]})
    if pair.allowed:
        values = flatten(parse(both))
        assert knobs.FEATURES[pair.one].setting(values) and knobs.FEATURES[pair.other].setting(values)
        return
    with pytest.raises(UserError) as error:
        parse(both)
    (key, value) = next(iter(SWITCHES[pair.one].items()))
    head, line = str(error.value).splitlines()
    assert head == "configuration: 1 mistake"
    assert line.startswith(f"  1. {key}: {key} = {toml_value(value)} does not go with ") and pair.why in line
    for feature in (pair.one, pair.other):
        assert parse(tables(run, SWITCHES[feature]))


def test_what_the_critic_recomputes_counts_too(run: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r'train.compile: train.compile = true does not go with critic.recompute = "selective": '):
        parse(tables(run, {"algorithm.name": "ppo", "train.compile": True, "critic.recompute": "selective"}))


# -- the ledger -------------------------------------------------------------------------------------------------------------------------


def test_entries_are_complete_and_spelt_out() -> None:
    for knob in knobs.LEDGER:
        assert knob.must_change and knob.auto and knob.section in (knobs.ROLLOUT, knobs.BATCHES, knobs.TRAINING)
        assert knob.auto not in ("auto", "None"), f"{knob.name}: its meaning must say what it is when left alone"
        for name in (knob.name, *knob.verl, *knob.chatlearn):
            assert not set(name) & set("{}… `/"), name
            assert "ARR" not in name and "ROLE" not in name


@pytest.mark.parametrize(
    ("key", "name", "source"),
    [
        ("rollout.max_seqs", "rollout.max_seqs", "native"),
        ("actor_rollout_ref.rollout.max_num_seqs", "rollout.max_seqs", "verl"),
        ("models.policy.generation_batch_size", "rollout.max_seqs", "chatlearn"),
        ("models.policy_trainer.generation_batch_size", "actor.micro_batch", "chatlearn"),
        ("reward_model.forward_micro_batch_size_per_gpu", "reward_model.micro_batch", "verl"),
        ("critic.forward_micro_batch_size_per_gpu", "critic.micro_batch", "verl"),
        ("ulysses_degree", "train.sequence_parallel", "verl"),
        ("use_liger_kernel", "train.fused_layers", "verl"),
        ("actor_rollout_ref.actor.megatron.override_transformer_config.apply_rope_fusion", "train.overlap_and_fusion", "verl"),
        ("actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity", "train.recompute", "verl"),
    ],
)
def test_find(key: str, name: str, source: str) -> None:
    assert [(knob.name, system) for knob, system in knobs.find(key)] == [(name, source)]


@pytest.mark.parametrize(
    "key", ["nothing", "rollout", "rollout.temperature", "actor_rollout_ref.actor.megatron.override_transformer_config.*"]
)
def test_find_knows_nothing_else(key: str) -> None:
    assert knobs.find(key) == []
