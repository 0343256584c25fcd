"""The probe: costs of updates, fitted to measured micro-batches, and token budgets that follow from them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import runs
import torch

from fulltilt import config as configuration
from fulltilt.cluster.assembly import assemble
from fulltilt.cluster.probing import measure_updates, micro_batch, one_pass
from fulltilt.loop.opening import prober_for
from fulltilt.plan import (
    ENLARGED,
    HEADROOM,
    LEAST_BUDGET,
    TOKEN_BUDGET,
    Decisions,
    Facts,
    RoleFacts,
    budgets_by_costs,
    left_for_update,
    make_plan,
    plan_roles,
)
from fulltilt.records import UpdateCosts, UpdatePass
from fulltilt.shape import Shape
from fulltilt.tune import probe
from fulltilt.tune.probe import Prober, fit, nonnegative_fit

GIB = 2**30
PLAIN: dict[str, Any] = {"model": {"path": "."}, "data": {"train": "."}, "run": {"steps": 1}}
SIZES = [(tokens, length) for tokens in (512, 1024, 2048, 4096) for length in (128, 512)]


def made_up(fixed: float, token: float, pair: float, *, fixed_bytes: float = 3e8, token_bytes: float = 1e5) -> list[UpdatePass]:
    """What would be measured if these were the costs."""
    found = []
    for tokens, length in SIZES:
        pairs = tokens // length * length**2
        found.append(UpdatePass(tokens, pairs, int(fixed_bytes + token_bytes * tokens), fixed + token * tokens + pair * pairs))
    return found


@pytest.mark.parametrize("costs", [(0.04, 3e-5, 2e-9), (0.0, 3e-5, 2e-9), (0.04, 3e-5, 0.0), (0.1, 0.0, 0.0)])
def test_known_costs_are_found_again(costs: tuple[float, float, float]) -> None:
    found = fit(made_up(*costs))
    assert (found.fixed_s, found.token_s, found.pair_s) == pytest.approx(costs, rel=1e-6, abs=1e-12)
    assert (found.fixed_bytes, found.token_bytes) == pytest.approx((3e8, 1e5), rel=1e-6)
    assert found.largest == 4096 and found.error < 1e-6


def test_noise_makes_no_cost_negative() -> None:
    """Where a true cost is 0, the unbounded solution is below it about half of the time."""
    for shift in range(1, 30):
        noisy = [
            replace(own, seconds=own.seconds * (1 + 0.02 * ((place * shift * 7) % 5 - 2))) for place, own in enumerate(made_up(0, 3e-5, 0))
        ]
        found = fit(noisy)
        assert min(found.fixed_s or 0, found.token_s or 0, found.pair_s or 0) >= 0 and found.error < 0.1
        assert found.seconds(65536, 65536 * 512) == pytest.approx(65536 * 3e-5, rel=0.25)


def test_too_few_measurements_and_none() -> None:
    assert nonnegative_fit([[1.0, 5.0]], [10.0]) in ([10.0, 0.0], [0.0, 2.0])
    only_memory = fit([UpdatePass(100, 10, 1000), UpdatePass(200, 20, 2000)])
    assert only_memory.seconds(100, 10) is None and only_memory.bytes(400) == pytest.approx(4000, abs=1)
    assert fit(made_up(0.04, 3e-5, 2e-9)[:3]).fixed_s is None
    assert fit([]) == UpdateCosts(None, None, None, None, None, largest=0)


# ---- the cache ---------------------------------------------------------------------------------------------------------------------------


def test_costs_are_measured_once(tmp_path: Path) -> None:
    asked: list[bool] = []

    def measure(clock: bool) -> list[UpdatePass]:
        asked.append(clock)
        return made_up(0.04, 3e-5, 2e-9)

    prober = Prober(folder=tmp_path)
    first = prober("a model on a device", measure)
    assert prober("a model on a device", measure) == first and asked == [True]
    prober("another", measure)
    assert asked == [True, True]
    (file, *_) = tmp_path.glob("*.json")
    for damage in ("", "{}", "[]", file.read_text().replace('"form": 1', '"form": 0'), file.read_text().replace("e-05", "e999")):
        file.write_text(damage)
        prober("a model on a device", measure), prober("another", measure)
    assert len(asked) == 7, "a damaged file is measured again"


def test_a_deterministic_run_reads_no_clock_also_not_from_the_cache(tmp_path: Path) -> None:
    Prober(folder=tmp_path)("it", lambda clock: made_up(0.04, 3e-5, 2e-9))
    found = Prober(clock=False, folder=tmp_path)("it", lambda clock: pytest.fail("it is in the cache"))
    assert found is not None and found.fixed_s is found.token_s is found.pair_s is None and found.bytes(1000)
    asked: list[bool] = []
    Prober(clock=False, folder=tmp_path)("other", lambda clock: asked.append(clock) or [])
    assert asked == [False]
    config = configuration.parse({**PLAIN, "run": {"steps": 1, "probe": True, "deterministic": True, "device": "cpu"}}, here=False)
    assert prober_for(config) == Prober(clock=False)


def test_the_cache_is_where_the_user_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert probe.cache_folder() == tmp_path / "fulltilt" / "probes"
    for unset in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert probe.cache_folder() == Path.home() / ".cache" / "fulltilt" / "probes"


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert Prober(folder=tmp_path / "file")("it", lambda clock: made_up(0.04, 3e-5, 2e-9)) is not None


@pytest.mark.parametrize(("given", "wanted"), [({}, False), ({"probe": False}, False), ({"probe": True}, True)])
def test_nothing_is_measured_unless_it_is_asked_for(given: dict[str, bool], wanted: bool) -> None:
    config = configuration.parse({**PLAIN, "run": {"steps": 1, "device": "cpu", **given}}, here=False)
    assert (prober_for(config) is not None) is wanted


# ---- budgets -----------------------------------------------------------------------------------------------------------------------------


def budget_with(costs: UpdateCosts, *overrides: str, longest: int = 512, memory: int = 80 * GIB) -> int:
    config, facts = setting(*overrides, longest=longest, memory=memory)
    roles = budgets_by_costs(config, facts, plan_roles(config, facts), {"actor": costs})
    return make_plan(config, facts, roles=roles).budgets.token_budget


def setting(*overrides: str, longest: int = 512, memory: int = 80 * GIB) -> tuple[Any, Facts]:
    config = configuration.parse(PLAIN, overrides, here=False)
    role = RoleFacts.of_shape(Shape.named("1.5B"), config, "cuda", learns=True)
    return config, Facts("cuda", memory, 512 * GIB, {"actor": role}, longest, 1)


def costs_of(fixed: float, token: float, *, token_bytes: float = 1e4) -> UpdateCosts:
    return UpdateCosts(1e8, token_bytes, fixed, token, 0.0, largest=4096)


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


def test_without_a_clock_a_budget_only_shrinks() -> None:
    memory_alone = replace(costs_of(0, 0), fixed_s=None, token_s=None, pair_s=None)
    config, facts = setting()
    assert budget_with(memory_alone) == make_plan(config, facts).budgets.token_budget


def test_the_plan_says_what_was_measured() -> None:
    config, facts = setting()
    roles = budgets_by_costs(config, facts, plan_roles(config, facts), {"actor": costs_of(1.0, 5e-5)})
    (line,) = (text for text in make_plan(config, facts, roles=roles).words if text.startswith("probe:"))
    assert "takes 9.8 KiB a token and 50 us a token and 1e+03 ms a micro-batch" in line and "auto leaves 15% free" in line


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
        passes = list(measure_updates(trainer, 2048, 32, vocabulary, clock=True))
        assert len(passes) == 4 and all(own.seconds and own.bytes for own in passes)
        found = fit(passes)
        for tokens in (1000, 3000):
            held_out = one_pass(trainer, micro_batch(tokens, 20, vocabulary), clock=True)
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
