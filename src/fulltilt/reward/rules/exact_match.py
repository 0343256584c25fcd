"""The simplest rule reward: 1.0 if the response is the ground truth, white space at the ends and letter case aside; otherwise 0.0.

The ground truth is a text, a number, or a list of these, each acceptable.
"""

from __future__ import annotations

from typing import Any


def score(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """Return 1 if the response equals a ground truth. `pred`: the response as it was compared.

    Example: (" Paris\\n", "paris") -> {"score": 1.0, "pred": "paris"}"""
    given = ground_truth.tolist() if hasattr(ground_truth, "tolist") else ground_truth
    truths = [_compared("" if each is None else str(each)) for each in (given if isinstance(given, (list, tuple)) else [given])]
    if not truths or not all(truths):
        raise ValueError(f"ground_truth {ground_truth!r} is empty: exact_match needs the text of the right response, or a list of them")
    answer = _compared(solution_str)
    return {"score": float(answer in truths), "pred": answer}


def _compared(text: str) -> str:
    return text.strip().casefold()
