"""Health: rules over the metrics of each step that find runs which no longer learn.

Enters: the metrics of each step, under the names of docs/metrics.md. Leaves: for each step a `Verdict`: which rules hold, what to tell the
user, and whether to stop. Guaranteed: whether to stop depends only on the metrics, on the entropy of the run's first step and on how often
each rule has held in a row. Checkpoints save the last two (`first_entropy`, `streaks`), so that a resumed run stops at the same step as an
uninterrupted one. A metric that a step does not have makes no rule begin to hold. Free of torch.

What the loop does with it: while a rule holds, `may_save` is false and no checkpoint is written, so that the newest one is older than the
problem; a run that has none yet saves the state that it stops in. With `health.stop` off, checkpoints are written as usual. A rule that
only warns holds no checkpoint back and is not in `streaks`: it looks at the memory of this process, which ends with the process.
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
MEMORY = "memory_gib/"  # the names of memory metrics begin with this, followed by the phase and the kind
PASSING = ("peak", "activations", "head", "reserved")  # kinds that are not held: they vary with the lengths of the samples
WARM_UP_STEPS = 2  # steps in which caches fill and graphs are captured
GROWTH_STEPS = 10  # steps in a row: a number that varies by chance does not grow in so many
GROWTH_GIB = 1 / 16
ENTROPY = "rollout/entropy"
ENTROPY_NATS = 1.0  # per token; below this no rise counts as an explosion, because a multiple of almost nothing is still small


class Unhealthy(UserError):
    """The run stopped itself. Like every error that the user can fix, it says what, where and the remedy."""


@dataclass(frozen=True)
class Climb:
    """A number that has grown in each of the last `steps` steps that have it."""

    steps: int
    begin: float  # before the first of them
    now: float
    most: float = 0.0  # the largest growth in one step

    @property
    def steady(self) -> float:
        """Its growth without the largest step: what is taken once, like memory for a checkpoint's copy, is not a leak."""
        return self.now - self.begin - self.most

    def to(self, value: float) -> Climb:
        """The climb after one more step with this value."""
        if value <= self.now:
            return Climb(0, value, value)
        return Climb(self.steps + 1, self.begin, value, max(self.most, value - self.now))


Climbs = Mapping[str, Climb]


@dataclass(frozen=True)
class Past:
    """What is known from earlier steps."""

    climbs: Climbs
    first_entropy: float | None  # that of the run's first step with samples


@dataclass(frozen=True)
class HealthRule:
    name: str
    holds: Callable[[Metrics, Past, HealthConfig], str | None]  # what was measured, as text; None: the rule does not hold
    cause: str
    remedy: str
    stops: bool = True  # False: it only warns


def _no_variance(metrics: Metrics, past: Past, config: HealthConfig) -> str | None:
    """An algorithm whose baseline is not the group's mean can still learn from groups of one sample, and from groups whose rewards differ
    only between groups."""
    learns = metrics.get("critic/advantages/max", 0.0) != 0 or metrics.get("critic/advantages/min", 0.0) != 0
    # A critic's errors or a KL penalty give advantages whatever the rewards. Failed samples and carried-over groups are not in the scores.
    told_apart = metrics.get("critic/score/max") != metrics.get("critic/score/min")
    told_apart |= metrics.get("reward/errors", 0) > 0 or metrics.get("rollout/lag_max", 0) > 0
    if metrics.get("reward/groups_with_variance") != 0 or (learns and told_apart) or metrics.get("reward/samples", 2) < 2:
        return None
    if metrics.get("reward/errors", 0) >= metrics.get("reward/samples", math.inf):
        return None  # no sample has a reward at all: the rule reward-errors covers that
    same = metrics.get("critic/score/max")
    everywhere = f": every sample got {same:g}" if same is not None and same == metrics.get("critic/score/min") else ""
    return f"no group of this step has two different rewards{everywhere}"


def _not_finite(metrics: Metrics, past: Past, config: HealthConfig) -> str | None:
    skipped = {role: metrics.get(f"{role}/skipped_updates", 0) for role in ("actor", "critic")}
    found = [
        f"{count:.0f} of the {role}'s optimizer steps skipped because the gradient is not finite"
        for role, count in skipped.items()
        if count
    ]
    if names := [name for name, value in metrics.items() if not math.isfinite(value)]:
        found.append(f"not finite: {listed(names, 3)}")
    return "; ".join(found) or None


def _entropy_collapse(metrics: Metrics, past: Past, config: HealthConfig) -> str | None:
    # The entropy of all samples: an update does not compute that of groups without an advantage. SFT samples nothing and has no such
    # metric: there a low entropy only says that the data is learned.
    entropy = metrics.get(ENTROPY)
    if entropy is None or not entropy < config.entropy_floor:
        return None
    return f"rollout/entropy is {entropy:.4g} nats per token, below health.entropy_floor = {config.entropy_floor:g}"


def _entropy_explosion(metrics: Metrics, past: Past, config: HealthConfig) -> str | None:
    entropy, first = metrics.get(ENTROPY), past.first_entropy
    if entropy is None or first is None or not entropy > max(ENTROPY_NATS, config.max_entropy_rise * first):
        return None
    rise = f"health.max_entropy_rise = {config.max_entropy_rise:g}"
    return f"rollout/entropy is {entropy:.4g} nats per token, more than {rise} times the {first:.4g} of the run's first step"


def _above(name: str, key: str, words: str) -> Callable[[Metrics, Past, HealthConfig], str | None]:
    """A rule that holds while a metric is above the limit `health.KEY`."""

    def holds(metrics: Metrics, past: Past, config: HealthConfig) -> str | None:
        value, limit = metrics.get(name), getattr(config, key)
        return None if value is None or not value > limit else f"{words.format(value)} health.{key} = {limit:g}"

    return holds


def _reward_errors(metrics: Metrics, past: Past, config: HealthConfig) -> str | None:
    errors, samples = metrics.get("reward/errors"), metrics.get("reward/samples")
    if errors is None or not samples or not errors / samples > config.max_reward_errors:
        return None
    return f"the reward of {errors:.0f} of {samples:.0f} samples failed, more than health.max_reward_errors = {config.max_reward_errors:g}"


def _memory_growth(metrics: Metrics, past: Past, config: HealthConfig) -> str | None:
    grown = {name: climb for name, climb in past.climbs.items() if climb.steps >= GROWTH_STEPS and climb.steady > GROWTH_GIB}
    by_kind: dict[str, tuple[float, str]] = {}
    for name, climb in grown.items():
        *phase, kind = name.removeprefix(MEMORY).split("/")
        where = f" at the end of {phase[0]}" if phase else ""
        words = f"{kind}{where} by {climb.now - climb.begin:.2f} to {climb.now:.2f} GiB in {climb.steps} steps"
        by_kind[kind] = max(by_kind.get(kind, (0.0, "")), (climb.now - climb.begin, words))
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
        _entropy_collapse,
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
        _above("response_length/clip_ratio", "max_clip_ratio", "{:.1%} of the responses were cut off, more than"),
        cause="responses are cut off at rollout.max_new_tokens, so rewards judge unfinished answers",
        remedy="raise rollout.max_new_tokens; if no response ever ends, check the chat template and the end token, or set rollout.stop",
    ),
    HealthRule(
        "reward-errors",
        _reward_errors,
        cause="the reward function fails on many samples",
        remedy="read the run's reward_errors.jsonl, then fix the function, or raise reward.timeout_s or reward.memory_gb",
    ),
    HealthRule(
        "logprob-gap",
        _above("rollout_corr/logprob_abs_gap", "max_logprob_gap", "rollout_corr/logprob_abs_gap is {:.4g}, above"),
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


class Growth:
    """Follows, over the steps of this process, the memory held at the end of each phase and that of the whole process."""

    def __init__(self) -> None:
        self._steps = 0
        self.climbs: dict[str, Climb] = {}

    def follow(self, metrics: Metrics) -> Climbs:
        self._steps += 1
        for name, value in metrics.items():
            if not name.startswith(MEMORY) or name.split("/")[-1] in PASSING or self._steps <= WARM_UP_STEPS:
                continue
            self.climbs[name] = self.climbs.get(name, Climb(0, value, value)).to(value)
        return self.climbs


@dataclass(frozen=True)
class Verdict:
    """What one step's metrics say about the run."""

    sick: tuple[str, ...]  # rules that hold now
    warnings: tuple[str, ...]  # to be shown: a rule began to hold, or no longer holds
    stop: str | None  # why the run must stop; None: it continues
    may_save: bool  # a checkpoint of this step may be saved


class Health:
    def __init__(self, config: HealthConfig, streaks: Mapping[str, int] | None = None, first_entropy: float | None = None) -> None:
        """`streaks` and `first_entropy` come from the checkpoint that the run resumes from."""
        self.config = config
        self._rules = tuple(rule for rule in RULES if rule.name not in config.ignore)
        looked_at = {rule.name for rule in self._rules if rule.stops}
        self._streaks = {name: count for name, count in (streaks or {}).items() if name in looked_at and count > 0}
        self._growth = Growth()
        self.first_entropy = first_entropy
        self._told: set[str] = set()  # not saved: a run that resumes in the middle of a streak warns once more

    @property
    def streaks(self) -> dict[str, int]:
        """For how many steps in a row each rule that holds, and may stop the run, has held."""
        return {rule.name: self._streaks[rule.name] for rule in self._rules if rule.stops and rule.name in self._streaks}

    @property
    def may_save(self) -> bool:
        """Whether a checkpoint of the last step may be saved."""
        return not (self.streaks and self.config.stop)

    def look(self, step: int, metrics: Metrics) -> Verdict:
        warnings, stops = [], []
        before, self._streaks = self._streaks, {}
        if self.first_entropy is None and math.isfinite(metrics.get(ENTROPY, math.nan)):
            self.first_entropy = metrics[ENTROPY]
        past = Past(self._growth.follow(metrics), self.first_entropy)
        for rule in self._rules:
            measured, streak = rule.holds(metrics, past, self.config), before.get(rule.name, 0)
            if measured is None:
                if streak:
                    warnings.append(f"step {step}: {rule.name} no longer holds, after {many(streak, 'step')}")
                self._told.discard(rule.name)
                continue
            streak = self._streaks[rule.name] = streak + 1
            if self.config.stop and rule.stops and streak >= self.config.patience:
                stops.append(f"  {rule.name} for {many(streak, 'step')} in a row: {measured}; {rule.cause}. Remedy: {rule.remedy}.")
            elif rule.name not in self._told:
                outlook = self._outlook(streak) if rule.stops else "The run continues: this rule only warns"
                warnings.append(f"step {step}: {rule.name}: {measured}; {rule.cause}. {outlook}. Remedy: {rule.remedy}.")
            self._told.add(rule.name)
        sick = tuple(self._streaks)
        stop = "\n".join([f"the run stopped itself after step {step}", *stops]) if stops else None
        return Verdict(sick, tuple(warnings), stop, may_save=self.may_save)

    def _outlook(self, streak: int) -> str:
        if not self.config.stop:
            return "The run continues because health.stop is off"
        held = f" (it has held for {many(streak, 'step')} so far)" if streak > 1 else ""
        return f"If this lasts for {many(self.config.patience - streak, 'step')} more, the run stops{held}"


def last_good(step: int, checkpoints: Path, *, good: bool = True) -> str:
    """Where to resume from. `step` is that of the newest checkpoint in the folder `checkpoints`; `good`: no rule held when it was saved."""
    path = checkpoints / f"step-{step:08d}"
    where = f"The last good checkpoint is {path}" if good else f"The newest checkpoint, saved while the rule held, is {path}"
    damage = "" if good else "; if it is already damaged, start again in another run.dir"
    return (
        f"{where}. Fix the cause and repeat the command to resume from there, with run.resume=force if keys outside [health] change"
        f"{damage}; health.ignore turns a rule off"
    )
