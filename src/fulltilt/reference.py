"""The reference page of every key and every knob, written from the code: `python -m fulltilt.reference > docs/reference.md`.

Enters: the schema of `config`, the ledger of `knobs` and its table of what goes together. Leaves: Markdown. Guaranteed: it depends on
nothing else, so a test can compare it with the page in the repository.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic.fields import FieldInfo

from fulltilt import config, knobs

_HEAD = """\
# Reference

Written by `python -m fulltilt.reference > docs/reference.md` from the code. Do not edit it by hand.

A run is a TOML file, and `section.key=value` on the command line overrides it: `fulltilt train RUN.toml run.steps=100 train.lr=1e-6`.
A value on the command line is read as TOML, else taken as text; `True` and `False` are accepted too. Later overrides win.
Relative paths are relative to the current directory. All mistakes are reported at once, before any model loads.
"""

_KNOBS_HEAD = """\
## Knobs

Every performance setting that verl's and ChatLearn's tuning guides name. "Must change" is the measurement that proves a knob; results do
not change with it, except under `algorithm`. Setting a knob that is not built is an error. A name of verl or ChatLearn in a run's file is
an error too, which says what to write instead.
"""


_TOGETHER_HEAD = """\
### What goes together

Features that touch how layers and head run, two by two. What does not go together is refused when the configuration is read; where one of
the two is left to `auto`, it gives way. More than two go together where each two do.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *_sections(), _KNOBS_HEAD, *_ledger(), _TOGETHER_HEAD, *_together()])


def _sections() -> Iterator[str]:
    for name, schema in config.sections().items():
        yield f"## `[{name}]`\n"
        yield from _table(
            ("key", "type", "default", "meaning"),
            [
                (f"`{name}.{key}`", _cell(config.legal_values(field)), _default(field), _cell(field.description or ""))
                for key, field in schema.model_fields.items()
            ],
        )


def _ledger() -> Iterator[str]:
    for section in dict.fromkeys(knob.section for knob in knobs.LEDGER):
        yield f"### {section}\n"
        yield from _table(
            ("knob", "verl", "ChatLearn", "state", "values", "left alone", "must change", "note"),
            [
                (
                    f"`{knob.name}`",
                    _names(knob.verl),
                    _names(knob.chatlearn),
                    knob.state,
                    _cell(knob.legal),
                    _cell(knob.auto),
                    _cell(knob.must_change),
                    _cell(knob.note),
                )
                for knob in knobs.LEDGER
                if knob.section == section
            ],
        )


def _together() -> Iterator[str]:
    yield from _table(
        ("", "and", "", "because"),
        [
            (knobs.FEATURES[pair.one], knobs.FEATURES[pair.other], "yes" if pair.allowed else "**no**", _cell(pair.why))
            for pair in knobs.TOGETHER
        ],
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.get_default(call_default_factory=True, validated_data={})
    return "left out" if value is None else f"`{config.toml_value(value)}`"


def _names(names: Sequence[str]) -> str:
    return "<br>".join(f"`{name}`" for name in names)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
