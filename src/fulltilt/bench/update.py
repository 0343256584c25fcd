"""The benchmark of updates: forward and backward over samples of known lengths, then the optimizer step.

Enters: `BenchOptions`. Leaves: one JSON-ready document: tokens/s, the share of the device's arithmetic that forward and backward reach,
seconds of the optimizer step, memory by kind, kernels by time, and what is needed to repeat it. Guaranteed: mistakes are reported before
anything loads; model, batching, loss and optimizer are those of a run's worker; warm-up is outside the measured passes; FLOPs are counted
by batching/cost.py, whatever is recomputed or padded.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from fulltilt.batching.cost import update_flops
from fulltilt.batching.pack import minibatch
from fulltilt.bench import flops, report
from fulltilt.bench.device import device_name, kernels_of, timed
from fulltilt.bench.job import BenchJob, resolve
from fulltilt.bench.native import make_bench_worker
from fulltilt.bench.workload import Requests
from fulltilt.cluster.sizes import update_sizes
from fulltilt.cluster.worker import enough_memory
from fulltilt.loop.opening import freeze_existing_objects
from fulltilt.memory.account import Reading
from fulltilt.records import MiniBatch, Row
from fulltilt.rollout.runner import bytes_per_token
from fulltilt.words import in_bytes, many

PHASE = "update-actor"
SETTINGS = ("train.", "actor.token_budget", "actor.dynamic_batch", "actor.micro_batch", "algorithm.entropy_coef")
PROFILED = 2  # number of the largest micro-batches whose kernels are timed one by one
SHOWN, NAME_WIDTH = 15, 90  # kernels in the table for people, and letters of their names


prepare = partial(resolve, settings=SETTINGS)


class Update:
    """The worker of a run that makes this update, the samples of the update, and the measurements of each pass, the warm-up first."""

    def __init__(self, job: BenchJob) -> None:
        self.device = job.device
        self.seconds, self.optimizer_seconds = list[float](), list[float]()  # forward with backward; the optimizer step
        self.grad_norms, self.memory = list[float](), list[Reading]()  # one for each whole update
        rows = make_rows(job.requests[0], job.source.vocabulary)
        self.lengths = [row.tokens for row in rows]
        self.worker, models = make_bench_worker(job, max(self.lengths), learns=True)
        self.model, self.shapes, self.layers = models.actor, models.layers, models.fused
        self.size = flops.model_size(self.model, self.shapes)
        self.trainer, self.account, algorithm = self.worker.trainers["actor"], self.worker.account, self.worker.algorithm
        begin = time.perf_counter()
        self.batch = minibatch(
            rows, algorithm.aggregation, algorithm.length_norm, update_sizes(self.worker.config, self.worker.plan.budgets)["actor"]
        )
        self.batching_seconds = time.perf_counter() - begin

    def run(self) -> None:
        self.trainer.optimizer.begin(0)
        with freeze_existing_objects(), self.account.phase(PHASE):
            with self.account.passes(self.trainer.role.head_bytes(self.batch.micro_batches, learns=True)):
                seconds, _ = timed(self.device, lambda: self.trainer.accumulate(self.batch))
            optimizer_seconds, metrics = timed(self.device, self.trainer.apply)
        self.seconds.append(seconds)
        self.optimizer_seconds.append(optimizer_seconds)
        self.grad_norms.append(metrics["actor/grad_norm"])
        self.memory.append(self.account.take()[PHASE])

    def kernels(self) -> dict[str, Any]:
        """Return where the time goes, in the largest micro-batches and in an optimizer step with their gradients."""
        largest = MiniBatch(self.batch.micro_batches[:PROFILED], self.batch.trained_tokens)
        self.trainer.optimizer.begin(0)
        seconds, _ = timed(self.device, lambda: self.trainer.accumulate(largest))
        return {
            "micro_batches": len(largest.micro_batches),
            "tokens": sum(len(micro.ids) for micro in largest.micro_batches),
            "seconds": seconds,
            "update": kernels_of(lambda: self.trainer.accumulate(largest), self.device),
            "optimizer": kernels_of(self.trainer.apply, self.device),
        }


def make_rows(requests: Requests, vocabulary: int) -> list[Row]:
    """Return samples in the form that the trainer gets. Their log-probs are those of a uniform distribution, like those of a model with
    random weights."""
    random = np.random.default_rng(requests.seed)
    rows = []
    for (uid, _), tokens in requests.lengths.items():
        prompt = requests.prompts[uid].ids
        mask = np.arange(len(prompt) + tokens) >= len(prompt)
        rows.append(
            Row(
                ids=np.concatenate([prompt, random.integers(0, vocabulary, tokens, dtype=np.int64)]),
                mask=mask,
                group=uid,
                rollout_logprobs=np.where(mask, -math.log(vocabulary), 0.0).astype(np.float32),
                advantages=np.where(mask, random.normal(), 0.0).astype(np.float32),
            )
        )
    return rows


def run(job: BenchJob, say: report.Say) -> dict[str, Any]:
    begin = time.perf_counter()
    say(f"{report.OURS}: loading {job.source.name}")
    with enough_memory(PHASE):
        update = Update(job)
        say(f"warm-up, micro-batches: {len(update.batch.micro_batches)}")
        update.run()
        for repeat in range(job.repeats):
            say(f"repeat {repeat + 1} of {job.repeats}")
            update.run()
        say("kernels")
        kernels = update.kernels()
    return document(job, update) | {"kernels": kernels, **report.origin(job.device), "wall_seconds": time.perf_counter() - begin}


def document(job: BenchJob, update: Update) -> dict[str, Any]:
    warm_up, *seconds = update.seconds
    tokens, batch, memory = sum(update.lengths), update.batch, update.memory[-1]
    needed = update_flops(update.size, update.lengths, batch.trained_tokens)
    by_verl = flops.verl_flops(update.model.config.get_text_config(), update.lengths)
    parameters = sum(parameter.numel() for parameter in update.model.parameters())
    weights = {"layer_weights": update.size.layer_weights, "head_weights": update.size.head_weights}
    kv_bytes = bytes_per_token(update.shapes, update.model.dtype)
    peak = job.nominal("flops")
    budgets, settled = update.worker.plan.budgets, update.worker.plan.words
    return {
        "benchmark": "update",
        "tokens_per_s": tokens / median(seconds),
        "tokens_per_s_best": tokens / min(seconds),
        "tokens_per_s_all": [tokens / taken for taken in seconds],
        "mfu": flops.utilisation(needed.total, median(seconds), peak),
        "mfu_by_verl": flops.utilisation(by_verl, median(seconds), peak),
        "mfu_missing": None if peak else f"the arithmetic of {device_name(job.device)} is not known: give --flops",
        "seconds": seconds,
        "optimizer_seconds": update.optimizer_seconds[1:],
        "warm_up_seconds": warm_up + update.optimizer_seconds[0],
        "batching_seconds": update.batching_seconds,
        "flops": asdict(needed) | {"total": needed.total, "by_verl": by_verl},
        "device_flops": peak,
        "tokens": tokens,
        "trained_tokens": batch.trained_tokens,
        "pad_tokens": sum(micro.pad_tokens for micro in batch.micro_batches),
        "micro_batches": len(batch.micro_batches),
        "largest_micro_batch": max(len(micro.ids) for micro in batch.micro_batches),
        "token_budget": budgets.token_budget,
        "peak_memory_bytes": memory.peak,
        "memory_bytes": {**memory.held.device, **{name: getattr(memory, name) for name in ("activations", "head", "other", "reserved")}},
        "host_memory_bytes": dict(memory.held.host),
        "grad_norm": update.grad_norms[1:],
        "knobs": job.given,
        "settings": asdict(update.worker.plan.roles["actor"]),
        "settled": [text for text in settled if text.startswith("actor:")],
        "layers": update.layers,
        "threads": budgets.threads if update.device.type == "cpu" else None,
        "workload": job.requests[0].describe(),
        "model": report.describe_model(job.source, job.dtype, parameters, kv_bytes_per_token=kv_bytes, **weights),
        "repeats": job.repeats,
    }


# -- for people ---------------------------------------------------------------------------------------------------------------------------


def table(found: dict[str, Any]) -> str:
    asked = found["workload"]
    knobs = ", ".join(f"{key} {value}" for key, value in found["knobs"].items()) or "none given"
    lines = [
        report.headline(found),
        f"workload {asked['name']}: {asked['prompts']} prompts x {asked['samples_per_prompt']} samples, {found['tokens']:,} tokens, "
        f"{found['trained_tokens']:,} of them trained, {found['pad_tokens']:,} pads beside them; "
        f"{many(found['micro_batches'], 'micro-batch')}, the largest of {found['largest_micro_batch']:,} tokens",
        f"knobs: {knobs}; layers: {found['layers']}",
        *found["settled"],
        "",
        *report.aligned(figures(found)),
        "",
        *notes(found),
        "",
        *kernel_lines(found["kernels"]),
    ]
    return "\n".join(lines)


def figures(found: dict[str, Any]) -> list[list[str]]:
    seconds, steps, by_verl = found["seconds"], found["optimizer_seconds"], report.number(found["mfu_by_verl"], ".3f")
    return [
        ["forward and backward", f"{median(seconds):.3f}", f"s, median of {many(len(seconds), 'repeat')}; best {min(seconds):.3f}"],
        ["", report.number(found["tokens_per_s"]), "tokens/s"],
        ["", report.number(found["mfu"], ".3f"), "MFU: each weight once, real lengths, head for trained tokens, no recompute, no pads"],
        ["", by_verl, "MFU by verl's formula (0.7.1, 0.8.0): tied vocabulary twice, head for all tokens"],
        ["optimizer step", f"{median(steps):.3f}", f"s, median; best {min(steps):.3f}"],
    ]


def notes(found: dict[str, Any]) -> list[str]:
    """Return memory by kind, and why figures are missing."""
    held = {"peak": found["peak_memory_bytes"], **found["memory_bytes"]}
    lines = ["memory: " + ", ".join(f"{name} {in_bytes(count)}" for name, count in held.items() if count is not None)]
    if any(found["host_memory_bytes"].values()):
        lines.append("on the host: " + ", ".join(f"{name} {in_bytes(count)}" for name, count in found["host_memory_bytes"].items()))
    return [*lines, f"no MFU: {found['mfu_missing']}"] if found["mfu_missing"] else lines


def kernel_lines(kernels: dict[str, Any]) -> list[str]:
    entries = kernels["update"]
    total = sum(entry["microseconds"] for entry in entries)
    rows = [
        [f"{entry['microseconds'] / total:.1%}", f"{entry['microseconds']:,.0f}", str(entry["calls"]), entry["kernel"][:NAME_WIDTH]]
        for entry in entries[:SHOWN]
    ]
    return [
        f"where the time of {kernels['tokens']:,} tokens goes: {total / 1e6:.3f} s in {len(entries)} kinds of kernels, "
        f"{kernels['seconds']:.3f} s by the clock",
        *report.aligned([["share", "microseconds", "calls", "kernel"], *rows]),
    ]
