"""Presets: every algorithm as one entry that names its functions and its numbers.

Enters: a `Config`. Leaves: an `Algorithm`, or the list of the user's mistakes. Guaranteed: torch is not imported, unless a user's own
function imports it; a key of `[algorithm]` that was set, and a key of another section that an algorithm decides about, is either used or
reported by `mistakes`, with the remedy; numbers left out are the preset's. `mistakes` is a check for `config.load`.

To add an algorithm: write the functions that it does not share, add an entry to PRESETS, add its name to `AlgorithmConfig.name`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
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
from fulltilt.config import AlgorithmConfig, Config, ConfigRule, uses_reward_model
from fulltilt.records import UserError

Settings = Mapping[str, Any]

NORMALISED_SUM = "seq-mean-token-sum-norm"

# What decides how much is sampled and how often it is gone through: every algorithm has these.
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
# For those that compare the samples of a prompt with one another.
GROUPS: Mapping[str, Setting] = {**ROLLOUT, "dynamic_sampling": False, "prompts_per_round": None, "max_rounds": 10}

# What stands for a value that is None: it follows from other keys.
DERIVED: Mapping[str, Callable[[Config], int]] = {
    "length_norm": lambda config: config.rollout.max_new_tokens,
    "prompts_per_round": lambda config: config.algorithm.prompts_per_step,
    "overlong_buffer": lambda config: max(1, config.rollout.max_new_tokens // 5),
}


@dataclass(frozen=True)
class Part:
    """A function, and the keys of [algorithm] that it is called with, with their values when left out."""

    function: Callable[..., Any]
    keys: Mapping[str, Setting] = field(default_factory=dict)

    def bound(self, settings: Settings) -> Any:
        return partial(self.function, **{key: settings[key] for key in self.keys}) if self.keys else self.function


@dataclass(frozen=True)
class Preset:
    advantage: Part
    loss: Part  # the surrogate of a policy; the whole loss, where nothing is sampled
    common: Mapping[str, Setting]
    smallest_group: int = 1  # fewest samples per prompt that it can learn from
    rollout: bool = True  # learns from its own samples and their rewards
    critic: Part | None = None  # the critic's loss
    baseline: bool = False  # wants each prompt's greedy sample

    @property
    def defaults(self) -> dict[str, Setting]:
        """Keys of [algorithm] that it reads, and their values when left out."""
        return {**self.common, **self.advantage.keys, **self.loss.keys, **(self.critic.keys if self.critic else {})}


CLIPPED = Part(clipped_surrogate, {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0})

PRESETS: dict[str, Preset] = {
    "grpo": Preset(Part(group_relative, {"normalize_by_std": True}), CLIPPED, GROUPS, smallest_group=2),
    "dr_grpo": Preset(
        Part(group_relative, {"normalize_by_std": False}), CLIPPED, {**GROUPS, "aggregation": NORMALISED_SUM}, smallest_group=2
    ),
    # overlong_buffer None: a fifth of the longest response, as in the paper (4,096 of 20,480).
    "dapo": Preset(
        Part(group_relative, {"normalize_by_std": True}),
        Part(clipped_surrogate, {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}),
        {**GROUPS, "dynamic_sampling": True, "overlong_buffer": None},
        smallest_group=2,
    ),
    # gae_lambda 1, as in verl: the reward comes with the last token, and 0.95 would leave 1% of it after 90 tokens, so that
    # long responses would learn from the critic alone, which knows nothing yet.
    "ppo": Preset(
        Part(generalised, {"gamma": 1.0, "gae_lambda": 1.0, "whiten": True}),
        CLIPPED,
        {**ROLLOUT, "critic_warmup": 0},
        critic=Part(value_loss, {"value_clip": 0.5}),
    ),
    "rloo": Preset(Part(leave_one_out), CLIPPED, GROUPS, smallest_group=2),
    "reinforce++": Preset(Part(discounted_returns, {"gamma": 1.0, "whiten": True}), CLIPPED, ROLLOUT),
    # The paper's KL term here is k2.
    "reinforce++_baseline": Preset(
        Part(group_mean_whitened, {"whiten": True}), CLIPPED, {**GROUPS, "kl_estimator": "k2"}, smallest_group=2
    ),
    "remax": Preset(Part(greedy_baseline), CLIPPED, ROLLOUT, baseline=True),
    "gspo": Preset(
        Part(group_relative, {"normalize_by_std": True}),
        Part(sequence_surrogate, {"clip_low": 3e-4, "clip_high": 4e-4}),
        {**GROUPS, "aggregation": "seq-mean-token-mean"},
        smallest_group=2,
    ),
    # No lower bound, as in the MiniMax-M1 paper; above, the weight is held at 5.
    "cispo": Preset(
        Part(group_relative, {"normalize_by_std": True}),
        Part(clipped_importance, {"clip_low": 1.0, "clip_high": 4.0}),
        GROUPS,
        smallest_group=2,
    ),
    "sft": Preset(Part(no_advantage), Part(sft_loss), AGGREGATION, rollout=False),
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
        # Every surrogate here is a product with the advantage; of a user's own function nothing is known.
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
    return CustomAdvantage(own, custom.arguments(own, offered(config)), before=usual if preset.critic else None)


def _loss(preset: Preset, settings: Settings, own: UserFunction | None, config: Config) -> LossFunction:
    if not preset.rollout:
        return preset.loss.bound(settings)  # type: ignore[no-any-return]
    surrogate: SurrogateFunction = preset.loss.bound(settings)
    if own is not None:
        surrogate = CustomSurrogate(own, custom.arguments(own, offered(config)), scalar=settings["importance_cap"] == 0)
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
    if not settings.get("dynamic_sampling"):
        return None
    return DynamicSampling(worth_training, settings["prompts_per_round"], settings["max_rounds"])


def _overlong(config: Config, settings: Settings) -> Overlong | None:
    if not settings.get("overlong_buffer"):
        return None
    return Overlong(config.rollout.max_new_tokens, settings["overlong_buffer"], float(settings["overlong_penalty"]))


def _reward_kl(settings: Settings) -> RewardKL | None:
    if not settings.get("reward_kl_coef"):
        return None
    estimator: Callable[..., Any] = KL_ESTIMATORS[settings["reward_kl_estimator"]]
    return RewardKL(float(settings["reward_kl_coef"]), settings["reward_kl_target"], settings["reward_kl_horizon"], estimator)


def _in_use(config: Config, settings: Settings) -> dict[str, Setting]:
    """The settings that this run has a use for."""
    idle = {rule.key for rule in CONDITIONS if rule.key in settings and not rule.holds(settings)}
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
        used |= custom.named_keys(place, list(AlgorithmConfig.model_fields))
    return frozenset(used)


# ---- mistakes ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Condition:
    """A key that does something only while others allow it."""

    key: str
    holds: Callable[[Settings], bool]
    why: str  # why not, as a format string over the settings
    remedy: str


def _adaptive(settings: Settings) -> bool:
    return settings["reward_kl_coef"] > 0 and settings["reward_kl_target"] is not None


CONDITIONS = (
    Condition(
        "length_norm",
        lambda settings: settings["aggregation"] == NORMALISED_SUM,
        "the aggregation {aggregation!r} does not divide by it",
        f"set algorithm.aggregation = {NORMALISED_SUM!r}",
    ),
    Condition(
        "kl_estimator",
        lambda settings: settings["kl_coef"] > 0,
        "algorithm.kl_coef is 0, so there is no KL term",
        "set kl_coef above 0",
    ),
    *(
        Condition(
            key,
            lambda settings: settings["reward_kl_coef"] > 0,
            "algorithm.reward_kl_coef is 0, so there is no KL penalty in the reward",
            "set reward_kl_coef above 0",
        )
        for key in ("reward_kl_estimator", "reward_kl_target")
    ),
    Condition(
        "reward_kl_horizon",
        _adaptive,
        "no KL penalty in the reward is adaptive",
        "set reward_kl_coef above 0 and reward_kl_target",
    ),
    Condition(
        "overlong_penalty",
        lambda settings: settings["overlong_buffer"] > 0,
        "algorithm.overlong_buffer is 0, so long responses lose nothing",
        "set overlong_buffer above 0",
    ),
    *(
        Condition(
            key,
            lambda settings: settings["dynamic_sampling"],
            "algorithm.dynamic_sampling is off, so a step samples once",
            "set dynamic_sampling = true",
        )
        for key in ("prompts_per_round", "max_rounds")
    ),
)

# Keys of other sections that only runs with samples and rewards read; None: every key of the section.
SAMPLING_ONLY: Mapping[str, tuple[str, ...] | None] = {
    "rollout": None,
    "reward": None,
    "eval": None,
    "health": ("entropy_floor", "max_clip_ratio", "max_reward_errors", "max_logprob_gap"),
    "log": ("val_samples",),
    "run": ("save_rollouts",),
}
SFT_DATA = ("max_tokens", "response_key", "messages_key", "train_turns")


def mistakes(config: Config) -> list[str]:
    """What the user must change in `[algorithm]`, and in what it reads of other sections; empty when all is well."""
    return [text for rule in RULES for text in rule.check(config)]


def _wrong_keys(config: Config) -> list[str]:
    try:
        return [*_wrong_functions(config), *_unused_keys(config)]
    except UserError as error:  # of a file that cannot be used: what its function would take is not known
        return [str(error)]


def _is_set(config: Config, key: str) -> bool:
    return key in config.algorithm.model_fields_set and getattr(config.algorithm, key) is not None


def _wrong_functions(config: Config) -> Iterator[str]:
    for place in _user_functions(config).values():
        yield from custom.wrong_signature(place, offered(config), list(AlgorithmConfig.model_fields))


def _unused_keys(config: Config) -> Iterator[str]:
    name, own = config.algorithm.name, _user_functions(config)
    preset, used = PRESETS[name], _used_keys(config)
    for key in AlgorithmConfig.model_fields:
        if key in used or not _is_set(config, key):
            continue
        if key in preset.defaults:
            functions = " and ".join(place.name for place in own.values())
            yield f"algorithm.{key}: {functions} does not take it. Remove the key, or give the function a parameter {key}"
        else:
            yield f"algorithm.{key}: the algorithm {name!r} does not use it. Remove the key; {name!r} reads {', '.join(sorted(used))}"


def _unused_sections(config: Config) -> Iterator[str]:
    name = config.algorithm.name
    preset = PRESETS[name]
    if preset.rollout:
        for key in SFT_DATA:
            if key in config.data.model_fields_set:
                yield f"data.{key}: the algorithm {name!r} reads prompts only. Remove the key."
    else:
        # Without a reward that names it, the keys of a reward model are reported already.
        sections = {**SAMPLING_ONLY, **({"reward_model": None} if uses_reward_model(config) else {})}
        for section, keys in sections.items():
            for key in sorted(getattr(config, section).model_fields_set):
                if keys is None or key in keys:
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
            yield (
                f"algorithm.length_norm: {NORMALISED_SUM!r} divides by it and the algorithm {algorithm.name!r} has no longest response to "
                "use instead. Set it, for example to the longest response in tokens"
            )
        return
    if algorithm.samples_per_prompt < preset.smallest_group:
        yield (
            f"algorithm.samples_per_prompt = {algorithm.samples_per_prompt}: a group of one has no baseline, every advantage would be 0. "
            f"Use at least {preset.smallest_group} samples per prompt"
        )
    if 0 < settings.get("dual_clip", 0) <= 1:
        yield (
            f"algorithm.dual_clip = {settings['dual_clip']}: the bound must exceed 1, or it would cut off tokens whose probability has not "
            "changed. Use for example 3, or 0 to switch it off"
        )
    if config.rollout.temperature == 0:
        yield (
            "rollout.temperature = 0: greedy samples of a prompt are all the same and teach nothing. "
            "Use a temperature above 0, for example 1; eval.temperature may stay 0"
        )
    yield from _wrong_lengths(config, settings)


def _wrong_lengths(config: Config, settings: Settings) -> Iterator[str]:
    """Numbers that do not fit the length of responses or of the run."""
    algorithm, longest, steps = config.algorithm, config.rollout.max_new_tokens, config.run.steps
    if settings["overlong_buffer"] > longest:
        yield (
            f"algorithm.overlong_buffer = {settings['overlong_buffer']}: more than rollout.max_new_tokens ({longest}), the shortest "
            f"response would be punished too. Use at most {longest}"
        )
    if settings.get("dynamic_sampling") and config.run.epochs is not None:
        yield (
            "run.epochs: under dynamic sampling nobody knows how many prompts a step takes, so the run's length in steps is not known. "
            "Set run.steps instead, or algorithm.dynamic_sampling = false"
        )
    if settings.get("dynamic_sampling") and settings["importance_cap"] == 0:
        yield (
            "algorithm.importance_cap = 0: dynamic sampling carries groups over to the next step, which older weights have sampled; "
            "without the importance weight they would be trained on as if they were new. Set it above 0, for example to 2"
        )
    if steps is not None and settings.get("critic_warmup", 0) >= steps:
        yield (
            f"algorithm.critic_warmup = {settings['critic_warmup']}: the run has {steps} steps, so that the actor would never be updated. "
            "Use less, or raise run.steps"
        )
    samples = algorithm.prompts_per_step * algorithm.samples_per_prompt
    if _adaptive(settings) and samples * LARGEST_ERROR >= settings["reward_kl_horizon"]:
        yield (
            f"algorithm.reward_kl_horizon = {settings['reward_kl_horizon']}: a step has {samples} samples, so that one step could bring "
            f"the weight to 0 or below. Use more than {int(samples * LARGEST_ERROR)}"
        )


def _keys_without_effect(config: Config) -> Iterator[str]:
    settings = _resolve(config)
    for rule in CONDITIONS:
        # With an algorithm that does not read it, the key itself is already reported as unused.
        if rule.key in settings and _is_set(config, rule.key) and not rule.holds(settings):
            yield f"algorithm.{rule.key}: {rule.why.format(**settings)}. Remove the key, or {rule.remedy}"
    if settings.get("kl_coef", 0) > 0 or settings.get("reward_kl_coef", 0) > 0:
        return
    remedy = ", or set algorithm.kl_coef or algorithm.reward_kl_coef above 0" if "kl_coef" in settings else ""
    for key in sorted(config.ref.model_fields_set):
        yield f"ref.{key}: there is no reference role, because no KL is in the loss or in the reward. Remove the key{remedy}"


_FUNCTIONS = ("algorithm.name", "algorithm.advantage", "algorithm.loss")
_KL = tuple(f"algorithm.{key}" for key in AlgorithmConfig.model_fields if "kl_" in key)

RULES: tuple[ConfigRule, ...] = (
    ConfigRule(_FUNCTIONS, _wrong_keys),
    ConfigRule(("algorithm.name", "reward.function", "reward.sources", "lora.rank"), _unused_sections),
    ConfigRule(
        (
            *_FUNCTIONS,
            *_KL,
            *(f"algorithm.{key}" for key in ("prompts_per_step", "samples_per_prompt", "dual_clip", "aggregation", "length_norm")),
            *(f"algorithm.{key}" for key in ("overlong_buffer", "dynamic_sampling", "importance_cap", "critic_warmup")),
            *("rollout.temperature", "rollout.max_new_tokens", "run.steps", "run.epochs"),
        ),
        _wrong_numbers,
    ),
    ConfigRule(
        (
            *_FUNCTIONS,
            *_KL,
            *("algorithm.aggregation", "algorithm.overlong_buffer", "algorithm.dynamic_sampling"),
            *(f"algorithm.{rule.key}" for rule in CONDITIONS),
        ),
        _keys_without_effect,
    ),
)
"""What `mistakes` asks, each with the keys that it reads: one is asked although keys that it does not read are wrong."""
