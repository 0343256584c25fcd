"""Facts for tests of the plan: those of models that are not loaded, on hardware that is not there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fulltilt.plan import Facts, RoleFacts
from fulltilt.shape import SHAPES as NAMED
from fulltilt.shape import Shape

SHAPES: dict[str, dict[str, Any]] = NAMED | {
    "135M": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True, "max_position_embeddings": 8192,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": 151936, "tie_word_embeddings": False, "max_position_embeddings": 40960,
    },
    "Gemma-2-2B": {
        "model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256000, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256, "max_position_embeddings": 8192,
    },
    "Gemma-2-9B": {
        "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256000, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256, "max_position_embeddings": 8192,
    },
    "Mixtral-8x7B": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
        "tie_word_embeddings": False, "sliding_window": None, "max_position_embeddings": 32768,
    },
}  # fmt: skip
SMALL = RoleFacts(replace(Shape.named("small"), positions=None), parameter_bytes=2 * 10**6)


def facts(device: str = "cuda", free_bytes: int | None = 10**9, **given: Any) -> Facts:
    """Of a small model on a large device, where nothing is taken for decoding but what is given."""
    known = {"device_bytes": 10**12, "host_bytes": 10**12, "roles": {"actor": SMALL}, "longest": 500, "steps_per_epoch": 1}
    return Facts(device, free_bytes=free_bytes, **{**known, "kv_bytes_per_token": 1000, "decode_bytes": 0, "cores": 8, **given})
