"""The scheduler and its block pool under random requests: nothing lost, leaked, mixed or over the limits."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fulltilt.rollout.kv_cache import START, BlockPool, blocks_for
from fulltilt.rollout.scheduler import READ_TIMES, Family, Pass, Scheduler, Sequence

# -- the pool ---------------------------------------------------------------------------------------------------------------------------

BLOCKS = 13


class PoolMachine(RuleBasedStateMachine):
    """Random admit, share, finish and preempt against a plain count of holders and a plain record of what each block holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.held: list[list[int]] = []
        self.written: dict[int, tuple[int, ...]] = {}  # block -> the tokens of all blocks up to it
        self.released: list[int] = []  # in that order

    @rule(count=st.integers(0, 9))
    def admit(self, count: int) -> None:
        free, kept = self.pool.free, [block for block in self.released if block in self.pool._contents]
        empty = free - len(kept)
        taken = self.pool.take(count)
        if count > free:
            assert taken is None and self.pool.free == free
            return
        assert taken is not None and len(set(taken)) == count
        assert not set(taken) & {block for blocks in self.held for block in blocks}
        assert set(taken) & set(kept) == set(kept[: max(0, count - empty)]), "not those released longest ago"
        for block in taken:
            self.written.pop(block, None)
        self.released = [block for block in self.released if block not in taken]
        self.held.append(taken)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), keep=st.integers(0, 9))
    def fork(self, which: int, keep: int) -> None:
        blocks = self.held[which % len(self.held)][:keep]
        self.pool.hold(blocks)
        self.held.append(list(blocks))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), tokens=st.lists(st.integers(0, 1), max_size=9))
    def remember(self, which: int, tokens: list[int]) -> None:
        blocks = self.held[which % len(self.held)]
        content, before = START, ()
        for block, token in zip(blocks, tokens, strict=False):
            if block in self.written and self.written[block] != (*before, token):
                break  # what is full stays as it is
            content = self.pool.remember(block, content, (token,))
            before = self.written[block] = (*before, token)

    @rule(tokens=st.lists(st.integers(0, 1), max_size=9))
    def find(self, tokens: list[int]) -> None:
        content, found = START, list[int]()
        for count, token in enumerate(tokens, 1):
            block = self.pool.find(content, (token,))
            if block is None:
                break
            assert self.written[block] == tuple(tokens[:count])
            found.append(block)
            content = self.pool.content(block)
        self.pool.hold(found)
        self.released = [block for block in self.released if block not in found]
        self.held.append(found)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def finish(self, which: int) -> None:
        blocks = self.held.pop(which % len(self.held))
        self.pool.release(blocks)
        live = {block for blocks in self.held for block in blocks}
        self.released += [block for block in reversed(blocks) if block not in live]

    @invariant()
    def nothing_leaks(self) -> None:
        live = {block for blocks in self.held for block in blocks}
        assert self.pool.used == len(live)
        assert self.pool.free == BLOCKS - len(live)
        assert all(self.pool.is_free(block) == (block not in live) for block in range(BLOCKS))

    def teardown(self) -> None:
        for blocks in self.held:
            self.pool.release(blocks)
        assert self.pool.free == BLOCKS


TestBlockPool = PoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_releasing_or_holding_a_free_block_is_an_error() -> None:
    pool = BlockPool(2)
    taken = pool.take(1)
    assert taken is not None
    pool.release(taken)
    for wrong in (pool.release, pool.hold):
        with pytest.raises(AssertionError, match=f"block {taken[0]} is"):
            wrong(taken)


# -- random requests --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """A group: how its prompt begins, how it goes on, the response lengths of its samples, and in front of which pass it arrives."""

    beginning: int
    shared: int
    own: int
    lengths: list[int]
    arrives: int = 0

    def prompt(self, number: int) -> list[int]:
        return [-1000 * self.beginning - place for place in range(self.shared)] + [1000 * number + place for place in range(self.own)]


@dataclass
class Drill:
    """Runs a scheduler without a model. A shadow of the cache remembers for each slot which token it holds behind which others, so a block
    shared, copied, freed or computed wrongly shows as a wrong token read."""

    plan: Scheduler
    alphabet: int  # how many different tokens there are: with few of them samples repeat one another
    overlap: bool = False  # start the next steps of decoding before those on their way have ended
    wanted: dict[Sequence, int] = field(default_factory=dict)
    shadow: dict[int, int] = field(default_factory=dict)
    passes: list[Pass] = field(default_factory=list)
    ahead: Pass | None = None  # started already

    def add(self, prompt: list[int], lengths: list[int]) -> Family:
        family = self.plan.add(prompt, len(lengths))
        self.wanted.update(zip(family.members, lengths, strict=True))
        return family

    def token(self, sequence: Sequence, place: int) -> int:
        return (sequence.number * 100 + place) % self.alphabet

    def run(self, most_steps: int) -> Pass:
        """One pass."""
        plan = self.plan
        decoding = sum(sequence.decoding for sequence in plan.running)
        preemptions, known = plan.counts.preemptions, {block: number for block, (number, _) in plan.pool._contents.items()}
        before = list(plan.running)
        step = plan.next_pass(most_steps) if self.ahead is None else plan.goes_on(self.ahead)
        self.ahead = plan.further(step, most_steps) if self.overlap and step.decoding else None
        staying = [sequence.running for sequence in before]
        assert staying == sorted(staying, reverse=True) and (not before or staying[0]), "another than the youngest gave way"
        if not step.decoding and decoding and self.passes and not self.passes[-1].decoding:
            assert plan.counts.preemptions > preemptions, "decoding was held up twice in a row"
        self.passes.append(step)
        if step.work:  # where all have ended, steps that were started before are of none
            self.check(step, most_steps, known)
        self.copy(step)
        if step.decoding:
            self.decode(step)
        else:
            self.prefill(step)
        plan.ran(step)
        for family in dict.fromkeys(work.sequence.family for work in step.work if work.samples):
            plan.settle(family)
        return step

    def check(self, step: Pass, most_steps: int, known: dict[int, int]) -> None:
        plan, work = self.plan, step.work
        assert 1 <= step.steps <= (most_steps if step.decoding else 1)
        assert len({item.sequence for item in work}) == len(work) <= len(plan.running) <= plan.max_seqs
        assert plan._seats == sum(sequence.seats for sequence in plan.running)
        assert [sequence.number for sequence in plan.running] == sorted(sequence.number for sequence in plan.running)
        held = Counter(block for sequence in plan.running for block in sequence.blocks)
        assert plan.pool.used == len(held)
        assert all(len(set(sequence.blocks)) == len(sequence.blocks) for sequence in plan.running)
        if step.decoding:
            assert all(item.samples == (item.sequence,) and item.count == 1 for item in work)
            assert [item.start for item in work] == sorted((item.start for item in work), reverse=True)
            assert plan.running[0] in [item.sequence for item in work] or not plan.running[0].decoding, "the oldest waits"
        else:
            assert sum(item.count for item in work) <= plan.max_batched_tokens or (not plan.chunked_prefill and len(work) == 1)
        written = Counter[int]()
        for item in work:
            last = item.start + item.count + step.steps - 2
            written.update(item.sequence.blocks[item.start // plan.block_tokens : last // plan.block_tokens + 1])
        for block, writers in written.items():
            assert writers == 1
            still_known = block in known and plan.pool._contents.get(block, (None,))[0] == known[block]
            assert not still_known, "a block is written that others may read"
            assert held[block] == 1 or block in plan.pool._contents, "a shared block is written"

    def copy(self, step: Pass) -> None:
        size, copied = self.plan.block_tokens, {}
        for source, target in step.copies:
            for place in range(size):
                if source * size + place in self.shadow:
                    copied[target * size + place] = self.shadow[source * size + place]
        self.shadow.update(copied)

    def slot(self, sequence: Sequence, place: int) -> int:
        size = self.plan.block_tokens
        return sequence.blocks[place // size] * size + place % size

    def write(self, sequence: Sequence, start: int, stop: int) -> None:
        for place, meaning in list(enumerate(meanings(sequence.ids(0, stop))))[start:]:
            self.shadow[self.slot(sequence, place)] = meaning

    def read(self, sequence: Sequence, stop: int) -> None:
        assert [self.shadow.get(self.slot(sequence, place)) for place in range(stop)] == meanings(sequence.ids(0, stop))

    def prefill(self, step: Pass) -> None:
        for work in step.work:
            self.write(work.sequence, work.start, work.start + work.count)
        for work in step.work:
            self.read(work.sequence, work.start + work.count)
        drawing = [sequence for work in step.work for sequence in work.samples]
        assert len(set(drawing)) == len(drawing)
        for sequence in drawing:
            self.draw(sequence)

    def decode(self, step: Pass) -> None:
        for work in step.work:
            sequence = work.sequence
            for place in range(work.start, work.start + step.steps):
                if sequence.finish:
                    if not self.overlap:  # a stop string: the device, which does not see it, goes on
                        self.shadow[self.slot(sequence, place)] = 0
                    continue
                self.write(sequence, place, place + 1)
                self.read(sequence, place + 1)
                self.draw(sequence)

    def draw(self, sequence: Sequence) -> None:
        sequence.tokens.append(self.token(sequence, len(sequence.tokens)))
        sequence.finish = "length" if len(sequence.tokens) == self.wanted[sequence] else None

    def check_all_done(self) -> None:
        assert self.plan.pool.used == 0 and not self.plan.busy
        for sequence, length in self.wanted.items():
            assert sequence.tokens == [self.token(sequence, place) for place in range(length)]


def meanings(ids: list[int]) -> list[int]:
    """What keys and values depend on: a token and all before it."""
    found, meaning = [], 1
    for token in ids:
        meaning = hash((meaning, token))
        found.append(meaning)
    return found


requests = st.lists(
    st.builds(
        Request,
        beginning=st.integers(1, 2),
        shared=st.integers(0, 20),
        own=st.integers(1, 12),
        lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
        arrives=st.just(0) | st.integers(0, 30),
    )
    | st.builds(Request, beginning=st.just(1), shared=st.sampled_from([8, 16]), own=st.just(0), lengths=st.just([3, 9])),  # the same again
    min_size=1,
    max_size=8,
)


@settings(max_examples=200, deadline=None)
@given(
    requests=requests,
    block_tokens=st.sampled_from([1, 2, 4, 16]),
    spare=st.just(0) | st.integers(0, 30) | st.just(400),
    max_seqs=st.integers(1, 9),
    max_batched_tokens=st.integers(1, 40),
    chunked=st.booleans(),
    sharing=st.booleans(),
    most_steps=st.sampled_from([1, 2, 5, 16]),
    alphabet=st.sampled_from([1, 2, 1_000_000]),
    overlap=st.booleans(),
)
@example(  # a sibling would copy a block that another writes in the same pass
    [Request(2, 0, 1, [37, 10, 13, 1]), Request(1, 0, 1, [14, 20, 11]), Request(2, 6, 0, [18, 2, 9, 11, 20, 2])],
    4, 0, 11, 37, True, True, 16, 2, True,
)  # fmt: skip
def test_random_requests(
    requests, block_tokens, spare, max_seqs, max_batched_tokens, chunked, sharing, most_steps, alphabet, overlap
) -> None:
    """Down to the smallest legal cache: one sample of the longest prompt and response."""
    longest = max(request.shared + request.own for request in requests) + max(max(request.lengths) for request in requests)
    blocks = blocks_for(longest, block_tokens) + spare
    plan = Scheduler(blocks, block_tokens, max_seqs, max_batched_tokens, chunked_prefill=chunked, prefix_sharing=sharing)
    drill, coming = Drill(plan, alphabet, overlap), sorted(enumerate(requests), key=lambda item: item[1].arrives)
    while plan.busy or coming:
        while coming and (coming[0][1].arrives <= len(drill.passes) or not plan.busy):
            number, request = coming.pop(0)
            drill.add(request.prompt(number), request.lengths)
        drill.run(most_steps)
        assert len(drill.passes) < 10_000, "no end in sight"
    drill.check_all_done()
    counts = plan.counts
    if not sharing:
        assert counts.shared_tokens == 0
    together = all(request.arrives == 0 and min(request.lengths) > most_steps for request in requests)
    roomy = spare == 400 and block_tokens > 1 and max_seqs >= len(drill.wanted)
    if sharing and roomy and together and not counts.preemptions:
        prompts = [request.prompt(number) for number, request in enumerate(requests)]
        assert counts.prefill_tokens == distinct_tokens(prompts, block_tokens)


def distinct_tokens(prompts: list[list[int]], block_tokens: int) -> int:
    """Tokens to compute when each full block is computed once: but the last token of a prompt always is, and its block with it."""
    known, tokens = set(), 0
    for prompt in prompts:
        full = (len(prompt) - 1) // block_tokens
        found = next((n for n in range(full) if tuple(prompt[: (n + 1) * block_tokens]) not in known), full)
        tokens += len(prompt) - found * block_tokens
        known |= {tuple(prompt[: (n + 1) * block_tokens]) for n in range(len(prompt) // block_tokens)}
    return tokens


# -- one by one -------------------------------------------------------------------------------------------------------------------------


def finish(drill: Drill, most_steps: int = 16) -> None:
    while drill.plan.busy:
        drill.run(most_steps)
    drill.check_all_done()


def test_preemption_is_counted_and_nothing_is_lost() -> None:
    drill = Drill(Scheduler(blocks=6, block_tokens=2, max_seqs=8, max_batched_tokens=64), alphabet=1000)
    drill.add([1, 2, 3], [6, 6, 6, 6])
    finish(drill, most_steps=1)
    assert drill.plan.counts.preemptions > 0


def test_a_preempted_sample_finds_its_own_blocks_again() -> None:
    """Two samples, room for little more than one. The second gives way, but only its last blocks are needed at once."""
    drill = Drill(Scheduler(blocks=20, block_tokens=2, max_seqs=2, max_batched_tokens=64), alphabet=1000)
    drill.add([1, 2, 3, 4], [24])
    drill.add([5, 6, 7, 8], [24])
    finish(drill, most_steps=2)
    counts = drill.plan.counts
    assert counts.preemptions == 1
    assert counts.shared_tokens > 4  # more than its prompt; the two prompts have nothing in common


def test_a_beginning_that_prompts_have_in_common_is_computed_once() -> None:
    """In the same pass, while another runs, and after all that computed it are gone."""
    common = list(range(100, 132))
    drill = Drill(Scheduler(blocks=200, block_tokens=8, max_seqs=64, max_batched_tokens=512), alphabet=1000)
    drill.add([*common, 1, 2, 3], [20, 20])
    drill.add([*common, 4, 5], [20, 20])
    first = drill.run(4)
    assert [work.count for work in first.work] == [35, 2] and len(first.work[0].samples) == 2
    drill.add([*common, 6], [20])
    assert sum(work.count for step in (drill.run(4), drill.run(4)) if not step.decoding for work in step.work) == 1
    finish(drill)
    drill.add([*common, 7], [3])
    finish(drill)
    assert drill.plan.counts.prefill_tokens == 35 + 2 + 1 + 1
    alone = Drill(Scheduler(blocks=200, block_tokens=8, max_seqs=64, max_batched_tokens=512, prefix_sharing=False), alphabet=1000)
    alone.add([*common, 1, 2, 3], [5, 5])
    alone.add([*common, 4, 5], [5])
    finish(alone)
    assert alone.plan.counts.prefill_tokens == 35 + 35 + 34 and alone.plan.counts.shared_tokens == 0


def test_decoding_waits_for_one_pass_of_a_long_prompt_at_a_time() -> None:
    """The longest wait of samples that decode, in tokens: a pass with chunking, the whole prompt without."""
    for chunked, longest in ((True, 32), (False, 200)):
        drill = Drill(Scheduler(blocks=200, block_tokens=8, max_seqs=8, max_batched_tokens=32, chunked_prefill=chunked), alphabet=1000)
        drill.add([1, 2, 3], [200])
        drill.run(4)
        drill.add(list(range(10, 210)), [5])
        while drill.plan.busy:
            drill.run(4)
        stalls = [0]
        for step in drill.passes[1:]:
            stalls = [*stalls, 0] if step.decoding else [*stalls[:-1], stalls[-1] + sum(work.count for work in step.work)]
        assert max(stalls) == longest
        drill.check_all_done()


def test_newcomers_come_in_together() -> None:
    """64 samples run at a time and end one after another: those that take their seats share passes, and few seats are empty meanwhile."""
    drill = Drill(Scheduler(blocks=2000, block_tokens=4, max_seqs=64, max_batched_tokens=4096), alphabet=1000)
    for number in range(256):
        drill.add([1000 * number + place for place in range(8)], [8 + number % 50])
    finish(drill, most_steps=2)
    newcomers = [len(step.work) for step in drill.passes if not step.decoding]
    assert sum(newcomers) == 256 and newcomers[0] == 64 and min(newcomers[:-1]) >= 64 / 8
    decoding = [len(step.work) for step in drill.passes if step.decoding]
    assert min(decoding[: len(decoding) // 2]) > 64 - 64 / 8 - 2


def test_newcomers_that_are_asked_for_come_in_together() -> None:
    """As before, but each request is answered two passes later: about as few seats are empty, and as many share a pass."""
    drill = Drill(Scheduler(blocks=2000, block_tokens=4, max_seqs=64, max_batched_tokens=4096, more_come=True), alphabet=1000)
    left, waited, asked = iter(range(256)), 0, drill.plan.room(1)
    while drill.plan.busy or drill.plan.more_come:
        if asked and (waited == 2 or not drill.plan.busy):
            numbers = list(itertools.islice(left, asked))
            drill.plan.more_come, asked, waited = bool(numbers), 0, 0
            for number in numbers:
                drill.add([1000 * number + place for place in range(8)], [8 + number % 50])
        if drill.plan.more_come:
            waited, asked = waited + bool(asked), asked or drill.plan.room(1)
        if drill.plan.busy:
            drill.run(2)
    newcomers = [len(step.work) for step in drill.passes if not step.decoding]
    assert sum(newcomers) == 256 and newcomers[0] == 64 and min(newcomers[:-1]) >= 64 / 8
    decoding = [len(step.work) for step in drill.passes if step.decoding]
    assert min(decoding[: len(decoding) // 2]) > 64 - 64 / 8 - 6, "at most two passes' ends more than where all wait"


def test_steps_shrink_before_anyone_gives_way() -> None:
    """Two samples of 15 tokens, and blocks for no more: 16 steps of both do not fit, but 8 do and then 4."""
    drill = Drill(Scheduler(blocks=8, block_tokens=4, max_seqs=4, max_batched_tokens=64), alphabet=1000)
    drill.add([1, 2, 3], [12, 12])
    finish(drill)
    assert [step.steps for step in drill.passes if step.decoding] == [8, 4]
    assert drill.plan.counts.preemptions == 0


def test_steps_are_started_ahead_only_while_nobody_is_to_be_let_in() -> None:
    plan = Scheduler(blocks=40, block_tokens=4, max_seqs=4, max_batched_tokens=64)
    drill = Drill(plan, alphabet=1000)
    drill.add([1, 2, 3], [30])
    drill.run(4)
    step = plan.next_pass(4)
    ahead = plan.further(step, 4)
    assert ahead is not None and (ahead.work[0].start, ahead.steps) == (step.work[0].start + 4, 4)
    assert len(ahead.work[0].sequence.blocks) == blocks_for(3 + 8, 4)
    drill.add([4, 5, 6], [30])
    assert plan.further(step, 4) is None


def test_a_pass_reads_no_more_than_memory_is_there_for() -> None:
    """Attention of a prefill pass gathers the whole context of its sequences: a long beginning in common must not let in hundreds."""
    plan = Scheduler(blocks=4000, block_tokens=16, max_seqs=1000, max_batched_tokens=256)
    for group in range(200):
        plan.add([*range(800), 1000 + group, *range(15)], 1)
    while plan._waiting:
        step = plan.next_pass(4)
        if not step.decoding:
            read = [work.start + work.count for work in step.work]
            assert sum(read[:-1]) < READ_TIMES * 256
        for work in step.work:
            for sequence in work.samples:
                sequence.tokens.extend([7] * step.steps)
        plan.ran(step)
        for family in dict.fromkeys(work.sequence.family for work in step.work if work.samples):
            plan.settle(family)
