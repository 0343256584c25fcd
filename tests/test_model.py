"""Loading, the attention function, the head, and the checks that every model passes before a run."""

from __future__ import annotations

import json
from pathlib import Path

import models
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
)

from fulltilt.config import ModelConfig
from fulltilt.model import attention
from fulltilt.model.attention import Packed, UnsupportedModel
from fulltilt.model.forward import hidden_states
from fulltilt.model.heads import Head, token_logprobs
from fulltilt.model.load import check_vocabulary, end_tokens, export, load_model, load_tokenizer
from fulltilt.model.verify import packed_logprobs, verify
from fulltilt.records import UserError

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", models.FAMILIES)
def test_packed_log_probs_are_transformers_own(family: str, model_folders) -> None:
    """Against the model as transformers runs it, one document at a time, with lengths beyond every window."""
    folder = model_folders(family)
    ours, theirs = (
        load_model(ModelConfig(path=str(folder)), CPU),
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval(),
    )
    random = np.random.default_rng(0)
    documents = [random.integers(0, models.VOCABULARY, length) for length in (40, 3, 25, 40, 1, 64)]
    with torch.no_grad():
        packed, seen = packed_logprobs(ours, documents)
        for document, found in zip(documents, packed, strict=True):
            logits = theirs(torch.from_numpy(document)[None]).logits[0].log_softmax(-1)
            expected = logits[:-1].gather(1, torch.from_numpy(document)[1:, None])[:, 0]
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert seen == verify(ours) and sorted(seen) == [0, 1]


def refused(config, tmp_path: Path) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel) as caught:
        verify(load_model(ModelConfig(path=str(tmp_path)), CPU))
    return str(caught.value)


def test_soft_cap_sinks_and_scaled_logits_are_refused_by_name(tmp_path: Path) -> None:
    small = {**models.SMALL, "head_dim": 8}
    assert "soft-capped" in refused(Gemma2Config(**small), tmp_path / "gemma2")
    assert "sinks" in refused(GptOssConfig(**small, num_local_experts=2, num_experts_per_tok=1), tmp_path / "gptoss")
    message = refused(GraniteConfig(**models.SMALL, logits_scaling=4.0), tmp_path / "granite")
    assert "GraniteForCausalLM" in message and "logits" in message


def test_what_short_documents_hide_is_refused(tmp_path: Path) -> None:
    """Frequencies that depend on the longest position of a pass, and windows that a model applies only through its own mask."""
    dynamic = LlamaConfig(**models.SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0})
    assert "dynamic" in refused(dynamic, tmp_path / "dynamic")
    moe = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    windowed = Qwen2MoeConfig(**models.SMALL, **moe, use_sliding_window=True, sliding_window=8, layer_types=["sliding_attention"] * 2)
    assert "window" in refused(windowed, tmp_path / "windowed")


def test_windows_that_are_switched_off_are_no_reason_to_refuse(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for name, config in {
        "qwen2": Qwen2Config(**models.SMALL, use_sliding_window=False, sliding_window=8),
        "mixed": Qwen2Config(**models.SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=1),
        "mistral": MistralConfig(**models.SMALL, sliding_window=None),
    }.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        seen = verify(load_model(ModelConfig(path=str(tmp_path / name)), CPU))
        assert [shape.window for shape in seen.values()] == ([None, 8] if name == "mixed" else [None, None])


def test_a_broken_generation_config_is_not_passed_over(tmp_path: Path) -> None:
    models.save("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 20')
    with pytest.raises(UserError, match="could not be loaded"):
        end_tokens(ModelConfig(path=str(tmp_path)), models.tokenizer())
    (tmp_path / "generation_config.json").unlink()
    assert end_tokens(ModelConfig(path=str(tmp_path)), models.tokenizer()) == {1}


def test_a_model_that_does_not_call_the_interface_is_refused(tmp_path: Path) -> None:
    config = FalconConfig(
        vocab_size=160, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=False, new_decoder_architecture=False
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"Falcon|falcon"):
        verify(load_model(ModelConfig(path=str(tmp_path)), CPU))


def test_a_layer_that_goes_around_us_is_found(model_folders) -> None:
    model = load_model(ModelConfig(path=str(model_folders("llama"))), CPU)
    layer = model.model.layers[1].self_attn
    layer.forward = lambda hidden_states, **kwargs: (hidden_states * 0.5, None)
    with pytest.raises(UnsupportedModel, match="1 of 2 layers did not go through"):
        verify(model)


def test_documents_that_mix_are_found(model_folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the separation for real: treat the whole stream as one document."""
    model = load_model(ModelConfig(path=str(model_folders("llama"))), CPU)
    whole = Packed.of
    monkeypatch.setattr(Packed, "of", staticmethod(lambda bounds, device: whole([bounds[0], bounds[-1]], device)))
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM.*documents mix"):
        verify(model)


class Anyone(torch.nn.Module):
    layer_idx, is_causal = 0, True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"softcap": 50.0}, "soft-capped"),
        ({"s_aux": torch.zeros(4)}, "sinks"),
        ({"position_bias": torch.zeros(1)}, "position bias"),
        ({"some_new_feature": 3}, "some_new_feature"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "not causal"),
        ({"attention_mask": torch.ones(1)}, "mask"),
        ({"value": torch.zeros(1, 2, 5, 4)}, "width"),
        ({"fulltilt": None}, "keyword arguments"),
    ],
)
def test_unknown_features_raise(arguments: dict, words: str) -> None:
    states = {"query": torch.zeros(1, 4, 5, 8), "key": torch.zeros(1, 2, 5, 8), "value": torch.zeros(1, 2, 5, 8), "attention_mask": None}
    states["fulltilt"] = Packed.of([0, 5], CPU)
    with pytest.raises(UnsupportedModel, match=words):
        attention.attention(Anyone(), **(states | arguments))
    assert attention.attention(Anyone(), **states)[0].shape == (1, 5, 4, 8)


def test_scaling_and_window_are_honoured() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    out = attention.attention(Anyone(), q, k, v, None, scaling=0.7, sliding_window=3, fulltilt=Packed.of([0, 9], CPU))[0]
    for t in range(9):
        for head in range(4):
            visible = range(max(0, t - 2), t + 1)
            scores = torch.stack([(q[0, head, t] @ k[0, head // 2, s]) * 0.7 for s in visible]).softmax(0)
            expected = sum(p * v[0, head // 2, s] for p, s in zip(scores, visible, strict=True))
            torch.testing.assert_close(out[0, t, head], expected, rtol=0, atol=1e-5)


# -- head -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7 * 50, 1 << 26])
def test_head_equals_plain_softmax_forward_and_backward(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fulltilt.model.heads.CHUNK_NUMBERS", chunk)
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((23, 16), (50, 16), (50,)))
    targets = torch.randint(0, 50, (23,))
    of_logprobs, of_entropy = torch.randn(23, dtype=torch.float64), torch.randn(23, dtype=torch.float64)

    logprobs, entropy = token_logprobs(hidden, Head(weight, bias), targets, temperature=0.7)
    ours = torch.autograd.grad((logprobs * of_logprobs + entropy * of_entropy).sum(), (hidden, weight, bias))
    everything = ((hidden @ weight.t() + bias) / 0.7).log_softmax(-1)
    plain, plain_entropy = everything.gather(1, targets[:, None])[:, 0], -(everything.exp() * everything).sum(-1)
    theirs = torch.autograd.grad((plain * of_logprobs + plain_entropy * of_entropy).sum(), (hidden, weight, bias))

    torch.testing.assert_close(logprobs, plain, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, plain_entropy, rtol=0, atol=1e-12)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_head_keeps_no_more_logits_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    plain = torch.logsumexp
    monkeypatch.setattr("fulltilt.model.heads.CHUNK_NUMBERS", 200)
    monkeypatch.setattr(torch, "logsumexp", lambda logits, dim: (sizes.append(logits.numel()), plain(logits, dim=dim))[1])
    token_logprobs(torch.randn(23, 16), Head(torch.randn(50, 16), None), torch.zeros(23, dtype=torch.int64), 1.0)
    assert max(sizes) == 200 and sum(sizes) == 23 * 50


# -- loading ----------------------------------------------------------------------------------------------------------------------------


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    models.save("llama", tmp_path)
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks weights.*up_proj"):
        load_model(ModelConfig(path=str(tmp_path)), CPU)


def test_a_folder_without_a_model_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.path"):
        load_model(ModelConfig(path=str(tmp_path)), CPU)
    with pytest.raises(UserError, match="tokenizer"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))


def test_remote_code_does_not_run_unless_asked(tmp_path: Path) -> None:
    models.save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UserError, match="trust_remote_code"):
        load_model(ModelConfig(path=str(tmp_path)), CPU)
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**models.SMALL, "vocab_size": 40}))
    with pytest.raises(UserError, match=r"97 tokens.*40 rows"):
        check_vocabulary(model, models.tokenizer())


def test_export_loads_into_transformers_without_us(tmp_path: Path, model_folders) -> None:
    model = load_model(ModelConfig(path=str(model_folders("llama-tied"))), CPU)
    export(model, models.tokenizer(), tmp_path)
    assert "fulltilt" not in (tmp_path / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    assert load_tokenizer(ModelConfig(path=str(tmp_path)))("ab").input_ids == models.tokenizer()("ab").input_ids


def test_a_generation_config_that_transformers_will_not_save_goes_out_as_it_came_in(tmp_path: Path) -> None:
    """Many published models carry a temperature without do_sample, which save_pretrained refuses."""
    models.save("llama", tmp_path / "in")
    (tmp_path / "in" / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 7]}))
    model = load_model(ModelConfig(path=str(tmp_path / "in")), CPU)
    export(model, models.tokenizer(), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written["temperature"] == 0.6 and written["eos_token_id"] == [1, 7]
    assert end_tokens(ModelConfig(path=str(tmp_path / "out")), models.tokenizer()) == {1, 7}


def test_hidden_states_feed_the_head(model_folders) -> None:
    model = load_model(ModelConfig(path=str(model_folders("qwen3"))), CPU)
    ids = torch.arange(5, 25)
    with torch.no_grad():
        hidden = hidden_states(model, ids, torch.arange(20), Packed.of([0, 20], CPU))
    assert hidden.shape == (20, 32)
