"""Tensor parallelism: the members of a group compute every layer together, each with some heads, columns and tokens of the vocabulary.

Enters: a loaded Hugging Face model, or a critic or reward model, with its adapters, before it is fused. Leaves: the same model, whose
parameters are this member's parts, under their names, as plain parameters of plain modules, and a `TensorSplit`. Guaranteed: all members
that call the model on the same tokens get the log-probs, entropies and values of the whole model; the sum of their gradients of a parameter
(`SliceTable.join_gradients`) is the whole gradient. Gradients are not exchanged in passes: for numbers that several members hold,
`TensorSplit.sum_shared` adds them up, once before the step. parallel/slices.py says how parameters are cut, and refuses models that cannot
be.

Between attention and feed-forward layers each member has T / size tokens, so that norms and residuals are computed once (sequence parallel,
as in Megatron): tokens are gathered before a layer, and summed and scattered after it. Where size does not divide T, the last members have
rows of zeros, which no layer sees. Every collective runs in the model's own order and again in a recomputed layer; all members must make
the same passes.

    layer          forward                              backward
    embedding      own rows, reduce-scatter             all-gather
    attention,     all-gather, own heads or columns,    all-gather, own heads or columns,
    feed-forward   reduce-scatter                       reduce-scatter
    last norm      all-gather                           reduce-scatter
    head           own part of the vocabulary, sums     own part of the vocabulary
    score          own tokens, all-gather               own tokens

Experts are divided like other feed-forward layers, a part of each to every member; or each member has some of them whole (`whole_experts`),
and computes the tokens that routers send to these; it has all tokens anyway. Routers are whole, and choose the same experts on all members.

A decoding step has few tokens, whose cost is the number of collectives: there every member has all tokens between the layers too, and one
all-reduce after a layer replaces the two other collectives.

The native engine generates on such a model: each member runs the engine in its own process on the same prompts, with a KV cache of its own
key heads (`member_layers`). Logits are gathered from all members, so all sample from the same numbers and draw the same tokens.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fulltilt.kernels.token_logprobs import VocabularyPart
from fulltilt.model.attention import Decode, LayerShape
from fulltilt.model.fuse import STATE
from fulltilt.model.heads import VOCABULARY_PART
from fulltilt.model.scalar import ScalarModel
from fulltilt.parallel.cuts import CutSection, vocabulary_rows
from fulltilt.parallel.experts import OwnExperts, hand_over
from fulltilt.parallel.layout import EXCHANGE_BYTES
from fulltilt.parallel.parts import ModelPart, cut_parameters, shapes_of
from fulltilt.parallel.ranks import Ranks, gather_into, no_bytes, reduce_into
from fulltilt.parallel.slices import KEY, body_of, embeddings_of, head_counts, is_cut_by_columns, parallel_blocks, slice_table

THROUGH_THE_HOST = "the members of its tensor-parallel group exchange numbers through the host (gloo)"

# ---- tokens between members ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class TokenExchange:
    """Collectives over the tokens [.., T, width] of a pass. Each member has ceil(T / size) of them, the last ones perhaps rows of zeros."""

    ranks: Ranks
    tokens: int = 0  # T of the current pass
    decoding: bool = False  # whether the pass decodes: then each member has all tokens, and there is no gradient
    moved: Counter[str] = field(init=False)  # counts bytes of collectives

    def __post_init__(self) -> None:
        self.moved = self.ranks.moved

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Gather all members' tokens, for computations of which each member makes a part, so that gradients are summed."""
        return own if self.decoding else _Gather.apply(own, self, self.tokens, True)

    def gather_results(self, own: torch.Tensor) -> torch.Tensor:
        """Gather all members' tokens, for computations that all members make alike, so that gradients are equal."""
        return _Gather.apply(own, self, self.tokens, False)

    def scatter(self, parts: torch.Tensor) -> torch.Tensor:
        """Sum the members' results for all tokens. Each member gets its own tokens, or all tokens when decoding."""
        return self.all_reduce(parts) if self.decoding else _Scatter.apply(parts, self)

    def all_gather(self, own: torch.Tensor, tokens: int) -> torch.Tensor:
        """Gather all members' tokens. In a pass over a filler, send as many zeros as the others expect."""
        with self.ranks.progress.collective("gather tokens") as takes_part:
            expected = self.ranks.progress.tokens
            if takes_part and expected is None:
                return self._all_gather(own, tokens)
            if takes_part and expected is not None:
                self._all_gather(own.new_zeros(-(-expected // self.ranks.size), own.shape[-1]), expected)
            return own.new_zeros(*own.shape[:-2], tokens, own.shape[-1])

    def _all_gather(self, own: torch.Tensor, tokens: int) -> torch.Tensor:
        rows = own.reshape(-1, own.shape[-1]).contiguous()
        found = rows.new_empty(len(rows) * self.ranks.size, rows.shape[1])
        self.moved["all-gather"] += found.nbytes
        with self.ranks.progress.sending():
            gather_into(found, rows, group=self.ranks.group)
        return found[:tokens].view(*own.shape[:-2], tokens, -1)

    def reduce_scatter(self, parts: torch.Tensor) -> torch.Tensor:
        """Return this member's tokens of the sum over members. In a pass over a filler, send as many zeros as the others expect."""
        with self.ranks.progress.collective("sum tokens") as takes_part:
            expected = self.ranks.progress.tokens
            if takes_part and expected is None:
                return self._reduce_scatter(parts)
            if takes_part and expected is not None:
                self._reduce_scatter(parts.new_zeros(expected, parts.shape[-1]))
            return torch.zeros_like(self.own(parts))

    def _reduce_scatter(self, parts: torch.Tensor) -> torch.Tensor:
        rows = self.padded(parts)
        found = rows.new_empty(len(rows) // self.ranks.size, rows.shape[1])
        self.moved["reduce-scatter"] += rows.nbytes
        with self.ranks.progress.sending():
            reduce_into(found, rows, group=self.ranks.group)
        return found.view(*parts.shape[:-2], len(found), -1)

    def all_reduce(self, parts: torch.Tensor) -> torch.Tensor:
        """Sum over members, in the memory of `parts` if that is contiguous. In a pass over a filler, send as many zeros as the others
        expect."""
        with self.ranks.progress.collective("sum all tokens") as takes_part:
            expected = self.ranks.progress.tokens
            if takes_part and expected is None:
                return self._all_reduce(parts)
            if takes_part and expected is not None:
                self._all_reduce(parts.new_zeros(expected, parts.shape[-1]))
            return torch.zeros_like(parts)

    def _all_reduce(self, parts: torch.Tensor) -> torch.Tensor:
        found = parts.contiguous()
        self.moved["all-reduce"] += found.nbytes
        with self.ranks.progress.sending():
            dist.all_reduce(found, group=self.ranks.group)
        return found

    def most(self, tensor: torch.Tensor) -> None:
        """Take the largest number of all members, in place."""
        with self.ranks.progress.collective("most") as takes_part:
            if takes_part:
                self.moved["all-reduce"] += tensor.nbytes
                with self.ranks.progress.sending():
                    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.ranks.group)

    def sum(self, tensor: torch.Tensor) -> None:
        """Sum over members, in place."""
        with self.ranks.progress.collective("sum") as takes_part:
            if takes_part:
                with self.ranks.progress.sending():
                    self.ranks.sum(tensor)

    def stack(self, own: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all members, which have the same shape, without gradient: [size, *shape]."""
        with self.ranks.progress.collective("stack") as takes_part:
            found = own.new_empty(self.ranks.size, *own.shape)
            if takes_part:
                self.moved["all-gather"] += found.nbytes
                with self.ranks.progress.sending():
                    gather_into(found.view(-1), own.detach().reshape(-1), group=self.ranks.group)
            return found

    @contextlib.contextmanager
    def counted_apart(self) -> Iterator[Callable[[], None]]:
        """Leave collectives out of `Ranks.moved`, and yield a function that adds them to it: they belong to a CUDA graph, which is captured
        once and runs many times."""
        apart = self.moved = no_bytes()
        try:
            yield lambda: self.ranks.moved.update(apart)
        finally:
            self.moved = self.ranks.moved

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this member's tokens of all."""
        rows = self.padded(whole).view(self.ranks.size, -1, whole.shape[-1])[self.ranks.rank]
        return rows.view(*whole.shape[:-2], len(rows), -1)

    def padded(self, whole: torch.Tensor) -> torch.Tensor:
        """Return rows of tokens, padded to a multiple of the group's size."""
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
class TensorSplit(ModelPart):
    """This member's part of a model that is divided among the members of a group."""

    exchange: TokenExchange
    whole_experts: bool = False  # whether this member has some whole experts, rather than a part of every expert

    def saved_as(self, name: str) -> str | None:
        """Return the suffix of a tensor's name in a checkpoint. The first member saves what all members hold."""
        return None if self.is_whole(name) and self.ranks.rank else super().saved_as(name)

    @torch.no_grad()
    def sum_shared(self, gradients: Mapping[str, torch.Tensor], own: Mapping[str, slice] | None = None) -> None:
        """Sum gradients in place, for numbers that several members hold. `gradients`: flat. `own`: for each parameter, the range of this
        member's numbers that the gradients belong to; None: all. All members must give the same ranges of the same parameters."""
        pending: list[tuple[torch.Tensor, int]] = []
        filled = 0
        for given, copies in self._stretches(gradients, own):
            if copies == 1:
                continue
            number, limit = len(given), EXCHANGE_BYTES // given.element_size()
            length = number * (self.ranks.size // copies)  # numbers in all members' stretches
            if pending and (filled + length > limit or given.dtype != pending[0][0].dtype):
                self._sum(pending, filled)
                pending, filled = [], 0
            pending.append((given, filled + number * (self.ranks.rank // copies)))
            filled += length
        if pending:
            self._sum(pending, filled)

    def norm(self, gradients: Mapping[str, torch.Tensor], own: Mapping[str, slice] | None = None) -> torch.Tensor:
        """Return this member's part of a norm over all members, which counts every number once, however many members hold it."""
        by_copies: dict[int, list[torch.Tensor]] = {}
        for given, copies in self._stretches(gradients, own):
            by_copies.setdefault(copies, []).append(given)
        found = [torch.nn.utils.get_total_norm(each).double().square() / copies for copies, each in by_copies.items()]
        return sum(found, torch.zeros((), dtype=torch.float64, device=self.device)).sqrt()

    def _stretches(self, gradients: Mapping[str, torch.Tensor], own: Mapping[str, slice] | None) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield the numbers of each parameter's sections, flat, and how many members hold the same."""
        for name, given in gradients.items():
            begin, first = 0, own[name].start if own else 0
            for end, copies in self.sections(name):
                start, stop = (min(len(given), max(0, place - first)) for place in (begin, end))
                if start < stop:
                    yield given[start:stop], copies
                begin = end

    def sections(self, name: str) -> list[tuple[int, int]]:
        """Return the sections of this member's part of a parameter: where each ends in the flat numbers, and how many members hold the
        same."""
        cut, shape = self.table.cuts[name], self.shapes[name]
        if not cut.shared:
            return [(math.prod(shape), 1)]
        assert cut.dim == 0, f"{name}: only rows are held by several members"
        ends = itertools.accumulate(len(part) for part in cut.parts(self.ranks.rank))
        return [(end * math.prod(shape[1:]), section.copies) for end, section in zip(ends, cut.sections, strict=True)]

    def _sum(self, pieces: Sequence[tuple[torch.Tensor, int]], length: int) -> None:
        sample = pieces[0][0]
        memory = torch.zeros(length, dtype=sample.dtype, device=sample.device)
        for own, place in pieces:
            memory[place : place + len(own)] = own
        self.ranks.sum(memory)
        for own, place in pieces:
            own.copy_(memory[place : place + len(own)])


@torch.no_grad()
def split(model: torch.nn.Module, ranks: Ranks, *, whole_experts: bool = False, key: str = KEY) -> TensorSplit:
    """Divide a whole model among the members of a group, which may have one member. Call it before layers are fused or recomputed and
    before the optimizer is made. `whole_experts`: whether each member has some whole experts, if there are any, rather than a part of every
    expert. `key`: the setting that gives the number of members, for messages."""
    assert not ranks.alone and not any(STATE in vars(module) for module in model.modules()), "a model is fused after it is split"
    table = slice_table(model, ranks.size, whole_experts=whole_experts, key=key)
    found = TensorSplit(model, table, ranks, shapes_of(model), TokenExchange(ranks), whole_experts)
    if whole_experts:
        hand_over(model, OwnExperts(ranks.rank), ranks.size)
    divide_vocabulary(model, found)
    for block in parallel_blocks(model):
        if hasattr(block, "o_proj"):
            tell_heads(block, ranks.size)
            block.register_forward_pre_hook(note_pass(found.exchange), with_kwargs=True)
        block.register_forward_pre_hook(gather_before(found.exchange), with_kwargs=True)
        block.register_forward_hook(scatter_behind(found.exchange))
        if ranks.rank:
            leave_out_biases(block)
    cut_parameters(model, table, ranks.rank)
    return found


def tell_heads(block: Any, size: int) -> None:
    """Set an attention layer's number of heads to those of a member. Most layers take it from their weights."""
    heads, key_heads = (heads_of_member(count, size) for count in head_counts(block))
    own = {"num_heads": heads, "num_key_value_heads": key_heads, "num_key_value_groups": heads // key_heads}
    for name, number in own.items():
        if hasattr(block, name):
            setattr(block, name, number)
    if hasattr(block, "qkv_proj"):
        block.config = copy.copy(block.config)
        block.config.num_attention_heads, block.config.num_key_value_heads = heads, key_heads


def heads_of_member(heads: int, size: int) -> int:
    """Return how many heads each member has; if there are fewer heads than members, several members have the same one."""
    return max(1, heads // size)


def member_layers(layers: Mapping[int, LayerShape], size: int) -> dict[int, LayerShape]:
    """Return the shapes of a member's cache, which has its own key heads, from those of the whole model."""
    return {index: replace(shape, key_heads=heads_of_member(shape.key_heads, size)) for index, shape in layers.items()}


def leave_out_biases(block: torch.nn.Module) -> None:
    """Make only the first member add biases of layers that are cut by columns, since their results are summed over members."""
    for name, layer in block.named_modules():
        if isinstance(layer, torch.nn.Linear) and layer.bias is not None and is_cut_by_columns(name):
            layer.forward = MethodType(without_bias, layer)  # type: ignore[method-assign]


def without_bias(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, self.weight, 0 * self.bias)  # a gradient of zero: all parameters that learn have one on every member


# ---- hooks of blocks: a block sees all tokens -------------------------------------------------------------------------------------------


def note_pass(exchange: TokenExchange) -> Callable[..., None]:
    """Make a hook that notes the kind of pass. Attention comes first in a layer, also where a layer is recomputed after another pass has
    begun."""

    def hook(block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        exchange.tokens, exchange.decoding = kwargs["position_embeddings"][0].shape[-2], decodes(kwargs)

    return hook


def decodes(kwargs: Mapping[str, Any]) -> bool:
    """Return whether these are the arguments of a decoding step."""
    return isinstance(kwargs.get("fulltilt"), Decode)


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
    """Embed with this member's rows, and give the head all tokens. A critic's score reads the tokens in parts: its gradient must be a part
    too, like that of every other parameter. Called on the whole model."""
    ranks, exchange, body = found.ranks, found.exchange, body_of(model)
    embeddings: list[Any] = embeddings_of(model)
    first = embeddings[0]
    rows = [CutSection(len(layer.weight), vocabulary_rows(len(layer.weight), ranks.size)).part(ranks.rank) for layer in embeddings]
    if first.padding_idx is not None:
        first.padding_idx = first.padding_idx - rows[0].start if first.padding_idx in rows[0] else None
    first.forward = MethodType(embed_own(exchange, rows[0]), first)
    body.register_forward_pre_hook(lambda body, args, kwargs: setattr(exchange, "decoding", decodes(kwargs)), with_kwargs=True)
    body.register_forward_hook(gather_output(exchange))
    # Functions, not methods, so that a copy of the model uses the same group.
    vocabulary = len(embeddings[-1].weight)
    part = VocabularyPart(
        rows[-1].start, vocabulary, vocabulary_rows(vocabulary, ranks.size), sum=lambda own: exchange.sum(own),
        most=lambda own: exchange.most(own), gather=lambda own: exchange.stack(own), counted_apart=lambda: exchange.counted_apart(),
        not_captured=THROUGH_THE_HOST if dist.get_backend(ranks.group) == "gloo" else None,
    )  # fmt: skip
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
        """Embed: rows for tokens of this member's vocabulary, zeros for others, summed over members."""
        exchange.tokens = ids.shape[-1]
        here = (ids >= own.start) & (ids < own.stop)
        rows: torch.Tensor = type(self).forward(self, torch.where(here, ids - own.start, 0))
        return exchange.scatter(rows * here[..., None])

    return forward
