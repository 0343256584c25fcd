"""The native engine: generates with the trainer's own parameters.

Enters: prompts and how to sample. Leaves: groups, each as soon as its last sample is done. Guaranteed: besides the guarantees of the
interface, nothing is copied: `sync` has nothing to do, and samples cannot come from old weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fulltilt.records import Finish, Group, Prompt, Sample, UserError
from fulltilt.rollout import scheduler as scheduling
from fulltilt.rollout.decode import Decoder, DecodeRow
from fulltilt.rollout.engine import ENGINE_KNOBS, Engine, EngineCaps, EngineContext
from fulltilt.rollout.kv_cache import blocks_for
from fulltilt.rollout.runner import Runner
from fulltilt.rollout.sampler import Sampling, draw, sample_seed
from fulltilt.rollout.scheduler import Pass, Scheduler
from fulltilt.rollout.stats import EngineStats, Recorder
from fulltilt.rollout.stop_strings import StopStrings


@dataclass(eq=False)
class Draft:
    """An unfinished sample, with what the scheduler does not need to know."""

    index: int
    seed: np.uint64
    sequence: scheduling.Sequence
    logprobs: list[float]
    forced: int | None = None  # it gets exactly this many tokens, whatever they are
    finish: Finish | None = None


Drawing = Iterable[tuple[Draft, list[int], list[float]]]  # the results of a pass: the new tokens of each sample and their log-probs


@dataclass(frozen=True, eq=False)
class Flight:
    """A pass that has been started."""

    step: Pass
    drawing: list[Draft]  # when decoding: one per row of the batch, finished ones included
    arrive: Callable[[], Drawing]  # waits for the results


OBEYS = ENGINE_KNOBS


class NativeEngine(Engine):
    caps = EngineCaps(shares_weights=True, full_softmax_logprobs=True)

    def __init__(self, context: EngineContext) -> None:
        model, layers, limits = context.model, context.layers, context.limits
        self.tokenizer = context.tokenizer
        self.end_tokens = context.end_tokens
        self.limits = limits
        self.runner = Runner(model, layers, limits.blocks, limits.block_tokens)
        self.decoder = Decoder(
            model, self.runner.layers, self.end_tokens, limits.block_tokens, limits.max_seqs, graphs=limits.cuda_graphs,
            required=limits.graphs_required,
        )  # fmt: skip
        self.decoder.reach(limits.longest)
        self._calls = 0
        self.recorder = Recorder()

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, seed: int, lengths: Mapping[tuple[int, int], int] | None = None
    ) -> Iterator[Group]:
        """`lengths` forces the number of tokens of samples, by (prompt uid, sample index); other entries are ignored. End tokens
        and stop strings do not end such samples, and nothing is planned from a length before it is reached."""
        lengths = lengths or {}
        self._check_size(prompts, sampling, lengths)
        self._calls = call = self._calls + 1
        self.recorder.start(time.perf_counter(), len(prompts) * sampling.samples)
        limits = self.limits
        plan = Scheduler(
            limits.blocks, limits.block_tokens, limits.max_seqs, limits.max_batched_tokens,
            chunked_prefill=limits.chunked_prefill, prefix_sharing=limits.prefix_sharing, most_tokens=sampling.max_new_tokens,
        )  # fmt: skip
        stops = StopStrings(self.tokenizer, sampling.stop)
        drafts: dict[scheduling.Sequence, Draft] = {}
        open_groups: dict[scheduling.Family, tuple[Prompt, list[Draft]]] = {}
        for prompt in prompts:
            family = plan.add(prompt.ids.tolist(), sampling.samples)
            members = [
                Draft(i, sample_seed(seed, prompt.uid, i), sequence, [], lengths.get((prompt.uid, i)))
                for i, sequence in enumerate(family.members)
            ]
            drafts.update((draft.sequence, draft) for draft in members)
            open_groups[family] = (prompt, members)
        self.runner.acquire()
        self.decoder.use_cache(*self.runner.caches)
        self.decoder.reach(max(len(prompt.ids) for prompt in prompts) + sampling.max_new_tokens)
        finished: list[tuple[Prompt, list[Draft]]] = []
        ahead: Flight | None = None
        end = time.perf_counter()
        while plan.busy:
            if not self.decoder.overlaps:  # the device would not work meanwhile
                yield from self._hand_over(finished, stops, call)
            if ahead is None:
                end, flight = time.perf_counter(), self._launch(plan.next_pass(self.decoder.burst(len(plan.running))), drafts, sampling)
            else:
                flight = replace(ahead, step=plan.goes_on(ahead.step))
            ahead = self._further(plan, flight, stops)
            yield from self._hand_over(finished, stops, call)
            for draft, tokens, logprobs in flight.arrive():
                if not draft.finish:
                    self._take(draft, tokens, logprobs, sampling, stops)
            plan.ran(flight.step)
            begin, end = end, time.perf_counter()
            self.recorder.passed(plan, flight.step, begin, end)
            families = dict.fromkeys(work.sequence.family for work in flight.step.work if work.samples)
            for family in families:
                plan.settle(family)
            finished = [open_groups.pop(family) for family in families if all(member.finished for member in family.members)]
        yield from self._hand_over(finished, stops, call)
        assert not open_groups and plan.pool.used == 0

    def release(self) -> None:
        self.runner.release()

    def memory(self) -> Iterable[torch.Tensor]:
        return (cache for caches in self.runner.caches for cache in caches)

    def stats(self) -> EngineStats:
        return self.recorder.stats

    def report(self, say: Callable[[str], None], interval: float) -> None:
        self.recorder.report(say, interval)

    def _check_size(self, prompts: Sequence[Prompt], sampling: Sampling, lengths: Mapping[tuple[int, int], int]) -> None:
        for sample, length in lengths.items():
            if not 1 <= length <= sampling.max_new_tokens:
                raise UserError(
                    f"lengths: sample {sample} should get {length} tokens, which is not from 1 to rollout.max_new_tokens "
                    f"({sampling.max_new_tokens}): change the length or rollout.max_new_tokens"
                )
        capacity = self.limits.blocks * self.limits.block_tokens
        longest = max(len(prompt.ids) for prompt in prompts) + sampling.max_new_tokens
        if blocks_for(longest, self.limits.block_tokens) > self.limits.blocks:
            raise UserError(
                f"rollout.kv_bytes: the KV cache holds {capacity} tokens but one sample may need {longest} "
                f"(longest prompt plus rollout.max_new_tokens): give it more bytes or lower rollout.max_new_tokens"
            )

    def _hand_over(self, finished: list[tuple[Prompt, list[Draft]]], stops: StopStrings, call: int) -> Iterator[Group]:
        """Yield finished groups. Decoding text, and whatever the caller does with it, takes time: on CUDA the device works meanwhile."""
        while finished:
            prompt, members = finished.pop(0)
            yield Group(prompt, tuple(finished_sample(draft, stops) for draft in members))
            if call != self._calls:
                raise RuntimeError("another call of generate has started and uses the KV cache: only one call may run at a time")

    def _launch(self, step: Pass, drafts: Mapping[scheduling.Sequence, Draft], sampling: Sampling) -> Flight:
        return self._decode(step, drafts, sampling) if step.decoding else self._prefill(step, drafts, sampling)

    def _prefill(self, step: Pass, drafts: Mapping[scheduling.Sequence, Draft], sampling: Sampling) -> Flight:
        logits = self.runner.run(step)
        rows: list[int] = []
        drawing: list[Draft] = []
        drawn_from = (work.samples for work in step.work if work.samples)
        for row, sequences in enumerate(drawn_from):
            rows.extend([row] * len(sequences))
            drawing.extend(drafts[sequence] for sequence in sequences)
        if not drawing:
            return Flight(step, drawing, tuple)
        seeds, places = np.array([d.seed for d in drawing]), np.array([len(d.sequence.tokens) for d in drawing])
        tokens, logprobs = draw(logits, seeds, places, sampling, np.array(rows) if len(rows) > len(logits) else None)
        return Flight(step, drawing, lambda: zip(drawing, tokens[:, None].tolist(), logprobs[:, None].tolist(), strict=True))

    def _decode(self, step: Pass, drafts: Mapping[scheduling.Sequence, Draft], sampling: Sampling) -> Flight:
        self.runner.copy(step.copies)
        drawing = [drafts[work.sequence] for work in step.work]
        rows = [
            DecodeRow(draft.sequence.tokens[-1], work.start, len(draft.sequence.tokens), draft.seed, work.sequence.blocks, draft.forced)
            for work, draft in zip(step.work, drawing, strict=True)
        ]
        self.decoder.start(rows, sampling)
        return self._steps(step, drawing)

    def _steps(self, step: Pass, drawing: list[Draft]) -> Flight:
        wait = self.decoder.launch(step.steps)
        return Flight(
            step, drawing, lambda: ((draft, drawn.tokens, drawn.logprobs) for draft, drawn in zip(drawing, wait(), strict=True))
        )  # fmt: skip

    def _further(self, plan: Scheduler, flight: Flight, stops: StopStrings) -> Flight | None:
        """Start more steps of the same rows before the tokens of `flight` are known, so that the device does not wait for the host. Not if
        fewer rows would be enough, and not with stop strings, which the host finds: a stopped row would write to blocks of others."""
        step, decoder = flight.step, self.decoder
        if not step.decoding or not decoder.overlaps or stops.strings:
            return None
        if decoder.size_for(len(step.work)) < decoder.size_for(len(flight.drawing)):
            return None
        held = [len(work.sequence.blocks) for work in step.work]
        following = plan.further(step, decoder.burst(len(step.work)))
        if following is None:
            return None
        row_of = {draft.sequence: row for row, draft in enumerate(flight.drawing)}
        decoder.give(
            [
                (row_of[work.sequence], place, work.sequence.blocks[place])
                for work, before in zip(step.work, held, strict=True)
                for place in range(before, len(work.sequence.blocks))
            ]
        )
        return self._steps(following, flight.drawing)

    def _take(self, draft: Draft, drawn: list[int], logprobs: list[float], sampling: Sampling, stops: StopStrings) -> None:
        """Give a sample its drawn tokens, up to a stop string: the device stops at end tokens and limits, but does not see strings."""
        tokens = draft.sequence.tokens
        tokens += drawn
        stopped = 0 if draft.forced else stops.first_end(tokens, len(drawn))
        taken = stopped or len(drawn)
        del tokens[len(tokens) - len(drawn) + taken :]
        draft.logprobs += logprobs[:taken]
        if stopped or (not draft.forced and tokens[-1] in self.end_tokens):
            draft.finish = "stop"
        elif len(tokens) == (draft.forced or sampling.max_new_tokens):
            draft.finish = "length"
        draft.sequence.finished = draft.finish is not None


def finished_sample(draft: Draft, stops: StopStrings) -> Sample:
    assert draft.finish is not None
    ids = draft.sequence.tokens
    return Sample(
        index=draft.index,
        ids=np.array(ids, dtype=np.int64),
        logprobs=np.array(draft.logprobs, dtype=np.float32),
        finish=draft.finish,
        text=stops.text(ids) if draft.forced is None else stops.whole_text(ids),
    )


make = NativeEngine
