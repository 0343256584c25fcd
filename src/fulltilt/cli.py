"""The command line.

Enters: arguments. Leaves: an exit code: 0 for success, 2 for an error that the user can fix (reported without a traceback, unless
FULLTILT_TRACEBACK=1 asks for it), 3 from `plan` for a run that does not fit, 1 for any other failure, such as the loss of a worker, 130
after Ctrl-C, SIGTERM or SIGHUP, where a run saves first. Guaranteed: torch is imported only by commands that need it, so help and
configuration errors are quick.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import shlex
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

import fulltilt
from fulltilt.bench.options import BenchOptions, DeviceName, RunFile, argument, option
from fulltilt.blame import shows_traceback
from fulltilt.cluster.hosts import WorkerError
from fulltilt.folders import RUN_MARKER
from fulltilt.interrupts import interrupts_repeated
from fulltilt.observe import streams
from fulltilt.records import UserError
from fulltilt.words import many, printable

if TYPE_CHECKING:
    from fulltilt.api import TrainResult
    from fulltilt.compat.surroundings import Surroundings
    from fulltilt.compat.translate import Translation
    from fulltilt.observe.console import Console

UsageError: Any = typer.BadParameter.__base__  # a class of typer, or of click before typer had its own
# Errors of the system that have no file name and are this program's own mistakes.
OWN_MISTAKES = (None, errno.EBADF, errno.EINVAL, errno.EPIPE, errno.ECHILD, errno.ESRCH, errno.ECONNRESET)
READER_GONE = 141  # the shells' convention: 128 plus the number of SIGPIPE


class CommandGroup(TyperGroup):
    """Answers an option with the name of a key (`--train.lr 1e-4`) by the KEY=VALUE to write, for every command that takes overrides, and
    expands `~` where shells do not: in `--out=~/file`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if isinstance(command, TyperCommand):
            if any(parameter.name == "overrides" for parameter in command.params):
                refuse_keys_as_options(command, rest)
            rest = [re.sub(r"(?<=^--)([\w-]+=)(~.*)", lambda found: found[1] + os.path.expanduser(found[2]), text) for text in rest]
        return name, command, rest


def refuse_keys_as_options(command: TyperCommand, args: list[str]) -> None:
    known = {"-h", "--help", *(name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts))}
    followers: list[str | None] = [*args[1:], None]
    for given, following in zip(args, followers, strict=False):  # without arguments there is still a last None
        option = given.partition("=")[0]
        if option in known or not re.match(r"--?[A-Za-z]", given):
            continue
        from fulltilt.config import instead_of_option

        if override := instead_of_option(given, following):
            raise UserError(f"{option}: no such option. Write {override} instead")


@contextlib.contextmanager
def printable_errors() -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        error.message = printable(error.message)
        raise


class Commands(CommandGroup):
    """Handles Ctrl-C outside the steps of a run, which handle it themselves, and makes usage errors, which quote arguments, printable."""

    def make_context(self, *given: Any, **options: Any) -> Any:
        with printable_errors():
            return super().make_context(*given, **options)

    def invoke(self, ctx: Any) -> Any:
        try:
            with printable_errors(), interrupts_repeated():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            raise


app = typer.Typer(
    name="fulltilt",
    cls=Commands,
    help="Post-train language models with reinforcement learning and supervised fine-tuning. Start with: fulltilt demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

bench = typer.Typer(cls=CommandGroup, help="Measure fulltilt, and others beside it on the same requests.", no_args_is_help=True)
app.add_typer(bench, name="bench")

Overrides = Annotated[list[str] | None, argument("KEY=VALUE", "Overrides for keys of the file, for example run.steps=10.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, and text for people on standard error.")]
Out = Annotated[Path | None, option("FILE", "Write the JSON document here too.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings and errors.")]


def main() -> None:
    out, _ = streams.protect()
    streams.quiet_libraries()
    try:
        app()
    except WorkerError as error:
        if error.worker_traceback:
            tell(error.worker_traceback.rstrip(), sys.stderr)
        elif shows_traceback():
            tell(traceback.format_exc().rstrip(), sys.stderr)
        tell(f"error: {error}", sys.stderr)
        sys.exit(1)
    except UserError as error:
        refuse(str(error))
    except SystemExit as ended:
        sys.exit(ended.code or without_output(out))
    except KeyboardInterrupt:  # before a command, which has its own words for this, has begun
        tell("stopped", sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        if isinstance(error, OSError) and (error.filename is not None or error.errno not in OWN_MISTAKES):
            refuse(system_error(error))
        tell(traceback.format_exc().rstrip(), sys.stderr)
        sys.exit(1)


def refuse(text: str) -> NoReturn:
    """End with an error that the user can fix. With FULLTILT_TRACEBACK=1 the exceptions behind it are shown too."""
    if shows_traceback():
        tell(traceback.format_exc().rstrip(), sys.stderr)
    tell(f"error: {text}", sys.stderr)
    sys.exit(2)


def system_error(error: OSError) -> str:
    """Describe an error of the system that no other part of the package has described better."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "this process may not open more files. Raise the limit, for example: ulimit -n 4096"
    what = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
    return f"{what}{error.strerror or error}. Check that the file and the current folder exist, and that you may read and write them"


def without_output(out: streams.Outlet) -> int:
    """Return the exit code of a command that succeeded: 0 if its output could be written. A run has told its user that it continues
    without it."""
    out.flush()
    if not out.lost or out.loss_is_told:
        return 0
    if isinstance(out.lost, BrokenPipeError):
        return READER_GONE
    tell(f"error: standard output is lost: {out.reason}. Repeat the command with an output that can be written", sys.stderr)
    return 2


def tell(text: str, where: TextIO | None = None) -> None:
    """Print text for people, which may quote files, models and errors."""
    where = where or sys.stdout
    print(streams.wrapped(printable(text), where), file=where, flush=True)


def loading(what: str, quiet: bool = False) -> None:
    """Answer before the import of torch, which takes seconds."""
    if not quiet:
        tell(f"loading {what} ...", sys.stderr)


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
        Path, typer.Option("--dir", help="Folder for the model, the data and the runs. An earlier demo in it is moved to before-1 there.")
    ] = Path("runs/demo"),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Teach a small model arithmetic on this machine: SFT, then GRPO. Takes about three minutes on two CPU cores."""
    loading("PyTorch", quiet)
    from fulltilt import demo as demonstration
    from fulltilt.observe.console import Console

    summary = demonstration.run(folder, Console(json=as_json, quiet=quiet, seconds_between_lines=1.0))
    in_words = f"reward {summary.reward_first:.2f} -> {summary.reward_last:.2f} in {summary.seconds:.0f} s"
    print(json.dumps(asdict(summary)) if as_json else in_words)
    if summary.reward_last < demonstration.LEARNED:
        tell(f"the reward should have reached {demonstration.LEARNED}: something is wrong with this installation", sys.stderr)
        raise typer.Exit(1)


@app.command()
def train(
    run: RunFile,
    overrides: Overrides = None,
    check: Annotated[bool, typer.Option("--check", help="Check the configuration, the reward and the data, then stop.")] = False,
    overlay: Annotated[Path | None, option("TUNED.toml", "Use the performance settings that `fulltilt tune` has written.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a model as RUN.toml describes. To resume an interrupted run from its last checkpoint, repeat the command."""
    loading(f"{run} and what it names", quiet)
    from fulltilt import api
    from fulltilt.observe.console import Console

    if overlay is not None:
        from fulltilt.loop import tuning

        applied = tuning.with_overlay(run, overrides or (), overlay)
        overrides = applied.overrides
        for note in applied.notes if not quiet else ():
            tell(note, sys.stderr)
    if check:
        api.check(run, overrides=overrides or ())
        if as_json or not quiet:
            tell(json.dumps({"ok": True}) if as_json else f"{run}: no mistakes found")
        return
    console = Console(json=as_json, quiet=quiet)
    show_result(api.train(run, overrides=overrides or (), console=console), console)


def show_result(result: TrainResult, console: Console) -> None:
    if result.interrupted:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a terminal that closes sends it more than once, and the process is ending anyway
        saved = "and saved" if result.steps else "with nothing to save yet"
        tell(f"stopped after step {result.steps} {saved}", sys.stderr)
        tell(f"resume with: {shlex.join(['fulltilt', *sys.argv[1:]])}", sys.stderr)
        raise typer.Exit(130)
    console.note(
        f"done: {many(result.steps, 'step')} in {from_here(result.folder)}"
        + (f", reward {result.reward_first:.3f} -> {result.reward_last:.3f}" if result.reward_first is not None else "")
        + f", {result.seconds:.0f} s, {result.tokens_per_s:.0f} tokens/s"
    )
    if result.model:
        console.note(f"model: {from_here(result.model)}")
        console.note(f"try it: {shlex.join(['fulltilt', 'chat', str(from_here(result.folder))])}")


def from_here(path: Path) -> Path:
    """Return the path as a user would type it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


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
    loading(f"{run} and what it names", quiet)
    from fulltilt import api
    from fulltilt.observe.console import Console

    # Only the result is for standard output.
    people = Console(quiet=quiet, stdout=sys.stderr)
    with api.said_as({"latest=True": "--latest", "best=True": "--best"}):
        result = api.evaluate(run, overrides=overrides or (), console=people, latest=latest, best=best)
    if as_json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        tell(f"{name}  {value:.4f}" if isinstance(value, float) else f"{name}  {value}")


@app.command()
def chat(
    model: Annotated[
        str, argument("MODEL|RUN_DIR", "A model's folder or hub name, or the folder of a run: its newest checkpoint answers.")
    ],
    system: Annotated[str | None, option("TEXT", "The system message.")] = None,
    step: Annotated[int | None, option("N", "Use the checkpoint of this step of the run.", min=0)] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Continue each line as it is, without the chat template.")] = False,
    max_new_tokens: Annotated[
        int | None, option("N", "Most tokens of an answer. Default: 512, or half of the model's positions.", min=1)
    ] = None,
    temperature: Annotated[float, option("T", "Sampling temperature; 0: always the most likely token.")] = 0.7,
    seed: Annotated[int, option("N", "Seed of the sampling.", min=0)] = 0,
) -> None:
    """Talk to a model. Lines are read from standard input, also from a pipe; answers go to standard output, notes to standard error."""
    loading(model)
    from fulltilt import chat as conversation

    options = conversation.ChatOptions(model, step, system, plain, max_new_tokens, temperature, seed)
    conversation.chat(options, typed_lines(), sys.stdout, partial(tell, where=sys.stderr))


def typed_lines() -> Iterator[str]:
    """Yield lines of standard input, after a prompt on a terminal. Bytes that are not text become replacement characters."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import readline  # noqa: F401 (gives `input` its editing and its history)

    while True:
        try:
            yield input("> ")
        except EOFError:
            return
        except KeyboardInterrupt:
            print()


@app.command()
def doctor(
    run: Annotated[
        Path | None, argument("RUN_DIR", "The folder of a run: where its time and memory went, and what would help most.")
    ] = None,
    address: Annotated[
        str | None, option("HOST:PORT|auto", "A Ray cluster, as cluster.address has it. Adds what its machines have, and how they differ.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Report what is installed and usable here, and what is missing. With RUN_DIR, explain how a run spends its time and memory."""
    if run is not None and not run.is_dir():
        what = "is a file" if run.exists() else "no such folder"
        raise UserError(f"{run}: {what}. Give the folder of a run (its run.dir), or nothing")
    if run is not None and (run / "config.json").is_file():
        raise UserError(f"{run}: is the folder of a model. Give the folder of a run (its run.dir), or nothing")
    if run is not None and not any((run / name).exists() for name in ("metrics.jsonl", RUN_MARKER)):
        raise UserError(f"{run}: is not the folder of a run. Give the folder of a run (its run.dir), or nothing")
    if run is not None and address is not None:
        raise UserError("doctor: RUN_DIR and --address are two questions. Give one of them")
    if run is None:
        loading("PyTorch")
    from fulltilt import doctor as examination

    report = examination.examine_run(run) if run else examination.examine(address)
    if as_json:
        print(json.dumps(report.as_json(), indent=1))
    else:
        tell("\n".join(report.lines()))
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
    for path in drawing.write(drawing.read(sources, metric or ()), out, against, smooth, title, sources):
        tell(f"wrote {path}")


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
    bench.command(name, help=words)(command)


STEP_MODEL = Annotated[str | None, option("SHAPE", "0.5B, 1.5B, 7B, 2.7B-A0.5B (experts) or small. Default: 0.5B on cuda, small on cpu.")]
STEP_WORKLOAD = Annotated[str | None, option("NAME", "step or small: see docs/bench.md. Default: step on cuda, small on cpu.")]
STEP_REPEATS = Annotated[int | None, option(None, "Measured steps after the first. Default: 3 on cuda, 2 on cpu.", "--steps", min=1)]

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
    model=STEP_MODEL,
    workload=STEP_WORKLOAD,
    repeats=STEP_REPEATS,
)
add_benchmark(
    "settings",
    "Measure whole GRPO steps under auto and under settings by hand, in turns, and how well the run predicted their seconds and memory.",
    "overrides tried model device workload prompts samples new_tokens repeats turns seed",
    model=STEP_MODEL,
    workload=STEP_WORKLOAD,
    repeats=STEP_REPEATS,
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
    from fulltilt.bench import peers

    loading("PyTorch", quiet)
    benchmark = peers.benchmark(name)  # before the imports that take seconds: one that is not installed is refused at once
    from fulltilt.bench import job as jobs
    from fulltilt.bench import report

    options = BenchOptions(**{field: value for field, value in given.items() if value is not None})
    with tempfile.TemporaryDirectory(prefix="fulltilt-bench-") as scratch, report.progress(quiet=quiet) as say:
        job = benchmark.prepare(options, Path(scratch))
        if out is not None:
            jobs.check_writable("--out", out)
        found = benchmark.run(job, say)
    written = json.dumps(found, indent=1)
    print(written if as_json else printable(benchmark.table(found)))
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
    loading("PyTorch", quiet)
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
        tell(f"stopped after {many(len(records), 'proof')}", sys.stderr)
        raise stopped
    if any(record.holds is False for record in records):
        raise typer.Exit(1)


@app.command()
def plan(
    run: Annotated[Path | None, argument("RUN.toml", "The configuration of a run. Its model, data and folders need not exist.")] = None,
    overrides: Overrides = None,
    table: Annotated[list[Path] | None, option("FILE.csv", "A published table of step times: predict its rows. May be repeated.")] = None,
    describe: Annotated[Path | None, option("OTHER.toml", "A run of another system, described by hand: docs/planning.md.")] = None,
    hardware: Annotated[
        str | None, option("8xH100-80GB|FILE.toml", "GPUs to plan for. Default: those of the description or table, or H100s.")
    ] = None,
    shape: Annotated[str | None, option("NAME", "The model, by a well-known name such as Qwen2.5-7B, or a folder.")] = None,
    response_tokens: Annotated[float | None, option("MEAN", "Mean tokens of a response. Default: a quarter of the longest.", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Predict memory and time of a run, by phase, without a GPU, weights or data. Exit code 3: it does not fit."""
    if sum(given is not None for given in (run, describe)) + bool(table) != 1:
        raise UserError("plan: give one of RUN.toml, --table FILE.csv and --describe OTHER.toml; KEY=VALUE goes with RUN.toml alone")
    if table and response_tokens is not None:
        raise UserError("plan: --response-tokens does not go with --table, whose lengths follow from its rows. Leave one of them out")
    from fulltilt.tune import command

    if table:
        found, text = command.tables(table, hardware, shape)
        print(json.dumps(found, indent=1) if as_json else printable(text))
        return
    report = (
        command.described(describe, hardware, shape, response_tokens)
        if describe
        else command.planned(run or Path(), overrides or (), hardware, shape, response_tokens)
    )
    if as_json:
        print(json.dumps(report.as_json(), indent=1))
    else:
        tell("\n".join(report.lines()))
    if not report.fits:
        raise typer.Exit(3)


@app.command()
def tune(
    run: RunFile,
    overrides: Overrides = None,
    out: Annotated[Path, option("TUNED.toml", "The overlay to write. Default: tuned.toml.")] = Path("tuned.toml"),
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each candidate, in two turns.")] = 4,
    finalists: Annotated[int, typer.Option(min=1, help="Most settings to measure beside what fulltilt chooses by itself.")] = 4,
    hardware: Annotated[str | None, option("8xH100-80GB|FILE.toml", "Only predict, for these devices, which need not be here.")] = None,
    shape: Annotated[
        str | None, option("NAME", "With --hardware: the model, by a well-known name such as Qwen2.5-7B, or a folder.")
    ] = None,
    response_tokens: Annotated[
        float | None, option("MEAN", "Mean tokens of a response. Default: as measured, or a quarter of the longest.", min=1)
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Search for faster performance settings, measure the best on the devices here, and write them as an overlay for `train --overlay`."""
    from fulltilt import config as configuration
    from fulltilt.tune import command

    if shape is not None and hardware is None:
        raise UserError("tune: --shape goes with --hardware: what is measured is the model of the run. Leave it out, or give --hardware")
    config = configuration.load(run, overrides or (), here=hardware is None)
    if missing := command.not_planned(config):
        raise UserError(f"tune: {missing}")
    sizes = None if hardware is None else command.named_shape(config.model.path if shape is None else shape)
    command.check_mean(config, sizes, response_tokens)
    loading(f"{run} and what it names" if hardware is None else "PyTorch", quiet)
    from fulltilt.bench import report
    from fulltilt.loop import tuning

    tuning.refuse_other_file(out)
    with report.progress(quiet=quiet) as say:
        if sizes is None:
            found = tuning.tune(config, steps=steps, finalists=finalists, response=response_tokens, say=say)
        else:
            cluster = command.cluster_for(config, hardware)
            found = tuning.predicted(config, sizes, cluster, finalists=finalists, response=response_tokens)
    tuning.write(out, found, shlex.join(["fulltilt", "tune", str(run), *(overrides or [])]))
    print(json.dumps(tuning.document(found), indent=1)) if as_json else tell("\n".join(tuning.table(found)))
    tell(f"wrote {out}; use it with: {shlex.join(['fulltilt', 'train', str(run), *(overrides or []), '--overlay', str(out)])}", sys.stderr)


@app.command()
def knobs(
    words: Annotated[list[str] | None, argument("WORD", "Show only those whose name or alias contains one of these words.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Explain every key of a run file, not only performance knobs.")] = False,
    as_json: Json = False,
) -> None:
    """List the performance knobs: their names here, in verl and in ChatLearn, and what each must change. With --all, every key."""
    from fulltilt import knobs as ledger

    listing = ledger.listing(words or [], everything=everything, as_json=as_json)
    (print if as_json else tell)(listing)


DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what each key becomes, and the run file. Needs no files, hub or GPUs.")]
Write = Annotated[Path | None, option("RUN.toml", "Save the run file, with where each key comes from. Nothing is overwritten.")]
Retune = Annotated[
    bool, typer.Option("--retune", help="Leave performance settings to auto, whatever is given; --dry-run shows both plans side by side.")
]
KeepEngine = Annotated[
    bool,
    typer.Option(
        "--keep-engine", help="Keep the engine that the command names, and refuse it if it is not built. Built beside the native one: hf."
    ),
]
PlannedFor = Annotated[
    str | None, option("GPUS", "GPUs to plan for with --retune, and whose memory counts: 8xH100. Default: H100.", "--hardware")
]
GpuMemory = Annotated[float | None, option("GIB", "Memory of one GPU. Default: that of this machine's.", min=1)]
Set = Annotated[
    list[str] | None, option("KEY=VALUE", "Override a key of the run file, for example run.steps=10. May be repeated.", "--set")
]
THEIRS = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": True}


@app.command(context_settings=THEIRS)
def verl(
    ctx: typer.Context,
    dry_run: DryRun = False,
    write: Write = None,
    retune: Retune = False,
    hardware: PlannedFor = None,
    gpu_memory: GpuMemory = None,
    keep_engine: KeepEngine = False,
    settings: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run what a verl command asks for: give its arguments as they stand, or SCRIPT.sh, which is read and never executed.

    Every key is answered: honoured, means nothing here, or refused. docs/coming-from.md has examples."""
    from fulltilt.compat import command

    seen = surroundings(hardware, gpu_memory, keep_engine)
    kept, retuned = (command.overridden(command.from_verl(ctx.args, seen, retune=each), settings or ()) for each in (False, retune))
    run_translated(retuned, kept if retune else None, hardware, dry_run, write, as_json, quiet)


@app.command(context_settings=THEIRS)
def chatlearn(
    ctx: typer.Context,
    config: Annotated[Path, argument("CONFIG.yaml", "ChatLearn's configuration, or a script. Overrides may follow: models.policy.seed=7")],
    dry_run: DryRun = False,
    write: Write = None,
    retune: Retune = False,
    hardware: PlannedFor = None,
    gpu_memory: GpuMemory = None,
    keep_engine: KeepEngine = False,
    settings: Set = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run what a configuration of ChatLearn's asks for. Every key is answered: honoured, means nothing here, or refused."""
    from fulltilt.compat import command

    seen = surroundings(hardware, gpu_memory, keep_engine)
    both = (command.from_chatlearn(config, ctx.args, seen, retune=each) for each in (False, retune))
    kept, retuned = (command.overridden(each, settings or ()) for each in both)
    run_translated(retuned, kept if retune else None, hardware, dry_run, write, as_json, quiet)


def surroundings(hardware: str | None, gpu_memory: float | None, keep_engine: bool) -> Surroundings:
    """Return what a translation may look at: files, a GPU's memory as it is or as the user says, and the sizes of well-known models."""
    from dataclasses import replace

    from fulltilt.compat.surroundings import Surroundings
    from fulltilt.hardware import Cluster
    from fulltilt.tune.shapes import find_shape

    told = int(gpu_memory * 2**30) if gpu_memory else Cluster.parse(hardware, 1).gpu.memory if hardware else None
    return replace(Surroundings.here(told, find_shape), keep_engine=keep_engine)


def run_translated(
    translation: Translation, kept: Translation | None, hardware: str | None, dry_run: bool, write: Path | None, as_json: bool, quiet: bool
) -> None:
    """Show a translation, save its run file, or train. `kept`: the same run with its performance settings, to plan both side by side."""
    from fulltilt.compat import command

    plans: dict[str, Any] = {}
    lines: list[str] = []
    if kept is not None and not quiet:
        from fulltilt.tune.command import beside

        plans, lines = beside({"as given": command.config_of(kept), "--retune": command.config_of(translation)}, hardware)
    if write is not None:
        try:
            with open(write, "x", encoding="utf-8") as file:
                file.write(command.run_file(translation))
        except FileExistsError:
            raise UserError(f"{write} exists already, and nothing is overwritten. Choose another name") from None
        tell(f"wrote {write}", sys.stderr)
    if dry_run:
        shown = "\n\n".join([command.shown(translation), *filter(None, ["\n".join(lines)]), "the run file:", command.run_file(translation)])
        document = command.as_document(translation) | ({"plans": plans} if plans else {})
        print(json.dumps(document, indent=1, default=str)) if as_json else tell(shown)
    elif not quiet and not as_json:
        tell("\n\n".join([command.shown(translation), *filter(None, ["\n".join(lines)])]), sys.stderr)
    if translation.problems and not dry_run:
        told = "\n".join(f"  {number}. {text}" for number, text in enumerate(translation.problems, 1))
        raise UserError(f"{translation.program}: {many(len(translation.problems), 'key')} cannot be honoured:\n{told}\n--dry-run shows all")
    if dry_run or write is not None:
        return
    loading("the run and what it names", quiet)
    from fulltilt import api
    from fulltilt.observe.console import Console

    console = Console(json=as_json, quiet=quiet)
    show_result(api.train(translation.tables, console=console), console)


@app.command()
def init(
    task: Annotated[str, argument("TASK", "grpo, ppo, dapo, sft, or reward: GRPO with a reward function of your own.")],
    file: Annotated[Path | None, argument("FILE", "The run file to write. Default: TASK.toml.")] = None,
    model: Annotated[str | None, option("PATH", "Folder or hub name of the model.")] = None,
    data: Annotated[str | None, option("PATH", "The training data.")] = None,
) -> None:
    """Write a run file for a task, with each key explained. Nothing is overwritten."""
    from fulltilt import starter

    for text in starter.write(task, file, model, data):
        tell(text)


if __name__ == "__main__":
    main()
