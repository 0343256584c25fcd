"""Roles, each composed of a model with its head, and an optimizer if it learns.

Enters: a loaded model. Leaves: actor and ref (`Policy`), critic (`Critic`), reward model (`Scorer`), each with one way to run a packed
micro-batch: `terms` for the loss of a role that learns, `annotate` for one number per trained token, without gradients. The entropy is
computed with its gradient where the loss has a bonus, as a number where it is only a metric, and not at all without a loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from fulltilt.footprint import Entropy, HeadOptions, head_bytes
from fulltilt.model.arrays import to_device, to_host
from fulltilt.model.attention import Packed
from fulltilt.model.forward import computing_type, hidden_states, in_one_pass
from fulltilt.model.heads import Head, token_logprobs
from fulltilt.model.scalar import ScalarModel
from fulltilt.parallel.progress import PassProgress
from fulltilt.parallel.ranks import ALONE, Ranks
from fulltilt.parallel.sequence import ONE, SequenceGroup
from fulltilt.records import MicroBatch, TokenTerms, ValueTerms
from fulltilt.training.optim import Optimizer

# Two meaningless tokens, for a worker with fewer micro-batches than others where all must run equally many.
FILLER = MicroBatch(
    ids=np.zeros(2, np.int64),
    positions=np.arange(2),
    cu_seqlens=np.array([0, 2], np.int32),
    rows=(),
    trained=np.ones(1, np.int64),
    trained_row=np.zeros(1, np.int64),
    weights=np.zeros(1),
    fresh=np.ones(1, bool),
)
NO_PROGRESS = PassProgress()  # for a worker that is alone


class Role(ABC):
    """A model with its head."""

    name: str
    model: PreTrainedModel | ScalarModel
    optimizer: Optimizer | None = None
    sequence: SequenceGroup = ONE  # the workers that compute a micro-batch together, each a part of its tokens
    tensor: Ranks = ALONE  # the members that compute each layer together
    meets: bool = False  # whether its passes exchange tokens between workers, which must then make equally many passes
    progress: PassProgress = NO_PROGRESS  # progress in passes that other workers make at the same time
    most_tokens: int = 0  # the most tokens that have entered the model in a pass

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def tells(self) -> bool:
        """Whether this worker reports the results of those that compute a micro-batch together."""
        return self.sequence.first and self.tensor.rank == 0

    def part_of(self, micro: MicroBatch, read: np.ndarray) -> StreamPart:
        """Return this worker's part of a micro-batch. `read`: places in its stream whose results are read, ascending."""
        self.progress.begin()
        part = StreamPart.of(micro, read, self.device, self.sequence)
        self.most_tokens = max(self.most_tokens, len(part.ids))
        return part

    def filler_part(self) -> StreamPart:
        return StreamPart.of(FILLER, FILLER.trained - 1, self.device, self.sequence)

    @abstractmethod
    def annotate(self, micro: MicroBatch) -> torch.Tensor:
        """Return one number per trained token, float32 [R], without gradient."""

    def terms(self, micro: MicroBatch) -> Any:
        """Return the input of the role's loss, `TokenTerms` or `ValueTerms`."""
        raise AssertionError(f"the {self.name} does not learn")

    def nothing(self) -> torch.Tensor:
        """Make a pass through the whole model, and return a loss of zero with gradients of zero."""
        raise AssertionError(f"the {self.name} does not learn")

    @contextmanager
    def standing_in(self, micro: MicroBatch) -> Iterator[torch.Tensor]:
        """Enclose a pass over a filler in place of one over `micro`, in which this worker does what other workers expect of it. Yields a
        loss as of `nothing`, whose backward pass belongs inside."""
        with self.progress.standing_in(-(-len(micro.ids) // self.sequence.size)):
            yield self.stand_in(micro)

    @abstractmethod
    def stand_in(self, micro: MicroBatch) -> torch.Tensor:
        """Return the loss of zero for `standing_in`."""

    def head_bytes(self, micro_batches: Sequence[MicroBatch], *, learns: bool) -> int | None:
        """Return the bytes of the head's largest temporary in passes over these, by its own count; None for a scalar head, whose
        temporaries are negligible."""
        return None


@dataclass(eq=False)
class Policy(Role):
    name: str
    model: PreTrainedModel
    temperature: float  # the temperature at which the samples were drawn
    optimizer: Optimizer | None = None
    entropy_gradient: bool = False
    as_role: Callable[[], AbstractContextManager[Any]] = nullcontext  # entered for every pass, since the model may be another role too
    options: HeadOptions = field(default_factory=HeadOptions)
    sequence: SequenceGroup = ONE

    def run(self, micro: MicroBatch, entropy: Entropy = "none", filler: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the log-prob, with gradient unless gradients are off, and the entropy of each trained token [R]. `filler`: whether the
        body computes a filler in place of the micro-batch, so that the numbers are meaningless."""
        part = self.part_of(micro, micro.trained - 1)
        targets, given = part.targets(micro), self.filler_part() if filler else part

        def compute() -> tuple[torch.Tensor, torch.Tensor | None]:
            hidden = hidden_states(self.model, given.ids, given.positions, given.context)
            read = hidden[:1].expand(len(part.read), -1) if filler else hidden[part.read]
            return token_logprobs(read, Head.of(self.model), targets, self.temperature, self.options, entropy=entropy)

        with self.as_role():
            logprobs, entropies = in_one_pass(self.model, compute)
        return part.of_all(logprobs), None if entropies is None else part.of_all(entropies)

    @property
    def learning_entropy(self) -> Entropy:
        return "gradient" if self.entropy_gradient else "value"

    def head_bytes(self, micro_batches: Sequence[MicroBatch], *, learns: bool) -> int:
        weight = Head.of(self.model).weight
        rows = max((max(counts_of(micro, micro.trained - 1, self.sequence)) for micro in micro_batches), default=0)
        entropy, (vocabulary, width) = self.learning_entropy if learns else "none", weight.shape
        options = self.options if learns else replace(self.options, recompute=True)  # without a gradient nothing is kept
        itemsize = computing_type(self.model).itemsize
        return head_bytes(rows, vocabulary, width, options, itemsize=itemsize, device=self.device.type, entropy=entropy).largest

    def terms(self, micro: MicroBatch) -> TokenTerms:
        logprobs, entropy = self.run(micro, self.learning_entropy)
        assert entropy is not None
        row, fresh = to_device(micro.trained_row, self.device), to_device(micro.fresh, self.device)
        marked = None if micro.marked is None else to_device(micro.marked, self.device)
        given = {name: getattr(micro, name) for name in ("rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages", "importance")}
        others: dict[str, Any] = {name: like(array, logprobs) for name, array in given.items() if array is not None}
        return TokenTerms(logprobs, entropy, like(micro.weights, logprobs), row, fresh=fresh, marked=marked, **others)

    def sharper(self) -> Policy:
        """Return the same policy at half its temperature."""
        found = copy(self)  # with everything that was set on it, such as its groups of workers
        found.temperature = self.temperature / 2
        return found

    def nothing(self) -> torch.Tensor:
        return 0 * self.run(FILLER)[0].sum()

    def stand_in(self, micro: MicroBatch) -> torch.Tensor:
        logprobs, entropy = self.run(micro, self.learning_entropy if torch.is_grad_enabled() else "none", filler=True)
        return 0 * (logprobs.sum() + (0 if entropy is None else entropy.sum()))

    @torch.no_grad()
    def annotate(self, micro: MicroBatch) -> torch.Tensor:
        return self.run(micro)[0].float()


@dataclass(eq=False)
class Critic(Role):
    """Predicts, for each trained token, the reward to expect given the text before it."""

    name: str
    model: ScalarModel
    optimizer: Optimizer | None = None
    sequence: SequenceGroup = ONE

    def run(self, micro: MicroBatch) -> torch.Tensor:
        return values_of(self.model, self.part_of(micro, micro.trained - 1))

    def stand_in(self, micro: MicroBatch) -> torch.Tensor:
        return stand_in_of(self, self.part_of(micro, micro.trained - 1))

    def terms(self, micro: MicroBatch) -> ValueTerms:
        values = self.run(micro)
        assert micro.values is not None and micro.returns is not None, "a critic learns from its old values and the returns"
        return ValueTerms(values, like(micro.weights, values), like(micro.values, values), like(micro.returns, values))

    def nothing(self) -> torch.Tensor:
        return 0 * self.run(FILLER).sum()

    @torch.no_grad()
    def annotate(self, micro: MicroBatch) -> torch.Tensor:
        return self.run(micro).float()


@dataclass(eq=False)
class Scorer(Role):
    """A reward model: computes one number per text, read at its last token, the only one that its row marks as trained."""

    name: str
    model: ScalarModel
    sequence: SequenceGroup = ONE

    @torch.no_grad()
    def annotate(self, micro: MicroBatch) -> torch.Tensor:
        return values_of(self.model, self.part_of(micro, micro.trained)).float()

    def stand_in(self, micro: MicroBatch) -> torch.Tensor:
        return stand_in_of(self, self.part_of(micro, micro.trained))


def values_of(model: ScalarModel, part: StreamPart) -> torch.Tensor:
    """Return the model's number at each token of the stream that is read."""
    values = in_one_pass(model, lambda: model.values(part.ids, part.positions, part.context))
    return part.of_all(values[part.read])


def stand_in_of(role: Critic | Scorer, part: StreamPart) -> torch.Tensor:
    """Implement `Role.stand_in` for a scalar model and this worker's part of a micro-batch."""
    given = role.filler_part()
    values = in_one_pass(role.model, lambda: role.model.values(given.ids, given.positions, given.context))
    return 0 * part.of_all(values[:1].expand(len(part.read))).sum()


@dataclass(frozen=True, eq=False)
class StreamPart:
    """This worker's part of a micro-batch: the whole stream, or where several workers share it, its own tokens."""

    ids: torch.Tensor  # int64 [T], or [T / size]
    positions: torch.Tensor
    context: Packed
    read: torch.Tensor  # int64: places in this part whose results are read; at least one
    counts: Sequence[int]  # number of results that are read from each worker's part
    sequence: SequenceGroup

    @staticmethod
    def of(micro: MicroBatch, read: np.ndarray, device: torch.device, sequence: SequenceGroup) -> StreamPart:
        """Make the part. `read`: places in the stream whose results are read, ascending."""
        ids, positions, bounds = micro.ids, micro.positions, micro.cu_seqlens
        missing = -len(ids) % sequence.size
        if missing:  # a separate document, which no other document sees
            ids, positions = np.concatenate([ids, np.zeros(missing, np.int64)]), np.concatenate([positions, np.arange(missing)])
            bounds = np.append(bounds, len(ids))
        own, counts = sequence.own(len(ids)), counts_of(micro, read, sequence)
        places = chosen(read, counts, sequence.ranks.rank)
        return StreamPart(
            ids=to_device(ids[own], device),
            positions=to_device(positions[own], device),
            context=Packed.of(bounds, device, sequence if sequence.size > 1 else None),
            read=to_device(places - own.start if len(places) else np.zeros(1, np.int64), device),
            counts=counts,
            sequence=sequence,
        )

    def targets(self, micro: MicroBatch) -> torch.Tensor:
        """Return the trained tokens whose log-probs are read from this part."""
        own = micro.ids[chosen(micro.trained, self.counts, self.sequence.ranks.rank)]
        return to_device(own if len(own) else np.zeros(1, np.int64), self.context.cu_seqlens.device)

    def of_all(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the results of the whole stream [R], from those of this part. A result that was computed only so that there is one is left
        out."""
        own = numbers if self.counts[self.sequence.ranks.rank] else numbers[:0]
        return own if self.sequence.size == 1 else self.sequence.gather(own, self.counts)


def chosen(whole: np.ndarray, counts: Sequence[int], rank: int) -> np.ndarray:
    """Return one worker's entries. `counts`: number of entries of each worker."""
    before = sum(counts[:rank])
    return whole[before : before + counts[rank]]


def counts_of(micro: MicroBatch, read: np.ndarray, sequence: SequenceGroup) -> list[int]:
    """Return how many of the stream's places are in each worker's part."""
    each = -(-len(micro.ids) // sequence.size)
    ends = np.searchsorted(read, each * np.arange(1, sequence.size + 1))
    return np.diff(ends, prepend=0).tolist()


def annotate_all(role: Role, micro_batches: Iterable[MicroBatch]) -> Iterator[np.ndarray]:
    """Yield the role's numbers for each micro-batch, each read while the device works on the next."""
    last: Callable[[], np.ndarray] | None = None
    for micro in micro_batches:
        before, last = last, to_host(role.annotate(micro))
        if before is not None:
            yield before()
    if last is not None:
        yield last()


def like(array: np.ndarray, other: torch.Tensor) -> torch.Tensor:
    return to_device(array, other.device).to(other.dtype)
