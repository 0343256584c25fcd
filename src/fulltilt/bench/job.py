"""The request to a benchmark, resolved and checked.

Enters: the options of the command line and a scratch folder. Leaves: a `BenchJob`: device, model, requests, and the configuration of the
measured run. Guaranteed: mistakes in options, settings and peers are reported before anything but small files is written; a setting
(KEY=VALUE) is read and checked as for `fulltilt train`, and one that belongs to the workload is refused.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from fulltilt import config as configuration
from fulltilt import knobs
from fulltilt.algo.build import build
from fulltilt.bench import peers, roofline, shapes
from fulltilt.bench.device import choose_device, device_name
from fulltilt.bench.options import BenchOptions
from fulltilt.bench.workload import WORKLOADS, Even, Requests, Workload, make_requests
from fulltilt.cluster.assembly import open_device
from fulltilt.cluster.checks import wrong_settings
from fulltilt.data.order import Cursor
from fulltilt.data.prompts import load_prompts
from fulltilt.folders import refuse_foreign_json
from fulltilt.model.load import choose_dtype, load_tokenizer
from fulltilt.plan.decisions import count_steps
from fulltilt.records import Prompt, UserError
from fulltilt.schema import Config, flatten

# Keys that are not performance knobs but also only decide how a run is executed.
EXECUTION = ("model.dtype", "rollout.block_tokens", "run.threads", "run.deterministic")
REPEATS = {"cuda": 2, "cpu": 3}  # a CPU is shared with other programs
REWARD = '''"""A number from 0 to 1 that depends on the whole text and not on its length."""
import zlib


def score(solution_str):
    return zlib.crc32(solution_str.encode()) / 2**32
'''


@dataclass(frozen=True, eq=False)
class BenchJob:
    """Options of a benchmark, resolved and checked."""

    options: BenchOptions
    device: torch.device
    config: Config  # configuration of the measured run
    source: shapes.Source
    repeats: int  # measured passes or steps
    scratch: Path
    requests: tuple[Requests, ...] = ()  # one for rollouts and updates, one for each step, none for a run file

    @property
    def samples(self) -> int:
        """Number of samples of a step, or of a pass."""
        return self.config.algorithm.prompts_per_step * self.config.algorithm.samples_per_prompt

    @property
    def dtype(self) -> str:
        return str(choose_dtype(self.config.model.dtype, self.device)).removeprefix("torch.")

    @property
    def kv_bytes(self) -> int | None:
        """Bytes of the KV cache of every engine; None: each engine decides."""
        given = self.config.rollout.kv_bytes
        return None if given == "auto" else given

    @property
    def given(self) -> dict[str, Any]:
        """The settings that were given, by key."""
        values = flatten(self.config)
        return {key: values[key] for key in (text.partition("=")[0].strip() for text in self.options.overrides)}

    @property
    def generation(self) -> str:
        """The engine with which TRL generates."""
        return self.options.generation or str(peers.load("peer_trl").BY_DEVICE[self.device.type])

    def nominal(self, figure: Literal["bandwidth", "flops"]) -> float | None:
        """Return the device's bandwidth or arithmetic: the given figure, or the known one."""
        known = roofline.device_named(device_name(self.device))
        return getattr(self.options, figure) or (getattr(known, figure) if known else None)


def resolve(
    options: BenchOptions, scratch: Path, settings: Sequence[str], known_peers: Sequence[str] = (), *,
    workloads: Mapping[str, Workload] = WORKLOADS, repeats: Mapping[str, int] = REPEATS, warm_up: int = 0,
    make_words: Callable[[int], Sequence[str]] | None = None,
) -> BenchJob:  # fmt: skip
    """Return the job of a benchmark with a workload. `settings`: beginnings of the keys that may be set; `workloads`: the first is the
    default on CUDA, the last on a CPU; `repeats`: the default by device; `make_words`: returns the words of a vocabulary that prompts are
    made of, if a run reads them from a file, for `warm_up` steps and the measured ones."""
    device = choose_device(options.device)
    check_peers(options, known_peers, device)
    check_figures(options)
    check_keys(options.overrides, settings)
    name = options.workload or list(workloads)[0 if device.type == "cuda" else -1]
    if name not in workloads:
        raise UserError(f"--workload {name}: unknown workload; choose from {', '.join(workloads)}")
    workload, source = resized(workloads[name], options), shapes.find(options.model or shapes.DEFAULT[device.type])
    count, words = options.repeats or repeats[device.type], make_words(source.vocabulary) if make_words else ()
    requests = tuple(
        make_requests(workload, len(words) or source.vocabulary, options.seed + step) for step in range(warm_up + count if words else 1)
    )
    check_positions(name, source, requests[0])
    shapes.write_config(source, device, scratch / "model")
    texts = ["".join(words[number] for number in prompt.ids.tolist()) for each in requests for prompt in each.prompts] if words else []
    (scratch / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    (scratch / "reward.py").write_text(REWARD, encoding="utf-8")
    run = {"dir": str(scratch / "run"), "steps": len(requests), "seed": options.seed, "device": device.type}
    tables = run_tables(source, requests, scratch) | {"run": run}
    config = configuration.parse(tables, options.overrides, "fulltilt bench")
    open_device(config, wrong_settings(config, build(config), device.type))
    return BenchJob(options, device, config, source, count, scratch, requests)


def run_tables(source: shapes.Source, requests: Sequence[Requests], scratch: Path) -> dict[str, dict[str, Any]]:
    """Return the configuration of a run that makes these steps, as a file would have it."""
    workload, longest = requests[0].workload, max(each.longest_prompt for each in requests)
    return {
        "model": {"path": str(source.folder or scratch / "model")},
        "data": {"train": str(scratch / "prompts.jsonl"), "max_prompt_tokens": longest, "shuffle": False},
        "algorithm": {
            "name": "grpo" if workload.samples > 1 else "reinforce++",  # the same loss, for groups of one
            "prompts_per_step": workload.prompts,
            "samples_per_prompt": workload.samples,
        },
        "rollout": {"max_new_tokens": workload.response_tokens.high, "kv_bytes": workload.kv_bytes or "auto"},
        "reward": {"function": f"{scratch / 'reward.py'}:score"},
    }


def resized(workload: Workload, options: BenchOptions) -> Workload:
    workload = replace(workload, prompts=options.prompts or workload.prompts, samples=options.samples or workload.samples)
    tokens = options.new_tokens
    return replace(workload, response_tokens=Even(tokens, tokens)) if tokens else workload


def check_figures(options: BenchOptions) -> None:
    """Refuse impossible nominal figures of the device, for a roofline or the MFU."""
    for option, value in (("--bandwidth", options.bandwidth), ("--flops", options.flops)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UserError(f"{option} {value}: give a finite number above 0, per second, for example 4.8e12")


def check_keys(overrides: Sequence[str], taken: Sequence[str]) -> None:
    """Refuse settings that are not about execution: what the measured run computes is the workload's. `taken`: beginnings of the keys that
    may be set."""
    for text in overrides:
        key, equals, _ = text.partition("=")
        known = knobs.find(key.strip())
        name = known[0][0].name if known else key.strip()
        if name == "rollout.engine":
            raise UserError(f"{text}: this measures the native engine. Others are peers: --against hf, --against vllm")
        if not equals or not (known or name in EXECUTION or name in taken) or not name.startswith((*taken, *EXECUTION)):
            raise UserError(
                f"{text}: not a setting of this measurement. Write KEY=VALUE, for example actor.token_budget=32768, with a performance "
                f"knob (`fulltilt knobs` lists them) or one of {', '.join(EXECUTION)}; keys here begin with {', '.join(taken)}, and the "
                "workload has options of its own"
            )


def check_positions(name: str, source: shapes.Source, requests: Requests) -> None:
    made_for = getattr(source.config.get_text_config(), "max_position_embeddings", None)
    if made_for and requests.positions > made_for:
        raise UserError(
            f"--workload {name}: a prompt of {requests.longest_prompt} tokens with a response of {requests.longest_response} needs "
            f"{requests.positions} positions, and {source.name} was made for {made_for}. Choose a shorter workload or another model"
        )


def check_peers(options: BenchOptions, known: Sequence[str], device: torch.device) -> None:
    """Refuse peers that do not exist or cannot run here, and options about a peer that is not measured."""
    names = options.peers
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"--against {options.against}: unknown peer {', '.join(map(repr, unknown))}; choose from {', '.join(known)}")
    about = {"--vllm-grid": ("vllm", options.grid), "--trl": ("trl", options.trl), "--generation": ("trl", options.generation)}
    for option, (peer, given) in about.items():
        if given and peer not in names:
            raise UserError(f"{option}: {peer} is not measured here. Add it (--against {peer}), or leave the option out")
    if "vllm" in names and peers.load("peer_vllm") and not peers.installed("vllm"):
        raise UserError(
            '--against vllm: vLLM is not installed in this environment. Install it (pip install "fulltilt[vllm]"), or leave it out: '
            "--against hf"
        )
    if "trl" in names:
        peers.load("peer_trl").check(options.generation, device.type)


def run_batches(config: Config) -> Iterator[tuple[Prompt, ...]]:
    """Yield the prompts of each step, as a run takes them."""
    data = load_prompts(config.data.train, load_tokenizer(config.model), config.data)
    cursor, count = Cursor(), config.algorithm.prompts_per_step
    for _ in range(count_steps(config, data.steps_per_epoch(count))):
        prompts, cursor = data.take(cursor, count, config.run.seed, config.data.shuffle)
        yield prompts


# -- the file of the result ---------------------------------------------------------------------------------------------------------------


def check_writable(option: str, file: Path) -> None:
    """Refuse a file that is not a benchmark's. Tries to open it, since more than permissions can prevent writing. Leaves no new file
    behind."""
    if not file.parent.is_dir():
        raise UserError(f"{option} {file}: there is no folder {file.parent}. Make it first")
    refuse_foreign_json(file, "benchmark", f"{option} {file}")
    known = os.path.lexists(file)
    try:
        file.open("a", encoding="utf-8").close()
    except OSError as error:
        raise UserError(f"{option} {file}: it cannot be written ({error.strerror}). Give a file that can") from error
    if not known:
        file.unlink()


def write_text(option: str, file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{option} {file}: it could not be written ({error.strerror}). What was measured is on standard output") from error
