"""The one function that runs a layer's experts: training, prefill and captured decoding of every mixture-of-experts model go through it.

Enters: hidden states of T tokens, and for each token the experts that its router chose and their weights, as transformers' experts
interface passes them; every choice is an existing expert. Leaves: for each token the weighted sum of its experts' results. Guaranteed: a
token's result depends on no other token except for the rounding of a matrix product, even if others are empty, padded or not finite; sums
run in a fixed order, forward and backward, never through atomics; experts without tokens cost nothing and have a gradient of zero. Tokens
are sorted by expert and counted on the device, once per layer, and torch multiplies all experts in one call: two calls per layer forward
and four backward, whatever the number of experts. In bfloat16 on a GPU that has the kernel, sums are in float32 and the host never waits,
so a CUDA graph can hold the layer; `why_not_captured` gives the reason if it cannot.

An adapter on a stack of weights (`ADAPTERS`) runs as two thin grouped products beside the stack's own. The stack itself is only read: no
pass creates a tensor of its size, and in bfloat16 no change is lost because it is too small for the weight.

If each worker has some of the experts, the object in the attribute `SPLIT` of their module runs them (parallel/experts.py), with the same
products on sorted rows (`run_sorted`).

Routers and their gradients, which come through the weights of the choices, are the model's own. The load-balancing loss belongs to
transformers' own language-model head, which training here does not use.

    AutoModelForCausalLM.from_pretrained(path, experts_implementation=register())
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from fulltilt.kernels.gated import gated

NAME = "fulltilt"
ADAPTERS = "_fulltilt_adapters"  # attribute of a module with adapters: parameter name -> the layer of peft that holds its adapter
SPLIT = "_fulltilt_split"  # attribute of a module whose experts are divided among workers: a `SplitExperts`
GROUPED = (torch.bfloat16, torch.float16, torch.float32)  # torch has one call for all experts in these types
ALIGNED = 16  # rows must be a multiple of this many bytes in that call
MOST_EXPERTS = 1023  # limit of that call on CUDA
CAPTURABLE = (9, 10)  # compute capabilities (major) with a kernel; on others the call copies the counts to the host and loops there


@dataclass(frozen=True, eq=False)
class Route:
    """The T x k choices of experts, sorted by expert."""

    experts: torch.Tensor  # int16 [T * k]: the chosen experts, sorted
    order: torch.Tensor  # int64 [T * k]: sorted position -> choice; choice c belongs to token c // k
    places: torch.Tensor  # int64 [T * k]: choice -> sorted position
    ends: torch.Tensor  # int32 [experts]: the position after each expert's last row
    live: torch.Tensor | None = None  # bool [T * k, 1]: sorted rows that have an expert; None: all have one

    @staticmethod
    def of(chosen: torch.Tensor, count: int, *, all_live: bool = True) -> Route:
        """Sort the choices `chosen` [T, k]. A stable sort: an expert's tokens keep their order, so that sums over them do. Without
        `all_live`, choices of `count` have no expert here: their rows come last, and their results are zero."""
        experts, order = torch.sort(chosen.flatten().to(torch.int16), stable=True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        numbers = torch.arange(count, dtype=torch.int16, device=order.device)
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
        return Route(experts, order, places, ends, None if all_live else (experts < count)[:, None])

    def sort(self, rows: torch.Tensor, choices: int | None = None) -> torch.Tensor:
        """Return rows in the order of experts. With `choices`, the rows are those of tokens, each of which has that many choices."""
        return _Reorder.apply(rows, self.order, self.places, choices)

    def unsort(self, rows: torch.Tensor) -> torch.Tensor:
        """Return sorted rows in the order of choices."""
        return _Reorder.apply(rows, self.places, self.order, None)

    def masked(self, rows: torch.Tensor) -> torch.Tensor:
        """Return sorted rows, with zeros for those without an expert."""
        return rows if self.live is None else torch.where(self.live, rows, 0)


class SplitExperts(Protocol):
    """Runs the experts of a module that has some of them, together with the workers that have the others."""

    @property
    def waits(self) -> bool:
        """Whether the host waits for the device in a pass without gradients."""
        ...

    def run(self, module: Any, hidden_states: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor: ...


def run_experts(self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """Run the experts of the module `self`, which has transformers' experts interface. Each of its parameters is read once."""
    split: SplitExperts | None = getattr(self, SPLIT, None)
    if split is not None:
        return split.run(self, hidden_states, top_k_index, top_k_weights)
    route = Route.of(top_k_index, self.num_experts)
    outer = run_sorted(self, route.sort(hidden_states, top_k_index.shape[-1]), route)
    return weighted_sum(route.unsort(outer), top_k_weights).to(hidden_states.dtype)


def run_sorted(module: Any, rows: torch.Tensor, route: Route) -> torch.Tensor:
    """Run each row [S, width], sorted by the experts that the module has, through its expert."""
    first, last = projections(module)
    return project(module, last, activate(module, project(module, first, rows, route)), route)


def weighted_sum(results: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Sum the results [T * k, width] of each token's experts with the router's weights [T, k]."""
    return (results.view(*shares.shape, results.shape[-1]) * shares[..., None]).sum(1)  # torch adds up in float32 or better


def register() -> str:
    """Register the function with transformers under its name."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, run_experts)
    return NAME


def projections(module: Any) -> tuple[str, str]:
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def project(module: Any, name: str, rows: torch.Tensor, route: Route) -> torch.Tensor:
    weight = getattr(module, name)
    out = grouped_product(rows, weight if module.is_transposed else weight.transpose(1, 2), route)
    adapter = getattr(module, ADAPTERS, {}).get(name)
    if adapter is not None and not (adapter.disable_adapters or adapter.merged):
        inward, outward, scale = adapter.get_delta_factors(*adapter.active_adapters)
        if not module.is_transposed:
            inward, outward = outward.transpose(1, 2), inward.transpose(1, 2)
        out = torch.add(out, adapter_product(rows, inward, outward, route), alpha=scale)
    if not module.has_bias:
        return out
    expert = route.experts.long() if route.live is None else route.experts.long().clamp(max=len(weight) - 1)
    return route.masked(out + getattr(module, f"{name}_bias")[expert])


def activate(module: Any, inner: torch.Tensor) -> torch.Tensor:
    if not module.has_gate:
        return module.act_fn(inner)
    plain = type(module)._apply_gate is _default_apply_gate and type(module.act_fn) in (torch.nn.SiLU, SiLUActivation)
    return gated(inner) if plain else module._apply_gate(inner)


def grouped_product(rows: torch.Tensor, weights: torch.Tensor, route: Route) -> torch.Tensor:
    """Multiply rows [S, in], sorted by expert, with their experts' weights [experts, in, out]. torch leaves uninitialised memory in the
    results, and in the gradients, of rows after the last expert's: they are masked on both sides of the product."""
    rows = route.masked(rows)
    if why_one_by_one(weights) is None:
        return route.masked(F.grouped_mm(rows, weights, offs=route.ends))
    counts = torch.diff(route.ends, prepend=route.ends.new_zeros(1)).tolist()
    *groups, behind = rows.split([*counts, len(rows) - sum(counts)])
    products = [group @ weight for group, weight in zip(groups, weights, strict=True)]
    return torch.cat([*products, behind.new_zeros(len(behind), weights.shape[-1])])


def adapter_product(rows: torch.Tensor, inward: torch.Tensor, outward: torch.Tensor, route: Route) -> torch.Tensor:
    """Return rows @ inward [experts, in, rank] @ outward [experts, rank, out]. Ranks that torch's call does not accept are padded with
    zeros."""
    missing = -inward.shape[-1] % (ALIGNED // inward.itemsize)
    if missing:
        inward, outward = F.pad(inward, (0, missing)), F.pad(outward, (0, 0, 0, missing))
    return grouped_product(grouped_product(rows, inward, route), outward.contiguous(), route)


def why_one_by_one(weights: torch.Tensor) -> str | None:
    """Return why torch cannot multiply these experts in one call; None: it can."""
    if weights.dtype not in GROUPED:
        return f"torch has no grouped product in {type_of(weights)}"
    widths = weights.shape[1:]
    if any(width * weights.itemsize % ALIGNED for width in widths):
        return f"torch's grouped product needs rows of a multiple of {ALIGNED} bytes, and these are {widths[0]} by {widths[1]} numbers"
    if weights.is_cuda and len(weights) > MOST_EXPERTS:
        return f"torch's grouped product takes {MOST_EXPERTS} experts at most, and these are {len(weights)}"
    return None


# ---- adapters ----------------------------------------------------------------------------------------------------------------------


def takes_adapter(module: torch.nn.Module, name: str) -> bool:
    """Return whether an adapter on this parameter of the module can run through `run_experts`."""
    return has_interface(module) and name in projections(module)


def runs_here(module: Any) -> bool:
    """Return whether the module runs through `run_experts` and not through another implementation."""
    return has_interface(module) and module.config._experts_implementation == NAME


def has_interface(module: torch.nn.Module) -> bool:
    return hasattr(module, "is_concatenated")  # transformers' experts interface sets it on every module that uses it


# ---- CUDA graphs -------------------------------------------------------------------------------------------------------------------


def used_by_a_token(parameter: torch.Tensor, config: Any) -> int:
    """Return how many numbers of a parameter one token is multiplied with: of stacked experts, only those of the token's experts."""
    text = config.get_text_config()
    active = getattr(text, "num_experts_per_tok", None)
    if parameter.ndim < 3 or not active:
        return parameter.numel()
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or len(parameter)
    return parameter.numel() * active // experts  # on average, if a worker has some of the experts


def why_not_captured(model: PreTrainedModel) -> str | None:
    """Return why a CUDA graph cannot hold the model's experts; None if it can."""
    reasons = ((name, why_host_counts(module)) for name, module in model.named_modules() if has_interface(module))
    return next((f"the host counts the tokens of each expert in {name}: {reason}" for name, reason in reasons if reason is not None), None)


def why_host_counts(module: Any) -> str | None:
    if module.config._experts_implementation == "eager":
        return "the model was loaded with transformers' loop over experts (experts_implementation = eager)"
    split: SplitExperts | None = getattr(module, SPLIT, None)
    if split is not None and split.waits:
        return "they are divided among workers, which tell one another how many rows they send"
    for weights in (parameter for parameter in module.parameters() if parameter.ndim == 3):
        reason = why_one_by_one(weights)
        if reason is not None:
            return reason
        if weights.dtype != torch.bfloat16:
            return f"torch's grouped product runs without the host in bfloat16 only, and the experts are in {type_of(weights)}"
        if weights.is_cuda and torch.cuda.get_device_capability(weights.device)[0] not in CAPTURABLE:
            major, minor = torch.cuda.get_device_capability(weights.device)
            return f"torch's grouped product needs a GPU of compute capability 9 or 10, and this one has {major}.{minor}"
    return None


def type_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class _Reorder(torch.autograd.Function):
    """Reorders rows by `index`, whose inverse permutation is `inverse`. With `choices`, each row is read for that many choices: rows [T,
    width] -> [T * choices, width]. The gradient of reading by index would be a scattered addition; with the inverse it is another read:
    faster, and always in the same order."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor, choices: int | None) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.choices = choices
        return rows[index if choices is None else index // choices]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_rows: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_choices = of_rows[ctx.saved_tensors[0]]
        if ctx.choices is None:
            return of_choices, None, None, None
        return of_choices.unflatten(0, (len(of_choices) // ctx.choices, ctx.choices)).sum(1), None, None, None
