"""The current budgets of a run: those of its plan, until memory runs out or measurements change them.

Enters: the plan's budgets, and where memory ran out. Leaves: sizes of micro-batches, and one line for the user about each change.
Guaranteed: a budget says only which rows are computed together, so no gradient depends on it; a lowered budget stays low, also in a run
that resumes from a checkpoint; memory that runs out `MOST_FAILURES` times in a row for the same work ends the run with an error that names
the settings that would help.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from fulltilt.batching.pack import MicroSizing
from fulltilt.cluster.sizes import forward_sizes, update_sizes
from fulltilt.cluster.worker import out_of_memory
from fulltilt.plan.budgets import Budgets
from fulltilt.records import RunWarning
from fulltilt.rollout.engine import RolloutLimits
from fulltilt.schema import Config
from fulltilt.words import joined

MOST_FAILURES = 3
UPDATES = {"actor": "token_budget", "critic": "critic_token_budget"}
PASSES = {
    "actor": "forward_token_budget",
    "ref": "ref_token_budget",
    "critic": "critic_forward_token_budget",
    "reward_model": "reward_model_token_budget",
}
ROLLOUT = {"kv_blocks": "blocks", "max_seqs": "samples at once", "max_batched_tokens": "tokens in a prefill pass"}
PHASES_OF_PASSES = {"actor": "old-logprob", "ref": "ref-logprob", "critic": "values", "reward_model": "reward"}


def warn(text: str) -> None:
    warnings.warn(text, RunWarning, stacklevel=2)


@dataclass(frozen=True)
class BudgetedWork:
    """One kind of work of a role: its updates, or its passes without gradient."""

    role: str
    learns: bool

    @property
    def budget(self) -> str:
        """The name of the token budget for this work."""
        return (UPDATES if self.learns else PASSES)[self.role]

    @property
    def phase(self) -> str:
        return f"update-{self.role}" if self.learns else PHASES_OF_PASSES[self.role]


@dataclass(frozen=True)
class MicroBatchTokens:
    largest: int  # tokens of the largest micro-batch, per worker that computes it
    longest: int  # tokens of the longest row, per worker


def differing(budgets: Budgets, planned: Budgets) -> dict[str, int]:
    before = asdict(planned)
    return {name: size for name, size in asdict(budgets).items() if size != before[name]}


class LiveBudgets:
    def __init__(self, config: Config, planned: Budgets, sharing: Mapping[str, int], workers: int) -> None:
        """`sharing`: how many workers compute a role's micro-batch together."""
        self.config, self.planned, self.now = config, planned, planned
        self.most = planned  # limits above which no budget is raised; below the plan once memory has run out
        self.seen: dict[BudgetedWork, MicroBatchTokens] = {}  # largest micro-batches by kind of work, until the caller clears them
        self.say: Callable[[str], None] = warn
        self.failures = 0  # how often memory ran out and the run continued, since the caller last set it to 0
        self._sharing, self._several = sharing, workers > 1

    @property
    def changed(self) -> dict[str, int]:
        """The budgets that differ from the plan, for a checkpoint."""
        return differing(self.now, self.planned)

    @property
    def lowered(self) -> dict[str, int]:
        """The limits that are below the plan, for a checkpoint."""
        return differing(self.most, self.planned)

    def use(self, changed: Mapping[str, int], lowered: Mapping[str, int] | None = None) -> None:
        """Use other budgets than the planned ones. `lowered`: budgets with which memory ran out, and the most they may now be."""
        self.now = replace(self.now, **changed)
        self.most = replace(self.most, **(lowered or {}))

    def by_auto(self, work: BudgetedWork) -> bool:
        """Return whether all sizes of these micro-batches are left to fulltilt."""
        roles = ("actor", "critic") if work.role == "critic" else (work.role,)  # the critic's sizes follow from the actor's
        keys = ("micro_batch", "token_budget", "forward_token_budget")
        return all(getattr(getattr(self.config, role), key, None) in (None, "auto") for role in roles for key in keys)

    def note(self, work: BudgetedWork, lengths: Sequence[int], micro_batches: Iterable[Sequence[int]]) -> None:
        """Remember the largest of these micro-batches, which are about to be computed."""
        members, before = self._sharing.get(work.role, 1), self.seen.get(work, MicroBatchTokens(0, 0))
        largest = max((sum(lengths[row] for row in rows) for rows in micro_batches), default=0) // members
        self.seen[work] = MicroBatchTokens(max(before.largest, largest), max(before.longest, max(lengths, default=0) // members))

    def sizing(self, work: BudgetedWork) -> MicroSizing:
        return (update_sizes if work.learns else forward_sizes)(self.config, self.now, self._sharing)[work.role]

    def lower(
        self, work: BudgetedWork, lengths: Sequence[int], micro_batches: Sequence[Sequence[int]], failed: Mapping[int, str], failures: int
    ) -> None:
        """Lower the token budget to make these micro-batches smaller, after memory ran out in one of them. `lengths`: tokens of each row.
        `failed`: what each worker reported; empty if it was another worker that ran out. `failures`: how often memory ran out in a row."""
        self.failures += 1
        rank, reported = next(((rank, text) for rank, text in failed.items() if text), next(iter(failed.items())))
        where = f" on worker {rank}" if self._several else ""
        if failures >= MOST_FAILURES:
            raise out_of_memory(work.phase, f"{where} {failures} times in a row, in spite of smaller micro-batches", reported)
        sizing, before = self.sizing(work), getattr(self.now, work.budget)
        smaller = smaller_budget(sizing, lengths, micro_batches)
        if smaller is not None:
            smaller //= self._sharing.get(work.role, 1)
            self.use({work.budget: smaller}, {work.budget: smaller})
            change = f"{work.budget} is lowered from {before} to {getattr(self.now, work.budget)} tokens"
        elif sizing.micro_batch is None:
            change = f"{work.budget} stays at {before} tokens, since every micro-batch has one sample; unused memory is given back"
        else:
            change = (
                f"{work.role}.micro_batch = {sizing.micro_batch} is set, so micro-batches stay as they are; unused memory is given back"
            )
        again = "the mini-batch is" if work.learns else "all passes are"
        self.say(f"out of memory in {work.phase}{where}: {reported.rstrip('.')}. {change}, and {again} computed again")

    def lower_rollout(self, found: Mapping[int, RolloutLimits], together: int = 1) -> bool:
        """Lower the limits of rollouts to what engines could keep in memory. `found`: limits by worker. `together`: how many workers form
        an engine, all with the same limits. Returns whether anything has changed."""
        failures = {rank: own for rank, each in found.items() if (own := list(filter(None, each.failures)))}
        self.failures += sum(len(each.failures) for each in found.values()) // together
        before = self.now
        least = {name: min([getattr(before, name), *(getattr(each, name) for each in found.values())]) for name in ROLLOUT}
        lowered = {name: size for name, size in least.items() if size < getattr(before, name)}
        self.use(least, lowered)
        changes = [f"{name} is lowered from {getattr(before, name)} to {size} {ROLLOUT[name]}" for name, size in lowered.items()]
        if failures:
            ranks = joined([str(rank) for rank in failures], "and")
            where = f" on worker{'s' if len(failures) > 1 else ''} {ranks}" if self._several else ""
            reported = next(iter(failures.values()))[0].rstrip(".")
            change = joined(changes, "and") or "Nothing can be lowered any more; unused memory was given back"
            again = "samples that were interrupted went on from the tokens they had"
            self.say(f"out of memory in rollout{where}: {reported}. {change}; {again}")
        return bool(lowered)


def smaller_budget(sizing: MicroSizing, lengths: Sequence[int], micro_batches: Sequence[Sequence[int]]) -> int | None:
    """Return about half the tokens of the largest micro-batch, so that it is cut in two, but no fewer than its longest row has. Returns
    None if it has one row, or as many rows as the user has set.

    Example: lengths [5, 9, 4, 3], micro-batches [[1, 0], [2, 3]] -> 9; [[2, 3], [0], [1]] -> None
    """
    if sizing.micro_batch is not None or not micro_batches:
        return None

    def tokens(rows: Sequence[int]) -> int:
        return sum(lengths[row] for row in rows) if sizing.packing else len(rows) * max(lengths[row] for row in rows)

    largest = max((rows for rows in micro_batches if len(rows) > 1), key=tokens, default=())
    return max(tokens(largest) // 2, *(lengths[row] for row in largest)) if largest else None
