"""What `fulltilt plan` does: tables, descriptions and run files in, reports out. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fulltilt import config as configuration
from fulltilt.hardware import Cluster
from fulltilt.records import UserError
from fulltilt.schema import Config
from fulltilt.settings import preset_of
from fulltilt.tune import description
from fulltilt.tune.own import longest_row
from fulltilt.tune.report import PlanReport, report_of, report_of_own
from fulltilt.tune.runners_up import PlannedRun
from fulltilt.tune.shapes import named_shape
from fulltilt.tune.tables import as_json, lines, predict, read_table
from fulltilt.words import many


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
    check_response(response, run.lengths.most_response, "lengths.most_response")
    return report_of(run if response is None else run.with_response(response))


def planned(path: Path, overrides: Sequence[str], hardware: str | None, shape: str | None, response: float | None) -> PlanReport:
    """A run of fulltilt."""
    config = configuration.load(path, overrides, here=False)
    if missing := not_planned(config):
        raise UserError(f"plan: {missing}")
    model = named_shape(shape or config.model.path)
    if preset_of(config).rollout:
        check_response(response, config.rollout.max_new_tokens, "rollout.max_new_tokens")
    else:
        check_response(response, longest_row(config, model), "data.max_tokens")
    return report_of_own(PlannedRun(config, model, cluster_for(config, hardware), response))


def not_planned(config: Config) -> str:
    """What the models of memory and time leave out of this run, with the remedy; empty: nothing."""
    engine = config.rollout.engine
    if engine == "native" or not preset_of(config).rollout:
        return ""
    return f'rollout.engine = "{engine}" is not planned, and the figures would be too low. Plan with the native engine'


def cluster_for(config: Config, hardware: str | None) -> Cluster:
    """The GPUs that the run is planned for: as many as its configuration asks for, where it does."""
    workers, nodes = config.cluster.workers, config.cluster.nodes
    if workers == "auto":
        found = Cluster.parse(hardware or "H100", nodes)
        if found.gpus % nodes:
            raise UserError(f"--hardware {hardware}: {found.gpus} GPUs cannot be shared out evenly among {nodes} machines (cluster.nodes)")
        return found if nodes == 1 else replace(found, per_machine=found.gpus // nodes)
    found = Cluster.parse(hardware or "H100", workers * nodes)
    if found.gpus != workers * nodes:
        asked = f"cluster.workers = {workers}" + (f" and cluster.nodes = {nodes} ask" if nodes > 1 else " asks")
        raise UserError(f"--hardware {hardware}: the run has {many(workers * nodes, 'GPU')}, for which {asked}. Change one of them")
    return replace(found, per_machine=workers if nodes > 1 else max(workers, found.per_machine))


def check_response(mean: float | None, most: int, key: str) -> None:
    if mean is not None and mean > most:
        raise UserError(f"--response-tokens {mean:g}: responses end at {most} tokens ({key}). Give a lower mean, or raise the key")
