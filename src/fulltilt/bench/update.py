"""The benchmark of updates: forward and backward over samples of known lengths, then the optimizer step.

Enters: `Options`. Leaves: one JSON-ready document: tokens/s, the share of the device's arithmetic that forward and backward get, seconds of
the optimizer step, memory by kind, kernels by time, and what is needed to repeat it. Guaranteed: what can be wrong with the options is said
before anything loads; model, batching, loss and optimizer are put together by the functions that put a run together, from a configuration
with the same keys; warm-up is outside the measured passes; the FLOPs are those of bench/flops.py, whatever is recomputed or padded.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from fulltilt import config as configuration
from fulltilt.algo.presets import build
from fulltilt.batching.pack import minibatch
from fulltilt.bench import flops, report, rollout, roofline, shapes
from fulltilt.bench.device import kernels_of, synchronize
from fulltilt.bench.native import NO_TEXT
from fulltilt.bench.workload import Requests
from fulltilt.cluster.assembly import make_worker
from fulltilt.cluster.checks import TextFacts, wrong_settings
from fulltilt.cluster.loading import Fusing, Models
from fulltilt.config import Config
from fulltilt.loop.opening import what_stays
from fulltilt.memory.account import Reading
from fulltilt.model.verify import verify
from fulltilt.records import MiniBatch, Row, UserError
from fulltilt.rollout.runner import bytes_per_token
from fulltilt.words import in_bytes, many

PHASE = "update-actor"
PROFILED = 2  # micro-batches whose kernels are timed one by one: the largest
SHOWN, NAME_WIDTH = 15, 90  # kernels in the table for people, and letters of their names

# Option of the command line -> key of a run's configuration.
KEYS = {
    "--token-budget": "actor.token_budget",
    "--no-packing": "train.packing",
    "--no-fused-layers": "train.fused_layers",
    "--no-fused-head": "train.fused_head",
    "--recompute": "train.recompute",
    "--recompute-layers": "train.recompute_layers",
    "--recompute-method": "train.recompute_method",
    "--offload-activations": "train.offload_activations",
    "--offload-optimizer": "train.offload_optimizer",
    "--offload-grads": "train.offload_grads",
    "--entropy-coef": "algorithm.entropy_coef",
    "--entropy-chunk": "train.entropy_chunk",
    "--no-entropy-recompute": "train.entropy_recompute",
    "--head-recompute": "train.head_recompute",
    "--compile": "train.compile",
}


@dataclass(frozen=True)
class Options:
    """None: as the device has it by default. `knobs`: values by the option's name, as in KEYS; what is left out is as a run has it."""

    model: str | None = None
    device: str | None = None
    workload: str | None = None
    prompts: int | None = None
    samples: int | None = None
    repeats: int | None = None
    seed: int = 0
    flops: float | None = None
    knobs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Job:
    """Options, resolved and found to make sense."""

    asked: rollout.Job  # device, model, samples, repeats: as for the rollout that they would come from
    config: Config
    knobs: Mapping[str, Any]  # those that were given, by the key of a run
    peak: float | None  # FLOP/s of the device


@dataclass(frozen=True)
class Pass:
    """One update, measured."""

    seconds: float  # forward and backward
    optimizer_seconds: float
    memory: Reading  # of the whole update
    grad_norm: float


def prepare(options: Options) -> Job:
    asked = rollout.prepare(
        rollout.Options(
            model=options.model, device=options.device, workload=options.workload, prompts=options.prompts, samples=options.samples,
            repeats=options.repeats, seed=options.seed,
        )
    )  # fmt: skip
    if options.flops is not None and not (math.isfinite(options.flops) and options.flops > 0):
        raise UserError(f"--flops {options.flops}: give a finite number above 0, per second, for example 989e12")
    known = roofline.device_named(rollout.device_name(asked.device))
    return Job(
        asked=asked,
        config=run_config(asked, options.knobs),
        knobs={KEYS[option]: value for option, value in options.knobs.items()},
        peak=options.flops or (known.flops if known else None),
    )


def run_config(asked: rollout.Job, knobs: Mapping[str, Any]) -> Config:
    """The configuration of a run that would make this update; data and reward are never read."""
    workload = asked.requests.workload
    tables: dict[str, dict[str, Any]] = {
        "model": {"path": asked.source.name},
        "data": {"train": "-"},
        # Advantages are drawn, not compared: one sample of a prompt will do, though not for the preset.
        "algorithm": {"name": "grpo", "prompts_per_step": workload.prompts, "samples_per_prompt": max(2, workload.samples)},
        "rollout": {"max_new_tokens": asked.requests.longest_response},
        "run": {"steps": 1, "device": asked.device.type},
        "actor": {},
        "train": {},
    }
    for option, value in knobs.items():
        section, _, name = KEYS[option].partition(".")
        tables[section][name] = value
    try:
        config = Config.model_validate(tables)
    except ValidationError as invalid:
        raise UserError("\n".join(wrong_values(invalid, knobs))) from invalid
    given = {KEYS[option] for option in knobs}
    mistakes = [text for rule in configuration.RULES if given & set(rule.keys) for text in rule.check(config)]
    mistakes += wrong_settings(config, build(config), asked.device.type)
    if mistakes:
        raise UserError("\n".join(in_words_of_options(text) for text in mistakes))
    return config


def wrong_values(invalid: ValidationError, knobs: Mapping[str, Any]) -> list[str]:
    keys = {".".join(str(part) for part in error["loc"][:2]) for error in invalid.errors()}
    legal = {key: configuration.legal_values(known) for key, known in configuration.keys().items()}
    return [
        f"{option} {value}: must be {legal[KEYS[option]]}" if KEYS[option] in legal else f"{option}: this version has no {KEYS[option]}"
        for option, value in knobs.items()
        if KEYS[option] in keys
    ]


def in_words_of_options(text: str) -> str:
    options = {key: option for option, key in KEYS.items()}
    return re.sub(r"\b(?:train|actor|algorithm)\.\w+", lambda found: options.get(found[0], found[0]), text)


class Update:
    """The actor of a run that makes this update, and what it is updated with."""

    def __init__(self, job: Job) -> None:
        asked, config, self.device = job.asked, job.config, job.asked.device
        rows = make_rows(asked.requests, asked.source.vocabulary)
        self.lengths = [row.tokens for row in rows]
        longest = max(self.lengths)
        algorithm, fusing = build(config), Fusing(config, self.device)
        self.model = shapes.ours(asked.source, self.device)
        self.shapes = verify(self.model)
        self.size = model_size(self.model, self.shapes)
        fusing.fuse("actor", self.model)
        models, texts = Models({"actor": self.model}, self.shapes), TextFacts(NO_TEXT, frozenset(), longest, 1)
        unsampled = replace(algorithm, needs=algorithm.needs - {"rollout"})  # its rows are given: no engine takes memory
        worker, _ = make_worker(config, unsampled, self.device, models, texts, fusing, ("actor",))
        self.settings, self.plan = worker.settings["actor"], worker.plan
        self.settled = [text for text in self.plan.words if text.startswith("actor:")]
        self.trainer, self.account = worker.trainers["actor"], worker.account
        self.layers = fusing.words()
        begin = time.perf_counter()
        self.batch = minibatch(rows, algorithm.aggregation, algorithm.length_norm, worker.update_sizes["actor"])
        self.batching_seconds = time.perf_counter() - begin

    def run(self) -> Pass:
        self.trainer.optimizer.begin(0)
        with what_stays(), self.account.phase(PHASE):
            with self.account.passes(self.trainer.role.head_bytes(self.batch.micro_batches, learns=True)):
                seconds = self.timed(lambda: self.trainer.accumulate(self.batch))
            metrics: dict[str, float] = {}
            optimizer_seconds = self.timed(lambda: metrics.update(self.trainer.apply()))
        return Pass(seconds, optimizer_seconds, self.account.take()[PHASE], metrics["actor/grad_norm"])

    def timed(self, work: Callable[[], Any]) -> float:
        synchronize(self.device)
        begin = time.perf_counter()
        work()
        synchronize(self.device)
        return time.perf_counter() - begin

    def kernels(self) -> dict[str, Any]:
        """Where the time goes: of the largest micro-batches, and of an optimizer step with their gradients."""
        largest = MiniBatch(self.batch.micro_batches[:PROFILED], self.batch.trained_tokens)
        self.trainer.optimizer.begin(0)
        seconds = self.timed(lambda: self.trainer.accumulate(largest))
        return {
            "micro_batches": len(largest.micro_batches),
            "tokens": sum(len(micro.ids) for micro in largest.micro_batches),
            "seconds": seconds,
            "update": kernels_of(lambda: self.trainer.accumulate(largest), self.device),
            "optimizer": kernels_of(self.trainer.apply, self.device),
        }


def model_size(model: Any, layers: Mapping[int, Any]) -> flops.ModelSize:
    heads = model.config.get_text_config().num_attention_heads
    attention = tuple(flops.AttentionLayer(heads * shape.head_width, shape.window) for shape in layers.values())
    return flops.ModelSize(*flops.count_weights(model), attention)


def make_rows(requests: Requests, vocabulary: int) -> list[Row]:
    """Samples as the trainer would see them. Their log-probs are those of a model that knows nothing, as one with random weights does."""
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


def run(job: Job, say: report.Say) -> dict[str, Any]:
    begin = time.perf_counter()
    say(f"{report.OURS}: loading {job.asked.source.name}")
    try:
        update = Update(job)
        say(f"warm-up, micro-batches: {len(update.batch.micro_batches)}")
        warm_up = update.run()
        passes = []
        for repeat in range(job.asked.repeats):
            say(f"repeat {repeat + 1} of {job.asked.repeats}")
            passes.append(update.run())
        say("kernels")
        kernels = update.kernels()
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"out of memory: {str(error).splitlines()[0]} Lower --token-budget (a sample that is longer runs alone), or try --recompute "
            "full, --offload-activations or --offload-optimizer"
        ) from error
    return document(job, update, passes) | {
        "warm_up_seconds": warm_up.seconds + warm_up.optimizer_seconds,
        "kernels": kernels,
        **report.origin(job.asked.device),
        "wall_seconds": time.perf_counter() - begin,
    }


def document(job: Job, update: Update, passes: list[Pass]) -> dict[str, Any]:
    seconds = [measured.seconds for measured in passes]
    tokens, batch, last = sum(update.lengths), update.batch, passes[-1]
    needed = flops.update_flops(update.size, update.lengths, batch.trained_tokens)
    by_verl = flops.verl_flops(update.model.config.get_text_config(), update.lengths)
    facts = {
        "parameters": sum(parameter.numel() for parameter in update.model.parameters()),
        "kv_bytes_per_token": bytes_per_token(update.shapes, update.model.dtype),
    }
    return {
        "benchmark": "update",
        "tokens_per_s": tokens / median(seconds),
        "tokens_per_s_best": tokens / min(seconds),
        "tokens_per_s_all": [tokens / taken for taken in seconds],
        "mfu": flops.utilisation(needed.total, median(seconds), job.peak),
        "mfu_by_verl": flops.utilisation(by_verl, median(seconds), job.peak),
        "mfu_missing": None if job.peak else f"the arithmetic of {rollout.device_name(job.asked.device)} is not known: give --flops",
        "seconds": seconds,
        "optimizer_seconds": [measured.optimizer_seconds for measured in passes],
        "batching_seconds": update.batching_seconds,
        "flops": asdict(needed) | {"total": needed.total, "by_verl": by_verl},
        "device_flops": job.peak,
        "tokens": tokens,
        "trained_tokens": batch.trained_tokens,
        "pad_tokens": sum(micro.pad_tokens for micro in batch.micro_batches),
        "micro_batches": len(batch.micro_batches),
        "largest_micro_batch": max(len(micro.ids) for micro in batch.micro_batches),
        "token_budget": update.plan.budgets.token_budget,
        "peak_memory_bytes": last.memory.peak,
        "memory_bytes": {
            **last.memory.held.device,
            **{name: getattr(last.memory, name) for name in ("activations", "head", "other", "reserved")},
        },
        "host_memory_bytes": dict(last.memory.held.host),
        "grad_norm": [measured.grad_norm for measured in passes],
        "knobs": dict(job.knobs),
        "settings": asdict(update.settings),
        "settled": update.settled,
        "layers": update.layers,
        "threads": update.plan.budgets.threads if update.device.type == "cpu" else None,
        "workload": job.asked.requests.describe(),
        "model": rollout.describe_model(job.asked, facts)
        | {"layer_weights": update.size.layer_weights, "head_weights": update.size.head_weights},
        "repeats": job.asked.repeats,
    }


# -- for people ---------------------------------------------------------------------------------------------------------------------------


def table(found: dict[str, Any]) -> str:
    model, asked = found["model"], found["workload"]
    knobs = ", ".join(f"{key} {value}" for key, value in found["knobs"].items()) or "none given"
    lines = [
        f"{model['name']}: {model['parameters'] / 1e6:.1f} million parameters, {model['dtype']}, on "
        f"{found['hardware'].get('gpu') or found['hardware']['cpu']}",
        f"workload {asked['name']}: {asked['prompts']} prompts x {asked['samples_per_prompt']} samples, {found['tokens']:,} tokens, "
        f"{found['trained_tokens']:,} of them trained, {found['pad_tokens']:,} pads beside them; {found['micro_batches']} micro-batches, "
        f"the largest of {found['largest_micro_batch']:,} tokens",
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
    seconds, steps = found["seconds"], found["optimizer_seconds"]

    def share(name: str) -> str:
        return f"{found[name]:.3f}" if found[name] is not None else "-"

    return [
        ["forward and backward", f"{median(seconds):.3f}", f"s, median of {many(len(seconds), 'repeat')}; best {min(seconds):.3f}"],
        ["", report.whole(found["tokens_per_s"]), "tokens/s"],
        ["", share("mfu"), "MFU: each weight once, real lengths, head for trained tokens, no recompute, no pads"],
        ["", share("mfu_by_verl"), "MFU by verl's formula (0.7.1, 0.8.0): a tied vocabulary twice, head for all tokens"],
        ["optimizer step", f"{median(steps):.3f}", f"s, median; best {min(steps):.3f}"],
    ]


def notes(found: dict[str, Any]) -> list[str]:
    """Memory by kind, and what there is to know of figures that are missing."""
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
