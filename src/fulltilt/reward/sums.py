"""Weighted sums: the scores that functions gave a sample enter, the sample's score leaves.

`reward.function` and each entry of `reward.sources` name one reward or a table of rewards and weights. A single name is a sum with one
term, whose score is the function's own. With several, each function's value becomes a part under a short label, and its parts are named
under that label. The reward model is not included here: its score is added later (`model`). Guaranteed: if one function has failed, the sum
has failed; the answer is the first one that a function returns, in the table's order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fulltilt.records import Score
from fulltilt.reward.functions import TOO_LARGE, fits
from fulltilt.schema import REWARD_MODEL, RewardConfig, reward_weights


@dataclass(frozen=True)
class Component:
    """One function of a sum."""

    function: int  # index into Sums.names
    weight: float
    label: str  # prefix of the names of its parts; empty if the reward has only this component


class Sums:
    """The sums of a configuration, and their functions."""

    def __init__(self, config: RewardConfig) -> None:
        default, tables = reward_weights(config.function), {source: reward_weights(table) for source, table in config.sources.items()}
        every = list(dict.fromkeys(name for table in (default, *tables.values()) for name in table))
        labels = short_labels(every)
        self.names = [name for name in every if name != REWARD_MODEL]

        def components(table: dict[str, float]) -> tuple[Component, ...]:
            return tuple(
                Component(self.names.index(name), weight, labels[name] if len(table) > 1 else "")
                for name, weight in table.items()
                if name != REWARD_MODEL
            )

        self._default = components(default)
        self._sources = {source: components(table) for source, table in tables.items()}

    def of(self, data_source: str) -> tuple[Component, ...]:
        return self._sources.get(data_source, self._default)


def short_labels(names: Sequence[str]) -> dict[str, str]:
    """Return a label for each name. The label of `FILE.py:NAME` is NAME, unless another reward of the run has that label too."""
    short = {name: name.rpartition(":")[2] for name in names}
    count = Counter(short.values())
    return {name: label if count[label] == 1 else name for name, label in short.items()}


def combine(components: Sequence[Component], found: Sequence[Score], error_value: float = 0.0) -> Score:
    """Combine the scores of one sample, one per component, in their order. A sum that is too large has failed."""
    for score in found:
        if score.error is not None:
            return score
    value = sum(component.weight * score.value for component, score in zip(components, found, strict=True))
    if not fits(value):
        terms = ", ".join(f"{component.weight:g} x {score.value:g}" for component, score in zip(components, found, strict=True))
        return Score(error_value, error=f"reward.function: the weighted sum of {terms} is too large: {TOO_LARGE}")
    parts: dict[str, float] = {}
    for component, score in zip(components, found, strict=True):
        if component.label:
            parts |= {component.label: score.value, **{f"{component.label}/{name}": part for name, part in score.parts.items()}}
        else:
            parts |= score.parts
    answer = next((score.answer for score in found if score.answer is not None), None)
    return Score(float(value), parts, answer=answer)
