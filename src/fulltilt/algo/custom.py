"""A user's own advantage or loss: `FILE.py:NAME` enters, what a preset would have named leaves.

An advantage takes by keyword any of `rewards` (float64 [rows]), `groups` (int64 [rows]), `lengths` (int64 [rows], trained tokens) and
`rows` (the `Row` records); a loss takes `terms` (`TokenTerms`, with `old_logprobs` always set). Both also take keys of `[algorithm]` by
their names, `gamma` for example. An advantage returns one number for each row, or for each row an array with one number for each of its
tokens, of which those outside the mask are not read. A loss returns one number for each trained token, which is weighted and summed
here, or a scalar that includes the weights already.

Guaranteed: a file that is missing or does not run, a function that is not in it, a parameter without a value and a result of the wrong
form are found before a model loads, with the remedy; the file is executed once in a process, as it was when the run started, and travels
to other processes with the function; results are checked at every call. The file runs in the trainer: it may import torch, this module
does not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fulltilt import user_code
from fulltilt.algo.advantage import per_token, totals
from fulltilt.algo.base import AdvantageFunction, Algorithm
from fulltilt.algo.loss import Surrogate, old_logprobs
from fulltilt.records import Row, TokenTerms, UserError
from fulltilt.user_code import UserCode, UserCodeError

GIVEN = {"advantage": ("rewards", "groups", "lengths", "rows"), "loss": ("terms",)}


@dataclass(frozen=True)
class UserFunction:
    """The user's function for a key of `[algorithm]`."""

    key: str  # "advantage" or "loss"
    code: UserCode

    def wrong(self, text: object) -> UserError:
        return _wrong(self.key, self.code.name, text)

    @property
    def function(self) -> Callable[..., Any]:
        try:
            return user_code.function(self.code)
        except UserCodeError as error:
            raise self.wrong(error) from error

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        try:
            return user_code.parameters(self.function)
        except UserCodeError as error:
            raise self.wrong(error) from error

    @property
    def open_ended(self) -> bool:
        return any(parameter.kind is parameter.VAR_KEYWORD for parameter in self.parameters.values())

    def call(self, given: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
        """Calls the function with what it takes: what the run gives, under a name or `**kwargs`, and keys of `[algorithm]` by name."""
        arguments = {name: value for name, value in given.items() if name in self.parameters or self.open_ended}
        arguments |= {name: settings[name] for name in self.parameters if name in settings}
        try:
            return self.function(**arguments)
        except Exception as error:
            error.add_note(f"in your function algorithm.{self.key} = {self.code.name!r}")
            raise


def _wrong(key: str, name: str, text: object) -> UserError:
    return UserError(f"algorithm.{key} = {name!r}: {text}")


def locate(key: str, name: str) -> UserFunction:
    """Reads the file of a configured name and executes nothing of it."""
    try:
        return UserFunction(key, user_code.locate(name))
    except UserCodeError as error:
        raise _wrong(key, name, f"{error}. Write for example mine/{key}.py:{key}") from None


def wrong_signature(place: UserFunction, settings: Mapping[str, Any], keys: Collection[str]) -> list[str]:
    """What is wrong with the function's parameters; `settings` are the keys that have a value in this run, `keys` all there are."""
    given, found = GIVEN[place.key], []
    if not place.open_ended and not set(given) & place.parameters.keys():
        found.append(f"it takes none of {', '.join(given)}. Name at least one of them as a parameter")
    for name, parameter in place.parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            found.append(f"its parameter {name!r} is positional only, but arguments are given by name. Remove the slash")
        elif name not in given and name not in settings and parameter.default is parameter.empty:
            remedy = f"Set algorithm.{name}, or give it a default" if name in keys else "Remove it, or give it a default"
            found.append(f"its parameter {name!r} has no value. Given are {', '.join(given)} and keys of [algorithm]. {remedy}")
    return [str(place.wrong(text)) for text in found]


# ---- what takes the place of a preset's function -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CustomAdvantage:
    place: UserFunction
    settings: Mapping[str, Any]
    before: AdvantageFunction | None = None  # an algorithm with a critic calls its own first: it gives the returns that the critic learns

    def __call__(self, rows: Sequence[Row]) -> list[Row]:
        rows = self.before(rows) if self.before else list(rows)
        if not rows:  # every reward of the step failed: a user's function need not handle this
            return []
        given = {
            "rewards": totals(rows),
            "groups": np.array([row.group for row in rows], dtype=np.int64),
            "lengths": np.array([np.count_nonzero(row.mask) for row in rows], dtype=np.int64),
            "rows": rows,
        }
        return per_token(rows, advantages=self._checked(self.place.call(given, self.settings), rows))

    def _checked(self, result: Any, rows: Sequence[Row]) -> list[np.ndarray]:
        """One array for each row, with the numbers of its trained tokens."""
        count = len(result) if hasattr(result, "__len__") else None
        if count != len(rows):
            what = f"a {type(result).__name__}" if count is None else f"{count} results"
            raise self.place.wrong(
                f"it returned {what} for {len(rows)} rows. Return one number, or one array, for each row, in their order"
            )
        return [self._checked_row(index, result[index], row) for index, row in enumerate(rows)]

    def _checked_row(self, index: int, result: Any, row: Row) -> np.ndarray:
        try:
            numbers = np.asarray(result, dtype=np.float64)
        except (TypeError, ValueError):
            raise self.place.wrong(f"for row {index} it returned neither a number nor an array of numbers. Return one of them") from None
        if numbers.shape not in ((), (row.tokens,)):
            raise self.place.wrong(
                f"for row {index} it returned the shape {numbers.shape}. Return one number, or as many as the row has tokens "
                f"({row.tokens}, prompt and response)"
            )
        trained = np.broadcast_to(numbers, (row.tokens,))[row.mask]
        if not np.isfinite(trained).all():
            raise self.place.wrong(f"for row {index} it returned a number that is not finite. Look for a division by 0")
        return trained


@dataclass(frozen=True)
class CustomSurrogate:
    place: UserFunction
    settings: Mapping[str, Any]
    scalar: bool  # whether a scalar is accepted: it cannot be corrected by importance weights, which are per token

    def __call__(self, terms: TokenTerms) -> Surrogate:
        loss = self.place.call({"terms": replace(terms, old_logprobs=old_logprobs(terms))}, self.settings)
        tokens = len(terms.logprobs)
        if not hasattr(loss, "requires_grad") or tuple(loss.shape) not in ((), (tokens,)):
            shape = f"a tensor of shape {tuple(loss.shape)}" if hasattr(loss, "shape") else f"a {type(loss).__name__}"
            raise self.place.wrong(f"it returned {shape} for {tokens} trained tokens. Return a tensor with one number for each of them")
        if terms.logprobs.requires_grad and not loss.requires_grad:
            raise self.place.wrong("what it returned has no gradient. Compute it from terms.logprobs, without detaching all of it")
        if not loss.ndim and not self.scalar:
            raise self.place.wrong(
                "it returned a scalar, which cannot be corrected by algorithm.importance_cap token by token. Return one number for each "
                "trained token, or set algorithm.importance_cap = 0"
            )
        return Surrogate(loss)


# ---- a trial before the run --------------------------------------------------------------------------------------------------------


def try_out(algorithm: Algorithm, samples_per_prompt: int, places: Sequence[UserFunction]) -> None:
    """Calls the user's functions once on made-up numbers: what fails there would otherwise fail only after models were loaded."""
    for place in places:
        try:
            if place.key == "advantage":
                algorithm.advantage(_made_up_rows(algorithm, samples_per_prompt))
            else:
                algorithm.loss(_made_up_terms(algorithm)).loss.backward()  # type: ignore[no-untyped-call]
        except UserError:
            raise
        except Exception as error:
            described = user_code.describe(error, place.code.path)
            raise place.wrong(f"it fails on a trial with made-up numbers: {described}. Fix the function") from error


def _made_up_rows(algorithm: Algorithm, samples: int) -> list[Row]:
    """Two groups of different rewards and lengths, with every field that the algorithm needs."""
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
