"""The command line.

Enters: arguments. Leaves: an exit code: 0 for success, 2 for an error that the user can fix (reported without a traceback), 1 for any
other failure, 130 after Ctrl-C, which saves first. Guaranteed: torch is imported only by commands that need it, so help and configuration
errors are quick.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import sys
import tempfile
from dataclasses import asdict
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

import fulltilt
from fulltilt.bench.options import BenchOptions, DeviceName, RunFile, argument, option
from fulltilt.records import UserError
from fulltilt.words import many

READER_GONE = 141  # the shells' convention: 128 plus the number of SIGPIPE


class Commands(TyperGroup):
    """Handles Ctrl-C outside the steps of a run, which handle it themselves. A closed pipe (`| head`) is not an error."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            raise
        except BrokenPipeError:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (stays open until Python has flushed its streams at exit)
            raise typer.Exit(READER_GONE) from None


app = typer.Typer(
    name="fulltilt",
    cls=Commands,
    help="Post-train language models with reinforcement learning and supervised fine-tuning. Start with: fulltilt demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

bench = typer.Typer(help="Measure fulltilt, and others beside it on the same requests.", no_args_is_help=True)
app.add_typer(bench, name="bench")

Overrides = Annotated[list[str] | None, argument("KEY=VALUE", "Overrides for keys of the file, for example run.steps=10.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, and text for people on standard error.")]
Out = Annotated[Path | None, option("FILE", "Write the JSON document here too.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings and errors.")]


def main() -> None:
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        print(
            "error: the system does not allow this process to open more files. Raise the limit, for example: ulimit -n 4096",
            file=sys.stderr,
        )
        sys.exit(2)


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"fulltilt {fulltilt.__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", callback=show_version, is_eager=True)] = False,
) -> None:
    pass


@app.command()
def demo(
    folder: Annotated[
        Path, typer.Option("--dir", help="Folder for the model, the data and the runs. An earlier demo in it is replaced.")
    ] = Path("runs/demo"),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Teach a small model arithmetic on this machine: SFT, then GRPO. Takes about three minutes on two CPU cores."""
    from fulltilt import demo as demonstration
    from fulltilt.observe.console import Console

    summary = demonstration.run(folder, Console(json=as_json, quiet=quiet))
    in_words = f"reward {summary.reward_first:.2f} -> {summary.reward_last:.2f} in {summary.seconds:.0f} s"
    print(json.dumps(asdict(summary)) if as_json else in_words)
    if summary.reward_last < demonstration.LEARNED:
        print(f"the reward should have reached {demonstration.LEARNED}: something is wrong with this installation", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def train(
    run: RunFile,
    overrides: Overrides = None,
    check: Annotated[bool, typer.Option("--check", help="Check the configuration, the reward and the data, then stop.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a model as RUN.toml describes. To resume an interrupted run from its last checkpoint, repeat the command."""
    from fulltilt import api
    from fulltilt.observe.console import Console

    if check:
        api.check(run, overrides=overrides or ())
        print(json.dumps({"ok": True}) if as_json else f"{run}: no mistakes found")
        return
    console = Console(json=as_json, quiet=quiet)
    result = api.train(run, overrides=overrides or (), console=console)
    if result.interrupted:
        saved = "and saved" if result.steps else "with nothing to save yet"
        print(f"stopped after step {result.steps} {saved}", file=sys.stderr)
        print(f"resume with: {shlex.join(['fulltilt', *sys.argv[1:]])}", file=sys.stderr)
        raise typer.Exit(130)
    console.note(
        f"done: {many(result.steps, 'step')} in {result.folder}"
        + (f", reward {result.reward_first:.3f} -> {result.reward_last:.3f}" if result.reward_first is not None else "")
        + f", {result.seconds:.0f} s, {result.tokens_per_s:.0f} tokens/s"
    )


@app.command(name="eval")
def evaluate(
    run: RunFile,
    overrides: Overrides = None,
    latest: Annotated[bool, typer.Option("--latest", help="Evaluate the newest checkpoint in run.dir instead of model.path.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Evaluate the best checkpoint in run.dir, the one of run.keep_best.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Score a model on data.val. It samples as the eval section says. For SFT it measures the loss."""
    from fulltilt import api
    from fulltilt.observe.console import Console

    result = api.evaluate(run, overrides=overrides or (), console=Console(json=as_json, quiet=quiet), latest=latest, best=best)
    if as_json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name}  {value:.4f}" if isinstance(value, float) else f"{name}  {value}")


@app.command()
def doctor(
    run: Annotated[Path | None, argument("RUN_DIR", "The folder of a run. Adds the memory that its newest step used.")] = None,
    as_json: Json = False,
) -> None:
    """Report what is installed and usable here, and what is missing."""
    from fulltilt import doctor as examination

    if run is not None and not run.is_dir():
        raise UserError(f"{run}: no such folder. Give the folder of a run (its run.dir), or nothing")
    report = examination.examine(run)
    if as_json:
        print(json.dumps(report.as_json(), indent=1))
    else:
        print("\n".join(report.lines()))
    if report.broken:
        raise typer.Exit(1)


@app.command()
def plot(
    sources: Annotated[list[Path], argument("RUN_DIR...", "Folders of runs, or JSON files written by `plot` or `bench learn`.")],
    out: Annotated[Path, option("FILE", "FILE.png for a picture and FILE.json with its numbers, or FILE.json for the numbers alone.")],
    metric: Annotated[
        list[str] | None, option("NAME", "A metric of docs/metrics.md; one panel for each. Default: the rewards, or the losses.")
    ] = None,
    against: Annotated[str, typer.Option(metavar="step|seconds", help="The horizontal axis.")] = "step",
    smooth: Annotated[int, typer.Option(min=1, help="Average each line over this many steps.")] = 1,
    title: Annotated[str, typer.Option(help="Title of the picture.", show_default=False)] = "",
) -> None:
    """Plot metrics of runs, one line per run, as a PNG and as JSON."""
    from fulltilt.observe import plot as drawing

    if against not in drawing.AGAINST:
        raise UserError(f"--against {against}: choose {' or '.join(drawing.AGAINST)}")
    drawing.files(out)
    for path in drawing.write(drawing.read(sources, metric or ()), out, against, smooth, title, sources):
        print(f"wrote {path}")


class BenchCommand(TyperCommand):
    """Refuses an option with the name of a key (`--recompute full`) by naming the KEY=VALUE to write."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for parameter in self.params for name in parameter.opts}
        for given in (text.partition("=")[0] for text in args if text.startswith("--")):
            name = given.strip("-").replace("-", "_")
            if given not in known and (key := key_named(name.removeprefix("no_"))):
                raise UserError(f"{given}: no such option. Write {key}={'false' if name.startswith('no_') else 'VALUE'} instead")
        return super().parse_args(ctx, args)


def key_named(name: str) -> str | None:
    """The first key of a configuration with this name, whatever its section."""
    from fulltilt.schema import keys

    return next((key for key in keys() if key.partition(".")[2] == name), None)


def add_benchmark(name: str, words: str, taken: str, **own: Any) -> None:
    """Add the command of a benchmark. `taken`: the fields of BenchOptions that are its options; `own`: those that it describes itself."""

    def command(**given: Any) -> None:
        measure(name, **given)

    kinds = {**get_type_hints(BenchOptions, include_extras=True), "out": Out, "as_json": Json, "quiet": Quiet, **own}
    defaults = {**vars(BenchOptions), "run": Parameter.empty, "as_json": False, "quiet": False}
    options = [
        Parameter(field, Parameter.KEYWORD_ONLY, annotation=kinds[field], default=defaults.get(field))
        for field in [*taken.split(), "out", "as_json", "quiet"]
    ]
    command.__signature__ = Signature(options)  # type: ignore[attr-defined]
    bench.command(name, cls=BenchCommand, help=words)(command)


add_benchmark(
    "rollout",
    "Measure how fast samples with log-probs are generated: output tokens/s, prefill included, ours and others' on the same requests.",
    "overrides model against device workload prompts samples repeats seed vllm_grid bandwidth flops",
    against=Annotated[str | None, option("PEERS", "Measure these engines too: vllm, hf (transformers), or both: vllm,hf")],
)
add_benchmark(
    "update",
    "Measure an update: tokens/s and MFU of forward and backward, seconds of the optimizer step, memory, and where the time goes.",
    "overrides model device workload prompts samples repeats seed flops",
)
add_benchmark(
    "step",
    "Measure whole GRPO steps, prompts to optimizer step: seconds by phase and peak memory, ours and TRL's on the same prompts.",
    "overrides model against device workload prompts samples new_tokens repeats seed trl generation",
    model=Annotated[str | None, option("SHAPE", "0.5B, 1.5B, 7B or small. Default: 0.5B on cuda, small on cpu.")],
    workload=Annotated[str | None, option("NAME", "step or small: see docs/bench.md. Default: step on cuda, small on cpu.")],
    repeats=Annotated[int | None, option(None, "Measured steps after the first. Default: 3 on cuda, 2 on cpu.", "--steps", min=1)],
)
add_benchmark(
    "learn",
    "Measure learning: reward and accuracy against seconds, start-up counted, of RUN.toml and the same run under TRL. Needs a clone.",
    "run overrides against folder trl generation minutes",
    overrides=Overrides,
)


def measure(name: str, *, out: Path | None, as_json: bool, quiet: bool, **given: Any) -> None:
    """Run a benchmark with the options that were given. Mistakes are reported before anything is measured; neither a disk that filled up
    meanwhile nor a reader that went away loses the result."""
    from fulltilt.bench import job as jobs
    from fulltilt.bench import peers, report

    benchmark = peers.benchmark(name)
    options = BenchOptions(**{field: value for field, value in given.items() if value is not None})
    with tempfile.TemporaryDirectory(prefix="fulltilt-bench-") as scratch, report.progress(quiet=quiet) as say:
        job = benchmark.prepare(options, Path(scratch))
        if out is not None:
            jobs.check_writable("--out", out)
        found = benchmark.run(job, say)
    written = json.dumps(found, indent=1)
    try:
        print(written if as_json else benchmark.table(found), flush=True)
    finally:
        if out is not None:
            jobs.write_text("--out", out, written + "\n")


@app.command()
def prove(
    words: Annotated[list[str] | None, argument("KNOB", "Knobs to prove, by fulltilt's, verl's or ChatLearn's name. Default: all.")] = None,
    device: DeviceName = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run each performance knob with both values on this machine, and show what it changes and that gradients stay the same."""
    from fulltilt.bench import report
    from fulltilt.proofs.run import prove as run_proofs
    from fulltilt.proofs.run import show

    records, stopped = [], None
    with report.progress(quiet=quiet) as say:
        try:
            for record in run_proofs(words or [], device, say):
                records.append(record)
        except KeyboardInterrupt as interrupt:  # show what was found so far
            stopped = interrupt
    if as_json:
        print(json.dumps([asdict(record) for record in records], indent=1))
    else:
        show(records)
    if stopped is not None:
        print(f"stopped after {many(len(records), 'proof')}", file=sys.stderr)
        raise stopped
    if any(record.holds is False for record in records):
        raise typer.Exit(1)


@app.command()
def knobs(
    words: Annotated[list[str] | None, argument("WORD", "Show only knobs whose name or alias contains one of these words.")] = None,
    as_json: Json = False,
) -> None:
    """List the performance knobs: their names here, in verl and in ChatLearn, and what each must change."""
    from fulltilt import knobs as ledger

    names = {knob: (knob.name, *knob.verl, *knob.chatlearn) for knob in ledger.LEDGER}
    chosen = [knob for knob in names if not words or any(word.lower() in name for word in words for name in names[knob])]
    if not chosen:
        raise UserError(f"no knob or alias contains {' or '.join(words or [])}. `fulltilt knobs` lists all knobs")
    if as_json:
        print(json.dumps([asdict(knob) | {"state": knob.state} for knob in chosen], indent=1))
    elif words:
        print("\n\n".join(ledger.describe(knob) for knob in chosen))
    else:
        print("\n".join(f"{knob.name:<36} {knob.state:<10} {knob.must_change}" for knob in chosen))
        print("\n`fulltilt knobs WORD` describes the knobs whose name or alias contains WORD")


if __name__ == "__main__":
    main()
