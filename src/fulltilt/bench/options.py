"""Options of benchmarks on the command line: one record, whose fields are the options with their help.

Enters: the values that were given. Leaves: `BenchOptions`. Guaranteed: imports no torch, so that help and mistakes are quick.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from fulltilt.records import UserError


def argument(metavar: str, words: str) -> Any:
    return typer.Argument(metavar=metavar, help=words, show_default=False)


def option(metavar: str | None, words: str, *names: str, **limits: Any) -> Any:
    return typer.Option(*names, metavar=metavar, help=words, show_default=False, **limits)


RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The configuration of the run. docs/reference.md lists every key.")]
DeviceName = Annotated[str | None, option("cuda|cpu", "Default: cuda where there is one.")]


@dataclass(frozen=True)
class BenchOptions:
    """Options of benchmarks, as they were written. A benchmark takes some of them, and may describe one in its own words. None: the
    device's default."""

    run: RunFile = Path()
    overrides: Annotated[
        list[str], argument("KEY=VALUE", "Settings of the measured run, as for train: train.recompute=full actor.token_budget=32768")
    ] = field(default_factory=list)
    model: Annotated[
        str | None,
        option(
            "SHAPE|PATH",
            "0.5B, 1.5B, 7B (Qwen2.5's shapes) or small, with random weights; or a model folder. Default: 0.5B on cuda, small on cpu.",
        ),
    ] = None
    against: Annotated[str, option("PEER", "Measure this system too: trl.")] = ""
    device: DeviceName = None
    workload: Annotated[
        str | None, option("NAME", "design, long, tail, whole or small: see docs/bench.md. Default: design on cuda, small on cpu.")
    ] = None
    prompts: Annotated[int | None, option(None, "Number of prompts, instead of the workload's.", min=1)] = None
    samples: Annotated[int | None, option(None, "Samples of each prompt, instead of the workload's.", min=1)] = None
    new_tokens: Annotated[int | None, option(None, "Tokens of every response.", min=1)] = None
    repeats: Annotated[int | None, option(None, "Measured passes. Default: 2 on cuda, 3 on cpu.", min=1)] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts, of the order of lengths, and of sampling.")] = 0
    vllm_grid: Annotated[
        str | None, option("NUMBERS", "Values of max_num_seqs that vLLM is started with, one start each. Default: 256,512,1024.")
    ] = None
    bandwidth: Annotated[float | None, option(None, "Bytes/s of the device's memory, where they are not known: see docs/bench.md.")] = None
    flops: Annotated[float | None, option(None, "FLOP/s of the device, where they are not known: see docs/bench.md.")] = None
    folder: Annotated[
        Path, typer.Option("--dir", help="Working folder of both systems. What was measured there before is not measured again.")
    ] = Path("runs/bench-learn")
    trl: Annotated[list[str], option("NAME=VALUE,VALUE", "Values to try of one of TRL's arguments: see docs/bench.md.")] = field(
        default_factory=list
    )
    generation: Annotated[
        str | None, option("vllm|transformers", "What TRL generates with. Default: vllm on cuda, transformers on cpu.")
    ] = None
    tried: Annotated[
        list[str],
        option("'KEY=VALUE ...'", "Settings by hand to measure beside auto; once for each: --try 'train.recompute=full'", "--try"),
    ] = field(default_factory=list)
    turns: Annotated[int | None, option(None, "How often each setting has its turn. Default: 2 on cuda, 1 on cpu.", min=1)] = None
    minutes: Annotated[float | None, option(None, "Stop each system after the step in which this many have passed.", min=0.01)] = None

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(split(self.against)))

    @property
    def grid(self) -> tuple[int, ...]:
        """Return the values of max_num_seqs; an empty tuple: the default. Example: "256,512" -> (256, 512)"""
        found = split(self.vllm_grid or "")
        if self.vllm_grid is not None and not (found and all(re.fullmatch(r"[1-9]\d*", word) for word in found)):
            raise UserError(f"--vllm-grid {self.vllm_grid}: give whole numbers above 0, with commas between them, for example 512,1024")
        return tuple(map(int, found))


def split(text: str) -> list[str]:
    return [word for word in (part.strip() for part in text.split(",")) if word]
