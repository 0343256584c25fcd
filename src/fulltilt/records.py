"""The records that are passed between packages, and the exception for errors that the user can fix.

The records are frozen, typed and free of torch. Arrays are numpy; per-token arrays are aligned with `ids`: entry t belongs to token t (its
log-prob is the one given tokens 0..t-1), and is 0 where `mask` is false.

    Prompt -> Group(Sample, ...) -> Score -> Row -> (batching, trainer)

If workers hold the samples, on several machines, the driver has a `GroupHead` instead of a `Group`, and a `RowHead` instead of a `Row`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    import torch

    EngineName = str
else:
    # A rollout engine is one file in rollout/engines/, and its name is the file's. The names are listed without importing the files, which
    # import torch.
    EngineName = Literal[tuple(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent / "rollout" / "engines")]))]

Finish = Literal["stop", "length"]


class UserError(ValueError):
    """An error that only the user can fix: its text says what is wrong, where, and the remedy. The command line exits with 2 and no
    traceback."""


class DoesNotFit(UserError):
    """A run that takes more memory than its devices or their host have."""


class RunWarning(UserWarning):
    """A warning of this package, for the user. The command line hides warnings of libraries."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """One row of the training or validation data, tokenised.

    Example: Prompt(uid=17, ids=array([1, 45, 9]), text="<s>2+3=", data_source="arithmetic", ground_truth="5")
    """

    uid: int  # row number over all files of the data set: the same in every epoch and after a resume
    ids: np.ndarray  # int64 [prompt tokens], exactly what the model reads
    text: str  # the same, decoded for people
    data_source: str = "unknown"
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    source: str | tuple[Mapping[str, Any], ...] = ""  # the text or messages behind `ids`, for roles with a template of their own


@dataclass(frozen=True, eq=False)
class Sample:
    """One completion of a prompt, as sampled."""

    index: int  # 0 .. samples_per_prompt - 1 within its group
    ids: np.ndarray  # int64 [response tokens], the sampled end-of-sequence token included
    logprobs: np.ndarray  # float32 [response tokens], full softmax at the sampling temperature
    finish: Finish  # "stop": an end token or a stop string; "length": cut off by max_new_tokens
    text: str  # decoded without special tokens and without the stop string; rewards read this, training never does

    @property
    def tokens(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class Group:
    """All samples of one prompt, in index order."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    place: int = 0  # index of the prompt in the call that sampled it


@dataclass(frozen=True)
class SampleHead:
    """The driver's record of a sample that a worker holds."""

    index: int
    finish: Finish
    tokens: int


@dataclass(frozen=True, eq=False)
class GroupHead:
    """The driver's record of a group whose samples a worker holds, under a number of that worker's."""

    prompt: Prompt
    samples: tuple[SampleHead, ...]
    place: int
    home: int  # the worker's rank
    number: int


@dataclass(frozen=True)
class Score:
    """The reward of one sample. `error` is set if the reward function crashed, timed out or ran out of memory."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    answer: str | None = None  # the answer that the reward found in the sample; used for the majority votes of validation


@dataclass(frozen=True, eq=False)
class Distances:
    """Distances between trainer and engine at the trained tokens of a row, by one criterion, before any token is rejected."""

    tokens: np.ndarray  # float64; a criterion of whole samples gives all tokens of a row the same number
    low: float  # a token is kept if its number lies between the bounds
    high: float
    whole: bool  # the criterion keeps or rejects whole samples

    @property
    def kept(self) -> np.ndarray:
        return (self.tokens >= self.low) & (self.tokens <= self.high)


@dataclass(frozen=True, eq=False)
class Row:
    """One sample as the trainer sees it: prompt and response in one array, with per-token numbers.

    Example, prompt [5, 6], response [7, 2]:  ids [5 6 7 2], mask [0 0 1 1], rollout_logprobs [0 0 -0.7 -0.1]
    """

    ids: np.ndarray  # int64 [tokens]
    mask: np.ndarray  # bool [tokens]: True where the token is trained on; mask[0] is always False
    group: int = 0  # index of its group in the step
    reward: float = 0.0  # reward of the whole sample, the algorithm's shaping included
    baseline: float | None = None  # reward of the prompt's greedy sample
    lag: int = 0  # steps since it was sampled: above 0 for carried-over groups, whose rollout log-probs come from older weights
    rollout_logprobs: np.ndarray | None = None  # float32 [tokens], from the engine
    old_logprobs: np.ndarray | None = None  # float32 [tokens], from the trainer before the step's first update
    ref_logprobs: np.ndarray | None = None  # float32 [tokens], from the reference role
    sharp_logprobs: np.ndarray | None = None  # float32 [tokens]: as `old_logprobs`, but at half the sampling temperature
    importance: np.ndarray | None = None  # float32 [tokens]: weight between trainer and engine, if the loss does not compute it itself
    rejected: int | None = None  # number of tokens that were rejected from `mask`; None: the algorithm rejects nothing
    distances: Mapping[str, Distances] | None = None  # distances by the name of each criterion that may reject tokens
    values: np.ndarray | None = None  # float32 [tokens], from the critic before the step's first update: value of the text before token t
    token_rewards: np.ndarray | None = None  # float32 [tokens]: `reward` on the last trained token, less the KL penalty of each token
    advantages: np.ndarray | None = None  # float32 [tokens]
    returns: np.ndarray | None = None  # float32 [tokens]: the numbers that the critic learns to predict
    parts: tuple[float, ...] = ()  # the parts of the reward that the algorithm's advantage reads

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def trained(self) -> int:
        """Number of tokens that are trained on."""
        return int(self.mask.sum())

    @property
    def teaches(self) -> bool:
        """Whether a loss that multiplies by the advantage has a gradient for this row."""
        return self.advantages is None or bool(self.advantages[self.mask].any())


# Fields with a number for each token: the ones that updates read, and all that a pass without gradient can compute.
PER_TOKEN_FIELDS = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "importance", "values", "advantages", "returns")
ANNOTATED_FIELDS = (*PER_TOKEN_FIELDS, "sharp_logprobs")


@dataclass(frozen=True, eq=False)
class RowHead:
    """The driver's record of a row that a worker holds, under a key that is unique in the step."""

    home: int  # the worker's rank
    key: Hashable
    tokens: int
    trained: int
    group: int = 0
    lag: int = 0
    teaches: bool = True


AnySample = Sample | SampleHead
AnyGroup = Group | GroupHead
AnyRow = Row | RowHead


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Rows packed into one stream of tokens: one forward (and backward). There is no padded variant: without packing, the padding is in the
    stream, after each row's tokens.

    Example, rows [5 6 7 2] and [5 8 2] with masks [0 0 1 1] and [0 1 1]: ids [5 6 7 2 5 8 2], positions [0 1 2 3 0 1 2], cu_seqlens [0 4
    7], trained [2 3 5 6], trained_row [0 0 1 1]
    """

    ids: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T], starting from 0 in each row
    cu_seqlens: np.ndarray  # int32 [rows + 1]: where each row begins, and the end
    rows: tuple[int, ...]  # indices of the rows in the list that was packed, in this order
    trained: np.ndarray  # int64 [R]: indices of the trained tokens in ids; token trained[i] is predicted at trained[i] - 1
    trained_row: np.ndarray  # int64 [R]: index of each token's row in this micro-batch
    weights: np.ndarray  # float64 [R]: share of each token in the mini-batch's loss, the global denominator included
    fresh: np.ndarray  # bool [R]: sampled with the weights of this step (the row's lag is 0)
    rollout_logprobs: np.ndarray | None = None  # float32 [R]
    old_logprobs: np.ndarray | None = None  # float32 [R]
    ref_logprobs: np.ndarray | None = None  # float32 [R]
    importance: np.ndarray | None = None  # float32 [R]
    values: np.ndarray | None = None  # float32 [R]
    advantages: np.ndarray | None = None  # float32 [R]
    returns: np.ndarray | None = None  # float32 [R]
    marked: np.ndarray | None = None  # bool [R]: tokens chosen by the statistics of the mini-batch, for a loss that treats them differently
    pad_tokens: int = 0  # number of padding tokens among the T


@dataclass(frozen=True)
class BatchPlan:
    """The rows of a step that make up one optimizer step, or a worker's part of it. Rows have the indices of the step's list.

    Example: micro_batches ((3, 5), (4,)), weights {3: 0.1, 4: 0.1, 5: 0.1}, trained_tokens 10
    """

    micro_batches: tuple[tuple[int, ...], ...]  # rows of each micro-batch, largest first
    weights: Mapping[int, float]  # weight of a trained token of each row in the loss, the global denominator included
    trained_tokens: int  # over all micro-batches of all workers: the divisor of per-token metrics
    silent: bool = False  # as in MiniBatch

    def part(self, places: Sequence[int]) -> BatchPlan:
        """Return the plan with only some of its micro-batches."""
        chosen = tuple(self.micro_batches[place] for place in places)
        return replace(self, micro_batches=chosen, weights={index: self.weights[index] for indices in chosen for index in indices})


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """The micro-batches of one optimizer step, largest first."""

    micro_batches: tuple[MicroBatch, ...]
    trained_tokens: int  # over all micro-batches (and ranks): the divisor of per-token metrics
    silent: bool = False  # no row has an advantage: only one is computed, for a gradient of 0, and its metrics do not represent the others


@dataclass(frozen=True, eq=False)
class TokenTerms:
    """The input of a policy's loss: one number per trained token of a micro-batch, as torch tensors of shape [R].

    A row is never split: all its trained tokens are here, next to one another, so a loss may also look at whole samples.
    """

    logprobs: torch.Tensor  # with gradient
    entropy: torch.Tensor  # with gradient if the algorithm asks for it
    weights: torch.Tensor
    row: torch.Tensor  # int64: index of each token's row in the micro-batch, ascending
    rollout_logprobs: torch.Tensor | None = None
    old_logprobs: torch.Tensor | None = None  # None: on policy, the old log-probs are the detached `logprobs`
    ref_logprobs: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    fresh: torch.Tensor | None = None  # bool; None: all tokens are fresh
    importance: torch.Tensor | None = None  # weight between trainer and engine; None: the loss computes it
    marked: torch.Tensor | None = None  # bool: tokens chosen by the statistics of the mini-batch


@dataclass(frozen=True, eq=False)
class ValueTerms:
    """The input of a critic's loss, in the same form as `TokenTerms`."""

    values: torch.Tensor  # with gradient
    weights: torch.Tensor
    old_values: torch.Tensor  # values from before the step's first update
    returns: torch.Tensor


@dataclass(frozen=True, eq=False)
class LossParts:
    """The result of a loss: the scalar to differentiate and, detached, the metrics of one micro-batch.

    All are added up over the micro-batches of a mini-batch. `sums` are then divided by `trained_tokens`; `weighted` already hold the
    tokens' weights, the global denominator included, and are not divided; `ratios` are a sum and the count it is divided by.
    """

    loss: torch.Tensor
    sums: Mapping[str, torch.Tensor] = field(default_factory=dict)
    weighted: Mapping[str, torch.Tensor] = field(default_factory=dict)
    ratios: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class LossSums:
    """Contributions of one worker's micro-batches to the metrics of a mini-batch, under the names of `LossParts`."""

    sums: Mapping[str, float] = field(default_factory=dict)
    weighted: Mapping[str, float] = field(default_factory=dict)
    numerators: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)  # the divisor of each numerator

    def __add__(self, other: LossSums) -> LossSums:
        pairs = ((getattr(self, each.name), getattr(other, each.name)) for each in fields(self))
        return LossSums(*({name: a.get(name, 0.0) + b.get(name, 0.0) for name in {**a, **b}} for a, b in pairs))

    def metrics(self, trained_tokens: int, *, silent: bool) -> dict[str, float]:
        """Return the metrics of the whole mini-batch. `silent`: the rows that were computed do not represent the others."""
        tokens = max(1, trained_tokens)
        return {
            **({} if silent else {name: value / tokens for name, value in self.sums.items()}),
            **self.weighted,
            # Trainer and engine can be compared on any sample.
            **{name: value / self.counts[name] for name, value in self.numerators.items() if self.counts[name]},
        }


@dataclass(frozen=True)
class UpdatePass:
    """One measured micro-batch of an update: forward and backward. None: not measured."""

    tokens: int
    pairs: int  # pairs of tokens that attend to each other: the sum of the squares of the samples' lengths
    bytes: int | None = None  # most bytes that it took, beside those that were there before and after
    seconds: float | None = None


@dataclass(frozen=True)
class UpdatePasses:
    """The measured micro-batches of a role, smallest first."""

    passes: tuple[UpdatePass, ...]
    ran_out_at: int | None = None  # tokens of the micro-batch in which memory ran out: no larger one was tried
    free_bytes: int = 0  # free memory of the device before anything was measured
    complete: bool = True  # False: time ran out before all of them were measured


@dataclass(frozen=True)
class RolloutPass:
    """One measured rollout whose samples are all decoded at the same time and end at the same length."""

    prompts: int
    samples: int  # samples of each prompt
    prompt_tokens: int
    response_tokens: int
    decode_seconds: float  # seconds of its decode steps alone
    seconds: float


@dataclass(frozen=True)
class UpdateCosts:
    """Costs of a micro-batch of an update on this device, fitted to a few measured ones. None: not measured."""

    fixed_bytes: float | None  # bytes whatever its size
    token_bytes: float | None
    host_s: float | None  # seconds in which the host launches it, whatever its size, while the device works
    fixed_s: float | None  # seconds beside those of its tokens, whatever its size
    token_s: float | None
    pair_s: float | None
    largest: int  # tokens of the largest micro-batch that was measured
    error: float = 0.0  # the largest relative difference between the fit and the measurements
    passes: tuple[UpdatePass, ...] = ()  # the measured passes
    ran_out_at: int | None = None  # tokens of a micro-batch in which memory ran out

    def bytes(self, tokens: int) -> int | None:
        return None if self.fixed_bytes is None or self.token_bytes is None else int(self.fixed_bytes + self.token_bytes * tokens)

    def seconds(self, tokens: int, pairs: int) -> float | None:
        if self.host_s is None or self.fixed_s is None or self.token_s is None or self.pair_s is None:
            return None
        return max(self.host_s, self.fixed_s + self.token_s * tokens + self.pair_s * pairs)


@dataclass(frozen=True)
class Probed:
    """Measurements of a worker on its device before the first step."""

    updates: tuple[UpdatePass, ...] = ()  # passes of the actor
    rollouts: tuple[RolloutPass, ...] = ()


NOTHING_PROBED = Probed()
