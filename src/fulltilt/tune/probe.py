"""The probe: measured costs of update micro-batches and short rollouts on this device, at the start of a run.

Enters: `UpdatePass` and `RolloutPass` records. Leaves: `UpdateCosts`, from which fulltilt.plan sizes token budgets, and the measured
rollouts, by which the models of time are scaled (tune/calibration.py). Guaranteed: pure Python; every coefficient has a physical meaning
and is not negative; a model with its settings is measured once on a device, and the user's cache folder (`XDG_CACHE_HOME`, or ~/.cache)
keeps the measurements; a file there may be lost or damaged without harm; with `run.deterministic` no seconds are measured, nor read from
the cache.

Bytes = fixed + token_bytes x tokens: what layers keep for the backward pass grows with tokens. Seconds = token_s x tokens + pair_s x pairs
(matrix products and memory traffic, and attention), but at least the seconds of the host's launches, which a GPU does not wait for while it
has work. On a CPU, where host and device are the same, both are added.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from fulltilt.observe.metrics import write_whole
from fulltilt.records import RolloutPass, UpdateCosts, UpdatePass, UpdatePasses

AnyPass = TypeVar("AnyPass", UpdatePass, RolloutPass)
LEAST_TIMED = {True: 3, False: 4}  # least number of passes for which seconds are fitted; True: the device is apart from the host
UNLIKE = 4  # ratio of sample lengths from which on the cost of attention can be told from noise
BEYOND = 1.4  # factor of the smallest pass's seconds above which the device was the bottleneck: below it may be noise
MORE_FREE = 1.05  # factor of the memory that was free when it ran out, from which on it may not run out again
FORM = 6  # format version of the files in the cache


# ---- the fit -----------------------------------------------------------------------------------------------------------------------------


def fit(passes: Sequence[UpdatePass], *, apart: bool) -> UpdateCosts:
    """Return the costs that come closest to the measurements, by relative error. `apart`: the device computes while the host launches."""
    sized = [(own, own.bytes) for own in passes if own.bytes is not None]
    of_bytes: Sequence[float | None] = (None, None)
    if len({own.tokens for own, _ in sized}) > 1:  # one size cannot separate fixed bytes from those that grow with tokens
        of_bytes = nonnegative_fit([[1.0, own.tokens] for own, _ in sized], [count for _, count in sized])
    largest = max((own.tokens for own in passes), default=0)
    found = UpdateCosts(of_bytes[0], of_bytes[1], None, None, None, None, largest=largest, passes=tuple(passes))
    timed = [(own, own.seconds) for own in passes if own.seconds]
    found = fit_seconds(found, timed, apart=apart) if len(timed) >= LEAST_TIMED[apart] else found
    errors = [abs((found.bytes(own.tokens) or 0) / count - 1) for own, count in sized if count]
    errors += [abs((found.seconds(own.tokens, own.pairs) or 0.0) / count - 1) for own, count in timed if found.host_s is not None]
    return replace(found, error=max(errors, default=0.0))


def fit_seconds(costs: UpdateCosts, timed: Sequence[tuple[UpdatePass, float]], *, apart: bool) -> UpdateCosts:
    """Return the costs with coefficients of seconds."""
    if not apart:
        fixed, token, pair = nonnegative_fit([[1.0, own.tokens, own.pairs] for own, _ in timed], [seconds for _, seconds in timed])
        return replace(costs, host_s=0.0, fixed_s=fixed, token_s=token, pair_s=pair)
    waiting, others = waiting_and_others([own for own, _ in timed])
    (host,) = nonnegative_fit([[1.0]] * len(waiting), [own.seconds or 0.0 for own in waiting])
    token, pair = 0.0, 0.0
    if others:
        lengths, seconds = [own.pairs / own.tokens for own in others], [own.seconds or 0.0 for own in others]
        if max(lengths) >= UNLIKE * min(lengths):
            token, pair = nonnegative_fit([[float(own.tokens), float(own.pairs)] for own in others], seconds)
        else:
            (token,) = nonnegative_fit([[float(own.tokens)] for own in others], seconds)
    return replace(costs, host_s=host, fixed_s=0.0, token_s=token, pair_s=pair)


def waiting_and_others(passes: Sequence[UpdatePass]) -> tuple[list[UpdatePass], list[UpdatePass]]:
    """Return the passes in which the device waited for the host, and those in which it did not: the host's seconds are those of the
    smallest pass, whatever the tokens."""
    ordered = sorted(passes, key=lambda own: own.tokens)
    waiting = [own for own in ordered if (own.seconds or 0.0) <= BEYOND * (ordered[0].seconds or 0.0)]
    return waiting, [own for own in ordered if own not in waiting]


def nonnegative_fit(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """Return the coefficients, none below 0, with the least squares of relative errors. There are few: every choice of positive
    coefficients is solved, and the best solution without a negative one is taken."""
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
            if missed < least - 1e-12:  # fewer coefficients, unless more come closer
                best, least = found, missed
    return best


def least_squares(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """Return the solution of rows x solution = 1 with least squares, by the normal equations; None: it is not determined."""
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


def cache_folder() -> Path | None:
    """Return the folder of the cache; None: the user has no known home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    folder = given if os.path.isabs(given) else os.path.expanduser("~/.cache")
    return Path(folder, "fulltilt", "probes") if os.path.isabs(folder) else None


@dataclass(frozen=True)
class Prober:
    """Finds the costs of updates and rollouts: in the cache, or by measuring. It is sent to the process of a worker."""

    clock: bool = True  # False: nothing reads a clock
    folder: Path | None = None  # None: the user's cache

    def updates(self, key: str, measure: Callable[[], UpdatePasses], *, free_bytes: int, apart: bool) -> UpdateCosts | None:
        """Return the costs of updates; None: nothing could be measured, or not all of it. `key`: everything that the costs depend on.
        `free_bytes`: those of the device now. `apart`: the device computes while the host launches."""
        known = self._read_updates(key, free_bytes)
        if known is None or (self.clock and known.passes and all(own.seconds is None for own in known.passes)):
            known = measure()
            if not known.complete:  # too few passes to size anything, and another start may have more time
                return None
            if known.passes or known.ran_out_at is not None:
                self._write(key, known.passes, ran_out_at=known.ran_out_at, free_bytes=known.free_bytes)
        elif not self.clock:
            known = replace(known, passes=tuple(replace(own, seconds=None) for own in known.passes))
        if not known.passes and known.ran_out_at is None:
            return None
        return replace(fit(known.passes, apart=apart), ran_out_at=known.ran_out_at)

    def rollouts(self, key: str, measure: Callable[[], Sequence[RolloutPass]]) -> Sequence[RolloutPass]:
        """Return the measured rollouts, of which only seconds are measured."""
        if not self.clock:
            return ()
        known = self._read(RolloutPass, key)[0]
        if not known:
            known = measure()
            if known:
                self._write(key, known)
        return known

    def _read_updates(self, key: str, free_bytes: int) -> UpdatePasses | None:
        """Read the passes of updates; None: they are not in the cache, or memory ran out then, perhaps because of other programs, and more
        is free now."""
        passes, given = self._read(UpdatePass, key)
        ran_out_at, free_then = given.get("ran_out_at"), given.get("free_bytes", 0)
        if ran_out_at is None:
            return UpdatePasses(tuple(passes)) if passes else None
        if not (is_count(ran_out_at) and is_count(free_then)) or free_bytes > MORE_FREE * free_then:
            return None
        return UpdatePasses(tuple(passes), ran_out_at, free_then)

    def _path(self, key: str) -> Path | None:
        """Return the path of a cache file; None: the user has no home, and so no cache."""
        folder = self.folder or cache_folder()
        return folder and folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"

    def _write(self, key: str, passes: Sequence[AnyPass], **others: int | None) -> None:
        if path := self._path(key):
            with contextlib.suppress(OSError):  # without a writable cache, the next run measures again
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, json.dumps({"form": FORM, "key": key, **others, "passes": [asdict(own) for own in passes]}, indent=1))

    def _read(self, kind: type[AnyPass], key: str) -> tuple[Sequence[AnyPass], Mapping[str, Any]]:
        """Read the passes in the cache and everything else in its file; both empty if this version did not write the file."""
        path = self._path(key)
        if path is None:
            return (), {}
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
            if given["form"] != FORM or given["key"] != key:
                return (), {}
            return list(read_passes(kind, given["passes"])), given
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return (), {}


def is_count(given: object) -> bool:
    return type(given) is int and given >= 0


def read_passes(kind: type[AnyPass], given: Sequence[dict[str, Any]]) -> Iterator[AnyPass]:
    for own in given:
        values = {field.name: own[field.name] for field in fields(kind)}
        for name, value in values.items():
            if value is None and name in ("bytes", "seconds") and kind is UpdatePass:
                continue
            if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
                raise ValueError(f"{name}: {value!r}")
        yield kind(**values)
