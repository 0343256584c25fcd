"""Which step is run for a proof.

Enters: settings by dotted key. Leaves: `Case`. Guaranteed: two ways to say the same settings are one case, which is run once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fulltilt import config as configuration

Base = Literal["ppo", "sft", "rollout"]  # what is run: all four roles on given samples, the actor alone on rows, sampling and an update
Settings = Mapping[str, Any]  # dotted key -> value
DEFAULTS = {key: known.default for key, known in configuration.keys().items()}


@dataclass(frozen=True)
class Case:
    """A step of the base with these settings; `again` tells repeats of one step apart."""

    base: Base
    settings: tuple[tuple[str, Any], ...] = ()
    again: int = 0

    @staticmethod
    def of(base: Base, *settings: Settings) -> Case:
        """What is set to its default is left out: the step is the same, and is run once."""
        merged = {key: value for given in settings for key, value in given.items()}
        return Case(base, tuple(sorted((key, value) for key, value in merged.items() if value != DEFAULTS[key])))
