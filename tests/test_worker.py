"""The worker line: what crosses it pickles, and the loop on this side of it knows nothing of a device."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs

from fulltilt.cluster import assembly
from fulltilt.cluster.local import Local, LocalCall
from fulltilt.loop import opening

LOOP = Path(opening.__file__).parent


def across(value: Any) -> Any:
    """What another process would get."""
    return pickle.loads(pickle.dumps(value))


class PickledLine(Local):
    """One worker in this process, with every argument, item and result sent through pickle."""

    def __init__(self, worker: Any) -> None:
        super().__init__(worker)
        self.calls: set[str] = set()

    def start(self, method: str, args: Sequence[tuple[Any, ...]], *, what: str, **kind: bool) -> LocalCall:
        (own,) = args
        self.calls.add(" ".join([method, *(str(each) for each in own[:1] if method in ("annotate", "update"))]))

        def crossed() -> Generator[Any, None, Any]:
            found = getattr(self.worker, method)(*across(own))
            if not isinstance(found, Generator):
                return across(found)
            try:
                while True:
                    yield across(next(found))
            except StopIteration as end:
                return across(end.value)
            finally:
                found.close()

        return LocalCall(SimpleNamespace(crossed=crossed), "crossed", (), what)


PPO = ("algorithm.name=ppo", "algorithm.kl_coef=0.05", "run.steps=2", "run.eval_every=2", "run.eval_before=false")


@pytest.mark.parametrize(
    ("tables", "overrides", "calls"),
    [
        (runs.GRPO, PPO, {"generate", "annotate ref", "annotate critic", "update actor", "update critic", "save"}),
        pytest.param(runs.SFT, ("run.steps=2", "run.eval_every=2"), {"update actor", "annotate actor", "save"}, marks=pytest.mark.long),
    ],
    ids=["ppo", "sft"],
)
def test_a_run_is_the_same_when_everything_crosses_the_line_as_bytes(
    model_folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    tables: dict[str, Any], overrides: tuple[str, ...], calls: set[str],
) -> None:  # fmt: skip
    here, there = (runs.make(tmp_path / name, model_folders("qwen2"), tables) for name in ("here", "there"))
    runs.train(here, *overrides)
    lines: list[PickledLine] = []

    def pickled_line(worker: Any) -> PickledLine:
        lines.append(PickledLine(worker))
        return lines[-1]

    monkeypatch.setattr(assembly, "Local", pickled_line)
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
