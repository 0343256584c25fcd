"""What only a CUDA device can show: the flash kernels, bf16 agreement of engine and trainer, of critics, reward models and adapters,
collectives in captured graphs, deterministic resume.

pytest tests/test_gpu.py -m gpu            FULLTILT_REPORT=FILE.json also writes the figures that docs/performance.md quotes
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import runs
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from test_lora import settings, stir
from test_scalar import classifier
from transformers import AutoModelForCausalLM, Qwen2Config

from fulltilt.algo.build import build
from fulltilt.algo.loss import sft_loss, value_loss
from fulltilt.batching.pack import MicroSizing, minibatch
from fulltilt.model.arrays import to_host
from fulltilt.model.fuse import fuse_and_compare
from fulltilt.model.load import end_tokens, load_model
from fulltilt.model.lora import add_adapters, without_adapters
from fulltilt.model.scalar import load_scalar
from fulltilt.model.verify import packed_logprobs, verify
from fulltilt.parallel.ranks import Ranks
from fulltilt.parallel.tensor import member_layers, split
from fulltilt.records import Group, Prompt, Row, RunWarning
from fulltilt.rollout.collect import collect
from fulltilt.rollout.engine import EngineContext, EngineLimits
from fulltilt.rollout.engines.native import NativeEngine
from fulltilt.rollout.sampler import Sampling
from fulltilt.schema import AlgorithmConfig, Config, DataConfig, ModelConfig, TrainConfig
from fulltilt.training.optim import Optimizer
from fulltilt.training.roles import Critic, Policy, annotate_all
from fulltilt.training.trainer import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]
GPU, CPU = torch.device("cuda"), torch.device("cpu")

# How far gradients in bf16 may be from those in float32, as a share of their norm. Where two experts are nearly tied, rounding sends a
# token to the other one, whose gradient is another altogether: 0.075 was measured for mixtral, whose float32 agrees to 1e-6.
FAR = {family: 0.12 if family in ("qwen3-moe", "mixtral") else 0.05 for family in models.FAMILIES}
A_FEW = ["llama-tied", "gemma2", "mixtral"]  # plain; windows and caps; experts


def report(name: str, figures: dict[str, Any]) -> None:
    print(name, figures)
    if path := os.environ.get("FULLTILT_REPORT"):
        known = json.loads(Path(path).read_text()) if Path(path).exists() else {}
        Path(path).write_text(json.dumps(known | {name: figures}, indent=1))


def documents() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, models.VOCABULARY, length) for length in (40, 3, 25, 130, 64)]


def engine_on(model: Any, folder: Path, limits: EngineLimits) -> NativeEngine:
    return NativeEngine(
        EngineContext(model, models.tokenizer(), end_tokens(ModelConfig(path=str(folder)), models.tokenizer()), verify(model), limits)
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_packed_log_probs_equal_the_cpus(family: str, dtype: str, model_folders) -> None:
    folder = model_folders(family)
    on_gpu = load_model(ModelConfig(path=str(folder), dtype=dtype), GPU)
    verify(on_gpu)
    exact = load_model(ModelConfig(path=str(folder), dtype="float64"), CPU)
    with torch.no_grad():
        for parameter, source in zip(exact.parameters(), on_gpu.parameters(), strict=True):
            parameter.copy_(source)
        ours, theirs = packed_logprobs(on_gpu, documents())[0], packed_logprobs(exact, documents())[0]
    gap = float((torch.cat(ours).cpu() - torch.cat(theirs)).abs().mean())
    assert gap < {"bfloat16": 0.05, "float32": 1e-4}[dtype]  # bf16 keeps 8 bits: logits of size 5 are rounded by 0.02


@pytest.mark.parametrize("family", models.FAMILIES)
def test_gradients_equal_the_cpus(family: str, model_folders) -> None:
    folder = model_folders(family)
    rows = [Row(ids=document, mask=np.arange(len(document)) >= 2) for document in documents()]
    batch = minibatch(rows, "token-mean", 1, MicroSizing(120))
    flat = []
    for device, dtype in ((GPU, "bfloat16"), (CPU, "float32")):
        model = load_model(ModelConfig(path=str(folder), dtype=dtype), device)
        trainer = Trainer(Policy("actor", model, 1.0, Optimizer(model, TrainConfig(), 1)), sft_loss)
        trainer.accumulate(batch)
        flat.append(gradients(model))
    assert (flat[0] - flat[1]).norm() / flat[1].norm() < FAR[family]


def gradients(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([getattr(p, "main_grad", p.grad).flatten().float().cpu() for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs, fused", "eager, plain"])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_engine_and_trainer_agree_in_bf16(family: str, graphs: bool, model_folders) -> None:
    """Also reports how often a sample's tokens differ when only the batch around it does: in bf16 shapes change roundings."""
    model = load_model(ModelConfig(path=str(model_folders(family)), dtype="bfloat16"), GPU)
    fused = str(fuse_and_compare(model)) if graphs else "plain"
    gap, flips, total = agreement(model, model_folders(family), graphs)
    found = {"mean_abs_logprob_gap": gap, "flip_rate_per_token": flips, "tokens": total, "layers": fused}
    report(f"bf16/{family}/{'graphs' if graphs else 'eager'}", found)
    assert gap < 0.02 and flips < 0.02


def agreement(model: Any, folder: Path, graphs: bool = True) -> tuple[float, float, int]:
    """How far the engine's log-probs are from the trainer's, and how often another batch around a sample changes a token of it."""
    random = np.random.default_rng(1)
    prompts = [Prompt(uid=i, ids=random.integers(3, 90, int(random.integers(1, 60))), text="") for i in range(24)]
    sampling = Sampling(samples=4, max_new_tokens=64)
    engine = engine_on(model, folder, EngineLimits(1000, 16, 256, 4096, cuda_graphs=graphs))
    tight = engine_on(model, folder, EngineLimits(14, 16, 6, 40, cuda_graphs=graphs))
    groups, others = (collect(each.generate, prompts, sampling, 7, lambda group: None) for each in (engine, tight))
    assert tight.stats().preemptions > 0
    assert all((each.decoder.captures > 0) == graphs and each.decoder.eager_reason is None for each in (engine, tight))
    gaps, same, total = [], 0, 0
    for group, other in zip(groups, others, strict=True):
        for sample, twin in zip(group.samples, other.samples, strict=True):
            with torch.no_grad():
                (trainer,), _ = packed_logprobs(model, [np.concatenate([group.prompt.ids, sample.ids])])
            gaps.append(np.abs(sample.logprobs - trainer[len(group.prompt.ids) - 1 :].cpu().numpy()))
            common = min(len(sample.ids), len(twin.ids))
            equal = np.cumprod(sample.ids[:common] == twin.ids[:common]).sum()  # after a flip the rest follows another text
            same, total = same + int(equal), total + int(equal) + int(equal < common)
    return float(np.concatenate(gaps).mean()), 1 - same / total, total


def engine_that_fails(model: Any, folder: Path, fails: Callable[[int], None]) -> NativeEngine:
    """`fails`: called with the size of each decode step, inside it, after it has computed."""
    engine = engine_on(model, folder, EngineLimits(99, 16, 8, 128, cuda_graphs=True))
    step = engine.decoder._step

    def step_that_fails(size: int, restricted: bool) -> None:
        step(size, restricted)
        fails(size)

    engine.decoder._step = step_that_fails
    return engine


def sampled_by(engine: NativeEngine, count: int) -> list[list[int]]:
    prompts = [Prompt(uid=i, ids=np.arange(5 + i) + 3, text="") for i in range(count)]
    groups = collect(engine.generate, prompts, Sampling(max_new_tokens=9), 7, lambda group: None)
    return [sample.ids.tolist() for group in groups for sample in group.samples]


@pytest.mark.parametrize("moment", ["before", "inside", "beside another"])
def test_an_engine_without_memory_for_a_graph_decodes_fewer_samples(moment: str, model_folders) -> None:
    """`inside`: while the device records; `beside another`: the same, when the pool has a graph already. Samples are those of an engine
    with enough memory."""
    folder = model_folders("qwen2")
    model = load_model(ModelConfig(path=str(folder), dtype="float32"), GPU)
    found = []
    for enough in (True, False):

        def run_out(size: int, enough: bool = enough) -> None:
            if size > 2 and not enough and (moment == "before" or torch.cuda.is_current_stream_capturing()):
                raise torch.OutOfMemoryError("CUDA out of memory.")

        engine = engine_that_fails(model, folder, run_out)
        if moment == "beside another":
            sampled_by(engine, 2)  # a graph of two samples, which is not refused
        found.append(sampled_by(engine, 8))
        limits = engine.take_limits()
        assert engine.decoder.captures > 0 and engine.decoder.eager_reason is None
        assert (limits.max_seqs, len(limits.failures)) == ((8, 0) if enough else (2, 2))
        if moment == "beside another":  # memory of the first graph was given to nobody else
            torch.cuda.empty_cache()
            assert sampled_by(engine, 8) == found[-1]
    assert found[0] == found[1]


def test_an_engine_without_memory_beside_the_allocator_decodes_without_graphs(model_folders) -> None:
    """For a graph itself: fewer samples would not free any."""
    folder = model_folders("qwen2")
    model = load_model(ModelConfig(path=str(folder), dtype="float32"), GPU)
    found = []
    for enough in (True, False):

        def run_out(size: int, enough: bool = enough) -> None:
            if not enough and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("CUDA error: out of memory")

        engine = engine_that_fails(model, folder, run_out)
        with contextlib.nullcontext() if enough else pytest.warns(RunWarning, match="decoding runs without graphs.*out of memory"):
            found.append(sampled_by(engine, 8))
        assert engine.take_limits().max_seqs == 8 and bool(engine.decoder.captures) == enough
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("hidden", "inner", "heads", "key_heads"),
    [(896, 4864, 14, 2), (1536, 8960, 12, 2), (3584, 18944, 28, 4)],
    ids=["widths of 0.5B", "widths of 1.5B", "widths of 7B"],
)
@pytest.mark.parametrize("rows", [3, 16, 40, 300, 576, 832])
def test_samples_decode_as_training_computes(hidden: int, inner: int, heads: int, key_heads: int, rows: int, tmp_path: Path) -> None:
    """Real widths, for small models do not show which kernels cuBLAS takes: few rows far from position 0, as at the end of a rollout,
    and numbers of rows in between."""
    shape = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": key_heads}
    config = Qwen2Config(**models.SMALL | shape | {"max_position_embeddings": 1024, "tie_word_embeddings": True, "initializer_range": 0.02})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    models.tokenizer().save_pretrained(tmp_path)
    model = load_model(ModelConfig(path=str(tmp_path), dtype="bfloat16"), GPU)
    fuse_and_compare(model)
    random = np.random.default_rng(1)
    low, high = (500, 700) if rows < 64 else (20, 38)  # all prompts in one pass
    prompts = [Prompt(uid=i, ids=random.integers(3, 90, int(random.integers(low, high))), text="") for i in range(rows)]
    engine = engine_on(model, tmp_path, EngineLimits(6000, 16, 1024, 32768, cuda_graphs=True))
    groups = collect(engine.generate, prompts, Sampling(samples=1, max_new_tokens=40), 7, lambda group: None)
    # Side by side, as in training: a product of some hundred rows, an odd number of them, may add up in another order than one of many.
    with torch.no_grad():
        trained, _ = packed_logprobs(model, [np.concatenate([group.prompt.ids, group.samples[0].ids]) for group in groups])
    gaps = [
        np.abs(group.samples[0].logprobs - logprobs[len(group.prompt.ids) - 1 :].cpu().numpy())
        for group, logprobs in zip(groups, trained, strict=True)
    ]
    gap = float(np.concatenate(gaps).mean())
    report(f"bf16/few/{hidden}/{rows}", {"mean_abs_logprob_gap": gap, "tokens": sum(map(len, gaps))})
    assert gap < 1e-6  # the log-probs' own rounding in float32; one other bit in a layer makes a thousand times that


@pytest.fixture
def group_of_one() -> Iterator[Ranks]:
    """NCCL with a single member: its collectives are kernels on the device, as those of many."""
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield Ranks(0, 1, dist.group.WORLD)
    gc.collect()
    torch.cuda.synchronize()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("family", "whole_experts"), [*((family, False) for family in ("qwen3", *A_FEW)), ("qwen3-moe", True), ("mixtral", True)]
)
def test_graphs_hold_the_collectives_of_a_tensor_parallel_group(
    family: str, whole_experts: bool, group_of_one: Ranks, model_folders
) -> None:
    """A group of one computes what the plain model does, by the same kernels on the same numbers, with its collectives in between. With
    `whole_experts`, as in runs with `rollout.expert_parallel`, the rows of a product do not depend on what routers choose."""
    folder = model_folders(family)
    random = np.random.default_rng(1)
    prompts = [Prompt(uid=i, ids=random.integers(3, 90, int(random.integers(1, 60))), text="") for i in range(12)]
    limits = EngineLimits(1000, 16, 256, 4096, cuda_graphs=True, graphs_required=True)
    plain, divided = (load_model(ModelConfig(path=str(folder), dtype="bfloat16"), GPU) for _ in range(2))
    layers, moved = verify(plain), group_of_one.moved
    split(divided, group_of_one, whole_experts=whole_experts)
    for model in (plain, divided):
        fuse_and_compare(model)
    tokenizer, ends = models.tokenizer(), end_tokens(ModelConfig(path=str(folder)), models.tokenizer())
    engines = [
        NativeEngine(EngineContext(model, tokenizer, ends, shapes, limits))
        for model, shapes in ((plain, layers), (divided, member_layers(layers, 1)))
    ]

    def draw(engine: NativeEngine, sampling: Sampling) -> tuple[Group, ...]:
        return collect(engine.generate, prompts, sampling, 7, lambda group: None)

    try:
        for sampling in (Sampling(samples=4, max_new_tokens=48), Sampling(samples=2, max_new_tokens=20, top_k=20, top_p=0.9)):
            expected, found = (draw(engine, sampling) for engine in engines)
            decoder, before = engines[1].decoder, dict(moved)
            captures = decoder.captures
            assert captures > 0 and decoder.eager_reason is None
            again = draw(engines[1], sampling)
            assert decoder.captures == captures and all(moved[kind] > before[kind] for kind in ("all-gather", "all-reduce"))
            for group, same, twin in zip(found, expected, again, strict=True):
                for one, other, repeated in zip(group.samples, same.samples, twin.samples, strict=True):
                    assert one.ids.tolist() == other.ids.tolist() == repeated.ids.tolist()
                    np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-5)
    finally:
        for engine in engines:  # NCCL waits at its end until no graph holds its kernels
            engine.decoder._captured.clear()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_a_micro_batch_never_waits_for_the_device(fused: bool, model_folders) -> None:
    """While one is computed the host prepares the next: a copy that waits would leave the device idle in between, twice a micro-batch."""
    model = load_model(ModelConfig(path=str(model_folders("qwen3")), dtype="bfloat16"), GPU)
    if fused:
        fuse_and_compare(model)
    random = np.random.default_rng(2)
    rows = [
        Row(
            ids=document,
            mask=np.arange(len(document)) >= 2,
            **{name: random.normal(size=len(document)).astype(np.float32) for name in ("rollout_logprobs", "advantages")},
        )
        for document in documents()
    ]
    policy = Policy("actor", model, 1.0, Optimizer(model, TrainConfig(), 1))
    config = Config(model=ModelConfig(path="-"), data=DataConfig(train="-"), algorithm=AlgorithmConfig(name="grpo", prompts_per_step=1))
    loss = build(config).loss
    trainer = Trainer(policy, loss)
    batch = minibatch(rows, "token-mean", 1, MicroSizing(120))
    trainer.accumulate(batch)  # compiles
    trainer.optimizer.prepare()
    first, *_ = annotate_all(policy, batch.micro_batches)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for micro in batch.micro_batches:
            loss(policy.terms(micro)).loss.backward()
        given = [to_host(policy.annotate(micro)) for micro in batch.micro_batches]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    np.testing.assert_array_equal(given[0](), first)  # nothing has changed the weights


# ---- critic, reward model, adapters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", A_FEW)
def test_critics_values_and_gradients_equal_the_cpus(family: str, tmp_path: Path) -> None:
    """With a head of its own, for a new one would say 0 of everything."""
    classifier(family, tmp_path)
    random = np.random.default_rng(2)
    rows = []
    for document in documents():
        mask = np.arange(len(document)) >= 2
        returns, values = (random.normal(size=len(document)).astype(np.float32) * mask for _ in range(2))
        rows.append(Row(ids=document, mask=mask, values=values, returns=returns))
    batch = minibatch(rows, "token-mean", 1, MicroSizing(120))
    numbers, flat = [], []
    for device, dtype in ((GPU, "bfloat16"), (CPU, "float32")):
        model = load_scalar(ModelConfig(path=str(tmp_path), dtype=dtype), device, key="critic.path", head="new")
        verify(model.body)
        critic = Critic("critic", model, Optimizer(model, TrainConfig(), 1, keeps_parameters=True))
        numbers.append(np.concatenate(list(annotate_all(critic, batch.micro_batches))))
        Trainer(critic, partial(value_loss, value_clip=0.0)).accumulate(batch)
        flat.append(gradients(model))
    assert np.std(numbers[1]) > 0.1
    report(f"critic/{family}", {"mean_abs_value_gap": float(np.abs(numbers[0] - numbers[1]).mean())})
    assert np.abs(numbers[0] - numbers[1]).mean() < 0.05  # as for log-probs above
    assert (flat[0] - flat[1]).norm() / flat[1].norm() < FAR[family]


@pytest.mark.parametrize("family", A_FEW)
@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "adapters"])
def test_ppo_steps(family: str, adapters: bool, model_folders, tmp_path: Path) -> None:
    folder = runs.make(tmp_path / "folder", model_folders(family))
    experts = settings(family).parameters
    lora = ("lora.rank=4", *([f"lora.parameters={json.dumps(experts)}"] if experts else [])) if adapters else ()
    runs.train(folder, "algorithm.name=ppo", "critic.lr=1e-3", "run.steps=2", "run.eval_every=0", "run.device=cuda", *lora)
    _, first, second = runs.metrics(folder)
    assert first["critic/values/max"] == 0 and second["critic/values/max"] > second["critic/values/min"]
    for line in (first, second):
        assert (line["actor/updates"], line["critic/updates"]) == (2, 2) and "nonfinite" not in line
        assert line["actor/skipped_updates"] == line["critic/skipped_updates"] == 0
        assert line["actor/grad_norm"] > 0 and line["critic/grad_norm"] > 0
        assert line["rollout_corr/logprob_abs_gap"] < 0.02


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-3), ("bfloat16", 0.05)])
@pytest.mark.parametrize("family", A_FEW)
def test_a_reward_model_scores_as_transformers_on_the_cpu(family: str, dtype: str, close: float, model_folders, tmp_path: Path) -> None:
    reference = classifier(family, tmp_path / "judge")
    folder = runs.make(tmp_path / "folder", model_folders("llama"), {**runs.GRPO, "reward": {"function": "reward_model"}})
    options = ("run.steps=1", "run.eval_every=0", "run.eval_before=false", "run.device=cuda", "reward_model.forward_token_budget=64")
    runs.train(folder, *options, f"reward_model.path={tmp_path / 'judge'}", f"model.dtype={dtype}")
    tokenizer = models.tokenizer()
    gaps, scores = [], []
    for sample in runs.rollouts(folder, 1):
        ids = tokenizer(sample["prompt"] + sample["response"])["input_ids"] + [1] * (sample["finish"] == "stop")
        with torch.no_grad():
            scores.append(float(reference(input_ids=torch.tensor([ids])).logits[0, 0]))
        gaps.append(abs(scores[-1] - sample["reward"]))
    report(f"reward model/{family}/{dtype}", {"mean_abs_score_gap": float(np.mean(gaps)), "score_std": float(np.std(scores))})
    assert np.std(scores) > 0.1 and np.mean(gaps) < close  # the mean, since an expert that flips moves a single score


@pytest.mark.parametrize("family", ["llama-tied", "qwen3-moe", "mixtral"])
def test_engine_and_trainer_agree_in_bf16_with_adapters(family: str, model_folders) -> None:
    folder = model_folders(family)
    model, base = (load_model(ModelConfig(path=str(folder), dtype="bfloat16"), GPU) for _ in range(2))
    add_adapters(model, settings(family), seed=3)
    stir(model)
    gap, flips, total = agreement(model, folder)
    report(f"bf16/{family} with adapters", {"mean_abs_logprob_gap": gap, "flip_rate_per_token": flips, "tokens": total})
    assert gap < 0.02 and flips < 0.02
    with torch.no_grad():
        plain, adapted = (torch.cat(packed_logprobs(each, documents())[0]) for each in (base, model))
        with without_adapters(model):
            reference = torch.cat(packed_logprobs(model, documents())[0])
    assert (adapted - plain).abs().mean() > 0.05
    assert (reference - plain).abs().mean() < 1e-3  # the same kernels on the same numbers


PPO_WITH_ADAPTERS = ("algorithm.name=ppo", "critic.lr=1e-3", "lora.rank=4")


@pytest.mark.parametrize(
    ("family", "options"),
    [("llama-tied", ()), ("mistral", ()), ("qwen3", PPO_WITH_ADAPTERS)],
    ids=["llama-tied", "mistral", "qwen3-ppo-lora"],
)
def test_resume_is_bit_equal_in_deterministic_mode(family: str, options: tuple[str, ...], model_folders, tmp_path: Path) -> None:
    finals = []
    for name, parts in (("whole", [6]), ("resumed", [2, 5, 6])):
        folder = runs.make(tmp_path / name, model_folders(family))
        for steps in parts:
            runs.train(
                folder, f"run.steps={steps}", "train.schedule=constant", "run.device=cuda", "run.deterministic=true", "rollout.top_p=0.9",
                *options,
            )  # fmt: skip
        finals.append(load_file(runs.checkpoints(folder)[6] / "trainer.safetensors"))
    torch.use_deterministic_algorithms(False)
    assert finals[0].keys() == finals[1].keys() and any(name.startswith("master/") for name in finals[0])
    for name, tensor in finals[0].items():
        assert torch.equal(tensor, finals[1][name]), name


SHARED_BY_TWO = (
    "run.device=cuda", "run.deterministic=true", "cluster.workers=2", "algorithm.name=ppo", "algorithm.kl_coef=0.05",
    "critic.lr=1e-3", "run.steps=2", "run.save_every=2", "run.eval_before=false", "run.eval_every=0", f"rollout.kv_bytes={2**26}",
    "actor.token_budget=1024",
)  # fmt: skip


@pytest.mark.parametrize("shard", ["full", "optimizer"])
def test_parameters_that_leave_the_device_come_back_bit_for_bit(shard: str, model_folders, tmp_path: Path) -> None:
    """Two workers share the GPU. Outside their phases, actor, critic and reference, or shards of them, take no memory of it. With
    `optimizer` the engine reads the actor itself, which it does without graphs."""
    own = (f"train.shard={shard}", *(["rollout.cuda_graphs=false"] if shard == "optimizer" else []))
    away = ("train.offload_params=true", "ref.offload_params=true", "train.offload_optimizer=true")  # the critic's as in [train]
    folders, lines, said = {}, {}, {}
    for name, options in {"here": (), "away": away}.items():
        folders[name] = runs.make(tmp_path / name, model_folders("qwen2"))
        ended = runs.command(folders[name], "train", "run.toml", *SHARED_BY_TWO, *own, *options)
        assert ended.code == 0, ended.error
        lines[name], said[name] = runs.metrics(folders[name]), ended.out + ended.error
    if shard == "full":
        assert all("CUDA graphs of" in words for words in said.values())  # they read the whole copy, which stays
    for here, there in zip(lines["here"], lines["away"], strict=True):
        for metric in ("actor/grad_norm", "critic/grad_norm", "actor/pg_loss", "critic/vf_loss"):
            assert here.get(metric) == there.get(metric), metric
        held = {phase: [each[f"memory_gib/{phase}/parameters"] for each in (here, there)] for phase in ("gen", "ref", "update_actor")}
        report(f"parameters in GiB, here and away, {shard}", held)
        assert all(at_home > elsewhere for at_home, elsewhere in held.values())
        if shard == "full":  # in a rollout nothing but the whole copy is there; in an update the actor's shards are, which its phase needs
            assert held["gen"][0] - held["gen"][1] > held["update_actor"][0] - held["update_actor"][1]
            assert held["gen"][1] < held["update_actor"][1]
        assert here["memory_gib/gen/host"] < there["memory_gib/gen/host"]
    files = sorted(path.name for path in runs.checkpoints(folders["here"])[2].glob("trainer*.safetensors"))
    assert len(files) == 2
    for file in files:
        one, other = (load_file(runs.checkpoints(folders[name])[2] / file) for name in folders)
        assert one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())
