"""The simplest rule reward: 1.0 if the response is the ground truth, white space at the ends and letter case aside; otherwise 0.0."""

from __future__ import annotations

from typing import Any


def score(solution_str: str, ground_truth: str | None) -> dict[str, Any]:
    """`pred` is the response as it was compared. Example: (" Paris\\n", "paris") -> {"score": 1.0, "pred": "paris"}"""
    truth, answer = str(ground_truth or "").strip().casefold(), solution_str.strip().casefold()
    if not truth:
        raise ValueError(f"ground_truth {ground_truth!r} is empty: exact_match needs the text of the right response")
    return {"score": float(answer == truth), "pred": answer}
