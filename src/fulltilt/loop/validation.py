"""Validation: rewards of the validation prompts, or the loss of the validation rows.

Enters: the parts of a run. Leaves: metrics under verl's names, and the scored groups. Guaranteed: what training draws does not depend on
how often it is validated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fulltilt.cluster.assembly import RunParts
from fulltilt.data.prompts import PromptSet
from fulltilt.data.sft import RowSet
from fulltilt.loop.experience import sample_groups, score_groups, validation_sampling
from fulltilt.observe.console import Console
from fulltilt.observe.validation import summarise
from fulltilt.records import Group, Row, Score
from fulltilt.schema import Config

EVALUATION_STREAM = 1 << 62  # validation draws its noise apart from training, so that validating more often changes nothing else


@dataclass(frozen=True)
class Validated:
    metrics: dict[str, float]
    groups: Sequence[Group] = ()
    scores: Sequence[Sequence[Score]] = ()


def validate(config: Config, parts: RunParts, console: Console) -> Validated:
    with parts.worker.phase("eval"):
        if isinstance(parts.val_data, RowSet):
            logprobs, tokens = parts.worker.sum_logprobs(parts.val_data.items)
            return Validated({"val/loss": -logprobs / max(1, tokens)})
        assert isinstance(parts.val_data, PromptSet)
        prompts = parts.val_data.items[: config.eval.max_prompts]
        groups = sample_groups(parts, console, prompts, validation_sampling(config), EVALUATION_STREAM ^ config.run.seed)

        def judge(rows: Sequence[Row]) -> list[Row]:
            return parts.worker.annotate("reward_model", "values", rows, console.phase_progress).rows

        scores = score_groups(parts, console, config, groups, judge)
    return Validated(summarise(groups, scores, config.eval.samples_per_prompt), groups, scores)
