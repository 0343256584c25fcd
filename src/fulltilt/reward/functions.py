"""Reward functions: a name enters, a callable with a known signature leaves; its results are checked here.

A name is a key of `BUILT_IN` or `FILE.py:NAME`. A function of your own takes any of these by keyword, in verl's names:

    single   data_source, solution_str, ground_truth, extra_info, prompt_str        one call for each sample
    batch    data_sources, solution_strs, ground_truths, extra_infos, prompt_strs   one call for each group, lists of equal length

and the keys of `reward.args`. Only what it names is passed; with `**kwargs` the four names of verl and all of `reward.args` are.
`prompt_str` (the prompt's text) is ours and is passed only when named.

It returns a number (int, float, bool, numpy or torch scalar) or a dict with the number under "score"; what it read as the answer, text or
number, may stand under "pred"; other finite numbers become the score's parts. A batch function returns a list of these. Guaranteed: what
leaves `RewardFunction.score` is finite, one per sample. Free of torch and numpy: worker processes import it.
"""

from __future__ import annotations

import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from numbers import Integral, Real
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class BuiltIn:
    """Where a built-in function is: its module is imported only if a run names it, since it may need a package or time."""

    module: str
    attribute: str
    extra: str | None = None  # the extra of fulltilt that installs what it needs


BUILT_IN: Mapping[str, BuiltIn] = {
    "gsm8k": BuiltIn("gsm8k", "strict"),
    "gsm8k_flexible": BuiltIn("gsm8k", "flexible"),
    "math": BuiltIn("math", "score", extra="math"),
    "dapo": BuiltIn("dapo", "score"),
}
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
SINGLE = (*VERL, "prompt_str")
BATCH = tuple(f"{name}s" for name in SINGLE)
GIVEN = "data_source, solution_str, ground_truth, extra_info and prompt_str, or the same with an s for a batch function"

ANSWER_LENGTH = 200

Scored = tuple[float, dict[str, float], str | None]  # value, parts, answer


class LoadError(Exception):
    """The configured function cannot be used; the message says where and why. The trainer turns it into a UserError."""


class NotANumber(Exception):
    """The function returned something that is no finite number."""

    def __init__(self, sample: int, shown: str) -> None:
        super().__init__(shown)
        self.sample = sample
        self.shown = shown


class WrongCount(Exception):
    """A batch function returned another number of results than it was given samples."""


@dataclass(frozen=True)
class Located:
    """Where a function is. The source is read once, in the trainer: a file edited during the run does not change the reward."""

    name: str  # as configured
    path: str | None = None  # None: built in
    attribute: str = ""
    source: bytes = b""


@dataclass(frozen=True)
class RewardFunction:
    name: str
    function: Callable[..., Any]
    batch: bool
    takes: tuple[str, ...]  # the names of SINGLE or BATCH it is given
    args: Mapping[str, Any] = field(default_factory=dict)

    def score(self, prompt: Mapping[str, Any], texts: Sequence[str]) -> list[Scored]:
        """One call: all texts of a group for a batch function, exactly one text otherwise."""
        if self.batch:
            return self._score_batch(prompt, texts)
        (text,) = texts
        values = {**prompt, "solution_str": text}
        return [checked(self.function(**{name: values[name] for name in self.takes}, **self.args), 0)]

    def _score_batch(self, prompt: Mapping[str, Any], texts: Sequence[str]) -> list[Scored]:
        columns = {f"{name}s": [value] * len(texts) for name, value in prompt.items()} | {"solution_strs": list(texts)}
        results = self.function(**{name: columns[name] for name in self.takes}, **self.args)
        if isinstance(results, (str, bytes, Mapping)) or not hasattr(results, "__len__") or not hasattr(results, "__getitem__"):
            raise WrongCount(f"returned a {type(results).__name__}; a batch function returns a list with one result for each sample")
        if len(results) != len(texts):
            raise WrongCount(f"returned {len(results)} results for {len(texts)} samples")
        return [checked(results[index], index) for index in range(len(texts))]


def checked(result: Any, sample: int) -> Scored:
    """The score, its parts and the answer, or NotANumber."""
    if not isinstance(result, Mapping):
        return _finite(result, sample, result), {}, None
    if "score" not in result:
        raise NotANumber(sample, f"a dict without 'score' (its keys: {', '.join(map(str, result)) or 'none'})")
    score = _finite(result["score"], sample, result)
    others = {str(key): _number(value) for key, value in result.items() if key not in ("score", "pred")}
    parts = {key: value for key, value in others.items() if value is not None and math.isfinite(value)}
    return score, parts, answer_text(result.get("pred"))


def answer_text(answer: Any) -> str | None:
    """An answer as votes are counted by it: one spelling for equal numbers, nothing that a UTF-8 file could not hold, no blank."""
    if not isinstance(answer, (str, Integral)):
        number = _number(answer)
        answer = "" if number is None or not math.isfinite(number) else int(number) if number.is_integer() else number
    return str(answer).strip().encode("utf-8", "replace").decode()[:ANSWER_LENGTH] or None


def _finite(value: Any, sample: int, shown: Any) -> float:
    number = _number(value)
    if number is None or not math.isfinite(number):
        raise NotANumber(sample, _short(shown))
    return number


def _number(value: Any) -> float | None:
    if not isinstance(value, Real) and callable(getattr(value, "item", None)):
        # Tensors and arrays of one element; more than one raises and is no number.
        try:
            value = value.item()
        except (ValueError, RuntimeError):
            return None
    if not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def locate(name: str) -> Located:
    """Reads the file of a configured name. Runs in the trainer, executes nothing."""
    if name in BUILT_IN:
        return Located(name)
    file, colon, attribute = name.rpartition(":")
    if not colon or not file or not attribute.isidentifier():
        raise LoadError(f"reward function {name!r} is neither {' nor '.join(BUILT_IN)} nor of the form FILE.py:NAME")
    path = Path(file).expanduser().absolute()
    try:
        return Located(name, str(path), attribute, path.read_bytes())
    except FileNotFoundError:
        raise LoadError(f"reward function {name!r}: there is no file {path}") from None
    except OSError as error:
        raise LoadError(f"reward function {name!r}: cannot read {path}: {error.strerror}") from None


def load(located: Sequence[Located], args: Mapping[str, Any]) -> list[RewardFunction]:
    """Executes the files and checks the signatures. Runs in a worker process."""
    modules: dict[str, ModuleType] = {}
    functions: list[RewardFunction] = []
    for place in located:
        if place.path is None:
            functions.append(_bind(place.name, _built_in(place.name), {}))
            continue
        if place.path not in modules:
            modules[place.path] = _execute(place)
        functions.append(_bind(place.name, _attribute(modules[place.path], place), args))
    for key in args:
        if not any(key in function.args for function in functions):
            names = ", ".join(place.name for place in located)
            raise LoadError(f"reward.args.{key}: no configured reward function ({names}) takes a parameter {key!r}")
    return functions


def _built_in(name: str) -> Callable[..., Any]:
    place = BUILT_IN[name]
    try:
        return getattr(import_module(f"fulltilt.reward.{place.module}"), place.attribute)  # type: ignore[no-any-return]
    except ImportError as error:
        assert place.extra is not None, error
        remedy = f'Install it: pip install "fulltilt[{place.extra}]"'
        raise LoadError(f"reward function {name!r} needs a package that cannot be imported ({error}). {remedy}") from None


def _execute(place: Located) -> ModuleType:
    assert place.path is not None
    path = Path(place.path)
    # The file's own imports work as when it is run as a script.
    sys.path.insert(0, str(path.parent))
    module = ModuleType(f"fulltilt_reward_{path.stem}_{len(sys.modules)}" if path.stem in sys.modules else path.stem)
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    try:
        exec(compile(place.source, str(path), "exec"), module.__dict__)
    except SyntaxError as error:
        line = f"\n    {error.text.strip()}" if error.text else ""
        raise LoadError(f"reward function {place.name!r}: syntax error at {error.filename}:{error.lineno}: {error.msg}{line}") from None
    except MemoryError:
        raise LoadError(f"reward function {place.name!r}: loading {path} took more memory than reward.memory_gb allows") from None
    except BaseException as error:
        raise LoadError(f"reward function {place.name!r}: loading {path} failed: {describe(error, str(path))}") from None
    return module


def _attribute(module: ModuleType, place: Located) -> Callable[..., Any]:
    function = getattr(module, place.attribute, None)
    if function is None:
        defined = [name for name, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
        raise LoadError(
            f"reward function {place.name!r}: {place.path} defines no {place.attribute!r}; its functions: {', '.join(defined) or 'none'}"
        )
    if not callable(function):
        raise LoadError(f"reward function {place.name!r}: in {place.path} it is a {type(function).__name__}, not a function")
    if inspect.iscoroutinefunction(function):
        raise LoadError(f"reward function {place.name!r} is async: write a plain function, calls already run side by side")
    return function  # type: ignore[no-any-return]


def _bind(name: str, function: Callable[..., Any], args: Mapping[str, Any]) -> RewardFunction:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise LoadError(f"reward function {name!r}: its parameters cannot be read; wrap it in a function with named parameters") from None
    named = {key for key, parameter in parameters.items() if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)}
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    batch = bool(named & set(BATCH))
    if batch and named & set(SINGLE):
        raise LoadError(f"reward function {name!r} mixes the names of single and batch functions: {', '.join(sorted(named))}")
    known = BATCH if batch else SINGLE
    for key in sorted(args):
        if key in SINGLE or key in BATCH:
            raise LoadError(f"reward.args.{key}: this name is given by the run itself; choose another")
    unknown = [
        key
        for key, parameter in parameters.items()
        if (key not in named or (key not in known and key not in args))
        and parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    if unknown:
        raise LoadError(
            f"reward function {name!r} wants {', '.join(map(repr, unknown))}, which the run does not give. Given by keyword are {GIVEN}; "
            f"anything else must have a default or stand in reward.args"
        )
    always = known[: len(VERL)] if open_ended else ()
    takes = tuple(key for key in known if key in named or key in always)
    return RewardFunction(name, function, batch, takes, {key: value for key, value in args.items() if open_ended or key in named})


def describe(error: BaseException, path: str | None) -> str:
    """One line: the exception and where in the user's file it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == path]
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "its message cannot be shown"
    return f"{type(error).__name__}{': ' if text else ''}{text[:300]}{place}"
