"""The math and dapo rewards: which answers are found, which are equal, and that math-verify behaves inside a reward process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fulltilt.records import Group, Prompt, Sample, UserError
from fulltilt.reward.base import RewardPool
from fulltilt.reward.rules import dapo, exact_match
from fulltilt.reward.rules import math as math_reward
from fulltilt.schema import RewardConfig


def group_of(texts: list[str], truth: Any, uid: int = 0) -> Group:
    none = np.zeros(0, dtype=np.int64)
    samples = tuple(Sample(index, none, none.astype(np.float32), "stop", text) for index, text in enumerate(texts))
    return Group(Prompt(uid, none, "", ground_truth=truth), samples)


@pytest.fixture
def pool_of() -> Iterator[Callable[..., RewardPool]]:
    pools: list[RewardPool] = []

    def make(function: str, **settings: Any) -> RewardPool:
        pools.append(RewardPool(RewardConfig(function=function, **({"workers": 1, "timeout_s": 20.0} | settings))))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


# math

MATH = [
    (r"so \boxed{18}", "18", 1),
    (r"so $\boxed{18.}$", 18, 1),
    (r"\boxed{17} no, \boxed{18}", "18", 1),
    (r"\boxed{18} no, \boxed{17}", "18", 0),
    (r"\boxed{18} and then it is cut: \boxed{1", "18", 1),
    (r"\boxed{\frac{1}{2}}", r"\frac12", 1),
    (r"\boxed{\dfrac{1}{2}}", "0.5", 1),
    (r"\boxed{0.5}", "1/2", 1),
    (r"\boxed{(x+1)^2}", "x^2+2x+1", 1),
    (r"\boxed{x^2+2x}", "x^2+2x+1", 0),
    (r"\boxed{2\sqrt{3}}", r"$\sqrt{12}$", 1),
    (r"\boxed{\left\{2, 1\right\}}", r"\{1,2\}", 1),
    (r"\boxed{(2, 1)}", "(1,2)", 0),
    (r"\boxed{x = 3}", "3", 1),
    (r"\boxed{1,000}", "1000", 1),
    (r"\boxed{18\text{ cm}}", "18", 1),
    (r"\boxed{\text{B}}", "B", 1),
    (r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1),
    (r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", r"\{1,2\}", 0),
    (r"\boxed{-1}", "1", 0),
    (r"\boxed{x > 3}", r"x \neq 3", 0),
    (r"\boxed{}", "18", 0),
    ("the final answer is 18", "18", 1),
    ("The answer is $\\frac{1}{2}$.", "0.5", 1),
    ("first 18, then 17", "18", 0),
    ("", "18", 0),
    (r"\boxed{3}", r"We add them up to get \boxed{2} and $1$, so \boxed{3}, as 2 + 1 = 3.", 1),
    (r"\boxed{3}", ["2", "3"], 1),
    (r"\boxed{3}", np.array([2.0, 3.0]), 1),
    (r"\boxed{3}", ["2", "4"], 0),
]


@pytest.mark.parametrize(("text", "truth", "expected"), MATH)
def test_math(text: str, truth: Any, expected: int) -> None:
    assert math_reward.score(text, truth)["score"] == expected


@pytest.mark.parametrize(
    ("text", "pred"),
    [
        (r"\boxed{0.5}", r"\frac{1}{2}"),
        (r"\boxed{\frac12}", r"\frac{1}{2}"),
        ("the answer is 18", "18"),
        (r"\boxed{}", ""),
        ("nothing", None),
    ],
)
def test_math_says_what_it_read(text: str, pred: str | None) -> None:
    assert math_reward.score(text, "18")["pred"] == pred


@pytest.mark.parametrize("truth", [None, "", [], ["18", ""], " "])
def test_math_refuses_a_ground_truth_without_answer(truth: Any) -> None:
    with pytest.raises(ValueError, match="holds no answer"):
        math_reward.score(r"\boxed{18}", truth)


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{a{b}c}d}", "a{b}c"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{1 \\}", r"1 \\"),
        (r"{ \boxed{1", None),
        (r"} \boxed{1} {", "1"),
        (r"\boxed{x + \boxed{3}}", "3"),
        ("none", None),
    ],
)
def test_the_last_box_is_found(text: str, box: str | None) -> None:
    assert math_reward.last_box(text) == box


def test_an_unclosed_box_many_times_over_takes_no_time() -> None:
    assert math_reward.last_box(r"\boxed{7}" + r"\boxed{" * 100_000) == "7"


def test_without_a_box_only_the_end_is_read() -> None:
    reasoning = "and it goes on and on.\n" * 60
    assert math_reward.score("The final answer is 18.\n" + reasoning, "18")["score"] == 0
    assert math_reward.score(reasoning + "so it is 18", "18")["score"] == 1


def test_math_sets_no_alarm() -> None:
    """Python knows alarms in its main thread only: where math-verify sets one, it cannot run in another."""
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(math_reward.score, r"\boxed{18}", "18").result()["score"] == 1


@pytest.mark.long
def test_math_in_a_reward_process(pool_of: Any) -> None:
    """A comparison without end is ended by our deadline and counted; those beside it, before and after, are right."""
    pool = pool_of("math", timeout_s=8.0)  # a first comparison takes a slow machine a while
    texts = [r"\boxed{18}", r"\boxed{9^{9^{9^9}}}", r"\boxed{17}", r"\boxed{\frac{36}{2}}"]
    right, endless, wrong, also_right = pool.collect([group_of(texts, "18")])[0]
    assert (right.value, wrong.value, also_right.value) == (1.0, 0.0, 1.0)
    assert (right.answer, wrong.answer, also_right.answer) == ("18", "17", r"\frac{36}{2}")
    assert endless.error is not None and "deadline of 8 s" in endless.error
    assert (pool.stats().calls, pool.stats().timeouts, pool.stats().failed) == (4, 1, 1)


def test_a_missing_package_is_said_at_the_start(tmp_path: Path, pool_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "math_verify.py").write_text("raise ModuleNotFoundError(\"No module named 'math_verify'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UserError, match=r"'math': it needs a package.*No module named 'math_verify'.*pip install \"fulltilt\[math\]\""):
        pool_of("math")
    # The others do not need it, and their processes do not wait for it.
    assert pool_of("dapo").collect([group_of(["Answer: 5"], "5")])[0][0].value == 1.0


def test_processes_of_other_rewards_do_not_load_sympy(tmp_path: Path, pool_of: Any) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import sys\ndef score(): return len({'sympy', 'math_verify'} & set(sys.modules))")
    names = {f"{file}:score": 1.0}
    assert pool_of(names | {"dapo": 1.0}).collect([group_of(["Answer: 5"], "5")])[0][0].parts["score"] == 0.0
    assert pool_of(names | {"math": 1.0}).collect([group_of([r"\boxed{5}"], "5")])[0][0].parts["score"] == 2.0


# DAPO

DAPO = [
    ("Answer: 34", "34", 1),
    ("so it is.\n\nAnswer: $34$.", "34", 1),
    ("ANSWER : \\boxed{34}", 34, 1),
    ("Answer:\n34\n", "34", 1),
    ("Answer: 33\nno.\nAnswer: 34", "34", 1),
    ("Answer: 34\nno.\nAnswer: 33", "34", -1),
    ("Answer: 34 is what I get, or not", "34", -1),
    ("Answer: 1,234", "1234", 1),
    (r"Answer: 1{,}234", "1,234", 1),
    (r"Answer: \$1,\!234", "1234", 1),
    ("Answer: x = 34", "34", 1),
    ("Answer: 34 square units", "34", 1),
    (r"Answer: $34 \text{ cm}^2$", "34", 1),
    (r"Answer: $34^\circ$", "34 degrees", 1),
    (r"Answer: \frac12", r"\frac{1}{2}", 1),
    (r"Answer: \sqrt2", r"$\sqrt{2}$", 1),
    (r"Answer: \sqrt[3]{2}", r"\sqrt[3]{2}", 1),
    (r"Answer: (1, 2)", "(1,2)", 1),
    (r"Answer: 1, \text{and} 2", "1,2", 1),
    (r"Answer: \textbf{(B)}", r"\mbox{(B)}", 1),
    (r"Answer: \overline{AB}", "AB", 1),
    ("Answer: an octagon", "octagon", 1),
    ("Answer: always", "al", -1),
    ("Answer: 0.5", r"\frac12", -1),
    ("Answer: -34", "34", -1),
    ("Answer:", "34", -1),
    ("34", "34", -1),
    ("Answer: 34" + "\n" * 300, "34", -1),
    ("", "34", -1),
]


@pytest.mark.parametrize(("text", "truth", "expected"), DAPO)
def test_dapo(text: str, truth: Any, expected: int) -> None:
    result = dapo.score(text, truth)
    assert (result["score"], result["acc"]) == (expected, float(expected > 0))


def test_dapo_says_what_it_read() -> None:
    assert dapo.score(r"Answer: $x = 1,234 \text{ cm}$", "5")["pred"] == "1234"
    assert dapo.score("1234", "5")["pred"] is None


@pytest.mark.parametrize("truth", [None, "", " ", ["34"]])
def test_dapo_refuses_a_ground_truth_without_answer(truth: Any) -> None:
    with pytest.raises(ValueError, match="is not an answer"):
        dapo.score("Answer: 34", truth)


def test_exact_match() -> None:
    assert exact_match.score(" Paris\n", "paris") == {"score": 1.0, "pred": "paris"}
    assert exact_match.score("Paris, of course", "Paris")["score"] == 0.0
    for truth in (None, "", " "):
        with pytest.raises(ValueError, match="exact_match needs the text"):
            exact_match.score("Paris", truth)


def test_the_built_in_rewards_are_light() -> None:
    """They import neither torch nor numpy: every reward process must start fast."""
    program = """
        import json, sys
        from pathlib import Path
        from fulltilt.reward import functions, rules
        names = [file.stem for file in Path(rules.__file__).parent.glob("[!_]*.py")]
        named = dict(zip(names, functions.load([functions.locate(name) for name in names], {})))
        answers = ("dapo", "gsm8k", "gsm8k_flexible", "math")
        results = [named[name].score({"ground_truth": "5"}, ["#### 5 Answer: 5"]) for name in answers]
        print(json.dumps([sorted({"torch", "numpy", "pydantic"} & set(sys.modules)), results]))
        """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=environment, capture_output=True, check=True)
    heavy, results = json.loads(done.stdout)
    assert heavy == []
    assert [result[0][0] for result in results] == [1.0, 1.0, 1.0, 1.0] and [result[0][2] for result in results] == ["5"] * 4
