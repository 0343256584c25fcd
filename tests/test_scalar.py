"""Models with one output: their numbers against transformers' classifiers, packed and alone; new heads, adapters, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tensors import restored
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, PreTrainedModel

from fulltilt.model.attention import Packed, UnsupportedModel
from fulltilt.model.forward import hidden_states
from fulltilt.model.load import load_model, load_tokenizer
from fulltilt.model.lora import add_adapters, without_adapters
from fulltilt.model.scalar import ScalarModel, load_scalar
from fulltilt.model.verify import verify
from fulltilt.records import UserError
from fulltilt.schema import LoraConfig, ModelConfig, TrainConfig
from fulltilt.training.optim import Optimizer

CPU = torch.device("cpu")
RANDOM = np.random.default_rng(0)
DOCUMENTS = [RANDOM.integers(3, 90, length) for length in (19, 7, 30, 1)]  # longer than the windows of the list


def classifier(family: str, folder: Path, kind: Any = AutoModelForSequenceClassification, **changes: Any) -> PreTrainedModel:
    config = models.FAMILIES[family]()
    for name, value in {"num_labels": 1, **changes}.items():
        setattr(config, name, value)
    torch.manual_seed(4)
    model = kind.from_config(config, attn_implementation="eager").eval()
    if getattr(model.score, "bias", None) is not None:
        torch.nn.init.normal_(model.score.bias)  # zeros would hide a bias that is not read
    model.save_pretrained(folder)
    models.tokenizer().save_pretrained(folder)
    return model  # type: ignore[no-any-return]


def scalar(folder: Path, head: Any = "required", dtype: str = "float32") -> ScalarModel:
    return load_scalar(ModelConfig(path="elsewhere/model", dtype=dtype), CPU, str(folder), key="reward_model.path", head=head)  # type: ignore[arg-type]


def values(model: ScalarModel, documents: list[np.ndarray] = DOCUMENTS) -> list[torch.Tensor]:
    lengths = [len(document) for document in documents]
    positions = np.concatenate([np.arange(length) for length in lengths])
    packed = Packed.of(np.cumsum([0, *lengths]), CPU)
    return list(model.values(torch.from_numpy(np.concatenate(documents)), torch.from_numpy(positions), packed).split(lengths))


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gemma2", "mixtral"])
def test_the_last_tokens_number_is_transformers_score(family: str, tmp_path: Path) -> None:
    reference = classifier(family, tmp_path)
    model = scalar(tmp_path)
    verify(model.body)
    with torch.no_grad():
        together = values(model)
        for document, packed in zip(DOCUMENTS, together, strict=True):
            expected = reference(input_ids=torch.from_numpy(document)[None]).logits
            assert expected.shape == (1, 1) and packed.shape == (len(document),)
            torch.testing.assert_close(packed[-1], expected[0, 0], rtol=0, atol=1e-5)
            torch.testing.assert_close(values(model, [document])[0], packed, rtol=0, atol=1e-5)
    assert len({round(float(each[-1]), 3) for each in together}) == len(DOCUMENTS)


def test_every_tokens_number_is_a_token_classifiers_with_its_bias(tmp_path: Path) -> None:
    reference = classifier("qwen2", tmp_path, AutoModelForTokenClassification)
    with torch.no_grad():
        for document, found in zip(DOCUMENTS, values(scalar(tmp_path)), strict=True):
            torch.testing.assert_close(found, reference(torch.from_numpy(document)[None]).logits[0, :, 0], rtol=0, atol=1e-5)


def test_a_head_in_one_of_several_files(tmp_path: Path) -> None:
    reference = classifier("llama", tmp_path / "one", AutoModelForTokenClassification)
    reference.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    files = set(json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())["weight_map"].values())
    assert len(files) > 2
    assert torch.equal(torch.cat(values(scalar(tmp_path / "many"))), torch.cat(values(scalar(tmp_path / "one"))))


@pytest.mark.parametrize(("dtype", "expected"), [("float32", torch.float32), ("bfloat16", torch.float32), ("float64", torch.float64)])
def test_numbers_are_float32_or_better(dtype: str, expected: torch.dtype, tmp_path: Path) -> None:
    classifier("llama", tmp_path)
    model = scalar(tmp_path, dtype=dtype)
    assert str(model.dtype) == f"torch.{dtype}" and model.device == CPU and model.config.model_type == "llama"
    assert model.score.weight.dtype == expected
    assert torch.cat(values(model)).dtype == expected
    assert not any(module.training for module in model.modules())


# ---- critics -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [False, True])
def test_a_new_head_starts_at_zero_and_learns(lora: bool, dtype: str, model_folders) -> None:
    """Zero everywhere, then the head moves, then the body; a checkpoint of the optimizer alone restores the critic."""

    def start(seed: int) -> tuple[ScalarModel, Optimizer]:
        config = ModelConfig(path=str(model_folders("llama-tied")), dtype=dtype)  # type: ignore[arg-type]
        model = load_scalar(config, CPU, key="critic.path", head="new")
        if lora:
            add_adapters(model.body, LoraConfig(rank=4), seed)
        return model, Optimizer(model, TrainConfig(lr=1e-2), total_updates=50, keeps_parameters=True)

    targets = torch.from_numpy(np.concatenate([np.linspace(-1, 1, len(document)) for document in DOCUMENTS])).float()

    def learn(model: ScalarModel, optimizer: Optimizer) -> float:
        loss = (torch.cat(values(model)) - targets).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    model, optimizer = start(seed=1)
    assert not torch.cat(values(model)).any()
    body = {name: tensor.clone() for name, tensor in model.body.state_dict().items()}
    first = learn(model, optimizer)
    assert model.score.weight.abs().min() > 0
    for _ in range(15):
        learn(model, optimizer)
    moved = {name for name, tensor in model.body.state_dict().items() if not torch.equal(tensor, body[name])}
    assert moved and (not lora or all(".lora_" in name for name in moved))

    other, resumed = start(seed=2)
    restored(resumed, optimizer.tensors(), optimizer.updates, optimizer.skipped)
    for _ in range(5):
        assert learn(model, optimizer) == learn(other, resumed)
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert learn(model, optimizer) < 0.5 * first


def test_a_critic_keeps_a_reward_models_head(tmp_path: Path) -> None:
    reference = classifier("llama", tmp_path)
    assert torch.equal(scalar(tmp_path, head="new").score.weight, reference.score.weight)  # type: ignore[union-attr]


def test_adapters_go_on_the_body_and_the_head_stays_trained(tmp_path: Path) -> None:
    classifier("qwen3-moe", tmp_path)
    model, plain = scalar(tmp_path), scalar(tmp_path)
    add_adapters(model.body, LoraConfig(rank=4, parameters=["experts.down_proj"]), seed=0)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert "score.weight" in trained and len(trained) == 1 + 2 * 2 * 5
    assert all(name == "score.weight" or ".lora_" in name for name in trained)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
        assert (torch.cat(values(model)) - torch.cat(values(plain))).abs().mean() > 1e-3
        with without_adapters(model.body):
            assert torch.equal(torch.cat(values(model)), torch.cat(values(plain)))


def test_the_gradient_does_not_depend_on_packing(tmp_path: Path) -> None:
    classifier("mistral", tmp_path)
    model = scalar(tmp_path, dtype="float64")

    def gradient(packs: list[list[np.ndarray]]) -> torch.Tensor:
        model.zero_grad()
        for documents in packs:
            torch.cat(values(model, documents)).square().sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])  # type: ignore[union-attr]

    whole = gradient([DOCUMENTS])
    assert whole.abs().max() > 1e-2
    assert (gradient([[document] for document in DOCUMENTS]) - whole).abs().max() < 1e-9


# ---- what is refused ---------------------------------------------------------------------------------------------------------------


def test_a_language_model_is_no_reward_model(model_folders) -> None:
    with pytest.raises(UserError, match=r"reward_model\.path: .* has no score head \(score\.weight\): it is not a reward model"):
        scalar(model_folders("llama"))


@pytest.mark.parametrize("head", ["required", "new"])
def test_several_labels_are_refused_with_their_shape(head: str, tmp_path: Path) -> None:
    classifier("llama", tmp_path, num_labels=2)
    with pytest.raises(UserError, match=r"reward_model\.path: .*score\.weight\) has the shape \[2, 32\], not \[1, 32\].*one label"):
        scalar(tmp_path, head)


def test_missing_body_weights_are_refused(tmp_path: Path) -> None:
    classifier("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"reward_model\.path: .* lacks weights .*layers\.1\.mlp\.up_proj\.weight"):
        scalar(tmp_path)


def test_messages_name_the_setting(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"reward_model\.path: .*config\.json: it is not readable as JSON"):
        scalar(tmp_path)
    with pytest.raises(UserError, match=r"ref\.path: .*config\.json: it is not readable as JSON"):
        load_model(ModelConfig(path="elsewhere/model"), CPU, tmp_path, key="ref.path")
    with pytest.raises(UserError, match=r"reward_model\.path: the tokenizer of .* could not be loaded"):
        load_tokenizer(ModelConfig(path="elsewhere/model"), tmp_path, key="reward_model.path")


def test_loading_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    classifier("llama", tmp_path)
    capfd.readouterr()
    scalar(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_a_reward_models_tokenizer_has_a_template_of_its_own(model_folders, tmp_path: Path) -> None:
    (tmp_path / "actors").write_text("ACTOR")
    (tmp_path / "rewards").write_text("REWARD")
    config = ModelConfig(path="elsewhere/model", chat_template=str(tmp_path / "actors"))
    folder = model_folders("llama")
    assert load_tokenizer(config, folder).chat_template == models.TEMPLATE
    assert load_tokenizer(config, folder, chat_template=str(tmp_path / "rewards")).chat_template == "REWARD"
    assert load_tokenizer(config.model_copy(update={"path": str(folder)})).chat_template == "ACTOR"


def test_hidden_states_of_a_body_and_of_what_has_none(model_folders) -> None:
    model = load_model(ModelConfig(path=str(model_folders("llama"))), CPU)
    ids, positions, packed = torch.arange(5, 12), torch.arange(7), Packed.of([0, 7], CPU)
    with torch.no_grad():
        assert torch.equal(hidden_states(model.model, ids, positions, packed), hidden_states(model, ids, positions, packed))  # type: ignore[arg-type]
        model.base_model_prefix = "nothing"  # as in models that are not split into body and head
        with pytest.raises(UnsupportedModel, match="LlamaForCausalLM has no body apart from its head"):
            hidden_states(model, ids, positions, packed)
