"""Presets: every algorithm as one entry that names its functions and its numbers.

Enters: nothing. Leaves: `PRESETS`. Guaranteed: it is data, and the functions are those of `algo.advantage` and `algo.loss` under the same
names; so the schema reads from here which algorithms there are, and which keys have an effect with which of them.

To add an algorithm: add an entry to PRESETS, and to `algo` the functions that it does not share with others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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


@dataclass(frozen=True)
class PresetFunction:
    """A function by its name, and the keys of [algorithm] that it is called with, with their values when left out."""

    name: str
    keys: Mapping[str, Setting] = field(default_factory=dict)


@dataclass(frozen=True)
class Preset:
    advantage: PresetFunction
    loss: PresetFunction  # a policy's surrogate; the whole loss, where nothing is sampled
    common: Mapping[str, Setting]
    smallest_group: int = 1  # fewest samples per prompt that it can learn from
    rollout: bool = True  # learns from its own samples and their rewards
    critic: PresetFunction | None = None  # the critic's loss
    baseline: bool = False  # needs each prompt's greedy sample
    changed: Mapping[str, Setting] = field(default_factory=dict)  # values that differ from those of functions and common keys

    @property
    def defaults(self) -> dict[str, Setting]:
        """Keys of [algorithm] that it reads, and their values when left out."""
        functions = (self.advantage, self.loss, *([self.critic] if self.critic else []))
        return {**self.common, **{key: value for each in functions for key, value in each.keys.items()}, **self.changed}

    def but(self, **values: Setting) -> Preset:
        """The same algorithm with other default values."""
        return replace(self, changed={**self.changed, **values})


CLIPPED = PresetFunction("clipped_surrogate", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0})
GRPO = Preset(PresetFunction("group_relative", {"normalize_by_std": True}), CLIPPED, GROUPS, smallest_group=2)
REINFORCE = Preset(PresetFunction("discounted_returns", {"gamma": 1.0, "whiten": True}), CLIPPED, ROLLOUT)

PRESETS: Mapping[str, Preset] = {
    "grpo": GRPO,
    "dr_grpo": GRPO.but(normalize_by_std=False, aggregation=NORMALISED_SUM),
    # overlong_buffer None: a fifth of the longest response, as in the paper (4,096 of 20,480).
    "dapo": GRPO.but(clip_high=0.28, dynamic_sampling=True, overlong_buffer=None),
    # gae_lambda 1, as in verl: the reward comes with the last token, and 0.95 would leave 1% of it after 90 tokens, so that
    # long responses would learn from the critic alone, which has not learned anything yet.
    "ppo": Preset(
        PresetFunction("generalised", {"gamma": 1.0, "gae_lambda": 1.0, "whiten": True}),
        CLIPPED,
        {**ROLLOUT, "critic_warmup": 0},
        critic=PresetFunction("value_loss", {"value_clip": 0.5}),
    ),
    "rloo": replace(GRPO, advantage=PresetFunction("leave_one_out")),
    "reinforce++": REINFORCE,
    # The paper's KL term here is k2.
    "reinforce++_baseline": replace(GRPO, advantage=PresetFunction("group_mean_whitened", {"whiten": True})).but(kl_estimator="k2"),
    "remax": replace(REINFORCE, advantage=PresetFunction("greedy_baseline"), baseline=True),
    "gspo": replace(GRPO, loss=PresetFunction("sequence_surrogate", {"clip_low": 3e-4, "clip_high": 4e-4})).but(
        aggregation="seq-mean-token-mean"
    ),
    # No lower bound, as in the MiniMax-M1 paper; the weight is at most 5.
    "cispo": replace(GRPO, loss=PresetFunction("clipped_importance", {"clip_low": 1.0, "clip_high": 4.0})),
    "sft": Preset(PresetFunction("no_advantage"), PresetFunction("sft_loss"), AGGREGATION, rollout=False),
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
