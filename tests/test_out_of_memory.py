"""Memory that runs out in the middle of a run: the work is done again in smaller pieces, and the run ends with the very parameters of one
that was not disturbed and had the same budgets; in float64, of one with any budgets. Real runs of a tiny model, with errors on purpose
(cluster/faults.py)."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import runs
import torch
from devices import Pool
from test_rollout import make_engine
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fulltilt.batching.pack import MicroSizing
from fulltilt.cluster.budgets import smaller_budget
from fulltilt.cluster.faults import VARIABLE
from fulltilt.kernels.linear import fastest
from fulltilt.memory.account import Account
from fulltilt.memory.trial import MemoryTrial
from fulltilt.model.arrays import pinned
from fulltilt.parallel import sequence
from fulltilt.parallel.progress import JointPasses, PassProgress
from fulltilt.records import MicroBatch, Prompt, TokenTerms, UserError
from fulltilt.rollout.collect import collect
from fulltilt.rollout.engine import EngineLimits
from fulltilt.rollout.sampler import Sampling
from fulltilt.rollout.scheduler import Pass
from fulltilt.schema import TrainConfig
from fulltilt.training.optim import Optimizer
from fulltilt.training.roles import Policy
from fulltilt.tune import control

ModelFolders = Callable[[str], Path]
# One mini-batch of 16 samples a step, in several micro-batches. Step 1 is made once; what follows resumes from it.
SMALL = (
    "algorithm.minibatches_per_step=1", "actor.token_budget=160", "actor.forward_token_budget=300", "ref.forward_token_budget=300",
    "run.save_every=1", "run.keep=9", "run.eval_every=0", "run.eval_before=false",
)  # fmt: skip


@pytest.fixture(scope="module")
def first_step(tmp_path_factory: pytest.TempPathFactory, model_folders: ModelFolders) -> Path:
    folder = runs.make(tmp_path_factory.mktemp("memory") / "folder", model_folders("qwen2"))
    runs.train(folder, *SMALL, "run.steps=1")
    return folder


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda faults: monkeypatch.setenv(VARIABLE, faults)


def second_step(first: Path, folder: Path, *overrides: str) -> runs.Trained:
    runs.copy(first, folder)
    return runs.train(folder, *SMALL, "run.steps=2", *overrides)


def assert_same_parameters(one: Path, other: Path) -> None:
    """With masters, moments and counters."""
    step = max(runs.checkpoints(one))
    runs.assert_equal_tensors(runs.checkpoints(one)[step], runs.checkpoints(other)[step])


def changed(folder: Path) -> dict[str, int]:
    found: dict[str, int] = runs.state(runs.checkpoints(folder)[2])["changed_budgets"]
    return found


@pytest.mark.parametrize(
    ("fault", "key"),
    [
        ("actor.backward:2", "actor.token_budget"),
        pytest.param("actor.forward:1", "actor.token_budget", marks=pytest.mark.long),
        pytest.param("actor.forward:3", "actor.token_budget", marks=pytest.mark.long),
        ("actor.optimizer:1", "actor.token_budget"),
        ("ref.passes:2", "ref.forward_token_budget"),
    ],
)
def test_work_is_done_again_with_a_smaller_budget(
    first_step: Path, tmp_path: Path, fail: Callable[[str], None], fault: str, key: str
) -> None:
    fail(fault)
    trained = second_step(first_step, tmp_path / "disturbed")
    ((name, budget),) = changed(tmp_path / "disturbed").items()
    line = runs.metrics(tmp_path / "disturbed")[-1]
    assert line["perf/out_of_memory"] == 1 and line[f"budget/{name}"] == budget
    assert trained.said.count("out of memory in ") == 1 and f"{name} is lowered from" in trained.said

    fail("")
    second_step(first_step, tmp_path / "undisturbed", f"{key}={budget}", "run.resume=force")
    assert_same_parameters(tmp_path / "disturbed", tmp_path / "undisturbed")
    expected = runs.metrics(tmp_path / "undisturbed")[-1]
    assert expected["perf/out_of_memory"] == 0 and f"budget/{name}" not in expected
    apart = ("perf/out_of_memory", "budget/")
    one, other = ({n: v for n, v in each.items() if not n.startswith(apart)} for each in (line, expected))
    assert runs.without_clock([one]) == runs.without_clock([other])


@pytest.mark.long
def test_a_lowered_budget_is_in_the_checkpoint(first_step: Path, tmp_path: Path, fail: Callable[[str], None]) -> None:
    """A run that resumes after memory ran out ends as one that was not stopped."""
    fail("actor.backward:2")
    runs.copy(first_step, tmp_path / "whole")
    runs.train(tmp_path / "whole", *SMALL, "run.steps=3")
    second_step(first_step, tmp_path / "stopped")
    fail("")
    runs.train(tmp_path / "stopped", *SMALL, "run.steps=3")
    assert changed(tmp_path / "stopped")
    assert_same_parameters(tmp_path / "whole", tmp_path / "stopped")
    assert runs.without_clock(runs.metrics(tmp_path / "whole")) == runs.without_clock(runs.metrics(tmp_path / "stopped"))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("actor.forward:1-3", r"update-actor 3 times in a row.*Held beside that work: parameters .* Lower actor\.token_budget"),
        # Between them, prefill passes have enough memory.
        ("actor.decode:1-3", r"rollout: 3 times in a row.*Held beside that work: parameters .*, kv .* rollout\.max_seqs"),
        pytest.param("actor.cache:1-3", r"rollout: 3 times in a row.*rollout\.kv_bytes", marks=pytest.mark.long),
    ],
)
def test_three_in_a_row_end_the_run(first_step: Path, tmp_path: Path, fail: Callable[[str], None], fault: str, said: str) -> None:
    fail(fault)
    with pytest.raises(UserError, match=f"out of memory in {said}"):
        second_step(first_step, tmp_path / "ended")
    assert list(runs.checkpoints(tmp_path / "ended")) == [1]


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("actor.decode:1", "max_seqs"),
        pytest.param("actor.steps:6", "max_seqs", marks=pytest.mark.long),
        pytest.param("actor.prefill:1", "max_batched_tokens", marks=pytest.mark.long),
        pytest.param("actor.cache:1", "kv_blocks", marks=pytest.mark.long),
    ],
)
def test_a_rollout_goes_on_with_less_at_once(first_step: Path, tmp_path: Path, fail: Callable[[str], None], fault: str, name: str) -> None:
    """Samples are those of a run that was not disturbed, token by token, and so are the parameters, if the last bits of the engine's
    log-probs have no weight in the loss."""
    settings = ("rollout.max_seqs=8", "algorithm.importance_cap=0", "run.resume=force")
    second_step(first_step, tmp_path / "undisturbed", *settings)
    fail(fault)
    trained = second_step(first_step, tmp_path / "disturbed", *settings)
    assert changed(tmp_path / "disturbed").keys() == {name} and f"{name} is lowered from" in trained.said
    assert runs.metrics(tmp_path / "disturbed")[-1]["perf/out_of_memory"] == 1
    assert sampled(tmp_path / "disturbed", 2) == sampled(tmp_path / "undisturbed", 2)
    assert_same_parameters(tmp_path / "disturbed", tmp_path / "undisturbed")


def sampled(folder: Path, step: int) -> list[dict[str, Any]]:
    """The samples of a step without the last bits of their log-probs, which differ with the samples that are computed beside them."""
    return [{**row, "logprobs": None, "logprob_mean": None} for row in runs.rollouts(folder, step)]


def test_a_prompt_of_several_passes_does_not_begin_again_forever(model_folders: ModelFolders) -> None:
    """Its first part always has enough memory, and the second never has."""
    engine = make_engine(model_folders("qwen2"), EngineLimits(blocks=60, block_tokens=4, max_seqs=4, max_batched_tokens=16))
    run, begun = engine.runner.run, list[int]()

    def run_out_later(step: Pass) -> torch.Tensor:
        begun.append(step.work[0].start)
        if begun[-1]:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return run(step)

    engine.runner.run = run_out_later  # type: ignore[method-assign]
    prompt = Prompt(uid=0, ids=np.arange(40) + 3, text="")
    with pytest.raises(torch.OutOfMemoryError, match=r"3 times in a row, CUDA out of memory\."):
        list(engine.generate([prompt], Sampling(max_new_tokens=4), 0))
    assert begun == [0, 16, 0, 8, 0, 4]


@pytest.mark.parametrize("chunked", [True, False])
def test_a_prompt_that_never_fits_ends_a_rollout_while_others_go_on(model_folders: ModelFolders, chunked: bool) -> None:
    """Though samples of another prompt get a token each time."""
    limits = EngineLimits(blocks=99, block_tokens=4, max_seqs=4, max_batched_tokens=16, chunked_prefill=chunked)
    engine = make_engine(model_folders("qwen2"), limits)
    run, failures, most = engine.runner.run, list[int](), list[int]()

    def run_out_with_the_second(step: Pass) -> torch.Tensor:
        most.append(engine.limits.max_batched_tokens)
        if any(work.sequence.family.place for work in step.work):
            failures.append(len(step.work))
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return run(step)

    engine.runner.run = run_out_with_the_second  # type: ignore[method-assign]
    prompts = [Prompt(uid=uid, ids=np.arange(tokens) + 3, text="") for uid, tokens in enumerate((5, 40))]
    with pytest.raises(torch.OutOfMemoryError, match=r"3 times in a row, CUDA out of memory\."):
        list(engine.generate(prompts, Sampling(max_new_tokens=99), 0))
    assert len(failures) <= 3 + 4 and most == sorted(most, reverse=True), "16 tokens are halved four times"


def test_an_engine_without_memory_for_a_graph_decodes_fewer_samples(model_folders: ModelFolders) -> None:
    """The path of CUDA graphs as far as a CPU has it: `tests/test_gpu.py` captures real ones."""
    prompts = [Prompt(uid=uid, ids=np.arange(5 + uid) + 3, text="") for uid in range(8)]
    sampling, found = Sampling(max_new_tokens=9), list[list[list[int]]]()
    for enough in (True, False):
        engine = make_engine(model_folders("qwen2"), EngineLimits(blocks=99, block_tokens=4, max_seqs=8, max_batched_tokens=64))
        captured = list[int]()

        def capture(size: int, restricted: bool, enough: bool = enough, captured: list[int] = captured) -> object:
            captured.append(size)
            if size > 2 and not enough:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return object()

        engine.decoder.graphs, engine.decoder._pool, engine.decoder._capture = True, (0, 0), capture  # type: ignore[assignment]
        groups = collect(engine.generate, prompts, sampling, 0, lambda group: None)
        found.append([sample.ids.tolist() for group in groups for sample in group.samples])
        limits = engine.take_limits()
        assert engine.decoder.graphs and engine.decoder.eager_reason is None, "it is not the model's fault"
        assert (limits.max_seqs, len(limits.failures)) == ((8, 0) if enough else (2, 2))
        assert captured[0] == 8 and (enough or captured == [8, 8, 4, 4, 2])
    assert found[0] == found[1]


WORKERS = ("run.steps=1", *(each for each in SMALL if "token_budget" not in each), "actor.token_budget=80")


FULL, HYBRID = ("train.shard=full",), ("train.shard=hybrid", "train.shard_size=2")
SEQUENCE, TENSOR = ("train.sequence_parallel=2", "actor.token_budget=40"), ("train.tensor_parallel=2",)
EXPERTS = ("train.expert_parallel=2",)
FIRST = "actor.forward:1@0"

# -- rollouts of several workers -----------------------------------------------------------------------------------------------------------

APART, TOGETHER = ("rollout.max_seqs=4",), ("rollout.max_seqs=8", "rollout.tensor_parallel=2")
TRAINED_TOGETHER = ("rollout.max_seqs=8", *TENSOR)
BOTH = {"max_seqs", "max_batched_tokens"}


@pytest.fixture(scope="module")
def undisturbed(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int, Sequence[str]], Path]:
    """The folder of a run of several workers with enough memory."""
    made: dict[tuple[str, int, Sequence[str]], Path] = {}

    def run(model: str, workers: int, overrides: Sequence[str]) -> Path:
        case = (model, workers, overrides)
        if case not in made:
            made[case] = runs.make(tmp_path_factory.mktemp("memory") / "undisturbed", model_folders(model))
            pool_of_devices.train(made[case], workers, *WORKERS, "algorithm.importance_cap=0", *overrides)
        return made[case]

    return run


@pytest.mark.parametrize(
    ("faults", "workers", "model", "overrides", "lowered"),
    [
        ("actor.decode:1@1", 2, "qwen2", APART, {"max_seqs"}),
        ("actor.steps:5@1", 2, "qwen2", TOGETHER, {"max_seqs"}),
        *(
            pytest.param(faults, 2, "qwen2", overrides, lowered, marks=pytest.mark.long)
            for faults, overrides, lowered in (
                ("actor.prefill:2@0", TOGETHER, {"max_batched_tokens"}),
                ("actor.prefill:1@1", APART, {"max_batched_tokens"}),
                ("actor.cache:1@1", TOGETHER, {"kv_blocks"}),
                ("actor.steps:3@1,actor.prefill:2@0", TRAINED_TOGETHER, BOTH),
            )
        ),
        *(
            pytest.param(faults, workers, model, overrides, lowered, marks=pytest.mark.matrix)
            for faults, workers, model, overrides, lowered in (
                ("actor.cache:1-2@0", 2, "qwen2", APART, {"kv_blocks"}),
                ("actor.decode:1@0,actor.steps:20@1", 2, "qwen2", APART, {"max_seqs"}),
                ("actor.steps:1@0", 2, "qwen2", TOGETHER, {"max_seqs"}),
                ("actor.collectives:6@0", 2, "qwen2", TOGETHER, {"max_batched_tokens"}),
                ("actor.collectives:14@1", 2, "qwen2", TOGETHER, {"max_seqs"}),
                ("actor.steps:4", 2, "qwen2", TOGETHER, {"max_seqs"}),
                ("actor.decode:2@1", 2, "qwen2", TOGETHER, {"max_seqs"}),
                ("actor.prefill:1", 2, "qwen2", TOGETHER, {"max_batched_tokens"}),
                ("actor.cache:1", 2, "qwen2", TOGETHER, {"kv_blocks"}),
                ("actor.steps:5@3,actor.prefill:1@0", 4, "qwen2", TOGETHER, BOTH),
                ("actor.steps:5@3,actor.prefill:1@0", 4, "qwen2", (*TOGETHER, *FULL), BOTH),
                ("actor.steps:5@1,actor.prefill:2@0", 2, "qwen3-moe", TOGETHER, BOTH),
                ("actor.steps:5@1", 2, "qwen2", (*TRAINED_TOGETHER, "lora.rank=4", "lora.export=merged"), {"max_seqs"}),
            )
        ),
    ],
)
def test_engines_of_several_workers_go_on_with_less_at_once(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, undisturbed: Callable[[str, int, Sequence[str]], Path],
    faults: str, workers: int, model: str, overrides: Sequence[str], lowered: set[str],
) -> None:  # fmt: skip
    """Whichever worker runs out of memory, all samples are those of an undisturbed run, and so are the parameters."""
    expected = undisturbed(model, workers, overrides)
    folder = runs.make(tmp_path / "disturbed", model_folders(model))
    pool_of_devices.faults = faults
    try:
        trained, noted = pool_of_devices.train(folder, workers, *WORKERS, "algorithm.importance_cap=0", *overrides)
    finally:
        pool_of_devices.faults = ""
    assert trained.said.count("out of memory in ") == 1 and "out of memory in rollout on worker" in trained.said
    assert all(f"{name} is lowered from " in trained.said for name in lowered)
    assert runs.metrics(folder)[-1]["perf/out_of_memory"] == count_of(faults)
    assert runs.state(runs.checkpoints(folder)[1])["changed_budgets"].keys() == lowered
    assert sampled(folder, 1) == sampled(expected, 1)
    assert len(set(noted.digests)) == 1
    assert_same_parameters(folder, expected)


@pytest.mark.parametrize(
    ("fault", "overrides"),
    [
        ("actor.steps:1-3@1", TOGETHER),
        *(
            pytest.param(fault, overrides, marks=pytest.mark.long)
            for fault, overrides in (
                ("actor.decode:1-3@1", APART),
                ("actor.prefill:1-3@0", TOGETHER),
                ("actor.cache:1-3@1", TOGETHER),
            )
        ),
    ],
)
def test_three_in_a_row_end_a_rollout_of_several_workers(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, fault: str, overrides: Sequence[str]
) -> None:
    """None is left waiting, and the worker that ran out of memory is named."""
    pool_of_devices.faults = fault
    try:
        with pytest.raises(UserError, match=rf"out of memory in rollout on worker {fault[-1]}: 3 times in a row.*rollout\.kv_bytes"):
            pool_of_devices.train(runs.make(tmp_path / "folder", model_folders("qwen2")), 2, *WORKERS, *overrides)
    finally:
        pool_of_devices.faults = ""


# -- updates and passes of several workers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "workers", "layout"),
    [
        ("actor.backward:1@1", 2, ()),
        pytest.param("actor.forward:2@0", 2, (), marks=pytest.mark.long),
        pytest.param("actor.optimizer:1@1", 2, (), marks=pytest.mark.long),
        *(pytest.param("actor.backward:2@1", 2, layout, marks=pytest.mark.long) for layout in (FULL, SEQUENCE, TENSOR, EXPERTS)),
        *(
            pytest.param(fault, 2, layout, marks=pytest.mark.matrix)
            for layout in (SEQUENCE, TENSOR)
            for fault in (FIRST, "actor.forward:2@1", "actor.optimizer:1@0")
        ),
        *(pytest.param(fault, 2, FULL, marks=pytest.mark.matrix) for fault in (FIRST, "actor.forward:2@1", "actor.optimizer:1@0")),
        *(pytest.param(fault, 4, HYBRID, marks=pytest.mark.matrix) for fault in ("actor.backward:1@2", "actor.forward:1@1")),
        *(pytest.param(fault, 2, EXPERTS, marks=pytest.mark.matrix) for fault in (FIRST, "actor.forward:2@1", "actor.optimizer:1@1")),
    ],
)
def test_all_workers_do_the_mini_batch_again(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, fault: str, workers: int, layout: Sequence[str]
) -> None:
    """One of them runs out of memory: no worker makes the optimizer step, and all have the smaller budget from then on."""
    pool = pool_of_devices
    model = model_folders("qwen3-moe" if layout == EXPERTS else "qwen2")
    disturbed, undisturbed = (runs.make(tmp_path / each, model) for each in ("disturbed", "undisturbed"))
    pool.faults = fault
    try:
        trained, noted = pool.train(disturbed, workers, *WORKERS, *layout)
    finally:
        pool.faults = ""
    budget = runs.state(runs.checkpoints(disturbed)[1])["changed_budgets"]["token_budget"]
    assert f"out of memory in update-actor on worker {fault[-1]}: out of memory on purpose" in trained.said
    assert len(set(noted.digests)) == 1
    pool.train(undisturbed, workers, *WORKERS, *layout, f"actor.token_budget={budget}")
    assert_same_parameters(disturbed, undisturbed)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", [FULL, SEQUENCE, TENSOR, EXPERTS])
def test_three_in_a_row_end_the_run_of_several_workers(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, layout: Sequence[str]
) -> None:
    pool_of_devices.faults = "actor.forward:1-3@1"
    try:
        with pytest.raises(UserError, match=r"out of memory in update-actor on worker 1 3 times in a row.*Lower actor\.token_budget"):
            model = model_folders("qwen3-moe" if layout == EXPERTS else "qwen2")
            pool_of_devices.train(runs.make(tmp_path / "folder", model), 2, *WORKERS, *layout)
    finally:
        pool_of_devices.faults = ""


TOGETHER = ("train.recompute=full", "train.recompute_method=uniform", "train.recompute_layers=2")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("fault", "workers", "overrides"),
    [("actor.backward:1@0", 2, TOGETHER), ("actor.forward:1@0", 4, (*SEQUENCE, "train.recompute=full"))],
    ids=["units of two layers", "sequences divided"],
)
def test_layers_that_would_send_other_tokens_to_experts_when_they_are_recomputed_end_the_run(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, fault: str, workers: int, overrides: Sequence[str]
) -> None:
    """Routers would read the zeros of the worker that failed, and send other tokens than before. None is left waiting."""
    pool_of_devices.faults = fault
    try:
        with pytest.raises(
            UserError, match=r"out of memory in update-actor on worker 0: out of memory on purpose.* Lower \w+\.token_budget"
        ):
            pool_of_devices.train(runs.make(tmp_path / "folder", model_folders("qwen3-moe")), workers, *WORKERS, *EXPERTS, *overrides)
    finally:
        pool_of_devices.faults = ""


# Of passes without gradient, the first gathers what lies outside the layers, and the others do not; with `reshard_after_forward` false they
# gather nothing.
PASSES = ("ref.forward_token_budget=80", "actor.forward_token_budget=80", "algorithm.minibatches_per_step=2")
EVERYWHERE = "ref.passes:1@1,actor.passes:2@0,actor.forward:1@0,actor.backward:3@1,actor.optimizer:4@1"
PPO = ("algorithm.name=ppo", "algorithm.minibatches_per_step=2", "critic.forward_token_budget=80")
OF_PPO = "critic.passes:2@1,critic.forward:1@0,critic.backward:2@1,critic.optimizer:4@0,actor.backward:1@1"


SMALLER = (*PASSES, "actor.token_budget=40", "actor.forward_token_budget=40", "ref.forward_token_budget=40")
REROUTED = ("train.recompute=full", "algorithm.kl_coef=0")  # an update comes first
WITH_EXPERTS = (
    (),
    ("train.recompute=full",),
    ("train.recompute=selective", "train.recompute_layers=1"),
    FULL,
    (*FULL, "train.recompute=full"),
    ("lora.rank=4", "lora.export=merged"),
)
OF_FOUR = (  # workers in groups of two
    (*SEQUENCE, *FULL, *SMALLER),
    (*SEQUENCE, *HYBRID, *SMALLER),
    (*TENSOR, *FULL, *PASSES),
    (*TENSOR, *SMALLER, "train.sequence_parallel=2"),
)


@pytest.mark.parametrize(
    ("faults", "workers", "model", "overrides"),
    [
        ("ref.passes:2@1,actor.forward:2@0", 2, "qwen2", (*FULL, *PASSES)),
        *(
            pytest.param("ref.passes:2@1,actor.forward:2@0", 2, *others, marks=pytest.mark.long)
            for others in (("qwen2", (*SEQUENCE, *SMALLER)), ("qwen2", (*TENSOR, *PASSES)), ("qwen3-moe", (*EXPERTS, *PASSES)))
        ),
        *(
            pytest.param(faults, workers, model, overrides, marks=pytest.mark.matrix)
            for faults, workers, model, overrides in (
                (EVERYWHERE, 2, "qwen2", (*FULL, *PASSES)),
                (EVERYWHERE, 2, "qwen2", (*FULL, *PASSES, "train.reshard_after_forward=false")),
                (EVERYWHERE, 2, "qwen2", (*FULL, *PASSES, "train.recompute=full", "train.forward_prefetch=false")),
                (EVERYWHERE, 2, "qwen2", (*FULL, *PASSES, "lora.rank=4", "lora.export=merged")),
                (EVERYWHERE, 2, "qwen2", (*SEQUENCE, *SMALLER)),
                (EVERYWHERE, 2, "qwen2", (*SEQUENCE, *SMALLER, "train.recompute=full")),
                (EVERYWHERE, 2, "qwen2", (*TENSOR, *PASSES)),
                (EVERYWHERE, 2, "qwen2", (*TENSOR, *PASSES, "train.recompute=full")),
                (EVERYWHERE, 4, "qwen2", (*HYBRID, *PASSES)),
                *((EVERYWHERE, 4, "qwen2", layout) for layout in OF_FOUR),
                *((EVERYWHERE, 2, "qwen3-moe", (*layout, *SMALLER)) for layout in (FULL, SEQUENCE, TENSOR)),
                *((EVERYWHERE, 2, "qwen3-moe", (*EXPERTS, *PASSES, *others)) for others in WITH_EXPERTS),
                *((EVERYWHERE, 4, "qwen3-moe", (*EXPERTS, *PASSES, *others)) for others in ((), FULL)),
                (EVERYWHERE, 4, "qwen3-moe", (*EXPERTS, *SEQUENCE, *SMALLER)),
                (EVERYWHERE, 4, "qwen3-moe", (*EXPERTS, *SEQUENCE, *SMALLER, "train.recompute=selective")),
                *((f"actor.collectives:{number}@1", 2, "qwen3-moe", (*EXPERTS, *REROUTED)) for number in (2, 14, 27, 33)),
                *((OF_PPO, 2, "qwen2", (*layout, *PPO)) for layout in (FULL, SEQUENCE, TENSOR)),
                (OF_PPO, 2, "qwen3-moe", (*EXPERTS, *PPO)),
                (OF_PPO, 4, "qwen2", (*HYBRID, *PPO)),
            )
        ),
    ],
)
def test_no_gradient_of_several_workers_depends_on_where_memory_ran_out(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, faults: str, workers: int, model: str, overrides: Sequence[str]
) -> None:
    """In float64, the parameters of a run with any budgets, where workers wait for one another in passes."""
    pool, found = pool_of_devices, []
    try:
        for each in ("", faults):
            pool.faults = each
            folder = runs.make(tmp_path / f"run {bool(each)}", model_folders(model))
            pool.train(folder, workers, *WORKERS, "run.steps=2", "model.dtype=float64", *overrides)
            # Workers that fail in the same try of a mini-batch count once.
            assert count_of(each) - 1 <= sum(line["perf/out_of_memory"] for line in runs.metrics(folder)) <= count_of(each)
            found.append(runs.parameters(runs.checkpoints(folder)[2]))
    finally:
        pool.faults = ""
    assert max(float((one - found[1][name]).abs().max()) for name, one in found[0].items()) < 1e-9
    assert all(one.dtype == torch.float64 for one in found[0].values())


@pytest.mark.long
def test_workers_that_hold_samples_recover(pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path) -> None:
    """On several machines rows are sent again, for smaller micro-batches. Whichever worker fails, all have the smaller budgets."""
    pool = pool_of_devices
    disturbed, undisturbed = (runs.make(tmp_path / each, model_folders("qwen2")) for each in ("disturbed", "undisturbed"))
    pool.apart, pool.faults = True, "ref.passes:1@1,actor.backward:1@0"
    try:
        pool.train(disturbed, 2, *WORKERS, "ref.forward_token_budget=160")
        pool.faults = ""
        changed = runs.state(runs.checkpoints(disturbed)[1])["changed_budgets"]
        budgets = (f"actor.token_budget={changed['token_budget']}", f"ref.forward_token_budget={changed['ref_token_budget']}")
        pool.train(undisturbed, 2, *WORKERS, *budgets)
    finally:
        pool.apart, pool.faults = False, ""
    assert runs.metrics(disturbed)[-1]["perf/out_of_memory"] == 2
    assert_same_parameters(disturbed, undisturbed)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "overrides"),
    [
        *((fault, ()) for fault in ("actor.forward:2", "actor.backward:1", "actor.optimizer:1", "ref.passes:1", "actor.decode:1")),
        # In the third and fourth of four optimizer steps, twice in one mini-batch.
        ("actor.backward:6-7,actor.optimizer:4", ("algorithm.minibatches_per_step=2", "algorithm.epochs=2", "actor.token_budget=80")),
        ("critic.passes:1,critic.backward:2,critic.optimizer:2,actor.passes:1", ("algorithm.name=ppo", "algorithm.minibatches_per_step=2")),
    ],
)
def test_no_gradient_depends_on_where_memory_ran_out(
    model_folders: ModelFolders, tmp_path: Path, fail: Callable[[str], None], fault: str, overrides: Sequence[str]
) -> None:
    """In float64, the parameters of a run with any budgets."""
    found = []
    for each in ("", fault):
        fail(each)
        folder = runs.make(tmp_path / f"run {bool(each)}", model_folders("qwen2"))
        runs.train(folder, *SMALL, "run.steps=2", "model.dtype=float64", *overrides)
        assert sum(line["perf/out_of_memory"] for line in runs.metrics(folder)) == count_of(each)
        found.append(runs.parameters(runs.checkpoints(folder)[2]))
    assert max(float((one - found[1][name]).abs().max()) for name, one in found[0].items()) < 1e-9
    assert all(one.dtype == torch.float64 for one in found[0].values())


def count_of(faults: str) -> int:
    return sum(2 if "-" in fault else 1 for fault in filter(None, faults.split(",")))


COLLECTIVES = ["gather 0", "gather 1", "gather 1", "sum 1", "sum 0"]


def test_random_numbers_are_drawn_again(
    model_folders: ModelFolders, tmp_path: Path, fail: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that draws random numbers gets the same ones when its mini-batch is computed again."""
    terms, drawn = Policy.terms, list[float]()

    def drawing(policy: Policy, micro: MicroBatch) -> TokenTerms:
        drawn.append(float(torch.rand(())))
        return terms(policy, micro)

    monkeypatch.setattr(Policy, "terms", drawing)
    fail("actor.backward:2")
    runs.train(runs.make(tmp_path / "folder", model_folders("qwen2")), *SMALL, "run.steps=1")
    assert len(drawn) > 4 and drawn[:2] == drawn[2:4] and len({*drawn}) == len(drawn) - 2


def test_what_failed_is_released_before_the_next_try() -> None:
    """Without a search for garbage: the error that held its frames is gone."""
    held = []

    def run_out() -> None:
        filling = torch.ones(10)
        held.append(weakref.ref(filling))
        raise torch.OutOfMemoryError("CUDA out of memory.\nMore of it")

    trial = MemoryTrial(lambda: True)
    with trial:
        run_out()
    assert trial.failure == "CUDA out of memory." and held[0]() is None
    for error, may_fail in ((ValueError("x"), True), (MemoryError("x"), False)):
        with pytest.raises(type(error)), MemoryTrial(lambda may_fail=may_fail: may_fail):  # type: ignore[misc]
            raise error


@pytest.mark.parametrize(
    ("said", "memory"),
    [
        ("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in the documentation", True),  # a graph is made
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("Triton Error [CUDA]: out of memory", True),  # a kernel is loaded
        ("CUDA error: an illegal memory access was encountered", False),
        ("worker 1 failed: CUDA error: out of memory", False),  # told of another process
    ],
)
def test_memory_runs_out_beside_the_allocator_too(said: str, memory: bool) -> None:
    trial = MemoryTrial(lambda: True)
    with contextlib.nullcontext() if memory else pytest.raises(RuntimeError), trial:
        raise RuntimeError(said)
    assert (trial.failure is not None) == memory


def test_pinned_memory_that_runs_out_is_memory_of_the_host() -> None:
    """The driver says of both that memory is used up: fewer samples at once would not help."""

    def run_out() -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")

    trial = MemoryTrial(lambda: True)
    with pytest.raises(UserError, match=r"^2.0 KiB of main memory could not be pinned .*: CUDA error: out of memory\. .*ulimit -l"), trial:
        pinned(run_out, 2048)
    assert trial.failure is None


def test_no_way_to_multiply_is_chosen_while_memory_runs_out() -> None:
    def run_out(*_: object) -> torch.Tensor:
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fastest({"one that is not loaded yet": run_out}, 4, torch.ones(8, 16), None)


@pytest.mark.parametrize("made", range(len(COLLECTIVES) + 1))
def test_a_pass_that_was_given_up_makes_each_collective_once(made: int) -> None:
    """Wherever it was given up, in the second of three passes."""
    progress, sent = PassProgress(), list[str]()
    joint = JointPasses[str](progress, (), agreed=3, micro_batches=(), together=False)

    def make_pass(_: object = None, *, end: int = len(COLLECTIVES)) -> None:
        progress.begin()
        for what in COLLECTIVES[:end]:
            with progress.collective(what) as takes_part:
                sent.extend([what] * takes_part)

    make_pass()
    make_pass(end=made)
    assert len(list(joint.complete(make_pass))) == 2 and sent == 3 * COLLECTIVES
    assert joint.may_be_given_up and progress.begun == 3


@pytest.mark.parametrize("made", range(5))
def test_a_filler_in_which_memory_ran_out_exchanges_only_what_is_left(made: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that has fewer micro-batches than others makes fillers, of which no micro-batch says how many tokens the others expect."""
    ranks, exchanged = SimpleNamespace(progress=PassProgress()), list[int]()
    monkeypatch.setattr(sequence, "exchange", lambda parts, _: exchanged.append(parts.shape[1]) or parts)
    joint = JointPasses(ranks.progress, (), agreed=2, micro_batches=["only"], together=True)

    def make_pass(tokens: int, end: int = 4) -> None:
        ranks.progress.begin()
        for _ in range(end):
            sequence.exchange_tokens(torch.ones(2, tokens, 1), ranks)  # type: ignore[arg-type]

    make_pass(7)
    make_pass(1, made)
    assert list(joint.complete(lambda _: make_pass(1))) == [None]
    assert exchanged == [7] * 4 + [1] * 4


def test_a_collective_that_failed_is_in_doubt() -> None:
    """So nobody knows what the others have."""
    progress = PassProgress()
    joint = JointPasses[str](progress, (), agreed=1, micro_batches=(), together=False)
    progress.begin()
    with pytest.raises(MemoryError), progress.collective("gather"):
        raise MemoryError
    assert joint.may_be_given_up and not progress.made["gather"]
    with pytest.raises(MemoryError), progress.collective("gather"), progress.sending():
        raise MemoryError
    assert not joint.may_be_given_up


def test_fillers_take_the_place_of_micro_batches_that_others_compute_too() -> None:
    progress, given = PassProgress(), list[str | None]()
    joint = JointPasses(progress, (), agreed=4, micro_batches=["first", "second", "third"], together=True)
    for _ in range(2):
        progress.begin()
    for _ in joint.complete(given.append):
        pass
    assert given == ["second", "third", None]
    assert not list(JointPasses(progress, (), agreed=0, micro_batches=["first"], together=False).complete(given.append))


class NewMemory(TorchDispatchMode):
    """Counts the bytes of tensors that operations make, for as long as these live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        for each in tree_leaves(found):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in given:
                self.now += each.nbytes
                self.most = max(self.most, self.now)
                weakref.finalize(each, self.forget, each.nbytes)
        return found

    def forget(self, count: int) -> None:
        self.now -= count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_allocates_no_more_than_it_has_made_sure_of(dtype: torch.dtype) -> None:
    """So a step that has begun to change parameters does not run out of memory."""
    model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Linear(60, 20)).to(dtype)
    optimizer = Optimizer(model, TrainConfig(lr=1e-2), total_updates=4)
    optimizer.prepare()
    model(torch.ones(3, 40, dtype=dtype)).square().sum().backward()
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    with NewMemory() as counted:
        optimizer._apply(optimizer._held.reduced(), 1.0, 1e-2)
    assert 40 * 60 * 4 < counted.most <= optimizer._scratch_bytes + 64  # a few scalars
    assert all(not torch.equal(each, before[name]) for name, each in model.named_parameters())


@pytest.mark.parametrize(
    ("lengths", "micro_batches", "sizing", "budget"),
    [
        ([5, 9, 4, 3], [[1, 0], [2, 3]], MicroSizing(16), 9),
        ([5, 5, 4, 4], [[0, 1], [2, 3]], MicroSizing(16), 5),
        ([6, 6, 6, 6], [[0, 1, 2, 3]], MicroSizing(99), 12),
        ([6, 5, 4, 3], [[0, 1, 2], [3]], MicroSizing(99, packing=False), 9),
        ([30, 4, 3], [[0], [1, 2]], MicroSizing(16), 4),
        ([5, 9], [[1], [0]], MicroSizing(9), None),
        ([5, 9], [[1, 0]], MicroSizing(9, micro_batch=2), None),
        ([], [], MicroSizing(9), None),
    ],
)
def test_a_smaller_budget(lengths: Sequence[int], micro_batches: list[list[int]], sizing: MicroSizing, budget: int | None) -> None:
    assert smaller_budget(sizing, lengths, micro_batches) == budget
    if budget is not None:
        largest = max(sum(lengths[row] for row in rows) for rows in micro_batches if len(rows) > 1)
        again = MicroSizing(budget, packing=sizing.packing).schedule(lengths)
        assert max((sum(lengths[row] for row in rows) for rows in again if len(rows) > 1), default=0) < largest


# -- budgets that follow what was measured ------------------------------------------------------------------------------------------------

GIB = 2**30


@pytest.mark.parametrize(
    ("budget", "most", "peak", "activations", "tokens", "longest", "expected"),
    [
        (16384, 16384, 40, 20, 16384, 4096, None),  # as planned, and enough is free
        (16384, 16384, 78, 40, 16384, 4096, 12288),  # 38 GiB beside them: 68 leave 30 for activations
        (16384, 16384, 78, 40, 16384, 14000, 14000),  # but the longest sample has to fit
        (16384, 16384, 78, 4, 16384, 16384, None),  # one sample alone: nothing can be lowered
        (16384, 16384, 79, 1, 16384, 64, 64),  # whatever takes the memory, it is not the micro-batch
        (4096, 16384, 30, 10, 4096, 1024, 8192),  # raised, by no more than a factor of 2 at once
        (8192, 16384, 30, 20, 8192, 1024, 16384),
        (8192, 8192, 30, 20, 8192, 1024, None),  # memory ran out with more
        (8192, 16384, 60, 50, 8192, 1024, None),  # 9500 would fit: not worth a change
        (8192, 16384, 30, 10, 4096, 1024, None),  # the micro-batches did not even fill the budget
        (8192, 16384, 75, 40, 8192, 1024, None),  # neither near the end nor far from it
        (8192, 16384, 0, 0, 8192, 1024, None),  # a CPU: nothing is measured
    ],
)
def test_budgets_follow_measured_peaks(
    budget: int, most: int, peak: int, activations: int, tokens: int, longest: int, expected: int | None
) -> None:
    seen = control.MeasuredPasses(peak * GIB, activations * GIB, tokens, longest)
    change = control.follow(budget, most, seen, 80 * GIB)
    assert (change.budget if change else None) == expected
    if change:
        assert change.budget <= most and change.budget >= longest and f"of 80.0 GiB with {tokens} tokens" in change.reason


def test_no_budget_follows_on_a_device_that_measures_nothing() -> None:
    assert control.follow(8192, 16384, control.MeasuredPasses(GIB, GIB, 8192, 64), 0) is None


def test_a_run_follows_the_memory_it_measures(model_folders: ModelFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the device had 2 GiB and a step took nearly all of it: the budgets change in one line each, are in the checkpoint, and a run
    that resumes goes on with them."""
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    settings = [each for each in SMALL if "token_budget" not in each]
    measured = Account.metrics

    def nearly_full(account: Account) -> dict[str, float]:
        return {**measured(account), "memory_gib/update_actor/peak": 1.95, "memory_gib/update_actor/activations": 1.0}

    monkeypatch.setattr(Account, "metrics", nearly_full)
    monkeypatch.setattr(Account, "device_bytes", 2 * GIB)
    said = runs.train(folder, *settings, "run.steps=1").said
    (budget,) = runs.state(runs.checkpoints(folder)[1])["changed_budgets"].values()
    assert said.count("update-actor: token_budget changes from ") == 1 and f" to {budget} tokens: the peak was 1.9 of 2.0 GiB" in said
    monkeypatch.setattr(Account, "metrics", measured)
    runs.train(folder, *settings, "run.steps=2")
    assert runs.metrics(folder)[-1]["budget/token_budget"] == budget
    assert runs.metrics(folder)[-1]["actor/micro_batches"] > runs.metrics(folder)[0]["actor/micro_batches"]
