"""The benchmark of whole steps: a GRPO step of ours and of its peer, on the same prompts with the same lengths, in one run.

Enters: `Options`. Leaves: one JSON-ready document: seconds of a step and of its phases, peak memory, how many times faster ours is, and
what is needed to repeat it; `table` makes it readable. Guaranteed: what can be wrong with the options is said before anything is measured,
our run's own settings before anything but small files is made; both read one model folder, one file of prompts and one reward; every
response has the same number of tokens and nobody stops earlier; steps that warm up are reported apart; the peer has the device to itself,
but for this process's context.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import Qwen2Tokenizer
from transformers.utils import logging as transformers_logging

from fulltilt import config as configuration
from fulltilt import knobs
from fulltilt.algo import presets
from fulltilt.bench import report, shapes, trl
from fulltilt.bench.device import synchronize
from fulltilt.bench.report import OURS, Say, origin
from fulltilt.bench.rollout import DTYPES, choose_device, let_go
from fulltilt.bench.trl import WARM_UP, Steps
from fulltilt.bench.workload import Even, Requests, Workload, make_requests
from fulltilt.cluster.assembly import RunParts, assemble
from fulltilt.config import Config
from fulltilt.loop.opening import what_stays
from fulltilt.loop.run import Progress, Run
from fulltilt.observe.console import Console
from fulltilt.observe.loggers import open_loggers
from fulltilt.observe.metrics import TIMING_NAMES
from fulltilt.records import UserError
from fulltilt.rollout.engines.native import NativeEngine
from fulltilt.train.checkpoint import CheckpointStore
from fulltilt.words import many

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("step", 64, 8, Even(128, 256), Even(512, 512)),
        # An eighth of every number but the group's: what two cores do in seconds.
        Workload("small", 8, 8, Even(16, 32), Even(64, 64)),
    )
}
DEFAULT = {"cuda": "step", "cpu": "small"}
STEPS = {"cuda": 3, "cpu": 2}
GIB = 2**30

END = "<|endoftext|>"  # pads, too
FIRST_WORD = 0x40000  # of the planes that Unicode has assigned to nothing
REWARD = '''"""A number from 0 to 1 that hangs on the whole text and not on its length."""
import zlib


def score(solution_str):
    return zlib.crc32(solution_str.encode()) / 2**32
'''

HEAD = ["", "s a step", "rollout", "the rest", "first step", "tokens/s", "peak GiB", "on the device", "setting"]


@dataclass(frozen=True)
class Options:
    """None: as the device has it by default."""

    model: str | None = None
    against: tuple[str, ...] = ()
    device: str | None = None
    workload: str | None = None
    prompts: int | None = None
    samples: int | None = None
    new_tokens: int | None = None
    steps: int | None = None  # measured, after the warm-up
    seed: int = 0
    settings: tuple[str, ...] = ()  # KEY=VALUE: knobs of our run
    trl: tuple[str, ...] = ()  # NAME=VALUE,VALUE: what is tried of TRL's arguments
    generation: str | None = None  # what TRL generates with


@dataclass(frozen=True, eq=False)
class Job:
    """Options, resolved and found to make sense."""

    device: torch.device
    source: shapes.Source
    workload: Workload
    against: tuple[str, ...]
    steps: int
    seed: int
    settings: tuple[str, ...]
    axes: trl.Axes
    generation: str

    @cached_property
    def language(self) -> Language:
        return make_language(self.source.vocabulary)

    @cached_property
    def requests(self) -> tuple[Requests, ...]:
        """Of every step, the warm-up's too: other prompts and as many tokens in each."""
        return tuple(make_requests(self.workload, len(self.language.words), self.seed + step) for step in range(WARM_UP + self.steps))

    @property
    def new_tokens(self) -> int:
        return self.workload.response_tokens.high

    @property
    def samples(self) -> int:
        return self.workload.prompts * self.workload.samples

    @property
    def longest_prompt(self) -> int:
        return max(requests.longest_prompt for requests in self.requests)

    @property
    def step_tokens(self) -> tuple[int, ...]:
        """Of each step: prompts, once for every sample, and responses."""
        return tuple(
            requests.tokens + self.workload.samples * sum(len(prompt.ids) for prompt in requests.prompts) for requests in self.requests
        )


# -- before anything runs -----------------------------------------------------------------------------------------------------------------


def prepare(options: Options) -> Job:
    device = choose_device(options.device)
    generation = options.generation or trl.BY_DEVICE[device.type]
    against = trl.check_peers(options.against, generation, device.type, {"--trl": options.trl, "--generation": options.generation})
    if (options.model or shapes.DEFAULT[device.type]) not in shapes.SHAPES:
        raise UserError(
            f"--model {options.model}: a step is measured on a named shape ({', '.join(shapes.SHAPES)}), whose tokenizer is made so that "
            "both sides read the same tokens"
        )
    name = options.workload or DEFAULT[device.type]
    if name not in WORKLOADS:
        raise UserError(f"--workload {name}: there are {', '.join(WORKLOADS)}")
    workload = resized(WORKLOADS[name], options)
    if workload.samples < 2:
        raise UserError(f"--samples {workload.samples}: GRPO compares the samples of a prompt. Use 2 or more")
    check_knobs(options.settings)
    return Job(
        device=device,
        source=shapes.find(options.model or shapes.DEFAULT[device.type]),
        workload=workload,
        against=against,
        steps=options.steps or STEPS[device.type],
        seed=options.seed,
        settings=options.settings,
        axes=trl.axes(options.trl, workload.prompts * workload.samples, device.type, generation),
        generation=generation,
    )


def resized(workload: Workload, options: Options) -> Workload:
    tokens = options.new_tokens or workload.response_tokens.high
    return replace(
        workload,
        prompts=options.prompts or workload.prompts,
        samples=options.samples or workload.samples,
        response_tokens=Even(tokens, tokens),
    )


def check_knobs(settings: Sequence[str]) -> None:
    """What our run executes may be set; what it computes is the workload's."""
    for setting in settings:
        key, equals, _ = setting.partition("=")
        found = knobs.find(key.strip())
        if not equals or not found or found[0].name.startswith("algorithm."):
            raise UserError(
                f"{setting}: not a knob of our run. Write KEY=VALUE, for example actor.token_budget=32768; `fulltilt knobs` lists them, "
                "those under algorithm belong to the workload"
            )


# -- what both read -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Files:
    """A model folder with weights and a tokenizer, a file of prompts, a file with a reward."""

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def prompts(self) -> Path:
        return self.folder / "prompts.jsonl"

    @property
    def reward(self) -> Path:
        return self.folder / "reward.py"


def write_small_files(job: Job, files: Files) -> None:
    """All but the weights."""
    shapes.write_config(job.source, job.device, files.model)
    job.language.tokenizer().save_pretrained(files.model)
    files.prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompt_texts(job)), encoding="utf-8")
    files.reward.write_text(REWARD, encoding="utf-8")


def write_weights(job: Job, files: Files) -> int:
    """How many parameters there are."""
    transformers_logging.disable_progress_bar()
    model = shapes.random_model(job.source, job.device, "sdpa")
    model.save_pretrained(files.model)
    return sum(parameter.numel() for parameter in model.parameters())


@dataclass(frozen=True)
class Language:
    """A tokenizer's tokens, and the words that prompts are made of, each of which is one token."""

    tokens: Mapping[str, int]
    merges: tuple[tuple[str, str], ...]
    words: tuple[str, ...]

    def tokenizer(self) -> Qwen2Tokenizer:
        return Qwen2Tokenizer(vocab=dict(self.tokens), merges=list(self.merges))


def make_language(vocabulary: int) -> Language:
    """Of byte pairs, as transformers expects it beside a Qwen2 model, with as many tokens as the model. A word is one character of four
    bytes that no text has; its first two and three bytes are tokens too, from which it is merged."""
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens, merges, words = {END: 0}, list[tuple[str, str]](), list[str]()
    for word in map(chr, itertools.count(FIRST_WORD)):
        ((spelled, _),) = spelling.pre_tokenize_str(word)
        for piece in (*spelled, spelled[:2], spelled[:3], spelled):
            if piece in tokens:
                continue
            if len(tokens) == vocabulary:
                return Language(tokens, tuple(merges), tuple(words))
            tokens[piece] = len(tokens)
            merges += [(piece[:-1], piece[-1])] if len(piece) > 1 else []
        words.append(word)
    raise AssertionError("there are more characters than a vocabulary has tokens")


def prompt_texts(job: Job) -> tuple[str, ...]:
    words = job.language.words
    return tuple("".join(words[number] for number in prompt.ids.tolist()) for requests in job.requests for prompt in requests.prompts)


# -- ours ---------------------------------------------------------------------------------------------------------------------------------


def run_config(job: Job, files: Files) -> Config:
    """The run whose steps are measured. Its knobs are as a run has them, unless they were given."""
    tables = {
        "model": {"path": str(files.model)},
        "data": {"train": str(files.prompts), "max_prompt_tokens": job.longest_prompt, "shuffle": False},
        "algorithm": {"name": "grpo", "prompts_per_step": job.workload.prompts, "samples_per_prompt": job.workload.samples},
        "rollout": {"max_new_tokens": job.new_tokens},
        "reward": {"function": f"{files.reward}:score"},
        "run": {
            "dir": str(files.folder / "run"),
            "steps": len(job.requests),
            "seed": job.seed,
            "device": job.device.type,
        },
    }
    return configuration.parse(tables, job.settings, "fulltilt bench step", [presets.mistakes])


def measure_ours(job: Job, config: Config, say: Say) -> Steps:
    """Steps of a run, without the checkpoint at its end."""
    say(f"{OURS}: loading {job.source.name}")
    begin = time.perf_counter()
    parts = assemble(config)
    started = time.perf_counter() - begin
    try:
        engine = force_lengths(job, parts)
        console = Console(quiet=True, stdout=sys.stderr, terminal=False)
        folder = Path(config.run.dir)
        with open_loggers(config.log, folder, configuration.snapshot(config), 0, console.warn) as loggers, what_stays():
            run = Run(config, parts, CheckpointStore(folder / "checkpoints", config.run.keep), Progress(), console, loggers)
            if job.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(job.device)
            made = [one_step(job, run, step, say) for step in range(1, parts.plan.steps + 1)]
        # From the account, which resets torch's own peaks at every phase.
        allocated, reserved = parts.worker.account.peak_bytes, parts.worker.account.peak_reserved_bytes
        in_use = trl.peak_in_use(reserved) if reserved is not None else None
        decoder, plan = engine.decoder, list(parts.plan.words)
        details = {"plan": plan, "captures": decoder.captures, "eager_reason": decoder.eager_reason}
        return summary(job, made, Steps({}, start_seconds=started, peak_bytes=allocated, peak_device_bytes=in_use, details=details))
    finally:
        parts.close()


def force_lengths(job: Job, parts: RunParts) -> NativeEngine:
    """Every response gets its number of tokens, whatever they are; the scheduler learns it when it is reached."""
    engine = parts.worker.engine
    assert isinstance(engine, NativeEngine)
    lengths = {
        (uid, index): job.new_tokens for uid in range(len(job.requests) * job.workload.prompts) for index in range(job.workload.samples)
    }
    engine.generate = partial(engine.generate, lengths=lengths)  # type: ignore[method-assign]
    return engine


@dataclass(frozen=True)
class OneStep:
    seconds: float
    metrics: Mapping[str, float]


def one_step(job: Job, run: Run, step: int, say: Say) -> OneStep:
    """Seconds from the prompts to the last kernel of the update."""
    say(f"{OURS}: step {step} of {run.parts.plan.steps}")
    synchronize(job.device)
    begin = time.perf_counter()
    run.console.begin_step(step)
    metrics = run.rl_step(step)
    synchronize(job.device)
    seconds = time.perf_counter() - begin
    assert metrics["response_length/min"] == metrics["response_length/max"] == job.new_tokens
    assert metrics["perf/total_num_tokens"] == job.step_tokens[step - 1]
    assert metrics["reward/errors"] == 0
    return OneStep(seconds, metrics)


def summary(job: Job, made: Sequence[OneStep], known: Steps) -> Steps:
    measured = made[WARM_UP:]
    return replace(
        known,
        setting=dict(setting.split("=", 1) for setting in job.settings),
        seconds=tuple(step.seconds for step in measured),
        rollout_seconds=tuple(step.metrics["timing_s/gen"] for step in measured),
        first_seconds=made[0].seconds,
        details={
            **known.details,
            "phases": dict(phases([step.metrics for step in measured])),
            "grad_norms": [step.metrics["actor/grad_norm"] for step in made],
            "metrics": dict(measured[-1].metrics),
        },
    )


def phases(metrics: Sequence[Mapping[str, float]]) -> Iterator[tuple[str, float]]:
    """The median of each phase's seconds."""
    for phase, name in TIMING_NAMES.items():
        times = [line[f"timing_s/{name}"] for line in metrics if f"timing_s/{name}" in line]
        if times:
            yield phase, median(times)


# -- both ---------------------------------------------------------------------------------------------------------------------------------


def run(job: Job, say: Say) -> dict[str, Any]:
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="fulltilt-bench-") as folder:
        files = Files(Path(folder))
        write_small_files(job, files)
        config = run_config(job, files)
        say(f"making {job.source.name} with random weights")
        parameters = write_weights(job, files)
        let_go(job.device)
        found = {OURS: [measure_ours(job, config, say)]}
        if "trl" in job.against:  # last: its starts take minutes, which must not be lost to a failure of ours
            found["trl"] = trl.measure(task(job, files), job.axes, Path(folder), let_go(job.device), say)
    return document(job, found, parameters) | {"seconds": time.perf_counter() - begin}


def task(job: Job, files: Files) -> trl.Task:
    return trl.Task(
        model=files.model,
        prompts=prompt_texts(job),
        reward=files.reward,
        prompts_per_step=job.workload.prompts,
        samples_per_prompt=job.workload.samples,
        response_tokens=job.new_tokens,
        positions=job.longest_prompt + job.new_tokens,
        step_tokens=job.step_tokens,
        seed=job.seed,
        device=job.device.type,
        generation=job.generation,
    )


def document(job: Job, found: Mapping[str, Sequence[Steps]], parameters: int) -> dict[str, Any]:
    tokens = job.step_tokens[-1]
    best = {name: trl.fastest(tried) for name, tried in found.items()}
    failed = Steps({}, error="no setting worked")
    engines = {
        name: of_best(best[name] or failed, tokens) | {"all_settings": [steps.as_json(tokens) for steps in tried]}
        for name, tried in found.items()
    }
    ratios = {name: ratio(best[OURS], best[name]) for name in job.against}
    repeat = origin(job.device)
    return {
        "benchmark": "step",
        "ratio": next(iter(ratios.values()), None),
        "ratios": ratios,
        "memory_ratios": {name: memory_ratio(best[OURS], best[name]) for name in job.against},
        "compared_by": "median seconds of a step",
        "engines": engines,
        "generation": {name: job.generation for name in job.against},
        "workload": job.requests[0].describe() | {"tokens_of_a_step": tokens},
        "model": describe_model(job, parameters),
        "steps": {"measured": job.steps, "warm_up": WARM_UP},
        **repeat,
        "versions": repeat["versions"] | (report.packages(trl.PACKAGES) if "trl" in job.against else {}),
    }


def of_best(steps: Steps, tokens: int) -> dict[str, Any]:
    return steps.as_json(tokens) | dict(steps.details)


def ratio(ours: Steps | None, theirs: Steps | None) -> float | None:
    """How many times faster our step is than the peer's at its best setting."""
    medians = [steps.median if steps else None for steps in (ours, theirs)]
    return medians[1] / medians[0] if medians[0] and medians[1] else None


def memory_ratio(ours: Steps | None, theirs: Steps | None) -> float | None:
    """How many times as much of the device the peer's fastest setting had in use."""
    peaks = [steps.peak_device_bytes if steps else None for steps in (ours, theirs)]
    return peaks[1] / peaks[0] if peaks[0] and peaks[1] else None


def describe_model(job: Job, parameters: int) -> dict[str, Any]:
    text = job.source.config.get_text_config()
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size", "tie_word_embeddings")
    return {
        "name": job.source.name,
        "weights": "random",
        "dtype": DTYPES[job.device.type],
        "parameters": parameters,
        **{name: getattr(text, name, None) for name in names},
    }


# -- for people ---------------------------------------------------------------------------------------------------------------------------


def table(found: Mapping[str, Any]) -> str:
    """The document for people."""
    model, asked = found["model"], found["workload"]
    prompts, responses = asked["prompt_tokens"], asked["response_tokens"]
    ours = found["engines"][OURS]
    lines = [
        f"{model['name']}: {model['parameters'] / 1e6:.1f} million parameters, on "
        f"{found['hardware'].get('gpu') or found['hardware']['cpu']}",
        f"a GRPO step of {asked['prompts']} prompts x {asked['samples_per_prompt']} samples, prompts of {prompts['mean']:.0f} tokens on "
        f"average, every response {responses['largest']}; one optimizer step",
        "",
        *report.aligned([HEAD, *(row(name, engine) for name, engine in found["engines"].items())]),
        "",
        f"medians of {many(found['steps']['measured'], 'step')} after the first; ours by phase: "
        + ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in ours["phases"].items()),
    ]
    for name, times in found["ratios"].items():
        lines.append(f"a step of {OURS} is {times:.2f} times as fast as {name}'s" if times else f"{name} gave no figure to compare with")
    for name, times in found["memory_ratios"].items():
        lines += [f"{name} had {times:.2f} times as much memory of the device in use"] if times else []
    if reason := ours["eager_reason"]:
        lines.append(f"{OURS} gave CUDA graphs up and decoded without them, slower: {reason}")
    return "\n".join([*lines, *report.failures(dict(found))])


def row(name: str, engine: Mapping[str, Any]) -> list[str]:
    typical, rollout, first = (engine[key] for key in ("step_seconds", "rollout_seconds", "first_step_seconds"))
    return [
        name,
        *(seconds(value) for value in (typical, rollout, typical - rollout if typical and rollout else None, first)),
        report.whole(engine["tokens_per_s"]),
        *("-" if engine[key] is None else f"{engine[key] / GIB:.1f}" for key in ("peak_memory_bytes", "peak_device_bytes")),
        report.words(engine["setting"]),
    ]


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
