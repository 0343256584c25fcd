"""The plan: every derived number of a run, worked out before its first step and printed once, in words.

Enters: the configuration and a few facts about device, model and data. Leaves: a frozen `Plan`. Guaranteed: a number the user set is
taken as it is or refused with the reason; `auto` becomes a number here and nowhere else; the numbers that execution depends on
(`budgets`) go into every checkpoint, so that a resumed run computes in the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fulltilt.config import Config
from fulltilt.records import UserError

# What `auto` means until it is measured: generous on a GPU, where small passes waste the chip; small on a CPU, where they cost nothing.
TOKEN_BUDGET = {"cuda": 16384, "cpu": 8192}
ENLARGED = 4  # times a token budget, at most, that `auto` gives a small model
# Parameters times tokens below which the host probably takes longer to launch a micro-batch's kernels than the device to run them: an H200
# took 0.13 s for 16384 tokens of 135 million parameters, 10% of what it computes in that time (docs/bench/gsm8k_tuning.json).
BUSY = 1 << 43
BUDGET_SHARE = 0.5  # of what is left on the device, that an enlarged micro-batch may take
MOST_SEQS = {"cuda": 1024, "cpu": 256}
BATCHED_TOKENS = {"cuda": 16384, "cpu": 4096}
ONE_THREAD_PARAMETERS = 30_000_000  # a rule of thumb: below it one thread was faster where others ran beside it
KV_SHARE = {"cuda": 0.85, "cpu": 0.25}
KEPT_SHARE = {"cuda": 0.5, "cpu": 0.25}  # where the cache stays while the update runs beside it
RESERVE = 1 / 5  # of the device, that parameters, gradients and optimizer leave to activations and the KV cache, or go to the host
SLACK = 1 / 16  # of the device, for the driver, workspaces, captured graphs, inputs and pieces of memory that fit nothing
STREAMED = 3 * (256 << 20)  # bytes of an optimizer on the host that are on the device: the slots of memory/offload.py


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
    settings: tuple[str, ...] = ()  # how roles run where that is not the default, in words
    returning_bytes: int = 0  # what comes back to the device in phases other than the rollout, and is not counted as taken
    auto_budgets: Mapping[str, int] = field(default_factory=dict)  # tokens that `auto` gives micro-batches of roles, where not the least


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
class RoleSettings:
    """How one role runs, every `auto` and every key taken over from `[train]` resolved. What a key does not touch stays at its default."""

    packing: bool = True
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_layers: int | None = None  # None: all, each by itself
    recompute_method: Literal["block", "uniform"] = "block"
    offload_activations: bool = False
    offload_params: bool = False
    offload_optimizer: bool = False
    offload_grads: bool = False
    fused_head: bool = True
    entropy_chunk: int | None = None  # None: by memory
    entropy_recompute: bool = True
    head_recompute: bool = True


@dataclass(frozen=True)
class RoleFacts:
    """A role's model, as far as its memory goes."""

    parameter_bytes: int
    trained: int = 0  # numbers that learn; 0: the role does not
    itemsize: int = 2  # bytes of a number that computes; below 4, masters are kept beside it
    layers: int = 0
    width: int = 0  # of hidden states
    inner: int = 0  # of the gated product; of all experts that a token goes to
    heads_width: int = 0  # of queries, keys and values together
    fused: bool = False  # whether its layers run fused
    # Bytes of the vocabulary head's temporaries: of so many tokens, with these keys of the role, with or without the entropy's gradient.
    head: Callable[[int, Mapping[str, Any], bool], int] | None = None

    @property
    def gradient_bytes(self) -> int:
        return max(4, self.itemsize) * self.trained

    @property
    def optimizer_bytes(self) -> int:
        """Two moments, and masters where the parameters are not their own."""
        return (12 if self.itemsize < 4 else 2 * self.itemsize) * self.trained

    @property
    def whole(self) -> int:
        """Numbers that a layer of its own operations (fused ones in brackets) keeps of a token: 8 (5) of the width, 3 (2) of the heads' and
        4 (3) of the inner width: inputs and results of norms, of rotary embedding, attention and the gated product."""
        unfused = 0 if self.fused else 1
        return (5 + 3 * unfused) * self.width + (2 + unfused) * self.heads_width + (3 + unfused) * self.inner

    def kept_bytes(self, keys: Mapping[str, Any]) -> int:
        """About what a token of a micro-batch holds until its backward pass. Of a layer that is recomputed, results of products and
        attention are 2 of each width, and the input, which only the first of a unit keeps, is 1 of the width."""
        kind, layers, uniform = keys["recompute"], keys.get("recompute_layers"), keys.get("recompute_method") == "uniform"
        recomputed = 0 if kind == "none" else self.layers if uniform else layers or self.layers
        inputs = -(-recomputed // (layers or 1)) if uniform else recomputed
        of_recomputed = inputs * self.width if kind == "full" else recomputed * 2 * (self.width + self.heads_width + self.inner)
        return self.itemsize * (of_recomputed + (self.layers - recomputed) * self.whole)

    def working_bytes(self, keys: Mapping[str, Any]) -> int:
        """What it holds beside that when the backward pass begins: a layer's gradients, about as large as what the layer keeps, and all
        that is computed again of the last unit. After a last layer that kept everything, units need less than was given back."""
        layers = keys.get("recompute_layers") or 0
        last = min(max(1, layers), self.layers) if keys.get("recompute_method") == "uniform" else int(layers in (0, self.layers))
        return self.itemsize * self.whole * (1 + (0 if keys["recompute"] == "none" else last))

    def update_bytes(self, tokens: int, keys: Mapping[str, Any], *, entropy_gradient: bool = False) -> int:
        """About what a micro-batch of so many tokens takes at most. The head is done before the layers' backward pass begins."""
        of_head = self.head(tokens, keys, entropy_gradient) if self.head else 0
        return tokens * self.kept_bytes(keys) + max(of_head, tokens * self.working_bytes(keys))


@dataclass(frozen=True)
class Room:
    """Where the roles have to fit."""

    device: str  # "cuda" or "cpu"
    device_bytes: int  # all that it has
    host_bytes: int  # that can be had there
    longest: int  # tokens of the longest sample
    roles: Mapping[str, RoleFacts]  # those with a model of their own


@dataclass(frozen=True)
class Settled:
    """The settings of each role, and in words what `auto` has switched on and why."""

    roles: Mapping[str, RoleSettings]
    words: tuple[str, ...] = ()
    auto_budgets: Mapping[str, int] = field(default_factory=dict)  # as in `Facts`


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
    check_context(config, facts.longest, facts.context_limit, rollout=rollout)
    if rollout:
        check_graphs(config, facts)
    budgets = make_budgets(config, facts, samples if rollout else 0)
    changed: list[str] = []
    if kept:
        budgets, changed = keep_budgets(config, facts, budgets, kept, rollout=rollout)
    if rollout:
        check_room(config, facts, budgets.kv_blocks)
    plan = Plan(steps, samples, updates_per_step(config), budgets, ())
    return replace(plan, words=(*in_words(config, facts, plan, rollout=rollout), *changed))


def keep_budgets(config: Config, facts: Facts, planned: Budgets, kept: Mapping[str, Any], *, rollout: bool) -> tuple[Budgets, list[str]]:
    """Those of the checkpoint, and in words what cannot be kept: a cache that was sized by `auto` when more was free on the device, because
    it was another or more had been offloaded."""
    budgets = replace(planned, **kept)  # an older version's checkpoint may lack some
    if not rollout:
        return budgets, []
    # Validation may ask for longer responses than before.
    budgets = replace(budgets, kv_blocks=max(budgets.kv_blocks, blocks_per_sample(config, facts)))
    given = {config.rollout.kv_bytes, config.rollout.memory_fraction} - {"auto"}
    beside = facts.decode_bytes + (0 if releases_memory(config) else facts.returning_bytes)
    cache = cache_bytes(config, facts, budgets.kv_blocks)
    if given or facts.device != "cuda" or cache + beside <= facts.free_bytes:
        return budgets, []
    words = (
        f"the KV cache of {in_bytes(cache)} that the run began with does not fit into the {in_bytes(facts.free_bytes)} that are free now: "
        "a smaller one is taken, and samples may differ in their last bits from those of a run that was not interrupted"
    )
    return replace(budgets, kv_blocks=planned.kv_blocks), [words]


def count_steps(config: Config, steps_per_epoch: int) -> int:
    return config.run.steps or (config.run.epochs or 1) * steps_per_epoch


def updates_per_step(config: Config) -> int:
    """Optimizer steps made from one rollout."""
    return config.algorithm.minibatches_per_step * config.algorithm.epochs


def check_context(config: Config, longest_read: int, limit: int | None, *, rollout: bool, whose: str = "the model") -> None:
    """`longest_read`: tokens of the longest prompt, or of the longest row for SFT. `limit`: positions that the model, or another that reads
    whole samples, was made for."""
    longest = longest_read + (longest_response(config) if rollout else 0)
    if limit is None or longest <= limit:
        return
    made_for = f"{whose} was made for {limit} positions"
    if rollout:
        key = "rollout.max_new_tokens" if longest_response(config) == config.rollout.max_new_tokens else "eval.max_new_tokens"
        raise UserError(
            f"{key}: the longest prompt ({longest_read} tokens) with a response of {longest_response(config)} needs "
            f"{longest}, {made_for}. {shorter(config, key, longest_read, limit)}"
        )
    raise UserError(
        f"data.train: the longest row has {longest} tokens, {made_for}. Set data.max_tokens = {limit} to leave such rows "
        "out, or shorten them"
    )


def shorter(config: Config, key: str, longest_prompt: int, limit: int) -> str:
    """Which of prompt and response can give way, with the numbers."""
    response, prompt = limit - longest_prompt, limit - longest_response(config)
    ways = [
        *([f"lower {key} to at most {response}"] if response > 0 else []),
        *([f"set data.max_prompt_tokens = {prompt} to leave longer prompts out"] if prompt > 0 else []),
    ]
    text = ", or ".join(ways) or f"lower {key} below {limit} and leave long prompts out (data.max_prompt_tokens)"
    return text[0].upper() + text[1:]


def check_graphs(config: Config, facts: Facts) -> None:
    if config.rollout.cuda_graphs is True and facts.not_captured is not None:
        raise UserError(
            f"rollout.cuda_graphs: true, but no graph can hold the model: {facts.not_captured}. Remove the key: decoding then goes on "
            "without graphs"
        )


def check_room(config: Config, facts: Facts, blocks: int) -> None:
    """Of a KV cache whose size the user set. Not on a CPU: what is free there is a guess, and a block takes memory only once it is
    written."""
    rollout = config.rollout
    key = "rollout.kv_bytes" if rollout.kv_bytes != "auto" else "rollout.memory_fraction"
    given = rollout.kv_bytes if rollout.kv_bytes != "auto" else rollout.memory_fraction
    cache = cache_bytes(config, facts, blocks)
    if facts.device != "cuda" or given == "auto" or cache + facts.decode_bytes <= facts.free_bytes:
        return
    raise UserError(
        f"{key}: {given} makes a KV cache of {in_bytes(cache)}, and decoding needs {in_bytes(facts.decode_bytes)} beside it, but "
        f"{in_bytes(facts.free_bytes)} are free on this device. Lower it, or leave it out for auto"
    )


def cache_bytes(config: Config, facts: Facts, blocks: int) -> int:
    return blocks * config.rollout.block_tokens * facts.kv_bytes_per_token


def longest_response(config: Config) -> int:
    return max(config.rollout.max_new_tokens, config.eval.max_new_tokens or 0)


def graphs_without_device(config: Config, device: str) -> Iterator[str]:
    if config.rollout.cuda_graphs is True and device != "cuda":
        yield (
            "rollout.cuda_graphs: true, but this run is on the CPU, and only a CUDA device has graphs. Remove the key (auto is on where "
            "there is one), or set run.device = cuda"
        )


def uses_graphs(config: Config, device: str) -> bool:
    return device == "cuda" and config.rollout.cuda_graphs is not False and config.train.offload_params is not True


def releases_memory(config: Config) -> bool:
    return config.rollout.release_memory is not False


def most_seqs(config: Config, device: str, samples: int) -> int:
    """Samples decoded at once."""
    return max(1, min(MOST_SEQS[device], samples)) if config.rollout.max_seqs == "auto" else config.rollout.max_seqs


def make_budgets(config: Config, facts: Facts, samples: int) -> Budgets:
    rollout, actor = config.rollout, config.actor
    token_budget = update_budget(config, facts.device, "actor", facts.auto_budgets)
    forward = 2 * token_budget if actor.forward_token_budget == "auto" else actor.forward_token_budget
    # Of models that need not be as small as the actor.
    of_others = 2 * update_budget(config, facts.device, "actor", {}) if actor.forward_token_budget == "auto" else forward
    of_ref = of_others if config.ref.path else forward
    max_seqs = most_seqs(config, facts.device, samples)
    critic = update_budget(config, facts.device, "critic", facts.auto_budgets)
    of_reward_model = config.reward_model.forward_token_budget
    batched = max(BATCHED_TOKENS[facts.device], max_seqs) if rollout.max_batched_tokens == "auto" else rollout.max_batched_tokens
    return Budgets(
        threads=threads(config, facts),
        kv_blocks=kv_blocks(config, facts, max_seqs) if samples else 0,
        max_seqs=max_seqs,
        max_batched_tokens=batched,
        token_budget=token_budget,
        forward_token_budget=forward,
        ref_token_budget=of_ref if config.ref.forward_token_budget == "auto" else config.ref.forward_token_budget,
        critic_token_budget=critic,
        critic_forward_token_budget=2 * critic if config.critic.forward_token_budget == "auto" else config.critic.forward_token_budget,
        reward_model_token_budget=2 * of_others if of_reward_model == "auto" else of_reward_model,
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
        others = facts.decode_bytes + (0 if releases_memory(config) else facts.returning_bytes)
        room = int(share * max(0, facts.free_bytes - others))
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


# ---- how roles run ---------------------------------------------------------------------------------------------------------------------

OF_TRAIN = ("packing", "recompute", "offload_activations", "offload_params", "offload_optimizer")  # that the critic may have of its own
KEPT_AS = {"actor": "token_budget", "critic": "critic_token_budget"}  # of a role that learns, among the budgets of a checkpoint
OFFLOADS = ("offload_activations", "offload_params", "offload_optimizer", "offload_grads")


def settle(config: Config, room: Room, kept: Mapping[str, Any] | None = None) -> Settled:
    """The settings of every role. What `auto` becomes depends on all that the device has and not on what happens to be free there, so that
    a resumed run decides alike; `kept`: its budgets, for which the rest must be settled."""
    given = {role: given_settings(config, role) for role in room.roles}
    check_layers(room, given)
    if room.device != "cuda":  # there is no second memory, and time is shorter than memory
        return with_words(room, {role: resolved(keys) for role, keys in given.items()}, {})
    reasons: dict[tuple[str, str], str] = {}
    decide_states(given, room, reasons)
    decide_params(given, room, reasons)
    trained = [role for role, facts in room.roles.items() if facts.trained]
    of_kept = {role: kept[key] for role, key in KEPT_AS.items() if kept and key in kept}
    by_auto = config.actor.token_budget == "auto"
    auto_budgets = {role: of_kept.get(role) or decide_budget(config, given, room, role) for role in trained if by_auto}
    for role in trained:
        decide_activations(config, given, room, role, auto_budgets, reasons)
    check_host(config, room, given, auto_budgets)
    return replace(with_words(room, {role: resolved(keys) for role, keys in given.items()}, reasons), auto_budgets=auto_budgets)


def given_settings(config: Config, role: str) -> dict[str, Any]:
    """What the user said of a role, `auto` included; the critic and the reward model take from [train] what they have not of their own."""
    train = config.train
    if role == "reward_model":
        packing = train.packing if config.reward_model.packing is None else config.reward_model.packing
        return {"packing": packing, "offload_params": config.reward_model.offload_params}
    if role == "ref":
        head = {"fused_head": train.fused_head, "entropy_chunk": number(config.ref.entropy_chunk)}
        return {"packing": train.packing, "offload_params": config.ref.offload_params, **head}
    shared = {
        **{key: getattr(train, key) for key in (*OF_TRAIN, "offload_grads", "recompute_method")},
        "recompute_layers": number(train.recompute_layers),
    }
    if role == "critic":
        shared |= {key: own for key in OF_TRAIN if (own := getattr(config.critic, key)) is not None}
    if shared["recompute"] == "auto":  # which layers is said of a recompute that is named, be it another role's
        shared |= {"recompute_layers": None, "recompute_method": "block"}
    if role == "critic":
        return shared
    head = {"entropy_chunk": number(train.entropy_chunk)}
    return shared | head | {key: getattr(train, key) for key in ("fused_head", "entropy_recompute", "head_recompute")}


def number(given: int | str) -> int | None:
    return given if isinstance(given, int) else None


def resolved(keys: Mapping[str, Any]) -> RoleSettings:
    """Every `auto` that nothing has decided otherwise is off, but for what saves memory at the cost of time alone."""
    off: dict[str, Any] = {"recompute": "none", "head_recompute": True}
    return RoleSettings(**{key: off.get(key, False) if value == "auto" else value for key, value in keys.items()})


def resident(given: Mapping[str, Mapping[str, Any]], room: Room, working: str) -> int:
    """Bytes of parameters, gradients and optimizers on the device while a role is updated."""
    total = 0
    for role, facts in room.roles.items():
        away = {key: given[role].get(key) is True for key in OFFLOADS}
        total += facts.parameter_bytes if role == working or not away["offload_params"] else 0
        total += facts.gradient_bytes if role == working or not away["offload_grads"] else 0
        total += min(STREAMED, facts.optimizer_bytes) if away["offload_optimizer"] else facts.optimizer_bytes
    return total


def returning(room: Room, settings: Mapping[str, RoleSettings]) -> int:
    """The most that a role brings to the device when its phase comes: parameters that were away, gradients that were not there."""
    brought = (
        (facts.parameter_bytes if settings[role].offload_params and role != "actor" else 0)
        + (facts.gradient_bytes if settings[role].offload_grads else 0)
        for role, facts in room.roles.items()
    )
    return max(brought, default=0) if room.device == "cuda" else 0


def crowded(given: Mapping[str, Mapping[str, Any]], room: Room) -> str | None:
    """Why something has to leave the device, in words."""
    needed = max((resident(given, room, role) for role, facts in room.roles.items() if facts.trained), default=0)
    if needed <= (1 - RESERVE) * room.device_bytes:
        return None
    return f"parameters, gradients and optimizer would take {in_bytes(needed)} of the device's {in_bytes(room.device_bytes)}"


def switch_on(given: dict[str, dict[str, Any]], role: str, key: str, why: str, reasons: dict[tuple[str, str], str]) -> None:
    if given[role].get(key) == "auto":
        given[role][key] = True
        reasons[role, key] = why


def decide_states(given: dict[str, dict[str, Any]], room: Room, reasons: dict[tuple[str, str], str]) -> None:
    """Optimizer states first: they are needed for the shortest time, and are the most."""
    why = crowded(given, room)
    for role, facts in room.roles.items():
        if facts.trained and why:
            switch_on(given, role, "offload_optimizer", why, reasons)
        if given[role].get("offload_optimizer") is True:
            switch_on(given, role, "offload_grads", "with the optimizer", reasons)


def decide_params(given: dict[str, dict[str, Any]], room: Room, reasons: dict[tuple[str, str], str]) -> None:
    """Then the parameters of roles that wait. Never the actor's: CUDA graphs would have to go for it."""
    for role in ("reward_model", "ref", "critic"):
        if role in room.roles and room.roles[role].parameter_bytes and (why := crowded(given, room)):
            switch_on(given, role, "offload_params", why, reasons)
    if given.get("actor", {}).get("offload_params") == "auto":
        given["actor"]["offload_params"] = False


def left_for_update(config: Config, given: Mapping[str, Mapping[str, Any]], room: Room, role: str) -> int:
    """Bytes of the device beside what is resident in a role's update."""
    left = int((1 - SLACK) * room.device_bytes) - resident(given, room, role)
    return left if releases_memory(config) else int(left * (1 - KEPT_SHARE[room.device]))


def has_entropy_bonus(config: Config) -> bool:
    return (config.algorithm.entropy_coef or 0) > 0


def decide_budget(config: Config, given: Mapping[str, Mapping[str, Any]], room: Room, role: str) -> int:
    """Tokens of a role's micro-batch where the user gave no number: more for a small model, as long as they take a part only of what is
    left, with all that may be kept for the backward pass kept."""
    tokens, facts, keys = update_budget(config, room.device, role, {}), room.roles[role], dict(given[role])
    if keys["offload_activations"] is True:  # by hand: they have to fit the host
        return tokens
    all_kept = keys["recompute"] in ("auto", "none")
    keys |= {
        key: value
        for key, value in {"recompute": "none", "offload_activations": False, "head_recompute": not all_kept}.items()
        if keys.get(key) == "auto"
    }
    most, bonus = ENLARGED * tokens, has_entropy_bonus(config)
    room_for_it = BUDGET_SHARE * left_for_update(config, given, room, role)
    while (
        tokens < most
        and tokens * facts.parameter_bytes // facts.itemsize < BUSY
        and facts.update_bytes(2 * tokens, keys, entropy_gradient=bonus) <= room_for_it
    ):
        tokens *= 2
    return tokens


def decide_activations(
    config: Config, given: dict[str, dict[str, Any]], room: Room, role: str, auto_budgets: Mapping[str, int],
    reasons: dict[tuple[str, str], str],
) -> None:  # fmt: skip
    """Recompute by the least that fits, and what does not fit even so goes to the host. What the user sends there must fit the host."""
    keys, facts, tokens = given[role], room.roles[role], micro_batch_tokens(config, room, role, auto_budgets)
    left = left_for_update(config, given, room, role)
    of_host = room.host_bytes - sum(on_host(config, room, given, auto_budgets).values())
    bonus = has_entropy_bonus(config)

    def shortage(level: str, **other: Any) -> str | None:
        at = {**keys, "recompute": level, **other}
        if keys["offload_activations"] is True:
            found, where, there = tokens * facts.kept_bytes(at), "hold", of_host
        else:
            found, where, there = facts.update_bytes(tokens, at, entropy_gradient=bonus), "take", left
        words = f"{many(tokens, 'token')} would {where} about {in_bytes(found)} in an update, and {in_bytes(max(0, there))} are left"
        return words + (" on the host" if where == "hold" else "") if found > there else None

    if keys["recompute"] == "auto":
        levels = ("none", "full") if config.train.compile is True else ("none", "selective", "full")  # as knobs.TOGETHER has it
        keys["recompute"] = next((level for level in levels if not shortage(level)), "full")
        if keys["recompute"] != "none":
            reasons[role, "recompute"] = shortage("none") or ""
    if why := shortage(keys["recompute"]):
        switch_on(given, role, "offload_activations", why, reasons)
    # Last, with what is left: it saves less time for its bytes than all the others cost.
    all_kept = keys["recompute"] == "none" and keys["offload_activations"] is not True
    if facts.head and keys.get("head_recompute") == "auto" and keys["fused_head"] and all_kept:
        keys["head_recompute"] = shortage("none", head_recompute=False) is not None
        if not keys["head_recompute"]:
            reasons[role, "head_recompute"] = "they fit"


def micro_batch_tokens(config: Config, room: Room, role: str, auto_budgets: Mapping[str, int]) -> int:
    """Of the largest micro-batch of an update."""
    section = config.critic if role == "critic" else config.actor
    if not section.dynamic_batch and section.micro_batch:
        return section.micro_batch * room.longest
    return max(update_budget(config, room.device, role, auto_budgets), room.longest)


def update_budget(config: Config, device: str, role: str, auto_budgets: Mapping[str, int]) -> int:
    """Tokens of a role's micro-batch in an update. The critic has no vocabulary head: twice the actor's, where that is given."""
    of_actor, of_critic = config.actor.token_budget, config.critic.token_budget
    if role == "actor":
        return auto_budgets.get("actor", TOKEN_BUDGET[device]) if of_actor == "auto" else of_actor
    if of_critic != "auto":
        return of_critic
    return auto_budgets.get("critic", 2 * TOKEN_BUDGET[device]) if of_actor == "auto" else 2 * of_actor


def on_host(config: Config, room: Room, given: Mapping[str, Mapping[str, Any]], auto_budgets: Mapping[str, int]) -> dict[str, int]:
    """Bytes that are moved to the host, as far as that is decided, and with them those that a checkpoint passes through there."""
    kinds = {"optimizer": "offload_optimizer", "parameters": "offload_params", "activations": "offload_activations"}
    found: dict[str, int] = {}
    for role, keys in given.items():
        facts = room.roles[role]
        decided = facts.trained and keys["recompute"] != "auto"
        counts = {
            "optimizer": facts.optimizer_bytes,
            "parameters": facts.parameter_bytes,
            "activations": micro_batch_tokens(config, room, role, auto_budgets) * facts.kept_bytes(keys) if decided else 0,
        }
        found |= {f"the {role}'s {kind}": counts[kind] for kind, key in kinds.items() if keys.get(key) is True and counts[kind]}
    actor = room.roles.get("actor", RoleFacts(0))
    moves = any(keys.get(key) is True for keys in given.values() for key in kinds.values())
    return found | ({"weights on their way into a checkpoint": actor.parameter_bytes} if moves and actor.trained else {})


def check_host(config: Config, room: Room, given: Mapping[str, Mapping[str, Any]], auto_budgets: Mapping[str, int]) -> None:
    moved = on_host(config, room, given, auto_budgets)
    if sum(moved.values()) <= room.host_bytes:
        return
    what = " and ".join(f"{kind} ({in_bytes(count)})" for kind, count in moved.items())
    less = (
        'Lower actor.token_budget, recompute more (train.recompute = "full", of all layers) or leave offload_activations out, or use'
        if any(kind.endswith("activations") for kind in moved)
        else "Use"
    )
    raise UserError(
        f"offload: {what} do not fit into the host's memory, of which {in_bytes(room.host_bytes)} are free. {less} "
        "a smaller model or LoRA (lora.rank), or a computer with more memory"
    )


def check_layers(room: Room, given: Mapping[str, Mapping[str, Any]]) -> None:
    for role, facts in room.roles.items():
        keys = given[role]
        if facts.trained and keys["recompute"] in ("selective", "full") and (keys["recompute_layers"] or 0) > facts.layers:
            raise UserError(
                f"train.recompute_layers is {keys['recompute_layers']}, and the model has {facts.layers} layers ({role}). Give at most "
                f"{facts.layers}"
            )


def with_words(room: Room, settings: Mapping[str, RoleSettings], reasons: Mapping[tuple[str, str], str]) -> Settled:
    words = []
    for role, own in settings.items():
        if not room.roles[role].parameter_bytes:  # it is the actor, or there is no such role
            continue
        parts = [text + (f" (auto: {reasons[role, key]})" if (role, key) in reasons else "") for key, text in not_default(role, own)]
        if parts:
            words.append(f"{role}: {'; '.join(parts)}")
    return Settled(dict(settings), tuple(words))


def not_default(role: str, own: RoleSettings) -> Iterator[tuple[str, str]]:
    """What differs from the defaults of a role: the key, and what it means in words."""
    of_layers = {"block": " of the first {}", "uniform": ", {} at a time"}[own.recompute_method]
    layers = of_layers.format(many(own.recompute_layers, "layer")) if own.recompute_layers else ""
    in_pieces = "log-probs" if role == "ref" else "log-probs and entropy" if own.fused_head else "entropy"
    texts = {
        "packing": "samples padded to the longest of their micro-batch",
        "recompute": f"{own.recompute} recompute{layers}",
        "offload_activations": "activations on the host until the backward pass",
        "offload_params": "parameters on the host while another role works",
        "offload_optimizer": "optimizer on the host",
        "offload_grads": "gradients only while an optimizer step is made",
        "fused_head": "whole logits",
        "entropy_chunk": f"{in_pieces} of at most {many(own.entropy_chunk or 0, 'token')} at a time",
        "entropy_recompute": f"{'logits of all tokens' if own.fused_head else 'softmax'} kept for the entropy's gradient",
        "head_recompute": "logits kept until the backward pass",
    }
    default = RoleSettings()
    yield from ((key, text) for key, text in texts.items() if getattr(own, key) != getattr(default, key))


# ---- words -----------------------------------------------------------------------------------------------------------------------------


def in_words(config: Config, facts: Facts, plan: Plan, *, rollout: bool) -> list[str]:
    algorithm, budgets = config.algorithm, plan.budgets
    layers = [*facts.settings, *([f"layers: {facts.layers}"] if facts.layers else [])]
    per_epoch = f"{many(facts.steps_per_epoch, 'round' if algorithm.prompts_per_round else 'step')} an epoch"
    if not rollout:
        return [
            f"{many(plan.steps, 'step')} ({per_epoch}), each of {algorithm.prompts_per_step} rows, "
            f"{many(plan.updates_per_step, 'optimizer step')}; micro-batches of at most {budgets.token_budget} tokens"
            + why_larger(config, facts, budgets),
            *layers,
        ]
    cache = budgets.kv_blocks * config.rollout.block_tokens
    longest = facts.longest + config.rollout.max_new_tokens
    alone = (
        f"; a longer sample (up to {longest} tokens) runs alone" if config.actor.dynamic_batch and budgets.token_budget < longest else ""
    )
    return [
        f"{many(plan.steps, 'step')} ({per_epoch}), each of {many(algorithm.prompts_per_step, 'prompt')} x "
        f"{many(algorithm.samples_per_prompt, 'sample')} = {plan.samples_per_step} samples, "
        f"{many(plan.updates_per_step, 'optimizer step')}",
        f"rollout: KV cache of {in_bytes(cache * facts.kv_bytes_per_token)} for {cache} tokens, at most "
        f"{many(budgets.max_seqs, 'sample')} at once, {budgets.max_batched_tokens} tokens a pass; "
        f"{cache_in_words(config)}; {graphs_in_words(config, facts)}",
        f"update: micro-batches of at most {micro(config.actor.micro_batch, budgets.token_budget)}{why_larger(config, facts, budgets)}; "
        f"passes without gradient {micro(config.actor.micro_batch, budgets.forward_token_budget)}{alone}",
        *layers,
    ]


def why_larger(config: Config, facts: Facts, budgets: Budgets) -> str:
    enlarged = config.actor.token_budget == "auto" and budgets.token_budget > TOKEN_BUDGET[facts.device]
    return " (auto: with fewer tokens of so small a model the device would wait)" if enlarged and config.actor.dynamic_batch else ""


def cache_in_words(config: Config) -> str:
    return "the update gets the cache's memory" if releases_memory(config) else "the cache stays during the update (rollout.release_memory)"


def graphs_in_words(config: Config, facts: Facts) -> str:
    if not uses_graphs(config, facts.device):
        away = "train.offload_params moves the weights that they would read" if config.train.offload_params is True else ""
        on_cpu = "the run is on the CPU" if facts.device == "cpu" else away
        return "no CUDA graphs: " + ("rollout.cuda_graphs is off" if config.rollout.cuda_graphs is False else on_cpu)
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
