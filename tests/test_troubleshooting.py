"""docs/troubleshooting.md: the commands that need no GPU and little time show what the page says of them.

That every command of a page parses is tested in test_examples.py.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import runs
from test_explain import Case, as_predicted
from typer.testing import CliRunner

from fulltilt.cli import app
from fulltilt.tune import report

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
COMMANDS = list(dict.fromkeys(re.findall(r"`((?:[A-Z_]+=\S+ )?fulltilt [^`\n]+)`", PAGE)))
# What the commands print that explain a knob or plan a run: parts of lines, as patterns.
SHOWN: dict[str, tuple[str, ...]] = {
    # Presets.
    "plan examples/gsm8k/grpo.toml --shape Qwen2.5-0.5B --hardware 1xH200": (
        r"actor.token_budget = 32768", r'train.recompute = "none"', r"train.offload_optimizer = false",
        r"rollout.release_memory = true: the update gets the cache's memory",
    ),
    "plan examples/math/dapo.toml --shape Qwen2.5-7B --hardware 8xH100-80GB": (
        r'train.shard = "optimizer"', r"rollout.tensor_parallel = 1: the run fits", r'train.recompute = "\w+": .* would take about',
    ),
    "plan examples/math/dapo.toml --shape Qwen2.5-72B --hardware 64xH200 cluster.address=auto cluster.workers=8 cluster.nodes=8": (
        r'train.shard = "full"', r"train.tensor_parallel = 1", r"train.offload_activations = true",
    ),
    "plan examples/gsm8k/lora.toml --shape Qwen2.5-7B --hardware 1x4090": (
        r"train.offload_activations = true", r"rollout.max_batched_tokens = 8192: a larger pass", r"^step: ",
    ),
    # Memory.
    "plan examples/gsm8k/grpo.toml --shape Qwen2.5-7B --hardware 8xH100-80GB": (
        r"rollout.kv_bytes = [\d.]+ GiB: what is free in rollouts less a reserve", r"memory in rollout: .*graphs [\d.]+ MiB",
    ),
    "plan examples/math/dapo.toml --shape Qwen2.5-7B --hardware 8xH100-80GB rollout.kv_bytes=67108864": (
        r"it does not fit: the KV cache: .* one sample may need \d+ .* Give it [\d.]+ MiB or more",
    ),
    "plan examples/math/dapo.toml --shape Qwen2.5-14B --hardware 8xA100-40GB": (
        r'train.recompute = "full": 16384 tokens would take', r"train.offload_activations = true: 16384 tokens would take",
    ),
    "plan examples/gsm8k/grpo.toml --shape Qwen2.5-7B --hardware 1xH100-80GB": (
        r"train.offload_optimizer = true", r"train.offload_params = false", r"train.offload_grads = true: with the optimizer",
    ),
    "knobs gpu_memory_utilization": (r"rollout.memory_fraction", r"gpu_memory_utilization is a share of the GPU's total memory"),
    "knobs token_budget": (r"actor.token_budget", r"A hard cap on tokens per GPU"),
    "knobs fused_head": (r"train.fused_head", r"must change: largest temporary of the head"),
    # Rollouts.
    "plan examples/gsm8k/grpo.toml --shape Qwen2.5-1.5B --hardware 1xH100": (
        r"rollout.max_seqs = 512: all samples of a step", r"rollout.cuda_graphs = true",
    ),
    "knobs --all reward.workers": (r"one per core",),
    # Long context.
    "plan examples/math/dapo.toml --shape Qwen3-8B --hardware 8xH100-80GB rollout.max_new_tokens=32768": (
        r"train.sequence_parallel = 1: the longest sample fits on one GPU", r'train.recompute = "full": 33792 tokens would take',
    ),
    "plan examples/math/dapo.toml --shape Qwen3-8B --hardware 8xH100-80GB rollout.max_new_tokens=16384": (
        r"rollout.tensor_parallel = 2: with fewer, .* a KV cache for 16 samples of 17408 tokens",
    ),
    "knobs packing": (r"train.packing",),
}  # fmt: skip
DOES_NOT_FIT = {"plan examples/math/dapo.toml --shape Qwen2.5-7B --hardware 8xH100-80GB rollout.kv_bytes=67108864"}


def test_every_command_that_explains_or_plans_is_tried() -> None:
    assert {command.removeprefix("fulltilt ") for command in COMMANDS if command.startswith(("fulltilt plan ", "fulltilt knobs "))} == {
        *SHOWN
    }


@pytest.mark.parametrize("command", SHOWN)
def test_a_command_shows_what_the_page_says(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(report, "runners_up", lambda planned, own: {})  # they take most of a plan's time, and docs/planning.md shows them
    ended = CliRunner().invoke(app, shlex.split(command))
    assert ended.exit_code == (3 if command in DOES_NOT_FIT else 0), ended.output
    assert [pattern for pattern in SHOWN[command] if not re.search(pattern, ended.stdout, re.MULTILINE)] == [], ended.stdout
    assert "(exit code 3)" in PAGE.partition(f"`fulltilt {command}`")[2].partition("\n")[0] or command not in DOES_NOT_FIT


def test_tuning_for_devices_that_are_not_here_only_predicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = (command for command in COMMANDS if command.startswith("fulltilt tune") and "--hardware" in command)
    monkeypatch.chdir(ROOT)
    out = tmp_path / "tuned.toml"
    ended = CliRunner().invoke(app, shlex.split(command.replace("--out tuned.toml", f"--out {out} --finalists 1"))[1:])
    assert ended.exit_code == 0 and "predicted, not measured" in out.read_text(), ended.output


def test_the_doctor_shows_the_cache_what_ran_out_of_memory_and_what_is_no_longer_as_planned(tmp_path: Path) -> None:
    case = Case.of()
    more = {"rollout/kv_use": 0.97, "rollout/preemptions": 12, "perf/out_of_memory": 1, "budget/token_budget": 8192}
    case.write(tmp_path / "runs", as_predicted(case), more)
    ended = runs.command_here(tmp_path, "doctor", "runs")
    assert "\nKV cache: at most 97% in use, 24 samples preempted and finished later\n" in ended.out, ended
    assert "\nout of memory: perf/out_of_memory 2\n" in ended.out and "\nno longer as planned: token_budget 8192\n" in ended.out
    case.write(tmp_path / "none", as_predicted(case), {"rollout/kv_use": 0.5})
    assert "\nKV cache: at most 50% in use, 0 samples preempted\n" in runs.command_here(tmp_path, "doctor", "none").out


@pytest.mark.long
def test_demonstrations_run_out_of_memory_and_go_on(
    tmp_path: Path, model_folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = [command.split()[0] for command in COMMANDS if command.startswith("FULLTILT_OUT_OF_MEMORY=")]
    faults = ",".join(own.partition("=")[2] for own in shown)
    assert faults == "actor.decode:1,actor.backward:2"
    folder = runs.make(tmp_path / "demonstration", model_folders("qwen2"))
    monkeypatch.setenv("FULLTILT_OUT_OF_MEMORY", faults)
    ended = runs.command_here(folder, "train", "run.toml", "run.steps=1", "run.eval_before=false", "run.eval_every=0", "run.save_every=0")
    assert ended.code == 0 and "computed again" in ended.out + ended.error, ended
    assert "out of memory in rollout" in ended.out + ended.error
    (line,) = runs.metrics(folder)
    assert line["perf/out_of_memory"] == 2 and line["budget/max_seqs"] > 0 and line["actor/updates"] == 2
    assert "\nout of memory: perf/out_of_memory 2\n" in runs.command_here(folder, "doctor", "run").out
