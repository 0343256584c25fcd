"""Loading the models of a run's roles: verified, with adapters, fused or compiled, and brought back to a checkpoint.

Enters: a configuration, the names of the roles, and the checkpoint to resume from if any. Leaves: `Models`. Guaranteed: a model that does
not fit its tokenizer, or whose layers would compute something else than transformers' own, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fulltilt.kernels import dispatch
from fulltilt.model import load, lora
from fulltilt.model.attention import LayerShape
from fulltilt.model.compiled import compile_and_compare
from fulltilt.model.fuse import WrongLayers, fuse_and_compare, saved_tensors
from fulltilt.model.scalar import ScalarModel, load_scalar
from fulltilt.model.verify import verify
from fulltilt.records import Prompt, UserError
from fulltilt.reward.model import RewardEncoder
from fulltilt.schema import Config, LoraConfig, shares_model, shares_parameters, uses_reward_model
from fulltilt.training.checkpoint import Checkpoint


@dataclass(frozen=True, eq=False)
class Models:
    """The models that were loaded and verified, with fused or compiled layers."""

    own: Mapping[str, torch.nn.Module]  # by role; a reference role that is the actor without its adapters has none of its own
    layers: Mapping[int, LayerShape]  # the attention shapes of the actor's layers
    fused: str  # whether their layers run fused or compiled, in words

    @property
    def actor(self) -> PreTrainedModel:
        actor = self.own["actor"]
        assert isinstance(actor, PreTrainedModel)
        return actor


def leave_whole(role: str, model: torch.nn.Module) -> None:
    """What is done to a model that is neither divided nor shared out."""


def load_models(
    config: Config, roles: Collection[str], tokenizer: PreTrainedTokenizerBase, device: torch.device, encoder: RewardEncoder | None,
    resume: Checkpoint | None, *, sampled: bool, actor: bool = True, order: Sequence[str] = (),
    divide: Callable[[str, torch.nn.Module], PreTrainedModel | None] = leave_whole,
    loaded: Callable[[str, torch.nn.Module], None] = leave_whole,
) -> Models:  # fmt: skip
    """The actor, unless other workers have it, and those of `roles` that have a model of their own; with an `encoder`, the reward model
    too. `sampled`: whether the run samples from the actor. `order`: the roles in the order in which they are loaded. `divide`: called with
    each role's model, verified and with adapters, before it is fused; what it returns is fused too. `loaded`: called after that, before the
    next one is loaded."""
    fusing, layers = Fusing(config, device, divide, learns=bool(roles)), dict[int, LayerShape]()

    def load_actor_and_layers() -> PreTrainedModel:
        decodes = sampled and config.rollout.engine == "native"
        model, shapes = load_actor(config, tokenizer, device, resume, fusing, decodes=decodes)
        layers.update(shapes)
        return model

    loaders: dict[str, Callable[[], torch.nn.Module]] = {}
    if encoder is not None:
        loaders["reward_model"] = partial(load_reward_model, config, device, encoder, fusing)
    if actor:
        loaders["actor"] = load_actor_and_layers
    if "critic" in roles:
        loaders["critic"] = partial(load_critic, config, tokenizer, device, fusing)
    if "ref" in roles and not shares_model(config):
        loaders["ref"] = partial(load_ref, config, tokenizer, device, fusing)
    own: dict[str, torch.nn.Module] = {}
    for role in sorted(loaders, key=order.index) if order else loaders:
        own[role] = loaders[role]()
        loaded(role, own[role])
    return Models({role: own[role] for role in loaders}, layers, fusing.words())


class Fusing:
    """Divides each role's model, if it is to be, and then fuses or compiles its layers as `train.fused_layers` and `train.compile` say, and
    keeps the results for the plan's words. A layer's forward has one owner, so where both could be, what the user set wins over auto."""

    def __init__(
        self, config: Config, device: torch.device, divide: Callable[[str, torch.nn.Module], PreTrainedModel | None] = leave_whole, *,
        learns: bool = False,
    ) -> None:  # fmt: skip
        self.divide = divide
        self.wanted = config.train.fused_layers
        self.compiles = config.train.compile is True
        self.off: str | None = None  # why nothing is fused
        self.found: dict[str, str] = {}  # what runs the layers of each role
        shared = learns and shares_parameters(config)
        self.aside = f"; outside rollouts one by one, because train.shard is {config.train.shard}" if shared else ""
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

    def fuse(self, role: str, whole: PreTrainedModel | ScalarModel) -> None:
        """Call it once the model has its weights and adapters, and before anything keeps an address: optimizer, engine, graphs."""
        also = self.divide(role, whole)
        model, reason = whole.body if isinstance(whole, ScalarModel) else whole, None
        try:
            if also is not None and self.off is None:
                fuse_and_compare(also)
            if self.compiles:
                self.found[role] = compile_and_compare(model)
            elif self.off is None:
                report = fuse_and_compare(model)
                self.found[role] = f"{report}{self.aside if report.joined else ''}"
                # Another role may be of another family; where the actor is, the key would have no effect.
                reason = report.left_alone if role == "actor" else None
        except WrongLayers as error:
            if self.compiles:
                raise UserError(f"train.compile: true, but the layers of the {role} cannot be compiled: {error}. Remove the key") from error
            reason = str(error)
            self.found[role] = f"not fused: {reason}"
        if reason is not None and self.wanted is True:
            raise UserError(
                f"train.fused_layers: true, but the layers of the {role} cannot run fused: {reason}. Remove the key, or set auto"
            )

    def words(self) -> str:
        if self.off is not None and not self.compiles:
            return f"not fused: {self.off}"
        # In the same order wherever roles are loaded in another one.
        found = {role: self.found[role] for role in ("reward_model", "actor", "critic", "ref") if role in self.found}
        roles = {text: [role for role, other in found.items() if other == text] for text in found.values()}
        return "; ".join(f"{text} ({', '.join(names)})" for text, names in roles.items())


def load_actor(
    config: Config, tokenizer: PreTrainedTokenizerBase, device: torch.device, resume: Checkpoint | None, fusing: Fusing, *, decodes: bool
) -> tuple[PreTrainedModel, dict[int, LayerShape]]:
    """The model that is trained and sampled from. With adapters the base stays that of the run's start: the checkpoint has only them."""
    adapters = config.lora.rank > 0
    model = load.load_model(config.model, device, path=resume.model_folder if resume and not adapters else None)
    load.check_vocabulary(model, tokenizer)
    layers = verify(model, decodes=decodes)
    if adapters:
        lora.add_adapters(model, config.lora, config.run.seed, config.lora.path)
    fusing.fuse("actor", model)
    return model, layers


def load_critic(config: Config, tokenizer: PreTrainedTokenizerBase, device: torch.device, fusing: Fusing) -> ScalarModel:
    """What it has learned is in the checkpoint's tensors; its body is loaded from where the run started, also after a resume."""
    key = "critic.path" if config.critic.path else "model.path"
    model = load_scalar(config.model, device, config.critic.path, key=key, head="new")
    check_tokens(config, model.body, tokenizer, "critic.path", config.critic.path)
    if config.lora.rank and config.lora.critic:
        lora.add_adapters(model.body, of_body(config.lora, model.body), config.run.seed)
    fusing.fuse("critic", model)
    return model


def of_body(settings: LoraConfig, body: PreTrainedModel) -> LoraConfig:
    """The same layers under the names that they have in a model without a language head."""
    prefix = f"{body.base_model_prefix}."
    targets = settings.targets if isinstance(settings.targets, str) else [name.removeprefix(prefix) for name in settings.targets]
    return settings.model_copy(update={"targets": targets, "parameters": [name.removeprefix(prefix) for name in settings.parameters]})


def make_encoder(config: Config, prompts: Sequence[Prompt]) -> RewardEncoder | None:
    """The reward model's tokenizer and template, which may not fit the data; None where no prompt is scored by a reward model."""
    section = config.reward_model
    if not prompts or not uses_reward_model(config):
        return None
    assert section.path is not None
    tokenizer = load.load_tokenizer(config.model, section.path, "reward_model.path", section.chat_template)
    limit = load.context_limit(load.read_config(config.model, section.path, "reward_model.path"))
    encoder = RewardEncoder(tokenizer, limit)
    encoder.check(prompts)
    return encoder


def load_reward_model(config: Config, device: torch.device, encoder: RewardEncoder, fusing: Fusing) -> ScalarModel:
    path = config.reward_model.path
    assert path is not None
    model = load_scalar(config.model, device, path, key="reward_model.path", head="required")
    load.check_vocabulary(model.body, encoder.tokenizer)
    model.requires_grad_(False)
    fusing.fuse("reward_model", model)
    return model


def load_ref(config: Config, tokenizer: PreTrainedTokenizerBase, device: torch.device, fusing: Fusing) -> PreTrainedModel:
    """The reference stays what the run started from, also after a resume: it is never loaded from a checkpoint."""
    key = "ref.path" if config.ref.path else "model.path"
    model = load.load_model(config.model, device, path=config.ref.path, key=key)
    verify(model, key, decodes=False)
    check_tokens(config, model, tokenizer, "ref.path", config.ref.path)
    if config.lora.path and not config.ref.path:
        lora.add_adapters(model, config.lora, config.run.seed, config.lora.path)
    model.requires_grad_(False)
    fusing.fuse("ref", model)
    return model


def check_tokens(config: Config, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, key: str, path: str | None) -> None:
    """A role that reads the actor's token ids must have them, and mean the same by them."""
    load.check_vocabulary(model, tokenizer)
    try:
        other = load.load_tokenizer(config.model, path, key) if path else tokenizer
    except UserError:
        return  # a folder without a tokenizer: its ids are taken to be the actor's
    if other.get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"{key}: {path} has another tokenizer than model.path, and reads the actor's token ids as other text. Use a model with the "
            "actor's tokenizer; only a reward model may have its own"
        )


def exporter(config: Config, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[Callable[[Path], None], int]:
    """The function that writes the actor into a folder, and about how many bytes that takes."""
    everything = sum(parameter.nbytes for parameter in model.parameters())
    if not config.lora.rank:
        return lambda folder: load.export(model, tokenizer, folder, saved_tensors(model)), everything
    if config.lora.export == "merged":
        return lambda folder: load.export(model, tokenizer, folder, lora.merged_tensors(model)), everything
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    return partial(lora.export_adapter, model, tokenizer, base=config.model), trained
