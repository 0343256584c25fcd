"""The metrics of a run, under verl's names, and its sampled rollouts, on disk.

Enters: groups, scores and rows of a step, seconds of its phases. Leaves: `metrics.jsonl`, one object per step, and `rollouts/`, one file of
sampled rollouts per step. Guaranteed: once `truncate` has run, every line is complete; numbers that are not finite are written as null and
named under "nonfinite"; a resume removes everything about steps that the checkpoint does not know. Free of torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import numpy as np

from fulltilt.folders import read_file, without_waiting
from fulltilt.observe.rejection import CriteriaSums
from fulltilt.observe.spread import Spread
from fulltilt.records import AnyGroup, Group, Row, Sample, Score, UserError
from fulltilt.words import listed

Number = float | int
SomeGroup = TypeVar("SomeGroup", bound=AnyGroup)
COPIED_BYTES = 2**20  # most text that the driver has in memory at once

# The name of each phase, and verl's name for its seconds.
TIMING_NAMES: Mapping[str, str] = {
    "rollout": "gen",
    "reward": "reward",
    "old-logprob": "old_log_prob",
    "ref-logprob": "ref",
    "values": "values",
    "advantage": "adv",
    "update-critic": "update_critic",
    "update-actor": "update_actor",
    "sync": "sync",
    "save": "save_checkpoint",
    "eval": "testing",
}
_PER_TOKEN = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")


def encode_line(step: int, values: Mapping[str, Number]) -> str:
    """Encode one step as one JSON object, `step` first. Numbers that are not finite, which JSON does not have, become null and are
    listed."""
    plain = {name: _plain(value) for name, value in values.items()}
    nonfinite = [name for name, value in plain.items() if value is None]
    return json.dumps({"step": step, **plain, **({"nonfinite": nonfinite} if nonfinite else {})})


def _plain(value: Number) -> Number | None:
    # json does not accept numpy's scalars.
    if isinstance(value, (bool, int, np.integer, np.bool_)):
        return int(value)
    return float(value) if math.isfinite(value) else None


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = "Free some space or correct the permissions, then resume the run."
        raise UserError(f"{path}: cannot be written: {error.strerror}. {remedy}") from error


def write_whole(path: Path, text: str) -> None:
    """Write a file so that no reader sees it half-written."""
    partial = path.with_name(f"{path.name}.partial")
    with _writing(path):
        path.parent.mkdir(exist_ok=True)  # not its parents: a run folder that was removed stays removed
        partial.write_bytes(written_text(text))
        partial.replace(path)


class MetricsFile:
    """The file `metrics.jsonl`: one line per step, flushed when it is written."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        with _writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "ab", opener=without_waiting)  # noqa: SIM115

    def append(self, step: int, values: Mapping[str, Number]) -> None:
        with _writing(self.path):
            self._file.write(encode_line(step, values).encode() + b"\n")
            self._file.flush()

    def offset(self) -> int:
        """Return the number of bytes written so far. A checkpoint keeps this number, so that a resume can cut the file back to it."""
        return os.fstat(self._file.fileno()).st_size

    def truncate(self, offset: int) -> str | None:
        """Drop all lines after a checkpoint's `offset`. Returns a warning if the file no longer holds the same lines as when the checkpoint
        was saved: the run can continue without them."""
        with _writing(self.path):
            size = self.offset()
            keep = min(offset, size)
            whole = self.path.read_bytes()[:keep].rfind(b"\n") + 1
            os.truncate(self.path, whole)
        if size < offset:
            return f"{self.path} is shorter ({size} bytes) than when the checkpoint was saved ({offset} bytes): lines before it are missing"
        if whole < keep:
            return f"{self.path} has changed since the checkpoint was saved: an incomplete line is dropped"
        return None

    def sync(self) -> None:
        """Return when the lines are on the disk."""
        with _writing(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        # Every line was flushed when it was written. Only a line whose writing failed can be left, and the failure was reported.
        with contextlib.suppress(OSError):
            self._file.close()


@dataclass(frozen=True)
class MetricsLines:
    steps: tuple[dict[str, Any], ...]
    damaged: str = ""  # which lines a run cannot have written, in words; empty: none


def read_lines(path: Path) -> MetricsLines:
    """Read the steps of a metrics file. The file of a run that is still running, or was killed, may end in an incomplete line, which is
    left out."""
    whole, _, _ = read_file(path).rpartition(b"\n")
    found = [_decoded(line) for line in whole.split(b"\n")] if whole else []
    wrong = [number for number, line in enumerate(found, 1) if line is None]
    damaged = f"{'line' if len(wrong) == 1 else 'lines'} {listed(wrong)} cannot be read" if wrong else ""
    return MetricsLines(tuple(line for line in found if line is not None), damaged)


def _decoded(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line; None unless `encode_line` may have written it."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or type(found.get("step")) is not int:
        return None
    numbers = [value for name, value in found.items() if name != "nonfinite" and value is not None]
    return found if all(type(value) is float or (type(value) is int and value.bit_length() < 64) for value in numbers) else None


def read_values(path: Path, name: str) -> list[float]:
    """Return the values of one metric, in the order of the steps that have it."""
    return [line[name] for line in read_lines(path).steps if line.get(name) is not None]


class RolloutFiles:
    """The files `rollouts/step-000012.jsonl`: sampled rollouts of a step, one sample a line, for people to read."""

    def __init__(self, folder: Path | str, per_step: int) -> None:
        self.folder = Path(folder)
        self.per_step = per_step

    def write(self, step: int, groups: Sequence[Group], scores: Sequence[Sequence[Score]]) -> None:
        """Write the groups of `shown`. `scores` holds, for each group, the score of each of its samples."""
        write_whole(self.path(step), "".join(map(rollout_lines, self.shown(groups), scores)))

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.jsonl"

    def shown(self, groups: Sequence[SomeGroup]) -> list[SomeGroup]:
        """Return the first groups, whole ones, as many as `per_step` samples allow and at least one that has samples."""
        lines = list(accumulate(len(group.samples) for group in groups))
        return [group for group, before, after in zip(groups, [0, *lines], lines, strict=False) if not before or after <= self.per_step]

    def part(self, step: int, worker: int) -> Path:
        """Return where a worker writes the lines of the groups that it holds, for `join`."""
        with _writing(self.folder):
            self.folder.mkdir(exist_ok=True)
        return self.path(step).with_name(f"{self.path(step).name}.partial-{worker}")

    def join(self, step: int, stretches: Sequence[tuple[int, int]]) -> None:
        """Make the file of a step from the workers' files: in this order, this many consecutive bytes of each worker's file."""
        with contextlib.ExitStack() as stack, _writing(self.path(step)):
            sources = {worker: stack.enter_context(self.part(step, worker).open("rb")) for worker, _ in stretches}
            joined = self.path(step).with_name(f"{self.path(step).name}.partial")
            with joined.open("wb") as target:
                for worker, size in stretches:
                    for begin in range(0, size, COPIED_BYTES):
                        target.write(sources[worker].read(min(COPIED_BYTES, size - begin)))
            joined.replace(self.path(step))
            for worker in sources:
                self.part(step, worker).unlink()

    def truncate(self, step: int) -> None:
        """Remove the files of steps after `step`, and half-written files of a killed run."""
        if not self.folder.is_dir():
            return
        with _writing(self.folder):
            for path in self.folder.iterdir():
                found = re.fullmatch(r"step-(\d+)\.jsonl(\.partial(-\d+)?)?", path.name)
                if found and (found.group(2) or int(found.group(1)) > step):
                    path.unlink()


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Read the samples of one file of `RolloutFiles`."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def write_stretches(path: Path, texts: Sequence[str]) -> list[int]:
    """Write texts one after another. Returns the number of bytes of each."""
    encoded = [written_text(text) for text in texts]
    with _writing(path):
        path.write_bytes(b"".join(encoded))
    return list(map(len, encoded))


def rollout_lines(group: Group, scores: Sequence[Score]) -> str:
    """Return the lines of a group's samples, each with its line end."""
    pairs = zip(group.samples, scores, strict=True)
    return "".join(json.dumps(_rollout(group, *pair), ensure_ascii=False, default=str) + "\n" for pair in pairs)


def written_text(text: str) -> bytes:
    """Encode text as UTF-8. Some byte-level tokens decode to a lone surrogate, which is not valid UTF-8 and is escaped."""
    return text.encode("utf-8", errors="backslashreplace")


def _rollout(group: Group, sample: Sample, score: Score) -> dict[str, Any]:
    prompt = group.prompt
    return {
        "uid": prompt.uid,
        "sample": sample.index,
        "prompt": prompt.text,
        "response": sample.text,
        "reward": _plain(score.value),
        "parts": {name: _plain(value) for name, value in score.parts.items()},
        "error": score.error,
        "finish": sample.finish,
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "response_tokens": len(sample.ids),
        "logprob_mean": _plain(float(np.mean(sample.logprobs))) if len(sample.logprobs) else None,
    }


def summarise_scores(scores: Sequence[Sequence[Score]], *, timeouts: int, excluded: int) -> dict[str, Number]:
    """Return the reward metrics of a step's samples, given group by group. `reward/errors` counts every failed call, timeouts included;
    `excluded` is the number of samples left out of the batch. Failed calls are not part of the means."""
    flat = [score for of_group in scores for score in of_group]
    good = [score for score in flat if score.error is None]
    parts: dict[str, list[float]] = {}
    for score in good:
        for name, value in score.parts.items():
            parts.setdefault(name, []).append(value)
    return {
        **Spread.of([score.value for score in good]).metrics("critic/score"),
        **{f"reward/parts/{name}": float(np.mean(values)) for name, values in parts.items()},
        **mean_of("reward/groups_with_variance", [len({score.value for score in each if score.error is None}) > 1 for each in scores]),
        "reward/samples": len(flat),
        "reward/errors": len(flat) - len(good),
        "reward/timeouts": timeouts,
        "reward/excluded": excluded,
    }


@dataclass(frozen=True)
class RowSums:
    """Sums for metrics of the rows that an update trains on; `+` joins those of several workers. Rewards are per row, with the algorithm's
    shaping and KL penalty; the rest is per trained token."""

    rewards: Spread = field(default_factory=Spread)
    advantages: Spread = field(default_factory=Spread)
    drawn: Spread = field(default_factory=Spread)  # log-probs of samples from the weights of this step
    values: Spread = field(default_factory=Spread)
    returns: Spread = field(default_factory=Spread)
    residuals: Spread = field(default_factory=Spread)  # returns - values
    rejected: Spread = field(default_factory=Spread)  # number of tokens of each row that were rejected
    considered: Spread = field(default_factory=Spread)  # number of tokens of each row that could have been rejected
    touched: Spread = field(default_factory=Spread)  # 1 for each row that has lost a token
    criteria: CriteriaSums = field(default_factory=CriteriaSums)  # sums for each criterion of rejection

    @classmethod
    def of(cls, rows: Sequence[Row]) -> RowSums:
        totals = [row.reward if row.token_rewards is None else float(row.token_rewards.sum(dtype=np.float64)) for row in rows]
        advantages, values, returns = (_trained(rows, name) for name in ("advantages", "values", "returns"))
        drawn = _trained([row for row in rows if row.lag == 0], "rollout_logprobs")
        residuals = returns - values if len(values) else values
        asked = [(row.rejected, row.trained) for row in rows if row.rejected is not None]
        rejected, touched = [lost for lost, _ in asked], [lost > 0 for lost, _ in asked]
        considered = [lost + kept for lost, kept in asked]
        of_rewards = (Spread.of(totals), Spread.of(advantages), Spread.of(drawn))
        of_critic = (Spread.of(values), Spread.of(returns), Spread.of(residuals))
        of_rejection = (Spread.of(rejected), Spread.of(considered), Spread.of(touched))
        return cls(*of_rewards, *of_critic, *of_rejection, CriteriaSums.of_rows(rows))

    def __add__(self, other: RowSums) -> RowSums:
        return RowSums(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def metrics(self) -> dict[str, Number]:
        found = {**self.rewards.metrics("critic/rewards"), **self.advantages.metrics("critic/advantages")}
        if self.drawn.count:
            found["rollout/entropy"] = -self.drawn.mean
        if self.considered.count and self.considered.mean:
            found["rollout_corr/rollout_rs_masked_fraction"] = self.rejected.mean / self.considered.mean
            found["rollout_corr/rollout_rs_seq_masked_fraction"] = self.touched.mean
            found |= self.criteria.metrics()
        if not self.values.count:
            return found
        found |= {**self.values.metrics("critic/values"), **self.returns.metrics("critic/returns")}
        if self.returns.variance > 0:
            found["critic/vf_explained_var"] = 1.0 - self.residuals.variance / self.returns.variance
        return found


def _trained(rows: Sequence[Row], name: str) -> np.ndarray:
    """Return one per-token field of all rows, at the trained tokens."""
    arrays = [(getattr(row, name), row.mask) for row in rows if getattr(row, name) is not None]
    return np.concatenate([array[mask] for array, mask in arrays]).astype(np.float64) if arrays else np.zeros(0)


def summarise_lengths(groups: Sequence[AnyGroup], max_prompt_tokens: int) -> dict[str, Number]:
    """Return the lengths of prompts and responses, each prompt counted once per sample, as in verl. A response is clipped if
    `max_new_tokens` cut it off; a prompt counts as clipped if it has the most tokens that a prompt may have."""
    samples = [sample for group in groups for sample in group.samples]
    prompts = [len(group.prompt.ids) for group in groups for _ in group.samples]
    return {
        **Spread.of([sample.tokens for sample in samples]).metrics("response_length"),
        **mean_of("response_length/clip_ratio", [sample.finish == "length" for sample in samples]),
        **Spread.of(prompts).metrics("prompt_length"),
        **mean_of("prompt_length/clip_ratio", [length >= max_prompt_tokens for length in prompts]),
    }


def summarise_time(
    seconds: Mapping[str, float], step_seconds: float, *, response_tokens: int, total_tokens: int, devices: int = 1
) -> dict[str, Number]:
    """Return the seconds of the phases and of the step, and tokens per second and device. The two token counts are those of
    `count_tokens`."""
    timing = {TIMING_NAMES[phase]: spent for phase, spent in seconds.items()}
    per_token = {name: (timing[name], total_tokens) for name in _PER_TOKEN if name in timing}
    if "gen" in timing:
        per_token["gen"] = (timing["gen"], response_tokens)
    return {
        **{f"timing_s/{name}": spent for name, spent in timing.items()},
        "timing_s/step": step_seconds,
        **{f"timing_per_token_ms/{name}": 1000 * spent / tokens for name, (spent, tokens) in per_token.items() if tokens},
        "perf/total_num_tokens": total_tokens,
        "perf/time_per_step": step_seconds,
        **({"perf/throughput": total_tokens / step_seconds / devices} if step_seconds > 0 else {}),
    }


def summarise_workers(seconds: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, float]:
    """Return the seconds of a phase for the slowest of several workers, and for all of them on average. `seconds`: for each phase those of
    each worker, for each call in the step; the slowest may differ between calls."""
    found: dict[str, float] = {}
    for phase, calls in seconds.items():
        if len(calls[0]) > 1:
            slowest, average = sum(map(max, calls)), sum(map(fmean, calls))
            name = f"timing_s/workers/{TIMING_NAMES[phase]}"
            found |= {f"{name}/max": slowest, f"{name}/mean": average}
            found |= {"rollout/time_spread": slowest / average} if phase == "rollout" and average else {}
    return found


def count_tokens(groups: Sequence[AnyGroup]) -> tuple[int, int]:
    """Return the response tokens, and prompt and response tokens together, of all samples."""
    response = sum(sample.tokens for group in groups for sample in group.samples)
    return response, response + sum(len(group.prompt.ids) * len(group.samples) for group in groups)


def mean_of(name: str, values: Iterable[float]) -> dict[str, float]:
    listed = list(values)
    return {name: float(np.mean(listed))} if listed else {}
