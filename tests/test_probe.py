"""The probe: costs of updates, fitted to measured micro-batches, and token budgets that follow from them."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import runs
import torch

from fulltilt import config as configuration
from fulltilt.algo.build import build
from fulltilt.cluster import checks, faults, making, probing
from fulltilt.cluster.assembly import assemble
from fulltilt.cluster.making import WorkerProbe
from fulltilt.cluster.probing import (
    MOST_PROMPT_TOKENS,
    RESPONSES,
    MeasuredSize,
    TimeLimit,
    environment,
    measure_size,
    measure_updates,
    measured_if_possible,
    measured_prompts,
    probe_rollouts,
)
from fulltilt.cluster.worker import Residents
from fulltilt.hardware import Cluster, accelerator
from fulltilt.loop.opening import prober_for
from fulltilt.parallel.ranks import ALONE
from fulltilt.plan import legal
from fulltilt.plan.decisions import Decisions
from fulltilt.plan.facts import Facts, RoleFacts
from fulltilt.plan.make import make_plan
from fulltilt.plan.micro_batches import ENLARGED, HEADROOM, LEAST_BUDGET, TOKEN_BUDGET, budgets_by_costs
from fulltilt.plan.resident import left_for_update
from fulltilt.plan.roles import plan_roles
from fulltilt.records import MicroBatch, Probed, Prompt, RolloutPass, UpdateCosts, UpdatePass, UpdatePasses, UserError
from fulltilt.rollout.engine import EngineLimits
from fulltilt.rollout.sampler import Sampling
from fulltilt.shape import Shape
from fulltilt.tune import probe
from fulltilt.tune.calibration import MOST, NOISE, believed, calibrate, of_rollouts, seconds_of_pass, steps_and_others
from fulltilt.tune.constants import FULLTILT
from fulltilt.tune.description import AS_MODELLED, BatchDescription, Calibration, EngineDescription, RunDescription
from fulltilt.tune.lengths import Lengths
from fulltilt.tune.probe import FORM, Prober, fit, nonnegative_fit
from fulltilt.tune.time_model import generation_seconds, update_seconds

GIB = 2**30
NO_LIMIT = TimeLimit(0, clock=False)
PLAIN: dict[str, Any] = {"model": {"path": "."}, "data": {"train": "."}, "run": {"steps": 1}}
SIZES = [(tokens, length) for tokens in (512, 1024, 2048, 4096) for length in (128, 512)]


def made_up(fixed: float, token: float, pair: float, *, host: float = 0.0, fixed_bytes: float = 3e8) -> list[UpdatePass]:
    """What would be measured if these were the costs."""
    found = []
    for tokens, length in SIZES:
        pairs = tokens // length * length**2
        seconds = max(host, fixed + token * tokens + pair * pairs)
        found.append(UpdatePass(tokens, pairs, int(fixed_bytes + 1e5 * tokens), seconds))
    return found


MEASURED = UpdatePasses(tuple(made_up(0.04, 3e-5, 2e-9)))


@pytest.mark.parametrize("costs", [(0.04, 3e-5, 2e-9), (0.0, 3e-5, 2e-9), (0.04, 3e-5, 0.0)])
def test_known_costs_are_found_again(costs: tuple[float, float, float]) -> None:
    found = fit(made_up(*costs), apart=False)
    assert (found.fixed_s, found.token_s, found.pair_s) == pytest.approx(costs, rel=1e-6, abs=1e-12)
    assert (found.fixed_bytes, found.token_bytes) == pytest.approx((3e8, 1e5), rel=1e-6)
    assert found.largest == 4096 and found.error < 1e-6 and not found.host_s and len(found.passes) == len(SIZES)


@pytest.mark.parametrize("host", [0.063, 0.08])
def test_small_micro_batches_wait_for_the_host(host: float) -> None:
    """A GPU takes the host's seconds or its own, whichever are more: with 0.08 s only the largest micro-batches tell its own."""
    found = fit(made_up(0.0, 3e-5, 2e-9, host=host), apart=True)
    assert found.host_s == pytest.approx(host, rel=0.01) and found.error < 0.01 and not found.fixed_s
    assert found.seconds(512, 512 * 128) == pytest.approx(host, rel=0.01)
    assert found.seconds(65536, 65536 * 512) == pytest.approx(65536 * 3e-5 + 65536 * 512 * 2e-9, rel=1e-6)


def test_what_was_measured_where_every_micro_batch_waits_for_the_host() -> None:
    """A mixture of experts on an H200, whose host needs now more, now less: nothing is said of the device."""
    seconds = {512: 0.0956, 2048: 0.1138, 1911: 0.1163, 100: 0.1}
    passes = [UpdatePass(tokens, tokens * 512, 2**20 * tokens, own) for tokens, own in seconds.items()]
    assert fit(passes[:2], apart=True).host_s is None, "too few"
    found = fit(passes, apart=True)
    assert found.host_s == pytest.approx(0.107, rel=0.05) and not found.token_s and not found.pair_s and not found.fixed_s


def test_noise_makes_no_cost_negative() -> None:
    """Where a true cost is 0, the unbounded solution is below it about half of the time."""
    for shift in range(1, 30):
        noisy = [
            replace(own, seconds=own.seconds * (1 + 0.02 * ((place * shift * 7) % 5 - 2))) for place, own in enumerate(made_up(0, 3e-5, 0))
        ]
        found = fit(noisy, apart=False)
        assert min(found.host_s or 0, found.fixed_s or 0, found.token_s or 0, found.pair_s or 0) >= 0 and found.error < 0.1
        assert found.seconds(65536, 65536 * 512) == pytest.approx(65536 * 3e-5, rel=0.25)


def test_too_few_measurements_and_none() -> None:
    assert nonnegative_fit([[1.0, 5.0]], [10.0]) in ([10.0, 0.0], [0.0, 2.0])
    only_memory = fit([UpdatePass(100, 10, 1000), UpdatePass(200, 20, 2000)], apart=True)
    assert only_memory.seconds(100, 10) is None and only_memory.bytes(400) == pytest.approx(4000, abs=1)
    assert fit(made_up(0.04, 3e-5, 2e-9)[:3], apart=False).fixed_s is None
    for passes in (made_up(0.04, 3e-5, 2e-9)[:1], made_up(0.04, 3e-5, 2e-9)[:2]):
        assert fit(passes, apart=True).token_bytes is None, "one size does not tell what grows with tokens"
    alike = [UpdatePass(tokens, tokens * 512, None, seconds) for tokens, seconds in ((512, 0.1), (1024, 0.1), (8192, 0.4))]
    assert fit(alike, apart=True).pair_s == 0 and fit(alike, apart=True).token_s == pytest.approx(0.4 / 8192)
    assert fit([], apart=True) == UpdateCosts(None, None, None, None, None, None, largest=0)


# ---- the cache ---------------------------------------------------------------------------------------------------------------------------


def test_costs_are_measured_once(tmp_path: Path) -> None:
    asked: list[bool] = []

    def measure() -> UpdatePasses:
        asked.append(True)
        return MEASURED

    def updates(key: str) -> UpdateCosts | None:
        return Prober(folder=tmp_path).updates(key, measure, free_bytes=0, apart=True)

    first = updates("a model on a device")
    assert updates("a model on a device") == first and asked == [True]
    updates("another")
    assert asked == [True, True]
    (file, *_) = tmp_path.glob("*.json")
    whole = file.read_text()
    for damage in ("", "{}", "[]", whole.replace(f'"form": {FORM}', '"form": 0'), whole.replace('"tokens": 512', '"tokens": -1')):
        assert damage != whole
        file.write_text(damage)
        assert updates("a model on a device") == updates("another") == first
    assert len(asked) == 7, "a damaged file is measured again"


def test_that_memory_ran_out_is_known_at_the_next_start_too_unless_more_is_free(tmp_path: Path) -> None:
    asked: list[int] = []

    def updates(found: UpdatePasses, free_bytes: int) -> UpdateCosts | None:
        def measure() -> UpdatePasses:
            asked.append(free_bytes)
            return replace(found, free_bytes=free_bytes)

        return Prober(folder=tmp_path).updates(f"{len(found.passes)} passes", measure, free_bytes=free_bytes, apart=True)

    smaller = UpdatePasses(tuple(UpdatePass(tokens, tokens * 64, 10**9 + 10**6 * tokens, 0.1) for tokens in (512, 2048)), ran_out_at=16384)
    first = updates(smaller, 50 * GIB)
    assert first is not None and first.ran_out_at == 16384 and first.largest == 2048
    assert first.bytes(16384) == pytest.approx(10**9 + 16384 * 10**6) and first.seconds(16384, 1) is None
    assert updates(smaller, 50 * GIB) == updates(smaller, 40 * GIB) == first and asked == [50 * GIB]
    updates(smaller, 80 * GIB)
    assert asked == [50 * GIB, 80 * GIB], "another program may have had the memory"
    (file,) = tmp_path.glob("*.json")
    file.write_text(file.read_text().replace('"ran_out_at": 16384', '"ran_out_at": "16384"'))
    assert updates(smaller, 80 * GIB) == first and len(asked) == 3, "a damaged file is measured again"
    none = UpdatePasses((), ran_out_at=512)
    for _ in range(2):
        assert updates(none, GIB) == UpdateCosts(None, None, None, None, None, None, largest=0, ran_out_at=512)
    assert len(asked) == 4
    assert updates(UpdatePasses(()), 2 * GIB) is None, "nothing could be measured"


def test_rollouts_are_measured_once_and_not_without_a_clock(tmp_path: Path) -> None:
    asked: list[str] = []

    def measure() -> list[RolloutPass]:
        asked.append("rollouts")
        return [RolloutPass(2, 4, 16, tokens, tokens * 0.01, tokens * 0.012) for tokens in RESPONSES]

    assert Prober(clock=False, folder=tmp_path).rollouts("an engine", measure) == () and not asked
    first = Prober(folder=tmp_path).rollouts("an engine", measure)
    assert Prober(folder=tmp_path).rollouts("an engine", measure) == first == measure() and len(asked) == 2
    assert Prober(clock=False, folder=tmp_path).rollouts("an engine", measure) == (), "nor from the cache"


def test_a_deterministic_run_reads_no_clock_also_not_from_the_cache(tmp_path: Path) -> None:
    Prober(folder=tmp_path).updates("it", lambda: MEASURED, free_bytes=0, apart=True)
    found = Prober(clock=False, folder=tmp_path).updates("it", lambda: pytest.fail("it is in the cache"), free_bytes=0, apart=True)
    assert found is not None and found.fixed_s is found.token_s is found.pair_s is found.host_s is None and found.bytes(1000)
    config = configuration.parse({**PLAIN, "run": {"steps": 1, "probe": True, "deterministic": True, "device": "cpu"}}, here=False)
    assert prober_for(config) == Prober(clock=False)


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it gives where the system knows no home
    assert probe.cache_folder() is None
    for _ in range(2):
        assert Prober().updates("it", lambda: MEASURED, free_bytes=0, apart=True) is not None


def test_the_cache_is_where_the_user_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert probe.cache_folder() == tmp_path / "fulltilt" / "probes"
    for unset in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert probe.cache_folder() == Path.home() / ".cache" / "fulltilt" / "probes"


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert Prober(folder=tmp_path / "file").updates("it", lambda: MEASURED, free_bytes=0, apart=True) is not None


@pytest.mark.parametrize(("given", "wanted"), [({}, False), ({"probe": False}, False), ({"probe": True}, True)])
def test_on_a_cpu_nothing_is_measured_unless_it_is_asked_for(given: dict[str, bool], wanted: bool) -> None:
    config = configuration.parse({**PLAIN, "run": {"steps": 1, "device": "cpu", **given}}, here=False)
    assert (prober_for(config) is not None) is wanted


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (('train.shard="full"',), 'train.shard = "full"'),
        (("train.tensor_parallel=2",), "train.tensor_parallel = 2"),
        (("train.expert_parallel=2",), "train.expert_parallel = 2"),
        (("train.sequence_parallel=2",), "train.sequence_parallel = 2"),
        (("critic.tensor_parallel=2",), "critic.tensor_parallel = 2"),
        (("critic.tensor_parallel=2", "cluster.roles={critic=2}"), None),
        (("train.sequence_parallel=1", 'train.shard="optimizer"'), None),
        (("rollout.tensor_parallel=2",), None),
        (("train.tensor_parallel=2", "run.probe=auto"), None),
        (("train.tensor_parallel=2", "run.probe=false"), None),
    ],
)
def test_a_probe_that_cannot_measure_is_refused(overrides: tuple[str, ...], said: str | None) -> None:
    plain = {**PLAIN, "algorithm": {"name": "ppo"}, "cluster": {"workers": 4}, "run": {"steps": 1, "probe": True}}
    config = configuration.parse(plain, overrides, here=False)
    found = list(legal.wrong_probe(config, build(config), "cpu"))
    assert found == (
        [
            f"run.probe: true, but nothing can be measured with {said}: a micro-batch of one worker alone would wait for the others. "
            "Remove one of the keys"
        ]
        if said
        else []
    )
    if said:
        assert set(found) <= set(checks.wrong_settings(config, build(config), "cpu")), "with all other mistakes"


def test_where_passes_wait_for_others_the_run_says_that_nothing_is_measured() -> None:
    """`auto` has divided something, which is known once workers are made."""
    config, facts = setting("algorithm.name=ppo")
    device, waits = torch.device("cpu"), "workers share out parameters (train.shard)"
    own = WorkerProbe(Prober(), config, facts, device, ALONE, waits)
    planned = plan_roles(config, facts)
    assert own.sized(planned, {}, Residents(), keeps=False) is planned
    (note,) = own.notes
    assert note == f"probe: nothing of the actor is measured: {waits}, and a micro-batch of one worker alone would wait for the others"
    assert not WorkerProbe(None, config, facts, device, ALONE, waits).notes, "nothing was to be measured"
    asked, _ = setting("algorithm.name=ppo", "run.probe=true")
    with pytest.raises(UserError, match=r"run.probe: true, but nothing can be measured: workers share out parameters .* Remove the key"):
        WorkerProbe(Prober(), asked, facts, device, ALONE, waits)
    of_critic = replace(facts, roles={"critic": facts.roles["actor"]})
    assert WorkerProbe(Prober(), asked, of_critic, device, ALONE, waits).notes, "the actor is measured, on workers of its own"


def test_why_a_pass_waits_for_other_workers() -> None:
    def why(shards: int = 0, *, tensor: int = 1, sequence: int = 1, meets: bool = False) -> str | None:
        role: Any = SimpleNamespace(tensor=SimpleNamespace(size=tensor), sequence=SimpleNamespace(size=sequence), meets=meets)
        shared: Any = SimpleNamespace(shards=[None] * shards)
        return making.why_passes_wait({"critic": role}, shared)

    assert why() is None
    assert why(1) == "workers share out parameters (train.shard)"
    assert why(tensor=2) == "workers divide the layers of the critic (tensor_parallel)"
    assert why(meets=True) == "workers divide the experts of the critic (expert_parallel)"
    assert why(sequence=2) == "workers share micro-batches of the critic (sequence_parallel)"


# ---- budgets -----------------------------------------------------------------------------------------------------------------------------


def budget_with(costs: UpdateCosts, *overrides: str, longest: int = 512, memory: int = 80 * GIB) -> int:
    config, facts = setting(*overrides, longest=longest, memory=memory)
    roles = budgets_by_costs(config, facts, plan_roles(config, facts), {"actor": costs})
    return make_plan(config, facts, roles=roles).budgets.token_budget


def setting(*overrides: str, longest: int = 512, memory: int = 80 * GIB) -> tuple[Any, Facts]:
    config = configuration.parse(PLAIN, overrides, here=False)
    role = RoleFacts.of_shape(Shape.named("1.5B"), config, "cuda", learns=True)
    return config, Facts("cuda", memory, 512 * GIB, {"actor": role}, longest, 1)


def costs_of(host: float, token: float, *, token_bytes: float = 1e4) -> UpdateCosts:
    return UpdateCosts(1e8, token_bytes, host, 0.0, token, 0.0, largest=4096)


def test_a_budget_with_which_memory_ran_out_is_halved_until_it_does_not() -> None:
    """Whatever was foreseen, and however long the device waits: what ran out does not fit."""
    usual = TOKEN_BUDGET["cuda"]
    for ran_out_at, expected in ((usual + 1, usual), (usual, usual // 2), (usual - 384, usual // 2), (2049, 2048), (64, LEAST_BUDGET)):
        assert budget_with(replace(costs_of(100.0, 5e-5), ran_out_at=ran_out_at)) == expected
        nothing_fitted = UpdateCosts(None, None, None, None, None, None, largest=0, ran_out_at=ran_out_at)
        assert budget_with(nothing_fitted) == expected
        assert budget_with(nothing_fitted, "train.offload_activations=true") == expected
    assert budget_with(replace(costs_of(100.0, 5e-5), ran_out_at=64), "actor.token_budget=9000") == 9000, "given by hand"


def test_a_budget_is_not_halved_where_the_longest_sample_alone_is_too_much() -> None:
    usual = TOKEN_BUDGET["cuda"]
    costs = replace(costs_of(0.0, 5e-5), ran_out_at=usual)
    assert budget_with(costs, longest=usual + 1) == usual
    assert budget_with(costs, longest=usual // 2 + 1) == usual // 2, "beside others it is"
    assert budget_with(replace(costs, ran_out_at=usual // 2), longest=usual // 2 + 1) == usual // 2


def test_a_budget_grows_while_the_device_waits_and_fits_with_headroom() -> None:
    usual = TOKEN_BUDGET["cuda"]
    assert budget_with(costs_of(0.01, 5e-5)) == usual, "the device does not wait"
    assert budget_with(costs_of(0.8, 5e-5)) == 2 * usual, "with 32768 tokens it does not any more"
    assert budget_with(costs_of(100.0, 5e-5)) == ENLARGED * usual
    config, facts = setting()
    made = Decisions({role: vars(own) for role, own in plan_roles(config, facts).settings.items()})
    left = left_for_update(config, made, facts, "actor")
    for share in (0.9, 1.1):
        token_bytes = share * (1 - HEADROOM) * left / (2 * usual)
        expected = 2 * usual if share < 1 else usual
        assert budget_with(costs_of(0.8, 5e-5, token_bytes=token_bytes)) == expected


def test_a_budget_shrinks_to_what_fits() -> None:
    config, facts = setting()
    made = Decisions({role: vars(own) for role, own in plan_roles(config, facts).settings.items()})
    left = left_for_update(config, made, facts, "actor")
    found = budget_with(costs_of(100.0, 5e-5, token_bytes=left / 5000))
    assert found == 4096 and 1e8 + found * left / 5000 <= (1 - HEADROOM) * left
    assert budget_with(costs_of(100.0, 5e-5, token_bytes=float(left))) == LEAST_BUDGET
    assert budget_with(costs_of(100.0, 5e-5, token_bytes=float(left)), "actor.token_budget=9000") == 9000, "given by hand"


def test_a_budget_stays_that_takes_what_was_foreseen() -> None:
    """The plan has left room of its own: only what takes more than it has foreseen is given 15% on top."""
    config, facts = setting()
    planned = plan_roles(config, facts)
    made = Decisions({role: vars(own) for role, own in planned.settings.items()})
    tokens = TOKEN_BUDGET["cuda"]
    foreseen = facts.roles["actor"].update_bytes(tokens, made.keys["actor"])
    facts = replace(facts, device_bytes=facts.device_bytes - int(0.93 * (left_for_update(config, made, facts, "actor") - foreseen)))
    left = left_for_update(config, made, facts, "actor")
    assert (1 - HEADROOM) * left < foreseen < left
    for share, expected in ((1.0, tokens), (1.2, tokens // 2)):
        costs = {"actor": costs_of(0.0, 5e-5, token_bytes=(share * foreseen - 1e8) / tokens)}
        assert budgets_by_costs(config, facts, planned, costs).budgets["actor"] == expected


def test_without_a_clock_a_budget_only_shrinks() -> None:
    memory_alone = replace(costs_of(0, 0), host_s=None, fixed_s=None, token_s=None, pair_s=None)
    config, facts = setting()
    assert budget_with(memory_alone) == make_plan(config, facts).budgets.token_budget


def test_the_plan_says_what_was_measured() -> None:
    config, facts = setting()
    roles = budgets_by_costs(config, facts, plan_roles(config, facts), {"actor": costs_of(1.0, 5e-5)})
    (line,) = (text for text in make_plan(config, facts, roles=roles).words if text.startswith("probe:"))
    assert (
        "takes 9.8 KiB a token and 50 us a token and at least 1e+03 ms a micro-batch" in line
        and "the largest there may be, 32768 tokens, takes" in line
    )


# ---- measured here -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_run(tmp_path: Path, model_folders, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def test_costs_fitted_here_hold_for_other_sizes_and_change_nothing(small_run: Path) -> None:
    parts = assemble(configuration.load("run.toml"))
    try:
        trainer = parts.worker.trainers["actor"]
        before = {name: own.detach().clone() for name, own in trainer.role.model.named_parameters()}
        vocabulary = parts.worker.plan and parts.worker.roles["actor"].model.config.vocab_size
        random = torch.get_rng_state()
        passes = measure_updates(trainer, 2048, 32, vocabulary, NO_LIMIT, clock=True).passes
        assert len(passes) == 4 and all(own.seconds and own.bytes for own in passes)
        found = fit(passes, apart=False)
        for tokens in (1000, 3000):
            held_out = measure_size(trainer, MeasuredSize(tokens, 20, 2), vocabulary, clock=True)
            assert found.bytes(held_out.tokens) == pytest.approx(held_out.bytes, rel=0.03)
            print(f"{tokens} tokens: {held_out.seconds:.4f} s, predicted {found.seconds(held_out.tokens, held_out.pairs):.4f} s")
        trainer.optimizer.zero_grad()
        assert all(torch.equal(own, before[name]) for name, own in trainer.role.model.named_parameters())
        assert torch.equal(random, torch.get_rng_state()) and trainer.optimizer.updates == 0
    finally:
        parts.close()


@pytest.mark.long
def test_a_run_measures_once_and_learns_what_it_would_have_learned(small_run: Path) -> None:
    short = ("run.steps=1", "run.eval_before=false", "run.eval_every=0")
    runs.train(small_run, *short, "run.dir=plain")
    runs.train(small_run, *short, "run.dir=probed", "run.probe=true")
    (file,) = (small_run.parent / "cache" / "fulltilt" / "probes").glob("*.json")
    written = file.stat().st_mtime_ns
    runs.train(small_run, *short, "run.dir=again", "run.probe=true")
    assert file.stat().st_mtime_ns == written
    plans = {name: json.loads((small_run / name / "plan.json").read_text()) for name in ("plain", "probed", "again")}
    assert any(text.startswith("probe: an update of the actor takes") for text in plans["probed"]["words"])
    assert plans["probed"]["budgets"] == plans["again"]["budgets"]
    losses = [json.loads((small_run / name / "metrics.jsonl").read_text().splitlines()[-1])["actor/pg_loss"] for name in plans]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and losses[1] == losses[2]


@pytest.mark.long
def test_a_measured_rollout_leaves_the_engine_as_it_was(small_run: Path, tmp_path: Path) -> None:
    parts = assemble(configuration.load("run.toml"))
    try:
        worker = parts.worker
        engine = worker.engine
        limits = before = engine.limits
        random = torch.get_rng_state()
        facts = RoleFacts.of_shape(Shape.named("1.5B"), parts.crew.config, "cpu", learns=True)
        facts = replace(facts, shape=replace(facts.shape, vocabulary=worker.roles["actor"].model.config.vocab_size))

        where, device = environment(torch.device("cpu"), {}), torch.device("cpu")
        limits = replace(limits, longest=12 + 256)

        def found() -> Any:
            sampling = Sampling(4, 256, stop=("7",))
            return probe_rollouts(Prober(folder=tmp_path), engine, limits, facts, sampling, 3, 12, where, device, NO_LIMIT, notes)

        notes: list[str] = []
        for fault in ("decode", "prefill", "cache"):
            faults.install(worker, f"actor.{fault}:1")
            assert list(found()) == [], "the engine has gone on with less, which takes longer than in a run"
            assert notes.pop().startswith("probe: rollouts count as not measured, for memory ran out in one: out of memory on purpose")
            assert engine.limits == before and not list(tmp_path.glob("*.json"))
        short, long = found()
        assert not notes
        assert (short.prompts, short.samples, short.prompt_tokens) == (long.prompts, long.samples, long.prompt_tokens) == (1, 4, 12 + 64)
        assert limits.blocks < 2 * 4 * 11, "a second prompt would not fit"
        assert (short.response_tokens, long.response_tokens) == RESPONSES
        assert 0 < short.decode_seconds < short.seconds and short.seconds < long.seconds and short.decode_seconds < long.decode_seconds
        assert found() == [short, long], "it is in the cache"
        assert engine.limits == before and not list(engine.memory()) and engine.take_limits().failures == ()
        assert torch.equal(random, torch.get_rng_state())
    finally:
        parts.close()


def test_rollouts_of_another_engine_or_with_other_limits_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    config, facts = setting("algorithm.samples_per_prompt=4", "algorithm.prompts_per_step=8")
    limits = EngineLimits(blocks=1000, block_tokens=16, max_seqs=64, max_batched_tokens=4096, longest=1024)
    monkeypatch.setattr(making, "environment", lambda *_: ("a GPU",))
    keys: list[str] = []
    known: Any = SimpleNamespace(clock=True, rollouts=lambda key, measure: keys.append(key) or ())
    engine: Any = None  # nothing is measured

    def ask(name: str = "native", **changed: Any) -> None:
        named = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": name})})
        own = WorkerProbe(known, named, facts, torch.device("cuda"), ALONE)
        own.found = Probed(updates=MEASURED.passes)
        own.measure_rollouts(engine, replace(limits, **changed), 100)
        assert not own.notes

    ask()
    ask(blocks=2000)
    assert keys[0] == keys[1], "the number of blocks follows what is free"
    ask("another")
    for changed in ({"max_batched_tokens": 8192}, {"chunked_prefill": False}, {"prefix_sharing": False}, {"cuda_graphs": True}):
        ask(**changed)
    assert len(set(keys)) == 6


def test_measured_prompts_fit_what_a_run_may_have() -> None:
    limits = EngineLimits(blocks=10_000, block_tokens=16, max_seqs=256, max_batched_tokens=16384, longest=200 + 1024)

    def sizes(sampling: Sampling, prompts: int, longest: int = 200, limits: EngineLimits = limits) -> tuple[int, int]:
        asked = measured_prompts(limits, 1000, sampling, prompts, longest)
        return len(asked), len(asked[0].ids) if asked else 0

    assert sizes(Sampling(8, 1024), 32) == (32, 200 + 256), "as many as in a step, in the middle of a response"
    count, tokens = sizes(Sampling(1, 1024), 10**6)
    assert count == 256 and count * tokens <= MOST_PROMPT_TOKENS
    count, tokens = sizes(Sampling(8, 1024), 32, limits=replace(limits, blocks=1000))
    assert 0 < count * 8 * (tokens + RESPONSES[-1]) <= 1000 * 16, "what the cache holds"
    assert sizes(Sampling(8, 64), 4, 20, replace(limits, longest=84)) == (4, 4), "no sample is longer than a run's"
    assert sizes(Sampling(8, 16), 4, 20, replace(limits, longest=36)) == (0, 0), "responses are shorter than those that are measured"
    assert sizes(Sampling(8, 1024), 4, limits=replace(limits, blocks=3)) == (0, 0)


@pytest.mark.parametrize("given", [{}, {"actor.token_budget": 16384}, {"kept": True}])
def test_that_memory_ran_out_is_told_also_where_budgets_stay(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config, facts = setting(*(f"{key}={value}" for key, value in given.items() if key != "kept"))
    costs = {"actor": replace(costs_of(0.0, 5e-5), ran_out_at=16384)}
    monkeypatch.setattr(WorkerProbe, "_costs", lambda *_: costs)
    own, planned = WorkerProbe(Prober(), config, facts, torch.device("cpu"), ALONE), plan_roles(config, facts)
    trainers: Any = {"actor": None}
    found = own.sized(planned, trainers, Residents(), keeps=bool(given.get("kept")))
    (note,) = own.notes
    assert note.startswith("probe: memory ran out in an update of the actor with 16384 tokens: its ")
    if given:
        assert found.budgets == planned.budgets and "stay as they were planned" in note
    else:
        assert found.budgets["actor"] == 8192 and note.endswith("token budget is 8192 instead of 16384")


def test_smaller_micro_batches_stay_measured_where_memory_runs_out_in_a_larger_one(small_run: Path) -> None:
    parts = assemble(configuration.load("run.toml"))
    try:
        trainer, vocabulary = parts.worker.trainers["actor"], parts.worker.roles["actor"].model.config.vocab_size
        run, parameters = trainer.role.run, list(trainer.role.model.parameters())

        def limited(most: int, micro: MicroBatch, *given: Any) -> Any:
            found = run(micro, *given)
            if len(micro.ids) > most:
                found[0].register_hook(faults.fail)
            return found

        for most, tokens in ((256, [64, 128, 256]), (100, [64]), (0, [])):
            trainer.role.run = partial(limited, most)
            found = measure_updates(trainer, 2048, 32, vocabulary, NO_LIMIT, clock=True)
            assert [own.tokens for own in found.passes] == tokens and found.ran_out_at == 2 * max([32, *tokens])
            assert all(own.grad is None or not own.grad.any() for own in parameters)
        trainer.role.run = lambda *_: [][0]
        with pytest.raises(IndexError):
            measure_updates(trainer, 2048, 32, vocabulary, NO_LIMIT, clock=True)
    finally:
        parts.close()


def test_roles_that_wait_are_away_while_an_update_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the run: else memory runs out that the run has."""
    config, facts = setting()
    done: list[str] = []

    class Known:
        clock = True

        def updates(self, key: str, measure: Any, **_: Any) -> UpdateCosts:
            return fit(measure().passes, apart=True)

    trainer: Any = SimpleNamespace(role=SimpleNamespace(device=torch.device("cpu")))
    facts = replace(facts, roles={**facts.roles, "critic": facts.roles["actor"]})
    monkeypatch.setattr(probing, "measure_updates", lambda trainer, *_, **__: done.append("measure") or MEASURED)
    settings, largest = plan_roles(config, facts).settings, {"actor": 512, "critic": 512}
    trainers, limits = {"actor": trainer, "critic": trainer}, {"actor": NO_LIMIT, "critic": NO_LIMIT}
    known: Any = Known()
    probing.probe_updates(known, trainers, facts.roles, settings, largest, 64, (), limits, lambda role: done.append(f"bring {role}"), [])
    assert done == ["bring actor", "measure", "bring critic", "measure"]


def test_a_probe_that_fails_ends_no_run() -> None:
    notes: list[str] = []
    assert measured_if_possible(lambda: {"actor": 1}, {}, notes) == {"actor": 1} and not notes
    assert measured_if_possible(lambda: {"actor": [][0]}, {}, notes) == {}
    assert notes == ["the probe has measured nothing: list index out of range"]
    with pytest.raises(KeyboardInterrupt):
        measured_if_possible(interrupt, {}, notes)


def interrupt() -> dict[str, int]:
    raise KeyboardInterrupt


def test_nothing_is_begun_that_would_end_too_late() -> None:
    assert NO_LIMIT.allows(1e9) and TimeLimit(1e9, clock=True).allows(1e6)
    assert not TimeLimit(10, clock=True).allows(11) and not TimeLimit(0, clock=True).allows()
    limit = TimeLimit(1e-9, clock=True)
    assert limit.allows(), "what is not measured, such as a pass that compiles, takes none of its seconds"
    with limit.counted():
        pass
    assert not limit.allows()


def test_no_rollout_is_begun_without_time_for_those_of_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the first one, whose result alone is worth nothing."""
    now, made = [0.0], list[int]()
    monkeypatch.setattr(probing.time, "perf_counter", lambda: now[0])

    def generate(_: Any, sampling: Sampling, *__: Any) -> list[None]:
        made.append(sampling.max_new_tokens)
        now[0] += 1 + sampling.max_new_tokens / 10  # seconds of the prompts, and of decoding
        return []

    engine: Any = SimpleNamespace(generate=generate, stats=lambda: SimpleNamespace(decode_seconds=made[-1] / 10))

    def measured(seconds: float) -> tuple[list[int], list[int]]:
        made.clear()
        limit = TimeLimit(seconds, clock=True)
        asked = [Prompt(0, np.arange(4), "")]
        found = list(probing.measure_rollouts(engine, asked, Sampling(2, 256), torch.device("cpu"), limit))
        return [own.response_tokens for own in found], list(made)

    short, long = RESPONSES
    of_short, of_long = 1 + short / 10, 1 + long / 10
    assert measured(0) == ([], [])
    assert measured(2.9 * of_short) == ([], [short])
    assert measured(3.1 * of_short) == ([short], [short] * 3)
    assert measured(3 * of_short + 1.9 * of_long) == ([short], [short] * 3)
    assert measured(3 * of_short + 2.1 * of_long) == ([short, long], [short] * 3 + [long] * 2)


def test_a_probe_that_time_cuts_short_sizes_nothing_and_is_not_kept(small_run: Path, tmp_path: Path) -> None:
    """One pass alone would say that a micro-batch takes the same bytes whatever its tokens, so that any budget fits."""
    parts = assemble(configuration.load("run.toml"))
    try:
        trainer, vocabulary = parts.worker.trainers["actor"], parts.worker.roles["actor"].model.config.vocab_size
        found = measure_updates(trainer, 2048, 32, vocabulary, TimeLimit(1e-9, clock=True), clock=True)
        assert not found.complete and [own.tokens for own in found.passes] == [64], "the first size alone, after the pass that compiles"
        config, facts = setting()
        facts = replace(facts, roles={**facts.roles, "critic": facts.roles["actor"]})
        planned, asked, notes = plan_roles(config, facts), {"actor": 2048, "critic": 1024}, list[str]()
        trainers, limits = dict.fromkeys(facts.roles, trainer), {"actor": TimeLimit(1e-9, clock=True), "critic": NO_LIMIT}
        facts = replace(
            facts, roles={role: replace(own, shape=replace(own.shape, vocabulary=vocabulary)) for role, own in facts.roles.items()}
        )
        prober = Prober(folder=tmp_path / "folder of its own")
        for _ in range(2):
            costs = probing.probe_updates(prober, trainers, facts.roles, planned.settings, asked, 32, (), limits, lambda role: None, notes)
            assert list(costs) == ["critic"], "which has seconds of its own"
        (note, again) = notes
        assert note == again and note.startswith(
            "probe: updates of the actor count as not measured, and its token budget stays: 15 seconds"
        )
        assert len(list(prober.folder.glob("*.json"))) == 1
    finally:
        parts.close()


# ---- predictions -------------------------------------------------------------------------------------------------------------------------


def a_run() -> RunDescription:
    batch = BatchDescription(prompts=32, samples=8, minibatch_prompts=32, token_budget=32768)
    engine = EngineDescription(own_copy=False, max_seqs=256)
    gpu = Cluster(replace(accelerator("H200"), memory=140 * GIB))
    return RunDescription(
        Shape.named("0.5B"), gpu, Lengths(256, 512, 192.0, 512.0), engine=engine, batch=batch, old_logprobs=False, fused_head=True,
        fused_rope=True, fused_kernels=True, system=FULLTILT,
    )  # fmt: skip


@pytest.mark.parametrize("made", [Calibration(0.6, 1.2), Calibration(1.4, 0.8), Calibration(2.0, 1.0), Calibration(1.1, 0.92)])
def test_factors_are_found_again(made: Calibration) -> None:
    run, passes = a_run(), []
    for tokens, length in ((1024, 1024), (4096, 1024), (65536, 1024), (65536, 256)):
        own = UpdatePass(tokens, tokens * length)
        host, device = seconds_of_pass(run, own)
        passes.append(replace(own, seconds=max(made.host * host, made.passes * device)))
    found = calibrate(run, Probed(tuple(passes)))
    assert (found.host, found.passes) == pytest.approx((believed([made.host]), believed([made.passes])), rel=1e-6)
    # A run whose micro-batches keep the device busy takes as long as that says.
    large = replace(run, batch=replace(run.batch, token_budget=65536))
    scaled = [update_seconds(replace(large, calibration=own)).total for own in (replace(made, passes=believed([made.passes])), found)]
    assert scaled[1] == pytest.approx(scaled[0], rel=1e-6)
    if made.passes != 1:
        assert scaled[0] != pytest.approx(update_seconds(large).total, rel=0.03)
    assert calibrate(run, Probed(tuple(passes[:2]))).passes <= 1, "small ones wait for the host and say little of the device"


def test_half_of_what_noise_may_explain_counts_and_all_that_goes_beyond() -> None:
    assert believed([]) == believed([1.0]) == believed([0.9, 1.1]) == 1
    assert believed([1.1]) ** 2 == pytest.approx(1.1) and believed([1 / 1.1]) ** 2 == pytest.approx(1 / 1.1)
    assert believed([NOISE]) == pytest.approx(math.sqrt(NOISE)), "it does not jump where noise ends"
    assert believed([2.0]) == pytest.approx(2.0 / math.sqrt(NOISE)) and believed([0.5]) == pytest.approx(0.5 * math.sqrt(NOISE))
    assert believed([100.0]) < MOST and believed([0.001]) > 1 / MOST


def test_a_run_whose_activations_go_to_the_host_is_not_scaled() -> None:
    run, passes = a_run(), []
    for tokens in (1024, 4096, 65536):
        own = UpdatePass(tokens, tokens * 512)
        passes.append(replace(own, seconds=2 * max(seconds_of_pass(run, own))))
    assert calibrate(run, Probed(tuple(passes))) != AS_MODELLED
    assert calibrate(replace(run, offload_activations=True), Probed(tuple(passes))) == AS_MODELLED


def test_decode_steps_and_the_start_of_a_rollout_are_found_again() -> None:
    run, made = a_run(), Calibration(host=1.2, decoding=believed([1.25]), rollout_s=0.04)
    rollouts = []
    for tokens in RESPONSES:
        own = RolloutPass(32, 8, 256, tokens, 0.0, 0.0)
        steps, others = steps_and_others(replace(run, calibration=replace(AS_MODELLED, host=1.2)), own)
        rollouts.append(replace(own, decode_seconds=1.25 * steps, seconds=1.25 * steps + others + 0.04))
    found = of_rollouts(replace(run, calibration=replace(AS_MODELLED, host=1.2)), rollouts)
    assert (found.host, found.decoding, found.rollout_s) == pytest.approx((1.2, made.decoding, 0.04))
    longer = [generation_seconds(replace(run, calibration=own)).total for own in (AS_MODELLED, found, made)]
    assert longer[1] == pytest.approx(longer[2]) and longer[1] > 1.1 * longer[0]


def test_nothing_measured_changes_nothing_and_nonsense_little() -> None:
    run = a_run()
    assert calibrate(run, Probed()) == AS_MODELLED
    odd = Probed(
        (UpdatePass(1024, 1024 * 256, None, 100.0),), (RolloutPass(32, 8, 256, 16, 50.0, 50.0), RolloutPass(32, 8, 256, 80, 1e4, 1e4))
    )
    found = calibrate(run, odd)
    assert max(found.host, found.passes, found.decoding) <= MOST
    assert calibrate(run, Probed((), (RolloutPass(32, 8, 256, 16, 1.0, 1.0),))) == AS_MODELLED, "one rollout tells steps and start together"
