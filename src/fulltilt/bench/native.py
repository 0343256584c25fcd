"""fulltilt's engine, built as a run builds it.

Enters: a job. Leaves: seconds of whole `generate` calls, the engine's statistics, milliseconds of a decode step by batch size, and the gap
between its log-probs and the trainer's. Guaranteed: sizes come from the plan of such a run; log-probs are always on; a response's length is
unknown to the scheduler until it is reached.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from fulltilt.algo.build import build
from fulltilt.bench import shapes
from fulltilt.bench.device import kernels_of, timed
from fulltilt.bench.job import BenchJob
from fulltilt.bench.roofline import StepCost
from fulltilt.bench.workload import Requests
from fulltilt.cluster.checks import TextFacts
from fulltilt.cluster.crew import Crew
from fulltilt.cluster.loading import Fusing, Models
from fulltilt.cluster.local import Local
from fulltilt.cluster.making import make_worker
from fulltilt.cluster.worker import Worker
from fulltilt.loop.opening import freeze_existing_objects
from fulltilt.model import attention
from fulltilt.model.load import load_model
from fulltilt.model.verify import verify
from fulltilt.records import Group, Row
from fulltilt.rollout.decode import BURST, DecodeRow
from fulltilt.rollout.engine import Engine
from fulltilt.rollout.engines.native import NativeEngine
from fulltilt.rollout.runner import bytes_per_token
from fulltilt.rollout.sampler import Sampling

BATCHES = (1, 8, 16, 32, 128, 256, 512, 1024)  # sizes at which decode steps are timed
PROFILED, PROFILED_STEPS = (16, 32, 256, 1024), 4  # sizes at which the kernels are timed one by one, and the number of steps
GAP_PROMPTS, GAP_SAMPLES = 16, 2  # prompts, and samples of each, whose log-probs are compared with the trainer's


# Used instead of a tokenizer: no engine here turns tokens into text.
NO_TEXT: Any = SimpleNamespace(all_special_ids=(), decode=lambda *_, **__: "")


def make_bench_worker(job: BenchJob, longest: int, *, learns: bool) -> tuple[Worker, Models]:
    """Make the worker of such a run, and its models, with a model that need not be on disk: the worker either trains or samples. `longest`:
    tokens of the longest sample to train on, or of the longest prompt."""
    config, algorithm, fusing = job.config, build(job.config), Fusing(job.config, job.device)
    if job.source.folder:
        model = load_model(config.model, job.device, key="--model")
    else:
        model = shapes.random_model(job.source, job.device, attention.register(), config.model.dtype)
    layers = verify(model)
    fusing.fuse("actor", model)
    models = Models({"actor": model}, layers, fusing.words())
    if learns:
        algorithm = replace(algorithm, needs=algorithm.needs - {"rollout"})  # samples are given: no engine takes memory
    texts = TextFacts(NO_TEXT, frozenset(), longest, 1)
    return make_worker(config, algorithm, job.device, models, texts, ("actor",) if learns else ()), models


class Native:
    def __init__(self, job: BenchJob) -> None:
        self.device, (self.requests,) = job.device, job.requests
        self.worker, models = make_bench_worker(job, self.requests.longest_prompt, learns=False)
        assert isinstance(self.worker.engine, NativeEngine)
        self.engine, self.limits, self.budgets = self.worker.engine, self.worker.engine.limits, self.worker.plan.budgets
        self.model, self.layers, self.fused = models.actor, models.layers, models.fused
        self.kv_bytes_per_token = bytes_per_token(self.layers, self.model.dtype)
        self.groups: tuple[Group, ...] = ()  # the groups of the last pass
        self.peak_bytes: int | None = None  # allocated in any pass so far

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def run(self, requests: Requests) -> float:
        """Return the seconds from the call to the last sample. Allocating and freeing the cache's memory are not counted."""
        torch.set_num_threads(self.budgets.threads)
        self.engine.runner.acquire()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        seconds, self.groups = generate_all(self.engine, requests, self.device)
        if self.device.type == "cuda":
            self.peak_bytes = max(self.peak_bytes or 0, torch.cuda.max_memory_allocated(self.device))
        return seconds

    def release(self) -> None:
        """Free memory for the next measurement."""
        self.engine.release()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def logprob_gap(self) -> dict[str, float]:
        """Return the difference between the engine's and the trainer's log-probs, over some samples of the last pass."""
        self.engine.release()
        chosen = [(group.prompt, sample) for group in self.groups[:GAP_PROMPTS] for sample in group.samples[:GAP_SAMPLES]]
        rows = [
            Row(np.concatenate([prompt.ids, sample.ids]), np.arange(len(prompt.ids) + len(sample.ids)) >= len(prompt.ids))
            for prompt, sample in chosen
        ]
        crew = Crew(self.worker.config, self.worker.algorithm, Local(self.worker))
        with crew.phase("old-logprob"):
            rows = crew.annotate("actor", "old_logprobs", rows, lambda done, total: None).rows
        trainers = np.concatenate([row.old_logprobs[row.mask] for row in rows if row.old_logprobs is not None])
        gaps = np.abs(trainers - np.concatenate([sample.logprobs for _, sample in chosen]))
        return {"mean_absolute": float(gaps.mean()), "largest": float(gaps.max()), "tokens": len(gaps)}

    def decode_steps(self) -> dict[str, Any]:
        """Return the milliseconds of a decode step by batch size, the host's part included, at the workload's mean context; on CUDA also
        its kernels."""
        engine, lengths = self.engine, list(self.requests.lengths.values())
        context = int(np.mean([len(prompt.ids) for prompt in self.requests.prompts]) + np.mean(lengths) / 2)
        block = self.limits.block_tokens
        blocks = -(-(context + BURST + 1) // block)
        engine.runner.acquire()
        engine.decoder.use_cache(engine.runner.keys, engine.runner.values)
        engine.decoder.reach(self.requests.positions)
        sampling = replace(sampling_of(self.requests), max_new_tokens=context + BURST + 2)
        milliseconds, kernels = {}, {}
        for size in BATCHES:
            if size > min(self.limits.max_seqs, len(lengths)) or size * blocks > self.limits.blocks:
                break
            rows = [
                DecodeRow(
                    token=1, position=context, drawn=1, seed=row, blocks=list(range(row * blocks, (row + 1) * blocks)),
                    forced=sampling.max_new_tokens,
                )
                for row in range(size)
            ]  # fmt: skip

            def decode(rows: list[DecodeRow] = rows) -> None:
                engine.decoder.start(rows, sampling)
                engine.decoder.launch(BURST)()

            decode()  # captures the steps, if they are captured
            milliseconds[str(size)] = 1e3 * median(timed(self.device, decode)[0] for _ in range(3)) / BURST
            if self.device.type == "cuda" and size in PROFILED:
                engine.decoder.start(rows, sampling)
                kernels[str(size)] = kernels_of(lambda: engine.decoder.launch(PROFILED_STEPS)(), self.device, PROFILED_STEPS)
        return {"decode_step_ms": {"context": context} | milliseconds, "decode_step_kernels": kernels or None}

    def step_cost(self) -> StepCost | str:
        """Return the cost of a decode step for the roofline; or why its formula does not hold."""
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
            "layers": self.fused,
            "peak_memory_bytes": self.peak_bytes,
        }


def sampling_of(requests: Requests) -> Sampling:
    return Sampling(samples=requests.workload.samples, max_new_tokens=requests.longest_response)


def generate_all(engine: Engine, requests: Requests, device: torch.device) -> tuple[float, tuple[Group, ...]]:
    """Return the seconds of a whole call, and its groups in prompt order. The length of every sample is checked."""
    sampling = sampling_of(requests)
    with freeze_existing_objects():
        seconds, groups = timed(device, lambda: list(engine.generate(requests.prompts, sampling, requests.seed, requests.lengths)))
    found = {group.prompt.uid: group for group in groups}
    lengths = {(uid, sample.index): len(sample.ids) for uid, group in found.items() for sample in group.samples}
    assert lengths == requests.lengths and all(len(s.logprobs) == len(s.ids) for group in found.values() for s in group.samples)
    return seconds, tuple(found[prompt.uid] for prompt in requests.prompts)
