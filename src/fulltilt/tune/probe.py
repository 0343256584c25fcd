"""The probe: what micro-batches of an update take on this device, fitted to a few that were measured at the start of a run.

Enters: `UpdatePass` records. Leaves: `UpdateCosts`, which plan.py sizes token budgets by. Guaranteed: pure Python; every coefficient stands
for something physical and is not negative; costs are measured once for a model, its settings and a device, and kept in the user's cache
folder (`XDG_CACHE_HOME`, or ~/.cache), a file of which may be lost or damaged without harm; with `run.deterministic` no seconds are
measured, nor read from the cache.

Bytes = fixed + token_bytes x tokens: what layers keep for the backward pass grows with tokens.
Seconds = fixed + token_s x tokens + pair_s x pairs: the host's launches, matrix products and memory traffic, and attention.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from fulltilt.observe.metrics import write_whole
from fulltilt.records import UpdateCosts, UpdatePass

Measure = Callable[[bool], Sequence[UpdatePass]]  # whether seconds are measured, too
LEAST_TIMED = 4  # passes, with fewer of which seconds are not fitted: there are three coefficients, and noise
FORM = 1  # of the files in the cache


# ---- the fit -----------------------------------------------------------------------------------------------------------------------------


def fit(passes: Sequence[UpdatePass]) -> UpdateCosts:
    """The costs that come closest to what was measured, by relative error."""
    sized = [(own, own.bytes) for own in passes if own.bytes is not None]
    timed = [(own, own.seconds) for own in passes if own.seconds is not None]
    timed = timed if len(timed) >= LEAST_TIMED else []
    nothing: Sequence[float | None] = (None, None, None)
    of_bytes = nonnegative_fit([[1.0, own.tokens] for own, _ in sized], [count for _, count in sized]) if sized else nothing
    of_time = nonnegative_fit([[1.0, own.tokens, own.pairs] for own, _ in timed], [count for _, count in timed]) if timed else nothing
    largest = max((own.tokens for own in passes), default=0)
    found = UpdateCosts(of_bytes[0], of_bytes[1], of_time[0], of_time[1], of_time[2], largest=largest)
    errors = [abs((found.bytes(own.tokens) or 0) / count - 1) for own, count in sized if count]
    errors += [abs((found.seconds(own.tokens, own.pairs) or 0.0) / count - 1) for own, count in timed if count]
    return replace(found, error=max(errors, default=0.0))


def nonnegative_fit(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """The coefficients, none below 0, with the least squares of relative errors. There are few: every choice of those that are above 0 is
    solved, and the best solution that has none below 0 is taken."""
    scaled = [[number / target for number in row] for row, target in zip(rows, targets, strict=True) if target > 0]
    count = len(rows[0])
    best, least = [0.0] * count, float(len(scaled))
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            solution = least_squares([[row[place] for place in chosen] for row in scaled])
            if solution is None or min(solution) < 0:
                continue
            found = [0.0] * count
            for place, value in zip(chosen, solution, strict=True):
                found[place] = value
            missed = sum((sum(own * value for own, value in zip(row, found, strict=True)) - 1.0) ** 2 for row in scaled)
            if missed < least - 1e-12:  # fewer coefficients, where more do not come closer
                best, least = found, missed
    return best


def least_squares(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """The solution of rows x solution = 1 with least squares, by the normal equations; None: it is not determined."""
    if len(rows) < len(rows[0]):
        return None
    size = len(rows[0])
    scale = [max(abs(row[place]) for row in rows) or 1.0 for place in range(size)]  # tokens and their squares differ by orders of magnitude
    even = [[number / own for number, own in zip(row, scale, strict=True)] for row in rows]
    matrix = [
        [sum(row[one] * row[other] for row in even) for other in range(size)] + [sum(row[one] for row in even)] for one in range(size)
    ]
    for place in range(size):
        pivot = max(range(place, size), key=lambda own: abs(matrix[own][place]))
        matrix[place], matrix[pivot] = matrix[pivot], matrix[place]
        if abs(matrix[place][place]) < 1e-12:
            return None
        for other in range(size):
            if other != place:
                times = matrix[other][place] / matrix[place][place]
                matrix[other] = [own - times * above for own, above in zip(matrix[other], matrix[place], strict=True)]
    return [matrix[place][size] / matrix[place][place] / scale[place] for place in range(size)]


# ---- the cache ---------------------------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path("~/.cache").expanduser()) / "fulltilt" / "probes"


@dataclass(frozen=True)
class Prober:
    """Finds the costs of a role's updates: from the cache, or by measuring. It travels to the process of a worker."""

    clock: bool = True  # False: nothing reads a clock
    folder: Path | None = None  # None: the user's cache

    def __call__(self, about: str, measure: Measure) -> UpdateCosts | None:
        """`about`: everything that the costs depend on, in words. None: nothing could be measured."""
        path = (self.folder or cache_folder()) / f"{hashlib.sha256(about.encode()).hexdigest()[:24]}.json"
        known = read(path, about)
        if known is not None and (known.fixed_s is not None or not self.clock):
            return known if self.clock else without_seconds(known)
        passes = list(measure(self.clock))
        if not passes:
            return None
        found = fit(passes)
        with contextlib.suppress(OSError):  # a cache that cannot be written is measured again next time
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps({"form": FORM, "about": about, "costs": asdict(found)}, indent=1))
        return found


def without_seconds(costs: UpdateCosts) -> UpdateCosts:
    return replace(costs, fixed_s=None, token_s=None, pair_s=None)


def read(path: Path, about: str) -> UpdateCosts | None:
    """What the cache has; None where it has nothing, or something that this version has not written."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        if given["form"] != FORM or given["about"] != about:
            return None
        costs = {own.name: given["costs"][own.name] for own in fields(UpdateCosts)}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    usable = all(value is None or (type(value) in (int, float) and math.isfinite(value) and value >= 0) for value in costs.values())
    return UpdateCosts(**costs) if usable and costs["largest"] is not None and costs["error"] is not None else None
