"""Curves of runs: metrics from `metrics.jsonl` as JSON and as a picture.

Enters: run folders, or JSON files with curves (those that this module and `fulltilt bench learn` write). Leaves: one JSON document with
every point, and a PNG with one panel per metric and one line per run. Guaranteed: a step without the metric has no point; a metric that no
run has is an error that names similar ones; the JSON needs only the core packages, the PNG needs matplotlib (the extra `plot`). Free of
torch.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from fulltilt.folders import refuse_foreign_json
from fulltilt.observe.metrics import read_lines
from fulltilt.records import UserError
from fulltilt.words import listed

METRICS = "metrics.jsonl"
DEFAULT = ("val/reward/mean", "critic/score/mean", "val/loss", "train/loss")  # metrics that are drawn by default, if they exist
PARTS_OF_TIME = ("timing_s/step", "timing_s/testing", "timing_s/save_checkpoint")
AGAINST = ("step", "seconds")
PNG = b"\x89PNG"
MARKED = 20  # curves with at most this many points have markers
NAMED = 6  # at most this many metrics are named in an error


@dataclass(frozen=True)
class Curve:
    """One metric of one run. Example: Curve("runs/a", "val/reward/mean", (0, 20), (3.1, 70.2), (0.03, 0.05))"""

    label: str
    metric: str
    steps: tuple[float, ...]
    seconds: tuple[float, ...]  # seconds since the start, at the end of these steps
    values: tuple[float, ...]


# -- reading ------------------------------------------------------------------------------------------------------------------------------


def read(sources: Sequence[Path], metrics: Sequence[str]) -> list[Curve]:
    """Return every curve of `metrics`, in their order; without metrics, those of DEFAULT that exist."""
    names = labels(sources)
    of_each = [of_source(source, name) for source, name in zip(sources, names, strict=True)]
    # A label that two sources share, as in two files of one benchmark, gets the source's name in front.
    used = Counter(label for curves in of_each for label in {curve.label for curve in curves})
    known = [
        replace(curve, label=f"{name}: {curve.label}") if used[curve.label] > 1 else curve
        for curves, name in zip(of_each, names, strict=True)
        for curve in curves
    ]
    found = chosen(known, metrics)
    drawn = {curve.metric for curve in found}
    for source, curves in zip(sources, of_each, strict=True):
        if drawn.isdisjoint(there := dict.fromkeys(curve.metric for curve in curves)):
            others = f"Plot it alone, or give --metric with one that it has: {listed(list(there), NAMED)}"
            raise UserError(f"{source}: has no values of {', '.join(drawn)}. {others if there else 'It has no step yet'}")
    return found


def chosen(known: Sequence[Curve], metrics: Sequence[str]) -> list[Curve]:
    there = dict.fromkeys(curve.metric for curve in known)
    wanted = list(metrics) or [name for name in DEFAULT if name in there] or list(there)
    unknown = [name for name in wanted if name not in there]
    if unknown:
        near = difflib.get_close_matches(unknown[0], there, n=3, cutoff=0.3)
        instead = f"Similar: {', '.join(near)}" if near else "docs/metrics.md lists all metrics"
        raise UserError(f"--metric {unknown[0]}: no run has it. {instead}")
    if not wanted:
        raise UserError("nothing to plot: no step has finished yet")
    return [curve for name in wanted for curve in known if curve.metric == name]


def labels(sources: Sequence[Path]) -> list[str]:
    """Return the shortest endings of the paths that distinguish the sources."""
    parts = [source.resolve().parts for source in sources]
    for length in range(1, max(map(len, parts), default=1)):
        found = ["/".join(part[-length:]) for part in parts]
        if len(set(found)) == len(found):
            return found
    return [str(source) for source in sources]


def of_source(source: Path, label: str) -> list[Curve]:
    is_run = os.path.isdir(source)
    path = source / METRICS if is_run else source
    remedy = "Give the folder of a run, or a JSON file that `fulltilt plot` or `fulltilt bench learn` wrote"
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"{path}: is not a file. {remedy}")
        if is_run:
            return of_metrics(path, label)
        return [of_json(each) for each in json.loads(path.read_bytes())["curves"]]
    except UserError:
        raise
    except FileNotFoundError as error:
        what = (
            f"{source}: has no {METRICS}: it is not a run's folder, or its run has finished no step" if is_run else f"{path}: no such file"
        )
        raise UserError(f"{what}. {remedy}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}). {remedy}") from error
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
        raise UserError(f"{path}: has no curves. {remedy}") from None


def of_json(found: Mapping[str, Any]) -> Curve:
    """Read a curve. Raises ValueError, LookupError, TypeError or OverflowError if it is not one."""
    steps, seconds, values = (tuple(float(value) for value in found[name]) for name in ("steps", "seconds", "values"))
    if not len(steps) == len(seconds) == len(values):
        raise ValueError("columns of different lengths")
    return Curve(str(found["label"]), str(found["metric"]), steps, seconds, values)


def of_metrics(path: Path, label: str) -> list[Curve]:
    found = read_lines(path)
    if found.damaged:
        raise UserError(f"{path}: is damaged: {found.damaged}. Delete them to plot the others")
    return of_run(found.steps, label)


def of_run(lines: Sequence[Mapping[str, Any]], label: str) -> list[Curve]:
    """Return the curves of a run. Seconds are those of all steps, validations and saves so far. Start-up, and work that was lost when the
    run was killed, are not included; a save is included in the next line."""
    ends = list(accumulate(sum(line.get(name) or 0.0 for name in PARTS_OF_TIME) for line in lines))
    names = dict.fromkeys(name for line in lines for name in line if name not in ("step", "nonfinite"))
    return [curve_of([(line["step"], end, line.get(name)) for line, end in zip(lines, ends, strict=True)], label, name) for name in names]


def curve_of(points: Iterable[tuple[float, float, float | None]], label: str, metric: str) -> Curve:
    """Return the curve of points (step, seconds, value); points without a value are left out."""
    known = [(float(step), float(end), float(value)) for step, end, value in points if value is not None]
    steps, ends, values = zip(*known, strict=True) if known else ((), (), ())
    return Curve(label, metric, steps, ends, values)


# -- writing ------------------------------------------------------------------------------------------------------------------------------


def files(out: Path) -> tuple[Path | None, Path]:
    """Return the files for the picture and the JSON. Example: curves.png -> curves.png and curves.json; curves.json -> None and
    curves.json"""
    if out.suffix not in (".png", ".json"):
        raise UserError(f"--out {out}: give a name that ends in .png, or in .json for the numbers alone")
    numbers = out.with_suffix(".json")
    if out.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            f'--out {out}: a PNG needs matplotlib. Install it (pip install "fulltilt[plot]"), or write the numbers alone: --out {numbers}'
        )
    return (out if out.suffix == ".png" else None), numbers


def write(
    curves: Sequence[Curve], out: Path, against: str = "step", smooth: int = 1, title: str = "", sources: Sequence[Path] = ()
) -> list[Path]:
    """Write the files and return their paths. `smooth`: in the picture, each line is averaged over this many steps. A source is never
    overwritten: if the numbers would go to a source, only the picture is written."""
    picture, numbers = files(out)
    has_numbers = numbers.resolve() in [source.resolve() for source in sources]
    if has_numbers and not picture:
        raise UserError(f"--out {out}: is one of the sources. Give another name")
    if not has_numbers:
        refuse_foreign_json(numbers, "curves", f"--out {out}")
    if picture and picture.is_file() and not picture.read_bytes()[: len(PNG)] == PNG:
        raise UserError(f"--out {out}: exists and is not a PNG. Nothing was changed. Give another name")
    document = {"against": against, "smooth": smooth, "title": title, "curves": [asdict(curve) for curve in curves]}
    try:
        if not has_numbers:
            numbers.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        if picture:
            draw(curves, picture, against, smooth, title)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror}). Give another file") from error
    return [*([] if has_numbers else [numbers]), *([picture] if picture else [])]


def draw(curves: Sequence[Curve], picture: Path, against: str, smooth: int, title: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # type: ignore[import-not-found, unused-ignore]
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    metrics = list(dict.fromkeys(curve.metric for curve in curves))
    colours = {label: f"C{number % 10}" for number, label in enumerate(dict.fromkeys(curve.label for curve in curves))}
    plain = {text: text.replace("$", r"\$") for curve in curves for text in (curve.label, curve.metric)}  # not a formula
    figure = Figure(figsize=(7.0, 3.2 * len(metrics)), layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title.replace("$", r"\$"))
    for panel, metric in zip(figure.subplots(len(metrics), 1, squeeze=False)[:, 0], metrics, strict=True):
        for curve in (curve for curve in curves if curve.metric == metric):
            x, y = curve.steps if against == "step" else curve.seconds, trailing_means(curve.steps, curve.values, smooth)
            # The few points of validations get markers; markers of many training steps would hide the line.
            panel.plot(
                x, y, color=colours[curve.label], label=plain[curve.label], linewidth=1.2, marker="o" if len(x) <= MARKED else None,
                markersize=3,
            )  # fmt: skip
        panel.set_ylabel(plain[metric])
        panel.grid(alpha=0.3)
        panel.legend(frameon=False, fontsize="small")
        panel.set_xlabel(against)
    figure.savefig(picture, dpi=130)


def trailing_means(steps: Sequence[float], values: Sequence[float], size: int) -> list[float]:
    """Return the mean of each value and those of the `size` - 1 steps before it, as far as they exist. Validations that are farther apart
    do not change.

    Example: steps (1, 2, 20), values (0.1, 0.3, 0.5), size 10 -> [0.1, 0.2, 0.5]
    """
    found, begin = [], 0
    for end, step in enumerate(steps, 1):
        while steps[begin] <= step - size:
            begin += 1
        found.append(sum(values[begin:end]) / (end - begin))
    return found
