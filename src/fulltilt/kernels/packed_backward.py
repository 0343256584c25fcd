"""The backward pass of causal attention over documents side by side in one stream of tokens.

Enters: queries [T, heads, width], keys and values [T, key heads, width], the attention output, its gradient, and the logarithms of the sums
of exponentials [heads, T] that flash attention leaves; on the host, the lengths of the documents. Leaves: the gradients of queries, keys
and values, contiguous. Guaranteed: each gradient is added up in one program in a fixed order, in float32, over all query heads that share a
key head: there are no atomics, and the same call gives the same bits again. Numbers outside a document are never used, even if NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fulltilt.kernels.dispatch import jit, runs_triton, tl
from fulltilt.kernels.paged_attention import LOG2_E, padded

TILE = 64  # tokens that a program collects gradients for, and that it reads at a time
WIDEST = 128  # head width for which two accumulators fit into a program's registers
MOST_PROGRAMS = 2**16 - 1  # limit of a grid's second axis


def takes(q: torch.Tensor, documents: int) -> bool:
    """Return whether the kernels can run for these contiguous queries: positions are 32 bits wide, and the grid has one program per tile of
    a document. They run on Hopper only: on other chips they were not measured, and need more registers than a thread has."""
    if q.is_cuda and torch.cuda.get_device_capability(q.device)[0] != 9:
        return False
    return q.shape[2] <= WIDEST and q.numel() < 2**31 and len(q) // TILE + documents <= MOST_PROGRAMS


def parts_of(lengths: Sequence[int]) -> np.ndarray:
    """Return the work of each program, int32 [2, programs, 4], for keys and for queries: the document's first token, the position of the
    program's first token in the document, the document's length, and where the document would begin if all before it were padded to whole
    tiles. Programs with the most to read come first: the first keys of a document, and the last queries."""
    long = np.asarray(lengths, np.int64)
    counts = -(-long // TILE)
    first, filled = np.cumsum(long) - long, (np.cumsum(counts) - counts) * TILE
    first, long, filled = (np.repeat(of_documents, counts) for of_documents in (first, long, filled))
    begins = np.arange(len(long)) * TILE - filled
    whole = np.stack([first, begins, long, filled], axis=1)
    of_keys, of_queries = np.argsort(begins - long, kind="stable"), np.argsort(-begins, kind="stable")
    return whole[np.stack([of_keys, of_queries])].astype(np.int32)


@jit
def _part(parts: tl.tensor, index: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    first, begin = tl.load(parts + 4 * index).to(tl.int64), tl.load(parts + 4 * index + 1)
    length, filled = tl.load(parts + 4 * index + 2), tl.load(parts + 4 * index + 3)
    return first, tl.multiple_of(begin, 64), length, tl.multiple_of(filled, 64)


@jit
def _delta(
    out: tl.tensor, of_out: tl.tensor, norms: tl.tensor, deltas: tl.tensor, exponents: tl.tensor, parts: tl.tensor, tokens: tl.tensor,
    row: tl.tensor, out_row: tl.tensor, out_head: tl.tensor, of_row: tl.tensor, of_head: tl.tensor,
    WIDTH: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr,
) -> None:  # fmt: skip
    """Compute in one program, for some tokens of a document and one head, the product of the output and its gradient, and the norm as a
    power of two. Documents are padded to whole tiles in the results: this aligns them, and gives weights of zero beyond the document."""
    first, begin, length, filled = _part(parts, tl.program_id(0))
    head, at, columns = tl.program_id(1), begin + tl.arange(0, TILE), tl.arange(0, PADDED)
    source, there = first + at, at < length
    kept = there[:, None] & (columns < WIDTH)[None, :]
    own = tl.load(out + source[:, None] * out_row + head * out_head + columns[None, :], mask=kept, other=0.0).to(tl.float32)
    given = tl.load(of_out + source[:, None] * of_row + head * of_head + columns[None, :], mask=kept, other=0.0).to(tl.float32)
    norm = tl.load(norms + head.to(tl.int64) * tokens + source, mask=there, other=float("inf"))
    target = head.to(tl.int64) * row + filled + at
    tl.store(deltas + target, tl.sum(own * given, 1))
    tl.store(exponents + target, norm * 1.4426950408889634)


@jit
def _absorb_queries(
    keys: tl.tensor, values: tl.tensor, q: tl.tensor, of_out: tl.tensor, exponents: tl.tensor, deltas: tl.tensor, at: tl.tensor,
    begin: tl.tensor, length: tl.tensor, q_row: tl.tensor, of_row: tl.tensor, of_keys: tl.tensor, of_values: tl.tensor, inner: tl.tensor,
    WIDTH: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Add the tile of queries from `begin` on; without a mask, all of them see all the keys."""
    token, columns = begin + tl.arange(0, TILE), tl.arange(0, PADDED)
    nearest = tl.minimum(token, length - 1)
    kept = (columns < WIDTH)[None, :]
    queries = tl.load(q + nearest[:, None] * q_row + columns[None, :], mask=kept, other=0.0)
    given = tl.load(of_out + nearest[:, None] * of_row + columns[None, :], mask=kept, other=0.0)
    exponent, delta = tl.load(exponents + token), tl.load(deltas + token)
    weights = tl.exp2(tl.dot(keys, tl.trans(queries), input_precision="ieee") * inner - exponent[None, :])
    if MASKED:
        seen = at[:, None] <= token[None, :]
        if WINDOW > 0:
            seen = seen & (at[:, None] > token[None, :] - WINDOW)
        weights = tl.where(seen, weights, 0.0)
    of_values = tl.dot(weights.to(given.dtype), given, of_values, input_precision="ieee")
    of_scores = weights * (tl.dot(values, tl.trans(given), input_precision="ieee") - delta[None, :])
    of_keys = tl.dot(of_scores.to(queries.dtype), queries, of_keys, input_precision="ieee")
    return of_keys, of_values


@jit
def _backward_keys(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, of_out: tl.tensor, exponents: tl.tensor, deltas: tl.tensor, of_k: tl.tensor, of_v: tl.tensor,
    parts: tl.tensor, row: tl.tensor, scale: tl.tensor, inner: tl.tensor, q_row: tl.tensor, q_head: tl.tensor, k_row: tl.tensor,
    k_head: tl.tensor, v_row: tl.tensor, v_head: tl.tensor, of_row: tl.tensor, of_head: tl.tensor,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the gradients of some keys of one head of one document in one program, from all queries that see them, one head after the
    other."""
    key_head = tl.program_id(0)
    first, begin, length, filled = _part(parts, tl.program_id(1))
    columns, at = tl.arange(0, PADDED), begin + tl.arange(0, TILE)
    source = first + at
    kept = (at < length)[:, None] & (columns < WIDTH)[None, :]
    keys = tl.load(k + source[:, None] * k_row + key_head * k_head + columns[None, :], mask=kept, other=0.0)
    values = tl.load(v + source[:, None] * v_row + key_head * v_head + columns[None, :], mask=kept, other=0.0)
    of_keys, of_values = tl.zeros([TILE, PADDED], tl.float32), tl.zeros([TILE, PADDED], tl.float32)
    q += first * q_row + key_head * GROUP * q_head
    of_out += first * of_row + key_head * GROUP * of_head
    exponents += (key_head * GROUP).to(tl.int64) * row + filled
    deltas += (key_head * GROUP).to(tl.int64) * row + filled
    tiles = tl.cdiv(length, TILE) - begin // TILE
    if WINDOW > 0:
        tiles = tl.minimum(tiles, tl.cdiv(TILE - 1 + WINDOW, TILE))
        for index in range(0, GROUP * tiles):
            member = index // tiles
            of_keys, of_values = _absorb_queries(
                keys, values, q + member * q_head, of_out + member * of_head, exponents + member * row, deltas + member * row, at,
                begin + (index - member * tiles) * TILE, length, q_row, of_row, of_keys, of_values, inner, WIDTH, WINDOW, TILE, PADDED,
                True,
            )  # fmt: skip
    else:
        # First the tile on the diagonal of each head, then the others: loops of one level read ahead from head to head, and hold less in
        # registers than a loop within a loop.
        for member in range(0, GROUP):
            of_keys, of_values = _absorb_queries(
                keys, values, q + member * q_head, of_out + member * of_head, exponents + member * row, deltas + member * row, at, begin,
                length, q_row, of_row, of_keys, of_values, inner, WIDTH, WINDOW, TILE, PADDED, True,
            )  # fmt: skip
        others = tiles - 1
        for index in range(0, GROUP * others):
            member = index // others
            of_keys, of_values = _absorb_queries(
                keys, values, q + member * q_head, of_out + member * of_head, exponents + member * row, deltas + member * row, at,
                begin + (1 + index - member * others) * TILE, length, q_row, of_row, of_keys, of_values, inner, WIDTH, WINDOW, TILE, PADDED,
                False,
            )  # fmt: skip
    target = (source[:, None] * KEY_HEADS + key_head) * WIDTH + columns[None, :]
    tl.store(of_k + target, (of_keys * scale).to(of_k.dtype.element_ty), mask=kept)
    tl.store(of_v + target, of_values.to(of_v.dtype.element_ty), mask=kept)


@jit
def _absorb_keys(
    queries: tl.tensor, given: tl.tensor, k: tl.tensor, v: tl.tensor, exponent: tl.tensor, delta: tl.tensor, at: tl.tensor,
    begin: tl.tensor, length: tl.tensor, k_row: tl.tensor, v_row: tl.tensor, of_queries: tl.tensor, inner: tl.tensor,
    WIDTH: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Add the tile of keys from `begin` on; without a mask, all queries see all of them."""
    token, columns = begin + tl.arange(0, TILE), tl.arange(0, PADDED)
    kept = (columns < WIDTH)[None, :]
    if MASKED:
        kept = kept & (token < length)[:, None]
    keys = tl.load(k + token[:, None] * k_row + columns[None, :], mask=kept, other=0.0)
    values = tl.load(v + token[:, None] * v_row + columns[None, :], mask=kept, other=0.0)
    weights = tl.exp2(tl.dot(queries, tl.trans(keys), input_precision="ieee") * inner - exponent[:, None])
    if MASKED:
        seen = token[None, :] <= at[:, None]
        if WINDOW > 0:
            seen = seen & (token[None, :] > at[:, None] - WINDOW)
        weights = tl.where(seen, weights, 0.0)
    of_scores = weights * (tl.dot(given, tl.trans(values), input_precision="ieee") - delta[:, None])
    return tl.dot(of_scores.to(keys.dtype), keys, of_queries, input_precision="ieee")


@jit
def _backward_queries(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, of_out: tl.tensor, exponents: tl.tensor, deltas: tl.tensor, of_q: tl.tensor, parts: tl.tensor,
    row: tl.tensor, scale: tl.tensor, inner: tl.tensor, q_row: tl.tensor, q_head: tl.tensor, k_row: tl.tensor, k_head: tl.tensor,
    v_row: tl.tensor, v_head: tl.tensor, of_row: tl.tensor, of_head: tl.tensor,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the gradients of some queries of one head of one document in one program, from all keys that they see."""
    head = tl.program_id(0)
    first, begin, length, filled = _part(parts, tl.program_id(1))
    columns, at = tl.arange(0, PADDED), begin + tl.arange(0, TILE)
    source = first + at
    kept = (at < length)[:, None] & (columns < WIDTH)[None, :]
    queries = tl.load(q + source[:, None] * q_row + head * q_head + columns[None, :], mask=kept, other=0.0)
    given = tl.load(of_out + source[:, None] * of_row + head * of_head + columns[None, :], mask=kept, other=0.0)
    exponent = tl.load(exponents + head.to(tl.int64) * row + filled + at)
    delta = tl.load(deltas + head.to(tl.int64) * row + filled + at)
    k += first * k_row + (head // GROUP) * k_head
    v += first * v_row + (head // GROUP) * v_head
    of_queries = tl.zeros([TILE, PADDED], tl.float32)
    oldest = tl.maximum(begin - WINDOW + 1, 0) // TILE if WINDOW > 0 else 0
    for index in range(oldest, begin // TILE):
        of_queries = _absorb_keys(
            queries, given, k, v, exponent, delta, at, index * TILE, length, k_row, v_row, of_queries, inner, WIDTH, WINDOW, TILE,
            PADDED, WINDOW > 0,
        )  # fmt: skip
    of_queries = _absorb_keys(
        queries, given, k, v, exponent, delta, at, begin, length, k_row, v_row, of_queries, inner, WIDTH, WINDOW, TILE, PADDED, True
    )
    target = (source[:, None] * HEADS + head) * WIDTH + columns[None, :]
    tl.store(of_q + target, (of_queries * scale).to(of_q.dtype.element_ty), mask=kept)


def packed_backward(
    of_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, norms: torch.Tensor, parts: torch.Tensor, *,
    scale: float, window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients of queries, keys and values. `parts` is the result of `parts_of` for the documents' lengths, on the device."""
    tokens, heads, width = q.shape
    key_heads = k.shape[1]
    assert all(states.stride(2) == 1 for states in (of_out, q, k, v, out)) and norms.is_contiguous() and norms.shape == (heads, tokens)
    assert parts.dtype == torch.int32 and parts.is_contiguous() and parts.shape[2] == 4
    assert takes(q, documents=0) and parts.shape[1] <= MOST_PROGRAMS
    assert runs_triton(q), "without Triton, packed attention and its gradient are torch's"
    of_q, of_k, of_v = (torch.empty(states.shape, dtype=states.dtype, device=states.device) for states in (q, k, v))
    programs = parts.shape[1]
    if not programs:
        return of_q, of_k, of_v
    row, scale = programs * TILE, float(np.float32(scale))
    deltas, exponents = torch.empty(2, heads, row, dtype=torch.float32, device=q.device)
    of_heads = {"WIDTH": width, "TILE": TILE, "PADDED": padded(width), "num_warps": 4}
    _delta[(programs, heads)](
        out, of_out, norms, deltas, exponents, parts[0], tokens, row, *out.stride()[:2], *of_out.stride()[:2], **of_heads
    )
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *of_out.stride()[:2])
    given, shared = (q, k, v, of_out, exponents, deltas), {"GROUP": heads // key_heads, "WINDOW": window or 0, "num_stages": 2, **of_heads}
    _backward_keys[(key_heads, programs)](*given, of_k, of_v, parts[0], row, scale, scale * LOG2_E, *strides, KEY_HEADS=key_heads, **shared)
    _backward_queries[(heads, programs)](*given, of_q, parts[1], row, scale, scale * LOG2_E, *strides, HEADS=heads, **shared)
    return of_q, of_k, of_v
