"""Loading, the attention function, the head, and the checks that every model passes before a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import models
import numpy as np
import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    BloomConfig,
    DeepseekV32Config,
    DiffLlamaConfig,
    FalconConfig,
    Gemma3TextConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    HyperCLOVAXConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MiniMaxM3VLTextConfig,
    MistralConfig,
    MptConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
)
from variants import sample_cases

from fulltilt.model import attention
from fulltilt.model.attention import Packed, Scoring, UnsupportedModel
from fulltilt.model.forward import hidden_states
from fulltilt.model.heads import Head, LogitShape, token_logprobs
from fulltilt.model.load import check_model, check_vocabulary, end_tokens, export, load_model, load_tokenizer
from fulltilt.model.verify import decoded_logprobs, packed_hidden, packed_logprobs, random_documents, run_packed, verify
from fulltilt.records import UserError
from fulltilt.schema import ModelConfig

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", models.FAMILIES)
def test_packed_log_probs_are_transformers_own(family: str, model_folders) -> None:
    """Against the model as transformers runs it, one document at a time, with lengths beyond every window."""
    ours, theirs = load_model(ModelConfig(path=str(model_folders(family))), CPU), models.reference(model_folders(family))
    documents = ragged_documents()
    with torch.no_grad():
        packed, seen = packed_logprobs(ours, documents)
        for document, found in zip(documents, packed, strict=True):
            logits = theirs(torch.from_numpy(document)[None]).logits[0].log_softmax(-1)
            expected = logits[:-1].gather(1, torch.from_numpy(document)[1:, None])[:, 0]
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert seen == verify(ours) and sorted(seen) == [0, 1]


def ragged_documents() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, models.VOCABULARY, length) for length in (40, 3, 25, 40, 1, 64)]


# These multiply by their norms' weights in float32 whatever the model's type, so the sum over tokens is rounded in the order of the pack.
FLOAT32_NORMS = ("gemma2", "gemma3", "cohere")


@pytest.mark.parametrize("family", models.FAMILIES)
def test_packed_gradient_is_transformers_own(family: str, model_folders) -> None:
    """float64, log-probs and entropy, against plain transformers one document at a time without a chunked head."""
    ours = load_model(ModelConfig(path=str(model_folders(family)), dtype="float64"), CPU)
    theirs = models.reference(model_folders(family), torch.float64)
    documents = ragged_documents()
    hidden, _ = run_packed(ours, documents)
    for document, states in zip(documents, hidden, strict=True):
        logprobs, entropy = token_logprobs(states[:-1], Head.of(ours), torch.from_numpy(document[1:]), 0.7)
        (logprobs.sum() + 0.3 * entropy.sum()).backward(retain_graph=True)
    for document in documents:
        everything = (theirs(torch.from_numpy(document)[None]).logits[0, :-1] / 0.7).log_softmax(-1)
        picked = everything.gather(1, torch.from_numpy(document)[1:, None]).sum()
        (picked - 0.3 * (everything.exp() * everything).sum()).backward()
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        allowed = 1e-5 if family in FLOAT32_NORMS and "norm" in name else 1e-9
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=0, atol=allowed, msg=lambda text, name=name: f"{name}: {text}")
    assert all(parameter.grad.abs().max() > 1e-3 for parameter in ours.parameters())


FEATURES = [
    ("mistral", {"sliding_window": None}),
    ("phi3", {"sliding_window": None}),
    ("mixtral", {"sliding_window": None}),
    ("mixtral", {"num_experts_per_tok": 1}),
    ("qwen3-moe", {"num_experts_per_tok": 1}),
    ("smollm3", {"no_rope_layers": [1, 1]}),
    ("smollm3", {"layer_types": ["full_attention", "full_attention"]}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"final_logit_softcapping": None}),
    ("gemma2", {"query_pre_attn_scalar": 8}),
    ("gemma2", {"layer_types": ["full_attention", "full_attention"]}),
    ("gemma3", {"layer_types": ["full_attention", "full_attention"]}),
    ("gemma3", {"query_pre_attn_scalar": 8}),
    (
        "gemma3",
        {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e6} for kind in ("full_attention", "sliding_attention")}},
    ),
    ("granite", {"logits_scaling": 1.0}),
    ("granite", {"residual_multiplier": 1.0}),
    ("granite", {"attention_multiplier": 8**-0.5}),
    ("cohere", {"logit_scale": 1.0}),
]


@pytest.mark.parametrize(("family", "changes"), FEATURES, ids=[f"{family}-{next(iter(changes))}" for family, changes in FEATURES])
def test_what_sets_a_family_apart_shows_in_its_log_probs(family: str, changes: dict, model_folders, tmp_path: Path) -> None:
    """Otherwise the comparison with transformers could not fail."""
    folder = shutil.copytree(model_folders(family), tmp_path / family)
    config = json.loads((folder / "config.json").read_text())
    assert set(changes) <= set(config)
    (folder / "config.json").write_text(json.dumps(config | changes))
    with torch.no_grad():
        (with_it, without), _ = zip(
            *(
                packed_logprobs(load_model(ModelConfig(path=str(path)), CPU), ragged_documents())
                for path in (model_folders(family), folder)
            ),
            strict=True,
        )
    assert max(float((a - b).abs().max()) for a, b in zip(with_it, without, strict=True) if len(a)) > 1e-2


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
def test_experts_treat_every_token_alone(family: str, model_folders) -> None:
    model = load_model(ModelConfig(path=str(model_folders(family))), CPU)
    assert model.config._experts_implementation == "fulltilt"
    documents = ragged_documents()
    changed = [documents[0][::-1].copy(), *documents[1:]]
    with torch.no_grad():
        before, after = packed_logprobs(model, documents)[0], packed_logprobs(model, changed)[0]
    assert (before[0] - after[0]).abs().max() > 1e-2
    torch.testing.assert_close(before[1:], after[1:], rtol=0, atol=2e-6)  # groups of other sizes may round otherwise
    assert load_model(ModelConfig(path=str(model_folders(family)), dtype="float64"), CPU).config._experts_implementation == "fulltilt"


# -- bodies -----------------------------------------------------------------------------------------------------------------------------


def load_body(folder: Path) -> torch.nn.Module:
    return AutoModel.from_pretrained(folder, attn_implementation=attention.register()).eval()


@pytest.mark.parametrize("family", sample_cases(models.FAMILIES, "llama-tied", "qwen2", "phi3", "gemma2", "qwen3-moe"))
def test_a_body_without_a_head_passes_and_its_hidden_states_are_transformers_own(family: str, model_folders) -> None:
    body, theirs = load_body(model_folders(family)), models.reference(model_folders(family)).base_model
    assert verify(body) == verify(load_model(ModelConfig(path=str(model_folders(family))), CPU))
    with torch.no_grad():
        for document, found in zip(ragged_documents(), packed_hidden(body, ragged_documents())[0], strict=True):
            expected = theirs(torch.from_numpy(document)[None]).last_hidden_state[0]
            torch.testing.assert_close(found, expected / expected.abs().mean(), rtol=0, atol=2e-5)


def test_a_body_that_mixes_documents_or_goes_around_us_is_refused(model_folders, monkeypatch: pytest.MonkeyPatch) -> None:
    body = load_body(model_folders("gemma2"))
    whole = Packed.of
    with monkeypatch.context() as patch, pytest.raises(UnsupportedModel, match=r"Gemma2Model.*hidden states.*documents mix"):
        patch.setattr(Packed, "of", staticmethod(lambda bounds, device: whole([bounds[0], bounds[-1]], device)))
        verify(body)
    body.layers[0].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states * 0.5, None)
    with pytest.raises(UnsupportedModel, match="1 of 2 layers did not go through"):
        verify(body)


# -- refusals ---------------------------------------------------------------------------------------------------------------------------


def refused(config, tmp_path: Path) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel) as caught:
        verify(load_model(ModelConfig(path=str(tmp_path)), CPU))
    return str(caught.value)


def test_sinks_and_heads_that_are_not_known_are_refused_by_name(tmp_path: Path) -> None:
    """HyperCLOVA X multiplies by the number that Granite divides by: the configuration alone would mislead."""
    gpt_oss = GptOssConfig(**models.SMALL, head_dim=8, num_local_experts=2, num_experts_per_tok=1)
    assert "sinks" in refused(gpt_oss, tmp_path / "gptoss")
    message = refused(HyperCLOVAXConfig(**models.SMALL, logits_scaling=1.2), tmp_path / "hyperclovax")
    assert "HyperCLOVAXForCausalLM" in message and "own logits" in message


def test_what_short_documents_hide_is_refused(tmp_path: Path) -> None:
    """Frequencies that depend on the longest position of a pass, and windows that a model applies only through its own mask."""
    dynamic = LlamaConfig(**models.SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0})
    assert "dynamic" in refused(dynamic, tmp_path / "dynamic")
    plain = {"rope_type": "default", "rope_theta": 1e4}
    one_kind = {"sliding_attention": plain, "full_attention": plain | {"rope_type": "dynamic", "factor": 2.0}}
    assert "dynamic" in refused(Gemma3TextConfig(**models.GEMMA, rope_parameters=one_kind), tmp_path / "one kind of layer")
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    phi3 = Phi3Config(**models.SMALL, rope_parameters=longrope, original_max_position_embeddings=128)
    assert "longrope" in refused(phi3, tmp_path / "longrope")
    moe = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    windowed = Qwen2MoeConfig(**models.SMALL, **moe, use_sliding_window=True, sliding_window=8, layer_types=["sliding_attention"] * 2)
    assert "window" in refused(windowed, tmp_path / "windowed")


def test_a_kind_of_layer_that_is_not_known_is_refused(model_folders) -> None:
    model = load_model(ModelConfig(path=str(model_folders("llama"))), CPU)
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(UnsupportedModel, match=r"layer 1 is of type chunked_attention"):
        verify(model)


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


@pytest.mark.parametrize(
    "config",
    [
        FalconConfig(
            vocab_size=160, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=False, new_decoder_architecture=False
        ),
        BloomConfig(vocab_size=160, hidden_size=32, n_layer=2, n_head=4),
        MptConfig(vocab_size=160, d_model=32, n_layers=2, n_heads=4),
    ],
    ids=lambda config: config.model_type,
)
def test_a_model_that_does_not_call_the_interface_is_refused(config: PreTrainedConfig, tmp_path: Path) -> None:
    assert config.model_type in refused(config, tmp_path).lower()


def test_numbers_that_are_not_finite_are_not_told_as_mixing(model_folders) -> None:
    """Its weights are finite; a configuration with a negative eps does this."""
    model = load_model(ModelConfig(path=str(model_folders("llama"))), CPU)
    model.model.norm.variance_epsilon = -1e9
    with pytest.raises(UnsupportedModel, match=r"log-probs are not finite, although its weights are: a number in its config\.json"):
        verify(model)


def test_a_layer_that_goes_around_us_is_found(model_folders) -> None:
    model = load_model(ModelConfig(path=str(model_folders("llama"))), CPU)
    layer = model.model.layers[1].self_attn
    layer.forward = lambda hidden_states, **kwargs: (hidden_states * 0.5, None)
    with pytest.raises(UnsupportedModel, match="1 of 2 layers did not go through"):
        verify(model)


def differential(tmp_path: Path) -> PreTrainedModel:
    """Attends twice in each layer."""
    AutoModelForCausalLM.from_config(DiffLlamaConfig(**models.SMALL)).save_pretrained(tmp_path)
    return load_model(ModelConfig(path=str(tmp_path)), CPU)


def looped(tmp_path: Path) -> PreTrainedModel:
    """Runs each layer twice."""
    model = load_model(ModelConfig(path=str(models.save("llama", tmp_path))), CPU)
    for layer in model.model.layers:
        once = layer.forward
        layer.forward = lambda hidden, once=once, **options: once(once(hidden, **options), **options)
    return model


@pytest.mark.parametrize("make", [differential, looped])
def test_attention_called_twice_under_one_index_is_refused_where_the_cache_would_be_overwritten(make, tmp_path: Path) -> None:
    """Training computes such a model rightly; a cache by index does not."""
    torch.manual_seed(0)
    model = make(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"several times under the same layer index \(0, 1\)") as caught:
        verify(model)
    assert str(caught.value).startswith(f"model.path: {tmp_path}") and "\n" not in str(caught.value)
    seen, documents = verify(model, decodes=False), random_documents(model)
    with torch.no_grad():
        whole, decoded = packed_logprobs(model, documents)[0], decoded_logprobs(model, documents, seen)
    assert max(float((one[-4:] - other).abs().max()) for one, other in zip(whole, decoded, strict=True)) > 0.1


@pytest.mark.parametrize("family", sample_cases(models.FAMILIES, "llama-tied", "qwen2", "phi3", "gemma2", "qwen3-moe"))
def test_decoding_that_differs_from_training_is_refused(family: str, model_folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break it for real: decoded tokens do not enter the cache."""
    model = load_model(ModelConfig(path=str(model_folders(family))), CPU)
    decode = attention.decode_bunches

    def forgetful(q, k, v, *rest):
        return decode(q, k * 0, v * 0, *rest)

    monkeypatch.setattr(attention, "decode_bunches", forgetful)
    with pytest.raises(UnsupportedModel, match=r"decoding one token at a time .* differ by"):
        verify(model)


REFUSALS = {
    "sinks": (GptOssConfig(**models.SMALL, head_dim=8, num_local_experts=2, num_experts_per_tok=1), "attention sinks"),
    "chunks": (Llama4TextConfig(**models.SMALL, head_dim=8, num_local_experts=2, intermediate_size_mlp=32), "chunked_attention"),
    "sparse": (
        DeepseekV32Config(
            **models.SMALL | {"num_key_value_heads": 4}, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
            topk_group=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
        ),
        "deepseek_sparse_attention",
    ),
    "sparse GLM": (
        GlmMoeDsaConfig(
            **models.SMALL | {"num_key_value_heads": 4}, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
            topk_group=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
            index_n_heads=2, index_head_dim=16, index_topk=4,
        ),
        "deepseek_sparse_attention",
    ),
    "sparse MiniMax": (
        MiniMaxM3VLTextConfig(
            **models.SMALL, head_dim=8, num_local_experts=2, num_experts_per_tok=1, dense_intermediate_size=32, shared_intermediate_size=16,
            rotary_dim=8, index_n_heads=2, index_head_dim=8, layer_types=["full_attention", "minimax_m3_sparse"],
        ),
        "minimax_m3_sparse",
    ),
    "more layers": (
        BartConfig(
            vocab_size=160, d_model=32, encoder_layers=1, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48,
            max_position_embeddings=128, is_decoder=True, is_encoder_decoder=False,
        ),
        "1 layer by its configuration, but attention was called for layer 1 too",
    ),
    "not causal": (BertConfig(**models.SMALL, is_decoder=False), "not causal"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "reason"), REFUSALS.values(), ids=REFUSALS)
def test_refusals_are_one_line_with_setting_reason_and_remedy(config, reason: str, tmp_path: Path) -> None:
    message = refused(config, tmp_path)
    assert reason in message and message.startswith(f"model.path: {tmp_path}") and "docs/models.md" in message
    assert "\n" not in message and "tensor(" not in message and "TypeError" not in message and len(message) < 400


def test_a_model_that_reads_more_than_text_is_refused_before_it_loads(tmp_path: Path) -> None:
    sight = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "image_size": 16}
    config = LlavaConfig(text_config=LlamaConfig(**models.SMALL), vision_config={**sight, "num_attention_heads": 4, "patch_size": 8})
    LlavaForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"model of the type llava, which reads more than text") as caught:
        check_model(ModelConfig(path=str(tmp_path)), str(tmp_path), "ref.path")
    assert str(caught.value).startswith(f"ref.path: {tmp_path}") and "Config" not in str(caught.value) and "\n" not in str(caught.value)


def test_documents_that_mix_are_found(model_folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the separation for real: treat the whole stream as one document."""
    model = load_model(ModelConfig(path=str(model_folders("llama"))), CPU)
    whole = Packed.of
    monkeypatch.setattr(Packed, "of", staticmethod(lambda bounds, device: whole([bounds[0], bounds[-1]], device)))
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM.*documents mix"):
        verify(model)


def fail(error: Exception) -> None:
    raise error


def test_only_what_the_code_of_the_model_does_is_told_as_its_mistake(model_folders, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(ModelConfig(path=str(model_folders("llama"))), CPU)
    for ours in ("fulltilt.model.attention.packed", "fulltilt.model.attention.decode_batch", "fulltilt.model.heads.rows_at_once"):
        with monkeypatch.context() as patch, pytest.raises(TypeError, match="not callable"):
            patch.setattr(ours, None)
            verify(model)
    norm = model.model.norm
    for theirs in (lambda hidden: fail(AttributeError("no mask")), lambda hidden, mask: hidden):
        with monkeypatch.context() as patch, pytest.raises(UnsupportedModel, match=r"its code does not run.*(no mask|'mask')"):
            patch.setattr(norm, "forward", theirs)
            verify(model)
    with monkeypatch.context() as patch, pytest.raises(UnsupportedModel, match=r"its code does not run.*unexpected keyword"):
        patch.setattr(model.model, "forward", lambda input_ids: input_ids)
        verify(model)
    monkeypatch.setattr(norm, "forward", lambda hidden: torch.empty(2**60))
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        verify(model)


class Anyone(torch.nn.Module):
    layer_idx, is_causal = 0, True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
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


@pytest.mark.parametrize("softcap", [None, 1.1])
def test_scaling_window_and_soft_cap_are_honoured(softcap: float | None) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    features = {"scaling": 0.7, "sliding_window": 3, "softcap": softcap}
    out = attention.attention(Anyone(), q, k, v, None, **features, fulltilt=Packed.of([0, 9], CPU))[0]
    for t in range(9):
        for head in range(4):
            visible = range(max(0, t - 2), t + 1)
            scores = torch.stack([(q[0, head, t] @ k[0, head // 2, s]) * 0.7 for s in visible])
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            expected = sum(p * v[0, head // 2, s] for p, s in zip(scores.softmax(0), visible, strict=True))
            torch.testing.assert_close(out[0, t, head], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("limit", [1, 100, 300, 1 << 26])
def test_capped_scores_exist_in_pieces_forward_and_backward(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three documents of seven tokens under four heads: pieces of one query, of some queries, of one document, of all."""
    monkeypatch.setattr(attention, "SCORE_NUMBERS", limit)
    sizes: list[int] = []
    plain = torch.tanh
    monkeypatch.setattr(torch, "tanh", lambda scores: (sizes.append(scores.numel()), plain(scores))[1])
    torch.manual_seed(0)
    states = tuple(torch.randn(3, 4, 7, 5, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = attention.causal_mask(7, 7, 4, CPU)
    scoring = Scoring(scale=0.9, window=4, softcap=1.3)
    out = attention.attend(*states, mask, scoring)
    ours = torch.autograd.grad(out.square().sum(), states)
    assert max(sizes) <= max(limit, 4 * 7) and sum(sizes) == 2 * 3 * 4 * 7 * 7  # each score once in either pass

    q, k, v = states
    scores = 1.3 * plain(q @ k.transpose(-1, -2) * 0.9 / 1.3)
    expected = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    for a, b in zip(ours, torch.autograd.grad(expected.square().sum(), states), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


# -- head -------------------------------------------------------------------------------------------------------------------------------


SHAPES = [LogitShape(), LogitShape(scale=0.4), LogitShape(cap=1.5), LogitShape(scale=2.0, cap=1.5)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("chunk", [1, 7 * 50, 1 << 26])
def test_head_equals_plain_softmax_forward_and_backward(chunk: int, shape: LogitShape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fulltilt.footprint.CHUNK_NUMBERS", chunk)
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((23, 16), (50, 16), (50,)))
    targets = torch.randint(0, 50, (23,))
    of_logprobs, of_entropy = torch.randn(23, dtype=torch.float64), torch.randn(23, dtype=torch.float64)

    logprobs, entropy = token_logprobs(hidden, Head(weight, bias, shape), targets, temperature=0.7)
    ours = torch.autograd.grad((logprobs * of_logprobs + entropy * of_entropy).sum(), (hidden, weight, bias))
    logits = (hidden @ weight.t() + bias) * shape.scale
    logits = logits if shape.cap is None else shape.cap * torch.tanh(logits / shape.cap)
    everything = (logits / 0.7).log_softmax(-1)
    plain, plain_entropy = everything.gather(1, targets[:, None])[:, 0], -(everything.exp() * everything).sum(-1)
    theirs = torch.autograd.grad((plain * of_logprobs + plain_entropy * of_entropy).sum(), (hidden, weight, bias))

    torch.testing.assert_close(logprobs, plain, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, plain_entropy, rtol=0, atol=1e-12)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_head_gradient_is_that_of_its_values(shape: LogitShape) -> None:
    torch.manual_seed(0)
    tensors = tuple(torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((5, 4), (11, 4), (11,)))
    targets = torch.randint(0, 11, (5,))
    assert torch.autograd.gradcheck(
        lambda hidden, weight, bias: token_logprobs(hidden, Head(weight, bias, shape), targets, 0.7), tensors, atol=1e-7, rtol=1e-6
    )


def test_head_keeps_no_more_logits_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    plain = torch.logsumexp
    monkeypatch.setattr("fulltilt.footprint.CHUNK_NUMBERS", 200)
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


@pytest.mark.parametrize("family", models.FAMILIES)
def test_export_loads_into_transformers_without_us(family: str, tmp_path: Path, model_folders) -> None:
    model = load_model(ModelConfig(path=str(model_folders(family))), CPU)
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


@pytest.mark.parametrize(("dtype", "factor"), [("bfloat16", 10), ("float32", 1000)])
def test_large_logits_are_no_reason_to_refuse(dtype: str, factor: float, model_folders) -> None:
    """transformers rounds logits to the model's type: at a size of 40, as trained models have them, bfloat16 alone moves log-probs by 0.1.
    Training that went wrong leaves larger ones still, and what is left must load to be looked at."""
    model = load_model(ModelConfig(path=str(model_folders("qwen2")), dtype=dtype), CPU)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(factor)
    assert set(verify(model)) == set(range(model.config.num_hidden_layers))
