"""A user's own advantage or loss: `FILE.py:NAME` enters, what a preset would have named leaves.

An advantage takes by keyword any of `rewards` (float64 [rows]), `groups` (int64 [rows]), `lengths` (int64 [rows], trained tokens) and
`rows` (the `Row` records), a loss takes `terms` (`TokenTerms`, its `old_logprobs` always there); both also take keys of `[algorithm]` by
their names, `gamma` for example. An advantage returns one number for each row, or for each row an array with one number for each of its
tokens, of which those outside the mask are not read. A loss returns one number for each trained token, which is weighted and summed
here, or a scalar that holds the weights already.

Guaranteed: a file that is missing or does not run, a name that is not there, a parameter that nobody gives and a result of the wrong form
are found before a model loads, with the remedy; a file is executed once in a process, as it was when the run started, and travels to
other processes with the function; results are checked at every call. The file runs in the trainer: it may import torch, this module
does not.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from fulltilt.algo.advantage import per_token, totals
from fulltilt.algo.base import AdvantageFunction, Algorithm
from fulltilt.algo.loss import Surrogate, old_logprobs
from fulltilt.records import Row, TokenTerms, UserError

GIVEN = {"advantage": ("rewards", "groups", "lengths", "rows"), "loss": ("terms",)}


@dataclass(frozen=True)
class UserFunction:
    """Where a function is, and its file as it was read."""

    key: str  # "advantage" or "loss"
    name: str  # as configured
    path: str
    attribute: str
    source: bytes

    def wrong(self, text: str) -> UserError:
        return UserError(f"algorithm.{self.key} = {self.name!r}: {text}")

    @property
    def function(self) -> Callable[..., Any]:
        return _function(self)

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        function = self.function
        try:
            return inspect.signature(function).parameters
        except (TypeError, ValueError):
            raise self.wrong("its parameters cannot be read. Wrap it in a function with named parameters") from None

    def call(self, **arguments: Any) -> Any:
        try:
            return self.function(**arguments)
        except Exception as error:
            error.add_note(f"in your function algorithm.{self.key} = {self.name!r}")
            raise


def locate(key: str, name: str) -> UserFunction:
    """Read the file of a configured name. Nothing of it is executed before the function is looked at."""
    file, colon, attribute = name.rpartition(":")
    if not colon or not file.endswith(".py") or not attribute.isidentifier():
        raise UserError(f"algorithm.{key} = {name!r}: not of the form FILE.py:NAME. Write for example mine/{key}.py:{key}")
    path = Path(file).absolute()
    try:
        source = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"algorithm.{key} = {name!r}: cannot read {path}: {error.strerror}. Paths are relative to the current directory"
        ) from None
    return UserFunction(key, name, str(path), attribute, source)


@lru_cache
def _module(path: str, source: bytes) -> ModuleType:
    module = ModuleType(f"fulltilt_user_{Path(path).stem}")
    module.__file__ = path
    sys.modules[module.__name__] = module  # dataclasses and pickle look there
    # What stands beside the file can be imported, but does not hide an installed package from the trainer.
    if (folder := str(Path(path).parent)) not in sys.path:
        sys.path.append(folder)
    exec(compile(source, path, "exec"), module.__dict__)
    return module


def _function(place: UserFunction) -> Callable[..., Any]:
    try:
        module = _module(place.path, place.source)
    except SyntaxError as error:
        line = f"\n    {error.text.strip()}" if error.text else ""
        raise place.wrong(f"syntax error at {error.filename}:{error.lineno}: {error.msg}. Mend this line{line}") from None
    except (Exception, SystemExit) as error:
        raise place.wrong(f"loading {place.path} failed: {described(error, place.path)}. Mend the file") from error
    function = getattr(module, place.attribute, None)
    if not callable(function):
        own = [name for name, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
        found = f"there {place.attribute!r} is no function" if function is not None else f"{place.path} defines no {place.attribute!r}"
        raise place.wrong(f"{found}. Use one of its functions: {', '.join(own) or 'it has none'}")
    return function  # type: ignore[no-any-return]


def described(error: BaseException, path: str) -> str:
    """One line: the exception and where in the user's file it came from."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    place = f" ({Path(path).name}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{place}"


# ---- signatures --------------------------------------------------------------------------------------------------------------------


def named_keys(place: UserFunction, keys: Sequence[str]) -> frozenset[str]:
    """The keys of `[algorithm]` that the function takes."""
    return frozenset(keys) & place.parameters.keys()


def wrong_signature(place: UserFunction, settings: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """What cannot be given to the function; `settings` are the keys that have a value in this run, `keys` all there are."""
    given, parameters = GIVEN[place.key], place.parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    found = []
    if not open_ended and not set(given) & parameters.keys():
        found.append(f"it takes none of {', '.join(given)}. Name at least one of them as a parameter")
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            found.append(f"its parameter {name!r} is positional only, and all is given by name. Remove the slash")
        elif name not in given and name not in settings and parameter.default is parameter.empty:
            remedy = f"Set algorithm.{name}, or give it a default" if name in keys else "Remove it, or give it a default"
            found.append(f"its parameter {name!r} has no value. Given are {', '.join(given)} and keys of [algorithm]. {remedy}")
    return [str(place.wrong(text)) for text in found]


def arguments(place: UserFunction, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `[algorithm]` to call it with."""
    return {name: settings[name] for name in place.parameters if name in settings}


def takes(place: UserFunction, name: str) -> bool:
    return name in place.parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in place.parameters.values())


# ---- what takes the place of a preset's function -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CustomAdvantage:
    place: UserFunction
    settings: Mapping[str, Any]
    before: AdvantageFunction | None = None  # of an algorithm with a critic: it gives the returns that the critic learns

    def __call__(self, rows: Sequence[Row]) -> list[Row]:
        rows = self.before(rows) if self.before else list(rows)
        if not rows:  # every reward of the step failed: nothing that a user's function need know of
            return []
        offered = {
            "rewards": totals(rows),
            "groups": np.array([row.group for row in rows], dtype=np.int64),
            "lengths": np.array([np.count_nonzero(row.mask) for row in rows], dtype=np.int64),
            "rows": rows,
        }
        result = self.place.call(**{name: value for name, value in offered.items() if takes(self.place, name)}, **self.settings)
        return per_token(rows, advantages=self._checked(result, rows))

    def _checked(self, result: Any, rows: Sequence[Row]) -> list[np.ndarray]:
        """One array for each row, of its trained tokens."""
        count = len(result) if hasattr(result, "__len__") else None
        if count != len(rows):
            what = f"a {type(result).__name__}" if count is None else f"{count} results"
            raise self.place.wrong(
                f"it returned {what} for {len(rows)} rows. Return one number, or one array, for each row, in their order"
            )
        found = []
        for index, row in enumerate(rows):
            try:
                numbers = np.asarray(result[index], dtype=np.float64)
            except (TypeError, ValueError):
                raise self.place.wrong(f"what it returned for row {index} is no number and no array of numbers. Return one") from None
            if numbers.shape not in ((), (row.tokens,)):
                raise self.place.wrong(
                    f"for row {index} it returned the shape {numbers.shape}. Return one number, or as many as the row has tokens "
                    f"({row.tokens}, prompt and response)"
                )
            trained = np.broadcast_to(numbers, (row.tokens,))[row.mask]
            if not np.isfinite(trained).all():
                raise self.place.wrong(f"for row {index} it returned a number that is not finite. Look for a division by 0")
            found.append(trained)
        return found


@dataclass(frozen=True)
class CustomSurrogate:
    place: UserFunction
    settings: Mapping[str, Any]
    scalar: bool  # whether a scalar will do: it cannot be corrected by importance weights, which are per token

    def __call__(self, terms: TokenTerms) -> Surrogate:
        loss = self.place.call(terms=replace(terms, old_logprobs=old_logprobs(terms)), **self.settings)
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
    """Call the algorithm's functions once on made-up numbers: what fails there would fail after the models are loaded and sampled from."""
    for place in places:
        try:
            if place.key == "advantage":
                algorithm.advantage(_made_up_rows(algorithm, samples_per_prompt))
            else:
                algorithm.loss(_made_up_terms(algorithm)).loss.backward()  # type: ignore[no-untyped-call]
        except UserError:
            raise
        except Exception as error:
            raise place.wrong(f"it fails on a trial with made-up numbers: {described(error, place.path)}. Mend the function") from error


def _made_up_rows(algorithm: Algorithm, samples: int) -> list[Row]:
    """Two groups of different rewards and lengths, with every field that the algorithm asks for."""
    rows = []
    for index in range(2 * samples):
        mask = np.arange(3 + index % 3) >= 2
        logprobs = (-0.5 * mask).astype(np.float32)
        fields: dict[str, Any] = {name: logprobs for name in ("old_logprobs", "ref_logprobs", "values") if name in algorithm.needs}
        if algorithm.reward_kl:
            fields["token_rewards"] = (0.1 * mask).astype(np.float32)
        if "baseline" in algorithm.needs:
            fields["baseline"] = 0.5
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
