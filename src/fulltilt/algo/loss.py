"""Losses: one number per trained token in, one scalar to differentiate out.

Enters: `TokenTerms` (for a critic `ValueTerms`), tensors of shape [R] over the trained tokens of one micro-batch, including each token's
weight in the mini-batch. Leaves: `LossParts`. Guaranteed: every term is a sum of weight times a per-token number that depends only on that
token, or on the tokens of its own row, which is never split: the sum over micro-batches does not depend on how the mini-batch was split;
everything is computed in the dtype that enters; metrics carry no gradient.

A policy's loss is a surrogate (a function from terms to `Surrogate`, which is where algorithms differ) and what all policies share:
importance weight, KL term, entropy bonus, metrics (`policy_loss`).

Metrics have verl's names. Parts of the loss (`actor/pg_loss`, `actor/kl_loss`, `critic/vf_loss`, `train/loss`) are `weighted`. Metrics that
compare trainer and engine are `ratios` over fresh tokens only: tokens that older weights sampled would show a gap that is not the
engine's. The rest are `sums`, which become means over trained tokens once the mini-batch is complete.

Only methods of the tensors are called, so that this module and the presets that name its functions load without torch: a run's
configuration is checked before torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from fulltilt.records import LossParts, TokenTerms, ValueTerms

if TYPE_CHECKING:
    from torch import Tensor

# The KL estimators serve the loss (torch) and the reward (numpy).
Numbers = TypeVar("Numbers", "np.ndarray", "Tensor")

# exp(20) is about 5e8: larger than any meaningful ratio, and far below where float32 overflows and the infinity of an unused branch
# turns the gradient into NaN.
LOG_RATIO_BOUND = 20.0


def k1(logprobs: Numbers, ref_logprobs: Numbers) -> Numbers:
    """log p/q. An unbiased estimate of the KL, but a poor loss: on policy its gradient, that of log p, is zero in expectation, so it adds
    noise and no pull towards the reference. Use it in the reward; in the loss use k2 or k3."""
    return logprobs - ref_logprobs


def k2(logprobs: Numbers, ref_logprobs: Numbers) -> Numbers:
    """Half the square of log p/q. Biased as an estimate; on policy its gradient is the unbiased gradient of KL(p, q)."""
    return (logprobs - ref_logprobs) ** 2 / 2


def k3(logprobs: Numbers, ref_logprobs: Numbers) -> Numbers:
    """q/p - 1 - log q/p. Unbiased as an estimate, never negative, with low variance; near p = q its gradient is that of KL(q, p).

    log q/p is clamped to +-20, as in verl: beyond, the term is constant and its gradient 0.
    """
    log_ratio = (ref_logprobs - logprobs).clip(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (np.expm1(log_ratio) if isinstance(log_ratio, np.ndarray) else log_ratio.expm1()) - log_ratio


KL_ESTIMATORS: dict[str, Callable[..., Tensor]] = {"k1": k1, "k2": k2, "k3": k3}

# ---- surrogates --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Surrogate:
    """The policy-gradient loss of each token, and the metrics that only this surrogate can compute."""

    loss: Tensor  # [R]; a user's own function may also give a scalar that includes the weights already
    sums: Mapping[str, Tensor] = field(default_factory=dict)


SurrogateFunction = Callable[[TokenTerms], Surrogate]


def old_logprobs(terms: TokenTerms) -> Tensor:
    """On policy the update's own log-probs are the old ones: the ratio is then exactly 1, with the right gradient."""
    return terms.logprobs.detach() if terms.old_logprobs is None else terms.old_logprobs


def log_ratio(terms: TokenTerms) -> Tensor:
    """Log of new over old probability of each token, clamped to +-20 as in verl."""
    return (terms.logprobs - old_logprobs(terms)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def clipped_surrogate(terms: TokenTerms, clip_low: float, clip_high: float, dual_clip: float) -> Surrogate:
    """PPO's pessimistic surrogate with separate clips: -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A).

    With `dual_clip` above 0, tokens of negative advantage lose at most dual_clip * |A|: a token that has become far likelier than when it
    was sampled would otherwise be pushed down without bound.
    """
    advantages = advantages_of(terms)
    loss, clipped = _pessimistic(advantages, log_ratio(terms).exp(), clip_low, clip_high)
    sums = {"actor/pg_clipfrac": _count(clipped, loss)}
    if dual_clip > 0:
        bound = -advantages * dual_clip
        bounded = (advantages < 0) & (loss > bound)
        loss = bound.where(bounded, loss)
        sums["actor/pg_clipfrac_lower"] = _count(bounded, loss)
    return Surrogate(loss, sums)


def sequence_surrogate(terms: TokenTerms, clip_low: float, clip_high: float) -> Surrogate:
    """GSPO: the clipped surrogate with one ratio for a whole row, the geometric mean of its tokens' ratios.

    The value of each token's loss uses the row's ratio, and its gradient flows through the token's own log-prob. Averaged over the row
    (seq-mean-token-mean) the gradient is that of the row's ratio.
    """
    _, place, lengths = terms.row.unique_consecutive(return_inverse=True, return_counts=True)
    gap = (terms.logprobs - old_logprobs(terms)).detach()
    mean = gap.new_zeros(len(lengths)).index_add(0, place, gap) / lengths
    of_row = mean.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)[place]
    ratio = (of_row + terms.logprobs - terms.logprobs.detach()).exp()
    loss, clipped = _pessimistic(advantages_of(terms), ratio, clip_low, clip_high)
    return Surrogate(loss, {"actor/pg_clipfrac": _count(clipped, loss)})


def clipped_importance(terms: TokenTerms, clip_low: float, clip_high: float) -> Surrogate:
    """CISPO: -clip(ratio) A log p, without gradient through the ratio. Every token keeps a gradient; clipping bounds its size only."""
    ratio = log_ratio(terms).detach().exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -bounded * advantages_of(terms) * terms.logprobs
    return Surrogate(loss, {"actor/pg_clipfrac": _count(bounded != ratio, loss)})


def advantages_of(terms: TokenTerms) -> Tensor:
    assert terms.advantages is not None, "the surrogate needs advantages"
    return terms.advantages


def _pessimistic(advantages: Tensor, ratio: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """The loss, and where the clipped ratio was the pessimistic one."""
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return plain.maximum(clipped), clipped > plain


def _count(condition: Tensor, like: Tensor) -> Tensor:
    return condition.to(like.dtype).sum()


# ---- what all policies share -------------------------------------------------------------------------------------------------------


def importance_ratio(terms: TokenTerms) -> Tensor:
    """Probability of each token under the trainer's old policy over that under the engine that sampled it, without gradient.

    It is 1 where trainer and engine agree to the bit. Its log is at most 20, so that the mean over tokens stays finite.
    """
    return engine_gap(terms).clamp(max=LOG_RATIO_BOUND).exp()


def engine_gap(terms: TokenTerms) -> Tensor:
    """The trainer's old log-probs minus the engine's, without gradient."""
    assert terms.rollout_logprobs is not None, "the importance weight needs the rollout's log-probs"
    return old_logprobs(terms).detach() - terms.rollout_logprobs


def over_fresh(numbers: Tensor, terms: TokenTerms) -> tuple[Tensor, Tensor]:
    """Sum and count over the tokens that the weights of this step sampled."""
    fresh = numbers.new_ones(numbers.shape).bool() if terms.fresh is None else terms.fresh
    return numbers.masked_fill(~fresh, 0.0).sum(), _count(fresh, numbers)


def policy_loss(
    terms: TokenTerms, surrogate: SurrogateFunction, kl_coef: float, kl_estimator: str, entropy_coef: float, importance_cap: float
) -> LossParts:
    """Surrogate times the truncated importance weight, plus kl_coef times KL, minus entropy_coef times entropy.

    A coefficient or cap of 0 switches its part off. The importance weight corrects only the surrogate: no other term estimates a policy
    gradient from the engine's tokens.
    """
    found = surrogate(terms)
    sums = {**found.sums, "actor/ppo_kl": -log_ratio(terms).detach().sum(), "actor/entropy": terms.entropy.detach().sum()}
    ratios = {}
    if terms.rollout_logprobs is not None:
        ratios["rollout_corr/logprob_abs_gap"] = over_fresh(engine_gap(terms).abs(), terms)
    policy = found.loss
    if importance_cap > 0:
        assert policy.ndim, "a scalar cannot be weighted token by token"
        ratio = importance_ratio(terms)
        policy = policy * ratio.clamp(max=importance_cap)
        # As in verl, before the truncation: after it the mean would not show how far engine and trainer differ.
        ratios["rollout_corr/rollout_is_mean"] = over_fresh(ratio, terms)
        sums["rollout_corr/rollout_is_ratio_fraction_high"] = _count(ratio > importance_cap, ratio)
    loss = (policy * terms.weights).sum() if policy.ndim else policy
    weighted = {"actor/pg_loss": loss.detach()}
    if kl_coef > 0:
        assert terms.ref_logprobs is not None, "the KL term needs the reference's log-probs"
        divergence = (KL_ESTIMATORS[kl_estimator](terms.logprobs, terms.ref_logprobs) * terms.weights).sum()
        loss = loss + kl_coef * divergence
        weighted["actor/kl_loss"] = divergence.detach()
    if entropy_coef > 0:
        loss = loss - entropy_coef * (terms.entropy * terms.weights).sum()
    return LossParts(loss, sums, weighted, ratios)


# ---- critic and SFT ----------------------------------------------------------------------------------------------------------------


def value_loss(terms: ValueTerms, value_clip: float) -> LossParts:
    """Half the squared error of the critic; with `value_clip` above 0 at least the error of values clipped to that distance from the old
    ones."""
    error = (terms.values - terms.returns).square()
    near = terms.values
    if value_clip > 0:
        near = terms.values.clamp(terms.old_values - value_clip, terms.old_values + value_clip)
    held = (near - terms.returns).square()
    loss = (error.maximum(held) * terms.weights).sum() / 2
    sums = {"critic/vf_clipfrac": _count(held > error, loss), "critic/vpred_mean": terms.values.detach().sum()}
    return LossParts(loss, sums, {"critic/vf_loss": loss.detach()})


def sft_loss(terms: TokenTerms) -> LossParts:
    """Weighted negative log-likelihood."""
    loss = -(terms.logprobs * terms.weights).sum()
    return LossParts(loss, {"actor/entropy": terms.entropy.detach().sum()}, {"train/loss": loss.detach()})
