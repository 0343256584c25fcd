"""transformers' `generate` as an engine: slow, but an independent check of any other engine.

Enters: prompts, how to sample, and optionally the number of tokens of each sample. Leaves: groups, batch after batch, in prompt order.
Guaranteed: the guarantees of every engine (rollout/engine.py). It runs its own model, unmodified from transformers, into which `sync`
copies the trainer's weights. Unlike the native engine's, its samples depend on how prompts are cut into batches (`max_seqs`). A finished
sample waits for the last one of its batch; batches are cut in prompt order, since lengths are not known beforehand.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.utils import logging as transformers_logging

from fulltilt.records import Group, Prompt, Sample
from fulltilt.rollout.engine import Engine, EngineContext, Lengths, Weights
from fulltilt.rollout.sampler import Sampling
from fulltilt.rollout.stats import EngineStats
from fulltilt.rollout.stop_strings import StopStrings
from fulltilt.schema import Config

OBEYS = frozenset({"max_seqs", "log_stats"})
ONE_WORKER = "it draws the samples of a batch together, so that they would change with the number of workers"
PAD = 0


class EndOfSamples(StoppingCriteria):
    """Ends a sample when it has its most tokens or, unless its length is forced, when it has drawn an end token or completed a stop
    string."""

    def __init__(self, width: int, most: torch.Tensor, free: torch.Tensor | None, ends: torch.Tensor, stops: StopStrings) -> None:
        self.width, self.ends_at, self.free, self.end_tokens, self.stops = width, width + most, free, ends, stops

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        done = input_ids.shape[1] >= self.ends_at
        if self.free is not None:
            ended = torch.isin(input_ids[:, -1], self.end_tokens)
            if self.stops.strings:
                ended |= torch.tensor([self.stops.ended(row) for row in input_ids[:, self.width :].tolist()], device=input_ids.device)
            done = done | (ended & self.free)
        return done


class SampledLogprobs(LogitsProcessor):
    """Collects log-probs of the sampled tokens one step later, so that the logits of all steps need not be kept."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature or 1.0
        self.columns: list[torch.Tensor] = []
        self._scores: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.read(input_ids[:, -1])
        self._scores = scores if self.temperature == 1 else scores / self.temperature
        return scores

    def read(self, tokens: torch.Tensor) -> None:
        if self._scores is not None:
            self.columns.append(self._scores.gather(1, tokens[:, None])[:, 0] - self._scores.logsumexp(dim=-1))


class HfEngine(Engine):
    """Generates with an unmodified transformers model, in batches of as many whole groups as `max_seqs` samples allow."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, end_tokens: frozenset[int], max_seqs: int) -> None:
        super().__init__()
        transformers_logging.set_verbosity_error()
        self.model, self.tokenizer, self.end_tokens, self.max_seqs = model, tokenizer, end_tokens, max_seqs
        # Settings of the model's folder, such as end tokens, would otherwise fill in what the call leaves out.
        model.generation_config = GenerationConfig()

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int, lengths: Lengths | None = None) -> Iterator[Group]:
        torch.manual_seed(seed)
        begin = time.perf_counter()
        self.recorder.start(begin, len(prompts) * sampling.samples)
        size = max(1, self.max_seqs // sampling.samples)
        for first in range(0, len(prompts), size):
            groups = self._batch(prompts[first : first + size], first, sampling, lengths or {})
            now = time.perf_counter()
            words = partial(self._describe, min(first + size, len(prompts)), len(prompts))
            self.recorder.add(self._of_batch(groups, now - begin), words)
            begin = now
            yield from groups

    @torch.no_grad()
    def sync(self, version: int, weights: Weights) -> None:
        own = dict(self.model.named_parameters())
        for name, tensor in weights:
            own[name].copy_(tensor)

    def parameters(self) -> Iterable[torch.Tensor]:
        return self.model.parameters()

    def release(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _describe(self, done: int, total: int, *_: EngineStats) -> str:
        stats = self.stats()
        return f"rollout: {done} of {total} prompts after {stats.seconds:.0f} s, {stats.decode_tokens / stats.seconds:.0f} tokens/s"

    def _batch(self, prompts: Sequence[Prompt], first: int, sampling: Sampling, lengths: Lengths) -> list[Group]:
        rows = [(prompt, index) for prompt in prompts for index in range(sampling.samples)]
        width, device = max(len(prompt.ids) for prompt in prompts), self.model.device
        ids, mask = np.full((len(rows), width), PAD, dtype=np.int64), np.zeros((len(rows), width), dtype=np.int64)
        for row, (prompt, _) in enumerate(rows):
            ids[row, width - len(prompt.ids) :] = prompt.ids
            mask[row, width - len(prompt.ids) :] = 1
        forced = [lengths.get((prompt.uid, index)) for prompt, index in rows]
        most = torch.tensor([length or sampling.max_new_tokens for length in forced], device=device)
        free = None if all(forced) else torch.tensor([length is None for length in forced], device=device)
        ends = torch.tensor(sorted(self.end_tokens), dtype=torch.int64, device=device)
        stops, logprobs = StopStrings(self.tokenizer, sampling.stop), SampledLogprobs(sampling.temperature)
        chosen = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p} if sampling.temperature else {}
        sequences = self.model.generate(
            torch.from_numpy(ids).to(device),
            attention_mask=torch.from_numpy(mask).to(device),
            generation_config=GenerationConfig(do_sample=bool(chosen), max_new_tokens=sampling.max_new_tokens, pad_token_id=PAD, **chosen),
            logits_processor=LogitsProcessorList([logprobs]),
            stopping_criteria=StoppingCriteriaList([EndOfSamples(width, most, free, ends, stops)]),
        )
        logprobs.read(sequences[:, -1])
        tokens, values = sequences[:, width:].cpu().numpy(), torch.stack(logprobs.columns, dim=1).float().cpu().numpy()
        samples = [self._sample(index, tokens[row], values[row], forced[row], sampling, stops) for row, (_, index) in enumerate(rows)]
        of_prompt = [tuple(samples[row : row + sampling.samples]) for row in range(0, len(rows), sampling.samples)]
        return [Group(prompt, own, place) for place, (prompt, own) in enumerate(zip(prompts, of_prompt, strict=True), first)]

    def _sample(
        self, index: int, tokens: np.ndarray, logprobs: np.ndarray, forced: int | None, sampling: Sampling, stops: StopStrings
    ) -> Sample:
        if forced is not None:
            return Sample(index, tokens[:forced], logprobs[:forced], "length", stops.whole_text(tokens[:forced].tolist()))
        drawn = tokens[: sampling.max_new_tokens].tolist()
        ends = [place for place, token in enumerate(drawn, 1) if token in self.end_tokens][:1]
        ends += [stopped] if (stopped := stops.first_end(drawn, len(drawn))) else []
        size = min(ends, default=len(drawn))
        return Sample(index, tokens[:size], logprobs[:size], "stop" if ends else "length", stops.text(drawn[:size]))

    def _of_batch(self, groups: Sequence[Group], seconds: float) -> EngineStats:
        drawn = [len(sample.ids) for group in groups for sample in group.samples]
        return EngineStats(
            prefill_tokens=sum(len(group.prompt.ids) * len(group.samples) for group in groups),
            decode_tokens=sum(drawn) - len(drawn),
            passes=max(drawn),
            most_running=len(drawn),
            running_passes=sum(drawn),
            seconds=seconds,
            decode_seconds=seconds,
        )


def refuses(config: Config) -> Iterator[str]:
    if config.lora.rank:
        yield 'rollout.engine: "hf" runs no adapters. Set lora.rank = 0, or use the native engine'


def make(context: EngineContext) -> HfEngine:
    trained = context.model
    config = copy.deepcopy(trained.config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=trained.dtype).to(trained.device).eval()
    engine = HfEngine(model.requires_grad_(False), context.tokenizer, context.end_tokens, context.limits.max_seqs)
    engine.sync(0, trained.named_parameters())
    return engine
