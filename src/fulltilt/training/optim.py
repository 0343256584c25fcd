"""AdamW over float32 masters, which may be divided among several workers.

Enters: gradients accumulated on a model's parameters. Leaves: changed parameters. Guaranteed: masters, moments and accumulated gradients
are float32 or better whatever type the model computes in (a tied weight's two gradients are summed there too); a non-finite gradient
changes nothing and is reported; tensors and counters of a checkpoint restore the optimizer bit for bit, on any number of workers; a step
that runs out of memory changes nothing, on any worker, since all memory that it needs is allocated before the first number changes. Masters
and moments are on the device, or on the host and streamed through the device in buckets: the same arithmetic on the same numbers, so the
same bits.

In a step the gradients are summed over the workers, and each worker updates its own numbers (training/parameters.py). It has masters and
moments only for these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch.optim.adamw import adamw

from fulltilt.blame import is_out_of_memory
from fulltilt.memory.offload import ON_DEVICE, Entry, OffloadSetting, Part, States, absent
from fulltilt.model.arrays import is_shard
from fulltilt.parallel.apply import Shards
from fulltilt.parallel.cuts import CutTensor
from fulltilt.parallel.exchange import copy_all, flat, length_of
from fulltilt.parallel.parts import ModelPart
from fulltilt.parallel.ranks import ALONE, Ranks
from fulltilt.records import UserError
from fulltilt.schema import TrainConfig
from fulltilt.training.checkpoint import SavedTensors
from fulltilt.training.parameters import Divided, ExpertsApart, Held, ParameterShards, WholeParameters, device_of, shaped
from fulltilt.words import first_line

MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StepReport:
    grad_norm: float  # before clipping
    lr: float
    skipped: bool  # whether the step was skipped because the gradient was not finite


class StepAbandoned(Exception):
    """A worker has run out of memory, and no worker has changed anything. Gradients are not cleared. The message is this worker's report;
    empty if it was another worker."""


def learning_rate(config: TrainConfig, update: int, total: int) -> float:
    """Return the learning rate of optimizer step `update` (from 0) out of `total`."""
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    share = min(1.0, (update - config.warmup_steps) / max(1, total - config.warmup_steps))
    fall = 1.0 - share if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * fall)


@dataclass(frozen=True, eq=False)
class Share:
    """A range of a parameter's numbers with their states, all flat, in the memory that AdamW changes."""

    name: str
    numbers: slice  # the range within this worker's numbers of the parameter
    parameter: torch.Tensor
    weights: torch.Tensor  # the master's numbers, or the parameter's if it is its own master
    moments: tuple[torch.Tensor, torch.Tensor]
    step: torch.Tensor


class Optimizer:
    """AdamW over all parameters of `model` that require a gradient.

    `keeps_parameters`: whether parameter values go into checkpoints with the moments, because nothing else there holds them (a critic,
    adapters). `offload`: which states are on the device only when needed. It changes no bit of any step, and checkpoints fit all settings.
    `ranks`: the workers that train the same model, each from its own samples. `shards`: given if the model is sharded across them.
    `divided`: given if this worker has a part of the model; checkpoints then have parts, too.
    """

    def __init__(
        self, model: torch.nn.Module, config: TrainConfig, total_updates: int, *, keeps_parameters: bool = False,
        offload: OffloadSetting = ON_DEVICE, ranks: Ranks = ALONE, shards: Shards | None = None, divided: Divided | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.keeps_parameters = keeps_parameters
        self.offload = offload
        self.total_updates = total_updates
        self.updates = 0  # place in the schedule: updates that were tried, and those left out in steps with too few samples
        self.skipped = 0
        self.changing = False  # whether a step has begun to change numbers and has not ended
        self._parameters = trained(model)
        self._divided = divided
        self.alone = ranks.alone and divided is None
        # A worker that failed can still take part in the step, which all workers then skip.
        self._agreeing = None if self.alone else divided.everyone if divided else ranks
        self._held: Held
        if shards:
            self._held = ParameterShards(self._parameters, shards, divided)
        elif divided and divided.replicas:
            self._held = ExpertsApart(model, self._parameters, ranks, divided)
        else:
            self._held = WholeParameters(model, self._parameters, ranks, divided)
        self._device, kinds = device_of(self._parameters), MOMENTS
        self._fused = self._device.type == "cuda"  # no temporaries of the size of the masters, so no step runs out of memory
        self._entries = [
            Entry(name, count, torch.promote_types(p.dtype, torch.float32), kinds if self._held.is_own_master(name) else (MASTER, *kinds))
            for name, p in self._parameters.items()
            if (count := length_of(self._held.own[name]))
        ]
        # Allocated now rather than at the first step, so that memory measured at the start of a run stays valid.
        self._states = States(self._entries, self._device, offload)
        # Each part of a parameter has its own counter of the same steps, since AdamW increments the counters that it is given.
        counter = partial(torch.zeros, (), dtype=torch.float32, device=self._device if self._fused else "cpu")
        self._shares = [[self._share(part, counter()) for part in bucket] for bucket in self._states.buckets]
        for number in self._states.stream(read=(), written=(MASTER,)):
            copy_all([(s.weights, s.parameter) for s in self._shares[number] if s.weights is not s.parameter])
        # The largest temporaries of `adamw` without `fused`: for one share at a time, a root and a quotient.
        self._scratch_bytes = 0 if self._fused else 2 * max((s.weights.nbytes for s in chain.from_iterable(self._shares)), default=0)
        if not offload.grads:
            self.prepare()

    @torch.no_grad()
    def _share(self, part: Part, step: torch.Tensor) -> Share:
        own = self._held.numbers(part.name)[part.numbers]
        first, second = (part.states[moment] for moment in MOMENTS)
        return Share(part.name, part.numbers, own, part.states.get(MASTER, own), (first, second), step)

    @property
    def version(self) -> int:
        """How many times the parameters were changed."""
        return self._held.version

    def begin(self, update: int) -> None:
        """Begin a step whose first update is the run's `update`-th (from 0). Earlier steps may have skipped updates: the schedule follows
        the run's steps and ends with them."""
        self.updates = update
        self.zero_grad()

    def prepare(self) -> None:
        """Allocate the accumulators, unless they exist. Call it before the first pass of a mini-batch."""
        self._held.prepare()

    def zero_grad(self) -> None:
        """Clear the gradients; where they are offloaded, free their memory."""
        self._held.clear(free=self.offload.grads)

    def step(self, *, failed: bool = False) -> StepReport:
        """Apply the accumulated gradients of all workers, clipped, and clear them. `failed`: whether this worker's gradients are
        incomplete, because it ran out of memory. Raises `StepAbandoned` if any worker has run out of memory."""
        if failed and self._agreeing is None:
            assert self.alone, "other workers would wait for this one"
            raise StepAbandoned
        lr = learning_rate(self.config, self.updates, self.total_updates)
        self.prepare()
        gradients = self._held.reduced()
        norm = self._held.norm(gradients)
        self._require_memory(failed)
        self.updates += 1
        if math.isfinite(norm):
            self._apply(gradients, norm, lr)
        else:
            self.skipped += 1
        del gradients  # otherwise their memory would outlive `zero_grad`
        self.zero_grad()
        return StepReport(grad_norm=norm, lr=lr, skipped=not math.isfinite(norm))

    def _require_memory(self, failed: bool) -> None:
        """Continue only if no worker has failed and each has the memory for the rest of the step."""
        if self._agreeing is None:
            return self._reserve()
        why = ""
        try:
            self._reserve()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            why = first_line(error)
        if self._agreeing.most(int(failed or bool(why)), self._device):
            raise StepAbandoned(why)

    def _reserve(self) -> None:
        """Raise an out-of-memory error now if there is too little memory for the rest of the step."""
        torch.empty(self._scratch_bytes, dtype=torch.uint8, device=self._device)

    @torch.no_grad()
    def _apply(self, gradients: dict[str, torch.Tensor], norm: float, lr: float) -> None:
        """Update the parameters. All memory is allocated before the first bucket changes anything: from then on nothing can fail."""
        self._require_presence()
        self.changing = True
        if self.config.clip_grad and norm > self.config.clip_grad:
            torch._foreach_mul_(list(gradients.values()), self.config.clip_grad / (norm + 1e-6))
        for number in self._states.stream():
            shares = [share for share in self._shares[number] if share.name in gradients]
            for decay, matrices in ((self.config.weight_decay, True), (0.0, False)):
                self._adam([s for s in shares if (self._parameters[s.name].ndim >= 2) == matrices], gradients, lr, decay)
            copy_all([(s.parameter, s.weights) for s in shares if s.weights is not s.parameter])
        self._held.changed()
        self.changing = False

    def _adam(self, shares: list[Share], gradients: dict[str, torch.Tensor], lr: float, decay: float) -> None:
        beta1, beta2 = self.config.betas
        adamw(
            [share.weights for share in shares], [gradients[share.name][share.numbers] for share in shares],
            [share.moments[0] for share in shares], [share.moments[1] for share in shares], [], [share.step for share in shares],
            foreach=False, fused=self._fused, amsgrad=False, maximize=False,
            beta1=beta1, beta2=beta2, lr=lr, weight_decay=decay, eps=self.config.eps,
        )  # fmt: skip

    def _require_presence(self) -> None:
        away = [name for name, parameter in self._parameters.items() if absent(parameter)]
        assert not away, f"{away[0]} is on the host: the role's parameters must be on the device (Residence.to_device)"

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return this worker's tensors for a checkpoint, in addition to the model; with `keeps_parameters`, also the trained parameters.
        They are not copies: the next step changes them. Of a parameter that several workers divide, each has a flat piece,
        `KIND/NAME@START`."""
        self._require_presence()
        self._states.settle()
        result: dict[str, torch.Tensor] = {}
        steps = {share.name: share.step for share in chain.from_iterable(self._shares)}
        for entry in self._entries if self._held.saves else ():
            parameter, own = self._parameters[entry.name], self._held.own[entry.name]
            part = self._divided.part.saved_as(entry.name) if self._divided else ""
            if part is None:
                continue
            if length_of(own) == parameter.numel():
                result |= {f"{kind}/{entry.name}{part}": shaped(numbers, parameter) for kind, numbers in self._saved(entry).items()}
            else:
                result |= {f"{kind}/{entry.name}{part}@{own.start}": numbers for kind, numbers in self._saved(entry).items()}
            if own.start == 0:  # one worker's counter is enough: all count the same steps
                result[f"step/{entry.name}"] = steps[entry.name]
        return result

    def cuts(self) -> dict[str, CutTensor]:
        """Return the cuts of those `tensors` that are saved in parts."""
        if self._divided is None:
            return {}
        own_part = self._divided.part
        parted = {entry.name: own_part.cut(entry.name) for entry in self._entries if not own_part.is_whole(entry.name)}
        return {name: parted[own] for name in self._shapes() if (own := name.partition("/")[2]) in parted and not name.startswith("step/")}

    def _read(self, saved: SavedTensors, kind: str, name: str) -> torch.Tensor:
        """Return this worker's numbers of a parameter from a checkpoint, flat."""
        own = self._held.own[name]
        part = self._divided.part if self._divided else None
        if part is None or part.is_whole(name):
            return saved.numbers(f"{kind}/{name}", own.start, own.stop)
        return saved.part(f"{kind}/{name}", part.cut(name), part.ranks.rank, own.start, own.stop)

    @torch.no_grad()
    def restore(self, saved: SavedTensors, updates: int, skipped: int) -> None:
        self._require_presence()
        self._states.settle()
        refuse_misfits(self._shapes(), saved)
        for entry in self._entries:
            for kind, numbers in self._saved(entry).items():
                own, parameter = self._held.own[entry.name], self._parameters[entry.name]
                found = self._read(saved, kind, entry.name)
                if length_of(own) == parameter.numel():
                    shaped(numbers, parameter).copy_(found.view(parameter.shape))
                else:
                    numbers.copy_(found)
        for share in chain.from_iterable(self._shares):
            share.step.copy_(saved.numbers(f"step/{share.name}", 0, 1)[0])
        for number in self._states.stream(read=(MASTER,), written=()):
            copy_all([(s.parameter, s.weights) for s in self._shares[number] if s.weights is not s.parameter])
        self._held.changed()
        self.updates, self.skipped = updates, skipped

    def _saved(self, entry: Entry) -> dict[str, torch.Tensor]:
        """Return this worker's numbers of a parameter that a checkpoint holds, flat, in their permanent memory."""
        kind = self._saved_as(entry.name)
        own = {kind: self._held.numbers(entry.name)} if kind and kind not in entry.kinds else {}
        return {**own, **{kind: self._states.home(entry, kind) for kind in entry.kinds}}

    def _saved_as(self, name: str) -> str | None:
        """Return the name of a parameter's value in a checkpoint; None if only the exported model holds it."""
        if self._held.rounded(name):
            return MASTER
        return "parameter" if self.keeps_parameters else None

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what all workers together save under each name."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, parameter in self._parameters.items():
            kinds = [kind for kind in (self._saved_as(name), *MOMENTS) if kind]
            whole = self._divided.part.whole[name] if self._divided else tuple(parameter.shape)
            shapes |= {f"{kind}/{name}": whole for kind in kinds} | {f"step/{name}": ()}
        return shapes

    def accumulators(self) -> Iterable[torch.Tensor]:
        """The memory of accumulated gradients that exists now."""
        return self._held.accumulators

    def memory(self) -> Iterator[torch.Tensor]:
        """Yield all its memory except parameters and gradients, on the device and on the host."""
        yield from self._states.memory()


def trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    found = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}
    whole = {name: p for name, p in found.items() if not is_shard(p)}
    gaps = [name for name, p in whole.items() if torch.empty_like(p, device="meta").stride() != p.stride()]  # copies leave gaps out
    assert not gaps, f"{gaps[0]} does not fill its memory range: give it memory of its own"
    return found


@torch.no_grad()
def restore_parameters(model: torch.nn.Module, saved: SavedTensors, part: ModelPart | None = None) -> None:
    """Restore only the trained parameters from an optimizer's checkpoint, for a model that is not trained further. `part`: given if this
    worker has a part of the saved model."""
    names = set(saved.names())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found = next((key for key in (f"parameter/{name}", f"master/{name}") if key in names), None)
            if found is None:
                raise UserError(f"the checkpoint does not hold {name}. Use the [lora] settings that it was saved with")
            if part:
                flat(parameter).copy_(saved.part(found, part.cut(name), part.ranks.rank, 0, parameter.numel()))
            else:
                flat(parameter).copy_(saved.numbers(found, 0, parameter.numel()))


def refuse_misfits(own: Mapping[str, tuple[int, ...]], saved: SavedTensors) -> None:
    """Refuse a checkpoint whose tensors have other shapes. `own`: the expected shapes. A tensor in pieces is flat."""
    names = set(saved.names())
    misfits = [f"{name} is not in the checkpoint" for name in own if name not in names]
    misfits += [f"{name} is in the checkpoint only" for name in sorted(names) if name not in own]
    misfits += [
        f"{name} has the shape {list(saved.shape(name))} in the checkpoint and {list(shape)} now"
        for name, shape in own.items()
        if name in names and saved.shape(name) not in (shape, (math.prod(shape),))
    ]
    if misfits:
        raise UserError(
            f"the checkpoint's optimizer does not fit this model: {'; '.join(misfits[:3])}{' …' if len(misfits) > 3 else ''}. "
            "Resume with the model, model.dtype and [lora] settings that it was saved with, or start anew in another run.dir"
        )
