"""From prompts to scored groups to rows, and validation.

Enters: the parts of a run and prompts. Leaves: groups with a score for each sample, and the rows that the trainer sees; or, under verl's
names, the rewards of the validation prompts (for SFT: the loss of the rows). Guaranteed: groups are in prompt order, rows in the order of
groups; what the reward model says is in the scores like any other reward; what training draws does not depend on how often it is validated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fulltilt.algo.base import Algorithm
from fulltilt.cluster.assembly import RunParts
from fulltilt.data.prompts import PromptSet
from fulltilt.data.sft import RowSet
from fulltilt.observe.console import Console
from fulltilt.observe.validation import summarise
from fulltilt.records import Group, Prompt, Row, Sample, Score
from fulltilt.reward.model import add_model_scores, model_weight
from fulltilt.rollout.collect import ScoredGroup, collect
from fulltilt.rollout.sampler import Sampling
from fulltilt.schema import Config, EvalConfig, RolloutConfig

EVALUATION_STREAM = 1 << 62  # validation draws its noise apart from training, so that validating more often changes nothing else


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


def sample_groups(parts: RunParts, console: Console, prompts: Sequence[Prompt], sampling: Sampling, seed: int) -> tuple[Group, ...]:
    """One group for each prompt; the rewards work on those that are complete while the others are sampled."""
    reward, done = parts.reward, itertools.count(1)
    assert reward

    def hand_over(group: Group) -> None:
        reward.submit(group)
        console.phase_progress(next(done), len(prompts))

    return collect(parts.crew.generate, prompts, sampling, seed, hand_over)


def score_groups(
    parts: RunParts, console: Console, config: Config, groups: Sequence[Group], judge: Callable[[Sequence[Row]], list[Row]]
) -> list[list[Score]]:
    """The scores of groups that `sample_groups` gave, in their order. `judge` gives rows the reward model's values."""
    assert parts.reward
    scores = parts.reward.collect(groups)
    if parts.encoder is None:
        return scores
    written = parts.encoder.rows([group for group in groups if model_weight(group, config.reward) is not None])
    if unread := [row for row in written if isinstance(row, str)]:
        console.warn(f"{len(unread)} of {len(written)} samples could not be scored: {unread[0]}")
    found = iter(float(row.values[-1]) for row in judge([row for row in written if isinstance(row, Row)]) if row.values is not None)
    return add_model_scores(groups, scores, [row if isinstance(row, str) else next(found) for row in written], config.reward)


def shaped_reward(score: Score, sample: Sample, algorithm: Algorithm) -> float:
    """What the reward said, less what the algorithm takes off long responses."""
    return score.value + (algorithm.overlong(len(sample.ids)) if algorithm.overlong else 0.0)


def make_rows(
    kept: Sequence[ScoredGroup], algorithm: Algorithm, step: int, *, exclude_errors: bool, baselines: Sequence[Score] | None = None
) -> list[Row]:
    """Samples as the trainer sees them, in prompt order. With `exclude_errors`, those whose reward or baseline failed are left out."""
    rows = []
    for number, entry in enumerate(kept):
        baseline, prompt = baselines[number] if baselines else None, entry.group.prompt.ids
        nothing = np.zeros(len(prompt), dtype=np.float32)
        for sample, score in zip(entry.group.samples, entry.scores, strict=True):
            if exclude_errors and any(each.error is not None for each in (score, baseline) if each):
                continue
            rows.append(
                Row(
                    ids=np.concatenate([prompt, sample.ids]),
                    mask=np.arange(len(prompt) + len(sample.ids)) >= len(prompt),
                    group=number,
                    reward=shaped_reward(score, sample, algorithm),
                    baseline=baseline.value if baseline else None,
                    lag=step - entry.step,
                    rollout_logprobs=np.concatenate([nothing, sample.logprobs]),
                )
            )
    return rows


@dataclass(frozen=True)
class Validated:
    metrics: dict[str, float]
    groups: Sequence[Group] = ()
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

        def judge(rows: Sequence[Row]) -> list[Row]:
            return parts.crew.annotate("reward_model", "values", rows, console.phase_progress).rows

        scores = score_groups(parts, console, config, groups, judge)
    return Validated(summarise(groups, scores, samples), groups, scores)
