"""Parametrized cases of which `make test` runs a few, `make check` some more, and `make check-all` every one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sample_cases(cases: Iterable[Any], *plain: Any, long: Iterable[Any] = ()) -> list[Any]:
    """For `pytest.mark.parametrize`: all `cases`. Those that are not in `plain` are marked, as `long` where they are named so, else as
    `matrix`."""
    cases, long = list(cases), list(long)
    missing = [case for case in (*plain, *long) if case not in cases]
    assert not missing, f"no such cases: {missing}"

    def marks(case: Any) -> tuple[pytest.MarkDecorator, ...]:
        return () if case in plain else (pytest.mark.long if case in long else pytest.mark.matrix,)

    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks(case)) for case in cases]
