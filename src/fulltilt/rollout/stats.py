"""Statistics of an engine: samples running and waiting, KV use, prefix hits, preemptions, tokens per second, time to the first token and
per token.

Enters: each pass as it ends, with the times at which it began and ended. Leaves: the `EngineStats` of a call of `generate`, and a line for
people after every few seconds of generating; a function that reports progress is called after each pass. Guaranteed: statistics can be
added, from passes to a call and from calls to a step, percentiles included, because times are kept as histograms; a percentile is within
half a percent of the exact one; the work is per pass and sample, never per token. Free of torch.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from itertools import chain
from typing import Any

import numpy as np

from fulltilt.rollout.scheduler import Counts, Pass, Scheduler

PERCENTILES = (50, 90, 99)

_SHORTEST_S = 1e-6
_GROWTH = math.log(1.01)  # ratio of neighbouring bins: the middle of a bin is within half a percent of everything in it
_BINS = 2600  # up to 48 hours


@dataclass(frozen=True, eq=False)
class Histogram:
    """Counts of times, in bins as wide as a hundredth of the time itself."""

    counts: np.ndarray  # int64 [bins]

    @staticmethod
    def of(times: Iterable[tuple[float, int]]) -> Histogram:
        """Make a histogram from pairs: seconds, and how often they were seen."""
        counts = np.zeros(_BINS, dtype=np.int64)
        for seconds, weight in times:
            counts[min(_BINS - 1, int(math.log(max(seconds, _SHORTEST_S) / _SHORTEST_S) / _GROWTH))] += weight
        return Histogram(counts)

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(self.counts + other.counts)

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def percentile(self, percent: int) -> float:
        """Return the least number of seconds that `percent` of the times do not exceed."""
        assert self.total, "an empty histogram has no percentiles"
        rank = max(1, -(-percent * self.total // 100))
        place = int(np.searchsorted(np.cumsum(self.counts), rank))
        return _SHORTEST_S * math.exp((place + 0.5) * _GROWTH)


NO_TIMES = Histogram.of(())


@dataclass(frozen=True)
class EngineStats:
    """Statistics of some passes: of one call of `generate`, or of all calls of a step."""

    prefill_tokens: int = 0
    shared_tokens: int = 0  # tokens found in the cache, so that they were not prefilled, or not again after a preemption
    decode_tokens: int = 0
    passes: int = 0
    preemptions: int = 0
    most_running: int = 0
    most_waiting: int = 0
    kv_use: float = 0.0  # highest share of blocks in use
    running_passes: int = 0  # samples running, added up over passes
    kv_use_passes: float = 0.0  # share of blocks in use, added up over passes
    seconds: float = 0.0  # between the start of a call and the end of its last pass
    prefill_seconds: float = 0.0  # in passes that prefill
    decode_seconds: float = 0.0  # in passes that decode
    first_token: Histogram = NO_TIMES  # seconds from the start of the call to a sample's first token
    per_token: Histogram = NO_TIMES  # seconds from a sample's token to its next

    def __add__(self, other: EngineStats) -> EngineStats:
        """Add counts, seconds and histograms, and take the higher of the highest values."""
        return EngineStats(*(join(getattr(self, name), getattr(other, name)) for name, join in _JOINS))

    def beside(self, other: EngineStats) -> EngineStats:
        """Join the statistics of engines that ran at the same time: their samples ran and waited in addition to each other. Means over
        passes are over the passes of all engines."""
        return replace(
            self + other,
            most_running=self.most_running + other.most_running,
            most_waiting=self.most_waiting + other.most_waiting,
            seconds=max(self.seconds, other.seconds),
            prefill_seconds=max(self.prefill_seconds, other.prefill_seconds),
            decode_seconds=max(self.decode_seconds, other.decode_seconds),
        )

    @property
    def prefix_hit_rate(self) -> float:
        return _ratio(self.shared_tokens, self.prefill_tokens + self.shared_tokens) or 0.0

    def metrics(self, *, full: bool = True) -> dict[str, float]:
        """Return metrics under the names of docs/metrics.md: the counts, and with `full` everything else. Values that were not seen are
        left out."""
        counted = ("prefill_tokens", "decode_tokens", "passes", "preemptions", "most_running", "kv_use", "prefix_hit_rate")
        counts = {f"rollout/{name}": getattr(self, name) for name in counted}
        if not full:
            return counts
        ratios = {
            "rollout/mean_running": _ratio(self.running_passes, self.passes),
            "rollout/mean_kv_use": _ratio(self.kv_use_passes, self.passes),
            "rollout/prefill_tokens_per_s": _ratio(self.prefill_tokens, self.prefill_seconds),
            "rollout/decode_tokens_per_s": _ratio(self.decode_tokens, self.decode_seconds),
        }
        times = {"rollout/time_to_first_token_s": self.first_token, "rollout/time_per_output_token_s": self.per_token}
        return {
            **counts,
            "rollout/most_waiting": self.most_waiting,
            **{name: value for name, value in ratios.items() if value is not None},
            **{f"{name}/p{q}": seen.percentile(q) for name, seen in times.items() if seen.total for q in PERCENTILES},
        }


_HIGHEST = ("most_running", "most_waiting", "kv_use")
_JOINS: list[tuple[str, Callable[..., Any]]] = [(each.name, max if each.name in _HIGHEST else operator.add) for each in fields(EngineStats)]
NO_STATS = EngineStats()


@dataclass(frozen=True, eq=False)
class RolloutProgress:
    """A report that an engine sends while it generates."""

    text: str  # a line for people
    since: EngineStats  # statistics since the last report
    newest: EngineStats  # statistics of the latest pass


class Recorder:
    """Adds up the passes of an engine, call by call."""

    def __init__(self) -> None:
        self.stats = NO_STATS  # statistics of the last call
        self.on_pass: Callable[[], None] = lambda: None  # called after every computation
        self._tell: Callable[[RolloutProgress], None] | None = None
        self._interval = 0.0
        self._unsaid = NO_STATS  # statistics since the last line
        self.start(0.0, 0)

    def report(self, say: Callable[[str], None], interval: float) -> None:
        """Give `say` a line after every `interval` seconds of generating, counted across calls, from now on."""
        self.tell(lambda progress: say(progress.text), interval)

    def tell(self, tell: Callable[[RolloutProgress], None], interval: float) -> None:
        self._tell, self._interval = tell, interval

    def start(self, now: float, samples: int) -> None:
        """Begin a call."""
        self.stats = NO_STATS
        self._begin = self._last_end = now
        self._unfinished = samples
        self._arrived: dict[Hashable, float] = {}  # when each sample's newest token came

    def expect(self, samples: int) -> None:
        """Add samples to the current call."""
        self._unfinished += samples

    def passed(self, plan: Scheduler, step: Pass, begin: float, end: float) -> None:
        """Add a pass that ran and whose samples have their tokens. `plan` does not know yet which of them have ended."""
        counts, plan.counts = plan.counts, Counts()
        drawing = list(chain.from_iterable(work.samples for work in step.work))
        running = len(plan.running)
        seen = EngineStats(
            **vars(counts), most_running=running, most_waiting=self._unfinished - running, kv_use=plan.pool.used / plan.pool.size
        )
        self.add_pass(seen, begin, end, drawing, counts.decode_tokens if step.decoding else len(drawing))
        self._unfinished -= sum(map(bool, map(operator.attrgetter("finish"), drawing)))

    def add_pass(self, seen: EngineStats, begin: float, end: float, drawing: Sequence[Hashable], drawn: int) -> None:
        """Add a pass with its times. The samples `drawing` drew `drawn` tokens together; a sample that drew fewer than `passes` has ended.

        The host sees the tokens of all steps at the end, so the time is spread evenly over them.
        """
        of_step = (end - begin) / seen.passes
        earliest = begin + of_step
        since = Counter(map(self._arrived.get, drawing))  # most samples of a pass got their newest token in the same earlier pass
        fresh = since.pop(None, 0)
        gaps = [(earliest - arrived, samples) for arrived, samples in since.items() if arrived is not None]
        self._arrived.update(dict.fromkeys(drawing, end))
        self.add(
            replace(
                seen,
                running_passes=seen.most_running * seen.passes,
                kv_use_passes=seen.kv_use * seen.passes,
                seconds=end - self._last_end,
                prefill_seconds=end - begin if seen.prefill_tokens else 0.0,
                decode_seconds=end - begin if seen.decode_tokens else 0.0,
                first_token=Histogram.of([(earliest - self._begin, fresh)]),
                per_token=Histogram.of([*gaps, (of_step, drawn - len(drawing))]),
            )
        )
        self._last_end = end

    def add(self, newest: EngineStats, words: Callable[[EngineStats, EngineStats], str] | None = None) -> None:
        """Add the statistics of the latest computation. If a line is due, `words` makes it from the statistics since the last line and the
        newest ones; None: `line` does."""
        self.stats += newest
        self._unsaid += newest
        self.on_pass()
        if self._tell and self._unsaid.seconds >= self._interval:
            self._tell(RolloutProgress((words or line)(self._unsaid, newest), self._unsaid, newest))
            self._unsaid = NO_STATS


class JointProgress:
    """The progress of engines that generate at the same time, in one line: as soon as each has reported, or one reports again."""

    def __init__(self, engines: int, say: Callable[[str], None]) -> None:
        self._engines, self._say = engines, say
        self._told: dict[int, RolloutProgress] = {}  # by the number of the engine, reports since the last line

    def add(self, engine: int, progress: RolloutProgress) -> None:
        if engine in self._told:
            self._say_all()
        self._told[engine] = progress
        if len(self._told) == self._engines:
            self._say_all()

    def _say_all(self) -> None:
        told, self._told = list(self._told.values()), {}
        if self._engines == 1:
            self._say(told[0].text)
            return
        since, newest = (reduce(EngineStats.beside, each) for each in zip(*((one.since, one.newest) for one in told), strict=True))
        self._say(line(since, newest, f"rollout on {len(told)} of {self._engines} workers"))


def line(stats: EngineStats, newest: EngineStats, what: str = "rollout") -> str:
    """Make one line for people: running, waiting and KV use of the newest pass, everything else from `stats`. Values that were not seen are
    left out."""
    prefill, decode = _ratio(stats.prefill_tokens, stats.prefill_seconds), _ratio(stats.decode_tokens, stats.decode_seconds)
    hits = _ratio(stats.shared_tokens, stats.prefill_tokens + stats.shared_tokens)
    parts = [
        f"{newest.most_running} running",
        f"{newest.most_waiting} waiting",
        f"KV {newest.kv_use:.0%}",
        *([f"prefix hits {hits:.0%}"] if hits is not None else []),
        f"{stats.preemptions} preempted",
        *([f"prefill {_short(prefill)} tok/s"] if prefill else []),
        *([f"decode {_short(decode)} tok/s"] if decode else []),
        *([f"first token {_spread(stats.first_token)}"] if stats.first_token.total else []),
        *([f"per token {_spread(stats.per_token)}"] if stats.per_token.total else []),
    ]
    return f"{what}: {', '.join(parts)}"


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _spread(times: Histogram) -> str:
    return " ".join(f"p{percent} {_duration(times.percentile(percent))}" for percent in (PERCENTILES[0], PERCENTILES[-1]))


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"


def _short(number: float) -> str:
    return f"{number / 1000:.1f}k" if number >= 1000 else f"{number:.0f}"
