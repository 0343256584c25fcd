"""A case: a scenario, a command and one to three mutations, all from a seed and a number; and what may not be when it has ended.

Guaranteed: the same seed and number give the same tree, command and surroundings. What a command owes its user:
- it ends, with an exit code that README.md lists, and never with a traceback or by a signal;
- nothing of the user's has changed: whatever was there before is there after, byte for byte, except the files of an earlier run in its
  run folder; new files are in the run folder, or where the command was told to write;
- no process is left behind, and no file in TMPDIR;
- no internal error is told as a mistake of the user's: exit code 2 with the name of such an error quotes code that is not ours;
- no control character of data, rewards or models reaches its output; no library's warning does.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import random
import re
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import child
import lists
import mutations
from tree import FINISHED, SCENARIOS, Entry, Templates, Tree, digest

DEADLINE_S = 240.0
LONG_S = 12.0  # after so many seconds a run that a mutation made long is told to end
LONGEST_MESSAGE = 20_000  # characters

TRAIN, CHECK = ["train", "run.toml"], ["train", "run.toml", "--check"]
EVAL, LATEST = ["eval", "run.toml"], ["eval", "run.toml", "--latest"]
PLOT = ["plot", "run", "--out", "plot.json"]
COMMANDS: dict[str, tuple[tuple[int, list[str]], ...]] = {
    "config": ((8, TRAIN), (4, CHECK), (3, EVAL)),
    "data": ((5, TRAIN), (4, CHECK), (2, EVAL)),
    "model": ((6, TRAIN), (3, CHECK), (2, EVAL)),
    "place": ((8, TRAIN), (1, CHECK), (1, EVAL)),
    "run": ((8, TRAIN), (3, LATEST), (2, PLOT), (1, ["plot", "run", "--out", "plot.png"]), (1, CHECK)),
    "meanwhile": ((1, TRAIN),),
    "reward": ((6, TRAIN), (3, CHECK), (2, EVAL)),
    "surroundings": ((8, TRAIN), (2, EVAL), (2, CHECK), (2, PLOT), (1, ["knobs"]), (1, ["knobs", "--json"]), (1, ["--help"])),
    "words": ((1, []),),
}
WEIGHTS = {"config": 20, "data": 18, "model": 22, "place": 6, "run": 14, "meanwhile": 3, "reward": 12, "surroundings": 10, "words": 3}
# Groups whose mutations also befall a case of another group.
COMBINED = ("config", "surroundings", "data", "reward", "model", "run")


@dataclass(frozen=True)
class Verdict:
    """One thing that may not be. `kind` groups failures; it holds no name of a case."""

    kind: str
    detail: str


@dataclass(frozen=True)
class Result:
    number: int
    said: tuple[str, ...]  # scenario, mutations and command, in words
    code: int
    seconds: float
    verdicts: tuple[Verdict, ...]
    out: str
    error: str


def make(seed: int, number: int, root: Path, templates: Templates) -> Tree:
    """The tree of a case. The first ones are whole: each scenario must succeed when nothing is wrong."""
    chance = random.Random(f"{seed}/{number}")
    if 0 <= number < len(SCENARIOS):
        name = list(SCENARIOS)[number]
        tree = Tree.make(root, templates, name)
        tree.said.append(f"scenario {name}, nothing changed")
        tree.arguments = list(TRAIN)
        return tree
    group = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    scenario = chance.choice(
        FINISHED if group in ("run", "words") else [name for name in SCENARIOS if name not in ("sft", "reward-model") or group != "reward"]
    )
    tree = Tree.make(root, templates, scenario)
    weights, commands = zip(*COMMANDS[group], strict=True)
    tree.arguments = list(chance.choices(commands, weights)[0])
    earlier = group in ("run", "words") or (
        scenario in FINISHED and group in ("surroundings", "config", "reward") and chance.random() < 0.3
    )
    tree.said.append(f"scenario {scenario}{', run before' if earlier else ''}")
    if earlier:
        tree.with_earlier_run(scenario)
    if group == "words":
        tree.arguments = list(chance.choice(lists.COMMANDS))
    else:
        change(tree, group, chance)
    if tree.arguments[:1] in (["plot"], ["init"]):
        tree.outputs = outputs(tree)
    return tree


def outputs(tree: Tree) -> tuple[Path, ...]:
    """What `plot` and `init` may write: files named on the command line, or by default, that are not there yet."""
    named = [text for text in tree.arguments[1:] if len(text) < 200 and "\0" not in text]
    names = ("plot.json", "plot.png", "x.png", "x.json", *named, *(f"{name}.toml" for name in named))
    return tuple(tree.root / name for name in names if not (tree.root / name).exists())


def change(tree: Tree, group: str, chance: random.Random) -> None:
    groups = [group, *(chance.choice((group, *COMBINED)) for _ in range(chance.choice((0, 0, 0, 1, 1, 2))))]
    for each in groups:
        if each == "run" and not tree.ours:
            continue
        if each == "reward" and "workers" not in tree.tables.get("reward", {}):  # SFT has no reward, and a reward model calls no function
            continue
        tree.said.append(f"{each}: {mutations.choose(each, chance)(tree, chance)}")
    if chance.random() < 0.15 and tree.arguments[:1] != ["plot"]:
        tree.arguments.append(chance.choice(("--json", "--quiet")))


def run(seed: int, number: int, root: Path, templates: Templates, deadline_s: float = DEADLINE_S) -> Result:
    tree = make(seed, number, root, templates)
    tree.write()
    find_run_folder(tree)
    keep_at_home(tree)
    for name, mode in tree.modes.items():
        with contextlib.suppress(OSError):
            (root / name).chmod(mode)
    with held(tree.held):
        before = digest(root)
        ended = child.run(
            root, tree.arguments, tree.environment, child.Surroundings(**tree.surroundings), deadline_s=deadline_s,
            end_after_s=LONG_S if tree.long else None, meanwhile=tree.meanwhile, run_dir=tree.run_dir,
        )  # fmt: skip
        after = digest(root)
    if ended.code < 0:  # a signal leaves no time to tidy up
        after = {path: entry for path, entry in after.items() if root / "tmp" not in path.parents}
    verdicts = (*judge_end(tree, ended, number < len(SCENARIOS)), *judge_output(tree, ended), *judge_files(tree, before, after))
    said = (*tree.said, "fulltilt " + " ".join(text if len(text) < 200 else f"{text[:60]}..." for text in tree.arguments))
    return Result(number, said, ended.code, ended.seconds, verdicts, ended.out, ended.error)


def find_run_folder(tree: Tree) -> None:
    """Where a run file that was edited as text leads."""
    if tree.toml is not None:
        with contextlib.suppress(ValueError, AttributeError, RecursionError):
            named = tomllib.loads(tree.toml.decode("utf-8-sig")).get("run", {}).get("dir", "runs/run")
            if named != "run":
                tree.run_dir = mutations.folder.writable_place(tree.root / named, tree.root) if isinstance(named, str) else None


def keep_at_home(tree: Tree) -> None:
    """Without HOME, `~` would lead to the home of the user who fuzzes."""
    text = (tree.root / "run.toml").read_bytes().decode("latin-1") + " ".join(tree.arguments)
    if "HOME" in tree.environment and "~" in text:
        del tree.environment["HOME"]


@contextlib.contextmanager
def held(path: Path | None) -> Iterator[None]:
    """The lock of a run folder, as another run would hold it."""
    if path is None or not path.parent.is_dir() or (path.exists() and not path.is_file()):
        yield
        return
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def remove(root: Path) -> None:
    for folder, folders, _ in os.walk(root):
        for name in folders:
            with contextlib.suppress(OSError):
                os.chmod(os.path.join(folder, name), 0o700, follow_symlinks=True)
    shutil.rmtree(root, ignore_errors=True)
    shutil.rmtree(root.with_name(f"{root.name}.said"), ignore_errors=True)


# ---- verdicts ----------------------------------------------------------------------------------------------------------------------------

FRAME = re.compile(r'^ *File "([^"]*)", line (\d+), in (.*)$', re.MULTILINE)
STUCK_FRAME = re.compile(r'^  File "([^"]*)", line (\d+) in (.*)$', re.MULTILINE)
WARNING = re.compile(r"^(?:.*\.py:\d+: \w*Warning: |\[transformers\]).*$", re.MULTILINE)
INTERNAL = re.compile(r"\b(?:Attribute|Type|Key|Index|Name|Assertion|Unbound\w*)Error\b")
# How messages begin that quote what the user's functions and templates raise, and libraries for the files of a model or a checkpoint.
QUOTING = re.compile(
    r"reward|step \d+: .* reward calls failed|algorithm\.|.*\btemplate\b|loading \S+ failed"
    r"|\w+\.path: .*(?:could not be|cannot be run here|does not fit)"
    r"|.*manifest\.json is not readable|.*state\.json is not as fulltilt writes it"
)
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x80-\x9f\u202a-\u202e\u2066-\u2069]")


def in_package(path: str) -> bool:
    return "/fulltilt/" in path and "site-packages" not in path


def place(frames: list[tuple[str, str, str]]) -> str:
    """The innermost frame of the package, and where it led."""
    ours = [frame for frame in frames if in_package(frame[0])]
    if not ours:
        return "outside the package" + (f" ({Path(frames[-1][0]).name} {frames[-1][2]})" if frames else "")
    path, line, function = ours[-1]
    below = "" if frames[-1] == ours[-1] else f" in {Path(frames[-1][0]).name} {frames[-1][2]}"
    return f"{path.partition('/fulltilt/')[2]}:{line} {function}{below}"


def judge_end(tree: Tree, ended: child.Ended, whole: bool) -> Iterator[Verdict]:
    for text in ended.left:
        yield Verdict("a process is left behind", text)
    if ended.processes:
        yield Verdict("starts too many processes", f"{ended.processes} after {ended.seconds:.0f} s")
        return
    if ended.stuck_at or (ended.told_to_end and ended.code == -9):
        frames = STUCK_FRAME.findall(ended.stuck_at)[::-1]
        yield Verdict(f"hangs at {place(frames)}", ended.stuck_at[-2000:])
        return
    allowed = {0, 2, 130}
    if tree.arguments[:1] == ["doctor"]:
        allowed.add(1)
    if {"stdout", "stderr"} & tree.surroundings.keys():
        allowed |= {1, 141}
    if ended.told_to_end:
        allowed.add(-15)  # before training begins, SIGTERM has nothing to save
    if whole:
        allowed = {0}
    if "Traceback (most recent call last)" not in ended.error + ended.crash and ended.code not in allowed:
        yield Verdict(f"exit code {ended.code}", ended.error[-1500:])


def judge_output(tree: Tree, ended: child.Ended) -> Iterator[Verdict]:
    both = ended.out + ended.error + ended.crash
    if "Traceback (most recent call last)" in both:
        last = both[both.rindex("Traceback (most recent call last)") :]
        frames = FRAME.findall(last)
        error = re.findall(r"^(\w[\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Group|StopIteration)?)(?::|$)", last, re.MULTILINE)
        yield Verdict(f"traceback: {error[-1] if error else '?'} at {place(frames)}", last[-3000:])
        return
    for words in ("Fatal Python error", "Exception ignored", "Segmentation fault"):
        if words in both:
            yield Verdict(f"says {words!r}", both[max(0, both.index(words) - 200) :][:1500])
    if not tree.surroundings.get("warnings") and (found := WARNING.search(both)):
        yield Verdict(f"a library's warning: {re.sub(r'[0-9]+', '#', found[0].rpartition('py:')[2])[:100]}", found[0])
    terminal = "terminal" in tree.surroundings.values()
    if found := re.search(r"\x1b\]0;owned" if terminal else CONTROL, both):
        yield Verdict("a control character in the output", repr(both[max(0, found.start() - 200) : found.end() + 50]))
    shown = tree.surroundings.get("stderr", "file") == "file" and tree.surroundings.get("file_bytes", 2**20) >= 4096
    if ended.code == 2 and shown and not re.search(r"error:|Usage:", ended.error, re.IGNORECASE):
        yield Verdict("exit code 2 without a message", ended.error[-500:])
    if ended.code == 2:
        yield from judge_blame(ended.error)
    if ended.code == 2 and len(ended.error) > LONGEST_MESSAGE:
        yield Verdict("a very long message", f"{len(ended.error)} characters: {ended.error[:500]}")
    if "--json" in tree.arguments and ended.code == 0 and tree.surroundings.get("stdout", "file") == "file":
        yield from judge_json(tree, ended.out)


def judge_blame(error: str) -> Iterator[Verdict]:
    for line in error.splitlines():
        if (found := INTERNAL.search(line)) and not QUOTING.match(re.sub(r"^(?:error: |warning: |\d+\. |\s)+", "", line)):
            yield Verdict(f"an internal error told as the user's: {found[0]}", line[:1500])


def judge_json(tree: Tree, out: str) -> Iterator[Verdict]:
    if "--help" in tree.arguments:
        return
    try:
        json.loads(out)
    except ValueError:
        try:
            for line in out.splitlines():
                json.loads(line)
        except ValueError:
            yield Verdict("standard output is no JSON under --json", out[:500])


def judge_files(tree: Tree, before: dict[Path, Entry], after: dict[Path, Entry]) -> Iterator[Verdict]:
    if tree.meanwhile:
        before = {path: entry for path, entry in before.items() if tree.run_dir not in (path, *path.parents)}
        after = {path: entry for path, entry in after.items() if not ({tree.run_dir, tree.root / "renamed"} & {path, *path.parents})}
    for kind, names in sorted(changes(tree, before, after).items()):
        yield Verdict(kind, ", ".join(sorted(names)[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else ""))
    if tree.history and (lost := lost_history(tree, before, after)):
        yield Verdict("the earlier run's metrics or rollouts are lost", ", ".join(lost))


def lost_history(tree: Tree, before: dict[Path, Entry], after: dict[Path, Entry]) -> list[str]:
    """The earlier run's metrics and rollouts whose bytes are nowhere any more."""
    run, contents = tree.root / "run", {hashlib.sha256().hexdigest(), *(entry[2] for entry in after.values())}  # an empty file has none
    history = {path for path in tree.ours if path == run / "metrics.jsonl" or path.parent == run / "rollouts"}
    return [str(path.relative_to(tree.root)) for path in sorted(history & before.keys()) if before[path][2] not in contents]


def changes(tree: Tree, before: dict[Path, Entry], after: dict[Path, Entry]) -> dict[str, list[str]]:
    """What may not have changed or come, by kind."""
    found: dict[str, list[str]] = {}
    for path, entry in before.items():
        now = after.get(path)
        if now != entry and not tree.may_change(path, new=False):
            how = "is gone" if now is None else "has changed" if now[2] != entry[2] else "has another kind or mode"
            found.setdefault(f"a file of the user's {how}", []).append(str(path.relative_to(tree.root)))
    for path in after.keys() - before.keys():
        if not tree.may_change(path, new=True):
            inside = "TMPDIR" if tree.root / "tmp" in path.parents else "a folder of the user's"
            found.setdefault(f"a new file in {inside}", []).append(str(path.relative_to(tree.root)))
    return found
