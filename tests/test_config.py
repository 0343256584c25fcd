"""Configuration: every mistake at once, in plain words, with its remedy; values that are legal arrive unchanged."""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fulltilt import config as configuration
from fulltilt import reference, schema
from fulltilt.config import differences, load, parse, snapshot, warnings
from fulltilt.records import UserError
from fulltilt.reward import functions
from fulltilt.schema import REWARDS, Config, flatten, to_toml

ROOT = Path(__file__).parents[1]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Tables of a run without mistakes, with all the files it names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text("")
    return {"model": {"path": "model"}, "data": {"train": "train.jsonl"}, "run": {"steps": 3}}


def mistakes_of(tables: dict[str, Any], *overrides: str, **arguments: Any) -> list[str]:
    """The mistakes, without their numbers; none if it parses."""
    try:
        parse(tables, overrides, "run.toml", **arguments)
    except UserError as error:
        head, *lines = str(error).splitlines()
        assert head == f"run.toml: {len(lines)} mistake{'s' if len(lines) > 1 else ''}"
        assert "Traceback" not in str(error) and "pydantic" not in str(error)
        numbered = [line.partition(". ") for line in lines]
        assert [number for number, _, _ in numbered] == [f"  {n}" for n in range(1, len(lines) + 1)]
        return [text for _, _, text in numbered]
    return []


def test_a_legal_run_parses(run: dict[str, dict[str, Any]]) -> None:
    config = parse(run, ["train.lr=1e-5", "rollout.max_seqs=8"])
    assert (config.train.lr, config.rollout.max_seqs, config.run.steps) == (1e-5, 8, 3)
    assert config.rollout.max_batched_tokens == "auto"


def test_tables_are_not_changed_by_parsing(run: dict[str, dict[str, Any]]) -> None:
    parse(run, ["run.steps=7"])
    assert run["run"] == {"steps": 3}


def test_config_is_frozen(run: dict[str, dict[str, Any]]) -> None:
    config = parse(run)
    with pytest.raises(ValidationError):
        config.run.steps = 9  # type: ignore[misc]
    with pytest.raises(ValidationError):
        config.run = config.run  # type: ignore[misc]


# ---- files


def test_load_reads_a_file_and_overrides_win_over_it(run: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(to_toml(parse(run)))
    assert load(path).run.steps == 3
    assert load(path, ["run.steps=5"]).run.steps == 5
    assert load(str(path), ["run.steps=5"]).run.steps == 5


def test_bad_toml_names_file_line_and_shows_the_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[model]\npath = here\n")
    with pytest.raises(UserError) as error:
        load(path)
    assert str(error.value).startswith(f"{path}, line 2: not valid TOML: ")
    assert "    path = here" in str(error.value) and "quotes" in str(error.value)


def test_toml_that_ends_too_early_names_its_last_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text('[model]\npath = """here')
    with pytest.raises(UserError, match=r"line 2: not valid TOML"):
        load(path)
    path.write_text("[run]\nsteps = 1\nsteps = 2\n")
    with pytest.raises(UserError, match=r"line 3: not valid TOML"):
        load(path)


@pytest.mark.parametrize("content", [None, b"\xff\xfe[model]"])
def test_unreadable_files_are_the_users_mistake(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"run\.toml: (no such file|not UTF-8)"):
        load(path)
    with pytest.raises(UserError, match="a folder"):
        load(tmp_path)


# Each is written to a file and read: never a traceback, and the mistakes of a file that can be read are all told at once.
FILES: dict[str, bytes] = {
    "byte order mark of UTF-16": b"\xff\xfe[\x00m\x00",
    "Latin-1": '[data]\nsystem = "M\xfcller"'.encode("latin-1"),
    "NUL": b'[run]\ndir = "a\x00b"\n',
    "escape sequence": b"[run]\ndir = \x1b[31mred\n",
    "lone carriage returns": b"[run]\rsteps = 1\r",
    "nested lists": b"[data]\ntemplate_args = { a = " + b"[" * 5000 + b"]" * 5000 + b" }",
    "nested lists that a parser still reads": b"[data.template_args]\na = " + b"[" * 100 + b"]" * 100,
    "nested tables": b"[data.template_args" + b".a" * 3000 + b"]\nb = 1",
    "unknown nested tables": b"[a" + b".a" * 500 + b"]\nb = 1",
    "inline tables": b"x = " + b"{a=" * 3000 + b"1" + b"}" * 3000,
    "duplicate table": b"[run]\nsteps = 1\n[run]\nseed = 1\n",
    "duplicate key": b"[run]\nsteps = 1\nsteps = 2\n",
    "dates": b"[run]\nsteps = 1979-05-27\nseed = 07:32:00\n[train]\nlr = 1979-05-27T07:32:00Z\n",
    "an impossible date": b"[run]\nsteps = 2024-02-31\n",
    "keys of control characters": b'["\\u001b[2J"]\n"a\\nb" = 1\n[run]\n"\\u202esteps" = 1\n',
    "an endless number": b"[run]\nsteps = " + b"9" * 5000 + b"\n",
    "a number beyond floats": b"[train]\nlr = 1e400\n",
    "a section as a list": b"[[run]]\nsteps = 1\n[[train]]\n",
    "one long line": b"[run]\nsteps = " + b"x" * 100_000,
    "too large": b"#" * (2**20 + 1),
    "empty": b"",
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_any_content_is_the_users_mistake(tmp_path: Path, name: str) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(FILES[name])
    with pytest.raises(UserError) as error:
        load(path)
    told = str(error.value)
    assert told.startswith(str(path)) and len(told) < 2000
    assert told.replace("\n", "").isprintable(), told


def test_what_editors_of_other_systems_write_is_accepted(run: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    path, text = tmp_path / "run.toml", to_toml(parse(run))
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert load(path) == parse(run)


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "too long", "NUL"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path, kind: str) -> None:
    path = {"device": Path("/dev/zero"), "too long": tmp_path / ("x" * 300), "NUL": tmp_path / "a\0b"}.get(kind, tmp_path / kind)
    if kind == "folder":
        path.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    told = {"folder": "a folder", "pipe": "not a regular file", "device": "not a regular file"}.get(kind, "cannot be read: .*")
    with pytest.raises(UserError, match=rf": {told}\. Give the path of a run's TOML file\.$"):
        load(path)


TEXT = st.text(st.sampled_from("[]{}=\"'\\.,#\n\r\t -+~_:0123456789aeinftru\x00\x1b\ufeffü") | st.characters(codec="utf-8"), max_size=40)
KEYS = st.sampled_from([*schema.keys(), *schema.sections(), "zzz", "data.template_args.x", "~run.steps", "+run.steps"])
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.dates() | st.times() | st.datetimes()
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6)


def refusal(told: str) -> None:
    assert "Traceback" not in told and "pydantic" not in told and "object at" not in told


@settings(max_examples=150, derandomize=True, deadline=None)
@given(content=st.binary(max_size=200) | TEXT.map(str.encode) | st.builds(lambda key, text: f"{key} = {text}".encode(), KEYS, TEXT))
def test_any_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.toml"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:  # for want of a model, if for nothing else
        load(path)
    refusal(str(error.value))


@settings(max_examples=100, derandomize=True, deadline=None)
@given(values=st.dictionaries(KEYS, VALUES, max_size=4), overrides=st.lists(st.builds("{}{}{}".format, KEYS, st.sampled_from("= "), TEXT)))
def test_any_values_are_taken_or_refused(values: dict[str, Any], overrides: list[str]) -> None:
    tables: dict[str, Any] = {"model": {"path": "/"}, "data": {"train": "/"}, "run": {"steps": 1}}
    for key, value in values.items():
        section, _, name = key.partition(".")
        if name and isinstance(tables.setdefault(section, {}), dict):
            tables[section][name] = value
        elif not name:
            tables[section] = value
    with pytest.raises(UserError) as error:  # "/" is no model
        parse(tables, overrides)
    refusal(str(error.value))


# ---- paths


def test_home_is_expanded_in_every_path(run: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.py").write_text("def loss(terms): ...\ndef advantage(rewards): ...\n")
    (tmp_path / "adapter_config.json").write_text("{}")
    monkeypatch.chdir("/")
    given: dict[str, Any] = {
        "model.path": "~/model",
        "model.chat_template": "~/mine.py",
        "data.train": ["~/train.jsonl", "~/train.jsonl"],
        "data.val": "~/train.jsonl",
        "algorithm.name": "ppo",
        "algorithm.kl_coef": 0.1,
        "algorithm.advantage": "~/mine.py:advantage",
        "algorithm.loss": "~/mine.py:loss",
        "reward.function": {"~/mine.py:score": 1.0, "gsm8k": 0.5},
        "reward.sources": {"~": "~/mine.py:score", "b": {"~/mine.py:score": 1.0}, "c": "reward_model"},
        "ref.path": "~/model",
        "critic.path": "~/model",
        "reward_model.path": "~/model",
        "reward_model.chat_template": "~/mine.py",
        "lora.rank": 1,
        "lora.path": "~",
        "run.dir": "~/runs",
        "run.steps": 1,
    }
    assert {key for key, field in schema.keys().items() if schema.row_of(field).names} <= set(given)
    tables: dict[str, Any] = {}
    for key, value in given.items():
        tables.setdefault(key.partition(".")[0], {})[key.partition(".")[2]] = value
    kept = snapshot(parse(tables))
    assert kept["reward.sources"].pop("~") == f"{tmp_path}/mine.py:score"  # the name of a source is no path
    assert "~" not in json.dumps(kept)
    assert (kept["run.dir"], kept["data.train"]) == (f"{tmp_path}/runs", [f"{tmp_path}/train.jsonl"] * 2)
    assert kept["reward.function"] == {f"{tmp_path}/mine.py:score": 1.0, "gsm8k": 0.5}
    assert parse({**tables, "run": {"steps": 1, "dir": "~root/x"}}).run.dir.endswith("root/x")
    assert parse({**tables, "run": {"steps": 1, "dir": "./~/x"}}).run.dir == "./~/x"


# ---- overrides


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("run.dir=runs/mine", "run.dir", "runs/mine"),
        ('run.dir="12"', "run.dir", "12"),
        (" run.eval_every = 0 ", "run.eval_every", 0),
        ("run.eval_before=false", "run.eval_before", False),
        ("rollout.chunked_prefill=False", "rollout.chunked_prefill", False),
        ('rollout.stop=["a", "b=c"]', "rollout.stop", ["a", "b=c"]),
        ("train.betas=[0.9, 0.95]", "train.betas", (0.9, 0.95)),
        ("train.lr=1", "train.lr", 1.0),
        ("data.template_args.enable_thinking=false", "data.template_args", {"enable_thinking": False}),
        ('reward.sources."openai/gsm8k.main"=gsm8k_flexible', "reward.sources", {"openai/gsm8k.main": "gsm8k_flexible"}),
        ("reward.sources.openai/gsm8k=gsm8k", "reward.sources", {"openai/gsm8k": "gsm8k"}),
        ("data.system=You think = you win", "data.system", "You think = you win"),
    ],
)
def test_override_values(run: dict[str, dict[str, Any]], override: str, key: str, value: Any) -> None:
    assert flatten(parse(run, [override]))[key] == value


@pytest.mark.parametrize("override", ["run.steps", "=3", "run..steps=3", "", "run.=3"])
def test_malformed_overrides(run: dict[str, dict[str, Any]], override: str) -> None:
    assert mistakes_of(run, override) == [f"{override}: not an override. Write section.key=value, for example run.steps=100"]


@pytest.mark.parametrize(
    ("typed", "mistake"),
    [
        (["train.lr", "1e-4"], "train.lr 1e-4: an override has no spaces. Write train.lr=1e-4"),
        (["train.lr", "=", "1e-4"], "train.lr = 1e-4: an override has no spaces. Write train.lr=1e-4"),
        (["train.lr", "=1e-4"], "train.lr =1e-4: an override has no spaces. Write train.lr=1e-4"),
        (["train.lr=", "1e-4", "run.seed=1"], "train.lr= 1e-4: an override has no spaces. Write train.lr=1e-4"),
        (["data.system", "be brief"], "data.system be brief: an override has no spaces. Write data.system='be brief'"),
        (["+train.lr=1e-4"], "+train.lr=1e-4: a key need not be in the file to be set. Write train.lr=1e-4"),
        (["++train.lr=1e-4"], "++train.lr=1e-4: a key need not be in the file to be set. Write train.lr=1e-4"),
        (["-run.steps=3"], "-run.steps: unknown key; the nearest is run.steps"),
        (["~run.steps=3"], "~run.steps=3: a key is unset without a value. Write ~run.steps"),
        (["~train.lr"], "~train.lr: nothing to unset, for the file does not set train.lr. Remove it"),
        (["~run.steps.x"], "~run.steps.x: nothing to unset, for the file does not set run.steps.x. Remove it"),
        (["run.dir=\udcff"], "run.dir=\\udcff: not UTF-8 text. Write it into the file, which can name every character"),
        (["\x1b[2J=1"], "\\u001b[2J: unknown key; no known key is similar: remove it. docs/reference.md lists every key"),
        (["a" + ".a" * 500 + "=1"], f"{'a.' * 48}a...: not an override. Write section.key=value, for example run.steps=100"),
        (["train.lr=" + "[" * 40 + "]" * 40], f"train.lr={'[' * 40}{']' * 40}: not an override. Write section.key=value, for example"),
        (["run.seed=" + "9" * 5000], 'run.seed: must be a whole number from 0 to 9223372036854775807, got "999'),
    ],
)
def test_overrides_of_other_habits_get_the_right_spelling(run: dict[str, dict[str, Any]], typed: list[str], mistake: str) -> None:
    (told,) = mistakes_of(run, *typed)
    assert told.startswith(mistake)


def test_a_key_of_the_file_can_be_unset(run: dict[str, dict[str, Any]]) -> None:
    run["train"] = {"lr": 1.0}
    assert parse(run, ["~train.lr"]).train == schema.TrainConfig()
    assert parse(run, ["~train"]).train.lr == 1e-6
    assert parse(run, ["~run.steps", "run.epochs=1"]).run.steps is None
    assert run["train"] == {"lr": 1.0}


def test_a_table_for_a_section_is_merged_into_it(run: dict[str, dict[str, Any]]) -> None:
    run["train"] = {"weight_decay": 0.5, "lr": 1.0}
    merged = parse(run, ["train={lr=0.001, clip_grad=2.0}"]).train
    assert (merged.lr, merged.weight_decay, merged.clip_grad) == (0.001, 0.5, 2.0)
    # The value of one key that is a table replaces the one before it.
    run["data"]["template_args"] = {"a": 1}
    assert parse(run, ["data.template_args={b=2}"]).data.template_args == {"b": 2}


@pytest.mark.parametrize(
    ("overrides", "mistake"),
    [
        (["run.steps=5", "run.steps=6"], "run.steps=5 and run.steps=6 both set run.steps. Give one of them"),
        (["run.steps=5", "run.seed=1", "run={steps=6}"], "run.steps=5 and run={steps=6} both set run.steps. Give one of them"),
        (["train.lr=1.0", "~train"], "train.lr=1.0 and ~train both set train. Give one of them"),
        (["train={}"], "train={}: sets no key. Remove it, or write ~train to unset all keys of the section"),
    ],
)
def test_a_key_is_given_once(run: dict[str, dict[str, Any]], overrides: list[str], mistake: str) -> None:
    assert mistakes_of(run, *overrides) == [mistake]


def test_a_file_that_is_named_twice_is_told(run: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    file = run["data"]["train"]
    run["data"]["train"] = [file, file, os.path.join(os.path.dirname(file), ".", os.path.basename(file))]
    (told,) = configuration.warnings(parse(run))
    assert told.startswith("data.train: ") and told.endswith("is there 3 times, so that each of its rows counts 3 times")


@pytest.mark.parametrize("given", ["run", "run/checkpoints", "run/checkpoints/step-00000010"])
def test_a_run_in_place_of_its_model(run: dict[str, dict[str, Any]], tmp_path: Path, given: str) -> None:
    for step in (9, 10):
        (tmp_path / f"run/checkpoints/step-{step:08d}/model").mkdir(parents=True)
        (tmp_path / f"run/checkpoints/step-{step:08d}/model/config.json").touch()
    meant = "run/checkpoints/step-00000010/model"
    assert mistakes_of(run, f"model.path={given}") == [
        f'model.path: "{given}" has no config.json. Give the folder of the checkpoint\'s model: {meant}'
    ]


def test_verls_checkpoint_in_place_of_a_model(run: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    for step in (20, 100):
        export = tmp_path / f"ckpt/global_step_{step}/actor/huggingface"
        export.mkdir(parents=True)
        (export / "config.json").touch()
        (export / "model.safetensors").touch()
        (export.parent / "model_world_size_2_rank_0.pt").touch()
    meant = "ckpt/global_step_100/actor/huggingface"
    (told,) = mistakes_of(run, "model.path=ckpt")
    assert told.endswith(f"has no config.json. Give the folder of the checkpoint's model: {meant}")
    assert not mistakes_of(run, f"model.path={meant}")
    (tmp_path / meant / "model.safetensors").unlink()  # verl always saves configuration and tokenizer there, but weights only if asked
    for path in (meant, "ckpt/global_step_100", "ckpt/global_step_100/actor"):
        (told,) = mistakes_of(run, f"model.path={path}")
        assert "verl's FSDP shards" in told and "verl.model_merger merge --backend fsdp --local_dir ckpt/global_step_100/actor" in told


def test_an_override_below_a_value(run: dict[str, dict[str, Any]]) -> None:
    assert mistakes_of(run, "model.path.x=3") == ['model.path.x: model.path is a value ("model"), not a table: nothing can be set below it']


def test_an_override_cannot_smuggle_in_a_second_line(run: dict[str, dict[str, Any]]) -> None:
    assert parse(run, ['run.dir="a"\nseed = 4']).run.dir == '"a"\nseed = 4'


# ---- wrong values


@pytest.mark.parametrize(
    ("override", "mistake"),
    [
        ("algorithm.prompts_per_step=-4", "algorithm.prompts_per_step: must be a whole number from 1 to 2147483647, got -4"),
        ("algorithm.prompts_per_step=1.5", "algorithm.prompts_per_step: must be a whole number from 1 to 2147483647, got 1.5"),
        ('algorithm.prompts_per_step="64"', 'algorithm.prompts_per_step: must be a whole number from 1 to 2147483647, got "64"'),
        ("algorithm.prompts_per_step=true", "algorithm.prompts_per_step: must be a whole number from 1 to 2147483647, got true"),
        ("rollout.max_seqs=0", 'rollout.max_seqs: must be "auto" or a whole number from 1 to 2147483647, got 0'),
        ("rollout.max_seqs=many", 'rollout.max_seqs: must be "auto" or a whole number from 1 to 2147483647, got "many"'),
        ("rollout.memory_fraction=1.5", 'rollout.memory_fraction: must be "auto" or a number greater than 0 and at most 1, got 1.5'),
        ("rollout.top_p=0", "rollout.top_p: must be a number greater than 0 and at most 1, got 0"),
        ("rollout.stop=end", 'rollout.stop: must be a list of text that is not empty, got "end"'),
        ("train.lr=nan", "train.lr: must be a number greater than 0 and at most 1000, got nan (not a finite number)"),
        ("train.betas=[0.9]", "train.betas: must be a list of 2, each a number at least 0 and less than 1, got [0.9]"),
        ("train.schedule=cosin", 'train.schedule: must be "constant", "linear" or "cosine", got "cosin"'),
        (
            "train.recompute=true",
            'train.recompute: must be "auto", "none", "selective" or "full", got true. enable_gradient_checkpointing is a switch: true is '
            '"full", false is "none".',
        ),
        ("train.recompute_layers=0", 'train.recompute_layers: must be "auto" or a whole number from 1 to 2147483647, got 0'),
        ("train.offload_params=1", 'train.offload_params: must be "auto", true or false, got 1'),
        ("critic.offload_params=some", 'critic.offload_params: must be "auto", true or false, got "some"'),
        ("run.eval_before=2", "run.eval_before: must be true or false, got 2"),
        ("run.dir=5", "run.dir: must be text that is not empty, got 5"),
        ("algorithm.clip_low=2", "algorithm.clip_low: must be a number from 0 to 1, got 2"),
        (
            "rollout.engine=vllm",
            'rollout.engine: must be "hf" or "native", got "vllm". vllm, sglang, trtllm and tgi are not built in this version.',
        ),
        ("train=3", "train: must be a table, got 3. Write [train] and its keys on lines of their own"),
    ],
)
def test_wrong_values(run: dict[str, dict[str, Any]], override: str, mistake: str) -> None:
    assert mistakes_of(run, override) == [mistake]


def test_missing_keys_say_what_they_mean() -> None:
    model, data, steps = mistakes_of({})
    assert model.startswith("model.path: missing, and every run needs it. Folder of a Hugging Face")
    assert data.startswith("data.train: missing, and every run needs it. Data file (parquet")
    assert steps == "run.steps: missing. Set run.steps or run.epochs"


# ---- verl's spellings of values


SPELLINGS = [
    ("algorithm.name", "gae", "ppo"),
    ("algorithm.name", "reinforce_plus_plus", "reinforce++"),
    ("algorithm.name", "reinforce_plus_plus_baseline", "reinforce++_baseline"),
    ("algorithm.name", "rloo_vectorized", "rloo"),
    ("algorithm.name", "grpo_vectorized", "grpo"),
    ("algorithm.name", "drgrpo", "dr_grpo"),
    *(
        (f"algorithm.{key}", theirs, ours)
        for key in ("kl_estimator", "reward_kl_estimator")
        for theirs, ours in (("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3"), ("mse+", "k2"), ("k2+", "k2"))
    ),
    ("algorithm.kl_estimator", "kl+", "k1+"),
    ("algorithm.kl_estimator", "low_var_kl+", "k3+"),
    *(
        ("algorithm.reward_kl_estimator", theirs, ours)
        for theirs, ours in (("kl+", "k1"), ("low_var_kl+", "k3"), ("k1+", "k1"), ("k3+", "k3"))
    ),
    ("algorithm.reward_kl_estimator", "abs+", "abs"),
    ("algorithm.advantage", "reinforce_plus_plus", "reinforce++"),
    ("algorithm.advantage", "reinforce_plus_plus_baseline", "reinforce++_baseline"),
    ("algorithm.advantage", "rloo_vectorized", "rloo"),
    ("algorithm.advantage", "grpo_vectorized", "grpo"),
    ("algorithm.advantage", "tir_optimal_token_baseline", "optimal_token_baseline"),
    ("algorithm.loss", "vanilla", "ppo"),
    ("algorithm.rejection", "token", "token_k1"),
    ("algorithm.rejection", "sequence", "seq_sum_k1"),
    ("algorithm.rejection", "geometric", "seq_mean_k1"),
]


@pytest.mark.parametrize(("key", "theirs", "ours"), SPELLINGS)
def test_verls_spelling_of_a_value_becomes_ours(run: dict[str, dict[str, Any]], key: str, theirs: str, ours: str) -> None:
    section, _, name = key.partition(".")
    if name.endswith("kl_estimator"):
        run[section] = {name.replace("estimator", "coef"): 0.1}
    if name == "rejection":
        run[section] = {"rejection_bounds": 2.0}
    in_a_file = parse({**run, section: {**run.get(section, {}), name: theirs}})
    on_the_command_line = parse(run, [f"{key}={theirs}"])
    assert in_a_file == on_the_command_line == parse(run, [f"{key}={ours}"])
    assert flatten(in_a_file)[key] == snapshot(in_a_file)[key] == ours
    assert f'\n{name} = "{ours}"\n' in to_toml(in_a_file) and theirs not in to_toml(in_a_file).split('"')
    assert parse(tomllib.loads(to_toml(in_a_file))) == in_a_file
    assert differences(snapshot(parse(run, [f"{key}={ours}"])), snapshot(in_a_file)) == []


def test_accepted_spellings_are_all_tested_and_on_the_page() -> None:
    rows = {key: schema.row_of(field).spellings for key, field in schema.keys().items()}
    assert {(key, theirs, ours) for key, table in rows.items() for theirs, ours in table.items()} == set(SPELLINGS)
    page = reference.page()
    for key, theirs, ours in SPELLINGS:
        (line,) = [line for line in page.splitlines() if line.startswith(f"| `{key}` |")]
        assert f"`{theirs}` = `{ours}`" in line


@pytest.mark.parametrize(
    ("override", "mistake"),
    [
        (
            "algorithm.kl_estimator=full",
            'algorithm.kl_estimator: must be "k1", "k2", "k3", "abs", "k1+" or "k3+", got "full". verl\'s full has no equivalent here: '
            "it is not implemented there either.",
        ),
        ("algorithm.reward_kl_estimator=full", 'algorithm.reward_kl_estimator: must be "k1", "k2", "k3" or "abs", got "full". verl'),
        ("algorithm.name=GAE", 'algorithm.name: must be "grpo", "dr_grpo", "dapo", "ppo", '),
        ("algorithm.name=grpo_passk", 'algorithm.name: must be "grpo", "dr_grpo", "dapo", "ppo", '),
    ],
)
def test_other_spellings_are_refused(run: dict[str, dict[str, Any]], override: str, mistake: str) -> None:
    (told,) = mistakes_of(run, override)
    assert told.startswith(mistake) and told.endswith(("not implemented there either.", "are values of `loss`."))


# ---- unknown keys


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("rollout.max_seq", "rollout.max_seqs"),
        ("rollout.max_tokens", "rollout.max_new_tokens"),
        ("algorithm.promts_per_step", "algorithm.prompts_per_step"),
        ("traning.lr", "train.lr"),
        ("lr", "train.lr"),
        ("algorithm.temperature", "rollout.temperature"),
        ("run.stepz", "run.steps"),
        ("train.recomputed", "train.recompute"),
        ("train.pipeline_paralel", "train.pipeline_parallel, which is a knob not built in this version: remove it"),
    ],
)
def test_unknown_keys_name_the_nearest(run: dict[str, dict[str, Any]], key: str, nearest: str) -> None:
    assert mistakes_of(run, f"{key}=1") == [f"{key}: unknown key; the nearest is {nearest}"]


def test_a_key_like_no_other_gets_no_suggestion(run: dict[str, dict[str, Any]]) -> None:
    for key in ("zzz.qqq", "run.gpus", "algorithm.frobnicate"):  # a section alone is no likeness
        assert mistakes_of(run, f"{key}=1") == [
            f"{key}: unknown key; no known key is similar: remove it. docs/reference.md lists every key"
        ]


def test_an_empty_unknown_section_is_an_error_too(run: dict[str, dict[str, Any]]) -> None:
    (mistake,) = mistakes_of({**run, "rolout": {}})
    assert mistake.startswith("rolout: unknown key")


def test_a_misspelt_key_is_not_also_reported_as_missing(run: dict[str, dict[str, Any]]) -> None:
    del run["run"]["steps"]
    assert mistakes_of(run, "run.stepz=3") == ["run.stepz: unknown key; the nearest is run.steps"]


# ---- rules between keys


@pytest.mark.parametrize(
    ("overrides", "begins"),
    [
        (["run.epochs=2"], "run.steps: 3 has no effect while run.epochs is 2. Remove it, or remove run.epochs"),
        (["run.eval_every=5"], "data.val: missing, but run.eval_every asks for validation. Set data.val, or remove run.eval_every"),
        (["run.eval_every=5", "run.eval_before=true"], "data.val: missing, but run.eval_every and run.eval_before ask for"),
        (
            ["rollout.kv_bytes=1000000", "rollout.memory_fraction=0.5"],
            "rollout.kv_bytes: 1000000 has no effect while rollout.memory_fraction is 0.5. Remove it, or",
        ),
        (["rollout.temperature=1e-38"], "rollout.temperature: 1e-38 is out of range. Use a value from 0.0001 to 10000, or 0 for greedy"),
        (["rollout.temperature=1e39"], "rollout.temperature: 1e+39 is out of range."),
        (["rollout.temperature=9.9e-5"], "rollout.temperature: 9.9e-05 is out of range."),
        (
            ["data.val=train.jsonl", "eval.temperature=1e-38"],
            "eval.temperature: 1e-38 is out of range. Use a value from 0.0001 to 10000, or 0",
        ),
        (["data.val=train.jsonl", "eval.temperature=10001"], "eval.temperature: 10001.0 is out of range."),
        (
            ["actor.micro_batch=2"],
            "actor.micro_batch: 2 has no effect while actor.dynamic_batch is true. Remove it, or set actor.dynamic_batch = false",
        ),
        (
            ["cluster.workers=2", "cluster.stall_s=10", "cluster.deadline_s=10"],
            "cluster.stall_s: 10 has no effect: a worker is given up after 10 s (cluster.deadline_s). Use less",
        ),
        (["cluster.address=10.0.0.1"], 'cluster.address: "10.0.0.1" is not HOST:PORT. Use that of a Ray cluster which this machine is'),
        (["cluster.address=ray://10.0.0.1:10001"], 'cluster.address: "ray://10.0.0.1:10001" is not HOST:PORT.'),
        (["actor.dynamic_batch=false"], "actor.micro_batch: missing, but actor.dynamic_batch is false. Set it: Samples per micro-batch."),
        (
            ["actor.dynamic_batch=false", "actor.micro_batch=2", "actor.token_budget=64"],
            "actor.token_budget: 64 has no effect while actor.dynamic_batch is false. Remove it, or set actor.dynamic_batch = true",
        ),
        (["algorithm.kl_coef=0.1", "ref.micro_batch=2"], "ref.micro_batch: 2 has no effect while ref.dynamic_batch is true."),
        (["algorithm.kl_coef=0.1", "ref.dynamic_batch=false"], "ref.micro_batch: missing, but ref.dynamic_batch is false."),
        (
            ["algorithm.prompts_per_step=4", "algorithm.minibatches_per_step=5"],
            "algorithm.minibatches_per_step: 5 is more than algorithm.prompts_per_step (4)",
        ),
        (["model.path=./gone"], 'model.path: no such folder: "./gone". Give the folder of a Hugging Face model, or a hub name'),
        (["model.path=/gone/model"], 'model.path: no such folder: "/gone/model".'),
        (["model.path=~nobody_here/model"], 'model.path: no such folder: "~nobody_here/model" (there is no user "nobody_here").'),
        (["run.dir=~nobody_here/x"], 'run.dir: "~nobody_here/x" cannot be expanded (there is no user "nobody_here"). Name a folder by'),
        (["run.dir=" + "x" * 300], 'run.dir: no folder can be called "xxx'),
        (['run.dir="a\\u0000b"'], 'run.dir: no folder can be called "a\\u0000b": it holds a NUL character'),
        (["model.path=./" + "x" * 5000], 'model.path: no such folder: "./xxx'),
        (['data.train=["train.jsonl", "a\\u0000b"]'], 'data.train: no such file or folder: "a\\u0000b"'),
        (["reward.function=" + "x" * 300 + ".py:score"], 'reward.function: no such file: "xxx'),
        (["model.path=."], 'model.path: "." has no config.json.'),
        (["model.path=train.jsonl"], 'model.path: "train.jsonl" is a file.'),
        (
            ["model.revision=main"],
            'model.revision: "main" has no effect while model.path is "model". Remove it, or give a hub name as model.path',
        ),
        (["algorithm.kl_coef=0.1", "ref.path=gone"], 'ref.path: no such folder: "gone".'),
        (["data.train=gone.jsonl"], 'data.train: no such file or folder: "gone.jsonl". Paths are relative to the current directory'),
        (['data.train=["train.jsonl", "gone.jsonl"]'], 'data.train: no such file or folder: "gone.jsonl"'),
        (["data.val=gone"], 'data.val: no such file or folder: "gone"'),
        (["model.chat_template=gone.jinja"], 'model.chat_template: no such file: "gone.jinja"'),
        (["reward.function=gone.py:score"], 'reward.function: no such file: "gone.py"'),
        (
            ["reward.function=gone.py"],
            'reward.function: "gone.py" is not a reward. Use ' + ", ".join(f'"{name}"' for name in REWARDS[:-1]) + ' or "reward_model", or',
        ),
        (["reward.function={}"], "reward.function: an empty table is not a reward. Name at least one function with its weight"),
        (["reward.function={ gsm8k = 0.0 }"], 'reward.function: "gsm8k" has the weight 0 and no effect.'),
        (
            ["reward.function=reward_model"],
            'reward_model.path: missing, but reward.function is "reward_model" and reward.sources is {}. Set it: Folder or hub name',
        ),
        (
            ["reward_model.path=model"],
            'reward_model.path: "model" has no effect while reward.function is "gsm8k" and reward.sources is {}. Remove it, or set',
        ),
        (
            ["reward.function=reward_model", "reward_model.path=model", "reward.timeout_s=1.0"],
            'reward.timeout_s: 1.0 has no effect while reward.function is "reward_model" and reward.sources is {}. Remove it, or name',
        ),
        (["reward_model.path=gone", "reward.function=reward_model"], 'reward_model.path: no such folder: "gone".'),
        (["algorithm.name=ppo", "critic.path=gone"], 'critic.path: no such folder: "gone".'),
        (["algorithm.name=ppo", "critic.micro_batch=2"], "critic.micro_batch: 2 has no effect while critic.dynamic_batch is true."),
        (["lora.alpha=8.0"], "lora.alpha: 8.0 has no effect while lora.rank is 0. Remove it, or set lora.rank, for example to 16"),
        (["lora.rank=4", "lora.path=model"], 'lora.path: "model" has no adapter_config.json.'),
        (["eval.temperature=1.0"], "eval.temperature: 1.0 has no effect while data.val is not set. Remove it, or set data.val"),
        (["log.val_samples=4"], "log.val_samples: 4 has no effect while data.val is not set."),
        (["health.stop=false", "health.patience=3"], "health.patience: 3 has no effect while health.stop is false. Remove it, or set"),
        (
            ['health.ignore=["logprob-gap"]', "health.max_logprob_gap=0.5"],
            'health.max_logprob_gap: 0.5 has no effect while health.ignore is ["logprob-gap"]. Remove it, or take "logprob-gap" out of',
        ),
        (
            ['health.ignore=["entropy-explosion"]', "health.max_entropy_rise=5"],
            'health.max_entropy_rise: 5.0 has no effect while health.ignore is ["entropy-explosion"].',
        ),
        (
            ["data.val=train.jsonl", "eval.top_p=0.9"],
            "eval.top_p: 0.9 has no effect while eval.temperature is 0.0. Remove it, or set eval.temperature above 0",
        ),
        (
            ["train.recompute_layers=2"],
            'train.recompute_layers: 2 has no effect while train.recompute is "auto" and critic.recompute is not set. Remove it',
        ),
        (["train.recompute=none", "train.recompute_layers=2"], 'train.recompute_layers: 2 has no effect while train.recompute is "none"'),
        (
            ["train.recompute=none", "train.recompute_method=uniform"],
            'train.recompute_method: "uniform" has no effect while train.recompute is "none"',
        ),
        (
            ["train.recompute=full", "train.recompute_method=uniform"],
            'train.recompute_method: "uniform" has no effect while train.recompute_layers is "auto". Remove it, or set',
        ),
        (
            ["train.fused_head=false", "algorithm.kl_coef=0.1", "ref.entropy_chunk=8"],
            "ref.entropy_chunk: 8 has no effect while train.fused_head is false. Remove it, or set",
        ),
        (
            ["train.min_lr_ratio=0.1"],
            'train.min_lr_ratio: 0.1 has no effect while train.schedule is "constant". Remove it, or set train.schedule',
        ),
        (
            ["reward.error_score=-1.0"],
            'reward.error_score: -1.0 has no effect while reward.on_error is "exclude". Remove it, or set reward.on_error',
        ),
        (["reward.function=gsm9k"], 'reward.function: "gsm9k" is not a reward.'),
        (["reward.sources.math=gone.py:score"], 'reward.sources.math: no such file: "gone.py"'),
        (["run.dir=train.jsonl"], 'run.dir: "train.jsonl" is a file.'),
    ],
)
def test_rules(run: dict[str, dict[str, Any]], overrides: list[str], begins: str) -> None:
    (mistake,) = mistakes_of(run, *overrides)
    assert mistake.startswith(begins)


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.kv_bytes=1000000"],
        ["rollout.memory_fraction=0.5"],
        ["rollout.temperature=0.0001", "data.val=train.jsonl", "eval.temperature=10000"],
        ["rollout.temperature=1e4", "data.val=train.jsonl", "eval.temperature=1e-4"],
        ["actor.dynamic_batch=false", "actor.micro_batch=2"],
        ["algorithm.name=ppo", "critic.recompute=full", "train.recompute_layers=2", "train.recompute_method=uniform"],
        ["train.fused_head=false", "train.entropy_chunk=8"],
        ["run.eval_every=5", "data.val=train.jsonl"],
        ["algorithm.prompts_per_step=4", "algorithm.minibatches_per_step=4"],
        ["rollout.max_seqs=8", "rollout.max_batched_tokens=8"],
        ["model.chat_template=train.jsonl"],
        ["reward.function=mine.py:score"],
    ],
)
def test_what_the_rules_allow(run: dict[str, dict[str, Any]], tmp_path: Path, overrides: list[str]) -> None:
    (tmp_path / "mine.py").write_text("")
    assert mistakes_of(run, *overrides) == []


def test_rules_read_known_keys() -> None:
    for rule in configuration.RULES:
        assert set(rule.keys) <= set(schema.keys())


@pytest.mark.parametrize("key", ["rollout.max_seqs", "train.recompute_layers", "actor.token_budget", "reward.workers"])
def test_auto_counts_as_not_set(run: dict[str, dict[str, Any]], key: str) -> None:
    assert mistakes_of(run, f"{key}=auto", "actor.dynamic_batch=false", "actor.micro_batch=2") == []


@pytest.mark.parametrize(
    "options", [["critic.token_budget=auto"], ["ref.entropy_chunk=auto"], ["algorithm.name=sft", "reward.workers=auto"]]
)
def test_auto_has_no_effect_in_a_section_without_effect(run: dict[str, dict[str, Any]], options: list[str]) -> None:
    key = options[-1].partition("=")[0]
    assert any(text.startswith(f'{key}: "auto" has no effect while algorithm.') for text in mistakes_of(run, *options))


@pytest.mark.parametrize("key", ["advantage", "loss"])
def test_a_function_of_ones_own_cannot_be_auto(run: dict[str, dict[str, Any]], key: str) -> None:
    (mistake,) = mistakes_of(run, f"algorithm.{key}=auto")
    assert mistake.startswith(f"algorithm.{key} = 'auto': not of the form FILE.py:NAME. Built in are ")
    assert mistake.endswith(f"for a function of your own write for example mine/{key}.py:{key}")


def test_one_reason_is_enough_for_a_key_without_effect(run: dict[str, dict[str, Any]]) -> None:
    (mistake,) = mistakes_of(run, "eval.top_p=0.9")
    assert mistake == "eval.top_p: 0.9 has no effect while data.val is not set. Remove it, or set data.val"


def test_hub_names_only_when_online_or_downloaded_before(
    run: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    (mistake,) = mistakes_of(run, "model.path=org/name")
    assert mistake.startswith('model.path: no such folder: "org/name"; it is not in the hub')
    snapshot_folder = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc"
    snapshot_folder.mkdir(parents=True)
    (snapshot_folder / "config.json").write_text("{}")
    assert mistakes_of(run, "model.path=org/name") == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert mistakes_of(run, "model.path=org/name", "model.revision=main") == []
    assert len(mistakes_of(run, "model.path=./org/name")) == 1
    assert len(mistakes_of(run, "model.path=name")) == 1


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("algorithm.adv_estimator", "algorithm.name and algorithm.advantage"),
        ("actor_rollout_ref.actor.clip_ratio", "algorithm.clip_low and algorithm.clip_high"),
        ("trainer.save_freq", "run.save_every"),
        ("train.learning_rate", "train.lr"),
        ("algorithm.num_generations", "algorithm.samples_per_prompt"),
        ("algorithm.scale_rewards", "algorithm.normalize_by_std"),
        ("custom_reward_function.path", "reward.function"),
        ("model.name", "model.path"),
    ],
)
def test_names_of_other_systems_are_known(run: dict[str, dict[str, Any]], theirs: str, ours: str) -> None:
    (mistake,) = mistakes_of(run, f"{theirs}=[1]")
    assert mistake.startswith(f"{theirs}: unknown key; other systems' name for {ours}: ")
    for key in ours.split(" and "):  # what it means here, for the value must be another
        assert schema.words(schema.keys()[key]).meaning in mistake


@pytest.mark.parametrize(
    ("theirs", "value", "advice"),
    [
        ("actor_rollout_ref.actor.clip_ratio", "0.3", "write algorithm.clip_low = 0.3, algorithm.clip_high = 0.3"),
        ("algorithm.adv_estimator", "gae", 'write algorithm.name = "gae"'),
        ("trainer.save_freq", "20", "write run.save_every = 20"),
        ("trainer.save_freq", "-1", "Steps between checkpoints"),  # never, in verl
        ("learning_rate", "1e-4", "write train.lr = 0.0001"),
        ("per_device_train_batch_size", "8", "Prompts per step"),  # another unit
        ("use_kl_loss", "true", "Weight of the KL term"),
        ("beta", "0.1", "write algorithm.kl_coef = 0.1"),
        ("custom_reward_function.path", "mine.py", "A built-in reward"),
        ("report_to", "wandb", "Loggers that get every number"),
        ("output_dir", "out", 'write run.dir = "out"'),
    ],
)
def test_a_foreign_key_is_translated_where_its_value_means_the_same(
    run: dict[str, dict[str, Any]], theirs: str, value: str, advice: str
) -> None:
    mistake = mistakes_of(run, f"{theirs}={value}")[0]
    assert mistake.startswith(f"{theirs}: unknown key; other systems' name for ") and f": {advice}" in mistake


@pytest.mark.parametrize("key", ["model.path", "data.train", "data.val", "model.chat_template", "reward.function", "lora.path"])
def test_a_path_that_may_not_be_looked_at_is_one_mistake_of_all(run: dict[str, dict[str, Any]], tmp_path: Path, key: str) -> None:
    name = "mine.py:score" if key == "reward.function" else "mine"
    extra = ["lora.rank=2"] if key == "lora.path" else []
    (tmp_path / "closed").mkdir(mode=0)
    tmp_path.chmod(0o755)
    user = os.geteuid()
    os.seteuid(user or 65534)  # root may look at everything
    try:
        found = mistakes_of(run, f"{key}=closed/{name}", "run.stesp=3", *extra)
    finally:
        os.seteuid(user)
    assert len(found) == 2 and found[0].startswith("run.stesp: unknown key")
    assert found[1].startswith(f'{key}: "closed/mine') and found[1].endswith("Permission denied. Give a path that you may read")


def test_an_adapter_is_no_model(run: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (mistake,) = mistakes_of(run, f"model.path={tmp_path / 'adapter'}")
    assert "holds an adapter, not a model. Give the model that it belongs to, and the adapter as lora.path" in mistake


def test_built_in_rewards_are_those_of_the_reward_room() -> None:
    names = set(schema.REWARDS) - {schema.REWARD_MODEL}
    assert {"dapo", "exact_match", "gsm8k", "gsm8k_flexible", "math"} <= names
    assert [functions.locate(name).path for name in names] == [""] * len(names)


# ---- all at once


def test_every_mistake_is_reported_at_once(run: dict[str, dict[str, Any]]) -> None:
    found = mistakes_of(
        {**run, "data": {"train": "gone"}},
        "nonsense",
        "rollout.max_seq=4",
        "actor_rollout_ref.rollout.n=4",
        "train.pipeline_parallel=2",
        "train.recompute=some",
        "train.recompute_layers=2",
        "train.lr=-1",
        "run.epochs=2",
        "actor.micro_batch=2",
    )
    begins = (
        "nonsense:",
        "rollout.max_seq:",
        "actor_rollout_ref.rollout.n:",
        "train.pipeline_parallel:",
        "train.lr:",
        "train.recompute:",
        "data.train:",
        "actor.micro_batch:",
        "run.steps:",
    )
    assert len(found) == len(begins)
    assert all(mistake.startswith(begin) for mistake, begin in zip(found, begins, strict=True))


def test_rules_of_other_rooms_join_the_list_where_the_values_that_they_read_are_legal(run: dict[str, dict[str, Any]]) -> None:
    def check(config: Config) -> list[str]:
        assert isinstance(config, Config)
        return ["run.seed: too plain"]

    rules = [configuration.ConfigRule(("run.seed",), check)]
    assert mistakes_of(run, rules=rules) == ["run.seed: too plain"]
    assert len(mistakes_of(run, "run.epochs=1", "a.b=1", rules=rules)) == 3
    assert len(mistakes_of(run, "run.seed=-1", rules=rules)) == 1


def test_the_algorithms_own_mistakes_join_the_list(run: dict[str, dict[str, Any]]) -> None:
    found = mistakes_of(run, "algorithm.samples_per_prompt=1", "run.epochs=1")
    assert [mistake.partition(" ")[0].rstrip(":") for mistake in found] == ["run.steps", "algorithm.samples_per_prompt"]


def test_the_algorithms_own_mistakes_are_told_beside_wrong_values(run: dict[str, dict[str, Any]]) -> None:
    """Each rule is asked unless a key that it reads is wrong itself: its stand-in would be judged."""
    beside = ["run.seed=-1", "algorithm.gae_lambda=0.9", "algorithm.samples_per_prompt=1", "ref.path=model"]
    found = mistakes_of(run, *beside)
    assert [mistake.partition(" ")[0].rstrip(":") for mistake in found] == [
        "run.seed",
        "ref.path",
        "algorithm.gae_lambda",
        "algorithm.samples_per_prompt",
    ]
    found = mistakes_of(run, "algorithm.kl_coef=none", "ref.path=model", "algorithm.gae_lambda=0.9")
    assert [mistake.partition(":")[0] for mistake in found] == ["algorithm.kl_coef", "algorithm.gae_lambda"]
    found = mistakes_of(run, "algorithm.name=pppo", "algorithm.gae_lambda=0.9", "critic.lr=1.0")
    assert [mistake.partition(":")[0] for mistake in found] == ["algorithm.name"]


# ---- warnings, writing, comparing


def test_warnings(run: dict[str, dict[str, Any]]) -> None:
    assert warnings(parse(run)) == []
    assert [text.partition(":")[0] for text in warnings(parse(run, ["rollout.top_p=0.9", "rollout.top_k=5"]))] == [
        "rollout.top_p = 0.9",
        "rollout.top_k = 5",
    ]
    assert all("the trainer does not apply it" in text for text in warnings(parse(run, ["rollout.top_p=0.9", "rollout.top_k=5"])))


def test_toml_round_trip_keeps_values_and_what_was_set(run: dict[str, dict[str, Any]]) -> None:
    config = parse(
        {**run, "data": {"train": ["train.jsonl"], "template_args": {"a b": [1, {"c": 1.5}], "d": True}}},
        ['rollout.stop=["\\n", "\\"", "é\\\\", "\\u007f"]', "train.lr=1e-6", "train.betas=[0.5, 0.75]", 'reward.sources."a.b"=gsm8k'],
    )
    again = parse(tomllib.loads(to_toml(config)))
    assert again == config
    assert flatten(again) == flatten(config)
    assert again.data.model_fields_set == {"train", "template_args"} and again.ref.model_fields_set == set()


def test_flatten_holds_every_key(run: dict[str, dict[str, Any]]) -> None:
    flat = flatten(parse(run))
    assert list(flat) == list(schema.keys())
    assert flat["run.steps"] == 3 and flat["rollout.max_seqs"] == "auto" and flat["ref.path"] is None


def test_differences_leave_out_what_may_change(run: dict[str, dict[str, Any]]) -> None:
    def changed(*overrides: str) -> list[str]:
        return differences(snapshot(parse(run)), snapshot(parse(run, overrides)))

    assert changed() == []
    assert changed("train.lr=1", "run.seed=4") == ["train.lr", "run.seed"]
    assert changed("run.steps=9", "run.save_every=1", "run.keep=1", "health.patience=3", 'log.to=["tensorboard"]') == []
    run["data"]["val"] = run["data"]["train"]
    assert changed("eval.temperature=1", "eval.max_prompts=3") == []
    assert changed("reward.timeout_s=1", "reward.workers=1", "rollout.log_stats=false") == []
    assert changed("train.packing=false", "train.entropy_chunk=4") == ["train.packing", "train.entropy_chunk"]  # other roundings
    run["algorithm"] = {"name": "ppo"}
    assert changed("train.recompute=full", "train.offload_optimizer=true", "critic.offload_params=true") == []
    assert set(configuration.FREE_ON_RESUME) <= set(schema.keys())


def test_the_page_on_checkpoints_names_the_keys_that_may_change() -> None:
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    table = page.partition("These keys may change freely")[2].partition("\n\nThe keys of rollouts")[0]
    rows = [line.split("|")[2] for line in table.splitlines()[4:]]
    sections, run, reward, whole, placed, shared = (set(re.findall(r"`\[?([a-z_.]+)\]?`", row)) for row in rows)
    for key in [*schema.keys()]:
        section, _, name = key.partition(".")
        of_role = section in ("train", "actor", "critic", "ref", "reward_model")
        named = section in sections or key in whole or (section == "run" and name in run) or (section == "reward" and name in reward)
        named |= of_role and (name in placed or name.startswith("offload_") or name in shared)
        assert named == (key in configuration.FREE_ON_RESUME), key


def test_differences_from_what_a_checkpoint_kept(run: dict[str, dict[str, Any]]) -> None:
    run["data"]["template_args"] = {"day": datetime.date(2024, 2, 29)}
    now = snapshot(parse(run))
    kept = json.loads(json.dumps(now))
    assert differences(kept, now) == []
    del kept["run.seed"]
    assert differences(kept | {"train.eps": 1.0, "train.gone": 3}, now) == ["train.eps"]


# ---- the page, and what it must not cost


def test_reference_page_is_up_to_date() -> None:
    written = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert written == reference.page(), "run: python -m fulltilt.reference > docs/reference.md"


def test_every_key_is_on_the_page_with_its_meaning() -> None:
    page = reference.page()
    for key, field in schema.keys().items():
        said = schema.words(field)
        assert said.meaning and f"| `{key}` |" in page and said.meaning in page and said.note in page


def test_torch_is_not_imported() -> None:
    code = (
        "import sys, fulltilt.config, fulltilt.knobs, fulltilt.reference, fulltilt.records, fulltilt.algo.build\n"
        "import fulltilt.observe.metrics, fulltilt.observe.console\n"
        "print([name for name in ('torch', 'transformers', 'ray') if name in sys.modules])"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT / "src")}, check=True)
    assert child.stdout.strip() == "[]"
