"""Offload of activations: the same gradients to the bit, what goes and what stays, bounds on device memory, host memory that is reused.

On a CUDA device (`-m gpu`) also: streams, memory between the passes, and bits under deterministic kernels."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from layers import Applied, apply_recompute
from test_lora import settings, stir
from test_recompute import (
    CPU,
    FUSED,
    GPU,
    LENGTHS,
    LONG,
    SHAPE,
    assert_same,
    backward,
    deep,
    deterministic,
    gradients,
    held_between_passes,
    load,
    on_gpu,
    peak_of_a_pass,
    states,
)
from torch.autograd.graph import saved_tensors_hooks
from variants import sample_cases

from fulltilt.memory import activations
from fulltilt.memory.activations import ActivationOffload, saved_bytes
from fulltilt.model.fuse import fuse
from fulltilt.model.load import load_model
from fulltilt.model.lora import add_adapters
from fulltilt.model.scalar import load_scalar
from fulltilt.schema import ModelConfig
from fulltilt.shape import Recompute

__all__ = ["deterministic"]  # a fixture of test_recompute
SMALL: dict[str, Any] = {"smallest": 1, "page": 512}  # everything goes, and nearly everything lies on several pages
RECOMPUTES = [Recompute(), Recompute("full"), Recompute("selective"), Recompute("full", 1), Recompute("selective", 2, "uniform")]


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    """What is over must go by itself: in a run the device would be full before the collector looks."""
    gc.disable()
    yield
    gc.enable()


class Watched:
    """An offload with counts of saved tensors: those that it has sent so far, and those that are on the device and on the host now."""

    def __init__(self, offload: ActivationOffload, applied: Applied | None = None) -> None:
        self.applied, self.offload, self.sent_bytes, self._close = applied, offload, 0, offload.close
        self._saved: weakref.WeakSet[Any] = weakref.WeakSet()
        offload.close = self._count  # type: ignore[method-assign]

    def _count(self, saved: Any) -> None:
        self._close(saved)
        self._saved.add(saved)
        self.sent_bytes += sum(parcel.span for parcel in saved.parcels.values() if parcel.place is not None)

    @property
    def device_bytes(self) -> int:
        parcels = [parcel for saved in self._saved for parcel in saved.parcels.values()]
        return sum(parcel.storage.nbytes() for parcel in parcels if parcel.storage is not None)

    @property
    def host_bytes(self) -> int:
        return sum(page.nbytes for saved in self._saved for page in saved._pages)

    @property
    def allocated_bytes(self) -> int:
        return sum(memory.nbytes for memory in self.offload.pages.memory())

    def remove(self) -> None:
        assert self.applied is not None
        self.applied.remove()
        self.offload._let_go()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.offload, name)


def offload_activations(model: torch.nn.Module, **given: Any) -> Watched:
    applied = Applied(model)
    return Watched(activations.offload_activations(model, **given), applied)


def assert_nothing_left(handle: Watched) -> None:
    assert handle.device_bytes == handle.host_bytes == 0


# ---- gradients ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family",
    sample_cases([*models.FAMILIES, *(f"{family} fused" for family in FUSED)], "llama-tied", "gemma2", "phi3", "qwen3-moe", "qwen3 fused"),
)
def test_gradients_keep_their_bits(family: str, model_folders) -> None:
    name, _, fused = family.partition(" ")
    model = load(model_folders(name), fused=bool(fused))
    own = gradients(model)
    for setting in RECOMPUTES:
        recompute, handle = apply_recompute(model, setting), offload_activations(model, **SMALL)
        assert_same(gradients(model), own)
        assert_nothing_left(handle)
        assert (handle.sent_bytes > 0) == (setting.method == "block")  # two layers in one unit are the last unit
        handle.remove()
        recompute.remove()
    assert_same(gradients(model), own)


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_adapters_gradients_keep_their_bits(family: str, model_folders) -> None:
    model = load(model_folders(family), fused=family in FUSED)
    add_adapters(model, settings(family), seed=3)
    stir(model)
    own = gradients(model)
    for setting in RECOMPUTES:
        recompute, handle = apply_recompute(model, setting), offload_activations(model, **SMALL)
        assert_same(gradients(model), own)
        assert_nothing_left(handle)
        handle.remove()
        recompute.remove()


def test_a_critics_gradients_keep_their_bits(model_folders) -> None:
    critic = load_scalar(ModelConfig(path=str(model_folders("qwen2")), dtype="float64"), CPU, key="critic.path", head="new")
    torch.nn.init.normal_(critic.score.weight)
    own = gradients(critic)
    handle = offload_activations(critic, **SMALL)
    assert_same(gradients(critic), own)
    assert handle.sent_bytes > 0


@pytest.mark.parametrize("setting", [Recompute(), Recompute("full", 2, "uniform"), Recompute("selective", 3)], ids=str)
def test_a_deeper_model(setting: Recompute, tmp_path: Path) -> None:
    model = deep(tmp_path)
    own = gradients(model)
    apply_recompute(model, setting)
    handle = offload_activations(model, **SMALL)
    assert_same(gradients(model), own)
    assert_nothing_left(handle)
    assert handle.sent_bytes > 0


# ---- what goes and what stays --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", RECOMPUTES[:3], ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_the_last_layer_alone_is_on_the_device_between_the_passes(fused: bool, setting: Recompute, tmp_path: Path) -> None:
    model = deep(tmp_path)
    if fused:
        fuse(model)
    apply_recompute(model, setting)
    whole = saved_bytes(lambda: states(model))
    handle = offload_activations(model, **SMALL)
    outside = saved_bytes(lambda: states(model))  # embedding, last norm: what no layer saved. And the rotary angles are seen no more
    handle.sent_bytes = 0
    out = states(model)
    layer = handle.device_bytes
    assert handle.sent_bytes == 4 * layer
    # Each storage begins at a multiple of 512 bytes of its layer's pages.
    assert 4 * layer <= handle.host_bytes <= 4 * layer + 4 * 40 * 511
    shared = whole - outside - 5 * layer
    assert 0 <= shared < 0.1 * whole  # angles and bounds of documents, which all layers were given
    backward(out)
    assert_nothing_left(handle)


def test_parameters_and_what_all_layers_are_given_stay(model_folders) -> None:
    """Storages that went are none of a parameter, joined ones included, nor of a keyword argument."""
    for fused in (False, True):
        model = load(model_folders("qwen2"), fused=fused)
        handle = offload_activations(model, **SMALL)
        given: list[torch.Tensor] = []
        model.base_model.layers[0].register_forward_pre_hook(
            lambda _, args, kwargs, given=given: given.extend(kwargs["position_embeddings"]), with_kwargs=True
        )
        went: set[int] = set()
        close = handle.offload.close

        def spy(saved: Any, went: set[int] = went, close: Any = close) -> None:
            went.update(parcel.storage.data_ptr() for parcel in saved.parcels.values())
            close(saved)

        handle.offload.close = spy  # type: ignore[method-assign]
        out = states(model)
        stay = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *given)}
        assert went and given and not went & stay
        backward(out)


def test_small_tensors_stay(model_folders) -> None:
    model = load(model_folders("llama"))
    handle = offload_activations(model, smallest=8 * 32 * sum(LENGTHS), page=512)  # bytes of hidden states
    states(model)
    some = handle.sent_bytes
    handle.remove()
    handle = offload_activations(model, **SMALL)
    states(model)
    assert 0 < some < handle.sent_bytes
    handle.remove()
    handle = offload_activations(model)
    gradients(model)
    assert handle.sent_bytes == 0 and handle.allocated_bytes == 0


def test_views_of_one_storage_go_once_and_come_back_as_they_were() -> None:
    offload = Watched(ActivationOffload(CPU, smallest=1, page=1024))
    weight = torch.randn(6, 4, 50, dtype=torch.float64, requires_grad=True)
    whole = weight * 3.0
    left, right, turned = whole[:, :, :20], whole[:, :, 20:], whole.transpose(0, 2)[7:9]
    saved = offload.begin([], [], first=True, last=False)
    with saved_tensors_hooks(saved.put, saved.take):
        out = left.pow(2).sum() + right.sin().sum() + turned.sin().sum()
    offload.close(saved)
    assert offload.sent_bytes == whole.nbytes
    first = offload.begin([], [], first=True, last=False)  # a new pass: what waited is let go
    assert offload.device_bytes == 0 and not first.parcels
    del whole, left, right, turned
    out.backward()
    again = 3.0 * weight.detach()
    of_whole = torch.cat([2 * again[:, :, :20], again[:, :, 20:].cos()], dim=-1)
    of_whole.transpose(0, 2)[7:9] += again.transpose(0, 2)[7:9].cos()
    torch.testing.assert_close(weight.grad, 3.0 * of_whole, rtol=1e-12, atol=0)
    assert_nothing_left(offload)


def test_only_the_bytes_that_views_cover_go() -> None:
    offload = Watched(ActivationOffload(CPU, smallest=1, page=1024))
    base = torch.randn(4096, dtype=torch.float64)
    part = base[1000:1100].requires_grad_()
    saved = offload.begin([], [], first=True, last=False)
    with saved_tensors_hooks(saved.put, saved.take):
        out = part.sin().sum()
    offload.close(saved)
    # From the last border of 512 bytes, so that alignment stays: kernels choose their form by it.
    assert offload.sent_bytes == 1100 * 8 - (1000 * 8) // 512 * 512
    offload.begin([], [], first=True, last=False)
    out.backward()
    assert torch.equal(part.grad, base[1000:1100].cos())


def test_what_a_backward_pass_has_begun_to_use_stays() -> None:
    offload = Watched(ActivationOffload(CPU, smallest=1, page=1024))
    x = torch.randn(300, dtype=torch.float64, requires_grad=True)
    saved = offload.begin([], [], first=True, last=False)
    with saved_tensors_hooks(saved.put, saved.take):
        out = x.sin().sum()
    offload.close(saved)
    out.backward(retain_graph=True)
    offload.begin([], [], first=True, last=False)  # lets go of what still waits
    out.backward()
    assert torch.equal(x.grad, 2 * x.detach().cos())
    del out, saved
    assert_nothing_left(offload)


# ---- bounds --------------------------------------------------------------------------------------------------------------------------


def test_device_memory_is_bounded_in_both_passes(tmp_path: Path) -> None:
    model = deep(tmp_path, layers=6)
    handle = offload_activations(model, **SMALL)
    forward: list[int] = []
    of_backward: list[int] = []

    def watch(_: Any, args: Any, out: torch.Tensor) -> None:
        forward.append(handle.device_bytes)
        out.register_hook(lambda gradient: of_backward.append(handle.device_bytes))

    for module in model.base_model.layers:
        module.register_forward_hook(watch)
    out = states(model)
    layer = handle.device_bytes
    assert forward == [layer] * 6 and layer > 0
    backward(out)
    # As the gradient enters a layer, the one behind it is done and this one has been fetched; the first to enter is the last layer's.
    assert of_backward == [layer] * 6
    assert_nothing_left(handle)


def test_host_memory_is_taken_once_for_micro_batches_of_any_size(tmp_path: Path) -> None:
    model = deep(tmp_path)
    handle = offload_activations(model, smallest=1, page=4096)
    packs = [(30, 20, 7), (41,), (9, 9, 9), (30, 20, 6), (1,), (56, 1)]
    owns = []
    for pack in packs:
        owns.append(gradients(model, pack))
        assert handle.host_bytes == 0
        if pack == packs[0]:
            most = handle.allocated_bytes
    assert handle.allocated_bytes == most > 0
    states(model, (70,))
    assert handle.allocated_bytes > most
    handle.remove()
    for pack, own in zip(packs, owns, strict=True):
        assert_same(gradients(model, pack), own)


def test_passes_that_break_off_leave_nothing_behind(tmp_path: Path) -> None:
    model = deep(tmp_path)
    own = gradients(model)
    handle = offload_activations(model, **SMALL)

    def fail(*_: Any) -> None:
        raise ArithmeticError

    hook = model.base_model.layers[3].register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        states(model)
    hook.remove()
    assert_same(gradients(model), own)
    out = states(model)
    out.register_hook(fail)
    with pytest.raises(ArithmeticError):
        backward(out)
    del out
    assert_nothing_left(handle)
    states(model)  # nobody asks for its gradient
    assert_nothing_left(handle)
    assert_same(gradients(model), own)


def test_two_passes_at_once(tmp_path: Path) -> None:
    model = deep(tmp_path)
    own = gradients(model)
    theirs = gradients(model, (30, 3))
    handle = offload_activations(model, **SMALL)
    model.zero_grad()
    first, second = states(model), states(model, (30, 3))
    backward(first)
    assert_same({name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}, own)
    model.zero_grad()
    backward(second)
    assert_same({name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}, theirs)
    del first, second
    assert_nothing_left(handle)


# ---- only where a gradient is wanted, and back ---------------------------------------------------------------------------------------


def test_without_a_gradient_nothing_goes(model_folders) -> None:
    model = load(model_folders("llama"), fused=True)
    with torch.no_grad():
        own = states(model)
        handle = offload_activations(model, **SMALL)
        assert torch.equal(states(model), own)
    assert handle.sent_bytes == 0 and handle.allocated_bytes == 0


def test_offload_comes_last(model_folders) -> None:
    model = load(model_folders("llama"), fused=True)
    apply_recompute(model, Recompute("full"))
    offload_activations(model, **SMALL)
    with pytest.raises(RuntimeError, match="offloaded already"):
        apply_recompute(model, Recompute("selective"))
    with pytest.raises(RuntimeError, match="offloaded already"):
        offload_activations(model)


def test_saved_bytes_counts_storages_once_and_no_parameters() -> None:
    weight = torch.nn.Parameter(torch.randn(8, 8))
    x = torch.randn(5, 8, requires_grad=True)
    assert saved_bytes(lambda: x @ weight.t()) == x.nbytes
    assert saved_bytes(lambda: (x * x) @ weight.t()) == 2 * x.nbytes
    assert saved_bytes(lambda: x[1:].sin() + x[:4].cos()) == x.nbytes
    assert saved_bytes(lambda: (x * x).sum().item()) == 0  # nobody can ask for its gradient


# ---- on a CUDA device ----------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("setting", RECOMPUTES, ids=str)
def test_gradients_keep_their_bits_on_the_device(setting: Recompute, deterministic) -> None:
    model = on_gpu()
    packs = [LONG, (1500, 600), (2048, 1999), (100,) * 30]
    owns = [gradients(model, pack) for pack in packs]
    assert_same(gradients(model, packs[0]), owns[0])  # else the kernels are not deterministic, and nothing is shown
    apply_recompute(model, setting)
    handle = offload_activations(model)
    for _ in range(3):  # memory that was given too early to another is written by later passes
        for pack, own in zip(packs, owns, strict=True):
            assert_same(gradients(model, pack), own)
            assert_nothing_left(handle)
    assert handle.sent_bytes > 0


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["gemma2", "mixtral", "qwen3-moe"])
def test_plain_layers_keep_their_bits_on_the_device(family: str, model_folders, deterministic) -> None:
    model = load_model(ModelConfig(path=str(model_folders(family)), dtype="bfloat16"), GPU)
    own = gradients(model)
    assert_same(gradients(model), own)
    for setting in RECOMPUTES[:3]:
        recompute, handle = apply_recompute(model, setting), offload_activations(model, smallest=1)
        assert_same(gradients(model), own)
        assert handle.sent_bytes > 0
        handle.remove()
        recompute.remove()


@pytest.mark.gpu
def test_less_memory_is_held_alone_and_with_recompute() -> None:
    model = on_gpu()
    found: dict[str, tuple[int, int]] = {}
    for kind in ("none", "selective", "full"):
        recompute = apply_recompute(model, Recompute(kind))  # type: ignore[arg-type]
        found[kind] = held_between_passes(model), peak_of_a_pass(model)
        handle = offload_activations(model)
        found[f"{kind}, offloaded"] = held_between_passes(model), peak_of_a_pass(model)
        handle.remove()
        recompute.remove()
    print("bytes between the passes, peak:", found)
    layers = SHAPE["num_hidden_layers"]
    for kind in ("none", "selective", "full"):
        held, peak = found[kind]
        offloaded, its_peak = found[f"{kind}, offloaded"]
        assert offloaded < held and its_peak < peak
    # One layer of six stays; the angles and what the last norm saved are beside it.
    assert found["none, offloaded"][0] < 2 * found["none"][0] / layers


@pytest.mark.gpu
def test_pinned_pages_are_reused_for_micro_batches_of_different_sizes() -> None:
    model = on_gpu()
    handle = offload_activations(model)
    gradients(model, LONG)
    most = handle.allocated_bytes
    assert most >= handle.sent_bytes > 0
    for pack in ((1500, 600), (2048, 1999), (100,) * 30):
        gradients(model, pack)
    assert handle.allocated_bytes == most
    assert all(page.is_pinned() for page in handle.pages.take(most))


@pytest.mark.gpu
def test_a_pass_that_breaks_off_on_the_device(deterministic) -> None:
    """Copies into memory that is given back must be over before others write there."""
    model = on_gpu()
    own = gradients(model, LONG)
    handle = offload_activations(model)

    def fail(*_: Any) -> None:
        raise ArithmeticError

    for place in (1, 3):
        seen: list[torch.Tensor] = []
        hook = model.base_model.layers[place].register_forward_hook(lambda _, args, out, seen=seen: seen.append(out))
        out = states(model, LONG)
        hook.remove()
        seen.pop().register_hook(fail)
        with pytest.raises(ArithmeticError):
            backward(out)
        del out
        assert_nothing_left(handle)
        assert_same(gradients(model, LONG), own)
