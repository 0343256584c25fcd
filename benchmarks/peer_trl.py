"""TRL's GRPOTrainer as a peer, in processes of its own, so that its memory is free afterwards.

Enters: a job. Leaves: `StepTiming` at every setting that was tried (`measure_steps`), or a line for every step of one long run
(`measure_learning`). Guaranteed: each step is one rollout and one optimizer step, with the run's prompts in its order, its reward, sampling
and learning rate; tokens of prompts, and of responses of a forced length, were checked in every step; saving models is not in the seconds;
a setting that fails is recorded with its error, and what was measured before a failure is kept.

What `fulltilt bench` calls runs in its process; `run`, at the end, runs in TRL's.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field, PositiveInt, TypeAdapter, ValidationError
from transformers import TrainerCallback

from fulltilt.bench import device, peers
from fulltilt.bench.figures import StepTiming, fastest
from fulltilt.bench.peers import installed
from fulltilt.records import Prompt, UserError
from fulltilt.reward.functions import load, locate

if TYPE_CHECKING:
    from fulltilt.bench.job import BenchJob
    from fulltilt.schema import Config

# What only fulltilt's process needs is imported inside functions: the start of TRL's process is part of what is measured.

BY_DEVICE = {"cuda": "vllm", "cpu": "transformers"}  # what TRL generates with
WARM_UP = 1  # steps that are reported apart: captures, compilation, first allocations
LEARNING_LIMIT_S = 6 * 3600.0  # for a run that learns, with its start
ONE_DEVICE = {"CUDA_VISIBLE_DEVICES": "0"}  # a second GPU would make TRL refuse to run in one process
SAMPLER = {  # TRL's metrics where it compares sampler and trainer
    "logprob_gaps": "sampling/sampling_logp_difference/mean",
    "importance_weights": "sampling/importance_sampling_ratio/mean",
}

Setting = Mapping[str, Any]
Axes = Mapping[str, tuple[Any, ...]]
Say = Callable[[str], None]


# -- settings -----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """An argument of TRL that changes how a step is executed. The search begins with its first value, which is TRL's own."""

    values: tuple[Any, ...]
    kind: Any = bool
    legal: str = "true or false"
    of_model: bool = False  # an argument of the model's loading
    of_vllm: bool = False


BATCH = "per_device_train_batch_size"
# In the order in which they are tried. Before larger batches comes what decides which of them fit: with recomputation the largest may win
# that then does not fit without, and Liger's loss holds no logits.
AXES: Mapping[str, Axis] = {
    "gradient_checkpointing": Axis((True, False)),
    # True: a pass over all samples before the update, for the weight between vLLM and trainer. Ours has that weight without the pass.
    "vllm_importance_sampling_correction": Axis((True, False), of_vllm=True),
    "use_liger_kernel": Axis((False, True)),
    BATCH: Axis((8, 32, 64, 128), PositiveInt, "whole numbers that divide the samples of a step"),
    # bfloat16: no float32 masters, which ours keeps. Less work and less memory: TRL may have it.
    "dtype": Axis(("float32", "bfloat16"), Literal["float32", "bfloat16"], "float32 or bfloat16", of_model=True),
    "attn_implementation": Axis(
        ("sdpa", "flash_attention_2"), Literal["sdpa", "flash_attention_2", "eager"], "sdpa, flash_attention_2 or eager", of_model=True
    ),
    "vllm_gpu_memory_utilization": Axis((0.3, 0.5), Annotated[float, Field(gt=0, le=1)], "numbers above 0, at most 1", of_vllm=True),
    "vllm_enable_sleep_mode": Axis((False, True), of_vllm=True),
}
MAKES_ROOM = ("vllm_enable_sleep_mode", True)  # vLLM's memory is the trainer's during the update
# For learning: values that are faster than TRL's own, and the largest batch that divides the samples of a step.
FASTER = "gradient_checkpointing=false"
BATCHES = (64, 32, 16, 8, 4, 2, 1)


def check(generation: str | None, device: str) -> None:
    """Refuse what TRL generates with, or TRL itself, if it cannot run here."""
    generation = generation or BY_DEVICE[device]
    if generation not in BY_DEVICE.values():
        raise UserError(f"--generation {generation}: unknown; choose from {', '.join(BY_DEVICE.values())}")
    if generation == "vllm" and device != "cuda":
        raise UserError("--generation vllm: TRL runs vLLM beside the trainer on a CUDA device only. Use --generation transformers")
    if not installed("trl"):
        raise UserError("--against trl: TRL is not installed in this environment. Install it (pip install trl), or leave the option out")
    if generation == "vllm" and not installed("vllm"):
        raise UserError(
            '--against trl: TRL generates with vLLM, which is not installed here. Install it (pip install "fulltilt[vllm]"), '
            "or measure TRL without it: --generation transformers"
        )


def axes(job: BenchJob, *faster: str) -> dict[str, tuple[Any, ...]]:
    """What is tried: TRL's own values and others that may be faster, as far as they can run here; `faster` and the job's --trl, both as
    NAME=VALUE,VALUE, replace these.

    Example: --trl dtype=float32 -> {"gradient_checkpointing": (True, False), …, "dtype": ("float32",), …}
    """
    samples = job.samples
    there = {name: axis for name, axis in AXES.items() if job.generation == "vllm" or not axis.of_vllm}
    values: dict[str, tuple[Any, ...]] = {name: axis.values for name, axis in there.items()}
    values[BATCH] = tuple(size for size in AXES[BATCH].values if samples % size == 0) or (samples,)
    for name, package in (("use_liger_kernel", "liger_kernel"), ("attn_implementation", "flash_attn"), ("dtype", "")):
        if job.device.type != "cuda" or (package and not installed(package)):
            values[name] = values[name][:1]
    return values | dict(_read(text, there, samples) for text in (*faster, *job.options.trl))


def _read(text: str, there: Mapping[str, Axis], samples: int) -> tuple[str, tuple[Any, ...]]:
    name, equals, listed = (part.strip() for part in text.partition("="))
    if name in AXES and name not in there:
        raise UserError(f"--trl {text}: vLLM generates nothing here. Leave it out, or use --generation vllm")
    if not equals or name not in there:
        raise UserError(f"--trl {text}: write NAME=VALUE or NAME=VALUE,VALUE with one of {', '.join(there)}")
    try:
        values = tuple(TypeAdapter(there[name].kind).validate_strings(word.strip()) for word in listed.split(","))
    except ValidationError:
        raise UserError(f"--trl {text}: {name} takes {there[name].legal}, with commas between them") from None
    odd = [size for size in values if name == BATCH and samples % size]
    if odd:
        raise UserError(f"--trl {text}: {odd[0]} does not divide the {samples} samples of a step, as TRL requires. Use one that does")
    return name, values


def one_setting(job: BenchJob) -> dict[str, Any]:
    """TRL's own values except where others are known to be faster; the job's --trl wins over both."""
    batch = next(size for size in BATCHES if job.samples % size == 0)
    found = axes(job, FASTER, f"{BATCH}={batch}")
    for name in (text.partition("=")[0].strip() for text in job.options.trl):
        if len(found[name]) > 1:
            raise UserError(f"--trl {name}: give one value, since a run takes long. `fulltilt bench step` finds the fastest of several")
    return {name: values[0] for name, values in found.items()}


def refused(config: Config) -> Iterator[str]:
    """Settings of a run file with which TRL would not compute the same."""
    from fulltilt.schema import AlgorithmConfig, uses_reward_model
    from fulltilt.settings import algorithm_settings

    algorithm = config.algorithm
    plain = AlgorithmConfig(**{key: getattr(algorithm, key) for key in ("prompts_per_step", "samples_per_prompt", "entropy_coef")})
    compared = algorithm_settings(config.model_copy(update={"algorithm": plain}))
    for key, value in algorithm.model_dump().items():
        if value is not None and value != compared.get(key):
            instead = f", or set it to {compared[key]}" if key in compared else ""
            yield f"algorithm.{key}: is compared only as GRPO has it, with one optimizer step for each rollout. Leave it out{instead}"
    if not isinstance(config.reward.function, str) or config.reward.sources or uses_reward_model(config):
        yield "reward: is compared with one function for all rows. Name one as reward.function"
    if config.rollout.stop:
        yield "rollout.stop: is not compared. Leave it out"
    if config.lora.rank:
        yield "lora.rank: adapters are not compared. Leave it out"


def search(axes: Axes, measure: Callable[[Setting], StepTiming]) -> list[StepTiming]:
    """All that was tried: the first value of every axis, then one axis after another, each value with the best of what came before. What
    fails is tried once more with vLLM asleep during the update, where that is among what is tried: most of what fails does not fit."""
    switch, on = MAKES_ROOM
    tried: list[StepTiming] = []

    def attempt(setting: Setting) -> None:
        if any(steps.setting == setting for steps in tried):
            return
        tried.append(measure(setting))
        if tried[-1].error and on in axes.get(switch, ()):
            attempt({**setting, switch: on})

    attempt({name: values[0] for name, values in axes.items()})
    for name, values in axes.items():
        for value in values[1:]:
            attempt({**(fastest(tried) or tried[0]).setting, name: value})
    return tried


# -- asking -------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrlTask:
    """The steps of a run, for TRL to make."""

    job: BenchJob
    folder: Path  # a new one
    response_tokens: int | None = None  # that every response has; None: responses end by themselves
    save_at: Sequence[int] = ()  # steps after which the model is saved
    limit_s: float | None = None  # after which it stops
    held_by_others: int = 0  # bytes of the device

    @cached_property
    def batches(self) -> list[tuple[Prompt, ...]]:
        """The prompts of each step."""
        from fulltilt.bench.job import run_batches

        return list(run_batches(self.job.config))


def measure_steps(task: TrlTask, say: Say) -> list[StepTiming]:
    """One process for each setting that is tried."""
    tried = axes(task.job)
    starts, planned = 0, 1 + sum(len(values) - 1 for values in tried.values())

    def one(setting: Setting) -> StepTiming:
        nonlocal starts
        starts += 1
        steps, answer = ask(task, setting, task.folder / str(starts), f"start {starts} of {max(starts, planned)}", say)
        return step_timing(len(task.batches), setting, steps, answer)

    return search(tried, one)


def measure_learning(task: TrlTask, say: Say) -> dict[str, Any]:
    """One process; what it had measured when it failed is kept."""
    shutil.rmtree(task.folder, ignore_errors=True)
    setting = one_setting(task.job)
    steps, answer = ask(task, setting, task.folder, f"start and {len(task.batches)} steps", say, LEARNING_LIMIT_S)
    return {"setting": setting | {"generation": task.job.generation}, "steps": steps, "accuracy": [], "error": None, **answer}


def ask(
    task: TrlTask, setting: Setting, folder: Path, what: str, say: Say, limit_s: float | None = None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The line of each step, and the rest of the answer."""
    say(f"trl: {what}, " + ", ".join(f"{name} {value}" for name, value in setting.items()))
    folder.mkdir(parents=True)
    request = request_of(task, setting, folder) | {"begun": time.time()}
    with peers.Peer(Path(__file__), request, folder / "process", ONE_DEVICE) as peer:
        answer = peer.measure(limit_s)
    lines = Path(request["lines"])
    return [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()] if lines.exists() else [], answer


def request_of(task: TrlTask, setting: Setting, folder: Path) -> dict[str, Any]:
    """For `run`, in the other process."""
    from fulltilt.model.load import load_tokenizer
    from fulltilt.training.optim import learning_rate

    config, prompts = task.job.config, [prompt for batch in task.batches for prompt in batch]
    tokenizer = load_tokenizer(config.model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder / "tokenizer")
    distinct = {prompt.uid: prompt for prompt in prompts}
    number_of = {uid: number for number, uid in enumerate(distinct)}
    updates, rate = len(task.batches), config.train.lr
    return {
        "arguments": arguments(task, setting, folder / "output"),
        "model": config.model.path,
        "tokenizer": str(folder / "tokenizer"),
        "rows": json.loads(json.dumps([row_of(prompt) for prompt in distinct.values()], default=str)),
        "order": [number_of[prompt.uid] for prompt in prompts],
        "prompt_tokens": [sum(len(prompt.ids) for prompt in batch) * config.algorithm.samples_per_prompt for batch in task.batches],
        "response_tokens": task.response_tokens,
        "rates": [learning_rate(config.train, update, updates) / rate for update in range(updates)],
        "reward": {"function": config.reward.function, "args": config.reward.args},
        "samples": task.job.samples,
        "device": task.job.device.type,
        "held_by_others": task.held_by_others,
        "save_at": list(task.save_at),
        "models": str(folder / "models"),
        "lines": str(folder / "steps.jsonl"),
        "limit_s": task.limit_s,
    }


def row_of(prompt: Prompt) -> dict[str, Any]:
    judged_by = {"data_source": prompt.data_source, "ground_truth": prompt.ground_truth, "extra_info": dict(prompt.extra_info)}
    return {"prompt": prompt.source, "judged_by": {**judged_by, "prompt_str": prompt.text}}


def arguments(task: TrlTask, setting: Setting, output: Path) -> dict[str, Any]:
    """Arguments of `GRPOConfig` for the numbers of the run. TRL chooses all others, such as the importance correction and fused AdamW."""
    config, train, rollout = task.job.config, task.job.config.train, task.job.config.rollout
    of_model = {name: value for name, value in setting.items() if AXES[name].of_model}
    return {
        "output_dir": str(output), "max_steps": len(task.batches), "seed": config.run.seed, "shuffle_dataset": False,
        "num_generations": config.algorithm.samples_per_prompt, "gradient_accumulation_steps": task.job.samples // setting[BATCH],
        "max_completion_length": rollout.max_new_tokens, "temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k,
        "chat_template_kwargs": dict(config.data.template_args) or None,
        # One update for each rollout, without a KL term; the loss is the mean over all tokens of the step, as ours.
        "num_iterations": 1, "beta": 0.0, "loss_type": "dapo", "scale_rewards": "group",
        **({"entropy_coef": bonus} if (bonus := config.algorithm.entropy_coef) else {}),  # a key that TRL has not always had
        "learning_rate": train.lr, "weight_decay": train.weight_decay, "max_grad_norm": train.clip_grad,
        "adam_beta1": train.betas[0], "adam_beta2": train.betas[1], "adam_epsilon": train.eps,
        "bf16": task.job.device.type == "cuda", "use_cpu": task.job.device.type == "cpu",
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "model_init_kwargs": of_model,
        **{name: value for name, value in setting.items() if name not in of_model},
        **generation_arguments(task),
    }  # fmt: skip


def generation_arguments(task: TrlTask) -> dict[str, Any]:
    if task.job.generation == "transformers":
        return {"use_vllm": False} | ({"generation_kwargs": {"min_new_tokens": task.response_tokens}} if task.response_tokens else {})
    longest = max(len(prompt.ids) for batch in task.batches for prompt in batch)
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": longest + task.job.config.rollout.max_new_tokens,
        # TRL turns the tokens into text itself: vLLM need not do so too.
        "generation_kwargs": {"detokenize": False} | ({"ignore_eos": True} if task.response_tokens else {}),
    }


def step_timing(expected: int, setting: Setting, steps: Sequence[Mapping[str, Any]], answer: Mapping[str, Any]) -> StepTiming:
    """What the other process measured, or why that is not what was asked."""
    error = answer.get("error") or (f"made {len(steps)} steps instead of {expected}" if len(steps) != expected else None)
    if error:
        return StepTiming(setting, error=error)
    return StepTiming(
        setting,
        seconds=tuple(line["step_seconds"] for line in steps[WARM_UP:]),
        rollout_seconds=tuple(line["rollout_seconds"] for line in steps[WARM_UP:]),
        first_step_seconds=steps[0]["step_seconds"],
        peak_memory_bytes=answer["peak_bytes"],
        peak_device_bytes=answer["peak_device_bytes"],
        start_seconds=answer["trainer_seconds"],
        details={"grad_norms": answer["grad_norms"]},
    )


# -- in the other process -----------------------------------------------------------------------------------------------------------------


def run(request: Mapping[str, Any], result: dict[str, Any]) -> None:
    from datasets import Dataset  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found, import-untyped, unused-ignore]

    begin = time.perf_counter()
    watch, rows, order, rates = Watch(request), request["rows"], request["order"], request["rates"]
    trainer = GRPOTrainer(
        model=request["model"],
        reward_funcs=watch.reward(scorer(request["reward"], rows)),
        args=GRPOConfig(**request["arguments"]),
        train_dataset=Dataset.from_dict({"prompt": [rows[number]["prompt"] for number in order], "row": order}),
        processing_class=AutoTokenizer.from_pretrained(request["tokenizer"], padding_side="left"),
        callbacks=[watch],
    )
    watch.save = trainer.save_model
    result |= {"start_seconds": watch.now(), "trainer_seconds": time.perf_counter() - begin}
    # The learning rate of every update is the run's: warm-ups differ in their first step otherwise. The trainer keeps a scheduler it has.
    optimizer = trainer.create_optimizer()
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: rates[min(update, len(rates) - 1)])
    trainer.train()
    logs = [line for line in trainer.state.log_history if "grad_norm" in line]
    result["grad_norms"] = [float(line["grad_norm"]) for line in logs]
    result["learning_rates"] = [float(line["learning_rate"]) for line in logs]
    for name, theirs in SAMPLER.items():
        result[name] = [float(line[theirs]) for line in logs if theirs in line]
    result["peak_bytes"], result["peak_device_bytes"] = device.peak_memory(request["device"], request["held_by_others"])


def scorer(reward: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Callable[[list[str], list[int]], list[float]]:
    """The run's own reward function. What it raises ends the measurement: no sample may be left out here."""
    (function,) = load([locate(reward["function"])], reward["args"])

    def score(texts: list[str], numbers: list[int]) -> list[float]:
        return [function.score(rows[number]["judged_by"], [text])[0][0] for text, number in zip(texts, numbers, strict=True)]

    return score


class Watch(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Seconds, without those of saving models, and rewards, step by step. The reward is called when all samples of a step are finished, so
    it sees the end of the rollout."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self.request, self.on_cuda = request, request["device"] == "cuda"
        self.save: Callable[[str], None] | None = None
        # Both processes share the computer's clock; steps are timed by one that is never set back.
        self._offset = time.time() - request["begun"] - time.perf_counter()
        self._tokens_seen = 0  # before the step in progress
        self._begin = self._rollout_ends = self._reward = 0.0
        self._drawn = 0  # response tokens of the step in progress

    def now(self) -> float:
        if self.on_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() + self._offset

    def reward(self, score: Callable[[list[str], list[int]], list[float]]) -> Callable[..., list[float]]:
        def of_all(completions: list[Any], completion_ids: list[list[int]], row: list[int], **_: Any) -> list[float]:
            self._rollout_ends = self.now()
            lengths, samples, expected = [len(ids) for ids in completion_ids], self.request["samples"], self.request["response_tokens"]
            assert len(completions) == samples, f"{len(completions)} samples in a rollout instead of {samples}"
            wrong = sorted({length for length in lengths if expected not in (None, length)})
            assert not wrong, f"responses of {wrong} tokens instead of {expected}"
            found = score([each if isinstance(each, str) else each[0]["content"] for each in completions], row)
            self._reward, self._drawn = sum(found) / len(found), sum(lengths)
            return found

        return of_all

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if self.on_cuda and self.request["response_tokens"]:  # a benchmark of steps reports their peaks, without the start
            torch.cuda.reset_peak_memory_stats()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._begin = self.now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check and write down the step. TRL counts the tokens of all steps so far, prompts and responses."""
        seconds, step, tokens_seen = self.now(), state.global_step, int(state.num_input_tokens_seen)
        found, expected = tokens_seen - self._tokens_seen - self._drawn, self.request["prompt_tokens"][step - 1]
        if found != expected:
            raise ValueError(f"step {step} had prompts of {found} tokens instead of {expected}")
        self._tokens_seen = tokens_seen
        line = {
            "step": step,
            "seconds": seconds,
            "step_seconds": seconds - self._begin,
            "rollout_seconds": self._rollout_ends - self._begin,
            "reward": self._reward,
            "rollout_ends": self._rollout_ends,
            "response_length": self._drawn / self.request["samples"],
        }
        with open(self.request["lines"], "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if step in self.request["save_at"]:
            assert self.save is not None
            begin = time.perf_counter()
            self.save(f"{self.request['models']}/step-{step:08d}")
            self._offset -= time.perf_counter() - begin
        limit_s = self.request["limit_s"]
        control.should_training_stop |= limit_s is not None and seconds > limit_s


if __name__ == "__main__":
    peers.serve(run)
