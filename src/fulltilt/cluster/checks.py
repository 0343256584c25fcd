"""Checks before a run's models load: settings without effect, data, folders of models, tokenizer, packages and device.

Enters: a configuration and its algorithm. Leaves: `RunData`, the data and the tokenizer that read it. Guaranteed: every mistake is a
UserError with its key and remedy, found without loading a model; `find_mistakes` looks at every part even if another one is wrong.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedTokenizerBase

from fulltilt.algo.base import Algorithm
from fulltilt.algo.build import build
from fulltilt.callables import travelling
from fulltilt.cluster.address import find_cluster, is_joined
from fulltilt.cluster.divisible import WantedDivision, why_not_divisible
from fulltilt.cluster.keeper import SHARE_DEVICES, free_shared_memory, may_share_devices, wrong_shared_memory
from fulltilt.cluster.loading import Fusing, make_encoder
from fulltilt.data.prompts import GROUND_TRUTHS, PromptSet, load_prompts
from fulltilt.data.sft import RowSet, load_sft
from fulltilt.data.template import TEMPLATE_REMEDY, PromptEncoder
from fulltilt.folders import RUN_MARKER, refuse_foreign
from fulltilt.memory.host import usable_cores
from fulltilt.model import load, lora
from fulltilt.model.folder import inspect_adapter
from fulltilt.parallel.cuts import (
    expert_counts,
    why_not_experts,
)
from fulltilt.parallel.cuts import why_not as why_not_divided
from fulltilt.plan.cache import graphs_without_device
from fulltilt.plan.decisions import count_steps, size_key, unless_auto
from fulltilt.plan.legal import (
    count_workers,
    given_division,
    has_whole_experts,
    illegal_settings,
    knows_workers,
    roles_with_models,
    wrong_counts,
)
from fulltilt.plan.make import check_context
from fulltilt.records import Prompt, UserError
from fulltilt.reward.base import RewardPool
from fulltilt.reward.model import RewardEncoder
from fulltilt.rollout.engine import engine_mistakes, why_one_worker
from fulltilt.schema import Config, shown, uses_reward_model
from fulltilt.settings import own_functions
from fulltilt.shape import Shape
from fulltilt.user_code import UserCodeError
from fulltilt.words import listed, many

ROWS_TOLD = 5  # most bad rows of a data set that messages name: a mistake is often in every row


@dataclass(frozen=True, eq=False)
class TextFacts:
    """Facts about tokenizer and data that a worker needs."""

    tokenizer: PreTrainedTokenizerBase
    ends: frozenset[int]  # tokens that end a response
    longest: int  # tokens of the longest prompt (of the longest row, for SFT), over training and validation
    steps_per_epoch: int


@dataclass(frozen=True, eq=False)
class RunData(TextFacts):
    """The data of a run. In an evaluation, `train` is its validation data too."""

    train: PromptSet | RowSet
    val: PromptSet | RowSet | None
    encoder: RewardEncoder | None  # writes texts for the reward model, if there is one
    notes: tuple[str, ...]  # lines for the console

    @property
    def prompt_sets(self) -> dict[str, PromptSet]:
        """The data sets that have prompts, by the settings that name them."""
        sets = {"data.val": self.val} if self.train is self.val else {"data.train": self.train, "data.val": self.val}
        return {key: each for key, each in sets.items() if isinstance(each, PromptSet)}


@dataclass(frozen=True, eq=False)
class TextCodec:
    """Turns a configuration's prompts into tokens and back."""

    tokenizer: PreTrainedTokenizerBase
    encoder: PromptEncoder
    limit: int | None  # the model's positions

    @classmethod
    def of(cls, config: Config, remedy: str = TEMPLATE_REMEDY) -> TextCodec:
        tokenizer = load.load_tokenizer(config.model)
        return cls(tokenizer, PromptEncoder(tokenizer, config.data, remedy), load.context_limit(load.read_config(config.model)))


def choose_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device = cuda: torch finds no CUDA device here. Use run.device = auto or cpu; `fulltilt doctor` says why")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def find_mistakes(config: Config, wrong_rows: Callable[[RunData], Iterable[str]] = lambda data: ()) -> list[str]:
    """List what a run would refuse before its model loads: folders, data, reward functions (each is called once), packages and device.
    `wrong_rows`: further mistakes in the data."""
    algorithm, prompt_sets = build(config), dict[str, PromptSet]()

    def data() -> None:
        if any(text.startswith("model.path:") for text in found):  # the data is read with its tokenizer
            return
        try:
            read = read_training_data(config, algorithm)
        except UserError as error:
            readable, mistakes = read_what_can_be(config, algorithm)
            prompt_sets.update(readable)
            found.extend(mistakes if str(error) in mistakes else [str(error), *mistakes])
        else:
            prompt_sets.update(read.prompt_sets)
            found.extend(wrong_rows(read))

    def rewards() -> None:
        if "rollout" in algorithm.needs:
            with closing(RewardPool(config.reward, Path(config.run.dir), write_errors=False)) as pool:
                prompts: list[Prompt] = []
                for key, each in prompt_sets.items():
                    lacking = list(missing_truths(key, each, pool))
                    found.extend(text for text, all_lack_it in lacking if all_lack_it)
                    prompts.extend(() if any(all_lack_it for _, all_lack_it in lacking) else each.items)
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
    """Return the settings of a run that name a model or an adapter, with their values. `learns`: whether the run trains, or only
    evaluates."""
    paths = {
        "model.path": config.model.path,
        "ref.path": learns and "ref_logprobs" in algorithm.needs and config.ref.path,
        "critic.path": learns and algorithm.value_loss and config.critic.path,
        "reward_model.path": uses_reward_model(config) and config.reward_model.path,
        "lora.path": config.lora.rank and config.lora.path,
    }
    return {key: path for key, path in paths.items() if isinstance(path, str)}


def commits_of_models(config: Config, paths: Mapping[str, str]) -> dict[str, str]:
    """Return the current commit of each model on the hub, by name. `paths`: from `model_paths`; an adapter is always a folder."""
    return load.commits_of(config.model, {key: path for key, path in paths.items() if key != "lora.path"})


def wrong_models(config: Config, paths: Mapping[str, str]) -> Iterator[str]:
    """List what is wrong with the files of models, as far as this shows without loading weights."""
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
        *illegal_settings(config, algorithm, device, lambda role: shape_of_role(config, role)),
        *wrong_modules(config, algorithm, device),
    ]


def shape_of_role(config: Config, role: str) -> Shape:
    """Return the shape of a role's model."""
    return load.shape_of(load.read_config(config.model, None if role == "actor" else getattr(config, role).path))


def wrong_modules(config: Config, algorithm: Algorithm, device: str) -> Iterator[str]:
    """List models whose modules cannot be divided as the user asks, where their shapes do not show it. Mistakes that shapes show are
    reported from the shapes, once the number of workers is known."""
    known, said = knows_workers(config), set[str]()
    if known and count_workers(config, device) * config.cluster.nodes == 1:  # such keys have no effect, and another message says so
        return
    for wanted, shape in divisions_asked_for(config, algorithm):
        if wanted.key in said or (known and told_by_shape(shape, wanted)):  # one message for all roles that follow the key
            continue
        if told := why_not_divisible(config, wanted):
            if told not in said:  # mistakes about adapters are the same whichever key divides them
                yield told
            said |= {wanted.key, told}


def divisions_asked_for(config: Config, algorithm: Algorithm) -> Iterator[tuple[WantedDivision, Shape]]:
    """Yield how the user wants to divide each role's model, and the model that an engine reads, with their shapes."""
    division, sampling = given_division(config), unless_auto(config.rollout.tensor_parallel, 1)
    for role in roles_with_models(config, algorithm):
        own = division.of(config, role)
        with suppress(UserError):  # reported for the model itself
            shape = shape_of_role(config, role)
            if own.tensor > 1:
                yield WantedDivision(size_key(config, role, "tensor_parallel"), role, own.tensor, of_layers(own.experts > 1)), shape
            elif own.experts > 1 and expert_counts(shape):
                yield WantedDivision(size_key(config, role, "expert_parallel"), role, own.experts, "experts"), shape
            if role == "actor" and sampling > 1 and "rollout" in algorithm.needs:
                key = "rollout.tensor_parallel"
                yield WantedDivision(key, role, sampling, of_layers(has_whole_experts(config, key, sampling, shape))), shape


def of_layers(whole_experts: bool) -> Literal["layers", "layers, whole experts"]:
    return "layers, whole experts" if whole_experts else "layers"


def told_by_shape(shape: Shape, wanted: WantedDivision) -> bool:
    """Return whether a model's sizes alone show that it cannot be divided this way."""
    whole, of_experts = wanted.how != "layers" and bool(expert_counts(shape)), why_not_experts(shape, wanted.size)
    if wanted.how == "experts":
        return of_experts is not None
    return why_not_divided(shape, wanted.size, whole_experts=whole) is not None or (whole and of_experts is not None)


def wrong_workers(config: Config, algorithm: Algorithm, device: str) -> Iterator[str]:
    """List mistakes about workers: too few devices, an engine or a user's function that does not run on several, and keys that only several
    workers obey."""
    workers = count_workers(config, device)
    if config.cluster.address is None:
        yield from too_many_here(workers, device)
    yield from wrong_counts(config, algorithm, device)
    if workers * config.cluster.nodes > 1:
        yield from wrong_on_several(config, algorithm)


def too_many_here(workers: int, device: str) -> Iterator[str]:
    """Refuse more workers than this machine has devices, or more than fit into its shared memory."""
    most = torch.cuda.device_count() if device == "cuda" else usable_cores()
    if workers > most and not may_share_devices():
        each = "a GPU" if device == "cuda" else "a core"
        has = f"this machine has {most} usable" if device == "cpu" else f"torch sees {most}"
        remedy = f"Use at most {most}, or leave the key out. For tests, {SHARE_DEVICES}=1 lets workers share devices, which is slow"
        yield f"cluster.workers: {workers} workers need {each} each, and {has}. {remedy}"
    if device == "cuda" and workers <= most:  # workers that share a GPU do not use NCCL
        yield from wrong_shared_memory(free_shared_memory(), workers)


def open_address(config: Config, device: str) -> str | None:
    """Return the address of the run's Ray cluster; None if the run needs none, or starts its own. Refuses an address at which no cluster
    answers. Call it before reading data."""
    settings = config.cluster
    if settings.address is None or is_joined():
        return None
    require_ray()
    if found := find_cluster(settings.address, settings.nodes):
        return found
    refuse(too_many_here(count_workers(config, device), device))
    return None


def wrong_rollout(config: Config, device: str) -> Iterator[str]:
    yield from graphs_without_device(config, device)
    yield from engine_mistakes(config)


def wrong_on_several(config: Config, algorithm: Algorithm) -> Iterator[str]:
    engine = config.rollout.engine
    if "rollout" in algorithm.needs and (reason := why_one_worker(engine)):
        yield f'rollout.engine: "{engine}" runs on one worker only: {reason}. Set cluster.workers = 1, or use the native engine'
    for function in own_functions(config).values():
        try:
            travelling(function.code)
        except UserCodeError as error:
            yield str(function.wrong(error))


def read_training_data(config: Config, algorithm: Algorithm) -> RunData:
    """Read the data of a training run, and check everything that can be wrong before a model loads."""
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


def read_what_can_be(config: Config, algorithm: Algorithm) -> tuple[dict[str, PromptSet], list[str]]:
    """Return the prompts of rows without mistakes, and messages about the others: the first few of each data set, and how many more there
    are."""
    found: dict[str, PromptSet] = {}
    mistakes: list[str] = []
    for key, paths in (("data.val", config.data.val), ("data.train", config.data.train)):
        wrong: list[str] = []
        try:
            tokenizer = load.load_tokenizer(config.model)
            data = read(paths or [], config, algorithm, tokenizer, load.end_tokens(config.model, tokenizer), wrong) if paths else None
            found |= {key: data} if isinstance(data, PromptSet) else {}
        except UserError as error:
            wrong.append(str(error))
        more = f"{key}: {many(len(wrong) - ROWS_TOLD, 'more row')} with mistakes"
        mistakes += dict.fromkeys(wrong if len(wrong) <= ROWS_TOLD else [*wrong[:ROWS_TOLD], more])
    return found, list(dict.fromkeys(mistakes))


def read_validation_data(config: Config, algorithm: Algorithm) -> RunData:
    """Read the data of an evaluation. Checks fewer settings than for training, since some are about data that is not read here."""
    assert config.data.val is not None
    tokenizer = load.load_tokenizer(config.model)
    ends = load.end_tokens(config.model, tokenizer)
    val = read(config.data.val, config, algorithm, tokenizer, ends)
    encoder = make_encoder(config, val.items if isinstance(val, PromptSet) else ())
    return RunData(tokenizer, ends, val.longest, 1, val, val, encoder, (f"validation data: {val.describe()}",))


def check_truths(data: RunData, reward: RewardPool) -> list[str]:
    """Refuse data in which no row has the ground truth that a reward function requires. Returns notes on data in which only some rows lack
    it."""
    found = [each for key, prompts in data.prompt_sets.items() for each in missing_truths(key, prompts, reward)]
    refuse(text for text, all_lack_it in found if all_lack_it)
    return [text for text, _ in found]


def missing_truths(key: str, prompts: PromptSet, reward: RewardPool) -> Iterator[tuple[str, bool]]:
    """Yield a message for each reward function whose required ground truth is missing in some rows, and whether it is missing in all."""
    scored, missing = Counter[str](), Counter[str]()
    needing = {source: reward.need_truth(source) for source in {prompt.data_source for prompt in prompts.items}}
    for prompt in prompts.items:
        scored.update(needing[prompt.data_source])
        missing.update(needing[prompt.data_source] if prompt.ground_truth is None else ())
    for name, lacking in missing.items():
        if lacking < scored[name]:
            of = f"{lacking} of the {many(scored[name], 'row')} that {name} scores"
            yield f"{key}: {of} have no ground truth, which it requires: it gets None for them", False
            continue
        near = [each for each in prompts.columns if difflib.get_close_matches(each.strip().casefold(), GROUND_TRUTHS)]
        meant = f" (the nearest: {shown(near[0])})" if near else ""
        remedy = f"Name the column ground_truth, or, if {name} does not need it, give its parameter a default"
        columns = listed([shown(each) for each in prompts.columns])
        yield f"{key}: no row has a ground truth, which {name} requires. The columns are {columns}{meant}. {remedy}", True


def read(
    paths: str | list[str], config: Config, algorithm: Algorithm, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int],
    wrong: list[str] | None = None,
) -> PromptSet | RowSet:  # fmt: skip
    if "rollout" in algorithm.needs:
        return load_prompts(paths, tokenizer, config.data, wrong)
    return load_sft(paths, tokenizer, config.data, ends, wrong)


def check_lengths(config: Config, algorithm: Algorithm, longest: int) -> None:
    """Refuse samples that are longer than the positions of a model that reads them whole."""
    for key, path in model_paths(config, algorithm).items():
        if key in ("model.path", "ref.path", "critic.path"):
            whose = "the model" if key == "model.path" else f"the model of {key}"
            limit = load.context_limit(load.read_config(config.model, path, key))
            check_context(config, longest, limit, rollout="rollout" in algorithm.needs, whose=whose)


def check_prompts(config: Config, prompts: Sequence[Prompt]) -> None:
    """Refuse settings for prompts that the data does not contain."""
    seen = {prompt.data_source for prompt in prompts}
    unknown = sorted(set(config.reward.sources) - seen)
    if prompts and unknown:  # probably a misspelling, with which rows would go to another function
        raise UserError(
            f"reward.sources: no row has the data source {', '.join(map(repr, unknown))}; the data has "
            f"{', '.join(map(repr, sorted(seen)))}. Correct the name or remove it"
        )
    if config.reward_model.chat_template and not any(isinstance(prompt.source, tuple) for prompt in prompts):
        raise UserError("reward_model.chat_template: every prompt is a plain string, which goes through no template. Remove the key")
