"""Well-known models by name: their sizes as config.json has them, so that a plan needs no folder and no hub.

Enters: a name as people write it ("Qwen2.5-Math-7B", "qwen2.5 7b math", "Qwen/Qwen3-30B-A3B"), or a folder. Leaves: a `Shape`. Guaranteed:
case, separators, the owner on the hub and words that say how a model was trained (Instruct, Base, Math, ...) do not matter; a distilled
model has the sizes of the student, never those of its teacher.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fulltilt.records import UserError
from fulltilt.shape import SHAPES, Shape
from fulltilt.words import listed

Sizes = dict[str, Any]


def qwen2(width: int, inner: int, layers: int, heads: int, key_heads: int, vocabulary: int, *, tied: bool = False) -> Sizes:
    return dense("qwen2", width, inner, layers, heads, key_heads, vocabulary, tied=tied, positions=32768)


def qwen3(width: int, inner: int, layers: int, heads: int, key_heads: int, *, tied: bool = False) -> Sizes:
    return dense("qwen3", width, inner, layers, heads, key_heads, 151936, tied=tied, positions=40960, head_width=128)


def dense(
    family: str, width: int, inner: int, layers: int, heads: int, key_heads: int, vocabulary: int, *,
    tied: bool = False, positions: int = 131072, head_width: int | None = None,
) -> Sizes:  # fmt: skip
    found = {
        "model_type": family, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": key_heads, "vocab_size": vocabulary, "tie_word_embeddings": tied, "max_position_embeddings": positions,
    }  # fmt: skip
    return found | ({"head_dim": head_width} if head_width else {})


def experts(base: Sizes, count: int, active: int, inner: int, *, shared: int = 0, dense_layers: int = 0) -> Sizes:
    return base | {
        "num_experts": count, "num_experts_per_tok": active, "moe_intermediate_size": inner, "shared_expert_intermediate_size": shared,
        "mlp_only_layers": list(range(dense_layers)),
    }  # fmt: skip


# Multi-head latent attention cannot be described by a `Shape`. These sizes have the same number of attention weights within 4%, and exactly
# the same number of values in the KV cache (512 of the latent and 64 of the rotary key for each token and layer); scores are counted with
# heads of 96 instead of 192.
LATENT = {"head_dim": 96, "num_key_value_heads": 3}
DEEPSEEK_V3 = dense("qwen2_moe", 7168, 18432, 61, 128, 3, 129280, positions=163840) | LATENT | {"qkv_bias": False}
MOONLIGHT = dense("qwen2_moe", 2048, 11264, 27, 16, 3, 163840, positions=8192) | LATENT | {"head_dim": 96, "qkv_bias": False}

PUBLISHED: dict[str, Sizes] = {
    "Qwen2.5-0.5B": SHAPES["0.5B"],
    "Qwen2.5-1.5B": SHAPES["1.5B"],
    "Qwen2.5-3B": qwen2(2048, 11008, 36, 16, 2, 151936, tied=True),
    "Qwen2.5-7B": SHAPES["7B"],
    "Qwen2.5-14B": qwen2(5120, 13824, 48, 40, 8, 152064),
    "Qwen2.5-32B": SHAPES["32B"],
    "Qwen2.5-72B": qwen2(8192, 29568, 80, 64, 8, 152064),
    "Qwen3-0.6B": qwen3(1024, 3072, 28, 16, 8, tied=True),
    "Qwen3-1.7B": qwen3(2048, 6144, 28, 16, 8, tied=True),
    "Qwen3-4B": qwen3(2560, 9728, 36, 32, 8, tied=True),
    "Qwen3-8B": qwen3(4096, 12288, 36, 32, 8),
    "Qwen3-14B": qwen3(5120, 17408, 40, 40, 8),
    "Qwen3-32B": qwen3(5120, 25600, 64, 64, 8),
    "Qwen3-30B-A3B": SHAPES["Qwen3-30B-A3B"],
    "Qwen3-235B-A22B": experts(qwen3(4096, 12288, 94, 64, 4) | {"model_type": "qwen3_moe"}, 128, 8, 1536),
    "Qwen1.5-MoE-A2.7B": experts(dense("qwen2_moe", 2048, 5632, 24, 16, 16, 151936) | {"qkv_bias": True}, 60, 4, 1408, shared=5632),
    "Qwen2-57B-A14B": experts(dense("qwen2_moe", 3584, 18944, 28, 28, 4, 151936) | {"qkv_bias": True}, 64, 8, 2560, shared=20480),
    "Llama-3.2-1B": dense("llama", 2048, 8192, 16, 32, 8, 128256, tied=True, head_width=64),
    "Llama-3.2-3B": dense("llama", 3072, 8192, 28, 24, 8, 128256, tied=True, head_width=128),
    "Llama-3-8B": dense("llama", 4096, 14336, 32, 32, 8, 128256),
    "Llama-3-70B": SHAPES["70B"],
    "Llama-3-405B": dense("llama", 16384, 53248, 126, 128, 8, 128256),
    "Llama-2-7B": dense("llama", 4096, 11008, 32, 32, 32, 32000, positions=4096),
    "Mistral-7B": dense("mistral", 4096, 14336, 32, 32, 8, 32768, positions=32768),
    "Mixtral-8x7B": SHAPES["Mixtral-8x7B"],
    "Mixtral-8x22B": dense("mixtral", 6144, 16384, 56, 48, 8, 32768, positions=65536) | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "DeepSeek-V3": experts(DEEPSEEK_V3, 256, 8, 2048, shared=2048, dense_layers=3),
    # The other distilled models have the sizes of the model that they were made from. This one has a separate head.
    "DeepSeek-R1-Distill-Qwen-1.5B": SHAPES["1.5B"] | {"tie_word_embeddings": False, "max_position_embeddings": 131072},
    "Moonlight-16B-A3B": experts(MOONLIGHT, 64, 6, 1408, shared=2816, dense_layers=1),
    "SmolLM2-135M": SHAPES["135M"],
    "Gemma-2-2B": SHAPES["Gemma-2-2B"],
    "Gemma-2-9B": SHAPES["Gemma-2-9B"],
}
ALSO = {
    "deepseekr1": "deepseekv3", "deepseek671b": "deepseekv3", "deepseekv3671b": "deepseekv3", "deepseekr1671b": "deepseekv3",
    "qwen330b": "qwen330ba3b", "qwen3235b": "qwen3235ba22b", "moonlight": "moonlight16ba3b", "moonlight16b": "moonlight16ba3b",
    "mixtral47b": "mixtral8x7b", "qwen27b": "qwen257b",
    "llama3170b": "llama370b", "llama3370b": "llama370b", "llama318b": "llama38b", "llama31405b": "llama3405b",
}  # fmt: skip
# Names of the students of distilled models, without the version.
STUDENTS = {
    "qwen15b": "deepseekr1distillqwen15b", "qwen7b": "qwen257b", "qwen14b": "qwen2514b", "qwen32b": "qwen2532b", "llama8b": "llama38b",
    "llama70b": "llama370b",
}  # fmt: skip
# Words that are expanded before separators are removed. Without its separator, Qwen2-57B would read like Qwen2.5-7B.
ABBREVIATIONS = (
    (re.compile(r"(?<![a-z0-9])(dpsk|ds)(?=[^a-z]|[rv]\d|$)"), "deepseek"),
    (re.compile(r"^deepseek$"), "deepseek-v3"),
    (re.compile(r"(?<=qwen[23])moe"), ""),
    (re.compile(r"qwen2[-_ ]+57b(?![-_ ]*a14b)"), "qwen2-57b-a14b"),
)
# Words of a name that say how the weights were made, which sizes do not depend on.
TRAINING_WORDS = re.compile(
    r"\b(instruct|chat|base|math|coder?|it|preview|thinking|r1|rl|zero|hf|meta|moe|dense|gptmodel|mcore|v0\.\d|\d{4})\b"
)
DISTILLED = re.compile(r"distill(ed|ation)?")
SIZE = re.compile(r"\d+(\.\d+)?b(?![a-z])")


def named_shape(text: str) -> Shape:
    """Return the shape of a folder with a config.json, or of a model by its name."""
    if (Path(text) / "config.json").is_file():
        return Shape.read(text)
    if found := find_shape(text):
        return Shape.from_config(found)
    names = dict.fromkeys([*PUBLISHED, *SHAPES])
    raise UserError(f"{text!r} is neither a folder with a config.json nor a named shape. Named shapes: {listed([*names], 60)}")


def name_of(shape: Shape) -> str | None:
    """Return the well-known name of a shape, however it was given; None: no model here has these sizes."""
    sizes = replace(shape, positions=None)
    return next((name for name, own in (PUBLISHED | SHAPES).items() if replace(Shape.from_config(own), positions=None) == sizes), None)


def find_shape(text: str) -> Sizes | None:
    """Return the sizes of a model that is named somewhere in a text, such as a cell or the name of a file; None: no model is. Of names that
    contain one another, the longest counts."""
    if text in SHAPES:
        return SHAPES[text]
    known = {joined(name): sizes for name, sizes in PUBLISHED.items()}
    known |= {short: known[whole] for short, whole in ALSO.items()}
    plain = text.rpartition("/")[2].lower()
    if not DISTILLED.search(plain):
        return looked_up(plain, known)
    teacher, _, student = DISTILLED.sub("\n", plain, count=1).partition("\n")
    # The student follows the word. If no size follows, the student may be named first, and the teacher or nothing comes after.
    named = student if SIZE.search(student) else teacher
    found = looked_up(named, known | {short: known[whole] for short, whole in STUDENTS.items()})
    return None if found is PUBLISHED["DeepSeek-V3"] else found


def looked_up(plain: str, known: Mapping[str, Sizes]) -> Sizes | None:
    forms = spellings(plain)
    for given in forms:
        if given in known:
            return known[given]
    for given in forms:
        inside = [name for name in known if re.search(rf"(?<!\d){re.escape(name)}(?!\d)", given)]
        if inside:
            return known[max(inside, key=len)]
    return None


def spellings(plain: str) -> list[str]:
    """Return forms of a name to look for: with common abbreviations expanded, and without words about training."""
    for pattern, whole in ABBREVIATIONS:
        plain = pattern.sub(whole, plain)
    return [joined(plain), joined(TRAINING_WORDS.sub(" ", re.sub(r"[_\-\s]+", " ", plain)))]


def joined(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
