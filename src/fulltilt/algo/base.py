"""The Algorithm record: all that the loop and the trainer know about an algorithm.

It is data. No code outside this package branches on an algorithm's name: the loop reads `needs`, shapes rewards, calls `advantage` on the
rows of a step, passes `aggregation` and `length_norm` to batching, and the trainer calls `loss` on every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fulltilt.algo.shaping import Overlong, RewardKL
from fulltilt.presets import Setting
from fulltilt.records import LossParts, Row, TokenTerms, ValueTerms

AdvantageFunction = Callable[[Sequence[Row]], list[Row]]
LossFunction = Callable[[TokenTerms], LossParts]
ValueLossFunction = Callable[[ValueTerms], LossParts]

NEEDS = frozenset({"rollout", "ref_logprobs", "old_logprobs", "values", "baseline"})


@dataclass(frozen=True)
class DynamicSampling:
    """Continue sampling until a step has enough useful groups."""

    useful: Callable[[np.ndarray], bool]  # whether to train on a group, given its rewards before shaping, failed ones left out
    prompts_per_round: int
    max_rounds: int


@dataclass(frozen=True)
class Algorithm:
    name: str
    advantage: AdvantageFunction  # all rows of a step -> the same rows, in the same order, with `advantages` (if the loss reads them)
    loss: LossFunction
    aggregation: str  # how batching weighs the tokens of a mini-batch
    length_norm: int  # divisor, for the aggregation that needs one
    needs: frozenset[str]  # subset of NEEDS: "rollout" (samples and rewards), "baseline" (a greedy sample of each prompt, scored), and the
    # per-token numbers to annotate rows with
    entropy_gradient: bool  # whether the entropy of `TokenTerms` must carry a gradient
    settings: Mapping[str, Setting]  # every number of the preset as it is used, for people to read
    value_loss: ValueLossFunction | None = None  # the critic's loss, if the algorithm needs values; `advantage` then also gives `returns`
    critic_warmup: int = 0  # number of first steps in which only the critic is updated
    dynamic: DynamicSampling | None = None
    overlong: Overlong | None = None
    advantage_alone: bool = False  # whether a sample whose advantages are all 0 adds nothing to the gradient of `loss`
    reward_kl: RewardKL | None = None

    def __post_init__(self) -> None:
        assert self.needs <= NEEDS, f"unknown needs {sorted(self.needs - NEEDS)}"
        assert (self.value_loss is not None) == ("values" in self.needs), "a critic is trained if and only if its values are read"
