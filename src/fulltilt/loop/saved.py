"""The state that a checkpoint saves, and changes since it was written.

Enters: a checkpoint, the configuration of the run that would resume it, and the files that this configuration names. Leaves: `SavedState`,
and a `Change` for each kind of difference. Guaranteed: no model is loaded and nothing is written; the weights of a model are sampled, all
other files compared whole; values that an older version did not save are not compared; a model, an adapter or a template that has only
moved has not changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, NonNegativeInt

from fulltilt import config as configuration
from fulltilt import user_code
from fulltilt.cluster.worker import Reading
from fulltilt.data.order import Cursor
from fulltilt.folders import content_digests
from fulltilt.records import UserError
from fulltilt.schema import MEMORY, Config, keys, rewards_named, row_of, value_of, why_invalid
from fulltilt.settings import own_functions
from fulltilt.training.checkpoint import BestCheckpoint, Checkpoint
from fulltilt.words import listed

FileDigests = dict[str, str | dict[str, str]]  # by key or function: the digest of its file, or the digests of its files by name


class SavedState(BaseModel):
    """The `state.json` of a checkpoint, as far as the loop reads it. Fields that an older version did not save have defaults."""

    step: NonNegativeInt
    updates: NonNegativeInt
    skipped: NonNegativeInt
    critic: dict[str, NonNegativeInt] | None = None
    cursor: Cursor
    surplus: list[dict[str, Any]] = []
    reward_kl_coef: float | None = None
    health: dict[str, int] = {}
    first_entropy: float | None = None
    best: BestCheckpoint | None = None
    budgets: dict[str, NonNegativeInt]
    changed_budgets: dict[str, NonNegativeInt] = {}
    lowered_budgets: dict[str, NonNegativeInt] = {}
    data: str
    data_versions: list[str] = []
    val_data: str | None = None
    files: FileDigests = {}
    commits: dict[str, str] = {}
    metrics_offset: NonNegativeInt
    seconds: dict[str, float] = {}
    memory: list[dict[str, Reading]] | dict[str, Reading] = []  # by phase, per worker; an older version saved only the first's
    config: dict[str, Any]


def read_state(found: Checkpoint) -> SavedState:
    """Read a checkpoint's state. Its hash is right, so nothing has changed it by accident: a missing field was never there, or someone has
    edited it."""
    try:
        return SavedState.model_validate(found.state())
    except (ValueError, RecursionError) as error:
        raise edited(found, why_invalid(error)) from None


def edited(found: Checkpoint, why: object) -> UserError:
    remedy = f"Delete {found.path} to continue from the checkpoint before it, or use another run.dir"
    return UserError(f"{found.path}: its state.json is not as fulltilt writes it: {why}. {remedy}")


def file_digests(config: Config) -> FileDigests:
    """Return digests of each file with a user's function, and of files beside it that it imports, by the function's name; of each other
    file, and of the files in each folder of a model or an adapter, by the key that names it."""
    found: FileDigests = {}
    for key, path in ((key, value_of(config, key)) for key, field in keys().items() if row_of(field).names in ("file", "model", "adapter")):
        with contextlib.suppress(OSError):  # reported when the file is used
            if path and Path(path).is_dir():
                found[key] = content_digests(Path(path))
            elif path and row_of(keys()[key]).names == "file":
                found[key] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    functions = [function.code for function in own_functions(config).values()]
    for name in rewards_named(config.reward.function, config.reward.sources):
        with contextlib.suppress(user_code.UserCodeError):  # a function of fulltilt's own
            functions.append(user_code.locate(name))
    for code in functions:
        found |= {code.name: code.digest} if code.source else {}
        if code.source and code.given is None:  # the source of a function from Python includes everything that it uses
            imported = user_code.imported_files(code)
            found[f"files that {code.name} imports"] = {name: hashlib.sha256(source).hexdigest() for name, source in imported.items()}
    return dict(sorted(found.items()))


# ---- what has changed ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A difference from when the run was started: why the run is not resumed, and the warning for a user who insists."""

    refusal: str
    told: str


def changed_keys(config: Config, state: SavedState, files: FileDigests) -> list[str]:
    """Return the keys with other values, except for those that name the same content in another place."""
    differ = configuration.differences(state.config, configuration.snapshot(config))
    return [key for key in differ if key not in files or state.files.get(key) != files[key]]


def pinned_commits(config: Config, state: SavedState, changed: Collection[str]) -> dict[str, str]:
    """Return the commit, by hub name, of each model that the run has begun with, whatever the hub has now. `changed`: keys with other
    values; another revision is another commit."""
    return {name: commit for name, commit in state.commits.items() if name != config.model.path or "model.revision" not in changed}


def changes_since(config: Config, state: SavedState, files: FileDigests) -> Iterator[Change]:
    """Yield the changes of keys and of files' contents. `files`: the current digests."""
    where = f"{config.run.dir} holds a run at step {state.step} that was started with"
    saved, now, changed = state.config, configuration.snapshot(config), changed_keys(config, state, files)
    if changed:
        values = ", ".join(f"{key} ({shown(saved[key])}, now {shown(now[key], 'other rows given from Python')})" for key in changed)
        remedy = "Use another run.dir for a new run, give the old values to resume, or set run.resume = force to resume with the new ones"
        yield Change(f"{where} other values of {values}. {remedy}", f"these keys changed: {values}")
    if others := [name for key in files if key not in changed for name in changed_files(key, state.files, files)]:
        remedy = (
            "Use another run.dir for a new run, bring the old content back to resume, or set run.resume = force to resume with the new one"
        )
        yield Change(f"{where} another content of {listed(others)}. {remedy}", f"the content of these files changed: {listed(others)}")


def changed_files(key: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names of a key's files with other content. In a folder, a file that was added or removed counts as changed."""
    before, after = saved.get(key), now[key]
    if isinstance(before, dict) and isinstance(after, dict):
        return [f"{key} ({name})" for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    return [key] if before is not None and before != after else []


def changed_rows(config: Config, state: SavedState, digest: str) -> Iterator[Change]:
    """Yield a change if the training data differs under the same path: it would be another run. `digest`: of the rows read now."""
    if state.data == digest:
        return
    read = f", which were {' and '.join(state.data_versions)}" if state.data_versions else ""
    refusal = (
        f"data.train: its rows are not those that the run in {config.run.dir} was started with{read}, or the chat template or the "
        "tokenizer of model.path makes other tokens of them. Bring the old files back, use another run.dir for a new run, or set "
        "run.resume = force to resume with the new ones"
    )
    yield Change(refusal, "the rows of data.train changed, or the tokens that are made of them")


def shown(value: Any, rows: str = "rows given from Python") -> str:
    """Return a key's value as text. `rows`: what to call rows that are in memory."""
    return "left out" if value is None else rows if isinstance(value, str) and value.startswith(MEMORY) else json.dumps(value)
