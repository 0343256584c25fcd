"""The plan: every derived number of a run, worked out before its first step and printed once, in words.

Enters: the configuration and a few facts about device, model and data. Leaves: a frozen `Plan`. Guaranteed: a number the user set is
taken as it is or refused with the reason; `auto` becomes a number here and nowhere else; the numbers that execution depends on
(`budgets`) go into every checkpoint, so that a resumed run computes in the same shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fulltilt.config import Config
from fulltilt.records import UserError

# What `auto` means until it is measured: generous on a GPU, where small passes waste the chip; small on a CPU, where they cost nothing.
TOKEN_BUDGET = {"cuda": 16384, "cpu": 8192}
MOST_SEQS = {"cuda": 1024, "cpu": 256}
BATCHED_TOKENS = {"cuda": 16384, "cpu": 4096}
ONE_THREAD_PARAMETERS = 30_000_000  # a rule of thumb: below it one thread was faster where others ran beside it
KV_SHARE = {"cuda": 0.85, "cpu": 0.25}
KEPT_SHARE = {"cuda": 0.5, "cpu": 0.25}  # where the cache stays while the update runs beside it


@dataclass(frozen=True)
class Facts:
    """What is known once model and data are loaded."""

    device: str  # "cuda" or "cpu"
    free_bytes: int  # on the device, with model and optimizer in place
    parameters: int
    cores: int  # that torch would use if left alone
    threads_given: bool  # by OMP_NUM_THREADS
    context_limit: int | None  # positions the model was made for
    kv_bytes_per_token: int
    longest: int  # tokens of the longest prompt (of the longest row, for SFT), over training and validation
    steps_per_epoch: int
    decode_bytes: int = 0  # what decoding `most_seqs` samples at once holds beside the KV cache
    graph_sizes: int = 0  # batch sizes that CUDA graphs are captured for
    not_captured: str | None = None  # why no graph can hold the model, as far as is known
    layers: str = ""  # whether the roles' layers run fused, in words


@dataclass(frozen=True)
class Budgets:
    """Numbers that execution depends on and results do not. A checkpoint keeps them."""

    threads: int  # of torch on the CPU
    kv_blocks: int
    max_seqs: int
    max_batched_tokens: int
    token_budget: int
    forward_token_budget: int
    ref_token_budget: int
    critic_token_budget: int
    critic_forward_token_budget: int
    reward_model_token_budget: int


@dataclass(frozen=True)
class Plan:
    steps: int
    samples_per_step: int
    updates_per_step: int
    budgets: Budgets
    words: tuple[str, ...]


def make_plan(config: Config, facts: Facts, *, rollout: bool, kept: dict[str, Any] | None = None) -> Plan:
    """The plan of a run; `kept` are the budgets of the checkpoint it resumes from."""
    algorithm = config.algorithm
    steps = count_steps(config, facts.steps_per_epoch)
    samples = algorithm.prompts_per_step * (algorithm.samples_per_prompt if rollout else 1)
    check_context(config, facts, rollout=rollout)
    if rollout:
        check_graphs(config, facts)
    budgets = make_budgets(config, facts, samples if rollout else 0)
    if kept:
        needed = blocks_per_sample(config, facts) if rollout else 0  # validation may ask for longer responses than before
        budgets = replace(budgets, **kept)  # an older version's checkpoint may lack some
        budgets = replace(budgets, kv_blocks=max(budgets.kv_blocks, needed))
    if rollout:
        check_room(config, facts, budgets.kv_blocks)
    plan = Plan(steps, samples, updates_per_step(config), budgets, ())
    return replace(plan, words=tuple(in_words(config, facts, plan, rollout=rollout)))


def count_steps(config: Config, steps_per_epoch: int) -> int:
    return config.run.steps or (config.run.epochs or 1) * steps_per_epoch


def updates_per_step(config: Config) -> int:
    """Optimizer steps made from one rollout."""
    return config.algorithm.minibatches_per_step * config.algorithm.epochs


def check_context(config: Config, facts: Facts, *, rollout: bool) -> None:
    longest = facts.longest + (longest_response(config) if rollout else 0)
    if facts.context_limit is None or longest <= facts.context_limit:
        return
    made_for = f"the model was made for {facts.context_limit} positions"
    if rollout:
        key = "rollout.max_new_tokens" if longest_response(config) == config.rollout.max_new_tokens else "eval.max_new_tokens"
        raise UserError(
            f"{key}: the longest prompt ({facts.longest} tokens) with a response of {longest_response(config)} needs "
            f"{longest}, {made_for}. Lower {key} or data.max_prompt_tokens"
        )
    raise UserError(
        f"data.train: the longest row has {longest} tokens, {made_for}. Set data.max_tokens = {facts.context_limit} to leave such rows "
        "out, or shorten them"
    )


def check_graphs(config: Config, facts: Facts) -> None:
    if config.rollout.cuda_graphs is True and facts.not_captured is not None:
        raise UserError(
            f"rollout.cuda_graphs: true, but no graph can hold the model: {facts.not_captured}. Remove the key: decoding then goes on "
            "without graphs"
        )


def check_room(config: Config, facts: Facts, blocks: int) -> None:
    """Of a KV cache whose size the user set. Not on a CPU: what is free there is a guess that counts the files a container has read as
    memory in use, and a block takes memory only once it is written."""
    rollout = config.rollout
    key = "rollout.kv_bytes" if rollout.kv_bytes != "auto" else "rollout.memory_fraction"
    given = rollout.kv_bytes if rollout.kv_bytes != "auto" else rollout.memory_fraction
    cache = blocks * rollout.block_tokens * facts.kv_bytes_per_token
    if facts.device != "cuda" or given == "auto" or cache + facts.decode_bytes <= facts.free_bytes:
        return
    raise UserError(
        f"{key}: {given} makes a KV cache of {in_bytes(cache)}, and decoding needs {in_bytes(facts.decode_bytes)} beside it, but "
        f"{in_bytes(facts.free_bytes)} are free on this device. Lower it, or leave it out for auto"
    )


def longest_response(config: Config) -> int:
    return max(config.rollout.max_new_tokens, config.eval.max_new_tokens or 0)


def uses_graphs(config: Config, device: str) -> bool:
    if config.rollout.cuda_graphs is True and device != "cuda":
        raise UserError(
            "rollout.cuda_graphs: true, but this run is on the CPU, and only a CUDA device has graphs. Remove the key (auto is on where "
            "there is one), or set run.device = cuda"
        )
    return device == "cuda" and config.rollout.cuda_graphs is not False


def releases_memory(config: Config) -> bool:
    return config.rollout.release_memory is not False


def most_seqs(config: Config, device: str, samples: int) -> int:
    """Samples decoded at once."""
    return max(1, min(MOST_SEQS[device], samples)) if config.rollout.max_seqs == "auto" else config.rollout.max_seqs


def make_budgets(config: Config, facts: Facts, samples: int) -> Budgets:
    rollout, actor = config.rollout, config.actor
    token_budget = TOKEN_BUDGET[facts.device] if actor.token_budget == "auto" else actor.token_budget
    forward = 2 * token_budget if actor.forward_token_budget == "auto" else actor.forward_token_budget
    max_seqs = most_seqs(config, facts.device, samples)
    critic = 2 * token_budget if config.critic.token_budget == "auto" else config.critic.token_budget
    of_reward_model = config.reward_model.forward_token_budget
    batched = max(BATCHED_TOKENS[facts.device], max_seqs) if rollout.max_batched_tokens == "auto" else rollout.max_batched_tokens
    return Budgets(
        threads=threads(config, facts),
        kv_blocks=kv_blocks(config, facts, max_seqs) if samples else 0,
        max_seqs=max_seqs,
        max_batched_tokens=batched,
        token_budget=token_budget,
        forward_token_budget=forward,
        ref_token_budget=forward if config.ref.forward_token_budget == "auto" else config.ref.forward_token_budget,
        critic_token_budget=critic,
        critic_forward_token_budget=2 * critic if config.critic.forward_token_budget == "auto" else config.critic.forward_token_budget,
        reward_model_token_budget=2 * forward if of_reward_model == "auto" else of_reward_model,
    )


def threads(config: Config, facts: Facts) -> int:
    if config.run.threads != "auto":
        return config.run.threads
    small = facts.device == "cpu" and facts.parameters < ONE_THREAD_PARAMETERS
    return 1 if small and not facts.threads_given else facts.cores


def blocks_per_sample(config: Config, facts: Facts) -> int:
    """That the longest sample needs."""
    return -(-(facts.longest + longest_response(config)) // config.rollout.block_tokens)


def kv_blocks(config: Config, facts: Facts, max_seqs: int) -> int:
    rollout = config.rollout
    block_bytes = facts.kv_bytes_per_token * rollout.block_tokens
    per_sample = blocks_per_sample(config, facts)
    if rollout.kv_bytes != "auto":
        blocks, source = rollout.kv_bytes // block_bytes, f"rollout.kv_bytes = {rollout.kv_bytes}"
    elif rollout.memory_fraction != "auto":
        blocks = int(rollout.memory_fraction * facts.free_bytes) // block_bytes
        source = f"rollout.memory_fraction = {rollout.memory_fraction} of {in_bytes(facts.free_bytes)} free"
    else:
        share = KV_SHARE[facts.device] if releases_memory(config) else KEPT_SHARE[facts.device]
        room = int(share * max(0, facts.free_bytes - facts.decode_bytes))
        # One more than a sample needs: newcomers wait until those that run have a block each to grow by.
        blocks = min(room // block_bytes, (per_sample + 1) * max_seqs)
        source = f"the {in_bytes(facts.free_bytes)} free on this device, {in_bytes(facts.decode_bytes)} of them for decoding,"
    if blocks < per_sample:
        raise UserError(
            f"the KV cache: {source} gives {blocks} blocks of {rollout.block_tokens} tokens ({in_bytes(block_bytes)} each), one sample "
            f"may need {per_sample} (longest prompt plus rollout.max_new_tokens). Give it {in_bytes(per_sample * block_bytes)} or more, or "
            "lower rollout.max_new_tokens"
        )
    return blocks


def in_words(config: Config, facts: Facts, plan: Plan, *, rollout: bool) -> list[str]:
    algorithm, budgets = config.algorithm, plan.budgets
    layers = [f"layers: {facts.layers}"] if facts.layers else []
    per_epoch = f"{many(facts.steps_per_epoch, 'round' if algorithm.prompts_per_round else 'step')} an epoch"
    if not rollout:
        return [
            f"{many(plan.steps, 'step')} ({per_epoch}), each of {algorithm.prompts_per_step} rows, "
            f"{many(plan.updates_per_step, 'optimizer step')}; micro-batches of at most {budgets.token_budget} tokens",
            *layers,
        ]
    cache = budgets.kv_blocks * config.rollout.block_tokens
    return [
        f"{many(plan.steps, 'step')} ({per_epoch}), each of {many(algorithm.prompts_per_step, 'prompt')} x "
        f"{many(algorithm.samples_per_prompt, 'sample')} = {plan.samples_per_step} samples, "
        f"{many(plan.updates_per_step, 'optimizer step')}",
        f"rollout: KV cache of {in_bytes(cache * facts.kv_bytes_per_token)} for {cache} tokens, at most {budgets.max_seqs} samples at "
        f"once, {budgets.max_batched_tokens} tokens a pass; {cache_in_words(config)}; {graphs_in_words(config, facts)}",
        f"update: micro-batches of at most {micro(config.actor.micro_batch, budgets.token_budget)}; "
        f"passes without gradient {micro(config.actor.micro_batch, budgets.forward_token_budget)}",
        *layers,
    ]


def cache_in_words(config: Config) -> str:
    return "the update gets the cache's memory" if releases_memory(config) else "the cache stays during the update (rollout.release_memory)"


def graphs_in_words(config: Config, facts: Facts) -> str:
    if not uses_graphs(config, facts.device):
        return "no CUDA graphs: " + ("rollout.cuda_graphs is off" if config.rollout.cuda_graphs is False else "the run is on the CPU")
    if facts.not_captured:
        return f"no CUDA graphs: {facts.not_captured}"
    return f"CUDA graphs of {many(facts.graph_sizes, 'batch size')}, {in_bytes(facts.decode_bytes)} for decoding"


def micro(samples: int | None, tokens: int) -> str:
    return many(samples, "sample") if samples else f"{tokens} tokens"


def many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def in_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
