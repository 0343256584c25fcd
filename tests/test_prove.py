"""`fulltilt prove`: every knob has a proof, proofs hold, and they stop holding when a knob is lost on its way or changes a gradient."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rich.console
import runs
import torch

from fulltilt import knobs
from fulltilt.algo.build import build
from fulltilt.cluster import checks, making, sizes, worker
from fulltilt.footprint import HeadOptions
from fulltilt.memory import recompute
from fulltilt.model.fuse import ROUNDING
from fulltilt.plan import legal
from fulltilt.proofs import measure, run, setup
from fulltilt.proofs.cases import GRADIENT_TOLERANCE, ProofCase, all_cases
from fulltilt.proofs.measure import Measurement
from fulltilt.proofs.run import ProofResult, ProofRunner, choose, provable, prove
from fulltilt.proofs.setup import ProofSetup, step_key
from fulltilt.proofs.step import WatchedStep
from fulltilt.records import UserError
from fulltilt.rollout.stats import EngineStats
from fulltilt.training import roles

ALL_ROLES = {"actor", "sft", "critic", "ref", "reward_model"}
LEARN = {"actor", "sft", "critic"}
# Keys of [train] are the actor's and those of roles that have none of their own. A new one needs a line here, and a proof for each.
OF_TRAIN = {
    "packing": {"actor", "sft", "ref"},
    "sequence_parallel": {"sft"},
    "recompute": {"actor", "sft"},
    "recompute_layers": LEARN,
    "recompute_method": LEARN,
    "offload_activations": {"actor", "sft"},
    "offload_params": {"actor"},  # in SFT there is no phase in which they could be away
    "offload_optimizer": {"actor", "sft"},
    "offload_grads": LEARN,
    "fused_head": {"actor", "sft", "ref"},
    "entropy_chunk": {"actor", "sft"},
    "entropy_recompute": {"actor"},  # SFT has no entropy bonus
    "head_recompute": {"actor", "sft"},
    "fused_layers": ALL_ROLES,
    "compile": ALL_ROLES,
    **{
        key: {"sft"}
        for key in ("balance", "tensor_parallel", "expert_parallel", "shard", "shard_size", "reshard_after_forward", "forward_prefetch")
    },
}


def roles_of(knob: str) -> set[str]:
    section, _, key = knob.partition(".")
    if section == "train":
        return OF_TRAIN[key]
    if section == "cluster":
        return {"critic"} if key == "roles" else {"sft"}
    if section != "rollout" and key.endswith("_parallel"):  # in other processes gradients are compared, of a role that learns from this one
        return {"critic"} if section == "critic" else {"actor"}
    learns_from_rows = section == "actor" and key != "forward_token_budget"
    return {section} | ({"sft"} if learns_from_rows else set())


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ProofSetup:
    return ProofSetup(torch.device("cpu"), tmp_path_factory.mktemp("setup"))


@pytest.fixture(scope="module")
def on_cuda(tmp_path_factory: pytest.TempPathFactory) -> ProofSetup:
    """As it is made on CUDA. Models are made on the CPU, so that only what is free there has to be invented."""
    made = ProofSetup(torch.device("cuda"), tmp_path_factory.mktemp("setup"))
    made.share_of_free = lambda count: count / (80 << 30)  # type: ignore[method-assign]
    return made


def cases_of(where: ProofSetup, *names: str, role: str | None = None) -> list[ProofCase]:
    found = [case for case in all_cases(where) if case.knob in names and role in (None, case.role)]
    assert {case.knob for case in found} == set(names)
    return found


def results_of(cases: list[ProofCase], where: ProofSetup) -> list[ProofResult]:
    return list(ProofRunner(where, cases).results())


# -- completeness -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["small", "on_cuda"])
def test_every_knob_is_proved_for_every_role_that_has_it(device: str, request: pytest.FixtureRequest) -> None:
    cases = all_cases(request.getfixturevalue(device))
    proved = {knob: {case.role for case in cases if case.knob == knob} for knob in {case.knob for case in cases}}
    assert proved == {knob.name: roles_of(knob.name) for knob in knobs.LEDGER if provable(knob)}


def test_what_is_built_and_no_part_of_the_algorithm_is_to_be_proved() -> None:
    left_out = {knob.name for knob in knobs.LEDGER if knob.built and not provable(knob)}
    assert left_out == {knob.name for knob in knobs.LEDGER if knob.must_change.startswith("nothing: it is part of the algorithm")}
    assert provable(next(knob for knob in knobs.LEDGER if knob.name == "rollout.preemption"))  # it takes no value, and happens


@pytest.mark.long
def test_on_cuda_every_setting_is_legal(on_cuda: ProofSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configurations are whole, and no role refuses them: as far as that can be seen without a device."""
    monkeypatch.setattr(ProofSetup, "_two_nodes", lambda self: "10.0.0.1:6379")
    monkeypatch.setattr(setup, "make_model", lambda model, folder, scalar=False: folder.mkdir() or (folder / "config.json").touch())
    for case in all_cases(on_cuda):
        for number, step in enumerate(case.steps):
            if not (case.off_is_refused and number == 0):
                config = on_cuda.config(step)
                checks.refuse(checks.wrong_settings(config, build(config), config.run.device))
                on_gpu = "cuda", "float32" if case.kind == "rollout" else "bfloat16"
                assert (config.run.device, config.model.dtype) == (("cpu", "float64") if case.knob == "cluster.nodes" else on_gpu)


# -- what is found ----------------------------------------------------------------------------------------------------------------------

QUICK = ("rollout.release_memory", "rollout.prefix_sharing")


def test_proofs_hold(small: ProofSetup) -> None:
    records = results_of(cases_of(small, *QUICK), small)
    assert all(record.holds for record in records), [record for record in records if not record.holds]
    found = {(record.knob, record.metric): record for record in records}
    kept = found["rollout.release_memory", "KV cache on the device, update-actor"]
    assert kept.off and kept.on == 0 and kept.gradients_equal is True and kept.unit == "bytes"
    prefilled = found["rollout.prefix_sharing", "prompt tokens prefilled"]
    assert prefilled.off == 4 * prefilled.on  # type: ignore[operator]  # four samples of each prompt


def test_what_a_cpu_cannot_show(small: ProofSetup) -> None:
    """The rest must hold there: `make check` runs them all."""
    expected = {"rollout.cuda_graphs", "train.fused_layers"} | {knob.name for knob in knobs.LEDGER if ".offload_" in knob.name}
    cases = all_cases(small)
    assert {case.knob for case in cases if case.needs_cuda is not None} == expected
    assert {case.needs_cuda is None for case in cases if case.knob == "train.fused_layers"} == {True, False}  # its products are counted


def test_without_ray_several_machines_cannot_be_shown(small: ProofSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (record,) = results_of(cases_of(small, "cluster.nodes"), small)
    assert record.holds is None and record.off is None
    assert record.reason == 'cluster.address: workers on several machines need the package ray. pip install "fulltilt[ray]"'


@pytest.mark.gpu
@pytest.mark.timeout(1800)  # some hundred steps, each with models of its own, some of them compiled
def test_all_proofs_on_a_gpu() -> None:
    shown = [record for record in prove(device="cuda") if record.knob != "cluster.nodes" or record.holds is not None]  # Ray may be missing
    assert [record for record in shown if record.holds is not True] == []


def test_the_command_prints_one_document(tmp_path: Path) -> None:
    ended = runs.command_here(
        tmp_path, "prove", "reward_model.model.use_remove_padding", "train.offload_grads", "--json", "--device", "cpu"
    )
    assert ended.code == 0 and "running one ppo step with reward_model.packing = False" in ended.error
    records = json.loads(ended.out)
    fields = [field.name for field in dataclasses.fields(ProofResult)]
    assert fields == ["knob", "role", "metric", "unit", "off", "on", "gradients_equal", "holds", "reason"]
    assert [list(record) for record in records] == [fields] * 4
    assert [(record["knob"], record["holds"]) for record in records] == [
        *[("train.offload_grads", None)] * 3, ("reward_model.packing", True),
    ]  # fmt: skip
    assert records[-1]["off"] > records[-1]["on"] == 0 and records[-1]["gradients_equal"] is None
    assert "its outputs differ by 0 relative to their norm" in records[-1]["reason"]
    assert records[0]["reason"] == "train.offload_grads: true, but the run is on the CPU: its memory is the host's already. Remove the key"


def test_the_command_fails_with_a_knob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "releases_memory", lambda config: True)
    monkeypatch.setenv("COLUMNS", "150")
    ended = runs.command_here(tmp_path, "prove", "rollout.release_memory", "--device", "cpu", "--quiet")
    assert ended.code == 1 and ended.error == ""
    for words in (
        "Rollout",
        "must change: bytes held by the engine during the update",
        "DOES NOT HOLD",
        "1 proof: 0 hold, 1 do not hold, 0 cannot be shown here",
    ):
        assert words in ended.out


def test_the_table_has_every_record() -> None:
    records = [
        ProofResult("train.packing", "actor", "pad tokens", "tokens", 1200, 0, True, True, "gradients differ by 0"),
        ProofResult("rollout.cuda_graphs", "rollout", "launches", "launches", None, None, None, None, "there are no graphs here"),
        ProofResult("train.recompute", "critic", "activations", "bytes", 4096, 1024.0, False, False, "gradients differ by 1"),
    ]
    out = io.StringIO()
    rich.console.Console(file=out, width=150).print(run.table(records))
    rollout, training = out.getvalue().split("Training memory and speed")
    assert "rollout.cuda_graphs" in rollout and "not shown here" in rollout and "there are no graphs here" in rollout
    for words in ("must change: pad tokens computed (0 when on)", "1,200", "holds", "4.0 KiB", "1.0 KiB", "DIFFER", "DOES NOT HOLD"):
        assert words in training
    assert "3 proofs: 1 hold, 1 do not hold, 1 cannot be shown here" in training


# -- names ------------------------------------------------------------------------------------------------------------------------------


def test_names_in_any_spelling() -> None:
    assert choose(["actor_rollout_ref.rollout.enforce_eager", "train.recompute"]) == {"rollout.cuda_graphs", "train.recompute"}
    assert choose(["models.policy_trainer.packing"]) == {"actor.dynamic_batch", "train.packing"}  # one name for two knobs
    assert choose([]) == {knob.name for knob in knobs.LEDGER if provable(knob)}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("train.recompte", "train.recompte: unknown knob; the nearest is train.recompute. `fulltilt knobs` lists all of them"),
        ("actor.packing", "unknown knob; the nearest is "),
        ("nonsense", "nonsense: unknown knob. `fulltilt knobs` lists all of them"),
        ("algorithm.epochs", "algorithm.epochs: is part of the algorithm"),
        ("rollout.n", "rollout.n: algorithm.samples_per_prompt is part of the algorithm"),
        ("data.train_batch_size", "algorithm.prompts_per_step is part of the algorithm"),
        ("train.pipeline_parallel", "train.pipeline_parallel: is not built in this version"),
    ],
)
def test_what_cannot_be_proved_is_a_mistake(name: str, words: str) -> None:
    with pytest.raises(UserError) as refused:
        choose(["train.packing", name])
    assert words in str(refused.value)


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    ended = runs.command_here(tmp_path, "prove", "--device", "tpu")
    assert (ended.code, ended.out) == (2, "") and "--device tpu: cuda or cpu" in ended.error


# -- a knob that is lost on its way -----------------------------------------------------------------------------------------------------


def without(function: Callable[..., Any], **lost: Any) -> Callable[..., Any]:
    """The function, whose result forgets some of its fields."""
    return lambda *args, **kwargs: dataclasses.replace(function(*args, **kwargs), **lost)


# What is broken, how, and the knob and role that it is for.
LOST: dict[str, tuple[str, Callable[..., Any], str, str]] = {
    "recompute": ("keep_less", lambda model, settings: None, "train.recompute", "sft"),
    "the head's options": ("head_options", lambda settings: HeadOptions(), "train.fused_head", "ref"),
    "chunks of the entropy": ("head_options", without(making.head_options, entropy_chunk=None), "train.entropy_chunk", "sft"),
    "a fixed micro-batch": ("sizing", without(sizes.sizing, micro_batch=None, token_budget=8192), "critic.micro_batch", "critic"),
    "a budget": ("sizing", without(sizes.sizing, token_budget=8192), "actor.token_budget", "sft"),
    "packing": ("sizing", without(sizes.sizing, packing=True), "train.packing", "sft"),
    "sharing": ("limits", without(sizes.limits, prefix_sharing=True), "rollout.prefix_sharing", "rollout"),
    "seats": ("limits", without(sizes.limits, max_seqs=32), "rollout.max_seqs", "rollout"),
}


# One for each function that a setting goes through; the others go through the same ones.
SAME_FUNCTIONS = ("the head's options", "a fixed micro-batch", "a budget", "seats")


@pytest.mark.parametrize("lost", [pytest.param(name, marks=pytest.mark.matrix if name in SAME_FUNCTIONS else ()) for name in LOST])
def test_a_knob_that_is_lost_does_not_hold(small: ProofSetup, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    name, broken, knob, role = LOST[lost]
    monkeypatch.setattr(sizes if name == "sizing" else making, name, broken)
    records = results_of(cases_of(small, knob, role=role), small)
    assert records and all(record.holds is False for record in records), [record for record in records if record.holds]
    assert all(record.reason.startswith("the knob must change this: ") and record.gradients_equal is not False for record in records)


def test_a_knob_that_changes_the_gradient_does_not_hold(small: ProofSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(forward: Callable[..., Any], hidden: torch.Tensor, random: bool) -> Any:
        return recompute.checkpoint(forward, 1.000001 * hidden, use_reentrant=False)

    cases = [case for case in cases_of(small, "train.recompute", role="sft") if case.measurement.metric.endswith("full")]
    (record,) = results_of(cases, small)
    assert record.holds and record.gradients_equal
    monkeypatch.setattr(recompute, "run_full", forgets)
    (record,) = results_of(cases, small)
    assert (record.gradients_equal, record.holds) == (False, False) and record.off > record.on  # type: ignore[operator]
    assert record.reason.startswith("gradients differ by ") and record.reason.endswith("; 1e-09 is allowed")


@pytest.mark.matrix
def test_a_role_that_says_something_else_does_not_hold(small: ProofSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    own = roles.token_logprobs

    def wrong(*args: Any, **kwargs: Any) -> Any:
        logprobs, entropy = own(*args, **kwargs)
        return (1.00001 * logprobs if args[4].entropy_chunk else logprobs), entropy

    monkeypatch.setattr(roles, "token_logprobs", wrong)
    (record,) = results_of(cases_of(small, "ref.entropy_chunk"), small)
    assert (record.gradients_equal, record.holds) == (None, False) and "its outputs differ by 1e-05" in record.reason


def test_a_setting_that_a_cpu_must_refuse(small: ProofSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legal, "refused_offloads", lambda config, algorithm, device: iter(()))
    (record,) = results_of(cases_of(small, "train.offload_grads", role="sft"), small)
    assert (record.holds, record.reason) == (False, "a run on a CPU accepts the setting, although it has no effect there")


def test_a_step_that_fails_fails_alone(small: ProofSetup) -> None:
    def read(step: WatchedStep, role: str) -> int:
        raise ZeroDivisionError("no number here")

    (held,) = cases_of(small, "train.offload_grads", role="sft")
    broken = ProofCase("train.packing", "sft", Measurement("broken", "tokens", read))
    refused = ProofCase("train.packing", "sft", held.measurement, {}, {"train.recompute_layers": 2})
    records = results_of([broken, refused], small)
    assert [record.holds for record in records] == [False, False]
    assert records[0].reason == "the step failed: ZeroDivisionError: no number here"


@pytest.mark.long
def test_after_a_worker_has_died_the_next_step_has_new_processes(small: ProofSetup) -> None:
    runner, step = ProofRunner(small, []), step_key("sft", {"cluster.workers": 2})
    try:
        expected = runner._run(step)
        processes = small.pool._processes
        assert (
            expected.failure is None and processes is not None and runner._run(step).failure is None and small.pool._processes is processes
        )
        os.kill(processes.pids[1], signal.SIGKILL)
        met = runner._run(step).failure  # none where the pool had seen the end of the process before the step began
        assert "worker 1" in met if met else small.pool._processes is not processes
        again = runner._run(step)
        assert again.failure is None and small.pool._processes is not processes
        assert run.difference(expected, again, "actor") == 0
    finally:
        small.pool.close()


def test_what_was_found_before_an_interrupt_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = ProofResult("train.packing", "sft", "pad tokens", "tokens", 3, 0, True, True, "")

    def interrupted(*_: Any) -> Iterator[ProofResult]:
        yield found
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "prove", interrupted)
    ended = runs.command_here(tmp_path, "prove", "--json")
    assert ended.code == 130 and json.loads(ended.out) == [dataclasses.asdict(found)] and "stopped after 1 proof\n" in ended.error


# -- parts ------------------------------------------------------------------------------------------------------------------------------


def test_a_default_is_no_setting() -> None:
    assert step_key("ppo", {"train.packing": True}, {"train.lr": 0.5}) == ("ppo", (("train.lr", 0.5),))
    assert step_key("ppo", {"train.lr": 0.5}, {"train.lr": 0.25}) == ("ppo", (("train.lr", 0.25),))


def test_caps_are_kept_and_used() -> None:
    low_first, high_first = (ProofCase("", "", measure.MOST_RUNNING, *limits, change="limit").changed for limits in ((4, 16), (16, 4)))
    assert low_first(4, 16) and low_first(3, 5) and high_first(9, 4)
    assert not low_first(4, 4) and not low_first(5, 16) and not low_first(4, 17) and not high_first(4, 9)


def test_a_stall_is_what_is_prefilled_while_samples_wait() -> None:
    seen = [(40, 0, 0), (0, 9, 2), (8, 0, 2), (7, 0, 2), (0, 9, 2), (30, 0, 0), (9, 0, 1)]
    step = WatchedStep(None)  # type: ignore[arg-type]
    for prefilled, decoded, begun in seen:
        step.engine_passes.append((EngineStats(prefill_tokens=prefilled, decode_tokens=decoded), begun))
    assert measure.LONGEST_STALL.read(step, "actor") == 15


@pytest.mark.matrix
def test_what_re_runs_differ_by_is_measured(small: ProofSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of CUDA, on a CPU: the same step again, and with each sample alone."""
    steps: list[str] = []
    found: dict[str, list[float]] = {}
    own = run.difference

    def watched(one: run.StepEvidence, other: run.StepEvidence, role: str) -> float:
        found.setdefault(role, []).append(own(one, other, role))
        return found[role][-1]

    monkeypatch.setattr(run, "difference", watched)
    runner = ProofRunner(small, [], steps.append)
    runner._on_cuda = True
    assert runner._allowed("ppo", "actor") == runner._allowed("ppo", "reward_model") == ROUNDING[torch.bfloat16]
    assert [text.count("micro_batch = 1") for text in steps] == [0, 0, 4], "each step once, for all roles"
    assert found.keys() == runner._spreads["ppo"].keys() == {"actor", "critic", "ref", "reward_model"}
    again, alone = found["actor"]
    assert again == 0 < alone == runner._spreads["ppo"]["actor"] < GRADIENT_TOLERANCE

    runner._spreads.clear()
    monkeypatch.setattr(runner, "_run", lambda step: runner.evidence(step))  # the steps are known
    monkeypatch.setattr(run, "difference", lambda one, other, role: 0.5 if role == "critic" else float("inf"))
    assert (runner._allowed("ppo", "critic"), runner._allowed("ppo", "actor")) == (2.0, ROUNDING[torch.bfloat16])


def test_other_samples_are_other_gradients(small: ProofSetup) -> None:
    case = ProofCase("rollout.max_seqs", "rollout", measure.NATIVE_SAMPLES, {}, {"run.seed": 5}, change="more")
    (record,) = results_of([case], small)
    assert (record.gradients_equal, record.holds) == (False, False) and "of 32 samples have different tokens" in record.reason


@pytest.mark.matrix  # three minutes of compiling; tests of `train.compile` itself are in test_knob_runs.py
def test_compiled_layers_differ_by_the_norms_in_float32_alone(small: ProofSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    def wide(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(Qwen2RMSNorm, "forward", wide)
    torch._dynamo.reset()
    cases = [dataclasses.replace(case, tolerance=GRADIENT_TOLERANCE) for case in cases_of(small, "train.compile", role="critic")]
    (record,) = results_of(cases, small)
    assert record.holds and record.gradients_equal, record
