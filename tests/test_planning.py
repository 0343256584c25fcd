"""Plans of fulltilt's own runs without a GPU: other roles, SFT, what each knob's runner-up takes, ways to fit, and docs/planning.md."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fulltilt.algo.build import build
from fulltilt.cli import app, main
from fulltilt.cluster import checks
from fulltilt.config import load, parse
from fulltilt.hardware import Cluster
from fulltilt.observe.metrics import TIMING_NAMES
from fulltilt.parallel.layout import Sharding
from fulltilt.plan.decisions import OFFLOADS
from fulltilt.plan.division import Division, divided
from fulltilt.plan.facts import Facts, RoleFacts
from fulltilt.plan.legal import unused_by
from fulltilt.plan.make import plan_of
from fulltilt.records import UserError
from fulltilt.schema import with_settings
from fulltilt.shape import Shape
from fulltilt.tune import command, report, tables
from fulltilt.tune.changes import ChangeableRun
from fulltilt.tune.memory_model import memory_of, parameters
from fulltilt.tune.own import own_plan
from fulltilt.tune.report import PlanReport
from fulltilt.tune.runners_up import TOLD, PlannedRun, alternatives, single_changes
from fulltilt.tune.shapes import named_shape
from fulltilt.tune.time_model import seconds_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "planning.md"
RUN = '[model]\npath = "Qwen/Qwen2.5-7B"\n[data]\ntrain = "nowhere.jsonl"\n[reward]\nfunction = "math"\n[run]\nsteps = 15\n'
TABLES = {"model": {"path": "Qwen/Qwen2.5-7B"}, "data": {"train": "nowhere.jsonl"}, "run": {"steps": 15}}
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


@pytest.mark.long
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
    assert (
        alone.memory.phases["update-actor"].total < found.memory.phases["update-actor"].total and alone.seconds.total < found.seconds.total
    )


@pytest.mark.long
def test_memory_and_seconds_have_the_phases_of_the_step_under_the_same_names(tmp_path: Path) -> None:
    two_updates = "algorithm.minibatches_per_step=2"
    (tmp_path / "run.toml").write_text(RUN)
    for overrides in ((), (two_updates,), ("algorithm.kl_coef=0.01", two_updates), (*ROLES, two_updates)):
        told = json.loads(plan(tmp_path / "run.toml", *overrides, "--hardware", "8xH200", "--shape", "Qwen2.5-1.5B", "--json")[1])
        memory, seconds = told["memory"].keys(), told["step_seconds"].keys()
        assert seconds - memory == {"other", "step"} and memory - seconds <= {"sync"}, (
            overrides
        )  # nothing is copied where weights are one set
        assert memory <= TIMING_NAMES.keys() and {"old-logprob", "update-actor"} & memory == {
            "update-actor",
            *(["old-logprob"] if overrides else []),
        }


@pytest.mark.long
def test_a_role_on_the_host_takes_memory_while_it_works(tmp_path: Path) -> None:
    here, away = (planned(tmp_path, *ROLES, f"reward_model.offload_params={text}", hardware="8xH200") for text in ("false", "true"))
    assert here.memory.phases["update-actor"].kinds["reward model"] > 0 == away.memory.phases["update-actor"].kinds["reward model"]
    assert away.memory.phases["reward"].kinds["reward model"] > 0
    assert away.seconds.reward.causes["offload"] > 0 == here.seconds.reward.causes.get("offload", 0)


@pytest.mark.long
def test_roles_on_gpus_of_their_own_run_beside_the_others(tmp_path: Path) -> None:
    found = planned(tmp_path, *ROLES, "cluster.workers=8", "cluster.roles={critic=2,reward_model=1}")
    assert found.run.cluster.gpus == 5 and found.run.all_gpus == 8
    assert found.memory.phases["update-critic"].kinds.keys().isdisjoint({"parameters", "engine", "reference"})
    assert "critic parameters" not in found.memory.phases["update-actor"].kinds and "reference" in found.memory.phases["update-actor"].kinds
    phases = {name: phase.total for name, phase in found.seconds.phases.items()}
    scored = max(phases["values"], phases.get("old-logprob", 0) + phases["ref-logprob"])
    learned = max(phases["update-critic"], phases["update-actor"])
    others = phases["rollout"] + phases["reward"] + phases["other"] + phases.get("sync", 0)
    assert found.seconds.total == pytest.approx(others + scored + learned)
    together = planned(tmp_path, *ROLES)
    assert found.memory.phases["update-actor"].total != together.memory.phases["update-actor"].total
    with pytest.raises(UserError, match=r"cluster.roles: \{ critic = 8 \} takes 8 of the run's 8 workers"):
        planned(tmp_path, *ROLES, "cluster.workers=8", "cluster.roles={critic=8}")


@pytest.mark.long
def test_a_role_whose_size_is_not_known_counts_as_the_actor_and_is_told(tmp_path: Path) -> None:
    found = planned(tmp_path, *ROLES[:3], "reward_model.path=some/where", hardware="8xH200")
    assert any("the size of 'some/where' is not known" in reason for reason in found.reasons)


def test_sft_is_an_update_alone(tmp_path: Path) -> None:
    text = RUN.replace('[reward]\nfunction = "math"\n', "")
    found = planned(tmp_path, "algorithm.name=sft", "data.max_tokens=8192", "algorithm.prompts_per_step=128", text=text)
    assert set(found.memory.phases) == {"update-actor"} and set(found.seconds.phases) == {"update-actor"} and found.fits
    assert (
        found.run.batch.rows == 128 and found.run.lengths.longest_row == 8192 and found.memory.phases["update-actor"].kinds["engine"] == 0
    )
    assert not any(knob.startswith("rollout.") for knob in found.knobs)
    halved = planned(tmp_path, "algorithm.name=sft", "data.max_tokens=8192", "algorithm.prompts_per_step=64", text=text)
    assert halved.seconds.total < found.seconds.total
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(UserError, match=r"responses end at 8192 tokens \(data.max_tokens\)"):
        command.planned(tmp_path / "run.toml", ["algorithm.name=sft", "data.max_tokens=8192"], "8xH100", None, 9000)


# ---- what fulltilt.plan decides ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
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
    assert found.memory.phases["update-actor"].kinds["engine"] == weights  # it stays in an update


@pytest.mark.long
def test_what_is_set_by_hand_is_described_as_it_runs(tmp_path: Path) -> None:
    """Experts that a tensor group has whole, prompts that each sample reads, and layers that are not gathered ahead."""
    tensor = ("train.tensor_parallel=4", "rollout.tensor_parallel=4")
    for experts, whole in ((1, False), (4, True)):
        found = planned(tmp_path, *tensor, f"train.expert_parallel={experts}", hardware="8xH200", shape="Qwen3-30B-A3B").run.layout
        assert (found.tensor, found.expert, found.whole_experts) == (4, 1, whole)
    alone, shared = (planned(tmp_path, f"rollout.prefix_sharing={own}") for own in ("false", "true"))
    assert alone.seconds.generation.total > shared.seconds.generation.total and not alone.run.engine.shares_prompts
    late, ahead = (planned(tmp_path, "train.shard=full", f"train.forward_prefetch={own}") for own in ("false", "true"))
    assert late.seconds.update.causes["gathering parameters"] > ahead.seconds.update.causes["gathering parameters"] > 0


def test_keys_and_values_are_divided_among_workers_that_sample_together() -> None:
    shape = Shape.named("70B")  # 8 key heads
    tables_of = {"model": {"path": "a"}, "data": {"train": "a.jsonl"}, "run": {"steps": 1}}
    config = parse(tables_of, here=False)
    roles = {"actor": RoleFacts.of_shape(shape, config, "cuda", learns=True)}
    whole = Facts("cuda", 80 << 30, 1 << 40, roles, 1024, 1, sharding=Sharding(workers=8))
    each = {size: divided(config, whole, Division(1, 1, size)).token_bytes for size in (1, 2, 8, 16)}
    assert each == {1: shape.kv_bytes_per_token(2), 2: each[1] // 2, 8: each[1] // 8, 16: each[1] // 8}


@pytest.mark.long
@pytest.mark.parametrize("hardware", ["1x4090", "1xH100-20GB", "1xA6000", "8xA100-40GB", "16xH100"])
@pytest.mark.parametrize("example", ["gsm8k/grpo", "gsm8k/lora", "gsm8k/ppo", "gsm8k/sft", "math/dapo"])
def test_what_auto_has_planned_fits_by_the_model_of_memory(example: str, hardware: str) -> None:
    """Where everything is left to `auto`, either fulltilt.plan refuses the run or the model of memory agrees that it fits."""
    config = load(ROOT / "examples" / f"{example}.toml", here=False)
    for shape in ("Qwen2.5-0.5B", "Qwen2.5-7B", "Qwen3-8B", "Llama-3-8B", "Qwen3-30B-A3B"):
        own = own_plan(config, named_shape(shape), command.cluster_for(config, hardware), None)
        memory = memory_of(own.run)
        assert own.refused or memory.fits, (shape, memory.reasons)


def test_a_small_gpu_has_smaller_passes_and_micro_batches() -> None:
    found = {}
    for hardware in ("1xH100-20GB", "1x4090", "1xH100"):
        report = command.planned(ROOT / "examples" / "gsm8k" / "lora.toml", (), hardware, "Qwen2.5-7B", None)
        assert report.fits
        found[hardware] = [report.knobs[knob] for knob in ("rollout.max_batched_tokens", "actor.token_budget")]
        engine = report.memory.phases["rollout"].kinds["engine"]
        assert engine > report.knobs["rollout.kv_bytes"]  # a pass over prompts is counted beside the cache
    assert found == {"1xH100-20GB": [2048, 8192], "1x4090": [8192, 16384], "1xH100": [16384, 16384]}
    by_hand = command.planned(ROOT / "examples" / "gsm8k" / "lora.toml", ("actor.token_budget=16384",), "1xH100-20GB", "Qwen2.5-7B", None)
    assert not by_hand.fits and by_hand.knobs["actor.token_budget"] == 16384


# ---- a CPU -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "overrides"), [("grpo", ()), ("ppo", ()), ("grpo", ("actor.token_budget=2048", "model.dtype=bfloat16"))])
def test_a_plan_for_a_cpu_is_the_plan_of_a_run_on_a_cpu(name: str, overrides: tuple[str, ...]) -> None:
    found = command.planned(ROOT / "examples" / "gsm8k" / f"{name}.toml", overrides, "CPU", "Qwen2.5-0.5B", None)
    config, shape = load(ROOT / "examples" / "gsm8k" / f"{name}.toml", overrides, here=False), named_shape("Qwen2.5-0.5B")
    roles = ["actor", *(own.role for own in found.run.others)]
    memory, longest = found.run.gpu.memory, found.run.lengths.most_prompt
    made = plan_of(shape, config, device="cpu", device_bytes=0, host_bytes=memory, longest=longest, roles=roles)
    own, budgets = made.roles["actor"], made.budgets
    decided = {f"train.{key}": getattr(own, key) for key in ("recompute", "head_recompute", *OFFLOADS)}
    decided |= {"actor.token_budget": budgets.token_budget, "actor.forward_token_budget": budgets.forward_token_budget}
    decided |= {"rollout.max_seqs": budgets.max_seqs, "rollout.max_batched_tokens": budgets.max_batched_tokens}
    itemsize = 2 if overrides else 4  # bytes of a number
    decided |= {"rollout.kv_bytes": budgets.kv_blocks * config.rollout.block_tokens * shape.kv_bytes_per_token(itemsize)}
    decided |= {"rollout.cuda_graphs": False, "train.fused_layers": False}
    if name == "ppo":
        decided |= {f"critic.{key}": getattr(made.roles["critic"], key) for key in ("recompute", "offload_optimizer")}
        decided |= {"critic.token_budget": budgets.critic_token_budget}
    assert {knob: found.knobs[knob] for knob in decided} == decided
    assert found.fits and found.run.itemsize == itemsize and not found.run.engine.graphs
    assert not any(kinds.get("context") or kinds.get("graphs") for kinds in (phase.kinds for phase in found.memory.phases.values()))
    held = found.memory.phases["update-actor"].kinds
    numbers = parameters(shape).total
    assert (held["parameters"], held["gradients"]) == (itemsize * numbers, 4 * numbers)
    assert held["optimizer"] == 4 * (2 if itemsize == 4 else 3) * numbers  # float32 numbers are their own masters
    assert not any("offload" in knob or "graphs" in knob for knob in found.runners_up)
    assert not [line for line in found.lines() if "each GPU" in line or "fits on the GPU" in line or "HBM" in line]


def test_what_a_run_on_a_cpu_refuses_is_refused_in_its_plan(tmp_path: Path) -> None:
    for setting in ("train.offload_optimizer=true", "train.offload_activations=true", "rollout.cuda_graphs=true"):
        with pytest.raises(UserError, match=rf"{setting.replace('=', ': ')}, but th(e|is) run is on the CPU"):
            planned(tmp_path, setting, hardware="CPU", shape="Qwen2.5-0.5B")
    crowded = planned(tmp_path, hardware="CPU-16GB", shape="Qwen2.5-7B")
    assert not crowded.fits and not any("offload" in remedy.words for remedy in crowded.remedies())


def test_workers_on_cpus_share_their_machine(tmp_path: Path) -> None:
    alone, four = (command.cluster_for(parse({**TABLES, "cluster": {"workers": count}}, here=False), "CPU-64GB") for count in (1, 4))
    assert four.gpus == 4 and 4 * four.gpu.memory == alone.gpu.memory and 4 * four.gpu.flops == alone.gpu.flops
    machines = command.cluster_for(parse({**TABLES, "cluster": {"nodes": 2, "workers": 2, "address": "auto"}}, here=False), "4xCPU-64GB")
    assert machines.per_machine == 2 and 2 * machines.gpu.hbm == alone.gpu.hbm
    run = PlannedRun(parse(TABLES, here=False), named_shape("Qwen2.5-7B"), Cluster.parse("CPU-16GB"), None)
    assert not any("GPU" in words for words, _ in single_changes(run)), "more workers would share the same memory"


# ---- runners-up --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.long
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


def test_no_change_is_offered_that_the_run_refuses(tmp_path: Path) -> None:
    """A run looks at the given train.shard: what `auto` shares out does not make room for the actor's parameters on the host."""
    config = load(ROOT / "examples" / "math" / "dapo.toml", here=False)
    for overrides, offered in (({}, False), ({"train.shard": "full"}, True)):
        planned_run = PlannedRun(with_settings(config, overrides), named_shape("Qwen3-30B-A3B"), Cluster.parse("8xH200"), None)
        own = own_plan(planned_run.config, planned_run.shape, planned_run.cluster, None)
        assert own.knobs["train.shard"] == "full"
        assert bool(list(alternatives(planned_run, own, "train.offload_params", False))) == offered


def test_what_the_rules_of_the_configuration_refuse_is_not_offered() -> None:
    """Compiled layers are not recomputed in part."""
    config = load(ROOT / "examples" / "gsm8k" / "grpo.toml", ["train.compile=true"], here=False)
    run = PlannedRun(config, named_shape("Qwen2.5-1.5B"), Cluster.parse("1xH100"), None)
    assert run.outcome() and run.but({"train.recompute": "full"}).outcome()
    assert run.but({"train.recompute": "selective"}).outcome() is None and run.but({"rollout.kv_bytes": 0}).outcome() is None


def test_a_run_that_decodes_few_samples_is_not_offered_none(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    for seqs, offered in ((1, []), (15, [3]), (16, [4, 1])):
        config = load(tmp_path / "run.toml", [f"rollout.max_seqs={seqs}"], here=False)
        run = PlannedRun(config, named_shape("Qwen3-30B-A3B"), Cluster.parse("3xH200"), None)
        tried = [each.config.rollout.max_seqs for words, each in single_changes(run) if words.startswith("rollout.max_seqs")]
        assert tried == ["auto", *offered]


def test_what_a_runner_up_lacks_is_told_in_bytes(tmp_path: Path) -> None:
    found = planned(tmp_path, "train.offload_activations=false", "actor.token_budget=16384", hardware="1xH100")
    none = found.runners_up["train.recompute"]
    assert found.knobs["train.recompute"] == "full" and none.seconds is None and none.missing > 1 << 30
    line = next(line for line in found.lines() if line.startswith("train.recompute"))
    assert re.search(r"it beats \"selective\", which needs [\d.]+ GiB more than there is", line)


@pytest.mark.long
def test_ways_to_fit_do_fit(tmp_path: Path) -> None:
    by_auto = planned(tmp_path, "train.recompute=none", "train.offload_activations=false", hardware="1xH100")
    assert by_auto.fits and by_auto.knobs["actor.token_budget"] < 16384
    given = {"train.recompute": "none", "train.offload_activations": "false", "actor.token_budget": "16384"}
    found = planned(tmp_path, *(f"{key}={value}" for key, value in given.items()), hardware="1xH100")
    assert not found.fits and found.remedies()
    for remedy in found.remedies():
        key, _, value = remedy.words.partition(" = ")
        overrides = given | {key: value}
        by_hand = planned(tmp_path, *(f"{name}={own}" for name, own in overrides.items()), hardware="1xH100")
        assert by_hand.fits and by_hand.seconds.total == pytest.approx(remedy.seconds)
    seconds = [remedy.seconds for remedy in found.remedies()]
    assert seconds == sorted(seconds)
    crowded = planned(tmp_path, hardware="1xA100-40GB", shape="Qwen2.5-72B")
    assert [remedy.words for remedy in crowded.remedies()] == ["32 GPUs", "64 GPUs"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "given", "offered"),
    [
        (
            "Qwen2.5-7B",
            {
                "train.recompute": "selective",
                "train.recompute_layers": "4",
                "train.offload_activations": "false",
                "actor.token_budget": "32768",
            },
            'train.recompute = "auto" and train.recompute_layers = "auto"',
        ),
        (
            "Qwen2.5-1.5B",
            {"actor.dynamic_batch": "false", "actor.micro_batch": "2048", "train.offload_activations": "false"},
            "actor.dynamic_batch = true and actor.micro_batch left out",
        ),
    ],
)
def test_ways_to_fit_can_be_typed(shape: str, given: dict[str, str], offered: str, tmp_path: Path) -> None:
    """With a key go those that it leaves without effect, which a run refuses."""
    found = planned(tmp_path, *(f"{key}={value}" for key, value in given.items()), hardware="1xH100", shape=shape)
    assert not found.fits and offered in [remedy.words for remedy in found.remedies()]
    for remedy in found.remedies():
        overrides = dict(given)
        for change in remedy.words.split(" and "):
            key, _, value = change.removesuffix(" left out").partition(" = ")
            overrides |= {key: value}
        typed = [f"{key}={value}" for key, value in overrides.items() if value]
        by_hand = planned(tmp_path, *typed, hardware="1xH100", shape=shape)
        assert by_hand.fits and by_hand.seconds.total == pytest.approx(remedy.seconds), remedy.words


def test_more_gpus_come_with_the_key_that_asks_for_them(tmp_path: Path) -> None:
    found = planned(tmp_path, "cluster.workers=2", hardware="2x4090")
    assert not found.fits and all("cluster.workers" in remedy.words for remedy in found.remedies() if "GPUs" in remedy.words)


def test_a_mistake_is_not_a_lack_of_memory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rollout.max_new_tokens: .* positions. Lower rollout.max_new_tokens to at most"):
        planned(tmp_path, "rollout.max_new_tokens=140000", hardware="8xH20")


def test_long_validations_make_room_in_the_cache_and_take_no_time() -> None:
    found = {}
    for most in (256, 8192):
        tables = {**TABLES, "data": {"train": "a.jsonl", "val": "v.jsonl"}, "run": {"steps": 15, "eval_every": 5}}
        config = parse({**tables, "rollout": {"max_new_tokens": 256}, "eval": {"max_new_tokens": most}}, here=False)
        found[most] = own_plan(config, named_shape("Qwen2.5-1.5B"), Cluster.parse("1xH100"), None).run
    short, long = found[256], found[8192]
    assert long.lengths.most_response == 256 and long.lengths.response == 64
    assert memory_of(long).sample_kv_bytes > memory_of(short).sample_kv_bytes
    assert seconds_of(long).total == pytest.approx(seconds_of(short).total, rel=0.1)


def test_the_context_of_every_model_that_reads_samples_counts() -> None:
    for name, own in (("ppo", {"critic": {"path": "Llama-2-7B"}}), ("grpo", {"ref": {"path": "Llama-2-7B"}})):
        algorithm = {"name": name} | ({"kl_coef": 0.01} if name == "grpo" else {})
        (role,) = own
        for most in (3500, 8192):
            config = parse({**TABLES, **own, "algorithm": algorithm, "rollout": {"max_new_tokens": most}}, here=False)
            if most == 3500:
                found = own_plan(config, named_shape("Qwen2.5-7B"), Cluster.parse("8xH200"), None)
                assert found.run.lengths.most_prompt == 4096 - 3500
                continue
            with pytest.raises(UserError, match=rf"rollout.max_new_tokens: .* the model of {role}.path was made for 4096 positions"):
                own_plan(config, named_shape("Qwen2.5-7B"), Cluster.parse("8xH200"), None)


@pytest.mark.parametrize("key", ["model.path", "critic.path", "model.chat_template"])
def test_a_name_that_no_file_can_have_is_a_mistake(key: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"{key}: no file or folder can be called \"Qwen2.5-7B\\u0000\": it holds a NUL character"):
        planned(tmp_path, "algorithm.name=ppo", f'{key}="Qwen2.5-7B\\u0000"')


@pytest.mark.long
def test_limits_beyond_the_models_positions_are_no_mistake(tmp_path: Path) -> None:
    """data.max_prompt_tokens and data.max_tokens say which rows are left out; those that stay may be shorter."""
    found = planned(tmp_path, "rollout.max_new_tokens=3500", shape="Llama-2-7B")
    assert found.fits and found.run.lengths.most_prompt == 4096 - 3500
    assert "prompts have at most 596 tokens here: the model has no positions for data.max_prompt_tokens = 1024" in found.reasons
    rows = planned(tmp_path, "algorithm.name=sft", "data.max_tokens=8192", "~reward.function", shape="Llama-2-7B")
    assert rows.fits and rows.run.lengths.longest_row == 4096
    assert "rows have at most 4096 tokens here: the model has no positions for data.max_tokens = 8192" in rows.reasons
    usual = planned(tmp_path, "rollout.max_new_tokens=3072", shape="Llama-2-7B")
    assert usual.run.lengths.most_prompt == 1024 and not any("positions" in reason for reason in usual.reasons)


@pytest.mark.parametrize(
    ("settings", "hardware", "said"),
    [
        (("run.device=cpu",), "8xH100", '--hardware 8xH100: the run has other devices: run.device = "cpu"'),
        (("run.device=cuda",), "CPU", '--hardware CPU: the run has other devices: run.device = "cuda"'),
        ((), "4xCPU", "--hardware 4xCPU: on CPUs a run has one worker on each machine, .* Set cluster.workers = 4, or give 1xCPU"),
    ],
)
def test_devices_that_the_run_does_not_take_are_refused(tmp_path: Path, settings: tuple[str, ...], hardware: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        planned(tmp_path, *settings, hardware=hardware)


def test_devices_that_nobody_named(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    of_cpu = command.planned(tmp_path / "run.toml", ["run.device=cpu"], None, "Qwen2.5-0.5B", None)
    assert of_cpu.run.cluster.gpu.is_cpu
    with pytest.raises(UserError, match=r"worker of the run has no .*\n(.*\n)*One H100 was assumed. .* as in --hardware 8xH100-80GB"):
        command.planned(tmp_path / "run.toml", ["train.shard=full"], None, None, None)


def test_remedies_can_be_typed_where_groups_are_too_small(tmp_path: Path) -> None:
    """A `shard_size` cannot be left out alone."""
    settings = ("train.shard=hybrid", "train.shard_size=2", "train.tensor_parallel=1", "rollout.tensor_parallel=1")
    offloads = ("train.offload_optimizer=false", "train.offload_grads=false")
    found = planned(tmp_path, *settings, *offloads, hardware="16xH200", shape="Qwen2.5-32B")
    assert not found.fits and found.remedies()
    (tmp_path / "run.toml").write_text(RUN)
    run = PlannedRun(load(tmp_path / "run.toml", settings, here=False), named_shape("Qwen2.5-32B"), found.run.cluster, None)
    words = [words for words, _ in single_changes(run)]
    assert words and "train.shard_size left out" not in words


def test_improvements_are_settings_that_the_run_accepts(tmp_path: Path) -> None:
    """A probe that is asked for measures nothing where a pass waits for other workers, so that dividing anything is refused."""
    (tmp_path / "run.toml").write_text(RUN)
    run = PlannedRun(load(tmp_path / "run.toml", ["run.probe=true"], here=False), named_shape("Qwen2.5-7B"), Cluster.parse("8xH100"), None)
    offered = [change.setting for change in ChangeableRun(run, own_plan(run.config, run.shape, run.cluster, None).run).single()]
    assert offered
    for settings in offered:
        changed_run = replace(run, config=load(tmp_path / "run.toml", ["run.probe=true", *settings.split()], here=False))
        assert changed_run.mistakes() == [], settings


def test_sizes_that_cannot_be_are_refused_with_the_legal_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train.tensor_parallel: 3 does not divide the 8 workers of the run. Use 1, 2 or 4"):
        planned(tmp_path, "cluster.workers=8", "train.tensor_parallel=3")
    with pytest.raises(UserError, match=r"rollout.tensor_parallel: 8 workers cannot hold a part of every layer: .* Use 1, 2 or 4"):
        planned(tmp_path, "cluster.workers=8", "rollout.tensor_parallel=8")


# ---- knobs and reasons -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("example", "overrides", "hardware", "shape"),
    [
        ("gsm8k/grpo", (), "1x4090", "Qwen2.5-0.5B"),
        ("gsm8k/sft", (), "8xH100", "Qwen2.5-32B"),
        ("math/dapo", ("algorithm.entropy_coef=0.001",), "16xH100", "Qwen3-30B-A3B"),
        ("chat/ppo", ("cluster.workers=8", "cluster.roles={critic=2}", "algorithm.kl_coef=0.01"), "8xH100", "Qwen2.5-7B"),
        ("chat/ppo", ("cluster.workers=4", "train.shard=full"), "4xCPU", "Qwen2.5-0.5B"),
    ],
)
def test_each_knob_has_a_reason_that_is_told(
    example: str, overrides: tuple[str, ...], hardware: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "runners_up", lambda *given: {})
    found = command.planned(ROOT / "examples" / f"{example}.toml", overrides, hardware, shape, None)
    lines = list(found.lines())
    assert found.knobs.keys() == found.why.keys()
    for knob, why in found.why.items():
        assert len(why.split()) >= 3 or why.startswith("as "), knob
        assert sum(line.startswith(f"{knob} = ") and line.endswith(why) for line in lines) == 1, knob
    fixed = {"train.packing", "train.fused_head", "train.entropy_recompute", "actor.dynamic_batch"}
    fixed |= {"train.balance"} if found.run.cluster.gpus > 1 else set()
    fixed |= {"rollout.engine", "rollout.log_stats", "rollout.block_tokens"} if found.run.rollout else set()
    assert fixed <= found.why.keys()
    for own in found.run.others:
        sizes = {f"{own.role}.{key}" for key in ("tensor_parallel", "sequence_parallel", "dynamic_batch")}
        assert sizes <= found.knobs.keys() and found.knobs[f"{own.role}.tensor_parallel"] == own.run.layout.tensor


def budgets_told(*overrides: str, hardware: str, shape: str) -> dict[str, tuple[int, str]]:
    """Token budgets of updates in PPO, with their reasons, by role."""
    config = load(ROOT / "examples" / "gsm8k" / "ppo.toml", overrides, here=False)
    own = own_plan(config, named_shape(shape), command.cluster_for(config, hardware), None)
    return {role: (own.knobs[f"{role}.token_budget"], own.why[f"{role}.token_budget"]) for role in ("actor", "critic")}


def test_that_a_critic_has_twice_the_actors_tokens_is_told_where_it_has() -> None:
    told = budgets_told("actor.token_budget=8192", hardware="8xH200", shape="Qwen2.5-3B")
    assert told["critic"] == (16384, "twice the actor's: there is no vocabulary head")
    told = budgets_told(hardware="1xH200", shape="Qwen2.5-0.5B")
    assert told["actor"] == (32768, "with fewer tokens of so small a model the device would wait")
    assert told["critic"] == (32768, "it keeps the GPU busy, and more would only take memory")


def test_knobs_that_are_set_by_hand_are_listed(tmp_path: Path) -> None:
    given = {"rollout.memory_fraction": 0.5, "actor.dynamic_batch": False, "actor.micro_batch": 2, "train.recompute": "full"}
    given |= {"train.recompute_layers": 4, "train.entropy_chunk": 512, "algorithm.prompts_per_step": 32}
    found = planned(tmp_path, *(f"{key}={json.dumps(value)}" for key, value in given.items()), hardware="1xH100", shape="Qwen2.5-1.5B")
    assert {key: found.knobs[key] for key in given} == given
    assert {found.why[key] for key in given} == {"set in the run"} and found.why["train.packing"] != "set in the run"
    assert found.why["rollout.kv_bytes"].startswith("0.5 of what is free in rollouts (rollout.memory_fraction)")
    assert "rollout.kv_bytes" not in found.runners_up
    # Micro-batches are filled by samples: no budget of tokens is in use.
    assert not any(knob.startswith("actor.") and knob.endswith("token_budget") for knob in found.knobs)
    by_tokens = planned(tmp_path, hardware="1xH100", shape="Qwen2.5-1.5B")
    assert by_tokens.knobs["actor.token_budget"] == 16384 and "all samples at once" in by_tokens.why["rollout.kv_bytes"]


@pytest.mark.long
def test_keys_that_a_role_takes_over_are_told(tmp_path: Path) -> None:
    overrides = (*ROLES, "train.recompute=full", "critic.sequence_parallel=2", "reward_model.tensor_parallel=2")
    found = planned(tmp_path, *overrides, hardware="8xH200", shape="Qwen2.5-1.5B")
    assert found.why["critic.recompute"] == "as train.recompute" and found.why["critic.tensor_parallel"] == "as train.tensor_parallel"
    assert found.knobs["critic.sequence_parallel"] == 2 and found.why["critic.sequence_parallel"] == "set in the run"
    assert found.knobs["reward_model.tensor_parallel"] == 2 and found.why["reward_model.tensor_parallel"] == "set in the run"


def test_the_knobs_of_a_run_that_is_refused_are_those_that_are_known(tmp_path: Path) -> None:
    found = planned(tmp_path, "rollout.kv_bytes=1000000", hardware="8xH100")
    assert found.refused.startswith("the KV cache: rollout.kv_bytes = 1000000") and not found.fits
    assert found.knobs["rollout.kv_bytes"] == 1000000 and found.knobs["train.shard"] == "optimizer"
    assert found.knobs["train.recompute"] == found.run.recompute.kind == "full"  # as the run would have it, but for its cache
    assert found.knobs["actor.token_budget"] == 16384 and found.knobs.keys() == found.why.keys()
    assert "rollout.max_seqs" not in found.knobs
    crowded = planned(tmp_path, hardware="1xH100-20GB")  # nothing is known of how roles would run
    assert crowded.refused and "train.recompute" not in crowded.knobs and crowded.why["train.packing"]


# ---- settings that the run refuses -----------------------------------------------------------------------------------------------------

DAPO = ROOT / "examples" / "math" / "dapo.toml"


@pytest.mark.parametrize(
    ("settings", "hardware", "said"),
    [
        (
            ("train.fused_layers=true", "ref.path=Qwen2.5-7B", "algorithm.kl_coef=0.1"),
            "1xH100",
            [
                "train.fused_layers: true, but the layers of the actor cannot run fused: qwen3_moe is not of a known family (llama, "
                "mistral, qwen2, qwen3). Remove the key, or set auto",
            ],
        ),
        (
            ("train.shard=hybrid", "train.shard_size=3"),
            "4xH100",
            ["train.shard_size: 3 does not divide the 4 workers of the run into groups. Use 2 or 4"],
        ),
        (
            ("train.expert_parallel=2",),
            "8xH100",
            ["train.expert_parallel: 2 workers cannot divide the experts among themselves: the model has no experts. Use 1"],
        ),
        (
            ("train.shard=full",),
            "1xH100",
            [
                'train.shard: "full", but the one worker of the run has no other to share parameters with. Remove the key, or set '
                "cluster.workers",
            ],
        ),
        (
            ("cluster.roles.ref=1",),
            "8xH100",
            [
                "cluster.roles: ref would get workers of its own, but nothing compares with a reference (algorithm.kl_coef, "
                "algorithm.reward_kl_coef). Remove it from the table",
            ],
        ),
        (
            ("train.tensor_parallel=2", "train.shard=full"),
            "CPU",
            [
                "train.tensor_parallel: 2 has no effect while cluster.workers is auto, which is 1 here. Remove it, or set cluster.workers "
                "above 1",
                'train.shard: "full", but train.tensor_parallel = 2 leaves no two workers with the same part of the model to share. '
                "Remove the key, or set cluster.workers",
            ],
        ),
    ],
)
def test_settings_that_the_run_refuses_are_refused_in_the_same_words(
    settings: tuple[str, ...], hardware: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = "Qwen3-30B-A3B" if "train.fused_layers=true" in settings else "Qwen2.5-7B"
    with pytest.raises(UserError) as told:
        plan(DAPO, *settings, "--shape", shape, "--hardware", hardware)
    assert str(told.value).splitlines() == said
    for name in ("too_many_here", "wrong_modules"):  # need the devices and the model
        monkeypatch.setattr(checks, name, lambda *given: ())
    monkeypatch.setattr(checks, "shape_of_role", lambda config, role: named_shape(shape))
    cluster, given = Cluster.parse(hardware, 1), load(DAPO, settings, here=False)
    config = given.model_copy(update={"cluster": given.cluster.model_copy(update={"workers": cluster.gpus})})
    by_run = checks.wrong_settings(config, build(config), cluster.gpu.device)
    assert [*unused_by(given, cluster.gpus), *by_run] == said


def test_the_command_ends_with_all_mistakes(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    settings = ["train.shard=hybrid", "train.shard_size=3", "train.expert_parallel=2", "cluster.roles.ref=1"]
    monkeypatch.setattr("sys.argv", ["fulltilt", "plan", str(DAPO), "--shape", "Qwen2.5-7B", "--hardware", "8xH100", *settings])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = " ".join(capfd.readouterr().err.split())
    assert all(f"{key}: " in said for key in ("train.shard_size", "train.expert_parallel", "cluster.roles"))


def test_a_legal_setting_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "runners_up", lambda *given: {})
    code, said = plan(DAPO, "train.shard=hybrid", "train.shard_size=2", "--shape", "Qwen2.5-7B", "--hardware", "4xH200")
    assert code == 0 and 'train.shard = "hybrid": set in the run' in said


def test_an_illegal_value_is_no_runner_up() -> None:
    run = PlannedRun(load(DAPO, here=False), named_shape("Qwen2.5-7B"), Cluster.parse("8xH100", 1), None)
    assert run.but({"train.expert_parallel": 2}).outcome() is None and run.outcome() is not None


def test_an_empty_shape_is_not_the_models() -> None:
    with pytest.raises(UserError, match=r"'' is neither a folder"):
        plan(DAPO, "model.path=Qwen/Qwen2.5-7B", "--shape", "", "--hardware", "8xH100")


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

TROUBLE = ROOT / "docs" / "troubleshooting.md"
BLOCKS = re.findall(r"```\n(\$ fulltilt plan .*?)\n```", PAGE.read_text(), re.DOTALL)


def unwrapped(text: str) -> list[str]:
    """The lines of a block, each in one: what follows is indented."""
    return re.sub(r"\n    (?=\S)", " ", text).splitlines()


@pytest.mark.long
@pytest.mark.parametrize("block", BLOCKS, ids=[f"command{place}" for place in range(len(BLOCKS))])
def test_the_page_shows_what_the_command_prints(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    first, *shown = unwrapped(block)
    printed = plan(*first.removeprefix("$ fulltilt plan ").split())[1].splitlines()
    if shown[0] == "...":
        shown, printed = shown[1:], printed[-len(shown) + 1 :]
    assert shown == [re.sub(r" +", " ", line) for line in printed]


def commands_of_pages() -> dict[str, int]:
    """Each `fulltilt plan` command of the two pages, with the exit code that its page says: 3 where it does not fit."""
    pages = [page.read_text() for page in (PAGE, TROUBLE)]
    found: dict[str, int] = {}
    for code in (code for page in pages for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) for code in block.splitlines()):
        found[code.partition("#")[0].strip()] = 0
    for code, says in (each for page in pages for each in re.findall(r"`(fulltilt plan [^`\n]+)`( \(exit code 3\))?", page)):
        found[code] = 3 if says else 0
    for first, *shown in map(unwrapped, BLOCKS):
        found[first.removeprefix("$ ")] = 3 if any(line.startswith("it does not fit") for line in shown) else 0
    return {code: says for code, says in found.items() if code.startswith("fulltilt plan ") and "RUN.toml" not in code}


@pytest.mark.parametrize(("code", "says"), commands_of_pages().items())
def test_each_command_of_the_pages_ends_as_its_page_says(code: str, says: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    # What takes the time, and has no part in whether the run fits.
    monkeypatch.setattr(report, "runners_up", lambda *given: {})
    monkeypatch.setattr(report, "remedies", lambda *given: [])
    assert plan(*code.removeprefix("fulltilt plan ").split())[0] == says


def test_the_page_shows_the_published_tables_as_they_are_printed() -> None:
    folder = ROOT / "tests" / "data" / "published"
    read = [tables.read_table(folder / name) for name in ("dapo7b.csv", "grpo_qwen2.5_7b.csv")]
    predictions = [own for table in read for own in tables.predict(table)]
    assert "\n".join(tables.lines(read, predictions)) in PAGE.read_text() and len(BLOCKS) >= 5
