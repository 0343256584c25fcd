"""The benchmark of rollouts: fulltilt's engine and its peers on the same requests, in one run.

Enters: `BenchOptions`. Leaves: one JSON-ready document: absolute figures of every engine, how many times faster fulltilt is, what share of
the roofline each reaches, how closely engine and trainer agree, and what is needed to repeat it. Guaranteed: mistakes are reported before
anything is measured; warm-up is outside the measured passes; in-process engines take turns, so that a slow moment of the computer does not
fall on one of them; vLLM has the device to itself, except for this process's context and its own other starts, which wait.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fulltilt.bench import peers, report, roofline, shapes
from fulltilt.bench.device import device_name, let_go
from fulltilt.bench.figures import Measured, Timing
from fulltilt.bench.job import BenchJob, resolve
from fulltilt.bench.native import NO_TEXT, Native, generate_all
from fulltilt.bench.options import BenchOptions
from fulltilt.bench.report import OURS, Say
from fulltilt.bench.workload import Requests
from fulltilt.cluster.sizes import THREADS, free_bytes
from fulltilt.plan.cache import KV_SHARE
from fulltilt.records import UserError
from fulltilt.rollout.engines.hf import HfEngine
from fulltilt.words import many

PEERS = ("vllm", "hf")
SETTINGS = ("rollout.", "train.fused_layers", "train.compile")
CUTS = (1, 2, 4)  # numbers of batches into which the workload is cut for transformers; each is tried


def prepare(options: BenchOptions, scratch: Path) -> BenchJob:
    job = resolve(options, scratch, SETTINGS, PEERS)
    if (job.nominal("bandwidth") is None) != (job.nominal("flops") is None):
        missing = "--flops" if options.bandwidth else "--bandwidth"
        raise UserError(
            f"--bandwidth and --flops: {missing} is missing, and it is not known for {device_name(job.device)}. Give both, or neither for "
            "a result without a roofline"
        )
    return job


def run(job: BenchJob, say: Say) -> dict[str, Any]:
    begin = time.perf_counter()
    measured, facts = in_turns(job, say)
    if "vllm" in job.options.peers:  # last: its starts take minutes, which must not be lost if fulltilt fails
        held, free = let_go(job.device), torch.cuda.mem_get_info(job.device)[0] if job.device.type == "cuda" else None
        vllm: Measured = peers.load("peer_vllm").measure(job, facts["parameters"], facts["kv_bytes_per_token"], free, say)
        measured["vllm"] = replace(vllm, details={**vllm.details, "device_bytes_held_by_others": held})
    measured = {name: measured[name] for name in (OURS, *job.options.peers)}
    return document(job, measured, facts) | {"seconds": time.perf_counter() - begin}


def in_turns(job: BenchJob, say: Say) -> tuple[dict[str, Measured], dict[str, Any]]:
    """Measure fulltilt's engine and the peer that runs in this process. Returns them with facts about the loaded model."""
    (requests,) = job.requests
    say(f"{OURS}: loading {job.source.name}")
    native = Native(job)
    say(f"{OURS}: warm-up")
    warm_up = native.run(requests.warm_up())
    ours = EnginePasses(Timing({"max_seqs": native.limits.max_seqs}), native.run, native.release)
    tried = try_transformers(job, native, say) if "hf" in job.options.peers else []
    turns = [ours, *quickest(tried)]
    for repeat in range(job.repeats):
        say(f"repeat {repeat + 1} of {job.repeats}")
        for engine in turns if repeat % 2 == 0 else reversed(turns):
            engine.measure(requests)
    say(f"{OURS}: decode steps, agreement with the trainer")
    details = native.details() | {"warm_up_seconds": warm_up, "logprob_gap": native.logprob_gap(), **native.decode_steps()}
    facts = {"parameters": native.parameters, "kv_bytes_per_token": native.kv_bytes_per_token, "cost": native.step_cost()}
    return {OURS: Measured([ours.timing()], details), "hf": Measured([engine.timing() for engine in tried])}, facts


@dataclass
class EnginePasses:
    """The passes of an engine in this process at one setting, and their seconds."""

    trial: Timing  # the setting, and the timing of its trial
    run: Callable[[Requests], float]
    release: Callable[[], None]
    seconds: list[float] = field(default_factory=list)
    prefill_seconds: list[float] = field(default_factory=list)

    def measure(self, requests: Requests) -> None:
        if requests.workload.per_token:
            self.prefill_seconds.append(self.run(requests.cut(1)))
        self.seconds.append(self.run(requests))  # last, so that its samples are the ones that are examined afterwards
        self.release()

    def timing(self) -> Timing:
        return replace(self.trial, seconds=self.seconds, prefill_seconds=self.prefill_seconds)


# -- transformers -------------------------------------------------------------------------------------------------------------------------


def try_transformers(job: BenchJob, native: Native, say: Say) -> list[EnginePasses]:
    """Try every setting of transformers' generate once. A setting has the number of samples of a batch (prompts with all their samples)
    and, on a CPU, where it matters, the number of torch's threads."""
    native.release()
    (asked,), device = job.requests, job.device
    engine = HfEngine(shapes.theirs(job.source, device, job.dtype), NO_TEXT, frozenset(), len(asked.lengths))

    def run(requests: Requests, setting: Mapping[str, int]) -> float:
        """Return the seconds for all requests, batch after batch."""
        if "threads" in setting:
            torch.set_num_threads(setting["threads"])
        engine.max_seqs = setting["batch"]
        return generate_all(engine, requests, device)[0]

    def attempt(setting: Mapping[str, int]) -> EnginePasses:
        say(f"hf: trying {report.words(setting)}")
        try:
            trial = Timing(setting, trial_seconds=run(asked, setting))
        except torch.OutOfMemoryError as error:
            trial = Timing(setting, error=f"out of memory: {str(error).splitlines()[0]}")
        engine.release()
        return EnginePasses(trial, partial(run, setting=setting), engine.release)

    memory = job.kv_bytes or (int(KV_SHARE["cuda"] * free_bytes(device)) if device.type == "cuda" else None)
    tried = [attempt(setting) for setting in hf_settings(asked, device.type, native.kv_bytes_per_token, memory)]
    return [*tried, *(attempt(setting) for best in quickest(tried) for setting in variants(best.trial.setting))]


def quickest(tried: Sequence[EnginePasses]) -> list[EnginePasses]:
    """Return the setting whose trial took the least time, if any worked."""
    return sorted((engine for engine in tried if engine.trial.trial_seconds), key=lambda engine: engine.trial.trial_seconds or 0.0)[:1]


def hf_settings(requests: Requests, device: str, kv_bytes_per_token: int, kv_bytes: int | None) -> list[dict[str, int]]:
    """Return the batches to try, whose cache may grow to at most `kv_bytes`."""
    workload = requests.workload
    per_prompt = workload.samples * requests.positions * kv_bytes_per_token
    most = workload.prompts if kv_bytes is None else max(1, kv_bytes // per_prompt)
    sizes = sorted({min(-(-workload.prompts // cuts), most) for cuts in CUTS}, reverse=True)
    return [{"batch": size * workload.samples} | ({"threads": THREADS} if device == "cpu" else {}) for size in sizes]


def variants(best: Mapping[str, int]) -> list[dict[str, int]]:
    """Return what else to try with the best batch: one thread, if the number is not given and a small model may gain by it."""
    return [{**best, "threads": 1}] if best.get("threads", 1) > 1 and "OMP_NUM_THREADS" not in os.environ else []


# -- the document -------------------------------------------------------------------------------------------------------------------------


def document(job: BenchJob, measured: dict[str, Measured], facts: dict[str, Any]) -> dict[str, Any]:
    requests = job.requests[0]
    limit, why_not = roofline_of(job, facts["cost"])
    engines = {name: entry.as_json(requests) for name, entry in measured.items()}
    for engine in engines.values():
        rate = engine["tokens_per_s"]
        engine["roofline_fraction"] = limit["seconds"] * rate / requests.tokens if limit and rate else None
    ratios = {name: ratio(measured[OURS], measured[name], requests) for name in job.options.peers}
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
    """Return how many times faster ours is than the peer's best setting with log-probs."""
    speeds = [timing.speed(requests) if timing else None for timing in (ours.best(requests), theirs.best(requests))]
    return speeds[0] / speeds[1] if speeds[0] and speeds[1] else None


def roofline_of(job: BenchJob, cost: roofline.StepCost | str) -> tuple[dict[str, Any] | None, str | None]:
    """Return the bound; or None with the reason."""
    if isinstance(cost, str):
        return None, cost
    bandwidth, flops, name = job.nominal("bandwidth"), job.nominal("flops"), device_name(job.device)
    if not bandwidth or not flops:
        what = "a CPU has no figures here" if name == "cpu" else f"the figures of {name} are not known"
        return None, f"{what}: give --bandwidth and --flops"
    device = roofline.Device(bandwidth, flops)
    requests, held = job.requests[0], job.kv_bytes // cost.kv_bytes_per_token if job.kv_bytes else None
    prompts = [len(requests.prompts[uid].ids) for uid, _ in requests.lengths]
    steps = roofline.decode_steps(prompts, list(requests.lengths.values()), held)
    return roofline.bound(steps, cost, device) | {"device": asdict(device), "cost": asdict(cost)}, None


def table(found: dict[str, Any]) -> str:
    """Write the document for people: the workload, one line for each engine, and notes."""
    asked = found["workload"]
    prompts, responses = asked["prompt_tokens"], asked["response_tokens"]
    lines = [
        report.headline(found),
        f"workload {asked['name']}: {asked['prompts']} prompts x {asked['samples_per_prompt']} samples, prompts of {prompts['mean']:.0f} "
        f"tokens on average, responses of {responses['mean']:.0f} ({responses['smallest']} to {responses['largest']})",
        "",
        *report.table_of("engine", {name: cells(engine) for name, engine in found["engines"].items()}),
        "",
        f"output tokens/s with log-probs, prefill included, median and best of {many(found['repeats'], 'repeat')}",
    ]
    unit = " in time per token" if found["compared_by"] == "time per token" else ""
    lines += report.comparison(found["ratios"], f"{OURS} is {{ratio:.2f}} times as fast as {{name}}{unit}")
    gap = found["engines"][OURS]["logprob_gap"]
    lines.append(f"log-probs of engine and trainer differ by {gap['mean_absolute']:.2g} on average ({gap['tokens']} tokens)")
    if found["roofline_missing"]:
        lines.append(f"no roofline: {found['roofline_missing']}")
    return "\n".join([*lines, *report.troubles(found["engines"])])


def cells(engine: dict[str, Any]) -> dict[str, str]:
    return {
        "tokens/s": report.number(engine["tokens_per_s"]),
        "best": report.number(engine.get("tokens_per_s_best")),
        "without log-probs": report.number(engine.get("without_logprobs", {}).get("tokens_per_s")),
        "ms/token": report.number(engine.get("ms_per_token"), ".3f"),
        "of roofline": report.number(engine["roofline_fraction"], ".3f"),
        "setting": report.words(engine["setting"]),
    }
