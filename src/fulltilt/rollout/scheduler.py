"""Which tokens run in the next pass. Pure Python, no tensors.

Enters: groups (a prompt and how many samples), and after each pass the tokens it sampled. Leaves: passes. Guaranteed:
- no pass holds more than `max_seqs` sequences, nor more tokens than `max_batched_tokens` (unless chunking is off and a prompt alone is
  longer);
- a pass of `steps` above 1 holds single tokens only, each sequence having blocks for that many more;
- a group's prompt is prefilled once while any of its samples keeps it in the cache, and its full blocks are shared;
- when blocks run out, the youngest sequence gives its blocks back and is finished later from the tokens it has: nothing is lost, and
  the oldest sequence always goes on, so every sequence ends;
- the order is a function of the requests alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from fulltilt.rollout.kv_cache import BlockPool, blocks_for


@dataclass(eq=False)
class Family:
    """The sequences of one prompt."""

    prompt: Seq[int]
    members: list[Sequence] = field(default_factory=list)
    opened: bool = False  # the members other than the first have been let loose

    def holder(self) -> Sequence | None:
        """A running member that has the whole prompt in the cache."""
        return next((member for member in self.members if member.running and member.computed >= len(self.prompt)), None)


@dataclass(eq=False)
class Sequence:
    """One sample in the making."""

    number: int  # age: smaller is older
    family: Family
    tokens: list[int] = field(default_factory=list)  # sampled so far
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # tokens of prompt + response whose keys and values are in the cache
    running: bool = False
    finished: bool = False

    @property
    def length(self) -> int:
        return len(self.family.prompt) + len(self.tokens)

    def ids(self, start: int, stop: int) -> list[int]:
        """Tokens start..stop of prompt and response together."""
        prompt = len(self.family.prompt)
        return [*self.family.prompt[start:stop], *self.tokens[max(0, start - prompt) : max(0, stop - prompt)]]


@dataclass(frozen=True)
class Work:
    """`count` tokens of a sequence from `start` on.

    `samples` draw their next token from the last of these: nobody while a prompt is unfinished, a whole family at its end.
    """

    sequence: Sequence
    start: int
    count: int
    samples: tuple[Sequence, ...]

    @staticmethod
    def of(sequence: Sequence, count: int) -> Work:
        family = sequence.family
        drawing = (sequence,) if family.opened else tuple(family.members)
        ends = sequence.computed + count == sequence.length
        return Work(sequence, sequence.computed, count, drawing if ends else ())


@dataclass(frozen=True)
class Pass:
    work: tuple[Work, ...]  # single tokens first
    copies: tuple[tuple[int, int], ...]  # (from block, to block), to be done before the pass and all at once
    steps: int = 1  # how many tokens may be drawn for each sequence before the next pass is planned


@dataclass
class Counts:
    preemptions: int = 0
    prefill_tokens: int = 0
    shared_tokens: int = 0
    decode_tokens: int = 0
    passes: int = 0
    most_running: int = 0
    most_blocks: int = 0


class Scheduler:
    def __init__(
        self,
        blocks: int,
        block_tokens: int,
        max_seqs: int,
        max_batched_tokens: int,
        *,
        chunked_prefill: bool = True,
        prefix_sharing: bool = True,
    ) -> None:
        self.pool = BlockPool(blocks)
        self.block_tokens = block_tokens
        self.max_seqs = max_seqs
        self.max_batched_tokens = max_batched_tokens
        self.chunked_prefill = chunked_prefill
        self.prefix_sharing = prefix_sharing
        self.running: list[Sequence] = []  # oldest first
        self.counts = Counts()
        self._waiting: list[tuple[int, Sequence]] = []
        self._copies: dict[int, int] = {}
        self._next_number = 0

    def add(self, prompt: Seq[int], samples: int) -> Family:
        family = Family(prompt, opened=not self.prefix_sharing)
        for _ in range(samples):
            family.members.append(Sequence(self._next_number, family))
            self._next_number += 1
        for member in family.members if family.opened else family.members[:1]:
            self._wait(member)
        return family

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        return bool(self.running or self._waiting)

    def next_pass(self, most_steps: int = 1) -> Pass:
        """Room for what runs first, oldest first; then newcomers with what tokens and blocks are left. Where only decoding is left to do,
        up to `most_steps` steps of it at once, as many as there are blocks for."""
        left = self.max_batched_tokens
        work: list[Work] = []
        singles = [sequence for sequence in self.running if sequence.length - sequence.computed == 1]
        longer = [sequence for sequence in self.running if sequence.length - sequence.computed > 1]
        for sequence in singles + longer:
            left = self._plan(sequence, work, left)
        while self._waiting and left > 0 and self._has_seat(self._waiting[0][1]) and self._admit(self._waiting[0][1]):
            _, sequence = heapq.heappop(self._waiting)
            left = self._plan(sequence, work, left)
        # A sequence planned early in this pass may have given its blocks back to an older one since.
        work = [item for item in work if item.sequence.running]
        assert work, "a pass without work: the cache is smaller than one sample"
        work.sort(key=lambda item: item.count > 1)
        decoding = all(item.count == 1 and item.samples == (item.sequence,) and item.sequence.tokens for item in work)
        steps = self._reserve(work, most_steps) if decoding else 1
        self._count(work, steps)
        copies = tuple((source, target) for target, source in self._copies.items())
        self._copies.clear()
        return Pass(tuple(work), copies, steps)

    def computed(self, work: Work, steps: int = 1) -> None:
        """The pass ran, for this work through `steps` of its steps: keys and values are in the cache."""
        work.sequence.computed = work.start + work.count + steps - 1
        if steps > 1:
            self.counts.decode_tokens += steps - 1

    def settle(self, family: Family) -> None:
        """After a family's tokens of a pass: let siblings loose on a fresh prompt, then free what is finished.

        Siblings are admitted before a finished holder leaves, so that the prompt it computed is not lost with it.
        """
        if not family.opened and family.members[0].tokens:
            family.opened = True
            for member in family.members[1:]:
                if member.finished:
                    continue
                if self._has_seat(member) and self._admit(member):
                    continue
                self._wait(member)
        for member in family.members:
            if member.finished and member.running:
                self._leave(member)

    # -- inside ---------------------------------------------------------------------------------------------------------------------

    def _wait(self, sequence: Sequence) -> None:
        heapq.heappush(self._waiting, (sequence.number, sequence))

    def _has_seat(self, sequence: Sequence) -> bool:
        """A family that has yet to be let loose takes a seat for every member, so that its prompt is still there when they follow."""
        if not self.running:
            return True
        taken = sum(1 if runner.family.opened else len(runner.family.members) for runner in self.running)
        return taken + (1 if sequence.family.opened else len(sequence.family.members)) <= self.max_seqs

    def _plan(self, sequence: Sequence, work: list[Work], left: int) -> int:
        """Add the sequence's next tokens to the pass if tokens and blocks allow; returns the tokens left."""
        if not sequence.running:
            return left  # preempted while older sequences were planned
        count = sequence.length - sequence.computed
        if count > left:
            alone = not self.chunked_prefill and not work
            if not self.chunked_prefill and not alone:
                return left
            count = count if alone else left
        if count <= 0 or not self._grow(sequence, sequence.computed + count):
            return left
        work.append(Work.of(sequence, count))
        return left - count

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for `tokens` tokens, taken from the youngest if need be; False if the sequence itself had to give way."""
        missing = blocks_for(tokens, self.block_tokens) - len(sequence.blocks)
        if missing <= 0:
            return True
        while (taken := self.pool.take(missing)) is None:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks.extend(taken)
        return True

    def _reserve(self, work: list[Work], most: int) -> int:
        """Blocks for as many steps of decoding as there are, without taking any from a sequence that runs."""
        steps = most
        while steps > 1 and sum(self._missing(item, steps) for item in work) > self.pool.free:
            steps //= 2
        for item in work if steps > 1 else ():
            taken = self.pool.take(self._missing(item, steps))
            assert taken is not None
            item.sequence.blocks.extend(taken)
        return max(1, steps)

    def _missing(self, item: Work, steps: int) -> int:
        return max(0, blocks_for(item.start + steps, self.block_tokens) - len(item.sequence.blocks))

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self._wait(sequence)
        self.counts.preemptions += 1

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.running = False
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0

    def _admit(self, sequence: Sequence) -> bool:
        """Let a waiting sequence run if the blocks for all it has are there. A prompt that a sibling holds is shared, not computed."""
        holder = sequence.family.holder() if self.prefix_sharing else None
        prompt = len(sequence.family.prompt)
        full = prompt // self.block_tokens if holder else 0
        needed = blocks_for(sequence.length, self.block_tokens) - full
        # Blocks are left for those that run to grow by one each; without, a newcomer is soon sent away again.
        own = self.pool.take(needed) if not self.running or self.pool.free - needed >= len(self.running) else None
        if own is None:
            return False
        if holder:
            shared = holder.blocks[:full]
            self.pool.share(shared)
            if prompt % self.block_tokens:
                # The holder may itself be waiting for its copy: then what it will hold is what its own source holds now.
                source = holder.blocks[full]
                self._copies[own[0]] = self._copies.get(source, source)
            sequence.blocks = [*shared, *own]
            sequence.computed = prompt
            self.counts.shared_tokens += prompt
        else:
            sequence.blocks = own
        sequence.running = True
        position = len(self.running)
        while position and self.running[position - 1].number > sequence.number:
            position -= 1
        self.running.insert(position, sequence)
        return True

    def _count(self, work: list[Work], steps: int) -> None:
        self.counts.passes += steps
        for item in work:
            if item.count == 1 and item.samples and item.sequence.tokens:
                self.counts.decode_tokens += 1
            else:
                self.counts.prefill_tokens += item.count
        self.counts.most_running = max(self.counts.most_running, len(self.running))
        self.counts.most_blocks = max(self.counts.most_blocks, self.pool.used)
