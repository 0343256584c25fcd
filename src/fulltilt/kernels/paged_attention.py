"""Attention of one new token per sequence over a paged cache of keys and values, and the writing of that cache, where Triton runs.
Elsewhere decoding attends in `model/attention.py`.

Enters: queries [B, heads, width]; the caches of one layer [slots, key heads, width], where slot = block * block_tokens + place; the blocks
of each sequence, and its length with the new token. A cache is given twice: as a tensor, which is only checked, and as a base, an int64
tensor [1] on the device that holds the cache's address. Kernels follow only the base: a captured CUDA graph keeps working after the cache
has moved, once the new address is written into the base.

Leaves: the attention output [B, heads, width]; the writers fill the cache at the given slots.

Guaranteed:
- a sequence of length 0 (an empty row of a padded batch) reads no block and gives zeros; a slot of -1 writes nothing;
- cache contents beyond a sequence's length, and table entries beyond its blocks, are never used, even if they are NaN;
- nothing waits for the device, and a launch depends only on shapes, the width of the table among them: calls can be captured.
  Run each shape once before capture, so that nothing is compiled meanwhile;
- in bfloat16 and float16, a sequence that is not split (`AttentionLaunch.whole`) gives, bit for bit, what torch's flash attention gives for
  the last token of the same document in training, on the GPUs where that was compared (docs/performance.md);
- the number of splits of a sequence changes the result by rounding only. Scores and sums are float32.

Blocks of the table must cover each length, and every block number in use must lie inside the cache: neither is checked on the device.
"""

from __future__ import annotations

import math
from functools import cache, partial

import numpy as np
import torch

from fulltilt.footprint import PROCESSORS, AttentionLaunch, launch_for, padded, power_of_two
from fulltilt.kernels.dispatch import jit, runs_triton, tl
from fulltilt.kernels.rotary import turned

LOG2_E = math.log2(math.e)

# Bases may be rows of one tensor of addresses, half of them not aligned to 16 bytes: this must not compile a kernel twice.
BASES = ("key_base", "value_base")


@jit()
def _share(
    length: tl.tensor, WINDOW: tl.constexpr, SPLITS: tl.constexpr, FEWEST: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return how many tokens are attended to, and how many of them one split takes."""
    span = tl.maximum(length, 0)
    if WINDOW > 0:
        span = tl.minimum(span, WINDOW)
    share = tl.maximum(tl.cdiv(tl.cdiv(span, SPLITS), TILE) * TILE, FEWEST)
    return span, tl.where(span <= WHOLE, tl.maximum(share, span), share)


@jit()
def _cached(base: tl.tensor, index: tl.tensor, states: tl.tensor, ROW: tl.constexpr) -> tl.tensor:
    """Return the address of a row of ROW numbers in the cache at `base`, which has the type of `states`. The hints let loads be 16 bytes
    wide although the compiler cannot see where the address came from."""
    cached = tl.multiple_of(tl.load(base), 16).to(tl.pointer_type(states.dtype.element_ty))
    return tl.multiple_of(cached, 16) + index * ROW


@jit(do_not_specialize_on_alignment=BASES)
def _attend(
    q: tl.tensor, out: tl.tensor, sums: tl.tensor, norms: tl.tensor, key_base: tl.tensor, value_base: tl.tensor, table: tl.tensor,
    lengths: tl.tensor, inner: tl.tensor, outer: tl.tensor, q_row: tl.tensor, q_head: tl.tensor, out_row: tl.tensor,
    out_head: tl.tensor, table_row: tl.tensor,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_TOKENS: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, SPLITS: tl.constexpr, FEWEST: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr,
    TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Attend in one program with the query heads of one key head as rows of a tile, over one split of one sequence."""
    # Key heads of a token are neighbours in memory and run side by side; empty splits come last.
    key_head, sequence, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    span, share = _share(length, WINDOW, SPLITS, FEWEST, WHOLE, TILE)
    begin = length - span + split * share
    stop = tl.minimum(begin + share, length)
    if (split > 0) & (begin >= stop):
        return

    rows, columns = tl.arange(0, ROWS), tl.arange(0, PADDED)
    head = key_head * GROUP + rows
    row = sequence.to(tl.int64)
    asked = (rows < tl.where(length > 0, GROUP, 0))[:, None] & (columns < WIDTH)[None, :]
    queries = tl.load(q + row * q_row + head[:, None] * q_head + columns[None, :], mask=asked, other=0.0)

    keys, values = _cached(key_base, key_head, q, WIDTH), _cached(value_base, key_head, q, WIDTH)
    blocks = table + row * table_row

    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS, 4], tl.float32)  # for the four threads that share a row: thread i has columns 2i and 2i + 1 of every eight
    first = tl.arange(0, TILE // 4)[None, None, :] == 0
    mixed = tl.zeros([ROWS, PADDED], tl.float32)
    places = tl.arange(0, TILE)
    # Every rounding is the same as flash attention's in training, so that the two agree bit for bit: from the last tile to the first, tiles
    # beginning at multiples of their size; scores scaled and rounded before the maximum is subtracted (the launch forbids the compiler to
    # fuse these); each thread adds its columns in order to its own sum, and only at the end the four sums are added.
    tiles = tl.cdiv(stop, TILE)
    for index in range(0, tiles - begin // TILE):
        token = (tiles - 1 - index) * TILE + places
        inside = (token >= begin) & (token < stop)
        block = tl.load(blocks + token // BLOCK_TOKENS, mask=inside, other=0).to(tl.int64)
        slot = block * BLOCK_TOKENS + token % BLOCK_TOKENS
        offsets = slot[:, None] * (KEY_HEADS * WIDTH) + columns[None, :]
        kept = inside[:, None] & (columns < WIDTH)[None, :]
        k = tl.load(keys + offsets, mask=kept, other=0.0)
        v = tl.load(values + offsets, mask=kept, other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
        if CAPPED:  # outer * tanh(x), where scores = 2 x log2(e); beyond 64 the fraction is 0 in float32
            scores = outer * (1.0 - 2.0 / (tl.exp2(tl.minimum(scores * inner, 64.0)) + 1.0))
            factor = 1.0
        else:
            factor = inner
        scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))  # finite, because some token of every tile is inside
        fade = tl.exp2((highest - higher) * factor)
        weights = tl.exp2(scores * factor - (higher * factor)[:, None])
        columns_of_thread = tl.permute(tl.reshape(weights, [ROWS, TILE // 8, 4, 2]), [0, 2, 1, 3])
        ordered = tl.reshape(columns_of_thread, [ROWS, 4, TILE // 4])
        before = tl.broadcast_to(total[:, :, None], [ROWS, 4, TILE // 4])
        kept_share = tl.broadcast_to(fade[:, None, None], [ROWS, 4, TILE // 4])
        total = tl.sum(tl.where(first, tl.fma(before, kept_share, ordered), ordered), 2)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * fade[:, None], input_precision="ieee")
        highest = higher

    sum_of_weights = tl.sum(tl.sum(tl.reshape(total, [ROWS, 2, 2]), 1), 1)  # threads 0 and 2, 1 and 3, then both
    sum_of_weights = tl.where(sum_of_weights > 0, sum_of_weights, 1.0)
    result = mixed * tl.div_rn(tl.full([ROWS], 1.0, tl.float32), sum_of_weights)[:, None]
    # A sequence of one split is finished here; the parts of others go to `_combine`.
    finished = tl.where(span <= share, GROUP, 0)
    target = out + row * out_row + head[:, None] * out_head + columns[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=(rows < finished)[:, None] & (columns < WIDTH)[None, :])
    if SPLITS > 1:
        part = (row * (KEY_HEADS * GROUP) + head) * SPLITS + split
        left = (rows >= finished) & (rows < GROUP)
        tl.store(sums + part[:, None] * WIDTH + columns[None, :], result, mask=left[:, None] & (columns < WIDTH)[None, :])
        tl.store(norms + part, highest * (1.0 if CAPPED else inner) + tl.log2(sum_of_weights), mask=left)


@jit()
def _combine(
    out: tl.tensor, sums: tl.tensor, norms: tl.tensor, lengths: tl.tensor, out_row: tl.tensor, out_head: tl.tensor,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, FEWEST: tl.constexpr, WHOLE: tl.constexpr,
    TILE: tl.constexpr, PADDED: tl.constexpr, PADDED_SPLITS: tl.constexpr,
) -> None:  # fmt: skip
    """Combine the splits of one head of one sequence in one program, weighted by their sums of exponentials. Single splits are in place
    already."""
    head, sequence = tl.program_id(0), tl.program_id(1)
    span, share = _share(tl.load(lengths + sequence), WINDOW, SPLITS, FEWEST, WHOLE, TILE)
    if span <= share:
        return
    splits, columns = tl.arange(0, PADDED_SPLITS), tl.arange(0, PADDED)
    row = sequence.to(tl.int64)
    live = splits < tl.cdiv(span, share)
    part = (row * HEADS + head) * SPLITS + splits
    norm = tl.load(norms + part, mask=live, other=float("-inf"))
    results = tl.load(sums + part[:, None] * WIDTH + columns[None, :], mask=live[:, None] & (columns < WIDTH)[None, :], other=0.0)
    weights = tl.exp2(norm - tl.max(norm, 0))
    mixed = tl.sum(results * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + row * out_row + head * out_head + columns, mixed.to(out.dtype.element_ty), mask=columns < WIDTH)


@jit(do_not_specialize_on_alignment=BASES)
def _write(
    k: tl.tensor, v: tl.tensor, key_base: tl.tensor, value_base: tl.tensor, slots: tl.tensor, k_row: tl.tensor, k_head: tl.tensor,
    v_row: tl.tensor, v_head: tl.tensor,
    KEY_HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED_HEADS: tl.constexpr, PADDED: tl.constexpr,
) -> None:  # fmt: skip
    """Write one token's keys and values in one program."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    heads, columns = tl.arange(0, PADDED_HEADS)[:, None], tl.arange(0, PADDED)[None, :]
    kept = (heads < tl.where(slot >= 0, KEY_HEADS, 0)) & (columns < WIDTH)
    # Everything is loaded before anything is stored: the compiler cannot move a load across a store that might touch the same address.
    key = tl.load(k + token * k_row + heads * k_head + columns, mask=kept, other=0.0)
    value = tl.load(v + token * v_row + heads * v_head + columns, mask=kept, other=0.0)
    keys, values = _cached(key_base, slot, k, KEY_HEADS * WIDTH), _cached(value_base, slot, v, KEY_HEADS * WIDTH)
    tl.store(keys + heads * WIDTH + columns, key, mask=kept)
    tl.store(values + heads * WIDTH + columns, value, mask=kept)


@jit(do_not_specialize_on_alignment=BASES)
def _rotate_and_write(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, cos: tl.tensor, sin: tl.tensor, out: tl.tensor, key_base: tl.tensor,
    value_base: tl.tensor, slots: tl.tensor, q_row: tl.tensor, q_head: tl.tensor, k_row: tl.tensor, k_head: tl.tensor, v_row: tl.tensor,
    v_head: tl.tensor, cos_row: tl.tensor, sin_row: tl.tensor, out_row: tl.tensor, out_head: tl.tensor,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, PADDED_QUERIES: tl.constexpr,
    PADDED_HEADS: tl.constexpr, PADDED: tl.constexpr, PADDED_HALF: tl.constexpr,
) -> None:  # fmt: skip
    """Rotate and write all heads of one token in one program."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    query_heads, heads = tl.arange(0, PADDED_QUERIES)[:, None], tl.arange(0, PADDED_HEADS)[:, None]
    columns, half = tl.arange(0, PADDED)[None, :], tl.arange(0, PADDED_HALF)[None, :]
    kept_queries = (query_heads < HEADS) & (half < HALF)
    written = tl.where(slot >= 0, KEY_HEADS, 0)
    kept_keys = (heads < written) & (half < HALF)
    kept_values = (heads < written) & (columns < WIDTH)
    cos += token * cos_row
    sin += token * sin_row

    # Everything is loaded before anything is stored, as in `_write`.
    query_first, query_second = turned(q + token * q_row + query_heads * q_head + half, kept_queries, cos, sin, half, HALF, False)
    key_first, key_second = turned(k + token * k_row + heads * k_head + half, kept_keys, cos, sin, half, HALF, False)
    value = tl.load(v + token * v_row + heads * v_head + columns, mask=kept_values, other=0.0)
    keys, values = _cached(key_base, slot, k, KEY_HEADS * WIDTH), _cached(value_base, slot, v, KEY_HEADS * WIDTH)
    rotated = out + token * out_row + query_heads * out_head + half
    tl.store(rotated, query_first, mask=kept_queries)
    tl.store(rotated + HALF, query_second, mask=kept_queries)
    tl.store(keys + heads * WIDTH + half, key_first, mask=kept_keys)
    tl.store(keys + heads * WIDTH + half + HALF, key_second, mask=kept_keys)
    tl.store(values + heads * WIDTH + columns, value, mask=kept_values)


def paged_attention(
    q: torch.Tensor,  # [B, heads, width], the last dimension dense
    key_cache: torch.Tensor,  # [slots, key heads, width]
    value_cache: torch.Tensor,
    key_base: torch.Tensor,  # int64 [1]: the address of key_cache
    value_base: torch.Tensor,
    table: torch.Tensor,  # int32 or int64 [B, most blocks]: no sequence is longer
    lengths: torch.Tensor,  # int32 [B]
    *,
    scale: float,
    block_tokens: int = 16,
    window: int | None = None,  # tokens that the newest one sees, itself included
    softcap: float | None = None,
    launch: AttentionLaunch | None = None,  # `launch_for` chooses
) -> torch.Tensor:
    batch, heads, width = q.shape
    key_heads = key_cache.shape[1]
    check_caches(q, key_cache, value_cache, key_base, value_base)
    assert heads % key_heads == 0 and q.stride(2) == 1, "whole groups of dense heads"
    assert table.shape[0] == lengths.shape[0] == batch and table.stride(1) == 1 and lengths.is_contiguous()
    assert window is None or window > 0
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if batch == 0:
        return out

    longest = table.shape[1] * block_tokens
    reach = longest if window is None else min(longest, window)
    launch = launch or launch_for(batch, key_heads, width, q.element_size(), max(1, reach), processors_of(q.device))
    parts, numbers = batch * heads * launch.splits, partial(torch.empty, dtype=torch.float32, device=q.device)
    # The splits' results, and the logarithms of their sums of exponentials: `footprint.workspace_numbers`.
    sums, norms = (numbers(parts * width), numbers(parts)) if launch.splits > 1 else (None, None)
    scale = float(np.float32(scale))  # the type in which flash attention takes it
    inner, outer = (scale * LOG2_E, 0.0) if softcap is None else (2.0 * scale * LOG2_E / softcap, softcap * LOG2_E)
    _attend[(key_heads, batch, launch.splits)](
        q, out, sums, norms, key_base, value_base, table, lengths, inner, outer,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), table.stride(0),
        KEY_HEADS=key_heads, GROUP=heads // key_heads, WIDTH=width, BLOCK_TOKENS=block_tokens, WINDOW=window or 0,
        CAPPED=softcap is not None, SPLITS=launch.splits, FEWEST=launch.fewest, WHOLE=launch.whole, ROWS=padded(heads // key_heads),
        PADDED=padded(width), TILE=launch.tile, enable_fp_fusion=False, num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    if launch.splits > 1:
        padded_splits = power_of_two(launch.splits)
        _combine[(heads, batch)](
            out, sums, norms, lengths, out.stride(0), out.stride(1), HEADS=heads, WIDTH=width, WINDOW=window or 0, SPLITS=launch.splits,
            FEWEST=launch.fewest, WHOLE=launch.whole, TILE=launch.tile, PADDED=padded(width), PADDED_SPLITS=padded_splits,
            num_warps=max(1, min(8, padded_splits * padded(width) // 1024)),
        )  # fmt: skip
    return out


def write_kv(
    k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, key_base: torch.Tensor,
    value_base: torch.Tensor, slots: torch.Tensor,
) -> None:  # fmt: skip
    """Write keys and values [T, key heads, width], the last dimension dense, to `slots` int64 [T], no slot twice; -1: not written."""
    tokens, key_heads, width = k.shape
    check_caches(k, key_cache, value_cache, key_base, value_base)
    check_new(k, v, key_cache, slots)
    if tokens:
        _write[(tokens,)](
            k, v, key_base, value_base, slots, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            KEY_HEADS=key_heads, WIDTH=width, PADDED_HEADS=power_of_two(key_heads), PADDED=power_of_two(width),
            num_warps=warps_for(key_heads * width),
        )  # fmt: skip


def rotate_and_write(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, key_cache: torch.Tensor,
    value_cache: torch.Tensor, key_base: torch.Tensor, value_base: torch.Tensor, slots: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Return rotated queries [T, heads, width], and write rotated keys and plain values to the cache. Bit for bit the results of
    transformers in bfloat16.

    q, k and v may be views of one tensor, the last dimension dense. cos and sin [T, width] are in transformers' form: both halves equal,
    attention scaling included. `slots` are as in `write_kv`; the query of slot -1 is rotated too.

    One launch instead of three (Liger's rotary and two index_copy_) or about ten (transformers' own): in decoding batches each kernel runs
    for less than a microsecond, so launches are the cost.
    """
    tokens, heads, width = q.shape
    check_caches(q, key_cache, value_cache, key_base, value_base)
    check_new(k, v, key_cache, slots)
    assert len(k) == tokens and cos.shape == sin.shape == (tokens, width) and width % 2 == 0
    assert q.stride(2) == cos.stride(1) == sin.stride(1) == 1
    assert cos.dtype == sin.dtype and cos.dtype in (q.dtype, torch.float32)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if tokens:
        key_heads = k.shape[1]
        _rotate_and_write[(tokens,)](
            q, k, v, cos, sin, out, key_base, value_base, slots, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
            v.stride(0), v.stride(1), cos.stride(0), sin.stride(0), out.stride(0), out.stride(1),
            HEADS=heads, KEY_HEADS=key_heads, WIDTH=width, HALF=width // 2, PADDED_QUERIES=power_of_two(heads),
            PADDED_HEADS=power_of_two(key_heads), PADDED=power_of_two(width), PADDED_HALF=power_of_two(width // 2),
            num_warps=warps_for(heads * width), enable_fp_fusion=False,
        )  # fmt: skip
    return out


def check_caches(
    q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, key_base: torch.Tensor, value_base: torch.Tensor
) -> None:
    assert runs_triton(q), "without Triton, decoding attends in model/attention.py"
    for states, base in ((key_cache, key_base), (value_cache, value_base)):
        assert states.is_contiguous() and states.dtype == q.dtype and states.shape == key_cache.shape and states.shape[2] == q.shape[2]
        assert base.dtype == torch.int64 and base.shape == (1,) and base.device == q.device
        assert states.data_ptr() % 16 == 0, "kernels read 16 bytes at a time"
        assert q.is_cuda or int(base) == states.data_ptr(), "the base does not point at the cache"  # on CUDA this would wait


def check_new(k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, slots: torch.Tensor) -> None:
    assert k.shape == v.shape and k.dtype == v.dtype == key_cache.dtype and k.shape[1:] == key_cache.shape[1:]
    assert k.stride(2) == v.stride(2) == 1 and slots.shape == (len(k),) and slots.is_contiguous()


@cache
def processors_of(device: torch.device) -> int:
    usable = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_properties(device).multi_processor_count if usable else PROCESSORS


def warps_for(numbers: int) -> int:
    """Return one to eight warps, so that each thread moves about eight numbers of two bytes."""
    return max(1, min(8, power_of_two(numbers) // 256))
