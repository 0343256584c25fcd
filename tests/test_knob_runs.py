"""Whole runs with each knob of the update: the same responses, metrics and weights as without it, all four roles at work. On CPU, where
offload copies within main memory once it is not refused. And that every setting reaches the role it is for."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import pytest
import runs
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, LlamaConfig

from fulltilt.cluster import loading
from fulltilt.cluster.assembly import RunParts, assemble
from fulltilt.cluster.checks import find_mistakes
from fulltilt.footprint import HeadOptions
from fulltilt.memory.activations import PAGE, OffloadedForward
from fulltilt.memory.offload import OffloadSetting, absent
from fulltilt.memory.recompute import UnitForward
from fulltilt.model import compiled
from fulltilt.model.lora import without_adapters
from fulltilt.plan import legal
from fulltilt.plan.legal import why_not_offloaded
from fulltilt.records import UserError

ModelFolders = Callable[[str], Path]
SHORT = (
    "run.eval_every=0", "run.eval_before=false", "run.steps=2", "run.save_every=1", "train.schedule=constant", "train.warmup_steps=0",
    "rollout.max_new_tokens=8",
)  # fmt: skip
# How passes were cut and filled up, which is what some knobs are for.
EXECUTION = ("/micro_batches", "/pad_tokens", "/forward_pad_tokens")
# Other chunks and pads sum in another order; AdamW divides by the root of a small second moment.
NEAR = 5e-6
ROLES = ("algorithm.name=ppo", "algorithm.entropy_coef=0.01", "reward.function=reward_model", "reward_model.path=judge")
NOT_ON_CPU = "the run is on the CPU: its memory is the host's already"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model_folders: ModelFolders) -> Path:
    """Actor, reference, critic and reward model."""
    made = runs.make(tmp_path_factory.mktemp("knobs") / "folder", model_folders("qwen2"))
    torch.manual_seed(4)
    AutoModelForSequenceClassification.from_config(LlamaConfig(**models.SMALL, num_labels=1)).save_pretrained(made / "judge")
    models.tokenizer().save_pretrained(made / "judge")
    (made / "run.toml").write_text((made / "run.toml").read_text().replace("workers = 1\n", ""))
    return made


@dataclass(frozen=True)
class Left:
    """What a run leaves, its clock aside."""

    lines: list[dict[str, Any]]
    responses: list[str]
    tensors: dict[str, torch.Tensor]
    said: str


def train(folder: Path, name: str, *options: str) -> Left:
    said = runs.train(folder, *SHORT, *options, f"run.dir={name}").said
    where = folder / name
    lines = runs.without_clock([json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()])
    files = sorted((where / "rollouts").glob("*")) if (where / "rollouts").exists() else []
    responses = [json.loads(line)["response"] for path in files for line in path.read_text().splitlines()]
    return Left(lines, responses, load_file(where / "checkpoints" / "step-00000002" / "trainer.safetensors"), said)


def assert_same(found: Left, expected: Left) -> None:
    assert found.responses == expected.responses
    for line, other in zip(found.lines, expected.lines, strict=True):
        assert line.keys() == other.keys()
        for name, value in other.items():
            assert name.endswith(EXECUTION) or line[name] == pytest.approx(value, rel=NEAR, abs=NEAR), name
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        torch.testing.assert_close(found.tensors[name], tensor, rtol=0, atol=NEAR, msg=lambda text, n=name: f"{n}: {text}")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Left:
    return train(folder, "plain", *ROLES)


@pytest.fixture(scope="module")
def padded(folder: Path) -> Left:
    return train(folder, "padded", *ROLES, "train.packing=false")


@pytest.fixture
def offload_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a CPU had a second memory; all else is what it is. Files are read into memory of its own, which can be given back: without a
    device to copy to, parameters would be the file's pages."""
    monkeypatch.setattr(legal, "why_not_offloaded", lambda key, role, device, **other: why_not_offloaded(key, role, "cuda", **other))
    monkeypatch.setattr(loading.load, "load_model", in_own_memory(loading.load.load_model))
    monkeypatch.setattr(loading, "load_scalar", in_own_memory(loading.load_scalar))


def in_own_memory(load: Callable[..., Any]) -> Callable[..., Any]:
    def loaded(*args: Any, **kwargs: Any) -> Any:
        model = load(*args, **kwargs)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        return model

    return loaded


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")


# Several settings at once: a run that any of them changes is not the run without them. Each alone, as `KNOBS` has them, runs in
# make check-all.
MANY_KNOBS = {
    "samples padded for one role, whole logits, recompute of some layers": (
        "train.packing=false", "critic.packing=true", "reward_model.packing=true", "train.fused_head=false", "train.entropy_chunk=3",
        "train.entropy_recompute=false", "train.recompute=selective", "train.recompute_layers=1", "critic.recompute=full",
        *(f"{role}.{key}" for role in ("actor", "critic", "ref", "reward_model") for key in ("dynamic_batch=false", "micro_batch=3")),
    ),
    "chunks, kept logits, budgets, recompute of layers together": (
        "train.entropy_chunk=3", "train.entropy_recompute=false", "ref.entropy_chunk=2", "train.head_recompute=false",
        "train.recompute=full", "train.recompute_layers=2", "train.recompute_method=uniform",
        "actor.token_budget=40", "actor.forward_token_budget=50", "critic.token_budget=60", "critic.forward_token_budget=30",
        "ref.forward_token_budget=35", "reward_model.forward_token_budget=45",
    ),
}  # fmt: skip
KNOBS = {
    "packing": ("train.packing=false",),
    "packing of one role": ("train.packing=false", "critic.packing=true", "reward_model.packing=true"),
    "recompute": ("train.recompute=full",),
    "recompute of some layers": ("train.recompute=selective", "train.recompute_layers=1", "critic.recompute=full"),
    "recompute of layers together": ("train.recompute=full", "train.recompute_layers=2", "train.recompute_method=uniform"),
    "whole logits": ("train.fused_head=false", "train.entropy_chunk=3"),
    "whole logits, kept": ("train.fused_head=false", "train.entropy_recompute=false"),
    "chunks": ("train.entropy_chunk=3", "train.entropy_recompute=false", "ref.entropy_chunk=2"),
    "kept logits": ("train.head_recompute=false", "train.entropy_chunk=3"),
    "fixed micro-batches": tuple(
        f"{role}.{key}" for role in ("actor", "critic", "ref", "reward_model") for key in ("dynamic_batch=false", "micro_batch=3")
    ),
    "budgets": (
        "actor.token_budget=40", "actor.forward_token_budget=50", "critic.token_budget=60", "critic.forward_token_budget=30",
        "ref.forward_token_budget=35", "reward_model.forward_token_budget=45",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "options", [pytest.param(options, id=name, marks=() if name == "budgets" else pytest.mark.long) for name, options in MANY_KNOBS.items()]
)
def test_a_run_with_many_knobs_is_the_run_without(
    folder: Path, plain: Left, options: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    assert_same(train(folder, request.node.callspec.id.replace(" ", "-"), *ROLES, *options), plain)


def test_padded_samples_train_as_packed_ones(plain: Left, padded: Left) -> None:
    assert_same(padded, plain)


@pytest.mark.long
@pytest.mark.parametrize("options", KNOBS.values(), ids=KNOBS)
@pytest.mark.matrix
def test_a_run_with_a_knob_is_the_run_without(folder: Path, plain: Left, options: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    assert_same(train(folder, request.node.callspec.id.replace(" ", "-"), *ROLES, *options), plain)


OFFLOADS = {
    "activations": ("train.offload_activations=true",),
    "optimizer and gradients": ("train.offload_optimizer=true", "train.offload_grads=true"),
    "parameters": ("train.offload_params=true", "ref.offload_params=true", "reward_model.offload_params=true"),
    "of one role": ("critic.offload_params=true", "critic.offload_optimizer=true", "critic.offload_activations=true"),
    "all": (
        *(f"train.offload_{kind}=true" for kind in ("activations", "params", "optimizer", "grads")), "ref.offload_params=true",
        "reward_model.offload_params=true", "train.recompute=selective", "train.fused_layers=true",
    ),
}  # fmt: skip


# "all" has what the others have, each with its own part.
BY_DEFAULT = ("all",)
OFFLOADED_RUNS = [
    pytest.param(options, marks=() if name in BY_DEFAULT else pytest.mark.matrix, id=name) for name, options in OFFLOADS.items()
]


@pytest.mark.parametrize("options", OFFLOADED_RUNS)
def test_a_run_that_offloads_is_the_run_that_does_not(
    folder: Path, plain: Left, offload_anyway: None, options: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    assert_same(train(folder, request.node.callspec.id.replace(" ", "-"), *ROLES, *options), plain)


def test_a_run_goes_on_with_other_settings_of_memory_to_the_same_bits(
    tmp_path: Path, model_folders: ModelFolders, offload_anyway: None
) -> None:
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    runs.train(folder, *SHORT)
    cut = runs.copy(folder, tmp_path / "cut")
    shutil.rmtree(runs.checkpoints(cut)[2])
    other = ("train.recompute=selective", "train.offload_optimizer=true", "train.offload_grads=true", "ref.offload_params=true")
    assert "resuming from step 1" in runs.train(cut, *SHORT, *other).said
    runs.assert_equal_tensors(runs.checkpoints(cut)[2], runs.checkpoints(folder)[2])


@pytest.mark.long
def test_a_compiled_run_is_the_run_that_is_not(folder: Path, quick_compiler: None) -> None:
    """Adapters, a reference that is the actor without them, and a critic."""
    options = ("algorithm.name=ppo", "lora.rank=2", "train.lr=0.01", "reward.workers=1")
    found = train(folder, "compiled", *options, "train.compile=true", "train.recompute=full")
    assert "layers: compiled: 2 layers (actor, critic)" in found.said
    assert_same(found, train(folder, "adapters", *options))


SFT_KNOBS = {
    "recompute, chunks and padded samples": ("train.recompute=full", "train.entropy_chunk=3", "train.packing=false"),
    "kept logits": KNOBS["kept logits"],
}


@pytest.fixture(scope="module")
def sft_folder(tmp_path_factory: pytest.TempPathFactory, model_folders: ModelFolders) -> Path:
    """With the run that no knob is set for, in `without`."""
    folder = runs.make(tmp_path_factory.mktemp("sft") / "folder", model_folders("llama-tied"), runs.SFT)
    runs.train(folder, "run.dir=without")
    return folder


@pytest.mark.parametrize(
    "options",
    [pytest.param(options, marks=pytest.mark.matrix if name == "kept logits" else ()) for name, options in SFT_KNOBS.items()],
    ids=SFT_KNOBS,
)
def test_sft_has_the_same_knobs(sft_folder: Path, options: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    place = request.node.callspec.id.replace(" ", "-")
    trained = runs.train(sft_folder, *options, f"run.dir={place}")
    found, expected = (
        runs.without_clock([json.loads(line) for line in (sft_folder / name / "metrics.jsonl").read_text().splitlines()])
        for name in (place, "without")
    )
    assert trained.summary.steps == len(found)
    for line, other in zip(found, expected, strict=True):
        for metric, value in other.items():
            assert metric.endswith(EXECUTION) or line[metric] == pytest.approx(value, rel=NEAR, abs=NEAR), metric


# -- what reaches a role ----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def parts_of(folder: Path, *options: str) -> Iterator[RunParts]:
    config = runs.read_config(folder, *SHORT, *options)
    with contextlib.chdir(folder):
        parts = assemble(config)
        try:
            yield parts
        finally:
            parts.close()


def forwards(model: Any) -> list[list[type]]:
    """Of each layer, what runs in front of its own forward, the outermost first."""
    found = []
    for layer in model.base_model.layers:
        chain, forward = [], vars(layer).get("forward")
        while isinstance(forward, UnitForward | OffloadedForward):
            chain.append(type(forward))
            forward = forward.own
        found.append(chain)
    return found


def test_every_setting_reaches_its_role(folder: Path, offload_anyway: None) -> None:
    options = (
        "train.recompute=full", "train.recompute_layers=1", "train.offload_activations=true", "train.offload_optimizer=true",
        "train.offload_grads=true", "train.packing=false", "train.fused_head=false", "train.entropy_chunk=5",
        "train.entropy_recompute=false",
        "critic.recompute=selective", "critic.offload_activations=false", "critic.offload_optimizer=false", "critic.packing=true",
    )  # fmt: skip
    with parts_of(folder, *ROLES, *options) as parts:
        assert (
            parts.worker.trainers["actor"]
            and parts.worker.trainers["critic"]
            and parts.worker.roles["critic"]
            and parts.worker.roles["ref"]
            and parts.worker.roles["reward_model"]
        )
        assert forwards(parts.worker.actor.model) == [[OffloadedForward, UnitForward], [OffloadedForward]]
        assert forwards(parts.worker.roles["critic"].model.body) == [[UnitForward], []]
        assert forwards(parts.worker.roles["ref"].model) == forwards(parts.worker.roles["reward_model"].model.body) == [[], []]
        assert parts.worker.trainers["actor"].optimizer.offload == OffloadSetting(optimizer=True, grads=True)
        assert parts.worker.trainers["critic"].optimizer.offload == OffloadSetting(grads=True)
        assert parts.worker.actor.options == HeadOptions(fused=False, entropy_chunk=5, entropy_recompute=False)
        assert parts.worker.roles["ref"].options == HeadOptions(fused=False)
        assert {role: sizing.packing for role, sizing in parts.crew.update_sizes.items()} == {"actor": False, "critic": True}
        assert {role: sizing.packing for role, sizing in parts.crew.forward_sizes.items()} == {
            "actor": False, "ref": False, "critic": True, "reward_model": False,
        }  # fmt: skip
        (words,) = [text for text in parts.plan.words if text.startswith("actor: ")]
        assert words.startswith("actor: samples padded to the longest of their micro-batch; full recompute of the first 1 layer; activat")


def test_who_does_not_work_is_away(folder: Path, offload_anyway: None) -> None:
    options = [f"{section}.offload_params=true" for section in ("train", "ref", "reward_model")]  # the critic's as in [train]
    with parts_of(folder, *ROLES, *options) as parts:
        assert parts.worker.roles["critic"] and parts.worker.roles["ref"] and parts.worker.roles["reward_model"] and parts.worker.engine
        bodies: dict[str, Any] = {
            role: parts.worker.roles[role].model for role in ("actor", "ref", "critic", "reward_model")
        }  # fmt: skip

        def here() -> list[str]:
            return [role for role, model in bodies.items() if not any(absent(parameter) for parameter in model.parameters())]

        assert here() == ["actor"]
        for role in ("ref", "critic", "reward_model", "actor"):
            parts.worker.residents.need(role)
            assert here() == [role]
        parts.worker._tensors()
        assert here() == ["actor", "critic"]


@pytest.mark.long
def test_a_reference_without_a_model_of_its_own_brings_the_actor(folder: Path, offload_anyway: None) -> None:
    options = ("algorithm.name=ppo", "lora.rank=2", "reward.workers=1", "train.offload_params=true")
    with parts_of(folder, *options) as parts:
        assert parts.worker.roles["ref"].model is parts.worker.actor.model
    assert_same(train(folder, "adapters-away", *options), train(folder, "adapters-here", *options[:-1]))


def test_memory_is_in_the_metrics(folder: Path, plain: Left) -> None:
    lines = [json.loads(line) for line in (folder / "plain" / "metrics.jsonl").read_text().splitlines()]
    for phase in ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "sync"):
        held = {kind: lines[-1][f"memory_gib/{phase}/{kind}"] for kind in ("parameters", "gradients", "optimizer", "kv")}
        assert held["parameters"] > 0 and held["optimizer"] > 0
        assert (held["kv"] > 0) == (phase == "gen") and (held["gradients"] > 0) == phase.startswith("update_")  # given back inside it
    assert all(lines[-1][f"memory_gib/{phase}/head"] > 0 for phase in ("old_log_prob", "ref", "update_actor"))
    assert "memory_gib/values/head" not in lines[-1]  # no vocabulary head
    assert "memory_gib/save_checkpoint/parameters" in lines[-1] and "memory_gib/save_checkpoint/parameters" not in lines[0]


def test_pages_of_offloaded_activations_are_accounted_for(folder: Path, offload_anyway: None) -> None:
    """On the host beside a GPU; here, where there is but one memory, in it. Those of the actor and of the critic."""
    with parts_of(folder, *ROLES, "train.offload_activations=true") as parts:
        assert parts.worker.roles["critic"]
        pages = [
            model.base_model.layers[0].forward.offload.pages
            for model in (parts.worker.actor.model, parts.worker.roles["critic"].model.body)
        ]
        for wanted in pages:
            wanted.give(wanted.take(1))
        taken = sum(memory.nbytes for of_role in pages for memory in of_role.memory())
        assert parts.worker.account.held().device["activations"] == taken == 2 * PAGE


def test_pads_of_all_passes_are_in_the_metrics(plain: Left, padded: Left) -> None:
    """Of each role, whether it learns in them or not."""
    names = [
        "actor/pad_tokens",
        "critic/pad_tokens",
        *(f"{role}/forward_pad_tokens" for role in ("actor", "critic", "ref", "reward_model")),
    ]
    assert [plain.lines[-1][name] for name in names] == [0] * 6
    assert all(padded.lines[-1][name] > 0 for name in names)


# -- refusals ---------------------------------------------------------------------------------------------------------------------------


def refused(folder: Path, *options: str) -> list[str]:
    config = runs.read_config(folder, *SHORT, *options)
    with contextlib.chdir(folder), pytest.raises(UserError) as error:
        assemble(config)
    mistakes = str(error.value).splitlines()
    with contextlib.chdir(folder):
        assert [found for found in find_mistakes(config) if found in mistakes] == mistakes  # `train --check` says each of them too
    return mistakes


def test_offload_on_the_cpu_is_refused_all_at_once(folder: Path) -> None:
    keys = [
        *(f"train.offload_{kind}" for kind in ("activations", "params", "optimizer", "grads")), "critic.offload_activations",
        "critic.offload_params", "critic.offload_optimizer", "ref.offload_params", "reward_model.offload_params",
    ]  # fmt: skip
    assert refused(folder, *ROLES, *(f"{key}=true" for key in keys)) == [f"{key}: true, but {NOT_ON_CPU}. Remove the key" for key in keys]


def test_what_no_role_can_do_is_refused(folder: Path, offload_anyway: None) -> None:
    alone = ("algorithm.kl_coef=0.0", "reward.workers=1")
    (mistake,) = refused(folder, *alone, "train.offload_params=true")
    assert mistake.startswith("train.offload_params: true, but no other role has a model of its own")
    (mistake,) = refused(folder, "lora.rank=2", "reward.workers=1", "ref.offload_params=true")
    assert mistake.startswith("ref.offload_params: true, but the ref runs the actor's own model without its adapters")
    (mistake,) = refused(folder, *alone, "train.entropy_recompute=false")
    assert mistake.startswith("train.entropy_recompute: false, but the loss has no entropy bonus")
    for value in ("true", "false"):
        (mistake,) = refused(folder, *alone, "train.fused_head=false", f"train.head_recompute={value}")
        assert mistake.startswith("train.head_recompute: the head is not fused (train.fused_head), and keeps")


def test_more_layers_than_there_are_are_refused(folder: Path) -> None:
    config = runs.read_config(folder, *SHORT, *ROLES, "train.recompute=full", "train.recompute_layers=3")
    with contextlib.chdir(folder), pytest.raises(UserError, match="recompute_layers is 3, and the model has 2 layers"):
        assemble(config)


def test_layers_that_do_not_compile_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        raise ValueError("no compiler here")

    monkeypatch.setattr(compiled, "BACKEND", broken)
    torch._dynamo.reset()
    config = runs.read_config(folder, *SHORT, "reward.workers=1", "train.compile=true")
    with (
        contextlib.chdir(folder),
        pytest.raises(UserError, match=r"train.compile: true, but the layers of the actor cannot be compiled: a"),
    ):
        assemble(config)


@pytest.mark.long
def test_layers_that_compile_wrongly_without_adapters_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference of a run with LoRA is the actor with them off."""
    off: list[bool] = []

    @contextlib.contextmanager
    def watched(model: Any) -> Iterator[None]:
        with without_adapters(model):
            off.append(True)
            yield
            off.clear()

    def broken(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        return (lambda *given: [out * 1.1 if isinstance(out, torch.Tensor) else out for out in graph(*given)]) if off else graph

    monkeypatch.setattr(compiled, "without_adapters", watched)
    monkeypatch.setattr(compiled, "BACKEND", broken)
    torch._dynamo.reset()
    config = runs.read_config(folder, *SHORT, "lora.rank=2", "reward.workers=1", "train.compile=true")
    with contextlib.chdir(folder), pytest.raises(UserError, match="hidden states with the adapters off differ by"):
        assemble(config)


# -- on a GPU ---------------------------------------------------------------------------------------------------------------------------

ON_GPU = ("run.device=cuda", "model.dtype=bfloat16", "run.steps=1", "run.save_every=1")
GRAPHS = ("rollout.cuda_graphs=true",)
# How the first step's gradient norm may differ in bf16 when the same samples are computed by other kernels or in other chunks.
NEAR_IN_BF16 = 0.05
SAME_ROLLOUT = {
    **{name: (*GRAPHS, *options) for name, options in KNOBS.items() if name not in ("fixed micro-batches", "budgets")},
    **{name: (*GRAPHS, *options) for name, options in OFFLOADS.items() if name in ("activations", "optimizer and gradients")},
    "parameters of roles that wait": (*GRAPHS, "ref.offload_params=true", "reward_model.offload_params=true", "critic.offload_params=true"),
    "compile": (*GRAPHS, "train.compile=true"),
    "compile and recompute": (*GRAPHS, "train.compile=true", "train.recompute=full"),
    "compile and offload": (*GRAPHS, "train.compile=true", "train.offload_activations=true"),
}


def first_step(folder: Path, name: str, *options: str) -> tuple[dict[str, Any], list[str], str]:
    said = runs.train(folder, *SHORT, *ON_GPU, *options, f"run.dir={name}").said
    (line,) = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    rows = (folder / name / "rollouts" / "step-000001.jsonl").read_text().splitlines()
    return line, [json.loads(row)["response"] for row in rows], said


@pytest.mark.gpu
@pytest.mark.parametrize("options", SAME_ROLLOUT.values(), ids=SAME_ROLLOUT)
def test_on_a_gpu_the_update_is_the_same(folder: Path, options: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    """Layers are not fused here, so that compiled ones sample the same: graphs hold the model's own layers in all of these runs."""
    unfused = "train.fused_layers=false"
    name = request.node.callspec.id.replace(" ", "-").replace(",", "")
    expected, responses, _ = first_step(folder, f"gpu-plain-{name}", *ROLES, *GRAPHS, unfused)
    found, same, said = first_step(folder, f"gpu-{name}", *ROLES, *options, *([] if "train.compile=true" in options else [unfused]))
    assert same == responses
    assert "CUDA graphs of " in said and ("layers: compiled" in said) == ("train.compile=true" in options)
    for metric in ("actor/grad_norm", "critic/grad_norm"):
        assert found[metric] == pytest.approx(expected[metric], rel=NEAR_IN_BF16), metric
    assert found["actor/entropy"] == pytest.approx(expected["actor/entropy"], rel=NEAR_IN_BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("feature", ["train.fused_layers=true", "lora.rank=2", "train.recompute=selective", "train.recompute=full"])
def test_on_a_gpu_graphs_go_with_what_the_table_says(folder: Path, feature: str) -> None:
    name = f"gpu-graphs-{feature.replace('=', '-')}"
    line, responses, said = first_step(folder, name, *ROLES, *GRAPHS, feature)
    assert "CUDA graphs of " in said and responses and line["actor/grad_norm"] > 0
    assert line["rollout_corr/logprob_abs_gap"] < 0.05  # in bf16; weights that graphs read at a wrong address give other tokens altogether


@pytest.mark.gpu
def test_on_a_gpu_the_actors_parameters_leave_and_graphs_give_way(folder: Path) -> None:
    """Memory held at the end of each phase: of the roles that leave, only the one that worked is on the device."""
    away = ("train.offload_params=true", "ref.offload_params=true", "reward_model.offload_params=true")  # the critic's as in [train]
    line, _, said = first_step(folder, "gpu-away", *ROLES, *away)
    assert "no CUDA graphs: train.offload_params moves the weights that they would read" in said
    whole, _, _ = first_step(folder, "gpu-here", *ROLES, "rollout.cuda_graphs=false")
    for phase in ("gen", "reward", "old_log_prob", "ref", "values", "update_critic", "update_actor"):
        assert 0 < line[f"memory_gib/{phase}/parameters"] < 0.6 * whole[f"memory_gib/{phase}/parameters"]
        assert line[f"memory_gib/{phase}/host"] > 0
    assert line["actor/grad_norm"] == pytest.approx(whole["actor/grad_norm"], rel=NEAR_IN_BF16)


@pytest.mark.gpu
def test_on_a_gpu_optimizer_and_gradients_hold_memory_only_when_needed(folder: Path) -> None:
    line, _, _ = first_step(folder, "gpu-states", *ROLES, *OFFLOADS["optimizer and gradients"])
    whole, _, _ = first_step(folder, "gpu-states-here", *ROLES)
    assert line["memory_gib/gen/gradients"] == 0 and whole["memory_gib/gen/gradients"] > 0
    assert line["memory_gib/update_actor/gradients"] > 0
    assert line["memory_gib/gen/host"] >= 2 * whole["memory_gib/gen/parameters"]  # float32 masters and moments of two roles of four
