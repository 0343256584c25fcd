"""Validation: rewards of the validation prompts, or the loss of the validation rows.

Enters: the parts of a run. Leaves: metrics under verl's names, and a few samples for people. Guaranteed: what training draws does not
depend on how often it is validated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fulltilt.cluster.assembly import RunParts
from fulltilt.data.prompts import PromptSet
from fulltilt.data.sft import RowSet
from fulltilt.loop.experience import sample_groups, score_groups, show_progress, validation_sampling
from fulltilt.observe.console import Console
from fulltilt.observe.validation import sample_rows, summarise
from fulltilt.records import Group, Row, Score
from fulltilt.schema import Config

EVALUATION_STREAM = 1 << 62  # validation draws its noise apart from training, so that validating more often changes nothing else


@dataclass(frozen=True)
class Validated:
    metrics: dict[str, float]
    groups: Sequence[Group] = ()
    scores: Sequence[Sequence[Score]] = ()
    columns: list[str] = field(default_factory=list)  # of the samples shown
    samples: list[list[Any]] = field(default_factory=list)


def validate(config: Config, parts: RunParts, console: Console) -> Validated:
    with parts.worker.phase("eval"):
        return _validate(config, parts, console)


def _validate(config: Config, parts: RunParts, console: Console) -> Validated:
    if isinstance(parts.val_data, RowSet):
        found = parts.worker.sum_logprobs(parts.val_data.items)
        return Validated({"val/loss": -found.total / max(1, found.tokens)})
    assert isinstance(parts.val_data, PromptSet)
    prompts = parts.val_data.items[: config.eval.max_prompts]
    groups = sample_groups(parts, console, prompts, validation_sampling(config), EVALUATION_STREAM ^ config.run.seed)

    def judge(rows: Sequence[Row]) -> list[Row]:
        report = partial(show_progress, console)
        return parts.worker.annotate("reward_model", "values", rows, report).rows

    scores = score_groups(parts, console, config, groups, judge)
    columns, samples = sample_rows(groups, scores, config.log.val_samples)
    return Validated(summarise(groups, scores, config.eval.samples_per_prompt), groups, scores, columns, samples)
