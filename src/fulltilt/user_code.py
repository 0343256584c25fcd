"""The user's own functions: `FILE.py:NAME`, or the name of a function that a Python program gave, enters; the function leaves.

`locate` reads the file once, where the run starts, and executes nothing; its result can be sent to other processes, so that a file edited
during the run changes nothing. `function` executes the file, once in a process and run. A function from Python has a name only inside
`known_functions`; in its own process it is the same object, and `callables` sends it to others. Any mistake in the name, the file or the
function is a `UserCodeError` with the remedy; the caller adds the key of the configuration that named the function. Imports only the
standard library: reward processes start from here and must start fast.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

FROM_PYTHON = "python:"  # prefix of the name of a function that is in no file of the configuration


class UserCodeError(Exception):
    """The named function cannot be used."""


@dataclass(frozen=True)
class UserCode:
    """A function by its file, and the file's content when it was read; or a function from Python."""

    name: str  # the name as configured
    path: str = ""  # empty for a function of fulltilt's own
    attribute: str = ""
    source: bytes = b""
    given: Callable[..., Any] | None = None  # the function from Python, in its own process
    pickled: bytes = b""  # the function for another process: a pickle of the folders that it imports from, and of its own pickle

    @property
    def digest(self) -> str:
        """Identifier of the file's content."""
        return hashlib.sha256(self.source).hexdigest()


_known: ContextVar[Mapping[str, UserCode]] = ContextVar("known", default=MappingProxyType({}))  # functions from Python, by their names


@contextlib.contextmanager
def known_functions(codes: Mapping[str, UserCode]) -> Iterator[None]:
    """Let `locate` find these functions too. Files are executed again: a second run in a process does not see changes that the first made
    in them."""
    _execute.cache_clear()
    token = _known.set(codes)
    try:
        yield
    finally:
        _known.reset(token)


def locate(name: str) -> UserCode:
    if name.startswith(FROM_PYTHON):
        if name not in _known.get():
            raise UserCodeError(
                "it stands for a function that a Python program gave to fulltilt.train. Start that program again, or write the function "
                "into a file and give FILE.py:NAME"
            )
        return _known.get()[name]
    file, _, attribute = name.rpartition(":")
    if not file.endswith(".py") or not attribute.isidentifier():
        raise UserCodeError("not of the form FILE.py:NAME")
    path = Path(file).absolute()
    try:
        return UserCode(name, str(path), attribute, path.read_bytes())
    except OSError as error:
        raise UserCodeError(f"cannot read {path}: {error.strerror}. Paths are relative to the current directory") from None


def imported_files(code: UserCode) -> dict[str, bytes]:
    """Return the content of the files that the function's file imports, and of those that they import, if they are in its folder or below,
    by their paths from there. Finds import statements only, and executes nothing."""
    folder, own = Path(code.path).parent, Path(code.path)
    found: dict[str, bytes] = {}
    waiting = [(own, code.source)]
    while waiting:
        for file in _imports(*waiting.pop(), folder):
            name = file.relative_to(folder).as_posix()
            if name not in found and file != own:
                with contextlib.suppress(OSError):  # executing the import reports it
                    found[name] = file.read_bytes()
                    waiting.append((file, found[name]))
    return found


def _imports(path: Path, source: bytes, folder: Path) -> Iterator[Path]:
    """Yield the files below the folder that a file's import statements may read."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # executing the file reports it
        return
    for node in ast.walk(tree):
        start, names = folder, list[str]()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = path.parents[min(node.level, len(path.parents)) - 1] if node.level else folder
            names = [f"{node.module}.{alias.name}" if node.module else alias.name for alias in node.names]
        for parts in (name.split(".") for name in names if start.is_relative_to(folder)):
            modules = (start.joinpath(*parts[:count]) for count in range(1, len(parts) + 1))
            yield from (file for module in modules for file in (module.with_suffix(".py"), module / "__init__.py") if file.is_file())


def function(code: UserCode, *, as_script: bool = False) -> Callable[..., Any]:
    """Return the function itself. `as_script`: the file runs as `python FILE.py` would run it, under its own name and with its folder first
    on the path; otherwise neither can hide an installed package from this process."""
    if code.given is not None:
        return code.given
    if code.pickled:
        return _unpickled(code)
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
    """Describe the exception in one line, with the line of the user's file that raised it."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    file = f"{Path(path).name}:" if Path(path).is_file() else "line "  # a cell of a notebook has no file
    place = f" ({file}{own[-1].lineno})" if own else ""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "its message cannot be shown"
    return f"{type(error).__name__}{': ' if text else ''}{text[:300]}{place}"


def _unpickled(code: UserCode) -> Callable[..., Any]:
    try:
        folders, function = pickle.loads(code.pickled)
        sys.path += [folder for folder in folders if folder not in sys.path]
        return pickle.loads(function)  # type: ignore[no-any-return]
    except Exception as error:
        why = f"{describe(error, code.path)}"
        raise UserCodeError(f"it cannot be loaded in another process: {why}. Write it into a file and give FILE.py:NAME") from error


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
