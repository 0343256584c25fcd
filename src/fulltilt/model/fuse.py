"""Fused layers: a transformers model runs with few kernels per layer, on its own weights.

Enters: a loaded model on its device. Leaves: the same model object with other forwards on its modules, and a report. Norms (with the
addition before them), rotary embedding and the gated product run as one kernel each; q, k and v run as one matrix product, gate and up as
another. Guaranteed: every parameter stays the same object under the same name; only its memory moves, once, so that parameters which run as
one product are slices of one storage and nothing exists twice. Saving, optimizers that update in place, hooks on parameters and `main_grad`
keep working; a projection that has an accumulator and no hook leaves no other gradient. Each parameter gets its own gradient. Results are
those of the unfused model: bit for bit if only kernels replace operations on CPU, within the rounding of a matrix product if projections
run as one (in float32 on the small models of the tests: hidden states, log-probs and gradients within 1e-5 of their size).

An unknown model is left unchanged as a whole, with the reason in the report. If an adapter (peft) or a hook is on a projection, before or
after fusing, the projections of that group run separately, and the report of `check_fused` names them. The attention forward still calls
transformers' attention interface, so packed training, prefill and windows are unchanged. Only decoding with Triton bypasses it, to rotate
and write the cache in one kernel.

    report = fuse(model)      # after the model is on its device; again after anything moved the weights
    fuse_and_compare(model)   # the same for a run: raises WrongLayers and restores the model if values or gradients differ
    check_fused(model)        # raises BrokenFusion if parameters have left their storage
    unfuse(model)             # restores the model; call it before `model.to(...)`
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MethodType
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fulltilt.blame import is_of_compiler, is_ours, is_out_of_memory
from fulltilt.kernels.dispatch import runs_triton
from fulltilt.kernels.gated import gated
from fulltilt.kernels.linear import add_product, linear
from fulltilt.kernels.rms_norm import rms_norm
from fulltilt.kernels.rotary import rotary
from fulltilt.model.attention import NAME, Decode, Scoring, decode_batch
from fulltilt.model.stored import stored_weights
from fulltilt.model.verify import random_documents, run_packed

QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
HEAD_NORMS = ("q_norm", "k_norm")
LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # the configuration's name -> the kernel's
STATE, READY = "_fused", "_fulltilt_normed"  # attributes of fused modules, and of hidden states
PRODUCT_NODE = "_LayerProductBackward"  # autograd's name of `_LayerProduct`
Changed = TypeVar("Changed")


class BrokenFusion(RuntimeError):
    """Parameters that ran as one product are no longer in one storage."""


class WrongLayers(RuntimeError):
    """Fused or compiled layers do not run, or do not compute the same as the model's own layers."""


@dataclass(frozen=True)
class LayerFamily:
    """A model family whose forwards are known: classes {prefix}Model, {prefix}DecoderLayer, Attention, MLP and RMSNorm of transformers."""

    prefix: str
    head_norms: bool = False
    window: Callable[[Any], int | None] | None = None  # the value that its attention passes as `sliding_window`; None: it passes nothing

    def is_(self, module: torch.nn.Module, part: str, home: str) -> bool:
        return type(module) is getattr(sys.modules[home], self.prefix + part)


FAMILIES = {
    "transformers.models.llama.modeling_llama": LayerFamily("Llama"),
    "transformers.models.qwen2.modeling_qwen2": LayerFamily("Qwen2", window=lambda module: module.sliding_window),
    "transformers.models.qwen3.modeling_qwen3": LayerFamily("Qwen3", head_norms=True, window=lambda module: module.sliding_window),
    "transformers.models.mistral.modeling_mistral": LayerFamily("Mistral", window=lambda module: module.config.sliding_window),
}


@dataclass(frozen=True)
class FusedReport:
    """The fused parts of a model. `left_alone`: why none is fused. `aside`: projections that run separately, by name, with the reason."""

    family: str | None
    layers: int = 0
    joined: int = 0  # groups of projections that run as one product
    left_alone: str | None = None
    aside: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.left_alone is not None:
            return f"not fused: {self.left_alone}"
        found = [f"{name}: {reason}" for name, reason in self.aside.items()]
        beside = f"; one by one: {'; '.join(found[:3])}{' …' if len(found) > 3 else ''} ({len(found)})" if found else ""
        return f"fused: {self.family}, {self.layers} layers, {self.joined} joined products{beside}"


@dataclass(eq=False)
class FusedState:
    """State that a fused module stores about itself."""

    family: LayerFamily
    names: tuple[str, ...] = ()  # projections that run as one product
    refused: str | None = None  # why they never run as one
    activation: str = ""
    following: torch.nn.Module | None = None  # the norm after this layer
    joined: list[torch.Tensor] = field(default_factory=list)  # the tensors whose slices are the weights, and the biases if there are any


# ---- fusing ------------------------------------------------------------------------------------------------------------------------


def fuse(model: PreTrainedModel) -> FusedReport:
    """Fuse the model's layers, on its device. If the model is fused already, join parameters again that were moved apart."""
    body = model.base_model
    if not is_fused(model):
        reason = obstacle_of(body)
        if reason is not None:
            return FusedReport(None, left_alone=reason)
        install(body, FAMILIES[type(body).__module__])
    for _, owner in owners(body):
        state = state_of(owner)
        state.refused = why_not_joinable(owner, state)
        if state.refused is None:
            join(owner, state)
    return check_fused(model)


def check_fused(model: PreTrainedModel) -> FusedReport:
    """Report what runs fused now. Raises BrokenFusion if parameters that ran as one product have been moved apart."""
    body: Any = model.base_model
    if not is_fused(model):
        return FusedReport(None, left_alone=obstacle_of(body) or "fuse was not called")
    groups = list(owners(body))
    aside = {}
    for name, owner in groups:
        state = state_of(owner)
        reason = state.refused or adapter_or_hook(owner, state.names)
        if reason is not None:
            aside[f"{name}.{'/'.join(state.names)}"] = reason
        else:
            whole_tensors(owner, state)
    return FusedReport(state_of(body).family.prefix, len(body.layers), len(groups) - len(aside), aside=aside)


@torch.no_grad()
def unfuse(model: PreTrainedModel) -> None:
    """Restore transformers' own forwards and give every parameter its own memory again, one group at a time."""
    body = model.base_model
    for _, owner in owners(body):
        # Storages that hold nothing else, like those that `join` makes.
        made = {whole.data_ptr() for whole in state_of(owner).joined if whole.untyped_storage().nbytes() == whole.nbytes}
        for parameter in joined_parameters(owner):
            if parameter.untyped_storage().data_ptr() in made:
                parameter.data = parameter.data.clone()
    for module in body.modules():
        if STATE in vars(module):
            vars(module).pop("forward", None)
            delattr(module, STATE)


def saved_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the model's tensors for `save_pretrained(state_dict=...)`, with those that share a storage in main memory: transformers copies
    slices of a storage before it writes them, and would do so on the model's device."""
    tensors = model.state_dict(keep_vars=True)
    unique = {id(tensor): tensor.detach() for tensor in tensors.values()}  # a tied weight has two names
    for key, tensor in unique.items():
        if tensor.untyped_storage().nbytes() > tensor.nbytes:
            unique[key] = tensor.to("cpu", copy=True)
    return {name: unique[id(tensor)] for name, tensor in tensors.items()}


def separate(model: torch.nn.Module) -> None:
    """Let projections run one by one, and no layer read the next one's weights: workers are about to shard the parameters layer by layer,
    so these leave their joined storage. Fused kernels stay."""
    for module in model.modules():
        if STATE in vars(module):
            state = state_of(module)
            state.refused, state.joined, state.following = "workers share out its parameters", [], None


def joined_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors whose slices are parameters that run as one product."""
    yield from (whole for module in model.modules() if STATE in vars(module) for whole in state_of(module).joined)


def rejoin(model: torch.nn.Module) -> None:
    """Let joined products follow their parameters to other memory, in which these are neighbours too."""
    for module in model.modules():
        if STATE in vars(module) and state_of(module).joined:
            join(module, state_of(module))


def obstacle_of(body: Any) -> str | None:
    """Return why this model is left unchanged; None if it can be fused."""
    home = type(body).__module__
    family = FAMILIES.get(home)
    if family is None:
        return f"{type(body).__name__} is not of a known family ({', '.join(known.prefix for known in FAMILIES.values())})"
    if not family.is_(body, "Model", home):
        return f"{type(body).__name__} is not {family.prefix}Model"
    if body.config.hidden_act not in ACTIVATIONS:
        return f"its activation {body.config.hidden_act} has no kernel"
    for name, module, part, children in parts_of(body, family):
        if not family.is_(module, part, home):
            return f"{name} is a {type(module).__name__}, not {family.prefix}{part}"
        if {child for child, _ in module.named_children()} != children:
            return f"{name} has unknown submodules"
        if "forward" in vars(module):
            return f"{name} already runs a forward that is not its class's"
        if part == "RMSNorm" and (module.weight.dtype != body.dtype or module.weight.is_meta):
            return f"{name} is in {module.weight.dtype} on {module.weight.device}, the model in {body.dtype}"
    return None


def parts_of(body: Any, family: LayerFamily) -> Iterator[tuple[str, Any, str, set[str]]]:
    """Yield every module that gets a fused forward: its name, the module, the end of its class's name, and the names of its children."""
    head_norms = set(HEAD_NORMS) if family.head_norms else set()
    yield "norm", body.norm, "RMSNorm", set()
    for index, layer in enumerate(body.layers):
        yield f"layers.{index}", layer, "DecoderLayer", {"self_attn", "mlp", *LAYER_NORMS}
        yield f"layers.{index}.self_attn", layer.self_attn, "Attention", {*QKV, "o_proj", *head_norms}
        yield f"layers.{index}.mlp", layer.mlp, "MLP", {*GATE_UP, "down_proj", "act_fn"}
        for name in (*LAYER_NORMS, *(f"self_attn.{name}" for name in head_norms)):
            yield f"layers.{index}.{name}", layer.get_submodule(name), "RMSNorm", set()


def install(body: Any, family: LayerFamily) -> None:
    """Put a fused forward and its state on every module."""
    activation = ACTIVATIONS[body.config.hidden_act]
    forwards: dict[str, Callable[..., Any]]
    forwards = {"RMSNorm": norm_forward, "DecoderLayer": layer_forward, "Attention": attention_forward, "MLP": mlp_forward}
    joined, activation = {"Attention": QKV, "MLP": GATE_UP}, ACTIVATIONS[body.config.hidden_act]
    for _, module, part, _ in parts_of(body, family):
        module.forward = MethodType(forwards[part], module)
        setattr(module, STATE, FusedState(family, joined.get(part, ()), activation=activation))
    for layer, following in zip(body.layers, [*(later.input_layernorm for later in body.layers[1:]), body.norm], strict=True):
        state_of(layer).following = following
    setattr(body, STATE, FusedState(family))


def is_fused(model: PreTrainedModel) -> bool:
    return STATE in vars(model.base_model)


def state_of(module: torch.nn.Module) -> FusedState:
    return getattr(module, STATE)


def owners(body: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return every module that has projections to run as one product."""
    return [(name, module) for name, module in body.named_modules() if STATE in vars(module) and state_of(module).names]


# ---- one storage for several parameters --------------------------------------------------------------------------------------------


def joined_parameters(owner: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters in a joined storage, also if an adapter has since been wrapped around their layer."""
    if not state_of(owner).joined:
        return []
    layers = [getattr(owner, name) for name in state_of(owner).names]
    while any(hasattr(layer, "base_layer") for layer in layers):
        layers = [getattr(layer, "base_layer", layer) for layer in layers]
    return [parameter for layer in layers for parameter in layer.parameters(recurse=False)]


def adapter_or_hook(owner: torch.nn.Module, names: tuple[str, ...]) -> str | None:
    """Return why these projections must be called as modules; None if they need not. Checked at every call: adapters and hooks may be added
    after fusing."""
    for name in names:
        layer = owner._modules[name]
        if type(layer) is not torch.nn.Linear:
            return f"{name} is a {type(layer).__module__.partition('.')[0]} {type(layer).__name__}, not a plain linear layer"
        if has_hooks(layer):
            return f"{name} has hooks"
        if "forward" in layer.__dict__:
            return f"{name} runs a forward that is not its class's"
    return None


def has_hooks(module: Any) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def why_not_joinable(owner: torch.nn.Module, state: FusedState) -> str | None:
    reason = adapter_or_hook(owner, state.names)
    if reason is not None:
        return reason
    layers: list[Any] = [owner._modules[name] for name in state.names]
    if len({layer.bias is None for layer in layers}) != 1:
        return "some have a bias and some have none"
    groups = grouped(owner, state.names)
    parameters = [parameter for group in groups for parameter in group]
    if len({id(parameter) for parameter in parameters}) != len(parameters):
        return "they share a parameter"
    if any(type(parameter) is not torch.nn.Parameter or parameter.is_meta for parameter in parameters):
        return "a parameter is sharded, quantised or without memory"
    if len({(parameter.dtype, parameter.device) for parameter in parameters}) != 1 or len({p.shape[1] for p in groups[0]}) != 1:
        return "they differ in type, device or width"
    own = {whole.untyped_storage().data_ptr() for whole in state.joined}
    for group in groups:
        shared = [p for p in group if p.untyped_storage().nbytes() != p.nbytes and p.untyped_storage().data_ptr() not in own]
        if shared and side_by_side(group) is None:
            return "a parameter is part of a larger storage that others may read, so it cannot be moved"
    return None


@torch.no_grad()
def join(owner: torch.nn.Module, state: FusedState) -> None:
    """Move the parameters of a group into one storage, unless they are already neighbours in one."""
    state.joined = []
    for parameters in grouped(owner, state.names):
        whole = side_by_side(parameters)
        if whole is None:
            whole = torch.cat([parameter.data for parameter in parameters])
            for parameter, part in zip(parameters, whole.split([len(parameter) for parameter in parameters]), strict=True):
                parameter.data = part
        state.joined.append(whole)


def grouped(owner: torch.nn.Module, names: tuple[str, ...]) -> list[list[torch.nn.Parameter]]:
    """Return the group's weights, then its biases if there are any."""
    layers: list[Any] = [owner._modules[name] for name in names]
    weights = [layer._parameters["weight"] for layer in layers]
    return [weights] if layers[0]._parameters["bias"] is None else [weights, [layer._parameters["bias"] for layer in layers]]


def side_by_side(parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the tensor whose slices along the first axis these are, in order and without gaps; None if there is none."""
    first, place = parameters[0], parameters[0].data_ptr()
    for parameter in parameters:
        same = parameter.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and parameter.is_contiguous()
        if not same or parameter.data_ptr() != place:
            return None
        place += parameter.nbytes
    return first.detach().as_strided((sum(len(parameter) for parameter in parameters), *first.shape[1:]), first.stride())


def whole_tensors(owner: torch.nn.Module, state: FusedState) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.nn.Parameter]]:
    """Return the joined weight, the joined bias if there is one, and the parameters of both. While a joined tensor is held its memory is
    not reused, so the right address means that a parameter still is its slice, even if its storage was emptied and filled meanwhile."""
    parameters = grouped(owner, state.names)
    for group, whole in zip(parameters, state.joined, strict=False):
        places = accumulate((parameter.nbytes for parameter in group), initial=whole.data_ptr())
        if any(parameter.data_ptr() != place for parameter, place in zip(group, places, strict=False)):
            raise BrokenFusion(
                f"{'/'.join(state.names)} of a {type(owner).__name__} have left the storage in which they ran as one product: the model "
                "was moved, copied or given other tensors after fuse. Call fuse(model) again, or unfuse(model) before such a change"
            )
    assert len(parameters) == len(state.joined), "a bias appeared or vanished after fuse"
    bias = state.joined[1] if len(state.joined) == 2 else None
    return state.joined[0], bias, [parameter for group in parameters for parameter in group]


def joined_product(owner: torch.nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """Return the results of all the owner's projections at once [..., sum of their rows]; None if they must run separately."""
    state = state_of(owner)
    if state.refused is not None or adapter_or_hook(owner, state.names) is not None:
        return None
    return product(x, *whole_tensors(owner, state))


def product_of(owner: torch.nn.Module, name: str, x: torch.Tensor) -> torch.Tensor:
    """Compute a single projection, through the product whose rows do not depend on their number."""
    layer: Any = owner._modules[name]
    if adapter_or_hook(owner, (name,)) is not None:
        return layer(x)
    parameters = [parameter for parameter in (layer.weight, layer.bias) if parameter is not None]
    return product(x, layer.weight.detach(), None if layer.bias is None else layer.bias.detach(), parameters)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """Multiply by a weight and bias that have no gradient; the parameters, weights and then biases, are slices of them and may have one."""
    if not torch.is_grad_enabled():
        return linear(x, weight, bias)
    if not any(parameter.requires_grad for parameter in parameters):
        return F.linear(x, weight, bias)  # it saves nothing that only the parameters' gradients need
    keeping: list[Any] = []
    kept = _Kept.apply(x, keeping, *parameters)
    return _LayerProduct.apply(kept, weight, bias, keeping[0], *parameters)


class _Kept(torch.autograd.Function):
    """Saves the inputs of a product's gradients, before the product. When layers are recomputed, the second pass stops at the last saved
    tensor, so the product at the end of a layer is not computed again, as with torch's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, keeping: list[Any], *parameters: torch.nn.Parameter) -> torch.Tensor:
        ctx.save_for_backward(x, *parameters)  # parameters are saved for their version: a change before the backward pass must raise
        keeping.append(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, of_x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return of_x, *[None] * (len(ctx.needs_input_grad) - 1)


class _LayerProduct(torch.autograd.Function):
    """A linear layer with one parameter or several joined ones. If a parameter has a float32 accumulator (`main_grad`), its gradient is
    added to that inside the matrix product, so that no gradient is written, read again and rounded to the parameter's type."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, keeping: Any, *parameters: torch.nn.Parameter
    ) -> torch.Tensor:
        ctx.keeping, ctx.weight, ctx.has_bias = keeping, weight, bias is not None
        ctx.parameters = parameters  # the objects themselves, with their accumulators: recomputing returns others than were saved
        return F.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, parameters = ctx.keeping.saved_tensors[0], ctx.parameters
        flat = of_out.reshape(-1, of_out.shape[-1])
        count = len(parameters) // 2 if ctx.has_bias else len(parameters)
        rows = [len(parameter) for parameter in parameters[:count]]
        wanted = ctx.needs_input_grad[4:]
        of_x = (flat @ ctx.weight).view(x.shape) if ctx.needs_input_grad[0] else None
        found: list[torch.Tensor | None] = [None] * len(parameters)
        if any(wanted[:count]) and not accumulated(parameters[:count], wanted[:count], flat, x):
            found[:count] = (flat.t() @ x.reshape(-1, x.shape[-1])).split(rows)
        if any(wanted[count:]):
            found[count:] = flat.sum(0).split(rows)
        return of_x, None, None, None, *found


def accumulated(weights: Sequence[torch.Tensor], wanted: Sequence[bool], of_out: torch.Tensor, x: torch.Tensor) -> bool:
    """Add the gradients to the weights' accumulators, in one product if these are neighbours in memory. Returns False, and adds nothing, if
    a weight that needs a gradient has no accumulator, or a hook that waits for the gradient."""
    if any(weight._backward_hooks for weight in weights):
        return False
    totals = [getattr(weight, "main_grad", None) if want else None for weight, want in zip(weights, wanted, strict=True)]
    if any(want and total is None for total, want in zip(totals, wanted, strict=True)):
        return False
    x = x.reshape(-1, x.shape[-1])
    given = [total for total in totals if total is not None]
    whole = side_by_side(given) if len(given) == len(totals) else None
    if whole is not None:
        add_product(whole, of_out.t(), x)
        return True
    for total, part in zip(totals, of_out.split([len(weight) for weight in weights], dim=1), strict=True):
        if total is not None:
            add_product(total, part.t(), x)
    return True


# ---- the forwards ------------------------------------------------------------------------------------------------------------------


def norm_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Compute the norm, or return its result if the layer before has computed it together with exactly these hidden states."""
    ready = hidden_states.__dict__.pop(READY, None)
    if ready is not None and not torch.is_grad_enabled():
        norm, version, normed = ready
        if norm is self and version == hidden_states._version:
            return normed
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def mlp_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    activation = state_of(self).activation
    both = joined_product(self, x)
    gate, up = (both, None) if both is not None else (product_of(self, name, x) for name in GATE_UP)
    return product_of(self, "down_proj", gated(gate, activation, up))


def attention_forward(
    self: Any,
    hidden_states: torch.Tensor,  # [batch, T, hidden]
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    family = state_of(self).family
    shape = hidden_states.shape[:-1]
    whole = joined_product(self, hidden_states)
    if whole is None:
        parts = [product_of(self, name, hidden_states) for name in QKV]
    else:
        parts = list(whole.split([len(self._modules[name]._parameters["weight"]) for name in QKV], dim=-1))
    batch, width = shape[0], self.head_dim
    tokens = shape.numel()
    q, k, v = (part.view(tokens, part.shape[-1] // width, width) for part in parts)
    if family.head_norms:
        q, k = self.q_norm(q), self.k_norm(k)
    # Positions may be given once for all rows of a batch.
    cos, sin = (angle.expand(*shape, width).reshape(tokens, width) for angle in position_embeddings)
    window = family.window(self) if family.window is not None else None
    context = kwargs.get("fulltilt")
    if isinstance(context, Decode) and runs_triton(q) and past_key_values is None and self.config._attn_implementation == NAME:
        decoded = decode_batch(q, k, v, context, self.layer_idx, Scoring(self.scaling, window), (cos, sin))
        return product_of(self, "o_proj", decoded.reshape(*shape, -1)), None
    q, k = rotary(q, k, cos, sin)
    query, key, value = (states.view(batch, -1, *states.shape[1:]).transpose(1, 2) for states in (q, k, v))  # [batch, heads, T, width]
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, self.layer_idx)
    if family.window is not None:
        kwargs = {"sliding_window": window, **kwargs}
    eager = sys.modules[type(self).__module__].eager_attention_forward
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
    dropout = self.attention_dropout if self.training else 0.0
    out, weights = attend(self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
    return product_of(self, "o_proj", out.reshape(*shape, -1).contiguous()), weights


def layer_forward(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
    normed, hidden_states = add_norm(self.post_attention_layernorm, attended, hidden_states)
    beside = self.mlp(normed)
    following = state_of(self).following
    # The addition at the end of a layer runs with the norm at the start of the next. Not with gradients: recomputing a layer must not reach
    # into the next one, nor may a sharded layer read weights that are not gathered yet.
    if following is None or torch.is_grad_enabled() or torch.is_inference_mode_enabled() or not is_fused_norm(following):
        return hidden_states + beside
    normed, hidden_states = add_norm(following, beside, hidden_states)
    setattr(hidden_states, READY, (following, hidden_states._version, normed))
    return hidden_states


def add_norm(norm: Any, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of the sum, and the sum."""
    if is_fused_norm(norm):
        return rms_norm(x, norm.weight, norm.variance_epsilon, residual)
    total = residual + x
    return norm(total), total


def is_fused_norm(norm: Any) -> bool:
    """Return whether a norm may be computed without calling it: it has the fused forward, and no hooks."""
    return STATE in vars(norm) and not has_hooks(norm)


# ---- the same numbers --------------------------------------------------------------------------------------------------------------

STATES = ("hidden states", "hidden states under a gradient")
# Relative difference that always counts as rounding, even where this model's own measured rounding is smaller; four times that in
# gradients. A forgotten term is as large as the whole. In float64 norms still round to float32, as in transformers.
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
OF_GRADIENTS = 4.0
SHALLOW_VOCABULARY = 512  # tokens of the model that replaces one without memory in comparisons
# Maps a model and packs of documents to the numbers to compare, by name.
Measure = Callable[[PreTrainedModel, Sequence[Sequence[np.ndarray]]], dict[str, torch.Tensor]]


def fuse_and_compare(model: PreTrainedModel) -> FusedReport:
    """Fuse a run's model; raise WrongLayers and restore it if the fused layers do not compute the same (`change_and_compare`)."""
    if not is_fused(model) and obstacle_of(model.base_model) is not None:
        return fuse(model)
    assert not any(hasattr(parameter, "main_grad") for parameter in model.parameters()), "before the optimizer, or gradients would go there"
    return change_and_compare(model, fuse, unfuse, "fused", {"": numbers_of})


def fuse_without_memory(model: PreTrainedModel) -> FusedReport:
    """Fuse a model whose parameters are in files and are about to be sharded. Fused layers are compared on a body with two layers of the
    same sizes and random parameters; raises WrongLayers if they do not compute the same."""
    stored = stored_weights(model)
    assert stored is not None
    if obstacle_of(model.base_model) is None:
        fuse_and_compare(shallow_body(model, stored.device))
    return fuse(model)


def shallow_body(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Return a body of the same class with the first two layers and few tokens."""
    body: Any = model.base_model
    config = copy.deepcopy(body.config)
    config.num_hidden_layers, config.vocab_size, config.pad_token_id = min(2, config.num_hidden_layers), SHALLOW_VOCABULARY, None
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        found: PreTrainedModel = type(body)._from_config(config, dtype=model.dtype)
    return found.eval()


def change_and_compare(
    model: PreTrainedModel, change: Callable[[PreTrainedModel], Changed], restore: Callable[[PreTrainedModel], None], kind: str,
    measures: Mapping[str, Measure],
) -> Changed:  # fmt: skip
    """Change the layers, and check on random documents that hidden states, with and without gradients, and the gradients of the first and
    last layer (which depend on all others) are the same up to rounding: four times the difference between the model's own numbers with
    documents alone and side by side. If they are not, or the model's code or a compiler fails, restores the model and raises WrongLayers. A
    failure of fulltilt's own functions, and a lack of memory, is raised unchanged."""
    documents = random_documents(model)
    own = {words: measure(model, [documents]) for words, measure in measures.items()}
    alone = {words: gaps(own[words], measure(model, [[document] for document in documents])) for words, measure in measures.items()}
    try:
        result = change(model)
        found = {words: gaps(own[words], measure(model, [documents])) for words, measure in measures.items()}
        for words, name, gap in ((words, name, gap) for words, found_gaps in found.items() for name, gap in found_gaps.items()):
            rounding = max(4 * alone[words][name], ROUNDING[model.dtype] * (1.0 if name in STATES else OF_GRADIENTS))
            if not gap <= rounding:
                raise WrongLayers(f"{name}{words} differ by {gap:.2g} of their size from the model's own, where {rounding:.2g} is rounding")
    except Exception as error:
        restore(model)
        if isinstance(error, WrongLayers) or is_out_of_memory(error) or (is_ours(error) and not is_of_compiler(error)):
            raise
        raise WrongLayers(f"a {kind} pass failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    return result


def numbers_of(model: PreTrainedModel, packs: Sequence[Sequence[np.ndarray]]) -> dict[str, torch.Tensor]:
    """Return the numbers to compare, by name, over all packs together: `STATES`, and gradients of the watched parameters."""
    body: Any = model.base_model
    parts = {"layers.0": body.layers[0], f"layers.{len(body.layers) - 1}": body.layers[-1], "norm": body.norm}
    named = ((f"gradients of {part}.{name}", p) for part, module in parts.items() for name, p in module.named_parameters())
    watched = {name: parameter for name, parameter in named if parameter.requires_grad}
    random = torch.Generator().manual_seed(0)
    plain, under_gradient = [], []
    totals = {name: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for name, p in watched.items()}
    for documents in packs:
        with torch.no_grad():
            plain += run_packed(model, list(documents))[0]
        if not watched:
            continue
        with torch.enable_grad():
            states = run_packed(model, list(documents))[0]
            weights = [torch.randn(s.shape, generator=random).to(s) for s in states]
            total = torch.stack([(s * w).sum() for s, w in zip(states, weights, strict=True)]).sum()
            for name, gradient in zip(watched, torch.autograd.grad(total, list(watched.values())), strict=True):
                totals[name] += gradient
        under_gradient += [s.detach() for s in states]
    return {STATES[0]: torch.cat(plain), **({STATES[1]: torch.cat(under_gradient)} if watched else {}), **totals}


def gaps(own: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return differences relative to size. A gradient near zero (such as that of a key's bias) is measured against the largest one too."""
    norms = {name: float(numbers.double().norm()) for name, numbers in own.items()}
    largest = max((norm for name, norm in norms.items() if name not in STATES), default=0.0)
    units = {name: norm if name in STATES else norm + 0.01 * largest for name, norm in norms.items()}
    return {name: float((own[name].double() - found[name].double()).norm()) / max(units[name], 1e-300) for name in own}
