"""Roles on workers of their own (`cluster.roles`) compute what one process computes, beside the actor, and are named in messages."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import devices
import models
import numpy as np
import pytest
import runs
from test_devices import ONE_STEP, QUIET, assert_same_gradients, assert_same_metrics, chosen, differ, saved_tensors
from transformers import AutoModelForSequenceClassification

from fulltilt.algo.build import build
from fulltilt.cluster.checks import TextFacts, wrong_settings
from fulltilt.cluster.hosts import WorkerDied
from fulltilt.cluster.making import WorkerOrder
from fulltilt.cluster.processes import Processes
from fulltilt.cluster.teams import teams_of
from fulltilt.plan.facts import Facts, RoleFacts
from fulltilt.plan.make import make_plan
from fulltilt.records import UserError
from fulltilt.shape import Shape

ModelFolders = Callable[[str], Path]
Pool = devices.Pool

# The reference and the critic annotate beside the actor, and the reward model scores.
PPO = ("algorithm.name=ppo", "algorithm.kl_coef=0.05", 'reward.function={ "reward.py:score" = 1.0, reward_model = 0.5 }')
APART = "cluster.roles={critic = 1, reward_model = 1}"


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge")
    config = models.FAMILIES["qwen2"]()
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    models.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def template(model_folders: ModelFolders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make(tmp_path_factory.mktemp("template") / "folder", model_folders("qwen2"))


@pytest.fixture(scope="module")
def alone(pool_of_devices: Pool, template: Path, judge: Path) -> tuple[Path, devices.Noted]:
    """One step of PPO in one process."""
    return template, pool_of_devices.train(template, 1, *ONE_STEP, *PPO, f"reward_model.path={judge}")[1]


class CallLog:
    """When the driver starts calls of a pool's workers, and when it has their results."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, str, tuple[int, ...]]] = []  # "begin" or "end", the method, the workers that were called
        start = devices.Team.start

        def noting(team: devices.Team, method: str, args: Sequence[Any], **options: Any) -> devices.TeamCall:
            called = tuple(rank for rank, own in enumerate(args) if own is not None)
            self.seen.append(("begin", method, called))
            call = start(team, method, args, **options)
            results = call.results

            def noted() -> list[Any]:
                found = results()
                self.seen.append(("end", method, called))
                return found

            call.results = noted  # type: ignore[method-assign]
            return call

        monkeypatch.setattr(devices.Team, "start", noting)

    def overlap(self, method: str, one: tuple[int, ...], other: tuple[int, ...]) -> bool:
        """Whether both calls had begun when the first of them ended."""
        places = [self.seen.index((moment, method, ranks)) for moment in ("begin", "end") for ranks in (one, other)]
        return max(places[:2]) < min(places[2:])

    def called(self, method: str) -> set[tuple[int, ...]]:
        return {ranks for moment, name, ranks in self.seen if name == method}


def test_a_step_of_ppo_equals_that_of_one_process(
    pool_of_devices: Pool, alone: tuple[Path, devices.Noted], judge: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected_folder, expected = alone
    folder = runs.make(tmp_path / "folder", (expected_folder / "model").resolve())
    log = CallLog(monkeypatch)
    trained, noted = pool_of_devices.train(folder, 4, *ONE_STEP, *PPO, f"reward_model.path={judge}", APART)
    assert runs.contents(folder / "run" / "rollouts") == runs.contents(expected_folder / "run" / "rollouts")
    print(f"largest difference of gradients {assert_same_gradients(noted, expected):.1e}")
    assert_same_metrics(folder, expected_folder)
    assert differ(noted.parameters[0], expected.parameters[0]) < 1e-6
    assert noted.digests[0] == noted.digests[1] != noted.digests[2]
    # Each role is where it belongs, and what is apart runs at the same time.
    assert log.called("generate") == log.called("sync") == {(0, 1)}
    assert log.called("annotate") == {(0, 1), (2,), (3,)} and log.called("update") == {(0, 1), (2,)}
    assert log.overlap("annotate", (2,), (0, 1)) and log.overlap("update", (2,), (0, 1))
    kinds = [{name.partition("/")[0] for name in states} for states in noted.states]
    assert kinds[:2] == [{"exp_avg", "exp_avg_sq", "step"}] * 2 and kinds[2:] == [{"critic"}, set()]
    assert noted.moved[2] == {}, "a critic that one worker has needs no collective"
    for said in ("workers 0 to 1 of 4 (actor, ref): models loaded", "worker 2 of 4 (critic): ", "critic on workers of its own: updates in"):
        assert said in trained.said
    (line,) = runs.metrics(folder)
    assert line["timing_s/values"] > 0 and line["memory_gib/update_critic/optimizer"] > 0


@pytest.mark.long
def test_checkpoints_move_between_placements(pool_of_devices: Pool, template: Path, tmp_path: Path) -> None:
    """The states that a run resumes from are those that were saved, to the bit, wherever roles are."""
    folder = runs.make(tmp_path / "folder", (template / "model").resolve())
    placements = (
        (4, "cluster.roles={critic = 2}"),
        (1,),
        (4, "cluster.roles={critic = 1, ref = 2}"),
        (2,),
        (2, "cluster.roles={critic = 1}"),
    )
    before: devices.Whole | None = None
    for steps, (workers, *roles) in enumerate(placements, start=1):
        _, noted = pool_of_devices.train(folder, workers, *QUIET, *PPO[:2], f"run.steps={steps}", "run.save_every=0", *roles)
        if before is not None:
            restored = devices.joined_states(noted.restored)
            assert restored.keys() == before.keys()
            assert all(np.array_equal(restored[name], numbers) for name, numbers in before.items()), f"step {steps}"
        before = devices.joined_states(noted.states)


@pytest.mark.long
@pytest.mark.parametrize(
    ("workers", "settings"),
    [
        (4, ("train.shard=full", "cluster.roles={critic = 2}")),
        (4, ("train.shard=full", "cluster.roles={critic = 1, ref = 2}")),
        (3, ("lora.rank=4", "lora.critic=true", "cluster.roles={critic = 1}")),
    ],
)
def test_a_critic_of_several_workers_is_shared_out(
    pool_of_devices: Pool, template: Path, tmp_path: Path, workers: int, settings: tuple[str, ...]
) -> None:
    one, several = (runs.make(tmp_path / name, (template / "model").resolve()) for name in ("one", "several"))
    single = [each for each in settings if each.startswith("lora")]
    _, expected = pool_of_devices.train(one, 1, *ONE_STEP, *PPO[:2], *single)
    _, noted = pool_of_devices.train(several, workers, *ONE_STEP, *PPO[:2], *settings)
    assert_same_gradients(noted, expected)
    assert_same_metrics(several, one)


@pytest.mark.long
@pytest.mark.parametrize("critics", [2, 4])
def test_groups_of_workers_go_with_roles(template: Path, tmp_path: Path, critics: int) -> None:
    """Six workers, among which the actor's, or the critic's, are two groups."""
    one, several = (runs.make(tmp_path / name, (template / "model").resolve()) for name in ("one", "several"))
    settings = (*ONE_STEP, *PPO[:2])
    with contextlib.closing(Pool(6)) as pool:
        _, expected = pool.train(one, 1, *settings)
        shared = ("train.shard=hybrid", "train.shard_size=2", f"cluster.roles={{critic = {critics}}}")
        trained, noted = pool.train(several, 6, *settings, *shared)
    assert_same_gradients(noted, expected)
    assert_same_metrics(several, one)
    role = "actor" if critics == 2 else "critic"
    assert f"{role}: parameters shared out among 2 workers, in 2 groups" in trained.said
    groups = [range(0, 2), range(2, 4), range(4, 6)]
    assert noted.groups == [list(group) for group in groups for _ in group]
    same = groups[:2] if role == "actor" else groups[1:]
    assert noted.digests[same[0].start] == noted.digests[same[1].start] and len(set(noted.digests)) == 2


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("workers", "settings"),
    [
        (3, ("cluster.roles={critic = 1}", "train.sequence_parallel=2", "critic.sequence_parallel=1")),
        (
            6,
            (
                "cluster.roles={critic = 2}", "train.shard=hybrid", "train.shard_size=2",
                "train.sequence_parallel=2", "ref.sequence_parallel=4", "critic.sequence_parallel=1",
            ),
        ),
    ],
)  # fmt: skip
def test_groups_of_all_kinds_in_processes_of_a_run(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, settings: tuple[str, ...]
) -> None:
    """Nothing evens out the numbers of groups that workers are in here, by which workers agree on the names of others."""
    monkeypatch.setenv("FULLTILT_SHARE_DEVICES", "1")
    one, several = (runs.make(tmp_path / name, (template / "model").resolve()) for name in ("one", "several"))
    runs.train(one, *ONE_STEP, *PPO[:2])
    runs.train(several, *ONE_STEP, *PPO[:2], f"cluster.workers={workers}", *settings, "cluster.stall_s=300")
    assert_same_metrics(several, one)


SIZES: dict[str, tuple[int, tuple[str, ...]]] = {
    "two, one, four and two": (
        4, ("train.tensor_parallel=2", "ref.tensor_parallel=1", "critic.tensor_parallel=4", "reward_model.tensor_parallel=2"),
    ),
    "only the reference": (2, ("ref.tensor_parallel=2",)),
    "only the critic, full": (4, ("critic.tensor_parallel=2", "train.shard=full")),
    "whole critic and reward model, full": (
        4, ("train.tensor_parallel=2", "critic.tensor_parallel=1", "reward_model.tensor_parallel=1", "train.shard=full"),
    ),
    "a critic that nobody shares with, full": (4, ("train.tensor_parallel=2", "critic.tensor_parallel=4", "train.shard=full")),
    "groups": (4, ("critic.tensor_parallel=2", "train.shard=hybrid", "train.shard_size=2")),
    "sequences": (
        4, ("train.tensor_parallel=2", "train.sequence_parallel=2", "critic.tensor_parallel=1", "critic.sequence_parallel=4"),
    ),
    "a critic with workers of its own": (4, ("cluster.roles={critic = 2}", "critic.tensor_parallel=2", "ref.tensor_parallel=2")),
    "rollouts in other parts": (4, ("train.tensor_parallel=4", "rollout.tensor_parallel=2", "ref.tensor_parallel=2")),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("way", [pytest.param(way, marks=[] if way == "two, one, four and two" else [pytest.mark.matrix]) for way in SIZES])
def test_each_role_is_divided_among_as_many_workers_as_it_says(
    pool_of_devices: Pool, alone: tuple[Path, devices.Noted], judge: Path, tmp_path: Path, way: str
) -> None:
    expected_folder, expected = alone
    workers, settings = SIZES[way]
    folder = runs.make(tmp_path / "folder", (expected_folder / "model").resolve())
    trained, noted = pool_of_devices.train(folder, workers, *ONE_STEP, *PPO, f"reward_model.path={judge}", *settings)
    assert runs.contents(folder / "run" / "rollouts") == runs.contents(expected_folder / "run" / "rollouts")
    print(f"{way}: largest difference of gradients {assert_same_gradients(noted, expected):.1e}")
    assert_same_metrics(folder, expected_folder)
    assert differ(noted.parameters[0], expected.parameters[0]) < 1e-6
    for setting in settings:
        role, _, size = setting.partition(".tensor_parallel=")
        if size and role != "rollout":
            role = "actor" if role == "train" else role
            assert (f"{role}: each layer divided among {size} workers" in trained.said) == (int(size) > 1), setting


EXPERTS: dict[str, tuple[str, ...]] = {
    "two and four": ("train.expert_parallel=2", "ref.expert_parallel=4", "critic.expert_parallel=4"),
    "experts and layers": ("train.expert_parallel=4", "ref.tensor_parallel=2", "critic.tensor_parallel=2"),
    "layers and experts, full": ("train.tensor_parallel=2", "critic.expert_parallel=2", "ref.expert_parallel=1", "train.shard=full"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("way", EXPERTS)
def test_experts_of_each_role_are_divided_among_as_many_workers_as_it_says(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, way: str
) -> None:
    """Routers compute in float32, and round parts of sums."""
    one, several = (runs.make(tmp_path / name, model_folders("qwen3-moe")) for name in ("one", "several"))
    _, expected = pool_of_devices.train(one, 1, *ONE_STEP, *PPO[:2])
    _, noted = pool_of_devices.train(several, 4, *ONE_STEP, *PPO[:2], *EXPERTS[way])
    print(f"{way}: largest difference of gradients {assert_same_gradients(noted, expected, 1e-6):.1e}")
    assert_same_metrics(several, one, absolute=1e-7, rounds=True)


@pytest.mark.matrix
def test_checkpoints_move_between_sizes_of_roles(pool_of_devices: Pool, template: Path, tmp_path: Path) -> None:
    """Every step with other sizes, from the states that were saved with those before."""
    folder, alone = (runs.make(tmp_path / name, (template / "model").resolve()) for name in ("folder", "alone"))
    common = (*QUIET, *PPO[:2], "model.dtype=float64", "run.save_every=1", "run.keep=9")
    steps: list[tuple[int, tuple[str, ...]]] = [
        (4, ("train.tensor_parallel=2", "critic.tensor_parallel=4", "ref.tensor_parallel=1")),
        (2, ("critic.tensor_parallel=2",)),
        (1, ()),
        (4, ("train.tensor_parallel=4", "critic.tensor_parallel=2", "train.sequence_parallel=1", "critic.sequence_parallel=2")),
        (4, ("train.tensor_parallel=2", "critic.tensor_parallel=1", "train.shard=full")),
    ]
    for step, (workers, own) in enumerate(steps, start=1):
        pool_of_devices.train(folder, workers, *common, f"run.steps={step}", *own)
        pool_of_devices.train(alone, 1, *common, f"run.steps={step}")
    assert_same_metrics(folder, alone, tolerance=1e-5, absolute=1e-7)
    found, expected = (saved_tensors(each, len(steps)) for each in (folder, alone))
    assert found.keys() == expected.keys() and any(name.startswith("critic/") for name in found)
    for kind in ("exp_avg/", "critic/exp_avg/"):
        assert differ(chosen(found, kind), chosen(expected, kind)) < 1e-7


def test_a_worker_is_named_with_its_role() -> None:
    host = Processes([0, 1], "toy_worker:make", labels=["", "critic"])
    os.kill(host.pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"^worker 1 \(critic, process \d+\) was killed by signal 9 \(SIGKILL\)"):
        while True:
            host.start("add", [(1,), None], what="adding").results()


# -- without workers -----------------------------------------------------------------------------------------------------------------------


def order_of(folder: Path, *overrides: str, roles: tuple[str, ...], judged: bool = False) -> WorkerOrder:
    config = runs.read_config(folder, *overrides)
    nothing: Any = SimpleNamespace()
    return WorkerOrder(config, roles, TextFacts(nothing, frozenset(), 6, 4), nothing if judged else None, sampled=True)


def test_the_last_workers_are_those_of_roles(template: Path) -> None:
    order = order_of(
        template, "cluster.workers=8", "cluster.roles={reward_model = 1, critic = 2}", roles=("actor", "critic", "ref"), judged=True
    )
    actors, critics, judges = teams_of(order, 8)
    assert (actors.ranks, critics.ranks, judges.ranks) == (range(5), range(5, 7), range(7, 8))
    assert actors.order.roles == ("actor", "ref") and actors.order.encoder is None and actors.label == ""
    assert critics.order.roles == ("critic",) and critics.label == "critic" and not critics.order.sampled
    assert judges.order.encoder is not None and judges.order.texts.longest == 6 + order.config.rollout.max_new_tokens


def test_an_evaluation_uses_the_workers_of_roles_that_only_learn(template: Path) -> None:
    order = order_of(template, "cluster.workers=4", "cluster.roles={critic = 2, reward_model = 1}", roles=(), judged=True)
    actors, judges = teams_of(order, 4)
    assert (actors.ranks, judges.ranks) == (range(3), range(3, 4))
    (everyone,) = teams_of(order_of(template, "cluster.workers=4", "cluster.roles={critic = 2}", roles=()), 4)
    assert everyone.ranks == range(4)


REFUSED = {
    "critic": (("cluster.workers=2", "cluster.roles={critic = 1}"), 'critic would get .* algorithm.name = "grpo" has no critic'),
    "ref": (("cluster.workers=2", "cluster.roles={ref = 1}", "algorithm.kl_coef=0"), "cluster.roles: ref would get .* nothing compares"),
    "adapters": (("cluster.workers=2", "cluster.roles={ref = 1}", "lora.rank=4"), "the reference is the actor without its adapters"),
    "reward model": (("cluster.workers=2", "cluster.roles={reward_model = 1}"), "cluster.roles: reward_model would get .* no reward model"),
    "all workers": (("cluster.workers=2", "cluster.roles={ref = 2}"), r"takes 2 of the run's 2 workers, and the actor needs .* at most 1"),
    "groups": (
        ("cluster.workers=5", "cluster.roles={ref = 1}", "train.shard=hybrid", "train.shard_size=3"),
        "train.shard_size: 3 does not divide the 4 workers of the actor into groups. Use 2 or 4$",
    ),
    "groups of a role": (
        ("cluster.workers=15", "cluster.roles={ref = 3}", "train.shard=hybrid", "train.shard_size=2"),
        "train.shard_size: 2 does not divide the 3 workers of the ref into groups. Use 3, 4, 6 or 12$",
    ),
    "sizes of a shared model": (
        ("cluster.workers=2", "lora.rank=4", "ref.tensor_parallel=2"),
        "ref.tensor_parallel: 2, but the reference is the actor without its adapters .* Remove the key$",
    ),
    "size of a role": (
        ("cluster.workers=4", "ref.tensor_parallel=3"),
        "ref.tensor_parallel: 3 does not divide the 4 workers of the run. Use 1, 2 or 4$",
    ),
    "size of a role with workers of its own": (
        ("cluster.workers=3", "cluster.roles={ref = 1}", "ref.tensor_parallel=2"),
        "ref.tensor_parallel: 2 does not divide the 1 worker that has the ref's role. Use 1$",
    ),
    "experts of a role": (
        ("cluster.workers=2", "ref.expert_parallel=2"),
        "ref.expert_parallel: 2 workers cannot divide the experts of the ref among themselves: the model has no experts. Use 1$",
    ),
    "sequences of a role": (
        ("cluster.workers=4", "ref.tensor_parallel=4", "train.sequence_parallel=2"),
        "train.sequence_parallel: 2 workers cannot share micro-batches of the ref: only one has .* Set ref.sequence_parallel = 1$",
    ),
    "no groups": (
        ("cluster.workers=3", "cluster.roles={ref = 2}", "train.shard=hybrid", "train.shard_size=2"),
        'train.shard_size: 2 does not divide the 1 worker of the actor into groups. Set train.shard = "full", and remove '
        "train.shard_size$",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(template: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLTILT_SHARE_DEVICES", "1")
    settings, pattern = REFUSED[case]
    config = runs.read_config(template, *settings)
    with contextlib.chdir(template):
        (text,) = wrong_settings(config, build(config), "cpu")
    assert re.search(pattern, text), text


def test_parameters_that_could_not_be_away(template: Path) -> None:
    settings = ("cluster.workers=2", "cluster.roles={ref = 1}", "ref.offload_params=true", "train.offload_params=true")
    config = runs.read_config(template, *settings)
    found = "\n".join(wrong_settings(config, build(config), "cuda"))
    assert "ref.offload_params: true, but it has workers of its own (cluster.roles)" in found
    assert "train.offload_params: true, but no other role has a model" in found


@pytest.mark.parametrize("given", ["{actor = 1}", "{ref = 0}", "{ref = -1}", "{critics = 1}", "{ref = 1.5}", "2"])
def test_bad_values(template: Path, given: str) -> None:
    pattern = r'cluster.roles: must be a table of a whole number from 1 to 1024 for "critic", "ref" or "reward_model", got'
    with pytest.raises(UserError, match=pattern):
        runs.read_config(template, "cluster.workers=4", f"cluster.roles={given}")
    with pytest.raises(UserError, match=r"cluster.roles: .* has no effect while cluster.workers is 1"):
        runs.read_config(template, "cluster.workers=1", "cluster.roles={ref = 1}")


def test_the_plan_of_a_critic_that_has_a_device_for_itself(template: Path) -> None:
    """Nothing makes room for others, and its own parts leave the device only where it alone is too large."""
    config = runs.read_config(template, "algorithm.name=ppo", "model.dtype=bfloat16", "algorithm.kl_coef=0")
    shape = Shape.read(template / "model")
    critic = RoleFacts.of_shape(shape, config, "cuda", learns=True, role="critic")
    facts = Facts("cuda", 2**30, 2**34, {"critic": critic}, 22, 4, rollout=False, free_bytes=2**29)
    plan = make_plan(config, facts)
    assert plan.roles.keys() == {"critic"} and not plan.roles["critic"].offload_params
    assert plan.words[0].startswith("critic on workers of its own: updates in micro-batches of at most ")
    small = make_plan(config, Facts("cuda", 2 * critic.parameter_bytes, 2**34, {"critic": critic}, 22, 4, rollout=False, free_bytes=0))
    assert small.roles["critic"].offload_optimizer and not small.roles["critic"].offload_params
