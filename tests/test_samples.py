"""Samples that stay with the workers that drew them, as on several machines: the run is the one whose samples pass through the driver.

Workers are those of the pool that all tests share; each is taken for a machine of its own. What they exchange are the same rows, so that
weights are equal to the bit; metrics that are sums over workers differ by the order of additions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import devices
import numpy as np
import pytest
import runs
from transformers import AutoModelForSequenceClassification

from fulltilt.algo.advantage import exact_parts, whitened
from fulltilt.cluster.crew import Crew
from fulltilt.cluster.samples import GATHERED
from fulltilt.observe.metrics import RowSums
from fulltilt.parallel.layout import Sharding
from fulltilt.parallel.parcels import pack_numbers, pack_rows, unpack_numbers, unpack_rows
from fulltilt.parallel.traffic import WHITENING, RoleWork, RowExchange, RowTraffic, SequenceWork, Stream, Trip, predict
from fulltilt.records import Row
from fulltilt.shape import Shape

ModelFolders = Callable[[str], Path]
Pool = devices.Pool

QUIET = ("run.eval_before=false", "run.eval_every=0")
SHORT = ("run.steps=2", "run.eval_every=2", "run.eval_before=false")
MOVED = (*runs.CLOCK, "communication/all_to_all_bytes")
ADVANTAGE = '''
def sharper(rewards, groups, rows):
    """Reads tokens of all rows."""
    longest = max(row.tokens for row in rows)
    return [reward - rewards.mean() + row.ids[row.mask].mean() / 1000 / longest for reward, row in zip(rewards, rows)]
'''
CASES: dict[str, tuple[str, ...]] = {
    "grpo": ("reward.function=reward.py:sometimes_fails",),
    "ppo": ("algorithm.name=ppo", "algorithm.reward_kl_coef=0.05", "algorithm.reward_kl_target=0.1", "algorithm.kl_coef=0"),
    "dapo": ("algorithm.name=dapo", "algorithm.kl_coef=0", "reward.function=reward.py:undecided", "algorithm.prompts_per_round=5"),
    "own": ("algorithm.advantage=advantage.py:sharper",),
    "remax": ("algorithm.name=remax", "algorithm.kl_coef=0"),
    "reinforce": ("algorithm.name=reinforce++", "algorithm.kl_coef=0", "algorithm.samples_per_prompt=1"),
    # So narrow that the last bits of log-probs decide, which are the same in both runs.
    "rejected": (
        "algorithm.advantage=gdpo", "algorithm.reward_parts={score=1.0}", "algorithm.rejection=token_k1", "algorithm.kl_coef=0",
        "algorithm.rejection_bounds=1.0000001", "algorithm.importance_level=token-normalized",
    ),
    "judged": ('reward.function={reward_model=1.0,"reward.py:score"=0.5}', "reward_model.path=../judge"),
}  # fmt: skip


FAILS_THEN_NAN = """
calls = 0

def score(data_source, solution_str, ground_truth, extra_info):
    global calls
    calls += 1
    if calls == 1:
        raise ValueError("the first call fails")
    return float("nan")
"""


@contextlib.contextmanager
def apart(pool: Pool) -> Iterator[None]:
    pool.apart = True
    try:
        yield
    finally:
        pool.apart = False


def make(folder: Path, model: Path) -> Path:
    made = runs.make(folder, model)
    (made / "advantage.py").write_text(ADVANTAGE)
    return made


def make_judge(model: Path, folder: Path) -> None:
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=1).save_pretrained(folder)
    for file in model.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())


def lines(folder: Path) -> list[dict[str, float]]:
    return [{name: value for name, value in line.items() if not name.startswith(MOVED)} for line in runs.metrics(folder)]


def failed_calls(folder: Path) -> list[tuple[int, list[int], str]]:
    paths = (folder / "run").glob("reward_errors.jsonl")
    calls = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return sorted((each["prompt"], each["samples"], each["text"]) for each in calls)


def assert_same(found: Path, expected: Path) -> None:
    for mine, theirs in zip(lines(found), lines(expected), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-12)
    for name in ("rollouts", "validation"):
        assert runs.contents(found / "run" / name) == runs.contents(expected / "run" / name)


@pytest.mark.parametrize("case", [pytest.param(case, marks=[] if case == "ppo" else [pytest.mark.long]) for case in CASES])
def test_a_run_is_the_one_whose_samples_pass_through_the_driver(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, case: str
) -> None:
    folders = [make(tmp_path / name, model_folders("qwen2")) for name in ("here", "there")]
    if case == "judged":
        make_judge(model_folders("qwen2"), tmp_path / "judge")
    trained, here = pool_of_devices.train(folders[0], 2, *SHORT, *CASES[case])
    with apart(pool_of_devices):
        other, there = pool_of_devices.train(folders[1], 2, *SHORT, *CASES[case])
    assert here.digests == there.digests and len(set(there.digests)) == 1
    assert_same(folders[1], folders[0])
    assert (GATHERED in other.said) == (case == "own") and GATHERED not in trained.said
    if case == "rejected":
        assert all(0 < line["rollout_corr/rollout_rs_masked_fraction"] < 1 for line in runs.metrics(folders[1]) if line["step"])
    errors = [failed_calls(folder) for folder in folders]
    assert errors[0] == errors[1] and bool(errors[0]) == (case == "grpo")
    moved = [line["communication/all_to_all_bytes"] for line in runs.metrics(folders[1]) if line["step"]]
    assert min(moved) > 0 and "communication/all_to_all_bytes" not in runs.metrics(folders[0])[-1]


# Numbers for each token that a row has in an update: rollout, old and reference log-probs, values, advantages, returns.
FIELDS = {"grpo": 4, "ppo": 6, "judged": 4, "shared": 6}
SHARED = (*CASES["ppo"], "train.sequence_parallel=2", "critic.sequence_parallel=1")


@dataclasses.dataclass(frozen=True)
class Brought:
    """Rows that the driver has had workers exchange."""

    trips: list[Trip]
    whole: bool  # whether they went with all their numbers, for an update
    sharing: int  # workers that compute a micro-batch together
    streams: list[list[Stream]]  # the micro-batches of each group of them

    def exchange(self, fields: int) -> RowExchange:
        return RowExchange(self.trips, fields=fields if self.whole else 0, returns=not self.whole)

    def work(self, shape: Shape, epochs: int) -> RoleWork:
        """The passes, of a role of which nothing but streams is known."""
        updates, scored = ([own * epochs for own in self.streams], ()) if self.whole else ((), self.streams)
        return RoleWork((), 4, sequence=SequenceWork(shape, self.sharing, updates, scored))


@pytest.fixture
def exchanged(monkeypatch: pytest.MonkeyPatch) -> list[list[Brought]]:
    """What the driver has had workers exchange, by steps."""
    found: list[list[Brought]] = [[]]
    bring, metrics = Crew._bring, Crew.metrics

    def noting(crew: Crew, role: str, purpose: str, rows: Any, micro_batches: Any, *, whole: bool) -> Any:
        workers, sharing = zip(crew._ranks_of(role), micro_batches, strict=True), crew._sharing[role]
        given = [(rank, rows[index]) for rank, own in workers for indices in own for index in indices]
        trips = [Trip(row.tokens, row.home, rank, tells=rank % sharing == 0) for rank, row in given]
        streams = [[Stream(sum(rows[index].tokens for index in indices), ()) for indices in own] for own in micro_batches[::sharing]]
        found[-1].append(Brought(trips, whole, sharing, streams))
        return bring(crew, role, purpose, rows, micro_batches, whole=whole)

    def ending(crew: Crew) -> Any:
        found.append([])
        return metrics(crew)

    monkeypatch.setattr(Crew, "_bring", noting)
    monkeypatch.setattr(Crew, "metrics", ending)
    return found


@pytest.mark.parametrize(
    ("case", "workers"),
    [("ppo", 3), *(pytest.param(*each, marks=pytest.mark.long) for each in (("grpo", 4), ("judged", 2), ("shared", 4)))],
)
def test_rows_that_go_between_workers_take_the_bytes_that_are_predicted(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, exchanged: list[list[Brought]], case: str, workers: int
) -> None:
    """Also where a row goes to several workers that compute it together ("shared"), which exchange parts of it meanwhile."""
    folder = make(tmp_path / "there", model_folders("qwen2"))
    if case == "judged":
        make_judge(model_folders("qwen2"), tmp_path / "judge")
    settings = SHARED if case == "shared" else CASES[case]
    with apart(pool_of_devices):
        pool_of_devices.train(folder, workers, *QUIET, "run.steps=2", "run.save_every=0", *settings)
    lines, steps = [line for line in runs.metrics(folder) if line["step"]], [own for own in exchanged if own]
    shape, epochs = Shape.read(model_folders("qwen2")), runs.read_config(folder, *settings).algorithm.epochs
    for line, own in zip(lines, steps, strict=True):
        assert any(trip.home != trip.computed for each in own for trip in each.trips)
        traffic = RowTraffic(workers, [each.exchange(FIELDS[case]) for each in own], WHITENING if case in ("ppo", "shared") else 0)
        predicted = predict([each.work(shape, epochs) for each in own], Sharding(workers=workers, group=workers), traffic)
        assert line["communication/all_to_all_bytes"] == predicted["all-to-all"]


def test_rows_survive_the_way() -> None:
    draw = np.random.default_rng(5)
    fields = {name: draw.normal(size=9).astype(np.float32) for name in ("rollout_logprobs", "values", "returns")}
    rows = [
        (7, Row(np.arange(9) + 2**30, np.arange(9) > 3, 4, -0.25, 0.5, 2, **fields)),
        (1, Row(np.arange(3), np.zeros(3, dtype=bool), reward=float("nan"))),
    ]
    for (index, row), (number, found) in zip(rows, unpack_rows(memoryview(pack_rows(rows))), strict=True):
        assert index == number
        for field in dataclasses.fields(Row):
            expected, got = getattr(row, field.name), getattr(found, field.name)
            assert type(expected) is type(got), field.name
            if expected is not None:
                np.testing.assert_array_equal(got, expected)
            assert not isinstance(got, np.ndarray) or (got.dtype == expected.dtype and got.flags.writeable)
    numbers = [(3, fields["values"]), (8, np.zeros(0, dtype=np.float32))]
    for (index, own), (number, got) in zip(numbers, unpack_numbers(memoryview(pack_numbers(numbers))), strict=True):
        assert index == number and own.tobytes() == got.tobytes()
    assert unpack_rows(memoryview(pack_rows([]))) == [] and unpack_numbers(memoryview(pack_numbers([]))) == []


@pytest.mark.parametrize("there", [pytest.param(True, marks=pytest.mark.matrix), pytest.param(False, marks=pytest.mark.long)])
def test_bytes_through_the_driver_do_not_grow_with_responses(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, there: bool
) -> None:
    found, rows = {}, 16
    for tokens in (8, 64):
        folder = make(tmp_path / str(tokens), model_folders("qwen2"))
        with apart(pool_of_devices) if there else contextlib.nullcontext():
            pool_of_devices.train(folder, 2, *QUIET, "run.steps=2", "run.save_every=0", f"rollout.max_new_tokens={tokens}")
        found[tokens] = runs.metrics(folder)[-1]
    longer = found[64]["response_length/mean"] - found[8]["response_length/mean"]
    assert longer > 20
    for name in ("driver/bytes_in", "driver/bytes_out"):
        more = (found[64][name] - found[8][name]) / rows
        print(f"{name}: {found[8][name]:.0f} and {found[64][name]:.0f} bytes in a step of {rows} rows")
        assert abs(more) < 16 if there else more > longer, f"{more} bytes per row for {longer} more tokens"
    moved = [line.get("communication/all_to_all_bytes", 0) for line in found.values()]
    assert moved[1] > moved[0] + rows * longer if there else moved == [0, 0]


@pytest.mark.long
def test_carried_over_groups_are_saved_by_their_workers_and_resume_anywhere(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path
) -> None:
    settings = (*QUIET, *CASES["dapo"], "run.save_every=1", "run.keep=4")
    whole = make(tmp_path / "whole", model_folders("qwen2"))
    with apart(pool_of_devices):
        _, expected = pool_of_devices.train(whole, 2, *settings, "run.steps=3")
    carried = [line["rollout/groups_carried"] for line in runs.metrics(whole)]
    assert max(carried[:-1]) > 0
    stop = 1 + int(np.argmax(np.array(carried[:-1]) > 0))
    state = json.loads((whole / "run" / "checkpoints" / f"step-{stop:08d}" / "state.json").read_text())
    assert len(state["surplus"]) == carried[stop - 1] and all("text" not in each for group in state["surplus"] for each in group["samples"])
    for workers, there in ((2, True), (2, False), (3, True), (1, False)):
        folder = runs.copy(whole, tmp_path / f"{workers}-{there}")
        for step in range(stop + 1, 4):
            shutil.rmtree(folder / "run" / "checkpoints" / f"step-{step:08d}")
        with apart(pool_of_devices) if there else contextlib.nullcontext():
            _, found = pool_of_devices.train(folder, workers, *settings, "run.steps=3")
        for step in range(1, 4):
            texts = [[line["response"] for line in runs.rollouts(each, step)] for each in (folder, whole)]
            assert texts[0] == texts[1]
        assert workers != 2 or found.digests == expected.digests


def test_a_reward_that_is_no_number_saves_the_last_step(pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path) -> None:
    """And the calls that failed before it are written, though the step does not end."""
    folder = make(tmp_path / "folder", model_folders("qwen2"))
    (folder / "late.py").write_text(FAILS_THEN_NAN)
    with apart(pool_of_devices), pytest.raises(Exception, match="returned nan for a sample"):
        pool_of_devices.train(folder, 2, *QUIET, "run.steps=2", "reward.function=late.py:score", "reward.workers=1")
    assert not pool_of_devices.processes._breakdowns  # the workers live on, and could save
    assert len(failed_calls(folder)) == 2, "the first call of each worker"


# -- sums ----------------------------------------------------------------------------------------------------------------------------------


def test_sums_of_parts_are_exact() -> None:
    draw = np.random.default_rng(3)
    numbers = (draw.normal(size=500) * 10.0 ** draw.integers(-12, 12, size=500)).tolist()
    from math import fsum

    parts = [part for cut in (numbers[:7], [], numbers[7:300], numbers[300:]) for part in exact_parts(cut)]
    assert fsum(parts) == fsum(numbers) and len(parts) < 20
    assert exact_parts([float("nan"), 1.0])[0] != exact_parts([float("nan"), 1.0])[0] and exact_parts([1.0, -1.0]) == []


def test_metrics_of_parts_are_those_of_the_whole() -> None:
    draw = np.random.default_rng(4)

    def row(tokens: int) -> Row:
        fields = {name: draw.normal(size=tokens).astype(np.float32) for name in ("advantages", "values", "returns", "rollout_logprobs")}
        return Row(np.arange(tokens), np.arange(tokens) >= 2, reward=float(draw.normal()), **fields)

    rows = [row(tokens) for tokens in (5, 2, 9, 30, 4)]
    joined = RowSums.of(rows[:1]) + RowSums.of([]) + RowSums.of(rows[1:])
    assert joined.metrics() == pytest.approx(RowSums.of(rows).metrics(), rel=1e-12)
    assert RowSums.of(rows).metrics()["critic/vf_explained_var"] != 0


def test_equal_numbers_on_all_workers_become_exactly_zero() -> None:
    assert not np.concatenate(whitened([np.full(3, 0.1), np.full(2, 0.1)])).any()
