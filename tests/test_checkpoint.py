"""Checkpoints: whole or not there, whatever happens to the process, the files or the disk."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fulltilt.model import attention
from fulltilt.model.load import export as export_model
from fulltilt.records import UserError
from fulltilt.training import checkpoint
from fulltilt.training.checkpoint import Checkpoint, CheckpointStore, SavedTensors, find_damage, write_trainer


def export(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "weights.bin").write_bytes(bytes(range(256)) * 8)


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {
        "master.weight": torch.full((64, 32), float(step)),
        "moment1.weight": torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).t(),  # not contiguous, on purpose
        "moment2.weight": torch.full((64,), step, dtype=torch.bfloat16),
    }


def put(
    store: CheckpointStore, step: int, found: Mapping[str, torch.Tensor], state: Mapping[str, Any], export: Callable[[Path], None],
    export_bytes: int, *, beside: bool = False,
) -> Path:  # fmt: skip
    """As a worker saves."""
    size = export_bytes + sum(tensor.numel() * tensor.element_size() for tensor in found.values())
    return store.save(step, state, lambda folder, beside: write_trainer(folder, found, export, beside=beside), size, beside=beside)


def save(store: CheckpointStore, step: int, export: Callable[[Path], None] = export) -> Path:
    return put(store, step, tensors(step), {"step": step, "learning_rate": 0.1 + 0.2, "cursor": [1, 2]}, export, export_bytes=4096)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_holds(found: Checkpoint | None, step: int) -> None:
    assert found is not None
    assert found.step == step
    assert found.state() == {"step": step, "learning_rate": 0.1 + 0.2, "cursor": [1, 2]}
    loaded = found.tensors()
    assert loaded.keys() == tensors(step).keys()
    for name, tensor in tensors(step).items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    assert names(found.model_folder) == ["config.json", "weights.bin"]


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep=2)
    assert store.latest() is None
    path = save(store, 10)
    assert path == tmp_path / "run" / "checkpoints" / "step-00000010"
    assert names(path) == ["manifest.json", "model", "state.json", "trainer.safetensors"]
    assert_holds(CheckpointStore(store.folder, keep=2).latest(), 10)
    listed = json.loads((path / "manifest.json").read_text())["files"]
    assert sorted(listed) == ["model/config.json", "model/weights.bin", "state.json", "trainer.safetensors"]
    assert listed["model/weights.bin"]["bytes"] == 2048


@pytest.mark.parametrize("free", [2**40, 0], ids=["copied", "written-at-once"])
def test_beside_training_what_was_there_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """The caller changes its tensors as soon as it may; with main memory for a copy or without."""
    monkeypatch.setattr(checkpoint, "free_host_bytes", lambda: free)
    held = threading.Event()
    hash_later(monkeypatch, held)
    store, found = CheckpointStore(tmp_path, keep=1), tensors(1)
    path = put(store, 1, found, {"step": 1, "learning_rate": 0.1 + 0.2, "cursor": [1, 2]}, export, export_bytes=4096, beside=True)
    for tensor in found.values():
        tensor.fill_(-1)
    store.finish(wait=False)
    assert not path.exists()
    assert CheckpointStore(tmp_path, keep=1).latest() is None
    held.set()
    store.finish()
    assert_holds(CheckpointStore(tmp_path, keep=1).latest(), 1)
    store.finish()  # nothing is left to wait for


def test_copies_are_as_what_was_copied_and_apart_from_it(tmp_path: Path) -> None:
    found = {
        "odd": torch.arange(7, dtype=torch.bfloat16),
        "number": torch.tensor(3),
        "none": torch.empty(0, 4),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "switch": torch.tensor([True, False, True]),
        "learned": torch.nn.Parameter(torch.ones(2, 2, dtype=torch.float64)),
    }
    kept = {name: tensor.detach().clone() for name, tensor in found.items()}
    copies = checkpoint.copy_to_host(found)
    assert copies is not None
    for tensor in found.values():
        tensor.detach().zero_()
    checkpoint.write_tensors(tmp_path, copies)
    for read in (copies, load_file(tmp_path / checkpoint.TENSORS)):
        assert read.keys() == kept.keys()
        for name, tensor in kept.items():
            assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor) and not read[name].requires_grad
    assert checkpoint.copy_to_host({}) == {}


MEMORY_OF_SAVES = """
import gc, sys
from pathlib import Path
from types import SimpleNamespace
import torch
from fulltilt.training.checkpoint import CheckpointStore, write_trainer

def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // 2**20

found = {str(number): torch.ones(2**18) for number in range(256)}  # 256 MiB in pieces that malloc keeps
store, others = CheckpointStore(Path(sys.argv[1]), keep=1), []
after = []
for step in range(1, 5):
    store.save(step, {}, lambda folder, beside: write_trainer(folder, found, lambda model: None, beside=beside), 0, beside=True)
    others.append([torch.ones(10_000) for _ in range(100)])  # what training makes meanwhile lies between
    store.finish()
    gc.collect()
    after.append(held())
print(after[-1] - after[0])
"""


@pytest.mark.long  # writes 1 GiB
@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is read from /proc")
def test_memory_for_the_copy_goes_back_to_the_system(tmp_path: Path) -> None:
    """Of four saves of 256 MiB nothing stays; with copies that `malloc` has made, 290 MiB do."""
    done = runs.code_forked(tmp_path, MEMORY_OF_SAVES, "store")
    assert done.code == 0, done.error
    assert int(done.out) < 128  # MiB; beside the copy, training has made 15


MEMORY_REFUSED = """
import resource, sys
from pathlib import Path
from types import SimpleNamespace
import torch
from fulltilt.training.checkpoint import CheckpointStore, copy_to_host, write_trainer

found = {str(number): torch.full((2**20,), float(number)) for number in range(64)}  # 256 MiB
taken = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (taken + 128 * 2**20, resource.RLIM_INFINITY))
assert copy_to_host(found) is None
store = CheckpointStore(Path(sys.argv[1]), keep=1)
store.save(1, {}, lambda folder, beside: write_trainer(folder, found, lambda model: None, beside=beside), 0, beside=True)
store.finish()
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
saved = store.latest().tensors()
assert saved.keys() == found.keys() and all(saved[name][0] == float(name) for name in found)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is read from /proc")
def test_where_memory_for_the_copy_is_refused_the_file_is_written_at_once(tmp_path: Path) -> None:
    done = runs.code_forked(tmp_path, MEMORY_REFUSED, "store")
    assert done.code == 0, done.error


def hash_later(monkeypatch: pytest.MonkeyPatch, held: threading.Event) -> None:
    write = checkpoint.write_manifest

    def later(*arguments: Any) -> None:
        assert held.wait(60)
        write(*arguments)

    monkeypatch.setattr(checkpoint, "write_manifest", later)


def test_what_is_abandoned_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)
    hash_later(monkeypatch, held)
    put(store, 2, tensors(2), {}, export, 4096, beside=True)
    # Python waits at its end for threads that are no daemons, also for one that a hung disk holds.
    assert [thread.daemon for thread in threading.enumerate() if thread.name == "checkpoint"] == [True]
    threading.Timer(0.2, held.set).start()
    store.abandon()
    assert names(tmp_path) == ["step-00000001"]
    save(store, 3)
    store.abandon()  # nothing is being written
    assert_holds(store.latest(), 3)


def test_a_wait_that_is_cut_short_forgets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    hash_later(monkeypatch, held)
    store = CheckpointStore(tmp_path, keep=1)
    put(store, 1, tensors(1), {"step": 1, "learning_rate": 0.1 + 0.2, "cursor": [1, 2]}, export, 4096, beside=True)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background may ignore it
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            store.finish()
    finally:
        signal.signal(signal.SIGINT, before)
    held.set()
    store.finish()
    assert_holds(CheckpointStore(tmp_path, keep=1).latest(), 1)


def test_the_next_save_and_the_next_look_wait_for_the_one_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    hash_later(monkeypatch, held)
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2):
        threading.Timer(0.2, held.set).start()
        put(store, step, tensors(step), {"step": step, "learning_rate": 0.1 + 0.2, "cursor": [1, 2]}, export, 4096, beside=True)
    assert_holds(store.latest(), 2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("notice", ["finish", "save", "latest"])
def test_what_goes_wrong_beside_training_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notice: str) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    put(store, 2, tensors(2), {}, export, export_bytes=4096, beside=True)
    monkeypatch.undo()
    ways = {"finish": store.finish, "save": lambda: save(store, 3), "latest": store.latest}
    with pytest.raises(UserError, match=r"step 2 could not be written.*No space left on device.*run\.dir"):
        ways[notice]()
    assert_holds(store.latest(), 1)
    assert names(tmp_path) == ["step-00000001"]


def test_no_tensors_is_a_checkpoint_too(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    put(store, 1, {}, {}, export, export_bytes=4096)
    latest = store.latest()
    assert latest is not None
    assert (latest.tensors(), latest.state()) == ({}, {})


def test_rotation_keeps_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3, 10):
        save(store, step)
    assert names(tmp_path) == ["step-00000003", "step-00000010"]
    assert_holds(store.latest(), 10)


def test_rotation_counts_only_intact_ones(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for step in (1, 2, 3):
        save(store, step)
    flip_a_byte(tmp_path / "step-00000002" / "trainer.safetensors")
    save(CheckpointStore(tmp_path, keep=2), 4)  # another process, which has not verified any of them
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    flip_a_byte(tmp_path / "step-00000003" / "trainer.safetensors")
    save(CheckpointStore(tmp_path, keep=2), 5)
    assert names(tmp_path) == ["step-00000004", "step-00000005"]


def test_after_a_fall_back_the_new_one_stays_and_the_damaged_newer_one_goes(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 5)
    save(store, 10)
    flip_a_byte(tmp_path / "step-00000010" / "state.json")
    resumed = CheckpointStore(tmp_path, keep=1)
    assert_holds(resumed.latest(), 5)
    save(resumed, 7)
    assert names(tmp_path) == ["step-00000007"]


def test_an_intact_newer_one_is_left_alone(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 10)
    save(store, 7)
    save(store, 8)
    assert names(tmp_path) == ["step-00000008", "step-00000010"]


def test_rubbish_of_a_killed_process_is_ignored_and_then_deleted(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    path = save(store, 1)
    shutil.copytree(path, tmp_path / "step-00000002.partial-77")
    shutil.copytree(path, tmp_path / f"step-00000003.partial-{os.getpid()}")  # a container gives every process the same number
    shutil.copytree(path, tmp_path / ".trash-step-00000000-5")
    (tmp_path / "notes.txt").write_text("the user's own")
    assert_holds(store.latest(), 1)
    save(store, 3)
    assert names(tmp_path) == ["notes.txt", "step-00000001", "step-00000003"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    put(store, 4, {"old": torch.zeros(3)}, {"old": True}, export, export_bytes=4096)
    save(store, 4)
    assert names(tmp_path) == ["step-00000004"]
    assert_holds(store.latest(), 4)


def test_a_replacement_cut_in_two_loses_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 4).rename(tmp_path / "step-00000004.replaced")  # where a kill between the two renames leaves it
    assert_holds(store.latest(), 4)
    save(store, 5)
    assert names(tmp_path) == ["step-00000004", "step-00000005"]


def test_a_failing_export_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    def interrupted(folder: Path) -> None:
        export(folder)
        raise KeyboardInterrupt

    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)
    with pytest.raises(KeyboardInterrupt):
        save(store, 2, interrupted)
    assert names(tmp_path) == ["step-00000001"]
    assert_holds(store.latest(), 1)


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("damage", [flip_a_byte, cut_short, Path.unlink])
@pytest.mark.parametrize("name", ["manifest.json", "state.json", "trainer.safetensors", "model/config.json", "model/weights.bin"])
def test_a_damaged_file_is_found_out(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)
    damage(save(store, 2) / name)
    assert_holds(store.latest(), 1)
    assert len(store.skipped) == 1
    assert "step-00000002" in store.skipped[0]
    assert store.skipped[0].split(": ", 1)[1]
    if name != "manifest.json":
        reason = {flip_a_byte: "sha256 differs", cut_short: "bytes instead of", Path.unlink: "is missing"}[damage]
        assert name in store.skipped[0]
        assert reason in store.skipped[0]


def test_a_manifest_in_another_encoding_is_read_as_it_was_checked(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    manifest = save(store, 1) / "manifest.json"
    manifest.write_text(manifest.read_text(encoding="utf-8"), encoding="utf-16")
    assert_holds(store.latest(), 1)


def test_a_later_format_is_skipped_with_a_reason(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    manifest = save(store, 1) / "manifest.json"
    with pytest.raises(UserError, match=r"no checkpoint of step 7; it has that of step 1$"):
        store.at(7)
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    assert store.latest() is None
    assert "format is 2" in store.skipped[0]


def save_for_ever(folder: Path, report: int) -> None:
    """Each step twice, for replacing must survive a kill too; the pipe tells which steps are surely there."""
    store = CheckpointStore(folder, keep=2)
    latest = store.latest()
    step = latest.step if latest else 0
    while True:
        step += 1
        save(store, step)
        os.write(report, f"{step}\n".encode())
        put(store, step, tensors(step), {"step": step, "learning_rate": 0.1 + 0.2, "cursor": [1, 2]}, export, 4096, beside=True)


def test_kill_at_any_moment(tmp_path: Path) -> None:
    chance = random.Random(0)
    reached = 0
    for number in range(8):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            answer_and_leave(lambda: save_for_ever(tmp_path, writing))  # noqa: B023
        os.close(writing)
        with open(reading) as pipe:
            if number > 1:  # only the first two kills may come before the first checkpoint, however slow the machine is
                reached = int(pipe.readline())
            time.sleep(chance.uniform(0.02, 0.3))
            os.kill(child, signal.SIGKILL)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
            reached = max([reached, *(int(line) for line in pipe)])
        store = CheckpointStore(tmp_path, keep=2)
        latest = store.latest()
        assert store.skipped == []
        if latest is None:
            assert reached == 0
        else:
            assert latest.step >= reached
            assert_holds(latest, latest.step)
    assert reached > 5, "the child hardly saved anything, so the kills proved nothing"
    save(CheckpointStore(tmp_path, keep=2), reached + 2)
    assert len(names(tmp_path)) == 2


def stop_at_change(number: int) -> None:
    """End this process, as a kill would, just before the numbered rename or deletion."""
    count = 0

    def stop(event: str, _: object) -> None:
        nonlocal count
        if event in ("os.rename", "shutil.rmtree", "os.remove", "os.rmdir"):
            count += 1
            if count > number:
                os._exit(9)

    sys.addaudithook(stop)


@pytest.mark.parametrize("step", [1, 2], ids=["replacing", "rotating"])
def test_a_stop_before_every_rename_and_deletion(tmp_path: Path, step: int) -> None:
    """Whichever came last, an intact checkpoint is there, and the next save mends the rest."""
    stopped = 0
    for number in range(20):
        folder = tmp_path / str(number)
        store = CheckpointStore(folder, keep=1)
        save(store, 1)
        child = os.fork()
        if child == 0:
            stop_at_change(number)
            answer_and_leave(lambda: save(store, step))  # noqa: B023
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 9)
        stopped += code == 9
        latest = CheckpointStore(folder, keep=1).latest()
        assert latest is not None
        assert_holds(latest, latest.step)
        for name in names(folder):
            if re.fullmatch(r"step-\d+", name):
                assert find_damage(folder / name, int(name[5:])) is None, "a half-deleted folder still looks like a checkpoint"
        save(CheckpointStore(folder, keep=1), 3)
        assert names(folder) == ["step-00000003"]
    assert 5 < stopped < 20, "both ends of the save must be covered"


def in_small_file_system(folder: Path, megabytes: int, body: Callable[[], object]) -> bool:
    """Run `body` in a forked child that sees a tmpfs of that size on `folder`; False where the system allows no such mount."""
    unshare = getattr(ctypes.CDLL(None, use_errno=True), "unshare", None)
    mount = shutil.which("mount")
    if unshare is None or mount is None:
        return False
    child = os.fork()
    if child == 0:
        new_mounts, new_user = 0x00020000, 0x10000000
        if unshare(new_mounts) != 0 and unshare(new_mounts | new_user) != 0:
            os._exit(77)
        private = subprocess.run([mount, "--make-rprivate", "/"], capture_output=True)
        mounted = subprocess.run([mount, "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)], capture_output=True)
        if private.returncode or mounted.returncode:
            os._exit(77)
        answer_and_leave(body)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 77), "the child failed; its traceback is above"
    return code == 0


def answer_and_leave(body: Callable[[], object]) -> None:
    """The end of a forked child: it must not go on as a second pytest."""
    try:
        body()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def overflow(folder: Path) -> None:
    """An export far beyond what was announced."""
    with (folder / "weights.bin").open("wb") as stream:
        for _ in range(64):
            stream.write(bytes(2**20))
            stream.flush()


def refuse_and_stay_intact(folder: Path, expected: list[str], save_again: Callable[[CheckpointStore], object]) -> None:
    store = CheckpointStore(folder, keep=1)
    with pytest.raises(UserError) as caught:
        save_again(store)
    for words in (*expected, str(folder), "needed", "free"):
        assert words in str(caught.value), (words, str(caught.value))
    assert [path.name for path in folder.iterdir()] == (["step-00000001"] if store.latest() else [])


def huge_tensors(store: CheckpointStore) -> None:
    # meta tensors have a size and no bytes: enough for a save that must not begin
    put(store, 2, {"a": torch.empty(10**15, device="meta")}, {}, export, export_bytes=4096)


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    store = CheckpointStore(folder, keep=1)
    with pytest.raises(UserError, match=r"not enough disk space.*TiB needed.*free in .*run\.dir"):
        huge_tensors(store)
    assert not folder.exists()

    def on_a_small_disk() -> None:
        refuse_and_stay_intact(folder, ["not enough disk space"], lambda store: save(store, 1))

    folder.mkdir()
    in_small_file_system(folder, 1, on_a_small_disk)


def test_a_disk_that_fills_up_while_writing(tmp_path: Path) -> None:
    def through_python(store: CheckpointStore) -> None:
        save(store, 2, overflow)

    def through_safetensors(store: CheckpointStore) -> None:
        def sneaky(folder: Path) -> None:
            (folder / "filler").write_bytes(bytes(36 * 2**20))

        put(store, 2, {"a": torch.zeros(2**21)}, {}, sneaky, export_bytes=4096)

    def on_a_small_disk() -> None:
        assert_holds(Checkpoint(save(CheckpointStore(tmp_path, keep=1), 1), 1), 1)
        for save_again in (through_python, through_safetensors):
            refuse_and_stay_intact(tmp_path, ["No space left on device"], save_again)
            assert_holds(CheckpointStore(tmp_path, keep=1).latest(), 1)

    if not in_small_file_system(tmp_path, 40, on_a_small_disk):
        save(CheckpointStore(tmp_path, keep=1), 1)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**22, before[1]))
        try:
            for save_again in (through_python, through_safetensors):
                refuse_and_stay_intact(tmp_path, ["File too large"], save_again)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert_holds(CheckpointStore(tmp_path, keep=1).latest(), 1)


def test_a_folder_that_cannot_be_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the run folder should be")
    with pytest.raises(UserError, match=r"step 1 could not be written.*run\.dir"):
        save(CheckpointStore(tmp_path / "run" / "checkpoints", keep=1), 1)
    assert names(tmp_path) == ["run"]


def test_the_export_loads_in_transformers(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    words = {word: index for index, word in enumerate(["</s>", "two", "three", "five"])}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="</s>")), eos_token="</s>")
    ids = torch.tensor([[1, 2, 3]])
    expected = model(ids).logits
    model.set_attn_implementation(attention.register())

    parameters = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    store = CheckpointStore(tmp_path, keep=1)
    put(store, 3, {}, {}, lambda folder: export_model(model, tokenizer, folder), export_bytes=parameters)
    latest = CheckpointStore(tmp_path, keep=1).latest()
    assert latest is not None
    assert "fulltilt" not in (latest.model_folder / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(latest.model_folder)
    assert loaded.config._attn_implementation != attention.NAME
    assert torch.equal(loaded(ids).logits, expected)
    assert AutoTokenizer.from_pretrained(latest.model_folder).decode([1, 3]) == tokenizer.decode([1, 3])


# ------------------------------------------------------------------------------------------------------------------------ several workers

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "exp_avg/matrix": ((5, 7), torch.float32),
    "master/vector": ((11,), torch.float64),
    "parameter/stack": ((2, 3, 4), torch.bfloat16),
    "critic/exp_avg/none": ((0, 3), torch.float32),
    "exp_avg/one": ((1, 1), torch.float32),
}
SIZES = {name: math.prod(shape) for name, (shape, _) in SHAPES.items()}


def whole_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, (shape, dtype) in SHAPES.items()}


def cut(cuts: Mapping[str, list[int]], workers: int) -> list[dict[str, torch.Tensor]]:
    """What each worker writes: a flat piece of every tensor, and a counter, which all have."""
    parts: list[dict[str, torch.Tensor]] = [{"step/matrix": torch.tensor(3.0)} for _ in range(workers)]
    for name, tensor in whole_tensors().items():
        borders = [0, *sorted(cuts[name]), tensor.numel()]
        for part, (start, stop) in zip(parts, itertools.pairwise(borders), strict=True):
            part[f"{name}@{start}"] = tensor.flatten()[start:stop]
    parts[0]["surplus/ids"] = torch.arange(4)
    return parts


def save_together(folder: Path, parts: list[dict[str, torch.Tensor]], step: int = 1) -> CheckpointStore:
    """As workers save at the same time: the last one first."""
    store = CheckpointStore(folder, keep=2)

    def write(unfinished: Path, beside: bool) -> Callable[[], checkpoint.Digests]:
        rests = [
            write_trainer(unfinished, part, export, beside=beside, rank=rank, size=len(parts))
            for rank, part in reversed(list(enumerate(parts)))
        ]
        return lambda: {name: digest for rest in rests for name, digest in rest().items()}

    store.save(step, {}, write, 4096, beside=True)
    store.finish()
    return store


a_cut = st.fixed_dictionaries({name: st.lists(st.integers(0, size), min_size=3, max_size=3) for name, size in SIZES.items()})


@settings(deadline=None, max_examples=25)
@given(a_cut)
def test_what_four_workers_wrote_any_number_reads(cuts: Mapping[str, list[int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        latest = save_together(Path(folder), cut(cuts, 4)).latest()
        assert latest is not None
        assert names(latest.path) == [
            "manifest.json",
            "model",
            "state.json",
            *(f"trainer-0000{rank}-of-00004.safetensors" for rank in range(4)),
        ]
        with latest.open() as saved:
            assert saved.names() == sorted([*SHAPES, "step/matrix", "surplus/ids"])
            for workers in (1, 2, 3):
                assert_reads(saved, workers)
        assert latest.arrays("surplus/")["ids"].tolist() == [0, 1, 2, 3]


def assert_reads(saved: SavedTensors, workers: int) -> None:
    for name, tensor in whole_tensors().items():
        size = tensor.numel()
        assert saved.size(name) == size
        borders = [size * rank // workers for rank in range(workers + 1)]
        pieces = [saved.numbers(name, start, stop) for start, stop in itertools.pairwise(borders)]
        assert all(piece.dtype == tensor.dtype and piece.dim() == 1 for piece in pieces)
        assert torch.equal(torch.cat(pieces), tensor.flatten())
        assert torch.equal(saved.whole(name, tensor.shape), tensor)
    assert saved.whole("step/matrix", ()) == 3.0 and saved.numbers("step/matrix", 0, 1).tolist() == [3.0]


def test_what_one_worker_wrote_others_read_in_ranges(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    put(store, 1, whole_tensors() | {"step/matrix": torch.tensor(3.0)}, {}, export, 4096)
    latest = store.latest()
    assert latest is not None and names(latest.path)[-1] == "trainer.safetensors"
    with latest.open() as saved:
        for workers in (1, 2, 3):
            assert_reads(saved, workers)
        matrix = whole_tensors()["exp_avg/matrix"]
        for start, stop in itertools.combinations(range(matrix.numel() + 1), 2):
            assert torch.equal(saved.numbers("exp_avg/matrix", start, stop), matrix.flatten()[start:stop])
        assert saved.select("critic/").names() == ["exp_avg/none"]
        assert saved.select(without=("critic/", "exp_avg/")).names() == ["master/vector", "parameter/stack", "step/matrix"]
        for misfit in (lambda: saved.numbers("master/vector", 5, 12), lambda: saved.whole("master/vector", (5, 2))):
            with pytest.raises(UserError, match=r"step-00000001: the checkpoint is damaged: master/vector has 11 numbers"):
                misfit()


def test_only_the_numbers_asked_for_are_read(tmp_path: Path) -> None:
    """A mapped file counts as memory once it is read: of 64 MiB, a few rows of 16 KiB."""
    store = CheckpointStore(tmp_path, keep=1)
    put(store, 1, {"large": torch.ones(4096, 4096)}, {}, export, 4096)
    code = (
        "import sys\nfrom pathlib import Path\nfrom fulltilt.training.checkpoint import Checkpoint\n"
        "def held():\n    return int(Path('/proc/self/statm').read_text().split()[1]) * 4096 // 2**20\n"
        "with Checkpoint(Path(sys.argv[1]), 1).open() as saved:\n    before = held()\n"
        "    assert saved.numbers('large', 9_000_001, 9_010_000).sum() == 9_999\n    print(held() - before)\n"
    )
    done = runs.code_forked(tmp_path, code, str(store.path(1)))
    assert done.code == 0, done.error
    assert int(done.out) < 32  # the system may read some way ahead


EVEN = {name: [size // 4, size // 2, size * 3 // 4] for name, size in SIZES.items()}
SHARDS = [f"trainer-0000{rank}-of-00004.safetensors" for rank in range(4)]


@pytest.mark.parametrize("name", [SHARDS[0], SHARDS[3]])
@pytest.mark.parametrize("damage", [flip_a_byte, cut_short, Path.unlink])
def test_a_damaged_file_of_one_worker_is_found_out(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    save_together(tmp_path, cut(EVEN, 4), 1)
    store = save_together(tmp_path, cut(EVEN, 4), 2)
    damage(tmp_path / "step-00000002" / name)
    latest = store.latest()
    assert latest is not None and latest.step == 1
    reason = {flip_a_byte: "sha256 differs", cut_short: "bytes instead of", Path.unlink: "is missing"}[damage]
    assert name in store.skipped[0] and reason in store.skipped[0]


@pytest.mark.parametrize("change", ["one is missing", "another number of workers", "one file beside several"])
def test_files_of_different_saves_are_no_checkpoint(tmp_path: Path, change: str) -> None:
    """Even where a manifest lists them all."""
    store = save_together(tmp_path, cut(EVEN, 4))
    folder = tmp_path / "step-00000001"
    (folder / "manifest.json").unlink()
    if change == "one is missing":
        (folder / SHARDS[1]).unlink()
    else:
        number = "trainer.safetensors" if "one file" in change else "trainer-00001-of-00002.safetensors"
        shutil.copy(folder / SHARDS[1], folder / number)
    checkpoint.write_manifest(folder, 1)
    assert store.latest() is None
    assert "exactly the files of one number of workers" in store.skipped[0]


@pytest.mark.parametrize("change", ["a gap", "twice"])
def test_pieces_that_do_not_join_are_refused(tmp_path: Path, change: str) -> None:
    parts = cut(EVEN, 4)
    piece = parts[1].pop("master/vector@2")
    if change == "twice":
        parts[1] |= {"master/vector@2": piece, "master/vector@3": piece}
    latest = save_together(tmp_path, parts).latest()
    assert latest is not None
    with (
        pytest.raises(UserError, match=r"the checkpoint is damaged: the pieces of master/vector do not meet at its number (2|5)\."),
        latest.open(),
    ):
        pass


def test_known_digests_are_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker hashes its own file, once; the manifest holds the same as if one process had read them all."""
    hashed: list[str] = []
    hash_files = checkpoint.hash_files

    def listed(folder: Path, paths: Any, *rest: Any) -> checkpoint.Digests:
        found = hash_files(folder, paths, *rest)
        hashed.extend(found)
        return found

    monkeypatch.setattr(checkpoint, "hash_files", listed)
    save_together(tmp_path, cut(EVEN, 4))
    folder = tmp_path / "step-00000001"
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert sorted(hashed) == sorted(files) == ["model/config.json", "model/weights.bin", "state.json", *SHARDS]
    assert find_damage(folder, 1) is None


def test_a_file_is_flushed_in_pieces_with_a_word_after_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "BLOCK_BYTES", 2**12)
    monkeypatch.setattr(checkpoint, "FLUSH_BYTES", 2**13)
    flushed: list[tuple[int, int, int]] = []
    flush_range = checkpoint.flush_range

    def noting(descriptor: int, *piece: int) -> None:
        flush_range(descriptor, *piece)
        flushed.append(piece)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint, "flush_range", noting)
    path, words, content = tmp_path / "file", [], bytes(range(256)) * 80
    path.write_bytes(content)
    found = checkpoint.hash_files(tmp_path, [path], lambda: words.append(len(flushed)))
    assert found == {"file": (20480, hashlib.sha256(content).hexdigest())}
    started = [(place, 2**12, checkpoint.START_FLUSH) for place in range(0, 20480, 2**12)]
    assert flushed == started + [(place, 2**13, checkpoint.WAIT_FOR_FLUSH) for place in range(0, 20480, 2**13)]
    assert words == [0, 1, 2, 3, 4, 6, 7, 8]


def test_a_system_that_cannot_flush_pieces_is_no_error_but_a_disk_that_loses_them_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def answering(number: int) -> Any:
        def call(*args: Any) -> int:
            ctypes.set_errno(number)
            return -1

        return lambda *args, **options: SimpleNamespace(sync_file_range=call)

    for number in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE):
        monkeypatch.setattr(ctypes, "CDLL", answering(number))
        checkpoint.flush_range(1, 0, 1, checkpoint.WAIT_FOR_FLUSH)
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **options: SimpleNamespace())
    checkpoint.flush_range(1, 0, 1, checkpoint.WAIT_FOR_FLUSH)
    monkeypatch.setattr(ctypes, "CDLL", answering(errno.EIO))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        checkpoint.flush_range(1, 0, 1, checkpoint.WAIT_FOR_FLUSH)
