"""Supervised fine-tuning from conversations to checkpoint: the loss it reports is the one transformers computes, it falls, and resumes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hub_server
import pytest
import runs
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fulltilt import loop
from fulltilt.observe.console import Console

# Ends every turn, so that a conversation is one row; the model's own template ends none, so that each turn is a row.
ENDED = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)

TABLES: dict[str, dict[str, Any]] = {
    **runs.SFT,
    "data": {"train": "talk.jsonl", "val": "talk_val.jsonl", "max_prompt_tokens": 64, "system": "Add."},
    "algorithm": {"name": "sft", "prompts_per_step": 4, "minibatches_per_step": 2},
    "train": {"lr": 1e-2, "warmup_steps": 1},
    "run": {**runs.SFT["run"], "steps": 6, "save_every": 3, "keep": 1, "eval_every": 3, "eval_before": True},
}

Piece = tuple[str, bool]  # text, and whether it is trained on


def talk(number: int) -> list[dict[str, Any]]:
    """Two or three turns of the assistant; of every third conversation the first is not to be learned."""
    first = {"role": "assistant", "content": f"is {number + 1}.", **({"weight": 0} if number % 3 == 0 else {})}
    messages = [{"role": "user", "content": f"{number}+1?"}, first, {"role": "user", "content": "+2?"}]
    messages.append({"role": "assistant", "content": f"is {number + 3}, as I see it."})
    if number % 2:
        messages += [{"role": "tool", "content": "yes"}, {"role": "assistant", "content": "so."}]
    return messages


def as_one_row(messages: list[dict[str, Any]]) -> list[list[Piece]]:
    """What ENDED writes, put together by hand."""
    pieces: list[Piece] = [("s:Add.</s>\n", False)]
    for message in messages:
        trained = message["role"] == "assistant" and message.get("weight", 1) == 1
        pieces += [(f"{message['role'][0]}:", False), (f"{message['content']}</s>", trained), ("\n", False)]
    return [pieces]


def as_rows_of_one_turn(messages: list[dict[str, Any]]) -> list[list[Piece]]:
    """What the model's own template writes: each trained turn behind its history, ended by the end token it would be sampled with."""
    rows = []
    for place, message in enumerate(messages):
        if message["role"] == "assistant" and message.get("weight", 1) == 1:
            history = "".join(f"{before['role'][0]}:{before['content']}\n" for before in messages[:place])
            rows.append([(f"<s>s:Add.\n{history}a:", False), (f"{message['content']}\n</s>", True)])
    return rows


def loss_by_transformers(model_folder: Path, rows: list[list[Piece]]) -> float:
    """Mean over all labels of all rows, one row at a time, with transformers' own model and loss."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    total, count = 0.0, 0
    for row in rows:
        ids, labels = [], []
        for text, trained in row:
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += tokens
            labels += tokens if trained else [-100] * len(tokens)
        given = {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels])}
        trained_tokens = sum(label != -100 for label in labels)
        with torch.no_grad():
            total += float(model(**given).loss) * trained_tokens
        count += trained_tokens
    return total / count


@pytest.fixture
def make(tmp_path: Path, model_folders: Callable[[str], Path]) -> Callable[..., Path]:
    def made(name: str, template: str | None = ENDED) -> Path:
        own = {"chat_template": "template.jinja"} if template else {}
        folder = runs.make(tmp_path / name, model_folders("llama"), {**TABLES, "model": {"path": "model", **own}})
        (folder / "template.jinja").write_text(template or "")
        runs.write_rows(folder / "talk.jsonl", [{"messages": talk(number)} for number in range(10)])
        runs.write_rows(folder / "talk_val.jsonl", [{"messages": talk(number)} for number in range(20, 25)])
        return folder

    return made


def validations(folder: Path) -> dict[int, float]:
    return {line["step"]: line["val/loss"] for line in runs.metrics(folder) if "val/loss" in line}


def held_out(rows_of: Callable[[list[dict[str, Any]]], list[list[Piece]]]) -> list[list[Piece]]:
    return [row for number in range(20, 25) for row in rows_of(talk(number))]


@pytest.mark.parametrize(("template", "rows_of"), [(ENDED, as_one_row), (None, as_rows_of_one_turn)], ids=["one row", "a row a turn"])
def test_the_validation_loss_is_that_of_transformers_and_falls(template: str | None, rows_of: Any, make: Callable[..., Path]) -> None:
    folder = make("run", template)
    said = runs.train(folder).said
    losses, rows = validations(folder), held_out(rows_of)
    assert list(losses) == [0, 3, 6]
    # float32 sums in another order: packed rows here, one row at a time there.
    assert losses[0] == pytest.approx(loss_by_transformers(folder / "model", rows), abs=1e-5)
    assert losses[6] == pytest.approx(loss_by_transformers(runs.checkpoints(folder)[6] / "model", rows), abs=1e-5)
    assert losses[6] < losses[3] < losses[0] - 0.3
    # Of these five, one has a single turn to learn.
    assert "10 rows read" in said and ("4 conversations became 9 rows" in said) == (template is None)
    with contextlib.chdir(folder):
        latest = loop.evaluate(runs.read_config(folder), Console(quiet=True), latest=True)
    assert (latest["step"], latest["val/loss"]) == (6, losses[6])


def test_a_resumed_run_ends_as_an_uninterrupted_one(make: Callable[..., Path]) -> None:
    whole, resumed = make("whole"), make("resumed")
    runs.train(whole)
    runs.train(resumed, "run.steps=3")
    assert "resuming from step 3" in runs.train(resumed).said
    runs.assert_equal_runs(resumed, whole)


def test_other_masks_under_the_same_tokens_are_another_data_set(make: Callable[..., Path]) -> None:
    folder = make("run")
    runs.train(folder, "run.steps=3")
    unweighted = [[{key: value for key, value in message.items() if key != "weight"} for message in talk(number)] for number in range(10)]
    runs.write_rows(folder / "talk.jsonl", [{"messages": messages} for messages in unweighted])
    with pytest.raises(ValueError, match=r"data\.train: its rows are not those that the run"):
        runs.train(folder)


def test_a_run_on_a_data_set_of_the_hub_keeps_its_commit(
    make: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make("run")
    lines = [json.dumps({"messages": talk(number)}) for number in range(10)]
    with hub_server.serve() as hub:
        hub.use_in_tests(monkeypatch, tmp_path / "cache")
        first = hub.commit("datasets", "org/talk", {"train.jsonl": "\n".join(lines).encode()})
        said = runs.train(folder, "data.train=org/talk", "run.steps=3").said
        assert f"10 rows read from org/talk at commit {first}" in said
        hub.commit("datasets", "org/talk", {"train.jsonl": "\n".join(lines[:9]).encode()})
        with pytest.raises(ValueError, match=rf"was started with, which were org/talk at commit {first}, or the chat template"):
            runs.train(folder, "data.train=org/talk")
        # By its name the commit is still there.
        resumed = runs.train(folder, f"data.train=org/talk@{first}", "run.resume=force", "run.steps=4").said
        assert "resuming from step 3" in resumed and "rows of data.train changed" not in resumed
