"""Workers that divide experts among themselves (`train.expert_parallel`, alone and with `train.tensor_parallel`; `rollout.expert_parallel`)
compute, sample and save what one process does."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import devices
import pytest
import runs
from test_devices import (
    DOUBLE,
    ONE_STEP,
    SAVED,
    SAVED_CASES,
    TOLERANCE,
    assert_same_gradients,
    assert_same_metrics,
    assert_same_run,
    chosen,
    differ,
    exported_model,
    same_bits,
    saved_tensors,
)  # fmt: skip
from test_sequence import FAMILIES
from test_tensor_runs import assert_parts_of, responses

from fulltilt.algo.build import build
from fulltilt.cluster.checks import wrong_settings

ModelFolders = Callable[[str], Path]
Pool = devices.Pool

TWO, FOUR = "train.expert_parallel=2", "train.expert_parallel=4"
WAYS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "two of two": (2, (TWO,)),
    "four of four": (4, (FOUR,)),
    "two of four": (4, (TWO,)),
    "two of four, sequences of two": (4, (TWO, "train.sequence_parallel=2")),
    "two of four, full": (4, (TWO, "train.shard=full")),
    "four of four, full": (4, (FOUR, "train.shard=full")),
    "two of four, no balance": (4, (TWO, "train.balance=false")),
}
LAYERS_TOO: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "layers and experts, two of two": (2, (TWO, "train.tensor_parallel=2")),
    "layers and experts, four of four": (4, (FOUR, "train.tensor_parallel=4")),
    "layers and experts, two of four": (4, (TWO, "train.tensor_parallel=2")),
    "layers and experts, two of four, full": (4, (TWO, "train.tensor_parallel=2", "train.shard=full")),
    "layers and experts, two of four, sequences of two": (4, (TWO, "train.tensor_parallel=2", "train.sequence_parallel=2")),
}
CASES = {
    **{name: FAMILIES[name] for name in ("experts", "ppo-experts", "mixtral")},
    "lora-experts": ("qwen3-moe", runs.GRPO, ("lora.rank=2", 'lora.parameters=["experts.gate_up_proj", "experts.down_proj"]')),
    "frozen-experts": ("qwen3-moe", runs.GRPO, ("lora.rank=2",)),
    "recompute-experts": ("qwen3-moe", runs.GRPO, ("train.recompute=full",)),
    "sft-experts": ("qwen3-moe", runs.SFT, ()),
}
SHORT = {("ppo-experts", "two of four")}
LONG = {
    ("experts", "two of two"), ("experts", "four of four"), ("experts", "layers and experts, two of two"),
    ("sft-experts", "two of four"), ("lora-experts", "two of four"), ("mixtral", "two of two"),
}  # fmt: skip


def marks_of(case: str, way: str) -> list[pytest.MarkDecorator]:
    if (case, way) in SHORT:
        return []
    return [pytest.mark.long if (case, way) in LONG else pytest.mark.matrix]


@pytest.mark.parametrize(
    ("case", "way"),
    [pytest.param(case, way, marks=marks_of(case, way), id=f"{case}, {way}") for case in CASES for way in (*WAYS, *LAYERS_TOO)],
)
def test_one_step_has_the_samples_losses_and_gradients_of_one_process(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, case: str, way: str
) -> None:
    family, tables, overrides = CASES[case]
    workers, settings = (WAYS | LAYERS_TOO)[way]
    rounds = way in LAYERS_TOO  # routers and norms of heads compute in float32, and members sum parts of their gradients
    one, folder = (runs.make(tmp_path / name, model_folders(family), tables) for name in ("one", "folder"))
    _, expected = pool_of_devices.train(one, 1, *ONE_STEP, *overrides)
    own = (*ONE_STEP, *overrides, *settings)
    noted = assert_same_run(pool_of_devices, folder, workers, one, *own, absolute=1e-7 if rounds else 1e-9, rounds=rounds)
    largest = assert_same_gradients(noted, expected, 2e-6 if rounds else TOLERANCE)  # sft-experts: 1.03e-6
    print(f"{case}, {way}: largest difference of gradients {largest:.1e}")
    assert differ(noted.parameters[0], expected.parameters[0]) < (1e-5 if rounds else 1e-6)


TRAINERS: Mapping[str, tuple[str, ...]] = {
    "whole": (),
    "layers": ("train.tensor_parallel=2",),
    "layers and experts": ("train.tensor_parallel=2", TWO),
    "experts": (TWO,),
}
ENGINES: Mapping[str, tuple[str, ...]] = {
    "whole": ("rollout.tensor_parallel=1",),
    "layers": ("rollout.tensor_parallel=2", "rollout.expert_parallel=1"),
    "layers and experts": ("rollout.tensor_parallel=2", "rollout.expert_parallel=2"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize(("case", "workers"), [("experts", 2), ("lora-experts", 2), ("mixtral", 4)])
def test_rollouts_divided_in_any_way_have_the_samples_of_one_process(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, case: str, workers: int, trainer: str, engine: str
) -> None:
    """Two steps: in the second one engines have the weights of the first update."""
    family, tables, overrides = CASES[case]
    one, folder = (runs.make(tmp_path / name, model_folders(family), tables) for name in ("one", "folder"))
    own = (*ONE_STEP, "run.steps=2", "run.save_every=2", *overrides)
    pool_of_devices.train(one, 1, *own)
    _, noted = pool_of_devices.train(folder, workers, *own, *TRAINERS[trainer], *ENGINES[engine])
    assert responses(folder) == responses(one)
    assert_same_metrics(folder, one, tolerance=1e-5, absolute=1e-6, rounds=True)  # routers do, so the first update differs a little
    assert len(set(noted.digests)) == 1


@pytest.mark.parametrize(
    ("settings", "copied", "experts"),
    [
        pytest.param(("train.tensor_parallel=2", TWO), False, 2),
        pytest.param(("train.tensor_parallel=2",), False, 4, marks=pytest.mark.matrix),
        pytest.param(("rollout.tensor_parallel=2",), True, 2, marks=pytest.mark.matrix),
        pytest.param(("train.tensor_parallel=2", "rollout.expert_parallel=2"), True, 2, marks=pytest.mark.matrix),
        pytest.param(("train.tensor_parallel=2", TWO, "rollout.expert_parallel=1"), True, 4, marks=pytest.mark.matrix),
        pytest.param((TWO, "rollout.tensor_parallel=2"), True, 2, marks=pytest.mark.matrix),
    ],
)
def test_an_engine_reads_what_learns_where_both_are_divided_alike(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, settings: tuple[str, ...], copied: bool, experts: int
) -> None:
    folder = runs.make(tmp_path / "folder", model_folders("qwen3-moe"))
    with pool_of_devices.assembled(folder, 2, *ONE_STEP, *settings) as parts:
        assert any(note.startswith("rollout: every worker has one of 2 parts of the actor") for note in parts.notes) == copied
        assert parts.crew.most_experts() == experts


@pytest.mark.parametrize(
    ("way", "said"),
    [
        (("train.tensor_parallel=2",), True),
        pytest.param(("train.tensor_parallel=2", TWO), False, marks=pytest.mark.matrix),
        pytest.param(("train.tensor_parallel=2", "train.shard=full"), True, marks=pytest.mark.matrix),
    ],
)
def test_experts_that_become_too_narrow_for_grouped_products_are_noted(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, way: tuple[str, ...], said: bool
) -> None:
    """They are 24 numbers wide: two members have 24 bytes of bfloat16 each, and rows must be a multiple of 16."""
    folder = runs.make(tmp_path / "folder", model_folders("qwen3-moe"), runs.SFT)
    with pool_of_devices.assembled(folder, 4 if "train.shard=full" in way else 2, "model.dtype=bfloat16", *way) as parts:
        found = [note for note in parts.notes if "experts run one by one" in note]
    assert bool(found) == said and all(note.endswith("Set train.expert_parallel = 2") for note in found)


@pytest.mark.matrix
def test_the_advice_names_the_key_of_a_role_with_a_size_of_its_own(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path
) -> None:
    folder, own = runs.make(tmp_path / "folder", model_folders("qwen3-moe")), ("algorithm.kl_coef=0.1", "ref.tensor_parallel=2")
    with pool_of_devices.assembled(folder, 2, *ONE_STEP, "model.dtype=bfloat16", *own) as parts:
        (found,) = [note for note in parts.notes if "experts run one by one" in note]
    assert found.startswith("ref: ") and found.endswith("Set ref.expert_parallel = 2")


LAYOUTS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    **WAYS,
    **LAYERS_TOO,
    "divided layers": (2, ("train.tensor_parallel=2",)),
    "full": (3, ("train.shard=full",)),
    "alone": (1, ()),
}


@pytest.mark.parametrize(
    ("case", "layout", "others"),
    [
        pytest.param("ppo", "two of four", ["four of four", "divided layers", "full", "alone"], marks=pytest.mark.long),
        pytest.param("lora", "two of two", ["four of four", "alone"], marks=pytest.mark.matrix),
        pytest.param("bfloat16", "two of four", ["two of two", "full", "alone"], marks=pytest.mark.matrix),
        pytest.param("ppo", "full", ["two of four", "two of two"], marks=pytest.mark.matrix),
        pytest.param(
            "ppo",
            "layers and experts, two of two",
            ["layers and experts, four of four", "two of four", "divided layers", "alone"],
            marks=pytest.mark.matrix,
        ),
        pytest.param("lora", "layers and experts, two of two", ["divided layers", "two of four", "full"], marks=pytest.mark.matrix),
        pytest.param("bfloat16", "layers and experts, two of four", ["full", "two of two", "alone"], marks=pytest.mark.matrix),
        pytest.param("ppo", "full", ["layers and experts, two of four, full"], marks=pytest.mark.matrix),
    ],
)
def test_saved_under_one_layout_and_resumed_under_others(
    pool_of_devices: Pool, model_folders: ModelFolders, tmp_path: Path, case: str, layout: str, others: list[str]
) -> None:
    adapters = ('lora.parameters=["experts.gate_up_proj", "experts.down_proj"]',) if case == "lora" else ()
    settings, exact = (*SAVED, *SAVED_CASES[case], *adapters), DOUBLE in SAVED_CASES[case]
    expected = runs.make(tmp_path / "expected", model_folders("qwen3-moe"))
    workers, own = LAYOUTS[layout]
    _, undisturbed = pool_of_devices.train(expected, workers, *settings, *own)
    before = saved_tensors(expected, 1)
    if case != "lora":
        kept = undisturbed.parameters[0]
        assert same_bits(exported_model(expected, 2), kept if exact else {name: devices.rounded(numbers) for name, numbers in kept.items()})
    for name in others:
        workers, own = LAYOUTS[name]
        folder = runs.copy(expected, tmp_path / name)
        shutil.rmtree(folder / "run" / "checkpoints" / "step-00000002")
        _, noted = pool_of_devices.train(folder, workers, *settings, *own)
        assert_parts_of(before, noted.restored)
        assert len(set(noted.digests)) == 1
        if exact:
            assert_same_metrics(folder, expected, absolute=1e-7, rounds=True)  # routers do
            found, whole = saved_tensors(folder, 2), saved_tensors(expected, 2)
            assert found.keys() == whole.keys()
            for kind in ("exp_avg/", "exp_avg_sq/"):
                assert differ(chosen(found, kind), chosen(whole, kind)) < 1e-6  # routers round
        assert [line["step"] for line in runs.metrics(folder)] == [1, 2]


REFUSED = {
    "three": (
        "qwen3-moe",
        ("cluster.workers=3", "train.expert_parallel=3"),
        r"3 workers cannot .* has 4 experts in a layer. Use 1$",
    ),
    "four of six": ("qwen3-moe", ("cluster.workers=6", FOUR), r"4 does not divide the 6 workers of the run. Use 1 or 2$"),
    "no experts": ("qwen2", ("cluster.workers=2", TWO), r"train.expert_parallel: 2 .*: the model has no experts. Use 1$"),
    "shared out": (
        "qwen3-moe",
        ("cluster.workers=4", TWO, "train.shard=hybrid", "train.shard_size=2"),
        r'"hybrid": its groups must be copies .* Remove train.expert_parallel, or set train.shard = "full" and remove train.shard_size$',
    ),
    "other layers": (
        "qwen3-moe",
        ("cluster.workers=4", TWO, "train.tensor_parallel=4"),
        r"^train.expert_parallel: 2, but train.tensor_parallel = 4: .*. Use 1 or 4$",
    ),
    "layers of four, three experts": (
        "three experts",
        ("cluster.workers=4", FOUR, "train.tensor_parallel=4"),
        r"^train.expert_parallel: 4 workers cannot divide the experts .*: the model has 3 experts in a layer. Use 1$",
    ),
    "nobody samples together": (
        "qwen3-moe",
        ("cluster.workers=2", TWO, "rollout.expert_parallel=2"),
        r"^rollout.expert_parallel: 2, but rollout.tensor_parallel is 1: .*. Use 1$",
    ),
    "another number samples together": (
        "qwen3-moe",
        ("cluster.workers=4", "rollout.tensor_parallel=4", "rollout.expert_parallel=2"),
        r"^rollout.expert_parallel: 2, but rollout.tensor_parallel is 4: .*. Use 1 or 4$",
    ),
    "samplers without experts": (
        "qwen2",
        ("cluster.workers=2", "rollout.tensor_parallel=2", "rollout.expert_parallel=2"),
        r"^rollout.expert_parallel: 2 workers cannot divide the experts among themselves: the model has no experts. Use 1$",
    ),
}


def with_three_experts(model: Path, folder: Path) -> Path:
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_local_experts": 3}))
    return folder


@pytest.mark.parametrize("case", REFUSED)
def test_sizes_that_are_refused_before_anything_loads(
    model_folders: ModelFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    family, settings, message = REFUSED[case]
    monkeypatch.setenv("FULLTILT_SHARE_DEVICES", "1")
    model = model_folders(family) if family != "three experts" else with_three_experts(model_folders("qwen3-moe"), tmp_path / "model")
    config = runs.read_config(runs.make(tmp_path / "folder", model), *settings)
    with contextlib.chdir(tmp_path / "folder"):
        found = list(wrong_settings(config, build(config), "cpu"))
    assert any(re.search(message, each) for each in found), found
