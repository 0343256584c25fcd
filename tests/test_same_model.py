"""All workers have the same model: a hub name is one commit for all of them, and what they have loaded is compared."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import forked
import hub_server
import pytest
import runs
import torch
from huggingface_hub import constants

import fulltilt
from fulltilt.cluster import assembly, checks, keeper, making
from fulltilt.cluster.crew import require_same_models
from fulltilt.cluster.keeper import HubModel, Questions, facts_of_machine
from fulltilt.cluster.loading import Models
from fulltilt.cluster.worker import Replica
from fulltilt.commits import at_commits
from fulltilt.loop import opening
from fulltilt.loop.saved import SavedState, pinned_commits
from fulltilt.model import load
from fulltilt.records import UserError
from fulltilt.schema import Config, ModelConfig

ModelFolders = Callable[[str], Path]
OLD, NEW = "a" * 40, "b" * 40
MODEL = HubModel("org/tiny", OLD)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a hub's model in this process's cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "models--org--tiny"
    (folder / "refs").mkdir(parents=True)
    return folder


def name_commit(cache: Path, commit: str) -> None:
    (cache / "refs" / "main").write_text(commit)


@contextlib.contextmanager
def assembled(config: Config, folder: Path) -> Iterator[assembly.RunParts]:
    with contextlib.chdir(folder), contextlib.closing(assembly.assemble(config)) as parts:
        yield parts


# -- a hub name is one commit --------------------------------------------------------------------------------------------------------------


def test_a_hub_name_stands_for_a_commit(cache: Path, model_folders: ModelFolders) -> None:
    shutil.copytree(model_folders("qwen2"), cache / "snapshots" / OLD)
    name_commit(cache, OLD)
    given = ModelConfig(path="org/tiny", revision="main")
    paths = {"model.path": "org/tiny", "ref.path": str(model_folders("qwen2"))}
    commits = load.commits_of(given, paths)
    assert commits == {"org/tiny": OLD}, "a folder has no commit"
    with at_commits(commits):
        assert load.origin(given, "org/tiny")["revision"] == OLD
        assert "revision" not in load.origin(given, "org/other")
    assert load.origin(given, "org/tiny")["revision"] == "main" and "revision" not in load.origin(given, "org/other")


def test_workers_read_the_commit_that_the_driver_has_found(
    cache: Path, tmp_path: Path, model_folders: ModelFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The branch moves to a commit without files while the driver reads the data."""
    shutil.copytree(model_folders("qwen2"), cache / "snapshots" / OLD)
    name_commit(cache, OLD)
    folder, read = runs.make(tmp_path / "folder", model_folders("qwen2")), checks.read_training_data

    def read_and_move(*args: Any) -> checks.RunData:
        found = read(*args)
        name_commit(cache, NEW)
        return found

    monkeypatch.setattr(assembly, "read_training_data", read_and_move)
    forked.use(monkeypatch)
    config = runs.read_config(folder, "model.path=org/tiny", "cluster.workers=2")
    with assembled(config, folder) as parts:
        assert parts.crew.hosts.size == 2
    with pytest.raises(UserError, match=r"model.path: the configuration of org/tiny could not be loaded"):
        load.read_config(config.model)


def two_commits(cache: Path, one: Path, other: Path) -> None:
    """The branch is at the first."""
    shutil.copytree(one, cache / "snapshots" / OLD)
    shutil.copytree(other, cache / "snapshots" / NEW)
    name_commit(cache, OLD)


@pytest.mark.long
def test_a_resumed_run_reads_the_commit_that_it_began_with(cache: Path, tmp_path: Path, model_folders: ModelFolders) -> None:
    """Its tokenizer and its reference model are not in its checkpoints. The hub has another model since."""
    two_commits(cache, model_folders("qwen2"), model_folders("llama"))
    model, whole = "model.path=org/tiny", runs.make(tmp_path / "whole", model_folders("qwen2"))
    runs.train(whole, model, "run.steps=2")
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    runs.train(folder, model, "run.steps=1")
    name_commit(cache, NEW)
    with contextlib.chdir(folder):
        assert opening.find_mistakes(runs.read_config(folder, model, "run.steps=2")) == []
    runs.train(folder, model, "run.steps=2")
    assert runs.comparable(runs.metrics(folder)) == runs.comparable(runs.metrics(whole))
    assert [runs.state(path)["commits"] for path in runs.checkpoints(folder).values()][-1] == {"org/tiny": OLD}
    shutil.rmtree(cache / "snapshots" / OLD)
    lost = rf"model.path: the configuration of org/tiny could not be loaded: .*`hf download org/tiny --revision {OLD}`"
    with pytest.raises(UserError, match=lost):
        runs.train(folder, model, "run.steps=3")


def test_a_damaged_file_of_a_commit_is_not_to_be_downloaded(cache: Path, model_folders: ModelFolders) -> None:
    """The hub's cache has it, and would not fetch it again."""
    shutil.copytree(model_folders("qwen2"), cache / "snapshots" / OLD)
    weights = cache / "snapshots" / OLD / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with at_commits({"org/tiny": OLD}), pytest.raises(UserError) as refused:
        load.load_model(ModelConfig(path="org/tiny"), torch.device("cpu"))
    assert f"of commit {OLD} in the hub's cache" in str(refused.value) and "hf download" not in str(refused.value)


@pytest.mark.long
def test_adapters_generate_on_the_base_that_they_were_trained_on(cache: Path, tmp_path: Path, model_folders: ModelFolders) -> None:
    two_commits(cache, model_folders("qwen2"), model_folders("llama"))
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    runs.train(folder, "model.path=org/tiny", "lora.rank=2", "algorithm.kl_coef=0", "run.steps=1")

    before = fulltilt.generate(folder / "run", ["1+1="], max_new_tokens=8)
    name_commit(cache, NEW)
    assert fulltilt.generate(folder / "run", ["1+1="], max_new_tokens=8) == before


def test_another_revision_is_another_commit(cache: Path, tmp_path: Path, model_folders: ModelFolders) -> None:
    two_commits(cache, model_folders("qwen2"), model_folders("qwen2"))
    config = runs.read_config(runs.make(tmp_path / "folder", model_folders("qwen2")), "model.path=org/tiny")
    state = SavedState.model_construct(commits={"org/tiny": OLD, "org/other": NEW})
    assert pinned_commits(config, state, ["train.lr"]) == {"org/tiny": OLD, "org/other": NEW}
    assert pinned_commits(config, state, ["model.revision"]) == {"org/other": NEW}


def test_the_hub_is_asked_after_the_users_own_code(cache: Path, tmp_path: Path, model_folders: ModelFolders) -> None:
    two_commits(cache, model_folders("qwen2"), model_folders("qwen2"))
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    (folder / "mine.py").write_text("def score(solution_str):\n    return 1.0\n")
    config = runs.read_config(folder, "model.path=org/tiny", "reward.function=mine.py:score")
    (folder / "mine.py").write_text("def score(solution_str)\n")
    name_commit(cache, "c" * 40)
    with pytest.raises(UserError, match=r"mine\.py"), assembled(config, folder):
        pass
    (folder / "mine.py").write_text("def score(solution_str):\n    return 1.0\n")
    with pytest.raises(UserError, match=r"model.path: the configuration of org/tiny could not be loaded"), assembled(config, folder):
        pass


# -- what the keeper of a machine says of it -----------------------------------------------------------------------------------------------


def test_a_machine_says_which_models_it_cannot_find(cache: Path, tmp_path: Path) -> None:
    questions = Questions(str(tmp_path), os.sep, (), (MODEL,))
    (why,) = facts_of_machine(questions).without.values()
    assert "offline" in why.lower()
    folder = cache / "snapshots" / OLD
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert facts_of_machine(questions).without, "its weights were not downloaded"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    (folder / "1.safetensors").touch()
    assert facts_of_machine(questions).without, "one of two files of weights was not downloaded"
    (folder / "2.safetensors").touch()
    assert facts_of_machine(questions).without == {}
    (folder / "model.safetensors.index.json").unlink()
    assert keeper.has_weights(folder)


def test_a_machine_that_reaches_the_hub_can_find_a_model(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_server.serve() as hub:
        hub.use_in_tests(monkeypatch, cache.parent)
        commit = hub.commit("models", "org/tiny", {"config.json": b"{}"})
        assert keeper.why_not_found(HubModel("org/tiny", commit)) == ""
        assert keeper.why_not_found(MODEL) == "the hub has no such commit"
        hub.gated.add("org/tiny")
        assert keeper.why_not_found(MODEL) == "", "workers have a token, perhaps"
        hub.broken = True
        assert "503" in keeper.why_not_found(MODEL)


# -- what was loaded is compared -----------------------------------------------------------------------------------------------------------


def test_workers_that_have_loaded_different_numbers_are_refused(
    tmp_path: Path, model_folders: ModelFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = making.load_models

    def load_otherwise(config: Config, roles: Collection[str], *args: Any, **options: Any) -> Models:
        models = own(config, roles, *args, **options)
        if os.environ.get("FULLTILT_WORKER") == "1":
            with torch.no_grad():
                next(models.own["ref"].parameters())[0] += 1
        return models

    monkeypatch.setattr(making, "load_models", load_otherwise)
    forked.use(monkeypatch)
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    told = "the ref's parameters on workers 0 and 1 differ after loading.*Compare the files on all machines"
    with pytest.raises(UserError, match=told), assembled(runs.read_config(folder, "cluster.workers=2"), folder):
        pass


def test_only_workers_with_the_same_part_are_compared() -> None:
    parts = {0: Replica((0, 0, 0), "x"), 1: Replica((1, 0, 0), "y"), 2: Replica((0, 0, 0), "x"), 3: Replica((1, 0, 0), "y")}
    require_same_models("critic", parts)
    others = {**parts, 4: Replica((0, 0, 0), "x"), 5: Replica((1, 0, 0), "y"), 6: Replica((0, 0, 0), "y")}
    with pytest.raises(UserError, match="the critic's parameters on worker 6 differ from those of the other 3 workers after loading"):
        require_same_models("critic", others)


def test_one_complete_index_is_enough(tmp_path: Path) -> None:
    """Who leaves out the files of another format may still have its index."""
    (tmp_path / "config.json").write_text("{}")
    for name in ("model.safetensors", "pytorch_model.bin"):
        (tmp_path / f"{name}.index.json").write_text(json.dumps({"weight_map": {"a": f"1-{name}", "b": f"2-{name}"}}))
    assert not keeper.has_weights(tmp_path)
    (tmp_path / "1-model.safetensors").touch()
    assert not keeper.has_weights(tmp_path)
    (tmp_path / "2-model.safetensors").touch()
    assert keeper.has_weights(tmp_path)
