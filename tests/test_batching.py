"""Schedules by property, packing and weights against plain loops; padding, through real models, against packing; whose sizes are whose."""

from __future__ import annotations

import heapq
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import plans
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import forward_micro_batches
from transformers import AutoModelForCausalLM

from fulltilt.algo.build import build
from fulltilt.batching import schedule
from fulltilt.batching.cost import ModelSize, update_flops
from fulltilt.batching.pack import MicroSizing, minibatch, pack, scatter, weights
from fulltilt.bench.flops import model_size
from fulltilt.cluster.sizes import forward_sizes, update_sizes
from fulltilt.model.load import load_model
from fulltilt.model.scalar import ScalarModel, load_scalar
from fulltilt.plan.make import make_plan
from fulltilt.records import MicroBatch, Row
from fulltilt.schema import Config, ModelConfig, TrainConfig
from fulltilt.shape import Shape
from fulltilt.training.optim import Optimizer
from fulltilt.training.roles import Critic, Policy, Scorer, annotate_all
from fulltilt.training.trainer import Trainer

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
    if len(micro_batches) > 1:
        assert len(micro_batches) < 2 * sum(lengths) / budget
    if sum(lengths) <= budget and lengths:
        assert len(micro_batches) == 1


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(30, 200))
def test_fill_is_even_where_that_needs_no_more_micro_batches(lengths: list[int], budget: int) -> None:
    """Rows into the emptiest differ by one row's length at most; where a micro-batch would then have too many tokens, it is a tight fit."""
    totals = [sum(lengths[row] for row in rows) for rows in schedule.fill(lengths, budget)]
    tight = schedule._tightly(sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)), lengths, budget)
    assert len(totals) == len(tight) and max(totals) <= max(sum(lengths[row] for row in rows) for rows in tight)
    uneven = max(totals) - min(totals) > max(lengths)
    if uneven:
        assert sum(heapq.nsmallest(2, totals)) > budget  # it is the tight fit, any two of which hold more


def test_fill_of_a_little_more_than_one_budget_makes_halves() -> None:
    """A second micro-batch of what is left over would cost the memory of a whole one for the time of two."""
    rows = [150] * 500
    assert [sum(rows[row] for row in one) for one in schedule.fill(rows, 65_536)] == [37_500, 37_500]


def test_fill_finds_the_tight_fit() -> None:
    # First come, first served would need four.
    assert schedule.fill([2, 3, 7, 8, 5, 5], 10) == [[0, 3], [1, 2], [4, 5]]
    assert schedule.fill([5, 9, 4, 3], 8) == [[1], [2, 3], [0]]
    assert schedule.fill([], 8) == []


def test_fill_is_quick() -> None:
    lengths = [int(n) for n in np.random.default_rng(0).integers(1, 2000, 10_000)]
    start = time.process_time()  # a busy machine takes nothing of it
    micro_batches = schedule.fill(lengths, 16_384)
    assert time.process_time() - start < 2
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


# ------------------------------------------------------------------------------------------------------------------------- many workers

# One long row beside many short ones, fewer rows than workers, none at all, rows beyond the budget.
adversarial = st.one_of(
    st.lists(st.integers(1, 80), max_size=60),
    st.tuples(st.integers(100, 5000), st.lists(st.integers(1, 3), max_size=60)).map(lambda case: [case[0], *case[1]]),
    st.lists(st.integers(1, 200), max_size=3),
)


@settings(deadline=None, max_examples=200)
@given(adversarial, st.integers(1, 120), st.integers(1, 9), st.booleans())
def test_micro_batches_can_be_shared_evenly_where_rows_suffice(lengths: list[int], budget: int, workers: int, packing: bool) -> None:
    few = MicroSizing(budget, packing=packing).schedule(lengths)
    shared = MicroSizing(budget, packing=packing).schedule(lengths, workers)
    assert len(shared) == min(-(-len(few) // workers) * workers, len(lengths))
    assert sorted(flat(shared)) == list(range(len(lengths)))
    sizes = [sum(lengths[row] for row in rows) if packing else len(rows) * max(lengths[row] for row in rows) for rows in shared]
    assert all(size <= budget or len(rows) == 1 for size, rows in zip(sizes, shared, strict=True))
    assert sizes == sorted(sizes, reverse=True) and all(rows == sorted(rows) for rows in shared)
    if workers == 1:
        assert shared == few
    assert shared == MicroSizing(budget, packing=packing).schedule(list(lengths), workers)


def test_where_the_even_way_exceeds_the_cap_the_tight_one_is_cut_up() -> None:
    """Eight micro-batches become nine. Each row into the emptiest of nine would put 3 + 2 + 2 tokens together."""
    lengths = [3] * 8 + [2] * 12
    assert max(sum(lengths[row] for row in rows) for rows in schedule._evenly(range(20), lengths, 9)) == 7
    assert [sum(lengths[row] for row in rows) for rows in schedule.fill(lengths, 6)] == [6] * 8
    assert [sum(lengths[row] for row in rows) for rows in schedule.fill(lengths, 6, 3)] == [6] * 7 + [3] * 2


def test_samples_that_the_user_has_set_stay() -> None:
    assert MicroSizing(1, 2).schedule([4, 3, 2, 1, 1], 4) == MicroSizing(1, 2).schedule([4, 3, 2, 1, 1]) == [[0, 1], [2, 3], [4]]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 9), st.booleans())
def test_every_micro_batch_goes_to_exactly_one_worker(costs: list[int], workers: int, balance: bool) -> None:
    costs.sort(reverse=True)
    parts = schedule.distribute(costs, workers, balance)
    assert len(parts) == workers and sorted(flat(parts)) == list(range(len(costs)))
    assert all(part == sorted(part) for part in parts)
    assert parts == schedule.distribute(list(costs), workers, balance)
    if workers == 1:
        assert parts == [list(range(len(costs)))]
    totals = [sum(costs[index] for index in part) for part in parts]
    assert schedule.spread(costs, parts) == pytest.approx(max(totals) / (sum(totals) / workers) if sum(totals) else 1.0)
    if balance:
        # Without the last one that it got, no worker has more than any other: the known bound of 4/3 follows.
        for part, total in zip(parts, totals, strict=True):
            assert not part or total - min(costs[index] for index in part) <= min(totals)
            assert part or len(costs) < workers
    else:
        assert all(part == list(range(worker, len(costs), workers)) for worker, part in enumerate(parts))
    found = [[f"result {index}" for index in part] for part in parts]
    assert schedule.in_order(parts, found) == [f"result {index}" for index in range(len(costs))]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(2, 9))
def test_workers_that_wait_for_one_another_in_every_pass_have_about_the_same_in_each(costs: list[int], workers: int) -> None:
    parts = schedule.distribute(costs, workers, together=True)
    assert sorted(flat(parts)) == list(range(len(costs)))
    passes = [len(part) for part in parts]
    assert max(passes) - min(passes) <= 1  # a worker with fewer would make empty passes
    columns = [[costs[part[number]] for part in parts if number < len(part)] for number in range(max(passes))]
    for earlier, later in itertools.pairwise(columns):
        assert min(earlier) >= max(later)
    waited = sum(map(max, columns)) * workers
    assert schedule.spread(costs, parts, together=True) == pytest.approx(waited / sum(costs) if costs else 1.0)


def test_by_totals_alone_workers_that_wait_in_every_pass_would_be_slower() -> None:
    costs = [100, *[10] * 11]
    by_totals, by_passes = (schedule.distribute(costs, 2, together=together) for together in (False, True))
    assert [len(part) for part in by_totals] == [2, 10] and [len(part) for part in by_passes] == [6, 6]
    slow, fast = (schedule.spread(costs, parts, together=True) for parts in (by_totals, by_passes))
    assert (slow, fast) == (pytest.approx(190 * 2 / 210), pytest.approx(150 * 2 / 210))


def test_a_result_that_is_missing_or_there_twice_is_noticed() -> None:
    for parts in ([[0], [2]], [[0, 1], [1]]):
        with pytest.raises(AssertionError, match="missing, or there twice"):
            schedule.in_order(parts, [["a"] * len(part) for part in parts])
    with pytest.raises(ValueError, match="zip"):
        schedule.in_order([[0], [1]], [["a"], []])


def test_costs_balance_what_counts_cannot() -> None:
    """Adversarial lengths: one long sample costs as much as many short ones, which then go to the other worker."""
    size = ModelSize.of_shape(Shape.named("0.5B"))
    lengths = [40_000, *([200] * 800)]
    micro_batches = schedule.fill(lengths, 10_000, 2)
    costs = [update_flops(size, [lengths[row] for row in rows], trained=0).total for rows in micro_batches]
    balanced, in_turn = (schedule.distribute(costs, 2, balance) for balance in (True, False))
    assert schedule.spread(costs, balanced) < 1.05 and schedule.spread(costs, in_turn) > 1.4


@pytest.mark.parametrize("family", models.FAMILIES)
def test_the_cost_of_a_shape_is_that_of_the_model(family: str) -> None:
    config = models.FAMILIES[family]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = Shape.from_config(config.to_dict())
    size = ModelSize.of_shape(shape)
    found = model_size(model, {})
    assert (size.layer_weights, size.head_weights) == (found.layer_weights, found.head_weights)
    assert size.attention == ((config.num_attention_heads * shape.layers[0].head_width, None),) * 2
    assert ModelSize.of_shape(shape, vocabulary_head=False).head_weights == config.hidden_size


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
        batch = minibatch(make_rows(0, [[0, 0], [0], [0, 0, 0]]), aggregation, 7, MicroSizing(4))
        assert minibatch([], aggregation, 7, MicroSizing(4)).micro_batches == ()
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
        for sizing in (MicroSizing(budget), MicroSizing(1), MicroSizing(10_000), MicroSizing(1, samples)):
            batch = minibatch(order, aggregation, 13, sizing)
            assert sorted(row for micro in batch.micro_batches for row in micro.rows) == list(range(len(rows)))
            assert batch.trained_tokens == sum(int(row.mask.sum()) for row in rows)
            total = 0.0
            for micro in batch.micro_batches:
                if sizing.micro_batch is None:
                    assert len(micro.ids) <= sizing.token_budget or len(micro.rows) == 1
                assert micro.advantages is not None and micro.rollout_logprobs is not None
                total += float(np.sum(micro.weights * micro.advantages.astype(np.float64) * micro.rollout_logprobs.astype(np.float64)))
            assert total == pytest.approx(expected, abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), budget=st.integers(1, 60), samples=st.one_of(st.none(), st.integers(1, 5)))
def test_scatter_undoes_packing(seed: int, budget: int, samples: int | None) -> None:
    rows = make_rows(seed)
    micro_batches = forward_micro_batches(rows, MicroSizing(budget, samples))
    assert all((micro.weights == 0).all() for micro in micro_batches)
    values = [micro.rollout_logprobs for micro in micro_batches if micro.rollout_logprobs is not None]
    back = scatter(rows, [micro.rows for micro in micro_batches], values, "old_logprobs")
    for row, returned in zip(rows, back, strict=True):
        assert returned.old_logprobs is not None and returned.old_logprobs.dtype == np.float32
        np.testing.assert_array_equal(returned.old_logprobs, row.rollout_logprobs)
        assert returned.ids is row.ids and returned.ref_logprobs is None and row.old_logprobs is None


def test_scatter_refuses_lost_and_repeated_rows() -> None:
    rows = make_rows(0, [[0, 1], [0, 1, 1]])
    micro_batches = forward_micro_batches(rows, MicroSizing(1))
    values = [np.zeros(len(micro.trained)) for micro in micro_batches]
    with pytest.raises(AssertionError, match="1 of 2 rows"):
        scatter(rows, [micro_batches[0].rows], values[:1], "ref_logprobs")
    with pytest.raises(AssertionError, match="twice"):
        scatter(rows, [micro_batches[0].rows] * 2, [values[0]] * 2, "ref_logprobs")
    with pytest.raises(AssertionError, match="trained tokens"):
        scatter(rows, [micro.rows for micro in micro_batches], [np.zeros(7)] * 2, "ref_logprobs")


# ------------------------------------------------------------------------------------------------------------------------------- padding

CPU = torch.device("cpu")
ModelFolders = Callable[[str], Path]


def computed(micro: MicroBatch) -> int:
    """What a padded batch of these rows would have: its longest row's tokens for each of them."""
    lengths = np.diff(micro.cu_seqlens)
    assert len(set(lengths.tolist())) == 1
    return int(lengths[0]) * len(micro.rows)


@settings(deadline=None)
@given(lengths_and_budget, st.one_of(st.none(), st.integers(1, 6)))
def test_a_padded_schedule_obeys_the_cap_and_loses_nothing(case: tuple[list[int], int], samples: int | None) -> None:
    lengths, budget = case
    micro_batches = MicroSizing(budget, samples, packing=False).schedule(lengths)
    assert sorted(flat(micro_batches)) == list(range(len(lengths)))
    padded = [len(rows) * max(lengths[row] for row in rows) for rows in micro_batches]
    assert padded == sorted(padded, reverse=True)
    assert all(rows == sorted(rows) for rows in micro_batches)
    if samples is None:
        assert all(tokens <= budget or len(rows) == 1 for tokens, rows in zip(padded, micro_batches, strict=True))
    else:
        assert sorted(micro_batches) == sorted(schedule.fixed(lengths, samples))


def test_a_padded_schedule_puts_like_lengths_together() -> None:
    assert schedule.fill_padded([5, 9, 4, 3], 8) == [[1], [2, 3], [0]]
    assert schedule.fill([1, 8, 1, 8, 1, 1], 10) == [[0, 1, 4], [2, 3, 5]] and schedule.fill_padded([1, 8, 1, 8, 1, 1], 10) == [
        [1],
        [3],
        [0, 2, 4, 5],
    ]
    assert schedule.fill_padded([], 8) == []
    # 2 x 9 tokens are more than 4 + 9, which alone would say otherwise.
    assert MicroSizing(0, 2, packing=False).schedule([7, 7, 4, 9]) == [[2, 3], [0, 1]]
    assert MicroSizing(0, 2).schedule([7, 7, 4, 9]) == [[0, 1], [2, 3]]


def test_padding_is_a_tail_of_each_row() -> None:
    rows = [
        Row(np.array([5, 6, 7, 2]), np.array([0, 0, 1, 1], dtype=bool), advantages=np.array([0, 0, 1, 2], dtype=np.float32)),
        Row(np.array([8, 2]), np.array([0, 1], dtype=bool), advantages=np.array([0, 3], dtype=np.float32)),
    ]
    micro = pack(rows, [1, 0], [0.25, 0.5], packing=False)
    assert micro.ids.tolist() == [8, 2, 0, 0, 5, 6, 7, 2] and micro.positions.tolist() == [0, 1, 2, 3] * 2
    assert micro.cu_seqlens.tolist() == [0, 4, 8] and micro.pad_tokens == 2
    assert micro.trained.tolist() == [1, 6, 7] and micro.trained_row.tolist() == [0, 1, 1]
    assert micro.advantages is not None and micro.advantages.tolist() == [3, 1, 2] and micro.weights.tolist() == [0.5, 0.25, 0.25]
    assert pack(rows, [1, 0], [0.25, 0.5]).pad_tokens == 0


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), budget=st.integers(1, 60), samples=st.one_of(st.none(), st.integers(1, 5)))
def test_padded_rows_are_the_same_rows(seed: int, budget: int, samples: int | None) -> None:
    rows = make_rows(seed)
    micro_batches = forward_micro_batches(rows, MicroSizing(budget, samples, packing=False))
    assert sum(computed(micro) - micro.pad_tokens for micro in micro_batches) == sum(row.tokens for row in rows)
    for micro in micro_batches:
        assert len(micro.ids) == len(micro.positions) == computed(micro)
        assert samples is not None or len(micro.ids) <= budget or len(micro.rows) == 1
        assert micro.ids[micro.trained].tolist() == [token for row in micro.rows for token in rows[row].ids[rows[row].mask]]
    back = scatter(
        rows, [m.rows for m in micro_batches], [m.rollout_logprobs for m in micro_batches if m.rollout_logprobs is not None], "old_logprobs"
    )
    for row, returned in zip(rows, back, strict=True):
        np.testing.assert_array_equal(returned.old_logprobs, row.rollout_logprobs)


def trained_rows(count: int = 9) -> list[Row]:
    """Longer than the windows of the tests' models, with holes in their masks."""
    random = np.random.default_rng(3)
    rows = []
    for number in range(count):
        tokens = int(random.integers(4, 40))
        mask = (np.arange(tokens) >= 2) & ((random.random(tokens) < 0.8) | (np.arange(tokens) == tokens - 1))

        def numbers(tokens: int = tokens, mask: np.ndarray = mask) -> np.ndarray:
            return (random.normal(0, 1, tokens) * mask).astype(np.float32)

        per_token = {name: numbers() for name in ("values", "returns")} | {"rollout_logprobs": (numbers() - 5) * mask}
        rows.append(Row(random.integers(0, models.VOCABULARY, tokens), mask, number // 3, float(random.normal()), **per_token))
    return build(grpo()).advantage(rows)


def grpo(**sections: dict[str, Any]) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}, **sections})


def gradients(trainer: Trainer, model: torch.nn.Module, rows: list[Row], sizing: MicroSizing) -> tuple[torch.Tensor, int]:
    """Of the whole mini-batch, and the pads that were computed for it."""
    trainer.optimizer.zero_grad()
    batch = minibatch(rows, "token-mean", 1, sizing)
    trainer.accumulate(batch)
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    return found, sum(micro.pad_tokens for micro in batch.micro_batches)


def assert_same_gradients(trainer: Trainer, model: torch.nn.Module, rows: list[Row], tolerance: float = 1e-9) -> None:
    whole, none = gradients(trainer, model, rows, MicroSizing(10_000))
    assert none == 0 and whole.abs().max() > 1e-4
    for sizing in (MicroSizing(10_000, packing=False), MicroSizing(90, packing=False), MicroSizing(0, 4, packing=False)):
        padded, pads = gradients(trainer, model, rows, sizing)
        assert pads > 0
        assert (padded - whole).abs().max() < tolerance * whole.abs().max()


# A window, experts, which pads are sent to as well, and a cap on scores. Gemma's norm is computed in float32 whatever the model is: packed
# micro-batches of another size differ as much.
@pytest.mark.parametrize(("family", "tolerance"), [("llama-tied", 1e-9), ("mistral", 1e-9), ("qwen3-moe", 1e-9), ("gemma2", 1e-6)])
def test_padding_changes_neither_logprobs_nor_gradients(family: str, tolerance: float, model_folders: ModelFolders) -> None:
    model = load_model(ModelConfig(path=str(model_folders(family)), dtype="float64"), CPU)
    policy = Policy("actor", model, 0.8, Optimizer(model, TrainConfig(), 10), entropy_gradient=True)
    rows = trained_rows()
    found = []
    for packing in (True, False):
        with torch.no_grad():
            micro_batches = forward_micro_batches(rows, MicroSizing(100, packing=packing))
            logprobs = [policy.run(micro)[0].numpy() for micro in micro_batches]
        by_row = {
            row: numbers[micro.trained_row == place]
            for micro, numbers in zip(micro_batches, logprobs, strict=True)
            for place, row in enumerate(micro.rows)
        }
        found.append(np.concatenate([by_row[row] for row in range(len(rows))]))
    np.testing.assert_allclose(found[1], found[0], atol=1e-9, rtol=0)
    assert_same_gradients(Trainer(policy, build(grpo(algorithm={"entropy_coef": 0.05})).loss), model, rows, tolerance)


def scalar_model(folder: Path) -> ScalarModel:
    model = load_scalar(ModelConfig(path=str(folder), dtype="float64"), CPU, key="critic.path", head="new")
    with torch.no_grad():  # a new head is 0, and nothing behind it would have a gradient
        torch.nn.init.normal_(model.score.weight, std=0.3, generator=torch.Generator().manual_seed(0))
    return model


def test_padding_changes_no_gradient_of_a_critic_and_no_score_of_a_reward_model(model_folders: ModelFolders) -> None:
    model = scalar_model(model_folders("llama"))
    value_loss = build(grpo(algorithm={"name": "ppo"})).value_loss
    assert value_loss is not None
    rows = trained_rows()
    assert_same_gradients(Trainer(Critic("critic", model, Optimizer(model, TrainConfig(), 10)), value_loss), model, rows)
    texts = [replace(row, mask=np.arange(row.tokens) == row.tokens - 1, values=None) for row in rows]  # read at its last token
    role, scores = Scorer("reward_model", model), []
    for packing in (True, False):
        micro_batches = forward_micro_batches(texts, MicroSizing(10_000, packing=packing))
        judged = scatter(texts, [micro.rows for micro in micro_batches], list(annotate_all(role, micro_batches)), "values")
        scores.append([float(row.values[-1]) for row in judged if row.values is not None])
    assert scores[0] == pytest.approx(scores[1], abs=1e-6) and len(set(scores[0])) == len(rows)  # annotate gives float32


# ------------------------------------------------------------------------------------------------------------------------- whose sizes


def sizes(**sections: dict[str, Any]) -> dict[str, MicroSizing]:
    config = grpo(**sections)
    budgets = make_plan(config, plans.facts(free_bytes=2**40, kv_bytes_per_token=1, longest=8)).budgets
    updates, forwards = update_sizes(config, budgets), forward_sizes(config, budgets)
    return {f"update {role}": size for role, size in updates.items()} | {f"forward {role}": size for role, size in forwards.items()}


def test_every_role_has_its_budgets_with_gradient_and_without() -> None:
    given = sizes(
        actor={"token_budget": 11, "forward_token_budget": 12},
        ref={"forward_token_budget": 13},
        critic={"token_budget": 14, "forward_token_budget": 15},
        reward_model={"forward_token_budget": 16},
    )
    assert {name: size.token_budget for name, size in given.items()} == {
        "update actor": 11, "update critic": 14, "forward actor": 12, "forward ref": 13, "forward critic": 15, "forward reward_model": 16,
    }  # fmt: skip
    assert all(size.micro_batch is None and size.packing for size in given.values())
    # Without gradient more fits, and so it does without a vocabulary head.
    auto = {name: size.token_budget for name, size in sizes(actor={"token_budget": 100}).items()}
    assert auto == {
        "update actor": 100, "update critic": 200, "forward actor": 200, "forward ref": 200, "forward critic": 400,
        "forward reward_model": 400,
    }  # fmt: skip


@pytest.mark.parametrize("role", ["actor", "ref", "critic", "reward_model"])
def test_a_role_without_dynamic_batching_counts_samples(role: str) -> None:
    found = sizes(**{role: {"dynamic_batch": False, "micro_batch": 3}})
    for name, size in found.items():
        own = name.split()[1] == role
        assert size.micro_batch == (3 if own else None)
        if own:
            assert size.schedule([5, 1, 1, 900, 900]) == [[3, 4], [0, 1, 2]]


def test_a_role_is_packed_as_its_key_says_or_as_train_says() -> None:
    unpacked = {name for name, size in sizes(train={"packing": False}, critic={"packing": True}).items() if not size.packing}
    assert unpacked == {"update actor", "forward actor", "forward ref", "forward reward_model"}
    unpacked = {name for name, size in sizes(reward_model={"packing": False}).items() if not size.packing}
    assert unpacked == {"forward reward_model"}


def test_batching_does_not_import_torch() -> None:
    code = "import sys\nfrom fulltilt.batching import cost, pack\nassert not {'torch', 'fulltilt.algo'} & sys.modules.keys()\n"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=environment)
