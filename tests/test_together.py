"""What goes together (knobs.TOGETHER) really does: every combination that is allowed is built and runs a micro-batch, with the gradients of
the same layers without it. On CPU, but for CUDA graphs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from layers import apply_recompute, offload_activations
from transformers import PreTrainedModel

from fulltilt import knobs
from fulltilt.algo.build import build as build_algorithm
from fulltilt.batching.pack import MicroSizing, minibatch
from fulltilt.footprint import HeadOptions
from fulltilt.memory.activations import saved_bytes
from fulltilt.memory.offload import Residence
from fulltilt.model import compiled, lora
from fulltilt.model.compiled import MARK, compile_and_compare, restore
from fulltilt.model.fuse import WrongLayers, check_fused, fuse_and_compare
from fulltilt.model.load import load_model
from fulltilt.model.verify import random_documents, run_packed, verify
from fulltilt.records import Group, MiniBatch, Prompt, Row
from fulltilt.rollout.collect import collect
from fulltilt.rollout.engine import EngineContext, EngineLimits
from fulltilt.rollout.engines.native import NativeEngine
from fulltilt.rollout.sampler import Sampling
from fulltilt.schema import Config, LoraConfig, ModelConfig, TrainConfig
from fulltilt.shape import Recompute
from fulltilt.training.optim import Optimizer
from fulltilt.training.roles import Policy
from fulltilt.training.trainer import Trainer

ModelFolders = Callable[[str], Path]
CPU = torch.device("cpu")
# transformers computes norms in float32 whatever the model's type, and compiled or fused layers round them otherwise.
NORMS = 1e-5
SAME = 1e-9
DYNAMO = "aot_eager"  # all of torch.compile but for the last step, which makes code of the graphs and takes most of the time


def allowed(features: frozenset[str]) -> bool:
    return all(pair.allowed or not {pair.one, pair.other} <= features for pair in knobs.TOGETHER)


OWNERS = ("", "compile", "fused_layers")
BESIDE = [
    frozenset(filter(None, chosen))
    for chosen in itertools.product(("", "selective", "full"), ("", "offload_activations"), ("", "offload_params"), ("", "fused_head"))
]


# -- one micro-batch --------------------------------------------------------------------------------------------------------------------


def one_update() -> MiniBatch:
    random = np.random.default_rng(0)
    rows = []
    for length in (9, 17, 30):
        numbers = [random.normal(size=length).astype(np.float32) for _ in range(2)]
        mask = np.arange(length) >= 4
        rows.append(Row(random.integers(3, 90, length), mask, rollout_logprobs=numbers[0] - 4, advantages=numbers[1]))
    return minibatch(rows, "token-mean", 1, MicroSizing(token_budget=100))


def with_bonus() -> Any:
    tables = {"model": {"path": "m"}, "data": {"train": "t"}, "algorithm": {"entropy_coef": 0.3}}
    return build_algorithm(Config.model_validate(tables)).loss


@dataclass(frozen=True, eq=False)
class Built:
    model: PreTrainedModel
    optimizer: Optimizer

    def gradients(self, features: frozenset[str]) -> dict[str, torch.Tensor]:
        """Of one micro-batch, with these switched on for as long as it lasts."""
        kind = next((kind for kind in ("selective", "full") if kind in features), "none")
        handles: list[Any] = [apply_recompute(self.model, Recompute(kind))]
        if "offload_activations" in features:
            handles.append(offload_activations(self.model, smallest=1))
        options = HeadOptions(fused="fused_head" in features)
        if "offload_params" in features:
            residence = Residence(self.model, "actor", learns=True)
            residence.to_host()
            assert all(parameter.untyped_storage().nbytes() == 0 for parameter in self.model.parameters())
            residence.to_device()
        try:
            role = Policy("actor", self.model, 0.8, self.optimizer, entropy_gradient=True, options=options)
            Trainer(role, with_bonus()).accumulate(one_update())
            found = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        finally:
            for handle in reversed(handles):
                handle.remove()
            self.optimizer.zero_grad()
        return found


@pytest.fixture(scope="module")
def build(model_folders: ModelFolders) -> Callable[[str, bool], Built]:
    """Each kind once: to compile takes seconds."""
    return cache(partial(built, model_folders("qwen2")))


def built(folder: Path, owner: str, adapters: bool) -> Built:
    model = load_model(ModelConfig(path=str(folder), dtype="float64"), CPU)
    if adapters:
        lora.add_adapters(model, LoraConfig(rank=2), 0, None)
        with torch.no_grad():  # adapters that do nothing yet would hide what is wrong with them
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter += 0.1
    if owner == "compile":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiled, "BACKEND", DYNAMO)
            compile_and_compare(model)
    elif owner == "fused_layers":
        assert fuse_and_compare(model).left_alone is None
    return Built(model, Optimizer(model, TrainConfig(), 1))


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys() and found
    size = max(float(gradient.norm()) for gradient in expected.values())
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm()) <= tolerance * size, name


KINDS = [(owner, adapters) for adapters in (False, True) for owner in OWNERS]


@pytest.mark.parametrize(
    ("owner", "adapters"),
    [pytest.param(*kind, marks=pytest.mark.matrix if kind == ("compile", True) else pytest.mark.long) for kind in KINDS],
    ids=[f"{'adapters' if adapters else 'all'}-{owner}" for owner, adapters in KINDS],
)
def test_what_is_allowed_runs_and_keeps_the_gradients(build: Callable[[str, bool], Built], owner: str, adapters: bool) -> None:
    """`make check` has those that compile layers, which takes 10 to 30 seconds."""
    here = frozenset(filter(None, (owner, "lora" if adapters else "")))
    part, plain, tried = build(owner, adapters), build("", adapters).gradients(frozenset()), 0
    own = part.gradients(frozenset())
    assert_near(own, plain, NORMS)
    for beside in BESIDE:
        if allowed(here | beside):
            assert_near(part.gradients(beside), own, SAME)
            tried += 1
    assert tried == (16 if owner == "compile" else 24)  # selective recompute is not for compiled layers


def saved(model: PreTrainedModel, kind: Any = "none") -> int:
    handle, kept, documents = apply_recompute(model, Recompute(kind)), [], random_documents(model)
    try:
        return saved_bytes(lambda: kept.append(run_packed(model, documents)[0]))
    finally:
        handle.remove()


@pytest.mark.long
def test_selective_recompute_would_leave_nothing_compiled(build: Callable[[str, bool], Built]) -> None:
    """The reason that the table gives: compiled layers save less than plain ones, but what plain ones do under selective recompute."""
    plain, with_compiler = build("", False).model, build("compile", False).model
    assert saved(with_compiler) < saved(plain)
    assert saved(with_compiler, "selective") == saved(plain, "selective") > saved(with_compiler)


# -- compiled layers --------------------------------------------------------------------------------------------------------------------


def model_of(folder: Path, dtype: str = "float32") -> PreTrainedModel:
    return load_model(ModelConfig(path=str(folder), dtype=dtype), CPU)


@pytest.mark.matrix  # a run that compiles to code is in test_knob_runs.py
def test_layers_compiled_to_code_compute_what_they_did(model_folders: ModelFolders) -> None:
    """The whole of torch.compile. What one layer compiles serves all, with any number of tokens."""
    torch._dynamo.reset()
    model, plain = model_of(model_folders("qwen2")), model_of(model_folders("qwen2"))
    assert compile_and_compare(model) == "compiled: 2 layers"
    documents = random_documents(model)
    before = graphs_compiled()
    for chosen in (documents, documents[:1], documents[1:3]):
        with torch.no_grad():
            found, expected = (torch.cat(run_packed(each, chosen)[0]) for each in (model, plain))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert graphs_compiled() == before


def graphs_compiled() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@pytest.mark.long
def test_only_passes_over_packed_documents_are_compiled(model_folders: ModelFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine runs, and what a graph would capture, are the layers' own forwards."""
    ran: list[int] = []

    def watched(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        return lambda *given: ran.append(1) or graph(*given)

    monkeypatch.setattr(compiled, "BACKEND", watched)
    torch._dynamo.reset()  # what was compiled otherwise, of the same classes, would be found again
    model = model_of(model_folders("qwen2"))
    engine = NativeEngine(EngineContext(model, models.tokenizer(), frozenset({1}), verify(model), EngineLimits(60, 4, 8, 64)))
    sampling, prompt = Sampling(samples=2, max_new_tokens=8), Prompt(0, np.array([3, 4, 5]), "")
    own = collect(engine.generate, [prompt], sampling, 0, lambda group: None)
    compile_and_compare(model)
    assert ran
    ran.clear()
    assert_equal_samples(collect(engine.generate, [prompt], sampling, 0, lambda group: None), own)
    assert not ran
    with torch.no_grad():
        run_packed(model, random_documents(model))
    assert len(ran) == 8  # of each layer: its norm, what is before and what is behind the attention function, and the rest
    restore(model)
    with torch.no_grad():
        run_packed(model, random_documents(model))
    assert len(ran) == 8


def assert_equal_samples(found: tuple[Group, ...], expected: tuple[Group, ...]) -> None:
    for group, other in zip(found, expected, strict=True):
        for sample, same in zip(group.samples, other.samples, strict=True):
            assert np.array_equal(sample.ids, same.ids) and np.array_equal(sample.logprobs, same.logprobs)


@pytest.mark.long
def test_another_model_that_loads_meanwhile_compiles_nothing_anew(model_folders: ModelFolders, build: Callable[[str, bool], Built]) -> None:
    model = build("compile", False).model
    documents = random_documents(model)
    with torch.no_grad():
        run_packed(model, documents)
    before = graphs_compiled()
    model_of(model_folders("llama"))
    with torch.no_grad():
        run_packed(model, documents)
    assert graphs_compiled() == before


@pytest.mark.parametrize(
    "wrong", [pytest.param(name, marks=pytest.mark.long) for name in ("values", "an error", "no compiler", "a forward of its own")]
)
def test_layers_that_compile_to_something_else_are_found_out(
    model_folders: ModelFolders, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, wrong: str
) -> None:
    def broken(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        if wrong == "an error":
            raise ValueError("no compiler here")
        return lambda *given: [out * 1.1 if isinstance(out, torch.Tensor) else out for out in graph(*given)]

    if wrong == "no compiler":
        # By torch's own means: for some settings it takes what monkeypatch does at the end as their removal.
        settings = torch._inductor.config.patch({"force_disable_caches": True, "cpp.cxx": ("no-such-compiler",)})
        settings.__enter__()
        request.addfinalizer(lambda: settings.__exit__(None, None, None))
    else:
        monkeypatch.setattr(compiled, "BACKEND", broken)
    torch._dynamo.reset()
    model, plain = model_of(model_folders("qwen2")), model_of(model_folders("qwen2"))
    if wrong == "a forward of its own":
        fuse_and_compare(model)
    said = {"values": "hidden states.*differ by", "an error": "no compiler here", "no compiler": "a compiled pass failed: .*compiler"}
    with pytest.raises(WrongLayers, match=said.get(wrong, "one owner")):
        compile_and_compare(model)
    documents = random_documents(model)
    assert not any(MARK in vars(layer) for layer in model.base_model.layers)
    assert (check_fused(model).left_alone is None) == (wrong == "a forward of its own")
    with torch.no_grad():
        found, expected = (torch.cat(run_packed(each, documents)[0]) for each in (model, plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
