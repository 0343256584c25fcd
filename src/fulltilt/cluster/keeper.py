"""The keeper of one machine's workers, for a driver on another machine: an object whose methods the driver calls.

Enters: questions about the machine, then the ranks of its workers and the driver's address. Leaves: facts about the machine, and a process
for each rank, connected with the driver. Guaranteed: no method takes long, however many workers there are, and no worker outlives its
keeper's process. Imports no torch, whose version is one of the questions, and does not know how the driver reaches it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import struct
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import fulltilt
from fulltilt.cluster.child import Child, Obituary, stacks_of, start_child, wait_for_ends
from fulltilt.folders import SAMPLES, content_digest
from fulltilt.records import UserError
from fulltilt.words import first_line, in_bytes

CONNECT_S = 10.0
GREETING = struct.Struct("<32sI")  # format of a greeting: a secret that only workers of this run know, and the rank
SHARED_MEMORY = Path("/dev/shm")
# Packages whose version decides what a run computes, if installed: models, adapters, kernels, rewards, and readers of their files.
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "peft", "triton", "liger-kernel", "math-verify")
NCCL_BYTES = 32 * 2**20  # shared memory for each worker that has a GPU
OBJECT_STORE = 80 * 2**20  # for each machine of a Ray that is started here: the least that Ray accepts, since nothing large goes through it
ENLARGE = "Enlarge it (docker run --shm-size=1g)"
CONFIG = "config.json"
SHARE_DEVICES = "FULLTILT_SHARE_DEVICES"  # the environment variable that allows several workers on one GPU or core, for tests
SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class HubModel:
    name: str
    commit: str


@dataclass(frozen=True)
class Questions:
    """Requirements for every machine of a run."""

    folder: str  # the driver's working folder, where relative paths begin
    marker: str  # a file that the driver has written where the run's folder will be; empty: no such file
    paths: tuple[str, ...]  # paths that the workers read
    models: tuple[HubModel, ...] = ()  # models on the hub that the workers read


@dataclass(frozen=True)
class MachineFacts:
    pid: int  # the keeper's process
    versions: Mapping[str, str]
    devices: tuple[str, ...]  # the GPUs for these workers
    shared_memory: int  # free bytes; sys.maxsize where there is no such file system
    has_folder: bool
    sees_marker: bool
    writes_there: bool  # whether files can be written next to the marker
    contents: Mapping[str, Mapping[str, str] | None]  # by path: names and digests of its files; None: the path does not exist
    without: Mapping[HubModel, str]  # models that workers here would not find, with the reason


@dataclass(frozen=True)
class SignsOfLife:
    """Signs that a worker's process gives without being asked."""

    ended: bool = False
    active: bool = True  # as in `Child.is_active`; True if that was not asked


def facts_of_machine(questions: Questions) -> MachineFacts:
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    within = {path: os.path.join(questions.folder, path) for path in questions.paths}
    return MachineFacts(
        pid=os.getpid(),
        versions=versions(),
        devices=tuple(devices.split(",")) if devices else (),
        shared_memory=free_shared_memory(),
        has_folder=os.path.isdir(questions.folder),
        sees_marker=not questions.marker or os.path.exists(questions.marker),
        writes_there=not questions.marker or can_write(Path(questions.marker).parent),
        contents={path: contents(Path(place)) for path, place in within.items()},
        without={model: why for model in questions.models if (why := why_not_found(model))},
    )


def can_write(folder: Path) -> bool:
    """Return whether files can be written in a folder, by writing one: permissions do not tell what another machine's file system
    allows."""
    try:
        with tempfile.TemporaryFile(prefix=".fulltilt-written-", dir=folder) as file:
            file.write(b"x")
    except OSError:
        return False
    return True


def may_share_devices() -> bool:
    return os.environ.get(SHARE_DEVICES) == "1"


def free_shared_memory() -> int:
    """Return the free bytes of shared memory; the largest integer where there is no such file system."""
    return shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else sys.maxsize


def wrong_shared_memory(free: int, gpus: int, of_machine: str = "") -> Iterator[str]:
    """Refuse a machine on which NCCL would fail: where one GPU cannot read another's memory, workers of a machine exchange tensors through
    segments of shared memory, unless the user has turned that off. `gpus`: the machine's workers that have a GPU each."""
    if gpus > 1 and free < NCCL_BYTES * gpus and os.environ.get("NCCL_SHM_DISABLE") != "1":
        has, need = in_bytes(free), in_bytes(NCCL_BYTES * gpus)
        yield f"{SHARED_MEMORY}{of_machine} has {has} free, and {gpus} workers need {need}. {ENLARGE}, or set NCCL_SHM_DISABLE=1"


def contents(path: Path) -> dict[str, str] | None:
    """Return the names of a folder's files, or of the file, with digests of their contents: weights of two models often have the same
    size."""
    if not path.exists():
        return None
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return {file.name: content_digest(file, SAMPLES) for file in files if file.is_file() and not file.name.startswith(".")}


def why_not_found(model: HubModel) -> str:
    """Return why workers of this machine would find no weights of a model on the hub, neither in the cache nor on the hub; empty if they
    will."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError

    if has_weights(Path(constants.HF_HUB_CACHE, f"models--{model.name.replace('/', '--')}", "snapshots", model.commit)):
        return ""
    try:
        address = hf_hub_url(model.name, CONFIG, revision=model.commit, endpoint=os.environ.get("HF_ENDPOINT") or None)
        get_hf_file_metadata(address, timeout=CONNECT_S)
    except RevisionNotFoundError:
        return "the hub has no such commit"
    except HfHubHTTPError as error:
        # The hub answers: workers have a token for models with limited access, and this process has none.
        return "" if error.response.status_code < 500 else first_line(error)
    except Exception as error:  # any error of the hub's client, where there is no network or it may not be used
        return first_line(error)
    return ""


def is_complete(index: Path) -> bool:
    """Return whether all files exist that an index of weights names."""
    try:
        return all((index.parent / name).exists() for name in set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError):
        return False


def has_weights(folder: Path) -> bool:
    """Return whether a model's folder has its configuration and all files of its weights."""
    if not (folder / CONFIG).exists():
        return False
    if indexes := list(folder.glob("*.index.json")):  # perhaps one for each format, and one complete format is enough
        return any(is_complete(index) for index in indexes)
    return any(file.exists() for end in ("safetensors", "bin") for file in folder.glob(f"*.{end}"))


def versions() -> dict[str, str]:
    found = {"Python": ".".join(map(str, sys.version_info[:3])), "fulltilt": f"{fulltilt.__version__} ({digest_of_source()})"}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def digest_of_source() -> str:
    """Return a digest of this package's source: two copies with the same version may still differ."""
    root = Path(fulltilt.__file__).parent
    total = 0
    for file in sorted(root.rglob("*.py")):
        total = zlib.crc32(file.read_bytes(), zlib.crc32(str(file.relative_to(root)).encode(), total))
    return f"{total:08x}"


class WorkerKeeper:
    def __init__(self) -> None:
        self._children: list[Child] = []

    def look(self, questions: Questions) -> MachineFacts:
        return facts_of_machine(questions)

    def launch(
        self, ranks: Sequence[int], own_ip: str, driver: tuple[str, int], secret: bytes, environment: Mapping[str, str], folder: str
    ) -> list[int]:
        """Start the workers of these ranks. Returns their process ids."""
        if "OMP_NUM_THREADS" not in environment:  # this process has the variable, and the workers must not
            os.environ.pop("OMP_NUM_THREADS", None)
        variables = {**interface_variables(own_ip), **environment}
        for rank in ranks:
            try:
                connection = socket.create_connection(driver, CONNECT_S)
            except OSError as error:
                raise UserError(
                    f"the machine {socket.gethostname()} ({own_ip}) cannot reach this one at {driver[0]}, port {driver[1]}: {error}. "
                    "Workers connect with the driver, and with one another, on ports that the system chooses: let the network pass them"
                ) from error
            connection.settimeout(None)
            connection.sendall(GREETING.pack(secret, rank))
            self._children.append(start_child(rank, variables, connection, folder))
        return [child.pid for child in self._children]

    def signs(self, activity: bool = False) -> list[SignsOfLife]:
        """Return the signs of life of each worker; with `activity`, also whether it is active, which takes a look at each of its
        threads."""
        return [SignsOfLife(child.ended(), not activity or child.is_active()) for child in self._children]

    def kill(self, index: int) -> None:
        self._children[index].kill()

    def wait(self, seconds: float) -> None:
        wait_for_ends(self._children, seconds)

    def obituary(self, index: int) -> Obituary:
        return self._children[index].obituary()

    def stacks(self, indices: Sequence[int], seconds: float) -> dict[int, str]:
        return stacks_of({index: self._children[index] for index in indices}, seconds)


def interface_variables(ip: str) -> dict[str, str]:
    """Return variables that make Gloo use this address's interface. By default it uses the interface of the machine's name, which other
    machines often cannot reach."""
    name = interface_of(ip)
    return {"GLOO_SOCKET_IFNAME": name} if name and "GLOO_SOCKET_IFNAME" not in os.environ else {}


def interface_of(ip: str) -> str | None:
    """Return the network interface that has this address, if the system tells."""
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no such address
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == ip:
                    return name
    return None
