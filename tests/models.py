"""The list of small random models that drives parity, engine and resume tests. A new family is a new line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)
from transformers.masking_utils import eager_mask

VOCABULARY = 160  # larger than the tokenizer's, as padded embeddings are
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": None, "initializer_range": 0.15,
}  # fmt: skip

# Windows are shorter than the tests' sequences, caps lie within the scores and factors away from 1, so that a forgotten one shows.
GEMMA = {**SMALL, "head_dim": 8, "query_pre_attn_scalar": 3, "sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SMALL),
    "llama-tied": lambda: LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SMALL),
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=16),
    "mistral": lambda: MistralConfig(**SMALL, sliding_window=12),
    "phi3": lambda: Phi3Config(**SMALL, sliding_window=12),
    "olmo2": lambda: Olmo2Config(**SMALL),
    "smollm3": lambda: SmolLM3Config(**SMALL, no_rope_layers=[1, 0], use_sliding_window=True, sliding_window=12),
    "gemma2": lambda: Gemma2Config(**GEMMA, attn_logit_softcapping=0.8, final_logit_softcapping=1.5),
    "gemma3": lambda: Gemma3TextConfig(**GEMMA),
    "granite": lambda: GraniteConfig(
        **SMALL, embedding_multiplier=3.0, logits_scaling=0.5, residual_multiplier=0.6, attention_multiplier=0.7
    ),
    "cohere": lambda: CohereConfig(**SMALL, logit_scale=1.5),
    "qwen3-moe": lambda: Qwen3MoeConfig(**SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
    "mixtral": lambda: MixtralConfig(**SMALL, num_local_experts=4, sliding_window=12),
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


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model as transformers alone runs it: its own masks, its own attention in plain torch, its own loop over experts."""
    attention = "eager" if dtype == torch.float32 else "plain"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention, experts_implementation="eager").eval()


def plain_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor,
    scaling: float, softcap: float | None = None, **_: object,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """What transformers calls eager, except that its softmax is always in float32."""
    keys, values = (states.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for states in (key, value))
    scores = query @ keys.transpose(2, 3) * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    return ((scores + attention_mask).softmax(-1) @ values).transpose(1, 2).contiguous(), None


AttentionInterface.register("plain", plain_attention)
AttentionMaskInterface.register("plain", eager_mask)
