"""A reward with verl's signature: the last digit of a sum, and nothing else.

All arguments come by keyword. `near` is not verl's: it comes from `reward.args` in run.toml.
"""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, near: float = 0.0
) -> dict[str, float]:
    answer = solution_str.strip()
    right = answer == ground_truth
    # Without credit for a sum that ends in the right digit, a model that writes whole sums would never see a reward.
    ends_right = answer.endswith(ground_truth)
    return {
        "score": 1.0 if right else near if ends_right else 0.0,
        "one_digit": float(len(answer) == 1),
        "whole_sum": float(answer == str((extra_info or {}).get("sum"))),
    }
