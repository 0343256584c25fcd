"""The overlay: a small TOML file with performance settings that `fulltilt tune` chose for a model on a device, and the evidence for them.

Enters: the file, and the run file with its overrides. Leaves: the overrides to train with, and notes about them. Guaranteed: no torch; only
performance knobs are used, never a key of the algorithm; a setting applies if run file and command line leave its key to `auto`; a
different one on the command line wins, with a note, and a different one in the run file is an error; an overlay for another model or other
devices is refused.

    [actor]
    token_budget = 32768
    [tuned]                       # what the settings were chosen for, and how
    model = "28 layers of width 3584, 7.6 billion parameters"
    shape = "5f0c..."             # identifies the model's sizes, its type and its adapters
    device = "NVIDIA H200"
    devices = 1
    [[tuned.candidates]]          # what was tried; no knobs: everything left to auto
    knobs = { "actor.token_budget" = 32768 }
    predicted_s = 3.9
    measured_s = 4.0
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fulltilt import config as configuration
from fulltilt import knobs
from fulltilt.hardware import accelerator
from fulltilt.records import UserError
from fulltilt.schema import Config, flatten, sections, shown, toml_value, value_of
from fulltilt.settings import is_set
from fulltilt.shape import Shape, UnknownParameters
from fulltilt.words import many

EVIDENCE = "tuned"
# The user decides how many devices there are, and which roles have some to themselves.
ALLOWED = frozenset(knob.name for knob in knobs.LEDGER if knob.built and not knob.name.startswith(("algorithm.", "cluster.")))
# Settings that a tuned step depends on and that may differ all the same: the run reports the difference.
WORKLOAD = (
    "algorithm.name", "algorithm.prompts_per_step", "algorithm.samples_per_prompt", "algorithm.minibatches_per_step", "algorithm.epochs",
    "data.max_prompt_tokens", "rollout.max_new_tokens",
)  # fmt: skip
NUMBERS = ("predicted_s", "measured_s", "tokens_per_s", "peak_gib")


@dataclass(frozen=True)
class Trial:
    """A setting that was considered, and its results. None: not known."""

    knobs: Mapping[str, Any]  # empty: everything that the run file leaves to `auto` stays there
    predicted_s: float | None = None  # seconds of a step
    measured_s: float | None = None
    tokens_per_s: float | None = None
    peak_gib: float | None = None  # peak memory of the device
    failed: str = ""  # why it could not be measured


@dataclass(frozen=True)
class TunedFor:
    """Model, devices and workload that an overlay's settings were chosen for."""

    model: str  # description in words
    shape: str  # fingerprint
    device: str
    devices: int
    fulltilt: str  # version
    workload: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Overlay:
    knobs: Mapping[str, Any]
    made_for: TunedFor
    trials: tuple[Trial, ...] = ()

    @property
    def measured(self) -> bool:
        return any(trial.measured_s is not None for trial in self.trials)


def tuned_for(config: Config, shape: Shape, device: str, devices: int, version: str) -> TunedFor:
    return TunedFor(describe_shape(shape), fingerprint(shape, config), device, devices, version, workload_of(config))


def workload_of(config: Config) -> dict[str, Any]:
    values = flatten(config)
    return {key: values[key] for key in WORKLOAD if key.partition(".")[0] != "rollout" or config.algorithm.name != "sft"}


def fingerprint(shape: Shape, config: Config) -> str:
    """Return a fingerprint of the trained model, of all that memory and time depend on: sizes, type of the parameters, adapters."""
    layers = [
        (own.heads, own.key_heads, own.head_width, own.inner, own.experts and tuple(vars(own.experts).values())) for own in shape.layers
    ]
    lora = (config.lora.rank, config.lora.targets, config.lora.parameters) if config.lora.rank else ()
    sizes = (shape.model_type, shape.vocabulary, shape.width, shape.tied, layers, config.model.dtype, lora)
    return hashlib.sha256(repr(sizes).encode()).hexdigest()[:16]


def describe_shape(shape: Shape) -> str:
    words = f"{shape.model_type or 'unknown family'}, {many(len(shape.layers), 'layer')} of width {shape.width}"
    try:
        count = sum(shape.parameters_by_kind().values())
    except UnknownParameters:
        return words
    unit, name = next(((unit, name) for unit, name in ((1e9, " billion"), (1e6, " million")) if count >= unit), (1, ""))
    return f"{words}, {count / unit:.4g}{name} parameters" if name else f"{words}, {count:,} parameters"


# ---- writing -----------------------------------------------------------------------------------------------------------------------------


def write(overlay: Overlay, command: str) -> str:
    """Return the text of the overlay file. `command`: the command that made it."""
    how = "measured on these devices" if overlay.measured else "predicted, not measured"
    lines = [f"# Performance settings by `{command}`, {how}. Use them with: fulltilt train RUN.toml --overlay THIS_FILE"]
    if not overlay.knobs:
        lines.append("# No setting was found that is faster than what fulltilt chooses by itself.")
    for section in sections():
        if own := {key: value for key, value in sorted(overlay.knobs.items()) if key.partition(".")[0] == section}:
            lines += ["", f"[{section}]", *(f"{key.partition('.')[2]} = {toml_value(value)}" for key, value in own.items())]
    made = overlay.made_for
    lines += ["", f"[{EVIDENCE}]", *(f"{name} = {toml_value(value)}" for name, value in vars(made).items() if name != "workload")]
    lines += [f"workload = {quoted_table(made.workload)}"]
    for trial in overlay.trials:
        lines += ["", f"[[{EVIDENCE}.candidates]]", f"knobs = {quoted_table(trial.knobs)}"]
        lines += [f"{name} = {value:.6g}" for name in NUMBERS if (value := getattr(trial, name)) is not None]
        lines += [f"failed = {toml_value(trial.failed)}"] if trial.failed else []
    return "\n".join(lines) + "\n"


def quoted_table(values: Mapping[str, Any]) -> str:
    """Write an inline table whose keys are dotted names."""
    inside = ", ".join(f"{toml_value(key)} = {toml_value(value)}" for key, value in values.items())
    return f"{{ {inside} }}" if inside else "{}"


# ---- reading -----------------------------------------------------------------------------------------------------------------------------


def read(path: Path) -> Overlay:
    tables = configuration.read_toml(path)
    evidence = tables.pop(EVIDENCE, None)
    if not isinstance(evidence, dict):
        raise UserError(f"{path}: has no [{EVIDENCE}] table, so it is not an overlay. `fulltilt tune RUN.toml --out {path}` writes one")
    settings: dict[str, Any] = {}
    for section, table in tables.items():
        if not isinstance(table, dict):
            raise UserError(f"{path}: {section} is not a section. Write the keys of an overlay below the name of their section")
        settings |= {f"{section}.{key}": value for key, value in table.items()}
    if wrong := [key for key in settings if key not in ALLOWED]:
        raise UserError(f"{path}: {refusal(wrong[0])}. Remove it: an overlay has performance settings alone (`fulltilt knobs` lists them)")
    return Overlay(settings, evidence_of(evidence, path), tuple(trials_of(evidence.get("candidates", []), path)))


def refusal(key: str) -> str:
    if key.startswith("algorithm."):
        return f"{key} is part of the algorithm, which tuning never changes"
    if key.startswith("cluster."):
        return f"{key} says which devices a run has, which tuning never changes"
    return f"{key} is not a performance setting"


def evidence_of(given: Mapping[str, Any], path: Path) -> TunedFor:
    kinds = {"model": str, "shape": str, "device": str, "devices": int, "fulltilt": str}
    for name, kind in kinds.items():
        if type(given.get(name)) is not kind:
            raise UserError(
                f"{path}: {EVIDENCE}.{name} is {shown(given[name]) if name in given else 'missing'}, so it is not known what the settings "
                f"were chosen for. Write the overlay again with `fulltilt tune RUN.toml --out {path}`"
            )
    workload = given.get("workload", {})
    return TunedFor(**{name: given[name] for name in kinds}, workload=workload if isinstance(workload, dict) else {})


def trials_of(given: Any, path: Path) -> Iterator[Trial]:
    entries = given if isinstance(given, list) else [None]
    for given_entry in entries:
        entry: dict[str, Any] = given_entry if isinstance(given_entry, dict) else {"measured_s": ""}
        numbers = {name: entry[name] for name in NUMBERS if name in entry}
        if not all(isinstance(number, int | float) for number in numbers.values()) or not isinstance(entry.get("knobs", {}), dict):
            raise UserError(f"{path}: {EVIDENCE}.candidates is not a list of tables with numbers. Write the overlay again, or remove it")
        yield Trial(dict(entry.get("knobs", {})), failed=str(entry.get("failed", "")), **numbers)


# ---- applying ----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Applied:
    """The overrides of a run with an overlay, and notes about them."""

    overrides: list[str]
    notes: list[str]


def check_origin(overlay: Overlay, path: Path, here: TunedFor) -> None:
    """Refuse an overlay for another model or other devices."""
    made, again = overlay.made_for, f"Tune again: fulltilt tune RUN.toml --out {path}"
    if made.shape != here.shape:
        raise UserError(
            f"{path}: was tuned for another model ({made.model}; {EVIDENCE}.shape {made.shape}) than this run's ({here.model}; "
            f"{here.shape}, model.dtype and lora.rank included). {again}"
        )
    if not same_device(made.device, here.device) or made.devices != here.devices:
        raise UserError(f"{path}: was tuned for {made.devices} x {made.device}, and this run has {here.devices} x {here.device}. {again}")


def same_device(one: str, other: str) -> bool:
    """Return whether two names, as people or as the driver writes them, mean the same device."""
    if one == other:
        return True
    try:
        return accelerator(one) == accelerator(other)
    except UserError:  # not in the table: the name that people write is one of the words of the driver's name
        return min(one, other, key=len).lower() in re.split(r"[\s_]+", max(one, other, key=len).lower())


def apply(overlay: Overlay, path: Path, run: Path, overrides: Sequence[str], here: TunedFor, config: Config) -> Applied:
    """Return the overrides with which a run uses an overlay. `config`: the run's configuration without it. `here`: what this run would be
    tuned for."""
    check_origin(overlay, path, here)
    tables = configuration.read_toml(run)
    used, notes = dict[str, Any](), list[str]()
    for key, value in overlay.knobs.items():
        section, _, name = key.partition(".")
        in_file, given = as_table(tables.get(section)).get(name), value_of(config, key)
        by_command = name in getattr(config, section).model_fields_set and in_file != given and not unset(key, overrides)
        if by_command and given != value:
            notes.append(f"overlay: {key} = {shown(given)} of the command line is used, not {shown(value)} of {path}")
        elif is_set(config, key) and given != value:
            raise UserError(
                f"{path}: {key} = {shown(value)}, but {run} sets it to {shown(given)}. Remove it from one of the two, or give {key} on the "
                "command line, which wins"
            )
        elif given != value:
            used[key] = value
    # A key that the command line unsets is set once, by the overlay.
    kept = [given for given in overrides if not any(unset(key, [given]) for key in used)]
    return Applied([*kept, *(f"{key}={toml_value(value)}" for key, value in used.items())], [*notes, *told(overlay, path, used, here)])


def told(overlay: Overlay, path: Path, used: Mapping[str, Any], here: TunedFor) -> Iterator[str]:
    settings = ", ".join(f"{key} = {shown(value)}" for key, value in used.items()) or "nothing to set"
    yield f"overlay {path}: {settings}" + ("" if overlay.measured else " (predicted, not measured)")
    made = overlay.made_for
    changed = [key for key, value in made.workload.items() if key in here.workload and here.workload[key] != value]
    if changed:
        each = ", ".join(f"{key} {shown(made.workload[key])} -> {shown(here.workload[key])}" for key in changed)
        yield f"overlay {path}: the work of a step has changed since it was tuned ({each}); another setting may be faster now"
    if made.fulltilt != here.fulltilt:
        yield f"overlay {path}: was made by fulltilt {made.fulltilt}, and this is {here.fulltilt}; another setting may be faster now"


def unset(key: str, overrides: Iterable[str]) -> bool:
    """Return whether the command line unsets a key."""
    return any(given.strip() == f"~{key}" for given in overrides)


def as_table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
