"""Helpers for sentences and for functions that a configuration names by file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fulltilt import user_code, words


@pytest.mark.parametrize(("count", "text"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows")])
def test_a_count_has_its_noun(count: int, text: str) -> None:
    assert words.many(count, "row") == text
    assert [words.many(each, "micro-batch") for each in (1, 2)] == ["1 micro-batch", "2 micro-batches"]


def test_characters_that_a_terminal_obeys_or_hides_are_escaped() -> None:
    assert (
        words.printable("\x00\x1b[2J\r\x7f\x9b\u202e\u2066\ufeff\udc80\U000e0041")
        == r"\u0000\u001b[2J\u000d\u007f\u009b\u202e\u2066\ufeff\udc80\U000e0041"
    )
    plain = "two\nlines\t\\x1b 5 € é \u3000 漢字 \U0001f469\u200d\U0001f52c"  # a joined emoji and a wide space are text
    assert words.printable(plain) == plain


@pytest.mark.parametrize(("names", "text"), [([], ""), (["a"], "a"), (["a", "b"], "a or b"), (["a", "b", "c"], "a, b or c")])
def test_choices_are_joined(names: list[str], text: str) -> None:
    assert words.either(names) == text
    assert words.joined(names, "and") == text.replace("or", "and")


def test_long_lists_and_texts_are_cut() -> None:
    assert words.listed([1, 2, 3], most=2) == "1, 2 and 1 more"
    assert words.listed(["a", "b"]) == "a, b"
    assert [words.shortened("abcdef", most) for most in (6, 5)] == ["abcdef", "ab..."]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**20, "3.0 MiB"), (5 * 2**40, "5.0 TiB")]
)
def test_bytes_have_a_unit(count: int, text: str) -> None:
    assert words.in_bytes(count) == text


def test_a_users_file_is_executed_once_as_it_was_when_it_was_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("CALLS = []\ndef add(): CALLS.append(1); return len(CALLS)\n")
    code = user_code.locate(f"{path}:add")
    path.write_text("def add(): return 'changed'\n")
    assert [user_code.function(code)() for _ in range(2)] == [1, 2]
    assert user_code.function(user_code.locate(f"{path}:add"))() == "changed"


def test_a_file_hides_an_installed_module_only_where_it_runs_as_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "fulltilt_has_no_module_of_this_name.py"
    path.write_text("def name(): return __name__\n")
    code = user_code.locate(f"{path}:name")
    assert user_code.function(code)() == f"fulltilt_user_{path.stem}" and sys.path[-1] == str(tmp_path)
    assert user_code.function(code, as_script=True)() == path.stem and sys.path[0] == str(tmp_path)
