"""Only folders and files of our own are written, and what a run has written is never lost."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import resource
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import runs
from variants import sample_cases

from fulltilt import demo, loop
from fulltilt.bench.job import check_writable
from fulltilt.bench.peers import load as load_benchmark
from fulltilt.folders import refuse_foreign
from fulltilt.loop.folder import HAD_CHECKPOINT, open_run_folder
from fulltilt.loop.opening import kept_budgets
from fulltilt.observe import metrics
from fulltilt.observe.console import Console
from fulltilt.records import RunWarning, UserError
from fulltilt.training import checkpoint

ModelFolders = Callable[[str], Path]
QUICK = ("run.eval_every=0", "run.eval_before=false", "run.steps=1")


@pytest.fixture
def folder(tmp_path: Path, model_folders: ModelFolders) -> Path:
    return runs.make(tmp_path / "folder", model_folders("qwen2"))


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory, model_folders: ModelFolders) -> Path:
    """A finished run with the checkpoints of steps 1 and 2. Tests copy it."""
    folder = runs.make(tmp_path_factory.mktemp("two") / "folder", model_folders("qwen2"))
    runs.train(folder, *TWO)
    return folder


TWO = ("run.eval_every=2", "run.eval_before=false", "run.steps=2", "run.save_every=1")


def refused(folder: Path, *arguments: str) -> str:
    """The message of a command that changes nothing below `folder`, and its exit code 2."""
    before = runs.contents(folder)
    ended = runs.command_here(folder, *arguments)
    assert ended.code == 2 and "Traceback" not in ended.error, ended.error
    assert runs.contents(folder) == before
    return ended.error


# ---- a run's folder


@pytest.mark.parametrize("place", [".", "data", "link"])
def test_a_folder_with_other_files_is_refused(folder: Path, place: str) -> None:
    """The folder of the run file, one with another tool's metrics and rollouts, and a link to it."""
    (folder / "data" / "rollouts").mkdir(parents=True)
    (folder / "data" / "rollouts" / "step-000001.jsonl").write_text("{}\n")
    (folder / "data" / "metrics.jsonl").write_text('{"loss": 1}\n')
    (folder / "link").symlink_to("data")
    error = refused(folder, "train", "run.toml", f"run.dir={place}", *QUICK)
    assert f"run.dir: {place} holds " in error and "fulltilt did not write there" in error and "Use another folder" in error


@pytest.mark.parametrize(
    ("place", "words"),
    [("run.toml/x", "cannot be"), ("x" * 300, "255 bytes"), ("a/" + "x" * 300, "255 bytes"), ("loop", "symbolic")],
)
def test_a_place_where_no_folder_can_be_is_refused_before_anything_loads(folder: Path, place: str, words: str) -> None:
    (folder / "loop").symlink_to("loop")
    (folder / "model").unlink()
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    error = refused(folder, "train", "run.toml", f"run.dir={place}", *QUICK)
    assert "run.dir" in error and words in error


def test_no_file_of_the_users_in_the_run_folder_is_written(two_steps: Path, tmp_path: Path) -> None:
    """A run file kept there, and the snapshot that the run is started from."""
    folder = runs.copy(two_steps, tmp_path / "folder")
    own = [folder / "run" / "run.toml", folder / "run" / "snapshot.toml"]
    assert own[1].is_file() and not own[0].exists()
    own[0].write_text((folder / "run.toml").read_text() + "# mine\n")
    own[1].write_text(own[1].read_text() + "# mine too\n")
    before = [path.read_bytes() for path in own]
    again = runs.command_here(folder, "train", "run/snapshot.toml", "run.keep=3")
    assert again.code == 0, again.error
    assert [path.read_bytes() for path in own] == before
    runs.train(folder, *TWO, "run.keep=3")
    assert "keep = 3" in own[1].read_text() and own[0].read_bytes() == before[0]


def test_another_process_that_was_faster_is_not_written_over(tmp_path: Path) -> None:
    with open_run_folder(tmp_path / "run"):
        pass
    with pytest.raises(UserError, match="another process"), open_run_folder(tmp_path / "run", new=True):
        pass


def marker_of_a_run(folder: Path) -> Path:
    """The folder of a run with metrics and, as far as the marker knows, checkpoints."""
    with open_run_folder(folder, new=True) as opened:
        assert opened.move_aside() is None
        opened.note_checkpoint()
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    return folder / ".fulltilt"


def test_a_run_that_was_moved_without_its_marker_can_be_resumed(tmp_path: Path) -> None:
    marker_of_a_run(tmp_path).unlink()
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000001" / "manifest.json").touch()
    with pytest.raises(UserError, match=r"holds checkpoints of a run.* To resume the run, create an empty file \.fulltilt there"):
        refuse_foreign(tmp_path, ".fulltilt", "run.dir")
    (tmp_path / ".fulltilt").touch()
    shutil.rmtree(tmp_path / "checkpoints")
    with open_run_folder(tmp_path) as opened:
        assert opened.move_aside() == tmp_path / "before-1"


# ---- checkpoints that were deleted


def test_a_run_that_was_deleted_up_to_its_marker_begins_as_a_new_one(tmp_path: Path) -> None:
    """After `rm -rf run/*` a run that is killed before its first checkpoint is computed again, not moved aside."""
    marker_of_a_run(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    for _ in range(2):
        with open_run_folder(tmp_path) as opened:
            assert opened.move_aside() is None
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')


@pytest.mark.long
def test_metrics_of_deleted_checkpoints_are_moved_aside(two_steps: Path, tmp_path: Path) -> None:
    folder = runs.copy(two_steps, tmp_path / "folder")
    kept = ("metrics.jsonl", "rollouts/step-000001.jsonl", "rollouts/step-000002.jsonl", "validation/step-000002.jsonl", "snapshot.toml")
    before = {name: (folder / "run" / name).read_bytes() for name in kept}
    for number in (1, 2):
        shutil.rmtree(folder / "run" / "checkpoints")
        said = runs.train(folder, *TWO).said
        assert f"its metrics and rollouts were moved to run/before-{number}" in said
        assert len(runs.metrics(folder)) == 2
    assert {name: (folder / "run" / "before-1" / name).read_bytes() for name in kept} == before
    runs.assert_equal_runs(folder, two_steps)


def test_a_run_killed_before_its_first_checkpoint_leaves_nothing_aside(two_steps: Path, tmp_path: Path) -> None:
    """Its steps are computed again, to the same numbers."""
    folder = runs.copy(two_steps, tmp_path / "folder")
    shutil.rmtree(folder / "run" / "checkpoints")
    marker = folder / "run" / ".fulltilt"
    assert marker.read_text().endswith(HAD_CHECKPOINT)
    marker.write_text(marker.read_text().removesuffix(HAD_CHECKPOINT))
    runs.train(folder, *TWO)
    assert not (folder / "run" / "before-1").exists()
    runs.assert_equal_runs(folder, two_steps)


# ---- what a killed process left


def test_a_kill_before_rotation_leaves_no_checkpoint_too_many(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing is left to do."""
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.CheckpointStore, "_rotate", lambda self, step: None)
        runs.train(folder, *QUICK, "run.steps=3", "run.save_every=1")
    assert list(runs.checkpoints(folder)) == [1, 2, 3]
    (folder / "run" / "checkpoints" / "step-00000002.partial-123").mkdir()
    assert "nothing to do" in runs.train(folder, *QUICK, "run.steps=3", "run.save_every=1").said
    assert [path.name for path in sorted((folder / "run" / "checkpoints").iterdir())] == ["step-00000002", "step-00000003"]


def test_every_file_has_the_mode_that_the_umask_gives(folder: Path) -> None:
    before = os.umask(0o027)
    try:
        runs.train(folder, *QUICK, "lora.rank=2")
    finally:
        os.umask(before)
    files = [path for path in (folder / "run").rglob("*") if path.is_file()]
    modes = {path.relative_to(folder).as_posix(): stat.S_IMODE(path.stat().st_mode) for path in files}
    assert any(name.endswith("adapter_model.safetensors") for name in modes)
    assert {name: oct(mode) for name, mode in modes.items() if mode != 0o640} == {}


# ---- files that keys name


def test_an_edited_reward_is_refused_on_resume(two_steps: Path, tmp_path: Path) -> None:
    folder = runs.copy(two_steps, tmp_path / "folder")
    (folder / "reward.py").write_text(runs.REWARDS + "\n# edited\n")
    error = refused(folder, "train", "run.toml", *TWO)
    assert "run holds a run at step 2 that was started with another content of reward.py:score" in error and "run.resume = force" in error
    said = runs.train(folder, *TWO, "run.resume=force").said
    assert "warning: resuming although the content of these files changed: reward.py:score" in said


def test_an_edited_template_is_refused_on_resume(folder: Path) -> None:
    (folder / "template.jinja").write_text("{{ messages[0].content }}")
    options = (*QUICK, "model.chat_template=template.jinja", "data.apply_template=always")
    runs.train(folder, *options)
    (folder / "template.jinja").write_text("{{ messages[0]['content'] }}")
    assert "another content of model.chat_template" in refused(folder, "train", "run.toml", *options, "run.steps=2")


# ---- evaluation


def test_eval_says_that_it_takes_an_older_checkpoint(two_steps: Path, tmp_path: Path) -> None:
    folder = runs.copy(two_steps, tmp_path / "folder")
    os.truncate(runs.checkpoints(folder)[2] / "trainer.safetensors", 10)
    ended = runs.command_here(folder, "eval", "run.toml", "--latest", "--json")
    found = json.loads(ended.out)
    assert found["step"] == 1 and "step-00000002" in found["skipped"]
    assert "warning: skipped a damaged checkpoint: run/checkpoints/step-00000002: trainer.safetensors has 10 bytes" in ended.error


@pytest.mark.parametrize("when", ["while it is checked", "while it is loaded"])
def test_a_checkpoint_that_rotates_away_under_eval(two_steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """The run that is still training has made a newer one."""
    folder = runs.copy(two_steps, tmp_path / "folder")
    (folder / "run" / "checkpoints" / "step-00000002").rename(tmp_path / "next")
    place = "fulltilt.training.checkpoint.find_damage" if when == "while it is checked" else "fulltilt.loop.opening.read_state"
    name, _, attribute = place.rpartition(".")
    original = getattr(__import__(name, fromlist=[attribute]), attribute)

    def rotates(*given: object) -> object:
        if (tmp_path / "next").exists():
            (tmp_path / "next").rename(folder / "run" / "checkpoints" / "step-00000002")
            shutil.rmtree(folder / "run" / "checkpoints" / "step-00000001")
        return original(*given)

    monkeypatch.setattr(place, rotates)
    ended = runs.command_here(folder, "eval", "run.toml", "--latest", "--json")
    assert ended.code == 0, ended.error
    assert json.loads(ended.out)["step"] == 2 and "skipped" not in json.loads(ended.out)


# ---- a folder that goes away


def when(holds: Callable[[], bool], act: Callable[[], object]) -> threading.Thread:
    def wait_and_act() -> None:
        while not holds():
            time.sleep(0.005)
        act()

    thread = threading.Thread(target=wait_and_act, daemon=True)
    thread.start()
    return thread


def gone(folder: Path) -> Iterator[tuple[Callable[[], object], str]]:
    yield lambda: (folder / "run").rename(folder / "elsewhere"), f"was moved to {folder.resolve()}/elsewhere during the run"
    yield lambda: shutil.rmtree(folder / "run", ignore_errors=True), "was deleted during the run"


@pytest.mark.long
@pytest.mark.parametrize("how", [0, 1], ids=["renamed", "removed"])
def test_a_folder_that_goes_away_stops_the_run(folder: Path, how: int) -> None:
    act, words = list(gone(folder))[how]
    actor = when((folder / "run" / "rollouts" / "step-000002.jsonl").exists, act)
    ended = runs.command_here(folder, "train", "run.toml", *QUICK, "run.steps=400", "run.save_every=1")
    actor.join()
    assert ended.code == 2 and words in ended.error and "Traceback" not in ended.error, ended.error
    assert not (folder / "run" / "metrics.jsonl").exists(), "the folder was made again"
    if how == 0:
        resumed = runs.train(folder, *QUICK, "run.steps=3", "run.dir=elsewhere", "run.save_every=1")
        assert "resuming from step" in resumed.said


def test_modes_that_keep_a_run_from_writing_are_restored(tmp_path: Path) -> None:
    with open_run_folder(tmp_path / "run", new=True) as opened:
        step = tmp_path / "run" / "checkpoints" / "step-00000001"
        step.mkdir(parents=True)
        (tmp_path / "run" / "metrics.jsonl").touch()
        (tmp_path / "run" / "notes").touch(mode=0o400)  # a user's own
        hidden = [tmp_path / "run" / name for name in (".fulltilt", "metrics.jsonl", "checkpoints/step-00000001", "checkpoints", ".")]
        for path in hidden:
            path.chmod(0)
        with pytest.warns(RunWarning, match=r"the mode of .*/run, .*metrics\.jsonl.* was changed during the run and has been restored"):
            opened.require_in_place()
        assert all(os.stat(path).st_mode & 0o600 == 0o600 for path in hidden) and step.stat().st_mode & 0o100
        assert (tmp_path / "run" / "notes").stat().st_mode & 0o777 == 0o400


@pytest.mark.long
def test_a_run_goes_on_where_a_reward_changes_the_modes_of_its_folder(folder: Path) -> None:
    (folder / "reward.py").write_text("import os\ndef score(solution_str):\n    os.chmod('run', 0)\n    return len(solution_str) / 16\n")
    with pytest.warns(RunWarning, match="the mode of run was changed during the run and has been restored"):
        runs.train(folder, *QUICK)
    assert (folder / "run").stat().st_mode & 0o700 == 0o700


# ---- damaged and foreign files in a run's folder


PLANS = ("[]", "{}", "null", '{"config": 3, "budgets": {}}', '{"config": {}, "budgets": {"threads": "x"}}', "[" * 100_000, "\x00")


@pytest.mark.parametrize("text", PLANS)
def test_a_foreign_plan_is_not_used(folder: Path, text: str) -> None:
    (folder / "plan.json").write_text(text)
    said = io.StringIO()
    console = Console(stdout=said, stderr=said, terminal=False)
    assert kept_budgets(runs.read_config(folder), folder, None, [], console) is None
    assert "plan.json is not a plan of this version" in said.getvalue()


DAMAGES = [b"\xff\xfe{}\n", b'{"step": "1"}\n', b"[]\n", b'{"step": 1, "x": "y"}\n', b"[" * 2000 + b"\n"]


@pytest.mark.parametrize("damage", sample_cases(DAMAGES, DAMAGES[0], DAMAGES[3]))
def test_damaged_metrics_are_a_warning_on_resume(two_steps: Path, tmp_path: Path, damage: bytes) -> None:
    folder = runs.copy(two_steps, tmp_path / "folder")
    path = folder / "run" / "metrics.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(damage.replace(b"\n", b" " * (len(first) - len(damage)) + b"\n") + second)
    trained = runs.train(folder, *TWO)
    assert "metrics.jsonl: line 1 cannot be read" in trained.said
    assert trained.summary.reward_first == trained.summary.reward_last  # of the line that is left


@pytest.mark.parametrize("key", ["config", "cursor", "budgets", "metrics_offset", "step", "updates"])
def test_a_state_of_wrong_types_is_refused(two_steps: Path, tmp_path: Path, key: str) -> None:
    folder = runs.copy(two_steps, tmp_path / "folder")
    newest = runs.checkpoints(folder)[2]
    (newest / "state.json").write_text(json.dumps(runs.state(newest) | {key: "x"}))
    (newest / "manifest.json").unlink()
    checkpoint.write_manifest(newest, 2)
    assert "its state.json is not as fulltilt writes it" in refused(folder, "train", "run.toml", *TWO)


@pytest.mark.parametrize("name", ["\x00", "/none", "../..", "model"])
def test_a_manifest_with_impossible_names_is_damaged(two_steps: Path, tmp_path: Path, name: str) -> None:
    folder = runs.copy(two_steps, tmp_path / "folder")
    path = runs.checkpoints(folder)[2] / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][name] = {"bytes": 1, "sha256": "x"}
    path.write_text(json.dumps(manifest))
    assert checkpoint.find_damage(path.parent, 2) is not None


def few_files() -> None:
    """Three more may be opened."""
    taken = max(map(int, os.listdir("/proc/self/fd")))
    while (last := os.open(os.devnull, os.O_RDONLY)) < taken:
        pass
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 4, last + 4))


def test_too_few_open_files_are_said_with_a_remedy(folder: Path) -> None:
    ended = runs.command_forked(folder, "train", "run.toml", *QUICK, first=few_files)
    assert ended.code == 2 and "ulimit -n" in ended.error and "Traceback" not in ended.error, ended.error


def leave_no_current_folder() -> None:
    os.mkdir("gone")
    os.chdir("gone")
    os.rmdir("../gone")


def test_a_refusal_of_the_system_is_no_internal_error(folder: Path) -> None:
    """Wherever it happens: here where paths of runs are shortened."""
    ended = runs.command_forked(folder, "plot", "run", "--out", "plot.json", first=leave_no_current_folder)
    assert ended.code == 2 and "error: No such file or directory. Check that the file and the current folder exist" in ended.error


# ---- other commands that write


def test_a_demo_replaces_only_a_demo(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds mine\.txt, which fulltilt did not write there"):
        demo.prepare(tmp_path)
    (tmp_path / "mine.txt").unlink()
    assert demo.prepare(tmp_path) is None
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "grpo").mkdir()
    assert demo.prepare(tmp_path) == tmp_path / "before-1"
    assert (tmp_path / "mine.txt").read_text() == "mine" and not (tmp_path / "grpo").exists()
    assert stat.S_IMODE((tmp_path / "model" / "model.safetensors").stat().st_mode) == stat.S_IMODE((tmp_path / "reward.py").stat().st_mode)


def test_a_demo_deletes_nothing_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pages tell people to use its model and its data in runs of their own, and a demo that is stopped early has no others to offer."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "train", stop)
    folder = tmp_path / "demo"
    for number, mine in enumerate(("warm/mine", "data/mine.jsonl", "sft.toml"), start=1):
        with pytest.raises(KeyboardInterrupt):
            demo.warm_up(folder, Console())
        assert number == 1 or f"{folder} was moved to {folder}/before-{number - 1}, with everything in it" in capsys.readouterr().out
        (folder / mine).parent.mkdir(exist_ok=True)
        (folder / mine).write_text("mine")
    demo.prepare(folder)
    for number, mine in enumerate(("warm/mine", "data/mine.jsonl", "sft.toml"), start=1):
        assert (folder / f"before-{number}" / mine).read_text() == "mine"
        assert (folder / f"before-{number}" / "data" / "train.jsonl").read_bytes() == (folder / "data" / "train.jsonl").read_bytes()


def test_a_benchmark_measures_only_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """`--dir ..` beside a clone would delete the clone."""
    (tmp_path / "fulltilt").mkdir()
    learn = load_benchmark("learn")
    with pytest.raises(UserError, match=r"--dir: .* holds fulltilt"):
        refuse_foreign(tmp_path, learn.BENCH_MARKER, "--dir")
    with pytest.raises(UserError, match=r"--dir: .* holds fulltilt"):
        learn.prepare(learn.BenchOptions(run=tmp_path / "run.toml", folder=tmp_path), tmp_path)


def test_a_result_is_not_written_over_another_file(tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text('{"name": "mine"}')
    with pytest.raises(UserError, match=r"package\.json exists, and fulltilt did not write it"):
        check_writable("--out", tmp_path / "package.json")
    (tmp_path / "package.json").write_text('{"benchmark": "step"}')
    check_writable("--out", tmp_path / "package.json")


# ---- the best checkpoint


def best_of(folder: Path) -> str:
    return os.readlink(folder / "run" / "checkpoints" / "best")


def values(folder: Path, name: str) -> dict[int, float]:
    return {line["step"]: line[name] for line in runs.metrics(folder) if name in line}


BEST = ("run.eval_every=1", "run.eval_before=false", "run.steps=6", "run.save_every=3", "run.keep=1", "eval.temperature=1.0")


@pytest.mark.long
def test_the_best_checkpoint_is_kept_and_survives_a_resume(folder: Path, tmp_path: Path) -> None:
    options = (*BEST, "run.keep_best=-val/response_length/mean", "rollout.max_new_tokens=24", "train.lr=0.02")
    runs.train(folder, *options)
    lengths = values(folder, "val/response_length/mean")
    best = min(lengths, key=lambda step: (lengths[step], step))
    assert best_of(folder) == f"step-{best:08d}" and list(runs.checkpoints(folder)) == sorted({best, 6})

    resumed = runs.make(tmp_path / "resumed", (folder / "model").resolve())
    runs.train(resumed, *options, "run.steps=4")
    runs.train(resumed, *options)
    assert best_of(resumed) == best_of(folder)
    ended = runs.command_here(folder, "eval", "run.toml", "--best", "--json")
    assert json.loads(ended.out)["step"] == best, ended.error


@pytest.mark.long
def test_other_metrics_are_compared_where_a_checkpoint_is_saved(folder: Path) -> None:
    options = ("run.eval_every=0", "run.eval_before=false", "run.steps=6", "run.save_every=2", "run.keep=1")
    runs.train(folder, *options, "run.keep_best=critic/score/mean")
    scores = {step: score for step, score in values(folder, "critic/score/mean").items() if step % 2 == 0}
    best = max(scores, key=lambda step: (scores[step], -step))
    assert best_of(folder) == f"step-{best:08d}" and list(runs.checkpoints(folder)) == sorted({best, 6})
    runs.train(folder, *options, "run.steps=8")  # no longer asked for
    assert not (folder / "run" / "checkpoints" / "best").is_symlink() and list(runs.checkpoints(folder)) == [8]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("run.keep_best=critic/scores/mean",), "step 1 has no metric critic/scores/mean. Similar: critic/score/mean"),
        (("run.keep_best=val-core/sums/x", "run.eval_every=1", "run.eval_before=true"), "step 0 has no metric val-core/sums/x"),
        (("run.keep_best=val/rewards/mean", "run.eval_every=1"), 'no metric "val/rewards/mean". Use val/reward/mean, val/prompts, '),
        (("run.keep_best=-val/loss", "run.eval_every=1"), 'validations of this run have no metric "val/loss". Use val/reward/mean, '),
        (("run.keep_best=val/reward/mean",), "is a metric of validation, and run.eval_every is 0"),
        (("run.keep_best=critic/score/mean", "run.save_every=0"), "run.save_every is 0"),
    ],
)
def test_a_best_that_has_no_values_is_an_error(folder: Path, options: tuple[str, ...], words: str) -> None:
    ended = runs.command_here(folder, "train", "run.toml", *QUICK, *options)
    assert ended.code == 2 and words in ended.error, ended.error
    if "step 1" in words:
        assert list(runs.checkpoints(folder)) == [1]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux")
def test_a_folder_that_no_user_can_make_is_found_by_the_check(folder: Path) -> None:
    """Root may write there by its modes, but there is nothing to be made."""
    ended = runs.command_here(folder, "train", "run.toml", "run.dir=/proc/fulltilt", "--check")
    assert ended.code == 2 and "run.dir: /proc/fulltilt cannot be made: /proc is not a folder that can be written (" in ended.error


def fill_folder(folder: Path, beside: bool) -> None:
    (folder / checkpoint.TENSORS).touch()


def test_a_best_checkpoint_that_could_not_be_written_is_not_the_best(tmp_path: Path) -> None:
    store = checkpoint.CheckpointStore(tmp_path / "checkpoints", keep=1)

    def fails(folder: Path, beside: bool) -> None:
        raise OSError(errno.ENOSPC, "full")

    first, second = (checkpoint.BestCheckpoint("score", step, float(step)) for step in (1, 2))
    store.save(1, {}, fill_folder, 0, best=first)
    with pytest.raises(UserError):
        store.save(2, {}, fails, 0, best=second)
    store.save(3, {}, fill_folder, 0, best=store.best)
    assert store.best == first and sorted(path.name for path in store.folder.iterdir()) == ["best", "step-00000001", "step-00000003"]
    assert (found := store.find_best()) and found.step == 1


@pytest.mark.parametrize("lose", [shutil.rmtree, lambda path: (path / checkpoint.TENSORS).write_bytes(b"damaged")])
def test_a_best_checkpoint_that_is_lost_is_forgotten(tmp_path: Path, lose: Callable[[Path], object]) -> None:
    store = checkpoint.CheckpointStore(tmp_path, keep=1)
    best = checkpoint.BestCheckpoint("score", 1, 9.0)
    lose(store.save(1, {}, fill_folder, 0, best=best))
    with pytest.warns(RunWarning, match="the best checkpoint, that of step 1, was damaged or deleted"):
        store.save(2, {}, fill_folder, 0, best=best)
    assert store.best is None and [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("beside", [False, True])
def test_a_checkpoint_in_place_counts_whatever_fails_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool) -> None:
    """The link to the best one, which many network file systems refuse, and the deletion of old ones."""

    def refuse(path: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted", str(path))

    store = checkpoint.CheckpointStore(tmp_path, keep=1)
    store.save(1, {}, fill_folder, 0)
    (tmp_path / ".best").mkdir()
    monkeypatch.setattr(store, "_delete", refuse)
    with pytest.warns(RunWarning) as warned:
        store.save(2, {}, fill_folder, 0, beside=beside, best=checkpoint.BestCheckpoint("score", 2, 1.0))
        store.finish()
    assert store.newest == 2 and (found := store.latest()) and found.step == 2
    said = "\n".join(str(each.message) for each in warned)
    assert "to the best checkpoint is out of date" in said and "checkpoints beyond run.keep were not deleted" in said


PPO = ("algorithm.name=ppo", "algorithm.critic_warmup=1", "algorithm.kl_coef=0.0")


@pytest.mark.parametrize(
    "options",
    [pytest.param(("run.keep_best=critic/score/mean",), marks=pytest.mark.matrix), ("run.keep_best=actor/entropy", *PPO)],
    ids=["not-of-validation", "not-while-the-critic-warms-up"],
)
def test_a_metric_of_the_best_need_not_be_there_from_the_beginning(folder: Path, options: tuple[str, ...]) -> None:
    runs.train(folder, "run.steps=2", "run.save_every=1", "run.eval_every=0", "run.eval_before=true", *options)
    assert (folder / "run" / "checkpoints" / "best").exists()


def test_an_error_of_the_users_function_replaces_no_good_checkpoint(folder: Path) -> None:
    """In step 2 all rewards are equal, so that a rule of health holds."""
    equal_later = "def equal_later(ground_truth, solution_str):\n    return len(solution_str) if float(ground_truth) < 16 else 1.0\n"
    (folder / "reward.py").write_text(equal_later)

    def fails(step: int, metrics: dict[str, object]) -> None:
        if step == 2:
            raise RuntimeError("enough")

    reward = ("reward.function=reward.py:equal_later", "data.shuffle=false")
    config = runs.read_config(folder, *QUICK, "run.steps=3", "run.save_every=1", "run.keep=1", *reward)
    with contextlib.chdir(folder), pytest.raises(RuntimeError, match="enough"):
        loop.train(config, Console(quiet=True), fails)
    assert list(runs.checkpoints(folder)) == [1]


def test_one_checkpoint_at_most_is_evaluated(folder: Path) -> None:
    with contextlib.chdir(folder), pytest.raises(UserError, match=r"latest=True and best=True each choose a checkpoint.*Give only one"):
        loop.evaluate(runs.read_config(folder), Console(quiet=True), latest=True, best=True)


def test_read_lines_leaves_out_half_a_line(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b'{"step": 1, "x": null, "nonfinite": ["x"]}\n{"step": 2, "y": 1.5}\n{"ste')
    assert metrics.read_lines(tmp_path / "m") == metrics.MetricsLines(
        ({"step": 1, "x": None, "nonfinite": ["x"]}, {"step": 2, "y": 1.5}), ""
    )
