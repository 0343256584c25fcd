"""The reward pool: groups enter while generation continues, one score for each sample leaves, in the order of groups and samples.

A group's reward is a weighted sum of functions (`sums`), usually of one. They run in worker processes, one per core, each call with a
deadline. Whatever a function does (hang, crash, exit, fork, print, eat memory) costs that one call: the run continues, the failure is
counted, shown and scored as `reward.on_error` says. Where the only reward is the reward model there are no processes, and every score is
0 until the model's is added (`model`).

A failed call gives its samples a `Score` with `error` set. Under `reward.on_error = "exclude"` its value is 0.0 and means nothing: the
loop leaves rows whose score has an error out of the batch and of their group's baseline. Under `"score"` the value is
`reward.error_score` and the row is trained on. A result that is not a finite number is the user's mistake, not a failed call: the next
`submit` or `collect` raises UserError.

Guaranteed: scores do not depend on timing, on the number of workers or on which of them ran a call.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import threading
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fulltilt.records import Group, Score, UserError
from fulltilt.reward.dispatch import Dispatcher, RewardCall
from fulltilt.reward.process import Outcome
from fulltilt.reward.sums import Component, Sums, combine
from fulltilt.reward.worker import Request
from fulltilt.schema import RewardConfig
from fulltilt.words import shortened

ERRORS_FILE = "reward_errors.jsonl"
MOST_ERRORS_WRITTEN = 1000
TEXT_SHOWN = 80
FAILURES = {"error": "errors", "timeout": "timeouts", "crash": "crashes"}  # an outcome's failure, and the count in RewardStats


@dataclass(frozen=True)
class RewardStats:
    """Counts since the pool started; `since` gives those of a step. A call is one sample, or one group for a batch function."""

    calls: int = 0
    errors: int = 0  # raised an exception, ran out of memory, returned the wrong number of results
    timeouts: int = 0
    crashes: int = 0
    retries: int = 0  # tried again in a fresh process after the first try ended a used one
    last: str = ""  # the newest message of a failed call

    @property
    def failed(self) -> int:
        return self.errors + self.timeouts + self.crashes

    def since(self, before: RewardStats) -> RewardStats:
        counts = {name: getattr(self, name) - getattr(before, name) for name in ("calls", *FAILURES.values(), "retries")}
        return RewardStats(**counts, last=self.last if self.failed > before.failed else "")

    def __str__(self) -> str:
        if not self.failed:
            return f"{self.calls} reward calls, none failed"
        kinds = {"raised an error": self.errors, "ran out of time": self.timeouts, "crashed": self.crashes}
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
        return f"{self.failed} of {self.calls} reward calls failed ({counts}); last: {self.last}"


@dataclass(eq=False)
class _GroupScores:
    """The scores of a submitted group as they come in."""

    components: tuple[Component, ...]
    found: list[list[Score]]  # for each sample, one score for each component; empty scores until a call's own arrive
    left: int  # how many are missing


class RewardPool:
    def __init__(self, config: RewardConfig, run_dir: Path | None = None) -> None:
        """Starts the processes and loads every configured function; UserError for what is wrong with one of them.

        With `run_dir`, failed calls are written to `reward_errors.jsonl` there, with traceback and sample, up to a thousand.
        """
        self._config = config
        self._errors_file = run_dir / ERRORS_FILE if run_dir is not None else None
        self._errors_written = 0
        self._changed = threading.Condition()
        self._groups: dict[Group, _GroupScores] = {}
        self._next_id = 0
        self._counts: Counter[str] = Counter()
        self._last = ""
        self._error: BaseException | None = None
        self._trainer = os.getpid()
        self._sums = Sums(config)
        self._dispatcher = Dispatcher(config, self._sums.names, self._done, self._fail)
        atexit.register(self.close)
        if self._error is not None:
            self.close()
            self._check()

    @property
    def memory_limited(self) -> bool:
        """False where the system refused to limit the processes' memory (macOS may)."""
        return self._dispatcher.memory_limited

    def submit(self, group: Group) -> None:
        """Hands a group's samples to the processes and returns at once."""
        self._check()
        components, samples = self._sums.of(group.prompt.data_source), len(group.samples)
        with self._changed:
            assert group not in self._groups, "a group is submitted once"
            found = [[Score(0.0)] * len(components) for _ in range(samples)]
            self._groups[group] = _GroupScores(components, found, samples * len(components))
            calls = self._calls(group, components)
        self._dispatcher.put(calls)

    def _calls(self, group: Group, components: Sequence[Component]) -> list[RewardCall]:
        prompt, samples = group.prompt, len(group.samples)
        given = {"data_source": prompt.data_source, "ground_truth": prompt.ground_truth, "extra_info": dict(prompt.extra_info)}
        pickled = pickle.dumps({**given, "prompt_str": prompt.text})
        calls = []
        for number, component in enumerate(components):
            size = max(1, samples) if self._dispatcher.batch[component.function] else 1
            for first in range(0, samples, size):
                texts = tuple(sample.text for sample in group.samples[first : first + size])
                seed = zlib.crc32(repr((prompt.uid, group.samples[first].index, texts)).encode())
                calls.append(RewardCall(Request(self._next_id, component.function, pickled, texts, seed), group, number, first))
                self._next_id += 1
        return calls

    def collect(self, groups: Sequence[Group]) -> list[list[Score]]:
        """Waits for the scores of these groups; those not yet submitted are submitted now. Each group is collected once."""
        assert len(set(groups)) == len(groups), "a group is collected once"
        for group in groups:
            if group not in self._groups:
                self.submit(group)
        with self._changed:
            # No timeout: every call has its deadline, and an error wakes this thread.
            self._changed.wait_for(lambda: self._error or not any(self._groups[group].left for group in groups))
            self._check()
            complete = [self._groups.pop(group) for group in groups]
        return [[combine(group.components, scores) for scores in group.found] for group in complete]

    def stats(self) -> RewardStats:
        with self._changed:
            return RewardStats(**self._counts, last=self._last)

    def close(self) -> None:
        """Kills all processes. Scores not collected are lost. Does nothing in a fork of the trainer."""
        if os.getpid() != self._trainer:
            return
        atexit.unregister(self.close)
        self._fail(RuntimeError("the reward pool is closed"))
        self._dispatcher.close()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    # Called on the dispatcher's threads.

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _done(self, call: RewardCall, outcome: Outcome, retried: bool) -> None:
        """One call has ended."""
        name = self._sums.names[call.request.function]
        if outcome.failure == "mistake":
            self._fail(_mistake(name, call, outcome))
            return
        scores = [Score(value, parts, answer=answer) for value, parts, answer in outcome.scores]
        with self._changed:
            self._counts["calls"] += 1
            self._counts["retries"] += retried
            if outcome.failure is not None:
                self._counts[FAILURES[outcome.failure]] += 1
                self._last = f"{name} {outcome.message}"
                self._write_error(call, outcome, self._last)
                value = self._config.error_score if self._config.on_error == "score" else 0.0
                scores = [Score(value, error=self._last)] * len(call.request.texts)
            group = self._groups[call.group]
            for sample, score in enumerate(scores, start=call.first):
                group.found[sample][call.component] = score
            group.left -= len(scores)
            if not group.left:
                self._changed.notify_all()

    def _write_error(self, call: RewardCall, outcome: Outcome, message: str) -> None:
        if self._errors_file is None or self._errors_written >= MOST_ERRORS_WRITTEN:
            return
        self._errors_written += 1
        line = {
            "kind": outcome.failure,
            "message": message,
            "data_source": call.group.prompt.data_source,
            "prompt": call.group.prompt.uid,
            "samples": [sample.index for sample in call.group.samples[call.first :][: len(call.request.texts)]],
            "text": call.request.texts[0][:2000],
            "detail": outcome.detail,
        }
        try:
            self._errors_file.parent.mkdir(parents=True, exist_ok=True)
            with self._errors_file.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        except OSError as error:
            raise UserError(f"cannot write {self._errors_file}: {error.strerror}. Make room or choose another run.dir") from error


def _mistake(name: str, call: RewardCall, outcome: Outcome) -> UserError:
    begins = shortened(call.request.texts[outcome.sample], TEXT_SHOWN)
    return UserError(
        f"reward function {name!r} returned {outcome.message} for a sample of data source {call.group.prompt.data_source!r} that begins "
        f"{begins!r}. A reward must be a finite number, or a dict with one under 'score'. Fix the function; to have a sample "
        f"treated by reward.on_error instead, raise an exception"
    )
