"""Sampling settings, and the seeds of the noise.

Guaranteed: a sample's seed depends only on the call's seed, the prompt and the sample's index, so its tokens do not depend on the rest of
the batch. Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass

WORD = 2**64 - 1  # all bits of a 64-bit word


@dataclass(frozen=True)
class Sampling:
    """Settings for drawing responses. Temperature 0 is greedy."""

    samples: int = 1
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()


def sample_seed(seed: int, prompt: int, sample: int) -> int:
    """Return the seed of one sample: 64 bits mixed from all three numbers, by the finaliser of SplitMix64, which spreads every bit over
    all."""
    value = seed
    for number in (prompt, sample):
        value = (value + 0x9E3779B97F4A7C15 * (number + 1)) & WORD
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & WORD
        value ^= value >> 31
    return value
