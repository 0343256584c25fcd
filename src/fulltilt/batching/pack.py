"""Rows into packed micro-batches and per-token numbers back into rows.

Enters: rows. Leaves: a `BatchPlan` (which rows go together, and each row's weight in the loss), and by it `MicroBatch` streams, each
trained token with its share of the mini-batch's loss. The driver plans; each worker packs, since it has only the rows that it computes.
Guaranteed: shares are float64 and computed over the whole mini-batch before it is split, so a sum of share times number is the same for
every split and every order of rows; a row without trained tokens has weight 0 and causes no division by zero; no row is lost or repeated,
except for rows without an advantage where the caller asks to leave them out.

There is no padding, unless packing is switched off to measure what it saves. Then every row of a micro-batch is padded at its end to the
longest: pads are part of its document and come after all its tokens, so with causal attention no token sees them. Pads are computed,
counted in `pad_tokens` and in the budget, and change no result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fulltilt.batching.schedule import fill, fill_padded, fixed
from fulltilt.records import ANNOTATED_FIELDS, PER_TOKEN_FIELDS, AnyRow, BatchPlan, MicroBatch, MiniBatch, Row

Rows = Sequence[Row] | Mapping[int, Row]
Weights = Sequence[float] | Mapping[int, float]
PAD = 0  # a token that every vocabulary has; nothing reads its results


@dataclass(frozen=True)
class MicroSizing:
    """How large a micro-batch may be, in tokens or in samples, and whether its rows are packed or padded."""

    token_budget: int  # including pads
    micro_batch: int | None = None  # number of samples in each, regardless of the token budget; None: as many as fit the budget
    packing: bool = True  # False: every row is padded to the longest of its micro-batch

    def schedule(self, lengths: Sequence[int], workers: int = 1) -> list[list[int]]:
        """Divide rows into micro-batches, as batching/schedule.py guarantees; without packing, every row counts as long as the longest in
        its micro-batch. `workers`: how many divide the micro-batches; it has no effect where the user has set the number of samples."""
        if self.micro_batch is not None:
            return fixed(lengths, self.micro_batch, padded=not self.packing)
        return (fill if self.packing else fill_padded)(lengths, self.token_budget, workers)


# Functions for the share of one trained token, from rows of `trained` tokens each (all above 0) and the divisor of the normalised sum.
AGGREGATIONS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "token-mean": lambda trained, length_norm: np.full(len(trained), 1.0 / trained.sum()),
    "token-sum": lambda trained, length_norm: np.ones(len(trained)),
    "seq-mean-token-sum": lambda trained, length_norm: np.full(len(trained), 1.0 / len(trained)),
    "seq-mean-token-mean": lambda trained, length_norm: 1.0 / (len(trained) * trained),
    "seq-mean-token-sum-norm": lambda trained, length_norm: np.full(len(trained), 1.0 / (len(trained) * length_norm)),
}


def weights(rows: Sequence[AnyRow], aggregation: str, length_norm: int) -> list[float]:
    """Return, for each row of a mini-batch, the share of each of its trained tokens in the loss; 0 for a row without any.

    "Sequences" are rows with at least one trained token. Example, 1 and 3 trained tokens, seq-mean-token-mean -> [1/2, 1/6]
    """
    assert length_norm > 0, f"length_norm {length_norm}"
    trained = np.array([row.trained for row in rows], dtype=np.float64)
    counts = trained > 0
    shares = np.zeros(len(rows), dtype=np.float64)
    if counts.any():
        shares[counts] = AGGREGATIONS[aggregation](trained[counts], length_norm)
    return [float(share) for share in shares]


def pack(rows: Rows, indices: Sequence[int], row_weights: Weights | None = None, *, packing: bool = True) -> MicroBatch:
    """Pack the rows at `indices`, in that order, into one stream. `row_weights`: one weight per index; without it all weights are 0, for
    passes that do not read them. Without `packing`, each row is padded to the longest of them."""
    chosen = [rows[index] for index in indices]
    assert chosen, "a micro-batch without rows"
    for row in chosen:
        assert len(row.mask) == len(row.ids), f"{len(row.mask)} mask entries for {len(row.ids)} tokens"
        assert not row.mask[:1].any(), "the first token of a row has nothing before it to be predicted from"
    tokens = np.array([row.tokens for row in chosen], dtype=np.int64)
    lengths = tokens if packing else np.full_like(tokens, tokens.max())
    positions = np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])
    places = np.flatnonzero(positions < np.repeat(tokens, lengths))  # positions in the stream that are not pads
    ids = np.full(len(positions), PAD, dtype=np.int64)
    ids[places] = np.concatenate([row.ids for row in chosen])
    trained = places[np.concatenate([row.mask for row in chosen])].astype(np.int64)
    trained_row = np.repeat(np.arange(len(chosen), dtype=np.int64), lengths)[trained]
    per_token: dict[str, Any] = {name: _gather(chosen, name) for name in PER_TOKEN_FIELDS}
    return MicroBatch(
        ids=ids,
        positions=positions,
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        rows=tuple(int(index) for index in indices),
        trained=trained,
        trained_row=trained_row,
        weights=np.array([row_weights[index] if row_weights else 0.0 for index in indices], dtype=np.float64)[trained_row],
        fresh=np.array([row.lag == 0 for row in chosen], dtype=np.bool_)[trained_row],
        pad_tokens=int((lengths - tokens).sum()),
        **per_token,
    )


def _gather(rows: Sequence[Row], name: str) -> np.ndarray | None:
    arrays = [getattr(row, name) for row in rows]
    missing = sum(array is None for array in arrays)
    if missing == len(arrays):
        return None
    assert missing == 0, f"{missing} of {len(arrays)} rows lack {name}"
    for row, array in zip(rows, arrays, strict=True):
        assert len(array) == row.tokens, f"{len(array)} {name} for {row.tokens} tokens"
    return np.concatenate([array[row.mask] for row, array in zip(rows, arrays, strict=True)])


def plan_minibatch(
    rows: Sequence[AnyRow], indices: Sequence[int], aggregation: str, length_norm: int, micro: MicroSizing, *,
    advantage_alone: bool = False, workers: int = 1,
) -> BatchPlan:  # fmt: skip
    """Plan the rows at `indices` as one optimizer step, split into micro-batches for this many workers, largest first. `advantage_alone`:
    whether only rows with an advantage are packed, because others add nothing to the gradient; all rows count in the weights.

    If no row has a trained token, trained_tokens is 0 and the micro-batches have empty weights: the loss is 0.
    """
    own = [rows[index] for index in indices]
    row_weights = weights(own, aggregation, length_norm)
    taught = with_advantage(own) if advantage_alone else list(range(len(own)))
    silent = bool(own) and not taught
    places = [shortest(own)] if silent else taught
    micro_batches = tuple(
        tuple(indices[places[place]] for place in chosen) for chosen in micro.schedule([own[place].tokens for place in places], workers)
    )
    return BatchPlan(
        micro_batches,
        weights={indices[place]: row_weights[place] for place in places},
        trained_tokens=sum(own[place].trained for place in places),
        silent=silent,
    )


def pack_plan(rows: Rows, plan: BatchPlan, *, packing: bool = True) -> MiniBatch:
    micro_batches = tuple(pack(rows, indices, plan.weights, packing=packing) for indices in plan.micro_batches)
    return MiniBatch(micro_batches, plan.trained_tokens, plan.silent)


def minibatch(rows: Sequence[Row], aggregation: str, length_norm: int, micro: MicroSizing, *, advantage_alone: bool = False) -> MiniBatch:
    """Plan and pack the rows of one optimizer step."""
    plan = plan_minibatch(rows, range(len(rows)), aggregation, length_norm, micro, advantage_alone=advantage_alone)
    return pack_plan(rows, plan, packing=micro.packing)


def with_advantage(rows: Sequence[AnyRow]) -> list[int]:
    """Return the indices of rows with an advantage other than 0."""
    return [place for place, row in enumerate(rows) if row.teaches]


def shortest(rows: Sequence[AnyRow]) -> int:
    """Return the index of the shortest row that is trained on. If no row has an advantage, only this row is computed, so that the optimizer
    still makes its step, by momentum."""
    trained = [place for place, row in enumerate(rows) if row.trained]
    return min(trained or range(len(rows)), key=lambda place: (rows[place].tokens, place))


def scatter(rows: Sequence[Row], plan: Sequence[Sequence[int]], values: Sequence[np.ndarray], field: str) -> list[Row]:
    """Put one number per trained token of each micro-batch back into the rows, as `field`, aligned with `ids`.

    `field` is one of ANNOTATED_FIELDS. The inverse of packing: every row must be in exactly one of the micro-batches.
    """
    assert field in ANNOTATED_FIELDS, f"a row has no per-token field {field}"
    found = numbers_of_rows(rows, plan, values)
    assert len(found) == len(rows), f"{len(found)} of {len(rows)} rows were packed"
    return [replace(row, **{field: found[index]}) for index, row in enumerate(rows)]  # type: ignore[arg-type]


def numbers_of_rows(rows: Rows, plan: Sequence[Sequence[int]], values: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
    """Return the numbers of each row that is in a micro-batch, aligned with its `ids`."""
    found: dict[int, np.ndarray] = {}
    for indices, numbers in zip(plan, values, strict=True):
        counts = [rows[index].trained for index in indices]
        assert len(numbers) == sum(counts), f"{len(numbers)} values for {sum(counts)} trained tokens"
        for index, own in zip(indices, np.split(numbers, np.cumsum(counts)[:-1]), strict=True):
            assert index not in found, f"row {index} was packed twice"
            found[index] = np.zeros(rows[index].tokens, dtype=np.float32)
            found[index][rows[index].mask] = own
    return found
