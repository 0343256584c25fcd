"""Sampling settings, drawing tokens from logits, and the seeds of the noise.

Enters: logits [S, vocabulary], and for each row its sample's seed and its place in the response. Leaves: a token and its log-prob for each
row. Guaranteed: the noise is a function of (seed, sample, position) and the vocabulary entry alone, so a sample's tokens do not depend on
the rest of the batch; the log-prob is that of the full softmax at the sampling temperature, whatever top-k and top-p exclude.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fulltilt.kernels.sampling import sample
from fulltilt.model.arrays import to_device

WORD = 2**64 - 1  # all bits of a 64-bit word


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. Temperature 0 is greedy."""

    samples: int = 1
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()


def draw(
    logits: torch.Tensor, seeds: np.ndarray, positions: np.ndarray, sampling: Sampling, rows: np.ndarray | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 [S] and log-probs float32 [S]. `seeds` is uint64 [S]; `rows` gives the row of the logits for each draw, if several
    draws share a row."""
    device = logits.device
    return sample(
        logits.float(),
        to_device(seeds.view(np.int64), device),
        to_device(positions.astype(np.int64), device),
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        rows=None if rows is None else to_device(rows, device),
    )


def sample_seed(seed: int, prompt: int, sample: int) -> int:
    """The seed of one sample: 64 bits mixed from all three numbers, by the finaliser of SplitMix64, which spreads every bit over all."""
    value = seed
    for number in (prompt, sample):
        value = (value + 0x9E3779B97F4A7C15 * (number + 1)) & WORD
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & WORD
        value ^= value >> 31
    return value
