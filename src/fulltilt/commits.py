"""Commits of hub repositories that names stand for while a run is set up or works.

Enters: commits by hub name. Leaves: the commit of a name. Guaranteed: inside `at_commits` a name stands for one commit, whatever changes on
the hub; the hub is not asked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType

_commits: ContextVar[Mapping[str, str]] = ContextVar("commits", default=MappingProxyType({}))


@contextlib.contextmanager
def at_commits(commits: Mapping[str, str]) -> Iterator[None]:
    """Fix the commits of hub names inside the block: a branch may move while a run starts, and the caches of two machines may have
    different commits of it."""
    token = _commits.set(commits)
    try:
        yield
    finally:
        _commits.reset(token)


def commit_of(name: str) -> str | None:
    return _commits.get().get(name)
