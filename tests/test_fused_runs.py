"""Whole runs with fused layers, and what a run does with graphs and with the KV cache's memory: small models on CPU, where the kernels'
references run. All that a user sees of `train.fused_layers`, `rollout.cuda_graphs` and `rollout.release_memory`."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import shutil
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_memory
import models
import plans
import pytest
import runs
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, PreTrainedModel
from variants import sample_cases

from fulltilt.cluster import sizes
from fulltilt.cluster.assembly import RunParts, assemble
from fulltilt.cluster.loading import Fusing
from fulltilt.cluster.making import take_workspaces
from fulltilt.footprint import BURST, GRAPH_BYTES, progress_bytes, sizes_up_to
from fulltilt.kernels import dispatch, sampling
from fulltilt.loop.run import Progress, Run
from fulltilt.model import fuse as fuse_file
from fulltilt.model.attention import LayerShape
from fulltilt.model.fuse import WrongLayers, check_fused, fuse_and_compare
from fulltilt.model.load import load_model
from fulltilt.model.verify import run_packed, verify
from fulltilt.observe.console import Console
from fulltilt.observe.loggers import open_loggers
from fulltilt.plan.cache import decode_bytes, pass_bytes
from fulltilt.plan.facts import Facts
from fulltilt.plan.make import make_plan
from fulltilt.records import LossSums, MiniBatch, UserError
from fulltilt.rollout import runner as runner_file
from fulltilt.rollout.collect import collect
from fulltilt.rollout.engine import EngineContext, EngineLimits
from fulltilt.rollout.engines.native import NativeEngine
from fulltilt.rollout.sampler import Sampling
from fulltilt.schema import Config, ModelConfig
from fulltilt.training.checkpoint import CheckpointStore

ModelFolders = Callable[[str], Path]
CPU = torch.device("cpu")
FUSED, PLAIN = "train.fused_layers=true", "train.fused_layers=false"
SHORT = (
    "run.eval_every=0", "run.eval_before=false", "run.steps=2", "run.save_every=1", "train.schedule=constant", "train.warmup_steps=0",
    "rollout.max_new_tokens=8", "reward.workers=1",
)  # fmt: skip
NO_REFERENCE = "algorithm.kl_coef=0.0"
# A matrix product of another shape rounds its last bits otherwise. In metrics 4e-7 is the most that was seen after a few steps of learning,
# in weights 8e-7, where AdamW divides by the root of a small second moment.
NEAR = 5e-6
ONE_OF_A_GROUP = 'lora.targets=["k_proj", "down_proj"]'


@pytest.fixture
def folder(tmp_path: Path, model_folders: ModelFolders) -> Path:
    return runs.make(tmp_path / "folder", model_folders("qwen2"))


@contextlib.contextmanager
def parts_of(folder: Path, *overrides: str) -> Iterator[tuple[Config, RunParts]]:
    config = runs.read_config(folder, *overrides)
    with contextlib.chdir(folder):
        parts = assemble(config)
        try:
            yield config, parts
        finally:
            parts.close()


# -- the same run -----------------------------------------------------------------------------------------------------------------------


def assert_near(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=NEAR, abs=NEAR), name


def lines_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return runs.without_clock([json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()])


def responses(folder: Path, name: str) -> list[str]:
    paths = sorted((folder / name / "rollouts").iterdir())
    return [json.loads(line)["response"] for path in paths for line in path.read_text().splitlines()]


RUNS = {"grpo": (), "ppo": ("algorithm.name=ppo", NO_REFERENCE), "lora": ("lora.rank=2", "train.lr=0.02", ONE_OF_A_GROUP)}


@pytest.mark.parametrize(
    "options", [pytest.param(options, marks=pytest.mark.matrix if name == "grpo" else ()) for name, options in RUNS.items()], ids=RUNS
)
def test_a_fused_run_is_the_plain_run(folder: Path, options: tuple[str, ...]) -> None:
    """The same responses; metrics and weights that differ by rounding. Rollout, old log-probs, reference, critic and update are in it."""
    for name, key in (("fused", FUSED), ("plain", PLAIN)):
        said = runs.train(folder, *SHORT, *options, key, f"run.dir={name}").said
        assert ("layers: fused: Qwen2, 2 layers" in said) == (name == "fused")
        assert ("layers: not fused: train.fused_layers is off" in said) == (name == "plain")
    for found, expected in zip(lines_of(folder, "fused"), lines_of(folder, "plain"), strict=True):
        assert_near(found, expected)
    assert responses(folder, "fused") == responses(folder, "plain")
    for file in ("trainer.safetensors", "model/model.safetensors", "model/adapter_model.safetensors"):
        paths = [folder / name / "checkpoints" / "step-00000002" / file for name in ("fused", "plain")]
        assert paths[0].exists() == paths[1].exists()
        if paths[0].exists():
            fused, plain = map(load_file, paths)
            assert fused.keys() == plain.keys()
            for name, tensor in plain.items():
                torch.testing.assert_close(fused[name], tensor, rtol=0, atol=NEAR, msg=lambda text, n=name: f"{n}: {text}")


def test_every_role_is_fused_before_anything_keeps_its_weights(folder: Path, tmp_path: Path) -> None:
    """Masters, the engine's head and the parameters of the checkpoint are the fused ones: what the optimizer changes, the engine runs."""
    judge = tmp_path / "judge"
    torch.manual_seed(4)
    AutoModelForSequenceClassification.from_config(LlamaConfig(**models.SMALL, num_labels=1)).save_pretrained(judge)
    models.tokenizer().save_pretrained(judge)
    (folder / "run.toml").write_text((folder / "run.toml").read_text().replace("workers = 1\n", ""))
    options = ("algorithm.name=ppo", "reward.function=reward_model", f"reward_model.path={judge}")
    with parts_of(folder, FUSED, *options) as (_, parts):
        assert (
            parts.worker.roles["reward_model"]
            and parts.worker.roles["critic"]
            and parts.worker.roles["ref"]
            and parts.worker.trainers["actor"]
        )
        assert "layers: fused: Llama, 2 layers, 4 joined products (reward_model); " in parts.plan.words[-1]
        assert parts.plan.words[-1].endswith("fused: Qwen2, 2 layers, 4 joined products (actor, critic, ref)")
        bodies = [
            parts.worker.actor.model,
            parts.worker.roles["ref"].model,
            parts.worker.roles["critic"].model.body,
            parts.worker.roles["reward_model"].model.body,
        ]
        assert [check_fused(body).joined for body in bodies] == [4, 4, 4, 4]
        layer = parts.worker.actor.model.base_model.layers[0].self_attn
        assert layer.q_proj.weight.untyped_storage().data_ptr() == layer.v_proj.weight.untyped_storage().data_ptr()
        optimizer = parts.worker.trainers["actor"].optimizer
        assert {id(parameter) for parameter in parts.worker.actor.model.parameters()} == {id(own) for own in optimizer._parameters.values()}
        assert not any(name.startswith("master/") for name in optimizer.tensors())
        assert isinstance(parts.worker.engine, NativeEngine) and parts.worker.engine.runner.model is parts.worker.actor.model


@pytest.mark.matrix
def test_sft_runs_fused(tmp_path: Path, model_folders: ModelFolders) -> None:
    folder = runs.make(tmp_path / "folder", model_folders("llama-tied"), runs.SFT)
    for name, key in (("fused", FUSED), ("plain", PLAIN)):
        assert "layers: " in runs.train(folder, key, f"run.dir={name}").said
    for found, expected in zip(lines_of(folder, "fused"), lines_of(folder, "plain"), strict=True):
        assert_near(found, expected)


# -- files ------------------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def own_logits(model: PreTrainedModel) -> torch.Tensor:
    model.set_attn_implementation("eager")
    return model(torch.arange(3, 60)[None]).logits


@pytest.mark.parametrize("family", sample_cases(["qwen2", "llama-tied"], "llama-tied"))
@pytest.mark.parametrize("adapters", [(), ("lora.rank=2", ONE_OF_A_GROUP, "lora.export=merged")], ids=["all", "adapters"])
def test_what_a_fused_run_saves_loads_in_transformers(
    tmp_path: Path, model_folders: ModelFolders, family: str, adapters: tuple[str, ...]
) -> None:
    folder = runs.make(tmp_path / "folder", model_folders(family))
    exported: dict[str, Path] = {}
    for name, key in (("fused", FUSED), ("plain", PLAIN)):
        with parts_of(folder, key, *adapters) as (_, parts):
            assert parts.worker.trainers["actor"]
            with torch.no_grad():
                for number, parameter in enumerate(parts.worker.trainers["actor"].optimizer._parameters.values()):
                    parameter += 0.01 * (1 + number % 5)
            exported[name] = tmp_path / name
            parts.worker.export(exported[name])
            if name == "fused":
                check_fused(parts.worker.actor.model)
    files = {name: load_file(path / "model.safetensors") for name, path in exported.items()}
    assert files["fused"].keys() == files["plain"].keys()
    assert all(torch.equal(files["fused"][name], tensor) for name, tensor in files["plain"].items())
    sizes = [(path / "model.safetensors").stat().st_size for path in exported.values()]
    assert sizes[0] == sizes[1] < sum(tensor.nbytes for tensor in files["plain"].values()) + 8192  # and a header
    fused, plain = (AutoModelForCausalLM.from_pretrained(path) for path in exported.values())
    assert torch.equal(own_logits(fused), own_logits(plain))


@pytest.mark.long
@pytest.mark.parametrize("options", [RUNS["ppo"], pytest.param(RUNS["lora"], marks=pytest.mark.matrix)], ids=["ppo", "lora"])
def test_a_fused_run_resumes_exactly(folder: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    """From the first of two checkpoints to the second, bit for bit."""
    runs.train(folder, *SHORT, FUSED, *options)
    cut = runs.copy(folder, tmp_path / "cut")
    shutil.rmtree(runs.checkpoints(cut)[2])
    assert "resuming from step 1" in runs.train(cut, *SHORT, FUSED, *options).said
    runs.assert_equal_runs(cut, folder)


@pytest.mark.long
def test_masters_of_fused_weights_are_restored(folder: Path) -> None:
    """Below float32 the checkpoint holds masters, which are no part of the fused storage."""
    options = (*SHORT, "run.steps=1", "model.dtype=bfloat16", "train.lr=0.01")
    runs.train(folder, *options, FUSED)
    (checkpoint,) = runs.checkpoints(folder).values()
    config = runs.read_config(folder, *options, FUSED)
    with contextlib.chdir(folder):
        store = CheckpointStore(Path("run") / "checkpoints", 1)
        parts = assemble(config, store.latest())
    try:
        assert parts.worker.trainers["actor"] and check_fused(parts.worker.actor.model).joined == 4
        saved, exported = load_file(checkpoint / "trainer.safetensors"), runs.parameters(checkpoint)
        assert all(torch.equal(tensor, saved[name]) for name, tensor in parts.worker.trainers["actor"].optimizer.tensors().items())
        assert any(name.startswith("master/") for name in saved)
        for name, parameter in parts.worker.actor.model.named_parameters():
            assert torch.equal(parameter, exported[name])
    finally:
        parts.close()


# -- where layers stay as they are -------------------------------------------------------------------------------------------------------


def model_of(folder: Path, dtype: str = "float32") -> PreTrainedModel:
    return load_model(ModelConfig(path=str(folder), dtype=dtype), CPU)


def fusing(value: str | bool, device: str = "cuda") -> Fusing:
    tables = {"model": {"path": "m"}, "data": {"train": "t"}, "train": {"fused_layers": value}}
    return Fusing(Config.model_validate(tables), torch.device(device))


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "triton", object())  # only asked whether it is there


def test_auto_is_for_cuda_with_triton_and_known_families(
    model_folders: ModelFolders, monkeypatch: pytest.MonkeyPatch, with_triton: None
) -> None:
    on, unknown = fusing("auto"), fusing("auto")
    on.fuse("actor", model_of(model_folders("qwen2")))
    assert on.words() == "fused: Qwen2, 2 layers, 4 joined products (actor)"
    unknown.fuse("actor", model_of(model_folders("gemma2")))
    assert unknown.words().startswith("not fused: Gemma2Model is not of a known family (Llama, Qwen2, Qwen3, Mistral)")
    assert fusing("auto", "cpu").words() == "not fused: the run is on the CPU and train.fused_layers is auto"
    monkeypatch.setattr(dispatch, "triton", None)
    assert "triton is not installed" in fusing("auto").words()
    with pytest.raises(UserError, match=r"train.fused_layers: triton is not installed"):
        fusing(True)
    plain = model_of(model_folders("qwen2"))
    fusing("auto", "cpu").fuse("actor", plain)
    fusing(False).fuse("actor", plain)
    assert check_fused(plain).left_alone == "fuse was not called"


def test_a_run_that_cannot_be_fused_though_it_must_is_refused(tmp_path: Path, model_folders: ModelFolders) -> None:
    folder = runs.make(tmp_path / "folder", model_folders("gemma2"))
    with pytest.raises(UserError, match=r"train.fused_layers: true, but the layers of the actor cannot run fused: gemma2 is not of"):
        runs.train(folder, *SHORT, FUSED)
    assert not (folder / "run").exists()
    other = runs.make(tmp_path / "other", model_folders("qwen2"))
    with parts_of(other, FUSED, f"ref.path={model_folders('gemma2')}") as (_, parts):
        assert "(actor); not fused: Gemma2Model" in parts.plan.words[-1] and parts.plan.words[-1].endswith("(ref)")


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, of_out: torch.Tensor) -> torch.Tensor:
        return 1.5 * of_out


@pytest.mark.parametrize("wrong", ["values", "gradients", "values without a gradient", "an error"])
@pytest.mark.parametrize("dtype", sample_cases(["float32", "bfloat16"], "bfloat16"))
def test_layers_that_compute_something_else_are_found_out(
    model_folders: ModelFolders, monkeypatch: pytest.MonkeyPatch, with_triton: None, wrong: str, dtype: str
) -> None:
    """Auto goes on with the model as it was, and says so; true refuses."""
    really = fuse_file.joined_product

    def broken(owner: torch.nn.Module, x: torch.Tensor) -> torch.Tensor | None:
        found = really(owner, x)
        assert found is not None
        if wrong == "an error":
            raise ValueError("no such kernel")
        if wrong == "gradients":
            return _WrongGradient.apply(found)
        return found if wrong.endswith("without a gradient") and torch.is_grad_enabled() else 1.1 * found

    monkeypatch.setattr(fuse_file, "joined_product", broken)
    model, plain = model_of(model_folders("qwen3"), dtype), model_of(model_folders("qwen3"), dtype)
    auto = fusing("auto")
    auto.fuse("actor", model)
    expected = {"gradients": "gradients of layers.", "an error": "a fused pass failed: ValueError: no such kernel"}.get(
        wrong, "hidden states"
    )
    assert auto.words().startswith(f"not fused: {expected}") and auto.words().endswith("(actor)")
    assert check_fused(model).left_alone == "fuse was not called"
    documents = fuse_file.random_documents(model)
    with torch.no_grad():
        assert torch.equal(torch.cat(run_packed(model, documents)[0]), torch.cat(run_packed(plain, documents)[0]))
    with pytest.raises(UserError, match=r"train.fused_layers: true, but the layers of the critic cannot run fused: "):
        fusing(True).fuse("critic", model.base_model)


@pytest.mark.parametrize("family", ["llama-tied", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("dtype", sample_cases(["float32", "float64", "bfloat16"], "bfloat16"))
def test_layers_that_compute_the_same_pass(model_folders: ModelFolders, family: str, dtype: str) -> None:
    model = model_of(model_folders(family), dtype)
    assert fuse_and_compare(model).joined == 4
    assert all(parameter.grad is None for parameter in model.parameters())
    body = model_of(model_folders(family), dtype).base_model.requires_grad_(False)
    assert fuse_and_compare(body).joined == 4


def test_a_failure_leaves_nothing_behind(model_folders: ModelFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(model_folders("llama"))
    monkeypatch.setattr(fuse_file, "ROUNDING", dict.fromkeys(fuse_file.ROUNDING, 0.0))
    monkeypatch.setattr(fuse_file, "gaps", lambda own, found: {name: float("nan") for name in own})
    with pytest.raises(WrongLayers, match="differ by nan"):
        fuse_and_compare(model)
    assert all(parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize(("failing", "kind"), [("ours", TypeError), ("memory", RuntimeError)])
def test_what_no_model_is_to_blame_for_is_passed_on(
    model_folders: ModelFolders, monkeypatch: pytest.MonkeyPatch, with_triton: None, failing: str, kind: type[Exception]
) -> None:
    """Told as a reason not to fuse, a bug would stay hidden for ever. `ours`: our function is called with another one's arguments."""
    replaced = fuse_file.gated if failing == "ours" else lambda *_: torch.empty(2**60)
    monkeypatch.setattr(fuse_file, "rotary", replaced)
    model = model_of(model_folders("llama"))
    with pytest.raises(kind):
        fusing("auto").fuse("actor", model)
    assert check_fused(model).left_alone == "fuse was not called"


# -- graphs and the cache ----------------------------------------------------------------------------------------------------------------


def test_graphs_on_the_cpu_are_refused_before_anything_loads(folder: Path) -> None:
    reason = "rollout.cuda_graphs: true, but this run is on the CPU, and only a CUDA device has graphs. Remove the key"
    (folder / "model").unlink()  # what is not there cannot have been loaded
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    with pytest.raises(UserError) as caught:
        runs.train(folder, *SHORT, "rollout.cuda_graphs=true")
    assert str(caught.value).startswith(reason) and not (folder / "run").exists()


def test_a_check_says_what_the_device_cannot(folder: Path) -> None:
    ended = runs.command_here(folder, "train", "run.toml", "--check", "rollout.cuda_graphs=true")
    assert ended.code == 2 and "rollout.cuda_graphs: true, but this run is on the CPU" in ended.error


def test_graphs_and_fused_layers_are_in_the_plans_words(folder: Path) -> None:
    with parts_of(folder) as (_, parts):
        assert isinstance(parts.worker.engine, NativeEngine) and parts.worker.engine.limits.cuda_graphs is False
        assert "no CUDA graphs: the run is on the CPU" in " ".join(parts.plan.words)
        assert parts.plan.words[-1] == "layers: not fused: the run is on the CPU and train.fused_layers is auto"
    config = runs.read_config(folder, "rollout.max_seqs=768")
    facts = plans.facts(free_bytes=2**34, kv_bytes_per_token=12288, decode_bytes=2**30, layers="fused")
    assert "CUDA graphs of 21 batch sizes, 1.0 GiB for decoding" in make_plan(config, facts).words[1]
    off = runs.read_config(folder, "rollout.cuda_graphs=false")
    assert "no CUDA graphs: rollout.cuda_graphs is off" in make_plan(off, facts).words[1]
    held = replace(facts, not_captured="the host counts the tokens of each expert")
    assert "no CUDA graphs: the host counts the tokens of each expert" in make_plan(config, held).words[1]
    on = runs.read_config(folder, "rollout.cuda_graphs=true", "rollout.max_seqs=768")
    assert "CUDA graphs of 21 batch sizes" in make_plan(on, facts).words[1]
    refusal = r"^rollout.cuda_graphs: true, but no graph can hold the model: the host counts the tokens of each expert. Remove the key"
    with pytest.raises(UserError, match=refusal):
        make_plan(on, held)
    make_plan(off, held)
    assert [sizes.limits(given, make_plan(given, facts).budgets, torch.device("cuda"), 500).cuda_graphs for given in (config, off)] == [
        True,
        False,
    ]


def test_the_cache_leaves_room_for_decoding_and_for_an_update_beside_it(folder: Path) -> None:
    def blocks(*overrides: str, **changes: int) -> int:
        config = runs.read_config(folder, "rollout.max_seqs=4096", "rollout.max_batched_tokens=4096", *overrides)
        return make_plan(config, plans.facts(**changes)).budgets.kv_blocks

    assert blocks() == int(0.85 * 10**9) // 16000
    of_prompts = pass_bytes(plans.facts(), 16384)
    assert of_prompts > 0.15 * 10**9 and blocks("rollout.max_batched_tokens=16384") == (10**9 - of_prompts) // 16000
    assert blocks(decode_bytes=4 * 10**8) == 51 * 10**7 // 16000
    assert blocks("rollout.release_memory=true") == blocks()
    assert blocks("rollout.release_memory=false") == 5 * 10**8 // 16000
    assert blocks("rollout.memory_fraction=0.5", decode_bytes=4 * 10**8) == 5 * 10**8 // 16000  # as it was asked for
    with pytest.raises(
        UserError, match=r"953.7 MiB free on this device, 953.7 MiB of them for decoding and [\d.]+ MiB for a pass over prompts, gives 0"
    ):
        blocks(decode_bytes=10**9)


def test_a_cache_larger_than_what_is_free_is_refused_on_cuda(folder: Path) -> None:
    facts = plans.facts(decode_bytes=4 * 10**8)

    def blocks(override: str, given: Facts = facts, kept: dict[str, int] | None = None) -> int:
        return make_plan(runs.read_config(folder, override), given, kept).budgets.kv_blocks

    fits = "rollout.kv_bytes=600_000_000"
    assert blocks(fits) == blocks("rollout.memory_fraction=0.6") == 6 * 10**8 // 16000
    beside = "and decoding needs 381.5 MiB beside it, but 953.7 MiB are free on this device. Lower it, or leave it out for auto"
    with pytest.raises(UserError, match=rf"^rollout.kv_bytes: 600016000 makes a KV cache of 572.2 MiB, {beside}"):
        blocks("rollout.kv_bytes=600_016_000")
    with pytest.raises(UserError, match=rf"^rollout.memory_fraction: 0.61 makes a KV cache of 581.7 MiB, {beside}"):
        blocks("rollout.memory_fraction=0.61")
    with pytest.raises(UserError, match=r"^rollout.memory_fraction: 0.6 makes a KV cache of 610.4 MiB"):  # that the run began with
        blocks("rollout.memory_fraction=0.6", kept={"kv_blocks": 40_000})
    on_cpu = replace(facts, device="cpu")  # where decoding is not counted beside the cache
    assert blocks("rollout.kv_bytes=900_000_000", on_cpu) == 9 * 10**8 // 16000
    with pytest.raises(UserError, match=r"^rollout.kv_bytes: 2000000000 makes a KV cache of 1.9 GiB"):
        blocks("rollout.kv_bytes=2_000_000_000", on_cpu)


def test_bytes_of_decoding(folder: Path, model_folders: ModelFolders) -> None:
    """Logits in float32 are in it on every device; workspaces and graphs on CUDA."""
    model, rows = model_of(model_folders("qwen2")), 1024
    actor = sizes.role_facts(model, learns=False)

    def taken(rows: int, device: str, graphs: str = "auto") -> int:
        config = runs.read_config(folder, f"rollout.cuda_graphs={graphs}", "rollout.max_new_tokens=100")
        return decode_bytes(config, plans.facts(device, roles={"actor": actor}, longest=100), rows)

    few, many = (taken(rows, "cpu") for rows in (16, 1024))
    assert 4 * 16 * models.VOCABULARY < few < 4 * 16 * models.VOCABULARY + 16 * 1024
    assert many == 64 * few
    on_cuda, eager = (taken(rows, "cuda", graphs) for graphs in ("auto", "false"))
    assert on_cuda - eager == 2 * len(sizes_up_to(1024)) * GRAPH_BYTES and eager > many
    assert sizes_up_to(1024)[-2:] == [960, 1024] and sizes_up_to(20) == [1, 2, 4, 8, 16, 20] and sizes_up_to(1) == [1]
    assert sizes_up_to(2000)[-5:] == [1024, 1280, 1536, 1792, 2000]


def test_what_decoding_takes_is_what_its_records_hold() -> None:
    for rows in (1, 7, 300):
        progress = sampling.DecodeProgress.make(rows, BURST, "meta")
        assert progress_bytes(rows) == sum(tensor.nbytes for tensor in vars(progress).values())


@pytest.mark.parametrize(
    ("value", "held_during_update"), sample_cases([("auto", False), ("true", False), ("false", True)], ("auto", False), ("false", True))
)
def test_the_engine_holds_the_cache_during_the_update_only_if_told_to(folder: Path, value: str, held_during_update: bool) -> None:
    with parts_of(folder, f"rollout.release_memory={value}", *SHORT) as (config, parts):
        engine, trainer = parts.worker.engine, parts.worker.trainers["actor"]
        assert isinstance(engine, NativeEngine) and trainer
        held: list[int] = []
        really_accumulate = trainer.accumulating

        def accumulating(batch: MiniBatch, passes: int = 0) -> Generator[None, None, LossSums]:
            held.append(engine.runner.held_bytes)
            return really_accumulate(batch, passes)

        trainer.accumulating = accumulating  # type: ignore[method-assign]
        said = io.StringIO()
        console = Console(stdout=said, stderr=said, terminal=False)
        store = CheckpointStore(Path("run") / "checkpoints", config.run.keep)
        run = Run(config, parts, store, Progress(), console, open_loggers(config.log, Path(config.run.dir), {}, 0))
        run.rl_step(1)
        whole = parts.plan.budgets.kv_blocks * 16 * 2 * 2 * 2 * 8 * 4  # tokens, layers, keys and values, key heads, width, bytes
        assert held == [whole if held_during_update else 0] * 2
        run.rl_step(2)
        assert held == [whole if held_during_update else 0] * 4
        assert ("the cache stays during the update" in parts.plan.words[1]) == held_during_update
    assert engine.runner.held_bytes == 0


def make_engine(folder: Path, dtype: str = "float32") -> NativeEngine:
    model = model_of(folder, dtype)
    return NativeEngine(EngineContext(model, models.tokenizer(), frozenset({1}), verify(model), EngineLimits(65, 7, 16, 64)))


def sampled(engine: NativeEngine) -> list[list[int]]:
    prompts = [gpu_memory.Prompt(uid=uid, ids=torch.arange(5, 9 + 7 * uid).numpy(), text="") for uid in range(4)]
    groups = collect(engine.generate, prompts, Sampling(samples=3, max_new_tokens=12), 3, lambda group: None)
    return [sample.ids.tolist() for group in groups for sample in group.samples]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cache_is_one_piece_that_goes_when_it_is_given_back(model_folders: ModelFolders, dtype: str) -> None:
    engine = make_engine(model_folders("llama"), dtype)
    sampled(engine)
    caches = [*engine.runner.keys, *engine.runner.values]
    assert len({cache.untyped_storage().data_ptr() for cache in caches}) == 1
    assert all(cache.is_contiguous() and cache.data_ptr() % 16 == 0 for cache in caches)
    for number, cache in enumerate(caches):
        cache.fill_(number)
    assert [float(cache.float().mean()) for cache in caches] == [0, 1, 2, 3]  # none lies in another
    gone = [weakref.ref(cache) for cache in caches]
    del caches, cache
    engine.release()  # the decoder has been handed the caches too
    gc.collect()
    assert [each() for each in gone] == [None] * 4
    odd = runner_file.Runner(engine.runner.model, {layer: LayerShape(1, 3, None) for layer in range(2)}, blocks=5, block_tokens=1)
    odd.acquire()
    assert [cache.data_ptr() % 16 for cache in (*odd.keys, *odd.values)] == [0] * 4
    assert odd.held_bytes == 60 * odd.model.dtype.itemsize


def test_what_lies_in_the_memory_does_not_matter(model_folders: ModelFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model_folders("llama"))
    expected = sampled(engine)
    engine.release()
    really = runner_file.empty
    monkeypatch.setattr(runner_file, "empty", lambda numbers, model: really(numbers, model).fill_(torch.nan))
    assert sampled(engine) == expected


def test_only_attention_that_reads_unwritten_slots_has_them_zeroed(model_folders: ModelFolders) -> None:
    """CUDA as the meta device knows it: what is asked is only where a model is and what it is made of."""

    class OnCuda:
        device = torch.device("cuda")

        def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
            self.config, self.dtype = model.config, dtype

    llama, gemma2 = model_of(model_folders("llama")), model_of(model_folders("gemma2"))
    assert runner_file.reads_unwritten(llama)
    asked = [OnCuda(llama, torch.bfloat16), OnCuda(llama, torch.float32), OnCuda(gemma2, torch.bfloat16)]
    assert [runner_file.reads_unwritten(each) for each in asked] == [False, True, True]  # type: ignore[arg-type]


def test_workspaces_are_taken_without_a_trace(folder: Path) -> None:
    with parts_of(folder, FUSED) as (_, parts):
        before = {name: parameter.detach().clone() for name, parameter in parts.worker.actor.model.named_parameters()}
        take_workspaces(parts.worker.trainers["actor"])
        assert all(
            parameter.grad is None and torch.equal(parameter, before[name])
            for name, parameter in parts.worker.actor.model.named_parameters()
        )


def test_the_measurement_of_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """The script for a GPU, on CPU with a tiny shape: what it measures there is nothing, but it does what it says."""
    settings = gpu_memory.Settings(
        shape=models.SMALL,
        rounds=2,
        kv_bytes=1 << 20,
        prompts=4,
        samples=2,
        longest_prompt=20,
        new_tokens=8,
        token_budget=256,
        device="cpu",
    )
    found = gpu_memory.measure(settings)
    rounds = found["rounds"]
    assert [entry["round"] for entry in rounds] == [1, 2] and json.loads(json.dumps(found))
    assert all(entry["cache_bytes"] == 1 << 20 and entry["cache_bytes_during_update"] == 0 for entry in rounds)
    assert rounds[0]["loss"] != rounds[1]["loss"] and rounds[0]["tokens"] == rounds[1]["tokens"] > 8
    assert all(entry["acquire_s"] > 0 and entry["first_token_s"] > entry["acquire_s"] for entry in rounds)
    assert rounds[0]["reserved_bytes"] is None and found["captures_after_the_first_round"] == 0
    capsys.readouterr()
