"""Conversions of verl's keys whose answer depends on other keys: batch sizes, memory, rewards, rollout correction, learning-rate warm-up.

Each takes an `Ask` and returns an `Outcome`, or returns such a function. The tables that use them are `verl` and `verl_sft`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from fulltilt.compat.outcome import Outcome
from fulltilt.compat.translate import (
    UNDECIDED,
    Ask,
    Conversion,
    WrongValue,
    a_number,
    pending,
    same_as,
    sets,
    to,
    truth,
    whole,
    written,
)
from fulltilt.presets import PRESETS, VERL_NAMES
from fulltilt.records import EngineName
from fulltilt.words import in_bytes, listed, many

ACTOR, ROLLOUT, REF, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref", "model"))
CRITIC, REWARD_MODEL = "critic", "reward_model"
KEEP_ALL = 10_000  # checkpoints: verl keeps all, unless a number is given

GPUS, NODES = "trainer.n_gpus_per_node", "trainer.nnodes"
STEPS, EPOCHS = "trainer.total_training_steps", "trainer.total_epochs"
FILTER = "algorithm.filter_groups.enable"
NULL = Outcome("means nothing", "null: nothing is set")


# ---- sizes -------------------------------------------------------------------------------------------------------------------------


def workers(ask: Ask) -> int:
    """Return the number of GPUs of the whole run."""
    return max(1, whole(ask.read(GPUS) or 8) * whole(ask.read(NODES) or 1))


def megatron(ask: Ask) -> bool:
    return ask.read(f"{ACTOR}.strategy") == "megatron"


def dynamic_sampling(ask: Ask) -> bool:
    return truth(ask.read(FILTER) or False)


def prompts_of_round(ask: Ask) -> Outcome:
    if ask.value is not None and not dynamic_sampling(ask):
        told = f"without {FILTER} a step has data.train_batch_size prompts here; verl before 0.9 takes this number for a step then"
        return Outcome("means nothing", told)
    return to("algorithm.prompts_per_round")(ask)


def minibatches(ask: Ask) -> Outcome:
    """Convert the prompts of a mini-batch into a number of optimizer steps."""
    batch, mini = whole(ask.read("data.train_batch_size")), whole(ask.value)
    if mini < 1:
        raise WrongValue(f"{mini} prompts make no mini-batch")
    if mini > batch and ask.given:
        return Outcome(
            "refused", f"a mini-batch of {mini} prompts is more than a step has ({batch}); verl refuses it too. Use at most {batch}"
        )
    count = math.ceil(batch / min(mini, batch))
    uneven = f", as even as can be; in verl the last has {batch % mini}, or it refuses the sizes" if batch % min(mini, batch) else ""
    return sets({"algorithm.minibatches_per_step": count}, f"{batch} prompts / {mini} prompts = {many(count, 'mini-batch')}{uneven}")


def steps_of_run(ask: Ask) -> int | None:
    """Return the steps of the whole run, if they are given or can be counted."""
    if ask.read(STEPS) is not None:
        return whole(ask.read(STEPS))
    rows = ask.theirs.seen.rows(files(ask.read("data.train_files")))
    batch = whole((ask.read("data.gen_batch_size") if dynamic_sampling(ask) else None) or ask.read("data.train_batch_size"))
    return None if rows is None else rows // max(1, batch) * whole(ask.read(EPOCHS))


def files(value: Any) -> list[str]:
    return [str(each) for each in (value if isinstance(value, list) else [] if value is None else [value])]


def epochs(ask: Ask) -> Outcome:
    count = whole(ask.value)
    if ask.read(STEPS) is not None:
        return Outcome("means nothing", f"{STEPS}={written(ask.read(STEPS))} says how long the run is")
    if not dynamic_sampling(ask):
        return sets({"run.epochs": count})
    steps = steps_of_run(ask)
    batch = ask.read("data.gen_batch_size") or ask.read("data.train_batch_size")
    how = f"with dynamic sampling a run's length is counted in steps: rows // {batch} x {many(count, 'epoch')}"
    if not steps:
        return pending("run.steps", f"{how}, and the data is not here to count its rows. Add {STEPS}=N")
    return sets({"run.steps": steps}, f"{how} = {steps}")


def steps(ask: Ask) -> Outcome:
    if ask.value is None:
        return NULL
    return sets({"run.steps": whole(ask.value)}, f"verl stops earlier, if {EPOCHS} ends first")


def files_to(ours: str) -> Conversion:
    """Return a conversion of paths of data files: one, or a list."""

    def become(ask: Ask) -> Outcome:
        if ask.value is None:
            return NULL
        if any(path.startswith("hdfs://") for path in files(ask.value)):
            return Outcome("refused", "hdfs:// is not read here. Copy the files to this machine, and give their paths")
        found = files(ask.value)
        return sets({ours: found[0] if len(found) == 1 else found})

    return become


# ---- micro-batches -----------------------------------------------------------------------------------------------------------------


def is_dynamic(ask: Ask, key: str) -> bool:
    """Return whether micro-batches of a role are filled by tokens: by its own key, else the actor's, as in verl's defaults."""
    return truth(ask.read(key, f"{ACTOR}.use_dynamic_bsz") or False)


def sequence_sizes(role: str) -> tuple[str, ...]:
    """Return the keys of a role's size of sequence parallelism."""
    return tuple(f"{role}.{above}ulysses_sequence_parallel_size" for above in ("", "fsdp_config.", "model.fsdp_config.", "fsdp."))


def micro_batch(
    section: str, dynamic: str, *, over_all: bool = False, before: tuple[str, ...] = (), sizes: tuple[str, ...] = sequence_sizes(ACTOR)
) -> Conversion:
    """Return a conversion of samples per micro-batch. `over_all`: the number is for all GPUs together, of which those that share a sequence
    count once (`sizes`: the keys that say how many these are); `before`: keys that take precedence if they are given."""

    def become(ask: Ask) -> Outcome:
        if ask.value is None:
            return NULL
        count = whole(ask.value)
        if is_dynamic(ask, dynamic):
            return Outcome("means nothing", f"micro-batches are filled by tokens, for {dynamic} is on; verl does not read it then either")
        if count < 1:
            return Outcome("means nothing", f"{count} samples: left to auto")
        if first := next((key for key in before if ask.read(key) is not None), None):
            why = f"all passes of a role have {section}.micro_batch here, which is {first}={written(ask.read(first))}"
            return Outcome("means nothing", why)
        why, each = "", count
        if over_all:
            parallel = max(1, whole(ask.read(*sizes) or 1))
            ranks = max(1, workers(ask) // parallel)
            each = max(1, count // ranks)
            divided = f"{workers(ask)} GPUs" + (f" / {parallel} of a sequence" if parallel > 1 else "")
            least = ", and at least 1" if count < ranks else ""
            why = (
                f"counted over all GPUs, which verl deprecates: {count} / {divided} = {each} per GPU{least}. Write {ask.key}_per_gpu={each}"
            )
        return sets({f"{section}.dynamic_batch": False, f"{section}.micro_batch": each}, why)

    return become


def dynamic_batch(section: str, *micro: str) -> Conversion:
    """Return a conversion of the switch for micro-batches filled by tokens. If it is off without a number of samples, it is ignored: verl
    asks for that number."""

    def become(ask: Ask) -> Outcome:
        if ask.value is None:
            return NULL
        if truth(ask.value):
            return sets({f"{section}.dynamic_batch": True})
        if not any(ask.read(key) for key in micro):
            return Outcome("means nothing", f"verl then needs {micro[0]}, which is not given; here micro-batches are filled by tokens")
        return sets({f"{section}.dynamic_batch": False})

    return become


def token_budget(ours: str, dynamic: str) -> Conversion:
    """Return a conversion of a cap on the tokens of a micro-batch."""

    def become(ask: Ask) -> Outcome:
        if ask.value is None:
            return NULL
        if not is_dynamic(ask, dynamic):
            return Outcome("means nothing", f"verl reads it only with {dynamic}=True, which is not given")
        return sets({ours: whole(ask.value)}, "a hard cap here; verl's micro-batches may exceed it, by a quarter and more")

    return become


# ---- memory ------------------------------------------------------------------------------------------------------------------------

BUILT: tuple[str, ...] = get_args(EngineName)
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "sglang_async": "SGLang", "trtllm": "TensorRT-LLM", "hf": "transformers", "tgi": "TGI"}

WEIGHTS = (
    "runs the trainer's own weights where rollout and training divide the model alike and parameters are not fully sharded, "
    "and else a copy that is brought up to date after each update"
)


def engine(ask: Ask) -> Outcome:
    if ask.value in (None, "???"):
        return NULL
    if ask.value not in ENGINES:
        return Outcome("refused", f"no engine of verl's is called {written(ask.value)}. Known are {', '.join(ENGINES)}")
    if ask.theirs.seen.keep_engine and ask.value in BUILT:
        return sets({"rollout.engine": ask.value}, "--keep-engine")
    if ask.theirs.seen.keep_engine:
        told = f"--keep-engine asks for {ENGINES[ask.value]}, which is not built in this version; built are {', '.join(BUILT)}"
        return Outcome("refused", f"{told}. Leave --keep-engine out, and the native engine takes its place")
    return sets({"rollout.engine": "native"}, f"the native engine takes {ENGINES[ask.value]}'s place: it {WEIGHTS}")


def kv_bytes(model: str, tensor_parallel: str, name: str) -> Conversion:
    """Return a conversion of an engine's share of a GPU's memory into bytes of KV cache."""

    def become(ask: Ask) -> Outcome:
        if ask.value is None:
            return NULL
        share = a_number(ask.value)
        if not 0 < share <= 1:
            return Outcome("refused", f"{share:g} is not a share of a GPU's memory. Use a number above 0, at most 1")
        if ask.read("trainer.device") == "cpu":
            return Outcome("means nothing", "there is no GPU")
        sglang = str(ask.read(name) or "").startswith("sglang")
        meant = f"{share:g} of a GPU's {'free' if sglang else 'total'} memory for weights and KV cache in {'SGLang' if sglang else 'vLLM'}"
        total, path = ask.theirs.seen.gpu_bytes, ask.read(model)
        weights = None if path is None else ask.theirs.seen.weights(str(path))
        if total is None or weights is None:
            unknown = "no GPU is seen here" if total is None else f"the sizes of {written(path)} are not known here"
            return sets({"rollout.kv_bytes": "auto"}, f"{meant}; {unknown}, so the KV cache is left to auto")
        parts = max(1, whole(ask.read(tensor_parallel) or 1))
        left = int(share * total - weights / parts)
        divided = in_bytes(weights) + (f" / {parts}" if parts > 1 else "")
        how = f"{meant}: {share:g} x {in_bytes(total)} - {divided} of weights = {in_bytes(max(0, left))}"
        if left <= 0:
            return Outcome("refused", f"{how}: nothing is left for the KV cache. Raise it, or leave it out", performance=True)
        return sets({"rollout.kv_bytes": left}, how)

    return become


def sharding(ask: Ask) -> Outcome:
    """Convert the strategy by which FSDP or Megatron shards states among GPUs."""
    if ask.value is None:
        return NULL
    names = {"fsdp": "full", "fsdp2": "full", "fsdp_turbo": "full", "veomni": "full", "torchtitan": "full", "automodel": "full"}
    if ask.value == "megatron":
        return sets({"train.shard": "optimizer"}, "as Megatron's distributed optimizer")
    if ask.value not in names:
        return Outcome("refused", f"verl has no strategy {written(ask.value)} that is built here. Use fsdp, fsdp2 or megatron")
    if workers(ask) == 1 and ask.has(GPUS):
        return Outcome("means nothing", "one GPU has nothing to share out")
    size = whole(ask.read(f"{ACTOR}.fsdp_config.fsdp_size") or -1)
    if 0 < size < workers(ask):
        return sets({"train.shard": "hybrid", "train.shard_size": size})
    return sets({"train.shard": "full"}, "parameters, gradients and optimizer are shared out, as by FSDP2")


def shard_size(ask: Ask) -> Outcome:
    if ask.value is None:
        return NULL
    size = whole(ask.value)
    if workers(ask) == 1 and ask.has(GPUS):
        return Outcome("means nothing", "one GPU has nothing to share out")
    if 0 < size < workers(ask):
        return sets({"train.shard": "hybrid", "train.shard_size": size})
    all_of_them = f"-1 is all {workers(ask)} GPUs" if size < 1 else f"{size} of {workers(ask)} GPUs are all"
    return sets({"train.shard": "full"}, all_of_them)


def checkpointing(ours: str) -> Conversion:
    """Return a conversion of gradient checkpointing into recompute."""

    def become(ask: Ask) -> Outcome:
        if ask.value is None:
            return NULL
        granularity = f"{ACTOR}.megatron.override_transformer_config.recompute_granularity"
        if megatron(ask) and ask.has(granularity):
            return Outcome("means nothing", f"with Megatron, verl reads {granularity} instead")
        return sets({ours: "full" if truth(ask.value) else "none"})

    return become


def fusion(key_above: str) -> Conversion:
    """Return a conversion of Megatron's fused kernels into one switch here, on if any of them is."""

    def become(ask: Ask) -> Outcome:
        if ask.value is None:
            return NULL
        others = [ask.read(f"{key_above}.{name}") for name in FUSIONS]
        on = any(truth(each) for each in others if each is not None)
        return sets({"train.fused_layers": on}, "one switch for all of Megatron's fusions, on if any of them is")

    return become


FUSIONS = (
    "apply_rope_fusion", "masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion", "bias_swiglu_fusion",
    "persist_layer_norm", "moe_permute_fusion", "memory_efficient_layer_norm", "fused_single_qkv_rope",
)  # fmt: skip


def one_size(ours: str | None, what: str, use: str) -> Conversion:
    """Return a conversion of a parallel size that is not built: only 1 is accepted."""

    def become(ask: Ask) -> Outcome:
        if ask.value is None:
            return NULL
        if whole(ask.value) == 1:
            return Outcome("means nothing", f"1: {what} is off, as here")
        return Outcome("refused", f"{what} is not built in this version. {use}", performance=True)

    return become


def host_optimizer(section: str, role: str) -> Conversion:
    """Return a conversion of Megatron's optimizer on the host, which its own keys control beside verl's."""
    above = f"{role}.optim.override_optimizer_config"

    def become(ask: Ask) -> Outcome:
        if ask.value is None:
            return NULL
        on, share = truth_or_false(ask.read(f"{above}.optimizer_cpu_offload")), ask.read(f"{above}.optimizer_offload_fraction")
        if not on:
            return Outcome("means nothing", "optimizer_cpu_offload is off: Megatron does not read the fraction either")
        if share is not None and a_number(share) == 0:
            return Outcome("means nothing", "a fraction of 0: nothing is on the host")
        part = f"; Megatron leaves {1 - a_number(share):g} of them on the GPU" if share is not None and a_number(share) < 1 else ""
        return sets({f"{section}.offload_optimizer": True}, f"master weights and moments on the host{part}")

    return become


def moved_optimizer(section: str, role: str) -> Conversion:
    """Return a conversion of verl's own switch: the optimizer leaves the GPU between updates."""
    host = host_optimizer(section, role)

    def become(ask: Ask) -> Outcome:
        if ask.value is None:
            return NULL
        asked = host(ask)
        if not truth(ask.value) and asked.sets:
            return Outcome("means nothing", "optimizer_cpu_offload is on: the optimizer is on the host in any case")
        return sets({f"{section}.offload_optimizer": truth(ask.value)})

    return become


SIZES = {"tensor_model_parallel_size": "tensor_parallel", "expert_model_parallel_size": "expert_parallel"}


def size_of_role(section: str, prefix: str, actor: str) -> Conversion:
    """Return a conversion of a role's size of tensor or expert parallelism. Left out it is the actor's, but 1 beside another size of the
    role's own."""

    def become(ask: Ask) -> Outcome:
        if ask.value is None:
            return NULL
        name = ask.key.removeprefix(f"{prefix}.")
        own = [each for each in SIZES if ask.read(f"{prefix}.{each}") is not None]
        if all(ask.read(f"{actor}.{each}") == ask.read(f"{prefix}.{each}") for each in own):
            return Outcome("means nothing", f"as {actor}.{name}: the role is divided as the actor is")
        return sets({f"{section}.{SIZES[name]}": ask.value})

    return become


def eager(ask: Ask) -> Outcome:
    if ask.value is None:
        return NULL
    if truth(ask.value):
        return sets({"rollout.cuda_graphs": False}, "the opposite sense")
    return sets({"rollout.cuda_graphs": "auto"}, "CUDA graphs wherever one can hold the model")


def chunked_entropy(ours: str, role: str) -> Conversion:
    """Return a conversion of verl's switch into a number of tokens."""
    sizes = [f"{above}.entropy_from_logits_chunk_size" for above in (f"{role}.fsdp_config", f"{role}.megatron", role)]

    def become(ask: Ask) -> Outcome:
        if ask.value is None or not truth(ask.value):
            return Outcome("means nothing", "off: a fixed memory limit decides how many tokens are computed at a time")
        tokens = whole(ask.read(*sizes) or 2048)
        return sets({ours: tokens}, f"verl's switch as its number of tokens, {tokens}; verl ignores it where samples are padded")

    return become


# ---- the algorithm -----------------------------------------------------------------------------------------------------------------

LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
BOTH = ("gspo", "cispo")  # losses that are algorithms here, with GRPO's advantage
LOSSES = ("gpg", "clip_cov", "kl_cov", "geo_mean", "sapo", "dppo_tv", "dppo_kl", *BOTH)
PER_SAMPLE = ("gspo", "sapo", "geo_mean")  # verl aggregates these in one way, whatever its settings
MEAN_OF_MEANS = "seq-mean-token-mean"
ADVANTAGES = ("grpo_passk", "opo", "gpg", "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline")


def estimator(ask: Ask) -> Outcome:
    name, loss = str(ask.value), ask.read(LOSS_MODE)
    ours = VERL_NAMES.get(name, name)
    if ours == "grpo" and loss in BOTH:
        return sets({"algorithm.name": str(loss)})
    if ours in PRESETS and ours != "sft":
        return sets({"algorithm.name": ours})
    if name in ADVANTAGES:
        return sets({"algorithm.name": "grpo", "algorithm.advantage": name.removeprefix("tir_")})
    return Outcome(
        "refused",
        f"verl's estimator {written(ask.value)} is not built. Known are {', '.join([*VERL_NAMES, 'grpo', 'rloo', 'remax', *ADVANTAGES])}",
    )


def samples(ask: Ask) -> Outcome:
    """Convert the samples of a prompt. One is verl's default, but a group of one has no baseline."""
    name = str(ask.read("algorithm.adv_estimator"))
    if ask.value is not None and whole(ask.value) == 1 and PRESETS.get(VERL_NAMES.get(name, name), PRESETS["grpo"]).smallest_group > 1:
        told = f"a group of one has no baseline: with {name} verl then takes the reward itself as the advantage, and here it would be 0"
        return Outcome("refused", f"{told}. Use at least 2 samples per prompt")
    return to("algorithm.samples_per_prompt")(ask)


def loss_mode(ask: Ask) -> Outcome:
    if ask.value in (None, "vanilla"):
        return Outcome("means nothing", "PPO's clipped surrogate, as here")
    mode = mode_of_loss(ask)
    if mode not in LOSSES:
        return Outcome("refused", f"verl's loss {written(ask.value)} is not built. Known are vanilla, {', '.join(LOSSES)}")
    named = mode in BOTH and ask.read("algorithm.adv_estimator") in ("grpo", "grpo_vectorized")
    values = {"algorithm.name" if named else "algorithm.loss": mode}
    if mode in PER_SAMPLE:
        return sets({**values, "algorithm.aggregation": MEAN_OF_MEANS}, "the aggregation that verl always has for it")
    return sets(values)


def mode_of_loss(ask: Ask) -> str:
    return str(ask.read(LOSS_MODE) or "vanilla").replace("-", "_")


def aggregation(values: Mapping[Any, str] | None = None) -> Conversion:
    """Return a conversion of the aggregation of tokens' losses, if verl reads it."""
    usual = to("algorithm.aggregation", values=values)

    def become(ask: Ask) -> Outcome:
        if (mode := mode_of_loss(ask)) in PER_SAMPLE:
            told = f"verl does not read it for this loss: {mode} always has {MEAN_OF_MEANS}; here KL and entropy terms have it too"
            return Outcome("means nothing", told)
        return usual(ask)

    return become


def critic_aggregation(ask: Ask) -> Outcome:
    usual = same_as(f"{ACTOR}.loss_agg_mode", what="actor and critic have the same aggregation")
    if (mode := mode_of_loss(ask)) not in PER_SAMPLE:
        return usual(ask)
    if ask.value in (None, MEAN_OF_MEANS) or ask.read("algorithm.adv_estimator") != "gae":
        return Outcome("means nothing", f"actor and critic have the same aggregation, {MEAN_OF_MEANS} with the loss {mode}")
    return Outcome("refused", f"actor and critic have the same aggregation, which is {MEAN_OF_MEANS} with the loss {mode}. Use that")


def loss_setting(ours: str, *modes: str) -> Conversion:
    """Return a conversion of a number that only some losses read."""

    def become(ask: Ask) -> Outcome:
        mode = mode_of_loss(ask)
        if mode not in modes:
            return Outcome("means nothing", f"only the loss {' or '.join(modes)} reads it, and {LOSS_MODE} is {mode}")
        return sets({ours: a_number(ask.value)})

    return become


def clip_ratio(ask: Ask) -> Outcome:
    """Convert verl's `clip_ratio`, which its own defaults for the two sides always override."""
    sides = {"algorithm.clip_low": f"{ACTOR}.clip_ratio_low", "algorithm.clip_high": f"{ACTOR}.clip_ratio_high"}
    left = {ours: a_number(ask.value) for ours, key in sides.items() if not ask.has(key)}
    if not left:
        return Outcome("means nothing", "clip_ratio_low and clip_ratio_high are given")
    why = "verl ignores clip_ratio: it reads clip_ratio_low and clip_ratio_high, which are 0.2 unless given. Here it sets both sides"
    return sets(left, f"{why}; to train as verl did, remove it")


KL_NAMES: Mapping[str, str] = {
    f"{theirs}{mark}": f"{ours}{mark if ours != 'k2' else ''}"
    for theirs, ours in {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}.items()
    for mark in ("", "+")
} | {"abs": "abs"}


def kl_name(ours: str) -> Conversion:
    def become(ask: Ask) -> Outcome:
        if ask.value not in KL_NAMES:
            return Outcome("refused", f"verl's KL {written(ask.value)} has no equivalent here. Use kl, mse, low_var_kl or abs")
        name = KL_NAMES[ask.value]
        return sets({ours: name.rstrip("+") if "reward" in ours else name})

    return become


def kl_loss(ask: Ask) -> Outcome:
    on = truth(ask.value)
    return sets(
        {"algorithm.kl_coef": a_number(ask.read(f"{ACTOR}.kl_loss_coef")) if on else 0.0}, "its weight is kl_loss_coef" if on else ""
    )


def kl_loss_coef(ask: Ask) -> Outcome:
    if not truth(ask.read(f"{ACTOR}.use_kl_loss")):
        return Outcome("means nothing", "use_kl_loss is False: verl does not read it either")
    return sets({"algorithm.kl_coef": a_number(ask.value)})


def reward_kl(ask: Ask) -> Outcome:
    on = truth(ask.value)
    if not on:
        return sets({"algorithm.reward_kl_coef": 0.0})
    adaptive = ask.read("algorithm.kl_ctrl.type") == "adaptive"
    values: dict[str, Any] = {"algorithm.reward_kl_coef": a_number(ask.read("algorithm.kl_ctrl.kl_coef"))}
    if adaptive:
        values |= {"algorithm.reward_kl_target": a_number(ask.read("algorithm.kl_ctrl.target_kl"))}
        values |= {"algorithm.reward_kl_horizon": whole(ask.read("algorithm.kl_ctrl.horizon"))}
    return sets(values, "its weight is algorithm.kl_ctrl.kl_coef")


def reward_kl_part(ours: str, *, adaptive: bool = False) -> Conversion:
    """Return a conversion of a number of the KL in the reward, if there is one."""

    def become(ask: Ask) -> Outcome:
        if not truth(ask.read("algorithm.use_kl_in_reward")):
            return Outcome("means nothing", "use_kl_in_reward is False: verl does not read it either")
        if adaptive and ask.read("algorithm.kl_ctrl.type") != "adaptive":
            return Outcome("means nothing", "algorithm.kl_ctrl.type is fixed: verl does not read it either")
        return sets({ours: whole(ask.value) if ours.endswith("horizon") else a_number(ask.value)})

    return become


CORRECTION = "algorithm.rollout_correction"
LEVELS = {"token": "token", "sequence": "sequence"}
REJECTIONS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
WITHOUT = "verl drops surplus groups of dynamic sampling; here the next step trains on them, with an importance weight of at most 2"


def bypassed(ask: Ask) -> bool:
    return truth_or_false(ask.read(f"{CORRECTION}.bypass_mode", f"{CORRECTION}.bypass_old_logprob_for_rollout"))


def importance(ask: Ask) -> Outcome:
    """Convert truncated importance sampling between trainer and engine."""
    level = ask.read(f"{CORRECTION}.rollout_is")
    if bypassed(ask):
        told = "under bypass there is no importance weight: the ratio of the loss is the correction, and its clip the bound"
        return Outcome("means nothing", told)
    older = ask.read(f"{ACTOR}.tis_imp_ratio_cap")
    if level is None and older is not None and a_number(older) > 0:
        return sets({"algorithm.importance_cap": a_number(older)})
    if level is None:
        return sets({"algorithm.importance_cap": 2.0}, WITHOUT) if dynamic_sampling(ask) else sets({"algorithm.importance_cap": 0.0})
    if level not in LEVELS:
        raise WrongValue(f"{written(level)} is not a level of importance sampling. Use token or sequence")
    normal = "-normalized" if truth_or_false(ask.read(f"{CORRECTION}.rollout_is_batch_normalize")) else ""
    values: dict[str, Any] = {"algorithm.importance_cap": bounds(ask.read(f"{CORRECTION}.rollout_is_threshold"))}
    if level + normal != "token":
        values["algorithm.importance_level"] = level + normal
    return sets(values)


def importance_part(ask: Ask) -> Outcome:
    """Convert a setting of importance sampling, if that is on."""
    rejects = ask.read(f"{CORRECTION}.rollout_rs") is not None and ask.read(f"{CORRECTION}.rollout_rs_threshold") is None
    weighs = ask.read(f"{CORRECTION}.rollout_is") is not None
    if ask.key.endswith("threshold") and rejects and (bypassed(ask) or not weighs):
        return rejection(ask)
    if not weighs and not bypassed(ask):
        return Outcome("means nothing", f"{CORRECTION}.rollout_is is null: verl does not read it either")
    return importance(ask)


def truth_or_false(value: Any) -> bool:
    return False if value is None else truth(value)


def bypass(ask: Ask) -> Outcome:
    if not truth_or_false(ask.value):
        return Outcome("means nothing", "off, as here")
    return sets({"algorithm.importance_level": "bypass"}, "the engine's log-probs take the place of the old ones")


def older_cap(ask: Ask) -> Outcome:
    """Convert `tis_imp_ratio_cap`, the name in verl 0.5."""
    if ask.value is None or a_number(ask.value) <= 0:
        return Outcome("means nothing", "off, as here")
    return importance(ask)


def importance_of_060(ask: Ask) -> Outcome:
    """Convert verl 0.6.0's keys of importance sampling, which later versions moved and renamed."""
    above = "algorithm.rollout_is"
    top, level = ask.read(f"{above}_threshold"), ask.read(f"{above}_level") or "token"
    if not truth_or_false(ask.read(above)) or top is None:
        return Outcome("means nothing", f"{above} or its threshold is not set: verl 0.6.0 then gives no weights")
    if ask.key.endswith("veto_threshold") and ask.value is not None:
        return Outcome("refused", "no sample is left out for one token. Use null, or algorithm.rollout_correction.rollout_rs=seq_max_k2")
    if level not in LEVELS:
        return Outcome("refused", f"weights of the level {written(level)} are not built. Use token or sequence")
    lower = ask.read(f"{above}_threshold_lower")
    masks = ask.read(f"{above}_mode") == "mask"
    cap = [1 / a_number(top) if lower is None else a_number(lower), a_number(top)] if masks else a_number(top)
    told = "verl 0.6.0" + ("" if ask.has(f"{above}_veto_threshold") else "; it also leaves out samples with a token's ratio below 1e-4")
    return sets({"algorithm.importance_cap": cap, **({"algorithm.importance_level": level} if level != "token" else {})}, told)


def bounds(value: Any) -> Any:
    """Return one bound, or two: 0.5_2.0 (which Hydra reads as a number with an underscore)."""
    if isinstance(value, str) and "_" in value:
        return [a_number(each) for each in value.split("_")]
    return a_number(value)


def rejection(ask: Ask) -> Outcome:
    """Convert the rejection of tokens or samples where trainer and engine differ."""
    modes, limits = ask.read(f"{CORRECTION}.rollout_rs"), ask.read(f"{CORRECTION}.rollout_rs_threshold")
    if modes is None:
        return Outcome("means nothing", f"{CORRECTION}.rollout_rs is null: nothing is rejected, as here")
    names = [REJECTIONS.get(each.strip(), each.strip()) for each in str(modes).split(",")]
    limits = ask.read(f"{CORRECTION}.rollout_is_threshold") if limits is None else limits
    lower = ask.read(f"{CORRECTION}.rollout_rs_threshold_lower")
    found = [bounds(each.strip()) for each in limits.split(",")] if isinstance(limits, str) else [a_number(limits)]
    found = [[a_number(lower), each] if lower is not None and not isinstance(each, list) else each for each in found]
    values = {
        "algorithm.rejection": names[0] if len(names) == 1 else names,
        "algorithm.rejection_bounds": found[0] if len(found) == 1 else found,
    }
    return sets(values)


# ---- rewards -----------------------------------------------------------------------------------------------------------------------

CUSTOM = ("custom_reward_function", "reward.custom_reward_function")
MANAGERS = ("reward_model.reward_manager", "reward.reward_manager.name", "reward_manager.name", "reward_model.reward_manager.name")
OVERLONG = (
    "reward_model.reward_kwargs.overlong_buffer_cfg", "reward.reward_kwargs.overlong_buffer_cfg", "reward_model.overlong_buffer",
    "custom_reward_function.overlong_buffer", "custom_reward_function.reward_kwargs.overlong_buffer_cfg",
)  # fmt: skip
ENABLED = ("reward_model.enable", "reward.reward_model.enable")

# verl's choice of a reward by a row's data_source, if the user gives no function.
SOURCES: Mapping[str, str] = {
    "openai/gsm8k": "gsm8k",
    **dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), "math"),
    **dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning", "aime"), "dapo"),
    **{f"numina_{each}": "math" for each in ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")},
}


def by_model(ask: Ask) -> bool:
    return truth_or_false(ask.read(*ENABLED))


def reward_function(ask: Ask) -> Outcome:
    """Convert the user's own function, or verl's rules by a row's data source."""
    path = ask.read(*(f"{key}.path" for key in CUSTOM))
    if by_model(ask):
        return Outcome("means nothing", "the reward model is on, and verl's reward managers then take its score alone")
    if path is not None:
        name = ask.read(*(f"{key}.name" for key in CUSTOM)) or "compute_score"
        return sets({"reward.function": f"{path}:{name}"})
    data = [*files(ask.read("data.train_files")), *files(ask.read("data.val_files"))]
    sources = ask.theirs.seen.sources(data)
    if sources is None:
        told = (
            "it depends on the data, which is not here: verl chooses the reward by a row's data_source, and reward.sources has every rule "
        )
        told += f"that is built. Name the reward of other sources: --set reward.function=gsm8k, or {CUSTOM[0]}.path=FILE.py"
        return sets({"reward.function": UNDECIDED, "reward.sources": dict(SOURCES)}, told)
    rules = {source: "dapo" if source.startswith("aime") else SOURCES.get(source) for source in sources}
    if missing := [source for source, rule in rules.items() if rule is None]:
        told = f"no rule is built for the data source {listed(missing, 3)}. Give a function: {CUSTOM[0]}.path=FILE.py"
        return Outcome("refused", told)
    if not rules:
        return Outcome("refused", f"rows have no data_source to choose a rule by. Give a function: {CUSTOM[0]}.path=FILE.py")
    (_, first), *others = rules.items()
    differing = {source: rule for source, rule in others if rule != first}
    values: dict[str, Any] = {"reward.function": first, **({"reward.sources": differing} if differing else {})}
    return sets(values, f"by the data source: {', '.join(f'{source} = {rule}' for source, rule in rules.items())}")


def reward_name(ask: Ask) -> Outcome:
    if ask.read(*(f"{key}.path" for key in CUSTOM)) is None:
        return Outcome("means nothing", "no path of a reward function is given")
    return reward_function(ask)


def reward_model_on(ask: Ask) -> Outcome:
    if not truth_or_false(ask.value):
        return Outcome("means nothing", "no reward model")
    return sets({"reward.function": "reward_model"}, "its score alone is the reward, as verl's reward managers have it")


def manager(ask: Ask) -> Outcome:
    told = {
        "naive": "calls the function once for each sample, as here",
        "dapo": "as naive; its overlong penalty is algorithm.overlong_buffer",
        "batch": "here a batch function, with plural parameters, is called once for each group",
        "prime": "here functions always run in processes of their own, with a deadline (reward.timeout_s)",
        "gdpo": "as naive; the parts that the function returns are those of algorithm.gdpo_reward_keys",
        "limited": "reward.workers is the number of calls at a time",
    }
    if ask.value is None or ask.value in told:
        return Outcome("means nothing", told.get(ask.value, "null: nothing is set"))
    return Outcome(
        "refused", f"the reward manager {written(ask.value)} is not built. Known are {', '.join(told)}; or give a reward function"
    )


def overlong(part: str) -> Conversion:
    """Return a conversion of DAPO's penalty for long responses."""

    def read(ask: Ask, name: str) -> Any:
        return ask.read(*(f"{key}.{name}" for key in OVERLONG))

    def become(ask: Ask) -> Outcome:
        if ask.value is None:
            return NULL
        if not truth_or_false(read(ask, "enable")):
            if part == "enable":
                return sets({"algorithm.overlong_buffer": 0})
            return Outcome("means nothing", "the overlong buffer is not enabled: verl does not read it either")
        if ask.read(*MANAGERS) != "dapo":
            return Outcome(
                "means nothing", f"only the reward manager dapo reads it, and {MANAGERS[0]} is {written(ask.read(*MANAGERS) or 'naive')}"
            )
        if part == "max_resp_len":
            longest = whole(ask.read("data.max_response_length"))
            if whole(ask.value) == longest:
                return Outcome("means nothing", "the buffer ends at rollout.max_new_tokens, which is this number")
            return Outcome("refused", f"the buffer ends at rollout.max_new_tokens here, which is {longest}. Give that number")
        values: dict[str, Any] = {"algorithm.overlong_buffer": whole(read(ask, "len") or 0)}
        if values["algorithm.overlong_buffer"] and read(ask, "penalty_factor") is not None:
            values["algorithm.overlong_penalty"] = a_number(read(ask, "penalty_factor"))
        return sets(values)

    return become


# ---- the optimizer -----------------------------------------------------------------------------------------------------------------


def updates_per_step(ask: Ask) -> int:
    batch, mini = whole(ask.read("data.train_batch_size")), whole(ask.read(f"{ACTOR}.ppo_mini_batch_size"))
    return math.ceil(batch / max(1, min(mini, batch))) * whole(ask.read(f"{ACTOR}.ppo_epochs"))


def warmup_steps(section: str) -> Conversion:
    """Return a conversion of warm-up steps: verl's scheduler moves once a step, ours with every update."""

    def become(ask: Ask) -> Outcome:
        if ask.value is None or whole(ask.value) <= 0:
            return Outcome("means nothing", "lr_warmup_steps_ratio counts instead, as in verl")
        each = updates_per_step(ask)
        count = whole(ask.value) * each
        return sets(
            {f"{section}.warmup_steps": count}, f"{many(whole(ask.value), 'step')} x {many(each, 'update')} = {count} optimizer steps"
        )

    return become


def warmup_ratio(above: str, section: str = "train", *, per_step: bool = True) -> Conversion:
    """Return a conversion of warm-up as a share of the run's steps."""

    def become(ask: Ask) -> Outcome:
        ratio = a_number(ask.value or 0)
        if ask.has(f"{above}.lr_warmup_steps") and whole(ask.read(f"{above}.lr_warmup_steps") or 0) > 0:
            return Outcome("means nothing", "lr_warmup_steps is given, and counts before it")
        if ratio == 0:
            return sets({f"{section}.warmup_steps": 0})
        total = steps_of_run(ask)
        if total is None:
            why = f"{ratio:g} of the run's steps, and the data is not here to count them. Add {STEPS}=N, or {above}.lr_warmup_steps=N"
            return pending(f"{section}.warmup_steps", why)
        each = updates_per_step(ask) if per_step else 1
        count = int(ratio * total) * each
        updates = f" x {many(each, 'update')}" if per_step else ""
        return sets({f"{section}.warmup_steps": count}, f"{ratio:g} x {many(total, 'step')}{updates} = {count} optimizer steps")

    return become


def schedule(section: str) -> Conversion:
    def become(ask: Ask) -> Outcome:
        if ask.value is None:
            return NULL
        if ask.value not in ("constant", "cosine", "linear"):
            return Outcome("refused", f"the schedule {written(ask.value)} is not built. Use constant, linear or cosine")
        return sets({f"{section}.schedule": ask.value})

    return become


def least_rate(role: str, section: str) -> Conversion:
    """Return a conversion of Megatron's smallest learning rate into a share of the largest."""

    def become(ask: Ask) -> Outcome:
        if ask.value is None:
            return NULL
        peak = a_number(ask.read(f"{role}.optim.lr" if role else "optim.lr"))
        return sets({f"{section}.min_lr_ratio": a_number(ask.value) / peak}, f"{a_number(ask.value):g} / {peak:g}")

    return become


def optimizer(ask: Ask) -> Outcome:
    if str(ask.value).lower() in ("adam", "adamw", "none"):
        return Outcome("means nothing", "AdamW, as here")
    return Outcome("refused", f"the optimizer {written(ask.value)} is not built. Use AdamW")


# ---- other -------------------------------------------------------------------------------------------------------------------------


LOGGERS = ("tensorboard", "wandb", "mlflow", "trackio")


def names_of(value: Any) -> list[str]:
    return [str(each) for each in (value if isinstance(value, list) else [value]) if each is not None]


def for_loggers(ours: str) -> Conversion:
    """Return a conversion of a name that loggers show, if there are any."""

    def become(ask: Ask) -> Outcome:
        if ask.value is None or not set(names_of(ask.read("trainer.logger"))) & set(LOGGERS):
            return Outcome("means nothing", "no logger of fulltilt's is asked for, which would show it; run.dir is the run's folder")
        return sets({ours: ask.value})

    return become


def named_folder(ours: str) -> Conversion:
    """Return a conversion of a name that loggers show, and that the run's folder has unless the folder is given."""
    shown = for_loggers(ours)

    def become(ask: Ask) -> Outcome:
        outcome = shown(ask)
        if ask.value is None or ask.read("trainer.default_local_dir") is not None:
            return outcome
        return sets({**folder(replace(ask, value=None)).sets, **outcome.sets}, "the folder that verl writes to")

    return become


def loggers(ask: Ask) -> Outcome:
    given = names_of(ask.value)
    known = [each for each in given if each in LOGGERS]
    others = [each for each in given if each not in (*known, "console")]
    told = "the console always shows every step" if "console" in given else ""
    if others:
        told = f"warning: there is no logger {' or '.join(others)} here; metrics.jsonl in the run's folder has every number"
    return sets({"log.to": known}, told) if known else Outcome("means nothing", told or "no logger")


def truncation(ask: Ask) -> Outcome:
    longer = "a prompt with more tokens than data.max_prompt_tokens is skipped here, and the run reports how many are"
    if ask.value in (None, "error"):
        return Outcome("means nothing", f"verl stops at such a prompt; {longer}")
    if ask.value in ("left", "right", "middle"):
        return Outcome("means nothing", f"verl cuts the prompt ({ask.value}); {longer}, for half a question has no right answer")
    return Outcome("refused", f"{written(ask.value)} is none of error, left, right and middle")


def resume(ask: Ask) -> Outcome:
    known = {"auto": "auto", "disable": "never"}
    if ask.value in known:
        return sets({"run.resume": known[ask.value]})
    return Outcome(
        "refused",
        "a run resumes from the newest checkpoint in run.dir, which must be one of fulltilt's. To start from the weights of one of verl's, "
        "give its Hugging Face export: actor_rollout_ref.model.path=.../global_step_N/actor/huggingface",
    )


def kept(ask: Ask) -> Outcome:
    count = 0 if ask.value is None else whole(ask.value)
    return sets({"run.keep": count}) if count > 0 else sets({"run.keep": KEEP_ALL}, "verl keeps all checkpoints")


def every(ours: str) -> Conversion:
    """Return a conversion of the steps between two events; -1 is never."""

    def become(ask: Ask) -> Outcome:
        if ask.value == "after_each_epoch":
            rows, batch = ask.theirs.seen.rows(files(ask.read("data.train_files"))), whole(ask.read("data.train_batch_size"))
            if rows is None or rows < batch:
                return pending(ours, f"rows / {batch} steps are an epoch, and the data is not here to count its rows. Add {ask.key}=N")
            return sets({ours: rows // batch}, f"{rows} rows // {batch} = {many(rows // batch, 'step')} of an epoch")
        return sets({ours: max(0, whole(ask.value or 0))}, "the last step is saved in any case" if "save" in ours else "")

    return become


def before_training(ask: Ask) -> Outcome:
    on = truth_or_false(ask.value)
    if on and ask.read("data.val_files") is None:
        return Outcome("means nothing", "there is no validation data: data.val_files is not given")
    return sets({"run.eval_before": on})


def validation_temperature(ask: Ask) -> Outcome:
    if ask.has(f"{ROLLOUT}.val_kwargs.do_sample") and not truth(ask.read(f"{ROLLOUT}.val_kwargs.do_sample")):
        return sets({"eval.temperature": 0.0}, "do_sample is False: validation is greedy")
    return sets({"eval.temperature": a_number(ask.value)})


def validation_sampling(ask: Ask) -> Outcome:
    if ask.value is None:
        return NULL
    if truth(ask.value):
        return sets({"eval.temperature": a_number(ask.read(f"{ROLLOUT}.val_kwargs.temperature"))}, "at val_kwargs.temperature")
    return sets({"eval.temperature": 0.0}, "greedy")


def sampling(ask: Ask) -> Outcome:
    if ask.value is None or truth(ask.value):
        return Outcome("means nothing", "training always samples")
    return Outcome("refused", "greedy samples of a prompt are all the same, and teach nothing. Remove it")


def nodes(ask: Ask) -> Outcome:
    count = whole(ask.value)
    if count == 1:
        return sets({"cluster.nodes": 1})
    return sets({"cluster.nodes": count, "cluster.address": "auto"}, "over the Ray cluster of this machine")


def device(ask: Ask) -> Outcome:
    if ask.value in ("cuda", "cpu"):
        return sets({"run.device": ask.value})
    return Outcome("refused", f"there is no device {written(ask.value)} here. Use cuda or cpu")


def long_enough(*names: str) -> Conversion:
    """Return a conversion of a limit of tokens: at least prompt and response together, or it would cut them."""

    def become(ask: Ask) -> Outcome:
        if ask.value is None:
            return NULL
        longest = sum(whole(ask.read(name)) for name in ("data.max_prompt_length", "data.max_response_length"))
        if whole(ask.value) >= longest:
            return Outcome("means nothing", f"prompt and response have at most {longest} tokens")
        return Outcome("refused", f"prompt and response may have {longest} tokens, and nothing is cut here. Lower data.max_response_length")

    return become


def multi_turn(ask: Ask) -> Outcome:
    enabled = truth_or_false(ask.read(f"{ROLLOUT}.multi_turn.enable"))
    asks_for_tools = ask.key.endswith(("_path", "tool_config_path")) and ask.value is not None
    if enabled or asks_for_tools:
        return Outcome("refused", "multi-turn rollouts and tools are not built in this version: a sample is one response to one prompt")
    return Outcome("means nothing", "multi-turn rollouts are off, as here")


def group_of(choices: Mapping[str, str]) -> Conversion:
    def become(ask: Ask) -> Outcome:
        if ask.value in choices:
            return Outcome("means nothing", choices[ask.value])
        return Outcome("refused", f"{written(ask.value)} is not known here. Use {' or '.join(choices)}")

    return become


def reward_workers(ask: Ask) -> Outcome:
    """Convert a pool of GPUs for the reward model alone."""
    if not truth_or_false(ask.read("reward_model.enable_resource_pool", "reward.reward_model.enable_resource_pool")):
        return Outcome("means nothing", "the reward model shares the GPUs of the others: enable_resource_pool is False")
    if not by_model(ask):
        return Outcome("means nothing", "no reward model is on that could have them")
    names = [f"{prefix}.{{}}" for prefix in ("reward_model", "reward.reward_model")]
    gpus, machines = (ask.read(*(name.format(each) for name in names)) for each in ("n_gpus_per_node", "nnodes"))
    count = whole(gpus or 0) * max(1, whole(machines or 1))
    told = "workers of the run that have only the reward model"
    theirs = "verl takes them beside the trainer's GPUs, and trainer.n_gpus_per_node counts both here"
    return sets({"cluster.roles": {"reward_model": count}}, f"{told}; {theirs}")


def template_argument(ask: Ask) -> Outcome:
    """Convert the arguments of the chat template, one key each."""
    prefix = ask.key.removesuffix(f".{ask.below}") if ask.below else ask.key
    below = {key.removeprefix(f"{prefix}."): value for key, value in ask.theirs.given.items() if key.startswith(f"{prefix}.")}
    if ask.below and ask.value is None:  # a run file has no null
        return NULL
    given = {key: value for key, value in below.items() if value is not None}
    return sets({"data.template_args": given}) if given else Outcome("means nothing", "no arguments")


def reward_argument(ask: Ask) -> Outcome:
    """Convert the arguments of the user's reward function, one key each."""
    if ask.read(*(f"{key}.path" for key in CUSTOM)) is None:
        return Outcome("refused", "there is no reward function of your own that could take it. Give custom_reward_function.path too")
    if ask.value is None:
        return Outcome("refused", "a run file has no null. Leave it out, and give the argument that default in your function")
    prefix = ask.key.removesuffix(f".{ask.below}")
    below = {key.removeprefix(f"{prefix}."): value for key, value in ask.theirs.given.items() if key.startswith(f"{prefix}.")}
    return sets({"reward.args": {key: value for key, value in below.items() if value is not None}})


TARGETS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"), "linear_proj": ("o_proj",), "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}  # fmt: skip


def targets(ask: Ask) -> Outcome:
    """Convert the layers with adapters; Megatron's names are those of joined layers."""
    if ask.value is None:
        return NULL
    if ask.value == "all-linear":
        return sets({"lora.targets": "all-linear"})
    given = ask.value if isinstance(ask.value, list) else [ask.value]
    found = [name for each in given for name in TARGETS.get(str(each), (str(each),))]
    return sets({"lora.targets": found}, "Megatron's layers by Hugging Face's names" if found != given else "")


def dropout(ask: Ask) -> Outcome:
    if ask.below.endswith(("dropout", "pdrop")) and a_number(ask.value) == 0:
        return Outcome("means nothing", "no dropout, as here")
    if ask.below in ("attn_implementation", "_attn_implementation", "moe_config.freeze_moe_router") and not isinstance(ask.value, bool):
        return Outcome("means nothing", "one attention function serves training and rollout here")
    if ask.below.endswith("max_position_embeddings"):
        return Outcome(
            "means nothing", "config.json says how many positions the model has, and the run checks that prompt and response fit"
        )
    if ask.value in (None, {}, False):
        return Outcome("means nothing", "nothing is overridden")
    return Outcome("refused", "the model's own config.json holds here. Change it there")


def all_prompts(ask: Ask) -> Outcome:
    if ask.value in (None, -1):
        return Outcome("means nothing", "all prompts, as here")
    return sets({"eval.max_prompts": whole(ask.value)}, "the first ones; verl draws them")


def optimizer_package(ask: Ask) -> Outcome:
    if ask.value in (None, "torch.optim"):
        return Outcome("means nothing", "AdamW with float32 moments and master weights, as here")
    return Outcome("refused", "only AdamW with float32 moments is built. Remove it")


def critic_adapters(ask: Ask) -> Outcome:
    rank, own = whole(ask.read(f"{MODEL}.lora_rank", f"{MODEL}.lora.rank") or 0), whole(ask.value or 0)
    if own == rank:
        return Outcome("means nothing", "as the actor's")
    if own == 0:
        return sets({"lora.critic": False})
    return Outcome("refused", f"actor and critic have adapters of one rank, and the actor's is {rank}. Give both the same")


def multi_token(ask: Ask) -> Outcome:
    above = ask.key.removesuffix(f".{ask.below}")
    on = any(truth_or_false(ask.read(f"{above}.{name}")) for name in ("enable", "enable_train", "enable_rollout"))
    if on:
        return Outcome("refused", "multi-token prediction is not built. Remove it")
    return Outcome("means nothing", "multi-token prediction is off, as here")


def critic_switch(ask: Ask) -> Outcome:
    has = ask.read("algorithm.adv_estimator") == "gae"
    if ask.value is None or truth(ask.value) == has:
        return Outcome("means nothing", "the algorithm decides whether there is a critic: with gae there is one")
    return Outcome("refused", "the algorithm decides whether there is a critic: with algorithm.adv_estimator=gae there is one")


def score_method(ask: Ask) -> Outcome:
    if ask.below == "method" and ask.value == "flexible":
        return sets({"reward.function": "gsm8k_flexible"})
    if ask.value in (None, {}, "strict"):
        return Outcome("means nothing", "as here")
    return Outcome("refused", "the rules take no further arguments. Give a function: custom_reward_function.path")


def folder(ask: Ask) -> Outcome:
    default = f"checkpoints/{ask.read('trainer.project_name')}/{ask.read('trainer.experiment_name')}"
    return sets({"run.dir": default if ask.value is None else str(ask.value)})


def processes(ask: Ask) -> Outcome:
    if ask.value in ("gpu", "auto"):
        return sets({"cluster.workers": "auto"})
    return sets({"cluster.workers": whole(ask.value)})


def of_engine(become: Conversion, other: str) -> Conversion:
    """Return a conversion of an adapter setting that FSDP reads under one key and Megatron under another."""

    def chosen(ask: Ask) -> Outcome:
        if ask.given and ask.has(other) and (".lora." in ask.key) != megatron(ask):
            return Outcome("means nothing", f"verl reads {other} instead with {'Megatron' if megatron(ask) else 'FSDP'}")
        return become(ask)

    return chosen


def lora_alpha(ask: Ask) -> Outcome:
    """Convert the alpha of LoRA. verl's default is 16 for FSDP and 32 for Megatron, whose keys are below `lora`."""
    if not ask.given and ask.has(f"{MODEL}.lora.rank"):
        return sets({"lora.alpha": 32.0})
    return sets({"lora.alpha": a_number(ask.value)})


def reward_parts(ask: Ask) -> Outcome:
    """Convert GDPO's parts of the reward, and their weights."""
    names, weights = ask.read("algorithm.gdpo_reward_keys"), ask.read("algorithm.gdpo_reward_weights")
    if ask.read("algorithm.adv_estimator") != "gdpo" or not names:
        return Outcome("means nothing", "only algorithm.adv_estimator=gdpo reads it, with gdpo_reward_keys")
    numbers = [a_number(each) for each in weights] if weights else [1.0] * len(names)
    if len(numbers) != len(names):
        raise WrongValue(f"{len(names)} parts and {len(numbers)} weights: give a weight for each")
    return sets({"algorithm.reward_parts": dict(zip(map(str, names), numbers, strict=True))})
