"""Measurements of an engine or of a whole step.

Enters: seconds and bytes. Leaves: `Timing` (one setting of an engine over repeats), `Measured` (all its settings) and `StepTiming` (one
setting of a system over steps). Guaranteed: a setting that failed is kept with its error; an engine's figure is the median of its repeats
at its best setting with log-probs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from fulltilt.bench.workload import Requests


@dataclass(frozen=True)
class Timing:
    """The timing of one setting of an engine. Seconds are those of a whole call, prefill included."""

    setting: Mapping[str, Any]
    seconds: Sequence[float] = ()  # one number for each repeat
    prefill_seconds: Sequence[float] = ()  # seconds for the same prompts with one token each, if a workload asks for time per token
    trial_seconds: float | None = None  # seconds of the trial by which a setting was chosen or dropped, warm-up included
    logprobs: bool = True
    error: str | None = None

    def tokens_per_s(self, requests: Requests) -> float | None:
        return requests.tokens / median(self.seconds) if self.seconds else None

    def ms_per_token(self, requests: Requests) -> float | None:
        """Return milliseconds per token while all samples decode, measured on the longest one after its first token."""
        if not self.prefill_seconds or not self.seconds:
            return None
        return 1e3 * (median(self.seconds) - median(self.prefill_seconds)) / (max(requests.lengths.values()) - 1)

    def speed(self, requests: Requests) -> float | None:
        """Return the number by which engines are compared: larger is better."""
        per_token = self.ms_per_token(requests)
        return self.tokens_per_s(requests) if per_token is None else 1e3 / per_token

    def as_json(self, requests: Requests) -> dict[str, Any]:
        rates = [requests.tokens / seconds for seconds in self.seconds]
        if_known = {
            "tokens_per_s_best": max(rates, default=None),
            "ms_per_token": self.ms_per_token(requests),
            "prefill_seconds": list(self.prefill_seconds) or None,
            "trial_seconds": self.trial_seconds,
        }
        always = {
            "tokens_per_s": self.tokens_per_s(requests),
            "tokens_per_s_all": rates,
            "seconds": list(self.seconds),
            "error": self.error,
        }
        known = {name: value for name, value in if_known.items() if value is not None}
        return {"setting": dict(self.setting), "logprobs": self.logprobs, **always, **known}


@dataclass(frozen=True)
class Measured:
    """All settings of an engine, and further details about it."""

    timings: Sequence[Timing]
    details: Mapping[str, Any] = field(default_factory=dict)

    def best(self, requests: Requests, *, logprobs: bool = True) -> Timing | None:
        """Return the fastest setting. A rollout needs log-probs: settings without them are compared only with each other."""
        measured = [timing for timing in self.timings if timing.logprobs == logprobs and timing.seconds]
        return max(measured, key=lambda timing: timing.speed(requests) or 0.0, default=None)

    def as_json(self, requests: Requests) -> dict[str, Any]:
        best, bare = self.best(requests), self.best(requests, logprobs=False)
        failed: dict[str, Any] = {"setting": {}, "tokens_per_s": None, "error": "no setting with log-probs worked"}
        found = best.as_json(requests) if best else failed
        if bare:
            found["without_logprobs"] = bare.as_json(requests)
        return found | dict(self.details) | {"all_settings": [timing.as_json(requests) for timing in self.timings]}


@dataclass(frozen=True)
class StepTiming:
    """The timing of a system at one setting over some steps."""

    setting: Mapping[str, Any]
    seconds: Sequence[float] = ()  # seconds of each step after the warm-up
    rollout_seconds: Sequence[float] = ()  # seconds of each of these steps until its last sample was finished
    first_step_seconds: float | None = None  # seconds of the warm-up step
    peak_memory_bytes: int | None = None  # allocated by torch, from the first step on
    peak_device_bytes: int | None = None  # peak bytes in use on the device, without those of other processes
    start_seconds: float | None = None  # seconds until the first step
    error: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> float | None:
        return median(self.seconds) if self.seconds else None

    def as_json(self, tokens: int) -> dict[str, Any]:
        """Return the timing in JSON's types. `tokens`: of all prompts and responses of a step."""
        found = {name: value for name, value in vars(self).items() if name not in ("seconds", "details")}
        return found | {
            "setting": dict(self.setting),
            "step_seconds": self.median,
            "step_seconds_all": list(self.seconds),
            "rollout_seconds": median(self.rollout_seconds) if self.rollout_seconds else None,
            "tokens_per_s": tokens / self.median if self.median else None,
        }


def fastest(found: Sequence[StepTiming]) -> StepTiming | None:
    return min((steps for steps in found if steps.seconds), key=lambda steps: median(steps.seconds), default=None)
