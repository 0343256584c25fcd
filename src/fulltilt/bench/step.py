"""The benchmark of whole steps: GRPO steps of fulltilt and of TRL, on the same prompts with the same lengths, in one run.

Enters: `BenchOptions`. Leaves: one JSON-ready document: seconds of a step and of its phases, peak memory, how many times faster fulltilt
is, and what is needed to repeat it; `table` makes it readable. Guaranteed: mistakes are reported before weights are made; both systems read
one model folder, one file of prompts and one reward; every response has the same number of tokens and none stops earlier; warm-up steps are
reported separately; TRL has the device to itself, except for this process's context.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import Qwen2Tokenizer
from transformers.utils import logging as transformers_logging

from fulltilt.bench import peers, report, shapes
from fulltilt.bench.device import let_go, peak_in_use, timed
from fulltilt.bench.figures import StepTiming, fastest
from fulltilt.bench.job import BenchJob, resolve
from fulltilt.bench.options import BenchOptions
from fulltilt.bench.report import OURS, Say
from fulltilt.bench.workload import STEP_WORKLOADS
from fulltilt.cluster.assembly import RunParts, assemble
from fulltilt.loop.opening import Foreseen, foreseen, freeze_existing_objects, prober_for
from fulltilt.loop.run import Progress, Run
from fulltilt.observe.console import Console
from fulltilt.observe.loggers import Loggers
from fulltilt.observe.metrics import TIMING_NAMES
from fulltilt.records import UserError
from fulltilt.rollout.engines.native import NativeEngine
from fulltilt.training.checkpoint import CheckpointStore
from fulltilt.words import many

STEPS = {"cuda": 3, "cpu": 2}
WARM_UP = 1  # steps that are reported separately: captures, compilation, first allocations
SETTINGS = ("rollout.", "train.", "actor.", "run.probe")
GIB = 2**30
END = "<|endoftext|>"  # also the padding token
FIRST_WORD = 0x40000  # a character in the planes of Unicode that are not assigned


def prepare(options: BenchOptions, scratch: Path) -> BenchJob:
    if options.model not in (None, *shapes.SHAPES):
        raise UserError(
            f"--model {options.model}: a step is measured on a named shape ({', '.join(shapes.SHAPES)}), whose tokenizer is made so that "
            "both sides read the same tokens"
        )
    if options.samples == 1:
        raise UserError("--samples 1: GRPO compares the samples of a prompt. Use 2 or more")
    job = resolve(
        options, scratch, SETTINGS, ("trl",), workloads=STEP_WORKLOADS, repeats=STEPS, warm_up=WARM_UP,
        make_words=lambda vocabulary: make_language(vocabulary)[0],
    )  # fmt: skip
    _, tokens, merges = make_language(job.source.vocabulary)
    Qwen2Tokenizer(vocab=tokens, merges=merges).save_pretrained(scratch / "model")
    if "trl" in options.peers:
        peers.load("peer_trl").axes(job)  # reports mistakes
    return job


def step_tokens(job: BenchJob) -> tuple[int, ...]:
    """Return the tokens of each step: prompts, once for every sample, and responses."""
    samples = job.requests[0].workload.samples
    return tuple(requests.tokens + samples * sum(len(prompt.ids) for prompt in requests.prompts) for requests in job.requests)


@cache
def make_language(vocabulary: int) -> tuple[list[str], dict[str, int], list[tuple[str, str]]]:
    """Return the words that prompts are made of, each of which is one token, and the tokens and merges of their tokenizer: byte pairs, as
    transformers expects them beside a Qwen2 model, as many tokens as the model has. A word is one character of four bytes that no text has;
    its first two and three bytes are tokens too, from which it is merged."""
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words, tokens, merges = list[str](), {END: 0}, list[tuple[str, str]]()
    for word in map(chr, itertools.count(FIRST_WORD)):
        ((spelled, _),) = spelling.pre_tokenize_str(word)
        for piece in (*spelled, spelled[:2], spelled[:3], spelled):
            if piece in tokens:
                continue
            if len(tokens) == vocabulary:
                return words, tokens, merges
            tokens[piece] = len(tokens)
            merges += [(piece[:-1], piece[-1])] if len(piece) > 1 else []
        words.append(word)
    raise AssertionError("there are more characters than a vocabulary has tokens")


# -- ours ---------------------------------------------------------------------------------------------------------------------------------


def measure_ours(job: BenchJob, say: Say) -> StepTiming:
    """Measure the steps of a run, without the checkpoint at its end."""
    say(f"{OURS}: loading {job.source.name}")
    config, begin = job.config, time.perf_counter()
    parts = assemble(config, probe=prober_for(config))
    started = time.perf_counter() - begin
    try:
        decoder, predictions = force_lengths(job, parts).decoder, foreseen(config, parts)
        for text in predictions.words:
            say(text)
        seconds, metrics = zip(*make_steps(job, parts, predictions, say), strict=True)
        # From the account, which resets torch's own peaks at every phase.
        allocated, reserved = parts.worker.account.peak_bytes, parts.worker.account.peak_reserved_bytes
        return StepTiming(
            setting=dict(setting.split("=", 1) for setting in job.options.overrides),
            seconds=seconds[WARM_UP:],
            rollout_seconds=tuple(line["timing_s/gen"] for line in metrics[WARM_UP:]),
            first_step_seconds=seconds[0],
            peak_memory_bytes=allocated,
            peak_device_bytes=peak_in_use(reserved) if reserved is not None else None,
            start_seconds=started,
            details={
                "plan": list(parts.plan.words),
                "captures": decoder.captures,
                "eager_reason": decoder.eager_reason,
                "phases": {
                    phase: median(times)
                    for phase, name in TIMING_NAMES.items()
                    if (times := [line[f"timing_s/{name}"] for line in metrics[WARM_UP:] if f"timing_s/{name}" in line])
                },
                "grad_norms": [line["actor/grad_norm"] for line in metrics],
                "metrics": dict(metrics[-1]),
                "metrics_of_steps": [dict(line) for line in metrics[WARM_UP:]],
                "description": predictions.predictor.description if predictions.predictor else None,
                "probed": asdict(parts.crew.probed),
            },
        )
    finally:
        parts.close()


def make_steps(job: BenchJob, parts: RunParts, predictions: Foreseen, say: Say) -> list[tuple[float, Mapping[str, float]]]:
    """Return the seconds and metrics of each step, with the run's predictions for them."""
    config, folder, console = job.config, Path(job.config.run.dir), Console(quiet=True, stdout=sys.stderr, terminal=False)
    run = Run(config, parts, CheckpointStore(folder / "checkpoints", config.run.keep), Progress(), console, Loggers(console.warn))
    with freeze_existing_objects():
        if job.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(job.device)
        steps = [one_step(job, run, step, say) for step in range(1, parts.plan.steps + 1)]
    predicted = predictions.predictor.metrics if predictions.predictor else lambda line: {}
    return [(seconds, {**line, **predicted(line)}) for seconds, line in steps]


def force_lengths(job: BenchJob, parts: RunParts) -> NativeEngine:
    """Let the engine give every response its number of tokens, whatever the tokens are; the scheduler learns the length when it is
    reached."""
    engine = parts.worker.engine
    assert isinstance(engine, NativeEngine)
    workload = job.requests[0].workload
    lengths = {
        (uid, index): job.requests[0].longest_response
        for uid in range(len(job.requests) * workload.prompts)
        for index in range(workload.samples)
    }
    engine.generate = partial(engine.generate, lengths=lengths)  # type: ignore[method-assign]
    return engine


def one_step(job: BenchJob, run: Run, step: int, say: Say) -> tuple[float, Mapping[str, float]]:
    """Return the seconds from the prompts to the last kernel of the update, and metrics."""
    say(f"{OURS}: step {step} of {run.parts.plan.steps}")
    run.console.begin_step(step)
    seconds, metrics = timed(job.device, lambda: run.rl_step(step))
    assert metrics["response_length/min"] == metrics["response_length/max"] == job.requests[0].longest_response
    assert metrics["perf/total_num_tokens"] == step_tokens(job)[step - 1]
    assert metrics["reward/errors"] == 0
    return seconds, metrics


# -- both ---------------------------------------------------------------------------------------------------------------------------------


def run(job: BenchJob, say: Say) -> dict[str, Any]:
    begin = time.perf_counter()
    parameters = write_model(job, say)
    found = {OURS: [measure_ours(job, say)]}
    if "trl" in job.options.peers:  # last: its starts take minutes, which must not be lost if fulltilt fails
        trl, held = peers.load("peer_trl"), let_go(job.device)
        task = trl.TrlTask(job, job.scratch / "trl", response_tokens=job.requests[0].longest_response, held_by_others=held or 0)
        found["trl"] = trl.measure_steps(task, say)
    return document(job, found, parameters) | {"seconds": time.perf_counter() - begin}


def write_model(job: BenchJob, say: Say) -> int:
    """Write the model that all systems and settings read. Returns its number of parameters."""
    say(f"making {job.source.name} with random weights")
    transformers_logging.disable_progress_bar()
    model = shapes.random_model(job.source, job.device, "sdpa")
    model.save_pretrained(job.config.model.path)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    del model
    let_go(job.device)
    return parameters


def document(job: BenchJob, found: Mapping[str, Sequence[StepTiming]], parameters: int) -> dict[str, Any]:
    tokens = step_tokens(job)[-1]
    best = {name: fastest(tried) or StepTiming({}, error="no setting worked") for name, tried in found.items()}
    engines = {
        name: best[name].as_json(tokens) | dict(best[name].details) | {"all_settings": [steps.as_json(tokens) for steps in tried]}
        for name, tried in found.items()
    }
    ratios = {name: times(best[name].median, best[OURS].median) for name in job.options.peers}
    return {
        "benchmark": "step",
        "ratio": next(iter(ratios.values()), None),
        "ratios": ratios,
        "memory_ratios": {name: times(best[name].peak_device_bytes, best[OURS].peak_device_bytes) for name in ratios},
        "compared_by": "median seconds of a step",
        "engines": engines,
        "generation": {name: job.generation for name in ratios},
        "workload": job.requests[0].describe() | {"tokens_of_a_step": tokens},
        "model": report.describe_model(job.source, job.dtype, parameters),
        "steps": {"measured": job.repeats, "warm_up": WARM_UP},
        **report.origin(job.device),
    }


def times(theirs: float | None, ours: float | None) -> float | None:
    """Return how many times as long the peer takes as fulltilt."""
    return theirs / ours if theirs and ours else None


# -- for people ---------------------------------------------------------------------------------------------------------------------------


def table(found: Mapping[str, Any]) -> str:
    """Write the document for people."""
    asked = found["workload"]
    prompts, responses = asked["prompt_tokens"], asked["response_tokens"]
    lines = [
        report.headline(found),
        f"a GRPO step of {asked['prompts']} prompts x {asked['samples_per_prompt']} samples, prompts of {prompts['mean']:.0f} tokens on "
        f"average, every response {responses['largest']}; one optimizer step",
        "",
        *report.table_of("", {name: cells(engine) for name, engine in found["engines"].items()}),
        "",
        f"medians of {many(found['steps']['measured'], 'step')} after the first; ours by phase: "
        + ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in found["engines"][OURS]["phases"].items()),
    ]
    lines += report.comparison(found["ratios"], f"a step of {OURS} is {{ratio:.2f}} times as fast as {{name}}'s")
    lines += [
        f"{name} had {ratio:.2f} times as much memory of the device in use" for name, ratio in found["memory_ratios"].items() if ratio
    ]
    return "\n".join([*lines, *report.troubles(found["engines"])])


def cells(engine: Mapping[str, Any]) -> dict[str, str]:
    typical, rollout, peak, in_use = (engine[key] for key in ("step_seconds", "rollout_seconds", "peak_memory_bytes", "peak_device_bytes"))
    return {
        "s a step": report.number(typical, ".2f"),
        "rollout": report.number(rollout, ".2f"),
        "the rest": report.number(typical - rollout if typical and rollout else None, ".2f"),
        "first step": report.number(engine["first_step_seconds"], ".2f"),
        "tokens/s": report.number(engine["tokens_per_s"]),
        "peak GiB": report.number(peak and peak / GIB, ".1f"),
        "on the device": report.number(in_use and in_use / GIB, ".1f"),
        "setting": report.words(engine["setting"]),
    }
