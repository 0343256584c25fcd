"""Recompute: the same gradients to the bit, fewer saved bytes, no product twice where products are kept, and nothing at all without a
gradient.

On a CUDA device (`-m gpu`) also: memory between the passes, and bits under deterministic kernels."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from layers import Applied, apply_recompute
from test_lora import settings, stir
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GPT2Config, Phi3Config, PreTrainedModel, Qwen3Config
from variants import sample_cases

from fulltilt.cluster.making import be_deterministic
from fulltilt.memory.activations import saved_bytes
from fulltilt.memory.recompute import expensive_operations
from fulltilt.model import attention
from fulltilt.model.attention import Packed, UnsupportedModel
from fulltilt.model.forward import hidden_states
from fulltilt.model.fuse import fuse
from fulltilt.model.load import load_model
from fulltilt.model.lora import add_adapters
from fulltilt.model.scalar import ScalarModel, load_scalar
from fulltilt.schema import ModelConfig
from fulltilt.shape import Recompute

CPU, GPU = torch.device("cpu"), torch.device("cuda")
LENGTHS = (17, 5, 17, 1)  # longer than the windows of the list; two of one length share a call on CPU
WAYS: list[Any] = [(None, "block"), (1, "block"), (2, "uniform")]
SETTINGS = [Recompute(kind, *way) for kind in ("full", "selective") for way in WAYS]  # type: ignore[arg-type]
FUSED = ("llama", "qwen2", "qwen3", "mistral")


@pytest.fixture
def deterministic() -> Iterator[None]:
    be_deterministic()
    yield
    torch.use_deterministic_algorithms(False)


def load(folder: Path, *, fused: bool = False) -> PreTrainedModel:
    model = load_model(ModelConfig(path=str(folder), dtype="float64"), CPU)
    if fused:
        assert fuse(model).left_alone is None
    return model


def deep(folder: Path, layers: int = 5) -> PreTrainedModel:
    config = models.FAMILIES["llama"]()
    config.num_hidden_layers = layers
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return load(folder)


def states(model: torch.nn.Module, lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    """Of documents side by side: what the role's loss is computed from."""
    device = next(model.parameters()).device
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, models.VOCABULARY, sum(lengths))).to(device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    context = Packed.of(np.cumsum([0, *lengths]), device)
    return model.values(ids, positions, context) if isinstance(model, ScalarModel) else hidden_states(model, ids, positions, context)


def backward(out: torch.Tensor) -> None:
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)).sum().backward()


def gradients(model: torch.nn.Module, lengths: tuple[int, ...] = LENGTHS) -> dict[str, torch.Tensor]:
    model.zero_grad()
    backward(states(model, lengths))
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert found and any(float(gradient.abs().max()) > 1e-3 for gradient in found.values())
    return {name: gradient.clone() for name, gradient in found.items()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


class Counting(TorchDispatchMode):
    """How often each product and attention ran."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in expensive_operations():
            self.runs[str(func)] += 1
        return func(*args, **(kwargs or {}))


# ---- gradients ---------------------------------------------------------------------------------------------------------------------


FAMILIES = [*models.FAMILIES, *(f"{family} fused" for family in FUSED)]
SHORT = ("llama-tied", "gemma3", "mixtral", "qwen3 fused")
SOME_FAMILIES = sample_cases(FAMILIES, *SHORT)


@pytest.mark.parametrize("family", sample_cases(FAMILIES, *SHORT, long=FAMILIES))
def test_gradients_keep_their_bits(family: str, model_folders) -> None:
    name, _, fused = family.partition(" ")
    model = load(model_folders(name), fused=bool(fused))
    own = gradients(model)
    for setting in SETTINGS:
        handle = apply_recompute(model, setting)
        assert_same(gradients(model), own)
        handle.remove()
    assert_same(gradients(model), own)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "qwen3-moe", "mixtral"])
def test_adapters_gradients_keep_their_bits(family: str, model_folders) -> None:
    model = load(model_folders(family), fused=family in FUSED)
    add_adapters(model, settings(family), seed=3)
    stir(model)
    own = gradients(model)
    assert all("lora" in name for name in own)
    for setting in SETTINGS:
        handle = apply_recompute(model, setting)
        assert_same(gradients(model), own)
        handle.remove()


@pytest.mark.parametrize("family", ["qwen2", "mixtral"])
def test_a_critics_gradients_keep_their_bits(family: str, model_folders) -> None:
    critic = load_scalar(ModelConfig(path=str(model_folders(family)), dtype="float64"), CPU, key="critic.path", head="new")
    torch.nn.init.normal_(critic.score.weight)  # zeros would let no gradient through
    own = gradients(critic)
    for setting in SETTINGS:
        handle = apply_recompute(critic, setting)
        assert_same(gradients(critic), own)
        handle.remove()


@pytest.mark.parametrize("layers", sample_cases([1, 2, 3, 5], 2, 3))
@pytest.mark.parametrize("method", ["block", "uniform"])
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_units_of_a_deeper_model(kind: Any, method: Any, layers: int, tmp_path: Path) -> None:
    model = deep(tmp_path)
    own = gradients(model)
    apply_recompute(model, Recompute(kind, layers, method))
    assert_same(gradients(model), own)


@pytest.mark.long
@pytest.mark.kernels
def test_kernels_run_again_with_the_same_bits(model_folders, deterministic) -> None:
    """Full recompute alone: the interpreter writes every argument back, which selective recompute takes for a change in place."""
    device = GPU if torch.cuda.is_available() else CPU  # there compiled, here interpreted
    model = load_model(ModelConfig(path=str(model_folders("qwen3")), dtype="float32"), device)
    fuse(model)
    own = gradients(model, (5, 3))
    apply_recompute(model, Recompute("full"))
    assert_same(gradients(model, (5, 3)), own)


def test_random_numbers_are_drawn_again_in_training_mode(tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Phi3Config(**models.SMALL, resid_pdrop=0.4)).save_pretrained(tmp_path)
    model = load(tmp_path).train()

    def seeded() -> dict[str, torch.Tensor]:
        torch.manual_seed(5)
        return gradients(model)

    own = seeded()
    for setting in SETTINGS:
        handle = apply_recompute(model, setting)
        assert_same(seeded(), own)
        handle.remove()


# ---- what is kept ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_each_kind_saves_less_than_the_one_before(family: str, model_folders) -> None:
    name, _, fused = family.partition(" ")
    model = load(model_folders(name), fused=bool(fused))

    def saved(*setting: Any) -> int:
        handle = apply_recompute(model, Recompute(*setting))
        count = saved_bytes(lambda: states(model))
        handle.remove()
        return count

    none, selective, full = saved("none"), saved("selective"), saved("full")
    assert none > selective > full
    assert none > saved("selective", 1) > selective and none > saved("full", 1) > full
    # Kept results of one layer stand in for the next layer's input, which is no larger.
    assert saved("selective", 2, "uniform") <= selective
    # A layer's input in float64 is all that full recompute keeps of it; what remains is outside the layers.
    assert full - saved("full", 2, "uniform") == 8 * models.SMALL["hidden_size"] * sum(LENGTHS)


def test_every_further_layer_saves_less(tmp_path: Path) -> None:
    model = deep(tmp_path)
    for kind in ("selective", "full"):
        counts = []
        for layers in range(1, 6):
            handle = apply_recompute(model, Recompute(kind, layers))  # type: ignore[arg-type]
            counts.append(saved_bytes(lambda: states(model)))
            handle.remove()
        gaps = [before - after for before, after in pairwise(counts)]
        assert gaps[0] == gaps[1] == gaps[2] > 0
        assert gaps[3] > gaps[2]  # the rotary angles, which layers share, are held until the last of them is recomputed


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_selective_runs_no_product_and_no_attention_twice(family: str, model_folders) -> None:
    name, _, fused = family.partition(" ")
    model = load(model_folders(name), fused=bool(fused))

    def runs(setting: Recompute) -> Counter[str]:
        handle = apply_recompute(model, setting)
        with Counting() as counting:
            gradients(model)
        handle.remove()
        return counting.runs

    plain = runs(Recompute())
    assert plain == runs(Recompute("selective")) == runs(Recompute("selective", 2, "uniform"))
    assert plain.total() < runs(Recompute("full")).total()


@pytest.mark.parametrize("fused", [False, True])
def test_the_last_product_of_a_layer_is_not_made_again(fused: bool, model_folders) -> None:
    """The second pass stops at the last tensor that is kept, which is that product's input."""
    model, counts = load(model_folders("llama"), fused=fused), []
    for setting in (Recompute(), Recompute("full")):
        handle = apply_recompute(model, setting)
        with Counting() as counting:
            states(model).sum().backward()
        handle.remove()
        counts.append(sum(count for name, count in counting.runs.items() if "mm" in str(name)))
    products = 4 if fused else 7  # of a layer: q, k, v, o, gate, up, down
    assert counts[1] - counts[0] == 2 * (products - 1)


def test_the_last_product_of_a_layer_is_not_kept(model_folders) -> None:
    """Its result is part of the next layer's input, which is kept; where a norm follows, it is needed."""
    width = 8 * models.SMALL["hidden_size"] * sum(LENGTHS)  # bytes of hidden states
    for family, fused, layers in (("llama", False, 0), ("llama", True, 0), ("gemma3", False, 2)):
        model = load(model_folders(family), fused=fused)
        kept = []
        for make in (apply_recompute, keep_all):
            handle = make(model, Recompute("selective"))  # type: ignore[operator]
            kept.append(saved_bytes(lambda model=model: states(model)))
            handle.remove()
        assert kept[1] - kept[0] == (2 - layers) * width


def keep_all(model: PreTrainedModel, setting: Recompute) -> Applied:
    """The same with something behind the last product that hides it."""
    handle = apply_recompute(model, setting)
    for layer in model.base_model.layers:
        own = layer.forward.own
        layer.forward.own = lambda *args, own=own, **kwargs: own(*args, **kwargs) * 1.0
    return handle


# ---- only where a gradient is wanted, and back ---------------------------------------------------------------------------------------


def handed_on(model: PreTrainedModel) -> list[bool]:
    """Of each layer, whether it returned its input in a pass."""
    found: list[bool] = []
    hooks = [
        layer.register_forward_hook(lambda _, args, out: found.append(out is args[0])) for layer in model.base_model.layers
    ]  # fmt: skip
    states(model)
    for hook in hooks:
        hook.remove()
    return found


def test_without_a_gradient_every_layer_runs_its_own_forward(tmp_path: Path) -> None:
    model = deep(tmp_path)
    fuse(model)
    with torch.no_grad():
        own = states(model)
        apply_recompute(model, Recompute("full", 2, "uniform"))
        assert torch.equal(states(model), own)
        assert handed_on(model) == [False] * 5
    assert handed_on(model) == [True, False, True, False, False]  # units of 2, 2 and 1: calls are put off to the end of each


def test_parameters_stay_where_they_are(model_folders) -> None:
    model = load(model_folders("qwen2"), fused=True)
    before = [(id(parameter), parameter.data_ptr()) for parameter in model.parameters()]
    for setting in SETTINGS:
        handle = apply_recompute(model, setting)
        gradients(model)
        handle.remove()
    assert [(id(parameter), parameter.data_ptr()) for parameter in model.parameters()] == before
    plain = load(model_folders("qwen2"))
    apply_recompute(plain, Recompute("none"))
    assert all("forward" not in vars(layer) for layer in plain.base_model.layers)


def test_a_copy_of_the_model_runs_its_own_layers(model_folders) -> None:
    model = load(model_folders("llama"))
    apply_recompute(model, Recompute("full", 2, "uniform"))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.25)
    ours = gradients(twin)
    plain = load(model_folders("llama"))
    plain.load_state_dict(twin.state_dict())
    assert_same(ours, gradients(plain))


def test_a_pass_that_broke_off_leaves_nothing_behind(tmp_path: Path) -> None:
    model = deep(tmp_path)
    own = gradients(model)
    apply_recompute(model, Recompute("full", 3, "uniform"))

    def fail(*_: Any) -> None:
        raise ArithmeticError

    hook = model.base_model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        states(model)
    hook.remove()
    assert_same(gradients(model), own)


def test_a_second_backward_pass(model_folders) -> None:
    model = load(model_folders("llama"))
    own = {name: 2 * gradient for name, gradient in gradients(model).items()}

    def twice() -> dict[str, torch.Tensor]:
        model.zero_grad()
        out = states(model)
        loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    handle = apply_recompute(model, Recompute("full"))
    assert_same(twice(), own)
    handle.remove()
    apply_recompute(model, Recompute("selective"))
    with pytest.raises(RuntimeError, match="used up"):
        twice()


# ---- what is refused -----------------------------------------------------------------------------------------------------------------


def test_a_model_that_works_between_layers_is_refused(model_folders) -> None:
    model = load(model_folders("llama"))
    apply_recompute(model, Recompute("full", 2, "uniform"))
    model.base_model.layers[0].register_forward_hook(lambda _, args, out: out + 1)
    with pytest.raises(UnsupportedModel, match="between layers"):
        states(model)


def test_a_model_that_changes_products_in_place_is_refused(model_folders) -> None:
    model = load(model_folders("llama"))
    for layer in model.base_model.layers:
        layer.mlp.up_proj.register_forward_hook(lambda _, args, out: out.view(-1).mul_(0.5).view(out.shape))
    own = gradients(model)
    handle = apply_recompute(model, Recompute("full"))
    assert_same(gradients(model), own)
    handle.remove()
    apply_recompute(model, Recompute("selective"))
    with pytest.raises(UnsupportedModel, match="in place"):
        states(model)


def test_layers_that_are_elsewhere_are_refused() -> None:
    model = AutoModelForCausalLM.from_config(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=20))
    with pytest.raises(UnsupportedModel, match="GPT2Model does not keep its decoder layers"):
        apply_recompute(model, Recompute("full"))


# ---- on a CUDA device ----------------------------------------------------------------------------------------------------------------

SHAPE = {
    **models.SMALL, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "initializer_range": 0.03, "max_position_embeddings": 4096,
}  # fmt: skip
LONG = (1024, 333, 2048, 691)  # 4,096 tokens: hidden states of 8 MiB


def on_gpu() -> PreTrainedModel:
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE), dtype=torch.bfloat16, attn_implementation=attention.register())
    model = model.to(GPU).eval()
    assert fuse(model).left_alone is None
    return model  # type: ignore[no-any-return]


def held_between_passes(model: torch.nn.Module, lengths: tuple[int, ...] = LONG) -> int:
    """Bytes that a forward pass leaves allocated for its backward pass."""
    states(model, lengths)  # kernels are compiled, workspaces are there
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = states(model, lengths)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    del out
    return held


def peak_of_a_pass(model: torch.nn.Module, lengths: tuple[int, ...] = LONG) -> int:
    gradients(model, lengths)
    model.zero_grad(set_to_none=False)  # gradients are there already: they would hide what activations take at the end of the pass
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    backward(states(model, lengths))
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
def test_each_kind_holds_less_memory() -> None:
    model = on_gpu()

    def measured(measure: Callable[[torch.nn.Module], int], *setting: Any) -> int:
        handle = apply_recompute(model, Recompute(*setting))
        found = measure(model)
        handle.remove()
        return found

    held = {kind: measured(held_between_passes, kind) for kind in ("none", "selective", "full")}
    some = measured(held_between_passes, "full", 3)
    chunks = measured(held_between_passes, "full", 3, "uniform")
    print("bytes between the passes", held, "block of 3", some, "units of 3", chunks)
    width = 2 * SHAPE["hidden_size"] * sum(LONG)  # bytes of hidden states
    assert held["none"] > some > held["full"] > chunks
    # Of a layer, norms' results (2 widths), the gated product (3) and rotated queries and keys (1.25) go with selective recompute; with
    # full recompute units' inputs stay, and beside them what the last norm saved, its result and the rotary angles.
    assert held["none"] - held["selective"] > 6 * 5 * width
    assert held["full"] < (6 + 4) * width and chunks < (2 + 4) * width
    peaks = {kind: measured(peak_of_a_pass, kind) for kind in ("none", "selective", "full")}
    print("peaks", peaks)
    assert peaks["none"] > peaks["selective"] > peaks["full"]


@pytest.mark.gpu
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: f"{setting.kind}-{setting.layers}-{setting.method}")
def test_gradients_keep_their_bits_on_the_device(setting: Recompute, deterministic) -> None:
    model = on_gpu()
    own = gradients(model, LONG)
    assert_same(gradients(model, LONG), own)  # else the kernels are not deterministic, and nothing is shown
    apply_recompute(model, setting)
    assert_same(gradients(model, LONG), own)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("family", ["gemma2", "mixtral", "qwen3-moe", "phi3"])
def test_plain_layers_keep_their_bits_on_the_device(family: str, kind: Any, model_folders, deterministic) -> None:
    model = load_model(ModelConfig(path=str(model_folders(family)), dtype="bfloat16"), GPU)
    own = gradients(model)
    assert_same(gradients(model), own)
    apply_recompute(model, Recompute(kind))
    assert_same(gradients(model), own)


@pytest.mark.gpu
def test_selective_runs_no_product_and_no_attention_twice_on_the_device() -> None:
    model = on_gpu()
    with Counting() as plain:
        gradients(model, LONG)
    assert plain.runs["fulltilt.packed_attention.default"] == SHAPE["num_hidden_layers"]
    handle = apply_recompute(model, Recompute("selective"))
    with Counting() as selective:
        gradients(model, LONG)
    handle.remove()
    assert selective.runs == plain.runs
    apply_recompute(model, Recompute("full"))
    with Counting() as full:
        gradients(model, LONG)
    assert full.runs.total() > plain.runs.total()
