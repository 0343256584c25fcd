"""The reference page of every key and every knob, written from the code: `python -m fulltilt.reference > docs/reference.md`.

Enters: the rows of `schema`, the ledger of `knobs` and its table of features that go together. Leaves: Markdown. Guaranteed: it depends on
nothing else, so a test can compare it with the page in the repository.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pydantic.fields import FieldInfo

from fulltilt import knobs
from fulltilt.schema import default_value, legal_values, row_of, sections, words

_HEAD = """\
# Reference

Written by `python -m fulltilt.reference > docs/reference.md` from the code. Do not edit it by hand.

A run is a TOML file, and `section.key=value` on the command line overrides it: `fulltilt train RUN.toml run.steps=100 train.lr=1e-6`.
A value on the command line is read as TOML, else taken as text; `True` and `False` are accepted too. Later overrides win.
`~section.key` unsets a key of the file (put quotes around it in zsh). `fulltilt knobs --all WORD` explains keys in the terminal.
Relative paths are relative to the current directory, and `~` at the beginning of a path is the home folder. All mistakes are reported at
once, before any model loads. Setting a key that has no effect is an error.
"""

_KNOBS_HEAD = """\
## Knobs

Every performance setting that verl's and ChatLearn's tuning guides name. "Must change" is the measurement that proves a knob; results do
not change with it, except under `algorithm`. Setting a knob that is not built is an error. A name of verl or ChatLearn in a run's file is
an error too, which says what to write instead.
"""

_TOGETHER_HEAD = """\
### Which features go together

Features that touch how layers and head run, two by two. Two that do not go together are refused when the configuration is read; where one
of the two is left to `auto`, that one is switched off. More than two go together where each two do.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *_sections(), _KNOBS_HEAD, *_ledger(), _TOGETHER_HEAD, *_together()])


def _sections() -> Iterator[str]:
    for name, section in sections().items():
        rows = [(f"`{name}.{key}`", legal_values(field), _default(field), _meaning(field)) for key, field in section.model_fields.items()]
        yield from (f"## `[{name}]`\n", *_table(("key", "type", "default", "meaning"), rows))


def _default(field: FieldInfo) -> str:
    value = default_value(field)
    return value if value in ("required", "left out") else f"`{value}`"


def _meaning(field: FieldInfo) -> str:
    """The notes of knobs are in the ledger."""
    row, said = row_of(field), words(field)
    spellings = ", ".join(f"`{theirs}` = `{ours}`" for theirs, ours in row.spellings.items())
    accepted = f"verl's spellings are accepted: {spellings}." if spellings else ""
    return " ".join([said.meaning, accepted, "" if row.section else said.note])


def _ledger() -> Iterator[str]:
    head = ("knob", "verl", "ChatLearn", "state", "values", "left alone", "must change", "note")
    for section in dict.fromkeys(knob.section for knob in knobs.LEDGER):
        own = [knob for knob in knobs.LEDGER if knob.section == section]
        rows = [
            (f"`{knob.name}`", _names(knob.verl), _names(knob.chatlearn), knob.state, knob.legal, knob.auto, knob.must_change, knob.note)
            for knob in own
        ]
        yield from (f"### {section}\n", *_table(head, rows))


def _together() -> Iterator[str]:
    words = {name: feature.words for name, feature in knobs.FEATURES.items()}
    rows = [(words[pair.one], words[pair.other], "yes" if pair.allowed else "**no**", pair.why) for pair in knobs.TOGETHER]
    return _table(("", "and", "", "because"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        cells = [" ".join(cell.split()).replace("|", "\\|") for cell in row]
        yield f"| {' | '.join(cells)} |"
    yield ""


def _names(names: Sequence[str]) -> str:
    return "<br>".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    print(page(), end="")
