"""Input and output of `fulltilt verl` and `fulltilt chatlearn`.

Enters: the arguments of another system's command, or the path of its script or configuration. Leaves: a `Translation`, its table as text or
JSON, and the run file as commented TOML. Guaranteed: nothing is executed or loaded; every mistake is a UserError.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fulltilt.compat import hydra, shell
from fulltilt.compat.chatlearn import CHATLEARN
from fulltilt.compat.outcome import KINDS
from fulltilt.compat.surroundings import Surroundings
from fulltilt.compat.translate import REMOVED, Answer, Table, Translation, Value, translate
from fulltilt.compat.verl import DANGLING, PPO
from fulltilt.compat.verl_rules import ACTOR, MANAGERS
from fulltilt.compat.verl_sft import NEWER, SFT
from fulltilt.compat.without_effect import without_effect
from fulltilt.config import nearest
from fulltilt.records import UserError
from fulltilt.schema import Config, keys, sections, toml_value
from fulltilt.words import either, many, printable, shortened

LINE = 116
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
OURS = ("--dry-run", "--write", "--retune", "--hardware", "--gpu-memory", "--keep-engine", "--set", "--json", "--quiet")
MEGATRON: Mapping[str, Any] = {f"{ACTOR}.strategy": "megatron"}
DAPO: Mapping[str, Any] = {MANAGERS[0]: "dapo"}


@dataclass(frozen=True)
class Program:
    """A trainer of verl's, with its table of keys."""

    table: Table
    assumed: Mapping[str, Any]  # its defaults beside those of the table


PROGRAMS: Mapping[str, Program] = {
    "verl.trainer.main_ppo": Program(PPO, {}),
    "verl.trainer.main_ppo_sync": Program(PPO, {}),
    "verl.trainer.main_ppo_v0": Program(PPO, {}),
    "recipe.dapo.main_dapo": Program(PPO, DAPO),
    "recipe.dapo.src.main_dapo": Program(PPO, DAPO),
    "verl.trainer.fsdp_sft_trainer": Program(SFT, {}),
    "verl.trainer.sft_trainer": Program(SFT, NEWER),
    "verl.trainer.sft_trainer_ray": Program(SFT, NEWER),
}
FILES = {
    "main_ppo.py": "verl.trainer.main_ppo",
    "main_dapo.py": "recipe.dapo.main_dapo",
    "fsdp_sft_trainer.py": "verl.trainer.fsdp_sft_trainer",
}
FILES["sft_trainer.py"] = "verl.trainer.sft_trainer"

# verl's own configurations, by the names for --config-name, with their defaults.
CONFIGURATIONS: Mapping[str, Mapping[str, Any]] = {
    "ppo_trainer": {},
    "ppo_megatron_trainer": MEGATRON,
    "ppo_veomni_trainer": {},
    "ppo_torchtitan_trainer": {},
    "dapo_trainer": DAPO,
    "dapo_megatron_trainer": {**MEGATRON, **DAPO},
    "sft_trainer": {},
    "sft_trainer_engine": {},
}


# ---- verl --------------------------------------------------------------------------------------------------------------------------


def from_verl(
    arguments: Sequence[str], seen: Surroundings, *, retune: bool = False, environment: Mapping[str, str] | None = None
) -> Translation:
    """Return the run that verl's arguments, or a script that starts verl with them, describe."""
    if not arguments:
        raise UserError("nothing to translate. Give the arguments of `python3 -m verl.trainer.main_ppo`, or a script that has them")
    is_script = Path(arguments[0]).suffix in SCRIPTS
    launch = _script(Path(arguments[0]), arguments[1:], environment) if is_script else _command(list(arguments))
    program = FILES.get(launch.program.rpartition("/")[2], launch.program)
    if program not in PROGRAMS:
        known = ", ".join(name for name in PROGRAMS if "src" not in name)
        raise UserError(f"{program}: this program of verl's has its own trainer, which is not built here. Known are {known}")
    options, overridden = _options(list(launch.arguments))
    configured, assumed = _configuration(options)
    chosen = PROGRAMS[program]
    given = {**_launcher(launch.launcher), **configured, **hydra.overrides(overridden)}
    assumed = {**chosen.assumed, **assumed, **(MEGATRON if given.get("model_engine") == "megatron" else {})}
    defaults = {**chosen.table.defaults, **assumed}
    values = hydra.resolved(given, {**DANGLING, **defaults}.get, environment)
    return translate(chosen.table, values, program, seen, retune=retune, notes=launch.notes, assumed=assumed)


def _script(
    path: Path, arguments: Sequence[str], environment: Mapping[str, str] | None, trainers: shell.Trainers = shell.VERL
) -> shell.Launch:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8 text'}. Give a shell script") from None
    try:
        return shell.read(text, arguments, environment, trainers)
    except UserError as error:
        raise UserError(
            "\n".join(f"{path}, {line}" if line.startswith("line") else f"{path}: {line}" for line in str(error).split("\n"))
        ) from None


def _command(words: list[str]) -> shell.Launch:
    """Separate the command from its arguments, if it is given with them."""
    for place, word in enumerate(words):
        if word == "-m" and place + 1 < len(words):
            before = [each for each in words[:place] if not re.fullmatch(r"(?:.*/)?python[\d.]*", each)]
            return shell.Launch(words[place + 1], tuple(before), tuple(words[place + 2 :]), 1)
    if shell.VERL.is_module(words[0]) or shell.VERL.is_file(words[0]):
        return shell.Launch(words[0], (), tuple(words[1:]), 1)
    names = {word.lstrip("+~").partition(".")[0] for word in words}
    supervised = names & {"model", "optim", "engine"} and not names & {"actor_rollout_ref", "algorithm", "critic", "reward_model"}
    return shell.Launch("verl.trainer.fsdp_sft_trainer" if supervised else "verl.trainer.main_ppo", (), tuple(words), 1)


def _options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return Hydra's options (--config-name=..., also as separate words) and its overrides."""
    options: dict[str, str] = {}
    rest: list[str] = []
    known = {"--config-name": "name", "-cn": "name", "--config-path": "path", "-cp": "path", "--config-dir": "path", "-cd": "path"}
    while words:
        word = words.pop(0)
        option, equals, value = word.partition("=")
        if option in known:
            if not equals and not words:
                raise UserError(f"{option}: its value is missing")
            options[known[option]] = value if equals else words.pop(0)
        elif option in OURS:
            raise UserError(f"{option}: an option of fulltilt's stands before the other command. Write fulltilt verl {word} ...")
        elif word.startswith("--"):
            raise UserError(f"{word}: no option of Hydra's that is known here. Known are {', '.join(known)}")
        else:
            rest.append(word)
    return options, rest


def _configuration(options: Mapping[str, str]) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return the keys of the user's own configuration file, and the defaults of verl's configuration beneath it."""
    name = options.get("name", "").removesuffix(".yaml").removesuffix(".yml").strip("'\"")
    if not name:
        return {}, {}
    own = [Path(options.get("path", ".")) / f"{name}{end}" for end in (".yaml", ".yml")]
    found = next((path for path in own if path.is_file()), None)
    if found is None and name in CONFIGURATIONS:
        return {}, CONFIGURATIONS[name]
    if found is None:
        raise UserError(
            f"--config-name={name}: {own[0]} is not there, and verl has no such configuration. Known are {either(list(CONFIGURATIONS))}"
        )
    read = hydra.read_yaml(found)
    beneath = read.pop("defaults", [])
    bases = [str(base) for base in (beneath if isinstance(beneath, list) else [beneath]) if base != "_self_"]
    if unknown := [base for base in bases if base not in CONFIGURATIONS]:
        known = f"Known are {either(list(CONFIGURATIONS))}"
        remedy = "Give a file of verl's own by its name alone, or as the one file that verl generates of it"
        raise UserError(f"{found}: its defaults name {shortened(unknown[0], 60)}, which is not read. {known}. {remedy}")
    return read, {key: value for base in bases for key, value in CONFIGURATIONS[base].items()}


def _launcher(words: Sequence[str]) -> dict[str, Any]:
    """Return the options of torchrun, ray and other launchers, as keys of their own."""
    name = words[0].rpartition("/")[2] if words else ""
    prefix = "torchrun" if name in ("torchrun", "accelerate") else "launcher"
    found: dict[str, Any] = {}
    rest = [word for word in words if word != "--"]
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        if not option.startswith("--"):
            continue
        takes = not equals and rest and not rest[0].startswith("-")
        found[f"{prefix}.{option.lstrip('-')}"] = hydra.scalar(value if equals else rest.pop(0)) if equals or takes else True
    return found


# ---- ChatLearn ---------------------------------------------------------------------------------------------------------------------


def from_chatlearn(
    path: Path, arguments: Sequence[str], seen: Surroundings, *, retune: bool = False, environment: Mapping[str, str] | None = None
) -> Translation:
    """Return the run that a configuration of ChatLearn's, or a script that starts ChatLearn with it, describes."""
    notes: tuple[str, ...] = ()
    if path.suffix in SCRIPTS:
        launch = _script(path, arguments, environment, shell.CHATLEARN)
        path, arguments, notes = *_configured(path, launch.arguments), launch.notes
    given = {**hydra.read_yaml(path), **hydra.overrides(list(arguments))}
    values = hydra.resolved(given, CHATLEARN.defaults.get, environment)
    return translate(CHATLEARN, values, "chatlearn", seen, retune=retune, notes=notes)


def _configured(script: Path, words: Sequence[str]) -> tuple[Path, list[str]]:
    """Return the configuration that a command of ChatLearn's names, and its overrides."""
    task, *rest = words or ("",)
    if task != "grpo":
        raise UserError(f"{script}: ChatLearn's {task or 'task'} is not built here. Known is grpo")
    for place, word in enumerate(rest):
        option, equals, value = word.partition("=")
        if option == "--config-file" and (equals or place + 1 < len(rest)):
            return Path(value if equals else rest[place + 1]), rest[:place] + rest[place + (1 if equals else 2) :]
    raise UserError(
        f"{script}: its command has no --config-file. Give the configuration itself: fulltilt chatlearn FILE.yaml KEY=VALUE ..."
    )


# ---- overrides of ours -------------------------------------------------------------------------------------------------------------


def overridden(translation: Translation, overrides: Sequence[str]) -> Translation:
    """Return the translation with keys of the run file set by hand. Whether they go together is checked at the start of the run."""
    values = dict(translation.values)
    for override in overrides:
        key, equals, text = override.partition("=")
        if key not in keys() or not equals:
            near = nearest(key, keys())
            raise UserError(f"--set {override}: not KEY=VALUE with a key of a run file" + (f"; the nearest is {near}" if near else ""))
        values[key] = Value(hydra.parsed(text), ("--set",), "", given=True)
    pending = {key: why for key, why in translation.pending.items() if key not in values}
    found = replace(translation, values={key: values[key] for key in keys() if key in values}, pending=pending)
    return _without_useless(found) if overrides else found


def _without_useless(translation: Translation) -> Translation:
    """Return the translation without settings that have no effect beside the overrides, such as offloads on a CPU."""
    try:
        useless = {key: outcome for key, outcome in without_effect(config_of(translation)) if outcome.kind == "means nothing"}
    except ValidationError:  # an override has a value that its key does not accept; the start of the run reports it
        return translation
    useless = {key: outcome for key, outcome in useless.items() if key in translation.values and translation.values[key].given}
    answers = []
    for answer in translation.answers:
        dropped = [key for key in answer.sets if key in useless and "--set" not in translation.values[key].sources]
        left = {key: value for key, value in answer.sets.items() if key not in dropped}
        why = ". ".join([*filter(None, [answer.why if left else ""]), *(useless[key].why for key in dropped)])
        answers.append(replace(answer, sets=left, why=why, kind=answer.kind if left else "means nothing") if dropped else answer)
    kept = {key: value for key, value in translation.values.items() if key not in useless or "--set" in value.sources}
    return replace(translation, answers=tuple(answers), values=kept)


def config_of(translation: Translation) -> Config:
    """Return the run as a configuration, for its plan. Missing keys have values that no plan depends on."""
    tables = translation.tables
    model, data = {"path": ".", **tables.get("model", {})}, {"train": ".", **tables.get("data", {})}
    return Config.model_validate({**{name: {} for name in sections()}, **tables, "model": model, "data": data})


# ---- for people and machines -------------------------------------------------------------------------------------------------------

TITLES = {"honoured": "honoured", "means nothing": "means nothing here", "refused": "refused"}


def shown(translation: Translation) -> str:
    """Write the table of answers, kind by kind."""
    blocks = []
    for kind in KINDS:
        answers = translation.of_kind(kind)
        if answers:
            lines = [line for answer in answers for line in _lines(answer)]
            blocks.append("\n".join([f"{TITLES[kind]}: {len(answers)}", *lines]))
    defaults = [key for key, value in translation.values.items() if not value.given]
    blocks.append(f"{many(len(defaults), 'key')} not given: {translation.system}'s defaults, which the run file names")
    blocks += [f"note: {note}" for note in translation.notes]
    blocks += [f"still to be set: {key}: {why}" for key, why in translation.undecided.items()]
    if translation.mistakes:
        blocks.append("\n".join(["still wrong:", *(f"  {text}" for text in translation.mistakes)]))
    return "\n\n".join(blocks)


def _lines(answer: Answer) -> list[str]:
    became = ", ".join(f"{key} = {toml_value(value)}" for key, value in answer.sets.items())
    told = [f"-> {became}"] if became else []
    head = f"  {shortened(answer.assignment, 200)}"
    body = ". ".join([*told, *([answer.why] if answer.why else [])]) if not told or not answer.why else f"{told[0]}  ({answer.why})"
    return [head, *(f"      {line}" for line in textwrap.wrap(printable(body), LINE))]


def as_document(translation: Translation) -> dict[str, Any]:
    """Return the same table in JSON's types."""
    return {
        "system": translation.system,
        "program": translation.program,
        "keys": [
            {
                "key": answer.key,
                "value": None if answer.value is REMOVED else answer.value,
                "answer": answer.kind,
                "becomes": dict(answer.sets),
                "why": answer.why,
            }
            for answer in translation.answers
        ],
        "counts": {kind: len(translation.of_kind(kind)) for kind in KINDS},
        "defaults": {key: value.value for key, value in translation.values.items() if not value.given},
        "mistakes": list(translation.mistakes),
        "undecided": translation.undecided,
        "notes": list(translation.notes),
        "run": translation.tables,
    }


def run_file(translation: Translation) -> str:
    """Write the run as TOML, each key with its source."""
    lines = [f"# A run of {translation.system}'s, translated. Check this file, then train: fulltilt train FILE --check"]
    lines += [f"# REFUSED, and not part of this file: {_comment(answer.assignment)}" for answer in translation.of_kind("refused")]
    told = [f"TO BE SET: {key}: {_comment(why)}" for key, why in translation.pending.items()]
    lines += [line for each in told for line in textwrap.wrap(each, LINE, initial_indent="# ", subsequent_indent="# ")]
    section = ""
    for key, value in translation.values.items():
        table, _, name = key.partition(".")
        lines += ["", f"[{table}]"] if table != section else []
        section = table
        told = [" and ".join(value.sources), value.why] if value.given else [value.why]
        text = _comment(". ".join(filter(None, told)))
        lines += textwrap.wrap(text, LINE, initial_indent="# ", subsequent_indent="# ", break_long_words=False)
        origin = "  # to be set" if key in translation.undecided else "" if value.given else f"  # {translation.system}'s default"
        lines.append(f"{name} = {toml_value(value.value)}{origin}")
    return "\n".join(lines) + "\n"


def _comment(text: str) -> str:
    return printable(text).replace("\n", "\\n").replace("\t", " ")
