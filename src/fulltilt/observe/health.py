"""Whether a run is still worth its electricity: rules over the metrics of one step.

Enters: the metrics of each step, under the names of docs/metrics.md. Leaves: for each step a `Verdict`: which rules hold, what to tell the
user, and whether to stop. Guaranteed: a verdict is a function of the metrics and of how often each rule has held in a row, which
`streaks` gives to checkpoints and takes from them, so that a resumed run stops at the step where an uninterrupted one does; a metric
that a step does not have makes no rule hold. Free of torch.

What the loop does with it: while a rule holds, `Verdict.may_save` is false and no checkpoint is written, so that the newest one is from
before; a run that has none yet saves the state it stops in. Where `health.stop` is off, checkpoints are written as ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fulltilt.config import HealthConfig
from fulltilt.records import UserError

Metrics = Mapping[str, float]


class Unhealthy(UserError):
    """The run stopped itself. Like every mistake that only the user can mend, it says what, where and the remedy."""


@dataclass(frozen=True)
class Rule:
    name: str
    holds: Callable[[Metrics, HealthConfig], str | None]  # what was measured, in words; None: the rule does not hold
    cause: str
    remedy: str


def _no_variance(metrics: Metrics, config: HealthConfig) -> str | None:
    """Groups of one, and groups that differ only from one another, still teach an algorithm whose baseline is not the group's mean."""
    learns = metrics.get("critic/advantages/max", 0.0) != 0 or metrics.get("critic/advantages/min", 0.0) != 0
    # A critic's errors, or a KL penalty, make advantages out of any rewards. Failed samples and groups carried over are not in the scores.
    told_apart = metrics.get("critic/score/max") != metrics.get("critic/score/min")
    told_apart |= metrics.get("reward/errors", 0) > 0 or metrics.get("rollout/lag_max", 0) > 0
    if metrics.get("reward/groups_with_variance") != 0 or (learns and told_apart) or metrics.get("reward/samples", 2) < 2:
        return None
    same = metrics.get("critic/score/max")
    everywhere = f": every sample got {same:g}" if same is not None and same == metrics.get("critic/score/min") else ""
    return f"no group of this step has two different rewards{everywhere}"


def _not_finite(metrics: Metrics, config: HealthConfig) -> str | None:
    skipped = {role: metrics.get(f"{role}/skipped_updates", 0) for role in ("actor", "critic")}
    found = [
        f"{count:.0f} of the {role}'s optimizer steps left out for a gradient that is not finite"
        for role, count in skipped.items()
        if count
    ]
    names = [name for name, value in metrics.items() if not math.isfinite(value)]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        found.append(f"not finite: {', '.join(names[:3])}{more}")
    return "; ".join(found) or None


def _entropy_collapse(metrics: Metrics, config: HealthConfig) -> str | None:
    # SFT has an entropy too, but samples nothing: there a low one only says that the data is learned.
    entropy = metrics.get("actor/entropy") if "response_length/mean" in metrics else None
    if entropy is None or not entropy < config.entropy_floor:
        return None
    return f"actor/entropy is {entropy:.4g} nats per token, below health.entropy_floor = {config.entropy_floor:g}"


def _all_clipped(metrics: Metrics, config: HealthConfig) -> str | None:
    share = metrics.get("response_length/clip_ratio")
    if share is None or not share > config.max_clip_ratio:
        return None
    return f"{share:.1%} of the responses were cut, more than health.max_clip_ratio = {config.max_clip_ratio:g}"


def _reward_errors(metrics: Metrics, config: HealthConfig) -> str | None:
    errors, samples = metrics.get("reward/errors"), metrics.get("reward/samples")
    if errors is None or not samples or not errors / samples > config.max_reward_errors:
        return None
    return f"the reward of {errors:.0f} of {samples:.0f} samples failed, more than health.max_reward_errors = {config.max_reward_errors:g}"


def _logprob_gap(metrics: Metrics, config: HealthConfig) -> str | None:
    gap = metrics.get("rollout_corr/logprob_abs_gap")
    if gap is None or not gap > config.max_logprob_gap:
        return None
    return f"rollout_corr/logprob_abs_gap is {gap:.4g}, above health.max_logprob_gap = {config.max_logprob_gap:g}"


RULES: tuple[Rule, ...] = (
    Rule(
        "no-variance",
        _no_variance,
        cause="the samples of a prompt all get the same reward, so that there is nothing to learn",
        remedy="read the run's rollouts/ with their rewards: if every sample is as good as can be, the task is solved and harder prompts "
        "are wanted; else mend a reward that cannot tell samples apart, or take prompts that the model "
        "solves sometimes, more algorithm.samples_per_prompt or a higher rollout.temperature",
    ),
    Rule(
        "not-finite",
        _not_finite,
        cause="NaN or infinity in the computation: parameters, loss or gradient have overflowed",
        remedy="lower train.lr (the critic's: critic.lr), keep train.clip_grad on, check the model's weights and a loss or advantage of "
        "your own, or start anew in float32 (model.dtype)",
    ),
    Rule(
        "entropy-collapse",
        _entropy_collapse,
        cause="the model is almost certain of every token: the samples of a prompt are alike and nothing new is tried",
        remedy="lower train.lr, raise algorithm.clip_high or algorithm.entropy_coef, or keep the model near its start by algorithm.kl_coef",
    ),
    Rule(
        "all-clipped",
        _all_clipped,
        cause="responses are cut at rollout.max_new_tokens before they end, so that rewards judge unfinished answers",
        remedy="raise rollout.max_new_tokens; if no response ever ends, check the chat template and the end token, or set rollout.stop",
    ),
    Rule(
        "reward-errors",
        _reward_errors,
        cause="the reward function fails on many samples",
        remedy="read the run's reward_errors.jsonl, then mend the function, or raise reward.timeout_s or reward.memory_gb",
    ),
    Rule(
        "logprob-gap",
        _logprob_gap,
        cause="sampling and training do not compute the same log-probs: updates are made for another policy than the one that sampled",
        remedy="compute in float32 (model.dtype, in another run.dir): if the gap goes, it was rounding, and health.max_logprob_gap may be "
        "raised; if it stays, one of the two computes this model wrongly",
    ),
)


@dataclass(frozen=True)
class Verdict:
    """What one step's metrics say of the run."""

    sick: tuple[str, ...]  # rules that hold now
    warnings: tuple[str, ...]  # to show: a rule began to hold, or ceased to
    stop: str | None  # why the run must stop; None: it goes on
    may_save: bool  # a checkpoint of this step may take its place among the good ones


class Health:
    def __init__(self, config: HealthConfig, streaks: Mapping[str, int] | None = None) -> None:
        """`streaks`: those of the checkpoint that the run resumes from."""
        self.config = config
        self._rules = tuple(rule for rule in RULES if rule.name not in config.ignore)
        looked_at = {rule.name for rule in self._rules}
        self._streaks = {name: count for name, count in (streaks or {}).items() if name in looked_at and count > 0}
        self._told: set[str] = set()  # not saved: who resumes a run in the middle of a streak is told once more

    @property
    def streaks(self) -> dict[str, int]:
        """For how many steps in a row each rule that holds has held."""
        return dict(self._streaks)

    def look(self, step: int, metrics: Metrics) -> Verdict:
        warnings, stops = [], []
        before, self._streaks = self._streaks, {}
        for rule in self._rules:
            measured, streak = rule.holds(metrics, self.config), before.get(rule.name, 0)
            if measured is None:
                if streak:
                    warnings.append(f"step {step}: {rule.name} has passed, after {_steps(streak)}")
                self._told.discard(rule.name)
                continue
            streak = self._streaks[rule.name] = streak + 1
            if self.config.stop and streak >= self.config.patience:
                stops.append(f"  {rule.name} for {_steps(streak)} in a row: {measured}; {rule.cause}. Remedy: {rule.remedy}.")
            elif rule.name not in self._told:
                warnings.append(f"step {step}: {rule.name}: {measured}; {rule.cause}. {self._outlook(streak)}. Remedy: {rule.remedy}.")
            self._told.add(rule.name)
        sick = tuple(self._streaks)
        stop = "\n".join([f"the run stopped itself after step {step}", *stops]) if stops else None
        return Verdict(sick, tuple(warnings), stop, may_save=not (sick and self.config.stop))

    def _outlook(self, streak: int) -> str:
        if not self.config.stop:
            return "The run goes on, since health.stop is off"
        held = f" (it has held for {_steps(streak)} by now)" if streak > 1 else ""
        return f"If this lasts for {_steps(self.config.patience - streak)} more, the run stops{held}"


def last_good(step: int, checkpoints: Path, *, good: bool = True) -> str:
    """Where to go on from. `step` is that of the newest checkpoint in the folder `checkpoints`; `good`: no rule held when it was saved."""
    path = checkpoints / f"step-{step:08d}"
    where = f"The last good checkpoint is {path}" if good else f"The newest checkpoint, saved while it held, is {path}"
    damage = "" if good else "; if it holds the damage already, start anew in another run.dir"
    return (
        f"{where}. Mend the cause and give the command again to go on from there, with run.resume=force if keys outside [health] change"
        f"{damage}; health.ignore leaves a rule out"
    )


def _steps(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"
