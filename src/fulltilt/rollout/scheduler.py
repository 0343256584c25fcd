"""The scheduler: which tokens run in the next pass. Pure Python, no tensors.

Enters: groups (a prompt and how many samples) at any time, and after each pass the tokens it sampled. Leaves: passes. Guaranteed:
- a pass prefills (prompts, and the tokens of preempted samples) or decodes, never both; no pass has more than `max_seqs` sequences, and a
  pass that prefills has at most `max_batched_tokens` tokens (unless chunking is off and a single prompt is longer);
- while samples decode, no two prefill passes follow one another, and waiting sequences are admitted only when it is worth a pass
  (`_worth_a_pass`), at the latest when nothing else runs;
- a decoding pass of `steps` steps has blocks for that many more tokens of each of its sequences, the longest of which come first;
- steps that are started ahead (`further`) are of the same sequences, take blocks from nobody, and are not started when prefill is due;
- tokens that are in the cache are not computed again: a group's prompt while one of its samples runs, and full blocks that another prompt
  begins with or that a preempted sample left, for as long as they are there. A pass may read blocks that it writes itself, because each
  layer writes all its keys and values before it reads them. A shared block is never written again;
- the last token of a prompt is always computed, because samples are drawn from it, and once for all samples of a group that start with it;
- when blocks run out, the youngest sequence gives its blocks back and is finished later from the tokens it has: nothing is lost, and the
  oldest sequence always continues, so every sequence ends;
- the order depends only on the requests and on the tokens drawn so far.
"""

from __future__ import annotations

import heapq
import sys
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from fulltilt.records import Finish
from fulltilt.rollout.kv_cache import START, BlockPool, blocks_for

GROWTH_SHARE = 16  # an admission leaves at least 1/16 as many blocks free as are used, so that running sequences can grow
WORTHWHILE_SHARE = 8  # a pass for waiting sequences is worth it if they are at least 1/8 of those that decode,
WORTHWHILE_TOKENS = 2  # or if their tokens are at least 1/2 of max_batched_tokens
HELD_READY = 4  # where prompts come one by one, 1/4 of the seats' number wait: enough for two such passes
READ_TIMES = 8  # a prefill pass reads at most about this many times max_batched_tokens from the cache: attention gathers them
LEAST_STEPS = 4  # a decoding pass has at least 1/4 of the steps that it might have
STEPS_BETWEEN = 4  # decoding steps between two prefill passes


def block_list(blocks: Iterable[int] = ()) -> array[int]:
    """Return blocks as an array: they are copied into tables by the thousands, for which a list takes ten times as long."""
    return array("i", blocks)


@dataclass(eq=False)
class Family:
    """A prompt and the sequences that are sampled from it."""

    prompt: Seq[int]
    members: list[Sequence] = field(default_factory=list)
    opened: bool = False  # whether all members may run, not only the first, which prefills the prompt
    full_blocks: list[tuple[int, ...]] = field(default_factory=list)  # the prompt's tokens by block, without a partly filled one
    place: int = 0  # the prompt's place in the engine's call, which sets it


@dataclass(eq=False)
class Sequence:
    """One unfinished sample. The engine sets `tokens` and `finish`; the last three fields are for the engine alone."""

    number: int  # age: smaller is older
    family: Family
    tokens: list[int] = field(default_factory=list)  # tokens sampled so far
    blocks: array[int] = field(default_factory=block_list)
    computed: int = 0  # number of tokens of prompt + response whose keys and values are in the cache
    running: bool = False
    finish: Finish | None = None  # set when the sample has ended
    logprobs: list[float] = field(default_factory=list)  # one log-prob per token
    seed: int = 0  # seed of the sampling noise
    forced: int | None = None  # the exact number of tokens to draw, whatever they are

    @property
    def length(self) -> int:
        return len(self.family.prompt) + len(self.tokens)

    @property
    def decoding(self) -> bool:
        """Whether only the newest token has to be computed, and that token was sampled."""
        return bool(self.tokens) and len(self.family.prompt) + len(self.tokens) - self.computed == 1

    @property
    def seats(self) -> int:
        """Number of places that it takes among `max_seqs`. A family that is not opened takes one for every member, so that its prompt is
        still in the cache when they follow."""
        return 1 if self.family.opened else len(self.family.members)

    def ids(self, start: int, stop: int) -> list[int]:
        """Return tokens start to stop of prompt and response together."""
        prompt = len(self.family.prompt)
        return [*self.family.prompt[start:stop], *self.tokens[max(0, start - prompt) : max(0, stop - prompt)]]


@dataclass(frozen=True)
class Work:
    """The part of a sequence in a pass: `count` tokens from `start` on.

    `samples` draw their next token from the last of these: none while a prompt is unfinished, a whole family at its end.
    """

    sequence: Sequence
    start: int
    count: int
    samples: tuple[Sequence, ...]


@dataclass(frozen=True)
class Pass:
    work: tuple[Work, ...]  # decoding: longest first
    copies: tuple[tuple[int, int], ...]  # (from block, to block): copied before the pass, all at once
    decoding: bool
    steps: int = 1  # most tokens to draw for each sequence before the next pass is planned; above 1 only when decoding


@dataclass
class Counts:
    """Counts since the scheduler was made, or since its counts were last replaced."""

    preemptions: int = 0
    prefill_tokens: int = 0
    shared_tokens: int = 0  # tokens found in the cache instead of being prefilled
    decode_tokens: int = 0
    passes: int = 0  # prefill passes, and decoding steps in which some sample drew a token; each pass counts at least once


@dataclass(eq=False)
class Scheduler:
    blocks: int
    block_tokens: int
    max_seqs: int
    max_batched_tokens: int
    chunked_prefill: bool = True
    prefix_sharing: bool = True
    most_tokens: int = sys.maxsize  # most tokens of a response
    more_come: bool = False  # whether prompts may still be added

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.blocks)
        self.running: list[Sequence] = []  # oldest first
        self.counts = Counts()
        self._waiting: list[tuple[int, Sequence]] = []
        self._copies: dict[int, int] = {}  # target -> source
        self._being_written: set[int] = set()  # blocks that the planned pass prefills
        self._next_number = 0
        self._prefilled = False  # whether the newest pass prefilled
        self._seats = 0  # taken seats

    def add(self, prompt: Seq[int], samples: int) -> Family:
        size = self.block_tokens
        full_blocks = [tuple(prompt[end - size : end]) for end in range(size, len(prompt) + 1, size)]
        family = Family(prompt, opened=not self.prefix_sharing, full_blocks=full_blocks)
        for _ in range(samples):
            family.members.append(Sequence(self._next_number, family))
            self._next_number += 1
        for member in family.members if family.opened else family.members[:1]:
            self._wait(member)
        return family

    @property
    def busy(self) -> bool:
        return bool(self.running or self._waiting)

    def room(self, samples: int) -> int:
        """Return how many more groups of this many samples to ask for: those that could start now, and those that are to wait for the next
        seats, since a seat stays empty from the end of its sample until an answer has come. Estimated from the youngest running
        sequence."""
        ahead = max(1, self.max_seqs // (HELD_READY * samples))
        if not self.running:
            free = max(1, self.max_seqs // samples)
        else:
            prompt = len(self.running[-1].family.prompt)
            blocks = (self.pool.free - self._room_to_grow()) // (blocks_for(prompt, self.block_tokens) + samples - 1)
            free = max(0, min(blocks, (self.max_seqs - self._seats) // samples))
        return max(0, free + ahead - len({id(sequence.family) for _, sequence in self._waiting}))

    def next_pass(self, most_steps: int = 1) -> Pass:
        """Plan prefill if it is due, else up to `most_steps` steps of decoding, as far as there are blocks for them."""
        work, steps = self._prefill() if self._prefill_is_due() else [], 0
        if not work:
            work, steps = self._decode(self._until_prefill(most_steps))
        if not work:  # all decoding sequences were preempted for an older one whose prompt is not finished
            work = self._prefill()
        assert work, "a pass without work: the cache is smaller than one sample"
        self._prefilled = not steps
        copies = tuple((source, target) for target, source in self._copies.items())
        self._copies.clear()
        self._being_written.clear()
        return Pass(tuple(work), copies, steps > 0, max(1, steps))

    def further(self, step: Pass, steps: int) -> Pass | None:
        """Plan `steps` more steps of the same sequences, to be started before the decoding pass `step` has ended. Returns None if another
        kind of pass is due or there are too few blocks."""
        work = [item for item in step.work if not item.sequence.finish]
        decoding = [item.sequence for item in work]
        if not work or self._prefill_is_due():
            return None
        steps = min(steps, self._tokens_to_come(decoding) - step.steps)
        missing = self._missing(decoding, step.steps + steps)
        if steps <= 0 or sum(missing) > self.pool.free:
            return None
        self._take_missing(decoding, missing)
        return Pass(tuple(Work(item.sequence, item.start + step.steps, 1, item.samples) for item in work), (), True, steps)

    def goes_on(self, step: Pass) -> Pass:
        """Return the rest of a pass from `further`, after the previous pass has ended."""
        return replace(step, work=tuple(item for item in step.work if not item.sequence.finish))

    def ran(self, step: Pass) -> None:
        """Note that a pass ran and its sequences have the drawn tokens: keys and values of all tokens but the newest ones are in the
        cache."""
        longest = 1
        for work in step.work:
            if step.decoding:
                drawn = work.sequence.length - work.start - 1
                work.sequence.computed = work.start + drawn
                self.counts.decode_tokens += drawn
                longest = max(longest, drawn)
            else:
                work.sequence.computed = work.start + work.count
                self.counts.prefill_tokens += work.count
        self.counts.passes += longest

    def settle(self, family: Family) -> None:
        """After a pass, let the siblings of a freshly prefilled prompt run, then free the blocks of finished members.

        Siblings are admitted before a finished member leaves, so that the prompt it computed is not lost.
        """
        if not family.opened and family.members[0].tokens:
            self._seats -= family.members[0].seats - 1
            family.opened = True
            for member in family.members[1:]:
                if not member.finish and not self._admit(member):
                    self._wait(member)
        for member in family.members:
            if member.finish and member.running:
                self._leave(member)

    def start_over(self) -> None:
        """Recover from a failed pass: put all running sequences back, to be finished from the tokens they have, and forget the cache's
        contents, since the pass has not written all of them. `max_seqs` and `max_batched_tokens` may change with it."""
        for sequence in self.running:
            sequence.running, sequence.blocks, sequence.computed = False, block_list(), 0
            self._wait(sequence)
        self.counts.preemptions += len(self.running)
        self.running, self._seats, self._prefilled = [], 0, False
        self.pool = BlockPool(self.blocks)
        self._copies.clear()
        self._being_written.clear()

    # -- which kind of pass ---------------------------------------------------------------------------------------------------------

    def _prefill_is_due(self) -> bool:
        decoding = sum(sequence.decoding for sequence in self.running)
        return not decoding or (not self._prefilled and self._worth_a_pass(decoding))  # decoding is not delayed twice in a row

    def _until_prefill(self, most_steps: int) -> int:
        """Return the number of decoding steps in a row. It is small if more sequences wait for prefill: a prefill pass does not delay
        decoding for long, and a step costs about the same after they have joined."""
        more = self._prefilled and self._worth_a_pass(sum(sequence.decoding for sequence in self.running))
        return min(most_steps, STEPS_BETWEEN) if more else most_steps

    def _worth_a_pass(self, decoding: int) -> bool:
        """Return whether to prefill now: always for a running sequence. For waiting sequences a pass costs about the same whether they are
        few or many, so wait until those that fit are a worthwhile share of the decoding ones, or their tokens of a pass, or until all that
        wait fit and no more come. Estimated from the first waiting sequence."""
        if decoding < len(self.running):
            return True
        if not self._waiting:
            return False
        head = self._waiting[0][1]
        blocks = (self.pool.free - self._room_to_grow()) // self._blocks_to_enter(head)
        fit = min(blocks, (self.max_seqs - self._seats) // head.seats, len(self._waiting))
        all_fit = fit == len(self._waiting) and not self.more_come
        return fit > 0 and (all_fit or self._worthwhile(fit * head.seats, fit * head.length, decoding))

    def _worthwhile(self, samples: int, tokens: int, decoding: int) -> bool:
        return samples * WORTHWHILE_SHARE >= decoding or tokens * WORTHWHILE_TOKENS >= self.max_batched_tokens

    # -- prefill --------------------------------------------------------------------------------------------------------------------

    def _prefill(self) -> list[Work]:
        """Prefill running sequences, oldest first; then waiting ones with the remaining tokens, seats and blocks. No sequence is
        preempted."""
        left, room = self.max_batched_tokens, READ_TIMES * self.max_batched_tokens
        work: list[Work] = []
        for sequence in self.running:
            if room <= 0:
                break
            planned = self._plan(sequence, work, left)
            left -= planned
            room -= sequence.computed + planned if planned else 0
        while left > 0 and room > 0 and self._waiting and self._admit(self._waiting[0][1]):
            _, sequence = heapq.heappop(self._waiting)
            planned = self._plan(sequence, work, left)
            left -= planned
            room -= sequence.computed + planned if planned else 0
            if not planned and not sequence.decoding:
                break  # this one does not fit any more, and neither do later ones
        return work

    def _plan(self, sequence: Sequence, work: list[Work], left: int) -> int:
        """Add the sequence's next tokens to the pass, at most `left`. Returns their number."""
        if sequence.decoding:
            return 0
        count = sequence.length - sequence.computed
        if count > left:
            alone = not self.chunked_prefill and not work
            if not self.chunked_prefill and not alone:
                return 0
            count = count if alone else left
        if count > 0:
            start, end, family = sequence.computed, sequence.computed + count, sequence.family
            drawing = (sequence,) if family.opened else tuple(family.members)
            work.append(Work(sequence, start, count, drawing if end == sequence.length else ()))
            self._being_written.update(sequence.blocks[start // self.block_tokens : blocks_for(end, self.block_tokens)])
            if self.prefix_sharing:
                self._remember(sequence, end)
        return count

    def _admit(self, sequence: Sequence) -> bool:
        """Let a waiting sequence run if there is a seat, and blocks for all its tokens. Blocks in the cache are shared."""
        if self.running and self._seats + sequence.seats > self.max_seqs:
            return False
        found = self._known_blocks(sequence)
        revived = sum(map(self.pool.is_free, found))
        room = self.pool.free - revived - self._blocks_to_enter(sequence) + len(found)
        if self.running and room < self._room_to_grow():
            return False
        self.pool.hold(found)
        own = self.pool.take(blocks_for(sequence.length, self.block_tokens) - len(found))
        if own is None:
            self.pool.release(found)
            return False
        sequence.blocks = block_list([*found, *own])
        sequence.computed = len(found) * self.block_tokens
        self._copy_end_of_prompt(sequence)
        self.counts.shared_tokens += sequence.computed
        sequence.running = True
        self._seats += sequence.seats
        position = len(self.running)
        while position and self.running[position - 1].number > sequence.number:
            position -= 1
        self.running.insert(position, sequence)
        return True

    def _blocks_to_enter(self, sequence: Sequence) -> int:
        """Return the number of blocks for all its tokens, and one for each sibling that follows at once: the end of the prompt."""
        return blocks_for(sequence.length, self.block_tokens) + sequence.seats - 1

    def _room_to_grow(self) -> int:
        """Return how many blocks an admission leaves free: at least one for each running sequence, or sequences would soon be preempted
        again. In simulations with lognormal lengths, with means from 200 to 2,000, this share is within 2% of the best that was tried (1/32
        to 1/4, or up to 32 blocks each). If all responses were equally long, more would be better, but lengths are not known in advance."""
        return max(len(self.running), self.pool.used // GROWTH_SHARE)

    # -- what is in the cache -------------------------------------------------------------------------------------------------------

    def _tokens_of_block(self, sequence: Sequence, index: int) -> tuple[int, ...]:
        if index < len(sequence.family.full_blocks):
            return sequence.family.full_blocks[index]
        return tuple(sequence.ids(index * self.block_tokens, (index + 1) * self.block_tokens))

    def _known_blocks(self, sequence: Sequence) -> list[int]:
        """Return blocks of the cache that hold the beginning of the sequence, without its last token, which is always computed."""
        found: list[int] = []
        content = START
        for index in range((sequence.length - 1) // self.block_tokens if self.prefix_sharing else 0):
            block = self.pool.find(content, self._tokens_of_block(sequence, index))
            if block is None:
                break
            found.append(block)
            content = self.pool.content(block)
        return found

    def _remember(self, sequence: Sequence, tokens: int) -> None:
        """Register the full blocks of the first `tokens` tokens, which are in the cache or will be after this pass."""
        content = START
        for index in range(tokens // self.block_tokens):
            content = self.pool.remember(sequence.blocks[index], content, self._tokens_of_block(sequence, index))

    def _copy_end_of_prompt(self, sequence: Sequence) -> None:
        """Copy the partly filled last block of the prompt from a sibling: each sample continues in its own block."""
        prompt, members = len(sequence.family.prompt), sequence.family.members if self.prefix_sharing else []
        holder = next((member for member in members if member.running and member.computed >= prompt), None)
        if holder is None or not 0 < prompt - sequence.computed < self.block_tokens:
            return
        index = prompt // self.block_tokens
        source = holder.blocks[index]
        if source not in self._being_written and source not in self._copies:  # copies come first, so the source must be complete by then
            self._copies[sequence.blocks[index]] = source
            sequence.computed = prompt

    # -- decoding -------------------------------------------------------------------------------------------------------------------

    def _decode(self, most_steps: int) -> tuple[list[Work], int]:
        """Return all decoding sequences, and the number of steps. The youngest are preempted until there are blocks for enough steps."""
        while decoding := [sequence for sequence in self.running if sequence.decoding]:
            steps = min(most_steps, self._tokens_to_come(decoding))
            least = max(1, steps // LEAST_STEPS)
            while steps and sum(missing := self._missing(decoding, steps)) > self.pool.free:
                steps //= 2
            if steps >= least or (steps and len(self.running) == 1):
                break
            assert len(self.running) > 1, "the cache is smaller than one sample"
            self._preempt(self.running[-1])
        else:
            return [], 0
        self._take_missing(decoding, missing)
        decoding.sort(key=lambda sequence: -sequence.computed)
        return [Work(sequence, sequence.computed, 1, (sequence,)) for sequence in decoding], steps

    def _tokens_to_come(self, decoding: list[Sequence]) -> int:
        """Return the most tokens that any of these may still draw."""
        return self.most_tokens - min(len(sequence.tokens) for sequence in decoding)

    def _missing(self, decoding: list[Sequence], steps: int) -> list[int]:
        """Return how many blocks each sequence lacks for this many more tokens."""
        size = self.block_tokens
        return [max(0, -(-(sequence.computed + steps) // size) - len(sequence.blocks)) for sequence in decoding]

    def _take_missing(self, decoding: list[Sequence], missing: list[int]) -> None:
        taken = self.pool.take(sum(missing))
        assert taken is not None
        given = 0
        for sequence, count in zip(decoding, missing, strict=True):
            sequence.blocks.extend(taken[given : given + count])
            given += count

    def _preempt(self, sequence: Sequence) -> None:
        if self.prefix_sharing:
            self._remember(sequence, sequence.computed)  # the sequence may find these blocks again
        self._leave(sequence)
        self._wait(sequence)
        self.counts.preemptions += 1

    # -- coming and going -----------------------------------------------------------------------------------------------------------

    def _wait(self, sequence: Sequence) -> None:
        heapq.heappush(self._waiting, (sequence.number, sequence))

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.running = False
        self._seats -= sequence.seats
        self.pool.release(sequence.blocks)
        sequence.blocks = block_list()
        sequence.computed = 0
