"""The scheduler and its block pool under random requests: nothing lost, leaked, mixed or over the limits."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fulltilt.rollout.kv_cache import BlockPool, blocks_for
from fulltilt.rollout.scheduler import Scheduler, Sequence


class PoolMachine(RuleBasedStateMachine):
    """Random admit, share, finish and preempt against a plain count of holders."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(13)
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, 9))
    def admit(self, count: int) -> None:
        free = self.pool.free
        taken = self.pool.take(count)
        if count > free:
            assert taken is None and self.pool.free == free
        else:
            assert taken is not None and len(set(taken)) == count
            assert not set(taken) & {block for blocks in self.held for block in blocks}
            self.held.append(taken)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), keep=st.integers(0, 9))
    def fork(self, which: int, keep: int) -> None:
        blocks = self.held[which % len(self.held)][:keep]
        self.pool.share(blocks)
        self.held.append(list(blocks))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def finish(self, which: int) -> None:
        self.pool.release(self.held.pop(which % len(self.held)))

    @invariant()
    def nothing_leaks(self) -> None:
        live = {block for blocks in self.held for block in blocks}
        assert self.pool.used == len(live)
        assert self.pool.free == 13 - len(live)

    def teardown(self) -> None:
        for blocks in self.held:
            self.pool.release(blocks)
        assert self.pool.free == 13


TestBlockPool = PoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_releasing_or_sharing_a_free_block_is_an_error() -> None:
    pool = BlockPool(2)
    taken = pool.take(1)
    assert taken is not None
    pool.release(taken)
    for wrong in (pool.release, pool.share):
        try:
            wrong(taken)
        except AssertionError:
            continue
        raise RuntimeError(f"{wrong.__name__} took a free block")


groups = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(1, 12), min_size=1, max_size=5)),  # prompt length, response length of each sample
    min_size=1,
    max_size=8,
)


@settings(max_examples=300, deadline=None)
@given(
    groups=groups,
    block_tokens=st.sampled_from([1, 2, 4, 16]),
    spare=st.integers(0, 30) | st.just(400),
    max_seqs=st.integers(1, 9),
    max_batched_tokens=st.integers(1, 40),
    chunked=st.booleans(),
    sharing=st.booleans(),
)
@example([(1, [1]), (1, [1, 2, 2])], 2, 0, 2, 2, False, True)  # a holder that waits for its own copy
def test_random_requests(groups, block_tokens, spare, max_seqs, max_batched_tokens, chunked, sharing) -> None:
    """Down to the smallest legal cache. A shadow of the cache remembers which token each slot holds, so a block shared, copied, freed or
    computed wrongly shows as a wrong token read."""
    smallest = max(blocks_for(prompt + max(lengths), block_tokens) for prompt, lengths in groups)
    plan = Scheduler(smallest + spare, block_tokens, max_seqs, max_batched_tokens, chunked_prefill=chunked, prefix_sharing=sharing)
    wanted: dict[Sequence, int] = {}
    for number, (prompt, lengths) in enumerate(groups):
        family = plan.add([1000 * number + place for place in range(prompt)], len(lengths))
        wanted.update(zip(family.members, lengths, strict=True))
    shadow: dict[int, int] = {}
    passes = 0
    while plan.busy:
        passes += 1
        assert passes < 10_000, "no end in sight"
        step = plan.next_pass()
        check_limits(plan, step.work, max_seqs, max_batched_tokens, chunked)
        run_on_shadow(step, shadow, block_tokens)
        drawing = []
        for work in step.work:
            plan.computed(work)
            drawing.extend(work.samples)
        assert len(set(drawing)) == len(drawing)
        for sequence in drawing:
            sequence.tokens.append(-(sequence.number * 100 + len(sequence.tokens) + 1))
            sequence.finished = len(sequence.tokens) == wanted[sequence]
        for family in dict.fromkeys(work.sequence.family for work in step.work if work.samples):
            plan.settle(family)
    assert plan.pool.used == 0
    for sequence, length in wanted.items():
        assert sequence.tokens == [-(sequence.number * 100 + place + 1) for place in range(length)]
    roomy = spare >= sum(blocks_for(sequence.length, block_tokens) for sequence in wanted) and max_seqs >= len(wanted)
    if sharing and roomy and all(min(lengths) > 1 for _, lengths in groups):
        assert plan.counts.prefill_tokens == sum(prompt for prompt, _ in groups)


def check_limits(plan: Scheduler, work, max_seqs: int, max_batched_tokens: int, chunked: bool) -> None:
    tokens = sum(item.count for item in work)
    assert tokens <= max_batched_tokens or (not chunked and len(work) == 1)
    assert len(work) <= len(plan.running) <= max_seqs
    counts = [item.count > 1 for item in work]
    assert counts == sorted(counts), "single tokens come first"
    holders: dict[int, int] = {}
    for sequence in plan.running:
        for block in sequence.blocks:
            holders[block] = holders.get(block, 0) + 1
    assert plan.pool.used == len(holders)


def run_on_shadow(step, shadow: dict[int, int], block_tokens: int) -> None:
    """What a model would do: copy blocks, write the new tokens, then read every token of each sequence back."""
    copied = {}
    for source, target in step.copies:
        for place in range(block_tokens):
            if source * block_tokens + place in shadow:
                copied[target * block_tokens + place] = shadow[source * block_tokens + place]
    shadow.update(copied)
    slot = lambda work, place: work.sequence.blocks[place // block_tokens] * block_tokens + place % block_tokens  # noqa: E731
    for work in step.work:
        for place, token in enumerate(work.sequence.ids(work.start, work.start + work.count), work.start):
            shadow[slot(work, place)] = token
    for work in step.work:
        end = work.start + work.count
        assert [shadow[slot(work, place)] for place in range(end)] == work.sequence.ids(0, end)


def test_preemption_is_counted_and_nothing_is_lost() -> None:
    plan = Scheduler(blocks=6, block_tokens=2, max_seqs=8, max_batched_tokens=64)
    family = plan.add([1, 2, 3], 4)
    while plan.busy:
        step = plan.next_pass()
        for work in step.work:
            plan.computed(work)
        for work in step.work:
            for sequence in work.samples:
                sequence.tokens.append(7)
                sequence.finished = len(sequence.tokens) == 6
        for work in step.work:
            plan.settle(work.sequence.family)
    assert plan.counts.preemptions > 0
    assert [len(member.tokens) for member in family.members] == [6, 6, 6, 6]
