"""Functions that a Python program gives in place of names: rewards, an advantage, a loss.

Enters: any callable: of a script, a notebook or a module, a lambda, a closure, a `partial`, an object. Leaves: its `UserCode`, under a name
that a configuration can hold, and what another process needs to load it. Guaranteed: functions of scripts, of notebooks and of modules
that are not installed travel by value, so that a file edited during the run changes nothing; a function that cannot travel is refused with
the name of what keeps it; its `source` is the same in every process.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import pickle
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle

from fulltilt.user_code import FROM_PYTHON, UserCode, UserCodeError
from fulltilt.words import first_line

Function = Callable[..., Any]


class Callables:
    """Gives each function a name of its own, `python:` and the name that it has in the program."""

    def __init__(self) -> None:
        self.codes: dict[str, UserCode] = {}

    def name(self, function: Function) -> str:
        for name, code in self.codes.items():
            if code.given is function:
                return name
        attribute = plain_name(function)
        others = sum(code.attribute == attribute for code in self.codes.values())
        name = f"{FROM_PYTHON}{attribute}" + (f"-{others + 1}" if others else "")
        self.codes[name] = UserCode(name, written_in(function), attribute, source_of(function), given=function)
        return name


def plain_name(function: Function) -> str:
    function = function.func if isinstance(function, partial) else function
    name = getattr(function, "__name__", type(function).__name__)
    return name if name.isidentifier() else "lambda"


def written(function: Function) -> Any:
    """The function, method or class whose text the callable has."""
    function = inspect.unwrap(function.func if isinstance(function, partial) else function)
    return function if inspect.isroutine(function) or inspect.isclass(function) else type(function)


def written_in(function: Function) -> str:
    try:
        return inspect.getsourcefile(written(function)) or "Python"
    except TypeError:  # it is not written in Python
        return "Python"


def source_of(function: Function) -> bytes:
    """The text of the function; where it was typed without a trace, its code."""
    try:
        return inspect.getsource(written(function)).encode("utf-8", "backslashreplace")
    except (OSError, TypeError):
        code = getattr(written(function), "__code__", None)
        return code.co_code + repr(code.co_names).encode() if code else plain_name(function).encode()


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, given: Any) -> Any:
        if "torch" in sys.modules and isinstance(given, sys.modules["torch"].Tensor) and given.device.type != "cpu":
            raise pickle.PicklingError(f"cannot pickle a tensor on {given.device}")
        return super().reducer_override(given)


def travelling(code: UserCode) -> UserCode:
    """The code as another process can load it."""
    if code.given is None:
        return code
    try:
        function = pickled(code.given)
    except Exception as error:  # an object's own method may raise anything
        holder = next((f" (it uses {name!r})" for name, value in used_by(code.given) if not travels(value)), "")
        raise UserCodeError(
            f"reward function {code.attribute!r} cannot be sent to the reward processes: {first_line(error)}{holder}. Make the object "
            "inside the function, or write the function into a file and give FILE.py:NAME"
        ) from None
    folders = [str(Path(folder).absolute()) for folder in sys.path]
    return replace(code, given=None, pickled=pickle.dumps((folders, function)))


def pickled(function: Any) -> bytes:
    file = io.BytesIO()
    with by_value(function):
        Pickler(file).dump(function)
    return file.getvalue()


@contextlib.contextmanager
def by_value(function: Function) -> Iterator[None]:
    """Pickle what the function's module defines by value, unless the module is installed, which another process can import."""
    module = sys.modules.get(getattr(written(function), "__module__", None) or "")
    file = getattr(module, "__file__", None)
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib"))
    if module is None or file is None or file.startswith(installed) or module.__name__ in cloudpickle.list_registry_pickle_by_value():
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def used_by(function: Function) -> list[tuple[str, Any]]:
    """What the function takes from outside, by name."""
    try:
        outside = inspect.getclosurevars(written(function))
    except TypeError:
        return []
    return [*outside.nonlocals.items(), *outside.globals.items()]


def travels(value: Any) -> bool:
    try:
        pickled(value)
    except Exception:
        return False
    return True
