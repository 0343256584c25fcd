"""The native engine on every model of the list: its tokens, log-probs, stops and independence of the batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import GenerationConfig, PreTrainedTokenizerFast
from variants import sample_cases

from fulltilt.kernels import sampling as sampling_kernels
from fulltilt.model.load import end_tokens, load_model
from fulltilt.model.verify import packed_logprobs, verify
from fulltilt.records import Group, Prompt, UserError
from fulltilt.rollout.collect import collect
from fulltilt.rollout.decode import Decoder
from fulltilt.rollout.engine import EngineContext, EngineLimits, FreeSeats
from fulltilt.rollout.engines.native import NativeEngine
from fulltilt.rollout.kv_cache import blocks_for
from fulltilt.rollout.runner import bytes_per_token
from fulltilt.rollout.sampler import Sampling, sample_seed
from fulltilt.rollout.stop_strings import StopStrings
from fulltilt.schema import ModelConfig

CPU = torch.device("cpu")
ROOMY = EngineLimits(blocks=600, block_tokens=16, max_seqs=256, max_batched_tokens=4096)
TIGHT = EngineLimits(blocks=14, block_tokens=4, max_seqs=5, max_batched_tokens=7)
TIGHT_SYSTEM = EngineLimits(blocks=27, block_tokens=4, max_seqs=5, max_batched_tokens=30)
OTHERS = {
    "tight": TIGHT,
    "no sharing": EngineLimits(blocks=60, block_tokens=4, max_seqs=9, max_batched_tokens=64, prefix_sharing=False),
    "whole prompts": EngineLimits(blocks=60, block_tokens=4, max_seqs=9, max_batched_tokens=8, chunked_prefill=False),
}


def make_engine(folder, limits: EngineLimits = ROOMY) -> NativeEngine:
    model = load_model(ModelConfig(path=str(folder)), CPU)
    return NativeEngine(
        EngineContext(model, models.tokenizer(), end_tokens(ModelConfig(path=str(folder)), models.tokenizer()), verify(model), limits)
    )


def with_limits(engine: NativeEngine, limits: EngineLimits) -> NativeEngine:
    layers = dict(enumerate(engine.runner.layers))
    return NativeEngine(EngineContext(engine.runner.model, engine.tokenizer, engine.end_tokens, layers, limits))


def random_prompts(count: int, seed: int = 0) -> list[Prompt]:
    random = np.random.default_rng(seed)
    return [Prompt(uid=i, ids=random.integers(3, 90, int(random.integers(1, 30))), text="") for i in range(count)]


def generate(engine: NativeEngine, prompts: Sequence[Prompt], sampling: Sampling, seed: int = 5) -> tuple[Group, ...]:
    return collect(engine.generate, prompts, sampling, seed, lambda group: None)


one_engine = cache(make_engine)

# Plain layers, windows, capped scores, and experts; the others run in make check-all. Blocks that are mixed up show in the log-probs of
# every family, too.
IN_SHORT = ("qwen2", "gemma3", "gemma2", "qwen3-moe")


class TestEveryModel:
    @pytest.mark.parametrize("family", sample_cases(models.FAMILIES, *IN_SHORT, long=models.FAMILIES))
    def test_log_probs_are_the_trainers(self, family: str, model_folders) -> None:
        engine = with_limits(one_engine(model_folders(family)), TIGHT)
        groups = generate(engine, random_prompts(4), Sampling(samples=3, max_new_tokens=24, temperature=1.0))
        assert engine.stats().preemptions > 0
        check_trainers(engine, groups)

    @pytest.mark.parametrize("family", sample_cases(models.FAMILIES, *IN_SHORT))
    def test_greedy_text_is_transformers(self, family: str, model_folders) -> None:
        folder = model_folders(family)
        reference = models.reference(folder)
        engine, prompts = with_limits(one_engine(folder), TIGHT), random_prompts(4, seed=3)
        for group in generate(engine, prompts, Sampling(samples=1, max_new_tokens=24, temperature=0.0)):
            ids = torch.tensor(group.prompt.ids)[None]
            expected = reference.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=1)[0, ids.shape[1] :]
            assert group.samples[0].ids.tolist() == expected.tolist()
            assert group.samples[0].text == models.tokenizer().decode(expected, skip_special_tokens=True)

    @pytest.mark.parametrize("family", sample_cases(models.FAMILIES, "gemma3", "qwen3-moe"))
    def test_a_sample_does_not_depend_on_the_batch(self, family: str, model_folders) -> None:
        engine = one_engine(model_folders(family))
        prompts = random_prompts(6)
        sampling = Sampling(samples=3, max_new_tokens=16)
        expected = generate(engine, prompts, sampling)
        for limits in OTHERS.values():
            check_same(expected, generate(with_limits(engine, limits), prompts, sampling))
        for group in expected[:3]:
            check_same([group], generate(engine, [group.prompt], sampling))
        check_same(expected[::-1], generate(engine, prompts[::-1], sampling))


def check_same(left: Sequence[Group], right: Sequence[Group]) -> None:
    for a, b in zip(left, right, strict=True):
        assert a.prompt is b.prompt
        assert [sample.ids.tolist() for sample in a.samples] == [sample.ids.tolist() for sample in b.samples]
        assert [sample.finish for sample in a.samples] == [sample.finish for sample in b.samples]


@pytest.mark.matrix
@settings(max_examples=15, deadline=None)
@given(
    blocks=st.integers(13, 40), max_seqs=st.integers(1, 12), tokens=st.integers(1, 60), samples=st.integers(1, 4), seed=st.integers(0, 99)
)
def test_any_limits_give_the_same_samples(model_folders, blocks: int, max_seqs: int, tokens: int, samples: int, seed: int) -> None:
    engine = one_engine(model_folders("qwen2"))
    prompts, sampling = random_prompts(3, seed), Sampling(samples=samples, max_new_tokens=10)
    limits = EngineLimits(blocks=blocks, block_tokens=4, max_seqs=max_seqs, max_batched_tokens=tokens)
    check_same(generate(engine, prompts, sampling, seed), generate(with_limits(engine, limits), prompts, sampling, seed))


def check_trainers(engine: NativeEngine, groups: Sequence[Group]) -> None:
    """Every token has the log-prob that the trainer gives it behind this very prompt and response: nothing is mixed up."""
    samples = [(group.prompt, sample) for group in groups for sample in group.samples]
    with torch.no_grad():
        trainer, _ = packed_logprobs(engine.runner.model, [np.concatenate([prompt.ids, sample.ids]) for prompt, sample in samples])
    for (prompt, sample), logprobs in zip(samples, trainer, strict=True):
        np.testing.assert_allclose(sample.logprobs, logprobs[len(prompt.ids) - 1 :].numpy(), rtol=0, atol=1e-5)


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[Prompt], Sampling, dict[tuple[int, int], int]]:
    """Prompts with beginnings in common, or the same altogether; stop strings; lengths forced here and there."""
    random = np.random.default_rng(draw(st.integers(0, 999)))
    beginning = random.integers(3, 90, 24)
    shapes = draw(st.lists(st.tuples(st.integers(0, 24), st.integers(0, 9)).filter(any), min_size=1, max_size=5))
    ids = [np.concatenate([beginning[:shared], random.integers(3, 90, own)]) for shared, own in shapes]
    prompts = [Prompt(uid=uid, ids=tokens, text="") for uid, tokens in enumerate(ids)]
    stop = draw(st.sampled_from([(), ("a", "b", "cd", "7")]))
    sampling = Sampling(samples=draw(st.integers(1, 4)), max_new_tokens=draw(st.integers(1, 20)), stop=stop)
    everyone = [(uid, index) for uid in range(len(prompts)) for index in range(sampling.samples)]
    forced = draw(st.lists(st.sampled_from(everyone), unique=True, max_size=len(everyone)))
    return prompts, sampling, {sample: int(random.integers(1, sampling.max_new_tokens + 1)) for sample in forced}


@pytest.mark.parametrize("family", sample_cases(["qwen2", "mistral"], "mistral"))
@settings(max_examples=12, deadline=None)
@given(
    request=requests(), block_tokens=st.sampled_from([1, 2, 4, 16]), spare=st.just(0) | st.integers(0, 12), max_seqs=st.integers(1, 9),
    tokens=st.integers(1, 40), chunked=st.booleans(), sharing=st.booleans(), ahead=st.booleans(),
)  # fmt: skip
def test_random_requests(model_folders, family, request, block_tokens, spare, max_seqs, tokens, chunked, sharing, ahead) -> None:
    """Down to the smallest legal cache, no sample is lost, repeated or mixed with another; also where passes are launched ahead, as on a
    GPU."""
    prompts, sampling, lengths = request
    longest = max(len(prompt.ids) for prompt in prompts) + sampling.max_new_tokens
    limits = EngineLimits(blocks_for(longest, block_tokens) + spare, block_tokens, max_seqs, tokens, chunked, sharing)
    roomy = one_engine(model_folders(family))
    engine = with_limits(roomy, limits)
    engine.decoder.overlaps = ahead
    expected = {group.prompt.uid: group for group in roomy.generate(prompts, sampling, 3, lengths)}
    found = list(engine.generate(prompts, sampling, 3, lengths))
    assert sorted(group.prompt.uid for group in found) == [prompt.uid for prompt in prompts]
    check_same([expected[group.prompt.uid] for group in found], found)
    check_trainers(engine, found)
    for group in found:
        assert [sample.index for sample in group.samples] == list(range(sampling.samples))
        for sample in group.samples:
            assert len(sample.ids) == lengths.get((group.prompt.uid, sample.index), len(sample.ids)) <= sampling.max_new_tokens


@pytest.mark.long
def test_passes_launched_ahead_give_the_same_samples(model_folders, monkeypatch) -> None:
    """Rows end in the middle of passes while the next one is on its way; blocks are short now and then."""
    engine = make_engine(model_folders("llama"))
    prompts, sampling = random_prompts(6), Sampling(samples=4, max_new_tokens=120)
    random = np.random.default_rng(1)
    lengths = {(prompt.uid, index): int(random.integers(1, 121)) for prompt in prompts for index in range(4)}
    plain = list(engine.generate(prompts, sampling, 7, lengths))
    short = EngineLimits(blocks=60, block_tokens=4, max_seqs=20, max_batched_tokens=64)
    for limits, burst in ((ROOMY, 16), (short, 5)):
        ahead = with_limits(engine, limits)
        ahead.decoder.overlaps = True
        monkeypatch.setattr(ahead.decoder, "burst", lambda rows, steps=burst: steps)
        starts = counted(ahead.decoder)
        found = sorted(ahead.generate(prompts, sampling, 7, lengths), key=lambda group: group.prompt.uid)
        check_same(sorted(plain, key=lambda group: group.prompt.uid), found)
        check_trainers(ahead, found)
        # All but the first token of a sample, and the first after it was preempted, which come from prefill.
        assert 0 <= sum(lengths.values()) - len(lengths) - ahead.stats().decode_tokens <= ahead.stats().preemptions
        assert starts["launch"] > starts["start"] > 0, "no pass was launched ahead"


class SlowFeed:
    """Answers every request with what is left of some prompts, at most as many as there are seats, after it was polled a few times."""

    def __init__(self, prompts: Sequence[Prompt], polls: int) -> None:
        self.left, self.polls, self.asked, self._left_to_poll = list(prompts), polls, list[int](), 0
        self.longest = max(len(prompt.ids) for prompt in prompts)

    def ask(self, seats: FreeSeats) -> None:
        self.asked.append(seats.groups)
        self._left_to_poll = self.polls

    def take(self, *, wait: bool) -> list[Prompt] | None:
        if self._left_to_poll and not wait:
            self._left_to_poll -= 1
            return None
        taken, self.left = self.left[: self.asked[-1]], self.left[self.asked[-1] :]
        return taken


SIX_PROMPTS = random_prompts(6)


@cache
def samples_of_six(engine: NativeEngine, sampling: Sampling) -> tuple[Group, ...]:
    return generate(engine, SIX_PROMPTS, sampling)


@pytest.mark.long
@settings(max_examples=10, deadline=None)
@given(
    blocks=st.integers(13, 60), max_seqs=st.integers(1, 12), tokens=st.integers(4, 60), samples=st.integers(1, 3), first=st.integers(0, 3),
    polls=st.integers(0, 3), ahead=st.booleans(), sharing=st.booleans(),
)  # fmt: skip
def test_prompts_that_come_while_others_run_get_the_same_samples(
    model_folders, blocks, max_seqs, tokens, samples, first, polls, ahead, sharing
) -> None:
    engine = one_engine(model_folders("qwen2"))
    prompts, sampling = SIX_PROMPTS, Sampling(samples=samples, max_new_tokens=20)
    fed = with_limits(engine, EngineLimits(blocks, 4, max_seqs, tokens, prefix_sharing=sharing))
    fed.decoder.overlaps = ahead
    feed, found = SlowFeed(prompts[first:], polls), list[Group]()
    for item in fed.generate_fed(prompts[:first], sampling, 5, feed):
        if isinstance(item, FreeSeats):
            assert 0 < item.groups <= max(1, max_seqs // samples) + max(1, max_seqs // (4 * samples))
            feed.ask(item)
        else:
            assert item.prompt is prompts[item.place]
            found.append(item)
    check_same(samples_of_six(engine, sampling), sorted(found, key=lambda group: group.place))
    assert not feed.left and len(feed.asked) >= 2
    assert fed.stats().first_token.total == len(prompts) * samples and fed.recorder._unfinished == 0


def test_an_engine_asks_for_what_it_can_start_and_for_a_few_that_wait(model_folders) -> None:
    """By seats and by blocks; of those that wait, for a quarter of the seats' number at most."""
    prompts, sampling = random_prompts(12), Sampling(samples=2, max_new_tokens=8)
    for limits, most in (
        (replace(ROOMY, max_seqs=6), 3 + 1),
        (EngineLimits(blocks=24, block_tokens=4, max_seqs=50, max_batched_tokens=64), 25 + 6),
    ):
        engine = with_limits(one_engine(model_folders("qwen2")), limits)
        feed = SlowFeed(prompts[3:], 0)
        for item in engine.generate_fed(prompts[:3], sampling, 5, feed):
            if isinstance(item, FreeSeats):
                feed.ask(item)
        assert max(feed.asked) <= most
        assert engine.stats().preemptions == 0 or limits.blocks < 30
    assert list(engine.generate([], sampling, 5)) == [] and engine.stats().passes == 0, "statistics are those of this call"


def test_the_host_looks_sooner_where_steps_take_longer(model_folders) -> None:
    decoder = make_engine(model_folders("llama")).decoder
    assert decoder.burst(1024) == 16, "nothing runs meanwhile on a CPU"
    decoder.overlaps = True
    steps = {}
    for parameters in (494e6, 1.54e9, 7.6e9):
        decoder._parameters = int(parameters)
        steps[parameters] = [decoder.burst(rows) for rows in (1, 64, 256, 1024)]
    assert list(steps.values()) == [[16, 16, 16, 12], [16, 16, 16, 4], [16, 13, 4, 4]]


def counted(decoder: Decoder) -> dict[str, int]:
    """How often a batch was started, and steps launched."""
    counts = {"start": 0, "launch": 0, "steps": 0}
    start, launch = decoder.start, decoder.launch

    def counted_start(*arguments: Any) -> None:
        counts["start"] += 1
        start(*arguments)

    def counted_launch(steps: int) -> Callable[[], Any]:
        counts["launch"] += 1
        counts["steps"] += steps
        return launch(steps)

    decoder.start, decoder.launch = counted_start, counted_launch  # type: ignore[method-assign]
    return counts


def test_no_step_is_planned_beyond_the_longest_response(model_folders) -> None:
    engine = make_engine(model_folders("llama"))
    prompts = random_prompts(2)
    for most in (1, 2, 4, 17, 40):
        limited = with_limits(engine, ROOMY)
        limited.decoder.overlaps = True
        launched = counted(limited.decoder)
        lengths = {(prompt.uid, index): most for prompt in prompts for index in range(2)}
        list(limited.generate(prompts, Sampling(samples=2, max_new_tokens=most), 3, lengths))
        assert launched["steps"] == most - 1 and limited.stats().passes == most


def test_one_call_at_a_time(model_folders) -> None:
    engine = make_engine(model_folders("llama"))
    sampling = Sampling(samples=2, max_new_tokens=40)
    lengths = {(uid, index): 3 + 18 * uid for uid in range(3) for index in range(2)}
    first = engine.generate(random_prompts(3), sampling, 3, lengths)
    next(first)
    list(engine.generate(random_prompts(3), sampling, 3, lengths))
    with pytest.raises(RuntimeError, match="another call of generate has started"):
        next(first)


def test_a_system_prompt_is_computed_once(model_folders) -> None:
    """Also by prompts of one and the same pass, some of which read what another of them writes."""
    engine = make_engine(model_folders("llama"))
    system = np.arange(3, 83)
    prompts = [
        Prompt(uid=uid, ids=np.concatenate([system, np.array(own, dtype=np.int64)]), text="")
        for uid, own in enumerate([[5], [6, 7], [8, 9, 10], []])
    ]
    groups = generate(engine, prompts, Sampling(samples=2, max_new_tokens=12))
    check_trainers(engine, groups)
    # All of the last prompt is known, but its last token is computed, and with it the block that it ends.
    assert engine.stats().prefill_tokens == 81 + 2 + 3 + 16
    for limits in (TIGHT_SYSTEM, replace(TIGHT_SYSTEM, prefix_sharing=False)):
        tight = with_limits(engine, limits)
        again = generate(tight, prompts, Sampling(samples=2, max_new_tokens=12))
        check_same(groups, again)
        check_trainers(tight, again)
        assert (tight.stats().preemptions > 0) == (tight.stats().shared_tokens > 0) == limits.prefix_sharing


def test_preemption_sharing_and_chunking_show_in_the_statistics(model_folders) -> None:
    engine = make_engine(model_folders("llama"))
    prompts, sampling = random_prompts(6), Sampling(samples=4, max_new_tokens=20)
    prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
    generate(engine, prompts, sampling)
    roomy = engine.stats()
    assert roomy.preemptions == 0 and roomy.prefill_tokens == prompt_tokens and 0 < roomy.kv_use < 1
    assert roomy.shared_tokens > 0 and roomy.most_running > 5
    alone = with_limits(engine, OTHERS["no sharing"])
    generate(alone, prompts, sampling)
    assert alone.stats().prefill_tokens >= 4 * prompt_tokens and alone.stats().shared_tokens == 0
    tight = with_limits(engine, TIGHT)
    generate(tight, prompts, sampling)
    assert tight.stats().preemptions > 0 and tight.stats().most_running <= 5 and tight.stats().kv_use == 1.0


def test_a_cache_too_small_for_one_sample_is_refused(model_folders) -> None:
    engine = make_engine(model_folders("llama"), EngineLimits(blocks=3, block_tokens=4, max_seqs=4, max_batched_tokens=64))
    with pytest.raises(UserError, match=r"rollout.kv_bytes"):
        generate(engine, random_prompts(4), Sampling(max_new_tokens=20))


def test_groups_come_in_prompt_order_and_are_seen_as_they_finish(model_folders) -> None:
    engine = make_engine(model_folders("llama"), TIGHT)
    prompts, seen = random_prompts(8), []
    groups = collect(engine.generate, prompts, Sampling(samples=2, max_new_tokens=15), 1, lambda group: seen.append(group.prompt.uid))
    assert [group.prompt.uid for group in groups] == [prompt.uid for prompt in prompts]
    assert sorted(seen) == sorted(prompt.uid for prompt in prompts) and all(len(group.samples) == 2 for group in groups)


def test_memory_is_given_back_and_taken_again(model_folders) -> None:
    engine = make_engine(model_folders("llama"))
    prompts, sampling = random_prompts(3), Sampling(samples=2, max_new_tokens=8)
    first = generate(engine, prompts, sampling)
    held = engine.runner.held_bytes
    assert held == 600 * 16 * 2 * 2 * 2 * 8 * 4  # blocks, tokens, layers, keys and values, key heads, width, bytes
    engine.release()
    assert engine.runner.held_bytes == 0
    check_same(first, generate(engine, prompts, sampling))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell how much memory a process has")
def test_a_large_cache_takes_memory_only_where_it_is_written(model_folders) -> None:
    """On a CPU, where rollout.memory_fraction may ask for all that the computer has."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    engine = make_engine(model_folders("llama-tied"))
    per_block = engine.limits.block_tokens * bytes_per_token(dict(enumerate(engine.runner.layers)), engine.runner.model.dtype)
    large = with_limits(engine, replace(ROOMY, blocks=(4 << 30) // per_block))
    before = resident()
    large.runner.acquire()
    assert large.runner.held_bytes > 3 << 30 and resident() - before < 256 << 20
    assert not large.runner.keys[0][:64].any()  # where nothing was written there are zeros
    large.release()


def test_the_engine_runs_the_trainers_own_parameters(model_folders) -> None:
    engine = make_engine(model_folders("llama"))
    prompts, sampling = random_prompts(3), Sampling(samples=1, max_new_tokens=8, temperature=0.0)
    before = generate(engine, prompts, sampling)
    with torch.no_grad():
        engine.runner.model.get_output_embeddings().weight.neg_()
    engine.sync(1, ())
    after = generate(engine, prompts, sampling)
    assert any(a.samples[0].ids.tolist() != b.samples[0].ids.tolist() for a, b in zip(before, after, strict=True))


# -- stops ------------------------------------------------------------------------------------------------------------------------------


def test_every_end_token_of_the_generation_config_ends_a_sample(tmp_path: Path) -> None:
    models.save("llama", tmp_path)
    GenerationConfig(eos_token_id=[20, 33, 47]).save_pretrained(tmp_path)
    config, tokenizer = ModelConfig(path=str(tmp_path)), models.tokenizer()
    model, ends = load_model(config, CPU), end_tokens(config, tokenizer)
    assert ends == {1, 20, 33, 47}
    engine = NativeEngine(EngineContext(model, tokenizer, ends, verify(model), ROOMY))
    samples = [s for g in generate(engine, random_prompts(8), Sampling(samples=8, max_new_tokens=40)) for s in g.samples]
    ended = [int(s.ids[-1]) for s in samples if s.finish == "stop"]
    assert len(set(ended)) >= 3 and set(ended) <= ends
    assert all(not set(s.ids[:-1].tolist()) & ends for s in samples)
    assert all(len(s.ids) == 40 for s in samples if s.finish == "length")


def test_stop_strings_across_token_borders(model_folders) -> None:
    """Each character is a token, so a stop string of two characters always straddles a border."""
    engine = make_engine(model_folders("qwen2"))
    prompts = random_prompts(6)
    free = [s for g in generate(engine, prompts, Sampling(samples=4, max_new_tokens=30)) for s in g.samples]
    stop = next(s.text[10:12] for s in free if len(s.text) > 14 and s.text.find(s.text[10:12]) == 10)
    stopped = [s for g in generate(engine, prompts, Sampling(samples=4, max_new_tokens=30, stop=(stop,))) for s in g.samples]
    hits = 0
    for a, b in zip(free, stopped, strict=True):
        place = a.text.find(stop)
        if place < 0:
            assert a.ids.tolist() == b.ids.tolist() and b.finish == a.finish
        else:
            hits += 1
            assert b.text == a.text[:place] and b.finish == "stop"
            assert b.ids.tolist() == a.ids[: len(b.ids)].tolist() and len(b.ids) >= place + len(stop)
    assert hits > 0


def test_forced_lengths_are_reached_exactly_and_change_nothing_else(model_folders) -> None:
    """Samples with a forced length go on through end tokens and stop strings; the others are as without."""
    engine = make_engine(model_folders("llama"))
    engine = NativeEngine(
        EngineContext(engine.runner.model, engine.tokenizer, frozenset(range(20, 40)), dict(enumerate(engine.runner.layers)), ROOMY)
    )
    prompts, sampling = random_prompts(4), Sampling(samples=3, max_new_tokens=24, stop=("a", "b", "c"))
    lengths = {(uid, index): 1 + (7 * uid + 13 * index) % 24 for uid in range(4) for index in (0, 2)} | {(99, 0): 5}
    free = generate(engine, prompts, sampling)
    for limits in (ROOMY, TIGHT):
        runner = NativeEngine(
            EngineContext(engine.runner.model, engine.tokenizer, engine.end_tokens, dict(enumerate(engine.runner.layers)), limits)
        )
        groups = {group.prompt.uid: group for group in runner.generate(prompts, sampling, 5, lengths)}
        for without in free:
            for before, after in zip(without.samples, groups[without.prompt.uid].samples, strict=True):
                forced = lengths.get((without.prompt.uid, before.index))
                if forced is None:
                    assert after.ids.tolist() == before.ids.tolist() and after.text == before.text and after.finish == before.finish
                else:
                    common = min(forced, len(before.ids))
                    assert len(after.ids) == len(after.logprobs) == forced and after.finish == "length"
                    assert after.ids[:common].tolist() == before.ids[:common].tolist()
                    assert after.text == models.tokenizer().decode(after.ids, skip_special_tokens=True)
    with pytest.raises(UserError, match=r"from 1 to rollout.max_new_tokens"):
        list(engine.generate(prompts, sampling, 5, {(0, 0): 41}))


def test_stop_window_sees_a_string_of_many_bytes() -> None:
    stops = StopStrings(models.tokenizer(), ["Answer:", "##"])
    encode = lambda text: models.tokenizer()(text).input_ids  # noqa: E731
    assert stops.ended(encode("x" * 50 + "Answer:")) and stops.ended(encode("12##"))
    assert not stops.ended(encode("x" * 50 + "Answer")) and not stops.ended(encode("# #"))
    assert stops.text(encode("12 ## Answer: 3")) == "12 "


def test_stop_strings_with_tokenizers_that_swallow_spaces_or_split_characters() -> None:
    """A sentencepiece-style decoder drops the space that a text begins with; a byte-level one needs several tokens for one character."""
    words = Tokenizer(tokenizer_models.WordLevel({"<unk>": 0, "\u2581END": 1, "\u2581go": 2, "\u2581a": 3}, unk_token="<unk>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    stops = StopStrings(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>"), [" END"])
    assert stops.ended([1]) and stops.text([1]) == ""
    assert stops.ended([2, 1]) and stops.text([2, 1]) == "go" and stops.text([2, 2]) == "go go"
    assert not stops.ended([2])

    alphabet = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    letters = Tokenizer(tokenizer_models.BPE(alphabet, []))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters)
    stops = StopStrings(tokenizer, ["終わり"])
    ids = tokenizer("はい、終わり").input_ids
    assert len(ids) == 18 and stops.ended(ids) and not stops.ended(ids[:-1]) and stops.text(ids) == "はい、"


def test_ids_beyond_the_tokenizer_are_sampled_and_kept(model_folders) -> None:
    """The vocabulary is larger than the tokenizer: such ids have no text but they are what was sampled."""
    engine = make_engine(model_folders("llama"))
    samples = [s for g in generate(engine, random_prompts(8), Sampling(samples=8, max_new_tokens=30, temperature=3.0)) for s in g.samples]
    beyond = [s for s in samples if (s.ids >= len(models.tokenizer())).any()]
    assert beyond and all(len(s.ids) == len(s.logprobs) for s in beyond)
    assert any(len(s.text) < len(s.ids) for s in beyond)


# -- sampling ---------------------------------------------------------------------------------------------------------------------------


def draw(logits: torch.Tensor, seeds: np.ndarray, places: np.ndarray, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """As the engine draws first tokens."""
    numbers = torch.from_numpy(seeds.view(np.int64)), torch.from_numpy(places.astype(np.int64))
    return sampling_kernels.sample(logits, *numbers, sampling.temperature, sampling.top_k, sampling.top_p)


def test_tokens_are_drawn_from_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
    count = 20_000
    seeds = np.array([sample_seed(0, 0, i) for i in range(count)])
    for temperature in (1.0, 0.5):
        tokens, logprobs = draw(logits.repeat(count, 1), seeds, np.zeros(count), Sampling(temperature=temperature))
        expected = (logits / temperature).softmax(-1)
        observed = torch.bincount(tokens, minlength=5) / count
        assert (observed - expected).abs().max() < 0.012
        torch.testing.assert_close(logprobs, expected.log()[tokens], rtol=0, atol=1e-5)


def test_top_k_and_top_p_cut_but_log_probs_stay_whole() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5]]).repeat(3000, 1)
    seeds, first = np.array([sample_seed(1, 1, i) for i in range(3000)]), np.zeros(3000)
    tokens, logprobs = draw(logits, seeds, first, Sampling(top_k=2))
    assert set(tokens.tolist()) == {0, 1}
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0])
    tokens, _ = draw(logits, seeds, first, Sampling(top_p=0.85))  # 0.55, 0.20, 0.12 reach 0.85; 0.07 and 0.03 do not count
    assert set(tokens.tolist()) == {0, 1, 4}
    assert set(draw(logits, seeds, first, Sampling(top_p=0.01))[0].tolist()) == {0}
    greedy, _ = draw(logits, seeds, first, Sampling(temperature=0.0))
    assert set(greedy.tolist()) == {0}
