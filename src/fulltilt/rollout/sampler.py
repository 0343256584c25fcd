"""Drawing tokens from logits.

Enters: logits [S, vocabulary] and, for each row, the key of its noise. Leaves: a token and its log-prob for each row. Guaranteed: the noise
is a function of (seed, sample, position) and the vocabulary entry alone, so a sample's tokens do not depend on what else is in the batch;
the log-prob is the one of the full softmax at the sampling temperature, whatever top-k and top-p cut away.

Gumbel-max: argmax(logits / temperature + g) with independent Gumbel noise g draws from the softmax, and rounding in the logits moves the
result only where two candidates nearly tie.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

CHUNK_NUMBERS = 1 << 25
_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. Temperature 0 is greedy."""

    samples: int = 1
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()


def draw(logits: torch.Tensor, keys: np.ndarray, sampling: Sampling, rows: np.ndarray | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 [S] and log-probs float32 [S]. `keys` is uint64 [S], from `noise_keys`; `rows` says which row of the logits each draws
    from when several draw from one, so that no row is ever copied more than a chunk at a time."""
    tokens, logprobs = [], []
    size = max(1, CHUNK_NUMBERS // logits.shape[1])
    for start in range(0, len(keys), size):
        part = logits[start : start + size] if rows is None else logits[torch.from_numpy(rows[start : start + size]).to(logits.device)]
        scaled = part / (sampling.temperature or 1.0)
        if sampling.temperature == 0:
            chosen = part.argmax(-1)
        else:
            chosen = (restrict(scaled, sampling) + gumbel(keys[start : start + size], part.shape[1], part.device)).argmax(-1)
        picked = scaled.gather(1, chosen[:, None])[:, 0]
        tokens.append(chosen)
        logprobs.append(picked - torch.logsumexp(scaled, dim=-1))
    return torch.cat(tokens), torch.cat(logprobs).float()


def restrict(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Cut all but the k likeliest tokens, then all but the fewest that together reach probability p."""
    if sampling.top_k and sampling.top_k < logits.shape[1]:
        smallest = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        probability = ordered.softmax(-1)
        # In whole numbers: on CUDA a sum of floats in running order is not deterministic.
        share = (probability.double() * 2**40).long()
        before = share.cumsum(-1) - share
        ordered = ordered.masked_fill(before >= int(sampling.top_p * 2**40), -torch.inf)
        logits = torch.empty_like(logits).scatter_(1, order, ordered)
    return logits


def noise_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One key a row from its sample's seed and its place in the response (uint64)."""
    return mix64(seeds + np.uint64(0x9E3779B97F4A7C15) * (positions.astype(np.uint64) + np.uint64(1)))


def sample_seed(seed: int, prompt: int, sample: int) -> np.uint64:
    """The seed of one sample: all three numbers, well mixed."""
    value = np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
    for number in (prompt, sample):
        value = mix64(value + np.uint64(0x9E3779B97F4A7C15) * np.array([number + 1], dtype=np.uint64))
    return np.uint64(value[0])


def mix64(value: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit words that spreads every bit over all (the finaliser of SplitMix64)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def gumbel(keys: np.ndarray, vocabulary: int, device: torch.device) -> torch.Tensor:
    """Gumbel noise float32 [S, vocabulary]: a hash of key and vocabulary entry, equal on every device.

    32-bit words in 64-bit integers, so that products wrap as they would in a kernel's unsigned words.
    """
    words = torch.from_numpy(np.stack([keys & np.uint64(_WORD), keys >> np.uint64(32)]).astype(np.int64)).to(device)
    entry = torch.arange(vocabulary, device=device)[None, :]
    value = mix32(mix32(entry ^ words[0][:, None]) ^ words[1][:, None])
    uniform = (value.double() + 0.5) * 2.0**-32  # double: the nearest float32 to a value just below 1 is 1
    return -torch.log(-torch.log(uniform)).float()


def mix32(value: torch.Tensor) -> torch.Tensor:
    value = ((value ^ (value >> 16)) * 0x7FEB352D) & _WORD
    value = ((value ^ (value >> 15)) * 0x846CA68B) & _WORD
    return value ^ (value >> 16)
