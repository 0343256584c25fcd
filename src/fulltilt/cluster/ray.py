"""Workers on several machines: Ray finds the machines and starts a keeper on each, which starts the workers there.

Enters: the address of a Ray cluster, how many machines and workers, and the files that every machine must see. Leaves: a host of workers as
on one machine: each is a process with its own connection to the driver, for calls, items and results. Guaranteed: an unsuitable cluster is
refused before a worker starts, with all its mistakes at once; Ray prints nothing here; `close` leaves neither worker nor actor, and no
process of a Ray that this run has started. A worker ends with its keeper, and a keeper with the driver.

The only file that imports ray.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from fulltilt.cluster.address import current_cluster, find_cluster
from fulltilt.cluster.child import Obituary
from fulltilt.cluster.hosts import Place
from fulltilt.cluster.keeper import (
    ENLARGE,
    GREETING,
    OBJECT_STORE,
    SHARED_MEMORY,
    HubModel,
    MachineFacts,
    Questions,
    SignsOfLife,
    WorkerKeeper,
    facts_of_machine,
    free_shared_memory,
    may_share_devices,
    wrong_shared_memory,
)
from fulltilt.cluster.processes import Processes, ShownStacks, WorkerPeer
from fulltilt.cluster.wire import Connection
from fulltilt.memory.host import usable_cores
from fulltilt.records import UserError
from fulltilt.words import first_line, in_bytes, joined, many

ANSWER_S = 10.0  # how long a cluster may take to find free machines, and a worker to greet
AGAIN_S = 120.0  # the same for a run that has lost workers: Ray frees their resources a moment later, and misses a machine after a minute
START_S = 120.0  # how long the keepers may take to start, and their workers to connect
LOOK_S = 1.0  # how often a keeper is asked for the signs of life of its workers
CALL_S = 5.0  # how long a keeper may take to answer
NICENESS = "RAY_worker_niceness"  # set for a Ray that is started here; otherwise Ray lowers the priority of its workers on a busy machine
# Variables of the driver that workers on other machines get too. The others, such as PATH, are about the driver's own machine.
TRAVELLING = re.compile(
    r"(FULLTILT|HF|HUGGINGFACE|TRANSFORMERS|TOKENIZERS|(PY)?TORCH|NCCL|GLOO|OMP|MKL|CUBLAS|TRITON)_\w+|PYTHON(PATH|HASHSEED)"
)


# -- the cluster ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClusterMembership:
    """This process's membership in a Ray cluster."""

    own: bool = True  # whether this process joined here, and must leave here
    files: str | None = None  # the folder of a cluster that was started here

    def leave(self) -> None:
        if self.own:
            ray.shutdown()
        if self.files:
            shutil.rmtree(self.files, ignore_errors=True)


def join(address: str, nodes: int, workers: int, *, gpus: bool = False) -> ClusterMembership:
    """Join a Ray cluster, or start one. `gpus`: whether each worker has a GPU. Ray counts a core for each of them too, and a machine may
    have fewer."""
    if ray.is_initialized():  # by the calling program
        return ClusterMembership(own=False)
    if found := find_cluster(address, nodes):
        return start(f"Ray at {found}", address=found)
    if (free := free_shared_memory()) < OBJECT_STORE:
        raise UserError(f"{SHARED_MEMORY} has {in_bytes(free)} free, and Ray needs {in_bytes(OBJECT_STORE)}. {ENLARGE}")
    files = tempfile.mkdtemp(prefix="fulltilt-ray-", dir="/tmp")  # even if TMPDIR is set: names of sockets must be short
    cores = max(usable_cores(), workers if gpus or may_share_devices() else 0)
    own = {"num_cpus": cores, "object_store_memory": OBJECT_STORE, "include_dashboard": False, "_temp_dir": files}
    try:
        return start("Ray", files, address="local", **own)
    except BaseException:
        shutil.rmtree(files, ignore_errors=True)
        raise


@contextlib.contextmanager
def cluster_here(nodes: int, cores: int) -> Iterator[str]:
    """Start a Ray cluster whose machines are all this one, to show what several would do. Yields its address, and removes everything at the
    end. Raises UserError if Ray does not start: Ray gives up on a machine after 30 seconds."""
    files = tempfile.mkdtemp(prefix="fulltilt-ray-", dir="/tmp")
    # This folder also has the address that `auto` finds; the user's folder may name another cluster.
    variables = {**os.environ, **travelling(), "RAY_TMPDIR": files, "RAY_USAGE_STATS_ENABLED": "0", NICENESS: "0"}
    program = [sys.executable, "-c", f"from fulltilt.cluster import ray; ray.keep_cluster({nodes}, {cores})"]
    # In its own process: Ray's processes end with it, also those of a machine that did not start, and its signal handlers are not ours.
    kept = subprocess.Popen(program, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert kept.stdin and kept.stdout
    try:
        found, _, text = kept.stdout.readline().strip().partition(" ")
        if found != "address":
            raise UserError(f"Ray does not start on this machine: {text or 'its process has ended'}")
        yield text
    finally:
        kept.stdin.close()
        try:
            kept.wait(START_S)
        except subprocess.TimeoutExpired:
            kept.kill()
            kept.wait()
        kept.stdout.close()
        shutil.rmtree(files, ignore_errors=True)


def keep_cluster(nodes: int, cores: int) -> None:
    """Print the address of a cluster, and keep it until standard input ends."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    os.mkdir(os.path.join(os.environ["RAY_TMPDIR"], "ray"))
    cluster = Cluster()
    try:
        for _ in range(nodes):
            cluster.add_node(num_cpus=cores, object_store_memory=OBJECT_STORE, include_dashboard=False)
    except Exception as error:  # Ray raises plain exceptions
        print("error", first_line(error), flush=True)
        os._exit(1)  # ends the processes that Ray has started at once, without Ray's own waiting
    print("address", cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()


def start(what: str, files: str | None = None, **options: Any) -> ClusterMembership:
    kept, variable = signal.getsignal(signal.SIGTERM), os.environ.pop("RAY_ADDRESS", None)  # it would outweigh the given address
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(NICENESS, "0")
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        ray.init(log_to_driver=False, configure_logging=False, logging_level=logging.ERROR, **options)
    except Exception as error:  # Ray also raises plain exceptions
        hint = "" if "RAY_AUTH_MODE" in os.environ or files else ". A cluster that asks for a token needs RAY_AUTH_MODE=token here, too"
        raise UserError(f"cluster.address: {what} cannot be used: {first_line(error)}{hint}") from error
    finally:
        if variable is not None:
            os.environ["RAY_ADDRESS"] = variable
        if threading.current_thread() is threading.main_thread() and kept is not None:
            signal.signal(signal.SIGTERM, kept)  # a run that is asked to stop saves first
    return ClusterMembership(files=files)


# -- machines ------------------------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Machine:
    """A machine with a keeper."""

    name: str
    ip: str
    keeper: Any
    node: str = ""  # Ray's name for it
    open: bool = True
    lost: str = ""  # why the keeper no longer answers
    silent: bool = False  # whether the last answer was late: nobody waits for another one until it has come
    signs: list[SignsOfLife] = field(default_factory=list)  # the last signs of life of its workers
    activity: bool = False  # whether to ask the keeper for its workers' activity
    _asked: Any = None  # the pending question for signs of life
    _asked_at: float = 0.0
    _asking: threading.Lock = field(default_factory=threading.Lock)

    def __str__(self) -> str:
        return self.name if self.name == self.ip else f"{self.name} ({self.ip})"

    def tell(self, method: str, *args: Any) -> Any:
        """Call the keeper without waiting for the answer."""
        if self.open:
            with contextlib.suppress(RayError):
                return getattr(self.keeper, method).remote(*args)
        return None

    def answer(self, question: Any, seconds: float = CALL_S, *, anyway: bool = False) -> Any:
        """Return the answer to a question, or None if the keeper does not answer. Does not wait for a keeper that has been silent, unless
        `anyway`."""
        if self.open and question is not None:
            try:
                found = ray.get(question, timeout=0.0 if self.silent and not anyway else seconds)
            except GetTimeoutError:
                self.silent, self.lost = True, "it does not answer"
            except RayError as error:
                self.lost = first_line(error)
            else:
                self.silent = False
                return found
        return None

    def signs_of(self, index: int) -> SignsOfLife:
        """Return the latest known signs of life of a worker, without waiting."""
        if self._asking.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._asking.release()
        return self.signs[index] if self.signs else SignsOfLife()

    def _look(self) -> None:
        if self._asked is None and time.monotonic() - self._asked_at > LOOK_S:
            self._asked, self._asked_at = self.tell("signs", self.activity), time.monotonic()
        if self.open and self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
            answer = self.answer(self._asked)
            self.signs = answer if answer is not None else [SignsOfLife(ended=True)] * len(self.signs)
            self._asked = None


@dataclass(eq=False)
class RemoteChild:
    """A worker's process on a machine that has a keeper."""

    machine: Machine
    index: int  # place among the machine's workers
    pid: int

    @property
    def place(self) -> str:
        return f"process {self.pid} on {self.machine.name}"

    def kill(self) -> None:
        self.machine.tell("kill", self.index)

    def ended(self) -> bool:
        return self.machine.signs_of(self.index).ended

    def is_active(self) -> bool:
        """Return what the keeper found a moment ago."""
        self.machine.activity = True
        return self.machine.signs_of(self.index).active

    def obituary(self) -> Obituary:
        # The end of the worker's connection has just shown that its machine is alive.
        found = self.machine.answer(self.machine.tell("obituary", self.index), 2 * CALL_S, anyway=True)
        return found or Obituary(f"is gone, with the Ray actor that kept the workers of its machine: {self.machine.lost}")

    def close(self) -> None:
        pass


def answers(questions: Mapping[Machine, Any], seconds: float) -> dict[Machine, Any]:
    """Collect the answers of machines within this time, all together; None for a machine that does not answer."""
    waited_for = [question for machine, question in questions.items() if question is not None and not machine.silent]
    if waited_for:
        ray.wait(waited_for, num_returns=len(waited_for), timeout=seconds)
    return {machine: machine.answer(question, 0.0) for machine, question in questions.items()}


@dataclass(frozen=True)
class Shared:
    """Everything that all machines must see as this one does: the run's folder, and the files that workers read, by the keys of their
    settings."""

    run_folder: Path
    paths: Mapping[str, str]
    models: Mapping[str, HubModel] = field(default_factory=dict)  # models on the hub, by the same keys


class Machines:
    """Reserved machines of a Ray cluster, each with a keeper."""

    def __init__(
        self, address: str, nodes: int, workers: int | None, shared: Shared, *, gpus: bool | None, before: int | None = None,
        say: Callable[[str], None] = print,
    ) -> None:  # fmt: skip
        """`workers`: per machine; None: one for each of its GPUs. `gpus`: whether each worker has a GPU; None: no, because this machine has
        none, which must then hold for all machines. `before`: how many workers per machine a run had that has just lost some, which Ray may
        not know yet; 0: none had loaded; None: it has lost none. `say`: told what is waited for."""
        self._joined = join(address, nodes, workers or 1, gpus=bool(gpus))
        self._group: PlacementGroup | None = None
        self._machines: list[Machine] = []
        self._homes: dict[int, RemoteChild] = {}  # by rank
        self._gpus = bool(gpus)
        try:
            self.ip: str = ray.util.get_node_ip_address()
            if before is None:
                self.workers, self._group = reserve(nodes, workers, gpus)
            else:
                self.workers, self._group = reserve_again(nodes, workers, gpus, before // nodes, say)
            self._machines = [self._keep(index, node, gpus) for index, node in enumerate(nodes_of(self._group))]
            self._machines.sort(key=lambda machine: machine.ip != self.ip)
            self.facts = self._look(shared, gpus)
            self.in_cluster = count_machines()
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        return len(self._machines) * self.workers

    @property
    def places(self) -> list[Place]:
        """Return the place of each rank."""
        found = []
        for machine, facts in zip(self._machines, self.facts, strict=True):
            gpus = facts.devices[: self.workers] if self._gpus else [""] * self.workers
            found += [Place(machine.ip, gpu, f"cuda:{index}" if gpu else "cpu", machine.node) for index, gpu in enumerate(gpus)]
        return found

    def launch(self, ranks: Sequence[int], environment: Mapping[str, str]) -> Iterator[WorkerPeer]:
        secret, folder = secrets.token_bytes(32), os.getcwd()
        variables = {name: value for name, value in travelling().items() if name != "PYTHONPATH"}  # the keeper adds this one to its own
        with contextlib.ExitStack() as on_failure, socket.create_server((self.ip, 0), backlog=len(ranks)) as server:
            address = (self.ip, server.getsockname()[1])
            parts = [ranks[index * self.workers : (index + 1) * self.workers] for index in range(len(self._machines))]
            started = [
                machine.tell("launch", list(own), machine.ip, address, secret, {**variables, **environment}, folder)
                for machine, own in zip(self._machines, parts, strict=True)
            ]
            connections = accept(server, secret, len(ranks), started, on_failure)
            for machine, own, question in zip(self._machines, parts, started, strict=True):
                for index, (rank, pid) in enumerate(zip(own, answer_of(question), strict=True)):
                    self._homes[rank] = RemoteChild(machine, index, pid)
                    yield WorkerPeer(rank, self._homes[rank], Connection(connections[rank]))
                machine.signs = [SignsOfLife()] * len(own)
            on_failure.pop_all()

    def wait(self, seconds: float) -> None:
        answers({machine: machine.tell("wait", seconds) for machine in self._machines}, seconds + CALL_S)

    def stacks(self, ranks: Sequence[int], seconds: float) -> ShownStacks:
        """Ask each machine once for the stacks of all its workers, with one deadline for all machines."""
        homes: dict[Machine, dict[int, int]] = {}  # by machine: ranks by the index of the worker on it
        for rank in ranks:
            homes.setdefault(self._homes[rank].machine, {})[self._homes[rank].index] = rank
        asked = {machine: machine.tell("stacks", list(own), seconds) for machine, own in homes.items()}
        found = answers(asked, seconds + CALL_S)
        texts = {homes[machine][index]: text for machine, shown in found.items() if shown for index, text in shown.items()}
        return ShownStacks(texts, {rank for machine, own in homes.items() if machine.silent for rank in own.values()})

    def close(self) -> None:
        """End the keepers, and leave Ray. May be called again."""
        machines, self._machines = self._machines, []
        group, self._group = self._group, None
        joined, self._joined = self._joined, ClusterMembership(own=False)
        for machine in machines:
            machine.open = False
        for machine in machines:
            with contextlib.suppress(RayError):
                ray.kill(machine.keeper)
        if group:
            with contextlib.suppress(RayError):
                remove_placement_group(group)
        joined.leave()

    def _keep(self, index: int, node: Mapping[str, Any], gpus: bool | None) -> Machine:
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        # CUDA_VISIBLE_DEVICES stays as it is if no GPU was asked for.
        variables = {**known_to_ray(), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        keeper = ray.remote(WorkerKeeper).options(
            num_cpus=self.workers,
            num_gpus=self.workers if gpus else 0,
            scheduling_strategy=place,
            runtime_env={"env_vars": variables},
        )
        return Machine(node["NodeManagerHostname"], node["NodeManagerAddress"], keeper.remote(), node["NodeID"])

    def _look(self, shared: Shared, gpus: bool | None) -> list[MachineFacts]:
        with marked(shared.run_folder) as marker:
            questions = questions_about(shared, marker)
            asked = [machine.tell("look", questions) for machine in self._machines]
            found = [answer_of(question, f"the machine {machine}") for machine, question in zip(self._machines, asked, strict=True)]
            here = facts_of_machine(replace(questions, models=()))
        mistakes = [
            text
            for machine, facts in zip(self._machines, found, strict=True)
            for text in differences(str(machine), facts, here, shared, self.workers if gpus else 0)
        ]
        if mistakes:
            raise UserError("\n".join(mistakes))
        return found


def questions_about(shared: Shared, marker: str) -> Questions:
    paths = tuple(path for path in shared.paths.values() if os.path.exists(path))
    return Questions(os.getcwd(), marker, paths, tuple(shared.models.values()))


def count_machines() -> int:
    return len([node for node in ray.nodes() if node["Alive"]])


def count_gpus(nodes: int) -> int:
    """Return the most GPUs that at least `nodes` machines have, but no fewer than 1."""
    counts = sorted((int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]), reverse=True)
    return max(1, counts[nodes - 1]) if nodes <= len(counts) else 1


def refuse_few(nodes: int, workers: int, gpus: bool | None) -> None:
    alive = [node for node in ray.nodes() if node["Alive"]]
    if len(fitting_nodes(workers, gpus)) < nodes:
        raise UserError(
            f"{asked_for(nodes, workers, gpus)}, and Ray has {listed_machines(alive)}. Start Ray on more machines (`ray start "
            f"--address={ray.get_runtime_context().gcs_address}`), or lower cluster.nodes or cluster.workers"
        )
    if gpus is None and (having := [node for node in alive if node["Resources"].get("GPU", 0)]):
        raise UserError(
            f"run.device: auto takes a CPU, for this machine has no GPU; but Ray has {listed_machines(having)}. Start the run on a machine "
            "that has GPUs, or set run.device = cpu"
        )


def fitting_nodes(workers: int, gpus: bool | None) -> list[Mapping[str, Any]]:
    """Return the machines with enough resources, whether these are free or not."""
    return [node for node in ray.nodes() if node["Alive"] and all(node["Resources"].get(kind, 0) >= workers for kind in kinds(gpus))]


def kinds(gpus: bool | None) -> tuple[str, ...]:
    return ("CPU", "GPU") if gpus else ("CPU",)


def asked_for(nodes: int, workers: int, gpus: bool | None) -> str:
    each = " each" if nodes > 1 else ""
    things = joined([many(workers, {"CPU": "core"}.get(kind, kind)) for kind in kinds(gpus)], "and")
    return f"cluster.nodes and cluster.workers ask for {many(nodes, 'machine')} with {things}{each}"


def listed_machines(nodes: Sequence[Mapping[str, Any]]) -> str:
    resources = [(node["NodeManagerHostname"], node["Resources"]) for node in nodes]
    return joined([f"{name} ({has.get('CPU', 0):.0f} cores, {has.get('GPU', 0):.0f} GPUs)" for name, has in resources], "and") or "none"


def reserve_again(
    nodes: int, workers: int | None, gpus: bool | None, before: int, say: Callable[[str], None]
) -> tuple[int, PlacementGroup]:
    """Reserve as `reserve` does, while Ray may still count the resources of workers or a machine that are gone. `before`: how many workers
    each machine had; fewer are taken only if the user leaves the number open, and only after the wait."""
    deadline, told = time.monotonic() + AGAIN_S, False
    while True:
        try:
            return reserve(nodes, workers or before or None, gpus)
        except UserError as error:
            if time.monotonic() > deadline:
                with contextlib.suppress(UserError):  # the first error is the one to raise
                    if workers is None and count_gpus(nodes) < before:
                        return reserve(nodes, None, gpus)
                raise UserError(f"Ray has not had what the restart needs within {AGAIN_S:.0f} s: {error}") from error
            if not told:
                say(f"the restart waits up to {AGAIN_S:.0f} s for Ray to have what it needs: {error}")
                told = True
        time.sleep(LOOK_S)


def reserve(nodes: int, workers: int | None, gpus: bool | None) -> tuple[int, PlacementGroup]:
    """Reserve machines. Returns how many workers each has, and the reserved resources."""
    workers = workers or count_gpus(nodes)
    refuse_few(nodes, workers, gpus)
    bundle = {kind: float(workers) for kind in kinds(gpus)}
    group = placement_group([bundle] * nodes, strategy="STRICT_SPREAD" if nodes > 1 else "PACK")
    if group.wait(ANSWER_S):
        return workers, group
    remove_placement_group(group)
    free = ray.available_resources()
    have = joined([f"{free.get(kind, 0):.0f} {kind}s" for kind in kinds(gpus)], "and")
    raise UserError(
        f"{asked_for(nodes, workers, gpus)}, but others use them: of the whole Ray cluster {have} are free. `ray status` shows by whom"
    )


def nodes_of(group: PlacementGroup) -> list[Mapping[str, Any]]:
    """Return the machine of each bundle."""
    known = {node["NodeID"]: node for node in ray.nodes()}
    places = placement_group_table(group)["bundles_to_node_id"]
    return [known[places[index]] for index in sorted(places)]


def travelling() -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if TRAVELLING.fullmatch(name)}
    if path := found.get("PYTHONPATH"):
        found["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, path.split(os.pathsep)))
    return found


def known_to_ray() -> dict[str, str]:
    """Return the travelling variables that processes of Ray itself get. Ray records these, so tokens and keys go to workers only."""
    return {name: value for name, value in travelling().items() if not re.search("TOKEN(?!IZERS)|KEY|SECRET|PASSWORD", name)}


@contextlib.contextmanager
def marked(folder: Path) -> Iterator[str]:
    """Make a temporary file in the folder, or in the nearest existing one above it: a machine that sees the file sees the folder."""
    above = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
    try:
        with tempfile.NamedTemporaryFile(prefix=".fulltilt-seen-", dir=above) as file:
            yield file.name
    except PermissionError as error:
        raise UserError(f"run.dir: {above} cannot be written to ({error.strerror})") from error


def differences(name: str, there: MachineFacts, here: MachineFacts, shared: Shared, gpus: int) -> Iterator[str]:
    """Describe what is wrong with a machine, compared with this one. `gpus`: how many GPUs its workers need."""
    for package in {**here.versions, **there.versions}:
        theirs, ours = (each.versions.get(package) for each in (there, here))
        if theirs != ours:
            yield f"the machine {name} has {package} {theirs or 'none'}, and this one {ours or 'none'}. Install the same on all machines"
    if not there.has_folder:
        yield f"the machine {name} has no folder {os.getcwd()}, in which this run was started. Start it in a folder that all machines share"
    if not there.sees_marker:
        yield (
            f"run.dir: the machine {name} does not see what this one writes to {shared.run_folder}. Choose a folder on a file system that "
            "all machines share"
        )
    elif not there.writes_there:
        yield f"run.dir: the machine {name} cannot write to {shared.run_folder}. Give the user of the Ray workers there the right to write"
    for key, path in shared.paths.items():
        if path in here.contents and there.contents[path] is None:
            yield f"{key}: the machine {name} has no {path}. Put it on a file system that all machines share, or copy it"
        elif path in here.contents and there.contents[path] != here.contents[path]:
            yield f"{key}: {path} holds other files on the machine {name} than on this one. Copy it again"
    for key, model in shared.models.items():
        if why := there.without.get(model):
            yield (
                f"{key}: the machine {name} has not all of {model.name} at commit {model.commit} in its cache of the hub, and cannot "
                f"download it: {why}. Run `hf download {model.name} --revision {model.commit}` there, or set HF_HOME to a folder that all "
                "machines share"
            )
    if len(there.devices) < gpus:
        yield (
            f"Ray has given the workers of the machine {name} {many(len(there.devices), 'GPU')} in CUDA_VISIBLE_DEVICES, and they need "
            f"{gpus}. Unset RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES there"
        )
    yield from wrong_shared_memory(there.shared_memory, gpus, f" of the machine {name}")


def answer_of(question: Any, whose: str = "a machine", seconds: float = START_S) -> Any:
    try:
        return ray.get(question, timeout=seconds)
    except GetTimeoutError as error:
        raise UserError(f"{whose} has not answered within {START_S:.0f} s") from error
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, UserError) else UserError(f"{whose}: {first_line(error.cause)}")) from None
    except RayError as error:
        text = str(error)
        reason = next((line for line in text.splitlines() if "ModuleNotFoundError" in line), first_line(error))
        raise UserError(f"{whose}: Ray could not start what keeps the workers there: {reason.strip()}") from error


def accept(
    server: socket.socket, secret: bytes, size: int, started: Sequence[Any], on_failure: contextlib.ExitStack
) -> dict[int, socket.socket]:
    """Accept the connections of all workers. Returns them by rank."""
    found: dict[int, socket.socket] = {}
    deadline = time.monotonic() + START_S
    server.settimeout(0.25)
    while len(found) < size:
        try:
            connection, _ = server.accept()
        except TimeoutError:
            for question in ray.wait(list(started), num_returns=len(started), timeout=0)[0]:
                answer_of(question)  # raises where a keeper failed
            if time.monotonic() > deadline:
                raise UserError(f"only {len(found)} of {size} workers have connected within {START_S:.0f} s") from None
            continue
        rank = greeting(connection, secret)
        if rank is None:
            connection.close()
        else:
            found[rank] = on_failure.enter_context(connection)
    return found


def greeting(connection: socket.socket, secret: bytes) -> int | None:
    """Return the rank of a worker that connects; None if it is not a worker of this run."""
    connection.settimeout(ANSWER_S)
    with contextlib.suppress(OSError):
        received = connection.recv(GREETING.size, socket.MSG_WAITALL)
        if len(received) == GREETING.size:
            told, rank = GREETING.unpack(received)
            if hmac.compare_digest(told, secret):
                connection.settimeout(None)
                return int(rank)
    return None


# -- what a cluster has --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MachineReport:
    """A description of a cluster's machine, for people."""

    name: str
    has: str
    mistakes: tuple[str, ...]  # why a run that is started here cannot use it


@dataclass(frozen=True)
class ClusterReport:
    address: str
    has: str
    machines: tuple[MachineReport, ...]


def survey(address: str) -> ClusterReport:
    """Describe a cluster, and how each of its machines differs from this one. Starts no Ray, and reserves nothing."""
    found = address if address != "auto" else current_cluster()
    if not found:
        raise UserError("no Ray cluster runs on this machine. Run `ray start --head`, or name the machine on which one runs: HOST:PORT")
    part = join(found, 1, 1)
    try:
        nodes, free = [node for node in ray.nodes() if node["Alive"]], ray.available_resources()
        machines = tuple(report_machines(nodes))
        resources = [{kind: sum(node["Resources"].get(kind, 0) for node in nodes) for kind in ("CPU", "GPU")}, free]
        total, unused = (joined(counted(each), "and") for each in resources)
        return ClusterReport(found, f"{many(len(nodes), 'machine')} with {total}, of which {unused} are free", machines)
    finally:
        part.leave()


def counted(resources: Mapping[str, float]) -> list[str]:
    return [many(int(resources.get(kind, 0)), noun) for kind, noun in (("CPU", "core"), ("GPU", "GPU"))]


def wrong_machines(address: str, nodes: int, workers: int | None, shared: Shared, *, gpus: bool | None) -> list[str]:
    """List what is wrong with a cluster for such a run, as `Machines` would refuse it, and with all machines that are large enough, since
    the run may get any of them. Reserves nothing."""
    part = join(address, nodes, workers or 1, gpus=bool(gpus))
    try:
        workers = workers or count_gpus(nodes)
        refuse_few(nodes, workers, gpus)
        with marked(shared.run_folder) as marker:
            questions = questions_about(shared, marker)
            here = facts_of_machine(replace(questions, models=()))
            found = list(ask_machines(fitting_nodes(workers, gpus), questions))
        mistakes: list[str] = []
        for _, machine, there in found:
            if isinstance(there, UserError):
                mistakes.append(str(there))
                continue
            mistakes += differences(str(machine), there, here, shared, 0)  # a task without a GPU sees no devices
            mistakes += wrong_shared_memory(there.shared_memory, workers if gpus else 0, f" of the machine {machine}")
        return mistakes
    finally:
        part.leave()


def report_machines(nodes: Sequence[Mapping[str, Any]]) -> Iterator[MachineReport]:
    questions = Questions(os.getcwd(), "", ())
    here = facts_of_machine(questions)
    for node, machine, there in ask_machines(nodes, questions):
        has, gpus = ", ".join(counted(node["Resources"])), int(node["Resources"].get("GPU", 0))
        if isinstance(there, UserError):
            yield MachineReport(str(machine), has, (str(there),))
            continue
        mistakes = *differences(str(machine), there, here, Shared(Path(), {}), 0), *wrong_shared_memory(there.shared_memory, gpus)
        versions = ", ".join(f"{package} {version}" for package, version in there.versions.items())
        yield MachineReport(str(machine), f"{has}, {in_bytes(there.shared_memory)} free in {SHARED_MEMORY}; {versions}", mistakes)


def ask_machines(
    nodes: Sequence[Mapping[str, Any]], questions: Questions
) -> Iterator[tuple[Mapping[str, Any], Machine, MachineFacts | UserError]]:
    """Ask all machines at once, with one deadline."""
    look, deadline = ray.remote(facts_of_machine), time.monotonic() + START_S
    asked = [
        look.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            runtime_env={"env_vars": known_to_ray()},
        ).remote(questions)
        for node in nodes
    ]
    for node, question in zip(nodes, asked, strict=True):
        machine = Machine(node["NodeManagerHostname"], node["NodeManagerAddress"], None)
        try:
            yield node, machine, answer_of(question, f"the machine {machine}", max(0.0, deadline - time.monotonic()))
        except UserError as error:
            yield node, machine, error


# -- workers -------------------------------------------------------------------------------------------------------------------------------


class RayWorkers(Processes):
    """Workers on machines that were reserved for them."""

    def __init__(self, machines: Machines, orders: Sequence[Any], make: str, **options: Any) -> None:
        self.machines = machines
        super().__init__(orders, make, launcher=machines, **options)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.machines.close()
