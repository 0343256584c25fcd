"""The settings of a run's algorithm: the user's values, and the preset's for the others; and the user's own functions.

Enters: a `Config`. Leaves: the values of keys, and a `UserFunction` for each of `algorithm.advantage` and `algorithm.loss` that is set.
Guaranteed: torch is not imported, unless a user's own file imports it; a file is read once, where the run starts, and executed once in a
process; a missing or failing file, and a function that is not in it, are a UserError with the remedy.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fulltilt import user_code
from fulltilt.presets import ESTIMATORS, FUNCTION_KEYS, LOSSES, Preset, preset_for
from fulltilt.records import UserError
from fulltilt.schema import AlgorithmConfig, Config, UsedIf, value_of
from fulltilt.user_code import UserCode, UserCodeError

# Rules for values that follow from other keys if they are None.
DERIVED: Mapping[str, Callable[[Config], int]] = {
    "length_norm": lambda config: config.rollout.max_new_tokens,
    "prompts_per_round": lambda config: config.algorithm.prompts_per_step,
    "overlong_buffer": lambda config: max(1, config.rollout.max_new_tokens // 5),
}

# Keys of every algorithm: how much data a step takes and how often the data is used.
DATA_KEYS = frozenset({"name", "prompts_per_step", "samples_per_prompt", "minibatches_per_step", "epochs"})

# Arguments that a user's function may take by keyword, besides keys of [algorithm].
GIVEN = {"advantage": ("rewards", "groups", "lengths", "rows"), "loss": ("terms",)}

# The built-in functions of the same keys, by name.
BUILT_IN: Mapping[str, Mapping[str, Any]] = {"advantage": ESTIMATORS, "loss": LOSSES}


def preset_of(config: Config) -> Preset:
    """Return the preset of the run's algorithm, with the built-in advantage and loss that were chosen in place of its own."""
    return preset_for(config.algorithm.name, config.algorithm.advantage, config.algorithm.loss)


def algorithm_settings(config: Config) -> dict[str, Any]:
    """Return every key of [algorithm] that has a value: the user's, the preset's, or one that follows from other keys."""
    defaults = preset_of(config).defaults
    settings = {key: algorithm_value(config, defaults, key) for key in AlgorithmConfig.model_fields}
    return {key: value for key, value in settings.items() if value is not None}


def algorithm_value(config: Config, defaults: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key of [algorithm], None if it has none. `defaults`: those of the preset."""
    given = getattr(config.algorithm, key)
    value = defaults.get(key) if given is None else given
    return DERIVED[key](config) if value is None and key in DERIVED and key in defaults else value


def reuses(config: Config) -> bool:
    """Return whether samples are trained on after a first update."""
    return config.algorithm.minibatches_per_step * config.algorithm.epochs > 1


def needs_of(config: Config) -> frozenset[str]:
    """Return the needs of the run's algorithm (`Algorithm.needs`), without those of corrections before the loss."""
    preset, settings = preset_of(config), algorithm_settings(config)
    penalised = settings.get("reward_kl_coef", 0) > 0
    reads_old = preset.reads_old and settings.get("importance_level") != "bypass"
    needs = {
        "rollout": preset.rollout,
        "ref_logprobs": penalised or settings.get("kl_coef", 0) > 0,
        "old_logprobs": penalised or (preset.rollout and reuses(config) and reads_old),
        "values": bool(preset.critic),
        "baseline": preset.baseline,
    }
    return frozenset(need for need, wanted in needs.items() if wanted) | preset.needs


def bounds_of(settings: Mapping[str, Any]) -> dict[str, float | list[float]]:
    """Return the criteria of rejection with the bounds of each: one number for all of them, or one or two numbers for each."""
    names, bounds = settings.get("rejection"), settings.get("rejection_bounds")
    if names is None or bounds is None:
        return {}
    if isinstance(names, str):
        return {names: bounds}
    return dict(zip(names, bounds, strict=True)) if isinstance(bounds, list) else dict.fromkeys(names, bounds)


def in_effect(config: Config, key: str) -> Any:
    """Return the value of a dotted key; if a key of [algorithm] is left out, the preset's."""
    section, _, name = key.partition(".")
    return algorithm_value(config, preset_of(config).defaults, name) if section == "algorithm" else value_of(config, key)


def holds(config: Config, condition: UsedIf) -> bool:
    return condition.holds(*(in_effect(config, key) for key in condition.reads))


def is_set(config: Config, key: str) -> bool:
    """Return whether the user gave the dotted key a value; `auto` counts as none."""
    section, _, name = key.partition(".")
    return name in getattr(config, section).model_fields_set and value_of(config, key) not in (None, "auto")


# ---- the user's own functions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UserFunction:
    """The user's function for a key of [algorithm]. It is sent to other processes with its source."""

    key: str  # "advantage" or "loss"
    code: UserCode
    settings: Mapping[str, Any]  # keys of [algorithm] that have a value in this run

    def wrong(self, text: object) -> UserError:
        return UserError(f"algorithm.{self.key} = {self.code.name!r}: {text}")

    @property
    def loaded(self) -> tuple[Callable[..., Any], Mapping[str, inspect.Parameter]]:
        """The function and its parameters."""
        try:
            function = user_code.function(self.code)
            return function, user_code.parameters(function)
        except UserCodeError as error:
            raise self.wrong(error) from error

    def __call__(self, **given: Any) -> Any:
        """Call the function with the arguments that it takes: those of the run, by name or in `**kwargs`, and keys of [algorithm] by
        name."""
        function, parameters = self.loaded
        arguments = {name: value for name, value in given.items() if name in parameters or open_ended(parameters)}
        arguments |= {name: self.settings[name] for name in parameters if name in self.settings}
        try:
            return function(**arguments)
        except Exception as error:
            error.add_note(f"in your function algorithm.{self.key} = {self.code.name!r}")
            raise

    def wrong_parameters(self) -> Iterator[UserError]:
        """Yield what is wrong with the function's parameters."""
        given, (_, parameters) = GIVEN[self.key], self.loaded
        if not open_ended(parameters) and not set(given) & parameters.keys():
            yield self.wrong(f"it takes none of {', '.join(given)}. Name at least one of them as a parameter")
        for name, parameter in parameters.items():
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                continue
            if parameter.kind is parameter.POSITIONAL_ONLY:
                yield self.wrong(f"its parameter {name!r} is positional only, but arguments are given by name. Remove the slash")
            elif name not in given and name not in self.settings and parameter.default is parameter.empty:
                remedy = f"Set algorithm.{name}, or give" if name in AlgorithmConfig.model_fields else "Remove it, or give"
                known = f"Given are {', '.join(given)} and keys of [algorithm]"
                yield self.wrong(f"its parameter {name!r} has no value. {known}. {remedy} it a default")


def open_ended(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def own_functions(config: Config) -> dict[str, UserFunction]:
    """Return the user's functions by their keys. Reads their files and executes nothing."""
    found = {}
    for key in GIVEN:
        name = getattr(config.algorithm, key)
        if key in preset_of(config).defaults and name is not None and name not in BUILT_IN[key]:
            try:
                found[key] = UserFunction(key, user_code.locate(name), algorithm_settings(config))
            except UserCodeError as error:
                raise UserError(f"algorithm.{key} = {name!r}: {error}. {_instead(key, name)}") from None
    return found


def _instead(key: str, name: str) -> str:
    """Return what to write instead of a name that is neither built in nor in a file."""
    near = difflib.get_close_matches(name, BUILT_IN[key], n=3, cutoff=0.6)
    similar = f"Similar: {', '.join(near)}. " if near and ".py" not in name else ""
    return f"{similar}Built in are {', '.join(BUILT_IN[key])}; for a function of your own write for example mine/{key}.py:{key}"


def used_keys(config: Config) -> set[str]:
    """Return the keys of [algorithm] that this run reads, if the settings that they depend on are switched on."""
    preset, own = preset_of(config), own_functions(config)
    used = {*DATA_KEYS, *preset.defaults} - (set() if preset.rollout else {"samples_per_prompt"})
    for key in own:
        # With a critic, the preset's advantage runs before the user's and computes the returns.
        used -= set() if key == "advantage" and preset.critic else FUNCTION_KEYS[key]
    return used.union(*(place.loaded[1].keys() & AlgorithmConfig.model_fields.keys() for place in own.values()))
