"""Division of rows into mini-batches of whole groups and micro-batches under a token cap, and of micro-batches among workers. No tensors,
only lengths and costs.

Enters: group numbers or lengths of rows, or costs of micro-batches. Leaves: lists of indices, ascending within each list. Guaranteed, for
all functions:
- every row or micro-batch is in exactly one list, and no list is empty, except that a worker may get no micro-batch;
- the result depends only on the arguments, never on chance or time;
- no number has to be divisible by another.
For micro-batches also:
- `fill` never puts more than `budget` tokens together, except that a longer row gets a micro-batch of its own;
- if `fill` makes two or more micro-batches, they are fewer than 2 * tokens / budget; of two ways with equally many it takes the one whose
  largest micro-batch is smaller and needs less memory, usually the even one;
- with `multiple`, `fill` and `fill_padded` make more, but only to the next multiple of it, and never more than there are rows;
- the largest (most tokens) comes first, so that a budget too large for memory fails at once and not at the end. Within each worker's list
  that stays so.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TypeVar

import numpy as np

Halves = tuple[list[int], list[int]]
Result = TypeVar("Result")


def split_minibatches(groups: Sequence[int], count: int) -> list[list[int]]:
    """Split the rows of a step, given each row's group, into `count` mini-batches of whole groups, in the order of group numbers.

    Mini-batches differ by at most one group, the earlier ones being larger. With fewer groups than `count` there are fewer mini-batches: an
    empty one would still move the optimizer. Example: groups [0, 0, 1, 2, 2], 2 mini-batches -> [[0, 1, 2], [3, 4]]
    """
    assert count > 0, f"{count} mini-batches"
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    parts = np.array_split(sorted(members), min(count, len(members))) if members else []
    return [sorted(row for group in part for row in members[group]) for part in parts]


def fill(lengths: Sequence[int], budget: int, multiple: int = 1) -> list[list[int]]:
    """Return micro-batches under a hard cap of `budget` tokens: as few as a tight fit needs, about equally full. With `multiple` workers,
    each gets equally many if there are enough rows: otherwise most workers would wait for the one with the last micro-batch.

    Example: lengths [5, 9, 4, 3], budget 8 -> [[1], [2, 3], [0]]; for multiples of 2 -> [[1], [0], [2], [3]]
    """
    assert budget > 0, f"a budget of {budget} tokens"
    assert all(length > 0 for length in lengths), "a row without tokens"
    longest_first = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    alone = [[row] for row in longest_first if lengths[row] > budget]
    others = longest_first[len(alone) :]
    fewest = _tightly(others, lengths, budget)
    count = _rounded_up(len(alone) + len(fewest), multiple, len(lengths)) - len(alone)
    tight = _cut_up(fewest, count, lambda rows: _tokens(rows, lengths), lambda rows: (rows[::2], rows[1::2]))
    even = _evenly(others, lengths, count)
    fitting = min(even, tight, key=lambda found: max((_tokens(rows, lengths) for rows in found), default=0))
    return _largest_first([*alone, *fitting], lengths)


def _tightly(longest_first: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Put each row into the fullest micro-batch that still has room for it. Any two micro-batches hold more than `budget` tokens
    together."""
    micro_batches: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens still free, micro-batch), ascending
    for row in longest_first:
        length = lengths[row]
        place = bisect_left(room, (length, -1))
        if place < len(room):
            free, chosen = room.pop(place)
        else:
            free, chosen = budget, len(micro_batches)
            micro_batches.append([])
        micro_batches[chosen].append(row)
        insort(room, (free - length, chosen))
    return micro_batches


def _evenly(longest_first: Sequence[int], lengths: Sequence[int], count: int) -> list[list[int]]:
    """Put each row into the emptiest of `count` micro-batches."""
    micro_batches: list[list[int]] = [[] for _ in range(count)]
    taken = [(0, number) for number in range(count)]  # (tokens, micro-batch), a heap
    for row in longest_first:
        tokens, chosen = taken[0]
        micro_batches[chosen].append(row)
        heapq.heapreplace(taken, (tokens + lengths[row], chosen))
    return micro_batches


def _rounded_up(count: int, multiple: int, rows: int) -> int:
    """Return the number of micro-batches that can be dealt evenly, but no more than there are rows."""
    assert multiple > 0, f"multiples of {multiple} micro-batches"
    return min(-(-count // multiple) * multiple, rows)


def _cut_up(
    micro_batches: list[list[int]], count: int, size: Callable[[list[int]], int], halves: Callable[[list[int]], Halves]
) -> list[list[int]]:
    """Return the same rows in `count` micro-batches: the largest one with several rows is cut in two, until there are enough."""
    single = [rows for rows in micro_batches if len(rows) == 1]
    several = [(-size(rows), rows) for rows in micro_batches if len(rows) > 1]
    heapq.heapify(several)
    while len(single) + len(several) < count:
        for part in halves(heapq.heappop(several)[1]):
            if len(part) > 1:
                heapq.heappush(several, (-size(part), part))
            else:
                single.append(part)
    return [*single, *(rows for _, rows in several)]


def fill_padded(lengths: Sequence[int], budget: int, multiple: int = 1) -> list[list[int]]:
    """Return micro-batches like `fill`, for rows that are padded to the longest of their micro-batch; pads count. Rows of similar length go
    together, since this needs the fewest pads.

    Example: lengths [5, 9, 4, 3], budget 8 -> [[1], [2, 3], [0]]
    """
    assert budget > 0, f"a budget of {budget} tokens"
    assert all(length > 0 for length in lengths), "a row without tokens"
    longest_first = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    micro_batches = []
    while longest_first:
        count = max(1, budget // lengths[longest_first[0]])
        micro_batches.append(longest_first[:count])
        longest_first = longest_first[count:]
    count = _rounded_up(len(micro_batches), multiple, len(lengths))
    cut = _cut_up(
        micro_batches,
        count,
        lambda rows: _tokens(rows, lengths, padded=True),
        lambda rows: (rows[: len(rows) // 2], rows[len(rows) // 2 :]),
    )
    return _largest_first(cut, lengths, padded=True)


def fixed(lengths: Sequence[int], samples: int, *, padded: bool = False) -> list[list[int]]:
    """Return micro-batches of `samples` neighbouring rows each, whatever their lengths; the last may have fewer."""
    assert samples > 0, f"{samples} samples in a micro-batch"
    rows = range(len(lengths))
    return _largest_first([list(rows[start : start + samples]) for start in rows[::samples]], lengths, padded)


def distribute(costs: Sequence[float], workers: int, balance: bool = True, *, together: bool = False) -> list[list[int]]:
    """Return each worker's micro-batches: the costliest are dealt first, each to the worker with the least cost so far, so that all workers
    take about as long. `together`: whether workers wait for one another in every micro-batch, so that those of similar cost must run at the
    same time. Without `balance`, workers get micro-batches in turn. A single worker gets all in their order.

    Example: costs [9, 7, 6, 5, 4], 2 workers -> [[0, 3], [1, 2, 4]]; in turn -> [[0, 2, 4], [1, 3]]
    """
    assert workers > 0, f"{workers} workers"
    costliest_first = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
    if not balance or together:
        order = costliest_first if balance and workers > 1 else list(range(len(costs)))
        return [order[worker::workers] for worker in range(workers)]
    parts: list[list[int]] = [[] for _ in range(workers)]
    taken = [(0.0, 0, worker) for worker in range(workers)]  # (cost, micro-batches, worker), a heap
    for index in costliest_first:
        cost, count, worker = taken[0]
        parts[worker].append(index)
        heapq.heapreplace(taken, (cost + costs[index], count + 1, worker))
    return [sorted(part) for part in parts]


def in_order(parts: Sequence[Sequence[int]], found: Sequence[Sequence[Result]]) -> list[Result]:
    """Return the workers' results in the order of micro-batches. `found`: one result for each micro-batch of each worker's part."""
    pairs = [pair for part, own in zip(parts, found, strict=True) for pair in zip(part, own, strict=True)]
    results = dict(pairs)
    assert sorted(results) == list(range(len(pairs))), "a micro-batch is missing, or there twice"
    return [results[index] for index in range(len(pairs))]


def spread(costs: Sequence[float], parts: Sequence[Sequence[int]], *, together: bool = False) -> float:
    """Return the cost that everyone waits for, divided by the mean over the workers: 1 if all have equal costs. That is the cost of the
    worker with most or, if workers compute `together`, the sum of each pass's costliest micro-batch."""
    own = [[costs[index] for index in part] for part in parts]
    slowest = sum(map(max, zip_longest(*own, fillvalue=0.0))) if together else max(map(sum, own))
    return slowest * len(own) / sum(costs) if sum(costs) else 1.0


def _tokens(rows: list[int], lengths: Sequence[int], padded: bool = False) -> int:
    return len(rows) * max(lengths[row] for row in rows) if padded else sum(lengths[row] for row in rows)


def _largest_first(micro_batches: list[list[int]], lengths: Sequence[int], padded: bool = False) -> list[list[int]]:
    return sorted((sorted(rows) for rows in micro_batches), key=lambda rows: (-_tokens(rows, lengths, padded), rows[0]))
