"""Presets: every algorithm as one entry that names its functions and its numbers; and the advantages and losses that can be chosen
separately.

Enters: nothing, or the values of `algorithm.name`, `algorithm.advantage` and `algorithm.loss`. Leaves: `PRESETS`, `ESTIMATORS`, `LOSSES`,
and the preset that those three values make. Guaranteed: presets are data; the functions are those of `algo.advantage`, `algo.loss` and
`algo.marks` under the same names; so the schema reads from here which algorithms there are, and which keys affect each of them.

To add an algorithm: add an entry to PRESETS, and to `algo` the functions that it does not share with others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

Setting = float | int | str | bool | list[Any] | dict[str, Any] | None

NORMALISED_SUM = "seq-mean-token-sum-norm"
LARGEST_ERROR = 0.2  # bound on the distance of the reward's KL from its target, relative to the target

# Keys that every algorithm reads, whatever its functions are, with their default values.
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
    "importance_level": "token",
    "rejection": None,
    "rejection_bounds": None,
    "overlong_buffer": 0,
    "overlong_penalty": 1.0,
    "advantage": None,
    "loss": None,
}
# Keys that also algorithms read which compare the samples of a prompt with one another.
DYNAMIC: Mapping[str, Setting] = {"dynamic_sampling": False, "prompts_per_round": None, "max_rounds": 10}
GROUPS: Mapping[str, Setting] = {**ROLLOUT, **DYNAMIC}
CLIPPED: Mapping[str, Setting] = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}


@dataclass(frozen=True)
class Estimator:
    """The way from rewards to advantages: a built-in value of `algorithm.advantage`."""

    function: str  # its name in algo.advantage
    defaults: Mapping[str, Setting] = field(default_factory=dict)  # keys of [algorithm] that it adds, with their default values
    smallest_group: int = 2  # fewest samples per prompt that it can learn from; from 2 on the group's rewards are its baseline
    critic: str = ""  # name of the critic's loss; empty: it has no critic
    baseline: bool = False  # needs each prompt's greedy sample
    needs: frozenset[str] = frozenset()  # further per-token numbers


@dataclass(frozen=True)
class PolicyLoss:
    """The way from advantages to a loss: a built-in value of `algorithm.loss`."""

    function: str  # its name in algo.loss
    defaults: Mapping[str, Setting] = field(default_factory=dict)
    marks: str = ""  # function of algo.marks that chooses tokens by the statistics of a mini-batch; empty: none
    reads_old: bool = True  # whether it compares the policy with the one before the step's first update


# The reward comes with the last token, and a lambda of 0.95 would leave 1% of it after 90 tokens: long responses would learn from the
# critic alone, which has not learned anything yet. So gae_lambda is 1, as in verl.
CRITIC: Mapping[str, Setting] = {"gamma": 1.0, "gae_lambda": 1.0, "whiten": True, "value_clip": 0.5, "critic_warmup": 0}
BY_STD: Mapping[str, Setting] = {"normalize_by_std": True}
OLD_AND_SHARP = frozenset({"old_logprobs", "sharp_logprobs"})

ESTIMATORS: Mapping[str, Estimator] = {
    "gae": Estimator("generalised", CRITIC, smallest_group=1, critic="value_loss"),
    "grpo": Estimator("group_relative", BY_STD),
    "rloo": Estimator("leave_one_out"),
    "reinforce++": Estimator("discounted_returns", {"gamma": 1.0, "whiten": True}, smallest_group=1),
    "reinforce++_baseline": Estimator("group_mean_whitened", {"whiten": True}),
    "remax": Estimator("greedy_baseline", smallest_group=1, baseline=True),
    "grpo_passk": Estimator("best_of_group", BY_STD),
    "opo": Estimator("length_weighted"),
    "gpg": Estimator("rescaled_by_nonzero"),
    "gdpo": Estimator("decoupled", {**BY_STD, "reward_parts": None}),
    "optimal_token_baseline": Estimator("token_baseline", needs=OLD_AND_SHARP),
}

PER_SAMPLE: Mapping[str, Setting] = {"aggregation": "seq-mean-token-mean"}
LOSSES: Mapping[str, PolicyLoss] = {
    "ppo": PolicyLoss("clipped_surrogate", CLIPPED),
    "gspo": PolicyLoss("sequence_surrogate", {"clip_low": 3e-4, "clip_high": 4e-4, **PER_SAMPLE}),
    # No lower bound, as in the MiniMax-M1 paper; the weight is at most 5.
    "cispo": PolicyLoss("clipped_importance", {"clip_low": 1.0, "clip_high": 4.0}),
    "gpg": PolicyLoss("policy_gradient", reads_old=False),
    "clip_cov": PolicyLoss(
        "covariance_clipped",
        {"clip_low": 0.2, "clip_high": 0.2, "cov_share": 2e-4, "cov_low": 1.0, "cov_high": 5.0},
        marks="some_between",
    ),
    "kl_cov": PolicyLoss("covariance_penalised", {"cov_share": 2e-4, "cov_kl_coef": 1.0}, marks="largest"),
    # The bounds of the GMPO paper are exp(-0.4) and exp(0.4).
    "geo_mean": PolicyLoss("geometric_mean", {"clip_low": 0.4, "clip_high": 0.4, **PER_SAMPLE}),
    "sapo": PolicyLoss("soft_gate", {"tau_pos": 1.0, "tau_neg": 1.05, **PER_SAMPLE}),
    "dppo_tv": PolicyLoss("total_variation_bounded", {"clip_low": 0.15, "clip_high": 0.15, "dual_clip": 20.0}),
    "dppo_kl": PolicyLoss("binary_kl_bounded", {"clip_low": 0.05, "clip_high": 0.05, "dual_clip": 20.0}),
}

# Keys that only an advantage or a loss reads: a user's function that replaces it must take them too.
FUNCTION_KEYS = {
    "advantage": {"normalize_by_std", "whiten", "gamma", "gae_lambda", "reward_parts"},
    "loss": {key for each in LOSSES.values() for key in each.defaults} - {"aggregation"},
}


@dataclass(frozen=True)
class Preset:
    """Functions are called with rows or terms, and with the keys of [algorithm] that are among their parameters."""

    advantage: str  # name of a function in algo.advantage
    loss: str  # name of a policy's surrogate; of the whole loss, if nothing is sampled
    defaults: Mapping[str, Setting]  # keys of [algorithm] that it reads, with their default values
    smallest_group: int = 1  # fewest samples per prompt that it can learn from
    rollout: bool = True  # False: it learns from given rows, not from its own samples and their rewards
    critic: str = ""  # name of the critic's loss; empty: it has no critic
    baseline: bool = False  # needs each prompt's greedy sample
    needs: frozenset[str] = frozenset()  # further per-token numbers that its advantage reads
    marks: str = ""  # as in PolicyLoss
    reads_old: bool = True  # as in PolicyLoss

    def but(self, **values: Setting) -> Preset:
        """Return the same algorithm with other default values."""
        return replace(self, defaults={**self.defaults, **values})

    def with_estimator(self, chosen: Estimator) -> Preset:
        """Return the same algorithm with another advantage, and with that advantage's keys in place of the old one's."""
        if chosen.function == self.advantage:
            return self
        own = FUNCTION_KEYS["advantage"] | CRITIC.keys()
        kept = {key: value for key, value in self.defaults.items() if key not in own}
        in_groups = {key: kept.pop(key, value) for key, value in DYNAMIC.items()} if chosen.smallest_group > 1 else {}
        for key in DYNAMIC:
            kept.pop(key, None)
        return replace(
            self, advantage=chosen.function, defaults={**kept, **in_groups, **chosen.defaults}, smallest_group=chosen.smallest_group,
            critic=chosen.critic, baseline=chosen.baseline, needs=chosen.needs,
        )  # fmt: skip

    def with_loss(self, chosen: PolicyLoss) -> Preset:
        """Return the same algorithm with another loss and its keys. A loss over whole samples also sets its aggregation."""
        if chosen.function == self.loss:
            return self
        kept = {key: value for key, value in self.defaults.items() if key not in FUNCTION_KEYS["loss"]}
        return replace(self, loss=chosen.function, defaults={**kept, **chosen.defaults}, marks=chosen.marks, reads_old=chosen.reads_old)


def made_of(advantage: str, loss: str) -> Preset:
    """Return an algorithm with this advantage and this loss, and the defaults of both."""
    nothing = Preset("", "", ROLLOUT)
    return nothing.with_estimator(ESTIMATORS[advantage]).with_loss(LOSSES[loss])


GRPO = made_of("grpo", "ppo")

PRESETS: Mapping[str, Preset] = {
    "grpo": GRPO,
    "dr_grpo": GRPO.but(normalize_by_std=False, aggregation=NORMALISED_SUM),
    # overlong_buffer None: a fifth of the longest response, as in the paper (4,096 of 20,480).
    "dapo": GRPO.but(clip_high=0.28, dynamic_sampling=True, overlong_buffer=None),
    "ppo": made_of("gae", "ppo"),
    "rloo": made_of("rloo", "ppo"),
    "reinforce++": made_of("reinforce++", "ppo"),
    # The paper's KL term here is k2.
    "reinforce++_baseline": made_of("reinforce++_baseline", "ppo").but(kl_estimator="k2"),
    "remax": made_of("remax", "ppo"),
    "gspo": made_of("grpo", "gspo"),
    "cispo": made_of("grpo", "cispo"),
    "sft": Preset("no_advantage", "sft_loss", AGGREGATION, rollout=False),
}


@lru_cache
def preset_for(name: str, advantage: str | None = None, loss: str | None = None) -> Preset:
    """Return the preset of a name, with a built-in advantage and loss in place of its own if they are chosen. A user's function changes
    nothing here."""
    preset = PRESETS[name]
    if preset.rollout and advantage is not None and advantage in ESTIMATORS:
        preset = preset.with_estimator(ESTIMATORS[advantage])
    if preset.rollout and loss is not None and loss in LOSSES:
        preset = preset.with_loss(LOSSES[loss])
    return preset


VERL_NAMES: Mapping[str, str] = {
    "gae": "ppo",
    "drgrpo": "dr_grpo",
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++_baseline",
}
"""verl's names for these algorithms, which are accepted too."""

VERL_ESTIMATORS: Mapping[str, str] = {
    **{theirs: ours for theirs, ours in VERL_NAMES.items() if ours in ESTIMATORS},
    "tir_optimal_token_baseline": "optimal_token_baseline",
}
"""verl's names for the built-in advantages, which are accepted too."""

VERL_LOSSES: Mapping[str, str] = {"vanilla": "ppo"}
"""verl's names for the built-in losses, which are accepted too."""
