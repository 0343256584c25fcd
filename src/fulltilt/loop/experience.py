"""Sampling, and validation.

Enters: the parts of a run and prompts. Leaves: groups; or, under verl's names, the rewards of the validation prompts (for SFT: the loss of
the rows). Guaranteed: groups are in prompt order; the reward model's numbers are in the scores like any other reward; samples of training
do not depend on how often it is validated.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fulltilt.cluster.assembly import RunParts
from fulltilt.data.prompts import PromptSet
from fulltilt.data.sft import RowSet
from fulltilt.observe.console import Console
from fulltilt.observe.validation import summarise
from fulltilt.records import AnyRow, Prompt, Score
from fulltilt.rollout.sampler import Sampling
from fulltilt.schema import Config, EvalConfig, RolloutConfig

EVALUATION_STREAM = 1 << 62  # validation has its own stream of noise, so that validating more often does not change training


def training_sampling(config: Config) -> Sampling:
    return sampling_of(config, config.rollout, config.algorithm.samples_per_prompt)


def sampling_of(config: Config, section: RolloutConfig | EvalConfig, samples: int) -> Sampling:
    return Sampling(
        samples=samples,
        max_new_tokens=section.max_new_tokens or config.rollout.max_new_tokens,
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        stop=tuple(config.rollout.stop),
    )


def sample_groups(parts: RunParts, console: Console, prompts: Sequence[Prompt], sampling: Sampling, seed: int) -> tuple[Any, ...]:
    """Sample one group for each prompt. Complete groups are scored while the others are sampled."""
    assert parts.samples
    done = itertools.count(1)
    return parts.samples.sample(prompts, sampling, seed, lambda: console.phase_progress(next(done), len(prompts)))


@dataclass(frozen=True)
class Validated:
    metrics: dict[str, float]
    groups: Sequence[Any] = ()  # Group or GroupHead
    scores: Sequence[Sequence[Score]] = ()


def validate(config: Config, parts: RunParts, console: Console) -> Validated:
    with parts.crew.phase("eval"):
        if isinstance(parts.val_data, RowSet):
            logprobs, tokens = parts.crew.sum_logprobs(parts.val_data.items)
            return Validated({"val/loss": -logprobs / max(1, tokens)})
        assert isinstance(parts.val_data, PromptSet)
        prompts, samples = parts.val_data.items[: config.eval.max_prompts], config.eval.samples_per_prompt
        sampling = sampling_of(config, config.eval, samples)
        groups = sample_groups(parts, console, prompts, sampling, EVALUATION_STREAM ^ config.run.seed)

        def judge(rows: Sequence[AnyRow]) -> list[Any]:
            return parts.crew.annotate("reward_model", "values", rows, console.phase_progress).rows

        assert parts.samples
        scores = parts.samples.score(groups, judge, console.warn)
    return Validated(summarise(groups, scores, samples), groups, scores)
