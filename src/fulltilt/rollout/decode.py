"""Many steps of decoding without the host in between.

Enters: the rows of a pass (one sample each: its newest token, its blocks, its seed) and how many steps to make. Leaves: the tokens and
log-probs that each row drew, up to the end token or the longest response. Guaranteed: the tokens are the same as if the host looked after
every step; on CUDA one captured graph per batch size runs a step (model, head, sampling and stop detection), captured once and used for as
long as the engine lives, although weights change in place and the cache moves; the host waits once for all steps, and only when it asks for
their results: by then more steps of the same rows may be running. A model that no graph can hold runs the same steps eagerly from then on,
and `eager_reason` says why. Members of a tensor-parallel group, which run the same steps, all have graphs, or none has.

    decoder.start(rows, sampling)
    first = decoder.launch(16)
    decoder.give(blocks)  # those that the rows need for more steps
    second = decoder.launch(16)
    first(), second()  # the drawn tokens, in the order of the launches
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from fulltilt.blame import is_out_of_memory
from fulltilt.footprint import BURST, TABLE_STEP, sizes_up_to
from fulltilt.kernels.sampling import EMPTY, RUNNING, DecodeProgress, finish, sample
from fulltilt.model.arrays import to_device, to_host
from fulltilt.model.attention import Decode
from fulltilt.model.experts import used_by_a_token, why_not_captured
from fulltilt.model.forward import hidden_states
from fulltilt.model.heads import Head
from fulltilt.records import RunWarning, UserError
from fulltilt.rollout.engine import EngineContext
from fulltilt.rollout.sampler import Sampling
from fulltilt.words import first_line

SHORTEST = 4  # the least number of steps before the host looks at the results
# Parameters times rows times steps: some 20 ms of matrix products on the fastest devices, enough for the host to process the previous
# steps. A sample that has ended is computed until the host looks, so more would be wasted.
WORK = 6.5e12


class DecodeRow(NamedTuple):  # a dataclass takes three times as long to create, and the device waits for a thousand of them
    """One sample that decodes."""

    token: int  # the newest token, whose keys and values are not in the cache yet
    position: int  # the token's place in prompt + response
    drawn: int  # number of tokens of the response so far
    seed: int
    blocks: Sequence[int]
    forced: int | None = None  # draw exactly this many tokens, whether or not there are end tokens among them


Drawn = tuple[list[int], list[float]]  # the new tokens of a row, and their log-probs


@dataclass(frozen=True, eq=False)
class CapturedStep:
    graph: torch.cuda.CUDAGraph
    count: Callable[[], None]  # counts the bytes of its collectives once

    def run(self) -> None:
        self.graph.replay()
        self.count()


class Decoder:
    def __init__(self, context: EngineContext) -> None:
        model, limits = context.model, context.limits
        rows, device = limits.max_seqs, model.device
        self.model, self.head, self.members = model, Head.of(model), context.members
        self.block_tokens, self.rows = limits.block_tokens, rows
        self.graphs, self.required = limits.cuda_graphs, limits.graphs_required
        # Of the largest member of a tensor-parallel group, because all members must run equally many steps.
        self._parameters = self._most(sum(used_by_a_token(parameter, model.config) for parameter in model.parameters()))
        self._sizes = sizes_up_to(rows)
        self.overlaps = device.type != "cpu"  # steps run while the host works, so it is worth launching ahead
        zeros = partial(torch.zeros, device=device)
        self._end_tokens = torch.tensor(sorted(context.end_tokens) or [-1], dtype=torch.int64, device=device)
        self._ends = self._end_tokens.repeat(rows, 1)  # end tokens of each row: none if its length is forced
        self._progress = DecodeProgress.make(rows, BURST, device)
        self._seeds, self._temperature = zeros(rows, dtype=torch.int64), zeros(rows, dtype=torch.float32)
        self._top_k, self._top_p = zeros(rows, dtype=torch.int32), zeros(rows, dtype=torch.float32)
        self._bases = zeros(len(context.layers), 2, 1, dtype=torch.int64)
        self._table = zeros(rows, 0, dtype=torch.int32)
        self._caches: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] = ((), ())
        self._pool: Any = None  # a handle of the memory for all graphs' temporaries
        self._captured: dict[tuple[int, bool], CapturedStep] = {}
        self.captures = 0
        self.eager_reason: str | None = None  # why there are no graphs although the settings ask for them
        self._sampling, self._count, self._size, self._taken = Sampling(), 0, 0, np.zeros(0, dtype=np.int64)  # all four belong to the batch
        obstacle = why_not_captured(model) or (self.head.part.not_captured if self.head.part else None)
        if self.graphs and obstacle is not None:
            self._give_up_graphs(obstacle)
        self.reach(limits.longest)

    def use_cache(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Set the cache's tensors. They may have moved since the last time: captured graphs read their addresses from the device."""
        self._caches = (keys, values)
        addresses = [[[key.data_ptr()], [value.data_ptr()]] for key, value in zip(keys, values, strict=True)]
        self._bases.copy_(torch.tensor(addresses, dtype=torch.int64))

    def reach(self, tokens: int) -> None:
        """Make the block table large enough for samples of this many tokens."""
        blocks = -(-(tokens + 2 * BURST) // self.block_tokens)  # the second of two launches may go beyond the end
        if blocks <= self._table.shape[1]:
            return
        blocks = -(-blocks // TABLE_STEP) * TABLE_STEP
        self._table = torch.zeros(self.rows, blocks, dtype=torch.int32, device=self.model.device)
        self._captured.clear()  # they hold the old table
        self._pool = None

    def size_for(self, rows: int) -> int:
        """Return how many rows a step computes for this many samples."""
        return next(size for size in self._sizes if size >= rows) if self.graphs else rows

    def burst(self, rows: int) -> int:
        """Return the number of steps until the host looks at this many rows. If steps do not overlap with the host, it looks rarely, since
        each look takes time."""
        return max(SHORTEST, min(BURST, int(WORK / max(1, self._parameters * rows)))) if self.overlaps else BURST

    def start(self, rows: Sequence[DecodeRow], sampling: Sampling) -> None:
        """Start a new batch: copy everything that a step reads to the device, in few transfers. The previous batch's results are no longer
        valid."""
        size, count = self.size_for(len(rows)), len(rows)
        tokens, positions, drawn, seeds, blocks, forced = zip(*rows, strict=True)
        self._sampling, self._count, self._size = sampling, count, size
        self._taken = np.array(drawn)  # number of tokens of each response that the host already has
        numbers = np.zeros((7, size), dtype=np.int64)
        numbers[0, :count], numbers[0, count:] = RUNNING, EMPTY
        numbers[1, :count] = [length or sampling.max_new_tokens for length in forced]
        numbers[2:5, :count] = drawn, positions, tokens
        numbers[5, :count] = np.array(seeds, dtype=np.uint64).view(np.int64)
        numbers[6, :count] = [length is not None for length in forced]
        table = np.zeros((size, self._table.shape[1]), dtype=np.int32)
        for place, own in enumerate(blocks):
            table[place, : len(own)] = own
        progress, there = self._progress, to_device(numbers, self.model.device)
        targets = (progress.states, progress.limits, progress.lengths, progress.positions, progress.inputs, self._seeds)
        for target, column in zip(targets, there, strict=False):
            target[:size].copy_(column)
        self._ends[:size] = torch.where(there[6, :, None] > 0, -1, self._end_tokens)
        self._table[:size].copy_(to_device(table, self.model.device))
        for setting, number in ((self._temperature, sampling.temperature), (self._top_k, sampling.top_k), (self._top_p, sampling.top_p)):
            setting.fill_(number)

    @torch.no_grad()
    def launch(self, steps: int) -> Callable[[], list[Drawn]]:
        """Start at most BURST steps on the device. Returns a function that waits for them and returns the drawn tokens; on a CPU the steps
        run in that function."""
        assert 0 < steps <= BURST
        sampling = self._sampling
        restricted = sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)
        step = self._graph(self._size, restricted) if self.graphs else None
        if self.model.device.type == "cpu":
            return partial(self._run_on_cpu, steps, restricted)
        for _ in range(steps):
            if step is None:
                self._step(self._size, restricted)
            else:
                step.run()
        # Copied after these steps and before any others, because later steps overwrite the ring buffers.
        return partial(self._take, self._results())

    def give(self, blocks: Sequence[tuple[int, int, int]]) -> None:
        """Give rows of the batch more blocks, as (row, place in its table, block), for the next launches."""
        if blocks:
            rows, places, numbers = to_device(np.array(blocks, dtype=np.int64).T, self.model.device).unbind(0)
            self._table[rows, places] = numbers.int()

    @torch.no_grad()
    def _run_on_cpu(self, steps: int, restricted: bool) -> list[Drawn]:
        """Run steps on a CPU. Rows that have ended are left out of each step: looking is free there, and computing is not."""
        sampling = self._sampling
        narrowed = {"top_k": sampling.top_k, "top_p": sampling.top_p} if restricted else {}
        for _ in range(steps):
            rows = (self._progress.states[: self._count] == RUNNING).nonzero()[:, 0]
            if not len(rows):
                break
            advance = partial(self._advance, rows, rows, temperature=sampling.temperature, **narrowed)
            self.members.make(advance, self.stand_in, [len(rows)])
        return self._take(self._results())

    def _step(self, size: int, restricted: bool) -> None:
        """Run one step as a graph captures it: everything that may change is read from the device."""
        rows = slice(0, size)
        narrowed = {"top_k": self._top_k[rows], "top_p": self._top_p[rows]} if restricted else {}
        self._advance(rows, torch.arange(size, device=self.model.device), temperature=self._temperature[rows], **narrowed)

    def _advance(self, rows: slice | torch.Tensor, numbers: torch.Tensor, **sampling: Any) -> None:
        """Run one step of `rows`, whose row numbers are `numbers`."""
        self.members.begin_pass()
        progress, block = self._progress, self.block_tokens
        running, positions, table = progress.states[rows] == RUNNING, progress.positions[rows], self._table[rows]
        place = table.gather(1, (positions // block)[:, None])[:, 0].long() * block + positions % block
        context = Decode(
            caches=self._layers(),
            slots=torch.where(running, place, -1),
            table=table,
            lengths=torch.where(running, positions + 1, 0).int(),
            block_tokens=block,
        )
        hidden = hidden_states(self.model, progress.inputs[rows], positions, context)
        shape = self.head.shape
        tokens, logprobs = sample(
            self.head.product(hidden), self._seeds[rows], progress.lengths[rows], scale=shape.scale, cap=shape.cap, **sampling
        )
        finish(tokens, logprobs, self._ends, progress, numbers)

    def _layers(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
        return [(key, value, *bases) for key, value, bases in zip(*self._caches, self._bases, strict=True)]

    @torch.no_grad()
    def stand_in(self, rows: int) -> None:
        """Run a step over a filler of one row, with the collectives of a step of this many rows. The cache's contents are meaningless
        afterwards."""
        nothing = torch.zeros(1, dtype=torch.int64, device=self.model.device)
        context = Decode(
            caches=self._layers(),
            slots=nothing,
            table=torch.zeros_like(self._table[:1]),
            lengths=torch.ones_like(nothing, dtype=torch.int32),
            block_tokens=self.block_tokens,
        )
        with self.members.standing_in(rows):
            hidden = hidden_states(self.model, nothing, nothing, context)
            self.head.product(hidden.expand(rows, -1))

    def sizes(self, rows: int, steps: int) -> list[int]:
        """Return the rows of each step that `launch` runs itself; on a CPU, its returned function runs the steps."""
        return [] if self.model.device.type == "cpu" else [self.size_for(rows)] * steps

    def _most(self, number: int) -> int:
        """Return the largest of the numbers of all members of a tensor-parallel group, if there is one."""
        if self.head.part is None:
            return number
        found = torch.tensor([number], dtype=torch.int64, device=self.model.device)
        self.head.part.most(found)
        return int(found)

    def _graph(self, size: int, restricted: bool) -> CapturedStep | None:
        """Return the captured step of that size, or None if it cannot be captured: then no graph is tried again and nothing else has
        changed."""
        found = self._captured.get((size, restricted))
        if found is not None:
            return found
        states, reason = self._progress.states.clone(), None
        self._progress.states.fill_(EMPTY)
        try:
            self._captured[size, restricted] = self._capture_with_room(size, restricted)
        except torch.OutOfMemoryError:  # not the model's fault: the engine continues with fewer samples at once
            raise
        except RuntimeError as error:  # the type of all errors of torch.cuda
            reason = f"a step of the model cannot be captured: {first_line(error)}"
        finally:
            self._progress.states.copy_(states)
        failed = self._most(int(reason is not None))  # members with graphs pad batches, and would compute other rows than members without
        if failed:  # outside the handler, whose error still holds memory to be freed
            self._give_up_graphs(reason or "a step of the model cannot be captured by another member of the tensor-parallel group")
            return None
        self.captures += 1
        return self._captured[size, restricted]

    def _capture_with_room(self, size: int, restricted: bool) -> CapturedStep:
        """Capture, if needed after freeing memory. The members of a tensor-parallel group run the step together, so none may try twice, or
        continue alone with fewer samples: they free memory first. If memory outside torch's allocator is used up, for the graph itself or
        its kernels, fewer samples would not help, and a plain RuntimeError is raised."""
        if self.head.part is None:
            try:
                return self._capture(size, restricted)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
        gc.collect()  # outside the handler, whose error still holds memory
        torch.cuda.empty_cache()
        try:
            return self._capture(size, restricted)
        except torch.OutOfMemoryError as error:
            if self.head.part is None:
                raise
            raise UserError(
                f"rollout.kv_bytes: no memory is left next to the KV cache to capture decoding of {size} samples: {first_line(error)}. "
                "Give the cache fewer bytes, lower rollout.max_seqs, or set rollout.cuda_graphs = false"
            ) from error

    def _capture(self, size: int, restricted: bool) -> CapturedStep:
        """Run the step on empty rows, then capture it. The first runs compile the kernels, and find waits for the device at a time when
        they are only errors: inside a capture they would break the stream."""
        graph, part = torch.cuda.CUDAGraph(), self.head.part  # a RuntimeError where there is no CUDA device
        outside, side = torch.cuda.current_stream(), capture_stream()
        side.wait_stream(outside)
        try:
            with torch.cuda.stream(side):
                self._step(size, restricted)
                with refuse_waits():
                    self._step(size, restricted)
        finally:
            outside.wait_stream(side)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        counting = contextlib.nullcontext(count_nothing) if part is None else part.counted_apart()
        try:
            with counting as count, torch.cuda.graph(graph, pool=self._pool, stream=side):
                self._step(size, restricted)
        except RuntimeError as error:
            torch.cuda.set_stream(outside)  # torch leaves an invalid capture's stream as the current one
            try:
                give_up_capture(graph, self._pool)
            finally:
                if not self._captured:  # torch refuses to record into a pool that no graph uses any more
                    self._pool = None
            # An invalid capture fails once more when it ends; the first failure gives the cause.
            first = error.__context__ or error
            raise (torch.OutOfMemoryError if isinstance(first, torch.OutOfMemoryError) else RuntimeError)(str(first)) from error
        return CapturedStep(graph, count)

    def _give_up_graphs(self, reason: str) -> None:
        if self.required:
            raise UserError(
                f"rollout.cuda_graphs: true, but no graph can hold the model: {reason}. Remove the key to decode without graphs"
            )
        self.graphs, self.eager_reason = False, reason
        self._captured.clear()
        self._pool = None
        torch.cuda.empty_cache()  # memory that only graphs used
        warnings.warn(f"rollout.cuda_graphs: decoding runs without graphs, and slower: {reason}", RunWarning, stacklevel=2)

    def _results(self) -> list[Callable[[], np.ndarray]]:
        progress = self._progress
        return [to_host(there[: self._count]) for there in (progress.lengths, progress.tokens, progress.logprobs)]

    def _take(self, results: Sequence[Callable[[], np.ndarray]]) -> list[Drawn]:
        lengths, tokens, logprobs = (arrive() for arrive in results)
        columns = (self._taken[:, None] + np.arange(BURST)) % BURST  # columns of the ring buffers, the first new token in front
        counts = (lengths - self._taken).tolist()
        self._taken = lengths.astype(np.int64)
        rings = (np.take_along_axis(ring, columns, 1).tolist() for ring in (tokens, logprobs))
        return [(own[:count], values[:count]) for count, own, values in zip(counts, *rings, strict=True)]


def count_nothing() -> None:
    """Do nothing, for a step without collectives."""


@cache
def capture_stream() -> torch.cuda.Stream:
    """Return one stream for all captures: each stream that ran a matrix product keeps a workspace of tens of MiB."""
    return torch.cuda.Stream()


@contextlib.contextmanager
def refuse_waits() -> Iterator[None]:
    """Raise a RuntimeError wherever the host would wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it does not know every wait; a capture finds the others
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def give_up_capture(graph: torch.cuda.CUDAGraph, pool: tuple[int, int]) -> None:
    """Free the memory of a failed capture, and clean up after an invalid capture in some versions of torch. If torch's allocator has run
    out of memory, the capture ends normally, and its graph holds the pool: releasing the pool twice would end the process."""
    try:
        graph.pool()
    except RuntimeError:  # the capture has not ended, and its graph holds nothing
        leave_invalid_capture(pool)
    else:
        graph.reset()


def leave_invalid_capture(pool: tuple[int, int]) -> None:
    device = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # some versions keep recording into the pool; the others have stopped by themselves
        torch._C._cuda_endAllocateToPool(device, pool)
    if torch.__version__ < "2.12":  # later versions free the pool's memory themselves, and freeing it twice is an error
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_releasePool(device, pool)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):  # success ends the capture mode of the device's random generator
        torch.zeros(1, device="cuda")
