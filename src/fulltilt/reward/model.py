"""The reward model's input and its part in the scores: samples become rows for the model, and its numbers are added to their scores.

`RewardEncoder` writes prompt and response with the reward model's own tokenizer and chat template; the model may be of another family than
the policy. Rows are packed like any others; the mask marks the last token, where the model's number is read. `add_model_scores` adds the
numbers to the scores of the functions. Guaranteed: no text is cut, since a cut text would silently get a wrong score: a text that the
model cannot read is a failed reward, treated by `reward.on_error`; a sample whose function failed keeps its failure; a number that is not
finite, or too large for float32, stops the run.

    messages        the prompt's messages and the assistant's response, as the reward model's template writes a finished conversation
    plain string    prompt and response as one text, special tokens as the tokenizer adds them; the end token follows a response that
                    ended by itself
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from fulltilt.model import chat_template
from fulltilt.records import Group, Prompt, Row, Sample, Score, UserError
from fulltilt.reward.functions import fits
from fulltilt.schema import REWARD_MODEL, RewardConfig, reward_weights
from fulltilt.words import shortened

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXT_SHOWN = 80
REMEDY = "Set reward_model.chat_template to a file with a suitable chat template"


class RewardEncoder:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, longest: int | None = None) -> None:
        """`tokenizer`: the reward model's, with the chat template to use. `longest`: the model's context in tokens."""
        self.tokenizer = tokenizer
        self._longest = longest

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Raise UserError if prompts cannot be written for the reward model, before the first rollout instead of after it."""
        for prompt in prompts:
            ids = self._encode(prompt, Sample(0, np.zeros(0, np.int64), np.zeros(0, np.float32), "stop", "."))
            if self._unreadable(ids):
                raise UserError(
                    f"prompt {prompt.uid} cannot be scored: {self._unreadable(ids)}. Lower data.max_prompt_tokens, or use a reward model "
                    "with a longer context"
                )

    def rows(self, groups: Sequence[Group]) -> list[Row | str]:
        """Return one row for each sample, in the order of groups and samples. A string in place of a row says why the model cannot read the
        sample."""
        found: list[Row | str] = []
        for number, group in enumerate(groups):
            for sample in group.samples:
                ids = self._encode(group.prompt, sample)
                row = Row(ids, mask=np.arange(len(ids)) == len(ids) - 1, group=number)
                found.append(self._unreadable(ids) or row)
        return found

    def _unreadable(self, ids: np.ndarray) -> str | None:
        if self._longest is not None and len(ids) > self._longest:
            return f"the reward model reads at most {self._longest} tokens, prompt and response have {len(ids)} in its tokenizer"
        return "prompt and response are less than two tokens of the reward model" if len(ids) < 2 else None

    def _encode(self, prompt: Prompt, sample: Sample) -> np.ndarray:
        assert prompt.source, "every prompt says what it was made from"
        if isinstance(prompt.source, str):
            ids = self._plain(prompt.source + sample.text, ended=sample.finish == "stop")
        else:
            ids = self._conversation([*map(_plain_content, prompt.source), {"role": "assistant", "content": sample.text}])
        return np.asarray(ids, dtype=np.int64)

    def _plain(self, text: str, *, ended: bool) -> list[int]:
        ids = [int(token) for token in self.tokenizer(text)["input_ids"]]
        end = self.tokenizer.eos_token_id
        # Some tokenizers write the end token themselves, after every text.
        return [*ids, int(end)] if ended and end is not None and ids[-1:] != [end] else ids

    def _conversation(self, messages: list[dict[str, Any]]) -> list[int]:
        if not self.tokenizer.chat_template:
            raise UserError(f"prompts are messages, and the reward model's tokenizer has no chat template. {REMEDY}")
        try:
            text = chat_template.render(self.tokenizer, self.tokenizer.get_chat_template(), messages, add_generation_prompt=False)
        except UserError as error:
            raise UserError(f"reward model: {error} {REMEDY}") from error
        return [int(token) for token in self.tokenizer(text, add_special_tokens=False)["input_ids"]]


def _plain_content(message: Mapping[str, Any]) -> dict[str, Any]:
    """Join text in parts into one string: a template that does not support parts would write them as Python prints a list."""
    content = message.get("content")
    return {**message, "content": "".join(part["text"] for part in content)} if isinstance(content, list) else dict(message)


def model_weight(group: Group, config: RewardConfig) -> float | None:
    """Return the reward model's weight in a group's reward; None if the reward does not name the model."""
    return reward_weights(config.sources.get(group.prompt.data_source, config.function)).get(REWARD_MODEL)


def add_model_scores(
    groups: Sequence[Group], scores: Sequence[Sequence[Score]], numbers: Iterable[float | str], config: RewardConfig
) -> list[list[Score]]:
    """Return the scores with the reward model's numbers added. `numbers`: one for each sample of the groups whose reward names the model,
    in their order; a string in place of a number says why there is none."""
    left, added = iter(numbers), []
    for group, of_group in zip(groups, scores, strict=True):
        weight = model_weight(group, config)
        if weight is not None:
            samples = zip(group.samples, of_group, islice(left, len(group.samples)), strict=True)
            of_group = [_added(group, sample, score, weight, number, config) for sample, score, number in samples]
        added.append(list(of_group))
    return added


def _added(group: Group, sample: Sample, score: Score, weight: float, number: float | str, config: RewardConfig) -> Score:
    if score.error is not None:
        return score
    if isinstance(number, str):
        return Score(config.error_score if config.on_error == "score" else 0.0, error=number)
    value = score.value + weight * number
    if not fits(value):
        raise UserError(
            f"the reward model gave {number:g} for a sample of data source {group.prompt.data_source!r} that begins "
            f"{shortened(sample.text, TEXT_SHOWN)!r}, and its reward would be {value:g}. Check the model at reward_model.path; if half "
            "precision overflows, set model.dtype to float32"
        )
    return replace(score, value=value, parts={**score.parts, REWARD_MODEL: number})
