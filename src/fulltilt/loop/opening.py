"""Opening a run: its folder, the checkpoint to resume from, its parts; then training or evaluation.

Enters: a configuration. Leaves: a finished run, or the figures of an evaluation. Guaranteed: a run writes only into its own folder, an
empty or a new one, one process at a time; it is resumed only with the configuration, the files and the data it was started with, unless the
user insists; nothing is written into a new folder before configuration, reward, data and model have been checked; a run that has lost a
worker resumes from its last checkpoint by itself, as often as `cluster.restarts` allows.
"""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from fulltilt import config as configuration
from fulltilt.cluster import checks
from fulltilt.cluster.assembly import RunParts, assemble, assemble_evaluation
from fulltilt.cluster.checks import RunData
from fulltilt.cluster.here import shape_for
from fulltilt.cluster.hosts import WorkerDied, WorkerError, WorkerStuck
from fulltilt.cluster.service import wrong_cluster
from fulltilt.cluster.worker import SURPLUS_TENSORS, enough_memory
from fulltilt.commits import at_commits
from fulltilt.data.prompts import PromptSet
from fulltilt.folders import RUN_MARKER, read_file, refuse_foreign
from fulltilt.interrupts import hangup_restored
from fulltilt.loop.experience import validate
from fulltilt.loop.folder import METRICS, PLAN, ROLLOUTS, SNAPSHOT, VALIDATION, WORKERS, RunFolder, open_run_folder
from fulltilt.loop.run import OnStep, Progress, Run, Summary
from fulltilt.loop.saved import (
    Change,
    SavedState,
    changed_keys,
    changed_rows,
    changes_since,
    edited,
    file_digests,
    pinned_commits,
    read_state,
)
from fulltilt.observe.console import Console
from fulltilt.observe.health import Health, Unhealthy
from fulltilt.observe.loggers import open_loggers
from fulltilt.observe.metrics import MetricsFile, RolloutFiles, read_lines, write_whole
from fulltilt.plan.budgets import Budgets
from fulltilt.records import UserError
from fulltilt.rollout import surplus
from fulltilt.rollout.collect import ScoredGroup
from fulltilt.schema import Config, to_toml, value_of
from fulltilt.training.checkpoint import Checkpoint, CheckpointStore, open_checkpoint
from fulltilt.tune.calibration import calibrate, in_words
from fulltilt.tune.description import AS_MODELLED, Calibration
from fulltilt.tune.explain import explain
from fulltilt.tune.predict import Predictor, UsedDevices, calibrated, describe_run, saved_facts
from fulltilt.tune.probe import Prober
from fulltilt.words import first_line, joined, many

SIZES = {field.name for field in fields(Budgets)}
LAYOUT = ("workers", "parts", "rollout_parts")  # the sizes of a run that describe how models are divided
STATS_INTERVAL_S = 10.0  # seconds of generating between two lines about progress


def train(config: Config, console: Console, on_step: OnStep | None = None, origin: Path | None = None) -> Summary:
    """Run `config` to its end, from the newest intact checkpoint of its folder if there is one. `origin`: the file it was read from, which
    is never written."""
    path = Path(config.run.dir)
    with contextlib.ExitStack() as stack:
        stack.enter_context(hangup_restored())
        refuse_foreign(path, RUN_MARKER, "run.dir")
        # A folder that holds a run is locked before it is read; nothing is written into a new one before everything has been checked.
        folder = stack.enter_context(open_run_folder(path)) if (path / RUN_MARKER).exists() else None
        return Attempts(config, console, on_step, origin, folder, stack).train()


class Attempts:
    """Attempts at a run: one, and after the loss of a worker up to `cluster.restarts` more, each from the newest checkpoint. The folder
    stays locked between attempts."""

    def __init__(
        self, config: Config, console: Console, on_step: OnStep | None, origin: Path | None, folder: RunFolder | None,
        locks: contextlib.ExitStack,
    ) -> None:  # fmt: skip
        """`folder`: None if there is no run's folder yet. `locks`: keeps a folder locked that is made later."""
        self.config, self.console, self.on_step, self.origin, self.folder, self.locks = config, console, on_step, origin, folder, locks
        self.path = Path(config.run.dir)
        self.restarts = 0
        self._before = 0  # number of workers of the last attempt that has loaded any
        self._store = CheckpointStore(self.path / "checkpoints", config.run.keep)
        self._run: Run | None = None  # the current attempt, once its workers are loaded

    def train(self) -> Summary:
        failed_before = 0
        while True:
            try:
                return self._attempt()
            except UserError as error:
                if self.restarts and self._run is None:  # not a mistake of the user's: the machines have changed
                    text = f"Restart {self.restarts} of {self.config.cluster.restarts}: {error}\n{self._how_to_resume()}"
                    raise WorkerError(text) from error.__cause__  # the traceback in a worker, if it was raised there
                raise
            except WorkerError as error:
                # The current step is lost with the workers, which had its gradients.
                failed = (self._run.progress.step if self._run else self._store.newest) + 1
                if (
                    not isinstance(error, WorkerDied | WorkerStuck)
                    or failed == failed_before
                    or self.restarts == self.config.cluster.restarts
                ):
                    error.args = ("\n".join([str(error), *self._last_words(error, failed, failed_before)]),)
                    raise
                self.restarts += 1
                failed_before = failed
                where = (
                    f"resumes from its checkpoint of step {self._store.newest}" if self._store.newest else "begins again at its first step"
                )
                self.console.warn(f"{error}\nRestart {self.restarts} of {self.config.cluster.restarts}: the run {where}")

    def _last_words(self, error: WorkerError, failed: int, failed_before: int) -> Iterator[str]:
        """Say why there is no restart, and what the user can do."""
        lost = isinstance(error, WorkerDied | WorkerStuck)
        if lost and failed == failed_before:
            yield f"Step {failed} has failed twice in a row, so the run is not restarted again"
        elif lost and self.restarts:
            yield f"The run was restarted {many(self.restarts, 'time')}, as often as cluster.restarts allows"
        yield self._how_to_resume()

    def _how_to_resume(self) -> str:
        step = self._store.newest
        return (
            f"The same command resumes the run from its checkpoint of step {step}" if step else "There is no checkpoint to resume from yet"
        )

    def _attempt(self) -> Summary:
        config, console, path = self.config, self.console, self.path
        self._run, self._store = None, CheckpointStore(path / "checkpoints", config.run.keep)
        store = self._store
        with contextlib.ExitStack() as stack:
            files = file_digests(config)
            found = find_checkpoint(config, store, restarted=self.restarts > 0)
            for text in store.skipped:
                console.warn(f"skipped a damaged checkpoint: {text}")
            state = read_state(found) if found else None
            changed = changed_keys(config, state, files) if state else []
            if found and state:
                require_force(config, console, changes_since(config, state, files))
                console.note(f"resuming from step {found.step} ({found.path})")
            for text in configuration.warnings(config):
                console.warn(text)
            pinned = pinned_commits(config, state, changed) if state else {}
            with enough_memory("set-up"), at_commits(pinned):
                kept = kept_budgets(config, path, state, changed, console)
                parts = assemble(config, found, kept=kept, probe=prober_for(config), before=self._before if self.restarts else None)
            stack.callback(parts.close)
            self._before = parts.crew.hosts.size
            parts.crew.report_rollout(console.note, STATS_INTERVAL_S)
            if state:
                require_force(config, console, changed_rows(config, state, parts.data_digest))
            for text in (*parts.notes, *parts.plan.words) if not self.restarts else ():
                console.note(text)
            if state:
                warn_of_effects(config, parts, state, console)
            store.require_space(parts.crew.checkpoint_bytes)
            self.folder = self.folder or self.locks.enter_context(open_run_folder(path, new=True))
            parts.crew.keep_output(path / WORKERS)
            with at_commits(parts.commits):
                predictions = foreseen(config, parts)
            for text in predictions.words if not self.restarts else ():
                console.note(text)
            write_set_up(config, parts, self.folder, state, self.origin, console, predictions.saved)
            if found and state:
                if not changed:
                    keep_changed_budgets(parts, state)
                progress = progress_of(parts, found, state, changed, console)
                resume_store_and_memory(config, parts, self.folder, store, state)
            else:
                progress = Progress()
            loggers = stack.enter_context(open_loggers(config.log, path, configuration.snapshot(config), progress.step, console.warn))
            for text in loggers.hints:
                console.note(text)
            stack.enter_context(freeze_existing_objects())
            with enough_memory():  # a phase's own message says more; this one is for work between phases
                self._run = Run(config, parts, store, progress, console, loggers, self.on_step, self.folder, files, predictions.predictor)
                summary = self._run.train()
            loggers.close(finished=not summary.interrupted)
            if summary.steps and not summary.interrupted:
                tell_where_time_went(path, console)
            return summary


@dataclass(frozen=True)
class Foreseen:
    """Predictions of memory and time for a run."""

    found: Predictor | str  # or the reason why there are none
    saved: Mapping[str, Any] = field(default_factory=dict)  # for the plan's file

    @property
    def words(self) -> Iterator[str]:
        """Yield lines about the predictions, shown before the first step."""
        if isinstance(self.found, str):
            yield f"predictions of time and memory are left out: {self.found}"
        elif self.calibration != AS_MODELLED:
            yield in_words(self.calibration)

    @property
    def calibration(self) -> Calibration:
        return AS_MODELLED if isinstance(self.found, str) else self.found.run.calibration

    @property
    def predictor(self) -> Predictor | None:
        return self.found if isinstance(self.found, Predictor) else None


def foreseen(config: Config, parts: RunParts) -> Foreseen:
    """Make the models for predictions. A run does not need them: if that fails, it reports the reason and continues."""
    crew, plan, saved = parts.crew, parts.plan, dict[str, Any]()
    try:
        shape = shape_for(config)
        devices = UsedDevices(crew.device, crew.device_bytes, plan.budgets.workers, config.cluster.nodes)
        saved = saved_facts(shape, devices, plan)
        run = describe_run(config, shape, devices, plan)
        calibration = calibrate(run, crew.probed)
        saved = saved_facts(shape, devices, plan, calibration)
        return Foreseen(Predictor(calibrated(run, calibration)), saved)
    except Exception as error:
        return Foreseen(first_line(error), saved)


def tell_where_time_went(folder: Path, console: Console) -> None:
    try:
        for text in explain(folder).summary():
            console.note(text)
    except Exception as error:  # the run itself is not affected
        console.warn(f"where the time went is not known: {first_line(error)}")


def prober_for(config: Config) -> Prober | None:
    """Make the object that measures updates and rollouts, if the run is to measure them. By default it does so on a GPU, where that takes
    seconds."""
    on_cuda = checks.choose_device(config.run.device).type == "cuda"
    wanted = on_cuda if config.run.probe == "auto" else config.run.probe
    return Prober(clock=not config.run.deterministic) if wanted else None


@contextlib.contextmanager
def freeze_existing_objects() -> Iterator[None]:
    """Exclude all objects that exist now from garbage collection: they stay to the end of the run, and collecting garbage among them
    sometimes delays a rollout by 0.2 s."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def find_checkpoint(config: Config, store: CheckpointStore, *, restarted: bool = False, hashes: bool = True) -> Checkpoint | None:
    """Return the checkpoint to resume from. `restarted`: whether this process has written it, so that no setting prevents resuming.
    `hashes`: whether to read every byte of it."""
    found = store.latest(hashes=hashes)
    if found is None and store.skipped:
        raise UserError(
            f"{store.folder} holds checkpoints but none that can be used: {'; '.join(store.skipped)}. Restore one, use another "
            f"run.dir, or delete {store.folder} to start over"
        )
    if found and config.run.resume == "never" and not restarted:
        where = f"{config.run.dir} holds a run at step {found.step}"
        raise UserError(f"run.resume = never: {where}. Use another run.dir, or run.resume = auto to resume it")
    return found


def find_mistakes(config: Config) -> list[str]:
    """List what `train` would refuse before its models load, including mistakes of a cluster's machines and, in a run's folder, reasons not
    to resume that run."""
    state: SavedState | None = None
    pinned: dict[str, str] = {}
    refused: list[str] = []
    try:
        found = find_checkpoint(config, CheckpointStore(Path(config.run.dir) / "checkpoints", config.run.keep), hashes=False)
        state, files = read_state(found) if found else None, file_digests(config)
        pinned = pinned_commits(config, state, changed_keys(config, state, files)) if state else {}
        state = state if config.run.resume != "force" else None
        refused += [change.refusal for change in changes_since(config, state, files)] if state else []
    except UserError as error:
        refused.append(str(error))

    def wrong_rows(data: RunData) -> list[str]:
        return [change.refusal for change in changed_rows(config, state, data.train.digest())] if state else []

    with at_commits(pinned):
        return list(dict.fromkeys([*checks.find_mistakes(config, wrong_rows), *wrong_cluster(config), *refused]))


def require_force(config: Config, console: Console, changes: Iterable[Change]) -> None:
    """Refuse to resume after a change since the checkpoint, unless the user insists; then warn."""
    for change in changes:
        if config.run.resume != "force":
            raise UserError(change.refusal)
        console.warn(f"resuming although {change.told}")


def warn_of_effects(config: Config, parts: RunParts, state: SavedState, console: Console) -> None:
    """Warn of effects that allowed changes have on a resumed run."""
    if state.val_data and parts.val_digest and state.val_data != parts.val_digest:
        console.warn(f"the rows of data.val changed, or their tokens: validations after step {state.step} do not compare with those before")
    if state.step >= parts.plan.steps:
        console.note(f"the run is at step {state.step} already: nothing to do. Ask for more with run.steps")
    elif config.train.schedule != "constant" and any(state.config.get(key) != value_of(config, key) for key in ("run.steps", "run.epochs")):
        console.warn(f"the {config.train.schedule} schedule now ends at another step: learning rates differ from those first planned")


def kept_budgets(config: Config, path: Path, state: SavedState | None, changed: list[str], console: Console) -> dict[str, int] | None:
    """Return the sizes to compute in again, for the same bits: those of the checkpoint, or of a run that was killed before its first
    checkpoint."""
    if state:
        return None if changed else {name: size for name, size in state.budgets.items() if name in SIZES}
    try:
        plan = json.loads(read_file(path / PLAN))
        known, budgets = plan["config"], plan["budgets"]
        if not isinstance(known, dict) or budgets.keys() != SIZES:
            raise ValueError("its sizes are not those of this version")
        if any(type(size) is not int for size in budgets.values()):
            raise ValueError("a size is not a whole number")
    except OSError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        console.warn(f"{path / PLAN} is not a plan of this version ({type(error).__name__}: {error}): sizes are planned again")
        return None
    return None if configuration.differences(known, configuration.snapshot(config)) else budgets


def keep_changed_budgets(parts: RunParts, state: SavedState) -> None:
    """Use the budgets that were changed before the checkpoint, unless all are planned again for other workers."""
    planned = asdict(parts.plan.budgets)
    if all(planned[name] == state.budgets.get(name, 1) for name in LAYOUT):
        changed, lowered = (
            {name: size for name, size in each.items() if name in SIZES} for each in (state.changed_budgets, state.lowered_budgets)
        )
        parts.crew.use_budgets(changed, lowered)


def write_set_up(
    config: Config, parts: RunParts, folder: RunFolder, state: SavedState | None, origin: Path | None, console: Console,
    more: Mapping[str, Any],
) -> None:  # fmt: skip
    """Write the configuration and the plan, and cut metrics and rollouts back to the checkpoint. Without a checkpoint, results of a run
    whose checkpoints were deleted are moved aside. `more`: entries of the plan's file for `fulltilt doctor`."""
    path = folder.path
    if state is None and (aside := folder.move_aside()):
        console.warn(f"the checkpoints of the earlier run in {path} are gone: its metrics and rollouts were moved to {aside}")
    if origin is None or origin.resolve() != (path / SNAPSHOT).resolve():
        write_whole(path / SNAPSHOT, to_toml(config))
    plan = {"config": configuration.snapshot(config), "budgets": asdict(parts.plan.budgets), "words": parts.plan.words, **more}
    write_whole(path / PLAN, json.dumps(plan, indent=1))
    metrics = MetricsFile(path / METRICS)
    warning = metrics.truncate(state.metrics_offset if state else 0)
    metrics.close()
    damaged = read_lines(metrics.path).damaged
    for text in (warning, damaged and f"{metrics.path}: {damaged}. The run goes on without these lines"):
        if text:
            console.warn(text)
    RolloutFiles(path / ROLLOUTS, config.run.save_rollouts).truncate(state.step if state else 0)
    RolloutFiles(path / VALIDATION, config.run.save_rollouts).truncate(state.step if state else -1)


def resume_store_and_memory(config: Config, parts: RunParts, folder: RunFolder, store: CheckpointStore, state: SavedState) -> None:
    """Continue where another process ended, which may have left checkpoints beyond `run.keep`."""
    folder.note_checkpoint()
    store.tidy(state.best if state.best and state.best.metric == config.run.keep_best else None)
    parts.crew.restore_memory(state.memory if isinstance(state.memory, list) else [state.memory])


def progress_of(parts: RunParts, found: Checkpoint, state: SavedState, changed: list[str], console: Console) -> Progress:
    """Return the progress that a checkpoint has saved, without values that depend on a changed key."""
    new_penalty = any(key.startswith("algorithm.reward_kl") for key in changed)
    new_sampling = any(key.startswith("rollout.") for key in changed)  # the entropy depends on the temperature
    return Progress(
        step=state.step,
        cursor=state.cursor,
        surplus=carried_over(parts, found, state, console),
        reward_kl_coef=None if new_penalty else state.reward_kl_coef,
        streaks=tuple(sorted(state.health.items())),
        first_entropy=None if new_sampling else state.first_entropy,
        seconds=tuple(sorted(state.seconds.items())),
    )


def carried_over(parts: RunParts, found: Checkpoint, state: SavedState, console: Console) -> tuple[ScoredGroup, ...]:
    """Return the groups that were sampled before the checkpoint and not yet trained on."""
    if not state.surplus:
        return ()
    if not isinstance(parts.train_data, PromptSet) or parts.algorithm.dynamic is None:
        console.warn(f"{len(state.surplus)} groups carried over from before the checkpoint are left out: the algorithm carries none")
        return ()
    try:
        prompts = {prompt.uid: prompt for prompt in parts.train_data.items}
        writers = {group.get("part", 0) for group in state.surplus}
        kept, lost = surplus.unpack({worker: found.arrays(SURPLUS_TENSORS, worker) for worker in writers}, state.surplus, prompts)
    except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
        raise edited(found, f"surplus: {type(error).__name__}: {error}") from None
    if lost:
        console.warn(f"{lost} groups carried over from before the checkpoint are left out: their prompts are no longer in the data")
    assert parts.samples
    return parts.samples.adopt(kept)


def evaluate(config: Config, console: Console, *, latest: bool = False, best: bool = False, step: int | None = None) -> dict[str, Any]:
    """Return validation rewards (for SFT: the loss) of `model.path`, or of the newest, the best or one step's checkpoint of `run.dir`."""
    if config.data.val is None:
        raise UserError("data.val: nothing to evaluate on. Set data.val")
    chosen = [name for name, given in {"latest=True": latest, "best=True": best, f"checkpoint={step}": step is not None}.items() if given]
    if len(chosen) > 1:
        raise UserError(f"{joined(chosen, 'and')} each choose a checkpoint to evaluate. Give only one of them")
    store = CheckpointStore(Path(config.run.dir) / "checkpoints", config.run.keep)
    find = store.find_best if best else store.latest if step is None else partial(store.at, step)
    with enough_memory("set-up"):
        if latest or best or step is not None:
            found, parts = assemble_checkpoint(config, store, find, console)
        else:
            found, parts = None, assemble_evaluation(config)
    with contextlib.closing(parts):
        parts.crew.report_rollout(console.note, STATS_INTERVAL_S)
        for text in parts.notes:
            console.note(text)
        console.begin_step(found.step if found else 0)
        with console.run(total=1):
            with console.phase("eval"):
                metrics = validate(config, parts, console).metrics
            console.end_evaluation()
            if failed := Health(config.health).failed(metrics):
                raise Unhealthy(failed)
    which = {"model": str(found.model_folder if found else config.model.path), "step": found.step if found else 0}
    return {**which, **({"skipped": "; ".join(store.skipped)} if store.skipped else {}), **metrics}


def assemble_checkpoint(
    config: Config, store: CheckpointStore, find: Callable[[], Checkpoint | None], console: Console
) -> tuple[Checkpoint, RunParts]:
    """Return the checkpoint that `find` returns, and its parts."""

    def find_one() -> Checkpoint:
        found = find()
        for text in store.skipped:
            console.warn(f"skipped a damaged checkpoint: {text}")
        if found is None:
            best = find == store.find_best
            which, option, how = ("best", "best=True", "; run.keep_best keeps a best checkpoint") if best else ("intact", "latest=True", "")
            raise UserError(f"{config.run.dir} holds no {which} checkpoint. Run without {option} to evaluate model.path{how}")
        return found

    def read(found: Checkpoint) -> tuple[Checkpoint, RunParts]:
        state = read_state(found)
        changed = changed_keys(config, state, file_digests(config))
        refuse_other_adapters(config, changed)
        with at_commits(pinned_commits(config, state, changed)):
            return found, assemble_evaluation(config, found)

    return open_checkpoint(find_one, read, console.warn)


def refuse_other_adapters(config: Config, changed: Iterable[str]) -> None:
    """Refuse trained adapters on another base, or with another scale: they would be evaluated as a model that was never trained."""
    wrong = [key for key in changed if key == "model.path" or (key.startswith("lora.") and key != "lora.critic")]
    if config.lora.rank and wrong:
        raise UserError(f"{config.run.dir} holds a run with other values of {', '.join(wrong)}. Give those to evaluate its adapters")
