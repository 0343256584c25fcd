"""Layers, experts and sequences that workers divide (`tensor_parallel`, `expert_parallel`, `sequence_parallel`), on one GPU that two or
four workers share over gloo.

    python tests/gpu_parts.py OUT.json                        # about 5 minutes on an H200
    python tests/gpu_parts.py OUT.json equal gaps             # some of the parts
    python tests/gpu_parts.py OUT.json --device cpu           # tiny, to try the script

Enters: a device. Leaves: for each part what it has measured:

    equal    small models in float32 with deterministic kernels, dense and a mixture of experts: layers divided among two and four, among
             two with two replicas, with sequences divided too, experts divided. Samples, losses and gradient norms beside one process's.
    gaps     1.5B in bfloat16: one process, and two workers of which trainer and engine divide the layers, one of them, or none. The gap
             between their log-probs, and what a worker holds.
    long     1.5B in bfloat16 trains on a sample of 131,072 tokens: one process, and then two workers that divide the sequence, whose step
             takes two minutes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from gpu_shards import differences
from gpu_workers import Part, Results, assembled, attempt, compare, make, measure, steps_of, train_at_once

from fulltilt.bench.step import make_language

TWO, FOUR = "cluster.workers=2", "cluster.workers=4"
DEADLINE = "cluster.deadline_s=240"  # workers that hang end their run, not the time on the card; the longest step takes half as much
TENSOR, SEQUENCE, EXPERTS = "train.tensor_parallel={}", "train.sequence_parallel={}", "train.expert_parallel={}"
EXACT = (
    "run.deterministic=true", "model.dtype=float32", "run.steps=2", "train.lr=1e-5", "run.save_rollouts=64",
    f"rollout.kv_bytes={2**30}", "actor.token_budget=1024",
)  # fmt: skip
DENSE: Mapping[str, Sequence[str]] = {
    "one": (),
    "tensor 2": (TWO, TENSOR.format(2)),
    "tensor 2, data 2": (FOUR, TENSOR.format(2)),
    "tensor 2, sequence 2": (FOUR, TENSOR.format(2), SEQUENCE.format(2)),
    "tensor 4": (FOUR, TENSOR.format(4)),
}
MIXTURE: Mapping[str, Sequence[str]] = {
    "one": (),
    "experts 2": (TWO, EXPERTS.format(2)),
    "experts 2, data 2": (FOUR, EXPERTS.format(2)),
    "tensor 2": (TWO, TENSOR.format(2)),
    "tensor 2, experts 2": (TWO, TENSOR.format(2), EXPERTS.format(2)),
}
# Fixed, so that runs on one card do not depend on what others have left free.
SIZES = (f"rollout.kv_bytes={2**31}", "actor.token_budget=8192", "actor.forward_token_budget=8192")
FIGURES = (
    "rollout_corr/logprob_abs_gap", "train/", "actor/grad_norm", "actor/pg_loss", "perf/", "memory_gib/", "sync/", "communication/",
    "timing_s/",
)  # fmt: skip
PAIRS: Mapping[str, Sequence[str]] = {
    "trainer 1, engine 1, one process": (),
    "trainer 2, engine 2": (TWO, TENSOR.format(2)),
    "trainer 2, engine 1": (TWO, TENSOR.format(2), "rollout.tensor_parallel=1"),
    "trainer 1, engine 2": (TWO, "rollout.tensor_parallel=2"),
}
LONG = {"cuda": 131_072, "cpu": 256}
# Tokens of a response: on one card each takes tens of milliseconds, since gloo moves what members exchange through main memory.
EQUAL_TOKENS = 32


def equal(scratch: Path, device: str, found: Results) -> None:
    folders = {"dense": make(scratch / "dense", "small", device=device, prompts=8, samples=4, new_tokens=EQUAL_TOKENS)}
    folders["mixture"] = make_mixture(scratch / "mixture", device)
    kinds = {"dense": DENSE, "mixture": MIXTURE}
    runs = {f"{kind}, {name}": (folders[kind], (*EXACT, *own)) for kind, of_kind in kinds.items() for name, own in of_kind.items()}
    ended = train_at_once(runs, found)
    for name, own in ended.items():
        kind, _, _ = name.partition(", ")
        if (one := f"{kind}, one") in ended:
            found(name, differences(own, ended[one]) | attempt(partial(compare, folders[kind], one, name)))


def make_mixture(folder: Path, device: str) -> Path:
    """The small model's tokens and prompts, with a mixture of experts."""
    make(folder, "small", device=device, prompts=8, samples=4, new_tokens=EQUAL_TOKENS)
    shape = json.loads((folder / "model" / "config.json").read_text())
    config = transformers.Qwen3MoeConfig(
        vocab_size=shape["vocab_size"], hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_experts=8,
        num_experts_per_tok=2, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        max_position_embeddings=shape["max_position_embeddings"], tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    return folder


def gaps(scratch: Path, device: str, found: Results) -> None:
    shape, tokens = ("1.5B", 128) if device == "cuda" else ("small", 16)
    folder = make(scratch / "gaps", shape, device=device, prompts=8, samples=4, new_tokens=tokens)
    for name, settings in PAIRS.items():
        found(name, attempt(partial(measured, folder, *SIZES, *settings)))


def measured(folder: Path, *settings: str) -> dict[str, Any]:
    """Two steps of a run, and when it had started."""
    begin, patience = time.perf_counter(), [DEADLINE] if TWO in settings else []
    with assembled(folder, *settings, *patience) as parts:
        started = time.perf_counter() - begin
        steps = list(steps_of(parts, FIGURES, 2))
        print(settings, json.dumps(steps[-1]), flush=True)
        return {"settings": settings, "start seconds": started, "plan": list(parts.plan.words), "steps": steps}


def long(scratch: Path, device: str, found: Results) -> None:
    tokens = LONG[device]
    folder = make(scratch / "long", "1.5B" if device == "cuda" else "small", device=device, prompts=1, samples=2)
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": tokens}))
    words, _, _ = make_language(config["vocab_size"])
    text = "".join(words[place * 7919 % len(words)] for place in range(tokens - 1))  # an end token follows
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": text[:64], "response": text[64:]}) + "\n")
    (folder / "run.toml").write_text(
        f'model.path = "model"\ndata.train = "rows.jsonl"\ndata.max_prompt_tokens = 64\ndata.max_tokens = {tokens}\n'
        f'algorithm.name = "sft"\nalgorithm.prompts_per_step = 1\nrun.steps = 2\nrun.device = "{device}"\nrun.dir = "run"\n'
    )
    for name, settings in {"one": (), "sequence 2": (TWO, SEQUENCE.format(2))}.items():
        found(name, {"tokens": tokens, **attempt(partial(measured, folder, *settings))})


PARTS: dict[str, Part] = {"equal": equal, "gaps": gaps, "long": long}


if __name__ == "__main__":
    measure(__doc__, PARTS)
