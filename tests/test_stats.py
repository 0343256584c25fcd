"""Statistics of the engine: against a plain computation over every single token, in a real engine, and in a real run with the knob."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import runs
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rollout import TIGHT, generate, make_engine, random_prompts, with_limits

from fulltilt.loop import opening
from fulltilt.observe.console import Console
from fulltilt.rollout.sampler import Sampling
from fulltilt.rollout.stats import NO_STATS, EngineStats, Histogram, JointProgress, Recorder, RolloutProgress, line

ModelFolders = Callable[[str], Path]
PERCENTS = (50, 90, 99)
WITHIN = 0.005  # half the width of a bin
SAMPLES = 4


@dataclass(frozen=True)
class Made:
    """A pass of a made-up timeline."""

    pause: float  # since the pass before
    seconds: float
    steps: int
    running: int
    waiting: int
    kv_use: float
    prefill_tokens: int
    shared_tokens: int
    preemptions: int
    tokens: tuple[int, ...]  # drawn by each sample


@st.composite
def passes(draw: st.DrawFn) -> Made:
    steps = draw(st.sampled_from([1, 1, 2, 16]))
    counts = st.integers(0, 5)
    return Made(
        pause=draw(st.floats(0, 3)),
        seconds=draw(st.floats(1e-3, 3)),
        steps=steps,
        running=draw(counts),
        waiting=draw(counts),
        kv_use=draw(st.floats(0, 1)),
        prefill_tokens=draw(counts),
        shared_tokens=draw(counts),
        preemptions=draw(counts),
        tokens=tuple(draw(st.integers(0, steps)) for _ in range(SAMPLES)),
    )


timelines = st.lists(passes(), min_size=1, max_size=12)


@dataclass
class Plain:
    """Every token's time, one by one."""

    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_tokens: int = 0


def play(made: Sequence[Made], recorder: Recorder, now: float) -> Plain:
    """One call, told to the recorder and computed beside it."""
    found, start, newest, ended = Plain(), now, {}, set()
    recorder.start(now, SAMPLES)
    for each in made:
        begin = now + each.pause
        now = begin + each.seconds
        drawing = {sample: tokens for sample, tokens in enumerate(each.tokens) if tokens and sample not in ended}
        decoded = sum(tokens - (sample not in newest) for sample, tokens in drawing.items())
        for sample, tokens in drawing.items():
            for token in range(1, tokens + 1):
                at = begin + token * each.seconds / each.steps
                (found.later.append(at - newest[sample]) if sample in newest else found.first.append(at - start))
                newest[sample] = at
        ended |= {sample for sample, tokens in drawing.items() if tokens < each.steps}
        found.prefill_seconds += each.seconds if each.prefill_tokens else 0
        found.decode_seconds += each.seconds if decoded else 0
        found.decode_tokens += decoded
        seen = EngineStats(
            prefill_tokens=each.prefill_tokens, shared_tokens=each.shared_tokens, decode_tokens=decoded, passes=each.steps,
            preemptions=each.preemptions, most_running=each.running, most_waiting=each.waiting, kv_use=each.kv_use,
        )  # fmt: skip
        recorder.add_pass(seen, begin, now, tuple(drawing), sum(drawing.values()))
    return found


def exact(times: Sequence[float], percent: int) -> float:
    return sorted(times)[max(1, -(-percent * len(times) // 100)) - 1]


def check_times(found: Histogram, times: Sequence[float]) -> None:
    assert found.total == len(times)
    for percent in PERCENTS if times else ():
        assert found.percentile(percent) == pytest.approx(exact(times, percent), rel=WITHIN)


def check(stats: EngineStats, made: Sequence[Made], found: Plain) -> None:
    check_times(stats.first_token, found.first)
    check_times(stats.per_token, found.later)
    prefilled, shared, passed = (sum(getattr(each, name) for each in made) for name in ("prefill_tokens", "shared_tokens", "steps"))
    expected = {
        "rollout/prefill_tokens": prefilled,
        "rollout/decode_tokens": found.decode_tokens,
        "rollout/passes": passed,
        "rollout/preemptions": sum(each.preemptions for each in made),
        "rollout/most_running": max(each.running for each in made),
        "rollout/most_waiting": max(each.waiting for each in made),
        "rollout/kv_use": max(each.kv_use for each in made),
        "rollout/prefix_hit_rate": shared / (prefilled + shared) if prefilled + shared else 0,
        "rollout/mean_running": sum(each.running * each.steps for each in made) / passed,
        "rollout/mean_kv_use": sum(each.kv_use * each.steps for each in made) / passed,
        **({"rollout/prefill_tokens_per_s": prefilled / found.prefill_seconds} if prefilled else {}),
        **({"rollout/decode_tokens_per_s": found.decode_tokens / found.decode_seconds} if found.decode_tokens else {}),
    }
    written = stats.metrics()
    percentiles = {name for name in written if "/time_" in name}
    assert {name: value for name, value in written.items() if name not in percentiles} == pytest.approx(expected)
    times = {"time_to_first_token_s": found.first, "time_per_output_token_s": found.later}
    assert percentiles == {f"rollout/{name}/p{percent}" for name, seen in times.items() if seen for percent in PERCENTS}


@settings(max_examples=60, deadline=None)
@given(timelines)
def test_a_call_is_what_a_plain_computation_gives(made: list[Made]) -> None:
    recorder = Recorder()
    found = play(made, recorder, 1000.0)
    check(recorder.stats, made, found)
    assert recorder.stats.seconds == pytest.approx(sum(each.pause + each.seconds for each in made))


@settings(max_examples=30, deadline=None)
@given(timelines, timelines)
def test_calls_add_up_percentiles_included(one: list[Made], other: list[Made]) -> None:
    recorder = Recorder()
    found = play(one, recorder, 5.0)
    first = recorder.stats
    more = play(other, recorder, 900.0)
    check(recorder.stats, other, more)
    together = Plain(
        found.first + more.first, found.later + more.later, found.prefill_seconds + more.prefill_seconds,
        found.decode_seconds + more.decode_seconds, found.decode_tokens + more.decode_tokens,
    )  # fmt: skip
    check(NO_STATS + first + recorder.stats, [*one, *other], together)
    check(first, one, found)  # a call that is over does not change


def test_percentiles_of_rounds_are_not_means_of_percentiles() -> None:
    quick = EngineStats(per_token=Histogram.of([(0.01, 98)]))
    slow = EngineStats(per_token=Histogram.of([(1.0, 2)]))
    assert (quick + slow).per_token.percentile(90) == pytest.approx(0.01, rel=WITHIN)
    assert (quick + slow).per_token.percentile(99) == pytest.approx(1.0, rel=WITHIN)


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 1e9])
def test_any_time_has_a_bin(seconds: float) -> None:
    assert Histogram.of([(seconds, 3)]).total == 3


def burst(recorder: Recorder, begin: float, end: float) -> None:
    recorder.add_pass(EngineStats(decode_tokens=32, passes=16, most_running=2, kv_use=0.5), begin, end, (0, 1), 32)


def test_lines_come_by_seconds_of_generating_and_tell_of_what_is_new() -> None:
    said: list[str] = []
    recorder = Recorder()
    recorder.report(said.append, 10.0)
    recorder.start(100.0, 2)
    prefilled = EngineStats(prefill_tokens=1500, shared_tokens=500, passes=1, preemptions=3, most_running=1, most_waiting=1, kv_use=0.25)
    recorder.add_pass(prefilled, 100.0, 101.0, (0, 1), 2)
    burst(recorder, 101.0, 108.0)
    assert said == []
    recorder.start(500.0, 2)  # what lies between two calls is no generating
    recorder.add_pass(EngineStats(prefill_tokens=500, passes=1, most_running=2, kv_use=0.5), 500.0, 501.0, (0, 1), 2)
    assert said == []
    burst(recorder, 501.0, 502.6)
    assert said == [
        "rollout: 2 running, 0 waiting, KV 50%, prefix hits 20%, 3 preempted, prefill 1.0k tok/s, decode 7 tok/s, "
        "first token p50 1.00 s p99 1.00 s, per token p50 0.10 s p99 0.44 s"
    ]
    burst(recorder, 502.6, 518.6)
    assert said[1:] == ["rollout: 2 running, 0 waiting, KV 50%, 0 preempted, decode 2 tok/s, per token p50 1.00 s p99 1.00 s"]


def test_engines_at_the_same_time_share_a_line() -> None:
    """Which comes when each has told, or one tells again because another has no more to do."""
    said: list[str] = []
    joint = JointProgress(2, said.append)
    own = [EngineStats(decode_tokens=count, decode_seconds=2.0, preemptions=1, most_running=count // 100) for count in (1000, 600)]
    for engine in (1, 0, 1):
        joint.add(engine, RolloutProgress("alone", own[engine], own[engine]))
    assert len(said) == 1 and "rollout on 2 of 2 workers: 16 running, 0 waiting" in said[0]
    assert "2 preempted" in said[0] and "decode 800 tok/s" in said[0]
    joint.add(1, RolloutProgress("alone", own[1], own[1]))
    assert len(said) == 2 and "rollout on 1 of 2 workers: 6 running" in said[1]
    one = JointProgress(1, said.append)
    one.add(0, RolloutProgress("alone", own[0], own[0]))
    assert said[2] == "alone"


def test_a_line_as_the_manual_shows_it() -> None:
    stats = EngineStats(
        prefill_tokens=12_000, shared_tokens=88_000, decode_tokens=964_000, preemptions=3, prefill_seconds=12 / 51.2, decode_seconds=10.0,
        first_token=Histogram.of([(0.2105, 98), (0.9, 2)]), per_token=Histogram.of([(0.0081, 98), (0.009, 2)]),
    )  # fmt: skip
    said = line(stats, EngineStats(most_running=812, most_waiting=212, kv_use=0.63))
    assert f"    {said}\n" in (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()


# -- a real engine ----------------------------------------------------------------------------------------------------------------------


def test_the_numbers_of_a_real_engine_add_up(model_folders: ModelFolders) -> None:
    engine = make_engine(model_folders("qwen2"))
    prompts, sampling = random_prompts(6), Sampling(samples=4, max_new_tokens=40)
    groups = generate(engine, prompts, sampling)
    stats = engine.stats()
    drawn = [len(sample.ids) for group in groups for sample in group.samples]
    followed = sum(any(len(sample.ids) > 1 for sample in group.samples[1:]) for group in groups)
    assert max(drawn) > 17 and followed == len(prompts)  # there were bursts
    assert stats.prefill_tokens == sum(len(prompt.ids) for prompt in prompts)
    admitted = [len(group.prompt.ids) for group in groups for sample in group.samples[1:] if len(sample.ids) > 1]
    assert stats.shared_tokens == sum(admitted)
    assert stats.prefix_hit_rate == pytest.approx(sum(admitted) / (sum(admitted) + stats.prefill_tokens))
    assert stats.decode_tokens == sum(drawn) - len(drawn)
    assert (stats.first_token.total, stats.per_token.total) == (len(drawn), sum(drawn) - len(drawn))
    assert stats.preemptions == 0 and stats.most_waiting == len(drawn) - len(prompts)  # in the first pass one sample stands for its group
    assert 0 < stats.prefill_seconds < stats.seconds and 0 < stats.decode_seconds < stats.seconds
    assert 0 < stats.first_token.percentile(99) * (1 - WITHIN) < stats.seconds
    assert stats.per_token.percentile(99) * (1 - WITHIN) < stats.seconds
    assert 0 < stats.metrics()["rollout/mean_running"] <= stats.most_running
    assert 0 < stats.metrics()["rollout/mean_kv_use"] <= stats.kv_use


def test_a_small_cache_shows(model_folders: ModelFolders) -> None:
    roomy = make_engine(model_folders("qwen2"))
    engine, said = with_limits(roomy, TIGHT), list[str]()
    engine.report(said.append, 0.0)
    prompts, sampling = random_prompts(6), Sampling(samples=3, max_new_tokens=20)
    groups = generate(engine, prompts, sampling)
    stats = engine.stats()
    drawn = [len(sample.ids) for group in groups for sample in group.samples]
    assert stats.first_token.total + stats.per_token.total == sum(drawn) and stats.first_token.total == len(drawn)
    # What was sent away is computed again, so more is prefilled, and a token drawn at the end of that is not counted as decoded.
    assert stats.preemptions > 0 and 0 < stats.decode_tokens <= sum(drawn) - len(drawn)
    assert stats.prefill_tokens > sum(len(prompt.ids) for prompt in prompts)
    numbers = [tuple(map(int, re.findall(r"(\d+) (?:running|waiting|preempted)", text))) for text in said]
    running, waiting, preempted = zip(*numbers, strict=True)
    assert sum(preempted) == stats.preemptions
    assert (max(running), max(waiting)) == (stats.most_running, stats.most_waiting)
    assert running[0] + waiting[0] == len(drawn) and waiting[-1] == 0 and min(waiting) == 0
    assert all(one + other <= len(drawn) for one, other in zip(running, waiting, strict=True))


# -- the knob ---------------------------------------------------------------------------------------------------------------------------

COUNTS = {
    f"rollout/{name}" for name in ("prefill_tokens", "decode_tokens", "passes", "preemptions", "most_running", "kv_use", "prefix_hit_rate")
}
FURTHER = {f"rollout/{name}" for name in ("most_waiting", "mean_running", "mean_kv_use", "prefill_tokens_per_s", "decode_tokens_per_s")} | {
    f"rollout/{name}/p{percent}" for name in ("time_to_first_token_s", "time_per_output_token_s") for percent in PERCENTS
}
ONE_STEP = ("run.eval_every=0", "run.eval_before=false", "run.steps=1")


@pytest.mark.parametrize("switch", ["true", "false"])
def test_the_knob_decides_on_lines_and_figures(
    switch: str, tmp_path: Path, model_folders: ModelFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "STATS_INTERVAL_S", 0.0)  # a tiny rollout is over within ten seconds
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    said = runs.train(folder, *ONE_STEP, f"rollout.log_stats={switch}").said
    (metrics,) = runs.metrics(folder)
    figures = {name for name in metrics if name.startswith("rollout/")} - {"rollout/entropy"}  # of what was drawn, not of how
    assert metrics["rollout/decode_tokens"] > 0
    out = io.StringIO()
    with contextlib.chdir(folder):
        opening.evaluate(runs.read_config(folder, f"rollout.log_stats={switch}"), Console(stdout=out, terminal=False), latest=False)
    if switch == "true":
        assert figures == COUNTS | FURTHER
        assert metrics["rollout/decode_tokens_per_s"] > 0
        assert len(re.findall(r"^rollout: \d+ running, \d+ waiting, KV .*, decode .* tok/s", said, re.MULTILINE)) >= 1
        assert "rollout: 3 running" in out.getvalue()  # the validation prompts
    else:
        assert figures == COUNTS
        assert "running" not in said + out.getvalue()
