"""Losses: one number per trained token in, one scalar to differentiate out.

Enters: `TokenTerms` (for a critic `ValueTerms`), tensors of shape [R] over the trained tokens of one micro-batch, including each token's
weight in the mini-batch. Leaves: `LossParts`. Guaranteed: every term is a sum of weight times a per-token number that depends only on that
token, or on the tokens of its own row, which is never split, or on marks that were chosen over the whole mini-batch (`marks`): the sum over
micro-batches does not depend on how the mini-batch was split; everything is computed in the dtype that enters; metrics carry no gradient.

A policy's loss is a surrogate (a function from terms to `Surrogate`, which is where algorithms differ) and the parts that all policies
share: importance weight, KL term, entropy bonus, metrics (`policy_loss`).

Metrics have verl's names and meanings. Parts of the loss (`actor/pg_loss`, `actor/kl_loss`, `critic/vf_loss`, `train/loss`) are `weighted`.
Metrics that compare trainer and engine (`rollout_corr/`) are `ratios`; one that verl does not have, `logprob_abs_gap`, is over fresh tokens
only: tokens that older weights sampled would show a gap that is not the engine's. The rest are `sums`, which become means over trained
tokens once the mini-batch is complete.

Only methods of the tensors are called, so that this module and the presets that name its functions load without torch: a run's
configuration is checked before torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from fulltilt.algo.correction import LOG_RATIO_BOUND, Correction
from fulltilt.records import LossParts, TokenTerms, ValueTerms

if TYPE_CHECKING:
    from torch import Tensor

# The KL estimators serve the loss (torch) and the reward (numpy).
Numbers = TypeVar("Numbers", "np.ndarray", "Tensor")

NEVER_CERTAIN = 1e-8  # added to the probability of all other tokens, which may be 0


def k1(logprobs: Numbers, ref_logprobs: Numbers) -> Numbers:
    """Return log p/q. An unbiased estimate of the KL, but a poor loss: on policy its gradient, that of log p, is zero in expectation, so it
    adds noise and no pull towards the reference. Use it in the reward; in the loss use k2 or k3."""
    return logprobs - ref_logprobs


def k2(logprobs: Numbers, ref_logprobs: Numbers) -> Numbers:
    """Return half the square of log p/q. Biased as an estimate; on policy its gradient is the unbiased gradient of KL(p, q)."""
    return (logprobs - ref_logprobs) ** 2 / 2


def k3(logprobs: Numbers, ref_logprobs: Numbers) -> Numbers:
    """Return q/p - 1 - log q/p. Unbiased as an estimate, never negative, with low variance; near p = q its gradient is that of KL(q, p).

    log q/p is clamped to +-20: beyond, the term is constant and its gradient 0. verl also clamps the whole term to 10, which it reaches at
    a log q/p of 2.6; here a token that the policy almost never samples any more is still pulled back.
    """
    log_ratio = (ref_logprobs - logprobs).clip(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (np.expm1(log_ratio) if isinstance(log_ratio, np.ndarray) else log_ratio.expm1()) - log_ratio


def absolute(logprobs: Numbers, ref_logprobs: Numbers) -> Numbers:
    """Return the absolute value of log p/q: not an estimate of the KL, but a distance whose pull does not grow with it."""
    return abs(logprobs - ref_logprobs)


def straight_through(value: Callable[..., Tensor], logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return the value of an estimator with the gradient of k2, which is that of the KL."""
    square = k2(logprobs, ref_logprobs)
    return square - square.detach() + value(logprobs, ref_logprobs).detach()


KL_ESTIMATORS: dict[str, Callable[..., Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": absolute,
    "k1+": partial(straight_through, k1),
    "k3+": partial(straight_through, k3),
}

# ---- surrogates --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Surrogate:
    """The policy-gradient loss of each token, and the metrics that only this surrogate can compute."""

    loss: Tensor  # [R]; a user's own function may also return a scalar that includes the weights already
    sums: Mapping[str, Tensor] = field(default_factory=dict)


SurrogateFunction = Callable[[TokenTerms], Surrogate]


def old_logprobs(terms: TokenTerms) -> Tensor:
    """Return the old log-probs. On policy they are the update's own: the ratio is then exactly 1, with the right gradient."""
    return terms.logprobs.detach() if terms.old_logprobs is None else terms.old_logprobs


def log_ratio(terms: TokenTerms) -> Tensor:
    """Return the log of new over old probability of each token, clamped to +-20 as in verl."""
    return (terms.logprobs - old_logprobs(terms)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def clipped_surrogate(terms: TokenTerms, clip_low: float, clip_high: float, dual_clip: float) -> Surrogate:
    """Compute PPO's pessimistic surrogate with separate clips: -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A).

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
    """Compute GSPO: the clipped surrogate with one ratio for a whole row, the geometric mean of its tokens' ratios.

    The value of each token's loss uses the row's ratio, and its gradient flows through the token's own log-prob. Averaged over the row
    (seq-mean-token-mean) the gradient is that of the row's ratio. The log of the ratio is at most 20, in verl 10.
    """
    gap = (terms.logprobs - old_logprobs(terms)).detach()
    of_row = mean_of_row(gap, terms).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = (of_row + terms.logprobs - terms.logprobs.detach()).exp()
    loss, clipped = _pessimistic(advantages_of(terms), ratio, clip_low, clip_high)
    return Surrogate(loss, {"actor/pg_clipfrac": _count(clipped, loss)})


def clipped_importance(terms: TokenTerms, clip_low: float, clip_high: float) -> Surrogate:
    """Compute CISPO: -clip(ratio) A log p, without gradient through the ratio. Every token keeps a gradient; clipping bounds only its
    size."""
    ratio = log_ratio(terms).detach().exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -bounded * advantages_of(terms) * terms.logprobs
    return Surrogate(loss, {"actor/pg_clipfrac": _count(bounded != ratio, loss)})


def policy_gradient(terms: TokenTerms) -> Surrogate:
    """Compute GPG: -A log p, without a ratio or a clip."""
    return Surrogate(-advantages_of(terms) * terms.logprobs)


def covariance_clipped(terms: TokenTerms, clip_low: float, clip_high: float) -> Surrogate:
    """Compute Clip-Cov: PPO's clipped surrogate without the marked tokens: they are drawn from those whose covariance of advantage and
    log-prob is large, and have no gradient."""
    assert terms.marked is not None, "the covariance is that of a whole mini-batch"
    loss, _ = _pessimistic(advantages_of(terms), log_ratio(terms).exp(), clip_low, clip_high)
    return Surrogate(loss.masked_fill(terms.marked, 0.0), {"actor/pg_clipfrac": _count(terms.marked, loss)})


def covariance_penalised(terms: TokenTerms, cov_kl_coef: float) -> Surrogate:
    """Compute KL-Cov: -ratio A, never clipped; the marked tokens, those of largest covariance, also pay for the size of their log ratio."""
    assert terms.marked is not None, "the covariance is that of a whole mini-batch"
    gap = log_ratio(terms)
    loss = -advantages_of(terms) * gap.exp() + cov_kl_coef * gap.abs() * terms.marked
    return Surrogate(loss, {"actor/kl_cov_fraction": _count(terms.marked, loss)})


def geometric_mean(terms: TokenTerms, clip_low: float, clip_high: float) -> Surrogate:
    """Compute GMPO: -A times the geometric mean of the row's ratios, each clipped in its log to -clip_low and clip_high if that is
    pessimistic.

    Every token has the loss of its row; averaged over the row (seq-mean-token-mean) that is the row's loss once. A is the row's mean.
    """
    advantages, gap = advantages_of(terms), terms.logprobs - old_logprobs(terms)
    near = gap.clamp(-clip_low, clip_high)
    pessimistic = gap.minimum(near).where(advantages > 0, gap.maximum(near)).where(advantages != 0, gap.new_zeros(()))
    ratio = mean_of_row(pessimistic, terms).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    loss = -mean_of_row(advantages, terms) * ratio
    far = near != gap
    return Surrogate(
        loss, {"actor/pg_clipfrac": _count(far & (advantages > 0), loss), "actor/pg_clipfrac_lower": _count(far & (advantages < 0), loss)}
    )


def soft_gate(terms: TokenTerms, tau_pos: float, tau_neg: float) -> Surrogate:
    """Compute SAPO: -A 4/tau sigmoid(tau (ratio - 1)), with tau_pos where A > 0 and tau_neg elsewhere. This clips gradually: at a ratio of
    1 the gradient is that of -ratio A, far from it 0."""
    advantages = advantages_of(terms)
    tau = advantages.new_full((), tau_pos).where(advantages > 0, advantages.new_full((), tau_neg))
    gate = (tau * (log_ratio(terms).exp() - 1)).sigmoid() * 4 / tau
    return Surrogate(-gate * advantages)


def total_variation_bounded(terms: TokenTerms, clip_low: float, clip_high: float, dual_clip: float) -> Surrogate:
    """Compute DPPO with total variation: a token is left out once its probability has moved by more than `clip_high` upwards where A > 0,
    or by more than `clip_low` downwards elsewhere."""
    moved = terms.logprobs.detach().exp() - old_logprobs(terms).exp()
    return _divergence_bounded(terms, moved > clip_high, moved < -clip_low, dual_clip)


def binary_kl_bounded(terms: TokenTerms, clip_low: float, clip_high: float, dual_clip: float) -> Surrogate:
    """Compute DPPO with a KL: as with total variation, but the bounds are those of KL(old, new) between this token and all others
    together."""
    new, old = terms.logprobs.detach(), old_logprobs(terms)
    others, others_before = 1 - new.exp() + NEVER_CERTAIN, 1 - old.exp() + NEVER_CERTAIN
    divergence = old.exp() * (old - new) + (1 - old.exp()) * (others_before / others).log()
    return _divergence_bounded(terms, (divergence > clip_high) & (new > old), (divergence > clip_low) & (new < old), dual_clip)


def _divergence_bounded(terms: TokenTerms, too_high: Tensor, too_low: Tensor, largest_ratio: float) -> Surrogate:
    """Compute -ratio A log p without gradient through the ratio, which is at most `largest_ratio` unless that is 0; 0 for tokens too far
    away."""
    advantages, ratio = advantages_of(terms), log_ratio(terms).detach().exp()
    left_out = too_high.where(advantages > 0, too_low)
    held = (ratio > largest_ratio) & ~left_out if largest_ratio > 0 else left_out & ~left_out
    weight = ratio.clamp(max=largest_ratio) if largest_ratio > 0 else ratio
    loss = (-advantages * weight * terms.logprobs).masked_fill(left_out, 0.0)
    return Surrogate(loss, {"actor/pg_clipfrac": _count(left_out, loss), "actor/pg_clipfrac_lower": _count(held, loss)})


def mean_of_row(numbers: Tensor, terms: TokenTerms) -> Tensor:
    """Return for each token the mean over the tokens of its row."""
    return sum_of_row(numbers, terms) / sum_of_row(numbers.new_ones(numbers.shape), terms)


def sum_of_row(numbers: Tensor, terms: TokenTerms) -> Tensor:
    """Return for each token the sum over the tokens of its row."""
    rows, place = terms.row.unique_consecutive(return_inverse=True)
    return numbers.new_zeros(len(rows)).index_add(0, place, numbers)[place]


def advantages_of(terms: TokenTerms) -> Tensor:
    assert terms.advantages is not None, "the surrogate needs advantages"
    return terms.advantages


def _pessimistic(advantages: Tensor, ratio: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Return the loss, and where the clipped ratio was the pessimistic one."""
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return plain.maximum(clipped), clipped > plain


def _count(condition: Tensor, like: Tensor) -> Tensor:
    return condition.to(like.dtype).sum()


# ---- what all policies share -------------------------------------------------------------------------------------------------------


def engine_gap(terms: TokenTerms) -> Tensor:
    """Return the trainer's old log-probs minus the engine's, without gradient."""
    assert terms.rollout_logprobs is not None, "the importance weight needs the rollout's log-probs"
    return old_logprobs(terms).detach() - terms.rollout_logprobs


def importance_ratio(terms: TokenTerms, whole_samples: bool = False) -> Tensor:
    """Return the probability of each token, or of its whole sample, under the trainer's old policy over that under the engine that sampled
    it, without gradient.

    It is 1 if trainer and engine agree bit for bit. Its log is at most 20, so that the mean over tokens stays finite.
    """
    gap = engine_gap(terms)
    return (sum_of_row(gap, terms) if whole_samples else gap).clamp(max=LOG_RATIO_BOUND).exp()


Ratio = tuple["Tensor", "Tensor"]  # a sum and the count it is divided by


def over_fresh(numbers: Tensor, terms: TokenTerms) -> Ratio:
    """Return sum and count over the tokens that the weights of this step sampled."""
    fresh = numbers.new_ones(numbers.shape).bool() if terms.fresh is None else terms.fresh
    return numbers.masked_fill(~fresh, 0.0).sum(), _count(fresh, numbers)


def over_all(numbers: Tensor) -> Ratio:
    return numbers.sum(), numbers.new_full((), len(numbers))


def over_rows(numbers: Tensor, terms: TokenTerms) -> Ratio:
    """Return sum and count over rows, of numbers that are the same for all tokens of a row."""
    shares = 1 / sum_of_row(numbers.new_ones(numbers.shape), terms)
    return (numbers * shares).sum(), shares.sum()


def compared(terms: TokenTerms, correction: Correction) -> dict[str, Ratio]:
    """Return metrics of the distance between trainer and engine."""
    gap = engine_gap(terms)
    found = {
        "rollout_corr/kl": over_all(-gap),
        "rollout_corr/k3_kl": over_all(gap.clamp(max=LOG_RATIO_BOUND).expm1() - gap),
    }
    if correction.cap > 0:
        ratio = importance_ratio(terms, correction.whole_samples)
        low = 1 / correction.cap if correction.floor is None else correction.floor
        share = partial(over_rows, terms=terms) if correction.whole_samples else over_all
        # As in verl the mean is that of the weights as they are applied, before normalisation; the shares are of the weights before
        # truncation.
        found["rollout_corr/rollout_is_mean"] = over_all(correction.truncated(ratio))
        found["rollout_corr/rollout_is_ratio_fraction_high"] = share((ratio > correction.cap).to(ratio.dtype))
        found["rollout_corr/rollout_is_ratio_fraction_low"] = share((ratio < low).to(ratio.dtype))
    return found


def policy_loss(
    terms: TokenTerms, surrogate: SurrogateFunction, kl_coef: float, kl_estimator: str, entropy_coef: float, correction: Correction,
    reads_old: bool = True, moves: bool = False,
) -> LossParts:  # fmt: skip
    """Compute the surrogate times the importance weight, plus kl_coef times KL, minus entropy_coef times entropy.

    A coefficient or cap of 0 switches its part off. The importance weight corrects only the surrogate: no other term estimates a policy
    gradient from the engine's tokens. If the surrogate does not read old log-probs, or the engine's replace them, trainer and engine are
    compared by the current policy. `moves`: the policy then has moved away from the engine's by updates of the same step, so that their gap
    does not tell whether the engine is right.
    """
    ratios: dict[str, Ratio] = {}
    if terms.rollout_logprobs is not None and (terms.old_logprobs is not None or not moves):
        ratios["rollout_corr/logprob_abs_gap"] = over_fresh(engine_gap(terms).abs(), terms)
    if correction.bypass or not reads_old:
        terms = replace(terms, old_logprobs=None)
    if terms.rollout_logprobs is not None:
        ratios |= compared(terms, correction)
    weight = None
    if correction.cap > 0:
        given = terms.importance
        weight = correction.truncated(importance_ratio(terms, correction.whole_samples)) if given is None else given
    if correction.bypass:
        terms = replace(terms, old_logprobs=terms.rollout_logprobs)
    found = surrogate(terms)
    sums = {**found.sums, "actor/ppo_kl": -log_ratio(terms).detach().sum(), "actor/entropy": terms.entropy.detach().sum()}
    policy = found.loss
    if weight is not None:
        assert policy.ndim, "a scalar cannot be weighted token by token"
        policy = policy * weight
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
    """Compute half the squared error of the critic; with `value_clip` above 0 at least the error of values clipped to that distance from
    the old ones."""
    error = (terms.values - terms.returns).square()
    near = terms.values
    if value_clip > 0:
        near = terms.values.clamp(terms.old_values - value_clip, terms.old_values + value_clip)
    held = (near - terms.returns).square()
    loss = (error.maximum(held) * terms.weights).sum() / 2
    sums = {"critic/vf_clipfrac": _count(held > error, loss), "critic/vpred_mean": terms.values.detach().sum()}
    return LossParts(loss, sums, {"critic/vf_loss": loss.detach()})


def sft_loss(terms: TokenTerms) -> LossParts:
    """Compute the weighted negative log-likelihood."""
    loss = -(terms.logprobs * terms.weights).sum()
    return LossParts(loss, {"actor/entropy": terms.entropy.detach().sum()}, {"train/loss": loss.detach()})
