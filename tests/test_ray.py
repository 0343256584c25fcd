"""What is refused before workers start on several machines, the keeper of one machine, and a run on a real Ray cluster: two nodes of it,
both on this machine. More of that: test_ray_workers.py."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import re
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import runs

pytest.importorskip("ray")

from fulltilt import doctor
from fulltilt.algo.build import build
from fulltilt.cluster import address, assembly, checks, keeper, ray, service
from fulltilt.cluster.checks import require_ray
from fulltilt.cluster.keeper import HubModel, Questions, SignsOfLife, WorkerKeeper, facts_of_machine
from fulltilt.cluster.ray import Shared
from fulltilt.cluster.wire import Connection, Hello, Item, Result, Start, pack
from fulltilt.folders import content_digest
from fulltilt.loop.opening import find_mistakes
from fulltilt.records import UserError

# -- the configuration ---------------------------------------------------------------------------------------------------------------------


def test_several_machines_need_an_address(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    folder = runs.make(tmp_path / "run", tmp_path)
    with pytest.raises(UserError, match=r"cluster.nodes.*set cluster.address to that of a Ray cluster"):
        runs.read_config(folder, "cluster.nodes=2")
    assert runs.read_config(folder, "cluster.nodes=1").cluster.nodes == 1
    assert runs.read_config(folder, "cluster.nodes=2", "cluster.address=auto").cluster.nodes == 2


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    require_ray()
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r'cluster.address: .* need the package ray. pip install "fulltilt\[ray\]"'):
        require_ray()


# -- the address ---------------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(answer: bytes | None) -> Iterator[str]:
    """A port at which something answers, or accepts and is silent."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listening.accept()
                with connection:
                    connection.sendall(answer or b"")
                    connection.recv(1000)
                    if answer is None:
                        connection.recv(1000)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_an_address_at_which_nothing_answers_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        place = f"127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setattr(address, "ANSWER_S", 200.0)  # which must not pass
    began = time.monotonic()
    with pytest.raises(UserError, match=rf"cluster.address: nothing answers at {place} \(.*refused\)"):
        ray.join(place, 2, 1)
    with server(b"HTTP/1.1 400 Bad Request\r\n\r\n") as place, pytest.raises(UserError, match=f"what answers at {place} is not Ray"):
        ray.join(place, 2, 1)
    assert time.monotonic() - began < 100
    monkeypatch.setattr(address, "ANSWER_S", 0.3)
    with server(None) as place, pytest.raises(UserError, match=rf"nothing answers at {place} \(timed out\)"):
        ray.join(place, 2, 1)


@pytest.mark.parametrize("given", ["ray://10.0.0.1:10001", "10.0.0.1", "10.0.0.1:", ":6379", "10.0.0.1:port"])
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(UserError, match=f"cluster.address: {given} is not HOST:PORT"):
        ray.join(given, 1, 1)


def test_a_run_and_its_check_look_at_the_address_before_the_data(
    tmp_path: Path, model_folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    config = runs.read_config(folder, "cluster.address=127.0.0.1:1")
    monkeypatch.setattr(assembly, "read_training_data", lambda *args: pytest.fail("data was read"))
    with contextlib.chdir(folder):
        (text,) = find_mistakes(config)
        assert text.startswith("cluster.address: nothing answers at 127.0.0.1:1 (")
        with pytest.raises(UserError, match=re.escape(text)):
            assembly.assemble(config)


def test_a_check_asks_every_machine_that_a_run_could_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    nodes = [
        {"Alive": name != "gone", "NodeManagerHostname": name, "NodeManagerAddress": name, "Resources": {"CPU": cores}}
        for name, cores in (("a", 4.0), ("b", 4.0), ("small", 1.0), ("gone", 4.0))
    ]

    def ask(nodes: Sequence[Mapping[str, str]], questions: Questions) -> Iterator[tuple[Mapping[str, str], ray.Machine, object]]:
        here = facts_of_machine(questions)
        for node, there in zip(nodes, (replace(here, has_folder=False), UserError("the machine b has not answered")), strict=True):
            yield node, ray.Machine(node["NodeManagerHostname"], node["NodeManagerAddress"], None), there

    monkeypatch.setattr(ray.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "join", lambda *args, gpus: SimpleNamespace(leave=lambda: left.append("left")))
    monkeypatch.setattr(ray, "ask_machines", ask)
    found = ray.wrong_machines("10.0.0.1:6379", 2, 2, Shared(tmp_path / "run", {}), gpus=False)
    assert len(found) == 2 and found[0].startswith("the machine a has no folder") and found[1] == "the machine b has not answered"
    assert left == ["left"] and list(tmp_path.iterdir()) == []


def test_a_ray_of_its_own_has_no_more_workers_than_devices(
    tmp_path: Path, model_folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without Ray: only tests let workers share devices."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    config = runs.read_config(folder, "cluster.workers=64", "cluster.address=auto", "reward.workers=64")
    monkeypatch.setattr(checks, "usable_cores", lambda: 2)
    assert checks.open_address(config, "cpu") is None  # conftest.py lets them
    monkeypatch.delenv("FULLTILT_SHARE_DEVICES")
    with contextlib.chdir(folder), pytest.raises(UserError, match=r"cluster.workers: 64 workers need a core each, and this machine has 2"):
        assembly.assemble(config)
    started: list[dict[str, object]] = []
    monkeypatch.setattr(ray, "start", lambda what, files=None, **options: started.append(options))
    monkeypatch.setattr(ray, "usable_cores", lambda: 2)
    ray.join("auto", 1, 64)
    monkeypatch.setenv("FULLTILT_SHARE_DEVICES", "1")
    ray.join("auto", 1, 64)
    assert [options["num_cpus"] for options in started] == [2, 64]


def test_auto_finds_no_cluster_for_several_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{closed.getsockname()[1]}")  # of a cluster that is gone
    with pytest.raises(UserError, match=r"cluster.nodes: 2 machines, but no Ray cluster runs here. Run `ray start --head`"):
        ray.join("auto", 2, 1)
    monkeypatch.setattr(ray, "OBJECT_STORE", 2**60)
    with pytest.raises(UserError, match=r"^/dev/shm has .* free, and Ray needs .*--shm-size"):
        ray.join("auto", 1, 1)


# -- machines that differ ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def questions(tmp_path: Path) -> Questions:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with ray.marked(tmp_path / "runs" / "first") as marker:
        assert Path(marker).parent == tmp_path  # the nearest folder that exists
        return Questions(str(tmp_path), marker, ("model", "missing"))


def test_equal_machines_pass(tmp_path: Path, questions: Questions) -> None:
    Path(questions.marker).touch()
    here = facts_of_machine(questions)
    assert here.contents == {"model": {"config.json": content_digest(tmp_path / "model" / "config.json")}, "missing": None}
    assert {"torch", "transformers", "Python"} < set(here.versions)
    assert list(ray.differences("b", here, here, Shared(tmp_path, {"model.path": "model"}), 0)) == []
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(["model", Path(questions.marker).name])


def test_a_machine_that_cannot_write_is_refused(tmp_path: Path, questions: Questions, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(questions.marker).touch()
    here = facts_of_machine(questions)

    def refuse(**options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(keeper.tempfile, "TemporaryFile", refuse)
    (text,) = ray.differences("node-b", facts_of_machine(questions), here, Shared(tmp_path, {}), 0)
    assert text == f"run.dir: the machine node-b cannot write to {tmp_path}. Give the user of the Ray workers there the right to write"
    assert facts_of_machine(replace(questions, marker="")).writes_there, "nobody asks"


def test_packages_that_decide_results_are_compared(tmp_path: Path, questions: Questions) -> None:
    Path(questions.marker).touch()
    here = replace(facts_of_machine(questions), versions={"torch": "2.13.0", "peft": "1.0"})
    there = replace(here, versions={"torch": "2.13.0", "triton": "3.4"})
    assert list(ray.differences("node-b", there, here, Shared(tmp_path, {}), 0)) == [
        "the machine node-b has peft none, and this one 1.0. Install the same on all machines",
        "the machine node-b has triton 3.4, and this one none. Install the same on all machines",
    ]
    assert {"torch", "transformers", "safetensors", "tokenizers"} < keeper.versions().keys()


def test_files_that_functions_import_are_compared(tmp_path: Path, model_folders: Callable[[str], Path]) -> None:
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    (folder / "reward.py").write_text("from parts import letters\n" + (folder / "reward.py").read_text())
    (folder / "parts").mkdir()
    (folder / "parts" / "letters.py").write_text("")
    with contextlib.chdir(folder):
        found = service.files_of_functions(runs.read_config(folder))
    assert found == {
        "the reward reward.py:score": str(folder / "reward.py"),
        "the reward reward.py:score, which imports parts/letters.py": str(folder / "parts" / "letters.py"),
    }


def test_machines_that_a_run_leaves_unused_are_told(tmp_path: Path, model_folders: Callable[[str], Path]) -> None:
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    config = runs.read_config(folder, "cluster.address=auto")
    assert service.unused_machines(config, 1) is None
    assert service.unused_machines(config, 4) == (
        "cluster.nodes is not set: the run uses 1 of the 4 machines of the Ray cluster. Set cluster.nodes = 4 to use them all, or 1"
    )
    assert service.unused_machines(runs.read_config(folder, "cluster.address=auto", "cluster.nodes=1"), 4) is None


def test_every_difference_is_told_at_once(tmp_path: Path, questions: Questions) -> None:
    here = facts_of_machine(questions)
    there = replace(
        here,
        versions={**here.versions, "torch": "2.11.0"},
        has_folder=False,
        contents={"model": None, "missing": None},
        shared_memory=2**20,
        devices=("0",),
    )
    found = list(ray.differences("node-b", there, here, Shared(tmp_path / "runs", {"model.path": "model"}), 2))
    expected = [
        rf"the machine node-b has torch 2.11.0, and this one {re.escape(here.versions['torch'])}",
        "the machine node-b has no folder",
        "run.dir: the machine node-b does not see what this one writes",
        "model.path: the machine node-b has no model",
        "Ray has given the workers of the machine node-b 1 GPU in CUDA_VISIBLE_DEVICES, and they need 2",
        r"/dev/shm of the machine node-b has 1.0 MiB free, and 2 workers need 64.0 MiB",
    ]
    assert len(found) == len(expected) and all(re.match(*pair) for pair in zip(expected, found, strict=True)), found
    (tmp_path / "model" / "config.json").write_text("[]")  # as many bytes as before
    other = replace(here, sees_marker=True, contents=facts_of_machine(questions).contents)
    (text,) = ray.differences("node-b", other, here, Shared(tmp_path, {"model.path": "model"}), 0)
    assert text.startswith("model.path: model holds other files on the machine node-b")


def test_a_machine_without_a_model_of_the_hub_is_refused(tmp_path: Path) -> None:
    model = HubModel("org/tiny", "a" * 40)
    here = facts_of_machine(Questions(str(tmp_path), str(tmp_path), (), ()))
    there = replace(here, without={model: "the network is down"})
    (text,) = ray.differences("node-b", there, here, Shared(tmp_path, {}, {"model.path": model}), 0)
    assert text == (
        f"model.path: the machine node-b has not all of org/tiny at commit {model.commit} in its cache of the hub, and cannot download it: "
        f"the network is down. Run `hf download org/tiny --revision {model.commit}` there, or set HF_HOME to a folder that all machines "
        "share"
    )


def test_the_source_decides_which_version_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text("one")
    monkeypatch.setattr(keeper.fulltilt, "__file__", str(tmp_path / "__init__.py"))
    before = keeper.digest_of_source()
    (tmp_path / "a.py").write_text("two")
    assert before != keeper.digest_of_source()


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell")
def test_the_interface_of_an_address() -> None:
    assert keeper.interface_of("127.0.0.1") == "lo" and keeper.interface_of("203.0.113.77") is None


@pytest.mark.parametrize("disabled", [False, True])
def test_shared_memory_for_nccl_on_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disabled: bool) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = runs.read_config(runs.make(tmp_path / "run", tmp_path), "cluster.workers=4")
    monkeypatch.setenv("NCCL_SHM_DISABLE", "1" if disabled else "0")
    monkeypatch.setattr(checks, "free_shared_memory", lambda: 64 * 2**20)  # as Docker has it
    wrong = []
    for gpus in (4, 2):
        monkeypatch.setattr(checks.torch.cuda, "device_count", lambda gpus=gpus: gpus)
        wrong.append(list(checks.wrong_workers(config, build(config), "cuda")))
    told = "/dev/shm has 64.0 MiB free, and 4 workers need 128.0 MiB. Enlarge it (docker run --shm-size=1g), or set NCCL_SHM_DISABLE=1"
    assert wrong == [[] if disabled else [told], []]  # workers that share GPUs do not use NCCL
    assert list(checks.wrong_workers(config, build(config), "cpu")) == []


# -- one keeper, with a real worker --------------------------------------------------------------------------------------------------------


def test_a_keeper_starts_workers_that_connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # the keeper's own
    secret, found = b"s" * 32, WorkerKeeper()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        (pid,) = found.launch([3], "127.0.0.1", listening.getsockname(), secret, {"TOY": "yes"}, str(tmp_path))
        accepted, _ = listening.accept()
    assert ray.greeting(accepted, secret) == 3
    connection = Connection(accepted)
    assert isinstance(connection.receive(), Hello)

    numbers = itertools.count()

    def call(method: str, *args: object) -> object:
        connection.send(pack(Start(next(numbers), method, args, False)))
        while isinstance(answer := connection.receive(), Item):  # progress of loading
            pass
        assert isinstance(answer, Result)
        return answer.result

    call("toy_worker:make", pickle.dumps(5))
    names = ("TOY", "FULLTILT_WORKER", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
    assert [call("environment", name) for name in names] == ["yes", "3", None, "lo"]
    connection.send(pack(Start(next(numbers), "wait_for_gate", (), False)))
    deadline = time.monotonic() + 60
    while "wait_for_gate" not in found.stacks([0], 1.0).get(0, ""):
        assert time.monotonic() < deadline
    assert found.signs() == [SignsOfLife()]
    found.signs(activity=True)
    assert found.signs(activity=True) == [SignsOfLife(active=False)]
    os.kill(pid, signal.SIGKILL)
    assert found.obituary(0).how == "was killed by signal 9 (SIGKILL)" and found.signs() == [SignsOfLife(ended=True)]
    connection.close()


class Keepers:
    """Stands for Ray: the clock is advanced by whoever waits, and answers come at once, or never from machines that are `stuck`."""

    def __init__(self) -> None:
        self.now, self.stuck, self.told = 0.0, set[str](), list[tuple[str, str, tuple[object, ...]]]()

    def machine(self, name: str) -> ray.Machine:
        def method(called: str, *args: object) -> tuple[str, object]:
            self.told.append((name, called, args))
            found = {index: f"stack {index}" for index in args[0]} if called == "stacks" else [SignsOfLife()] * 8  # type: ignore[attr-defined]
            return name, found

        class Keeper:
            def __getattr__(self, called: str) -> SimpleNamespace:
                return SimpleNamespace(remote=partial(method, called))

        return ray.Machine(name, name, Keeper())

    def get(self, question: tuple[str, object], timeout: float) -> object:
        if question[0] in self.stuck:
            self.now += timeout
            raise ray.GetTimeoutError
        return question[1]

    def wait(self, questions: list[tuple[str, object]], num_returns: int = 1, timeout: float = 0.0) -> tuple[list[object], list[object]]:
        ready = [question for question in questions if question[0] not in self.stuck]
        self.now += timeout if len(ready) < num_returns else 0.0
        return ready, [question for question in questions if question[0] in self.stuck]


def test_a_stuck_machine_costs_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    keepers = Keepers()
    monkeypatch.setattr(ray.ray, "get", keepers.get)
    monkeypatch.setattr(ray.ray, "wait", keepers.wait)
    monkeypatch.setattr(ray.time, "monotonic", lambda: keepers.now)
    found = ray.Machines.__new__(ray.Machines)
    found._machines = [keepers.machine(name) for name in "abc"]
    homes = enumerate(itertools.product(found._machines, range(8)))
    found._homes = {rank: ray.RemoteChild(machine, index, 4000 + rank) for rank, (machine, index) in homes}
    shown = found.stacks(range(24), 1.0)
    assert keepers.now == 0.0 and len(keepers.told) == 3, "one question for all workers of a machine"
    assert shown.texts == {rank: f"stack {rank % 8}" for rank in range(24)} and not shown.unreachable
    keepers.stuck = {"b", "c"}
    shown = found.stacks([0, 3, 9, 20], 1.0)
    assert shown.texts == {0: "stack 0", 3: "stack 3"} and shown.unreachable == {9, 20}
    assert keepers.now == 1.0 + ray.CALL_S, "one deadline for all machines"
    shown = found.stacks(range(24), 1.0)
    found.wait(5.0)
    assert keepers.now == 1.0 + ray.CALL_S, "nobody waits again for a machine that is stuck"
    obituary = found._homes[9].obituary()
    assert keepers.now == 1.0 + 3 * ray.CALL_S, "unless a worker has just ended: its machine may live, and know why"
    assert len(shown.texts) == 8 and obituary.how == "is gone, with the Ray actor that kept the workers of its machine: it does not answer"
    keepers.stuck, keepers.now = {"c"}, 100.0
    assert not found._homes[9].ended(), "the question for signs of life is answered"
    assert set(found.stacks(range(24), 1.0).texts) == set(range(16)) and keepers.now == 100.0


def test_a_restart_waits_for_what_ray_still_counts_as_used(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waited, told = [0.0], 0, list[str]()

    def reserve(nodes: int, workers: int | None, gpus: bool | None) -> tuple[int, str]:
        nonlocal waited
        waited += 1
        now[0] += ray.ANSWER_S
        if waited <= until:
            raise UserError("others use them")
        return workers or 3, "group"

    monkeypatch.setattr(ray, "reserve", reserve)
    monkeypatch.setattr(ray.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ray.time, "sleep", lambda seconds: None)
    until = 5
    assert ray.reserve_again(2, 3, True, 3, told.append) == (3, "group") and waited == 6
    assert told == ["the restart waits up to 120 s for Ray to have what it needs: others use them"]
    until, now[0] = 10**6, 0.0
    with pytest.raises(UserError, match="Ray has not had what the restart needs within 120 s: others use them"):
        ray.reserve_again(2, 3, True, 3, told.append)
    assert ray.AGAIN_S < now[0] < 2 * ray.AGAIN_S


@pytest.mark.parametrize("left", [[8, 8, 4], [8, 4], [4], [9, 9]])
def test_a_restart_takes_as_many_gpus_as_before_and_fewer_only_after_the_wait(monkeypatch: pytest.MonkeyPatch, left: list[int]) -> None:
    """On two machines with 8 each, where the user has left the number of workers open."""
    now, asked = [0.0], list[int | None]()

    def reserve(nodes: int, workers: int | None, gpus: bool | None) -> tuple[int, str]:
        asked.append(workers)
        now[0] += ray.ANSWER_S
        wanted = workers or ray.count_gpus(nodes)
        if sum(count >= wanted for count in left) < nodes:
            raise UserError(f"{nodes} machines with {wanted} GPUs")
        return wanted, "group"

    monkeypatch.setattr(ray, "reserve", reserve)
    monkeypatch.setattr(ray.ray, "nodes", lambda: [{"Alive": True, "Resources": {"GPU": count}} for count in left])
    monkeypatch.setattr(ray.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ray.time, "sleep", lambda seconds: None)
    if len(left) < 2:
        with pytest.raises(UserError, match="Ray has not had what the restart needs within 120 s: 2 machines with 8 GPUs"):
            ray.reserve_again(2, None, True, 8, lambda text: None)
    else:
        assert ray.reserve_again(2, None, True, 8, lambda text: None) == (min(8, sorted(left)[-2]), "group")
    at_once = sorted(left)[-2:][0] >= 8 and len(left) > 1
    assert asked[0] == 8 and (len(asked) == 1) == at_once and (at_once or now[0] > ray.AGAIN_S)


def test_a_driver_out_of_reach_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()
    with pytest.raises(UserError, match=rf"the machine \S+ \(10.0.0.2\) cannot reach this one at 127.0.0.1, port {address[1]}: .*refused"):
        WorkerKeeper().launch([0], "10.0.0.2", address, b"", {}, str(tmp_path))


@pytest.mark.parametrize("sent", [b"", b"x" * 36, struct.pack("<32sI", b"another secret", 0)])
def test_who_does_not_know_the_secret_is_no_worker(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(sent)
        theirs.shutdown(socket.SHUT_WR)
        assert ray.greeting(ours, b"s" * 32) is None


# -- a real cluster ------------------------------------------------------------------------------------------------------------------------

SECONDS = 540  # for a run

# What depends on how the work is shared out. All else is the same, up to the order in which numbers are added.
SHARED_OUT = ("rollout/kv_use", "rollout/mean_", "rollout/most_", "rollout/passes", "actor/micro_batches", "rollout_corr/")


def assert_equal_on_ray(folder: Path, alone: Path, *settings: str, samples_stay: bool) -> None:
    """Make the run of `alone` with these settings, and compare."""
    runs.make(folder, (alone / "model").resolve())
    # A reward process for each worker: the nodes are of one machine.
    ended = runs.command(folder, "train", "run.toml", "run.steps=4", "reward.workers=4", *settings, seconds=SECONDS)
    assert ended.code == 0, ended.error
    assert "ray" not in ended.error.lower(), ended.error
    for found, expected in zip(runs.without_clock(runs.metrics(folder)), runs.without_clock(runs.metrics(alone)), strict=True):
        names = [name for name in expected if not name.startswith(SHARED_OUT)]
        assert {name: found[name] for name in names} == pytest.approx({name: expected[name] for name in names}, rel=1e-4, abs=1e-6)
    for step in range(1, 5):
        texts = [[row["response"] for row in runs.rollouts(each, step)] for each in (folder, alone)]
        assert texts[0] == texts[1]
    moved = [line.get("communication/all_to_all_bytes", 0) for line in runs.metrics(folder) if line["step"]]
    assert all(moved) if samples_stay else not any(moved)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_run_on_two_machines_equals_that_of_one_process(cluster: str, tmp_path: Path, run_of_one_process: Path) -> None:
    settings = ["cluster.nodes=2", "cluster.workers=1", f"cluster.address={cluster}"]
    assert_equal_on_ray(tmp_path / "folder", run_of_one_process, *settings, samples_stay=True)


def test_the_doctor_of_a_cluster_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (found,) = doctor.examine_cluster("auto")
    assert (found.status, found.core) == ("broken", True)
    assert found.detail.startswith("no Ray cluster runs on this machine. Run `ray start --head`, or name the machine")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    (found,) = doctor.examine_cluster(address)
    assert found.status == "broken" and found.detail.startswith(f"cluster.address: nothing answers at {address}")
    report = doctor.Report((found,))
    assert report.broken
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    (found,) = doctor.examine_cluster(address)
    assert (found.status, found.remedy) == ("missing", 'pip install "fulltilt[ray]"')


def test_ray_keeps_no_token_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray is given for its own processes it writes into its records."""
    for name in ("HF_TOKEN", "HUGGINGFACE_API_KEY", "HF_HOME", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "1")
    kept = ray.known_to_ray()
    assert {"HF_HOME", "TOKENIZERS_PARALLELISM"} < kept.keys() and not {"HF_TOKEN", "HUGGINGFACE_API_KEY"} & kept.keys()
    assert {"HF_TOKEN", "HUGGINGFACE_API_KEY"} < ray.travelling().keys()  # which workers get
