"""One step of a run, watched.

Enters: a configuration. Leaves: a `Step`: the live parts after the step, and what was seen of it: every pass through every role's model,
gradients before each optimizer step, what roles without a gradient said, the samples, the engine's passes, its lines and the metrics.
Guaranteed: parts are assembled and the step is run by the code of a run; what is watched is watched where it happens (at the model, at the
optimizer), so that a setting that is lost on the way shows. Where samples are given, an engine that repeats them stands in for the engine
that draws them: two steps then differ in nothing but their settings.
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
from fulltilt.config import Config
from fulltilt.loop.opening import STATS_INTERVAL_S
from fulltilt.loop.run import Progress, Run
from fulltilt.model.attention import Packed
from fulltilt.model.scalar import ScalarModel
from fulltilt.observe.console import Console
from fulltilt.observe.loggers import open_loggers
from fulltilt.proofs.world import DIGITS, FIRST_DIGIT, Shape, spread_evenly
from fulltilt.records import Group, MicroBatch, Prompt, Sample
from fulltilt.rollout.engine import EngineCaps, NativeEngine
from fulltilt.rollout.sampler import Sampling
from fulltilt.rollout.stats import NO_STATS, EngineStats, Recorder, SeenPass
from fulltilt.train.checkpoint import CheckpointStore
from fulltilt.train.trainer import Trainer


@dataclass(frozen=True)
class ModelPass:
    """One pass of packed samples through a role's model."""

    role: str
    learns: bool  # with gradient
    tokens: int  # pads included
    samples: int


@dataclass(frozen=True)
class EnginePass:
    """One pass of the engine."""

    prefill_tokens: int
    decode_tokens: int
    begun: int  # samples that have drawn before and are not at their end


class WatchedRecorder(Recorder):
    """The engine's own, which also keeps every pass, and has a line to say after each: how many are due must not depend on a clock."""

    def __init__(self) -> None:
        self.seen: list[EnginePass] = []
        self._begun: set[Any] = set()  # samples that have drawn
        super().__init__()

    def add(self, seen: SeenPass) -> None:
        self.seen.append(EnginePass(seen.prefill_tokens, seen.decode_tokens, sum(not sample.finished for sample in self._begun)))
        self._begun.update(seen.drawing)
        super().add(seen)

    def report(self, say: Callable[[str], None], interval: float) -> None:
        super().report(say, 0.0)


class Repeating:
    """An engine whose samples are given."""

    caps = EngineCaps(shares_weights=True, full_softmax_logprobs=True)

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int) -> Iterator[Group]:
        lengths = iter(spread_evenly(self.shape.response, len(prompts) * sampling.samples))
        for prompt in prompts:
            yield Group(prompt, tuple(self._sample(prompt, index, next(lengths)) for index in range(sampling.samples)))

    def _sample(self, prompt: Prompt, index: int, tokens: int) -> Sample:
        random = np.random.default_rng([prompt.uid, index])
        ids = random.integers(FIRST_DIGIT, FIRST_DIGIT + len(DIGITS), tokens)
        text = "".join(DIGITS[token - FIRST_DIGIT] for token in ids)
        return Sample(index, ids, random.normal(-5, 1, tokens).astype(np.float32), "length", text)

    def sync(self, version: int) -> None: ...

    def release(self) -> None: ...

    def stats(self) -> EngineStats:
        return NO_STATS

    def report(self, say: Callable[[str], None], interval: float) -> None: ...

    def close(self) -> None: ...


@dataclass(eq=False)
class Step:
    """What was seen, filled while the step runs."""

    config: Config
    parts: RunParts
    passes: list[ModelPass] = field(default_factory=list)
    micro_batches: dict[tuple[str, bool], list[MicroBatch]] = field(default_factory=dict)  # (role, learns) ->
    gradients: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)  # role -> by optimizer step and parameter
    outputs: dict[str, dict[int, np.ndarray]] = field(default_factory=dict)  # role -> by row: what it said without a gradient
    samples: list[tuple[int, ...]] = field(default_factory=list)
    engine_passes: list[EnginePass] = field(default_factory=list)
    kv_bytes: int = 0  # the most that the engine held while it generated
    lines: list[str] = field(default_factory=list)  # said about the rollout
    metrics: dict[str, float] = field(default_factory=dict)

    def models(self) -> dict[str, Any]:
        """Of each role, as transformers has it."""
        models: dict[str, Any] = {name: role.model for name, role in self.parts.worker.roles.items()}  # type: ignore[attr-defined]
        return {name: model.body if isinstance(model, ScalarModel) else model for name, model in models.items()}

    def of(self, role: str, *, learns: bool) -> list[ModelPass]:
        found = [seen for seen in self.passes if (seen.role, seen.learns) == (role, learns)]
        assert found, f"the {role} made no pass {'with' if learns else 'without'} a gradient"
        return found

    def largest(self, role: str, *, learns: bool) -> MicroBatch:
        return max(self.micro_batches[role, learns], key=lambda micro: len(micro.ids))

    def said(self, role: str) -> np.ndarray:
        """A role's outputs in the order of rows."""
        return np.concatenate([self.outputs[role][row] for row in sorted(self.outputs[role])])


@contextmanager
def watched_step(config: Config, samples_of: Shape | None) -> Iterator[Step]:
    """The step, with its parts until the end. `samples_of`: the shape of the samples that are given; None: the engine draws them."""
    parts = assemble(config)
    try:
        said = io.StringIO()
        console = Console(stdout=said, stderr=said, terminal=False)
        step = Step(config, parts)
        watch(step)
        if parts.worker.engine:
            watch_engine(step, console, samples_of)
        run_step(step, console)
        step.lines += [line for line in said.getvalue().splitlines() if line.startswith("rollout: ")]
        yield step
    finally:
        parts.close()


def run_step(step: Step, console: Console) -> None:
    folder, config = Path(step.config.run.dir), step.config
    folder.mkdir(parents=True)
    with open_loggers(config.log, folder, configuration.snapshot(config), 0) as loggers:
        run = Run(config, step.parts, CheckpointStore(folder / "checkpoints", 1), Progress(), console, loggers)
        console.begin_step(1)
        step.metrics |= run.rl_step(1) if step.parts.worker.engine else run.sft_step(1)
        run.metrics.close()


# ---- watching --------------------------------------------------------------------------------------------------------------------------


def watch(step: Step) -> None:
    for role, model in step.models().items():
        model.base_model.register_forward_pre_hook(partial(see_pass, step, role), with_kwargs=True)
        worker = step.parts.worker.roles[role]
        if (trainer := step.parts.worker.trainers.get(role)) is not None:
            put_in_front(worker, "terms", lambda own, micro, role=role: keep_micro_batch(step, role, own, micro, learns=True))
            put_in_front(trainer.optimizer, "step", lambda own, role=role, trainer=trainer: keep_gradients(step, role, trainer, own))
        put_in_front(worker, "annotate", lambda own, micro, role=role: keep_micro_batch(step, role, own, micro, learns=False))


def put_in_front(owner: Any, name: str, front: Callable[..., Any]) -> None:
    setattr(owner, name, partial(front, getattr(owner, name)))


def see_pass(step: Step, role: str, body: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    context = kwargs.get("fulltilt")
    if isinstance(context, Packed):
        step.passes.append(ModelPass(role, torch.is_grad_enabled(), kwargs["input_ids"].numel(), len(context.cu_seqlens) - 1))


def keep_micro_batch(step: Step, role: str, own: Callable[[MicroBatch], Any], micro: MicroBatch, *, learns: bool) -> Any:
    step.micro_batches.setdefault((role, learns), []).append(micro)
    found = own(micro)
    if not learns:
        rows, numbers = step.outputs.setdefault(role, {}), found.cpu().numpy()
        rows |= {row: numbers[micro.trained_row == place] for place, row in enumerate(micro.rows)}
    return found


def keep_gradients(step: Step, role: str, trainer: Trainer[Any], own: Callable[[], Any]) -> Any:
    """Of an optimizer step, before it clips them and lets them go."""
    kept = step.gradients.setdefault(role, {})
    number = trainer.optimizer.updates
    for name, parameter in trainer.role.model.named_parameters():  # type: ignore[attr-defined]
        gradient = getattr(parameter, "main_grad", parameter.grad)
        if gradient is not None:
            kept[f"{number}/{name}"] = gradient.detach().cpu().clone()
    return own()


def watch_engine(step: Step, console: Console, samples_of: Shape | None) -> None:
    engine = step.parts.worker.engine
    assert isinstance(engine, NativeEngine)
    recorder = WatchedRecorder()
    engine.recorder, step.engine_passes = recorder, recorder.seen
    step.parts.worker.report_rollout(console.note, STATS_INTERVAL_S)
    if samples_of is not None:
        step.parts.worker.engine = Repeating(samples_of)
    put_in_front(step.parts.worker.engine, "generate", lambda own, *given: keep_samples(step, engine, own(*given)))


def keep_samples(step: Step, engine: NativeEngine, groups: Iterator[Group]) -> Iterator[Group]:
    found: dict[int, Group] = {}
    for group in groups:
        found[group.prompt.uid] = group
        step.kv_bytes = max(step.kv_bytes, engine.runner.held_bytes)
        yield group
    step.samples += [tuple(sample.ids.tolist()) for uid in sorted(found) for sample in found[uid].samples]
