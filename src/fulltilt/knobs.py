"""The ledger of performance knobs: every one that verl's and ChatLearn's tuning guides name.

Enters: the rows of `schema`. Leaves: `LEDGER`, one `Knob` per native name; `find`, which knows a key in any of the three spellings;
`TOGETHER`: which features that touch layers and head may be on at once; and `listing`, which explains knobs, or all keys, to people.
Guaranteed: a built knob is a key of the configuration and is read from its row there, so only knobs that are not built stand in this file,
and setting one of them is an error; an alias belongs to one knob only, or is listed in `SHARED`. What a run computes must not change with a
knob of the sections "Rollout" and "Training memory and speed", nor with a role's batching; the knobs under `algorithm` are part of the
algorithm, and no tuner touches them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fulltilt.records import UserError
from fulltilt.schema import BATCHES, ROLLOUT, TRAINING, conditions, default_value, keys, legal_values, row, row_of, toml_value, words

Source = Literal["native", "verl", "chatlearn"]


@dataclass(frozen=True)
class Knob:
    """One performance setting under all its names."""

    name: str  # the key in fulltilt's configuration
    section: str  # ROLLOUT, BATCHES or TRAINING
    verl: tuple[str, ...]  # full dotted names; one that ends in ".*" stands for every key below it
    chatlearn: tuple[str, ...]
    legal: str  # the legal values, in words; empty: nothing can be set, the engine decides by itself
    must_change: str  # the measurement that the knob must change
    auto: str  # its value when it is left out
    built: bool  # whether it is built in this version
    note: str = ""  # what users of an alias must know: another unit, the opposite sense, an error in a guide

    @property
    def state(self) -> str:
        """The word for tables: "built", "not built", or "always on" for a behaviour that takes no value."""
        if not self.legal:
            return "always on"
        return "built" if self.built else "not built"


def _built() -> Iterator[Knob]:
    for key, field in keys().items():
        own, said = row_of(field), words(field)
        if own.section:
            legal = legal_values(field)
            yield Knob(key, own.section, own.verl, own.chatlearn, legal, own.changes, said.left_alone, built=True, note=said.note)


# ---- knobs that are not built ----------------------------------------------------------------------------------------------------------

_COUNT = '"auto" or a whole number greater than 0'
_SWITCH = "true or false"


def _planned(name: str, section: str, legal: str, must_change: str, auto: str, aliases: str = "", note: str = "") -> Knob:
    names = row_of(row(aliases=aliases))
    return Knob(name, section, names.verl, names.chatlearn, legal, must_change, auto, built=False, note=note)


_SHARDED = {"train": ("actor", "policy_trainer"), "ref": ("ref", "ref_policy")}


def _sharded(native: str, alias: str, auto: str) -> Iterator[Knob]:
    note = "The guides' rule of thumb is about 4 billion parameters per GPU."
    for section, (role, model) in _SHARDED.items():
        aliases = f"ARR.{role}.megatron.{alias} | models.{model}.{alias}"
        yield _planned(f"{section}.{native}", TRAINING, _COUNT, "parameter or activation bytes per GPU", auto, aliases, note)


_PLANNED = (
    _planned(
        "rollout.preemption",
        ROLLOUT,
        "",
        "when KV memory runs out a sample is preempted and finished later: nothing is lost, and it is counted",
        "always on",
        note="It takes no value: the engine does it by itself.",
    ),
    _planned(
        "train.overlap_and_fusion",
        TRAINING,
        "a table of Megatron settings",
        "step time",
        "measured",
        "MEGATRON.*",
        "For example apply_rope_fusion. ChatLearn takes these as Megatron arguments.",
    ),
    *_sharded("pipeline_parallel", "pipeline_model_parallel_size", "1; below the micro-batch count"),
    *_sharded("context_parallel", "context_parallel_size", "1 below 8k tokens"),
    *_sharded("expert_tensor_parallel", "expert_tensor_parallel_size", "1; after expert"),
    *_sharded("virtual_pipeline", "virtual_pipeline_model_parallel_size", "1"),
)


# ---- features that touch layers and head -----------------------------------------------------------------------------------------------

ABOVE_0 = "above 0"


@dataclass(frozen=True)
class Feature:
    """A way to run layers and head, and the keys that switch it on."""

    keys: tuple[str, ...]  # any of these keys; the first one stands for the feature in words
    value: Any = True  # value at which the feature is on

    @property
    def words(self) -> str:
        key = self.keys[0]
        if self.value == ABOVE_0:
            return f"`{key}` {ABOVE_0}"
        return f"`{key}`" if self.value is True else f"`{key} = {toml_value(self.value)}`"

    def setting(self, values: Mapping[str, Any]) -> str | None:
        """Return the key and value as a user writes them if the feature is on; None if it is off or left to `auto`."""
        on = (key for key in self.keys if (values[key] > 0 if self.value == ABOVE_0 else values[key] == self.value))
        return next((f"{key} = {toml_value(values[key])}" for key in on), None)


FEATURES: Mapping[str, Feature] = {
    "compile": Feature(("train.compile",)),
    "fused_layers": Feature(("train.fused_layers",)),
    "lora": Feature(("lora.rank",), ABOVE_0),
    "fused_head": Feature(("train.fused_head",)),
    "cuda_graphs": Feature(("rollout.cuda_graphs",)),
    "selective": Feature(("train.recompute", "critic.recompute"), "selective"),
    "full": Feature(("train.recompute", "critic.recompute"), "full"),
    "offload_activations": Feature(("train.offload_activations", "critic.offload_activations")),
    "offload_params": Feature(("train.offload_params",)),
}


@dataclass(frozen=True)
class Pair:
    """Whether two features may be on at once."""

    one: str
    other: str
    allowed: bool
    why: str  # why they may not be on at once; or how they share the work
    if_copied: bool = False  # whether they may be on at once if a rollout engine reads a copy of the actor


TOGETHER: tuple[Pair, ...] = (
    Pair("compile", "fused_layers", False, "a layer's forward has one owner"),
    Pair("compile", "lora", True, "adapters are compiled with their layers"),
    Pair("compile", "fused_head", True, "the head is not part of a layer"),
    Pair("compile", "cuda_graphs", True, "graphs hold uncompiled layers; only passes over packed samples are compiled"),
    Pair("compile", "selective", False, "selective recompute decides per operation, and for that torch runs the layers uncompiled"),
    Pair("compile", "full", True, "compiled layers run twice"),
    Pair("compile", "offload_activations", True, "activations saved by compiled code are moved like others"),
    Pair("compile", "offload_params", True, "compiled code reads parameters where they are at the time"),
    Pair("fused_layers", "lora", True, "projections with an adapter run one by one, everything else is fused"),
    Pair("fused_layers", "fused_head", True, "the head is not part of a layer"),
    Pair("fused_layers", "cuda_graphs", True, "rollout and update run the same layers"),
    Pair("fused_layers", "selective", True, "the kernels of norms and products run again"),
    Pair("fused_layers", "full", True, "fused layers run twice"),
    Pair("fused_layers", "offload_activations", True, "activations saved by kernels are moved like others"),
    Pair("fused_layers", "offload_params", True, "fused weights are fused again when they return to the device"),
    Pair("lora", "fused_head", True, "the head has no adapter"),
    Pair("lora", "cuda_graphs", True, "adapters are captured with their layers"),
    Pair("lora", "selective", True, "the results of an adapter's matrix products are kept like others"),
    Pair("lora", "full", True, "layers and adapters run twice"),
    Pair("lora", "offload_activations", True, "activations saved by adapters are moved like others"),
    Pair("lora", "offload_params", True, "adapters leave the device with the weights that they belong to"),
    Pair("fused_head", "cuda_graphs", True, "rollout computes its own logits"),
    Pair("fused_head", "selective", True, "the head is not part of a layer"),
    Pair("fused_head", "full", True, "the head is not part of a layer"),
    Pair("fused_head", "offload_activations", True, "the head keeps its hidden states on the device"),
    Pair("fused_head", "offload_params", True, "the head's weight leaves the device with the others"),
    Pair("cuda_graphs", "selective", True, "only passes with gradients recompute"),
    Pair("cuda_graphs", "full", True, "only passes with gradients recompute"),
    Pair("cuda_graphs", "offload_activations", True, "only passes with gradients keep activations"),
    Pair(
        "cuda_graphs",
        "offload_params",
        False,
        'graphs read weights by address, and weights return to another one. With train.shard = "full" or "hybrid" graphs read a copy, as '
        "they do where rollout.tensor_parallel is another size than train.tensor_parallel",
        if_copied=True,
    ),
    Pair("selective", "offload_activations", True, "activations that are kept are moved"),
    Pair("selective", "offload_params", True, "layers are recomputed while their role works"),
    Pair("full", "offload_activations", True, "the layers' inputs are moved"),
    Pair("full", "offload_params", True, "layers are recomputed while their role works"),
    Pair("offload_activations", "offload_params", True, "activations exist only while their role works"),
)
"""Every two features, once; selective and full recompute are values of one key. What is not allowed is refused when the configuration is
read, and a test builds and runs what is allowed."""


# ---- the ledger ------------------------------------------------------------------------------------------------------------------------

LEDGER: tuple[Knob, ...] = tuple(sorted((*_built(), *_PLANNED), key=lambda knob: (ROLLOUT, BATCHES, TRAINING).index(knob.section)))

SHARED: frozenset[str] = frozenset({"packing", "models.policy_trainer.packing", "models.policy_trainer.max_token_in_packing"})
"""Aliases that set two of our knobs at once."""

TRANSLATED: Mapping[str, Mapping[Any, Any]] = {last: ours for field in keys().values() for last, ours in row_of(field).values.items()}
"""Last parts of aliases whose values mean something else here, in unit or sense: our values for theirs, where there is one. The values of
all others are taken as they are."""


ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    key: tuple(name.lstrip("~") for name in row_of(field).elsewhere.split()) for key, field in keys().items()
}
"""Names of keys in verl, TRL, transformers and vLLM, beyond the ledger's aliases."""


def _index() -> dict[str, list[tuple[Knob, Source]]]:
    index: dict[str, list[tuple[Knob, Source]]] = {}
    for knob in LEDGER:
        spellings: dict[Source, tuple[str, ...]] = {"native": (knob.name,), "verl": knob.verl, "chatlearn": knob.chatlearn}
        for source, names in spellings.items():
            for name in names:
                index.setdefault(name, []).append((knob, source))
    return index


_BY_NAME = _index()


def find(key: str) -> list[tuple[Knob, Source]]:
    """Return every knob that `key` names, with the system that uses this name; more than one only for `SHARED` aliases. The beginning of a
    name may be left out (`rollout.n`, `n`), and a name that a guide writes without a section (`use_liger_kernel`) may be in any."""
    parts = key.split(".")
    below = (".".join(parts[:length]) + ".*" for length in range(len(parts) - 1, 0, -1))
    by_end = [name for name, found in _BY_NAME.items() if name.endswith(f".{key}") and found[0][1] != "native"]
    same = len({tuple(knob.name for knob, _ in _BY_NAME[name]) for name in by_end}) == 1
    alone = [parts[-1]] if parts[-1] not in SHARED else []
    known = (name for name in (key, *below, *(by_end if same else []), *alone) if name in _BY_NAME)
    return [] if key.endswith(".*") else _BY_NAME.get(next(known, ""), [])


def translate(alias: str, value: Any) -> Any:
    """Return the value of our knob that does the same as `value` under `alias`; None if there is none or it depends on other keys."""
    known = TRANSLATED.get(alias.rpartition(".")[2])
    return value if known is None else known.get(value) if isinstance(value, bool | int | float | str) else None


def elsewhere(key: str) -> list[str]:
    """Return our keys for a key of another system, beyond the ledger's aliases: by its last two parts, else by its last one."""
    parts = key.split(".")
    found = ([ours for ours, names in ELSEWHERE.items() if end in names] for end in (".".join(parts[-2:]), parts[-1]))
    return next(filter(None, found), [])


def has_another_meaning(key: str) -> bool:
    """Return whether the values of such a key mean something else here."""
    parts = key.split(".")
    return any(f"~{end}" in row_of(field).elsewhere.split() for field in keys().values() for end in (".".join(parts[-2:]), parts[-1]))


# ---- for people ------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ListedKey:
    """A knob or a key, as it is listed and explained."""

    names: tuple[str, ...]  # all names, its own first
    line: str  # the line in a list of all knobs or keys
    facts: Mapping[str, str]  # explanations by title
    document: Mapping[str, Any]  # the same facts for machines


def listing(wanted: Sequence[str], *, everything: bool, as_json: bool) -> str:
    """Return the output of `fulltilt knobs`: the knobs, or with `everything` the keys, whose name or alias contains one of the words, or
    all. If no name matches, keys are also searched by a word of their meaning."""
    entries = [*map(_of_key, keys())] if everything else [*map(_of_knob, LEDGER)]
    found = [entry for entry in entries if not wanted or _matches(wanted, entry.names)]
    found = found or [entry for entry in entries if everything and _matches(wanted, [entry.facts["meaning"]])]
    if not found:
        kind = "key" if everything else "performance knob"
        remedy = "` lists all keys" if everything else f" {' '.join(wanted)}` looks through all keys"
        raise UserError(f"no {kind} or alias contains {' or '.join(wanted)}. `fulltilt knobs --all{remedy}")
    if as_json:
        return json.dumps([entry.document for entry in found], indent=1)
    if wanted:
        return "\n\n".join(_in_full(entry) for entry in found)
    option = " --all" if everything else ""
    return "\n".join([*(entry.line for entry in found), "", f"`fulltilt knobs{option} WORD` describes those whose name contains WORD"])


def _matches(wanted: Sequence[str], texts: Sequence[str]) -> bool:
    return any(word.lower() in text.lower() for word in wanted for text in texts)


def _in_full(entry: ListedKey) -> str:
    return "\n".join([entry.names[0], *(f"  {title}: {text}" for title, text in entry.facts.items() if text)])


def _of_key(key: str) -> ListedKey:
    field = keys()[key]
    own, said = row_of(field), words(field)
    spellings = ", ".join(f"{theirs} = {ours}" for theirs, ours in own.spellings.items())
    facts = {
        "meaning": said.meaning,
        "values": legal_values(field),
        "default": default_value(field),
        "to have an effect": "; ".join(dict.fromkeys(each.remedy.format(section=key.partition(".")[0]) for each in conditions(key))),
        "verl": ", ".join(own.verl),
        "ChatLearn": ", ".join(own.chatlearn),
        "other systems": ", ".join(ELSEWHERE[key]),
        "note": " ".join(filter(None, (said.note, f"verl's spellings are accepted: {spellings}." if spellings else ""))),
    }
    document = {
        "name": key,
        "legal": facts["values"],
        "default": facts["default"],
        "meaning": said.meaning,
        "condition": facts["to have an effect"],
        "verl": own.verl,
        "chatlearn": own.chatlearn,
        "elsewhere": ELSEWHERE[key],
        "note": facts["note"],
    }
    line = f"{key:<36} {facts['default']:<14} {said.meaning.partition('. ')[0]}"
    return ListedKey((key, *own.verl, *own.chatlearn, *ELSEWHERE[key]), line, facts, document)


def _of_knob(knob: Knob) -> ListedKey:
    facts = {
        "state": knob.state,
        "values": knob.legal,
        "auto": knob.auto,
        "must change": knob.must_change,
        "verl": ", ".join(knob.verl),
        "ChatLearn": ", ".join(knob.chatlearn),
        "note": knob.note,
    }
    line = f"{knob.name:<36} {knob.state:<10} {knob.must_change}"
    return ListedKey((knob.name, *knob.verl, *knob.chatlearn), line, facts, asdict(knob) | {"state": knob.state})
