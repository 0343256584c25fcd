"""The workers of a run, as the loop sees them: one object, however many there are.

Enters: prompts, and rows or the heads of rows that workers hold. Leaves: groups, annotated rows, metrics of updates, checkpoint files.
Guaranteed: a result does not depend on the number of workers, except for the order in which floating-point numbers are added: mini-batches,
the weights of rows and micro-batches are decided here, over all rows, before anything is dealt to workers; samples depend on seed, prompt
and place alone. With one worker every call is a plain call in this process. Only records that pickle, numbers and paths go to workers and
come back.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from fulltilt.algo.base import Algorithm
from fulltilt.batching.cost import update_flops
from fulltilt.batching.pack import MicroSizing, plan_minibatch, scatter
from fulltilt.batching.schedule import distribute, in_order, split_minibatches, spread
from fulltilt.cluster.budgets import PASSES, ROLLOUT, UPDATES, BudgetedWork, LiveBudgets
from fulltilt.cluster.hosts import Hosts, WorkerCall, WorkerError
from fulltilt.cluster.worker import (
    BETWEEN_STEPS,
    Annotated,
    Metrics,
    Replica,
    StopSampling,
    SyncReport,
    UpdateSums,
    Worker,
    WorkerFacts,
    enough_memory,
)
from fulltilt.memory.account import Reading
from fulltilt.observe.health import MEMORY
from fulltilt.plan.decisions import ROLE_KEYS, RoleSettings
from fulltilt.plan.make import Plan
from fulltilt.records import AnyRow, BatchPlan, LossSums, Prompt, Row, RowHead, UserError
from fulltilt.rollout.engine import FreeSeats, RolloutLimits
from fulltilt.rollout.sampler import Sampling
from fulltilt.rollout.stats import EngineStats, JointProgress, RolloutProgress
from fulltilt.schema import Config
from fulltilt.training.checkpoint import Digests
from fulltilt.words import joined, many

# Roles of phases that are not the actor's. Phases between steps involve all roles.
PHASES = {"ref-logprob": "ref", "values": "critic", "update-critic": "critic", "reward": "reward_model"}
OF_ALL_WORKERS = ("perf/gpu_utilization",)  # metrics to average over the workers; of all others, the largest value counts
SomeRow = TypeVar("SomeRow", bound=AnyRow)
Report = Callable[[int, int], None]  # called with how many micro-batches of a pass, or steps of an update, are done, and how many there are


@dataclass(frozen=True, eq=False)
class AnnotatedRows:
    rows: list[Any]  # Row, or RowHead where workers hold the rows
    pad_tokens: int  # padding computed in addition to the rows' own tokens
    seconds: list[float]  # of passes, by worker; of workers that compute together, only the first


# Micro-batches; a role's numbers for each, unless workers hold the rows; the number of pad tokens; and the seconds of each worker.
Passes = tuple[list[list[int]], list[np.ndarray], int, list[float]]
Outcome = TypeVar("Outcome")
Dealt = TypeVar("Dealt")


class StartedWork(Generic[Outcome]):
    """Work that workers have begun, and that they repeat in smaller micro-batches if memory runs out."""

    def __init__(
        self, begin: Callable[[int], WorkerCall], finish: Callable[[StartedWork[Outcome], Sequence[AnyRow], Report], Outcome]
    ) -> None:
        """`begin`: starts a call; its argument is how many optimizer steps are already made."""
        self._begin, self._finish = begin, finish
        self._calls = [begin(0)]

    @property
    def call(self) -> WorkerCall:
        return self._calls[-1]

    @property
    def seconds(self) -> float:
        return sum(call.seconds for call in self._calls)

    def repeat(self, done: int = 0) -> None:
        self._calls.append(self._begin(done))

    def finish(self, rows: Sequence[AnyRow], report: Report) -> Outcome:
        """Wait for the result. `rows`: those that the work was begun with."""
        return self._finish(self, rows, report)


class Crew:
    def __init__(self, config: Config, algorithm: Algorithm, hosts: Hosts) -> None:
        self.config, self.algorithm, self.hosts = config, algorithm, hosts
        facts: list[WorkerFacts] = self._all("facts", what="set-up")
        self._workers = {role: [rank for rank, each in enumerate(facts) if role in each.sizes] for own in facts for role in own.sizes}
        actors = self._ranks_of("actor")
        # Groups of workers with the same roles, the actor's group first.
        self.probed = facts[actors[0]].probed
        for role, own in self._workers.items():
            require_same_models(role, {rank: facts[rank].loaded[role] for rank in own if role in facts[rank].loaded})
        self._groups = list({ranks[0]: ranks for ranks in self._workers.values()}.values())
        firsts = [facts[ranks[0]] for ranks in self._groups]
        self.plan: Plan = reduce(Plan.beside, (each.plan for each in firsts))
        self.notes = tuple(note for each in firsts for note in each.notes)
        self.device = facts[actors[0]].device  # the device of the actor's workers
        self._sizes = {role: facts[ranks[0]].sizes[role] for role, ranks in self._workers.items()}
        self._queue = len(actors) > 1 and all(facts[rank].queue for rank in actors)  # whether prompts wait here until an engine has seats
        self._gathers = {role for role, ranks in self._workers.items() if facts[ranks[0]].gathers}  # roles whose workers compute together
        self.holds_samples = facts[0].holds_samples  # whether workers hold samples: the driver then has only heads of groups and rows
        self._counted = self._bytes()  # bytes that earlier metrics have reported
        self._version = 0  # the version of the weights that engines sample from
        self._samplers = facts[0].sampling  # how many workers sample together
        self.device_bytes = min(each.device_bytes for each in facts)  # the smallest memory of a worker's device; 0 on a CPU
        # How many workers compute a micro-batch of a role together, each a part of its tokens or of every layer. Their ranks are
        # consecutive, and they get the same micro-batches.
        of_tokens = {role: self.plan.roles.get(role, RoleSettings()).sequence_parallel for role in ROLE_KEYS}
        self._sharing = {role: size * facts[self._ranks_of(role)[0]].together.get(role, 1) for role, size in of_tokens.items()}
        self.budgets = LiveBudgets(config, self.plan.budgets, of_tokens, self.hosts.size)

    @property
    def update_sizes(self) -> dict[str, MicroSizing]:
        return {role: self.budgets.sizing(BudgetedWork(role, learns=True)) for role in UPDATES}

    @property
    def forward_sizes(self) -> dict[str, MicroSizing]:
        return {role: self.budgets.sizing(BudgetedWork(role, learns=False)) for role in PASSES}

    def use_budgets(self, changed: Mapping[str, int], lowered: Mapping[str, int] | None = None) -> None:
        """Use other budgets than the planned ones. `lowered`: budgets with which memory ran out, and the most they may now be."""
        self.budgets.use(changed, lowered)
        if changed.keys() & ROLLOUT.keys():
            self._limit_rollout()

    def _limit_rollout(self) -> None:
        now = self.budgets.now
        self._each("actor", "limit_rollout", RolloutLimits(now.kv_blocks, now.max_seqs, now.max_batched_tokens), what="rollout")

    @property
    def worker(self) -> Worker:
        """The only worker, of a run in this process."""
        assert isinstance(self.hosts.worker, Worker), "the workers of this run are in other processes"
        return self.hosts.worker

    def _ranks_of(self, role: str) -> list[int]:
        """Return the workers that have the role or, if none has it, the actor's."""
        return self._workers.get(role) or self._workers["actor"]

    def _count_parts(self, role: str) -> int:
        """Return among how many workers, or groups of workers, the role's micro-batches are dealt."""
        return len(self._ranks_of(role)) // self._sharing[role]

    def _to_each(self, role: str, parts: Sequence[Dealt]) -> list[Dealt]:
        """Give each worker of the role the part of its group."""
        return [part for part in parts for _ in range(self._sharing[role])]

    def own_workers(self, role: str) -> int:
        """Return how many workers have only this role, and so compute beside the actor's."""
        ranks = self._ranks_of(role)
        return len(ranks) if ranks != self._ranks_of("actor") else 0

    def _start(self, role: str, method: str, args: Sequence[tuple[Any, ...]], *, what: str, together: bool = False) -> WorkerCall:
        """Call a method of the workers that have the role. `args`: one tuple per worker. `together`: whether they wait for one another."""
        given = dict(zip(self._ranks_of(role), args, strict=True))
        return self.hosts.start(method, [given.get(rank) for rank in range(self.hosts.size)], what=what, together=together)

    def _results(self, role: str, call: WorkerCall) -> list[Any]:
        """Return one result for each worker that has the role."""
        found = call.results()
        return [found[rank] for rank in self._ranks_of(role)]

    def _each(self, role: str, method: str, *args: Any, what: str) -> list[Any]:
        """Make the same call on every worker that has the role, and return the results."""
        return self._results(role, self._start(role, method, [args] * len(self._ranks_of(role)), what=what))

    def _all(self, method: str, *args: Any, what: str) -> list[Any]:
        """Make the same call on every worker, and return the results."""
        return self.hosts.start(method, [args] * self.hosts.size, what=what).results()

    def held(self, method: str, args: Sequence[tuple[Any, ...]], *, what: str) -> list[Any]:
        """Call a method of the samples that each worker holds, beside what the workers compute, and return the results. A user's mistake is
        raised here, and the workers live on."""
        found = self.hosts.start("held", [(method, *own) for own in args], what=what, aside=True).results()
        raise_first(found, UserError)
        return found

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Enclose all calls of a phase: its memory is measured, and out-of-memory errors name the settings that would help."""
        ask = self._all if name in BETWEEN_STEPS else partial(self._each, PHASES.get(name, "actor"))
        ask("begin_phase", name, what=name)
        try:
            with enough_memory(name):
                yield
        except BaseException:
            with contextlib.suppress(WorkerError):  # the error that ended the phase is raised
                ask("end_phase", True, what=name)
            raise
        ask("end_phase", False, what=name)

    # -- rollout --------------------------------------------------------------------------------------------------------------------

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int) -> Generator[Any, None, None]:
        """Yield one group for each prompt as soon as it is complete; only its head, where workers hold samples. Prompts are dealt in turn:
        all of them or, with a queue, as many as the engines have seats for; the others go to whichever engine has free seats first. Workers
        that sample together get the same prompts; the first of them asks for more. If the caller stops early, they stop together."""
        size, numbered = self.sampling_groups, list(enumerate(prompts))
        seats = size * max(1, self.budgets.now.max_seqs // sampling.samples) if self._queue else len(prompts)
        queue = deque(numbered[seats:])
        longest = max((len(prompt.ids) for _, prompt in queue), default=0)
        dealt = [dict(numbered[:seats][part::size]) for part in range(size) for _ in range(self._samplers)]
        args = [(own, sampling, seed, self._version, longest) for own in dealt]
        call = self._start("actor", "generate", args, what="rollout", together=self._samplers > 1)
        ranks = self._ranks_of("actor")
        groups = {ranks[first]: ranks[first : first + self._samplers] for first in range(0, len(ranks), self._samplers)}
        try:
            for rank, item in call.items():
                if item is None or rank not in groups:  # it only shows that the worker is alive
                    continue
                if isinstance(item, FreeSeats):
                    more = dict(queue.popleft() for _ in range(min(item.groups, len(queue))))
                    for member in groups[rank]:
                        call.tell(member, more)
                elif isinstance(item, RolloutProgress):
                    self._progress.add(rank, item)
                else:
                    yield item
        finally:
            for member in ranks if self._samplers > 1 else ():  # workers that have answered get no message
                call.tell(member, StopSampling())
        found: dict[int, RolloutLimits] = {rank: each for rank, each in enumerate(call.results()) if each is not None}
        if self.budgets.lower_rollout(found, self._samplers):  # on all engines, as in a run that resumes from a checkpoint
            self._limit_rollout()

    def rollout_stats(self) -> EngineStats:
        """Return the statistics of the last `generate`, over all engines."""
        return reduce(EngineStats.beside, self.stats_of_engines())

    def stats_of_engines(self) -> list[EngineStats]:
        """Return the statistics of the last `generate`, one per engine."""
        found: list[EngineStats] = self._each("actor", "rollout_stats", what="rollout")
        return found[:: self._samplers]

    def report_rollout(self, say: Callable[[str], None], interval: float) -> None:
        """Have the engines describe their progress in one common line after every `interval` seconds of generating."""
        if self.hosts.worker:
            self.worker.report_rollout(say, interval)
        else:
            self._progress = JointProgress(self.sampling_groups, say)
            self._each("actor", "send_progress", interval, what="set-up")

    def most_tokens(self, role: str) -> int:
        """Return the most tokens that a worker had in a pass of the role."""
        return max(self._each(role, "most_tokens", role, what="a measurement"))

    def most_experts(self) -> int:
        """Return the most experts of a layer that an engine reads on one worker, whole or in part."""
        return max(self._each("actor", "most_experts", what="a measurement"))

    def most_key_heads(self) -> int:
        """Return the most key heads that an engine caches for a layer on one worker."""
        return max(self._each("actor", "most_key_heads", what="a measurement"))

    @property
    def sampling_groups(self) -> int:
        """How many groups of workers that sample together there are; a worker that samples alone is a group of one."""
        return len(self._ranks_of("actor")) // self._samplers

    def sync(self, version: int) -> Metrics:
        """Copy the trainer's changed weights to the engines, and check that all workers end up with the same."""
        found: list[SyncReport] = self._each("actor", "sync", version, what="sync")
        self._version = version
        for part in range(self._samplers):  # only members with the same part must have the same weights
            require_same([each.checksum for each in found[part :: self._samplers]], version)
        seconds, moved = max(each.seconds for each in found), max(each.moved_bytes for each in found)
        speed = {"sync/gb_per_s": moved / 1e9 / seconds} if moved else {}
        return {"sync/seconds": seconds, **speed} if moved or len(found) > 1 else {}

    # -- passes without gradient ----------------------------------------------------------------------------------------------------

    def annotate(self, role: str, field: str, rows: Sequence[AnyRow], report: Report) -> AnnotatedRows:
        """Return the rows with the role's number for each trained token, as `field`. Rows that workers hold get the numbers there."""
        return self.start_annotation(role, field, rows).finish(rows, report)

    def start_annotation(self, role: str, field: str, rows: Sequence[AnyRow]) -> StartedWork[AnnotatedRows]:
        """Begin what `annotate` does. The rows given to `finish` may have received numbers of other roles meanwhile."""

        def annotated(passes: Passes, rows: Sequence[AnyRow]) -> AnnotatedRows:
            plan, found, pads, seconds = passes
            if here := rows_here(rows):
                return AnnotatedRows(scatter(here, plan, found, field), pads, seconds)
            if rows:
                self.held("give_back", [(field,)] * self.hosts.size, what=f"a pass of the {role}")
            return AnnotatedRows(list(rows), pads, seconds)

        return self._start_passes(role, rows, field, annotated)

    def sum_logprobs(self, rows: Sequence[Row]) -> tuple[float, int]:
        """Return the sum of the actor's log-probs over all trained tokens of the rows, and the number of these tokens."""
        _, found, *_ = self._start_passes("actor", rows, "logprobs", lambda passes, rows: passes).finish(rows, lambda done, total: None)
        return sum(float(logprobs.sum(dtype=np.float64)) for logprobs in found), sum(map(len, found))

    def _start_passes(
        self, role: str, rows: Sequence[AnyRow], field: str, use: Callable[[Passes, Sequence[AnyRow]], Outcome]
    ) -> StartedWork[Outcome]:
        """Start a role's passes. `use`: makes the result from the passes and from the rows given to `finish`."""
        size, telling = self._count_parts(role), self._ranks_of(role)[:: self._sharing[role]]
        lengths, passes_of_role = [row.tokens for row in rows], BudgetedWork(role, learns=False)
        plan: list[list[int]] = []
        dealt: list[list[int]] = []

        def begin(done: int) -> WorkerCall:
            sizing = self.budgets.sizing(passes_of_role)
            plan[:] = sizing.schedule(lengths, size)
            self.budgets.note(passes_of_role, lengths, plan)
            dealt[:] = distribute(self._costs(role, plan, rows), size, self.config.train.balance, together=role in self._gathers)
            own = self._to_each(role, [[plan[place] for place in places] for places in dealt])
            given = self._bring(role, field, rows, own, whole=False)
            args = [(role, *each, sizing.packing, field) for each in zip(given, own, strict=True)]
            waits = role in self._gathers or self._sharing[role] > 1
            return self._start(role, "annotate", args, what=f"a pass of the {role}", together=waits)

        def finish(work: StartedWork[Outcome], rows: Sequence[AnyRow], report: Report) -> Outcome:
            seconds = [0.0] * size
            for failures in itertools.count(1):
                for done, _ in enumerate((item for rank, item in work.call.items() if item and rank in telling), start=1):
                    report(done, len(plan))
                of_all: list[Annotated] = self._results(role, work.call)
                results, failed = of_all[:: self._sharing[role]], failed_of(self._ranks_of(role), of_all)
                seconds = [before + each.seconds for before, each in zip(seconds, results, strict=True)]
                if not failed:
                    break
                self.budgets.lower(passes_of_role, lengths, plan, failed, failures)
                work.repeat()
            found = in_order(dealt, [each.numbers for each in results]) if rows_here(rows) else []
            return use((plan, found, sum(each.pad_tokens for each in results), seconds), rows)

        return StartedWork(begin, finish)

    def _bring(
        self, role: str, purpose: str, rows: Sequence[AnyRow], micro_batches: Sequence[Sequence[Sequence[int]]], *, whole: bool
    ) -> Sequence[dict[int, Row] | str]:
        """Get the rows of micro-batches to the role's workers. Returns what each worker's call is given: the rows, or the purpose under
        which the workers that hold them have sent them."""
        if here := rows_here(rows):
            return [chosen(here, own) for own in micro_batches]
        if not rows:
            return [{} for _ in micro_batches]
        wanted: list[list[dict[int, Hashable]]] = [[{} for _ in range(self.hosts.size)] for _ in range(self.hosts.size)]
        for rank, own in zip(self._ranks_of(role), micro_batches, strict=True):
            for index, head in chosen(rows, own).items():
                assert isinstance(head, RowHead)
                wanted[head.home][rank][index] = head.key
        self.held("exchange", [(purpose, own, whole) for own in wanted], what=purpose)
        return [purpose] * len(micro_batches)

    def _costs(self, role: str, plan: Sequence[Sequence[int]], rows: Sequence[AnyRow]) -> list[float]:
        """Return each micro-batch's cost, to deal them out evenly."""
        chosen = ([rows[index] for index in indices] for indices in plan)
        size = self._sizes[role]
        return [float(update_flops(size, [row.tokens for row in own], sum(row.trained for row in own)).total) for own in chosen]

    # -- updates --------------------------------------------------------------------------------------------------------------------

    def update(self, role: str, rows: Sequence[AnyRow], updates_before: int, report: Report) -> Metrics:
        """Make every optimizer step of a role from these rows, after `updates_before` earlier ones. Returns means over these steps, and
        counts: `updates`, and `skipped_updates`, whose gradient was not finite. The first report is made before any parameter changes."""
        return self.start_update(role, rows, updates_before, report).finish(rows, report)

    def start_update(self, role: str, rows: Sequence[AnyRow], updates_before: int, report: Report) -> StartedWork[Metrics]:
        """Begin what `update` does."""
        alone, work_of_role = role == "actor" and self.algorithm.advantage_alone, BudgetedWork(role, learns=True)
        size, together, lengths = self._count_parts(role), role in self._gathers, [row.tokens for row in rows]
        plans: list[BatchPlan] = []
        spreads: list[float] = []

        def begin(done: int) -> WorkerCall:
            sizing = self.budgets.sizing(work_of_role)
            plans[:] = self._plan_minibatches(rows, sizing, size, advantage_alone=alone)
            self.budgets.note(work_of_role, lengths, itertools.chain.from_iterable(plan.micro_batches for plan in plans))
            costs = [self._costs(role, plan.micro_batches, rows) for plan in plans]
            dealt = [distribute(each, size, self.config.train.balance, together=together) for each in costs]
            spreads[:] = [spread(*pair, together=together) for pair in zip(costs, dealt, strict=True)]
            own = [[plan.part(places[part]) for plan, places in zip(plans, dealt, strict=True)] for part in range(size)]
            parts = self._to_each(role, own)
            if not self.hosts.worker:  # progress from other processes reaches its reader only later
                report(done, self.config.algorithm.epochs * len(plans))
            micro_batches = [[indices for part in own for indices in part.micro_batches] for own in parts]
            given = self._bring(role, f"update-{role}", rows, micro_batches, whole=True)
            args = [(role, *each, updates_before, sizing.packing, done) for each in zip(given, parts, strict=True)]
            return self._start(role, "update", args, what=f"update-{role}", together=True)

        def finish(work: StartedWork[Metrics], rows: Sequence[AnyRow], report: Report) -> Metrics:
            results, failures = [UpdateSums([], 0, 0, 0.0)] * len(self._ranks_of(role)), Counter[int]()
            while True:
                for rank, done in work.call.items():
                    if done and rank == self._ranks_of(role)[0]:
                        report(*done)
                results = [before + own for before, own in zip(results, self._results(role, work.call), strict=True)]
                failed = failed_of(self._ranks_of(role), results)
                if not failed:
                    break
                made = len(results[0].steps)
                failures[made] += 1
                self.budgets.lower(work_of_role, lengths, plans[made % len(plans)].micro_batches, failed, failures[made])
                work.repeat(made)
            metrics = self._update_metrics(role, plans, results[:: self._sharing[role]])
            if alone:
                metrics[f"{role}/samples_left_out"] = len(rows) - sum(len(micro) for plan in plans for micro in plan.micro_batches)
            if size > 1 and plans:
                metrics[f"{role}/load_spread"] = float(np.mean(spreads))
            return metrics

        return StartedWork(begin, finish)

    def _update_metrics(self, role: str, plans: Sequence[BatchPlan], results: Sequence[UpdateSums]) -> Metrics:
        found = [
            reduce(LossSums.__add__, (sums for sums, _ in steps)).metrics(plan.trained_tokens, silent=plan.silent) | steps[0][1]
            for plan, *steps in zip([*plans] * self.config.algorithm.epochs, *(each.steps for each in results), strict=True)
        ]
        counts: Metrics = {
            "skipped_updates": sum(metrics.pop(f"{role}/skipped_updates") for metrics in found),
            "updates": len(found),
            "micro_batches": sum(each.micro_batches for each in results),
            "pad_tokens": sum(each.pad_tokens for each in results),
        }
        seconds = [each.seconds for each in results]
        of_workers = {"max": max(seconds), "mean": float(np.mean(seconds))} if len(results) > 1 else {}
        return {
            **mean_of(found),
            **{f"{role}/{name}": count for name, count in counts.items()},
            **{f"timing_s/workers/update_{role}/{name}": count for name, count in of_workers.items()},
        }

    def _plan_minibatches(self, rows: Sequence[AnyRow], sizing: MicroSizing, workers: int, *, advantage_alone: bool) -> list[BatchPlan]:
        if not any(row.trained for row in rows):
            return []
        make = partial(plan_minibatch, aggregation=self.algorithm.aggregation, length_norm=self.algorithm.length_norm, micro=sizing)
        parts = split_minibatches([row.group for row in rows], self.config.algorithm.minibatches_per_step)
        return [make(rows, part, advantage_alone=advantage_alone, workers=workers) for part in parts]

    def metrics(self) -> Metrics:
        """Return the memory measured since the last call and the bytes of collectives, each the most of any worker, and how far workers are
        apart in memory. Also: mean GPU utilization, bytes between the driver and workers in other processes, how often memory ran out, and
        budgets that have changed."""
        found: list[Metrics] = self._all("metrics", what="metrics")
        apart: Metrics = {}
        for ranks in self._groups:
            seen = gathered([found[rank] for rank in ranks])
            spreads = {
                f"memory_spread_gib/{name.removeprefix(MEMORY)}": max(each) - min(each)
                for name, each in seen.items()
                if len(ranks) > 1 and name.startswith(MEMORY) and name.rpartition("/")[2] in ("peak", "reserved", "process")
            }
            apart |= {name: max(apart.get(name, 0.0), each) for name, each in spreads.items()}
        failures, self.budgets.failures = self.budgets.failures, 0
        budgets = {f"budget/{name}": float(size) for name, size in self.budgets.changed.items()}
        together = {name: float(np.mean(each)) if name in OF_ALL_WORKERS else max(each) for name, each in gathered(found).items()}
        return together | apart | self._traffic() | {"perf/out_of_memory": failures, **budgets}

    def _traffic(self) -> Metrics:
        """Return the bytes between the driver and workers in other processes since the last call."""
        before, self._counted = self._counted, self._bytes()
        return dict(self._counted - before)

    def _bytes(self) -> Counter[str]:
        return Counter({"driver/bytes_out": self.hosts.sent_bytes, "driver/bytes_in": self.hosts.received_bytes})

    def pending_memory(self) -> list[dict[str, Reading]]:
        """Return each worker's memory readings that no `metrics` call has returned yet, for `restore_memory` in other processes."""
        return self._all("pending_memory", what="save")

    def restore_memory(self, pending: Sequence[Mapping[str, Reading]]) -> None:
        """Give each worker its own readings. If the number of workers has changed, every worker gets the most of all readings."""
        if len(pending) != self.hosts.size:
            phases = dict.fromkeys(phase for own in pending for phase in own)
            most = {phase: reduce(Reading.most, [own[phase] for own in pending if phase in own]) for phase in phases}
            pending = [most] * self.hosts.size
        self.hosts.start("restore_memory", [(dict(own),) for own in pending], what="set-up").results()

    # -- checkpoints ----------------------------------------------------------------------------------------------------------------

    @cached_property
    def checkpoint_bytes(self) -> int:
        """About how many bytes `save` writes."""
        return sum(self._all("checkpoint_bytes", what="save"))

    def state(self) -> dict[str, Any]:
        """Return the optimizers' counts, for a checkpoint's state."""
        found: list[dict[str, dict[str, int]]] = self._all("state", what="save")
        counts = {role: found[ranks[0]].get(role) for role, ranks in self._workers.items()}
        return {**(counts["actor"] or {}), "critic": counts.get("critic")}

    def save(self, arrays: Mapping[str, np.ndarray], folder: Path, beside: bool) -> None:
        """Write the exported model, the trainer's tensors and the caller's arrays into a checkpoint's folder. With `beside`, tensors may
        only be copied, for `finish_save` to write."""
        args = [(dict(arrays) if rank == 0 else {}, folder, beside) for rank in range(self.hosts.size)]
        raise_first(self.hosts.start("save", args, what="save").results(), OSError)

    def finish_save(self) -> Digests:
        """Write the rest of the last `save`. Safe in any thread: it reads nothing that training changes. Returns the digests of files that
        are known already."""
        found: list[Digests] = self.hosts.start("finish_save", [()] * self.hosts.size, what="save", aside=True).results()
        raise_first(found, OSError)
        return {name: digest for digests in found for name, digest in digests.items()}

    def keep_output(self, folder: Path) -> None:
        """Have workers in other processes append their output to files in this folder, one per worker."""
        self.hosts.keep_output(folder)

    def hurry(self) -> str:
        """Prepare to stop the run: have stuck workers given up soon. Returns what the stop waits for, in words; empty if nothing."""
        self.hosts.hurry()
        return "" if self.hosts.worker else "the workers have finished what they do"

    def close(self) -> None:
        if self.hosts.worker:  # otherwise everything ends with the worker's process
            self._all("close", what="the end")
        self.hosts.close()


def require_same(checksums: Sequence[str | None], version: int) -> None:
    """Refuse weights that are not the same on all workers."""
    if differing := who_differs(dict(enumerate(checksums))):
        raise UserError(
            f"the weights of {differing} after step {version}, though every worker must have the same: the memory of a device may be "
            "faulty, or other code has changed a model. Resume from the last checkpoint, and leave out the device if this happens again"
        )


def require_same_models(role: str, replicas: Mapping[int, Replica]) -> None:
    """Refuse to begin if workers have loaded different parameters. `replicas`: by rank, for the workers that have the role."""
    for part in {each.part for each in replicas.values()}:
        if differing := who_differs({rank: each.checksum for rank, each in replicas.items() if each.part == part}):
            raise UserError(
                f"the {role}'s parameters on {differing} after loading, though every worker must have the same: a machine may have "
                "other or damaged files of the model. Compare the files on all machines, and copy or download them again"
            )


def who_differs(checksums: Mapping[int, str | None]) -> str:
    """Name the workers whose checksum differs from the most common one; empty if all are the same. `checksums`: by rank."""
    (usual, count), *others = Counter(checksums.values()).most_common()
    if not others:
        return ""
    odd = [rank for rank, each in checksums.items() if each != usual] if count > 1 else list(checksums)
    who = ("worker " if len(odd) == 1 else "workers ") + joined([str(rank) for rank in odd], "and")
    return f"{who} differ from those of the other {many(count, 'worker')}" if count > 1 else f"{who} differ"


def raise_first(found: Sequence[Any], kind: type[Exception]) -> None:
    """Raise the first error that workers have returned as a result."""
    for each in found:
        if isinstance(each, kind):
            raise each


def failed_of(ranks: Sequence[int], results: Sequence[Annotated | UpdateSums]) -> dict[int, str]:
    """Return what was reported by each worker whose work ended because memory ran out."""
    return {rank: each.failure for rank, each in zip(ranks, results, strict=True) if each.failure is not None}


def rows_here(rows: Sequence[AnyRow]) -> list[Row]:
    """Return the rows, or nothing if workers hold them."""
    return [row for row in rows if isinstance(row, Row)]


def chosen(rows: Sequence[SomeRow], micro_batches: Sequence[Sequence[int]]) -> dict[int, SomeRow]:
    """Return the rows of these micro-batches, by index."""
    return {index: rows[index] for indices in micro_batches for index in indices}


def gathered(found: Sequence[Metrics]) -> dict[str, list[float]]:
    """Collect all values of each metric."""
    names = dict.fromkeys(name for metrics in found for name in metrics)
    return {name: [metrics[name] for metrics in found if name in metrics] for name in names}


def mean_of(found: Sequence[Metrics]) -> Metrics:
    """Average each metric over the optimizer steps that have it."""
    return {name: float(np.mean(values)) for name, values in gathered(found).items()}
