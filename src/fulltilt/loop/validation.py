"""Validation: rewards of the validation prompts, or the loss of the validation rows.

Enters: the parts of a run. Leaves: metrics under verl's names, and a few samples for people. Guaranteed: what training draws does not
depend on how often it is validated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fulltilt.batching.pack import forward_micro_batches
from fulltilt.cluster.local import Parts, enough_memory
from fulltilt.config import Config
from fulltilt.data.prompts import PromptSet
from fulltilt.data.sft import RowSet
from fulltilt.loop.experience import sample_groups, score_groups, validation_sampling
from fulltilt.observe.console import Console
from fulltilt.observe.validation import sample_rows, summarise
from fulltilt.records import Group, Score
from fulltilt.train.roles import annotate_all

EVALUATION_STREAM = 1 << 62  # validation draws its noise apart from training, so that validating more often changes nothing else


@dataclass(frozen=True)
class Validated:
    metrics: dict[str, float]
    groups: Sequence[Group] = ()
    scores: Sequence[Sequence[Score]] = ()
    columns: list[str] = field(default_factory=list)  # of the samples shown
    samples: list[list[Any]] = field(default_factory=list)


def validate(config: Config, parts: Parts, console: Console) -> Validated:
    with enough_memory("eval"), parts.account.phase("eval"):
        return _validate(config, parts, console)


def _validate(config: Config, parts: Parts, console: Console) -> Validated:
    if isinstance(parts.val_data, RowSet):
        return Validated({"val/loss": validation_loss(parts.val_data, parts)})
    assert isinstance(parts.val_data, PromptSet)
    prompts = parts.val_data.prompts[: config.eval.max_prompts]
    groups = sample_groups(parts, console, prompts, validation_sampling(config), EVALUATION_STREAM ^ config.run.seed)
    scores = score_groups(parts, console, config, groups)
    columns, samples = sample_rows(groups, scores, config.log.val_samples)
    return Validated(summarise(groups, scores, config.eval.samples_per_prompt), groups, scores, columns, samples)


def validation_loss(data: RowSet, parts: Parts) -> float:
    """Mean negative log-likelihood of the trained tokens."""
    total, tokens = 0.0, 0
    parts.residents.need("actor")
    micro_batches = forward_micro_batches(data.rows, parts.forward_sizes["actor"])
    with parts.account.passes(parts.actor.head_bytes(micro_batches, learns=False)):
        for logprobs in annotate_all(parts.actor, micro_batches):
            total -= float(logprobs.sum(dtype=np.float64))
            tokens += len(logprobs)
    return total / max(1, tokens)
