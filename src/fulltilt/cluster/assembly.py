"""Assembly of a run: training, with rewards or supervised, evaluation, or generation alone.

Enters: a configuration, and the checkpoint to resume from if any. Leaves: `RunParts`, loaded, verified and planned, with the workers that
hold everything on devices. Guaranteed: mistakes in reward, data and model are found in that order (cheapest first) before anything is
written.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from fulltilt.algo.base import Algorithm
from fulltilt.algo.build import build
from fulltilt.cluster.checks import (
    RunData,
    TextFacts,
    check_lengths,
    check_truths,
    choose_device,
    commits_of_models,
    model_paths,
    open_address,
    read_training_data,
    read_validation_data,
    refuse,
    wrong_models,
    wrong_rollout,
    wrong_settings,
    wrong_workers,
)
from fulltilt.cluster.crew import Crew
from fulltilt.cluster.hosts import Hosts
from fulltilt.cluster.loading import load_models
from fulltilt.cluster.local import Local
from fulltilt.cluster.making import WorkerOrder, be_deterministic, load_worker, make_worker
from fulltilt.cluster.probing import Probe
from fulltilt.cluster.samples import Samples, SamplesHere, SamplesThere
from fulltilt.cluster.service import start_on_ray, start_processes
from fulltilt.cluster.worker import Worker
from fulltilt.commits import at_commits
from fulltilt.data.order import InEpochs
from fulltilt.data.prompts import PromptSet
from fulltilt.data.sft import RowSet
from fulltilt.model import load, lora
from fulltilt.plan.legal import count_workers, settings_without_effect
from fulltilt.plan.make import Plan
from fulltilt.records import Prompt, Row, RunWarning
from fulltilt.reward.base import RewardPool
from fulltilt.schema import Config
from fulltilt.training.checkpoint import Checkpoint
from fulltilt.words import joined, many

StartHosts = Callable[[WorkerOrder, torch.device, int], Hosts]  # starts this many workers on this machine


@dataclass(frozen=True, eq=False)
class RunParts:
    """A run, ready for its first step: the parts that decide, and the workers that compute."""

    algorithm: Algorithm
    plan: Plan
    train_data: InEpochs[Prompt] | InEpochs[Row]
    val_data: PromptSet | RowSet | None
    data_digest: str  # identifies the training data by its tokens
    val_digest: str | None  # the same for the validation data
    samples: Samples | None  # None: nothing is sampled (SFT)
    crew: Crew
    commits: Mapping[str, str]  # by hub name of a model, the commit that all workers have read
    notes: tuple[str, ...]  # about the data, the models and the checkpoint, for the console

    @property
    def worker(self) -> Worker:
        """The only worker, of a run in this process."""
        return self.crew.worker

    def close(self) -> None:
        try:
            if self.samples:
                self.samples.close()
        finally:
            self.crew.close()


@contextlib.contextmanager
def torch_as_it_was() -> Iterator[None]:
    """Undo a run's changes to torch's own settings, so that the process's next run and its own code compute as before: the number of
    threads, deterministic kernels, and oneDNN, which torch turns off for good where it has no kernel for a dtype."""
    threads, debug_mode, onednn = torch.get_num_threads(), torch.get_deterministic_debug_mode(), torch.backends.mkldnn.enabled
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(debug_mode)
        torch.backends.mkldnn.set_flags(onednn)


def assemble(
    config: Config, resume: Checkpoint | None = None, *, kept: dict[str, Any] | None = None, start: StartHosts | None = None,
    probe: Probe | None = None, before: int | None = None,
) -> RunParts:  # fmt: skip
    """Assemble a training run. `kept`: the budgets of an earlier plan, to compute in the same shapes and get the same bits. `start`: starts
    several workers on this machine, if not as new processes. `probe`: measures updates on the device. `before`: as in a `WorkerOrder`."""
    if before and not config.cluster.address and count_workers(config, choose_device(config.run.device).type) == 1:
        # The only device left: its worker may be lost too, and only a worker in its own process can be started again.
        config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"processes": True})})
    algorithm = build(config)
    device = open_device(config, wrong_settings(config, algorithm, choose_device(config.run.device).type))
    roles = ("actor", *(["critic"] if algorithm.value_loss else []), *(["ref"] if "ref_logprobs" in algorithm.needs else []))
    return put_together(config, algorithm, device, read_training_data, roles, resume, kept, start, probe, before=before)


def assemble_evaluation(config: Config, resume: Checkpoint | None = None) -> RunParts:
    """Assemble the parts that validation needs: no role learns, and settings that only training would refuse become notes."""
    algorithm = build(config)
    kind = choose_device(config.run.device).type
    device = open_device(config, [*wrong_rollout(config, kind), *wrong_workers(config, algorithm, kind)])
    parts = put_together(config, algorithm, device, read_validation_data, (), resume, None)
    refused = (f"a training run would be refused: {text}" for text in settings_without_effect(config, algorithm, device.type))
    return replace(parts, notes=(*parts.notes, *refused))


def on_one_worker(config: Config) -> Config:
    """Return the configuration without settings that only several workers obey."""
    own = {"sequence_parallel": 1, "tensor_parallel": None, "expert_parallel": None}
    alone = {name: getattr(config, name).model_copy(update=own) for name in ("ref", "critic", "reward_model")}
    train = config.train.model_copy(update={"sequence_parallel": 1, "tensor_parallel": 1, "expert_parallel": 1})
    rollout = config.rollout.model_copy(update={"tensor_parallel": 1, "expert_parallel": "auto"})
    return config.model_copy(update={**alone, "train": train, "rollout": rollout})


def assemble_generation(config: Config, tokenizer: PreTrainedTokenizerBase, longest: int, resume: Checkpoint | None = None) -> Crew:
    """Make a worker that only samples, from prompts of at most `longest` tokens: no data, no reward, no role that learns."""
    config, algorithm = on_one_worker(config), build(config)
    device = open_device(config, wrong_rollout(config, choose_device(config.run.device).type))
    check_lengths(config, algorithm, longest)
    if config.lora.rank:
        lora.require_peft()
    models = load_models(config, (), tokenizer, device, None, resume, sampled=True)
    texts = TextFacts(tokenizer, load.end_tokens(config.model, tokenizer), longest, steps_per_epoch=1)
    return Crew(config, algorithm, Local(make_worker(config, algorithm, device, models, texts, (), resume)))


def open_device(config: Config, mistakes: Iterable[str]) -> torch.device:
    """Choose the device of a run, after refusing `mistakes` in its settings before anything loads."""
    device = choose_device(config.run.device)
    refuse(mistakes)
    if config.run.deterministic and device.type == "cuda":
        be_deterministic()
    return device


def put_together(
    config: Config, algorithm: Algorithm, device: torch.device, read: Callable[[Config, Algorithm], RunData], roles: Collection[str],
    resume: Checkpoint | None, kept: dict[str, Any] | None, start: StartHosts | None = None, probe: Probe | None = None, *,
    before: int | None = None,
) -> RunParts:  # fmt: skip
    """Assemble the parts of a run. `roles`: the roles of a training run; empty if nothing learns."""
    open_address(config, device.type)
    paths = model_paths(config, algorithm, learns=bool(roles))
    with contextlib.ExitStack() as on_error, contextlib.ExitStack() as pinned:
        reward = RewardPool(config.reward, Path(config.run.dir), write_errors=bool(roles)) if "rollout" in algorithm.needs else None
        if reward:
            on_error.callback(reward.close)
        if config.lora.rank:
            lora.require_peft()
        commits = commits_of_models(config, paths)  # asks the hub, after all mistakes here have been reported
        pinned.enter_context(at_commits(commits))
        refuse(wrong_models(config, paths))
        data = read(config, algorithm)
        truths = check_truths(data, reward) if reward else []
        order = WorkerOrder(config, tuple(roles), TextFacts(data.tokenizer, data.ends, data.longest, data.steps_per_epoch), data.encoder)
        order = replace(order, sampled=reward is not None, resume=resume, kept=kept, writer=data.encoder, probe=probe)
        order = replace(order, commits=commits, before=before)
        crew = gather_crew(order, algorithm, device, paths, start)
        on_error.callback(crew.close)
        notes = (*data.notes, *truths, *describe(config, reward), *crew.notes)
        digests = data.train.digest(), data.val.digest() if data.val else None
        samples: Samples | None = SamplesHere(config, algorithm, crew, reward, data.encoder) if reward else None
        if reward and crew.holds_samples:
            reward.close()  # the workers have their own processes
            samples = SamplesThere(config, algorithm, crew, data.encoder, write_errors=bool(roles))
        parts = RunParts(algorithm, crew.plan, data.train, data.val, *digests, samples, crew, commits, notes)
        on_error.pop_all()
        return parts


def describe(config: Config, reward: RewardPool | None) -> Iterator[str]:
    if reward and "function" not in config.reward.model_fields_set and not config.reward.sources:
        yield f"reward: {config.reward.function}, because reward.function is not set"
    if reward and reward.hidden:
        yield f"the reward's file mentions environment variables: {reward.hidden}, if the reward needs them"
    if reward and not reward.memory_limited:
        yield "this system does not limit the memory of reward processes: reward.memory_gb has no effect"
    if reward and reward.lacking:
        yield f"this kernel does not keep reward functions from what reward.sandbox forbids: they could {joined(reward.lacking, 'and')}"


def gather_crew(order: WorkerOrder, algorithm: Algorithm, device: torch.device, paths: Mapping[str, str], start: StartHosts | None) -> Crew:
    """Make the workers that the configuration asks for, each with its models loaded. `paths`: the settings that name models."""
    hosts = open_hosts(order, algorithm, device, paths, start)
    try:
        crew = Crew(order.config, algorithm, hosts)
    except BaseException:
        hosts.close()
        raise
    if (before := order.before or 0) > hosts.size:
        warnings.warn(
            f"the run resumes with {many(hosts.size, 'worker')}, of {before} before: cluster.workers is auto, and fewer GPUs are left. A "
            "step takes longer, sizes are planned again, and sums over workers differ in their last bits",
            RunWarning,
            stacklevel=2,
        )
    return crew


def open_hosts(order: WorkerOrder, algorithm: Algorithm, device: torch.device, paths: Mapping[str, str], start: StartHosts | None) -> Hosts:
    if order.config.cluster.address:
        return start_on_ray(order, device, paths)
    size = count_workers(order.config, device.type)
    size = min(size, order.before or size)  # a restart has no more workers than before
    apart = size > 1 or order.config.cluster.processes
    return (start or start_processes)(order, device, size) if apart else Local(load_worker(order, algorithm, device))
