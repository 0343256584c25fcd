"""The reward pool: groups enter while generation continues, one score for each sample leaves, in the order of groups and samples.

A group's reward is a weighted sum of functions (`sums`), usually of one. They run in worker processes, one per core, each call with a
deadline; asynchronous functions run in one process, many calls at once. Whatever a function does (hang, crash, exit, fork, print, eat
memory) costs only that call: the run continues, and the failure is counted, shown and scored as `reward.on_error` says. If the only reward
is the reward model, there are no processes, and every score is 0 until the model's is added (`model`).

A failed call gives its samples a `Score` with `error` set. Under `reward.on_error = "exclude"` its value is a meaningless 0.0: the loop
leaves rows whose score has an error out of the batch and of their group's baseline. Under `"score"` the value is `reward.error_score` and
the row is trained on. A result that is not a finite number is the user's mistake, not a failed call: the next `submit` or `collect` raises
UserError.

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
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fulltilt.records import Group, Prompt, Sample, Score, UserError
from fulltilt.reward import confine
from fulltilt.reward.calls import RewardCall
from fulltilt.reward.dispatch import Dispatcher
from fulltilt.reward.process import CallOutcome
from fulltilt.reward.sums import Component, Sums, combine
from fulltilt.reward.worker import Request
from fulltilt.schema import RewardConfig
from fulltilt.words import shortened

ERRORS_FILE = "reward_errors.jsonl"
MOST_ERRORS_WRITTEN = 1000
TEXT_SHOWN = 80
NO_TOKENS, NO_LOGPROBS = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
BLOCKS_TOLD = 2  # calls that block the event loop before the user is told: a first call may import something
BLOCKING = (
    "the reward function {} blocks its event loop, so that its calls run one after another: use an async client, or make it a plain def"
)
FAILURES = {"error": "errors", "timeout": "timeouts", "crash": "crashes"}  # each kind of failure, with its count in RewardStats


@dataclass(frozen=True)
class RewardStats:
    """Counts since the pool started; `since` returns those of a step. A call is one sample, or one group for a batch function."""

    calls: int = 0
    errors: int = 0  # calls that raised an exception, ran out of memory, or returned the wrong number of results
    timeouts: int = 0
    crashes: int = 0
    retries: int = 0  # calls tried again: in a fresh process after ending a used one, or because of reward.retries
    last: str = ""  # the newest message of a failed call

    @property
    def failed(self) -> int:
        return self.errors + self.timeouts + self.crashes

    def metrics(self) -> dict[str, float]:
        return {"reward/calls": self.calls, "reward/failed_calls": self.failed, "reward/retries": self.retries}

    def __add__(self, other: RewardStats) -> RewardStats:
        counts = {name: getattr(self, name) + getattr(other, name) for name in ("calls", *FAILURES.values(), "retries")}
        return RewardStats(**counts, last=self.last or other.last)

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
    """The scores that have arrived for a submitted group."""

    components: tuple[Component, ...]
    found: list[list[Score]]  # for each sample, one score for each component; empty scores until a call's own arrive
    left: int  # number of missing scores


class RewardPool:
    def __init__(self, config: RewardConfig, run_dir: Path | None = None, *, write_errors: bool = True, keep_errors: bool = False) -> None:
        """Start the processes and load every configured function. Raises UserError with everything that is wrong with them.

        With `run_dir`, the functions cannot write there, as far as the kernel prevents it; with `write_errors`, failed calls are written to
        `reward_errors.jsonl` there, with traceback and sample, up to a thousand; with `keep_errors`, they are kept for `take_errors`.
        """
        self._config = config
        self._errors_file = run_dir / ERRORS_FILE if run_dir is not None and write_errors else None
        self._errors_kept: list[str] | None = [] if keep_errors else None
        self._errors_written = 0
        self._writing = threading.Lock()
        self._changed = threading.Condition()
        self._groups: dict[Group, _GroupScores] = {}
        self._next_id = 0
        self._counts: Counter[str] = Counter()
        self._last = ""
        self._blocking: Counter[str] = Counter()  # calls that blocked the event loop, by function
        self._notes: list[str] = []
        self._error: BaseException | None = None
        self._trainer = os.getpid()
        self._sums = Sums(config)
        self._dispatcher = Dispatcher(config, self._sums.names, self._done, self._fail, run_dir)
        atexit.register(self.close)
        if config.concurrency != "auto" and self._error is None and not any(self._dispatcher.asynchronous):
            self._fail(
                UserError("reward.concurrency has no effect: no reward function is async. Remove the key; reward.workers is for others")
            )
        if self._error is not None:
            self.close()
            self._check()

    @property
    def memory_limited(self) -> bool:
        """False if the system refused to limit the processes' memory (macOS may)."""
        return self._dispatcher.memory_limited

    @property
    def hidden(self) -> str:
        """A sentence about environment variables that the functions mention but do not get; empty if there are none."""
        return self._dispatcher.hidden

    @property
    def lacking(self) -> tuple[str, ...]:
        """Actions that this kernel cannot keep the functions from, although `reward.sandbox` is on."""
        found = self._dispatcher.confinement
        return confine.lacking(found.landlock, found.seccomp) if found else ()

    def need_truth(self, data_source: str) -> list[str]:
        """Return the functions that require a ground truth and score prompts of this data source."""
        numbers = [component.function for component in self._sums.of(data_source)]
        return [self._sums.names[number] for number in numbers if self._dispatcher.needs_truth[number]]

    def submit(self, group: Group) -> None:
        """Hand a group's samples to the processes, and return at once."""
        self._submit(group, self._sums.of(group.prompt.data_source))

    def _submit(self, group: Group, components: tuple[Component, ...]) -> None:
        self._check()
        samples = len(group.samples)
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
        """Wait for the scores of these groups, and submit those not yet submitted. Each group can be collected once."""
        assert len(set(groups)) == len(groups), "a group is collected once"
        for group in groups:
            if group not in self._groups:
                self.submit(group)
        with self._changed:
            # Without a timeout: every call has its deadline, and an error wakes this thread.
            self._changed.wait_for(lambda: self._error or not any(self._groups[group].left for group in groups))
            self._check()
            complete = [self._groups.pop(group) for group in groups]
        return [[combine(group.components, scores, self._error_value) for scores in group.found] for group in complete]

    def failures_on(self, prompts: Sequence[Prompt]) -> list[str]:
        """Call each function once, on the first of the prompts that it scores, with the ground truth as the response. Returns what went
        wrong."""
        found: list[str] = []
        for number in range(len(self._sums.names)):
            routed = ((prompt, part) for prompt in prompts for part in self._sums.of(prompt.data_source) if part.function == number)
            for prompt, component in islice(routed, 1):
                group = Group(prompt, (Sample(0, NO_TOKENS, NO_LOGPROBS, "stop", _plausible(prompt.ground_truth)),))
                try:
                    self._submit(group, (component,))
                    ((score,),) = self.collect([group])
                    failure = score.error
                except UserError as error:
                    if self._dispatcher.stopped:  # no more calls can end
                        return [*found, str(error)]
                    failure, self._error = str(error), None
                    self._groups.clear()
                if failure:
                    found.append(f"{failure} (called for prompt {prompt.uid}, with its ground truth as the response)")
        return found

    @property
    def _error_value(self) -> float:
        return self._config.error_score if self._config.on_error == "score" else 0.0

    def stats(self) -> RewardStats:
        with self._changed:
            return RewardStats(**self._counts, last=self._last)

    def take_notes(self) -> list[str]:
        """Return notes on the functions for the user, each sentence once."""
        with self._changed:
            taken, self._notes = self._notes, []
            return taken

    def take_errors(self) -> list[str]:
        """Return the lines of failed calls since the last time, each with its line end."""
        with self._writing:
            taken, self._errors_kept = self._errors_kept or [], []
            return taken

    def wait(self, groups: Sequence[Group], seconds: float) -> bool:
        """Wait at most this long for the scores of submitted groups. Returns whether `collect` would not have to wait."""
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._error or not any(self._groups[group].left for group in groups), seconds))

    def close(self) -> None:
        """Kill all processes. Scores not collected are lost. Does nothing in a fork of the trainer."""
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

    def _done(self, call: RewardCall, outcome: CallOutcome) -> None:
        """Handle the end of a call."""
        name = self._sums.names[call.request.function]
        if outcome.failure == "mistake":
            self._fail(_mistake(name, call, outcome))
            return
        scores = [Score(value, parts, answer=answer) for value, parts, answer in outcome.scores]
        if outcome.failure is not None:
            message = f"{name} {outcome.message}{self._dispatcher.note_on(outcome.message, call.request.function)}"
            scores = [Score(self._error_value, error=message)] * len(call.request.texts)
            self._write_error(call, outcome, message)
        with self._changed:
            self._counts["calls"] += 1
            self._counts["retries"] += call.repeats
            self._blocking[name] += outcome.blocks
            if outcome.blocks and self._blocking[name] == BLOCKS_TOLD:
                self._notes.append(BLOCKING.format(name))
            if outcome.failure is not None:
                self._counts[FAILURES[outcome.failure]] += 1
                self._last = message
            group = self._groups[call.group]
            for sample, score in enumerate(scores, start=call.first):
                group.found[sample][call.component] = score
            group.left -= len(scores)
            if not group.left:
                self._changed.notify_all()

    def _write_error(self, call: RewardCall, outcome: CallOutcome, message: str) -> None:
        if self._errors_file is None and self._errors_kept is None:
            return
        line = {
            "kind": outcome.failure,
            "message": message,
            "data_source": call.group.prompt.data_source,
            "prompt": call.group.prompt.uid,
            "samples": [sample.index for sample in call.group.samples[call.first :][: len(call.request.texts)]],
            "text": call.request.texts[0][:2000],
            "detail": outcome.detail,
        }
        with self._writing:
            if self._errors_written >= MOST_ERRORS_WRITTEN:
                return
            self._errors_written += 1
            text = json.dumps(line, ensure_ascii=False) + "\n"
            if self._errors_kept is not None:
                self._errors_kept.append(text)
            if self._errors_file:
                append_errors(self._errors_file, text)


def append_errors(path: Path, text: str) -> None:
    try:
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}. Make room or choose another run.dir") from error


def _plausible(ground_truth: Any) -> str:
    """Return a response that a reward function should be able to score."""
    return str(ground_truth) if isinstance(ground_truth, (str, int, float)) else ""


def _mistake(name: str, call: RewardCall, outcome: CallOutcome) -> UserError:
    begins = shortened(call.request.texts[outcome.sample], TEXT_SHOWN)
    return UserError(
        f"reward function {name!r} returned {outcome.message} for a sample of data source {call.group.prompt.data_source!r} that begins "
        f"{begins!r}. A reward must be a finite number, or a dict with one under 'score'. Fix the function; to have a sample "
        f"treated by reward.on_error instead, raise an exception"
    )
