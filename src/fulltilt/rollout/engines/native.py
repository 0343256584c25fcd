"""The native engine: generates with the trainer's own parameters.

Enters: prompts, also while it runs, and how to sample. Leaves: groups, each as soon as its last sample is done. Guaranteed: besides the
guarantees of the interface, nothing is copied: `sync` has nothing to do, and samples cannot come from old weights. If memory runs out,
running samples are put back and continue from the tokens they have, fewer at once, or with fewer tokens in a prefill pass, for as long as
the engine lives: their tokens stay the same, since their noise depends on seed, sample and position alone. If one of several members that
sample together runs out of memory, all of them do this.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from fulltilt.kernels import sampling as sampling_kernels
from fulltilt.memory.trial import MemoryTrial, free_unused
from fulltilt.model.arrays import to_device
from fulltilt.records import Group, Prompt, Sample, UserError
from fulltilt.rollout import scheduler as scheduling
from fulltilt.rollout.decode import Decoder, DecodeRow, Drawn
from fulltilt.rollout.engine import ENGINE_KNOBS, Engine, EngineContext, Feed, FreeSeats, Lengths, RolloutLimits
from fulltilt.rollout.kv_cache import blocks_for
from fulltilt.rollout.runner import Runner
from fulltilt.rollout.sampler import Sampling, sample_seed
from fulltilt.rollout.scheduler import Family, Pass, Scheduler
from fulltilt.rollout.stats import Recorder
from fulltilt.rollout.stop_strings import StopStrings

# The results of a pass: the new tokens of each sample and their log-probs.
Drawing = Iterable[tuple[scheduling.Sequence, tuple[list[int], list[float]]]]


@dataclass(frozen=True, eq=False)
class Flight:
    """A pass that has been started."""

    step: Pass
    drawing: list[scheduling.Sequence]  # when decoding: one per row of the batch, including finished ones
    arrive: Callable[[], Drawing]  # waits for the results


OBEYS = ENGINE_KNOBS
MOST_FAILURES = 3  # in a row


class Intake:
    """The prompts of a call: those that it began with, and those that a feed adds while it runs."""

    def __init__(
        self, plan: Scheduler, sampling: Sampling, seed: int, lengths: Lengths, recorder: Recorder, feed: Feed | None
    ) -> None:  # fmt: skip
        self.plan, self.sampling, self.seed, self.lengths, self.recorder, self.feed = plan, sampling, seed, lengths, recorder, feed
        self.prompts: list[Prompt] = []
        plan.more_come = feed is not None
        self._asked = False

    def add(self, more: Sequence[Prompt]) -> None:
        for place, prompt in enumerate(more, len(self.prompts)):
            family = self.plan.add(prompt.ids.tolist(), self.sampling.samples)
            family.place = place
            for index, sequence in enumerate(family.members):
                sequence.seed, sequence.forced = sample_seed(self.seed, prompt.uid, index), self.lengths.get((prompt.uid, index))
        self.prompts.extend(more)
        self.recorder.expect(len(more) * self.sampling.samples)

    def take_more(self) -> Iterator[FreeSeats]:
        """Ask for as many prompts as the scheduler wants, and add those that have come. An engine with nothing else to do waits for
        them."""
        assert self.feed
        if not self._asked and (groups := self.plan.room(self.sampling.samples)):
            self._asked = True
            yield FreeSeats(groups)
        if self._asked and (more := self.feed.take(wait=not self.plan.busy)) is not None:
            self._asked, self.plan.more_come = False, bool(more)
            self.add(more)


class NativeEngine(Engine):
    can_be_fed = True

    def __init__(self, context: EngineContext) -> None:
        super().__init__()
        self.tokenizer, self.end_tokens, self.limits = context.tokenizer, context.end_tokens, context.limits
        self.most = context.limits  # the limits that the decoder was made for
        self.members = context.members
        self.runner = Runner(context.model, context.layers, self.limits.blocks, self.limits.block_tokens)
        self.key_heads = max((shape.key_heads for shape in self.runner.layers), default=0)
        self.decoder = Decoder(context)
        self._calls = 0
        self._failures: list[str] = []  # reports of each time that memory ran out; "" if another member has

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int, lengths: Lengths | None = None) -> Iterator[Group]:
        """Generate groups. Nothing is planned from a forced length before it is reached."""
        yield from (group for group in self._run(prompts, sampling, seed, lengths or {}) if isinstance(group, Group))

    def generate_fed(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int, feed: Feed) -> Iterator[Group | FreeSeats]:
        yield from self._run(prompts, sampling, seed, {}, feed)

    def _run(
        self, given: Sequence[Prompt], sampling: Sampling, seed: int, lengths: Lengths, feed: Feed | None = None
    ) -> Iterator[Group | FreeSeats]:
        self._calls = call = self._calls + 1
        self.recorder.start(time.perf_counter(), 0)
        if not given and not feed:
            return
        longest = max([*(len(prompt.ids) for prompt in given), *([feed.longest] if feed else [])]) + sampling.max_new_tokens
        self._check_size(longest, sampling, lengths)
        if not self._acquire(longest):
            return
        limits = self.limits
        plan = Scheduler(
            limits.blocks, limits.block_tokens, limits.max_seqs, limits.max_batched_tokens, limits.chunked_prefill, limits.prefix_sharing,
            most_tokens=sampling.max_new_tokens,
        )  # fmt: skip
        stops = StopStrings(self.tokenizer, sampling.stop)
        intake = Intake(plan, sampling, seed, lengths, self.recorder, feed)
        intake.add(given)
        self.decoder.use_cache(self.runner.keys, self.runner.values)
        self.decoder.reach(longest)
        finished: list[Family] = []
        ahead: Flight | None = None
        end = time.perf_counter()
        # In a row, for passes that decode and passes that do not; `lasting`: failures after which passes could not become smaller.
        failures, lasting = Counter[bool](), Counter[bool]()
        while plan.busy or plan.more_come:
            if self.halted and self.halted():
                return
            if not self.decoder.overlaps or not plan.busy:  # otherwise the device would be idle meanwhile
                yield from self._hand_over(finished, intake.prompts, stops, call)
            if plan.more_come:
                yield from intake.take_more()
                if not plan.busy:
                    continue
            trial = MemoryTrial(self._may_start_over)
            with trial:
                if ahead is None:
                    end, step = time.perf_counter(), plan.next_pass(self.decoder.burst(len(plan.running)))
                    flight = (self._decode if step.decoding else self._prefill)(step, sampling)
                else:
                    step = plan.goes_on(ahead.step)
                    flight = replace(ahead, step=step)
                ahead = self._further(plan, flight, stops)
            if trial.failure is None:
                yield from self._hand_over(finished, intake.prompts, stops, call)
                with trial:
                    drawn = list(flight.arrive())
            if trial.failure is not None:
                failures[step.decoding] += 1
                ahead = None
                if not self._note(trial.failure, failures[step.decoding]):
                    return
                lasting[step.decoding] += not self._start_over(plan, step)
                continue
            if drawn:  # not after a part of a prompt: a prompt that never finishes would be tried again forever
                failures[step.decoding] = lasting[step.decoding]
            for sequence, (tokens, logprobs) in drawn:
                if not sequence.finish:
                    self._take(sequence, tokens, logprobs, sampling, stops)
                    if self.listener:
                        self.listener(sequence.family.place, sequence.tokens)
            plan.ran(flight.step)
            begin, end = end, time.perf_counter()
            self.recorder.passed(plan, flight.step, begin, end)
            families = dict.fromkeys(work.sequence.family for work in flight.step.work if work.samples)
            for family in families:
                plan.settle(family)
            finished = [family for family in families if all(member.finish for member in family.members)]
        yield from self._hand_over(finished, intake.prompts, stops, call)
        assert plan.pool.used == 0

    def take_limits(self) -> RolloutLimits:
        found, self._failures = tuple(self._failures), []
        return RolloutLimits(self.limits.blocks, self.limits.max_seqs, self.limits.max_batched_tokens, found)

    def limit(self, limits: RolloutLimits) -> None:
        self.limits = replace(
            self.limits,
            blocks=min(limits.kv_blocks, self.most.blocks),
            max_seqs=min(limits.max_seqs, self.most.max_seqs),
            max_batched_tokens=min(limits.max_batched_tokens, self.most.max_batched_tokens),
        )

    def _may_start_over(self) -> bool:
        """Return whether to start over. Members of a tensor-parallel group would wait for one that does so alone."""
        return self.decoder.head.part is None or self.members.agreed is not None

    def _acquire(self, longest: int) -> bool:
        """Allocate the KV cache. With too little memory, allocate fewer blocks that still hold a sample of this many tokens, and the
        longest sample that later calls expect. Returns False if another member ends the run."""
        longest = max(longest, self.limits.longest)
        for failures in itertools.count(1):
            if self.runner.blocks != self.limits.blocks:
                self.runner.release()
                self.runner.blocks = self.limits.blocks
            trial = MemoryTrial(self._may_start_over)
            with trial:
                self.members.make(self.runner.acquire, lambda tokens: None, ())
            if trial.failure is None:
                return True
            if not self._note(trial.failure, failures):
                return False
            fewer = max(blocks_for(longest, self.limits.block_tokens), self.limits.blocks * 3 // 4)
            self.limits = replace(self.limits, blocks=min(self.limits.blocks, fewer))
        raise AssertionError

    def _start_over(self, plan: Scheduler, step: Pass) -> bool:
        """Continue after memory ran out in this pass, with half as many samples at once, or half as many tokens in a prefill pass. Returns
        whether there was anything to lower."""
        before = self.limits
        if step.decoding:
            self.limits = replace(before, max_seqs=max(1, len(step.work) // 2))
        else:  # without chunking, a prompt may have more tokens than the limit
            fewer = max(1, sum(work.count for work in step.work) // 2)
            self.limits = replace(before, max_batched_tokens=min(before.max_batched_tokens, fewer))
        plan.max_seqs, plan.max_batched_tokens = self.limits.max_seqs, self.limits.max_batched_tokens
        plan.start_over()
        return self.limits != before

    def _note(self, reported: str, failures: int) -> bool:
        """Note that memory ran out. The third time in a row is an error; members that have not run out return False, since the member that
        has ends the run."""
        reported = reported if self.members.agreed is None else self.members.agreed
        if failures >= MOST_FAILURES:
            if reported:
                raise torch.OutOfMemoryError(f"{failures} times in a row, {reported}")
            return False
        self._failures.append(reported)
        free_unused(self.runner.model.device)
        return True

    def parameters(self) -> Iterable[torch.Tensor]:
        return self.runner.model.parameters()

    def release(self) -> None:
        self.runner.release()

    def memory(self) -> Iterable[torch.Tensor]:
        return (*self.runner.keys, *self.runner.values)

    def _check_size(self, longest: int, sampling: Sampling, lengths: Lengths) -> None:
        for sample, length in lengths.items():
            if not 1 <= length <= sampling.max_new_tokens:
                raise UserError(
                    f"lengths: sample {sample} should get {length} tokens, which is not from 1 to rollout.max_new_tokens "
                    f"({sampling.max_new_tokens}): change the length or rollout.max_new_tokens"
                )
        capacity = self.limits.blocks * self.limits.block_tokens
        if blocks_for(longest, self.limits.block_tokens) > self.limits.blocks:
            raise UserError(
                f"rollout.kv_bytes: the KV cache holds {capacity} tokens but one sample may need {longest} "
                f"(longest prompt plus rollout.max_new_tokens): give it more bytes or lower rollout.max_new_tokens"
            )

    def _hand_over(self, finished: list[Family], prompts: Sequence[Prompt], stops: StopStrings, call: int) -> Iterator[Group]:
        """Yield finished groups. Decoding text, and the caller's work with it, takes time: on CUDA the device works meanwhile."""
        while finished:
            family = finished.pop(0)
            samples = (finished_sample(index, sequence, stops) for index, sequence in enumerate(family.members))
            yield Group(prompts[family.place], tuple(samples), family.place)
            if call != self._calls:
                raise RuntimeError("another call of generate has started and uses the KV cache: only one call may run at a time")

    def _prefill(self, step: Pass, sampling: Sampling) -> Flight:
        tokens = sum(work.count for work in step.work)

        def stand_in(tokens: int) -> None:
            with self.members.standing_in(tokens):
                self.runner.stand_in(step)

        return self.members.make(partial(self._prefill_alone, step, sampling), stand_in, [tokens])

    def _prefill_alone(self, step: Pass, sampling: Sampling) -> Flight:
        self.members.begin_pass()
        logits = self.runner.run(step)
        drawn_from = [work.samples for work in step.work if work.samples]
        drawing = [sequence for samples in drawn_from for sequence in samples]
        if not drawing:
            return Flight(step, drawing, tuple)
        there = partial(to_device, device=logits.device)
        seeds = np.array([sequence.seed for sequence in drawing], dtype=np.uint64).view(np.int64)
        places = np.array([len(sequence.tokens) for sequence in drawing], dtype=np.int64)
        rows = np.repeat(np.arange(len(logits)), [len(samples) for samples in drawn_from])  # a group's samples share one row of logits
        tokens, logprobs = sampling_kernels.sample(
            logits.float(), there(seeds), there(places), sampling.temperature, sampling.top_k, sampling.top_p,
            rows=there(rows) if len(rows) > len(logits) else None,
        )  # fmt: skip
        return Flight(
            step, drawing, lambda: zip(drawing, zip(tokens[:, None].tolist(), logprobs[:, None].tolist(), strict=True), strict=True)
        )

    def _decode(self, step: Pass, sampling: Sampling) -> Flight:
        drawing = [work.sequence for work in step.work]

        def start() -> None:
            self.runner.copy(step.copies)
            rows = [
                DecodeRow(sequence.tokens[-1], work.start, len(sequence.tokens), sequence.seed, sequence.blocks, sequence.forced)
                for work, sequence in zip(step.work, drawing, strict=True)
            ]
            self.decoder.start(rows, sampling)

        return self._steps(step, drawing, start)

    def _steps(self, step: Pass, drawing: list[scheduling.Sequence], prepare: Callable[[], None]) -> Flight:
        decoder = self.decoder

        def launch() -> Callable[[], list[Drawn]]:
            prepare()
            return decoder.launch(step.steps)

        # A graph takes its memory when it is captured, and no member can replace a capture by a filler.
        sizes, may_give_up = decoder.sizes(len(drawing), step.steps), not decoder.graphs
        wait = self.members.make(launch, decoder.stand_in, sizes, may_give_up=may_give_up)
        return Flight(step, drawing, lambda: zip(drawing, wait(), strict=True))

    def _further(self, plan: Scheduler, flight: Flight, stops: StopStrings) -> Flight | None:
        """Start more steps of the same rows before the tokens of `flight` are known, so that the device does not wait for the host. Not if
        fewer rows would be enough, and not with stop strings, which only the host finds: a stopped row would write to blocks of others."""
        step, decoder = flight.step, self.decoder
        if not step.decoding or not decoder.overlaps or stops.strings:
            return None
        if decoder.size_for(len(step.work)) < decoder.size_for(len(flight.drawing)):
            return None
        held = [len(work.sequence.blocks) for work in step.work]
        following = plan.further(step, decoder.burst(len(step.work)))
        if following is None:
            return None
        row_of = {sequence: row for row, sequence in enumerate(flight.drawing)}
        more = [
            (row_of[work.sequence], place, work.sequence.blocks[place])
            for work, before in zip(step.work, held, strict=True)
            for place in range(before, len(work.sequence.blocks))
        ]
        return self._steps(following, flight.drawing, partial(decoder.give, more))

    def _take(self, sequence: scheduling.Sequence, drawn: list[int], logprobs: list[float], sampling: Sampling, stops: StopStrings) -> None:
        """Give a sample its drawn tokens, up to a stop string: the device stops at end tokens and limits, but does not see strings."""
        tokens = sequence.tokens
        tokens += drawn
        stopped = 0 if sequence.forced else stops.first_end(tokens, len(drawn))
        taken = stopped or len(drawn)
        del tokens[len(tokens) - len(drawn) + taken :]
        sequence.logprobs += logprobs[:taken]
        if stopped or (not sequence.forced and tokens[-1] in self.end_tokens):
            sequence.finish = "stop"
        elif len(tokens) == (sequence.forced or sampling.max_new_tokens):
            sequence.finish = "length"


def finished_sample(index: int, sequence: scheduling.Sequence, stops: StopStrings) -> Sample:
    assert sequence.finish is not None
    ids, logprobs = np.array(sequence.tokens, dtype=np.int64), np.array(sequence.logprobs, dtype=np.float32)
    text = (stops.text if sequence.forced is None else stops.whole_text)(sequence.tokens)
    return Sample(index, ids, logprobs, sequence.finish, text)


make = NativeEngine
