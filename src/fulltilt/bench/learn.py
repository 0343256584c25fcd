"""The benchmark of learning: reward and accuracy against seconds, of a run and of the same run under TRL, one after the other.

Enters: a run file, whose numbers both follow, and `Options`. Leaves: one JSON-ready document with a line for each step of each, with curves
that `fulltilt plot` draws, and with how much sooner ours had the reward that the peer ended with; `table` makes it readable. Guaranteed:
what the peer cannot do as the run file says is refused before anything is measured; both have the same model, prompts in the same order,
reward, batch numbers, sampling and learning rate of every step; each runs in a process of its own, whose start is counted, while
validations and saved models, of which they need not make equally many, are not, and none comes before the first step, whose captures and
compilation it would hide; accuracy is measured by the same code for both. What was measured without a failure is kept in the folder, and
not measured again when the command is given again.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fulltilt import config as configuration
from fulltilt import loop
from fulltilt.algo import presets
from fulltilt.bench import process, report, trl
from fulltilt.bench.report import OURS, Say, origin
from fulltilt.bench.rollout import choose_device, let_go
from fulltilt.config import AlgorithmConfig, Config
from fulltilt.data.order import Cursor
from fulltilt.data.prompts import PromptSet, load_prompts
from fulltilt.model.load import load_tokenizer
from fulltilt.observe.console import Console
from fulltilt.observe.plot import curve_of, trailing_means
from fulltilt.records import Prompt, UserError
from fulltilt.train.optim import learning_rate

LIMIT_S = 6 * 3600.0  # of TRL, with its start
WINDOW = 10  # steps over which a reward is averaged: one step's hangs on its prompts
HEAD = ["", "steps", "seconds", "until the first", "s a step", "reward", "accuracy", "setting"]
# Of a step of ours, by the names of docs/metrics.md.
COLUMNS = {
    "reward": "critic/score/mean",
    "response_length": "response_length/mean",
    "step_seconds": "timing_s/step",
    "rollout_seconds": "timing_s/gen",
    "update_seconds": "timing_s/update_actor",
    "logprob_gap": "rollout_corr/logprob_abs_gap",
    "importance_weight": "rollout_corr/rollout_is_mean",
    "importance_capped": "rollout_corr/rollout_is_ratio_fraction_high",
    "grad_norm": "actor/grad_norm",
    "learning_rate": "actor/lr",
    "reserved_gib": "memory_gib/reserved",
    "process_gib": "memory_gib/process",
    "reward_seconds": "timing_s/reward",
    "advantage_seconds": "timing_s/adv",
    "decode_tokens_per_s": "rollout/decode_tokens_per_s",
    "samples_left_out": "actor/samples_left_out",
}
ACCURACY = "val/reward/mean"
# Of TRL's arguments, what is faster than its own values; `fulltilt bench step` tries them one by one.
FASTER = ("gradient_checkpointing=false",)
BATCHES = (64, 32, 16, 8, 4, 2, 1)
# The command `fulltilt`, in a process that does not outlive the one that measures it, killed or not.
COMMAND = "from fulltilt.bench.process import end_with_parent; end_with_parent(); from fulltilt.cli import main; main()"

Found = dict[str, Any]  # of one system: setting, steps, accuracy, start_seconds, error, details


@dataclass(frozen=True)
class Options:
    run: Path  # a run file
    folder: Path
    overrides: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    generation: str | None = None  # what TRL generates with; None: as the device has it
    trl: tuple[str, ...] = ()  # NAME=VALUE: TRL's arguments
    minutes: float | None = None  # after which each of them stops


@dataclass(frozen=True, eq=False)
class Job:
    """Options, resolved and found to make sense."""

    config: Config
    options: Options
    device: torch.device
    against: tuple[str, ...]
    generation: str
    setting: trl.Setting

    @cached_property
    def data(self) -> PromptSet:
        return load_prompts(self.config.data.train, load_tokenizer(self.config.model), self.config.data)

    @property
    def steps(self) -> int:
        run, count = self.config.run, self.config.algorithm.prompts_per_step
        return run.steps if run.steps is not None else (run.epochs or 1) * self.data.steps_per_epoch(count)

    @property
    def samples(self) -> int:
        return self.config.algorithm.prompts_per_step * self.config.algorithm.samples_per_prompt

    def batches(self) -> Iterator[tuple[Prompt, ...]]:
        """The prompts of each step, as a run takes them."""
        cursor, config = Cursor(), self.config
        for _ in range(self.steps):
            prompts, cursor = self.data.take(cursor, config.algorithm.prompts_per_step, config.run.seed, config.data.shuffle)
            yield prompts

    @property
    def evaluated(self) -> list[int]:
        """Steps after which accuracy is measured, beside the beginning."""
        every = self.config.run.eval_every
        return list(range(every, self.steps + 1, every)) if every and self.config.data.val else []


# -- before anything runs -----------------------------------------------------------------------------------------------------------------


def prepare(options: Options) -> Job:
    config = configuration.load(options.run, options.overrides, extra_checks=[presets.mistakes])
    if not presets.PRESETS[config.algorithm.name].rollout:
        name = config.algorithm.name
        raise UserError(
            f"{options.run}: algorithm.name is {name}, which has no reward to measure. Give a run file of reinforcement learning"
        )
    if options.against and (wrong := list(refused(config))):
        raise UserError(configuration.report(str(options.run), wrong))
    device = choose_device(None if config.run.device == "auto" else config.run.device)
    generation = options.generation or trl.BY_DEVICE[device.type]
    given = {"--trl": options.trl, "--generation": options.generation}
    samples = config.algorithm.prompts_per_step * config.algorithm.samples_per_prompt
    return Job(
        config=config,
        options=options,
        device=device,
        against=trl.check_peers(options.against, generation, device.type, given),
        generation=generation,
        setting=one_setting(options.trl, samples, device.type, generation),
    )


def refused(config: Config) -> Iterator[str]:
    """What would not be the same under TRL."""
    algorithm = config.algorithm
    plain = AlgorithmConfig(**{key: getattr(algorithm, key) for key in ("prompts_per_step", "samples_per_prompt", "entropy_coef")})
    compared = presets.offered(config.model_copy(update={"algorithm": plain}))
    for key, value in algorithm.model_dump().items():
        if value is not None and value != compared.get(key):
            instead = f", or set it to {compared[key]}" if key in compared else ""
            yield f"algorithm.{key}: is compared only as GRPO has it, with one optimizer step a rollout. Leave it out{instead}"
    if not isinstance(config.reward.function, str) or config.reward.sources or configuration.uses_reward_model(config):
        yield "reward: is compared with one function for all rows. Name one as reward.function"
    if config.rollout.stop:
        yield "rollout.stop: is not compared. Leave it out"
    if config.lora.rank:
        yield "lora.rank: adapters are not compared. Leave it out"


def one_setting(given: Sequence[str], samples: int, device: str, generation: str) -> trl.Setting:
    """TRL's own values but for what is known to be faster; `given` last."""
    batch = next(size for size in BATCHES if samples % size == 0)
    defaults = {**trl.axes((*FASTER, f"per_device_train_batch_size={batch}"), samples, device, generation)}
    asked = trl.axes(given, samples, device, generation)
    named = [text.partition("=")[0].strip() for text in given]
    for name in named:
        if len(asked[name]) > 1:
            raise UserError(f"--trl {name}: one value here, for a run takes long. `fulltilt bench step` finds the fastest of several")
    return {name: (asked[name] if name in named else values)[0] for name, values in defaults.items()}


# -- ours ---------------------------------------------------------------------------------------------------------------------------------


def measure_ours(job: Job, say: Say) -> Found:
    """The command `fulltilt train`, from its start on: a line of metrics comes when its step is done."""
    folder = job.options.folder / OURS
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    overrides = [
        *job.options.overrides,
        f"run.dir={folder / 'run'}",
        "run.save_every=0",
        "run.eval_before=false",  # it would make captures and compile kernels in seconds that do not count
    ]
    command = [sys.executable, "-c", COMMAND, "train", str(job.options.run), *overrides, "--json"]
    lines: list[tuple[float, dict[str, Any]]] = []
    begin = time.perf_counter()
    log = folder / "log.txt"
    with log.open("w", encoding="utf-8") as said:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said, env=process.own_environment(), text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            assert child.stdout
            for text in child.stdout:
                lines.append((time.perf_counter() - begin, json.loads(text)))
                say(f"{OURS}: step {lines[-1][1]['step']} of {job.steps}")
                if job.options.minutes and lines[-1][0] > 60 * job.options.minutes:
                    child.send_signal(signal.SIGINT)
            code = child.wait()
        finally:
            process.end_session(child)
    stopped = code == 130 and job.options.minutes
    error = None if code == 0 or stopped else f"ended with code {code}: {process.end_of(log)}"
    return read_ours(lines) | {"setting": {}, "error": error}


def read_ours(lines: Sequence[tuple[float, Mapping[str, Any]]]) -> Found:
    """Lines with the seconds at which they came. Validations, whose seconds they hold, are taken out."""
    steps, accuracy, validating, start = [], [], 0.0, None
    for came, line in lines:
        validating += line.get("timing_s/testing") or 0.0
        seconds = came - validating
        if start is None:
            start = seconds - (line.get("timing_s/step") or 0.0)
        if line["step"] > 0:
            known = {name: line[column] for name, column in COLUMNS.items() if line.get(column) is not None}
            steps.append({"step": line["step"], "seconds": seconds, **known})
        if line.get(ACCURACY) is not None:
            accuracy.append({"step": line["step"], "seconds": seconds, "accuracy": line[ACCURACY]})
    return {"steps": steps, "accuracy": accuracy, "start_seconds": start}


# -- TRL's --------------------------------------------------------------------------------------------------------------------------------


def measure_trl(job: Job, say: Say) -> Found:
    folder = job.options.folder / "trl"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tokenizer = load_tokenizer(job.config.model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder / "tokenizer")
    say(f"trl: start and {job.steps} steps, {report.words(dict(job.setting))}")
    limit_s = 60 * job.options.minutes if job.options.minutes else None
    request = trl_request(job, folder) | {"limit_s": limit_s, "begun": time.time()}
    answer = process.ask("fulltilt.bench.learn_trl", request, folder / "process", trl.ONE_DEVICE, LIMIT_S)
    lines = Path(request["lines"])
    steps = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()] if lines.exists() else []
    return {"setting": dict(job.setting) | {"generation": job.generation}, "steps": steps, "accuracy": [], "error": None, **answer}


def trl_request(job: Job, folder: Path) -> dict[str, Any]:
    config, batches = job.config, list(job.batches())
    number_of = {prompt.uid: number for number, prompt in enumerate({p.uid: p for batch in batches for p in batch}.values())}
    rows = {number_of[prompt.uid]: row_of(prompt) for batch in batches for prompt in batch}
    longest = max(len(prompt.ids) for batch in batches for prompt in batch)
    reward = config.reward
    return {
        "arguments": trl_arguments(job, folder / "output", longest),
        "model": config.model.path,
        "tokenizer": str(folder / "tokenizer"),
        "rows": [rows[number] for number in range(len(rows))],
        "order": [number_of[prompt.uid] for batch in batches for prompt in batch],
        "prompt_tokens": [sum(len(prompt.ids) for prompt in batch) * config.algorithm.samples_per_prompt for batch in batches],
        "rates": [learning_rate(config.train, update, job.steps) / config.train.lr for update in range(job.steps)],
        "reward": {"function": reward.function, "args": reward.args},
        "samples": job.samples,
        "device": job.device.type,
        "save_at": job.evaluated,
        "models": str(folder / "models"),
        "lines": str(folder / "steps.jsonl"),
    }


def row_of(prompt: Prompt) -> dict[str, Any]:
    judged_by = {
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra_info": dict(prompt.extra_info),
        "prompt_str": prompt.text,
    }
    written: dict[str, Any] = json.loads(json.dumps({"prompt": prompt.source, "judged_by": judged_by}, default=str))
    return written


def trl_arguments(job: Job, output: Path, longest_prompt: int) -> dict[str, Any]:
    """Of `GRPOConfig`, for the run file's numbers. What is not here is as TRL chooses: the importance correction above all."""
    config, train, rollout = job.config, job.config.train, job.config.rollout
    of_model = {name: value for name, value in job.setting.items() if trl.AXES[name].of_model}
    generation: dict[str, Any] = {"use_vllm": False}
    if job.generation == "vllm":
        positions = longest_prompt + rollout.max_new_tokens
        # TRL makes text of the tokens by itself: vLLM need not do so too.
        spared = {"detokenize": False}
        generation = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": positions, "generation_kwargs": spared}
    return {
        "output_dir": str(output),
        "max_steps": job.steps,
        "gradient_accumulation_steps": job.samples // job.setting["per_device_train_batch_size"],
        "num_generations": config.algorithm.samples_per_prompt,
        "max_completion_length": rollout.max_new_tokens,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "beta": 0.0,
        **({"entropy_coef": bonus} if (bonus := config.algorithm.entropy_coef) else {}),  # a key that TRL has not always had
        "num_iterations": 1,
        "loss_type": "dapo",  # the mean over all tokens of the step, as ours
        "scale_rewards": "group",
        "learning_rate": train.lr,
        "weight_decay": train.weight_decay,
        "adam_beta1": train.betas[0],
        "adam_beta2": train.betas[1],
        "adam_epsilon": train.eps,
        "max_grad_norm": train.clip_grad,
        "chat_template_kwargs": dict(config.data.template_args) or None,
        "shuffle_dataset": False,
        "seed": config.run.seed,
        "bf16": job.device.type == "cuda",
        "use_cpu": job.device.type == "cpu",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "model_init_kwargs": of_model,
        **{name: value for name, value in job.setting.items() if name not in of_model},
        **generation,
    }


# -- accuracy, where a run did not measure it ----------------------------------------------------------------------------------------------


def measure_beginning(job: Job, say: Say) -> Found:
    """Of the model that both begin with."""
    say("evaluating the model that both begin with")
    return {"accuracy": accuracy_of(job, job.config.model.path), "error": None}


def evaluate_models(job: Job, steps: Sequence[Mapping[str, Any]], say: Say) -> list[dict[str, Any]]:
    """The accuracy of every model that TRL left. It is written down at once and the model, which may be large, deleted: after a kill the
    others are still there to be evaluated."""
    folder = job.options.folder / "trl"
    record = folder / "accuracy.json"
    found = {point["step"]: point for point in (read(record) if record.is_file() else [])}
    for line in steps:
        model = folder / "models" / f"step-{line['step']:08d}"
        if not model.is_dir():
            continue
        say(f"trl: evaluating its model of step {line['step']}")
        found[line["step"]] = {"step": line["step"], "seconds": line["seconds"], "accuracy": accuracy_of(job, str(model))}
        write(record, list(found.values()))
        shutil.rmtree(model)
    return list(found.values())


def accuracy_of(job: Job, model: str) -> float:
    """As a run validates."""
    overrides = [*job.options.overrides, f"model.path={model}", f"run.dir={job.options.folder / 'evaluation'}"]
    config = configuration.load(job.options.run, overrides, extra_checks=[presets.mistakes])
    metrics = loop.evaluate(config, Console(quiet=True, stdout=sys.stderr, terminal=False), latest=False)
    let_go(job.device)
    return float(metrics[ACCURACY])


# -- both ---------------------------------------------------------------------------------------------------------------------------------


MEASURE: Mapping[str, Callable[[Job, Say], Found]] = {OURS: measure_ours, "trl": measure_trl, "beginning": measure_beginning}


def run(job: Job, say: Say) -> dict[str, Any]:
    found = {name: kept(job, name, say) for name in (OURS, *job.against)}
    if "trl" in found:
        found["trl"] = found["trl"] | {"accuracy": evaluate_models(job, found["trl"]["steps"], say)}
    if job.evaluated:
        first = kept(job, "beginning", say)["accuracy"]
        found = {name: with_beginning(each, first) for name, each in found.items()}
    return document(job, found)


def kept(job: Job, name: str, say: Say) -> Found:
    """Measured now, or before in the same folder for the same question. What failed is tried again."""
    record = job.options.folder / f"{name}.json"
    asked = asked_of(job, name)
    known = read(record) if record.is_file() else {}
    if known.get("asked") == asked and known["found"]["error"] is None:
        say(f"{name}: measured before, in {record}")
        before: Found = known["found"]
        return before
    found = MEASURE[name](job, say)
    write(record, {"asked": asked, "found": found})
    return found


def read(record: Path) -> Any:
    return json.loads(record.read_text(encoding="utf-8"))


def write(record: Path, found: Any) -> None:
    """A file that is there is whole."""
    record.parent.mkdir(parents=True, exist_ok=True)
    partial = record.with_suffix(".partial")
    partial.write_text(json.dumps(found), encoding="utf-8")
    partial.replace(record)


def asked_of(job: Job, name: str) -> dict[str, Any]:
    shared = {
        "config": configuration.snapshot(job.config),
        "minutes": job.options.minutes,
        "device": job.device.type,
        "files": state_of(job.config),
        "commit": origin(job.device)["commit"],
    }
    return shared | ({"setting": dict(job.setting), "generation": job.generation} if name == "trl" else {})


def state_of(config: Config) -> dict[str, list[int]]:
    """Size and time of what a run reads, by its path: other weights or rows under the same name are another question."""
    data = [name for names in (config.data.train, config.data.val) for name in ([names] if isinstance(names, str) else names or [])]
    places = [Path(config.model.path), *map(Path, data)]
    files = [path for place in places for path in ([place] if place.is_file() else sorted(place.glob("*")))]
    return {str(path): [path.stat().st_size, path.stat().st_mtime_ns] for path in files}


def with_beginning(found: Found, accuracy: float) -> Found:
    """The accuracy before the first step, at the second in which it began."""
    first = {"step": 0, "seconds": found.get("start_seconds") or 0.0, "accuracy": accuracy}
    return found | {"accuracy": [first, *found["accuracy"]]} if found["steps"] else found


def document(job: Job, found: Mapping[str, Found]) -> dict[str, Any]:
    repeat = origin(job.device)
    config = job.config
    reached = {name: compare(found[OURS], found[name]) for name in job.against}
    return {
        "benchmark": "learn",
        "ratio": next((each["ratio"] for each in reached.values() if each), None),
        "reached": reached,
        "compared_by": f"seconds until the mean reward of {WINDOW} steps is what the peer's last {WINDOW} had",
        "systems": dict(found),
        "curves": [asdict(curve) for name, each in found.items() for curve in curves(name, each)],
        "run": configuration.snapshot(config),
        "steps": job.steps,
        **repeat,
        "versions": repeat["versions"] | (report.packages(trl.PACKAGES) if "trl" in job.against else {}),
    }


def curves(name: str, found: Found) -> list[Any]:
    named = [("reward", found["steps"]), ("accuracy", found["accuracy"])]
    return [curve_of([(p["step"], p["seconds"], p[metric]) for p in points], name, metric) for metric, points in named if points]


def mean_rewards(steps: Sequence[Mapping[str, Any]]) -> list[float]:
    return trailing_means([line["step"] for line in steps], [line["reward"] for line in steps], WINDOW)


def compare(ours: Found, theirs: Found) -> dict[str, Any] | None:
    """How much sooner ours had the reward that the peer ended with. None where one of them has no window of steps.

    `ratio`: the peer's own first time over ours. `ratio_of_whole`: all of the peer's seconds over ours.
    """
    both = [(found["steps"], mean_rewards(found["steps"])) for found in (ours, theirs)]
    if any(len(steps) < WINDOW for steps, _ in both):
        return None
    target = both[1][1][-1]
    # A mean of fewer steps is no mean of a window: it may be reached by chance.
    first = [
        next((line["seconds"] for line, value in list(zip(steps, means, strict=True))[WINDOW - 1 :] if value >= target), None)
        for steps, means in both
    ]
    whole = theirs["steps"][-1]["seconds"]
    return {
        "reward": target,
        "seconds": first[0],
        "their_seconds": first[1],
        "their_seconds_in_all": whole,
        "ratio": first[1] / first[0] if first[0] and first[1] else None,
        "ratio_of_whole": whole / first[0] if first[0] else None,
    }


# -- for people ---------------------------------------------------------------------------------------------------------------------------


def table(found: Mapping[str, Any]) -> str:
    run = found["run"]
    hardware = found["hardware"].get("gpu") or found["hardware"]["cpu"]
    lines = [
        f"{run['model.path']} on {hardware}: {run['algorithm.name']}, {run['algorithm.prompts_per_step']} prompts x "
        f"{run['algorithm.samples_per_prompt']} samples, at most {run['rollout.max_new_tokens']} tokens, learning rate {run['train.lr']:g}",
        "",
        *report.aligned([HEAD, *(row(name, each) for name, each in found["systems"].items())]),
        "",
        f"reward: mean of the last {WINDOW} steps, or of all if they are fewer; seconds from the start of the process, without validations",
    ]
    for name, each in found["reached"].items():
        lines.append(in_words(name, each))
    lines += [f"{name} failed: {each['error']}" for name, each in found["systems"].items() if each["error"]]
    return "\n".join(lines)


def row(name: str, found: Mapping[str, Any]) -> list[str]:
    steps = found["steps"]
    if not steps:
        return [name, "0", *["-"] * 5, report.words(found["setting"])]
    each = (steps[-1]["seconds"] - steps[0]["seconds"]) / (len(steps) - 1) if len(steps) > 1 else None
    last = mean_rewards(steps)[-1]
    accuracy = found["accuracy"][-1]["accuracy"] if found["accuracy"] else None
    return [
        name,
        str(len(steps)),
        f"{steps[-1]['seconds']:.1f}",
        f"{steps[0]['seconds']:.1f}",
        "-" if each is None else f"{each:.2f}",
        f"{last:.4f}",
        "-" if accuracy is None else f"{accuracy:.4f}",
        report.words(found["setting"]),
    ]


def in_words(name: str, reached: Mapping[str, Any] | None) -> str:
    if reached is None:
        return f"not compared with {name}: that takes {WINDOW} steps of both"
    if reached["seconds"] is None:
        return f"{OURS} has not reached {name}'s last reward, {reached['reward']:.4f}"
    sooner = f"{reached['ratio']:.2f} times sooner" if reached["ratio"] else "sooner"
    return (
        f"{OURS} had {name}'s last reward, {reached['reward']:.4f}, after {reached['seconds']:.1f} s, {sooner} than {name} "
        f"({reached['their_seconds']:.1f} s); {name} took {reached['their_seconds_in_all']:.1f} s in all"
    )
