"""The benchmark: what is asked of engines, what the hardware allows, and a real run beside transformers."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import runs
import torch
from transformers import Qwen2Config

from fulltilt.bench import device, job, peers, rollout, roofline, shapes
from fulltilt.bench.figures import Measured, Timing
from fulltilt.bench.job import BenchJob
from fulltilt.bench.native import NO_TEXT, Native
from fulltilt.bench.options import BenchOptions
from fulltilt.bench.workload import WORKLOADS, Even, Requests, Workload, make_requests
from fulltilt.records import UserError
from fulltilt.rollout.engines.hf import HfEngine
from fulltilt.rollout.sampler import Sampling

CPU = torch.device("cpu")
TINY = shapes.Source("tiny", Qwen2Config(**models.SMALL, architectures=["Qwen2ForCausalLM"]))
vllm: Any = peers.load("peer_vllm")
PAGE = (Path(__file__).parents[1] / "docs" / "bench.md").read_text(encoding="utf-8")


def tiny_requests(prompts: int = 3, samples: int = 2, **changes: Any) -> Requests:
    return make_requests(Workload("tiny", prompts, samples, Even(4, 9), Even(2, 12), **changes), TINY.vocabulary, seed=5)


def tiny_job(folder: Path, *overrides: str, source: shapes.Source = TINY, asked: Workload | None = None, **options: Any) -> BenchJob:
    """As `rollout.prepare` makes it, for a shape that has no name."""
    workload = asked or tiny_requests().workload
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "find", lambda name: source)
        given = BenchOptions(device="cpu", overrides=list(overrides), seed=5, **options)
        return job.resolve(given, folder, rollout.SETTINGS, rollout.PEERS, workloads={workload.name: workload}, repeats={"cpu": 1})


# -- what is asked ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "samples", "prompt_lengths", "response_lengths", "mean"),
    [
        ("design", 1024, (96, 512), (16, 1024), 401.3),
        ("long", 1536, (256, 256), (1, 8192), 1999.5),
        ("tail", 16, (4096, 4096), (256, 256), 256.0),
        ("whole", 4, (256, 256), (32512, 32512), 32512.0),
        ("small", 128, (12, 64), (2, 128), 50.3),
    ],
)
def test_workloads_are_what_the_page_says(
    name: str, samples: int, prompt_lengths: tuple[int, int], response_lengths: tuple[int, int], mean: float
) -> None:
    workload = WORKLOADS[name]
    requests = make_requests(workload, vocabulary=1000, seed=0)
    lengths = np.array(list(requests.lengths.values()))
    prompts = np.array([len(prompt.ids) for prompt in requests.prompts])
    assert len(lengths) == samples == workload.prompts * workload.samples
    assert prompt_lengths[0] <= prompts.min() and prompts.max() <= prompt_lengths[1]
    assert response_lengths[0] <= lengths.min() and lengths.max() <= response_lengths[1]
    assert round(float(lengths.mean()), 1) == mean
    assert requests.describe()["response_tokens"]["mean"] == lengths.mean()
    assert requests.tokens == lengths.sum() == requests.describe()["response_tokens"]["total"]
    (row,) = [line for line in PAGE.partition("\n# Updates")[0].splitlines() if line.startswith(f"| `{name}`")]
    assert f"mean {mean:,.1f}" in row


def test_the_same_seed_asks_the_same_and_another_seed_the_same_lengths_in_another_order() -> None:
    first, again, other = (make_requests(WORKLOADS["small"], 1000, seed) for seed in (3, 3, 4))
    assert first.lengths == again.lengths
    assert all((one.ids == two.ids).all() for one, two in zip(first.prompts, again.prompts, strict=True))
    assert first.lengths != other.lengths and sorted(first.lengths.values()) == sorted(other.lengths.values())
    assert any(len(one.ids) != len(two.ids) for one, two in zip(first.prompts, other.prompts, strict=True))
    assert max(int(prompt.ids.max()) for prompt in first.prompts) < 1000


def test_lengths_of_a_group_differ() -> None:
    """As responses do: a workload whose groups end together would be kind to engines that wait for a whole batch."""
    requests = make_requests(WORKLOADS["design"], 1000, seed=0)
    spreads = [np.std([requests.lengths[uid, index] for index in range(8)]) for uid in range(128)]
    assert np.median(spreads) > 200


# -- what the hardware allows -------------------------------------------------------------------------------------------------------------


def test_the_roofline_by_hand() -> None:
    """Two samples: a prompt of 10 with 3 tokens, one of 20 with 2. First tokens come from the prefill, so there are two steps: both
    samples with contexts 11 + 21, then the first alone with 12."""
    steps = list(roofline.decode_steps([10, 20], [3, 2]))
    assert steps == [(2, 32), (1, 12)]
    cost = roofline.StepCost(weight_bytes=1000, kv_bytes_per_token=10, flops_per_sample=600, flops_per_context_token=5)
    found = roofline.bound(iter(steps), cost, roofline.Device(bandwidth=100, flops=100))
    # (1000 + 320) bytes against 2 x 600 + 160 FLOPs: arithmetic; (1000 + 120) against 600 + 60: memory.
    assert found == {"seconds": 13.6 + 11.2, "steps": 2, "memory_bound_steps": 1, "bytes": 1320 + 1120, "flops": 1360 + 660}


def test_the_roofline_holds_no_more_than_the_cache() -> None:
    assert list(roofline.decode_steps([10, 20], [3, 2], most_tokens=31)) == [(1, 11), (1, 12), (1, 21)]
    assert list(roofline.decode_steps([10, 20], [3, 2], most_tokens=32)) == [(2, 32), (1, 12)]
    assert list(roofline.decode_steps([10], [1])) == []


@pytest.mark.parametrize(
    ("name", "bandwidth"),
    [("NVIDIA H200", 4.8e12), ("NVIDIA H100 80GB HBM3", 3.35e12), ("NVIDIA H100 PCIe", 2.0e12), ("NVIDIA A100-SXM4-80GB", 2.039e12)],
)
def test_known_devices(name: str, bandwidth: float) -> None:
    found = roofline.device_named(name)
    assert found is not None and found.bandwidth == bandwidth


def test_a_step_reads_every_weight_that_is_multiplied(tmp_path: Path) -> None:
    """Tied: the vocabulary's matrix is read once, by the head. Untied: the embedding's rows are only looked up."""
    costs = {}
    for tied in (True, False):
        source = shapes.Source("tiny", Qwen2Config(**models.SMALL, tie_word_embeddings=tied))
        native = Native(tiny_job(tmp_path, source=source))
        costs[tied] = native.step_cost()
        assert isinstance(costs[tied], roofline.StepCost)
    assert costs[True] == costs[False]
    # 2 layers x keys and values x 2 heads of 8 numbers of 4 bytes; 4 FLOPs for each of 4 heads' 8 numbers and each token before.
    assert (costs[True].kv_bytes_per_token, costs[True].flops_per_context_token) == (2 * 2 * 2 * 8 * 4, 2 * 4 * 4 * 8)
    assert costs[True].flops_per_sample == 2 * costs[True].weight_bytes / 4


# -- figures ------------------------------------------------------------------------------------------------------------------------------


def test_the_best_setting_is_one_with_logprobs_and_failures_stay() -> None:
    requests = tiny_requests()
    timings = [
        Timing({"max_num_seqs": 256}, (4.0, 2.0, 3.0)),
        Timing({"max_num_seqs": 512}, (2.5, 2.5, 2.5)),
        Timing({"max_num_seqs": 512}, (1.0, 1.0, 1.0), logprobs=False),
        Timing({"max_num_seqs": 1024}, error="out of memory"),
    ]
    peer, ours = Measured(timings), Measured([Timing({}, (1.0, 0.5, 2.0))])
    found = peer.as_json(requests)
    assert found["setting"] == {"max_num_seqs": 512} and found["tokens_per_s"] == requests.tokens / 2.5
    assert found["without_logprobs"]["tokens_per_s"] == requests.tokens / 1.0
    assert [timing["error"] for timing in found["all_settings"]] == [None, None, None, "out of memory"]
    assert rollout.ratio(ours, peer, requests) == 2.5
    assert rollout.ratio(ours, Measured(timings[2:]), requests) is None


def test_time_per_token_leaves_prefill_out() -> None:
    requests = tiny_requests(per_token=True)
    timing = Timing({}, seconds=(1.5, 1.5), prefill_seconds=(0.5, 0.5))
    per_token = timing.ms_per_token(requests)
    assert per_token == pytest.approx(1000 * 1.0 / (max(requests.lengths.values()) - 1))
    slower = Timing({}, seconds=(2.5, 2.5), prefill_seconds=(0.5, 0.5))
    assert rollout.ratio(Measured([timing]), Measured([slower]), requests) == pytest.approx(2.0)


# -- peers --------------------------------------------------------------------------------------------------------------------------------


def hf_engine(max_seqs: int = 100, ends: frozenset[int] = frozenset()) -> HfEngine:
    return HfEngine(shapes.theirs(TINY, CPU), NO_TEXT, ends, max_seqs)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_transformers_gives_the_logprobs_of_what_it_sampled_and_every_length(temperature: float) -> None:
    requests, engine = tiny_requests(), hf_engine(max_seqs=5)
    sampling = Sampling(samples=2, max_new_tokens=12, temperature=temperature)
    said: list[str] = []
    engine.report(said.append, 0.0)
    groups = list(engine.generate(requests.prompts, sampling, 0, requests.lengths))
    assert [group.prompt.uid for group in groups] == [group.place for group in groups] == [0, 1, 2]  # in batches of two prompts and one
    assert [line.split(" after ")[0] for line in said] == ["rollout: 2 of 3 prompts", "rollout: 3 of 3 prompts"]
    assert engine.stats().decode_tokens == sum(requests.lengths.values()) - len(requests.lengths)
    assert {(group.prompt.uid, sample.index): len(sample.ids) for group in groups for sample in group.samples} == requests.lengths
    for prompt, sample in ((group.prompt.ids, sample) for group in groups for sample in group.samples):
        with torch.no_grad():
            logits = engine.model(torch.from_numpy(np.concatenate([prompt, sample.ids]))[None]).logits[0, len(prompt) - 1 : -1]
        expected = (logits / temperature).log_softmax(-1).gather(1, torch.from_numpy(sample.ids)[:, None])[:, 0].numpy()
        assert np.abs(expected - sample.logprobs).max() < 1e-4  # padding on the left sums in another order


def test_transformers_stops_at_end_tokens_unless_a_length_is_forced() -> None:
    requests, ends = tiny_requests(prompts=2), frozenset(range(0, TINY.vocabulary, 4))
    forced = {(0, 0): 9}
    groups = list(hf_engine(ends=ends).generate(requests.prompts, Sampling(samples=2, max_new_tokens=12), 1, forced))
    for group in groups:
        for sample in group.samples:
            drawn = sample.ids.tolist()
            assert len(sample.logprobs) == len(drawn)
            if (group.prompt.uid, sample.index) in forced:
                assert len(drawn) == 9 and sample.finish == "length"
            else:
                assert not ends & set(drawn[:-1]) and (drawn[-1] in ends) == (sample.finish == "stop")
                assert len(drawn) == 12 or sample.finish == "stop"
    greedy = [list(hf_engine().generate(requests.prompts, Sampling(temperature=0, max_new_tokens=3), seed)) for seed in (0, 1)]
    assert [g.samples[0].ids.tolist() for g in greedy[0]] == [g.samples[0].ids.tolist() for g in greedy[1]]


def test_transformers_tries_batches_that_fit_the_cache() -> None:
    requests = tiny_requests(prompts=8)
    assert {setting["batch"] for setting in rollout.hf_settings(requests, "cpu", 10, None)} == {16, 8, 4}
    three_prompts = 3 * 2 * requests.positions * 10
    assert rollout.hf_settings(requests, "cuda", 10, three_prompts) == [{"batch": 6}, {"batch": 4}]


def test_transformers_tries_one_thread_unless_their_number_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert rollout.variants({"batch": 8, "threads": 2}) == [{"batch": 8, "threads": 1}]
    assert rollout.variants({"batch": 8}) == []
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert rollout.variants({"batch": 8, "threads": 2}) == []


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed: its absence cannot be shown")
def test_a_point_of_the_grid_that_fails_is_recorded(tmp_path: Path) -> None:
    asked, said = tiny_job(tmp_path), list[str]()
    assert json.loads((tmp_path / "model" / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    found = vllm.measure(replace(asked, options=BenchOptions(vllm_grid="4")), 0, 100, None, said.append)
    assert len(said) == 2
    (timing,) = found.timings
    assert timing.setting["max_num_seqs"] == 4 and timing.error is not None and "No module named 'vllm'" in timing.error
    assert found.as_json(asked.requests[0])["tokens_per_s"] is None


def test_kernels_have_names_that_can_be_read() -> None:
    assert (
        device.short("void at::native::(anonymous namespace)::indexSelectSmallIndex<c10::BFloat16>(int)")
        == "at::native::indexSelectSmallIndex"
    )
    assert device.short("Memcpy DtoH (Device -> Pinned)") == "Memcpy DtoH" and device.short("_attend") == "_attend"
    left = torch.ones(64, 64)
    seen = {entry["kernel"]: entry for entry in device.kernels_of(lambda: [left @ left for _ in range(6)], CPU, parts=2)}
    assert seen["aten::mm"]["calls"] == 3 and seen["aten::mm"]["microseconds"] > 0


def test_vllm_starts_together_where_the_device_holds_them() -> None:
    starts = [vllm.VllmStart(256, 20), vllm.VllmStart(512, 30), vllm.VllmStart(1024, 45)]
    assert vllm.waves(starts, free=120, beside=10) == [starts[:2], starts[2:]]
    assert vllm.waves(starts, free=40, beside=10) == [[start] for start in starts]
    assert vllm.waves(starts, free=1000, beside=10) == [starts]
    assert vllm.waves(starts, None, beside=10) == [[start] for start in starts]


def test_vllm_has_memory_for_as_many_samples_as_it_may_run(tmp_path: Path) -> None:
    requests = tiny_requests()
    prompts, lengths = sum(len(prompt.ids) for prompt in requests.prompts), sorted(requests.lengths.values(), reverse=True)
    for most in (1, 3, 10**6):
        assert vllm.enough_kv_bytes(requests, most, 100) >= 100 * max(requests.positions, prompts + sum(lengths[:most]))
    one, three, all_of_them = (vllm.enough_kv_bytes(requests, most, 100) for most in (1, 3, 10**6))
    assert one < three < all_of_them
    on_cpu = tiny_job(tmp_path)
    options = vllm.engine_options(replace(on_cpu, device=torch.device("cuda")), vllm.VllmStart(3, 7))
    assert options["kv_cache_memory_bytes"] == 7 and options["gpu_memory_utilization"] < 0.1
    assert (options["model"], options["load_format"], options["dtype"]) == (str(tmp_path / "model"), "dummy", "bfloat16")
    alone = vllm.engine_options(on_cpu, vllm.VllmStart(3, None))
    assert not {"kv_cache_memory_bytes", "gpu_memory_utilization", "max_cudagraph_capture_size"} & alone.keys()
    assert (alone["max_num_seqs"], alone["max_model_len"], alone["dtype"]) == (3, requests.positions, "float32")


# -- the command --------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("bench")
    models.save("qwen2", place / "model")
    return place


@pytest.mark.matrix
def test_a_run_beside_transformers(folder: Path) -> None:
    asked = ["--device", "cpu", "--against", "hf", "--model", "model", "--prompts", "2", "--samples", "2", "--repeats", "2", "--seed", "1"]
    ended = runs.command_here(folder, "bench", "rollout", *asked, "--json", "--out", "found.json")
    assert ended.code == 0, ended.error
    found = json.loads(ended.out)
    assert found == json.loads((folder / "found.json").read_text())
    ours, theirs = found["engines"]["fulltilt"], found["engines"]["hf"]
    assert found["ratio"] == found["ratios"]["hf"] == pytest.approx(ours["tokens_per_s"] / theirs["tokens_per_s"])
    assert len(ours["tokens_per_s_all"]) == len(theirs["tokens_per_s_all"]) == found["repeats"] == 2
    assert found["workload"]["prompts"] == 2 and found["workload"]["response_tokens"]["total"] == sum(
        make_requests(replace(WORKLOADS["small"], prompts=2, samples=2), models.VOCABULARY, 1).lengths.values()
    )
    # Tokens drawn in decode steps: all but each sample's first.
    assert ours["statistics"]["rollout/decode_tokens"] == found["workload"]["response_tokens"]["total"] - 4
    # float32 on one model: a larger gap means that two models or two attention functions were mixed up.
    assert ours["logprob_gap"]["mean_absolute"] < 1e-5
    assert len(theirs["all_settings"]) == 2 and all(timing["error"] is None for timing in theirs["all_settings"])
    assert found["roofline"] is None and "--bandwidth" in found["roofline_missing"]
    assert found["command"].startswith("fulltilt bench rollout") and found["versions"]["torch"] == torch.__version__
    assert "hf: trying" in ended.error
    text = rollout.table(found)
    assert f"{ours['tokens_per_s']:,.0f}" in text and f"{found['ratio']:.2f} times as fast as hf" in text
    assert (ours["captures"], ours["eager_reason"]) == (0, None) and "CUDA graphs" not in text
    ours["eager_reason"] = "a hook on layer 3"
    assert "decoded without them, slower: a hook on layer 3" in rollout.table(found)


def test_time_per_token_and_the_roofline_of_a_given_device(tmp_path: Path) -> None:
    asked = tiny_job(tmp_path, asked=tiny_requests(per_token=True).workload, against="hf", bandwidth=1e9, flops=1e9)
    (requests,) = asked.requests
    found = rollout.run(asked, lambda text: None)
    assert found["compared_by"] == "time per token"
    ours, theirs = found["engines"]["fulltilt"], found["engines"]["hf"]
    assert found["ratio"] == pytest.approx(theirs["ms_per_token"] / ours["ms_per_token"])
    assert ours["roofline_fraction"] == pytest.approx(found["roofline"]["seconds"] / ours["seconds"][0])
    assert found["roofline"]["steps"] == max(requests.lengths.values()) - 1
    assert set(ours["decode_step_ms"]) == {"context", "1"}
    json.dumps(found)


def test_settings_reach_our_engine(tmp_path: Path) -> None:
    a_block = 16 * 2 * 2 * 2 * 8 * 4
    asked = tiny_job(tmp_path, f"rollout.kv_bytes={3 * a_block}", "rollout.max_seqs=2", "rollout.prefix_sharing=false")
    assert asked.given == {"rollout.kv_bytes": 3 * a_block, "rollout.max_seqs": 2, "rollout.prefix_sharing": False}
    native = Native(asked)
    assert (native.limits.blocks, native.limits.max_seqs, native.limits.prefix_sharing) == (3, 2, False)
    assert native.run(asked.requests[0]) > 0 and native.engine.stats().preemptions >= 0
    # One sample may have 20 tokens, which are two blocks.
    with pytest.raises(UserError, match=r"rollout\.kv_bytes"):
        Native(tiny_job(tmp_path, f"rollout.kv_bytes={2 * a_block - 1}"))
    assert Native(tiny_job(tmp_path, f"rollout.kv_bytes={2 * a_block}")).limits.blocks == 2
    wide = Native(tiny_job(tmp_path, "model.dtype=float64", "rollout.block_tokens=32"))
    assert wide.model.dtype == torch.float64 and wide.limits.block_tokens == 32


def test_one_sample_of_each_prompt(tmp_path: Path) -> None:
    """A group of one cannot learn by GRPO, but it can be sampled: the engine is sized for as many samples as there are."""
    native = Native(tiny_job(tmp_path, samples=1))
    assert native.limits.max_seqs == 3 and native.run(native.requests) > 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"workload": "huge"}, "--workload huge: unknown workload; choose from design, long"),
        ({"against": "hf,sglang"}, "unknown peer 'sglang'; choose from vllm, hf"),
        ({"device": "tpu"}, "--device tpu"),
        ({"model": "nowhere"}, "--model nowhere: neither a named shape (0.5B, 1.5B, 7B, 2.7B-A0.5B, small) nor a folder"),
        *(
            ({name: value}, f"--{name} {value}: give a finite number above 0")
            for name in ("bandwidth", "flops")
            for value in (0.0, -1e12, float("inf"), float("nan"))
        ),
        ({"bandwidth": 1e9}, "--bandwidth and --flops: --flops is missing, and it is not known for cpu"),
        ({"flops": 1e9}, "--bandwidth and --flops: --bandwidth is missing, and it is not known for cpu"),
        ({"vllm_grid": "256", "against": "hf"}, "--vllm-grid: vllm is not measured here"),
        ({"model": "model", "workload": "tail"}, "needs 4352 positions, and model was made for 512"),
        ({"overrides": ("rollout.kv_bytes=many",)}, 'rollout.kv_bytes: must be "auto" or a whole number from 1 to 1000000000000000'),
        ({"overrides": ("rollout.max_new_tokens=2",)}, "rollout.max_new_tokens=2: not a setting of this measurement"),
        ({"overrides": ("train.recompute=full",)}, "train.recompute=full: not a setting of this measurement"),
        ({"overrides": ("rollout.max_seqs",)}, "rollout.max_seqs: not a setting of this measurement. Write KEY=VALUE"),
        ({"overrides": ("rollout.cuda_graphs=true",)}, "rollout.cuda_graphs"),
    ],
)
def test_mistakes_are_said_before_anything_is_measured(
    given: dict[str, Any], words: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(UserError) as told:
        rollout.prepare(BenchOptions(**{"device": "cpu", **given}), tmp_path)
    assert words in str(told.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="finds no CUDA device"):
        rollout.prepare(BenchOptions(device="cuda"), tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm(folder: Path) -> None:
    ended = runs.command_here(folder, "bench", "rollout", "--device", "cpu", "--against", "vllm,hf")
    assert (ended.code, ended.out) == (2, "")
    assert "vLLM is not installed" in ended.error and "fulltilt[vllm]" in ended.error


def test_without_the_drivers_of_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(peers.VARIABLE, str(tmp_path))
    with pytest.raises(
        UserError, match=r"peer_vllm\.py, which this benchmark needs, is not in .*install fulltilt from a clone .*, or set FULLTILT_"
    ):
        rollout.prepare(BenchOptions(device="cpu", against="vllm"), tmp_path)
    (tmp_path / "peer_vllm.py").write_text("GRID = (7,)")
    assert peers.load("peer_vllm").GRID == (7,)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--kv-bytes", "--kv-bytes: no such option. Write rollout.kv_bytes=1 instead"),
        ("--recompute=full", "--recompute: no such option. Write train.recompute=full instead"),
        ("--no-packing", "--no-packing: no such option. Write train.packing=false instead"),
        ("--token-budget", "--token-budget: no such option. Write actor.token_budget=1 instead"),
        ("--entropy-coef", "--entropy-coef: no such option. Write algorithm.entropy_coef=1 instead"),
    ],
)
def test_an_option_that_is_a_key_says_what_to_write(option: str, words: str, folder: Path) -> None:
    ended = runs.command_here(folder, "bench", "update", option, "1")
    assert (ended.code, ended.out) == (2, "") and words in ended.error


def test_a_benchmark_that_is_not_installed_is_refused_before_slow_imports(tmp_path: Path) -> None:
    code = "import sys, fulltilt.cli; sys.argv = ['fulltilt', 'bench', 'learn', 'run.toml']\n"
    code += "try:\n    fulltilt.cli.main()\nfinally:\n    print('torch' in sys.modules)"
    environment = {**runs.environment(), peers.VARIABLE: str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "False\n") and "learn.py, which this benchmark needs, is not in" in ended.stderr


def test_values_of_options() -> None:
    read = BenchOptions(against=" vllm, hf,", vllm_grid="256,1024")
    assert (read.peers, read.grid) == (("vllm", "hf"), (256, 1024))
    assert (BenchOptions().peers, BenchOptions().grid) == ((), ())
    for text in ("", "0", "256;512", "many"):
        with pytest.raises(UserError, match="--vllm-grid"):
            _ = BenchOptions(vllm_grid=text).grid


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(folder: Path) -> None:
    (folder / "taken").mkdir()
    for place, words in (
        ("taken", "Is a directory"),
        ("nowhere/found.json", "there is no folder nowhere"),
        ("n" * 300, "File name too long"),
    ):
        ended = runs.command_here(folder, "bench", "rollout", "--device", "cpu", "--model", "model", "--prompts", "1", "--out", place)
        assert (ended.code, ended.out) == (2, "")
        assert f"error: --out {place}: " in ended.error and words in ended.error and ended.error.count("loading") == 1
    job.check_writable("--out", folder / "new.json")
    assert not (folder / "new.json").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that opens and takes nothing")
def test_what_was_measured_is_printed_although_the_file_takes_nothing(folder: Path) -> None:
    asked = ["--device", "cpu", "--model", "model", "--prompts", "1", "--samples", "1", "--repeats", "1", "--json", "--out", "/dev/full"]
    ended = runs.command_here(folder, "bench", "rollout", *asked)
    assert ended.code == 2 and json.loads(ended.out)["engines"]["fulltilt"]["tokens_per_s"] > 0
    assert "error: --out /dev/full: it could not be written" in ended.error


def test_every_option_is_on_the_page(folder: Path) -> None:
    said = runs.command_here(folder, "bench", "rollout", "--help")
    assert said.code == 0
    for option in ("model", "against", "device", "workload", "prompts", "samples", "repeats", "seed", "vllm-grid", "bandwidth",
                   "flops", "out", "json", "quiet"):  # fmt: skip
        assert f"--{option}" in said.out, option
        assert f"`--{option}" in PAGE, option
