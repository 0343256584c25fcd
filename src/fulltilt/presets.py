"""Presets: every algorithm as one entry that names its functions and its numbers.

Enters: nothing. Leaves: `PRESETS`. Guaranteed: it is data, and the functions are those of `algo.advantage` and `algo.loss` under the same
names; so the schema reads from here which algorithms there are, and which keys have an effect with which of them.

To add an algorithm: add an entry to PRESETS, and to `algo` the functions that it does not share with others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

Setting = float | int | str | bool | None

NORMALISED_SUM = "seq-mean-token-sum-norm"
LARGEST_ERROR = 0.2  # bound on the distance of the reward's KL from its target, relative to the target

# Keys that an algorithm reads whatever its functions are, with their values when left out.
AGGREGATION: Mapping[str, Setting] = {"aggregation": "token-mean", "length_norm": None}
ROLLOUT: Mapping[str, Setting] = {
    **AGGREGATION,
    "kl_coef": 0.0,
    "kl_estimator": "k3",
    "reward_kl_coef": 0.0,
    "reward_kl_estimator": "k1",
    "reward_kl_target": None,
    "reward_kl_horizon": 10_000,
    "entropy_coef": 0.0,
    "importance_cap": 2.0,
    "overlong_buffer": 0,
    "overlong_penalty": 1.0,
    "advantage": None,
    "loss": None,
}
# The same for algorithms that compare the samples of a prompt with one another.
GROUPS: Mapping[str, Setting] = {**ROLLOUT, "dynamic_sampling": False, "prompts_per_round": None, "max_rounds": 10}
CLIPPED: Mapping[str, Setting] = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}

# Keys that only a preset's own advantage or surrogate reads: where a user's function takes its place, that function must take them too.
FUNCTION_KEYS = {"advantage": {"normalize_by_std", "whiten", "gamma", "gae_lambda"}, "loss": {"clip_low", "clip_high", "dual_clip"}}


@dataclass(frozen=True)
class Preset:
    """Functions are called with rows or terms, and with the keys of [algorithm] that are among their parameters."""

    advantage: str  # name of a function
    loss: str  # name of a policy's surrogate; of the whole loss, where nothing is sampled
    defaults: Mapping[str, Setting]  # keys of [algorithm] that it reads, and their values when left out
    smallest_group: int = 1  # fewest samples per prompt that it can learn from
    rollout: bool = True  # learns from its own samples and their rewards
    critic: str = ""  # name of the critic's loss; empty: it has no critic
    baseline: bool = False  # needs each prompt's greedy sample

    def but(self, **values: Setting) -> Preset:
        """The same algorithm with other default values."""
        return replace(self, defaults={**self.defaults, **values})


RLOO = Preset("leave_one_out", "clipped_surrogate", {**GROUPS, **CLIPPED}, smallest_group=2)
GRPO = replace(RLOO, advantage="group_relative").but(normalize_by_std=True)
REMAX = Preset("greedy_baseline", "clipped_surrogate", {**ROLLOUT, **CLIPPED}, baseline=True)
GSPO = Preset("group_relative", "sequence_surrogate", {**GROUPS, "normalize_by_std": True}, smallest_group=2)

PRESETS: Mapping[str, Preset] = {
    "grpo": GRPO,
    "dr_grpo": GRPO.but(normalize_by_std=False, aggregation=NORMALISED_SUM),
    # overlong_buffer None: a fifth of the longest response, as in the paper (4,096 of 20,480).
    "dapo": GRPO.but(clip_high=0.28, dynamic_sampling=True, overlong_buffer=None),
    # gae_lambda 1, as in verl: the reward comes with the last token, and 0.95 would leave 1% of it after 90 tokens, so that
    # long responses would learn from the critic alone, which has not learned anything yet.
    "ppo": Preset("generalised", "clipped_surrogate", {**ROLLOUT, **CLIPPED}, critic="value_loss").but(
        gamma=1.0, gae_lambda=1.0, whiten=True, value_clip=0.5, critic_warmup=0
    ),
    "rloo": RLOO,
    "reinforce++": replace(REMAX, advantage="discounted_returns", baseline=False).but(gamma=1.0, whiten=True),
    # The paper's KL term here is k2.
    "reinforce++_baseline": replace(RLOO, advantage="group_mean_whitened").but(whiten=True, kl_estimator="k2"),
    "remax": REMAX,
    "gspo": GSPO.but(clip_low=3e-4, clip_high=4e-4, aggregation="seq-mean-token-mean"),
    # No lower bound, as in the MiniMax-M1 paper; the weight is at most 5.
    "cispo": replace(GSPO, loss="clipped_importance").but(clip_low=1.0, clip_high=4.0),
    "sft": Preset("no_advantage", "sft_loss", AGGREGATION, rollout=False),
}

VERL_NAMES: Mapping[str, str] = {
    "gae": "ppo",
    "drgrpo": "dr_grpo",
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++_baseline",
}
"""verl's names for these algorithms, which are accepted too."""
