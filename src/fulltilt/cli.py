"""The command line.

Enters: arguments. Leaves: an exit code: 0 done, 2 a mistake the user can mend (said without a traceback), 1 ours, 130 stopped by Ctrl-C
after saving. Guaranteed: torch is imported only by commands that need it, so help and configuration mistakes are quick.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import fulltilt
from fulltilt.records import UserError

if TYPE_CHECKING:
    from fulltilt.config import Config

app = typer.Typer(
    name="fulltilt",
    help="Post-train language models with reinforcement learning and supervised fine-tuning. Start with: fulltilt demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run's configuration; docs/reference.md lists every key.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values that replace the file's: run.steps=10", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="JSON for machines on standard output, words for people on standard error.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings and errors.")]


def main() -> None:
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"fulltilt {fulltilt.__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", callback=show_version, is_eager=True)] = False,
) -> None:
    pass


def read_config(path: Path, overrides: list[str] | None, *, logged: bool) -> Config:
    """`logged`: the command feeds the loggers that the run names, so they must be able to start."""
    from fulltilt import config
    from fulltilt.algo import presets
    from fulltilt.observe import loggers

    checks: list[config.Check] = [presets.mistakes, *([lambda given: loggers.check(given.log)] if logged else [])]
    return config.load(path, overrides or [], extra_checks=checks)


@app.command()
def demo(
    folder: Annotated[
        Path, typer.Option("--dir", help="Where model, data and runs go; what an earlier demo left there is replaced.")
    ] = Path("runs/demo"),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Teach a small model arithmetic on this machine: SFT, then GRPO, in about three minutes on two cores."""
    from fulltilt import demo as demonstration
    from fulltilt.observe.console import Console

    summary = demonstration.run(folder, Console(json=as_json, quiet=quiet))
    print(json.dumps(summary.as_json()) if as_json else summary.line())
    if summary.reward_last < demonstration.LEARNED:
        print(f"it should have reached {demonstration.LEARNED}: something is wrong here", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def train(
    run: RunFile,
    overrides: Overrides = None,
    check: Annotated[bool, typer.Option("--check", help="Only check configuration, reward and data, then stop.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train as RUN.toml says. A run that was stopped or killed goes on from its last checkpoint: give the same command again."""
    config = read_config(run, overrides, logged=True)
    if check:
        from fulltilt.cluster.local import find_mistakes
        from fulltilt.config import report

        if mistakes := find_mistakes(config):
            raise UserError(report(str(run), mistakes))
        print(json.dumps({"ok": True}) if as_json else f"{run}: no mistakes found")
        return
    from fulltilt import loop
    from fulltilt.observe.console import Console

    console = Console(json=as_json, quiet=quiet)
    summary = loop.train(config, console)
    if summary.interrupted:
        saved = "and saved" if summary.steps else "with nothing to save yet"
        print(f"stopped after step {summary.steps} {saved}", file=sys.stderr)
        print(f"go on with: {shlex.join(['fulltilt', *sys.argv[1:]])}", file=sys.stderr)
        raise typer.Exit(130)
    console.note(
        f"done: {summary.steps} steps in {summary.dir}"
        + (f", reward {summary.reward_first:.3f} -> {summary.reward_last:.3f}" if summary.reward_first is not None else "")
        + f", {summary.seconds:.0f} s, {summary.tokens_per_s:.0f} tokens/s"
    )


@app.command(name="eval")
def evaluate(
    run: RunFile,
    overrides: Overrides = None,
    latest: Annotated[bool, typer.Option("--latest", help="Evaluate the newest checkpoint of run.dir instead of model.path.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Score a model on data.val, sampling as the eval section says (for SFT: its loss there)."""
    config = read_config(run, overrides, logged=False)
    from fulltilt import loop
    from fulltilt.observe.console import Console

    result = loop.evaluate(config, Console(json=as_json, quiet=quiet), latest=latest)
    if as_json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name}  {value:.4f}" if isinstance(value, float) else f"{name}  {value}")


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what is installed and usable here, and why not."""
    from fulltilt import doctor as examination

    report = examination.examine()
    if as_json:
        print(json.dumps(report.as_json(), indent=1))
    else:
        print("\n".join(report.lines()))
    if report.broken:
        raise typer.Exit(1)


@app.command()
def knobs(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="WORD", help="Only knobs whose name or alias holds one of these.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """List the performance knobs: what each is called here, in verl and in ChatLearn, and what it must change."""
    from fulltilt import knobs as ledger

    names = {knob: (knob.name, *knob.verl, *knob.chatlearn) for knob in ledger.LEDGER}
    chosen = [knob for knob in names if not words or any(word in name for word in words for name in names[knob])]
    if not chosen:
        raise UserError(f"no knob or alias holds {' or '.join(words or [])}. `fulltilt knobs` lists all")
    if as_json:
        print(json.dumps([asdict(knob) | {"state": knob.state} for knob in chosen], indent=1))
    elif words:
        print("\n\n".join(ledger.describe(knob) for knob in chosen))
    else:
        print("\n".join(f"{knob.name:<36} {knob.state:<10} {knob.must_change}" for knob in chosen))
        print("\n`fulltilt knobs WORD` shows all about the knobs whose name or alias holds WORD")


if __name__ == "__main__":
    main()
