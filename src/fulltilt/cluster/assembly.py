"""Assembly of a run on one device: training with rewards, supervised fine-tuning, or evaluation.

Enters: a configuration, and the checkpoint to resume from if any. Leaves: `RunParts`, loaded, verified and planned, with the worker that
has everything that knows a device. Guaranteed: mistakes in reward, data and model are found in that order (cheapest first) before anything
is written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from fulltilt.algo.base import Algorithm
from fulltilt.algo.build import build
from fulltilt.cluster.checks import (
    RunData,
    TextFacts,
    choose_device,
    read_training_data,
    read_validation_data,
    refuse,
    round_size,
    settings_without_effect,
    wrong_rollout,
    wrong_settings,
)
from fulltilt.cluster.loading import Fusing, Models, exporter, load_models, make_encoder
from fulltilt.cluster.sizes import find_facts, forward_sizes, free_bytes, limits, update_sizes
from fulltilt.cluster.worker import CRITIC_TENSORS, SURPLUS_TENSORS, Residents, Worker
from fulltilt.data.order import InEpochs
from fulltilt.data.prompts import PromptSet
from fulltilt.data.sft import RowSet
from fulltilt.footprint import HeadOptions
from fulltilt.memory.account import Account, gradients_of, weights_of
from fulltilt.memory.activations import ActivationOffload, offload_activations
from fulltilt.memory.offload import OffloadSetting
from fulltilt.memory.recompute import apply_recompute
from fulltilt.model import lora
from fulltilt.model.scalar import ScalarModel
from fulltilt.model.verify import packed_logprobs, random_documents
from fulltilt.plan import (
    Plan,
    RoleSettings,
    count_steps,
    make_plan,
    plan_roles,
    updates_per_step,
)
from fulltilt.records import Prompt, Row
from fulltilt.reward.base import RewardPool
from fulltilt.reward.model import RewardEncoder
from fulltilt.rollout.engine import Engine, EngineContext, make_engine
from fulltilt.schema import Config, TrainConfig, uses_reward_model
from fulltilt.shape import Recompute
from fulltilt.train.checkpoint import Checkpoint
from fulltilt.train.optim import Optimizer, restore_parameters
from fulltilt.train.roles import Critic, Policy, Role, Scorer
from fulltilt.train.trainer import Trainer

Pool = TypeVar("Pool", RewardPool, RewardPool | None)


@dataclass(frozen=True, eq=False)
class RunParts:
    """A run, ready for its first step: what decides on this side, and the worker that computes."""

    algorithm: Algorithm
    plan: Plan
    train_data: InEpochs[Prompt] | InEpochs[Row]
    val_data: PromptSet | RowSet | None
    data_digest: str  # of the training data's tokens
    reward: RewardPool | None  # None: nothing is sampled (SFT)
    encoder: RewardEncoder | None  # writes texts for the reward model, where there is one
    worker: Worker
    notes: tuple[str, ...]  # about the data, the models and the checkpoint, for the console

    def close(self) -> None:
        if self.reward:
            self.reward.close()
        self.worker.close()


def be_deterministic() -> None:
    """Only kernels whose result does not depend on timing. cuBLAS must be told through the environment, before its first use."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def assemble(config: Config, resume: Checkpoint | None = None, *, kept: dict[str, Any] | None = None) -> RunParts:
    """The parts of a training run. `kept`: the budgets of an earlier plan, to compute in the same shapes and get the same bits; None: plan
    anew."""
    algorithm = build(config)
    device = open_device(config, wrong_settings(config, algorithm, choose_device(config.run.device).type))
    if "rollout" in algorithm.needs:
        with closing_on_error(RewardPool(config.reward, Path(config.run.dir))) as reward:
            return assemble_rl(config, algorithm, device, reward, resume, kept)
    return assemble_sft(config, algorithm, device, resume, kept)


def assemble_rl(
    config: Config, algorithm: Algorithm, device: torch.device, reward: RewardPool, resume: Checkpoint | None, kept: dict[str, Any] | None
) -> RunParts:
    require_packages(config)
    data = read_training_data(config, algorithm)
    encoder = make_encoder(config, data.prompt_sets) if uses_reward_model(config) else None
    fusing, roles = Fusing(config, device), training_roles(algorithm)
    models = load_models(config, roles, data.texts.tokenizer, device, encoder, resume, fusing)
    worker, notes = make_worker(config, algorithm, device, models, data.texts, fusing, roles, resume, kept)
    found = [*describe_data(config, algorithm, data), *describe_reward(reward), *describe_adapters(config, models)]
    return RunParts(algorithm, worker.plan, data.train, data.val, data.train.digest(), reward, encoder, worker, notes=(*found, *notes))


def assemble_sft(
    config: Config, algorithm: Algorithm, device: torch.device, resume: Checkpoint | None, kept: dict[str, Any] | None
) -> RunParts:
    require_packages(config)
    data, fusing, roles = read_training_data(config, algorithm), Fusing(config, device), training_roles(algorithm)
    models = load_models(config, roles, data.texts.tokenizer, device, None, resume, fusing)
    worker, notes = make_worker(config, algorithm, device, models, data.texts, fusing, roles, resume, kept)
    found = [*describe_data(config, algorithm, data), *describe_adapters(config, models)]
    return RunParts(algorithm, worker.plan, data.train, data.val, data.train.digest(), None, None, worker, notes=(*found, *notes))


def assemble_evaluation(config: Config, resume: Checkpoint | None = None) -> RunParts:
    """The parts that validation needs: no role learns, and settings that only training would refuse are notes."""
    algorithm = build(config)
    device = open_device(config, wrong_rollout(config, choose_device(config.run.device).type))
    sampled = "rollout" in algorithm.needs
    with closing_on_error(RewardPool(config.reward, None) if sampled else None) as reward:
        require_packages(config)
        data, fusing = read_validation_data(config, algorithm), Fusing(config, device)
        encoder = make_encoder(config, data.prompt_sets) if sampled and uses_reward_model(config) else None
        models = load_models(config, ("actor",), data.texts.tokenizer, device, encoder, resume, fusing)
        worker, notes = make_worker(config, algorithm, device, models, data.texts, fusing, (), resume, None)
        refused = (f"a training run would be refused: {text}" for text in settings_without_effect(config, algorithm, device.type))
        found = [f"validation data: {data.train.describe()}", *describe_reward(reward), *describe_adapters(config, models), *refused]
        return RunParts(algorithm, worker.plan, data.train, data.val, data.train.digest(), reward, encoder, worker, notes=(*found, *notes))


@contextlib.contextmanager
def closing_on_error(reward: Pool) -> Iterator[Pool]:
    try:
        yield reward
    except BaseException:
        if reward:
            reward.close()
        raise


def open_device(config: Config, mistakes: Iterable[str]) -> torch.device:
    """The device of a run, unless its settings are refused before anything loads."""
    device = choose_device(config.run.device)
    refuse(mistakes)
    if config.run.deterministic and device.type == "cuda":
        be_deterministic()
    return device


def require_packages(config: Config) -> None:
    if config.lora.rank:
        lora.require_peft()


def training_roles(algorithm: Algorithm) -> tuple[str, ...]:
    """The roles of a training run, a reward model aside."""
    critic, ref = ("critic",) if algorithm.value_loss else (), ("ref",) if "ref_logprobs" in algorithm.needs else ()
    return ("actor", *critic, *ref)


# ---- the worker ------------------------------------------------------------------------------------------------------------------------


def make_worker(
    config: Config, algorithm: Algorithm, device: torch.device, models: Models, texts: TextFacts, fusing: Fusing, roles: Collection[str],
    resume: Checkpoint | None = None, kept: dict[str, Any] | None = None,
) -> tuple[Worker, tuple[str, ...]]:  # fmt: skip
    """The worker over loaded models, and notes on what the checkpoint lacks. `roles`: those of a training run; none where nothing
    learns."""
    sampled, learners = "rollout" in algorithm.needs, tuple(role for role in ("actor", "critic") if role in roles)
    facts = find_facts(config, device, models, texts, fusing, learners, rollout=sampled)
    settings = plan_roles(config, facts, kept).settings
    # Everything that holds memory comes before memory is measured.
    made = make_roles(config, algorithm, models, settings, texts.steps_per_epoch, roles)
    notes = restore(resume, made, adapters=config.lora.rank > 0) if resume else ()
    if device.type == "cuda":
        take_workspaces(made.actor)
    made.settle_down(models, settings)
    plan = make_plan(config, replace(facts, free_bytes=free_bytes(device)), kept)
    torch.set_num_threads(plan.budgets.threads)
    export, export_bytes = exporter(config, models.actor, texts.tokenizer)
    bounds = limits(config, plan.budgets, device, texts.longest)
    context = EngineContext(models.actor, texts.tokenizer, texts.ends, models.layers, bounds)
    engine = make_engine(config.rollout.engine, context) if sampled else None
    worker = Worker(
        config=config,
        algorithm=algorithm,
        plan=plan,
        roles=made.roles,
        trainers=made.trainers(algorithm),
        engine=engine,
        residents=made.residents,
        account=make_account(device, models, made, engine),
        update_sizes=update_sizes(config, plan.budgets),
        forward_sizes=forward_sizes(config, plan.budgets),
        export=export,
        export_bytes=export_bytes,
    )
    return worker, notes


@dataclass(frozen=True, eq=False)
class RolesMade:
    """Every role of a worker, with its optimizer or none."""

    roles: Mapping[str, Role]
    learners: Mapping[str, Policy | Critic]
    residents: Residents
    offloads: tuple[ActivationOffload, ...] = ()  # of the roles that send activations to the host

    @property
    def actor(self) -> Policy:
        actor = self.roles["actor"]
        assert isinstance(actor, Policy)
        return actor

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        return {name: role.optimizer for name, role in self.learners.items() if role.optimizer}

    def trainers(self, algorithm: Algorithm) -> dict[str, Trainer]:
        losses: dict[str, Any] = {"actor": algorithm.loss, "critic": algorithm.value_loss}
        return {name: Trainer(role, losses[name]) for name, role in self.learners.items()}

    def settle_down(self, models: Models, settings: Mapping[str, RoleSettings]) -> None:
        """Let parameters of learners move between device and host, once their optimizers exist and the checkpoint is restored."""
        for name in ("critic", "actor"):
            if name in self.learners and settings[name].offload_params:
                self.residents.add(name, models.own[name], learns=True)
        self.residents.need("actor")


def make_roles(
    config: Config,
    algorithm: Algorithm,
    models: Models,
    settings: Mapping[str, RoleSettings],
    steps_per_epoch: int,
    wanted: Collection[str],
) -> RolesMade:
    """`wanted`: the roles of a training run; none where nothing learns."""
    judge = models.own.get("reward_model")
    judges: dict[str, Role] = {"reward_model": Scorer("reward_model", judge)} if isinstance(judge, ScalarModel) else {}
    options, residents = head_options(settings["actor"]), Residents()
    if not wanted:
        return RolesMade({"actor": Policy("actor", models.actor, 1.0, options=options), **judges}, {}, residents)
    for role in ("reward_model", "ref"):  # they make room before the optimizers take theirs
        if role in models.own and settings[role].offload_params:
            residents.add(role, models.own[role], learns=False)
    residents.need("actor", "critic")
    offloads = [keep_less(models.own[role], settings[role]) for role in ("actor", "critic") if role in wanted]
    temperature = config.rollout.temperature if "rollout" in algorithm.needs else 1.0
    total = count_steps(config, steps_per_epoch) * updates_per_step(config)
    of_actor = total - algorithm.critic_warmup * updates_per_step(config)  # its schedule must end with the run too
    optimizer = make_optimizer(models.actor, config.train, of_actor, settings["actor"], keeps_parameters=config.lora.rank > 0)
    learners: dict[str, Policy | Critic] = {
        "actor": Policy("actor", models.actor, temperature, optimizer, algorithm.entropy_gradient, options=options)
    }
    if isinstance(critic := models.own.get("critic"), ScalarModel):
        of_critic = config.train.model_copy(update={"lr": config.critic.lr})
        learners["critic"] = Critic("critic", critic, make_optimizer(critic, of_critic, total, settings["critic"], keeps_parameters=True))
    refs = {"ref": make_ref(models, settings, temperature)} if "ref" in wanted else {}
    return RolesMade({**learners, **refs, **judges}, learners, residents, tuple(offload for offload in offloads if offload))


def make_ref(models: Models, settings: Mapping[str, RoleSettings], temperature: float) -> Policy:
    options, own = head_options(settings["ref"]), models.own.get("ref")
    if own is None:
        return Policy("ref", models.actor, temperature, as_role=partial(lora.without_adapters, models.actor), options=options)
    assert isinstance(own, PreTrainedModel)
    return Policy("ref", own, temperature, options=options)


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


def make_account(device: torch.device, models: Models, made: RolesMade, engine: Engine | None) -> Account:
    own, optimizers = models.own.values(), made.optimizers.values()
    return Account(
        device,
        {
            "parameters": [*(partial(weights_of, model) for model in own), made.residents.memory],
            **({"gradients": [partial(gradients_of, model) for model in own]} if optimizers else {}),
            **({"optimizer": [optimizer.memory for optimizer in optimizers]} if optimizers else {}),
            **({"kv": [engine.memory]} if engine else {}),
            **({"activations": [offload.pages.memory for offload in made.offloads]} if made.offloads else {}),
        },
    )


def take_workspaces(actor: Policy) -> None:
    """One pass with its gradient over a few tokens. cuBLAS keeps memory for each thread that multiplies, and the backward pass has a thread
    of its own: taken at the first update, it would lie in what the KV cache has lent, which could never be taken back whole."""
    if actor.optimizer is None:
        return
    actor.optimizer.prepare()
    logprobs, _ = packed_logprobs(actor.model, random_documents(actor.model))
    torch.cat(logprobs).sum().backward()  # type: ignore[no-untyped-call]
    actor.optimizer.zero_grad()


def restore(resume: Checkpoint, made: RolesMade, *, adapters: bool) -> tuple[str, ...]:
    """Restore optimizers, and parameters that are in no exported model. Returns notes on what the checkpoint lacks."""
    optimizers = made.optimizers
    if not optimizers and not adapters:
        return ()
    tensors, state = resume.tensors(), resume.state()
    of_actor = {name: tensor for name, tensor in tensors.items() if not name.startswith((CRITIC_TENSORS, SURPLUS_TENSORS))}
    if "actor" not in optimizers:
        restore_parameters(made.actor.model, of_actor)
        return ()
    optimizers["actor"].restore(of_actor, updates=state["updates"], skipped=state["skipped"])
    if "critic" not in optimizers:
        return ()
    if state.get("critic") is None:
        return ("the checkpoint holds no critic: a new one is started",)
    of_critic = {name.removeprefix(CRITIC_TENSORS): tensor for name, tensor in tensors.items() if name.startswith(CRITIC_TENSORS)}
    optimizers["critic"].restore(of_critic, **state["critic"])
    return ()


# ---- notes for the console -------------------------------------------------------------------------------------------------------------


def describe_data(config: Config, algorithm: Algorithm, data: RunData) -> Iterator[str]:
    yield f"data: {data.train.describe()}"
    yield f"data: {data.train.describe_epoch(*round_size(config, algorithm))}"
    if data.val:
        yield f"validation data: {data.val.describe()}"


def describe_reward(reward: RewardPool | None) -> Iterator[str]:
    if reward and not reward.memory_limited:
        yield "this system does not limit the memory of reward processes: reward.memory_gb has no effect"


def describe_adapters(config: Config, models: Models) -> Iterator[str]:
    if config.lora.rank:
        parameters = list(models.actor.parameters())
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        yield f"LoRA: {trained:,} of {sum(parameter.numel() for parameter in parameters):,} parameters are trained"
