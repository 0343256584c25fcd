"""Opening a run: its folder, the checkpoint to resume from, its parts; then training or evaluation.

Enters: a configuration. Leaves: a finished run, or the figures of an evaluation. Guaranteed: only a run's own folder, an empty or a new one
is written, and by one process at a time; a run is resumed only with the configuration, the files and the data it was started with, unless
the user insists; into a new folder nothing is written before configuration, reward, data and model have been checked; a run whose worker
was lost resumes from its last checkpoint by itself, as often as `cluster.restarts` allows.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, NonNegativeInt

from fulltilt import config as configuration
from fulltilt import user_code
from fulltilt.cluster.assembly import RunParts, assemble, assemble_evaluation
from fulltilt.cluster.hosts import WorkerDied, WorkerError, WorkerStuck
from fulltilt.cluster.worker import SURPLUS_TENSORS, Reading, enough_memory
from fulltilt.data.order import Cursor
from fulltilt.data.prompts import PromptSet
from fulltilt.folders import RUN_MARKER, read_file, refuse_foreign
from fulltilt.interrupts import hangup_restored
from fulltilt.loop.experience import validate
from fulltilt.loop.folder import METRICS, PLAN, ROLLOUTS, SNAPSHOT, VALIDATION, RunFolder, open_run_folder
from fulltilt.loop.run import OnStep, Progress, Run, Summary
from fulltilt.observe.console import Console
from fulltilt.observe.health import Health, Unhealthy
from fulltilt.observe.loggers import open_loggers
from fulltilt.observe.metrics import MetricsFile, RolloutFiles, read_lines, write_whole
from fulltilt.plan import Budgets
from fulltilt.records import UserError
from fulltilt.rollout import surplus
from fulltilt.rollout.collect import ScoredGroup
from fulltilt.schema import MEMORY, Config, keys, rewards_named, row_of, to_toml, value_of, why_invalid
from fulltilt.settings import own_functions
from fulltilt.training.checkpoint import BestCheckpoint, Checkpoint, CheckpointStore, open_checkpoint
from fulltilt.words import joined, many

SIZES = {field.name for field in fields(Budgets)}
STATS_INTERVAL_S = 10.0  # seconds of generating between two lines about its progress


class SavedState(BaseModel):
    """The `state.json` of a checkpoint, as far as the loop reads it. What an older version did not save has a default."""

    step: NonNegativeInt
    updates: NonNegativeInt
    skipped: NonNegativeInt
    critic: dict[str, NonNegativeInt] | None = None
    cursor: Cursor
    surplus: list[dict[str, Any]] = []
    reward_kl_coef: float | None = None
    health: dict[str, int] = {}
    first_entropy: float | None = None
    best: BestCheckpoint | None = None
    budgets: dict[str, NonNegativeInt]
    data: str
    data_versions: list[str] = []
    files: dict[str, str] = {}
    metrics_offset: NonNegativeInt
    seconds: dict[str, float] = {}
    memory: dict[str, Reading] = {}
    config: dict[str, Any]


def read_state(found: Checkpoint) -> SavedState:
    """Its hash is right, so no accident has changed it: what it lacks was never there, or someone has edited it."""
    try:
        return SavedState.model_validate(found.state())
    except (ValueError, RecursionError) as error:
        raise edited(found, why_invalid(error)) from None


def edited(found: Checkpoint, why: object) -> UserError:
    remedy = f"Delete {found.path} to continue from the checkpoint before it, or use another run.dir"
    return UserError(f"{found.path}: its state.json is not as fulltilt writes it: {why}. {remedy}")


def train(config: Config, console: Console, on_step: OnStep | None = None, origin: Path | None = None) -> Summary:
    """Run `config` to its end, from the newest intact checkpoint of its folder if there is one. `origin`: the file it was read from, which
    is never written."""
    path = Path(config.run.dir)
    with contextlib.ExitStack() as stack:
        stack.enter_context(hangup_restored())
        refuse_foreign(path, RUN_MARKER, "run.dir")
        # A folder that holds a run is locked before it is read; into a new one nothing is written before everything has been checked.
        folder = stack.enter_context(open_run_folder(path)) if (path / RUN_MARKER).exists() else None
        return Attempts(config, console, on_step, origin, folder, stack).train()


class Attempts:
    """Attempts at a run: one, and after the loss of a worker up to `cluster.restarts` more, each from the newest checkpoint. The folder
    stays locked from one to the next."""

    def __init__(
        self, config: Config, console: Console, on_step: OnStep | None, origin: Path | None, folder: RunFolder | None,
        locks: contextlib.ExitStack,
    ) -> None:  # fmt: skip
        """`folder`: None where there is none yet; `locks`: keeps the one that is made locked."""
        self.config, self.console, self.on_step, self.origin, self.folder, self.locks = config, console, on_step, origin, folder, locks
        self.path = Path(config.run.dir)
        self.restarts = 0
        self._store = CheckpointStore(self.path / "checkpoints", config.run.keep)
        self._run: Run | None = None  # of the attempt in progress, once its workers are loaded

    def train(self) -> Summary:
        failed_before = 0
        while True:
            try:
                return self._attempt()
            except WorkerError as error:
                # The step in progress is lost with the workers, which had its gradients.
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
        """Why there is no restart, and what the user can do."""
        lost = isinstance(error, WorkerDied | WorkerStuck)
        if lost and failed == failed_before:
            yield f"Step {failed} has failed twice in a row, so the run is not restarted again"
        elif lost and self.restarts:
            yield f"The run was restarted {many(self.restarts, 'time')}, as often as cluster.restarts allows"
        step = self._store.newest
        yield (
            f"The same command resumes the run from its checkpoint of step {step}" if step else "There is no checkpoint to resume from yet"
        )

    def _attempt(self) -> Summary:
        config, console, path = self.config, self.console, self.path
        self._run, self._store = None, CheckpointStore(path / "checkpoints", config.run.keep)
        store = self._store
        with contextlib.ExitStack() as stack:
            files = file_digests(config)
            found, state, changed = find_checkpoint(config, store, files, console, restarted=self.restarts > 0)
            for text in configuration.warnings(config):
                console.warn(text)
            with enough_memory("set-up"):
                parts = assemble(config, found, kept=kept_budgets(config, path, state, changed, console))
            stack.callback(parts.close)
            parts.crew.report_rollout(console.note, STATS_INTERVAL_S)
            check_data(config, parts, state, console)
            for text in (*parts.notes, *parts.plan.words) if not self.restarts else ():
                console.note(text)
            if found and found.step >= parts.plan.steps:
                console.note(f"the run is at step {found.step} already: nothing to do. Ask for more with run.steps")
            store.require_space(parts.crew.checkpoint_bytes)
            self.folder = self.folder or self.locks.enter_context(open_run_folder(path, new=True))
            write_set_up(config, parts, self.folder, state, self.origin, console)
            if found and state:
                progress = progress_of(parts, found, state, changed, console)
                resume_store_and_memory(config, parts, self.folder, store, state)
            else:
                progress = Progress()
            loggers = stack.enter_context(open_loggers(config.log, path, configuration.snapshot(config), progress.step, console.warn))
            for text in loggers.hints:
                console.note(text)
            stack.enter_context(freeze_existing_objects())
            with enough_memory():  # a phase's own message says more; this one is for what happens between phases
                self._run = Run(config, parts, store, progress, console, loggers, self.on_step, self.folder, files)
                summary = self._run.train()
            loggers.close(finished=not summary.interrupted)
            return summary


@contextlib.contextmanager
def freeze_existing_objects() -> Iterator[None]:
    """Exclude all objects that exist now from garbage collection: they stay to the end of the run, and looking through them sometimes
    delays a rollout by 0.2 s."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def find_checkpoint(
    config: Config, store: CheckpointStore, files: dict[str, str], console: Console, *, restarted: bool = False
) -> tuple[Checkpoint | None, SavedState | None, list[str]]:
    """The checkpoint to resume from, its state, and the keys that changed since. `files`: digests of the files that keys name. `restarted`:
    this process has written the checkpoint, which no setting keeps from being resumed."""
    found = store.latest()
    for text in store.skipped if found else ():
        console.warn(f"skipped a damaged checkpoint: {text}")
    if found is None:
        if store.skipped:
            raise UserError(
                f"{store.folder} holds checkpoints but none that can be used: {'; '.join(store.skipped)}. Restore one, use another "
                f"run.dir, or delete {store.folder} to start over"
            )
        return None, None, []
    where = f"{config.run.dir} holds a run at step {found.step}"
    if config.run.resume == "never" and not restarted:
        raise UserError(f"run.resume = never: {where}. Use another run.dir, or run.resume = auto to resume it")
    state = read_state(found)
    saved, now = state.config, configuration.snapshot(config)
    changed = configuration.differences(saved, now)
    values = ", ".join(f"{key} ({shown(saved[key])}, now {shown(now[key], 'other rows given from Python')})" for key in changed)
    if changed:
        remedy = "Use another run.dir for a new run, give the old values to resume, or set run.resume = force to resume with the new ones"
        require_force(config, console, f"{where} that was started with other values of {values}. {remedy}", f"these keys changed: {values}")
    others = ", ".join(name for name, digest in files.items() if state.files.get(name, digest) != digest)
    if others:
        remedy = (
            "Use another run.dir for a new run, bring the old content back to resume, or set run.resume = force to resume with the new one"
        )
        refusal = f"{where} that was started with another content of {others}. {remedy}"
        require_force(config, console, refusal, f"the content of these files changed: {others}")
    if config.train.schedule != "constant" and any(saved.get(key) != now[key] for key in ("run.steps", "run.epochs")):
        console.warn(f"the {config.train.schedule} schedule now ends at another step: learning rates differ from those first planned")
    console.note(f"resuming from step {found.step} ({found.path})")
    return found, state, changed


def require_force(config: Config, console: Console, refusal: str, changed: str) -> None:
    """Refuse to resume what has changed since its checkpoint, unless the user insists; then it is a warning."""
    if config.run.resume != "force":
        raise UserError(refusal)
    console.warn(f"resuming although {changed}")


def file_digests(config: Config) -> dict[str, str]:
    """The sha256 of each file with a function of the user's, by the function's name, and of each other file, by the key that names it. What
    such a file imports or includes is not known."""
    named = {key: value_of(config, key) for key, field in keys().items() if row_of(field).names == "file"}
    found: dict[str, str] = {}
    for key, path in named.items():
        with contextlib.suppress(OSError):  # who uses the file reports it
            found |= {key: hashlib.sha256(Path(path).read_bytes()).hexdigest()} if path else {}
    functions = [function.code for function in own_functions(config).values()]
    for name in rewards_named(config.reward.function, config.reward.sources):
        with contextlib.suppress(user_code.UserCodeError):  # one of fulltilt's own
            functions.append(user_code.locate(name))
    return dict(sorted((found | {code.name: code.digest for code in functions if code.source}).items()))


def shown(value: Any, rows: str = "rows given from Python") -> str:
    """A key's value; `rows`: what to call those that are in memory."""
    return "left out" if value is None else rows if isinstance(value, str) and value.startswith(MEMORY) else json.dumps(value)


def kept_budgets(config: Config, path: Path, state: SavedState | None, changed: list[str], console: Console) -> dict[str, int] | None:
    """The sizes to compute in again, for the same bits: the checkpoint's, or those a run killed before its first checkpoint had."""
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


def check_data(config: Config, parts: RunParts, state: SavedState | None, console: Console) -> None:
    """Refuse other rows under the same path: they would make it another run."""
    if state is None or state.data == parts.data_digest:
        return
    read = f", which were {' and '.join(state.data_versions)}" if state.data_versions else ""
    refusal = (
        f"data.train: its rows are not those that the run in {config.run.dir} was started with{read}. Bring them back, use another "
        "run.dir for a new run, or set run.resume = force to resume with the new ones"
    )
    require_force(config, console, refusal, "the rows of data.train changed")


def write_set_up(
    config: Config, parts: RunParts, folder: RunFolder, state: SavedState | None, origin: Path | None, console: Console
) -> None:
    """Write the configuration and the plan, and cut metrics and rollouts back to the checkpoint; without one, what a run has written whose
    checkpoints were deleted is moved aside."""
    path = folder.path
    if state is None and (aside := folder.move_aside()):
        console.warn(f"the checkpoints of the earlier run in {path} are gone: its metrics and rollouts were moved to {aside}")
    if origin is None or origin.resolve() != (path / SNAPSHOT).resolve():
        write_whole(path / SNAPSHOT, to_toml(config))
    plan = {"config": configuration.snapshot(config), "budgets": asdict(parts.plan.budgets), "words": parts.plan.words}
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
    """Continue where another process ended, which may not have deleted the checkpoints beyond `run.keep`."""
    folder.note_checkpoint()
    store.tidy(state.best if state.best and state.best.metric == config.run.keep_best else None)
    parts.crew.restore_memory(state.memory)


def progress_of(parts: RunParts, found: Checkpoint, state: SavedState, changed: list[str], console: Console) -> Progress:
    """The progress that a checkpoint has saved, without what depends on a key that has changed."""
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
    """The groups that were sampled before the checkpoint and not yet trained on."""
    if not state.surplus:
        return ()
    if not isinstance(parts.train_data, PromptSet) or parts.algorithm.dynamic is None:
        console.warn(f"{len(state.surplus)} groups carried over from before the checkpoint are left out: the algorithm carries none")
        return ()
    try:
        prompts = {prompt.uid: prompt for prompt in parts.train_data.items}
        kept, lost = surplus.unpack(found.arrays(SURPLUS_TENSORS), state.surplus, prompts)
    except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
        raise edited(found, f"surplus: {type(error).__name__}: {error}") from None
    if lost:
        console.warn(f"{lost} groups carried over from before the checkpoint are left out: their prompts are no longer in the data")
    return tuple(kept)


def evaluate(config: Config, console: Console, *, latest: bool = False, best: bool = False, step: int | None = None) -> dict[str, Any]:
    """Validation rewards (for SFT: the loss) of `model.path`, or of the newest, the best or one step's checkpoint of `run.dir`."""
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
    """The checkpoint that `find` gives, and its parts."""

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
        refuse_other_adapters(config, read_state(found))
        return found, assemble_evaluation(config, found)

    return open_checkpoint(find_one, read, console.warn)


def refuse_other_adapters(config: Config, state: SavedState) -> None:
    """Trained adapters on another base, or scaled otherwise, would be evaluated as a model that was never trained."""
    changed = configuration.differences(state.config, configuration.snapshot(config))
    wrong = [key for key in changed if key == "model.path" or (key.startswith("lora.") and key != "lora.critic")]
    if config.lora.rank and wrong:
        raise UserError(f"{config.run.dir} holds a run with other values of {', '.join(wrong)}. Give those to evaluate its adapters")
