"""transformers' `generate`, as a peer.

Enters: a model's source, a device, requests. Leaves: seconds for all of them at a setting (samples in a batch, threads). Guaranteed: the
same work as ours, the sampled tokens' log-probs included; a sample that has its tokens is done, and a batch ends with its last one;
batches are cut in prompt order, for lengths are not known beforehand.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging as transformers_logging

from fulltilt.bench import shapes
from fulltilt.bench.workload import Requests
from fulltilt.cluster.sizes import THREADS
from fulltilt.loop.opening import what_stays

PAD = 0
CUTS = (1, 2, 4)  # batches that the workload is cut into, each of which is tried


@dataclass(frozen=True)
class Setting:
    batch: int  # samples in a batch: prompts with all their samples
    threads: int | None  # of torch; None on CUDA, where they hardly matter

    def as_json(self) -> dict[str, Any]:
        return {"batch": self.batch} | ({"threads": self.threads} if self.threads else {})

    def words(self) -> str:
        return f"batch {self.batch}" + (f", threads {self.threads}" if self.threads else "")


class Lengths(StoppingCriteria):
    """Each sample ends when it has its tokens."""

    def __init__(self, prompt_width: int, lengths: torch.Tensor) -> None:
        self.ends = prompt_width + lengths

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self.ends


class SampledLogprobs(LogitsProcessor):
    """Log-probs of what was sampled, read off one step later: the logits of all steps need not be kept."""

    def __init__(self) -> None:
        self.columns: list[torch.Tensor] = []
        self._scores: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.read(input_ids[:, -1])
        self._scores = scores
        return scores

    def read(self, tokens: torch.Tensor) -> None:
        if self._scores is not None:
            self.columns.append(self._scores.gather(1, tokens[:, None])[:, 0] - self._scores.logsumexp(dim=-1))


class HuggingFace:
    def __init__(self, source: shapes.Source, device: torch.device) -> None:
        transformers_logging.set_verbosity_error()
        self.device = device
        self.model = shapes.theirs(source, device)
        self.model.generation_config = GenerationConfig()  # what a folder brings, end tokens among it, would fill in what ours leaves out

    def settings(self, requests: Requests, kv_bytes_per_token: int, kv_bytes: int | None) -> list[Setting]:
        """Batches to try, whose cache may grow to no more than `kv_bytes`."""
        workload = requests.workload
        per_prompt = workload.samples * requests.positions * kv_bytes_per_token
        most = workload.prompts if kv_bytes is None else max(1, kv_bytes // per_prompt)
        sizes = sorted({min(-(-workload.prompts // cuts), most) for cuts in CUTS}, reverse=True)
        return [Setting(size * workload.samples, THREADS if self.device.type == "cpu" else None) for size in sizes]

    def variants(self, best: Setting) -> list[Setting]:
        """What else to try with the best batch: one thread, where their number is not given and a small model may gain by it."""
        open_choice = best.threads is not None and best.threads > 1 and "OMP_NUM_THREADS" not in os.environ
        return [replace(best, threads=1)] if open_choice else []

    def run(self, requests: Requests, setting: Setting) -> float:
        """Seconds for all requests, batch after batch."""
        if setting.threads:
            torch.set_num_threads(setting.threads)
        torch.manual_seed(requests.seed)
        samples: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        prompts = setting.batch // requests.workload.samples
        with what_stays():
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for first in range(0, len(requests.prompts), prompts):
                samples |= self._batch(requests, first, first + prompts)
            seconds = time.perf_counter() - begin
        for name, (ids, logprobs) in samples.items():
            assert len(ids) == len(logprobs) == requests.lengths[name]
        assert samples.keys() == requests.lengths.keys()
        return seconds

    def release(self) -> None:
        """Give memory to whoever is measured next."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _batch(self, requests: Requests, first: int, end: int) -> Mapping[tuple[int, int], tuple[np.ndarray, np.ndarray]]:
        rows = [(prompt, index) for prompt in requests.prompts[first:end] for index in range(requests.workload.samples)]
        names = [(prompt.uid, index) for prompt, index in rows]
        width = max(len(prompt.ids) for prompt, _ in rows)
        ids, mask = np.full((len(rows), width), PAD, dtype=np.int64), np.zeros((len(rows), width), dtype=np.int64)
        for row, (prompt, _) in enumerate(rows):
            ids[row, width - len(prompt.ids) :] = prompt.ids
            mask[row, width - len(prompt.ids) :] = 1
        lengths = torch.tensor([requests.lengths[name] for name in names], device=self.device)
        logprobs = SampledLogprobs()
        sequences = self.model.generate(
            torch.from_numpy(ids).to(self.device),
            attention_mask=torch.from_numpy(mask).to(self.device),
            generation_config=GenerationConfig(
                do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=requests.longest_response, pad_token_id=PAD,
            ),
            logits_processor=LogitsProcessorList([logprobs]),
            stopping_criteria=StoppingCriteriaList([Lengths(width, lengths)]),
        )  # fmt: skip
        logprobs.read(sequences[:, -1])
        tokens, values = sequences[:, width:].cpu().numpy(), torch.stack(logprobs.columns, dim=1).cpu().numpy()
        sizes = lengths.tolist()
        return {name: (tokens[row, :size], values[row, :size]) for row, (name, size) in enumerate(zip(names, sizes, strict=True))}
