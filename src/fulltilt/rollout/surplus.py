"""Groups carried over to the next step, in the form in which a checkpoint saves them.

Enters: groups with their scores. Leaves: arrays for the checkpoint's tensors and a list for its JSON; and the same groups again, given the
prompts of the data. Workers that hold groups write their own arrays, which include the texts: a part for each worker. Guaranteed: token
ids, log-probs, scores and text come back bit for bit, through JSON too; a group whose prompt the data no longer has is left out and
counted, never joined to another prompt. Free of torch.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fulltilt.records import AnyGroup, AnySample, Group, GroupHead, Prompt, Sample, Score
from fulltilt.rollout.collect import ScoredGroup

Described = dict[str, Any]


def pack(kept: Sequence[ScoredGroup]) -> tuple[dict[str, np.ndarray], list[Described]]:
    """Return the tokens of all samples, concatenated, and a description of each group and its samples."""
    return pack_tokens([sample for each in kept for sample in samples_of(each.group)]), [described(each) for each in kept]


def pack_samples(groups: Sequence[Group]) -> dict[str, np.ndarray]:
    """Return tokens and texts of all samples, concatenated: everything that `described` leaves out if another process holds the samples."""
    samples = [sample for group in groups for sample in group.samples]
    texts = [sample.text.encode("utf-8", errors="surrogatepass") for sample in samples]
    return {
        **pack_tokens(samples),
        "texts": np.frombuffer(bytearray(b"".join(texts)), dtype=np.uint8),
        "text_lengths": np.array(list(map(len, texts)), dtype=np.int64),
    }


def pack_tokens(samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    arrays = {
        "ids": np.concatenate([np.zeros(0, np.int64), *(sample.ids for sample in samples)]),
        "logprobs": np.concatenate([np.zeros(0, np.float32), *(sample.logprobs for sample in samples)]),
        "lengths": np.array([len(sample.ids) for sample in samples], dtype=np.int64),
    }
    assert arrays["ids"].dtype == np.int64 and arrays["logprobs"].dtype == np.float32, (
        "a sample's arrays do not have the types of its record"
    )
    assert len(arrays["ids"]) == len(arrays["logprobs"]) == arrays["lengths"].sum()
    return arrays


def unpack(
    parts: Mapping[int, Mapping[str, np.ndarray]], described: Sequence[Described], prompts_by_uid: Mapping[int, Prompt]
) -> tuple[list[ScoredGroup], int]:
    """Return the groups that `pack` was given, and how many are left out because the data no longer has their prompts. `parts`: the arrays,
    by the worker that wrote them."""
    assert sum(len(group["samples"]) for group in described) == sum(len(arrays["lengths"]) for arrays in parts.values())
    saved = {part: _saved_samples(arrays) for part, arrays in parts.items()}
    kept = []
    for group in described:
        # Read before looking for the prompt: the next group's tokens follow these, even if this group is left out.
        samples = tuple(_sample(entry, *next(saved[group.get("part", 0)])) for entry in group["samples"])
        prompt = prompts_by_uid.get(group["uid"])
        if prompt is not None and _digest(prompt) == group["prompt"]:
            told = ((entry["value"], entry["parts"], _text(entry["error"]), _text(entry["answer"])) for entry in group["samples"])
            kept.append(ScoredGroup(Group(prompt, samples), tuple(Score(*each) for each in told), group["step"]))
    return kept, len(described) - len(kept)


def _saved_samples(arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray, str | None]]:
    """Yield tokens, log-probs and text of each sample; None if the text was not packed with them."""
    borders = np.cumsum(arrays["lengths"])[:-1]
    texts: Iterable[str | None] = itertools.repeat(None, len(arrays["lengths"]))
    if "texts" in arrays:
        written = np.split(arrays["texts"], np.cumsum(arrays["text_lengths"])[:-1])
        texts = (each.tobytes().decode("utf-8", errors="surrogatepass") for each in written)
    return zip(np.split(arrays["ids"], borders), np.split(arrays["logprobs"], borders), texts, strict=True)


def _sample(entry: Described, ids: np.ndarray, logprobs: np.ndarray, text: str | None) -> Sample:
    return Sample(entry["index"], ids, logprobs, entry["finish"], (_text(entry["text"]) or "") if text is None else text)


def samples_of(group: AnyGroup) -> tuple[Sample, ...]:
    assert isinstance(group, Group), "another process holds the samples"
    return group.samples


def described(kept: ScoredGroup) -> Described:
    """Describe a group with its scores, for JSON. If a worker holds the samples: without their texts, and with the worker's rank."""
    prompt, group = kept.group.prompt, kept.group
    own: Sequence[AnySample] = group.samples
    samples = [
        {
            "index": sample.index,
            "finish": sample.finish,
            **({"text": _exact(sample.text)} if isinstance(sample, Sample) else {}),
            "value": score.value,
            "parts": dict(score.parts),
            "error": _exact(score.error),
            "answer": _exact(score.answer),
        }
        for sample, score in zip(own, kept.scores, strict=True)
    ]
    part = {"part": group.home} if isinstance(group, GroupHead) else {}
    return {"uid": prompt.uid, "prompt": _digest(prompt), "step": kept.step, **part, "samples": samples}


def _digest(prompt: Prompt) -> str:
    """Return a digest of the prompt's tokens: row numbers alone would match rows of other data."""
    return hashlib.sha256(prompt.ids.astype("<i8").tobytes()).hexdigest()[:16]


def _exact(text: str | None) -> str | list[int] | None:
    """Return text in a form that JSON restores exactly: two adjacent lone surrogates would come back as one character."""
    if text is None or not any("\ud800" <= character <= "\udfff" for character in text):
        return text
    return [ord(character) for character in text]


def _text(saved: str | list[int] | None) -> str | None:
    return "".join(map(chr, saved)) if isinstance(saved, list) else saved
