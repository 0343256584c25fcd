"""Number and size of the micro-batches of a run of fulltilt: the result of its own scheduler on rows of the expected lengths.

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

MOST_ROWS = 1024  # most rows that are packed
GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of this, modulo 1, are spread evenly, however many there are


@dataclass(frozen=True)
class Packing:
    """The micro-batches of a mini-batch, in one group of GPUs that compute them together."""

    count: int
    largest: float  # tokens of the largest micro-batch, on each GPU
    read: float = 0.0  # response tokens of the micro-batch with the most, on each GPU


def packing(run: RunDescription, budget: int, minibatches: int) -> Packing:
    """Return the micro-batches of the rows that one group of GPUs has in a mini-batch."""
    layout = run.layout
    together = layout.context * layout.sequence
    rows = run.batch.rows / minibatches / run.data
    found = packed(run.lengths, max(1, math.ceil(rows)), budget * together)
    heavier = run.lengths.imbalance(run.data, int(rows))  # the group with most tokens
    return Packing(math.ceil(found.count * heavier), found.largest / together, found.read / together)


@cache
def packed(lengths: Lengths, rows: int, budget: int) -> Packing:
    """Pack the rows or, if there are many, a sample that represents them."""
    times = max(1.0, rows / MOST_ROWS)
    pairs = spread(lengths, min(rows, MOST_ROWS))
    tokens = [max(1, round(prompt + response)) for prompt, response in pairs]
    micro_batches = fill(tokens, budget)
    largest = max(sum(tokens[row] for row in micro) for micro in micro_batches)
    read = max(sum(pairs[row][1] for row in micro) for micro in micro_batches)
    longest = lengths.longest_of(rows)  # the longest row may be longer than any in the sample
    return Packing(math.ceil(len(micro_batches) * times), max(largest, lengths.prompt + longest), max(read, longest))


def spread(lengths: Lengths, rows: int) -> list[tuple[float, float]]:
    """Return prompt and response tokens of `rows` rows: responses follow their distribution, prompts are spread evenly between a least and
    the most, if their mean allows that."""
    width, quantiles = lengths.prompt_width, lengths.responses
    prompts = [lengths.prompt + width * ((row + 1) * GOLDEN % 1 - 0.5) for row in range(rows)]
    responses = [quantiles[int((row + 0.5) * len(quantiles) / rows)] for row in range(rows)]
    total = sum(responses)
    return [(prompt, response * lengths.response * rows / total) for prompt, response in zip(prompts, responses, strict=True)]
