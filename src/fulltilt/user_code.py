"""Functions of the user's own: `FILE.py:NAME` enters, the file's source and then the function leave.

`locate` reads the file once, where the run starts, and executes nothing; what it returns can travel to other processes, so that a file
edited during the run changes nothing. `function` executes the file, once in a process. Whatever is wrong with the name, the file or the
function is a `UserCodeError` that says what and gives the remedy; the caller adds which key of the configuration named the function.
Imports only the standard library: reward processes start from here and must start fast.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any


class UserCodeError(Exception):
    """The named function cannot be used."""


@dataclass(frozen=True)
class UserCode:
    """A function by its file, and the file's content when it was read."""

    name: str  # as configured
    path: str = ""  # empty for a function that fulltilt itself has
    attribute: str = ""
    source: bytes = b""

    @property
    def digest(self) -> str:
        """Identifies the file's content."""
        return hashlib.sha256(self.source).hexdigest()


def locate(name: str) -> UserCode:
    file, _, attribute = name.rpartition(":")
    if not file.endswith(".py") or not attribute.isidentifier():
        raise UserCodeError("not of the form FILE.py:NAME")
    path = Path(file).absolute()
    try:
        return UserCode(name, str(path), attribute, path.read_bytes())
    except OSError as error:
        raise UserCodeError(f"cannot read {path}: {error.strerror}. Paths are relative to the current directory") from None


def function(code: UserCode, *, as_script: bool = False) -> Callable[..., Any]:
    """The function itself. `as_script`: the file runs as `python FILE.py` would run it, under its own name and with its folder first on
    the path; otherwise neither can hide an installed package from this process."""
    module = _execute(code.path, code.source, as_script)
    found = getattr(module, code.attribute, None)
    if found is None:
        own = [name for name, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
        raise UserCodeError(f"{code.path} defines no {code.attribute!r}. Its functions: {', '.join(own) or 'none'}")
    if not callable(found):
        raise UserCodeError(f"{code.attribute!r} in {code.path} is of type {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def parameters(called: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(called).parameters
    except (TypeError, ValueError):
        raise UserCodeError("its parameters cannot be read. Wrap it in a function with named parameters") from None


def describe(error: BaseException, path: str) -> str:
    """One line: the exception, and the line of the user's file that it came from."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    place = f" ({Path(path).name}:{own[-1].lineno})" if own else ""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "its message cannot be shown"
    return f"{type(error).__name__}{': ' if text else ''}{text[:300]}{place}"


@lru_cache
def _execute(path: str, source: bytes, as_script: bool) -> ModuleType:
    folder, name = str(Path(path).parent), Path(path).stem if as_script else f"fulltilt_user_{Path(path).stem}"
    module = ModuleType(name if name not in sys.modules else f"fulltilt_user_{name}_{len(sys.modules)}")
    module.__file__ = path
    sys.modules[module.__name__] = module  # dataclasses and pickle look there
    if as_script:
        sys.path.insert(0, folder)
    elif folder not in sys.path:
        sys.path.append(folder)
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except SyntaxError as error:
        line = f"\n    {error.text.strip()}" if error.text else ""
        raise UserCodeError(f"syntax error at {error.filename}:{error.lineno}: {error.msg}. Fix this line{line}") from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit included
        raise UserCodeError(f"loading {path} failed: {describe(error, path)}. Fix the file") from error
    return module
