"""Parametrized cases of which `make test` runs a few, and `make check-all` every one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sample_cases(cases: Iterable[Any], *plain: Any) -> list[Any]:
    """For `pytest.mark.parametrize`: all `cases`, those that are not in `plain` marked as `matrix`."""
    cases = list(cases)
    missing = [case for case in plain if case not in cases]
    assert not missing, f"no such cases: {missing}"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in plain else pytest.mark.matrix) for case in cases
    ]
