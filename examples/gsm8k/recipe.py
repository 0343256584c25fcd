"""From a pretrained model to GSM8K, by one command: prepare, evaluate, SFT, evaluate, GRPO, evaluate, curves.

Enters: a model (a folder or a hub name), GSM8K's own files, and a folder of run files (`sft.toml`, `grpo.toml`, ...), which say how each
stage trains. Leaves, in --dir: the data, a run folder for each stage, `evaluations/`, `summary.json`, and the curves as PNG and JSON.
Guaranteed: given again after a stop or a kill at any moment, the command goes on where it was: a stage that is done is not done again,
one in progress goes on from its newest checkpoint; what was done with other values or other weights is never taken for what is asked.

    python examples/gsm8k/recipe.py --model models/SmolLM2-135M-Instruct --data DOWNLOADED --dir runs/gsm8k
    python examples/gsm8k/recipe.py --data DOWNLOADED --dir runs/gsm8k-small --small
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import prepare
import small

from fulltilt import config as configuration
from fulltilt import loop
from fulltilt.observe import plot
from fulltilt.observe.console import Console
from fulltilt.observe.metrics import TIMING_NAMES, read_lines
from fulltilt.records import UserError
from fulltilt.schema import Config
from fulltilt.training.checkpoint import CheckpointStore
from fulltilt.words import many

SOURCE = "openai/gsm8k"
STRICT, FLEXIBLE, MARKED = f"val-core/{SOURCE}/reward/mean@1", f"val-aux/{SOURCE}/flexible/mean@1", f"val-aux/{SOURCE}/format/mean@1"
SAMPLES = 8  # of each problem, at the temperature of training
ONE_OF, ANY_OF = f"val-core/{SOURCE}/reward/mean@{SAMPLES}", f"val-core/{SOURCE}/reward/best@{SAMPLES}/mean"
DRAWING = ("temperature", "top_p", "top_k", "samples_per_prompt")  # of [eval]: how an evaluation draws
OURS = {  # what the recipe fills in itself, and what to do instead
    "model.path": "Give --model",
    "data.train": "Give --data",
    "data.val": "Give --data",
    "run.dir": "Give --dir",
    "run.seed": "Give --seeds",
    **{f"eval.{key}": f"Every evaluation is greedy, and one by {SAMPLES} samples as training draws them" for key in DRAWING},
}
CURVES = (
    "val/reward/mean",
    f"val-aux/{SOURCE}/flexible/mean@1",
    "critic/score/mean",
    "response_length/mean",
    "rollout_corr/logprob_abs_gap",
)
WHAT_EVALUATION_READS = ("model.", "data.", "rollout.", "reward.", "eval.", "run.seed")  # of a configuration
DATA = {  # of a stage: what its run file calls train and val
    "sft": ("train_sft.jsonl", "test_sft.jsonl"),
    "rl": ("train.parquet", "test.parquet"),
}


class Stopped(Exception):
    """By Ctrl-C, after saving."""


@dataclass(frozen=True)
class Recipe:
    model: str
    source: Path  # with GSM8K's own files
    folder: Path  # for all that is made
    files: Path  # with the run files
    algorithms: tuple[str, ...]  # that go on from SFT, by the names of their run files
    seeds: tuple[int, ...]  # of each of these
    solutions: str
    rows: int | None  # of each file of the data; None: all
    overrides: tuple[str, ...]  # KEY=VALUE for all stages, STAGE.KEY=VALUE for one
    console: Console

    def config(self, stage: str, model: str, run: str, *others: str, last: Sequence[str] = ()) -> Config:
        """The stage's run file with the places of this recipe and what the user gave; `last` even over that."""
        stages = {path.stem for path in self.files.glob("*.toml")}
        train, val = DATA["sft" if stage == "sft" else "rl"]
        data = self.folder / "data"
        places = (f"model.path={model}", f"data.train={data / train}", f"data.val={data / val}", f"run.dir={self.folder / run}")
        given = [(*text.partition("."), text) for text in self.overrides]
        mine = [rest if name in stages else whole for name, _, rest, whole in given if name not in stages or name == stage]
        settings = {text.partition("=")[0]: text for text in (*places, *others, *mine, *last)}  # the last value given for a key counts
        try:
            return configuration.load(self.files / f"{stage}.toml", list(settings.values()))
        except UserError as error:
            if not any(name not in stages and whole.partition("=")[0] in str(error) for name, *_, whole in given):
                raise
            raise UserError(
                f"{error}\nA KEY=VALUE is for all stages, sft too; for one alone, put its name before: grpo.KEY=VALUE"
            ) from None


# -- stages -------------------------------------------------------------------------------------------------------------------------------


def run(recipe: Recipe) -> dict[str, Any]:
    begin = time.perf_counter()
    recipe.console.note("== data")
    prepare.prepare(recipe.source, recipe.folder / "data", recipe.solutions, recipe.rows)
    for stage in ("sft", *recipe.algorithms):  # a mistake in the last stage's file is said now, not hours later
        recipe.config(stage, recipe.model, stage)
    results = {"before": evaluate(recipe, recipe.algorithms[0], "before", recipe.model)}
    warm = train(recipe, "sft", "sft", recipe.model)
    results["sft"] = evaluate(recipe, recipe.algorithms[0], "sft", warm)
    runs: dict[str, list[str]] = {stage: [] for stage in recipe.algorithms}
    for stage, names in runs.items():
        for seed in recipe.seeds:
            name = f"{stage}-seed{seed}" if seed else stage  # so that seeds can be added to a recipe that had one
            results[name] = evaluate(recipe, stage, name, train(recipe, stage, name, warm, f"run.seed={seed}"))
            names.append(name)
            found = summary(recipe, results, runs) | {"seconds_of_this_command": time.perf_counter() - begin}
            tell(recipe, found, runs)
    return found


def tell(recipe: Recipe, found: Mapping[str, Any], runs: Mapping[str, Sequence[str]]) -> None:
    """After every run, so that a kill in a later one leaves what is known of those before."""
    write(recipe.folder / "summary.json", found)
    recipe.console.note("== curves")
    for path in draw(recipe, [name for names in runs.values() for name in names]):
        recipe.console.note(f"wrote {path}")


def train(recipe: Recipe, stage: str, name: str, model: str, *others: str) -> str:
    """The folder of the trained model."""
    config = recipe.config(stage, model, name, *others)
    store = CheckpointStore(Path(config.run.dir) / "checkpoints", config.run.keep)

    def make() -> dict[str, Any]:
        recipe.console.note(f"== {name}: training as {recipe.files / stage}.toml says, in {config.run.dir}")
        trained = loop.train(config, recipe.console)
        if trained.interrupted:
            raise Stopped
        return {"steps": trained.steps}

    begun_with = Path(f"{config.run.dir}.begun_with.json")  # a run begins in an empty folder
    weights = {"weights": weights_of(model)}
    if store.folder.is_dir() and begun_with.is_file() and read(begun_with) != weights:
        raise UserError(f"{config.run.dir} was trained from other weights than {model} holds now. Delete it, or use another --dir")
    write(begun_with, weights)
    asked = configuration.snapshot(config) | {"rows": digest(recipe.folder / "data" / DATA["sft" if stage == "sft" else "rl"][0])}
    once(recipe, Path(config.run.dir) / "done.json", name, asked, make)
    found = store.latest()
    if found is None:
        raise UserError(f"{store.folder}: the checkpoint that {name} ended with is gone. Delete {config.run.dir} to train again")
    return str(found.model_folder)


def evaluate(recipe: Recipe, stage: str, name: str, model: str) -> dict[str, Any]:
    """On all problems of the test file: greedy, and by samples as the training of `stage` draws them."""
    rollout = recipe.config(stage, model, name).rollout
    greedy = one_evaluation(recipe, stage, name, model, (0, 1, 0, 1))
    drawn = one_evaluation(recipe, stage, f"sampled/{name}", model, (rollout.temperature, rollout.top_p, rollout.top_k, SAMPLES))
    metrics, sampled = greedy["metrics"], drawn["metrics"]
    recipe.console.note(
        f"{name}: strict {metrics[STRICT]:.4f}, flexible {metrics[FLEXIBLE]:.4f}, sampled {sampled[ONE_OF]:.4f} "
        f"of {metrics['val/prompts']} problems"
    )
    return {"metrics": metrics, "sampled": sampled, "seconds": greedy["seconds"] + drawn["seconds"]}


def one_evaluation(recipe: Recipe, stage: str, name: str, model: str, drawing: tuple[float, ...]) -> dict[str, Any]:
    """`drawing`: the values of DRAWING."""
    last = [f"eval.{key}={value}" for key, value in zip(DRAWING, drawing, strict=True)]
    config = recipe.config(stage, model, f"evaluations/{name}", last=last)

    def make() -> dict[str, Any]:
        recipe.console.note(f"== {name}: evaluating {model}")
        begin = time.perf_counter()
        metrics = loop.evaluate(config, recipe.console, latest=False)
        return {"metrics": metrics, "seconds": time.perf_counter() - begin}

    asked = {key: value for key, value in configuration.snapshot(config).items() if key.startswith(WHAT_EVALUATION_READS)}
    asked |= {"weights": weights_of(model), "rows": digest(recipe.folder / "data" / DATA["rl"][1])}
    return once(recipe, recipe.folder / "evaluations" / f"{name}.json", f"the evaluation {name}", asked, make)


def once(recipe: Recipe, record: Path, what: str, asked: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` gives, or gave when the same was asked before."""
    if record.is_file() and (known := read(record))["asked"] == asked:
        recipe.console.note(f"== {what}: done before")
        return known
    found = {"asked": dict(asked), **make()}
    write(record, found)
    let_go()
    return found


def let_go() -> None:
    """What a stage held of the device is free for the next."""
    gc.collect()
    if (torch := sys.modules.get("torch")) and torch.cuda.is_available():
        torch.cuda.empty_cache()


def digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def weights_of(model: str) -> str | None:
    """Tells one model from another under the same path; None of a hub's. A checkpoint's manifest has the hashes of all its files."""
    manifest = Path(model).parent / "manifest.json"
    if manifest.is_file():
        return digest(manifest)
    if not Path(model).is_dir():
        return None
    files = sorted(path for path in Path(model).iterdir() if path.suffix in (".safetensors", ".bin"))
    return hashlib.sha256("".join(digest_as_it_is(path, path.stat().st_mtime_ns) for path in files).encode()).hexdigest()


@cache
def digest_as_it_is(path: Path, changed: int) -> str:
    """Of a large file, read once."""
    return digest(path)


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def write(path: Path, found: Mapping[str, Any]) -> None:
    """A file that is there is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


# -- what came of it ----------------------------------------------------------------------------------------------------------------------


def summary(recipe: Recipe, results: Mapping[str, Mapping[str, Any]], runs: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """`runs`: the names of each stage's, as far as they are done."""
    accuracy = {name: accuracy_of(result["metrics"], result["sampled"]) for name, result in results.items()}
    return {
        "accuracy": accuracy,
        "algorithms": {stage: over_seeds([accuracy[name] for name in names]) for stage, names in runs.items() if names},
        "runs": {name: of_run(recipe.folder / name) for name in accuracy if name != "before"},
        "evaluation_seconds": {name: result["seconds"] for name, result in results.items()},
    }


def accuracy_of(metrics: Mapping[str, Any], sampled: Mapping[str, Any]) -> dict[str, Any]:
    right, problems = metrics[STRICT], metrics["val/prompts"]
    return {
        "strict": right,
        "flexible": metrics[FLEXIBLE],
        "marked": metrics[MARKED],  # answers with a number after "####", right or wrong
        "problems": problems,
        "standard_error": (right * (1 - right) / problems) ** 0.5,  # of strict, as if problems were drawn anew
        "sampled": sampled[ONE_OF],  # mean over the samples of all problems
        "any_of_samples": sampled[ANY_OF],
        "response_tokens": metrics["val/response_length/mean"],
    }


def over_seeds(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    spread = {name: [each[name] for each in found] for name in ("strict", "flexible", "sampled")}
    return {name: {"mean": mean(values), "least": min(values), "most": max(values)} for name, values in spread.items()}


def of_run(folder: Path) -> dict[str, Any]:
    """Seconds by phase, and what must stay as it is along a run."""
    lines = read_lines(folder / plot.METRICS).steps
    steps = [line for line in lines if line["step"] > 0]
    phases = {phase: [line[f"timing_s/{name}"] for line in steps if f"timing_s/{name}" in line] for phase, name in TIMING_NAMES.items()}
    watched = ("rollout_corr/logprob_abs_gap", "rollout_corr/rollout_is_mean", "memory_gib/reserved", "memory_gib/process")
    columns = {name: [line[name] for line in steps if line.get(name) is not None] for name in watched}
    return {
        "steps": len(steps),
        "seconds": sum(sum(line.get(name) or 0.0 for name in plot.PARTS_OF_TIME) for line in lines),
        "step_seconds": median(line["timing_s/step"] for line in steps),
        "phase_seconds": {phase: median(times) for phase, times in phases.items() if times},
        "watched": {
            name: {"first": values[0], "last": values[-1], "least": min(values), "most": max(values)}
            for name, values in columns.items()
            if values
        },
    }


def draw(recipe: Recipe, runs: Sequence[str]) -> list[Path]:
    folders = [recipe.folder / name for name in runs]
    can_draw = importlib.util.find_spec("matplotlib") is not None
    out = recipe.folder / ("curves.png" if can_draw else "curves.json")
    if not can_draw:
        recipe.console.note('without matplotlib there is no picture, only its numbers: pip install "fulltilt[plot]"')
    there = {curve.metric for folder in folders for curve in plot.of_source(folder, folder.name)}
    return plot.write(plot.read(folders, [name for name in CURVES if name in there]), out, against="seconds")


def table(found: Mapping[str, Any]) -> str:
    problems = found["accuracy"]["before"]["problems"]
    columns = {"strict": ".4f", "flexible": ".4f", "marked": ".4f", "response_tokens": ".1f", "sampled": ".4f", "any_of_samples": ".4f"}
    titles = ("strict", "flexible", "marked", "tokens", "sampled", f"any of {SAMPLES}")
    width = max(map(len, found["accuracy"]))
    lines = [f"{problems} problems, greedy but for the last two", " " * width + "".join(f"{title:>10}" for title in titles)]
    lines += [
        f"{name:<{width}}" + "".join(f"{format(each[column], form):>10}" for column, form in columns.items())
        for name, each in found["accuracy"].items()
    ]
    warm = found["accuracy"]["sft"]
    for stage, each in found["algorithms"].items():
        spreads = [
            f"{kind} {spread['mean']:.4f} ({spread['least']:.4f} to {spread['most']:.4f}), {spread['mean'] - warm[kind]:+.4f} to SFT"
            for kind, spread in each.items()
            if kind != "flexible"
        ]
        lines.append(f"{stage}: {'; '.join(spreads)}")
    for name, each in found["runs"].items():
        phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in each["phase_seconds"].items())
        lines.append(f"{name}: {many(each['steps'], 'step')} in {each['seconds']:.0f} s, median {each['step_seconds']:.2f} s ({phases})")
    return "\n".join(lines)


# -- the command --------------------------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description="GSM8K by one command: prepare, evaluate, SFT, evaluate, GRPO, evaluate, curves.")
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="folder with GSM8K's train.jsonl and test.jsonl")
    add("--model", metavar="MODEL", help="folder or hub name of the model to start from; with --small a tiny one is made")
    add("--dir", type=Path, default=Path("runs/gsm8k"), metavar="DIR", help="folder for all that is made (default: runs/gsm8k)")
    add("--files", type=Path, default=Path(__file__).parent / "smollm2", metavar="DIR", help="folder with the run files (default: smollm2)")
    add("--then", default="grpo", metavar="NAMES", help="what follows SFT, by the names of run files: grpo, or grpo,dapo,ppo")
    add("--seeds", default="0", metavar="NUMBERS", help="of what follows SFT, a run each: 0,1,2")
    add("--solutions", choices=prepare.SOLUTIONS, help="what SFT keeps of a solution (default: equations)")
    add("--small", action="store_true", help="few rows, few steps: all stages in about a minute on a CPU")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="for all stages, or for one: grpo.train.lr=1e-5")
    arguments = parser.parse_intermixed_args()  # KEY=VALUE may stand between options
    try:
        found = run(recipe_of(arguments, Console()))
    except (Stopped, KeyboardInterrupt):
        print("stopped; the same command goes on", file=sys.stderr)
        return 130
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(found))
    return 0


def recipe_of(arguments: argparse.Namespace, console: Console) -> Recipe:
    if not arguments.model and not arguments.small:
        raise UserError("--model is missing. Give a folder or a hub name; examples/gsm8k/smollm2.py makes one without a hub")
    if not all(word.isdecimal() for word in arguments.seeds.split(",")):
        raise UserError(f"--seeds {arguments.seeds}: give whole numbers with commas between them, for example 0,1,2")
    if missing := [name for split in prepare.SPLITS if not (arguments.data / (name := f"{split}.jsonl")).is_file()]:
        raise UserError(f"--data {arguments.data}: there is no {missing[0]} in it. Give the folder with GSM8K's own files")
    if arguments.small and arguments.solutions not in (None, "equations"):
        raise UserError(f"--solutions {arguments.solutions}: the small version is made for equations. Leave it out")
    algorithms = tuple(dict.fromkeys(arguments.then.split(",")))
    there = {path.stem for path in arguments.files.glob("*.toml")}
    if "sft" not in there:
        raise UserError(f"--files {arguments.files}: there is no sft.toml in it")
    if unknown := [name for name in algorithms if name not in there - {"sft"}]:
        raise UserError(
            f"--then {arguments.then}: {unknown[0]!r} cannot follow SFT. In {arguments.files}: {', '.join(sorted(there - {'sft'}))}"
        )
    for text in arguments.overrides:
        stage, _, rest = text.partition(".")
        key = (rest if stage in there else text).partition("=")[0]
        if key in OURS:
            raise UserError(f"{text}: the recipe sets this itself. {OURS[key]}")
        if stage in there - {"sft", *algorithms}:
            raise UserError(f"{text}: {stage} is not run. Leave it out, or name {stage} in --then")
    return Recipe(
        model=arguments.model or str(small.model(arguments.data, arguments.dir / "model")),
        source=arguments.data,
        folder=arguments.dir,
        files=arguments.files,
        algorithms=algorithms,
        seeds=tuple(dict.fromkeys(map(int, arguments.seeds.split(",")))),
        solutions=arguments.solutions or "equations",
        rows=small.ROWS if arguments.small else None,
        overrides=(*(small.OVERRIDES if arguments.small else ()), *arguments.overrides),
        console=console,
    )


if __name__ == "__main__":
    sys.exit(main())
