"""Groups carried over to the next step, in the form in which a checkpoint saves them.

Enters: groups with their scores. Leaves: arrays for the checkpoint's tensors and a list for its JSON; and the same groups again, given the
prompts of the data. Guaranteed: token ids, log-probs, scores and text come back bit for bit, through JSON too; a group whose prompt the
data no longer has is left out and counted, never joined to another prompt. Free of torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fulltilt.records import Group, Prompt, Sample, Score
from fulltilt.rollout.collect import ScoredGroup

Described = dict[str, Any]


def pack(kept: Sequence[ScoredGroup]) -> tuple[dict[str, np.ndarray], list[Described]]:
    """The tokens of all samples, concatenated, and a description of each group and its samples."""
    samples = [sample for each in kept for sample in each.group.samples]
    arrays = {
        "ids": np.concatenate([np.zeros(0, np.int64), *(sample.ids for sample in samples)]),
        "logprobs": np.concatenate([np.zeros(0, np.float32), *(sample.logprobs for sample in samples)]),
        "lengths": np.array([len(sample.ids) for sample in samples], dtype=np.int64),
    }
    assert arrays["ids"].dtype == np.int64 and arrays["logprobs"].dtype == np.float32, (
        "a sample's arrays do not have the types of its record"
    )
    assert len(arrays["ids"]) == len(arrays["logprobs"]) == arrays["lengths"].sum()
    return arrays, [_described(each) for each in kept]


def unpack(
    arrays: Mapping[str, np.ndarray], described: Sequence[Described], prompts_by_uid: Mapping[int, Prompt]
) -> tuple[list[ScoredGroup], int]:
    """The groups that `pack` was given, and how many are left out because the data no longer has their prompts."""
    assert sum(len(group["samples"]) for group in described) == len(arrays["lengths"])
    borders = np.cumsum(arrays["lengths"])[:-1]
    tokens = zip(np.split(arrays["ids"], borders), np.split(arrays["logprobs"], borders), strict=True)
    kept = []
    for group in described:
        # Read before looking for the prompt: the next group's tokens follow these, even if this group is left out.
        samples = tuple(Sample(entry["index"], *next(tokens), entry["finish"], _text(entry["text"]) or "") for entry in group["samples"])
        prompt = prompts_by_uid.get(group["uid"])
        if prompt is not None and _digest(prompt) == group["prompt"]:
            told = ((entry["value"], entry["parts"], _text(entry["error"]), _text(entry["answer"])) for entry in group["samples"])
            kept.append(ScoredGroup(Group(prompt, samples), tuple(Score(*each) for each in told), group["step"]))
    return kept, len(described) - len(kept)


def _described(kept: ScoredGroup) -> Described:
    prompt = kept.group.prompt
    samples = [
        {
            "index": sample.index,
            "finish": sample.finish,
            "text": _exact(sample.text),
            "value": score.value,
            "parts": dict(score.parts),
            "error": _exact(score.error),
            "answer": _exact(score.answer),
        }
        for sample, score in zip(kept.group.samples, kept.scores, strict=True)
    ]
    return {"uid": prompt.uid, "prompt": _digest(prompt), "step": kept.step, "samples": samples}


def _digest(prompt: Prompt) -> str:
    """Identifies the prompt's tokens: row numbers alone would match rows of other data."""
    return hashlib.sha256(prompt.ids.astype("<i8").tobytes()).hexdigest()[:16]


def _exact(text: str | None) -> str | list[int] | None:
    """Text in a form that JSON restores exactly: two adjacent lone surrogates would come back as one character."""
    if text is None or not any("\ud800" <= character <= "\udfff" for character in text):
        return text
    return [ord(character) for character in text]


def _text(saved: str | list[int] | None) -> str | None:
    return "".join(map(chr, saved)) if isinstance(saved, list) else saved
