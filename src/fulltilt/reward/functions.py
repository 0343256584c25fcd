"""Reward functions: a name enters, a callable with a known signature leaves; its results are checked here.

A name is that of a file in `rules`, for a built-in function, or `FILE.py:NAME`. A function of your own takes any of these by keyword, in
verl's names:

    single   data_source, solution_str, ground_truth, extra_info, prompt_str        one call for each sample
    batch    data_sources, solution_strs, ground_truths, extra_infos, prompt_strs   one call for each group, lists of equal length

and the keys of `reward.args`. It is given only what it names; with `**kwargs` it gets verl's four names and all of `reward.args`.
`prompt_str` (the prompt's text) is an addition of fulltilt and is given only when named.

It may be `async def`. It returns a number (int, float, bool, numpy or torch scalar) or a dict with the number under "score". The answer
that it read, text or number, may stand under "pred"; other finite numbers become the score's parts. A batch function returns a list of
these. Guaranteed: what leaves `RewardFunction.results` is finite, in float32 too, one per sample. Imports neither torch nor numpy: worker
processes import this module.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from fulltilt import user_code
from fulltilt.user_code import UserCode, UserCodeError
from fulltilt.words import shortened

VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
SINGLE = (*VERL, "prompt_str")
BATCH = tuple(f"{name}s" for name in SINGLE)
GIVEN = "data_source, solution_str, ground_truth, extra_info and prompt_str, or the same names with an s for a batch function"

ANSWER_LENGTH = 200
LARGEST = 2.0**120  # the largest reward: sums and differences of a few thousand such rewards are still finite in float32
TOO_LARGE = f"training computes in float32, and rewards may be at most {LARGEST:.2g} in magnitude. Scale the reward"
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

Scored = tuple[float, dict[str, float], str | None]  # value, parts, answer


class NotANumber(Exception):
    """The function returned something other than a finite number. `args`: the sample's place in the call, and the returned value."""


class WrongResult(Exception):
    """The call has failed because of its result: too large a number or, from a batch function, another number of results than samples."""


@dataclass(frozen=True)
class RewardFunction:
    function: Callable[..., Any]
    batch: bool
    takes: tuple[str, ...]  # the names of SINGLE or BATCH that the function is given
    args: Mapping[str, Any] = field(default_factory=dict)
    needs_truth: bool = False  # whether it requires the ground truth: its parameter has no default

    @property
    def asynchronous(self) -> bool:
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(getattr(self.function, "__call__", None))  # noqa: B004

    def score(self, prompt: Mapping[str, Any], texts: Sequence[str]) -> list[Scored]:
        """Call a plain function, and return its scores."""
        return self.results(self.call(prompt, texts), len(texts))

    def call(self, prompt: Mapping[str, Any], texts: Sequence[str]) -> Any:
        """Call the function for all texts of a group, or for exactly one text. Returns its result, to be awaited if it is asynchronous."""
        values: dict[str, Any] = {f"{name}s": [value] * len(texts) for name, value in prompt.items()} if self.batch else dict(prompt)
        values |= {"solution_strs": list(texts)} if self.batch else {"solution_str": texts[0]}
        return self.function(**{name: values[name] for name in self.takes}, **self.args)

    def results(self, returned: Any, count: int) -> list[Scored]:
        """Return the scores of `count` samples from the result of a call."""
        results = _one_each(returned, count) if self.batch else [returned]
        return [checked(result, place) for place, result in enumerate(results)]


def _one_each(results: Any, count: int) -> list[Any]:
    if isinstance(results, (str, bytes, Mapping)) or not hasattr(results, "__len__") or not hasattr(results, "__getitem__"):
        raise WrongResult(f"returned a {type(results).__name__}; a batch function returns a list with one result for each sample")
    if len(results) != count:
        raise WrongResult(f"returned {len(results)} results for {count} samples")
    return [results[place] for place in range(count)]


def checked(result: Any, sample: int) -> Scored:
    """Return the score, its parts and the answer. Raises NotANumber."""
    if not isinstance(result, Mapping):
        return _finite(result, sample, result), {}, None
    if "score" not in result:
        raise NotANumber(sample, f"a dict without 'score' (its keys: {', '.join(map(str, result)) or 'none'})")
    score = _finite(result["score"], sample, result)
    others = {str(key): _number(value) for key, value in result.items() if key not in ("score", "pred")}
    return score, {key: value for key, value in others.items() if value is not None and fits(value)}, answer_text(result.get("pred"))


def answer_text(answer: Any) -> str | None:
    """Return an answer in the form in which votes count it: one spelling for equal numbers, only text that a UTF-8 file can hold, None if
    blank."""
    if not isinstance(answer, (str, Integral)):
        number = _number(answer)
        answer = "" if number is None else int(number) if number.is_integer() else number
    return str(answer).strip().encode("utf-8", "replace").decode()[:ANSWER_LENGTH] or None


def _finite(value: Any, sample: int, shown: Any) -> float:
    number = _number(value)
    if number is None:
        raise NotANumber(sample, shortened(repr(shown), 120))
    if not fits(number):
        raise WrongResult(f"returned {number:g}, which is too large: {TOO_LARGE}")
    return number


def fits(value: float) -> bool:
    """Return whether training can compute with a reward of this size. NaN does not fit."""
    return abs(value) <= LARGEST


def _number(value: Any) -> float | None:
    """Return the value as a finite number, or None."""
    try:
        if not isinstance(value, Real) and callable(getattr(value, "item", None)):
            value = value.item()  # tensors and arrays of one element are numbers; with more elements `item` raises
        number = float(value) if isinstance(value, Real) else math.nan
    except (ValueError, RuntimeError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def locate(name: str) -> UserCode:
    """Read the file of a configured name. Runs in the trainer, and executes nothing."""
    if name.isidentifier() and Path(__file__).with_name("rules").joinpath(f"{name}.py").is_file():
        return UserCode(name)
    try:
        return user_code.locate(name)
    except UserCodeError as error:
        raise UserCodeError(f"reward function {name!r} is not built in and cannot be loaded: {error}") from None


def load(
    located: Sequence[UserCode], args: Mapping[str, Any], explain: Callable[[BaseException], str] = lambda error: ""
) -> list[RewardFunction]:
    """Execute the files and check the signatures. Runs in a worker process. Raises UserCodeError with everything that is wrong, extended by
    the sentences of `explain`."""
    functions, wrong = [], []
    for code in located:
        try:
            functions.append(_bind(user_code.function(code, as_script=True), args) if code.path else _bind(_built_in(code.name), {}))
        except UserCodeError as error:
            lacks_memory = isinstance(error.__cause__, MemoryError)
            reason = f"loading {code.path} took more memory than reward.memory_gb allows" if lacks_memory else error
            wrong.append(f"reward function {code.name!r}: {reason}{explain(error)}")
    for key in () if wrong else args:
        if not any(key in function.args for function in functions):
            names = ", ".join(code.name for code in located)
            wrong.append(f"reward.args.{key}: no configured reward function ({names}) takes a parameter {key!r}")
    if wrong:
        raise UserCodeError("\n".join(wrong))
    return functions


def _built_in(name: str) -> Callable[..., Any]:
    try:
        return import_module(f"fulltilt.reward.rules.{name}").score  # type: ignore[no-any-return]
    except ImportError as error:
        raise UserCodeError(f"it needs a package that cannot be imported: {error}") from None


def _bind(function: Callable[..., Any], args: Mapping[str, Any]) -> RewardFunction:
    parameters = user_code.parameters(function)
    by_keyword = [
        key for key, parameter in parameters.items() if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    batch = not set(BATCH).isdisjoint(by_keyword)
    known = BATCH if batch else SINGLE
    if batch and not set(SINGLE).isdisjoint(by_keyword):
        raise UserCodeError(f"it mixes the parameter names of single and batch functions: {', '.join(sorted(by_keyword))}")
    if reserved := sorted({*SINGLE, *BATCH} & args.keys()):
        raise UserCodeError(f"reward.args.{reserved[0]}: the run itself gives this parameter. Choose another name")
    required = [key for key, parameter in parameters.items() if parameter.default is parameter.empty and parameter.kind not in _VARIABLE]
    if unknown := [key for key in required if key not in by_keyword or key not in (*known, *args)]:
        raise UserCodeError(
            f"it requires {', '.join(map(repr, unknown))}, which the run does not give. Given by keyword are {GIVEN}; give any other "
            f"parameter a default or a value in reward.args"
        )
    takes = tuple(key for key in known if key in by_keyword or (open_ended and key in known[: len(VERL)]))
    used_args = {key: value for key, value in args.items() if open_ended or key in by_keyword}
    return RewardFunction(function, batch, takes, used_args, needs_truth=not {"ground_truth", "ground_truths"}.isdisjoint(required))
