"""Presets: every algorithm as one entry that names its functions and its numbers.

Enters: a `Config`. Leaves: an `Algorithm`, or the list of the user's mistakes. Guaranteed: torch is not imported; a key of `[algorithm]`
that was set is either used or reported by `mistakes`, with the remedy; numbers left out are the preset's. `mistakes` is a check for
`config.load`.

To add an algorithm: write the functions that it does not share, add an entry to PRESETS, add its name to `AlgorithmConfig.name`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from fulltilt.algo.advantage import group_relative, no_advantage
from fulltilt.algo.base import AdvantageFunction, Algorithm, LossFunction, Setting
from fulltilt.algo.loss import KL_ESTIMATORS, PolicyLossSettings, policy_loss, sft_loss
from fulltilt.config import Config
from fulltilt.records import UserError

Settings = Mapping[str, Any]

# What decides how much is sampled and how often it is gone through: every algorithm has these.
SHARED_KEYS = frozenset({"name", "prompts_per_step", "minibatches_per_step", "epochs"})
ROLLOUT_KEYS = frozenset({"samples_per_prompt"})
NORMALISED_SUM = "seq-mean-token-sum-norm"


@dataclass(frozen=True)
class Preset:
    defaults: Mapping[str, Setting]  # keys of [algorithm] that it reads, and their values when left out
    advantage: Callable[[Settings], AdvantageFunction]
    loss: Callable[[Settings], LossFunction]
    rollout: bool  # learns from its own samples and their rewards
    smallest_group: int = 1  # fewest samples per prompt that it can learn from

    @property
    def keys(self) -> frozenset[str]:
        return SHARED_KEYS | self.defaults.keys() | (ROLLOUT_KEYS if self.rollout else frozenset())


def _group_relative(settings: Settings) -> AdvantageFunction:
    return partial(group_relative, normalize_by_std=settings["normalize_by_std"])


def _no_advantage(settings: Settings) -> AdvantageFunction:
    return no_advantage


def _policy_loss(settings: Settings) -> LossFunction:
    numbers = ("clip_low", "clip_high", "dual_clip", "kl_coef", "entropy_coef", "importance_cap")
    return partial(
        policy_loss,
        settings=PolicyLossSettings(kl=KL_ESTIMATORS[settings["kl_estimator"]], **{key: float(settings[key]) for key in numbers}),
    )


def _sft_loss(settings: Settings) -> LossFunction:
    return sft_loss


PRESETS: dict[str, Preset] = {
    "grpo": Preset(
        defaults={
            "clip_low": 0.2,
            "clip_high": 0.2,
            "dual_clip": 3.0,
            "kl_coef": 0.0,
            "kl_estimator": "k3",
            "entropy_coef": 0.0,
            "aggregation": "token-mean",
            "length_norm": None,
            "normalize_by_std": True,
            "importance_cap": 2.0,
        },
        advantage=_group_relative,
        loss=_policy_loss,
        rollout=True,
        smallest_group=2,
    ),
    "sft": Preset(
        defaults={"aggregation": "token-mean", "length_norm": None},
        advantage=_no_advantage,
        loss=_sft_loss,
        rollout=False,
    ),
}


def build(config: Config) -> Algorithm:
    """The algorithm that the configuration names, with every number resolved."""
    if found := mistakes(config):
        raise UserError("\n".join(found))
    algorithm, preset = config.algorithm, PRESETS[config.algorithm.name]
    settings = _resolve(config)
    needs = {"rollout"} if preset.rollout else set()
    if settings.get("kl_coef", 0) > 0:
        needs.add("ref_logprobs")
    if preset.rollout and algorithm.minibatches_per_step * algorithm.epochs > 1:
        needs.add("old_logprobs")
    length_norm = settings["length_norm"] or config.rollout.max_new_tokens
    printed = {**settings, "length_norm": length_norm if settings["aggregation"] == NORMALISED_SUM else None}
    return Algorithm(
        name=algorithm.name,
        advantage=preset.advantage(settings),
        loss=preset.loss(settings),
        aggregation=settings["aggregation"],
        length_norm=length_norm,
        needs=frozenset(needs),
        entropy_gradient=settings.get("entropy_coef", 0) > 0,
        settings={key: value for key, value in printed.items() if value is not None},
    )


def mistakes(config: Config) -> list[str]:
    """What the user must change in `[algorithm]`, and in what it reads of other sections; empty when all is well."""
    return [*_unused_keys(config), *_unused_sections(config), *_wrong_numbers(config), *_keys_without_effect(config)]


def _resolve(config: Config) -> dict[str, Any]:
    defaults = PRESETS[config.algorithm.name].defaults
    given = {key: getattr(config.algorithm, key) for key in defaults}
    return {key: defaults[key] if value is None else value for key, value in given.items()}


def _is_set(config: Config, key: str) -> bool:
    return key in config.algorithm.model_fields_set and getattr(config.algorithm, key) is not None


def _unused_keys(config: Config) -> Iterator[str]:
    name = config.algorithm.name
    used = PRESETS[name].keys
    for key in type(config.algorithm).model_fields:
        if key not in used and _is_set(config, key):
            yield f"algorithm.{key}: the algorithm {name!r} does not use it. Remove the key; {name!r} reads {', '.join(sorted(used))}"


def _unused_sections(config: Config) -> Iterator[str]:
    name = config.algorithm.name
    if PRESETS[name].rollout:
        if "response_key" in config.data.model_fields_set:
            yield f"data.response_key: the algorithm {name!r} reads prompts only. Remove the key."
        return
    for section in ("rollout", "reward", "eval"):
        for key in sorted(getattr(config, section).model_fields_set):
            yield f"{section}.{key}: the algorithm {name!r} samples nothing and scores nothing. Remove the key."


def _wrong_numbers(config: Config) -> Iterator[str]:
    algorithm, preset, settings = config.algorithm, PRESETS[config.algorithm.name], _resolve(config)
    if preset.rollout and algorithm.samples_per_prompt < preset.smallest_group:
        yield (
            f"algorithm.samples_per_prompt = {algorithm.samples_per_prompt}: a group of one has no baseline, every advantage would be 0. "
            f"Use at least {preset.smallest_group} samples per prompt"
        )
    if 0 < settings.get("dual_clip", 0) <= 1:
        yield (
            f"algorithm.dual_clip = {settings['dual_clip']}: the bound must exceed 1, or it would cut off tokens whose probability has not "
            "changed. Use for example 3, or 0 to switch it off"
        )
    if preset.rollout and config.rollout.temperature == 0:
        yield (
            "rollout.temperature = 0: greedy samples of a prompt are all the same and teach nothing. "
            "Use a temperature above 0, for example 1; eval.temperature may stay 0"
        )
    if not preset.rollout and settings["aggregation"] == NORMALISED_SUM and settings["length_norm"] is None:
        yield (
            f"algorithm.length_norm: {NORMALISED_SUM!r} divides by it and the algorithm {algorithm.name!r} has no longest response to use "
            "instead. Set it, for example to the longest response in tokens"
        )


def _keys_without_effect(config: Config) -> Iterator[str]:
    settings = _resolve(config)
    if _is_set(config, "length_norm") and settings["aggregation"] != NORMALISED_SUM:
        yield (
            f"algorithm.length_norm: the aggregation {settings['aggregation']!r} does not divide by it. "
            f"Remove the key, or set algorithm.aggregation = {NORMALISED_SUM!r}"
        )
    if settings.get("kl_coef", 0) > 0:
        return
    # With an algorithm that knows no KL term, the key itself is already reported as unused.
    if "kl_estimator" in settings and _is_set(config, "kl_estimator"):
        yield "algorithm.kl_estimator: algorithm.kl_coef is 0, so there is no KL term. Remove the key, or set kl_coef above 0"
    for key in sorted(config.ref.model_fields_set):
        yield f"ref.{key}: there is no reference role, because no KL term is in the loss. Remove the key, or set algorithm.kl_coef above 0"
