"""Functions that a Python program passes instead of names: rewards, an advantage, a loss.

Enters: any callable: of a script, a notebook or a module, a lambda, a closure, a `partial`, an object. Leaves: its `UserCode`, under a name
that a configuration can hold, and in a form that another process can load. Guaranteed: functions of scripts, of notebooks and of modules
that are not installed are sent by value, so that a file edited during the run changes nothing; a function that cannot be sent is refused
with the name of the object that prevents it; its `source` is the same in every process, and changes with every part of the program that the
function uses.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import io
import pickle
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, singledispatch
from numbers import Number
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import cloudpickle

from fulltilt.user_code import FROM_PYTHON, UserCode, UserCodeError
from fulltilt.words import first_line

Function = Callable[..., Any]
INSTALLED = (
    str(Path(__file__).parent),
    site.getusersitepackages(),
    *(sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib")),
)
PLAIN = (Number, str, bytes, PurePath, NoneType)  # values whose repr is the same in every process


class Callables:
    """Gives each function a unique name: `python:` and its name in the program."""

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
    """Return the function, method or class that the callable's source text defines."""
    function = inspect.unwrap(function.func if isinstance(function, partial) else function)
    return function if inspect.isroutine(function) or inspect.isclass(function) else type(function)


def written_in(function: Function) -> str:
    try:
        return inspect.getsourcefile(written(function)) or "Python"
    except (TypeError, OSError):  # not written in Python, or not in a file
        return "Python"


def source_of(function: Function) -> bytes:
    """Return the text of the function and of everything in the user's program that it uses, with the plain values that it takes from
    outside: a change to any of them changes the function. Objects of libraries, arrays among them, are left out: nothing stable identifies
    them."""
    texts: list[str] = []
    seen: dict[int, Any] = {}  # values by identity; they are held, so that no identity is used twice
    waiting: list[Any] = [function]
    while waiting:
        value = waiting.pop()
        if isinstance(value, PLAIN):
            texts.append(repr(value))
        elif id(value) not in seen:
            seen[id(value)] = value
            text, used = content(value)
            texts.append(text)
            waiting += reversed(used)
    return "\n".join(texts).encode("utf-8", "backslashreplace")


@singledispatch
def content(value: Any) -> tuple[str, list[Any]]:
    """Return the text that identifies a value, and the values that it uses. For an object: its class, its attributes and the value that it
    wraps."""
    if is_own(type(value)):
        return "object", [type(value), object.__getstate__(value)]
    return type(value).__qualname__, [getattr(value, "__dict__", {}).get("__wrapped__")]


@content.register
def _(value: FunctionType) -> tuple[str, list[Any]]:
    used = dict(captured(value)) | (dict(looked_up(value)) if is_own(value) else {})
    text = code_text(value.__code__) if is_own(value) else value.__qualname__
    return text, [value.__defaults__, value.__kwdefaults__, used]


@content.register
def _(value: BuiltinFunctionType) -> tuple[str, list[Any]]:
    return value.__qualname__, []


@content.register
def _(value: type) -> tuple[str, list[Any]]:
    if not is_own(value):
        return value.__qualname__, []
    held = {name: entry for name, entry in vars(value).items() if not name.startswith("__") or callable(entry)}
    return value.__qualname__, [value.__bases__, held]


@content.register
def _(value: ModuleType) -> tuple[str, list[Any]]:
    """Identify a module by its whole file, as in FILE.py:NAME, and by the modules that it imports from."""
    if not is_own(value):
        return value.__name__, []
    try:
        text = inspect.getsource(value)
    except (OSError, TypeError):
        text = value.__name__
    defined = [entry for entry in vars(value).values() if isinstance(entry, FunctionType | type)]
    imported = [entry for entry in vars(value).values() if isinstance(entry, ModuleType)]
    return text, [*imported, *(sys.modules.get(entry.__module__ or "") for entry in defined)]


@content.register(dict)
def _(value: dict[Any, Any]) -> tuple[str, list[Any]]:
    return f"dict of {len(value)}", [*value, *value.values()]


@content.register(list)
@content.register(tuple)
def _(value: list[Any] | tuple[Any, ...]) -> tuple[str, list[Any]]:
    return f"{type(value).__name__} of {len(value)}", list(value)


@content.register(set)
@content.register(frozenset)
def _(value: set[Any] | frozenset[Any]) -> tuple[str, list[Any]]:
    return f"set {sorted(repr(entry) for entry in value if isinstance(entry, PLAIN))}", []


@content.register
def _(value: re.Pattern) -> tuple[str, list[Any]]:  # type: ignore[type-arg]
    return f"pattern {value.pattern!r} {value.flags}", []


@content.register
def _(value: partial) -> tuple[str, list[Any]]:  # type: ignore[type-arg]
    return "partial", [value.func, value.args, value.keywords]


@content.register
def _(value: MethodType) -> tuple[str, list[Any]]:
    return "method", [value.__func__, value.__self__]


@content.register(staticmethod)
@content.register(classmethod)
def _(value: Any) -> tuple[str, list[Any]]:
    return type(value).__name__, [value.__func__]


@content.register
def _(value: property) -> tuple[str, list[Any]]:
    return "property", [value.fget]


def code_text(code: CodeType) -> str:
    """Return the text of a function; its code, if it was typed without a file."""
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        return f"{code.co_code.hex()} {code.co_names} {[constant_text(constant) for constant in code.co_consts]}"


def constant_text(constant: Any) -> str:
    if isinstance(constant, CodeType):
        return code_text(constant)
    return str(sorted(map(repr, constant))) if isinstance(constant, frozenset) else repr(constant)


def is_own(value: Any) -> bool:
    """Return whether the user's program defines a function, class or module: not Python, an installed package or fulltilt itself."""
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__ or ""
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return name == "__main__" or (name.partition(".")[0] not in sys.stdlib_module_names and not file.startswith(INSTALLED))


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, given: Any) -> Any:
        if "torch" in sys.modules and isinstance(given, sys.modules["torch"].Tensor) and given.device.type != "cpu":
            raise pickle.PicklingError(f"cannot pickle a tensor on {given.device}")
        return super().reducer_override(given)


def travelling(code: UserCode) -> UserCode:
    """Return the code in a form that another process can load."""
    if code.given is None:
        return code
    try:
        function = pickled(code.given)
    except Exception as error:  # an object's own method may raise anything
        holder = next((f" (it uses {name!r})" for name, value in used_by(code.given) if not travels(value)), "")
        raise UserCodeError(
            f"the function {code.attribute!r} cannot be sent to other processes: {first_line(error)}{holder}. Make the object inside the "
            "function, or write the function into a file and give FILE.py:NAME"
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
    """Pickle the definitions of the function's module by value, unless the module is installed, so that another process can import it."""
    module = sys.modules.get(getattr(written(function), "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if module is None or file is None or not is_own(module) or module.__name__ in cloudpickle.list_registry_pickle_by_value():
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def used_by(function: Function) -> list[tuple[str, Any]]:
    """Return the values that the function takes from outside, by name."""
    found = getattr(written(function), "__func__", written(function))
    held = getattr(function, "__self__", function)  # the object whose method it is, or that is called
    attributes = [] if isinstance(held, FunctionType | type) else getattr(held, "__dict__", {}).items()
    return [*attributes, *captured(found), *looked_up(found)] if isinstance(found, FunctionType) else [*attributes]


def captured(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables of enclosing functions. One that is not assigned yet is left out."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != CellType():
            yield name, cell.cell_contents


def looked_up(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables of the function's module that it uses."""
    return ((name, function.__globals__[name]) for name in sorted(global_names(function.__code__)) if name in function.__globals__)


def global_names(code: CodeType) -> set[str]:
    """Return the names that the code, or a function inside it, looks up in its module."""
    own = {str(each.argval) for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return own.union(*(global_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)))


def travels(value: Any) -> bool:
    try:
        pickled(value)
    except Exception:
        return False
    return True
