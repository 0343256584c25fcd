"""All parts of a run in this process, on one device.

Enters: a configuration, and the checkpoint to resume from if any. Leaves: `Parts`, loaded, verified and planned. Guaranteed: mistakes in
reward, data and model are found in that order (cheapest first) before anything is written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from fulltilt.algo.base import Algorithm
from fulltilt.algo.presets import build
from fulltilt.config import Config
from fulltilt.data.order import InEpochs
from fulltilt.data.prompts import PromptSet, load_prompts
from fulltilt.data.sft import RowSet, load_sft
from fulltilt.model import load
from fulltilt.model.verify import verify
from fulltilt.plan import Budgets, Facts, Plan, count_steps, make_plan, updates_per_step
from fulltilt.records import Prompt, Row, UserError
from fulltilt.reward.base import RewardPool
from fulltilt.rollout.engine import Engine, EngineLimits, NativeEngine
from fulltilt.rollout.runner import bytes_per_token
from fulltilt.train.checkpoint import Checkpoint
from fulltilt.train.optim import Optimizer
from fulltilt.train.roles import Role, frozen
from fulltilt.train.trainer import Trainer

THREADS = torch.get_num_threads()  # as torch chose them: an earlier run of this process may have changed the number since


@dataclass(frozen=True, eq=False)
class Parts:
    algorithm: Algorithm
    plan: Plan
    tokenizer: PreTrainedTokenizerBase
    train_data: InEpochs[Prompt] | InEpochs[Row]
    val_data: PromptSet | RowSet | None
    actor: Role
    ref: Role | None
    trainer: Trainer | None  # None: only evaluation
    engine: Engine | None  # None: nothing is sampled (SFT)
    reward: RewardPool | None
    data_digest: str  # of the training data's tokens
    notes: tuple[str, ...]  # what was read and found, for the console

    def close(self) -> None:
        if self.reward:
            self.reward.close()
        if self.engine:
            self.engine.close()


def choose_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device = cuda: torch finds no CUDA device here. Use run.device = auto or cpu; `fulltilt doctor` says why")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def be_deterministic() -> None:
    """Only kernels whose result does not depend on timing. cuBLAS must be told through the environment, before its first use."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    known = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2]  # where a system does not tell: half of what there is
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        known = [1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])]
    with contextlib.suppress(OSError, ValueError):  # a container may allow less
        group = Path("/sys/fs/cgroup")
        known.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(0, min(known))


def assemble(config: Config, resume: Checkpoint | None = None, *, training: bool = True, kept: dict[str, Any] | None = None) -> Parts:
    """`kept`: the budgets of an earlier plan, to compute in the same shapes and get the same bits; None: plan anew."""
    algorithm = build(config)
    device = choose_device(config.run.device)
    if config.run.deterministic and device.type == "cuda":
        be_deterministic()
    rollout = "rollout" in algorithm.needs
    reward = RewardPool(config.reward, Path(config.run.dir) if training else None) if rollout else None
    try:
        return _assemble(config, algorithm, device, reward, resume, training=training, rollout=rollout, kept=kept)
    except BaseException:
        if reward:
            reward.close()
        raise


def _assemble(
    config: Config, algorithm: Algorithm, device: torch.device, reward: RewardPool | None, resume: Checkpoint | None,
    *, training: bool, rollout: bool, kept: dict[str, Any] | None,
) -> Parts:  # fmt: skip
    tokenizer = load.load_tokenizer(config.model)
    ends = load.end_tokens(config.model, tokenizer)
    train_data, val_data = read_data(config, tokenizer, ends, rollout=rollout, training=training)
    check_sources(config, [data for data in (train_data, val_data) if isinstance(data, PromptSet)])
    model = load.load_model(config.model, device, path=resume.model_folder if resume else None)
    load.check_vocabulary(model, tokenizer)
    layers = verify(model)

    steps_per_epoch = train_data.steps_per_epoch(config.algorithm.prompts_per_step) if training else 1
    total_updates = count_steps(config, steps_per_epoch) * updates_per_step(config)
    optimizer = Optimizer(model, config.train, total_updates) if training else None  # before memory is looked at: it holds moments
    saved = resume.state() if resume and training else None
    facts = Facts(
        device=device.type,
        free_bytes=free_bytes(device),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        cores=THREADS,
        threads_given="OMP_NUM_THREADS" in os.environ,
        context_limit=load.context_limit(model),
        kv_bytes_per_token=bytes_per_token(layers, model.dtype),
        longest=max(train_data.longest, val_data.longest if val_data else 0),
        steps_per_epoch=steps_per_epoch,
    )
    plan = make_plan(config, facts, rollout=rollout, kept=kept)
    torch.set_num_threads(plan.budgets.threads)

    temperature = config.rollout.temperature if rollout and training else 1.0
    actor = Role("actor", model, temperature, optimizer)
    trainer = None
    if optimizer:
        if resume and saved:
            optimizer.restore(resume.tensors(), updates=saved["updates"], skipped=saved["skipped"])
        trainer = Trainer(actor, algorithm.loss, entropy_gradient=algorithm.entropy_gradient)
    ref = load_ref(config, tokenizer, device, temperature) if training and "ref_logprobs" in algorithm.needs else None
    engine = NativeEngine(model, tokenizer, ends, layers, limits(config, plan.budgets)) if rollout else None
    notes = [f"data: {train_data.describe()}", f"data: {train_data.describe_epoch(config.algorithm.prompts_per_step)}"] if training else []
    if val_data:
        notes.append(f"validation data: {val_data.describe()}")
    if reward and not reward.memory_limited:
        notes.append("this system does not limit the memory of reward processes: reward.memory_gb has no effect")
    return Parts(algorithm, plan, tokenizer, train_data, val_data, actor, ref, trainer, engine, reward, digest(train_data), tuple(notes))


def read_data(
    config: Config, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int], *, rollout: bool, training: bool
) -> tuple[PromptSet | RowSet, PromptSet | RowSet | None]:
    def read(paths: str | list[str]) -> PromptSet | RowSet:
        return load_prompts(paths, tokenizer, config.data) if rollout else load_sft(paths, tokenizer, config.data, ends)

    val = read(config.data.val) if config.data.val else None
    if not training and val is not None:
        return val, val
    return read(config.data.train), val


def digest(data: PromptSet | RowSet) -> str:
    """Tells one data set from another by its token ids, in order."""
    found = hashlib.sha256()
    for item in data.items:
        found.update(len(item.ids).to_bytes(8, "little"))
        found.update(item.ids.tobytes())
    return found.hexdigest()


def check_sources(config: Config, sets: list[PromptSet]) -> None:
    """A reward for a data source that no row has is a misspelling: its rows would go to another function."""
    seen = {prompt.data_source for prompts in sets for prompt in prompts.prompts}
    unknown = sorted(set(config.reward.sources) - seen)
    if sets and unknown:
        raise UserError(
            f"reward.sources: no row has the data source {', '.join(map(repr, unknown))}; the data has "
            f"{', '.join(map(repr, sorted(seen)))}. Mend the name or remove it"
        )


def limits(config: Config, budgets: Budgets) -> EngineLimits:
    return EngineLimits(
        blocks=budgets.kv_blocks,
        block_tokens=config.rollout.block_tokens,
        max_seqs=budgets.max_seqs,
        max_batched_tokens=budgets.max_batched_tokens,
        chunked_prefill=config.rollout.chunked_prefill,
        prefix_sharing=config.rollout.prefix_sharing,
    )


def load_ref(config: Config, tokenizer: PreTrainedTokenizerBase, device: torch.device, temperature: float) -> Role:
    """The reference stays what the run started from, also after a resume: it is never loaded from a checkpoint."""
    model = load.load_model(config.model, device, path=config.ref.path)
    verify(model)
    load.check_vocabulary(model, tokenizer)
    return frozen("ref", model, temperature)
