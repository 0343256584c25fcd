"""Plans of fulltilt's own runs without a GPU: other roles, SFT, what each knob's runner-up takes, ways to fit, and docs/planning.md."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fulltilt.cli import app
from fulltilt.config import parse
from fulltilt.parallel.layout import Sharding
from fulltilt.plan import Division, Facts, RoleFacts, divided
from fulltilt.records import UserError
from fulltilt.shape import Shape
from fulltilt.tune import command, tables
from fulltilt.tune.memory_model import parameters
from fulltilt.tune.report import PlanReport
from fulltilt.tune.runners_up import TOLD
from fulltilt.tune.shapes import named_shape

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "planning.md"
RUN = '[model]\npath = "Qwen/Qwen2.5-7B"\n[data]\ntrain = "nowhere.jsonl"\n[reward]\nfunction = "math"\n[run]\nsteps = 15\n'
ROLES = ("algorithm.name=ppo", "algorithm.kl_coef=0.01", "reward.function=reward_model", "reward_model.path=Qwen/Qwen2.5-1.5B")


def planned(folder: Path, *overrides: str, hardware: str = "8xH100", shape: str | None = None, text: str = RUN) -> PlanReport:
    (folder / "run.toml").write_text(text)
    return command.planned(folder / "run.toml", overrides, hardware, shape, None)


def plan(*arguments: object) -> tuple[int, str]:
    ended = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    return ended.exit_code, ended.stdout


# ---- other roles -------------------------------------------------------------------------------------------------------------------------


def test_a_critic_takes_memory_and_time_beside_the_actor(tmp_path: Path) -> None:
    found = planned(tmp_path, *ROLES, hardware="8xH200", shape="Qwen2.5-1.5B")
    assert found.fits and found.knobs["train.shard"] == "optimizer"
    shape = Shape.named("1.5B")
    numbers = parameters(shape).total + shape.width + 1  # the embedding is tied to the head, which it does not have
    kinds = found.memory.phases["update-critic"].kinds
    assert kinds["critic parameters"] == 2 * numbers and kinds["critic gradients"] == 4 * numbers
    assert kinds["critic optimizer"] == 12 * (numbers // 8) and kinds["head"] == 0
    assert kinds["reference"] == kinds["parameters"] == 2 * parameters(shape).total and kinds["reward model"] == 2 * numbers
    assert {"reward", "ref-logprob", "values", "update-critic"} <= found.memory.phases.keys() & found.seconds.phases.keys()
    assert found.seconds.total == pytest.approx(sum(phase.total for phase in found.seconds.phases.values()))
    assert found.seconds.update_critic.total < found.seconds.update.total  # no vocabulary head
    assert found.knobs["critic.token_budget"] == 2 * found.knobs["actor.token_budget"]
    alone = planned(tmp_path, hardware="8xH200", shape="Qwen2.5-1.5B")
    assert alone.memory.phases["update"].total < found.memory.phases["update"].total and alone.seconds.total < found.seconds.total


def test_a_role_on_the_host_takes_memory_while_it_works(tmp_path: Path) -> None:
    here, away = (planned(tmp_path, *ROLES, f"reward_model.offload_params={text}", hardware="8xH200") for text in ("false", "true"))
    assert here.memory.phases["update"].kinds["reward model"] > 0 == away.memory.phases["update"].kinds["reward model"]
    assert away.memory.phases["reward"].kinds["reward model"] > 0
    assert away.seconds.reward.causes["offload"] > 0 == here.seconds.reward.causes.get("offload", 0)


def test_roles_on_gpus_of_their_own_run_beside_the_others(tmp_path: Path) -> None:
    found = planned(tmp_path, *ROLES, "cluster.workers=8", "cluster.roles={critic=2,reward_model=1}")
    assert found.run.cluster.gpus == 5 and found.run.all_gpus == 8
    assert found.memory.phases["update-critic"].kinds.keys().isdisjoint({"parameters", "engine", "reference"})
    assert "critic parameters" not in found.memory.phases["update"].kinds and "reference" in found.memory.phases["update"].kinds
    phases = {name: phase.total for name, phase in found.seconds.phases.items()}
    scored = max(phases["values"], phases.get("old-logprob", 0) + phases["ref-logprob"])
    learned = max(phases["update-critic"], phases["update-actor"])
    others = phases["rollout"] + phases["reward"] + phases["other"] + phases.get("sync", 0)
    assert found.seconds.total == pytest.approx(others + scored + learned)
    together = planned(tmp_path, *ROLES)
    assert found.memory.phases["update"].total != together.memory.phases["update"].total
    with pytest.raises(UserError, match=r"cluster.roles: they take 8 of the run's 8 GPUs"):
        planned(tmp_path, *ROLES, "cluster.workers=8", "cluster.roles={critic=8}")


def test_a_role_whose_size_is_not_known_counts_as_the_actor_and_is_told(tmp_path: Path) -> None:
    found = planned(tmp_path, *ROLES[:3], "reward_model.path=some/where", hardware="8xH200")
    assert any("the size of 'some/where' is not known" in reason for reason in found.reasons)


def test_sft_is_an_update_alone(tmp_path: Path) -> None:
    text = RUN.replace('[reward]\nfunction = "math"\n', "")
    found = planned(tmp_path, "algorithm.name=sft", "data.max_tokens=8192", "algorithm.prompts_per_step=128", text=text)
    assert set(found.memory.phases) == {"update"} and set(found.seconds.phases) == {"update-actor"} and found.fits
    assert found.run.batch.rows == 128 and found.run.lengths.longest_row == 8192 and found.memory.phases["update"].kinds["engine"] == 0
    assert not any(knob.startswith("rollout.") for knob in found.knobs)
    halved = planned(tmp_path, "algorithm.name=sft", "data.max_tokens=8192", "algorithm.prompts_per_step=64", text=text)
    assert halved.seconds.total < found.seconds.total
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(UserError, match=r"responses end at 8192 tokens \(data.max_tokens\)"):
        command.planned(tmp_path / "run.toml", ["algorithm.name=sft", "data.max_tokens=8192"], "8xH100", None, 9000)


# ---- what plan.py decides ----------------------------------------------------------------------------------------------------------------


def test_what_keeps_auto_from_dividing_or_sharing_is_obeyed(tmp_path: Path) -> None:
    free = planned(tmp_path, hardware="8xH100", shape="Qwen2.5-32B")
    kept = planned(tmp_path, "train.compile=true", hardware="8xH100", shape="Qwen2.5-32B")
    assert free.knobs["train.shard"] == "full" and not kept.fits
    assert kept.run.backend == "megatron" and kept.run.layout.tensor == kept.run.engine.tensor == 1
    crowded = planned(tmp_path, "train.shard=optimizer", "train.tensor_parallel=1", shape="Qwen2.5-72B")
    assert not crowded.fits and "loading the actor would take" in crowded.refused


def test_an_engine_beside_divided_experts_has_a_copy(tmp_path: Path) -> None:
    sizes = ("train.expert_parallel=8", "train.shard=optimizer", "rollout.tensor_parallel=1")
    found = planned(tmp_path, *sizes, hardware="8xH200", shape="Qwen3-30B-A3B")
    assert found.run.layout.expert == 8 and found.run.engine.own_copy
    weights = 2 * parameters(named_shape("Qwen3-30B-A3B")).total
    assert found.memory.phases["update"].kinds["engine"] == weights  # it stays in an update


def test_keys_and_values_are_divided_among_workers_that_sample_together() -> None:
    shape = Shape.named("7B")  # 4 key heads
    tables_of = {"model": {"path": "a"}, "data": {"train": "a.jsonl"}, "run": {"steps": 1}}
    config = parse(tables_of, here=False)
    roles = {"actor": RoleFacts.of_shape(shape, config, "cuda", learns=True)}
    whole = Facts("cuda", 80 << 30, 1 << 40, roles, 1024, 1, sharding=Sharding(workers=8))
    each = {size: divided(config, whole, Division(1, 1, size)).token_bytes for size in (1, 2, 4, 7)}
    assert each == {1: shape.kv_bytes_per_token(2), 2: each[1] // 2, 4: each[1] // 4, 7: each[1] // 4}


# ---- runners-up --------------------------------------------------------------------------------------------------------------------------


def test_each_runner_up_is_a_plan_of_its_own(tmp_path: Path) -> None:
    """What it takes is what a plan says in which the knob is set by hand."""
    found = planned(tmp_path)
    by_auto = {"train.shard", "train.tensor_parallel", "rollout.tensor_parallel", "train.recompute", "train.offload_optimizer"}
    by_auto |= {"train.head_recompute", "train.offload_activations", "train.fused_layers", "actor.token_budget", "rollout.kv_bytes"}
    by_auto |= {"rollout.max_seqs", "rollout.release_memory", "rollout.cuda_graphs", "actor.forward_token_budget"}
    assert by_auto <= found.runners_up.keys() <= found.knobs.keys() == found.why.keys()
    for knob in ("train.tensor_parallel", "train.recompute", "rollout.cuda_graphs", "actor.token_budget"):
        own = found.runners_up[knob]
        assert own.value != found.knobs[knob]
        by_hand = planned(tmp_path, f"{knob}={json.dumps(own.value)}")
        assert by_hand.knobs[knob] == own.value and by_hand.why[knob] == "set in the run" and knob not in by_hand.runners_up
        assert own.seconds == pytest.approx(by_hand.seconds.total) if by_hand.fits else own.seconds is None
        assert {name for name in TOLD if by_hand.knobs.get(name) != found.knobs.get(name)} - {knob} == own.others.keys()
    told = json.loads(plan(tmp_path / "run.toml", "--hardware", "8xH100", "--json")[1])
    assert told["runners_up"]["train.recompute"]["step_seconds"] > told["step_seconds"]["step"]
    assert sum(line.startswith("train.recompute = ") for line in told["reasons"]) == 1


def test_what_a_runner_up_lacks_is_told_in_bytes(tmp_path: Path) -> None:
    found = planned(tmp_path, "train.offload_activations=false", hardware="1xH100")
    none = found.runners_up["train.recompute"]
    assert found.knobs["train.recompute"] == "full" and none.seconds is None and none.missing > 1 << 30
    line = next(line for line in found.lines() if line.startswith("train.recompute"))
    assert re.search(r"it beats \"selective\", which needs [\d.]+ GiB more than there is", line)


def test_ways_to_fit_do_fit(tmp_path: Path) -> None:
    found = planned(tmp_path, "train.recompute=none", "train.offload_activations=false", hardware="1xH100")
    assert not found.fits and found.remedies()
    for remedy in found.remedies():
        key, _, value = remedy.words.partition(" = ")
        overrides = {"train.recompute": "none", "train.offload_activations": "false"} | {key: value}
        by_hand = planned(tmp_path, *(f"{name}={own}" for name, own in overrides.items()), hardware="1xH100")
        assert by_hand.fits and by_hand.seconds.total == pytest.approx(remedy.seconds)
    seconds = [remedy.seconds for remedy in found.remedies()]
    assert seconds == sorted(seconds)
    crowded = planned(tmp_path, hardware="1xA100-40GB", shape="Qwen2.5-72B")
    assert [remedy.words for remedy in crowded.remedies()] == ["32 GPUs", "64 GPUs"]


def test_sizes_that_cannot_be_are_refused_with_the_legal_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train.tensor_parallel: 3 does not divide the 8 GPUs"):
        planned(tmp_path, "cluster.workers=8", "train.tensor_parallel=3")
    with pytest.raises(UserError, match=r"Legal sizes for this model"):
        planned(tmp_path, "cluster.workers=8", "rollout.tensor_parallel=8")


# ---- tables ------------------------------------------------------------------------------------------------------------------------------


def test_tables_with_other_columns_are_read(tmp_path: Path) -> None:
    path = tmp_path / "dapo_qwen3_30b.csv"
    path.write_text(
        "GPU,Nodes,gpus,TP,PP,CP,EP,Rollout TP,Update Actor (s)\n"
        "H100 SXM5 80GB,2,,2,1,1,8,2,220\n"
        "16xA800,,,2,1,2,8,2,\n"
        "A100-SXM4-80GB,,2x8,4,2,1,4,4,\n"
        "H20,4,,2,,,8,16,1\n"
    )
    found = tables.read_table(path)
    assert [row.run.cluster.gpus for row in found.rows] == [16, 16, 16, 32] and not found.skipped
    assert {row.run.gpu.name for row in found.rows} == {"H100", "A800", "A100", "H20"}
    assert found.rows[1].run.layout.context == 2 and found.rows[2].run.layout.pipeline == 2 and found.rows[0].run.layout.expert == 8
    assert found.rows[0].measured == {"update_actor": 220.0} and found.rows[0].run.batch.token_budget == 20480
    own = tables.predict(found)
    assert all(0 < each.times["generation"] < 3600 and each.times["update_actor"] < 3600 for each in own)


def test_a_length_that_explains_nothing_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "dapo.csv"
    path.write_text("model,gpu,num_gpus,train_parallel,update_actor\nQwen3-8B,H100,8,tp4,0.5\n")
    assert tables.read_table(path).rows[0].run.lengths.response == pytest.approx(1024)


# ---- the page ----------------------------------------------------------------------------------------------------------------------------

BLOCKS = re.findall(r"```\n(\$ fulltilt plan .*?)\n```", PAGE.read_text(), re.DOTALL)


def unwrapped(text: str) -> list[str]:
    """The lines of a block, each in one: what follows is indented."""
    return re.sub(r"\n    (?=\S)", " ", text).splitlines()


@pytest.mark.parametrize("block", BLOCKS, ids=[f"command{place}" for place in range(len(BLOCKS))])
def test_the_page_shows_what_the_command_prints(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    first, *shown = unwrapped(block)
    printed = plan(*first.removeprefix("$ fulltilt plan ").split())[1].splitlines()
    if shown[0] == "...":
        shown, printed = shown[1:], printed[-len(shown) + 1 :]
    assert shown == [re.sub(r" +", " ", line) for line in printed]


def test_the_page_shows_the_published_tables_as_they_are_printed() -> None:
    folder = ROOT / "tests" / "data" / "published"
    read = [tables.read_table(folder / name) for name in ("dapo7b.csv", "grpo_qwen2.5_7b.csv")]
    predictions = [own for table in read for own in tables.predict(table)]
    assert "\n".join(tables.lines(read, predictions)) in PAGE.read_text() and len(BLOCKS) >= 5
