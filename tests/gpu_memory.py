"""Rollouts with weight updates between them, the KV cache's memory lent to the update each time: seconds and bytes of every round.

    python tests/gpu_memory.py --out FILE.json [--rounds 20] [--kv-gib 60] [--prompts 128] [--samples 8] [--new-tokens 400]

Needs nothing from outside: random weights of Qwen2.5-0.5B's shape, random prompts, forced lengths that are the same in every round. A round
takes the cache, generates, gives the cache back and makes an optimizer step from all samples. What is to be seen: taking and giving take
under 50 ms, reserved memory does not grow, no graph is captured after the first round, the first token comes within 0.3 s.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gpu_run
import models
import numpy as np
import torch
from tensors import accumulated
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from fulltilt.algo.loss import sft_loss
from fulltilt.batching.pack import MicroSizing, minibatch
from fulltilt.cluster.making import take_workspaces
from fulltilt.cluster.sizes import role_facts
from fulltilt.model import attention
from fulltilt.model.fuse import fuse_and_compare
from fulltilt.model.verify import verify
from fulltilt.plan.cache import decode_bytes
from fulltilt.plan.facts import Facts
from fulltilt.records import Group, Prompt, Row
from fulltilt.rollout.engine import EngineContext, EngineLimits
from fulltilt.rollout.engines.native import NativeEngine
from fulltilt.rollout.runner import bytes_per_token
from fulltilt.rollout.sampler import Sampling
from fulltilt.schema import Config, TrainConfig
from fulltilt.training.optim import Optimizer
from fulltilt.training.roles import Policy
from fulltilt.training.trainer import Trainer

BLOCK = 16


@dataclass(frozen=True)
class Settings:
    shape: Mapping[str, Any] = field(default_factory=lambda: gpu_run.SHAPE)
    rounds: int = 20
    kv_bytes: int = 60 << 30
    prompts: int = 128
    samples: int = 8
    longest_prompt: int = 512
    new_tokens: int = 400
    token_budget: int = 16384
    device: str = "cuda"


@dataclass(frozen=True, eq=False)
class Setup:
    model: PreTrainedModel
    engine: NativeEngine
    trainer: Trainer
    prompts: list[Prompt]
    lengths: dict[tuple[int, int], int]  # of every sample


def set_up(settings: Settings) -> Setup:
    """In the order of a run: weights, fused layers, optimizer, workspaces; the engine last."""
    torch.manual_seed(0)
    cuda = settings.device == "cuda"
    with torch.device(settings.device):
        model = AutoModelForCausalLM.from_config(
            Qwen2Config(**settings.shape), dtype=torch.bfloat16 if cuda else torch.float32, attn_implementation=attention.register()
        ).eval()
    layers = verify(model)
    print(fuse_and_compare(model), file=sys.stderr)
    optimizer = Optimizer(model, TrainConfig(lr=1e-6), total_updates=settings.rounds)
    trainer = Trainer(Policy("actor", model, 1.0, optimizer), sft_loss)
    take_workspaces(trainer)
    random = np.random.default_rng(0)
    prompts = [
        Prompt(uid=uid, ids=random.integers(3, settings.shape["vocab_size"], random.integers(8, settings.longest_prompt + 1)), text="")
        for uid in range(settings.prompts)
    ]
    samples = [(uid, index) for uid in range(settings.prompts) for index in range(settings.samples)]
    lengths = {sample: int(random.integers(1, settings.new_tokens + 1)) for sample in samples}
    blocks = settings.kv_bytes // (bytes_per_token(layers, model.dtype) * BLOCK)
    limits = EngineLimits(blocks, BLOCK, max_seqs=len(samples), max_batched_tokens=16384, cuda_graphs=cuda)
    return Setup(
        model,
        NativeEngine(EngineContext(model, models.tokenizer(), frozenset({1}), layers, limits)),
        trainer,
        prompts,
        lengths,
    )


def timed(work: Callable[[], Any], device: str) -> tuple[float, Any]:
    """Seconds until the device is done, and the result."""
    wait(device)
    begin = time.perf_counter()
    result = work()
    wait(device)
    return time.perf_counter() - begin, result


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def one_round(setup: Setup, settings: Settings, number: int) -> dict[str, Any]:
    engine, device = setup.engine, settings.device
    sampling = Sampling(samples=settings.samples, max_new_tokens=settings.new_tokens)
    acquire, _ = timed(engine.runner.acquire, device)
    held = engine.runner.held_bytes
    rollout, groups = timed(lambda: list(engine.generate(setup.prompts, sampling, number, setup.lengths)), device)
    release, _ = timed(engine.release, device)
    kept = engine.runner.held_bytes
    update, loss = timed(lambda: make_step(setup.trainer, groups, settings.token_budget), device)
    engine.sync(number, ())
    return {
        "round": number,
        "acquire_s": acquire,
        "release_s": release,
        "first_token_s": acquire + engine.stats().first_token.percentile(0),
        "rollout_s": rollout,
        "update_s": update,
        "tokens": sum(len(sample.ids) for group in groups for sample in group.samples),
        "loss": loss,
        "captures": engine.decoder.captures,
        "cache_bytes": held,
        "cache_bytes_during_update": kept,
        **memory(device),
    }


def make_step(trainer: Trainer, groups: list[Group], token_budget: int) -> float:
    rows = []
    for group in groups:
        for sample in group.samples:
            ids = np.concatenate([group.prompt.ids, sample.ids])
            rows.append(Row(ids=ids, mask=np.arange(len(ids)) >= len(group.prompt.ids), group=group.prompt.uid))
    metrics = accumulated(trainer, minibatch(rows, "token-mean", 1, MicroSizing(token_budget)))
    trainer.apply()
    return metrics["train/loss"]


def memory(device: str) -> dict[str, Any]:
    names = ("allocated_bytes", "reserved_bytes", "most_allocated_bytes", "device_allocations", "retries")
    if device != "cuda":
        return dict.fromkeys(names)
    stats = torch.cuda.memory_stats()
    found = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated())
    return dict(zip(names, (*found, stats.get("num_device_alloc"), stats.get("num_alloc_retries")), strict=True))


def measure(settings: Settings) -> dict[str, Any]:
    setup = set_up(settings)
    before = memory(settings.device)
    rounds = []
    for number in range(1, settings.rounds + 1):
        rounds.append(one_round(setup, settings, number))
        print(json.dumps(rounds[-1]), file=sys.stderr, flush=True)
    config = Config.model_validate({"model": {"path": "."}, "data": {"train": "."}})
    longest = settings.longest_prompt + settings.new_tokens
    roles = {"actor": role_facts(setup.model, learns=True)}
    facts = Facts(settings.device, 0, 0, roles, longest - config.rollout.max_new_tokens, steps_per_epoch=1)
    planned = decode_bytes(config, facts, setup.engine.limits.max_seqs)
    setup.engine.release()
    later = rounds[1:] or rounds
    grown = rounds[-1]["reserved_bytes"] - later[0]["reserved_bytes"] if settings.device == "cuda" else None
    return {
        "settings": asdict(settings),
        "before_the_first_round": before,
        "decode_bytes_planned": planned,
        "rounds": rounds,
        "slowest_acquire_s": max(found["acquire_s"] for found in rounds),
        "slowest_release_s": max(found["release_s"] for found in rounds),
        "slowest_first_token_s_after_the_first_round": max(found["first_token_s"] for found in later),
        "captures_after_the_first_round": rounds[-1]["captures"] - rounds[0]["captures"],
        "reserved_bytes_grown_after_the_second_round": grown,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kv-gib", type=int, default=60)
    for name in ("rounds", "prompts", "samples", "new-tokens"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Settings(), name.replace("-", "_")))
    given = parser.parse_args()
    settings = Settings(
        rounds=given.rounds, kv_bytes=given.kv_gib << 30, prompts=given.prompts, samples=given.samples, new_tokens=given.new_tokens
    )
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    figures = {"command": " ".join(sys.argv), "gpu": torch.cuda.get_device_name(), "versions": versions, **measure(settings)}
    given.out.write_text(json.dumps(figures, indent=1))
    print(json.dumps({name: value for name, value in figures.items() if name not in ("rounds", "settings")}, indent=1))


if __name__ == "__main__":
    main()
