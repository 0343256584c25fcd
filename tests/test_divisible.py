"""Models whose modules cannot be divided are refused before any worker starts, with the key that asked for it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
from transformers import GPTNeoXConfig, LlamaConfig, OlmoeConfig, PreTrainedConfig, Qwen2Config, Qwen3MoeConfig, Starcoder2Config

from fulltilt.algo.build import build
from fulltilt.cluster.checks import wrong_modules, wrong_settings
from fulltilt.schema import Config

SIZES: dict[str, Any] = {name: value for name, value in models.SMALL.items() if name != "num_key_value_heads"}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen2": lambda: Qwen2Config(**models.SMALL),
    "qwen3-moe": lambda: Qwen3MoeConfig(**models.SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
    "olmoe": lambda: OlmoeConfig(**models.SMALL, num_experts=4, num_experts_per_tok=2),
    "gpt-neox": lambda: GPTNeoXConfig(**SIZES),
    "starcoder2": lambda: Starcoder2Config(**models.SMALL),
}
MODULE = {"olmoe": "q_norm", "gpt-neox": "", "starcoder2": "c_fc"}  # that cannot be divided
REFUSED = [family for family in CONFIGS if family in MODULE]
# Settings that divide a model of the run, the section that has its path, and the setting that leaves it whole.
KEYS: dict[str, tuple[dict[str, dict[str, Any]], str]] = {
    "train.tensor_parallel": ({"train": {"tensor_parallel": 2}}, "model"),
    "rollout.tensor_parallel": ({"rollout": {"tensor_parallel": 2}, "train": {"tensor_parallel": 1}}, "model"),
    "critic.tensor_parallel": ({"critic": {"tensor_parallel": 2}}, "critic"),
    "ref.tensor_parallel": ({"ref": {"tensor_parallel": 2}}, "ref"),
    "reward_model.tensor_parallel": ({"reward_model": {"tensor_parallel": 2}}, "reward_model"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders that have a config.json and nothing else."""
    found = {name: tmp_path_factory.mktemp(name) for name in CONFIGS}
    for name, path in found.items():
        CONFIGS[name]().save_pretrained(path)
    return {name: str(path) for name, path in found.items()}


@pytest.fixture(autouse=True)
def _shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLTILT_SHARE_DEVICES", "1")


def configured(folders: dict[str, str], family: str, section: str, **sections: dict[str, Any]) -> Config:
    """A run with all roles on four workers, of which one role has a model of the family."""
    given: dict[str, dict[str, Any]] = {
        "model": {"path": folders["qwen2"]}, "data": {"train": "t"}, "cluster": {"workers": 4},
        "algorithm": {"name": "ppo", "kl_coef": 0.1}, "reward": {"function": "reward_model"},
        "reward_model": {"path": folders["qwen2"]},
    }  # fmt: skip
    for name, values in (*sections.items(), (section, {"path": folders[family]})):
        given[name] = given.get(name, {}) | values
    return Config.model_validate(given)


def told(config: Config) -> list[str]:
    return [text for text in wrong_settings(config, build(config), "cpu") if "cluster.workers" not in text]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_be_divided_is_refused_with_its_key(folders: dict[str, str], family: str, key: str) -> None:
    sections, section = KEYS[key]
    role = "actor" if section == "model" else section
    (found,) = [text for text in told(configured(folders, family, section, **sections)) if text.startswith(key)] or [""]
    assert re.search(rf"^{key}: 2 workers cannot divide the model of the {role}: .*{MODULE[family]}.*\. Set {key} = 1, or use a ", found)
    assert not any(text.startswith(key) for text in told(configured(folders, "qwen2", section, **sections)))


def test_a_role_that_follows_train_is_refused_with_a_key_of_its_own(folders: dict[str, str]) -> None:
    (found,) = told(configured(folders, "starcoder2", "critic", train={"tensor_parallel": 2}))
    assert found.startswith("train.tensor_parallel: 2 workers cannot divide the model of the critic: ")
    assert found.endswith("Set critic.tensor_parallel = 1, or use a model of another architecture")


def test_experts_are_asked_of_their_own_table(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for sections in ({"train": {"expert_parallel": 2}}, {"train": {"expert_parallel": 2, "tensor_parallel": 2}}):
        assert told(configured(folders, "qwen3-moe", "model", **sections)) == []
    monkeypatch.setattr("fulltilt.parallel.experts.has_interface", lambda module: False)
    config = configured(folders, "qwen3-moe", "model", train={"expert_parallel": 4})
    (found,) = told(config)
    assert re.search(r"^train.expert_parallel: 4 workers .* does not keep its experts in stacks, .* Set train.expert_parallel = 1,", found)


def test_adapters_are_divided_with_their_model(folders: dict[str, str]) -> None:
    adapters = {"rank": 2, "targets": ["lm_head"]}
    config = configured(folders, "qwen2", "model", lora=adapters, train={"tensor_parallel": 2})
    assert any(text.startswith("lora.targets: lm_head is an embedding") for text in told(config))
    usual = configured(folders, "qwen2", "model", lora={"rank": 2, "critic": True}, train={"tensor_parallel": 2})
    assert told(usual) == []


def test_nothing_is_built_where_nothing_is_divided(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def build_nothing(*given: Any) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr("fulltilt.cluster.checks.why_not_divisible", build_nothing)
    assert told(configured(folders, "starcoder2", "model")) == []
    config = configured(folders, "starcoder2", "model", train={"tensor_parallel": 2}, cluster={"workers": 1})
    assert list(wrong_modules(config, build(config), "cpu")) == []


def test_a_size_that_the_shape_refuses_is_told_once(folders: dict[str, str]) -> None:
    found = told(configured(folders, "starcoder2", "model", train={"tensor_parallel": 3}, cluster={"workers": 3}))
    assert len([text for text in found if text.startswith("train.tensor_parallel")]) == 1


def test_a_large_model_is_asked_in_seconds(tmp_path: Path) -> None:
    """70B: eighty layers, and no numbers."""
    large = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
    LlamaConfig(**large, vocab_size=128256).save_pretrained(tmp_path)
    began = time.perf_counter()
    config = configured(
        {"qwen2": str(tmp_path), "large": str(tmp_path)}, "large", "critic", rollout={"tensor_parallel": 8}, cluster={"workers": 8}
    )
    assert list(wrong_modules(config, build(config), "cpu")) == []
    assert time.perf_counter() - began < 60  # a second on an idle machine
