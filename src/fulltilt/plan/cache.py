"""The memory of a rollout: the KV cache, decoding beside it, and passes over prompts.

Enters: the configuration, facts, and how roles run. Leaves: blocks of the cache, samples decoded at once, tokens of a pass, and whether
CUDA graphs hold decoding steps. Guaranteed: the cache holds at least one of the longest samples, or the run is refused; with `auto` it
leaves memory for decoding and for the largest pass over prompts; a size set by the user that does not fit is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fulltilt import footprint
from fulltilt.plan.decisions import Decisions, RolePlan, longest_response, releases_memory, unless_auto
from fulltilt.plan.facts import Facts, evaluates
from fulltilt.plan.resident import KEPT_SHARE, SLACK, most_resident, resident, returning
from fulltilt.records import DoesNotFit
from fulltilt.schema import Config
from fulltilt.shape import Shape
from fulltilt.words import in_bytes, many

# Values of `auto` before anything is measured, by device.
MOST_SEQS = {"cuda": 1024, "cpu": 256}
BATCHED_TOKENS = {"cuda": 16384, "cpu": 4096}
PASS_SHARE = 1 / 4  # the most that `auto` gives to a pass over prompts, as a share of the memory for it and the KV cache
LEAST_PASS = 2048  # least tokens of a pass over prompts that `auto` chooses: shorter passes waste the chip
KV_SHARE = {"cuda": 0.85, "cpu": 0.25}
CACHED_SAMPLES = 16  # number of the longest samples that a KV cache should hold; else `auto` divides a model for rollouts


@dataclass(frozen=True)
class RolloutMemory:
    """Memory of the device in a rollout, in bytes."""

    free: int  # free memory, with models and optimizers in place
    decode: int  # memory of decoding, beside the KV cache
    returning: int  # memory that other phases bring back while the cache stays, and that is not counted as taken


def rollout_memory(config: Config, facts: Facts, roles: RolePlan, samples: int) -> RolloutMemory:
    decode = facts.decode_bytes
    if decode is None:
        decode = decode_bytes(config, facts, most_seqs(config, facts.device, samples)) if facts.rollout else 0
    free = facts.free_bytes
    if free is None and facts.device == "cuda":
        free = int((1 - SLACK) * facts.device_bytes) - resident({role: vars(own) for role, own in roles.settings.items()}, facts, None)
    elif free is None:
        free = facts.host_bytes
    return RolloutMemory(max(0, free), decode, 0 if releases_memory(config) else returning(facts, roles.settings))


def decode_bytes(config: Config, facts: Facts, rows: int) -> int:
    """Estimate the bytes that decoding `rows` samples at once takes beside the KV cache: logits, the samples' progress, and on CUDA the
    kernels' workspaces, a layer's temporaries, and the memory of captured graphs."""
    actor, block = facts.actor, config.rollout.block_tokens
    shape, itemsize = actor.shape, actor.itemsize
    blocks = -(-(facts.longest + longest_response(config) + footprint.BURST) // block) + footprint.TABLE_STEP
    vocabulary = shape.vocabulary * facts.parts  # each member samples from all logits: its own part, the gathered ones, and these in order
    logits = vocabulary if facts.rollout_parts == 1 else 2 * vocabulary + vocabulary // facts.rollout_parts
    found = 4 * rows * (logits + blocks) + footprint.progress_bytes(rows)
    if facts.device != "cuda":
        return found
    sizes, first = footprint.sizes_up_to(rows), shape.layers[0]
    of_attention = 4 * max(
        footprint.workspace_numbers(size, layer.heads, layer.key_heads, layer.head_width, itemsize, blocks * block, facts.processors)
        for size in sizes
        for layer in set(shape.layers)
    )
    of_layer = 2 * rows * itemsize * (4 * shape.width + 3 * first.inner)  # doubled, for pieces of a pool that do not fit the next size
    of_graphs = (
        0 if why_decoding_has_no_graphs(config, facts) else footprint.GRAPH_BYTES * 2 * len(sizes)
    )  # graphs with top-k and top-p, and without
    of_trials = footprint.trial_bytes(shape.width, 2 * first.inner, itemsize) if itemsize == 2 and actor.fused else 0
    return found + of_attention + footprint.sampling_bytes(rows, vocabulary) + of_layer + of_graphs + of_trials


def useful_rollout(config: Config, made: Decisions, facts: Facts) -> tuple[int, str]:
    """Estimate the bytes on the device in a rollout with a KV cache for `CACHED_SAMPLES` of the longest samples, or all if there are
    fewer, and a description of them."""
    algorithm = config.algorithm
    samples = algorithm.prompts_per_step * algorithm.samples_per_prompt
    replicas = facts.sharding.workers * facts.parts // facts.rollout_parts
    rows, longest = min(CACHED_SAMPLES, -(-samples // replicas)), facts.longest + longest_response(config)
    cache = rows * longest * facts.token_bytes if config.rollout.kv_bytes == "auto" else config.rollout.kv_bytes
    beside = resident(made.keys, facts, None) if releases_memory(config) else most_resident(made, facts)
    decode = decode_bytes(config, facts, most_seqs(config, facts.device, samples))
    of_cache = f"{many(rows, 'sample')} of {longest} tokens" if config.rollout.kv_bytes == "auto" else in_bytes(cache)
    return beside + decode + cache, f"models, optimizer and a KV cache for {of_cache}"


def most_seqs(config: Config, device: str, samples: int) -> int:
    """Return the number of samples decoded at once."""
    return unless_auto(config.rollout.max_seqs, max(1, min(MOST_SEQS[device], samples)))


def cache_bytes(config: Config, facts: Facts, blocks: int) -> int:
    return blocks * config.rollout.block_tokens * facts.token_bytes


def blocks_per_sample(config: Config, facts: Facts) -> int:
    """Return the number of blocks that the longest sample needs."""
    return -(-(facts.longest + longest_response(config)) // config.rollout.block_tokens)


def kv_blocks(config: Config, facts: Facts, memory: RolloutMemory, max_seqs: int, batched: int) -> int:
    """Return the number of blocks of the KV cache. `batched`: tokens of a pass over prompts, which needs memory beside the cache."""
    rollout = config.rollout
    block_bytes = facts.token_bytes * rollout.block_tokens
    per_sample = blocks_per_sample(config, facts)
    if rollout.kv_bytes != "auto":
        available, source = rollout.kv_bytes, f"rollout.kv_bytes = {rollout.kv_bytes}"
    elif rollout.memory_fraction != "auto":
        available = int(rollout.memory_fraction * memory.free)
        source = f"rollout.memory_fraction = {rollout.memory_fraction} of {in_bytes(memory.free)} free"
    else:
        share = (KV_SHARE if releases_memory(config) else KEPT_SHARE)[facts.device]
        # One block more than a sample needs: newcomers wait until those that run have a block each to grow by.
        most = (per_sample + 1) * max_seqs * block_bytes
        room = max(0, memory.free - memory.decode - memory.returning)
        prefill = pass_bytes(facts, prompt_tokens(config, facts, batched))
        available = max(0, min(most, int(share * room), room - prefill))
        of_prefill = f" and {in_bytes(prefill)} for a pass over prompts" if prefill else ""
        source = f"the {in_bytes(memory.free)} free on this device, {in_bytes(memory.decode)} of them for decoding{of_prefill},"
    blocks = available // block_bytes
    if blocks < per_sample:
        raise DoesNotFit(
            f"the KV cache: {source} gives {blocks} blocks of {rollout.block_tokens} tokens ({in_bytes(block_bytes)} each), one sample "
            f"may need {per_sample} (longest prompt plus rollout.max_new_tokens). Give it {in_bytes(per_sample * block_bytes)} or more, or "
            f"lower rollout.{'block_tokens' if per_sample == 1 else 'max_new_tokens'}"
            + ("" if rollout.max_batched_tokens == "auto" else ", or rollout.max_batched_tokens")
        )
    return blocks


def prefill_bytes(shape: Shape, tokens: float, itemsize: int, *, fused: bool, parts: int = 1) -> int:
    """Estimate the bytes of an engine's pass over `tokens` tokens of prompts: those of the layer that keeps most. `parts`: the number
    of workers among which it is divided."""
    return int(tokens * max(shape.layer_bytes(layer, itemsize, fused=fused) for layer in set(shape.layers)) / parts)


def pass_bytes(facts: Facts, tokens: float) -> int:
    """Estimate the bytes of the actor's pass over `tokens` tokens of prompts; 0 on a CPU, where memory is allocated when needed."""
    if facts.device != "cuda":
        return 0
    actor = facts.actor
    return prefill_bytes(actor.shape, tokens, actor.itemsize, fused=actor.fused, parts=facts.rollout_parts)


def most_in_a_pass(batched: int, prompts: int, engines: int, tokens: float, at_once: float = math.inf) -> float:
    """Return the most tokens of an engine's pass over prompts of `tokens` each, with a limit of `batched`: those of all prompts that it
    gets at once. `at_once`: the most prompts that it samples at once."""
    return min(batched, min(-(-prompts // engines), at_once) * tokens)


def prompt_tokens(config: Config, facts: Facts, batched: int) -> float:
    """Return the most tokens of the actor's pass over prompts, at the longest prompts. The number that an engine gets in a validation is
    not known here."""
    if config.data.val is not None:
        return batched
    algorithm, engines = config.algorithm, max(1, facts.sharding.workers * facts.parts // facts.rollout_parts)
    reads = 1 if config.rollout.prefix_sharing else algorithm.samples_per_prompt
    return most_in_a_pass(batched, algorithm.prompts_per_round or algorithm.prompts_per_step, engines, reads * facts.longest)


def pass_tokens(config: Config, facts: Facts, memory: RolloutMemory, max_seqs: int) -> int:
    """Return the tokens of a pass over prompts if the user gave no number: fewer if the KV cache would otherwise have to be small."""
    rollout, tokens = config.rollout, max(BATCHED_TOKENS[facts.device], max_seqs)
    if not facts.rollout or facts.device != "cuda":
        return tokens
    room = memory.free - memory.decode - memory.returning
    left = PASS_SHARE * room
    if rollout.kv_bytes != "auto":
        left = room - rollout.kv_bytes
    elif rollout.memory_fraction != "auto":
        left = room - rollout.memory_fraction * memory.free
    while tokens // 2 >= max(LEAST_PASS, max_seqs) and pass_bytes(facts, tokens) > left:
        tokens //= 2
    return tokens


def check_decoding(config: Config, facts: Facts, memory: RolloutMemory, samples: int) -> None:
    if facts.rollout and memory.decode > memory.free:
        rows = most_seqs(config, facts.device, samples)
        raise DoesNotFit(
            f"rollout.max_seqs: decoding {many(rows, 'sample')} at once takes {in_bytes(memory.decode)} beside the KV cache, and "
            f"{in_bytes(memory.free)} are free. Use less than {rows}"
        )


def check_cache(config: Config, facts: Facts, memory: RolloutMemory, blocks: int) -> None:
    """Refuse a KV cache whose size the user set and that does not fit. On a CPU decoding is not counted: the free memory is a guess there,
    and a block takes memory only once it is written."""
    key = "kv_bytes" if config.rollout.kv_bytes != "auto" else "memory_fraction"
    given, cache = getattr(config.rollout, key), cache_bytes(config, facts, blocks)
    if given != "auto" and cache + (memory.decode if facts.device == "cuda" else 0) > memory.free:
        raise DoesNotFit(
            f"rollout.{key}: {given} makes a KV cache of {in_bytes(cache)}, and decoding needs {in_bytes(memory.decode)} beside it, but "
            f"{in_bytes(memory.free)} are free on this device. Lower it, or leave it out for auto"
        )


def graphs_without_device(config: Config, device: str) -> Iterator[str]:
    if config.rollout.cuda_graphs is True and device != "cuda":
        yield (
            "rollout.cuda_graphs: true, but this run is on the CPU, and only a CUDA device has graphs. Remove the key (auto is on where "
            "there is one), or set run.device = cuda"
        )


def uses_graphs(config: Config, device: str, *, copied: bool = False) -> bool:
    """Return whether decoding steps are captured, if a graph can hold the model. `copied`: the engine reads a copy of the actor, or the
    actor is not trained: then the parameters that it reads never leave the device."""
    return device == "cuda" and config.rollout.cuda_graphs is not False and (copied or config.train.offload_params is not True)


def why_decoding_has_no_graphs(config: Config, facts: Facts) -> str | None:
    """Return why no decoding step is captured, in words; None: they are captured."""
    if uses_graphs(config, facts.device, copied=facts.samples_from_copy or evaluates(facts)):
        return facts.not_captured
    if config.rollout.cuda_graphs is False:
        return "rollout.cuda_graphs is off"
    return "the run is on the CPU" if facts.device == "cpu" else "train.offload_params moves the weights that they would read"
