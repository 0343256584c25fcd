"""The benchmark of rollouts: our engine and its peers on the same requests, in one run.

Enters: `BenchOptions`. Leaves: one JSON-ready document: absolute figures of every engine, how many times faster ours is, what share of the
roofline each reaches, how closely engine and trainer agree, and what is needed to repeat it. Guaranteed: mistakes are reported before
anything is measured; warm-up is outside the measured passes; in-process engines take turns, so that a slow moment of the computer does not
fall on one of them; vLLM has the device to itself, except for this process's context and its own other starts, which wait.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fulltilt.bench import peers, report, roofline, shapes
from fulltilt.bench.device import choose_device, device_name, let_go
from fulltilt.bench.figures import Measured, Timing
from fulltilt.bench.job import BenchJob, BenchOptions, check_peers, resolve
from fulltilt.bench.native import NO_TEXT, Native, generate_all
from fulltilt.bench.report import OURS, Say
from fulltilt.bench.workload import WORKLOADS, Requests
from fulltilt.cluster.sizes import THREADS, free_bytes
from fulltilt.plan import KV_SHARE
from fulltilt.records import UserError
from fulltilt.rollout.engines.hf import HfEngine
from fulltilt.rollout.sampler import Sampling
from fulltilt.words import many

PEERS = ("vllm", "hf")
SETTINGS = ("rollout.", "train.fused_layers", "train.compile")
HEAD = ["engine", "tokens/s", "best", "without log-probs", "ms/token", "of roofline", "setting"]
REPEATS = {"cuda": 2, "cpu": 3}  # a CPU is shared with whatever else runs there
CUTS = (1, 2, 4)  # batches that the workload is cut into for transformers, each of which is tried


def prepare(options: BenchOptions, scratch: Path) -> BenchJob:
    device = choose_device(options.device)
    check_peers(options, PEERS, device)
    job = resolve(options, scratch, workloads=WORKLOADS, repeats=REPEATS, settings=SETTINGS)
    missing = [option for option, value in (("--bandwidth", options.bandwidth), ("--flops", options.flops)) if value is None]
    if len(missing) == 1 and roofline.device_named(device_name(device)) is None:
        raise UserError(
            f"--bandwidth and --flops: {missing[0]} is missing, and it is not known for {device_name(device)}. Give both, or neither for "
            "a result without a roofline"
        )
    return job


def run(job: BenchJob, say: Say) -> dict[str, Any]:
    begin = time.perf_counter()
    ours, others, facts = in_turns(job, say)
    if "vllm" in job.against:  # last: its starts take minutes, which must not be lost to a failure of ours
        others["vllm"] = against_vllm(job, facts, say)
    return document(job, {OURS: ours} | {name: others[name] for name in job.against}, facts) | {"seconds": time.perf_counter() - begin}


def against_vllm(job: BenchJob, facts: dict[str, Any], say: Say) -> Measured:
    vllm, held, memory = peers.load("vllm"), let_go(job.device), None
    if job.device.type == "cuda":
        beside = vllm.BESIDE + 2 * facts["parameters"]
        memory = vllm.VllmMemory(torch.cuda.mem_get_info(job.device)[0], beside, facts["kv_bytes_per_token"])
    measured: Measured = vllm.measure(
        job.requests[0], Path(job.config.model.path).resolve(), job.scratch, dummy_weights=job.source.folder is None,
        device=job.device.type, dtype=job.dtype, kv_bytes=job.kv_bytes, memory=memory, repeats=job.repeats,
        grid=job.options.vllm_grid or vllm.GRID, say=say,
    )  # fmt: skip
    return replace(measured, details={**measured.details, "device_bytes_held_by_others": held})


def in_turns(job: BenchJob, say: Say) -> tuple[Measured, dict[str, Measured], dict[str, Any]]:
    """Ours, the peers that run in this process, and what is known of the model once it is loaded."""
    requests = job.requests[0]
    say(f"{OURS}: loading {job.source.name}")
    native = Native(job)
    say(f"{OURS}: warm-up")
    warm_up = native.run(requests.warm_up())
    peer = InProcess(job, native, say) if "hf" in job.against else None
    clock = Repeats()
    turns = [lambda: clock.add(requests, native.run, native.release), *([peer.repeat] if peer else [])]
    for repeat in range(job.repeats):
        say(f"repeat {repeat + 1} of {job.repeats}")
        for turn in turns if repeat % 2 == 0 else reversed(turns):
            turn()
    say(f"{OURS}: decode steps, agreement with the trainer")
    details = native.details() | {"warm_up_seconds": warm_up, "logprob_gap": native.logprob_gap(), **native.decode_steps()}
    ours = Measured(OURS, [clock.timing({"max_seqs": native.limits.max_seqs})], details)
    facts = {"parameters": native.parameters, "kv_bytes_per_token": native.kv_bytes_per_token, "cost": native.step_cost()}
    return ours, {"hf": peer.measured()} if peer else {}, facts


@dataclass
class Repeats:
    """Seconds of an engine's passes."""

    seconds: list[float] = field(default_factory=list)
    prefill_seconds: list[float] = field(default_factory=list)

    def add(self, requests: Requests, run: Callable[[Requests], float], release: Callable[[], None]) -> None:
        if requests.workload.per_token:
            self.prefill_seconds.append(run(requests.cut(1)))
        self.seconds.append(run(requests))  # last, so that its samples are the ones that are looked at afterwards
        release()

    def timing(self, setting: dict[str, Any]) -> Timing:
        return Timing(setting, tuple(self.seconds), tuple(self.prefill_seconds))


# -- transformers -------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HfSetting:
    batch: int  # samples in a batch: prompts with all their samples
    threads: int | None  # torch threads; None on CUDA, where they hardly matter

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value}


class InProcess:
    """transformers' generate: every setting is tried once, and the best is repeated."""

    def __init__(self, job: BenchJob, native: Native, say: Say) -> None:
        native.release()
        self.requests, self.device = job.requests[0], job.device
        self.engine = HfEngine(shapes.theirs(job.source, job.device, job.dtype), NO_TEXT, frozenset(), len(self.requests.lengths))
        memory = job.kv_bytes or (int(KV_SHARE["cuda"] * free_bytes(job.device)) if job.device.type == "cuda" else None)
        self.trials: dict[HfSetting, float | str] = {}
        self._try_all(self.settings(native.kv_bytes_per_token, memory), say)
        if self.best:
            self._try_all(variants(self.best), say)
        self.clock = Repeats()

    def settings(self, kv_bytes_per_token: int, kv_bytes: int | None) -> list[HfSetting]:
        """Batches to try, whose cache may grow to at most `kv_bytes`."""
        workload = self.requests.workload
        per_prompt = workload.samples * self.requests.positions * kv_bytes_per_token
        most = workload.prompts if kv_bytes is None else max(1, kv_bytes // per_prompt)
        sizes = sorted({min(-(-workload.prompts // cuts), most) for cuts in CUTS}, reverse=True)
        return [HfSetting(size * workload.samples, THREADS if self.device.type == "cpu" else None) for size in sizes]

    @property
    def best(self) -> HfSetting | None:
        worked = {setting: seconds for setting, seconds in self.trials.items() if isinstance(seconds, float)}
        return min(worked, key=lambda setting: worked[setting], default=None)

    def run(self, requests: Requests, setting: HfSetting) -> float:
        """Seconds for all requests, batch after batch."""
        if setting.threads:
            torch.set_num_threads(setting.threads)
        self.engine.max_seqs = setting.batch
        sampling = Sampling(samples=requests.workload.samples, max_new_tokens=requests.longest_response)
        return generate_all(self.engine, requests, sampling, self.device)[0]

    def _try_all(self, settings: list[HfSetting], say: Say) -> None:
        for setting in settings:
            say(f"hf: trying {report.words(setting.as_json())}")
            self.trials[setting] = self._try(setting)

    def _try(self, setting: HfSetting) -> float | str:
        """Seconds, or why it cannot run."""
        try:
            return self.run(self.requests, setting)
        except torch.OutOfMemoryError as error:
            return f"out of memory: {str(error).splitlines()[0]}"
        finally:
            self.engine.release()

    def repeat(self) -> None:
        if self.best is not None:
            self.clock.add(self.requests, partial(self.run, setting=self.best), self.engine.release)

    def measured(self) -> Measured:
        return Measured("hf", [self._timing(setting, trial) for setting, trial in self.trials.items()])

    def _timing(self, setting: HfSetting, trial: float | str) -> Timing:
        timing = self.clock.timing(setting.as_json()) if setting == self.best else Timing(setting.as_json())
        return replace(timing, error=trial) if isinstance(trial, str) else replace(timing, trial_seconds=trial)


def variants(best: HfSetting) -> list[HfSetting]:
    """What else to try with the best batch: one thread, where their number is not given and a small model may gain by it."""
    open_choice = best.threads is not None and best.threads > 1 and "OMP_NUM_THREADS" not in os.environ
    return [replace(best, threads=1)] if open_choice else []


# -- the document -------------------------------------------------------------------------------------------------------------------------


def document(job: BenchJob, measured: dict[str, Measured], facts: dict[str, Any]) -> dict[str, Any]:
    requests = job.requests[0]
    limit, why_not = roofline_of(job, facts["cost"])
    engines = {name: entry.as_json(requests) for name, entry in measured.items()}
    for engine in engines.values():
        rate = engine["tokens_per_s"]
        engine["roofline_fraction"] = limit["seconds"] * rate / requests.tokens if limit and rate else None
    ratios = {name: ratio(measured[OURS], measured[name], requests) for name in job.against}
    return {
        "benchmark": "rollout",
        "ratio": next(iter(ratios.values()), None),
        "ratios": ratios,
        "compared_by": "time per token" if requests.workload.per_token else "output tokens/s",
        "engines": engines,
        "roofline": limit,
        "roofline_missing": why_not,
        "knobs": job.given,
        "workload": requests.describe() | {"kv_bytes": job.kv_bytes},
        "model": report.describe_model(job.source, job.dtype, facts["parameters"], kv_bytes_per_token=facts["kv_bytes_per_token"]),
        "repeats": job.repeats,
        **report.origin(job.device),
    }


def ratio(ours: Measured, theirs: Measured, requests: Requests) -> float | None:
    """How many times faster ours is than the peer's best setting that gives log-probs."""
    speeds = [timing.speed(requests) if timing else None for timing in (ours.best(requests), theirs.best(requests))]
    return speeds[0] / speeds[1] if speeds[0] and speeds[1] else None


def roofline_of(job: BenchJob, cost: roofline.StepCost | str) -> tuple[dict[str, Any] | None, str | None]:
    """The bound, or why there is none."""
    if isinstance(cost, str):
        return None, cost
    name = device_name(job.device)
    known = roofline.device_named(name)
    bandwidth = job.options.bandwidth or (known and known.bandwidth)
    if not bandwidth or not job.flops:
        what = "a CPU has no figures here" if name == "cpu" else f"the figures of {name} are not known"
        return None, f"{what}: give --bandwidth and --flops"
    device = roofline.Device(bandwidth, job.flops)
    requests, held = job.requests[0], job.kv_bytes // cost.kv_bytes_per_token if job.kv_bytes else None
    prompts = [len(requests.prompts[uid].ids) for uid, _ in requests.lengths]
    steps = roofline.decode_steps(prompts, list(requests.lengths.values()), held)
    return asdict(roofline.bound(steps, cost, device)) | {"device": asdict(device), "cost": asdict(cost)}, None


def table(found: dict[str, Any]) -> str:
    """The document for people: the workload, one line for each engine, and notes."""
    asked = found["workload"]
    prompts, responses = asked["prompt_tokens"], asked["response_tokens"]
    lines = [
        report.headline(found),
        f"workload {asked['name']}: {asked['prompts']} prompts x {asked['samples_per_prompt']} samples, prompts of {prompts['mean']:.0f} "
        f"tokens on average, responses of {responses['mean']:.0f} ({responses['smallest']} to {responses['largest']})",
        "",
        *report.aligned([HEAD, *(engine_row(name, engine) for name, engine in found["engines"].items())]),
        "",
        f"output tokens/s with log-probs, prefill included, median and best of {many(found['repeats'], 'repeat')}",
    ]
    for name, ratio in found["ratios"].items():
        lines.append(f"{OURS} is {ratio:.2f} times as fast as {name}" if ratio else f"{name} gave no figure to compare with")
    if found["compared_by"] == "time per token" and found["ratios"]:
        lines[-1] += " in time per token"
    if reason := found["engines"][OURS]["eager_reason"]:
        lines.append(f"{OURS} gave up CUDA graphs and decoded without them, slower: {reason}")
    gap = found["engines"][OURS]["logprob_gap"]
    lines.append(f"log-probs of engine and trainer differ by {gap['mean_absolute']:.2g} on average ({gap['tokens']} tokens)")
    if found["roofline_missing"]:
        lines.append(f"no roofline: {found['roofline_missing']}")
    return "\n".join([*lines, *report.failures(found)])


def engine_row(name: str, engine: dict[str, Any]) -> list[str]:
    bare = engine.get("without_logprobs")
    return [
        name,
        report.number(engine["tokens_per_s"]),
        report.number(engine.get("tokens_per_s_best")),
        report.number(bare["tokens_per_s"] if bare else None),
        report.number(engine.get("ms_per_token"), ".3f"),
        report.number(engine.get("roofline_fraction"), ".3f"),
        report.words(engine.get("setting", {})),
    ]
