"""Decoding on CPU: rows attend in bunches, and those that have ended cost nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_kernels_attention import attended
from test_rollout import make_engine, random_prompts

from fulltilt.model import attention
from fulltilt.model.attention import Decode, Scoring, decode_batch
from fulltilt.rollout.sampler import Sampling

HEADS, KEY_HEADS, WIDTH, BLOCK = 6, 2, 8, 4


def batch(lengths: list[int]) -> Decode:
    random = torch.Generator().manual_seed(0)
    most = -(-max(lengths) // BLOCK)
    caches = torch.randn(2, len(lengths) * most * BLOCK, KEY_HEADS, WIDTH, generator=random)
    table = torch.randperm(len(lengths) * most, generator=random).view(len(lengths), most).int()
    ends = torch.tensor(lengths)
    slots = table.long().gather(1, ((ends - 1) // BLOCK)[:, None])[:, 0] * BLOCK + (ends - 1) % BLOCK
    return Decode(
        caches=[(*caches, *torch.zeros(2, 1, dtype=torch.int64))], slots=slots, table=table, lengths=ends.int(),
        block_tokens=BLOCK,
    )  # fmt: skip


@pytest.mark.parametrize("bunch_bytes", [1, 4000, 1 << 20])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, None), (None, 0.8), (7, 0.8)])
@pytest.mark.parametrize("lengths", [[41, 37, 37, 20, 9, 4, 1], [5, 30, 1, 8]], ids=["longest first", "any order"])
def test_bunches_attend_as_the_reference(
    lengths: list[int], window: int | None, softcap: float | None, bunch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "BUNCH_BYTES", bunch_bytes)
    context = batch(lengths)
    q, k, v = (torch.randn(len(lengths), heads, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    found = decode_batch(q, k, v, context, 0, Scoring(0.3, window, softcap))
    keys, values, *_ = context.caches[0]
    assert torch.equal(keys[context.slots], k) and torch.equal(values[context.slots], v)
    expected = attended(q, keys, values, context.table, context.lengths, scale=0.3, block_tokens=BLOCK, window=window, softcap=softcap)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    bunches = context.bunches[window]
    assert [bunch.rows.start for bunch in bunches[1:]] == [bunch.rows.stop for bunch in bunches[:-1]]
    assert len(bunches) == len(lengths) if bunch_bytes == 1 else len(bunches) < len(lengths)


def test_a_window_is_all_that_is_read() -> None:
    context = batch([41, 40, 39])
    q, k = torch.randn(3, HEADS, WIDTH), torch.randn(3, KEY_HEADS, WIDTH)
    decode_batch(q, k, k, context, 0, Scoring(0.3, window=7))
    (bunch,) = context.bunches[7]
    assert bunch.tokens == 41 - 32 and len(bunch.blocks) == 3 * 3


def test_a_sample_that_has_ended_is_computed_no_more(model_folders) -> None:
    engine = make_engine(model_folders("qwen2"))
    prompts = random_prompts(3)
    lengths = {(prompt.uid, index): 2 + 3 * prompt.uid + index for prompt in prompts for index in range(2)}
    entered: list[int] = []
    embedding = engine.runner.model.get_input_embeddings()
    with embedding.register_forward_hook(lambda module, given, out: entered.append(given[0].numel())):
        groups = list(engine.generate(prompts, Sampling(samples=2, max_new_tokens=12), 1, lengths))
    assert all(len(sample.ids) == lengths[group.prompt.uid, sample.index] for group in groups for sample in group.samples)
    # The first token of each sample is drawn from its prompt.
    assert sum(entered) == sum(len(prompt.ids) for prompt in prompts) + int(np.sum(list(lengths.values()))) - len(lengths)
