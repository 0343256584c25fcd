"""Schedules by property, packing and weights against plain loops."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fulltilt.batching import schedule
from fulltilt.batching.pack import MicroSizing, forward_micro_batches, minibatch, pack, scatter, weights
from fulltilt.records import Row

AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
lengths_and_budget = st.integers(1, 60).flatmap(lambda budget: st.tuples(st.lists(st.integers(1, 80), max_size=60), st.just(budget)))


def flat(lists: list[list[int]]) -> list[int]:
    return [index for one in lists for index in one]


# -------------------------------------------------------------------------------------------------------------------------- the schedule


@settings(deadline=None)
@given(lengths_and_budget)
def test_fill_obeys_the_cap_and_loses_nothing(case: tuple[list[int], int]) -> None:
    lengths, budget = case
    micro_batches = schedule.fill(lengths, budget)
    assert sorted(flat(micro_batches)) == list(range(len(lengths)))
    totals = [sum(lengths[i] for i in rows) for rows in micro_batches]
    assert all(total <= budget or len(rows) == 1 for total, rows in zip(totals, micro_batches, strict=True))
    assert totals == sorted(totals, reverse=True)
    assert all(rows and rows == sorted(rows) for rows in micro_batches)
    assert micro_batches == schedule.fill(list(lengths), budget)


@settings(deadline=None)
@given(lengths_and_budget)
def test_fill_makes_few_micro_batches(case: tuple[list[int], int]) -> None:
    lengths, budget = case
    micro_batches = schedule.fill(lengths, budget)
    totals = sorted(sum(lengths[i] for i in rows) for rows in micro_batches)
    if len(totals) > 1:
        assert totals[0] + totals[1] > budget
        assert len(totals) < 2 * sum(lengths) / budget
    if sum(lengths) <= budget and lengths:
        assert len(micro_batches) == 1


def test_fill_finds_the_tight_fit() -> None:
    # First come, first served would need four.
    assert schedule.fill([2, 3, 7, 8, 5, 5], 10) == [[0, 3], [1, 2], [4, 5]]
    assert schedule.fill([5, 9, 4, 3], 8) == [[1], [0, 3], [2]]
    assert schedule.fill([], 8) == []


def test_fill_is_quick() -> None:
    lengths = [int(n) for n in np.random.default_rng(0).integers(1, 2000, 10_000)]
    start = time.perf_counter()
    micro_batches = schedule.fill(lengths, 16_384)
    assert time.perf_counter() - start < 0.8
    assert len(micro_batches) <= -(-sum(lengths) // 16_384) + 1


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 12))
def test_fixed_counts_samples(lengths: list[int], samples: int) -> None:
    micro_batches = schedule.fixed(lengths, samples)
    assert sorted(flat(micro_batches)) == list(range(len(lengths)))
    assert len(micro_batches) == -(-len(lengths) // samples)
    assert sum(len(rows) != samples for rows in micro_batches) <= 1
    assert all(rows == list(range(rows[0], rows[0] + len(rows))) and len(rows) <= samples for rows in micro_batches)
    totals = [sum(lengths[i] for i in rows) for rows in micro_batches]
    assert totals == sorted(totals, reverse=True)


@settings(deadline=None)
@given(st.lists(st.integers(0, 12), max_size=50), st.integers(1, 15))
def test_minibatches_are_whole_groups_in_prompt_order(groups: list[int], count: int) -> None:
    minibatches = schedule.split_minibatches(groups, count)
    assert sorted(flat(minibatches)) == list(range(len(groups)))
    assert all(rows and rows == sorted(rows) for rows in minibatches)
    of_minibatch = [sorted({groups[row] for row in rows}) for rows in minibatches]
    assert flat(of_minibatch) == sorted(set(groups)), "a group was torn apart or out of prompt order"
    sizes = [len(own) for own in of_minibatch]
    assert len(sizes) == min(count, len(set(groups)))
    assert sizes == sorted(sizes, reverse=True) and (not sizes or sizes[0] - sizes[-1] <= 1)


def test_minibatches_need_not_divide() -> None:
    assert schedule.split_minibatches([0, 0, 1, 2, 2], 2) == [[0, 1, 2], [3, 4]]
    assert schedule.split_minibatches([3, 1, 3, 1], 5) == [[1, 3], [0, 2]]
    assert schedule.split_minibatches([], 2) == []


# ------------------------------------------------------------------------------------------------------------------------------- packing


def make_rows(seed: int, masks: list[list[int]] | None = None) -> list[Row]:
    rng = np.random.default_rng(seed)
    if masks is None:
        masks = [[0, *(int(bit) for bit in rng.integers(0, 2, int(rng.integers(0, 9))))] for _ in range(int(rng.integers(1, 12)))]
    rows = []
    for mask in masks:
        trained = np.array(mask, dtype=bool)

        def per_token(trained: np.ndarray = trained) -> np.ndarray:
            return np.where(trained, rng.normal(size=len(trained)), 0.0).astype(np.float32)

        rows.append(
            Row(
                ids=rng.integers(0, 50, len(mask)),
                mask=trained,
                rollout_logprobs=per_token(),
                advantages=per_token(),
            )
        )
    return rows


def plain_weight(row: int, masks: list[list[int]], aggregation: str, length_norm: int) -> float:
    """Share of a trained token of one row."""
    sequences = sum(1 for mask in masks if sum(mask) > 0)
    return {
        "token-mean": lambda: 1 / sum(sum(mask) for mask in masks),
        "seq-mean-token-sum": lambda: 1 / sequences,
        "seq-mean-token-mean": lambda: 1 / sequences / sum(masks[row]),
        "seq-mean-token-sum-norm": lambda: 1 / sequences / length_norm,
    }[aggregation]()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_are_the_plain_ones(aggregation: str) -> None:
    masks = [[0, 1, 1, 1], [0, 0, 1], [0, 0, 0, 0], [0, 1, 0, 1, 0, 1, 1], [0]]
    got = weights(make_rows(0, masks), aggregation, 11)
    for row, mask in enumerate(masks):
        expected = plain_weight(row, masks, aggregation, 11) if sum(mask) else 0.0
        assert got[row] == pytest.approx(expected, rel=1e-15), row


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_nothing_trained_is_defined(aggregation: str) -> None:
    with np.errstate(all="raise"):
        batch = minibatch(make_rows(0, [[0, 0], [0], [0, 0, 0]]), aggregation, 7, MicroSizing(True, 4))
        assert minibatch([], aggregation, 7, MicroSizing(True, 4)).micro_batches == ()
    assert batch.trained_tokens == 0
    assert sorted(row for micro in batch.micro_batches for row in micro.rows) == [0, 1, 2]
    assert all(len(micro.weights) == len(micro.trained) == 0 for micro in batch.micro_batches)


def test_pack_is_the_example_of_the_record() -> None:
    rows = [
        Row(np.array([9, 9]), np.array([False, True]), advantages=np.array([0, 7.0], dtype=np.float32)),
        Row(np.array([5, 6, 7, 2]), np.array([0, 0, 1, 1], dtype=bool), advantages=np.array([0, 0, 1, 2], dtype=np.float32)),
        Row(np.array([5, 8, 2]), np.array([0, 1, 1], dtype=bool), advantages=np.array([0, 3, 4], dtype=np.float32)),
    ]
    micro = pack(rows, [1, 2], [0.1, 0.2, 0.3])
    assert micro.rows == (1, 2)
    expected: dict[str, tuple[list[float], Any]] = {
        "ids": ([5, 6, 7, 2, 5, 8, 2], np.int64),
        "positions": ([0, 1, 2, 3, 0, 1, 2], np.int64),
        "cu_seqlens": ([0, 4, 7], np.int32),
        "trained": ([2, 3, 5, 6], np.int64),
        "trained_row": ([0, 0, 1, 1], np.int64),
        "weights": ([0.2, 0.2, 0.3, 0.3], np.float64),
        "advantages": ([1, 2, 3, 4], np.float32),
    }
    for name, (values, dtype) in expected.items():
        array = getattr(micro, name)
        assert array.tolist() == values and array.dtype == dtype, name
    assert micro.rollout_logprobs is None and micro.old_logprobs is None and micro.ref_logprobs is None


def test_pack_refuses_what_cannot_be() -> None:
    rows = make_rows(0, [[0, 1], [0, 1]])
    with pytest.raises(AssertionError, match="lack advantages"):
        pack([rows[0], replace(rows[1], advantages=None)], [0, 1], [1.0, 1.0])
    with pytest.raises(AssertionError, match="first token"):
        pack([replace(rows[0], mask=np.array([True, True]))], [0], [1.0])
    with pytest.raises(AssertionError, match="micro_batch must be given"):
        MicroSizing(dynamic=False, token_budget=8)


def plain_total(rows: list[Row], aggregation: str, length_norm: int) -> float:
    masks = [[int(bit) for bit in row.mask] for row in rows]
    total = 0.0
    for index, row in enumerate(rows):
        for token, bit in enumerate(masks[index]):
            if bit:
                assert row.advantages is not None and row.rollout_logprobs is not None
                number = float(row.advantages[token]) * float(row.rollout_logprobs[token])
                total += plain_weight(index, masks, aggregation, length_norm) * number
    return total


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), budget=st.integers(1, 120), samples=st.integers(1, 12), shuffle=st.randoms(use_true_random=False))
def test_weighted_sum_does_not_depend_on_the_cut_or_the_order(aggregation: str, seed: int, budget: int, samples: int, shuffle: Any) -> None:
    rows = make_rows(seed)
    expected = plain_total(rows, aggregation, 13)
    shuffled = list(rows)
    shuffle.shuffle(shuffled)
    for order in (rows, shuffled):
        for sizing in (MicroSizing(True, budget), MicroSizing(True, 1), MicroSizing(True, 10_000), MicroSizing(False, 1, samples)):
            batch = minibatch(order, aggregation, 13, sizing)
            assert sorted(row for micro in batch.micro_batches for row in micro.rows) == list(range(len(rows)))
            assert batch.trained_tokens == sum(int(row.mask.sum()) for row in rows)
            total = 0.0
            for micro in batch.micro_batches:
                if sizing.dynamic:
                    assert len(micro.ids) <= sizing.token_budget or len(micro.rows) == 1
                assert micro.advantages is not None and micro.rollout_logprobs is not None
                total += float(np.sum(micro.weights * micro.advantages.astype(np.float64) * micro.rollout_logprobs.astype(np.float64)))
            assert total == pytest.approx(expected, abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), budget=st.integers(1, 60), samples=st.one_of(st.none(), st.integers(1, 5)))
def test_scatter_undoes_packing(seed: int, budget: int, samples: int | None) -> None:
    rows = make_rows(seed)
    micro_batches = forward_micro_batches(rows, MicroSizing(samples is None, budget, samples))
    assert all((micro.weights == 0).all() for micro in micro_batches)
    values = [micro.rollout_logprobs for micro in micro_batches if micro.rollout_logprobs is not None]
    back = scatter(rows, micro_batches, values, "old_logprobs")
    for row, returned in zip(rows, back, strict=True):
        assert returned.old_logprobs is not None and returned.old_logprobs.dtype == np.float32
        np.testing.assert_array_equal(returned.old_logprobs, row.rollout_logprobs)
        assert returned.ids is row.ids and returned.ref_logprobs is None and row.old_logprobs is None


def test_scatter_refuses_lost_and_repeated_rows() -> None:
    rows = make_rows(0, [[0, 1], [0, 1, 1]])
    micro_batches = forward_micro_batches(rows, MicroSizing(True, 1))
    values = [np.zeros(len(micro.trained)) for micro in micro_batches]
    with pytest.raises(AssertionError, match="1 of 2 rows"):
        scatter(rows, micro_batches[:1], values[:1], "ref_logprobs")
    with pytest.raises(AssertionError, match="twice"):
        scatter(rows, [micro_batches[0]] * 2, [values[0]] * 2, "ref_logprobs")
    with pytest.raises(AssertionError, match="trained tokens"):
        scatter(rows, micro_batches, [np.zeros(7)] * 2, "ref_logprobs")


def test_batching_does_not_import_torch() -> None:
    code = "import sys, fulltilt.batching.pack\nassert 'torch' not in sys.modules and 'fulltilt.algo' not in sys.modules\n"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=environment)
