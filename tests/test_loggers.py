"""Each logger gets the numbers of metrics.jsonl: all are read back from the logger's own files.

Child processes import this file, so it imports no torch.
"""

from __future__ import annotations

import ast
import html
import json
import math
import os
import pty
import re
import shutil
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fulltilt.observe import loggers
from fulltilt.observe.loggers import Loggers, check, markdown_table, mlflow_name, open_loggers
from fulltilt.observe.metrics import MetricsFile
from fulltilt.records import UserError
from fulltilt.schema import LogConfig

Lines = dict[int, dict[str, float]]
Tables = dict[int, list[list[Any]]]

SETTINGS = {"algorithm.name": "grpo", "actor.lr": 1e-6, "run.steps": 6, "data.shuffle": True, "rollout.stop": ["a", "b"], "log.name": None}
COLUMNS = ["uid", "response", "reward", "error"]
AWKWARD = "a|b\n<b>*c*</b> & `d` \\ _e_ ü \udc80"


def metrics(step: int, attempt: int) -> dict[str, Any]:
    return {
        "actor/pg_loss": np.float32(step / 7 + attempt),
        "critic/score/mean": step / 3 + attempt,
        "perf/total_num_tokens": np.int64(20_000_001 + step),
        "reward/parts/format: strict (%)": 0.1 * step,
        "val-core/openai/gsm8k/reward/mean@4": 1 / (step + 1),
        "val-core//odd/ü_at_/reward/mean@4": 0.25,
        "actor/grad_norm": math.nan if step == 2 else 0.5,
    }


def rows(step: int, attempt: int) -> list[list[Any]]:
    return [[step, AWKWARD, 0.5 + attempt, None], [step + 1, "four", None, "ran out of time"]]


def shown(step: int, attempt: int) -> list[list[Any]]:
    """What of `rows` can be written as UTF-8."""
    return [[cell.replace("\udc80", "\\udc80") if isinstance(cell, str) else cell for cell in row] for row in rows(step, attempt)]


def log_twice(kind: str, folder: Path) -> None:
    """Steps 0 to 5, then a resume from the checkpoint of step 3 that makes steps 4 to 6, beside the file of the same numbers."""
    config = LogConfig(to=[kind], project="some project", name="a run")  # type: ignore[list-item]
    file = MetricsFile(folder / "metrics.jsonl")
    offset = 0
    for attempt, start, end in ((0, 0, 5), (1, 4, 6)):
        settings = SETTINGS | {"run.steps": end}
        warned: list[str] = []
        file.truncate(offset)
        with open_loggers(config, folder, settings, max(0, start - 1), warned.append) as opened:
            assert len(opened.hints) == 1
            for step in range(start, end + 1):
                if step in (0, 4):
                    opened.table(step, "val/samples", COLUMNS, rows(step, attempt))
                opened.log(step, metrics(step, attempt))
                file.append(step, metrics(step, attempt))
                if step == 3:
                    opened.flush()
                    offset = file.offset()
        assert warned == []
    assert all(thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())
    file.close()


def in_a_process(function: str, kind: str, folder: Path, code: int = 0, **variables: str) -> None:
    """One of these functions in a process of its own: some loggers take their settings once per process. It must end, and print nothing."""
    source = f"import test_loggers, pathlib; test_loggers.{function}({kind!r}, pathlib.Path({str(folder)!r}))"
    run_python(source, folder, code, **variables)


def run_python(source: str, home: Path, code: int = 0, **variables: str) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(loggers.__file__).parents[2])])
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB_", "MLFLOW_", "TRACKIO_"))}
    environment = {**kept, "PYTHONPATH": path, "HOME": str(home), **variables}
    done = subprocess.run([sys.executable, "-c", source], env=environment, cwd=home, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""


def written(folder: Path) -> Lines:
    """The finite numbers of metrics.jsonl."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(7))
    assert lines[2]["nonfinite"] == ["actor/grad_norm"]
    return {
        line["step"]: {name: value for name, value in line.items() if name not in ("step", "nonfinite") and value is not None}
        for line in lines
    }


# ---- each logger


def test_tensorboard(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "events.out.tfevents.0.of.another.run").write_bytes(b"not even events")
    log_twice("tensorboard", tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    assert capfd.readouterr().out == ""
    assert not (tmp_path / "tensorboard" / "events.out.tfevents.0.of.another.run").exists()
    assert tensorboard_lines(tmp_path) == rounded(written(tmp_path))
    found = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    (tag,) = (tag for tag in found.Tags()["tensors"] if tag.startswith("val/samples"))
    tables = {event.step: read_markdown(event.tensor_proto.string_val[0].decode()) for event in found.Tensors(tag)}
    as_text = [[["" if cell is None else str(cell) for cell in row] for row in shown(step, attempt)] for step, attempt in ((0, 0), (4, 1))]
    assert tables == {0: [COLUMNS, *as_text[0]], 4: [COLUMNS, *as_text[1]]}

    start = HParamsPluginData.FromString(found.PluginTagToContent("hparams")["_hparams_/session_start_info"]).session_start_info.hparams
    assert {key: start[key].string_value for key in ("algorithm.name", "rollout.stop")} == {
        "algorithm.name": "grpo", "rollout.stop": '["a", "b"]'
    }  # fmt: skip
    assert (start["actor.lr"].number_value, start["run.steps"].number_value, start["log.name"].string_value) == (1e-6, 5, "null")


def tensorboard_lines(folder: Path) -> Lines:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    lines: Lines = {}
    for name in found.Tags()["scalars"]:
        for event in found.Scalars(name):
            assert name not in lines.setdefault(event.step, {}), "a step that was made again is there twice"
            lines[event.step][name] = event.value
    return lines


def rounded(lines: Lines) -> Lines:
    """As TensorBoard keeps numbers: its scalars are float32."""
    return {step: {name: float(np.float32(value)) for name, value in line.items()} for step, line in lines.items()}


def read_markdown(text: str) -> list[list[str]]:
    lines = [line[2:-2].split(" | ") for line in text.split("\n")]
    return [[html.unescape(cell.replace("<br>", "\n")) for cell in line] for line in (lines[0], *lines[2:])]


def test_tensorboard_shows_cells_as_they_are() -> None:
    """Through TensorBoard's own rendering, which reads markdown and cleans HTML."""
    from tensorboard.plugin_util import markdown_to_safe_html

    page = markdown_to_safe_html(markdown_table(["response"], [["a|b\n<b>*c*</b> & `d` \\ _e_ [f](g) &amp; <script>"]]))
    (cell,) = re.findall(r"<td>(.*?)</td>", page, re.DOTALL)
    assert html.unescape(re.sub(r"<br ?/?>", "\n", cell)) == "a|b\n<b>*c*</b> & `d` \\ _e_ [f](g) &amp; <script>"


@pytest.mark.long
def test_wandb(tmp_path: Path) -> None:
    in_a_process("log_twice", "wandb", tmp_path, WANDB_MODE="offline")
    from wandb.proto.wandb_internal_pb2 import Record

    tables: Tables = {}
    runs, settings = set(), {}
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    for path in files:
        for record in map(Record.FromString, wandb_records(path)):
            if record.HasField("run"):
                runs.add((record.run.project, record.run.display_name, record.run.run_id))
                settings = {update.key: json.loads(update.value_json) for update in record.run.config.update}
        for step, items in wandb_history(path):
            if "val/samples/path" in items:
                table = json.loads((path.parent / "files" / items["val/samples/path"]).read_text())
                assert table["columns"] == COLUMNS
                tables[step] = table["data"]
    assert wandb_lines(files[-1]) == written(tmp_path)  # the file of the resumed run has all of them
    assert tables == {0: shown(0, 0), 4: shown(4, 1)}
    ((project, name, identity),) = runs
    assert (project, name) == ("some project", "a run")
    assert json.loads((tmp_path / "loggers.json").read_text()) == {"wandb": identity}
    assert {key: settings[key] for key in SETTINGS} == SETTINGS | {"run.steps": 6}


def wandb_lines(path: Path) -> Lines:
    return {
        step: {name: value for name, value in items.items() if not name.startswith(("_", "val/samples"))}
        for step, items in wandb_history(path)
    }


def wandb_history(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    from wandb.proto.wandb_internal_pb2 import Record

    for record in map(Record.FromString, wandb_records(path)):
        if record.HasField("history"):
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            yield items["_step"], items


def wandb_records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format after a header of seven bytes."""
    data, place, record = path.read_bytes(), 7, b""
    while place < len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


@pytest.mark.long
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    log_twice("mlflow", tmp_path)
    from mlflow.tracking import MlflowClient

    assert capfd.readouterr().out == ""
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("some project")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("a run", "FINISHED")
    assert json.loads((tmp_path / "loggers.json").read_text()) == {"mlflow": run.info.run_id}
    lines: Lines = {}
    for key in run.data.metrics:
        for metric in sorted(client.get_metric_history(run.info.run_id, key), key=lambda metric: metric.timestamp):
            lines.setdefault(metric.step, {})[metric_name(key)] = metric.value  # of a step that was made again, the later one
    assert lines == written(tmp_path)
    assert "val-core/openai/gsm8k/reward/mean_at_4" in run.data.metrics  # as verl calls it there

    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in SETTINGS.items()}
    assert run.data.params == texts | {"run.steps": "5"}  # what the run began with: MLflow lets no parameter change
    for step, attempt in ((0, 0), (4, 1)):
        (path,) = tmp_path.glob(f"mlflow/artifacts/**/tables/val/samples/step-{step:06d}.json")
        assert json.loads(path.read_text()) == {"columns": COLUMNS, "data": shown(step, attempt)}
    assert not (tmp_path / "mlruns").exists()

    open_loggers(LogConfig(to=["mlflow"]), tmp_path, SETTINGS, 6).close(finished=False)
    assert client.get_run(run.info.run_id).info.status == "FAILED"


def metric_name(name: str) -> str:
    """The inverse of `mlflow_name`."""
    return re.sub(r":([0-9a-f]*):|_at_", lambda found: "@" if found[1] is None else chr(int(found[1], 16)) if found[1] else "", name)


# The characters that the rules speak of, so that they come together often.
@settings(max_examples=500, deadline=None)
@given(st.text(st.sampled_from("_at@:/.xA0 -%ü"), min_size=1, max_size=12) | st.text(min_size=1, max_size=12))
def test_mlflow_names_can_be_read_back(name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    _validate_metric_name(mlflow_name(name))
    assert metric_name(mlflow_name(name)) == name


@pytest.mark.long
def test_trackio(tmp_path: Path) -> None:
    in_a_process("log_twice", "trackio", tmp_path)
    lines, tables = trackio_history(tmp_path)
    assert lines == written(tmp_path)
    assert tables == {0: shown(0, 0), 4: shown(4, 1)}
    with sqlite3.connect(next((tmp_path / "trackio").glob("*.db"))) as database:
        ((identity, name),) = database.execute("SELECT DISTINCT run_id, run_name FROM metrics").fetchall()
        ((settings,),) = database.execute("SELECT config FROM configs").fetchall()
    assert name == "a run" and json.loads((tmp_path / "loggers.json").read_text()) == {"trackio": identity}
    assert {key: json.loads(settings)[key] for key in SETTINGS} == SETTINGS | {"run.steps": 6}


def trackio_history(folder: Path) -> tuple[Lines, Tables]:
    lines: Lines = {}
    tables: Tables = {}
    (path,) = (folder / "trackio").glob("*.db")
    with sqlite3.connect(path) as database:
        stored = database.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
    for step, text in stored:
        for name, value in json.loads(text).items():
            if name == "val/samples":
                assert step not in tables, "a table that was made again is there twice"
                tables[step] = [[row[column] for column in COLUMNS] for row in value["_value"]]
            else:
                assert name not in lines.setdefault(step, {}), "a step that was made again is there twice"
                lines[step][name] = value
    return lines, tables


# ---- what goes wrong


def log_and_die(kind: str, folder: Path) -> None:
    file = MetricsFile(folder / "metrics.jsonl")
    opened = open_loggers(LogConfig(to=[kind]), folder, SETTINGS, 0)  # type: ignore[list-item]
    for step in range(4):
        opened.log(step, metrics(step, 0))
        file.append(step, metrics(step, 0))
    opened.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def go_on(kind: str, folder: Path) -> None:
    file = MetricsFile(folder / "metrics.jsonl")
    with open_loggers(LogConfig(to=[kind]), folder, SETTINGS, 3) as opened:  # type: ignore[list-item]
        for step in range(4, 7):
            opened.log(step, metrics(step, 1))
            file.append(step, metrics(step, 1))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_steps_that_a_kill_kept_in_memory_are_logged_again(kind: str, tmp_path: Path) -> None:
    """These two write late, so that a run killed right after a checkpoint has lost steps before it."""
    for function, code in (("log_and_die", -signal.SIGKILL), ("go_on", 0)):
        in_a_process(function, kind, tmp_path, code=code, WANDB_MODE="offline")
    if kind == "wandb":
        assert wandb_lines(max(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == written(tmp_path)
    else:
        assert trackio_history(tmp_path)[0] == written(tmp_path)


def test_a_logger_that_joins_later_gets_the_whole_history(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(4):
        file.append(step, metrics(step, 0))
    go_on("tensorboard", tmp_path)
    assert tensorboard_lines(tmp_path) == rounded(written(tmp_path))


@pytest.mark.long
def test_a_logger_that_fails_is_switched_off_and_the_others_go_on(tmp_path: Path) -> None:
    warned: list[str] = []
    opened = open_loggers(LogConfig(to=["mlflow", "tensorboard"]), tmp_path, SETTINGS, 0, warned.append)
    opened.log(1, {"x": 1.0})
    opened.flush()
    assert warned == []
    shutil.rmtree(tmp_path / "mlflow")
    for step in (2, 3, 4):
        opened.log(step, {"x": float(step)})
        opened.flush()
    opened.close()
    (text,) = warned
    assert text.startswith("log.to: mlflow failed and is switched off: ") and "database" in text
    assert tensorboard_lines(tmp_path) == {step: {"x": float(step)} for step in (1, 2, 3, 4)}


@pytest.mark.long
def test_a_server_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new run is the user's to mend; one that goes on goes on without the logger."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        monkeypatch.setattr(loggers, "OPEN_S", 3.0)
        with pytest.raises(UserError, match=r"log\.to: mlflow cannot start: it did not start within 3 s"):
            open_loggers(LogConfig(to=["mlflow"]), tmp_path, SETTINGS, 0)
        warned: list[str] = []
        monkeypatch.setattr(loggers, "OPEN_S", 0.2)
        opened = open_loggers(LogConfig(to=["mlflow"]), tmp_path, SETTINGS, 5, warned.append)
        opened.log(6, {"x": 1.0})
        opened.close()
    assert warned == ["log.to: mlflow is switched off because it cannot start: it did not start within 0 s. metrics.jsonl has every number"]


class Stuck:
    """A logger whose server went away."""

    id = None
    hint = ""
    has = 0

    def __init__(self) -> None:
        self.come_back = threading.Event()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.come_back.wait()

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.come_back.wait()

    def close(self, finished: bool) -> None:
        self.come_back.wait()


@pytest.mark.parametrize("steps", [3, 30])
def test_a_logger_that_hangs_holds_up_nothing(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FLUSH_S": 0.1, "CLOSE_S": 0.2, "MOST_BEHIND": 10}.items():
        monkeypatch.setattr(loggers, name, value)
    warned: list[str] = []
    opened, stuck = Loggers(warned.append), Stuck()
    opened.add("stuck", lambda: stuck, required=True)
    for step in range(steps):
        opened.log(step, {"x": 1.0})
    opened.flush()
    opened.close()
    opened.close()
    assert not stuck.come_back.is_set()  # whoever waited for it would wait for ever
    stuck.come_back.set()
    (text,) = warned
    assert ("checkpoints would have to wait for it" if steps == 3 else "TimeoutError: it is 10 steps behind") in text


def test_no_logger(tmp_path: Path) -> None:
    with open_loggers(LogConfig(), tmp_path, SETTINGS, 0) as opened:
        opened.table(1, "val/samples", COLUMNS, rows(1, 0))
        opened.log(1, metrics(1, 0))
        opened.flush()
    assert list(tmp_path.iterdir()) == []


# ---- before a run


def test_check(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = LogConfig(to=["tensorboard", "wandb", "mlflow", "trackio"])
    # Whether whoever runs the tests has a key makes no difference.
    monkeypatch.setattr(loggers.Wandb, "mistake", staticmethod(lambda: None))
    assert check(everything) == [] and check(LogConfig()) == []
    for module in ("tensorboard", "alembic"):
        monkeypatch.setitem(sys.modules, module, None)
    assert check(everything) == [
        'log.to: tensorboard needs tensorboard. Install it with pip install "fulltilt[tensorboard]", or remove tensorboard',
        'log.to: mlflow needs alembic. Install it with pip install "fulltilt[mlflow]", or remove mlflow',
    ]
    assert check(LogConfig(to=["trackio", "trackio"])) == ["log.to: trackio is named twice. Remove one"]
    assert check(LogConfig(name="x")) == ['log.name: log.to names no logger. Set log.to, for example to ["tensorboard"], or remove the key']


def test_a_folder_of_the_same_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_logger").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not loggers._installed("some_logger")
    (tmp_path / "some_logger" / "__init__.py").touch()
    assert loggers._installed("some_logger")


def test_wandb_without_a_key_asks_nobody(tmp_path: Path) -> None:
    """On a terminal, where wandb would ask: both the check and the opening say what to do instead."""
    code = """
from pathlib import Path
from fulltilt.schema import LogConfig
from fulltilt.observe.loggers import check, open_loggers
from fulltilt.records import UserError
config = LogConfig(to=["wandb"])
said = check(config)
try:
    open_loggers(config, Path("."), {}, 0)
except UserError as error:
    said.append(str(error))
Path("said").write_text(repr(said))
"""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_") and key != "NETRC"}
    environment = {**kept, "PYTHONPATH": str(Path(loggers.__file__).parents[2]), "HOME": str(tmp_path), "TERM": "xterm"}
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs)
        assert process.wait(timeout=60) == 0
    finally:
        os.close(ours)
        os.close(theirs)
    first, second = ast.literal_eval((tmp_path / "said").read_text())
    assert first == second and "Set WANDB_API_KEY" in first and "WANDB_MODE=offline" in first


def test_importing_imports_none_of_them(tmp_path: Path) -> None:
    source = "import sys, fulltilt.observe.loggers; assert not {'torch', 'tensorboard', 'wandb', 'mlflow', 'trackio'} & sys.modules.keys()"
    run_python(source, tmp_path)
