"""The benchmark of updates: FLOPs against numbers worked out by hand and against torch's own count, and real runs of the command."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import runs
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from fulltilt.batching.cost import Flops, ModelSize, pairs, update_flops
from fulltilt.bench import flops, shapes, update
from fulltilt.bench.flops import verl_flops
from fulltilt.bench.options import BenchOptions
from fulltilt.bench.workload import WORKLOADS, make_requests
from fulltilt.model.attention import Packed
from fulltilt.model.forward import hidden_states
from fulltilt.model.load import load_model
from fulltilt.model.verify import verify
from fulltilt.records import UserError
from fulltilt.schema import ModelConfig

CPU = torch.device("cpu")
PAGE = (Path(__file__).parents[1] / "docs" / "bench.md").read_text(encoding="utf-8")

# -- FLOPs --------------------------------------------------------------------------------------------------------------------------------


# Weights: layers x (hidden x (2 x query width + 2 x key width) + 3 x hidden x inner), and vocabulary x hidden.
# 0.5B: 24 x (896 x (2 x 896 + 2 x 128) + 3 x 896 x 4864), 151936 x 896
# 1.5B: 28 x (1536 x (2 x 1536 + 2 x 256) + 3 x 1536 x 8960), 151936 x 1536
# 7B:   28 x (3584 x (2 x 3584 + 2 x 512) + 3 x 3584 x 18944), 152064 x 3584
# FLOPs of one sample of 1,000 tokens, 600 of them trained: 6 x weights x tokens; 12 x hidden x layers x 500,500 pairs.
BY_HAND: dict[str, tuple[int, int, int, Flops, int]] = {
    "0.5B": (
        494_032_768, 357_826_560, 136_134_656,
        Flops(layers=2_146_959_360_000, attention=129_153_024_000, head=490_084_761_600),
        3_909_599_232_000,
    ),
    "1.5B": (
        1_543_714_304, 1_310_195_712, 233_373_696,
        Flops(layers=7_861_174_272_000, attention=258_306_048_000, head=840_145_305_600),
        10_919_706_624_000,
    ),
    "7B": (
        7_615_616_512, 6_525_288_448, 544_997_376,
        Flops(layers=39_151_730_688_000, attention=602_714_112_000, head=1_961_990_553_600),
        46_293_811_200_000,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_flops_of_the_named_shapes_are_those_worked_out_by_hand(name: str) -> None:
    parameters, layer_weights, head_weights, expected, by_verl = BY_HAND[name]
    config = shapes.find(name).config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert flops.model_size(model, {}) == ModelSize(layer_weights, head_weights, ())
    attention = ((config.hidden_size, None),) * config.num_hidden_layers
    found = update_flops(ModelSize(layer_weights, head_weights, attention), [1000], trained=600)
    assert found == expected
    assert found.total == expected.layers + expected.attention + expected.head
    assert verl_flops(config, [1000]) == by_verl
    # What sets verl's apart: a second vocabulary, the tokens that are not trained; and half a token less to look at for each.
    differences = 6 * head_weights * 1000 + 6 * head_weights * 400 - 12 * config.hidden_size * config.num_hidden_layers * 500
    assert by_verl - found.total == differences


def test_samples_add_up_and_attention_goes_by_their_own_lengths() -> None:
    size = ModelSize(7, 11, ((2, None), (3, 4)))
    found = update_flops(size, [5, 9], trained=6)
    assert found == Flops(
        layers=6 * 7 * 14,
        attention=12 * (2 * (15 + 45) + 3 * (14 + 30)),  # a window of 4: 1 + 2 + 3 + 4 + 4, and 4 four times more
        head=6 * 11 * 6,
    )
    assert verl_flops(shapes.find("0.5B").config, [5, 9]) != verl_flops(shapes.find("0.5B").config, [14])


@pytest.mark.parametrize("window", [None, 1, 3, 7, 50])
def test_pairs_are_what_a_causal_mask_lets_through(window: int | None) -> None:
    for length in (1, 2, 3, 7, 20):
        place = np.arange(length)
        gap = place[:, None] - place[None, :]
        assert pairs(length, window) == int(((gap >= 0) & (gap < (window or length))).sum())


def test_verl_counts_no_family_that_it_has_no_dense_formula_for() -> None:
    assert verl_flops(models.FAMILIES["qwen3-moe"](), [5]) is None
    assert verl_flops(models.FAMILIES["llama"](), [5]) is not None


@pytest.mark.parametrize("family", ["qwen2", "llama-tied", "qwen3", "phi3"])
def test_torch_counts_the_same_in_the_layers(family: str, model_folders) -> None:
    """All products with weights, forward and backward, seen by torch as they run. Attention runs in a kernel that it counts otherwise."""
    model = load_model(ModelConfig(path=str(model_folders(family))), CPU)
    size = flops.model_size(model, {})
    assert size.head_weights == models.VOCABULARY * 32
    ids, positions = torch.arange(12), torch.cat([torch.arange(7), torch.arange(5)])
    with FlopCounterMode(display=False) as counter:
        hidden_states(model, ids, positions, Packed.of([0, 7, 12], CPU)).sum().backward()
    products = sum(
        count for operator, count in counter.get_flop_counts()["Global"].items() if operator in (torch.ops.aten.mm, torch.ops.aten.addmm)
    )
    assert products == update_flops(size, [7, 5], trained=0).layers == 6 * size.layer_weights * 12


def test_a_token_is_multiplied_with_the_experts_that_it_is_sent_to(model_folders) -> None:
    model = load_model(ModelConfig(path=str(model_folders("qwen3-moe"))), CPU)
    attention, router, an_expert = 2 * 32 * (2 * 64 + 2 * 32), 2 * 32 * 4, 3 * 32 * 24
    assert flops.model_size(model, {}).layer_weights == attention + router + 2 * 2 * an_expert  # 2 layers, 2 of 4 experts


def test_windows_of_a_model_are_counted(model_folders) -> None:
    model = load_model(ModelConfig(path=str(model_folders("gemma3"))), CPU)
    size = flops.model_size(model, verify(model))
    assert size.attention == ((32, 12), (32, None))


def test_utilisation() -> None:
    assert flops.utilisation(300.0, 2.0, 600.0) == 0.25
    assert flops.utilisation(None, 2.0, 600.0) is None and flops.utilisation(300.0, 2.0, None) is None


# -- the command --------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("bench")
    models.save("qwen2", place / "model")
    return place


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Any]:
    return measured(folder)


def measured(folder: Path, *given: str) -> dict[str, Any]:
    asked = ["--device", "cpu", "--model", "model", "--prompts", "3", "--samples", "2", "--repeats", "2", "--seed", "1"]
    ended = runs.command_here(folder, "bench", "update", *asked, *given, "--json")
    assert ended.code == 0, ended.error
    found: dict[str, Any] = json.loads(ended.out)
    return found


def test_a_run(folder: Path) -> None:
    found = measured(folder, "actor.token_budget=200", "--flops", "1e9", "--out", "found.json")
    assert found == json.loads((folder / "found.json").read_text())
    workload = found["workload"]
    assert found["tokens"] == 2 * workload["prompt_tokens"]["total"] + workload["response_tokens"]["total"]
    assert found["trained_tokens"] == workload["response_tokens"]["total"]
    assert found["pad_tokens"] == 0 and found["largest_micro_batch"] <= 200 == found["token_budget"]
    assert found["micro_batches"] >= -(-found["tokens"] // 200)
    assert len(found["seconds"]) == len(found["optimizer_seconds"]) == found["repeats"] == 2
    middle = sum(found["seconds"]) / 2
    assert found["tokens_per_s"] == pytest.approx(found["tokens"] / middle)
    assert found["mfu"] == pytest.approx(found["flops"]["total"] / middle / 1e9)
    assert found["mfu_by_verl"] == pytest.approx(found["flops"]["by_verl"] / middle / 1e9)
    assert found["flops"]["layers"] == 6 * found["model"]["layer_weights"] * found["tokens"]
    assert found["flops"]["head"] == 6 * models.VOCABULARY * 32 * found["trained_tokens"]
    assert all(0 < norm < 1e3 for norm in found["grad_norm"])
    # float32 parameters are their own masters: beside them stand two moments, and a counter for each tensor.
    parameters = 4 * found["model"]["parameters"]
    memory = found["memory_bytes"]
    assert memory["gradients"] == parameters and memory["parameters"] >= parameters
    assert 2 * parameters < memory["optimizer"] < 2.1 * parameters
    assert found["knobs"] == {"actor.token_budget": 200}
    assert "CPU" in found["layers"] and found["command"].startswith("fulltilt bench update")
    kernels = found["kernels"]
    assert kernels["micro_batches"] == 2 and any(entry["kernel"] == "aten::mm" for entry in kernels["update"])
    times = [entry["microseconds"] for entry in kernels["update"]]
    assert times == sorted(times, reverse=True) and kernels["optimizer"]
    text = update.table(found)
    assert f"{found['mfu']:.3f}" in text and f"{found['mfu_by_verl']:.3f}" in text and "aten::mm" in text and "no MFU" not in text
    found |= {"mfu": None, "mfu_missing": "the arithmetic of cpu is not known: give --flops"}
    assert "no MFU: the arithmetic of cpu is not known" in update.table(found)


@pytest.mark.matrix
def test_padding_computes_more_and_changes_neither_flops_nor_gradients(folder: Path, plain: dict[str, Any]) -> None:
    packed, padded = plain, measured(folder, "train.packing=false")
    assert packed["pad_tokens"] == 0 < padded["pad_tokens"]
    assert padded["knobs"] == {"train.packing": False}
    assert padded["flops"] == packed["flops"] and padded["tokens"] == packed["tokens"]
    assert padded["grad_norm"] == pytest.approx(packed["grad_norm"], rel=1e-4)  # float32, summed in another order
    assert packed["mfu"] is None and "--flops" in packed["mfu_missing"]


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        (("train.recompute=selective",), {"recompute": "selective"}),
        pytest.param(
            ("train.recompute=full", "train.recompute_layers=1"), {"recompute": "full", "recompute_layers": 1}, marks=pytest.mark.matrix
        ),
        pytest.param(
            ("train.recompute=full", "train.recompute_layers=2", "train.recompute_method=uniform"),
            {"recompute": "full", "recompute_layers": 2, "recompute_method": "uniform"},
            marks=pytest.mark.long,
        ),
        pytest.param(("train.entropy_chunk=3",), {"entropy_chunk": 3}, marks=pytest.mark.matrix),
        pytest.param(("train.fused_head=false",), {"fused_head": False}, marks=pytest.mark.matrix),
    ],
)
def test_knobs_reach_the_update_and_change_no_gradient(
    given: tuple[str, ...], settings: dict[str, Any], folder: Path, plain: dict[str, Any]
) -> None:
    found = measured(folder, *given)
    assert found["settings"] == plain["settings"] | settings
    assert found["knobs"] == {f"train.{name}": value for name, value in settings.items()}
    assert found["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4) and found["flops"] == plain["flops"]
    if "recompute" in settings:  # some of it ran a second time
        assert products(found) > products(plain) if settings["recompute"] == "full" else kernels_run(found) > kernels_run(plain)
    else:
        assert found["memory_bytes"]["head"] != plain["memory_bytes"]["head"]


@pytest.mark.matrix
def test_an_entropy_bonus_keeps_or_computes_again(folder: Path, plain: dict[str, Any]) -> None:
    bonus = "algorithm.entropy_coef=0.1"
    again, kept = measured(folder, bonus), measured(folder, bonus, "train.entropy_recompute=false")
    assert again["knobs"] == {"algorithm.entropy_coef": 0.1} and kept["settings"] == again["settings"] | {"entropy_recompute": False}
    assert again["grad_norm"] != plain["grad_norm"] and kept["grad_norm"] == pytest.approx(again["grad_norm"], rel=1e-4)
    assert kernels_run(kept) < kernels_run(again)


@pytest.mark.matrix
def test_logits_are_kept_or_made_again(folder: Path, plain: dict[str, Any]) -> None:
    again, kept = (measured(folder, f"train.head_recompute={value}") for value in ("true", "false"))
    assert again["settings"] == plain["settings"] and kept["settings"] == again["settings"] | {"head_recompute": False}
    assert kept["grad_norm"] == pytest.approx(again["grad_norm"], rel=1e-4) and products(kept) < products(again)


def kernels_run(found: dict[str, Any]) -> int:
    return sum(int(entry["calls"]) for entry in found["kernels"]["update"])


def products(found: dict[str, Any]) -> int:
    return sum(int(entry["calls"]) for entry in found["kernels"]["update"] if entry["kernel"] in ("aten::mm", "aten::addmm"))


def test_the_samples_have_the_lengths_of_the_workload() -> None:
    requests = make_requests(WORKLOADS["design"], vocabulary=1000, seed=0)
    rows = update.make_rows(requests, 1000)
    assert len(rows) == 1024 and all(row.ids.max() < 1000 for row in rows)
    for row, ((uid, _), tokens) in zip(rows, requests.lengths.items(), strict=True):
        assert row.group == uid and row.mask.sum() == tokens and row.tokens == len(requests.prompts[uid].ids) + tokens
        assert row.advantages is not None and len(np.unique(row.advantages[row.mask])) == 1 and not row.advantages[~row.mask].any()
    assert len({float(row.advantages[-1]) for row in rows if row.advantages is not None}) == 1024


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"flops": float("inf")}, "--flops inf: give a finite number above 0"),
        ({"flops": 0.0}, "--flops 0.0: give a finite number above 0"),
        ({"workload": "huge"}, "--workload huge: unknown workload; choose from design, long"),
        ({"model": "nowhere"}, "--model nowhere: neither a named shape"),
        ({"overrides": ("actor.token_budget=0",)}, 'actor.token_budget: must be "auto" or a whole number from 1 to 2147483647'),
        (
            {"overrides": ("train.recompute=none", "train.recompute_layers=2")},
            'train.recompute_layers: 2 has no effect while train.recompute is "none"',
        ),
        ({"overrides": ("train.offload_optimizer=true",)}, "train.offload_optimizer: true, but the run is on the CPU"),
        ({"overrides": ("train.entropy_recompute=false",)}, "train.entropy_recompute: false, but the loss has no entropy bonus"),
        ({"overrides": ("rollout.max_seqs=2",)}, "rollout.max_seqs=2: not a setting of this measurement"),
        ({"overrides": ("train.lr=1",)}, "train.lr=1: not a setting of this measurement"),
        ({"overrides": ("train.recompte=full",)}, "train.recompte=full: not a setting of this measurement"),
    ],
)
def test_mistakes_are_reported_before_anything_loads(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as told:
        update.prepare(BenchOptions(**{"device": "cpu", **given}), tmp_path)
    assert words in str(told.value)


def test_every_option_is_on_the_page(folder: Path) -> None:
    said = runs.command_here(folder, "bench", "update", "--help")
    assert said.code == 0
    for option in ("--model", "--device", "--workload", "--prompts", "--samples", "--repeats", "--seed", "--flops", "--out"):
        assert option in said.out, option
        assert f"`{option}" in PAGE, option


# -- on a GPU -----------------------------------------------------------------------------------------------------------------------------


def on_gpu(*settings: str) -> dict[str, Any]:
    overrides = ("actor.token_budget=4096", *settings)
    options = BenchOptions(model="0.5B", device="cuda", prompts=8, samples=4, repeats=1, flops=989e12, overrides=overrides)
    with tempfile.TemporaryDirectory() as scratch:
        return update.run(update.prepare(options, Path(scratch)), lambda text: None)


@pytest.fixture(scope="module")
def plain_on_gpu() -> dict[str, Any]:
    return on_gpu()


@pytest.mark.gpu
def test_a_run_on_a_gpu(plain_on_gpu: dict[str, Any]) -> None:
    found = plain_on_gpu
    parameters, memory = found["model"]["parameters"], found["memory_bytes"]
    # bfloat16 weights; float32 accumulators; float32 masters and two moments.
    assert memory["parameters"] == pytest.approx(2 * parameters, rel=0.01)
    assert memory["gradients"] == pytest.approx(4 * parameters, rel=0.01)
    assert memory["optimizer"] == pytest.approx(12 * parameters, rel=0.01)
    assert memory["activations"] > 0 and not any(found["host_memory_bytes"].values())
    assert found["peak_memory_bytes"] >= memory["parameters"] + memory["gradients"] + memory["optimizer"] + memory["activations"]
    assert 0 < found["mfu"] < found["mfu_by_verl"] < 1
    kernels = found["kernels"]
    assert kernels["update"] and kernels["optimizer"]
    assert not any(entry["kernel"].startswith(("Optimizer.", "ProfilerStep", "aten::")) for entry in kernels["update"])
    assert sum(entry["microseconds"] for entry in kernels["update"]) / 1e6 < 1.5 * kernels["seconds"]
    assert update.table(found)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("setting", "effect"),
    [
        ("train.packing=false", lambda off, on: on["pad_tokens"] > 0 == off["pad_tokens"]),
        ("train.recompute=selective", lambda off, on: on["memory_bytes"]["activations"] < off["memory_bytes"]["activations"]),
        ("train.recompute=full", lambda off, on: on["memory_bytes"]["activations"] < 0.5 * off["memory_bytes"]["activations"]),
        ("train.offload_activations=true", lambda off, on: on["memory_bytes"]["activations"] < off["memory_bytes"]["activations"]),
        (
            "train.offload_optimizer=true",
            lambda off, on: (
                on["memory_bytes"]["optimizer"] < 0.5 * off["memory_bytes"]["optimizer"] <= 0.6 * on["host_memory_bytes"]["optimizer"]
            ),
        ),
        ("train.offload_grads=true", lambda off, on: on["memory_bytes"]["gradients"] == off["memory_bytes"]["gradients"]),
        ("train.fused_head=false", lambda off, on: on["memory_bytes"]["head"] > off["memory_bytes"]["head"]),
        ("train.fused_layers=false", lambda off, on: len(on["kernels"]["update"]) != len(off["kernels"]["update"])),
        ("train.compile=true", lambda off, on: on["layers"] != off["layers"]),
    ],
)
def test_knobs_on_a_gpu(setting: str, effect: Any, plain_on_gpu: dict[str, Any]) -> None:
    found = on_gpu(setting)
    assert effect(plain_on_gpu, found)
    # bfloat16: the norm of a whole gradient, whose sums are rounded otherwise.
    assert found["grad_norm"] == pytest.approx(plain_on_gpu["grad_norm"], rel=2e-2)
    assert found["flops"] == plain_on_gpu["flops"]
