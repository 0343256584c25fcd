"""Adapters on every model of the list: rollout against training, both exports against peft and transformers, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import models
import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from tensors import restored
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel, Qwen3MoeConfig
from variants import sample_cases

from fulltilt.model.load import end_tokens, export, load_model
from fulltilt.model.lora import adapted, add_adapters, export_adapter, merged_tensors, require_peft, without_adapters
from fulltilt.model.verify import packed_logprobs, verify
from fulltilt.records import Group, Prompt, UserError
from fulltilt.rollout.collect import collect
from fulltilt.rollout.engine import EngineContext, EngineLimits
from fulltilt.rollout.engines.native import NativeEngine
from fulltilt.rollout.sampler import Sampling
from fulltilt.schema import LoraConfig, ModelConfig, TrainConfig
from fulltilt.training.optim import Optimizer

CPU = torch.device("cpu")
LIMITS = EngineLimits(blocks=60, block_tokens=4, max_seqs=9, max_batched_tokens=32)
EXPERTS = {family: ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] for family in ("qwen3-moe", "mixtral")}
RANDOM = np.random.default_rng(0)
DOCUMENTS = [RANDOM.integers(3, 90, length) for length in (19, 7, 30, 7)]
PROMPTS = [Prompt(uid=number, ids=document[:5], text="") for number, document in enumerate(DOCUMENTS[:3])]


def settings(family: str, **changes: Any) -> LoraConfig:
    return LoraConfig(**{"rank": 4, "parameters": EXPERTS.get(family, []), **changes})


def stir(model: PreTrainedModel) -> PreTrainedModel:
    """A fresh adapter adds zero; give it something to add."""
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for _, layer in adapted(model):
            weight = layer.lora_B["default"].weight
            weight.copy_(0.1 * torch.randn(weight.shape, generator=random))
    return model


def make(folder: Path, family: str = "llama", dtype: str = "float32", **changes: Any) -> PreTrainedModel:
    model = load_model(ModelConfig(path=str(folder), dtype=dtype), CPU)
    add_adapters(model, settings(family, **changes), seed=3)
    return stir(model)


def logprobs(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat(packed_logprobs(model, DOCUMENTS)[0])


def own_logprobs(model: torch.nn.Module) -> torch.Tensor:
    """By the model's own forward, one document at a time."""
    with torch.no_grad():
        alone = [torch.from_numpy(document) for document in DOCUMENTS]
        return torch.cat([model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0] for ids in alone])


def roll(model: PreTrainedModel, folder: Path, temperature: float) -> tuple[Group, ...]:
    engine = NativeEngine(
        EngineContext(model, models.tokenizer(), end_tokens(ModelConfig(path=str(folder)), models.tokenizer()), verify(model), LIMITS)
    )
    return collect(engine.generate, PROMPTS, Sampling(samples=2, max_new_tokens=14, temperature=temperature), 5, lambda group: None)


def greedy(model: torch.nn.Module) -> list[list[int]]:
    generated = []
    for prompt in PROMPTS:
        ids = torch.from_numpy(prompt.ids)[None]
        out = model.generate(input_ids=ids, max_new_tokens=14, do_sample=False, pad_token_id=1)  # type: ignore[operator]
        generated.append(out[0, ids.shape[1] :].tolist())
    return generated


@pytest.mark.parametrize("family", sample_cases(models.FAMILIES, "llama-tied", "qwen2", "phi3", "gemma2", "qwen3-moe"))
class TestEveryModel:
    def test_rollout_runs_the_trainers_adapters(self, family: str, model_folders) -> None:
        model = make(model_folders(family), family)
        groups = roll(model, model_folders(family), temperature=1.0)
        for group in groups:
            for sample in group.samples:
                with torch.no_grad():
                    (trainer,), _ = packed_logprobs(model, [np.concatenate([group.prompt.ids, sample.ids])])
                np.testing.assert_allclose(sample.logprobs, trainer[len(group.prompt.ids) - 1 :].numpy(), rtol=0, atol=1e-5)

    def test_off_is_the_base_model_bit_for_bit(self, family: str, model_folders) -> None:
        model, base = make(model_folders(family), family), load_model(ModelConfig(path=str(model_folders(family))), CPU)
        on = logprobs(model)
        with without_adapters(model):
            assert torch.equal(logprobs(model), logprobs(base))
        assert torch.equal(logprobs(model), on)
        assert (on - logprobs(base)).abs().mean() > 1e-3
        assert all(p.requires_grad == (".lora_" in name) for name, p in model.named_parameters())

    def test_exports_are_what_peft_and_transformers_run(self, family: str, model_folders, tmp_path: Path) -> None:
        folder = model_folders(family)
        model = make(folder, family)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        export_adapter(model, models.tokenizer(), tmp_path / "adapter", ModelConfig(path=str(folder)))
        export(model, models.tokenizer(), tmp_path / "merged", merged_tensors(model))
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

        tokens, expected = [group.samples[0].ids.tolist() for group in roll(model, folder, temperature=0.0)], logprobs(model)
        _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
        merged = models.reference(tmp_path / "merged")
        through_peft = peft.PeftModel.from_pretrained(models.reference(folder), tmp_path / "adapter")
        for other in (merged, through_peft):
            assert greedy(other) == tokens
            torch.testing.assert_close(own_logprobs(other), expected, rtol=0, atol=1e-5)


# ---- the exports' details ----------------------------------------------------------------------------------------------------------


def test_a_merged_weight_is_rounded_once(model_folders) -> None:
    model = make(model_folders("mixtral"), "mixtral", dtype="bfloat16")
    merged, base = merged_tensors(model), load_model(ModelConfig(path=str(model_folders("mixtral")), dtype="bfloat16"), CPU).state_dict()
    assert merged.keys() == base.keys()
    layers = {name: layer for name, layer in adapted(model)}

    query = layers["model.layers.1.self_attn.q_proj"]
    a, b = query.lora_A["default"].weight.detach().double(), query.lora_B["default"].weight.detach().double()
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(merged[name], (base[name].double() + 2.0 * (b @ a)).bfloat16())

    experts = layers["model.layers.1.mlp.experts"]  # the outer of two wrappers
    name = f"model.layers.1.mlp.experts.{experts.parameter_name}"
    a, b = experts.lora_A["default"].weight.detach().double(), experts.lora_B["default"].weight.detach().double()
    for expert in range(4):
        delta = (
            b.reshape(b.shape[0], 4, 4)[:, :, expert] @ a.reshape(4, 4, -1)[expert]
        )  # peft's layout: [out, rank, experts], [experts, rank, in]
        assert torch.equal(merged[name][expert], (base[name][expert].double() + 2.0 * delta).bfloat16())
    untouched = [name for name in base if torch.equal(merged[name], base[name])]
    assert "lm_head.weight" in untouched and not any("proj" in name for name in untouched)


def test_tied_embeddings_are_saved_once_and_adapters_stay_small(model_folders, tmp_path: Path) -> None:
    model = make(model_folders("llama-tied"))
    export(model, models.tokenizer(), tmp_path / "merged", merged_tensors(model))
    saved = load_file(tmp_path / "merged" / "model.safetensors")
    assert saved.keys() == load_file(model_folders("llama-tied") / "model.safetensors").keys()
    export_adapter(model, models.tokenizer(), tmp_path / "adapter", ModelConfig(path=str(model_folders("llama-tied"))))
    assert all(".lora_" in name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors"))


def test_the_adapters_settings_name_its_base(model_folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folders("llama")
    monkeypatch.chdir(folder.parent)
    export_adapter(make(folder), models.tokenizer(), tmp_path / "adapter", ModelConfig(path=folder.name))
    stored = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert stored["base_model_name_or_path"] == str(folder)
    assert stored["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert (stored["r"], stored["lora_alpha"], stored["task_type"]) == (4, 8, "CAUSAL_LM")
    monkeypatch.chdir(tmp_path)
    whole = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(own_logprobs(whole), logprobs(make(folder)), rtol=0, atol=1e-5)


def test_layers_that_store_their_weight_transposed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=models.VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.15)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    model = make(tmp_path / "base")
    export(model, models.tokenizer(), tmp_path / "merged", merged_tensors(model))
    torch.testing.assert_close(own_logprobs(models.reference(tmp_path / "merged")), logprobs(model), rtol=0, atol=1e-5)


# ---- making adapters ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_seed_decides_and_nothing_else(dtype: str, model_folders) -> None:
    def adapters(seed: int, noise: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(noise)
        state = torch.get_rng_state()
        model = load_model(ModelConfig(path=str(model_folders("qwen3-moe")), dtype=dtype), CPU)
        add_adapters(model, settings("qwen3-moe"), seed)
        assert torch.equal(torch.get_rng_state(), state), "the process's own random numbers must not move"
        return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    first, again, other = adapters(1, noise=10), adapters(1, noise=11), adapters(2, noise=10)
    assert all(torch.equal(first[name], again[name]) for name in first)
    for name, tensor in first.items():
        assert str(tensor.dtype) == f"torch.{dtype}"
        assert torch.equal(tensor, other[name]) == ("lora_B" in name)
        assert bool(tensor.any()) == ("lora_A" in name)


def test_alpha_and_targets(model_folders) -> None:
    model = make(model_folders("llama"), targets=["q_proj", "layers.1.mlp.up_proj"], alpha=2.0)
    assert [name for name, _ in adapted(model)] == [
        "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"
    ]  # fmt: skip
    assert {layer.scaling["default"] for _, layer in adapted(model)} == {0.5}
    only_experts = make(model_folders("mixtral"), "mixtral", targets=[])
    assert {name for name, _ in adapted(only_experts)} == {
        f"model.layers.{layer}.mlp.experts{inner}" for layer in range(2) for inner in ("", ".base_layer")
    }


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"targets": ["q_proj", "query"]}, "no layer 'query'. Its linear layers: down_proj, gate_proj, k_proj, o_proj"),
        ("llama", {"targets": ["proj"]}, "no layer 'proj'"),
        ("llama", {"targets": ["input_layernorm"]}, "is a LlamaRMSNorm, not a linear layer. Its linear layers: down_proj"),
        ("llama", {"targets": ["lm_head"]}, "lora.targets: lm_head is an embedding. Log-probs are computed from its weight itself"),
        ("llama-tied", {"targets": ["lm_head"]}, "lora.targets: lm_head is an embedding"),
        ("llama", {"targets": ["embed_tokens"]}, "embed_tokens is an embedding"),
        ("llama", {"targets": []}, "nothing to adapt"),
        ("llama", {"parameters": ["experts.w1"]}, "LlamaForCausalLM has no parameter 'experts.w1'. It has no stacked experts"),
        ("mixtral", {"parameters": ["w1"]}, "Its stacked parameters: mlp.experts.down_proj, mlp.experts.gate_up_proj"),
        ("llama", {"parameters": ["lm_head.weight"]}, "lora.parameters: lm_head.weight is an embedding"),
        ("llama", {"parameters": ["norm.weight"]}, r"has the shape \[32\]; an adapter needs a matrix or a stack"),
        ("llama", {"parameters": ["q_proj.weight"]}, "peft cannot adapt these layers of LlamaForCausalLM"),
    ],
)  # fmt: skip
def test_what_cannot_be_adapted_is_refused(family: str, changes: dict[str, Any], message: str, model_folders) -> None:
    with pytest.raises(UserError, match=message):
        make(model_folders(family), **changes)


def test_names_that_peft_takes_for_experts_are_refused(tmp_path: Path) -> None:
    """One dense layer before one with experts: peft would read `down_proj` as the experts' parameter of that name."""
    config = Qwen3MoeConfig(
        **models.SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[0]
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="peft takes some of these names for the stacked experts"):
        make(tmp_path)
    assert logprobs(make(tmp_path, targets=["q_proj", "v_proj"], parameters=EXPERTS["qwen3-moe"])).isfinite().all()


def test_a_peft_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(peft.tuners.lora.layer.ParamWrapper, "get_delta_factors")
    with pytest.raises(UserError, match=r"peft .* is too old"):
        require_peft()


def test_a_missing_peft_is_named(model_folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"fulltilt\[peft\]"):
        add_adapters(load_model(ModelConfig(path=str(model_folders("llama"))), CPU), LoraConfig(rank=4), seed=0)


# ---- starting from an adapter ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "mixtral"])
def test_a_saved_adapter_is_taken_up(family: str, model_folders, tmp_path: Path) -> None:
    folder = model_folders(family)
    first = make(folder, family, targets=["q_proj", "v_proj"], alpha=5.0)
    export_adapter(first, models.tokenizer(), tmp_path, ModelConfig(path=str(folder)))
    second = load_model(ModelConfig(path=str(folder)), CPU)
    add_adapters(second, LoraConfig(rank=4), seed=99, path=str(tmp_path))
    assert torch.equal(logprobs(second), logprobs(first))
    assert {name for name, p in second.named_parameters() if p.requires_grad} == {
        name for name, p in first.named_parameters() if p.requires_grad
    }


def test_an_adapter_that_peft_trained_is_taken_up(model_folders, tmp_path: Path) -> None:
    folder = model_folders("llama")
    trained = peft.get_peft_model(
        models.reference(folder), peft.LoraConfig(r=4, lora_alpha=4, lora_dropout=0.1, target_modules="all-linear")
    )
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    trained.eval().save_pretrained(tmp_path)
    model = load_model(ModelConfig(path=str(folder)), CPU)
    add_adapters(model, LoraConfig(rank=4), seed=0, path=str(tmp_path))
    torch.testing.assert_close(logprobs(model), own_logprobs(trained), rtol=0, atol=1e-5)
    assert not any(isinstance(module, torch.nn.Dropout) and module.p for module in model.modules())


@pytest.mark.parametrize(
    ("changes", "stored", "message"),
    [
        ({"rank": 8}, {}, "lora.rank is 8, the adapter's is 4"),
        ({"alpha": 9.0}, {}, "lora.alpha is 9, the adapter's is 8"),
        ({"targets": ["q_proj"]}, {}, "lora.targets names other layers"),
        ({}, {"use_dora": True}, "not plain LoRA .use_dora = True"),
        ({}, {"modules_to_save": ["lm_head"]}, "not plain LoRA .modules_to_save"),
        ({}, {"init_lora_weights": "pissa"}, "not plain LoRA .init_lora_weights = pissa"),
        ({}, {"peft_type": "HRA"}, "only LoRA"),
        ({}, {"target_modules": ["q_proj"]}, "does not fit the model: .*Give an adapter of model.path"),
        ({}, {"target_modules": ["lm_head"]}, "lm_head is an embedding"),
    ],
)
@pytest.mark.filterwarnings("ignore:Unexpected keyword arguments")  # peft's, of settings that another kind of adapter does not have
def test_an_adapter_that_does_not_fit_is_refused(
    changes: dict[str, Any], stored: dict[str, Any], message: str, model_folders, tmp_path: Path
) -> None:
    folder = model_folders("llama")
    export_adapter(make(folder), models.tokenizer(), tmp_path, ModelConfig(path=str(folder)))
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | stored))
    with pytest.raises(UserError, match=message):
        add_adapters(load_model(ModelConfig(path=str(folder)), CPU), LoraConfig(**{"rank": 4, **changes}), seed=0, path=str(tmp_path))


def test_an_adapter_of_another_size_is_refused(model_folders, tmp_path: Path) -> None:
    export_adapter(make(model_folders("qwen3")), models.tokenizer(), tmp_path, ModelConfig(path="other"))
    with pytest.raises(UserError, match=r"does not fit the model: .*size mismatch"):
        add_adapters(load_model(ModelConfig(path=str(model_folders("llama"))), CPU), LoraConfig(rank=4), seed=0, path=str(tmp_path))
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match=r"there is no adapter_model\.safetensors"):
        add_adapters(load_model(ModelConfig(path=str(model_folders("llama"))), CPU), LoraConfig(rank=4), seed=0, path=str(tmp_path))


# ---- training them -----------------------------------------------------------------------------------------------------------------


def gradient(model: PreTrainedModel, packs: list[list[np.ndarray]]) -> dict[str, torch.Tensor]:
    """Of a sum over all tokens, packed as given."""
    model.zero_grad()
    for documents in packs:
        torch.cat(packed_logprobs(model, documents)[0]).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("family", ["llama-tied", "qwen3-moe", "mixtral"])
def test_the_gradient_does_not_depend_on_packing(family: str, model_folders) -> None:
    model = make(model_folders(family), family, dtype="float64")
    packed, alone = gradient(model, [DOCUMENTS]), gradient(model, [[document] for document in DOCUMENTS])
    assert packed.keys() == {name for name, parameter in model.named_parameters() if ".lora_" in name}
    for name, tensor in packed.items():
        assert tensor.abs().max() > 1e-3, name
        assert (tensor - alone[name]).abs().max() < 1e-9, name


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
def test_experts_learn_through_one_grouped_call(family: str, model_folders) -> None:
    """float64 runs a loop over experts; float32 the grouped call, whose gradient must be the same but for rounding."""
    model, exact = make(model_folders(family), family), make(model_folders(family), family, dtype="float64")
    assert (model.config._experts_implementation, exact.config._experts_implementation) == ("fulltilt", "fulltilt")
    found, expected = gradient(model, [DOCUMENTS]), gradient(exact, [DOCUMENTS])
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() < 1e-4 * tensor.abs().max(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_of_the_optimizer_holds_the_adapters(dtype: str, model_folders) -> None:
    folder = model_folders("llama")

    def start(seed: int) -> tuple[PreTrainedModel, Optimizer]:
        model = load_model(ModelConfig(path=str(folder), dtype=dtype), CPU)
        add_adapters(model, LoraConfig(rank=4), seed)
        return model, Optimizer(model, TrainConfig(lr=1e-2), total_updates=8, keeps_parameters=True)

    def learn(model: PreTrainedModel, optimizer: Optimizer, updates: int) -> None:
        for _ in range(updates):
            (-torch.cat(packed_logprobs(model, DOCUMENTS)[0]).mean()).backward()
            optimizer.step()

    model, optimizer = start(seed=1)
    base = {name: tensor.clone() for name, tensor in model.state_dict().items() if ".lora_" not in name}
    begin = float(logprobs(model).mean())
    learn(model, optimizer, 3)
    other, resumed = start(seed=2)
    restored(resumed, optimizer.tensors(), optimizer.updates, optimizer.skipped)
    learn(model, optimizer, 3)
    learn(other, resumed, 3)
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in base.items())
    assert float(logprobs(model).mean()) > begin + 0.02


def test_a_checkpoint_with_other_adapters_is_refused(model_folders) -> None:
    def optimizer(**changes: Any) -> Optimizer:
        return Optimizer(make(model_folders("llama"), **changes), TrainConfig(), 1, keeps_parameters=True)

    saved = optimizer(targets=["q_proj"]).tensors()
    with pytest.raises(
        UserError, match=r"q_proj.lora_A.default.weight has the shape \[4, 32\] in the checkpoint and \[8, 32\] now.*\[lora\]"
    ):
        restored(optimizer(targets=["q_proj"], rank=8), saved, 1, 0)
    with pytest.raises(UserError, match=r"v_proj\.lora_A\.default\.weight is not in the checkpoint"):
        restored(optimizer(targets=["q_proj", "v_proj"]), saved, 1, 0)
    with pytest.raises(UserError, match=r"q_proj\.lora_A\.default\.weight is in the checkpoint only"):
        restored(optimizer(targets=["v_proj"]), saved | optimizer(targets=["v_proj"]).tensors(), 1, 0)
