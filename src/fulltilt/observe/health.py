"""Health: rules over the metrics of each step that detect runs which no longer learn.

Enters: the metrics of each step, under the names of docs/metrics.md. Leaves: for each step a `Verdict`: which rules hold, what to tell the
user, and whether to stop. Guaranteed: whether to stop depends only on the metrics, on the entropy of the run's first step and on how often
each rule has held in a row. Checkpoints save the last two (`first_entropy`, `streaks`), so that a resumed run stops at the same step as an
uninterrupted one. A metric that a step does not have makes no rule begin to hold. Free of torch.

The loop uses it as follows: while a rule holds, `may_save` is false and no checkpoint is written, so that the newest one is older than the
problem; a run that has none yet saves the state that it stops in. With `health.stop` off, checkpoints are written as usual. A rule that
only warns prevents no checkpoint and is not in `streaks`: it watches the memory of this process, which ends with the process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fulltilt.records import UserError
from fulltilt.schema import HealthConfig
from fulltilt.words import listed, many

Metrics = Mapping[str, float]
MEMORY = "memory_gib/"  # prefix of memory metrics, followed by the phase and the kind
PASSING = ("peak", "activations", "head", "reserved")  # kinds that vary with the lengths of the samples: their growth shows no leak
WARM_UP_STEPS = 2  # steps in which caches fill and graphs are captured
GROWTH_STEPS = 10  # steps in a row: a number that varies by chance does not grow in all of them
GROWTH_GIB = 1 / 16
EVERY_REWARD_FAILED = "all-rewards-failed"
FAILED_REWARDS = "read the run's reward_errors.jsonl, then fix the function, or raise reward.timeout_s or reward.memory_gb"
PAGE = "docs/health.md"  # has a section for each rule
ENTROPY = "rollout/entropy"
ENTROPY_NATS = 1.0  # per token; below this no rise counts as an explosion, because a multiple of a tiny number is still small


class Unhealthy(UserError):
    """The run stopped itself. Like every error that the user can fix, its text says what is wrong, where, and the remedy."""


@dataclass(frozen=True)
class Climb:
    """A number that has grown in each of the last `steps` steps that have it."""

    steps: int
    begin: float  # value before the first of these steps
    now: float
    most: float = 0.0  # the largest growth in one step, not counted: what is allocated once, as for a checkpoint's copy, is not a leak

    def to(self, value: float) -> Climb:
        """Return the climb after one more step with this value."""
        if value <= self.now:
            return Climb(0, value, value)
        return Climb(self.steps + 1, self.begin, value, max(self.most, value - self.now))


@dataclass(frozen=True)
class HealthRule:
    name: str
    holds: Callable[[Metrics, Health], str | None]  # returns the measurement as text; None: the rule does not hold
    cause: str
    remedy: str
    stops: bool = True  # False: it only warns
    at_once: bool = False  # stops the run in the first step for which it holds, the last one included, whatever `health.patience` says
    covers: tuple[str, ...] = ()  # rules that do not warn while this one holds, because it explains the same in more detail


def _no_variance(metrics: Metrics, health: Health) -> str | None:
    """Hold if no group has two different rewards. An algorithm whose baseline is not the group's mean can still learn from groups of one
    sample, and from groups whose rewards differ only between groups."""
    learns = metrics.get("critic/advantages/max", 0.0) != 0 or metrics.get("critic/advantages/min", 0.0) != 0
    # A critic's errors or a KL penalty give advantages whatever the rewards. Failed samples and carried-over groups are not in the scores.
    told_apart = metrics.get("critic/score/max") != metrics.get("critic/score/min")
    told_apart |= metrics.get("reward/errors", 0) > 0 or metrics.get("rollout/lag_max", 0) > 0
    if metrics.get("reward/groups_with_variance") != 0 or (learns and told_apart) or metrics.get("reward/samples", 2) < 2:
        return None
    if metrics.get("reward/errors", 0) >= metrics.get("reward/samples", math.inf):
        return None  # no sample has a reward at all: the rule all-rewards-failed covers that
    same = metrics.get("critic/score/max")
    everywhere = f": every sample got {same:g}" if same is not None and same == metrics.get("critic/score/min") else ""
    return f"no group of this step has two different rewards{everywhere}"


def _not_finite(metrics: Metrics, health: Health) -> str | None:
    skipped = {role: metrics.get(f"{role}/skipped_updates", 0) for role in ("actor", "critic")}
    found = [
        f"{count:.0f} of the {role}'s optimizer steps skipped because the gradient is not finite"
        for role, count in skipped.items()
        if count
    ]
    if names := [name for name, value in metrics.items() if not math.isfinite(value)]:
        found.append(f"not finite: {listed(names, 3)}")
    return "; ".join(found) or None


def _entropy_explosion(metrics: Metrics, health: Health) -> str | None:
    entropy, first, rise = metrics.get(ENTROPY), health.first_entropy, health.config.max_entropy_rise
    if entropy is None or first is None or not entropy > max(ENTROPY_NATS, rise * first):
        return None
    allowed = f"health.max_entropy_rise = {rise:g} times the {first:.4g} of the run's first step"
    return f"rollout/entropy is {entropy:.4g} nats per token, more than {allowed}"


def _beyond(name: str, key: str, words: str) -> Callable[[Metrics, Health], str | None]:
    """Return a rule that holds while a metric is beyond the limit `health.KEY`: below a floor, above all others."""

    def holds(metrics: Metrics, health: Health) -> str | None:
        value, limit = metrics.get(name, math.nan), getattr(health.config, key)
        beyond = value < limit if key.endswith("floor") else value > limit
        return f"{words.format(value)} health.{key} = {limit:g}" if beyond else None

    return holds


def _reward_errors(metrics: Metrics, health: Health) -> str | None:
    errors, samples, limit = metrics.get("reward/errors", 0), metrics.get("reward/samples"), health.config.max_reward_errors
    if not samples or not errors / samples > limit:
        return None
    return f"the reward of {errors:.0f} of {samples:.0f} samples failed, more than health.max_reward_errors = {limit:g}"


def every_reward_failed(metrics: Metrics) -> str | None:
    """Return what failed, if no sample of the step, or none of its validation, has a reward; None: there is a reward."""
    errors, samples, validated = (metrics.get(name, 0) for name in ("reward/errors", "reward/samples", "val/reward_errors"))
    found = [f"the reward of every sample of the step failed ({errors:.0f} of {samples:.0f})"] if 0 < samples <= errors else []
    if validated and "val/reward/mean" not in metrics:
        found.append(f"the reward of every sample of the validation failed ({validated:.0f} of {validated:.0f})")
    return "; ".join(found) or None


def _memory_growth(metrics: Metrics, health: Health) -> str | None:
    by_kind: dict[str, tuple[float, str]] = {}
    for name, climb in health.climbs.items():
        growth = climb.now - climb.begin
        if climb.steps >= GROWTH_STEPS and growth - climb.most > GROWTH_GIB:
            *phase, kind = name.removeprefix(MEMORY).split("/")
            where = f" at the end of {phase[0]}" if phase else ""
            words = f"{kind}{where} by {growth:.2f} to {climb.now:.2f} GiB in {climb.steps} steps"
            by_kind[kind] = max(by_kind.get(kind, (0.0, "")), (growth, words))
    if not by_kind:
        return None
    return f"memory held has grown in every step: {', '.join(words for _, words in sorted(by_kind.values(), reverse=True))}"


RULES: tuple[HealthRule, ...] = (
    HealthRule(
        "no-variance",
        _no_variance,
        cause="all samples of a prompt get the same reward, so there is nothing to learn from",
        remedy="read the run's rollouts/ with their rewards: if every sample is as good as possible, the task is solved and needs harder "
        "prompts; otherwise fix a reward that cannot tell samples apart, or use prompts that the model solves sometimes, more "
        "algorithm.samples_per_prompt or a higher rollout.temperature",
    ),
    HealthRule(
        "not-finite",
        _not_finite,
        cause="NaN or infinity in the computation: parameters, loss or gradient have overflowed",
        remedy="lower train.lr (for the critic: critic.lr), keep train.clip_grad on, check the model's weights and any loss or advantage "
        "of your own, or start again in float32 (model.dtype)",
    ),
    HealthRule(
        "entropy-collapse",
        # The entropy is that of all samples: an update does not compute it for groups without an advantage. SFT samples nothing and has no
        # such metric: there a low entropy only shows that the data is learned.
        _beyond(ENTROPY, "entropy_floor", "rollout/entropy is {:.4g} nats per token, below"),
        cause="the model is almost certain of every token: the samples of a prompt are alike and nothing new is explored",
        remedy="lower train.lr, raise algorithm.clip_high or algorithm.entropy_coef, or keep the model close to its start with "
        "algorithm.kl_coef",
    ),
    HealthRule(
        "entropy-explosion",
        _entropy_explosion,
        cause="samples become incoherent: tokens are drawn more and more by chance, until no sample gets a reward",
        remedy="lower algorithm.entropy_coef or train.lr, or keep the model close to its start with algorithm.kl_coef",
    ),
    HealthRule(
        "all-clipped",
        _beyond("response_length/clip_ratio", "max_clip_ratio", "{:.1%} of the responses were cut off, more than"),
        cause="responses are cut off at rollout.max_new_tokens, so rewards judge unfinished answers",
        remedy="raise rollout.max_new_tokens; if no response ever ends, check the chat template and the end token, or set rollout.stop",
    ),
    HealthRule(
        "reward-errors",
        _reward_errors,
        cause="the reward function fails on many samples",
        remedy=FAILED_REWARDS,
    ),
    HealthRule(
        EVERY_REWARD_FAILED,
        lambda metrics, health: every_reward_failed(metrics),
        cause="the reward function, or a service that it calls, does not work",
        remedy=f"{FAILED_REWARDS}; `fulltilt train --check` calls it once",
        at_once=True,
        covers=("reward-errors",),
    ),
    HealthRule(
        "logprob-gap",
        _beyond("rollout_corr/logprob_abs_gap", "max_logprob_gap", "rollout_corr/logprob_abs_gap is {:.4g}, above"),
        cause="sampling and training do not compute the same log-probs: updates are made for a different policy than the one that sampled",
        remedy="compute in float32 (model.dtype, in another run.dir): if the gap disappears, it was rounding, and "
        "health.max_logprob_gap may be raised; if it stays, one of the two computes this model wrongly",
    ),
    HealthRule(
        "memory-growth",
        _memory_growth,
        cause="something keeps what each step allocates, and at this rate memory will run out",
        remedy="look for data that a reward, loss or advantage of your own keeps from step to step (`process`: everything that this "
        "process has in host memory; `other`: device memory of no known kind); until then, stop and resume from time to time: a new "
        "process starts with empty memory",
        stops=False,
    ),
)


@dataclass(frozen=True)
class Verdict:
    """The judgement of one step's metrics about the run."""

    sick: tuple[str, ...]  # rules that hold now
    warnings: tuple[str, ...]  # one line for each rule that began to hold
    stop: str | None  # why the run must stop; None: it continues
    may_save: bool  # a checkpoint of this step may be saved
    notes: tuple[str, ...] = ()  # one line for each rule that has stopped holding
    failed: bool = False  # the run stops even after its last step


class Health:
    def __init__(self, config: HealthConfig, streaks: Mapping[str, int] | None = None, first_entropy: float | None = None) -> None:
        """Start to watch. `streaks` and `first_entropy` are those of the checkpoint that the run resumes from."""
        self.config = config
        self._rules = tuple(rule for rule in RULES if rule.name not in config.ignore)
        looked_at = {rule.name for rule in self._rules if rule.stops}
        self._streaks = {name: count for name, count in (streaks or {}).items() if name in looked_at and count > 0}
        self.first_entropy = first_entropy  # entropy of the run's first step with samples
        self.climbs: dict[str, Climb] = {}  # memory by metric name, followed since this process began
        self._steps = 0  # steps that this process has made
        self._told: set[str] = set()  # rules that have warned; not saved: a run that resumes in the middle of a streak warns once more

    @property
    def streaks(self) -> dict[str, int]:
        """Number of consecutive steps for which each rule that holds, and may stop the run, has held."""
        return {rule.name: self._streaks[rule.name] for rule in self._rules if rule.stops and rule.name in self._streaks}

    @property
    def may_save(self) -> bool:
        """Whether a checkpoint of the last step may be saved."""
        return not (self.streaks and self.config.stop)

    def look(self, step: int, metrics: Metrics) -> Verdict:
        self._follow(metrics)
        warnings, notes, stops, failed = [], [], [], False
        before, self._streaks = self._streaks, {}
        found = {rule.name: rule.holds(metrics, self) for rule in self._rules}
        covered = {name for rule in self._rules if found[rule.name] is not None for name in rule.covers}
        for rule in self._rules:
            measured, streak = found[rule.name], before.get(rule.name, 0)
            if measured is None:
                if streak:
                    notes.append(f"step {step}: {rule.name} no longer holds, after {many(streak, 'step')}")
                self._told.discard(rule.name)
                continue
            streak = self._streaks[rule.name] = streak + 1
            if self.config.stop and rule.stops and (rule.at_once or streak >= self.config.patience):
                failed |= rule.at_once
                lasted = f" for {many(streak, 'step')} in a row" if streak > 1 else ""
                stops.append(f"  {rule.name}{lasted}: {measured}; {rule.cause}. Remedy: {rule.remedy}.")
            elif rule.name not in self._told | covered:
                self._told.add(rule.name)
                outlook = self._outlook(streak) if rule.stops else "This rule only warns"
                warnings.append(f"step {step}: {rule.name}: {measured}. {outlook}: see {PAGE}#{rule.name}")
        stop = "\n".join([f"the run stopped itself after step {step}", *stops]) if stops else None
        return Verdict(tuple(self._streaks), tuple(warnings), stop, may_save=self.may_save, notes=tuple(notes), failed=failed)

    def failed(self, metrics: Metrics) -> str | None:
        """Return why a validation that is not part of a step stops the run; None: it does not."""
        watched = self.config.stop and EVERY_REWARD_FAILED not in self.config.ignore
        found = every_reward_failed(metrics) if watched else None
        return f"{EVERY_REWARD_FAILED}: {found}. Remedy: {FAILED_REWARDS}; health.ignore turns this rule off" if found else None

    def _follow(self, metrics: Metrics) -> None:
        """Remember the numbers that later steps are compared with."""
        if self.first_entropy is None and math.isfinite(metrics.get(ENTROPY, math.nan)):
            self.first_entropy = metrics[ENTROPY]
        self._steps += 1
        for name, value in metrics.items():
            if name.startswith(MEMORY) and name.split("/")[-1] not in PASSING and self._steps > WARM_UP_STEPS:
                self.climbs[name] = self.climbs.get(name, Climb(0, value, value)).to(value)

    def _outlook(self, streak: int) -> str:
        if not self.config.stop:
            return "The run continues because health.stop is off"
        held = f", after {many(streak, 'step')} so far" if streak > 1 else ""
        return f"If it lasts for {many(self.config.patience - streak, 'step')} more{held}, the run stops"


def last_good(step: int, checkpoints: Path, *, good: bool = True) -> str:
    """Say where to resume from. `step` is that of the newest checkpoint in the folder `checkpoints`; `good`: no rule held when it was
    saved."""
    path = checkpoints / f"step-{step:08d}"
    where = f"The last good checkpoint is {path}" if good else f"The newest checkpoint, saved while the rule held, is {path}"
    damage = "" if good else "; if it is already damaged, start again in another run.dir"
    return (
        f"{where}. Fix the cause and repeat the command to resume from there, with run.resume=force if your code or keys outside "
        f"[health] change{damage}; health.ignore turns a rule off"
    )
