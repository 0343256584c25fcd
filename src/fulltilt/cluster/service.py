"""One of several workers, made in a process of its own.

Enters: a `Service`, which every worker with the same roles gets, and a `Seat`: this worker's place among all. Leaves: the worker, ready for
calls, and joined with the others by torch.distributed. Guaranteed: an out-of-memory error names the settings that would help, as in one
process; functions given from Python have the names here that the configuration uses for them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import warnings
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fulltilt.algo.build import build
from fulltilt.callables import travelling
from fulltilt.cluster.address import is_joined
from fulltilt.cluster.checks import choose_device, commits_of_models, model_paths, open_address, require_ray
from fulltilt.cluster.hosts import Place
from fulltilt.cluster.keeper import HubModel
from fulltilt.cluster.making import WorkerOrder, be_deterministic, load_worker
from fulltilt.cluster.processes import Processes
from fulltilt.cluster.teams import join_team, teams_of
from fulltilt.cluster.worker import Worker, enough_memory
from fulltilt.commits import at_commits
from fulltilt.parallel.parcels import Parcels
from fulltilt.records import RunWarning, UserError
from fulltilt.schema import Config, rewards_named
from fulltilt.settings import own_functions
from fulltilt.training.checkpoint import Checkpoint
from fulltilt.user_code import FROM_PYTHON, UserCode, UserCodeError, imported_files, known_functions, locate

SERVE = "fulltilt.cluster.service:serve"
UNTIL_THE_END = contextlib.ExitStack()  # holds what a worker's process needs until it ends


@dataclass(frozen=True, eq=False)
class Service:
    """Everything that workers with the same roles have in common. It is pickled once for all of them: it may take megabytes, the tokenizer
    alone does, and there may be a thousand workers."""

    order: WorkerOrder
    size: int
    address: tuple[str, int]  # host and port of the store through which workers find one another
    deadline_s: float  # the longest that a collective may take
    nodes: int = 1  # number of machines with workers
    sharing: int = 1  # most workers on one device: all workers choose their backend and their memory by it
    functions: Mapping[str, UserCode] = field(default_factory=dict)  # functions given from Python, by name
    teams: tuple[range, ...] = ()  # by team: ranks of the workers with the same roles


@dataclass(frozen=True)
class Seat:
    rank: int
    device: str  # its name in torch
    beside: int = 1  # workers on the same machine, this one included


class ServedWorker:
    """A worker whose out-of-memory errors name the settings that would help in its current phase."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._worker, name)

        @functools.wraps(method)
        def call(*args: Any, **wanted: Any) -> Generator[Any, None, Any]:
            with enough_memory(self._worker.phase, f" on worker {self._worker.ranks.number}"):
                outcome = method(*args, **wanted)
                return (yield from outcome) if isinstance(outcome, Generator) else outcome

        return call


def serve(service: Service, seat: Seat) -> Generator[str, None, ServedWorker]:
    """Make the worker. Yielded items show the driver that loading makes progress."""
    config, device = service.order.config, torch.device(seat.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if config.run.deterministic and device.type == "cuda":
        be_deterministic()
    UNTIL_THE_END.enter_context(known_functions(service.functions))
    UNTIL_THE_END.enter_context(at_commits(service.order.commits))
    host, port = service.address
    deadline = timedelta(seconds=service.deadline_s)
    store = dist.TCPStore(host, port, service.size, is_master=False, timeout=deadline)
    backend = "nccl" if device.type == "cuda" and service.sharing == 1 else "gloo"  # NCCL refuses several workers on one GPU
    dist.init_process_group(backend, store=store, rank=seat.rank, world_size=service.size, timeout=deadline)
    yield "joined"
    with enough_memory("set-up", f" on worker {seat.rank}"):
        shared = {"beside": seat.beside, "sharing": service.sharing}
        ranks = join_team(seat.rank, service.teams, dist.group.WORLD, **shared, deadline=deadline)
        parcels = None
        if service.nodes > 1:  # samples stay on the machine that drew them
            # A separate group: rows are sent while the others compute.
            parcels = Parcels(seat.rank, service.size, dist.new_group(backend="gloo", timeout=deadline), ranks.moved)
        worker = load_worker(service.order, build(config), device, ranks, parcels)
    return ServedWorker(worker)


def tell(text: str) -> None:
    warnings.warn(text, RunWarning, stacklevel=2)


def start_processes(order: WorkerOrder, device: torch.device, size: int) -> Processes:
    """Start one process on this machine for each worker."""
    seats, options = seats_here(order, device, size)
    return Processes(seats, SERVE, environment=own_interface(), **options)


def seats_here(order: WorkerOrder, device: torch.device, size: int) -> tuple[list[Seat], dict[str, Any]]:
    """Return the seats of workers on this machine, and the settings of their host."""
    gpus = [f"cuda:{rank % torch.cuda.device_count()}" if device.type == "cuda" else "" for rank in range(size)]
    return seats_of(order, "127.0.0.1", [Place("", gpu, gpu or "cpu") for gpu in gpus])


def own_interface() -> dict[str, str]:
    """Return variables that make workers of one machine talk over its loopback interface, whatever its name resolves to."""
    return {} if "GLOO_SOCKET_IFNAME" in os.environ else {"GLOO_SOCKET_IFNAME": "lo"}


def start_on_ray(order: WorkerOrder, device: torch.device, paths: Mapping[str, str]) -> Processes:
    """Start workers on the machines of a Ray cluster. `paths`: settings that name what workers read, with their values."""
    require_ray()
    from fulltilt.cluster.ray import Machines, RayWorkers

    asked = asked_of_cluster(order.config, device, paths, order.commits, order.resume)
    machines = Machines(**asked, before=order.before, say=tell)
    try:
        if note := unused_machines(order.config, machines.in_cluster):
            tell(note)
        seats, options = seats_of(order, machines.ip, machines.places)
        return RayWorkers(machines, seats, SERVE, **options)
    except BaseException:
        machines.close()
        raise


def unused_machines(config: Config, machines: int) -> str | None:
    """Return a note for a run that has a cluster's address but does not set how many of its machines to use; None if it needs none."""
    if machines == 1 or "nodes" in config.cluster.model_fields_set:
        return None
    used = f"the run uses 1 of the {machines} machines of the Ray cluster"
    return f"cluster.nodes is not set: {used}. Set cluster.nodes = {machines} to use them all, or 1"


def asked_of_cluster(
    config: Config, device: torch.device, paths: Mapping[str, str], commits: Mapping[str, str], resume: Checkpoint | None = None
) -> dict[str, Any]:
    """Return what a run requires of a cluster's machines, as the arguments of `Machines`."""
    from fulltilt.cluster.ray import Shared

    settings = config.cluster
    models = {key: HubModel(path, commits[path]) for key, path in paths.items() if path in commits}
    folders = {key: path for key, path in paths.items() if key not in models}
    read = {**folders, **files_of_functions(config), **({"the checkpoint": str(resume.path)} if resume else {})}
    return {
        "address": settings.address,
        "nodes": settings.nodes,
        "workers": settings.workers if settings.workers != "auto" else None if device.type == "cuda" else 1,
        "shared": Shared(Path(config.run.dir), read, models),
        "gpus": device.type == "cuda" or (None if config.run.device == "auto" else False),
    }


def wrong_cluster(config: Config) -> list[str]:
    """List what is wrong with the cluster of a run that is only checked: its address, and the machines that answer there."""
    if config.cluster.address is None:
        return []
    try:
        device = choose_device(config.run.device)
        if not (is_joined() or open_address(config, device.type)):
            return []  # the run starts its own Ray
        from fulltilt.cluster.ray import wrong_machines

        paths = model_paths(config, build(config))
        return wrong_machines(**asked_of_cluster(config, device, paths, commits_of_models(config, paths)))
    except UserError as error:
        return [str(error)]


def files_of_functions(config: Config) -> dict[str, str]:
    """Return the files of the user's functions and the files that these import, by name. Every machine reads them for itself."""
    codes = {f"algorithm.{key}": function.code for key, function in own_functions(config).items()}
    for name in rewards_named(config.reward.function, config.reward.sources):
        with contextlib.suppress(UserCodeError):  # a function of fulltilt's own
            codes[f"the reward {name}"] = locate(name)
    codes = {what: code for what, code in codes.items() if code.path and code.given is None}
    imported = {
        f"{what}, which imports {name}": str(Path(code.path).parent / name) for what, code in codes.items() for name in imported_files(code)
    }
    return {**{what: code.path for what, code in codes.items()}, **imported}


def open_store(host: str, workers: int) -> dist.TCPStore:
    """Open the store through which workers find one another. It listens at this address only, because it asks nobody for a secret; by
    default torch would listen at all addresses of the machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=workers) as server:
        try:
            place = {"port": server.getsockname()[1], "master_listen_fd": server.fileno()}
            store = dist.TCPStore(host, is_master=True, wait_for_workers=False, **place)
        except TypeError:  # a version of torch without this argument
            return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        server.detach()  # the store closes it
        return store


def seats_of(order: WorkerOrder, host: str, places: Sequence[Place]) -> tuple[list[Seat], dict[str, Any]]:
    """Return the seats of the workers, and the settings of their host. `host`: this machine's address for the workers."""
    settings = order.config.cluster
    store = open_store(host, len(places))
    codes = [function.code for function in own_functions(order.config).values()]
    nodes = len({place.node for place in places})
    if nodes > 1:  # on several machines, workers have their own reward processes
        rewards = rewards_named(order.config.reward.function, order.config.reward.sources)
        codes += [locate(name) for name in rewards if name.startswith(FROM_PYTHON)]
    functions = {code.name: travelling(code) for code in codes if code.given}
    teams = teams_of(order, len(places))
    crowds, beside = Counter((place.machine, place.gpu) for place in places), Counter(place.machine for place in places)
    services = [
        Service(
            order=team.order,
            size=len(places),
            address=(host, store.port),
            deadline_s=settings.deadline_s,
            nodes=nodes,
            sharing=max(crowds.values()),
            functions=functions,
            teams=tuple(each.ranks for each in teams),
        )
        for team in teams
    ]
    seats = [Seat(rank, place.device, beside[place.machine]) for rank, place in enumerate(places)]
    of_ranks = [place for place, team in enumerate(teams) for _ in team.ranks]  # teams are in order of rank
    labels, common = [teams[place].label for place in of_ranks], [services[place] for place in of_ranks]
    options = {"on_stall": tell, "stall_s": settings.stall_s, "deadline_s": settings.deadline_s, "kept": store, "labels": labels}
    return seats, {**options, "common": common}
