"""The MATH-style reward: a response and the true answer enter, 1 or 0 leaves; math-verify decides whether they are the same mathematics.

The answer is the content of the response's last `\\boxed{...}`; without one, the answer that math-verify finds in the last thousand
characters (a formula or number, preferably after "answer"). The ground truth is LaTeX, a number, a text with the answer in a
`\\boxed{...}`, or a list of these, each acceptable. `pred` is the answer as text. math-verify's own alarms are off: they would silently
turn a comparison that takes too long into a wrong answer, while `reward.timeout_s` ends it and counts it. Needs the package math-verify.
"""

from __future__ import annotations

import logging
import re
from itertools import product
from typing import Any

try:
    from math_verify import parse, verify
except ImportError as error:
    raise ImportError(f'{error}. Install it: pip install "fulltilt[math]"') from None

BOX = r"\boxed{"
END = 1000  # math-verify tries every formula of a text until it can read one
_BRACKETS = re.compile(r"\\boxed\{|\\.|[{}]", re.DOTALL)

# It warns on every start that its alarms are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def score(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """Return 1 if the response's answer equals the ground truth, or one of them."""
    truths = _truths(ground_truth)
    box = last_box(solution_str)
    found = _parsed(solution_str[-END:]) if box is None else _parsed_box(box)
    right = any(_equal(truth, found) for truth in truths)
    # math-verify's own spelling comes first: votes for 0.5 and 1/2 then count together.
    return {"score": float(right), "pred": next((text for text in found if isinstance(text, str)), box)}


def last_box(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}` whose brackets close. One pass: a response may repeat an unclosed one thousands of
    times."""
    opened: list[re.Match[str]] = []
    first, end = -1, -1
    for match in _BRACKETS.finditer(text):
        if match[0].endswith("{") and match[0] != r"\{":
            opened.append(match)
        elif match[0] == "}" and opened:
            opening = opened.pop()
            if opening[0] == BOX and opening.end() > first:
                first, end = opening.end(), match.start()
    return text[first:end] if end >= 0 else None


def _truths(ground_truth: Any) -> list[list[Any]]:
    """Return the true answers. Raises ValueError if there are none, before anything else, so that a row without an answer is not scored
    0."""
    listed = ground_truth.tolist() if hasattr(ground_truth, "tolist") else ground_truth
    texts = ["" if each is None else str(each) for each in (listed if isinstance(listed, (list, tuple)) else [listed])]
    found = [_parsed_box(text if (box := last_box(text)) is None else box) for text in texts]
    if not found or not all(found):
        shown = str(ground_truth)[:80]
        raise ValueError(f"ground_truth {shown!r} holds no answer: the math reward needs LaTeX or a number, or a list of them")
    return found


def _parsed_box(content: str) -> list[Any]:
    # In a box, math-verify reads all of the content as one formula; a full stop at its end is not part of it.
    return _parsed(f"{BOX}{content.strip().removesuffix('.')}}}")


def _parsed(text: str) -> list[Any]:
    """Return math-verify's result: the expression, if it could be read, and the text it was read from."""
    return list(parse(text, parsing_timeout=None))


def _equal(truth: list[Any], found: list[Any]) -> bool:
    return any(_same(left, right) for left, right in product(truth, found))


def _same(truth: Any, found: Any) -> bool:
    try:
        return bool(verify(truth, found, timeout_seconds=None, raise_on_error=True))
    except MemoryError:
        raise  # not a verdict on the answer
    except Exception:
        # math-verify has no rule for such a pair, for example x != 3 and x > 3.
        return False
