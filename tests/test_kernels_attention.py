"""Paged attention and the writing of the cache, kernels against plain loops.

Without a GPU the kernels run in Triton's interpreter. With one, the same tests run the compiled kernels, and what only CUDA graphs can show
is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb
from variants import sample_cases

from fulltilt.footprint import PROCESSORS, AttentionLaunch, launch_for, workspace_numbers
from fulltilt.kernels import dispatch
from fulltilt.kernels import paged_attention as kernels
from fulltilt.kernels.paged_attention import paged_attention, rotate_and_write, write_kv
from fulltilt.kernels.rotary import rotary_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() and not dispatch.INTERPRETED else "cpu")
BLOCK = 16
# The interpreter multiplies the bits of bfloat16 as integers, and cuts where a GPU rounds: there, float16 shows what rounding does.
SHORT = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16


def base_of(states: torch.Tensor) -> torch.Tensor:
    return torch.tensor([states.data_ptr()], dtype=torch.int64, device=states.device)


def attended(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, *,
    scale: float, block_tokens: int = BLOCK, window: int | None = None, softcap: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """What paged attention is, one sequence at a time, in float32 or better."""
    wide, results = torch.promote_types(q.dtype, torch.float32), []
    for row, length in enumerate(lengths.tolist()):
        place = torch.arange(max(0, length - (window or length)), length, device=q.device)
        slots = table[row].long()[place // block_tokens] * block_tokens + place % block_tokens
        k, v = (states[slots].to(wide).transpose(0, 1).repeat_interleave(q.shape[1] // states.shape[1], 0) for states in (keys, values))
        scores = q[row, :, None].to(wide) @ k.transpose(1, 2) * scale
        scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
        results.append((scores.softmax(-1) @ v)[:, 0])
    return torch.stack(results).to(q.dtype)


@dataclass(frozen=True)
class Case:
    """Sequences scattered over a cache in which everything they do not own is NaN, and block numbers they do not need are wild."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    key_base: torch.Tensor
    value_base: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor

    def run(self, **options: Any) -> torch.Tensor:
        return paged_attention(self.q, self.keys, self.values, self.key_base, self.value_base, self.table, self.lengths, **options)

    def reference(self, **options: Any) -> torch.Tensor:
        return attended(self.q, self.keys, self.values, self.table, self.lengths, **options)


def case(
    lengths: Sequence[int], key_heads: int = 2, group: int = 3, width: int = 64, dtype: torch.dtype = torch.float32,
    table_dtype: torch.dtype = torch.int32, seed: int = 0,
) -> Case:  # fmt: skip
    random = torch.Generator().manual_seed(seed)
    owned = [-(-length // BLOCK) for length in lengths]
    total = sum(owned) + 3
    order = torch.randperm(total, generator=random).tolist()
    table = torch.full((len(lengths), max([*owned, 1]) + 1), 2**30, dtype=table_dtype)
    keys, values = torch.full((2, total * BLOCK, key_heads, width), torch.nan).unbind()
    for row, (length, blocks) in enumerate(zip(lengths, owned, strict=True)):
        mine = torch.tensor([order.pop() for _ in range(blocks)], dtype=torch.int64)
        table[row, :blocks] = mine.to(table_dtype)
        slots = (mine[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:length]
        keys[slots], values[slots] = torch.randn(2, length, key_heads, width, generator=random).unbind()
    q = 2.0 * torch.randn(len(lengths), key_heads * group, width, generator=random)
    keys, values = keys.to(DEVICE, dtype), values.to(DEVICE, dtype)
    counts = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    return Case(q.to(DEVICE, dtype), keys, values, base_of(keys), base_of(values), table.to(DEVICE), counts)


def close(got: torch.Tensor, wanted: torch.Tensor, tolerance: float = 2e-5) -> None:
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


# --- attention


@pytest.mark.kernels
@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 31, 33, 64, 70, 129]), min_size=1, max_size=3),
    key_heads=st.integers(1, 2),
    group=st.sampled_from([1, 3, 6, 7, 18]),
    width=st.sampled_from([8, 64, 80, 96]),
    window=st.sampled_from([None, 1, 16, 23, 500]),
    softcap=st.sampled_from([None, 3.0]),
    launch=st.builds(
        AttentionLaunch, splits=st.sampled_from([1, 2, 3, 8]), fewest=st.sampled_from([16, 32]), tile=st.sampled_from([16, 32])
    ),
    seed=st.integers(0, 99),
)
def test_equals_the_reference(lengths, key_heads, group, width, window, softcap, launch, seed) -> None:
    given_case = case(lengths, key_heads, group, width, seed=seed)
    scoring = {"scale": width**-0.5, "window": window, "softcap": softcap}
    close(given_case.run(launch=launch, **scoring), given_case.reference(**scoring))


@pytest.mark.kernels
@pytest.mark.parametrize("width", sample_cases([64, 80, 96, 128, 256], 80, 128))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (SHORT, 2e-2)])
def test_every_width_and_type_as_it_is_launched_by_itself(width: int, dtype: torch.dtype, tolerance: float) -> None:
    given_case = case([150, 1, 0], key_heads=1, group=7, width=width, dtype=dtype)
    close(given_case.run(scale=width**-0.5), given_case.reference(scale=width**-0.5), tolerance)


def test_the_loop_is_attention() -> None:
    """Against torch's own: everything else is compared with the loop."""
    given_case = case([37, 0, 5], key_heads=2, group=3)
    got = given_case.reference(scale=0.2, window=9)
    for row, length in enumerate(given_case.lengths.tolist()):
        place = torch.arange(max(0, length - 9), length)
        slots = given_case.table[row].long().cpu()[place // BLOCK] * BLOCK + place % BLOCK
        keys, values = (states[slots].transpose(0, 1).repeat_interleave(3, 0) for states in (given_case.keys, given_case.values))
        wanted = torch.nn.functional.scaled_dot_product_attention(given_case.q[row, :, None], keys, values, scale=0.2)[:, 0]
        close(got[row], wanted if length else torch.zeros_like(wanted))


@pytest.mark.kernels
def test_how_it_is_split_changes_rounding_only() -> None:
    given_case = case([150, 40, 0, 17], key_heads=1, group=7)
    whole = given_case.run(scale=0.125, launch=AttentionLaunch(1, 16, 32))
    for splits in (2, 20):
        close(given_case.run(scale=0.125, launch=AttentionLaunch(splits, 16, 16)), whole)


@pytest.mark.kernels
def test_one_dominant_token_in_another_split_is_weighed_right() -> None:
    """Scores that differ by hundreds between splits: weights must be relative to the common maximum."""
    given_case = case([64], key_heads=1, group=2, width=16)
    given_case.keys[given_case.table[0, 3].item() * BLOCK + 5] = given_case.q[0, 0] * 50.0
    got = given_case.run(scale=1.0, launch=AttentionLaunch(4, 16, 16))
    close(got, given_case.reference(scale=1.0))
    close(got[0, :1], given_case.values[given_case.table[0, 3].item() * BLOCK + 5])


@pytest.mark.kernels
@pytest.mark.parametrize("splits", [1, 4])
def test_empty_rows_are_zero_and_read_nothing(splits: int) -> None:
    given_case = case([0, 20, 0])
    given_case.q[0] = given_case.q[2] = torch.nan  # the stale row of a sequence that has ended
    out = given_case.run(scale=0.1, launch=AttentionLaunch(splits, 16, 16))
    assert out[0].eq(0).all() and out[2].eq(0).all() and out[1].isfinite().all() and out[1].ne(0).all()


@pytest.mark.kernels
@pytest.mark.parametrize("table_dtype", [torch.int32, torch.int64])
def test_views(table_dtype: torch.dtype) -> None:
    """Queries inside a fused projection, the table as some rows and columns of a larger one."""
    plain = case([70, 33], key_heads=2, group=3, table_dtype=table_dtype)
    fused = torch.randn(2, 10, 64, device=DEVICE)
    fused[:, :6] = plain.q
    table = torch.full((5, 11), 2**30, dtype=table_dtype, device=DEVICE)
    table[:2, : plain.table.shape[1]] = plain.table
    viewed = replace(plain, q=fused[:, :6], table=table[:2])
    close(viewed.run(scale=0.125, launch=AttentionLaunch(4, 16, 16)), plain.reference(scale=0.125))


@pytest.mark.kernels
def test_kernels_follow_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache has moved since the graph was captured: the tensor of that time is dead, the base holds the new address."""
    moved = case([40, 18])
    wanted = moved.reference(scale=0.125)
    stale = replace(moved, keys=torch.full_like(moved.keys, torch.nan), values=torch.full_like(moved.values, torch.nan))
    monkeypatch.setattr(kernels, "check_caches", lambda *_: None)
    close(stale.run(scale=0.125), wanted)


@pytest.mark.kernels
@pytest.mark.skipif(DEVICE.type == "cuda", reason="the comparison would wait for the device")
def test_a_base_that_points_elsewhere_is_noticed() -> None:
    given_case = case([5])
    with pytest.raises(AssertionError, match="does not point at the cache"):
        replace(given_case, value_base=given_case.key_base).run(scale=1.0)


@pytest.mark.kernels
def test_slots_beyond_two_billion_numbers() -> None:
    """Offsets in 32 bits would wrap around. The pages between are never touched, so they take no memory."""
    slots = (2**31 // (2 * 64) // BLOCK + 2) * BLOCK
    try:
        keys, values = (torch.empty(slots, 2, 64, dtype=torch.float16, device=DEVICE) for _ in range(2))
    except RuntimeError as error:
        pytest.skip(f"no room for a large cache: {error}")
    small = case([16], dtype=torch.float16)
    q, k, v = (small.q, *(states[small.table[0, 0].item() * BLOCK :][:BLOCK] for states in (small.keys, small.values)))
    last = slots // BLOCK - 1
    bases = base_of(keys), base_of(values)
    assert last * BLOCK * 2 * 64 >= 2**31
    write_kv(k, v, keys, values, *bases, torch.arange(last * BLOCK, slots, device=DEVICE))
    assert keys[-BLOCK:].equal(k) and values[-BLOCK:].equal(v)
    table = torch.tensor([[last]], dtype=torch.int32, device=DEVICE)
    close(paged_attention(q, keys, values, *bases, table, small.lengths, scale=0.125), small.reference(scale=0.125), 2e-3)


# --- the layout on the device


@given(batch=st.integers(1, 2000), key_heads=st.integers(1, 32), width=st.integers(1, 256), longest=st.integers(1, 40_000))
def test_launches_are_legal(batch: int, key_heads: int, width: int, longest: int) -> None:
    launch = launch_for(batch, key_heads, width, 2, longest)
    # Flash attention's tiles, 128 tokens where heads are narrow, so that rollout sums in training's order. The smallest part of a sequence
    # (128 tokens) is whole tiles of either size: with larger ones, parts would overlap.
    assert launch.tile == (128 if width <= 64 else 64) and launch.fewest % launch.tile == 0
    assert 1 <= launch.splits <= 64
    assert launch.splits == 1 or (launch.splits - 1) * launch.fewest < longest, "a split that nobody could ever reach"


def test_launches_fill_the_device_and_no_more() -> None:
    assert launch_for(1024, 2, 64, 2, 1536).splits == 1, "a full batch of short sequences needs no second kernel"
    assert launch_for(128, 2, 64, 2, 2000).splits == 1
    assert launch_for(1, 2, 64, 2, 100).splits == 1, "nothing to share"
    for batch in (1, 4, 8, 16, 32, 64):
        assert 128 <= batch * 2 * launch_for(batch, 2, 64, 2, 9000).splits <= 1024
    tail = launch_for(256, 2, 128, 2, 8192)
    assert tail.splits == 4 and tail.fewest == 2048, "one long sequence must not hold up a full batch, and short ones stay whole"


def test_workspace_is_what_a_call_takes() -> None:
    splits = launch_for(8, 2, 64, 2, 4000).splits
    assert splits > 1 and workspace_numbers(8, 14, 2, 64, 2, 4000, PROCESSORS) >= 8 * 14 * splits * 65
    assert workspace_numbers(1024, 14, 2, 64, 2, 1000, PROCESSORS) == 0


# --- writing


def new_tokens(tokens: int, heads: int, key_heads: int, width: int, dtype: torch.dtype, fused: bool) -> tuple[torch.Tensor, ...]:
    states = torch.randn(tokens, heads + 2 * key_heads, width, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    views = states.split((heads, key_heads, key_heads), dim=1)
    return views if fused else tuple(view.contiguous() for view in views)


def caches(slots: int, key_heads: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """With room before and behind, where a stray write hits nobody else's memory."""
    keys, values = (torch.full((16 + slots + 16, key_heads, width), full, dtype=dtype, device=DEVICE) for full in (5.0, 6.0))
    return keys[16:-16], values[16:-16]


def rotated_and_written(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated queries, and caches of `count` slots with the new tokens in their slots."""
    keys, values = caches(count, *k.shape[1:], k.dtype)
    turned_q, turned_k = rotary_reference(q, k, cos, sin)
    keys[slots[slots >= 0]], values[slots[slots >= 0]] = turned_k[slots >= 0].to(k.dtype), v[slots >= 0]
    return turned_q.to(q.dtype), keys, values


def untouched_around(cache: torch.Tensor, full: float) -> bool:
    before, behind = (cache.as_strided((16, *cache.shape[1:]), cache.stride(), place) for place in (0, (16 + len(cache)) * cache.stride(0)))
    return bool(before.eq(full).all() and behind.eq(full).all())


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("key_heads", "width", "fused"), [(2, 64, True), (3, 80, True), (1, 96, False), (4, 8, False)])
def test_writes_go_to_their_slots_and_nowhere_else(key_heads: int, width: int, fused: bool, dtype: torch.dtype) -> None:
    _, k, v = new_tokens(6, 4, key_heads, width, dtype, fused)
    keys, values = caches(20, key_heads, width, dtype)
    slots = torch.tensor([3, -1, 0, 19, -1, 7], device=DEVICE)
    write_kv(k, v, keys, values, base_of(keys), base_of(values), slots)
    for cache, new, before in ((keys, k, 5.0), (values, v, 6.0)):
        assert cache[[3, 0, 19, 7]].equal(new[[0, 2, 3, 5]])
        untouched = [slot for slot in range(20) if slot not in (3, 0, 19, 7)]
        assert cache[untouched].eq(before).all() and untouched_around(cache, before)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, SHORT])
@pytest.mark.parametrize(
    ("heads", "key_heads", "width", "fused"), [(14, 2, 64, True), (3, 3, 80, True), (5, 1, 96, False), (4, 2, 2, True)]
)
def test_rotation_and_writing_in_one(heads: int, key_heads: int, width: int, fused: bool, dtype: torch.dtype) -> None:
    q, k, v = new_tokens(5, heads, key_heads, width, dtype, fused)
    angles = torch.rand(5, width // 2, generator=torch.Generator().manual_seed(2)).repeat(1, 2).to(DEVICE) * 6.0
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    slots = torch.tensor([8, 2, -1, 0, 9], device=DEVICE)
    keys, values = caches(10, key_heads, width, dtype)
    got = rotate_and_write(q, k, v, cos, sin, keys, values, base_of(keys), base_of(values), slots)
    wanted, wanted_keys, wanted_values = rotated_and_written(q, k, v, cos, sin, slots, 10)
    # Short types are rounded where transformers rounds: rollout and training agree in every bit.
    tolerance = 2e-6 if dtype == torch.float32 else 0.0
    close(got, wanted, tolerance)
    close(keys, wanted_keys, tolerance)
    assert values.equal(wanted_values)
    assert untouched_around(keys, 5.0) and untouched_around(values, 6.0)

    theirs, _ = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None])
    close(wanted, theirs[0].transpose(0, 1).contiguous(), 0.0)


@pytest.mark.kernels
def test_cos_in_float32() -> None:
    q, k, v = new_tokens(3, 4, 2, 64, torch.bfloat16, True)
    cos, sin = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(3)).to(DEVICE).unbind()
    keys, values = caches(4, 2, 64, torch.bfloat16)
    slots = torch.tensor([0, 1, 2], device=DEVICE)
    got = rotate_and_write(q, k, v, cos, sin, keys, values, base_of(keys), base_of(values), slots)
    wanted, wanted_keys, _ = rotated_and_written(q, k, v, cos, sin, slots, 4)
    close(got, wanted, 1e-2)
    close(keys, wanted_keys, 1e-2)


@pytest.mark.kernels
def test_no_rows_are_no_work() -> None:
    none = case([3])
    empty = replace(none, q=none.q[:0], table=none.table[:0], lengths=none.lengths[:0])
    assert empty.run(scale=1.0).shape == (0, 6, 64)
    slots = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    k = none.keys[:0]
    write_kv(k, k, none.keys, none.values, none.key_base, none.value_base, slots)
    assert rotate_and_write(
        empty.q, k, k, k[:, 0], k[:, 0], none.keys, none.values, none.key_base, none.value_base, slots
    ).shape == (0, 6, 64)  # fmt: skip


# --- CUDA graphs


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 8])
def test_a_captured_graph_goes_on_after_the_cache_has_moved(splits: int) -> None:
    given_case = case([700, 1, 0, 300], group=7, dtype=torch.bfloat16)
    options = {"scale": 0.125, "launch": AttentionLaunch(splits, 64, 64)}
    given_case.run(**options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = given_case.run(**options)
    moved = replace(given_case, keys=given_case.keys.clone(), values=given_case.values.roll(1, dims=2))
    given_case.keys.fill_(torch.nan)
    given_case.values.fill_(torch.nan)
    given_case.key_base.copy_(base_of(moved.keys))
    given_case.value_base.copy_(base_of(moved.values))
    given_case.lengths.copy_(torch.tensor([400, 0, 0, 299], dtype=torch.int32, device=DEVICE))
    graph.replay()
    close(out, moved.reference(scale=0.125), 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(14, 2, 64), (12, 2, 128), (28, 4, 128)])
@pytest.mark.parametrize("batch", [1, 8, 130])
def test_the_shapes_that_matter(heads: int, key_heads: int, width: int, batch: int) -> None:
    lengths = [100 + (7919 * row) % (4000 if batch < 100 else 900) for row in range(batch)]
    given_case = case(lengths, key_heads, heads // key_heads, width, torch.bfloat16)
    close(given_case.run(scale=width**-0.5), given_case.reference(scale=width**-0.5), 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(14, 2, 64), (12, 2, 128), (28, 4, 128), (8, 8, 64), (16, 4, 96), (8, 2, 256)])
@pytest.mark.parametrize("window", [None, 200])
def test_sequences_that_are_not_split_equal_flash_attention_to_the_bit(heads: int, key_heads: int, width: int, window: int | None) -> None:
    """The last token of a document in training, and the same token decoded over the paged cache."""
    from fulltilt.model.attention import Scoring, flash

    lengths = [1 + (7919 * row) % 1024 for row in range(160)]
    given_case = case(lengths, key_heads, heads // key_heads, width, torch.bfloat16)
    slots = given_case.table.long()[:, :, None] * BLOCK + torch.arange(BLOCK, device=DEVICE)
    flat = torch.cat([places.reshape(-1)[:length] for places, length in zip(slots, lengths, strict=True)])
    bounds = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    last = bounds[1:].long() - 1
    queries = torch.randn(sum(lengths), heads, width, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0)).bfloat16()
    queries[last] = given_case.q
    keys, values = given_case.keys[flat], given_case.values[flat]
    trained = flash(queries, keys, values, bounds, bounds, max(lengths), max(lengths), Scoring(width**-0.5, window))[0][last]
    decoded = given_case.run(scale=width**-0.5, window=window)
    assert decoded.equal(trained), f"{(decoded != trained).float().mean():.1e} of the numbers differ"
