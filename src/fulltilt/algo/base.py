"""The Algorithm record: all that the loop and the trainer know of an algorithm.

It is data. Nothing outside this room asks an algorithm for its name to decide what to do: the loop reads `needs`, calls `advantage` on the
rows of a step, hands `aggregation` and `length_norm` to batching, and the trainer calls `loss` on every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fulltilt.records import LossParts, Row, TokenTerms

Setting = float | int | str | bool | None
AdvantageFunction = Callable[[Sequence[Row]], list[Row]]
LossFunction = Callable[[TokenTerms], LossParts]

NEEDS = frozenset({"rollout", "ref_logprobs", "old_logprobs"})


@dataclass(frozen=True)
class Algorithm:
    name: str
    advantage: AdvantageFunction  # all rows of a step -> the same rows, in the same order, with `advantages` (if the loss reads them)
    loss: LossFunction
    aggregation: str  # how batching weighs the tokens of a mini-batch
    length_norm: int  # divisor of the aggregation that wants one; read by no other
    needs: frozenset[str]  # subset of NEEDS: "rollout" (samples and rewards), and the per-token numbers to annotate rows with
    entropy_gradient: bool  # whether the entropy of `TokenTerms` must carry a gradient
    settings: Mapping[str, Setting]  # every number of the preset as it is used, for people to read

    def __post_init__(self) -> None:
        assert self.needs <= NEEDS, f"unknown needs {sorted(self.needs - NEEDS)}"
