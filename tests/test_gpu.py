"""What only a CUDA device can show: the flash kernels, bf16 agreement of engine and trainer, deterministic resume.

pytest tests/test_gpu.py -m gpu            FULLTILT_REPORT=FILE.json also writes the figures that docs/performance.md quotes
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import runs
import torch
from safetensors.torch import load_file

from fulltilt.algo.loss import sft_loss
from fulltilt.batching.pack import MicroSizing, minibatch
from fulltilt.config import ModelConfig, TrainConfig
from fulltilt.model.load import end_tokens, load_model
from fulltilt.model.verify import packed_logprobs, verify
from fulltilt.records import Prompt, Row
from fulltilt.rollout.collect import collect
from fulltilt.rollout.engine import EngineLimits, NativeEngine
from fulltilt.rollout.sampler import Sampling
from fulltilt.train.optim import Optimizer
from fulltilt.train.roles import Policy
from fulltilt.train.trainer import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]
GPU, CPU = torch.device("cuda"), torch.device("cpu")


def report(name: str, figures: dict[str, Any]) -> None:
    print(name, figures)
    if path := os.environ.get("FULLTILT_REPORT"):
        known = json.loads(Path(path).read_text()) if Path(path).exists() else {}
        Path(path).write_text(json.dumps(known | {name: figures}, indent=1))


def documents() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, models.VOCABULARY, length) for length in (40, 3, 25, 130, 64)]


def engine_on(model: Any, folder: Path, limits: EngineLimits) -> NativeEngine:
    return NativeEngine(model, models.tokenizer(), end_tokens(ModelConfig(path=str(folder)), models.tokenizer()), verify(model), limits)


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
    batch = minibatch(rows, "token-mean", 1, MicroSizing(True, 120))
    flat = []
    for device, dtype in ((GPU, "bfloat16"), (CPU, "float32")):
        model = load_model(ModelConfig(path=str(folder), dtype=dtype), device)
        trainer = Trainer(Policy("actor", model, 1.0, Optimizer(model, TrainConfig(), 1)), sft_loss)
        trainer.accumulate(batch)
        flat.append(torch.cat([getattr(p, "main_grad", p.grad).flatten().float().cpu() for p in model.parameters()]))
    assert (flat[0] - flat[1]).norm() / flat[1].norm() < 0.05


@pytest.mark.parametrize("family", models.FAMILIES)
def test_engine_and_trainer_agree_in_bf16(family: str, model_folders) -> None:
    """Also reports how often a sample's tokens differ when only the batch around it does: in bf16 shapes change roundings."""
    model = load_model(ModelConfig(path=str(model_folders(family))), GPU)
    random = np.random.default_rng(1)
    prompts = [Prompt(uid=i, ids=random.integers(3, 90, int(random.integers(1, 60))), text="") for i in range(24)]
    sampling = Sampling(samples=4, max_new_tokens=64)
    engine = engine_on(model, model_folders(family), EngineLimits(1000, 16, 256, 4096))
    tight = engine_on(model, model_folders(family), EngineLimits(24, 16, 6, 40))
    groups, others = (collect(each, prompts, sampling, 7, lambda group: None) for each in (engine, tight))
    assert tight.stats().preemptions > 0
    gaps, same, total = [], 0, 0
    for group, other in zip(groups, others, strict=True):
        for sample, twin in zip(group.samples, other.samples, strict=True):
            with torch.no_grad():
                (trainer,), _ = packed_logprobs(model, [np.concatenate([group.prompt.ids, sample.ids])])
            gaps.append(np.abs(sample.logprobs - trainer[len(group.prompt.ids) - 1 :].cpu().numpy()))
            common = min(len(sample.ids), len(twin.ids))
            equal = np.cumprod(sample.ids[:common] == twin.ids[:common]).sum()  # after a flip the rest follows another text
            same, total = same + int(equal), total + int(equal) + int(equal < common)
    gap, flips = float(np.concatenate(gaps).mean()), 1 - same / total
    report(f"bf16/{family}", {"mean_abs_logprob_gap": gap, "flip_rate_per_token": flips, "tokens": total})
    assert gap < 0.02 and flips < 0.02


@pytest.mark.parametrize("family", ["llama-tied", "mistral"])
def test_resume_is_bit_equal_in_deterministic_mode(family: str, model_folders, tmp_path: Path) -> None:
    finals = []
    for name, parts in (("whole", [6]), ("resumed", [2, 5, 6])):
        folder = runs.make(tmp_path / name, model_folders(family))
        for steps in parts:
            runs.train(
                folder, f"run.steps={steps}", "train.schedule=constant", "run.device=cuda", "run.deterministic=true", "rollout.top_p=0.9"
            )
        finals.append(load_file(runs.checkpoints(folder)[6] / "trainer.safetensors"))
    torch.use_deterministic_algorithms(False)
    assert finals[0].keys() == finals[1].keys() and any(name.startswith("master/") for name in finals[0])
    for name, tensor in finals[0].items():
        assert torch.equal(tensor, finals[1][name]), name
