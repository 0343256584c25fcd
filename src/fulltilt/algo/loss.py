"""Losses: one number per trained token in, one scalar to differentiate out.

Enters: `TokenTerms`, tensors of shape [R] over the trained tokens of one micro-batch, each token's weight in the mini-batch included.
Leaves: `LossParts`. Guaranteed: every term is a sum of weight times a per-token number that depends on that token alone, so the sum over
micro-batches does not depend on how the mini-batch was cut; all is computed in the dtype that enters; metrics carry no gradient.

Metrics have verl's names. Parts of the loss (`actor/pg_loss`, `actor/kl_loss`, `train/loss`) are `weighted`; the rest are `sums`, that is,
means over trained tokens once the mini-batch is complete.

Only methods of the tensors are called, so that this module, and the presets that name its functions, load without torch: a run's
configuration is checked before torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fulltilt.records import LossParts, TokenTerms

if TYPE_CHECKING:
    from torch import Tensor

# exp(20) is about 5e8: past any ratio that still means something, and far from where float32 overflows and an unused branch's infinity
# turns the gradient into NaN.
LOG_RATIO_BOUND = 20.0


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log p/q. An unbiased estimate of the KL, but a poor loss: on policy its gradient, that of log p, is zero in expectation, so that it
    adds noise and no pull towards the reference. Offered because it is what people compare with; use k2 or k3 to train."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Half the square of log p/q. Biased as an estimate; on policy its gradient is the unbiased gradient of KL(p, q)."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """q/p - 1 - log q/p. Unbiased as an estimate, never negative, of low variance; its gradient is that of KL(q, p) near p = q.

    log q/p is clamped to +-20, as in verl: beyond, the term is constant and its gradient 0.
    """
    log_ratio = (ref_logprobs - logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return log_ratio.expm1() - log_ratio


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


@dataclass(frozen=True, eq=False)
class Surrogate:
    """The clipped policy-gradient loss of each token, and where it was clipped."""

    loss: Tensor  # [R]
    log_ratio: Tensor  # [R], log of new over old probability
    clipped: Tensor  # bool [R]: the clipped ratio was the pessimistic one
    dual_clipped: Tensor  # bool [R]: the bound for negative advantages held


def old_logprobs(terms: TokenTerms) -> Tensor:
    """On policy the update's own log-probs are the old ones: the ratio is then exactly 1, with the right gradient."""
    return terms.logprobs.detach() if terms.old_logprobs is None else terms.old_logprobs


def clipped_surrogate(terms: TokenTerms, clip_low: float, clip_high: float, dual_clip: float) -> Surrogate:
    """PPO's pessimistic surrogate with separate clips: -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A).

    With `dual_clip` above 0, tokens of negative advantage lose at most dual_clip * |A|: a token that has become far likelier than when it
    was sampled would otherwise be pushed down without bound. The log of the ratio is clamped to +-20, as in verl.
    """
    assert terms.advantages is not None, "the surrogate needs advantages"
    log_ratio = (terms.logprobs - old_logprobs(terms)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    plain = -terms.advantages * ratio
    clipped = -terms.advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = plain.maximum(clipped)
    dual_clipped = loss.new_zeros(loss.shape).bool()
    if dual_clip > 0:
        bound = -terms.advantages * dual_clip
        dual_clipped = (terms.advantages < 0) & (loss > bound)
        loss = bound.where(dual_clipped, loss)
    return Surrogate(loss, log_ratio, clipped > plain, dual_clipped)


def importance_ratio(terms: TokenTerms) -> Tensor:
    """Probability of each token under the trainer's old policy over that under the engine that sampled it, without gradient.

    It is 1 where trainer and engine agree to the bit. Its log is held at 20, so that the mean over tokens stays a number.
    """
    assert terms.rollout_logprobs is not None, "the importance weight needs the rollout's log-probs"
    gap = old_logprobs(terms).detach() - terms.rollout_logprobs
    return gap.clamp(max=LOG_RATIO_BOUND).exp()


@dataclass(frozen=True)
class PolicyLossSettings:
    clip_low: float
    clip_high: float
    dual_clip: float  # 0: off
    kl_coef: float  # 0: off
    kl: Callable[[Tensor, Tensor], Tensor]  # one of KL_ESTIMATORS
    entropy_coef: float  # 0: off
    importance_cap: float  # 0: off


def policy_loss(terms: TokenTerms, settings: PolicyLossSettings) -> LossParts:
    """Surrogate times the truncated importance weight, plus kl_coef times KL, minus entropy_coef times entropy.

    Only the surrogate is corrected by the importance weight: it alone is an estimate over the engine's tokens of a policy gradient.
    """
    surrogate = clipped_surrogate(terms, settings.clip_low, settings.clip_high, settings.dual_clip)
    sums = {
        "actor/pg_clipfrac": surrogate.clipped.to(surrogate.loss.dtype).sum(),
        "actor/pg_clipfrac_lower": surrogate.dual_clipped.to(surrogate.loss.dtype).sum(),
        "actor/ppo_kl": -surrogate.log_ratio.detach().sum(),
        "actor/entropy": terms.entropy.detach().sum(),
    }
    policy = surrogate.loss
    if terms.rollout_logprobs is not None:
        sums["rollout_corr/logprob_abs_gap"] = (old_logprobs(terms).detach() - terms.rollout_logprobs).abs().sum()
    if settings.importance_cap > 0:
        ratio = importance_ratio(terms)
        policy = policy * ratio.clamp(max=settings.importance_cap)
        # verl's names, and like verl before the truncation: after it the mean could not show how far engine and trainer are apart.
        sums["rollout_corr/rollout_is_mean"] = ratio.sum()
        sums["rollout_corr/rollout_is_ratio_fraction_high"] = (ratio > settings.importance_cap).to(ratio.dtype).sum()
    policy = (policy * terms.weights).sum()
    loss, weighted = policy, {"actor/pg_loss": policy.detach()}
    if settings.kl_coef > 0:
        assert terms.ref_logprobs is not None, "the KL term needs the reference's log-probs"
        divergence = (settings.kl(terms.logprobs, terms.ref_logprobs) * terms.weights).sum()
        loss = loss + settings.kl_coef * divergence
        weighted["actor/kl_loss"] = divergence.detach()
    if settings.entropy_coef > 0:
        loss = loss - settings.entropy_coef * (terms.entropy * terms.weights).sum()
    return LossParts(loss, sums, weighted)


def sft_loss(terms: TokenTerms) -> LossParts:
    """Weighted negative log-likelihood."""
    loss = -(terms.logprobs * terms.weights).sum()
    return LossParts(loss, {"actor/entropy": terms.entropy.detach().sum()}, {"train/loss": loss.detach()})
