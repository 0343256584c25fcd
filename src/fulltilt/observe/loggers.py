"""Loggers: the metrics of a run, sent to TensorBoard, Weights & Biases, MLflow or Trackio.

Enters: the metrics of each step, tables of validation samples, the run's settings. Leaves: files in the run folder, or wherever the user's
own environment variables point. Guaranteed: every logger gets the names and numbers of `metrics.jsonl` (numbers that are not finite are
left out); a resumed run continues in the same place, and steps that were lost with a logger's memory when the run was killed are logged
again; no logger asks for a password; a logger that fails or hangs during a run is switched off with one warning and never stops or delays
the run; every wait has a deadline. Importing this module imports none of the loggers' packages.

Each logger has its own daemon thread: it is created, used and closed there, so that a server that does not answer delays nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import math
import os
import queue
import re
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fulltilt.observe.metrics import Number, encode_line, read_lines, write_whole
from fulltilt.records import UserError
from fulltilt.schema import LogConfig

IDS_FILE = "loggers.json"  # file in the run folder with the id by which each logger knows the run

OPEN_S = 120.0
FLUSH_S = 10.0
CLOSE_S = 60.0
NOTHING = -1  # the last step of a logger that has none
MOST_BEHIND = 1000  # most jobs that may be waiting for a logger before it counts as hung


@dataclass(frozen=True)
class Opening:
    """Arguments with which a logger is started."""

    project: str
    name: str
    folder: Path  # the run's folder, absolute
    settings: Mapping[str, Any]  # every dotted key of the configuration
    step: int  # the step of the checkpoint that the run resumes from; 0: earlier logs belong to another run
    known: str | None  # the id by which the logger knows the resumed run


class Logger(Protocol):
    """One place to log to. The tables of a step come before its numbers, which complete the step."""

    also_needs: tuple[str, ...] = ()  # modules besides its own
    id: str = ""  # the logger's id of the run, kept in the run folder for a resume
    hint: str  # how to look at the logged data
    has: int = NOTHING  # the last step that the logger is sure to have; later ones in metrics.jsonl are logged to it again

    @staticmethod
    def mistake() -> str | None:
        """Return any reason but a missing module for which the logger would not start; None: there is none."""
        return None

    def log(self, step: int, numbers: Mapping[str, Number]) -> None: ...

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None: ...

    def close(self, finished: bool) -> None: ...


# ---- the loggers -----------------------------------------------------------------------------------------------------------------------


class TensorBoard(Logger):
    """Event files in `tensorboard/`. A resume tells TensorBoard to forget the steps after the checkpoint. It shows the settings that the
    run began with, because TensorBoard reads only the first ones."""

    def __init__(self, opening: Opening) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        folder = opening.folder / "tensorboard"
        self.hint = f"tensorboard --logdir {folder}"
        there = list(folder.glob("events.out.tfevents.*"))
        self.has = opening.step if there else NOTHING
        if not opening.step:
            for path in there:
                path.unlink()
        self._writer = SummaryWriter(str(folder), purge_step=opening.step + 1 if opening.step else None)
        simple = {key: value if isinstance(value, (str, int, float)) else json.dumps(value) for key, value in opening.settings.items()}
        # `add_hparams` would create a second run; the same records in this run's file belong to this run.
        experiment, start, _ = hparams(simple, {})
        for summary in (experiment, start):
            self._writer._get_file_writer().add_summary(summary, opening.step)
        self._writer.flush()

    def log(self, step: int, numbers: Mapping[str, Number]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._writer.add_text(name, markdown_table(columns, rows), step)

    def close(self, finished: bool) -> None:
        self._writer.close()


class Wandb(Logger):
    """A run of Weights & Biases, with its files in `wandb/`. A resume continues the run of the same id and logs every step again: wandb may
    have kept the last numbers in memory for a long time, and itself drops the steps that its server already has."""

    @staticmethod
    def mistake() -> str | None:
        """Return a mistake if wandb would ask for an API key, which must never happen in the middle of a job."""
        import wandb

        settings = wandb.setup(wandb.Settings(silent=True)).settings
        if settings.mode in ("offline", "dryrun", "disabled") or wandb.login(prompt=False, verify=False):
            return None
        remedy = "Set WANDB_API_KEY (or run `wandb login`), or set WANDB_MODE=offline to log into the run folder only"
        return f"log.to: wandb has no API key. {remedy}"

    def __init__(self, opening: Opening) -> None:
        import wandb

        if mistake := self.mistake():
            raise UserError(mistake)
        self._table = wandb.Table
        self._run = wandb.init(
            project=opening.project,
            name=opening.name,
            id=opening.known,
            resume="allow" if opening.known else None,
            dir=str(opening.folder),
            config=dict(opening.settings),
            reinit="create_new",
            # Capturing the console would break the progress bar and `breakpoint()`.
            settings=wandb.Settings(console="off", silent=True, finish_timeout=0.75 * CLOSE_S),
        )
        self.id = self._run.id
        self.hint = self._run.url or f"wandb sync {opening.folder / 'wandb'}"

    def log(self, step: int, numbers: Mapping[str, Number]) -> None:
        self._run.log(dict(numbers), step=step, commit=True)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        table = self._table(columns=list(columns), data=[list(row) for row in rows], allow_mixed_types=True)
        self._run.log({name: table}, step=step, commit=False)

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class MLflow(Logger):
    """A run of MLflow, at MLFLOW_TRACKING_URI or in `mlflow/`. A resume continues the run of the same id; if a step was logged twice, the
    later value counts."""

    also_needs = ("sqlalchemy", "alembic")
    MOST_METRICS, MOST_PARAMETERS, LONGEST_PARAMETER = 1000, 100, 6000  # limits of one request

    def __init__(self, opening: Opening) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it logs a line for every table that it creates
        folder = opening.folder / "mlflow"
        address = os.environ.get("MLFLOW_TRACKING_URI")
        if not address:
            folder.mkdir(parents=True, exist_ok=True)
        store = address or f"sqlite:///{folder / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=store)
        self.hint = store if store.startswith("http") else f"mlflow ui --backend-store-uri {store}"
        self.has = opening.step if opening.known else NOTHING
        self.id = opening.known or self._new_run(opening, None if address else (folder / "artifacts").as_uri())
        self._client.update_run(self.id, status="RUNNING")
        self._log_settings(opening.settings)

    def _new_run(self, opening: Opening, artifacts: str | None) -> str:
        found = self._client.get_experiment_by_name(opening.project)
        experiment = found.experiment_id if found else self._client.create_experiment(opening.project, artifact_location=artifacts)
        return str(self._client.create_run(experiment, run_name=opening.name).info.run_id)

    def _log_settings(self, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        # MLflow does not let parameters change: a resumed run keeps its first ones.
        there = self._client.get_run(self.id).data.params
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items() if key not in there}
        parameters = [Param(key, text[: self.LONGEST_PARAMETER]) for key, text in texts.items()]
        for begin in range(0, len(parameters), self.MOST_PARAMETERS):
            self._client.log_batch(self.id, params=parameters[begin : begin + self.MOST_PARAMETERS])

    def log(self, step: int, numbers: Mapping[str, Number]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(mlflow_name(name), float(value), now, step) for name, value in numbers.items()]
        for begin in range(0, len(metrics), self.MOST_METRICS):
            self._client.log_batch(self.id, metrics=metrics[begin : begin + self.MOST_METRICS])

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        # `log_table` needs pandas; this writes the same file.
        table = {"columns": list(columns), "data": [list(row) for row in rows]}
        self._client.log_dict(self.id, table, f"tables/{mlflow_name(name)}/step-{step:06d}.json")

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self.id, "FINISHED" if finished else "FAILED")


class Trackio(Logger):
    """A run of Trackio, in TRACKIO_DIR or in `trackio/`. A resume continues the run of the same name, without the steps after the
    checkpoint."""

    def __init__(self, opening: Opening) -> None:
        given = os.environ.get("TRACKIO_DIR")
        folder = Path(given or opening.folder / "trackio").absolute()
        os.environ["TRACKIO_DIR"] = str(folder)  # Trackio reads it once, at the import
        try:
            import trackio
            from trackio.utils import TRACKIO_DIR
        finally:
            if not given:
                del os.environ["TRACKIO_DIR"]
        if Path(TRACKIO_DIR).absolute() != folder:
            raise UserError(f"log.to: trackio already logs to {TRACKIO_DIR} in this process. Use one process per run, or set TRACKIO_DIR")
        self.has = self._forget(opening) if opening.known else NOTHING
        self._table = trackio.Table
        # Standard output belongs to `--json`. The thread that started the logger waits meanwhile.
        with contextlib.redirect_stdout(io.StringIO()):
            self._run = trackio.init(
                opening.project, opening.name, config=dict(opening.settings), resume="allow" if opening.known else "never",
                embed=False, auto_log_gpu=False, auto_log_cpu=False,
            )  # fmt: skip
        self.id = self._run.id
        self.hint = f"TRACKIO_DIR={folder} trackio show --project {opening.project}"

    def _forget(self, opening: Opening) -> int:
        """Drop the steps after the checkpoint: Trackio itself can only delete whole runs. Returns the last step that is left."""
        from trackio.sqlite_storage import SQLiteStorage
        from trackio.utils import get_storage_mode

        remote = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
        if remote or get_storage_mode() != "sqlite":  # a server, or a file system where Trackio uses no database
            return opening.step
        path = SQLiteStorage.get_project_db_path(opening.project)
        if not path.is_file():
            return NOTHING
        with contextlib.closing(sqlite3.connect(path, timeout=30)) as database, database:
            database.execute("DELETE FROM metrics WHERE run_id = ? AND step > ?", (opening.known, opening.step))
            ((last,),) = database.execute("SELECT MAX(step) FROM metrics WHERE run_id = ?", (opening.known,))
        return NOTHING if last is None else int(last)

    def log(self, step: int, numbers: Mapping[str, Number]) -> None:
        self._run.log(dict(numbers), step=step)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._run.log({name: self._table(columns=list(columns), data=[list(row) for row in rows])}, step=step)

    def close(self, finished: bool) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()


KINDS: Mapping[str, type[TensorBoard | Wandb | MLflow | Trackio]] = {
    "tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow, "trackio": Trackio,
}  # fmt: skip


# ---- all of them ---------------------------------------------------------------------------------------------------------------------


def check(config: LogConfig) -> list[str]:
    """Return reasons why a logger would not start, found before any model loads."""
    mistakes = [f"log.to: {name} is named twice. Remove one" for name in dict.fromkeys(config.to) if config.to.count(name) > 1]
    for name in dict.fromkeys(config.to):
        remedy = f'Install it with pip install "fulltilt[{name}]", or remove {name}'
        missing = [module for module in (name, *KINDS[name].also_needs) if not _installed(module)]
        if missing:
            mistakes.append(f"log.to: {name} needs {' and '.join(missing)}. {remedy}")
            continue
        try:
            mistakes += filter(None, [KINDS[name].mistake()])
        except Exception as error:
            mistakes.append(f"log.to: {name} does not work here: {_cause(error)}. {remedy}")
    if not config.to:
        for key in sorted(config.model_fields_set - {"to"}):
            mistakes.append(f'log.{key}: log.to names no logger. Set log.to, for example to ["tensorboard"], or remove the key')
    return mistakes


def _installed(module: str) -> bool:
    # wandb and mlflow create folders of their own names in the current directory, which Python finds as packages without a file.
    found = importlib.util.find_spec(module)
    return found is not None and found.origin is not None


def open_loggers(
    config: LogConfig, run_dir: Path, settings: Mapping[str, Any], step: int, warn: Callable[[str], None] = warnings.warn
) -> Loggers:
    """Start every logger of `log.to`. `settings` is the flat configuration; `step` is that of the checkpoint from which the run resumes, or
    0 for a new run. If a logger does not start, a new run raises an error, and a resumed one switches it off with a warning."""
    folder = run_dir.absolute()
    ids_file, metrics = folder / IDS_FILE, folder / "metrics.jsonl"
    ids: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError, TypeError):
        ids |= json.loads(ids_file.read_text(encoding="utf-8"))
    history = [line for line in read_lines(metrics).steps if line["step"] <= step] if step and config.to and metrics.is_file() else []
    opened = Loggers(warn)
    try:
        for name in config.to:
            known = ids.get(name) if step else None
            opening = Opening(config.project, config.name or folder.resolve().name, folder, settings, step, known)
            logger = opened.add(name, partial(KINDS[name], opening), history, required=step == 0)
            if logger and logger.id:
                ids[name] = logger.id
                write_whole(ids_file, json.dumps(ids, indent=1) + "\n")
    except BaseException:
        opened.close(finished=False)
        raise
    return opened


def _numbers(line: Mapping[str, Any]) -> dict[str, Number]:
    return {name: value for name, value in line.items() if name not in ("step", "nonfinite") and value is not None}


class Loggers(contextlib.AbstractContextManager["Loggers"]):
    """All loggers of a run; there may be none.

    with open_loggers(config.log, folder, settings, step=0, warn=console.warn) as loggers:
        loggers.table(1, "val/samples", columns, rows)
        loggers.log(1, metrics)
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._workers: list[_Worker] = []

    @property
    def hints(self) -> list[str]:
        """Hints how to look at each logger's data."""
        return [worker.logger.hint for worker in self._workers if worker.logger]

    def add(self, name: str, make: Callable[[], Logger], history: Sequence[Mapping[str, Any]] = (), *, required: bool) -> Logger | None:
        """Start a logger. It gets those steps of `history`, lines of metrics.jsonl, that it does not have: the run was killed before they
        left its memory, or it was not used yet."""
        worker = _Worker(name, make, history)
        if not worker.opened.wait(OPEN_S) or worker.failure:
            cause = _cause(worker.failure) if worker.failure else f"it did not start within {OPEN_S:.0f} s"
            if required:
                raise worker.failure if isinstance(worker.failure, UserError) else UserError(f"log.to: {name} cannot start: {cause}")
            self._warn(f"log.to: {name} is switched off because it cannot start: {cause}. metrics.jsonl has every number")
            return None
        self._workers.append(worker)
        return worker.logger

    def log(self, step: int, metrics: Mapping[str, Number]) -> None:
        """Log the numbers of a step, after its tables. Returns at once."""
        # The line of metrics.jsonl is used: exactly its numbers, without those that are null.
        numbers = _numbers(json.loads(encode_line(step, metrics)))
        self._give(lambda logger: logger.log(step, numbers))

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log a table of a step, before its numbers. Returns at once."""
        plain = [[_plain_cell(cell) for cell in row] for row in rows]
        self._give(lambda logger: logger.table(step, name, columns, plain))

    def flush(self) -> None:
        """Wait for a short time until everything has been handed to the loggers. Called before a checkpoint is saved, so that a resume
        finds the logs that it expects."""
        deadline = time.monotonic() + FLUSH_S
        for worker in self._workers:
            worker.flush(deadline)
        self._report()

    def close(self, finished: bool = True) -> None:
        """End all loggers within a deadline, and tell them whether the run has finished. Closing again does nothing."""
        self._report()
        deadline = time.monotonic() + CLOSE_S
        for worker in self._workers:
            worker.close(finished)
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
            if worker.is_alive():
                self._warn(f"log.to: {worker.name} did not finish within {CLOSE_S:.0f} s; metrics.jsonl has what it did not send")
        self._report()
        self._workers = []

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        self.close(finished=kind is None)

    def _give(self, job: Callable[[Logger], None]) -> None:
        self._report()
        for worker in self._workers:
            worker.give(job)

    def _report(self) -> None:
        # Reported from here because the console belongs to the calling thread; the loggers' own threads print nothing.
        for worker in [each for each in self._workers if each.failure]:
            self._workers.remove(worker)
            self._warn(f"log.to: {worker.name} failed and is switched off: {_cause(worker.failure)}. metrics.jsonl has every number")


class _Worker(threading.Thread):
    """A logger and its thread. After a failure it accepts no more jobs."""

    def __init__(self, name: str, make: Callable[[], Logger], history: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(name=name, daemon=True)  # a logger that hangs must not keep the program from ending
        self._make, self._history = make, history
        self.logger: Logger | None = None
        self.failure: BaseException | None = None
        self._jobs: queue.SimpleQueue[Callable[[Logger], None] | None] = queue.SimpleQueue()
        self.opened = threading.Event()  # also set after a failed start
        self.start()

    def run(self) -> None:
        try:
            self.logger = logger = self._make()
            self.opened.set()
            for line in self._history:
                if line["step"] > logger.has:
                    logger.log(line["step"], _numbers(line))
            while (job := self._jobs.get()) is not None:
                job(logger)
        except BaseException as error:  # an exception of any kind would be lost in this thread
            self.failure = error
        self.opened.set()

    def give(self, job: Callable[[Logger], None]) -> None:
        if self._jobs.qsize() >= MOST_BEHIND and self.failure is None:
            self.failure = TimeoutError(f"it is {MOST_BEHIND} steps behind")
        if self.failure is None:
            self._jobs.put(job)

    def flush(self, deadline: float) -> None:
        reached = threading.Event()
        self._jobs.put(lambda logger: reached.set())
        while self.is_alive() and not reached.wait(0.02):
            if time.monotonic() > deadline:
                self.failure = self.failure or TimeoutError("it accepts no more numbers, and checkpoints would have to wait for it")
                return

    def close(self, finished: bool) -> None:
        self._jobs.put(lambda logger: logger.close(finished))
        self._jobs.put(None)


def _cause(error: BaseException | None) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


# ---- the forms that the loggers take ----------------------------------------------------------------------------------------------------


def _plain_cell(cell: Any) -> str | Number | bool | None:
    if isinstance(cell, float):
        return float(cell) if math.isfinite(cell) else None
    if cell is None or isinstance(cell, (bool, int)):
        return cell
    # Some byte-level tokens decode to a lone surrogate, which is not valid UTF-8.
    return str(cell).encode("utf-8", errors="backslashreplace").decode()


# Characters that markdown does not read as plain text, and the line breaks that would end a row of a table.
_MARKUP = str.maketrans({character: f"&#{ord(character)};" for character in "&<>|\\`*_[]{}#~$\r"} | {"\n": "<br>"})


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Write a table for TensorBoard: cells are shown exactly as they are, whatever they contain."""
    lines = [columns, ["---"] * len(columns), *([("" if cell is None else str(cell)).translate(_MARKUP) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# MLflow accepts ASCII letters, digits and _ - . : / space. `@` is written `_at_`, as verl does. All other characters, the escape character
# itself and text that would be read as `_at_` are written as their code points between colons.
_ESCAPED = re.compile(r"_(?=at[_@])|[^A-Za-z0-9_\-./ @]")


def mlflow_name(name: str) -> str:
    """Return a metric's name in a form that MLflow allows: different names stay different, and each can be read back."""
    escaped = _ESCAPED.sub(lambda found: f":{ord(found[0]):x}:", name).replace("@", "_at_")
    # MLflow also refuses names that change when they are normalised as paths.
    return "/".join("::" if not part else part.replace(".", ":2e:") if part.startswith(".") else part for part in escaped.split("/"))
