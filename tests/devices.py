"""Real workers in processes that stay, so that tests of several workers pay for the imports of a process once.

A `Pool` starts four processes, which join torch.distributed with gloo. For each run, the first one to four of them make real workers
by the code that a run uses, and drop them afterwards. The driver's side, from the configuration to the files of the run, is in the process
of the test. Workers note the gradient of every optimizer step, as it is before it is clipped and applied.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import os
import signal
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import runs
import torch
import torch.distributed as dist

from fulltilt.algo.build import build
from fulltilt.cluster import assembly, sizes
from fulltilt.cluster.assembly import RunParts
from fulltilt.cluster.faults import install
from fulltilt.cluster.hosts import Inbox, WorkerError, produced
from fulltilt.cluster.making import WorkerOrder, load_worker
from fulltilt.cluster.processes import ProcessCall, Processes
from fulltilt.cluster.service import ServedWorker, tell
from fulltilt.cluster.sharing import ModelSharer
from fulltilt.cluster.teams import join_team, teams_of
from fulltilt.cluster.worker import Worker
from fulltilt.memory.offload import absent
from fulltilt.model.arrays import local
from fulltilt.parallel import apply
from fulltilt.parallel.apply import Shards
from fulltilt.parallel.cuts import CutTensor
from fulltilt.parallel.parcels import Parcels
from fulltilt.parallel.parts import RolloutCopy
from fulltilt.parallel.slices import join, take_part
from fulltilt.proofs.pool import TeamCall

SIZE = 4
CPU = torch.device("cpu")

Pieces = dict[str, tuple[int, np.ndarray]]  # by name: place of the first number, and numbers
Whole = dict[str, np.ndarray]


# -- in a process of the pool, or in that of the test for a single worker ------------------------------------------------------------------


class Notes:
    """What tests want to know of a worker, beside what it answers to the driver."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.gradients: dict[str, list[Pieces]] = {role: [] for role in worker.trainers}
        self.restored, self.loaded = self.states(), self.parameters()
        for role, trainer in worker.trainers.items():
            note_gradients(trainer.optimizer, self.gradients[role])

    def states(self) -> dict[str, np.ndarray]:
        """A copy of all that a checkpoint would hold."""
        return {name: as_array(tensor) for name, tensor in self.worker._tensors().items()}

    def parameters(self, role: str = "actor") -> Pieces:
        """Those that this worker has, which are all, or its rows of each."""
        if role not in self.worker.roles:
            return {}
        self.worker.residents.need(role)
        model: Any = self.worker.roles[role].model  # type: ignore[attr-defined]
        parameters = dict(model.named_parameters())
        if shards := self.shards_of(model):
            return {
                name: (shards.layout([name]).own(name, shards.group_of(name).rank).start, as_array(local(own)).reshape(-1))
                for name, own in parameters.items()
                if local(own).numel()
            }
        return {name: (0, as_array(own).reshape(-1)) for name, own in parameters.items()}

    def shards_of(self, model: Any) -> Shards | None:
        return next((shards for shards in self.worker.shards if shards.model is model), None)

    def digest(self) -> str:
        """Of all that replicas have in common: parameters, and where these are shared out, the moments that lie beside them."""
        found = hashlib.sha256()
        for role, trainer in sorted(self.worker.trainers.items()):
            pieces, states = self.parameters(role), trainer.optimizer
            if self.shards_of(trainer.role.model):  # type: ignore[attr-defined]
                for entry in states._entries:
                    start = states._held.own[entry.name].start
                    pieces |= {f"{kind}/{entry.name}": (start, as_array(states._states.home(entry, kind))) for kind in entry.kinds}
            for name, (start, numbers) in pieces.items():
                found.update(f"{name}@{start}".encode())
                found.update(np.ascontiguousarray(numbers).tobytes())
        return found.hexdigest()

    def group(self) -> list[int]:
        """The workers, this one among them, that have every parameter once, or every one of the same part of a model."""
        own = self.worker.ranks.number
        if not self.worker.shards:
            return [own]
        actors = self.shards_of(self.worker.actor.model) if "actor" in self.worker.roles else None
        group = (actors or self.worker.shards[0]).sharing.group
        return [own + (rank - group.rank) * group.step for rank in range(group.size)]

    def copies(self) -> dict[str, int]:
        """By role that learns: groups that share the parameters out, each among its own workers."""
        shards = {role: self.shards_of(each.role.model) for role, each in self.worker.trainers.items()}  # type: ignore[attr-defined]
        return {role: own.sharing.everyone.size // own.sharing.group.size if own else 1 for role, own in shards.items()}

    def parts(self) -> Parts:
        """Which part of each role's model this worker has."""
        found: dict[str, Any] = {role: own for role, each in self.worker.trainers.items() if (own := each.optimizer._divided)}
        cuts = {role: {name: own.part.cut(name) for name in own.part.whole} for role, own in found.items()}
        ranks = {"actor": self.worker.actor.tensor.rank if "actor" in self.worker.roles else 0}
        ranks |= {role: own.part.ranks.rank for role, own in found.items()}
        return Parts(ranks, cuts, frozenset(role for role, own in found.items() if own.replicas))

    def sampled_from(self) -> Whole | None:
        """The whole actor, or part of it, that a rollout engine has beside the shards; None where there is none with the latest weights, or
        one that is divided in another way than layers are."""
        twin = self.worker.twin
        if isinstance(twin, RolloutCopy) and (twin.target or not self.parts().apart):
            return None
        return {name: as_array(own).reshape(-1) for name, own in twin.model.named_parameters()} if twin and twin.current else None

    def skipped(self) -> dict[str, int]:
        return {role: trainer.optimizer.skipped for role, trainer in self.worker.trainers.items()}

    def held(self) -> dict[str, int]:
        """Bytes of each kind, by the worker's account, without buffers."""
        models = {id(role.model): role.model for role in self.worker.roles.values()}  # type: ignore[attr-defined]
        buffers = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for own in models.values() for each in own.buffers()}
        found = dict(self.worker.account.held().device)
        return {**found, "parameters": found["parameters"] - sum(buffers.values())}

    def away(self) -> set[str]:
        """Roles whose parameters are on the host."""
        models: dict[str, Any] = {name: role.model for name, role in self.worker.roles.items()}  # type: ignore[attr-defined]
        return {name for name, model in models.items() if any(map(absent, model.parameters()))}

    def threads(self) -> int:
        return torch.get_num_threads()

    def moved(self) -> dict[str, int]:
        return dict(+self.worker.ranks.moved)  # without kinds that it had no use for

    def shift(self, numbers: float) -> None:
        """Change one of the actor's parameters."""
        with torch.no_grad():
            next(iter(self.worker.actor.model.parameters())).add_(numbers)

    def hold(self, gate: str) -> None:
        """Have the engine wait before every batch of steps until there is such a file."""
        decoder: Any = self.worker.engine.decoder  # type: ignore[union-attr]
        launch = decoder.launch

        def late(steps: int) -> Any:
            while not os.path.exists(gate):
                time.sleep(0.01)
            return launch(steps)

        decoder.launch = late


@dataclass(frozen=True)
class Parts:
    """Which part of each role's model a worker has."""

    ranks: dict[str, int]  # by role
    cuts: dict[str, dict[str, CutTensor]]  # by role
    apart: frozenset[str] = frozenset()  # roles of which only some parameters are in parts, and all workers share out the others

    def rank(self, role: str) -> int:
        return self.ranks.get(role, 0)

    def size(self, role: str) -> int:
        return max((cut.size for cut in self.cuts.get(role, {}).values()), default=1)

    @property
    def largest(self) -> str:
        """The role of which most members have parts."""
        return max(self.cuts, key=self.size, default="actor")

    def joined(self, role: str, parts: Sequence[Whole]) -> Whole:
        """The whole of what the members have parts of, flat."""
        found: Whole = {}
        for name in parts[0]:
            own = self.cuts[role][name]
            shaped = [torch.from_numpy(each[name]).view(own.cut.shape(own.shape, rank)) for rank, each in enumerate(parts)]
            found[name] = join(own.cut, shaped).reshape(-1).numpy()
            for rank, part in enumerate(shaped):
                assert torch.equal(take_part(own.cut, torch.from_numpy(found[name]).view(own.shape), rank), part), f"{name} differs"
        return found

    def undivided(self, role: str, each: Sequence[Whole], rank: int) -> Whole:
        """The whole of what worker `rank` and the other members of its group have parts of."""
        if role not in self.cuts:
            return each[rank]
        first = rank - self.rank(role)
        return self.joined(role, each[first : first + self.size(role)])


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """A copy; bfloat16, which numpy does not have, as float32."""
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).clone().numpy()


def rounded(numbers: np.ndarray) -> np.ndarray:
    """To bfloat16, as float32."""
    return as_array(torch.from_numpy(numbers).bfloat16())


def note_gradients(optimizer: Any, steps: list[Pieces]) -> None:
    reduced: Callable[[], dict[str, torch.Tensor]] = optimizer._held.reduced
    own = optimizer._held.own

    def noting() -> dict[str, torch.Tensor]:
        found = reduced()
        steps.append({name: (own[name].start, as_array(numbers)) for name, numbers in found.items()})
        return found

    optimizer._held.reduced = noting


@dataclass(frozen=True)
class Seat:
    rank: int
    size: int
    port: int


def make(seat: Seat) -> Member:
    store = dist.TCPStore("127.0.0.1", seat.port, seat.size, is_master=False, timeout=timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.size, timeout=timedelta(seconds=120))
    groups, post = ({size: dist.new_group(list(range(size))) for size in range(1, seat.size + 1)} for _ in range(2))
    return Member(seat.rank, groups, post)


class NoGroup:
    """Has a place in torch's table of names, as a group would."""

    def shutdown(self) -> None:
        """As torch asks of every group at the end."""


def even_out_groups() -> None:
    """torch names a group that only its members make after its ranks and the length of its table of names. In a run's workers all tables
    are as long; the pool's processes have been in runs of different sizes."""
    names: dict[Any, str] = dist.distributed_c10d._world.pg_names  # type: ignore[assignment]
    most = torch.tensor(len(names))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    while len(names) < most:
        names[NoGroup()] = ""


def leave_groups(kept: Collection[Any]) -> None:
    """Leave all groups but these. Each has three threads, one of which wakes a hundred times a second: those of all tests would take a good
    part of the cores. Their places stay in the table of names, since a name that came again would lead to the ports of the group before."""
    world = dist.distributed_c10d._world
    names: dict[Any, str] = world.pg_names  # type: ignore[assignment]
    for group in [group for group in world.pg_map if group not in kept]:
        dist.destroy_process_group(group)
        names[NoGroup()] = ""


class Member:
    """A process of the pool, with the worker that it has now if any."""

    def __init__(self, rank: int, groups: Mapping[int, Any], post: Mapping[int, Any]) -> None:
        self.rank, self.groups, self.post = rank, groups, post  # groups by their sizes; `post`: for parcels
        self.worker: ServedWorker | None = None
        self.notes: Notes | None = None
        self.guests: dict[str, Any] = {}  # workers of other kinds, by the function that makes them; they stay, and so do their groups
        self.kept = {*dist.distributed_c10d._world.pg_map}

    def form(self, order: WorkerOrder, size: int, folder: str, apart: bool) -> None:
        """Make the worker, together with those of the other `size` - 1 processes, in the current folder of the driver. `apart`: as if each
        had a machine of its own."""
        os.chdir(folder)
        self.worker = self.notes = None
        gc.collect()
        leave_groups(self.kept)
        torch.backends.mkldnn.set_flags(True)  # torch turns it off where it has no kernel for a dtype: the next run would round differently
        even_out_groups()
        teams = teams_of(order, size)
        ranks = join_team(self.rank, [team.ranks for team in teams], self.groups[size], beside=size)
        own = next((place for place, team in enumerate(teams) if self.rank in team.ranks), None)
        if own is not None:
            parcels = Parcels(self.rank, size, self.post[size], ranks.moved) if apart else None
            made = load_worker(teams[own].order, build(order.config), CPU, ranks, parcels)
            self.worker, self.notes = ServedWorker(made), Notes(made)

    def call(self, method: str, args: tuple[Any, ...], inbox: Inbox) -> Any:
        return produced(getattr(self.worker, method), args, inbox)

    def call_guest(self, make: str, method: str, args: tuple[Any, ...], inbox: Inbox) -> Generator[Any, None, Any]:
        before = {*dist.distributed_c10d._world.pg_map}
        if make not in self.guests:
            module, _, function = make.partition(":")
            self.guests[make] = getattr(importlib.import_module(module), function)(self)
        even_out_groups()
        try:
            return (yield from produced(getattr(self.guests[make], method), args, inbox))
        finally:
            self.kept |= {*dist.distributed_c10d._world.pg_map} - before

    def note(self, name: str, args: tuple[Any, ...]) -> Any:
        found = getattr(self.notes, name) if self.notes else None
        return found(*args) if callable(found) else found

    def set_threads(self, count: int) -> int:
        """Have workers that are made from now on find so many threads of torch's own choice. Returns how many they were."""
        before, sizes.THREADS = sizes.THREADS, count
        return before

    def count_loading(self) -> None:
        """Count the bytes of all parameters while the next worker is made: for each role those that are there before it is shared out,
        the most when its units have become wider, and those when it is shared out."""
        self.worker = self.notes = None
        self.counted: dict[str, dict[str, int]] = {}
        before, share_out, widen = parameter_bytes(), ModelSharer.share_out, apply.widen

        def sharing_out(sharer: ModelSharer, role: str, model: torch.nn.Module) -> None:
            own = self.counted[role] = {"whole": parameter_bytes() - before, "most": 0}

            def widening(module: torch.nn.Module) -> None:
                widen(module)
                own["most"] = max(own["most"], parameter_bytes() - before)

            apply.widen = widening
            share_out(sharer, role, model)
            own["shared"] = parameter_bytes() - before

        ModelSharer.share_out = sharing_out  # type: ignore[method-assign]

        def restore() -> None:
            ModelSharer.share_out, apply.widen = share_out, widen  # type: ignore[method-assign]

        self.uncount = restore

    def counts_of_loading(self) -> dict[str, dict[str, int]]:
        """What `count_loading` has counted, by role in the order of loading; counts no more."""
        self.uncount()
        return self.counted

    def run_out(self, faults: str) -> None:
        """Have the worker run out of memory where `faults` says (cluster/faults.py)."""
        if self.notes:
            install(self.notes.worker, faults)

    def break_at(self, rank: int, number: int, how: str, after: str, sign: str) -> None:
        """Have the worker of this rank fail in its `number`-th optimizer step (from 0), as soon as the file `after` exists; then it makes
        the file `sign`."""
        if rank != self.rank:
            return
        assert self.notes
        optimizer = self.notes.worker.trainers["actor"].optimizer
        step, left = optimizer.step, iter(range(number))

        def breaking(**given: Any) -> Any:
            if next(left, None) is not None:
                return step(**given)
            while not os.path.exists(after):
                time.sleep(0.01)
            Path(sign).touch()
            return BREAKS[how]()

        optimizer.step = breaking  # type: ignore[method-assign]


def parameter_bytes() -> int:
    """Bytes of all parameters that exist in this process, each storage once."""
    gc.collect()
    found = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and isinstance(each, torch.nn.Parameter))
    storages = (local(each.detach()).untyped_storage() for each in found if not each.is_meta)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def fail() -> None:
    raise KeyError("the test breaks this worker")


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def sleep_forever() -> None:
    while True:
        time.sleep(60)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


BREAKS: dict[str, Callable[[], Any]] = {"raise": fail, "memory": run_out_of_memory, "sleep": sleep_forever, "kill": die}


# -- in the process of the test ------------------------------------------------------------------------------------------------------------


class Team:
    """The first processes of a pool, as hosts of a run's workers."""

    worker = None

    def __init__(self, pool: Processes, order: WorkerOrder, size: int, *, apart: bool) -> None:
        self.size, self._pool = size, pool
        pool.start("form", [(order, size, os.getcwd(), apart)] * pool.size, what="loading").results()

    @property
    def sent_bytes(self) -> int:
        return self._pool.sent_bytes

    @property
    def received_bytes(self) -> int:
        return self._pool.received_bytes

    def start(self, method: str, args: Sequence[tuple[Any, ...] | None], *, what: str, **kind: bool) -> TeamCall:
        given = [None if own is None else (method, own) for own in args]
        return TeamCall(self._pool.start("call", [*given, *[None] * (self._pool.size - self.size)], what=what, **kind), self.size)

    def keep_output(self, folder: Path) -> None:
        """The processes are not of one run."""

    def hurry(self) -> None:
        self._pool.hurry()

    def close(self) -> None:
        """The pool stays."""
        with contextlib.suppress(WorkerError):
            self.start("close", [()] * self.size, what="the end").results()


class Guests:
    """Workers of another kind, one in each process of a pool. `make`, as "module:function", takes the `Member`."""

    def __init__(self, pool: Pool, make: str) -> None:
        self.size, self._pool, self._make = SIZE, pool, make

    def start(self, method: str, args: Sequence[tuple[Any, ...]], *, what: str) -> ProcessCall:
        return self._pool.processes.start("call_guest", [(self._make, method, own) for own in args], what=what)


@dataclass(frozen=True, eq=False)
class Noted:
    """What the workers of a run have noted, by rank."""

    restored: list[dict[str, np.ndarray]]
    states: list[dict[str, np.ndarray]]
    skipped: list[dict[str, int]]
    moved: list[dict[str, int]]
    sampled_from: list[Whole | None]
    groups: list[list[int]]  # the workers that have every parameter once, or the same part of each
    loaded: list[Whole]  # parameters of the actor, before the first step; where they are shared out, those of the worker's group
    parameters: list[Whole]  # the same, at the end
    digests: list[str]  # where parameters are shared out, of the worker's group
    gradients: dict[str, list[Whole]] = field(default_factory=dict)  # by role, of each optimizer step, of all workers together


Case = tuple[str, Mapping[str, Any], tuple[str, ...]]  # the family of its model, its tables and further settings


def run_once(
    pool: Pool, cases: Mapping[str, Case], settings: Sequence[str], models: Callable[[str], Path], folders: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Noted]]:
    """A function that gives a run of a case in one process, with its folder, and makes it when the case is first asked for. `settings`:
    those that all cases have."""
    made: dict[str, tuple[Path, Noted]] = {}

    def run(case: str) -> tuple[Path, Noted]:
        if case not in made:
            family, tables, overrides = cases[case]
            folder = runs.make(folders.mktemp("alone") / case, models(family), tables)
            made[case] = folder, pool.train(folder, 1, *settings, *overrides)[1]
        return made[case]

    return run


class Pool:
    def __init__(self, size: int = SIZE) -> None:
        self._size = size
        self._processes: Processes | None = None
        self.breaks: tuple[int, int, str, str, str] | None = None  # for `Member.break_at`, in the next run
        self.faults = ""  # for `Member.run_out`, in all runs
        self.apart = False  # whether each worker is taken for a machine of its own
        self._alone: Notes | None = None  # of the last run's worker, if it was in this process

    @property
    def processes(self) -> Processes:
        """Started when they are first needed, and anew after one has failed."""
        if self._processes is None or self._processes._breakdowns:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            seats = [Seat(rank, self._size, self._store.port) for rank in range(self._size)]
            lo = {} if "GLOO_SOCKET_IFNAME" in os.environ else {"GLOO_SOCKET_IFNAME": "lo"}
            with pytest.MonkeyPatch.context() as patch:
                forked.use(patch)
                self._processes = Processes(seats, "devices:make", environment=lo, on_stall=tell)
        return self._processes

    def close(self) -> None:
        """End the processes, until they are needed again."""
        if self._processes:
            self._processes.close()
            self._processes = None

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Have runs of this process use the pool in place of processes of their own, and note what a single worker does too."""

        def start(order: WorkerOrder, device: torch.device, size: int) -> Team:
            team = Team(self.processes, order, size, apart=self.apart)
            self._alone = None
            if self.faults:
                self.processes.start("run_out", [(self.faults,)] * self._size, what="breaking").results()
            if self.breaks:
                self.processes.start("break_at", [self.breaks] * self._size, what="breaking").results()
            return team

        def load(order: WorkerOrder, *args: Any) -> Worker:
            worker = load_worker(order, *args)
            self._alone = Notes(worker)
            return worker

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(assembly, "start_processes", start)
            patch.setattr(assembly, "load_worker", load)
            yield

    def noted(self, workers: int) -> Noted:
        """Of the last run, which had so many workers."""

        def ask(name: str, *args: Any) -> list[Any]:
            if self._alone is None:
                return self.processes.start("note", [(name, args)] * self._size, what="notes").results()[:workers]
            found = getattr(self._alone, name)
            return [found(*args) if callable(found) else found]

        each, digests, groups = ask("gradients"), ask("digest"), [group or [rank] for rank, group in enumerate(ask("group"))]
        steps = {role: [own[role] for own in each if own and role in own] for own in filter(None, each) for role in own}
        holding = {role: [rank for rank, own in enumerate(each) if own and role in own] for role in steps}
        counted = list(zip(ask("copies"), each, strict=True))
        copies = {role: max(counts[role] for counts, own in counted if own and role in own) for role in steps}
        parts: list[Parts] = [own or Parts({}, {}) for own in ask("parts")]
        gradients = {
            role: [gathered(role, list(pieces), copies[role], [parts[rank] for rank in holding[role]]) for pieces in zip(*own, strict=True)]
            for role, own in steps.items()
        }

        def whole(pieces: Sequence[Pieces | None]) -> list[Whole]:
            """The actor's parameters of each worker, or of its group."""
            if "actor" in parts[0].apart and len(groups[0]) > 1:
                return [gathered("actor", [own or {} for own in pieces], 1, parts)] * len(pieces)
            each = [joined([pieces[rank] or {} for rank in group]) for group in groups]
            return [own.undivided("actor", each, rank) for rank, own in enumerate(parts)]

        begin, end = whole(ask("loaded")), whole(ask("parameters"))
        names = ["".join(digests[rank] or "" for rank in group) for group in groups]
        firsts = [rank - own.rank(own.largest) for rank, own in enumerate(parts)]
        names = ["".join(names[first : first + own.size(own.largest)]) for first, own in zip(firsts, parts, strict=True)]
        restored, states, skipped, moved, engines = (ask(name) for name in ("restored", "states", "skipped", "moved", "sampled_from"))
        sampled = [
            own.undivided("actor", engines, rank) if each and "actor" not in own.apart else each
            for rank, (own, each) in enumerate(zip(parts, engines, strict=True))
        ]
        return Noted(restored, states, skipped, moved, sampled, groups, begin, end, names, gradients)

    def held(self, workers: int) -> list[dict[str, int]]:
        """Bytes of each kind that the workers of the last run hold now."""
        return self.ask("note", "held", ())[:workers]

    def ask(self, method: str, *args: Any) -> list[Any]:
        """What each process of the pool answers."""
        return self.processes.start(method, [args] * self._size, what=method).results()

    def train(self, folder: Path, workers: int, *overrides: str) -> tuple[runs.Trained, Noted]:
        """`fulltilt train` with so many workers, and what they have noted."""
        with self.used():
            processes = [f"reward.workers={workers}"] if self.apart else []  # on several machines each worker needs one
            trained = runs.train(folder, *for_workers(workers, overrides), *processes)
        return trained, self.noted(workers)

    @contextlib.contextmanager
    def assembled(self, folder: Path, workers: int, *overrides: str) -> Generator[RunParts, None, None]:
        """The parts of a run that makes no step by itself."""
        config = runs.read_config(folder, *for_workers(workers, overrides))
        with self.used(), contextlib.chdir(folder), assembly.torch_as_it_was():
            parts = assembly.assemble(config)
            with contextlib.closing(parts):
                yield parts


def for_workers(count: int, overrides: Sequence[str]) -> list[str]:
    """The settings of a run with so many workers. A single one refuses those that would have no effect."""
    return [f"cluster.workers={count}", *(each for each in overrides if count > 1 or not each.startswith("train.balance="))]


def gathered(role: str, pieces: Sequence[Pieces], copies: int, parts: Sequence[Parts]) -> Whole:
    """What all workers of a role have together: pieces of the whole, or of their part of it."""
    size, cuts = parts[0].size(role), parts[0].cuts.get(role, {})
    common = {name for name, cut in cuts.items() if role in parts[0].apart and cut.cut.shape(cut.shape, 0) == cut.shape}
    of_all = joined([{name: each for name, each in own.items() if name in common} for own in pieces], copies)
    others = [{name: each for name, each in own.items() if name not in common} for own in pieces]
    each = [joined([own for own, part in zip(others, parts, strict=True) if part.rank(role) == rank], copies) for rank in range(size)]
    return {**of_all, **parts[0].undivided(role, each, 0)}


def joined(pieces: Sequence[Pieces], copies: int = 1) -> Whole:
    """The whole of what workers have pieces of, flat. Every number must be there once, or in so many copies that are equal to the bit."""
    found: dict[str, list[tuple[int, np.ndarray]]] = {}
    for own in pieces:
        for name, piece in own.items():
            found.setdefault(name, []).append((piece[0], piece[1].reshape(-1)))
    for name, parts in found.items():
        parts.sort(key=lambda part: part[0])
        for first, (start, numbers) in zip(range(0, len(parts), copies), parts[::copies], strict=True):
            same = [other == start and numbers.tobytes() == others.tobytes() for other, others in parts[first : first + copies]]
            assert same == [True] * copies, f"the copies of {name} differ"
        parts[:] = parts[::copies]
        ends = np.cumsum([0, *(len(numbers) for _, numbers in parts)]).tolist()
        assert [start for start, _ in parts] == ends[:-1], f"the pieces of {name} overlap or leave a gap"
    return {name: np.concatenate([numbers for _, numbers in parts]) for name, parts in found.items()}


def joined_states(states: Sequence[Mapping[str, np.ndarray]]) -> Whole:
    """Tensors of checkpoints, of which workers have pieces with names such as `master/NAME@START`."""
    whole: Whole = {}
    pieces: list[Pieces] = []
    for own in states:
        cut = {name: numbers for name, numbers in own.items() if "@" in name}
        whole |= {name: numbers.reshape(-1) for name, numbers in own.items() if name not in cut}
        pieces.append({name.rpartition("@")[0]: (int(name.rpartition("@")[2]), numbers) for name, numbers in cut.items()})
    return whole | joined(pieces)
