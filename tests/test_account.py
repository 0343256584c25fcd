"""Memory accounting: bytes of real models, optimizers and caches by kind and phase, and on CUDA what the allocator says beside them."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import models
import numpy as np
import pytest
import torch
from test_trainer import random_rows
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from fulltilt.algo.loss import sft_loss
from fulltilt.batching.pack import MicroSizing, minibatch
from fulltilt.doctor import examine_memory_of
from fulltilt.memory.account import KINDS, Account, Kind, Source, gradients_of, process_bytes, weights_of
from fulltilt.memory.offload import ALIGN, OffloadSetting, Residence, aligned
from fulltilt.model import attention
from fulltilt.model.fuse import fuse_and_compare
from fulltilt.model.load import load_model
from fulltilt.model.verify import verify
from fulltilt.observe.health import GROWTH_STEPS, WARM_UP_STEPS, Health
from fulltilt.observe.metrics import MetricsFile
from fulltilt.records import MiniBatch, Prompt, Row
from fulltilt.rollout.decode import refuse_waits
from fulltilt.rollout.engine import EngineContext, EngineLimits
from fulltilt.rollout.engines.native import NativeEngine
from fulltilt.rollout.sampler import Sampling
from fulltilt.schema import HealthConfig, ModelConfig, TrainConfig
from fulltilt.training.optim import Optimizer
from fulltilt.training.roles import Policy
from fulltilt.training.trainer import Trainer
from fulltilt.words import in_bytes

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MIB = 1 << 20
ModelFolders = Callable[[str], Path]


def make_trainer(model: PreTrainedModel) -> Trainer:
    return Trainer(Policy("actor", model, 1.0, Optimizer(model, TrainConfig(), total_updates=10)), sft_loss)


def loaded(folder: Path, dtype: str) -> Trainer:
    return make_trainer(load_model(ModelConfig(path=str(folder), dtype=dtype), CPU))


def account_of(trainer: Trainer, engine: NativeEngine | None = None) -> Account:
    """As a run makes it, for one role."""
    model = trainer.role.model
    sources: dict[Kind, list[Source]] = {
        "parameters": [lambda: weights_of(model)],
        "gradients": [lambda: gradients_of(model)],
        "optimizer": [trainer.optimizer.memory],
    }
    if engine is not None:
        sources["kv"] = [engine.memory]
    return Account(model.device, sources)


def engine_on(model: PreTrainedModel, blocks: int = 40, block_tokens: int = 8) -> NativeEngine:
    return NativeEngine(
        EngineContext(model, models.tokenizer(), frozenset({1}), verify(model), EngineLimits(blocks, block_tokens, 16, 128))
    )


def batch() -> MiniBatch:
    return minibatch(random_rows(), "token-mean", 1, MicroSizing(60))


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def joined(count: int, tensors: int) -> object:
    """So many bytes, in tensors that begin at multiples of ALIGN in one memory."""
    return pytest.approx(count + tensors * ALIGN / 2, abs=tensors * ALIGN / 2)


# -- kinds ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2", "llama-tied"])
def test_bf16_parameters_have_float32_gradients_masters_and_moments(family: str, model_folders: ModelFolders) -> None:
    trainer = loaded(model_folders(family), "bfloat16")
    parameters = list(trainer.role.model.parameters())
    numbers = sum(parameter.numel() for parameter in parameters)
    held = account_of(trainer).held()
    assert list(held.device) == ["parameters", "gradients", "optimizer"] and set(held.host.values()) == {0}
    assert held.device["parameters"] == 2 * numbers + nbytes(trainer.role.model.buffers())  # a tied weight is one parameter
    assert held.device["gradients"] == joined(4 * numbers, len(parameters))
    assert held.device["optimizer"] == joined(12 * numbers, 3 * len(parameters))


def test_float32_parameters_are_their_own_masters_and_gradients_come_and_go(model_folders: ModelFolders) -> None:
    trainer = loaded(model_folders("qwen2"), "float32")
    account, parameters = account_of(trainer), list(trainer.role.model.parameters())
    numbers = sum(parameter.numel() for parameter in parameters)
    before = account.held().device
    assert before["parameters"] == 4 * numbers + nbytes(trainer.role.model.buffers())
    assert before["optimizer"] == joined(8 * numbers, 2 * len(parameters))
    trainer.accumulate(batch())
    assert (before["gradients"], account.held().device["gradients"]) == (0, 4 * numbers)
    trainer.apply()
    assert account.held().device == before


def test_joined_weights_are_counted_once(model_folders: ModelFolders) -> None:
    model = load_model(ModelConfig(path=str(model_folders("qwen2")), dtype="bfloat16"), CPU)
    fuse_and_compare(model)
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert len(storages) < len(list(model.parameters())), "no weights were joined: there is nothing to test"
    held = account_of(make_trainer(model)).held().device
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert held["parameters"] == 2 * numbers + nbytes(model.buffers())
    assert held["gradients"] == joined(4 * numbers, len(list(model.parameters())))


def test_a_freed_storage_holds_nothing(model_folders: ModelFolders) -> None:
    """Offloading may keep the tensor and give its memory back."""
    trainer = loaded(model_folders("qwen2"), "bfloat16")
    account, weight = account_of(trainer), trainer.role.model.get_output_embeddings().weight
    before = account.held().device["parameters"]
    weight.untyped_storage().resize_(0)
    assert account.held().device["parameters"] == before - 2 * weight.numel()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_offloaded_leaves_the_device(device: str, model_folders: ModelFolders) -> None:
    """On a CPU the host's memory is the device's, so that the sum is all that can be seen."""
    model = load_model(ModelConfig(path=str(model_folders("qwen2")), dtype="bfloat16"), torch.device(device))
    setting = OffloadSetting(optimizer=True)
    optimizer, residence = Optimizer(model, TrainConfig(), 10, offload=setting), Residence(model, "actor", learns=True)
    sources: dict[Kind, list[Source]] = {"parameters": [lambda: weights_of(model), residence.memory], "optimizer": [optimizer.memory]}
    account = Account(model.device, sources)
    here, parameters, buffers = account.held(), nbytes(model.parameters()), nbytes(model.buffers())
    residence.to_host()
    away = account.held()
    residence.to_device()
    assert account.held() == here
    residence.to_host()
    assert account.held() == away
    assert here.device["parameters"] - away.device["parameters"] == parameters
    states = sum(3 * aligned(4 * parameter.numel()) for parameter in model.parameters())  # a master and two moments
    if device == "cuda":
        assert away.device == {"parameters": buffers, "optimizer": states}  # one bucket holds all
        assert away.host == {"parameters": joined(parameters, len(list(model.parameters()))), "optimizer": states}
    else:
        assert away.device["optimizer"] == 2 * states


def test_the_kv_cache_is_there_from_taking_to_giving_back(model_folders: ModelFolders) -> None:
    trainer = loaded(model_folders("qwen2"), "float32")
    engine = engine_on(trainer.role.model)
    account = account_of(trainer, engine)
    assert account.held().device["kv"] == 0
    prompts = [Prompt(uid=uid, ids=np.arange(3, 12 + uid), text="") for uid in range(3)]
    with account.phase("rollout"):
        list(engine.generate(prompts, Sampling(samples=2, max_new_tokens=6), seed=0))
        account.look()
        engine.release()
    with account.phase("update-actor"):
        trainer.accumulate(batch())
        trainer.apply()
    readings = account.take()
    # 40 blocks of 8 tokens in 2 layers: keys and values of 2 heads, 8 float32 numbers each. All multiples of the alignment.
    assert readings["rollout"].held.device["kv"] == 40 * 8 * 2 * 2 * 2 * 8 * 4
    assert readings["update-actor"].held.device["kv"] == 0


def test_what_nobody_names_is_not_reported() -> None:
    tensor = torch.zeros(1000)
    account = Account(CPU, {"kv": [lambda: [tensor, tensor[5:]]]})
    assert account.held().device == {"kv": 4000}


def test_a_storage_is_of_the_first_kind_that_names_it() -> None:
    first, second = torch.zeros(10), torch.zeros(100)
    account = Account(CPU, {"optimizer": [lambda: [first, second]], "parameters": [lambda: [first]]})
    assert account.held().device == {"parameters": 40, "optimizer": 400}
    assert list(account.held().device) == [kind for kind in KINDS if kind in ("parameters", "optimizer")]


# -- phases -----------------------------------------------------------------------------------------------------------------------------


def test_gradients_are_those_that_the_passes_left(model_folders: ModelFolders) -> None:
    """float32 ones, which the optimizer step gives back inside the phase; the phase around it sees them too."""
    trainer = loaded(model_folders("qwen2"), "float32")
    account, numbers = account_of(trainer), sum(parameter.numel() for parameter in trainer.role.model.parameters())
    with account.phase("eval"), account.phase("update-actor"):
        with account.passes():
            trainer.accumulate(batch())
        trainer.apply()
    with account.phase("sync"):
        pass
    found = {phase: reading.held.device["gradients"] for phase, reading in account.take().items()}
    assert found == {"update-actor": 4 * numbers, "eval": 4 * numbers, "sync": 0}


def test_activations_that_lie_on_the_host_are_not_told_as_those_on_the_device() -> None:
    pages = [torch.zeros(1000)]
    account = Account(CPU, {"activations": [lambda: pages]})
    with account.phase("update-actor"), account.passes():
        pass
    (reading,) = account.take().values()
    assert reading.held.device == {"activations": 4000} and reading.numbers()["activations"] is None


class Allocator:
    """Torch's counts of a CUDA device, without one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.peak = {"allocated": 10, "reserved": 20}, {"allocated": 10, "reserved": 20}
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: self.stats())
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: self.peak.update(self.current))

    def stats(self) -> dict[str, dict[str, dict[str, int]]]:
        return {f"{name}_bytes": {"all": {"current": self.current[name], "peak": self.peak[name]}} for name in self.current}

    def take_and_give_back(self, allocated: int, reserved: int) -> None:
        for name, count in (("allocated", allocated), ("reserved", reserved)):
            self.peak[name] = max(self.peak[name], self.current[name] + count)


def test_the_peaks_of_the_process_outlive_those_that_the_account_resets(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    account = Account(GPU, {})
    for phase, allocated, reserved in (("rollout", 70, 90), ("update-actor", 50, 100), ("sync", 0, 0)):
        with account.phase(phase), account.passes():
            allocator.take_and_give_back(allocated, reserved)
    assert allocator.peak == {"allocated": 10, "reserved": 20}
    assert (account.peak_bytes, account.peak_reserved_bytes) == (80, 120)
    assert {phase: reading.peak for phase, reading in account.take().items()} == {"rollout": 80, "update-actor": 60, "sync": 10}


def test_a_cpu_says_what_it_knows_and_nothing_else(model_folders: ModelFolders) -> None:
    trainer = loaded(model_folders("qwen2"), "bfloat16")
    account = account_of(trainer)
    with account.phase("update-actor"):
        with account.passes():
            trainer.accumulate(batch())
        trainer.apply()
    assert account.peak_bytes is None and account.peak_reserved_bytes is None
    found = account.metrics()
    kinds = ("parameters", "gradients", "optimizer")
    assert list(found) == [*(f"memory_gib/update_actor/{kind}" for kind in kinds), "memory_gib/process"]
    held = account.held().device
    assert [found[f"memory_gib/update_actor/{kind}"] * 2**30 for kind in kinds] == [held[kind] for kind in kinds]


def test_resident_bytes_are_those_of_this_process() -> None:
    before = process_bytes()
    if before is None:
        pytest.skip("this system does not tell")
    # Written, so resident; and larger than what the C library may serve from memory that was freed before (at most 32 MiB).
    piece = torch.ones(48 * MIB, dtype=torch.uint8)
    after = process_bytes()
    assert after is not None and 40 * MIB < after - before < 80 * MIB  # other threads may take and give some meanwhile
    del piece


def test_the_largest_of_what_the_head_counts_is_kept() -> None:
    account = Account(CPU, {})
    for phase, counts in (("ref-logprob", (300, 700, 500)), ("update-actor", (20,)), ("values", (None,))):
        with account.phase(phase):
            for count in counts:
                with account.passes(count):
                    pass
    with account.phase("sync"):
        pass
    assert {phase: reading.head for phase, reading in account.take().items()} == {
        "ref-logprob": 700, "update-actor": 20, "values": None, "sync": None,
    }  # fmt: skip


def test_a_phase_that_comes_twice_is_said_by_the_most_that_it_held() -> None:
    held = [torch.zeros(10)]
    account = Account(CPU, {"kv": [lambda: held]})
    for count in (2, 1):
        with account.phase("rollout"):
            held.extend(torch.zeros(10) for _ in range(count))
            account.look()
            held.clear()
    with account.phase("sync"):
        held.clear()
    readings = account.take()
    assert {phase: reading.held.device["kv"] for phase, reading in readings.items()} == {"rollout": 120, "sync": 0}
    assert account.take() == {}  # told once


def test_phases_nest_and_passes_belong_to_the_inner_one() -> None:
    account = Account(CPU, {})
    with account.phase("eval"):
        with account.phase("reward"), account.passes(5):
            pass
        assert list(account.take()) == ["reward"]
    assert [(phase, reading.head) for phase, reading in account.take().items()] == [("eval", None)]


def test_a_phase_that_fails_is_not_said_and_harms_no_other() -> None:
    account = Account(CPU, {})
    with pytest.raises(RuntimeError, match="too bad"), account.phase("update-actor"), account.passes(5):
        raise RuntimeError("too bad")
    with account.phase("sync"):
        pass
    assert {phase: reading.head for phase, reading in account.take().items()} == {"sync": None}


def test_only_the_designs_phases_have_names() -> None:
    account = Account(CPU, {})
    with pytest.raises(AssertionError, match="'update' is not the name of a phase"), account.phase("update"):
        pass
    with pytest.raises(AssertionError, match="part of a phase"), account.passes():
        pass


# -- what becomes of it -----------------------------------------------------------------------------------------------------------------


def test_the_doctor_shows_what_a_run_has_measured(tmp_path: Path, model_folders: ModelFolders) -> None:
    trainer = loaded(model_folders("qwen2"), "bfloat16")
    account, file = account_of(trainer), MetricsFile(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        with account.phase("update-actor"):
            trainer.accumulate(batch())
            trainer.apply()
        file.append(step, {"actor/lr": 1.0, **account.metrics()})
    file.append(3, {"val/reward/mean": 0.5})
    file.close()
    measured = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])
    (of_phase, of_step) = examine_memory_of(tmp_path)
    assert (of_phase.name, of_phase.status, of_step.name) == ("memory/update_actor", "ok", "memory")
    kinds = ("parameters", "gradients", "optimizer")
    numbers = ", ".join(f"{kind} {in_bytes(measured[f'memory_gib/update_actor/{kind}'] * 2**30)}" for kind in kinds)
    assert of_phase.detail == f"in step 2: {numbers}"
    assert of_step.detail.startswith("in step 2: process ")


@pytest.mark.parametrize(("leaks", "warns"), [(True, True), (False, False)])
def test_what_is_kept_from_step_to_step_raises_the_alarm(leaks: bool, warns: bool, model_folders: ModelFolders) -> None:
    """Updates of a real model, and beside them a cache that is given back, or is not."""
    trainer = loaded(model_folders("qwen2"), "bfloat16")
    caches: list[torch.Tensor] = []
    sources: dict[Kind, list[Source]] = {"parameters": [lambda: weights_of(trainer.role.model)], "kv": [lambda: caches]}
    account, health, steps = Account(CPU, sources), Health(HealthConfig()), WARM_UP_STEPS + 1 + GROWTH_STEPS
    warnings = []
    for step in range(1, steps + 1):
        with account.phase("rollout"):
            if not leaks:
                caches.clear()
            caches.append(torch.empty(8 * MIB, dtype=torch.uint8))
        with account.phase("update-actor"):
            trainer.accumulate(batch())
            trainer.apply()
        # Without the process: what other tests have left is given back, or not, as it happens.
        metrics = {name: value for name, value in account.metrics().items() if not name.endswith("/process")}
        warnings += [(step, text) for text in health.look(step, metrics).warnings]
    assert [step for step, _ in warnings] == ([steps] if warns else [])
    if warns:
        assert (
            "memory-growth: memory held has grown in every step: kv at the end of update_actor by 0.08 to 0.10 GiB in 10" in warnings[0][1]
        )


# -- on CUDA ----------------------------------------------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.fixture
def big() -> Trainer:
    """About 166 million parameters, so that what torch keeps for itself is little beside them."""
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=32_000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4,
        tie_word_embeddings=False,
    )  # fmt: skip
    with GPU:
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16, attn_implementation=attention.register()).eval()
    return make_trainer(model)


def long_batch(tokens: int = 1024, rows: int = 8, budget: int = 4096) -> MiniBatch:
    random = np.random.default_rng(0)
    samples = [Row(ids=random.integers(0, 32_000, tokens), mask=np.arange(tokens) >= 8, group=number) for number in range(rows)]
    return minibatch(samples, "token-mean", 1, MicroSizing(budget))


def settle() -> int:
    """What other tests have left is gone; what stays is not of this test. One product of each kind of pass: cuBLAS keeps workspaces."""
    gc.collect()
    weight = torch.ones(64, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    (weight @ weight).sum().backward()
    del weight
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.gpu
@needs_gpu
def test_known_kinds_sum_to_what_is_allocated(request: pytest.FixtureRequest) -> None:
    before = settle()
    trainer: Trainer = request.getfixturevalue("big")
    engine = engine_on(trainer.role.model, blocks=4096, block_tokens=16)
    account = account_of(trainer, engine)
    prompts = [Prompt(uid=uid, ids=np.arange(3, 12 + uid), text="") for uid in range(3)]
    found = {}
    for phase in ("rollout", "update-actor"):
        with account.phase(phase):
            if phase == "rollout":
                list(engine.generate(prompts, Sampling(samples=2, max_new_tokens=6), seed=0))
            else:
                trainer.accumulate(long_batch())
                trainer.apply()
        known = sum(account.held().device.values())
        found[phase] = (known, torch.cuda.memory_allocated() - before)
        assert known == pytest.approx(found[phase][1], rel=0.01), found
    readings = account.take()
    for phase, reading in readings.items():
        assert reading.other is not None and sum(reading.held.device.values()) == found[phase][0]
        assert reading.other + found[phase][0] == found[phase][1] + before
        assert reading.reserved is not None and reading.peak is not None and reading.reserved >= reading.other + found[phase][0]
    numbers = sum(parameter.numel() for parameter in trainer.role.model.parameters())
    assert readings["rollout"].held.device["kv"] == 4096 * 16 * 8 * 2 * 4 * 64 * 2
    assert readings["rollout"].held.device["gradients"] == joined(4 * numbers, len(list(trainer.role.model.parameters())))
    assert readings["rollout"].held.host == dict.fromkeys(readings["rollout"].held.host, 0)


@pytest.mark.gpu
@needs_gpu
def test_the_peak_of_a_phase_is_its_own(big: Trainer) -> None:
    """Against torch's own count of the same update; the allocator does not split off a rest of less than 1 MiB, so that the same requests
    may be counted a little differently the second time."""
    big.accumulate(long_batch())  # kernels are compiled, workspaces taken
    big.apply()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    big.accumulate(long_batch())
    of_passes = torch.cuda.max_memory_allocated()
    big.apply()
    expected = torch.cuda.max_memory_allocated()
    account = account_of(big)
    with account.phase("rollout"):
        piece = torch.empty(32 << 30, dtype=torch.uint8, device=GPU)
        del piece
    with account.phase("update-actor"):
        with account.passes():
            big.accumulate(long_batch())
        big.apply()
    readings = account.take()
    rollout, update = readings["rollout"], readings["update-actor"]
    assert rollout.peak is not None and update.peak is not None and update.activations is not None
    assert rollout.peak == pytest.approx(start + (32 << 30), rel=0.01) and rollout.activations is None
    assert update.peak == pytest.approx(expected, rel=0.02)
    assert update.activations == pytest.approx(of_passes - start, rel=0.02)
    assert update.activations > 256 * MIB
    assert account.peak_bytes == pytest.approx(rollout.peak)
    assert account.peak_reserved_bytes is not None and account.peak_reserved_bytes >= rollout.peak > torch.cuda.max_memory_allocated()


@pytest.mark.gpu
@needs_gpu
def test_activations_are_what_passes_take_and_give_back() -> None:
    settle()
    kept: list[torch.Tensor] = []
    account = Account(GPU, {"gradients": [lambda: kept]})

    def take(mib: int) -> torch.Tensor:
        return torch.empty(mib * MIB, dtype=torch.uint8, device=GPU)

    before = torch.cuda.memory_allocated()
    with account.phase("eval"):
        outside = take(64)  # between passes: a peak of the phase, and no activation
        with account.phase("update-actor"):
            for mib in (256, 128):
                with account.passes():
                    temporary = take(mib)
                    if not kept:
                        kept.append(take(96))  # a gradient that is made in a pass, and stays
                    del temporary
            step = take(512)  # of the optimizer
            del step
        del outside
    readings = account.take()
    update, outer = readings["update-actor"], readings["eval"]
    near = 2 * MIB  # a rest of less than 1 MiB is not split off
    assert update.activations == pytest.approx(256 * MIB, abs=near)
    assert update.peak == pytest.approx(before + (64 + 96 + 512) * MIB, abs=2 * near)
    assert outer.peak == update.peak and outer.activations is None
    assert update.held.device == {"gradients": 96 * MIB}
    assert (update.other, outer.other) == (pytest.approx(before + 64 * MIB, abs=near), pytest.approx(before, abs=near))


@pytest.mark.gpu
@needs_gpu
def test_what_is_offloaded_is_counted_on_the_host() -> None:
    there = torch.empty(64 * MIB, dtype=torch.uint8, device=GPU)
    here = torch.empty(32 * MIB, dtype=torch.uint8, pin_memory=True)
    account = Account(GPU, {"parameters": [lambda: [there]], "optimizer": [lambda: [here]]})
    with account.phase("sync"):
        pass
    assert account.held().device == {"parameters": 64 * MIB, "optimizer": 0}
    assert account.held().host == {"parameters": 0, "optimizer": 32 * MIB}
    found = account.metrics()
    assert found["memory_gib/sync/host"] == 32 / 1024 and found["memory_gib/sync/optimizer"] == 0
    assert set(found) == {
        *(f"memory_gib/sync/{name}" for name in ("parameters", "optimizer", "other", "host", "peak")),
        "memory_gib/reserved",
        "memory_gib/process",
    }


@pytest.mark.gpu
@needs_gpu
def test_nothing_waits_for_the_device(big: Trainer) -> None:
    account = account_of(big)
    torch.cuda.synchronize()
    matrix = torch.ones(8192, 8192, device=GPU)
    with refuse_waits():
        for _ in range(100):  # more than a second of work, on its way while the phase ends
            matrix = matrix @ matrix
        with account.phase("update-actor"), account.passes():
            pass
        account.metrics()
        running = not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert running
