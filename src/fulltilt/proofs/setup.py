"""The small models, the tokenizer and the data of the proofs, and the configurations of the steps.

Enters: a device and an empty folder. Leaves: files as a user would provide them, and the configuration of a run for each step.
Guaranteed: nothing is downloaded; everything comes from fixed seeds; settings that mean the same step have the same key. On a CPU
everything is float64, and gradients are compared to 1e-9. On CUDA updates are bfloat16, as in real runs, and sampling is float32: with
rounding to bfloat16, sampling would sometimes draw another token. A step on several machines has two nodes of a Ray cluster on this one.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2Config, Qwen3MoeConfig
from transformers.utils import logging as transformers_logging

from fulltilt import config as configuration
from fulltilt.cluster.checks import require_ray
from fulltilt.cluster.sizes import free_bytes
from fulltilt.demo import save_tokenizer, write_lines
from fulltilt.proofs.pool import Pool
from fulltilt.records import UserError
from fulltilt.schema import Config, keys, toml_value

StepKind = Literal["ppo", "sft", "rollout"]  # all four roles on given samples; the actor alone on SFT rows; sampling and an update
Settings = Mapping[str, Any]  # dotted key -> value
StepKey = tuple[StepKind, tuple[tuple[str, Any], ...]]  # a step and its settings that are not defaults
DEFAULTS = {key: known.default for key, known in keys().items()}

DIGITS = "0123456789"
FIRST_DIGIT = 3  # the token of "0"
PROMPTS, SAMPLES = 4, 3  # prompts of an update, and samples of each
ROLLOUT_PROMPTS, ROLLOUT_LENGTHS = 8, (6, 44)
BLOCK_TOKENS = 16
ORIGIN = "proof"  # name of a configuration in messages
TWO_NODES = "two nodes"  # placeholder for the address of a Ray cluster with two nodes


class CannotBeShown(Exception):
    """This machine lacks something that a step needs."""


class TableSetting(dict[str, int]):
    """The value of a setting that is a table. It does not change, and is part of a step's key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


def step_key(kind: StepKind, *settings: Settings) -> StepKey:
    """Return the key of a step. Later settings replace earlier ones. Defaults are left out: setting one gives the same step."""
    merged = {key: value for given in settings for key, value in given.items()}
    return kind, tuple(sorted((key, value) for key, value in merged.items() if value != DEFAULTS[key]))


def shape(width: int, inner: int, layers: int, heads: int, vocabulary: int) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=0, pad_token_id=None, num_labels=1, tie_word_embeddings=False,
        eos_token_id=[1, *range(32, vocabulary, 32)],  # enough end tokens for samples to have different lengths
        initializer_range=0.15 if width < 64 else 0.05,
    )  # fmt: skip


def with_experts(dense: Qwen2Config) -> Qwen3MoeConfig:
    """Return a model of the same size, with four experts in each layer."""
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    more = ("bos_token_id", "pad_token_id", "tie_word_embeddings", "eos_token_id", "initializer_range", "num_labels")
    return Qwen3MoeConfig(
        **{name: getattr(dense, name) for name in (*same, *more)}, head_dim=dense.hidden_size // dense.num_attention_heads, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=dense.intermediate_size // 2, decoder_sparse_step=1,
    )  # fmt: skip


# On CUDA the activations that a layer keeps must be large enough to be worth a copy to the host (memory/activations.py).
SHAPES = {"cpu": shape(32, 48, 4, 4, 160), "cuda": shape(256, 512, 4, 4, 2048)}
# A model whose optimizer is larger than the buckets that pass through the device in a step (memory/offload.py).
LARGE = shape(768, 3072, 10, 12, 2048)
# Fewest and most tokens of an update's prompts, and of its responses.
LENGTHS = {"cpu": ((6, 20), (8, 60)), "cuda": ((64, 256), (128, 1024))}


class ProofSetup:
    def __init__(self, device: torch.device, folder: Path) -> None:
        self.device, self.folder, self.shape = device, folder, SHAPES[device.type]
        self.prompt, self.response = LENGTHS[device.type]
        # Created when a configuration names them.
        self.large_model, self.large_scalar_model = str(folder / "large-model"), str(folder / "large-scalar-model")
        self.model_of_experts, self.scalar_model_of_experts = str(folder / "experts"), str(folder / "scalar-experts")
        self.pool = Pool()
        self._cluster = contextlib.ExitStack()
        self._address: str | None = None  # address of the cluster, once it runs
        transformers_logging.disable_progress_bar()
        make_model(self.shape, folder / "model")
        make_model(self.shape, folder / "scalar-model", scalar=True)
        random = np.random.default_rng(0)
        for name, count, lengths in (("ppo", PROMPTS, self.prompt), ("rollout", ROLLOUT_PROMPTS, ROLLOUT_LENGTHS)):
            rows = [{"prompt": digits(random, size), "ground_truth": ""} for size in spread_evenly(lengths, count)]
            write_lines(folder / f"{name}.jsonl", rows)
        pairs = zip(*(spread_evenly(lengths, PROMPTS * SAMPLES) for lengths in (self.prompt, self.response)), strict=True)
        write_lines(folder / "sft.jsonl", [{"prompt": digits(random, one), "response": digits(random, other)} for one, other in pairs])

    @property
    def longest(self) -> int:
        """Tokens of the longest sample of an update."""
        return self.prompt[1] + self.response[1] + 1  # with an end token

    def block_bytes(self) -> int:
        """Bytes of one block of the KV cache in a rollout."""
        shape, itemsize = self.shape, 8 if self.device.type == "cpu" else 4
        head = shape.hidden_size // shape.num_attention_heads
        return BLOCK_TOKENS * shape.num_hidden_layers * 2 * shape.num_key_value_heads * head * itemsize

    def share_of_free(self, count: int) -> float:
        """Return `count` bytes as a share of the memory that is free now."""
        return count / free_bytes(self.device)

    def config(self, step: StepKey) -> Config:
        """Return the configuration of a run with a new folder. Raises UserError if a setting is refused, CannotBeShown if no cluster
        starts."""
        kind, settings = step
        for path in {self.large_model, self.large_scalar_model} & {value for _, value in settings if isinstance(value, str)}:
            if not Path(path).exists():
                make_model(LARGE, Path(path), scalar=path == self.large_scalar_model)
        for path in {self.model_of_experts, self.scalar_model_of_experts} & {value for _, value in settings if isinstance(value, str)}:
            if not Path(path).exists():
                make_model(with_experts(self.shape), Path(path), scalar=path == self.scalar_model_of_experts)
        given = {**self._base(kind), "run.dir": tempfile.mkdtemp(dir=self.folder), **dict(settings)}
        if given.get("cluster.address") == TWO_NODES:
            given["cluster.address"] = self._two_nodes()
        return configuration.parse({}, [f"{key}={toml_value(value)}" for key, value in given.items()], ORIGIN)

    def close(self) -> None:
        """End the processes of workers, and the Ray cluster if a configuration has named it."""
        self.pool.close()
        self._address = None
        self._cluster.close()

    def _two_nodes(self) -> str:
        if self._address is None:
            try:
                require_ray()
                from fulltilt.cluster.ray import cluster_here

                self._address = self._cluster.enter_context(cluster_here(2, cores=1))
            except UserError as error:
                raise CannotBeShown(str(error)) from error
        return self._address

    def _base(self, kind: StepKind) -> Settings:
        """Return the settings of every step of this kind."""
        scalar_model = str(self.folder / "scalar-model")
        dtype = "float64" if self.device.type == "cpu" else "float32" if kind == "rollout" else "bfloat16"
        common: Settings = {
            "model.path": str(self.folder / "model"), "model.dtype": dtype, "data.train": str(self.folder / f"{kind}.jsonl"),
            "algorithm.name": "grpo" if kind == "rollout" else kind,
            "train.lr": 1e-12,  # an update changes the weights by no more than rounding: gradients of the second one are compared too
            "run.steps": 1, "run.device": self.device.type, "run.seed": 1,
        }  # fmt: skip
        judged: Settings = {
            "reward.function": "reward_model", "reward_model.path": scalar_model,
            "algorithm.importance_cap": 0.0,  # it would use rollout log-probs, which are float32 and change with the last bits of a batch
        }  # fmt: skip
        own: dict[StepKind, Settings] = {
            "sft": {"algorithm.prompts_per_step": PROMPTS * SAMPLES, "algorithm.minibatches_per_step": 2},
            "rollout": {
                **judged, "data.shuffle": False, "algorithm.prompts_per_step": ROLLOUT_PROMPTS, "algorithm.samples_per_prompt": 4,
                "rollout.max_new_tokens": 40, "rollout.block_tokens": BLOCK_TOKENS,
            },
            "ppo": {
                **judged, "algorithm.prompts_per_step": PROMPTS, "algorithm.samples_per_prompt": SAMPLES,
                "algorithm.minibatches_per_step": 2, "algorithm.kl_coef": 0.05, "algorithm.entropy_coef": 0.1,
                "rollout.max_new_tokens": self.response[1], "critic.lr": 1e-12,
                "critic.path": scalar_model,  # a new head is all zeros, and would hide the body's gradient
            },
        }  # fmt: skip
        return {**common, **own[kind]}


def make_model(shape: Qwen2Config | Qwen3MoeConfig, folder: Path, *, scalar: bool = False) -> None:
    """Make a language model, or with `scalar` the reward model, from which the critic starts too."""
    torch.manual_seed(1 if scalar else 0)
    (AutoModelForSequenceClassification if scalar else AutoModelForCausalLM).from_config(shape).save_pretrained(folder)
    save_tokenizer(folder, DIGITS, begins=False)


def spread_evenly(lengths: tuple[int, int], count: int) -> list[int]:
    """Return `count` lengths from the smallest to the largest, short and long ones in turn."""
    ordered = np.linspace(lengths[0], lengths[1], count).astype(int).tolist()
    return [ordered[place // 2] if place % 2 == 0 else ordered[-1 - place // 2] for place in range(count)]


def digits(random: np.random.Generator, count: int) -> str:
    return "".join(DIGITS[place] for place in random.integers(0, len(DIGITS), count))
