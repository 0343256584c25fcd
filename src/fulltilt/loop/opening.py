"""Opening a run: its folder, the checkpoint to resume from, its parts; then training or evaluation.

Enters: a configuration. Leaves: a finished run, or the figures of an evaluation. Guaranteed: two processes never write to one run folder;
a run is resumed only with the configuration and the data it was started with, unless the user insists; into a new folder nothing is written
before configuration, reward, data and model have been checked.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fulltilt import config as configuration
from fulltilt.cluster.assembly import RunParts, assemble, assemble_evaluation
from fulltilt.cluster.worker import SURPLUS_TENSORS, enough_memory
from fulltilt.data.order import Cursor
from fulltilt.data.prompts import PromptSet
from fulltilt.loop.experience import validate
from fulltilt.loop.run import OnStep, Progress, Run, Summary
from fulltilt.observe.console import Console
from fulltilt.observe.loggers import open_loggers
from fulltilt.observe.metrics import MetricsFile, RolloutFiles, write_whole
from fulltilt.records import UserError
from fulltilt.rollout import surplus
from fulltilt.rollout.collect import ScoredGroup
from fulltilt.schema import Config, to_toml
from fulltilt.training.checkpoint import Checkpoint, CheckpointStore

PLAN = "plan.json"
LOCK = ".lock"
STATS_INTERVAL_S = 10.0  # seconds of generating between two lines about its progress


def train(config: Config, console: Console, on_step: OnStep | None = None) -> Summary:
    """Run `config` to its end, from the newest intact checkpoint of its folder if there is one."""
    folder = Path(config.run.dir)
    store = CheckpointStore(folder / "checkpoints", config.run.keep)
    with contextlib.ExitStack() as stack:
        # A folder that holds a run is locked before it is read; into a new one nothing is written before everything has been checked.
        known = store.folder.is_dir() or (folder / LOCK).exists()
        if known:
            stack.enter_context(one_process(folder))
        found, changed = find_checkpoint(config, store, console)
        for text in configuration.warnings(config):
            console.warn(text)
        with enough_memory("set-up"):
            parts = assemble(config, found, kept=kept_budgets(config, folder, found, changed))
        stack.callback(parts.close)
        parts.worker.report_rollout(console.note, STATS_INTERVAL_S)
        check_data(config, parts, found, console)
        for text in (*parts.notes, *parts.plan.words):
            console.note(text)
        if found and found.step >= parts.plan.steps:
            console.note(f"the run is at step {found.step} already: nothing to do. Ask for more with run.steps")
        store.require_space(parts.worker.checkpoint_bytes)
        if not known:
            stack.enter_context(one_process(folder))
        progress = open_folder(config, parts, folder, found, console)
        if any(key.startswith("algorithm.reward_kl") for key in changed):
            progress = replace(progress, reward_kl_coef=None)
        if any(key.startswith("rollout.") for key in changed):  # the entropy depends on the temperature
            progress = replace(progress, first_entropy=None)
        loggers = stack.enter_context(open_loggers(config.log, folder, configuration.snapshot(config), progress.step, console.warn))
        for text in loggers.hints:
            console.note(text)
        stack.enter_context(what_stays())
        with enough_memory():  # a phase's own message says more; this one is for what happens between phases
            summary = Run(config, parts, store, progress, console, loggers, on_step).train()
        loggers.close(finished=not summary.interrupted)
        return summary


@contextlib.contextmanager
def what_stays() -> Iterator[None]:
    """Exclude all objects that exist now from garbage collection: they stay to the end of the run, and looking through them sometimes
    delays a rollout by 0.2 s."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def find_checkpoint(config: Config, store: CheckpointStore, console: Console) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to resume from, and the keys that changed since."""
    found = store.latest()
    for text in store.skipped:
        console.warn(f"skipped a damaged checkpoint: {text}")
    if found is None:
        if store.skipped:
            raise UserError(
                f"{store.folder} holds checkpoints but none that can be used: {'; '.join(store.skipped)}. Restore one, use another "
                f"run.dir, or delete {store.folder} to start over"
            )
        return None, []
    where = f"{config.run.dir} holds a run at step {found.step}"
    if config.run.resume == "never":
        raise UserError(f"run.resume = never: {where}. Use another run.dir, or run.resume = auto to resume it")
    saved, now = found.state()["config"], configuration.snapshot(config)
    changed = configuration.differences(saved, now)
    values = ", ".join(f"{key} ({shown(saved[key])}, now {shown(now[key])})" for key in changed)
    if changed and config.run.resume == "auto":
        raise UserError(
            f"{where} that was started with other values of {values}. Use another run.dir for a new run, give the old values "
            "to resume, or set run.resume = force to resume with the new ones"
        )
    if changed:
        console.warn(f"resuming although these keys changed: {values}")
    if config.train.schedule != "constant" and any(saved[key] != now[key] for key in ("run.steps", "run.epochs")):
        console.warn(f"the {config.train.schedule} schedule now ends at another step: learning rates differ from those first planned")
    console.note(f"resuming from step {found.step} ({found.path})")
    return found, changed


def shown(value: Any) -> str:
    return "left out" if value is None else json.dumps(value)


def kept_budgets(config: Config, folder: Path, found: Checkpoint | None, changed: list[str]) -> dict[str, Any] | None:
    """The sizes to compute in again, for the same bits: the checkpoint's, or those a run killed before its first checkpoint had."""
    if found:
        return None if changed else found.state()["budgets"]
    try:
        plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return None if configuration.differences(plan["config"], configuration.snapshot(config)) else plan["budgets"]


def check_data(config: Config, parts: RunParts, found: Checkpoint | None, console: Console) -> None:
    """Refuse other rows under the same path: they would make it another run."""
    if found is None or found.state()["data"] == parts.data_digest:
        return
    if config.run.resume != "force":
        raise UserError(
            f"data.train: its rows are not those that the run in {config.run.dir} was started with. Bring them back, use another run.dir "
            "for a new run, or set run.resume = force to resume with the new ones"
        )
    console.warn("resuming although the rows of data.train changed")


def open_folder(config: Config, parts: RunParts, folder: Path, found: Checkpoint | None, console: Console) -> Progress:
    """Write the configuration and the plan, and cut metrics and rollouts back to the checkpoint. Returns the progress to resume from."""
    state = found.state() if found else None
    write_whole(folder / "run.toml", to_toml(config))
    plan = {"config": configuration.snapshot(config), "budgets": asdict(parts.plan.budgets), "words": parts.plan.words}
    write_whole(folder / PLAN, json.dumps(plan, indent=1))
    metrics = MetricsFile(folder / "metrics.jsonl")
    warning = metrics.truncate(state["metrics_offset"] if state else 0)
    metrics.close()
    if warning:
        console.warn(warning)
    RolloutFiles(folder / "rollouts", config.run.save_rollouts).truncate(state["step"] if state else 0)
    RolloutFiles(folder / "validation", config.run.save_rollouts).truncate(state["step"] if state else -1)
    if found is None or state is None:
        return Progress()
    return Progress(
        step=state["step"],
        cursor=Cursor(**state["cursor"]),
        surplus=carried_over(parts, found, state, console),
        reward_kl_coef=state.get("reward_kl_coef"),
        streaks=tuple(sorted(state.get("health", {}).items())),
        first_entropy=state.get("first_entropy"),
    )


def carried_over(parts: RunParts, found: Checkpoint, state: dict[str, Any], console: Console) -> tuple[ScoredGroup, ...]:
    """The groups that were sampled before the checkpoint and not yet trained on."""
    if not state.get("surplus"):
        return ()
    if not isinstance(parts.train_data, PromptSet) or parts.algorithm.dynamic is None:
        console.warn(f"{len(state['surplus'])} groups carried over from before the checkpoint are left out: the algorithm carries none")
        return ()
    kept, lost = surplus.unpack(found.arrays(SURPLUS_TENSORS), state["surplus"], {prompt.uid: prompt for prompt in parts.train_data.items})
    if lost:
        console.warn(f"{lost} groups carried over from before the checkpoint are left out: their prompts are no longer in the data")
    return tuple(kept)


@contextlib.contextmanager
def one_process(folder: Path) -> Iterator[None]:
    """Two processes in one run folder would destroy each other's work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / LOCK, "w")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"run.dir: {folder} cannot be written: {error.strerror}. Choose another folder") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"run.dir: another process is running in {folder}. Wait for it, or use another folder") from None
        yield


def evaluate(config: Config, console: Console, *, latest: bool, step: int | None = None) -> dict[str, Any]:
    """Validation rewards (for SFT: the loss) of `model.path`, of the newest checkpoint of `run.dir`, or of that of one step."""
    if config.data.val is None:
        raise UserError("data.val: nothing to evaluate on. Set data.val")
    found = None
    if latest or step is not None:
        store = CheckpointStore(Path(config.run.dir) / "checkpoints", config.run.keep)
        found = store.latest() if step is None else store.at(step)
        if found is None:
            raise UserError(f"{config.run.dir} holds no intact checkpoint. Leave --latest out to evaluate model.path")
        # Trained adapters on another base, or scaled otherwise, would be evaluated as a model that was never trained.
        changed = configuration.differences(found.state()["config"], configuration.snapshot(config))
        wrong = [key for key in changed if key == "model.path" or (key.startswith("lora.") and key != "lora.critic")]
        if config.lora.rank and wrong:
            raise UserError(f"{config.run.dir} holds a run with other values of {', '.join(wrong)}. Give those to evaluate its adapters")
    with enough_memory("set-up"):
        parts = assemble_evaluation(config, found)
    with contextlib.closing(parts):
        parts.worker.report_rollout(console.note, STATS_INTERVAL_S)
        for text in parts.notes:
            console.note(text)
        console.begin_step(found.step if found else 0)
        with console.run(total=1), console.phase("eval"):
            metrics = validate(config, parts, console).metrics
    return {"model": str(found.model_folder if found else config.model.path), "step": found.step if found else 0, **metrics}
