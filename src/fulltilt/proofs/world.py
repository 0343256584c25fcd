"""The small world in which knobs are proved: models with random weights, a tokenizer, data, and configurations.

Enters: a device and an empty folder. Leaves: files as a user would bring them, and the configuration of a run for a base and settings.
Guaranteed: nothing is downloaded; everything comes from fixed seeds; float64 on a CPU, where gradients are compared to 1e-9; on CUDA
bfloat16 for updates, as real runs have it, and float32 for sampling, where rounding to bfloat16 would now and then draw another token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast, Qwen2Config
from transformers.utils import logging as transformers_logging

from fulltilt import config as configuration
from fulltilt.algo import presets
from fulltilt.cluster.sizes import free_bytes
from fulltilt.config import Config, toml_value
from fulltilt.proofs.case import Base, Case

DIGITS = "0123456789"
PROMPTS, SAMPLES, SAMPLED = 4, 3, 8  # prompts of an update and samples of each; prompts of a rollout
FIRST_DIGIT = 3  # its token
BLOCK_TOKENS = 16
ORIGIN = "proof"  # what mistakes of a configuration are said to be of


@dataclass(frozen=True)
class Shape:
    """Of the models, and of the samples that an update is made from."""

    width: int
    inner: int
    layers: int
    heads: int
    vocabulary: int
    prompt: tuple[int, int]  # tokens, from and to
    response: tuple[int, int]

    def model(self, **more: Any) -> Qwen2Config:
        return Qwen2Config(
            vocab_size=self.vocabulary, hidden_size=self.width, intermediate_size=self.inner, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=0,
            eos_token_id=[1, *range(32, self.vocabulary, 32)],  # so many that samples have different lengths
            pad_token_id=None, initializer_range=0.15 if self.width < 64 else 0.05, tie_word_embeddings=False, **more,
        )  # fmt: skip


# On CUDA what a layer keeps of a micro-batch must be worth a copy to the host (memory/activations.py).
SHAPES = {
    "cpu": Shape(32, 48, 4, 4, 160, (6, 20), (8, 60)),
    "cuda": Shape(256, 512, 4, 4, 2048, (64, 256), (128, 1024)),
}
# Its optimizer is larger than what passes through the device in a step (memory/offload.py).
LARGE = Shape(768, 3072, 10, 12, 2048, (64, 256), (128, 1024))


class World:
    def __init__(self, device: torch.device, folder: Path) -> None:
        self.device, self.folder, self.shape = device, folder, SHAPES[device.type]
        self._runs = 0
        transformers_logging.disable_progress_bar()
        make_language_model(self.shape, folder / "model")
        make_judge(self.shape, folder / "judge")
        random = np.random.default_rng(0)
        for name, prompts, lengths in (("update", PROMPTS, self.shape.prompt), ("sampling", SAMPLED, (6, 44))):
            rows = [{"prompt": digits(random, length), "ground_truth": ""} for length in spread_evenly(lengths, prompts)]
            write_rows(folder / f"{name}.jsonl", rows)
        count = PROMPTS * SAMPLES
        pairs = zip(spread_evenly(self.shape.prompt, count), spread_evenly(self.shape.response, count), strict=True)
        write_rows(folder / "sft.jsonl", [{"prompt": digits(random, one), "response": digits(random, other)} for one, other in pairs])

    @property
    def longest(self) -> int:
        """Tokens of the longest sample of an update."""
        return self.shape.prompt[1] + self.shape.response[1] + 1  # an end token

    @property
    def large_model(self) -> str:
        """Made when a configuration names it, as is the reward model."""
        return str(self.folder / "large-model")

    @property
    def large_judge(self) -> str:
        return str(self.folder / "large-judge")

    def block_bytes(self) -> int:
        """Of one block of the KV cache in a rollout."""
        shape, itemsize = self.shape, 8 if self.device.type == "cpu" else 4
        return BLOCK_TOKENS * shape.layers * 2 * 2 * (shape.width // shape.heads) * itemsize

    def share(self, count: int) -> float:
        """What share of the memory that is free now so many bytes are."""
        return count / free_bytes(self.device)

    def config(self, case: Case) -> Config:
        """The configuration of a run; its folder is new every time. UserError where a setting is refused."""
        self._runs += 1
        for path, make in ((self.large_model, make_language_model), (self.large_judge, make_judge)):
            if path in dict(case.settings).values() and not Path(path).exists():
                make(LARGE, Path(path))
        tables = self._tables(case.base)
        tables["run"] |= {"dir": str(self.folder / "runs" / str(self._runs))}
        overrides = [f"{key}={toml_value(value)}" for key, value in case.settings]
        return configuration.parse(tables, overrides, ORIGIN, extra_checks=[presets.mistakes])

    def _tables(self, base: Base) -> dict[str, dict[str, Any]]:
        folder, on_cpu = self.folder, self.device.type == "cpu"
        dtype = "float64" if on_cpu else "float32" if base == "rollout" else "bfloat16"
        judged = {"reward": {"function": "reward_model"}, "reward_model": {"path": str(folder / "judge")}}
        # One update must not change the weights by more than rounding does: the second is compared too.
        common: dict[str, dict[str, Any]] = {
            "model": {"path": str(folder / "model"), "dtype": dtype},
            "train": {"lr": 1e-12},
            "run": {"steps": 1, "device": self.device.type, "seed": 1},
        }
        if base == "sft":
            return common | {
                "data": {"train": str(folder / "sft.jsonl")},
                "algorithm": {"name": "sft", "prompts_per_step": PROMPTS * SAMPLES, "minibatches_per_step": 2},
            }
        if base == "rollout":
            return common | judged | {
                "data": {"train": str(folder / "sampling.jsonl"), "shuffle": False},
                # Without the correction by rollout log-probs, which are float32 and change with the last bits of a batch.
                "algorithm": {"name": "grpo", "prompts_per_step": SAMPLED, "samples_per_prompt": 4, "importance_cap": 0.0},
                "rollout": {"max_new_tokens": 40, "block_tokens": BLOCK_TOKENS},
            }  # fmt: skip
        return common | judged | {
            "data": {"train": str(folder / "update.jsonl")},
            "algorithm": {
                "name": "ppo", "prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES, "minibatches_per_step": 2, "kl_coef": 0.05,
                "entropy_coef": 0.1, "importance_cap": 0.0,
            },
            "rollout": {"max_new_tokens": self.shape.response[1]},
            "critic": {"path": str(folder / "judge"), "lr": 1e-12},  # a new head is all zeros, and would hide the body's gradient
        }  # fmt: skip


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a digit."""
    tokens = ["<s>", "</s>", "<unk>", *DIGITS]
    inner = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def make_language_model(shape: Shape, folder: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape.model()).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def make_judge(shape: Shape, folder: Path) -> None:
    """A reward model, which the critic starts from too."""
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_config(shape.model(num_labels=1)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def spread_evenly(lengths: tuple[int, int], count: int) -> list[int]:
    """So many lengths from the first to the last, short and long ones in turn."""
    ordered = np.linspace(lengths[0], lengths[1], count).astype(int).tolist()
    return [ordered[place // 2] if place % 2 == 0 else ordered[-1 - place // 2] for place in range(count)]


def digits(random: np.random.Generator, count: int) -> str:
    return "".join(DIGITS[place] for place in random.integers(0, len(DIGITS), count))


def write_rows(path: Path, rows: list[Mapping[str, Any]] | list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
