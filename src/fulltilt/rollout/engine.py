"""The engine interface, and the native engine behind it.

Enters: prompts and how to sample. Leaves: groups, each as soon as its last sample is done. Guaranteed of any engine: token ids are the
sampled ones, log-probs are of the full softmax at the sampling temperature, and a group is complete. The native engine runs the trainer's
own parameters: nothing is copied and `sync` only counts versions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from transformers import PreTrainedModel

from fulltilt.model.attention import LayerShape
from fulltilt.records import Finish, Group, Prompt, Sample, UserError
from fulltilt.rollout import scheduler as scheduling
from fulltilt.rollout.decode import BURST, Decoder, DecodeRow
from fulltilt.rollout.kv_cache import blocks_for
from fulltilt.rollout.runner import Runner
from fulltilt.rollout.sampler import Sampling, draw, sample_seed
from fulltilt.rollout.scheduler import Pass, Scheduler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class EngineCaps:
    """What an engine can do; the loop asks here instead of comparing names."""

    shares_weights: bool  # it runs the trainer's parameters: sync copies nothing
    full_softmax_logprobs: bool


@dataclass(frozen=True)
class EngineStats:
    """Of the last `generate`."""

    prefill_tokens: int
    shared_tokens: int  # prompt tokens that were not prefilled because a sibling had them in the cache
    decode_tokens: int
    passes: int
    preemptions: int
    most_running: int
    kv_use: float  # highest share of blocks in use
    seconds: float
    version: int

    def __add__(self, other: EngineStats) -> EngineStats:
        """Of several calls: counts are added, of heights the highest."""
        return EngineStats(
            prefill_tokens=self.prefill_tokens + other.prefill_tokens,
            shared_tokens=self.shared_tokens + other.shared_tokens,
            decode_tokens=self.decode_tokens + other.decode_tokens,
            passes=self.passes + other.passes,
            preemptions=self.preemptions + other.preemptions,
            most_running=max(self.most_running, other.most_running),
            kv_use=max(self.kv_use, other.kv_use),
            seconds=self.seconds + other.seconds,
            version=max(self.version, other.version),
        )

    def metrics(self) -> dict[str, float]:
        prompts = self.prefill_tokens + self.shared_tokens
        return {
            "rollout/prefill_tokens": self.prefill_tokens,
            "rollout/decode_tokens": self.decode_tokens,
            "rollout/passes": self.passes,
            "rollout/preemptions": self.preemptions,
            "rollout/most_running": self.most_running,
            "rollout/kv_use": self.kv_use,
            "rollout/prefix_hit_rate": self.shared_tokens / prompts if prompts else 0.0,
        }


NO_STATS = EngineStats(0, 0, 0, 0, 0, 0, 0.0, 0.0, 0)


class Engine(Protocol):
    caps: EngineCaps

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int) -> Iterator[Group]:
        """Groups of `sampling.samples` samples, in the order in which they finish."""

    def sync(self, version: int) -> None:
        """The trainer's weights have changed."""

    def release(self) -> None:
        """Give memory back for the update."""

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class EngineLimits:
    """The knobs of the native engine, all resolved."""

    blocks: int
    block_tokens: int
    max_seqs: int
    max_batched_tokens: int
    chunked_prefill: bool = True
    prefix_sharing: bool = True
    cuda_graphs: bool = False


@dataclass(eq=False)
class Draft:
    """A sample in the making: what the scheduler does not need to know."""

    index: int
    seed: np.uint64
    sequence: scheduling.Sequence
    logprobs: list[float]
    finish: Finish | None = None


class NativeEngine:
    caps = EngineCaps(shares_weights=True, full_softmax_logprobs=True)

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        end_tokens: frozenset[int],
        layers: Mapping[int, LayerShape],
        limits: EngineLimits,
    ) -> None:
        self.tokenizer = tokenizer
        self.end_tokens = end_tokens
        self.limits = limits
        self.runner = Runner(model, layers, limits.blocks, limits.block_tokens)
        shapes = [layers[index] for index in sorted(layers)]
        self.decoder = Decoder(model, shapes, end_tokens, limits.block_tokens, limits.max_seqs, graphs=limits.cuda_graphs)
        self.version = 0
        self._stats = NO_STATS

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int) -> Iterator[Group]:
        self._check_size(prompts, sampling)
        begin = time.perf_counter()
        limits = self.limits
        plan = Scheduler(
            limits.blocks, limits.block_tokens, limits.max_seqs, limits.max_batched_tokens,
            chunked_prefill=limits.chunked_prefill, prefix_sharing=limits.prefix_sharing,
        )  # fmt: skip
        stops = StopStrings(self.tokenizer, sampling.stop)
        drafts: dict[scheduling.Sequence, Draft] = {}
        open_groups: dict[scheduling.Family, tuple[Prompt, list[Draft]]] = {}
        for prompt in prompts:
            family = plan.add(prompt.ids.tolist(), sampling.samples)
            members = [Draft(i, sample_seed(seed, prompt.uid, i), sequence, []) for i, sequence in enumerate(family.members)]
            drafts.update((draft.sequence, draft) for draft in members)
            open_groups[family] = (prompt, members)
        self.runner.acquire()
        self.decoder.use_cache(*self.runner.caches)
        self.decoder.reach(max(len(prompt.ids) for prompt in prompts) + sampling.max_new_tokens)
        while plan.busy:
            step = plan.next_pass(BURST)
            if step.steps > 1:
                self._burst(plan, step, drafts, sampling, stops)
            else:
                self._advance(plan, step, drafts, sampling, stops)
            for family in dict.fromkeys(work.sequence.family for work in step.work if work.samples):
                plan.settle(family)
                if all(member.finished for member in family.members):
                    prompt, members = open_groups.pop(family)
                    yield Group(prompt, tuple(finished_sample(draft, stops) for draft in members))
        assert not open_groups and plan.pool.used == 0
        counts = plan.counts
        self._stats = EngineStats(
            counts.prefill_tokens, counts.shared_tokens, counts.decode_tokens, counts.passes, counts.preemptions, counts.most_running,
            counts.most_blocks / limits.blocks, time.perf_counter() - begin, self.version,
        )  # fmt: skip

    def sync(self, version: int) -> None:
        self.version = version

    def release(self) -> None:
        self.runner.release()

    def stats(self) -> EngineStats:
        return self._stats

    def close(self) -> None:
        self.runner.release()

    def _check_size(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        capacity = self.limits.blocks * self.limits.block_tokens
        longest = max(len(prompt.ids) for prompt in prompts) + sampling.max_new_tokens
        if blocks_for(longest, self.limits.block_tokens) > self.limits.blocks:
            raise UserError(
                f"rollout.kv_bytes: the KV cache holds {capacity} tokens but one sample may need {longest} "
                f"(longest prompt plus rollout.max_new_tokens): give it more bytes or lower rollout.max_new_tokens"
            )

    def _advance(
        self, plan: Scheduler, step: Pass, drafts: Mapping[scheduling.Sequence, Draft], sampling: Sampling, stops: StopStrings
    ) -> None:
        """Run one pass and give every sample that drew from it its token."""
        logits = self.runner.run(step)
        rows: list[int] = []
        drawing: list[Draft] = []
        drawn_from = (work.samples for work in step.work if work.samples)
        for row, sequences in enumerate(drawn_from):
            rows.extend([row] * len(sequences))
            drawing.extend(drafts[sequence] for sequence in sequences)
        for work in step.work:
            plan.computed(work)
        if not drawing:
            return
        seeds, places = np.array([d.seed for d in drawing]), np.array([len(d.sequence.tokens) for d in drawing])
        tokens, logprobs = draw(logits, seeds, places, sampling, np.array(rows) if len(rows) > len(logits) else None)
        for draft, token, logprob in zip(drawing, tokens.tolist(), logprobs.tolist(), strict=True):
            self._take(draft, token, logprob, sampling, stops)

    def _burst(
        self, plan: Scheduler, step: Pass, drafts: Mapping[scheduling.Sequence, Draft], sampling: Sampling, stops: StopStrings
    ) -> None:
        """Many steps of decoding at once."""
        self.runner.copy(step.copies)
        drafting = [drafts[work.sequence] for work in step.work]
        rows = [
            DecodeRow(draft.sequence.tokens[-1], work.start, len(draft.sequence.tokens), draft.seed, work.sequence.blocks)
            for work, draft in zip(step.work, drafting, strict=True)
        ]
        for work, draft, drawn in zip(step.work, drafting, self.decoder.run(rows, step.steps, sampling), strict=True):
            before = len(draft.sequence.tokens)
            for token, logprob in zip(drawn.tokens, drawn.logprobs, strict=True):
                self._take(draft, token, logprob, sampling, stops)
                if draft.finish:  # a stop string, which the device does not see, may come before what it drew last
                    break
            plan.computed(work, len(draft.sequence.tokens) - before)

    def _take(self, draft: Draft, token: int, logprob: float, sampling: Sampling, stops: StopStrings) -> None:
        draft.logprobs.append(logprob)
        draft.sequence.tokens.append(token)
        if token in self.end_tokens or stops.ended(draft.sequence.tokens):
            draft.finish = "stop"
        elif len(draft.sequence.tokens) == sampling.max_new_tokens:
            draft.finish = "length"
        draft.sequence.finished = draft.finish is not None


class StopStrings:
    """Finds stop strings in sampled ids, also where they straddle tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.strings = tuple(strings)
        # A token is at least one byte of text, so a string that the newest token completes began at most its byte count of tokens ago;
        # a few more for ids beyond the tokenizer, which have no text.
        self._window = max((len(string.encode()) for string in self.strings), default=0) + 8
        # Decoded behind another token: some tokenizers swallow the space that a text begins with.
        anchor = tokenizer("a", add_special_tokens=False).input_ids[-1:] if self.strings else []
        self._anchor = [token for token in anchor if token not in tokenizer.all_special_ids]

    def ended(self, ids: Sequence[int]) -> bool:
        if not self.strings:
            return False
        text = self._whole(ids[-self._window :], skip_special_tokens=False)
        return any(string in text for string in self.strings)

    def text(self, ids: Sequence[int]) -> str:
        """The response as people and rewards read it: without special tokens, ending before the first stop string."""
        text = self._decode(ids, skip_special_tokens=True)
        if not self.strings:
            return text
        whole = self._whole(ids, skip_special_tokens=True)
        places = [place for string in self.strings if (place := whole.find(string)) >= 0]
        swallowed = len(whole) - len(text)
        return text[: max(0, min(places) - swallowed)] if places else text

    def _whole(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        before = self._decode(self._anchor, skip_special_tokens=skip_special_tokens)
        return self._decode([*self._anchor, *ids], skip_special_tokens=skip_special_tokens).removeprefix(before)

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))


def finished_sample(draft: Draft, stops: StopStrings) -> Sample:
    assert draft.finish is not None
    ids = draft.sequence.tokens
    return Sample(
        index=draft.index,
        ids=np.array(ids, dtype=np.int64),
        logprobs=np.array(draft.logprobs, dtype=np.float32),
        finish=draft.finish,
        text=stops.text(ids),
    )
