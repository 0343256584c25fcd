"""Tensor parallelism: the members of a group compute every layer together, each with some heads, columns and tokens of the vocabulary.

Enters: a loaded Hugging Face model, or a critic or reward model, with its adapters, before it is fused. Leaves: the same model, whose
parameters are this member's parts, under their names, as plain parameters of plain modules, and a `TensorSplit`. Guaranteed: all members
that call the model on the same tokens get the log-probs, entropies and values of the whole model; the sum of what they find for a
parameter's gradient (`SliceTable.join_gradients`) is the whole one. Gradients are not exchanged in passes: for numbers that several members
hold, `TensorSplit.sum_shared` adds them up, once before the step. A model with a module that cannot be cut is refused by name.

Queries, keys, values, gate and up are cut by rows, the projections behind them by columns, experts within each expert, the vocabulary by
rows. Between attention and feed-forward layers each member has T / size tokens, so that norms and residuals are computed once (sequence
parallel, as in Megatron): tokens are gathered before a layer and summed and dealt out behind it. Where size does not divide T, the last
members have rows of zeros, which no layer sees. Every collective runs in the model's own order and again in a recomputed layer; all members
must make the same passes.

    layer          forward                              backward
    embedding      own rows, reduce-scatter             all-gather
    attention,     all-gather, own heads or columns,    all-gather, own heads or columns,
    feed-forward   reduce-scatter                       reduce-scatter
    last norm      all-gather                           reduce-scatter
    head           own part of the vocabulary, sums     own part of the vocabulary
    score          own tokens, all-gather               own tokens
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fulltilt.kernels.token_logprobs import VocabularyPart
from fulltilt.model import lora
from fulltilt.model.attention import UnsupportedModel
from fulltilt.model.experts import has_interface
from fulltilt.model.fuse import STATE
from fulltilt.model.heads import VOCABULARY_PART
from fulltilt.model.load import shape_of
from fulltilt.model.scalar import ScalarModel, decoder_layers
from fulltilt.parallel.cuts import Cut, Section, even, require_legal, vocabulary_rows
from fulltilt.parallel.layout import EXCHANGE_BYTES
from fulltilt.parallel.ranks import Ranks, gather_into, reduce_into

KEY = "train.tensor_parallel"
REMEDY = f"Set {KEY} = 1, or use a model of another architecture"
ROWS, COLUMNS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj"), ("o_proj", "down_proj")
HEAD_NORMS = ("q_norm", "k_norm")
ROUTERS = ("gate", "shared_expert_gate")  # they choose experts for all tokens on every member


# ---- the table of slices ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SliceTable:
    """How every parameter of a model is cut, by name: for loading, for gathering whole tensors, and for their gradients."""

    size: int
    cuts: Mapping[str, Cut]

    def local_slice(self, name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """A member's part of a whole tensor: a view where it is one stretch."""
        cut = self.cuts[name]
        found = [whole.narrow(cut.dim, part.start, len(part)) for part in cut.parts(rank)]
        return found[0] if len(found) == 1 else torch.cat(found, cut.dim)

    def assemble(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole tensor from the parts of all members; copies are the same."""
        return self._joined(name, parts, add=False)

    def join_gradients(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole gradient from what all members have found before `sum_shared`."""
        return self._joined(name, parts, add=True)

    def _joined(self, name: str, parts: Sequence[torch.Tensor], *, add: bool) -> torch.Tensor:
        cut, shape = self.cuts[name], list(parts[0].shape)
        shape[cut.dim] = cut.length
        whole = parts[0].new_zeros(shape)
        for rank, own in enumerate(parts):
            ranges = cut.parts(rank)
            for part, given in zip(ranges, own.split([len(each) for each in ranges], cut.dim), strict=True):
                target = whole.narrow(cut.dim, part.start, len(part))
                target.copy_(target + given if add else given)
        return whole


def slice_table(model: torch.nn.Module, size: int) -> SliceTable:
    """The table of a whole model, with its adapters."""
    require_legal(shape_of(model.config), size, KEY)  # type: ignore[arg-type]
    parameters = dict(model.named_parameters(remove_duplicate=False))  # a tied embedding has two names
    blocks = {module: block for block in parallel_blocks(model) for module in block.modules()}
    cuts = {name: cut_of(model, blocks, name, parameter, size) for name, parameter in parameters.items() if ".lora_" not in name}
    if len(cuts) < len(parameters):
        cuts |= adapter_cuts(model, cuts, size)
    return SliceTable(size, {name: cuts[name] for name in parameters})


def cut_of(model: torch.nn.Module, blocks: Mapping[torch.nn.Module, Any], name: str, parameter: torch.Tensor, size: int) -> Cut:
    """`blocks`: the attention or feed-forward layer that each module belongs to."""
    owner, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
    short, block = lora.plain_name(name).split(".")[-2], blocks.get(owner)
    if owner in embeddings_of(model):
        return Cut(0, (Section(len(parameter), vocabulary_rows(len(parameter), size)),))
    if has_interface(owner):
        return expert_cut(owner, name, leaf, parameter, size)
    if block is not None and isinstance(owner, torch.nn.Linear) and short in ROWS:
        return Cut(0, row_sections(block, name, owner, short, size))
    if block is not None and isinstance(owner, torch.nn.Linear) and short in COLUMNS:
        if short == "o_proj" and owner.in_features != head_counts(block)[0] * block.head_dim:
            raise refusal(name, owner)
        return Cut.rows(owner.in_features, size, dim=1) if leaf == "weight" else Cut.whole(len(parameter), size)  # a bias is added once
    of_a_head = short in HEAD_NORMS and parameter.shape == (getattr(block, "head_dim", None),)
    of_tokens = block is None and parameter.shape == (model.config.get_text_config().hidden_size,)  # type: ignore[union-attr, operator]
    of_a_router = block is not None and short in ROUTERS
    if of_a_head or of_tokens or of_a_router or owner is getattr(model, "score", None):
        return Cut.whole(len(parameter), size)
    raise refusal(name, owner)


def row_sections(block: Any, name: str, layer: Any, short: str, size: int) -> tuple[Section, ...]:
    """Of a projection of the block that is cut by rows."""
    rows = layer.out_features
    if short in ("gate_proj", "up_proj"):
        return (even(rows, size),)
    if short == "gate_up_proj":
        return (even(rows // 2, size),) * 2
    width = block.head_dim
    heads, key_heads = head_counts(block)
    queries, keys = even(heads * width, size, width), even(key_heads * width, size, width)
    found = {"q_proj": (queries,), "qkv_proj": (queries, keys, keys)}.get(short, (keys,))
    if sum(section.length for section in found) != rows:
        raise refusal(name, layer)
    return found


def expert_cut(experts: Any, name: str, leaf: str, parameter: torch.Tensor, size: int) -> Cut:
    """Stacked experts: [experts, out, in], or [experts, in, out] where they are transposed."""
    outer, inner = (2, 1) if experts.is_transposed else (1, 2)
    if leaf == "down_proj":
        return Cut.rows(parameter.shape[inner], size, dim=inner)
    if leaf == "gate_up_proj" and experts.is_concatenated:
        return Cut(outer, (even(parameter.shape[outer] // 2, size),) * 2)
    if leaf == "up_proj":
        return Cut.rows(parameter.shape[outer], size, dim=outer)
    raise refusal(name, experts)


def adapter_cuts(model: torch.nn.Module, cuts: Mapping[str, Cut], size: int) -> dict[str, Cut]:
    """A layer cut by rows has its rows of B, and all of A; one cut by columns has its columns of A, and all of B."""
    found: dict[str, Cut] = {}
    plain = {lora.plain_name(name): cut for name, cut in cuts.items()}
    for name, layer in lora.adapted(model):
        cut, stacked = plain[f"{lora.plain_name(name)}.{lora.target_of(layer)}"], has_interface(layer.get_base_layer())
        weights = {side: getattr(layer, f"lora_{side}")[lora.NAME].weight for side in "AB"}
        own = {side: Cut.whole(len(weight), size) for side, weight in weights.items()}
        if cut != Cut.whole(cut.length, size):
            outer = (2 if layer.get_base_layer().is_transposed else 1) if stacked else 0
            own |= {"B": cut.at(0)} if cut.dim == outer else {"A": cut.at(1)}
        found |= {f"{name}.lora_{side}.{lora.NAME}.weight": each for side, each in own.items()}
    return found


def body_of(model: torch.nn.Module) -> torch.nn.Module:
    found: torch.nn.Module = (model.body if isinstance(model, ScalarModel) else model).base_model  # type: ignore[assignment]
    return found


def embeddings_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Input embedding, and output embedding if there is one."""
    found = [body_of(model).get_input_embeddings()]  # type: ignore[operator]
    return found if isinstance(model, ScalarModel) else [*found, model.get_output_embeddings()]  # type: ignore[operator]


def parallel_blocks(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The attention and feed-forward layers: members compute parts of their results."""
    for layer in decoder_layers(model, f"it cannot be divided. {REMEDY}"):
        yield from (block for block in layer.children() if any(is_cut_by_columns(name) for name, _ in block.named_parameters()))


def is_cut_by_columns(name: str) -> bool:
    """Whether this is the name of a layer whose results are summed over members, or of its parameter."""
    return not {*COLUMNS}.isdisjoint(name.split("."))


def head_counts(block: Any) -> tuple[int, int]:
    """Query heads and key-value heads of an attention layer."""
    heads = block.config.num_attention_heads
    return heads, getattr(block.config, "num_key_value_heads", None) or heads


def refusal(name: str, module: torch.nn.Module) -> UnsupportedModel:
    return UnsupportedModel(f"{name} ({type(module).__name__}) cannot be divided among the members of a tensor-parallel group. {REMEDY}")


# ---- tokens between members ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class TokenExchange:
    """Collectives over the tokens [.., T, width] of a pass. Each member has ceil(T / size) of them, the last ones perhaps rows of zeros."""

    ranks: Ranks
    tokens: int = 0  # T of the pass that is running

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """All members' tokens; they go on to compute parts of what follows, whose gradients are summed."""
        return _Gather.apply(own, self, self.tokens, True)

    def gather_results(self, own: torch.Tensor) -> torch.Tensor:
        """All members' tokens; they go on to compute the same, whose gradient is the same for each."""
        return _Gather.apply(own, self, self.tokens, False)

    def scatter(self, parts: torch.Tensor) -> torch.Tensor:
        """The sum over members of what they have for all tokens, of which each gets its own."""
        return _Scatter.apply(parts, self)

    def all_gather(self, own: torch.Tensor, tokens: int) -> torch.Tensor:
        rows = own.reshape(-1, own.shape[-1]).contiguous()
        found = rows.new_empty(len(rows) * self.ranks.size, rows.shape[1])
        self.ranks.moved["all-gather"] += found.nbytes
        gather_into(found, rows, group=self.ranks.group)
        return found[:tokens].view(*own.shape[:-2], tokens, -1)

    def reduce_scatter(self, parts: torch.Tensor) -> torch.Tensor:
        rows = self.padded(parts)
        found = rows.new_empty(len(rows) // self.ranks.size, rows.shape[1])
        self.ranks.moved["reduce-scatter"] += rows.nbytes
        reduce_into(found, rows, group=self.ranks.group)
        return found.view(*parts.shape[:-2], len(found), -1)

    def most(self, tensor: torch.Tensor) -> None:
        """The largest number of all members, in place."""
        self.ranks.moved["all-reduce"] += tensor.nbytes
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.ranks.group)

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """This member's tokens of all."""
        rows = self.padded(whole).view(self.ranks.size, -1, whole.shape[-1])[self.ranks.rank]
        return rows.view(*whole.shape[:-2], len(rows), -1)

    def padded(self, whole: torch.Tensor) -> torch.Tensor:
        """Rows of tokens, as many as size divides."""
        rows = whole.reshape(-1, whole.shape[-1])
        missing = -len(rows) % self.ranks.size
        return F.pad(rows, (0, 0, 0, missing)) if missing else rows.contiguous()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, exchange: TokenExchange, tokens: int, summed: bool) -> torch.Tensor:
        ctx.exchange, ctx.summed = exchange, summed
        return exchange.all_gather(own, tokens)

    @staticmethod
    def backward(ctx: Any, of_all: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (ctx.exchange.reduce_scatter(of_all) if ctx.summed else ctx.exchange.own(of_all)), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, exchange: TokenExchange) -> torch.Tensor:
        ctx.exchange, ctx.tokens = exchange, parts.shape[-2]
        return exchange.reduce_scatter(parts)

    @staticmethod
    def backward(ctx: Any, of_own: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.exchange.all_gather(of_own, ctx.tokens), None


# ---- splitting a model -----------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class TensorSplit:
    """A model that is divided among the members of a group, as this member has it."""

    model: torch.nn.Module
    table: SliceTable
    exchange: TokenExchange

    @property
    def ranks(self) -> Ranks:
        return self.exchange.ranks

    @torch.no_grad()
    def sum_shared(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Make gradients whole, in place, of numbers that several members hold. All members give those of the same parameters."""
        pending: list[tuple[torch.Tensor, int]] = []
        filled = 0
        for given, length, place in self._shared_pieces(gradients):
            limit = EXCHANGE_BYTES // given.element_size()
            if pending and (filled + length > limit or given.dtype != pending[0][0].dtype):
                self._sum(pending, filled)
                pending, filled = [], 0
            pending.append((given, filled + place))
            filled += length
        if pending:
            self._sum(pending, filled)

    def _shared_pieces(self, gradients: Mapping[str, torch.Tensor]) -> Iterator[tuple[torch.Tensor, int, int]]:
        """This member's stretches of shared sections; how many numbers all members' stretches are together, and where this one begins."""
        for name, gradient in gradients.items():
            cut = self.table.cuts[name]
            stretches = gradient.split([len(part) for part in cut.parts(self.ranks.rank)], cut.dim)
            for section, own in zip(cut.sections, stretches, strict=True):
                if section.copies > 1:
                    number = own.numel()
                    yield own, number * (self.ranks.size // section.copies), number * (self.ranks.rank // section.copies)

    def _sum(self, pieces: Sequence[tuple[torch.Tensor, int]], length: int) -> None:
        sample = pieces[0][0]
        memory = torch.zeros(length, dtype=sample.dtype, device=sample.device)
        for own, place in pieces:
            memory[place : place + own.numel()] = own.reshape(-1)
        self.ranks.sum(memory)
        for own, place in pieces:
            own.copy_(memory[place : place + own.numel()].view(own.shape))


@torch.no_grad()
def split(model: torch.nn.Module, ranks: Ranks) -> TensorSplit:
    """Divide a whole model among the members of a group. Call it before layers are fused or recomputed and before the optimizer is made."""
    assert not ranks.alone and not any(STATE in vars(module) for module in model.modules()), "a model is fused after it is split"
    found = TensorSplit(model, slice_table(model, ranks.size), TokenExchange(ranks))
    divide_vocabulary(model, found)
    for block in parallel_blocks(model):
        if hasattr(block, "o_proj"):
            tell_heads(block, ranks.size)
            block.register_forward_pre_hook(note_tokens(found.exchange), with_kwargs=True)
        block.register_forward_pre_hook(gather_before(found.exchange), with_kwargs=True)
        block.register_forward_hook(scatter_behind(found.exchange))
        if ranks.rank:
            leave_out_biases(block)
    cut_parameters(model, found.table, ranks.rank)
    return found


def cut_parameters(model: torch.nn.Module, table: SliceTable, rank: int) -> None:
    """Replace every parameter by this member's part. A tied one stays tied."""
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for leaf, whole in list(module.named_parameters(recurse=False)):
            if whole not in made:
                own = table.local_slice(f"{prefix}.{leaf}", whole.detach(), rank).clone(memory_format=torch.contiguous_format)
                made[whole] = torch.nn.Parameter(own, requires_grad=whole.requires_grad)
            setattr(module, leaf, made[whole])
        if isinstance(module, torch.nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, torch.nn.Embedding):
            module.num_embeddings = len(module.weight)


def tell_heads(block: Any, size: int) -> None:
    """Give an attention layer the number of its own heads. Most take it from their weights."""
    heads, key_heads = (max(1, count // size) for count in head_counts(block))
    own = {"num_heads": heads, "num_key_value_heads": key_heads, "num_key_value_groups": heads // key_heads}
    for name, number in own.items():
        if hasattr(block, name):
            setattr(block, name, number)
    if hasattr(block, "qkv_proj"):
        block.config = copy.copy(block.config)
        block.config.num_attention_heads, block.config.num_key_value_heads = heads, key_heads


def leave_out_biases(block: torch.nn.Module) -> None:
    """The results of a layer that is cut by columns are summed over members, so only the first one adds its bias."""
    for name, layer in block.named_modules():
        if isinstance(layer, torch.nn.Linear) and layer.bias is not None and is_cut_by_columns(name):
            layer.forward = MethodType(without_bias, layer)  # type: ignore[method-assign]


def without_bias(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, self.weight, 0 * self.bias)  # it has a gradient of zero, as all parameters that learn have one on every member


# ---- hooks of blocks: a block sees all tokens -------------------------------------------------------------------------------------------


def note_tokens(exchange: TokenExchange) -> Callable[..., None]:
    """Attention comes first in a layer and is told the number of tokens, also where a layer is recomputed after another pass has begun."""

    def hook(block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        exchange.tokens = kwargs["position_embeddings"][0].shape[-2]

    return hook


def gather_before(exchange: TokenExchange) -> Callable[..., Any]:
    def hook(block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (exchange.gather(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": exchange.gather(kwargs["hidden_states"])}

    return hook


def scatter_behind(exchange: TokenExchange) -> Callable[..., Any]:
    def hook(block: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return (exchange.scatter(output[0]), *output[1:]) if isinstance(output, tuple) else exchange.scatter(output)

    return hook


# ---- the vocabulary ----------------------------------------------------------------------------------------------------------------------


def divide_vocabulary(model: torch.nn.Module, found: TensorSplit) -> None:
    """Embed with this member's rows, and let the head have all tokens. A critic's score reads them in parts: its gradient must be a part
    too, as that of every other parameter. Called on the whole model."""
    ranks, exchange, body = found.ranks, found.exchange, body_of(model)
    embeddings: list[Any] = embeddings_of(model)
    first = embeddings[0]
    rows = [Section(len(layer.weight), vocabulary_rows(len(layer.weight), ranks.size)).part(ranks.rank) for layer in embeddings]
    if first.padding_idx is not None:
        first.padding_idx = first.padding_idx - rows[0].start if first.padding_idx in rows[0] else None
    first.forward = MethodType(embed_own(exchange, rows[0]), first)
    body.register_forward_hook(gather_output(exchange))
    # Functions, not methods: a copy of the model uses the same group.
    part = VocabularyPart(rows[-1].start, len(embeddings[-1].weight), lambda own: ranks.sum(own), lambda own: exchange.most(own))
    for each in (model, body):
        setattr(each, VOCABULARY_PART, part)
    if isinstance(model, ScalarModel):
        model.score.register_forward_pre_hook(lambda module, args: exchange.own(args[0]))
        model.score.register_forward_hook(lambda module, args, output: exchange.gather_results(output))


def gather_output(exchange: TokenExchange) -> Callable[..., None]:
    def hook(body: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        output.last_hidden_state = exchange.gather(output.last_hidden_state)

    return hook


def embed_own(exchange: TokenExchange, own: range) -> Callable[..., torch.Tensor]:
    def forward(self: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        """Rows of this member's tokens, zeros for others; summed over members."""
        exchange.tokens = ids.shape[-1]
        here = (ids >= own.start) & (ids < own.stop)
        rows: torch.Tensor = type(self).forward(self, torch.where(here, ids - own.start, 0))
        return exchange.scatter(rows * here[..., None])

    return forward
