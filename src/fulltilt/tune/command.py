"""What `fulltilt plan` does: tables, descriptions and run files in, reports out. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fulltilt import config as configuration
from fulltilt.hardware import Cluster
from fulltilt.records import UserError
from fulltilt.tune import description
from fulltilt.tune.own import own_plan
from fulltilt.tune.report import PlanReport, report_of
from fulltilt.tune.shapes import named_shape
from fulltilt.tune.tables import as_json, lines, predict, read_table


def tables(paths: Sequence[Path], hardware: str | None, shape: str | None) -> tuple[dict[str, Any], str]:
    """Rows of published tables, as JSON and as text."""
    read = [read_table(path, hardware=hardware, shape=shape) for path in paths]
    predictions = [own for table in read for own in predict(table)]
    return as_json(read, predictions), "\n".join(lines(read, predictions))


def described(path: Path, hardware: str | None, shape: str | None, response: float | None) -> PlanReport:
    """A run that is described by hand."""
    run = description.read(path)
    if hardware is not None:
        run = replace(run, cluster=Cluster.parse(hardware, run.cluster.gpus))
    if shape is not None:
        run = replace(run, shape=named_shape(shape))
    return report_of(run if response is None else run.with_response(response))


def planned(path: Path, overrides: Sequence[str], hardware: str | None, shape: str | None, response: float | None) -> PlanReport:
    """A run of fulltilt."""
    config = configuration.load(path, overrides, here=False)
    if config.algorithm.name == "sft":
        raise UserError("plan: supervised fine-tuning is not planned yet. Give a run with rollouts")
    own = own_plan(config, named_shape(shape or config.model.path), Cluster.parse(hardware or "1xH100"), response)
    return report_of(own.run, own.knobs, own.reasons, own.refused)
