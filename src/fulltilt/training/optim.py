"""AdamW over float32 masters.

Enters: gradients accumulated on a model's parameters. Leaves: changed parameters. Guaranteed: masters, moments and accumulated gradients
are float32 or better whatever type the model computes in (a tied weight's two gradients are summed there too); a non-finite gradient
changes nothing and is reported; tensors and counters of a checkpoint restore the optimizer bit for bit; a step that has begun to change
parameters is completed, since it allocates no more memory. Masters and moments are on the device, or on the host and streamed through the
device in buckets: the same arithmetic on the same numbers, so the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch.optim.adamw import adamw

from fulltilt.memory.offload import ON_DEVICE, Entry, OffloadSetting, Part, States, absent, aligned
from fulltilt.records import UserError
from fulltilt.schema import TrainConfig

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
    numbers: slice
    parameter: torch.Tensor
    weights: torch.Tensor  # of the master, or of the parameter where it is its own master
    moments: tuple[torch.Tensor, torch.Tensor]
    step: torch.Tensor


class Optimizer:
    """AdamW over all parameters of `model` that require a gradient.

    `keeps_parameters`: their values go into checkpoints with the moments, because nothing else there holds them (a critic, adapters).
    `offload`: which states are on the device only when needed. It changes no bit of any step, and checkpoints fit all settings.
    """

    def __init__(
        self, model: torch.nn.Module, config: TrainConfig, total_updates: int, *, keeps_parameters: bool = False,
        offload: OffloadSetting = ON_DEVICE,
    ) -> None:  # fmt: skip
        self.config = config
        self.keeps_parameters = keeps_parameters
        self.offload = offload
        self.total_updates = total_updates
        self.updates = 0  # position in the schedule: updates tried, and updates left out in steps with too few samples
        self.skipped = 0
        self._parameters = trained(model)
        self._device = next((p.device for p in self._parameters.values()), torch.device("cpu"))
        self._fused = self._device.type == "cuda"  # no temporaries of the size of the masters, so no step runs out of memory
        self._entries = [
            Entry(name, p.numel(), torch.float32 if is_low(p) else p.dtype, (MASTER, *MOMENTS) if is_low(p) else MOMENTS)
            for name, p in self._parameters.items()
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
        self._gradients: torch.Tensor | None = None  # all accumulators, in one memory
        if not offload.grads:
            self.prepare()

    @torch.no_grad()
    def _share(self, part: Part, step: torch.Tensor) -> Share:
        parameter = flat(self._parameters[part.name])[part.numbers]
        first, second = (part.states[moment] for moment in MOMENTS)
        return Share(part.name, part.numbers, parameter, part.states.get(MASTER, parameter), (first, second), step)

    def begin(self, update: int) -> None:
        """Begin a step whose first update is the run's `update`-th (from 0). Earlier steps may have left updates out: the schedule follows
        the run's steps and ends with them."""
        self.updates = update
        self.zero_grad()

    def prepare(self) -> None:
        """Allocate the accumulators, unless they exist. Call it before the first pass of a mini-batch."""
        if self._gradients is not None:
            return
        # Neighbours in one storage, such as layers that run as one product, have neighbouring accumulators too.
        lows = list(filter(is_low, self._parameters.values()))
        first: dict[int, int] = {}
        for place, parameter in enumerate(lows):
            first.setdefault(parameter.untyped_storage().data_ptr(), place)
        lows.sort(key=lambda parameter: (first[parameter.untyped_storage().data_ptr()], parameter.storage_offset()))
        self._gradients = torch.zeros(sum(room_of(parameter) for parameter in lows), dtype=torch.float32, device=self._device)
        for parameter, room in zip(lows, self._gradients.split([room_of(parameter) for parameter in lows]), strict=True):
            parameter.main_grad = shaped(room, parameter)  # type: ignore[attr-defined]

    def zero_grad(self) -> None:
        """Clear the gradients; where they are offloaded, free their memory."""
        for parameter in self._parameters.values():
            parameter.grad = None
            if self.offload.grads and hasattr(parameter, "main_grad"):
                del parameter.main_grad
        if self.offload.grads:
            self._gradients = None
        elif self._gradients is not None:
            self._gradients.zero_()

    def step(self) -> StepReport:
        """Apply the accumulated gradients, clipped, and clear them."""
        lr = learning_rate(self.config, self.updates, self.total_updates)
        self.updates += 1
        self.prepare()
        found = {name: p.main_grad if is_low(p) else p.grad for name, p in self._parameters.items()}  # type: ignore[attr-defined]
        gradients = {name: gradient for name, gradient in found.items() if gradient is not None}
        norm = float(torch.nn.utils.get_total_norm(list(gradients.values()))) if gradients else 0.0
        if math.isfinite(norm):
            self._apply(gradients, norm, lr)
        else:
            self.skipped += 1
        del found, gradients  # or their memory would outlive `zero_grad`
        self.zero_grad()
        return StepReport(grad_norm=norm, lr=lr, skipped=not math.isfinite(norm))

    @torch.no_grad()
    def _apply(self, gradients: dict[str, torch.Tensor], norm: float, lr: float) -> None:
        """All memory is allocated before the first bucket changes anything: from then on nothing can fail."""
        self._require_presence()
        if self.config.clip_grad and norm > self.config.clip_grad:
            torch._foreach_mul_(list(gradients.values()), self.config.clip_grad / (norm + 1e-6))
        flats = {name: flat(like_parameter(gradient, self._parameters[name])) for name, gradient in gradients.items()}
        for number in self._states.stream():
            shares = [share for share in self._shares[number] if share.name in flats]
            for decay, matrices in ((self.config.weight_decay, True), (0.0, False)):
                self._adam([s for s in shares if (self._parameters[s.name].ndim >= 2) == matrices], flats, lr, decay)
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
        """All tensors that a checkpoint needs in addition to the model, and the trained parameters too with `keeps_parameters`. They are no
        copies: the next step changes them."""
        self._require_presence()
        self._states.settle()
        result: dict[str, torch.Tensor] = {}
        steps = {share.name: share.step for share in chain.from_iterable(self._shares)}
        for entry in self._entries:
            parameter = self._parameters[entry.name]
            if self.keeps_parameters and MASTER not in entry.kinds:
                result[f"parameter/{entry.name}"] = parameter
            result |= {f"{kind}/{entry.name}": shaped(self._states.home(entry, kind), parameter) for kind in entry.kinds}
            result[f"step/{entry.name}"] = steps[entry.name]
        return result

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, torch.Tensor], updates: int, skipped: int) -> None:
        own = self.tensors()
        refuse_misfits(own, tensors)
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        for share in chain.from_iterable(self._shares):
            share.step.copy_(tensors[f"step/{share.name}"])
        for number in self._states.stream(read=(MASTER,), written=()):
            copy_all([(s.parameter, s.weights) for s in self._shares[number] if s.weights is not s.parameter])
        self.updates, self.skipped = updates, skipped

    def memory(self) -> Iterator[torch.Tensor]:
        """All of its memory except parameters and gradients, on the device and on the host."""
        yield from self._states.memory()


def trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    found = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}
    gaps = [name for name, p in found.items() if torch.empty_like(p, device="meta").stride() != p.stride()]  # a copy leaves gaps out
    assert not gaps, f"{gaps[0]} does not fill its memory range: give it memory of its own"
    return found


def is_low(parameter: torch.Tensor) -> bool:
    """Whether its type is too coarse for it to be its own master."""
    return parameter.dtype not in (torch.float32, torch.float64)


def room_of(parameter: torch.Tensor) -> int:
    """Float32 numbers that its accumulator takes, with padding for alignment."""
    return aligned(4 * parameter.numel()) // 4


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
def restore_parameters(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Restore only the trained parameters from an optimizer's checkpoint, for a model that is not trained further."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            saved = tensors.get(f"parameter/{name}", tensors.get(f"master/{name}"))
            if saved is None:
                raise UserError(f"the checkpoint does not hold {name}. Use the [lora] settings that it was saved with")
            parameter.copy_(saved)


def refuse_misfits(own: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    misfits = [f"{name} is not in the checkpoint" for name in own if name not in saved]
    misfits += [f"{name} is in the checkpoint only" for name in saved if name not in own]
    misfits += [
        f"{name} has the shape {list(saved[name].shape)} in the checkpoint and {list(tensor.shape)} now"
        for name, tensor in own.items()
        if name in saved and tensor.shape != saved[name].shape
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
