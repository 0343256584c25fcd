"""The session: cases and kills, each in children forked from one process, and the report."""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import pkgutil
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import cases
import child
import tree
from kills import kill_all

import fulltilt
from fulltilt.memory.host import usable_cores

CASES = 1000
WARM = """
torch transformers transformers.models.qwen2.modeling_qwen2 transformers.models.auto.modeling_auto peft pyarrow.parquet pyarrow.csv
pyarrow.ipc matplotlib.figure matplotlib.backends.backend_agg models
"""


def warm_up() -> None:
    """Import all that commands need. Nothing is computed: a process that has started threads cannot be forked safely."""
    ours = [each.name for each in pkgutil.walk_packages(fulltilt.__path__, "fulltilt.") if not each.name.endswith("__main__")]
    for name in [*WARM.split(), *ours]:
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"not imported beforehand: {name} ({error})")
    gc.collect()
    gc.freeze()


def forked(body: Callable[[], None]) -> int:
    """Run `body` in a forked child; its process id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return pid


def prepare(folder: Path) -> tree.Templates:
    """The templates, made in a child."""

    def run_here(root: Path, arguments: list[str]) -> int:
        ended = child.run(root, arguments, {}, child.Surroundings(), deadline_s=300)
        if ended.code:
            print(ended.out, ended.error)
        return ended.code

    def body() -> None:
        child.become_reaper()
        tree.make_templates(folder, run_here)

    _, status = os.waitpid(forked(body), 0)
    if status:
        sys.exit("the templates could not be made")
    return tree.Templates(folder)


def fuzz(numbers: Sequence[int], seed: int, scratch: Path, processes: int, options: argparse.Namespace) -> list[cases.Result]:
    templates = prepare(scratch / "templates")
    reader, writer = os.pipe()
    results = scratch / "results"
    results.mkdir()

    def serve() -> None:
        os.close(writer)
        child.become_reaper()
        while order := os.read(reader, 4):
            number = int.from_bytes(order, "little")
            root = scratch / f"case-{number}"
            try:
                result = cases.run(seed, number, root, templates, options.deadline)
            except Exception:
                verdict = cases.Verdict("the fuzzer itself failed", traceback.format_exc())
                result = cases.Result(number, (), 0, 0.0, (verdict,), "", "")
            (results / f"{number}.new").write_text(json.dumps(asdict(result)), errors="backslashreplace")
            (results / f"{number}.new").rename(results / f"{number}.json")
            if not options.keep:
                cases.remove(root)

    servers = [forked(serve) for _ in range(processes)]
    os.close(reader)
    begin = time.monotonic()
    show_progress = progress(results, len(numbers), options)
    for number in numbers:
        os.write(writer, number.to_bytes(4, "little"))
        next(show_progress)
    os.close(writer)
    while servers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in servers:
            servers.remove(pid)
            if status:
                print(f"a process of the fuzzer ended with {os.waitstatus_to_exitcode(status)}")
        next(show_progress)
        time.sleep(0.1)
    next(show_progress)
    found = [read(results / f"{number}.json") for number in numbers if (results / f"{number}.json").exists()]
    print(f"{len(found)} cases in {time.monotonic() - begin:.0f} s")
    return found


def read(path: Path) -> cases.Result:
    given = json.loads(path.read_text())
    return cases.Result(**{**given, "said": tuple(given["said"]), "verdicts": tuple(cases.Verdict(**each) for each in given["verdicts"])})


def progress(results: Path, count: int, options: argparse.Namespace) -> Iterator[None]:
    """A line for each failing case as soon as it has ended."""
    seen: set[str] = set()
    while True:
        for path in sorted(results.glob("*.json")):
            if path.name not in seen:
                seen.add(path.name)
                result = read(path)
                if result.verdicts and not options.quiet:
                    print(f"{len(seen)}/{count} case {result.number}: {result.verdicts[0].kind}", flush=True)
        yield


def report(results: Sequence[cases.Result], seed: int) -> int:
    """Failures by class, each with one case; the number of failing cases."""
    failing = [result for result in results if result.verdicts]
    kinds = Counter(kind for result in failing for kind in {verdict.kind for verdict in result.verdicts})
    for kind, count in kinds.most_common():
        first = next(result for result in failing if any(verdict.kind == kind for verdict in result.verdicts))
        detail = next(verdict.detail for verdict in first.verdicts if verdict.kind == kind).strip().splitlines() or [""]
        line = detail[0] if kind.startswith(("a ", "hangs")) else detail[-1]
        print(f"\n{count} x {kind}\n    {line[:300]}\n    {'; '.join(first.said)[:600]}")
        print(f"    python tests/faults --seed {seed} --case {first.number}")
    codes = ", ".join(f"{count} with exit code {code}" for code, count in sorted(Counter(result.code for result in results).items()))
    slowest = max(results, key=lambda result: result.seconds, default=None)
    print(f"\nfaults: {len(results)} cases (seed {seed}): {codes}; {len(failing)} failures in {len(kinds)} classes", end="")
    print(f"; slowest: case {slowest.number}, {slowest.seconds:.0f} s" if slowest else "")
    return len(failing)


def show(result: cases.Result) -> None:
    print(f"case {result.number}: exit code {result.code} after {result.seconds:.1f} s")
    for text in result.said:
        print(f"  {text}")
    print(f"---- standard output\n{result.out[-6000:]}\n---- standard error\n{result.error[-6000:]}")
    for verdict in result.verdicts:
        print(f"---- {verdict.kind}\n{verdict.detail}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python tests/faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="all chance comes from it (default: 1)")
    parser.add_argument("--cases", type=int, default=CASES, help=f"how many (default: {CASES})")
    parser.add_argument("--case", type=int, action="append", help="only this one, and show all that it said; may be repeated")
    parser.add_argument("--kills", type=int, default=0, help="kill training runs so many times, and compare their files (default: 0)")
    parser.add_argument("--processes", type=int, default=min(8, usable_cores()), help="cases at a time (default: one per core)")
    parser.add_argument("--deadline", type=float, default=cases.DEADLINE_S, help="seconds after which a case hangs (default: %(default)g)")
    parser.add_argument("--keep", action="store_true", help="keep the folders of the cases, and say where they are")
    parser.add_argument("--quiet", action="store_true", help="print only the summary")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all results here, as JSON")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if sys.platform != "linux":
        print("faults: skipped. They need Linux, whose processes can adopt what a command leaves behind")
        return
    scratch = Path(tempfile.mkdtemp(prefix="fulltilt-faults-"))
    scratch.chmod(0o755)
    numbers = options.case or range(options.cases)
    failures = 0
    try:
        warm_up()
        if numbers:
            results = fuzz(numbers, options.seed, scratch, min(options.processes, len(numbers)), options)
            failures += len(numbers) - len(results)
            if options.out:
                options.out.write_text(json.dumps([asdict(result) for result in results], indent=1), errors="backslashreplace")
            if options.case:
                for result in results:
                    show(result)
            failures += report(results, options.seed)
        if options.kills:
            failures += kill_all(options.kills, options.seed, scratch / "kills", options.processes, forked)
    finally:
        if options.keep:
            print(f"kept: {scratch}")
        else:
            shutil.rmtree(scratch, ignore_errors=True)
    sys.exit(bool(failures))
