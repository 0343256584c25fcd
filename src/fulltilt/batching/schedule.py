"""Which rows go together: mini-batches of whole groups, micro-batches under a token cap. No tensors, only lengths.

Enters: group numbers or lengths of rows. Leaves: lists of row indices, ascending within each list. Guaranteed, for all functions:
- every row is in exactly one list, and no list is empty;
- the result depends only on the arguments, never on chance or time;
- no number has to be divisible by another.
For micro-batches also:
- `fill` never puts more than `budget` tokens together, except that a longer row gets a micro-batch of its own;
- if `fill` makes two or more micro-batches, they are fewer than 2 * tokens / budget; of two ways with equally many it takes the one whose
  largest micro-batch is smaller and needs less memory, usually the even one;
- the largest (most tokens) comes first, so that a budget too large for memory fails at once and not at the end.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np


def split_minibatches(groups: Sequence[int], count: int) -> list[list[int]]:
    """Splits the rows of a step, given each row's group, into `count` mini-batches of whole groups, in the order of group numbers.

    Mini-batches differ by at most one group, the earlier ones being larger. With fewer groups than `count` there are fewer mini-batches: an
    empty one would still move the optimizer. Example: groups [0, 0, 1, 2, 2], 2 mini-batches -> [[0, 1, 2], [3, 4]]
    """
    assert count > 0, f"{count} mini-batches"
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    parts = np.array_split(sorted(members), min(count, len(members))) if members else []
    return [sorted(row for group in part for row in members[group]) for part in parts]


def fill(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Micro-batches under a hard cap of `budget` tokens: as few as a tight fit needs, about equally full.

    Example: lengths [5, 9, 4, 3], budget 8 -> [[1], [2, 3], [0]]
    """
    assert budget > 0, f"a budget of {budget} tokens"
    assert all(length > 0 for length in lengths), "a row without tokens"
    longest_first = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    alone = [[row] for row in longest_first if lengths[row] > budget]
    others = longest_first[len(alone) :]
    tight = _tightly(others, lengths, budget)
    even = _evenly(others, lengths, len(tight))
    fitting = min(even, tight, key=lambda found: max((_tokens(rows, lengths) for rows in found), default=0))
    return _largest_first([*alone, *fitting], lengths)


def _tightly(longest_first: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Each row into the fullest micro-batch that still takes it. Any two hold more than `budget` tokens together."""
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
    """Each row into the emptiest of `count` micro-batches."""
    micro_batches: list[list[int]] = [[] for _ in range(count)]
    taken = [(0, number) for number in range(count)]  # (tokens, micro-batch), a heap
    for row in longest_first:
        tokens, chosen = taken[0]
        micro_batches[chosen].append(row)
        heapq.heapreplace(taken, (tokens + lengths[row], chosen))
    return micro_batches


def fill_padded(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Like `fill`, for rows that are padded to the longest of their micro-batch; pads count. Rows of similar length go together, since
    this needs the fewest pads.

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
    return _largest_first(micro_batches, lengths, padded=True)


def fixed(lengths: Sequence[int], samples: int, *, padded: bool = False) -> list[list[int]]:
    """Micro-batches of `samples` neighbouring rows each, whatever their lengths; the last may have fewer."""
    assert samples > 0, f"{samples} samples in a micro-batch"
    rows = range(len(lengths))
    return _largest_first([list(rows[start : start + samples]) for start in rows[::samples]], lengths, padded)


def _tokens(rows: list[int], lengths: Sequence[int], padded: bool = False) -> int:
    return len(rows) * max(lengths[row] for row in rows) if padded else sum(lengths[row] for row in rows)


def _largest_first(micro_batches: list[list[int]], lengths: Sequence[int], padded: bool = False) -> list[list[int]]:
    return sorted((sorted(rows) for rows in micro_batches), key=lambda rows: (-_tokens(rows, lengths, padded), rows[0]))
