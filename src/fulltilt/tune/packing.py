"""How many micro-batches a run of ours makes, and how large the largest is: what its own scheduler does with rows of the lengths to expect.

Enters: a `RunDescription` and a token budget. Leaves: `Packing`. Guaranteed: arithmetic alone, the same numbers each time; the rules are
those of batching/schedule.py, which packs real rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from fulltilt.batching.schedule import fill
from fulltilt.tune.description import RunDescription
from fulltilt.tune.lengths import Lengths

MOST_ROWS = 1024  # that are packed
GOLDEN = (math.sqrt(5) - 1) / 2  # steps of this size around a circle spread evenly, however many there are


@dataclass(frozen=True)
class Packing:
    """The micro-batches of a mini-batch, in one group of GPUs that compute them together."""

    count: int
    largest: float  # tokens of the largest, on each GPU
    read: float = 0.0  # response tokens of the one that has most, on each GPU


def packing(run: RunDescription, budget: int, minibatches: int) -> Packing:
    """Micro-batches of the rows that one group of GPUs has in a mini-batch."""
    layout = run.layout
    together = layout.context * layout.sequence
    rows = run.batch.rows / minibatches / run.data
    found = packed(run.lengths, max(1, math.ceil(rows)), budget * together)
    heavier = run.lengths.imbalance(run.data, int(rows))  # the group with most tokens
    return Packing(math.ceil(found.count * heavier), found.largest / together, found.read / together)


@cache
def packed(lengths: Lengths, rows: int, budget: int) -> Packing:
    """Pack the rows, or, where there are many, some that stand for all."""
    times = max(1.0, rows / MOST_ROWS)
    pairs = spread(lengths, min(rows, MOST_ROWS))
    tokens = [max(1, round(prompt + response)) for prompt, response in pairs]
    micro_batches = fill(tokens, budget)
    largest = max(sum(tokens[row] for row in micro) for micro in micro_batches)
    read = max(sum(pairs[row][1] for row in micro) for micro in micro_batches)
    longest = lengths.longest_of(rows)  # which may be longer than any that stands for others
    return Packing(math.ceil(len(micro_batches) * times), max(largest, lengths.prompt + longest), max(read, longest))


def spread(lengths: Lengths, rows: int) -> list[tuple[float, float]]:
    """Prompt and response tokens of so many rows: responses as their distribution has them, prompts evenly between a least and the most,
    if their mean allows that."""
    width, quantiles = lengths.prompt_width, lengths.responses
    prompts = [lengths.prompt + width * ((row + 1) * GOLDEN % 1 - 0.5) for row in range(rows)]
    responses = [quantiles[int((row + 0.5) * len(quantiles) / rows)] for row in range(rows)]
    total = sum(responses)
    return [(prompt, response * lengths.response * rows / total) for prompt, response in zip(prompts, responses, strict=True)]
