"""Changes of execution that may make a run faster: the next values of its knobs, and knobs left to `auto`.

Enters: a configuration, a shape, devices, and the run as its own plan describes it. Leaves: `KnobChange`s, each as a user types it, with
the changed run. Guaranteed: the changes are those that `fulltilt plan` compares (tune/runners_up.py), also for knobs that were set by hand;
each change parses together with the rest of the configuration and is planned again, so that everything left to `auto` is decided anew;
changes that fulltilt.plan refuses are left out; arithmetic alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

from fulltilt import config as configuration
from fulltilt.records import UserError
from fulltilt.schema import Config, keys, shown, toml_value
from fulltilt.settings import is_set
from fulltilt.tune.description import RunDescription
from fulltilt.tune.overlay import ALLOWED
from fulltilt.tune.own import OwnPlan, own_plan
from fulltilt.tune.runners_up import COMPANIONS, TOLD, PlannedRun, alternatives, left_alone, told
from fulltilt.words import joined

OF_SEATS = frozenset(
    {"rollout.max_seqs", "rollout.kv_bytes", "rollout.memory_fraction"}
)  # keys that decide how many samples decode at once


@dataclass(frozen=True)
class KnobChange:
    """A change of a run, and the changed run."""

    setting: str  # as the user types it
    why: str
    keys: frozenset[str]
    run: RunDescription


@dataclass(frozen=True)
class ChangeableRun:
    """A run whose knobs may be changed."""

    planned: PlannedRun
    run: RunDescription  # with the decisions of its own plan and with measured lengths

    @cached_property
    def own(self) -> OwnPlan | None:
        """The plan that is made for the run here; None: its sizes are refused."""
        return planned_of(self.planned)

    @property
    def refused(self) -> str:
        return self.own.refused if self.own else "its sizes are not legal on these devices"

    @property
    def by_hand(self) -> list[str]:
        """Performance knobs that the user has set to another value than their default."""
        config = self.planned.config
        known = [key for key in keys() if key in ALLOWED and is_set(config, key)]
        return [key for key in known if configured(config, key) != left_alone(key)]

    def single(self) -> Iterator[KnobChange]:
        """Yield changes of one knob; those that leave it to `auto` first."""
        if self.own is None or self.own.refused:
            return
        for key in self.by_hand:
            if change := self._change({key: left_alone(key)}, "set by hand"):
                yield change
        for knob, value in self.own.knobs.items():
            for settings in alternatives(self.planned, self.own, knob, value):
                if change := self._change(settings, reason(knob, value, settings[knob])):
                    yield change

    def everything(self, without: frozenset[str] = frozenset()) -> KnobChange | None:
        """Return the change that leaves everything set by hand to `auto`; None unless that is more than one knob."""
        free = [key for key in self.by_hand if key not in without]
        if self.own is None or self.own.refused or len(free) < 2:
            return None
        return self._change({key: left_alone(key) for key in free}, "set by hand")

    def _change(self, settings: Mapping[str, Any], why: str) -> KnobChange | None:
        assert self.own
        for overrides in self._typed(settings):
            if (config := with_overrides(self.planned.config, overrides)) is None:
                continue
            after = planned_of(replace(self.planned, config=config))
            if after is None or after.refused:
                return None
            try:
                run = moved(self.run, self.own.run, after.run)
            except UserError:  # parts of the change contradict what the run's own plan has decided
                return None
            before = self.own.knobs
            others = {knob: value for knob, value in after.knobs.items() if value != before.get(knob)}
            words = [why] if why != "set by hand" else [left_to_auto(settings, others)]
            names = [name for name in TOLD if name in others and name not in settings]
            words += [f"with {joined([f'{name} {told(name, others[name])}' for name in names], 'and')}"] if names else []
            return KnobChange(" ".join(overrides), ", ".join(words), frozenset(settings), run)
        return None

    def _typed(self, settings: Mapping[str, Any]) -> Iterator[list[str]]:
        """Yield the overrides that make a change; then those that also remove the keys that it makes illegal."""
        overrides = [typed(key, value) for key, value in settings.items()]
        yield overrides
        beside = [other for key in settings for other in COMPANIONS.get(key, ()) if is_set(self.planned.config, other)]
        if beside:
            yield [*overrides, *(f"~{other}" for other in beside if other not in settings)]


def configured(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def typed(key: str, value: Any) -> str:
    if value is None:
        return f"~{key}"
    return f"{key}={value if isinstance(value, str) else toml_value(value)}"


def with_overrides(config: Config, overrides: Sequence[str]) -> Config | None:
    """Return the configuration with these overrides; None: it is refused."""
    try:
        return configuration.checked(config, overrides)
    except UserError:
        return None


def planned_of(planned: PlannedRun) -> OwnPlan | None:
    if planned.mistakes():
        return None
    try:
        return own_plan(planned.config, planned.shape, planned.cluster, planned.response)
    except UserError:
        return None


def moved(actual: Any, before: Any, after: Any) -> Any:
    """Return a run after its plan has changed from `before` to `after`. Where the two agree it stays as it is, since a run may differ from
    what is planned for it here (its prompts are shorter than their limit, or memory has run out)."""
    if before == after:
        return actual
    if is_dataclass(actual) and type(actual) is type(before) is type(after):
        own = {each.name: [getattr(one, each.name) for one in (actual, before, after)] for each in fields(actual)}
        return replace(actual, **{name: moved(*values) for name, values in own.items()})  # type: ignore[type-var]
    if isinstance(after, tuple) and len(actual) == len(before) == len(after):
        return tuple(moved(*values) for values in zip(actual, before, after, strict=True))
    if isinstance(after, float):  # the engine's share of memory: as much more or less as planned
        return min(1.0, max(0.0, actual + after - before))
    return after


# ---- words -------------------------------------------------------------------------------------------------------------------------------

# Why a knob may be changed to a value, or to a larger or a smaller one.
TO: Mapping[tuple[str, Any], str] = {
    ("recompute", "none"): "layers are not computed again",
    ("recompute", "selective"): "less is kept or less is computed again",
    ("recompute", "full"): "activations take less memory",
    ("offload_params", False): "fewer copies to the host and back",
    ("offload_grads", False): "fewer copies to the host and back",
    ("offload_optimizer", False): "fewer copies to the host and back",
    ("offload_activations", False): "fewer copies to the host and back",
    ("head_recompute", False): "logits are kept and not computed again",
    ("head_recompute", True): "logits take less memory",
    ("release_memory", False): "the KV cache is not given back and allocated again",
    ("release_memory", True): "the update gets the KV cache's memory",
    ("cuda_graphs", True): "fewer launches when decoding",
    ("shard", "optimizer"): "parameters are not gathered in passes",
    ("shard", "full"): "parameters take less memory",
    ("shard", "hybrid"): "parameters are gathered within a machine",
}
LARGER = {
    "token_budget": "fewer, larger micro-batches",
    "forward_token_budget": "fewer, larger micro-batches",
    "max_batched_tokens": "fewer, larger passes over prompts",
    "max_seqs": "more samples decoded at once",
    "kv_bytes": "a KV cache for more samples at once",
    "rollout.tensor_parallel": "each GPU reads fewer weights when decoding",
    "tensor_parallel": "each GPU holds and computes less of each layer",
    "sequence_parallel": "samples are shared out more evenly",
    "expert_parallel": "each GPU holds fewer experts",
}
SMALLER = {
    "token_budget": "smaller micro-batches, which take less memory",
    "forward_token_budget": "smaller micro-batches, which take less memory",
    "max_batched_tokens": "smaller passes over prompts, which take less memory",
    "max_seqs": "fewer samples decoded at once",
    "kv_bytes": "a smaller KV cache",
    "rollout.tensor_parallel": "more engines, less communication",
    "tensor_parallel": "less communication in layers",
    "sequence_parallel": "less communication in layers",
    "expert_parallel": "less communication in layers",
}


def reason(knob: str, before: Any, value: Any) -> str:
    name = knob.partition(".")[2]
    if (name, value) in TO:
        return TO[name, value]
    if isinstance(value, bool) or not isinstance(value, int) or not isinstance(before, int):
        return f"instead of {shown(before)}"
    words = LARGER if value > before else SMALLER
    return words.get(knob) or words.get(name) or f"instead of {before}"


def left_to_auto(settings: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    """Describe the value that a knob gets when it is no longer set by hand."""
    found = [f"{key} {told(key, others[key])}" if len(settings) > 1 else told(key, others[key]) for key in settings if key in others]
    return f"left to auto, which chooses {joined(found, 'and')}" if found else "not set by hand"
