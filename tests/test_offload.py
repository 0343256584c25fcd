"""Parameters, gradients and optimizer states that are not on the device all the time: bits, bytes and order.

On a CPU the host is main memory too, so all of the logic runs here; `-m gpu` shows the bytes that the device gets back, and the order of
copies on streams of their own.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import runs
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from safetensors.torch import load_file, save_file
from tensors import accumulated, restored

from fulltilt.algo.loss import sft_loss
from fulltilt.batching.pack import MicroSizing, minibatch
from fulltilt.cluster.worker import Residents
from fulltilt.memory.host import free_host_bytes
from fulltilt.memory.offload import (
    ALIGN,
    ON_DEVICE,
    Entry,
    OffloadSetting,
    Residence,
    States,
    absent,
    aligned,
    host_memory,
)
from fulltilt.model import attention
from fulltilt.model.attention import Packed
from fulltilt.model.forward import hidden_states
from fulltilt.model.fuse import check_fused, fuse
from fulltilt.model.load import load_model
from fulltilt.model.scalar import ScalarModel
from fulltilt.model.verify import packed_logprobs
from fulltilt.plan.decisions import OFFLOADS
from fulltilt.plan.legal import why_not_offloaded
from fulltilt.plan.resident import STREAMED
from fulltilt.records import Row, UserError
from fulltilt.schema import ModelConfig, TrainConfig
from fulltilt.training.optim import Optimizer, learning_rate
from fulltilt.training.roles import Policy
from fulltilt.training.trainer import Trainer

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GIB = 1 << 30
TINY = OffloadSetting(optimizer=True, bucket_bytes=3000)  # every matrix is cut
SETTINGS = {
    "on device": ON_DEVICE,
    "grads": OffloadSetting(grads=True),
    "optimizer": TINY,
    "two buckets": OffloadSetting(optimizer=True, bucket_bytes=3000, buckets=2),
    "one bucket": OffloadSetting(optimizer=True, grads=True),  # larger than all there is
}
RULES = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 4.0, "warmup_steps": 2}


# ---- an optimizer as plain as can be ---------------------------------------------------------------------------------------------------


class Odd(torch.nn.Module):
    """Parameters of odd sizes, one with its axes swapped, some of them wider than the rest, one that never gets a gradient."""

    def __init__(self, dtype: torch.dtype, device: torch.device = CPU, scale: int = 1) -> None:
        super().__init__()
        wide = torch.promote_types(dtype, torch.float32)
        random = torch.Generator().manual_seed(0)

        def make(*shape: int, of: torch.dtype = dtype) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=random).to(device, of))

        self.head = make(11, 3, of=wide)
        self.one, self.matrix, self.vector, self.stack = make(1), make(37 * scale, 19), make(64), make(3, 5, 7 * scale)
        self.swapped = torch.nn.Parameter(make(23, 41 * scale).detach().t())
        self.bias = make(5, of=wide)
        self.alone = make(4, 9, of=wide)
        self.frozen = make(3).requires_grad_(False)


class Plain:
    """torch's AdamW over float32 masters, a tensor at a time: what every setting must do to the bit."""

    def __init__(self, model: torch.nn.Module, config: TrainConfig, total: int) -> None:
        self.config, self.total, self.updates = config, total, 0
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters = {
            name: p if p.dtype in (torch.float32, torch.float64) else p.detach().float().clone() for name, p in self.parameters.items()
        }
        groups = [[m for m in self.masters.values() if (m.ndim >= 2) == matrices] for matrices in (True, False)]
        self.adam = torch.optim.AdamW(
            [{"params": groups[0], "weight_decay": config.weight_decay}, {"params": groups[1], "weight_decay": 0.0}],
            betas=config.betas, eps=config.eps, fused=all(m.is_cuda for m in self.masters.values()),
        )  # fmt: skip

    @torch.no_grad()
    def step(self, gradients: dict[str, torch.Tensor]) -> float:
        for name, master in self.masters.items():
            master.grad = gradients[name].clone() if name in gradients else None
        found = [m.grad for m in self.masters.values() if m.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(found))
        lr = learning_rate(self.config, self.updates, self.total)
        self.updates += 1
        if not np.isfinite(norm):
            return norm
        if norm > self.config.clip_grad:
            torch._foreach_mul_(found, self.config.clip_grad / (norm + 1e-6))
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])
        return norm


def random_gradients(model: torch.nn.Module, update: int, scale: int = 1) -> dict[str, torch.Tensor]:
    """One of them is not finite in the third update, some are clipped and some are not, however large the model is (`scale`)."""
    random = torch.Generator().manual_seed(100 + update)
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name != "alone":
            wide = torch.promote_types(parameter.dtype, torch.float32)
            gradient = (0.01 + update % 2) / scale**0.5 * torch.randn(parameter.shape, generator=random)
            found[name] = torch.empty_like(parameter, dtype=wide).copy_(gradient)
    if update == 2:
        found["matrix"][0, 0] = float("inf")
    return found


def give(optimizer: Optimizer, model: torch.nn.Module, gradients: dict[str, torch.Tensor]) -> None:
    optimizer.prepare()
    for name, parameter in model.named_parameters():
        if name in gradients and hasattr(parameter, "main_grad"):
            parameter.main_grad.add_(gradients[name])
        elif name in gradients:
            parameter.grad = gradients[name].clone()


def assert_same(optimizer: Optimizer, model: torch.nn.Module, other: Optimizer, twin: torch.nn.Module) -> None:
    ours, theirs = optimizer.tensors(), other.tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor.cpu(), theirs[name].cpu()) for name, tensor in ours.items())
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def compare_with_plain(offload: OffloadSetting, dtype: torch.dtype, device: torch.device, scale: int = 1, updates: int = 6) -> None:
    model, twin = Odd(dtype, device, scale), Odd(dtype, device, scale)
    config = TrainConfig(**RULES)
    optimizer, plain = Optimizer(model, config, updates, offload=offload), Plain(twin, config, updates)
    clipped = []
    for update in range(updates):
        gradients = random_gradients(twin, update, scale)
        give(optimizer, model, gradients)
        report = optimizer.step()
        assert report.grad_norm == plain.step(gradients) or report.skipped
        assert report.skipped == (update == 2)
        clipped.append(report.grad_norm > config.clip_grad)
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    assert True in clipped and False in clipped
    tensors = optimizer.tensors()
    for name, master in plain.masters.items():
        if master is not plain.parameters[name]:
            assert torch.equal(tensors[f"master/{name}"].to(device), master)
        if name != "alone":
            for kept in ("exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(tensors[f"{kept}/{name}"].to(device), plain.adam.state[master][kept].to(device)), (kept, name)
    assert not tensors["step/alone"] and not tensors["exp_avg/alone"].any()
    assert not torch.equal(model.matrix, Odd(dtype, device, scale).matrix)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_torchs_adamw_to_the_bit(name: str, dtype: torch.dtype) -> None:
    """Clipped and unclipped, decayed and not, a gradient that is not finite, one that is missing."""
    compare_with_plain(SETTINGS[name], dtype, CPU)


@pytest.mark.parametrize("name", ["on device", "optimizer"])
def test_a_gradient_may_lie_in_memory_otherwise_than_its_parameter(name: str) -> None:
    model, twin = Odd(torch.float32), Odd(torch.float32)
    optimizers = [Optimizer(each, TrainConfig(lr=1e-2, clip_grad=0.0), 1, offload=SETTINGS[name]) for each in (model, twin)]
    for each in (model, twin):
        each.swapped.grad = random_gradients(each, 1)["swapped"]
    twin.swapped.grad = twin.swapped.grad.contiguous()
    assert twin.swapped.grad.stride() != model.swapped.grad.stride() == model.swapped.stride()  # type: ignore[union-attr]
    assert not any([optimizer.step().skipped for optimizer in optimizers])
    assert_same(optimizers[0], model, optimizers[1], twin)


def learn(optimizer: Optimizer, model: torch.nn.Module, updates: range) -> None:
    for update in updates:
        give(optimizer, model, random_gradients(model, update))
        optimizer.step()


@pytest.mark.parametrize("names", [("on device", "optimizer"), ("optimizer", "grads"), ("optimizer", "two buckets")], ids=" to ".join)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_checkpoint_of_one_setting_goes_on_in_another(names: tuple[str, str], dtype: torch.dtype, tmp_path: Path) -> None:
    """Through the file, whose format allows no tensors that overlap."""
    start = partial(Optimizer, config=TrainConfig(**RULES), total_updates=6, keeps_parameters=True)
    whole_model, first_model, second_model = (Odd(dtype) for _ in range(3))
    whole, first = start(whole_model), start(first_model, offload=SETTINGS[names[0]])
    learn(whole, whole_model, range(6))
    learn(first, first_model, range(3))
    save_file({name: tensor.contiguous() for name, tensor in first.tensors().items()}, tmp_path / "tensors")
    second = start(second_model, offload=SETTINGS[names[1]])
    restored(second, load_file(tmp_path / "tensors"), first.updates, first.skipped)
    assert_same(second, second_model, first, first_model)
    learn(second, second_model, range(3, 6))
    assert (second.updates, second.skipped) == (6, 1)
    assert_same(second, second_model, whole, whole_model)


def held(optimizer: Optimizer) -> int:
    return sum(memory.nbytes for memory in optimizer.memory())


@pytest.mark.parametrize("name", SETTINGS)
def test_states_exist_once_and_take_no_more_bytes_than_they_must(name: str) -> None:
    offload = SETTINGS[name]
    model = Odd(torch.bfloat16)
    optimizer = Optimizer(model, TrainConfig(), 1, offload=offload)
    optimizer.prepare()
    low = [aligned(4 * p.numel()) for p in model.parameters() if hasattr(p, "main_grad")]
    wide = [aligned(4 * p.numel()) for p in model.parameters() if p.requires_grad and not hasattr(p, "main_grad")]
    assert len(low) == 5 and model.matrix.main_grad.untyped_storage().nbytes() == sum(low)  # type: ignore[union-attr]
    states = 3 * sum(low) + 2 * sum(wide)
    if offload.optimizer:
        assert 0 < held(optimizer) - states <= min(states, offload.buckets * offload.bucket_bytes)
    else:
        assert held(optimizer) == states
    homes = {memory.data_ptr() for memory in optimizer.memory()}
    kept = {key: tensor for key, tensor in optimizer.tensors().items() if not key.startswith("step/")}
    assert {tensor.untyped_storage().data_ptr() for tensor in kept.values()} <= homes


def test_gradients_are_there_from_the_first_pass_to_the_end_of_the_step(model_folders) -> None:
    model = load_model(ModelConfig(path=str(model_folders("llama-tied")), dtype="bfloat16"), CPU)
    trainer = Trainer(Policy("actor", model, 1.0, Optimizer(model, TrainConfig(lr=1e-3), 4, offload=OffloadSetting(grads=True))), sft_loss)
    there = lambda: {hasattr(parameter, "main_grad") for parameter in model.parameters()}  # noqa: E731
    trainer.optimizer.begin(0)
    assert there() == {False}
    with pytest.raises(AssertionError, match="prepare"):
        packed_logprobs(model, [np.arange(3, 20)])[0][0].sum().backward()
    trainer.optimizer.zero_grad()
    memory: list[Any] = []
    for _ in range(2):
        trainer.accumulate(batch_of(3))
        assert there() == {True}
        memory = [parameter.main_grad for parameter in model.parameters()]
        assert len({gradient.untyped_storage().data_ptr() for gradient in memory}) == 1
        before = memory[0].clone()
        trainer.accumulate(batch_of(3))  # on top of what is there
        torch.testing.assert_close(memory[0], 2 * before)
        trainer.apply()
        assert there() == {False} and not trainer.optimizer._held.gradients  # type: ignore[attr-defined]


def batch_of(count: int, seed: int = 0, longest: int = 40, vocabulary: int = models.VOCABULARY) -> Any:
    random = np.random.default_rng(seed)
    documents = [random.integers(3, vocabulary, int(random.integers(4, longest))) for _ in range(count)]
    rows = [Row(ids=document, mask=np.arange(len(document)) >= 2) for document in documents]
    return minibatch(rows, "token-mean", 1, MicroSizing(60))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_model_learns_the_same_with_everything_offloaded(fused: bool, dtype: str, model_folders) -> None:
    """A tied embedding larger than a bucket, joined projections, micro-batches: two trainers, the same bits after every step."""
    trainers = []
    for offload in (ON_DEVICE, OffloadSetting(optimizer=True, grads=True, bucket_bytes=20_000)):
        model = load_model(ModelConfig(path=str(model_folders("llama-tied")), dtype=dtype), CPU)
        if fused:
            assert fuse(model).joined == 4
        optimizer = Optimizer(model, TrainConfig(lr=1e-2, weight_decay=0.1), 4, offload=offload)
        trainers.append(Trainer(Policy("actor", model, 1.0, optimizer), sft_loss))
    assert len(trainers[1].optimizer._states.buckets) > 5
    for seed in range(3):
        metrics = [accumulated(trainer, batch_of(5, seed)) | trainer.apply() for trainer in trainers]
        assert metrics[0] == metrics[1]
        (one, first), (other, second) = ((trainer.optimizer, trainer.role.model) for trainer in trainers)
        assert_same(one, first, other, second)


# ---- layout and stream -----------------------------------------------------------------------------------------------------------------


def entries() -> some.SearchStrategy[list[Entry]]:
    one = some.tuples(some.integers(1, 3000), some.sampled_from([(torch.float32, True), (torch.float32, False), (torch.float64, False)]))
    return some.lists(one, min_size=1, max_size=12).map(
        lambda found: [
            Entry(f"tensor {number}", count, dtype, ("first", "second", "master") if low else ("first", "second"))
            for number, (count, (dtype, low)) in enumerate(found)
        ]
    )


@settings(max_examples=60, deadline=None)
@given(entries(), some.integers(1, 40_000) | some.none())
def test_buckets_hold_every_number_once(found: list[Entry], bucket_bytes: int | None) -> None:
    if bucket_bytes is None:
        states = States(found, CPU)
        assert len(states.buckets) == 1
    else:
        states = States(found, CPU, OffloadSetting(optimizer=True, bucket_bytes=bucket_bytes, buckets=2))
        for slot in states._slots:
            assert sum(memory.nbytes for memory in slot.values()) <= max(bucket_bytes, ALIGN * len(slot))
    assert {*states._homes} == {kind for entry in found for kind in entry.kinds}
    covered: dict[str, int] = dict.fromkeys((entry.name for entry in found), 0)
    sizes, kinds = {entry.name: entry.dtype.itemsize for entry in found}, {entry.name: entry.kinds for entry in found}
    for bucket in states.buckets:
        ranges: list[tuple[int, int]] = []
        for part in bucket:
            start, stop = part.numbers.start, part.numbers.stop
            assert start == covered[part.name] < stop and start * sizes[part.name] % ALIGN == 0  # in order, without holes
            assert all(len(state) == stop - start and state.data_ptr() % sizes[part.name] == 0 for state in part.states.values())
            ranges += [(state.data_ptr(), state.data_ptr() + state.nbytes) for state in part.states.values()]
            covered[part.name] = stop
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(sorted(ranges)))  # nothing lies on another
    assert covered == {entry.name: entry.count for entry in found}
    assert all({*part.states} == {*kinds[part.name]} for bucket in states.buckets for part in bucket)


def some_states(device: torch.device, count: int, bucket_bytes: int, slots: int) -> tuple[States, list[Entry]]:
    found = [Entry(str(number), count + number, torch.float32, ("a", "b", "c") if number % 2 else ("a", "b")) for number in range(7)]
    return States(found, device, OffloadSetting(optimizer=True, bucket_bytes=bucket_bytes, buckets=slots)), found


def pass_over(states: States, rounds: int) -> None:
    """Each pass makes a = 2 a + place and b = b + a; the place is that of the number in its entry."""
    for _ in range(rounds):
        for bucket in states.stream():
            for part in states.buckets[bucket]:
                a, b = part.states["a"], part.states["b"]
                a.mul_(2).add_(torch.arange(part.numbers.start, part.numbers.stop, device=states.device, dtype=torch.float32) % 13)
                b.add_(a)


def expected_after(count: int, rounds: int) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = torch.zeros(count), torch.zeros(count)
    for _ in range(rounds):
        a = 2 * a + torch.arange(count, dtype=torch.float32) % 13
        b = b + a
    return a, b


def assert_passed(states: States, found: list[Entry], rounds: int) -> None:
    states.settle()
    for entry in found:
        a, b = expected_after(entry.count, rounds)
        assert torch.equal(states.home(entry, "a"), a) and torch.equal(states.home(entry, "b"), b)
        assert "c" not in entry.kinds or not states.home(entry, "c").any()


@pytest.mark.parametrize("slots", [2, 3, 5])
def test_a_stream_changes_what_is_on_the_host(slots: int) -> None:
    states, found = some_states(CPU, 1000, 4000, slots)
    assert len(states.buckets) > 2 * slots
    pass_over(states, 4)
    assert_passed(states, found, 4)


def test_only_the_named_kinds_travel() -> None:
    states, found = some_states(CPU, 1000, 4000, 3)
    pass_over(states, 2)
    for bucket in states.stream(read=(), written=("c",)):
        for part in states.buckets[bucket]:
            for kind, state in part.states.items():
                state.fill_({"a": 5.0, "b": 6.0, "c": 7.0}[kind])
    for entry in found:
        assert "c" not in entry.kinds or (states.home(entry, "c") == 7).all()
        if "c" in entry.kinds:
            states.home(entry, "c").zero_()
    assert_passed(states, found, 2)
    for bucket in states.stream(read=("a",), written=()):
        for part in states.buckets[bucket]:
            entry = next(entry for entry in found if entry.name == part.name)
            assert torch.equal(part.states["a"], states.home(entry, "a")[part.numbers])
            part.states["a"].zero_()
    assert_passed(states, found, 2)


def test_host_memory_is_of_the_exact_size_and_goes_with_its_last_view() -> None:
    before = mapped_bytes()
    memory = host_memory((33 << 20) + 5, CPU)
    assert memory.nbytes == memory.untyped_storage().nbytes() == (33 << 20) + 5 and not memory.any()
    if before is not None:
        assert (33 << 20) <= mapped_bytes() - before < (48 << 20)  # rounded up it would be 64
    view = memory[1 << 20 : 2 << 20].view(torch.float32)
    del memory
    view.fill_(3.0)
    assert (view == 3).all()
    del view
    if before is not None:
        assert mapped_bytes() - before < (15 << 20)
    assert host_memory(0, CPU).nbytes == 0


def test_files_that_were_read_leave_main_memory_free(tmp_path: Path) -> None:
    """100 GiB are allowed, 95 are used, 70 of that by files, which the system gives up when memory is asked for. What lies in memory-backed
    file systems, `file` has it too, it cannot give up."""
    stat = f"anon {20 * GIB}\nfile {75 * GIB}\ninactive_file {40 * GIB}\nactive_file {30 * GIB}\nshmem {5 * GIB}\n"
    new = {"memory.max": f"{100 * GIB}\n", "memory.current": f"{95 * GIB}\n", "memory.stat": stat}
    older = f"cache 1\ninactive_file 1\nactive_file 1\ntotal_inactive_file {40 * GIB}\ntotal_active_file {30 * GIB}\n"
    old = {"memory.limit_in_bytes": f"{100 * GIB}\n", "memory.usage_in_bytes": f"{95 * GIB}\n", "memory.stat": older}
    meminfo = f"MemTotal:       {600 << 20} kB\nMemFree:  1 kB\nMemAvailable:   {500 << 20} kB\n"
    for name, folder, files, group in (
        ("new", "sys/fs/cgroup", new, "0::/"),
        ("old", "sys/fs/cgroup/memory", old, "4:memory:/\n0::/"),
        ("job", "sys/fs/cgroup/jobs/one/task", new, "0::/jobs/one/task/step"),  # the limit is one of those around its own
        ("old-job", "sys/fs/cgroup/memory/jobs", old, "5:cpu,cpuacct:/else\n4:memory:/jobs/one"),
    ):
        root = tmp_path / name
        write(root, {"proc/meminfo": meminfo, "proc/self/cgroup": f"{group}\n", **{f"{folder}/{key}": text for key, text in files.items()}})
        assert free_host_bytes(root) == 75 * GIB, name
    write(tmp_path / "new", {"sys/fs/cgroup/memory.max": "max\n"})
    write(tmp_path / "old", {"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n"})
    assert free_host_bytes(tmp_path / "new") == free_host_bytes(tmp_path / "old") == 500 * GIB  # no limit
    write(tmp_path / "job", {"sys/fs/cgroup/jobs/one/task/memory.current": f"{200 * GIB}\n"})
    assert free_host_bytes(tmp_path / "job") == 0
    assert free_host_bytes(tmp_path / "nothing") > 0 and 0 < free_host_bytes() < 1 << 50


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_more_host_memory_than_there_is_is_refused_before_it_is_touched() -> None:
    """The system would end the process, and say nothing."""
    before = mapped_bytes()
    with pytest.raises(UserError, match=r"GiB of main memory are needed for offload, and \d+\.\d GiB are free\. Free main memory, raise"):
        host_memory(2 * free_host_bytes() + GIB, CPU)
    if before is not None:
        assert mapped_bytes() - before < 1 << 20


def test_host_memory_that_the_system_does_not_give_is_the_users_to_mend(tmp_path: Path) -> None:
    """As with strict overcommit: here the address space is bounded."""
    code = (
        "import resource, torch\nfrom fulltilt.memory.offload import host_memory\nfrom fulltilt.records import UserError\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))\n"
        "try:\n    host_memory(256 << 20, torch.device('cpu'))\nexcept UserError as error:\n    print(error)\n"
    )
    if mapped_bytes() is None:
        pytest.skip("the system does not tell")
    child = runs.code_forked(tmp_path, code)
    assert child.code == 0, child.error
    assert child.out.startswith("0.2 GiB of main memory could not be allocated for offload: Cannot allocate memory. Free main memory")


def test_the_plan_counts_the_slots_that_a_streamed_optimizer_has_on_the_device() -> None:
    assert OffloadSetting().buckets * OffloadSetting().bucket_bytes == STREAMED


def mapped_bytes() -> int | None:
    """Of this process's address space; None where the system does not tell."""
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[0]) * 4096 if file.exists() else None


# ---- parameters ------------------------------------------------------------------------------------------------------------------------


def own_memory(model: torch.nn.Module) -> torch.nn.Module:
    """On a CPU transformers maps weights from their file, which cannot be given back."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def model_of(folder: Path, dtype: str = "float32", device: torch.device = CPU, fused: bool = True) -> Any:
    model = own_memory(load_model(ModelConfig(path=str(folder), dtype=dtype), device))
    if fused:
        assert fuse(model).joined == 4  # type: ignore[arg-type]
    return model


def logprobs(model: Any) -> torch.Tensor:
    documents = [np.arange(3, 40), np.arange(90, 20, -3)]
    with torch.no_grad():
        return torch.cat(packed_logprobs(model, documents)[0])


@pytest.mark.parametrize("family", ["qwen2", "llama-tied"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_parameters_leave_and_come_back_bit_for_bit(family: str, fused: bool, model_folders) -> None:
    model = model_of(model_folders(family), fused=fused)
    objects, values, said = list(model.parameters()), [p.detach().clone() for p in model.parameters()], logprobs(model)
    residence = Residence(model, "ref", learns=False)
    for _ in range(2):
        residence.to_host()
        assert all(absent(parameter) for parameter in objects) and not residence.on_device
        residence.to_host()  # once is enough
        residence.to_device()
        assert [id(p) for p in model.parameters()] == [id(p) for p in objects]
        assert all(torch.equal(p, value) for p, value in zip(objects, values, strict=True))
        if fused:
            assert check_fused(model).joined == 4
        assert torch.equal(logprobs(model), said)


def test_joined_weights_that_moved_stay_joined(model_folders) -> None:
    """Joined tensors share the parameters' storage and follow it."""
    model = model_of(model_folders("qwen2"))
    said, residence = logprobs(model), Residence(model, "ref", learns=False)
    layer = model.base_model.layers[0].self_attn
    before = layer.q_proj.weight.data_ptr()
    blocks = []  # what was given back is another's then; until the weights come back to another place
    while layer.q_proj.weight.data_ptr() == before and len(blocks) < 100:
        residence.to_host()
        blocks.append([torch.empty(parameter.numel()) for parameter in model.parameters()])
        residence.to_device()
    assert layer.q_proj.weight.data_ptr() != before
    assert layer.q_proj.weight.untyped_storage().data_ptr() == layer.v_proj.weight.untyped_storage().data_ptr()
    assert check_fused(model).joined == 4 and torch.equal(logprobs(model), said)


def test_what_a_role_learns_goes_out_and_what_it_only_read_does_not(model_folders) -> None:
    model = model_of(model_folders("qwen2"), "bfloat16")
    residence = Residence(model, "critic", learns=True)
    optimizer = Optimizer(model, TrainConfig(lr=1e-2), 4, offload=OffloadSetting(optimizer=True, grads=True, bucket_bytes=20_000))
    twin = model_of(model_folders("qwen2"), "bfloat16")
    resident = Optimizer(twin, TrainConfig(lr=1e-2), 4)
    residence.to_host()
    for seed in range(3):
        residence.to_device()
        ours, theirs = (Trainer(Policy("a", m, 1.0, o), sft_loss) for m, o in ((model, optimizer), (twin, resident)))
        assert ours.accumulate(batch_of(4, seed)) == theirs.accumulate(batch_of(4, seed))
        assert ours.apply() == {**theirs.apply()}
        residence.to_host()
        residence.to_device()
        assert_same(optimizer, model, resident, twin)
        with torch.no_grad():
            model.base_model.norm.weight.fill_(9.0)  # a promise broken: shows that nothing was copied out
        residence.to_host(unchanged=True)
        residence.to_device()
        assert_same(optimizer, model, resident, twin)
        residence.to_host()


def test_what_is_away_cannot_be_run_or_updated_or_saved(model_folders) -> None:
    body = model_of(model_folders("llama"))
    model = ScalarModel(body, torch.nn.Linear(models.SMALL["hidden_size"], 1))  # type: ignore[call-overload]
    optimizer = Optimizer(model, TrainConfig(), 1, keeps_parameters=True)
    residence = Residence(model, "critic", learns=True)
    residence.to_host()
    with pytest.raises(AssertionError, match="parameters of the critic are on the host"):
        run_body(body)
    for act in (optimizer.tensors, optimizer.step):
        with pytest.raises(AssertionError, match="must be on the device"):
            act()
    residence.to_device()
    run_body(body)
    assert any(name == "parameter/score.weight" for name in optimizer.tensors())


def run_body(body: Any) -> None:
    with torch.no_grad():
        hidden_states(body, torch.arange(3, 9), torch.arange(6), Packed.of(np.array([0, 6], dtype=np.int32), CPU))


def test_reasons() -> None:
    assert all("CPU" in (why_not_offloaded(key, "ref", "cpu") or "") for key in OFFLOADS)
    assert (
        why_not_offloaded("offload_optimizer", "actor", "cuda", alone=True) is None
        and why_not_offloaded("offload_params", "actor", "cuda") is None
    )
    assert "no other role" in (why_not_offloaded("offload_params", "actor", "cuda", alone=True) or "")
    assert "no parameters that could leave" in (why_not_offloaded("offload_params", "ref", "cuda", shared=True) or "")


# ---- on a CUDA device ------------------------------------------------------------------------------------------------------------------


SCALARS = 64 << 10  # bytes of counters and other small tensors that come and go


def allocated() -> int:
    """Bytes that tensors hold, as they asked for them: without what the allocator adds to fill its blocks."""
    gc.collect()
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # the allocator looks for copies that have ended when it is asked for memory
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def keep_busy() -> Iterator[None]:
    """Work that the compute stream is still at while copies are asked for, so that a missing wait shows."""
    left = torch.randn(4096, 4096, device="cuda")
    while True:
        for _ in range(4):
            left = (left @ left).tanh_()
        yield


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_torchs_fused_adamw_to_the_bit(name: str, dtype: torch.dtype) -> None:
    compare_with_plain(SETTINGS[name], dtype, GPU)
    compare_with_plain(OffloadSetting(**{**vars(SETTINGS[name]), "bucket_bytes": 50_000}), dtype, GPU, scale=101, updates=5)


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [2, 3])
def test_copies_are_ordered_under_stress(slots: int) -> None:
    """Hundreds of buckets a pass, passes back to back, a busy compute stream before each: a copy that came early or late would show."""
    states, found = some_states(GPU, 200_003, 3 * 16_384, slots)
    assert len(states.buckets) > 200
    busy = keep_busy()
    rounds = 6
    for _ in range(rounds):
        next(busy)
        pass_over(states, 1)
    assert_passed(states, found, rounds)
    with torch.cuda.stream(torch.cuda.Stream()):  # whatever stream computes
        pass_over(states, 2)
    assert_passed(states, found, rounds + 2)


@pytest.mark.gpu
def test_a_streamed_step_takes_no_memory_once_it_has_begun() -> None:
    model = Odd(torch.bfloat16, GPU, scale=101)
    optimizer = Optimizer(model, TrainConfig(**RULES), 9, offload=OffloadSetting(optimizer=True, bucket_bytes=50_000))
    learn(optimizer, model, range(2))
    counts: list[int] = []
    stream = optimizer._states.stream

    def counting(*kinds: Any) -> Iterator[int]:
        for number in stream(*kinds):
            counts.append(torch.cuda.memory_stats()["allocation.all.allocated"])
            yield number
        counts.append(torch.cuda.memory_stats()["allocation.all.allocated"])

    optimizer._states.stream = counting  # type: ignore[method-assign, assignment]
    learn(optimizer, model, range(3, 5))
    assert len(counts) > 50
    per_step = len(counts) // 2
    assert len(set(counts[:per_step])) == 1 and len(set(counts[per_step:])) == 1


def larger_model() -> Any:
    shape = {**models.SMALL, "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_hidden_layers": 8}
    with torch.device("cuda"):
        model = models.AutoModelForCausalLM.from_config(
            models.Qwen2Config(**shape), dtype=torch.bfloat16, attn_implementation=attention.register()
        ).eval()
    fuse(model)
    return model


@pytest.mark.gpu
def test_the_device_gets_the_bytes_of_parameters_back() -> None:
    model = larger_model()
    said, before = logprobs(model), allocated()
    residence, nbytes = Residence(model, "ref", learns=False), sum(parameter.nbytes for parameter in model.parameters())
    assert nbytes > 40 << 20 and allocated() - before < SCALARS
    for _ in range(2):
        residence.to_host()
        assert abs(before - allocated() - nbytes) < SCALARS
        residence.to_device()
        assert abs(allocated() - before) < SCALARS
        assert torch.equal(logprobs(model), said) and check_fused(model).joined == 16
    residence.to_host()
    assert abs(before - allocated() - nbytes) < SCALARS


@pytest.mark.gpu
@pytest.mark.parametrize("on_host", [False, True], ids=["states on device", "states on host"])
def test_the_device_gets_the_bytes_of_gradients_and_states_back(on_host: bool) -> None:
    model, offload = larger_model(), OffloadSetting(optimizer=on_host, grads=True, bucket_bytes=6 << 20)
    gradients = sum(aligned(4 * parameter.numel()) for parameter in model.parameters())
    before = allocated()
    optimizer = Optimizer(model, TrainConfig(), 4, offload=offload)
    assert abs(allocated() - before - (18 << 20 if on_host else 3 * gradients)) < SCALARS
    pinned = [memory for memory in optimizer.memory() if not memory.is_cuda]
    assert sum(memory.nbytes for memory in pinned) == (3 * gradients if on_host else 0) and all(memory.is_pinned() for memory in pinned)
    trainer = Trainer(Policy("actor", model, 1.0, optimizer), sft_loss)
    for _ in range(2):
        trainer.accumulate(batch_of(3))
        with_gradients = allocated()
        trainer.apply()
        # What passes leave for good (workspaces of matrix products) is in both numbers.
        assert abs(with_gradients - allocated() - gradients) < SCALARS


@pytest.mark.gpu
def test_parameters_travel_in_order_under_stress() -> None:
    """A role that learns leaves and comes back while the compute stream is busy, and what it gave back is written over at once."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(701, 701, bias=False, device="cuda") for _ in range(24)))
    exact = [parameter.detach().clone() for parameter in model.parameters()]
    residence = Residence(model, "critic", learns=True)
    busy = keep_busy()
    for number in range(12):
        residence.to_device()
        next(busy)
        with torch.no_grad():
            for parameter, other in zip(model.parameters(), exact, strict=True):
                parameter.mul_(0.5).add_(number)
                other.mul_(0.5).add_(number)
        residence.to_host()
        scribble = [torch.full_like(other, float("nan")) for other in exact]  # takes the memory that was given back
        next(busy)
        del scribble
    residence.to_device()
    assert all(torch.equal(parameter, other) for parameter, other in zip(model.parameters(), exact, strict=True))


@pytest.mark.gpu
def test_the_actor_does_not_come_back_into_what_the_cache_has_lent() -> None:
    """Its own blocks went to the driver meanwhile. In a block of the cache's, it would keep that from being given back or taken whole."""
    residents = Residents()
    model = larger_model()
    residents.add("actor", model, learns=True)
    residents.need()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    cache = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    del cache
    residents.need("actor")
    torch.cuda.synchronize()
    places = {parameter.data_ptr() for parameter in model.parameters()}
    for segment in torch.cuda.memory_snapshot():
        begin, size = segment["address"], segment["total_size"]
        assert size < GIB or not any(begin <= place < begin + size for place in places)


@pytest.mark.gpu
def test_pinned_memory_is_exact_and_given_back() -> None:
    for _ in range(20):  # an address that stayed pinned would be refused the second time
        memory = host_memory((5 << 20) + 3, GPU)
        assert memory.is_pinned() and memory.nbytes == (5 << 20) + 3
        filled = torch.arange(memory.nbytes, device="cuda").to(torch.uint8)
        memory.copy_(filled, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(memory, filled.cpu())
        del memory
