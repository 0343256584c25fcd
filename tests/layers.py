"""Recompute and offload of activations for as long as a test wants them. A run never takes them off its layers."""

from __future__ import annotations

from typing import Any

import torch

from fulltilt.memory import activations, recompute
from fulltilt.model.scalar import decoder_layers
from fulltilt.shape import Recompute


class Applied:
    """Made before a model's layers get another forward: knows the ones that they have."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._before = [(layer, vars(layer).get("forward")) for layer in decoder_layers(model, "")]

    def remove(self) -> None:
        for layer, before in self._before:
            vars(layer).pop("forward", None)
            if before is not None:
                layer.forward = before


def apply_recompute(model: torch.nn.Module, setting: Recompute) -> Applied:
    applied = Applied(model)
    recompute.apply_recompute(model, setting)
    return applied


def offload_activations(model: torch.nn.Module, **given: Any) -> Applied:
    applied = Applied(model)
    activations.offload_activations(model, **given)
    return applied
