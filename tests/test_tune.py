"""Overlays, the search over performance settings, and `fulltilt tune`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import runs
import torch

from fulltilt import cli
from fulltilt import config as configuration
from fulltilt.hardware import Cluster
from fulltilt.loop import tuning
from fulltilt.records import UserError
from fulltilt.schema import Config, flatten, keys, with_settings
from fulltilt.tune import overlay as overlays
from fulltilt.tune.overlay import ALLOWED, Overlay, Trial, fingerprint, same_device, tuned_for
from fulltilt.tune.search import (
    NEGLIGIBLE,
    Axis,
    Finalist,
    SearchResult,
    Settings,
    SettingsPredictor,
    axis,
    choose,
    descent,
    search,
    settings_of,
    space_of,
)
from fulltilt.tune.shapes import named_shape
from fulltilt.tune.time_model import PhaseSeconds

BASE: dict[str, dict[str, Any]] = {
    "model": {"path": "Qwen2.5-1.5B"}, "data": {"train": "x.jsonl"}, "run": {"steps": 2}, "rollout": {"max_new_tokens": 1024},
    "algorithm": {"kl_coef": 0.01, "prompts_per_step": 32, "minibatches_per_step": 2},
}  # fmt: skip
SHAPE = named_shape("Qwen2.5-1.5B")


def config_of(*overrides: str) -> Config:
    return configuration.parse(BASE, overrides, here=False)


# ---- the search --------------------------------------------------------------------------------------------------------------------------

SMALL = (
    axis("actor.token_budget", (8192, 65536)),
    axis("train.recompute", ("none", "full")),
    axis("train.offload_optimizer", (False,)),
    axis("rollout.max_seqs", (64,)),
)
# GPUs on which everything fits, and on which a part of the space does not.
GPUS = {"1xH100": 80, "1xH100-28GB": 28, "4xA6000": 48}


@cache
def predictor(gpus: str) -> SettingsPredictor:
    """One for all tests: predictions are made once."""
    return SettingsPredictor(config_of(), SHAPE, Cluster.parse(gpus))


def every_setting(axes: Sequence[Axis]) -> list[Settings]:
    return [settings_of(dict(itertools.chain(*own))) for own in itertools.product(*(((), *each.choices) for each in axes))]


@pytest.mark.parametrize("gpus", GPUS)
def test_the_search_finds_what_trying_everything_finds(gpus: str) -> None:
    predict = predictor(gpus)
    found = search(predict, SMALL, finalists=3)
    tried = [own for own in map(predict, every_setting(SMALL)) if own is not None and own.fits and predict.legal(own.settings)]
    assert found.whole and tried
    best = min(own.step_s for own in tried)
    assert best <= found.finalists[0].prediction.step_s <= best * (1 + NEGLIGIBLE)
    assert all(own.prediction.fits for own in found.finalists)
    seconds = [own.prediction.step_s for own in found.finalists]
    assert seconds == sorted(seconds) and len(set(seconds)) == len(seconds)
    assert all(own.reasons for own in found.finalists)


@pytest.mark.parametrize("gpus", GPUS)
def test_a_space_too_large_to_try_whole_ends_at_the_same_setting(gpus: str) -> None:
    predict = predictor(gpus)
    auto = predict(())
    assert auto is not None
    reached = choose(predict, SMALL, descent(predict, SMALL, auto), 1)
    assert reached[0].step_s == search(predict, SMALL, 1).finalists[0].prediction.step_s


def test_a_part_of_the_small_space_does_not_fit() -> None:
    """Else the tests above would say nothing of memory."""
    predict = predictor("1xH100-28GB")
    fitting = [own.fits for own in map(predict, every_setting(SMALL)) if own is not None]
    assert any(fitting) and not all(fitting)


def test_the_order_of_axes_and_choices_does_not_matter() -> None:
    turned = [Axis(own.name, tuple(reversed(own.choices))) for own in reversed(SMALL)]
    found = [search(predictor("1xH100-28GB"), axes, 4) for axes in (SMALL, turned)]
    assert found[0].finalists == found[1].finalists and found[0].axes == found[1].axes


def test_what_the_user_has_set_and_the_algorithm_stay() -> None:
    config = config_of("actor.token_budget=8192", "train.recompute=full", "rollout.memory_fraction=0.5")
    cluster = Cluster.parse("8xH100")
    axes = space_of(config, SHAPE, cluster)
    moved = {key for own in axes for choice in own.choices for key, _ in choice}
    assert moved and moved <= ALLOWED
    assert moved.isdisjoint({"actor.token_budget", "train.recompute", "rollout.memory_fraction", "rollout.kv_bytes"})
    assert not any(key.startswith(("algorithm.", "cluster.", "model.", "data.", "reward.", "run.")) for key in moved)
    before = flatten(config)
    for own in axes:
        for choice in own.choices:
            changed = flatten(with_settings(config, dict(choice)))
            assert {key for key, value in changed.items() if value != before[key]} <= {key for key, _ in choice}


def test_nothing_illegal_is_proposed() -> None:
    """Graphs read weights by address: the rules of the configuration refuse them with parameters that leave the device."""
    axes = (axis("rollout.cuda_graphs", (True,)), axis("train.offload_params", (True,)))
    refused = settings_of({"rollout.cuda_graphs": True, "train.offload_params": True})
    predict = predictor("1xH100")
    assert not predict.legal(refused) and all(predict.legal(choice) for own in axes for choice in own.choices)
    assert all(own.prediction.settings != refused for own in search(predict, axes, 9).finalists)
    (best,) = search(predictor("1xH100-28GB"), SMALL, 1).finalists
    refuse_best = lambda config: ["no"] if best.knobs.items() <= flatten(config).items() else []  # noqa: E731
    strict = SettingsPredictor(config_of(), SHAPE, Cluster.parse("1xH100-28GB"), rules=refuse_best)
    others = search(strict, SMALL, 9).finalists
    assert best.knobs and others and not any(best.knobs.items() <= own.knobs.items() for own in others)


def test_a_run_that_fits_nowhere_has_no_finalist() -> None:
    config = configuration.parse({**BASE, "model": {"path": "Qwen2.5-72B"}}, here=False)
    predict = SettingsPredictor(config, named_shape("Qwen2.5-72B"), Cluster.parse("4090"))
    assert search(predict, SMALL[:1]).finalists == ()


@pytest.mark.long
def test_that_nothing_fits_is_told() -> None:
    config = configuration.parse({**BASE, "model": {"path": "Qwen2.5-72B"}}, here=False)
    with pytest.raises(UserError, match="no setting was found with which the run fits"):
        tuning.predicted(config, named_shape("Qwen2.5-72B"), Cluster.parse("4090"), finalists=2, response=None)


def test_the_space_of_several_devices_has_their_layouts() -> None:
    names = {own.name for own in space_of(config_of(), SHAPE, Cluster.parse("16xH100"))}
    assert {"train.shard", "train.tensor_parallel", "rollout.tensor_parallel", "train.sequence_parallel"} <= names
    assert not {"train.shard", "train.tensor_parallel"} & {own.name for own in space_of(config_of(), SHAPE, Cluster.parse("1xH100"))}
    on_cpu = {own.name for own in space_of(config_of(), SHAPE, Cluster.parse("CPU"))}
    assert "actor.token_budget" in on_cpu and not any("offload" in name or "graphs" in name for name in on_cpu)


# ---- the overlay -------------------------------------------------------------------------------------------------------------------------


def overlay_of(config: Config, knobs: dict[str, Any], device: str = "NVIDIA H100 80GB HBM3", devices: int = 1) -> Overlay:
    trials = (Trial({}, 2.0, 2.1, 100.0, 3.5), Trial(knobs, 1.5, None, None, None, "out of memory"))
    return Overlay(knobs, tuned_for(config, SHAPE, device, devices, "0.1.0"), trials)


def test_an_overlay_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = overlay_of(config_of(), {"actor.token_budget": 32768, "train.recompute": "full", "rollout.release_memory": False})
    path = tmp_path / "tuned.toml"
    path.write_text(overlays.write(made, "fulltilt tune run.toml"))
    assert overlays.read(path) == made
    assert path.read_text().startswith("# Performance settings by `fulltilt tune run.toml`, measured on these devices.")


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run file, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    lines = [line for name, own in BASE.items() for line in (f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in own.items()))]
    (tmp_path / "run.toml").write_text("\n".join(lines) + '\n[train]\nrecompute = "full"\n[actor]\nforward_token_budget = "auto"\n')
    return tmp_path


def applied(knobs: dict[str, Any], *overrides: str, here: dict[str, Any] | None = None) -> overlays.Applied:
    run, path = Path("run.toml"), Path("tuned.toml")
    config = configuration.load(run, overrides, here=False)
    found = overlay_of(config_of(), knobs)
    return overlays.apply(found, path, run, overrides, replace(found.made_for, **(here or {})), config)


def test_an_overlay_sets_what_is_left_to_auto(written: Path) -> None:
    found = applied({"actor.token_budget": 4096, "actor.forward_token_budget": 8192, "train.recompute": "full"}, "run.seed=3")
    assert found.overrides == ["run.seed=3", "actor.token_budget=4096", "actor.forward_token_budget=8192"]
    assert found.notes == ["overlay tuned.toml: actor.token_budget = 4096, actor.forward_token_budget = 8192"]


def test_the_command_line_wins_over_an_overlay_and_it_is_told(written: Path) -> None:
    for given in ("actor.token_budget=2048", "actor.token_budget=auto"):
        found = applied({"actor.token_budget": 4096}, given)
        assert found.overrides == [given]
        value = given.partition("=")[2]
        shown = value if value.isdigit() else f'"{value}"'
        assert found.notes[0] == f"overlay: actor.token_budget = {shown} of the command line is used, not 4096 of tuned.toml"
    found = applied({"train.recompute": "none"}, "~train.recompute")
    assert found.overrides == ['train.recompute="none"']
    assert configuration.load("run.toml", found.overrides, here=False).train.recompute == "none"


def test_an_overlay_that_contradicts_the_run_file_is_an_error(written: Path) -> None:
    with pytest.raises(UserError, match=r'tuned.toml: train.recompute = "none", but run.toml sets it to "full". Remove it from one'):
        applied({"train.recompute": "none"})


def test_an_overlay_of_another_model_or_device_is_refused(written: Path) -> None:
    with pytest.raises(UserError, match=r"was tuned for another model .* Tune again: fulltilt tune RUN.toml --out tuned.toml"):
        applied({}, here={"shape": "0" * 16})
    with pytest.raises(UserError, match="was tuned for 1 x NVIDIA H100 80GB HBM3, and this run has 1 x NVIDIA H200"):
        applied({}, here={"device": "NVIDIA H200"})
    with pytest.raises(UserError, match="and this run has 2 x NVIDIA H100 80GB HBM3"):
        applied({}, here={"devices": 2})
    assert applied({}, here={"device": "H100"}).notes == ["overlay tuned.toml: nothing to set"]
    # Those that the hardware table lacks are the same where the driver's name has the one that people write.
    assert same_device("B200", "NVIDIA B200") and same_device("NVIDIA B200", "b200")
    assert not same_device("B200", "NVIDIA GB200") and not same_device("B200", "NVIDIA H200") and not same_device("B200", "NVIDIA B300")


def test_other_work_and_another_version_are_told(written: Path) -> None:
    found = applied({}, here={"workload": {"rollout.max_new_tokens": 4096}, "fulltilt": "9.9"})
    assert found.notes[1].startswith(
        "overlay tuned.toml: the work of a step has changed since it was tuned (rollout.max_new_tokens 1024 -> 4096)"
    )
    assert "was made by fulltilt 0.1.0, and this is 9.9" in found.notes[2]


def test_a_fingerprint_is_that_of_what_is_trained() -> None:
    same = fingerprint(SHAPE, config_of())
    assert same == fingerprint(SHAPE, config_of("actor.token_budget=4096", "train.lr=1e-3"))
    others = [fingerprint(named_shape("Qwen2.5-7B"), config_of()), fingerprint(SHAPE, config_of("lora.rank=8"))]
    others.append(fingerprint(SHAPE, config_of("model.dtype=float32")))
    assert len({same, *others}) == 4


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[actor]\ntoken_budget = 1\n", "has no .tuned. table, so it is not an overlay"),
        ("[algorithm]\nprompts_per_step = 1\n[tuned]\n", "algorithm.prompts_per_step is part of the algorithm, which tuning never changes"),
        ("[cluster]\nworkers = 2\n[tuned]\n", "cluster.workers says which devices a run has"),
        ("[train]\nlr = 1.0\n[tuned]\n", "train.lr is not a performance setting. Remove it"),
        ("[nothing]\nhere = 1.0\n[tuned]\n", "nothing.here is not a performance setting"),
        ("actor = 3\n[tuned]\n", "actor is not a section"),
        ("[tuned]\nmodel = 'x'\n", "tuned.shape is missing"),
        ("[tuned]\nmodel = 3\n", "tuned.model is 3"),
        (
            "[tuned]\nmodel = 'x'\nshape = 'y'\ndevice = 'z'\ndevices = 1\nfulltilt = '0'\ncandidates = [{measured_s = 'x'}]\n",
            "tuned.candidates is not a list of tables with numbers",
        ),
    ],
)
def test_a_file_that_is_no_overlay_is_refused(tmp_path: Path, text: str, wrong: str) -> None:
    (tmp_path / "tuned.toml").write_text(text)
    with pytest.raises(UserError, match=wrong):
        overlays.read(tmp_path / "tuned.toml")


def test_an_overlay_may_hold_every_knob_and_no_other_key() -> None:
    assert keys().keys() >= ALLOWED
    assert {"actor.token_budget", "rollout.kv_bytes", "train.recompute", "train.shard"} <= ALLOWED
    assert not any(key.startswith("algorithm.") for key in ALLOWED) and "train.lr" not in ALLOWED and "run.seed" not in ALLOWED


# ---- the command -------------------------------------------------------------------------------------------------------------------------


def test_a_prediction_needs_neither_devices_nor_files(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call("tune", "run.toml", "--hardware", "1xH100-28GB", "--finalists", "2", "--json")
    document = json.loads(capsys.readouterr().out)
    found = overlays.read(Path("tuned.toml"))
    assert found.knobs == document["knobs"] and found.made_for.device == "H100" and not found.measured
    assert all(trial.predicted_s and trial.measured_s is None for trial in found.trials)
    assert "predicted, not measured" in Path("tuned.toml").read_text()
    Path("other.toml").write_text("[run]\n")
    with pytest.raises(UserError, match=r"--out other.toml: exists, and is not an overlay that could be replaced"):
        call("tune", "run.toml", "--hardware", "H100", "--out", "other.toml")
    with pytest.raises(UserError, match="--shape goes with --hardware"):
        call("tune", "run.toml", "--shape", "Qwen2.5-7B")


def test_a_prediction_refuses_what_the_run_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the model, whose shape is given: nothing is looked up."""
    monkeypatch.setattr("fulltilt.model.load.read_config", lambda *given, **more: pytest.fail("a model was looked up"))
    wrong = config_of("model.path=nowhere/unknown", "train.shard=hybrid", "train.shard_size=3")
    with pytest.raises(UserError, match=r"train.shard_size: 3 does not divide the 4 workers of the run into groups. Use 2 or 4"):
        tuning.predicted(wrong, SHAPE, Cluster.parse("4xH100"), finalists=1, response=None)
    monkeypatch.setattr(tuning, "space_of", lambda *given: SMALL[:1])
    config = config_of("model.path=nowhere/unknown", "train.shard=optimizer", "train.tensor_parallel=1")
    found = tuning.predicted(config, SHAPE, Cluster.parse("4xH100"), finalists=1, response=None)
    assert found.searched.predicted == 3 and len(found.overlay.trials) == 2


def test_a_prediction_that_is_hardly_faster_is_left_to_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = predictor("1xH100-28GB")(())
    assert auto is not None
    near = replace(auto, settings=settings_of({"actor.token_budget": 65536}))
    assert replace(near, seconds=replace(auto.seconds, generation=PhaseSeconds())).beats(auto)
    assert not near.beats(auto) and near.beats(replace(auto, refused="it does not fit"))
    monkeypatch.setattr(tuning, "proposals", lambda *given: SearchResult(auto, (Finalist(near, ()),), ()))
    found = tuning.predicted(config_of(), SHAPE, Cluster.parse("1xH100-28GB"), finalists=1, response=None)
    assert not found.overlay.knobs and [dict(trial.knobs) for trial in found.overlay.trials] == [{}, dict(near.settings)]


def test_a_mean_beyond_the_longest_row_is_refused(written: Path) -> None:
    settings = ("algorithm.name=sft", "data.max_tokens=2048", "~algorithm.kl_coef", "~rollout.max_new_tokens")
    with pytest.raises(UserError, match=r"--response-tokens 3000: responses end at 2048 tokens \(data.max_tokens\)"):
        call("tune", "run.toml", *settings, "--response-tokens", "3000", "--hardware", "H100")


def call(*arguments: str) -> None:
    cli.app(list(arguments), standalone_mode=False)


def test_the_fastest_is_chosen_if_it_is_faster_by_more_than_chance() -> None:
    auto, near, fast = (
        tuning.Candidate(knobs, seconds=[1.0], tokens=[tokens]) for knobs, tokens in (({}, 100.0), ({"a": 1}, 101.0), ({"b": 2}, 110.0))
    )
    assert tuning.winner([auto, near]) is auto and tuning.winner([auto, near, fast]) is fast
    auto.failed = "out of memory"
    assert tuning.winner([auto, near]) is near
    near.failed = "out of memory"
    with pytest.raises(UserError, match=r"no candidate could be measured. The first failed with: out of memory"):
        tuning.winner([auto, near])


@pytest.fixture
def small_run(tmp_path: Path, model_folders, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a small run, in which the test runs."""
    folder = runs.make(tmp_path / "folder", model_folders("qwen2"))
    monkeypatch.chdir(folder)
    return folder


def out_of_memory_with(key: str, value: Any, assemble: Any) -> Any:
    """A device too small for one setting."""

    def assembled(config: Config, **more: Any) -> Any:
        if flatten(config)[key] == value:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
        return assemble(config, **more)

    return assembled


@pytest.mark.long
def test_candidates_take_turns_and_one_that_does_not_fit_is_recorded(small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "assemble", out_of_memory_with("train.recompute", "full", tuning.assemble))
    config, said = configuration.load("run.toml"), list[str]()
    knobs: list[dict[str, Any]] = [{}, {"train.recompute": "full"}, {"actor.token_budget": 64}, {"rollout.kv_bytes": 1}]
    candidates = [tuning.Candidate(own) for own in knobs]
    tuning.take_turns(config, candidates, 2, said.append)
    auto, full, small, no_cache = (own.trial() for own in candidates)
    assert auto.measured_s and auto.tokens_per_s and len(candidates[0].seconds) == len(candidates[2].seconds) == 2
    assert full.failed.startswith("out of memory") and full.measured_s is None
    assert small.measured_s and not small.failed
    assert no_cache.failed.startswith("the KV cache: rollout.kv_bytes = 1 gives 0 blocks")
    assert [text.partition(", turn")[0] for text in said] == [
        "measuring auto", "measuring train.recompute = full", "measuring actor.token_budget = 64", "measuring rollout.kv_bytes = 1",
        "measuring auto", "measuring actor.token_budget = 64",
    ]  # fmt: skip
    assert candidates[0].tokens == candidates[2].tokens, "both made the same steps"
    assert not (small_run / "run").exists(), "run.dir is not touched"


def test_a_run_file_that_no_run_accepts_ends_the_tuning(small_run: Path) -> None:
    (small_run / "reward.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(UserError, match="nothing_of_this_name"):
        tuning.take_turn(configuration.load("run.toml"), tuning.Candidate({}), 2)


@pytest.mark.long
def test_a_run_is_tuned_and_uses_the_overlay(small_run: Path, model_folders, capsys: pytest.CaptureFixture[str]) -> None:
    call("tune", "run.toml", "--finalists", "1", "--steps", "1", "--quiet")
    assert "predicted s  measured s  tokens/s" in capsys.readouterr().out
    found = overlays.read(Path("tuned.toml"))
    assert found.measured and found.made_for.device.startswith("CPU with") and found.made_for.devices == 1
    assert not Path("run").exists()
    Path("mine.toml").write_text(overlays.write(replace(found, knobs={"actor.token_budget": 64}), "fulltilt tune run.toml"))
    call("train", "run.toml", "--overlay", "mine.toml", "run.steps=1", "run.eval_before=false", "--quiet")
    assert json.loads(Path("run/plan.json").read_text())["budgets"]["token_budget"] == 64
    with pytest.raises(UserError, match=r"mine.toml: was tuned for another model"):
        call("train", "run.toml", "--overlay", "mine.toml", f"model.path={model_folders('llama')}", "run.dir=other", "--quiet")
