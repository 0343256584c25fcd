"""What the plan says of a worker's part of a model is what the worker has: counted with the tables of slices and of experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import test_tensor_parallel as tensor
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig

from fulltilt.model import attention, experts, lora
from fulltilt.model.load import shape_of
from fulltilt.model.scalar import ScalarModel
from fulltilt.parallel.experts import expert_table
from fulltilt.parallel.holdings import bucket_bytes, held_bytes
from fulltilt.parallel.layout import ParameterSize, Sharding, Sizes
from fulltilt.parallel.slices import slice_table
from fulltilt.plan.division import Division, divided
from fulltilt.plan.facts import Facts, RoleFacts
from fulltilt.schema import Config
from fulltilt.shape import SHAPES

FAMILIES: dict[str, Callable[[], Any]] = {
    **tensor.FAMILIES,
    "llama-biased": lambda: LlamaConfig(**tensor.models.SMALL, attention_bias=True, mlp_bias=True),
    **{name: lambda given=given: AutoConfig.for_model(**given) for name, given in SHAPES.items()},  # type: ignore[misc]
}
LINEAR = {"rank": 2, "targets": ["q_proj", "k_proj", "o_proj", "down_proj"]}
STACKED = {"rank": 2, "targets": ["v_proj", "o_proj"], "parameters": ["experts.gate_up_proj", "experts.down_proj"]}
PARTS, WHOLE, APART = "parts", "whole experts", "experts apart"


@dataclass(frozen=True)
class Portion:
    """A model, and how workers divide it."""

    family: str
    size: int
    how: str = PARTS
    changes: dict[str, Any] = field(default_factory=dict)  # keys of the model's configuration that are changed
    lora: dict[str, Any] = field(default_factory=dict)
    role: str = "actor"
    learns: bool = True

    def __str__(self) -> str:
        odd = [str(each) for each in (self.how, self.changes, self.lora, self.role) if each not in (PARTS, {}, "actor")]
        return " ".join([self.family, str(self.size), *odd, *(["frozen"] if not self.learns else [])])

    @property
    def config(self) -> Config:
        sections = {"model": {"path": "m"}, "data": {"train": "t"}}
        return Config.model_validate(sections | ({"lora": {**self.lora, "critic": True}} if self.lora else {}))

    def model(self) -> Any:
        """The model as a run builds it, without numbers."""
        config = FAMILIES[self.family]()
        for name, value in self.changes.items():
            setattr(config, name, value)
        kind: Any = AutoModel if self.role == "critic" else AutoModelForCausalLM
        options = {"attn_implementation": attention.register(), "experts_implementation": experts.register()}
        with torch.device("meta"):
            model = kind.from_config(config, dtype=torch.bfloat16, **options)
            if self.lora:
                lora.add_adapters(model, self.config.lora, 0)
                model.to(torch.bfloat16)  # as a loaded model has them
            if self.role == "critic":
                model = ScalarModel(model, torch.nn.Linear(config.hidden_size, 1, bias=False, dtype=torch.float32))
        return model

    def counted(self, model: Any, rank: int) -> Sizes:
        """The sizes of a worker's parts of a whole model's parameters, those that learn first, as its tables of slices have it."""
        apart = self.how == APART
        cuts = (expert_table(model, self.size) if apart else slice_table(model, self.size, whole_experts=self.how == WHOLE)).cuts
        body = model.body if isinstance(model, ScalarModel) else model
        inside = {id(own): place for place, layer in enumerate(body.base_model.layers) for own in layer.parameters()}
        found = []
        for name, own in model.named_parameters():
            part = cuts[name].shape(tuple(own.shape), rank)
            kind = {"layer": inside.get(id(own)), "scores": name.startswith("score."), "cut": part != tuple(own.shape)}
            learns = self.learns and own.requires_grad
            found.append(ParameterSize(part, own.itemsize, learns, **kind, apart=apart and kind["cut"]))  # type: ignore[arg-type]
        return tuple(sorted(found, key=lambda own: not own.learns))

    def planned(self, model: Any) -> RoleFacts:
        whole = RoleFacts.of_shape(shape_of(model.config), self.config, "cuda", learns=self.learns, role=self.role)
        return whole.part(*((1, self.size) if self.how == APART else (self.size, 1)), whole_experts=self.how == WHOLE)


DENSE = ("qwen2", "qwen3", "llama", "llama-tied", "llama-biased", "gemma2", "gemma3", "phi3", "mistral", "smollm3", "granite")
MIXTURES = ("qwen3-moe", "mixtral", "qwen2-moe")
CASES = [
    *(Portion(family, size) for family in (*DENSE, *MIXTURES) for size in (2, 4)),
    *(Portion(family, 4, changes={"num_key_value_heads": 1}) for family in ("qwen2", "qwen3", "llama-biased", "gemma2", "qwen3-moe")),
    *(Portion("qwen2", size, changes={"tie_word_embeddings": True}) for size in (2, 4)),
    *(Portion(family, size, how) for family in MIXTURES for size in (2, 4) for how in (WHOLE, APART)),
    *(Portion(family, 4, role="critic") for family in ("qwen2", "gemma2")),
    Portion("qwen3-moe", 2, APART, role="critic"),
    Portion("llama", 4, learns=False),
    *(Portion(family, 4, lora=LINEAR) for family in ("qwen2", "gemma2", "llama-biased")),
    Portion("llama", 2, lora={"rank": 2}, role="critic"),
    *(Portion("qwen3-moe", 2, how, lora=STACKED) for how in (PARTS, WHOLE, APART)),
    Portion("llama", 2, changes={"vocab_size": 150}),  # the last member has fewer rows
    Portion("Gemma-2-2B", 8),  # 4 heads of keys and values
    Portion("Qwen3-30B-A3B", 8, WHOLE),
]
MATRIX = [Portion("70B", 8), Portion("Qwen3-30B-A3B", 8), Portion("Qwen3-30B-A3B", 8, APART), Portion("Mixtral-8x7B", 8, APART)]


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.matrix) for case in MATRIX)], ids=str)
def test_a_worker_holds_what_the_plan_says(case: Portion) -> None:
    """Parameter by parameter, and so gradients and states of the optimizer too, however they are shared out."""
    model = case.model()
    each, found = [case.counted(model, rank) for rank in range(case.size)], case.planned(model)
    assert Counter(found.known_sizes) == Counter(each[0])
    assert found.parameter_bytes == max(sum(own.bytes for own in sizes) for sizes in each)
    assert found.trained == max(sum(own.count for own in sizes if own.learns) for sizes in each)
    experts_apart = case.size if case.how == APART else 1
    for sharding in (Sharding(), Sharding("optimizer", 2, 2), Sharding("full", 2, 2)):
        given = replace(sharding, workers=sharding.workers * experts_apart, group=sharding.group * experts_apart, experts=experts_apart)
        planned, counted = found.held(given), held_bytes(each[0], given)
        assert (planned.parameters, planned.gradients) == (counted.parameters, counted.gradients)
        assert planned.optimizer == counted.optimizer or case.lora  # which adapters come first decides who has their last numbers


MOE_SIZES = [("qwen3-moe", 2), ("mixtral", 4)]


@pytest.mark.parametrize(
    ("family", "size", "how"),
    [
        ("qwen2", 2, PARTS),
        ("gemma2", 4, PARTS),
        ("qwen3-moe", 2, PARTS),
        ("qwen3-moe", 2, WHOLE),
        ("mixtral", 4, PARTS),
        ("mixtral", 4, WHOLE),
    ],
)
@pytest.mark.parametrize("learning", [(1, 1), (2, 1)])
def test_a_copy_for_rollouts_takes_what_the_plan_says(family: str, size: int, how: str, learning: tuple[int, int]) -> None:
    case = Portion(family, size, how, changes={"num_key_value_heads": 1} if family == "qwen2" else {})
    model = case.model()
    sections = {"model": {"path": "m"}, "data": {"train": "t"}, "rollout": {"expert_parallel": size if how == WHOLE else 1}}
    given = Config.model_validate(sections)
    actor = RoleFacts.of_shape(shape_of(model.config), given, "cuda", learns=True)
    whole = Facts("cuda", 80 << 30, 0, {"actor": actor}, 512, 1, sharding=Sharding(workers=8))
    facts = divided(given, whole, Division(*learning, size))
    if learning[0] == size and how == PARTS:
        assert facts.engine_bytes == 0  # the engine reads what learns
        return
    expected = sum(own.bytes for own in case.counted(model, 0))
    buffer = bucket_bytes(facts.actor.known_sizes, facts.sharding, learning[0])
    assert (facts.copy_bytes, facts.engine_bytes) == (expected, expected + buffer) and (buffer > 0) == (learning[0] > 1)


def test_a_part_is_more_than_an_even_share() -> None:
    """Gemma 2 has fewer heads of keys and values than members, which hold each of them twice."""
    given = Portion("Gemma-2-2B", 8)
    whole = RoleFacts.of_shape(shape_of(FAMILIES["Gemma-2-2B"]()), given.config, "cuda", learns=True)
    part = whole.part(8)
    assert 1.04 < part.parameter_bytes / (whole.parameter_bytes / 8) < 1.05
    assert whole.part(1) == whole and whole.with_experts(2) == whole
