"""The measurements that proofs compare, read from a step that has just run.

Enters: a `WatchedStep` whose parts are still loaded, and a role. Leaves: bytes, counts and shares; never a time. Guaranteed: the memory of
a pass through a model is measured on a pass of the role itself, with all effects of its settings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fulltilt.bench.device import kernels_of, synchronize
from fulltilt.loop.experience import training_sampling
from fulltilt.memory.account import gradients_of
from fulltilt.memory.activations import saved_bytes
from fulltilt.observe.metrics import TIMING_NAMES, Number
from fulltilt.parallel.trace import PassTrace
from fulltilt.proofs.step import ModelPass, WatchedStep
from fulltilt.records import Prompt

MATRIX_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
LAUNCH_CALLS = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cuGraphLaunch")


@dataclass(frozen=True)
class Measurement:
    """A number, and the way to read it for one of the roles from a step that has just run."""

    metric: str
    unit: str  # "bytes" and "share" are formatted as such, all others as plain numbers
    read: Callable[[WatchedStep, str], Number]

    def where(self, words: str) -> Measurement:
        """Return the same measurement with its circumstances named: "micro-batches" -> "micro-batches, fused"."""
        return replace(self, metric=f"{self.metric}, {words}")


# ---- batches ---------------------------------------------------------------------------------------------------------------------------


def of_passes(name: str, unit: str, count: Callable[[list[ModelPass]], int]) -> dict[bool, Measurement]:
    """Return the same count for the passes of updates (True) and for those without gradient (False)."""

    def read(step: WatchedStep, role: str, *, learns: bool) -> int:
        return count(step.passes[role, learns])

    words = {True: "update", False: "without gradient"}
    return {learns: Measurement(f"{name}, {words[learns]}", unit, partial(read, learns=learns)) for learns in words}


MICRO_BATCHES = of_passes("micro-batches", "micro-batches", len)
MOST_TOKENS = of_passes("most tokens in a micro-batch", "tokens", lambda passes: max(seen.tokens for seen in passes))
MOST_SAMPLES = of_passes("most samples in a micro-batch", "samples", lambda passes: max(seen.samples for seen in passes))
SAMPLE_COUNTS = of_passes("different numbers of samples in micro-batches", "samples", lambda passes: len({seen.samples for seen in passes}))
PAD_TOKENS = of_passes(
    "pad tokens computed", "tokens", lambda passes: sum(seen.tokens - len(seen.micro.ids) + seen.micro.pad_tokens for seen in passes)
)


# ---- workers ---------------------------------------------------------------------------------------------------------------------------

WORKERS = Measurement("workers that computed the step", "workers", lambda step, role: step.parts.crew.hosts.size)
OWN_WORKERS = Measurement("workers that have only this role", "workers", lambda step, role: step.parts.crew.own_workers(role))
LOAD_SPREAD = Measurement(
    "cost of the worker with the most, over the mean", "times", lambda step, role: step.metrics[f"{role}/load_spread"]
)


def largest_pass(role: str) -> Measurement:
    what = f"tokens of a worker in the {role}'s largest pass"
    return Measurement(what, "tokens", lambda step, _: step.parts.crew.most_tokens(role))


def of_trace(metric: str, unit: str, read: Callable[[PassTrace], int]) -> Measurement:
    """Return the maximum over all workers of a number that a traced pass shows, if parameters are sharded."""

    def most(step: WatchedStep, role: str) -> int:
        hosts = step.parts.crew.hosts
        return max(read(trace) for trace in hosts.start("trace", [(role,)] * hosts.size, what="a traced pass").results())

    return Measurement(metric, unit, most)


def moved(kind: str) -> Measurement:
    metric = f"communication/{kind.replace('-', '_')}_bytes"
    return Measurement(f"bytes of {kind}s of each worker", "bytes", lambda step, role: round(step.metrics[metric]))


AHEAD = of_trace("layers gathered before the layer ahead of them computes", "layers", lambda trace: trace.ahead)
WHOLE = of_trace("whole parameters between forward and backward", "bytes", lambda trace: trace.whole_bytes)


# ---- memory ----------------------------------------------------------------------------------------------------------------------------


def held(kind: str, phase: str) -> Measurement:
    """Return the bytes of a kind on the device at the end of a phase, by the run's own account."""
    name = {"optimizer": "optimizer states", "kv": "KV cache"}.get(kind, kind)
    metric = f"memory_gib/{TIMING_NAMES[phase]}/{kind}"
    return Measurement(f"{name} on the device, {phase}", "bytes", lambda step, role: round(step.metrics[metric] * 2**30))


def count_gradients(step: WatchedStep, role: str) -> int:
    """Count the bytes of the role's gradients after the step, when no update is running."""
    return sum(gradient.nbytes for gradient in gradients_of(step.models()[role]))


def count_activations(step: WatchedStep, role: str) -> int:
    """Count the bytes that autograd keeps for the backward pass of the largest micro-batch."""
    micro, learner = step.largest(role, learns=True), step.worker_for(role).trainers[role].role
    return saved_bytes(lambda: learner.terms(micro))


def count_between_passes(step: WatchedStep, role: str) -> int:
    """Count the bytes on a CUDA device that the forward pass of the largest micro-batch leaves there for its backward pass."""
    micro, trainer = step.largest(role, learns=True), step.worker_for(role).trainers[role]
    trainer.optimizer.prepare()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loss = trainer.loss(trainer.role.terms(micro)).loss
    torch.cuda.synchronize()
    left = torch.cuda.memory_allocated() - before
    loss.backward()  # type: ignore[no-untyped-call]
    trainer.optimizer.zero_grad()  # no update uses these gradients
    return left


GRADIENTS = Measurement("gradients on the device, outside the update", "bytes", count_gradients)
ACTIVATIONS = Measurement("activations kept for the backward pass", "bytes", count_activations)
BETWEEN_PASSES = Measurement("activations on the device between forward and backward", "bytes", count_between_passes)


# ---- the head --------------------------------------------------------------------------------------------------------------------------


class LargestVocabularyTensor(TorchDispatchMode):
    """Records the bytes of the largest tensor as wide as the vocabulary that the head creates: between the end of the body's forward pass
    and the start of its backward pass. Also records those of the largest result of a softmax, which is the entropy's if the head is not
    fused."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.of_all = self.of_softmax = 0
        self._inside = False
        weight = model.get_output_embeddings().weight
        self._vocabulary, self._weight = len(weight), set(weight.shape)  # a tensor of this shape, transposed or not, is the weight

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


def watched_head(step: WatchedStep, role: str) -> LargestVocabularyTensor:
    """Run the largest micro-batch, forward and, if the role is trained, backward, and watch the head."""
    worker, model = step.worker_for(role), step.models()[role]
    trainer = worker.trainers.get(role)
    micro = step.largest(role, learns=trainer is not None)
    seen = LargestVocabularyTensor(model)
    hook = model.base_model.register_forward_hook(seen.enter)
    if trainer is None:
        with seen:
            worker.roles[role].annotate(micro)
    else:
        trainer.optimizer.prepare()
        with seen:
            trainer.loss(trainer.role.terms(micro)).loss.backward()  # type: ignore[no-untyped-call]
        trainer.optimizer.zero_grad()
    hook.remove()
    return seen


HEAD_TEMPORARY = Measurement("largest temporary of the head", "bytes", lambda step, role: watched_head(step, role).of_all)
ENTROPY_TEMPORARY = Measurement("largest temporary of the entropy", "bytes", lambda step, role: watched_head(step, role).of_softmax)


# ---- layers ----------------------------------------------------------------------------------------------------------------------------


def per_layer(name: str, unit: str, chosen: Callable[[str], bool]) -> Measurement:
    """Return the average over the layers in a pass without gradient. Operations before and after the layers are included, and equal in both
    steps."""

    def read(step: WatchedStep, role: str) -> float:
        annotator, model = step.worker_for(role).roles[role], step.models()[role]
        micro = next(passes for (name, _), passes in step.passes.items() if name == role)[0].micro
        annotator.annotate(micro)  # allocations and compilation at the first call are not counted
        seen = kernels_of(lambda: annotator.annotate(micro), model.device)
        return sum(entry["calls"] for entry in seen if chosen(entry["kernel"])) / model.config.get_text_config().num_hidden_layers

    return Measurement(name, unit, read)


KERNELS = per_layer("kernels per layer", "kernels", lambda name: not name.startswith(("Memcpy", "Memset")))  # on CUDA
PRODUCTS = per_layer("matrix products per layer", "operations", lambda name: name in MATRIX_PRODUCTS)  # on a CPU
OPERATIONS = per_layer("operations per layer", "operations", lambda name: name.startswith("aten::"))  # on a CPU


# ---- rollout ---------------------------------------------------------------------------------------------------------------------------


def count_stall(step: WatchedStep, role: str) -> int:
    """Return the most tokens that are prefilled while samples wait for their next token."""
    longest = stalled = 0
    for seen, begun in step.engine_passes:
        stalled = stalled + seen.prefill_tokens if begun and not seen.decode_tokens else 0
        longest = max(longest, stalled)
    return longest


def count_launches(step: WatchedStep, role: str) -> float:
    """Count the kernels and CUDA graphs that the host launches in a rollout, per decode step. On CUDA."""
    engine, sampling = step.engine, training_sampling(step.parts.worker.config)
    prompts = cast("Sequence[Prompt]", step.parts.train_data.items)
    step.worker_for("actor")
    for _ in engine.generate(prompts, sampling, 1):  # graphs of sizes that the step did not use are captured by now
        pass
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in engine.generate(prompts, sampling, 1):
            pass
        synchronize(engine.runner.model.device)
    return sum(event.name.startswith(LAUNCH_CALLS) for event in profile.events() or []) / engine.stats().passes


KV_CACHE = Measurement("KV cache", "bytes", lambda step, role: step.kv_bytes)
MOST_RUNNING = Measurement("most samples decoded at once", "samples", lambda step, role: step.engine.stats().most_running)
PREEMPTIONS = Measurement("samples preempted and finished later", "samples", lambda step, role: step.engine.stats().preemptions)
PREFILLED = Measurement("prompt tokens prefilled", "tokens", lambda step, role: step.engine.stats().prefill_tokens)
HIT_RATE = Measurement("prefix cache hit rate", "share", lambda step, role: step.engine.stats().prefix_hit_rate)
LARGEST_PREFILL = Measurement(
    "most tokens in a prefill pass", "tokens", lambda step, role: max(seen.prefill_tokens for seen, _ in step.engine_passes)
)
EXPERTS = Measurement("experts of a layer on a worker, rollout", "experts", lambda step, role: step.parts.crew.most_experts())
KEY_HEADS = Measurement("key heads of a layer that a worker caches, rollout", "heads", lambda step, role: step.parts.crew.most_key_heads())
SAMPLING_GROUPS = Measurement("groups that sample", "groups", lambda step, role: step.parts.crew.sampling_groups)
LONGEST_STALL = Measurement("longest decode stall, in tokens prefilled during it", "tokens", count_stall)
LAUNCHES = Measurement("launches by the host per decode step", "launches", count_launches)
LOG_LINES = Measurement(
    "lines about the rollout in the log", "lines", lambda step, role: len(re.findall("^rollout: ", step.log.getvalue(), re.MULTILINE))
)
ROLLOUT_METRICS = Measurement(
    "metrics of the rollout", "metrics", lambda step, role: sum(name.startswith("rollout/") for name in step.metrics)
)
NATIVE_SAMPLES = Measurement("samples drawn by the native engine", "samples", lambda step, role: len(step.samples) if step.engine else 0)
