"""What every test shares: quiet, offline, one thread per process so that test processes do not fight over cores, and what the marks mean.

`kernels`: ops run their Triton kernels, compiled where there is a CUDA device, else in Triton's interpreter on CPU. All other tests run the
references on CPU, in the same process. `gpu`: skipped without a CUDA device.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("FULLTILT_SHARE_DEVICES", "1")  # four workers on two cores
# Triton looks at it when a kernel is defined. The driver's own file, on Linux and under Windows, answers without importing torch.
if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest


def uses_pool(item: pytest.Item | None) -> bool:
    return "pool_of_devices" in getattr(item, "fixturenames", ())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest tests, those with a time limit of their own, dealt out among the test processes: at the end, all cores but one
    would wait for them. Other tests are dealt out by files, whose fixtures and imports one process then makes for all of their tests. Tests
    that share the demo come last, when one process has run it; those that share the pool of workers come first, all in one test process, so
    that there is one pool, which ends when they have."""

    def timed(item: pytest.Item) -> bool:
        return item.get_closest_marker("timeout") is not None

    def place(item: pytest.Item) -> tuple[bool, bool]:
        return "warm" in getattr(item, "fixturenames", ()), not timed(item)

    def bundle(item: pytest.Item) -> tuple[tuple[bool, bool], object]:
        return place(item), item if timed(item) else item.path

    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    items.sort(key=place)
    together = [item for item in items if uses_pool(item)]
    bundles = [list(tests) for _, tests in itertools.groupby((item for item in items if not uses_pool(item)), key=bundle)]
    items[:] = together + [item for number in range(processes) for tests in bundles[number::processes] for item in tests]


def device_of_kernels() -> str | None:
    """Where kernels run in this process. Imports torch, so only marked tests ask."""
    import torch

    from fulltilt.kernels import dispatch

    if dispatch.INTERPRETED:
        return "cpu" if dispatch.triton is not None else None
    return "cuda" if torch.cuda.is_available() else None


# -- garbage --------------------------------------------------------------------------------------------------------------------------

GPU = os.environ.get("TRITON_INTERPRET") != "1"
unfreeze = gc.unfreeze
ended = itertools.count(1)


def sometimes_unfreeze() -> None:
    """In place of gc.unfreeze, which ends a run. Every eighth time all garbage is searched for, so that what runs left behind goes."""
    if next(ended) % 8 == 0:
        unfreeze()
        gc.collect()


def spare_what_is_loaded(item: pytest.Item) -> None:
    """Leave what exists before the test, nearly all of it imported modules, out of the searches for garbage with which a run begins and a
    call from Python ends: 0.3 s each, half the time of short tests. Not for tests with the fixture `garbage`, and not on a GPU, whose
    memory garbage holds."""
    if GPU or "garbage" in getattr(item, "fixturenames", ()):
        gc.unfreeze = unfreeze
        gc.unfreeze()
    else:
        gc.unfreeze = sometimes_unfreeze
        gc.freeze()


@pytest.fixture
def garbage() -> None:
    """For tests that look at what stays in memory: garbage is searched for among all objects."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    spare_what_is_loaded(item)
    if "torch" in sys.modules:
        # Where oneDNN has no kernel for a dtype, torch turns it off for the rest of the process, and other kernels round differently: tests
        # that compare runs bit for bit would depend on the tests before them.
        sys.modules["torch"].backends.mkldnn.set_flags(True)
    if item.get_closest_marker("gpu") and device_of_kernels() != "cuda":
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("kernels") and device_of_kernels() is None:
        pytest.skip("needs a CUDA device, or triton (it is for Linux) and TRITON_INTERPRET=1")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    if not item.get_closest_marker("kernels") or device_of_kernels() == "cuda":
        return (yield)
    from fulltilt.kernels import dispatch

    token = dispatch.interpreting.set(True)
    try:
        return (yield)
    finally:
        dispatch.interpreting.reset(token)


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory):
    """Folder of each family of the list, made on first use."""
    import models

    made: dict[str, object] = {}

    def folder(family: str):
        if family not in made:
            made[family] = models.save(family, tmp_path_factory.mktemp("models") / family)
        return made[family]

    return folder


@pytest.fixture(scope="module")
def named_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder to be in, with the model `m` and the data `t` that configurations of tests name. Nothing is in them."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "m").mkdir()
    (folder / "m" / "config.json").write_text("{}")
    (folder / "t").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield


@pytest.fixture(scope="session")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the command `fulltilt demo` ran, once for all test processes, with what it printed in `said.txt`."""
    import runs

    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "demo-run"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "said.txt").exists():
            ended = subprocess.run(
                [sys.executable, "-m", "fulltilt.cli", "demo", "--dir", "demo"],
                cwd=folder, env=runs.environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1100,
            )  # fmt: skip
            (folder / "said.txt").write_text(ended.stdout)
            assert ended.returncode == 0, ended.stderr
    return folder


@pytest.fixture(scope="session")
def run_of_one_process(tmp_path_factory: pytest.TempPathFactory, model_folders) -> Path:
    """The folder of a short run, for comparison with the same run on several workers."""
    import runs

    folder = runs.make(tmp_path_factory.mktemp("alone") / "folder", model_folders("qwen2"))
    runs.train(folder, "run.steps=4")
    return folder


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """The address of a Ray cluster of two nodes, both on this machine."""
    import runs

    from fulltilt.cluster.ray import cluster_here
    from fulltilt.records import UserError

    attempts = 5  # Ray gives up a node that has not started within 30 s, which is not long on a machine that has more to do
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as started:
        patch.setenv("PYTHONPATH", runs.search_path(Path(__file__).parent))
        for attempt in range(1, attempts + 1):
            try:
                address = started.enter_context(cluster_here(2, cores=4))
                break
            except UserError:
                if attempt == attempts:
                    raise
        patch.undo()
        yield address


@pytest.fixture(scope="session")
def pool_of_devices():
    """Processes in which tests make real workers: started by the first of the tests that need them, ended with the last in a row."""
    import devices

    pool = devices.Pool()
    yield pool
    pool.close()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the processes of the pool when the next test does not use them: they hold 2 GiB."""
    if uses_pool(item) and not uses_pool(nextitem):
        item.funcargs["pool_of_devices"].close()  # type: ignore[attr-defined]


@pytest.fixture
def heard() -> Iterator[None]:
    """Ctrl-C, which a process in the background may ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
