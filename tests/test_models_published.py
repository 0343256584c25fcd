"""The models of memory and time beside what others have published (tests/data/published), and on runs that nobody has measured here.

`pytest tests/test_models_published.py -s` prints the tables.
"""

from __future__ import annotations

import copy
import json
import math
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fulltilt.algo.build import build
from fulltilt.cli import app
from fulltilt.config import parse
from fulltilt.hardware import ACCELERATORS, Accelerator, Cluster, accelerator
from fulltilt.presets import PRESETS
from fulltilt.records import UserError
from fulltilt.schema import shown
from fulltilt.settings import algorithm_settings
from fulltilt.shape import SHAPES, Recompute, Shape
from fulltilt.tune import command, constants, tables
from fulltilt.tune.constants import FULLTILT
from fulltilt.tune.description import RANGES, TYPES, BatchDescription, EngineDescription, RunDescription, TrainLayout, describe, read
from fulltilt.tune.lengths import Lengths
from fulltilt.tune.memory_model import held_bytes, in_flight, memory_of, parameters, with_share_of_memory
from fulltilt.tune.own import reads_old
from fulltilt.tune.report import PlanReport, report_of
from fulltilt.tune.shapes import PUBLISHED, find_shape, name_of, named_shape
from fulltilt.tune.tables import RowPrediction, compare, plain_number, predict, read_table
from fulltilt.tune.time_model import expert_imbalance, pass_seconds, seconds_of, update_passes, update_seconds
from fulltilt.tune.values import remedy

PUBLISHED_TABLES = Path(__file__).parent / "data" / "published"
SOURCE = Path(__file__).parents[1] / "src"


@cache
def published(name: str) -> dict[str, RowPrediction]:
    """The rows of a table by number."""
    return {own.row.number: own for own in predict(read_table(PUBLISHED_TABLES / f"{name}.csv"))}


GRPO, DAPO = "grpo_qwen2.5_7b", "dapo7b"


# ---- published tables --------------------------------------------------------------------------------------------------------------------


def test_memory_verdicts_are_those_of_the_published_runs() -> None:
    """Four of 13 GRPO runs ran out of memory, and no DAPO run did."""
    grpo = published(GRPO)
    assert {number for number, own in grpo.items() if own.row.ran_out} == {"4", "5", "10", "11"}
    assert {number for number, own in grpo.items() if not own.memory.fits} == {"4", "5", "10", "11"}
    assert all(own.verdict for own in grpo.values()) and len(grpo) == 13
    assert all(own.memory.fits for own in published(DAPO).values()) and len(published(DAPO)) == 21
    assert not any(own.row.adapted for own in [*grpo.values(), *published(DAPO).values()])  # the verdicts are predictions


def test_every_run_that_fits_is_flagged_on_a_quarter_of_the_memory() -> None:
    for own in [*published(GRPO).values(), *published(DAPO).values()]:
        if own.memory.fits:
            cut = memory_of(with_share_of_memory(own.row.run, 1 / 4))
            assert not cut.fits and cut.reasons, own.row.run.name


def test_updates_are_predicted_twice_as_well_as_by_a_constant_mfu() -> None:
    names = (DAPO, GRPO)
    read = [read_table(PUBLISHED_TABLES / f"{name}.csv") for name in names]
    everything = [own for name in names for own in published(name).values()]
    print("\n" + "\n".join(tables.lines(read, everything)))
    found = compare(everything)
    assert found and found.rows == 29 and set(found.shares) == {"H100", "H20"}
    assert found.error <= found.baseline / 2, (found.error, found.baseline)


def test_one_length_serves_all_rows_of_a_table_without_throughput() -> None:
    """It agrees with the FLOPs that the MFU column stands for, which the prediction does not read. verl divides by the time without its
    offloading, so that they come out at most a fifth too high."""
    dapo = published(DAPO)
    assert len({own.row.run.lengths for own in dapo.values()}) == 1
    run = dapo["7"].row.run
    ideal = tables.ideal_seconds(run)
    told = [own.row.mfu * own.row.measured["update_actor"] * own.row.run.cluster.gpus / 8 for own in dapo.values()
            if own.row.mfu and own.row.run.gpu.name == "H100"]  # fmt: skip
    assert 0.75 < ideal / (sum(told) / len(told)) < 1.05
    tokens = {number: round(own.row.run.lengths.mean) for number, own in published(GRPO).items()}
    assert tokens["2"] == 706 and tokens["14"] == 700


SYSTEM = ("host_layer", "host_ring", "hidden", "driver_rate", "host_copy", "exposed")
OTHERS = ("TILE", "ATTENTION_SHARE", "HBM_SHARE", "LINK_SHARE", "LAUNCH", "FORWARD_TRAFFIC", "BACKWARD_TRAFFIC", "UNFUSED_TRAFFIC")


@pytest.mark.long
@pytest.mark.parametrize("factor", [0.75, 1.25])
@pytest.mark.parametrize("name", [*SYSTEM, *OTHERS, "LOGIT_TRAFFIC", "STATE_TRAFFIC", "matmul_share"])
def test_no_constant_decides_alone(name: str, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error stays below half of the constant MFU's with any constant of the update a quarter larger or smaller."""
    if name.isupper():
        monkeypatch.setattr(constants, name, getattr(constants, name) * factor)

    def changed(run: RunDescription) -> RunDescription:
        if name in SYSTEM:
            return replace(run, system=replace(run.system, **{name: getattr(run.system, name) * factor}))
        if name == "matmul_share":
            gpu = replace(run.gpu, matmul_share=min(1.0, run.gpu.matmul_share * factor))
            return replace(run, cluster=replace(run.cluster, gpu=gpu))
        return run

    everything = []
    for table in (DAPO, GRPO):
        rows = [own.row for own in published(table).values()]
        unknown = Lengths(rows[0].run.lengths.most_prompt, rows[0].run.lengths.most_response)
        read = tables.PublishedTable(
            Path(table), tables.with_lengths([replace(row, run=replace(changed(row.run), lengths=unknown)) for row in rows])
        )
        everything += predict(read)
    found = compare(everything)
    assert found
    print(f"{name} x {factor}: {found.error:.1%} beside {found.baseline:.1%}")
    assert found.error <= found.baseline / 2


def update(table: str, number: str) -> float:
    return published(table)[number].times["update_actor"]


def test_causes_have_the_order_that_the_tables_show() -> None:
    dapo, grpo = published(DAPO), published(GRPO)
    assert dapo["14"].times["rollout"] < dapo["2"].times["rollout"]  # data parallel engines beat tensor parallel ones
    assert update(DAPO, "7") < update(DAPO, "5") and update(DAPO, "8") < update(DAPO, "6")  # fused rotary positions
    dynamic = [own for own in dapo.values() if own.row.run.cluster.gpus == 8 and own.row.run.batch.token_budget]
    assert len(dynamic) > 8 and max(dynamic, key=lambda own: own.times["update_actor"]).row.number == "11"  # a ring of short sequences
    assert update(GRPO, "13") > update(GRPO, "2")  # offload
    assert update(GRPO, "3") > update(GRPO, "6") > update(GRPO, "7") > update(GRPO, "9")  # micro-batches of two samples: launches
    assert grpo["8"].times["generation"] < grpo["7"].times["generation"]  # CUDA graphs
    assert dapo["12"].times["update_actor"] > dapo["7"].times["update_actor"]  # a pipeline's bubble, and its last stage's head


# ---- tables as they stand ----------------------------------------------------------------------------------------------------------------


def test_headers_and_cells_are_read_however_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "dapo_others.csv"
    path.write_text(
        "No,Framework,Model,GPU Type,GPUs,Training Parallelism,Rollout TP,Update,Step Time,Batch Size,Mini Batch Size,"
        "Max Prompt Length,Max Response Length,Actor max token,Log prob max token\n"
        '1,Megatron,Qwen3-30B-A3B,H800,"64",TP=2 PP=2 EP=8 ETP=1,4,210 s,600,256,32,1k,16k,20480,40960\n'
        "2,FSDP,Qwen/Qwen2.5-32B-Instruct,A100-80GB,64,fsdp64 sp8,8,,OOM,256,32,1k,16k,16k,32k\n"
        "3,Megatron,dpsk-v3 671b,H20-96G,256,tp8 pp16 ep16,16,,,256,32,1k,16k,16k,32k\n"
        "4,Megatron,a model of our own,H100,8,tp8,1,,,256,32,1k,16k,16k,32k\n"
        "5,Megatron,Qwen2.5-72B,H100,8,tp3,1,,,256,32,1k,16k,16k,32k\n"
        ",,,,,,,,,,,,,,\n"
    )
    table = read_table(path)
    experts, dense, latent = (row.run for row in table.rows)
    assert experts.layout == TrainLayout(tensor=2, pipeline=2, expert=8) and experts.engine.tensor == 4 and experts.gpu.name == "H800"
    assert experts.batch == BatchDescription(256, 16, 32, 20480, 2, 40960, 4) and experts.lengths.most_response == 16384
    assert dense.backend == "fsdp" and dense.recompute.kind == "full" and table.rows[1].ran_out and dense.gpu.name == "A100"
    assert latent.cluster.gpus == 256 and round(parameters(latent.shape).total / 1e9) == 671
    assert [why.partition(":")[0] for why in table.skipped] == ["line 5", "line 6"] and "not known" in table.skipped[0]
    for own in predict(table):
        assert own.times["step"] > own.times["update_actor"] > 0 and own.memory.phases["update-actor"].total > 0


@pytest.mark.parametrize(
    ("text", "number"),
    [("20k", 20480), ("100K", 102400), ("4", 4), ("210 s", 210), ("1,024", 1024), ("OOM", None), ("/", None), ("", None)],
)
def test_numbers_of_cells(text: str, number: float | None) -> None:
    assert plain_number(text) == number


def test_what_a_table_leaves_out_is_as_people_set_it(tmp_path: Path) -> None:
    """Recompute where an update does not fit without it, and engines of as few GPUs as they need; what is stated is obeyed. Whether a row
    fits that was made to fit is no prediction, and one that ran out of memory is not made to fit."""
    path = tmp_path / "dapo_moe.csv"
    path.write_text(
        "number,backend,model,GPU,num_gpus,train_parallel,infer_parallel,Other,update_actor,max_response_len,micro_bs_actor\n"
        "1,megatron,qwen3 moe 30b,H20,32,TP2 EP8,,deepep,300,20k,22k\n"
        "2,megatron,qwen3-moe-30b,H20,32,tp2ep8etp1,tp4,no recompute,oom,20k,22k\n"
        "3,megatron,qwen2.5 7b,H100-80G,8,tp4,tp1,,,20k,10k\n"
        '4,megatron,qwen3 235b,H800,256,"ep32, pp8",,,,20k,22k\n'
        "5,megatron,dpsk,H20,512,tp8pp16ep16etp1cp2,tp32,,,20k,22k\n"
        "6,fsdp,qwen3-30b-a3b,H100,32,all dp,tp4,,,20k,22k\n"
        "7,megatron,qwen3 235b,H100,256,,tp16,,,20k,22k\n"
        "8,megatron,qwen3 moe 30b,H20,32,tp2ep8,tp4,deepep,oom,20k,22k\n"
        "9,megatron,qwen3 moe 30b,H20,32,tp2ep8,tp4,,300,20k,22k\n"
    )
    found = read_table(path)
    assert [why.partition(":")[0] for why in found.skipped] == ["line 8"] and "train_parallel is empty" in found.skipped[0]
    runs = [row.run for row in found.rows]
    assert [run.recompute.kind for run in runs] == ["full", "none", "none", "full", "none", "full", "none", "full"]
    assert runs[0].system.deduplicates and not runs[1].system.deduplicates
    assert [run.engine.tensor for run in runs] == [1, 4, 1, 8, 32, 4, 4, 4] and round(parameters(runs[4].shape).total / 1e9) == 671
    predicted = predict(found)
    assert [own.memory.fits for own in predicted] == [True, False, True, True, True, True, False, True]
    assert [own.verdict for own in predicted] == [None, True, None, None, None, None, True, None]
    assert [row.adapted for row in found.rows] == [True, False, False, True, False, False, False, True]
    shares = [tables.ideal_seconds(own.row.run) / own.times["update_actor"] for own in predicted]  # of the peak
    # Tokens go to other machines eight times, and the most popular of 32 GPUs receives two and a half times the mean.
    assert all(0.05 < share < 0.6 for share in (*shares[:3], *shares[4:])) and 0.02 < min(shares) == shares[3]


def test_an_empty_layout_in_columns_of_sizes_is_data_parallel(tmp_path: Path) -> None:
    path = tmp_path / "sizes.csv"
    path.write_text("model,GPU,num_gpus,TP,PP\nqwen2.5 7b,H100,8,,\nqwen2.5 7b,H100,8,2,\n")
    assert [row.run.layout for row in read_table(path).rows] == [TrainLayout(), TrainLayout(tensor=2)]


def test_the_shape_of_the_command_line_is_that_of_all_rows(tmp_path: Path) -> None:
    """It may be a folder, and an unknown one is refused, even if cells or the file's name have a model."""
    path = tmp_path / "grpo_qwen2.5_7b.csv"
    path.write_text("model,GPU,num_gpus,train_parallel\n,H100,8,tp4\nQwen3-8B,H100,8,tp4\n")
    own = PUBLISHED["Qwen2.5-7B"] | {"num_hidden_layers": 20}
    (tmp_path / "config.json").write_text(json.dumps(own))
    for shape, layers in ((None, [28, 36]), ("Qwen2.5-14B", [48, 48]), (str(tmp_path), [20, 20])):
        assert [len(row.run.shape.layers) for row in read_table(path, shape=shape).rows] == layers
    for wrong in ("Qwen9-99B", ""):
        with pytest.raises(UserError, match=f"^'{wrong}' is neither a folder with a config.json nor a named shape"):
            read_table(path, shape=wrong)


HUGE = 400 * "9"


@pytest.mark.parametrize(
    ("column", "cell", "words"),
    [
        ("infer_parallel", "tp0", "infer_parallel is 0"), ("infer_parallel", f"tp{HUGE}", "infer_parallel is inf"),
        ("num_gpus", "0x8", "num_gpus is 0"), ("num_gpus", HUGE, "num_gpus is inf"), ("num_gpus", f"{HUGE}x8", "num_gpus is inf"),
        ("num_gpus", "many", 'num_gpus is "many", which is not a number'), ("train_parallel", f"fsdp{HUGE}", "a size is too large"),
        ("GPU", "0xH100", "0 is not a possible number of GPUs"), ("memory_share", "60", "memory_share is 60. Give a number from 0.01 to 1"),
        ("n", "0.5", "samples is 0.5. Give a number from 1 to 10000000"), ("n", "0", "samples is 0"), ("mini_bs", "0", "minibatch is 0"),
        ("bs", HUGE, "prompts is inf"), ("bs", "0", "prompts is 0"), ("micro_bs_actor", "0", "actor_batch is 0"),
        ("micro_bs_logp", "0", "logp_batch is 0"), ("max_prompt_len", "0", "most_prompt is 0"), ("step", HUGE, "step is inf"),
        ("max_response_len", HUGE, "most_response is inf"),
    ],
)  # fmt: skip
def test_a_row_with_an_odd_cell_does_not_stop_the_others(column: str, cell: str, words: str, tmp_path: Path) -> None:
    row = {"model": "Qwen2.5-7B", "GPU": "H100", "num_gpus": "8", "train_parallel": "tp4", "infer_parallel": "tp1", column: cell}
    others = {"num_gpus": "8", "train_parallel": "tp4"}  # columns that may not be empty
    path = tmp_path / "other.csv"
    path.write_text("\n".join(",".join(cells) for cells in (row, row.values(), {**row, column: others.get(column, "")}.values())))
    table = read_table(path)
    assert len(table.rows) == 1 and len(table.skipped) == 1 and table.skipped[0].startswith("line 2: ") and words in table.skipped[0]


def test_a_measured_zero_is_no_measurement(tmp_path: Path) -> None:
    path = tmp_path / "grpo_qwen2.5_7b.csv"
    path.write_text("GPU,num_gpus,train_parallel,update_actor,step\nH100,8,tp4,0,0\nH100,8,tp4,100,0\n")
    table = read_table(path)
    assert len(table.rows) == 2 and not table.skipped
    found = compare(predict(table))
    assert found and found.rows == 1 and compare(predict(table), "step") is None


def test_other_gpus_skip_the_rows_whose_layout_does_not_divide_them() -> None:
    path = PUBLISHED_TABLES / f"{DAPO}.csv"
    table = read_table(path, hardware="4xH100")
    assert {row.run.cluster.gpus for row in table.rows} == {4} and not any(row.measured or row.ran for row in table.rows)
    assert len(table.rows) + len(table.skipped) == len(published(DAPO))
    assert table.skipped[0] == "row 3: 4 GPUs cannot be divided into groups of 8. Change the layout"
    with pytest.raises(UserError, match=r"^--table .*: no row can be read. row 2: 3 GPUs cannot be divided into groups of 4"):
        read_table(PUBLISHED_TABLES / f"{GRPO}.csv", hardware="3xH100")
    with pytest.raises(UserError, match=r"^hardware '8xB999': unknown"):
        read_table(path, hardware="8xB999")


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match=r"no column for gpus, train_parallel"):
        read_table(tmp_path / "a.csv")


# ---- the command -------------------------------------------------------------------------------------------------------------------------


def plan(*arguments: object) -> tuple[int, str]:
    """The exit code and the output of `fulltilt plan`."""
    ended = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    return ended.exit_code, ended.stdout


def test_the_command_predicts_tables() -> None:
    code, out = plan("--table", PUBLISHED_TABLES / f"{GRPO}.csv", "--json")
    found = json.loads(out)
    assert code == 0 and len(found["rows"]) == 13 and found["errors"]["update_actor"]["rows"] == 9
    row = found["rows"][0]
    assert row["number"] == "2" and row["fits"] and row["measured"]["update_actor"] == 102.0 and row["predicted"]["update_actor"] > 0
    assert set(row["memory"]) == {"rollout", "sync", "old-logprob", "ref-logprob", "update-actor"}
    assert row["memory"]["update-actor"]["gradients"] > 7e9
    code, out = plan("--table", PUBLISHED_TABLES / f"{GRPO}.csv", "--hardware", "H100-20GB", "--json")
    assert code == 0 and not any(row["fits"] for row in json.loads(out)["rows"])


@pytest.mark.long
def test_the_command_plans_runs_of_models_that_are_not_here(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text('[model]\npath = "Qwen/Qwen2.5-7B"\n[data]\ntrain = "nowhere.jsonl"\n[reward]\nfunction = "math"\n[run]\nsteps = 1\n')
    code, out = plan(run, "--hardware", "8xH200", "--json")
    found = json.loads(out)
    assert code == 0 and found["fits"] and found["step_seconds"]["update-actor"] > 0 and found["knobs"]["train.shard"] == "optimizer"
    assert found["reasons"] and set(found["binds"].values()) <= {"compute", "HBM", "PCIe", "network", "host", "waiting"}
    code, out = plan(run, "--hardware", "1xA100-40GB", "--shape", "Qwen2.5-72B")
    assert code == 3 and "it does not fit: " in out
    for wrong in ([], [run, "--table", "a.csv"]):
        with pytest.raises(UserError, match="give one of"):
            plan(*wrong)


def test_the_command_predicts_a_description(tmp_path: Path) -> None:
    path = tmp_path / "other.toml"
    path.write_text('[model]\nshape = "Qwen2.5-7B"\n[hardware]\ngpus = "8xH100"\n[train]\nlayout = "tp4"\ntoken_budget = 20480\n')
    assert plan("--describe", path)[0] == 0 and plan("--describe", path, "--hardware", "8xH100-20GB")[0] == 3
    told = json.loads(plan("--describe", path, "--shape", "Qwen2.5-72B", "--response-tokens", 500, "--json")[1])
    assert not told["fits"] and told["remedies"] and told["memory"]["update-actor"]["total"] > told["memory"]["update-actor"]["limit"]


RUN = '[model]\npath = "Qwen/Qwen2.5-7B"\n[data]\ntrain = "nowhere.jsonl"\n[reward]\nfunction = "math"\n[run]\nsteps = 15\n'


def planned(folder: Path, *overrides: str, hardware: str | None = "8xH100", response: float | None = None) -> PlanReport:
    (folder / "run.toml").write_text(RUN)
    return command.planned(folder / "run.toml", overrides, hardware, None, response)


def test_an_engine_that_is_not_modelled_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'rollout.engine = "hf" is not planned'):
        planned(tmp_path, "rollout.engine=hf")


def test_adapters_take_the_memory_of_what_they_train(tmp_path: Path) -> None:
    adapted = planned(tmp_path, "lora.rank=16", "algorithm.kl_coef=0.01", hardware="1xA100-40GB")
    assert adapted.fits and not planned(tmp_path, hardware="1xA100-40GB").fits
    count = Shape.named("7B").lora_parameters(16, "all-linear")
    update = adapted.memory.phases["update-actor"].kinds
    assert update["gradients"] == 4 * count and update["optimizer"] == 12 * count and update["reference"] == 0
    products = [update_seconds(run_of(trained=own)).causes["products"] for own in (count, None)]
    assert products[0] / products[1] == pytest.approx(2 / 3)  # no gradients of frozen weights
    assert adapted.seconds.ref_logprob.total > 0  # by the same model, without them
    shards = held_bytes(run_of(backend="fsdp", layout=TrainLayout(shard=8), trained=count))
    assert shards["gradients"] == 4 * count // 8 and shards["optimizer"] == 12 * count // 8


def test_micro_batches_by_samples_and_activations_on_the_host_are_planned(tmp_path: Path) -> None:
    by_samples = planned(tmp_path, "actor.dynamic_batch=false", "actor.micro_batch=3").run.batch
    assert (by_samples.token_budget, by_samples.micro_batch) == (None, 3)
    assert (by_samples.forward_token_budget, by_samples.forward_micro_batch) == (None, 3)
    assert planned(tmp_path, "train.offload_activations=true").run.offload_activations
    base, away = run_of(system=FULLTILT), run_of(system=FULLTILT, offload_activations=True)
    assert memory_of(away).phases["update-actor"].total < memory_of(base).phases["update-actor"].total
    slow = replace(away, cluster=replace(away.cluster, gpu=replace(away.gpu, host_link=1e9)))
    assert update_seconds(slow).causes["offload"] > 0 == update_seconds(base).causes.get("offload", 0)


@pytest.mark.long
def test_epochs_rounds_and_old_logprobs_are_counted_as_the_algorithm_has_them(tmp_path: Path) -> None:
    once, twice = planned(tmp_path), planned(tmp_path, "algorithm.epochs=2")
    assert twice.seconds.update.total == pytest.approx(2 * once.seconds.update.total)
    assert not once.seconds.old_logprob.causes and "old-logprob" not in once.memory.phases  # one optimizer step: nothing has moved
    assert twice.seconds.old_logprob.total > 0 and "old-logprob" in twice.memory.phases
    for override in ("algorithm.reward_kl_coef=0.1", "algorithm.minibatches_per_step=2", "algorithm.advantage=optimal_token_baseline"):
        assert planned(tmp_path, override).seconds.old_logprob.total > 0, override
    assert not planned(tmp_path, "algorithm.minibatches_per_step=2", "algorithm.importance_level=bypass").run.old_logprobs
    rounds = planned(tmp_path, "algorithm.name=dapo", "algorithm.prompts_per_round=192")
    assert rounds.run.batch.sampled == 192 and rounds.seconds.generation.total > once.seconds.generation.total
    assert any("one round of 192 prompts is counted" in reason for reason in rounds.reasons)


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - {"sft"}))
def test_old_logprobs_are_planned_where_the_algorithm_needs_them(name: str) -> None:
    for more in ({}, {"epochs": 2}, {"reward_kl_coef": 0.1}, {"importance_level": "bypass"}, {"importance_level": "token-normalized"}):
        tables = {"model": {"path": "Qwen/Qwen2.5-7B"}, "data": {"train": "a.jsonl"}, "run": {"steps": 1}}
        config = parse({**tables, "algorithm": {"name": name, **more}}, here=False)
        assert reads_old(config, algorithm_settings(config)) == ("old_logprobs" in build(config).needs), more


@pytest.mark.long
def test_a_run_is_planned_for_as_many_gpus_as_it_asks_for(tmp_path: Path) -> None:
    assert planned(tmp_path, "cluster.workers=8", hardware=None).run.cluster.gpus == 8
    several = ("cluster.workers=4", "cluster.nodes=2", "cluster.address=a:6379")
    found = planned(tmp_path, *several, hardware="H200").run.cluster
    assert (found.gpus, found.per_machine, found.gpu.name) == (8, 4, "H200")
    assert planned(tmp_path, *several[1:], hardware="4xH200").run.cluster.per_machine == 2
    for overrides, words in ((several[:1], "the run has 4 GPUs, for which"), (several[1:], "9 GPUs cannot be shared out evenly")):
        with pytest.raises(UserError, match=words):
            planned(tmp_path, *overrides, hardware="9xH200")


def test_the_plan_does_not_speak_of_data_that_was_not_read(tmp_path: Path) -> None:
    assert "15 steps, each of 64 prompts" in " ".join(planned(tmp_path).reasons)
    (tmp_path / "run.toml").write_text(RUN.replace("steps = 15", "epochs = 2"))
    by_epochs = command.planned(tmp_path / "run.toml", (), "8xH100", None, None)
    assert "2 epochs, each step of 64 prompts" in " ".join(by_epochs.reasons) and " an epoch" not in " ".join(by_epochs.reasons)


def test_a_description_may_have_other_gpus_and_another_model(tmp_path: Path) -> None:
    """Its other roles too. What the file's own GPUs or model could not do is no mistake then."""
    other = tmp_path / "other.toml"
    text = '[model]\nshape = "Qwen2.5-7B"\ncritic = true\n[hardware]\ngpus = "8xH100"\n[train]\nlayout = "{}"\n'
    other.write_text(text.format("tp8"))
    with pytest.raises(UserError, match="28 attention heads cannot be divided evenly among 8"):
        command.described(other, None, None, None)
    assert command.described(other, None, "Llama-3-8B", None).run.shape == named_shape("Llama-3-8B")
    other.write_text(text.format("tp4pp4"))
    with pytest.raises(UserError, match="8 GPUs cannot be divided into groups of 16"):
        command.described(other, None, None, None)
    given, larger = (command.described(other, "16xH200", shape, None) for shape in (None, "Qwen2.5-14B"))
    (critic,), (larger_critic,) = given.run.others, larger.run.others
    assert given.run.cluster.gpus == critic.run.cluster.gpus == 16 and critic.run.gpu.name == "H200"
    assert len(critic.run.shape.layers) == 28 and len(larger_critic.run.shape.layers) == 48
    assert larger.seconds.phases["update-critic"].total > 1.5 * given.seconds.phases["update-critic"].total
    with pytest.raises(UserError, match="4 GPUs cannot be divided into groups of 16"):
        command.described(other, "4xH100", None, None)


def test_mistakes_of_the_command_line_are_told_once_and_in_words(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--response-tokens 5000: responses end at \d+ tokens \(rollout.max_new_tokens\)"):
        planned(tmp_path, response=5000)
    other = tmp_path / "other.toml"
    other.write_text('[model]\nshape = "Qwen2.5-7B"\n[train]\nlayuot = "tp4"\n')
    with pytest.raises(UserError, match=r"train: unknown key layuot. Known are backend, .*layout") as told:
        command.described(other, None, None, None)
    assert "not a possible value" not in str(told.value) and "cluster" not in str(told.value)
    other.write_text('[model]\nshape = "Qwen2.5-7B"\n')
    with pytest.raises(UserError, match=r"lengths.most_response"):
        command.described(other, None, None, 9000)
    other.write_text('[model]\nshape = "Qwen2.5-7B"\n[lengths]\nmost_response = 512\n')  # less than the usual mean, which is replaced
    assert command.described(other, None, None, 200).run.lengths.response == 200
    with pytest.raises(UserError, match=r"missing.csv: cannot be read: No such file or directory. Give"):
        command.tables([tmp_path / "missing.csv"], None, None)


def test_nothing_needs_torch() -> None:
    """In a process that cannot import it."""
    block = "import sys\nfor name in ('torch', 'transformers'): sys.modules[name] = None\n"
    code = block + "import fulltilt.tune.command, fulltilt.tune.report\nprint('fine')"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(SOURCE)}, check=True)
    assert child.stdout == "fine\n"


# ---- the models --------------------------------------------------------------------------------------------------------------------------


def run_of(**given: object) -> RunDescription:
    base = RunDescription(
        Shape.named("7B"), Cluster.parse("8xH100"), Lengths(1024, 4096, 128, 600), layout=TrainLayout(tensor=2),
        batch=BatchDescription(128, 8, 32, token_budget=16384, forward_token_budget=32768),
    )  # fmt: skip
    return replace(base, **given)  # type: ignore[arg-type]


def test_parameters_gradients_and_states_are_divided_as_the_layout_says() -> None:
    count = parameters(Shape.named("7B")).total
    whole = held_bytes(run_of(layout=TrainLayout()))
    assert whole == {"parameters": 2 * count, "gradients": 4 * count, "optimizer": 12 * (count // 8)}
    half = held_bytes(run_of())
    assert half["gradients"] == 4 * (count // 2) and half["optimizer"] == 12 * (count // 2 // 4)
    ring = held_bytes(run_of(layout=TrainLayout(tensor=2, context=2)))
    assert ring == half  # states are shared out among context-parallel GPUs too
    shards = held_bytes(run_of(backend="fsdp", layout=TrainLayout(shard=8)))
    assert shards["optimizer"] == 2 * (4 * count // 8) == 2 * shards["gradients"]
    moe = run_of(shape=named_shape("Qwen3-30B-A3B"), layout=TrainLayout(tensor=2, expert=8))
    experts = parameters(moe.shape).experts
    assert held_bytes(moe)["parameters"] == 2 * (experts // 8 + parameters(moe.shape).shared // 2)


def test_what_a_setting_saves_is_seen() -> None:
    base = memory_of(run_of()).phases["update-actor"].total
    for change in (
        {"recompute": Recompute("full")},
        {"fused_head": True, "recompute": Recompute("full")},
        {"layout": TrainLayout(tensor=4)},
        {"batch": replace(run_of().batch, token_budget=8192)},
    ):
        assert memory_of(run_of(**change)).phases["update-actor"].total < base, change
    assert memory_of(run_of(reference=True)).phases["rollout"].total > memory_of(run_of()).phases["rollout"].total
    offloaded = run_of(offload_params=True, offload_grads=True, offload_optimizer=True)
    assert memory_of(offloaded).phases["rollout"].kinds["gradients"] == 0 < memory_of(offloaded).phases["update-actor"].kinds["gradients"]
    assert in_flight(run_of(layout=TrainLayout(pipeline=4))) == 4 < in_flight(run_of(layout=TrainLayout(pipeline=4, virtual=2)))
    small = run_of(engine=EngineDescription(memory_share=0.1))
    assert not memory_of(small).engine_starts and "KV cache" in memory_of(small).reasons[0]


def test_what_a_setting_costs_is_seen() -> None:
    base = update_seconds(run_of()).total
    assert update_seconds(run_of(recompute=Recompute("full"))).total > base
    assert update_seconds(run_of(offload_params=True, offload_optimizer=True)).total > base
    assert update_seconds(run_of(fused_rope=True)).total < base
    assert update_seconds(run_of(batch=replace(run_of().batch, token_budget=None, micro_batch=1))).total > base
    assert "pipeline bubble" in update_seconds(run_of(layout=TrainLayout(pipeline=2))).causes
    assert update_seconds(run_of(cluster=Cluster.parse("16xH100"))).total < base
    eager = run_of(engine=EngineDescription(graphs=False))
    assert seconds_of(eager).generation.total > seconds_of(run_of()).generation.total
    assert seconds_of(run_of(reference=True)).ref_logprob.total > 0 == seconds_of(run_of()).ref_logprob.total
    moe = run_of(shape=named_shape("Qwen3-30B-A3B"), layout=TrainLayout(expert=8))
    assert update_seconds(moe).causes["collectives in layers"] > 0
    alone = run_of(engine=EngineDescription(shares_prompts=False))
    assert seconds_of(alone).generation.causes["prefill"] == pytest.approx(8 * seconds_of(run_of()).generation.causes["prefill"])
    exposed = run_of(backend="fsdp", layout=TrainLayout(), system=replace(FULLTILT, exposed=1.0))
    assert gathering(replace(exposed, system=FULLTILT)) == pytest.approx(gathering(exposed) / 2) and gathering(exposed) > 0


def gathering(run: RunDescription) -> float:
    return update_seconds(run).causes["gathering parameters"]


def test_experts_are_used_unevenly_by_the_gpus_that_have_them() -> None:
    """The fewer experts a GPU has, the more; and never more than if one GPU had all tokens."""
    shape = named_shape("Qwen3-30B-A3B")

    def uneven(**layout: Any) -> float:
        return expert_imbalance(run_of(shape=shape, layout=TrainLayout(**layout)), 128)

    assert uneven() == uneven(tensor=8) == 1 < uneven(expert=2) < 2 and uneven(expert=8) == pytest.approx(1.7, rel=0.01)
    assert uneven(tensor=8, whole_experts=True) == uneven(expert=8)
    few = replace(run_of(layout=TrainLayout(expert=2)).system, expert_spread=9.0)
    assert expert_imbalance(run_of(layout=TrainLayout(expert=2), system=few), 8) == 2
    # Whole experts have wide products, and the same memory as parts of all.
    parts, whole = (run_of(shape=shape, layout=TrainLayout(tensor=4, whole_experts=own)) for own in (False, True))
    evenly = replace(whole, system=replace(whole.system, expert_spread=0.0))
    assert update_seconds(evenly).causes["products"] < update_seconds(parts).causes["products"]
    assert held_bytes(whole) == held_bytes(parts)


def test_stages_with_more_layers_than_others_are_a_cause_of_their_own() -> None:
    shape = named_shape("Llama-3-405B")  # whose head is smaller than a layer
    uneven = run_of(shape=replace(shape, layers=shape.layers[:9]), layout=TrainLayout(pipeline=8))
    assert update_seconds(uneven).causes["uneven stages"] > 0 and "head" not in update_seconds(uneven).causes
    even = update_seconds(run_of(shape=replace(shape, layers=shape.layers[:8]), layout=TrainLayout(pipeline=8))).causes
    assert even["head"] > 0 and "uneven stages" not in even


# fulltilt on one H200, measured (docs/bench.md, docs/performance.md): tokens/s of 128 x 8 samples of 401 tokens, and MFU of an update.
OWN = {"0.5B": (137_000, 0.46), "1.5B": (70_000, 0.56), "7B": (25_700, 0.62)}


@pytest.mark.parametrize("name", OWN)
def test_own_runs_on_one_device_are_predicted(name: str) -> None:
    run = run_of(
        shape=Shape.named(name), cluster=Cluster.parse("1xH200"), lengths=Lengths(512, 2048, 100, 401), layout=TrainLayout(),
        engine=EngineDescription(memory_share=0.8, own_copy=False), batch=BatchDescription(128, 8, 128, token_budget=16384),
        fused_head=True, fused_rope=True, system=FULLTILT,
    )  # fmt: skip
    speed, mfu = OWN[name]
    own_speed = run.batch.rows * 401 / seconds_of(run).generation.total
    own_mfu = tables.ideal_seconds(run) / sum(pass_seconds(run, update_passes(run)).values())
    print(f"fulltilt on one H200, {name}: predicted {own_speed / 1000:.0f}k tokens/s and an MFU of {own_mfu:.2f}")
    assert own_speed == pytest.approx(speed, rel=0.2) and own_mfu == pytest.approx(mfu, rel=0.1)


@pytest.mark.parametrize("mean", [10, 600, 2000, 4000, 4096])
def test_lengths_have_their_mean_and_their_limit(mean: float) -> None:
    lengths = Lengths(1024, 4096, 100, mean)
    assert sum(lengths.responses) / len(lengths.responses) == pytest.approx(mean, rel=0.01)
    assert lengths.responses[-1] <= lengths.longest_of(8192) <= 4096
    assert lengths.imbalance(1, 10) == 1 <= lengths.imbalance(2, 64) <= lengths.imbalance(16, 8)


def test_remedies_make_a_run_fit() -> None:
    crowded = report_of(run_of(layout=TrainLayout(), reference=True))
    assert not crowded.fits and crowded.remedies()
    assert report_of(run_of(layout=TrainLayout(tensor=4), reference=True, offload_optimizer=True)).fits


# ---- descriptions, shapes, hardware ------------------------------------------------------------------------------------------------------


def test_a_description_is_read_and_mistakes_are_refused() -> None:
    given = {
        "model": {"shape": "Qwen2.5-7B", "reference": True},
        "hardware": {"gpus": "8xH100-80GB", "memory_gb": 60},
        "train": {"layout": "tp4pp2", "offload": True, "recompute": "full", "token_budget": 20480},
        "rollout": {"tensor": 2, "memory_share": 0.5, "graphs": False},
        "batch": {"prompts": 512, "samples": 16, "minibatch_prompts": 32},
        "lengths": {"most_prompt": 2048, "most_response": 8192, "response": 900},
    }
    run = describe(given)
    assert run.layout.pipeline == 2 and run.offload_optimizer and run.batch.token_budget == 20480 and run.gpu.memory == 60 * 10**9
    for section, key, value, words in (
        ("train", "layout", "xp4", "xp is unknown"),
        ("train", "recomputed", 1, "unknown key recomputed"),
        ("rollout", "parts", 1, "unknown key parts"),
        ("hardware", "gpus", "8xH900", r"H900 is not in the hardware table, and flops, hbm, host_link, gpu_link and network are missing"),
        ("model", "shape", "nothing-7Q", "neither a folder"),
        ("train", "layout", "tp3", "8 GPUs cannot be divided"),
    ):
        wrong = {**given, section: {**given[section], key: value}}  # type: ignore[dict-item]
        with pytest.raises(UserError, match=words):
            describe(wrong)


DESCRIPTIONS = SOURCE.parent / "docs" / "planning"
VERL_RUN = tomllib.loads((DESCRIPTIONS / "verl-dapo-7b.toml").read_text(encoding="utf-8"))
COUNT = "Give a whole number from 1 to 10000000"
SHARE = "Give a number from 0.01 to 1"
MEAN = "Give a number from 1 to 10000000"
EXPERTS = {"model.shape": "Qwen3-30B-A3B"}
FSDP = {"train.backend": "fsdp"}


def changed(values: Mapping[str, object]) -> dict[str, Any]:
    """The shipped description with other values, by section.key."""
    given = copy.deepcopy(VERL_RUN)
    for place, value in values.items():
        section, _, key = place.partition(".")
        given.setdefault(section, {})[key] = value
    return given


def mistakes_of(given: Mapping[str, Any]) -> list[str]:
    with pytest.raises(UserError) as refused:
        describe(given, "other.toml")
    return str(refused.value).splitlines()


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        *((place, value, COUNT) for place in ("rollout.tensor", "batch.prompts", "lengths.most_response") for value in (0, -1, True, 2.0)),
        *((place, 0, COUNT) for place in ("batch.samples", "batch.minibatch_prompts", "train.token_budget", "rollout.max_seqs")),
        *(("train.token_budget", value, COUNT) for value in (-5, "20k", [], 10**9)),
        *(("lengths.response", value, MEAN) for value in (-1, 0, math.nan, math.inf, True, "long")),
        *(("rollout.memory_share", value, SHARE) for value in (0, -0.5, 1.01, math.nan, "half", True)),
        *((f"train.{key}", value, "Give true or false") for key in ("offload", "offload_params") for value in ("yes", 3, 0)),
        *((f"model.{key}", "yes", "Give true or false") for key in ("entropy", "critic", "reward_model", "reference")),
        ("train.backend", "deepspeed", 'Give "megatron" or "fsdp"'),
        ("train.system", "other", 'Give "verl" or "fulltilt"'),
        ("train.recompute", "half", 'Give "none", "selective" or "full"'),
        ("train.recompute", True, 'Give "none", "selective" or "full"'),
        ("train.layout", 4, "Give text in quotes"),
        ("model.shape", 7, "Give text in quotes"),
    ],
)
def test_values_of_a_description_that_are_not_possible_are_refused(place: str, value: object, words: str) -> None:
    (told,) = mistakes_of(changed({place: value}))
    assert told == f"other.toml: {place}: {shown(value)} is not a possible value. {words}"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"batch.minibatch_prompts": 100_000}, "batch.minibatch_prompts: 100000 is more than batch.prompts = 512. Give at most 512"),
        ({"batch.prompts": 16}, "batch.minibatch_prompts: 32 is more than batch.prompts = 16. Give at most 16"),
        ({"lengths.response": 99_999}, "lengths.response: 99999 is more than lengths.most_response = 8192. Give at most 8192"),
        ({"lengths.most_prompt": 50}, "lengths.prompt: 128.0, its default, is more than lengths.most_prompt = 50. Give at most 50"),
        ({"train.entropy": False}, "train.entropy: model.entropy is given too. Give one of them"),
        ({"batch.token_budget": 9}, "batch.token_budget: train.token_budget is given too. Give one of them"),
        ({"model.shape": "x" * 9000}, "model.shape: cannot be looked up: File name too long. Give another name or path"),
        (
            {"train.micro_batch": 4},
            "train.micro_batch: train.token_budget is given too, which sizes micro-batches by tokens. Give one of them",
        ),
        (
            {"batch.forward_micro_batch": 4},
            "batch.forward_micro_batch: train.forward_token_budget is given too, which sizes micro-batches by tokens. Give one of them",
        ),
        ({"lengths.mean": 5}, "lengths: unknown key mean. Known are most_prompt, most_response, prompt, response"),
    ],
)
def test_values_of_a_description_that_contradict_others_are_refused(values: dict[str, object], words: str) -> None:
    assert mistakes_of(changed(values)) == [f"other.toml: {words}"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        *(({"train.layout": f"fsdp{size}", **FSDP}, f"8 GPUs cannot be divided evenly among {size} (fsdp{size})") for size in (3, 64)),
        *(({"train.layout": own}, f'{own} needs train.backend = "fsdp", which is "megatron"') for own in ("fsdp8", "fsdp1", "fsdp")),
        ({"train.layout": "tp2dp3"}, "dp3 contradicts the rest: 8 GPUs in groups of 2 make dp4. Change it, or leave it out"),
        ({"train.layout": "tp2edp77"}, "edp77 contradicts the rest: 8 GPUs in groups of 2 make edp4"),
        ({"train.layout": "tp2ep4edp4", **EXPERTS}, "edp4 contradicts the rest: 8 GPUs in groups of 4 make edp2"),
        ({"train.layout": "dp4fsdp4", **FSDP}, "dp4 contradicts the rest: 8 GPUs in groups of 1 make dp8"),
        ({"train.layout": "ep8"}, "ep8 divides experts, and this model has none"),
        ({"train.layout": "etp2"}, "etp2 divides experts, and this model has none"),
        ({"train.layout": "ep64", **EXPERTS}, "8 GPUs cannot be divided evenly among 64 (ep64)"),
        ({"train.layout": "ep8etp2", **EXPERTS}, "8 GPUs cannot be divided evenly among 16 (ep8etp2)"),
        ({"train.layout": "pp2ep8", **EXPERTS}, "8 GPUs cannot be divided evenly among 16 (pp2ep8)"),
        ({"train.layout": "ep7", "hardware.gpus": "7xH100", **EXPERTS}, "128 experts cannot be divided evenly among 7 (ep7)"),
        ({"train.layout": "pp3"}, "8 GPUs cannot be divided into groups of 3"),
        ({"train.layout": "tp8"}, "28 attention heads cannot be divided evenly among 8 (tp8). Give a size that divides 28"),
        ({"train.layout": "tp2sp4", **FSDP}, "28 attention heads cannot be divided evenly among 8 (tp2sp4)"),
        ({"train.layout": "pp32", "hardware.gpus": "32xH100"}, "more pipeline stages than the model's 28 layers"),
        ({"train.layout": "vpp2"}, "vpp2 divides pipeline stages, and there is only one"),
        ({"train.layout": "tp-4"}, '"tp-4": 4 follows no word, and tp has no size'),
        ({"train.layout": "tp0"}, '"tp0": a size is 0'),
        ({"train.layout": "tp2tp4"}, '"tp2tp4": a size is given twice'),
        ({"train.layout": "vpp2vp2"}, '"vpp2vp2": a size is given twice'),
        ({"train.layout": "everywhere"}, "everywhere has no size"),
        ({"train.layout": "tp4.5"}, '"tp4.5": .5 follows no word'),
        ({"train.layout": f"tp1{5000 * '0'}"}, "follows no word"),
    ],
)
def test_layouts_that_no_run_can_have_are_refused(values: dict[str, object], words: str) -> None:
    told = mistakes_of(changed(values))
    assert len(told) == 1 and told[0].startswith("other.toml: train.layout: ") and words in told[0]


def test_an_engine_divides_gpus_and_heads_evenly() -> None:
    beginning = "other.toml: rollout.tensor: "
    assert mistakes_of(changed({"rollout.tensor": 8})) == [
        f"{beginning}28 attention heads cannot be divided evenly among 8 (tensor = 8). Give a size that divides 28"
    ]
    assert mistakes_of(changed({"rollout.tensor": 14}))[0].startswith(f"{beginning}8 GPUs cannot be divided evenly among 14 (tensor = 14)")


def typed(words: str, values: Mapping[str, object]) -> dict[str, object]:
    """The values of a description with the changes of a remedy."""
    sizes = {"tp": r"(?<!rollout )tensor parallelism of (\d+)", "pp": r"(\d+) pipeline stages"}
    layout = "".join(f"{word}{match[1]}" for word, pattern in sizes.items() if (match := re.search(pattern, words)))
    found: dict[str, object] = {**values, "train.layout": f"{values.get('train.layout', 'tp4')}{layout}"}
    if match := re.search(r"rollout tensor parallelism of (\d+)", words):
        found["rollout.tensor"] = int(match[1])
    if match := re.search(r"(\d+) GPUs", words):
        found["hardware.gpus"] = f"{match[1]}xH100"
    return found | ({"train.recompute": "full"} if "full recompute" in words else {})


@pytest.mark.parametrize(
    "values",
    [
        {"train.layout": "ep8", "lengths.most_response": 2048, "lengths.response": 1024, **EXPERTS},
        {"train.recompute": "full", "hardware.gpus": "12xH100", "model.shape": "Qwen2.5-14B", "rollout.memory_share": 0.08},
    ],
    ids=["experts", "12 GPUs"],
)
def test_ways_to_fit_can_be_typed(values: dict[str, object]) -> None:
    found = report_of(describe(changed(values))).remedies()
    assert found
    for way in found:
        assert report_of(describe(changed(typed(way.words, values)))).fits, way.words


@pytest.mark.parametrize(
    ("values", "layout"),
    [
        ({"train.layout": ""}, TrainLayout()),
        ({"train.layout": "all dp"}, TrainLayout()),
        ({"train.layout": "TP2 PP2, vpp=2"}, TrainLayout(tensor=2, pipeline=2, virtual=2)),
        ({"train.layout": "tp2-pp_2"}, TrainLayout(tensor=2, pipeline=2)),
        ({"train.layout": "fsdp", **FSDP}, TrainLayout()),
        ({"train.layout": "tp2dp4"}, TrainLayout(tensor=2)),
        ({"train.layout": "tp2dp04"}, TrainLayout(tensor=2)),
        ({"train.layout": "tp2ep4dp4edp2", **EXPERTS}, TrainLayout(tensor=2, expert=4)),
        ({"train.layout": "dp2fsdp4", **FSDP}, TrainLayout(shard=4)),  # two copies of shards on four GPUs each
        ({"train.layout": "sp4dp2fsdp8", **FSDP}, TrainLayout(sequence=4, shard=8)),
        ({"train.layout": "ulysses4fsdp2", **FSDP}, TrainLayout(sequence=4, shard=2)),
        ({"train.layout": "tp2ep4etp2", **EXPERTS}, TrainLayout(tensor=2, expert=4, expert_tensor=2)),
        ({"train.layout": "tp4pp2vpp2cp2ep8", "hardware.gpus": "16xH100", **EXPERTS}, TrainLayout(4, 2, 2, 2, expert=8)),
    ],
)
def test_layouts_of_descriptions_are_read_however_they_are_written(values: dict[str, object], layout: TrainLayout) -> None:
    assert describe(changed(values)).layout == layout


@pytest.mark.parametrize(("layout", "backend"), [("fsdp", "fsdp"), ("sp4fsdp8", "fsdp"), ("hsdp4", "fsdp"), ("tp4", "megatron")])
def test_a_layout_says_which_backend_it_is_of(layout: str, backend: str) -> None:
    given = changed({"train.layout": layout})
    del given["train"]["backend"]
    assert describe(given).backend == backend


def test_all_mistakes_of_a_description_are_reported_at_once() -> None:
    wrong = {
        "train.layout": "tp3",
        "train.offload": "yes",
        "train.layuot": 1,
        "batch.prompts": 0,
        "lengths.response": -1,
        "hardware.hbm": 0,
    }
    told = mistakes_of(changed({**wrong, "rollout.tensor": 3, "model.shape": "nothing-7Q"}) | {"rolout": {}, "lengths": 5})
    assert all(line.startswith("other.toml: ") for line in told)
    found = [line.removeprefix("other.toml: ").partition(": ")[0] for line in told]
    # Nothing is said of the layout: the model and the GPUs that it would divide are not known.
    assert sorted(found) == ["batch.prompts", "hardware", "lengths", "model.shape", "rolout", "train", "train.offload"]
    told = mistakes_of(changed({**wrong, "hardware.hbm": 1e12}))
    assert any("8 GPUs cannot be divided into groups of 3" in line for line in told) and any("unknown key layuot" in line for line in told)
    assert mistakes_of({"train": 3})[0] == "other.toml: train: 3 is not a section. Write [train], with keys of its own"


def test_each_key_of_a_description_has_a_type_that_can_be_checked() -> None:
    for section, types in TYPES.items():
        assert all(remedy(object(), kind, RANGES.get(f"{section}.{key}", (1, 2))) for key, kind in types.items())
    assert RANGES.keys() <= {f"{section}.{key}" for section, types in TYPES.items() for key in types}


def test_shipped_descriptions_are_read() -> None:
    paths = [path for path in sorted(DESCRIPTIONS.glob("*.toml")) if "model" in tomllib.loads(path.read_text(encoding="utf-8"))]
    assert paths and all(read(path).name == str(path) for path in paths)
    run = describe(VERL_RUN)
    assert (run.layout, run.batch.forward_token_budget, run.offload_grads, run.entropy) == (TrainLayout(tensor=4), 61440, True, True)


def test_layouts_are_checked_for_the_model_and_gpus_of_the_command_line() -> None:
    path = DESCRIPTIONS / "verl-dapo-7b.toml"
    with pytest.raises(UserError, match=r"train.layout: 14 attention heads cannot be divided evenly among 4 \(tp4\)"):
        command.described(path, None, "Qwen2.5-0.5B", None)
    assert command.described(path, "16xH100", "Qwen2.5-14B", None).run.cluster.gpus == 16


@pytest.mark.parametrize(
    ("values", "options"),
    [
        ({"model.shape": "my-own-model", "hardware.gpus": "8xB999"}, {"instead": "Qwen2.5-7B", "hardware": "8xH100"}),
        ({"model.shape": 7, "hardware.hbm": -1}, {"instead": "Qwen2.5-7B", "hardware": "8xH100"}),
        ({"hardware.gpus": "8xB999"}, {"hardware": "H100"}),
        ({"hardware.gpus": 3}, {"hardware": "8xH100"}),
        ({"lengths.most_response": 200, "lengths.response": 900}, {"response": 100.0}),
        ({"lengths.response": "long"}, {"response": 100.0}),
    ],
)
def test_what_the_command_line_replaces_is_not_read(values: dict[str, object], options: dict[str, Any]) -> None:
    run = describe(changed(values), "other.toml", **options)
    assert (name_of(run.shape), run.cluster.gpus, run.gpu.name) == ("Qwen2.5-7B", 8, "H100")
    assert run.lengths.response == options.get("response", 1241)


def test_a_file_need_not_have_what_the_command_line_has(tmp_path: Path) -> None:
    path = tmp_path / "other.toml"
    path.write_text("[lengths]\nmost_response = 512\n")
    run = read(path, "2xH200", "Qwen2.5-0.5B", 200)
    assert (run.cluster.gpus, run.shape, run.lengths.response) == (2, named_shape("Qwen2.5-0.5B"), 200)
    assert read(path, None, "Qwen2.5-0.5B", 200).cluster == Cluster.parse("1xH100")
    path.write_text('[model]\nshape = "Qwen2.5-7B"\ncritic = true\n')
    assert read(path, response=200.0) == read(path).with_response(200.0)


def test_mistakes_of_the_command_line_are_told_with_those_of_the_file() -> None:
    def refused(values: Mapping[str, object], **options: Any) -> list[str]:
        with pytest.raises(UserError) as told:
            describe(changed(values), "other.toml", **options)
        return str(told.value).splitlines()

    first, second, third, fourth = refused({"train.layuot": 1}, hardware="8xB999", instead="nothing-7Q", response=9000.0)
    assert first.startswith("other.toml: train: unknown key layuot") and third.startswith("--shape: 'nothing-7Q' is neither a folder")
    assert second == "--response-tokens: 9000.0 is more than lengths.most_response = 8192. Give at most 8192"
    assert fourth.startswith("--hardware: hardware '8xB999': unknown")
    (missing,) = refused({}, hardware="none.toml")
    assert missing.startswith("--hardware: none.toml: cannot be read: No such file")
    for gpus in (8, "0xH100"):  # their number is needed
        (wrong,) = refused({"hardware.gpus": gpus}, hardware="H100")
        assert wrong.startswith("other.toml: hardware: ")


# Billions of parameters, as the models' own pages have them.
SIZES = {
    "Qwen2.5-3B": 3.09, "Qwen2.5-14B": 14.77, "Qwen2.5-32B": 32.76, "Qwen2.5-72B": 72.71, "Qwen3-0.6B": 0.596, "Qwen3-1.7B": 1.72,
    "Qwen3-4B": 4.02, "Qwen3-8B": 8.19, "Qwen3-14B": 14.77, "Qwen3-32B": 32.76, "Qwen3-30B-A3B": 30.53, "Qwen3-235B-A22B": 235.09,
    "Llama-3-8B": 8.03, "Llama-3-70B": 70.55, "Llama-3-405B": 405.85, "Mixtral-8x7B": 46.7, "DeepSeek-V3": 671.0,
    "DeepSeek-R1-Distill-Qwen-1.5B": 1.777,
}  # fmt: skip


def test_named_shapes_have_the_published_number_of_parameters() -> None:
    for name, billions in SIZES.items():
        assert parameters(named_shape(name)).total / 1e9 == pytest.approx(billions, rel=0.005), name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("qwen2.5 7b math", "Qwen2.5-7B"), ("Qwen/Qwen2.5-Math-7B-Instruct", "Qwen2.5-7B"), ("grpo_qwen2.5_7b", "Qwen2.5-7B"),
        ("qwen3-30b", "Qwen3-30B-A3B"), ("meta-llama/Meta-Llama-3.1-70B-Instruct", "Llama-3-70B"), ("dpsk-v3 671b", "DeepSeek-V3"),
        ("Qwen2.5 72B", "Qwen2.5-72B"), ("Qwen3-8B-Base", "Qwen3-8B"), ("an unknown 9b", None),
        # A distilled model has the sizes of its student, wherever the teacher stands.
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "Qwen2.5-7B"), ("DeepSeek-R1-Distill-Qwen-14B", "Qwen2.5-14B"),
        ("DeepSeek-R1-Distill-Qwen-32B", "Qwen2.5-32B"), ("DeepSeek-R1-Distill-Llama-70B", "Llama-3-70B"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "Llama-3-8B"), ("some/DeepSeek-R1-Distill-Llama-8B-bnb-4bit", "Llama-3-8B"),
        ("DeepSeek-R1-Distill-Qwen-1.5B", "DeepSeek-R1-Distill-Qwen-1.5B"), ("grpo_dpsk_r1_distilled_qwen_7b", "Qwen2.5-7B"),
        ("Qwen3-8B-distilled-from-DeepSeek-R1", "Qwen3-8B"), ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", "Qwen3-8B"),
        ("DeepSeek-R1-Distill-Another-9B", None), ("DeepSeek-R1-Distill", None), ("deepseek-r1-7b", None),
        ("deepseek-ai/DeepSeek-R1", "DeepSeek-V3"), ("DeepSeek-R1-Zero", "DeepSeek-V3"), ("dsv3", "DeepSeek-V3"),
        # Names of tables.
        ("moonlight", "Moonlight-16B-A3B"), ("dapo_moonlight", "Moonlight-16B-A3B"), ("Moonlight-16B", "Moonlight-16B-A3B"),
        ("dpsk671b", "DeepSeek-V3"), ("dapo_dpsk671b", "DeepSeek-V3"), ("dapo_dpsk_v3", "DeepSeek-V3"),
        ("qwen3moe_30b", "Qwen3-30B-A3B"), ("dapo_qwen3moe_30b", "Qwen3-30B-A3B"), ("grpo_qwen3_moe_235b", "Qwen3-235B-A22B"),
        ("Qwen2-57B", "Qwen2-57B-A14B"), ("qwen2_5_7b", "Qwen2.5-7B"),
    ],
)  # fmt: skip
def test_names_are_found_however_they_are_written(text: str, name: str | None) -> None:
    assert find_shape(text) is (PUBLISHED[name] if name else None)


def test_an_unknown_name_is_refused_with_each_known_one_once() -> None:
    with pytest.raises(UserError, match="neither a folder") as refused:
        named_shape("nothing-7Q")
    names = str(refused.value).partition("Named shapes: ")[2].split(", ")
    assert len(names) == len(set(names)) and {*PUBLISHED, *SHAPES} == set(names)


def test_a_shape_is_known_by_its_name_however_it_was_given() -> None:
    assert all(name_of(named_shape(name)) in (name, f"Qwen2.5-{name}", "Llama-3-70B", "SmolLM2-135M") for name in [*PUBLISHED, *SHAPES])
    folder = PUBLISHED["Qwen2.5-7B"] | {"max_position_embeddings": 4096}
    assert name_of(Shape.from_config(folder)) == "Qwen2.5-7B"  # as Qwen2.5-Math-7B has it
    assert name_of(Shape.from_config(folder | {"num_hidden_layers": 27})) is None


def test_hardware_is_found_by_name_and_memory() -> None:
    assert Cluster.parse("16 x H100-80GB").gpus == 16 and accelerator("NVIDIA H100 80GB HBM3").name == "H100"
    assert accelerator("H100-20GB").memory * 4 == accelerator("H100").memory and accelerator("RTX 4090").nominal == 24
    assert accelerator("A100-40GB").hbm == 1.555e12 and accelerator("h20-96g") is accelerator("H20")
    machine = Cluster.parse("32xH100")
    assert machine.ring(8) == machine.gpu.gpu_link > machine.ring(16, apart=2) > machine.link(16) == machine.gpu.network
    assert {"H200", "H100", "A100", "H20", "A6000", "4090", "CPU"} <= {own.name for own in ACCELERATORS}


B200 = {"gpus": "8xB200", "memory_gb": 180, "flops": 2.25e15, "hbm": 7.7e12, "host_link": 55e9, "gpu_link": 900e9, "network": 50e9}


def test_hardware_that_the_table_lacks_has_all_figures() -> None:
    found = Cluster.of_figures(B200)
    assert (found.gpus, found.per_machine, found.gpu.name, found.gpu.memory) == (8, 8, "B200", 180 * 10**9)
    assert found.gpu == Accelerator("B200", 180 * 10**9, 180, 2.25e15, 7.7e12, 55e9, 900e9, 50e9, 0.7) and found.gpu.device == "cuda"
    assert Cluster.of_figures({**B200, "gpus": "B200", "per_machine": 4}, 16) == Cluster(found.gpu, 16, 4)
    suffix = {key: value for key, value in B200.items() if key != "memory_gb"} | {"gpus": "B200-180GB"}
    assert Cluster.of_figures(suffix).gpu == found.gpu
    known = Cluster.of_figures({"gpus": "2xH100", "hbm": 4e12})
    assert known.gpu == replace(accelerator("H100"), hbm=4e12)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"hbm": None, "network": None},
            r"B200 is not in the hardware table, and hbm and network are missing. Give hbm \(bytes per second of",
        ),
        ({"memory_gb": None}, r"memory_gb is missing. Give memory_gb \(memory in units of 1e9 bytes\), or a name of the table"),
        ({"flops": "fast"}, r"flops = 'fast' is not a possible value. Give a number from 1000 to 1e\+21 \(dense bfloat16 FLOP/s\)"),
        ({"hbm": 0}, "hbm = 0 is not a possible value"),
        ({"per_machine": True}, "per_machine = True is not a possible value"),
        ({"per_machine": 0.5}, "per_machine = 0.5 is not a possible value. Give a whole number of at least 1"),
        ({"matmul_share": 2}, "matmul_share = 2 is not a possible value. Give a number from 0.01 to 1"),
        ({"memory_gb": 1e-12}, "memory_gb = 1e-12 is not a possible value. Give a number from 0.1 to 100000"),
        ({"memory_gb": 1e305}, r"memory_gb = 1e\+305 is not a possible value"),
        ({"memory_gb": None, "gpus": f"8xB200-{10**9}GB"}, "has 1000000000 GB of memory. Write at most 100000"),
        ({"flops": 10**400}, r"flops = 10{39}\.\.\. is not a possible value"),
        ({"flops": 1e-300}, "flops = 1e-300 is not a possible value"),
        ({"flops": float("nan")}, "flops = nan is not a possible value"),
        ({"gpus": 8}, 'gpus = 8 is not a name of GPUs. Write a number and a name, for example gpus = "8xB200"'),
        ({"gpus": "8"}, "gpus = '8' has no name of a GPU, which starts with a letter"),
        ({"gpus": 8, "hbm": -1, "host_link": None}, r"(?s)hbm = -1 is not.*gpus = 8 is not"),
        ({"per_machine": 0, "network": None}, r"(?s)per_machine = 0 is not.*network is missing"),
        ({"gpus": "0xB200"}, "0 is not a possible number of GPUs"),
        ({"tflops": 2250}, "unknown key tflops. Known are flops"),
        (dict.fromkeys(set(B200) - {"gpus"}), r"hardware '8xB200': unknown. Known are .*Figures of others can be given in a file"),
    ],
)
def test_figures_of_hardware_that_cannot_be_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Cluster.of_figures({key: value for key, value in {**B200, **change}.items() if value is not None})


def test_hardware_is_read_from_a_file(tmp_path: Path) -> None:
    path, text = tmp_path / "own.TOML", "\n".join(f"{key} = {json.dumps(value)}" for key, value in B200.items())
    path.write_text(f"[hardware]\n{text}\n")
    assert Cluster.parse(str(path)) == Cluster.of_figures(B200)
    code, out = plan("--describe", Path(__file__).parents[1] / "docs" / "planning" / "verl-dapo-7b.toml", "--hardware", path)
    assert code == 0 and out.startswith("8 x B200 with 167.6 GiB")
    for wrong, words in (
        ("[hardware]\n" + text.replace("hbm", "#"), r"own.TOML: hardware: B200 is not in the hardware table, and hbm is missing"),
        (f"[hardware]\n{text}\n[model]\nshape = 'Qwen2.5-7B'\n", r"must have one section, \[hardware\], with gpus"),
        ("[model]\n", "must have one section"),
        ("[hardware", "cannot be read"),
    ):
        path.write_text(wrong)
        with pytest.raises(UserError, match=words):
            Cluster.parse(str(path))
    with pytest.raises(UserError, match=r"missing\.toml: cannot be read: No such file"):
        Cluster.parse("missing.toml")
