"""The GSM8K rewards: a response and the true answer enter, 1 or 0 leaves.

`strict` reads the number right after the last `####`, as the data set's own solutions end; `flexible` reads the last number anywhere. Both
report `format`, 1.0 when a number stands after the last `####`, and `pred`, the number they read; `strict` also reports `flexible`, the
score by the other rule, so that one validation shows both. Commas between thousands, a dollar sign, a plus sign and a full stop at the end
are ignored; "18", "18.0" and "18.00" are equal. The ground truth is the number, as text or not, or a whole GSM8K solution.
"""

from __future__ import annotations

import math
import re
from typing import Any

MARK = "####"
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
# A minus right after a digit is a subtraction or a range ("10-5"), not a sign.
_NUMBER = re.compile(rf"(?P<sign>(?:(?<![0-9])-)?)\+?(?:\$(?P<inner>-?))?(?P<digits>{_DIGITS})")


def strict(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """Return 1 if the number after the last `####` is the answer."""
    answer, found = answer_of(ground_truth), _marked_number(solution_str)
    return {**_result(found, answer, marked=found is not None), "flexible": _right(_last_number(solution_str), answer)}


def flexible(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """Return 1 if the last number of the text is the answer."""
    answer, found = answer_of(ground_truth), _last_number(solution_str)
    return _result(found, answer, marked=_marked_number(solution_str) is not None)


def _result(found: str | None, answer: str, *, marked: bool) -> dict[str, Any]:
    return {"score": _right(found, answer), "format": float(marked), "pred": found and _shortest(found)}


def _right(found: str | None, answer: str) -> float:
    return float(found is not None and _equal(found, answer))


def answer_of(ground_truth: Any) -> str:
    """Return the true answer as it is compared. Raises ValueError if there is none, before anything else, so that a row without an answer
    is not scored 0."""
    text = str(ground_truth)
    found = _marked_number(text) if MARK in text else _plain_number(text)
    if found is None:
        raise ValueError(f"ground_truth {text[:80]!r} holds no number: GSM8K rewards need '18' or a solution that ends with '{MARK} 18'")
    return found


def _marked_number(text: str) -> str | None:
    _, mark, tail = text.rpartition(MARK)
    match = _NUMBER.match(tail.lstrip()) if mark else None
    return _normal(match) if match else None


def _plain_number(text: str) -> str | None:
    match = _NUMBER.fullmatch(text.strip().removesuffix("."))
    return _normal(match) if match else None


def _last_number(text: str) -> str | None:
    last = None
    for match in _NUMBER.finditer(text):
        last = match
    return _normal(last) if last else None


def _normal(match: re.Match[str]) -> str:
    negative = match["sign"] or match["inner"]
    return ("-" if negative else "") + match["digits"].replace(",", "")


def _shortest(number: str) -> str:
    """Return one spelling for equal numbers, so that votes for 18, 18.0 and 018 count together."""
    sign, digits = ("-", number[1:]) if number.startswith("-") else ("", number)
    whole, _, fraction = digits.partition(".")
    text = (whole.lstrip("0") or "0") + f".{fraction}".rstrip("0").rstrip(".")
    return "0" if text == "0" else sign + text


def _equal(found: str, answer: str) -> bool:
    if found == answer:
        return True
    left, right = float(found), float(answer)
    # Digits beyond the range of a float all become infinity and would equal one another.
    return math.isfinite(left) and left == right


score = strict
