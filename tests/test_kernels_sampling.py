"""Sampling kernels: their noise, their distribution, kernel against reference, and the end of samples.

Kernels run on a GPU when there is one, else in Triton's interpreter; the rest tests the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from variants import sample_cases

from fulltilt.footprint import sampling_bytes
from fulltilt.kernels import dispatch, sampling
from fulltilt.kernels.dispatch import jit, tl
from fulltilt.kernels.sampling import (
    BLOCK,
    CANDIDATES,
    EMPTY,
    FULL,
    RUNNING,
    STOPPED,
    DecodeProgress,
    _gumbel,
    _key,
    finish,
    finish_reference,
    gumbel,
    noise_keys,
    noise_words,
    sample,
    sample_reference,
)  # fmt: skip
from fulltilt.model.heads import LogitShape

DEVICE = "cuda" if torch.cuda.is_available() and not dispatch.INTERPRETED else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of log(0) in the interpreter


def random_logits(rows: int, vocabulary: int, spread: float = 2.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def random_seeds(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (rows,), generator=torch.Generator().manual_seed(seed))


def deviations(counts: torch.Tensor, probability: torch.Tensor) -> float:
    """How many standard deviations chi-square is above what chance gives."""
    expected = probability.double() * counts.sum()
    assert expected.min() > 20 and counts.shape == expected.shape
    degrees = expected.numel() - 1
    chi = float(((counts - expected) ** 2 / expected).sum())
    return ((chi / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))  # Wilson-Hilferty


def restrict(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """What top-k and top-p mean, by sorting; -inf where cut."""
    if top_k and top_k < logits.shape[1]:
        logits = logits.masked_fill(logits < logits.topk(top_k, dim=-1).values[:, -1:], -torch.inf)
    if top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        share = (ordered.softmax(-1).double() * 2**40).long()
        ordered = ordered.masked_fill(share.cumsum(-1) - share >= int(top_p * 2**40), -torch.inf)
        logits = torch.empty_like(logits).scatter_(1, order, ordered)
    return logits


# -- the noise ------------------------------------------------------------------------------------------------------------------------


def test_keys_are_splitmix64_and_words_lowbias32() -> None:
    def mix32(value: int) -> int:
        value = ((value ^ value >> 16) * 0x7FEB352D) % 2**32
        value = ((value ^ value >> 15) * 0x846CA68B) % 2**32
        return value ^ value >> 16

    seeds, positions = [0, 1, 2, 2**31, 2**63, 2**64 - 1, 0x123456789ABCDEF0], [0, 1, 7, 2**31, 5, 2**20, 3]
    low, high = noise_keys(torch.tensor([sampling._signed(seed, 64) for seed in seeds]), torch.tensor(positions))
    for index, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        value = (seed + 0x9E3779B97F4A7C15 * (position + 1)) % 2**64
        value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) % 2**64
        value = ((value ^ value >> 27) * 0x94D049BB133111EB) % 2**64
        value ^= value >> 31
        assert (int(low[index]) % 2**32, int(high[index]) % 2**32) == (value % 2**32, value >> 32)
        counters = torch.tensor([0, 1, 1023, 151935, -5, -(2**31)], dtype=torch.int32)
        words = [mix32(mix32(int(counter) % 2**32 ^ value % 2**32) ^ value >> 32) for counter in counters]
        assert [int(word) % 2**32 for word in noise_words(low[index], high[index], counters)] == words


def test_bits_are_even_and_neighbours_have_nothing_in_common() -> None:
    """Over entries, positions and seeds, for the poorest seeds there are: each bit, and each bit of what neighbours differ in."""
    few, entries = torch.arange(32), torch.arange(192, dtype=torch.int32)
    low, high = noise_keys(few[:, None].expand(32, 32), few.expand(32, 32))
    words = noise_words(low[:, :, None], high[:, :, None], entries)  # [seed, position, entry]
    bits = torch.arange(32)
    pairs = [words[1:] ^ words[:-1], words[:, 1:] ^ words[:, :-1], words[:, :, 1:] ^ words[:, :, :-1], words[:, :, 64:] ^ words[:, :, :-64]]
    diagonal = words[1:, 1:] ^ words[:-1, :-1]
    across = words[1:, :, 1:] ^ words[:-1, :, :-1]
    for numbers in [words, *pairs, diagonal, across]:
        ones = ((numbers.reshape(-1, 1) >> bits) & 1).sum(0).double()
        assert float(((ones - numbers.numel() / 2) / math.sqrt(numbers.numel() / 4)).abs().max()) < 5
    assert words.numel() - len(words.unique()) < 20  # chance gives n^2 / 2^33, about 5


def test_gumbel_is_gumbel_to_its_ends() -> None:
    """Each word's noise against float64; the mean, variance and tail of many."""
    words = torch.tensor([0, 1, 2, 255, 2**24, 2**30 - 1, 2**30, 2**31 - 1, -(2**31), -(2**24), -2, -1], dtype=torch.int32)
    original = sampling.noise_words
    sampling.noise_words = lambda low, high, counter: words
    try:
        noise = gumbel(words, words, words, 0, of_blocks=False)
    finally:
        sampling.noise_words = original
    uniform = ((words.long() % 2**32).double() + 0.5) / 2**32
    truth = -torch.log(-torch.log1p(-uniform.clamp(max=1 - 2.0**-24)))
    assert torch.isfinite(noise).all() and 22.8 < float(noise[0]) < 22.9 and float(noise[-1]) > -3
    assert float((noise - truth)[:-2].abs().max()) < 2e-6
    low, high = noise_keys(torch.arange(500)[:, None], torch.zeros(500, 1))
    many = gumbel(low, high, torch.arange(2000), 3, of_blocks=True).double()
    assert abs(float(many.mean()) - 0.5772157) < 5 * 1.2825 / 1000 and abs(float(many.var()) - math.pi**2 / 6) < 5 * 3.5 / 1000
    assert abs(float((many > 10).sum()) - 1e6 * -math.expm1(-math.exp(-10))) < 5 * math.sqrt(45)


def test_noise_differs_between_turns_levels_and_entries() -> None:
    low, high = noise_keys(torch.tensor([[5]]), torch.tensor([[9]]))
    sets = [gumbel(low, high, torch.arange(300), turn, of_blocks=level) for turn in (0, 1, 31, 32, 63) for level in (False, True)]
    together = torch.cat(sets, dim=1)
    assert len(together.unique()) == together.numel()


# -- the distribution -----------------------------------------------------------------------------------------------------------------

SMALL = torch.tensor([[0.0, 1.0, -1.0, 2.0, 0.5, 0.5, -2.0]])


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_draws_follow_the_softmax_and_neighbours_are_independent(vary: str) -> None:
    count = 60_000
    seeds, positions = torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
    (seeds if vary == "seed" else positions).copy_(torch.arange(count))
    tokens, _ = sample_reference(SMALL.expand(count, -1), seeds, positions, 2.0)
    probability = (SMALL[0] / 2.0).softmax(-1)
    assert deviations(tokens.bincount(minlength=7), probability) < 5
    for apart in (1, 2, 16, 64):
        pairs = (tokens[apart:] * 7 + tokens[:-apart]).bincount(minlength=49)
        assert deviations(pairs, (probability[:, None] * probability).flatten()) < 5, apart


def test_draws_follow_the_softmax_across_blocks() -> None:
    """Entries that matter in three blocks, at their edges, one block with nothing in it."""
    count = 5_000
    logits = torch.full((1, 3 * BLOCK + 100), -torch.inf)
    where = torch.tensor([0, 1, BLOCK - 1, BLOCK, BLOCK + 7, 3 * BLOCK, 3 * BLOCK + 99])
    logits[0, where] = SMALL[0]
    tokens, logprobs = sample_reference(logits, torch.arange(count), torch.full((count,), 3), rows=torch.zeros(count, dtype=torch.int64))
    assert torch.isin(tokens, where).all()
    probability = SMALL[0].softmax(-1)
    assert deviations(tokens.bincount(minlength=logits.shape[1])[where], probability) < 5
    torch.testing.assert_close(logprobs, probability.log()[torch.searchsorted(where, tokens)], rtol=0, atol=1e-6)


def test_draws_follow_the_softmax_in_blocks_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many draws, so that a wrong weight of a block by a twentieth would show."""
    monkeypatch.setattr(sampling, "BLOCK", 3)
    count = 200_000
    logits = torch.tensor([[2.0, 1.5, 1.8, 0.0, -0.5, 0.2, 1.0, 0.7, -1.0, -0.8, -1.0]])
    tokens, _ = sample_reference(logits.expand(count, -1), torch.arange(count), torch.full((count,), 3))
    assert deviations(tokens.bincount(minlength=11), logits[0].softmax(-1)) < 5


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.75), (1, 1.0), (0, 0.2), (4, 0.6), (4, 0.9), (6, 0.97)])
def test_restricted_draws_follow_the_restricted_softmax(top_k: int, top_p: float) -> None:
    """With a tie at the fourth place: top-k 4 keeps both, top-p the first."""
    count = 40_000
    tokens, logprobs = sample_reference(SMALL.expand(count, -1), torch.arange(count), torch.zeros(count), 1.0, top_k, top_p)
    probability = restrict(SMALL, top_k, top_p)[0].softmax(-1)
    kept = probability > 0
    assert kept[tokens].all() and kept.sum() < 7
    counts = tokens.bincount(minlength=7)[kept]
    assert (counts[0] == count) if kept.sum() == 1 else (deviations(counts, probability[kept]) < 5)
    torch.testing.assert_close(logprobs, SMALL[0].log_softmax(-1)[tokens], rtol=0, atol=1e-6)  # of the full softmax


@settings(max_examples=60, deadline=None)
@given(
    vocabulary=st.integers(1, 60), levels=st.integers(1, 12), top_k=st.integers(0, 70), top_p=st.floats(0.01, 1.0), seed=st.integers(0, 999)
)
def test_what_is_kept_is_what_sorting_keeps(vocabulary: int, levels: int, top_k: int, top_p: float, seed: int) -> None:
    """Many ties. What is drawn is kept, and with 400 draws whatever is likely enough is drawn."""
    logits = torch.randint(0, levels, (1, vocabulary), generator=torch.Generator().manual_seed(seed)) / 3.0
    tokens, _ = sample_reference(logits.expand(400, -1), random_seeds(400, seed), torch.zeros(400), 1.0, top_k, top_p)
    allowed = restrict(logits, top_k, top_p)[0].softmax(-1)
    edge = restrict(logits, top_k, min(1.0, top_p + 1e-6))[0].softmax(-1)  # where sums end within rounding of p, either is right
    assert (edge[tokens] > 0).all()
    likely = (allowed > 0.06).nonzero()[:, 0]
    assert torch.isin(likely, tokens).all()


# -- log-probs, greedy, shapes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_are_of_the_full_softmax_at_the_temperature(dtype: torch.dtype) -> None:
    logits = random_logits(40, 2500, 4.0).to(dtype)
    heat = torch.tensor([0.0, 0.3, 1.0, 1.7]).repeat(10)
    alone = [sample_reference(logits[i : i + 1], random_seeds(40)[i : i + 1], torch.tensor([i]), float(heat[i])) for i in range(40)]
    tokens, logprobs = (torch.cat(numbers) for numbers in zip(*alone, strict=True))
    truth = (logits.double() / torch.where(heat > 0, heat, 1.0)[:, None]).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), truth, rtol=0, atol=2e-5)
    assert torch.equal(tokens[::4], logits[::4].argmax(-1))
    for number in heat.unique().tolist():
        together = sample_reference(logits, random_seeds(40), torch.arange(40), number)
        assert tokens[heat == number].tolist() == together[0][heat == number].tolist()
        torch.testing.assert_close(logprobs[heat == number], together[1][heat == number], rtol=0, atol=2e-6)


def test_a_draw_does_not_depend_on_the_batch_nor_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, seeds, positions = random_logits(9, 1500), random_seeds(30), torch.arange(30)
    rows = torch.randint(0, 9, (30,), generator=torch.Generator().manual_seed(1))
    for options in ({}, {"top_p": 0.5}, {"top_k": 5, "top_p": 0.9}):
        together = sample_reference(logits, seeds, positions, rows=rows, **options)
        copied = sample_reference(logits[rows], seeds, positions, **options)
        monkeypatch.setattr(sampling, "CHUNK_NUMBERS", 4000)
        chunked = sample_reference(logits, seeds, positions, rows=rows, **options)
        monkeypatch.undo()
        for other in (copied, chunked):
            assert torch.equal(together[0], other[0])
            torch.testing.assert_close(together[1], other[1], rtol=0, atol=2e-6)


def test_ties_of_the_greedy_go_to_the_first() -> None:
    logits = torch.zeros(2, 3000)
    logits[0, [700, 2000, 2999]] = 1.0
    tokens, _ = sample_reference(logits, random_seeds(2), torch.zeros(2), 0.0)
    assert tokens.tolist() == [700, 0]


# -- kernels against reference --------------------------------------------------------------------------------------------------------

HEATS = torch.tensor([1.0, 0.7, 0.0, 2.0])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 1.3},
    "greedy": {"temperature": 0.0},
    "temperatures": {"temperature": HEATS},
    "capped": {"temperature": 0.7, "scale": 2.5, "cap": 4.0},
    "top-k": {"top_k": 5},
    "top-k 1": {"top_k": 1, "temperature": 3.0},
    "top-p": {"top_p": 0.6, "scale": 2.0},
    "small top-p": {"top_p": 0.05},
    "both": {"top_k": 40, "top_p": 0.5, "cap": 6.0},
    "both at one": {"top_k": 1, "top_p": 0.9},
    "large k": {"top_k": 900, "top_p": 0.9, "temperature": 0.5},
    "each its own": {
        "temperature": HEATS,
        "top_k": torch.tensor([30, 0, 7, 10**6], dtype=torch.int32),
        "top_p": torch.tensor([1.0, 0.5, 0.2, 0.9]),
    },
}


def on(device: str, options: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}


def check_kernel(logits: torch.Tensor, options: dict[str, Any], seed: int = 0) -> None:
    """Against the reference, which draws each row by itself where rows have their own numbers."""
    draws = len(options.get("rows", logits))
    seeds, positions = random_seeds(draws, seed), torch.arange(draws, dtype=torch.int32) * 1000
    if any(isinstance(options.get(name), torch.Tensor) for name in ("temperature", "top_k", "top_p")):
        own = [{name: number[row].item() for name, number in options.items()} for row in range(draws)]
        alone = [sample_reference(logits[row, None], seeds[row, None], positions[row, None], **own[row]) for row in range(draws)]
        expected = tuple(torch.cat(numbers) for numbers in zip(*alone, strict=True))
    else:
        expected = sample_reference(logits, seeds, positions, **options)
    given = (logits.to(DEVICE), seeds.to(DEVICE), positions.to(DEVICE))
    tokens, logprobs = sample(*given, **on(DEVICE, options))
    assert tokens.tolist() == expected[0].tolist()
    torch.testing.assert_close(logprobs.cpu(), expected[1], rtol=0, atol=1e-5)


@pytest.mark.kernels
@pytest.mark.parametrize("name", sample_cases(OPTIONS, "plain", "capped", "both", "large k", "each its own"))
def test_kernel_is_the_reference(name: str) -> None:
    """Two blocks and a bit, rows apart in memory; many ties in a block."""
    logits = random_logits(4, 2100)
    logits[:, BLOCK : 2 * BLOCK] = (logits[:, BLOCK : 2 * BLOCK] * 2).round() / 2
    own = any(isinstance(value, torch.Tensor) for value in OPTIONS[name].values())
    check_kernel(logits[: 4 if own else 1, :2085], OPTIONS[name])


@pytest.mark.kernels
@pytest.mark.parametrize("vocabulary", [1, 3, 1024, 1025])
def test_kernel_at_any_vocabulary(vocabulary: int) -> None:
    logits = random_logits(1, vocabulary, seed=vocabulary)
    for options in ({}, {"top_k": 6, "top_p": 0.7}):
        check_kernel(logits, options)


@pytest.mark.kernels
def test_kernel_in_bfloat16_and_with_rows() -> None:
    logits = random_logits(3, 1500).bfloat16()
    rows = torch.tensor([2, 0])
    check_kernel(logits, {"rows": torch.tensor([2, 0, 0])})
    check_kernel(logits, {"rows": rows, "top_k": 20, "top_p": 0.6})


@pytest.mark.kernels
@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=() if shape == (8, 8) else pytest.mark.matrix) for shape in ((1, 4), (4, 4), (8, 8))]
)
def test_kernel_with_any_tile(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_tile", lambda draws, blocks: shape)
    logits = random_logits(1, 5 * BLOCK + 5, 1.0)
    check_kernel(logits, {})
    check_kernel(logits, {"top_p": 0.3})


@pytest.mark.kernels
def test_kernel_on_infinities_and_nan() -> None:
    logits = random_logits(3, 1100)
    logits[0, :1050] = -torch.inf  # a block with nothing in it
    check_kernel(logits[:1], {})
    check_kernel(logits[:1], {"top_k": 3, "top_p": 0.8})
    logits[1, 7], logits[2] = torch.nan, -torch.inf
    given = (logits.to(DEVICE), random_seeds(3).to(DEVICE), torch.arange(3, device=DEVICE))
    for options in ({"temperature": 0.0}, {"top_p": 0.5}):
        tokens, logprobs = sample(*given, **options)
        assert ((tokens >= 0) & (tokens < 1100)).all()
        assert logprobs[0].isfinite() and logprobs[1].isnan() and not logprobs[2].isfinite()


@pytest.mark.kernels
@pytest.mark.skipif(DEVICE != "cpu", reason="what a kernel loads is seen in the interpreter alone")
@pytest.mark.parametrize(
    ("name", "peaked", "fewest", "most"),  # blocks that are read; one of 3 matters where logits are peaked, else all do
    [
        ("plain", False, 3 + 1, 3 + 1),
        ("greedy", False, 3 + 1, 3 + 1),
        ("top-p", False, 3 + CANDIDATES + 1, 3 + CANDIDATES + 3),
        ("top-p", True, 3 + CANDIDATES + 1, 3 + CANDIDATES + 1),
        ("top-k 1", False, 3 + CANDIDATES + 4, 3 + CANDIDATES + 24),  # further candidates are drawn
        ("both at one", True, 3 + CANDIDATES + 2, 3 + CANDIDATES + 4),  # the mass of the likeliest is searched for
    ],
)
@pytest.mark.parametrize("dtype", sample_cases([torch.float32, torch.bfloat16], torch.bfloat16))
def test_logits_are_read_once_or_twice(
    name: str, peaked: bool, fewest: int, most: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every entry that a kernel loads from the logits, counted where the interpreter loads it. Reads of a copy would be missing."""
    from triton.runtime.interpreter import interpreter_builder

    blocks, loaded = 3, 0
    logits = random_logits(1, blocks * BLOCK, 0.1 if peaked else 0.3).to(dtype)
    if peaked:
        logits[:, 100] += 25.0
    begin, end, load = logits.data_ptr(), logits.data_ptr() + logits.nbytes, interpreter_builder.create_masked_load

    def counted(pointers: Any, mask: Any, *rest: Any) -> Any:
        nonlocal loaded
        loaded += int((mask.data & (pointers.data >= begin) & (pointers.data < end)).sum())
        return load(pointers, mask, *rest)

    monkeypatch.setattr(interpreter_builder, "create_masked_load", counted)
    check_kernel(logits, OPTIONS[name])
    assert fewest * BLOCK <= loaded <= most * BLOCK


class Allocated(TorchDispatchMode):
    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.nbytes += made.nbytes if func is torch.ops.aten.empty.memory_format else 0
        return made


@pytest.mark.kernels
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 5), (3, 1024), (2, 3000)])
def test_what_drawing_takes_is_what_the_plan_counts(rows: int, vocabulary: int) -> None:
    given = (random_logits(rows, vocabulary).to(DEVICE), random_seeds(rows).to(DEVICE), torch.arange(rows, device=DEVICE))
    with Allocated() as allocated:
        tokens, logprobs = sample(*given, top_k=3, top_p=0.9)
    assert allocated.nbytes == sampling_bytes(rows, vocabulary) + tokens.nbytes + logprobs.nbytes


@jit
def _noise_kernel(seeds, positions, keys, numbers, WIDTH: tl.constexpr):
    draw = tl.program_id(0)
    low, high = _key(seeds, positions, draw)
    entries = tl.arange(0, WIDTH)
    tl.store(keys + 2 * draw, low.to(tl.int64))
    tl.store(keys + 2 * draw + 1, high.to(tl.int64))
    tl.store(numbers + 2 * draw * WIDTH + entries, _gumbel(low, high, entries, 0, 0))
    tl.store(numbers + (2 * draw + 1) * WIDTH + entries, _gumbel(low, high, entries, 33, 1))


@pytest.mark.kernels
def test_noise_of_the_kernel_is_the_references() -> None:
    width = 4096
    seeds = torch.tensor([0, 1, -1, -(2**63), 2**62 + 12345], device=DEVICE)
    positions = torch.tensor([0, 1, 2, 1 << 20, 7], dtype=torch.int32, device=DEVICE)
    keys = torch.empty(5, 2, dtype=torch.int64, device=DEVICE)
    numbers = torch.empty(5, 2, width, device=DEVICE)
    _noise_kernel[(5,)](seeds, positions, keys, numbers, WIDTH=width)
    low, high = noise_keys(seeds.cpu(), positions.cpu())
    assert keys[:, 0].tolist() == (low.long() % 2**32).tolist() and keys[:, 1].tolist() == (high.long() % 2**32).tolist()
    for index, (turn, level) in enumerate([(0, False), (33, True)]):
        expected = gumbel(low[:, None], high[:, None], torch.arange(width), turn, of_blocks=level)
        torch.testing.assert_close(numbers[:, index].cpu(), expected, rtol=3e-7, atol=1e-6)


def test_the_shape_of_logits_is_the_models() -> None:
    logits, shape = random_logits(4, 300, 10.0), LogitShape(scale=0.5, cap=8.0)
    seeds = random_seeds(4)
    expected = sample_reference(shape.logits(logits), seeds, torch.zeros(4), 0.9)
    tokens, logprobs = sample_reference(logits, seeds, torch.zeros(4), 0.9, scale=shape.scale, cap=shape.cap)
    assert torch.equal(tokens, expected[0]) and torch.equal(logprobs, expected[1])


# -- finish ---------------------------------------------------------------------------------------------------------------------------


def by_hand(tokens: list[int], logprobs: list[float], ends: list[list[int]], progress: dict[str, Any], slots: list[int]) -> None:
    for token, logprob, slot in zip(tokens, logprobs, slots, strict=True):
        if slot < 0 or progress["states"][slot] != RUNNING:
            continue
        column = progress["lengths"][slot] % len(progress["tokens"][slot])
        progress["tokens"][slot][column], progress["logprobs"][slot][column] = token, logprob
        progress["inputs"][slot] = token
        progress["lengths"][slot] += 1
        progress["positions"][slot] += 1
        if token in ends[slot]:
            progress["states"][slot] = STOPPED
        elif progress["lengths"][slot] == progress["limits"][slot]:
            progress["states"][slot] = FULL


@pytest.mark.parametrize("op", [finish_reference, pytest.param(finish, marks=pytest.mark.kernels)])
def test_finish_step_by_step(op: Callable[..., None]) -> None:
    """Seven steps over a ring of four columns: what a plain loop over Python lists does."""
    device = DEVICE if op is finish else "cpu"
    generator = torch.Generator().manual_seed(3)
    slots = 150  # more than one program
    progress = DecodeProgress.make(slots, 4, device)
    progress.states.copy_(torch.randint(0, 4, (slots,), generator=generator).clamp(max=1).sub(1))
    assert (progress.states == EMPTY).any() and (progress.states == RUNNING).any()
    progress.lengths.copy_(torch.randint(0, 3, (slots,), generator=generator))
    progress.limits.copy_(progress.lengths + torch.randint(1, 9, (slots,), generator=generator).to(device))
    progress.positions.copy_(torch.randint(0, 1 << 40, (slots,), generator=generator))
    ends = torch.randint(-1, 12, (slots, 2), generator=generator)
    lists = {name: getattr(progress, name).tolist() for name in progress.__dataclass_fields__}
    for _ in range(7):
        chosen = torch.randperm(slots, generator=generator)[: slots - 2]
        chosen[1] = -1
        tokens = torch.randint(0, 12, (len(chosen),), generator=generator)
        logprobs = -torch.rand(len(chosen), generator=generator)
        op(tokens.to(device), logprobs.to(device), ends.to(device), progress, chosen.to(device))
        by_hand(tokens.tolist(), logprobs.tolist(), ends.tolist(), lists, chosen.tolist())
        for name, expected in lists.items():
            assert getattr(progress, name).tolist() == expected, name
    assert {STOPPED, FULL, RUNNING, EMPTY} >= set(lists["states"]) and STOPPED in lists["states"] and FULL in lists["states"]


def test_no_end_tokens_at_all() -> None:
    progress = DecodeProgress.make(2, 3, DEVICE)
    progress.states.fill_(RUNNING)
    progress.limits.fill_(1)
    drawn = (torch.tensor([5, 6], device=DEVICE), torch.zeros(2, device=DEVICE))
    finish(*drawn, torch.empty(2, 0, dtype=torch.int64, device=DEVICE), progress, torch.arange(2, device=DEVICE))
    assert progress.states.tolist() == [FULL, FULL] and progress.inputs.tolist() == [5, 6]


# -- in a graph ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 50}, {"top_k": 3}])
def test_a_graph_draws_what_single_steps_draw(options: dict[str, Any]) -> None:
    """Thirty replays of one captured step, keys from the lengths on the device, against the reference on CPU; many rows at full width."""
    slots, vocabulary, steps = 48, 151936, 30
    logits = (random_logits(slots, vocabulary, 3.0)).bfloat16()
    seeds, ends, every = random_seeds(slots), torch.tensor([11, 12]).repeat(slots, 1), torch.arange(slots)
    there, here = DecodeProgress.make(slots, steps, "cuda"), DecodeProgress.make(slots, steps, "cpu")
    for progress in (there, here):
        progress.states.fill_(RUNNING)
        progress.limits.copy_(torch.arange(slots) % 40 + 1)
    given = (logits.cuda(), seeds.cuda(), there.lengths)
    device_ends, device_slots = ends.cuda(), every.cuda()
    drawn = sample(*given, **options)
    finish(*drawn, device_ends, DecodeProgress.make(slots, steps, "cuda"), device_slots)  # compiled; nobody runs in these slots
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        finish(*sample(*given, **options), device_ends, there, device_slots)
    for _ in range(steps):
        graph.replay()
    for _ in range(steps):
        finish_reference(*sample_reference(logits, seeds, here.lengths, **options), ends, here, every)
    assert torch.equal(there.lengths.cpu(), here.lengths) and torch.equal(there.states.cpu(), here.states)
    # A near tie may fall either way on another device.
    assert float((there.tokens.cpu() == here.tokens).double().mean()) > 0.995
    same = there.tokens.cpu() == here.tokens
    torch.testing.assert_close(there.logprobs.cpu()[same], here.logprobs[same], rtol=0, atol=1e-4)
