"""vLLM as a peer, in processes of its own: one start for each value of `max_num_seqs`, so that its memory is free afterwards.

Enters: requests and the values. Leaves: seconds at each of them, with log-probs and without. Guaranteed: one engine works at a time, though
as many as the device holds start together, since a start takes a minute or more; each pass begins with an empty prefix cache; every
response was checked to have its length; a start that fails is recorded with its error.

`measure` runs in fulltilt's process; `run` runs in vLLM's, where no model of ours is loaded.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulltilt.bench import peers
from fulltilt.bench.figures import Measured, Timing
from fulltilt.bench.workload import WARM_UP_TOKENS, Requests

if TYPE_CHECKING:
    from fulltilt.bench.job import BenchJob

GRID = (256, 512, 1024)
LARGEST_GRAPH = 1024
BLOCK = 16  # tokens of vLLM's KV cache that a sample takes at a time
BESIDE = 8 * 2**30  # bytes that a start may take beside weights and KV cache: its context, activations, graphs, logits
FORGET_LIMIT_S = 10.0  # to empty the prefix cache


@dataclass(frozen=True)
class VllmStart:
    most: int  # max_num_seqs
    kv_bytes: int | None  # None: as vLLM chooses


def measure(job: BenchJob, parameters: int, kv_bytes_per_token: int, free: int | None, say: Callable[[str], None]) -> Measured:
    """One process for each value of the grid. `free`: bytes that are free on the device; None, on a CPU: they start one after another."""
    starts = [
        VllmStart(most, job.kv_bytes or (None if free is None else enough_kv_bytes(job.requests[0], most, kv_bytes_per_token)))
        for most in job.options.grid or GRID
    ]
    timings: list[Timing] = []
    details: dict[str, Any] = {"starts": []}
    for wave in waves(starts, free, BESIDE + 2 * parameters):
        say(f"vllm: max_num_seqs {', '.join(str(start.most) for start in wave)}: starting")
        with ExitStack() as started:
            processes = [started.enter_context(begin(job, start)) for start in wave]
            for peer in processes:
                peer.wait_until_ready()
            for start, peer in zip(wave, processes, strict=True):
                say(f"vllm: max_num_seqs {start.most}: passes")
                setting = {"max_num_seqs": start.most, "graphs_up_to": LARGEST_GRAPH if job.device.type == "cuda" else None}
                result = peer.measure()
                beside = {"kv_bytes": start.kv_bytes, "started_together": len(wave)}
                details["starts"].append(setting | beside | {"seconds": result.get("start_seconds"), "error": result.get("error")})
                details["version"] = result.get("version", details.get("version"))
                timings += [Timing(**{**timed, "setting": setting | timed["setting"]}) for timed in result.get("passes", [])]
                timings += [Timing(setting, error=result["error"])] if result.get("error") else []
    return Measured(timings, details)


def begin(job: BenchJob, start: VllmStart) -> peers.Peer:
    (requests,), folder = job.requests, job.scratch / f"vllm-{start.most}"
    request = {
        "engine": engine_options(job, start),
        "prompts": [prompt.ids.tolist() for prompt in requests.prompts],
        "samples": [[uid, length] for (uid, _), length in requests.lengths.items()],
        "repeats": job.repeats,
        "per_token": requests.workload.per_token,
        "slow": requests.workload.slow,
    }
    defaults = {"VLLM_CACHE_ROOT": str(folder / "cache")}  # one compiler must not read what another is about to write
    if job.device.type == "cpu":
        defaults["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, (job.kv_bytes or 2**30) // 2**30))
    return peers.Peer(Path(__file__), request, folder, defaults)


def enough_kv_bytes(requests: Requests, most: int, per_token: int) -> int:
    """Enough that `most` samples never wait for memory, whichever of them run: the longest ones at their ends, every prompt once, since its
    group shares it, and a twentieth more."""
    prompts = sum(len(prompt.ids) + BLOCK for prompt in requests.prompts)
    responses = sum(sorted(requests.lengths.values(), reverse=True)[:most]) + 2 * BLOCK * min(most, len(requests.lengths))
    return int(1.05 * per_token * max(requests.positions + BLOCK, prompts + responses))


def waves(starts: Sequence[VllmStart], free: int | None, beside: int) -> list[list[VllmStart]]:
    """Which ones start together: as many as the device's free bytes hold, in their order, each with `beside` bytes beside its KV cache."""
    found: list[list[VllmStart]] = []
    left = 0
    for start in starts:
        held = beside + (start.kv_bytes or 0)
        if not found or free is None or held > left:
            found.append([])
            left = free or 0
        found[-1].append(start)
        left -= held
    return found


def engine_options(job: BenchJob, start: VllmStart) -> dict[str, Any]:
    """Arguments of `vllm.LLM`. All others are as vLLM chooses."""
    (requests,) = job.requests
    options: dict[str, Any] = {
        "model": str(Path(job.config.model.path).resolve()),
        "load_format": "auto" if job.source.folder else "dummy",
        "dtype": job.dtype,
        "skip_tokenizer_init": True,
        "max_model_len": requests.positions,
        "max_num_seqs": start.most,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "seed": requests.seed,
    }
    if start.kv_bytes is not None:
        options["kv_cache_memory_bytes"] = start.kv_bytes
    if job.device.type == "cuda":
        # A start refuses where the share `gpu_memory_utilization` of the device is not free; with the bytes given it does nothing else.
        options |= {"max_cudagraph_capture_size": LARGEST_GRAPH, "gpu_memory_utilization": 0.01}
    return options


# -- in the other process -----------------------------------------------------------------------------------------------------------------


def run(request: Mapping[str, Any], result: dict[str, Any]) -> None:
    import vllm  # type: ignore[import-not-found, unused-ignore]

    result |= {"version": vllm.__version__, "passes": []}
    begin = time.perf_counter()
    engine = vllm.LLM(**request["engine"])
    result["start_seconds"] = time.perf_counter() - begin
    peers.wait_for_turn()
    # Flat log-probs cost vLLM less than one dictionary for each token, but not every version has them.
    with_logprobs = "flat" if hasattr(vllm.SamplingParams(), "flat_logprobs") else "dictionaries"
    # Passes with log-probs come last: by then whole passes have warmed the engine up.
    for logprobs in (with_logprobs,) if request["slow"] else (None, with_logprobs):
        timed: dict[str, Any] = {"logprobs": logprobs is not None, "seconds": [], "prefill_seconds": [], "error": None}
        timed["setting"] = {"logprob_format": logprobs} if logprobs else {}
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
    """A pass must prefill its prompts. vLLM schedules ahead of the device: blocks of the previous pass are freed a moment after its end."""
    deadline = time.perf_counter() + FORGET_LIMIT_S
    while not engine.reset_prefix_cache():
        assert time.perf_counter() < deadline, "the prefix cache of the previous pass is still there"
        time.sleep(0.05)


if __name__ == "__main__":
    peers.serve(run)
