"""The results of proofs as a table for people.

Enters: results. Leaves: a table on standard output, grouped by section of the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from fulltilt import knobs
from fulltilt.observe.metrics import Number
from fulltilt.proofs.run import ProofResult
from fulltilt.words import in_bytes, many

VERDICTS = {True: ("holds", "green"), False: ("DOES NOT HOLD", "bold red"), None: ("needs a GPU", "yellow")}
EQUAL = {True: "equal", False: "DIFFER", None: "-"}
WIDTH = 150  # where standard output is not a terminal


def show(results: Sequence[ProofResult]) -> None:
    Console(width=None if Console().is_terminal else WIDTH).print(table(results))


def table(results: Sequence[ProofResult]) -> Group:
    """Below each knob stands what it must change."""
    found = Table(show_edge=False, pad_edge=False)
    for name in ("knob", "role", "measurement", "off", "on", "gradients", ""):
        found.add_column(name, justify="right" if name in ("off", "on") else "left", overflow="fold")
    section = ""
    for knob in knobs.LEDGER:
        chosen = [result for result in results if result.knob == knob.name]
        if chosen and knob.section != section:
            section = knob.section
            found.add_section()
            found.add_row(Text(section, "italic"))
        if chosen:
            found.add_row(Text(knob.name, "bold"), "", Text(f"must change: {knob.must_change}", "dim"))
        for result in chosen:
            verdict, style = VERDICTS[result.holds]
            numbers = (shown(result.off, result.unit), shown(result.on, result.unit))
            found.add_row("", result.role, result.metric, *numbers, EQUAL[result.gradients_equal], Text(verdict, style))
            if result.holds is not True:
                found.add_row("", "", Text(result.reason, style))
    counts = {value: sum(result.holds is value for result in results) for value in VERDICTS}
    words = f"{many(len(results), 'proof')}: {counts[True]} hold, {counts[False]} do not hold, {counts[None]} need a GPU"
    return Group(found, "", words)


def shown(number: Number | None, unit: str) -> str:
    if number is None:
        return "-"
    if unit == "bytes":
        return in_bytes(number)
    return f"{number:.0%}" if unit == "share" else f"{number:,.4g}" if isinstance(number, float) else f"{number:,}"
