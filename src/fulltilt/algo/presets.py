"""Presets: every algorithm as one entry that names its functions and its numbers.

Enters: a `Config`. Leaves: an `Algorithm`, or the list of the user's mistakes. Guaranteed: torch is not imported, unless a user's own
function imports it; a key of `[algorithm]` that was set, and a key of another section that has an effect only with some algorithms, is
either used or reported by `mistakes`, with the remedy; numbers left out are the preset's. RULES are checks for `config.load`.

To add an algorithm: write the functions that it does not share, add an entry to PRESETS, add its name to `AlgorithmConfig.name`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fulltilt.algo import custom
from fulltilt.algo.advantage import (
    discounted_returns,
    generalised,
    greedy_baseline,
    group_mean_whitened,
    group_relative,
    leave_one_out,
    no_advantage,
    worth_training,
)
from fulltilt.algo.base import AdvantageFunction, Algorithm, DynamicSampling, LossFunction, Setting
from fulltilt.algo.custom import CustomAdvantage, CustomSurrogate, UserFunction
from fulltilt.algo.loss import (
    KL_ESTIMATORS,
    PolicyLossSettings,
    SurrogateFunction,
    clipped_importance,
    clipped_surrogate,
    policy_loss,
    sequence_surrogate,
    sft_loss,
    value_loss,
)
from fulltilt.algo.shaping import LARGEST_ERROR, Overlong, RewardKL
from fulltilt.config import ConfigRule
from fulltilt.records import UserError
from fulltilt.schema import AlgorithmConfig, Config, toml_value, uses_reward_model
from fulltilt.words import many

Settings = Mapping[str, Any]

NORMALISED_SUM = "seq-mean-token-sum-norm"

# Every algorithm has these: how much data a step takes and how often it is used.
SHARED_KEYS = frozenset({"name", "prompts_per_step", "minibatches_per_step", "epochs"})
ROLLOUT_KEYS = frozenset({"samples_per_prompt"})

# Keys that an algorithm reads whatever its functions are, with their values when left out.
AGGREGATION: Mapping[str, Setting] = {"aggregation": "token-mean", "length_norm": None}
ROLLOUT: Mapping[str, Setting] = {
    **AGGREGATION,
    "kl_coef": 0.0,
    "kl_estimator": "k3",
    "reward_kl_coef": 0.0,
    "reward_kl_estimator": "k1",
    "reward_kl_target": None,
    "reward_kl_horizon": 10_000,
    "entropy_coef": 0.0,
    "importance_cap": 2.0,
    "overlong_buffer": 0,
    "overlong_penalty": 1.0,
    "advantage": None,
    "loss": None,
}
# The same for algorithms that compare the samples of a prompt with one another.
GROUPS: Mapping[str, Setting] = {**ROLLOUT, "dynamic_sampling": False, "prompts_per_round": None, "max_rounds": 10}

# How a value that is None follows from other keys.
DERIVED: Mapping[str, Callable[[Config], int]] = {
    "length_norm": lambda config: config.rollout.max_new_tokens,
    "prompts_per_round": lambda config: config.algorithm.prompts_per_step,
    "overlong_buffer": lambda config: max(1, config.rollout.max_new_tokens // 5),
}


@dataclass(frozen=True)
class PresetFunction:
    """A function, and the keys of [algorithm] that it is called with, with their values when left out."""

    function: Callable[..., Any]
    keys: Mapping[str, Setting] = field(default_factory=dict)

    def bound(self, settings: Settings) -> Any:
        return partial(self.function, **{key: settings[key] for key in self.keys}) if self.keys else self.function

    def but(self, values: Mapping[str, Setting]) -> PresetFunction:
        return PresetFunction(self.function, {key: values.get(key, value) for key, value in self.keys.items()})


@dataclass(frozen=True)
class Preset:
    advantage: PresetFunction
    loss: PresetFunction  # a policy's surrogate; the whole loss, where nothing is sampled
    common: Mapping[str, Setting]
    smallest_group: int = 1  # fewest samples per prompt that it can learn from
    rollout: bool = True  # learns from its own samples and their rewards
    critic: PresetFunction | None = None  # the critic's loss
    baseline: bool = False  # needs each prompt's greedy sample

    @property
    def defaults(self) -> dict[str, Setting]:
        """Keys of [algorithm] that it reads, and their values when left out."""
        return {**self.common, **self.advantage.keys, **self.loss.keys, **(self.critic.keys if self.critic else {})}

    def but(self, **values: Setting) -> Preset:
        """The same algorithm with other default values."""
        common = {key: values.get(key, value) for key, value in self.common.items()}
        return replace(self, advantage=self.advantage.but(values), loss=self.loss.but(values), common=common)


CLIPPED = PresetFunction(clipped_surrogate, {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0})
GRPO = Preset(PresetFunction(group_relative, {"normalize_by_std": True}), CLIPPED, GROUPS, smallest_group=2)
REINFORCE = Preset(PresetFunction(discounted_returns, {"gamma": 1.0, "whiten": True}), CLIPPED, ROLLOUT)

PRESETS: dict[str, Preset] = {
    "grpo": GRPO,
    "dr_grpo": GRPO.but(normalize_by_std=False, aggregation=NORMALISED_SUM),
    # overlong_buffer None: a fifth of the longest response, as in the paper (4,096 of 20,480).
    "dapo": GRPO.but(clip_high=0.28, dynamic_sampling=True, overlong_buffer=None),
    # gae_lambda 1, as in verl: the reward comes with the last token, and 0.95 would leave 1% of it after 90 tokens, so that
    # long responses would learn from the critic alone, which has not learned anything yet.
    "ppo": Preset(
        PresetFunction(generalised, {"gamma": 1.0, "gae_lambda": 1.0, "whiten": True}),
        CLIPPED,
        {**ROLLOUT, "critic_warmup": 0},
        critic=PresetFunction(value_loss, {"value_clip": 0.5}),
    ),
    "rloo": replace(GRPO, advantage=PresetFunction(leave_one_out)),
    "reinforce++": REINFORCE,
    # The paper's KL term here is k2.
    "reinforce++_baseline": replace(GRPO, advantage=PresetFunction(group_mean_whitened, {"whiten": True})).but(kl_estimator="k2"),
    "remax": replace(REINFORCE, advantage=PresetFunction(greedy_baseline), baseline=True),
    "gspo": replace(GRPO, loss=PresetFunction(sequence_surrogate, {"clip_low": 3e-4, "clip_high": 4e-4})).but(
        aggregation="seq-mean-token-mean"
    ),
    # No lower bound, as in the MiniMax-M1 paper; the weight is at most 5.
    "cispo": replace(GRPO, loss=PresetFunction(clipped_importance, {"clip_low": 1.0, "clip_high": 4.0})),
    "sft": Preset(PresetFunction(no_advantage), PresetFunction(sft_loss), AGGREGATION, rollout=False),
}


# ---- building ----------------------------------------------------------------------------------------------------------------------


def build(config: Config) -> Algorithm:
    """The algorithm that the configuration names, with every number resolved."""
    if found := mistakes(config):
        raise UserError("\n".join(found))
    preset, settings = PRESETS[config.algorithm.name], _resolve(config)
    own = _user_functions(config)
    algorithm = Algorithm(
        name=config.algorithm.name,
        advantage=_advantage(preset, settings, own.get("advantage"), config),
        loss=_loss(preset, settings, own.get("loss"), config),
        aggregation=settings["aggregation"],
        length_norm=settings["length_norm"],
        needs=_needs(config, preset, settings),
        entropy_gradient=settings.get("entropy_coef", 0) > 0,
        settings=_in_use(config, settings),
        value_loss=preset.critic.bound(settings) if preset.critic else None,
        critic_warmup=settings.get("critic_warmup", 0),
        dynamic=_dynamic(settings),
        overlong=_overlong(config, settings),
        reward_kl=_reward_kl(settings),
        # Every surrogate of a preset is a product with the advantage; a user's own function may be anything.
        advantage_alone=preset.rollout and "loss" not in own and settings["kl_coef"] == settings["entropy_coef"] == 0,
    )
    custom.try_out(algorithm, config.algorithm.samples_per_prompt, list(own.values()))
    return algorithm


def _resolve(config: Config) -> dict[str, Any]:
    """Every key that the preset reads, with its value."""
    defaults = PRESETS[config.algorithm.name].defaults
    given = {key: getattr(config.algorithm, key) for key in defaults}
    settings = {key: defaults[key] if value is None else value for key, value in given.items()}
    return {key: DERIVED[key](config) if value is None and key in DERIVED else value for key, value in settings.items()}


def _advantage(preset: Preset, settings: Settings, own: UserFunction | None, config: Config) -> AdvantageFunction:
    usual: AdvantageFunction = preset.advantage.bound(settings)
    if own is None:
        return usual
    return CustomAdvantage(own, offered(config), before=usual if preset.critic else None)


def _loss(preset: Preset, settings: Settings, own: UserFunction | None, config: Config) -> LossFunction:
    if not preset.rollout:
        return preset.loss.bound(settings)  # type: ignore[no-any-return]
    surrogate: SurrogateFunction = preset.loss.bound(settings)
    if own is not None:
        surrogate = CustomSurrogate(own, offered(config), scalar=settings["importance_cap"] == 0)
    numbers = {key: float(settings[key]) for key in ("kl_coef", "entropy_coef", "importance_cap")}
    return partial(policy_loss, surrogate=surrogate, settings=PolicyLossSettings(kl=KL_ESTIMATORS[settings["kl_estimator"]], **numbers))


def _needs(config: Config, preset: Preset, settings: Settings) -> frozenset[str]:
    penalised = settings.get("reward_kl_coef", 0) > 0
    reused = config.algorithm.minibatches_per_step * config.algorithm.epochs > 1
    needs = {
        "rollout": preset.rollout,
        "ref_logprobs": penalised or settings.get("kl_coef", 0) > 0,
        "old_logprobs": penalised or (preset.rollout and reused),
        "values": preset.critic is not None,
        "baseline": preset.baseline,
    }
    return frozenset(need for need, wanted in needs.items() if wanted)


def _dynamic(settings: Settings) -> DynamicSampling | None:
    on = settings.get("dynamic_sampling")
    return DynamicSampling(worth_training, settings["prompts_per_round"], settings["max_rounds"]) if on else None


def _overlong(config: Config, settings: Settings) -> Overlong | None:
    buffer = settings.get("overlong_buffer")
    return Overlong(config.rollout.max_new_tokens, buffer, float(settings["overlong_penalty"])) if buffer else None


def _reward_kl(settings: Settings) -> RewardKL | None:
    if not settings.get("reward_kl_coef"):
        return None
    estimator: Callable[..., Any] = KL_ESTIMATORS[settings["reward_kl_estimator"]]
    return RewardKL(float(settings["reward_kl_coef"]), settings["reward_kl_target"], settings["reward_kl_horizon"], estimator)


def _in_use(config: Config, settings: Settings) -> dict[str, Setting]:
    """The settings that this run has a use for."""
    idle = {key for key in CONDITIONS if key in settings and _condition_not_met(key, settings)}
    used = _used_keys(config) - SHARED_KEYS - ROLLOUT_KEYS - idle
    return {key: value for key, value in offered(config).items() if key in used}


# ---- a user's own functions --------------------------------------------------------------------------------------------------------


def _user_functions(config: Config) -> dict[str, UserFunction]:
    reads = PRESETS[config.algorithm.name].common
    given = {key: getattr(config.algorithm, key) for key in custom.GIVEN if key in reads and _is_set(config, key)}
    return {key: custom.locate(key, name) for key, name in given.items()}


def offered(config: Config) -> dict[str, Any]:
    """Keys of [algorithm] that have a value, the preset's or the user's."""
    everything = {key: getattr(config.algorithm, key) for key in AlgorithmConfig.model_fields} | _resolve(config)
    return {key: value for key, value in everything.items() if value is not None}


def _used_keys(config: Config) -> frozenset[str]:
    preset = PRESETS[config.algorithm.name]
    own = _user_functions(config)
    used = SHARED_KEYS | preset.common.keys() | (ROLLOUT_KEYS if preset.rollout else frozenset())
    used |= preset.critic.keys.keys() if preset.critic else set()
    # With a critic, the preset's advantage goes before the user's and gives the returns.
    used |= preset.advantage.keys.keys() if "advantage" not in own or preset.critic else set()
    used |= preset.loss.keys.keys() if "loss" not in own else set()
    for place in own.values():
        used |= place.parameters.keys() & AlgorithmConfig.model_fields.keys()
    return frozenset(used)


# ---- mistakes ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Condition:
    """A key has an effect only while the key `of` allows it."""

    of: str
    otherwise: str  # what holds while it does not
    value: str = ""  # the one value that allows it; empty: any but 0, false and none


CONDITIONS: Mapping[str, Condition] = {
    "length_norm": Condition("aggregation", "nothing is divided by it", NORMALISED_SUM),
    "kl_estimator": Condition("kl_coef", "there is no KL term"),
    "reward_kl_estimator": Condition("reward_kl_coef", "there is no KL penalty in the reward"),
    "reward_kl_target": Condition("reward_kl_coef", "there is no KL penalty in the reward"),
    "reward_kl_horizon": Condition("reward_kl_target", "the weight of the KL penalty in the reward is fixed"),
    "overlong_penalty": Condition("overlong_buffer", "there is no penalty for long responses"),
    "prompts_per_round": Condition("dynamic_sampling", "a step samples once"),
    "max_rounds": Condition("dynamic_sampling", "a step samples once"),
}


def _condition_not_met(key: str, settings: Settings) -> Condition | None:
    """Why a key has no effect: its own condition, or that of the key it depends on."""
    condition = CONDITIONS.get(key)
    if condition is None:
        return None
    now = settings[condition.of]
    return _condition_not_met(condition.of, settings) if (now == condition.value if condition.value else now) else condition


def _without_effect(key: str, condition: Condition, settings: Settings) -> str:
    now = settings[condition.of]
    remedy = f"to {condition.value!r}" if condition.value else "to true" if now is False else "above 0"
    return (
        f"algorithm.{key}: has no effect, because algorithm.{condition.of} is {'not set' if now is None else toml_value(now)} and "
        f"{condition.otherwise}. Remove the key, or set algorithm.{condition.of} {remedy}"
    )


# Keys of other sections that only runs with samples and rewards read; None: every key of the section.
SAMPLING_ONLY: Mapping[str, set[str] | None] = {
    **dict.fromkeys(("rollout", "reward", "eval")),
    "health": {"entropy_floor", "max_clip_ratio", "max_reward_errors", "max_logprob_gap"},
    "log": {"val_samples"},
    "run": {"save_rollouts"},
}
SFT_DATA = {"max_tokens", "response_key", "messages_key", "train_turns"}


def mistakes(config: Config) -> list[str]:
    """What the user must change in `[algorithm]` and in other sections because of it; empty when nothing is wrong."""
    return [text for rule in RULES for text in rule.check(config)]


def _wrong_keys(config: Config) -> list[str]:
    try:
        own, keys = _user_functions(config), AlgorithmConfig.model_fields
        wrong = [text for place in own.values() for text in custom.wrong_signature(place, offered(config), keys)]
        return [*wrong, *_unused_keys(config, own)]
    except UserError as error:  # a file that cannot be used: which keys its function takes is not known
        return [str(error)]


def _is_set(config: Config, key: str) -> bool:
    return key in config.algorithm.model_fields_set and getattr(config.algorithm, key) is not None


def _unused_keys(config: Config, own: Mapping[str, UserFunction]) -> Iterator[str]:
    name, used = config.algorithm.name, _used_keys(config)
    for key in AlgorithmConfig.model_fields:
        if key in used or not _is_set(config, key):
            continue
        if key in PRESETS[name].defaults:
            functions = " and ".join(place.code.name for place in own.values())
            yield f"algorithm.{key}: {functions} does not take it. Remove the key, or give the function a parameter {key}"
        else:
            yield f"algorithm.{key}: the algorithm {name!r} does not use it. Remove the key; {name!r} reads {', '.join(sorted(used))}"


def _unused_sections(config: Config) -> Iterator[str]:
    name = config.algorithm.name
    preset = PRESETS[name]
    if preset.rollout:
        for key in sorted(config.data.model_fields_set & SFT_DATA):
            yield f"data.{key}: the algorithm {name!r} reads prompts only. Remove the key."
    else:
        # If no reward names the reward model, its keys are reported already.
        sections = {**SAMPLING_ONLY, **({"reward_model": None} if uses_reward_model(config) else {})}
        for section, keys in sections.items():
            given = getattr(config, section).model_fields_set
            for key in sorted(given if keys is None else given & keys):
                yield f"{section}.{key}: the algorithm {name!r} samples nothing and scores nothing. Remove the key."
    if preset.critic is None:
        critic = [f"critic.{key}" for key in sorted(config.critic.model_fields_set)]
        critic += ["lora.critic"] if config.lora.rank and "critic" in config.lora.model_fields_set else []
        for key in critic:
            yield f"{key}: the algorithm {name!r} has no critic. Remove the key; 'ppo' has one"


def _wrong_numbers(config: Config) -> Iterator[str]:
    algorithm, preset, settings = config.algorithm, PRESETS[config.algorithm.name], _resolve(config)
    if not preset.rollout:
        if settings["aggregation"] == NORMALISED_SUM and not _is_set(config, "length_norm"):
            yield f"algorithm.length_norm: {NORMALISED_SUM!r} divides by it. Set it, for example to the longest response in tokens"
        return
    samples, clip = algorithm.samples_per_prompt, settings.get("dual_clip", 0)
    if samples < preset.smallest_group:
        remedy = f"Use at least {preset.smallest_group} samples per prompt"
        yield f"algorithm.samples_per_prompt = {samples}: a group of one has no baseline, every advantage would be 0. {remedy}"
    if 0 < clip <= 1:
        why = "must exceed 1, or it would also bound tokens whose probability has not changed"
        yield f"algorithm.dual_clip = {clip}: {why}. Use for example 3, or 0 to switch it off"
    if config.rollout.temperature == 0:
        remedy = "Use a temperature above 0, for example 1; eval.temperature may stay 0"
        yield f"rollout.temperature = 0: the samples of a prompt would all be the same greedy one. {remedy}"
    yield from _wrong_lengths(config, settings)


def _wrong_lengths(config: Config, settings: Settings) -> Iterator[str]:
    """Numbers that do not fit the length of responses or of the run."""
    longest, steps, dynamic = config.rollout.max_new_tokens, config.run.steps, settings.get("dynamic_sampling")
    buffer, warmup, horizon = settings["overlong_buffer"], settings.get("critic_warmup", 0), settings["reward_kl_horizon"]
    if buffer > longest:
        why = f"more than rollout.max_new_tokens ({longest}), so even the shortest response would be penalised"
        yield f"algorithm.overlong_buffer = {buffer}: {why}. Use at most {longest}"
    if dynamic and config.run.epochs is not None:
        why = "with dynamic sampling a step takes any number of prompts, so the run's length in steps is not known"
        yield f"run.epochs: {why}. Set run.steps instead, or algorithm.dynamic_sampling = false"
    if dynamic and settings["importance_cap"] == 0:
        why = "dynamic sampling trains on samples of older weights, which need the importance weight"
        yield f"algorithm.importance_cap = 0: {why}. Set it above 0, for example to 2"
    if steps is not None and warmup >= steps:
        why = f"the run has {many(steps, 'step')}, so the actor would never be updated"
        yield f"algorithm.critic_warmup = {warmup}: {why}. Use less, or raise run.steps"
    samples = config.algorithm.prompts_per_step * config.algorithm.samples_per_prompt
    if not _condition_not_met("reward_kl_horizon", settings) and samples * LARGEST_ERROR >= horizon:
        why = f"a step has {samples} samples, so one step could bring the weight of the penalty to 0 or below"
        yield f"algorithm.reward_kl_horizon = {horizon}: {why}. Use more than {int(samples * LARGEST_ERROR)}"


def _keys_without_effect(config: Config) -> Iterator[str]:
    settings = _resolve(config)
    for key in CONDITIONS:
        # With an algorithm that does not read it, the key itself is already reported as unused.
        if key in settings and _is_set(config, key) and (condition := _condition_not_met(key, settings)):
            yield _without_effect(key, condition, settings)
    if settings.get("kl_coef", 0) > 0 or settings.get("reward_kl_coef", 0) > 0:
        return
    remedy = ", or set algorithm.kl_coef or algorithm.reward_kl_coef above 0" if "kl_coef" in settings else ""
    for key in sorted(config.ref.model_fields_set):
        yield f"ref.{key}: there is no reference role, because no KL is in the loss or in the reward. Remove the key{remedy}"


def _keys(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"algorithm.{name}" for name in names)


_FUNCTIONS = _keys(("name", "advantage", "loss"))
_KL = _keys(key for key in AlgorithmConfig.model_fields if "kl_" in key)
_SAMPLES = _keys(("prompts_per_step", "samples_per_prompt", "dynamic_sampling", "overlong_buffer", "importance_cap"))
_LOSS = _keys(("dual_clip", "aggregation", "length_norm", "critic_warmup"))
_RUN = ("rollout.temperature", "rollout.max_new_tokens", "run.steps", "run.epochs")

RULES: tuple[ConfigRule, ...] = (
    ConfigRule(_FUNCTIONS, _wrong_keys),
    ConfigRule(("algorithm.name", "reward.function", "reward.sources", "lora.rank"), _unused_sections),
    ConfigRule((*_FUNCTIONS, *_KL, *_SAMPLES, *_LOSS, *_RUN), _wrong_numbers),
    ConfigRule((*_FUNCTIONS, *_KL, *_keys(CONDITIONS), *_keys(condition.of for condition in CONDITIONS.values())), _keys_without_effect),
)
"""The checks of `mistakes`, each with the keys that it reads: it runs unless one of those keys is already known to be wrong."""
