"""The interface of rollout engines, and how an engine is made by its name.

Enters: prompts and how to sample. Leaves: groups, each as soon as its last sample is done. Guaranteed by every engine: token ids are the
sampled ones, log-probs are those of the full softmax at the sampling temperature, and a group is complete.

An engine is one file, `rollout/engines/NAME.py`, which defines `make`, a class or function that takes an `EngineContext` and returns an
`Engine`, and `OBEYS`, those of `ENGINE_KNOBS` that it obeys; `refuses(config)`, if there is one, names other settings that it cannot run
with. The file's name is the value of `rollout.engine`; nothing else lists it.
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
Listener = Callable[[int, Sequence[int]], None]  # gets the place of a prompt and all tokens of one of its samples so far


@dataclass(frozen=True)
class FreeSeats:
    """Said by an engine that is fed: it could start this many more groups now."""

    groups: int


class Feed(Protocol):
    """More prompts for an engine that is generating. Every `FreeSeats` has one answer; an empty one means that no more will come."""

    longest: int  # tokens of the longest prompt that may come

    def take(self, *, wait: bool) -> Sequence[Prompt] | None:
        """The answer to the last `FreeSeats`; None if it has not come. With `wait` it is waited for, if it can come meanwhile."""


class Engine(ABC):
    """An engine that shares the trainer's weights and holds no memory needs no more than `generate`."""

    can_be_fed = False  # whether it has `generate_fed`

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.listener: Listener | None = None  # told of tokens as they come, by engines that see them
        self.key_heads = 0  # the most that it caches for a layer, where its KV cache can be read
        self.halted: Callable[[], bool] | None = None  # asked before each pass whether to stop, where several engines run passes together

    @abstractmethod
    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int, lengths: Lengths | None = None) -> Iterator[Group]:
        """Groups of `sampling.samples` samples, in the order in which they finish. `lengths` forces the number of tokens of the samples it
        names: neither end tokens nor stop strings end them."""

    def generate_fed(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int, feed: Feed) -> Iterator[Group | FreeSeats]:
        """The same, with more prompts from `feed` as soon as there are free seats. The place of a group counts those too."""
        raise NotImplementedError(f"{type(self).__name__} takes no prompts while it generates")

    def sync(self, version: int, weights: Weights) -> None:  # noqa: B027
        """The trainer's weights have changed. An engine with weights of its own copies them from the stream, which others leave unread."""

    def parameters(self) -> Iterable[torch.Tensor]:
        """The weights that it samples from, where they can be read."""
        return ()

    def release(self) -> None:  # noqa: B027
        """Give memory back for the update; the next `generate` takes it again."""

    def memory(self) -> Iterable[torch.Tensor]:
        """The tensors of the KV cache that it holds now."""
        return ()

    def take_limits(self) -> RolloutLimits | None:
        """Its limits now, and where memory ran out since the last call. None: it cannot go on with less."""
        return None

    def limit(self, limits: RolloutLimits) -> None:  # noqa: B027
        """From the next call on, have no more in memory at once than this."""

    def stats(self) -> EngineStats:
        """Statistics of the last `generate`."""
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
    graphs_required: bool = False  # a model that no graph can hold is an error; otherwise decoding continues without graphs
    longest: int = 0  # tokens of the longest expected sample: graphs are captured for it, and again when a sample is longer


@dataclass(frozen=True)
class RolloutLimits:
    """How much an engine has in memory at once, and what was reported each time that memory ran out and it went on with less."""

    kv_blocks: int
    max_seqs: int
    max_batched_tokens: int
    failures: tuple[str, ...] = ()  # "" where it ran out on another member of those that sample together


@dataclass(frozen=True, eq=False)
class EngineContext:
    """Everything that an engine is made from."""

    model: PreTrainedModel  # the trainer's own
    tokenizer: PreTrainedTokenizerBase
    end_tokens: frozenset[int]
    layers: Mapping[int, LayerShape]  # shapes of the keys and values that each layer caches
    limits: EngineLimits
    members: Members = field(default_factory=Members)  # those that sample together, where the model is divided among some


# Keys of [rollout] that only say how an engine works. Setting one that the chosen engine does not obey is an error.
ENGINE_KNOBS = frozenset(
    {"kv_bytes", "memory_fraction", "block_tokens", "max_seqs", "max_batched_tokens", "chunked_prefill", "prefix_sharing"}
    | {"cuda_graphs", "release_memory", "log_stats"}
)


def engine_mistakes(config: Config) -> Iterator[str]:
    """Settings that the chosen engine does not obey, and what else it refuses."""
    name = config.rollout.engine
    module = importlib.import_module(f"fulltilt.rollout.engines.{name}")
    for key in sorted((ENGINE_KNOBS - module.OBEYS) & config.rollout.model_fields_set):
        yield f'rollout.{key}: rollout.engine = "{name}" does not use it. Remove the key, or use the native engine'
    yield from module.refuses(config) if hasattr(module, "refuses") else ()


def why_one_worker(name: str) -> str | None:
    """Why an engine does not run on several workers, if it does not."""
    reason: str | None = getattr(importlib.import_module(f"fulltilt.rollout.engines.{name}"), "ONE_WORKER", None)
    return reason


def make_engine(name: str, context: EngineContext) -> Engine:
    """The engine of `rollout.engine = name`. Only its own file is imported."""
    engine: Engine = importlib.import_module(f"fulltilt.rollout.engines.{name}").make(context)
    return engine
