"""What a run refuses before its models load: settings without effect, data, folders of models, tokenizer, packages and device.

Enters: a configuration and its algorithm. Leaves: `RunData`, the data and the tokenizer that read it. Guaranteed: every mistake is a
UserError with its key and remedy, found without loading a model; `find_mistakes` looks at every part even if another one is wrong.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedTokenizerBase

from fulltilt.algo.base import Algorithm
from fulltilt.algo.build import build
from fulltilt.callables import travelling
from fulltilt.cluster.loading import Fusing, make_encoder, shares_model
from fulltilt.data.prompts import PromptSet, load_prompts
from fulltilt.data.sft import RowSet, load_sft
from fulltilt.data.template import TEMPLATE_REMEDY, PromptEncoder
from fulltilt.folders import RUN_MARKER, refuse_foreign
from fulltilt.memory.host import usable_cores
from fulltilt.memory.offload import why_not
from fulltilt.model import load, lora
from fulltilt.model.folder import inspect_adapter
from fulltilt.plan import OFFLOADS, check_context, count_steps, graphs_without_device
from fulltilt.records import Prompt, UserError
from fulltilt.reward.base import RewardPool
from fulltilt.reward.model import RewardEncoder
from fulltilt.rollout.engine import engine_mistakes, why_one_worker
from fulltilt.schema import Config, conditions, keys, shown, uses_reward_model, value_of
from fulltilt.settings import holds, is_set, own_functions
from fulltilt.user_code import UserCodeError

SHARE_DEVICES = "FULLTILT_SHARE_DEVICES"  # the environment variable that allows several workers on one GPU or core, for tests


@dataclass(frozen=True, eq=False)
class TextFacts:
    """What a worker must know of tokenizer and data."""

    tokenizer: PreTrainedTokenizerBase
    ends: frozenset[int]  # tokens that end a response
    longest: int  # tokens of the longest prompt (of the longest row, for SFT), over training and validation
    steps_per_epoch: int


@dataclass(frozen=True, eq=False)
class RunData(TextFacts):
    """The data of a run; for an evaluation, `train` is its validation data too."""

    train: PromptSet | RowSet
    val: PromptSet | RowSet | None
    encoder: RewardEncoder | None  # writes texts for the reward model, where there is one
    notes: tuple[str, ...]  # for the console


@dataclass(frozen=True, eq=False)
class TextCodec:
    """What turns a configuration's prompts into tokens and back."""

    tokenizer: PreTrainedTokenizerBase
    encoder: PromptEncoder
    limit: int | None  # positions that the model was made for

    @classmethod
    def of(cls, config: Config, remedy: str = TEMPLATE_REMEDY) -> TextCodec:
        tokenizer = load.load_tokenizer(config.model)
        return cls(tokenizer, PromptEncoder(tokenizer, config.data, remedy), load.context_limit(load.read_config(config.model)))


def choose_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device = cuda: torch finds no CUDA device here. Use run.device = auto or cpu; `fulltilt doctor` says why")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def find_mistakes(config: Config) -> list[str]:
    """What a run would refuse before its model loads: its folder, model folders, data, reward functions, each of which is called once,
    packages, device."""
    algorithm, prompts = build(config), list[Prompt]()

    def data() -> None:
        if any(text.startswith("model.path:") for text in found):  # its tokenizer reads the data
            return
        read = read_training_data(config, algorithm)
        prompts.extend(prompt for each in (read.train, read.val) if isinstance(each, PromptSet) for prompt in each.items)

    def rewards() -> None:
        if "rollout" in algorithm.needs:
            with closing(RewardPool(config.reward, Path(config.run.dir), write_errors=False)) as pool:
                found.extend(pool.failures_on(prompts))

    def packages() -> None:
        if config.lora.rank:
            lora.require_peft()
        if config.cluster.address:
            require_ray()

    def device() -> None:
        chosen = choose_device(config.run.device)
        found.extend(wrong_settings(config, algorithm, chosen.type))
        Fusing(config, chosen)

    def folder() -> None:
        refuse_foreign(Path(config.run.dir), RUN_MARKER, "run.dir")

    found = list(wrong_models(config, model_paths(config, algorithm)))
    for look in (folder, data, rewards, packages, device):
        try:
            look()
        except UserError as error:
            found.append(str(error))
    return found


def require_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise UserError('cluster.address: workers on several machines need the package ray. pip install "fulltilt[ray]"')


def refuse(mistakes: Iterable[str]) -> None:
    if found := list(mistakes):
        raise UserError("\n".join(found))


def model_paths(config: Config, algorithm: Algorithm, *, learns: bool = True) -> dict[str, str]:
    """The settings of a run that name a model or an adapter, with their values. `learns`: whether it trains, or only evaluates."""
    paths = {
        "model.path": config.model.path,
        "ref.path": learns and "ref_logprobs" in algorithm.needs and config.ref.path,
        "critic.path": learns and algorithm.value_loss and config.critic.path,
        "reward_model.path": uses_reward_model(config) and config.reward_model.path,
        "lora.path": config.lora.rank and config.lora.path,
    }
    return {key: path for key, path in paths.items() if isinstance(path, str)}


def wrong_models(config: Config, paths: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with the files of models, as far as that shows without loading their weights."""
    for key, path in paths.items():
        try:
            if key == "lora.path":
                inspect_adapter(path, key)
            else:
                load.check_model(config.model, path, key, AutoModelForCausalLM if key in ("model.path", "ref.path") else AutoModel)
        except UserError as error:
            yield str(error)


def wrong_settings(config: Config, algorithm: Algorithm, device: str) -> list[str]:
    return [
        *wrong_rollout(config, device),
        *wrong_workers(config, algorithm, device),
        *settings_without_effect(config, algorithm, device),
    ]


def count_workers(config: Config, device: str) -> int:
    given = config.cluster.workers
    return given if given != "auto" else torch.cuda.device_count() if device == "cuda" else 1


def wrong_workers(config: Config, algorithm: Algorithm, device: str) -> Iterator[str]:
    """Workers that there are no devices for, or that the engine or a function of the user does not run on, and keys that only several
    workers obey."""
    workers, most = count_workers(config, device), torch.cuda.device_count() if device == "cuda" else usable_cores()
    if workers > most and config.cluster.address is None and os.environ.get(SHARE_DEVICES) != "1":
        each = "a GPU" if device == "cuda" else "a core"
        has = f"this machine has {most} usable" if device == "cpu" else f"torch sees {most}"
        remedy = f"Use at most {most}, or leave the key out. For tests, {SHARE_DEVICES}=1 lets workers share devices, which is slow"
        yield f"cluster.workers: {workers} workers need {each} each, and {has}. {remedy}"
    yield from unused_by(config, workers)
    if workers * config.cluster.nodes > 1:
        yield from wrong_on_several(config, algorithm)


def unused_by(config: Config, workers: int) -> Iterator[str]:
    """Keys that this number of workers does not obey. Where it is given, they are refused with the configuration."""
    if config.cluster.workers != "auto":
        return
    found = config.model_copy(update={"cluster": config.cluster.model_copy(update={"workers": workers})})
    for key in (key for key in keys() if is_set(config, key)):
        for each in conditions(key):
            if "cluster.workers" in each.reads and not holds(found, each):
                why = f"cluster.workers is auto, which is {workers} here"
                yield f"{key}: {shown(value_of(config, key))} has no effect while {why}. Remove it, or {each.remedy}"


def wrong_on_several(config: Config, algorithm: Algorithm) -> Iterator[str]:
    engine = config.rollout.engine
    if "rollout" in algorithm.needs and (reason := why_one_worker(engine)):
        yield f'rollout.engine: "{engine}" runs on one worker only: {reason}. Set cluster.workers = 1, or use the native engine'
    for function in own_functions(config).values():
        try:
            travelling(function.code)
        except UserCodeError as error:
            yield str(function.wrong(error))


def wrong_rollout(config: Config, device: str) -> Iterator[str]:
    yield from graphs_without_device(config, device)
    yield from engine_mistakes(config)


def settings_without_effect(config: Config, algorithm: Algorithm, device: str) -> Iterator[str]:
    """Settings that have no effect on this device, or with these roles."""
    yield from refused_offloads(config, algorithm, device)
    if not config.train.entropy_recompute and not algorithm.entropy_gradient:
        remedy = "Remove the key" + (", or set algorithm.entropy_coef above 0" if "rollout" in algorithm.needs else "")
        yield f"train.entropy_recompute: false, but the loss has no entropy bonus: nothing is kept for its gradient. {remedy}"
    if config.train.head_recompute != "auto" and not config.train.fused_head:
        yield (
            "train.head_recompute: the head is not fused (train.fused_head), and keeps the logits of a micro-batch in any case. Remove one "
            "of the keys"
        )


def refused_offloads(config: Config, algorithm: Algorithm, device: str) -> Iterator[str]:
    shared = "ref_logprobs" in algorithm.needs and shares_model(config)
    others = algorithm.value_loss or uses_reward_model(config) or ("ref_logprobs" in algorithm.needs and not shared)
    sections = {"train": "actor", "critic": "critic", "ref": "ref", "reward_model": "reward_model"}
    for section, role in sections.items():
        for key in OFFLOADS:
            reason = why_not(key, role, device, alone=not others, shared=role == "ref" and shared)
            if reason and getattr(getattr(config, section), key, None) is True:
                yield f"{section}.{key}: true, but {reason}. Remove the key"


def read_training_data(config: Config, algorithm: Algorithm) -> RunData:
    """The data of a training run. Everything that can be wrong before a model loads is checked."""
    tokenizer = load.load_tokenizer(config.model)
    ends = load.end_tokens(config.model, tokenizer)
    val = read(config.data.val, config, algorithm, tokenizer, ends) if config.data.val else None
    train = read(config.data.train, config, algorithm, tokenizer, ends)
    longest = max(train.longest, val.longest if val else 0)
    prompts = [prompt for data in (train, val) if isinstance(data, PromptSet) for prompt in data.items]
    check_prompts(config, prompts)
    check_lengths(config, algorithm, longest)
    key = "prompts_per_round" if algorithm.dynamic and config.algorithm.prompts_per_round else "prompts_per_step"
    taken_at_once = getattr(config.algorithm, key), f"algorithm.{key}"
    steps_per_epoch = train.steps_per_epoch(*taken_at_once)
    steps = count_steps(config, steps_per_epoch)
    if steps <= algorithm.critic_warmup:
        raise UserError(
            f"algorithm.critic_warmup: only the critic is updated in the first {algorithm.critic_warmup} steps, and the run has {steps}. "
            "Lower it, or ask for more steps"
        )
    notes = (
        f"data: {train.describe()}",
        f"data: {train.describe_epoch(*taken_at_once)}",
        *([f"validation data: {val.describe()}"] if val else []),
    )
    return RunData(tokenizer, ends, longest, steps_per_epoch, train, val, make_encoder(config, prompts), notes)


def read_validation_data(config: Config, algorithm: Algorithm) -> RunData:
    """The data of an evaluation. Fewer settings are checked than in training: some are for data that is not read here."""
    assert config.data.val is not None
    tokenizer = load.load_tokenizer(config.model)
    ends = load.end_tokens(config.model, tokenizer)
    val = read(config.data.val, config, algorithm, tokenizer, ends)
    encoder = make_encoder(config, val.items if isinstance(val, PromptSet) else ())
    return RunData(tokenizer, ends, val.longest, 1, val, val, encoder, (f"validation data: {val.describe()}",))


def read(
    paths: str | list[str], config: Config, algorithm: Algorithm, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int]
) -> PromptSet | RowSet:
    if "rollout" in algorithm.needs:
        return load_prompts(paths, tokenizer, config.data)
    return load_sft(paths, tokenizer, config.data, ends)


def check_lengths(config: Config, algorithm: Algorithm, longest: int) -> None:
    """Every model that reads whole samples must have positions for the longest."""
    for key, path in model_paths(config, algorithm).items():
        if key in ("model.path", "ref.path", "critic.path"):
            whose = "the model" if key == "model.path" else f"the model of {key}"
            limit = load.context_limit(load.read_config(config.model, path, key))
            check_context(config, longest, limit, rollout="rollout" in algorithm.needs, whose=whose)


def check_prompts(config: Config, prompts: Sequence[Prompt]) -> None:
    """Refuse settings for prompts that the data does not have."""
    seen = {prompt.data_source for prompt in prompts}
    unknown = sorted(set(config.reward.sources) - seen)
    if prompts and unknown:  # a misspelling: rows would go to another function
        raise UserError(
            f"reward.sources: no row has the data source {', '.join(map(repr, unknown))}; the data has "
            f"{', '.join(map(repr, sorted(seen)))}. Correct the name or remove it"
        )
    if config.reward_model.chat_template and not any(isinstance(prompt.source, tuple) for prompt in prompts):
        raise UserError("reward_model.chat_template: every prompt is a plain string, which goes through no template. Remove the key")
