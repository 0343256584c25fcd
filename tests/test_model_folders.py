"""Folders of models and adapters with broken files: every one is refused in one line, with the setting, the file and what to do."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import runs
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, DiffLlamaConfig

from fulltilt.cluster.checks import wrong_models
from fulltilt.cluster.sizes import role_facts
from fulltilt.model import load, lora
from fulltilt.model.folder import read_names
from fulltilt.model.scalar import load_scalar
from fulltilt.model.verify import verify
from fulltilt.records import UserError
from fulltilt.schema import Config, LoraConfig, ModelConfig

CPU = torch.device("cpu")
PAGE = b"<!DOCTYPE html><html><body>Sign in to continue</body></html>"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each: a model, the same in several files, a reward model, an adapter."""
    place = tmp_path_factory.mktemp("folders")
    models.save("llama", place / "model")
    model = AutoModelForCausalLM.from_pretrained(place / "model")
    model.save_pretrained(place / "sharded", max_shard_size="20KB")
    judge = AutoModelForSequenceClassification.from_pretrained(place / "model", num_labels=1, pad_token_id=1)
    judge.save_pretrained(place / "judge")
    for name in ("sharded", "judge"):
        models.tokenizer().save_pretrained(place / name)
    actor = load.load_model(ModelConfig(path=str(place / "model")), CPU)
    lora.add_adapters(actor, LoraConfig(rank=2), 0)
    lora.export_adapter(actor, models.tokenizer(), place / "adapter", ModelConfig(path=str(place / "model")))
    return {name: place / name for name in ("model", "sharded", "judge", "adapter")}


@pytest.fixture
def broken(folders: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a folder in which one file has other content, or is gone."""
    counted = iter(range(10_000))

    def make(name: str, file: str, content: bytes | None) -> Path:
        folder = tmp_path / f"{name}-{next(counted)}"
        shutil.copytree(folders[name], folder, copy_function=os.link)
        (folder / file).unlink(missing_ok=True)
        if content is not None:
            (folder / file).write_bytes(content)
        return folder

    return make


def use(key: str, folder: Path, base: Path | None = None) -> None:
    """Everything that a run does with what a setting names, up to its first step."""
    given = ModelConfig(path=str(folder))
    if key == "lora.path":
        lora.add_adapters(load.load_model(ModelConfig(path=str(base)), CPU), LoraConfig(rank=2), 0, str(folder))
    elif key in ("critic.path", "reward_model.path"):
        role_facts(load_scalar(given, CPU, key=key, head="new" if key == "critic.path" else "required"), learns=False)
    else:
        load.context_limit(load.read_config(given))
        load.end_tokens(given, load.load_tokenizer(given))
        model = load.load_model(given, CPU, key=key)
        load.check_vocabulary(model, models.tokenizer())
        verify(model)
        role_facts(model, learns=True)


def checked(key: str, folder: Path) -> list[str]:
    """What --check says about it."""
    return list(wrong_models(Config.model_construct(model=ModelConfig(path=str(folder))), {key: str(folder)}))


def refusal(key: str, folder: Path, base: Path | None = None) -> str:
    with pytest.raises(UserError) as caught:
        use(key, folder, base)
    return str(caught.value)


def assert_actionable(message: str, key: str, folder: Path) -> None:
    assert message.startswith(f"{key}: "), message
    assert str(folder) in message or "config.json" in message, message
    assert "\n" not in message and len(message) < 700 + len(str(folder)), message
    assert message.count(". ") >= 1, message  # what is wrong, and a remedy


def cut(content: bytes, part: float) -> bytes:
    return content[: int(len(content) * part)]


SUBSTITUTES: dict[str, tuple[Callable[[bytes], bytes | None], str]] = {
    "page": (lambda _: PAGE, "web page"),
    "pointer": (lambda _: POINTER, "git lfs pull"),
    "empty": (lambda _: b"", "empty"),
    "binary": (lambda _: bytes(range(256)) * 4, "damaged|JSON|could not be"),
    "half": (lambda content: cut(content, 0.5), "damaged|JSON|could not be"),
    "gone": (lambda _: None, "missing|there is no"),
}
PLACES = [
    ("model.path", "model", WEIGHTS), ("model.path", "model", "config.json"), ("model.path", "model", "generation_config.json"),
    ("model.path", "model", "tokenizer.json"), ("model.path", "model", "tokenizer_config.json"), ("model.path", "sharded", INDEX),
    ("model.path", "sharded", "model-00002-of-00003.safetensors"), ("ref.path", "model", WEIGHTS), ("critic.path", "model", WEIGHTS),
    ("reward_model.path", "judge", WEIGHTS), ("lora.path", "adapter", "adapter_model.safetensors"),
    ("lora.path", "adapter", "adapter_config.json"),
]  # fmt: skip
MAY_BE_GONE = ("generation_config.json", "tokenizer_config.json")


@pytest.mark.parametrize("substitute", SUBSTITUTES)
def test_what_lies_in_place_of_a_file_is_told_by_check_before_anything_loads(substitute: str, folders, broken) -> None:
    replace, words = SUBSTITUTES[substitute]
    for key, name, file in PLACES:
        file = min(path.name for path in folders[name].glob("model-00002*")) if "-of-" in file else file
        folder = broken(name, file, replace((folders[name] / file).read_bytes()))
        if substitute == "gone" and file in MAY_BE_GONE:
            use(key, folder)
            continue
        message = refusal(key, folder, folders["model"])
        assert_actionable(message, key, folder)
        if file == "tokenizer.json" and substitute in ("binary", "half", "gone"):
            continue  # found when the tokenizer is loaded, which --check does for the data
        found = checked(key, folder)
        assert len(found) == 1 and file in found[0], (file, found)
        assert any(word in found[0] for word in words.split("|")), (file, found)


@pytest.mark.parametrize("length", [0x3C20, 0x203C, 0x3C0A])
def test_an_intact_file_whose_first_bytes_look_like_a_web_page_is_read(length: int, tmp_path: Path) -> None:
    """The length of a header may have any bytes, those of " <" among them."""
    described = b'{"weight":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    file = tmp_path / WEIGHTS
    file.write_bytes(length.to_bytes(8, "little") + described.ljust(length) + b"0")
    assert read_names(file, "model.path") == ["weight"]


def test_headers_are_compared_with_their_files(folders, broken) -> None:
    """Seeded: cut at any place, longer than the header says, with any byte of the header changed."""
    chosen = random.Random(0)
    whole = (folders["model"] / WEIGHTS).read_bytes()
    header = int.from_bytes(whole[:8], "little")
    cases = [cut(whole, chosen.random()) for _ in range(10)] + [whole + b"0" * 8, b"\xff" * 8 + whole[8:], whole[8:]]
    for _ in range(30):
        place = 8 + chosen.randrange(header)
        cases.append(whole[:place] + bytes([chosen.randrange(256)]) + whole[place + 1 :])
    for content in cases:
        folder = broken("model", WEIGHTS, content)
        for message in checked("model.path", folder) or [said for said in [tried("model.path", folder)] if said]:
            assert_actionable(message, "model.path", folder)


def tried(key: str, folder: Path) -> str | None:
    """The refusal, or None where everything works: any other exception is a failure of the test."""
    try:
        use(key, folder)
    except UserError as error:
        return str(error)
    return None


def indices() -> Iterator[tuple[str, Any]]:
    yield from {"a list": [], "no map": {}, "an empty map": {"weight_map": {}}, "a list as map": {"weight_map": ["a"]}}.items()
    for name in (3, None, ["x"], "../model/model.safetensors", "/etc/passwd", "", ".", "missing.safetensors", "config.json", "a\0b"):
        yield repr(name), {"weight_map": {"model.norm.weight": name}}


@pytest.mark.parametrize(("index"), [index for _, index in indices()], ids=[name for name, _ in indices()])
def test_an_index_of_files_may_name_only_files_of_its_folder(index: Any, broken) -> None:
    folder = broken("sharded", INDEX, json.dumps(index).encode())
    (message,) = checked("model.path", folder)
    assert_actionable(message, "model.path", folder)


VALUES = [0, -1, 3, 10**9, 10**30, 1.5, math.nan, math.inf, "abc", "", None, True, [], [1], {}, {"a": 1}]


def test_configurations_with_impossible_values_are_refused_or_run(folders, broken) -> None:
    """Seeded: a key of config.json, any value. Whatever transformers and torch make of it is a UserError, or works."""
    config = json.loads((folders["model"] / "config.json").read_text())
    chosen, refused = random.Random(1), 0
    cases = [(key, value) for key in [*config, "head_dim", "layer_types", "quantization_config", "per_layer_config"] for value in VALUES]
    for key, value in chosen.sample(cases, 60):
        folder = broken("model", "config.json", json.dumps({**config, key: value}).encode())
        found = checked("model.path", folder) or [tried("model.path", folder)]
        for message in found:
            if message is not None:
                refused += 1
                assert_actionable(message, "model.path", folder)
    assert refused > 20


SIZES = {
    "hidden_size": [0, -8, "32", None, 33, 10**30], "num_attention_heads": [0, 5, "4"], "num_hidden_layers": [0, -1, 10**6, "2"],
    "vocab_size": [0, "160", 10**30], "num_key_value_heads": [0, 3], "intermediate_size": [0, 47], "hidden_act": ["swosh", 3],
    "model_type": ["mine", None, 4, ""], "max_position_embeddings": [0, "many"], "head_dim": [0, 10**9],
}  # fmt: skip


@pytest.mark.parametrize("key", SIZES)
def test_impossible_sizes_are_refused(key: str, folders, broken) -> None:
    config = json.loads((folders["model"] / "config.json").read_text())
    for value in SIZES[key]:
        folder = broken("model", "config.json", json.dumps({**config, key: value}).encode())
        assert_actionable(refusal("model.path", folder), "model.path", folder)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_quantized_models_are_refused_before_they_are_loaded(method: str, folders, broken) -> None:
    config = json.loads((folders["model"] / "config.json").read_text())
    folder = broken("model", "config.json", json.dumps({**config, "quantization_config": {"quant_method": method, "bits": 4}}).encode())
    (message,) = checked("model.path", folder)
    assert_actionable(message, "model.path", folder)
    assert "quantized models are not supported. Give the model that it was made from" in message


@pytest.mark.parametrize("left", [None, b"{}", b'{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}'])
def test_a_folder_without_a_tokenizer_is_refused(left: bytes | None, broken) -> None:
    folder = broken("model", "tokenizer_config.json", left)
    (folder / "tokenizer.json").unlink()
    assert refusal("model.path", folder) == (
        f"model.path: {folder} has no tokenizer, or one without a vocabulary. Put the files of its tokenizer there"
    )


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_odd_end_tokens_are_refused(file: str, folders, broken) -> None:
    content = json.loads((folders["model"] / file).read_text())
    for value in ("</s>", "1", [[1]], [1, None], -1, [1, -2], 1.0, True, {"a": 1}):
        folder = broken("model", file, json.dumps({**content, "eos_token_id": value}).encode())
        (message,) = checked("model.path", folder)
        assert_actionable(message, "model.path", folder)
        assert "eos_token_id" in message and file in message
    folder = broken("model", file, json.dumps({**content, "eos_token_id": None}).encode())
    use("model.path", folder)


def test_a_model_that_could_never_end_a_response_is_refused(folders, broken) -> None:
    config = json.loads((folders["model"] / "config.json").read_text())
    folder = broken("model", "config.json", json.dumps({**config, "eos_token_id": 4000}).encode())
    (folder / "generation_config.json").unlink()
    tokenizer = models.tokenizer()
    assert load.end_tokens(ModelConfig(path=str(folder)), tokenizer) == {1}
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="end token 4000, but has 160 tokens"):
        load.end_tokens(ModelConfig(path=str(folder)), tokenizer)


@pytest.mark.parametrize("file", ["generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"])
def test_files_of_another_type_are_refused_or_harmless(file: str, broken) -> None:
    for content in ("[1, 2]", "3", "null", '"text"', "{}", '{"a": 1}', "[" * 5000):
        folder = broken("model", file, content.encode())
        for message in checked("model.path", folder) or [said for said in [tried("model.path", folder)] if said]:
            assert_actionable(message, "model.path", folder)


# -- weights ----------------------------------------------------------------------------------------------------------------------------


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("/tmp/fulltilt-test-pickle-ran",)


@pytest.mark.parametrize(
    ("key", "name", "file"), [("model.path", "model", "pytorch_model.bin"), ("lora.path", "adapter", "adapter_model.bin")]
)
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(key: str, name: str, file: str, folders, broken) -> None:
    for content in (pickle.dumps(Harmful()), b"", b"junk", PAGE):
        folder = broken(name, file, content)
        for weights in folder.glob("*.safetensors"):
            weights.unlink()
        message = refusal(key, folder, folders["model"])
        assert_actionable(message, key, folder)
    assert not Path("/tmp/fulltilt-test-pickle-ran").exists()


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_refused_by_name(number: float, folders, broken) -> None:
    places = {
        "model.path": ("model", WEIGHTS, "model.layers.1.mlp.up_proj.weight"),
        "ref.path": ("model", WEIGHTS, "model.norm.weight"),
        "critic.path": ("model", WEIGHTS, "model.embed_tokens.weight"),
        "reward_model.path": ("judge", WEIGHTS, "score.weight"),
        "lora.path": ("adapter", "adapter_model.safetensors", "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"),
    }
    for key, (name, file, tensor) in places.items():
        folder = broken(name, file, None)
        tensors = load_file(folders[name] / file)
        tensors[tensor].view(-1)[5] = number
        save_file(tensors, folder / file, metadata={"format": "pt"})
        message = refusal(key, folder, folders["model"])
        assert_actionable(message, key, folder)
        assert "NaN or infinite" in message and tensor.removeprefix("base_model.model.").removeprefix("model.").split(".lora")[0] in message


def test_weights_of_another_shape_are_refused_by_name(folders, broken, capfd: pytest.CaptureFixture[str]) -> None:
    tensors = load_file(folders["model"] / WEIGHTS)
    for changed, words in {"up_proj": "up_proj.weight ([7, 32], not [48, 32])", "norm": "norm.weight"}.items():
        folder = broken("model", WEIGHTS, None)
        others = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight" or changed != "norm"}
        if changed == "up_proj":
            others["model.layers.1.mlp.up_proj.weight"] = torch.zeros(7, 32)
        save_file(others, folder / WEIGHTS, metadata={"format": "pt"})
        for key in ("model.path", "critic.path"):
            message = refusal(key, folder)
            assert_actionable(message, key, folder)
            assert words in message
    printed = capfd.readouterr()
    assert printed.out == printed.err == ""  # transformers' own report is not shown


# -- what says nothing about the folder -------------------------------------------------------------------------------------------------


def test_a_mistake_of_this_package_and_a_lack_of_memory_are_not_told_as_those_of_the_folder(folders, monkeypatch) -> None:
    given, adapter = ModelConfig(path=str(folders["model"])), str(folders["adapter"])
    actor = load.load_model(given, CPU)
    reads: dict[str, Callable[[], object]] = {
        "transformers.AutoConfig.from_pretrained": lambda: load.read_config(given),
        "transformers.AutoTokenizer.from_pretrained": lambda: load.load_tokenizer(given),
        "transformers.AutoModelForCausalLM.from_pretrained": lambda: load.load_model(given, CPU),
        "peft.PeftConfig.from_pretrained": lambda: lora.stored_settings(actor, adapter),
        "peft.load_peft_weights": lambda: lora.read_adapter(actor, adapter),
    }
    for reader, read in reads.items():
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
            patch.setattr(reader, lambda *_, **__: torch.empty(2**60))
            read()
    monkeypatch.setattr(load, "origin", None)
    with pytest.raises(TypeError, match="not callable"):
        load.read_config(given)


# -- as a user sees it ------------------------------------------------------------------------------------------------------------------


def only_error(ended: runs.Ended) -> str:
    (line,) = [line for line in ended.error.splitlines() if not line.startswith("loading ")]
    assert ended.code == 2
    return line


def test_check_names_every_broken_folder_at_once_and_train_and_eval_refuse_them(folders, broken, tmp_path: Path) -> None:
    """Without loading weights, for every role; and mistakes in other parts are still found."""
    run = runs.make(tmp_path / "run", broken("model", "generation_config.json", b"[]"))
    judge, critic = broken("judge", WEIGHTS, POINTER), broken("model", WEIGHTS, b"")
    adapter = broken("adapter", "adapter_config.json", PAGE)
    others = ("algorithm.name=ppo", "algorithm.kl_coef=0", f"critic.path={critic}", "lora.rank=2", f"lora.path={adapter}")
    scored = ('reward.function={"reward.py:nowhere" = 1.0, reward_model = 1.0}', f"reward_model.path={judge}")
    checked = runs.command_here(run, "train", "run.toml", "--check", *others, *scored)
    assert checked.code == 2
    for words in ("model.path: model/generation_config.json", "critic.path:", "reward_model.path:", "lora.path:", "reward.py:nowhere"):
        assert words in checked.error, checked.error
    for command in ("train", "eval"):
        ended = runs.command_here(run, command, "run.toml")
        assert only_error(ended).startswith("error: model.path: model/generation_config.json: it holds a JSON list, not an object")


def test_eval_refuses_what_its_cache_cannot_hold(tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(DiffLlamaConfig(**models.SMALL)).save_pretrained(tmp_path / "model")
    models.tokenizer().save_pretrained(tmp_path / "model")
    run = runs.make(tmp_path / "run", tmp_path / "model")
    for command in ("train", "eval"):
        ended = runs.command_here(run, command, "run.toml")
        assert "several times under the same layer index" in only_error(ended)
    ended = runs.command_here(run, "eval", "run.toml", "rollout.engine=hf", "rollout.max_new_tokens=4")
    assert ended.code == 0, ended.error
