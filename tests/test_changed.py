"""A run resumes only with what it was started with: files that changed since are told by name, before anything is written."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import runs

from fulltilt import folders
from fulltilt.loop import saved
from fulltilt.loop.opening import find_mistakes
from fulltilt.plan.legal import among_own_checkpoints
from fulltilt.records import UserError
from fulltilt.training.checkpoint import CheckpointStore
from fulltilt.user_code import imported_files, locate

ModelFolders = Callable[[str], Path]


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory, model_folders: ModelFolders) -> Path:
    """A run of two steps, with a model of its own. Tests copy it."""
    folder = runs.make(tmp_path_factory.mktemp("two_steps") / "folder", model_folders("qwen2"))
    (folder / "model").unlink()
    shutil.copytree(model_folders("qwen2"), folder / "model")
    with (folder / "reward.py").open("a") as rewards:
        rewards.write("import helper\n")
    (folder / "helper.py").write_text("FACTOR = 1\n")
    runs.train(folder, "run.steps=2", "run.eval_before=false")
    return folder


@pytest.fixture
def folder(two_steps: Path, tmp_path: Path) -> Path:
    return runs.copy(two_steps, tmp_path / "folder")


@pytest.mark.parametrize("key", ["model.path", "ref.path"])
def test_a_model_among_the_checkpoints_that_the_run_deletes_is_refused(folder: Path, key: str) -> None:
    (folder / "link").symlink_to("run/checkpoints/step-00000002/model")
    for path in ("run/checkpoints/step-00000002/model", "link"):
        with pytest.raises(UserError, match=rf"{key}: \S+ is in run/checkpoints, .* Use another run\.dir"):
            runs.train(folder, f"{key}={path}", "run.resume=force", "run.steps=3")
    assert f"{key}: " in runs.command_here(folder, "train", "run.toml", f"{key}=link", "run.resume=force", "--check").error
    with contextlib.chdir(folder):
        assert not list(among_own_checkpoints(runs.read_config(folder, f"{key}=link", "run.dir=second")))


# -- files and rows that changed --------------------------------------------------------------------------------------------------------


def compared(folder: Path, *overrides: str) -> list[str]:
    """Why the run is not resumed, as far as keys and files decide."""
    config = runs.read_config(folder, *overrides)
    with contextlib.chdir(folder):
        found = CheckpointStore(Path("run/checkpoints"), 1).latest(hashes=False)
        assert found is not None
        return [change.refusal for change in saved.changes_since(config, saved.read_state(found), saved.file_digests(config))]


def edit(file: Path) -> None:
    """Another byte near its end, a digit's if it is one."""
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "tokenizer_config.json"])
def test_a_model_that_changed_in_its_place_is_refused_by_its_file(folder: Path, name: str) -> None:
    assert compared(folder) == []
    edit(folder / "model" / name)
    (refusal,) = compared(folder)
    assert f"run holds a run at step 2 that was started with another content of model.path ({name}). Use another run.dir" in refusal


def test_a_template_added_to_a_models_folder_is_noticed_and_notes_are_not(folder: Path) -> None:
    (folder / "model" / "README.md").write_text("mine")
    assert compared(folder) == []
    (folder / "model" / "chat_template.jinja").write_text("{{ messages }}")
    assert "another content of model.path (chat_template.jinja)." in compared(folder)[0]


def test_a_model_that_was_moved_is_the_same(folder: Path) -> None:
    shutil.move(folder / "model", folder / "elsewhere")
    assert compared(folder, "model.path=elsewhere") == []
    edit(folder / "elsewhere" / "tokenizer.json")
    assert 'other values of model.path ("model", now "elsewhere")' in compared(folder, "model.path=elsewhere")[0]


def test_a_checkpoint_without_the_digests_of_models_is_resumed(folder: Path) -> None:
    (state,) = (runs.state(path) for path in runs.checkpoints(folder).values())
    digests = {name: digest for name, digest in state["files"].items() if isinstance(digest, str)}
    older = saved.SavedState.model_validate({name: value for name, value in state.items() if name != "val_data"} | {"files": digests})
    edit(folder / "model" / "tokenizer.json")
    with contextlib.chdir(folder):
        config = runs.read_config(folder)
        assert not list(saved.changes_since(config, older, saved.file_digests(config)))


def test_large_weights_are_sampled_and_other_files_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "SAMPLES", 4)
    monkeypatch.setattr(folders, "SAMPLE_BYTES", 8)

    def seen(name: str) -> list[int]:
        """The bytes of a file on which its digest depends."""
        content = bytes(120)
        (tmp_path / name).write_bytes(content)
        before, found = folders.content_digests(tmp_path), []
        for place in range(120):
            (tmp_path / name).write_bytes(content[:place] + b"x" + content[place + 1 :])
            found += [place] if folders.content_digests(tmp_path) != before else []
        return found

    assert seen("model.safetensors") == [place for start in (0, 37, 74, 111) for place in range(start, start + 8)]
    assert seen("tokenizer.json") == list(range(120))


def test_a_file_that_the_reward_imports_is_compared(folder: Path) -> None:
    edit(folder / "helper.py")
    assert "another content of files that reward.py:score imports (helper.py)." in compared(folder)[0]


def test_imports_are_found_below_the_folder_of_the_file_only(tmp_path: Path) -> None:
    files = {
        "mine/reward.py": "import json, near\nfrom package import part\nimport far\nimport reward",
        "mine/near.py": "def later():\n    import package.deep.end as end",
        "mine/package/__init__.py": "",
        "mine/package/part.py": "from . import sibling\nfrom .deep import end\nfrom ... import far\nfrom ........ import far",
        "mine/package/sibling.py": "this is no Python",
        "mine/package/deep/end.py": "from .. import part\nimport near",
        "mine/unused.py": "",
        "far.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = imported_files(locate(f"{tmp_path}/mine/reward.py:score"))
    assert sorted(found) == ["near.py", "package/__init__.py", "package/deep/end.py", "package/part.py", "package/sibling.py"]


def test_checking_tells_what_resuming_would_refuse(folder: Path) -> None:
    edit(folder / "helper.py")
    rows = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(rows[:9]))
    changed = ("train", "run.toml", "--check", "algorithm.kl_coef=0.1")
    refused = runs.command_here(folder, *changed)
    assert refused.code == 2
    for text in ("data.train: its rows", "the chat template or the tokenizer", "algorithm.kl_coef (0.05, now 0.1)", "imports (helper.py)"):
        assert text in refused.error
    with contextlib.chdir(folder):
        assert not find_mistakes(runs.read_config(folder, "algorithm.kl_coef=0.1", "run.resume=force"))
        assert "run.resume = never: run holds a run" in find_mistakes(runs.read_config(folder, "run.resume=never"))[0]


def test_changed_validation_rows_and_fewer_steps_than_were_made(folder: Path) -> None:
    (folder / "val.jsonl").write_text((folder / "val.jsonl").read_text().splitlines(keepends=True)[0])
    said = runs.train(folder, "run.steps=1").said
    assert "warning: the rows of data.val changed, or their tokens: validations after step 2 do not compare" in said
    assert "resuming from step 2" in said and "nothing to do" in said
    assert "learning rates differ" not in said
