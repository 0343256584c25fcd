"""A worker of several, made in a process of its own.

Enters: a `Service`: the order that every worker with the same roles gets, and this worker's place among all. Leaves: the worker, joined
with the others by torch.distributed, as calls reach it. Guaranteed: an out-of-memory error names the settings that would help, as in one
process; functions from Python are known here under the names that the configuration has for them.
"""

from __future__ import annotations

import contextlib
import functools
import os
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
from fulltilt.cluster.checks import require_ray
from fulltilt.cluster.hosts import Place
from fulltilt.cluster.making import WorkerOrder, be_deterministic, load_worker
from fulltilt.cluster.processes import Processes
from fulltilt.cluster.teams import join_team, teams_of
from fulltilt.cluster.worker import Worker, enough_memory
from fulltilt.parallel.parcels import Parcels
from fulltilt.records import RunWarning
from fulltilt.schema import Config, rewards_named
from fulltilt.settings import own_functions
from fulltilt.user_code import FROM_PYTHON, UserCode, UserCodeError, known_functions, locate

SERVE = "fulltilt.cluster.service:serve"
UNTIL_THE_END = contextlib.ExitStack()  # what a worker's process keeps until it ends


@dataclass(frozen=True, eq=False)
class Service:
    order: WorkerOrder
    rank: int
    size: int
    device: str  # as torch names it
    address: tuple[str, int]  # host and port of the store through which workers find one another
    deadline_s: float  # after which a collective is given up
    nodes: int = 1  # on which the workers are
    beside: int = 1  # workers on the same machine, this one included
    sharing: int = 1  # workers on the device that has the most: all choose their backend and their memory by it
    functions: Mapping[str, UserCode] = field(default_factory=dict)  # those from Python
    teams: tuple[range, ...] = ()  # the ranks of workers with the same roles


class ServedWorker:
    """A worker whose out-of-memory errors name the settings that would help in the phase it is in."""

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


def serve(service: Service) -> Generator[str, None, ServedWorker]:
    """What is yielded tells the driver that loading makes progress."""
    config, device = service.order.config, torch.device(service.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if config.run.deterministic and device.type == "cuda":
        be_deterministic()
    UNTIL_THE_END.enter_context(known_functions(service.functions))
    host, port = service.address
    deadline = timedelta(seconds=service.deadline_s)
    store = dist.TCPStore(host, port, service.size, is_master=False, timeout=deadline)
    backend = "nccl" if device.type == "cuda" and service.sharing == 1 else "gloo"  # NCCL refuses several workers on one GPU
    dist.init_process_group(backend, store=store, rank=service.rank, world_size=service.size, timeout=deadline)
    yield "joined"
    with enough_memory("set-up", f" on worker {service.rank}"):
        shared = {"beside": service.beside, "sharing": service.sharing}
        ranks = join_team(service.rank, service.teams, dist.group.WORLD, **shared, deadline=deadline)
        parcels = None
        if service.nodes > 1:  # samples stay where they are
            # A group of its own: rows are sent while the others compute.
            parcels = Parcels(service.rank, service.size, dist.new_group(backend="gloo", timeout=deadline), ranks.moved)
        worker = load_worker(service.order, build(config), device, ranks, parcels)
    return ServedWorker(worker)


def report_stall(text: str) -> None:
    warnings.warn(text, RunWarning, stacklevel=2)


def start_processes(order: WorkerOrder, device: torch.device, size: int) -> Processes:
    """One process for each worker, on this machine."""
    services, options = services_here(order, device, size)
    return Processes(services, SERVE, environment=own_interface(), **options)


def services_here(order: WorkerOrder, device: torch.device, size: int) -> tuple[list[Service], dict[str, Any]]:
    """What each worker of this machine is made from, and the settings of their host."""
    gpus = [f"cuda:{rank % torch.cuda.device_count()}" if device.type == "cuda" else "" for rank in range(size)]
    return services_of(order, "127.0.0.1", [Place("", gpu, gpu or "cpu") for gpu in gpus])


def own_interface() -> dict[str, str]:
    """Variables with which workers of one machine talk over its own interface, whatever its name resolves to."""
    return {} if "GLOO_SOCKET_IFNAME" in os.environ else {"GLOO_SOCKET_IFNAME": "lo"}


def start_on_ray(order: WorkerOrder, device: torch.device, paths: Mapping[str, str]) -> Processes:
    """Workers on the machines of a Ray cluster. `paths`: the keys and values of settings that name what workers read."""
    require_ray()
    from fulltilt.cluster.ray import Machines, RayWorkers, Shared

    config, settings = order.config, order.config.cluster
    assert settings.address is not None
    workers = settings.workers if settings.workers != "auto" else None if device.type == "cuda" else 1
    read = {**paths, **files_of_functions(config), **({"the checkpoint": str(order.resume.path)} if order.resume else {})}
    gpus = device.type == "cuda" or (None if config.run.device == "auto" else False)
    machines = Machines(settings.address, settings.nodes, workers, Shared(Path(config.run.dir), read), gpus=gpus)
    try:
        services, options = services_of(order, machines.ip, machines.places)
        return RayWorkers(machines, services, SERVE, **options)
    except BaseException:
        machines.close()
        raise


def files_of_functions(config: Config) -> dict[str, str]:
    """The files of the user's functions, which every machine reads for itself, by what names them."""
    codes = {f"algorithm.{key}": function.code for key, function in own_functions(config).items()}
    for name in rewards_named(config.reward.function, config.reward.sources):
        with contextlib.suppress(UserCodeError):  # one of fulltilt's own
            codes[f"the reward {name}"] = locate(name)
    return {what: code.path for what, code in codes.items() if code.path and code.given is None}


def services_of(order: WorkerOrder, host: str, places: Sequence[Place]) -> tuple[list[Service], dict[str, Any]]:
    """What each worker is made from, and the settings of their host. `host`: this machine, as the workers reach it."""
    settings = order.config.cluster
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    codes = [function.code for function in own_functions(order.config).values()]
    nodes = len({place.node for place in places})
    if nodes > 1:  # there, workers have reward processes of their own
        rewards = rewards_named(order.config.reward.function, order.config.reward.sources)
        codes += [locate(name) for name in rewards if name.startswith(FROM_PYTHON)]
    functions = {code.name: travelling(code) for code in codes if code.given}
    teams = teams_of(order, len(places))
    team_of = {rank: team for team in teams for rank in team.ranks}
    crowds = Counter((place.machine, place.gpu) for place in places)
    services = [
        Service(
            order=team_of[rank].order,
            rank=rank,
            size=len(places),
            device=place.device,
            address=(host, store.port),
            deadline_s=settings.deadline_s,
            nodes=nodes,
            beside=sum(each.machine == place.machine for each in places),
            sharing=max(crowds.values()),
            functions=functions,
            teams=tuple(team.ranks for team in teams),
        )
        for rank, place in enumerate(places)
    ]
    labels = [team_of[rank].label for rank in range(len(places))]
    options = {"on_stall": report_stall, "stall_s": settings.stall_s, "deadline_s": settings.deadline_s, "kept": store, "labels": labels}
    return services, options
