"""The interface of rollout engines, and how an engine is made by its name.

Enters: prompts and how to sample. Leaves: groups, each as soon as its last sample is done. Guaranteed by every engine: token ids are the
sampled ones, log-probs are those of the full softmax at the sampling temperature, and a group is complete.

An engine is one file, `rollout/engines/NAME.py`, which defines `make`, a class or function that takes an `EngineContext` and returns an
`Engine`, and `OBEYS`, the `ENGINE_KNOBS` that the engine uses; an optional `refuses(config)` names other settings that the engine cannot
run with. The file's name is the value of `rollout.engine`; nothing else lists it.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from transformers import PreTrainedModel

from fulltilt.model.attention import LayerShape
from fulltilt.records import Group, Prompt
from fulltilt.rollout.members import Members
from fulltilt.rollout.sampler import Sampling
from fulltilt.rollout.stats import EngineStats, Recorder
from fulltilt.schema import Config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Weights = Iterable[tuple[str, torch.Tensor]]  # parameters by name, each valid until the next is asked for
Lengths = Mapping[tuple[int, int], int]  # (uid of the prompt, index of the sample) -> tokens of the response
Listener = Callable[[int, Sequence[int]], None]  # called with the place of a prompt and all tokens of one of its samples so far


@dataclass(frozen=True)
class FreeSeats:
    """Yielded by an engine with a feed: the number of groups that it could start now."""

    groups: int


class Feed(Protocol):
    """More prompts for an engine that is generating. Every `FreeSeats` gets one answer; an empty answer means that no more prompts will
    come."""

    longest: int  # tokens of the longest prompt that may come

    def take(self, *, wait: bool) -> Sequence[Prompt] | None:
        """Return the answer to the last `FreeSeats`, or None if it has not come. `wait`: whether to wait for it, if it can come
        meanwhile."""


class Engine(ABC):
    """A rollout engine. One that shares the trainer's weights and holds no memory needs no more than `generate`."""

    can_be_fed = False  # whether it implements `generate_fed`

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.listener: Listener | None = None  # called with tokens as they come, by engines that see them
        self.key_heads = 0  # the most key heads that it caches for a layer, if its KV cache can be read
        self.halted: Callable[[], bool] | None = None  # asked before each pass whether to stop, if several engines run passes together

    @abstractmethod
    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int, lengths: Lengths | None = None) -> Iterator[Group]:
        """Yield groups of `sampling.samples` samples, in the order in which they finish. `lengths`: forces the number of tokens of the
        samples in it, which neither end tokens nor stop strings end."""

    def generate_fed(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int, feed: Feed) -> Iterator[Group | FreeSeats]:
        """Generate like `generate`, with more prompts from `feed` as soon as there are free seats. A group's place counts those prompts
        too."""
        raise NotImplementedError(f"{type(self).__name__} takes no prompts while it generates")

    def sync(self, version: int, weights: Weights) -> None:  # noqa: B027
        """Use the trainer's changed weights. An engine with its own weights copies them from the stream, which other engines leave
        unread."""

    def parameters(self) -> Iterable[torch.Tensor]:
        """Return the weights that it samples from, if they can be read."""
        return ()

    def release(self) -> None:  # noqa: B027
        """Free memory for the update; the next `generate` allocates it again."""

    def memory(self) -> Iterable[torch.Tensor]:
        """Return the tensors of the current KV cache."""
        return ()

    def take_limits(self) -> RolloutLimits | None:
        """Return the current limits, and reports of out-of-memory errors since the last call. None: the engine cannot lower its limits."""
        return None

    def limit(self, limits: RolloutLimits) -> None:  # noqa: B027
        """Set the most that the engine may hold in memory at once, from the next call on."""

    def stats(self) -> EngineStats:
        """Return the statistics of the last `generate`."""
        return self.recorder.stats

    def report(self, say: Callable[[str], None], interval: float) -> None:
        """Give `say` a line about the progress after every `interval` seconds of generating, from now on."""
        self.recorder.report(say, interval)


@dataclass(frozen=True)
class EngineLimits:
    """The engine's knobs, all resolved."""

    blocks: int
    block_tokens: int
    max_seqs: int
    max_batched_tokens: int
    chunked_prefill: bool = True
    prefix_sharing: bool = True
    cuda_graphs: bool = False
    graphs_required: bool = False  # whether a model that no graph can hold is an error; otherwise it decodes without graphs
    longest: int = 0  # tokens of the longest expected sample: graphs are captured for it, and again for a longer one


@dataclass(frozen=True)
class RolloutLimits:
    """How much an engine holds in memory at once, and the report of each time that memory ran out and it continued with less."""

    kv_blocks: int
    max_seqs: int
    max_batched_tokens: int
    failures: tuple[str, ...] = ()  # "" if memory ran out on another member


@dataclass(frozen=True, eq=False)
class EngineContext:
    """Everything that an engine is made from."""

    model: PreTrainedModel  # the trainer's own model
    tokenizer: PreTrainedTokenizerBase
    end_tokens: frozenset[int]
    layers: Mapping[int, LayerShape]  # shapes of the keys and values that each layer caches
    limits: EngineLimits
    members: Members = field(default_factory=Members)  # the members that sample together, if the model is divided among several


# Keys of [rollout] that only determine how an engine works. It is an error to set a key that the chosen engine does not use.
ENGINE_KNOBS = frozenset(
    {"kv_bytes", "memory_fraction", "block_tokens", "max_seqs", "max_batched_tokens", "chunked_prefill", "prefix_sharing"}
    | {"cuda_graphs", "release_memory", "log_stats"}
)


def engine_mistakes(config: Config) -> Iterator[str]:
    """Yield mistakes: settings that the chosen engine does not use, and other settings that it refuses."""
    name = config.rollout.engine
    module = importlib.import_module(f"fulltilt.rollout.engines.{name}")
    for key in sorted((ENGINE_KNOBS - module.OBEYS) & config.rollout.model_fields_set):
        yield f'rollout.{key}: rollout.engine = "{name}" does not use it. Remove the key, or use the native engine'
    yield from module.refuses(config) if hasattr(module, "refuses") else ()


def why_one_worker(name: str) -> str | None:
    """Return why an engine cannot run on several workers, or None if it can."""
    reason: str | None = getattr(importlib.import_module(f"fulltilt.rollout.engines.{name}"), "ONE_WORKER", None)
    return reason


def make_engine(name: str, context: EngineContext) -> Engine:
    """Make the engine of `rollout.engine = name`. Only that engine's file is imported."""
    engine: Engine = importlib.import_module(f"fulltilt.rollout.engines.{name}").make(context)
    return engine
