"""Low-rank adapters, through peft.

Enters: a loaded model and the settings of `[lora]`. Leaves: the same model object with adapters, which are its only trainable parameters,
and its exports. Guaranteed: the same seed gives the same adapters on every device; rollout and training run the same unmerged layers; with
the adapters off the model is the base model bit for bit; no export changes a parameter; names that match nothing, and layers whose adapter
would have no effect, are refused.
"""

from __future__ import annotations

import contextlib
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fulltilt.blame import says_nothing
from fulltilt.model import experts
from fulltilt.model.folder import inspect_adapter
from fulltilt.model.load import refuse_not_finite
from fulltilt.model.stored import standing_in
from fulltilt.records import UserError
from fulltilt.schema import LoraConfig, ModelConfig
from fulltilt.words import first_line, listed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAME = "default"  # name of the model's one adapter; peft leaves this name out of its files
PREFIX = "base_model.model."  # peft puts it before every name in its files
LINEAR = (torch.nn.Linear, Conv1D)
# Settings of a plain low-rank adapter. Any other value makes a saved adapter more than that.
PLAIN: dict[str, Any] = {
    "use_dora": False, "lora_bias": False, "bias": "none", "modules_to_save": None, "trainable_token_indices": None,
    "layer_replication": None, "megatron_config": None,
}  # fmt: skip


def add_adapters(model: PreTrainedModel, config: LoraConfig, seed: int, path: str | None = None) -> None:
    """Put adapters into the model, in the type of their layers, and freeze everything else. `path`: an adapter to start from, as peft saves
    it."""
    peft = require_peft()
    if path:
        inspect_adapter(path, "lora.path")
    settings = stored_settings(model, path) if path else fresh_settings(model, config)
    layers, parameters = targeted_layers(model, settings), targeted_parameters(model, settings)
    if not layers and not parameters:
        raise UserError("lora.targets and lora.parameters: both lists are empty, there is nothing to adapt. Name a layer or a parameter")
    if path:
        refuse_other_settings(model, config, settings, path)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), standing_in(model):
            warnings.simplefilter("ignore")  # everything that peft warns about is checked here
            torch.default_generator.manual_seed(seed)
            peft.inject_adapter_in_model(settings, model, NAME)
    except ValueError as error:
        raise UserError(
            f"lora: peft cannot adapt these layers of {type(model).__name__}: {first_line(error)}. Name others in [lora]"
        ) from error
    refuse_other_layers(model, layers, parameters)
    if path:
        read_adapter(model, path)
    run_with_experts(model)


@contextlib.contextmanager
def without_adapters(model: PreTrainedModel) -> Iterator[None]:
    """Run as the base model inside the context, so that the reference role of a run with adapters needs no copy."""
    layers = [layer for _, layer in adapted(model)]
    assert layers, "the model has no adapters"
    # peft's own `enable_adapters` also changes which parameters are trained: parameters that are gathered meanwhile would keep the change.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def export_adapter(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, base: ModelConfig) -> None:
    """Write the adapter and the tokenizer as peft does. `base` names the model that the adapter belongs to."""
    from peft import get_peft_model_state_dict

    folder.mkdir(parents=True, exist_ok=True)
    tensors = get_peft_model_state_dict(model, adapter_name=NAME, save_embedding_layers=False)
    plain = {f"{PREFIX}{name}": tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(plain, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = model.peft_config[NAME].to_dict() | {
        "base_model_name_or_path": str(Path(base.path).resolve()) if Path(base.path).is_dir() else base.path,
        "revision": base.revision,
        "task_type": "CAUSAL_LM",
        "inference_mode": True,  # as peft writes it: training must be asked for when the adapter is loaded
    }
    settings = {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True), encoding="utf-8")
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def merged_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the model's tensors for `export`, under their names without adapters. Tensors with an adapter have it added: they are new, in
    main memory, summed in float32 or better and rounded once. All others are the model's own."""
    layers = {f"{plain_name(name)}.{target_of(layer)}": layer for name, layer in adapted(model)}
    own = {f"{name}.lora_{side}.{NAME}.weight" for name, _ in adapted(model) for side in "AB"}
    tensors = {plain_name(name): tensor for name, tensor in model.state_dict().items() if name not in own}
    assert layers.keys() <= tensors.keys()
    return {name: with_adapter(layers[name], tensor) if name in layers else tensor for name, tensor in tensors.items()}


def with_adapter(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(weight.dtype, torch.float32)
    if weight.ndim == 3:  # stacked experts
        left, right, scale = layer.get_delta_factors(NAME)
        merged = torch.baddbmm(weight.to(wide), left.to(wide), right.to(wide), alpha=scale)
    else:
        delta = layer.lora_B[NAME].weight.to(wide) @ layer.lora_A[NAME].weight.to(wide)
        merged = weight.to(wide) + layer.scaling[NAME] * (delta.t() if layer.fan_in_fan_out else delta)
    return merged.to(weight.dtype).cpu()


# ---- stacked experts ---------------------------------------------------------------------------------------------------------------


def run_with_experts(model: torch.nn.Module) -> None:
    """Let `run_experts` run the adapters of stacked experts as separate products. peft would add them to a copy of the parameter, in every
    pass, and keep the copy for the backward pass."""
    for _, layer in adapted(model):
        module, name = layer.get_base_layer(), target_of(layer)
        if experts.takes_adapter(module, name):
            setattr(module, experts.ADAPTERS, {**getattr(module, experts.ADAPTERS, {}), name: layer})
            layer.forward = MethodType(pass_through, layer)


def pass_through(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of an adapter on experts: peft's own if the experts run through another implementation."""
    run = self.base_layer if experts.runs_here(self.get_base_layer()) else MethodType(type(self).forward, self)
    return run(*args, **kwargs)


# ---- settings and the layers they name ---------------------------------------------------------------------------------------------


def fresh_settings(model: PreTrainedModel, config: LoraConfig) -> Any:
    alpha = 2 * config.rank if config.alpha is None else config.alpha
    targets = all_linear(model) if config.targets == "all-linear" else config.targets
    # No dropout: training would disagree with the rollout, which runs the same layers.
    return require_peft().LoraConfig(
        r=config.rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=targets, target_parameters=config.parameters or None
    )


def stored_settings(model: PreTrainedModel, path: str) -> Any:
    """Return the settings of an adapter that peft saved."""
    peft = require_peft()
    try:
        settings = peft.PeftConfig.from_pretrained(path)
    except Exception as error:  # any error that peft raises for unexpected values
        if says_nothing(error):
            raise
        raise UserError(
            f"lora.path: the adapter in {path} could not be read: {first_line(error)}. Give the folder of an adapter that peft saved"
        ) from error
    if not isinstance(settings, peft.LoraConfig):
        raise UserError(f"lora.path: {path} holds an adapter of type {settings.peft_type}; only LoRA can be trained here")
    odd = [f"{name} = {getattr(settings, name)}" for name, plain in PLAIN.items() if getattr(settings, name, plain) not in (plain, [], ())]
    if isinstance(settings.init_lora_weights, str) and settings.init_lora_weights != "gaussian":
        odd.append(f"init_lora_weights = {settings.init_lora_weights}")  # the adapter's base weights are not the model's own
    if odd:
        raise UserError(
            f"lora.path: the adapter in {path} is not plain LoRA ({', '.join(odd)}). Use a plain one, or merge it into its model"
        )
    settings.lora_dropout, settings.inference_mode, settings.init_lora_weights = 0.0, False, True
    if settings.target_modules in (None, "all-linear"):
        settings.target_modules = set(all_linear(model)) if settings.target_modules else set()
    return settings


def refuse_other_settings(model: PreTrainedModel, config: LoraConfig, stored: Any, path: str) -> None:
    """Refuse settings that differ from those of the adapter that the run starts from. Settings that are left out are the adapter's."""
    fresh, given, wrong = fresh_settings(model, config), config.model_fields_set, []
    if config.rank != stored.r:
        wrong.append(f"lora.rank is {config.rank}, the adapter's is {stored.r}")
    if config.alpha is not None and config.alpha != stored.lora_alpha:
        wrong.append(f"lora.alpha is {config.alpha:g}, the adapter's is {stored.lora_alpha:g}")
    if "targets" in given and targeted_layers(model, fresh).keys() != targeted_layers(model, stored).keys():
        wrong.append("lora.targets names other layers than the adapter has")
    if "parameters" in given and targeted_parameters(model, fresh) != targeted_parameters(model, stored):
        wrong.append("lora.parameters names other parameters than the adapter has")
    if wrong:
        raise UserError(
            f"lora.path: {path} does not fit the settings: {'; '.join(wrong)}. Correct them, or leave out those that are optional"
        )


def targeted_layers(model: PreTrainedModel, settings: Any) -> dict[str, torch.nn.Module]:
    """Return the layers that get an adapter, by name, matched by peft's own rule."""
    from peft.tuners.tuners_utils import check_target_module_exists

    modules = {name: module for name, module in model.named_modules() if name}
    for target in settings.target_modules if isinstance(settings.target_modules, set) else ():
        if not any(ends_in(name, target) for name in modules):
            raise UserError(f"lora.targets: {type(model).__name__} has no layer {target!r}. {linear_layers(model)}")
    layers = {name: module for name, module in modules.items() if check_target_module_exists(settings, name)}
    for name, module in layers.items():
        refuse_embedding(model, "lora.targets", name, getattr(module, "weight", None))
        if not isinstance(module, LINEAR):
            raise UserError(f"lora.targets: {name} is a {type(module).__name__}, not a linear layer. {linear_layers(model)}")
    return layers


def targeted_parameters(model: PreTrainedModel, settings: Any) -> set[str]:
    parameters = dict(model.named_parameters())
    found: set[str] = set()
    for target in settings.target_parameters or ():
        matches = [name for name in parameters if ends_in(name, target)]
        if not matches:
            stacked = sorted({re.sub(r".*\.\d+\.", "", name) for name, parameter in parameters.items() if parameter.ndim == 3})
            known = f"Its stacked parameters: {', '.join(stacked)}" if stacked else "It has no stacked experts"
            raise UserError(f"lora.parameters: {type(model).__name__} has no parameter {target!r}. {known}")
        for name in matches:
            refuse_embedding(model, "lora.parameters", name, parameters[name])
            if parameters[name].ndim not in (2, 3):
                raise UserError(
                    f"lora.parameters: {name} has the shape {list(parameters[name].shape)}; an adapter needs a matrix or a stack"
                )
        found.update(matches)
    return found


def refuse_embedding(model: PreTrainedModel, key: str, name: str, weight: Any) -> None:
    for layer in (model.get_output_embeddings(), model.get_input_embeddings()):
        if layer is not None and weight is layer.weight:
            raise UserError(
                f"{key}: {name} is an embedding. Log-probs are computed from its weight itself, so an adapter on it would have no effect. "
                "Leave it out"
            )


def refuse_other_layers(model: PreTrainedModel, layers: dict[str, torch.nn.Module], parameters: set[str]) -> None:
    """Refuse names that peft takes for those of experts, which were separate layers in earlier versions of some architectures."""
    found = {(plain_name(name), getattr(layer, "parameter_name", None)) for name, layer in adapted(model)}
    wanted = {(name, None) for name in layers} | {(name.rpartition(".")[0], name.rpartition(".")[2]) for name in parameters}
    if found != wanted:
        odd = sorted({name for name, _ in found ^ wanted})
        raise UserError(
            f"lora.targets: peft takes some of these names for the stacked experts of {type(model).__name__} and would not adapt the "
            f"layers meant ({listed(odd, 3)}). List targets without them; name experts in lora.parameters"
        )


def all_linear(model: PreTrainedModel) -> list[str]:
    """Return names that match every linear layer except the head and nothing else; short names if they suffice."""
    head = model.get_output_embeddings()
    layers = [name for name, module in model.named_modules() if isinstance(module, LINEAR) and module is not head]
    short = sorted({name.rpartition(".")[2] for name in layers})
    matched = [name for name, _ in model.named_modules() if any(ends_in(name, target) for target in short)]
    return short if matched == layers else layers


def linear_layers(model: PreTrainedModel) -> str:
    return f"Its linear layers: {', '.join(sorted({name.rpartition('.')[2] for name in all_linear(model)}))}"


# ---- names and files of peft -------------------------------------------------------------------------------------------------------


def require_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise UserError('lora.rank: adapters need the package peft, which is not installed. pip install "fulltilt[peft]"') from error
    from peft.tuners.lora import layer

    if not hasattr(layer.ParamWrapper, "get_delta_factors"):  # adapters on stacked experts run through it
        raise UserError(f'lora.rank: peft {peft.__version__} is too old, 0.21 is needed. pip install "fulltilt[peft]"')
    return peft


def adapted(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield every layer with an adapter, with its current name in the model."""
    from peft.tuners.lora import LoraLayer

    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))


def plain_name(name: str) -> str:
    """Return a name without peft's parts: model.layers.0.mlp.experts.base_layer.base_layer.down_proj ->
    model.layers.0.mlp.experts.down_proj"""
    return name.replace(".base_layer", "")


def target_of(layer: Any) -> str:
    return str(getattr(layer, "parameter_name", "weight"))


def ends_in(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def read_adapter(model: PreTrainedModel, path: str) -> None:
    from peft import load_peft_weights, set_peft_model_state_dict

    if not any((Path(path) / file).is_file() for file in ("adapter_model.safetensors", "adapter_model.bin")):
        raise UserError(f"lora.path: {path} has no adapter_model.safetensors. Give the folder of an adapter that peft saved")
    try:
        report: Any = set_peft_model_state_dict(model, load_peft_weights(path, device="cpu"), adapter_name=NAME)
    except Exception as error:  # peft, safetensors, pickle and torch each raise their own
        if says_nothing(error):
            raise
        raise misfit(path, " ".join(str(error).split())[:300] or type(error).__name__) from error
    if odd := [*report.unexpected_keys, *(name for name in report.missing_keys if ".lora_" in name)]:
        raise misfit(path, listed(odd, 3))
    refuse_not_finite(((name, tensor) for name, tensor in model.named_parameters() if ".lora_" in name), path, "lora.path")


def misfit(path: str, why: str) -> UserError:
    return UserError(f"lora.path: the adapter in {path} does not fit the model: {why}. Give an adapter of model.path")
