"""Our engine, built as a run builds it.

Enters: a model's source, a device, requests. Leaves: seconds of whole `generate` calls, the engine's statistics, milliseconds of a decode
step by batch size, and the gap between its log-probs and the trainer's. Guaranteed: sizes come from the plan that a run would make;
log-probs are always on; a response's length is unknown to the scheduler until it is reached.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from statistics import median
from typing import Any

import numpy as np
import torch

from fulltilt.algo.presets import build
from fulltilt.batching.pack import MicroSizing, forward_micro_batches, scatter
from fulltilt.bench import shapes
from fulltilt.bench.device import kernels_of, synchronize
from fulltilt.bench.roofline import StepCost
from fulltilt.bench.workload import Requests
from fulltilt.cluster.assembly import make_worker
from fulltilt.cluster.checks import TextFacts
from fulltilt.cluster.loading import Fusing, Models
from fulltilt.config import AlgorithmConfig, Config, DataConfig, ModelConfig, RolloutConfig, RunConfig
from fulltilt.loop.opening import what_stays
from fulltilt.model.verify import verify
from fulltilt.records import Group, Row, UserError
from fulltilt.rollout.decode import BURST, DecodeRow
from fulltilt.rollout.engine import NativeEngine
from fulltilt.rollout.kv_cache import blocks_for
from fulltilt.rollout.runner import bytes_per_token
from fulltilt.rollout.sampler import Sampling
from fulltilt.train.roles import Policy, annotate_all

BATCHES = (1, 8, 16, 32, 128, 256, 512, 1024)  # whose decode steps are timed
PROFILED, PROFILED_STEPS = (16, 32, 256, 1024), 4  # whose kernels are timed one by one, over so many steps
GAP_PROMPTS, GAP_SAMPLES = 16, 2  # whose log-probs are compared with the trainer's


class NoText:
    """Stands where a tokenizer would: no engine here turns tokens into text."""

    all_special_ids: tuple[int, ...] = ()

    def decode(self, *_: Any, **__: Any) -> str:
        return ""


NO_TEXT: Any = NoText()


class Native:
    def __init__(self, source: shapes.Source, device: torch.device, requests: Requests, kv_bytes: int | None) -> None:
        self.device, self.requests = device, requests
        self.model = shapes.ours(source, device)
        self.layers = verify(self.model)
        self.kv_bytes_per_token = bytes_per_token(self.layers, self.model.dtype)
        self.config = run_config(source, requests, kv_bytes)
        self._check_kv_bytes(kv_bytes)
        self.fusing = Fusing(self.config, device)
        self.fusing.fuse("actor", self.model)
        models, texts = Models({"actor": self.model}, self.layers), TextFacts(NO_TEXT, frozenset(), requests.longest_prompt, 1)
        worker, _ = make_worker(self.config, build(self.config), device, models, texts, self.fusing, ())
        assert isinstance(worker.engine, NativeEngine)
        self.budgets, self.engine, self.limits = worker.plan.budgets, worker.engine, worker.engine.limits
        self.sampling = Sampling(samples=requests.workload.samples, max_new_tokens=requests.longest_response)
        self.groups: tuple[Group, ...] = ()  # of the last pass
        self.peak_bytes: int | None = None  # allocated in any pass so far

    def _check_kv_bytes(self, kv_bytes: int | None) -> None:
        """Before the plan does, which would name a run's keys instead of the option. A cache consists of whole blocks."""
        block = self.config.rollout.block_tokens
        needed = blocks_for(self.requests.positions, block) * block * self.kv_bytes_per_token
        if kv_bytes is not None and kv_bytes < needed:
            raise UserError(
                f"--kv-bytes {kv_bytes}: one sample may have {self.requests.positions} tokens, which in blocks of {block} take {needed} "
                f"bytes. Give {needed} or more, or choose a shorter workload"
            )

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def run(self, requests: Requests) -> float:
        """Seconds from the call to the last sample, memory of the cache taken and given back outside."""
        torch.set_num_threads(self.budgets.threads)
        self.engine.runner.acquire()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        with what_stays():
            synchronize(self.device)
            begin = time.perf_counter()
            found = {
                group.prompt.uid: group for group in self.engine.generate(requests.prompts, self.sampling, requests.seed, requests.lengths)
            }
            synchronize(self.device)
            seconds = time.perf_counter() - begin
        if self.device.type == "cuda":
            self.peak_bytes = max(self.peak_bytes or 0, torch.cuda.max_memory_allocated(self.device))
        self.groups = tuple(found[prompt.uid] for prompt in requests.prompts)
        for group in self.groups:
            for sample in group.samples:
                assert len(sample.ids) == len(sample.logprobs) == requests.lengths[group.prompt.uid, sample.index]
        return seconds

    def release(self) -> None:
        """Give memory to whoever is measured next."""
        self.engine.release()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def logprob_gap(self) -> dict[str, float]:
        """Between what the engine said of its tokens and what the trainer says, over some samples of the last pass."""
        self.engine.release()
        chosen = [(group.prompt, sample) for group in self.groups[:GAP_PROMPTS] for sample in group.samples[:GAP_SAMPLES]]
        rows = [
            Row(
                ids=np.concatenate([prompt.ids, sample.ids]),
                mask=np.arange(len(prompt.ids) + len(sample.ids)) >= len(prompt.ids),
            )
            for prompt, sample in chosen
        ]
        micro = forward_micro_batches(rows, MicroSizing(dynamic=True, token_budget=self.budgets.forward_token_budget))
        trainer = Policy("actor", self.model, self.sampling.temperature)
        rows = scatter(rows, micro, list(annotate_all(trainer, micro)), "old_logprobs")
        gaps = np.concatenate(
            [
                np.abs(row.old_logprobs[row.mask] - sample.logprobs)
                for row, (_, sample) in zip(rows, chosen, strict=True)
                if row.old_logprobs is not None
            ]
        )
        return {"mean_absolute": float(gaps.mean()), "largest": float(gaps.max()), "tokens": len(gaps)}

    def decode_steps(self) -> dict[str, Any]:
        """By batch size, at the workload's mean context: milliseconds of a step, the host's part included, and on CUDA the kernels it
        consists of."""
        engine, lengths = self.engine, list(self.requests.lengths.values())
        context = int(np.mean([len(prompt.ids) for prompt in self.requests.prompts]) + np.mean(lengths) / 2)
        block = self.limits.block_tokens
        blocks = -(-(context + BURST + 1) // block)
        engine.runner.acquire()
        engine.decoder.use_cache(*engine.runner.caches)
        engine.decoder.reach(self.requests.positions)
        sampling = replace(self.sampling, max_new_tokens=context + BURST + 2)
        milliseconds, kernels = {}, {}
        for size in BATCHES:
            if size > min(self.limits.max_seqs, len(lengths)) or size * blocks > self.limits.blocks:
                break
            rows = [
                DecodeRow(
                    token=1, position=context, drawn=1, seed=np.uint64(row), blocks=list(range(row * blocks, (row + 1) * blocks)),
                    forced=sampling.max_new_tokens,
                )
                for row in range(size)
            ]  # fmt: skip
            engine.decoder.start(rows, sampling)
            engine.decoder.launch(BURST)()  # captures, where steps are captured
            times = []
            for _ in range(3):
                begin = time.perf_counter()
                engine.decoder.start(rows, sampling)
                engine.decoder.launch(BURST)()
                times.append(time.perf_counter() - begin)
            milliseconds[str(size)] = 1e3 * median(times) / BURST
            if self.device.type == "cuda" and size in PROFILED:
                engine.decoder.start(rows, sampling)
                kernels[str(size)] = kernels_of(lambda: engine.decoder.launch(PROFILED_STEPS)(), self.device, PROFILED_STEPS)
        return {"decode_step_ms": {"context": context} | milliseconds, "decode_step_kernels": kernels or None}

    def step_cost(self) -> StepCost | str:
        """For the roofline, or why the formula does not hold."""
        text = self.model.config.get_text_config()
        if any(hasattr(module, "num_experts") for module in self.model.modules()):
            return "a mixture of experts: which weights a step reads depends on the tokens"
        narrow = [shape.window for shape in self.layers.values() if shape.window and shape.window < self.requests.positions]
        if narrow:
            return f"a window of {min(narrow)} tokens: layers do not read the whole context"
        untied = self.model.get_output_embeddings().weight is not self.model.get_input_embeddings().weight
        lookup = self.model.get_input_embeddings().weight.numel() if untied else 0  # rows are looked up, the matrix is not read
        read = self.parameters - lookup
        scores = sum(4 * text.num_attention_heads * shape.head_width for shape in self.layers.values())
        return StepCost(read * self.model.dtype.itemsize, self.kv_bytes_per_token, 2 * read, scores)

    def details(self) -> dict[str, Any]:
        return {
            "statistics": self.engine.stats().metrics(),
            "limits": asdict(self.limits),
            "captures": self.engine.decoder.captures,
            "eager_reason": self.engine.decoder.eager_reason,
            "threads": self.budgets.threads if self.device.type == "cpu" else None,
            "layers": self.fusing.words(),
            "peak_memory_bytes": self.peak_bytes,
        }


def run_config(source: shapes.Source, requests: Requests, kv_bytes: int | None) -> Config:
    """The configuration of a run that would make this rollout; data and reward are never read."""
    workload = requests.workload
    return Config(
        model=ModelConfig(path=source.name),
        data=DataConfig(train="-"),
        algorithm=AlgorithmConfig(prompts_per_step=workload.prompts, samples_per_prompt=workload.samples),
        rollout=RolloutConfig(max_new_tokens=requests.longest_response, kv_bytes=kv_bytes or "auto"),
        run=RunConfig(steps=1),
    )
