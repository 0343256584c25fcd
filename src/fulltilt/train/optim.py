"""AdamW over float32 masters.

Enters: gradients accumulated on a model's parameters. Leaves: changed parameters. Guaranteed: masters, moments and accumulated gradients
are float32 or better whatever type computes (a tied weight's two gradients are summed there too); a non-finite gradient changes nothing
and is reported; tensors and counters of a checkpoint restore the optimizer bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fulltilt.config import TrainConfig
from fulltilt.records import UserError

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StepReport:
    grad_norm: float  # before clipping
    lr: float
    skipped: bool  # the gradient was not finite


def learning_rate(config: TrainConfig, update: int, total: int) -> float:
    """Of optimizer step `update` (from 0) out of `total`."""
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    share = min(1.0, (update - config.warmup_steps) / max(1, total - config.warmup_steps))
    fall = 1.0 - share if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * fall)


class Optimizer:
    """Over all parameters of `model` that require a gradient.

    `keeps_parameters`: their values go into checkpoints with the moments, because nothing else there holds them (a critic, adapters).
    """

    def __init__(self, model: torch.nn.Module, config: TrainConfig, total_updates: int, *, keeps_parameters: bool = False) -> None:
        self.config = config
        self.keeps_parameters = keeps_parameters
        self.total_updates = total_updates
        self.updates = 0  # place in the schedule: updates tried, and those that steps with too few samples left out
        self.skipped = 0
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters = {name: self._master(p) for name, p in self._parameters.items()}
        matrices = [master for master in self._masters.values() if master.ndim >= 2]
        others = [master for master in self._masters.values() if master.ndim < 2]
        on_cuda = all(master.is_cuda for master in self._masters.values())  # fused there: no temporaries of the size of the masters
        self._adam = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.lr, betas=config.betas, eps=config.eps, fused=on_cuda,
        )  # fmt: skip
        for master in self._masters.values():
            # Taken now rather than at the first step, so that memory measured at the start of a run stays true.
            step = torch.zeros((), dtype=torch.float32, device=master.device if on_cuda else "cpu")
            self._adam.state[master] = {"step": step} | {name: torch.zeros_like(master) for name in MOMENTS}

    def _master(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        if parameter.dtype in (torch.float32, torch.float64):
            return parameter
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
        parameter.register_post_accumulate_grad_hook(accumulate)
        return parameter.detach().float().clone()

    def begin(self, update: int) -> None:
        """A step begins, whose first update is the run's `update`-th (from 0). Earlier steps may have made fewer than they could: the
        schedule goes by the run's steps and ends with them."""
        self.updates = update
        self.zero_grad()

    def zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None
            if hasattr(parameter, "main_grad"):
                parameter.main_grad.zero_()

    def step(self) -> StepReport:
        """Apply the accumulated gradients, clipped, and forget them."""
        lr = learning_rate(self.config, self.updates, self.total_updates)
        self.updates += 1
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if master is not parameter:
                master.grad = parameter.main_grad  # type: ignore[attr-defined]
        gradients = [master.grad for master in self._masters.values() if master.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        if math.isfinite(norm):
            self._apply(gradients, norm, lr)
        else:
            self.skipped += 1
        self.zero_grad()
        return StepReport(grad_norm=norm, lr=lr, skipped=not math.isfinite(norm))

    @torch.no_grad()
    def _apply(self, gradients: list[torch.Tensor], norm: float, lr: float) -> None:
        if self.config.clip_grad and norm > self.config.clip_grad:
            torch._foreach_mul_(gradients, self.config.clip_grad / (norm + 1e-6))
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        for name, parameter in self._parameters.items():
            if self._masters[name] is not parameter:
                parameter.copy_(self._masters[name])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that a checkpoint must hold beside the model itself, and the trained parameters too if it keeps them."""
        result: dict[str, torch.Tensor] = {}
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                result[f"master/{name}"] = master
            elif self.keeps_parameters:
                result[f"parameter/{name}"] = master
            for moment in MOMENTS:
                result[f"{moment}/{name}"] = self._adam.state[master][moment]
            result[f"step/{name}"] = self._adam.state[master]["step"]
        return result

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, torch.Tensor], updates: int, skipped: int) -> None:
        own = self.tensors()
        refuse_misfits(own, tensors)
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        for name, parameter in self._parameters.items():
            if self._masters[name] is not parameter:
                parameter.copy_(self._masters[name])
        self.updates, self.skipped = updates, skipped


@torch.no_grad()
def restore_parameters(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """The trained parameters alone, from what an optimizer that keeps them has saved: for a model that is only run."""
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
    """Add a micro-batch's gradient to the float32 accumulator and drop it. The head has put its own there already and leaves none."""
    if parameter.grad is not None:
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None
