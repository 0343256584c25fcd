"""Drawing tokens from logits with their log-probs, and recording each drawn token in its slot.

Enters: logits [rows, vocabulary] (bfloat16, float16 or float32), the 64-bit seed of each sample and its position in the response. Leaves: a
token int64 and its log-prob float32 for each draw (`sample`); updated states, lengths and recorded tokens (`finish`).

Guaranteed:
- the log-prob is that of the full softmax at the temperature, in float32, whatever top-k and top-p cut away;
- the noise is a function of (seed, position, vocabulary entry) alone: a token does not depend on what else is in the batch. Random words
  are the same on every device; logarithms and sums differ in the last bits, so a token differs only where two candidates tie within those;
- kernels have fixed shapes and wait for nothing: they can be captured;
- NaN among the logits gives a NaN log-prob and a token inside the vocabulary.

How a token is drawn: Gumbel-max in two levels. The vocabulary is cut into blocks of `BLOCK` entries; argmax(log mass + Gumbel) over the
blocks, then argmax(logit + Gumbel) inside the winner. That is exactly the softmax, since the largest of a block's perturbed logits is
itself Gumbel-distributed around the block's log mass. It needs noise for the blocks and one block's entries only (1,173 numbers for a
vocabulary of 151,936), so the cost is one pass over the logits with one exponential per entry; hashes and logarithms for every entry would
take three times as long.

top-k, then top-p among the rest, keep a prefix of the entries sorted by logit (equal ones by index). The prefix is never searched for:
`CANDIDATES` tokens are drawn from the full softmax, and a second pass counts the entries and the mass before each. The first candidate in
the prefix is the token, with exactly the probability that the restricted softmax gives it. Where none is (the probability of that is the
share that is cut, to the power of CANDIDATES), more are drawn from the entries before the best rejected one, which ends fast and always.

Reads of the logits: plain and greedy read all of them once and one block twice. With top-k or top-p all but those few rows read them at
most twice, and CANDIDATES blocks again; blocks whose largest logit lies below all candidates are skipped. Only top-k and top-p together
also need the mass of the k likeliest entries; it is searched in the blocks that can hold them (about k blocks, a few times).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from fulltilt.footprint import CANDIDATES
from fulltilt.footprint import SAMPLING_BLOCK as BLOCK
from fulltilt.kernels.dispatch import jit, runs_triton, tl, triton

ROUNDS = 64  # 6 bits of the noise's counter
ENTRY_BITS = 25  # vocabularies up to 33 million; bit 25 separates noise of entries from noise of blocks
WAYS = 16  # thresholds tried at a time in the search for the k-th largest logit

EMPTY, RUNNING, STOPPED, FULL = -1, 0, 1, 2  # states of a slot: unused, decoding, ended by an end token, ended by its length

CHUNK_NUMBERS = 1 << 22  # logits that the reference handles at a time


def sample(
    logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, temperature: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor = 0, top_p: float | torch.Tensor = 1.0, *, rows: torch.Tensor | None = None, scale: float = 1.0,
    cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Draw tokens int64 [S], with their log-probs float32 [S].

    `seeds` int64 [S] (the bits of a uint64) and `positions` int32 or int64 [S] (tokens drawn so far) determine the noise. `rows` int64 [S]
    is the row of the logits that each draw reads, if several draws read one row. Temperature, top-k and top-p are numbers or, if kernels
    run, float32, int32 and float32 [S], which a captured graph reads at each run; temperature 0 is greedy (its log-prob is at temperature
    1), top-k 0 and top-p 1 cut nothing. `scale` and `cap` are the model's `LogitShape`: tokens are drawn from cap * tanh(logits * scale /
    cap).
    """
    draws, vocabulary, device = len(seeds), logits.shape[1], logits.device
    assert logits.dim() == 2 and logits.stride(1) == 1 and 0 < vocabulary <= 1 << ENTRY_BITS
    assert seeds.dtype == torch.int64 and positions.shape == seeds.shape and len(logits if rows is None else rows) == draws
    if not runs_triton(logits):
        assert not any(isinstance(number, torch.Tensor) for number in (temperature, top_k, top_p))
        return sample_reference(logits, seeds, positions, temperature, top_k, top_p, rows=rows, scale=scale, cap=cap)  # type: ignore[arg-type]
    assert draws < 1 << 16  # the second side of a launch grid
    by_k = isinstance(top_k, torch.Tensor) or 0 < top_k < vocabulary
    by_p = isinstance(top_p, torch.Tensor) or top_p < 1.0
    assert all(number.is_contiguous() for number in (seeds, positions, rows, temperature, top_k, top_p) if isinstance(number, torch.Tensor))
    numbers, blocks = partial(torch.empty, dtype=torch.float32, device=device), -(-vocabulary // BLOCK)
    tokens, logprobs = numbers(draws, dtype=torch.int64), numbers(draws)
    if draws == 0:
        return tokens, logprobs
    maxima, masses = numbers(draws, blocks), numbers(draws, blocks)  # largest scaled logit; log of the sum of exp(scaled logit)
    group, warps = _tile(draws, blocks)
    padded = triton.next_power_of_2(blocks)
    shape = (rows, _each(temperature, seeds, torch.float32), logits.stride(0), vocabulary, blocks, float(scale), float(cap or 1.0))
    fixed = dict(HAS_ROWS=rows is not None, CAPPED=cap is not None, BLOCK=BLOCK)
    _blocks_kernel[(triton.cdiv(blocks, group), draws)](logits, *shape, maxima, masses, GROUP=group, num_warps=warps, **fixed)
    drawn = (logits, *shape, seeds, positions, maxima, masses)
    if not (by_k or by_p):
        _draw_kernel[(draws,)](*drawn, tokens, logprobs, None, CANDIDATES=1, PADDED=padded, num_warps=4, **fixed)
        return tokens, logprobs
    candidates, values = numbers(draws, CANDIDATES, dtype=torch.int64), numbers(draws, CANDIDATES)  # candidates and their scaled logits
    normalisers, kept = numbers(draws), numbers(draws)  # normalisers, and the probability of the k likeliest entries
    _draw_kernel[(draws,)](*drawn, candidates, values, normalisers, CANDIDATES=CANDIDATES, PADDED=padded, num_warps=4, **fixed)
    k, p = _each(top_k, seeds, torch.int32), _each(top_p, seeds, torch.float32)
    if by_k and by_p:
        _kept_kernel[(draws,)](logits, *shape, k, maxima, normalisers, kept, WAYS=WAYS, PADDED=padded, num_warps=4, **fixed)
    # Probability of the entries before a candidate, and the number of strictly larger ones, by tile.
    before_mass, before_count = numbers(draws, blocks, CANDIDATES), numbers(draws, blocks, CANDIDATES, dtype=torch.int32)
    group = max(1, group // 2)  # this kernel holds more numbers for each entry
    tiles = triton.cdiv(blocks, group)
    _before_kernel[(tiles, draws)](
        logits, *shape, maxima, normalisers, candidates, values, before_mass, before_count,
        CANDIDATES=CANDIDATES, GROUP=group, num_warps=warps, **fixed,
    )  # fmt: skip
    _settle_kernel[(draws,)](
        logits, *shape, seeds, positions, k, p, maxima, normalisers, candidates, values, before_mass, before_count, kept,
        tokens, logprobs, tiles, BY_K=by_k, BY_P=by_p, CANDIDATES=CANDIDATES, ROUNDS=ROUNDS, GROUP=4, PADDED=padded,
        PADDED_TILES=triton.next_power_of_2(tiles), num_warps=4, **fixed,
    )  # fmt: skip
    return tokens, logprobs


def _each(number: float | torch.Tensor, draws: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a number for each draw."""
    return number if isinstance(number, torch.Tensor) else torch.full_like(draws, number, dtype=dtype)


def _tile(draws: int, blocks: int) -> tuple[int, int]:
    """Return the blocks of logits per program, and its warps: enough programs to fill every multiprocessor, then as large as possible."""
    if draws * blocks < 1 << 10:
        return 1, 4
    return (4, 4) if draws * blocks < 1 << 14 else (8, 8)


# -- the noise ------------------------------------------------------------------------------------------------------------------------


def noise_keys(seeds: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the key of each sample's noise at its position, as two 32-bit words in int32: SplitMix64 on the bits of int64 numbers, so that
    neighbouring positions or seeds have nothing in common."""
    value = seeds + (positions.long() + 1) * _signed(0x9E3779B97F4A7C15, 64)
    value = (value ^ ((value >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9, 64)
    value = (value ^ ((value >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB, 64)
    value = value ^ ((value >> 31) & ((1 << 33) - 1))
    return value.int(), (value >> 32).int()  # conversions wrap


def noise_words(low: torch.Tensor, high: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """Return 32 random bits, as int32, from a key and a counter, all int32. Products wrap."""
    return _mix32(_mix32(counter ^ low) ^ high)


def gumbel(low: torch.Tensor, high: torch.Tensor, entries: torch.Tensor, turn: int, *, of_blocks: bool) -> torch.Tensor:
    """Return Gumbel noise float32 of vocabulary entries or of blocks, for one turn of drawing.

    A word w gives v = (w + 1/2) / 2^32, and -log(-log(1 - v)). Large noise, which decides draws, comes from small v, where float32 keeps
    all 32 bits: it reaches 22.9, so an entry with a probability of 2^-32 in its block is still drawn that often. Small noise comes from v
    near 1 and decides nothing: v stops at the float below 1, noise at -2.8.
    """
    counter = entries + _signed((turn << ENTRY_BITS + 1) + (int(of_blocks) << ENTRY_BITS), 32)
    word = noise_words(low, high, counter.int()).long() & 0xFFFFFFFF
    uniform = ((word.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix32(value: torch.Tensor) -> torch.Tensor:
    value = (value ^ ((value >> 16) & 0xFFFF)) * 0x7FEB352D
    value = (value ^ ((value >> 15) & 0x1FFFF)) * _signed(0x846CA68B, 32)
    return value ^ ((value >> 16) & 0xFFFF)


def _signed(number: int, bits: int) -> int:
    """Return the signed number with the same bits."""
    return (number + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


# -- the reference --------------------------------------------------------------------------------------------------------------------


def sample_reference(
    logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, *,
    rows: torch.Tensor | None = None, scale: float = 1.0, cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Run `sample` in plain torch, on any device. CPU tensors always use it."""
    tokens = torch.empty(len(seeds), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(len(seeds), dtype=torch.float32, device=logits.device)
    size = max(1, CHUNK_NUMBERS // logits.shape[1])
    for part in (slice(start, start + size) for start in range(0, len(seeds), size)):
        scaled = (logits[part] if rows is None else logits[rows[part]]).float()
        scaled = scaled if scale == 1.0 else scaled * scale
        scaled = scaled if cap is None else torch.tanh(scaled / cap) * cap
        scaled = scaled if temperature in (0, 1) else scaled * (1.0 / temperature)
        masses = _block_masses(scaled)
        low, high = noise_keys(seeds[part], positions[part])
        if temperature == 0:
            chosen = scaled.argmax(-1)
        elif 0 < top_k < logits.shape[1] or top_p < 1.0:
            chosen = _restricted(scaled, masses, low, high, top_k, top_p)
        else:
            chosen = _pick(scaled, masses, low, high, turn=0)
        tokens[part] = chosen
        logprobs[part] = scaled.gather(1, chosen[:, None])[:, 0] - masses.logsumexp(-1)
    return tokens, logprobs


def _block_masses(scaled: torch.Tensor) -> torch.Tensor:
    """Return the log of the sum of exp of each block: [S, blocks]."""
    whole = scaled.shape[1] // BLOCK * BLOCK
    masses = scaled[:, :whole].unflatten(1, (-1, BLOCK)).logsumexp(-1) if whole else scaled[:, :0]
    return masses if whole == scaled.shape[1] else torch.cat([masses, scaled[:, whole:].logsumexp(-1, keepdim=True)], dim=1)


def _pick(scaled: torch.Tensor, masses: torch.Tensor, low: torch.Tensor, high: torch.Tensor, turn: int) -> torch.Tensor:
    """Draw one entry from exp(scaled) for each row."""
    low, high = low[:, None], high[:, None]
    blocks = torch.arange(masses.shape[1], device=scaled.device)
    among = masses + gumbel(low, high, blocks, turn, of_blocks=True) if len(blocks) > 1 else masses  # one block needs no noise
    block = among.argmax(-1, keepdim=True)
    entries = block * BLOCK + torch.arange(min(BLOCK, scaled.shape[1]), device=scaled.device)
    outside = entries >= scaled.shape[1]
    values = scaled.gather(1, entries.clamp(max=scaled.shape[1] - 1)).masked_fill_(outside, -torch.inf)
    place = (values + gumbel(low, high, entries, turn, of_blocks=False)).argmax(-1, keepdim=True)
    return entries.gather(1, place)[:, 0].clamp(max=scaled.shape[1] - 1)


def _restricted(
    scaled: torch.Tensor, masses: torch.Tensor, low: torch.Tensor, high: torch.Tensor, top_k: int, top_p: float
) -> torch.Tensor:
    """Return the first candidate that top-k and top-p keep. Candidates are drawn until every row has one."""
    vocabulary = scaled.shape[1]
    by_k, by_p = 0 < top_k < vocabulary, top_p < 1.0
    entries = torch.arange(vocabulary, device=scaled.device)
    kept = torch.ones(len(scaled), device=scaled.device)
    if by_k and by_p:
        # Entries that equal the k-th likeliest are kept as well.
        smallest = scaled.topk(top_k, dim=-1).values[:, -1:]
        kept = (scaled - masses.logsumexp(-1, keepdim=True)).exp_().masked_fill_(scaled < smallest, 0.0).sum(-1)
    tokens = scaled.argmax(-1)  # the token of a row that can keep nothing
    waiting = torch.arange(len(scaled), device=scaled.device)
    pivot = torch.full_like(waiting, vocabulary)  # the best entry that was rejected
    pivot_value = torch.full_like(kept, -torch.inf)

    def before(value: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
        return (scaled > value[:, None]) | ((scaled == value[:, None]) & (entries < entry[:, None]))

    for turn in range(ROUNDS):
        if turn < CANDIDATES:
            drawn = _pick(scaled, masses, low, high, turn)
        else:
            left = scaled.masked_fill(~before(pivot_value, pivot), -torch.inf)
            drawn = _pick(left, _block_masses(left), low, high, turn)
        value = scaled.gather(1, drawn[:, None])[:, 0]
        keep = torch.ones_like(drawn, dtype=torch.bool)
        if by_k:
            keep &= (scaled > value[:, None]).sum(-1) < top_k
        if by_p:
            mass = (scaled - masses.logsumexp(-1, keepdim=True)).exp_().masked_fill_(~before(value, drawn), 0.0).sum(-1)
            keep &= ~(mass >= top_p * kept)  # also if the mass is NaN
        tokens[waiting[keep]] = drawn[keep]
        better = (value > pivot_value) | ((value == pivot_value) & (drawn < pivot))
        pivot, pivot_value = torch.where(better, drawn, pivot), torch.where(better, value, pivot_value)
        if keep.all():
            break
        rows = (waiting, scaled, masses, low, high, kept, pivot, pivot_value)
        waiting, scaled, masses, low, high, kept, pivot, pivot_value = (numbers[~keep] for numbers in rows)
    return tokens


# -- the kernels ----------------------------------------------------------------------------------------------------------------------


@jit
def _mix(value: tl.tensor) -> tl.tensor:
    value = (value ^ (value >> 16)) * 0x7FEB352D
    value = (value ^ (value >> 15)) * 0x846CA68B
    return value ^ (value >> 16)


@jit
def _key(seeds: tl.tensor, positions: tl.tensor, draw: tl.tensor) -> tl.tensor:
    seed = tl.load(seeds + draw).to(tl.uint64, bitcast=True)
    place = tl.load(positions + draw).to(tl.int64).to(tl.uint64, bitcast=True)
    value = seed + (place + 1) * 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    value = value ^ (value >> 31)
    return value.to(tl.uint32), (value >> 32).to(tl.uint32)


@jit
def _gumbel(low: tl.tensor, high: tl.tensor, entries: tl.tensor, turn: tl.tensor, OF_BLOCKS: tl.constexpr) -> tl.tensor:
    counter = entries.to(tl.uint32) + turn * 67108864 + OF_BLOCKS * 33554432
    word = _mix(_mix(counter ^ low) ^ high)
    uniform = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    # -log(1 - v): near 1 a logarithm has few digits, so 2 atanh(v / (2 - v)) as its series.
    ratio = uniform / (2.0 - uniform)
    square = ratio * ratio
    series = 2.0 * ratio * (1.0 + square * (0.3333333333 + square * (0.2 + square * (0.1428571429 + square * 0.1111111111))))
    return -tl.log(tl.where(uniform < 0.25, series, -tl.log(1.0 - uniform)))


@jit
def _sharpness(temperature: tl.tensor, draw: tl.tensor) -> tl.tensor:
    """Return the factor on a draw's logits, and whether the draw is greedy."""
    heat = tl.load(temperature + draw)
    return tl.where(heat > 0.0, tl.div_rn(1.0, tl.where(heat > 0.0, heat, 1.0)), 1.0), heat <= 0.0


@jit
def _row(logits: tl.tensor, rows: tl.tensor, stride: tl.tensor, draw: tl.tensor, HAS_ROWS: tl.constexpr) -> tl.tensor:
    """Return the address of a draw's logits."""
    source = tl.load(rows + draw) if HAS_ROWS else draw
    return logits + source.to(tl.int64) * stride


@jit
def _read(
    row: tl.tensor, entries: tl.tensor, mask: tl.tensor, sharpness: tl.tensor, scale: tl.tensor, cap: tl.tensor, CAPPED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the logits after scale, cap and temperature; -inf outside the mask. The bits are the same in every kernel that compares
    them."""
    values = tl.load(row + entries, mask=mask, other=0.0).to(tl.float32) * scale
    if CAPPED:
        values = cap * (1.0 - 2.0 / (tl.exp(values * (2.0 / cap)) + 1.0))
    return tl.where(mask, values * sharpness, float("-inf"))


@jit
def _blocks_kernel(
    logits: tl.tensor, rows: tl.tensor, temperature: tl.tensor, stride: tl.tensor, vocabulary: tl.tensor, blocks: tl.tensor,
    scale: tl.tensor, cap: tl.tensor, maxima: tl.tensor, masses: tl.tensor, HAS_ROWS: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the maximum and log mass of every block, in the first pass."""
    draw = tl.program_id(1)
    sharpness, _greedy = _sharpness(temperature, draw)
    block = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    entries = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = _read(_row(logits, rows, stride, draw, HAS_ROWS), entries, entries < vocabulary, sharpness, scale, cap, CAPPED)
    top = tl.max(values, 1)
    finite = tl.where(top == float("-inf"), 0.0, top)
    mass = finite + tl.log(tl.sum(tl.exp(values - finite[:, None]), 1))
    place = draw.to(tl.int64) * blocks + block
    tl.store(maxima + place, top, mask=block < blocks)
    tl.store(masses + place, mass, mask=block < blocks)


@jit
def _inside(
    row: tl.tensor, block: tl.tensor, vocabulary: tl.tensor, sharpness: tl.tensor, scale: tl.tensor, cap: tl.tensor, low: tl.tensor,
    high: tl.tensor, turn: tl.tensor, greedy: tl.tensor, above: tl.tensor, above_entry: tl.tensor, CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Draw inside a block, among entries before (above, above_entry). Returns the entry and its scaled logit."""
    place = tl.arange(0, BLOCK)
    entries = block * BLOCK + place
    values = _read(row, entries, entries < vocabulary, sharpness, scale, cap, CAPPED)
    before = (values > above) | ((values == above) & (entries < above_entry))
    score = tl.where(before, tl.where(greedy, values, values + _gumbel(low, high, entries, turn, 0)), float("-inf"))
    winner = tl.argmax(score, 0)
    return tl.minimum(block * BLOCK + winner, vocabulary - 1), tl.sum(tl.where(place == winner, values, 0.0), 0)


@jit
def _draw_kernel(
    logits: tl.tensor, rows: tl.tensor, temperature: tl.tensor, stride: tl.tensor, vocabulary: tl.tensor, blocks: tl.tensor,
    scale: tl.tensor, cap: tl.tensor, seeds: tl.tensor, positions: tl.tensor, maxima: tl.tensor, masses: tl.tensor, tokens: tl.tensor,
    numbers: tl.tensor, normalisers: tl.tensor, HAS_ROWS: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr, PADDED: tl.constexpr,
) -> None:  # fmt: skip
    """Draw from the full softmax. `numbers` gets the log-prob of one draw, or the scaled logits of several, with the normaliser stored
    separately."""
    draw = tl.program_id(0)
    sharpness, greedy = _sharpness(temperature, draw)
    row = _row(logits, rows, stride, draw, HAS_ROWS)
    block = tl.arange(0, PADDED)
    place = draw.to(tl.int64) * blocks + block
    top = tl.load(maxima + place, mask=block < blocks, other=float("-inf"))
    mass = tl.load(masses + place, mask=block < blocks, other=float("-inf"))
    peak = tl.max(top, 0)
    finite = tl.where(peak == float("-inf"), 0.0, peak)
    normaliser = finite + tl.log(tl.sum(tl.exp(mass - finite), 0))
    low, high = _key(seeds, positions, draw)
    for turn in tl.static_range(CANDIDATES):
        score = tl.where(greedy, top, mass + _gumbel(low, high, block, turn, 1))
        chosen = tl.minimum(tl.argmax(score, 0), blocks - 1)
        # All entries are before (-inf, vocabulary).
        token, value = _inside(
            row, chosen, vocabulary, sharpness, scale, cap, low, high, turn, greedy, float("-inf"), vocabulary, CAPPED, BLOCK
        )
        tl.store(tokens + draw * CANDIDATES + turn, token.to(tl.int64))
        if CANDIDATES == 1:
            tl.store(numbers + draw, value - normaliser)
        else:
            tl.store(numbers + draw * CANDIDATES + turn, value)
    if CANDIDATES > 1:
        tl.store(normalisers + draw, normaliser)


@jit
def _before_kernel(
    logits: tl.tensor, rows: tl.tensor, temperature: tl.tensor, stride: tl.tensor, vocabulary: tl.tensor, blocks: tl.tensor,
    scale: tl.tensor, cap: tl.tensor, maxima: tl.tensor, normalisers: tl.tensor, candidates: tl.tensor, candidate_values: tl.tensor,
    before_mass: tl.tensor, before_count: tl.tensor, HAS_ROWS: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the mass and number of entries before each candidate in the second pass, per tile of GROUP blocks. Blocks below all
    candidates are skipped."""
    draw = tl.program_id(1)
    sharpness, _greedy = _sharpness(temperature, draw)
    block = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    top = tl.load(maxima + draw.to(tl.int64) * blocks + block, mask=block < blocks, other=float("-inf"))
    lowest = tl.min(tl.load(candidate_values + draw * CANDIDATES + tl.arange(0, CANDIDATES)), 0)
    out = (draw.to(tl.int64) * blocks + tl.program_id(0)) * CANDIDATES
    if tl.max(top, 0) >= lowest:
        normaliser = tl.load(normalisers + draw)
        entries = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        mask = (entries < vocabulary) & (top >= lowest)[:, None]
        values = _read(_row(logits, rows, stride, draw, HAS_ROWS), entries, mask, sharpness, scale, cap, CAPPED)
        probability = tl.exp(values - normaliser)
        for index in tl.static_range(CANDIDATES):
            token = tl.load(candidates + draw * CANDIDATES + index).to(tl.int32)  # the type of the entries
            value = tl.load(candidate_values + draw * CANDIDATES + index)
            larger = values > value
            before = larger | ((values == value) & (entries < token))
            tl.store(before_mass + out + index, tl.sum(tl.sum(tl.where(before, probability, 0.0), 1), 0))
            tl.store(before_count + out + index, tl.sum(tl.sum(larger.to(tl.int32), 1), 0))
    else:
        tl.store(before_mass + out + tl.arange(0, CANDIDATES), tl.zeros([CANDIDATES], tl.float32))
        tl.store(before_count + out + tl.arange(0, CANDIDATES), tl.zeros([CANDIDATES], tl.int32))


@jit
def _keeps(
    count: tl.tensor, mass: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, kept: tl.tensor, BY_K: tl.constexpr, BY_P: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return whether an entry with `count` larger ones, and `mass` before it, is in the prefix."""
    keep = count >= 0
    if BY_K:
        keep = keep & ((top_k <= 0.0) | (count < top_k))
    if BY_P:
        keep = keep & ((top_p >= 1.0) | ((mass >= top_p * kept) == 0))  # NaN keeps the entry, so that it shows in the log-prob
    return keep


@jit
def _settle_kernel(
    logits: tl.tensor, rows: tl.tensor, temperature: tl.tensor, stride: tl.tensor, vocabulary: tl.tensor, blocks: tl.tensor,
    scale: tl.tensor, cap: tl.tensor, seeds: tl.tensor, positions: tl.tensor, top_ks: tl.tensor, top_ps: tl.tensor, maxima: tl.tensor,
    normalisers: tl.tensor, candidates: tl.tensor, candidate_values: tl.tensor, before_mass: tl.tensor, before_count: tl.tensor,
    kept_masses: tl.tensor, tokens: tl.tensor, logprobs: tl.tensor, tiles: tl.tensor, BY_K: tl.constexpr, BY_P: tl.constexpr,
    HAS_ROWS: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr, CANDIDATES: tl.constexpr, ROUNDS: tl.constexpr,
    GROUP: tl.constexpr, PADDED: tl.constexpr, PADDED_TILES: tl.constexpr,
) -> None:  # fmt: skip
    """Choose the first candidate in the prefix; if there is none, more are drawn from the entries before the best rejected one."""
    draw = tl.program_id(0)
    top_k = tl.load(top_ks + draw).to(tl.float32)
    top_p = tl.load(top_ps + draw)
    normaliser = tl.load(normalisers + draw)
    base = draw.to(tl.int64) * blocks
    kept = 1.0
    if BY_K and BY_P:
        kept = tl.load(kept_masses + draw)
    found = tl.zeros([], tl.int32)
    token = tl.zeros([], tl.int32)
    value = tl.full([], float("-inf"), tl.float32)
    pivot = tl.zeros([], tl.int32) + vocabulary
    pivot_value = tl.full([], float("-inf"), tl.float32)
    tile = tl.arange(0, PADDED_TILES)
    for index in tl.static_range(CANDIDATES):
        place = (base + tile) * CANDIDATES + index
        mass = tl.sum(tl.load(before_mass + place, mask=tile < tiles, other=0.0), 0)
        count = tl.sum(tl.load(before_count + place, mask=tile < tiles, other=0), 0)
        drawn = tl.load(candidates + draw * CANDIDATES + index).to(tl.int32)
        drawn_value = tl.load(candidate_values + draw * CANDIDATES + index)
        keep = _keeps(count, mass, top_k, top_p, kept, BY_K, BY_P)
        take = keep & (found == 0)
        token = tl.where(take, drawn, token)
        value = tl.where(take, drawn_value, value)
        found = tl.where(keep, 1, found)
        better = (drawn_value > pivot_value) | ((drawn_value == pivot_value) & (drawn < pivot))
        pivot = tl.where(better, drawn, pivot)
        pivot_value = tl.where(better, drawn_value, pivot_value)

    sharpness, _greedy = _sharpness(temperature, draw)
    row = _row(logits, rows, stride, draw, HAS_ROWS)
    low, high = _key(seeds, positions, draw)
    turn = tl.zeros([], tl.int32) + CANDIDATES
    while (found == 0) & (turn < ROUNDS):
        # One pass both judges the pivot and, if that fails, chooses a block for the next draw before it.
        mass = tl.zeros([], tl.float32)
        count = tl.zeros([], tl.int32)
        best = tl.full([], float("-inf"), tl.float32)
        chosen = tl.zeros([], tl.int32)
        for first in range(0, blocks, GROUP):
            several = first + tl.arange(0, GROUP)
            their_top = tl.load(maxima + base + several, mask=several < blocks, other=float("-inf"))
            if tl.max(their_top, 0) >= pivot_value:
                entries = several[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
                mask = (entries < vocabulary) & (their_top >= pivot_value)[:, None]
                values = _read(row, entries, mask, sharpness, scale, cap, CAPPED)
                larger = values > pivot_value
                before = larger | ((values == pivot_value) & (entries < pivot))
                inside = tl.sum(tl.where(before, tl.exp(values - normaliser), 0.0), 1)
                mass += tl.sum(inside, 0)
                count += tl.sum(tl.sum(larger.to(tl.int32), 1), 0)
                score = tl.log(inside) + _gumbel(low, high, several, turn.to(tl.uint32), 1)
                highest = tl.max(score, 0)
                chosen = tl.where(highest > best, first + tl.argmax(score, 0), chosen)
                best = tl.maximum(best, highest)
        keep = _keeps(count, mass, top_k, top_p, kept, BY_K, BY_P)
        token = tl.where(keep, pivot, token)
        value = tl.where(keep, pivot_value, value)
        found = tl.where(keep, 1, found)
        pivot, pivot_value = _inside(
            row, chosen, vocabulary, sharpness, scale, cap, low, high, turn.to(tl.uint32), False, pivot_value, pivot, CAPPED, BLOCK
        )
        turn += 1
    if found == 0:  # only if nothing may be kept: the likeliest entry is chosen
        block = tl.arange(0, PADDED)
        top = tl.load(maxima + base + block, mask=block < blocks, other=float("-inf"))
        token, value = _inside(
            row, tl.argmax(top, 0), vocabulary, sharpness, scale, cap, low, high, 0, True, float("-inf"), vocabulary, CAPPED, BLOCK
        )
    tl.store(tokens + draw, token.to(tl.int64))
    tl.store(logprobs + draw, value - normaliser)


@jit
def _order(bits: tl.tensor) -> tl.tensor:
    """Map the bits of a float to an integer of the same order, and back."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@jit
def _kept_kernel(
    logits: tl.tensor, rows: tl.tensor, temperature: tl.tensor, stride: tl.tensor, vocabulary: tl.tensor, blocks: tl.tensor,
    scale: tl.tensor, cap: tl.tensor, top_ks: tl.tensor, maxima: tl.tensor, normalisers: tl.tensor, kept_masses: tl.tensor,
    HAS_ROWS: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr, PADDED: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the probability of the k likeliest entries and those that equal the k-th, by search for the k-th largest logit."""
    draw = tl.program_id(0)
    top_k = tl.load(top_ks + draw).to(tl.float32)
    base = draw.to(tl.int64) * blocks
    mass = tl.full([], 1.0, tl.float32)
    if (top_k > 0.0) & (top_k < vocabulary):
        sharpness, _greedy = _sharpness(temperature, draw)
        row = _row(logits, rows, stride, draw, HAS_ROWS)
        normaliser = tl.load(normalisers + draw)
        block = tl.arange(0, PADDED)
        top = tl.load(maxima + base + block, mask=block < blocks, other=float("-inf")) + 0.0
        # At least k entries are >= at(low), fewer are >= at(high). The k-th largest of the maxima is a first `low`: k blocks reach it.
        low = tl.full([], -2139095041, tl.int64)  # -inf
        high = _order(tl.max(top, 0).to(tl.int32, bitcast=True)).to(tl.int64) + 1
        if top_k <= blocks:
            above = high
            while above - low > 1:
                middle = (low + above) >> 1
                enough = tl.sum((top >= _order(middle.to(tl.int32)).to(tl.float32, bitcast=True)).to(tl.int32), 0) >= top_k
                low = tl.where(enough, middle, low)
                above = tl.where(enough, above, middle)
        exact = tl.zeros([], tl.int32)
        while (exact == 0) & (high - low > 1):
            step = (high - low + WAYS - 1) // WAYS
            way = tl.arange(0, WAYS)
            keys = tl.minimum(low + way * step, high)
            thresholds = _order(keys.to(tl.int32)).to(tl.float32, bitcast=True)
            lowest = tl.min(thresholds, 0)
            counts = tl.zeros([WAYS], tl.int32)
            for index in range(0, blocks):
                if tl.load(maxima + base + index) >= lowest:
                    entries = index * BLOCK + tl.arange(0, BLOCK)
                    values = _read(row, entries, entries < vocabulary, sharpness, scale, cap, CAPPED)
                    counts += tl.sum((values[None, :] >= thresholds[:, None]).to(tl.int32), 1)
            low = tl.max(tl.where((counts >= top_k) & (keys < high), keys, low), 0)
            exact = tl.max((counts == top_k).to(tl.int32), 0)
            high = tl.minimum(low + step, high)
            # With exactly k entries at or above a threshold the set is known; the largest such threshold is `low`, as counts only fall.
        threshold = _order(low.to(tl.int32)).to(tl.float32, bitcast=True)
        mass = tl.zeros([], tl.float32)
        for index in range(0, blocks):
            if tl.load(maxima + base + index) >= threshold:
                entries = index * BLOCK + tl.arange(0, BLOCK)
                values = _read(row, entries, entries < vocabulary, sharpness, scale, cap, CAPPED)
                mass += tl.sum(tl.where(values >= threshold, tl.exp(values - normaliser), 0.0), 0)
    tl.store(kept_masses + draw, mass)


# -- after a token is drawn ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class DecodeProgress:
    """State of every slot, on the device. A captured graph holds the addresses; the host reads and fills them between graphs.

    `tokens` and `logprobs` are rings: token number n of a response is in column n % capacity, so the host must read a column before it is
    written again.
    """

    states: torch.Tensor  # int32 [slots]: EMPTY, RUNNING, STOPPED or FULL
    lengths: torch.Tensor  # int32 [slots]: tokens drawn, which is the position of the next token's noise
    limits: torch.Tensor  # int32 [slots]: tokens that may be drawn
    positions: torch.Tensor  # int64 [slots]: position of `inputs` in prompt + response
    inputs: torch.Tensor  # int64 [slots]: the token that runs next
    tokens: torch.Tensor  # int64 [slots, capacity]
    logprobs: torch.Tensor  # float32 [slots, capacity]

    @staticmethod
    def make(slots: int, capacity: int, device: torch.device | str) -> DecodeProgress:
        zeros = partial(torch.zeros, device=device)
        return DecodeProgress(
            states=torch.full((slots,), EMPTY, dtype=torch.int32, device=device),
            lengths=zeros(slots, dtype=torch.int32),
            limits=zeros(slots, dtype=torch.int32),
            positions=zeros(slots, dtype=torch.int64),
            inputs=zeros(slots, dtype=torch.int64),
            tokens=zeros(slots, capacity, dtype=torch.int64),
            logprobs=zeros(slots, capacity, dtype=torch.float32),
        )


def finish(tokens: torch.Tensor, logprobs: torch.Tensor, end_tokens: torch.Tensor, progress: DecodeProgress, slots: torch.Tensor) -> None:
    """Record the drawn token of each row in its slot and update the slot's state. Slots that are not RUNNING do not change.

    `tokens` int64 [S] and `logprobs` float32 [S] are from `sample`; row i belongs to `slots[i]` (int64 [S], each at most once; negative: no
    slot). `end_tokens`: int64 [slots, E], padded with -1. An end token is recorded too, and stops its slot (STOPPED) even if it is the last
    token that fits.
    """
    if not runs_triton(tokens):
        return finish_reference(tokens, logprobs, end_tokens, progress, slots)
    assert tokens.dtype == end_tokens.dtype == torch.int64 and logprobs.dtype == torch.float32
    assert end_tokens.is_contiguous() and progress.tokens.is_contiguous() and progress.logprobs.is_contiguous()
    if len(tokens) == 0:
        return None
    rows = 128
    _finish_kernel[(triton.cdiv(len(tokens), rows),)](
        tokens, logprobs, end_tokens, slots, progress.states, progress.lengths, progress.limits, progress.positions, progress.inputs,
        progress.tokens, progress.logprobs, len(tokens), len(progress.states), progress.tokens.shape[1],
        end_tokens.shape[1], ROWS=rows, STOPPED=STOPPED, FULL=FULL, RUNNING=RUNNING, num_warps=4,
    )  # fmt: skip
    return None


def finish_reference(
    tokens: torch.Tensor, logprobs: torch.Tensor, end_tokens: torch.Tensor, progress: DecodeProgress, slots: torch.Tensor
) -> None:
    """Run `finish` in plain torch."""
    run = (slots >= 0) & (progress.states[slots.clamp(min=0)] == RUNNING)
    slot, token, logprob = slots[run], tokens[run], logprobs[run]
    lengths = progress.lengths[slot]
    column = lengths.long() % progress.tokens.shape[1]
    progress.tokens[slot, column] = token
    progress.logprobs[slot, column] = logprob
    progress.inputs[slot] = token
    progress.lengths[slot] = lengths + 1
    progress.positions[slot] += 1
    stopped = (end_tokens[slot] == token[:, None]).any(-1)
    full = lengths + 1 >= progress.limits[slot]
    progress.states[slot] = torch.where(stopped, STOPPED, torch.where(full, FULL, RUNNING)).int()


@jit
def _finish_kernel(
    drawn: tl.tensor, drawn_logprobs: tl.tensor, end_tokens: tl.tensor, slots: tl.tensor, states: tl.tensor, lengths: tl.tensor,
    limits: tl.tensor, positions: tl.tensor, inputs: tl.tensor, tokens: tl.tensor, logprobs: tl.tensor, count: tl.tensor,
    slot_count: tl.tensor, capacity: tl.tensor, ends: tl.tensor, ROWS: tl.constexpr, STOPPED: tl.constexpr,
    FULL: tl.constexpr, RUNNING: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = row < count
    slot = tl.load(slots + row, mask=here, other=-1)
    here = here & (slot >= 0) & (slot < slot_count)
    run = here & (tl.load(states + slot, mask=here, other=-1) == RUNNING)
    token = tl.load(drawn + row, mask=run, other=0)
    length = tl.load(lengths + slot, mask=run, other=0)
    limit = tl.load(limits + slot, mask=run, other=0)
    position = tl.load(positions + slot, mask=run, other=0)
    stopped = tl.zeros([ROWS], tl.int32)
    for end in range(0, ends):
        stopped = stopped | (tl.load(end_tokens + slot * ends + end, mask=run, other=-1) == token).to(tl.int32)
    place = slot * capacity + length % capacity
    tl.store(tokens + place, token, mask=run)
    tl.store(logprobs + place, tl.load(drawn_logprobs + row, mask=run, other=0.0), mask=run)
    tl.store(inputs + slot, token, mask=run)
    tl.store(lengths + slot, length + 1, mask=run)
    tl.store(positions + slot, position + 1, mask=run)
    tl.store(states + slot, tl.where(stopped != 0, STOPPED, tl.where(length + 1 >= limit, FULL, RUNNING)), mask=run)
