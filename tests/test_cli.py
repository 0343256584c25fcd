"""The commands as a user types them: exit codes, messages, machine-readable output, and nothing half-written after a mistake."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import runs
import typer.main
from safetensors.torch import load_file, save_file
from terminal import Terminal, attach
from variants import sample_cases

import fulltilt
from fulltilt.knobs import LEDGER
from fulltilt.schema import keys
from fulltilt.starter import TASKS

ModelFolders = Callable[[str], Path]
COMMANDS = {
    "demo": ["--dir", "--json", "--quiet"],
    "train": ["RUN.toml", "KEY=VALUE", "--check", "--overlay", "--json", "--quiet"],
    "eval": ["RUN.toml", "KEY=VALUE", "--latest", "--json", "--quiet"],
    "chat": ["MODEL|RUN_DIR", "--system", "--step", "--plain", "--max-new-tokens", "--temperature", "--seed"],
    "doctor": ["--json"],
    "plan": ["RUN.toml", "KEY=VALUE", "--table", "--describe", "--hardware", "--shape", "--response-tokens", "--json"],
    "tune": ["RUN.toml", "KEY=VALUE", "--out", "--steps", "--finalists", "--hardware", "--shape", "--response-tokens", "--json", "--quiet"],
    "verl": ["--dry-run", "--write", "--retune", "--gpu-memory", "--set", "--json", "--quiet"],
    "chatlearn": ["CONFIG.yaml", "--dry-run", "--write", "--retune", "--json", "--quiet"],
    "knobs": ["WORD", "--all", "--json"],
    "init": ["TASK", "FILE", "--model", "--data", *TASKS],
}


@pytest.fixture
def folder(tmp_path: Path, model_folders: ModelFolders) -> Path:
    return runs.make(tmp_path / "folder", model_folders("qwen2"))


def assert_refused(ended: runs.Ended, *words: str) -> None:
    """The user's mistake: 2, said on standard error without a traceback, and standard output left alone."""
    assert (ended.code, ended.out) == (2, ""), ended
    assert re.match(r"(loading .* \.\.\.\n)?error: ", ended.error), ended
    assert "Traceback" not in ended.error
    for word in words:
        assert word in ended.error, (word, ended.error)


# -- help and lists ---------------------------------------------------------------------------------------------------------------------


def test_help_names_every_command() -> None:
    said = runs.command(Path.cwd(), "--help")
    assert (said.code, said.error) == (0, "")
    for name in (*COMMANDS, "--version"):
        assert name in said.out
    assert runs.command_here(Path.cwd(), "-h") == runs.command_here(Path.cwd(), "--help")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_names_its_options(tmp_path: Path, name: str) -> None:
    said = runs.command_here(tmp_path, name, "--help")
    assert (said.code, said.error) == (0, "")
    for option in (*COMMANDS[name], "--help"):
        assert option in said.out, option
    assert list(tmp_path.iterdir()) == []


def test_version() -> None:
    said = runs.command_here(Path.cwd(), "--version")
    assert (said.code, said.out) == (0, f"fulltilt {fulltilt.__version__}\n")


def test_an_unknown_command_or_option_is_the_users_mistake(folder: Path) -> None:
    for arguments in (["trian", "run.toml"], ["train", "run.toml", "--jsn"], ["train"]):
        ended = runs.command_here(folder, *arguments)
        assert ended.code == 2
        assert ended.error and "Traceback" not in ended.error


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        (["--train.lr", "1e-4"], "--train.lr: no such option. Write train.lr=1e-4 instead"),
        (["--train.lr=1e-4"], "--train.lr: no such option. Write train.lr=1e-4 instead"),
        (["-train.lr=1e-4"], "-train.lr: no such option. Write train.lr=1e-4 instead"),
        (["--reward.error-score", "-1"], "--reward.error-score: no such option. Write reward.error_score=-1 instead"),
        (["--learning_rate", "1e-4"], "--learning_rate: no such option. Write train.lr=1e-4 instead"),
        (["--workers", "2"], "--workers: no such option. Write reward.workers=2 or cluster.workers=2 instead"),
        (["--epochs", "2"], "--epochs: no such option. Write algorithm.epochs=2 or run.epochs=2 instead"),
        (["--critic.lr", "1"], "--critic.lr: no such option. Write critic.lr=1 instead"),
        (["--eval_before", "--quiet"], "--eval_before: no such option. Write run.eval_before=VALUE instead"),
        (["train.lr", "1e-4"], "train.lr 1e-4: an override has no spaces. Write train.lr=1e-4"),
    ],
)
@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_key_typed_as_an_option_gets_the_right_spelling(folder: Path, command: str, typed: list[str], answer: str) -> None:
    assert_refused(runs.command_here(folder, command, "run.toml", *typed), answer)


def test_home_is_expanded_in_an_option_behind_its_equals_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell expands `--out ~/x`, and leaves `--out=~/x` as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert runs.command_here(tmp_path, "init", "sft", "--model=~/model", "--data", "~/kept as typed").code == 0
    written = tomllib.loads((tmp_path / "sft.toml").read_text())
    assert (written["model"]["path"], written["data"]["train"]) == (str(tmp_path / "model"), "~/kept as typed")


def test_knobs_for_people_and_machines(tmp_path: Path) -> None:
    listed = json.loads(runs.command(tmp_path, "knobs", "--json").out)
    assert [knob["name"] for knob in listed] == [knob.name for knob in LEDGER]
    said = runs.command_here(tmp_path, "knobs")
    assert said.code == 0
    assert [knob.name for knob in LEDGER if knob.name not in said.out] == []
    # By the name that a verl user knows.
    found = json.loads(runs.command_here(tmp_path, "knobs", "ppo_max_token_len_per_gpu", "--json").out)
    assert "actor.token_budget" in [knob["name"] for knob in found]
    assert "actor_rollout_ref.actor.ppo_max_token_len_per_gpu" in runs.command_here(tmp_path, "knobs", "ppo_max_token_len").out
    assert runs.command_here(tmp_path, "knobs", "Token_Budget").out == runs.command_here(tmp_path, "knobs", "token_budget").out
    assert_refused(runs.command_here(tmp_path, "knobs", "speling"), "speling")


def test_knobs_explains_every_key(tmp_path: Path) -> None:
    listed = json.loads(runs.command_here(tmp_path, "knobs", "--all", "--json").out)
    assert [key["name"] for key in listed] == list(keys())
    assert all(key["legal"] and key["default"] and key["meaning"] for key in listed)
    said = runs.command_here(tmp_path, "knobs", "--all")
    assert said.code == 0 and [key for key in keys() if f"{key} " not in said.out] == []
    told = runs.command_here(tmp_path, "knobs", "--all", "Learning_Rate").out  # by TRL's name
    assert told == (
        "train.lr\n  meaning: Peak learning rate of AdamW.\n  values: a number greater than 0 and at most 1000\n  default: 1e-06\n"
        "  other systems: learning_rate\n"
    )
    ratio = runs.command_here(tmp_path, "knobs", "min_lr_ratio", "--all").out
    assert '  to have an effect: set train.schedule to "linear" or "cosine"' in ratio
    assert "critic.lr" in runs.command_here(tmp_path, "knobs", "--all", "peak learning").out  # by its meaning, where no name has it
    assert_refused(runs.command_here(tmp_path, "knobs", "lr"), "no performance knob or alias contains lr. `fulltilt knobs --all lr` looks")
    assert_refused(runs.command_here(tmp_path, "knobs", "--all", "speling"), "no key or alias contains speling.")


def test_doctor_of_a_run_that_is_not_there(tmp_path: Path) -> None:
    ended = runs.command_here(tmp_path, "doctor", "runs/mien")
    assert (ended.code, ended.out) == (2, "") and "runs/mien: no such folder" in ended.error
    (tmp_path / "run.toml").touch()
    assert_refused(runs.command_here(tmp_path, "doctor", "run.toml"), "run.toml: is a file. Give the folder of a run")
    (tmp_path / "config.json").touch()
    assert_refused(runs.command_here(tmp_path, "doctor", "."), ".: is the folder of a model. Give the folder of a run")
    assert_refused(runs.command_here(tmp_path, "init", "sft", "-"), "-: init writes files, and nothing to standard output")


def test_eval_says_options_as_they_are_typed(folder: Path) -> None:
    both = runs.command_here(folder, "eval", "run.toml", "--latest", "--best")
    assert_refused(both, "--latest and --best each choose a checkpoint to evaluate")


def test_doctor_for_machines(tmp_path: Path) -> None:
    said = runs.command_forked(tmp_path, "doctor", "--json")
    assert said.code == 0, said.error
    report = json.loads(said.out)
    assert report["broken"] is False
    assert {"python", "torch", "transformers"} <= {finding["name"] for finding in report["findings"]}
    assert [path.name for path in tmp_path.iterdir()] == ["said.txt"]


# -- mistakes in the configuration: found before torch is loaded ------------------------------------------------------------------------


def change(folder: Path, before: str, after: str) -> None:
    text = (folder / "run.toml").read_text()
    assert before in text
    (folder / "run.toml").write_text(text.replace(before, after))


MISTAKES: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "no such run file": (lambda folder: (folder / "run.toml").unlink(), ["run.toml: no such file"]),
    "missing model": (lambda folder: (folder / "model").unlink(), ["model.path: no such folder", '"model"']),
    "bad TOML": (lambda folder: change(folder, 'path = "model"', "path = model"), ["run.toml, line 2: not valid TOML", "path = model"]),
    "unknown key": (
        lambda folder: change(folder, "kl_coef", "kl_coeff"),
        ["algorithm.kl_coeff: unknown key; the nearest is algorithm.kl_coef\n"],
    ),
    "negative batch number": (
        lambda folder: change(folder, "prompts_per_step = 4", "prompts_per_step = -4"),
        ["algorithm.prompts_per_step: must be a whole number from 1 to 2147483647, got -4"],
    ),
    "missing data": (lambda folder: (folder / "train.jsonl").unlink(), ["data.train: no such file", "train.jsonl"]),
    "missing reward": (lambda folder: (folder / "reward.py").unlink(), ["reward.function: no such file", "reward.py"]),
    "a group of one": (lambda folder: change(folder, "samples_per_prompt = 4", "samples_per_prompt = 1"), ["algorithm.samples_per_prompt"]),
    "run.dir is a file": (lambda folder: (folder / "run").write_text("mine"), ["run.dir", "is a file"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_configuration(folder: Path, name: str) -> None:
    make, words = MISTAKES[name]
    make(folder)
    before = runs.contents(folder)
    assert_refused(runs.command_here(folder, "train", "run.toml"), *words)
    assert runs.contents(folder) == before
    assert not (folder / "run").is_dir()


def test_several_mistakes_are_reported_together(folder: Path) -> None:
    (folder / "model").unlink()
    change(folder, "kl_coef", "kl_coeff")
    ended = runs.command(folder, "train", "run.toml", "algorithm.prompts_per_step=-4", "run.stesp=3", "train.lr=fast")
    assert_refused(ended, "run.toml: 5 mistakes", "model.path", "kl_coeff", "prompts_per_step", "run.steps", "train.lr")
    assert not (folder / "run").exists()


def test_a_knob_that_is_not_built_is_refused_by_name(folder: Path) -> None:
    missing = [knob for knob in LEDGER if knob.legal and not knob.built]
    if not missing:
        pytest.skip("every knob is built")
    assert_refused(runs.command_here(folder, "train", "run.toml", f"{missing[0].name}=2"), missing[0].name, "not built")
    aliases = [(knob, alias) for knob in missing for alias in knob.verl if not alias.endswith("*")]
    assert_refused(runs.command_here(folder, "train", "run.toml", f"{aliases[0][1]}=2"), aliases[0][1], aliases[0][0].name)
    assert not (folder / "run").exists()


def test_check_only_checks(folder: Path) -> None:
    good = runs.command_here(folder, "train", "run.toml", "--check", "run.steps=3")
    assert (good.code, good.out) == (0, "run.toml: no mistakes found\n")
    assert json.loads(runs.command_forked(folder, "train", "run.toml", "--check", "--json").out) == {"ok": True}
    assert runs.command_here(folder, "train", "run.toml", "--check", "--quiet").out == ""
    assert_refused(runs.command_here(folder, "train", "run.toml", "--check", "run.steps=0"), "run.steps")
    assert not (folder / "run").exists()


# -- mistakes that only model, data, reward or disk can tell ----------------------------------------------------------------------------


def nothing(folder: Path) -> None:
    """The run as it is."""


# What is changed first, then the arguments.
IN_PROCESSES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "empty dataset": (lambda folder: (folder / "train.jsonl").write_text(""), []),
    "all prompts too long": (lambda folder: change(folder, "max_prompt_tokens = 16", "max_prompt_tokens = 2"), []),
    "syntax error": (lambda folder: (folder / "reward.py").write_text("def score(:\n    return 1\n"), []),
    "not a number": (nothing, ["--json", "run.eval_before=false", "reward.function=reward.py:not_a_number"]),
    "three steps": (nothing, ["--json", "run.steps=3"]),
}
Outcome = Callable[[str], tuple[Path, runs.Ended]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, model_folders: ModelFolders) -> Outcome:
    """Folder and outcome of a command of IN_PROCESSES, which runs once."""

    @cache
    def run(name: str) -> tuple[Path, runs.Ended]:
        prepare, arguments = IN_PROCESSES[name]
        folder = runs.make(tmp_path_factory.mktemp("slow") / "folder", model_folders("qwen2"))
        prepare(folder)
        return folder, runs.command_forked(folder, "train", "run.toml", *arguments)

    return run


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("empty dataset", ["train.jsonl: holds no rows"]),
        ("all prompts too long", ["prompts are longer than data.max_prompt_tokens = 2", "the shortest has"]),
        ("syntax error", ["reward function 'reward.py:score': syntax error at", "reward.py:1"]),
    ],
)
def test_a_mistake_in_data_or_reward(ended: Outcome, name: str, words: list[str]) -> None:
    folder, outcome = ended(name)
    assert_refused(outcome, *words)
    assert not (folder / "run").exists()


def test_a_reward_that_is_not_a_number_stops_the_run(ended: Outcome) -> None:
    """It is found in step 1: no line and no checkpoint of it is left."""
    folder, outcome = ended("not a number")
    assert (outcome.code, outcome.out) == (2, "")
    assert "error: reward function 'reward.py:not_a_number' returned nan" in outcome.error
    assert "Traceback" not in outcome.error
    assert sorted(runs.contents(folder / "run")) == [".fulltilt", "metrics.jsonl", "plan.json", "snapshot.toml"]
    assert (folder / "run" / "metrics.jsonl").read_bytes() == b""


NO_MOUNT = 77  # exit code


def mount_small_disk() -> None:
    """On `run`, as `unshare -rm` and `mount` do. What is left on it when the command has ended is in `left.txt`."""
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    try:
        if libc.unshare(0x10020000):  # CLONE_NEWUSER | CLONE_NEWNS
            os._exit(NO_MOUNT)
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path("/proc/self", name).write_text(text)
        if libc.mount(b"none", b"run", b"tmpfs", 0, b"size=2m"):
            os._exit(NO_MOUNT)
    except (AttributeError, OSError):
        os._exit(NO_MOUNT)
    if command := os.fork():
        _, status = os.waitpid(command, 0)
        Path("left.txt").write_text("\n".join(os.listdir("run")))
        os._exit(os.waitstatus_to_exitcode(status))


def test_a_full_disk_is_told_before_anything_is_written(folder: Path) -> None:
    (folder / "run").mkdir()
    ended = runs.command_forked(folder, "train", "run.toml", first=mount_small_disk)
    if ended.code == NO_MOUNT:
        pytest.skip("no small file system can be mounted here; the test below fills a disk in another way")
    assert ended.code == 2, ended
    assert "error: not enough disk space for a checkpoint" in ended.error and "run.dir" in ended.error and "Traceback" not in ended.error
    assert (folder / "left.txt").read_text() == ""


@pytest.mark.long
def test_a_disk_that_fills_up_during_the_run(folder: Path) -> None:
    """A limit on the size of a file stands in for it: the model's weights do not fit. The old checkpoint stays, no half of a new one."""
    runs.train(folder, "run.steps=2")
    before = runs.contents(folder / "run" / "checkpoints")
    limit = min(path.stat().st_size for path in folder.glob("run/checkpoints/*/*/model.safetensors")) // 2
    small_files = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
    ended = runs.command_forked(folder, "train", "run.toml", "run.steps=4", first=small_files)
    assert ended.code == 2, ended.error
    assert "error: the checkpoint of step 4 could not be written to run/checkpoints" in ended.error
    assert "Traceback" not in ended.error
    assert runs.contents(folder / "run" / "checkpoints") == before
    assert [line["step"] for line in runs.metrics(folder)] == [0, 1, 2, 3, 4]


def interrupt_typer() -> None:
    """Send Ctrl-C while typer makes the commands. The handler is Python's own, also where the suite runs with the signal ignored."""
    make = typer.main.get_command
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return make(*arguments)

    typer.main.get_command = interrupted


def test_ctrl_c_before_a_command_has_begun_is_answered(folder: Path) -> None:
    ended = runs.command_forked(folder, "train", "run.toml", first=interrupt_typer)
    assert (ended.code, ended.out, ended.error) == (130, "", "stopped\n")


def test_ctrl_c_before_the_first_step_is_answered(folder: Path) -> None:
    """While a run is opened nothing but Python itself watches for signals, and in a destructor it drops what it raises."""
    # The handler is Python's own. Where this suite runs in the background of a shell, its processes begin with the signal ignored.
    script = (
        "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler); from fulltilt import cli, config; "
        "dying = type('Dying', (), {'__del__': lambda self: signal.raise_signal(signal.SIGINT)}); "
        "config.parse = lambda *a, **k: dying() is None or time.sleep(60); cli.main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, "train", "run.toml"],
        cwd=folder, env=runs.environment(), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout, ended.stderr.splitlines()[-1]) == (130, "", "stopped")
    assert "ignored" not in ended.stderr and "Traceback" not in ended.stderr


def test_the_exceptions_behind_a_refusal_are_shown_where_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(runs.command_here(tmp_path, "train", "nowhere.toml"), "nowhere.toml")
    monkeypatch.setenv("FULLTILT_TRACEBACK", "1")
    ended = runs.command_here(tmp_path, "train", "nowhere.toml")
    traced, _, told = ended.error.rpartition("\nerror: ")
    assert ended.code == 2 and "Traceback (most recent call last)" in traced and told.startswith("nowhere.toml: ")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.EBADF, "Bad file descriptor"), 1),
        (OSError("no number"), 1),
        (OSError(errno.ENOSPC, "No space left on device"), 2),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), 2),  # the current folder is gone
        (OSError(errno.EINVAL, "Invalid argument", "odd:name"), 2),
    ],
)
def test_only_what_the_system_refuses_is_told_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, code: int
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("fulltilt.knobs.listing", refused)
    ended = runs.command_here(tmp_path, "knobs")
    assert ended.code == code and ("Traceback" in ended.error) == (code == 1) and ended.error.startswith("error: ") == (code == 2)


# -- output that is lost ----------------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("knobs",), id="knobs"),
        pytest.param(("knobs", "--json"), id="knobs --json"),
    ],
)
@pytest.mark.parametrize(("output", "code"), [("| true", 141), ("> /dev/full", 2), (">&-", 2)])
def test_a_lost_result_is_an_error_of_one_line(folder: Path, command: tuple[str, ...], output: str, code: int) -> None:
    """`fulltilt knobs | head -1` is none, but has an exit code of its own."""
    line = shlex.join([sys.executable, "-m", "fulltilt", *command])
    ended = subprocess.run(
        ["bash", "-c", f"{line} {output}; exit ${{PIPESTATUS[0]}}"],
        cwd=folder, env=runs.environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    said = ended.stderr.removeprefix("loading PyTorch ...\n")
    assert (ended.returncode, ended.stdout, said.count("\n")) == (code, "", int(code == 2)), ended
    assert said.startswith("error: standard output is lost: ") or code == 141


def fill_disk() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def close_output(*descriptors: int) -> None:
    """As Python finds it after `>&-`."""
    for descriptor in descriptors:
        os.close(descriptor)
        setattr(sys, ("stdin", "stdout", "stderr")[descriptor], None)


def write_ascii() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="ascii", errors="strict")  # type: ignore[union-attr]


def nobody_reads() -> None:
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize(("lose", "code"), [(nobody_reads, 141), (fill_disk, 2), (partial(close_output, 1), 2)])
@pytest.mark.long
def test_a_lost_result_of_a_command_that_takes_long(tmp_path: Path, lose: Callable[[], None], code: int) -> None:
    ended = runs.command_forked(tmp_path, "doctor", "--json", first=lose)
    said = ended.error.removeprefix("loading PyTorch ...\n")
    assert (ended.code, ended.out, said.count("\n")) == (code, "", int(code == 2)), ended
    assert said.startswith("error: standard output is lost: ") or code == 141


OUTPUTS: dict[str, tuple[Callable[[], None], str]] = {
    "a full disk": (fill_disk, "warning: standard output is lost: No space left on device. The run continues"),
    "closed": (partial(close_output, 1), "warning: standard output is lost: it is closed. The run continues"),
    "all closed": (partial(close_output, 0, 1, 2), ""),
    "ascii": (write_ascii, ""),
}


@pytest.mark.parametrize("name", sample_cases(OUTPUTS, "a full disk", "all closed"))
def test_a_run_outlives_its_output(folder: Path, name: str) -> None:
    lose, said = OUTPUTS[name]
    ended = runs.command_forked(folder, "train", "run.toml", "run.steps=1", "run.eval_before=false", "run.dir=läuft", first=lose)
    assert ended.code == 0, ended.error
    assert [path.name for path in (folder / "läuft" / "checkpoints").iterdir()] == ["step-00000001"]
    assert said in ended.error and ended.error.count("lost") == bool(said) and "Traceback" not in ended.error
    if name == "ascii":
        assert r"done: 1 step in l\xe4uft" in ended.out


# -- what people see --------------------------------------------------------------------------------------------------------------------

STOP_AT_TORCH = """
import os, sys
class Watch:
    def find_spec(name, path=None, target=None):
        if name == "torch":
            os._exit(7)
sys.meta_path.insert(0, Watch)
from fulltilt.cli import main
main()
"""


@pytest.mark.parametrize(
    "command",
    sample_cases(
        ["train run.toml", "eval run.toml", "chat model", "demo --dir new", "doctor", "prove", "bench rollout --device cpu"],
        "train run.toml", "doctor",
    ),
)  # fmt: skip
def test_every_command_answers_before_torch_is_loaded(folder: Path, command: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STOP_AT_TORCH, *command.split()],
        cwd=folder, env=runs.environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (7, ""), ended
    assert re.fullmatch(r"loading .* \.\.\.\n", ended.stderr), ended


def test_errors_cannot_control_the_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\r.toml"
    refused = runs.command_here(folder, "train", evil)
    assert_refused(refused, r"\u001b]52;c;ZXZpbA==\u0007\u001b[2J\u000d.toml: no such file")
    change(folder, 'path = "model"', '"\\u001b[2J" = 1')
    assert_refused(runs.command_here(folder, "train", "run.toml"), r"\u001b[2J")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(evil)

    monkeypatch.setattr("fulltilt.api.train", fail)
    broken = runs.command_here(folder, "train", "run.toml")
    assert broken.code == 1 and "Traceback" in broken.error and r"RuntimeError: \u001b]52;c" in broken.error
    assert "\x1b" not in refused.error + broken.error and "\r" not in refused.error + broken.error


@pytest.mark.matrix
def test_the_console_at_80_and_120_columns(folder: Path) -> None:
    """docs/console.md shows the same: one line per step, no line too long, no word broken, a bar that keeps its width."""
    arguments = ("train", "run.toml", "run.steps=3")
    piped = runs.command_forked(folder, *arguments)
    notes = {word for line in piped.out.splitlines() if not line.startswith("step ") for word in line.split()}
    for columns in (80, 120):
        shutil.rmtree(folder / "run")
        terminal = Terminal(columns)
        ended = runs.command_forked(folder, *arguments, first=partial(attach, terminal.path))
        screen = terminal.close()
        lines = str(screen).splitlines()
        assert ended.code == 0 and screen.broken == [] and max(map(len, lines)) <= columns, screen
        assert [line.split()[1] for line in lines if line.startswith("step ")] == ["0/3", "1/3", "2/3", "3/3"]
        spent, done = (next(place for place, line in enumerate(lines) if line.startswith(own)) for own in ("where the time ", "done: "))
        same = [*lines[:spent], *lines[done:]]  # the lines between tell of seconds, of which no two runs have the same
        shown = [line for line in same if not line.startswith(("step ", "loading ", "done: ")) and "elapsed" not in line]
        assert {word for line in shown for word in line.split()} <= notes
        assert len(set(screen.bars)) == 1 and screen.bars[0] > 10
        assert lines[-2:] == ["model: run/checkpoints/step-00000003/model", "try it: fulltilt chat run"]
    # At 120 columns every field is shown.
    last = next(line for line in reversed(lines) if line.startswith("step "))
    assert all(word in last for word in ("reward ", "length ", "KL ", "entropy ", "loss ", "lr ", " tok/s", " s")), last


def test_errors_are_broken_between_words(folder: Path) -> None:
    terminal = Terminal(80)
    ended = runs.command_forked(folder, "train", "run.toml", "run.stesp=3", "train.learning_rte=1e-4", first=partial(attach, terminal.path))
    piped = runs.command_forked(folder, "train", "run.toml", "run.stesp=3", "train.learning_rte=1e-4")
    screen = terminal.close()
    assert ended.code == 2 and screen.broken == [] and str(screen).split() == piped.error.split()


@pytest.mark.long
def test_reports_of_libraries_do_not_reach_the_console(folder: Path) -> None:
    """transformers' table of missing weights: our error says the same in one line. FULLTILT_WARNINGS shows it again."""
    broken = Path(shutil.copytree(folder / "model", folder / "broken"))
    weights = load_file(broken / "model.safetensors")
    weights["extra.weight"] = weights.pop("model.norm.weight")
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    ended = runs.command_forked(folder, "train", "run.toml", "model.path=broken")
    assert_refused(ended, "model.norm.weight")
    assert ended.error.count("\n") == 2 and "REPORT" not in ended.error


# -- output for machines ----------------------------------------------------------------------------------------------------------------


def test_train_prints_one_object_a_step_and_nothing_else(ended: Outcome) -> None:
    folder, outcome = ended("three steps")
    assert outcome.code == 0, outcome.error
    assert [json.loads(line) for line in outcome.out.splitlines()] == runs.metrics(folder)
    assert [line["step"] for line in runs.metrics(folder)] == [0, 1, 2, 3]
    assert "18 rows read" in outcome.error and "done: 3 steps in run, reward" in outcome.error


def test_eval_for_machines(ended: Outcome) -> None:
    """The model as it was gives what validation before the first step gave; the newest checkpoint is another."""
    folder, _ = ended("three steps")
    before = runs.contents(folder / "run")
    started = runs.command_here(folder, "eval", "run.toml", "--json")
    assert started.code == 0, started.error
    first = json.loads(started.out)
    assert (first["model"], first["step"]) == ("model", 0)
    assert first["val/reward/mean"] == runs.metrics(folder)[0]["val/reward/mean"]
    newest = runs.command_here(folder, "eval", "run.toml", "--latest", "--json")
    assert newest.code == 0, newest.error
    last = json.loads(newest.out)
    assert (last["model"], last["step"]) == ("run/checkpoints/step-00000003/model", 3)
    assert 0 <= last["val/reward/mean"] <= 1
    assert runs.contents(folder / "run") == before


def test_eval_has_its_own_mistakes(folder: Path) -> None:
    nothing = runs.command_here(folder, "eval", "run.toml", "--latest")
    assert (nothing.code, nothing.out) == (2, "")
    assert "error: run holds no intact checkpoint. Run without --latest to evaluate model.path\n" in nothing.error
    none_kept = runs.command_here(folder, "eval", "run.toml", "--best").error
    assert "no best checkpoint. Run without --best to evaluate model.path; run.keep_best keeps a best checkpoint\n" in none_kept
    change(folder, 'val = "val.jsonl"\n', "")
    change(folder, "eval_every = 5\neval_before = true\n", "")
    without = runs.command_here(folder, "eval", "run.toml")
    assert (without.code, without.out) == (2, "")
    assert "error: data.val: nothing to evaluate on" in without.error
    assert not (folder / "run").exists()


# -- ours -------------------------------------------------------------------------------------------------------------------------------


def test_what_only_we_can_have_done_wrong_exits_with_1(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake in fulltilt's own code: the traceback is for the report."""

    def wrong(*given: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("fulltilt.loop.opening.write_set_up", wrong)
    outcome = runs.command_here(folder, "train", "run.toml")
    assert outcome.code == 1
    assert "Traceback" in outcome.error and "ZeroDivisionError: ours" in outcome.error


def test_check_looks_at_reward_and_data_although_both_are_wrong(folder: Path) -> None:
    wrong = ("reward.function=reward.py:scor", "algorithm.prompts_per_step=19", "run.dir=never")
    ended = runs.command_here(folder, "train", "run.toml", "--check", *wrong)
    assert ended.code == 2 and "run.toml: 2 mistakes" in ended.error
    assert "defines no 'scor'" in ended.error and "a step takes 19 prompts, but the data set has only 18" in ended.error
    on_cpu = ("rollout.cuda_graphs=true", "train.offload_optimizer=true", "train.offload_grads=true")
    ended = runs.command_here(folder, "train", "run.toml", "--check", "run.device=cpu", *on_cpu)
    assert ended.code == 2 and "run.toml: 3 mistakes" in ended.error
    ended = runs.command_here(folder, "train", "run.toml", "--check", "rollout.max_new_tokens=100000")
    assert ended.code == 2 and "rollout.max_new_tokens: the longest prompt" in ended.error
    ended = runs.command_here(folder, "train", "run.toml", "--check", "data.prompt_key=question")
    assert ended.code == 2 and "the row has no 'question'" in ended.error
    assert not (folder / "never").exists()
