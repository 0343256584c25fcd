"""One step of a run, watched.

Enters: a configuration. Leaves: a `WatchedStep`: the loaded parts after the step, and what was seen of it: every pass through every role's
model, gradients before each optimizer step, outputs of roles without a gradient, the samples, the engine's passes, its lines in the log,
and the metrics. Guaranteed: parts are assembled and the step is run by the code of a run; everything is watched where it happens (at the
model, at the optimizer), so that a setting that is lost on the way shows; what is measured after the step is not counted as part of it.
Where samples are given, the engine hands them out instead of drawing its own: two steps then differ only in their settings.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fulltilt import config as configuration
from fulltilt.cluster.assembly import RunParts, assemble
from fulltilt.cluster.worker import Worker
from fulltilt.config import Config
from fulltilt.loop.opening import STATS_INTERVAL_S
from fulltilt.loop.run import Progress, Run
from fulltilt.model.attention import Packed
from fulltilt.model.scalar import ScalarModel
from fulltilt.observe.console import Console
from fulltilt.observe.loggers import open_loggers
from fulltilt.proofs.setup import DIGITS, FIRST_DIGIT, spread_evenly
from fulltilt.records import Group, MicroBatch, Prompt, Sample
from fulltilt.rollout.engines.native import NativeEngine
from fulltilt.rollout.stats import EngineStats, Recorder
from fulltilt.train.checkpoint import CheckpointStore
from fulltilt.train.trainer import Trainer


@dataclass(frozen=True)
class ModelPass:
    """One pass of packed samples through a role's model."""

    role: str
    learns: bool  # with gradient
    tokens: int  # pads included
    sample_tokens: int
    samples: int


@dataclass(frozen=True)
class EnginePass:
    """One pass of the engine."""

    prefill_tokens: int
    decode_tokens: int
    begun: int  # samples that have drawn a token before and have not ended


@dataclass(eq=False)
class WatchedStep:
    """Filled while the step runs."""

    config: Config
    parts: RunParts
    recording: bool = True
    passes: list[ModelPass] = field(default_factory=list)
    micro_batches: dict[tuple[str, bool], list[MicroBatch]] = field(default_factory=dict)  # (role, learns) ->
    results: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)  # role -> gradients, or outputs if it does not learn
    samples: list[tuple[int, ...]] = field(default_factory=list)
    engine_passes: list[EnginePass] = field(default_factory=list)
    kv_bytes: int = 0  # the most that the engine held while it generated
    lines: list[str] = field(default_factory=list)  # about the rollout
    metrics: dict[str, float] = field(default_factory=dict)

    def models(self) -> dict[str, Any]:
        """The model of each role, as transformers has it."""
        models: dict[str, Any] = {name: role.model for name, role in self.parts.worker.roles.items()}  # type: ignore[attr-defined]
        return {name: model.body if isinstance(model, ScalarModel) else model for name, model in models.items()}

    def worker_for(self, role: str) -> Worker:
        """The worker; the role's parameters are on the device from here on."""
        self.parts.worker.residents.need(role)
        return self.parts.worker

    def passes_of(self, role: str, *, learns: bool) -> list[ModelPass]:
        found = [seen for seen in self.passes if (seen.role, seen.learns) == (role, learns)]
        assert found, f"the {role} made no pass {'with' if learns else 'without'} a gradient"
        return found

    def largest(self, role: str, *, learns: bool) -> MicroBatch:
        return max(self.micro_batches[role, learns], key=lambda micro: len(micro.ids))


@contextmanager
def watched_step(config: Config, responses: tuple[int, int] | None) -> Iterator[WatchedStep]:
    """The step; its parts stay loaded until the end of the context. `responses`: fewest and most tokens of the samples that are given;
    None: the engine draws them."""
    parts = assemble(config)
    try:
        log = io.StringIO()
        console = Console(stdout=log, stderr=log, terminal=False)
        step = WatchedStep(config, parts)
        watch_roles(step)
        if parts.worker.engine:
            watch_engine(step, console, responses)
        run_step(step, console)
        step.recording = False
        step.lines += [line for line in log.getvalue().splitlines() if line.startswith("rollout: ")]
        yield step
    finally:
        parts.close()


def run_step(step: WatchedStep, console: Console) -> None:
    folder, config = Path(step.config.run.dir), step.config
    folder.mkdir(parents=True)
    with open_loggers(config.log, folder, configuration.snapshot(config), 0) as loggers:
        run = Run(config, step.parts, CheckpointStore(folder / "checkpoints", 1), Progress(), console, loggers)
        console.begin_step(1)
        step.metrics |= run.rl_step(1) if step.parts.worker.engine else run.sft_step(1)
        run.metrics.close()


# ---- roles -----------------------------------------------------------------------------------------------------------------------------


def watch_roles(step: WatchedStep) -> None:
    for role, model in step.models().items():
        model.base_model.register_forward_pre_hook(partial(see_pass, step, role), with_kwargs=True)
        annotator, trainer = step.parts.worker.roles[role], step.parts.worker.trainers.get(role)
        put_in_front(annotator, "annotate", partial(see_micro_batch, step, role, learns=False))
        if trainer is None:
            put_in_front(annotator, "annotate", partial(keep_outputs, step, role))
        else:
            put_in_front(annotator, "terms", partial(see_micro_batch, step, role, learns=True))
            put_in_front(trainer.optimizer, "step", partial(keep_gradients, step, role, trainer))


def put_in_front(owner: Any, name: str, front: Callable[..., Any]) -> None:
    setattr(owner, name, partial(front, getattr(owner, name)))


def see_micro_batch(step: WatchedStep, role: str, own: Callable[[MicroBatch], Any], micro: MicroBatch, *, learns: bool) -> Any:
    if step.recording:
        step.micro_batches.setdefault((role, learns), []).append(micro)
    return own(micro)


def see_pass(step: WatchedStep, role: str, body: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    context, learns = kwargs.get("fulltilt"), torch.is_grad_enabled()
    if step.recording and isinstance(context, Packed):
        micro = step.micro_batches[role, learns][-1]  # the one that is being run
        sample_tokens = len(micro.ids) - micro.pad_tokens
        step.passes.append(ModelPass(role, learns, kwargs["input_ids"].numel(), sample_tokens, len(context.cu_seqlens) - 1))


def keep_outputs(step: WatchedStep, role: str, own: Callable[[MicroBatch], Any], micro: MicroBatch) -> Any:
    outputs = own(micro)
    if step.recording:
        numbers, kept = outputs.cpu(), step.results.setdefault(role, {})
        kept |= {str(row): numbers[torch.as_tensor(micro.trained_row == place)] for place, row in enumerate(micro.rows)}
    return outputs


def keep_gradients(step: WatchedStep, role: str, trainer: Trainer, own: Callable[[], Any]) -> Any:
    """The gradients of an optimizer step, before it clips and drops them."""
    kept = step.results.setdefault(role, {})
    for name, parameter in trainer.role.model.named_parameters():  # type: ignore[attr-defined]
        gradient = getattr(parameter, "main_grad", parameter.grad)
        if gradient is not None:
            kept[f"{trainer.optimizer.updates}/{name}"] = gradient.detach().cpu().clone()
    return own()


# ---- the engine ------------------------------------------------------------------------------------------------------------------------


class WatchedRecorder(Recorder):
    """The engine's own recorder, which also keeps every pass, and logs a line after each: their number must not depend on a clock."""

    def __init__(self, step: WatchedStep) -> None:
        self._step = step
        self._begun: set[Any] = set()  # samples that have drawn a token
        super().__init__()

    def add_pass(self, seen: EngineStats, begin: float, end: float, drawing: Sequence[Any], drawn: int) -> None:
        if self._step.recording:
            begun = sum(not sample.finish for sample in self._begun)
            self._step.engine_passes.append(EnginePass(seen.prefill_tokens, seen.decode_tokens, begun))
        self._begun.update(drawing)
        super().add_pass(seen, begin, end, drawing, drawn)

    def report(self, say: Callable[[str], None], interval: float) -> None:
        super().report(say, 0.0)


def watch_engine(step: WatchedStep, console: Console, responses: tuple[int, int] | None) -> None:
    engine = step.parts.worker.engine
    assert isinstance(engine, NativeEngine)
    engine.recorder = WatchedRecorder(step)
    step.parts.worker.report_rollout(console.note, STATS_INTERVAL_S)
    if responses is not None:
        put_in_front(engine, "generate", lambda own, prompts, sampling, seed: given_groups(prompts, sampling.samples, responses))
    put_in_front(engine, "generate", lambda own, *given: keep_samples(step, engine, own(*given)) if step.recording else own(*given))


def given_groups(prompts: Sequence[Prompt], samples: int, responses: tuple[int, int]) -> Iterator[Group]:
    """Samples of random digits from fixed seeds, which no model has drawn."""
    lengths = iter(spread_evenly(responses, len(prompts) * samples))
    for place, prompt in enumerate(prompts):
        yield Group(prompt, tuple(given_sample(prompt, index, next(lengths)) for index in range(samples)), place)


def given_sample(prompt: Prompt, index: int, tokens: int) -> Sample:
    random = np.random.default_rng([prompt.uid, index])
    ids = random.integers(FIRST_DIGIT, FIRST_DIGIT + len(DIGITS), tokens)
    text = "".join(DIGITS[token - FIRST_DIGIT] for token in ids)
    return Sample(index, ids, random.normal(-5, 1, tokens).astype(np.float32), "length", text)


def keep_samples(step: WatchedStep, engine: NativeEngine, groups: Iterator[Group]) -> Iterator[Group]:
    found: dict[int, Group] = {}
    for group in groups:
        found[group.prompt.uid] = group
        step.kv_bytes = max(step.kv_bytes, engine.runner.held_bytes)
        yield group
    step.samples += [tuple(sample.ids.tolist()) for uid in sorted(found) for sample in found[uid].samples]
