"""transformers' `generate` as a rollout engine of whole runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import runs

from fulltilt.cluster.checks import find_mistakes
from fulltilt.records import UserError

HF = ("rollout.engine=hf", "run.steps=2", "run.eval_every=2", "run.eval_before=false", "algorithm.kl_coef=0.0")


@pytest.fixture
def folder(model_folders: Callable[[str], Path], tmp_path: Path) -> Path:
    return runs.make(tmp_path / "folder", model_folders("qwen2"))


def test_a_run_trains_on_its_samples_and_the_trainer_agrees_with_its_logprobs(folder: Path) -> None:
    """The second step would show a gap if the weights of the first update had not reached the engine."""
    runs.train(folder, *HF)
    lines = [line for line in runs.metrics(folder) if line["step"]]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["rollout_corr/logprob_abs_gap"] < 1e-5 and line["actor/grad_norm"] > 0
    assert any(entry["finish"] == "length" for entry in runs.rollouts(folder, 2))


def test_samples_in_batches_no_larger_than_max_seqs(folder: Path) -> None:
    said = runs.train(folder, *HF, "run.steps=1", "rollout.max_seqs=4").said
    assert "at most 4 samples at once" in said
    assert runs.metrics(folder)[-1]["rollout/most_running"] == 4


def test_what_it_does_not_obey_is_refused(folder: Path) -> None:
    config = runs.read_config(folder, *HF, "rollout.prefix_sharing=false", "rollout.kv_bytes=100000")
    found = [text for text in find_mistakes(config) if text.startswith("rollout.")]
    assert [text.partition(":")[0] for text in found] == ["rollout.kv_bytes", "rollout.prefix_sharing"]
    assert all('rollout.engine = "hf" does not use it' in text for text in found)
    config = runs.read_config(folder, *HF, "lora.rank=2")
    assert [text for text in find_mistakes(config) if "runs no adapters" in text]
    with pytest.raises(UserError, match=r'rollout\.engine: "hf" runs no adapters'):
        runs.train(folder, *HF, "lora.rank=2")
