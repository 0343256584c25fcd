"""Where the time of a run went and what would help: on written metrics whose cause is known, and on folders of real runs."""

from __future__ import annotations

import contextlib
import json
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import runs
import torch

from fulltilt import config as configuration
from fulltilt.observe.metrics import MetricsFile
from fulltilt.observe.utilization import GpuUtilization
from fulltilt.parallel.layout import Sharding
from fulltilt.plan.make import Plan, plan_of
from fulltilt.records import UserError
from fulltilt.schema import Config, to_toml
from fulltilt.shape import Recompute, Shape
from fulltilt.tune import command
from fulltilt.tune.changes import moved
from fulltilt.tune.explain import Explanation, explain
from fulltilt.tune.predict import PREDICTED, Predictor, UsedDevices, describe_run, read_plan, read_shape, saved_facts
from fulltilt.tune.shapes import named_shape

ModelFolders = Callable[[str], Path]
H200 = UsedDevices("NVIDIA H200", 150_754_820_096)
LENGTHS = {"prompt_length/mean": 120.0, "prompt_length/max": 400, "response_length/mean": 500.0, "response_length/max": 1024}
COUNTS = {
    "response_length/clip_ratio": 0.1, "rollout/most_waiting": 0, "rollout/preemptions": 0, "rollout/decode_tokens": 256000,
    "rollout/prefill_tokens": 7680, "rollout/passes": 1100, "perf/total_num_tokens": 317440, "reward/samples": 512,
}  # fmt: skip
PHASES = ("gen", "old_log_prob", "update_actor")


@dataclass(frozen=True)
class Case:
    """A run that is only described: nothing is loaded and no GPU is needed."""

    config: Config
    shape: Shape
    plan: Plan
    devices: UsedDevices = H200

    @staticmethod
    def of(*overrides: str, shape: str = "Qwen2.5-1.5B", devices: UsedDevices = H200, **facts: Any) -> Case:
        tables: dict[str, Any] = {
            "model": {"path": "model"},
            "data": {"train": "train.jsonl"},
            "algorithm": {"name": "grpo", "prompts_per_step": 64, "samples_per_prompt": 8, "minibatches_per_step": 4},
            "rollout": {"max_new_tokens": 1024},
            "run": {"dir": "run", "steps": 9},
        }
        config, found = configuration.parse(tables, overrides, here=False), named_shape(shape)
        plan = plan_of(found, config, device="cuda", device_bytes=H200.memory, host_bytes=2 * H200.memory, longest=400, **facts)
        return Case(config, found, plan, devices)

    @cached_property
    def predictor(self) -> Predictor:
        return Predictor(describe_run(self.config, self.shape, self.devices, self.plan))

    def predicted(self) -> dict[str, float]:
        """Seconds of the phases, by the names of measured ones."""
        found = self.predictor.metrics({**LENGTHS, **COUNTS, **{f"timing_s/{name}": 1.0 for name in PHASES}})
        return {name.removeprefix(f"{PREDICTED}timing_s/"): seconds for name, seconds in found.items() if "timing_s" in name}

    def write(self, folder: Path, seconds: Mapping[str, float], more: Mapping[str, float] | None = None, steps: int = 3) -> Path:
        """The folder of the run, with these seconds in every step but the first, which takes ten times as long."""
        folder.mkdir(exist_ok=True)
        (folder / ".fulltilt").touch()
        (folder / "snapshot.toml").write_text(to_toml(self.config))
        written = {"config": {}, "budgets": asdict(self.plan.budgets), **saved_facts(self.shape, self.devices, self.plan)}
        (folder / "plan.json").write_text(json.dumps(written))
        file = MetricsFile(folder / "metrics.jsonl")
        for step in range(1, steps + 1):
            times = {f"timing_s/{name}": own * (10 if step == 1 else 1) for name, own in seconds.items()}
            outside = sum(times.get(f"timing_s/{name}", 0.0) for name in ("testing", "save_checkpoint"))
            line = {**LENGTHS, **COUNTS, **times, "timing_s/step": sum(times.values()) - outside, **(more or {})}
            with contextlib.suppress(UserError):  # where the models do not know the device
                line |= self.predictor.metrics(line)
            file.append(step, line)
        file.close()
        return folder


def as_predicted(case: Case) -> dict[str, float]:
    return {name: seconds for name, seconds in case.predicted().items() if name in PHASES}


def told(found: Explanation) -> str:
    return "\n".join(found.lines())


def test_predictions_stand_beside_what_was_measured() -> None:
    case = Case.of()
    line = {
        **LENGTHS,
        **COUNTS,
        "timing_s/gen": 1.0,
        "timing_s/update_actor": 1.0,
        "memory_gib/gen/peak": 1.0,
        "memory_gib/update_actor/peak": 1.0,
    }
    found = case.predictor.metrics(line)
    assert found.keys() == {
        "predicted/timing_s/gen", "predicted/timing_s/update_actor", "predicted/timing_s/step", "predicted/memory_gib/gen/peak",
        "predicted/memory_gib/update_actor/peak",
    }  # fmt: skip
    assert all(value > 0 for value in found.values())
    # Longer responses take longer, and samples that the update leaves out do not.
    longer = case.predictor.metrics({**line, "response_length/mean": 900.0})
    assert longer["predicted/timing_s/gen"] > found["predicted/timing_s/gen"]
    fewer = case.predictor.metrics({**line, "actor/samples_left_out": 256})
    assert fewer["predicted/timing_s/update_actor"] == pytest.approx(found["predicted/timing_s/update_actor"] / 2, rel=0.1)
    assert fewer["predicted/timing_s/gen"] == found["predicted/timing_s/gen"]
    # Three rounds of dynamic sampling are three rollouts; a step that samples nothing has no lengths to predict from.
    rounds = case.predictor.metrics({**line, "train/num_gen_batches": 3})
    assert rounds["predicted/timing_s/gen"] == pytest.approx(3 * found["predicted/timing_s/gen"])
    assert case.predictor.metrics({"timing_s/update_actor": 1.0}) == {}


def test_other_roles_and_given_rows_are_predicted_too() -> None:
    line = {**LENGTHS, **COUNTS, **{f"timing_s/{name}": 1.0 for name in (*PHASES, "ref", "values", "update_critic")}}
    compared = Case.of("algorithm.kl_coef=0.1").predictor
    before = compared.metrics(line)
    assert compared.metrics({**line, "response_length/mean": 900.0})["predicted/timing_s/ref"] > before["predicted/timing_s/ref"] > 0
    critic = Case.of("algorithm.name=ppo", "algorithm.samples_per_prompt=1", roles=("actor", "critic")).predictor.metrics(line)
    assert critic["predicted/timing_s/values"] > 0 and critic["predicted/timing_s/update_critic"] > 0
    given = Case.of("algorithm.name=sft", "~algorithm.samples_per_prompt", "~rollout.max_new_tokens", rollout=False).predictor
    rows = {"perf/total_num_tokens": 64000, "timing_s/update_actor": 1.0}
    found, twice = given.metrics(rows), given.metrics({**rows, "perf/total_num_tokens": 128000})
    assert found.keys() == {"predicted/timing_s/update_actor", "predicted/timing_s/step"}
    assert twice["predicted/timing_s/update_actor"] > 1.5 * found["predicted/timing_s/update_actor"]


def test_what_a_folder_keeps_is_read_back() -> None:
    for shape in ("Qwen2.5-1.5B", "Qwen3-30B-A3B", "Gemma-2-2B"):
        case = Case.of(shape="Qwen2.5-1.5B")
        kept = json.loads(json.dumps({"budgets": asdict(case.plan.budgets), **saved_facts(named_shape(shape), H200, case.plan)}))
        assert read_shape(kept["shape"]) == named_shape(shape)
        assert UsedDevices(**kept["devices"]) == H200
        assert (read_plan(kept).budgets, read_plan(kept).roles) == (case.plan.budgets, case.plan.roles)


def test_recompute_is_found_where_there_is_memory(tmp_path: Path) -> None:
    case = Case.of("train.recompute=full")
    seconds = as_predicted(case) | {"gen": 0.1}
    found = explain(case.write(tmp_path, seconds))
    best = found.best
    assert best and best.setting == "train.recompute=auto" and 0.1 < best.share < 0.35
    assert found.steps == (2, 3) and found.seconds == pytest.approx(sum(seconds.values()))
    assert 'what would help most: train.recompute=auto (left to auto, which chooses "none"; ' in told(found)
    assert "more memory in update-actor)" in told(found)
    # With a measured peak that leaves no room, it is no advice.
    full = explain(case.write(tmp_path / "full", seconds, {"memory_gib/update_actor/peak": 138.0}))
    assert all("recompute" not in own.setting for own in full.changes)


def test_a_rollout_without_graphs_is_bound_by_launches(tmp_path: Path) -> None:
    case = Case.of("rollout.cuda_graphs=false", shape="Qwen2.5-0.5B")
    found = explain(case.write(tmp_path, as_predicted(case)))
    assert found.best and found.best.setting == "rollout.cuda_graphs=auto"
    assert max(found.phases, key=lambda phase: phase.seconds).name == "rollout"


def test_slow_rewards_are_found(tmp_path: Path) -> None:
    case = Case.of("reward.workers=4")
    whole = sum(as_predicted(case).values())
    found = explain(case.write(tmp_path, as_predicted(case) | {"reward": 2 * whole}))
    best = found.best
    assert best and (best.setting, best.seconds) == ("reward.workers=8", pytest.approx(whole))
    auto = Case.of()
    found = explain(auto.write(tmp_path / "auto", as_predicted(auto) | {"reward": 2 * whole}))
    assert found.best and found.best.why.startswith("a reward function that takes half as long")


def test_offloading_validation_and_samples_that_wait(tmp_path: Path) -> None:
    case = Case.of("train.offload_optimizer=true", shape="Qwen2.5-3B")
    found = explain(case.write(tmp_path / "offload", as_predicted(case) | {"gen": 0.1}))
    assert found.best and found.best.setting == "train.offload_optimizer=auto"
    case = Case.of("run.eval_every=1", "data.val=val.jsonl")
    found = explain(case.write(tmp_path / "eval", as_predicted(case) | {"testing": 100.0}))
    assert found.best and (found.best.setting, found.best.seconds) == ("run.eval_every=2", pytest.approx(50.0))
    case = Case.of("rollout.max_seqs=32")
    found = explain(case.write(tmp_path / "waits", as_predicted(case), {"rollout/most_waiting": 480}))
    assert found.best and found.best.setting == "rollout.max_seqs=auto"
    alone = explain(case.write(tmp_path / "alone", as_predicted(case)))  # none has waited
    assert all("max_seqs" not in own.setting for own in alone.changes)


@pytest.mark.parametrize(
    ("by_hand", "setting", "why"),
    [
        ("train.fused_layers=false", "train.fused_layers=auto", "left to auto, which chooses true"),
        ("train.fused_head=false", "train.fused_head=true", "left to auto, which chooses true"),
        ("train.head_recompute=true", "train.head_recompute=auto", "left to auto, which chooses false"),
        ("actor.token_budget=512", "actor.token_budget=auto", "left to auto, which chooses 16384"),
        ("rollout.release_memory=true", None, ""),  # as auto has it
    ],
)
def test_a_knob_set_by_hand_is_left_to_auto_where_that_is_faster(tmp_path: Path, by_hand: str, setting: str | None, why: str) -> None:
    case = Case.of(by_hand)
    found = explain(case.write(tmp_path, as_predicted(case) | {"gen": 0.1}))
    if setting is None:
        assert all(not own.setting.startswith(by_hand.partition("=")[0]) or own.setting.endswith("=false") for own in found.changes)
    else:
        first = found.changes[0]
        assert first.setting == setting and first.why.startswith(why), found.changes
        configuration.parse(tomllib.loads(to_toml(case.config)), first.setting.split(), here=False)


def test_several_knobs_set_by_hand_are_left_to_auto_together_where_one_alone_helps_less(tmp_path: Path) -> None:
    case = Case.of("rollout.max_seqs=32", "rollout.kv_bytes=1000000000")
    best = explain(case.write(tmp_path, as_predicted(case), {"rollout/most_waiting": 480})).best
    assert best and set(best.setting.split()) == {"rollout.max_seqs=auto", "rollout.kv_bytes=auto"}


def test_the_advice_is_that_of_the_plan(tmp_path: Path) -> None:
    """Where a run went as predicted, the change of one knob that the plan says gains most is the one that the doctor names."""
    case = Case.of(shape="Qwen2.5-7B", devices=replace(H200, workers=8), sharding=Sharding(workers=8))
    report = command.planned_config(case.config, "8xH200", "Qwen2.5-7B", LENGTHS["response_length/mean"])
    faster = {knob: own for knob, own in report.runners_up.items() if own.faster(report.seconds.total)}
    found = explain(case.write(tmp_path, as_predicted(case)))
    named = {own.setting.partition("=")[0] for own in found.changes}
    assert faster and faster.keys() <= named, (faster.keys(), named)
    best = min(faster, key=lambda knob: faster[knob].order)
    assert found.best and found.best.setting.startswith(f"{best}="), found.changes
    assert any(line.startswith(f"most would be gained, by these models, with {best} = ") for line in report.lines())


def test_what_a_run_does_otherwise_than_planned_stays_as_it_is() -> None:
    """Only what two plans differ in is changed: here the plan without recompute, in a run whose budget was lowered."""
    case = Case.of("train.recompute=full")
    run = describe_run(case.config, case.shape, case.devices, case.plan)
    lowered = replace(run, batch=replace(run.batch, token_budget=4096))
    after = replace(run, recompute=Recompute(), engine=replace(run.engine, memory_share=run.engine.memory_share / 2))
    assert moved(lowered, run, after) == replace(after, batch=lowered.batch)
    assert moved(lowered, run, run) is lowered


def test_nothing_helps_a_run_that_is_well(tmp_path: Path) -> None:
    case = Case.of(shape="Qwen2.5-7B")
    found = explain(case.write(tmp_path, as_predicted(case), {"perf/gpu_utilization": 0.97}))
    assert found.best is None and "nothing that is known would help by more than 3%" in told(found)
    assert "GPUs were busy 97% of the time" in told(found)
    update = next(phase for phase in found.phases if phase.name == "update-actor")
    assert update.predicted == pytest.approx(update.seconds) and 0.3 < (update.flops_share or 0) < 0.8
    rollout = next(phase for phase in found.phases if phase.name == "rollout")
    assert 0.1 < (rollout.bytes_share or 0) < 1
    assert not any("as long as predicted" in note for note in found.notes)
    slow = explain(case.write(tmp_path / "slow", as_predicted(case) | {"update_actor": 3 * as_predicted(case)["update_actor"]}))
    assert any(note.startswith("update-actor takes 3.0 times as long as predicted") for note in slow.notes)


def test_responses_that_are_cut_are_told_apart_from_the_advice(tmp_path: Path) -> None:
    """A lower limit changes results."""
    case = Case.of(shape="Qwen2.5-7B")
    found = explain(case.write(tmp_path, as_predicted(case), {"response_length/clip_ratio": 0.9, "response_length/mean": 1000.0}))
    assert found.best is None
    assert "more, with other results: rollout.max_new_tokens=512 (90% of the responses are cut at 1024 tokens)" in told(found)


def test_several_workers_memory_and_what_ran_out_of_it(tmp_path: Path) -> None:
    case = Case.of()
    more = {
        "timing_s/workers/update_actor/max": 3.0, "timing_s/workers/update_actor/mean": 2.0, "memory_gib/update_actor/peak": 70.0,
        "actor/out_of_memory": 1,
    }  # fmt: skip
    found = explain(case.write(tmp_path, as_predicted(case), more))
    assert "workers wait 1 s for the slowest" in told(found) and "peak 70.0 GiB of 140.4 GiB, predicted " in told(found)
    assert found.out_of_memory == {"actor/out_of_memory": 2}


def test_a_gpu_that_no_table_knows_has_times_alone(tmp_path: Path) -> None:
    case = Case.of(devices=replace(H200, name="NVIDIA L4"))
    found = explain(case.write(tmp_path, {"gen": 2.0, "update_actor": 3.0}))
    assert [(phase.name, phase.predicted, phase.flops_share) for phase in found.phases] == [
        ("rollout", None, None),
        ("update-actor", None, None),
    ]
    assert any("no predictions: hardware 'NVIDIA L4': unknown" in note for note in found.notes)


@pytest.mark.parametrize("missing", ["plan.json", "snapshot.toml"])
def test_a_folder_that_lacks_a_file_has_times_alone(tmp_path: Path, missing: str) -> None:
    case = Case.of()
    folder = case.write(tmp_path, {"gen": 2.0, "update_actor": 3.0})
    (folder / missing).unlink()
    assert told(explain(folder)).startswith(f"{folder}: steps 2 to 3, 5 s each")
    (folder / missing).write_text("{]")
    assert explain(folder).phases


def test_how_busy_a_gpu_is_needs_one() -> None:
    assert GpuUtilization.of("00000000-0000-0000-0000-000000000000") is None  # no driver here, or no such GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_busy_while_it_computes() -> None:
    watch = GpuUtilization.of(str(torch.cuda.get_device_properties(0).uuid))
    assert watch
    numbers, until = torch.randn(4096, 4096, device="cuda"), time.monotonic() + 3
    while time.monotonic() < until:
        torch.mm(numbers, numbers).sum().item()
    busy = watch.take()
    watch.close()
    assert busy is not None and 0.2 < busy <= 1 and watch.take() is None


# -- real runs ---------------------------------------------------------------------------------------------------------------------------


def doctor(folder: Path, *arguments: str) -> runs.Ended:
    return runs.command_here(folder, "doctor", *arguments)


def test_the_doctor_of_a_finished_run(run_of_one_process: Path, tmp_path: Path) -> None:
    """The run of four steps that other tests compare with."""
    ended = doctor(run_of_one_process, "run")
    assert ended.code == 0 and "loading" not in ended.error, ended
    assert "run: steps 2 to 4, " in ended.out and "no predictions: the models of memory and time are made for GPUs" in ended.out
    for phase in ("rollout", "update-actor", "reward", "save"):
        assert f"\n{phase}: " in ended.out
    report = json.loads(doctor(run_of_one_process, "run", "--json").out)
    assert report["broken"] is False and {found["name"] for found in report["findings"]} >= {"memory/gen", "memory/update_actor"}
    lines = [json.loads(line) for line in (run_of_one_process / "run" / "metrics.jsonl").read_text().splitlines()][-3:]
    times = {phase["name"]: phase["seconds"] for phase in report["run"]["phases"]}
    assert times["rollout"] == pytest.approx(sum(line["timing_s/gen"] for line in lines) / 3)
    assert report["run"]["between"] + sum(times.values()) == pytest.approx(report["run"]["seconds"])
    assert sum(phase["share"] for phase in report["run"]["phases"]) <= 1 + 1e-9
    # A killed run ends in half a line.
    copy = runs.copy(run_of_one_process, tmp_path / "copy")
    with open(copy / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "timing_s/ste')
    assert doctor(copy, "run").out == ended.out


def test_the_doctor_of_sft_and_of_one_step(tmp_path: Path, model_folders: ModelFolders) -> None:
    folder = runs.make(tmp_path / "sft", model_folders("qwen2"), runs.SFT)
    said = runs.command_here(folder, "train", "run.toml", "run.steps=1", "run.eval_every=0", "~data.val")
    assert said.code == 0 and "where the time went: update-actor " in said.out and "`fulltilt doctor run` says more" in said.out, said
    assert said.out.count("predictions of time and memory are left out: ") == 1
    ended = doctor(folder, "run")
    assert ended.code == 0 and "run: step 1, " in ended.out and "\nupdate-actor: " in ended.out


def test_the_doctor_of_what_is_no_run_or_has_no_step_yet(tmp_path: Path) -> None:
    refused = doctor(tmp_path, ".")
    assert refused.code == 2 and ".: is not the folder of a run. Give the folder of a run (its run.dir)" in refused.error
    with pytest.raises(UserError, match="is not the folder of a run"):
        explain(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".fulltilt").touch()
    ended = doctor(tmp_path, "run")
    assert (ended.code, ended.out) == (0, "run: no step has finished yet\n"), ended
    assert doctor(tmp_path, "run", "--address", "auto").code == 2
