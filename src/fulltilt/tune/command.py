"""Planning for `fulltilt plan`: reads tables, descriptions and run files, returns reports. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fulltilt import config as configuration
from fulltilt.hardware import Cluster
from fulltilt.records import UserError
from fulltilt.schema import Config, shown
from fulltilt.settings import preset_of
from fulltilt.shape import Shape
from fulltilt.tune import description
from fulltilt.tune.own import longest_row
from fulltilt.tune.report import PlanReport, report_of, report_of_own
from fulltilt.tune.runners_up import PlannedRun
from fulltilt.tune.shapes import named_shape
from fulltilt.tune.tables import as_json, lines, predict, read_table
from fulltilt.words import many


def tables(paths: Sequence[Path], hardware: str | None, shape: str | None) -> tuple[dict[str, Any], str]:
    """Return the rows of published tables, as JSON and as text."""
    read = [read_table(path, hardware=hardware, shape=shape) for path in paths]
    predictions = [own for table in read for own in predict(table)]
    return as_json(read, predictions), "\n".join(lines(read, predictions))


def described(path: Path, hardware: str | None, shape: str | None, response: float | None) -> PlanReport:
    """Return the report of a run that is described by hand."""
    return report_of(description.read(path, hardware, shape, response))


def planned(path: Path, overrides: Sequence[str], hardware: str | None, shape: str | None, response: float | None) -> PlanReport:
    """Return the report of a run of fulltilt."""
    return planned_config(configuration.load(path, overrides, here=False), hardware, shape, response)


def planned_config(config: Config, hardware: str | None, shape: str | None = None, response: float | None = None) -> PlanReport:
    if missing := not_planned(config):
        raise UserError(f"plan: {missing}")
    model = named_shape(config.model.path if shape is None else shape)
    check_mean(config, model, response)
    run = PlannedRun(config, model, cluster_for(config, hardware), response)
    refuse_mistakes(run, assumed=hardware is None)
    return report_of_own(run)


def refuse_mistakes(run: PlannedRun, *, assumed: bool = False) -> None:
    """Raise a UserError with everything that a run on these devices would refuse. `assumed`: whether the user has not named the devices."""
    mistakes = run.mistakes()
    if mistakes and assumed and run.cluster.gpus == 1 and not run.cluster.gpu.is_cpu:
        mistakes.append(f"One {run.cluster.gpu.name} was assumed. If the run has other devices, name them, as in --hardware 8xH100-80GB")
    if mistakes:
        raise UserError("\n".join(mistakes))


def beside(configs: Mapping[str, Config], hardware: str | None) -> tuple[dict[str, Any], list[str]]:
    """Return the plans of several configurations of one run, as JSON and as a table: seconds of each phase, and the knobs that differ."""
    reports: dict[str, PlanReport] = {}
    mistakes: dict[str, str] = {}
    for name, config in configs.items():
        try:
            reports[name] = planned_config(config, hardware)
        except UserError as error:
            mistakes[name] = str(error)
    lines = [f"{name}: {mistake}" for name, mistake in mistakes.items()]
    if reports:
        cluster = next(iter(reports.values())).run.cluster
        phases = dict.fromkeys(phase for report in reports.values() for phase in report.seconds.phases)
        rows: dict[str, list[str]] = {"seconds a step": [f"{report.seconds.total:.1f}" for report in reports.values()]}
        for phase in phases:
            found = [report.seconds.phases.get(phase) for report in reports.values()]
            rows[f"  {phase}"] = [f"{each.total:.1f}" if each else "-" for each in found]
        rows["fits"] = ["yes" if report.fits else f"no: {report.why_not[0]}" for report in reports.values()]
        for knob in dict.fromkeys(knob for report in reports.values() for knob in report.knobs):
            values = [shown(report.knobs.get(knob)) for report in reports.values()]
            if len(set(values)) > 1:
                rows[knob] = values
        lines.append(f"predicted for {cluster.gpus} x {cluster.gpu.name}:")
        head = ["", *reports]
        widths = [max(len(row[column]) for row in (head, *([name, *cells] for name, cells in rows.items()))) for column in range(len(head))]
        lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                  for row in (head, *([name, *cells] for name, cells in rows.items()))]  # fmt: skip
    return {
        **{name: report.as_json() for name, report in reports.items()},
        **{name: {"not planned": why} for name, why in mistakes.items()},
    }, lines


def not_planned(config: Config) -> str:
    """Return what the models of memory and time do not cover in this run, with the remedy; an empty string if they cover all of it."""
    engine = config.rollout.engine
    if engine == "native" or not preset_of(config).rollout:
        return ""
    return f'rollout.engine = "{engine}" is not planned, and the figures would be too low. Plan with the native engine'


def cluster_for(config: Config, hardware: str | None) -> Cluster:
    """Return the devices that the run is planned for: of the kind and as many as its configuration asks for, if it does."""
    workers, nodes, device = config.cluster.workers, config.cluster.nodes, config.run.device
    found = Cluster.parse(hardware or ("CPU" if device == "cpu" else "H100"), nodes if workers == "auto" else workers * nodes)
    if device not in ("auto", found.gpu.device):
        raise UserError(f"--hardware {hardware}: the run has other devices: run.device = {shown(device)}. Change one of them")
    if workers == "auto":
        if found.gpu.is_cpu and found.gpus != nodes:
            why = "on CPUs a run has one worker on each machine, unless cluster.workers says more"
            raise UserError(f"--hardware {hardware}: {why}. Set cluster.workers = {max(1, found.gpus // nodes)}, or give {nodes}xCPU")
        if found.gpus % nodes:
            raise UserError(f"--hardware {hardware}: {found.gpus} GPUs cannot be shared out evenly among {nodes} machines (cluster.nodes)")
        return found if nodes == 1 else replace(found, per_machine=found.gpus // nodes)
    if found.gpus != workers * nodes:
        asked = f"cluster.workers = {workers}" + (f" and cluster.nodes = {nodes} ask" if nodes > 1 else " asks")
        raise UserError(f"--hardware {hardware}: the run has {many(workers * nodes, 'GPU')}, for which {asked}. Change one of them")
    if found.gpu.is_cpu:  # the workers of a machine are processes that share it
        found = replace(found, gpu=found.gpu.shared_by(workers))
    return replace(found, per_machine=workers if nodes > 1 else max(workers, found.per_machine))


def check_mean(config: Config, model: Shape | None, response: float | None) -> None:
    """Refuse a mean response above the limit of a run's responses. `model`: None if its positions are checked later."""
    if preset_of(config).rollout:
        check_response(response, config.rollout.max_new_tokens, "rollout.max_new_tokens")
    else:
        check_response(response, longest_row(config, model), "data.max_tokens")


def check_response(mean: float | None, most: int, key: str) -> None:
    if mean is not None and mean > most:
        raise UserError(f"--response-tokens {mean:g}: responses end at {most} tokens ({key}). Give a lower mean, or raise the key")
