"""Data sets of the Hugging Face hub.

Enters: a name such as `openai/gsm8k/main:train`, in its parts. Leaves: the files of that split in the hub's cache, and their commit.
Guaranteed: without a revision, the hub's own conversion to parquet is read, which every public data set has whatever its format, and
otherwise the repository's own files, chosen by its README.md or else by their names; only the README.md and the files of the split are
downloaded; files that were downloaded before are found without a network; any failure is a `UserError` in one line with the remedy.
`HF_ENDPOINT`, `HF_HOME` and `HF_TOKEN` are respected.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from fsspec.utils import glob_translate
from httpx import HTTPError
from huggingface_hub import HfApi, constants, metadata_load
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import disable_progress_bars
from pydantic import BaseModel
from yaml import YAMLError

from fulltilt.data.shards import choose_files, is_data
from fulltilt.records import UserError
from fulltilt.schema import HubDataset, why_invalid
from fulltilt.words import first_line, listed

_README = PurePosixPath("README.md")
_CONVERTED = "refs/convert/parquet"  # a branch that the hub itself writes: config/split/0000.parquet
_UNREACHABLE = (OfflineModeIsEnabled, HTTPError, ConnectionError, TimeoutError)


@dataclass(frozen=True)
class HubFiles:
    files: tuple[Path, ...]  # files in the order of the shards
    version: str  # e.g. "openai/gsm8k at commit 3f1a..."


def fetch(dataset: HubDataset) -> HubFiles:
    """Download the files of a split, unless they are already in the cache."""
    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, library_name="fulltilt")
    with _reporting(dataset):
        listing = _list_files(api, dataset)
        of_split = _of_conversion if listing.revision == _CONVERTED else _of_repository
        chosen = of_split(api, dataset, listing)
        patterns = sorted({_shards_like(name) if listing.cached else glob.escape(str(name)) for name in chosen})
        folder = _download(api, dataset.repo, listing.revision, patterns, listing.cached)
    return HubFiles(tuple(folder / name for name in chosen), f"{dataset.repo} at commit {folder.name}")


@dataclass(frozen=True)
class _Listing:
    revision: str
    names: list[PurePosixPath]
    cached: bool  # the hub cannot be reached: the names are those of files in the cache, which may be only some of the revision's


def _shards_like(name: PurePath) -> str:
    """Return a pattern for a file and the other shards of its data set, by which the hub's client knows whether one is missing in the
    cache."""
    return str(PurePosixPath(glob.escape(str(name.parent))) / re.sub(r"\d+", "[0-9]*", glob.escape(name.name)))


def _download(api: HfApi, repo: str, revision: str, patterns: list[str], cached: bool) -> Path:
    """Return the folder in the cache that has all files of these patterns, and download them if necessary."""
    options: dict[str, Any] = {"repo_type": "dataset", "allow_patterns": patterns, "local_files_only": cached}
    return Path(api.snapshot_download(repo, revision=revision, **options))


def _list_files(api: HfApi, dataset: HubDataset) -> _Listing:
    """Return the revision to read, and the names of its files."""
    if dataset.revision is not None:
        return _listing(api, dataset.repo, dataset.revision)
    with contextlib.suppress(RevisionNotFoundError, LocalEntryNotFoundError):
        converted = _listing(api, dataset.repo, _CONVERTED)
        if any(name.suffix == ".parquet" for name in converted.names):
            return converted
    return _listing(api, dataset.repo, "main")


def _listing(api: HfApi, repo: str, revision: str) -> _Listing:
    try:
        found = api.dataset_info(repo, revision=revision, timeout=30).siblings or []
        return _Listing(revision, sorted(PurePosixPath(entry.rfilename) for entry in found), cached=False)
    except _UNREACHABLE as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
            raise
        reason = error
    try:
        folder = _download(api, repo, revision, [], cached=True)
    except LocalEntryNotFoundError:
        raise LocalEntryNotFoundError(first_line(reason)) from reason
    return _Listing(revision, sorted(PurePosixPath(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()), cached=True)


# ---- the files of a split --------------------------------------------------------------------------------------------------------------


class _FilesOfSplit(BaseModel):
    split: str
    path: str | list[str]


class _CardConfig(BaseModel, coerce_numbers_to_str=True):
    """A configuration that the README.md of a repository defines in the YAML block at its beginning."""

    config_name: str = "default"
    default: bool = False
    data_dir: str = ""
    data_files: str | list[str] | list[_FilesOfSplit] | None = None  # patterns, relative to data_dir. Without a split, the split is `train`

    def splits(self) -> dict[str, list[str]]:
        """Return the patterns of each split; an empty dictionary if files are to be chosen by their names."""
        found: dict[str, list[str]] = {}
        for entry in [self.data_files] if isinstance(self.data_files, str) else self.data_files or []:
            files = entry if isinstance(entry, _FilesOfSplit) else _FilesOfSplit(split="train", path=entry)
            found.setdefault(files.split, []).extend([files.path] if isinstance(files.path, str) else files.path)
        return found


class _Card(BaseModel):
    configs: list[_CardConfig] = []


def _read_card(api: HfApi, repo: str, listing: _Listing) -> dict[str, _CardConfig]:
    """Return the configurations that the README.md of a repository defines, by their names."""
    if _README not in listing.names:
        return {}
    folder = _download(api, repo, listing.revision, [str(_README)], listing.cached)
    try:
        return {config.config_name: config for config in _Card.model_validate(metadata_load(folder / _README) or {}).configs}
    except (ValueError, YAMLError, RecursionError) as error:
        what = f"the YAML at the beginning of its {_README} cannot be used ({why_invalid(error)})"
        raise UserError(f"{repo}: {what}. Correct it, or download the data set and give the files.") from error


def _default_config(dataset: HubDataset, names: Sequence[str], configs: dict[str, _CardConfig]) -> str:
    """Return the configuration for a name without one. `names`: all configurations."""
    marked = [name for name in names if name in configs and configs[name].default]
    found = marked or [name for name in names if name == "default"] or names
    if len(found) > 1:
        raise _unknown_config(dataset, names)
    return found[0]


def _unknown_config(dataset: HubDataset, names: Sequence[str]) -> UserError:
    example = f"{dataset.repo}/{names[0]}{f'@{dataset.revision}' if dataset.revision else ''}:{dataset.split or 'train'}"
    return UserError(f"{dataset.repo}: name one of its configurations, which are {listed(names)}. For example {example}.")


def _of_conversion(api: HfApi, dataset: HubDataset, listing: _Listing) -> list[PurePath]:
    parquet = [name for name in listing.names if len(name.parts) == 3 and name.suffix == ".parquet"]
    configs, split, card = sorted({name.parts[0] for name in parquet}), dataset.split or "train", dict[str, _CardConfig]()
    if dataset.config is None and len(configs) > 1:
        with contextlib.suppress(RevisionNotFoundError, LocalEntryNotFoundError):
            card = _read_card(api, dataset.repo, _listing(api, dataset.repo, "main"))
    config = dataset.config or _default_config(dataset, configs, card)
    if config not in configs:
        raise _unknown_config(dataset, configs)
    splits = sorted({name.parts[1] for name in parquet if name.parts[0] == config})
    if f"partial-{split}" in splits:
        remedy = f"Name a revision to read the repository's own files, for example {dataset.repo}@main:{split}."
        raise UserError(f"{dataset.repo}: the hub converted only the first part of its split {split!r} to parquet. {remedy}")
    if split not in splits:
        raise UserError(f"{dataset.repo}: no split {split!r}, but {listed(splits)}. For example {dataset.repo}/{config}:{splits[0]}.")
    return [name for name in parquet if name.parts[:2] == (config, split)]


def _of_repository(api: HfApi, dataset: HubDataset, listing: _Listing) -> list[PurePath]:
    """Return the files that a configuration of the README.md names; if it defines none with this name, those of a folder with this name."""
    configs, names, split = _read_card(api, dataset.repo, listing), listing.names, dataset.split or "train"
    name = dataset.config or (_default_config(dataset, list(configs), configs) if configs else None)
    if name in configs:
        config, folder = configs[name], PurePosixPath(configs[name].data_dir)
        if splits := config.splits():
            return _matching(dataset, names, split, {key: [str(folder / pattern) for pattern in splits[key]] for key in splits})
        inside = [file for file in names if file.is_relative_to(folder)]
    elif name is not None and not any(name in file.parts for file in names):
        if configs:
            raise _unknown_config(dataset, list(configs))
        raise UserError(f"{dataset.repo}: no folder {name!r} in it; its files are {listed(names)}. Correct or remove the folder.")
    else:
        inside = [file for file in names if name is None or name in file.parts]
    return choose_files(inside, dataset.repo, split)


def _matching(dataset: HubDataset, names: Sequence[PurePosixPath], split: str, patterns: dict[str, list[str]]) -> list[PurePath]:
    """Return the data files of a split by its patterns, in the order of the patterns, and of the names within one pattern."""
    if split not in patterns:
        raise UserError(f"{dataset.repo}: no split {split!r}, but {listed(list(patterns))}. Name one of these after a colon.")
    found: dict[PurePath, None] = {}
    for pattern in patterns[split]:
        matching = [name for name in names if is_data(name) and re.match(glob_translate(pattern), str(name))]
        if not matching:
            raise UserError(f"{dataset.repo}: its {_README} names {pattern} for the split {split!r}, but no data file has such a name.")
        found |= dict.fromkeys(matching)
    return list(found)


@contextlib.contextmanager
def _reporting(dataset: HubDataset) -> Iterator[None]:
    """Turn errors of the hub's client into a UserError with the remedy."""
    try:
        yield
    except UserError:
        raise
    except GatedRepoError as error:
        remedy = "Accept its terms at its page on the hub, then run `hf auth login` or set HF_TOKEN."
        raise UserError(f"{dataset.repo}: the hub gives this data set only to people who accepted its terms. {remedy}") from error
    except RepositoryNotFoundError as error:
        remedy = "Correct the name. For a private data set, run `hf auth login` or set HF_TOKEN; for a file or folder, give its path."
        raise UserError(f"{dataset.repo}: no file or folder here, and no data set on the hub that you can read. {remedy}") from error
    except RevisionNotFoundError as error:
        raise UserError(f"{dataset.repo}: has no revision {dataset.revision!r}. Name a branch, a tag or a commit of it.") from error
    except (*_UNREACHABLE, OSError) as error:
        if isinstance(error, OSError) and error.errno and not isinstance(error, _UNREACHABLE):
            remedy = "Make room there and check its permissions, or set HF_HOME to another folder."
            what = f"the hub's cache in {constants.HF_HUB_CACHE} cannot be used ({error.strerror})"
            raise UserError(f"{dataset.repo}: {what}. {remedy}") from error
        remedy = "Check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or download the data set and give its folder."
        where = "no file or folder here, not whole in the hub's cache, and the hub cannot be reached"
        raise UserError(f"{dataset.repo}: {where} ({first_line(error)}). {remedy}") from error
    except ValueError as error:
        raise UserError(f"{dataset.repo}: the hub's answer cannot be used ({first_line(error)}). Check HF_ENDPOINT.") from error
