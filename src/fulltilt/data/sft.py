"""Rows for supervised fine-tuning.

Enters: data files, the tokenizer, the `data` section. Leaves: a `RowSet` of `Row`s whose mask is true on the response and the token that
ends it, and nowhere on the prompt. Guaranteed: the prompt's ids are exactly those that rollout reads, generation prompt included, so what
is trained here is what is sampled there; every response ends with an end-of-sequence token, once.

Forms of a row: a prompt (`data.prompt_key`, string or messages) with a response (`data.response_key`, a string); or `messages`, the last
of which is the assistant's. A conversation with several turns of the assistant trains on the last one only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fulltilt.data.load import Columns, describe_loaded, load_items
from fulltilt.data.order import InEpochs
from fulltilt.data.template import Message, PromptEncoder, checked_messages
from fulltilt.records import Row, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fulltilt.config import DataConfig


@dataclass(frozen=True, eq=False)
class RowSet(InEpochs[Row]):
    """The rows of a data set, in the order of its files, and what was counted while they were read."""

    noun: ClassVar[str] = "rows"

    rows: tuple[Row, ...]
    rows_read: int
    too_long: int
    longest: int  # tokens of the longest row kept, prompt and response
    limit: int  # data.max_prompt_tokens

    @property
    def items(self) -> tuple[Row, ...]:
        return self.rows

    def describe(self) -> str:
        return describe_loaded(self.rows_read, self.too_long, self.limit, f"the longest row kept has {self.longest} tokens")


def load_sft(paths: str | Sequence[str], tokenizer: PreTrainedTokenizerBase, config: DataConfig, end_ids: Collection[int] = ()) -> RowSet:
    """Read, encode and filter the rows of all `paths`, as one data set.

    `end_ids`: further tokens that end a response (those of the generation config); the tokenizer's own always does.
    """
    writer = _ResponseWriter(tokenizer, PromptEncoder(tokenizer, config), end_ids)

    def parse(number: int, row: Columns) -> Row:
        prompt, answer = _prompt_and_answer(row, config)
        return writer.row(prompt, answer)

    loaded = load_items(paths, config.max_prompt_tokens, parse, lambda row: int(np.argmax(row.mask)))
    longest = max(row.tokens for row in loaded.items)
    return RowSet(loaded.items, loaded.rows_read, loaded.too_long, longest, config.max_prompt_tokens)


def _prompt_and_answer(row: Columns, config: DataConfig) -> tuple[object, Message]:
    """The prompt, and the assistant's message that answers it."""
    prompt, response, messages = row.get(config.prompt_key), row.get(config.response_key), row.get("messages")
    if prompt is not None and response is not None:
        if not isinstance(response, str):
            raise UserError(f"'{config.response_key}' is of type {type(response).__name__}; it must be a string.")
        return prompt, {"role": "assistant", "content": response}
    if messages is None:
        raise UserError(
            f"an SFT row needs '{config.prompt_key}' and '{config.response_key}', or 'messages'. Set data.prompt_key and data.response_key "
            "to the columns you have, or mend the row."
        )
    conversation = checked_messages(messages)
    if conversation[-1]["role"] != "assistant" or len(conversation) < 2:
        raise UserError("'messages' must end with the assistant's message, after at least one other. Mend the row or take it out.")
    return conversation[:-1], conversation[-1]


class _ResponseWriter:
    """Puts a response behind its prompt, as ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, encoder: PromptEncoder, end_ids: Collection[int]) -> None:
        if tokenizer.eos_token_id is None:
            raise UserError("SFT trains the model to end its response, and the tokenizer has no end-of-sequence token. Set its eos_token.")
        self._end = int(tokenizer.eos_token_id)
        self._ends = {self._end, *end_ids}
        self._encoder = encoder

    def row(self, prompt: object, answer: Message) -> Row:
        if not _text(answer) and not answer.keys() - {"role", "content"}:
            raise UserError("the response is empty. Take the row out, or give it a response.")
        prompt_ids, _ = self._encoder.encode(prompt)
        response = self._from_template(prompt, prompt_ids.tolist(), answer) or self._from_text(answer)
        mask = np.zeros(len(prompt_ids) + len(response), dtype=np.bool_)
        mask[len(prompt_ids) :] = True
        return Row(ids=np.concatenate([prompt_ids, np.asarray(response, dtype=np.int64)]), mask=mask)

    def _from_template(self, prompt: object, prompt_ids: list[int], answer: Message) -> list[int] | None:
        """What the template writes after the prompt, or None where it writes the conversation another way than the prompt."""
        messages = self._encoder.messages(prompt)
        if messages is None:
            return None
        whole = self._encoder.encode_messages([*messages, answer], add_generation_prompt=False)
        if whole[: len(prompt_ids)] != prompt_ids:
            return None
        response = whole[len(prompt_ids) :]
        # Some templates drop part of the answer, such as its reasoning; what the row says is to be learned must be learned.
        if _text(answer).strip() not in self._encoder.decode(response):
            return None
        return self._ended(response)

    def _from_text(self, answer: Message) -> list[int]:
        unwritten = sorted(answer.keys() - {"role", "content"})
        if unwritten:
            raise UserError(
                f"the chat template does not write the last message as a continuation of its prompt, so its {', '.join(unwritten)} would "
                "be lost. Write them into 'content', or set model.chat_template."
            )
        return self._ended(self._encoder.encode_text(_text(answer)))

    def _ended(self, response: list[int]) -> list[int]:
        """The response up to the token that ends it; that token is put there where it is missing."""
        last = max((place for place, token in enumerate(response) if token in self._ends), default=None)
        # Templates put a line break after the end of a turn; sampling stops before it.
        if last is not None and not self._encoder.decode(response[last + 1 :]).strip():
            return response[: last + 1]
        return [*response, self._end]


def _text(message: Message) -> str:
    content = message.get("content", "")
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
