"""The numbers that proofs are made of, read from a step that has just run.

Enters: a `Step` whose parts are still there. Leaves: bytes, counts and shares; never a time. Guaranteed: what a pass through a model takes
is measured on a pass of the role itself, with all that its settings have put onto it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fulltilt.bench.device import kernels_of
from fulltilt.bench.native import synchronize
from fulltilt.loop.experience import training_sampling
from fulltilt.memory.account import gradients_of
from fulltilt.memory.activations import saved_bytes
from fulltilt.observe.metrics import TIMING_NAMES
from fulltilt.proofs.record import What
from fulltilt.proofs.step import Step
from fulltilt.rollout.engine import NativeEngine
from fulltilt.train.trainer import Trainer

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cuGraphLaunch")


# ---- batches ---------------------------------------------------------------------------------------------------------------------------


def passes(*, learns: bool) -> str:
    return "update" if learns else "without gradient"


def micro_batches(role: str, *, learns: bool) -> What:
    return What(f"micro-batches, {passes(learns=learns)}", "micro-batches", lambda step: len(step.of(role, learns=learns)))


def most_tokens(role: str, *, learns: bool) -> What:
    name = f"most tokens of a micro-batch, {passes(learns=learns)}"
    return What(name, "tokens", lambda step: max(seen.tokens for seen in step.of(role, learns=learns)))


def most_samples(role: str, *, learns: bool) -> What:
    name = f"most samples of a micro-batch, {passes(learns=learns)}"
    return What(name, "samples", lambda step: max(seen.samples for seen in step.of(role, learns=learns)))


def sizes(role: str, *, learns: bool) -> What:
    name = f"different numbers of samples in micro-batches, {passes(learns=learns)}"
    return What(name, "samples", lambda step: len({seen.samples for seen in step.of(role, learns=learns)}))


def pad_tokens(role: str, *, learns: bool) -> What:
    """Tokens that went through the model beyond those of the samples."""

    def read(step: Step) -> int:
        real = sum(len(micro.ids) - micro.pad_tokens for micro in step.micro_batches[role, learns])
        return sum(seen.tokens for seen in step.of(role, learns=learns)) - real

    return What(f"pad tokens computed, {passes(learns=learns)}", "tokens", read)


# ---- memory ----------------------------------------------------------------------------------------------------------------------------


def held(kind: str, phase: str) -> What:
    """Bytes of a kind on the device at the end of a phase, by the run's own account."""
    name = {"parameters": "parameters", "optimizer": "optimizer states", "kv": "KV cache"}[kind]
    metric = f"memory_gib/{TIMING_NAMES[phase]}/{kind}"
    return What(f"{name} on the device, {phase}", "bytes", lambda step: round(step.metrics[metric] * 2**30))


def gradient_bytes(role: str) -> What:
    """Of the role's gradients after the step, when no update is made."""
    name = "gradients on the device, outside the update"
    return What(name, "bytes", lambda step: sum(gradient.nbytes for gradient in gradients_of(step.models()[role])))


def activations(role: str) -> What:
    """Bytes that autograd keeps for the backward pass of the largest micro-batch."""

    def read(step: Step) -> int:
        micro, learner = step.largest(role, learns=True), working(step, role).role
        return saved_bytes(lambda: learner.terms(micro))

    return What("activations kept for the backward pass", "bytes", read)


def between_passes(role: str) -> What:
    """Bytes on a CUDA device that the forward pass of the largest micro-batch has left there for its backward pass."""

    def read(step: Step) -> int:
        micro, trainer = step.largest(role, learns=True), working(step, role)
        with forgotten(trainer):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            loss = trainer.loss(trainer.role.terms(micro)).loss
            torch.cuda.synchronize()
            left = torch.cuda.memory_allocated() - before
            loss.backward()  # type: ignore[no-untyped-call]
        return left

    return What("activations on the device between forward and backward", "bytes", read)


def working(step: Step, role: str) -> Trainer[Any]:
    """The trainer of a role that learns, which is on the device from here on."""
    trainer = step.parts.worker.trainers[role]
    step.parts.worker.residents.need(role)
    return trainer


@contextlib.contextmanager
def forgotten(trainer: Trainer[Any]) -> Iterator[None]:
    """Around a backward pass whose gradients are nobody's."""
    trainer.optimizer.prepare()
    try:
        yield
    finally:
        trainer.optimizer.zero_grad()


# ---- the head --------------------------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The largest tensor as wide as the vocabulary that is made in the head: between the end of the body's forward pass and the beginning
    of its backward pass. And the largest result of a softmax, which is the entropy's where the head is not fused."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.of_all = self.of_softmax = 0
        self._inside = False
        weight = model.get_output_embeddings().weight
        self._vocabulary, self._weight = len(weight), set(weight.shape)  # its own shape, either way round, is no temporary's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else (result,):
            if self._inside and isinstance(part, torch.Tensor) and self._vocabulary in part.shape and set(part.shape) != self._weight:
                self.of_all = max(self.of_all, part.nbytes)
                if func is torch.ops.aten._softmax.default:
                    self.of_softmax = max(self.of_softmax, part.nbytes)
        return result

    def enter(self, body: Any, args: Any, output: Any) -> None:
        self._inside = True
        if output.last_hidden_state.requires_grad:
            output.last_hidden_state.register_hook(self.leave)

    def leave(self, gradient: torch.Tensor) -> None:
        self._inside = False


def watched_head(step: Step, role: str) -> Largest:
    """Of the largest micro-batch: forward and backward where the role learns."""
    model = step.models()[role]
    seen = Largest(model)
    hook = model.base_model.register_forward_hook(seen.enter)
    try:
        if role not in step.parts.worker.trainers:
            step.parts.worker.residents.need(role)
            with seen:
                step.parts.worker.roles[role].annotate(step.largest(role, learns=False))
        else:
            trainer = working(step, role)
            with forgotten(trainer), seen:
                trainer.loss(trainer.role.terms(step.largest(role, learns=True))).loss.backward()  # type: ignore[no-untyped-call]
    finally:
        hook.remove()
    return seen


def head_temporary(role: str) -> What:
    return What("largest temporary of the head", "bytes", lambda step: watched_head(step, role).of_all)


def entropy_temporary(role: str) -> What:
    return What("largest temporary of the entropy", "bytes", lambda step: watched_head(step, role).of_softmax)


# ---- layers ----------------------------------------------------------------------------------------------------------------------------


def kernels(role: str) -> What:
    """On CUDA."""
    return What("kernels of a layer", "kernels", per_layer(role, lambda name: not name.startswith(("Memcpy", "Memset"))))


def products(role: str) -> What:
    """On a CPU."""
    return What("matrix products of a layer", "operations", per_layer(role, lambda name: name in PRODUCTS))


def operations(role: str) -> What:
    """On a CPU."""
    return What("operations of a layer", "operations", per_layer(role, lambda name: name.startswith("aten::")))


def per_layer(role: str, chosen: Callable[[str], bool]) -> Callable[[Step], float]:
    """In a pass without gradient, on average; what comes before and after the layers is in it, and is the same on both sides."""

    def read(step: Step) -> float:
        worker, model = step.parts.worker.roles[role], step.models()[role]
        micro = next(found for (name, _), found in step.micro_batches.items() if name == role)[0]
        step.parts.worker.residents.need(role)
        worker.annotate(micro)  # what is made at the first call is not counted
        seen = kernels_of(lambda: worker.annotate(micro), model.device)
        return sum(entry["calls"] for entry in seen if chosen(entry["kernel"])) / model.config.get_text_config().num_hidden_layers

    return read


# ---- rollout ---------------------------------------------------------------------------------------------------------------------------


def native(step: Step) -> NativeEngine:
    assert isinstance(step.parts.worker.engine, NativeEngine)
    return step.parts.worker.engine


def count_stall(step: Step) -> int:
    """The most tokens that are prefilled while samples wait for their next token."""
    longest = stalled = 0
    for seen in step.engine_passes:
        stalled = stalled + seen.prefill_tokens if seen.begun and not seen.decode_tokens else 0
        longest = max(longest, stalled)
    return longest


def count_launches(step: Step) -> float:
    """Kernels, or graphs of them, that the host launches in a rollout, for each step of decoding. On CUDA."""
    engine, sampling = native(step), training_sampling(step.config)
    prompts = step.parts.train_data.prompts  # type: ignore[union-attr]
    step.parts.worker.residents.need("actor")
    for _ in engine.generate(prompts, sampling, 1):  # graphs of sizes that the step had no use for are captured by now
        pass
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in engine.generate(prompts, sampling, 1):
            pass
        synchronize(engine.runner.model.device)
    return sum(event.name.startswith(LAUNCHES) for event in profile.events() or []) / engine.stats().passes


kv_cache_bytes = What("KV cache", "bytes", lambda step: step.kv_bytes)
most_running = What("most samples decoded at once", "samples", lambda step: native(step).stats().most_running)
preemptions = What("samples put back and finished later", "samples", lambda step: native(step).stats().preemptions)
prefilled = What("prompt tokens prefilled", "tokens", lambda step: native(step).stats().prefill_tokens)
hit_rate = What("cache hit rate", "share", lambda step: native(step).stats().prefix_hit_rate)
largest_prefill = What("most tokens of a prefill pass", "tokens", lambda step: max(seen.prefill_tokens for seen in step.engine_passes))
longest_stall = What("longest stall of decoding, in tokens prefilled meanwhile", "tokens", count_stall)
launches_per_decode_step = What("launches by the host for each step of decoding", "launches", count_launches)
lines = What("lines about the rollout in the log", "lines", lambda step: len(step.lines))
rollout_metrics = What("metrics of the rollout", "metrics", lambda step: sum(name.startswith("rollout/") for name in step.metrics))
native_samples = What("samples drawn by the native engine", "samples", lambda step: len(step.samples) if native(step) else 0)
