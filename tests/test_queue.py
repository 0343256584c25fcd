"""One queue of prompts feeds the engines of all workers: whoever has free seats gets the next prompts, and samples are the
same. After each sync all workers have the same weights.

Workers are real, in the processes of the pool that tests of several workers share (tests/devices.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import devices
import numpy as np
import pytest
import runs
import torch

from fulltilt.cluster.crew import Crew
from fulltilt.parallel.checksum import NUMBERS, checksum
from fulltilt.records import Group, Prompt, UserError
from fulltilt.rollout.collect import collect
from fulltilt.rollout.sampler import Sampling

ModelFolders = Callable[[str], Path]
SAMPLING = Sampling(samples=2, max_new_tokens=24)
SEATS = ("rollout.max_seqs=4", "algorithm.kl_coef=0")  # two groups at once
PROMPTS = [Prompt(uid, np.random.default_rng(uid).integers(3, 90, 3 + uid % 5), "") for uid in range(14)]


def sampled(crew: Crew, prompts: Sequence[Prompt] = PROMPTS) -> list[list[list[int]]]:
    with crew.phase("rollout"):
        groups = collect(crew.generate, prompts, SAMPLING, 3, lambda group: None)
    return [[sample.ids.tolist() for sample in group.samples] for group in groups]


@pytest.fixture(scope="module")
def folder(model_folders: ModelFolders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.make(tmp_path_factory.mktemp("queue") / "run", model_folders("qwen2"))


@pytest.fixture(scope="module")
def expected(pool_of_devices: devices.Pool, folder: Path) -> list[list[list[int]]]:
    """The samples of one process."""
    with pool_of_devices.assembled(folder, 1, *SEATS) as parts:
        assert not parts.crew._queue
        return sampled(parts.crew)


@dataclass(frozen=True, eq=False)
class Pair:
    """Two workers with a queue, of which the second waits until the gate is there."""

    crew: Crew
    gate: Path


@pytest.fixture
def pair(pool_of_devices: devices.Pool, folder: Path, tmp_path: Path) -> Iterator[Pair]:
    with pool_of_devices.assembled(folder, 2, *SEATS) as parts:
        assert not parts.crew._queue, "on a CPU runs repeat to the bit"
        parts.crew._queue = True
        gates = [folder, tmp_path / "gate", folder, folder]
        pool_of_devices.processes.start("note", [("hold", (str(gate),)) for gate in gates], what="a slow worker").results()
        yield Pair(parts.crew, gates[1])


def groups_told(pair: Pair, prompts: Sequence[Prompt], until: int) -> tuple[list[list[list[int]]], Counter[int]]:
    """The samples, and how many groups each worker has told; the gate opens when the first has told so many."""
    counts, start = Counter[int](), pair.crew.hosts.start

    def counting(*args: Any, **options: Any) -> Any:
        call = start(*args, **options)
        items = call.items

        def seen() -> Iterator[tuple[int, Any]]:
            for rank, item in items():
                counts[rank] += isinstance(item, Group)
                if counts[0] == until:
                    pair.gate.touch()
                yield rank, item

        call.items = seen
        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair.crew.hosts, "start", counting)
        return sampled(pair.crew, prompts), +counts


@pytest.mark.long
def test_a_fast_worker_takes_more_of_the_queue(pair: Pair, expected: list[list[list[int]]]) -> None:
    found, counts = groups_told(pair, PROMPTS, until=len(PROMPTS) - 3)
    assert found == expected
    assert counts == {0: len(PROMPTS) - 3, 1: 3}, "the slow one got what it began with, two groups, and one that waits"
    assert pair.crew.rollout_stats().first_token.total == len(PROMPTS) * SAMPLING.samples


def test_engines_can_be_used_again_after_a_rollout_that_was_stopped(pair: Pair, expected: list[list[list[int]]]) -> None:
    with pair.crew.phase("rollout"):
        groups = pair.crew.generate(PROMPTS, SAMPLING, 3)
        next(groups)
        groups.close()
        pair.gate.touch()
    assert sampled(pair.crew) == expected


def test_engines_of_all_workers_describe_their_progress_in_one_line(pair: Pair) -> None:
    lines: list[str] = []
    pair.crew.report_rollout(lines.append, 0.0)
    pair.gate.touch()
    sampled(pair.crew)
    together = [text for text in lines if text.startswith("rollout on 2 of 2 workers: ")]
    assert together and all(re.match(r"rollout on [12] of 2 workers: \d+ running, \d+ waiting, KV \d+%", text) for text in lines)
    assert max(int(text.split()[6]) for text in together) > 4, "samples of both engines, which have four seats each"


def test_fewer_prompts_than_workers(pair: Pair, expected: list[list[list[int]]]) -> None:
    assert sampled(pair.crew, PROMPTS[:1]) == expected[:1]
    assert pair.crew.rollout_stats().first_token.total == SAMPLING.samples, "an engine without work has no statistics"
    assert sampled(pair.crew, []) == []


def test_a_clock_decides_only_where_runs_need_not_repeat_to_the_bit(pool_of_devices: devices.Pool, folder: Path) -> None:
    with pool_of_devices.assembled(folder, 1, *SEATS) as parts:
        worker = parts.worker
        assert worker.engine and not worker._may_queue
        worker.account.device = torch.device("cuda")
        assert worker._may_queue
        worker.engine.can_be_fed = False
        assert not worker._may_queue
    with pool_of_devices.assembled(folder, 1, *SEATS, "run.deterministic=true") as parts:
        parts.worker.account.device = torch.device("cuda")
        assert not parts.worker._may_queue


def assert_nothing_is_lost(pair: Pair, pool: devices.Pool, faults: str, expected: list[list[list[int]]]) -> None:
    lines: list[str] = []
    pair.gate.touch()
    pair.crew.budgets.say = lines.append
    pool.processes.start("run_out", [(faults,)] * 4, what="breaking").results()
    for failures in (2, 0):
        assert sampled(pair.crew) == expected
        assert pair.crew.metrics()["perf/out_of_memory"] == failures and len(lines) == 1
    assert pair.crew.budgets.changed.keys() == {"max_seqs", "max_batched_tokens"} and "out of memory in rollout on workers" in lines[0]


def test_the_queue_feeds_engines_that_ran_out_of_memory(pair: Pair, pool_of_devices: devices.Pool, expected: list[list[list[int]]]) -> None:
    assert_nothing_is_lost(pair, pool_of_devices, "actor.decode:1@1,actor.prefill:1@0", expected)


@pytest.fixture
def two_groups(pool_of_devices: devices.Pool, folder: Path, tmp_path: Path) -> Iterator[Pair]:
    """Two groups of workers that sample together, with a queue; the second group waits until the gate is there."""
    with pool_of_devices.assembled(folder, 4, *SEATS, "train.tensor_parallel=2") as parts:
        parts.crew._queue = True
        gates = [folder, folder, tmp_path / "gate", tmp_path / "gate"]
        pool_of_devices.processes.start("note", [("hold", (str(gate),)) for gate in gates], what="a slow group").results()
        yield Pair(parts.crew, gates[2])


def test_workers_that_sample_together_take_from_the_queue_and_stop_together(two_groups: Pair, expected: list[list[list[int]]]) -> None:
    """Where nobody reads on, as after Ctrl-C, a group ends within a few passes, and can be used again."""
    crew, few = two_groups.crew, PROMPTS[:8]
    with crew.phase("rollout"):
        groups = crew.generate(few, SAMPLING, 3)
        next(groups)
        groups.close()
        two_groups.gate.touch()
        stopped = crew.rollout_stats().first_token.total
    assert stopped < len(few) * SAMPLING.samples, "the rollout was not completed"
    two_groups.gate.unlink()
    found, counts = groups_told(two_groups, few, until=len(few) - 3)
    assert found == expected[: len(few)] and counts == {0: len(few) - 3, 2: 3}


@pytest.mark.long
def test_the_queue_feeds_members_that_ran_out_of_memory(
    two_groups: Pair, pool_of_devices: devices.Pool, expected: list[list[list[int]]]
) -> None:
    assert_nothing_is_lost(two_groups, pool_of_devices, "actor.steps:5@1,actor.prefill:1@2", expected)


# -- weights ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "shifted", "named"), [(3, 1, "worker 1 differ from those of the other 2 workers"), (2, 1, "workers 0 and 1 differ after")]
)
def test_workers_with_other_weights_are_named(pool_of_devices: devices.Pool, folder: Path, workers: int, shifted: int, named: str) -> None:
    with pool_of_devices.assembled(folder, workers, *SEATS) as parts:
        assert parts.crew.sync(1).keys() == {"sync/seconds"}
        pool_of_devices.processes.start("note", [("shift", (float(rank == shifted),)) for rank in range(4)], what="a fault").results()
        with pytest.raises(UserError, match=f"the weights of {named}.* step 2"):
            parts.crew.sync(2)


def test_engines_sample_from_no_other_version(pool_of_devices: devices.Pool, folder: Path) -> None:
    with pool_of_devices.assembled(folder, 1, *SEATS) as parts:
        crew = parts.crew
        sampled(crew, PROMPTS[:1])
        list(parts.worker.update("actor", {}, [], 0, True))
        with pytest.raises(RuntimeError, match="changed after the last sync, and version 0 is asked for"):
            sampled(crew, PROMPTS[:1])
        assert crew.sync(1) == {}, "nothing moves"
        sampled(crew, PROMPTS[:1])
        parts.worker.version = 3
        with pytest.raises(RuntimeError, match="version 3 of the weights, and version 1 is asked for"):
            sampled(crew, PROMPTS[:1])


def test_the_speed_of_an_engine_that_copies_weights_is_measured(pool_of_devices: devices.Pool, folder: Path) -> None:
    with pool_of_devices.assembled(folder, 1, "algorithm.kl_coef=0", "rollout.engine=hf") as parts:
        metrics = parts.crew.sync(1)
    assert metrics["sync/seconds"] > 0 and metrics["sync/gb_per_s"] > 0


def test_a_checksum_looks_at_other_numbers_every_time() -> None:
    numbers = torch.randn(NUMBERS * 5, dtype=torch.bfloat16)
    before = [checksum([numbers, numbers[:3]], turn) for turn in range(10)]
    assert before == [checksum([numbers.clone(), numbers[:3]], turn) for turn in range(10)] and len(set(before)) == 5
    other = numbers.clone()
    other[7] += 1
    assert [checksum([other, numbers[:3]], turn) != same for turn, same in enumerate(before)] == [turn % 5 == 2 for turn in range(10)]
