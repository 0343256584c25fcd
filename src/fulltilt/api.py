"""fulltilt from Python: `train`, `evaluate`, `generate` and `check`, which the command line calls too.

Enters: a run file or its tables, keywords in place of keys, rows and functions in place of files. Leaves: plain records and dictionaries.
Guaranteed: the checks and texts of the command line, as one `UserError` with every mistake; nothing ends the process; a call leaves no
setting of torch, signal handler, changed stream or model behind, so that a second one in the same process is as good as the first. Two
things it does leave: progress bars of transformers and huggingface_hub stay off, and objects frozen by `gc.freeze` are no longer frozen.
`train` and `evaluate` import torch only once the configuration is right.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial, wraps
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from fulltilt import config as configuration
from fulltilt import knobs
from fulltilt.blame import shows_traceback
from fulltilt.callables import Callables
from fulltilt.cluster.hosts import WorkerError
from fulltilt.config import ConfigRule
from fulltilt.data.files import forget_rows, rows_in_memory
from fulltilt.observe import loggers
from fulltilt.observe.console import Console
from fulltilt.observe.metrics import read_lines, read_samples
from fulltilt.records import Group, RunWarning, UserError
from fulltilt.schema import REWARDS, Config, keys, sections, shown
from fulltilt.user_code import known_functions
from fulltilt.words import either, joined, many

if TYPE_CHECKING:
    from fulltilt.data.template import Encoded
    from fulltilt.loop import OnStep
    from fulltilt.loop.generation import TextCodec
    from fulltilt.training.checkpoint import Checkpoint

__all__ = ["Completion", "TrainResult", "UserError", "check", "evaluate", "generate", "train"]

Given = ParamSpec("Given")
Result = TypeVar("Result")
Source = str | os.PathLike[str] | Mapping[str, Any] | None
TAKE_FUNCTIONS = ("reward", "algorithm")  # sections that have keys whose values may be functions
# The key that is meant if a section gets one value instead of its keys.
NATURAL = {"model": "path", "data": "train", "reward": "function", "algorithm": "name"}
# Sections whose key names occur in others too: their keywords need the name of the section.
REPEATING = ("eval", "ref", "critic", "reward_model", "health")
# Keys that affect generation, and the arguments of `generate` that stand for keys.
OBEYED = frozenset(
    {
        "model.revision", "model.trust_remote_code", "model.dtype", "model.chat_template", "data.apply_template", "data.system",
        "data.template_args", "rollout.stop", "rollout.engine", "rollout.kv_bytes", "rollout.memory_fraction", "rollout.block_tokens",
        "rollout.max_seqs", "rollout.max_batched_tokens", "rollout.chunked_prefill", "rollout.prefix_sharing", "rollout.cuda_graphs",
        "train.fused_layers", "train.compile", "lora.rank", "lora.alpha", "lora.targets", "lora.parameters", "lora.path", "run.device",
        "run.threads", "run.deterministic",
    }
)  # fmt: skip
SAMPLING = ("max_new_tokens", "temperature", "top_p", "top_k")
ARGUMENTS = {
    **{key: key.partition(".")[2] for key in OBEYED - {"lora.path"}},
    **{f"{section}.{name}": name for section in ("eval", "rollout") for name in SAMPLING},
    **{"eval.samples_per_prompt": "samples", "algorithm.samples_per_prompt": "samples", "data.max_tokens": "max_new_tokens"},
    **{"model.path": "model", "data.train": "prompts", "data.val": "prompts", "run.seed": "seed"},
}
USUAL_TOKENS = 256  # most tokens that `generate` samples by default, if the model has positions for them


@dataclass(frozen=True)
class TrainResult:
    """Results of a run, and its folder."""

    folder: Path
    model: Path | None  # folder of the newest checkpoint's model, loadable by transformers; None: nothing was saved
    steps: int
    seconds: float  # training time of this call, without its set-up
    tokens_per_s: float
    reward_first: float | None  # mean reward of the first step
    reward_last: float | None
    interrupted: bool  # stopped before the last step by Ctrl-C or by `on_step`; the same call resumes the run
    metrics: list[dict[str, Any]] = field(repr=False)  # the lines of metrics.jsonl, one for each step, those before a resume included

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """Samples that the run wrote to its folder, `run.save_rollouts` of each step: step, prompt, response, reward and more."""
        files = sorted((self.folder / "rollouts").glob("step-*.jsonl"))
        return [{"step": int(file.stem.removeprefix("step-")), **sample} for file in files for sample in read_samples(file)]


def freeing_memory(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Wrap a function so that it frees its models when it ends, also when it ends with an error: a notebook keeps the last error, and the
    frames of its traceback, or of the error beneath, would keep everything that they hold. The traceback's text is kept if the user asks
    for it."""

    @wraps(function)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except UserError as error:
            if shows_traceback():
                error.add_note("".join(traceback.format_exception(error.__cause__ or error.__context__ or error)).rstrip())
            error.__context__ = None
            raise error.with_traceback(None) from None
        except WorkerError as error:  # the traceback inside the worker is its cause, as text
            error.__context__ = None
            raise error.with_traceback(None) from error.__cause__
        finally:
            if torch := sys.modules.get("torch"):
                gc.collect()
                if torch.cuda.is_initialized():
                    torch.cuda.empty_cache()

    return called


@freeing_memory
def train(
    run: Source = None, /, *, model: Any = None, data: Any = None, reward: Any = None, algorithm: Any = None,
    overrides: Sequence[str] = (), on_step: OnStep | None = None, quiet: bool = False, console: Console | None = None, **settings: Any,
) -> TrainResult:  # fmt: skip
    """Train a model. If `run.dir` holds an interrupted run with these settings, it is resumed.

    `run`: a run file, or its tables as dictionaries. `model`: a folder or hub name. `data`: files, a list of dictionaries or a
    `datasets.Dataset`. `reward`: a function, the name of a built-in one, FILE.py:NAME, or several of them with their weights. `algorithm`:
    its name. Every other section of a run file is a keyword that takes a dictionary, and every key is one that takes its value, as
    `samples_per_prompt=4` or, with its section, `eval_temperature=0.5`. `overrides`: as on the command line, applied last.

    `on_step(step, metrics)` is called after each step; if it returns False, the run is saved and stops.
    """
    check_on_step(on_step)
    keywords = {"model": model, "data": data, "reward": reward, "algorithm": algorithm, **settings}
    with configured("fulltilt.train", run, keywords, overrides, logged=True) as config:
        from fulltilt import loop

        done = loop.train(config, console or Console(quiet=quiet), on_step, Path(run) if isinstance(run, str | os.PathLike) else None)
        folder = Path(config.run.dir).absolute()
        return TrainResult(
            folder, done.model and done.model.absolute(), done.steps, done.seconds, done.tokens_per_s, done.reward_first, done.reward_last,
            done.interrupted, list(read_lines(folder / "metrics.jsonl").steps),
        )  # fmt: skip


def check_on_step(on_step: OnStep | None) -> None:
    if on_step is None:
        return
    wrong = "it is an async function, which nothing would await" if inspect.iscoroutinefunction(on_step) else ""
    try:
        inspect.signature(on_step).bind(1, {})
    except TypeError as error:  # it is not a function, or it has other parameters
        wrong = str(error)
    except ValueError:  # Python does not know the parameters of some functions that are not written in it
        pass
    if wrong:
        raise UserError(f"on_step: {wrong}. Give a function of the step's number and its metrics: def on_step(step, metrics)")


@freeing_memory
def check(
    run: Source = None, /, *, overrides: Sequence[str] = (), on_step: OnStep | None = None, quiet: bool = True, **settings: Any
) -> None:
    """Check the arguments of `train`: the configuration, the reward and the data, and whether a run in `run.dir` could be resumed with
    them. Raises one UserError with every mistake. Takes all arguments of `train`, and prints nothing, `quiet` or not."""
    check_on_step(on_step)
    with configured("fulltilt.check", run, settings, overrides, logged=True) as config:
        from fulltilt import loop

        if mistakes := loop.find_mistakes(config):
            raise UserError(configuration.report(origin_of(run, "fulltilt.check"), mistakes))


@freeing_memory
def evaluate(
    run: Source = None, /, *, data: Any = None, latest: bool = False, best: bool = False, checkpoint: int | None = None,
    overrides: Sequence[str] = (), quiet: bool = True, console: Console | None = None, **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """Score a model on validation data, as `train` would between its steps. Returns metrics by name, and the model's folder and step.

    `data`: the validation data (`data.val`). `latest`: score the newest checkpoint in `run.dir` instead of the model; `best`: the one that
    `run.keep_best` chose; `checkpoint`: the one of this step. All other arguments are those of `train`.
    """
    if data is not None:
        settings["data"] = data if isinstance(data, Mapping) else {"val": data}
    if run is None and (latest or best or checkpoint is not None) and not settings.keys() & {"model", "model_path"}:
        raise UserError(
            "fulltilt.evaluate: a checkpoint is evaluated with the settings of its run. Give the run's file, for example "
            f'fulltilt.evaluate("{settings.get("run_dir", "runs/mine")}/snapshot.toml", latest=True), or what `train` was given, the model '
            "included"
        )
    if run is None:  # an evaluation reads neither training data nor steps, but a configuration has them
        epochs = "run_epochs" in settings or "epochs" in as_table(settings.get("run"))
        val = as_table(settings.get("data")).get("val", settings.get("val"))
        if val is None:
            raise UserError("data: nothing to evaluate on. Give the validation data")
        run = {"data": {"train": val}, "run": {} if epochs else {"steps": 1}}
    with configured("fulltilt.evaluate", run, settings, overrides, logged=False) as config:
        from fulltilt import loop

        return loop.evaluate(config, console or Console(quiet=quiet), latest=latest, best=best, step=checkpoint)


@dataclass(frozen=True)
class Completion:
    """One sample of a prompt."""

    text: str
    tokens: list[int] = field(repr=False)
    logprobs: list[float] = field(repr=False)  # log-prob of each token at the sampling temperature
    finish: str  # "stop", or "length" if max_new_tokens cut it off


@freeing_memory
def generate(
    model: str | os.PathLike[str], prompts: Sequence[str | Sequence[Mapping[str, Any]]], *, samples: int | None = None,
    max_new_tokens: int | None = None, temperature: float = 1.0, top_p: float | None = None, top_k: int | None = None, seed: int = 0,
    step: int | None = None, details: bool = False, **settings: Any,
) -> list[Any]:  # fmt: skip
    """Continue prompts through the rollout engine: one text for each prompt, or with `samples` a list of that many texts for each.

    `model`: the folder or hub name of a model, or the folder of a run, whose newest checkpoint is used, or the one of `step`. `prompts`:
    strings, or conversations as lists of messages, which go through the chat template. `max_new_tokens`: by default 256, or fewer if the
    model has no positions for them. `details`: a `Completion` instead of each text. Further keywords are keys of a run file that affect
    generation, such as `stop=["\\n"]`, `system="..."`, `device="cpu"` or `dtype="float32"`.
    """
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable) or getattr(prompts, "ndim", 1) != 1:
        raise UserError("prompts: give a list of strings or of conversations, also for one prompt: [prompt]")
    prompts = list(prompts)
    given = {
        "eval.samples_per_prompt": samples, "eval.temperature": temperature, "eval.top_p": top_p, "eval.top_k": top_k,
        "eval.max_new_tokens": max_new_tokens, "run.seed": seed,
    }  # fmt: skip
    for name, value in (("temperature", temperature), ("seed", seed)):
        if value is None:
            raise UserError(f"{name}: is None. Give a number, or leave it out")

    @contextlib.contextmanager
    def load(config: Config, found: Checkpoint | None) -> Iterator[Callable[[], Sequence[Group]]]:
        from fulltilt.loop import generation

        texts = generation.TextCodec.of(config)
        encoded = [encode(texts, number, prompt) for number, prompt in enumerate(prompts)]
        if not encoded:
            yield tuple
            return
        longest, number = max((len(each.ids), -number) for number, each in enumerate(encoded))
        room = (max_new_tokens or USUAL_TOKENS) if texts.limit is None else texts.limit - longest
        if room < (max_new_tokens or 1):
            raise UserError(
                f"prompts[{-number}]: it has {many(longest, 'token')}, and the model was made for {texts.limit} positions: a response of "
                f"{max_new_tokens or 1} does not fit. Shorten the prompt{', or lower max_new_tokens' if room > 0 else ''}"
            )
        most = max_new_tokens or min(USUAL_TOKENS, room)
        with generation.open_generation(config, texts, longest, most, found) as opened:
            yield partial(opened.groups, encoded, seed)

    with opened_model("fulltilt.generate", model, step, given, ARGUMENTS, len(prompts), load, settings) as answer:
        groups = answer()
    made = [[Completion(each.text, each.ids.tolist(), each.logprobs.tolist(), each.finish) for each in group.samples] for group in groups]
    found_texts = [[each if details else each.text for each in group] for group in made]
    return [group[0] for group in found_texts] if samples is None else found_texts


def encode(texts: TextCodec, number: int, prompt: Any) -> Encoded:
    if not isinstance(prompt, Sequence) and not hasattr(prompt, "tolist"):
        raise UserError(f"prompts[{number}]: is of type {type(prompt).__name__}. Give a string, or a conversation as a list of messages")
    try:
        return texts.encoder.encode(prompt)
    except UserError as error:
        raise UserError(f"prompts[{number}]: {error}") from None


@contextlib.contextmanager
def opened_model(
    who: str, model: str | os.PathLike[str], step: int | None, given: Mapping[str, Any], names: Mapping[str, str], prompts: int,
    load: Callable[[Config, Checkpoint | None], contextlib.AbstractContextManager[Result]],
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Result]:  # fmt: skip
    """Yield what `load` returns for the configuration of generation with a model, and for the checkpoint that the model comes from, if any.
    `given`: values of keys. `names`: the user's names of keys, for errors. `settings`: further keywords, as in `train`."""
    if not isinstance(model, str | os.PathLike):
        raise UserError(f"{who}: the model is of type {type(model).__name__}. Give the folder or hub name of a model, or a run folder")
    from fulltilt.loop import generation
    from fulltilt.training.checkpoint import open_checkpoint

    samples = given.get("eval.samples_per_prompt")
    most = max(1, min(256, prompts * (samples if isinstance(samples, int) else 1)))
    unused = without_effect(settings)
    used = {name: value for name, value in settings.items() if name not in unused}

    def read(found: Checkpoint | None) -> tuple[Result, contextlib.ExitStack]:
        tables = generation.tables_for(os.fspath(model), found)
        tables["rollout"] = tables.get("rollout", {}) | {"max_new_tokens": 1, "max_seqs": most}
        for key, value in given.items():
            section, _, name = key.partition(".")
            tables[section] = tables.get(section, {}) | ({} if value is None else {name: value})
        with contextlib.ExitStack() as ending:
            config = ending.enter_context(configured(who, tables, used, (), logged=False, wrong=unused.values()))
            return ending.enter_context(load(config, found)), ending.pop_all()

    find = partial(generation.find_checkpoint, os.fspath(model), step)
    with said_as(names):
        loaded, ending = open_checkpoint(find, read, lambda text: warnings.warn(text, RunWarning, stacklevel=2))
    with ending:
        yield loaded


@contextlib.contextmanager
def said_as(names: Mapping[str, str]) -> Iterator[None]:
    """Rename keys in errors to the names that the user knows."""
    try:
        yield
    except UserError as error:
        keys_in_text = rf"(?<![\w./])({'|'.join(map(re.escape, names))})(?!\w)"
        error.args = (re.sub(keys_in_text, lambda found: names[found[0]], str(error)),)
        raise


def without_effect(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the keywords whose keys do not affect generation, and what is wrong with each."""
    found = {}
    for name, value in settings.items():
        if name in sections():
            meant = [f"{name}.{key}" for key in (value if isinstance(value, Mapping) else [NATURAL.get(name)])]
        else:
            meant = meanings(name) or knobs.elsewhere(name)
        unused = [key for key in meant if key in keys() and key not in OBEYED]
        if value is None or not unused:
            continue
        if instead := [f"{ARGUMENTS[key]}=" for key in unused if key in ARGUMENTS]:
            found[name] = f"{name}: not a keyword of fulltilt.generate. Write {either(list(dict.fromkeys(instead)))}"
        else:
            found[name] = f"{name}: {joined(unused, 'and')} {'has' if len(unused) == 1 else 'have'} no effect on generation. Remove it"
    return found


# ---- the configuration -----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def configured(
    who: str, run: Source, keywords: Mapping[str, Any], overrides: Sequence[str], *, logged: bool, wrong: Iterable[str] = ()
) -> Iterator[Config]:
    """Yield the configuration while its functions have names, and restore the process afterwards. `who`: the name of tables without a file
    in errors. `logged`: the run's loggers are used, so they must be able to start. `wrong`: mistakes that were found before."""
    if not isinstance(run, str | os.PathLike | Mapping | None):
        raise UserError(f"{who}: its first argument is of type {type(run).__name__}. Give the path of a run file, or its tables")
    overrides = [overrides] if isinstance(overrides, str) else [] if overrides is None else overrides
    if not isinstance(overrides, list | tuple) or not all(isinstance(each, str) for each in overrides):
        raise UserError('overrides: give a list of texts, for example ["run.steps=100"]')
    functions = Callables()
    tables = dict(run or {}) if isinstance(run, Mapping | None) else configuration.read_toml(Path(run))
    mistakes = [*wrong, *add_keywords(tables, keywords, functions), *name_rows(tables)]
    try:
        tables = {str(name): plain(table, functions if name in TAKE_FUNCTIONS else None) for name, table in tables.items()}
    except RecursionError:
        raise UserError(f"{who}: a table or list holds itself, or is nested too deep. No key takes such a value: remove it") from None
    rules = [ConfigRule((), lambda _: mistakes), *([ConfigRule(("log.to",), lambda given: loggers.check(given.log))] if logged else [])]
    with known_functions(functions.codes), contextlib.ExitStack() as ending:
        for name in (name for name in as_table(tables.get("data")).values() if isinstance(name, str)):
            ending.callback(forget_rows, name)
        config = configuration.parse(tables, overrides, origin_of(run, who), rules)
        from fulltilt.cluster.assembly import torch_as_it_was

        with torch_as_it_was():
            yield config


def origin_of(run: Source, who: str) -> str:
    return str(run) if isinstance(run, str | os.PathLike) else who


def add_keywords(tables: dict[str, Any], keywords: Mapping[str, Any], functions: Callables) -> Iterator[str]:
    """Put keywords into the tables of a run file, and yield which are wrong or ambiguous. An unknown one becomes an unknown key, and is
    reported with the nearest known one."""
    given = {name: value for name, value in keywords.items() if value is not None}
    set_here: dict[str, str] = {}
    for name, value in sorted(given.items(), key=lambda entry: entry[0] not in sections()):
        meant = meanings(name)
        if splits := splits_of(value):
            yield f"{name}: has the splits {joined(splits, 'and')}. Give one split, for example dataset[{splits[0]!r}]"
            tables[name] = {**as_table(tables.get(name)), "train": "."}
        elif name in sections():
            if name == "reward" and not isinstance(value, Mapping):
                listed = isinstance(value, list | tuple)
                entries = [plain(entry, functions) for entry in (value if listed else [value])]
                if wrong := list(mistakes_in_rewards(entries)):
                    yield from wrong
                    continue
                value = {"function": dict.fromkeys(entries, 1.0) if listed else entries[0]}
            section = {NATURAL[name]: value} if name in NATURAL and not is_section(name, value) else value
            if not isinstance(section, Mapping):
                tables[name] = section  # reported as a value that should be a table
                continue
            tables[name] = {**as_table(tables.get(name)), **section}
            set_here |= {f"{name}.{key}": name for key in section}
        elif len(meant) > 1:
            spelled = [f"{key.replace('.', '_')}=" for key in meant]
            yield f"{name}: may be {either(meant)}. Write {either(spelled)}"
        elif meant and meant[0] in set_here:
            yield f"{name}: {meant[0]} is also set by {set_here[meant[0]]}. Give it once"
        elif meant:
            section, _, key = meant[0].partition(".")
            tables[section] = {**as_table(tables.get(section)), key: value}
            set_here[meant[0]] = name
        else:
            tables[name] = value


def mistakes_in_rewards(entries: Sequence[Any]) -> Iterator[str]:
    what = "Give a function, the name of a built-in one or FILE.py:NAME, or several of them in a list or with their weights"
    if not entries:
        yield f"reward: the list is empty. {what}"
    for entry in entries:
        if not isinstance(entry, str):
            yield f"reward: {shown(entry)} is of type {type(entry).__name__}. {what}"
    for entry in sorted({entry for entry in entries if isinstance(entry, str) and entries.count(entry) > 1}):
        yield f"reward: {entry} is in the list {entries.count(entry)} times. Give it once, with its weight: {{reward: weight}}"


def as_table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def meanings(keyword: str) -> list[str]:
    """Return the dotted keys that a keyword may mean: with its section in front, or alone, if its section is the main one with that
    name."""
    whole = [key for key in keys() if key.replace(".", "_") == keyword]
    named = [key for key in keys() if key.partition(".")[2] == keyword]
    return whole or [key for key in named if key.partition(".")[0] not in REPEATING] or named


def is_section(name: str, value: Any) -> bool:
    """Return whether a value holds keys of the section, and is not the one value that may stand for the section: rewards may have
    weights."""
    if not isinstance(value, Mapping):
        return False
    return name != "reward" or not any(callable(key) or (isinstance(key, str) and (key in REWARDS or ":" in key)) for key in value)


def name_rows(tables: dict[str, Any]) -> Iterator[str]:
    """Replace rows by the name under which the run finds them, and yield what is wrong with them."""
    for key, value in as_table(tables.get("data")).items():
        if splits := splits_of(value):
            yield f"data.{key}: has the splits {joined(splits, 'and')}. Give one split, for example dataset[{splits[0]!r}]"
            tables["data"] = {**tables["data"], key: "."}
        elif key in ("train", "val") and is_rows(value):
            name = "."
            try:
                name = rows_in_memory(value)
            except UserError as error:
                yield f"data.{key}: {error}"
            tables["data"] = {**tables["data"], key: name}


def splits_of(value: Any) -> list[str]:
    """Return the names of the splits, if the value is a whole data set of `datasets`; otherwise an empty list."""
    whole = any(kind.__name__ in ("DatasetDict", "IterableDatasetDict") for kind in type(value).__mro__)
    return list(map(str, value)) or ["no names"] if whole else []


def is_rows(value: Any) -> bool:
    if isinstance(value, str | os.PathLike | Mapping) or not isinstance(value, Iterable):
        return False
    return not isinstance(value, list | tuple) or not value or not all(isinstance(entry, str | os.PathLike) for entry in value)


def plain(value: Any, functions: Callables | None) -> Any:
    """Return the value in TOML's types: functions by their names, paths as text, numbers of numpy and torch as Python's. Without
    `functions`, a function is left as it is, and reported as a wrong value."""
    if isinstance(value, Mapping):
        return {functions.name(key) if functions and callable(key) else str(key): plain(entry, functions) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry, functions) for entry in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if functions is not None and callable(value):
        return functions.name(value)
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
