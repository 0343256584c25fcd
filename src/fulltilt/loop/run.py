"""The steps of a run, one after another.

Enters: a configuration, its parts, the progress so far. Leaves: checkpoints, metrics and rollouts in the run's folder, and a summary.
Guaranteed: after a kill at any moment the run resumes from its newest intact checkpoint and ends with the very files an uninterrupted run
would have written, timings aside; Ctrl-C leaves a checkpoint of the last whole step. A step is `rl_step` or `sft_step`: one line a phase.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np

from fulltilt import config as configuration
from fulltilt.cluster.assembly import RunParts
from fulltilt.cluster.crew import AnnotatedRows, Outcome, Report, StartedWork
from fulltilt.cluster.hosts import WorkerDied, WorkerStuck
from fulltilt.cluster.shelf import shaped_reward
from fulltilt.cluster.worker import SURPLUS_TENSORS
from fulltilt.data.order import Cursor
from fulltilt.interrupts import Interrupted, Interrupts
from fulltilt.loop.experience import sample_groups, training_sampling, validate
from fulltilt.loop.folder import METRICS, ROLLOUTS, VALIDATION, RunFolder
from fulltilt.loop.saved import FileDigests
from fulltilt.observe import metrics as measure
from fulltilt.observe.console import Console
from fulltilt.observe.health import EVERY_REWARD_FAILED, MEMORY, Health, Unhealthy, last_good
from fulltilt.observe.loggers import Loggers
from fulltilt.observe.metrics import MetricsFile, RolloutFiles
from fulltilt.observe.validation import sample_rows
from fulltilt.records import AnyGroup, AnyRow, Prompt, Score, UserError
from fulltilt.rollout.collect import ScoredGroup, StepGroups, fill
from fulltilt.rollout.sampler import Sampling, sample_seed
from fulltilt.rollout.stats import NO_STATS, EngineStats
from fulltilt.schema import VALIDATION_METRICS, Config
from fulltilt.training.checkpoint import MODEL, BestCheckpoint, CheckpointStore, Digests
from fulltilt.tune import control
from fulltilt.tune.predict import Predictor
from fulltilt.words import first_line

Metrics = dict[str, float]
OnStep = Callable[[int, dict[str, Any]], object]  # called with each finished step and its line of metrics.jsonl; False stops the run

# For each number that an algorithm may need: the phase that computes it, and the role.
ANNOTATIONS = {
    "old_logprobs": ("old-logprob", "actor"),
    "sharp_logprobs": ("old-logprob", "actor"),
    "ref_logprobs": ("ref-logprob", "ref"),
    "values": ("values", "critic"),
}


@dataclass(frozen=True)
class Progress:
    """The progress of the run. With the parameters and the optimizers, this is all that a checkpoint saves."""

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    surplus: tuple[ScoredGroup, ...] = ()  # groups sampled and not yet trained on
    reward_kl_coef: float | None = None  # weight of the KL penalty in the next step; None: the algorithm's first
    streaks: tuple[tuple[str, int], ...] = ()  # steps in a row for which each rule of health has held
    first_entropy: float | None = None  # the entropy that health compares with; None: the next step's entropy will be
    seconds: tuple[tuple[str, float], ...] = ()  # metrics of work done since the step, for the next step's line


@dataclass(frozen=True)
class Summary:
    """The result of a run."""

    steps: int
    seconds: float  # spent by this process since its workers were loaded
    tokens: int
    reward_first: float | None
    reward_last: float | None
    interrupted: bool = False
    model: Path | None = None  # the newest checkpoint's exported model; None: nothing was saved

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def is_false(value: Any) -> bool:
    """Return whether a value is False: Python's, numpy's or torch's."""
    return value is False or (getattr(value, "ndim", None) == 0 and str(getattr(value, "dtype", "")).endswith("bool") and not value)


class Run:
    def __init__(
        self, config: Config, parts: RunParts, store: CheckpointStore, progress: Progress, console: Console, loggers: Loggers,
        on_step: OnStep | None = None, folder: RunFolder | None = None, files: FileDigests | None = None,
        predictor: Predictor | None = None,
    ) -> None:  # fmt: skip
        """`folder`: needed by `train`, not by single steps. `files`: digests of files that the configuration names, for checkpoints.
        `predictor`: None if measurements are logged without predictions."""
        self.config = config
        self.parts = parts
        self.crew = parts.crew
        self.store = store
        self.progress = progress
        self.console = console
        self.loggers = loggers
        self.on_step = on_step
        self.interrupts = Interrupts(self.crew.hurry)
        self.crew.budgets.say = console.warn
        self.health = Health(config.health, dict(progress.streaks), progress.first_entropy)
        self.folder = folder
        if folder:
            store.on_saved = folder.note_checkpoint
        self.files = files or {}
        self.predictor = predictor
        path = Path(config.run.dir)
        self.metrics = MetricsFile(path / METRICS)
        self.rollouts = RolloutFiles(path / ROLLOUTS, config.run.save_rollouts)
        self.validations = RolloutFiles(path / VALIDATION, config.run.save_rollouts)
        self._step: Callable[[int], Metrics] = self.rl_step if parts.samples else self.sft_step
        self._exclude_errors = config.reward.on_error == "exclude"
        self._saved_ill = {progress.step} if progress.streaks else set[int]()  # checkpoints of steps in which a rule of health held
        self._best_seen = store.best is not None  # whether the metric of run.keep_best has had a value
        self._carried: Metrics = dict(progress.seconds)  # seconds of work between steps, for the next step's line
        self._tokens = 0
        self._engine_stats = NO_STATS  # statistics of the step in progress
        self._pads: Counter[str] = Counter()  # pad tokens of the step's passes without gradient, by role
        self._worker_seconds: dict[str, list[list[float]]] = {}  # by phase, for each call of the step the seconds of each worker

    # -- the steps ------------------------------------------------------------------------------------------------------------------

    def rl_step(self, step: int) -> Metrics:
        config, parts, phase, samples = self.config, self.parts, self._phase, self.parts.samples
        assert samples
        before, self._engine_stats, self._pads, self._worker_seconds = samples.stats(), NO_STATS, Counter(), {}
        filled, cursor = self._sample(step)
        baselines = self._baselines(filled.kept) if "baseline" in parts.algorithm.needs else None
        rows = self._annotate_all(samples.rows(filled.kept, step, exclude_errors=self._exclude_errors, baselines=baselines))
        with phase("advantage"):
            rows, sums, coef, penalty = self._estimate(rows)
        updated = self._update_all(rows, step - 1)
        with phase("sync"):
            synced = self.crew.sync(step)

        shown = filled.kept or filled.sampled
        samples.write(self.rollouts, step, list[Any](entry.group for entry in shown), [entry.scores for entry in shown])
        self.interrupts.hold()  # after a step without updates, Ctrl-C is held only from here
        self.progress = replace(self.progress, step=step, cursor=cursor, surplus=filled.surplus, reward_kl_coef=coef)
        samples.release(filled.surplus)
        reward_stats = samples.stats().since(before)
        if reward_stats.failed:
            self.console.warn(f"step {step}: {reward_stats}")
        for note in samples.take_notes():
            self.console.warn(note)
        groups, scores = [entry.group for entry in filled.sampled], [entry.scores for entry in filled.sampled]
        response, total = measure.count_tokens(groups)
        excluded = sum(len(entry.group.samples) for entry in filled.kept) - len(rows)
        return {
            **measure.summarise_scores(scores, timeouts=reward_stats.timeouts, excluded=excluded),
            **reward_stats.metrics(),
            **sums.metrics(),
            **penalty,
            **updated,
            **{f"{role}/forward_pad_tokens": count for role, count in self._pads.items()},
            **measure.summarise_lengths(groups, config.data.max_prompt_tokens),
            **self._rounds(filled, rows),
            **self._engine_stats.metrics(full=config.rollout.log_stats),
            **measure.summarise_workers(self._worker_seconds),
            **synced,
            **self._times(response, total),
        }

    def sft_step(self, step: int) -> Metrics:
        taken, cursor = self._take(self.progress.cursor, self.config.algorithm.prompts_per_step)
        rows = [replace(row, group=place) for place, row in enumerate(taken)]
        with self._phase("update-actor"):
            updated = self._start_update("actor", rows, step - 1).finish(rows, self._hold)
        self._warn_of_update("actor", updated)
        self.interrupts.hold()
        self.progress = replace(self.progress, step=step, cursor=cursor)
        trained, total = sum(row.trained for row in rows), sum(row.tokens for row in rows)
        return {**updated, **self._times(trained, total)}

    # -- their parts ----------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Show a phase, and measure its time and memory."""
        with self.console.phase(name), self.crew.phase(name):
            yield

    def _annotate_all(self, rows: list[Any]) -> list[Any]:
        """Add all numbers that the algorithm needs to the rows. Roles with workers of their own compute at the same time as the others."""
        wanted = {need: ANNOTATIONS[need] for need in sorted(self.parts.algorithm.needs & ANNOTATIONS.keys())}
        with contextlib.ExitStack() as stack:
            beside = {
                need: stack.enter_context(self._beside(name, partial(self.crew.start_annotation, role, need, rows)))
                for need, (name, role) in wanted.items()
                if self.crew.own_workers(role)
            }
            for need, (name, role) in wanted.items():
                if need not in beside:
                    with self._phase(name):
                        rows = self._annotate(name, role, need, rows)
            for need, started in beside.items():
                name, role = wanted[need]
                rows = self._note_passes(name, role, self._finish(name, started, rows, self.console.phase_progress))
        return rows

    def _update_all(self, rows: Sequence[AnyRow], steps_before: int) -> Metrics:
        """Make every optimizer step of this step. A critic with workers of its own is updated at the same time as the actor."""
        algorithm, updated = self.parts.algorithm, dict[str, Metrics]()
        roles = {"critic": steps_before} if algorithm.value_loss else {}
        roles |= {"actor": steps_before - algorithm.critic_warmup} if steps_before >= algorithm.critic_warmup else {}
        with contextlib.ExitStack() as stack:
            beside = {
                role: stack.enter_context(self._beside(f"update-{role}", partial(self._start_update, role, rows, before)))
                for role, before in roles.items()
                if self.crew.own_workers(role)
            }
            for role, before in roles.items():
                if role not in beside:
                    with self._phase(f"update-{role}"):
                        updated[role] = self._start_update(role, rows, before).finish(rows, self._hold)
            for role, started in beside.items():
                updated[role] = self._finish(f"update-{role}", started, rows, self._hold)
        for role in roles:
            self._warn_of_update(role, updated[role])
        return {name: number for role in roles for name, number in updated[role].items()}

    @contextlib.contextmanager
    def _beside(self, name: str, start: Callable[[], StartedWork[Outcome]]) -> Iterator[StartedWork[Outcome]]:
        """Begin a phase on a role's own workers, for `_finish` to wait for."""
        with self.crew.phase(name):
            started = start()
            try:
                yield started
            finally:
                started.call.cancel()  # if it has not ended by itself

    def _finish(self, name: str, started: StartedWork[Outcome], rows: Sequence[AnyRow], report: Report) -> Outcome:
        with self.console.phase(name):
            found = started.finish(rows, report)
        self.console.seconds[name] = started.seconds  # its whole duration, not only the time that others waited for it
        return found

    def _annotate(self, phase: str, role: str, field: str, rows: Sequence[AnyRow]) -> list[Any]:
        return self._note_passes(phase, role, self.crew.annotate(role, field, rows, self.console.phase_progress))

    def _note_passes(self, phase: str, role: str, annotated: AnnotatedRows) -> list[Any]:
        self._pads[role] += annotated.pad_tokens
        self._worker_seconds.setdefault(phase, []).append(annotated.seconds)
        return annotated.rows

    def _take(self, cursor: Cursor, count: int) -> tuple[tuple[Any, ...], Cursor]:
        return self.parts.train_data.take(cursor, count, self.config.run.seed, self.config.data.shuffle)

    def _sample(self, step: int) -> tuple[StepGroups, Cursor]:
        """Sample and score the step's groups. Dynamic sampling adds rounds until enough groups teach something; otherwise there is one
        round."""
        config, dynamic, cursor = self.config, self.parts.algorithm.dynamic, self.progress.cursor
        wanted = config.algorithm.prompts_per_step

        def ask(number: int) -> list[ScoredGroup]:
            nonlocal cursor
            prompts, cursor = self._take(cursor, dynamic.prompts_per_round if dynamic else wanted)
            seed = int(sample_seed(config.run.seed, number, step))
            scored = self._generate(prompts, training_sampling(config), seed)
            return [ScoredGroup(group, tuple(scores), step) for group, scores in scored]

        def useful(entry: ScoredGroup) -> bool:
            rewards = [score.value for score in entry.scores if score.error is None or not self._exclude_errors]
            return dynamic is None or dynamic.useful(np.array(rewards, dtype=np.float64))

        filled = fill(wanted, self.progress.surplus, ask, useful, dynamic.max_rounds if dynamic else 1)
        if dynamic and len(filled.kept) < wanted:
            self.console.warn(
                f"step {step}: {len(filled.kept)} of {wanted} groups after {filled.rounds} rounds of sampling "
                f"(algorithm.max_rounds); in {filled.dropped} all rewards were equal or failed. The step continues with the groups it has"
            )
        return filled, cursor

    def _generate(self, prompts: Sequence[Prompt], sampling: Sampling, seed: int) -> list[tuple[AnyGroup, list[Score]]]:
        """Sample one group for each prompt, and return them with the scores of their samples."""
        with self._phase("rollout"):
            groups = sample_groups(self.parts, self.console, prompts, sampling, seed)
            engines = self.crew.stats_of_engines()
            self._engine_stats += reduce(EngineStats.beside, engines)
            self._worker_seconds.setdefault("rollout", []).append([each.seconds for each in engines])
        with self._phase("reward"):
            judge = partial(self._annotate, "reward", "reward_model", "values")
            assert self.parts.samples
            scores = self.parts.samples.score(groups, judge, self.console.warn)
        self._require_folder()  # reward functions can change its modes
        return list(zip(groups, scores, strict=True))

    def _baselines(self, kept: Sequence[ScoredGroup]) -> list[Score]:
        """Return the score of each prompt's greedy sample, shaped like the rewards that are compared with it."""
        greedy = replace(training_sampling(self.config), samples=1, temperature=0.0, top_p=1.0, top_k=0)
        found = self._generate([entry.group.prompt for entry in kept], greedy, self.config.run.seed)
        shape = partial(shaped_reward, algorithm=self.parts.algorithm)
        return [replace(score, value=shape(score, group.samples[0].tokens)) for group, (score,) in found]

    def _estimate(self, rows: list[Any]) -> tuple[list[Any], measure.RowSums, float | None, Metrics]:
        """Return the rows with advantages, from rewards less the KL penalty, and the penalty's weight in the next step."""
        penalty, coef = self.parts.algorithm.reward_kl, None
        if penalty:
            kept = self.progress.reward_kl_coef if penalty.target is not None else None
            coef = penalty.coef if kept is None else kept
        assert self.parts.samples
        found = self.parts.samples.estimate(rows, coef)
        if penalty is None or coef is None or not rows:
            return found.rows, found.sums, coef, {}
        mean_kl = penalty.mean_kl(found.divergences)
        metrics = {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": coef}
        return found.rows, found.sums, penalty.next_coef(coef, mean_kl, len(rows)), metrics

    def _hold(self, done: int, total: int) -> None:
        """Show progress, and hold Ctrl-C back until the end of the step, since an optimizer step is made."""
        self.interrupts.hold()
        self.console.phase_progress(done, total)

    def _start_update(self, role: str, rows: Sequence[AnyRow], steps_before: int) -> StartedWork[Metrics]:
        """Start every optimizer step that a role makes in this step, after `steps_before` earlier steps."""
        return self.crew.start_update(role, rows, steps_before * self.parts.plan.updates_per_step, self._hold)

    def _warn_of_update(self, role: str, metrics: Metrics) -> None:
        updates, skipped = int(metrics[f"{role}/updates"]), int(metrics[f"{role}/skipped_updates"])
        if not updates:
            self.console.warn(f"no sample of this step can be trained on: the {role}'s update is left out")
        if skipped:
            self.console.warn(
                f"{skipped} of {updates} optimizer steps of the {role} had a gradient that is not finite: parameters were left as they were"
            )

    def _rounds(self, filled: StepGroups, rows: Sequence[AnyRow]) -> Metrics:
        if self.parts.algorithm.dynamic is None:
            return {}
        return {
            "train/num_gen_batches": filled.rounds,
            "rollout/groups_dropped": filled.dropped,
            "rollout/groups_kept": len(filled.kept),
            "rollout/groups_carried": len(filled.surplus),
            "rollout/lag_max": max((row.lag for row in rows), default=0),
        }

    def _times(self, response_tokens: int, total_tokens: int) -> Metrics:
        self._tokens += total_tokens
        seconds, whole = self.console.seconds, self.console.step_seconds
        times = measure.summarise_time(seconds, whole, response_tokens=response_tokens, total_tokens=total_tokens)
        carried, self._carried = self._carried, {}
        return {**times, **carried, **self.crew.metrics()}

    # -- the run --------------------------------------------------------------------------------------------------------------------

    def train(self) -> Summary:
        """Make all remaining steps. When this returns or raises, nothing writes into the run's folder any more."""
        try:
            return self._train()
        except Exception:
            self._keep_what_is_written()
            raise
        except BaseException:  # a second Ctrl-C
            if not self.crew.hosts.worker:  # other processes would first finish their writing
                self.crew.close()
            self.store.abandon()
            raise

    def _keep_what_is_written(self) -> None:
        """Wait for the checkpoint that is being written, which is good whatever else failed. The first error is the one that is raised."""
        try:
            self.store.finish()
        except Exception as error:
            self.console.warn(str(error))
        except BaseException:
            self.store.abandon()
            raise

    def _train(self) -> Summary:
        begin = time.perf_counter()
        try:
            interrupted = self._make_steps()
            self.store.finish()
            steps = self.progress.step
        except (WorkerDied, WorkerStuck) as error:
            if not self.interrupts.wanted:
                raise
            interrupted = True
            self._keep_what_is_written()
            steps = self.store.newest
            self.console.warn(f"{error}\nThe run stops without what came after its checkpoint of step {steps}")
        self.metrics.close()
        rewards = measure.read_values(self.metrics.path, "critic/score/mean")
        return Summary(
            steps=steps,
            seconds=time.perf_counter() - begin,
            tokens=self._tokens,
            reward_first=rewards[0] if rewards else None,
            reward_last=rewards[-1] if rewards else None,
            interrupted=interrupted,
            model=self.store.path(steps) / MODEL if self.store.holds(steps) else None,
        )

    def _make_steps(self) -> bool:
        """Make all remaining steps, or save when the run is interrupted. Returns whether it was interrupted."""
        steps = self.parts.plan.steps
        try:
            with self.interrupts.watch(), self.console.run(total=steps, done=self.progress.step):
                if self.progress.step == 0 and self.config.run.eval_before:
                    self.console.begin_step(0)
                    metrics = self._validate(0)
                    self._record(0, metrics)
                    self.console.end_step(metrics)
                    if failed := self.health.failed(metrics):
                        raise Unhealthy(failed)
                    self._require_metric_of_best(0, metrics, validated=True)
                self._refuse_failed_end()
                for step in range(self.progress.step + 1, steps + 1):
                    self._whole_step(step)
        except Interrupted:
            self.save()
            return True
        except UserError:
            self._require_folder()  # a missing folder is the cause of the error
            # For example, a reward is not a number. Until a step's first update, the last whole step can still be saved.
            if not self.interrupts.held:
                self._save_before_error()
            raise
        return False

    def _whole_step(self, step: int) -> None:
        run, last = self.config.run, self.parts.plan.steps
        self._make_up_for_what_failed()
        self.console.begin_step(step)
        self.crew.budgets.seen.clear()  # clears entries of a validation
        metrics = self._step(step)
        self._follow_memory(metrics)
        metrics |= self._predicted(metrics)
        validated = run.eval_every > 0 and step % run.eval_every == 0
        try:
            if validated:
                metrics |= self._validate(step)
        except UserError:
            # For example, a reward is not a number. The step itself is whole, so it is kept.
            self._record(step, metrics)
            self._save_before_error()
            raise
        self._record(step, metrics)
        self.console.end_step(metrics)
        self._look_after(step, metrics)
        self._require_metric_of_best(step, metrics, validated=validated)
        # A save that was skipped while a health rule held is made as soon as the rule no longer holds.
        due = run.save_every > 0 and step // run.save_every > self.store.newest // run.save_every
        best = self._new_best(step, metrics) if step == last or due or validated else None
        planned = (due or (best is not None and self._best_is_validated)) and self.health.may_save
        if step == last or planned:
            self.save(beside=step < last, best=best, planned=planned)
        self._call_back(step, metrics)
        if step < last:  # after the last step there is nothing to stop
            self.interrupts.release()

    def _follow_memory(self, metrics: Metrics) -> None:
        """Adapt token budgets that the user has not set to the memory that the step took."""
        budgets = self.crew.budgets
        for work, tokens in budgets.seen.items() if not metrics["perf/out_of_memory"] else ():
            name = f"{MEMORY}{measure.TIMING_NAMES[work.phase]}"
            peak, activations = (metrics.get(f"{name}/{what}", 0.0) * 2**30 for what in ("peak", "activations"))
            before, most = getattr(budgets.now, work.budget), getattr(budgets.most, work.budget)
            passes = control.MeasuredPasses(peak, activations, tokens.largest, tokens.longest)
            change = control.follow(before, most, passes, self.crew.device_bytes) if budgets.by_auto(work) else None
            if change:
                self.crew.use_budgets({work.budget: change.budget})
                self.console.note(f"{work.phase}: {work.budget} changes from {before} to {change.budget} tokens: {change.reason}")

    def _predicted(self, metrics: Metrics) -> Metrics:
        """Add predictions to the step's measurements. If a model fails on a step's numbers, the run continues without them."""
        if self.predictor is None:
            return {}
        try:
            return self.predictor.metrics(metrics)
        except Exception as error:
            self.predictor = None
            self.console.warn(f"predictions are left out from here on: {type(error).__name__}: {first_line(error)}")
            return {}

    def _call_back(self, step: int, metrics: Metrics) -> None:
        """Call the user's function with the finished step. The step is whole: if the function raises, a healthy step is saved first."""
        if self.on_step is None:
            return
        try:
            with contextlib.chdir("."):  # the run's paths are relative to the folder that it was started in
                go_on = self.on_step(step, json.loads(measure.encode_line(step, metrics)))
        except Exception:
            self._save_before_error()
            raise
        if is_false(go_on) and step < self.parts.plan.steps:
            raise Interrupted

    def _require_folder(self) -> None:
        if self.folder:
            self.folder.require_in_place()

    def _look_after(self, step: int, metrics: Metrics) -> None:
        """Warn of health problems, and stop the run if they last too long. Meanwhile nothing is saved, so that the newest checkpoint is the
        last good one; a run that never had a good step saves where it stops, to have something to resume from."""
        verdict = self.health.look(step, metrics)
        streaks = tuple(sorted(self.health.streaks.items()))
        self.progress = replace(self.progress, streaks=streaks, first_entropy=self.health.first_entropy)
        for text in verdict.warnings:
            self.console.warn(text)
        for text in verdict.notes:
            self.console.note(text)
        if verdict.stop and (verdict.failed or step < self.parts.plan.steps):
            self._keep_what_is_written()
            if self.store.newest == 0:
                self.save()
            good = self.store.newest not in self._saved_ill
            raise Unhealthy(f"{verdict.stop} {last_good(self.store.newest, self.store.folder, good=good)}")

    @property
    def _metric_of_best(self) -> str | None:
        return self.config.run.keep_best.removeprefix("-") if self.config.run.keep_best else None

    @property
    def _best_is_validated(self) -> bool:
        return self._metric_of_best is not None and self._metric_of_best.startswith(VALIDATION_METRICS)

    def _require_metric_of_best(self, step: int, metrics: Metrics, *, validated: bool) -> None:
        """Stop the run if the metric should have had its first value by now: without one, it would never have one."""
        name = self._metric_of_best
        self._best_seen |= name is None or name in metrics
        # Step 0 has only metrics of validation, and until the critic is warm there are none of the actor's update.
        expected = validated if self._best_is_validated else step > self.parts.algorithm.critic_warmup
        if expected and not self._best_seen:
            self._save_before_error()
            near = difflib.get_close_matches(name or "", metrics, n=3, cutoff=0.3)
            instead = f"Similar: {', '.join(near)}" if near else "docs/metrics.md lists all metrics"
            raise UserError(f"run.keep_best: step {step} has no metric {name}. {instead}. Correct the name and repeat the command")

    def _new_best(self, step: int, metrics: Metrics) -> BestCheckpoint | None:
        """Return this step's checkpoint if it is better than the best so far, after waiting until that one was written."""
        name = self._metric_of_best
        if name is None or not math.isfinite(value := metrics.get(name, math.nan)):
            return None
        self._finish_background_save(wait=True)
        found = BestCheckpoint(self.config.run.keep_best or "", step, float(value))
        return found if found.beats(self.store.best) else None

    def _refuse_failed_end(self) -> None:
        """Raise if the run failed in its last step and was saved only to have something to resume from: such a run has not ended well."""
        step = self.progress.step
        if step >= self.parts.plan.steps and EVERY_REWARD_FAILED in self.health.streaks and self.config.health.stop:
            raise Unhealthy(
                f"the run ended at step {step}, in which every reward failed. Ask for more steps with run.steps, or start again in another "
                f"run.dir; health.ignore turns the rule {EVERY_REWARD_FAILED} off"
            )

    def _record(self, step: int, metrics: Metrics) -> None:
        self._require_folder()
        self.metrics.append(step, metrics)
        self.loggers.log(step, metrics)

    def _validate(self, step: int) -> Metrics:
        with self.console.phase("eval"):
            found = validate(self.config, self.parts, self.console)
        self.console.note(f"validation after step {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in found.metrics.items()))
        if (samples := self.parts.samples) and found.groups:
            samples.write(self.validations, step, found.groups, found.scores)
            columns, shown = sample_rows(found.groups, found.scores, self.config.log.val_samples, samples.texts)
            if shown:
                self.loggers.table(step, "val/samples", columns, shown)
            samples.release(self.progress.surplus)
        return found.metrics | {"timing_s/testing": self.console.seconds["eval"]}

    def _finish_background_save(self, *, wait: bool) -> None:
        """Wait for the background save, or check on it. If it failed, a later checkpoint replaces it, and reports an error of its own if it
        cannot be written either."""
        try:
            self.store.finish(wait=wait)
        except UserError as error:
            self.console.warn(f"{error}. A checkpoint of the last step is tried instead")

    def _make_up_for_what_failed(self) -> None:
        """Save again before the next step if the last save failed: a full disk stops the run as soon as that is known."""
        newest = self.store.newest
        self._finish_background_save(wait=False)
        if self.store.newest != newest and self.health.may_save:
            self.save()

    def _save_before_error(self) -> None:
        """Save the last whole step, unless it would replace the last good checkpoint."""
        if self.health.may_save or self.store.newest == 0:
            self.save()

    def save(self, *, beside: bool = False, best: BestCheckpoint | None = None, planned: bool = False) -> None:
        """Save the last whole step, unless its checkpoint exists. `beside`: whether to write it while the next steps are made. `best`:
        given if it is the best so far. `planned`: whether an uninterrupted run saves it too, so that the next step's line reports it."""
        self._finish_background_save(wait=True)
        self._require_folder()
        if self.store.newest == self.progress.step and (self.progress.step == 0 or self.store.holds(self.progress.step)):
            return
        begin, best = time.perf_counter(), best or self.store.best
        self.metrics.sync()
        self.loggers.flush()
        arrays, carried = self.parts.samples.pack(self.progress.surplus) if self.parts.samples else ({}, [])
        state = {
            "step": self.progress.step,
            **self.crew.state(),
            "cursor": asdict(self.progress.cursor),
            "seed": self.config.run.seed,
            "surplus": carried,
            "reward_kl_coef": self.progress.reward_kl_coef,
            "health": dict(self.progress.streaks),
            "first_entropy": self.progress.first_entropy,
            "best": asdict(best) if best else None,
            "budgets": asdict(self.parts.plan.budgets),
            "changed_budgets": self.crew.budgets.changed,
            "lowered_budgets": self.crew.budgets.lowered,
            "data": self.parts.data_digest,
            "val_data": self.parts.val_digest,
            "data_versions": list(self.parts.train_data.versions),
            "files": dict(self.files),
            "commits": dict(self.parts.commits),
            "metrics_offset": self.metrics.offset(),
            "config": configuration.snapshot(self.config),
        }
        named = {f"{SURPLUS_TENSORS}{name}": array for name, array in arrays.items()}

        def write(folder: Path, beside: bool) -> Callable[[], Digests]:
            with self.crew.phase("save"):
                self.crew.save(named, folder, beside)
            measured = self.crew.pending_memory()
            state["memory"] = [{phase: asdict(own[phase]) for phase in own if planned or phase != "save"} for own in measured]
            state["seconds"] = {"timing_s/save_checkpoint": time.perf_counter() - begin} if planned else {}
            return self.crew.finish_save

        size = self.crew.checkpoint_bytes + sum(array.nbytes for array in arrays.values())
        self.store.save(self.progress.step, state, write, size, beside=beside, best=best)
        if self.progress.streaks:
            self._saved_ill.add(self.progress.step)
        self._carried["timing_s/save_checkpoint"] = time.perf_counter() - begin
