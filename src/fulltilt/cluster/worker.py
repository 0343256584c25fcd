"""One worker: a device with everything on it, behind the line that separates what decides from what computes.

Enters: prompts, rows, a mini-batch's part for this worker, a checkpoint's folder. Leaves: groups, numbers for tokens, sums for metrics, and
checkpoint files; only heads of groups where the worker keeps the samples itself (cluster/shelf.py). Guaranteed: only records that pickle,
numbers and paths cross the line, in both directions; a caller never sees a tensor, a model or an optimizer. A method is a plain function or
a generator: items that a generator yields (progress, finished groups) reach the caller as they come, and its return value is the result; no
callback crosses. So the same calls run in this process or in another (cluster/hosts.py). Whatever does not pickle stays on its side: the
worker itself reads the stream of `weights`, for its engine.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from fulltilt.algo.base import Algorithm
from fulltilt.batching.cost import ModelSize
from fulltilt.batching.pack import pack, pack_plan
from fulltilt.blame import is_out_of_memory
from fulltilt.cluster.alive import Written, no_signs, signs_for, signs_of_progress
from fulltilt.cluster.hosts import Inbox
from fulltilt.cluster.shelf import Shelf
from fulltilt.memory.account import Account, Reading
from fulltilt.memory.offload import Residence
from fulltilt.memory.trial import MemoryTrial, RandomState, free_unused
from fulltilt.observe.utilization import GpuUtilization
from fulltilt.parallel.apply import Shards
from fulltilt.parallel.checksum import checksum
from fulltilt.parallel.parts import RolloutCopy
from fulltilt.parallel.progress import JointPasses
from fulltilt.parallel.ranks import ALONE, Ranks
from fulltilt.parallel.trace import PassTrace, traced
from fulltilt.parallel.twin import Twin
from fulltilt.plan.decisions import RoleSettings, releases_memory
from fulltilt.plan.make import Plan
from fulltilt.records import NOTHING_PROBED, AnyGroup, BatchPlan, Group, LossSums, MicroBatch, Probed, Prompt, Row, UserError
from fulltilt.rollout.engine import Engine, FreeSeats, Listener, RolloutLimits
from fulltilt.rollout.sampler import Sampling
from fulltilt.rollout.stats import EngineStats
from fulltilt.schema import Config
from fulltilt.training.checkpoint import Digests, system_error_number, write_trainer
from fulltilt.training.optim import Optimizer, StepAbandoned
from fulltilt.training.roles import FILLER, Policy, Role, annotate_all
from fulltilt.training.trainer import Trainer
from fulltilt.words import first_line

Metrics = dict[str, float]
Kept = TypeVar("Kept")
Done = tuple[int, int]  # micro-batches of a pass, or optimizer steps of an update: how many are done, and how many there are
BETWEEN_STEPS = ("eval", "save")  # phases outside of steps
PASSES_BETWEEN_LOOKS = 4  # members that sample together exchange whether they have messages after this many passes
LOOK_S = 0.02  # how long a member with nothing to sample waits for a message before it asks the other members
ROLLOUT_ROLES = {False: ("actor",), True: ()}  # roles whose parameters the engine reads, by whether the actor has a twin
CRITIC_TENSORS, SURPLUS_TENSORS = "critic/", "surplus/"  # prefixes of tensor names in a checkpoint; the actor's tensors have none


@dataclass(frozen=True, eq=False)
class Annotated:
    numbers: list[np.ndarray]  # for each micro-batch, one number per trained token
    pad_tokens: int  # padding computed in addition to the rows' own tokens
    seconds: float  # of the passes, including gathers of sharded parameters
    failure: str | None = None  # the out-of-memory error, if any; numbers and pad tokens are then meaningless


@dataclass(frozen=True)
class UpdateSums:
    """The result of a worker's part of an update: for each optimizer step, the sums over its micro-batches and the optimizer's metrics."""

    steps: list[tuple[LossSums, Metrics]]
    micro_batches: int
    pad_tokens: int
    seconds: float  # of forward and backward passes, including gathers of sharded parameters
    failure: str | None = None  # the out-of-memory error that kept all workers from the next step; empty: another worker had it

    def __add__(self, later: UpdateSums) -> UpdateSums:
        counts = (self.micro_batches + later.micro_batches, self.pad_tokens + later.pad_tokens, self.seconds + later.seconds)
        return UpdateSums([*self.steps, *later.steps], *counts, later.failure)


@dataclass(frozen=True)
class SyncReport:
    seconds: float
    moved_bytes: int  # copied by the engine, or gathered from other workers
    checksum: str | None  # of some of the weights that the engine samples from; None: no other worker has the same weights


@dataclass(frozen=True)
class Replica:
    """What a worker has loaded of a role's model. Workers with the same part must have the same numbers."""

    part: tuple[int, ...]
    checksum: str  # of some of the numbers


@dataclass(frozen=True)
class WorkerFacts:
    """Facts that the driver needs about a worker that has just been made."""

    plan: Plan
    sizes: Mapping[str, ModelSize]  # of each role's model, to estimate the cost of its passes
    notes: tuple[str, ...] = ()  # on models and checkpoint, for the console
    queue: bool = False  # whether prompts may go to whichever worker is free
    together: Mapping[str, int] = field(default_factory=dict)  # by role: how many workers compute each layer together
    sampling: int = 1  # how many workers sample together
    gathers: bool = False  # whether passes wait for other workers, which must make them at the same time
    holds_samples: bool = False  # whether the driver gets heads in place of groups
    device: str = "CPU"  # the name that the GPU's driver gives it
    device_bytes: int = 0  # this worker's share of the device's memory; 0 on a CPU
    probed: Probed = NOTHING_PROBED
    loaded: Mapping[str, Replica] = field(default_factory=dict)  # by role; empty for a worker that is alone


@dataclass(frozen=True)
class StopSampling:
    """A message to members that sample together: nobody reads their samples any more."""


class GroupMessages:
    """An inbox for the driver's messages to members that sample together. Messages arrive at different times, and all members act on them
    before the same pass: when every member has its answer, or one of them was told to stop."""

    def __init__(self, inbox: Inbox, members: Ranks) -> None:
        self._inbox, self._members, self._passes = inbox, members, 0
        self.sign_s = inbox.sign_s
        self._answers: deque[Any] = deque()
        self._told = self._stopped = False

    def halted(self) -> bool:
        """Return whether to stop. Every member must ask before each pass."""
        self._passes += 1
        if self._passes % PASSES_BETWEEN_LOOKS == 0:
            self._all_have_an_answer()
        return self._stopped

    def poll(self) -> list[Any]:
        return [self._answers.popleft()] if self._all_have_an_answer() else []

    def wait(self, timeout: float | None = None) -> list[Any]:
        while not self._stopped:
            if found := self.poll():
                return found
            self._take(self._inbox.wait(LOOK_S))
        return [{}]  # no more prompts will come

    def send(self, item: Any) -> None:
        self._inbox.send(item)

    def _take(self, messages: Sequence[Any]) -> None:
        for message in messages:
            if isinstance(message, StopSampling):
                self._told = True
            else:
                self._answers.append(message)

    def _all_have_an_answer(self) -> bool:
        """Return whether every member has an answer and none must stop. All members must call this at the same time."""
        self._take(self._inbox.poll())
        told, missing = self._members.most_of_each([self._told, not self._answers])
        self._stopped = bool(told)
        return not (told or missing)


class PromptQueue:
    """The engine's end of the driver's prompt queue. Each message maps the driver's places of prompts to the prompts."""

    def __init__(self, inbox: Inbox, places: list[int], longest: int) -> None:
        self.inbox, self.places, self.longest = inbox, places, longest

    def take(self, *, wait: bool) -> list[Prompt] | None:
        answers: list[dict[int, Prompt]] = self.inbox.wait() if wait else self.inbox.poll()
        if not answers:
            return None
        (more,) = answers
        self.places += more
        return list(more.values())


class Residents:
    """Moves the parameters of roles between device and host, so that only the roles at work are on the device. A role that was not added
    is always on the device."""

    def __init__(self) -> None:
        self._residences: dict[str, Residence] = {}
        self._changed: set[str] = set()

    def add(self, role: str, model: torch.nn.Module, *, learns: bool) -> None:
        self._residences[role] = Residence(model, role, learns=learns)

    def need(self, *roles: str, update: bool = False) -> None:
        """Move these roles to the device, after moving all others off it to make room. `update`: their parameters are about to change."""
        for role, residence in self._residences.items():
            if role not in roles:
                residence.to_host(unchanged=role not in self._changed)
                self._changed.discard(role)
        for role in roles:
            if role in self._residences:
                if role == "actor" and not self._residences[role].on_device:
                    # The actor stays through the rollout. In memory that the KV cache has lent, it would block the cache.
                    torch.cuda.empty_cache()
                self._residences[role].to_device()
                self._changed |= {role} if update else set()

    def memory(self) -> Iterator[torch.Tensor]:
        for residence in self._residences.values():
            yield from residence.memory()


LESS_IN_UPDATES = (
    'Lower {role}.token_budget (a longer sample runs alone), or set {section}.recompute = "full", {section}.offload_activations = true or '
    "{section}.offload_optimizer = true (docs/troubleshooting.md)"
)
LESS_IN_PASSES = "Lower {role}.forward_token_budget (a longer sample runs alone)"
LESS_IN_ROLLOUT = "Set a smaller rollout.kv_bytes or rollout.max_seqs (docs/troubleshooting.md)"
LESS_MEMORY = {
    "update-actor": LESS_IN_UPDATES.format(section="train", role="actor"),
    "update-critic": LESS_IN_UPDATES.format(section="critic", role="critic"),
    "rollout": LESS_IN_ROLLOUT,
    "eval": f"{LESS_IN_ROLLOUT}, or a smaller actor.forward_token_budget",
    "old-logprob": LESS_IN_PASSES.format(role="actor"),
    "ref-logprob": LESS_IN_PASSES.format(role="ref"),
    "values": LESS_IN_PASSES.format(role="critic"),
    "reward": LESS_IN_PASSES.format(role="reward_model"),
}


class PhaseFailed(Exception):
    """Ends a phase without measuring it."""


@contextlib.contextmanager
def enough_memory(phase: str | None = None, where: str = "") -> Iterator[None]:
    """Turn an out-of-memory error inside a phase into one that names the settings that would help. `where`: names the worker, if there are
    several."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        # Without its traceback, which would keep alive everything that filled the memory.
        raise out_of_memory(phase, where, first_line(error)) from error.with_traceback(None)


def out_of_memory(phase: str | None, where: str, what: str) -> UserError:
    """Make an error that names the settings that would help. `what`: what was reported when memory ran out."""
    remedy = LESS_MEMORY.get(phase or "", "Set train.offload_optimizer = true, use a smaller model, or LoRA (lora.rank)")
    return UserError(f"out of memory{f' in {phase}' if phase else ''}{where}: {what} {remedy}")


@contextlib.contextmanager
def refusals_noted() -> Iterator[list[OSError]]:
    """Collect the errors of a disk in place of raising them, in a form that pickles, which errors of some libraries do not."""
    found: list[OSError] = []
    try:
        yield found
    except Exception as error:
        number = system_error_number(error)
        if number is None:
            raise
        found.append(error if isinstance(error, OSError) else OSError(number, str(error)))


def nothing() -> None:
    """Do nothing."""


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_properties(device).name if device.type == "cuda" else "CPU"


@dataclass(eq=False)
class Worker:
    """One device with its roles, optimizers, engine and memory account."""

    config: Config
    algorithm: Algorithm
    plan: Plan
    roles: Mapping[str, Role]
    trainers: Mapping[str, Trainer]  # one for each role that learns
    engine: Engine | None  # None: nothing is sampled (SFT)
    residents: Residents
    account: Account
    export: Callable[[Path], None]  # writes the actor in a form that others can load
    export_bytes: int  # about how many bytes `export` writes
    sizes: Mapping[str, ModelSize]  # of each role's model
    notes: tuple[str, ...] = ()
    ranks: Ranks = ALONE  # the workers that train the same models
    shards: tuple[Shards, ...] = ()  # models whose parameters are sharded across these workers
    twin: Twin | RolloutCopy | None = None  # the engine's copy of the model, where it does not read the one that learns
    sampling: Ranks = ALONE  # the members that sample together with this worker
    host_group: Ranks = ALONE  # the same members, for collectives in main memory
    shelf: Shelf | None = None  # the samples that this worker keeps, in a run on several machines
    utilization: GpuUtilization | None = None  # None: a CPU, or a GPU whose driver does not report utilization
    collect: Callable[[], None] = nothing  # prepares what `export` writes; runs on all workers at the same time
    probed: Probed = NOTHING_PROBED
    loaded: Mapping[str, Replica] = field(default_factory=dict)  # by role: checksums that must equal those of other workers
    version: int | None = 0  # version of the weights that the engine samples from; None: they have changed since the last sync
    _unwritten: Callable[..., Digests] | None = None  # writes the rest of the last `save`
    _progress_s: float | None = None  # seconds of generating between progress reports of `generate`
    _moved: Counter[str] = field(default_factory=Counter)  # bytes moved, by kind of collective, since the last `metrics`
    _phases: list[tuple[str, contextlib.ExitStack]] = field(default_factory=list)  # phases that have begun, the innermost last

    def facts(self) -> WorkerFacts:
        parts = {name: role.tensor.size for name, role in self.roles.items()}
        return WorkerFacts(
            self.plan, self.sizes, self.notes, self._may_queue, parts, self.sampling.size, self._waits, self.shelf is not None,
            device_name(self.account.device), self.account.device_bytes // self.ranks.sharing, self.probed, self.loaded,
        )  # fmt: skip

    @property
    def _waits(self) -> bool:
        """Whether passes wait for other workers, which must make them at the same time."""
        return bool(self.shards) or any(role.meets for role in self.roles.values())

    @property
    def _may_queue(self) -> bool:
        """Whether a queue may decide which worker samples what. Not where a run must repeat bit for bit: which samples run side by side
        changes the last bits of their log-probs, at least on a CPU."""
        repeats = self.config.run.deterministic or self.account.device.type == "cpu"
        return self.engine is not None and self.engine.can_be_fed and not repeats

    def begin_phase(self, name: str) -> None:
        """Begin a phase: the memory of the calls that follow is measured."""
        stack = contextlib.ExitStack()
        stack.enter_context(self.account.phase(name))
        if not self._phases and name not in BETWEEN_STEPS:
            stack.callback(partial(self._count_moved, Counter(self.ranks.moved)))
        self._phases.append((name, stack))

    def _count_moved(self, before: Counter[str]) -> None:
        self._moved += self.ranks.moved - before

    @property
    def phase(self) -> str | None:
        return self._phases[-1][0] if self._phases else None

    def end_phase(self, failed: bool) -> None:
        """End the innermost phase. A phase that has failed is not measured."""
        _, stack = self._phases.pop()
        with contextlib.suppress(PhaseFailed), stack:
            if failed:
                raise PhaseFailed

    # -- rollout --------------------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Mapping[int, Prompt],
        sampling: Sampling,
        seed: int,
        version: int,
        longest_queued: int = 0,
        inbox: Inbox | None = None,
    ) -> Generator[AnyGroup | FreeSeats | None, None, RolloutLimits | None]:
        """Yield one group for each prompt as soon as it is complete, with the caller's place of the prompt; only the group's head, where
        this worker keeps the samples; None from a member whose groups another member sends, and now and then after a pass. The KV cache is
        freed even if the caller stops early. `version`: the version of the weights to sample from. `longest_queued`: tokens of the longest
        prompt that the caller holds back; the caller must then answer each `FreeSeats` with more prompts, or with none if there are no
        more. Returns how much the engine will hold in memory at once from now on."""
        assert self.engine
        assert self.twin is None or self.twin.current, "sync comes before a rollout: the engine has old weights"
        if version != self.version:
            own = "weights that were changed after the last sync" if self.version is None else f"version {self.version} of the weights"
            raise RuntimeError(f"the engine would sample from {own}, and version {version} is asked for: sync comes after every update")
        self.residents.need(*ROLLOUT_ROLES[self.twin is not None])
        if inbox and self._progress_s is not None:
            self.engine.recorder.tell(inbox.send, self._progress_s)
        self.engine.recorder.on_pass = signs_for(inbox)  # even without logging: a long group must not look like a hang
        messages = GroupMessages(inbox, self.host_group) if inbox and self.sampling.size > 1 else None
        self.engine.halted = messages.halted if messages else None
        places, given = list(prompts), list(prompts.values())
        try:
            items: Iterable[Group | FreeSeats]
            if longest_queued:
                assert inbox
                items = self.engine.generate_fed(given, sampling, seed, PromptQueue(messages or inbox, places, longest_queued))
            else:
                items = self.engine.generate(given, sampling, seed)
            for item in items:
                if self.sampling.rank:  # another member sends the same; this one only shows that it is alive
                    yield None
                elif isinstance(item, Group):
                    group = replace(item, place=places[item.place])
                    yield self.shelf.keep(group) if self.shelf else group
                else:
                    yield item
            self.account.look()  # while the KV cache still exists
            return self.engine.take_limits()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            # Without its traceback, which would keep alive everything that filled the memory.
            raise torch.OutOfMemoryError(self.account.explain(first_line(error))) from error.with_traceback(None)
        finally:
            self.engine.recorder.on_pass = no_signs
            if releases_memory(self.config):
                self.engine.release()
                if self.shards and self.account.device.type == "cuda":
                    # Gathers and reductions run in their own streams, for which torch does not reuse memory that another stream has freed.
                    torch.cuda.empty_cache()

    def limit_rollout(self, limits: RolloutLimits) -> None:
        """Limit how much the engine holds in memory at once."""
        if self.engine:
            self.engine.limit(limits)

    def rollout_stats(self) -> EngineStats:
        """Return the engine's statistics of the last `generate`."""
        assert self.engine
        return self.engine.stats()

    def send_progress(self, interval: float) -> None:
        """Have `generate` send a `RolloutProgress` after every `interval` seconds of generating."""
        self._progress_s = interval if self.config.rollout.log_stats else None

    def report_rollout(self, say: Callable[[str], None], interval: float) -> None:
        """Have the engine describe its progress after every `interval` seconds of generating."""
        if self.engine and self.config.rollout.log_stats:
            self.engine.report(say, interval)

    def listen(self, listen: Listener | None) -> None:
        """Have the engine pass on the tokens of each sample as they come, until called with None."""
        assert self.engine
        self.engine.listener = listen

    def sync(self, version: int, inbox: Inbox | None = None) -> SyncReport:
        """Copy the trainer's changed weights to the engine."""
        with signs_of_progress(inbox, self._collected):
            return self._sync(version)

    def _collected(self) -> float:
        """Return how much collectives have moved, as a sign of progress: while one hangs, the number does not grow."""
        return float(self.ranks.moved.total())

    def _sync(self, version: int) -> SyncReport:
        assert self.engine
        begin, before, copied, several = time.perf_counter(), self.ranks.moved.total(), 0, self.ranks.size > 1

        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal copied
            for name, tensor in self.weights():
                yield name, tensor
                copied += tensor.nbytes

        if self.twin:
            self._sync_twin(self.twin)
        self.engine.sync(version, counted())
        self.version = version
        if self.account.device.type == "cuda" and (several or copied):
            torch.cuda.synchronize(self.account.device)
        seconds, moved = time.perf_counter() - begin, copied + self.ranks.moved.total() - before
        if several:
            self.residents.need(*ROLLOUT_ROLES[self.twin is not None])
        return SyncReport(seconds, moved, checksum(self.engine.parameters(), version) if several else None)

    def _sync_twin(self, twin: Twin | RolloutCopy) -> None:
        if not twin.current:
            self.residents.need("actor")
            twin.sync()

    # -- passes without gradient ----------------------------------------------------------------------------------------------------

    def held(self, method: str, *args: Any, inbox: Inbox | None = None) -> Generator[Any, None, Any]:
        """Call a method of the shelf. A user's mistake is returned, not raised: the workers are not at fault, and may have to save."""
        assert self.shelf
        try:
            with signs_of_progress(inbox, self.shelf.carried):
                outcome = getattr(self.shelf, method)(*args)
                return (yield from outcome) if isinstance(outcome, Generator) else outcome
        except UserError as error:
            return UserError(*error.args)

    def _given(self, rows: Mapping[int, Row] | str) -> Mapping[int, Row]:
        """Return the rows of a call. A string stands for rows that other workers have sent: it names their purpose."""
        if not isinstance(rows, str):
            return rows
        assert self.shelf
        return self.shelf.visiting(rows)

    def annotate(
        self, role: str, rows: Mapping[int, Row] | str, plan: Sequence[Sequence[int]], packing: bool, field: str = ""
    ) -> Generator[Done | None, None, Annotated]:
        """Compute the role's number for each trained token of these micro-batches, which are lists of keys of `rows`. Numbers of rows that
        other workers have sent stay here, to be given back. `field`: what the numbers are for, where a role has several kinds. If memory
        runs out, no number is kept. A yielded None only shows that the worker is alive."""
        given = self._given(rows)
        micro_batches = [pack(given, indices, packing=packing) for indices in plan]
        found: list[np.ndarray] = []
        own = self.roles[role]
        joint = self._joint_passes(own, len(micro_batches), micro_batches)
        trial = MemoryTrial(lambda: joint.may_be_given_up)
        begin = time.perf_counter()
        with trial:
            self._need_for_passes(role)
            for numbers in self._passes(own, micro_batches, field, joint.agreed):
                if len(found) == len(micro_batches):  # these numbers belong to a filler
                    yield None
                    continue
                found.append(numbers)
                yield len(found), len(micro_batches)
        seconds = time.perf_counter() - begin
        if trial.failure is not None:
            free_unused(self.account.device)
            self._need_for_passes(role)
            yield from joint.complete(partial(self._pass_over_filler, own))
        for shards in self._shards_of(own):
            shards.rest()
        if trial.failure is not None:
            return Annotated([], 0, seconds, self.account.explain(trial.failure))
        pads = sum(micro.pad_tokens for micro in micro_batches)
        if not isinstance(rows, str):
            return Annotated(found, pads, seconds)
        assert self.shelf
        if self.roles[role].tells:
            self.shelf.note(rows, plan, found)
        return Annotated([], pads, seconds)

    def _passes(self, role: Role, micro_batches: Sequence[MicroBatch], field: str, agreed: int) -> Iterator[np.ndarray]:
        if field == "sharp_logprobs":
            assert isinstance(role, Policy)
            role = role.sharper()
        fillers = [FILLER] * (agreed - len(micro_batches))
        with self.account.passes(role.head_bytes(micro_batches, learns=False)):
            yield from annotate_all(role, [*micro_batches, *fillers])

    @staticmethod
    @torch.no_grad()
    def _pass_over_filler(role: Role, micro: MicroBatch | None) -> None:
        """Make a pass over filler tokens. `micro`: the micro-batch that this pass replaces, for workers that compute it together."""
        if micro is None:
            role.annotate(FILLER)
            return
        with role.standing_in(micro):
            pass

    def _need_for_passes(self, role: str) -> None:
        """Move the model of the role's passes to the device. The reference may be the actor without its adapters."""
        self.residents.need("actor" if "actor" in self.roles and self.roles[role].model is self.actor.model else role)

    def _shards_of(self, role: Role) -> list[Shards]:
        return [shards for shards in self.shards if shards.model is role.model]

    def _joint_passes(self, role: Role, count: int, own: Sequence[MicroBatch]) -> JointPasses[MicroBatch]:
        """Describe the passes that workers must make at the same time: all workers, where passes gather sharded parameters or send tokens
        to other workers' experts; elsewhere, the workers that compute a micro-batch together. `count`: how many micro-batches this worker
        has. `own`: those that it makes a pass of."""
        shards, together = self._shards_of(role), role.sequence.size > 1 or role.tensor.size > 1
        agreed = self.ranks.most(count, self.account.device) if shards or role.meets else 0
        return JointPasses(self.ranks.progress, shards, agreed, own, together=together)

    def trace(self, role: str) -> PassTrace:
        """Find the order in which a pass without gradient gathers sharded parameters, and what it leaves whole. All workers must call this
        at the same time."""
        (shards,) = self._shards_of(self.roles[role])
        self.residents.need(role)
        found = traced(shards, lambda: self.roles[role].annotate(FILLER))
        shards.rest()
        return found

    def most_tokens(self, role: str) -> int:
        """Return the most tokens that have entered the role's model in one pass."""
        return self.roles[role].most_tokens

    def most_experts(self) -> int:
        """Return the most experts of a layer that this worker's engine reads, whole or in part."""
        assert self.engine
        return max((len(own) for own in self.engine.parameters() if own.ndim == 3), default=0)

    def most_key_heads(self) -> int:
        """Return the most key heads that this worker's engine caches for a layer."""
        assert self.engine
        return self.engine.key_heads

    @property
    def actor(self) -> Policy:
        actor = self.roles["actor"]
        assert isinstance(actor, Policy)
        return actor

    # -- updates --------------------------------------------------------------------------------------------------------------------

    def update(
        self, role: str, rows: Mapping[int, Row] | str, parts: Sequence[BatchPlan], updates_before: int, packing: bool, done: int = 0
    ) -> Generator[Done | None, None, UpdateSums]:
        """Make every optimizer step of a role from this worker's part of each mini-batch, after `updates_before` earlier steps, except for
        the first `done`, which are already made. Progress is first reported before any parameter changes; a None after a micro-batch only
        shows that the worker is alive. If memory runs out, the steps before are kept, and gradients and random generators are reset to
        their state before the mini-batch."""
        trainer, epochs, device = self.trainers[role], self.config.algorithm.epochs, self.account.device
        self.residents.need(role, update=True)
        self.version = None if role == "actor" else self.version
        trainer.optimizer.begin(updates_before + done)
        given = self._given(rows)
        batches = [pack_plan(given, part, packing=packing) for part in parts] * epochs
        found: list[tuple[LossSums, Metrics]] = []
        seconds, failure = 0.0, None
        for batch in batches[done:]:
            own = [micro for micro in batch.micro_batches if len(micro.trained)]
            joint = self._joint_passes(trainer.role, len(batch.micro_batches), own)
            random, trial = RandomState.of(device), MemoryTrial(partial(self._repeats, trainer, joint))
            begin = time.perf_counter()
            with trial, self.account.passes(trainer.role.head_bytes(batch.micro_batches, learns=True)):
                sums = yield from trainer.accumulating(batch, joint.agreed)
            seconds += time.perf_counter() - begin
            if trial.failure is None:
                yield done + len(found), len(batches)
            else:
                free_unused(device)
                yield from joint.complete(trainer.make_nothing)
            metrics = self._apply(trainer, trial)
            if metrics is None:
                trainer.optimizer.zero_grad()
                random.restore(device)
                free_unused(device)
                failure = self.account.explain(trial.failure or "")
                break
            found.append((sums, metrics))
            yield done + len(found), len(batches)
        if device.type == "cuda":  # an optimizer on the host is still running, and its time belongs to this phase
            torch.cuda.synchronize(device)
        micro_batches = [micro for batch in batches[done : done + len(found)] for micro in batch.micro_batches]
        return UpdateSums(found, len(micro_batches), sum(micro.pad_tokens for micro in micro_batches), seconds, failure)

    def _repeats(self, trainer: Trainer, joint: JointPasses[MicroBatch]) -> bool:
        """Return whether a mini-batch that ran out of memory can be repeated: this worker can still do what others wait for, and nothing
        has changed. It cannot be repeated if the loss marks tokens by comparing them over all workers, or if recomputed layers would route
        other tokens to experts than the forward pass did, because another worker's zeros come before a router in the recomputed part: zeros
        of experts in an earlier layer of the same unit or, where sequences are divided too, zeros of attention. Selective recompute keeps
        the results of routers and attention."""
        marks = trainer.marking is not None and not trainer.optimizer.alone
        settings = self.plan.roles.get(trainer.role.name, RoleSettings())
        in_units = settings.recompute != "none" and settings.recompute_method == "uniform" and (settings.recompute_layers or 1) > 1
        exchanged = settings.recompute == "full" and trainer.role.sequence.size > 1
        reroutes = trainer.role.meets and (in_units or exchanged)
        return not (marks or reroutes or trainer.optimizer.changing) and joint.may_be_given_up

    def _apply(self, trainer: Trainer, trial: MemoryTrial) -> Metrics | None:
        """Make the optimizer step. Returns None if memory ran out, on this worker or another one."""
        alone = trainer.optimizer.alone
        try:
            with trial if alone else contextlib.nullcontext():  # with `trial`, other workers would not know of the error
                return trainer.apply(failed=trial.failure is not None)
        except StepAbandoned as end:
            trial.failure = trial.failure or str(end)
        return None

    def metrics(self) -> Metrics:
        """Return memory use and GPU utilization since the last call, and the bytes that collectives moved in a step's phases."""
        peak, moved = self.account.peak_bytes, dict(self._moved)
        self._moved.clear()
        busy = self.utilization.take() if self.utilization else None
        return {
            **({"perf/gpu_utilization": busy} if busy is not None else {}),
            **({"perf/max_memory_allocated_gb": peak / 2**30} if peak else {}),
            **self.account.metrics(),
            **{f"communication/{kind.replace('-', '_')}_bytes": count for kind, count in moved.items()},
        }

    def pending_memory(self) -> dict[str, Reading]:
        """Return memory readings that no `metrics` call has returned yet, for `restore_memory` in another process."""
        return self.account.pending()

    def restore_memory(self, pending: Mapping[str, Reading]) -> None:
        self.account.restore(pending)

    # -- weights and checkpoints ----------------------------------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the actor's parameters with their names, one after another, for an engine that keeps its own copy."""
        self.residents.need(*ROLLOUT_ROLES[self.twin is not None])
        model = self.twin.model if self.twin else self.actor.model
        yield from ((name, parameter.detach()) for name, parameter in model.named_parameters())

    def state(self) -> dict[str, dict[str, int]]:
        """Return how many optimizer steps each role that learns has made and skipped."""
        return {role: {"updates": each.optimizer.updates, "skipped": each.optimizer.skipped} for role, each in self.trainers.items()}

    def save(self, arrays: Mapping[str, np.ndarray], folder: Path, beside: bool, inbox: Inbox | None = None) -> OSError | None:
        """Write the exported model, the trainer's tensors and the caller's arrays into a checkpoint's folder. With `beside`, tensors may
        only be copied, for `finish_save` to write. Errors of the disk are returned, not raised: the worker is not at fault."""
        self._unwritten = None  # drops the copy of a save that failed
        self.residents.need("actor", "critic")
        with signs_of_progress(inbox, self._collected):
            self.collect()
        held = {f"{SURPLUS_TENSORS}{name}": array for name, array in self.shelf.arrays.items()} if self.shelf else {}
        tensors = self._tensors() | {name: torch.from_numpy(array) for name, array in {**arrays, **held}.items()}
        cuts = self._of_learners(lambda optimizer: optimizer.cuts())
        rank, size, here = self.ranks.number, self.ranks.of_run, self.ranks.beside
        with refusals_noted() as refused, signs_of_progress(inbox, Written()):
            self._unwritten = write_trainer(folder, tensors, self.export, beside=beside, rank=rank, size=size, here=here, cuts=cuts)
        return refused[0] if refused else None

    def finish_save(self, inbox: Inbox | None = None) -> Digests | OSError:
        """Write the rest of the last `save`. Safe in any thread: it reads nothing that training changes. Returns the digests of files that
        are known already, or the disk's error."""
        write, self._unwritten = self._unwritten, None
        with refusals_noted() as refused, signs_of_progress(inbox, Written()):
            return write(go_on=signs_for(inbox)) if write else {}
        return refused[0]

    def checkpoint_bytes(self) -> int:
        """Return about how many bytes `save` writes."""
        return self.export_bytes + sum(tensor.nbytes for tensor in self._tensors().values())

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the optimizer states of the roles that learn, which are saved beside the exported model."""
        self.residents.need("actor", "critic")
        return self._of_learners(lambda optimizer: optimizer.tensors())

    def _of_learners(self, ask: Callable[[Optimizer], dict[str, Kept]]) -> dict[str, Kept]:
        """Ask each role's optimizer, and return the answers under their names in a checkpoint."""
        prefixes = {"actor": "", "critic": CRITIC_TENSORS}
        own = {prefixes[role]: ask(trainer.optimizer) for role, trainer in self.trainers.items()}
        return {f"{prefix}{name}": kept for prefix, all_kept in own.items() for name, kept in all_kept.items()}

    def close(self) -> None:
        if self.utilization:
            self.utilization.close()
        if self.shelf:
            self.shelf.close()
        if self.engine:
            self.engine.release()
