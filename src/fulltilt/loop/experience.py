"""From prompts to scored groups to rows.

Enters: the parts of a run and prompts. Leaves: groups with a score for each sample, and the rows that the trainer sees. Guaranteed: groups
are in prompt order and rows in the order of groups; what the reward model says is in the scores like any other reward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fulltilt.algo.base import Algorithm
from fulltilt.cluster.assembly import RunParts
from fulltilt.cluster.worker import WorkProgress
from fulltilt.observe.console import Console
from fulltilt.records import Group, Prompt, Row, Sample, Score
from fulltilt.reward.base import RewardPool
from fulltilt.reward.model import add_model_scores, model_weight
from fulltilt.rollout.collect import ScoredGroup, collect
from fulltilt.rollout.sampler import Sampling
from fulltilt.schema import Config


def training_sampling(config: Config) -> Sampling:
    rollout = config.rollout
    return Sampling(
        samples=config.algorithm.samples_per_prompt,
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=tuple(rollout.stop),
    )


def validation_sampling(config: Config) -> Sampling:
    section = config.eval
    return replace(
        training_sampling(config),
        samples=section.samples_per_prompt,
        max_new_tokens=section.max_new_tokens or config.rollout.max_new_tokens,
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
    )


def greedy_sampling(config: Config) -> Sampling:
    return replace(training_sampling(config), samples=1, temperature=0.0, top_p=1.0, top_k=0)


def sample_groups(parts: RunParts, console: Console, prompts: Sequence[Prompt], sampling: Sampling, seed: int) -> tuple[Group, ...]:
    """One group for each prompt; the rewards work on those that are complete while the others are sampled."""
    assert parts.reward
    return collect(parts.worker.generate, prompts, sampling, seed, hand_to(parts.reward, console, len(prompts)))


def show_progress(console: Console, progress: WorkProgress) -> None:
    console.phase_progress(progress.done, progress.total)


def hand_to(reward: RewardPool, console: Console, total: int) -> Callable[[Group], None]:
    """For `collect`: every group goes to the rewards the moment it is complete, and shows as progress."""
    done = 0

    def hand_over(group: Group) -> None:
        nonlocal done
        reward.submit(group)
        done += 1
        console.phase_progress(done, total)

    return hand_over


def score_groups(
    parts: RunParts, console: Console, config: Config, groups: Sequence[Group], judge: Callable[[Sequence[Row]], list[Row]]
) -> list[list[Score]]:
    """The scores of groups that `sample_groups` gave, in their order. `judge` gives rows the reward model's values."""
    assert parts.reward
    scores = parts.reward.collect(groups)
    if parts.encoder is None:
        return scores
    judged = [group for group in groups if model_weight(group, config.reward) is not None]
    written = parts.encoder.rows(judged)
    readable = [row for row in written if isinstance(row, Row)]
    if unread := [row for row in written if isinstance(row, str)]:
        console.warn(f"{len(unread)} of {len(written)} samples could not be scored: {unread[0]}")
    found = iter(float(row.values[-1]) for row in judge(readable) if row.values is not None)
    numbers = [row if isinstance(row, str) else next(found) for row in written]
    return add_model_scores(groups, scores, numbers, config.reward)


def good_rewards(scores: Sequence[Score], *, exclude_errors: bool) -> np.ndarray:
    """The rewards of a group that are trained on."""
    return np.array([score.value for score in scores if score.error is None or not exclude_errors], dtype=np.float64)


def shaped_reward(score: Score, sample: Sample, algorithm: Algorithm) -> float:
    """What the reward said, less what the algorithm takes off long responses."""
    return score.value + (algorithm.overlong(len(sample.ids)) if algorithm.overlong else 0.0)


def make_rows(
    kept: Sequence[ScoredGroup], algorithm: Algorithm, step: int, *, exclude_errors: bool, baselines: Sequence[Score] | None = None
) -> list[Row]:
    """Samples as the trainer sees them, in prompt order; those whose reward failed are left out if the policy says so, and those whose
    baseline failed have nothing to be compared with."""
    rows = []
    compared: Sequence[Score | None] = [None] * len(kept) if baselines is None else baselines
    for number, (entry, baseline) in enumerate(zip(kept, compared, strict=True)):
        prompt = entry.group.prompt.ids
        nothing = np.zeros(len(prompt), dtype=np.float32)
        if baseline is not None and baseline.error is not None and exclude_errors:
            continue
        for sample, score in zip(entry.group.samples, entry.scores, strict=True):
            if score.error is not None and exclude_errors:
                continue
            shaped: dict[str, Any] = {} if baseline is None else {"baseline": baseline.value}
            rows.append(
                Row(
                    ids=np.concatenate([prompt, sample.ids]),
                    mask=np.arange(len(prompt) + len(sample.ids)) >= len(prompt),
                    group=number,
                    reward=shaped_reward(score, sample, algorithm),
                    lag=step - entry.step,
                    rollout_logprobs=np.concatenate([nothing, sample.logprobs]),
                    **shaped,
                )
            )
    return rows
