"""What collectives move is what one function predicts, to the byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import devices
import numpy as np
import pytest
import runs
import torch

from fulltilt.bench import scaling
from fulltilt.cluster.assembly import RunParts
from fulltilt.parallel.shard import neighbours
from fulltilt.parallel.traffic import Learner, predict, sent_bytes
from fulltilt.records import Row

ModelFolders = Callable[[str], Path]
UPDATES = 4  # two mini-batches, twice
KINDS = ("all-reduce", "all-gather", "reduce-scatter")
CASES = {
    "tied": ("llama-tied", ()),
    "lora": ("qwen2", ("lora.rank=4", "model.dtype=bfloat16")),
    "ppo": ("qwen2", ("algorithm.name=ppo",)),
}


def sizes(model: torch.nn.Module) -> dict[str, list[list[int]]]:
    """Numbers of each trained parameter, by type."""
    found: dict[str, list[list[int]]] = {}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for run in neighbours(trained):
        found.setdefault(str(trained[run[0]].dtype).removeprefix("torch."), []).append([trained[name].numel() for name in run])
    return found


def made_up_rows() -> list[Row]:
    random = np.random.default_rng(0)

    def numbers(length: int) -> np.ndarray:
        return random.normal(size=length).astype(np.float32)

    return [
        Row(
            random.integers(3, 90, length), np.arange(length) >= 4, group=place, rollout_logprobs=numbers(length) - 4,
            old_logprobs=numbers(length) - 4, advantages=numbers(length), values=numbers(length), returns=numbers(length),
        )
        for place, length in enumerate((9, 17, 30, 12))
    ]  # fmt: skip


def moved_in_a_step(parts: RunParts) -> dict[str, float]:
    for role in ("actor", *(["critic"] if parts.algorithm.value_loss else [])):
        with parts.crew.phase(f"update-{role}"):
            updated = parts.crew.update(role, made_up_rows(), 0, lambda done, total: None)
        assert updated[f"{role}/updates"] == UPDATES and not updated[f"{role}/skipped_updates"]
        if parts.crew.hosts.size > 1:
            assert 0 < updated[f"timing_s/workers/update_{role}/mean"] <= updated[f"timing_s/workers/update_{role}/max"]
    with parts.crew.phase("sync"):
        parts.crew.sync(1)
    found = parts.crew.metrics()
    spread = {name: found[name] for name in found if name.startswith("memory_spread_gib/")}
    if parts.crew.hosts.size > 1:
        assert spread.keys() == {"memory_spread_gib/process"} and 0 <= spread["memory_spread_gib/process"] < found["memory_gib/process"]
    else:
        assert not spread
    assert not [name for name in parts.crew.metrics() if name.startswith("communication/")], "they are of one step"
    return {name: count for name, count in found.items() if name.startswith("communication/")}


@pytest.mark.parametrize(
    ("case", "workers"),
    [
        pytest.param(case, workers, marks=() if (case, workers) in (("tied", 2), ("lora", 3), ("ppo", 4)) else pytest.mark.long)
        for case in CASES
        for workers in (2, 3, 4)
    ],
)
def test_a_step_moves_what_is_predicted(
    pool_of_devices: devices.Pool, model_folders: ModelFolders, tmp_path: Path, case: str, workers: int
) -> None:
    family, overrides = CASES[case]
    overrides = ("algorithm.kl_coef=0", "algorithm.epochs=2", *overrides)
    folder = runs.make(tmp_path / "run", model_folders(family))
    with pool_of_devices.assembled(folder, 1, *overrides) as parts:
        learners = [Learner(sizes(trainer.role.model), UPDATES) for trainer in parts.worker.trainers.values()]
        assert moved_in_a_step(parts) == {}
    assert len(learners) == (2 if case == "ppo" else 1)
    with pool_of_devices.assembled(folder, workers, *overrides) as parts:
        expected = predict(learners, workers)
        assert expected.keys() == set(KINDS)
        assert moved_in_a_step(parts) == {f"communication/{kind.replace('-', '_')}_bytes": count for kind, count in expected.items()}


def test_large_models() -> None:
    one = predict([Learner({"bfloat16": [(7 * 10**9,)]}, 3)], 8)
    assert one == {"all-gather": 3 * 14e9, "reduce-scatter": 3 * 28e9, "all-reduce": 3 * 12}
    assert sent_bytes(Counter({"all-gather": 800, "reduce-scatter": 80, "all-reduce": 8}), 8) == 700 + 70 + 14


def test_the_page_shows_the_table_that_the_command_prints() -> None:
    page = (Path(__file__).parents[1] / "docs" / "scaling.md").read_text()
    assert "\n".join(scaling.table()) in page
