"""DAPO's rule reward: a response and the true answer enter, +1 or -1 leaves.

The answer is the text after the last `Answer:` among the last 300 characters, up to the end of its line. Both it and the ground truth are
written in one form (Minerva's conventions: the text after the last `=`, without units, articles, wrappers such as `\\text{}` and thousands
commas, with `\\frac12` spelt out) and must then be the same text: nothing is computed. `acc` is 1.0 or 0.0, `pred` the answer in that form.
The paper's overlong penalty is not part of this function: the algorithm subtracts it from any reward.
"""

from __future__ import annotations

import re
from numbers import Real
from typing import Any

END = 300  # characters; an answer in the middle of the reasoning is not the final answer
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

_UNITS = (
    r"square|ways|integers|dollars|mph|inches|hours|km|units|sue|points|feet|minutes|digits|cents|degrees|cm|gm|pounds|meters|meals|edges|"
    r"students|children\s*tickets|multiples"
)
_WORDS = rf"(?<![A-Za-z\\])(?:{_UNITS}|an?(?=\s))(?![A-Za-z])"
_SPACES = r"\\[ ;!,]|\s+"
_MARKS = r'\\\$|\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\l?dots(?![A-Za-z])|"'

# Applied in this order.
_STEPS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.DOTALL), replacement)
    for pattern, replacement in (
        (r".*=", ""),  # keeps the last side of an equation
        (_MARKS, ""),
        (r"\{,\}|,\\!", ""),  # thousands commas as TeX writes them
        (r"\\mbox(?![A-Za-z])", r"\\text"),
        (r",?\s*\\text\{\s*and\s*\}", ","),
        (_WORDS, ""),
        (r"\\text\{\s*(?:m|s|\.)?\s*\}(?:\^[23])?|\\mathrm\{th\}", ""),
        (r"^[^$]*\$([^$]*)\$.*$", r"\1"),  # keeps the first formula of a sentence
        (r"\\(?:text|textbf|overline)\{([^{}]*)\}", r"\1"),
        (r"\\boxed\{(.*)\}", r"\1"),
        (_SPACES, ""),
        (r"\\([dt]?frac)([^{])([^{])", r"\\\1{\2}{\3}"),
        (r"\\sqrt([^{\[])", r"\\sqrt{\1}"),
        (r"\$", ""),
    )
)


def score(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """Return +1 if the answer is the ground truth, else -1."""
    truth = _truth(ground_truth)
    found = _ANSWER.findall(solution_str[-END:])
    answer = normal(found[-1]) if found else None
    right = answer == truth
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": answer}


def normal(answer: str) -> str:
    """Return the normalised form in which answers are compared."""
    for pattern, replacement in _STEPS:
        answer = pattern.sub(replacement, answer)
    digits = answer.replace(",", "")
    return digits if digits.isdigit() else answer


def _truth(ground_truth: Any) -> str:
    """Return the true answer. Raises ValueError if there is none, before anything else, so that a row without an answer is not scored
    -1."""
    text = normal(str(ground_truth)) if isinstance(ground_truth, (str, Real)) else ""
    if not text:
        raise ValueError(f"ground_truth {str(ground_truth)[:80]!r} is not an answer: the dapo reward needs a text or a number such as '34'")
    return text
