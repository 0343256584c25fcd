"""All parts of a run in this process, on one device.

Enters: a configuration, and the checkpoint to resume from if any. Leaves: `Parts`, loaded, verified and planned. Guaranteed: mistakes in
reward, data and model are found in that order (cheapest first) before anything is written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fulltilt.algo.base import Algorithm
from fulltilt.algo.presets import build
from fulltilt.batching.pack import MicroSizing
from fulltilt.config import ActorConfig, Config, CriticConfig, LoraConfig, RefConfig, RewardModelConfig, TrainConfig, uses_reward_model
from fulltilt.data.order import InEpochs
from fulltilt.data.prompts import PromptSet, load_prompts
from fulltilt.data.sft import RowSet, load_sft
from fulltilt.kernels import dispatch
from fulltilt.kernels.linear import LOW, trial_bytes
from fulltilt.kernels.paged_attention import workspace_numbers
from fulltilt.kernels.sampling import DecodeProgress as Progress
from fulltilt.kernels.sampling import Workspace
from fulltilt.memory.account import Account, gradients_of, weights_of
from fulltilt.memory.activations import ActivationOffload, offload_activations
from fulltilt.memory.host import free_host_bytes
from fulltilt.memory.offload import OffloadSetting, Residence, why_not, why_not_params
from fulltilt.memory.recompute import Recompute, apply_recompute
from fulltilt.model import load, lora
from fulltilt.model.attention import LayerShape
from fulltilt.model.compiled import WrongCompile, compile_and_compare
from fulltilt.model.experts import why_not_captured
from fulltilt.model.fuse import WrongFusion, check_fused, fuse_and_compare, is_fused, saved_tensors
from fulltilt.model.heads import Entropy, Head, HeadOptions, head_bytes
from fulltilt.model.scalar import ScalarModel, load_scalar
from fulltilt.model.verify import packed_logprobs, random_documents, verify, verify_body
from fulltilt.plan import (
    OFFLOADS,
    Budgets,
    Facts,
    Plan,
    RoleFacts,
    RoleSettings,
    Room,
    check_context,
    count_steps,
    given_settings,
    graphs_without_device,
    longest_response,
    make_plan,
    most_seqs,
    releases_memory,
    returning,
    settle,
    updates_per_step,
    uses_graphs,
)
from fulltilt.records import Prompt, Row, TokenTerms, UserError, ValueTerms
from fulltilt.reward.base import RewardPool
from fulltilt.reward.model import RewardEncoder
from fulltilt.rollout.decode import BURST, TABLE_STEP, sizes_up_to
from fulltilt.rollout.engine import Engine, EngineLimits, NativeEngine
from fulltilt.rollout.runner import bytes_per_token
from fulltilt.train.checkpoint import Checkpoint
from fulltilt.train.optim import Optimizer, restore_parameters
from fulltilt.train.roles import Annotator, Critic, Policy, Scorer
from fulltilt.train.trainer import Trainer

CRITIC_TENSORS, SURPLUS_TENSORS = "critic/", "surplus/"  # what the names of a checkpoint's tensors begin with; the actor's have no such
GRAPH_BYTES = 8 << 20  # that the driver keeps for a captured graph of a few hundred kernels, generously
THREADS = torch.get_num_threads()  # as torch chose them: an earlier run of this process may have changed the number since


@dataclass(frozen=True, eq=False)
class RewardModel:
    """A reward model and the way texts are written for it."""

    role: Scorer
    encoder: RewardEncoder


@dataclass(frozen=True, eq=False)
class Parts:
    algorithm: Algorithm
    plan: Plan
    tokenizer: PreTrainedTokenizerBase
    train_data: InEpochs[Prompt] | InEpochs[Row]
    val_data: PromptSet | RowSet | None
    actor: Policy
    ref: Policy | None
    critic: Critic | None
    reward_model: RewardModel | None
    trainer: Trainer[TokenTerms] | None  # None: only evaluation
    critic_trainer: Trainer[ValueTerms] | None
    engine: Engine | None  # None: nothing is sampled (SFT)
    residents: Residents
    account: Account
    release_memory: bool  # whether the engine gives the KV cache's memory back after sampling
    reward: RewardPool | None
    update_sizes: Mapping[str, MicroSizing]  # of each role's micro-batches
    forward_sizes: Mapping[str, MicroSizing]  # the same without gradients
    data_digest: str  # of the training data's tokens
    export: Callable[[Path], None]  # writes the actor for others to load
    export_bytes: int  # about
    notes: tuple[str, ...]  # what was read and found, for the console

    def role(self, name: str) -> Annotator:
        judge = self.reward_model.role if self.reward_model else None
        roles: dict[str, Annotator | None] = {"actor": self.actor, "ref": self.ref, "critic": self.critic, "reward_model": judge}
        role = roles[name]
        assert role is not None, f"the run has no {name}"
        return role

    def owner(self, name: str) -> str:
        """The role whose model a role runs: the reference may be the actor without its adapters."""
        return "actor" if name == "ref" and self.ref and self.ref.model is self.actor.model else name

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds of the roles that learn, beside the exported model."""
        assert self.trainer
        self.residents.need("actor", "critic")
        found = self.trainer.optimizer.tensors()
        if self.critic_trainer:
            found |= {f"{CRITIC_TENSORS}{name}": tensor for name, tensor in self.critic_trainer.optimizer.tensors().items()}
        return found

    def close(self) -> None:
        if self.reward:
            self.reward.close()
        if self.engine:
            self.engine.close()


class Residents:
    """Whose parameters are on the device, of the roles that may leave it: those that work."""

    def __init__(self) -> None:
        self._residences: dict[str, Residence] = {}
        self._changed: set[str] = set()

    def add(self, role: str, model: torch.nn.Module, *, learns: bool) -> None:
        self._residences[role] = Residence(model, role, learns=learns)

    def need(self, *roles: str, update: bool = False) -> None:
        """From here on these work, and no others. Who leaves does so first, to make room. `update`: their parameters change. A role
        without a residence is always there."""
        for role, residence in self._residences.items():
            if role not in roles:
                residence.to_host(unchanged=role not in self._changed)
                self._changed.discard(role)
        for role in roles:
            if role in self._residences:
                if role == "actor" and not self._residences[role].on_device:
                    # It stays through the rollout. In a piece of what the KV cache has lent, it would keep the cache from its memory.
                    torch.cuda.empty_cache()
                self._residences[role].to_device()
                self._changed |= {role} if update else set()

    def settle_down(self, models: Models, settings: Mapping[str, RoleSettings]) -> None:
        """Once the roles that learn have their optimizers and what a checkpoint knows."""
        for role in ("critic", "actor"):
            if role in models.own() and settings[role].offload_params:
                self.add(role, models.own()[role], learns=True)
        self.need("actor")

    def memory(self) -> Iterator[torch.Tensor]:
        for residence in self._residences.values():
            yield from residence.memory()


def choose_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device = cuda: torch finds no CUDA device here. Use run.device = auto or cpu; `fulltilt doctor` says why")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def be_deterministic() -> None:
    """Only kernels whose result does not depend on timing. cuBLAS must be told through the environment, before its first use."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_host_bytes()


LESS_IN_UPDATES = {
    section: f'Lower {role}.token_budget (a longer sample runs alone), or set {section}.recompute = "full", '
    f"{section}.offload_activations = true or {section}.offload_optimizer = true"
    for section, role in (("train", "actor"), ("critic", "critic"))
}
LESS_IN_ROLLOUT = "Set a smaller rollout.kv_bytes or rollout.max_seqs"
LESS_MEMORY = {
    "update-actor": LESS_IN_UPDATES["train"],
    "update-critic": LESS_IN_UPDATES["critic"],
    "rollout": LESS_IN_ROLLOUT,
    "eval": f"{LESS_IN_ROLLOUT}, or a smaller actor.forward_token_budget",
    **{
        phase: f"Lower {role}.forward_token_budget (a longer sample runs alone)"
        for phase, role in (("old-logprob", "actor"), ("ref-logprob", "ref"), ("values", "critic"), ("reward", "reward_model"))
    },
}


@contextlib.contextmanager
def enough_memory(phase: str | None = None) -> Iterator[None]:
    """Around a phase of a run: that the device's memory does not suffice is told with the keys that help."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        remedy = LESS_MEMORY.get(phase or "", "Set train.offload_optimizer = true, use a smaller model, or LoRA (lora.rank)")
        what = str(error).splitlines()[0]
        # Without its traceback, which would hold all that filled the memory.
        raise UserError(f"out of memory{f' in {phase}' if phase else ''}: {what} {remedy}") from error.with_traceback(None)


def assemble(config: Config, resume: Checkpoint | None = None, *, training: bool = True, kept: dict[str, Any] | None = None) -> Parts:
    """`kept`: the budgets of an earlier plan, to compute in the same shapes and get the same bits; None: plan anew."""
    algorithm = build(config)
    device = choose_device(config.run.device)
    check_settings(config, algorithm, device.type, training=training)  # refused before anything loads
    if config.run.deterministic and device.type == "cuda":
        be_deterministic()
    rollout = "rollout" in algorithm.needs
    reward = RewardPool(config.reward, Path(config.run.dir) if training else None) if rollout else None
    try:
        return _assemble(config, algorithm, device, reward, resume, training=training, rollout=rollout, kept=kept)
    except BaseException:
        if reward:
            reward.close()
        raise


def find_mistakes(config: Config) -> list[str]:
    """What a run would refuse before its model loads, each part looked at although another is wrong: reward functions, data, packages,
    device."""
    algorithm = build(config)
    rollout = "rollout" in algorithm.needs

    def rewards() -> None:
        if rollout:
            RewardPool(config.reward).close()

    def data() -> None:
        read_and_check(config, algorithm, rollout=rollout, training=True)

    def packages() -> None:
        if config.lora.rank:
            lora.require_peft()

    def device() -> None:
        chosen = choose_device(config.run.device)
        found.extend(wrong_settings(config, algorithm, chosen.type))
        Fusing(config, chosen)

    found: list[str] = []
    for look in (rewards, data, packages, device):
        try:
            look()
        except UserError as error:
            found.append(str(error))
    return found


def _assemble(
    config: Config, algorithm: Algorithm, device: torch.device, reward: RewardPool | None, resume: Checkpoint | None,
    *, training: bool, rollout: bool, kept: dict[str, Any] | None,
) -> Parts:  # fmt: skip
    if config.lora.rank:
        lora.require_peft()
    tokenizer, ends, train_data, val_data, steps_per_epoch = read_and_check(config, algorithm, rollout=rollout, training=training)
    longest = max(train_data.longest, val_data.longest if val_data else 0)
    fusing = Fusing(config, device)
    ineffective = settings_without_effect(config, algorithm, device.type)
    models = load_models(config, algorithm, tokenizer, device, prompt_sets(train_data, val_data), resume, fusing, training=training)
    room = find_room(device, models, longest + (longest_response(config) if rollout else 0), training=training)
    settled = settle(config, room, kept)
    # All that holds memory comes before memory is looked at.
    roles = make_roles(config, algorithm, models, settled.roles, steps_per_epoch, training=training)
    fresh = restore(resume, roles.actor, roles.critic, training=training, adapters=config.lora.rank > 0) if resume else ()
    if device.type == "cuda":
        take_workspaces(roles.actor)
    if training:
        roles.residents.settle_down(models, settled.roles)

    facts = find_facts(config, device, models.actor, models.layers, longest, steps_per_epoch, fusing)
    facts = replace(facts, settings=settled.words, auto_budgets=settled.auto_budgets)
    facts = replace(facts, returning_bytes=returning(room, settled.roles) if training else 0)
    plan = make_plan(config, facts, rollout=rollout, kept=kept)
    torch.set_num_threads(plan.budgets.threads)
    export, export_bytes = exporter(config, models.actor, tokenizer)
    engine = NativeEngine(models.actor, tokenizer, ends, models.layers, limits(config, plan.budgets, device, longest)) if rollout else None
    return Parts(
        algorithm=algorithm,
        plan=plan,
        tokenizer=tokenizer,
        train_data=train_data,
        val_data=val_data,
        actor=roles.actor,
        ref=roles.ref,
        critic=roles.critic,
        reward_model=models.reward_model,
        trainer=Trainer(roles.actor, algorithm.loss) if training else None,
        critic_trainer=Trainer(roles.critic, algorithm.value_loss) if roles.critic and algorithm.value_loss else None,
        engine=engine,
        residents=roles.residents,
        account=make_account(device, models, roles, engine),
        release_memory=releases_memory(config),
        reward=reward,
        update_sizes=update_sizes(config, plan.budgets),
        forward_sizes=forward_sizes(config, plan.budgets),
        data_digest=train_data.digest(),
        export=export,
        export_bytes=export_bytes,
        notes=(
            *notes(config, algorithm, train_data, val_data, reward, roles.actor, training=training),
            *(() if training else (f"a training run would be refused: {text}" for text in ineffective)),
            *fresh,
        ),
    )


# ---- models and roles ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Models:
    """What was loaded and verified, with fused or compiled layers."""

    actor: PreTrainedModel
    layers: dict[int, LayerShape]  # of the actor
    critic: ScalarModel | None
    ref: PreTrainedModel | None  # None: there is no such role, or it is the actor without its adapters
    reward_model: RewardModel | None

    def own(self) -> dict[str, torch.nn.Module]:
        """The roles that have a model of their own."""
        judge = self.reward_model.role.model if self.reward_model else None
        models = {"actor": self.actor, "critic": self.critic, "ref": self.ref, "reward_model": judge}
        return {role: model for role, model in models.items() if model is not None}


def load_models(
    config: Config, algorithm: Algorithm, tokenizer: PreTrainedTokenizerBase, device: torch.device, sets: list[PromptSet],
    resume: Checkpoint | None, fusing: Fusing, *, training: bool,
) -> Models:  # fmt: skip
    # The reward model first: its tokenizer and template may not fit the data.
    judged = "rollout" in algorithm.needs and uses_reward_model(config)
    reward_model = load_reward_model(config, device, sets, fusing) if judged else None
    actor, layers = load_actor(config, tokenizer, device, resume, fusing)
    critic = load_critic(config, tokenizer, device, fusing) if training and algorithm.value_loss else None
    wants_ref = training and "ref_logprobs" in algorithm.needs and not shares_model(config)
    return Models(actor, layers, critic, load_ref(config, tokenizer, device, fusing) if wants_ref else None, reward_model)


@dataclass(frozen=True, eq=False)
class Roles:
    actor: Policy
    ref: Policy | None
    critic: Critic | None
    residents: Residents
    offloads: tuple[ActivationOffload, ...] = ()  # of the roles that send activations to the host


def make_roles(
    config: Config, algorithm: Algorithm, models: Models, settings: Mapping[str, RoleSettings], steps_per_epoch: int, *, training: bool
) -> Roles:
    temperature = config.rollout.temperature if "rollout" in algorithm.needs and training else 1.0
    options = head_options(settings["actor"])
    if not training:
        return Roles(Policy("actor", models.actor, temperature, options=options), None, None, Residents())
    residents = Residents()
    for role in ("reward_model", "ref"):  # they make room before the optimizers take theirs
        if role in models.own() and settings[role].offload_params:
            residents.add(role, models.own()[role], learns=False)
    residents.need("actor", "critic")
    learners = {"actor": models.actor, **({"critic": models.critic} if models.critic else {})}
    offloads = [keep_less(model, settings[role]) for role, model in learners.items()]
    total = count_steps(config, steps_per_epoch) * updates_per_step(config)
    of_actor = total - algorithm.critic_warmup * updates_per_step(config)  # its schedule must end with the run too
    optimizer = make_optimizer(models.actor, config.train, of_actor, settings["actor"], keeps_parameters=config.lora.rank > 0)
    actor = Policy("actor", models.actor, temperature, optimizer, algorithm.entropy_gradient, options=options)
    critic = None
    if models.critic:
        of_critic = config.train.model_copy(update={"lr": config.critic.lr})
        critic = Critic("critic", models.critic, make_optimizer(models.critic, of_critic, total, settings["critic"], keeps_parameters=True))
    ref = make_ref(algorithm, models, settings, temperature)
    return Roles(actor, ref, critic, residents, tuple(offload for offload in offloads if offload))


def make_ref(algorithm: Algorithm, models: Models, settings: Mapping[str, RoleSettings], temperature: float) -> Policy | None:
    if "ref_logprobs" not in algorithm.needs:
        return None
    options = head_options(settings["ref"])
    if models.ref is None:
        return Policy("ref", models.actor, temperature, as_role=partial(lora.without_adapters, models.actor), options=options)
    return Policy("ref", models.ref, temperature, options=options)


def make_optimizer(
    model: torch.nn.Module, config: TrainConfig, updates: int, settings: RoleSettings, *, keeps_parameters: bool
) -> Optimizer:
    offload = OffloadSetting(optimizer=settings.offload_optimizer, grads=settings.offload_grads)
    return Optimizer(model, config, updates, keeps_parameters=keeps_parameters, offload=offload)


def keep_less(model: torch.nn.Module, settings: RoleSettings) -> ActivationOffload | None:
    """From here on the layers of a role that learns keep what its settings say. When they are fused or compiled: what goes first onto a
    layer stays inside."""
    if settings.recompute != "none":
        apply_recompute(model, Recompute(settings.recompute, settings.recompute_layers, settings.recompute_method))
    return offload_activations(model) if settings.offload_activations else None


def head_options(settings: RoleSettings) -> HeadOptions:
    return HeadOptions(settings.fused_head, settings.entropy_chunk, settings.entropy_recompute, settings.head_recompute)


def make_account(device: torch.device, models: Models, roles: Roles, engine: NativeEngine | None) -> Account:
    own = list(models.own().values())
    optimizers = [role.optimizer for role in (roles.actor, roles.critic) if role and role.optimizer]
    return Account(
        device,
        {
            "parameters": [*(partial(weights_of, model) for model in own), roles.residents.memory],
            **({"gradients": [partial(gradients_of, model) for model in own]} if optimizers else {}),
            **({"optimizer": [optimizer.memory for optimizer in optimizers]} if optimizers else {}),
            **({"kv": [lambda: (cache for caches in engine.runner.caches for cache in caches)]} if engine else {}),
            **({"activations": [offload.pages.memory for offload in roles.offloads]} if roles.offloads else {}),
        },
    )


# ---- settings that cannot take effect ----------------------------------------------------------------------------------------------------


def shares_model(config: Config) -> bool:
    """Whether the reference role is the actor without its adapters: they start at nothing, and no second model is held."""
    return config.lora.rank > 0 and config.lora.path is None and config.ref.path is None


def check_settings(config: Config, algorithm: Algorithm, device: str, *, training: bool = True) -> None:
    if mistakes := wrong_settings(config, algorithm, device, training=training):
        raise UserError("\n".join(mistakes))


def wrong_settings(config: Config, algorithm: Algorithm, device: str, *, training: bool = True) -> list[str]:
    return [*graphs_without_device(config, device), *(settings_without_effect(config, algorithm, device) if training else [])]


def settings_without_effect(config: Config, algorithm: Algorithm, device: str) -> list[str]:
    """On this device, or with these roles."""
    mistakes = [*refused_offloads(config, algorithm, device)]
    if not config.train.entropy_recompute and not algorithm.entropy_gradient:
        or_bonus = ", or set algorithm.entropy_coef above 0" if "rollout" in algorithm.needs else ""
        mistakes.append(
            f"train.entropy_recompute: false, but the loss has no entropy bonus: nothing is kept for its gradient. Remove the key{or_bonus}"
        )
    if config.train.head_recompute != "auto" and not config.train.fused_head:
        mistakes.append(
            "train.head_recompute: the head is not fused (train.fused_head), and keeps the logits of a micro-batch in any case. Remove one "
            "of the keys"
        )
    return mistakes


def refused_offloads(config: Config, algorithm: Algorithm, device: str) -> Iterator[str]:
    shared = "ref_logprobs" in algorithm.needs and shares_model(config)
    others = algorithm.value_loss or uses_reward_model(config) or ("ref_logprobs" in algorithm.needs and not shared)
    sections = {"train": "actor", "critic": "critic", "ref": "ref", "reward_model": "reward_model"}
    for section, role in sections.items():
        for key in OFFLOADS:
            if getattr(getattr(config, section), key, None) is not True:
                continue
            reason = why_not(device)
            if key == "offload_params":
                reason = why_not_params(role, device, alone=not others, shared=role == "ref" and shared)
            if reason:
                yield f"{section}.{key}: true, but {reason}. Remove the key"


# ---- facts -----------------------------------------------------------------------------------------------------------------------------


def find_room(device: torch.device, models: Models, longest: int, *, training: bool = True) -> Room:
    """What `auto` is decided by."""
    roles = {"ref": RoleFacts(0)} | {role: role_facts(model) for role, model in models.own().items()}
    return Room(
        device=device.type,
        device_bytes=torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0,
        host_bytes=free_bytes(torch.device("cpu")),
        longest=longest,
        roles=roles if training else {role: replace(facts, trained=0) for role, facts in roles.items()},
    )


def role_facts(model: torch.nn.Module) -> RoleFacts:
    body = model.body if isinstance(model, ScalarModel) else model
    assert isinstance(body, PreTrainedModel)
    text = body.config.get_text_config()
    heads = text.num_attention_heads
    head_width = getattr(text, "head_dim", None) or text.hidden_size // heads
    experts = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    parameters = list(model.parameters())
    return RoleFacts(
        parameter_bytes=sum(parameter.nbytes for parameter in parameters),
        trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        itemsize=body.dtype.itemsize,
        layers=text.num_hidden_layers,
        width=text.hidden_size,
        inner=experts * (getattr(text, "num_experts_per_tok", None) or 1),
        heads_width=head_width * (heads + 2 * (getattr(text, "num_key_value_heads", None) or heads)),
        fused=check_fused(body).left_alone is None,
        head=None if body is not model else partial(head_peak, body),
    )


def head_peak(model: PreTrainedModel, tokens: int, keys: Mapping[str, Any], entropy_gradient: bool) -> int:
    """Most bytes of the vocabulary head's temporaries, where all tokens are trained on."""
    weight, options = (
        Head.of(model).weight,
        HeadOptions(keys["fused_head"], keys["entropy_chunk"], keys["entropy_recompute"], keys["head_recompute"] is not False),
    )
    vocabulary, width = weight.shape
    entropy: Entropy = "gradient" if entropy_gradient else "value"
    return head_bytes(tokens, vocabulary, width, options, dtype=weight.dtype, device=weight.device.type, entropy=entropy).peak


def find_facts(
    config: Config, device: torch.device, actor: PreTrainedModel, layers: Mapping[int, LayerShape], longest: int,
    steps_per_epoch: int, fusing: Fusing,
) -> Facts:  # fmt: skip
    """What the plan must know."""
    rows = most_seqs(config, device.type, config.algorithm.prompts_per_step * config.algorithm.samples_per_prompt)
    return Facts(
        device=device.type,
        free_bytes=free_bytes(device),
        parameters=sum(parameter.numel() for parameter in actor.parameters()),
        cores=THREADS,
        threads_given="OMP_NUM_THREADS" in os.environ,
        context_limit=load.context_limit(actor.config),
        kv_bytes_per_token=bytes_per_token(layers, actor.dtype),
        longest=longest,
        steps_per_epoch=steps_per_epoch,
        decode_bytes=decode_bytes(config, actor, layers, rows, longest + longest_response(config), device.type),
        graph_sizes=len(sizes_up_to(rows)),
        not_captured=why_not_captured(actor),
        layers=fusing.words(),
    )


def round_size(config: Config, algorithm: Algorithm) -> tuple[int, str]:
    """How many prompts are taken from the data at a time, and the key that says so."""
    if algorithm.dynamic and config.algorithm.prompts_per_round:
        return algorithm.dynamic.prompts_per_round, "algorithm.prompts_per_round"
    return config.algorithm.prompts_per_step, "algorithm.prompts_per_step"


def notes(
    config: Config, algorithm: Algorithm, train_data: PromptSet | RowSet, val_data: PromptSet | RowSet | None,
    reward: RewardPool | None, actor: Policy, *, training: bool,
) -> Iterator[str]:  # fmt: skip
    if training:
        yield f"data: {train_data.describe()}"
        yield f"data: {train_data.describe_epoch(*round_size(config, algorithm))}"
    if val_data:
        yield f"validation data: {val_data.describe()}"
    if reward and not reward.memory_limited:
        yield "this system does not limit the memory of reward processes: reward.memory_gb has no effect"
    if config.lora.rank:
        parameters = [parameter for parameter in actor.model.parameters()]
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        yield f"LoRA: {trained:,} of {sum(parameter.numel() for parameter in parameters):,} parameters are trained"


class Fusing:
    """Fuses or compiles the layers of each role's model as `train.fused_layers` and `train.compile` say, and keeps what came of it for the
    plan's words. A layer's forward has one owner, so where both could be, what the user set wins over auto."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.wanted = config.train.fused_layers
        self.compiles = config.train.compile is True
        self.off: str | None = None  # why nothing is fused
        self.found: dict[str, str] = {}  # role -> what came of it
        if self.compiles:
            self.off = "train.compile is on"
        elif self.wanted is False:
            self.off = "train.fused_layers is off"
        elif self.wanted == "auto" and device.type != "cuda":
            self.off = "the run is on the CPU and train.fused_layers is auto"
        elif device.type == "cuda" and dispatch.triton is None:
            self.off = 'triton is not installed: pip install "fulltilt[gpu]"'
            if self.wanted is True:
                raise UserError(f"train.fused_layers: {self.off}, or remove the key")

    def fuse(self, role: str, model: PreTrainedModel) -> None:
        """When the model has its weights and adapters, and before anything keeps an address: optimizer, engine, graphs."""
        if self.compiles:
            self._compile(role, model)
        if self.off is not None:
            return
        try:
            self.found[role] = str(report := fuse_and_compare(model))
        except WrongFusion as error:
            self.found[role] = f"not fused: {error}"
            self._refuse(role, str(error))
        else:
            # Another role may be of another family; where the actor is, the key would have no effect.
            if report.left_alone is not None and role == "actor":
                self._refuse(role, report.left_alone)

    def _compile(self, role: str, model: PreTrainedModel) -> None:
        try:
            self.found[role] = compile_and_compare(model)
        except WrongCompile as error:
            raise UserError(f"train.compile: true, but the layers of the {role} cannot be compiled: {error}. Remove the key") from error

    def _refuse(self, role: str, reason: str) -> None:
        if self.wanted is True:
            raise UserError(
                f"train.fused_layers: true, but the layers of the {role} cannot run fused: {reason}. Remove the key, or set auto"
            )

    def words(self) -> str:
        if self.off is not None and not self.compiles:
            return f"not fused: {self.off}"
        roles = {text: [role for role, other in self.found.items() if other == text] for text in self.found.values()}
        return "; ".join(f"{text} ({', '.join(names)})" for text, names in roles.items())


def take_workspaces(actor: Policy) -> None:
    """One pass with its gradient over a few tokens. cuBLAS keeps memory for each thread that multiplies, and the backward pass has a thread
    of its own: taken at the first update, it would lie in what the KV cache has lent, which could never be taken back whole."""
    if actor.optimizer is None:
        return
    actor.optimizer.prepare()
    logprobs, _ = packed_logprobs(actor.model, random_documents(actor.model))
    torch.cat(logprobs).sum().backward()  # type: ignore[no-untyped-call]
    actor.optimizer.zero_grad()


def decode_bytes(config: Config, model: PreTrainedModel, layers: Mapping[int, LayerShape], rows: int, longest: int, device: str) -> int:
    """About what decoding `rows` samples of up to `longest` tokens at once holds beside the KV cache: logits, where each sample stands,
    and on CUDA the kernels' workspaces, a layer's temporaries, and what captured graphs keep."""
    text, vocabulary = model.config.get_text_config(), len(Head.of(model).weight)
    blocks = -(-(longest + BURST) // config.rollout.block_tokens) + TABLE_STEP
    found = 4 * rows * (vocabulary + blocks) + bytes_of(Progress.make(rows, BURST, "meta"))
    if device != "cuda":
        return found
    heads, itemsize, sizes = text.num_attention_heads, model.dtype.itemsize, sizes_up_to(rows)
    of_attention = 4 * max(
        workspace_numbers(size, heads, shape.key_heads, shape.head_width, itemsize, blocks * config.rollout.block_tokens)
        for size in sizes
        for shape in set(layers.values())
    )
    of_sampling = bytes_of(Workspace.make(rows, vocabulary, "meta"))
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    of_layer = 2 * rows * itemsize * (4 * text.hidden_size + 3 * inner)  # twice, for pieces of a pool that do not fit the next size
    of_graphs = GRAPH_BYTES * 2 * len(sizes) if uses_graphs(config, device) else 0  # with top-k and top-p, and without
    of_trials = trial_bytes(text.hidden_size, 2 * inner, itemsize) if model.dtype in LOW and is_fused(model) else 0
    return found + of_attention + of_sampling + of_layer + of_graphs + of_trials


def bytes_of(record: Progress | Workspace) -> int:
    return sum(tensor.nbytes for tensor in vars(record).values())


def load_actor(
    config: Config, tokenizer: PreTrainedTokenizerBase, device: torch.device, resume: Checkpoint | None, fusing: Fusing
) -> tuple[PreTrainedModel, dict[int, LayerShape]]:
    """The model that is trained and sampled from. With adapters it is the base that the run started from, and the checkpoint has only
    them."""
    adapters = config.lora.rank > 0
    model = load.load_model(config.model, device, path=resume.model_folder if resume and not adapters else None)
    load.check_vocabulary(model, tokenizer)
    layers = verify(model)
    if adapters:
        lora.add_adapters(model, config.lora, config.run.seed, config.lora.path)
    fusing.fuse("actor", model)
    return model, layers


def load_critic(config: Config, tokenizer: PreTrainedTokenizerBase, device: torch.device, fusing: Fusing) -> ScalarModel:
    """What it has learned is in the checkpoint's tensors; its body is loaded from where the run started, also after a resume."""
    model = load_scalar(config.model, device, config.critic.path, key="critic.path" if config.critic.path else "model.path", head="new")
    verify_body(model.body)
    load.check_vocabulary(model.body, tokenizer)
    if config.critic.path:
        same_tokens(config, tokenizer, "critic.path", config.critic.path)
    if config.lora.rank and config.lora.critic:
        lora.add_adapters(model.body, of_body(config.lora, model.body), config.run.seed)
    fusing.fuse("critic", model.body)
    return model


def of_body(settings: LoraConfig, body: PreTrainedModel) -> LoraConfig:
    """The same layers under the names that they have in a model without a language head."""
    prefix = f"{body.base_model_prefix}."
    targets = settings.targets if isinstance(settings.targets, str) else [name.removeprefix(prefix) for name in settings.targets]
    return settings.model_copy(update={"targets": targets, "parameters": [name.removeprefix(prefix) for name in settings.parameters]})


def load_reward_model(config: Config, device: torch.device, sets: list[PromptSet], fusing: Fusing) -> RewardModel:
    section = config.reward_model
    assert section.path is not None
    tokenizer = load.load_tokenizer(config.model, section.path, "reward_model.path", section.chat_template)
    model = load_scalar(config.model, device, section.path, key="reward_model.path", head="required")
    verify_body(model.body)
    load.check_vocabulary(model.body, tokenizer)
    model.requires_grad_(False)
    fusing.fuse("reward_model", model.body)
    encoder = RewardEncoder(tokenizer, load.context_limit(model.body.config))
    for data in sets:
        encoder.check(data.prompts)
    return RewardModel(Scorer("reward_model", model), encoder)


def load_ref(config: Config, tokenizer: PreTrainedTokenizerBase, device: torch.device, fusing: Fusing) -> PreTrainedModel:
    """The reference stays what the run started from, also after a resume: it is never loaded from a checkpoint."""
    model = load.load_model(config.model, device, path=config.ref.path, key="ref.path" if config.ref.path else "model.path")
    verify(model)
    load.check_vocabulary(model, tokenizer)
    if config.ref.path:
        same_tokens(config, tokenizer, "ref.path", config.ref.path)
    if config.lora.path and not config.ref.path:
        lora.add_adapters(model, config.lora, config.run.seed, config.lora.path)
    model.requires_grad_(False)
    fusing.fuse("ref", model)
    return model


def same_tokens(config: Config, tokenizer: PreTrainedTokenizerBase, key: str, path: str) -> None:
    """A role that reads the actor's token ids must mean the same by them."""
    try:
        other = load.load_tokenizer(config.model, path, key)
    except UserError:
        return  # a folder without a tokenizer: its ids are taken to be the actor's
    if other.get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"{key}: {path} has another tokenizer than model.path, and reads the actor's token ids as other text. Use a model with the "
            "actor's tokenizer; only a reward model may have its own"
        )


def restore(resume: Checkpoint, actor: Policy, critic: Critic | None, *, training: bool, adapters: bool) -> tuple[str, ...]:
    """Bring optimizers, and parameters that are in no exported model, back to what they were. What is not in the checkpoint is said."""
    if not training and not adapters:
        return ()
    tensors, state = resume.tensors(), resume.state()
    of_critic = {name.removeprefix(CRITIC_TENSORS): tensor for name, tensor in tensors.items() if name.startswith(CRITIC_TENSORS)}
    of_actor = {name: tensor for name, tensor in tensors.items() if not name.startswith((CRITIC_TENSORS, SURPLUS_TENSORS))}
    if actor.optimizer:
        actor.optimizer.restore(of_actor, updates=state["updates"], skipped=state["skipped"])
    else:
        restore_parameters(actor.model, of_actor)
    if critic and critic.optimizer:
        if state.get("critic") is None:
            return ("the checkpoint holds no critic: it starts anew",)
        critic.optimizer.restore(of_critic, **state["critic"])
    return ()


def exporter(config: Config, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[Callable[[Path], None], int]:
    """The function that writes the actor into a folder, and about how many bytes that takes."""
    everything = sum(parameter.nbytes for parameter in model.parameters())
    if not config.lora.rank:
        return lambda folder: load.export(model, tokenizer, folder, saved_tensors(model)), everything
    if config.lora.export == "merged":
        return partial(lora.export_merged, model, tokenizer), everything
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    return partial(lora.export_adapter, model, tokenizer, base=config.model), trained


def update_sizes(config: Config, budgets: Budgets) -> dict[str, MicroSizing]:
    of_role = {"actor": budgets.token_budget, "critic": budgets.critic_token_budget}
    return {name: sizing(config, name, budget) for name, budget in of_role.items()}


def forward_sizes(config: Config, budgets: Budgets) -> dict[str, MicroSizing]:
    of_role = {
        "actor": budgets.forward_token_budget,
        "ref": budgets.ref_token_budget,
        "critic": budgets.critic_forward_token_budget,
        "reward_model": budgets.reward_model_token_budget,
    }
    return {name: sizing(config, name, budget) for name, budget in of_role.items()}


def sizing(config: Config, role: str, budget: int) -> MicroSizing:
    section: ActorConfig | RefConfig | CriticConfig | RewardModelConfig = getattr(config, role)
    return MicroSizing(section.dynamic_batch, budget, section.micro_batch, packing=given_settings(config, role)["packing"])


def read_and_check(
    config: Config, algorithm: Algorithm, *, rollout: bool, training: bool
) -> tuple[PreTrainedTokenizerBase, frozenset[int], PromptSet | RowSet, PromptSet | RowSet | None, int]:
    """Tokenizer, end tokens, training data, validation data, steps per epoch: all that can be wrong before a model loads, looked at."""
    tokenizer = load.load_tokenizer(config.model)
    ends = load.end_tokens(config.model, tokenizer)
    train_data, val_data = read_data(config, tokenizer, ends, rollout=rollout, training=training)
    if not training:  # evaluation does not see all the data that settings are for
        return tokenizer, ends, train_data, val_data, 1
    check_sources(config, prompt_sets(train_data, val_data))
    check_template(config, prompt_sets(train_data, val_data))
    longest = max(train_data.longest, val_data.longest if val_data else 0)
    others = {"ref.path": config.ref.path if "ref_logprobs" in algorithm.needs else None}
    others["critic.path"] = config.critic.path if algorithm.value_loss else None
    for key, path in {"model.path": config.model.path, **others}.items():
        if path is not None:
            whose = "the model" if key == "model.path" else f"the model of {key}"
            check_context(config, longest, load.context_limit(load.read_config(config.model, path, key)), rollout=rollout, whose=whose)
    steps_per_epoch = train_data.steps_per_epoch(*round_size(config, algorithm))
    steps = count_steps(config, steps_per_epoch)
    if steps <= algorithm.critic_warmup:
        raise UserError(
            f"algorithm.critic_warmup: only the critic is updated in the first {algorithm.critic_warmup} steps, and the run has {steps}. "
            "Lower it, or ask for more steps"
        )
    return tokenizer, ends, train_data, val_data, steps_per_epoch


def prompt_sets(*sets: PromptSet | RowSet | None) -> list[PromptSet]:
    return [data for data in sets if isinstance(data, PromptSet)]


def read_data(
    config: Config, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int], *, rollout: bool, training: bool
) -> tuple[PromptSet | RowSet, PromptSet | RowSet | None]:
    def read(paths: str | list[str]) -> PromptSet | RowSet:
        return load_prompts(paths, tokenizer, config.data) if rollout else load_sft(paths, tokenizer, config.data, ends)

    val = read(config.data.val) if config.data.val else None
    if not training and val is not None:
        return val, val
    return read(config.data.train), val


def check_sources(config: Config, sets: list[PromptSet]) -> None:
    """A reward for a data source that no row has is a misspelling: its rows would go to another function."""
    seen = {prompt.data_source for prompts in sets for prompt in prompts.prompts}
    unknown = sorted(set(config.reward.sources) - seen)
    if sets and unknown:
        raise UserError(
            f"reward.sources: no row has the data source {', '.join(map(repr, unknown))}; the data has "
            f"{', '.join(map(repr, sorted(seen)))}. Mend the name or remove it"
        )


def check_template(config: Config, sets: list[PromptSet]) -> None:
    if config.reward_model.chat_template and not any(isinstance(prompt.source, tuple) for data in sets for prompt in data.prompts):
        raise UserError("reward_model.chat_template: every prompt is a plain string, which goes through no template. Remove the key")


def limits(config: Config, budgets: Budgets, device: torch.device, longest_prompt: int) -> EngineLimits:
    return EngineLimits(
        blocks=budgets.kv_blocks,
        block_tokens=config.rollout.block_tokens,
        max_seqs=budgets.max_seqs,
        max_batched_tokens=budgets.max_batched_tokens,
        chunked_prefill=config.rollout.chunked_prefill,
        prefix_sharing=config.rollout.prefix_sharing,
        cuda_graphs=uses_graphs(config, device.type),
        graphs_required=config.rollout.cuda_graphs is True,
        longest=longest_prompt + longest_response(config),
    )
