"""The search for performance settings: the legal space of a run, pruned by the models of memory and time.

Enters: a configuration, a shape, devices and the mean response. Leaves: `SearchResult`, with finalists ranked by predicted seconds of a
step, each with its reasons. Guaranteed: arithmetic alone, no clock and no randomness; keys that the user has set, and keys of the
algorithm, never change; proposals fit by both fulltilt.plan and the model of memory, and obey the rules of the configuration; the order of
dictionaries does not matter; a space of at most `EXHAUSTIVE` settings is searched exhaustively. In a larger one each round tries every
single change; a change that would be faster but does not fit is also tried together with each change that frees memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fulltilt import config as configuration
from fulltilt.hardware import Cluster
from fulltilt.parallel.cuts import legal_expert_sizes, legal_sequence_sizes, legal_sizes
from fulltilt.plan.cache import MOST_SEQS
from fulltilt.records import UserError
from fulltilt.schema import Config, with_settings
from fulltilt.settings import is_set
from fulltilt.shape import Shape
from fulltilt.tune.description import AS_MODELLED, Calibration
from fulltilt.tune.memory_model import MemoryModel, memory_of
from fulltilt.tune.overlay import ALLOWED
from fulltilt.tune.own import own_plan
from fulltilt.tune.predict import calibrated
from fulltilt.tune.time_model import StepSeconds, seconds_of
from fulltilt.words import in_bytes

EXHAUSTIVE = 400  # most settings that are all predicted; each takes some hundredths of a second
MOST_ROUNDS = 12
DIFFERENT = 0.01  # share of the fastest step: closer predictions do not say which is faster, and finalists differ by more
NEGLIGIBLE = 0.002  # share of a step's seconds: a setting that changes less is left to `auto`
LADDER = {"cuda": (4096, 1 << 18), "cpu": (512, 1 << 16)}  # least and most tokens of a micro-batch that are tried
LEAST_SEQS = 16
KV_PARTS = (2, 4)  # divisors of the KV cache that `auto` chooses
MIB = 1 << 20

Settings = tuple[tuple[str, Any], ...]  # keys and values, in the order of the keys
Rules = Callable[[Config], Iterable[str]]


@dataclass(frozen=True)
class Axis:
    """Settings of which one is chosen, or none: then the key stays with `auto`."""

    name: str
    choices: tuple[Settings, ...]


@dataclass(frozen=True)
class Prediction:
    """Predictions of the models for a setting."""

    settings: Settings
    seconds: StepSeconds
    memory: MemoryModel
    refused: str = ""  # why it does not fit by fulltilt.plan

    @property
    def fits(self) -> bool:
        return self.memory.fits and not self.refused

    @property
    def step_s(self) -> float:
        """Seconds of a step, without the digits that rounding may change."""
        return float(f"{self.seconds.total:.9g}")

    @property
    def most_bytes(self) -> int:
        return max(phase.total for phase in self.memory.phases.values())

    @property
    def order(self) -> tuple[Any, ...]:
        """Sort key of predictions: those that fit by seconds, others by how far they are from fitting. Ties go to the fewest settings, then
        the least memory."""
        missing = 0.0 if self.fits else self.memory.overshoot + (1.0 if self.refused else 0.0)
        return not self.fits, missing, self.step_s, len(self.settings), self.most_bytes, repr(self.settings)

    def beats(self, other: Prediction) -> bool:
        """Return whether this one is faster by more than predictions can be wrong, or alone fits."""
        return self.fits and not (other.fits and other.step_s - self.step_s <= DIFFERENT * self.step_s)


@dataclass(frozen=True)
class Finalist:
    prediction: Prediction
    reasons: tuple[str, ...]

    @property
    def knobs(self) -> dict[str, Any]:
        return dict(self.prediction.settings)


@dataclass(frozen=True)
class SearchResult:
    auto: Prediction  # the prediction with everything that the user has not set left to `auto`
    finalists: tuple[Finalist, ...]  # the fastest first; empty if nothing fits
    axes: tuple[Axis, ...]  # axes that were searched
    alike: tuple[str, ...] = ()  # axes on which the models see no effect here
    predicted: int = 0  # number of settings that were predicted
    whole: bool = True  # whether the whole space was searched


# ---- the space ---------------------------------------------------------------------------------------------------------------------------


def settings_of(values: Mapping[str, Any]) -> Settings:
    return tuple(sorted(values.items()))


def space_of(config: Config, shape: Shape, cluster: Cluster, response: float | None = None) -> tuple[Axis, ...]:
    """Return what may be tried: the knobs that the user has not set, with the values that this model and these devices allow."""
    found = (*of_batches(config, shape, cluster, response), *of_memory(config, cluster), *of_rollout(config, shape, cluster, response))
    several = of_layout(config, shape, cluster) if cluster.gpus > 1 else ()
    axes = []
    for axis in (*found, *several):
        choices = tuple(own for own in axis.choices if not any(is_set(config, key) for key, _ in own))
        assert all(key in ALLOWED for own in choices for key, _ in own), "only performance knobs are tuned"
        axes += [Axis(axis.name, choices)] if choices else []
    return tuple(sorted(axes, key=lambda axis: axis.name))


def axis(key: str, values: Iterable[Any]) -> Axis:
    return Axis(key, tuple(settings_of({key: value}) for value in values))


def of_batches(config: Config, shape: Shape, cluster: Cluster, response: float | None) -> Iterator[Axis]:
    """Yield token budgets, up to one micro-batch for all tokens of a mini-batch."""
    if not config.actor.dynamic_batch:
        return
    run = own_plan(config, shape, cluster, response).run
    low, high = LADDER[cluster.gpu.device]
    most = min(high, 1 << math.ceil(math.log2(max(2.0, run.tokens / run.batch.updates))))
    budgets = [1 << power for power in range(int(math.log2(min(low, most))), int(math.log2(most)) + 1)]
    yield axis("actor.token_budget", budgets)
    # Sections of roles that a run does not have are refused, and their axes dropped later.
    for key in ("actor.forward_token_budget", "ref.forward_token_budget", "reward_model.forward_token_budget"):
        yield axis(key, budgets[1:])
    yield axis("critic.token_budget", budgets[1:])
    yield axis("critic.forward_token_budget", budgets[1:])


def of_memory(config: Config, cluster: Cluster) -> Iterator[Axis]:
    """Yield what is kept for the backward pass, and where; and kernels."""
    yield axis("train.recompute", ("none", "selective", "full"))
    yield axis("train.fused_head", (False,))
    if cluster.gpu.is_cpu:
        return
    for kind in ("activations", "grads", "optimizer", "params"):
        yield axis(f"train.offload_{kind}", (False, True))
    yield axis("train.fused_layers", (False, True))
    yield axis("train.head_recompute", (False, True))
    yield axis("ref.offload_params", (False, True))


def of_rollout(config: Config, shape: Shape, cluster: Cluster, response: float | None) -> Iterator[Axis]:
    algorithm = config.algorithm
    samples = algorithm.prompts_per_step * algorithm.samples_per_prompt
    most = min(samples, MOST_SEQS[cluster.gpu.device])
    halves = [most >> shift for shift in range(4) if most >> shift >= min(LEAST_SEQS, most)]
    yield axis("rollout.max_seqs", sorted(set(halves)))
    if not is_set(config, "rollout.memory_fraction"):
        run = own_plan(config, shape, cluster, response).run
        cache = max(0, memory_of(run).kv_bytes)
        yield axis("rollout.kv_bytes", sorted({max(MIB, cache // part // MIB * MIB) for part in KV_PARTS}))
    if not cluster.gpu.is_cpu:
        yield axis("rollout.release_memory", (False,))
        yield axis("rollout.cuda_graphs", (False,))


def of_layout(config: Config, shape: Shape, cluster: Cluster) -> Iterator[Axis]:
    """Yield the ways in which several devices share the work."""
    gpus = cluster.gpus - sum(config.cluster.roles.values())  # the actor's
    within = math.gcd(gpus, min(gpus, cluster.per_machine))
    ways: list[dict[str, Any]] = [{"train.shard": "optimizer"}, {"train.shard": "full"}]
    if 1 < cluster.per_machine < gpus and gpus % cluster.per_machine == 0:
        ways.append({"train.shard": "hybrid", "train.shard_size": cluster.per_machine})
    yield Axis("train.shard", tuple(map(settings_of, ways)))
    sizes = legal_sizes(shape, within)
    yield axis("train.tensor_parallel", sizes)
    yield axis("rollout.tensor_parallel", sizes)
    yield axis("train.sequence_parallel", legal_sequence_sizes(shape, gpus, 1))
    if any(layer.experts for layer in shape.layers):
        yield axis("train.expert_parallel", legal_expert_sizes(shape, gpus))


# ---- predictions -------------------------------------------------------------------------------------------------------------------------


class SettingsPredictor:
    """Predicts settings, each only once."""

    def __init__(
        self, config: Config, shape: Shape, cluster: Cluster, response: float | None = None, rules: Rules | None = None,
        calibration: Calibration = AS_MODELLED,
    ) -> None:  # fmt: skip
        """`rules`: further rules, from rooms that this one must not import. `calibration`: a probe's factors for the devices."""
        self.config, self.shape, self.cluster, self.response, self.calibration = config, shape, cluster, response, calibration
        self.rules: Rules = rules or (lambda config: ())
        self._known: dict[Settings, Prediction | None] = {}
        self._legal: dict[Settings, bool] = {}

    @property
    def predicted(self) -> int:
        return len(self._known)

    def __call__(self, settings: Settings) -> Prediction | None:
        """Return the prediction; None: the settings contradict each other."""
        if settings not in self._known:
            self._known[settings] = self._predict(settings)
        return self._known[settings]

    def _predict(self, settings: Settings) -> Prediction | None:
        try:
            own = own_plan(with_settings(self.config, dict(settings)), self.shape, self.cluster, self.response)
            run = calibrated(own.run, self.calibration)
            return Prediction(settings, seconds_of(run), memory_of(run), own.refused)
        except UserError:  # a layout that is impossible on the devices
            return None

    def legal(self, settings: Settings) -> bool:
        """Return whether a run with these settings would be accepted."""
        if settings not in self._legal:
            self._legal[settings] = not settings or not self._refusal(settings)
        return self._legal[settings]

    def _refusal(self, settings: Settings) -> str:
        try:
            checked = configuration.checked(with_settings(self.config, dict(settings)))
        except UserError as error:
            return str(error)
        return next(iter(self.rules(checked)), "")


# ---- the search --------------------------------------------------------------------------------------------------------------------------


def search(predict: SettingsPredictor, axes: Sequence[Axis], finalists: int = 4) -> SearchResult:
    """Return the fastest settings that fit, at most `finalists` of them."""
    axes = tuple(sorted((Axis(own.name, tuple(sorted(own.choices, key=repr))) for own in axes), key=lambda own: own.name))
    auto = predict(())
    if auto is None:
        raise UserError("tune: the run's own settings contradict each other on these devices. `fulltilt plan RUN.toml` says why")
    axes, alike = effective(predict, axes, auto)
    size = math.prod(len(own.choices) + 1 for own in axes)
    found = list(everything(predict, axes) if size <= EXHAUSTIVE else descent(predict, axes, auto))
    chosen = choose(predict, axes, found, finalists)
    return SearchResult(
        auto, tuple(Finalist(own, tuple(reasons(own, auto))) for own in chosen), axes, alike, predict.predicted, size <= EXHAUSTIVE
    )


def effective(predict: SettingsPredictor, axes: Sequence[Axis], auto: Prediction) -> tuple[tuple[Axis, ...], tuple[str, ...]]:
    """Return the axes with the choices that are legal alone, and the names of those that are left out because the models see no effect."""
    kept, alike = list[Axis](), list[str]()
    for own in axes:
        legal = [choice for choice in own.choices if predict.legal(choice)]
        seen = [found for found in map(predict, legal) if found is not None]
        if any((each.step_s, each.most_bytes, each.fits) != (auto.step_s, auto.most_bytes, auto.fits) for each in seen):
            kept.append(Axis(own.name, tuple(legal)))
        elif legal:
            alike.append(own.name)
    return tuple(kept), tuple(alike)


def everything(predict: SettingsPredictor, axes: Sequence[Axis]) -> Iterator[Prediction]:
    for choices in itertools.product(*(((), *own.choices) for own in axes)):
        if (found := predict(settings_of(dict(itertools.chain(*choices))))) is not None:
            yield found


def descent(predict: SettingsPredictor, axes: Sequence[Axis], auto: Prediction) -> list[Prediction]:
    """Return all predictions on the way from `auto` to a setting that no change makes faster."""
    seen, at = {auto.settings: auto}, auto
    for _ in range(MOST_ROUNDS):
        singles = dict(changes(predict, axes, at))
        seen |= {own.settings: own for own in singles.values()}
        tempting = [change for change, own in singles.items() if not own.fits and own.seconds.total < at.seconds.total]
        freeing = [
            change for change, own in singles.items() if own.memory.overshoot < at.memory.overshoot or own.most_bytes < at.most_bytes
        ]
        for (one, first), (other, second) in itertools.product(tempting, freeing):
            both = None if one == other else predict(changed(axes, at.settings, {one: first, other: second}))
            seen |= {both.settings: both} if both else {}
        best = next((own for own in sorted(seen.values(), key=lambda own: own.order) if predict.legal(own.settings)), at)
        if best.order >= at.order:
            break
        at = best
    return list(seen.values())


def changes(predict: SettingsPredictor, axes: Sequence[Axis], at: Prediction) -> Iterator[tuple[tuple[str, Settings], Prediction]]:
    """Yield the predictions of all single changes, each with its axis and choice."""
    for own in axes:
        for choice in ((), *own.choices):
            found = predict(changed(axes, at.settings, {own.name: choice}))
            if found is not None and found.settings != at.settings:
                yield (own.name, choice), found


def changed(axes: Sequence[Axis], settings: Settings, choices: Mapping[str, Settings]) -> Settings:
    """Return the settings with these choices in place of the axes' earlier ones."""
    moved = {key for own in axes if own.name in choices for choice in own.choices for key, _ in choice}
    kept = {key: value for key, value in settings if key not in moved}
    return settings_of(kept | dict(itertools.chain(*choices.values())))


def choose(predict: SettingsPredictor, axes: Sequence[Axis], found: Iterable[Prediction], count: int) -> list[Prediction]:
    """Return the fastest legal settings that fit, so far apart that predictions can tell which is faster. Left out is a setting that only
    adds something slower to one before it."""
    chosen: list[Prediction] = []

    def told_apart(own: Prediction) -> bool:
        apart = DIFFERENT * chosen[0].step_s if chosen else 0.0
        return all(abs(own.step_s - other.step_s) > apart and not adds_to(own, other) for other in chosen)

    for own in sorted(found, key=lambda own: own.order):
        if len(chosen) == count or not own.fits:
            break
        if told_apart(own) and predict.legal(own.settings):
            simple = simplified(predict, axes, own)
            chosen += [simple] if told_apart(simple) else []
    return chosen


def simplified(predict: SettingsPredictor, axes: Sequence[Axis], own: Prediction) -> Prediction:
    """Return the prediction without settings that have next to no effect."""
    found = own
    for each in axes:
        fewer = predict(changed(axes, found.settings, {each.name: ()}))
        if fewer is None or len(fewer.settings) == len(found.settings):
            continue
        if fewer.fits and abs(fewer.step_s - own.step_s) <= NEGLIGIBLE * own.step_s and predict.legal(fewer.settings):
            found = fewer
    return found


def adds_to(own: Prediction, other: Prediction) -> bool:
    """Return whether `own` has all settings of `other`, which has some, and more."""
    return bool(other.settings) and set(other.settings) < set(own.settings)


def reasons(own: Prediction, auto: Prediction) -> Iterator[str]:
    """Yield the reasons why a setting is a finalist: the differences from `auto`, and whether it fits."""
    if not own.settings:
        yield "what fulltilt chooses by itself"
    before, after = auto.seconds.phases, own.seconds.phases
    for name in dict.fromkeys([*after, *before]):
        one, other = (phases[name].total if name in phases else 0.0 for phases in (before, after))
        if abs(other - one) > DIFFERENT * auto.seconds.total:
            yield f"{name} takes {other:.3g} s in place of {one:.3g} s"
    fullest = max(own.memory.phases.items(), key=lambda item: item[1].total)
    yield f"{in_bytes(fullest[1].total)} of {in_bytes(fullest[1].limit)} in {fullest[0]}"
    if not auto.fits:
        yield "auto does not fit: " + "; ".join([*auto.memory.full_phases, auto.refused] if auto.refused else auto.memory.reasons)
