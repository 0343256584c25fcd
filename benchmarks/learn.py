"""The benchmark of learning: reward and accuracy against seconds, of a run and of the same run under TRL, one after the other.

Enters: a run file and `BenchOptions`. Leaves: one JSON-ready document with a line for each step of each system, curves that `fulltilt plot`
draws, and how much sooner ours reached the reward that the peer ended with. Guaranteed: what the peer cannot do as the run file says is
refused before anything is measured; each runs in a process of its own, whose start is counted; validations and saved models are not
counted; accuracy is measured by the same code for both; what was measured without a failure is not measured again in the same folder.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fulltilt import config as configuration
from fulltilt import loop
from fulltilt.bench import peers, report
from fulltilt.bench.device import let_go
from fulltilt.bench.job import BenchJob, check_peers, run_batches
from fulltilt.bench.options import BenchOptions
from fulltilt.bench.report import OURS, Say, commit
from fulltilt.bench.shapes import Source
from fulltilt.cluster.checks import choose_device
from fulltilt.folders import BENCH_MARKER, refuse_foreign
from fulltilt.model.load import read_config
from fulltilt.observe.console import Console
from fulltilt.observe.metrics import write_whole
from fulltilt.observe.plot import curve_of, trailing_means
from fulltilt.presets import PRESETS
from fulltilt.records import UserError
from fulltilt.schema import Config

WINDOW = 10  # steps over which a reward is averaged, since one step's depends on its prompts
# What is kept of a step of ours, by the names of docs/metrics.md.
COLUMNS = {
    "reward": "critic/score/mean",
    "response_length": "response_length/mean",
    "step_seconds": "timing_s/step",
    "rollout_seconds": "timing_s/gen",
    "update_seconds": "timing_s/update_actor",
    "logprob_gap": "rollout_corr/logprob_abs_gap",
    "importance_weight": "rollout_corr/rollout_is_mean",
    "importance_capped": "rollout_corr/rollout_is_ratio_fraction_high",
    "grad_norm": "actor/grad_norm",
    "learning_rate": "actor/lr",
    "reserved_gib": "memory_gib/reserved",
    "process_gib": "memory_gib/process",
    "reward_seconds": "timing_s/reward",
    "advantage_seconds": "timing_s/adv",
    "decode_tokens_per_s": "rollout/decode_tokens_per_s",
    "samples_left_out": "actor/samples_left_out",
}
ACCURACY = "val/reward/mean"

Found = dict[str, Any]  # one system: setting, steps, accuracy, start_seconds, error, details


# -- before anything runs -----------------------------------------------------------------------------------------------------------------


def prepare(options: BenchOptions, scratch: Path) -> BenchJob:
    refuse_foreign(options.folder, BENCH_MARKER, "--dir")
    config = configuration.load(options.run, options.overrides)
    name = config.algorithm.name
    if not PRESETS[name].rollout:
        raise UserError(
            f"{options.run}: algorithm.name is {name}, which has no reward to measure. Give a run file of reinforcement learning"
        )
    if "trl" in options.peers and (wrong := list(peers.load("peer_trl").refused(config))):
        raise UserError(configuration.report(str(options.run), wrong))
    device = choose_device(config.run.device)
    check_peers(options, ("trl",), device)
    steps = config.run.steps if config.run.steps is not None else sum(1 for _ in run_batches(config))
    job = BenchJob(options, device, config, Source(config.model.path, read_config(config.model)), steps, scratch)
    if "trl" in options.peers:
        peers.load("peer_trl").one_setting(job)  # reports mistakes
    return job


def evaluated(job: BenchJob) -> list[int]:
    """Steps after which accuracy is measured, beside the beginning."""
    every = job.config.run.eval_every
    return list(range(every, job.repeats + 1, every)) if every and job.config.data.val else []


# -- ours ---------------------------------------------------------------------------------------------------------------------------------


def measure_ours(job: BenchJob, say: Say) -> Found:
    """The command `fulltilt train`, from its start on: a line of metrics comes when its step is done."""
    folder, minutes = job.options.folder / OURS, job.options.minutes
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    overrides = [
        *job.options.overrides,
        f"run.dir={folder / 'run'}",
        "run.save_every=0",
        "run.eval_before=false",  # it would make captures and compile kernels in seconds that do not count
    ]
    lines: list[tuple[float, dict[str, Any]]] = []
    begin, log = time.perf_counter(), folder / "log.txt"
    child = peers.start("fulltilt", ["train", str(job.options.run), *overrides, "--json"], log, piped=True)
    try:
        assert child.stdout
        for text in child.stdout:
            lines.append((time.perf_counter() - begin, json.loads(text)))
            say(f"{OURS}: step {lines[-1][1]['step']} of {job.repeats}")
            if minutes and lines[-1][0] > 60 * minutes:
                child.send_signal(signal.SIGINT)
        code = child.wait()
    finally:
        peers.end_session(child)
    stopped = code == 130 and minutes
    error = None if code == 0 or stopped else f"ended with code {code}: {peers.end_of(log)}"
    return read_ours(lines) | {"setting": {}, "error": error}


def read_ours(lines: Sequence[tuple[float, Mapping[str, Any]]]) -> Found:
    """From lines with the seconds at which they came. The seconds of validations, which are in the lines, are taken out."""
    steps, accuracy, validating, start = [], [], 0.0, None
    for came, line in lines:
        validating += line.get("timing_s/testing") or 0.0
        seconds = came - validating
        if start is None:
            start = seconds - (line.get("timing_s/step") or 0.0)
        if line["step"] > 0:
            known = {name: line[column] for name, column in COLUMNS.items() if line.get(column) is not None}
            steps.append({"step": line["step"], "seconds": seconds, **known})
        if line.get(ACCURACY) is not None:
            accuracy.append({"step": line["step"], "seconds": seconds, "accuracy": line[ACCURACY]})
    return {"steps": steps, "accuracy": accuracy, "start_seconds": start}


def measure_trl(job: BenchJob, say: Say) -> Found:
    trl, minutes = peers.load("peer_trl"), job.options.minutes
    task = trl.TrlTask(job, job.options.folder / "trl", save_at=evaluated(job), limit_s=60 * minutes if minutes else None)
    found: Found = trl.measure_learning(task, say)
    return found


# -- accuracy, where a run did not measure it ----------------------------------------------------------------------------------------------


def measure_beginning(job: BenchJob, say: Say) -> Found:
    """The accuracy of the model that both begin with."""
    say("evaluating the model that both begin with")
    return {"accuracy": accuracy_of(job, job.config.model.path), "error": None}


def evaluate_models(job: BenchJob, steps: Sequence[Mapping[str, Any]], say: Say) -> list[dict[str, Any]]:
    """The accuracy of every model that TRL saved. It is written down at once and the model, which may be large, deleted: if this process is
    killed, the next one evaluates the others."""
    folder = job.options.folder / "trl"
    record = folder / "accuracy.json"
    found = {point["step"]: point for point in (json.loads(record.read_text(encoding="utf-8")) if record.is_file() else [])}
    for line in steps:
        model = folder / "models" / f"step-{line['step']:08d}"
        if not model.is_dir():
            continue
        say(f"trl: evaluating its model of step {line['step']}")
        found[line["step"]] = {"step": line["step"], "seconds": line["seconds"], "accuracy": accuracy_of(job, str(model))}
        write_whole(record, json.dumps(list(found.values())))
        shutil.rmtree(model)
    return list(found.values())


def accuracy_of(job: BenchJob, model: str) -> float:
    """As a run validates."""
    overrides = [*job.options.overrides, f"model.path={model}", f"run.dir={job.options.folder / 'evaluation'}"]
    config = configuration.load(job.options.run, overrides)
    metrics = loop.evaluate(config, Console(quiet=True, stdout=sys.stderr, terminal=False), latest=False)
    let_go(job.device)
    return float(metrics[ACCURACY])


# -- both ---------------------------------------------------------------------------------------------------------------------------------


def run(job: BenchJob, say: Say) -> dict[str, Any]:
    job.options.folder.mkdir(parents=True, exist_ok=True)
    (job.options.folder / BENCH_MARKER).touch()
    found = {OURS: kept(job, OURS, measure_ours, say)}
    if "trl" in job.options.peers:
        theirs = kept(job, "trl", measure_trl, say)
        found["trl"] = theirs | {"accuracy": evaluate_models(job, theirs["steps"], say)}
    if evaluated(job):
        first = kept(job, "beginning", measure_beginning, say)["accuracy"]
        found = {name: with_beginning(each, first) for name, each in found.items()}
    return document(job, found)


def kept(job: BenchJob, name: str, measure: Callable[[BenchJob, Say], Found], say: Say) -> Found:
    """Measured now, or before in the same folder under the same conditions. What failed is measured again."""
    record = job.options.folder / f"{name}.json"
    asked = asked_of(job, name)
    known = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
    if known.get("asked") == asked and known["found"]["error"] is None:
        say(f"{name}: measured before, in {record}")
        before: Found = known["found"]
        return before
    found = measure(job, say)
    write_whole(record, json.dumps({"asked": asked, "found": found}))
    return found


def asked_of(job: BenchJob, name: str) -> dict[str, Any]:
    shared = {
        "config": configuration.snapshot(job.config),
        "minutes": job.options.minutes,
        "device": job.device.type,
        "files": state_of(job.config),
        "commit": commit(),
    }
    return shared | ({"setting": peers.load("peer_trl").one_setting(job), "generation": job.generation} if name == "trl" else {})


def state_of(config: Config) -> dict[str, list[int]]:
    """Size and time of each file that a run reads: other weights or rows under the same name must be measured anew."""
    data = [name for names in (config.data.train, config.data.val) for name in ([names] if isinstance(names, str) else names or [])]
    places = [Path(config.model.path), *map(Path, data)]
    files = [path for place in places for path in ([place] if place.is_file() else sorted(place.glob("*")))]
    return {str(path): [path.stat().st_size, path.stat().st_mtime_ns] for path in files}


def with_beginning(found: Found, accuracy: float) -> Found:
    """With the accuracy before the first step, at the second in which that began."""
    first = {"step": 0, "seconds": found.get("start_seconds") or 0.0, "accuracy": accuracy}
    return found | {"accuracy": [first, *found["accuracy"]]} if found["steps"] else found


def document(job: BenchJob, found: Mapping[str, Found]) -> dict[str, Any]:
    reached = {name: compare(found[OURS], found[name]) for name in job.options.peers}
    return {
        "benchmark": "learn",
        "ratio": next((each["ratio"] for each in reached.values() if each), None),
        "reached": reached,
        "compared_by": f"seconds until the mean reward of {WINDOW} steps is what the peer's last {WINDOW} had",
        "systems": dict(found),
        "curves": [
            asdict(curve_of([(point["step"], point["seconds"], point[metric]) for point in each[points]], name, metric))
            for name, each in found.items()
            for metric, points in (("reward", "steps"), ("accuracy", "accuracy"))
            if each[points]
        ],
        "run": configuration.snapshot(job.config),
        "steps": job.repeats,
        **report.origin(job.device),
    }


def mean_rewards(steps: Sequence[Mapping[str, Any]]) -> list[float]:
    return trailing_means([line["step"] for line in steps], [line["reward"] for line in steps], WINDOW)


def compare(ours: Found, theirs: Found) -> dict[str, Any] | None:
    """How much sooner ours had the reward that the peer ended with. None where one of them has no window of steps.

    `ratio`: the peer's own first time over ours. `ratio_of_whole`: all of the peer's seconds over ours.
    """
    both = [(found["steps"], mean_rewards(found["steps"])) for found in (ours, theirs)]
    if any(len(steps) < WINDOW for steps, _ in both):
        return None
    target = both[1][1][-1]
    # A mean of fewer steps is no mean of a window: it may be reached by chance.
    first = [
        next((line["seconds"] for line, value in list(zip(steps, means, strict=True))[WINDOW - 1 :] if value >= target), None)
        for steps, means in both
    ]
    whole = theirs["steps"][-1]["seconds"]
    return {
        "reward": target,
        "seconds": first[0],
        "their_seconds": first[1],
        "their_seconds_in_all": whole,
        "ratio": first[1] / first[0] if first[0] and first[1] else None,
        "ratio_of_whole": whole / first[0] if first[0] else None,
    }


# -- for people ---------------------------------------------------------------------------------------------------------------------------


def table(found: Mapping[str, Any]) -> str:
    run = found["run"]
    hardware = found["hardware"].get("gpu") or found["hardware"]["cpu"]
    lines = [
        f"{run['model.path']} on {hardware}: {run['algorithm.name']}, {run['algorithm.prompts_per_step']} prompts x "
        f"{run['algorithm.samples_per_prompt']} samples, at most {run['rollout.max_new_tokens']} tokens, learning rate {run['train.lr']:g}",
        "",
        *report.table_of("", {name: cells(each) for name, each in found["systems"].items()}),
        "",
        f"reward: mean of the last {WINDOW} steps, or of all if they are fewer; seconds from the start of the process, without validations",
    ]
    lines += [in_words(name, each) for name, each in found["reached"].items()]
    lines += [f"{name} failed: {each['error']}" for name, each in found["systems"].items() if each["error"]]
    return "\n".join(lines)


def cells(found: Mapping[str, Any]) -> dict[str, str]:
    steps, accuracy = found["steps"], found["accuracy"]
    ends = [line["seconds"] for line in steps]
    return {
        "steps": str(len(steps)),
        "seconds": report.number(ends[-1] if ends else None, ".1f"),
        "until the first": report.number(ends[0] if ends else None, ".1f"),
        "s a step": report.number((ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else None, ".2f"),
        "reward": report.number(mean_rewards(steps)[-1] if steps else None, ".4f"),
        "accuracy": report.number(accuracy[-1]["accuracy"] if accuracy else None, ".4f"),
        "setting": report.words(found["setting"]),
    }


def in_words(name: str, reached: Mapping[str, Any] | None) -> str:
    if reached is None:
        return f"not compared with {name}: that takes {WINDOW} steps of both"
    if reached["seconds"] is None:
        return f"{OURS} has not reached {name}'s last reward, {reached['reward']:.4f}"
    sooner = f"{reached['ratio']:.2f} times sooner" if reached["ratio"] else "sooner"
    return (
        f"{OURS} had {name}'s last reward, {reached['reward']:.4f}, after {reached['seconds']:.1f} s, {sooner} than {name} "
        f"({reached['their_seconds']:.1f} s); {name} took {reached['their_seconds_in_all']:.1f} s in all"
    )
