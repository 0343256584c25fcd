"""The native engine on a model that is divided among the members of a tensor-parallel group: all draw the tokens of one process.

The four processes of the pool of workers serve all, as in test_tensor_parallel.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import devices
import models
import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_rollout import ROOMY, random_prompts
from test_tensor_parallel import ALL, BIASED, STACKED, UNEVEN, Case, TensorWorker, build, call, finish

from fulltilt.batching.pack import pack
from fulltilt.model.attention import LayerShape
from fulltilt.model.heads import Head
from fulltilt.model.verify import run_packed
from fulltilt.parallel.cuts import vocabulary_rows
from fulltilt.parallel.tensor import member_layers
from fulltilt.records import Group, Prompt, Row
from fulltilt.rollout.collect import collect
from fulltilt.rollout.decode import WORK, CapturedStep, count_nothing
from fulltilt.rollout.engine import EngineContext, EngineLimits
from fulltilt.rollout.engines.native import NativeEngine
from fulltilt.rollout.sampler import Sampling
from fulltilt.rollout.stats import EngineStats
from fulltilt.training.roles import Policy

SAMPLED = Sampling(samples=3, max_new_tokens=8, temperature=0.8)
GREEDY = Sampling(samples=1, max_new_tokens=8, temperature=0.0)
STOPS = replace(SAMPLED, stop=("a", "b", "cd", "7"))
RESTRICTED = replace(SAMPLED, top_k=20, top_p=0.9)
TIGHT = EngineLimits(blocks=11, block_tokens=4, max_seqs=7, max_batched_tokens=23)
UNSHARED = EngineLimits(blocks=60, block_tokens=4, max_seqs=7, max_batched_tokens=31, prefix_sharing=False)
WHOLE_PROMPTS = EngineLimits(blocks=60, block_tokens=4, max_seqs=7, max_batched_tokens=8, chunked_prefill=False)
SAMPLINGS = {SAMPLED: "sampled", GREEDY: "greedy", STOPS: "stop strings", RESTRICTED: "top-k and top-p"}
LIMITS = {ROOMY: "roomy", TIGHT: "tight", UNSHARED: "unshared", WHOLE_PROMPTS: "whole prompts"}
WIDTH: Any = models.SMALL["hidden_size"]
END = models.tokenizer().eos_token_id
BURST_ROWS = int(1e8)  # so many that small models decode few steps in a row
TOLERANCE = 1e-5  # of log-probs, which the engine gives in float32


@dataclass(frozen=True)
class Rollout(Case):
    """A model, and what is generated on it."""

    dtype: str = "float32"
    sampling: Sampling = SAMPLED
    limits: EngineLimits = ROOMY
    lengths: Mapping[tuple[int, int], int] = field(default_factory=dict)  # forced ones, by prompt and sample

    def __str__(self) -> str:
        odd = [f"{name}={value}" for name in ("changes", "adapters", "fused", "lengths", "whole_experts") if (value := getattr(self, name))]
        return " ".join([self.family, str(self.size), self.dtype, SAMPLINGS[self.sampling], LIMITS[self.limits], *odd])


@dataclass(frozen=True, eq=False)
class Generated:
    """What a process generates, and what it then computes of it."""

    groups: tuple[Group, ...]  # in the order of the prompts
    finished: list[int]  # the places of the prompts, in the order in which their groups were finished
    logprobs: np.ndarray  # of all tokens of all samples
    of_trainer: np.ndarray  # the same, computed by the trainer
    stats: EngineStats
    passes: list[int]  # tokens of each pass
    cache_bytes: int
    eager_reason: str | None  # why no graphs are captured although they were asked for


def engine_on(model: Any, case: Rollout, layers: Mapping[int, LayerShape]) -> NativeEngine:
    return NativeEngine(EngineContext(model, models.tokenizer(), frozenset({END}), layers, case.limits))


def generate(engine: NativeEngine, case: Rollout) -> Generated:
    model: Any = engine.runner.model
    passes: list[int] = []
    finished: list[int] = []
    with model.base_model.register_forward_pre_hook(lambda body, args, given: passes.append(given["input_ids"].numel()), with_kwargs=True):
        run = partial(engine.generate, lengths=case.lengths)
        groups: tuple[Group, ...] = collect(run, prompts(), case.sampling, 5, lambda group: finished.append(group.place))
    rows = rows_of(groups)
    of_trainer = Policy("actor", model, case.sampling.temperature or 1.0).annotate(pack(rows, range(len(rows))))
    logprobs = np.concatenate([sample.logprobs for group in groups for sample in group.samples])
    return Generated(
        groups, finished, logprobs, of_trainer.numpy(), engine.stats(), passes, engine.runner.held_bytes, engine.decoder.eager_reason
    )


def prompts() -> list[Prompt]:
    """The last one begins as the longest of the others."""
    others = random_prompts(3)
    longest = max(others, key=lambda prompt: len(prompt.ids))
    return [*others, Prompt(uid=len(others), ids=np.append(longest.ids, [7, 8]), text="")]


def rows_of(groups: tuple[Group, ...]) -> list[Row]:
    """The samples as the trainer sees them."""
    both = [(group.prompt.ids, sample.ids) for group in groups for sample in group.samples]
    return [Row(ids=np.concatenate([prompt, ids]), mask=np.arange(len(prompt) + len(ids)) >= len(prompt)) for prompt, ids in both]


def layers_of(model: Any) -> dict[int, LayerShape]:
    with torch.no_grad():
        return dict(run_packed(model, [np.arange(8)])[1])


def hidden_rows(case: Case) -> torch.Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1), dtype=getattr(torch, case.dtype))


class RolloutWorker(TensorWorker):
    """A member of a tensor-parallel group that generates."""

    def engine(self, case: Rollout) -> NativeEngine:
        return engine_on(self.split(case).model, case, member_layers(layers_of(build(case)), case.size))

    def generate(self, case: Rollout) -> Generated:
        return generate(self.engine(case), case)

    def generate_without_graphs(self, case: Rollout) -> Generated:
        """The last member cannot capture a step, as none can on a CPU; to the others it seems that they could. Nor does gloo keep them from
        trying."""
        engine = self.engine(case)
        assert not engine.decoder.graphs and "gloo" in str(engine.decoder.eager_reason)
        engine.decoder.graphs = True
        if self.rank % case.size < case.size - 1:
            engine.decoder._pool = "memory"
            engine.decoder._capture_with_room = lambda size, restricted: CapturedStep(None, count_nothing)  # type: ignore
        return generate(engine, case)

    def burst(self, case: Rollout) -> tuple[int, int]:
        """Parameters of this member, and steps in a row as where they overlap with the host."""
        decoder = self.engine(case).decoder
        decoder.overlaps = True
        return sum(parameter.numel() for parameter in decoder.model.parameters()), decoder.burst(BURST_ROWS)

    @torch.no_grad()
    def sampled_from(self, case: Case) -> dict[str, Any]:
        """Logits of some hidden states, their cost, and the shapes of this member's layers."""
        made = self.split(case)
        hidden, moved, head = hidden_rows(case), made.ranks.moved, Head.of(made.model)
        before = moved["all-gather"]
        logits = [head.logits(hidden[:rows]).numpy() for rows in (5, 1, 0)]
        after = moved["all-gather"]
        with head.part.counted_apart() as count:  # type: ignore[union-attr]
            head.product(hidden)
        apart = [moved["all-gather"] - after]
        for _ in range(2):
            count()
            apart.append(moved["all-gather"] - after)
        head.product(hidden[:1])
        apart.append(moved["all-gather"] - after)
        return {"logits": logits, "gathered": after - before, "apart": apart, "layers": layers_of(made.model)}


def make(member: devices.Member) -> RolloutWorker:
    return RolloutWorker(member.rank, dist.get_world_size())


@pytest.fixture
def pool(pool_of_devices: devices.Pool) -> devices.Guests:
    return devices.Guests(pool_of_devices, "test_tensor_rollout:make")


# ---- what is sampled from ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case("gemma2", 4, UNEVEN), Case("qwen2", 2, UNEVEN, bias=True), Case("llama", 1, UNEVEN),
        Case("qwen3", 4, {"num_key_value_heads": 1, "vocab_size": 160}),
    ],
    ids=str,
)  # fmt: skip
def test_every_member_has_the_logits_of_all_tokens(pool: devices.Guests, case: Case) -> None:
    model, hidden = build(case), hidden_rows(case)
    expected, layers = Head.of(model).logits(hidden).detach().numpy(), layers_of(model)
    row_bytes = case.size * vocabulary_rows(model.config.vocab_size, case.size) * hidden.itemsize
    found = call(pool, "sampled_from", case)
    for own in found:
        assert [logits.shape for logits in own["logits"]] == [(rows, model.config.vocab_size) for rows in (5, 1, 0)]
        assert np.allclose(own["logits"][0], expected, rtol=1e-12, atol=1e-12) and np.array_equal(own["logits"][0], found[0]["logits"][0])
        assert own["gathered"] == (5 + 1) * row_bytes
        # A graph's collectives count when it runs, not when it is captured.
        assert own["apart"] == [0, 5 * row_bytes, 10 * row_bytes, 11 * row_bytes]
        assert own["layers"] == member_layers(layers, case.size)
        assert {shape.key_heads for shape in own["layers"].values()} == {max(1, model.config.num_key_value_heads // case.size)}


# ---- the same tokens ---------------------------------------------------------------------------------------------------------------------

ONE_KEY = {"num_key_value_heads": 1}
TIED = {"tie_word_embeddings": True, **UNEVEN}
FORCED = {(0, 0): 1, (1, 2): 7, (3, 1): 8}

SHORT = [
    Rollout("qwen2", 2, TIED, fused=True, limits=TIGHT),
    Rollout("qwen3", 4, ONE_KEY, limits=TIGHT, sampling=STOPS),
    Rollout("gemma2", 2, UNEVEN, sampling=GREEDY),
    Rollout("qwen3-moe", 4, sampling=RESTRICTED, limits=UNSHARED),
    Rollout("llama", 2, BIASED, adapters=ALL),
]
FAMILIES = {"qwen2": TIED, "qwen3": {}, "llama": UNEVEN, "gemma2": {}, "qwen3-moe": {}}
MATRIX = [
    *[
        Rollout(family, size, changes, sampling=sampling, limits=limits)
        for family, changes in FAMILIES.items()
        for size in (2, 4)
        for sampling, limits in ((GREEDY, TIGHT), (SAMPLED, TIGHT), (SAMPLED, UNSHARED))
    ],
    *[Rollout(family, size, ONE_KEY, limits=TIGHT) for family in ("qwen2", "gemma2", "qwen3-moe") for size in (2, 4)],
    *[Rollout(family, size, ONE_KEY, fused=True, sampling=RESTRICTED) for family in ("qwen3", "llama") for size in (2, 4)],
    *[Rollout("qwen3", size, dtype="float64", sampling=sampling, limits=TIGHT) for size in (2, 4) for sampling in (GREEDY, STOPS)],
    *[Rollout("gemma2", size, UNEVEN, sampling=sampling) for size in (2, 4) for sampling in (STOPS, RESTRICTED)],
    *[Rollout("llama", size, BIASED, adapters=ALL, limits=TIGHT, sampling=STOPS) for size in (2, 4)],
    *[Rollout("qwen3-moe", size, adapters=STACKED, limits=TIGHT) for size in (2, 4)],
    *[Rollout(family, 2, limits=TIGHT) for family in ("mistral", "phi3", "smollm3", "gemma3", "granite", "cohere", "mixtral", "qwen2-moe")],
    Rollout("qwen2", 2, limits=WHOLE_PROMPTS, sampling=GREEDY),
    Rollout("qwen2", 4, limits=TIGHT, lengths=FORCED),
    Rollout("llama", 2, BIASED, adapters=ALL, fused=True, sampling=GREEDY),
    Rollout("llama", 1, UNEVEN, fused=True),
    Rollout("qwen3-moe", 1, limits=TIGHT),
    *[
        Rollout(family, size, sampling=sampling, limits=limits, whole_experts=True)
        for family in ("qwen3-moe", "mixtral")
        for size in (2, 4)
        for sampling, limits in ((GREEDY, TIGHT), (SAMPLED, TIGHT), (RESTRICTED, UNSHARED))
    ],
    *[Rollout("qwen3-moe", size, adapters=STACKED, limits=TIGHT, whole_experts=True) for size in (2, 4)],
    Rollout("qwen2-moe", 2, limits=TIGHT, whole_experts=True),
]


@pytest.mark.parametrize("case", [*SHORT, *(pytest.param(case, marks=pytest.mark.matrix) for case in MATRIX)], ids=str)
def test_members_draw_the_tokens_of_one_process(pool: devices.Guests, case: Rollout) -> None:
    whole = build(case)
    layers = layers_of(whole)
    finish(whole, case)
    expected = generate(engine_on(whole, case, layers), case)
    for own in call(pool, "generate", case):
        assert_same(own, expected)
        assert np.allclose(own.logprobs, own.of_trainer, rtol=0, atol=TOLERANCE)
        assert own.cache_bytes == expected.cache_bytes * own_share(layers, case.size)
    # What the limits and stop strings are there for does happen.
    assert (expected.stats.shared_tokens > 0) == (case.limits != UNSHARED)
    assert expected.stats.preemptions > 0 or case.limits != TIGHT or case.sampling == GREEDY
    assert case.limits != TIGHT or (1 in expected.passes and any(tokens > 4 and tokens % 4 for tokens in expected.passes))
    samples = [sample for group in expected.groups for sample in group.samples]
    assert case.sampling != STOPS or any(sample.finish == "stop" and sample.ids[-1] != END for sample in samples)


def test_members_have_graphs_all_or_none(pool: devices.Guests) -> None:
    case = Rollout("qwen2", 2, limits=replace(ROOMY, cuda_graphs=True))
    whole = build(case)
    expected = generate(engine_on(whole, replace(case, limits=ROOMY), layers_of(whole)), case)
    found = call(pool, "generate_without_graphs", case)
    for own in found:
        assert_same(own, expected)
    reasons = [str(own.eager_reason) for own in found]
    assert "by another member of the tensor-parallel group" in reasons[0] and "a step of the model cannot be captured:" in reasons[1]


def test_members_decode_equally_long(pool: devices.Guests) -> None:
    """Although the last one has fewer parameters."""
    found = call(pool, "burst", Rollout("qwen2", 4, {"tie_word_embeddings": True, "vocab_size": 100}))
    parameters, steps = zip(*found, strict=True)
    assert parameters[-1] < parameters[0] and len({int(WORK / (own * BURST_ROWS)) for own in parameters}) > 1
    assert set(steps) == {int(WORK / (max(parameters) * BURST_ROWS))}


def own_share(layers: Mapping[int, LayerShape], size: int) -> float:
    """The share of the whole cache that a member has."""
    return 1 / min(size, layers[0].key_heads)


def assert_same(own: Generated, expected: Generated) -> None:
    """The same tokens in the same passes."""
    assert own.passes == expected.passes and own.finished == expected.finished
    for group, other in zip(own.groups, expected.groups, strict=True):
        for sample, same in zip(group.samples, other.samples, strict=True):
            assert sample.ids.tolist() == same.ids.tolist() and (sample.finish, sample.text) == (same.finish, same.text)
    assert np.allclose(own.logprobs, expected.logprobs, rtol=0, atol=TOLERANCE)
    counted = ("preemptions", "shared_tokens", "prefill_tokens", "decode_tokens", "passes")
    assert all(getattr(own.stats, name) == getattr(expected.stats, name) for name in counted)
