"""One step of a run, watched.

Enters: a configuration. Leaves: a `WatchedStep`: the loaded parts after the step, and its records: every pass through every role's model,
gradients before each optimizer step, outputs of roles without a gradient, the samples, the engine's passes, its lines in the log, and the
metrics. Guaranteed: parts are assembled and the step is run by the code of a run; everything is watched where it happens (at the model, at
the optimizer), so that a lost setting is noticed; measurements after the step are not counted as part of it. If samples are given, the
engine returns them instead of drawing its own: two steps then differ only in their settings. Workers in other processes cannot be watched:
if their number is set, also to one, gradients are taken from the step's checkpoint.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fulltilt.cluster.assembly import RunParts, StartHosts, assemble
from fulltilt.cluster.keeper import SHARE_DEVICES
from fulltilt.cluster.worker import CRITIC_TENSORS, Worker
from fulltilt.loop.run import Progress, Run
from fulltilt.model.attention import Packed
from fulltilt.model.scalar import ScalarModel
from fulltilt.observe.console import Console
from fulltilt.observe.loggers import Loggers
from fulltilt.proofs.setup import DIGITS, FIRST_DIGIT, spread_evenly
from fulltilt.records import Group, MicroBatch, Prompt, Sample
from fulltilt.rollout.engines.native import NativeEngine
from fulltilt.rollout.stats import EngineStats
from fulltilt.schema import Config
from fulltilt.training.checkpoint import CheckpointStore
from fulltilt.training.trainer import Trainer


@dataclass(frozen=True)
class ModelPass:
    """One pass of a micro-batch through a role's model, as the model saw it."""

    micro: MicroBatch
    tokens: int  # padding included
    samples: int


@dataclass(eq=False)
class WatchedStep:
    """Records of a step, filled while it runs."""

    parts: RunParts
    recording: bool = True
    current: MicroBatch | None = None  # the micro-batch that is running
    passes: dict[tuple[str, bool], list[ModelPass]] = field(default_factory=dict)  # passes by (role, whether it trains on them)
    results: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)  # role -> gradients, or outputs if it does not learn
    samples: list[tuple[int, ...]] = field(default_factory=list)
    engine_passes: list[tuple[EngineStats, int]] = field(default_factory=list)  # and the samples that have begun, but not ended, before it
    kv_bytes: int = 0  # most bytes that the engine held while it generated
    log: io.StringIO = field(default_factory=io.StringIO)  # output of the console
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def engine(self) -> NativeEngine:
        assert isinstance(self.parts.worker.engine, NativeEngine)
        return self.parts.worker.engine

    def models(self) -> dict[str, Any]:
        """Return the model of each role, as transformers has it."""
        models: dict[str, Any] = {name: role.model for name, role in self.parts.worker.roles.items()}  # type: ignore[attr-defined]
        return {name: model.body if isinstance(model, ScalarModel) else model for name, model in models.items()}

    def worker_for(self, role: str) -> Worker:
        """Return the worker; the role's parameters are on the device from here on."""
        self.parts.worker.residents.need(role)
        return self.parts.worker

    def largest(self, role: str, *, learns: bool) -> MicroBatch:
        return max((seen.micro for seen in self.passes[role, learns]), key=lambda micro: len(micro.ids))


@contextmanager
def watched_step(config: Config, responses: tuple[int, int] | None, start: StartHosts | None = None) -> Iterator[WatchedStep]:
    """Run the step; its parts stay loaded until the end of the context. `responses`: fewest and most tokens of the given samples; None: the
    engine draws them. `start`: the function that starts several workers, if not new processes."""
    with devices_shared():
        parts = assemble(config, start=start)
    try:
        step = WatchedStep(parts)
        console = Console(stdout=step.log, stderr=step.log, terminal=False)
        counted = config.cluster.workers != "auto"
        if not counted:
            watch_roles(step)
            if parts.worker.engine:
                watch_engine(step, console, responses)
        store = CheckpointStore(Path(config.run.dir, "checkpoints"), 1)
        run = Run(config, parts, store, Progress(), console, Loggers(console.warn))
        console.begin_step(1)
        step.metrics |= run.rl_step(1) if parts.samples else run.sft_step(1)
        if counted:
            run.save()
            prefixes = {"actor": "", **({"critic": CRITIC_TENSORS} if parts.algorithm.value_loss else {})}
            step.results |= {role: first_moments(store, f"{prefix}exp_avg/") for role, prefix in prefixes.items()}
        run.metrics.close()
        step.recording = False
        yield step
    finally:
        parts.close()


@contextmanager
def devices_shared() -> Iterator[None]:
    """Let several workers share a device: their results are the same, and their speed is not measured."""
    before = os.environ.get(SHARE_DEVICES)
    os.environ[SHARE_DEVICES] = "1"
    try:
        yield
    finally:
        del os.environ[SHARE_DEVICES]
        os.environ |= {SHARE_DEVICES: before} if before is not None else {}


def first_moments(store: CheckpointStore, prefix: str) -> dict[str, torch.Tensor]:
    """Return the decaying sums of a role's gradients in the step, from its checkpoint, whichever workers have written it."""
    found = store.latest()
    assert found is not None
    with found.open() as saved:
        own = saved.select(prefix)
        return {name: own.numbers(name, 0, own.size(name)).clone() for name in own.names()}


# ---- roles -----------------------------------------------------------------------------------------------------------------------------


def watch_roles(step: WatchedStep) -> None:
    for role, model in step.models().items():
        model.base_model.register_forward_pre_hook(partial(see_pass, step, role), with_kwargs=True)
        annotator, trainer = step.parts.worker.roles[role], step.parts.worker.trainers.get(role)
        put_in_front(annotator, "annotate", partial(see_micro_batch, step))
        if trainer is None:
            put_in_front(annotator, "annotate", partial(keep_outputs, step, role))
        else:
            put_in_front(annotator, "terms", partial(see_micro_batch, step))
            put_in_front(trainer.optimizer, "step", partial(keep_gradients, step, role, trainer))


def put_in_front(owner: Any, name: str, front: Callable[..., Any]) -> None:
    setattr(owner, name, partial(front, getattr(owner, name)))


def see_micro_batch(step: WatchedStep, own: Callable[[MicroBatch], Any], micro: MicroBatch) -> Any:
    step.current = micro
    return own(micro)


def see_pass(step: WatchedStep, role: str, body: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    context = kwargs.get("fulltilt")
    if step.recording and isinstance(context, Packed):
        assert step.current is not None
        seen = ModelPass(step.current, kwargs["input_ids"].numel(), len(context.cu_seqlens) - 1)
        step.passes.setdefault((role, torch.is_grad_enabled()), []).append(seen)


def keep_outputs(step: WatchedStep, role: str, own: Callable[[MicroBatch], Any], micro: MicroBatch) -> Any:
    outputs = own(micro)
    if step.recording:
        numbers, kept = outputs.cpu(), step.results.setdefault(role, {})
        kept |= {str(row): numbers[torch.as_tensor(micro.trained_row == place)] for place, row in enumerate(micro.rows)}
    return outputs


def keep_gradients(step: WatchedStep, role: str, trainer: Trainer, own: Callable[..., Any], *, failed: bool = False) -> Any:
    """Keep the gradients of an optimizer step, before it clips and drops them."""
    kept = step.results.setdefault(role, {})
    for name, parameter in trainer.role.model.named_parameters():  # type: ignore[attr-defined]
        gradient = getattr(parameter, "main_grad", parameter.grad)
        if gradient is not None:
            kept[f"{trainer.optimizer.updates}/{name}"] = gradient.detach().cpu().clone()
    return own(failed=failed)


# ---- the engine ------------------------------------------------------------------------------------------------------------------------


def watch_engine(step: WatchedStep, console: Console, responses: tuple[int, int] | None) -> None:
    engine = step.engine
    put_in_front(engine.recorder, "add_pass", partial(see_engine_pass, step, set()))
    step.parts.worker.report_rollout(console.note, 0.0)  # a report after each pass: the number of lines must not depend on a clock
    if responses is not None:
        put_in_front(engine, "generate", lambda own, prompts, sampling, seed: given_groups(prompts, sampling.samples, responses))
    put_in_front(engine, "generate", lambda own, *given: keep_samples(step, own(*given)) if step.recording else own(*given))


def see_engine_pass(step: WatchedStep, begun: set[Any], own: Callable[..., None], seen: EngineStats, *times_and_drawing: Any) -> None:
    """Record a pass of the engine. `begun`: the samples that have drawn a token."""
    if step.recording:
        step.engine_passes.append((seen, sum(not sample.finish for sample in begun)))
    _, _, drawing, _ = times_and_drawing
    begun.update(drawing)
    own(seen, *times_and_drawing)


def given_groups(prompts: Sequence[Prompt], samples: int, responses: tuple[int, int]) -> Iterator[Group]:
    """Yield samples of random digits from fixed seeds, which no model has drawn."""
    lengths = iter(spread_evenly(responses, len(prompts) * samples))
    for place, prompt in enumerate(prompts):
        group = []
        for index in range(samples):
            tokens = next(lengths)
            random = np.random.default_rng([prompt.uid, index])
            ids = random.integers(FIRST_DIGIT, FIRST_DIGIT + len(DIGITS), tokens)
            text = "".join(DIGITS[token - FIRST_DIGIT] for token in ids)
            group.append(Sample(index, ids, random.normal(-5, 1, tokens).astype(np.float32), "length", text))
        yield Group(prompt, tuple(group), place)


def keep_samples(step: WatchedStep, groups: Iterator[Group]) -> Iterator[Group]:
    found: dict[int, Group] = {}
    for group in groups:
        found[group.prompt.uid] = group
        step.kv_bytes = max(step.kv_bytes, step.engine.runner.held_bytes)
        yield group
    step.samples += [tuple(sample.ids.tolist()) for uid in sorted(found) for sample in found[uid].samples]
