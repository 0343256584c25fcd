"""The worker line: what crosses it pickles, and the loop on this side of it knows nothing of a device."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs

from fulltilt.cluster.worker import Annotated, Metrics, Report, Worker
from fulltilt.loop import opening
from fulltilt.records import Group, Prompt, Row
from fulltilt.rollout.sampler import Sampling
from fulltilt.rollout.stats import EngineStats

LOOP = Path(opening.__file__).parent


def across(value: Any) -> Any:
    """What another process would get."""
    return pickle.loads(pickle.dumps(value))


class Elsewhere:
    """Stands where processes will: the same calls, with every argument and result sent through pickle."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.calls: set[str] = set()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self.worker.phase(across(name)):
            yield

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int) -> Iterator[Group]:
        self.calls.add("generate")
        for group in self.worker.generate(across(list(prompts)), across(sampling), across(seed)):
            yield across(group)

    def annotate(self, role: str, field: str, rows: Sequence[Row], report: Report) -> Annotated:
        self.calls.add(f"annotate {role}")
        found: Annotated = across(self.worker.annotate(role, field, across(rows), lambda *done: report(*across(done))))
        return found

    def update(self, role: str, rows: Sequence[Row], updates_before: int, report: Report) -> Metrics:
        self.calls.add(f"update {role}")
        found: Metrics = across(self.worker.update(role, across(rows), across(updates_before), lambda *done: report(*across(done))))
        return found

    def sum_logprobs(self, rows: Sequence[Row]) -> tuple[float, int]:
        self.calls.add("sum_logprobs")
        found: tuple[float, int] = across(self.worker.sum_logprobs(across(rows)))
        return found

    def save(self, arrays: Mapping[str, np.ndarray], folder: Path, beside: bool) -> None:
        self.calls.add("save")
        self.worker.save(across(arrays), across(folder), across(beside))

    def finish_save(self) -> None:
        self.worker.finish_save()

    def sync(self, version: int) -> None:
        self.worker.sync(across(version))

    def report_rollout(self, say: Callable[[str], None], interval: float) -> None:
        self.worker.report_rollout(say, interval)

    def rollout_stats(self) -> EngineStats:
        found: EngineStats = across(self.worker.rollout_stats())
        return found

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = across(self.worker.metrics())
        return found

    def pending_memory(self) -> dict[str, Any]:
        found: dict[str, Any] = across(self.worker.pending_memory())
        return found

    def restore_memory(self, pending: Mapping[str, Any]) -> None:
        self.worker.restore_memory(across(pending))

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = across(self.worker.state())
        return found

    @property
    def checkpoint_bytes(self) -> int:
        return self.worker.checkpoint_bytes

    def close(self) -> None:
        self.worker.close()


PPO = ("algorithm.name=ppo", "algorithm.kl_coef=0.05", "run.steps=2", "run.eval_every=2", "run.eval_before=false")


@pytest.mark.parametrize(
    ("tables", "overrides", "calls"),
    [
        (runs.GRPO, PPO, {"generate", "annotate ref", "annotate critic", "update actor", "update critic", "save"}),
        (runs.SFT, ("run.steps=2", "run.eval_every=2"), {"update actor", "sum_logprobs", "save"}),
    ],
    ids=["ppo", "sft"],
)
def test_a_run_is_the_same_when_everything_crosses_the_line_as_bytes(
    model_folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    tables: dict[str, Any], overrides: tuple[str, ...], calls: set[str],
) -> None:  # fmt: skip
    here, there = (runs.make(tmp_path / name, model_folders("qwen2"), tables) for name in ("here", "there"))
    runs.train(here, *overrides)
    lines: list[Elsewhere] = []

    def elsewhere(*given: Any, **named: Any) -> Any:
        parts = assemble(*given, **named)
        lines.append(Elsewhere(parts.worker))
        return replace(parts, worker=lines[-1])  # type: ignore[arg-type]

    assemble = opening.assemble
    monkeypatch.setattr(opening, "assemble", elsewhere)
    runs.train(there, *overrides)
    assert calls <= lines[0].calls
    runs.assert_equal_runs(there, here)


def test_the_loop_imports_nothing_that_knows_a_device() -> None:
    device = {"torch", "transformers", "fulltilt.model", "fulltilt.kernels", "fulltilt.memory", "fulltilt.training.optim"}
    device |= {"fulltilt.training.roles", "fulltilt.training.trainer", "fulltilt.rollout.engine", "fulltilt.batching"}
    files = sorted(LOOP.glob("*.py"))
    assert len(files) >= 5
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            named = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in named for part in device if name == part or name.startswith(f"{part}.")], file.name
