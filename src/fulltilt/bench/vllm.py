"""vLLM, as a peer, in processes of its own: one start for each point of the grid, so that its memory is gone afterwards.

Enters: requests and a grid of `max_num_seqs`. Leaves: seconds at every point, with log-probs and without. Guaranteed: each pass begins
with an empty prefix cache; every response was checked to have its length; a point that fails is recorded with its error.

    python -m fulltilt.bench.vllm REQUEST.json RESULT.json        (what `measure` starts; nothing of ours runs in that process)
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fulltilt.bench import process
from fulltilt.bench.figures import Measured, Timing
from fulltilt.bench.workload import WARM_UP_TOKENS, Requests

GRID = (256, 512, 1024)
LARGEST_GRAPH = 1024
START_LIMIT_S = 3600.0  # of one start with all its passes
# Offline, and sampling without a compiler: its sampler of choice is built with nvcc where it is missing, and serves top-k and top-p only.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1"}
FORGET_LIMIT_S = 10.0  # to empty the prefix cache


def installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def measure(
    requests: Requests, model: Path, scratch: Path, *, dummy_weights: bool, device: str, dtype: str, kv_bytes: int | None, repeats: int,
    grid: Sequence[int], say: Callable[[str], None],
) -> Measured:  # fmt: skip
    """One process a point of the grid."""
    timings: list[Timing] = []
    details: dict[str, Any] = {"starts": []}
    for most in grid:
        say(f"vllm: max_num_seqs {most}, start and passes")
        setting = {"max_num_seqs": most, "graphs_up_to": LARGEST_GRAPH if device == "cuda" else None}
        request = {
            "engine": engine_options(requests, model, most, dummy_weights=dummy_weights, device=device, dtype=dtype, kv_bytes=kv_bytes),
            "prompts": [prompt.ids.tolist() for prompt in requests.prompts],
            "samples": [[uid, length] for (uid, _), length in requests.lengths.items()],
            "repeats": repeats,
            "per_token": requests.workload.per_token,
            "slow": requests.workload.slow,
        }
        result = in_process(request, scratch / f"vllm-{most}", device, kv_bytes)
        details["starts"].append(setting | {"seconds": result.get("start_seconds"), "error": result.get("error")})
        details["version"] = result.get("version", details.get("version"))
        timings += [
            Timing(
                setting=setting | {"logprob_format": pass_["logprobs"]} if pass_["logprobs"] else setting,
                seconds=tuple(pass_["seconds"]),
                prefill_seconds=tuple(pass_["prefill_seconds"]),
                logprobs=pass_["logprobs"] is not None,
                error=pass_["error"],
            )
            for pass_ in result["passes"]
        ]
        if result.get("error"):
            timings.append(Timing(setting=setting, error=result["error"]))
    return Measured("vllm", timings, details)


def engine_options(
    requests: Requests, model: Path, most: int, *, dummy_weights: bool, device: str, dtype: str, kv_bytes: int | None
) -> dict[str, Any]:
    """Arguments of `vllm.LLM`. What is not here is as vLLM chooses."""
    options: dict[str, Any] = {
        "model": str(model),
        "load_format": "dummy" if dummy_weights else "auto",
        "dtype": dtype,
        "skip_tokenizer_init": True,
        "max_model_len": requests.positions,
        "max_num_seqs": most,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "seed": requests.seed,
    }
    if device == "cuda":
        options["max_cudagraph_capture_size"] = LARGEST_GRAPH
    if kv_bytes is not None:
        options["kv_cache_memory_bytes"] = kv_bytes
    return options


def in_process(request: Mapping[str, Any], scratch: Path, device: str, kv_bytes: int | None) -> dict[str, Any]:
    environment = dict(ENVIRONMENT)
    if device == "cpu" and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, (kv_bytes or 2**30) // 2**30))
    return {"passes": []} | process.ask("fulltilt.bench.vllm", request, scratch, environment, START_LIMIT_S)


# -- in the other process -----------------------------------------------------------------------------------------------------------------


def main(asked: Path, answered: Path) -> None:
    process.serve(asked, answered, run, {"passes": []})


def run(request: Mapping[str, Any], result: dict[str, Any]) -> None:
    import vllm  # type: ignore[import-not-found, unused-ignore]

    result["version"] = vllm.__version__
    begin = time.perf_counter()
    engine = vllm.LLM(**request["engine"])
    result["start_seconds"] = time.perf_counter() - begin
    # Flat log-probs cost vLLM less than one dictionary a token; versions without them have only these.
    with_logprobs = "flat" if hasattr(vllm.SamplingParams(), "flat_logprobs") else "dictionaries"
    # Those with log-probs last: whole passes have warmed the engine up by then.
    for logprobs in (with_logprobs,) if request["slow"] else (None, with_logprobs):
        timed: dict[str, Any] = {"logprobs": logprobs, "seconds": [], "prefill_seconds": [], "error": None}
        result["passes"].append(timed)
        try:
            one_pass(engine, request, logprobs, cut=WARM_UP_TOKENS)
            for _ in range(request["repeats"]):
                timed["seconds"].append(one_pass(engine, request, logprobs))
                if request["per_token"]:
                    timed["prefill_seconds"].append(one_pass(engine, request, logprobs, cut=1))
        except Exception as error:
            timed["error"] = f"{type(error).__name__}: {error}"
            traceback.print_exc()


def one_pass(engine: Any, request: Mapping[str, Any], logprobs: str | None, cut: int | None = None) -> float:
    """Seconds for all requests; `cut`: with at most that many tokens each."""
    import vllm

    lengths = [min(length, cut or length) for _, length in request["samples"]]
    prompts = [{"prompt_token_ids": request["prompts"][prompt]} for prompt, _ in request["samples"]]
    options: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True, "detokenize": False}
    if logprobs:
        options["logprobs"] = 0  # the sampled token's and no others'
    if logprobs == "flat":
        options["flat_logprobs"] = True
    parameters = [vllm.SamplingParams(max_tokens=length, **options) for length in lengths]
    forget_prefixes(engine)
    begin = time.perf_counter()
    outputs = engine.generate(prompts, parameters, use_tqdm=False)
    seconds = time.perf_counter() - begin
    for output, length in zip(outputs, lengths, strict=True):
        (sample,) = output.outputs
        assert len(sample.token_ids) == length, f"{len(sample.token_ids)} tokens instead of {length}"
        assert not logprobs or len(sample.logprobs) == length
    return seconds


def forget_prefixes(engine: Any) -> None:
    """A pass must prefill its prompts. With scheduling ahead of the device, blocks of the pass before are freed a moment after its end."""
    deadline = time.perf_counter() + FORGET_LIMIT_S
    while not engine.reset_prefix_cache():
        assert time.perf_counter() < deadline, "the prefix cache of the pass before is still there"
        time.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
