"""Recompute: computing activations again in the backward pass instead of keeping them.

Enters: a loaded model (fused or plain, with or without adapters, or a critic) and a `Recompute` setting. Leaves: the same model, whose
decoder layers have a wrapper around their forwards. Guaranteed: parameters stay the same objects at the same
addresses; without gradients nothing changes, so rollout, graphs and log-prob passes are not affected; the second forward pass runs the same
operations on the same numbers in the same shapes, including the choice of experts, so gradients keep their bits.

    full        a unit of layers keeps only its input
    selective   it also keeps the results of matrix products and attention; norms, rotary embedding, the gated product and all other cheap
                operations are computed again. No product and no attention runs twice, except soft-capped attention, which always computes
                its scores again (model/attention.py).

A unit is one of the first `layers` layers (`block`: the rest keep everything) or `layers` consecutive layers (`uniform`: all layers are in
a unit), as in Megatron. Wrappers nest in the order they are applied: fuse or compile, then recompute, then offload of activations.

    apply_recompute(model, Recompute("full", layers=2, method="uniform"))
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from fulltilt.model.attention import UnsupportedModel
from fulltilt.model.fuse import PRODUCT_NODE
from fulltilt.model.scalar import decoder_layers
from fulltilt.shape import Recompute

Forward = Callable[..., Any]

# Operations whose results selective recompute keeps. Batched products (bmm) are not included: they are attention scores in plain torch, or
# weights that adapters on experts add, both larger than their inputs.
PRODUCTS = ("mm", "addmm", "linear", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm")
ATTENTION = (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward",
    "_efficient_attention_forward",
)  # fmt: skip
NO_LAYERS = 'their activations cannot be recomputed or offloaded. Set recompute = "none" and offload_activations = false'


def apply_recompute(model: torch.nn.Module, setting: Recompute) -> None:
    """Apply the setting to the model's layers."""
    layers = decoder_layers(model, NO_LAYERS)
    for members in setting.units(len(layers)):
        unit = Unit(run_full if setting.kind == "full" else run_selective, len(members))
        for place, index in enumerate(members):
            put_around(layers[index], UnitForward(layers[index], layers[index].forward, unit, place))


# ---- wrappers around forwards ------------------------------------------------------------------------------------------------------


def put_around(layer: torch.nn.Module, forward: Forward) -> None:
    """Replace the layer's forward by this one, which calls the previous one."""
    if getattr(vars(layer).get("forward"), "outermost", False):
        raise RuntimeError("activations of this layer are offloaded already, which has to come last")
    layer.forward = forward


@dataclass(eq=False)
class Unit:
    """Layers that are recomputed together. Layers before the last defer their calls, so that all of them run inside one recomputation."""

    run: Callable[[Forward, torch.Tensor, bool], Any]
    size: int
    calls: list[Forward] = field(default_factory=list)
    handed_on: torch.Tensor | None = None  # result of the last deferred call, which is the call's own input


@dataclass(eq=False)
class UnitForward:
    """The forward function of one layer of a unit. Without gradients, it is the layer's own. It is an object, so that copies of the layer
    run themselves."""

    layer: torch.nn.Module
    own: Forward
    unit: Unit
    place: int  # the layer's place in the unit

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.own(hidden_states, *args, **kwargs)
        unit = self.unit
        if self.place == 0:
            unit.calls.clear()  # left by a pass that was aborted
        elif hidden_states is not unit.handed_on or len(unit.calls) != self.place:
            raise UnsupportedModel(
                f"the model of {type(self.layer).__name__} does more between layers than pass hidden states on: layers cannot be "
                'recomputed together. Set recompute_method = "block"'
            )
        unit.calls.append(lambda states: self.own(states, *args, **kwargs))
        if self.place < unit.size - 1:
            unit.handed_on = hidden_states
            return hidden_states
        calls, unit.calls, unit.handed_on = unit.calls, [], None
        # In evaluation mode no layer draws a random number.
        return unit.run(partial(chain, calls), hidden_states, self.layer.training)


def chain(calls: Sequence[Forward], hidden_states: torch.Tensor) -> Any:
    for call in calls:
        hidden_states = call(hidden_states)
    return hidden_states


# ---- full and selective ------------------------------------------------------------------------------------------------------------


def run_full(forward: Forward, hidden_states: torch.Tensor, random: bool) -> Any:
    return checkpoint(forward, hidden_states, use_reentrant=False, preserve_rng_state=random)


def run_selective(forward: Forward, hidden_states: torch.Tensor, random: bool) -> Any:
    kept = KeptResults(KEEPER.get())
    modes = (Intercepting(kept.record), Intercepting(kept.replay))
    out = checkpoint(forward, hidden_states, use_reentrant=False, preserve_rng_state=random, context_fn=lambda: modes)
    if isinstance(out, torch.Tensor) and ends_in_product(out):
        kept.forget_last()
    return out


class Keeper(Protocol):
    """Holds saved tensors, and results that selective recompute keeps, between forward and backward pass. `saving_to` sets it."""

    def put(self, tensor: torch.Tensor) -> Any: ...

    def take(self, held: Any) -> torch.Tensor: ...


KEEPER: ContextVar[Keeper | None] = ContextVar("keeper", default=None)


@contextmanager
def saving_to(keeper: Keeper) -> Iterator[None]:
    """Enclose passes whose saved tensors go through the keeper, and also kept results, which torch's hooks do not see."""
    token = KEEPER.set(keeper)
    try:
        with saved_tensors_hooks(keeper.put, keeper.take):
            yield
    finally:
        KEEPER.reset(token)


class KeptResults:
    """Results of one unit's products and attention, in the order in which they were computed. Each is used once."""

    def __init__(self, keeper: Keeper | None) -> None:
        self._keeper, self._expensive = keeper, expensive_operations()
        self._results: deque[tuple[Any, Any]] = deque()  # each operation, with its results as functions that return them (None: forgotten)
        self._addresses: set[int] = set()

    def record(self, operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operation of the first forward pass, and keep the results of an expensive one."""
        if operation._schema.is_mutable:
            self._refuse_change(operation, args)
        result = operation(*args, **kwargs)
        if operation in self._expensive:
            self._results.append((operation, tree_map(self._hold, result)))
        return result

    def _hold(self, part: Any) -> Callable[[], Any]:
        if not isinstance(part, torch.Tensor):  # attention also returns numbers
            return lambda: part
        self._addresses.add(part.untyped_storage().data_ptr())
        tensor = part.detach()  # the tensor itself will refer to the graph, whose nodes hold this record
        return partial(self._keeper.take, self._keeper.put(tensor)) if self._keeper else lambda: tensor

    def replay(self, operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operation of the second forward pass, or return its kept result."""
        if operation not in self._expensive:
            return operation(*args, **kwargs)
        if not self._results:
            raise RuntimeError("a second backward pass through the same selectively recomputed layers: their kept results are used up")
        same, held = self._results.popleft()
        assert same is operation, f"{operation} where the first forward pass ran {same}"
        return operation(*args, **kwargs) if held is None else tree_map(lambda give: give(), held)

    def forget_last(self) -> None:
        """Release the last result. If it is needed after all, it is computed again."""
        operation, _ = self._results.pop()
        self._results.append((operation, None))

    def _refuse_change(self, operation: Any, args: Sequence[Any]) -> None:
        changed = args[0] if args else None
        if isinstance(changed, torch.Tensor) and changed.untyped_storage().data_ptr() in self._addresses:
            raise UnsupportedModel(
                f"the model changes the result of a matrix product or of attention in place ({operation}), so it cannot be kept. "
                'Set recompute = "full" or "none"'
            )


@cache
def expensive_operations() -> frozenset[Any]:
    import torch.nn.attention.varlen  # registers its operation

    found = {getattr(torch.ops.aten, name).default for name in (*PRODUCTS, *ATTENTION) if hasattr(torch.ops.aten, name)}
    return frozenset(found | {torch.ops.torch_attn._varlen_attn.default, torch.ops.fulltilt.packed_attention.default})


class Intercepting(TorchDispatchMode):
    """Runs operations through a function. A mode works below autograd, so the graph and its saved tensors are the same as in a plain
    pass."""

    def __init__(self, run: Callable[[Any, Sequence[Any], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._run(func, args, kwargs or {})


def ends_in_product(out: torch.Tensor) -> bool:
    """Return whether the last operation adds a product to the residual. If so, nothing after the product is saved, and the second pass,
    which stops at the last saved tensor, stops before the product: its result need not be kept."""
    last = out.grad_fn
    if last is None or last.name() != "AddBackward0":
        return False
    waiting = [last.next_functions[1][0]]  # residual + result
    while waiting:
        node = waiting.pop()
        name = "" if node is None else node.name()
        if name in ("MmBackward0", "AddmmBackward0", PRODUCT_NODE):
            return True
        if node is not None and name in ("AddBackward0", "ViewBackward0", "UnsafeViewBackward0"):
            waiting += [before for before, _ in node.next_functions]
    return False
