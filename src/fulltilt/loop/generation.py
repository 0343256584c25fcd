"""Generation without a run: the model of a folder, or of a run's checkpoint, continues prompts through the rollout engine.

Enters: a model or run folder, settings of [eval], prompts. Leaves: groups in prompt order. Guaranteed: a run's checkpoint is used with the
run's own settings of model, adapters and prompts, so that samples are those that validation would see.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fulltilt.cluster.assembly import assemble_generation
from fulltilt.cluster.checks import TextCodec
from fulltilt.cluster.crew import Crew
from fulltilt.cluster.worker import Listener, enough_memory
from fulltilt.data.template import Encoded
from fulltilt.loop.experience import sampling_of
from fulltilt.records import Group, Prompt, RunWarning, UserError
from fulltilt.rollout.collect import collect
from fulltilt.rollout.sampler import Sampling
from fulltilt.schema import Config
from fulltilt.training.checkpoint import FINISHED, STATE, Checkpoint, CheckpointStore

PROMPT_KEYS = ("system", "template_args", "apply_template")  # keys of [data] for the form of prompts


def find_checkpoint(path: str, step: int | None) -> Checkpoint | None:
    """Return the checkpoint that a path names: the newest one of a run folder, or that of `step`, or the one that the path or its parent
    is. None for any other path, which is a model's."""
    folder = Path(os.path.expanduser(path))
    if os.path.isdir(folder / "checkpoints") or os.path.isfile(folder / "metrics.jsonl"):
        store = CheckpointStore(folder / "checkpoints", keep=1)
        found = store.latest() if step is None else store.at(step)
        for text in store.skipped if found else ():
            warnings.warn(f"skipped a damaged checkpoint: {text}", RunWarning, stacklevel=2)
        if found is None:
            raise UserError(f"{folder} holds no intact checkpoint{''.join(f'; {text}' for text in store.skipped)}. Give another folder")
        return found
    if step is not None:
        raise UserError(
            f"{path} is not the folder of a run, so it has no checkpoint of step {step}. Give a run folder, or leave the step out"
        )
    if not os.path.isdir(folder):
        return None
    for candidate in (folder.resolve(), folder.resolve().parent):  # the link `best` is a checkpoint too
        if (named := FINISHED.fullmatch(candidate.name)) and os.path.isfile(candidate / STATE):
            return CheckpointStore(candidate.parent, keep=1).at(int(named[1]))
    return None


def tables_for(path: str, found: Checkpoint | None) -> dict[str, dict[str, Any]]:
    """Make the tables of a configuration that generates with a model. They include some data, which is never read."""
    tables: dict[str, dict[str, Any]] = {"model": {"path": path}, "data": {"train": ".", "val": "."}, "run": {"steps": 1}}
    if found is None:
        return tables
    saved = {key: value for key, value in found.state()["config"].items() if value is not None}
    tables["data"] |= {key: saved[f"data.{key}"] for key in PROMPT_KEYS if f"data.{key}" in saved}
    tables |= {"model": {"path": str(found.model_folder)}, "rollout": {"stop": saved["rollout.stop"]}}
    if needs_base(found):
        of_model = {key.removeprefix("model."): value for key, value in saved.items() if key.startswith("model.")}
        of_lora = {key.removeprefix("lora."): value for key, value in saved.items() if key.startswith("lora.") and key != "lora.critic"}
        if commit := found.state().get("commits", {}).get(of_model["path"]):
            of_model["revision"] = commit  # the commit of the base that the adapters were trained on
        tables |= {"model": of_model, "lora": of_lora}
    return tables


def needs_base(found: Checkpoint) -> bool:
    """Return whether the checkpoint holds adapters rather than a whole model."""
    return not (found.model_folder / "config.json").is_file()


@dataclass(frozen=True, eq=False)
class Generation:
    """A loaded model that continues prompts."""

    crew: Crew
    sampling: Sampling

    def groups(self, prompts: Sequence[Encoded], seed: int, listen: Listener | None = None) -> tuple[Group, ...]:
        """Sample one group for each prompt. `listen`: called with a prompt's place and its sample's tokens so far, as they come."""
        made = [Prompt(uid, each.ids, each.text) for uid, each in enumerate(prompts)]
        self.crew.worker.listen(listen)
        with self.crew.phase("rollout"):
            return collect(self.crew.generate, made, self.sampling, seed, lambda group: None)


@contextlib.contextmanager
def open_generation(config: Config, texts: TextCodec, longest: int, max_new_tokens: int, found: Checkpoint | None) -> Iterator[Generation]:
    """Load the model for prompts of at most `longest` tokens."""
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"max_new_tokens": max_new_tokens})})
    resume = found if found and needs_base(found) else None
    with enough_memory("set-up"):
        crew = assemble_generation(config, texts.tokenizer, longest, resume)
    with contextlib.closing(crew):
        yield Generation(crew, sampling_of(config, config.eval, config.eval.samples_per_prompt))
