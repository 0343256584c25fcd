"""TRL's GRPOTrainer, as a peer, in processes of its own: one start for each setting, so that its memory is gone afterwards.

Enters: what a step consists of (model folder, prompts, reward, lengths) and axes of TRL's arguments. Leaves: `Steps`, seconds of every
step at every setting that was tried. Guaranteed: a step is one rollout of all samples and one optimizer step; every response was checked
to have its length and every step its tokens; a setting that fails is recorded with its error.

    python -m fulltilt.bench.trl REQUEST.json RESULT.json        (what `measure` starts; nothing of ours runs in that process)
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from fulltilt.bench import process
from fulltilt.records import UserError

PEERS = ("trl",)
BY_DEVICE = {"cuda": "vllm", "cpu": "transformers"}  # what it generates with
WARM_UP = 1  # steps that are reported apart: captures, compilation, first allocations
PACKAGES = ("trl", "accelerate", "liger-kernel")  # beside those that every benchmark names
ONE_DEVICE = {"CUDA_VISIBLE_DEVICES": "0"}  # a second GPU would make TRL refuse to run in one process

Setting = Mapping[str, Any]
Axes = Mapping[str, tuple[Any, ...]]


# -- figures ------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steps:
    """A system at one setting over some steps."""

    setting: Setting
    seconds: tuple[float, ...] = ()  # of each step after the warm-up
    rollout_seconds: tuple[float, ...] = ()  # of these, until the last sample was there
    first_seconds: float | None = None  # of the warm-up
    peak_bytes: int | None = None  # that torch had allocated, from the first step on
    peak_device_bytes: int | None = None  # in use on the device, what other processes held left out
    start_seconds: float | None = None  # until the first step
    error: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> float | None:
        return median(self.seconds) if self.seconds else None

    def as_json(self, tokens: int) -> dict[str, Any]:
        """`tokens`: of all prompts and responses of a step."""
        typical = self.median
        known = {
            "step_seconds": typical,
            "step_seconds_all": list(self.seconds),
            "first_step_seconds": self.first_seconds,
            "start_seconds": self.start_seconds,
            "rollout_seconds": median(self.rollout_seconds) if self.rollout_seconds else None,
            "tokens_per_s": tokens / typical if typical else None,
            "peak_memory_bytes": self.peak_bytes,
            "peak_device_bytes": self.peak_device_bytes,
            "error": self.error,
        }
        return {"setting": dict(self.setting)} | known


def fastest(found: Sequence[Steps]) -> Steps | None:
    known = [(steps.median, steps) for steps in found]
    return min(((seconds, steps) for seconds, steps in known if seconds is not None), key=lambda pair: pair[0], default=(None, None))[1]


def peak_memory(device: str, held_by_others: int = 0) -> tuple[int | None, int | None]:
    """Bytes since the last reset, where nobody resets in between: the most that torch had allocated, and the most that was in use on the
    device."""
    if device != "cuda":
        return None, None
    import torch

    return torch.cuda.max_memory_allocated(), peak_in_use(torch.cuda.max_memory_reserved(), held_by_others)


def peak_in_use(reserved: int, held_by_others: int = 0) -> int:
    """Torch's largest reservation with what lies beside it on the device now: context, libraries, graphs, all of which only grow. Nothing
    looks at the device while steps run, for a look during a capture could spoil it."""
    import torch

    return reserved + device_bytes() - torch.cuda.memory_reserved() - held_by_others


def device_bytes() -> int:
    """In use on the device, whoever holds it."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


# -- settings -----------------------------------------------------------------------------------------------------------------------------


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ValueError
    return int(text)


def _switch(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise ValueError
    return value


def _one_of(*words: str) -> Callable[[str], str]:
    known = {word: word for word in words}
    return known.__getitem__


@dataclass(frozen=True)
class Axis:
    """An argument of TRL that changes how a step is executed. Its first value is where the search begins: TRL's own."""

    values: tuple[Any, ...]
    read: Callable[[str], Any]
    legal: str
    of_model: bool = False  # an argument of the model's loading
    of_vllm: bool = False


# In the order in which they are tried. Before larger batches comes what decides which of them fit: with recomputation the largest may win
# that then does not fit without, and Liger's loss holds no logits.
AXES: Mapping[str, Axis] = {
    "gradient_checkpointing": Axis((True, False), _switch, "true or false"),
    # True: a pass over all samples before the update, for the weight between vLLM and trainer. Ours has that weight without the pass.
    "vllm_importance_sampling_correction": Axis((True, False), _switch, "true or false", of_vllm=True),
    "use_liger_kernel": Axis((False, True), _switch, "true or false"),
    "per_device_train_batch_size": Axis((8, 32, 64, 128), _whole, "whole numbers that divide the samples of a step"),
    # bfloat16: no float32 masters, which ours keeps. Less work and less memory: TRL may have it.
    "dtype": Axis(("float32", "bfloat16"), _one_of("float32", "bfloat16"), "float32 or bfloat16", of_model=True),
    "attn_implementation": Axis(
        ("sdpa", "flash_attention_2"), _one_of("sdpa", "flash_attention_2", "eager"), "sdpa, flash_attention_2 or eager", of_model=True
    ),
    "vllm_gpu_memory_utilization": Axis((0.3, 0.5), _share, "numbers above 0, at most 1", of_vllm=True),
    "vllm_enable_sleep_mode": Axis((False, True), _switch, "true or false", of_vllm=True),
}
MAKES_ROOM = ("vllm_enable_sleep_mode", True)  # vLLM's memory is the trainer's during the update


def check_peers(names: tuple[str, ...], generation: str, device: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Who is measured beside us. `options` are those that speak of TRL alone."""
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise UserError(f"--against {','.join(names)}: {', '.join(unknown)} is no peer. There is {', '.join(PEERS)}")
    for option, given in options.items():
        if given and "trl" not in names:
            raise UserError(f"{option}: TRL is not measured here. Add it (--against trl), or leave the option out")
    if "trl" not in names:
        return ()
    if generation not in GENERATION:
        raise UserError(f"--generation {generation}: {' or '.join(GENERATION)}")
    if generation == "vllm" and device != "cuda":
        raise UserError("--generation vllm: TRL runs vLLM beside the trainer on a CUDA device only. Use --generation transformers")
    if not installed("trl"):
        raise UserError("--against trl: TRL is not installed in this environment. Install it (pip install trl), or leave it out")
    if generation == "vllm" and not installed("vllm"):
        raise UserError(
            '--against trl: it generates with vLLM, which is not installed in this environment. Install it (pip install "fulltilt[vllm]"), '
            "or see TRL without it: --generation transformers"
        )
    return tuple(dict.fromkeys(names))


def axes(given: Sequence[str], samples: int, device: str, generation: str) -> dict[str, tuple[Any, ...]]:
    """What is tried: TRL's own values and others that may be faster, as far as they can run here; `given`, as NAME=VALUE,VALUE, replaces
    these.

    Example: ("per_device_train_batch_size=32,64",) -> {"gradient_checkpointing": (True, False), "per_device_train_batch_size": (32, 64), …}
    """
    there = {name: axis for name, axis in AXES.items() if generation == "vllm" or not axis.of_vllm}
    values: dict[str, tuple[Any, ...]] = {name: axis.values for name, axis in there.items()}
    values["per_device_train_batch_size"] = tuple(size for size in AXES["per_device_train_batch_size"].values if samples % size == 0)
    values["per_device_train_batch_size"] = values["per_device_train_batch_size"] or (samples,)
    if device != "cuda" or not installed("liger_kernel"):
        values["use_liger_kernel"] = (False,)
    if device != "cuda" or not installed("flash_attn"):
        values["attn_implementation"] = ("sdpa",)
    if device != "cuda":
        values["dtype"] = ("float32",)
    return values | dict(_read(text, there, samples) for text in given)


def _read(text: str, there: Mapping[str, Axis], samples: int) -> tuple[str, tuple[Any, ...]]:
    name, equals, listed = (part.strip() for part in text.partition("="))
    if name in AXES and name not in there:
        raise UserError(f"--trl {text}: nothing is generated by vLLM here. Leave it out, or use --generation vllm")
    if not equals or name not in there:
        raise UserError(f"--trl {text}: write NAME=VALUE or NAME=VALUE,VALUE with one of {', '.join(there)}")
    try:
        values = tuple(there[name].read(word.strip()) for word in listed.split(","))
    except (ValueError, KeyError):
        raise UserError(f"--trl {text}: {name} takes {there[name].legal}, with commas between them") from None
    odd = [size for size in values if name == "per_device_train_batch_size" and samples % size]
    if odd:
        raise UserError(f"--trl {text}: {odd[0]} does not divide the {samples} samples of a step, which TRL asks for. Use one that does")
    return name, values


def search(axes: Axes, measure: Callable[[Setting], Steps]) -> list[Steps]:
    """All that was tried: the first value of every axis, then one axis after another, each value with the best of what came before. What
    fails is tried once more with vLLM asleep during the update, where that is among what is tried: most of what fails does not fit."""
    switch, on = MAKES_ROOM
    tried: list[Steps] = []

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
class Task:
    """What a step consists of, and how many are made."""

    model: Path  # a folder with weights and a tokenizer
    prompts: tuple[str, ...]  # of all steps, in order
    reward: Path  # a file with a function `score(solution_str)`
    prompts_per_step: int
    samples_per_prompt: int
    response_tokens: int
    positions: int  # of the longest prompt with its response
    step_tokens: tuple[int, ...]  # of each step, prompts and responses of all samples
    seed: int
    device: str
    generation: str  # "vllm" or "transformers"

    @property
    def samples(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def measure(task: Task, given: Axes, scratch: Path, held_by_others: int | None, say: Callable[[str], None]) -> list[Steps]:
    """One process a setting."""
    starts, planned = 0, 1 + sum(len(values) - 1 for values in given.values())

    def one(setting: Setting) -> Steps:
        nonlocal starts
        starts += 1
        say(f"trl: start {starts} of {max(starts, planned)}, {', '.join(f'{name} {value}' for name, value in setting.items())}")
        folder = scratch / f"trl-{starts}"
        request = request_of(task, setting, folder / "output", held_by_others or 0)
        return read_answer(task, setting, process.ask("fulltilt.bench.trl", request, folder, ONE_DEVICE))

    return search(given, one)


def arguments(task: Task, setting: Setting, output: Path) -> dict[str, Any]:
    """Of `GRPOConfig`. What is not here is as TRL chooses: clipping, AdamW fused on CUDA."""
    of_model = {name: value for name, value in setting.items() if AXES[name].of_model}
    return {
        "output_dir": str(output),
        "max_steps": len(task.step_tokens),
        "gradient_accumulation_steps": task.samples // setting["per_device_train_batch_size"],
        "num_generations": task.samples_per_prompt,
        "max_completion_length": task.response_tokens,
        "temperature": 1.0,
        "beta": 0.0,
        "num_iterations": 1,
        "loss_type": "dapo",  # the mean over all tokens of the step, as ours
        "scale_rewards": "group",
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "shuffle_dataset": False,
        "seed": task.seed,
        "bf16": task.device == "cuda",
        "use_cpu": task.device == "cpu",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "model_init_kwargs": of_model,
        **{name: value for name, value in setting.items() if name not in of_model},
        **GENERATION[task.generation](task),
    }


def _with_vllm(task: Task) -> dict[str, Any]:
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": task.positions,
        # TRL makes text of the tokens by itself: vLLM need not do so too.
        "generation_kwargs": {"ignore_eos": True, "detokenize": False},
    }


def _with_transformers(task: Task) -> dict[str, Any]:
    return {"use_vllm": False, "generation_kwargs": {"min_new_tokens": task.response_tokens}}


GENERATION: Mapping[str, Callable[[Task], dict[str, Any]]] = {"vllm": _with_vllm, "transformers": _with_transformers}


def request_of(task: Task, setting: Setting, output: Path, held_by_others: int) -> dict[str, Any]:
    """For `run`, in the other process."""
    return {
        "arguments": arguments(task, setting, output),
        "model": str(task.model),
        "prompts": task.prompts,
        "reward": str(task.reward),
        "samples": task.samples,
        "response_tokens": task.response_tokens,
        "device": task.device,
        "held_by_others": held_by_others,
    }


def read_answer(task: Task, setting: Setting, answer: Mapping[str, Any]) -> Steps:
    """What the other process measured, or why it is not what was asked."""
    error, seconds = answer.get("error"), answer.get("seconds", [])
    if not error and len(seconds) != len(task.step_tokens):
        error = f"made {len(seconds)} steps instead of {len(task.step_tokens)}"
    if not error and answer["tokens"] != list(task.step_tokens):
        error = f"its steps had {answer['tokens']} tokens instead of {list(task.step_tokens)}"
    if error:
        return Steps(setting, error=error)
    return Steps(
        setting,
        seconds=tuple(seconds[WARM_UP:]),
        rollout_seconds=tuple(answer["rollout_seconds"][WARM_UP:]),
        first_seconds=seconds[0],
        peak_bytes=answer["peak_bytes"],
        peak_device_bytes=answer["peak_device_bytes"],
        start_seconds=answer["start_seconds"],
        details={"grad_norms": answer["grad_norms"]},
    )


# -- in the other process -----------------------------------------------------------------------------------------------------------------


def run(request: Mapping[str, Any], result: dict[str, Any]) -> None:
    from datasets import Dataset  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found, import-untyped, unused-ignore]

    begin = time.perf_counter()
    clock = Clock(request["device"], request["samples"], request["response_tokens"])
    trainer = GRPOTrainer(
        model=request["model"],
        reward_funcs=clock.reward(load_reward(Path(request["reward"]))),
        args=GRPOConfig(**request["arguments"]),
        train_dataset=Dataset.from_dict({"prompt": request["prompts"]}),
        processing_class=AutoTokenizer.from_pretrained(request["model"], padding_side="left"),
        callbacks=[clock.callback()],
    )
    result["start_seconds"] = time.perf_counter() - begin
    trainer.train()
    allocated, in_use = peak_memory(request["device"], request["held_by_others"])
    logs = [line for line in trainer.state.log_history if "grad_norm" in line]
    seen = [0, *(int(line["num_tokens"]) for line in logs)]
    result |= {
        "seconds": clock.seconds,
        "rollout_seconds": clock.rollout_seconds,
        "tokens": [now - before for before, now in itertools.pairwise(seen)],
        "grad_norms": [float(line["grad_norm"]) for line in logs],
        "peak_bytes": allocated,
        "peak_device_bytes": in_use,
    }


def load_reward(file: Path) -> Callable[[str], float]:
    names: dict[str, Any] = {}
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), names)
    score: Callable[[str], float] = names["score"]
    return score


class Clock:
    """Seconds of steps. The reward is called when all samples of a step are there, so it sees the rollout's end."""

    def __init__(self, device: str, samples: int, response_tokens: int) -> None:
        self.device, self.samples, self.response_tokens = device, samples, response_tokens
        self.seconds: list[float] = []
        self.rollout_seconds: list[float] = []
        self._begin = 0.0

    def now(self) -> float:
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()

    def reward(self, score: Callable[[str], float]) -> Callable[..., list[float]]:
        def of_all(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
            self.rollout_seconds.append(self.now() - self._begin)
            lengths = {len(ids) for ids in completion_ids}
            assert len(completions) == self.samples, f"{len(completions)} samples in a rollout instead of {self.samples}"
            assert lengths == {self.response_tokens}, f"responses of {sorted(lengths)} tokens instead of {self.response_tokens}"
            return [score(text) for text in completions]

        return of_all

    def callback(self) -> Any:
        from transformers import TrainerCallback

        clock = self

        class OfSteps(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                if clock.device == "cuda":
                    import torch

                    torch.cuda.reset_peak_memory_stats()

            def on_step_begin(self, *_: Any, **__: Any) -> None:
                clock._begin = clock.now()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                clock.seconds.append(clock.now() - clock._begin)

        return OfSteps()


if __name__ == "__main__":
    process.serve(run)
