"""A user's own advantage or loss: `FILE.py:NAME` enters, a function like those that presets name leaves.

An advantage takes by keyword any of `rewards` (float64 [rows]), `groups` (int64 [rows]), `lengths` (int64 [rows], trained tokens) and
`rows` (the `Row` records); a loss takes `terms` (`TokenTerms`, with `old_logprobs` always set). Both also take keys of `[algorithm]` by
their names, `gamma` for example. An advantage returns one number for each row, or for each row an array with one number for each of its
tokens, of which those outside the mask are not read. A loss returns one number for each trained token, which is weighted and summed here,
or a scalar that includes the weights already.

Guaranteed: results are checked at every call, and once before a model loads, with the remedy in the error. The functions run in the
trainer: they may import torch, this module does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fulltilt import user_code
from fulltilt.algo.advantage import HERE, Everyone, per_token, totals
from fulltilt.algo.base import AdvantageFunction, Algorithm
from fulltilt.algo.loss import Surrogate, old_logprobs
from fulltilt.records import Row, TokenTerms, UserError
from fulltilt.settings import UserFunction


def advantage(rows: Sequence[Row], function: UserFunction, before: AdvantageFunction | None, everyone: Everyone = HERE) -> list[Row]:
    """Call the user's advantage. All rows of the step must be here, so `everyone` is not used. `before`: an algorithm with a critic calls
    its own advantage first, which computes the returns that the critic learns."""
    rows = before(rows) if before else list(rows)
    if not rows:  # every reward of the step failed: a user's function need not handle this
        return []
    result = function(
        rewards=totals(rows),
        groups=np.array([row.group for row in rows], dtype=np.int64),
        lengths=np.array([np.count_nonzero(row.mask) for row in rows], dtype=np.int64),
        rows=rows,
    )
    count = len(result) if hasattr(result, "__len__") else None
    if count != len(rows):
        what = f"a {type(result).__name__}" if count is None else f"{count} results"
        raise function.wrong(f"it returned {what} for {len(rows)} rows. Return one number, or one array, for each row, in their order")
    return per_token(rows, advantages=[_of_row(function, index, result[index], row) for index, row in enumerate(rows)])


def _of_row(function: UserFunction, index: int, result: Any, row: Row) -> np.ndarray:
    """Return the numbers of a row's trained tokens."""
    try:
        numbers = np.asarray(result, dtype=np.float64)
    except (TypeError, ValueError):
        raise function.wrong(f"for row {index} it returned neither a number nor an array of numbers. Return one of them") from None
    if numbers.shape not in ((), (row.tokens,)):
        remedy = f"Return one number, or as many as the row has tokens ({row.tokens}, prompt and response)"
        raise function.wrong(f"for row {index} it returned the shape {numbers.shape}. {remedy}")
    trained = np.broadcast_to(numbers, (row.tokens,))[row.mask]
    if not np.isfinite(trained).all():
        raise function.wrong(f"for row {index} it returned a number that is not finite. Look for a division by 0")
    return trained


def surrogate(terms: TokenTerms, function: UserFunction, scalar: bool) -> Surrogate:
    """Call the user's loss. `scalar`: whether a scalar is accepted, which cannot be corrected by importance weights, since they are per
    token."""
    loss = function(terms=replace(terms, old_logprobs=old_logprobs(terms)))
    tokens = len(terms.logprobs)
    if not hasattr(loss, "requires_grad") or tuple(loss.shape) not in ((), (tokens,)):
        shape = f"a tensor of shape {tuple(loss.shape)}" if hasattr(loss, "shape") else f"a {type(loss).__name__}"
        raise function.wrong(f"it returned {shape} for {tokens} trained tokens. Return a tensor with one number for each of them")
    if terms.logprobs.requires_grad and not loss.requires_grad:
        raise function.wrong("what it returned has no gradient. Compute it from terms.logprobs, without detaching all of it")
    if not loss.ndim and not scalar:
        raise function.wrong(
            "it returned a scalar, which cannot be corrected by algorithm.importance_cap token by token. Return one number for each "
            "trained token, or set algorithm.importance_cap = 0"
        )
    return Surrogate(loss)


# ---- a trial before the run --------------------------------------------------------------------------------------------------------


def try_out(algorithm: Algorithm, samples_per_prompt: int, functions: Iterable[UserFunction]) -> None:
    """Call the user's functions once on made-up numbers: their failures would otherwise show only after models were loaded."""
    for function in functions:
        try:
            if function.key == "advantage":
                algorithm.advantage(_made_up_rows(algorithm, samples_per_prompt))
            else:
                algorithm.loss(_made_up_terms(algorithm)).loss.backward()  # type: ignore[no-untyped-call]
        except UserError:
            raise
        except Exception as error:
            described = user_code.describe(error, function.code.path)
            raise function.wrong(f"it fails on a trial with made-up numbers: {described}. Fix the function") from error


def _made_up_rows(algorithm: Algorithm, samples: int) -> list[Row]:
    """Return two groups of different rewards and lengths, with every field that the algorithm needs."""
    rows = []
    for index in range(2 * samples):
        mask = np.arange(3 + index % 3) >= 2
        logprobs = (-0.5 * mask).astype(np.float32)
        fields: dict[str, Any] = {name: logprobs for name in ("old_logprobs", "ref_logprobs", "values") if name in algorithm.needs}
        fields |= {"token_rewards": (0.1 * mask).astype(np.float32)} if algorithm.reward_kl else {}
        fields |= {"baseline": 0.5} if "baseline" in algorithm.needs else {}
        rows.append(Row(np.arange(len(mask)), mask, index // samples, float(index % 2), rollout_logprobs=logprobs, **fields))
    return rows


def _made_up_terms(algorithm: Algorithm) -> TokenTerms:
    import torch

    logprobs = torch.tensor([-0.5, -1.0, -2.0, -0.1, -3.0], requires_grad=True)
    near = logprobs.detach() + 0.1
    return TokenTerms(
        logprobs=logprobs,
        entropy=logprobs.detach().abs().requires_grad_(algorithm.entropy_gradient),
        weights=torch.full((5,), 0.2),
        row=torch.tensor([0, 0, 0, 1, 1]),
        rollout_logprobs=near,
        old_logprobs=near if "old_logprobs" in algorithm.needs else None,
        ref_logprobs=near if "ref_logprobs" in algorithm.needs else None,
        advantages=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0]),
        fresh=torch.tensor([True, True, True, False, False]),
    )
