"""A run resumes only with what it was started with: files that changed since are told by name, before anything is written."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import runs

from fulltilt.cluster.checks import among_own_checkpoints
from fulltilt.records import UserError

ModelFolders = Callable[[str], Path]


@pytest.fixture(scope="module")
def one_step(tmp_path_factory: pytest.TempPathFactory, model_folders: ModelFolders) -> Path:
    """A run after its first step, with a model of its own. Tests copy it."""
    folder = runs.make(tmp_path_factory.mktemp("one_step") / "folder", model_folders("qwen2"))
    (folder / "model").unlink()
    shutil.copytree(model_folders("qwen2"), folder / "model")
    runs.train(folder, "run.steps=1", "run.eval_before=false")
    return folder


@pytest.fixture
def folder(one_step: Path, tmp_path: Path) -> Path:
    return runs.copy(one_step, tmp_path / "folder")


@pytest.mark.parametrize("key", ["model.path", "ref.path"])
def test_a_model_among_the_checkpoints_that_the_run_deletes_is_refused(folder: Path, key: str) -> None:
    (folder / "link").symlink_to("run/checkpoints/step-00000001/model")
    for path in ("run/checkpoints/step-00000001/model", "link"):
        with pytest.raises(UserError, match=rf"{key}: \S+ is in run/checkpoints, .* Use another run\.dir"):
            runs.train(folder, f"{key}={path}", "run.resume=force", "run.steps=2")
    assert f"{key}: " in runs.command_here(folder, "train", "run.toml", f"{key}=link", "run.resume=force", "--check").error
    with contextlib.chdir(folder):
        assert not list(among_own_checkpoints(runs.read_config(folder, f"{key}=link", "run.dir=second")))
