"""Sizes from config.json alone: they are those of the model that transformers builds, and of what its layers really keep."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import devices
import models
import pytest
import test_tensor_parallel as tensor
import torch
import torch.distributed as dist
from layers import apply_recompute
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
)
from variants import sample_cases

from fulltilt.cluster.sizes import role_facts
from fulltilt.memory.recompute import KeptResults, saving_to
from fulltilt.model import attention, experts, lora
from fulltilt.model.attention import Packed
from fulltilt.model.forward import hidden_states
from fulltilt.model.fuse import FAMILIES as FUSED
from fulltilt.model.fuse import fuse
from fulltilt.model.load import shape_of
from fulltilt.model.verify import verify
from fulltilt.parallel.experts import ExpertExchange, split_experts
from fulltilt.parallel.ranks import Ranks
from fulltilt.parallel.tensor import split
from fulltilt.plan.facts import Facts
from fulltilt.plan.make import make_plan
from fulltilt.records import UserError
from fulltilt.rollout.runner import bytes_per_token
from fulltilt.schema import Config, LoraConfig
from fulltilt.shape import FAMILIES, SHAPES, LayerDivision, Recompute, Shape, UnknownParameters


def on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def as_written(config: PreTrainedConfig) -> dict[str, Any]:
    return json.loads(config.to_json_string())


# -- parameters, keys and values --------------------------------------------------------------------------------------------------------


CHILD = """
import json, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "triton", "safetensors"):
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocked())
from fulltilt.schema import Config
from fulltilt.plan.make import plan_of
from fulltilt.shape import Shape
config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}})
hardware = {"device": "cuda", "device_bytes": 10**12, "host_bytes": 10**13, "longest": 300}
found = {}
for name in sys.argv[1:]:
    shape, plan = Shape.read(name), plan_of(name, config, roles=("actor", "ref"), **hardware)
    found[name] = [shape.parameters_by_kind(), shape.kv_bytes_per_token(2), plan.words]
print(json.dumps(found))
"""


def kind_of(name: str) -> str:
    names = {"embed_tokens": "embedding", "lm_head": "head", "self_attn": "attention", "mlp": "mlp"}
    return next((kind for part, kind in names.items() if f".{part}." in f".{name}"), "norms")


def test_without_torch_sizes_are_those_of_the_model_that_transformers_builds(tmp_path: Path) -> None:
    """In a process that cannot import torch, from config.json as transformers writes it. The largest has 47 billion parameters."""
    configs = {name: AutoConfig.for_model(**given) for name, given in SHAPES.items()}
    for name, config in configs.items():
        config.save_pretrained(tmp_path / name)
    path = {"PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    command = [sys.executable, "-c", CHILD, *configs]
    child = subprocess.run(command, capture_output=True, text=True, env=path, cwd=tmp_path, check=True)
    found = json.loads(child.stdout)
    for name, config in configs.items():
        model = on_meta(config)
        expected: dict[str, int] = dict.fromkeys(("embedding", "attention", "mlp", "norms", "head"), 0)
        for parameter_name, parameter in model.named_parameters():
            expected[kind_of(parameter_name)] += parameter.numel()
        by_kind, kv_bytes, words = found[name]
        assert by_kind == expected, name
        layers = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "k_proj")]
        assert kv_bytes == sum(2 * 2 * (layer.k_proj.out_features + layer.v_proj.out_features) // 2 for layer in layers), name
        assert len(words) >= 3 and words[1].startswith("rollout: KV cache of "), name


BIASED = {"attention_bias": True, "mlp_bias": True}
MORE = {
    "llama-biased": lambda: LlamaConfig(**models.SMALL, **BIASED),
    "qwen2-moe": lambda: Qwen2MoeConfig(
        **models.SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=20,
        decoder_sparse_step=2, num_experts_per_token=2,
    ),
    "qwen2-moe-dense": lambda: Qwen2MoeConfig(**models.SMALL, num_experts=4, mlp_only_layers=[1], qkv_bias=False),
}  # fmt: skip
EVERY = {**models.FAMILIES, **MORE}


@pytest.mark.parametrize("family", EVERY)
def test_every_family_that_runs_has_its_sizes(family: str) -> None:
    config = EVERY[family]()
    shape, model = Shape.from_config(as_written(config)), on_meta(config)
    assert shape == Shape.from_config(config.to_dict())  # as a loaded model has it
    if family == "cohere":
        with pytest.raises(UnknownParameters, match=r"the structure of cohere is not known, so .* Known are llama, "):
            shape.parameters_by_kind()
    else:
        assert sum(shape.parameters_by_kind().values()) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("family", models.FAMILIES)
def test_heads_are_those_that_a_pass_sees(family: str) -> None:
    model = small(models.FAMILIES[family]())
    seen, shape = verify(model), Shape.from_config(as_written(model.config))
    assert {index: (layer.key_heads, layer.head_width) for index, layer in seen.items()} == {
        index: (layer.key_heads, layer.head_width) for index, layer in enumerate(shape.layers)
    }
    assert shape.kv_bytes_per_token(4) == bytes_per_token(seen, torch.float32)


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "qwen3-moe", "qwen2-moe"])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"], ["self_attn.o_proj"]])
def test_adapters_train_as_many_numbers(family: str, targets: Any) -> None:
    config = EVERY[family]()
    stacked = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if "moe" in family else []
    if family == "phi3" and isinstance(targets, list):
        targets = [{"q_proj": "qkv_proj"}.get(name, name) for name in targets]
    if family == "qwen3-moe" and targets == ["q_proj", "down_proj"]:
        targets = ["q_proj"]  # its experts are no layers
    shape, model = Shape.from_config(as_written(config)), small(config)
    lora.add_adapters(model, LoraConfig(rank=4, targets=targets, parameters=stacked), seed=0)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert shape.lora_parameters(4, targets, stacked) == trained


def test_a_loaded_model_of_an_unknown_family_is_planned_by_what_is_measured() -> None:
    model = small(models.FAMILIES["cohere"]())
    facts = role_facts(model, learns=True)
    assert facts.trained == sum(parameter.numel() for parameter in model.parameters()) == facts.parameter_bytes // 4
    config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}})
    plan = make_plan(config, Facts("cuda", 10**10, 10**10, {"actor": facts}, longest=20, steps_per_epoch=1))
    assert plan.budgets.kv_blocks > 0 and plan.budgets.token_budget == 65536


PER_LAYER = {
    "overrides": Gemma4TextConfig(
        **models.SMALL | {"head_dim": 8}, global_head_dim=16, num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=12,
        layer_types=["sliding_attention", "full_attention"], vocab_size_per_layer_input=160, hidden_size_per_layer_input=8,
    ),
    "lists": Gemma3nTextConfig(
        **models.SMALL | {"intermediate_size": [48, 64]}, head_dim=8, laurel_rank=4, altup_num_inputs=2, num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"], sliding_window=12, vocab_size_per_layer_input=160,
        hidden_size_per_layer_input=8, activation_sparsity_pattern=[0.0, 0.0],
    ),
}  # fmt: skip


@pytest.mark.parametrize("config", PER_LAYER.values(), ids=PER_LAYER)
def test_sizes_may_differ_from_layer_to_layer(config: PreTrainedConfig) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.register()).eval()
    shape = role_facts(model, learns=True).shape
    seen = verify(model)
    assert [(layer.key_heads, layer.head_width) for layer in shape.layers] == [(one.key_heads, one.head_width) for one in seen.values()]
    assert [layer.inner for layer in shape.layers] == [layer.mlp.up_proj.out_features for layer in model.model.layers]
    assert shape.kept_bytes(2, fused=False) > 0 and shape.kv_bytes_per_token(2) > 0


IMPOSSIBLE = {
    "hidden_size": 0, "num_hidden_layers": 10**9, "num_attention_heads": "4", "vocab_size": -1, "num_key_value_heads": 1.5,
    "head_dim": [8], "intermediate_size": True, "per_layer_config": [3], "text_config": None, "max_position_embeddings": 10**30,
}  # fmt: skip


@pytest.mark.parametrize("key", IMPOSSIBLE)
def test_impossible_sizes_are_the_users_mistake(key: str, tmp_path: Path) -> None:
    config = {**models.SMALL, "model_type": "llama", key: IMPOSSIBLE[key]}
    if key == "text_config":
        assert Shape.from_config(config).width == models.SMALL["hidden_size"]
        return
    with pytest.raises(UserError, match=r"config\.json"):
        Shape.from_config(config)
    for content in ("[1]", "3", "[" * 10_000, "{"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(UserError, match=r"config\.json: cannot be read"):
            Shape.read(tmp_path)


def test_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config.json: cannot be read .* Give a folder with a config.json"):
        Shape.read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "hidden_size": 8}))
    with pytest.raises(UserError, match="num_hidden_layers, num_attention_heads, vocab_size is missing"):
        Shape.read(tmp_path)
    with pytest.raises(UserError, match=r"'8B' is not a named shape. Choose from 0.5B, "):
        Shape.named("8B")
    inside = {"model_type": "a picture's", "text_config": SHAPES["small"]}
    assert Shape.from_config(inside) == Shape.named("small")


def test_the_table_knows_which_families_run_fused() -> None:
    homes = {name.rpartition("_")[2] for name in FUSED}
    assert {name for name, family in FAMILIES.items() if family.fused} == homes


# -- what layers keep -------------------------------------------------------------------------------------------------------------------


def small(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    names = {"attn_implementation": attention.register(), "experts_implementation": experts.register()}
    return AutoModelForCausalLM.from_config(config, dtype=dtype, **names).eval()


@dataclass(eq=False)
class Held:
    """A tensor in the hands of autograd or of selective recompute, for as long as they want it."""

    tensor: torch.Tensor


class Counting:
    """Sees every tensor that is kept for a backward pass, but for the model's own."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.own = {parameter.untyped_storage().data_ptr() for parameter in (*model.parameters(), *model.buffers())}
        self.held: weakref.WeakSet[Held] = weakref.WeakSet()

    def put(self, tensor: torch.Tensor) -> Held:
        held = Held(tensor)
        self.held.add(held)
        return held

    def take(self, held: Held) -> torch.Tensor:
        return held.tensor

    @property
    def bytes(self) -> int:
        storages = {held.tensor.untyped_storage().data_ptr(): held.tensor.untyped_storage().nbytes() for held in self.held}
        return sum(count for address, count in storages.items() if address not in self.own)


@contextmanager
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Packed attention is the operation that a GPU runs, with results of its shape: only what it keeps matters here."""

    def flash(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(q), torch.zeros(q.shape[1], len(q), device=q.device)

    with monkeypatch.context() as patched:
        patched.setattr(attention, "flash_runs", lambda *_: True)
        patched.setattr(attention, "takes", lambda *_, **__: True)
        patched.setattr(attention, "flash", flash)
        patched.setattr(KeptResults, "_refuse_change", lambda *_: None)  # Triton's interpreter writes back all arguments of a kernel
        yield


def kept_by(model: PreTrainedModel, tokens: int, monkeypatch: pytest.MonkeyPatch, setting: Recompute = Recompute()) -> int:  # noqa: B008
    """Bytes kept between the passes over two documents, every token of which the head reads."""
    handle, counting = apply_recompute(model, setting), Counting(model)
    order = torch.arange(tokens, device=model.device)
    ids, positions = order % 100, order % (tokens // 2)
    context = Packed.of([0, tokens // 2, tokens], model.device)
    counting.own.add(context.parts.untyped_storage().data_ptr())  # some numbers for each document, not for each token
    arguments: list[Held] = []  # of layers that will run again: angles
    rotary = model.base_model.rotary_emb.register_forward_hook(lambda _, __, out: arguments.extend(map(counting.put, out)))
    try:
        with as_on_a_gpu(monkeypatch), saving_to(counting):
            hidden = hidden_states(model, ids, positions, context)
            rows = counting.put(hidden[order])  # the head's
        assert rows.tensor.requires_grad
        return counting.bytes
    finally:
        rotary.remove()
        handle.remove()


WIDE = {"hidden_size": 48, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2}
QWEN2 = {
    "qwen2": lambda: Qwen2Config(**models.SMALL),
    "qwen2-wider": lambda: Qwen2Config(**{**models.SMALL, **WIDE}),
}
SETTINGS = [
    Recompute(),
    Recompute("selective"),
    Recompute("full"),
    Recompute("full", 1),
    Recompute("selective", 1),
    Recompute("full", 2, "uniform"),
]
TOKENS = 4
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # where marked tests run kernels


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", sample_cases([torch.bfloat16, torch.float32], torch.bfloat16), ids=str)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("family", sample_cases([*QWEN2, "llama", "qwen3"], "qwen2", long=("qwen2-wider", "llama", "qwen3")))
def test_layers_keep_what_is_said(family: str, fused: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte, where the kernels of a GPU run."""
    config = {**models.FAMILIES, **QWEN2}[family]()
    model, shape = small(config, dtype).to(DEVICE), Shape.from_config(as_written(config))
    if fused:
        assert fuse(model).left_alone is None
    for setting in SETTINGS if (family, dtype) == ("qwen2", torch.bfloat16) else SETTINGS[:2]:
        expected = shape.kept_bytes(dtype.itemsize, fused=fused, recompute=setting)
        assert kept_by(model, TOKENS, monkeypatch, setting) == TOKENS * expected, setting


@pytest.mark.kernels
@pytest.mark.parametrize(("family", "about"), [("phi3", 0.0), ("qwen3-moe", 0.01), ("mixtral", 0.02), ("gemma3", 0.02)])
def test_other_families_keep_about_what_is_said(family: str, about: float, monkeypatch: pytest.MonkeyPatch) -> None:
    config = models.FAMILIES[family]()
    expected = TOKENS * Shape.from_config(as_written(config)).kept_bytes(2, fused=False)
    assert kept_by(small(config, torch.bfloat16).to(DEVICE), TOKENS, monkeypatch) == pytest.approx(expected, rel=about)


# -- what layers keep that workers divide among themselves ------------------------------------------------------------------------------


class DividedWorker:
    """A worker that has a part of a model, in a process of the pool."""

    def __init__(self, rank: int, size: int) -> None:
        self.everyone = Ranks(rank, size, dist.group.WORLD)

    def kept(self, case: tensor.Case, kinds: Sequence[Recompute], divided: bool) -> list[tuple[int, list[int]]]:
        """Bytes kept between the passes, under each setting, and rows that came for this worker's experts. `divided`: experts are."""
        members, found = self.everyone.line(case.size), list[tuple[int, list[int]]]()
        for setting in kinds:
            model, rows, run = tensor.build(case), list[int](), ExpertExchange._run_own
            split_experts(model, members) if divided else split(model, members)
            tensor.finish(model, case)

            def counted(own: ExpertExchange, module: Any, given: torch.Tensor, received: torch.Tensor, run: Any = run) -> torch.Tensor:
                rows.append(len(given))  # noqa: B023 (called before the next turn)
                return run(own, module, given, received)  # type: ignore[no-any-return]

            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(ExpertExchange, "_run_own", counted)
                found.append((kept_by(model, MANY, patched, setting), rows))
        return found


def make_divided(member: devices.Member) -> DividedWorker:
    return DividedWorker(member.rank, dist.get_world_size())


MANY = 16
OF_TENSOR = [tensor.Case("qwen2", 2, dtype="bfloat16"), tensor.Case("qwen3", 4, {"num_key_value_heads": 1}, dtype="bfloat16")]
OF_TENSOR_MATRIX = [
    tensor.Case(family, size, dtype=dtype) for family in ("qwen2", "llama", "qwen3") for size in (2, 4) for dtype in ("bfloat16", "float32")
]


@pytest.mark.parametrize("case", [*OF_TENSOR, *(pytest.param(case, marks=pytest.mark.matrix) for case in OF_TENSOR_MATRIX)], ids=str)
def test_members_of_a_group_keep_what_is_said(pool_of_devices: devices.Pool, case: tensor.Case) -> None:
    """To the byte. Each has some of the tokens between layers, and some heads and columns of all tokens."""
    pool, kinds = devices.Guests(pool_of_devices, "test_shape:make_divided"), SETTINGS[:3]
    shape, itemsize = shape_of(tensor.build(case).config), getattr(torch, case.dtype).itemsize
    division = LayerDivision(members=case.size)
    expected = [MANY // case.size * shape.kept_bytes(itemsize, fused=False, recompute=setting, division=division) for setting in kinds]
    for own in pool.start("kept", [(case, kinds, False)] * pool.size, what="kept").results():
        assert [count for count, _ in own] == expected
    whole = MANY * shape.kept_bytes(itemsize, fused=False)
    assert expected[0] < 0.8 * whole


@pytest.mark.parametrize(
    ("family", "size"),
    [("qwen3-moe", 2), *(pytest.param(*case, marks=pytest.mark.matrix) for case in (("qwen3-moe", 4), ("mixtral", 2), ("mixtral", 4)))],
)
def test_workers_keep_the_rows_that_come_for_their_experts(pool_of_devices: devices.Pool, family: str, size: int) -> None:
    """Without Triton's kernels experts keep their activated gate as well."""
    case, pool = tensor.Case(family, size, dtype="bfloat16"), devices.Guests(pool_of_devices, "test_shape:make_divided")
    shape, totals = shape_of(tensor.build(case).config), [0, 0]
    divided = [layer.experts for layer in shape.layers if layer.experts]
    sent, gate = sum(MANY * layer.active for layer in divided), 2 * divided[0].inner
    for ((found, rows),) in pool.start("kept", [(case, SETTINGS[:1], True)] * pool.size, what="kept").results():
        division = LayerDivision(experts=size, arriving=sum(rows) / sent)
        assert found == pytest.approx(MANY * shape.kept_bytes(2, fused=False, division=division) + sum(rows) * gate, rel=0.02)
        on_average = MANY * shape.kept_bytes(2, fused=False, division=LayerDivision(experts=size)) + sent * gate
        totals = [totals[0] + found, totals[1] + on_average]
    assert totals[0] == pytest.approx(totals[1], rel=0.02)  # as many rows come as are sent, all workers together
