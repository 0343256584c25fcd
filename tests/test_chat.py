"""`fulltilt chat`: turns, their limits, pipes, interruption, and which model answers."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import models
import pytest
import runs

import fulltilt
from fulltilt import cli
from fulltilt.chat import HELP, ChatOptions, ShownAnswer, chat
from fulltilt.loop import generation
from fulltilt.loop.generation import TextCodec
from fulltilt.model import load
from fulltilt.records import RunWarning
from fulltilt.words import printable

ModelFolders = Callable[[str], Path]
SHORT: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model_folders: ModelFolders) -> Path:
    """A run of two steps with adapters, both checkpoints kept."""
    folder = tmp_path_factory.mktemp("chat") / "run"
    fulltilt.train(
        model=model_folders("qwen2"), data=[{"prompt": f"{n}+1="} for n in range(4)], reward=lambda solution_str: len(solution_str),
        algorithm={"prompts_per_step": 4, "samples_per_prompt": 2}, steps=2, save_every=1, lr=0.05, lora={"rank": 2}, max_new_tokens=8,
        health={"ignore": ["all-clipped"]}, run_dir=folder,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def untaught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a chat template."""
    folder = models.save("llama", tmp_path_factory.mktemp("untaught"))
    (folder / "chat_template.jinja").unlink()
    return folder


def talk(model: Path, *lines: str, out: io.StringIO | None = None, **given: Any) -> tuple[list[str], list[str]]:
    """Answers and notes."""
    notes: list[str] = []
    out = out or io.StringIO()
    chat(ChatOptions(str(model), **{**SHORT, **given}), [f"{line}\n" for line in lines], out, notes.append)
    return out.getvalue().split("\n")[:-1], notes


def expected(model: Path, prompt: Any, **given: Any) -> str:
    (text,) = fulltilt.generate(model, [prompt], **{**SHORT, **given})
    return str(text)


def test_a_line_is_the_next_turn(trained: Path) -> None:
    answers, notes = talk(trained, "hi", "more", "", "/reset", "hi", "/quit", "/help", "/exit", "never asked")
    first = {"role": "user", "content": "hi"}
    second = [first, {"role": "assistant", "content": answers[0]}, {"role": "user", "content": "more"}]
    assert answers == [expected(trained, [first]), expected(trained, second), answers[0]]
    assert "step 2; each line is a turn of the conversation" in notes[0] and notes[1:] == [
        "a new conversation",
        f"/quit: no such command. {HELP}",
        HELP,
    ]


@pytest.mark.long
def test_options_of_a_conversation(trained: Path, model_folders: ModelFolders) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert talk(trained, "hi", system="be brief")[0] == [expected(trained, messages)]
    older, notes = talk(trained, "hi", step=1)
    assert older == [expected(trained, messages[1:], step=1)] and ", step 1;" in notes[0]
    assert len({talk(trained, "hi", seed=seed, temperature=2.0)[0][0] for seed in (0, 1, 0)}) == 2
    assert talk(trained, "1+1=", plain=True)[0] == [expected(trained, "1+1=")] != talk(model_folders("qwen2"), "1+1=", plain=True)[0]


def test_without_a_template_each_line_is_continued_by_itself(untaught: Path) -> None:
    answers, notes = talk(untaught, "1+1=", "2+2=", "1+1=")
    assert answers == [expected(untaught, "1+1="), expected(untaught, "2+2="), answers[0]]
    assert "no chat template: each line is continued on its own" in notes[0]
    with pytest.raises(fulltilt.UserError, match="--system: there is no chat template"):
        talk(untaught, "1+1=", system="be brief")


@pytest.mark.long
def test_a_run_with_a_system_message_continues_plain_lines(tmp_path: Path, model_folders: ModelFolders) -> None:
    made = fulltilt.train(
        model=model_folders("qwen2"), data=[{"prompt": "1+1="}], reward=lambda solution_str: len(solution_str), steps=1, max_new_tokens=2,
        algorithm={"prompts_per_step": 1, "samples_per_prompt": 2}, apply_template="always", system="be brief", run_dir=tmp_path / "run",
        health={"ignore": ["all-clipped"]},
    )  # fmt: skip
    assert made.model is not None
    answers, notes = talk(made.folder, "1+1=", plain=True)
    assert answers == talk(made.model, "1+1=", plain=True)[0] and notes[0].startswith("--plain: data.system and data.template_args")
    with pytest.raises(fulltilt.UserError, match="--system: --plain uses no chat template"):
        talk(made.folder, "hi", plain=True, system="be long")


@pytest.mark.long
def test_what_does_not_fit_is_left_out_with_a_note(trained: Path) -> None:
    """The model has 512 positions, its tokens are characters."""
    answers, notes = talk(trained, "a" * 200, "b" * 200, "c" * 200, "d" * 600, "hi")
    assert len(answers) == 4 and answers[3] == expected(trained, [{"role": "user", "content": "hi"}])
    assert [note.partition(":")[0] for note in notes[1:3]] == ["the conversation has become too long"] * 2
    assert notes[3].startswith("this has 605 tokens; there is room for 488.") and len(notes) == 4
    with pytest.raises(fulltilt.UserError, match="--max-new-tokens: the model has 512 positions"):
        talk(trained, "hi", max_new_tokens=512)
    halves, _ = talk(trained, "hi", "d" * 600, max_new_tokens=None)  # left out: half of the positions
    assert halves == [expected(trained, [{"role": "user", "content": "hi"}], max_new_tokens=256)]


def test_a_template_that_fails_can_be_left_out(tmp_path: Path, model_folders: ModelFolders) -> None:
    folder = shutil.copytree(model_folders("qwen2"), tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    answers, notes = talk(folder, "hi")
    assert answers == [] and notes[1].endswith(
        "cannot write this conversation: no. Use --plain to talk without it. The conversation begins anew"
    )
    assert talk(folder, "hi", plain=True)[0] == [expected(folder, "hi")]


class Interrupted(io.StringIO):
    """Ctrl-C when the first part of the first answer is shown."""

    parts = 0

    def write(self, text: str) -> int:
        self.parts += 1
        written = super().write(text)
        if self.parts == 1:
            raise KeyboardInterrupt
        return written


@pytest.mark.long
@pytest.mark.parametrize(("module", "place"), [(generation, "tables_for"), (load, "load_tokenizer"), (generation, "assemble_generation")])
def test_a_checkpoint_that_rotates_away_while_it_is_read(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, place: str
) -> None:
    """The run that is still training has made a newer one."""
    run = shutil.copytree(trained, tmp_path / "run", symlinks=True)
    newest = run / "checkpoints" / "step-00000002"
    newest.rename(tmp_path / "next")
    original = getattr(module, place)

    def rotates(*given: Any) -> Any:
        if (tmp_path / "next").exists():
            (tmp_path / "next").rename(newest)
            shutil.rmtree(run / "checkpoints" / "step-00000001")
        return original(*given)

    monkeypatch.setattr(module, place, rotates)
    with pytest.warns(RunWarning, match="step-00000001 was deleted by its run while it was read"):
        answers, notes = talk(run, "2+1=")
    assert "step 2" in notes[0] and answers == talk(trained, "2+1=")[0]


def test_ctrl_c_ends_an_answer_and_not_the_conversation(untaught: Path) -> None:
    out = Interrupted()
    answers, notes = talk(untaught, "1+1=", "1+1=", out=out, max_new_tokens=200)
    assert notes[1] == "\nstopped" and 0 < len(answers[0]) < len(answers[1]) and answers[1].startswith(answers[0])
    assert out.parts > 5  # answers are shown as they come


def test_nothing_is_shown_that_may_change_or_that_a_terminal_obeys() -> None:
    tokenizer, out = models.tokenizer(), io.StringIO()
    shown = ShownAnswer(TextCodec(tokenizer, None, None), ["END"], out)  # type: ignore[arg-type]
    shown.listen(0, tokenizer("abcEN")["input_ids"])
    assert out.getvalue() == "ab"
    shown.listen(0, tokenizer("abcEND")["input_ids"])
    shown.finish("abc\x1b[2J\n")
    assert out.getvalue() == f"abc{printable(chr(27))}[2J\n" and chr(27) not in out.getvalue()


def test_the_command_reads_a_pipe(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nmore\n"))
    said = runs.command_here(trained, "chat", ".", "--max-new-tokens", "24", "--temperature", "0")
    assert said.code == 0 and said.out.split("\n")[:-1] == talk(trained, "hi", "more")[0]
    assert said.error.startswith("loading . ...\n")


def test_input_that_is_not_text_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xffb\n"), encoding="utf-8"))
    assert list(cli.typed_lines()) == ["a\ufffdb\n"]


@pytest.mark.parametrize("arguments", [["TEXT"], ["--TEXT"], ["chat", "--TEXT"], ["bench", "TEXT"], ["chat", ".", "TEXT"]], ids=" ".join)
def test_usage_errors_cannot_control_the_terminal(tmp_path: Path, arguments: list[str]) -> None:
    said = runs.command_here(tmp_path, *(each.replace("TEXT", "x\u202e\x1b[2J\x9b") for each in arguments))
    assert said.code == 2 and "\\u202e" in said.error and printable(said.error) == said.error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], 'MODEL: no such folder: "nowhere"'),
        ([".", "--step", "7"], "no checkpoint of step 7; it has those of steps 1, 2"),
        ([".", "--temperature", "-1"], "1. --temperature: must be"),
        ([".", "--seed", str(2**63)], "1. --seed: must be a whole number"),
        ([".", "--max-new-tokens", str(2**40)], "1. --max-new-tokens: must be a whole number"),
        (["checkpoints/step-00000001/model/adapter_config.json"], "is a file"),
    ],
    ids=lambda given: given if isinstance(given, str) else " ".join(given),
)
def test_mistakes(trained: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    said = runs.command_here(trained, "chat", *arguments)
    assert (said.code, said.out) == (2, "") and words in said.error and "Traceback" not in said.error
