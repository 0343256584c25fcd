"""The algorithm of a run: a checked `Config` enters, an `Algorithm` leaves, with every number resolved.

Guaranteed: torch is not imported, unless a user's own function imports it; such a function is tried out on made-up numbers first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fulltilt.algo import advantage, custom, loss, marks
from fulltilt.algo.advantage import HERE, Everyone
from fulltilt.algo.base import AdvantageFunction, Algorithm, DynamicSampling, LossFunction, MarkFunction, Overlong, RewardKL
from fulltilt.algo.correction import Correction, Criterion
from fulltilt.presets import Preset, Setting
from fulltilt.records import Row
from fulltilt.schema import Config, conditions
from fulltilt.settings import (
    DATA_KEYS,
    UserFunction,
    algorithm_settings,
    bounds_of,
    holds,
    needs_of,
    own_functions,
    preset_of,
    reuses,
    used_keys,
)

Settings = Mapping[str, Any]


def build(config: Config) -> Algorithm:
    """Return the algorithm that the configuration names."""
    preset, settings, own = preset_of(config), algorithm_settings(config), own_functions(config)
    correction, needs = _correction(settings), needs_of(config)
    # True if the loss cannot compute the weights itself, or something before it reads them.
    early = bool(correction.criteria) or correction.normalised or (correction.cap > 0 and "sharp_logprobs" in preset.needs)
    algorithm = Algorithm(
        name=config.algorithm.name,
        advantage=_advantage(preset, settings, own.get("advantage")),
        loss=_loss(preset, settings, own.get("loss"), correction, reuses(config)),
        aggregation=settings["aggregation"],
        length_norm=settings["length_norm"],
        needs=needs | {"old_logprobs"} if early else needs,
        entropy_gradient=settings.get("entropy_coef", 0) > 0,
        settings=_in_use(config, settings),
        value_loss=_bound(getattr(loss, preset.critic), settings) if preset.critic else None,
        critic_warmup=settings.get("critic_warmup", 0),
        dynamic=_dynamic(settings),
        overlong=_overlong(config, settings),
        reward_kl=_reward_kl(settings),
        correct=correction.apply if early else None,
        marks=_marks(config, preset, settings, correction),
        reward_parts=tuple(settings.get("reward_parts", ())),
        own_advantage="advantage" in own,
        # Every built-in surrogate is a product with the advantage, unless marks are chosen: those depend on all tokens. A user's own
        # function may be anything.
        advantage_alone=preset.rollout and not preset.marks and "loss" not in own and settings["kl_coef"] == settings["entropy_coef"] == 0,
    )
    custom.try_out(algorithm, config.algorithm.samples_per_prompt, list(own.values()))
    return algorithm


def _bound(function: Callable[..., Any], settings: Settings) -> Callable[..., Any]:
    """Bind the keys of [algorithm] that the function takes besides rows or terms."""
    _, *keys = (name for name in inspect.signature(function).parameters if name != "everyone")
    return partial(function, **{key: settings[key] for key in keys}) if keys else function


def _advantage(preset: Preset, settings: Settings, own: UserFunction | None) -> AdvantageFunction:
    function = getattr(advantage, preset.advantage)
    usual = _bound(function, settings)
    if "everyone" not in inspect.signature(function).parameters:
        usual = partial(_within_groups, function=usual)
    return usual if own is None else partial(custom.advantage, function=own, before=usual if preset.critic else None)


def _within_groups(rows: Sequence[Row], function: Callable[[Sequence[Row]], list[Row]], everyone: Everyone = HERE) -> list[Row]:
    """Call an advantage that depends on no other group."""
    return function(rows)


def _correction(settings: Settings) -> Correction:
    level, bounds = settings.get("importance_level", "token"), settings.get("importance_cap", 0.0)
    floor, cap = bounds if isinstance(bounds, list) else (None, bounds)
    bypass = level == "bypass"
    return Correction(
        cap=0.0 if bypass else cap,
        floor=floor,
        whole_samples=level.startswith("sequence"),
        normalised=level.endswith("normalized"),
        bypass=bypass,
        criteria=tuple(Criterion.of(name, own) for name, own in bounds_of(settings).items()),
    )


def _marks(config: Config, preset: Preset, settings: Settings, correction: Correction) -> MarkFunction | None:
    if not preset.marks:
        return None
    function = getattr(marks, preset.marks)
    _, _, *keys = (name for name, each in inspect.signature(function).parameters.items() if each.kind is not each.KEYWORD_ONLY)
    return partial(function, **{key: settings[key] for key in keys}, bypass=correction.bypass, seed=config.run.seed)


def _loss(preset: Preset, settings: Settings, own: UserFunction | None, correction: Correction, moves: bool) -> LossFunction:
    function = _bound(getattr(loss, preset.loss), settings)
    if not preset.rollout:
        return function
    if own is not None:
        function = partial(custom.surrogate, function=own, scalar=correction.cap == 0)
    shared = {key: settings[key] for key in ("kl_coef", "kl_estimator", "entropy_coef")}
    return partial(loss.policy_loss, surrogate=function, correction=correction, reads_old=preset.reads_old, moves=moves, **shared)


def _dynamic(settings: Settings) -> DynamicSampling | None:
    on = settings.get("dynamic_sampling")
    return DynamicSampling(advantage.worth_training, settings["prompts_per_round"], settings["max_rounds"]) if on else None


def _overlong(config: Config, settings: Settings) -> Overlong | None:
    buffer = settings.get("overlong_buffer")
    return Overlong(config.rollout.max_new_tokens, buffer, settings["overlong_penalty"]) if buffer else None


def _reward_kl(settings: Settings) -> RewardKL | None:
    if not settings.get("reward_kl_coef"):
        return None
    estimator: Callable[..., Any] = loss.KL_ESTIMATORS[settings["reward_kl_estimator"]]
    return RewardKL(settings["reward_kl_coef"], settings.get("reward_kl_target"), settings["reward_kl_horizon"], estimator)


def _in_use(config: Config, settings: Settings) -> dict[str, Setting]:
    """Return the settings that have an effect in this run, for people to read."""
    used = {key for key in used_keys(config) - DATA_KEYS if all(holds(config, each) for each in conditions(f"algorithm.{key}"))}
    return {key: value for key, value in settings.items() if key in used}
