"""Many steps of decoding without the host in between.

Enters: the rows of a pass (one sample each: its newest token, its blocks, its seed) and how many steps to make. Leaves: the tokens and
log-probs that each row drew, up to the end token or the longest response. Guaranteed: the same tokens as one pass after another; on CUDA
one captured graph per batch size runs a step (model, head, sampling and stop detection), captured once and used for as long as the engine
lives, although weights change in place and the cache moves; the host waits once for all steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from fulltilt.kernels.paged_attention import workspace_numbers
from fulltilt.kernels.sampling import EMPTY, RUNNING, Progress, Workspace, finish, sample
from fulltilt.model.attention import Decode, LayerShape
from fulltilt.model.forward import hidden_states
from fulltilt.model.heads import Head
from fulltilt.rollout.sampler import Sampling

BURST = 16  # steps between two looks of the host
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)  # of batches that graphs are made for
TABLE_STEP = 64  # blocks by which the table grows


@dataclass(frozen=True)
class DecodeRow:
    """One sample that decodes."""

    token: int  # the newest, whose keys and values are not in the cache yet
    position: int  # its place in prompt + response
    drawn: int  # tokens of the response so far
    seed: np.uint64
    blocks: Sequence[int]


@dataclass(frozen=True, eq=False)
class Drawn:
    tokens: list[int]
    logprobs: list[float]


class Decoder:
    def __init__(
        self, model: PreTrainedModel, layers: Sequence[LayerShape], end_tokens: frozenset[int], block_tokens: int, max_seqs: int, *,
        graphs: bool,
    ) -> None:  # fmt: skip
        self.model = model
        self.head = Head.of(model)
        self.layers = layers
        self.block_tokens = block_tokens
        self.graphs = graphs
        self.rows = max_seqs
        device = model.device
        self._ends = torch.tensor(sorted(end_tokens) or [-1], dtype=torch.int64, device=device)
        self._progress = Progress.make(max_seqs, BURST, device)
        self._seeds = torch.zeros(max_seqs, dtype=torch.int64, device=device)
        self._temperature = torch.ones(max_seqs, dtype=torch.float32, device=device)
        self._top_k = torch.zeros(max_seqs, dtype=torch.int32, device=device)
        self._top_p = torch.ones(max_seqs, dtype=torch.float32, device=device)
        self._bases = torch.zeros(len(layers), 2, 1, dtype=torch.int64, device=device)
        self._table = torch.zeros(max_seqs, 0, dtype=torch.int32, device=device)
        self._caches: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] = ((), ())
        self._workspace: torch.Tensor | None = None
        self._space: Workspace | None = None
        self._captured: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self.captures = 0

    def use_cache(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """The cache's tensors, which may lie elsewhere than the last time: captured graphs read their addresses from the device."""
        self._caches = (keys, values)
        addresses = [[[key.data_ptr()], [value.data_ptr()]] for key, value in zip(keys, values, strict=True)]
        self._bases.copy_(torch.tensor(addresses, dtype=torch.int64))

    def reach(self, tokens: int) -> None:
        """Make room for samples of that many tokens."""
        blocks = -(-(tokens + BURST) // self.block_tokens)
        if blocks <= self._table.shape[1]:
            return
        blocks = -(-blocks // TABLE_STEP) * TABLE_STEP
        self._table = torch.zeros(self.rows, blocks, dtype=torch.int32, device=self.model.device)
        self._captured.clear()  # they hold the old table
        self._workspace = None

    @torch.no_grad()
    def run(self, rows: Sequence[DecodeRow], steps: int, sampling: Sampling) -> list[Drawn]:
        size = next((size for size in SIZES if size >= len(rows)), len(rows)) if self.graphs else len(rows)
        size = min(size, self.rows)
        self._fill(rows, size, sampling)
        restricted = sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)
        step = self._graph(size, restricted) if self.graphs else None
        for _ in range(steps):
            if step is None:
                self._step(size, restricted)
            else:
                step.replay()
        return self._read(rows)

    def _fill(self, rows: Sequence[DecodeRow], size: int, sampling: Sampling) -> None:
        """Everything that a step reads, in one go."""
        numbers = np.zeros((5, size), dtype=np.int64)
        numbers[0] = EMPTY
        numbers[:, : len(rows)] = [
            [RUNNING] * len(rows),
            *zip(*((r.drawn, r.position, r.token, r.seed.view(np.int64)) for r in rows), strict=True),
        ]
        table = np.zeros((size, self._table.shape[1]), dtype=np.int32)
        for place, row in enumerate(rows):
            table[place, : len(row.blocks)] = row.blocks
        device = self.model.device
        states, drawn, positions, inputs, seeds = torch.from_numpy(numbers).to(device, non_blocking=True).unbind(0)
        progress = self._progress
        progress.states[:size].copy_(states)
        progress.lengths[:size].copy_(drawn)
        progress.positions[:size].copy_(positions)
        progress.inputs[:size].copy_(inputs)
        progress.limits[:size].fill_(sampling.max_new_tokens)
        self._seeds[:size].copy_(seeds)
        self._table[:size].copy_(torch.from_numpy(table))
        self._temperature.fill_(sampling.temperature)
        self._top_k.fill_(sampling.top_k)
        self._top_p.fill_(sampling.top_p)

    def _step(self, size: int, restricted: bool) -> None:
        progress, block = self._progress, self.block_tokens
        running, positions = progress.states[:size] == RUNNING, progress.positions[:size]
        place = self._table[:size].gather(1, (positions // block)[:, None])[:, 0].long() * block + positions % block
        keys, values = self._caches
        context = Decode(
            keys=keys,
            values=values,
            key_bases=[base[0] for base in self._bases],
            value_bases=[base[1] for base in self._bases],
            slots=torch.where(running, place, -1),
            table=self._table[:size],
            lengths=torch.where(running, positions + 1, 0).int(),
            longest=self._table.shape[1] * block,
            block_tokens=block,
            workspace=self._workspace,
        )
        hidden = hidden_states(self.model, progress.inputs[:size], positions, context)
        logits = self.head.logits(hidden).float()
        narrowed = {"top_k": self._top_k[:size], "top_p": self._top_p[:size]} if restricted else {}
        tokens, logprobs = sample(
            logits, self._seeds[:size], progress.lengths[:size], self._temperature[:size], workspace=self._space, **narrowed
        )
        finish(tokens, logprobs, self._ends, progress, torch.arange(size, device=tokens.device))

    def _graph(self, size: int, restricted: bool) -> torch.cuda.CUDAGraph:
        """The captured step of that size. Before it is captured it runs on empty rows, so that kernels are compiled by then."""
        found = self._captured.get((size, restricted))
        if found is not None:
            return found
        self._prepare()
        states = self._progress.states.clone()
        self._progress.states.fill_(EMPTY)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._step(size, restricted)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._step(size, restricted)
        self._progress.states.copy_(states)
        self._captured[size, restricted] = graph
        self.captures += 1
        return graph

    def _prepare(self) -> None:
        """What all graphs share: a pool for their temporaries, and the kernels' workspaces."""
        if self._workspace is not None:
            return
        longest, itemsize = self._table.shape[1] * self.block_tokens, self.model.dtype.itemsize
        heads = self.model.config.get_text_config().num_attention_heads
        sizes = [size for size in SIZES if size < self.rows] + [self.rows]
        numbers = max(
            workspace_numbers(size, heads, shape.key_heads, shape.head_width, itemsize, longest)
            for size in sizes
            for shape in set(self.layers)
        )
        self._workspace = torch.empty(max(1, numbers), dtype=torch.float32, device=self.model.device)
        self._space = Workspace.make(self.rows, len(self.head.weight), self.model.device)
        self._pool = torch.cuda.graph_pool_handle()

    def _read(self, rows: Sequence[DecodeRow]) -> list[Drawn]:
        progress, count = self._progress, len(rows)
        lengths, tokens, logprobs = (tensor[:count].cpu() for tensor in (progress.lengths, progress.tokens, progress.logprobs))
        found = []
        for row, length, own, values in zip(rows, lengths.tolist(), tokens.tolist(), logprobs.tolist(), strict=True):
            columns = [place % BURST for place in range(row.drawn, length)]
            found.append(Drawn([own[column] for column in columns], [values[column] for column in columns]))
        return found
