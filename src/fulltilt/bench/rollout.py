"""The benchmark of rollouts: our engine and its peers on the same requests, in one run.

Enters: `Options`. Leaves: one JSON-ready document: absolute figures of every engine, how many times faster ours is, what share of the
roofline each reaches, how far engine and trainer agree, and what is needed to repeat it. Guaranteed: what can be wrong with the options is
said before anything is measured; warm-up is outside the measured passes; in-process engines take turns, so that a slow moment of the
computer does not fall on one of them; vLLM has the device to itself, but for this process's context and its other
starts, which wait.
"""

from __future__ import annotations

import gc
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fulltilt.bench import hf, report, roofline, shapes, vllm, workload
from fulltilt.bench.figures import Measured, Timing
from fulltilt.bench.native import Native
from fulltilt.bench.report import OURS, Say, origin
from fulltilt.bench.workload import WORKLOADS, Requests
from fulltilt.cluster.sizes import free_bytes
from fulltilt.plan import KV_SHARE
from fulltilt.records import UserError
from fulltilt.words import many

PEERS = ("vllm", "hf")
HEAD = ["engine", "tokens/s", "best", "without log-probs", "ms/token", "of roofline", "setting"]
DTYPES = {"cuda": "bfloat16", "cpu": "float32"}
REPEATS = {"cuda": 2, "cpu": 3}  # a CPU is shared with whatever else runs there


@dataclass(frozen=True)
class Options:
    """None: as the device has it by default."""

    model: str | None = None
    against: tuple[str, ...] = ()
    device: str | None = None
    workload: str | None = None
    prompts: int | None = None
    samples: int | None = None
    kv_bytes: int | None = None
    repeats: int | None = None
    seed: int = 0
    vllm_grid: tuple[int, ...] | None = None
    bandwidth: float | None = None
    flops: float | None = None


@dataclass(frozen=True, eq=False)
class Job:
    """Options, resolved and found to make sense."""

    device: torch.device
    source: shapes.Source
    requests: Requests
    against: tuple[str, ...]
    kv_bytes: int | None
    repeats: int
    vllm_grid: tuple[int, ...]
    bandwidth: float | None
    flops: float | None


def prepare(options: Options) -> Job:
    device = choose_device(options.device)
    against = check_peers(options.against)
    check_figures(options, device)
    if options.vllm_grid and "vllm" not in against:
        raise UserError("--vllm-grid: vLLM is not measured here. Add it (--against vllm), or leave the option out")
    name = options.workload or workload.DEFAULT[device.type]
    if name not in WORKLOADS:
        raise UserError(f"--workload {name}: there are {', '.join(WORKLOADS)}")
    asked = WORKLOADS[name]
    asked = replace(
        asked,
        prompts=options.prompts or asked.prompts,
        samples=options.samples or asked.samples,
        kv_bytes=options.kv_bytes or asked.kv_bytes,
    )
    source = shapes.find(options.model or shapes.DEFAULT[device.type])
    requests = workload.make_requests(asked, source.vocabulary, options.seed)
    made_for = getattr(source.config.get_text_config(), "max_position_embeddings", None)
    if made_for and requests.positions > made_for:
        raise UserError(
            f"--workload {name}: a prompt of {requests.longest_prompt} tokens with a response of {requests.longest_response} needs "
            f"{requests.positions} positions, and {source.name} was made for {made_for}. Choose a shorter workload or another model"
        )
    repeats = options.repeats or REPEATS[device.type]
    grid = options.vllm_grid or vllm.GRID
    return Job(device, source, requests, against, asked.kv_bytes, repeats, grid, options.bandwidth, options.flops)


def choose_device(name: str | None) -> torch.device:
    if name not in (None, "cuda", "cpu"):
        raise UserError(f"--device {name}: cuda or cpu")
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise UserError("--device cuda: torch finds no CUDA device here. Use --device cpu; `fulltilt doctor` says why")
    return torch.device(name or ("cuda" if there else "cpu"))


def check_peers(names: tuple[str, ...]) -> tuple[str, ...]:
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise UserError(f"--against {','.join(names)}: {', '.join(unknown)} is no peer. There are {', '.join(PEERS)}")
    if "vllm" in names and not vllm.installed():
        raise UserError(
            '--against vllm: vLLM is not installed in this environment. Install it (pip install "fulltilt[vllm]"), or leave it out: '
            "--against hf"
        )
    return tuple(dict.fromkeys(names))


def check_figures(options: Options, device: torch.device) -> None:
    """Of the device, for the roofline."""
    given = {"--bandwidth": options.bandwidth, "--flops": options.flops}
    for option, value in given.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UserError(f"{option} {value}: give a finite number above 0, per second, for example 4.8e12")
    missing = [option for option, value in given.items() if value is None]
    if len(missing) == 1 and roofline.device_named(device_name(device)) is None:
        raise UserError(
            f"--bandwidth and --flops: {missing[0]} is missing, and it is not known for {device_name(device)}. Give both, or neither for "
            "a result without a roofline"
        )


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def run(job: Job, say: Say) -> dict[str, Any]:
    begin = time.perf_counter()
    ours, others, facts = in_turns(job, say)
    if "vllm" in job.against:  # last: its starts take minutes, which must not be lost to a failure of ours
        others["vllm"] = against_vllm(job, facts, say)
    return document(job, {OURS: ours} | {name: others[name] for name in job.against}, facts) | {"seconds": time.perf_counter() - begin}


def against_vllm(job: Job, facts: dict[str, Any], say: Say) -> Measured:
    held, room = let_go(job.device), None
    if job.device.type == "cuda":
        beside = vllm.BESIDE + 2 * facts["parameters"]
        room = vllm.Room(torch.cuda.mem_get_info(job.device)[0], beside, facts["kv_bytes_per_token"])
    with tempfile.TemporaryDirectory(prefix="fulltilt-bench-") as folder:
        model = shapes.write_config(job.source, job.device, Path(folder) / "model")
        measured = vllm.measure(
            job.requests, model, Path(folder), dummy_weights=job.source.folder is None, device=job.device.type,
            dtype=DTYPES[job.device.type], kv_bytes=job.kv_bytes, room=room, repeats=job.repeats, grid=job.vllm_grid, say=say,
        )  # fmt: skip
    return replace(measured, details={**measured.details, "device_bytes_held_by_others": held})


def let_go(device: torch.device) -> int | None:
    """Give the device to another process. What this one still holds, its context above all, is returned."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def in_turns(job: Job, say: Say) -> tuple[Measured, dict[str, Measured], dict[str, Any]]:
    """Ours, and the peers that run in this process; and what is known of the model once it is loaded."""
    say(f"{OURS}: loading {job.source.name}")
    native = Native(job.source, job.device, job.requests, job.kv_bytes)
    say(f"{OURS}: warm-up")
    warm_up = native.run(job.requests.warm_up())
    peer = InProcess(job, native, say) if "hf" in job.against else None
    clock = Repeats()
    turns = [lambda: clock.add(job, native.run, native.release), *([peer.repeat] if peer else [])]
    for repeat in range(job.repeats):
        say(f"repeat {repeat + 1} of {job.repeats}")
        for turn in turns if repeat % 2 == 0 else reversed(turns):
            turn()
    say(f"{OURS}: decode steps, agreement with the trainer")
    details = native.details() | {
        "warm_up_seconds": warm_up,
        "logprob_gap": native.logprob_gap(),
        **native.decode_steps(),
    }
    ours = Measured(OURS, [clock.timing({"max_seqs": native.limits.max_seqs})], details)
    facts = {"parameters": native.parameters, "kv_bytes_per_token": native.kv_bytes_per_token, "cost": native.step_cost()}
    return ours, {"hf": peer.measured()} if peer else {}, facts


@dataclass
class Repeats:
    """Seconds of an engine's passes."""

    seconds: list[float] = field(default_factory=list)
    prefill_seconds: list[float] = field(default_factory=list)

    def add(self, job: Job, run: Callable[[Requests], float], release: Callable[[], None]) -> None:
        if job.requests.workload.per_token:
            self.prefill_seconds.append(run(job.requests.cut(1)))
        self.seconds.append(run(job.requests))  # last, so that its samples are the ones that are looked at afterwards
        release()

    def timing(self, setting: dict[str, Any]) -> Timing:
        return Timing(setting, tuple(self.seconds), tuple(self.prefill_seconds))


class InProcess:
    """transformers: every setting is tried once, the best goes on to be repeated."""

    def __init__(self, job: Job, native: Native, say: Say) -> None:
        native.release()
        self.job, self.engine = job, hf.HuggingFace(job.source, job.device)
        room = job.kv_bytes or (int(KV_SHARE["cuda"] * free_bytes(job.device)) if job.device.type == "cuda" else None)
        self.trials: dict[hf.Setting, float | str] = {}
        self._try_all(self.engine.settings(job.requests, native.kv_bytes_per_token, room), say)
        if self.best:
            self._try_all(self.engine.variants(self.best), say)
        self.clock = Repeats()

    @property
    def best(self) -> hf.Setting | None:
        worked = {setting: seconds for setting, seconds in self.trials.items() if isinstance(seconds, float)}
        return min(worked, key=lambda setting: worked[setting], default=None)

    def _try_all(self, settings: list[hf.Setting], say: Say) -> None:
        for setting in settings:
            say(f"hf: trying {setting.words()}")
            self.trials[setting] = self._try(setting)

    def _try(self, setting: hf.Setting) -> float | str:
        """Seconds, or why it cannot run."""
        try:
            return self.engine.run(self.job.requests, setting)
        except torch.OutOfMemoryError as error:
            return f"out of memory: {str(error).splitlines()[0]}"
        finally:
            self.engine.release()

    def repeat(self) -> None:
        if self.best is not None:
            self.clock.add(self.job, partial(self.engine.run, setting=self.best), self.engine.release)

    def measured(self) -> Measured:
        return Measured("hf", [self._timing(setting, trial) for setting, trial in self.trials.items()])

    def _timing(self, setting: hf.Setting, trial: float | str) -> Timing:
        timing = self.clock.timing(setting.as_json()) if setting == self.best else Timing(setting.as_json())
        return replace(timing, error=trial) if isinstance(trial, str) else replace(timing, trial_seconds=trial)


def document(job: Job, measured: dict[str, Measured], facts: dict[str, Any]) -> dict[str, Any]:
    requests = job.requests
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
        "workload": requests.describe(),
        "model": describe_model(job, facts),
        "repeats": job.repeats,
        **origin(job.device),
    }


def ratio(ours: Measured, theirs: Measured, requests: Requests) -> float | None:
    """How many times faster we are than the peer's best setting that gives log-probs."""
    speeds = [timing.speed(requests) if timing else None for timing in (ours.best(requests), theirs.best(requests))]
    return speeds[0] / speeds[1] if speeds[0] and speeds[1] else None


def roofline_of(job: Job, cost: roofline.StepCost | str) -> tuple[dict[str, Any] | None, str | None]:
    """The bound, or why there is none."""
    if isinstance(cost, str):
        return None, cost
    name = device_name(job.device)
    known = roofline.device_named(name)
    bandwidth, flops = job.bandwidth or (known and known.bandwidth), job.flops or (known and known.flops)
    if not bandwidth or not flops:
        what = "a CPU has no figures here" if name == "cpu" else f"the figures of {name} are not known"
        return None, f"{what}: give --bandwidth and --flops"
    device = roofline.Device(bandwidth, flops)
    requests, held = job.requests, job.kv_bytes // cost.kv_bytes_per_token if job.kv_bytes else None
    prompts = [len(requests.prompts[uid].ids) for uid, _ in requests.lengths]
    steps = roofline.decode_steps(prompts, list(requests.lengths.values()), held)
    return asdict(roofline.bound(steps, cost, device)) | {"device": asdict(device), "cost": asdict(cost)}, None


def describe_model(job: Job, facts: dict[str, Any]) -> dict[str, Any]:
    text = job.source.config.get_text_config()
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
        "tie_word_embeddings",
    )  # fmt: skip
    return {
        "name": job.source.name,
        "weights": "of the folder" if job.source.folder else "random",
        "type": text.model_type,
        "dtype": DTYPES[job.device.type],
        "parameters": facts["parameters"],
        "kv_bytes_per_token": facts["kv_bytes_per_token"],
        **{name: getattr(text, name, None) for name in names},
    }


def table(found: dict[str, Any]) -> str:
    """The document for people: what was asked, one line an engine, what else there is to know."""
    model, asked = found["model"], found["workload"]
    prompts, responses = asked["prompt_tokens"], asked["response_tokens"]
    lines = [
        f"{model['name']}: {model['parameters'] / 1e6:.1f} million parameters, {model['dtype']}, on "
        f"{found['hardware'].get('gpu') or found['hardware']['cpu']}",
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
        lines.append(f"{OURS} gave CUDA graphs up and decoded without them, slower: {reason}")
    gap = found["engines"][OURS]["logprob_gap"]
    lines.append(f"log-probs of engine and trainer differ by {gap['mean_absolute']:.2g} on average ({gap['tokens']} tokens)")
    if found["roofline_missing"]:
        lines.append(f"no roofline: {found['roofline_missing']}")
    return "\n".join([*lines, *report.failures(found)])


def engine_row(name: str, engine: dict[str, Any]) -> list[str]:
    bare, share, per_token = (engine.get(key) for key in ("without_logprobs", "roofline_fraction", "ms_per_token"))
    return [
        name,
        report.whole(engine["tokens_per_s"]),
        report.whole(engine.get("tokens_per_s_best")),
        report.whole(bare["tokens_per_s"] if bare else None),
        f"{per_token:.3f}" if per_token is not None else "-",
        f"{share:.3f}" if share is not None else "-",
        report.words(engine.get("setting", {})),
    ]
