"""Bytes of the head, of decoding and of their kernels, by arithmetic alone: for the code that allocates them and for the plan.

Enters: a model's sizes, numbers of rows, options. Leaves: how many rows are handled at a time, how kernels are laid out, and how many
bytes exist beside inputs and results. Guaranteed: neither torch nor numpy is imported; tests compare with the tensors that are really
allocated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

# ---- the head --------------------------------------------------------------------------------------------------------------------------

Entropy = Literal["gradient", "value", "none"]
CHUNK_NUMBERS = 1 << 26  # logits at a time if torch reads them, in several passes with temporaries of their size
CUDA_BYTES = 960 << 20  # bytes of logits, and of their gradient in the backward pass, at a time if kernels read them
TILE = 128  # chunks are whole tiles of a matrix product, if they are that large


@dataclass(frozen=True)
class HeadOptions:
    """Options for the computation of log-probs and entropy. No option changes their values."""

    fused: bool = True
    """Compute in chunks of rows, forward and backward. False: logits of all rows in float32, with autograd."""
    entropy_chunk: int | None = None
    """Most rows at a time, of the entropy only if not fused. None: by memory."""
    entropy_recompute: bool = True
    """False: keep what the entropy's backward pass needs from the forward pass: the softmax of all rows; fused, as with `recompute`."""
    recompute: bool = True
    """Fused, the backward pass computes the products of a chunk again. False: those of all rows are kept from the forward pass, in float32,
    which saves one matrix product of four."""

    def __post_init__(self) -> None:
        assert self.entropy_chunk is None or self.entropy_chunk > 0

    def keeps(self, entropy: Entropy) -> bool:
        """Return whether the fused head keeps the products of all rows."""
        return not self.recompute or (entropy == "gradient" and not self.entropy_recompute)


@dataclass(frozen=True)
class Rows:
    """Numbers of rows that exist at a time."""

    forward: int  # rows of logits, in the forward pass
    logits: int  # rows of logits, in the backward pass
    gradient: int  # rows of the logits' gradient, which both products of the backward pass read


def rows_at_once(rows: int, vocabulary: int, options: HeadOptions, itemsize: int, device: str, kept: bool) -> Rows:
    """Return how many of `rows` rows the fused head handles at a time. `kept`: logits of all rows are kept."""
    most = options.entropy_chunk or max(1, rows)
    if device != "cuda":
        size = even(rows, min(most, CHUNK_NUMBERS // vocabulary))
        return Rows(size, size, size)
    wide = max(4, itemsize) * vocabulary
    logits = even(rows, min(most, CUDA_BYTES // (3 * wide)))
    gradient = even(rows, min(most, (CUDA_BYTES - logits * wide) // (itemsize * vocabulary)))
    if kept:  # two parts, a quarter of the logits' bytes each in bfloat16: with each the weight's float32 gradient is read and written
        gradient = max(gradient, even(rows, min(most, -(-rows // (2 * TILE)) * TILE)))
    return Rows(even(rows, min(most, CUDA_BYTES // wide)), min(logits, gradient), gradient)


def even(rows: int, most: int) -> int:
    """Return the rows of a chunk: as few chunks as possible, as equal as tiles allow."""
    tile = TILE if most >= TILE else 1
    most = max(1, most // tile * tile)
    chunks = max(1, -(-rows // most))
    return max(1, min(most, -(-rows // (chunks * tile)) * tile))


@dataclass(frozen=True)
class HeadBytes:
    """Bytes of the head's temporaries, without its inputs and their gradients."""

    largest: int  # the largest tensor, forward or backward
    peak: int  # most bytes at one time; if torch reads capped logits, one more tensor of the same size


def head_bytes(
    rows: int, vocabulary: int, width: int, options: HeadOptions = HeadOptions(), *,  # noqa: B008 (frozen)
    itemsize: int = 2, device: str = "cuda", entropy: Entropy = "gradient",
) -> HeadBytes:  # fmt: skip
    """Return the bytes by formula, for a forward and a backward pass over `rows` trained rows."""
    if options.fused:
        found = fused_bytes(rows, vocabulary, options, itemsize, device, entropy)
    else:
        # Tensors in the backward pass of the log-probs: the logits, three on the way to their gradient, and the entropy's.
        whole = max(4, itemsize) * vocabulary * rows
        found = HeadBytes(largest=whole, peak=whole * (5 if entropy == "gradient" else 4))
    if device == "cuda" or itemsize >= 4:
        return found
    widened = 4 * vocabulary * width  # CPUs have no product with a float32 result: the weight is converted first
    return HeadBytes(max(found.largest, widened), found.peak + widened)


def fused_bytes(rows: int, vocabulary: int, options: HeadOptions, itemsize: int, device: str, entropy: Entropy) -> HeadBytes:
    kept = options.keeps(entropy)
    size = rows_at_once(rows, vocabulary, options, itemsize, device, kept)
    wide = max(4, itemsize) * vocabulary
    forward, logits, gradient = (min(rows, given) for given in (size.forward, size.logits, size.gradient))
    of_gradient = itemsize * vocabulary * gradient
    beside = 0 if device == "cuda" else 2 * wide * logits  # the reference holds values and probabilities beside the logits
    largest = max(wide * (gradient if kept else forward), of_gradient)
    if kept:
        return HeadBytes(largest, peak=rows * wide + of_gradient + beside)
    return HeadBytes(largest, peak=max(wide * forward, wide * logits + of_gradient + beside))


# ---- decoding --------------------------------------------------------------------------------------------------------------------------

BURST = 16  # most steps before the host looks at the results
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)  # batch sizes of graphs: rows that only fill up a batch cost as much as others
TABLE_STEP = 64  # the block table grows by this many blocks
GRAPH_BYTES = 8 << 20  # a generous bound on the driver's memory for a captured graph of a few hundred kernels
SAMPLING_BLOCK = 1024  # entries of a block. Changing it changes the sampled tokens
CANDIDATES = 4  # tokens drawn at first with top-k or top-p. Changing it changes the sampled tokens
JUDGES = 2048  # rows of the product that all variants are compared with
FLUSHED = 64 << 20  # bytes written before each run, more than the cache holds: in a model, other weights evict these between uses
PROCESSORS = 132  # multiprocessors of an H100 or H200; other devices report their own number
ENOUGH = 256  # programs that keep 132 processors busy without splitting sequences
WANTED = 768  # programs to aim for if sequences are split to fill the processors
MOST_SPLITS = 64
FEWEST_TOKENS = 128  # per split: below this, starting another program costs more than it saves
WHOLE = 1024  # tokens up to which a sequence is never split, so that it is summed as in training
LONG = 2048  # the same limit in a full batch, where only the longest sequences are split: the batch ends when its longest program does


def sizes_up_to(rows: int) -> list[int]:
    """Return the batch sizes that graphs are captured for if at most `rows` samples decode at once."""
    return [size for size in (*SIZES, *range(192, 1024, 64), *range(1024, rows, 256)) if size < rows] + [rows]


def progress_bytes(rows: int) -> int:
    """Return the bytes of `DecodeProgress` (kernels/sampling.py): three int32 and two int64 a sample, an int64 and a float32 for each step
    of a burst."""
    return rows * (3 * 4 + 2 * 8 + BURST * (8 + 4))


def sampling_bytes(rows: int, vocabulary: int) -> int:
    """Return the bytes between the passes of `sample` (kernels/sampling.py) with top-k and top-p."""
    blocks = -(-vocabulary // SAMPLING_BLOCK)
    return rows * (4 * 2 * blocks + 2 * 4 + CANDIDATES * (8 + 4) + blocks * CANDIDATES * (4 + 4))


def trial_bytes(inner: int, outer: int, itemsize: int) -> int:
    """Return the most bytes that `fastest` (kernels/linear.py) uses."""
    return FLUSHED + itemsize * JUDGES * (3 * inner + 3 * outer)


def workspace_numbers(batch: int, heads: int, key_heads: int, width: int, itemsize: int, longest: int, processors: int) -> int:
    """Return how many float32 numbers the workspace of paged attention has."""
    splits = launch_for(batch, key_heads, width, itemsize, longest, processors).splits
    return 0 if splits == 1 else batch * heads * splits * (width + 1)


@dataclass(frozen=True)
class AttentionLaunch:
    """Launch parameters of `paged_attention`. Any values give the same result up to rounding."""

    splits: int  # most parts of a sequence
    fewest: int  # fewest tokens in a part
    tile: int  # tokens read at a time
    whole: int = 0  # tokens up to which a sequence is one part
    warps: int = 1
    stages: int = 2


@cache
def launch_for(batch: int, key_heads: int, width: int, itemsize: int, longest: int, processors: int = PROCESSORS) -> AttentionLaunch:
    """Return launch parameters from shapes and the bound on lengths alone. `longest` is the window if that is shorter."""
    # The tiles of flash attention's forward pass on this chip, and one warp, which holds a row's scores as flash's warps do: sums then have
    # the same order. Four warps read 1.02 to 1.1 times as fast, but sum in another order. No flash attention exists for float32.
    tile = (128 if width <= 64 else 64) if itemsize == 2 else max(16, min(64, 8192 // padded(width)))
    programs = batch * key_heads
    if programs * PROCESSORS >= ENOUGH * processors:
        splits, fewest, whole = -(-longest // LONG), LONG, LONG
    else:
        splits, fewest, whole = -(-WANTED * processors // (PROCESSORS * programs)), FEWEST_TOKENS, WHOLE
        splits = min(splits, -(-longest // fewest)) if longest > whole else 1
    return AttentionLaunch(max(1, min(splits, MOST_SPLITS)), fewest, tile, whole, warps=1 if itemsize == 2 else 4)


def power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def padded(number: int) -> int:
    """Return the next power of two, which Triton needs, and at least 16, which tensor cores need."""
    return max(16, power_of_two(number))
