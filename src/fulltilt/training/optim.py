"""AdamW over float32 masters, which several workers may share out among themselves.

Enters: gradients accumulated on a model's parameters. Leaves: changed parameters. Guaranteed: masters, moments and accumulated gradients
are float32 or better whatever type the model computes in (a tied weight's two gradients are summed there too); a non-finite gradient
changes nothing and is reported; tensors and counters of a checkpoint restore the optimizer bit for bit, on any number of workers; a step
that has begun to change parameters is completed, since it allocates no more memory. Masters and moments are on the device, or on the host
and streamed through the device in buckets: the same arithmetic on the same numbers, so the same bits.

The accumulators of all parameters of one type are one memory, cut into a stretch for each worker. In a step the gradients are summed over
the workers, each worker updates the numbers of its own stretch, for which alone it has masters and moments, and all get the new parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch.optim.adamw import adamw

from fulltilt.memory.offload import ON_DEVICE, Entry, OffloadSetting, Part, States, absent
from fulltilt.model.fuse import rejoin
from fulltilt.parallel.ranks import ALONE, Ranks
from fulltilt.parallel.shard import lay_out, move_into
from fulltilt.records import UserError
from fulltilt.schema import TrainConfig
from fulltilt.training.checkpoint import SavedTensors

MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StepReport:
    grad_norm: float  # before clipping
    lr: float
    skipped: bool  # the gradient was not finite


def learning_rate(config: TrainConfig, update: int, total: int) -> float:
    """The rate of optimizer step `update` (from 0) out of `total`."""
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    share = min(1.0, (update - config.warmup_steps) / max(1, total - config.warmup_steps))
    fall = 1.0 - share if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * fall)


@dataclass(frozen=True, eq=False)
class Share:
    """A range of a parameter's numbers with their states, all flat, where AdamW changes them."""

    name: str
    numbers: slice  # within those of the parameter that are this worker's
    parameter: torch.Tensor
    weights: torch.Tensor  # of the master, or of the parameter where it is its own master
    moments: tuple[torch.Tensor, torch.Tensor]
    step: torch.Tensor


class Optimizer:
    """AdamW over all parameters of `model` that require a gradient.

    `keeps_parameters`: their values go into checkpoints with the moments, because nothing else there holds them (a critic, adapters).
    `offload`: which states are on the device only when needed. It changes no bit of any step, and checkpoints fit all settings.
    `ranks`: the workers that train the same model, each from samples of its own.
    """

    def __init__(
        self, model: torch.nn.Module, config: TrainConfig, total_updates: int, *, keeps_parameters: bool = False,
        offload: OffloadSetting = ON_DEVICE, ranks: Ranks = ALONE,
    ) -> None:  # fmt: skip
        self.config = config
        self.keeps_parameters = keeps_parameters
        self.offload = offload
        self.total_updates = total_updates
        self.updates = 0  # position in the schedule: updates tried, and updates left out in steps with too few samples
        self.skipped = 0
        self._parameters = trained(model)
        self._ranks, self._layouts = ranks, lay_out(self._parameters, ranks.size)
        self._memories: list[torch.Tensor] = []
        if not ranks.alone:  # all parameters of a type in one memory, so that workers exchange them where they are
            self._memories = [move_into(layout, self._parameters) for layout in self._layouts.values()]
            rejoin(model)
        self._own = {name: layout.own(name, ranks.rank) for layout in self._layouts.values() for name in layout.places}
        self._device = next((p.device for p in self._parameters.values()), torch.device("cpu"))
        self._fused = self._device.type == "cuda"  # no temporaries of the size of the masters, so no step runs out of memory
        self._entries = [
            Entry(name, count, torch.float32 if is_low(p) else p.dtype, (MASTER, *MOMENTS) if is_low(p) else MOMENTS)
            for name, p in self._parameters.items()
            if (count := length_of(self._own[name]))
        ]
        # Allocated now rather than at the first step, so that memory measured at the start of a run stays true.
        self._states = States(self._entries, self._device, offload)
        # Each part of a parameter has its own counter of the same steps, since AdamW increments the counters that it is given.
        counter = partial(torch.zeros, (), dtype=torch.float32, device=self._device if self._fused else "cpu")
        self._shares = [[self._share(part, counter()) for part in bucket] for bucket in self._states.buckets]
        for parameter in filter(is_low, self._parameters.values()):
            parameter.register_post_accumulate_grad_hook(accumulate)
        for number in self._states.stream(read=(), written=(MASTER,)):
            copy_all([(s.weights, s.parameter) for s in self._shares[number] if s.weights is not s.parameter])
        self._gradients: dict[torch.dtype, torch.Tensor] = {}  # accumulators, one memory for each type of parameter
        if not offload.grads:
            self.prepare()

    @torch.no_grad()
    def _share(self, part: Part, step: torch.Tensor) -> Share:
        own = flat(self._parameters[part.name])[self._own[part.name]][part.numbers]
        first, second = (part.states[moment] for moment in MOMENTS)
        return Share(part.name, part.numbers, own, part.states.get(MASTER, own), (first, second), step)

    def begin(self, update: int) -> None:
        """Begin a step whose first update is the run's `update`-th (from 0). Earlier steps may have left updates out: the schedule follows
        the run's steps and ends with them."""
        self.updates = update
        self.zero_grad()

    def prepare(self) -> None:
        """Allocate the accumulators, unless they exist. Call it before the first pass of a mini-batch. A parameter that is its own master
        needs none, unless its gradient has to be summed over workers."""
        if self._gradients:
            return
        for dtype, layout in self._layouts.items():
            if low(dtype) or not self._ranks.alone:
                wide = torch.float32 if low(dtype) else dtype
                self._gradients[dtype] = memory = torch.zeros(layout.total, dtype=wide, device=self._device)
                for name, place in layout.places.items() if low(dtype) else ():
                    parameter = self._parameters[name]
                    parameter.main_grad = shaped(memory[place:], parameter)  # type: ignore[attr-defined]

    def zero_grad(self) -> None:
        """Clear the gradients; where they are offloaded, free their memory."""
        for parameter in self._parameters.values():
            parameter.grad = None
            if self.offload.grads and hasattr(parameter, "main_grad"):
                del parameter.main_grad
        if self.offload.grads:
            self._gradients.clear()
        for memory in self._gradients.values():
            memory.zero_()

    def step(self) -> StepReport:
        """Apply the accumulated gradients of all workers, clipped, and clear them."""
        lr = learning_rate(self.config, self.updates, self.total_updates)
        self.updates += 1
        self.prepare()
        gradients = self._reduced()
        own_norm = torch.nn.utils.get_total_norm(list(gradients.values())) if gradients else torch.zeros((), device=self._device)
        norm = self._ranks.norm(own_norm)
        if math.isfinite(norm):
            self._apply(gradients, norm, lr)
            self._exchange()
        else:
            self.skipped += 1
        del gradients  # or their memory would outlive `zero_grad`
        self.zero_grad()
        return StepReport(grad_norm=norm, lr=lr, skipped=not math.isfinite(norm))

    @torch.no_grad()
    def _reduced(self) -> dict[str, torch.Tensor]:
        """The gradients summed over all workers, flat, of the numbers that are this worker's. A parameter that is its own master and has no
        gradient on any worker is left out, and so not updated."""
        found = {name: p.main_grad if is_low(p) else p.grad for name, p in self._parameters.items()}  # type: ignore[attr-defined]
        flats = {name: flat(like_parameter(gradient, self._parameters[name])) for name, gradient in found.items() if gradient is not None}
        if self._ranks.alone:
            return flats
        given = torch.tensor([name in flats for name in self._parameters], dtype=torch.float32, device=self._device)
        self._ranks.sum(given)
        for dtype, layout in self._layouts.items():
            memory = self._gradients[dtype]
            if not low(dtype):
                copy_all(
                    [(memory[place : place + layout.counts[name]], flats[name]) for name, place in layout.places.items() if name in flats]
                )
            self._ranks.reduce(memory)
        wanted = {name for name, count in zip(self._parameters, given.tolist(), strict=True) if count}
        return {
            name: self._gradients[dtype][place + own.start : place + own.stop]
            for dtype, layout in self._layouts.items()
            for name, place in layout.places.items()
            if name in wanted and length_of(own := self._own[name])
        }

    @torch.no_grad()
    def _apply(self, gradients: dict[str, torch.Tensor], norm: float, lr: float) -> None:
        """All memory is allocated before the first bucket changes anything: from then on nothing can fail."""
        self._require_presence()
        if self.config.clip_grad and norm > self.config.clip_grad:
            torch._foreach_mul_(list(gradients.values()), self.config.clip_grad / (norm + 1e-6))
        for number in self._states.stream():
            shares = [share for share in self._shares[number] if share.name in gradients]
            for decay, matrices in ((self.config.weight_decay, True), (0.0, False)):
                self._adam([s for s in shares if (self._parameters[s.name].ndim >= 2) == matrices], gradients, lr, decay)
            copy_all([(s.parameter, s.weights) for s in shares if s.weights is not s.parameter])

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
        """All tensors that a checkpoint needs in addition to the model, and the trained parameters too with `keeps_parameters`: those of
        this worker. They are no copies: the next step changes them. Of a parameter that several workers share out, each has a flat piece,
        `KIND/NAME@START`."""
        self._require_presence()
        self._states.settle()
        result: dict[str, torch.Tensor] = {}
        steps = {share.name: share.step for share in chain.from_iterable(self._shares)}
        for entry in self._entries:
            parameter, own = self._parameters[entry.name], self._own[entry.name]
            if length_of(own) == parameter.numel():
                result |= {f"{kind}/{entry.name}": shaped(numbers, parameter) for kind, numbers in self._held(entry).items()}
            else:
                result |= {f"{kind}/{entry.name}@{own.start}": numbers for kind, numbers in self._held(entry).items()}
            if own.start == 0:  # one worker's is enough: all count the same steps
                result[f"step/{entry.name}"] = steps[entry.name]
        return result

    @torch.no_grad()
    def restore(self, saved: SavedTensors, updates: int, skipped: int) -> None:
        self._require_presence()
        self._states.settle()
        refuse_misfits(self._shapes(), saved)
        for entry in self._entries:
            for kind, numbers in self._held(entry).items():
                own, parameter = self._own[entry.name], self._parameters[entry.name]
                found = saved.numbers(f"{kind}/{entry.name}", own.start, own.stop)
                if length_of(own) == parameter.numel():
                    shaped(numbers, parameter).copy_(found.view(parameter.shape))
                else:
                    numbers.copy_(found)
        for share in chain.from_iterable(self._shares):
            share.step.copy_(saved.numbers(f"step/{share.name}", 0, 1)[0])
        for number in self._states.stream(read=(MASTER,), written=()):
            copy_all([(s.parameter, s.weights) for s in self._shares[number] if s.weights is not s.parameter])
        self._exchange()
        self.updates, self.skipped = updates, skipped

    def _exchange(self) -> None:
        """Give every worker the parameters that the others have changed."""
        for memory in self._memories:
            self._ranks.gather(memory)

    def _held(self, entry: Entry) -> dict[str, torch.Tensor]:
        """What a checkpoint holds of this worker's numbers of a parameter, flat, in their permanent memory."""
        own = {"parameter": flat(self._parameters[entry.name])[self._own[entry.name]]} if self._keeps(entry.name) else {}
        return {**own, **{kind: self._states.home(entry, kind) for kind in entry.kinds}}

    def _keeps(self, name: str) -> bool:
        """Whether a checkpoint needs the parameter itself: no master holds its value."""
        return self.keeps_parameters and not is_low(self._parameters[name])

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what all workers together save under each name."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, parameter in self._parameters.items():
            kinds = [*(["parameter"] if self._keeps(name) else []), *([MASTER] if is_low(parameter) else []), *MOMENTS]
            shapes |= {f"{kind}/{name}": tuple(parameter.shape) for kind in kinds} | {f"step/{name}": ()}
        return shapes

    def memory(self) -> Iterator[torch.Tensor]:
        """All of its memory except parameters and gradients, on the device and on the host."""
        yield from self._states.memory()


def length_of(numbers: slice) -> int:
    return int(numbers.stop - numbers.start)


def trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    found = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}
    gaps = [name for name, p in found.items() if torch.empty_like(p, device="meta").stride() != p.stride()]  # a copy leaves gaps out
    assert not gaps, f"{gaps[0]} does not fill its memory range: give it memory of its own"
    return found


def is_low(parameter: torch.Tensor) -> bool:
    """Whether its type is too coarse for it to be its own master."""
    return low(parameter.dtype)


def low(dtype: torch.dtype) -> bool:
    return dtype not in (torch.float32, torch.float64)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers in the order of memory, so that parameter, gradient and states correspond whatever the strides are."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def shaped(memory: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The numbers at the beginning of `memory`, in the shape of the parameter."""
    return memory.as_strided(parameter.shape, parameter.stride())


def like_parameter(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The gradient with its parameter's strides. Autograd's own have them; a gradient set by other code may not."""
    return gradient if gradient.stride() == parameter.stride() else torch.empty_like(parameter).copy_(gradient)


def copy_all(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each (target, source), rounded to the target's type."""
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


@torch.no_grad()
def restore_parameters(model: torch.nn.Module, saved: SavedTensors) -> None:
    """Restore only the trained parameters from an optimizer's checkpoint, for a model that is not trained further."""
    names = set(saved.names())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found = next((key for key in (f"parameter/{name}", f"master/{name}") if key in names), None)
            if found is None:
                raise UserError(f"the checkpoint does not hold {name}. Use the [lora] settings that it was saved with")
            flat(parameter).copy_(saved.numbers(found, 0, parameter.numel()))


def refuse_misfits(own: Mapping[str, tuple[int, ...]], saved: SavedTensors) -> None:
    """`own`: the shapes that are expected. A tensor in pieces is flat."""
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


def accumulate(parameter: torch.Tensor) -> None:
    """Add a micro-batch's gradient to the float32 accumulator and drop it. The head adds its own gradient there and leaves none."""
    if parameter.grad is not None:
        assert hasattr(parameter, "main_grad"), "Optimizer.prepare comes before the first pass of a mini-batch"
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
