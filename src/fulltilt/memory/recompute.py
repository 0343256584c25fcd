"""Computing activations again in the backward pass instead of keeping them.

Enters: a loaded model (fused or plain, with adapters or without, a critic's body too) and a `Recompute` setting. Leaves: the same model,
whose decoder layers run in front of their own forwards what keeps less, and a handle that takes it away again. Guaranteed: parameters stay
the objects they were, where they were; without a gradient nothing changes, so rollout, graphs and log-prob passes are untouched; the second
forward pass runs the same operations on the same numbers in the same shapes, experts' choices included, so gradients keep their bits.

    full        a unit of layers keeps its input and nothing else
    selective   it also keeps the results of matrix products and of attention; norms, rotary embedding, the gated product and all else that
                is cheap are computed again. No product and no attention runs twice. Soft-capped attention keeps nothing by itself
                (model/attention.py) and is the exception.

A unit is one of the first `layers` layers (`block`: the rest keep everything) or `layers` consecutive layers (`uniform`: all layers are in
a unit), as in Megatron. What goes first onto a layer stays inside: fuse or compile, then recompute, then offload of activations.

    handle = apply_recompute(model, Recompute("full", layers=2, method="uniform"))
    handle.remove()
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal, Protocol, get_args

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fulltilt.model.attention import UnsupportedModel
from fulltilt.model.fuse import PRODUCT_NODE
from fulltilt.model.scalar import ScalarModel
from fulltilt.records import UserError

Kind = Literal["none", "selective", "full"]
Method = Literal["block", "uniform"]
Forward = Callable[..., Any]

# What selective recompute keeps. Batched products (bmm) are not among them: they are attention scores in plain torch, or the weights that
# adapters on experts add, both larger than what they are computed from.
PRODUCTS = ("mm", "addmm", "linear", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm")
ATTENTION = (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward",
    "_efficient_attention_forward",
)  # fmt: skip


@dataclass(frozen=True)
class Recompute:
    kind: Kind = "none"
    layers: int | None = None  # block: the first so many; uniform: so many in a unit. None: all of them, one by one
    method: Method = "block"

    def __post_init__(self) -> None:
        assert self.kind in get_args(Kind) and self.method in get_args(Method)
        assert self.layers is None or self.layers >= 1

    def units(self, count: int) -> list[range]:
        """Which of a model's `count` layers are recomputed together."""
        if self.kind == "none":
            return []
        if self.layers is not None and self.layers > count:
            raise UserError(f"recompute_layers is {self.layers}, and the model has {count} layers. Give at most {count}")
        if self.method == "block":
            return [range(layer, layer + 1) for layer in range(self.layers or count)]
        size = self.layers or 1
        return [range(start, min(start + size, count)) for start in range(0, count, size)]


def apply_recompute(model: torch.nn.Module, setting: Recompute) -> Forwards:
    """Make the model's layers keep what `setting` says. The handle's `remove` undoes it."""
    layers = decoder_layers(model)
    run = {"none": None, "full": run_full, "selective": run_selective}[setting.kind]
    forwards = Forwards()
    for unit in setting.units(len(layers)):
        assert run is not None
        members = [layers[index] for index in unit]
        shared = Unit(run, len(members))
        for place, layer in enumerate(members):
            forwards.put(layer, UnitForward(layer, layer.forward, shared, place))
    return forwards


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    body: Any = (model.body if isinstance(model, ScalarModel) else model).base_model
    layers = getattr(body, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise UnsupportedModel(
            f"{type(body).__name__} does not keep its decoder layers as `layers`: what they save cannot be recomputed or offloaded. "
            'Set recompute = "none" and offload_activations = false'
        )
    return list(layers)


# ---- forwards in front of forwards -------------------------------------------------------------------------------------------------


class Forwards:
    """Forwards put in front of layers' own, and the way back."""

    def __init__(self) -> None:
        self._put: list[tuple[torch.nn.Module, Forward | None, Forward]] = []  # layer, what its instance had, what it got

    def put(self, layer: torch.nn.Module, forward: Forward) -> None:
        before = vars(layer).get("forward")
        if getattr(before, "outermost", False):
            raise RuntimeError("activations of this layer are offloaded already, which has to come last: remove that first")
        self._put.append((layer, before, forward))
        layer.forward = forward

    def remove(self) -> None:
        """Take every forward away again. What has been put in front of one since must go first; what took it away (`unfuse`) is right."""
        if any(vars(layer).get("forward", ours) is not ours for layer, _, ours in self._put):
            raise RuntimeError("another forward was put in front of a layer: remove that first")
        while self._put:
            layer, before, _ = self._put.pop()
            if vars(layer).pop("forward", None) is not None and before is not None:
                layer.forward = before


@dataclass(eq=False)
class Unit:
    """Layers that are recomputed as one. Those before the last put their calls off, so that all of them run inside one recomputation."""

    run: Callable[[Forward, torch.Tensor, bool], Any]
    size: int
    calls: list[Forward] = field(default_factory=list)
    handed_on: torch.Tensor | None = None  # what the last call that was put off has returned: its own input


@dataclass(eq=False)
class UnitForward:
    """The forward of one layer of a unit: its own where no gradient is wanted. An object, so that copies of the layer run themselves."""

    layer: torch.nn.Module
    own: Forward
    unit: Unit
    place: int  # in the unit

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.own(hidden_states, *args, **kwargs)
        unit = self.unit
        if self.place == 0:
            unit.calls.clear()  # of a pass that broke off
        elif hidden_states is not unit.handed_on or len(unit.calls) != self.place:
            raise UnsupportedModel(
                f"the model of {type(self.layer).__name__} does more between layers than to hand hidden states on: layers cannot be "
                'recomputed together. Set recompute_method = "block"'
            )
        unit.calls.append(partial(with_keywords, self.own, args, kwargs))
        if self.place < unit.size - 1:
            unit.handed_on = hidden_states
            return hidden_states
        calls, unit.calls, unit.handed_on = unit.calls, [], None
        # In evaluation mode no layer draws a random number.
        return unit.run(partial(chain, calls), hidden_states, self.layer.training)


def with_keywords(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], hidden_states: torch.Tensor) -> Any:
    return forward(hidden_states, *args, **kwargs)


def chain(calls: Sequence[Forward], hidden_states: torch.Tensor) -> Any:
    for call in calls:
        hidden_states = call(hidden_states)
    return hidden_states


# ---- full and selective ------------------------------------------------------------------------------------------------------------


def run_full(forward: Forward, hidden_states: torch.Tensor, random: bool) -> Any:
    return checkpoint(forward, hidden_states, use_reentrant=False, preserve_rng_state=random)


def run_selective(forward: Forward, hidden_states: torch.Tensor, random: bool) -> Any:
    kept = KeptResults(KEEPER.get() or HoldsAsIs())
    modes = (Recording(kept), Replaying(kept))
    out = checkpoint(forward, hidden_states, use_reentrant=False, preserve_rng_state=random, context_fn=lambda: modes)
    if isinstance(out, torch.Tensor) and ends_in_product(out):
        kept.forget_last()
    return out


class Keeper(Protocol):
    """Who holds kept results between the passes. torch's hooks on saved tensors do not see them, so whoever moves or counts saved tensors
    sets one of these beside its hooks."""

    def put(self, tensor: torch.Tensor) -> Any: ...

    def take(self, held: Any) -> torch.Tensor: ...


class HoldsAsIs:
    def put(self, tensor: torch.Tensor) -> Any:
        return tensor

    def take(self, held: Any) -> torch.Tensor:
        assert isinstance(held, torch.Tensor)
        return held


KEEPER: ContextVar[Keeper | None] = ContextVar("keeper", default=None)


@dataclass(frozen=True)
class Plain:
    """A part of a result that is no tensor."""

    value: Any


class KeptResults:
    """Results of one unit's products and attention, in the order in which they were computed. Each is handed out once."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._results: deque[tuple[Any, tuple[Any, ...] | None, bool]] = deque()  # operation, what it gave, whether as a tuple
        self._addresses: set[int] = set()

    def put(self, operation: Any, result: Any) -> None:
        parts = result if isinstance(result, tuple | list) else (result,)
        # Detached: the tensor itself will know the graph, whose nodes hold this record. Attention also returns numbers, which stay.
        held = tuple(self._keeper.put(part.detach()) if isinstance(part, torch.Tensor) else Plain(part) for part in parts)
        self._results.append((operation, held, parts is result))
        self._addresses.update(part.untyped_storage().data_ptr() for part in parts if isinstance(part, torch.Tensor))

    def refuse_change(self, operation: Any, args: Sequence[Any]) -> None:
        changed = args[0] if args else None
        if isinstance(changed, torch.Tensor) and changed.untyped_storage().data_ptr() in self._addresses:
            raise UnsupportedModel(
                f"the model changes the result of a matrix product or of attention in place ({operation}), so it cannot be kept as it was. "
                'Set recompute = "full" or "none"'
            )

    def forget_last(self) -> None:
        """Let go of the last result. If it is asked for after all, it is computed again."""
        operation, _, several = self._results.pop()
        self._results.append((operation, None, several))

    def take(self, operation: Any) -> Any:
        """What the operation gave, or None where that was forgotten."""
        if not self._results:
            raise RuntimeError("a second backward pass through the same selectively recomputed layers: what they kept is used up")
        same, held, several = self._results.popleft()
        assert same is operation, f"{operation} where the first forward pass ran {same}"
        if held is None:
            return None
        parts = tuple(part.value if isinstance(part, Plain) else self._keeper.take(part) for part in held)
        return parts if several else parts[0]


@cache
def expensive_operations() -> frozenset[Any]:
    import torch.nn.attention.varlen  # makes its operation known

    found = {getattr(torch.ops.aten, name).default for name in (*PRODUCTS, *ATTENTION) if hasattr(torch.ops.aten, name)}
    return frozenset(found | {torch.ops.torch_attn._varlen_attn.default, torch.ops.fulltilt.packed_attention.default})


class Recording(TorchDispatchMode):
    """The first forward pass. A mode works below autograd, so the graph and what its nodes save are those of the plain pass."""

    def __init__(self, kept: KeptResults) -> None:
        super().__init__()
        self._kept, self._expensive = kept, expensive_operations()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            self._kept.refuse_change(func, args)
        result = func(*args, **(kwargs or {}))
        if func in self._expensive:
            self._kept.put(func, result)
        return result


class Replaying(TorchDispatchMode):
    """The second one: kept results in place of products and attention."""

    def __init__(self, kept: KeptResults) -> None:
        super().__init__()
        self._kept, self._expensive = kept, expensive_operations()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._kept.take(func) if func in self._expensive else None
        return func(*args, **(kwargs or {})) if result is None else result


def ends_in_product(out: torch.Tensor) -> bool:
    """Whether a product was merely added to the residual at the end. Then nothing behind it is saved, and the second pass, which stops at
    the last saved tensor, stops before it: its result need not be kept."""
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
