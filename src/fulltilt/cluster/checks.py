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
from fulltilt.cluster.shelf import wrong_shares
from fulltilt.data.prompts import GROUND_TRUTHS, PromptSet, load_prompts
from fulltilt.data.sft import RowSet, load_sft
from fulltilt.data.template import TEMPLATE_REMEDY, PromptEncoder
from fulltilt.folders import RUN_MARKER, refuse_foreign
from fulltilt.memory.host import usable_cores
from fulltilt.memory.offload import why_not
from fulltilt.model import load, lora
from fulltilt.model.folder import inspect_adapter
from fulltilt.parallel.cuts import (
    expert_counts,
    legal_expert_sizes,
    legal_sequence_sizes,
    legal_sizes,
    whole_experts_in_rollouts,
    why_not_experts,
)
from fulltilt.parallel.cuts import why_not as why_not_divided
from fulltilt.plan.cache import graphs_without_device
from fulltilt.plan.decisions import OFFLOADS, OWN_BUDGETS, count_steps, own_sizes, size_key, unless_auto
from fulltilt.plan.division import UNDIVIDED, Division
from fulltilt.plan.make import check_context
from fulltilt.plan.sequence import wrong_sequence_size
from fulltilt.plan.sharding import unshared
from fulltilt.records import Prompt, UserError
from fulltilt.reward.base import RewardPool
from fulltilt.reward.model import RewardEncoder
from fulltilt.rollout.engine import engine_mistakes, why_one_worker
from fulltilt.schema import (
    Config,
    conditions,
    keys,
    row_of,
    samples_from_copy,
    shares_model,
    shares_parameters,
    shown,
    uses_reward_model,
    value_of,
)
from fulltilt.settings import holds, is_set, own_functions
from fulltilt.shape import Shape, UnknownParameters
from fulltilt.user_code import UserCodeError
from fulltilt.words import either, listed, many

WAITS = "a micro-batch of one worker alone would wait for the others"
ROWS_TOLD = 5  # most bad rows of a data set that messages name: a mistake is often in every row
# Reasons for messages.
NO_COPIES = (
    "its groups must be copies of one another, or norms of gradients would be wrong and checkpoints incomplete, and the shards of divided "
    "experts are spread over all groups"
)
EXPERTS_OF_GROUP = "workers that divide layers have a part of every expert each (1), or all of them divide the experts"


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
        *settings_without_effect(config, algorithm, device),
        *wrong_sharing(config, device),
        *wrong_roles(config, algorithm),
        *wrong_tensor(config, algorithm, device),
        *wrong_experts(config, algorithm, device),
        *wrong_modules(config, algorithm, device),
        *wrong_sequence(config, algorithm, device),
        *wrong_probe(config, algorithm, device),
        *among_own_checkpoints(config),
    ]


def among_own_checkpoints(config: Config) -> Iterator[str]:
    """List settings that name one of the run's own checkpoints: a run deletes its older checkpoints, and must not delete what it started
    from."""
    checkpoints = Path(config.run.dir, "checkpoints").resolve()
    for key, field in keys().items():
        path = value_of(config, key) if row_of(field).names in ("model", "adapter", "file") else None
        if path is not None and Path(path).resolve().is_relative_to(checkpoints):
            remedy = "Use another run.dir, or copy what you need of the checkpoint to another place and name the copy"
            yield f"{key}: {shown(path)} is in {config.run.dir}/checkpoints, from which this run deletes all but the newest. {remedy}"


def count_workers(config: Config, device: str) -> int:
    given = config.cluster.workers
    return given if given != "auto" else torch.cuda.device_count() if device == "cuda" else 1


def wrong_sharing(config: Config, device: str) -> Iterator[str]:
    """List settings that do not go with sharded parameters."""
    train, apart = config.train, config.cluster.roles.values()
    workers = count_workers(config, device) * config.cluster.nodes - sum(apart)
    known = knows_workers(config)
    if not shares_parameters(config):
        return
    if train.shard_size == 1:
        yield 'train.shard_size: groups of 1 worker share nothing out. Use train.shard = "optimizer", or a larger number'
    if known and max(workers, *apart, 1) <= unless_auto(train.tensor_parallel, 1) > 1:
        same = f"train.tensor_parallel = {train.tensor_parallel} leaves no two workers with the same part of the model"
        yield f'train.shard: "{train.shard}", but {same}, which share it out. Remove the key, or set cluster.workers'
    elif known and max(workers, *apart, 1) == 1:
        yield f'train.shard: "{train.shard}", but the run has one worker, which shares nothing out. Remove the key, or set cluster.workers'
    elif known:
        yield from wrong_groups(config, workers + sum(apart))
    for key, why in unshared(config).items():
        value = shown(value_of(config, key))
        yield f'{key}: {value} is not available with train.shard = "{train.shard}": {why}. Remove one of the keys'


def wrong_groups(config: Config, workers: int) -> Iterator[str]:
    """List roles whose workers cannot be divided into groups of `train.shard_size`; fewer workers than that form one group. `workers`:
    number of workers of the run."""
    given, roles = config.train.shard_size, {str(role): count for role, count in config.cluster.roles.items()}
    parts = {role: given_division(config).of(config, role).tensor for role in ("actor", *roles)}
    counts = {role: count // parts[role] for role, count in {"actor": workers - sum(roles.values()), **roles}.items()}
    if not given or counts["actor"] < 1:
        return

    def undivided(size: int) -> Iterator[str]:
        yield from (role for role, count in counts.items() if count % size and (role == "actor" or count > size))

    legal = [str(size) for size in range(2, counts["actor"] + 1) if not any(undivided(size))]
    for role in undivided(given):
        alike = " with the same part of the model" if parts[role] > 1 else ""
        whose = f"the {many(counts[role], 'worker')} of the {role if roles else 'run'}{alike}"
        remedy = either(legal or ['train.shard = "full"'])
        yield f"train.shard_size: {given} does not divide {whose} into groups. Use {remedy}"


def given_division(config: Config) -> Division:
    """Return among how many workers models are divided, as far as the user has set it."""
    tensor, experts = unless_auto(config.train.tensor_parallel, 1), unless_auto(config.train.expert_parallel, 1)
    return Division(tensor, experts, unless_auto(config.rollout.tensor_parallel, tensor))


def wrong_tensor(config: Config, algorithm: Algorithm, device: str) -> Iterator[str]:
    """List settings that do not go with layers that are divided among workers."""
    division = given_division(config)
    shapes = list(shapes_of_roles(config, algorithm, device))
    sizes = {size_key(config, role, "tensor_parallel"): division.of(config, role).tensor for role in ("actor", *OWN_BUDGETS)}
    sizes["train.tensor_parallel"] = division.tensor
    if "rollout" in algorithm.needs:
        sizes["rollout.tensor_parallel"] = unless_auto(config.rollout.tensor_parallel, 1)
    for key, size in sizes.items():
        if size == 1:
            continue
        for other, why in UNDIVIDED.items():
            if value_of(config, other) is True:
                yield f"{key}: {size}, but {other} is true: {why}. Remove one of the keys"
        section = key.partition(".")[0]
        if "rollout" in algorithm.needs and config.rollout.engine != "native" and section in ("train", "rollout"):
            yield f'{key}: {size}, but rollout.engine = "{config.rollout.engine}" samples from a whole model. Use the native engine'
        of_key = [each for each in shapes if size_key(config, each[0], "tensor_parallel") == key]
        yield from wrong_parts(config, key, size, shapes[:1] if section == "rollout" else of_key)


def wrong_roles(config: Config, algorithm: Algorithm) -> Iterator[str]:
    """List sizes that are set for a role that cannot have its own."""
    for role in OWN_BUDGETS:
        tensor, experts = own_sizes(config, role)
        given = [(f"{role}.{key}", size) for key, size in (("tensor_parallel", tensor), ("expert_parallel", experts)) if size is not None]
        for key, size in given if role == "ref" and "ref_logprobs" in algorithm.needs and shares_model(config) else ():
            why = "the reference is the actor without its adapters (lora.rank), and has no model of its own"
            yield f"{key}: {size}, but {why}. Remove the key"


def has_whole_experts(config: Config, key: str, size: int, shape: Shape) -> bool:
    """Return whether each of `size` workers has some whole experts, rather than a part of every expert, where the key divides layers among
    them."""
    division, section = given_division(config), key.partition(".")[0]
    if section != "rollout":
        return min(size, division.experts if section == "train" else division.of(config, section).experts) > 1
    return whole_experts_in_rollouts(config.rollout.expert_parallel, size, division.tensor, division.experts, shape)


def wrong_parts(config: Config, key: str, size: int, shapes: Iterable[tuple[str, Shape, int]]) -> Iterator[str]:
    """List roles whose layers cannot be divided among this many workers. `shapes`: for each role that the key applies to."""
    said = set[tuple[int, str | None]]()  # so that roles with the same mistake get one message
    for role, shape, own in shapes:
        whole = has_whole_experts(config, key, size, shape)
        reason = None if own % size else why_not_divided(shape, size, whole_experts=whole)
        if (reason is None and own % size == 0) or (own, reason) in said:
            continue
        said.add((own, reason))
        legal = either([str(each) for each in legal_sizes(shape, own, whole_experts=whole)])
        if reason is None:
            has = "has" if own == 1 else "have"
            of_role = f"the {many(own, 'worker')} that {has} the {role}'s role"
            yield f"{key}: {size} does not divide {of_role if config.cluster.roles else f'the {own} workers of the run'}. Use {legal}"
        else:
            of_role = "" if role == "actor" else f" of the {role}"
            yield f"{key}: {size} workers cannot hold a part of every layer{of_role}: {reason}. Use {legal}"


def wrong_experts(config: Config, algorithm: Algorithm, device: str) -> Iterator[str]:
    """List settings that do not go with experts that are divided among workers."""
    yield from wrong_rollout_experts(config, algorithm, device)
    division = given_division(config)
    sizes = {size_key(config, role, "expert_parallel"): division.of(config, role) for role in ("actor", *OWN_BUDGETS)}
    for key, own in {**sizes, "train.expert_parallel": division.of(config, "actor")}.items():
        size, tensor = own.experts, own.tensor
        if size == 1:
            continue
        if tensor not in (1, size):
            by = size_key(config, key.partition(".")[0], "tensor_parallel")
            yield f"{key}: {size}, but {by} = {tensor}: {EXPERTS_OF_GROUP}. Use {either(['1', str(tensor)])}"
            continue
        if config.train.shard == "hybrid" and tensor == 1:
            yield f'{key}: {size}, but train.shard = "hybrid": {NO_COPIES}. Remove one of the keys, or set train.shard = "full"'
        for other, why in UNDIVIDED.items():
            if value_of(config, other) is True:
                yield f"{key}: {size}, but {other} is true: {why}. Remove one of the keys"
        of_key = [each for each in shapes_of_roles(config, algorithm, device) if size_key(config, each[0], "expert_parallel") == key]
        yield from wrong_expert_size(config, key, size, tensor, of_key)


def wrong_expert_size(config: Config, key: str, size: int, tensor: int, shapes: Iterable[tuple[str, Shape, int]]) -> Iterator[str]:
    """Name the first role whose experts cannot be divided among this many workers; other roles have their sizes from the same key.
    `tensor`: among how many of these workers each layer is divided."""
    for role, shape, own in shapes:
        legal = [str(each) for each in legal_expert_sizes(shape, own) if tensor == 1 or each in (1, tensor)]
        obeys = role == "actor" or not key.startswith("train") or bool(expert_counts(shape))
        if (reason := why_not_experts(shape, size)) is not None and obeys:
            of_role = "" if role == "actor" else f" of the {role}"
            yield f"{key}: {size} workers cannot divide the experts{of_role} among themselves: {reason}. Use {either(legal)}"
        elif own % size and tensor == 1:  # otherwise the message about train.tensor_parallel says it
            whose = f"the {many(own, 'worker')} of the {role if config.cluster.roles else 'run'}"
            yield f"{key}: {size} does not divide {whose}. Use {either(legal)}"
        else:
            continue
        return


def wrong_rollout_experts(config: Config, algorithm: Algorithm, device: str) -> Iterator[str]:
    key, size, tensor = "rollout.expert_parallel", config.rollout.expert_parallel, given_division(config).rollout
    if size in ("auto", 1) or "rollout" not in algorithm.needs:
        return
    if size != tensor:
        legal = either(["1", str(tensor)][: 1 + (tensor > 1)])
        yield f"{key}: {size}, but rollout.tensor_parallel is {tensor}: {EXPERTS_OF_GROUP}. Use {legal}"
        return
    for role, shape, _ in shapes_of_roles(config, algorithm, device):
        if role == "actor" and (reason := why_not_experts(shape, size)) is not None:
            yield f"{key}: {size} workers cannot divide the experts among themselves: {reason}. Use 1"


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
            shape = load.shape_of(load.read_config(config.model, None if role == "actor" else getattr(config, role).path))
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


def knows_workers(config: Config) -> bool:
    """Return whether the number of workers is known here. Otherwise only the cluster knows it, and it is checked when workers are made."""
    return not (config.cluster.address and config.cluster.workers == "auto")


def roles_with_models(config: Config, algorithm: Algorithm) -> list[str]:
    """Return the roles of a run that have their own model."""
    return [role for role in used_roles(config, algorithm) if role != "ref" or not shares_model(config)]


def shapes_of_roles(config: Config, algorithm: Algorithm, device: str) -> Iterator[tuple[str, Shape, int]]:
    """Yield each role of a run, the shape of its model as far as it is known before loading, and how many workers have the role."""
    if not knows_workers(config):
        return
    roles = {str(role): count for role, count in config.cluster.roles.items()}
    workers = count_workers(config, device) * config.cluster.nodes
    for role in used_roles(config, algorithm) if workers > 1 else ():  # with one worker such keys have no effect
        own, path = roles.get(role) or workers - sum(roles.values()), None if role == "actor" else getattr(config, role).path
        with suppress(UserError, UnknownParameters):  # reported for the model itself, or not known before loading
            if own >= 1:
                yield role, load.shape_of(load.read_config(config.model, path)), own


def used_roles(config: Config, algorithm: Algorithm) -> list[str]:
    used = {
        "actor": True,
        "ref": "ref_logprobs" in algorithm.needs,
        "critic": bool(algorithm.value_loss),
        "reward_model": uses_reward_model(config),
    }
    return [role for role, wanted in used.items() if wanted]


def wrong_sequence(config: Config, algorithm: Algorithm, device: str) -> Iterator[str]:
    """List numbers of workers that cannot share micro-batches."""
    said = set[tuple[str, int, tuple[int, ...]]]()  # one message for all roles without a key of their own
    for role, shape, own in shapes_of_roles(config, algorithm, device):
        parts = given_division(config).of(config, role).tensor  # `auto` respects a given number
        same = size_key(config, role, "sequence_parallel"), own, tuple(legal_sequence_sizes(shape, own // parts, parts))
        wrong = wrong_sequence_size(config, role, shape, own // parts, parts)
        if wrong and own % parts == 0 and same not in said:
            said.add(same)
            yield wrong


def wrong_probe(config: Config, algorithm: Algorithm, device: str) -> Iterator[str]:
    """Refuse a requested probe where passes of the actor's workers wait for other workers. What `auto` divides is known only later."""
    known = not (config.cluster.address and config.cluster.workers == "auto")  # otherwise only the cluster knows how many there are
    workers, apart = count_workers(config, device) * config.cluster.nodes, config.cluster.roles
    if config.run.probe is not True or (known and workers - sum(apart.values()) < 2):  # with one worker such keys have no effect
        return
    used = {"actor": True} | {role: role not in apart for role in used_roles(config, algorithm)}
    given = {"train.shard": shown(config.train.shard)} if shares_parameters(config) else {}
    for role in (role for role, here in used.items() if here):
        for key in ("tensor_parallel", "expert_parallel", "sequence_parallel"):
            by = size_key(config, role, key)
            size = value_of(config, by)
            given |= {by: str(size)} if size not in (None, "auto", 1) else {}
    if given:
        key, value = next(iter(given.items()))
        yield f"run.probe: true, but nothing can be measured with {key} = {value}: {WAITS}. Remove one of the keys"


def wrong_workers(config: Config, algorithm: Algorithm, device: str) -> Iterator[str]:
    """List mistakes about workers: too few devices, an engine or a user's function that does not run on several, and keys that only several
    workers obey."""
    workers = count_workers(config, device)
    if config.cluster.address is None:
        yield from too_many_here(workers, device)
    yield from unused_by(config, workers)
    if not (config.cluster.address and config.cluster.workers == "auto"):  # otherwise the cluster knows how many there are
        yield from too_few(config, workers * config.cluster.nodes)
    if workers * config.cluster.nodes > 1:
        yield from wrong_on_several(config, algorithm)
    if config.cluster.nodes > 1 and config.cluster.workers != "auto" and "rollout" in algorithm.needs:
        yield from wrong_shares(config.reward, workers * config.cluster.nodes, workers)


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


def too_few(config: Config, workers: int) -> Iterator[str]:
    """Refuse roles with workers of their own that leave none to the actor. `workers`: number of workers of the run."""
    roles = config.cluster.roles
    if roles and workers > 1 and (taken := sum(roles.values())) >= workers:
        remedy = f"Give roles at most {workers - 1}, or raise cluster.workers"
        yield f"cluster.roles: {shown(roles)} takes {taken} of the run's {workers} workers, and the actor needs at least one. {remedy}"


def unused_roles(config: Config, algorithm: Algorithm) -> Iterator[str]:
    """List roles of `cluster.roles` that have no model in this run."""
    why = {
        "critic": None if algorithm.value_loss else f"algorithm.name = {shown(config.algorithm.name)} has no critic",
        "ref": None
        if "ref_logprobs" in algorithm.needs
        else "nothing compares with a reference (algorithm.kl_coef, algorithm.reward_kl_coef)",
        "reward_model": None if uses_reward_model(config) else 'the reward has no reward model (reward.function = "reward_model")',
    }
    if why["ref"] is None and shares_model(config):
        why["ref"] = "the reference is the actor without its adapters (lora.rank), and has no model of its own"
    for role in config.cluster.roles:
        if why[role] is not None:
            yield f"cluster.roles: {role} would get workers of its own, but {why[role]}. Remove it from the table"


def unused_by(config: Config, workers: int) -> Iterator[str]:
    """List keys that have no effect with this number of workers. If the user has set the number, the configuration refuses them itself."""
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
    """List settings that have no effect on this device, or with these roles."""
    yield from unused_roles(config, algorithm)
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
    apart = config.cluster.roles
    used = {
        "critic": algorithm.value_loss,
        "ref": "ref_logprobs" in algorithm.needs and not shared,
        "reward_model": uses_reward_model(config),
    }
    # Rollouts do not use the actor's shards, nor divided experts.
    of_copy = samples_from_copy(config) and "rollout" in algorithm.needs
    others = any(used[role] and role not in apart for role in used)
    sections = {"train": "actor", "critic": "critic", "ref": "ref", "reward_model": "reward_model"}
    for section, role in sections.items():
        for key in OFFLOADS:
            alone = role in apart if role != "actor" else not (others or of_copy)
            reason = why_not(key, role, device, alone=alone, shared=role == "ref" and shared)
            if reason and getattr(getattr(config, section), key, None) is True:
                yield f"{section}.{key}: true, but {reason}. Remove the key"


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
