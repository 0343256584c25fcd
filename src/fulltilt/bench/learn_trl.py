"""TRL's GRPOTrainer as it learns, in a process of its own.

Enters: a request: TRL's arguments, a model, prompts in the order of steps, the name of a reward. Leaves: lines in a file, one for each
step as it is made: seconds since the process was asked for, and the mean reward; models of some steps in folders, to be evaluated later.
Guaranteed: what saving takes is not in the seconds; every step's prompts were seen to have as many tokens as they have for us, and the
first where they do not is the last; learning rates are ours, update by update; what was measured before a failure is in the file.

    python -m fulltilt.bench.learn_trl REQUEST.json RESULT.json        (what `fulltilt bench learn` starts)
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fulltilt.bench import process, trl
from fulltilt.reward.functions import load, locate

OF_SAMPLER = {
    "logprob_gaps": "sampling/sampling_logp_difference/mean",
    "importance_weights": "sampling/importance_sampling_ratio/mean",
}


def run(request: Mapping[str, Any], result: dict[str, Any]) -> None:
    from datasets import Dataset  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from transformers import AutoTokenizer
    from trl import GRPOConfig  # type: ignore[import-not-found, import-untyped, unused-ignore]

    watch = Watch(request)
    rows = request["rows"]
    trainer = trainer_class(request["rates"])(
        model=request["model"],
        reward_funcs=watch.reward(scorer(request["reward"], rows)),
        args=GRPOConfig(**request["arguments"]),
        train_dataset=Dataset.from_dict({"prompt": [rows[number]["prompt"] for number in request["order"]], "row": request["order"]}),
        processing_class=AutoTokenizer.from_pretrained(request["tokenizer"], padding_side="left"),
        callbacks=[callback(watch)],
    )
    watch.save = trainer.save_model
    result["start_seconds"] = watch.now()
    trainer.train()
    logs = [line for line in trainer.state.log_history if "grad_norm" in line]
    result["grad_norms"] = [float(line["grad_norm"]) for line in logs]
    result["learning_rates"] = [float(line["learning_rate"]) for line in logs]
    for name, theirs in OF_SAMPLER.items():  # where TRL compares sampler and trainer
        result[name] = [float(line[theirs]) for line in logs if theirs in line]
    result["peak_bytes"], result["peak_device_bytes"] = trl.peak_memory(request["device"])


def trainer_class(rates: Sequence[float]) -> Any:
    """TRL's trainer with these shares of the learning rate, one for each update: warm-ups differ in their first step otherwise."""
    import torch
    from trl import GRPOTrainer

    class SameRates(GRPOTrainer):  # type: ignore[misc, unused-ignore]
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            rate = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, lambda update: rates[min(update, len(rates) - 1)])
            self.lr_scheduler = rate
            return rate

    return SameRates


def scorer(reward: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Callable[[list[str], list[int]], list[float]]:
    """The run's own reward function. What it raises ends the measurement: there is nothing to exclude here."""
    (function,) = load([locate(reward["function"])], reward["args"])

    def of_all(texts: list[str], numbers: list[int]) -> list[float]:
        return [function.score(rows[number]["judged_by"], [text])[0][0] for text, number in zip(texts, numbers, strict=True)]

    return of_all


class Watch:
    """What is measured: seconds, without those of saving, and rewards."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self.device: str = request["device"]
        self.samples: int = request["samples"]
        self.limit_s: float | None = request["limit_s"]
        self.prompt_tokens: Sequence[int] = request["prompt_tokens"]  # of each step
        self.save_at: set[int] = set(request["save_at"])
        self.models = Path(request["models"])
        self.lines = Path(request["lines"])
        self.save: Callable[[str], None] | None = None
        self._response_tokens = 0  # of the step in progress
        self._tokens_seen = 0  # before it
        self._begun: float = request["begun"]  # by the clock of the computer, which both processes share
        self._saving = 0.0
        self._reward = 0.0
        self._rollout_ends = 0.0

    def now(self) -> float:
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
        return time.time() - self._begun - self._saving

    def reward(self, score: Callable[[list[str], list[int]], list[float]]) -> Callable[..., list[float]]:
        def of_all(completions: list[Any], completion_ids: list[list[int]], row: list[int], **_: Any) -> list[float]:
            assert len(completions) == self.samples, f"{len(completions)} samples in a rollout instead of {self.samples}"
            self._rollout_ends = self.now()
            texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
            found = score(texts, row)
            self._reward = sum(found) / len(found)
            self._response_tokens = sum(map(len, completion_ids))
            return found

        return of_all

    def step_ends(self, step: int, tokens_seen: int) -> bool:
        """Whether it is time to stop. `tokens_seen`: of all steps so far, prompts and responses, as TRL counts them."""
        seconds = self.now()
        found, expected = tokens_seen - self._tokens_seen - self._response_tokens, self.prompt_tokens[step - 1]
        if found != expected:
            raise ValueError(f"step {step} had prompts of {found} tokens instead of {expected}")
        self._tokens_seen = tokens_seen
        line = {
            "step": step,
            "seconds": seconds,
            "reward": self._reward,
            "rollout_ends": self._rollout_ends,
            "response_length": self._response_tokens / self.samples,
        }
        with self.lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if step in self.save_at:
            self._keep(step)
        return self.limit_s is not None and seconds > self.limit_s

    def _keep(self, step: int) -> None:
        assert self.save is not None
        begin = time.time()
        self.save(str(self.models / f"step-{step:08d}"))
        self._saving += time.time() - begin


def callback(watch: Watch) -> Any:
    from transformers import TrainerCallback

    class OfSteps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if watch.step_ends(state.global_step, int(state.num_input_tokens_seen)):
                control.should_training_stop = True

    return OfSteps()


if __name__ == "__main__":
    process.serve(run)
