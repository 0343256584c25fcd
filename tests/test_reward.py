"""Rewards: real processes, real bad behaviour. Every bad sample stands among good ones whose scores must be right and in order."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
from variants import sample_cases

from fulltilt.algo.advantage import group_mean_whitened, group_relative, leave_one_out
from fulltilt.memory.host import usable_cores
from fulltilt.records import Group, Prompt, Row, Sample, Score, UserError
from fulltilt.reward import confine, functions, process, sums
from fulltilt.reward.base import ERRORS_FILE, RewardPool, RewardStats
from fulltilt.reward.calls import RewardCall
from fulltilt.reward.rules import exact_match, gsm8k
from fulltilt.reward.worker import MOST_CHILDREN, Request, family_of
from fulltilt.schema import RewardConfig

MISBEHAVING = '''
import ctypes, os, resource, signal, subprocess, sys, threading, time
from pathlib import Path

LEAK = []
DESCRIPTORS = min(2**16, resource.getrlimit(resource.RLIMIT_NOFILE)[0])  # a worker's have the trainer's numbers, which may be high

def fork_and_return():
    os.fork()

def note(pid):
    with open(os.environ["REWARD_TEST_PIDS"], "a") as file:
        file.write(f"{pid}\\n")

def leave_grandchild():
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    note(pid)

def leave_detached():
    note(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)

def grandchild_then(action):
    leave_grandchild()
    action()

def eat():
    while True:
        LEAK.append(bytearray(64 * 2**20))

def close_all():
    os.closerange(0, DESCRIPTORS)

def close_all_and_stay():
    os.closerange(0, DESCRIPTORS)
    time.sleep(600)

def shout():
    for _ in range(50):
        print("x" * 2**20)
        print("y" * 2**10, file=sys.stderr)
    os.write(1, b"z" * 2**20)
    os.write(2, b"z" * 2**20)

def lie():
    for fd in range(3, DESCRIPTORS):
        try:
            os.write(fd, b"\\0\\0\\0\\2[]")
        except OSError:
            pass

def stop_when_told():
    while not os.path.exists(os.environ["REWARD_TEST_PIDS"] + ".stop"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGSTOP)

def raise_(error):
    raise error

ACTIONS = {
    "hang": lambda: time.sleep(600),
    "spin": lambda: [None for _ in iter(int, 1)],
    "stop itself": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "stop when told": lambda: threading.Thread(target=stop_when_told, daemon=True).start(),
    "raise": lambda: raise_(ValueError("no answer here")),
    "raise unprintable": lambda: raise_(type("Mute", (Exception,), {"__str__": lambda self: 1 / 0})()),
    "_exit": lambda: os._exit(0),
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "sys.exit": lambda: sys.exit(3),
    "interrupt": lambda: raise_(KeyboardInterrupt()),
    "fork": fork_and_return,
    "grandchild": leave_grandchild,
    "detached": leave_detached,
    "detached, hang": lambda: (leave_detached(), time.sleep(600)),
    "grandchild, hang": lambda: grandchild_then(lambda: time.sleep(600)),
    "grandchild, _exit": lambda: grandchild_then(lambda: os._exit(7)),
    "print": shout,
    "eat": eat,
    "close": close_all,
    "close and stay": close_all_and_stay,
    "lie": lie,
    "close stdout": lambda: sys.stdout.close(),
    "alarm": lambda: signal.alarm(1),
    "nap": lambda: time.sleep(1.3),
    "leave the folder": lambda: os.chdir("/"),
}

def score(solution_str):
    """'ACTION|NUMBER' does the action and returns the number."""
    action, _, number = solution_str.rpartition("|")
    if action:
        ACTIONS[action]()
    return float(number)
'''


@pytest.fixture
def bad_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REWARD_TEST_PIDS", str(tmp_path / "pids"))
    (tmp_path / "pids").touch()  # beside a run folder no new file can be made
    path = tmp_path / "misbehaving.py"
    path.write_text(MISBEHAVING)
    return path


@pytest.fixture
def pool_of() -> Iterator[Callable[..., RewardPool]]:
    pools: list[RewardPool] = []

    def make(function: str | dict[str, float], run_dir: Path | None = None, **settings: Any) -> RewardPool:
        if run_dir:
            run_dir.mkdir(exist_ok=True)
        settings = {"workers": 2, "timeout_s": 20.0, "memory_gb": 0.5} | settings
        settings.setdefault("env", [name for name in ("REWARD_TEST_PIDS",) if name in os.environ])
        pools.append(RewardPool(RewardConfig(function=function, **settings), run_dir))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def group_of(
    texts: Sequence[str], uid: int = 0, source: str = "unknown", truth: Any = "18", extra: dict[str, Any] | None = None, prompt: str = "ask"
) -> Group:
    none = np.zeros(0, dtype=np.int64)
    samples = tuple(Sample(index, none, none.astype(np.float32), "stop", text) for index, text in enumerate(texts))
    return Group(Prompt(uid, none, prompt, source, truth, extra or {}), samples)


def write(folder: Path, text: str, name: str = "mine.py") -> str:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return f"{path}:score"


def values(scores: Sequence[Score]) -> list[float]:
    return [score.value for score in scores]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A killed orphan may wait for its new parent to reap it.
    return process_state(pid) not in ("Z", "X")


def process_state(pid: int) -> str:
    """The letter of /proc, or none where there is no /proc."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.read_text().rpartition(")")[2].split()[0] if stat.exists() else ""


def wait_until_dead(pids: Sequence[int], seconds: float = 60.0) -> list[int]:
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [pid for pid in pids if alive(pid)]


def noted_pids(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "pids").read_text().split()]


# GSM8K

STRICT = [
    ("so 9 * 2 = 18\n#### 18", "18", 1),
    ("#### 18", "some steps\n#### 18", 1),
    ("####18", 18, 1),
    ("#### 18.", "18", 1),
    ("#### $18", "18", 1),
    ("#### -$18", "-18", 1),
    ("#### $-18", "-18", 1),
    ("#### 1,234,567", "1234567", 1),
    ("#### 1234567", "1,234,567", 1),
    ("#### 18.0", "18", 1),
    ("#### 18.50", 18.5, 1),
    ("#### .5", "0.5", 1),
    ("#### +18", "18", 1),
    ("#### 18 apples", "18", 1),
    ("#### 17 ... wait #### 18", "18", 1),
    ("#### 18 ... wait #### 17", "18", 0),
    ("#### 180", "18", 0),
    ("#### 5,6", "56", 0),
    ("#### -18", "18", 0),
    ("#### 18.01", "18", 0),
    ("#### " + "9" * 400, "8" * 400, 0),
    ("the answer is 18", "18", 0),
    ("#### the answer is 18", "18", 0),
    ("####", "18", 0),
    ("", "18", 0),
]
FLEXIBLE = [
    ("the answer is 18", "18", 1),
    ("The answer is $1,018.", "1018", 1),
    ("first 17, then 18", "18", 1),
    ("18 and not 17", "18", 0),
    ("range 10-18", "18", 1),
    ("x=-18", "-18", 1),
    ("#### 18", "18", 1),
    ("no number", "18", 0),
    ("", "18", 0),
]


@pytest.mark.parametrize(("text", "truth", "expected"), STRICT)
def test_gsm8k_strict(text: str, truth: Any, expected: int) -> None:
    assert gsm8k.strict(text, truth)["score"] == expected


@pytest.mark.parametrize(("text", "truth", "expected"), FLEXIBLE)
def test_gsm8k_flexible(text: str, truth: Any, expected: int) -> None:
    assert gsm8k.flexible(text, truth)["score"] == expected


def test_gsm8k_format_part() -> None:
    texts = ["#### 1", "#### none", "1"]
    assert [gsm8k.strict(text, "18")["format"] for text in texts] == [1.0, 0.0, 0.0]
    assert [gsm8k.flexible(text, "18")["format"] for text in texts] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("#### 1,018.50 in all, not 7", "1018.5", "7"),
        ("#### $-018.0", "-18", "-18"),
        ("#### -0.00", "0", "0"),
        ("#### .50", "0.5", "0.5"),
        ("#### 100", "100", "100"),
        ("so 3", None, "3"),
        ("nothing", None, None),
    ],
)
def test_gsm8k_says_what_it_read(text: str, strict: str | None, flexible: str | None) -> None:
    assert (gsm8k.strict(text, "18")["pred"], gsm8k.flexible(text, "18")["pred"]) == (strict, flexible)


@pytest.mark.parametrize("truth", [None, "", "eighteen", "#### eighteen", "18 or 19"])
def test_gsm8k_refuses_a_ground_truth_without_number(truth: Any) -> None:
    with pytest.raises(ValueError, match="holds no number"):
        gsm8k.strict("#### 18", truth)


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [("0", 0, 1), ("False", False, 1), ("0", 1, 0), (" Paris\n", ["London", "paris"], 1), ("Rome", ["London", "paris"], 0), ("7", [7], 1)],
)
def test_exact_match(text: str, truth: Any, expected: int) -> None:
    assert exact_match.score(text, truth)["score"] == expected


@pytest.mark.parametrize("truth", [None, "", " ", [], ["a", ""], [None]])
def test_exact_match_refuses_an_empty_ground_truth(truth: Any) -> None:
    with pytest.raises(ValueError, match="is empty: exact_match needs"):
        exact_match.score("a", truth)


# Functions: names, signatures, results


def load(path: str, **args: Any) -> functions.RewardFunction:
    return functions.load([functions.locate(path)], args)[0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def score(solution_str):\n    retrun 1 +\n", r"syntax error at .*mine\.py:2"),
        ("def other(solution_str): return 1", r"defines no 'score'\. Its functions: other"),
        ("score = 3", r"'score' in .*mine\.py is of type int, not a function"),
        ("import no_such_module_here\ndef score(): return 1", r"ModuleNotFoundError.*\(mine\.py:1\)"),
        ("import sys\nsys.exit(0)", "SystemExit"),
        ("def score(solution_str, weight): return 1", "requires 'weight'"),
        ("def score(solution_str, /): return 1", "requires 'solution_str'"),
        ("def score(solution_str, ground_truths): return 1", "mixes the parameter names"),
        ("import os\nos._exit(5)", "ended its process with exit code 5"),
        ("import os\nos.abort()", "crashed with SIGABRT"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_before_the_run(tmp_path: Path, pool_of: Any, source: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        pool_of(write(tmp_path, source))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gsm9k", "not built in and cannot be loaded: .*FILE.py:NAME"),
        ("no/file.py:score", "cannot read .*No such file"),
        ("x.py:", "FILE.py:NAME"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(pool_of: Any, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        pool_of(name)
    with pytest.raises(UserError, match=message):
        pool_of("gsm8k", sources={"other": name})


def test_args_reach_the_function_and_unknown_ones_are_refused(tmp_path: Path, pool_of: Any) -> None:
    name = write(tmp_path, "def score(solution_str, weight=1.0): return weight * float(solution_str)")
    pool = pool_of(name, args={"weight": 3.0}, sources={"plain": "gsm8k"})
    assert values(pool.collect([group_of(["2", "4"])])[0]) == [6.0, 12.0]
    with pytest.raises(UserError, match=r"reward\.args\.wieght: no configured reward function"):
        pool_of(name, args={"wieght": 3.0})
    with pytest.raises(UserError, match=r"reward\.args\.weight: no configured reward function"):
        pool_of("gsm8k", args={"weight": 3.0})
    with pytest.raises(UserError, match="the run itself gives this parameter"):
        pool_of(name, args={"solution_str": "x"})


def test_verls_signature_and_our_prompt(tmp_path: Path, pool_of: Any) -> None:
    name = write(
        tmp_path,
        """
        def score(data_source, solution_str, ground_truth, extra_info=None, prompt_str=""):
            assert (data_source, prompt_str) == ("math", "what?"), (data_source, prompt_str)
            right = ground_truth[int(solution_str)]
            return {"score": right, "index": extra_info["index"], "note": "text is no part", "nan": float("nan"), "pred": solution_str}
        """,
    )
    group = group_of(["1", "0"], source="math", truth=np.array([0.25, 0.75]), extra={"index": 7}, prompt="what?")
    assert pool_of(name).collect([group])[0] == [Score(0.75, {"index": 7.0}, answer="1"), Score(0.25, {"index": 7.0}, answer="0")]


def test_only_what_is_named_is_passed(tmp_path: Path) -> None:
    assert load(write(tmp_path, "def score(ground_truth, solution_str): return 1")).takes == ("solution_str", "ground_truth")
    assert load(write(tmp_path, "def score(**kwargs): return 1")).takes == functions.VERL
    assert load(write(tmp_path, "def score(solution_strs, **kwargs): return 1")).takes == functions.BATCH[:4]
    assert load(write(tmp_path, "def score(solution_str, **kwargs): return 1"), a=1).args == {"a": 1}


class Scalar:
    """As a torch tensor answers: not a registered number, but one element to take out."""

    def __init__(self, *elements: float) -> None:
        self.elements = elements

    def item(self) -> float:
        if len(self.elements) != 1:
            raise RuntimeError("not a scalar")
        return self.elements[0]


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (1, 1.0),
        (True, 1.0),
        (0.5, 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.array(0.5), 0.5),
        (Scalar(0.5), 0.5),
        ({"score": np.bool_(True), "part": 2}, 1.0),
    ],
)
def test_results_that_are_numbers(result: Any, expected: float) -> None:
    assert functions.checked(result, 0)[0] == expected


@pytest.mark.parametrize(
    ("pred", "answer"),
    [
        (" 1/2 ", "1/2"),
        (18, "18"),
        (18.0, "18"),
        (0.1, "0.1"),
        (10**30, str(10**30)),
        (np.int64(7), "7"),
        (np.float32(0.5), "0.5"),
        (np.array([3.0]), "3"),
        ("x" * 500, "x" * 200),
        ("a\udcffb", "a?b"),
        ("  ", None),
        (None, None),
        (float("nan"), None),
        ([1, 2], None),
    ],
)
def test_the_answer_is_kept_as_text_and_is_no_part(pred: Any, answer: str | None) -> None:
    assert functions.checked({"score": 1, "acc": True, "pred": pred}, 0) == (1.0, {"acc": 1.0}, answer)


@pytest.mark.parametrize(
    "result",
    [np.nan, float("inf"), 10**400, "1", None, [1], 1j, np.ones(2), Scalar(1, 2), {"value": 1}, {"score": np.nan}, {"score": "1"}],
)
def test_results_that_are_not(result: Any) -> None:
    with pytest.raises(functions.NotANumber):
        functions.checked(result, 0)


@pytest.mark.parametrize(("returned", "shown"), [("float('nan')", "nan"), ("float('inf')", "inf"), ("'1.0'", "'1.0'"), ("None", "None")])
def test_a_reward_that_is_no_number_stops_the_run(tmp_path: Path, pool_of: Any, returned: str, shown: str) -> None:
    name = write(tmp_path, f"def score(solution_str): return {returned} if solution_str.startswith('bad') else 1.0")
    pool = pool_of(name)
    with pytest.raises(UserError) as caught:
        pool.collect([group_of(["good", "bad sample", "good"], source="maths")])
    for part in (name, f"returned {shown} ", "'maths'", "'bad sample'"):
        assert part in str(caught.value)
    with pytest.raises(UserError):
        pool.submit(group_of(["good"]))


def test_the_page_about_rewards_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "rewards.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(\w+)\n(.*?)```", page, re.DOTALL)
    assert {language for language, _ in blocks} == {"python", "toml", "sh", "text"}
    for language, text in blocks:
        if language in ("sh", "text") or "JUDGE_URL" in text:  # test_examples.py and the test below run these
            continue
        if language == "toml":
            sections = tomllib.loads(text)
            assert RewardConfig(**sections.pop("reward")) and set(sections) <= {"reward_model"}
        elif "def " in text:
            name = re.findall(r"def (\w+)", text)[0]
            assert load(write(tmp_path, text).replace(":score", f":{name}")).takes
        else:
            exec(text, {})
            assert capsys.readouterr().out.splitlines() == re.findall(r"  # (.*)", text)


# Routing and order


def test_functions_are_routed_by_data_source(tmp_path: Path, pool_of: Any) -> None:
    mine = write(tmp_path, "def score(solution_str): return 7")
    pool = pool_of("gsm8k", sources={"loose": "gsm8k_flexible", "mine": mine})
    groups = [group_of(["so 18", "#### 18"], source=source) for source in ("anything", "loose", "mine")]
    assert [values(scores) for scores in pool.collect(groups)] == [[0.0, 1.0], [1.0, 1.0], [7.0, 7.0]]
    assert pool.stats().calls == 6


def test_scores_come_in_the_order_asked_for_whatever_finishes_first(tmp_path: Path, pool_of: Any) -> None:
    name = write(
        tmp_path,
        """
        import time
        def score(solution_str):
            time.sleep(float(solution_str) / 100)
            return float(solution_str)
        """,
    )
    pool = pool_of(name, workers=4)
    groups = [group_of([str((uid * 7 + index * 5) % 11) for index in range(3)], uid) for uid in range(6)]
    for group in groups:
        pool.submit(group)
    asked = groups[::-1]
    expected = [[float(sample.text) for sample in group.samples] for group in asked]
    assert [values(scores) for scores in pool.collect(asked)] == expected


def test_work_goes_on_before_collect(tmp_path: Path, pool_of: Any) -> None:
    name = write(
        tmp_path,
        """
        import pathlib, time
        def score(solution_str, extra_info):
            folder = pathlib.Path(extra_info["folder"])
            while not (folder / "submitted").exists():
                time.sleep(0.01)
            (folder / solution_str).touch()
            return 1
        """,
    )
    pool = pool_of(name)
    pool.submit(group_of(["a"], 0, extra={"folder": str(tmp_path)}))
    (tmp_path / "submitted").touch()  # a submit that waited for the call would not come here
    deadline = time.monotonic() + 60
    while not (tmp_path / "a").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    group = group_of(["b", "c"], 1, extra={"folder": str(tmp_path)})
    assert values(pool.collect([group])[0]) == [1.0, 1.0]
    assert {"b", "c"} <= {path.name for path in tmp_path.iterdir()}


def test_slow_calls_use_all_workers(tmp_path: Path, pool_of: Any) -> None:
    name = write(
        tmp_path,
        """
        import os, pathlib, time
        def score(extra_info):
            folder = pathlib.Path(extra_info["folder"])
            (folder / str(os.getpid())).touch()
            while len(list(folder.iterdir())) < 4:
                time.sleep(0.01)
            return os.getpid()
        """,
    )
    (tmp_path / "pids").mkdir()
    pool = pool_of(name, workers=4, timeout_s=100.0)  # which a call takes only if there are fewer processes
    assert len(set(values(pool.collect([group_of(["a"] * 8, extra={"folder": str(tmp_path / "pids")})])[0]))) == 4


def test_an_empty_group_has_no_scores(pool_of: Any) -> None:
    assert pool_of("gsm8k").collect([group_of([])]) == [[]]


def test_random_numbers_depend_on_the_sample_only(tmp_path: Path, pool_of: Any) -> None:
    name = write(
        tmp_path,
        """
        import random, numpy
        def score(solution_str):
            return random.random() + numpy.random.rand() + hash(solution_str) % 97
        """,
    )
    groups = [[group_of(["a", "b", "c", "d"], uid) for uid in range(4)] for _ in range(2)]
    first = [values(scores) for scores in pool_of(name, workers=1, memory_gb=2.0).collect(groups[0])]
    second = [values(scores) for scores in pool_of(name, workers=3, memory_gb=2.0).collect(groups[1][::-1])][::-1]
    assert first == second
    assert len({value for scores in first for value in scores}) == 16


# Weighted sums

PARTED = """
    def length(solution_str): return {"score": len(solution_str), "words": len(solution_str.split()), "pred": "first"}
    def fails(solution_str): return 1 / (solution_str != "#### 18")
    def score(solution_strs): return [{"score": -1.0, "size": len(solution_strs), "pred": "last"}] * len(solution_strs)
    def reward_model(): return 3.0
    def huge(): return 1e308
    def large(): return 1e36
    """


def parted(folder: Path) -> str:
    return write(folder, PARTED).removesuffix(":score")


def test_a_sum_weighs_its_functions_and_keeps_what_each_said(tmp_path: Path, pool_of: Any) -> None:
    file = parted(tmp_path)
    pool = pool_of({f"{file}:score": 0.5, f"{file}:length": -2.0, "gsm8k": 10.0})
    first, second = pool.collect([group_of(["#### 18", "no"])])[0]
    own = {"score": -1.0, "score/size": 2.0}
    assert first == Score(
        -4.5, own | {"length": 7.0, "length/words": 2.0, "gsm8k": 1.0, "gsm8k/format": 1.0, "gsm8k/flexible": 1.0}, answer="last"
    )
    assert second == Score(
        -4.5, own | {"length": 2.0, "length/words": 1.0, "gsm8k": 0.0, "gsm8k/format": 0.0, "gsm8k/flexible": 0.0}, answer="last"
    )
    # The batch function is called once for the group, the others once for each sample.
    assert pool.stats().calls == 5


def test_the_answer_is_the_first_that_a_function_gives(tmp_path: Path, pool_of: Any) -> None:
    file = parted(tmp_path)
    pool = pool_of({f"{file}:large": 1e-36, "gsm8k": 1.0, f"{file}:length": 1.0})
    assert [score.answer for score in pool.collect([group_of(["#### 18", "no"])])[0]] == ["18", "first"]


def test_a_single_name_is_as_it_always_was(tmp_path: Path, pool_of: Any) -> None:
    groups = [group_of(["#### 18", "no"]), group_of(["#### 18", "no"], 1)]
    plain, table = pool_of("gsm8k"), pool_of({"gsm8k": 1.0})
    expected = [[Score(1.0, {"format": 1.0, "flexible": 1.0}, answer="18"), Score(0.0, {"format": 0.0, "flexible": 0.0})]]
    assert plain.collect(groups[:1]) == table.collect(groups[1:]) == expected
    assert plain.stats().calls == table.stats().calls == 2
    assert pool_of({"gsm8k": -3.0}).collect(groups[:1])[0][0] == Score(-3.0, {"format": 1.0, "flexible": 1.0}, answer="18")


def test_sums_are_routed_by_data_source(tmp_path: Path, pool_of: Any) -> None:
    file = parted(tmp_path)
    pool = pool_of("gsm8k", sources={"sum": {"gsm8k": 1.0, f"{file}:length": 1.0}})
    groups = [group_of(["#### 18"], source=source) for source in ("plain", "sum")]
    (plain,), (both,) = pool.collect(groups)
    assert (plain.value, dict(plain.parts)) == (1.0, {"format": 1.0, "flexible": 1.0})
    assert (both.value, both.parts["gsm8k"], both.parts["length"]) == (8.0, 1.0, 7.0)


@pytest.mark.parametrize(("on_error", "value"), [("exclude", 0.0), ("score", -7.0)])
def test_if_one_function_fails_so_does_the_sum(tmp_path: Path, pool_of: Any, on_error: str, value: float) -> None:
    file = parted(tmp_path)
    pool = pool_of({"gsm8k": 1.0, f"{file}:fails": 1.0}, on_error=on_error, error_score=-7.0)
    failed, good = pool.collect([group_of(["#### 18", "18"])])[0]
    assert failed.error is not None and "fails raised ZeroDivisionError" in failed.error
    assert (failed.value, failed.answer, dict(failed.parts)) == (value, None, {})
    assert (good.value, good.error, good.parts["fails"]) == (1.0, None, 1.0)
    assert (pool.stats().calls, pool.stats().errors) == (4, 1)


def test_rewards_of_one_name_are_told_apart() -> None:
    names = ["a.py:score", "b.py:score", "b.py:style", "gsm8k", "mine/gsm8k.py:gsm8k"]
    assert list(sums.short_labels(names).values()) == ["a.py:score", "b.py:score", "style", "gsm8k", "mine/gsm8k.py:gsm8k"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ({"huge": 1.0}, "huge returned 1e+308, which is too large"),
        ({"large": 10.0, "fails": 1.0}, "the weighted sum of 10 x 1e+36, 1 x 1 is"),
    ],
)
def test_a_reward_beyond_float32_is_a_failed_call(tmp_path: Path, pool_of: Any, function: dict[str, float], message: str) -> None:
    file = parted(tmp_path)
    pool = pool_of({f"{file}:{name}": weight for name, weight in function.items()}, on_error="score", error_score=-7.0)
    (score,) = pool.collect([group_of(["18"])])[0]
    assert score.value == -7.0 and score.error is not None and message in score.error and "float32" in score.error


def test_the_largest_rewards_give_finite_advantages() -> None:
    rewards = [functions.LARGEST, -functions.LARGEST] * 512
    none = np.zeros(1, dtype=np.int64)
    rows = [Row(none, np.ones(1, dtype=bool), group=0, reward=reward) for reward in rewards]
    for found in (group_relative(rows, False), group_relative(rows, True), leave_one_out(rows), group_mean_whitened(rows, True)):
        assert all(row.advantages is not None and np.isfinite(row.advantages).all() for row in found)


def test_the_reward_model_is_left_to_the_device(tmp_path: Path, pool_of: Any) -> None:
    mine = f"{parted(tmp_path)}:reward_model"
    pool = pool_of(
        {"gsm8k": 2.0, "reward_model": 1.0, mine: 1.0}, sources={"model": "reward_model", "two": {"gsm8k": 2.0, "reward_model": 1.0}}
    )
    groups = [group_of(["#### 18", "no"], source=source) for source in ("anything", "model", "two")]
    pool.submit(groups[0])
    three, model_only, two = pool.collect(groups)
    assert two[0] == Score(2.0, {"gsm8k": 1.0, "gsm8k/format": 1.0, "gsm8k/flexible": 1.0}, answer="18")
    assert three[0] == Score(5.0, {"gsm8k": 1.0, "gsm8k/format": 1.0, "gsm8k/flexible": 1.0, mine: 3.0}, answer="18")
    assert model_only == [Score(0.0), Score(0.0)]
    assert pool.stats().calls == 6


def test_without_functions_there_are_no_processes() -> None:
    before = set(family_of(os.getpid(), generations=1))
    with contextlib.closing(RewardPool(RewardConfig(function={"reward_model": 0.5}))) as pool:
        assert pool.collect([group_of(["a", "b"]), group_of([], 1)]) == [[Score(0.0), Score(0.0)], []]
        assert set(family_of(os.getpid(), generations=1)) <= before and pool.memory_limited
        assert pool.stats().calls == 0
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(group_of(["a"], 2))


# Batch functions

BATCH = """
    import os, time
    def score(data_sources, solution_strs, ground_truths, extra_infos):
        assert len(data_sources) == len(ground_truths) == len(extra_infos) == len(solution_strs)
        if "short" in solution_strs:
            return [1.0]
        if "scalar" in solution_strs:
            return 1.0
        if "exit" in solution_strs:
            os._exit(1)
        if "nan" in solution_strs:
            return [float("nan") if text == "nan" else 1.0 for text in solution_strs]
        return [{"score": float(text), "size": len(solution_strs)} for text in solution_strs]
    """


def test_a_batch_function_gets_a_group_a_call(tmp_path: Path, pool_of: Any) -> None:
    pool = pool_of(write(tmp_path, BATCH))
    groups = [group_of(["1", "2", "3"], 0), group_of(["4", "short", "6"], 1), group_of(["scalar"], 2), group_of(["exit", "1"], 3)]
    good, short, scalar, dead = pool.collect(groups)
    assert good == [Score(value, {"size": 3.0}) for value in (1.0, 2.0, 3.0)]
    assert all(score.error and "returned 1 results for 3 samples" in score.error for score in short) and len(short) == 3
    assert scalar[0].error is not None and "a batch function returns a list" in scalar[0].error
    assert len(dead) == 2 and all(score.error and "exit code 1" in score.error for score in dead)
    stats = pool.stats()
    assert (stats.calls, stats.errors, stats.crashes) == (4, 2, 1)
    with pytest.raises(UserError, match="that begins 'nan'"):
        pool.collect([group_of(["1", "nan"], 4)])


# Bad behaviour: (action, what is counted, what the error says)

FAILURES = [
    ("raise", "errors", "raised ValueError: no answer here (misbehaving.py:"),
    ("raise unprintable", "errors", "raised Mute"),
    ("sys.exit", "errors", "raised SystemExit: 3"),
    ("interrupt", "errors", "raised KeyboardInterrupt"),
    ("eat", "errors", "more memory than reward.memory_gb"),
    ("_exit", "crashes", "ended its process with exit code 0"),
    ("segfault", "crashes", "crashed with SIGSEGV at File"),
    ("abort", "crashes", "crashed with SIGABRT at File"),
    ("grandchild, _exit", "crashes", "exit code 7"),
    ("close", "crashes", "closed the descriptors"),
    ("close and stay", "crashes", "closed the descriptors"),
    ("lie", "crashes", "wrote into the connection"),
]
HANGS = ["hang", "spin", "stop itself", "grandchild, hang", "detached, hang"]
HARMLESS = ["fork", "grandchild", "print"]


FAILURES_ALONE = [failure for failure in FAILURES if failure[0] in ("raise", "eat", "_exit", "segfault", "close and stay", "lie")]


@pytest.mark.parametrize(("action", "counted", "message"), sample_cases(FAILURES, *FAILURES_ALONE))
def test_a_failed_call_costs_only_its_sample(bad_file: Path, pool_of: Any, tmp_path: Path, action: str, counted: str, message: str) -> None:
    pool = pool_of(f"{bad_file}:score", run_dir=tmp_path / "run")
    texts = ["|1", "|2", f"{action}|9", "|4", "|5"]
    (scores,) = pool.collect([group_of(texts)])
    assert [(score.value, score.error is None) for score in scores] == [(1, True), (2, True), (0, False), (4, True), (5, True)]
    assert scores[2].error is not None and message in scores[2].error
    stats = pool.stats()
    assert (stats.calls, stats.failed, getattr(stats, counted)) == (5, 1, 1)
    assert message in stats.last and "1 of 5 reward calls failed" in str(stats)
    written = json.loads((tmp_path / "run" / ERRORS_FILE).read_text())
    assert (written["text"], written["samples"], written["message"]) == (texts[2], [2], scores[2].error)
    assert values(pool.collect([group_of(["|6"], 1)])[0]) == [6.0]
    if "grandchild" in action:
        assert wait_until_dead(noted_pids(tmp_path)) == []


@pytest.mark.parametrize("action", sample_cases(HANGS, "detached, hang", long=("spin", "stop itself")))
def test_a_call_past_its_deadline_is_killed_with_what_it_started(bad_file: Path, pool_of: Any, tmp_path: Path, action: str) -> None:
    pool = pool_of(f"{bad_file}:score", timeout_s=2.0)
    began = time.monotonic()
    (scores,) = pool.collect([group_of(["|1", f"{action}|9", "|3"])])
    assert 1.9 < time.monotonic() - began < 100.0  # the call itself would take longer
    assert values(scores) == [1.0, 0.0, 3.0]
    assert scores[1].error is not None and "deadline of 2 s" in scores[1].error
    assert (pool.stats().timeouts, pool.stats().failed) == (1, 1)
    if "," in action and (sys.platform == "linux" or "detached" not in action):
        assert wait_until_dead(noted_pids(tmp_path)) == []


@pytest.mark.parametrize("action", HARMLESS)
def test_odd_but_harmless_calls_are_scored(bad_file: Path, pool_of: Any, action: str) -> None:
    pool = pool_of(f"{bad_file}:score", workers=1)
    texts = ["|1", f"{action}|2", "|3"] * 2
    assert values(pool.collect([group_of(texts)])[0]) == [1.0, 2.0, 3.0] * 2
    assert (pool.stats().failed, pool.stats().retries) == (0, 0)


def test_what_a_call_leaves_behind_does_not_reach_the_next(bad_file: Path, pool_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bad_file.parent)
    bad_file.write_text(MISBEHAVING + "\nACTIONS['here'] = lambda: Path('misbehaving.py').read_text()\n")
    pool = pool_of("misbehaving.py:score", workers=1)
    texts = ["close stdout|1", "print|2", "alarm|3", "nap|4", "leave the folder|5", "here|6"]
    assert values(pool.collect([group_of(texts)])[0]) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert (pool.stats().failed, pool.stats().retries) == (0, 0)


@pytest.mark.long
def test_everything_bad_at_once(bad_file: Path, pool_of: Any) -> None:
    pool = pool_of(f"{bad_file}:score", timeout_s=5.0, on_error="score", error_score=-1.0, workers=3)
    actions = [action for action, _, _ in FAILURES] + HARMLESS + ["hang", "spin"]
    groups = [group_of([f"|{uid}", f"{action}|{uid}", f"|{uid + 0.5}"], uid) for uid, action in enumerate(actions)]
    for group in groups:
        pool.submit(group)
    for uid, (action, scores) in enumerate(zip(actions, pool.collect(groups), strict=True)):
        middle = uid if action in HARMLESS else -1.0
        assert (action, values(scores)) == (action, [uid, middle, uid + 0.5]), [score.error for score in scores]
        assert [score.error is None for score in scores] == [True, action in HARMLESS, True]


@pytest.mark.parametrize("action", ["grandchild", "detached"])
def test_leftover_grandchildren_die_with_the_pool(bad_file: Path, pool_of: Any, tmp_path: Path, action: str) -> None:
    pool = pool_of(f"{bad_file}:score")
    assert values(pool.collect([group_of([f"{action}|1", f"{action}|2"])])[0]) == [1.0, 2.0]
    pids = noted_pids(tmp_path)
    assert len(pids) == 2 and all(alive(pid) for pid in pids)
    pool.close()
    assert wait_until_dead(pids) == []


@pytest.mark.skipif(sys.platform != "linux", reason="counting children needs /proc")
def test_processes_left_behind_do_not_pile_up(bad_file: Path, pool_of: Any, tmp_path: Path) -> None:
    pool = pool_of(f"{bad_file}:score", workers=1)
    count = MOST_CHILDREN * 2
    assert values(pool.collect([group_of(["grandchild|1"] * count)])[0]) == [1.0] * count
    assert sum(alive(pid) for pid in noted_pids(tmp_path)) <= MOST_CHILDREN + 1


def test_a_function_that_always_crashes_still_finishes(bad_file: Path, pool_of: Any) -> None:
    pool = pool_of(f"{bad_file}:score")
    (scores,) = pool.collect([group_of(["_exit|1"] * 12)])
    assert all(score.error is not None for score in scores)
    assert pool.stats().crashes == 12


def test_memory_that_others_leaked_is_not_held_against_a_call(tmp_path: Path, pool_of: Any) -> None:
    name = write(tmp_path, "LEAK = []\ndef score(solution_str):\n    LEAK.append(bytearray(100 * 2**20))\n    return float(solution_str)")
    pool = pool_of(name, workers=1)
    assert values(pool.collect([group_of([str(index) for index in range(12)])])[0]) == list(range(12))
    assert pool.stats().failed == 0 and pool.stats().retries >= 2


def test_a_crash_that_others_prepared_is_not_held_against_a_call(tmp_path: Path, pool_of: Any) -> None:
    name = write(
        tmp_path,
        """
        import os
        spoilt = False
        def score(solution_str):
            global spoilt
            if solution_str == "victim" and spoilt:
                os._exit(1)
            if solution_str == "spoil":
                spoilt = True
            return 1.0
        """,
    )
    pool = pool_of(name, workers=1)
    pool.collect([group_of(["spoil"])])
    assert values(pool.collect([group_of(["victim"], 1)])[0]) == [1.0]
    assert (pool.stats().failed, pool.stats().retries) == (0, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="seeing that a process is stopped needs /proc")
def test_a_process_that_others_stopped_is_not_held_against_a_call(bad_file: Path, pool_of: Any, tmp_path: Path) -> None:
    pool = pool_of(f"{bad_file}:score", workers=1, timeout_s=2.0)
    assert values(pool.collect([group_of(["stop when told|1"])])[0]) == [1.0]
    (tmp_path / "pids.stop").touch()
    (stopped,) = pool._dispatcher._processes
    while process_state(stopped._process.pid) != "T":
        time.sleep(0.01)
    assert values(pool.collect([group_of(["|2"], 1)])[0]) == [2.0]
    assert (pool.stats().failed, pool.stats().retries) == (0, 1)


def test_a_process_that_is_slow_to_end_still_says_how(bad_file: Path, pool_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "EXIT_GRACE_S", 0.0)
    pool = pool_of(f"{bad_file}:score")
    for uid, (action, message) in enumerate(
        [("_exit", "exit code 0"), ("segfault", "SIGSEGV at File"), ("close", "closed the"), ("close and stay", "closed the")]
    ):
        (scores,) = pool.collect([group_of([f"{action}|9"] * 4, uid)])
        assert all(score.error is not None and message in score.error for score in scores), [score.error for score in scores]


@pytest.mark.parametrize("what", ["socket.socketpair", "os.pipe"])
def test_files_that_the_system_refuses_for_a_while_cost_nothing(
    bad_file: Path, pool_of: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A process that crashed is replaced when descriptors are there again."""
    pool = pool_of(f"{bad_file}:score", workers=1)
    module, _, name = what.partition(".")
    own, refusals = getattr(getattr(process, module), name), [OSError(errno.EMFILE, "Too many open files") for _ in range(2)]

    def refuse(*given: Any) -> Any:
        if sys._getframe(1).f_code.co_filename == process.__file__ and refusals:
            raise refusals.pop()
        return own(*given)

    monkeypatch.setattr(getattr(process, module), name, refuse)
    assert values(pool.collect([group_of(["1", "abort|1", "2"])])[0]) == [1.0, 0.0, 2.0]
    assert not refusals and pool.stats().failed == pool.stats().crashes == 1


def test_a_call_that_needs_a_new_process_does_not_wait_for_ever(tmp_path: Path, pool_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process lives, but the call must be tried in a fresh one."""
    monkeypatch.setattr("fulltilt.reward.dispatch.NEEDED_START_TRIES", 2)
    source = "import os, time\ndef score(solution_str): return time.sleep(0.15) or 1.0 if solution_str == 'good' else os._exit(3)"
    pool = pool_of(write(tmp_path, source))
    while not all(process.used for process in pool._dispatcher._processes) or len(pool._dispatcher._processes) < 2:
        pool.collect([group_of(["good"] * 4)])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    with pytest.raises(UserError, match=r"a reward process could not be started: .*missing"):
        pool.collect([group_of(["bad"], 1)])


def test_counts_in_words() -> None:
    assert str(RewardStats(4)) == "4 reward calls, none failed"
    assert str(RewardStats(4, timeouts=1, last="late")) == "1 of 4 reward calls failed (1 ran out of time); last: late"


def test_the_file_is_read_once(tmp_path: Path, pool_of: Any) -> None:
    name = write(tmp_path, "import os\ndef score(solution_str):\n    if solution_str == 'exit': os._exit(0)\n    return 1")
    pool = pool_of(name, workers=1)
    write(tmp_path, "def score(solution_str): return 2")
    assert values(pool.collect([group_of(["a", "exit", "b"])])[0]) == [1.0, 0.0, 1.0]


def test_the_files_own_imports_work_and_may_be_named_like_the_standard_library(tmp_path: Path, pool_of: Any) -> None:
    (tmp_path / "helper_of_mine.py").write_text("VALUE = 5")
    name = write(tmp_path, "import helper_of_mine\ndef score(solution_str): return helper_of_mine.VALUE", name="json.py")
    assert values(pool_of(name).collect([group_of(["a"])])[0]) == [5.0]


def test_steps_can_be_told_apart(bad_file: Path, pool_of: Any) -> None:
    pool = pool_of(f"{bad_file}:score")
    pool.collect([group_of(["raise|1", "|2"])])
    before = pool.stats()
    pool.collect([group_of(["|1", "|2", "|3"], 1)])
    step = pool.stats().since(before)
    assert (step.calls, step.failed, step.last) == (3, 0, "")
    assert before.errors == 1


def test_a_process_that_cannot_start_is_said(pool_of: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *guard.py*) exec {sys.executable} "$@";; esac\necho no interpreter today >&2\nexit 9\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(UserError, match=r"exit code 9.*no interpreter today"):
        pool_of("gsm8k")


def test_a_guard_that_cannot_start_is_said_and_leaves_no_folder(pool_of: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UserError, match=r"guard of the reward processes could not be started: .*missing"):
        pool_of("gsm8k")
    assert os.listdir(tmp_path) == []


def test_workers_are_light_and_modest(tmp_path: Path, pool_of: Any) -> None:
    name = write(
        tmp_path,
        """
        import os, resource, sys
        def score():
            killed_first = sys.platform != "linux" or open("/proc/self/oom_score_adj").read().strip() == "1000"
            return {
                "score": 1,
                "heavy": len({"torch", "transformers", "numpy", "pydantic"} & set(sys.modules)),
                "threads": int(os.environ["OMP_NUM_THREADS"]),
                "core dump": resource.getrlimit(resource.RLIMIT_CORE)[0],
                "killed first": killed_first,
            }
        """,
    )
    (score,) = pool_of(name).collect([group_of(["a"])])[0]
    assert score.parts == {"heavy": 0, "threads": 1, "core dump": 0, "killed first": 1}


def test_a_fork_of_the_trainer_does_not_close_the_pool(pool_of: Any) -> None:
    pool = pool_of("gsm8k")
    child = os.fork()
    if child == 0:
        pool.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert values(pool.collect([group_of(["#### 18"])])[0]) == [1.0]


PARENT = """
    import os, sys, time
    from pathlib import Path
    import numpy as np
    from fulltilt.schema import RewardConfig
    from fulltilt.records import Group, Prompt, Sample
    from fulltilt.reward.base import RewardPool

    none = np.zeros(0, dtype=np.int64)
    pool = RewardPool(RewardConfig(function=sys.argv[1], workers=2, timeout_s=600))
    pool.submit(Group(Prompt(0, none, ""), tuple(Sample(i, none, none, "stop", "x") for i in range(2))))
    noted = Path(sys.argv[2])
    while not noted.exists() or len(noted.read_text().split()) < 2:
        time.sleep(0.05)
    if sys.argv[3] == "stay":
        time.sleep(600)
    """


def run_parent(folder: Path, function: str, then: str) -> subprocess.Popen[bytes]:
    script = folder / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    (folder / "tmp").mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(folder / "tmp")}
    return subprocess.Popen([sys.executable, str(script), function, str(folder / "pids"), then], env=environment)


def test_a_trainer_that_forgets_to_close_still_ends(tmp_path: Path) -> None:
    name = write(
        tmp_path,
        f"""
        import os, time
        def score():
            with open({str(tmp_path / "pids")!r}, "a") as file:
                file.write(f"{{os.getpid()}}\\n")
            time.sleep(600)
        """,
    )
    assert run_parent(tmp_path, name, "end").wait(120) == 0
    assert wait_until_dead(noted_pids(tmp_path)) == []


@pytest.mark.parametrize("busy", ["time.sleep(600)", "[None for _ in iter(int, 1)]"])
def test_workers_die_with_a_killed_trainer(tmp_path: Path, busy: str) -> None:
    name = write(
        tmp_path,
        f"""
        import os, subprocess, time
        def score():
            child = subprocess.Popen(["sleep", "600"])
            with open({str(tmp_path / "pids")!r}, "a") as file:
                file.write(f"{{os.getpid()}}\\n{{child.pid}}\\n")
            {busy}
        """,
    )
    parent = run_parent(tmp_path, name, "stay")
    deadline = time.monotonic() + 120
    while not (tmp_path / "pids").exists() or len(noted_pids(tmp_path)) < 4:
        assert time.monotonic() < deadline and parent.poll() is None
        time.sleep(0.05)
    pids = noted_pids(tmp_path)
    assert all(alive(pid) for pid in pids)
    assert len(os.listdir(tmp_path / "tmp")) == 1
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert wait_until_dead(pids) == []
    deadline = time.monotonic() + 60
    while os.listdir(tmp_path / "tmp"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_interrupt_of_the_terminal_does_not_reach_the_workers(tmp_path: Path, pool_of: Any) -> None:
    name = write(tmp_path, "import os\ndef score(): return float(os.getsid(0) == os.getpid() == os.getpgid(0))")
    assert values(pool_of(name).collect([group_of(["a"])])[0]) == [1.0]


def test_a_closed_pool_says_so_and_leaves_no_process(tmp_path: Path, pool_of: Any) -> None:
    name = write(tmp_path, "import os, time\ndef score():\n    time.sleep(0.1)\n    return os.getpid()")
    pool = pool_of(name)
    pids = [int(value) for value in values(pool.collect([group_of(["a"] * 4)])[0])]
    pool.close()
    pool.close()
    assert wait_until_dead(pids) == []
    with pytest.raises(RuntimeError, match="closed"):
        pool.collect([group_of(["a"])])


def test_an_error_that_is_no_utf8_is_written_down_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text('def score(solution_str):\n    raise ValueError("bad \\udcff byte")\n')
    config = RewardConfig(function=f"{tmp_path / 'odd.py'}:score", workers=1)
    with contextlib.closing(RewardPool(config, tmp_path)) as pool:
        ((scored,),) = pool.collect([group_of(["x"])])
    assert scored.error is not None and "bad" in scored.error
    assert "bad" in (tmp_path / "reward_errors.jsonl").read_text(encoding="utf-8")


# Asynchronous functions: a judge behind a real server

ASK = """
    import asyncio, os
    LOOPS = set()
    async def ask(text):
        LOOPS.add(id(asyncio.get_running_loop()))
        reader, writer = await asyncio.open_connection("127.0.0.1", int(os.environ["JUDGE_PORT"]))
        writer.write(f"GET /{text} HTTP/1.0\\r\\n\\r\\n".encode())
        answer = (await reader.read()).decode()
        writer.close()
        if " 200 " not in answer.partition("\\r\\n")[0]:
            raise RuntimeError(answer.partition("\\r\\n")[0])
        return float(answer.rpartition("\\r\\n")[2])
    async def score(solution_str):
        if solution_str == "forever":
            await asyncio.sleep(600)
        if solution_str == "deaf":
            while True:
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    pass
        if solution_str == "blocks":
            __import__("time").sleep(600)
        if solution_str == "exits":
            os._exit(3)
        return {"score": await ask(solution_str), "loops": len(LOOPS), "pid": os.getpid()}
    async def batch(solution_strs):
        return await asyncio.gather(*map(ask, solution_strs))
    """


class Judge(ThreadingHTTPServer):
    """Answers /NUMBER with the number, after a while; the first `failures` requests for /NUMBER?flaky get the status 503. No request is
    answered until `together` have been in flight at once."""

    request_queue_size = 64
    daemon_threads = True

    def __init__(self, latency_s: float = 0.05, failures: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.latency_s, self.failures = latency_s, failures
        self.asked: list[str] = []
        self.in_flight = self.most = 0
        self.together = 1
        self.lock = threading.Condition()


class _Answer(BaseHTTPRequestHandler):
    server: Judge

    def do_POST(self) -> None:
        """As an OpenAI-compatible server: grades the answer with the number that it is."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (self.path, self.headers["Authorization"]) == ("/v1/chat/completions", "Bearer key-of-the-judge")
        self.path = "/" + re.findall(r"Answer: (.*)", request["messages"][0]["content"])[0]
        self.do_GET()

    def do_GET(self) -> None:
        judge, (number, _, flaky) = self.server, self.path[1:].partition("?")
        with judge.lock:
            judge.asked.append(number)
            judge.in_flight += 1
            judge.most = max(judge.most, judge.in_flight)
            fails = bool(flaky) and judge.asked.count(number) <= judge.failures
            judge.lock.notify_all()
            judge.lock.wait_for(lambda: judge.most >= judge.together, 60)
        time.sleep(judge.latency_s)
        with judge.lock:
            judge.in_flight -= 1
        self.send_response(503 if fails else 200)
        self.end_headers()
        chosen = {"choices": [{"message": {"role": "assistant", "content": number}}]}
        self.wfile.write((number if self.command == "GET" else json.dumps(chosen)).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    with Judge() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("JUDGE_PORT", str(server.server_address[1]))
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("concurrency", [1, 16])
def test_async_calls_are_in_flight_together_and_scores_stay_with_their_samples(
    tmp_path: Path, pool_of: Any, judge: Judge, concurrency: int
) -> None:
    judge.together = concurrency
    pool = pool_of(write(tmp_path, ASK), concurrency=concurrency, env=["JUDGE_PORT"], timeout_s=100.0)
    groups = [group_of([str(4 * uid + index) for index in range(4)], uid) for uid in range(3 * concurrency)]
    for group in groups:
        pool.submit(group)
    for uid, scores in enumerate(pool.collect(groups)):
        assert values(scores) == [4 * uid + index for index in range(4)]
    assert judge.most == concurrency
    # One process, and one event loop for its whole life: a client made at module level works in every call.
    assert {score.parts["loops"] for score in pool.collect([group_of(["1", "2"], 99)])[0]} == {1.0}
    assert pool.stats().calls == len(judge.asked) == 12 * concurrency + 2


def test_the_judge_of_the_page_about_rewards_runs(tmp_path: Path, pool_of: Any, judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[1] / "docs" / "rewards.md").read_text(encoding="utf-8")
    (source,) = (text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "JUDGE_URL" in text)
    (settings,) = (tomllib.loads(text)["reward"] for text in re.findall(r"```toml\n(.*?)```", page, re.DOTALL) if "JUDGE_URL" in text)
    monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{judge.server_address[1]}/v1")
    monkeypatch.setenv("JUDGE_KEY", "key-of-the-judge")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    judge.together = 16
    pool = pool_of(**settings | {"function": write(tmp_path, source), "memory_gb": 2.0})
    groups = [group_of([str(number % 10) for number in range(16)], uid) for uid in range(3)]
    assert [values(scores) for scores in pool.collect(groups)] == [[number % 10 / 10 for number in range(16)]] * 3
    assert (judge.most, len(judge.asked)) == (16, 48)


def test_async_and_plain_functions_mix(tmp_path: Path, pool_of: Any, judge: Judge) -> None:
    file = write(tmp_path, ASK).removesuffix(":score")
    plain = write(tmp_path, "def score(solution_str): return -float(solution_str)", "plain.py")
    pool = pool_of({f"{file}:score": 1.0, f"{file}:batch": 10.0, plain: 100.0}, env=["JUDGE_PORT"])
    assert values(pool.collect([group_of(["1", "2", "3"])])[0]) == [-89.0, -178.0, -267.0]
    assert pool.stats().calls == 7


def test_a_deadline_cancels_an_async_call_and_not_its_process(tmp_path: Path, pool_of: Any, judge: Judge) -> None:
    pool = pool_of(write(tmp_path, ASK), env=["JUDGE_PORT"], timeout_s=2.0)
    scores = pool.collect([group_of(["1", "forever", "2", "forever"])])[0]
    after = pool.collect([group_of(["3"], 1)])[0]
    assert values([*scores, *after]) == [1.0, 0.0, 2.0, 0.0, 3.0]
    assert all(scores[place].error and "deadline of 2 s" in scores[place].error for place in (1, 3))
    assert len({score.parts["pid"] for score in (scores[0], scores[2], *after)}) == 1
    assert (pool.stats().timeouts, pool.stats().failed, pool.stats().retries) == (2, 2, 0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("bad", "grace_s", "message"),
    [
        pytest.param("deaf", 0.3, "deadline of 2 s", marks=pytest.mark.matrix),
        ("blocks", 0.0, "deadline of 2 s"),  # no time for the process to say so itself
        ("exits", 0.3, "ended its process with exit code 3"),
    ],
)
def test_an_async_call_that_takes_the_process_with_it_costs_no_other_call(
    tmp_path: Path, pool_of: Any, judge: Judge, monkeypatch: pytest.MonkeyPatch, bad: str, grace_s: float, message: str
) -> None:
    monkeypatch.setattr("fulltilt.reward.dispatch.GRACE_S", grace_s)
    pool = pool_of(write(tmp_path, ASK), env=["JUDGE_PORT"], timeout_s=2.0)
    scores = pool.collect([group_of(["1", "2", bad, "3", "4"])])[0]
    assert values(scores) == [1.0, 2.0, 0.0, 3.0, 4.0]
    assert scores[2].error is not None and message in scores[2].error
    assert pool.stats().failed == 1 and values(pool.collect([group_of(["5"], 1)])[0]) == [5.0]


BLOCKING = """
    import asyncio, time
    async def wait(seconds):
        time.sleep(seconds)
    async def score(solution_str):
        await asyncio.sleep(0)  # so that others have begun too
        seconds = float(solution_str)
        await asyncio.gather(asyncio.sleep(0), wait(seconds))  # a task of the call's own
        return seconds
    """


def test_a_call_that_blocks_the_event_loop_is_named_and_the_others_are_not_tried_alone(
    tmp_path: Path, pool_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fulltilt.reward.dispatch.GRACE_S", 250.0)  # which must not pass
    began = time.monotonic()
    pool = pool_of(write(tmp_path, BLOCKING), run_dir=tmp_path / "run", timeout_s=2.0)
    scores = pool.collect([group_of(["0.01", "600", *["0.02"] * 6])])[0]
    assert values(scores) == [0.01, 0.0, *[0.02] * 6] and time.monotonic() - began < 200
    said = scores[1].error
    assert said is not None and "blocked its event loop and ran past its deadline of 2 s (reward.timeout_s). Use an async client" in said
    assert "time.sleep(seconds)" in json.loads((tmp_path / "run" / ERRORS_FILE).read_text())["detail"]
    assert (pool.stats().timeouts, pool.stats().failed) == (1, 1) and pool.take_notes() == []


@pytest.mark.long
def test_calls_that_block_the_event_loop_for_a_while_have_their_own_deadlines(
    tmp_path: Path, pool_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together they take longer than a call may. The process looks for them more often than usual, so that each can be short."""
    source = """
        import sys, time
        vars(sys.modules["fulltilt.reward.worker"]).update(WATCH_S=0.02, BLOCKED_S=0.04)
        async def score():
            time.sleep(0.5)
            return 1
        """
    monkeypatch.setattr("fulltilt.reward.dispatch.GRACE_S", 0.1)
    pool = pool_of(write(tmp_path, source), timeout_s=4.0)
    assert values(pool.collect([group_of(["x"] * 9)])[0]) == [1.0] * 9
    assert (pool.stats().failed, pool.stats().retries) == (0, 0)
    (note,) = pool.take_notes()
    assert "mine.py:score blocks its event loop" in note and pool.take_notes() == []


def test_an_async_process_that_dies_before_a_call_costs_nothing(tmp_path: Path, pool_of: Any) -> None:
    pool = pool_of(write(tmp_path, "async def score(): return 1"))
    (process,) = pool._dispatcher._processes
    os.kill(process._process.pid, signal.SIGKILL)
    assert pool.collect([group_of(["x"])])[0] == [Score(1.0)]


def test_a_pool_closes_while_a_process_takes_no_calls(tmp_path: Path, pool_of: Any) -> None:
    pool = pool_of(write(tmp_path, "import time\nasync def score(): time.sleep(600)"), timeout_s=600.0)
    pool.submit(group_of(["x"]))
    pool.submit(group_of(["x" * 2**23], 1))
    time.sleep(0.3)
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 100  # the calls would take longer


def test_concurrency_without_an_async_function_is_refused(pool_of: Any) -> None:
    with pytest.raises(UserError, match=r"reward\.concurrency has no effect: no reward function is async"):
        pool_of("gsm8k", concurrency=8)


# Retries


@pytest.mark.parametrize("asynchronous", sample_cases([True, False], True))
def test_failed_calls_are_tried_again(tmp_path: Path, pool_of: Any, judge: Judge, asynchronous: bool) -> None:
    plain = """
        import os, urllib.request
        def score(solution_str):
            return float(urllib.request.urlopen(f"http://127.0.0.1:{os.environ['JUDGE_PORT']}/{solution_str}").read())
        """
    judge.failures = 2
    name, texts = write(tmp_path, ASK if asynchronous else plain), ["1", "2?flaky", "3"]
    once = pool_of(name, env=["JUDGE_PORT"], retries=1).collect([group_of(texts)])[0]
    assert values(once) == [1.0, 0.0, 3.0] and once[1].error is not None and "503" in once[1].error
    judge.asked.clear()
    pool = pool_of(name, env=["JUDGE_PORT"], retries=2)
    assert values(pool.collect([group_of(texts)])[0]) == [1.0, 2.0, 3.0]
    assert sorted(judge.asked) == ["1", "2", "2", "2", "3"]
    assert (pool.stats().calls, pool.stats().failed, pool.stats().retries) == (3, 0, 2)


def test_retries_wait_longer_and_longer_by_the_call_alone() -> None:
    request = Request(0, 0, b"", ("x",), seed=5)
    waits = [RewardCall(request, group_of(["x"]), 0, 0, failures=count).seconds_to_wait() for count in range(10)]
    assert waits == [RewardCall(request, group_of(["x"]), 0, 0, failures=count).seconds_to_wait() for count in range(10)]
    assert all(min(30.0, 0.5 * 2**count) / 2 <= wait <= min(30.0, 0.5 * 2**count) for count, wait in enumerate(waits))


def test_a_reward_that_is_no_number_is_not_tried_again(tmp_path: Path, pool_of: Any) -> None:
    name = write(tmp_path, "import os\ndef score(solution_str):\n    open(solution_str, 'a').write('x')\n    return None")
    with pytest.raises(UserError, match="returned None"):
        pool_of(name, retries=5).collect([group_of([str(tmp_path / "calls")])])
    assert (tmp_path / "calls").read_text() == "x"


# Trust

NAMES = "import os\ndef score(): return {'score': 1, **{name: 1 for name in os.environ}}"


def test_reward_processes_see_no_secrets(tmp_path: Path, pool_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"HF_HOME": "/h", "LC_ALL": "C.UTF-8", "https_proxy": "http://p", "CUDA_VISIBLE_DEVICES": "0", "TOKENIZERS_PARALLELISM": "0"}
    gone = ["HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "DATABASE_URL", "WANDB_API_KEY", "HF_API_KEY"]
    for name, value in {**kept, **dict.fromkeys(gone, "secret"), "JUDGE_KEY": "k"}.items():
        monkeypatch.setenv(name, value)
    (score,) = pool_of(write(tmp_path, NAMES), env=["JUDGE_KEY"]).collect([group_of(["x"])])[0]
    assert {"PATH", "JUDGE_KEY", *kept} <= set(score.parts) and not set(gone) & set(score.parts)
    with pytest.raises(UserError, match=r"reward\.env: NOT_SET_ANYWHERE is not set .* Set the variable, or remove it from reward.env"):
        pool_of("gsm8k", env=["NOT_SET_ANYWHERE"])


@pytest.mark.parametrize("where", ["score", "module"])
def test_a_function_that_misses_a_removed_variable_is_told(
    tmp_path: Path, pool_of: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret-value")
    read = 'os.environ["OPENAI_API_KEY"]'
    source = f"import os\nKEY = {read}\ndef score(): return 1" if where == "module" else f"import os\ndef score(): return {read}"
    told = "OPENAI_API_KEY is not passed to reward processes; add it to reward.env"
    try:
        pool = pool_of(write(tmp_path, source), run_dir=tmp_path / "run")
        assert pool.hidden == told  # said at the start: a function that asks with `get` never fails
        (score,) = pool.collect([group_of(["x"])])[0]
        assert where == "score" and score.error is not None and score.error.endswith(told)
        assert "secret-value" not in (tmp_path / "run" / ERRORS_FILE).read_text()
    except UserError as error:
        assert where == "module" and str(error).endswith(told)


TRIES = """
import fcntl, os, resource, signal, subprocess, sys
def attempt(action):
    try:
        action()
    except OSError as error:
        return 0.0
    return 1.0
def end_child():
    child = subprocess.Popen(["sleep", "60"])
    child.kill()
    assert child.wait() == -signal.SIGKILL
def score(extra_info):
    run, trainer, beside = extra_info["run"], os.getppid(), extra_info["beside"]
    return {"score": 1, **{name: attempt(action) for name, action in {
        "signal": lambda: os.kill(trainer, 0),
        "signal its group": lambda: os.killpg(os.getpgid(trainer), 0),
        "signal everyone": lambda: os.kill(-1, 0),
        "signal by pidfd": lambda: signal.pidfd_send_signal(os.open(f"/proc/{trainer}", os.O_RDONLY), 0),
        "limit": lambda: resource.prlimit(trainer, resource.RLIMIT_CPU, (10**6, 10**6)),
        "limit by a later thread": lambda: resource.prlimit(extra_info["later"], resource.RLIMIT_CPU, (10**6, 10**6)),
        "priority": lambda: os.setpriority(os.PRIO_PROCESS, trainer, 1),
        "priority of its group": lambda: os.setpriority(os.PRIO_PGRP, os.getpgid(trainer), 1),
        "priority of all": lambda: os.setpriority(os.PRIO_USER, os.getuid(), 1),
        "lease": lambda: fcntl.fcntl(os.open(run + "/file", os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK),
        "cores": lambda: os.sched_setaffinity(trainer, os.sched_getaffinity(trainer)),
        "memory": lambda: open(f"/proc/{trainer}/mem", "r+b"),
        "environment": lambda: open(f"/proc/{trainer}/environ").read(),
        "write": lambda: open(run + "/file", "r+").write("x"),
        "make": lambda: open(run + "/new", "w"),
        "remove": lambda: os.remove(run + "/file"),
        "move": lambda: os.rename(run, beside + "/run"),
        "link": lambda: os.link(run + "/file", beside + "/link"),
        "truncate": lambda: os.truncate(run + "/file", 0),
        "own child": end_child,
        "own files": lambda: open(beside + "/new", "w").write("x"),
        "temporary files": lambda: __import__("tempfile").TemporaryFile(),
        "own processes": lambda: __import__("multiprocessing").get_context("fork").Process(target=abs, args=(1,)).start(),
        "own alarm": lambda: signal.alarm(0),
        "own limit": lambda: resource.prlimit(os.getpid(), resource.RLIMIT_CPU, (10**6, 10**6)),
        "own priority": lambda: os.setpriority(os.PRIO_PROCESS, os.getpid(), min(19, os.getpriority(os.PRIO_PROCESS, 0) + 1)),
    }.items()}}
"""
ALLOWED = {"own child", "own files", "temporary files", "own processes", "own alarm", "own limit", "own priority"}
FILES = {"write", "make", "remove", "move", "link", "memory", "environment"}


@contextlib.contextmanager
def later_thread() -> Iterator[int]:
    """The number of a thread that the trainer starts after its reward processes."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    assert thread.native_id is not None
    yield thread.native_id
    over.set()
    thread.join()


HEADERS = {"x86_64": ("x86_64-linux-gnu/asm/unistd_64.h", "asm/unistd_64.h"), "aarch64": ("asm-generic/unistd.h",)}


@pytest.mark.parametrize(("place", "machine"), list(enumerate(HEADERS)))
def test_the_numbers_of_system_calls_are_those_of_the_kernels_headers(place: int, machine: str) -> None:
    found = [path for name in HEADERS[machine] if (path := Path("/usr/include", name)).is_file()]
    if not found:
        pytest.skip(f"there are no kernel headers for {machine} here")
    numbers = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", found[0].read_text()))
    assert {name: str(both[place]) for name, both in confine.NUMBERS.items()} == {name: numbers.get(name) for name in confine.NUMBERS}


NO_SECCOMP = pytest.mark.skipif(sys.platform != "linux" or not confine.has_seccomp(), reason="this kernel has no seccomp")


def refusals(protected: int, calls: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """The errors of system calls in a child that must leave the process alone, for a kernel without Landlock."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        confine.Confinement("", None, 0, True, (protected,)).take_on()
        libc = ctypes.CDLL(None, use_errno=True)
        found = {}
        for name, arguments in calls.items():
            number = confine.number_of(name.split()[0])
            found[name] = ctypes.get_errno() if libc.syscall(number, *map(ctypes.c_long, arguments)) < 0 else 0
        os.write(writer, json.dumps(found).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with open(reader) as said:
        return json.load(said)  # type: ignore[no-any-return]


@NO_SECCOMP
def test_every_system_call_on_the_list_is_refused_for_the_trainer_and_no_other() -> None:
    trainer = os.getpid()

    def calls(target: int) -> dict[str, tuple[int, ...]]:
        by_process = {name: (*(0,) * place, target, 0, 0, 0, 0) for name, place in confine.BY_PROCESS.items()}
        return {**by_process, "prlimit64": (target, 0, 0, 0), "tgkill": (target, target, 0), "ioprio_set": (1, target, 0)}

    of_signals = {"fcntl 8": (0, 8, trainer), "fcntl 15": (0, 15, 0), "ioctl": (0, 0x8901, 0), "pidfd_send_signal": (0, 0, 0, 0)}
    of_all = {"fcntl 1024": (0, 1024, 2), "setpriority of all": (2, 0, 0), "ioprio_set of all": (3, 0, 0)}
    refused = refusals(trainer, {**calls(trainer), **of_signals, **of_all})
    assert {name.split()[0] for name in refused} == confine.NUMBERS.keys() - {"seccomp"}
    assert set(refused.values()) == {errno.EPERM}, refused
    assert errno.EPERM not in refusals(trainer, calls(0)).values()


@NO_SECCOMP
@pytest.mark.parametrize("version", [None, 5, 1, 0])
def test_the_kernel_keeps_rewards_from_the_trainer_and_the_run_folder(
    tmp_path: Path, pool_of: Any, monkeypatch: pytest.MonkeyPatch, version: int | None
) -> None:
    """Also as older kernels do, and as those without Landlock do."""
    actual = confine.landlock_version()
    if actual < (version or 1):
        pytest.skip(f"this kernel has version {actual} of Landlock")
    if version is not None:
        monkeypatch.setattr(confine, "landlock_version", lambda: version)
    run, beside = tmp_path / "runs" / "run", tmp_path / "beside"
    run.mkdir(parents=True)
    beside.mkdir()
    (run / "file").write_text("good")
    pool = pool_of(write(tmp_path, TRIES), run_dir=run)
    with later_thread() as later:
        (score,) = pool.collect([group_of(["x"], extra={"run": str(run), "beside": str(beside), "later": later})])[0]
    assert score.error is None, score.error
    unprotected = set() if version is None or version >= 3 else {"truncate"} if version else {"truncate", *FILES}
    assert {name for name, done in score.parts.items() if done} - unprotected == ALLOWED
    assert version == 0 or ("truncate" in unprotected or (run / "file").read_text() == "good")
    later = "signal threads that the trainer starts later"
    words = {5: (later,), 1: ("truncate files in run.dir", later), 0: ("write into run.dir and into the trainer's memory", later)}
    assert pool.lacking == (words[version] if version is not None else () if actual >= 6 else (later,))


@NO_SECCOMP
def test_a_guard_that_was_killed_keeps_no_process_from_starting(bad_file: Path, pool_of: Any, tmp_path: Path) -> None:
    pool = pool_of(f"{bad_file}:score", run_dir=tmp_path / "run")
    pool._dispatcher._guard._process.kill()
    pool._dispatcher._guard._process.wait()
    assert values(pool.collect([group_of(["_exit|1", *(f"|{n}" for n in range(4))])])[0]) == [0.0, 0.0, 1.0, 2.0, 3.0]


NOBODY = 65534


def become_unprivileged() -> None:
    """The user of this process is nobody from now on. It may read what root may: the interpreter may be in root's home."""
    libc, read_all = ctypes.CDLL(None, use_errno=True), 1 << 2  # CAP_DAC_READ_SEARCH
    libc.prctl(8, 1, 0, 0, 0)  # PR_SET_KEEPCAPS
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    assert libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(read_all, read_all, read_all)) == 0
    assert libc.prctl(47, 2, 2, 0, 0) == 0  # PR_CAP_AMBIENT: the reward processes may too
    libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: a process that has changed its user is protected otherwise


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="only root can become another user")
@pytest.mark.skipif(confine.landlock_version() < 6 or not confine.has_seccomp(), reason="this kernel lacks some of the sandbox")
def test_the_sandbox_holds_for_an_unprivileged_user(tmp_path: Path) -> None:
    run, beside = tmp_path / "runs" / "run", tmp_path / "beside"
    for folder in (run, beside):
        folder.mkdir(parents=True)
        os.chown(folder, NOBODY, NOBODY)
    (run / "file").write_text("good")
    os.chown(run / "file", NOBODY, NOBODY)
    name = write(tmp_path, TRIES)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException), open(writer, "w") as said:
            become_unprivileged()
            with contextlib.closing(RewardPool(RewardConfig(function=name, workers=1), run)) as pool:
                group = group_of(["x"], extra={"run": str(run), "beside": str(beside), "later": threading.get_native_id()})
                ((score,),) = pool.collect([group])
                json.dump({"error": score.error, "lacking": pool.lacking, **score.parts}, said)
        os._exit(0)
    os.close(writer)
    with open(reader) as said:
        found = json.load(said)
    os.waitpid(pid, 0)
    assert (found.pop("error"), found.pop("lacking")) == (None, [])
    assert {name for name, done in found.items() if done} == ALLOWED and (run / "file").read_text() == "good"


@pytest.mark.skipif(not confine.landlock_version(), reason="this kernel has no Landlock")
def test_a_reward_that_is_refused_a_file_is_told_why(tmp_path: Path, pool_of: Any) -> None:
    name = write(tmp_path, f"def score(): return open({str(tmp_path / 'log.txt')!r}, 'a').write('x')")
    (score,) = pool_of(name, run_dir=tmp_path / "run").collect([group_of(["x"])])[0]
    assert score.error is not None and "PermissionError" in score.error
    assert f"cannot write into run.dir ({tmp_path / 'run'})" in score.error and "reward.sandbox = false" in score.error
    pool_of(name, run_dir=tmp_path / "run", sandbox=False).collect([group_of(["x"])])
    assert (tmp_path / "log.txt").exists()


@pytest.mark.skipif(not confine.landlock_version(), reason="this kernel has no Landlock")
def test_a_reward_that_may_have_been_refused_a_file_is_told_so(tmp_path: Path, pool_of: Any) -> None:
    told = {
        "sqlite3.connect('old.db').execute('create table more (x)')": "readonly database",
        "subprocess.run('echo > new', shell=True, check=True)": "CalledProcessError",
        "socket.socket(socket.AF_UNIX).bind('new')": "[Errno 13]",  # an error that names no file
        "open('later/new', 'w')": "later/new",
        "wrapped()": "no cache",
    }
    not_told = {
        "sqlite3.connect('old.db').execute('select * from more')": "no such table",
        "open('missing')": "missing",
        "os.kill(os.getppid(), 9)": "[Errno 1]",
    }
    source = f"""
        import os, socket, sqlite3, subprocess
        def wrapped():
            try:
                open("new", "w")
            except OSError:
                raise ValueError("no cache")
        def score(solution_str):
            os.chdir({str(tmp_path)!r})
            eval(solution_str)
            return 1.0
        """
    (tmp_path / "old.db").touch()
    (tmp_path / "cache").mkdir()
    pool = pool_of(write(tmp_path, source), run_dir=tmp_path / "run")
    (tmp_path / "later").mkdir()
    in_cache = "sqlite3.connect('cache/new.db').execute('create table more (x)')"
    *failed, good = pool.collect([group_of([*told, *not_told, in_cache])])[0]
    assert (good.error, good.value) == (None, 1.0)
    for score, words in zip(failed, [*told.values(), *not_told.values()], strict=True):
        assert score.error is not None and words in score.error
        assert ("run.dir" in score.error) == (words in told.values()), score.error


@pytest.mark.skipif(not confine.landlock_version(), reason="this kernel has no Landlock")
def test_a_file_that_is_refused_while_the_function_is_loaded_is_told_too(tmp_path: Path, pool_of: Any) -> None:
    name = write(tmp_path, f"LOG = open({str(tmp_path / 'log.txt')!r}, 'a')\ndef score(): return 1.0")
    with pytest.raises(UserError, match=r"Fix the file\. Reward functions cannot write into run\.dir"):
        pool_of(name, run_dir=tmp_path / "run")


@pytest.mark.skipif(not confine.landlock_version(), reason="this kernel has no Landlock")
def test_file_systems_beside_the_run_folder_are_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not answer would hang the start."""
    asked: list[Any] = []
    stat = os.stat
    monkeypatch.setattr(os, "stat", lambda path, *args, **options: asked.append(path) or stat(path, *args, **options))
    found = confine.confinement(tmp_path / "run", ())
    assert found.ruleset is not None and not asked
    os.close(found.ruleset)


def test_a_pool_leaves_no_descriptor_and_no_temporary_file(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    name = write(tmp_path, "import tempfile\ndef score():\n    return len(tempfile.mkdtemp())")
    with contextlib.closing(RewardPool(RewardConfig(function=name, workers=1), tmp_path / "run")) as pool:
        assert pool.collect([group_of(["x"])])[0][0].error is None
        folder = Path(pool._dispatcher._folder)
        assert len(list(folder.iterdir())) == 1
    assert not folder.exists()
    assert sys.platform != "linux" or len(os.listdir("/proc/self/fd")) == before


# What is found before a run


def test_all_wrong_functions_are_reported_at_once(tmp_path: Path, pool_of: Any) -> None:
    first = write(tmp_path, "def score(solution_str, weight): return 1")
    second = write(tmp_path, "1 +", "second.py")
    with pytest.raises(UserError, match=r"requires 'weight'(.|\n)*syntax error at .*second\.py:1"):
        pool_of({first: 1.0, second: 1.0})
    with pytest.raises(UserError, match=r"one\.py(.|\n)*two\.py"):
        pool_of({"no/one.py:score": 1.0, "no/two.py:score": 1.0})


def test_each_function_is_called_once_on_a_row_that_it_scores(tmp_path: Path, pool_of: Any) -> None:
    source = """
        import time
        def good(solution_str, ground_truth): return float(solution_str == ground_truth)
        def fails(extra_info): return extra_info["missing"]
        def nothing(solution_str): return None
        def slow(solution_str): time.sleep(600)
        """
    file = write(tmp_path, source).removesuffix(":score")
    names = {f"{file}:{name}": 1.0 for name in ("good", "fails", "nothing")}
    pool = pool_of(names, sources={"slow": f"{file}:slow", "unused": f"{file}:good"}, timeout_s=2.0)
    prompts = [group_of([], uid, source=source).prompt for uid, source in enumerate(["plain", "slow", "plain"])]
    fails, nothing, slow = pool.failures_on(prompts)
    assert "fails raised KeyError: 'missing' (mine.py:4) (called for prompt 0, with its ground truth as the response)" in fails
    assert "returned None" in nothing and "deadline of 2 s" in slow and "prompt 1" in slow
    assert (pool.stats().calls, pool.failures_on([])) == (3, [])


def test_a_check_ends_where_no_process_can_be_started_any_more(tmp_path: Path, pool_of: Any) -> None:
    mark = tmp_path / "mark"
    source = f"""
        import os
        if os.path.exists({str(mark)!r}):
            raise RuntimeError("not twice")
        def crashes(solution_str):
            open({str(mark)!r}, "w").close()
            os._exit(3)
        def second(solution_str): return 1.0
        def third(solution_str): return 1.0
        """
    file = write(tmp_path, source).removesuffix(":score")
    pool = pool_of({f"{file}:{name}": 1.0 for name in ("crashes", "second", "third")}, workers=1)
    crashed, lost = pool.failures_on([group_of([]).prompt])
    assert "exit code 3" in crashed and "RuntimeError: not twice" in lost and "ground truth" not in lost


def test_workers_beyond_the_cores_start_as_calls_arrive(tmp_path: Path, pool_of: Any) -> None:
    pool = pool_of("gsm8k", workers=256)
    assert values(pool.collect([group_of(["#### 18"] * 3)])[0]) == [1.0] * 3
    assert len(pool._dispatcher._threads) <= max(3, usable_cores())


@pytest.mark.parametrize(
    ("function", "message"),
    [("always_fails", "raised RuntimeError: no opinion at all (reward.py:19)"), ("not_a_number", "returned nan for a sample")],
)
def test_check_calls_the_rewards_once(tmp_path: Path, model_folders: Callable[[str], Path], function: str, message: str) -> None:
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    ended = runs.command_here(folder, "train", "run.toml", "--check", f"reward.function=reward.py:{function}")
    assert ended.code == 2 and message in ended.error and "with its ground truth as the response" in ended.error, ended.error
    assert not (folder / "run").exists()
