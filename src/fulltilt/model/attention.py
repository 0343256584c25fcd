"""The one attention function: packed training, prefill and decoding of every model go through it.

Enters: queries, keys and values of one layer as transformers passes them, and a context (`Packed`, `Paged` or `Decode`) in the keyword
argument `fulltilt`. Leaves: the layer's attention output. Guaranteed: attention is causal inside each document and nowhere else; a feature
that this function does not implement raises `UnsupportedModel` by name instead of being computed wrongly. transformers builds no mask for
an attention name it does not know, so windows are applied here. Soft-capped scores are materialised, at most `SCORE_NUMBERS` of them at a
time, forward and backward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from fulltilt.kernels.dispatch import runs_triton
from fulltilt.kernels.packed_backward import packed_backward, parts_of, takes
from fulltilt.kernels.paged_attention import paged_attention, rotate_and_write, write_kv
from fulltilt.model.arrays import to_device
from fulltilt.records import UserError

NAME = "fulltilt"
SCORE_NUMBERS = 1 << 26
BUNCH_BYTES = 1 << 20  # bytes of keys and values that one decoding call reads on CPU, unless a single row has more

# Arguments that models pass and that change nothing here: positions are in the rotated queries and keys, is_causal is checked separately.
HARMLESS = frozenset(
    {"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states", "return_dict", "past_key_values",
     "position_embeddings", "logits_to_keep", "deterministic", "num_items_in_batch", "output_router_logits", "is_causal"}
)  # fmt: skip
REFUSED = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a position bias on attention scores",
    "head_mask": "a mask over heads",
}


class UnsupportedModel(UserError):
    """The model needs an attention feature that is not implemented here."""


@dataclass(frozen=True)
class LayerShape:
    """Shape of the cache entries of one attention layer for each token, as seen in a real pass."""

    key_heads: int
    head_width: int
    window: int | None


@dataclass(frozen=True)
class Scoring:
    """A layer's way to turn products of queries and keys into scores, and how far back a token looks."""

    scale: float
    window: int | None = None
    softcap: float | None = None


class TokensApart(Protocol):
    """Workers that each have a part of a stream's tokens (parallel/sequence.py)."""

    def to_heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Exchange all heads of this worker's tokens for all tokens of its heads."""

    def to_tokens(self, out: torch.Tensor) -> torch.Tensor:
        """Undo `to_heads`, for attention's output."""


@dataclass(frozen=True, eq=False)
class Packed:
    """Documents side by side in one stream of tokens; each attends to itself only."""

    bounds: np.ndarray  # int64 [documents + 1]: where each document begins, and the end
    cu_seqlens: torch.Tensor  # the same, int32, on the device
    longest: int
    apart: TokensApart | None = None  # the workers that share the stream, if layers see a part of it
    seen: dict[int, LayerShape] = field(default_factory=dict)  # layer index -> shape, filled as layers pass through

    @staticmethod
    def of(cu_seqlens: np.ndarray | Sequence[int], device: torch.device, apart: TokensApart | None = None) -> Packed:
        bounds = np.asarray(cu_seqlens, dtype=np.int64)
        return Packed(bounds, to_device(bounds.astype(np.int32), device), int(np.diff(bounds).max(initial=0)), apart)

    @cached_property
    def parts(self) -> torch.Tensor:
        """The work items of the programs of fulltilt's backward kernels."""
        return to_device(parts_of(np.diff(self.bounds).tolist()), self.cu_seqlens.device)

    @cached_property
    def by_length(self) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Indices for devices without a kernel for documents of different lengths, where documents of equal length share a call: of their
        tokens, int64 [documents of that length, length], and to restore stream order, int64 [T]."""
        starts, lengths, device = self.bounds[:-1], np.diff(self.bounds), self.cu_seqlens.device
        buckets = [starts[lengths == length][:, None] + np.arange(length)[None, :] for length in np.unique(lengths) if length]
        order = np.concatenate([np.zeros(0, np.int64), *(bucket.ravel() for bucket in buckets)])
        return tuple(to_device(bucket, device) for bucket in buckets), to_device(np.argsort(order), device)


@dataclass(frozen=True, eq=False)
class Paged:
    """New tokens of several sequences whose earlier keys and values are in a paged cache."""

    keys: Sequence[torch.Tensor]  # per layer [slots, key heads, head width]; slot = block * block_tokens + position in the block
    values: Sequence[torch.Tensor]
    slots: torch.Tensor  # int64 [T]: where the new tokens' keys and values go
    new: Packed  # the new tokens of each sequence
    whole: Packed  # all tokens of each sequence, new ones included
    read: torch.Tensor  # int64 [tokens of `whole`]: slots of all tokens


@dataclass(frozen=True, eq=False)
class Decode:
    """One new token for each row of a batch of fixed shape, all on the device: the context of a captured graph.

    A row of length 0 is empty: nothing is written and its output is zeros. On CPU there are no empty rows, and rows of similar length are
    neighbours.
    """

    # Per layer: keys and values as in `Paged`, and the address of each, int64 [1], which may change between runs of a graph.
    caches: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]
    slots: torch.Tensor  # int64 [B]; -1: empty
    table: torch.Tensor  # int32 [B, most blocks]
    lengths: torch.Tensor  # int32 [B], the new token included
    block_tokens: int
    bunches: dict[int | None, list[Bunch]] = field(default_factory=dict)  # on CPU: window -> bunches, filled by its first layer


@dataclass(frozen=True, eq=False)
class Bunch:
    """Neighbouring rows of a batch that attend in one call on CPU."""

    rows: slice
    blocks: torch.Tensor  # [rows * most blocks]
    tokens: int  # tokens that the longest row reads
    mask: torch.Tensor  # bool [rows, 1, 1, tokens]


Context = Packed | Paged | Decode


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, T, width]
    key: torch.Tensor,  # [1, key heads, T, width]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    fulltilt: Context | None = None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    refuse_unknown(module, query, key, value, attention_mask, dropout, fulltilt, features)
    scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else float(scaling), sliding_window, softcap)
    # Not states[0], whose gradient is written into zeros of its own.
    q, k, v = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))  # [T, heads, width]
    if isinstance(fulltilt, Packed):
        fulltilt.seen[layer_of(module)] = LayerShape(k.shape[1], k.shape[2], sliding_window)
        if fulltilt.apart is None:
            out = packed(q, k, v, fulltilt, scoring)
        else:
            out = fulltilt.apart.to_tokens(packed(*fulltilt.apart.to_heads(q, k, v), fulltilt, scoring))
    elif isinstance(fulltilt, Decode):
        out = decode_batch(q, k, v, fulltilt, layer_of(module), scoring)
    else:
        assert fulltilt is not None
        out = paged(q, k, v, fulltilt, layer_of(module), scoring)
    return out.unsqueeze(0), None  # [1, T, heads, width]


def register() -> str:
    """Register the function with transformers under its name."""
    AttentionInterface.register(NAME, attention)
    return NAME


def layer_of(module: torch.nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    if index is None:
        raise UnsupportedModel(f"{type(module).__name__} does not number its layers (layer_idx): its keys and values cannot be cached")
    return int(index)


def refuse_unknown(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    dropout: float, context: Context | None, features: dict[str, Any],
) -> None:  # fmt: skip
    widths = [states.shape[-1] for states in (query, key, value)]
    refusals = {
        "does not pass keyword arguments on to its attention: documents cannot be kept apart": context is None,
        "builds an attention mask of its own, which packed documents cannot honour": attention_mask is not None,
        f"applies dropout ({dropout}) to attention weights: rollout and training would disagree": dropout,
        "is not causal": features.get("is_causal", getattr(module, "is_causal", True)) is False,
        f"has values of width {widths[2]} and keys of width {widths[1]}: unequal widths are not supported": len(set(widths)) > 1,
    }
    for name, given in features.items():
        if given is not None and name not in HARMLESS:
            shown = f"{name}={given}" if isinstance(given, bool | int | float | str) else name
            refusals[f"asks for {REFUSED.get(name, 'an attention feature')} ({shown}), which is not supported"] = True
    for words, refused in refusals.items():
        if refused:
            raise UnsupportedModel(f"{type(module).__name__} {words}")


def decode_batch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Decode, layer: int, scoring: Scoring,
    angles: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute attention of states [B, heads, width] over the cache, and write the new keys and values into it. `angles`: the cosines and
    sines [B, width] of queries and keys that are not rotated yet, which saves one kernel; only where Triton runs."""
    if not runs_triton(q):
        assert angles is None
        return decode_bunches(q, k, v, context, layer, scoring)
    if angles is None:
        write_kv(k, v, *context.caches[layer], context.slots)
    else:
        q = rotate_and_write(q, k, v, *angles, *context.caches[layer], context.slots)
    return paged_attention(
        q, *context.caches[layer], context.table, context.lengths, scale=scoring.scale, block_tokens=context.block_tokens,
        window=scoring.window, softcap=scoring.softcap,
    )  # fmt: skip


def decode_bunches(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Decode, layer: int, scoring: Scoring) -> torch.Tensor:
    """Decode on CPU. Heads that share keys become rows of one query, so keys are not repeated."""
    keys, values, *_ = context.caches[layer]
    keys.index_copy_(0, context.slots, k)
    values.index_copy_(0, context.slots, v)
    if scoring.window not in context.bunches:
        context.bunches[scoring.window] = bunches_of(context, scoring.window, 2 * keys[0].nbytes)
    grouped = q.view(len(q), keys.shape[1], -1, q.shape[-1])
    numbers = context.block_tokens * keys.shape[1] * keys.shape[2]  # numbers in a block
    blocks_of_keys, blocks_of_values = keys.view(-1, numbers), values.view(-1, numbers)
    outputs = []
    for bunch in context.bunches[scoring.window]:
        ks, vs = (
            states.index_select(0, bunch.blocks).view(len(bunch.mask), -1, *keys.shape[1:])[:, : bunch.tokens].transpose(1, 2)
            for states in (blocks_of_keys, blocks_of_values)
        )
        outputs.append(attend(grouped[bunch.rows], ks, vs, bunch.mask, scoring))
    return torch.cat(outputs).reshape(q.shape)


def bunches_of(context: Decode, window: int | None, token_bytes: int) -> list[Bunch]:
    """Return bunches of rows of similar length, so that little padding is read, and small enough for the processor's cache."""
    lengths, block = context.lengths.tolist(), context.block_tokens
    bunches, start = [], 0
    while start < len(lengths):
        stop, shortest, longest = start, lengths[start], 0
        while stop < len(lengths):
            wider = max(longest, lengths[stop])
            if stop > start and (stop + 1 - start) * wider * token_bytes > BUNCH_BYTES:
                break
            shortest, longest, stop = min(shortest, lengths[stop]), wider, stop + 1
        rows = slice(start, stop)
        first = 0 if window is None else max(0, shortest - window) // block
        ends = context.lengths[rows, None]
        place = torch.arange(first * block, longest, device=ends.device)
        mask = place < ends if window is None else (place < ends) & (place >= ends - window)
        blocks = context.table[rows, first : -(-longest // block)].reshape(-1)
        bunches.append(Bunch(rows, blocks, len(place), mask[:, None, None, :]))
        start = stop
    return bunches


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Packed, scoring: Scoring) -> torch.Tensor:
    if flash_runs(q, scoring):
        bounds = context.cu_seqlens
        learns = torch.is_grad_enabled() and any(states.requires_grad for states in (q, k, v))
        if learns and takes(q, documents=len(context.bounds) - 1):
            states = (q.contiguous(), k.contiguous(), v.contiguous())
            return packed_flash(*states, bounds, context.parts, context.longest, scoring.scale, scoring.window)[0]
        return flash(q, k, v, bounds, bounds, context.longest, context.longest, scoring)[0]
    outputs = []
    buckets, unsort = context.by_length
    for index in buckets:
        length = index.shape[1]
        qs, ks, vs = (states[index].transpose(1, 2) for states in (q, k, v))  # [documents, heads, length, width]
        narrow = scoring.window is not None and scoring.window < length
        mask = causal_mask(length, length, scoring.window, q.device) if narrow else None
        out = attend(qs, repeat(ks, q), repeat(vs, q), mask, scoring)
        outputs.append(out.transpose(1, 2).reshape(-1, *q.shape[1:]))
    return torch.cat(outputs)[unsort] if outputs else q


def paged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Paged, layer: int, scoring: Scoring) -> torch.Tensor:
    keys, values = context.keys[layer], context.values[layer]
    keys.index_copy_(0, context.slots, k)
    values.index_copy_(0, context.slots, v)
    new, whole = context.new, context.whole
    fresh = np.array_equal(new.bounds, whole.bounds)  # every sequence is in this pass from its first token
    if flash_runs(q, scoring):
        k_all, v_all = (k, v) if fresh else (keys[context.read], values[context.read])
        return flash(q, k_all, v_all, new.cu_seqlens, whole.cu_seqlens, new.longest, whole.longest, scoring)[0]
    if fresh:
        return packed(q, k, v, new, scoring)
    parts = []
    for (start, stop), slots in zip(pairwise(new.bounds.tolist()), context.read.split(np.diff(whole.bounds).tolist()), strict=True):
        mask = causal_mask(stop - start, len(slots), scoring.window, q.device)
        states = (q[start:stop], keys.index_select(0, slots), values.index_select(0, slots))
        qs, ks, vs = (part.transpose(0, 1).unsqueeze(0) for part in states)
        out = attend(qs, repeat(ks, q), repeat(vs, q), mask, scoring)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring) -> torch.Tensor:
    """Compute attention of queries, keys and values [batch, heads, T, width]. The mask is True where a query may look; None means
    causal."""
    if scoring.softcap is not None:
        causal = causal_mask(q.shape[2], k.shape[2], None, q.device) if mask is None else mask
        return attend_capped(q, k, v, causal, scoring)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scoring.scale)


def attend_capped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Compute attention with soft-capped scores, for which torch has no kernel: piece by piece, and again in the backward pass instead of
    keeping them."""
    batch, heads, queries, _ = q.shape
    mask = mask.expand(batch, 1, queries, k.shape[2])
    rows = max(1, SCORE_NUMBERS // (heads * k.shape[2]))  # queries of a piece
    documents = max(1, rows // queries)
    run: Callable[..., torch.Tensor] = capped_piece
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v)):
        run = partial(checkpoint, capped_piece, use_reentrant=False, preserve_rng_state=False)
    whole = []
    for part in (slice(first, first + documents) for first in range(0, batch, documents)):
        looks = [slice(start, start + rows) for start in range(0, queries, rows)]
        pieces = [run(q[part, :, look], k[part], v[part], mask[part, :, look], scoring) for look in looks]
        whole.append(torch.cat(pieces, dim=2))
    return torch.cat(whole)


def capped_piece(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    assert scoring.softcap is not None
    wide = torch.promote_types(q.dtype, torch.float32)  # a score near the cap of 50 has an error of an eighth in bfloat16
    scores = (q.to(wide) @ k.to(wide).transpose(-1, -2)) * scoring.scale
    capped = torch.tanh(scores / scoring.softcap) * scoring.softcap
    return capped.masked_fill(~mask, -torch.inf).softmax(-1).to(v.dtype) @ v


def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return a mask that is True where a query may look; the last query has the position of the last key."""
    gap = (torch.arange(queries, device=device) + (keys - queries))[:, None] - torch.arange(keys, device=device)[None, :]
    return gap >= 0 if window is None else (gap >= 0) & (gap < window)


def repeat(states: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Repeat keys or values [.., key heads, T, width] for each query head."""
    times = q.shape[1] // states.shape[1]
    return states if times == 1 else states.repeat_interleave(times, dim=1)


def flash_runs(q: torch.Tensor, scoring: Scoring) -> bool:
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and scoring.softcap is None


@cache
def varlen() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return torch's flash attention. torch 2.11 accepts grouped heads without an option; later releases need one."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    options: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    return partial(varlen_attn, return_aux=AuxRequest(lse=True), **options)  # type: ignore[return-value]


def flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_queries: torch.Tensor, cu_keys: torch.Tensor,
    longest_query: int, longest_key: int, scoring: Scoring,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the output, and the logarithms of the sums of exponentials [heads, T]."""
    window = (-1 if scoring.window is None else scoring.window - 1, 0)
    states = (q.contiguous(), k.contiguous(), v.contiguous())
    return varlen()(*states, cu_queries, cu_keys, longest_query, longest_key, scale=scoring.scale, window_size=window)


@torch.library.custom_op("fulltilt::packed_attention", mutates_args=())
def packed_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, parts: torch.Tensor, longest: int, scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Run flash attention forward and fulltilt's kernels backward: with documents of a few hundred tokens flash's own backward pass takes
    1.5 to 1.9 times as long. It is an operation of torch, so that selective recompute knows what to keep."""
    return flash(q, k, v, bounds, bounds, longest, longest, Scoring(scale, window))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, _, parts, _, ctx.scale, ctx.window = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, parts)


def _learn(ctx: Any, of_out: torch.Tensor, of_norms: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    return *packed_backward(of_out.contiguous(), *ctx.saved_tensors, scale=ctx.scale, window=ctx.window), *(None,) * 5


packed_flash.register_autograd(_learn, setup_context=_keep)
