"""The list of small random models that drives parity, engine and resume tests. A new family is a new line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 160  # larger than the tokenizer's, as padded embeddings are
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.15,
}  # fmt: skip

# Windows are shorter than the tests' sequences, so that a forgotten window shows.
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SMALL),
    "llama-tied": lambda: LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SMALL),
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=16),
    "mistral": lambda: MistralConfig(**SMALL, sliding_window=12),
}

CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-*/=.,:;!?#$()<>[]{}\"'_%&@^~| \n"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, with beginning and end tokens and a chat template."""
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2}
    for character in CHARACTERS:
        vocabulary.setdefault(character, len(vocabulary))
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    result = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>")
    result.chat_template = TEMPLATE
    return result


def save(family: str, folder: Path, seed: int = 0) -> Path:
    """A model of the family with random weights, and the tokenizer, as transformers would find them."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]())
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
