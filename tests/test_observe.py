"""Metrics and rollouts on disk, and what the console says to people and to machines."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import TextIO

import numpy as np
import pytest
from terminal import Screen

from fulltilt.observe import metrics as metrics_file
from fulltilt.observe import streams
from fulltilt.observe.console import Console, clock
from fulltilt.observe.metrics import (
    MetricsFile,
    RolloutFiles,
    RowSums,
    count_tokens,
    encode_line,
    summarise_lengths,
    summarise_scores,
    summarise_time,
)
from fulltilt.records import Group, Prompt, Row, RunWarning, Sample, Score, UserError


def sample(index: int, length: int, finish: str = "stop", text: str = "four") -> Sample:
    return Sample(index, np.arange(length), np.full(length, -0.5, dtype=np.float32), finish, text)  # type: ignore[arg-type]


def group(uid: int, *lengths: int, prompt_tokens: int = 3) -> Group:
    prompt = Prompt(uid, np.arange(prompt_tokens), f"2+2= ({uid})", "sums", "4")
    return Group(prompt, tuple(sample(index, length) for index, length in enumerate(lengths)))


# ---- metrics.jsonl


def test_metrics_lines(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "deep" / "metrics.jsonl")
    metrics.append(1, {"b": np.float32(0.5), "a": 3, "n": np.int64(4), "bad": math.nan, "worse": -math.inf})
    # Not closed: every line must be there as soon as it is appended.
    (line,) = metrics.path.read_text().splitlines()
    assert list(json.loads(line)) == ["step", "b", "a", "n", "bad", "worse", "nonfinite"]
    assert json.loads(line) == {"step": 1, "b": 0.5, "a": 3, "n": 4, "bad": None, "worse": None, "nonfinite": ["bad", "worse"]}
    assert '"n": 4,' in line and "NaN" not in line and "Infinity" not in line
    assert "nonfinite" not in json.loads(encode_line(2, {"a": 1.0}))
    metrics.sync()
    metrics.close()


def test_metrics_resume_gives_the_file_of_an_uninterrupted_run(tmp_path: Path) -> None:
    straight = MetricsFile(tmp_path / "straight.jsonl")
    for step in range(1, 6):
        straight.append(step, {"x": step / 7})
    broken = MetricsFile(tmp_path / "broken.jsonl")
    for step in range(1, 4):
        broken.append(step, {"x": step / 7})
        if step == 2:
            offset = broken.offset()
    with open(broken.path, "ab") as file:
        file.write(b'{"step": 4, "x": 0.5')  # killed in the middle of a line
    resumed = MetricsFile(broken.path)
    assert resumed.truncate(offset) is None
    assert resumed.offset() == offset
    for step in range(3, 6):
        resumed.append(step, {"x": step / 7})
    assert broken.path.read_bytes() == straight.path.read_bytes()


def test_metrics_from_the_start(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append(1, {})
    assert metrics.truncate(0) is None
    assert metrics.offset() == 0


def test_a_metrics_file_that_lost_lines_is_a_warning_and_stays_readable(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append(1, {"x": 1})
    whole = metrics.offset()
    metrics.append(2, {"x": 2})
    offset = metrics.offset()
    metrics.path.write_bytes(metrics.path.read_bytes()[: whole + 5])
    warning = metrics.truncate(offset)
    assert warning and f"shorter ({whole + 5} bytes) than when the checkpoint was saved ({offset} bytes)" in warning
    metrics.append(3, {"x": 3})
    assert [json.loads(line)["step"] for line in metrics.path.read_text().splitlines()] == [1, 3]


def test_a_metrics_file_edited_by_hand_is_a_warning(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append(1, {"x": 1})
    metrics.append(2, {"x": 2})
    offset = metrics.offset()
    metrics.path.write_bytes(metrics.path.read_bytes() + b" " * 3)
    metrics.append(3, {"x": 3})
    warning = metrics.truncate(offset + 2)
    assert warning and "has changed" in warning
    assert metrics.offset() == offset


def test_a_full_disk_is_the_users_to_mend() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    metrics = MetricsFile(full)
    with pytest.raises(UserError, match=r"/dev/full: cannot be written: No space left"):
        metrics.append(1, {"x": 1})
    metrics.close()


def test_a_folder_that_cannot_be_made_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        MetricsFile(tmp_path / "file" / "metrics.jsonl")
    with pytest.raises(UserError, match="cannot be written"):
        RolloutFiles(tmp_path / "file" / "rollouts", 1).write(1, [group(0, 2)], [[Score(1.0)]])


# ---- rollouts


def test_rollout_lines(tmp_path: Path) -> None:
    rollouts = RolloutFiles(tmp_path / "rollouts", 16)
    scores = [[Score(1.0, {"format": 0.5}), Score(math.nan, error="ran out of time")]]
    rollouts.write(12, [Group(group(7).prompt, (sample(0, 2, text="é"), sample(1, 4, "length", text="\ud800")))], scores)
    path = tmp_path / "rollouts" / "step-000012.jsonl"
    first, second = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    assert first == {
        "uid": 7,
        "sample": 0,
        "prompt": "2+2= (7)",
        "response": "é",
        "reward": 1.0,
        "parts": {"format": 0.5},
        "error": None,
        "finish": "stop",
        "data_source": "sums",
        "ground_truth": "4",
        "response_tokens": 2,
        "logprob_mean": -0.5,
    }
    assert (second["reward"], second["error"], second["finish"], second["response"]) == (None, "ran out of time", "length", "\ud800")
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(("per_step", "written"), [(1, 3), (3, 3), (5, 3), (6, 6), (100, 9)])
def test_whole_groups_are_written_first_to_last(tmp_path: Path, per_step: int, written: int | None) -> None:
    groups = [group(uid, 1, 2, 3) for uid in range(3)]
    RolloutFiles(tmp_path, per_step).write(1, groups, [[Score(0.0)] * 3] * 3)
    path = tmp_path / "step-000001.jsonl"
    if written is None:
        assert not path.exists()
        return
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["uid"], line["sample"]) for line in lines] == [(index // 3, index % 3) for index in range(written)]


def test_rollouts_truncate(tmp_path: Path) -> None:
    rollouts = RolloutFiles(tmp_path / "rollouts", 4)
    rollouts.truncate(3)
    for step in (1, 2, 3, 4, 10):
        rollouts.write(step, [group(0, 2)], [[Score(1.0)]])
    (rollouts.folder / "step-000002.jsonl.partial").write_text("{")
    (rollouts.folder / "notes.txt").write_text("mine")
    rollouts.truncate(3)
    assert sorted(path.name for path in rollouts.folder.iterdir()) == [
        "notes.txt",
        "step-000001.jsonl",
        "step-000002.jsonl",
        "step-000003.jsonl",
    ]


# ---- summaries under verl's names


def test_summarise_scores() -> None:
    scores = [Score(1.0, {"format": 1.0}), Score(0.0, {"format": 0.0}), Score(99.0, error="crashed"), Score(99.0, error="ran out of time")]
    assert summarise_scores([scores, [Score(0.5)], [Score(0.5), Score(0.5)]], timeouts=1, excluded=2) == {
        "critic/score/mean": 0.5,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "reward/parts/format": 0.5,
        "reward/groups_with_variance": 1 / 3,
        "reward/samples": 7,
        "reward/errors": 2,
        "reward/timeouts": 1,
        "reward/excluded": 2,
    }
    assert summarise_scores([[Score(0.0, error="crashed")]], timeouts=0, excluded=1) == {
        "reward/groups_with_variance": 0.0,
        "reward/samples": 1,
        "reward/errors": 1,
        "reward/timeouts": 0,
        "reward/excluded": 1,
    }


def test_summarise_rows_counts_trained_tokens_only() -> None:
    def row(reward: float, advantages: list[float]) -> Row:
        mask = np.array([False] + [True] * (len(advantages) - 1))
        return Row(np.arange(len(advantages)), mask, reward=reward, advantages=np.array(advantages, dtype=np.float32))

    found = RowSums.of([row(2.0, [9.0, 1.0, 1.0, 1.0]), row(0.0, [-9.0, -1.0])]).metrics()
    assert found == {
        "critic/rewards/mean": 1.0,
        "critic/rewards/max": 2.0,
        "critic/rewards/min": 0.0,
        "critic/advantages/mean": 0.5,
        "critic/advantages/max": 1.0,
        "critic/advantages/min": -1.0,
    }
    assert RowSums.of([]).metrics() == {}


def test_summarise_rows_says_what_the_critic_knew() -> None:
    """Values that halve the error of returns leave a quarter of the variance. A KL penalty is in the rewards."""
    mask = np.array([False, True, True])
    numbers = {"values": [9, 1, 3], "returns": [9, 0, 4], "advantages": [0, 0, 0], "token_rewards": [0, -0.5, 2]}
    row = Row(np.arange(3), mask, reward=2.0, **{name: np.array(each, np.float32) for name, each in numbers.items()})
    found = RowSums.of([row]).metrics()
    assert found["critic/rewards/mean"] == 1.5
    assert (found["critic/values/mean"], found["critic/values/max"], found["critic/values/min"]) == (2, 3, 1)
    assert (found["critic/returns/mean"], found["critic/returns/max"], found["critic/returns/min"]) == (2, 4, 0)
    assert found["critic/vf_explained_var"] == 0.75


def test_summarise_lengths() -> None:
    groups = [
        Group(group(0, prompt_tokens=8).prompt, (sample(0, 2), sample(1, 6, "length"))),
        Group(group(1, prompt_tokens=2).prompt, (sample(0, 4), sample(1, 4))),
    ]
    assert summarise_lengths(groups, max_prompt_tokens=8) == {
        "response_length/mean": 4.0,
        "response_length/max": 6.0,
        "response_length/min": 2.0,
        "response_length/clip_ratio": 0.25,
        "prompt_length/mean": 5.0,
        "prompt_length/max": 8.0,
        "prompt_length/min": 2.0,
        "prompt_length/clip_ratio": 0.5,
    }
    assert count_tokens(groups) == (16, 36)
    assert summarise_lengths([], 8) == {}


def test_summarise_time_uses_verls_names() -> None:
    seconds = {
        "rollout": 2.0,
        "reward": 0.5,
        "old-logprob": 1.0,
        "ref-logprob": 0.25,
        "advantage": 0.0,
        "update-actor": 4.0,
        "save": 0.1,
        "eval": 0.2,
    }
    found = summarise_time(seconds, 10.0, response_tokens=1000, total_tokens=4000, devices=2)
    assert {name: found[f"timing_s/{name}"] for name in ("gen", "reward", "old_log_prob", "ref", "adv", "update_actor")} == {
        "gen": 2.0,
        "reward": 0.5,
        "old_log_prob": 1.0,
        "ref": 0.25,
        "adv": 0.0,
        "update_actor": 4.0,
    }
    assert (found["timing_s/save_checkpoint"], found["timing_s/testing"], found["timing_s/step"]) == (0.1, 0.2, 10.0)
    assert (found["timing_per_token_ms/gen"], found["timing_per_token_ms/update_actor"]) == (2.0, 1.0)
    assert (found["perf/total_num_tokens"], found["perf/time_per_step"], found["perf/throughput"]) == (4000, 10.0, 200.0)


# ---- console


def steps(console: Console, count: int = 2) -> None:
    with console.run(total=count):
        for step in range(1, count + 1):
            console.begin_step(step)
            with console.phase("rollout"):
                console.phase_progress(1, 4)
                time.sleep(0.01)
            with console.phase("sync"):
                pass
            with console.phase("update-actor"):
                time.sleep(0.01)
            console.end_step({"critic/score/mean": step / 4, "response_length/mean": 40.0})


def test_plain_lines_where_there_is_no_terminal() -> None:
    out, err = io.StringIO(), io.StringIO()
    console = Console(stdout=out, stderr=err)
    steps(console)
    console.note("saved [bold]runs/x[/bold] " + "y" * 200)
    console.warn("top_p")
    first, second, note = out.getvalue().splitlines()
    assert re.fullmatch(r"step 1/2  reward 0\.250  length 40\.0  \d\.\d s \(rollout \d\.\d, update-actor \d\.\d\)", first)
    assert second.startswith("step 2/2  reward 0.500  ")
    assert note == "saved [bold]runs/x[/bold] " + "y" * 200
    assert err.getvalue() == "warning: top_p\n"
    assert "\x1b" not in out.getvalue() + err.getvalue()


def test_lines_that_would_follow_too_fast_are_left_out_for_people() -> None:
    out, err = io.StringIO(), io.StringIO()
    console = Console(json=True, stdout=out, stderr=err, seconds_between_lines=60.0)
    with console.run(total=8):
        for step in range(1, 7):
            console.begin_step(step)
            if step == 3:
                console.warn("during step 3")
            console.end_step({})
            if step == 5:
                console.warn("after step 5")
    assert [line.split("/8")[0] for line in err.getvalue().splitlines()] == [
        "step 1", "warning: during step 3", "step 3", "step 5", "warning: after step 5", "step 6",
    ]  # fmt: skip
    assert len(out.getvalue().splitlines()) == 6


def test_json_goes_to_stdout_and_words_to_stderr() -> None:
    out, err = io.StringIO(), io.StringIO()
    console = Console(json=True, stdout=out, stderr=err)
    steps(console)
    console.note("a note")
    console.warn("a warning")
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [
        {"step": 1, "critic/score/mean": 0.25, "response_length/mean": 40.0},
        {"step": 2, "critic/score/mean": 0.5, "response_length/mean": 40.0},
    ]
    words = err.getvalue().splitlines()
    assert words[0].startswith("step 1/2") and words[2:] == ["a note", "warning: a warning"]


def lose_reader(path: Path) -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def lose_disk(path: Path) -> TextIO:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    return open("/dev/full", "w")


def lose_terminal(path: Path) -> TextIO:
    master, slave = os.openpty()
    os.close(master)
    return os.fdopen(slave, "w")


def close_file(path: Path) -> TextIO:
    file = open(path / "closed", "w")  # noqa: SIM115
    file.close()
    return file


LOSSES = {
    "its reader has gone": lose_reader,
    "No space left on device": lose_disk,
    "Input/output error": lose_terminal,
    "closed": close_file,
}


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("reason", LOSSES)
def test_a_stream_that_is_lost_does_not_end_the_run(tmp_path: Path, reason: str, as_json: bool) -> None:
    """What is for this stream is gone, what is said elsewhere is not, and it says so once."""
    err = io.StringIO()
    out = LOSSES[reason](tmp_path)
    console = Console(json=as_json, stdout=out, stderr=err)
    steps(console, 3)
    with contextlib.suppress(OSError, ValueError):
        out.close()  # the caller's own stream still tells the caller
    assert err.getvalue().count("warning: standard output is lost: ") == 1 and reason in err.getvalue()
    assert ("step 3/3" in err.getvalue()) == as_json


def test_a_stream_that_a_program_lent_keeps_its_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for protected in (False, True):
        out = lose_reader(tmp_path)
        before = os.fstat(out.fileno())
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        if protected:
            streams.protect()
        Console().note("nobody reads this")
        assert os.path.samestat(os.fstat(out.fileno()), before) == (not protected)
        with contextlib.suppress(OSError):
            out.close()


def test_a_slow_reader_of_a_non_blocking_stream_loses_nothing() -> None:
    """As after a program that shares the terminal has made it non-blocking."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    found: list[str] = []
    slow = threading.Timer(0.1, lambda: found.append(os.fdopen(reader).read()))
    slow.start()
    with os.fdopen(writer, "w") as out:
        console = Console(stdout=out, stderr=io.StringIO())
        for number in range(4000):
            console.note(f"line {number} of a run that says much")
    slow.join()
    assert [int(line.split()[1]) for line in found[0].splitlines()] == list(range(4000))


@pytest.mark.parametrize("reason", LOSSES)
def test_standard_error_that_is_lost_costs_only_its_own_text(tmp_path: Path, reason: str) -> None:
    out, error = io.StringIO(), LOSSES[reason](tmp_path)
    console = Console(stdout=out, stderr=error)
    console.warn("nobody reads this")
    steps(console, 2)
    with contextlib.suppress(OSError, ValueError):
        error.close()
    assert "step 2/2" in out.getvalue() and "lost" not in out.getvalue()


@pytest.mark.parametrize(
    ("encoding", "written"), [("ascii", r"\u20ac \xe9 \ud800"), ("latin-1", r"\u20ac é \ud800"), ("utf-8", r"€ é \ud800")]
)
def test_characters_that_a_stream_does_not_have_are_escaped(tmp_path: Path, encoding: str, written: str) -> None:
    with open(tmp_path / "out", "w", encoding=encoding) as out:
        Console(stdout=out, stderr=io.StringIO()).note("€ é \ud800")
    assert (tmp_path / "out").read_text(encoding=encoding) == written + "\n"


def test_text_of_others_cannot_control_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    evil = "\x1b]52;c;ZXZpbA==\x07 \x1b[2J \x9b2J over\rwritten \u202etxt.exe \x08\x7f"
    for terminal in (True, False):
        out, err = io.StringIO(), io.StringIO()
        console = Console(stdout=out, stderr=err, terminal=terminal)
        console.note(f"first\n\tsecond {evil}")
        console.warn(evil)
        shown = re.sub(r"\x1b\[\d+m", "", out.getvalue() + err.getvalue())  # the warning's own colour
        assert [character for character in shown if not character.isprintable() and character not in "\n\t"] == []
        assert (
            r"\u001b]52;c;ZXZpbA==\u0007 \u001b[2J \u009b2J over\u000dwritten \u202etxt.exe \u0008\u007f" in shown.replace("\n", " ")
            and "first\n" in shown
        )


WHOLE = {
    "critic/score/mean": 0.25, "response_length/mean": 412.5, "actor/kl_loss": 0.0012, "rollout/entropy": 1.234, "actor/pg_loss": -0.0123,
    "actor/lr": 5e-4, "perf/throughput": 81234.5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (60, "step 7/100  reward 0.250  length 412.5  loss -0.0123  "),
        (80, "step 7/100  reward 0.250  length 412.5  KL 0.0012  loss -0.0123  "),
        (100, "step 7/100  reward 0.250  length 412.5  KL 0.0012  entropy 1.23  loss -0.0123  81234 tok/s  "),
        (120, "step 7/100  reward 0.250  length 412.5  KL 0.0012  entropy 1.23  loss -0.0123  lr 0.0005  81234 tok/s  "),
    ],
)
def test_a_step_leaves_one_line_that_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int, line: str) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    out = io.StringIO()
    console = Console(stdout=out, stderr=io.StringIO(), terminal=True)
    with console.run(total=100, done=6):
        console.begin_step(7)
        with console.phase("rollout"):
            time.sleep(0.01)
        console.end_step(WHOLE)
        console.warn("words " * 40)
    screen = Screen(columns).show(out.getvalue())
    assert screen.broken == [] and max(map(len, str(screen).splitlines())) <= columns
    assert str(screen).startswith(line) and len(set(screen.bars)) == (columns >= 80)


def test_workers_that_take_longer_than_others_show() -> None:
    """A step has two rounds of sampling, each with another slowest worker, and one pass; a phase of one worker has no spread."""
    seconds = {"rollout": [[4.0, 2.0], [1.0, 5.0]], "old-logprob": [[1.0, 3.0]], "values": [[7.0]]}
    found = metrics_file.summarise_workers(seconds)
    assert found == {
        "timing_s/workers/gen/max": 9.0, "timing_s/workers/gen/mean": 6.0, "rollout/time_spread": 1.5,
        "timing_s/workers/old_log_prob/max": 3.0, "timing_s/workers/old_log_prob/mean": 2.0,
    }  # fmt: skip
    assert metrics_file.summarise_workers({"rollout": [[0.0, 0.0]]}).keys() == {"timing_s/workers/gen/max", "timing_s/workers/gen/mean"}
    out = io.StringIO()
    console = Console(stdout=out, stderr=io.StringIO())
    with console.run(total=1):
        console.begin_step(1)
        console.end_step(WHOLE | found | {"actor/load_spread": 1.07})
    assert "tok/s  load spread 1.07  rollout spread 1.50  " in out.getvalue()


def test_quiet_keeps_warnings_and_json() -> None:
    out, err = io.StringIO(), io.StringIO()
    console = Console(quiet=True, stdout=out, stderr=err)
    steps(console)
    console.note("a note")
    console.warn("a warning")
    assert out.getvalue() == "" and err.getvalue() == "warning: a warning\n"
    out = io.StringIO()
    steps(Console(json=True, quiet=True, stdout=out, stderr=err))
    assert len(out.getvalue().splitlines()) == 2


def test_bar_shows_phase_progress_times_and_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    out = io.StringIO()
    console = Console(stdout=out, stderr=io.StringIO(), terminal=True)
    stdout, threads = sys.stdout, threading.active_count()
    with console.run(total=4, done=1):
        console.begin_step(2)
        with console.phase("rollout"):
            time.sleep(0.11)
            console.phase_progress(3, 8)
            console.phase_progress(8, 8)
            assert sys.stdout is stdout and threading.active_count() == threads, "a debugger's prompt would be lost"
        console.end_step({"critic/score/mean": 0.125})
        console.warn("beside the bar")
        with console.phase("save"):
            pass
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "1/4" in drawn and "2/4" in drawn and "3/4" not in drawn
    assert "rollout 3/8" in drawn and "rollout 8/8" in drawn and "save " in drawn
    assert re.search(r"\d:\d\d elapsed, \d:\d\d left", drawn)
    assert "warning: beside the bar\n" in drawn
    assert drawn.count("step 2/4  reward 0.125  ") == 1
    assert out.getvalue().rstrip().endswith("\x1b[?25h"), "the cursor must come back"


def test_the_bar_ends_when_the_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    console = Console(stdout=out, stderr=io.StringIO(), terminal=True)
    with pytest.raises(KeyboardInterrupt), console.run(total=2):
        console.begin_step(1)
        with console.phase("reward"):
            raise KeyboardInterrupt
    assert out.getvalue().rstrip().endswith("\x1b[?25h")
    assert list(console.seconds) == ["reward"]


def test_phases_add_up_and_know_their_names() -> None:
    console = Console(stdout=io.StringIO(), stderr=io.StringIO())
    console.begin_step(1)
    for _ in range(2):
        with console.phase("rollout"):
            time.sleep(0.01)
    assert list(console.seconds) == ["rollout"]
    assert 0.02 <= console.seconds["rollout"] <= console.step_seconds
    with pytest.raises(AssertionError, match="not the name of a phase"), console.phase("dreaming"):
        pass


def test_each_step_has_its_own_seconds() -> None:
    console = Console(stdout=io.StringIO(), stderr=io.StringIO())
    console.begin_step(1)
    first = console.seconds
    with console.phase("rollout"), console.phase("reward"):
        pass
    assert list(first) == ["rollout", "reward"]
    console.begin_step(2)
    assert console.seconds == {}


def test_the_bar_of_an_evaluation_ends_complete() -> None:
    out = io.StringIO()
    console = Console(stdout=out, stderr=out, terminal=True)
    with console.run(total=1):
        with console.phase("eval"):
            assert "1/1" not in out.getvalue()
        console.end_evaluation()
    assert "1/1" in out.getvalue()


@pytest.mark.parametrize(("seconds", "shown"), [(0.4, "0:00"), (7, "0:07"), (760, "12:40"), (10925, "3:02:05"), (400_000, "111:06:40")])
def test_clock(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown


# ---- warnings of libraries


def test_warnings_of_libraries_are_hidden_and_those_about_ones_own_code_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "loss.py"
    mine.touch()
    monkeypatch.setattr(sys, "warnoptions", [])
    monkeypatch.delenv(streams.SHOW_ALL, raising=False)
    for name in streams.QUIET:
        monkeypatch.setenv(name, "as it was")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        streams.quiet_libraries()
        for place in (np.__file__, json.__file__, streams.__file__, "sys"):
            warnings.warn_explicit("of a library", UserWarning, place, 1)
        warnings.warn_explicit("divide by zero \x1b[2J", RuntimeWarning, str(mine), 7)
        warnings.warn("decoding is slower", RunWarning, stacklevel=1)
    assert capsys.readouterr().err == f"warning: {mine}:7: divide by zero \\u001b[2J\nwarning: decoding is slower\n"
