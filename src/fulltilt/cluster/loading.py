"""Loading the models of a run's roles: verified, with adapters, fused or compiled, and brought back to a checkpoint.

Enters: a configuration, the names of the roles, and the checkpoint to resume from if any. Leaves: `Models`. Guaranteed: a model is refused
if it does not fit its tokenizer, or if its layers would compute something else than those of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fulltilt.kernels import dispatch
from fulltilt.model import load, lora
from fulltilt.model.attention import LayerShape
from fulltilt.model.compiled import compile_and_compare
from fulltilt.model.forward import in_one_pass
from fulltilt.model.fuse import WrongLayers, fuse_and_compare, fuse_without_memory, saved_tensors
from fulltilt.model.scalar import ScalarModel, load_scalar
from fulltilt.model.stored import stored_weights
from fulltilt.model.verify import verify
from fulltilt.records import Prompt, UserError
from fulltilt.reward.model import RewardEncoder
from fulltilt.schema import Config, LoraConfig, shares_model, shares_parameters, uses_reward_model
from fulltilt.training.checkpoint import Checkpoint

Check = Callable[[PreTrainedModel], dict[int, LayerShape]]  # verifies a model, and returns the shapes of its layers


@dataclass(frozen=True, eq=False)
class Models:
    """The models that were loaded and verified, with fused or compiled layers."""

    own: Mapping[str, torch.nn.Module]  # by role; a reference that is the actor without its adapters has no entry
    layers: Mapping[int, LayerShape]  # the attention shapes of the actor's layers
    fused: str  # whether the layers run fused or compiled, in words

    @property
    def actor(self) -> PreTrainedModel:
        actor = self.own["actor"]
        assert isinstance(actor, PreTrainedModel)
        return actor


class Placing:
    """Gives this worker its part of each role's model, one model after another. This class leaves every model whole."""

    def stored(self, role: str) -> bool:
        """Return whether a role's parameters stay in their files until `divide` or `finish` reads this worker's part of them."""
        return False

    def loaded(self, role: str, model: torch.nn.Module) -> None:
        """Handle a model that has just been loaded, before it gets adapters."""

    def divide(self, role: str, model: torch.nn.Module) -> PreTrainedModel | None:
        """Handle a model that has its adapters, before it is fused. May return a second model, for the engine, to be fused too."""
        return None

    def finish(self, role: str, model: torch.nn.Module) -> None:
        """Handle a fused model, before the next one is loaded. The model has its parameters afterwards."""

    def rest(self, role: str) -> None:
        """Clean up after passes of a finished model."""


def load_models(
    config: Config, roles: Collection[str], tokenizer: PreTrainedTokenizerBase, device: torch.device, encoder: RewardEncoder | None,
    resume: Checkpoint | None, *, sampled: bool, actor: bool = True, order: Sequence[str] = (), placing: Placing | None = None,
) -> Models:  # fmt: skip
    """Load the actor, unless other workers have it, and the models of `roles`; with an `encoder`, the reward model too. `sampled`: whether
    the run samples from the actor. `order`: the order in which to load the roles."""
    fusing, layers = Fusing(config, device, placing, learns=bool(roles)), dict[int, LayerShape]()

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
        fusing.finish(role, own[role])
    return Models({role: own[role] for role in loaders}, layers, fusing.words())


class Fusing:
    """Divides each role's model if asked to, verifies it, fuses or compiles its layers as `train.fused_layers` and `train.compile` say, and
    keeps the results for the plan's words. Only one of them may replace a layer's forward: where both could, the user's setting wins over
    auto."""

    def __init__(self, config: Config, device: torch.device, placing: Placing | None = None, *, learns: bool = False) -> None:
        self.placing = placing or Placing()
        self.wanted = config.train.fused_layers
        self.compiles = config.train.compile is True
        self.off: str | None = None  # the reason if nothing is fused
        self.found: dict[str, str] = {}  # by role, how its layers run
        self.unverified: dict[str, Check] = {}  # how to verify each model that has no parameters yet
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

    def loaded(self, role: str, model: PreTrainedModel | ScalarModel, check: Check) -> dict[int, LayerShape]:
        """Verify a loaded model. Call it before the model gets adapters. A model whose parameters are in files is verified as soon as this
        worker has its part of them. Returns the shapes of the layers, if the model is verified here."""
        self.placing.loaded(role, model)
        if stored_weights(model) is None:
            return check(body_of(model))
        self.unverified[role] = check
        return {}

    def fuse(self, role: str, whole: PreTrainedModel | ScalarModel) -> dict[int, LayerShape]:
        """Fuse a model's layers. Call it once the model has its adapters, and before anything keeps an address: optimizer, engine, graphs.
        Returns the shapes of the layers, if the model is verified here."""
        also = self.placing.divide(role, whole)
        model, reason, layers = body_of(whole), None, dict[int, LayerShape]()
        complete = stored_weights(whole) is None
        if role in self.unverified and (also is not None or complete):
            layers = whole_layers(self.unverified.pop(role)(model if also is None else also), model)
        try:
            if also is not None and self.off is None:
                fuse_and_compare(also)
            if self.compiles:
                self.found[role] = compile_and_compare(model)
            elif self.off is None:
                report = fuse_and_compare(model) if complete else fuse_without_memory(model)
                self.found[role] = f"{report}{self.aside if report.joined else ''}"
                # Another role may be of another family; for the actor's family, the key would have no effect.
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
        return layers

    def finish(self, role: str, whole: torch.nn.Module) -> None:
        """Shard the model if asked to, and verify it now if that was not possible before."""
        self.placing.finish(role, whole)
        if check := self.unverified.pop(role, None):
            check_shared(whole, check)
            self.placing.rest(role)

    def words(self) -> str:
        if self.off is not None and not self.compiles:
            return f"not fused: {self.off}"
        # in a fixed order, even if roles are loaded in another one
        found = {role: self.found[role] for role in ("reward_model", "actor", "critic", "ref") if role in self.found}
        roles = {text: [role for role, other in found.items() if other == text] for text in found.values()}
        return "; ".join(f"{text} ({', '.join(names)})" for text, names in roles.items())


def body_of(model: torch.nn.Module) -> PreTrainedModel:
    """Return transformers' part of a critic or reward model; any other model is returned as it is."""
    found = model.body if isinstance(model, ScalarModel) else model
    assert isinstance(found, PreTrainedModel)
    return found


def whole_layers(layers: Mapping[int, LayerShape], model: PreTrainedModel) -> dict[int, LayerShape]:
    """Return the shapes of the whole model's layers, from those of a member's part."""
    whole = load.shape_of(model.config).layers
    return {index: replace(shape, key_heads=whole[index].key_heads) for index, shape in layers.items()}


def check_shared(model: torch.nn.Module, check: Check) -> None:
    """Verify a sharded model. Layers of a body alone would get their parameters only inside a pass of the whole model."""
    with torch.no_grad():
        if isinstance(model, ScalarModel):
            in_one_pass(model, lambda: check(model.body))
        else:
            check(body_of(model))


def load_actor(
    config: Config, tokenizer: PreTrainedTokenizerBase, device: torch.device, resume: Checkpoint | None, fusing: Fusing, *, decodes: bool
) -> tuple[PreTrainedModel, dict[int, LayerShape]]:
    """Load the model that is trained and sampled from. With adapters, the base is the one that the run started from: the checkpoint has
    only the adapters."""
    adapters = config.lora.rank > 0
    path = resume.model_folder if resume and not adapters else None
    model = load.load_model(config.model, device, path=path, stored=fusing.placing.stored("actor"))
    load.check_vocabulary(model, tokenizer)
    layers = fusing.loaded("actor", model, partial(verify, decodes=decodes))
    if adapters:
        lora.add_adapters(model, config.lora, config.run.seed, config.lora.path)
    return model, fusing.fuse("actor", model) or layers


def load_critic(config: Config, tokenizer: PreTrainedTokenizerBase, device: torch.device, fusing: Fusing) -> ScalarModel:
    """Load the critic. Its body is loaded from where the run started, also after a resume; what it has learned is in the checkpoint's
    tensors."""
    key, stored = "critic.path" if config.critic.path else "model.path", fusing.placing.stored("critic")
    model = load_scalar(config.model, device, config.critic.path, key=key, head="new", stored=stored)
    if stored:
        fusing.loaded("critic", model, partial(verify, key=key))
    check_tokens(config, model.body, tokenizer, "critic.path", config.critic.path)
    if config.lora.rank and config.lora.critic:
        lora.add_adapters(model.body, of_body(config.lora, model.body), config.run.seed)
    fusing.fuse("critic", model)
    return model


def of_body(settings: LoraConfig, body: PreTrainedModel) -> LoraConfig:
    """Return the settings with the names that layers have in a model without a language head."""
    prefix = f"{body.base_model_prefix}."
    targets = settings.targets if isinstance(settings.targets, str) else [name.removeprefix(prefix) for name in settings.targets]
    return settings.model_copy(update={"targets": targets, "parameters": [name.removeprefix(prefix) for name in settings.parameters]})


def make_encoder(config: Config, prompts: Sequence[Prompt]) -> RewardEncoder | None:
    """Make the reward model's tokenizer and template, which may not fit the data; None if no prompt is scored by a reward model."""
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
    key, stored = "reward_model.path", fusing.placing.stored("reward_model")
    model = load_scalar(config.model, device, path, key=key, head="required", stored=stored)
    if stored:
        fusing.loaded("reward_model", model, partial(verify, key=key))
    load.check_vocabulary(model.body, encoder.tokenizer)
    model.requires_grad_(False)
    fusing.fuse("reward_model", model)
    return model


def load_ref(config: Config, tokenizer: PreTrainedTokenizerBase, device: torch.device, fusing: Fusing) -> PreTrainedModel:
    """Load the reference, which is always the model that the run started from, also after a resume, and never one from a checkpoint."""
    key = "ref.path" if config.ref.path else "model.path"
    model = load.load_model(config.model, device, path=config.ref.path, key=key, stored=fusing.placing.stored("ref"))
    fusing.loaded("ref", model, partial(verify, key=key, decodes=False))
    check_tokens(config, model, tokenizer, "ref.path", config.ref.path)
    if config.lora.path and not config.ref.path:
        lora.add_adapters(model, config.lora, config.run.seed, config.lora.path)
    model.requires_grad_(False)
    fusing.fuse("ref", model)
    return model


def check_tokens(config: Config, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, key: str, path: str | None) -> None:
    """Check that a role that reads the actor's token ids has all of them, with the same meaning."""
    load.check_vocabulary(model, tokenizer)
    try:
        other = load.load_tokenizer(config.model, path, key) if path else tokenizer
    except UserError:
        return  # without a tokenizer in the folder, its ids are assumed to be the actor's
    if other.get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"{key}: {path} has another tokenizer than model.path, and reads the actor's token ids as other text. Use a model with the "
            "actor's tokenizer; only a reward model may have its own"
        )


def exporter(config: Config, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[Callable[[Path], None], int]:
    """Return a function that writes the actor into a folder, and about how many bytes that takes."""
    everything = sum(parameter.nbytes for parameter in model.parameters())
    if not config.lora.rank:
        return lambda folder: load.export(model, tokenizer, folder, saved_tensors(model)), everything
    if config.lora.export == "merged":
        return lambda folder: load.export(model, tokenizer, folder, lora.merged_tensors(model)), everything
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    return partial(lora.export_adapter, model, tokenizer, base=config.model), trained
