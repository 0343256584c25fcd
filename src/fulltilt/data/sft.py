"""Rows for supervised fine-tuning.

Enters: data files, the tokenizer, the `data` section. Leaves: a `RowSet` of `Row`s whose mask is true on the assistant's text and on the
token that ends each of its turns, and nowhere else. Guaranteed, for any chat template: every trained token comes after exactly the ids that
rollout would have read before it, generation prompt included; every trained turn ends with one end token.

Forms of a row: a prompt (`data.prompt_key`, string or messages) with a response (`data.response_key`, a string); or a conversation
(`data.messages_key`) that ends with the assistant's message, trained on all of the assistant's turns or on the last (`data.train_turns`),
except for those with `"weight": 0`.

How a conversation becomes rows: each trained turn is written as if it were the last, after its history as the template then writes it. If
this text continues that of the previous turn, the two are one row; so most templates give one row per conversation. If it does not, because
the template changes earlier turns (for example, drops their reasoning), the turn starts a row of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fulltilt.data.order import Columns, InEpochs, Limit, column, load_items, value_at
from fulltilt.data.template import Message, PromptEncoder
from fulltilt.records import Row, UserError
from fulltilt.words import many, shortened

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fulltilt.schema import DataConfig


class RowSet(InEpochs[Row]):
    noun = "row"


def load_sft(
    paths: str | Sequence[str], tokenizer: PreTrainedTokenizerBase, config: DataConfig, end_ids: Collection[int] = (),
    wrong: list[str] | None = None,
) -> RowSet:  # fmt: skip
    """Read, encode and filter the rows of all `paths`, as one data set.

    `end_ids`: further tokens that end a response (those of the generation config); the tokenizer's own always does.
    `wrong`: as in `load_items`.
    """
    writer = _Writer(tokenizer, config, end_ids)
    split: list[int] = []  # number of rows of each conversation that became several

    def parse(number: int, row: Columns) -> list[Row]:
        rows = writer.rows(row)
        split.extend([len(rows)] if len(rows) > 1 else [])
        return rows

    limits = [Limit("data.max_prompt_tokens", config.max_prompt_tokens, "prompt", lambda row: int(np.argmax(row.mask)))]
    if config.max_tokens is not None:
        limits.append(Limit("data.max_tokens", config.max_tokens, "row", lambda row: row.tokens))
    loaded = load_items(RowSet, paths, parse, limits, wrong)
    changed = f"; {many(len(split), 'conversation')} became {sum(split)} rows, since the chat template changes earlier turns"
    return replace(loaded, said=loaded.said + changed) if split else loaded


def _weighted_turns(conversation: Sequence[Message]) -> list[int]:
    """Return the indices of the assistant's messages, without those that have the weight 0 (a key of OpenAI's format)."""
    turns = []
    for place, message in enumerate(conversation):
        assistant = message["role"] == "assistant"
        if "weight" in message and (not assistant or message["weight"] not in (0, 1)):
            raise UserError(
                f"{_shown(message)} has the weight {message['weight']!r}. Only the assistant's messages have one: 0 (not trained on) or 1."
            )
        if assistant and message.get("weight", 1):
            turns.append(place)
    if not turns:
        raise UserError("every message of the assistant has the weight 0: there is nothing to train on. Remove the row.")
    return turns


class _Writer:
    """Writes the assistant's text after its prompt, as ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig, end_ids: Collection[int]) -> None:
        self._encoder = PromptEncoder(tokenizer, config)
        self._config = config
        if tokenizer.eos_token_id is None:
            raise UserError("SFT trains the model to end its response, and the tokenizer has no end-of-sequence token. Set its eos_token.")
        self._end = int(tokenizer.eos_token_id)
        self._ends = {self._end, *end_ids}

    def rows(self, row: Columns) -> list[Row]:
        """Return the training rows that a row of the data becomes."""
        prompt_key, response_key, messages_key = self._config.prompt_key, self._config.response_key, self._config.messages_key
        prompt, messages = value_at(row, prompt_key), value_at(row, messages_key)
        if prompt is not None and value_at(row, response_key) is not None:
            return self._answer(prompt, column(row, response_key, str, "a string") or "")
        if messages is None:
            raise UserError(
                f"an SFT row needs '{prompt_key}' and '{response_key}', or '{messages_key}'. Set data.prompt_key and data.response_key, or "
                "data.messages_key, to the columns you have, or fix the row."
            )
        conversation = self._encoder.messages(messages)
        if conversation is None or conversation[-1]["role"] != "assistant":
            raise UserError(f"'{messages_key}' must be a list of messages that ends with the assistant's. Fix the row or remove it.")
        turns = _weighted_turns(conversation)
        return self._conversation(conversation, turns if self._config.train_turns == "all" else turns[-1:])

    def _answer(self, prompt: object, response: str) -> list[Row]:
        history = self._encoder.messages(prompt)
        if history is not None:
            return self._conversation([*history, {"role": "assistant", "content": response}], [len(history)])
        if not response:
            raise UserError("the response is empty. Remove the row, or give it a response.")
        before = self._encoder.encode(prompt, "data.max_prompt_tokens").ids.tolist()
        return [_row(before, self._ended(self._encoder.encode_text(response, "data.max_tokens")))]

    def _conversation(self, messages: Sequence[Message], turns: Sequence[int]) -> list[Row]:
        """Return the rows that train the messages at `turns`."""
        rows: list[Row] = []
        for turn in turns:
            row = self._turn(messages[:turn], messages[turn], alone=len(turns) == 1)
            if rows and np.array_equal(row.ids[: rows[-1].tokens], rows[-1].ids):
                earlier = rows.pop()
                row.mask[: earlier.tokens] |= earlier.mask
            rows.append(row)
        return rows

    def _turn(self, history: Sequence[Message], answer: Message, alone: bool) -> Row:
        """Return the row of one message of the assistant after its history, written as the last message of a conversation. Only for a
        message that is trained on alone the limit that its length would break is known before it is tokenised: others may become part of a
        longer row."""
        if not any(_texts(answer)) and not answer.get("tool_calls"):
            raise UserError(f"the response is empty: {_shown(answer)}. Remove the row, or give it a response.")
        if not history or history[-1]["role"] == "assistant":
            raise UserError(
                f"{_shown(answer)} answers nothing: it must come after another message, not of the assistant. Join the two, give it "
                '"weight": 0, or remove the row.'
            )
        prompt = self._encoder.encode_messages(history, add_generation_prompt=True, limit="data.max_prompt_tokens" if alone else "")
        if not prompt:
            raise UserError(
                "the chat template writes nothing before the response. Set model.chat_template to one that writes the messages."
            )
        written = self._from_template(history, prompt, answer, "data.max_tokens" if alone else "")
        return _row(prompt, self._ended(written or self._from_text(answer)))

    def _from_template(self, history: Sequence[Message], prompt: list[int], answer: Message, limit: str) -> list[int] | None:
        """Return what the template writes after the prompt; None if the conversation, as it writes it, does not begin with the prompt."""
        whole = self._encoder.encode_messages([*history, answer], add_generation_prompt=False, limit=limit)
        if whole[: len(prompt)] != prompt:
            return None
        response = whole[len(prompt) :]
        # Some templates drop part of the answer, such as its reasoning; all of the row's answer must be trained on.
        written = self._encoder.decode(response)
        dropped = any(text.strip() not in written and self._as_decoded(text) not in written for text in _texts(answer))
        if dropped or (answer.get("tool_calls") and not self._encoder.reads("tool_calls")):
            return None
        return response

    def _from_text(self, answer: Message) -> list[int]:
        lost = [key for key in ("reasoning_content", "tool_calls") if answer.get(key)]
        if lost:
            raise UserError(
                f"{_shown(answer)}: the chat template does not write all of it after its prompt, so its {' and '.join(lost)} would be "
                "lost. Write them into 'content', or set model.chat_template."
            )
        return self._encoder.encode_text(_text(answer.get("content", "")))

    def _as_decoded(self, text: str) -> str:
        # Some tokenizers do not decode to exactly the text that they encoded.
        return self._encoder.decode(self._encoder.encode_text(text.strip())).strip()

    def _ended(self, response: list[int]) -> list[int]:
        """Return the response up to the first of the tokens that end it; one is added if there is none."""
        first = None
        for place in reversed(range(len(response))):
            if response[place] in self._ends:
                first = place
            # Templates put a line break after the end of a turn; sampling stops before it.
            elif self._encoder.decode([response[place]]).strip():
                break
        return [*response, self._end] if first is None else response[: first + 1]


def _row(prompt: list[int], response: list[int]) -> Row:
    ids = np.asarray([*prompt, *response], dtype=np.int64)
    return Row(ids=ids, mask=np.arange(len(ids)) >= len(prompt))


def _texts(message: Message) -> list[str]:
    return [text for text in (_text(message.get("content", "")), _text(message.get("reasoning_content", ""))) if text]


def _text(content: object) -> str:
    return "".join(part["text"] for part in content) if isinstance(content, list) else str(content)


def _shown(message: Message) -> str:
    text = " ".join(_text(message.get("content", "")).split())
    return f"the message {shortened(text, 43)!r} ({message['role']})"
