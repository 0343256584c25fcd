"""Curves of runs: what is read of metrics, what is written, and what is said of mistakes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import runs

from fulltilt.observe import plot
from fulltilt.records import UserError

LINES = [
    {"step": 0, "val/reward/mean": 0.1, "timing_s/testing": 2.0},
    {"step": 1, "critic/score/mean": 0.2, "timing_s/step": 3.0},
    {"step": 2, "critic/score/mean": None, "nonfinite": ["critic/score/mean"], "timing_s/step": 4.0, "timing_s/save_checkpoint": 0.5},
    {"step": 3, "critic/score/mean": 0.4, "val/reward/mean": 0.3, "timing_s/step": 1.0, "timing_s/testing": 2.0},
]


def run_folder(folder: Path, lines: list[dict] = LINES, tail: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return folder


def test_what_a_run_did_not_measure_is_no_point(tmp_path: Path) -> None:
    accuracy, reward = plot.read([run_folder(tmp_path / "a")], [])
    assert accuracy == plot.Curve("a", "val/reward/mean", (0, 3), (2, 12.5), (0.1, 0.3))
    assert reward == plot.Curve("a", "critic/score/mean", (1, 3), (5, 12.5), (0.2, 0.4))


def test_a_run_that_is_being_written_ends_in_half_a_line(tmp_path: Path) -> None:
    whole = plot.read([run_folder(tmp_path / "a")], ["critic/score/mean"])
    half = plot.read([run_folder(tmp_path / "b" / "a", tail='{"step": 4, "critic/sc')], ["critic/score/mean"])
    assert whole == half


def test_runs_are_told_apart_by_the_ends_of_their_paths() -> None:
    assert plot.labels([Path("x/one"), Path("x/two")]) == ["one", "two"]
    assert plot.labels([Path("x/one/grpo"), Path("y/one/grpo"), Path("y/two/grpo")]) == ["x/one/grpo", "y/one/grpo", "y/two/grpo"]
    assert plot.labels([Path("/same"), Path("/same")]) == ["/same", "/same"]


def test_what_is_written_can_be_read_again(tmp_path: Path) -> None:
    curves = plot.read([run_folder(tmp_path / "a"), run_folder(tmp_path / "b", LINES[:2])], [])
    assert plot.write(curves, tmp_path / "both.json", against="seconds") == [tmp_path / "both.json"]
    assert plot.read([tmp_path / "both.json"], []) == curves
    assert [curve.label for curve in plot.read([tmp_path / "both.json"], ["critic/score/mean"])] == ["a", "b"]


def test_curves_of_one_name_in_two_files_are_told_apart(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "a")
    for name in ("one", "two"):
        plot.write(plot.read([run], []), tmp_path / f"{name}.json")
    found = plot.read([tmp_path / "one.json", tmp_path / "two.json", run_folder(tmp_path / "b")], ["critic/score/mean"])
    assert [curve.label for curve in found] == ["one.json: a", "two.json: a", "b"]


def test_no_source_is_left_out_in_silence(tmp_path: Path) -> None:
    other = tmp_path / "learn.json"
    other.write_text(json.dumps({"curves": [{"label": "x", "metric": "reward", "steps": [1], "seconds": [1], "values": [1]}]}))
    with pytest.raises(UserError, match=r"learn\.json: has no values of .*give --metric with one that it has: reward"):
        plot.read([other, run_folder(tmp_path / "a")], [])
    assert len(plot.read([other, tmp_path / "a"], ["reward", "critic/score/mean"])) == 2
    with pytest.raises(UserError, match="It has no step yet"):
        plot.read([tmp_path / "a", run_folder(tmp_path / "b", [])], [])


def test_a_source_is_never_written_over(tmp_path: Path) -> None:
    curves = plot.read([run_folder(tmp_path / "a")], [])
    plot.write(curves, tmp_path / "a.json")
    with pytest.raises(UserError, match="is one of the sources"):
        plot.write(curves, tmp_path / "a.json", sources=[tmp_path / "a.json"])
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    before = (tmp_path / "a.json").read_text()
    assert plot.write(curves, tmp_path / "a.png", "seconds", sources=[tmp_path / "a.json"]) == [tmp_path / "a.png"]
    assert (tmp_path / "a.json").read_text() == before


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from matplotlib.image import imread

    curves = plot.read([run_folder(tmp_path / "a"), run_folder(tmp_path / "b", LINES[:2])], [])
    assert plot.write(curves, tmp_path / "both.png", "seconds", smooth=2, title="both") == [tmp_path / "both.json", tmp_path / "both.png"]
    two_panels, one_panel = imread(tmp_path / "both.png"), tmp_path / "one.png"
    plot.write(curves[:1], one_panel)
    assert two_panels.std() > 0 and two_panels.shape[0] == 2 * imread(one_panel).shape[0]


def test_without_matplotlib_there_are_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # so that Python finds no such package
    with pytest.raises(UserError, match=r'pip install "fulltilt\[plot\]".*--out .*a\.json'):
        plot.files(tmp_path / "a.png")
    assert plot.files(tmp_path / "a.json") == (None, tmp_path / "a.json")


def test_a_metric_that_does_not_exist_is_told_before_the_want_of_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ended = runs.command_here(tmp_path, "plot", str(run_folder(tmp_path / "a")), "--metric", "rewrad", "--out", "a.png")
    assert (ended.code, ended.out) == (2, "") and "--metric rewrad: no run has it" in ended.error


def test_trailing_means() -> None:
    assert plot.trailing_means([1, 2, 3, 4], [1, 3, 5, 7], 2) == [1, 2, 4, 6]
    assert plot.trailing_means([1, 2], [1, 3], 1) == [1, 3]
    # Validations every 20 steps are not blurred by what smooths the steps between them.
    assert plot.trailing_means([0, 20, 40], [1, 3, 7], 10) == [1, 3, 7] and plot.trailing_means([0, 20, 40], [1, 3, 7], 21) == [1, 2, 5]
    assert plot.trailing_means([], [], 10) == []


def test_mistakes(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "a")
    with pytest.raises(UserError, match=r"--metric reward/mean: no run has it. Similar: val/reward/mean"):
        plot.read([run], ["reward/mean"])
    with pytest.raises(UserError, match=r"has no metrics\.jsonl: it is not a run's folder, or its run has finished no step"):
        plot.read([tmp_path], [])
    with pytest.raises(UserError, match=r"nowhere\.json: no such file"):
        plot.read([tmp_path / "nowhere.json"], [])
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UserError, match="has no curves"):
        plot.read([tmp_path / "other.json"], [])
    with pytest.raises(UserError, match="is damaged: line 1 cannot be read"):
        plot.read([run_folder(tmp_path / "c", [], tail="no JSON\n")], [])
    with pytest.raises(UserError, match="no step has finished"):
        plot.read([run_folder(tmp_path / "d", [])], [])
    with pytest.raises(UserError, match=r"ends in \.png"):
        plot.files(tmp_path / "a.pdf")


@pytest.mark.parametrize(
    "content",
    [b"\x89PNG\x00\xff", b"\xff" * 100, b"[]", b'{"curves": 3}', b'{"curves": [{}]}', b'{"curves": [[1]]}', b"[" * 100_000, b"",
     b'{"curves": [{"label": 1, "metric": 2, "steps": ["x"], "seconds": [1], "values": [1]}]}',
     b'{"curves": [{"label": "a", "metric": "b", "steps": [1, 2], "seconds": [1], "values": [1]}]}',
     b'{"curves": [{"label": "a", "metric": "b", "steps": [1' + b"0" * 400 + b'], "seconds": [1], "values": [1]}]}'],
)  # fmt: skip
def test_files_that_are_no_curves(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UserError, match="has no curves"):
        plot.read([tmp_path / "file"], [])


def test_one_flipped_bit_anywhere_in_the_metrics(tmp_path: Path) -> None:
    """The line is damaged, or it still is one."""
    run = run_folder(tmp_path / "a")
    path = run / "metrics.jsonl"
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        try:
            plot.read([run], [])
        except UserError as error:
            assert "line" in str(error) or "metric" in str(error) or "no values" in str(error) or "nothing to plot" in str(error), error


def test_what_is_not_a_regular_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe")
    for source in (tmp_path / "run", tmp_path / "pipe"):
        with pytest.raises(UserError, match="is not a file"):
            plot.read([source], [])


@pytest.mark.parametrize("name", ["package.json", "package.png"])
def test_no_other_programs_file_is_written_over(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    curves = plot.read([run_folder(tmp_path / "a")], [])
    (tmp_path / "package.json").write_text('{"name": "mine"}')
    with pytest.raises(UserError, match=r"package\.json exists, and fulltilt did not write it"):
        plot.write(curves, tmp_path / name)
    (tmp_path / "package.json").unlink()
    plot.write(curves, tmp_path / name)
    plot.write(curves, tmp_path / name)  # its own
    (tmp_path / "text.png").write_text("mine")
    with pytest.raises(UserError, match="is not a PNG"):
        plot.write(curves, tmp_path / "text.png")
    assert (tmp_path / "text.png").read_text() == "mine" and not (tmp_path / "text.json").exists()


def test_names_are_not_formulas(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    lines = [{"step": 1, "reward/parts/$x_": 1.0}]
    plot.write(plot.read([run_folder(tmp_path / "$a^")], []) + plot.read([run_folder(tmp_path / "b", lines)], []), tmp_path / "c.png")
