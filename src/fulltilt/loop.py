"""The run: steps, validation, checkpoints, resume.

Enters: a configuration. Leaves: a run folder with checkpoints, metrics and rollouts, and a summary. Guaranteed: after a kill at any moment
the run resumes from its newest intact checkpoint and ends with the very files an uninterrupted run would have written, timings aside;
Ctrl-C leaves a checkpoint of the last whole step. A step is `rl_step` or `sft_step`: one line a phase.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
import torch

from fulltilt import config as configuration
from fulltilt.batching.pack import MicroSizing, forward_micro_batches, minibatch, scatter
from fulltilt.batching.schedule import split_minibatches
from fulltilt.cluster.local import Parts, assemble
from fulltilt.config import Config
from fulltilt.data.order import Cursor, InEpochs
from fulltilt.data.prompts import PromptSet
from fulltilt.data.sft import RowSet
from fulltilt.model.load import export
from fulltilt.observe import metrics as measure
from fulltilt.observe.console import Console
from fulltilt.observe.metrics import MetricsFile, RolloutFiles
from fulltilt.records import Group, MiniBatch, Prompt, Row, Score, UserError
from fulltilt.reward.base import RewardPool
from fulltilt.rollout.collect import collect
from fulltilt.rollout.sampler import Sampling, sample_seed
from fulltilt.train.checkpoint import Checkpoint, CheckpointStore

Metrics = dict[str, float]

# What a need of the algorithm means: the phase it is, and the role whose log-probs are asked for.
ANNOTATIONS = {"old_logprobs": ("old-logprob", "actor"), "ref_logprobs": ("ref-logprob", "ref")}

PLAN = "plan.json"
EVALUATION_STREAM = 1 << 62  # validation draws its noise apart from training, so that validating more often changes nothing else


START = Cursor()


class Interrupted(Exception):
    """Ctrl-C (or a polite termination) at a moment when the step in progress can be dropped."""


class Interrupts:
    """Turns the first Ctrl-C into `Interrupted` at the next moment where it does no harm; the second ends the process as ever.

    From the first optimizer step of a step to the step's last line of bookkeeping, parameters belong to no step that could be saved:
    there the wish is held back.
    """

    def __init__(self) -> None:
        self._wanted = False
        self.held = False

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def hold(self) -> None:
        self.held = True

    def release(self) -> None:
        self.held = False
        if self._wanted:
            raise Interrupted

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._wanted:
            raise KeyboardInterrupt
        self._wanted = True
        if self.held:
            # Written past every buffer: the signal may have come in the middle of another message.
            os.write(2, b"stopping at the end of this step; Ctrl-C again stops at once, without saving\n")
        else:
            raise Interrupted


@dataclass(frozen=True)
class Progress:
    """How far the run has come. With the parameters and the optimizer, this is all there is to save."""

    step: int = 0
    cursor: Cursor = START


@dataclass(frozen=True)
class Summary:
    """What a run achieved."""

    dir: str
    steps: int
    seconds: float  # of this process, set-up left out
    tokens: int
    reward_first: float | None
    reward_last: float | None
    interrupted: bool = False

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class Run:
    def __init__(self, config: Config, parts: Parts, store: CheckpointStore, progress: Progress, console: Console) -> None:
        self.config = config
        self.parts = parts
        self.store = store
        self.progress = progress
        self.console = console
        self.interrupts = Interrupts()
        folder = Path(config.run.dir)
        self.metrics = MetricsFile(folder / "metrics.jsonl")
        self.rollouts = RolloutFiles(folder / "rollouts", config.run.save_rollouts)
        self._step: Callable[[int], Metrics] = self.rl_step if parts.engine else self.sft_step
        self._saved_step = progress.step  # what the run resumed from is there already
        self._carried: Metrics = {}  # seconds of work between steps: in the next step's line
        self._tokens = 0

    # -- the steps ------------------------------------------------------------------------------------------------------------------

    def rl_step(self, step: int) -> Metrics:
        config, parts, phase = self.config, self.parts, self.console.phase
        assert parts.engine and parts.reward
        before = parts.reward.stats()
        prompts, cursor = self._take(cast("InEpochs[Prompt]", parts.train_data))
        with phase("rollout"):
            seed = int(sample_seed(config.run.seed, 0, step))
            groups = collect(parts.engine, prompts, training_sampling(config), seed, hand_to(parts.reward, self.console, len(prompts)))
            parts.engine.release()
        with phase("reward"):
            scores = parts.reward.collect(groups)
        rows = make_rows(groups, scores, exclude_errors=config.reward.on_error == "exclude")
        for need in sorted(parts.algorithm.needs & ANNOTATIONS.keys()):
            rows = self._annotate(rows, need)
        with phase("advantage"):
            rows = parts.algorithm.advantage(rows)
        with phase("update-actor"):
            updated = self._update(rows)
        with phase("sync"):
            parts.engine.sync(step)

        self.rollouts.write(step, groups, scores)
        self.interrupts.hold()  # a step that made no update holds only here
        self.progress = Progress(step, cursor)
        flat = [score for of_group in scores for score in of_group]
        reward_stats = parts.reward.stats().since(before)
        if reward_stats.failed:
            self.console.warn(f"step {step}: {reward_stats}")
        response, total = measure.count_tokens(groups)
        return {
            **measure.summarise_scores(flat, timeouts=reward_stats.timeouts, excluded=len(flat) - len(rows)),
            **measure.summarise_rows(rows),
            **updated,
            **measure.summarise_lengths(groups, config.data.max_prompt_tokens),
            **(parts.engine.stats().metrics() if config.rollout.log_stats else {}),
            **self._times(response, total),
        }

    def sft_step(self, step: int) -> Metrics:
        taken, cursor = self._take(cast("InEpochs[Row]", self.parts.train_data))
        rows = [replace(row, group=place) for place, row in enumerate(taken)]
        with self.console.phase("update-actor"):
            updated = self._update(rows)
        self.interrupts.hold()
        self.progress = Progress(step, cursor)
        trained, total = sum(int(row.mask.sum()) for row in rows), sum(row.tokens for row in rows)
        return {**updated, **self._times(trained, total)}

    # -- their parts ----------------------------------------------------------------------------------------------------------------

    def _take(self, data: InEpochs[Any]) -> tuple[tuple[Any, ...], Cursor]:
        return data.take(self.progress.cursor, self.config.algorithm.prompts_per_step, self.config.run.seed, self.config.data.shuffle)

    def _annotate(self, rows: list[Row], need: str) -> list[Row]:
        phase, name = ANNOTATIONS[need]
        role = {"actor": self.parts.actor, "ref": self.parts.ref}[name]
        assert role is not None
        budgets, config = self.parts.plan.budgets, getattr(self.config, name)
        budget = budgets.forward_token_budget if name == "actor" else budgets.ref_token_budget
        with self.console.phase(phase):
            micro_batches = forward_micro_batches(rows, MicroSizing(config.dynamic_batch, budget, config.micro_batch))
            found = []
            for number, micro in enumerate(micro_batches, 1):
                found.append(role.logprobs(micro))
                self.console.phase_progress(number, len(micro_batches))
            return scatter(rows, micro_batches, found, need)

    def _update(self, rows: Sequence[Row]) -> Metrics:
        """Every optimizer step of this step. After the first one, Ctrl-C waits for the step's end."""
        trainer, algorithm = self.parts.trainer, self.config.algorithm
        assert trainer
        trainer.optimizer.zero_grad()
        found: list[Metrics] = []
        for epoch in range(algorithm.epochs):
            batches = self._minibatches(rows)
            for number, batch in enumerate(batches, 1):
                metrics = trainer.accumulate(batch)
                self.interrupts.hold()
                found.append(metrics | trainer.apply())
                self.console.phase_progress(epoch * len(batches) + number, algorithm.epochs * len(batches))
        if not found:
            self.console.warn("no sample of this step can be trained on: its update is left out")
        skipped = sum(metrics.pop("actor/skipped_updates") for metrics in found)
        if skipped:
            self.console.warn(
                f"{skipped:.0f} of {len(found)} optimizer steps had a gradient that is not finite: parameters were left as they were"
            )
        return mean_of(found) | {"actor/skipped_updates": skipped, "actor/updates": len(found)}

    def _minibatches(self, rows: Sequence[Row]) -> list[MiniBatch]:
        algorithm, actor = self.parts.algorithm, self.config.actor
        sizing = MicroSizing(actor.dynamic_batch, self.parts.plan.budgets.token_budget, actor.micro_batch)
        if not any(row.mask.any() for row in rows):
            return []
        split = split_minibatches([row.group for row in rows], self.config.algorithm.minibatches_per_step)
        return [minibatch([rows[index] for index in part], algorithm.aggregation, algorithm.length_norm, sizing) for part in split]

    def _times(self, response_tokens: int, total_tokens: int) -> Metrics:
        self._tokens += total_tokens
        phases = self.console.phases
        times = measure.summarise_time(phases.seconds, phases.total, response_tokens=response_tokens, total_tokens=total_tokens)
        if torch.cuda.is_available() and self.parts.actor.model.device.type == "cuda":
            times["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
        carried, self._carried = self._carried, {}
        return {**times, **carried}

    # -- the run --------------------------------------------------------------------------------------------------------------------

    def train(self) -> Summary:
        steps = self.parts.plan.steps
        begin = time.perf_counter()
        interrupted = False
        try:
            with self.interrupts.watch(), self.console.run(total=steps, done=self.progress.step):
                if self.progress.step == 0 and self.config.run.eval_before:
                    self._validate_before()
                for step in range(self.progress.step + 1, steps + 1):
                    self._whole_step(step)
        except Interrupted:
            interrupted = True
            self.save()
        except UserError:
            # A reward that is no number, say: until the first optimizer step of a step, the last whole one is still here to save.
            if not self.interrupts.held:
                self.save()
            raise
        self.metrics.close()
        rewards = measure.read_values(self.metrics.path, "critic/score/mean")
        return Summary(
            dir=self.config.run.dir,
            steps=self.progress.step,
            seconds=time.perf_counter() - begin,
            tokens=self._tokens,
            reward_first=rewards[0] if rewards else None,
            reward_last=rewards[-1] if rewards else None,
            interrupted=interrupted,
        )

    def _whole_step(self, step: int) -> None:
        run = self.config.run
        self.console.begin_step(step)
        metrics = self._step(step)
        try:
            if run.eval_every and step % run.eval_every == 0:
                metrics |= self._validate(step)
        except UserError:
            # A reward that is no number, say. The step itself is whole: keep it.
            self.metrics.append(step, metrics)
            self.save()
            raise
        self.metrics.append(step, metrics)
        self.console.end_step(metrics)
        if step == self.parts.plan.steps or (run.save_every and step % run.save_every == 0):
            self.save()
        self.interrupts.release()

    def _validate_before(self) -> None:
        self.console.begin_step(0)
        metrics = self._validate(0)
        self.metrics.append(0, metrics)
        self.console.end_step(metrics)

    def _validate(self, step: int) -> Metrics:
        with self.console.phase("eval"):
            metrics = validate(self.config, self.parts, self.console)
        self.console.note(f"validation after step {step}: " + ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        return metrics | {"timing_s/testing": self.console.phases.seconds["eval"]}

    def save(self) -> None:
        """A checkpoint of the last whole step, unless it is there already."""
        if self._saved_step == self.progress.step:
            return
        trainer, model = self.parts.trainer, self.parts.actor.model
        assert trainer
        begin = time.perf_counter()
        self.metrics.sync()
        state = {
            "step": self.progress.step,
            "updates": trainer.optimizer.updates,
            "skipped": trainer.optimizer.skipped,
            "cursor": asdict(self.progress.cursor),
            "seed": self.config.run.seed,
            "surplus": [],  # groups sampled and not yet trained on; algorithms that carry some over put them here
            "budgets": asdict(self.parts.plan.budgets),
            "data": self.parts.data_digest,
            "metrics_offset": self.metrics.offset(),
            "config": configuration.snapshot(self.config),
        }
        self.store.save(
            self.progress.step, trainer.optimizer.tensors(), state,
            export=lambda folder: export(model, self.parts.tokenizer, folder), export_bytes=model_bytes(self.parts),
        )  # fmt: skip
        self._saved_step = self.progress.step
        self._carried["timing_s/save_checkpoint"] = time.perf_counter() - begin


def training_sampling(config: Config) -> Sampling:
    rollout = config.rollout
    return Sampling(
        samples=config.algorithm.samples_per_prompt,
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=tuple(rollout.stop),
    )


def make_rows(groups: Sequence[Group], scores: Sequence[Sequence[Score]], *, exclude_errors: bool) -> list[Row]:
    """Samples as the trainer sees them, in prompt order; those whose reward failed are left out if the policy says so."""
    rows = []
    for number, (group, of_group) in enumerate(zip(groups, scores, strict=True)):
        prompt = group.prompt.ids
        nothing = np.zeros(len(prompt), dtype=np.float32)
        for sample, score in zip(group.samples, of_group, strict=True):
            if score.error is not None and exclude_errors:
                continue
            rows.append(
                Row(
                    ids=np.concatenate([prompt, sample.ids]),
                    mask=np.arange(len(prompt) + len(sample.ids)) >= len(prompt),
                    group=number,
                    reward=score.value,
                    rollout_logprobs=np.concatenate([nothing, sample.logprobs]),
                )
            )
    return rows


def hand_to(reward: RewardPool, console: Console, total: int) -> Callable[[Group], None]:
    """For `collect`: every group goes to the rewards the moment it is complete, and shows as progress."""
    done = 0

    def hand_over(group: Group) -> None:
        nonlocal done
        reward.submit(group)
        done += 1
        console.phase_progress(done, total)

    return hand_over


def mean_of(found: Sequence[Metrics]) -> Metrics:
    return {name: float(np.mean([metrics[name] for metrics in found])) for name in (found[0] if found else {})}


def validate(config: Config, parts: Parts, console: Console) -> Metrics:
    """Rewards of the validation prompts under verl's names, or the loss of the validation rows."""
    if isinstance(parts.val_data, RowSet):
        return validate_loss(config, parts.val_data, parts)
    assert isinstance(parts.val_data, PromptSet) and parts.engine and parts.reward
    prompts = parts.val_data.prompts[: config.eval.max_prompts]
    sampling = replace(
        training_sampling(config), samples=config.eval.samples_per_prompt,
        temperature=config.eval.temperature, top_p=config.eval.top_p, top_k=config.eval.top_k,
    )  # fmt: skip
    groups = collect(parts.engine, prompts, sampling, EVALUATION_STREAM ^ config.run.seed, hand_to(parts.reward, console, len(prompts)))
    parts.engine.release()
    scores = parts.reward.collect(groups)
    return validation_metrics(groups, scores, config.eval.samples_per_prompt)


def validation_metrics(groups: Sequence[Group], scores: Sequence[Sequence[Score]], samples: int) -> Metrics:
    """A failed reward has no part in a mean; how many there were is said."""
    of_source: dict[str, list[float]] = {}
    errors = 0
    for group, of_group in zip(groups, scores, strict=True):
        values = of_source.setdefault(group.prompt.data_source, [])
        values.extend(score.value for score in of_group if score.error is None)
        errors += sum(score.error is not None for score in of_group)
    found = {f"val-core/{source}/reward/mean@{samples}": float(np.mean(values)) for source, values in of_source.items() if values}
    everything = [value for values in of_source.values() for value in values]
    lengths = [len(sample.ids) for group in groups for sample in group.samples]
    return {
        **({"val/reward/mean": float(np.mean(everything))} if everything else {}),
        **found,
        "val/prompts": len(groups),
        "val/response_length/mean": float(np.mean(lengths)),
        "val/reward_errors": errors,
    }


def validate_loss(config: Config, data: RowSet, parts: Parts) -> Metrics:
    total, tokens = 0.0, 0
    sizing = MicroSizing(config.actor.dynamic_batch, parts.plan.budgets.forward_token_budget, config.actor.micro_batch)
    for micro in forward_micro_batches(data.rows, sizing):
        logprobs = parts.actor.logprobs(micro)
        total -= float(logprobs.sum(dtype=np.float64))
        tokens += len(logprobs)
    return {"val/loss": total / max(1, tokens)}


def model_bytes(parts: Parts) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parts.actor.model.parameters())


# -- opening a run ----------------------------------------------------------------------------------------------------------------------


def train(config: Config, console: Console) -> Summary:
    """Run `config` to its end, from the newest intact checkpoint of its folder if there is one."""
    folder = Path(config.run.dir)
    store = CheckpointStore(folder / "checkpoints", config.run.keep)
    with contextlib.ExitStack() as stack:
        # A folder that holds a run is locked before it is read; into a new one nothing is written before all is known to be well.
        known = store.folder.is_dir()
        if known:
            stack.enter_context(one_process(folder))
        found, changed = find_checkpoint(config, store, console)
        for text in configuration.warnings(config):
            console.warn(text)
        parts = assemble(config, found, kept=kept_budgets(config, folder, found, changed))
        stack.callback(parts.close)
        check_data(config, parts, found, console)
        for text in (*parts.notes, *parts.plan.words):
            console.note(text)
        store.require_space(checkpoint_bytes(parts))
        if not known:
            stack.enter_context(one_process(folder))
        return Run(config, parts, store, open_folder(config, parts, folder, found, console), console).train()


def checkpoint_bytes(parts: Parts) -> int:
    assert parts.trainer
    return model_bytes(parts) + sum(tensor.numel() * tensor.element_size() for tensor in parts.trainer.optimizer.tensors().values())


def find_checkpoint(config: Config, store: CheckpointStore, console: Console) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to go on from, and the keys that changed since."""
    found = store.latest()
    for text in store.skipped:
        console.warn(f"not intact and passed over: {text}")
    if found is None:
        if store.skipped:
            raise UserError(
                f"{store.folder} holds checkpoints but none that can be used: {'; '.join(store.skipped)}. Restore one, use another "
                f"run.dir, or delete {store.folder} to start over"
            )
        return None, []
    where = f"{config.run.dir} holds a run at step {found.step}"
    if config.run.resume == "never":
        raise UserError(f"run.resume = never: {where}. Use another run.dir, or run.resume = auto to go on")
    saved, now = found.state()["config"], configuration.snapshot(config)
    changed = configuration.differences(saved, now)
    if changed and config.run.resume == "auto":
        raise UserError(
            f"{where} that was started with other values of {', '.join(changed)}. Use another run.dir for a new run, give the old values "
            "to go on, or set run.resume = force to go on with the new ones"
        )
    if changed:
        console.warn(f"going on although these keys changed: {', '.join(changed)}")
    if config.train.schedule != "constant" and any(saved[key] != now[key] for key in ("run.steps", "run.epochs")):
        console.warn(f"the {config.train.schedule} schedule now ends at another step: learning rates differ from those first planned")
    console.note(f"going on from step {found.step} ({found.path})")
    return found, changed


def kept_budgets(config: Config, folder: Path, found: Checkpoint | None, changed: list[str]) -> dict[str, Any] | None:
    """The sizes to compute in again, for the same bits: the checkpoint's, or those a run killed before its first checkpoint had."""
    if found:
        return None if changed else found.state()["budgets"]
    try:
        plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return None if configuration.differences(plan["config"], configuration.snapshot(config)) else plan["budgets"]


def check_data(config: Config, parts: Parts, found: Checkpoint | None, console: Console) -> None:
    """Other rows under the same path would make another run of it."""
    if found is None or found.state()["data"] == parts.data_digest:
        return
    if config.run.resume != "force":
        raise UserError(
            f"data.train: its rows are not those that the run in {config.run.dir} was started with. Bring them back, use another run.dir "
            "for a new run, or set run.resume = force to go on with the new ones"
        )
    console.warn("going on although the rows of data.train changed")


def open_folder(config: Config, parts: Parts, folder: Path, found: Checkpoint | None, console: Console) -> Progress:
    """Bring metrics and rollouts back to what the checkpoint knows, and leave the configuration and the plan beside them."""
    state = found.state() if found else None
    try:
        (folder / "run.toml").write_text(configuration.to_toml(config), encoding="utf-8")
        plan = {"config": configuration.snapshot(config), "budgets": asdict(parts.plan.budgets), "words": parts.plan.words}
        partial = folder / f"{PLAN}.partial"
        partial.write_text(json.dumps(plan, indent=1), encoding="utf-8")
        partial.replace(folder / PLAN)
    except OSError as error:
        raise UserError(f"run.dir: {folder} cannot be written: {error.strerror}. Choose another folder") from error
    metrics = MetricsFile(folder / "metrics.jsonl")
    warning = metrics.truncate(state["metrics_offset"] if state else 0)
    metrics.close()
    if warning:
        console.warn(warning)
    RolloutFiles(folder / "rollouts", config.run.save_rollouts).truncate(state["step"] if state else 0)
    return Progress(state["step"], Cursor(**state["cursor"])) if state else Progress()


@contextlib.contextmanager
def one_process(folder: Path) -> Iterator[None]:
    """Two processes in one run folder would destroy each other's work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"run.dir: {folder} cannot be written: {error.strerror}. Choose another folder") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"run.dir: another process is running in {folder}. Wait for it, or use another folder") from None
        yield


def evaluate(config: Config, console: Console, *, latest: bool) -> dict[str, Any]:
    """Validation rewards (for SFT: the loss) of `model.path`, or of the newest checkpoint of `run.dir`."""
    if config.data.val is None:
        raise UserError("data.val: nothing to evaluate on. Set data.val")
    found = None
    if latest:
        store = CheckpointStore(Path(config.run.dir) / "checkpoints", config.run.keep)
        found = store.latest()
        if found is None:
            raise UserError(f"{config.run.dir} holds no intact checkpoint. Leave --latest out to evaluate model.path")
    parts = assemble(config, found, training=False)
    try:
        for text in parts.notes:
            console.note(text)
        console.begin_step(found.step if found else 0)
        with console.run(total=1), console.phase("eval"):
            metrics = validate(config, parts, console)
        return {"model": str(found.model_folder if found else config.model.path), "step": found.step if found else 0, **metrics}
    finally:
        parts.close()
