"""Decisions in a running run: token budgets follow the memory that was measured.

Enters: memory and tokens of a step's passes on the worker that needed most, and the memory of its device. Leaves: a new token budget with
its reason, or none. Guaranteed: no decision reads a clock; a budget never exceeds the plan's budget, or the one that was left when memory
ran out, and never goes below the longest sample; it only decides which samples are computed together, so no gradient depends on it. Free of
torch.
"""

from __future__ import annotations

from dataclasses import dataclass

GOAL = 0.85  # share of the device's memory that a changed budget should fill
NEAR = 0.95  # a peak above this share of the device is too close to its end
WORTHWHILE = 1.25  # a budget is raised only by this factor or more,
MOST_AT_ONCE = 2.0  # and by no more than this one: the memory of passes is known only for the size that was measured
GIB = 2**30


@dataclass(frozen=True)
class MeasuredPasses:
    """Memory and tokens of a step's passes of one kind."""

    peak: float  # bytes of everything on the device
    activations: float  # bytes of the peak that are allocated and freed with each micro-batch
    tokens: int  # tokens of the largest micro-batch
    longest: int  # tokens of the longest sample

    def peak_with(self, tokens: int) -> float:
        """Return the peak that is expected with micro-batches of this many tokens."""
        return self.peak + self.activations * (tokens / self.tokens - 1)

    def tokens_for(self, peak: float) -> int:
        """Return the most tokens of a micro-batch whose peak stays within this one."""
        return max(0, int(self.tokens * (1 + (peak - self.peak) / self.activations)))


@dataclass(frozen=True)
class BudgetChange:
    budget: int
    reason: str


def follow(budget: int, most: int, seen: MeasuredPasses, device: float) -> BudgetChange | None:
    """Return the budget of the next step, if it changes. `most`: the plan's budget, or the one that was left when memory ran out. `device`:
    the bytes of its memory.

    Example: 16384 tokens at most, of which 8192 are allowed, took 30 GiB of 80, 10 of them activations -> 16384, expected to take 40 GiB
    """
    if seen.tokens <= 0 or seen.activations <= 0 or device <= 0:
        return None
    fitting = max(seen.longest, seen.tokens_for(GOAL * device))
    measured = f"the peak was {seen.peak / GIB:.1f} of {device / GIB:.1f} GiB with {seen.tokens} tokens"
    if seen.peak > NEAR * device:
        lower = min(budget, fitting)
        return BudgetChange(lower, f"{measured}, too close to the end") if lower < min(budget, seen.tokens) else None
    higher = min(most, fitting, int(MOST_AT_ONCE * seen.tokens))
    if higher < WORTHWHILE * budget:
        return None
    return BudgetChange(higher, f"{measured}, and {seen.peak_with(higher) / GIB:.1f} GiB are expected with {higher}")
